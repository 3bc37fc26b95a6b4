"""Decoding: everything that a number of slots needs, and its steps, captured as CUDA graphs where they can be.

One step is four phases::

    draft    the drafter: trees of the active slots, from last step's tokens and features
    verify   rows of all nodes, then the target's forward over them
    accept   the target's choice at every node, then the walk: path, tokens, lengths, ends
    commit   the path's keys, values and features to their places; the list of slots that still run

Nothing in a phase waits for the host or allocates, unless the drafter or the target does, or tokens are chosen on the
host (`host_choice`). A step in which nothing waits is replayed from one graph for each bucket of active slots; else its
phases run one after another, each from its own graph where it can be captured. On the CPU the same phases run with the
PyTorch twins.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cached_property, partial
from typing import Protocol

import torch
from torch import Tensor

from ..drafter.buffers import Buffers
from ..drafter.drafter import BufferedDrafter
from ..drafter.follow import Tails
from ..drafter.kernels.tail_rows import gather_rows
from ..drafter.launch import timed_out
from ..drafter.weights import HeadWeights
from ..errors import UsageError
from ..launches import count_launches, counted_apart
from ..ops import Ops, ranges_wanted, side_stream
from ..settings import MAX_NEW_TOKENS, TreeConfig
from ..target.cache import ForwardBuffers, KVCache, Target
from ..target.kernels.attention import REACH
from ..target.kernels.tree_rows import ForwardRows, tree_rows
from ..tree import Trees
from .checks import Checks, check_accept, check_draft, check_verify, checks_wanted
from .graphs import GraphPool, Run, recall
from .host_choice import HostChoice
from .kept_rows import HeldRow
from .kernels.acceptance import SlotState, commit_features, commit_kv, list_active, walk
from .kernels.choice_kernels import ChoiceRules, ChoiceScratch, ChoiceState
from .kernels.choose_tokens import choice_scratch, choose_tokens, mark_seen
from .kernels.prompt_chunks import MAX_EOS, ChunkRows, PromptBox, begin_prompt, chunk_rows, end_chunk
from .pending import take_pairs

BUCKETS = (1, 2, 4, 8, 16)
"""Numbers of slots, and of active slots in a step, that there are graphs for."""
CHUNKS = (64, 512)
"""Rows of a prompt's forward: the smallest that holds what is left of it, else the largest."""
LARGEST_EAGER_CHUNK = 1024
"""Rows of a prompt's forward at most where it is not captured: then each is as large as what is left."""
LARGEST_NODES = 60
"""Nodes of the largest tree that a step chooses by itself."""
_TIMED = 4
"""Replays of a step whose time is taken."""
MOST_RULES = 8
"""Rules of choice that a decoder keeps graphs for: those used last."""


@dataclass(frozen=True)
class WarmUp:
    """Time and memory of a warm-up; zero where everything was ready before, and where there are no graphs."""

    compile_s: float = 0.0
    """Seconds for running everything once: compiling kernels, creating the libraries' handles."""
    capture_s: float = 0.0
    """Seconds for capturing it into graphs."""
    num_graphs: int = 0
    graph_bytes: int = 0
    """Device memory that the graphs take, their pool included."""
    cache_bytes: int = 0
    """Device memory of the keys and values, of target and drafter."""

    def __add__(self, other: WarmUp) -> WarmUp:
        return WarmUp(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))


@dataclass(frozen=True)
class Phase:
    """A part of a step."""

    name: str
    run: Run
    waits: bool = False
    """Whether it waits for the host, so that no CUDA graph can hold it."""


class StepDrafter(Protocol):
    """What a step needs of a drafter; see `BufferedDrafter`."""

    @property
    def tree(self) -> TreeConfig:
        """Shape of the trees."""

    @property
    def bufs(self) -> Buffers:
        """Its inputs and outputs."""

    @property
    def head(self) -> HeadWeights:
        """The draft head's weights."""

    @property
    def features(self) -> Tensor:
        """[slots, steps, feature_width]: of the last step's tokens."""

    @property
    def error(self) -> Tensor:
        """int32 [1]: not 0 where the trees are undefined."""

    @property
    def waits(self) -> bool:
        """Whether a draft waits for the device."""

    def clear_error_(self) -> None:
        """Be usable after an error."""

    def prefill(self, features: Tensor, next_tokens: Tensor, positions: Tensor, rows: Tensor, slots: Tensor) -> None:
        """Take a prompt's pairs."""


