"""Decoding on the device: everything that a number of slots needs, and its steps, captured as CUDA graphs.

One step is four phases, none of which waits for the host or allocates::

    draft    what joins the draft vocabulary; the persistent kernel: trees of the active slots, from last step's tokens
             and features
    verify   rows of all nodes, then the target's forward over them
    accept   the target's choice at every node, then the walk: path, tokens, lengths, ends
    commit   the path's keys, values and features to their places; the list of slots that still run

On a GPU a step is replayed from one graph for each bucket of active slots (or one graph a phase, to be timed); on the
CPU the same phases run one after another with the PyTorch twins.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from ..drafter.buffered import BufferedDrafter
from ..drafter.follow import Tails
from ..kernels import acceptance, prompt_chunks, tail_rows, tree_rows
from ..kernels.acceptance import SlotState
from ..kernels.choose_tokens import (
    ChoiceRules,
    ChoiceScratch,
    ChoiceState,
    choice_scratch,
    choose_tokens,
    choose_tokens_ref,
    mark_seen,
    mark_seen_ref,
)
from ..kernels.prompt_chunks import ChunkRows, PromptBox
from ..kernels.tree_rows import ForwardRows
from ..target.device_buffers import DeviceTarget, ForwardBuffers, KVCache

BUCKETS = (1, 2, 4, 8, 16)
"""Numbers of slots, and of active slots in a step, that there are graphs for."""
CHUNKS = (64, 512)
"""Rows of a prompt's forward: the smallest that holds what is left of it, else the largest."""
PHASES = ("draft", "verify", "accept", "commit")

Run = Callable[[], None]


@dataclass(frozen=True)
class WarmUp:
    """What getting ready took; nothing where everything was ready before, and where there are no graphs."""

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
class StepOps:
    """The operations of a step outside drafter and target: kernels, or their twins."""

    tree_rows: Callable[..., None]
    begin_prompt: Callable[..., None]
    chunk_rows: Callable[..., None]
    end_chunk: Callable[..., None]
    choose_tokens: Callable[..., None]
    mark_seen: Callable[..., None]
    walk: Callable[..., None]
    commit_kv: Callable[..., None]
    commit_features: Callable[..., None]
    list_active: Callable[..., None]
    join_tokens: Callable[..., None]
    gather_rows: Callable[..., None]

    @classmethod
    def for_device(cls, device: torch.device) -> StepOps:
        """Kernels on a GPU, twins elsewhere."""
        if device.type == "cuda":
            return cls(
                tree_rows.tree_rows, prompt_chunks.begin_prompt, prompt_chunks.chunk_rows, prompt_chunks.end_chunk,
                choose_tokens, mark_seen, acceptance.walk, acceptance.commit_kv, acceptance.commit_features,
                acceptance.list_active, tail_rows.join_tokens, tail_rows.gather_rows,
            )  # fmt: skip
        return cls(
            tree_rows.tree_rows_ref, prompt_chunks.begin_prompt_ref, prompt_chunks.chunk_rows_ref,
            prompt_chunks.end_chunk_ref, choose_tokens_ref, mark_seen_ref, acceptance.walk_ref,
            acceptance.commit_kv_ref, acceptance.commit_features_ref, acceptance.list_active_ref,
            tail_rows.join_tokens_ref, tail_rows.gather_rows_ref,
        )  # fmt: skip


def bucket_of(count: int) -> int:
    """The smallest bucket that holds ``count`` slots."""
    return next(bucket for bucket in BUCKETS if bucket >= count)


def chunk_of(left: int) -> int:
    """The chunk for ``left`` tokens of a prompt."""
    return next((chunk for chunk in CHUNKS if chunk >= left), CHUNKS[-1])


