"""The generation loop over a `Decoder`: the host launches steps and reads their records, one step behind on a GPU.

While step t is read (tokens for streamers, stop strings), step t + 1 runs already. The host waits for nothing but the
event after step t's record, a copy into pinned memory. End of sequence, the number of new tokens and the end of the
context are decided on the device; a stop string is found one step late, and what was drafted beyond it is dropped.
Where tokens are chosen on the host, it reads each record before the next step.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..api.request import Request, RequestOutput, collect
from ..api.stats import GenerationStats, PhaseTimer
from ..drafter.drafter import timed_out
from ..ops import counted_apart, current, named_range, tuned_counts
from ..settings import TreeConfig
from .choice import HostChoice
from .decoders import Decoders, KeptRows, match_slots
from .graphs import BUCKETS
from .kernels.choose_tokens import no_distribution, token_bits
from .kernels.slot_state import ENDED_BY_FAULT, RECORD_HEAD, RUNNING
from .plan import Plan
from .shapes import ShapeChooser, shapes_for


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


class GenerationLoop:
    """One call; ``states`` are the requests in its order."""

    def __init__(self, decoders: Decoders, states: Sequence[Request], plan: Plan) -> None:
        self.decoders, self.states, self.plan = decoders, states, plan
        self.rules = plan.rules.rules
        self.waiting = deque(state for state in states if state.finish_reason is None)
        self.running: dict[int, Request] = {}
        self.in_flight: deque[_Record] = deque()
        self._last: _Record | None = None
        """The record read last."""
        self.active_sequences = Counter[int]()
        self.chooser = decoders.new_chooser(plan.shapes) if len(plan.shapes) > 1 else None
        """Chooses the shape of each step; None where all have the plan's."""
        self._free: list[Tensor] = []
        chooses_on_host = plan.rules.host_reason is not None
        self.host = HostChoice(self.running, self.rules, plan.rules.numbers) if chooses_on_host else None

    @torch.inference_mode()
    def run(self) -> tuple[list[RequestOutput], GenerationStats]:
        """Generate all answers; returns them in the order of the requests, with the statistics of the call."""
        return self.decoders.run(self._run_held) if self.waiting else collect(self.states, {})

    def _run_held(self) -> tuple[list[RequestOutput], GenerationStats]:
        decoders, device = self.decoders, self.decoders.target.device
        with current(device), counted_apart() as launches:
            # More prompts than there are slots wait for a free one.
            self.num_slots = min(len(self.waiting), self.plan.max_slots, decoders.max_slots or len(self.waiting))
            longest = max(state.max_tokens for state in self.waiting)
            tree = self.plan.tree if self.chooser is None else decoders.tree
            self.decoder = decoders.get(self.num_slots, longest, tree, self.plan.partial)
            try:
                self._run()
            except BaseException:
                # What is in flight still writes to the slots.
                if device.type == "cuda":
                    torch.cuda.synchronize()
                self.decoder.clear_()
                decoders.forget()
                raise
            counts = self.decoder.counts() | tuned_counts(launches)
            return collect(
                self.states,
                self.timer.stop_and_wait(),
                cache_bytes=decoders.cache_bytes,
                graph_bytes=decoders.graph_bytes,
                active_sequences=dict(sorted((+self.active_sequences).items())),
                **counts,
            )

    def _run(self) -> None:
        decoder, rules = self.decoder, self.plan.rules
        decoder.clear_()
        self._upload(decoder.slots.choice.numbers, rules.numbers, torch.float32)
        if rules.suppressed is not None:
            self._upload(decoder.slots.choice.suppressed, rules.suppressed)
        self.timer = PhaseTimer(decoder.target.device)
        trees = [decoder.tree]
        if self.chooser is not None:
            # Plain decoding comes first: its kernels are few, and the call can begin with them.
            drafted = [shape for shape in self.plan.shapes if shape is not None]
            trees = [None, *shapes_for(decoder.batch_for(self.num_slots), drafted)]
        prompts = [len(state.prompt_ids) for state in self.waiting]
        decoder.begin_compiling(self.num_slots, self.rules, trees, prompts)
        while self.waiting or self.running or self.in_flight:
            self._fill_slots()
            if self.host is not None:
                self._read_all_but(0)
            if self.running:
                self._step()
            # One step stays in flight after the one that is read.
            self._read_all_but(self.host is None and bool(self.running))

    def _read_all_but(self, count: int) -> None:
        while len(self.in_flight) > count:
            self._read()

    def _fill_slots(self) -> None:
        free = [slot for slot in range(self.num_slots) if slot not in self.running]
        entering = [self.waiting.popleft() for _ in range(min(len(free), len(self.waiting)))]
        kept = self.decoders.kept if self.plan.reuse_prefix else [KeptRows()] * self.num_slots
        prompts = [state.prompt_ids for state in entering]
        window = self.decoders.drafter.weights.sliding_window
        matches = match_slots(prompts, kept, free, self.plan.is_drafted, window)
        for state, (slot, shared) in zip(entering, matches, strict=True):
            self.running[slot], state.num_reused = state, shared
            with self.timer.phase("prefill"):
                self._enter(slot, state)
            self._keep_record(self.decoder.slots.entering.record, {slot: state}, is_step=False)

    def _enter(self, slot: int, state: Request) -> None:
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
        if self.rules.has_penalty:
            self._upload(decoder.slots.choice.seen[slot], token_bits(torch.tensor(prompt), decoder.target.vocab_size))
        if self.rules.has_minimum:
            self._upload(decoder.slots.choice.eos, token_bits(torch.tensor(ends), decoder.target.vocab_size))
        decoder.prompts.enter(len(prompt) - first, self.rules, self.host)

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
                with self.timer.phase(name), named_range(phase.name):
                    phase.run()
        else:
            with self.timer.phase("step"):
                decoder.step(num_active, self.rules, tree, self.host)
        if self.chooser is not None:
            self.chooser.steps[tree] += 1
        self._keep_record(decoder.state.record, dict(self.running), True, tree, decoder.batch_for(num_active))

    def _num_active(self) -> int:
        """Count the sequences to launch the next step for: more than run, while no kernels of fewer are compiled."""
        if self.chooser is None or not self.decoders.has_graphs:
            return len(self.running)
        buckets = (bucket for bucket in BUCKETS if len(self.running) <= bucket < self.num_slots)
        compiled = (bucket for bucket in buckets if self.decoder.is_compiled(bucket, self.rules, None))
        return next(compiled, self.num_slots)

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
                self._take(slot, state, rows[slot], record.is_step)

    def _take(self, slot: int, state: Request, row: Sequence[int], is_step: bool) -> None:
        """Deliver a slot's tokens of a record; ``row``: tokens accepted, tokens kept, how it ended, the tokens."""
        accepted, kept, ended = row[:RECORD_HEAD]
        prompt, num_before = state.prompt_ids, len(state.token_ids)
        tokens = row[RECORD_HEAD : RECORD_HEAD + kept]
        if ended == ENDED_BY_FAULT:
            good = [token for token in tokens if token >= 0]
            # A stop string may have ended the answer before.
            if not (good and state.emit(good)):
                raise no_distribution(tokens[len(good)], state.index, len(state.token_ids))
            tokens = []
        is_done = state.finish_reason is not None or state.emit(tokens)
        assert is_done or ended == RUNNING, (slot, row)
        if is_step:
            delivered = len(state.token_ids) - num_before
            state.accepted_lengths[delivered] += 1
            state.num_cut_tokens += accepted - delivered
        if not is_done:
            return
        before, held = self.decoders.kept[slot], self.decoder.drafts.held_pairs
        pairs, first_pair = before.num_pairs, before.first_pair
        if held is not None:
            first_pair = max(first_pair, len(prompt) + len(state.token_ids) - held)
        if self.plan.is_drafted:
            # Pairs that are surely cached: a draft takes all before it, plain steps let a buffer full of them wait.
            waiting = 1 if self.chooser is None else self.decoder.state.new_tokens.shape[1]
            pairs = max(0, len(prompt) + num_before - waiting)
        self.decoders.kept[slot] = KeptRows((*prompt, *state.token_ids), pairs, first_pair)
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
