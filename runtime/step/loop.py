"""The generation loop over a `Decoder`: the host launches steps and reads their records, one step behind on a GPU.

Requests come from a `Source`. Each has a slot from its prompt's first chunk to its end, with rules of its own; a step
runs the stages that the rules of all its requests need, which changes no token of the others (`ChoiceRules`).

While step t is read (tokens for streamers, stop strings), step t + 1 runs already. The host waits for nothing but the
event after step t's record, a copy into pinned memory. End of sequence, the number of new tokens and the end of the
context are decided on the device; a stop string is found one step late, and what was drafted beyond it is dropped.
Where tokens are chosen on the host, it reads each record before the next step.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor

from ..api.request import Request
from ..api.stats import PhaseTimer
from ..drafter.drafter import timed_out
from ..ops import counted_apart, current, named_range, tuned_counts
from ..settings import TreeConfig
from .choice import HostChoice
from .decoders import Decoders, KeptRows, match_slots
from .graphs import BUCKETS, bucket_of
from .kernels.choice_kernels import ChoiceRules
from .kernels.choose_tokens import no_distribution, token_bits
from .kernels.slot_state import ENDED_BY_FAULT, RECORD_HEAD, RUNNING
from .plan import CallRules, Plan, Source
from .shapes import ShapeChooser, shapes_for

MIN_STEPS = 64
"""Steps of few sequences after which these have graphs of their own: recording and capturing them takes 0.2 s on an
H200, which a call's last answers would pay for each bucket that they pass."""


@dataclass
class _Record:
    """Result of one launch: filled when ``ready`` has passed."""

    values: Tensor
    ready: torch.cuda.Event | None
    sequences: dict[int, Request]
    is_step: bool
    tree: TreeConfig | None
    context: float
    """Mean tokens of a sequence, where shapes are chosen."""
    num_pauses: int
    """Pauses of the decoder up to this launch."""
    batch: int
    """Sequences that it was launched for."""


@dataclass
class _Entering:
    """A request whose prompt is run; ``chunks``: those that are left (`Prefill.begin`), None before it begins."""

    slot: int
    request: Request
    rules: CallRules
    chunks: list[tuple[int, bool]] | None = None


