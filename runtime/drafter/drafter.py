"""The drafter of a model: how it is chosen, and its state on the device.

`Drafter` is a head, the shape of its trees, and a backend. `Drafter.on_slots` allocates buffers for a number of
sequences. A draft reads lengths, new tokens and active slots from `Buffers`, features from one tensor: nothing passes
through the host. "triton" is the persistent kernel; "reference" gives the same results with
PyTorch and waits for the device; a `DraftFunction` is a drafter of the caller's own over the same buffers.

``draft_weights`` "auto" stores matrices in the model's own type, also where FP8 would be faster: FP8 drafts slightly
other trees, and from eight sequences at a time on it is slower (docs/kernels.md).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import torch
from eagle_slim.convert.heads.open import DraftHead
from torch import Tensor
from transformers.activations import ACT2FN

from ..errors import DrafterError, SpeedWarning, UnsupportedModelError, UsageError, check_choice, misfit
from ..ops import lacks_fp8
from ..settings import TreeConfig
from .buffers import SHARED, Buffers, cache_shape
from .dimensions import DrafterConfig, check_kernel_activation, check_kernel_limits
from .kernels.grid_barrier import ERROR
from .kernels.persistent import is_interpreted
from .launch import BACKENDS, DraftFunction, allocate_buffers, run_draft, write_pairs
from .packing import SharedPacking, Weights
from .rope import rotary_embedding
from .weights import HeadWeights

DRAFTERS = ("auto", *BACKENDS)
CHOICES = ("auto", "bf16", "fp8")
NAMES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.float8_e4m3fn: "fp8",
}
"""Short names of the types that matrices can be stored in."""


@dataclass(eq=False)
class Drafter:
    """A head, the shape of its trees, and the backend that drafts them.

    ``packing``: the head as the kernel reads it, shared by all drafters over it; "triton" alone has one. Raises
    `UsageError` when the draft vocabulary has fewer rows than ``top_k``; for "triton" as `check_kernel_limits`.
    """

    weights: HeadWeights
    tree: TreeConfig
    backend: str | DraftFunction = "reference"
    packing: SharedPacking | None = None
    reason: str = "asked for"
    """Why this backend."""

    def __post_init__(self) -> None:
        check_tree_fits(self.weights.draft_vocab, self.tree)
        if self.backend == "triton":
            if self.packing is None:
                self.packing = SharedPacking(self.weights)
            check_kernel_limits(self._config(1, 1))

    @property
    def name(self) -> str:
        """The backend's name."""
        backend = self.backend
        return getattr(backend, "__name__", type(backend).__name__) if callable(backend) else backend

    @property
    def stored_dtype(self) -> torch.dtype:
        """Dtype that the head's matrices are stored in."""
        return self.weights.dtype if self.packing is None else self.packing.weight_dtype

    @property
    def draft_bytes(self) -> int:
        """Bytes of weights read to draft a tree: on each level the layer and the LM head."""
        head = self.weights
        num_weights = sum(tensor.numel() for tensor in (*head.tensors.values(), head.lm_head))
        # Norms and biases stay as they are; they are negligible.
        return num_weights * self.stored_dtype.itemsize * (self.tree.depth + 1)

    def like(self, weights: HeadWeights, tree: TreeConfig, order: Tensor | None = None) -> Drafter:
        """Return a drafter for another tree or draft vocabulary of this head.

        It shares what is packed, unless its rows are not the first of those; then it packs its own, by ``order``:
        int64 [draft_vocab], LM-head rows best first.
        """
        packing = self.packing
        if packing is not None and not packing.serves(weights):
            packing = SharedPacking(weights, order, packing.weight_dtype)
        return replace(self, weights=weights, tree=tree, packing=packing)

    def allocate_cache(self, num_slots: int, capacity: int) -> tuple[Tensor, Tensor]:
        """Allocate keys and values for drafters of trees of this depth and top_k: of a head's window, no more."""
        cfg = self._config(num_slots, capacity, holds_window=True)
        keys = torch.zeros(cache_shape(cfg), dtype=cfg.dtype, device=self.weights.device)
        return keys, torch.zeros_like(keys)

    def on_slots(self, num_slots: int, capacity: int, cache: tuple[Tensor, Tensor] | None = None) -> BufferedDrafter:
        """Allocate buffers for ``num_slots`` sequences of up to ``capacity`` tokens.

        ``cache``: keys and values that other drafters of the head use too, for as many slots or more, as
        `allocate_cache` makes them. Raises as `DrafterConfig.of` and `Weights.pack`.
        """
        return BufferedDrafter(self, self._config(num_slots, capacity, cache is not None), cache)

    def _config(self, num_slots: int, capacity: int, holds_window: bool = False) -> DrafterConfig:
        num_tokens, holds_window = capacity + self.tree.new_tokens_width, holds_window and not callable(self.backend)
        return DrafterConfig.of(self.weights, self.tree, num_slots, num_tokens, self.stored_dtype, holds_window)