class DeviceDecoder:
    """State, buffers and steps for up to ``num_slots`` sequences of ``cache.capacity`` rows each.

    ``drafter`` None decodes plainly: a tree of its root alone. ``pool``: memory that the graphs share with those of
    other decoders, as graphs leave nothing in it from one replay to the next; None is a pool of its own.
    """

    def __init__(
        self,
        target: DeviceTarget,
        cache: KVCache,
        drafter: BufferedDrafter | None,
        num_slots: int,
        pool: Any = None,
    ) -> None:
        device = target.device
        self.target, self.cache, self.drafter, self.num_slots = target, cache, drafter, num_slots
        self.nodes = 1 if drafter is None else drafter.tree.total_tokens
        self.width = 1 if drafter is None else drafter.tree.path_width
        self.ops = StepOps.for_device(device)
        shared = {} if drafter is None else {
            name: getattr(drafter.bufs, name)
            for name in ("new_tokens", "num_new", "prefix", "active_slots", "active_inverse", "active_count")
        }  # fmt: skip
        self.state = SlotState.allocate(num_slots, prompt_chunks.MAX_EOS, device, **shared)
        # A prompt's last chunk walks alone, beside slots that are running.
        own = SlotState.allocate(num_slots, prompt_chunks.MAX_EOS, device)
        self.entering = replace(
            self.state, active_slots=own.active_slots, active_inverse=own.active_inverse,
            active_count=own.active_count, record=own.record,
        )  # fmt: skip
        choice = ChoiceState.allocate(num_slots, cache.capacity, target.vocab_size, device)
        self.choice = replace(choice, num_generated=self.state.num_generated)
        self.box = PromptBox.allocate(cache.capacity, device)
        self._first_row = torch.zeros(1, dtype=torch.int32, device=device)
        self._bufs = target.new_buffers(num_slots, self.nodes, num_slots * self.nodes)
        self._choices = torch.zeros((num_slots, self.nodes), dtype=torch.int32, device=device)
        self._roots = _Roots(self.state) if drafter is None else None
        self.follow = None if drafter is None else drafter.head.follow
        """What may join each slot's draft vocabulary; None where it stays as it is."""
        self._rows: dict[int, ForwardRows] = {}
        self._chunks: dict[int, tuple[ChunkRows, ForwardBuffers, Tensor]] = {}
        self._scratch: dict[tuple[int, int], ChoiceScratch] = {}
        self._graphs: dict[object, Run] = {}
        self._pool = torch.cuda.graph_pool_handle() if pool is None and device.type == "cuda" else pool
        self.graph_bytes = 0
        """Memory that capturing graphs has taken."""

    @property
    def is_captured(self) -> bool:
        """Whether steps are replayed from graphs."""
        return self._pool is not None

    def clear_(self) -> None:
        """Empty all slots."""
        self.state.clear_()
        self.entering.active_count.zero_()
        if self.drafter is not None:
            self.drafter.clear_error_()

    def step(self, num_active: int, rules: ChoiceRules) -> None:
        """Run one step; ``num_active``: at least as many slots as are running."""
        places = min(bucket_of(num_active), self.num_slots)
        self._run(("step", places, rules.flags), partial(self._step, places, rules))

    def timed_step(self, num_active: int, rules: ChoiceRules) -> Iterator[tuple[str, Run]]:
        """Give the phases of one step, each to be run by the caller in order."""
        places = min(bucket_of(num_active), self.num_slots)
        for name, run in self._phases(places, rules):
            yield name, partial(self._run, (name, places, rules.flags), run)

    @contextmanager
    def named_range(self, name: str) -> Iterator[None]:
        """Name what runs inside for a profiler (NVTX)."""
        if self._pool is None:
            yield
            return
        torch.cuda.nvtx.range_push(name)
        yield
        torch.cuda.nvtx.range_pop()

    @property
    def tails(self) -> Tails | None:
        """What joined each slot's draft vocabulary."""
        return None if self.drafter is None else self.drafter.bufs.tails

    def enter(self, num_tokens: int, rules: ChoiceRules) -> None:
        """Run the prompt in `box` into its slot, ``num_tokens`` of it, and choose its first new token.

        The slot's tail has been set before.
        """
        self.ops.begin_prompt(self.box, self.state)
        self._gather_rows()
        left = num_tokens
        while left > 0:
            nodes = chunk_of(left)
            self._run(("chunk", nodes, rules.flags), partial(self._chunk, nodes, rules))
            left -= nodes
        self.ops.list_active(self.state)

    def stop_slot(self, slot: int) -> None:
        """Take a slot out of all further steps."""
        self.state.running[slot : slot + 1].zero_()
        self.ops.list_active(self.state)

    def warm_up(self, rules: ChoiceRules, num_active: int) -> WarmUp:
        """Compile and capture what sequences in up to ``num_active`` slots will use. All slots must be empty."""
        if not self.is_captured:
            return WarmUp()
        runs: dict[object, Run] = {
            ("step", places, rules.flags): partial(self._step, places, rules)
            for places in BUCKETS
            if places <= bucket_of(num_active)
        }
        runs |= {("chunk", nodes, rules.flags): partial(self._chunk, nodes, rules) for nodes in CHUNKS}
        missing = {key: run for key, run in runs.items() if key not in self._graphs}
        if not missing:
            return WarmUp()
        started, bytes_before = time.perf_counter(), self.graph_bytes
        self._practise([*missing.values(), self._gather_rows])
        compiled = time.perf_counter()
        for key, run in missing.items():
            self._graphs[key] = self._record(run)
        captured = time.perf_counter()
        return WarmUp(compiled - started, captured - compiled, len(missing), self.graph_bytes - bytes_before)

    def _run(self, key: object, run: Run) -> None:
        if self.is_captured:
            self._graph(key, run)()
        else:
            run()

    def _graph(self, key: object, run: Run) -> Run:
        if key not in self._graphs:
            self._practise([run])
            self._graphs[key] = self._record(run)
        return self._graphs[key]

    def _practise(self, runs: Iterable[Run]) -> None:
        """Run work over no slots, to compile kernels and create handles: a capture could not."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with self._no_slots(), torch.cuda.stream(stream):
            for run in runs:
                run()
        torch.cuda.current_stream().wait_stream(stream)

    def _record(self, run: Run) -> Run:
        """Capture work that has run before into a graph."""
        before = torch.cuda.mem_get_info()[0]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            run()
        self.graph_bytes += max(0, before - torch.cuda.mem_get_info()[0])
        return graph.replay

    @contextmanager
    def _no_slots(self) -> Iterator[None]:
        """Hide running slots, what they accepted last and the prompt in the box while something runs for practice."""
        # A phase may be practised alone, between those of a real step: a commit would go by that step's record.
        hidden = (self.state.active_count, self.state.active_inverse, self.state.record, self.box.numbers)
        before = [tensor.clone() for tensor in hidden]
        for tensor in hidden:
            tensor.zero_() if tensor is not self.state.active_inverse else tensor.fill_(-1)
        # A prompt of as many tokens as its slot holds has no rows left.
        lengths = self.state.lengths.clone()
        self.state.lengths.zero_()
        torch.cuda.synchronize()
        yield
        torch.cuda.synchronize()
        self.state.lengths.copy_(lengths)
        for tensor, value in zip(hidden, before, strict=True):
            tensor.copy_(value)

    def _step(self, places: int, rules: ChoiceRules) -> None:
        for _, run in self._phases(places, rules):
            run()

    def _phases(self, places: int, rules: ChoiceRules) -> Sequence[tuple[str, Run]]:
        ops, state, nodes = self.ops, self.state, self.nodes
        tree = self._roots or self.drafter.bufs  # type: ignore[union-attr]
        if places not in self._rows:
            self._rows[places] = ForwardRows.allocate(places, nodes, state.lengths)
        rows, bufs = self._rows[places], self._bufs.first(places * nodes)
        choices, fields = self._choices[:places], (tree.draft_tokens, tree.parents, tree.tree_position_ids)

        def verify() -> None:
            if self._roots is not None:
                self._roots.read()
            ops.tree_rows(state.active_slots, state.active_count, *fields, rows)
            self.target.forward(rows, self.cache, bufs)

        def accept() -> None:
            ops.choose_tokens(
                bufs.logits, state.active_slots, state.active_count, *fields, rules, self.choice, choices,
                self._scratch_for(places, nodes),
            )  # fmt: skip
            ops.walk(choices, tree.draft_tokens, tree.parents, self.width, state, self._error)

        def commit() -> None:
            ops.commit_kv(state, self.cache.keys, self.cache.values)
            if self.drafter is not None:
                ops.commit_features(state, bufs.features, nodes, self._first_row, self.drafter.features)
            if rules.has_penalty:
                ops.mark_seen(state.new_tokens, state.active_slots, state.active_count, self.choice.seen)
            ops.list_active(state)

        phases = (("verify", verify), ("accept", accept), ("commit", commit))
        return phases if self.drafter is None else (("draft", self._draft), *phases)

    def _chunk(self, nodes: int, rules: ChoiceRules) -> None:
        ops, entering = self.ops, self.entering
        if nodes not in self._chunks:
            self._chunks[nodes] = (
                ChunkRows.allocate(nodes, self.state.lengths),
                self.target.new_buffers(1, nodes, 1),
                torch.zeros((1, 1), dtype=torch.int32, device=self.target.device),
            )
        chunk, bufs, choice = self._chunks[nodes]
        ops.chunk_rows(self.box, chunk)
        self.target.forward(chunk.forward, self.cache, bufs, chunk.last_row)
        if self.drafter is not None:
            self.drafter.prefill(bufs.features, chunk)
        ops.end_chunk(self.box, nodes, entering)
        root = self._entering_root
        ops.choose_tokens(
            bufs.logits, entering.active_slots, entering.active_count, *root, rules, self.choice, choice,
            self._scratch_for(1, 1),
        )  # fmt: skip
        ops.walk(choice, root[0], root[1], 1, entering, self._error)
        if self.drafter is not None:
            ops.commit_features(entering, bufs.features, nodes, chunk.first_row, self.drafter.features)
        if rules.has_penalty:
            ops.mark_seen(entering.new_tokens, entering.active_slots, entering.active_count, self.choice.seen)

    def _draft(self) -> None:
        """Draft, over what the newest tokens have let join where the text is followed."""
        assert self.drafter is not None
        if self.follow is not None and self.follow.source == "text":
            self.ops.join_tokens(self.state, self.follow, self.tails)
            self._gather_rows()
        self.drafter.draft()

    def _gather_rows(self) -> None:
        """Bring rows that have joined to where the drafter reads them."""
        if self.follow is not None:
            self.ops.gather_rows(self.follow, self.tails)

    @cached_property
    def _entering_root(self) -> tuple[Tensor, Tensor, Tensor]:
        """A tree of a root alone in every slot: tokens, parents, positions int64 [slots, 1]."""
        root = torch.full((self.num_slots, 1), -1, dtype=torch.int64, device=self.target.device)
        return root, root, torch.zeros_like(root)

    def _scratch_for(self, places: int, nodes: int) -> ChoiceScratch:
        key = (places, nodes)
        if key not in self._scratch:
            self._scratch[key] = choice_scratch(places, nodes, self.target.vocab_size, self.target.device)
        return self._scratch[key]

    @property
    def _error(self) -> Tensor | None:
        return None if self.drafter is None else self.drafter.error


class _Roots:
    """Trees of their roots alone, which plain decoding verifies."""

    def __init__(self, state: SlotState) -> None:
        slots, device = len(state.lengths), state.lengths.device
        self._newest = state.new_tokens
        self.draft_tokens = torch.zeros((slots, 1), dtype=torch.int64, device=device)
        self.parents = torch.full_like(self.draft_tokens, -1)
        self.tree_position_ids = torch.zeros_like(self.draft_tokens)

    def read(self) -> None:
        """Take every slot's newest token; plain steps add one at a time."""
        self.draft_tokens.copy_(self._newest[:, :1])
