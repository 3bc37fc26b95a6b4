"""Decode a number of slots in steps, replayed from CUDA graphs.

One step is four phases::

    draft    the drafter: trees of the active slots, from last step's tokens and features
    verify   rows of all nodes, then the target's forward over them
    accept   the target's choice at every node, then the walk: path, tokens, lengths, ends
    commit   the path's keys, values and features to their places; the list of slots that still run

Nothing in a phase waits for the host or allocates, unless the drafter or the target does, or tokens are chosen on the
host (`HostChoice`). A step in which nothing waits is replayed from one graph for each bucket of active slots; else its
phases run one after another, each from its own graph where it can be captured. On the CPU the same phases run with the
PyTorch twins.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor

from ..drafter.drafter import BufferedDrafter, bound_of, reset_barrier
from ..errors import UsageError
from ..ops import Ops, count_launches, counted_apart, is_set, ranges_wanted, side_stream
from ..settings import MAX_NEW_TOKENS, TreeConfig
from ..target.cache import KVCache, Target
from ..target.kernels.attention_kernels import REACH
from ..target.kernels.tree_rows import ForwardRows, tree_rows
from ..tree import Trees
from .checks import Checks
from .choice import HostChoice
from .kernels.acceptance import RECORD_HEAD, SlotState, commit_features, commit_kv, list_active, walk
from .kernels.choice_kernels import ChoiceRules, ChoiceScratch, ChoiceState
from .kernels.choose_tokens import choice_scratch, choose_tokens, mark_seen
from .kernels.prompt_chunks import MAX_EOS, ChunkRows, PromptBox, begin_prompt, chunk_rows, end_chunk
from .shapes import shapes_for, shapes_up_to

BUCKETS = (1, 2, 4, 8, 16)
"""Numbers of slots, and of active slots in a step, that have graphs."""
CHUNKS = (64, 512)
"""Rows of a captured prompt chunk: the smallest that holds the rest of the prompt, else the largest."""
LARGEST_EAGER_CHUNK = 1024
"""Most rows of a prompt chunk that is not captured."""
_TIMED = 3
"""Replays of a step whose time is taken."""
MOST_RULES = 8
"""Most rules of choice that a decoder keeps graphs for: those used last."""
Run = Callable[[], None]
Key = tuple[object, ...]
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
    run: Run
    waits: bool = False
    """Whether it waits for the host, so that no CUDA graph can hold it."""


def recall(kept: dict[KeptKey, Kept], key: KeptKey, most: int, build: Callable[[], Kept]) -> Kept:
    """Return the value of a key, or build and keep it; ``kept`` holds the ``most`` used last, in the order of use.

    The oldest is dropped before the new one is built, so that its memory is free.
    """
    if key in kept:
        kept[key] = kept.pop(key)
        return kept[key]
    while len(kept) >= most:
        del kept[next(iter(kept))]
    return kept.setdefault(key, build())


def bucket_of(count: int) -> int:
    """Return the smallest bucket that holds ``count`` slots."""
    return next(bucket for bucket in BUCKETS if bucket >= count)


class GraphPool:
    """Memory that graphs share: no replay needs values of another."""

    def __init__(self) -> None:
        self._graphs: WeakSet[torch.cuda.CUDAGraph] = WeakSet()
        self._handle: Any = None

    def capture(self, run: Run) -> Run:
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


def hold_row(cache: KVCache, slot: int, row: int, is_exact: bool) -> Callable[[], Tensor]:
    """Keep a token's keys and values of all layers; returns what tells whether running it again changed them: bool [].

    A difference shows that the weights were changed unseen (through ``.data``, by a fused optimiser). ``is_exact``: the
    same weights give the same bits, however a prompt is cut into forwards; else nearly the same numbers. Nothing here
    waits for the device.
    """
    rows = [tensor[:, slot, :, row] for stack in cache.stacks for tensor in stack]
    kept = [tensor.clone() for tensor in rows]

    def differs(now: Tensor, before: Tensor) -> Tensor:
        """Compare rows [layers, kv_heads, head_dim]: bool []."""
        if is_exact:
            return (now.contiguous().view(torch.uint8) != before.view(torch.uint8)).any()
        # Roundings of all layers before: 1.4e-3 of the largest number in float32, 0.35 in bfloat16.
        tolerance = 4 * torch.finfo(now.dtype).eps ** 0.5
        largest = before.abs().amax((1, 2))
        is_near: Tensor = ((now - before).abs().amax((1, 2)) <= tolerance * largest).all()
        return ~is_near

    return lambda: torch.stack(list(map(differs, rows, kept))).any()


class TreeShape:
    """Trees of one shape in all slots of a decoder, and the buffers of a step over them.

    ``drafter`` writes the trees; None: they are chains of ``nodes`` nodes, which the decoder writes. A chain of its
    root alone is plain decoding.
    """

    def __init__(
        self, target: Target, cache: KVCache, state: SlotState, drafter: BufferedDrafter | None, nodes: int
    ) -> None:
        slots, device = cache.num_slots, target.device
        self.state, self.drafter = state, drafter
        self.nodes = nodes if drafter is None else drafter.tree.total_tokens
        self.longest = nodes if drafter is None else drafter.tree.path_width
        """Nodes of the longest path."""
        self.is_path = drafter is None or drafter.tree.top_k == 1
        """Whether every node's parent is the one before it."""
        self.mask = None if drafter is None else drafter.bufs.tree_mask
        """As `tree.DraftTree.tree_mask`; None for chains."""
        if drafter is None:
            node = torch.arange(nodes, device=device).expand(slots, -1).contiguous()
            written = torch.zeros_like(node), node - 1, node
        else:
            written = drafter.bufs.draft_tokens, drafter.bufs.parents, drafter.bufs.tree_position_ids
        if not self.is_path and min(self.longest, self.nodes) - 1 > REACH:
            raise UsageError(
                f"A tree that branches is at most {REACH} levels deep; depth = {self.longest - 2} gives "
                f"{self.longest - 1}. Lower depth to {REACH - 1}, or draft a chain (top_k = 1, --draft-top-k 1)."
            )
        self.trees = Trees(state.active_slots, state.active_count, *written)
        self.bufs = target.new_buffers(slots, self.nodes, slots * self.nodes, cache.capacity)
        self.choices = torch.zeros((slots, self.nodes), dtype=torch.int32, device=device)
        """[places, nodes]: the target's next token after each node."""
        self._rows: dict[int, ForwardRows] = {}

    def rows(self, places: int) -> ForwardRows:
        """Return the rows of a forward over the trees of ``places`` sequences."""
        if places not in self._rows:
            self._rows[places] = ForwardRows.allocate(places, self.nodes, self.state.lengths, self.is_path)
        return self._rows[places]


