"""Decoders, kept from call to call: one KV cache, and a decoder for each number of slots and tree."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..drafter.drafter import BufferedDrafter, Drafter
from ..ops import current
from ..settings import TreeConfig
from ..target.cache import KVCache
from ..target.wrapper import TargetModel
from .decoder import BUCKETS, Decoder, WarmUp, bucket_of
from .kept_rows import KeptRows, capacity_for
from .kernels.choice_kernels import ChoiceRules
from .pace import Pace


class Decoders:
    """Builds `Decoder`s and keeps them with their graphs, as long as the cache is large enough.

    Their trees have the depth and the top_k of the drafter's, and no more nodes.
    """

    def __init__(self, target: TargetModel, drafter: Drafter) -> None:
        self.target, self.drafter, self.tree = target.runs, drafter, drafter.tree
        self.eager_reason = target.eager_reason
        """Why the target's forward is not in the graphs; None where it is."""
        self._cache: KVCache | None = None
        self._draft_cache: tuple[Tensor, Tensor] | None = None
        self._decoders: dict[tuple[int, TreeConfig | None], Decoder] = {}
        self._pool = self._new_pool()
        self.kept: list[KeptRows] = []
        """What each slot of the cache still holds of the sequence that was in it last."""
        self.paces: dict[int, Pace] = {}
        """What was timed, by the number of sequences side by side."""

    @property
    def has_graphs(self) -> bool:
        """Whether steps, or what of them can be captured, are replayed from CUDA graphs."""
        return self.target.device.type == "cuda"

    @property
    def max_slots(self) -> int | None:
        """Most sequences side by side; None for any number: only kernels and their graphs have a limit."""
        return BUCKETS[-1] if self.has_graphs or self.drafter.packing is not None else None

    @property
    def words(self) -> str:
        """How steps run."""
        if not self.has_graphs:
            return f"eager steps ({self.eager_reason})"
        whole = self.eager_reason is None
        return "steps from CUDA graphs" if whole else f"steps from CUDA graphs but for the target ({self.eager_reason})"

    @property
    def cache_bytes(self) -> int:
        """Memory of the keys and values, the target's and the drafter's."""
        drafter = sum(tensor.numel() * tensor.element_size() for tensor in self._draft_cache or ())
        return drafter + (0 if self._cache is None else self._cache.size_bytes)

    @property
    def graph_bytes(self) -> int:
        """Device memory that capturing the graphs has taken, those of all decoders."""
        return sum(decoder.graph_bytes for decoder in self._decoders.values())

    def _new_pool(self) -> Any:
        """A handle of memory that the graphs of all decoders share; None where there are no graphs."""
        return torch.cuda.graph_pool_handle() if self.has_graphs else None

    def forget(self) -> None:
        """Forget what the slots still hold."""
        self.kept = [KeptRows()] * len(self.kept)

    def get(self, num_sequences: int, max_tokens: int, tree: TreeConfig | None) -> Decoder:
        """Return a decoder for that many sequences side by side, `max_slots` at most, of up to ``max_tokens`` each.

        ``tree`` None decodes plainly. A cache that has to grow takes all decoders with it: their graphs hold its
        addresses.
        """
        widest = self.tree.new_tokens_width
        # Each number of slots has graphs of its own: few sizes shall occur.
        num_slots = bucket_of(num_sequences) if self.has_graphs else num_sequences
        nodes = max(self.tree.total_tokens, self.tree.path_width)
        # One row more, which a captured forward writes where a row of its own goes nowhere.
        cache, needed = self._cache, max_tokens + nodes + 1
        if cache is None or cache.num_slots < num_slots or cache.capacity < needed:
            slots = num_slots if cache is None else max(num_slots, cache.num_slots)
            capacity = capacity_for(max(needed, 0 if cache is None else cache.capacity))
            # The old one goes before the new one comes, so that there is room.
            self._decoders.clear()
            # PyTorch takes no more graphs into a pool whose graphs have all gone.
            self._pool = self._new_pool()
            self._cache = cache = self._draft_cache = None
            self._cache = KVCache(self.target, slots, capacity)
            self.kept = [KeptRows()] * slots
            self.target.reserve_positions(capacity + widest)
        key = (num_slots, tree)
        if key not in self._decoders:
            assert self._cache is not None
            drafter = None if tree is None else self._drafter(tree, num_slots, self._cache)
            self._decoders[key] = Decoder(
                self.target, self._cache.first(num_slots), drafter, num_slots, self.eager_reason is not None, self._pool
            )
        return self._decoders[key]

    @torch.inference_mode()
    def warm_up(self, num_sequences: int, max_tokens: int, tree: TreeConfig | None, rules: ChoiceRules) -> WarmUp:
        """Compile and capture what calls of up to that many sequences and tokens will use."""
        device = self.target.device
        with current(device):
            num_slots = min(num_sequences, self.max_slots or num_sequences)
            decoder = self.get(num_slots, max_tokens, tree)
            decoder.clear_()
            found = decoder.warm_up(rules, num_slots)
        return replace(found, cache_bytes=self.cache_bytes)

    def _drafter(self, tree: TreeConfig, num_slots: int, cache: KVCache) -> BufferedDrafter:
        drafter = self.drafter.like(self.drafter.weights, tree)
        if self._draft_cache is None:
            self._draft_cache = drafter.allocate_cache(cache.num_slots, cache.capacity)
        return drafter.on_slots(num_slots, cache.capacity, self._draft_cache)
