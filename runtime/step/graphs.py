"""CUDA graphs of a decoder's work: the memory that they share, warming up, and replays.

A capture can neither compile a kernel nor create a library's handle, so work is run once over no slots before. Work
that waits for the host stays outside of graphs. Without a GPU, and where ranges are named, nothing is captured.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor

from ..compiling.kernels.jobs import Job, recording
from ..compiling.pool import CompilePool
from ..ops import REHEARSES, count_launches, counted_apart, side_stream
from .kernels.choice_kernels import ChoiceRules

BUCKETS = (1, 2, 4, 8, 16)
"""Numbers of slots, and of active slots in a step, that have graphs."""
MAX_RULES = 8
"""Rules of choice that a decoder keeps graphs for: those used last."""
Work: TypeAlias = Callable[[], None]
GraphKey: TypeAlias = tuple[object, ...]
_LOG = logging.getLogger(__name__)
_COMPILING = "compiling kernels; the first time on a machine takes longest"
KeptKey = TypeVar("KeptKey")
Kept = TypeVar("Kept")


@dataclass(frozen=True)
class WarmUp:
    """Time and memory of a warm-up; zero where nothing had to be done."""

    compile_s: float = 0.0
    """Seconds for running everything once: compiling kernels, creating the libraries' handles."""
    capture_s: float = 0.0
    """Seconds for capturing it into graphs."""
    num_graphs: int = 0
    graph_bytes: int = 0
    """Device memory that the graphs take, their pool included."""
    cache_bytes: int = 0
    """Device memory of the keys and values, of target and drafter."""


@dataclass(frozen=True)
class Phase:
    """Part of a step."""

    name: str
    run: Work
    waits: bool = False
    """Whether it waits for the host, so that no CUDA graph can hold it."""


def recall(kept: dict[KeptKey, Kept], key: KeptKey, max_kept: int, build: Callable[[], Kept]) -> Kept:
    """Return the value of a key, or build and keep it; ``kept`` holds the ``max_kept`` used last, in the order of use.

    The oldest is dropped before the new one is built, so that its memory is free.
    """
    if key in kept:
        kept[key] = kept.pop(key)
        return kept[key]
    while len(kept) >= max_kept:
        del kept[next(iter(kept))]
    return kept.setdefault(key, build())


def bucket_of(count: int) -> int:
    """Return the smallest bucket that holds ``count`` slots."""
    return next(bucket for bucket in BUCKETS if bucket >= count)


def buckets_up_to(count: int) -> Sequence[int]:
    """List the buckets that steps of up to ``count`` slots use."""
    return BUCKETS[: BUCKETS.index(bucket_of(count)) + 1]


def group_phases(key: GraphKey, phases: Sequence[Phase]) -> Mapping[GraphKey, Phase]:
    """Group phases into graphs: all in one where none waits, else each by itself."""
    if any(phase.waits for phase in phases):
        return {(*key, phase.name): phase for phase in phases}

    def run() -> None:
        for phase in phases:
            phase.run()

    return {key: Phase("all", run)}


class GraphPool:
    """Memory that graphs share: no replay needs values of another."""

    def __init__(self) -> None:
        self._graphs: WeakSet[torch.cuda.CUDAGraph] = WeakSet()
        self._handle: Any = None

    def capture(self, run: Work) -> Work:
        """Capture work that has run on the side stream before; returns its replay."""
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


