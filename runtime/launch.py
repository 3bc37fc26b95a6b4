"""Draft a tree in one launch: `launch_drafter`, and the drafter built on it for generation.

The persistent Triton kernel and the PyTorch reference share configuration, weights, buffers and results; the caller
says which (``backend``), and nothing falls back. Kernels are imported only when asked for.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .cache import SlotRows
from .config import TreeConfig
from .drafter import NewPairs, ReferenceDrafter, check_tree_fits
from .drafter_config import MAX_NEW_TOKENS, Buffers, DrafterConfig, check_room
from .errors import DrafterError, UsageError
from .slots import ActiveSlots
from .tree import DraftTree
from .weights import HeadWeights

if TYPE_CHECKING:
    from .kernels.drafter import PackedHead

__all__ = [
    "Buffers",
    "DrafterConfig",
    "TritonDrafter",
    "Weights",
    "allocate_buffers",
    "check_finished",
    "launch_drafter",
    "prefill_drafter",
]

# What a `DraftTree` holds for inactive slots.
_BLANK = {
    "draft_tokens": -1,
    "parents": -1,
    "tree_mask": False,
    "tree_position_ids": 0,
    "retrieve_indices": -1,
    "num_leaves": 0,
}


@dataclass(frozen=True)
class Weights:
    """A head to draft with: as tensors for the reference, and packed for the kernel (`pack`)."""

    head: HeadWeights
    packed: PackedHead | None = None
    order: Tensor | None = None
    """int64 [draft_vocab]: LM-head rows best first; a draft over fewer rows takes the first of these."""

    @classmethod
    def pack(cls, head: HeadWeights, cfg: DrafterConfig, order: Tensor | None = None, strict: bool = False) -> Weights:
        """Lay a head out for the kernel on its device, with tuned launch parameters where the cache has them.

        ``order``: int64 [draft_vocab], LM-head rows best first; then a launch may use any smaller ``draft_vocab``.
        ``strict``: a miss in the tuned cache is a `DrafterError` (also ``EAGLE_SLIM_STRICT=1``).
        """
        from .kernels.drafter import chip_of, pack_head
        from .kernels.launch_params import default_cache, is_strict

        params = default_cache().lookup(cfg, chip_of(head.device), strict or is_strict())
        return cls(head, pack_head(head, cfg, params, order), order)

    def first_rows(self, draft_vocab: int) -> HeadWeights:
        """The head with only the LM-head rows that a draft over ``draft_vocab`` of them uses, ascending."""
        if draft_vocab == self.head.draft_vocab:
            return self.head
        ranked = torch.arange(self.head.draft_vocab, device=self.head.device) if self.order is None else self.order
        rows = ranked[:draft_vocab].sort().values
        return replace(self.head, lm_head=self.head.lm_head[rows], draft_to_target=self.head.draft_to_target[rows])

    def with_positions(self, num_positions: int) -> Weights:
        """The same packed weights with RoPE tables for ``num_positions`` positions of a KV cache."""
        from .kernels.drafter import rotary_tables

        assert self.packed is not None, "pack() comes first"
        cos, sin = rotary_tables(self.head, num_positions)
        return replace(self, packed=replace(self.packed, cos=cos, sin=sin))


def launch_drafter(
    cfg: DrafterConfig,
    X: Tensor | tuple[Tensor, ...],
    weights: Weights,
    bufs: Buffers,
    backend: str = "triton",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draft the trees of all active slots.

    ``X``: the target's features of the new tokens, [slots, up to 16, feature_width], or three taps of [slots, up to 16,
    target hidden] with equal strides. ``bufs`` holds the other inputs (`Buffers`), the KV cache, which gains the new
    pairs, and the outputs, which are also returned: draft_tokens int64 [slots, total], retrieve_indices int64 [slots,
    total, depth + 2], tree_mask bool [slots, 1, total, total], tree_position_ids int64 [slots, total]; inactive slots
    are -1 and 0.

    "triton" neither allocates nor waits for the device and can be captured in a CUDA graph. "reference" is plain
    PyTorch and waits. Raises `UsageError` for features, weights or buffers that are not of this configuration, and an
    unknown backend.
    """
    _check_features(cfg, X)
    _check_parts(cfg, weights, bufs)
    if weights.head.draft_vocab < cfg.draft_vocab:
        raise UsageError(f"draft_vocab = {cfg.draft_vocab}, but the head has {weights.head.draft_vocab} rows.")
    if backend == "triton":
        if weights.packed is None:
            raise DrafterError("backend='triton' needs packed weights: Weights.pack(head, cfg).")
        if not bufs.workspace:
            raise DrafterError("backend='triton' needs a workspace: allocate_buffers(cfg, weights).")
        from .kernels.drafter import launch

        launch(cfg, X, weights.packed, bufs)
    elif backend == "reference":
        _launch_reference(cfg, X, weights.first_rows(cfg.draft_vocab), bufs)
    else:
        raise UsageError(f"backend = {backend!r} is unknown; expected triton or reference.")
    return bufs.draft_tokens, bufs.retrieve_indices, bufs.tree_mask, bufs.tree_position_ids


