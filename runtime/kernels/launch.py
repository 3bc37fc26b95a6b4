"""Draft a tree in one launch: `launch_drafter`, and the drafter built on it for generation.

The persistent Triton kernel and the PyTorch reference share configuration, weights, buffers and results; the caller
says which (``backend``), and nothing falls back. Kernels are imported only when asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..config import TreeConfig
from ..drafter.buffers import Buffers, check_room
from ..drafter.config import MAX_NEW_TOKENS, DrafterConfig, head_dimensions
from ..drafter.follow import FollowRows, Tails
from ..drafter.reference import NewPairs, ReferenceDrafter, check_tree_fits
from ..drafter.weights import HeadWeights
from ..errors import DrafterError, UsageError
from ..slots import ActiveSlots
from ..target.cache import SlotRows
from ..tree import DraftTree

if TYPE_CHECKING:
    from .packed_head import PackedHead
    from .tuned_cache import TunedCache

BACKENDS = ("triton", "reference")

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
    """A head to draft with: as tensors for the reference, and packed for the kernel (`pack`).

    Raises `UsageError` for an ``order`` of other rows than this head's, and for the packed weights of another head.
    """

    head: HeadWeights
    packed: PackedHead | None = None
    order: Tensor | None = None
    """int64 [draft_vocab]: LM-head rows best first; a draft over fewer rows takes the first of these."""

    def __post_init__(self) -> None:
        if not isinstance(self.head, HeadWeights):
            raise UsageError(f"Weights are made of HeadWeights; got {type(self.head).__name__}.", part="head")
        _check_order(self.head, self.order)
        if self.packed is not None and self.packed.draft_vocab != self.head.draft_vocab:
            raise UsageError(
                f"{self.packed.draft_vocab} LM-head rows are packed, the head has {self.head.draft_vocab}; take "
                "Weights.pack(head, cfg).",
                field="draft_vocab",
                found=self.packed.draft_vocab,
                expected=self.head.draft_vocab,
            )

    @classmethod
    def pack(
        cls,
        head: HeadWeights,
        cfg: DrafterConfig,
        order: Tensor | None = None,
        strict: bool = False,
        cache: TunedCache | None = None,
    ) -> Weights:
        """Lay a head out for the kernel on its device, with tuned launch parameters where the cache has them.

        One packing serves every number of slots and every tree; each configuration's launch parameters are looked up
        when it is first used. ``order``: int64 [draft_vocab], LM-head rows best first; then a launch may use any
        smaller ``draft_vocab``. ``strict``: a miss in the tuned cache is a `DrafterError` (also
        ``EAGLE_SLIM_STRICT=1``). ``cache``: default the one that ``EAGLE_SLIM_TUNED`` names or the one that ships; its
        ``hits`` and ``misses`` count. Raises `UsageError` for a configuration or an order of another head, and draft
        ids that the target does not have.
        """
        from .host import chip_of
        from .packed_head import pack_head
        from .tuned_cache import LaunchTable, is_strict

        _check_head(cfg, head)
        _check_order(head, order)
        ids = head.draft_to_target
        if ids.device.type != "meta" and not bool(((ids >= 0) & (ids < cfg.target_vocab)).all()):
            raise UsageError(
                f"draft_to_target must hold ids of the target, 0 to {cfg.target_vocab - 1}.", tensor="draft_to_target"
            )
        cache, chip = open_tuned_cache() if cache is None else cache, chip_of(head.device)
        launches = LaunchTable(cache.layout(cfg, chip), cache, chip, strict or is_strict())
        launches.get(cfg)  # a miss that is an error is one before anything is packed
        return cls(head, pack_head(_contiguous(head), cfg, launches, order), order)

    def first_rows(self, draft_vocab: int) -> HeadWeights:
        """The head with only the LM-head rows that a draft over ``draft_vocab`` of them uses, ascending."""
        if draft_vocab == self.head.draft_vocab:
            return self.head
        ranked = torch.arange(self.head.draft_vocab, device=self.head.device) if self.order is None else self.order
        rows = ranked[:draft_vocab].sort().values
        return replace(self.head, lm_head=self.head.lm_head[rows], draft_to_target=self.head.draft_to_target[rows])

    def with_positions(self, num_positions: int, num_tokens: int | None = None) -> Weights:
        """The same packed weights with RoPE tables for ``num_positions`` positions of a KV cache.

        ``num_tokens`` (`DrafterConfig.num_tokens`; default ``num_positions``): length of text that a scaling which
        depends on it is fixed for.
        """
        from .packed_head import rotary_tables

        assert self.packed is not None, "pack() comes first"
        num_tokens = num_positions if num_tokens is None else num_tokens
        if len(self.packed.cos) >= num_positions and self._is_fixed_for(num_tokens):
            return self
        cos, sin = rotary_tables(self.head, num_positions, num_tokens)
        return replace(self, packed=replace(self.packed, cos=cos, sin=sin, num_tokens=num_tokens))

    def _is_fixed_for(self, num_tokens: int) -> bool:
        return self.packed is None or self.head.rotary.by_length is None or self.packed.num_tokens == num_tokens


class SharedPacking:
    """A head packed once, when it is first drafted with, for all who draft with it.

    One serves every number of slots, every tree, every length, and every draft vocabulary that is the first of its
    rows in ``order`` (int64 [draft_vocab], LM-head rows best first; None for the head's own order). ``strict`` as in
    `Weights.pack`.
    """

    def __init__(
        self,
        head: HeadWeights,
        order: Tensor | None = None,
        weight_dtype: torch.dtype | None = None,
        strict: bool = False,
    ) -> None:
        _check_order(head, order)
        self.head, self.order = head, order
        self.weight_dtype = weight_dtype or head.dtype
        self._strict = strict
        self._weights: Weights | None = None

    def weights(self, cfg: DrafterConfig) -> Weights:
        """The packed head with positions for ``cfg``; packs at the first call. Raises as `Weights.pack` does."""
        if self._weights is None:
            self._weights = Weights.pack(self.head, cfg, self.order, self._strict)
        self._weights = self._weights.with_positions(cfg.max_positions, cfg.num_tokens)
        return self._weights

    def for_head(self, head: HeadWeights, order: Tensor | None = None) -> SharedPacking:
        """Return this packing if it serves ``head``, else a new one of the same type, with an ``order`` of its own."""
        return self if self.serves(head) else SharedPacking(head, order, self.weight_dtype, self._strict)

    def serves(self, head: HeadWeights) -> bool:
        """Whether ``head`` is this one with all or the first of its LM-head rows."""
        mine, ids = self.head, head.draft_to_target
        shared = (head.tensors is mine.tensors, head.embedding is mine.embedding, head.rotary is mine.rotary)
        if not all(shared) or len(ids) > mine.draft_vocab or ids.device != mine.device:
            return False
        ranked = mine.draft_to_target if self.order is None else mine.draft_to_target[self.order]
        return torch.equal(ranked[: len(ids)].sort().values, ids)


def open_tuned_cache() -> TunedCache:
    """Open the cache of launch parameters that `Weights.pack` reads: ``EAGLE_SLIM_TUNED``, or the one that ships.

    Pass one to several `Weights.pack` to count over all of them. Raises `DrafterError` for a file of another
    kind.
    """
    from .tuned_cache import default_cache

    return default_cache()


def launch_drafter(
    cfg: DrafterConfig,
    X: Tensor | Sequence[Tensor],
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
    PyTorch and waits. Raises `UsageError` for features, weights or buffers that are not of this configuration, for a
    step that does not fit (where the host can know it: written by `Buffers.set_step`, or lying on the CPU), and an
    unknown backend; `DrafterError` where the kernel cannot run.
    """
    if backend not in BACKENDS:
        raise UsageError(
            f"backend = {backend!r} is unknown; expected {' or '.join(BACKENDS)}.", option="backend", found=backend
        )
    _check_parts(cfg, weights, bufs)
    taps = _check_features(cfg, X)
    if taps[0].device != bufs.keys.device:
        raise UsageError(f"Features are on {taps[0].device}, the buffers on {bufs.keys.device}.", tensor="features")
    if weights.head.draft_vocab < cfg.draft_vocab:
        raise UsageError(
            f"draft_vocab = {cfg.draft_vocab}, but the head has {weights.head.draft_vocab} rows.",
            field="draft_vocab",
            found=cfg.draft_vocab,
            expected=weights.head.draft_vocab,
        )
    if backend == "reference":
        _check_step(taps[0].shape[1], bufs)
        _launch_reference(cfg, X, weights.first_rows(cfg.draft_vocab), bufs)
    else:
        _launch_triton(cfg, X, taps[0].shape[1], weights, bufs)
    return bufs.draft_tokens, bufs.retrieve_indices, bufs.tree_mask, bufs.tree_position_ids


def allocate_buffers(cfg: DrafterConfig, weights: Weights, cache: tuple[Tensor, Tensor] | None = None) -> Buffers:
    """Allocate everything a draft with these weights writes, the kernel's workspace included when they are packed.

    ``cache``: as in `Buffers.allocate`.
    """
    device, params = weights.head.device, None if weights.packed is None else weights.packed.launches.get(cfg)
    bufs = Buffers.allocate(cfg, device, cache)
    if params is not None:
        from .workspace import allocate_workspace

        bufs.workspace.update(allocate_workspace(cfg, params, device))
    if cfg.tail_rows:
        from .tail_rows import allocate_tails

        bufs = replace(bufs, tails=allocate_tails(cfg, params, device))
    return bufs


def set_tail(cfg: DrafterConfig, weights: Weights, bufs: Buffers, slot: int, token_ids: Sequence[int]) -> None:
    """Let token ids of a sequence join its slot's draft vocabulary, in the place of what joined it before.

    Those that the base holds or the head was never trained on do not; of more than ``follow.most`` the best ranked
    (`drafter.follow`). Raises `UsageError` for a head without rows to follow with, and for slots and ids out of range.
    """
    follow = weights.head.follow
    if follow is None or bufs.tails is None:
        raise UsageError("This head has no rows that could join a draft vocabulary: follow is None.", field="follow")
    if not 0 <= slot < cfg.num_slots:
        raise UsageError(f"Slot {slot} is not among the {cfg.num_slots} of this configuration.", slot=slot)
    wrong = [token for token in token_ids if not 0 <= token < cfg.target_vocab]
    if wrong:
        raise UsageError(f"Token id {wrong[0]}; the target has 0 to {cfg.target_vocab - 1}.", token=wrong[0])
    _set_tail(follow, bufs.tails, slot, follow.join((), token_ids))


def _set_tail(follow: FollowRows, tails: Tails, slot: int, tail: Sequence[int]) -> None:
    """Set a slot's tail, and bring its rows to where the kernel reads them."""
    from .tail_rows import gather_rows

    tails.set_slot(slot, tail, follow)
    if tails.rows is not None:
        gather_rows(follow, tails)


def check_finished(bufs: Buffers) -> None:
    """Wait for the device and raise `DrafterError` if a draft did not finish properly."""
    if bufs.workspace:
        from .host import check_finished as check

        check(bufs)


def prefill_drafter(
    cfg: DrafterConfig,
    X: Tensor | Sequence[Tensor],
    next_tokens: Tensor,
    weights: Weights,
    bufs: Buffers,
    slot: int,
    start: int = 0,
) -> None:
    """Fill a slot's KV cache with a prompt's pairs, by PyTorch, in chunks.

    ``X`` [seq, feature_width] of any float type, or three taps side by side; ``next_tokens`` int64 [seq]: the token
    after each feature; pairs take the positions from ``start`` on. Waits for the device. Raises `UsageError` when they
    and a tree do not fit, and for other shapes, slots and token ids.
    """
    _check_parts(cfg, weights, bufs)
    if not isinstance(X, Tensor):
        if not isinstance(X, (tuple, list)) or len(X) != 3 or not all(isinstance(tap, Tensor) for tap in X):
            raise UsageError(
                f"A prompt's features are one tensor, or a tuple of three; got {type(X).__name__}.", tensor="features"
            )
        X = torch.cat(tuple(X), -1)
    if not 0 <= slot < cfg.num_slots:
        raise UsageError(
            f"Slot {slot} is not among the {cfg.num_slots} of this configuration (0 is the first).", slot=slot
        )
    if not isinstance(next_tokens, Tensor) or next_tokens.is_floating_point():
        raise UsageError(
            f"Next tokens are an int64 tensor [seq]; got {getattr(next_tokens, 'dtype', next_tokens)}.",
            tensor="next_tokens",
        )
    if next_tokens.dim() != 1 or X.shape != (len(next_tokens), cfg.feature_width):
        raise UsageError(
            f"A prompt has features [seq, {cfg.feature_width}] and next tokens [seq]; got {tuple(X.shape)} and "
            f"{tuple(next_tokens.shape)}.",
            tensor="features",
            found=(tuple(X.shape), tuple(next_tokens.shape)),
        )
    check_room(slot, start, len(next_tokens), bufs.tree_rows, bufs.keys.shape[2])
    next_tokens = next_tokens.to(bufs.keys.device, torch.int64)
    wrong = next_tokens[(next_tokens < 0) | (next_tokens >= cfg.target_vocab)].tolist()
    if wrong:
        raise UsageError(
            f"Slot {slot}: token id {wrong[0]}; the target has 0 to {cfg.target_vocab - 1}.", slot=slot, token=wrong[0]
        )
    drafter = _reference_on(cfg, weights.head, bufs)
    drafter.lengths[slot] = start
    drafter.prefill(slot, X, next_tokens)


def _check_features(cfg: DrafterConfig, X: Tensor | Sequence[Tensor]) -> Sequence[Tensor]:
    taps = (X,) if isinstance(X, Tensor) else X
    separate = not isinstance(X, Tensor)
    if not isinstance(taps, (tuple, list)) or not all(isinstance(tap, Tensor) for tap in taps):
        raise UsageError(f"Features are one tensor, or a tuple of three; got {type(X).__name__}.", tensor="features")
    if (separate and len(taps) != 3) or len({(tap.shape, tap.stride(), tap.dtype, tap.device) for tap in taps}) != 1:
        raise UsageError(
            "Features are one tensor, or three of equal shape, strides and dtype on one device.", tensor="features"
        )
    if separate and not (cfg.kind == "eagle3" and cfg.has_fc and cfg.tap_norms in (0, 1, 3)):
        raise UsageError(
            "Only an EAGLE-3 head with fc takes three taps; this one takes one tensor of features.", tensor="features"
        )
    shape, width = taps[0].shape, cfg.feature_width // len(taps)
    slots = cfg.num_slots
    if len(shape) != 3 or shape[0] != slots or not 1 <= shape[1] <= MAX_NEW_TOKENS or shape[2] != width:
        raise UsageError(
            f"Features must be [{slots} slots, 1 to {MAX_NEW_TOKENS} new tokens, {cfg.feature_width}]; got "
            f"{[tuple(tap.shape) for tap in taps]}.",
            tensor="features",
            found=tuple(shape),
        )
    if any(tap.dtype != cfg.dtype or tap.stride(-1) != 1 for tap in taps):
        raise UsageError(
            f"Features must be {cfg.dtype} with contiguous rows; got {taps[0].dtype}, {taps[0].stride()}.",
            tensor="features",
            found=taps[0].dtype,
        )
    return taps


def _contiguous(head: HeadWeights) -> HeadWeights:
    """The kernel knows no strides but the contiguous ones."""
    tensors = {name: tensor.contiguous() for name, tensor in head.tensors.items()}
    return replace(head, tensors=tensors, embedding=head.embedding.contiguous())


def _check_order(head: HeadWeights, order: Tensor | None) -> None:
    if order is None:
        return
    if not isinstance(order, Tensor):
        raise UsageError(f"order must be an int64 tensor; got {type(order).__name__}.", tensor="order")
    if order.device.type == "meta":
        return
    rows = torch.arange(head.draft_vocab, device=order.device)
    if order.dtype != torch.int64 or order.shape != rows.shape or not torch.equal(order.sort().values, rows):
        raise UsageError(
            f"order must be int64 and hold each of the {head.draft_vocab} rows of the LM head once; got {order.dtype} "
            f"{tuple(order.shape)}.",
            tensor="order",
        )


def _check_head(cfg: DrafterConfig, head: HeadWeights) -> None:
    for name, value in head_dimensions(head).items():
        if value != getattr(cfg, name):
            raise UsageError(
                f"The head has {name} = {value}, the configuration {getattr(cfg, name)}; make it with "
                "DrafterConfig.of(head, ...).",
                field=name,
                found=value,
                expected=getattr(cfg, name),
            )


def _check_parts(cfg: DrafterConfig, weights: Weights, bufs: Buffers) -> None:
    """Refuse parts of another configuration: the kernel would read and write beyond them."""
    for part, kind in ((cfg, DrafterConfig), (weights, Weights), (bufs, Buffers)):
        if not isinstance(part, kind):
            raise UsageError(
                f"A draft takes a DrafterConfig, Weights and Buffers; got {type(part).__name__}.",
                part=type(part).__name__,
                expected=kind.__name__,
            )
    # Looked at once: the same parts come at every step.
    parts = (cfg, weights.head, weights.packed, len(bufs.workspace))
    known = bufs.host.get("fits")
    if known is not None and all(mine is theirs for mine, theirs in zip(parts, known, strict=True)):
        return
    _check_head(cfg, weights.head)
    _check_buffers(cfg, weights, bufs)
    if weights.packed is not None and weights.packed.stream.dtype != cfg.weight_dtype:
        raise UsageError(
            f"The weights are packed in {weights.packed.stream.dtype}, the configuration has weight_dtype = "
            f"{cfg.weight_dtype}; take Weights.pack(head, cfg).",
            field="weight_dtype",
            found=weights.packed.stream.dtype,
            expected=cfg.weight_dtype,
        )
    if weights.packed is not None and weights.packed.cos.shape[0] < cfg.max_positions:
        raise UsageError(
            f"The weights are packed for {weights.packed.cos.shape[0]} positions, the configuration has "
            f"{cfg.max_positions}; take weights.with_positions({cfg.max_positions}).",
            field="max_positions",
        )
    if weights.packed is not None and not weights._is_fixed_for(cfg.num_tokens):
        raise UsageError(
            f"The head's RoPE scaling depends on the length of the text: the weights have it for "
            f"{weights.packed.num_tokens} tokens, the configuration for {cfg.num_tokens}; take "
            f"weights.with_positions({cfg.max_positions}, {cfg.num_tokens}).",
            field="num_tokens", found=weights.packed.num_tokens, expected=cfg.num_tokens,
        )  # fmt: skip
    bufs.host["fits"] = parts


def _check_buffers(cfg: DrafterConfig, weights: Weights, bufs: Buffers) -> None:
    allocate = "allocate them with allocate_buffers(cfg, weights)."
    slots, total = cfg.num_slots, cfg.total_tokens
    cache = (slots, cfg.num_kv_heads, cfg.max_positions, cfg.head_dim)
    wanted = {"draft_tokens": (slots, total), "retrieve_indices": (slots, total, cfg.tree.path_width), "keys": cache}
    for name, shape in wanted.items():
        found = tuple(getattr(bufs, name).shape)
        if found != shape:
            raise UsageError(
                f"The buffers hold {name} {found}, the configuration needs {shape}; {allocate}",
                tensor=name,
                found=found,
                expected=shape,
            )
    width = 0 if bufs.tails is None else bufs.tails.ranks.shape[1]
    if width != cfg.tail_rows:
        raise UsageError(
            f"The buffers have room for {width} rows that join a sequence, the configuration for {cfg.tail_rows}; "
            f"{allocate}",
            tensor="tails", found=width, expected=cfg.tail_rows,
        )  # fmt: skip
    if (bufs.keys.dtype, bufs.keys.device) != (cfg.dtype, weights.head.device):
        raise UsageError(
            f"The buffers hold keys in {bufs.keys.dtype} on {bufs.keys.device}, the configuration needs {cfg.dtype} "
            f"where the weights are, on {weights.head.device}; {allocate}",
            tensor="keys",
        )
    if bufs.tree_rows != cfg.depth * cfg.top_k or bufs.target_vocab != cfg.target_vocab:
        raise UsageError(
            f"The buffers are for trees of {bufs.tree_rows} rows and {bufs.target_vocab} token ids, the configuration "
            f"has depth * top_k = {cfg.depth * cfg.top_k} and target_vocab = {cfg.target_vocab}; {allocate}",
            tree_rows=bufs.tree_rows,
            target_vocab=bufs.target_vocab,
        )
    if weights.packed is None or not bufs.workspace:
        return
    from .workspace import allocate_workspace

    for name, like in allocate_workspace(cfg, weights.packed.launches.get(cfg), "meta").items():
        tensor = bufs.workspace.get(name)
        # It may be larger: with time stamps, the barrier's state is.
        if tensor is None or tensor.dtype != like.dtype or tensor.numel() < like.numel():
            held = "no" if tensor is None else f"{tensor.dtype} {tuple(tensor.shape)}"
            raise UsageError(
                f"The buffers' workspace has {held} {name}, these weights need {like.dtype} {tuple(like.shape)}; "
                f"{allocate}",
                buffer=name,
                expected=(like.dtype, tuple(like.shape)),
            )


def _check_step(width: int, bufs: Buffers) -> None:
    """Refuse a step that does not fit, as it lies in the buffers; ``width`` counts the rows of features."""
    slots, count = len(bufs.num_new), int(bufs.active_count)
    active = bufs.active_slots[: max(0, count)].tolist()
    if not 0 <= count <= slots or len(set(active)) != count or not all(0 <= slot < slots for slot in active):
        raise UsageError(
            f"The {count} active slots {active} must be different and below {slots}.", active=active, slots=slots
        )
    num_new, prefix, new_tokens = bufs.num_new.tolist(), bufs.prefix.tolist(), bufs.new_tokens.tolist()
    for slot in active:
        if num_new[slot] > width:
            raise UsageError(
                f"Slot {slot} has {num_new[slot]} new tokens, but features of {width}.",
                slot=slot,
                num_new=num_new[slot],
                width=width,
            )
        bufs.check_sequence(slot, new_tokens[slot][: max(0, num_new[slot])], prefix[slot])


def _reference_on(cfg: DrafterConfig, head: HeadWeights, bufs: Buffers) -> ReferenceDrafter:
    """Build a reference drafter whose KV cache is the buffers' own."""
    drafter = ReferenceDrafter(head, cfg.tree)
    drafter._rotary = head.rotary.for_length(cfg.num_tokens)
    drafter._cache = SlotRows.over(bufs.keys, bufs.values)
    drafter.lengths = [0] * cfg.num_slots
    drafter.tails = [()] * cfg.num_slots
    return drafter


def _launch_triton(
    cfg: DrafterConfig, X: Tensor | Sequence[Tensor], width: int, weights: Weights, bufs: Buffers
) -> None:
    if weights.packed is None:
        raise DrafterError(
            "backend='triton' needs packed weights: Weights.pack(head, cfg).",
            backend="triton",
            missing="packed weights",
        )
    if not bufs.workspace:
        raise DrafterError(
            "backend='triton' needs a workspace: allocate_buffers(cfg, weights).", backend="triton", missing="workspace"
        )
    device = bufs.keys.device
    if device.type == "cpu":
        _check_step(width, bufs)
    elif (bufs.most_new_tokens() or 0) > width:
        raise UsageError(
            f"A slot has {bufs.most_new_tokens()} new tokens, but features of {width}.",
            num_new=bufs.most_new_tokens(),
            width=width,
        )
    from .host import launch

    try:
        launch(cfg, X if isinstance(X, Tensor) else (X[0], X[1], X[2]), weights.packed, bufs)
    except (RuntimeError, ValueError) as error:
        # Triton's words where there is no GPU, and where there is one and tensors are not on it.
        no_gpu = ("active drivers", "cannot be accessed from Triton")
        if device.type == "cuda" or not any(words in str(error) for words in no_gpu):
            raise
        raise DrafterError(
            f"backend='triton' needs an NVIDIA GPU, the buffers are on {device}. Use backend='reference', or "
            "TRITON_INTERPRET=1 in the environment to run the kernel in Triton's interpreter.",
            backend="triton",
            device=str(device),
        ) from error


def _launch_reference(cfg: DrafterConfig, X: Tensor | Sequence[Tensor], head: HeadWeights, bufs: Buffers) -> None:
    features = X if isinstance(X, Tensor) else torch.cat(tuple(X), -1)
    drafter = _reference_on(cfg, head, bufs)
    drafter.lengths = bufs.prefix.tolist()
    if bufs.tails is not None:
        drafter.tails = [bufs.tails.read_slot(slot) for slot in range(cfg.num_slots)]
    counts = bufs.num_new.tolist()
    for name, blank in _BLANK.items():
        getattr(bufs, name).fill_(blank)
    # One slot after the other, as each has its own number of new tokens and room for no more rows than those.
    for slot in bufs.active_slots[: int(bufs.active_count)].tolist():
        new = counts[slot]
        pairs = NewPairs(features[:, :new], bufs.new_tokens[:, :new].long(), bufs.num_new.long(), (new,))
        tree = drafter.draft(ActiveSlots.of([slot], cfg.num_slots, features.device), pairs)
        for name in _BLANK:
            getattr(bufs, name)[slot] = getattr(tree, name)[slot]


class TritonDrafter:
    """The persistent kernel as a `drafter.Drafter`.

    ``weight_dtype`` float8_e4m3fn stores the matrices in FP8 (sm_89 and later). ``order``: int64 [draft_vocab],
    LM-head rows best first, so that drafters over fewer of them (`like`) share what is packed. Raises `DrafterError`,
    `UnsupportedModelError` or `UsageError` when the head or the device is outside the kernel's limits.
    """

    def __init__(
        self,
        weights: HeadWeights,
        tree: TreeConfig,
        weight_dtype: torch.dtype | None = None,
        strict: bool = False,
        order: Tensor | None = None,
        packing: SharedPacking | None = None,
    ) -> None:
        check_tree_fits(weights.draft_vocab, tree)
        self.weights = weights
        self.tree = tree
        self.lengths: list[int] = []
        self.tails: list[tuple[int, ...]] = []
        """Ranks that joined each slot's draft vocabulary (`drafter.follow`)."""
        self.packing = packing or SharedPacking(weights, order, weight_dtype, strict)
        self._cfg = DrafterConfig.of(weights, tree, 1, 1, self.packing.weight_dtype)
        self._packed: Weights | None = None
        self._bufs: Buffers | None = None
        self._features: Tensor | None = None

    def like(self, weights: HeadWeights, tree: TreeConfig, order: Tensor | None = None) -> TritonDrafter:
        """Return a drafter for another tree or draft vocabulary of this head.

        It shares what is packed, unless its rows are not the first of those; then it packs its own, by ``order``.
        """
        return TritonDrafter(weights, tree, packing=self.packing.for_head(weights, order))

    def allocate(self, num_slots: int, capacity: int) -> None:
        """See `Drafter.allocate`. The head is packed once; later calls reuse buffers that are large enough."""
        cfg = self._config(num_slots, capacity)
        fits = num_slots == self._cfg.num_slots and cfg.max_positions <= self._cfg.max_positions
        if self._bufs is None or not fits:
            # Before the new ones, so that there is room for them.
            self._bufs = None
            self._cfg, self._packed = cfg, self.packing.weights(cfg)
            self._bufs = allocate_buffers(cfg, self._packed)
            shape = (num_slots, MAX_NEW_TOKENS, cfg.feature_width)
            self._features = torch.zeros(shape, dtype=cfg.dtype, device=self.weights.device)
        self.lengths = [0] * num_slots
        self.tails = [()] * num_slots
        if self._bufs.tails is not None:
            self._bufs.tails.sizes.zero_()

    def _config(self, num_slots: int, capacity: int) -> DrafterConfig:
        return DrafterConfig.of(
            self.weights, self.tree, num_slots, capacity + MAX_NEW_TOKENS, self.packing.weight_dtype
        )

    @property
    def is_tuned(self) -> bool | None:
        """Whether the launch parameters come from the tuned cache; None before `allocate`."""
        packed = None if self._packed is None else self._packed.packed
        return None if packed is None else packed.launches.is_tuned(self._cfg)

    def reset_slot(self, slot: int, num_pairs: int = 0) -> None:
        """See `Drafter.reset_slot`."""
        self.lengths[slot] = num_pairs
        self._set_tail(slot, ())

    def join(self, slot: int, token_ids: Sequence[int]) -> None:
        """See `Drafter.join`."""
        assert self.weights.follow is not None, "there is nothing to follow with"
        self._set_tail(slot, self.weights.follow.join(self.tails[slot], token_ids))

    def _set_tail(self, slot: int, tail: tuple[int, ...]) -> None:
        if self.weights.follow is None or tail == self.tails[slot]:
            return
        _, bufs, _ = self._ready()
        assert bufs.tails is not None
        self.tails[slot] = tail
        _set_tail(self.weights.follow, bufs.tails, slot, tail)

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
            if width > MAX_NEW_TOKENS or not 1 <= count <= width:
                raise UsageError(
                    f"Slot {slot}: {count} new tokens with features of {width}; a draft takes 1 to {MAX_NEW_TOKENS}, "
                    "and a feature for each.",
                    slot=slot,
                    num_new=count,
                    width=width,
                )
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
            raise UsageError("allocate() comes before prefill() and draft().", missing="allocate")
        return self._packed, self._bufs, self._features
