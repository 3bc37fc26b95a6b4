"""Decoders on the device, kept from call to call: one KV cache, and a decoder for each number of slots and tree."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..config import TreeConfig
from ..drafter.buffered import BufferedDrafter, allocate_cache
from ..drafter.config import MAX_NEW_TOKENS, DrafterConfig
from ..drafter.reference import Drafter, ReferenceDrafter
from ..errors import UnsupportedModelError, UsageError
from ..kernels.choose_tokens import ChoiceRules
from ..kernels.launch import SharedPacking, TritonDrafter
from ..target.captured import CapturedTarget
from ..target.device_buffers import DeviceTarget, KVCache
from ..target.transformers import TargetModel
from .decoder import BUCKETS, DeviceDecoder, WarmUp, bucket_of
from .kept_rows import KeptRows, capacity_for


class DeviceDecoders:
    """Builds `DeviceDecoder`s and keeps them with their graphs, as long as the cache is large enough.

    Their trees have the depth and the top_k of the drafter's, and no more nodes.
    """

    def __init__(self, target: DeviceTarget, drafter: Drafter) -> None:
        self.target, self.head, self.tree = target, drafter.weights, drafter.tree
        self.backend = _backend_of(drafter)
        """How the drafter drafts from buffers; None if it cannot."""
        self._cache: KVCache | None = None
        self.packing: SharedPacking | None = drafter.packing if isinstance(drafter, TritonDrafter) else None
        """The head as the kernel reads it, one for all numbers of slots."""
        self._draft_cache: tuple[Tensor, Tensor] | None = None
        self._decoders: dict[tuple[int, TreeConfig | None], DeviceDecoder] = {}
        self._pool = self._new_pool()
        self.kept: list[KeptRows] = []
        """What each slot of the cache still holds of the sequence that was in it last."""

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
        return torch.cuda.graph_pool_handle() if self.target.device.type == "cuda" else None

    def forget(self) -> None:
        """Forget what the slots still hold."""
        self.kept = [KeptRows()] * len(self.kept)

    def get(self, num_sequences: int, max_tokens: int, tree: TreeConfig | None) -> DeviceDecoder:
        """Return a decoder for that many sequences side by side (1 to 16) of up to ``max_tokens`` tokens each.

        ``tree`` None decodes plainly. A cache that has to grow takes all decoders with it: their graphs hold its
        addresses.
        """
        num_slots, nodes = bucket_of(num_sequences), max(self.tree.total_tokens, self.tree.path_width)
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
            self.target.reserve_positions(capacity + MAX_NEW_TOKENS)
        key = (num_slots, tree)
        if key not in self._decoders:
            assert self._cache is not None
            drafter = None if tree is None else self._drafter(tree, num_slots, self._cache)
            self._decoders[key] = DeviceDecoder(
                self.target, self._cache.first(num_slots), drafter, num_slots, self._pool
            )
        return self._decoders[key]

    @torch.inference_mode()
    def warm_up(self, num_sequences: int, max_tokens: int, tree: TreeConfig | None, rules: ChoiceRules) -> WarmUp:
        """Compile and capture what calls of up to that many sequences and tokens will use."""
        device = self.target.device
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            num_slots = min(num_sequences, BUCKETS[-1])
            decoder = self.get(num_slots, max_tokens, tree)
            decoder.clear_()
            found = decoder.warm_up(rules, num_slots)
        return replace(found, cache_bytes=self.cache_bytes)

    def _drafter(self, tree: TreeConfig, num_slots: int, cache: KVCache) -> BufferedDrafter:
        assert self.backend is not None
        if self._draft_cache is None:
            self._draft_cache = allocate_cache(self.head, tree, cache.num_slots, cache.capacity)
        return BufferedDrafter(
            self.head, tree, num_slots, cache.capacity, self.backend, self.packing, self._draft_cache
        )


def try_captured(target: TargetModel, drafter: Drafter) -> CapturedTarget | str:
    """Capture one plain step of transformers' forward: the target if that works, else the reason why not."""
    name = type(target.model).__name__
    try:
        captured = CapturedTarget(target)
        with torch.inference_mode(), torch.cuda.device(target.device):
            DeviceDecoders(captured, drafter).get(1, 1, tree=None).warm_up(ChoiceRules(), 1)
    except Exception as error:  # a model's own code may raise anything under capture
        torch.cuda.synchronize(target.device)
        return f"the forward of {name} cannot be captured: {str(error).splitlines()[0][:200]}"
    return captured


def _backend_of(drafter: Drafter) -> str | None:
    if isinstance(drafter, TritonDrafter):
        return "triton"
    # PyTorch's drafting waits for the device at every turn: on a GPU the step would gain nothing from it.
    if not isinstance(drafter, ReferenceDrafter) or drafter.weights.device.type != "cpu":
        return None
    try:
        DrafterConfig.of(drafter.weights, drafter.tree, 1, 1)
    except (UnsupportedModelError, UsageError):
        # Heads and trees beyond what the buffers are made for.
        return None
    return "reference"
