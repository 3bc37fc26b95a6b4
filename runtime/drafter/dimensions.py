"""The dimensions of one draft, for the persistent drafter and its reference twin."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

import torch

from ..errors import UnsupportedModelError, UsageError, misfit
from ..settings import MAX_NEW_TOKENS, TreeConfig, explain_fields, explain_unknown

if TYPE_CHECKING:
    from .weights import HeadWeights

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
}
"""Activations of the persistent drafter, by their names in `transformers.activations.ACT2FN`."""
WINDOW_MARGIN = 256
"""Pairs that a cache of the window alone holds before the window, and has places for behind the newest."""


@explain_fields
@dataclass(frozen=True)
class DrafterConfig:
    """Every dimension of a draft; names as in `transformers` configurations and in EAGLE.

    ``kind`` "eagle3" or "eagle" (EAGLE-1/2); ``feature_width`` the target's features, all taps together;
    ``draft_vocab`` rows of the LM head in use; ``num_slots`` sequences side by side; ``max_positions`` of a sequence,
    the tree's ``depth * top_k`` included. ``dtype`` is bf16 or fp16 (fp32 for tests);
    ``weight_dtype`` the same or float8_e4m3fn. ``activation`` is one of the values of `ACTIVATIONS`; the options of
    EAGLE-3 heads (``norm_before_residual``, ``norm_output``, ``tap_norms``: RMSNorms before fc, 1 for ``input_norm``,
    one a tap for ``fc_norm``) are those of `HeadWeights`, and so are ``sliding_window`` and ``window_sinks``. Raises
    `UsageError` for dimensions that do not fit each other; the kernel's own limits are those of `check_kernel_limits`.
    """

    kind: str
    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    feature_width: int
    target_vocab: int
    draft_vocab: int
    depth: int
    top_k: int
    total_tokens: int
    norm_eps: float
    num_slots: int
    max_positions: int
    dtype: torch.dtype = torch.bfloat16
    weight_dtype: torch.dtype = torch.bfloat16
    has_fc: bool = True
    has_fc_bias: bool = False
    has_qkv_bias: bool = False
    has_o_bias: bool = False
    has_mlp_bias: bool = False
    has_head_norms: bool = False
    """RMSNorms over each head of q and of k."""
    activation: str = "silu"
    norm_before_residual: bool = False
    norm_output: bool = False
    tap_norms: int = 0
    sliding_window: int | None = None
    window_sinks: int = 0
    holds_window: bool = False
    """Whether the KV cache holds what the window needs alone: `reference.cache_row` says where."""

    def __post_init__(self) -> None:
        tree = TreeConfig(self.depth, self.top_k, self.total_tokens)
        least = dict.fromkeys(("hidden", "intermediate", "num_heads", "num_kv_heads", "feature_width", "num_slots"), 1)
        least |= {"head_dim": 2, "target_vocab": self.top_k, "draft_vocab": self.top_k}
        least["max_positions"] = tree.depth * tree.top_k + 1
        for name, low in least.items():
            value: Any = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, Integral) or value < low:
                raise misfit(name, f"an integer of at least {low}", value)
            # NumPy's integers become Python's, which are what is compiled for.
            object.__setattr__(self, name, int(value))
        eps: Any = self.norm_eps
        taps, window = self.tap_norms, self.sliding_window
        has_one_tap = self.kind == "eagle" or not self.has_fc
        for field, holds, expected in (
            ("draft_vocab", self.draft_vocab <= self.target_vocab, f"at most target_vocab = {self.target_vocab}"),
            ("norm_eps", isinstance(eps, Real) and 0 <= float(eps) < math.inf, "a number of at least 0"),
            ("weight_dtype", self.weight_dtype in (self.dtype, torch.float8_e4m3fn), f"{self.dtype} or float8_e4m3fn"),
            ("num_heads", self.num_heads % self.num_kv_heads == 0, f"a multiple of num_kv_heads = {self.num_kv_heads}"),
            ("head_dim", self.head_dim % 2 == 0, "even"),
            ("kind", self.kind in ("eagle3", "eagle"), '"eagle3" or "eagle"'),
            ("feature_width", not has_one_tap or self.feature_width == self.hidden, f"hidden = {self.hidden} here"),
            ("sliding_window", window is None or window >= 1, "at least 1, or None"),
            (
                "tap_norms",
                not taps or (self.has_fc and taps > 0 and self.feature_width % taps == 0),
                f"RMSNorms before an fc, which cut feature_width = {self.feature_width} into equal parts",
            ),
        ):
            if not holds:
                raise misfit(field, expected, getattr(self, field))

    @classmethod
    @explain_unknown({})
    def of(
        cls,
        head: HeadWeights,
        tree: TreeConfig,
        num_slots: int,
        capacity: int,
        weight_dtype: torch.dtype | None = None,
        holds_window: bool = False,
    ) -> DrafterConfig:
        """Read a head's dimensions; ``capacity`` tokens per slot, with room for the tree added."""
        return cls(
            **head_dimensions(head),
            **asdict(tree),
            draft_vocab=head.draft_vocab,
            num_slots=num_slots,
            max_positions=capacity + tree.depth * tree.top_k,
            weight_dtype=weight_dtype or head.dtype,
            holds_window=holds_window,
        )

    @property
    def tree(self) -> TreeConfig:
        """Shape of the draft tree."""
        return TreeConfig(self.depth, self.top_k, self.total_tokens)

    def with_tree(self, tree: TreeConfig) -> DrafterConfig:
        """Return the configuration of another tree, with room for as many tokens."""
        if tree == self.tree:
            return self
        max_positions = self.num_tokens + tree.depth * tree.top_k + tree.new_tokens_width
        return replace(self, **asdict(tree), max_positions=max_positions)

    @property
    def tree_rows(self) -> int:
        """KV rows that a tree takes after its prefix."""
        return self.depth * self.top_k

    @property
    def num_tokens(self) -> int:
        """Tokens of a sequence that the cache has room for, beside a tree and the new tokens of a step."""
        return max(1, self.max_positions - self.tree_rows - self.tree.new_tokens_width)

    @property
    def cache_rows(self) -> int:
        """Rows of the KV cache per slot."""
        if self.cached_pairs is None:
            return self.max_positions
        ahead = self.tree_rows + self.tree.new_tokens_width + WINDOW_MARGIN
        return min(self.max_positions, self.cached_pairs + ahead)

    @property
    def cached_pairs(self) -> int | None:
        """Last pairs of a sequence that are surely in the KV cache; None for all."""
        window = self.sliding_window if self.holds_window else None
        return self.window_sinks + window + WINDOW_MARGIN if window else None

    @property
    def has_fp8(self) -> bool:
        """Tell if weights are FP8, and operands pairs of e4m3 numbers."""
        return self.weight_dtype != self.dtype

    @property
    def qkv_size(self) -> int:
        """Outputs of the fused q, k, v projection."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def qkv_in(self) -> int:
        """Inputs of the q, k, v projection: (embedding, feature) in EAGLE-3, the fused feature in EAGLE-1/2."""
        return 2 * self.hidden if self.kind == "eagle3" else self.hidden

    @property
    def fc_in(self) -> int:
        """Inputs of ``fc``."""
        return self.feature_width if self.kind == "eagle3" else 2 * self.hidden

    @property
    def embed_rows(self) -> int:
        """Embedding rows kept per sequence: the new tokens, or every child of a level."""
        return max(MAX_NEW_TOKENS, self.top_k**2)


def check_kernel_limits(cfg: DrafterConfig) -> None:
    """Check the persistent kernel's limits: raises `UnsupportedModelError` for the activation, else `UsageError`."""
    check_kernel_activation(cfg.activation)
    bounds = {
        "hidden": (16, 16384),
        "intermediate": (16, 65536),
        "num_heads": (1, 1024),
        "head_dim": (2, 256),
        "feature_width": (16, 1 << 20),
        "target_vocab": (1, 1 << 30),
        "draft_vocab": (1, 262144),
        "depth": (1, 10),
        "top_k": (1, 16),
        "total_tokens": (2, 128),
        "num_slots": (1, 16),
        "max_positions": (1, 131072 + 256),
    }
    for name, (low, high) in bounds.items():
        value = getattr(cfg, name)
        if not low <= value <= high:
            raise _beyond_kernel(f"{name} from {low} to {high}", value)
    if cfg.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise _beyond_kernel("bfloat16, float16 or float32", cfg.dtype)
    # Matrix units take 32 bytes of a row at a time: 16 numbers, of FP8 32.
    unit, weights = (32, " with FP8 weights") if cfg.has_fp8 else (16, "")
    sizes = {name: getattr(cfg, name) for name in ("hidden", "intermediate", "feature_width")}
    for name, size in {**sizes, "num_heads * head_dim": cfg.num_heads * cfg.head_dim}.items():
        if size % unit:
            raise _beyond_kernel(f"{name} in multiples of {unit}{weights}", size)