class BufferedDrafter:
    """A drafter over buffers; see `Drafter.on_slots`."""

    def __init__(self, drafter: Drafter, cfg: DrafterConfig, cache: tuple[Tensor, Tensor] | None = None) -> None:
        self.drafter, self.cfg, self.head, self.tree = drafter, cfg, drafter.weights, drafter.tree
        self.weights = Weights(self.head) if drafter.packing is None else drafter.packing.weights(cfg)
        slots, device = cfg.num_slots, self.head.device
        shared = None if cache is None else (cache[0][:slots], cache[1][:slots])
        self.bufs = allocate_buffers(cfg, self.weights, shared)
        shape = (*self.bufs.new_tokens.shape, cfg.feature_width)
        self.features = torch.zeros(shape, dtype=self.head.dtype, device=device)
        """[slots, 64 or more, feature_width]: those of ``bufs.new_tokens``, written by whoever commits them."""
        barrier = self.bufs.workspace.get("barrier", torch.zeros(4, dtype=torch.int32, device=device))
        self.error = barrier[ERROR : ERROR + 1]
        """int32 [1]: not 0 after a draft whose grid barrier timed out."""
        # Built before capture.
        _ = self.head.kv_projection

    @property
    def waits(self) -> bool:
        """Whether a draft waits for the device, so that no CUDA graph can hold it."""
        return self.drafter.backend != "triton"

    def of_tree(self, tree: TreeConfig) -> BufferedDrafter:
        """Return a drafter of smaller trees over the same buffers and with the same compiled kernel.

        Features, inputs and KV cache are shared, so steps may draft with either in any order; ``bufs`` holds the
        outputs in the smaller tree's shapes. Raises as `Buffers.of_tree`.
        """
        other = copy(self)
        other.tree, other.bufs = tree, self.bufs.of_tree(tree)
        return other

    def of_bound(self, tree: TreeConfig) -> BufferedDrafter:
        """Return a drafter of trees up to ``tree``, of another ``top_k``, over the same features, inputs and KV cache.

        It has outputs, a workspace and a compiled kernel of its own, and the same ``error``. Raises `UsageError` for a
        tree of more KV rows or longer paths than there is room for.
        """
        cfg = self.cfg.with_tree(tree)
        if cfg.tree_rows > self.cfg.tree_rows or tree.new_tokens_width > self.cfg.tree.new_tokens_width:
            raise misfit("tree", f"one of at most {self.cfg.tree_rows} KV rows (depth * top_k)", tree)
        other, params = copy(self), None if self.weights.packed is None else self.weights.packed.launches(cfg)[0]
        other.tree, other.cfg = tree, cfg
        other.bufs = Buffers.allocate(cfg, self.head, params, {name: getattr(self.bufs, name) for name in SHARED})
        if params is not None:
            other.bufs.workspace["barrier"] = self.bufs.workspace["barrier"]
        return other

    def draft(self) -> None:
        """Draft the trees of the active slots into the buffers."""
        run_draft(self.cfg, self.features, self.weights, self.bufs, self.drafter.backend)

    def prefill(self, features: Tensor, next_tokens: Tensor, positions: Tensor, rows: Tensor, slots: Tensor) -> None:
        """Write the keys and values of a prompt's pairs to the cache; arguments as `launch.write_pairs`."""
        write_pairs(self.head, features, next_tokens, positions, rows, slots, self.bufs)

    def take_pairs(
        self, prefix: Tensor, num_new: Tensor, new_tokens: Tensor, active_inverse: Tensor, features: Tensor
    ) -> None:
        """Write the waiting pairs of running slots into the cache, but for each last one, which the next draft takes.

        Arguments as the inputs in `Buffers`, which they may be, and `features`; what is left becomes the inputs. Slots
        that do not run are left alone, so that this may be captured while others run. Waits for nothing.
        """
        slots, width = new_tokens.shape
        step = torch.arange(width, dtype=torch.int32, device=prefix.device)
        last = torch.where(active_inverse >= 0, num_new - 1, 0).clamp(min=0)
        rows, is_before = prefix[:, None] + step, step < last[:, None]
        self.prefill(
            features.flatten(0, 1),
            new_tokens.clamp(min=0).flatten(),
            torch.where(is_before, rows, 0).flatten(),
            torch.where(is_before, rows, -1).flatten(),
            torch.arange(slots, dtype=torch.int32, device=step.device),
        )
        at = last[:, None].long()
        newest, feature = new_tokens.gather(1, at), features.gather(1, at[..., None].expand(-1, 1, features.shape[2]))
        self.bufs.prefix.copy_(prefix + last)
        self.bufs.num_new.copy_(num_new - last)
        self.bufs.new_tokens[:, :1], self.features[:, :1] = newest, feature


