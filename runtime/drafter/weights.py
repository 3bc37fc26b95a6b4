"""A draft head ready to run: tensors on a device, the LM-head rows of the chosen draft vocabulary, and their ids."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F
from eagle_slim.convert.heads.check import layer_shapes
from eagle_slim.convert.heads.config import default_window, sliding_window
from eagle_slim.convert.heads.open import DraftHead
from eagle_slim.convert.targets.lm_head import rows_of_ids
from eagle_slim.vocab_tools.vocabulary import DraftVocab
from numpy.typing import NDArray
from torch import Tensor

from ..errors import HeadWarning, UnsupportedModelError, UsageError, misfit
from ..settings import explain_fields
from ..target.wrapper import TargetModel
from .rope import RotaryEmbedding, rotary_dim, rotary_embedding, rotated_first

WINDOW_SINKS = 32
"""First tokens of a text that drafts with a window look back on, too: turned on to lie right before a window of 768,
they raised the accepted length after 8,000 tokens by 4 and 10%, at their own positions by 0 and 1%."""


@explain_fields
@dataclass(frozen=True)
class HeadWeights:
    """Weights and dimensions of a draft head; matrices are [out, in] in one dtype on one device.

    ``tensors`` holds, without the layer's prefix: ``fc.weight``, ``fc.bias``, ``self_attn.{q,k,v,o}_proj.weight`` and
    ``.bias``, ``self_attn.{q,k}_norm.weight`` [head_dim], ``mlp.{gate,up,down}_proj.weight`` and ``.bias``,
    ``input_layernorm.weight``, ``hidden_norm.weight``, ``post_attention_layernorm.weight``, ``norm.weight``,
    ``input_norm.weight``, ``fc_norm.N.weight``: if there.
    Raises `UsageError` for a tensor that is missing or of another shape, type or device, and for ids of another shape.
    """

    kind: str
    """"eagle3", or "eagle" for EAGLE-1 and EAGLE-2."""
    tensors: Mapping[str, Tensor]
    embedding: Tensor
    """[target_vocab, hidden]."""
    lm_head: Tensor
    """[draft_vocab, hidden]."""
    draft_to_target: Tensor
    """int64 [draft_vocab]: target id of each LM-head row, ascending."""
    rotary: RotaryEmbedding
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    activation: str
    feature_width: int
    """Width of the target's features: taps * target hidden for EAGLE-3, hidden for EAGLE-1/2."""
    norm_before_residual: bool = False
    norm_output: bool = False
    sliding_window: int | None = None
    """A key is seen if query position - key position is below it; None for no window. Any will do: text never depends
    on it."""
    window_sinks: int = 0
    """First positions of a text that are seen, too, as if they lay right before the window."""

    def __post_init__(self) -> None:
        hidden, ids = self.hidden, self.draft_to_target
        if self.embedding.dim() != 2 or self.embedding.shape[1] != hidden:
            raise misfit("embedding", f"[target_vocab, {hidden}]", tuple(self.embedding.shape))
        if self.lm_head.dim() != 2 or self.lm_head.shape[1] != hidden:
            raise misfit("lm_head", f"[draft_vocab, {hidden}]", tuple(self.lm_head.shape))
        if ids.dtype != torch.int64 or ids.shape != self.lm_head.shape[:1]:
            raise misfit("draft_to_target", f"int64 [{self.draft_vocab}]", f"{ids.dtype} {tuple(ids.shape)}")
        for name, tensor in {"embedding": self.embedding, "draft_to_target": ids, **self.tensors}.items():
            if tensor.device != self.device or (tensor is not ids and tensor.dtype != self.dtype):
                found = f"{tensor.dtype} on {tensor.device}"
                raise misfit(name, f"{self.dtype} on {self.device}, as lm_head", found)
        for name, shape in self._shapes().items():
            if name not in self.tensors or self.tensors[name].shape != shape:
                raise misfit(name, list(shape), getattr(self.tensors.get(name), "shape", None))

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Return shapes by name of the tensors that this kind of head must have, and of the others that it has."""
        hidden, w = self.hidden, self.tensors
        is_eagle3, gate = self.kind == "eagle3", w.get("mlp.gate_proj.weight", self.lm_head)
        sizes = {
            "hidden_size": hidden,
            "intermediate_size": gate.shape[0],
            "head_dim": self.head_dim,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
        }
        known = layer_shapes(sizes, "", 2 * hidden if is_eagle3 else hidden)
        known["fc.weight"] = (hidden, self.feature_width if is_eagle3 else 2 * hidden)
        known |= dict.fromkeys(("fc.bias", "hidden_norm.weight", "norm.weight"), (hidden,))
        optional = {name for name in known if name.endswith((".bias", "q_norm.weight", "k_norm.weight"))}
        if not is_eagle3:
            optional |= {"input_layernorm.weight", "hidden_norm.weight", "norm.weight"}
        elif self.feature_width == hidden:
            optional.add("fc.weight")
        return {name: shape for name, shape in known.items() if name in w or name not in optional}

    @property
    def tap_norms(self) -> list[str]:
        """Names of the weights of the RMSNorms before ``fc``: one for all taps (``input_norm``), or one for each."""
        if "input_norm.weight" in self.tensors:
            return ["input_norm.weight"]
        count = sum(name.startswith("fc_norm.") for name in self.tensors)
        return [f"fc_norm.{index}.weight" for index in range(count)]

    @property
    def head_norms(self) -> tuple[Tensor, Tensor] | None:
        """Weights [head_dim] of the RMSNorms over each head of q and of k; None without them."""
        q, k = (self.tensors.get(f"self_attn.{name}_norm.weight") for name in "qk")
        return None if q is None or k is None else (q, k)

    @property
    def draft_vocab(self) -> int:
        """Rows of the LM head."""
        return self.lm_head.shape[0]

    def project(self, x: Tensor, name: str) -> Tensor:
        """Multiply by a matrix of ``tensors``, and add its bias where it has one."""
        return F.linear(x, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))

    def with_window(self, window: int | None, own: int | None = None) -> HeadWeights:
        """Return the head with another window: it has sinks, unless it is short or what the head was trained with."""
        has_sinks = window is not None and window != own and window >= 8 * WINDOW_SINKS
        return replace(self, sliding_window=window, window_sinks=WINDOW_SINKS if has_sinks else 0)

    def of_rows(self, rows: Tensor | slice) -> HeadWeights:
        """Return the head with some of its LM-head rows: a slice, or int64 [draft_vocab], ascending."""
        return replace(self, lm_head=self.lm_head[rows], draft_to_target=self.draft_to_target[rows])

    @cached_property
    def kv_projection(self) -> tuple[Tensor, Tensor | None]:
        """Weights [in, 2 * kv_heads * head_dim] of the key and value projections, side by side, and their bias."""
        w, names = self.tensors, ("self_attn.k_proj", "self_attn.v_proj")
        biased = "self_attn.k_proj.bias" in w
        weight = torch.cat([w[f"{name}.weight"] for name in names]).t()
        return weight, torch.cat([w[f"{name}.bias"] for name in names]) if biased else None

    @cached_property
    def in_vocab(self) -> bytes:
        """One byte for each target id, 1 where it is in the draft vocabulary. Waits for the device the first time."""
        in_vocab = np.zeros(self.embedding.shape[0], dtype=np.uint8)
        in_vocab[self.draft_to_target.cpu().numpy()] = 1
        return in_vocab.tobytes()

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""
        return self.lm_head.device

    @property
    def dtype(self) -> torch.dtype:
        """Type of the matrices."""
        return self.lm_head.dtype


def choose_draft_ids(
    head: DraftHead, draft_vocab: int | DraftVocab | None, rank_order: NDArray[np.int64] | None, num_forced: int = 0
) -> NDArray[np.int64]:
    """Choose the target ids to draft over: ascending, unique, int64 [draft_vocab].

    ``draft_vocab`` None takes all the head has; a number takes that many of the head's ``rank_order`` (target ids, best
    first, from the manifest), never fewer than its ``num_forced``; a `DraftVocab` names them itself.
    Raises `UsageError` for a number or ids that the head does not have, and for a number without a ranking.
    """
    available = np.arange(head.target_vocab) if head.trained_ids is None else head.trained_ids
    head_ids = available if rank_order is None else np.sort(rank_order)
    if draft_vocab is None:
        return head_ids
    if not isinstance(draft_vocab, int) or isinstance(draft_vocab, bool):
        ids = getattr(draft_vocab, "ascending_ids", None)
        if ids is None:
            raise misfit("draft_vocab", "a number of rows, a DraftVocab or None (all)", draft_vocab)
        ids = np.asarray(ids, dtype=np.int64)
        check_available(ids, available)
        return ids
    count = len(head_ids)
    if draft_vocab == count:
        return head_ids
    smallest = max(num_forced, 1)
    if not smallest <= draft_vocab <= count:
        known, trained = f"{smallest} (the forced ids) to {count} (all rows of this head)", len(available)
        larger = f" Convert again with a larger --draft-vocab for up to {trained}."
        advice = larger if count < draft_vocab <= trained else ""
        raise UsageError(f"draft_vocab = {draft_vocab} is outside {known}.{advice}")
    if rank_order is None:
        problem = f"needs a ranking, and this head has none (its own vocabulary is {count})"
        advice = f"Convert it with eagle-convert --draft-vocab {draft_vocab}, or pass a DraftVocab."
        raise UsageError(f"draft_vocab = {draft_vocab} {problem}. {advice}")
    return np.sort(rank_order[:draft_vocab])


def check_available(ids: NDArray[np.int64], available: NDArray[np.int64]) -> None:
    """Raise `UsageError` for ids of a draft vocabulary that a head cannot draft."""
    missing = np.setdiff1d(ids, available)
    if missing.size:
        raise UsageError(
            f"draft_vocab: {missing.size} ids, such as {missing[0]}, are not the head's {len(available)}. Rank those."
        )


def load_head_weights(head: DraftHead, target: TargetModel, draft_ids: NDArray[np.int64]) -> HeadWeights:
    """Load a head's tensors in a target's dtype and device; ``draft_ids`` int64 [draft_vocab]: ascending, its own."""
    config, dtype, device = head.config, target.dtype, target.device
    prefix = "midlayer." if head.kind == "eagle3" else "layers.0."
    names = [name for name in head.tensors if name not in ("embed_tokens.weight", "lm_head.weight")]
    tensors = {name.removeprefix(prefix): head.tensors.get(name).to(device, dtype) for name in names}
    if "self_attn.o_proj.bias" in tensors and not tensors["self_attn.o_proj.bias"].any():
        # Written for engines that build one whenever q, k and v have theirs.
        del tensors["self_attn.o_proj.bias"]
    head_dim, rotated = int(config["head_dim"]), rotary_dim(config)
    if rotated < head_dim:
        for name in tensors:
            if name.startswith(("self_attn.q_", "self_attn.k_")):
                tensors[name] = rotated_first(tensors[name], head_dim, rotated)
    lm_head = gather_lm_head_rows(head, target, draft_ids)
    _warn_of_nan(head, {"lm_head.weight": lm_head, **tensors})
    return HeadWeights(
        kind=head.kind,
        tensors=tensors,
        embedding=_choose_embedding(head, target),
        lm_head=lm_head,
        draft_to_target=torch.from_numpy(draft_ids).to(device),
        rotary=rotary_embedding(config, device),
        hidden=head.hidden_size,
        num_heads=int(config["num_attention_heads"]),
        num_kv_heads=int(config["num_key_value_heads"]),
        head_dim=head_dim,
        norm_eps=float(config["rms_norm_eps"]),
        activation=str(config["hidden_act"]),
        feature_width=target.feature_width,
        norm_before_residual=bool(config.get("norm_before_residual")),
        norm_output=bool(config.get("norm_output")),
    ).with_window(default_window(config, target.max_positions), sliding_window(config))


def _choose_embedding(head: DraftHead, target: TargetModel) -> Tensor:
    """Take the head's embedding, [vocab, hidden], as vLLM does, or the target's where it has none or a copy of it."""
    shared = target.embedding.detach()
    if "embed_tokens.weight" not in head.tensors:
        return shared
    embedding = head.tensors.get("embed_tokens.weight").to(shared.device)
    common = min(len(embedding), len(shared))
    same_width = embedding.shape[1] == shared.shape[1]
    if same_width and torch.equal(embedding[:common], shared[:common].to(embedding.dtype)):
        return shared
    return embedding.to(target.device, target.dtype)


def _warn_of_nan(head: DraftHead, tensors: Mapping[str, Tensor]) -> None:
    damaged = [name for name, tensor in tensors.items() if not bool(tensor.isfinite().all())]
    if damaged:
        what = f"Head {head.location} holds NaN or infinity in {', '.join(damaged)}: hardly any draft will be accepted"
        warnings.warn(f"{what}, and the output stays exact. Get the head again.", HeadWarning, stacklevel=4)


def gather_lm_head_rows(head: DraftHead, target: TargetModel, draft_ids: NDArray[np.int64]) -> Tensor:
    """Gather the LM-head rows of target ids, from the head, or else from the target: [draft_vocab, hidden].

    Raises `UnsupportedModelError` where the target's LM head is needed and quantised.
    """
    if head.has_lm_head:
        return head.tensors.rows("lm_head.weight", rows_of_ids(head, draft_ids)).to(target.device, target.dtype)
    if not target.lm_head.is_floating_point():
        raise UnsupportedModelError(
            f"{head.location} drafts with the target's LM head, in {target.lm_head.dtype}: load it in a float type."
        )
    shared = target.lm_head.detach()
    # What wraps quantised numbers, as torchao's tensors do, need not know rows, nor what the drafter does with them.
    shared = shared if type(shared) is Tensor else shared.dequantize()
    return shared[torch.from_numpy(draft_ids).to(shared.device)].to(target.device, target.dtype)