def allocate_buffers(cfg: DrafterConfig, weights: Weights) -> Buffers:
    """Allocate everything a draft with these weights writes, the kernel's workspace included when they are packed."""
    bufs = Buffers.allocate(cfg, weights.head.device)
    if weights.packed is not None:
        from .kernels.drafter import allocate_workspace

        bufs.workspace.update(allocate_workspace(cfg, weights.packed.params, weights.head.device))
    return bufs


def check_finished(bufs: Buffers) -> None:
    """Wait for the device and raise `DrafterError` if a draft did not finish properly."""
    if bufs.workspace:
        from .kernels.drafter import check_finished as check

        check(bufs)


def prefill_drafter(
    cfg: DrafterConfig, X: Tensor, next_tokens: Tensor, weights: Weights, bufs: Buffers, slot: int, start: int = 0
) -> None:
    """Fill a slot's KV cache with a prompt's pairs, by PyTorch, in chunks.

    ``X`` [seq, feature_width], ``next_tokens`` int64 [seq]: the token after each feature; pairs take the positions from
    ``start`` on. Raises `UsageError` when they and a tree do not fit, and for other shapes and slots.
    """
    _check_parts(cfg, weights, bufs)
    if not 0 <= slot < cfg.num_slots:
        raise UsageError(f"Slot {slot} is not among the {cfg.num_slots} of this configuration (0 is the first).")
    if next_tokens.dim() != 1 or X.shape != (len(next_tokens), cfg.feature_width):
        raise UsageError(
            f"A prompt has features [seq, {cfg.feature_width}] and next tokens [seq]; got {tuple(X.shape)} and "
            f"{tuple(next_tokens.shape)}."
        )
    check_room(slot, start, len(next_tokens), bufs.tree_rows, bufs.keys.shape[2])
    drafter = _reference_on(cfg, weights.head, bufs)
    drafter.lengths[slot] = start
    drafter.prefill(slot, X, next_tokens)