def bucket_of(count: int) -> int:
    """The smallest bucket that holds ``count`` slots."""
    return next(bucket for bucket in BUCKETS if bucket >= count)


def chunk_of(left: int) -> int:
    """The chunk for ``left`` tokens of a prompt."""
    return next((chunk for chunk in CHUNKS if chunk >= left), CHUNKS[-1])


class Decoder:
    """State, buffers and steps for up to ``num_slots`` sequences of ``cache.capacity`` rows each.

    ``drafter`` None decodes plainly: a tree of its root alone. ``waits``: whether the target's forward cannot
    be held by a graph. ``pool``: memory that the graphs share with those of other decoders; None is a pool of its own.
    ``offsets`` int32 [slots]: a new row's position minus its cache row; None where they are the same. ``another``
    builds a drafter of another shape on the inputs and the cache of the first; None: every step has the first one's.
    """

    state: SlotState
    entering: SlotState
    choice: ChoiceState
    box: PromptBox
    checks: Checks | None
    """Rules of ``EAGLE_SLIM_CHECK``; None without it."""

    def __init__(
        self,
        target: Target,
        cache: KVCache,
        drafter: StepDrafter | None,
        num_slots: int,
        waits: bool = False,
        pool: GraphPool | None = None,
        offsets: Tensor | None = None,
        another: Callable[[TreeConfig], BufferedDrafter] | None = None,
    ) -> None:
        device = target.device
        self.target, self.cache, self.drafter, self.num_slots = target, cache, drafter, num_slots
        self.waits, self._offsets = waits, offsets
        self.ops = Ops.for_device(device)
        self._allocate_slots(drafter, cache.capacity)
        self._first_row = torch.zeros(1, dtype=torch.int32, device=device)
        self.tree = None if drafter is None else drafter.tree
        """The shape of a step that names no other."""
        self._another = another
        self._work = {self.tree: _Work(self, drafter)}
        self.follow = None if drafter is None else drafter.head.follow
        """Rows that may join each slot's draft vocabulary; None without following."""
        self._most_pending = 1
        """Most tokens of a slot that its drafter has not taken."""
        self._chunks: dict[int, _Chunk] = {}
        self._graphs: dict[ChoiceRules, dict[object, Run]] = {}
        self._pool = GraphPool() if pool is None and device.type == "cuda" and not ranges_wanted() else pool
        self.graph_bytes = 0
        """Memory that capturing graphs has taken."""
        self.num_pauses = 0
        """How often steps were held up by a capture, or to time a shape."""

    @property
    def nodes(self) -> int:
        """Nodes of a tree of the shape that steps have by default."""
        return self._work[self.tree].nodes

    def _work_of(self, shape: TreeConfig | None) -> _Work:
        """What steps of a shape work in, built when it is first wanted."""
        if shape not in self._work:
            assert self._another is not None
            self._work[shape] = _Work(self, None if shape is None else self._another(shape))
            self._gather_rows()
        return self._work[shape]

    def _allocate_slots(self, drafter: StepDrafter | None, capacity: int) -> None:
        device, num_slots, vocab = self.target.device, self.num_slots, self.target.vocab_size
        shared = {} if drafter is None else {
            name: getattr(drafter.bufs, name)
            for name in ("new_tokens", "num_new", "prefix", "active_slots", "active_inverse", "active_count")
        }  # fmt: skip
        width = MAX_NEW_TOKENS if drafter is None else drafter.tree.new_tokens_width
        self.state = SlotState.allocate(num_slots, MAX_EOS, device, width, **shared)
        # A prompt's last chunk walks alone, beside slots that are running.
        own = SlotState.allocate(num_slots, MAX_EOS, device, width)
        self.entering = self.state._replace(
            active_slots=own.active_slots, active_inverse=own.active_inverse, active_count=own.active_count,
            record=own.record,
        )  # fmt: skip
        choice = ChoiceState.allocate(num_slots, capacity, vocab, device)
        self.choice = choice._replace(num_generated=self.state.num_generated)
        self.box = PromptBox.allocate(capacity, device)
        self.checks = Checks(device) if checks_wanted() else None

    def clear_(self) -> None:
        """Empty all slots."""
        self.state.clear_()
        self.entering.active_count.zero_()
        self._most_pending = 1
        for work in self._work.values():
            if work.drafter is not None:
                work.drafter.clear_error_()
        if self.checks is not None:
            self.checks.fault.zero_()

    def timed_out(self) -> Exception:
        """Return the error to raise after a draft that did not finish; the next one may run."""
        errors = [timed_out(work.drafter.bufs) for work in self._work.values() if work.drafter is not None]
        return errors[0]

    @property
    def has_graphs(self) -> bool:
        """Whether what can be captured is replayed from graphs."""
        return self._pool is not None

    def step(
        self, num_active: int, rules: ChoiceRules, shape: TreeConfig | None, host: HostChoice | None = None
    ) -> None:
        """Run one step; ``num_active``: at least as many slots as are running.

        ``shape`` of the trees: None decodes plainly; another than `tree` needs a decoder that can draft ``another``.
        ``host`` chooses tokens on the host, in the place of the kernels.
        """
        places = self.places_for(num_active)
        self._make_room(shape)
        self._run_phases(("step", places, shape), rules, self.phases(places, rules, shape, host))

    def timed_step(
        self, num_active: int, rules: ChoiceRules, shape: TreeConfig | None, host: HostChoice | None = None
    ) -> Iterator[Phase]:
        """Give the phases of one step, each to be run by the caller in order; arguments as in `step`."""
        places = self.places_for(num_active)
        self._make_room(shape)
        for phase in self.phases(places, rules, shape, host):
            yield Phase(phase.name, partial(self._run_phases, (phase.name, places, shape), rules, [phase]))

    def _make_room(self, shape: TreeConfig | None) -> None:
        """Have the drafter take waiting pairs before a plain step adds one for which there is no place."""
        if shape is not None:
            self._most_pending = shape.path_width
        elif self.drafter is not None:
            if self._most_pending == self.state.new_tokens.shape[1]:
                self._run_phases(("pairs",), ChoiceRules(), [Phase("pairs", self._take_pairs)])
                self._most_pending = 1
            self._most_pending += 1

    def _take_pairs(self) -> None:
        """Put all pairs of the active slots but the newest into the drafter's cache."""
        assert isinstance(self.drafter, BufferedDrafter)
        take_pairs(self.drafter, self.drafter.bufs, self.drafter.features)

    def time_step(self, num_active: int, rules: ChoiceRules, shape: TreeConfig | None) -> float:
        """Time a step of the running sequences, ms, and put their state back: what is generated does not change.

        Its rows of the caches lie behind the committed ones, where the next step writes. Waits for the device.
        """
        places = self.places_for(num_active)
        self.num_pauses += 1
        assert self.drafter is not None
        changed = [*self.state, self.choice.seen, self.drafter.features]
        before = [tensor.clone() for tensor in changed]
        run = partial(self._run_phases, ("step", places, shape), rules, self.phases(places, rules, shape))
        # Captured before it is timed.
        run()
        spans = []
        for _ in range(_TIMED):
            for tensor, value in zip(changed, before, strict=True):
                tensor.copy_(value)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            spans.append((begin, end))
        for tensor, value in zip(changed, before, strict=True):
            tensor.copy_(value)
        torch.cuda.synchronize()
        return float(statistics.median(begin.elapsed_time(end) for begin, end in spans))

    def places_for(self, num_active: int) -> int:
        """Sequences of a forward: a bucket where kernels are compiled for each number, else as many as are running."""
        return min(bucket_of(num_active), self.num_slots) if self.ops.use_kernels else num_active

    @property
    def tails(self) -> Tails | None:
        """Rows that joined each slot's draft vocabulary."""
        return None if self.drafter is None else self.drafter.bufs.tails

    def enter(
        self, num_tokens: int, rules: ChoiceRules, host: HostChoice | None = None, held: HeldRow | None = None
    ) -> None:
        """Run the prompt in `box` into its slot, ``num_tokens`` of it, and choose its first new token.

        The slot's tail has been set before. ``held``: the row of the first of these tokens, where it is run again; the
        record's last row tells in its second place whether it has become another.
        """
        self.ops(begin_prompt)(self.box, self.state)
        self._gather_rows()
        left = num_tokens
        while left > 0:
            nodes = chunk_of(left) if self.ops.use_kernels else min(left, LARGEST_EAGER_CHUNK)
            self._run_phases(("chunk", nodes), rules, self._chunk_phases(nodes, rules, host))
            left -= nodes
        changed = self.entering.record[-1, 1]
        if held is None:
            changed.zero_()
        else:
            changed.copy_(held.has_changed())
        self.ops(list_active)(self.state)

    def counts(self) -> dict[str, int]:
        """Fields of `GenerationStats` since `clear_`; waits for the device."""
        return {}

    def stop_slot(self, slot: int) -> None:
        """Take a slot out of all further steps."""
        self.state.running[slot : slot + 1].zero_()
        self.ops(list_active)(self.state)

    def warm_up(self, rules: ChoiceRules, num_active: int, shapes: Sequence[TreeConfig | None]) -> WarmUp:
        """Compile and capture what sequences in up to ``num_active`` slots will use. All slots must be empty.

        ``shapes``: of their trees.
        """
        if not self.has_graphs:
            return WarmUp()
        runs: dict[object, Run] = {}
        for places in BUCKETS:
            for shape in shapes:
                if places <= bucket_of(num_active):
                    runs |= self._captures(("step", places, shape), self.phases(places, rules, shape))
        for nodes in CHUNKS:
            runs |= self._captures(("chunk", nodes), self._chunk_phases(nodes, rules, None))
        kept = self._graphs_for(rules)
        missing = {key: run for key, run in runs.items() if key not in kept}
        if not missing:
            return WarmUp()
        started, bytes_before = time.perf_counter(), self.graph_bytes
        self._practise([*missing.values(), self._gather_rows])
        compiled = time.perf_counter()
        for key, run in missing.items():
            kept[key] = self._record(run)
        captured = time.perf_counter()
        return WarmUp(compiled - started, captured - compiled, len(missing), self.graph_bytes - bytes_before)

    def _run_phases(self, key: tuple[object, ...], rules: ChoiceRules, phases: Sequence[Phase]) -> None:
        """Run phases, as one graph where none waits, else each from its own where it can be captured."""
        runs = self._captures(key, phases) if self.has_graphs else {}
        if len(runs) == 1 and key in runs:
            self._graph(key, rules, runs[key])()
            return
        for phase in phases:
            own = (*key, phase.name)
            run = self._graph(own, rules, runs[own]) if own in runs else phase.run
            run()

    @staticmethod
    def _captures(key: tuple[object, ...], phases: Sequence[Phase]) -> dict[object, Run]:
        """Choose which of some phases to capture, by key: all of them together, or those that do not wait."""
        if any(phase.waits for phase in phases):
            return {(*key, phase.name): phase.run for phase in phases if not phase.waits}
        return {key: partial(_run_all, phases)}

    def _graphs_for(self, rules: ChoiceRules) -> dict[object, Run]:
        return recall(self._graphs, rules, MOST_RULES, dict)

    def _graph(self, key: object, rules: ChoiceRules, run: Run) -> Run:
        kept = self._graphs_for(rules)
        if key not in kept:
            self._practise([run])
            kept[key] = self._record(run)
        return kept[key]

    def _practise(self, runs: Iterable[Run]) -> None:
        """Run work over no slots, to compile kernels and create handles: a capture could not."""
        with counted_apart(), self._no_slots(), side_stream():
            for run in runs:
                run()

    def _record(self, run: Run) -> Run:
        """Capture work that has run before into a graph."""
        assert self._pool is not None
        self.num_pauses += 1
        before = torch.cuda.mem_get_info()[0]
        with counted_apart() as launches:
            replay = self._pool.capture(run)
        self.graph_bytes += max(0, before - torch.cuda.mem_get_info()[0])

        def replayed() -> None:
            count_launches(launches)
            replay()

        return replayed

    @contextmanager
    def _no_slots(self) -> Iterator[None]:
        """Hide running slots, what they accepted last and the prompt in the box while something runs as warm-up."""
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

    def phases(
        self, places: int, rules: ChoiceRules, shape: TreeConfig | None, host: HostChoice | None = None
    ) -> Sequence[Phase]:
        """The phases of a step of up to ``places`` sequences; `step` runs them, from graphs where it can."""
        ops, state, work = self.ops, self.state, self._work_of(shape)
        rows, trees, nodes = work.rows(places), work.trees, work.nodes
        bufs, choices = work.bufs.first(places * nodes), work.choices[:places]

        def verify() -> None:
            if work.drafter is None:
                work.read_roots()
            ops(tree_rows)(trees, rows)
            if self._offsets is not None:
                slots = rows.attention.slots.clamp(min=0).long()
                rows.positions.view(places, nodes).add_(self._offsets[slots][:, None])
            self.target.forward(rows, self.cache, bufs)

        def accept() -> None:
            self.choose(bufs.logits, trees, rules, host, choices)
            error = None if work.drafter is None else work.drafter.error
            append = work.drafter is None and self.drafter is not None
            ops(walk)(choices, trees, work.longest, state, error, append)

        def commit() -> None:
            for keys, values in self.cache.stacks:
                ops(commit_kv)(state, keys, values)
            if self.drafter is not None:
                ops(commit_features)(state, bufs.features, nodes, self._first_row, self.drafter.features)
            self._remember(state, rules)
            ops(list_active)(state)

        phases = [
            Phase("verify", verify, self.waits), Phase("accept", accept, host is not None), Phase("commit", commit),
        ]  # fmt: skip
        if work.drafter is not None:
            phases.insert(0, Phase("draft", partial(self._draft, work, places, rules), work.drafter.waits))
        if (checks := self.checks) is None:
            return phases
        looks: dict[str, Run] = {
            "verify": lambda: check_verify(checks, rows, bufs, trees),
            "accept": lambda: check_accept(checks, state, choices, trees),
        }
        if isinstance(work.drafter, BufferedDrafter):
            drafted, vocab = work.drafter.bufs, self.target.vocab_size
            looks["draft"] = lambda: check_draft(checks, state, drafted, vocab)

        def run(phase: Phase) -> None:
            phase.run()
            if phase.name in looks:
                looks[phase.name]()
                checks.stop_(state, self.entering)

        return [Phase(phase.name, partial(run, phase), phase.waits) for phase in phases]

    def _draft(self, work: _Work, places: int, rules: ChoiceRules) -> None:
        """Draft for the next step of up to ``places`` sequences."""
        assert isinstance(work.drafter, BufferedDrafter)
        work.drafter.draft()

    def choose(
        self, logits: Tensor, trees: Trees, rules: ChoiceRules, host: HostChoice | None, choices: Tensor
    ) -> None:  # fmt: skip
        """Write the target's next token after every node into ``choices`` int32 [places, nodes].

        ``logits`` [places * nodes, vocab], of the trees' nodes in order.
        """
        if host is not None:
            host.choose(logits, trees, choices)
        else:
            self.ops(choose_tokens)(logits, trees, rules, self.choice, choices, self._scratch.first(choices.numel()))

    def _remember(self, state: SlotState, rules: ChoiceRules) -> None:
        """Keep of the tokens that a walk has accepted what choices depend on."""
        if rules.has_penalty:
            self.ops(mark_seen)(state.new_tokens, state.active_slots, state.active_count, self.choice.seen)

    def _chunk_phases(self, nodes: int, rules: ChoiceRules, host: HostChoice | None) -> Sequence[Phase]:
        """A chunk of the prompt in `box`; after the last one its first new token is chosen and kept."""
        ops, entering = self.ops, self.entering
        chunk = self._chunks.get(nodes) or self._new_chunk(nodes)
        if self.ops.use_kernels:
            self._chunks[nodes] = chunk
        rows, bufs = chunk.rows, chunk.bufs
        roots = Trees(entering.active_slots, entering.active_count, *self._entering_root)

        def verify() -> None:
            ops(chunk_rows)(self.box, rows)
            self.target.forward(rows.forward, self.cache, bufs, rows.last_row)

        def prefill() -> None:
            if self.drafter is not None:
                forward = rows.forward
                self.drafter.prefill(
                    bufs.features, rows.next_tokens, forward.positions, rows.pair_rows, forward.attention.slots
                )  # fmt: skip
            ops(end_chunk)(self.box, nodes, entering)

        def accept() -> None:
            self.choose(bufs.logits, roots, rules, host, chunk.choice)
            ops(walk)(chunk.choice, roots, 1, entering, self._error)

        def commit() -> None:
            if self.drafter is not None:
                ops(commit_features)(entering, bufs.features, nodes, rows.first_row, self.drafter.features)
            self._remember(entering, rules)

        return (
            Phase("verify", verify, self.waits), Phase("prefill", prefill), Phase("accept", accept, host is not None),
            Phase("commit", commit),
        )  # fmt: skip

    def _new_chunk(self, nodes: int) -> _Chunk:
        return _Chunk(self.target, nodes, self.state.lengths, self.cache.capacity)

    def _gather_rows(self) -> None:
        """Bring rows that have joined to where the drafter reads them."""
        for work in self._work.values():
            if self.follow is not None and work.drafter is not None and work.drafter.bufs.tails is not None:
                self.ops(gather_rows)(self.follow, work.drafter.bufs.tails)

    @cached_property
    def _entering_root(self) -> tuple[Tensor, Tensor, Tensor]:
        """A tree of a root alone in every slot: tokens, parents, positions int64 [slots, 1]."""
        root = torch.full((self.num_slots, 1), -1, dtype=torch.int64, device=self.target.device)
        return root, root, torch.zeros_like(root)

    @cached_property
    def _scratch(self) -> ChoiceScratch:
        """For as many rows as a step can have, of which each takes the first."""
        nodes = self.nodes if self._another is None else max(self.nodes, LARGEST_NODES)
        return choice_scratch(self.num_slots, nodes, self.target.vocab_size, self.target.device)

    @property
    def _error(self) -> Tensor | None:
        return None if self.drafter is None else self.drafter.error


