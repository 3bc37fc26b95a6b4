"""The generation loop: prefill, then draft → verify → commit, for any number of prompts over a fixed number of slots.

Without a drafter the same loop decodes plainly, one token per pass: the truth that speculative output is held against.
A finished sequence leaves its slot at once; a waiting prompt takes it. The host waits for the device in one place per
step, where it reads the accepted tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from ..config import SamplingConfig
from ..drafter.reference import Drafter, NewPairs
from ..slots import ActiveSlots
from ..target.transformers import TargetModel
from ..tree import DraftTree, layout_tree
from .accept import AcceptedPath, accept_path
from .kept_rows import KeptPieces, KeptRows, capacity_for, match_slots
from .missed import HeldIds
from .requests import OnTokens, Request, RequestOutput, RunningRequest, collect, start
from .sampling import choose_tokens, stream_window
from .stats import GenerationStats, PhaseTimer, count_tuned


class GenerationLoop:
    """One call's state. ``drafter`` None decodes plainly. ``on_tokens(i, ids)`` hears every new token of request i.

    ``kept``: what the call before has left; with ``reuse_prefix`` prompts take over what they share with it, and this
    call leaves its own there. ``held``: what can be drafted (`requests.start`).
    """

    def __init__(
        self,
        target: TargetModel,
        drafter: Drafter | None,
        requests: Sequence[Request],
        sampling: SamplingConfig,
        max_slots: int | None = None,
        on_tokens: OnTokens | None = None,
        kept: KeptPieces | None = None,
        reuse_prefix: bool = False,
        held: HeldIds | None = None,
    ) -> None:
        self.target, self.drafter, self.sampling = target, drafter, sampling
        self.states = start(requests, sampling, on_tokens, held)
        self.waiting = deque(state for state in self.states if state.finish_reason is None)
        self.num_slots = max(1, min(len(self.waiting), max_slots or len(self.waiting)))
        self.running: dict[int, RunningRequest] = {}
        self.width = 1 if drafter is None else drafter.tree.path_width
        self.kept, self.reuse_prefix = kept or KeptPieces(), reuse_prefix
        self.walk: list[Tensor] = []
        """Tokens of the current walk down the trees, one int64 [requests] per step."""

    @property
    def path(self) -> str:
        """What runs, in words."""
        return "steps in pieces"

    @torch.inference_mode()
    def run(self) -> tuple[list[RequestOutput], GenerationStats]:
        """Generate everything; outputs in the order of the requests, and the statistics of the whole call."""
        # Kernels and events go to the current GPU, which need not be the model's.
        device = self.target.device
        with self.target.lock.hold(), torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            return self._run()

    def _run(self) -> tuple[list[RequestOutput], GenerationStats]:
        self.timer = PhaseTimer(self.target.device)
        if self.waiting:
            # Whatever this call does to the caches, what they held is not theirs any more.
            before = self.kept.take()
            capacity = max(state.request.max_tokens for state in self.waiting)
            nodes = 1 if self.drafter is None else self.drafter.tree.total_tokens
            # A path is kept in its full width, padding included, and a deep tree of few nodes is wider than those.
            room = max(nodes, self.width)
            self._allocate(before if self.reuse_prefix else KeptPieces(), capacity, room)
            while self.waiting or self.running:
                self._fill_slots()
                if self.running:
                    self._step()
            if self.reuse_prefix:
                self.kept.put(self.pieces)
        timings = self.timer.stop_and_wait()
        return collect(self.states, timings, **count_tuned(self.drafter))

    def _allocate(self, before: KeptPieces, capacity: int, room: int) -> None:
        if not before.has_room(self.num_slots, capacity, capacity + room):
            # Longer prompts are to come where this one's rows are kept.
            capacity = capacity_for(capacity) if self.reuse_prefix else capacity
            cache = self.target.new_cache(self.num_slots, capacity + room)
            before = KeptPieces(cache, None, capacity, [KeptRows()] * self.num_slots)
        assert before.cache is not None
        self.pieces, self.cache = before, before.cache
        claims = self.target.lock.claims
        if self.drafter is not None and (
            self.drafter is not before.drafter or claims.get(id(self.drafter)) is not before.claim
        ):
            self.drafter.allocate(self.num_slots, before.capacity)
            claim = claims[id(self.drafter)] = object()
            slots = [KeptRows(kept.tokens) for kept in before.slots]
            self.pieces = replace(before, drafter=self.drafter, claim=claim, slots=slots)
        device, dtype = self.target.device, self.target.dtype
        # What the last step added, by slot: the drafter's next input.
        self.features = torch.zeros((self.num_slots, self.width, self.target.feature_width), device=device, dtype=dtype)
        self.next_tokens = torch.full((self.num_slots, self.width), -1, dtype=torch.int64, device=device)
        self.num_new = torch.zeros(self.num_slots, dtype=torch.int64, device=device)
        self.num_new_host = [0] * self.num_slots

    def _fill_slots(self) -> None:
        """Give free slots to waiting prompts; a prompt that ends with its first token frees the slot again."""
        while self.waiting and len(self.running) < self.num_slots:
            free = [slot for slot in range(self.num_slots) if slot not in self.running]
            entering = [self.waiting.popleft() for _ in range(min(len(free), len(self.waiting)))]
            prompts = [state.request.prompt_ids for state in entering]
            matches = match_slots(prompts, self.pieces.slots, free, self.drafter is not None)
            for state, (slot, shared) in zip(entering, matches, strict=True):
                state.num_reused = shared
                with self.timer.phase("prefill"):
                    token = self._prefill(slot, state)
                self.running[slot] = state
                self._emit(slot, [token])

    def _prefill(self, slot: int, state: RunningRequest) -> int:
        prompt = torch.tensor(state.request.prompt_ids, dtype=torch.int64, device=self.target.device)
        shared = state.num_reused
        kept = self.pieces.slots[slot]
        self.pieces.slots[slot] = kept.cut(state.request.prompt_ids, shared, self.drafter is not None)
        self.cache.reset_slot(slot, shared)
        output = self.target.prefill(self.cache, slot, prompt[shared:])
        token = self._choose(output.logits[:, -1], [state], step=0)  # [1]
        if self.drafter is not None:
            self.drafter.reset_slot(slot, *[shared] if shared else [])
            self.drafter.prefill(slot, output.features[0, :-1], prompt[shared + 1 :])
            self._join(slot, state.request.prompt_ids)
            self._join(slot, token.tolist(), is_new=True)
        self.features[slot, 0] = output.features[0, -1]
        self.next_tokens[slot] = -1
        self.next_tokens[slot, :1] = token
        self.num_new[slot] = 1
        self.num_new_host[slot] = 1
        return int(token)

    def _step(self) -> None:
        active = ActiveSlots.of(self.running, self.num_slots, self.target.device)
        states = [self.running[slot] for slot in active.indices]
        with self.timer.phase("draft"):
            tree = self._draft(active)
        with self.timer.phase("verify"):
            output = self.target.verify(self.cache, active, tree)
            path = accept_path(
                _active_tree(tree, active), output.logits, lambda rows, step: self._choose(rows, states, step)
            )
            self._keep_pairs(active, output.features, path)
        tokens, lengths = wait_for_tokens(path)
        with self.timer.phase("verify"):
            self.cache.commit_path(active, path.nodes, lengths)
        for slot, state, new, length in zip(active.indices, states, tokens, lengths, strict=True):
            self.num_new_host[slot] = length
            state.accepted_lengths[length] += 1
            self._join(slot, new[:length], is_new=True)
            self._emit(slot, new[:length])

    def _emit(self, slot: int, tokens: Sequence[int]) -> None:
        """Hand new tokens to a slot's request; if they end it, it leaves the slot."""
        state = self.running[slot]
        num_before = len(state.request.prompt_ids) + len(state.token_ids)
        if state.emit(tokens):
            # The step that gave these tokens began with the pairs of those before.
            pairs = self.pieces.slots[slot].num_pairs if self.drafter is None else num_before - 1
            self.pieces.slots[slot] = KeptRows((*state.request.prompt_ids, *state.token_ids), pairs)
            del self.running[slot]

    def _draft(self, active: ActiveSlots) -> DraftTree:
        if self.drafter is None:
            root = self.next_tokens[:, :1]
            return layout_tree(root, torch.full_like(root, -1), path_width=1, active=active.active_inverse >= 0)
        host = tuple(self.num_new_host[slot] for slot in active.indices)
        return self.drafter.draft(active, NewPairs(self.features, self.next_tokens, self.num_new, host))

    def _join(self, slot: int, token_ids: Sequence[int], is_new: bool = False) -> None:
        """Let tokens of a prompt, or ``is_new`` ones, join the slot's draft vocabulary if it follows them."""
        follow = None if self.drafter is None else self.drafter.weights.follow
        if self.drafter is not None and follow is not None and (follow.source == "text" or not is_new):
            self.drafter.join(slot, token_ids)

    def _keep_pairs(self, active: ActiveSlots, features: Tensor, path: AcceptedPath) -> None:
        """Keep the features of the accepted nodes and the token after each, by slot, for the next draft."""
        slots = active.active_slots[: active.num_active]
        nodes = path.nodes.clamp(min=0)[..., None].expand(-1, -1, features.shape[-1])
        self.features.index_copy_(0, slots, features.gather(1, nodes))
        self.next_tokens.index_copy_(0, slots, path.tokens)
        self.num_new.index_copy_(0, slots, path.lengths)

    def _choose(self, logits: Tensor, states: Sequence[RunningRequest], step: int) -> Tensor:
        """Choose the token ``step`` places behind what each request has: [requests, vocab] to int64 [requests]."""
        if any(state.request.process for state in states):
            logits = self._process(logits, states, step)
        if self.sampling.is_greedy:
            uniforms = logits.new_empty(0)
        else:
            streams = [state.stream for state in states if state.stream is not None]
            starts = [len(state.token_ids) + step for state in states]
            uniforms = stream_window(streams, starts, 1, logits.device)[:, 0]
        tokens = choose_tokens(logits, uniforms, self.sampling)
        self.walk = [*self.walk[:step], tokens]
        return tokens

    def _process(self, logits: Tensor, states: Sequence[RunningRequest], step: int) -> Tensor:
        """Apply each request's logits processors, given its tokens and those that this walk has chosen so far."""
        rows = list(logits.to(torch.float32, copy=True).split(1))
        for place, state in enumerate(states):
            if state.request.process is not None:
                past = torch.tensor([*state.request.prompt_ids, *state.token_ids], device=logits.device)
                walked = [tokens[place : place + 1] for tokens in self.walk[:step]]
                rows[place] = state.request.process(torch.cat([past, *walked])[None], rows[place])
        return torch.cat(rows)


def wait_for_tokens(path: AcceptedPath) -> tuple[list[list[int]], list[int]]:
    """Read the emitted tokens and their number for each sequence: the one place where a step waits for the device."""
    packed = torch.cat((path.tokens, path.lengths[:, None]), 1).tolist()
    return [row[:-1] for row in packed], [row[-1] for row in packed]


def _active_tree(tree: DraftTree, active: ActiveSlots) -> DraftTree:
    return DraftTree(
        active.gather(tree.draft_tokens),
        active.gather(tree.parents),
        active.gather(tree.tree_mask),
        active.gather(tree.tree_position_ids),
        active.gather(tree.retrieve_indices),
        active.gather(tree.num_leaves),
    )