def _check_features(cfg: DrafterConfig, X: Tensor | tuple[Tensor, ...]) -> None:
    taps = (X,) if isinstance(X, Tensor) else X
    width = sum(tap.shape[-1] for tap in taps)
    separate = not isinstance(X, Tensor)
    if (separate and len(taps) != 3) or len({(tap.shape, tap.stride(), tap.dtype) for tap in taps}) != 1:
        raise UsageError("Features are one tensor, or three of equal shape, strides and dtype.")
    if separate and not (cfg.kind == "eagle3" and cfg.has_fc):
        raise UsageError("Only an EAGLE-3 head with fc takes three taps; this one takes one tensor of features.")
    slots, new = taps[0].shape[:2]
    if taps[0].dim() != 3 or slots != cfg.num_slots or new > MAX_NEW_TOKENS or width != cfg.feature_width:
        raise UsageError(
            f"Features must be [{cfg.num_slots} slots, at most {MAX_NEW_TOKENS} new tokens, {cfg.feature_width}]; got "
            f"{[tuple(tap.shape) for tap in taps]}."
        )
    if any(tap.dtype != cfg.dtype or tap.stride(-1) != 1 for tap in taps):
        raise UsageError(f"Features must be {cfg.dtype} with contiguous rows; got {taps[0].dtype}, {taps[0].stride()}.")


def _check_parts(cfg: DrafterConfig, weights: Weights, bufs: Buffers) -> None:
    """Refuse parts of another configuration: the kernel would read and write beyond them."""
    head, slots, total = weights.head, cfg.num_slots, cfg.total_tokens
    for name in ("kind", "hidden", "num_heads", "num_kv_heads", "head_dim", "feature_width", "dtype"):
        if getattr(head, name) != getattr(cfg, name):
            raise UsageError(
                f"The head has {name} = {getattr(head, name)}, the configuration {getattr(cfg, name)}; make it with "
                "DrafterConfig.of(head, ...)."
            )
    cache = (slots, cfg.num_kv_heads, cfg.max_positions, cfg.head_dim)
    wanted = {"draft_tokens": (slots, total), "retrieve_indices": (slots, total, cfg.tree.path_width), "keys": cache}
    for name, shape in wanted.items():
        found = tuple(getattr(bufs, name).shape)
        if found != shape:
            raise UsageError(
                f"The buffers hold {name} {found}, the configuration needs {shape}; allocate them with "
                "allocate_buffers(cfg, weights)."
            )
    if weights.packed is not None and weights.packed.cos.shape[0] < cfg.max_positions:
        raise UsageError(
            f"The weights are packed for {weights.packed.cos.shape[0]} positions, the configuration has "
            f"{cfg.max_positions}; take weights.with_positions({cfg.max_positions})."
        )


def _reference_on(cfg: DrafterConfig, head: HeadWeights, bufs: Buffers) -> ReferenceDrafter:
    """Build a reference drafter whose KV cache is the buffers' own."""
    drafter = ReferenceDrafter(head, cfg.tree)
    drafter._cache = SlotRows.over(bufs.keys, bufs.values)
    drafter.lengths = [0] * cfg.num_slots
    return drafter


def _launch_reference(cfg: DrafterConfig, X: Tensor | tuple[Tensor, ...], head: HeadWeights, bufs: Buffers) -> None:
    features = X if isinstance(X, Tensor) else torch.cat(X, -1)
    drafter = _reference_on(cfg, head, bufs)
    drafter.lengths = bufs.prefix.tolist()
    counts = bufs.num_new.tolist()
    for name, blank in _BLANK.items():
        getattr(bufs, name).fill_(blank)
    # One slot after the other, as each has its own number of new tokens and room for no more rows than those.
    for slot in bufs.active_slots[: int(bufs.active_count)].tolist():
        new = counts[slot]
        if new > features.shape[1]:
            raise UsageError(f"Slot {slot} has {new} new tokens, but features of {features.shape[1]}.")
        pairs = NewPairs(features[:, :new], bufs.new_tokens[:, :new].long(), bufs.num_new.long(), (new,))
        tree = drafter.draft(ActiveSlots.of([slot], cfg.num_slots, features.device), pairs)
        for name in _BLANK:
            getattr(bufs, name)[slot] = getattr(tree, name)[slot]