class _Work:
    """What the steps of one shape work in; without a drafter every tree is its root alone."""

    def __init__(self, decoder: Decoder, drafter: StepDrafter | None) -> None:
        self.drafter, self._state = drafter, decoder.state
        tree, slots, device = None if drafter is None else drafter.tree, decoder.num_slots, decoder.target.device
        self.nodes, self.longest = (1, 1) if tree is None else (tree.total_tokens, tree.path_width)
        """Nodes of a tree, and of the longest path."""
        self._is_path = tree is None or tree.top_k == 1
        if decoder.ops.use_kernels and not self._is_path and min(self.longest, self.nodes) - 1 > REACH:
            raise UsageError(
                f"A tree that branches is at most {REACH} levels deep on a GPU; depth = {self.longest - 2} gives "
                f"{self.longest - 1}. Lower depth to {REACH - 1}, or draft a chain (top_k = 1)."
            )
        self.bufs = decoder.target.new_buffers(slots, self.nodes, slots * self.nodes, decoder.cache.capacity)
        self.choices = torch.zeros((slots, self.nodes), dtype=torch.int32, device=device)
        self._rows: dict[int, ForwardRows] = {}
        roots = torch.zeros((slots, 1), dtype=torch.int64, device=device)
        found = (roots, torch.full_like(roots, -1), torch.zeros_like(roots))
        if drafter is not None:
            found = (drafter.bufs.draft_tokens, drafter.bufs.parents, drafter.bufs.tree_position_ids)
        self.trees = Trees(self._state.active_slots, self._state.active_count, *found)

    def rows(self, places: int) -> ForwardRows:
        """Rows of a forward over the trees of ``places`` sequences."""
        if places not in self._rows:
            self._rows[places] = ForwardRows.allocate(places, self.nodes, self._state.lengths, self._is_path)
        return self._rows[places]

    def read_roots(self) -> None:
        """Take every slot's newest token as its tree."""
        newest = (self._state.num_new[:, None].long() - 1).clamp(min=0)
        self.trees.draft_tokens.copy_(self._state.new_tokens.gather(1, newest))


class _Chunk:
    """Buffers of one prompt chunk of ``nodes`` rows."""

    def __init__(self, target: Target, nodes: int, lengths: Tensor, capacity: int) -> None:
        self.rows = ChunkRows.allocate(nodes, lengths)
        self.bufs: ForwardBuffers = target.new_buffers(1, nodes, 1, capacity)
        self.choice = torch.zeros((1, 1), dtype=torch.int32, device=target.device)


def _run_all(phases: Sequence[Phase]) -> None:
    for phase in phases:
        phase.run()