def bound_of(trees: Iterable[TreeConfig]) -> TreeConfig:
    """Return the smallest bound of trees of one ``top_k``: one compiled kernel drafts them all."""
    trees = [*trees]
    return TreeConfig(max(tree.depth for tree in trees), trees[0].top_k, max(tree.total_tokens for tree in trees))


def check_finished(bufs: Buffers) -> None:
    """Wait for the device and raise `DrafterError` if a draft did not finish properly."""
    if bufs.workspace and int(bufs.workspace["barrier"][ERROR]):
        reset_barrier(bufs)
        raise timed_out()


def reset_barrier(bufs: Buffers) -> None:
    """Make a grid barrier that timed out usable again."""
    for tensor in barriers_of(bufs):
        tensor.zero_()


def barriers_of(bufs: Buffers) -> list[Tensor]:
    """Return the tensors in which a kernel's programs wait for one another: all zero between drafts."""
    return [bufs.workspace[name] for name in ("barrier", "node_arrivals") if name in bufs.workspace]


def timed_out() -> DrafterError:
    """Return the error of a draft that did not finish."""
    problem = "The drafter's grid barrier timed out: not all its programs were running at once, or one of them failed"
    return DrafterError(f"{problem}. The draft is undefined. Is another process using the GPU's SMs exclusively?")


def check_tree_fits(draft_vocab: int, tree: TreeConfig) -> None:
    """Raise `UsageError` unless a node can have ``top_k`` children among ``draft_vocab`` rows of the LM head."""
    if draft_vocab < tree.top_k:
        raise misfit("top_k", f"at most the {draft_vocab} ids that are drafted over", tree.top_k)


def check_drafter(drafter: str | DraftFunction, device: torch.device, names: Sequence[str] = DRAFTERS) -> None:
    """Refuse a drafter that cannot run: `UsageError` for an unknown name, `DrafterError` for "triton" without a GPU.

    With ``TRITON_INTERPRET=1`` in the environment the kernel runs on the CPU, in Triton's interpreter.
    """
    if callable(drafter):
        return
    check_choice("drafter", drafter, names)
    if drafter == "triton" and device.type != "cuda" and not (device.type == "cpu" and is_interpreted()):
        raise DrafterError(
            f"drafter (or backend) = 'triton' needs an NVIDIA GPU, and the model is on {device}. Use 'reference', or "
            "TRITON_INTERPRET=1 in the environment to run it in Triton's interpreter, which computes bfloat16 wrongly."
        )


