"""Prefill: run prompts into slots, chunk by chunk, each from a graph where it can be captured."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from ..ops import Ops
from ..tree import Trees
from .choice import HostChoice, TokenChoice
from .drafts import Drafts
from .graphs import GraphKey, Graphs, Phase, group_phases
from .kernels.acceptance import commit_features, list_active, walk
from .kernels.choice_kernels import ChoiceRules
from .kernels.prompt_chunks import ChunkRows, begin_prompt, chunk_rows, end_chunk
from .slots import Slots

LARGEST_EAGER_CHUNK = 1024
"""Most rows of a prompt chunk that is not captured."""


class Prefill:
    """Runs the prompt in ``slots.box`` into its slot; arguments as in `decoder.Decoder`."""

    def __init__(self, slots: Slots, drafts: Drafts, choice: TokenChoice, graphs: Graphs, waits: bool) -> None:
        self._slots, self._drafts, self._choice, self._graphs, self._waits = slots, drafts, choice, graphs, waits
        self._ops, entering = Ops.for_device(slots.target.device), slots.entering
        root = torch.full((slots.cache.num_slots, 1), -1, dtype=torch.int64, device=slots.target.device)
        self._roots = Trees(entering.active_slots, entering.active_count, root, root, torch.zeros_like(root))
        self._chunk_rows = slots.target.chunk_rows
        self.cached_pairs = None if drafts.drafter is None else drafts.drafter.cfg.cached_pairs
        """Last pairs of a sequence that are surely in the drafter's cache; None for all."""
        self._has_sinks = drafts.drafter is not None and drafts.drafter.cfg.window_sinks > 0
        self._chunks: dict[int, _Chunk] = {}

    def begin(self, num_tokens: int) -> list[tuple[int, bool]]:
        """Empty the slot but for what the prompt reuses; returns the chunks of its last ``num_tokens``, to be run.

        Steps of other slots may run before each of them.
        """
        self._ops(begin_prompt)(self._slots.box, self._slots.state)
        return list(self._sizes(num_tokens))

    def run_chunk(self, chunk: tuple[int, bool], rules: ChoiceRules, host: HostChoice | None = None) -> None:
        """Run the next chunk; the last one chooses the first new token."""
        self._graphs.run(("chunk", *chunk), rules, self._phases(*chunk, rules, host))

    def end(self) -> None:
        """List the slot as running, after the last chunk."""
        self._ops(list_active)(self._slots.state)
        if self._drafts.prompt_queries is not None:
            self._drafts.enter(self._slots.box.numbers[:1])

    def groups(self, rules: ChoiceRules, num_tokens: Iterable[int] | None = None) -> dict[GraphKey, Phase]:
        """Return the chunks of prompts of as many tokens, or all that there are, grouped into graphs."""
        groups: dict[GraphKey, Phase] = {}
        rows = self._chunk_rows
        num_tokens = num_tokens or (*rows, min(self._slots.cache.capacity, 2 * rows[-1] + (self.cached_pairs or 0)))
        for nodes, is_seen in sorted({chunk for each in num_tokens for chunk in self._sizes(each)}):
            groups |= group_phases(("chunk", nodes, is_seen), self._phases(nodes, is_seen, rules, None))
        return groups

    def _sizes(self, num_tokens: int) -> Iterator[tuple[int, bool]]:
        """Cut a prompt into chunks; the last may have more rows than are left.

        Each comes with whether the drafter keeps its pairs: those between the sinks and the window it never reads.
        """
        left, cached = num_tokens, self.cached_pairs
        while left > 0:
            chunk = next((chunk for chunk in self._chunk_rows if chunk >= left), self._chunk_rows[-1])
            nodes = chunk if self._ops.use_kernels else min(left, LARGEST_EAGER_CHUNK)
            is_first = left == num_tokens
            left -= nodes
            yield nodes, cached is None or left < cached or (is_first and self._has_sinks)

    def _phases(self, nodes: int, is_seen: bool, rules: ChoiceRules, host: HostChoice | None) -> Sequence[Phase]:
        ops, slots, drafts = self._ops, self._slots, self._drafts
        entering, drafter = slots.entering, drafts.drafter
        chunk = self._chunks.get(nodes) or _Chunk(slots, nodes, drafts.prompt_queries)
        if ops.use_kernels:
            # Few sizes occur.
            self._chunks[nodes] = chunk
        rows, bufs = chunk.rows, chunk.bufs

        def verify() -> None:
            ops(chunk_rows)(slots.box, rows)
            slots.target.forward(rows.forward, slots.cache, bufs, rows.last_row)

        def prefill() -> None:
            if drafter is not None and is_seen:
                forward = rows.forward
                drafter.prefill(
                    bufs.features, rows.next_tokens, forward.positions, rows.pair_rows, forward.attention.slots
                )
            ops(end_chunk)(slots.box, nodes, entering)

        def accept() -> None:
            self._choice.choose(bufs.logits, self._roots, rules, host, chunk.choice)
            ops(walk)(chunk.choice, self._roots, 1, entering, None if drafter is None else drafter.error)

        def commit() -> None:
            if slots.features is not None:
                ops(commit_features)(entering, bufs.features, nodes, rows.first_row, slots.features)
            self._choice.mark_accepted(entering, rules)
            if drafts.prompt_queries is not None:
                drafts.commit_chunk()

        return (
            Phase("verify", verify, self._waits),
            Phase("prefill", prefill),
            Phase("accept", accept, host is not None),
            Phase("commit", commit),
        )


class _Chunk:
    """Buffers of one prompt chunk of ``nodes`` rows; ``queries`` as in `ForwardBuffers`."""

    def __init__(self, slots: Slots, nodes: int, queries: Tensor | None) -> None:
        self.rows = ChunkRows.allocate(nodes, slots.state.lengths)
        self.bufs = slots.target.new_buffers(1, nodes, 1, slots.cache.capacity)
        self.bufs.queries = queries
        self.choice = torch.zeros((1, 1), dtype=torch.int32, device=slots.target.device)