class Decoder:
    """State, buffers and steps for ``cache.num_slots`` sequences of up to ``cache.capacity`` rows each.

    ``drafter`` None decodes plainly. ``waits``: whether the target's forward cannot be held by a graph. ``pool``:
    memory that the graphs share with those of other decoders; None is a pool of its own. ``offsets`` int32 [slots]: a
    new row's position minus its cache row; None where they are the same. ``chain``: steps verify chains of this shape,
    which a subclass writes, instead of the drafter's trees. Raises `UsageError` for a tree too deep for the attention.
    """

    def __init__(
        self,
        target: Target,
        cache: KVCache,
        drafter: BufferedDrafter | None,
        waits: bool = False,
        pool: GraphPool | None = None,
        offsets: Tensor | None = None,
        chain: TreeConfig | None = None,
    ) -> None:
        device, slots = target.device, cache.num_slots
        self.target, self.cache, self.drafter, self.num_slots = target, cache, drafter, slots
        self.waits, self._offsets = waits, offsets
        self.draft_waits = drafter is not None and drafter.waits
        self.ops = Ops.for_device(device)
        drafted = None if chain is not None else drafter
        tree = chain if drafter is None or chain is not None else drafter.tree
        self.tree = tree
        """The largest of its trees, and the shape of its steps where none is chosen; None decodes plainly."""
        width = MAX_NEW_TOKENS if tree is None else tree.new_tokens_width
        inputs = ("new_tokens", "num_new", "prefix", "active_slots", "active_inverse", "active_count")
        shared = {} if drafted is None else {name: getattr(drafted.bufs, name) for name in inputs}
        self.state = SlotState.allocate(slots, MAX_EOS, device, width, **shared)
        self.features = None if drafter is None else drafter.features
        """[slots, steps, feature_width] of the last step's tokens, as the next draft takes them."""
        self._drafters = {} if drafter is None else {drafter.tree.top_k: drafter}
        """By top_k: each drafts all trees up to its own."""
        self._shapes: dict[TreeConfig | None, TreeShape] = {}
        if chain is not None:
            self._shapes[chain] = TreeShape(target, cache, self.state, None, chain.total_tokens)
        self._most_waiting = 1
        """Most tokens of a slot that its drafter has not taken."""
        # A prompt's last chunk walks alone, beside slots that are running.
        own = SlotState.allocate(slots, MAX_EOS, device, width)
        self.entering = self.state._replace(
            active_slots=own.active_slots,
            active_inverse=own.active_inverse,
            active_count=own.active_count,
            record=own.record,
        )
        root = torch.full((slots, 1), -1, dtype=torch.int64, device=device)
        self._entering_roots = Trees(own.active_slots, own.active_count, root, root, torch.zeros_like(root))
        choice = ChoiceState.allocate(slots, cache.capacity, target.vocab_size, device)
        self.choice = choice._replace(num_generated=self.state.num_generated)
        self.box = PromptBox.allocate(cache.capacity, device)
        self.checks = Checks(device, self.state, self.entering) if is_set("EAGLE_SLIM_CHECK") else None
        """Rules of ``EAGLE_SLIM_CHECK``; None without it."""
        self._first_row = torch.zeros(1, dtype=torch.int32, device=device)
        self._chunks: dict[int, _Chunk] = {}
        self._graphs: dict[ChoiceRules, dict[Key, Run]] = {}
        self._pool = GraphPool() if pool is None and device.type == "cuda" and not ranges_wanted() else pool
        self.graph_bytes = 0
        """Memory that capturing graphs has taken."""
        self.num_pauses = 0
        """How often steps were held up by a capture, or to time a shape."""

    def clear_(self) -> None:
        """Empty all slots."""
        self.state.clear_()
        self.entering.active_count.zero_()
        self._most_waiting = 1
        for drafter in self._drafters.values():
            reset_barrier(drafter.bufs)
        if self.checks is not None:
            self.checks.fault.zero_()

    def fill_(self, num_active: int, length: int) -> None:
        """Pretend that sequences of ``length`` tokens run in the first ``num_active`` slots, with no end in sight."""
        self.clear_()
        state = self.state
        state.lengths[:num_active] = length
        state.num_new[:num_active] = 1
        state.prefix[:num_active] = length - 1
        state.new_tokens[:num_active, 0] = 7
        state.max_generated.fill_(1 << 30)
        state.running[:num_active] = 1
        self.ops(list_active)(state)

    @property
    def has_graphs(self) -> bool:
        """Whether phases are replayed from graphs, where they can be captured."""
        return self._pool is not None

    @property
    def shape(self) -> TreeShape:
        """The shape of `tree`."""
        return self.shape_of(self.tree)

    def shape_of(self, tree: TreeConfig | None) -> TreeShape:
        """Return the trees and buffers of a shape up to `tree`, built when it is first wanted; None: of plain steps."""
        if tree not in self._shapes:
            drafter = None if tree is None else self._drafter_of(tree)
            self._shapes[tree] = TreeShape(self.target, self.cache, self.state, drafter, 1)
        return self._shapes[tree]

    def _drafter_of(self, tree: TreeConfig) -> BufferedDrafter:
        assert self.drafter is not None
        if tree.top_k not in self._drafters:
            alike = [shape for shape in shapes_up_to(self.drafter.tree) if shape and shape.top_k == tree.top_k]
            self._drafters[tree.top_k] = self.drafter.of_bound(bound_of([tree, *alike]))
        drafter = self._drafters[tree.top_k]
        return drafter if drafter.tree == tree else drafter.of_tree(tree)

    def step(
        self, num_active: int, rules: ChoiceRules, tree: TreeConfig | None, host: HostChoice | None = None
    ) -> None:
        """Run one step; ``num_active``: at least as many slots as are running.

        ``tree``: the shape of its trees, at most that of `tree`; None decodes plainly. ``host`` chooses tokens on the
        host, in the place of the kernels.
        """
        places = self._begin_step(num_active, rules, tree)
        whole = self._graphs_for(rules).get(("step", tree, places)) if host is None else None
        if whole is not None:
            whole()
        else:
            self._run_phases(("step", tree, places), rules, self.phases(places, rules, tree, host))

    def timed_step(
        self, num_active: int, rules: ChoiceRules, tree: TreeConfig | None, host: HostChoice | None = None
    ) -> Iterator[Phase]:
        """Yield the phases of one step, for the caller to run in order; arguments as in `step`."""
        places = self._begin_step(num_active, rules, tree)
        for phase in self.phases(places, rules, tree, host):
            yield Phase(phase.name, partial(self._run_phases, (phase.name, tree, places), rules, [phase]))

    def is_ready(self, num_active: int, rules: ChoiceRules, tree: TreeConfig | None) -> bool:
        """Whether a step can run without being captured first; arguments as in `step`."""
        is_whole = self.has_graphs and not self.waits and not self.draft_waits
        return not is_whole or ("step", tree, self.places_for(num_active)) in self._graphs_for(rules)

    def _make_room(self, rules: ChoiceRules, tree: TreeConfig | None) -> None:
        """Have the drafter take the waiting pairs, where they are more than a draft takes or leave no room for another.

        Must precede a step of ``tree``.
        """
        most = self.state.new_tokens.shape[1] - 1 if tree is None else tree.new_tokens_width
        if self.drafter is not None and self._most_waiting > most:
            self._run_phases(("pairs",), rules, [Phase("pairs", self._take_pairs)])
            self._most_waiting = 1

    def _begin_step(self, num_active: int, rules: ChoiceRules, tree: TreeConfig | None) -> int:
        """Make room for a step, and count the tokens that will wait for the drafter after it; returns its places."""
        self._make_room(rules, tree)
        self._most_waiting = self._most_waiting + 1 if tree is None else tree.path_width
        return self.places_for(num_active)

    def _take_pairs(self) -> None:
        """Have the drafter take the pairs that wait in the state."""
        assert self.drafter is not None
        assert self.features is not None
        state = self.state
        self.drafter.take_pairs(state.prefix, state.num_new, state.new_tokens, state.active_inverse, self.features)

    def time_step(self, num_active: int, rules: ChoiceRules, tree: TreeConfig | None) -> float:
        """Time a step of the running sequences, ms, and put their state back: what is generated does not change.

        Its rows of the caches lie behind the committed ones, where the next step writes. Waits for the device.
        """
        places = self.places_for(num_active)
        self.num_pauses += 1
        # Pairs that are taken stay taken.
        self._make_room(rules, tree)
        changed = [*self.state, self.choice.seen, *([] if self.features is None else [self.features])]
        before = [tensor.clone() for tensor in changed]
        run = partial(self._run_phases, ("step", tree, places), rules, self.phases(places, rules, tree))
        spans = []
        with counted_apart():
            # Captured before it is timed.
            run()
            for _ in range(_TIMED):
                # Few launches: a host that comes late would leave a gap within what is timed.
                torch._foreach_copy_(changed, before)
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                run()
                end.record()
                spans.append((begin, end))
        torch._foreach_copy_(changed, before)
        torch.cuda.synchronize()
        return float(statistics.median(begin.elapsed_time(end) for begin, end in spans))

    def places_for(self, num_active: int) -> int:
        """Count a forward's places: a bucket where kernels are compiled for each number, else those running."""
        return min(bucket_of(num_active), self.num_slots) if self.ops.use_kernels else num_active

    def enter(
        self,
        num_tokens: int,
        rules: ChoiceRules,
        host: HostChoice | None = None,
        held: Callable[[], Tensor] | None = None,
    ) -> None:
        """Run the prompt in `box` into its slot, ``num_tokens`` of it, and choose its first new token.

        ``held`` (`hold_row`): of the first of these tokens; the second number in
        the record's last row says whether its keys and values have changed.
        """
        self.ops(begin_prompt)(self.box, self.state)
        left = num_tokens
        while left > 0:
            chunk = next((chunk for chunk in CHUNKS if chunk >= left), CHUNKS[-1])
            nodes = chunk if self.ops.use_kernels else min(left, LARGEST_EAGER_CHUNK)
            self._run_phases(("chunk", nodes), rules, self._chunk_phases(nodes, rules, host))
            left -= nodes
        changed = self.entering.record[-1, 1]
        if held is None:
            changed.zero_()
        else:
            changed.copy_(held())
        self.ops(list_active)(self.state)

    def counts(self) -> dict[str, int]:
        """Return fields of `GenerationStats` since `clear_`; waits for the device."""
        return {}

    def stop_slot(self, slot: int) -> None:
        """Take a slot out of all further steps."""
        self.state.running[slot : slot + 1].zero_()
        self.ops(list_active)(self.state)

    def warm_up(self, rules: ChoiceRules, num_active: int, trees: Sequence[TreeConfig | None]) -> WarmUp:
        """Compile and capture steps of ``trees``, and chunks, of up to ``num_active`` sequences.

        All slots must be empty.
        """
        if not self.has_graphs:
            return WarmUp()
        parts: dict[Key, Phase] = {}
        for places in BUCKETS[: BUCKETS.index(bucket_of(num_active)) + 1]:
            # A single shape is what was asked for.
            for tree in shapes_for(places, trees) if len(trees) > 1 else trees:
                parts |= _parts(("step", tree, places), self.phases(places, rules, tree))
        if len(trees) > 1:
            parts |= _parts(("pairs",), [Phase("pairs", self._take_pairs)])
        for nodes in CHUNKS:
            parts |= _parts(("chunk", nodes), self._chunk_phases(nodes, rules))
        kept = self._graphs_for(rules)
        missing = {key: part.run for key, part in parts.items() if not part.waits and key not in kept}
        if not missing:
            return WarmUp()
        started, bytes_before = time.perf_counter(), self.graph_bytes
        self._practise(missing.values())
        compiled = time.perf_counter()
        for key, run in missing.items():
            kept[key] = self._record(run)
        captured = time.perf_counter()
        return WarmUp(compiled - started, captured - compiled, len(missing), self.graph_bytes - bytes_before)

    def _run_phases(self, key: Key, rules: ChoiceRules, phases: Sequence[Phase]) -> None:
        """Run phases, as one graph where none waits, else each from its own where it can be captured."""
        kept = self._graphs_for(rules)
        for own, part in _parts(key, phases).items():
            if not self.has_graphs or part.waits:
                part.run()
                continue
            if own not in kept:
                self._practise([part.run])
                kept[own] = self._record(part.run)
            kept[own]()

    def _graphs_for(self, rules: ChoiceRules) -> dict[Key, Run]:
        return recall(self._graphs, rules, MOST_RULES, dict)

    def _practise(self, runs: Iterable[Run]) -> None:
        """Run work over no slots, to compile kernels and create handles, which a capture cannot."""
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
        """Make all slots look empty during a warm-up, and restore them."""
        # A phase may be practised between those of a real step, and a commit must neither act on that step's record nor
        # list the running slots. With prompt and slot both of length 0, a chunk has no rows.
        state = self.state
        slots = (state.active_slots, state.active_inverse)
        hidden = (*slots, state.active_count, state.running, state.record, self.box.numbers, state.lengths)
        before = [tensor.clone() for tensor in hidden]
        for tensor in hidden:
            tensor.fill_(-1 if any(tensor is each for each in slots) else 0)
        torch.cuda.synchronize()
        yield
        torch.cuda.synchronize()
        for tensor, value in zip(hidden, before, strict=True):
            tensor.copy_(value)

    def phases(
        self, places: int, rules: ChoiceRules, tree: TreeConfig | None, host: HostChoice | None = None
    ) -> Sequence[Phase]:
        """Return the phases of a step of up to ``places`` sequences; `step` runs them, from graphs where it can."""
        ops, state, shape, checks = self.ops, self.state, self.shape_of(tree), self.checks
        trees, nodes, rows = shape.trees, shape.nodes, shape.rows(places)
        bufs, choices = shape.bufs.first(places * nodes), shape.choices[:places]
        error = None if shape.drafter is None else shape.drafter.error
        # Plain steps leave their pairs waiting until a step drafts again.
        is_ahead_of_drafter = tree is None and self.drafter is not None

        def draft() -> None:
            self.draft(shape, places, rules)
            if checks is not None and shape.mask is not None:
                checks.check_draft(trees, shape.mask, self.target.vocab_size)

        def verify() -> None:
            ops(tree_rows)(trees, rows)
            if self._offsets is not None:
                slots = rows.attention.slots.clamp(min=0).long()
                rows.positions.view(places, nodes).add_(self._offsets[slots][:, None])
            self.target.forward(rows, self.cache, bufs)
            if checks is not None:
                checks.check_verify(rows, bufs, trees)

        def accept() -> None:
            self.choose(bufs.logits, trees, rules, host, choices)
            ops(walk)(choices, trees, shape.longest, state, error, is_ahead_of_drafter)
            if checks is not None:
                checks.check_accept(choices, trees)

        def commit() -> None:
            for keys, values in self.cache.stacks:
                ops(commit_kv)(state, keys, values)
            if self.features is not None:
                ops(commit_features)(state, bufs.features, nodes, self._first_row, self.features)
            self.remember(state, rules)
            ops(list_active)(state)

        return (
            Phase("draft", draft, self.draft_waits and tree is not None),
            Phase("verify", verify, self.waits),
            Phase("accept", accept, host is not None),
            Phase("commit", commit),
        )

    def draft(self, shape: TreeShape, places: int, rules: ChoiceRules) -> None:
        """Write the trees of the next step of up to ``places`` sequences; plainly, every slot's newest token."""
        if shape.drafter is not None:
            shape.drafter.draft()
        else:
            newest = (self.state.num_new[:, None].long() - 1).clamp(min=0)
            shape.trees.draft_tokens.copy_(self.state.new_tokens.gather(1, newest))

    def choose(
        self, logits: Tensor, trees: Trees, rules: ChoiceRules, host: HostChoice | None, choices: Tensor
    ) -> None:
        """Write the target's next token after every node into ``choices`` int32 [places, nodes].

        ``logits`` [places * nodes, vocab], of the trees' nodes in order.
        """
        if host is not None:
            host.choose(logits, trees, choices)
        else:
            self.ops(choose_tokens)(logits, trees, rules, self.choice, choices, self._scratch.first(choices.numel()))

    def remember(self, state: SlotState, rules: ChoiceRules) -> None:
        """Mark accepted tokens as seen, for penalties."""
        if rules.has_penalty:
            tokens = state.record[:, RECORD_HEAD : RECORD_HEAD + state.path.shape[1]]
            self.ops(mark_seen)(tokens, state.active_slots, state.active_count, self.choice.seen)

    def _chunk_phases(self, nodes: int, rules: ChoiceRules, host: HostChoice | None = None) -> Sequence[Phase]:
        """Return the phases of a chunk of the prompt in `box`; the last chunk chooses the first new token."""
        ops, entering, roots = self.ops, self.entering, self._entering_roots
        chunk = self._chunks.get(nodes) or self.new_chunk(nodes)
        if ops.use_kernels:
            self._chunks[nodes] = chunk
        rows, bufs = chunk.rows, chunk.bufs

        def verify() -> None:
            ops(chunk_rows)(self.box, rows)
            self.target.forward(rows.forward, self.cache, bufs, rows.last_row)

        def prefill() -> None:
            if self.drafter is not None:
                forward = rows.forward
                self.drafter.prefill(
                    bufs.features, rows.next_tokens, forward.positions, rows.pair_rows, forward.attention.slots
                )
            ops(end_chunk)(self.box, nodes, entering)

        def accept() -> None:
            self.choose(bufs.logits, roots, rules, host, chunk.choice)
            error = None if self.drafter is None else self.drafter.error
            ops(walk)(chunk.choice, roots, 1, entering, error)

        def commit() -> None:
            if self.features is not None:
                ops(commit_features)(entering, bufs.features, nodes, rows.first_row, self.features)
            self.remember(entering, rules)

        return (
            Phase("verify", verify, self.waits),
            Phase("prefill", prefill),
            Phase("accept", accept, host is not None),
            Phase("commit", commit),
        )

    def new_chunk(self, nodes: int) -> _Chunk:
        """Allocate the buffers of a prompt's chunk of ``nodes`` rows."""
        return _Chunk(self.target, nodes, self.state.lengths, self.cache.capacity)

    @cached_property
    def _scratch(self) -> ChoiceScratch:
        """Scratch for the most rows of a step."""
        nodes = 1 if self.tree is None else self.tree.total_tokens
        return choice_scratch(self.num_slots, nodes, self.target.vocab_size, self.target.device)


class _Chunk:
    """Buffers of one prompt chunk of ``nodes`` rows."""

    def __init__(self, target: Target, nodes: int, lengths: Tensor, capacity: int) -> None:
        self.rows = ChunkRows.allocate(nodes, lengths)
        self.bufs = target.new_buffers(1, nodes, 1, capacity)
        self.choice = torch.zeros((1, 1), dtype=torch.int32, device=target.device)


def _parts(key: Key, phases: Sequence[Phase]) -> Mapping[Key, Phase]:
    """Group phases into graphs: all in one where none waits, else each by itself."""
    if any(phase.waits for phase in phases):
        return {(*key, phase.name): phase for phase in phases}

    def run() -> None:
        for phase in phases:
            phase.run()

    return {key: Phase("all", run)}