class TritonDrafter:
    """The persistent kernel behind the interface of `drafter.Drafter`.

    ``weight_dtype`` float8_e4m3fn stores the matrices in FP8 (sm_89 and later). Raises `DrafterError`,
    `UnsupportedModelError` or `UsageError` when the head or the device is outside the kernel's limits.
    """

    def __init__(
        self, weights: HeadWeights, tree: TreeConfig, weight_dtype: torch.dtype | None = None, strict: bool = False
    ) -> None:
        check_tree_fits(weights, tree)
        self.weights = weights
        self.tree = tree
        self.lengths: list[int] = []
        self._weight_dtype, self._strict = weight_dtype, strict
        self._cfg = DrafterConfig.of(weights, tree, 1, 1, weight_dtype)
        self._packed: Weights | None = None
        self._bufs: Buffers | None = None
        self._features: Tensor | None = None

    def allocate(self, num_slots: int, capacity: int) -> None:
        """See `Drafter.allocate`. Packs for a number of slots once; later calls reuse what is large enough."""
        if self._packed is None or num_slots != self._cfg.num_slots:
            self._cfg = self._config(num_slots, capacity)
            self._packed = Weights.pack(self.weights, self._cfg, strict=self._strict)
            self._bufs = None
        if self._bufs is None or self._config(num_slots, capacity).max_positions > self._cfg.max_positions:
            self._cfg = self._config(num_slots, capacity)
            self._packed = self._packed.with_positions(self._cfg.max_positions)
            self._bufs = allocate_buffers(self._cfg, self._packed)
            shape = (num_slots, MAX_NEW_TOKENS, self._cfg.feature_width)
            self._features = torch.zeros(shape, dtype=self._cfg.dtype, device=self.weights.device)
        self.lengths = [0] * num_slots

    def _config(self, num_slots: int, capacity: int) -> DrafterConfig:
        return DrafterConfig.of(self.weights, self.tree, num_slots, capacity + MAX_NEW_TOKENS, self._weight_dtype)

    def reset_slot(self, slot: int) -> None:
        """See `Drafter.reset_slot`."""
        self.lengths[slot] = 0

    def prefill(self, slot: int, features: Tensor, next_tokens: Tensor) -> None:
        """See `Drafter.prefill`."""
        packed, bufs, _ = self._ready()
        prefill_drafter(self._cfg, features, next_tokens, packed, bufs, slot, self.lengths[slot])
        self.lengths[slot] += len(next_tokens)

    def draft(self, active: ActiveSlots, pairs: NewPairs) -> DraftTree:
        """See `Drafter.draft`. Raises `DrafterError` when the draft before this one did not finish."""
        packed, bufs, features = self._ready()
        # Here, as that draft's tree has been read by now: right after the launch the host would wait for it.
        check_finished(bufs)
        width = pairs.features.shape[1]
        for slot, count in zip(active.indices, pairs.num_new_host, strict=True):
            check_room(slot, self.lengths[slot], count, bufs.tree_rows, bufs.keys.shape[2])
        features[:, :width].copy_(pairs.features)
        bufs.new_tokens[:, :width].copy_(pairs.next_tokens)
        bufs.num_new.copy_(pairs.num_new)
        bufs.prefix.copy_(torch.tensor(self.lengths, dtype=torch.int32), non_blocking=True)
        bufs.active_slots.copy_(active.active_slots)
        bufs.active_inverse.copy_(active.active_inverse)
        bufs.active_count.copy_(active.active_count)
        launch_drafter(self._cfg, features, packed, bufs, backend="triton")
        for slot, count in zip(active.indices, pairs.num_new_host, strict=True):
            self.lengths[slot] += count
        return DraftTree(
            bufs.draft_tokens,
            bufs.parents,
            bufs.tree_mask,
            bufs.tree_position_ids,
            bufs.retrieve_indices,
            bufs.num_leaves,
        )

    def _ready(self) -> tuple[Weights, Buffers, Tensor]:
        if self._packed is None or self._bufs is None or self._features is None:
            raise UsageError("allocate() comes before prefill() and draft().")
        return self._packed, self._bufs, self._features
