"""Decoders, kept from call to call: one KV cache, and a decoder for each number of slots and tree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from ..drafter.drafter import BufferedDrafter, Drafter
from ..errors import DeviceMemoryError
from ..ops import current, ranges_wanted
from ..settings import PartialVerification, TreeConfig
from ..target.cache import KVCache, Target
from ..target.wrapper import TargetModel
from .decoder import BUCKETS, Decoder, WarmUp, bucket_of
from .graphs import GraphPool, recall
from .kept_rows import KeptRows, capacity_for
from .kernels.choice_kernels import ChoiceRules
from .run_ahead import PartialDecoder
from .shapes import CHAIN, Acceptance, Costs

Result = TypeVar("Result")
MOST_DECODERS = 12
"""Numbers of slots and trees that decoders are kept for: those used last."""


class Decoders:
    """Builds `Decoder`s and keeps `MOST_DECODERS` of them with their graphs, as long as the cache is large enough.

    The drafter's tree is the largest of their trees.
    """

    def __init__(self, target: TargetModel, drafter: Drafter) -> None:
        self.model, self.drafter, self.tree = target, drafter, drafter.tree
        self._cache: KVCache | None = None
        self._draft_cache: tuple[Tensor, Tensor] | None = None
        self._decoders: dict[tuple[int, TreeConfig | None, PartialVerification | None, bool], Decoder] = {}
        self.acceptance, self.costs = Acceptance(), Costs(target.weight_bytes, _token_bytes(target.runs))
        """What steps that choose their shape have learned of the head, and of this device."""
        self._pool = GraphPool() if self.has_graphs else None
        self.kept: list[KeptRows] = []
        """Rows that each slot of the cache still holds of its last sequence."""
        target.users.add(self)
        # A target that cannot run is refused now, not in the first call.
        _ = self.eager_reason

    @property
    def target(self) -> Target:
        """The target that runs the forwards."""
        return self.model.runs

    @property
    def eager_reason(self) -> str | None:
        """Why the target's forward is not in the graphs; None where it is."""
        return "EAGLE_SLIM_RANGES names all that runs" if ranges_wanted() else self.model.eager_reason

    def drop(self) -> None:
        """Free the caches and all decoders with their graphs."""
        self._decoders.clear()
        self._cache = self._draft_cache = None
        self.kept = []

    def run(self, act: Callable[[], Result]) -> Result:
        """Run a call with the model held (`TargetModel.held`).

        Raises `DeviceMemoryError` where the device's memory does not suffice, with all of it free again.
        """
        try:
            with self.model.held():
                return act()
        except torch.OutOfMemoryError as error:
            reason = str(error).partition(". ")[0]
        # Only here, as the error's traceback holds the tensors of all frames.
        with self.model.hold():
            self.drop()
        if self.model.device.type == "cuda":
            torch.cuda.empty_cache()
        raise DeviceMemoryError(
            f"The memory of {self.model.device} does not suffice ({reason}). Lower max_slots, the lengths of prompts "
            "and answers (max_new_tokens, max_model_len) or the trees' size (total_tokens); draft_weights='fp8', a "
            "smaller draft_vocab and fewer other programs on the device leave more, too. What this call held is free "
            "again."
        )

    @property
    def has_graphs(self) -> bool:
        """Whether steps, or what of them can be captured, are replayed from CUDA graphs."""
        return self.target.device.type == "cuda" and not ranges_wanted()

    @property
    def max_slots(self) -> int | None:
        """Most sequences side by side; None for any number: only kernels and their graphs have a limit."""
        return BUCKETS[-1] if self.target.device.type == "cuda" or self.drafter.packing is not None else None

    @property
    def cache_bytes(self) -> int:
        """Memory of the keys and values, the target's and the drafter's."""
        drafter = sum(tensor.numel() * tensor.element_size() for tensor in self._draft_cache or ())
        return drafter + (0 if self._cache is None else self._cache.size_bytes)

    @property
    def graph_bytes(self) -> int:
        """Device memory that capturing the graphs has taken, those of all decoders."""
        return sum(decoder.graph_bytes for decoder in self._decoders.values())

    def forget(self) -> None:
        """Forget what the slots still hold."""
        self.kept = [KeptRows()] * len(self.kept)

    def get(
        self, num_sequences: int, max_tokens: int, tree: TreeConfig | None, ahead: PartialVerification | None = None,
        any_shape: bool = False,
    ) -> Decoder:  # fmt: skip
        """Return a decoder for that many sequences side by side, `max_slots` at most, of up to ``max_tokens`` each.

        ``tree`` None decodes plainly; ``ahead``: how steps run ahead, if they do; ``any_shape``: whether a step may
        have any tree up to the drafter's, or none. The model must be held. A cache that has to grow takes all decoders
        with it: their graphs hold its addresses.
        """
        shapes = [self.tree] if ahead is None else [self.tree, ahead.chain]
        # Each number of slots has graphs of its own: few sizes shall occur.
        num_slots = bucket_of(num_sequences) if self.has_graphs else num_sequences
        nodes = max(max(shape.total_tokens, shape.path_width) for shape in shapes)
        # One row more, which a captured forward writes where a row of its own goes nowhere.
        cache, needed = self._cache, max_tokens + nodes + 1
        if cache is None or cache.num_slots < num_slots or cache.capacity < needed:
            slots = num_slots if cache is None else max(num_slots, cache.num_slots)
            capacity = capacity_for(max(needed, 0 if cache is None else cache.capacity))
            # The old one goes before the new one comes, so that there is room.
            cache = None
            self.drop()
            self.kept = [KeptRows()] * slots
            cache = KVCache.allocate(self.target, slots, capacity)
            self.target.reserve_positions(capacity + max(shape.new_tokens_width for shape in shapes))
            # Set last: a cache means that setup finished.
            self._cache = cache
        # Begun with the smallest, as the others are built when a step first has them.
        tree = CHAIN if any_shape else tree
        build = partial(self._build, cache.first(num_slots), tree, ahead, cache, any_shape)
        return recall(self._decoders, (num_slots, tree, ahead, any_shape), MOST_DECODERS, build)

    def _build(
        self, slots: KVCache, tree: TreeConfig | None, ahead: PartialVerification | None, whole: KVCache,
        any_shape: bool,
    ) -> Decoder:  # fmt: skip
        """Build a decoder over ``slots``, the first of the ``whole`` cache."""
        waits = self.eager_reason is not None
        if tree is None:
            return Decoder(self.target, slots, None, waits, self._pool)
        if self._draft_cache is None:
            self._draft_cache = self.drafter.allocate_cache(whole.num_slots, whole.capacity)
        first = self._buffered(tree, slots)
        if ahead is not None:
            return PartialDecoder(self.target, slots, first, ahead, waits, self._pool)
        another = partial(self._buffered, slots=slots, beside=first) if any_shape else None
        return Decoder(self.target, slots, first, waits, self._pool, another=another)

    def _buffered(self, tree: TreeConfig, slots: KVCache, beside: BufferedDrafter | None = None) -> BufferedDrafter:
        drafter = self.drafter.like(self.drafter.weights, tree)
        return drafter.on_slots(slots.num_slots, slots.capacity, self._draft_cache, beside)

    @torch.inference_mode()
    def warm_up(
        self, num_sequences: int, max_tokens: int, trees: Sequence[TreeConfig | None], rules: ChoiceRules,
        ahead: PartialVerification | None = None,
    ) -> WarmUp:  # fmt: skip
        """Compile and capture what calls of up to that many sequences and tokens will use. The model must be held.

        ``trees``: the shapes that steps may have.
        """
        with current(self.target.device):
            num_slots = min(num_sequences, self.max_slots or num_sequences)
            decoder = self.get(num_slots, max_tokens, trees[0], ahead, len(trees) > 1)
            decoder.clear_()
            found = decoder.warm_up(rules, num_slots, trees)
        return replace(found, cache_bytes=self.cache_bytes)


def _token_bytes(target: Target) -> int:
    """Bytes of a token's keys and values, in all layers."""
    shapes = target.layer_shapes
    return target.dtype.itemsize * sum(shape.kv_heads * (shape.key_dim + shape.value_dim) for shape in shapes)
