"""A head laid out for the persistent kernel, once for all who draft with it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import UsageError, misfit
from .dimensions import DrafterConfig, check_head_fits, check_kernel_limits
from .weights import HeadWeights

if TYPE_CHECKING:
    from .packed_head import PackedHead
    from .tuned_cache import TunedCache


@dataclass(frozen=True)
class Weights:
    """A head to draft with: as tensors for the reference, and packed for the kernel (`pack`).

    Raises `UsageError` for the packed weights of another head.
    """

    head: HeadWeights
    packed: PackedHead | None = None
    order: Tensor | None = None
    """int64 [draft_vocab]: LM-head rows best first; a draft over fewer rows takes the first of these."""

    def __post_init__(self) -> None:
        if not isinstance(self.head, HeadWeights):
            raise UsageError(f"Weights are made of HeadWeights; got {type(self.head).__name__}.")
        if self.packed is not None and self.packed.draft_vocab != self.head.draft_vocab:
            raise misfit("draft_vocab", self.head.draft_vocab, self.packed.draft_vocab)

    @classmethod
    def pack(
        cls, head: HeadWeights, cfg: DrafterConfig, order: Tensor | None = None, cache: TunedCache | None = None
    ) -> Weights:
        """Lay a head out for the kernel on its device, with tuned launch parameters where the cache has them.

        One packing serves every number of slots and every tree; each configuration's launch parameters are looked up
        when it is first used. ``order``: int64 [draft_vocab], LM-head rows best first; then a launch may use any
        smaller ``draft_vocab``. ``cache``: default the one that ``EAGLE_SLIM_TUNED`` names or the one that ships.
        Raises `UsageError` for a configuration or an order of another head, and draft ids that the target does not
        have.
        """
        from .kernel_launch import chip_of
        from .packed_head import pack_head
        from .tuned_cache import LaunchTable, open_tuned_cache

        check_kernel_limits(cfg)
        check_head_fits(cfg, head)
        _check_order(head, order)
        ids = head.draft_to_target
        if ids.device.type != "meta" and not bool(((ids >= 0) & (ids < cfg.target_vocab)).all()):
            raise misfit("draft_to_target", f"ids of the target, 0 to {cfg.target_vocab - 1}", ids)
        cache, chip = open_tuned_cache() if cache is None else cache, chip_of(head.device)
        launches = LaunchTable(cache.layout(cfg, chip), cache, chip)
        launches.get(cfg)  # a miss that is an error is one before anything is packed
        return cls(head, pack_head(_contiguous(head), cfg, launches, order), order)

    def first_rows(self, draft_vocab: int) -> HeadWeights:
        """The head with only the LM-head rows that a draft over ``draft_vocab`` of them uses, ascending."""
        if draft_vocab == self.head.draft_vocab:
            return self.head
        ranked = torch.arange(self.head.draft_vocab, device=self.head.device) if self.order is None else self.order
        return self.head.of_rows(ranked[:draft_vocab].sort().values)

    def with_positions(self, num_positions: int, num_tokens: int | None = None) -> Weights:
        """The same packed weights with RoPE tables for ``num_positions`` positions of a KV cache.

        ``num_tokens`` (`DrafterConfig.num_tokens`; default ``num_positions``): length of text that a scaling which
        depends on it is fixed for.
        """
        from .kernels.frontier import MAX_DEPTH

        assert self.packed is not None, "pack() comes first"
        num_tokens = num_positions if num_tokens is None else num_tokens
        if len(self.packed.cos) >= num_positions and self.is_fixed_for(num_tokens):
            return self
        cos, sin = self.head.rotary_halves(num_positions + MAX_DEPTH, num_tokens)
        return replace(self, packed=replace(self.packed, cos=cos, sin=sin, num_tokens=num_tokens))

    def is_fixed_for(self, num_tokens: int) -> bool:
        """Whether the RoPE tables are those of a text of this length, if a scaling depends on it."""
        return self.packed is None or self.head.rotary.by_length is None or self.packed.num_tokens == num_tokens


class SharedPacking:
    """A head packed once, when it is first drafted with, for all who draft with it.

    One serves every number of slots, every tree, every length, and every draft vocabulary that is the first of its
    rows in ``order`` (int64 [draft_vocab], LM-head rows best first; None for the head's own order).
    """

    def __init__(self, head: HeadWeights, order: Tensor | None = None, weight_dtype: torch.dtype | None = None) -> None:
        self.head, self.order = head, order
        self.weight_dtype = weight_dtype or head.dtype
        self._weights: Weights | None = None

    def weights(self, cfg: DrafterConfig) -> Weights:
        """The packed head with positions for ``cfg``; packs at the first call. Raises as `Weights.pack` does."""
        if self._weights is None:
            self._weights = Weights.pack(self.head, cfg, self.order)
        self._weights = self._weights.with_positions(cfg.max_positions, cfg.num_tokens)
        return self._weights

    def serves(self, head: HeadWeights) -> bool:
        """Whether ``head`` is this one with all or the first of its LM-head rows."""
        mine, ids = self.head, head.draft_to_target
        shared = (head.tensors is mine.tensors, head.embedding is mine.embedding, head.rotary is mine.rotary)
        if not all(shared) or len(ids) > mine.draft_vocab or ids.device != mine.device:
            return False
        ranked = mine.draft_to_target if self.order is None else mine.draft_to_target[self.order]
        return torch.equal(ranked[: len(ids)].sort().values, ids)


def _contiguous(head: HeadWeights) -> HeadWeights:
    """The kernel knows no strides but the contiguous ones."""
    tensors = {name: tensor.contiguous() for name, tensor in head.tensors.items()}
    return replace(head, tensors=tensors, embedding=head.embedding.contiguous())


def _check_order(head: HeadWeights, order: Tensor | None) -> None:
    if order is None:
        return
    wanted = f"int64 with each of the {head.draft_vocab} rows of the LM head once"
    if not isinstance(order, Tensor):
        raise misfit("order", wanted, type(order).__name__)
    if order.device.type == "meta":
        return
    rows = torch.arange(head.draft_vocab, device=order.device)
    if order.dtype != torch.int64 or order.shape != rows.shape or not torch.equal(order.sort().values, rows):
        raise misfit("order", wanted, (order.dtype, tuple(order.shape)))