class GenerationLoop:
    """Answers the requests of a source, until none is left."""

    def __init__(self, decoders: Decoders, source: Source, plan: Plan) -> None:
        self.decoders, self.source, self.plan = decoders, source, plan
        self.entering: deque[_Entering] = deque()
        self.running: dict[int, Request] = {}
        """By slot, from the last chunk of the prompt on; ``_rules`` of these and earlier ones, and their stages."""
        self._rules: dict[int, tuple[ChoiceRules, Tensor]] = {}
        self._stages: dict[int, int] = {}
        self.in_flight: deque[_Record] = deque()
        self._last: _Record | None = None
        """The record read last."""
        self.active_sequences = Counter[int]()
        self.chooser = decoders.new_chooser(plan.shapes) if len(plan.shapes) > 1 else None
        """Chooses the shape of each step; None where all have the plan's."""
        self._free: list[Tensor] = []
        chooses_on_host = plan.rules.host_reason is not None
        self.host = HostChoice(self.running, self._rules) if chooses_on_host else None

    @torch.inference_mode()
    def run(self) -> dict[str, Any]:
        """Answer what waits; returns the fields of `GenerationStats` that are the call's."""
        return self.decoders.run(self._run_call) if self.source.has_waiting() else {}

    @property
    def rules(self) -> ChoiceRules:
        """Stages that the next step runs."""
        return self.plan.stages[max((self._stages[slot] for slot in self.running), default=0)]

    def _run_call(self) -> dict[str, Any]:
        decoders, device = self.decoders, self.decoders.target.device
        with current(device), counted_apart() as launches:
            # More prompts than there are slots wait for a free one.
            wanted = self.source.num_slots
            self.num_slots = min(wanted, self.plan.max_slots, decoders.max_slots or wanted)
            tree = self.plan.tree if self.chooser is None else decoders.tree
            self.decoder = decoders.get(self.num_slots, self.source.max_tokens, tree, self.plan.partial)
            try:
                self._run()
            except BaseException:
                # What is in flight still writes to the slots.
                if device.type == "cuda":
                    torch.cuda.synchronize()
                self.decoder.clear_()
                decoders.forget()
                raise
            return {
                **({} if self.timer is None else self.timer.stop_and_wait()),
                "cache_bytes": decoders.cache_bytes,
                "graph_bytes": decoders.graph_bytes,
                "active_sequences": dict(sorted((+self.active_sequences).items())),
                **self.decoder.counts(),
                **tuned_counts(launches),
            }

    def _run(self) -> None:
        decoder = self.decoder
        decoder.clear_()
        self.timer = None if self.plan.is_service else PhaseTimer(decoder.target.device)
        trees = [decoder.tree]
        if self.chooser is not None:
            # Plain decoding comes first: its kernels are few, and the call can begin with them.
            drafted = [shape for shape in self.plan.shapes if shape is not None]
            trees = [None, *shapes_for(decoder.batch_for(self.num_slots), drafted)]
        decoder.begin_compiling(self.num_slots, self.rules, trees, self.source.prompt_lengths)
        # The source, which may wait for requests, is asked last.
        while self.entering or self.running or self.in_flight or self.source.has_waiting():
            self._fill_slots()
            if self.host is not None:
                self._read_all_but(0)
            if self.running:
                self._step()
            # One step stays in flight after the one that is read.
            self._read_all_but(self.host is None and bool(self.running))

    def _read_all_but(self, number: int) -> None:
        while len(self.in_flight) > number:
            self._read()

    def _phase(self, name: str) -> AbstractContextManager[None]:
        return nullcontext() if self.timer is None else self.timer.phase(name)

    def _fill_slots(self) -> None:
        """Run prompts into free slots; while a service's answers wait, one chunk of a long one, or a few short ones."""
        for number in count(1):
            self._drop_cancelled()
            if not self.entering:
                self._take_requests()
            if not self.entering:
                return
            self._run_chunk()
            if self.plan.is_service and self.running and (self.entering or number >= self.plan.max_entering):
                return

    def _take_requests(self) -> None:
        free = [slot for slot in range(self.num_slots) if slot not in self.running]
        taken = self.source.take(min(1, len(free)) if self.plan.is_service else len(free))
        if not taken:
            return
        owners = {request.owner for request, _ in taken} if self.plan.reuse_prefix else set()
        kept = [rows if {rows.owner} == owners else KeptRows() for rows in self.decoders.kept]
        prompts = [request.prompt_ids for request, _ in taken]
        window = self.decoders.drafter.weights.sliding_window
        matches = match_slots(prompts, kept, free, self.plan.is_drafted, window)
        for (request, rules), (slot, shared) in zip(taken, matches, strict=True):
            request.num_reused = shared
            self.entering.append(_Entering(slot, request, rules))

    def _drop_cancelled(self) -> None:
        dropped = [each.request for each in self.entering if each.request.is_cancelled]
        self.entering = deque(each for each in self.entering if not each.request.is_cancelled)
        for slot, request in [*self.running.items()]:
            if request.is_cancelled:
                dropped.append(request)
                self.decoder.stop_slot(slot)
                del self.running[slot]
                if self.decoder.prompts.cached_pairs is not None:
                    # Of what it began with, pairs have made room for later ones.
                    self.decoders.kept[slot] = KeptRows()
        for request in dropped:
            request.finish_reason = "cancelled"
        if dropped:
            self.source.publish()

    def _run_chunk(self) -> None:
        entering, prompts = self.entering[0], self.decoder.prompts
        slot, request = entering.slot, entering.request
        stage = next(i for i, stages in enumerate(self.plan.stages) if stages.covers(entering.rules.rules))
        self._rules[slot], self._stages[slot] = (entering.rules.rules, entering.rules.numbers), stage
        with self._phase("prefill"):
            chunks = entering.chunks = self._begin(entering) if entering.chunks is None else entering.chunks
            chunk = chunks.pop(0)
            if not chunks:
                self.running[slot] = request
            prompts.run_chunk(chunk, self.plan.stages[stage], self.host)
            self.decoder.graphs.num_pauses += 1
            if chunks:
                return
            prompts.end()
        self.entering.popleft()
        self._keep_record(self.decoder.slots.entering.record, {slot: request}, is_step=False)

    def _begin(self, entering: _Entering) -> list[tuple[int, bool]]:
        slot, state, rules = entering.slot, entering.request, entering.rules
        decoder, prompt, first = self.decoder, state.prompt_ids, state.num_reused
        # Ends beyond those that the device has room for are found by the host, as stop strings are.
        ends, room = sorted(state.eos_ids), decoder.state.eos_ids.shape[1]
        eos = (ends + [-1] * room)[:room]
        self.decoders.kept[slot] = self.decoders.kept[slot].cut(prompt, first)
        self._upload(decoder.slots.box.numbers, [slot, len(prompt), state.max_tokens - len(prompt), first, *eos])
        self._upload(decoder.slots.box.tokens[: len(prompt)], prompt)
        if state.keys is not None:
            keys = state.keys[: decoder.slots.choice.keys.shape[1]]
            self._upload(decoder.slots.choice.keys[slot, : len(keys)], keys, torch.int64)
        self._upload(decoder.slots.choice.numbers[slot], rules.numbers, torch.float32)
        if rules.suppressed is not None:
            self._upload(decoder.slots.choice.suppressed[slot], rules.suppressed)
        if rules.rules.has_penalty:
            self._upload(decoder.slots.choice.seen[slot], token_bits(torch.tensor(prompt), decoder.target.vocab_size))
        if rules.rules.has_minimum:
            self._upload(decoder.slots.choice.eos[slot], token_bits(torch.tensor(ends), decoder.target.vocab_size))
        return decoder.prompts.begin(len(prompt) - first)

    def _upload(self, to: Tensor, values: Any, dtype: torch.dtype = torch.int32) -> None:
        """Copy from the host without waiting; pinned memory is not reused before the copy is done."""
        values = torch.as_tensor(values, dtype=dtype)
        to.copy_(values.pin_memory() if to.is_cuda else values, non_blocking=True)

    def _step(self) -> None:
        decoder, is_chosen = self.decoder, self.chooser is not None
        # Compiling takes seconds, and capturing parts of one: what has been generated is delivered before.
        if is_chosen and not decoder.is_compiled(self.num_slots, self.rules, None):
            self._read_all_but(0)
        tree = self._choose_tree() if self.running else None
        if self.running and not decoder.is_ready(self._num_active(), self.rules, tree):
            self._read_all_but(0)
        if not self.running:
            return
        num_active = self._num_active()
        if self.plan.time_phases:
            for phase in decoder.timed_step(num_active, self.rules, tree, self.host):
                name = "draft" if phase.name == "draft" else "verify"
                with self._phase(name), named_range(phase.name):
                    phase.run()
        else:
            with self._phase("step"):
                decoder.step(num_active, self.rules, tree, self.host)
        if self.chooser is not None:
            self.chooser.steps[tree] += 1
            if self.decoders.has_graphs:
                self.decoders.num_steps[bucket_of(len(self.running))] += 1
        self._keep_record(decoder.state.record, dict(self.running), True, tree, decoder.batch_for(num_active))

    def _num_active(self) -> int:
        """Count the sequences to launch the next step for: more than run, until fewer are worth graphs of their own."""
        if self.chooser is None or not self.decoders.has_graphs:
            return len(self.running)
        for bucket in BUCKETS:
            if len(self.running) <= bucket < self.num_slots:
                is_usual = self.decoders.num_steps[bucket] >= MIN_STEPS
                is_wanted = is_usual or self.decoder.is_ready(bucket, self.rules, None)
                if is_wanted and self.decoder.is_compiled(bucket, self.rules, None):
                    return bucket
        return self.num_slots

    def _choose_tree(self) -> TreeConfig | None:
        """Choose the next step's shape; time it first if it is new for this number of sequences."""
        tree = self.decoder.tree
        if self.chooser is None:
            return tree
        for _ in self.plan.shapes:
            num_active, context = self._num_active(), self._mean_context()
            batch = self.decoder.batch_for(num_active)
            running = [state.index for state in self.running.values()]
            ready = partial(self.decoder.is_compiled, num_active, self.rules)
            tree = self.chooser.next(batch, context, running, ready)
            missing = [each for each in dict.fromkeys((tree, None)) if self.chooser.is_unmeasured(each, batch)]
            if not missing:
                break
            self._read_all_but(0)
            if not self.running:
                break
            for each in missing:
                self.chooser.time(each, batch, context, self.decoder.time_step(num_active, self.rules, each))
        return tree

    def _mean_context(self) -> float:
        """Return the mean tokens of a running sequence, as far as the host knows them."""
        lengths = [len(state.prompt_ids) + len(state.token_ids) for state in self.running.values()]
        return sum(lengths) / len(lengths)

    def _keep_record(
        self,
        record: Tensor,
        sequences: dict[int, Request],
        is_step: bool,
        tree: TreeConfig | None = None,
        batch: int = 1,
    ) -> None:
        on_gpu = record.is_cuda
        values = self._free.pop() if self._free else torch.empty(record.shape, dtype=record.dtype, pin_memory=on_gpu)
        values.copy_(record, non_blocking=True)
        ready = torch.cuda.Event(enable_timing=self.chooser is not None) if on_gpu else None
        if ready is not None:
            ready.record()
        context = 0.0 if self.chooser is None else self._mean_context()
        pauses = self.decoder.graphs.num_pauses
        self.in_flight.append(_Record(values, ready, sequences, is_step, tree, context, pauses, batch))

    def _read(self) -> None:
        # Who is told of tokens needs the interpreter, which this thread now leaves.
        self.source.publish(waits=True)
        record = self.in_flight.popleft()
        if record.ready is not None:
            record.ready.synchronize()
        rows = record.values.tolist()
        self._free.append(record.values)
        if rows[-1][0]:
            self.decoder.clear_()
            raise timed_out()
        if self.decoder.checks is not None:
            self.decoder.checks.raise_fault()
        if record.is_step and self.chooser is not None:
            self._learn(self.chooser, record, rows)
        self._last = record
        num_active = sum(row[0] > 0 for row in rows[:-1])
        self.active_sequences[num_active] += record.is_step and num_active > 0
        for slot, state in record.sequences.items():
            if rows[slot][0] > 0 and state.finish_reason is None:
                self._take(slot, state, rows[slot], record)
        self.source.publish(waits=not self.in_flight)

    def _take(self, slot: int, state: Request, row: Sequence[int], record: _Record) -> None:
        """Deliver a slot's tokens of a record; ``row``: tokens accepted, tokens kept, how it ended, the tokens."""
        accepted, kept, ended = row[:RECORD_HEAD]
        prompt, num_before = state.prompt_ids, len(state.token_ids)
        try:
            is_done = _emit(state, row[RECORD_HEAD : RECORD_HEAD + kept], ended)
        except Exception as error:  # of a criterion, a streamer, a tokenizer, or logits
            self.source.fail(state, error)
            state.finish_reason, is_done = "fault", True
        assert is_done or ended == RUNNING, (slot, row)
        if record.is_step:
            delivered = len(state.token_ids) - num_before
            state.accepted_lengths[delivered] += 1
            state.num_cut_tokens += accepted - delivered
            state.num_drafted += 0 if record.tree is None else record.tree.total_tokens - 1
        if not is_done:
            return
        before, cached = self.decoders.kept[slot], self.decoder.prompts.cached_pairs
        pairs, first_pair = before.num_pairs, before.first_pair
        if cached is not None:
            first_pair = max(first_pair, len(prompt) + len(state.token_ids) - cached)
        if self.plan.is_drafted:
            # Pairs that are surely cached: a draft takes all before it, plain steps let a buffer full of them wait.
            waiting = 1 if self.chooser is None else self.decoder.state.new_tokens.shape[1]
            pairs = max(0, len(prompt) + num_before - waiting)
        self.decoders.kept[slot] = KeptRows((*prompt, *state.token_ids), pairs, first_pair, state.owner)
        if ended == RUNNING:
            self.decoder.stop_slot(slot)
        if self.running.get(slot) is state:
            del self.running[slot]

    def _learn(self, chooser: ShapeChooser, record: _Record, rows: list[list[int]]) -> None:
        """Learn from what one step accepted, and from its time since the end of the step before."""
        width = self.decoder.state.path.shape[1]
        # The root, which is always accepted, has a rank too.
        first = RECORD_HEAD + width + 1
        took_part = {state.index: rows[slot] for slot, state in record.sequences.items() if rows[slot][0] > 0}
        chooser.see(record.tree, {index: row[first : first + row[0] - 1] for index, row in took_part.items()})
        before = self._last
        if before is None or before.ready is None or record.ready is None or self.plan.time_phases:
            return
        # Nothing else ran between the ends of two steps of the same sequences.
        if before.is_step and before.num_pauses == record.num_pauses and before.sequences == record.sequences:
            chooser.time(record.tree, record.batch, record.context, before.ready.elapsed_time(record.ready))


def _emit(state: Request, tokens: Sequence[int], ended: int) -> bool:
    """Append tokens to an answer; returns whether it has ended. Raises `LogitsError` where one could not be chosen."""
    if ended == ENDED_BY_FAULT:
        good = [token for token in tokens if token >= 0]
        # A stop string may have ended the answer before.
        if not (good and state.emit(good)):
            raise no_distribution(tokens[len(good)], state.index, len(state.token_ids))
        return True
    return state.emit(tokens)
