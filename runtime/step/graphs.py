"""CUDA graphs of steps, the memory they share, and how many of what is built for a call are kept for the next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar
from weakref import WeakSet

import torch

from ..ops import side_stream

Run = Callable[[], None]
Key = TypeVar("Key")
Value = TypeVar("Value")


class GraphPool:
    """Memory that graphs share, as they leave nothing in it from one replay to the next."""

    def __init__(self) -> None:
        self._graphs: WeakSet[torch.cuda.CUDAGraph] = WeakSet()
        self._handle: Any = None

    def capture(self, run: Run) -> Run:
        """Capture work that has run on the side stream before; returns what replays it, and keeps its graph."""
        # PyTorch takes no more graphs into a pool whose graphs have all gone.
        if not self._graphs:
            self._handle = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with (
            side_stream() as stream,
            torch.cuda.graph(graph, pool=self._handle, stream=stream, capture_error_mode="thread_local"),
        ):
            run()
        self._graphs.add(graph)
        return graph.replay


def recall(kept: dict[Key, Value], key: Key, most: int, build: Callable[[], Value]) -> Value:
    """Return what is kept under a key, or build and keep it; of ``most`` the one not used for longest makes room.

    It goes before the new one comes. ``kept`` is in the order of use.
    """
    if key in kept:
        kept[key] = kept.pop(key)
        return kept[key]
    while len(kept) >= most:
        del kept[next(iter(kept))]
    return kept.setdefault(key, build())