def check_draft_weights(
    draft_weights: str, drafter: Any, device: torch.device, dtype: torch.dtype | None = None
) -> None:
    """Refuse a type that the weights cannot be stored in; ``drafter`` as in `SpeculativeModel.from_pretrained`.

    ``dtype`` of the model; None while it is not known. Raises `UsageError` for an unknown name, "bf16" for a model of
    another type, and "fp8" with the reference drafter, a callable or a model in float32; `DrafterError` for "fp8"
    without a GPU of sm_89 or later.
    """
    check_choice("draft_weights", draft_weights, CHOICES)
    if draft_weights == "bf16" and dtype not in (None, torch.bfloat16):
        raise UsageError(
            f"draft_weights = 'bf16', and the model is in {_name(dtype)}. The drafter computes in the model's type and "
            "stores its weights in that or in FP8: leave draft_weights out, or load with dtype = 'bfloat16'."
        )
    if draft_weights != "fp8":
        return
    if drafter not in ("auto", "triton"):
        problem = f"draft_weights = 'fp8' is for the persistent kernel, and drafter = {drafter!r} is asked for"
        raise UsageError(f"{problem}. Leave draft_weights out, or take drafter = 'triton'.")
    if (reason := lacks_fp8(device)) is not None:
        raise DrafterError(f"draft_weights = 'fp8' {reason}. Leave draft_weights out.")
    if dtype not in (None, torch.bfloat16, torch.float16):
        problem = f"draft_weights = 'fp8' goes with a model in bfloat16 or float16; this one is in {_name(dtype)}"
        raise UsageError(f"{problem}. Leave draft_weights out, or load with dtype = 'bfloat16'.")


def check_computable(head: DraftHead, drafter: Any = "auto") -> None:
    """Raise `UnsupportedModelError` for a head that the reference cannot draft with, or, if asked for, the kernel.

    ``drafter`` as `SpeculativeModel.from_pretrained` takes it.
    """
    second_layer = [name for name in head.tensors if name.startswith("layers.1.")]
    if second_layer:
        problem = f"a head of several decoder layers ({second_layer[0]}) cannot run here"
        raise UnsupportedModelError.at(head.location, f"{problem}. Serve it with vLLM or SGLang.")
    if "input_norm.weight" in head.tensors and "fc_norm.0.weight" in head.tensors:
        problem = "it has both input_norm and fc_norm, and engines differ in which they apply first"
        advice = "Take out the tensors and the flag of the one that it was trained without."
        raise UnsupportedModelError.at(head.location, f"{problem}. {advice}")
    activation = str(head.config["hidden_act"])
    if activation not in ACT2FN:
        problem = f"hidden_act = {activation!r} is none of transformers' activations"
        raise UnsupportedModelError.at(head.location, f"{problem}. Correct hidden_act in the head's config.json.")
    if drafter == "triton":
        check_kernel_activation(activation)
    rotary_embedding(head.config)


def choose_drafter(
    drafter: str | DraftFunction,
    weights: HeadWeights,
    tree: TreeConfig,
    draft_weights: str = "auto",
    order: Tensor | None = None,
) -> Drafter:
    """Build the drafter that is asked for, or choose one for "auto".

    "auto" takes the kernel on a GPU for heads and trees within its limits, else the reference, on a GPU with a
    `SpeedWarning`. ``order``: int64 [draft_vocab], LM-head rows best first, where they are ranked: the kernel packs
    them so. Raises as `check_drafter`, `check_draft_weights` and `Drafter`, and `DrafterError` for ``draft_weights``
    "fp8" with a head that only the reference can draft with.
    """
    check_drafter(drafter, weights.device)
    check_draft_weights(draft_weights, drafter, weights.device, weights.dtype)
    if drafter == "reference" or callable(drafter):
        return Drafter(weights, tree, drafter)
    if drafter == "auto" and weights.device.type != "cuda":
        return Drafter(weights, tree, reason=f"the model is on {weights.device}")
    packing = SharedPacking(weights, order, torch.float8_e4m3fn if draft_weights == "fp8" else None)
    if drafter == "triton":
        return Drafter(weights, tree, "triton", packing)
    try:
        return Drafter(weights, tree, "triton", packing, f"{weights.dtype} on {weights.device}")
    except (UnsupportedModelError, UsageError) as error:
        if draft_weights == "fp8":
            problem = f"draft_weights = 'fp8' needs the persistent kernel, which cannot take this head: {error}"
            raise DrafterError(f"{problem} Leave draft_weights out.") from error
        what = "drafter = 'auto' drafts with the reference in plain PyTorch, several times slower than the kernel"
        advice = "Change that, or take drafter='reference' to say that it is meant."
        message = f"{what}, which cannot take this head or tree: {error} {advice}"
        warnings.warn(message, SpeedWarning, stacklevel=3)
        return Drafter(weights, tree, reason=str(error))


def _name(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")
