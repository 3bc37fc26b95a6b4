"""Decoders on the device, kept from call to call: one KV cache for all, and a decoder for each number of slots."""

from __future__ import annotations

import torch

from ..drafter.buffered import BufferedDrafter
from ..drafter.config import MAX_NEW_TOKENS
from ..drafter.reference import Drafter, ReferenceDrafter
from ..kernels.choose_tokens import ChoiceRules
from ..kernels.launch import SharedPacking, TritonDrafter
from ..target.captured import CapturedTarget
from ..target.device_buffers import DeviceTarget, KVCache
from ..target.transformers import TargetModel
from .decoder import DeviceDecoder, bucket_of

_SMALLEST_CAPACITY = 1024
_LARGEST_POWER = 131072


def capacity_for(rows: int) -> int:
    """Rows to allocate for ``rows``: a power of two, so that few sizes occur; exactly those beyond 131,072.

    There a power of two would cost gigabytes, and more positions than the persistent drafter takes.
    """
    capacity = _SMALLEST_CAPACITY
    while capacity < rows:
        capacity *= 2
    return capacity if capacity <= _LARGEST_POWER else rows


class DeviceDecoders:
    """Builds `DeviceDecoder`s and keeps them with their graphs, as long as the cache is large enough."""

    def __init__(self, target: DeviceTarget, drafter: Drafter) -> None:
        self.target, self.head, self.tree = target, drafter.weights, drafter.tree
        self.backend = _backend_of(drafter)
        """How the drafter drafts from buffers; None if it cannot."""
        self._cache: KVCache | None = None
        self.packing: SharedPacking | None = drafter.packing if isinstance(drafter, TritonDrafter) else None
        """The head as the kernel reads it, one for all numbers of slots."""
        self._decoders: dict[tuple[int, bool], DeviceDecoder] = {}

    @property
    def cache_bytes(self) -> int:
        """Memory of the target's keys and values."""
        return 0 if self._cache is None else self._cache.size_bytes

    def get(self, num_sequences: int, max_tokens: int, is_drafted: bool) -> DeviceDecoder:
        """Return a decoder for that many sequences side by side (1 to 16) of up to ``max_tokens`` tokens each.

        A cache that has to grow takes all decoders with it: their graphs hold its addresses.
        """
        num_slots, nodes = bucket_of(num_sequences), max(self.tree.total_tokens, self.tree.path_width)
        # One row more, which a captured forward writes where a row of its own goes nowhere.
        cache, needed = self._cache, max_tokens + nodes + 1
        if cache is None or cache.num_slots < num_slots or cache.capacity < needed:
            slots = num_slots if cache is None else max(num_slots, cache.num_slots)
            capacity = capacity_for(max(needed, 0 if cache is None else cache.capacity))
            # The old one goes before the new one comes, so that there is room.
            self._decoders.clear()
            self._cache = cache = None
            self._cache = KVCache(self.target, slots, capacity)
            self.target.reserve_positions(capacity + MAX_NEW_TOKENS)
        key = (num_slots, is_drafted)
        if key not in self._decoders:
            view = self._cache.first(num_slots)  # type: ignore[union-attr]
            drafter = self._drafter(num_slots, view.capacity) if is_drafted else None
            self._decoders[key] = DeviceDecoder(self.target, view, drafter, num_slots)
        return self._decoders[key]

    def _drafter(self, num_slots: int, capacity: int) -> BufferedDrafter:
        assert self.backend is not None
        return BufferedDrafter(self.head, self.tree, num_slots, capacity, self.backend, self.packing)


def try_captured(target: TargetModel, drafter: Drafter) -> CapturedTarget | str:
    """Capture one plain step of transformers' forward: the target if that works, else the reason why not."""
    name = type(target.model).__name__
    try:
        captured = CapturedTarget(target)
        with torch.inference_mode(), torch.cuda.device(target.device):
            DeviceDecoders(captured, drafter).get(1, 1, is_drafted=False).warm_up(ChoiceRules(), 1)
    except Exception as error:  # a model's own code may raise anything under capture
        torch.cuda.synchronize(target.device)
        return f"the forward of {name} cannot be captured: {str(error).splitlines()[0][:200]}"
    return captured


def _backend_of(drafter: Drafter) -> str | None:
    if isinstance(drafter, TritonDrafter):
        return "triton"
    # PyTorch's drafting waits for the device at every turn: on a GPU the step would gain nothing from it.
    is_on_cpu = isinstance(drafter, ReferenceDrafter) and drafter.weights.device.type == "cpu"
    return "reference" if is_on_cpu else None