def _beyond_kernel(takes: str, found: object) -> UsageError:
    return UsageError(f"The persistent drafter takes {takes}; got {found!r}.")


def check_kernel_activation(activation: str) -> None:
    """Raise `UnsupportedModelError` for an activation that the persistent kernel does not compute."""
    if activation not in {*ACTIVATIONS, *ACTIVATIONS.values()}:
        known = 'drafter="triton" computes the activations SiLU, GELU and its tanh form'
        raise UnsupportedModelError(f'{known}; the head has {activation}. Use drafter="reference".')


def check_head_fits(cfg: DrafterConfig, head: HeadWeights) -> None:
    """Raise `UsageError` for a configuration of another head."""
    for name, value in head_dimensions(head).items():
        if value != getattr(cfg, name):
            problem = f"The head has {name} = {value}, the configuration {getattr(cfg, name)}"
            raise UsageError(f"{problem}; make it with DrafterConfig.of(head, ...).")


def head_dimensions(head: HeadWeights) -> dict[str, Any]:
    """Return the fields of a configuration that follow from its head: all but ``draft_vocab``, which may be smaller."""
    w, is_eagle3 = head.tensors, head.kind == "eagle3"
    has_fc = not is_eagle3 or head.feature_width != head.hidden
    same = ("kind", "hidden", "num_heads", "num_kv_heads", "head_dim", "feature_width")
    return {name: getattr(head, name) for name in (*same, "norm_eps", "dtype", "sliding_window", "window_sinks")} | {
        "intermediate": w["mlp.gate_proj.weight"].shape[0],
        "target_vocab": head.embedding.shape[0],
        "has_fc": has_fc,
        "has_fc_bias": has_fc and "fc.bias" in w,
        "has_qkv_bias": "self_attn.q_proj.bias" in w,
        "has_o_bias": "self_attn.o_proj.bias" in w,
        "has_mlp_bias": "mlp.gate_proj.bias" in w,
        "has_head_norms": head.head_norms is not None,
        "activation": ACTIVATIONS.get(head.activation, head.activation),
        "norm_before_residual": is_eagle3 and head.norm_before_residual,
        "norm_output": is_eagle3 and head.norm_output,
        "tap_norms": len(head.tap_norms) if has_fc and is_eagle3 else 0,
    }