class Graphs:
    """Runs phases, from graphs where they can be captured; keeps those of the `MAX_RULES` rules used last.

    ``pool``: memory of the graphs; None captures nothing. ``hidden``: tensors, each with the value under which it shows
    no slots; they have it while work is run to be compiled, and get theirs back. ``compiler`` compiles what groups
    launch in other processes; None: in this one, when it is launched.
    """

    def __init__(
        self, pool: GraphPool | None, hidden: Sequence[tuple[Tensor, int]], compiler: CompilePool | None = None
    ) -> None:
        self._pool, self._hidden, self._compiler = pool, hidden, compiler
        self._jobs: dict[tuple[ChoiceRules, GraphKey], dict[Job, None]] = {}
        """Kernels of groups that were submitted."""
        self.kept: dict[ChoiceRules, dict[GraphKey, Work]] = {}
        """Replays by rules of choice, those used last at the end, and by the work that a graph holds."""
        self.size_bytes = 0
        """Memory that capturing graphs has taken."""
        self.num_pauses = 0
        """Times that steps were held up by a capture, to time a shape, or by a chunk of a prompt."""

    @property
    def can_capture(self) -> bool:
        """Whether phases are replayed from graphs, but for those that wait."""
        return self._pool is not None

    def get(self, key: GraphKey, rules: ChoiceRules) -> Work | None:
        """Return the replay of a graph; None where there is none yet."""
        return self._kept_for(rules).get(key)

    def run(self, key: GraphKey, rules: ChoiceRules, phases: Sequence[Phase]) -> None:
        """Run phases, as one graph where none waits, else each from its own where it can be captured."""
        kept = self._kept_for(rules)
        for name, group in group_phases(key, phases).items():
            if not self.can_capture or group.waits:
                group.run()
                continue
            if name not in kept:
                self.warm_up({name: group}, rules)
            kept[name]()

    def warm_up(self, groups: Mapping[GraphKey, Phase], rules: ChoiceRules) -> WarmUp:
        """Compile and capture those of the groups (`group_phases`) that have no graph yet."""
        kept = self._kept_for(rules)
        missing = {key: group.run for key, group in groups.items() if not group.waits and key not in kept}
        if not missing:
            return WarmUp()
        started, bytes_before = time.perf_counter(), self.size_bytes
        if self._compiler is not None and not self.are_compiled(groups, rules):
            _LOG.info(_COMPILING)
            for key in groups:
                self._compiler.wait(self._jobs.get((rules, key), ()))
        self.practise(missing.values())
        compiled = time.perf_counter()
        for key, run in missing.items():
            kept[key] = self._capture(run)
        captured = time.perf_counter()
        return WarmUp(compiled - started, captured - compiled, len(missing), self.size_bytes - bytes_before)

    def are_compiled(self, groups: Mapping[GraphKey, Phase], rules: ChoiceRules) -> bool:
        """Return whether the groups' kernels are compiled; other processes compile them, in the order of asking."""
        if self._compiler is None:
            return True
        known = self._kept_for(rules).keys() | {key for of, key in self._jobs if of == rules}
        new = {key: group.run for key, group in groups.items() if not group.waits and key not in known}
        if new:
            with counted_apart(), self._no_slots(), side_stream():
                for key, run in new.items():
                    jobs = self._jobs[rules, key] = {}
                    with recording(jobs):
                        run()
                    self._compiler.submit(jobs)
        for key in groups.keys() - self._kept_for(rules).keys():
            submitted = self._jobs.get((rules, key))
            if submitted and not self._compiler.are_done(submitted):
                return False
            # Once they are there, nobody asks again.
            self._jobs[rules, key] = {}
        return True

    def practise(self, runs: Iterable[Work]) -> None:
        """Run work over no slots, to load kernels and create handles, which a capture cannot."""
        if self._compiler is None:
            _LOG.info(_COMPILING)
        with counted_apart(), self._no_slots(), side_stream():
            for run in runs:
                run()

    def _kept_for(self, rules: ChoiceRules) -> dict[GraphKey, Work]:
        return recall(self.kept, rules, MAX_RULES, dict)

    def _capture(self, run: Work) -> Work:
        """Capture work that has run before into a graph; returns its replay, which counts its launches."""
        assert self._pool is not None
        self.num_pauses += 1
        before = torch.cuda.mem_get_info()[0]
        with counted_apart() as launches:
            replay = self._pool.capture(run)
        self.size_bytes += max(0, before - torch.cuda.mem_get_info()[0])

        def replayed() -> None:
            count_launches(launches)
            replay()

        return replayed

    @contextmanager
    def _no_slots(self) -> Iterator[None]:
        """Make all slots look empty, and restore them; what runs meanwhile is a rehearsal (`REHEARSES`)."""
        # A phase may be practised between those of a real step, and a commit must neither act on that step's record nor
        # list the running slots. With prompt and slot both of length 0, a chunk has no rows.
        before = [tensor.clone() for tensor, _ in self._hidden]
        for tensor, blank in self._hidden:
            tensor.fill_(blank)
        torch.cuda.synchronize()
        token = REHEARSES.set(True)
        try:
            yield
        finally:
            REHEARSES.reset(token)
        torch.cuda.synchronize()
        for (tensor, _), value in zip(self._hidden, before, strict=True):
            tensor.copy_(value)
