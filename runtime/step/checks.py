"""``EAGLE_SLIM_CHECK=1``: what holds after every phase of a step, looked at where it lies, on the device.

For debugging wrong drafts. Each rule is a comparison of tensors that ends in one small tensor, the first fault: nothing
waits, so that a graph can hold it, and a kernel and its twin are held to the same rules. After a fault no slot runs any
more, so that later phases read nothing by wrong numbers; the loop raises `CheckError` when it reads that step's record.

    draft    tokens, parents, positions, mask and paths of the trees; spans and keys of the drafter's cache
    verify   slots, tokens, positions, cache rows and ancestors of all rows; features, logits, keys and values
    accept   the path and its tokens against tree and choices; spans
    commit   the rows and features that were moved; lists of running slots; room for the next step

A prompt's chunks are held to those of these rules that concern them. Steps take several times as long.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from torch import Tensor

from ..drafter.buffers import Buffers
from ..errors import CheckError
from ..target.cache import ForwardBuffers, KVCache
from ..target.kernels.tree_rows import ForwardRows
from ..tree import Trees
from .kernels.acceptance import SlotState


@dataclass(frozen=True)
class _Rule:
    phase: str
    what: str
    expected: str
    labels: tuple[str, ...]
    shape: tuple[int, ...]


class Checks:
    """The rules of one decoder, and the first fault that was found."""

    def __init__(self, device: torch.device) -> None:
        self.fault = torch.zeros(4, dtype=torch.float64, device=device)
        """Number of the rule from 1 on, slot, place within it, and value; all 0 without a fault."""
        self._rules: dict[_Rule, int] = {}

    def require(
        self, phase: str, what: str, expected: str, slots: Tensor, found: Tensor, holds: Tensor, *labels: str
    ) -> None:
        """Keep the first of ``found`` [n, ...] where ``holds`` of that shape is false.

        ``slots`` [n]: whose row it is, -1 for rows that no rule holds for. ``labels`` name the axes after the first.
        """
        rule = _Rule(phase, what, expected, labels, tuple(found.shape[1:]))
        number = self._rules.setdefault(rule, len(self._rules) + 1)
        wrong = (~holds.flatten(1) if holds.dim() > 1 else ~holds[:, None]) & (slots >= 0)[:, None]
        first = wrong.flatten().to(torch.uint8).argmax(0, keepdim=True)
        slot = slots.index_select(0, first // wrong.shape[1])
        value = found.reshape(-1).index_select(0, first)
        fault = torch.cat(
            [each.double() for each in (torch.full_like(first, number), slot, first % wrong.shape[1], value)]
        )
        self.fault.copy_(torch.where(wrong.any() & (self.fault[0] == 0), fault, self.fault))

    def stop_(self, *states: SlotState) -> None:
        """Let no slot of these run any more if there is a fault."""
        is_sound = self.fault[0] == 0
        for state in states:
            state.running.mul_(is_sound)
            state.active_count.mul_(is_sound)
            for listed in (state.active_slots, state.active_inverse):
                listed.copy_(torch.where(is_sound, listed, -1))

    def clear_(self) -> None:
        """Forget the fault."""
        self.fault.zero_()

    def raise_fault(self) -> None:
        """Wait for the device, and raise `CheckError` for the first fault."""
        number, slot, within, value = self.fault.tolist()
        if number == 0:
            return
        rule = next(rule for rule, own in self._rules.items() if own == int(number))
        at, left = [], int(within)
        for label, size in zip(reversed(rule.labels), reversed(rule.shape), strict=True):
            at.append(f", {label} {left % size}")
            left //= size
        shown = int(value) if value == value and abs(value) < 1 << 53 and value == int(value) else value
        raise CheckError(
            f"EAGLE_SLIM_CHECK: after {rule.phase}, slot {int(slot)}{''.join(reversed(at))}: {rule.what} is {shown}, "
            f"expected {rule.expected}. What follows of this step is undefined.",
            phase=rule.phase, slot=int(slot), what=rule.what, found=shown, expected=rule.expected,
        )  # fmt: skip


def checks_wanted() -> bool:
    """Whether the environment asks for checks."""
    return os.environ.get("EAGLE_SLIM_CHECK", "0") not in ("", "0")


def check_draft(checks: Checks, state: SlotState, bufs: Buffers, vocab: int) -> None:
    """Check the trees of the active slots, and what the drafter keeps for the next ones."""
    slots = _listed(state.active_inverse >= 0)
    tokens, parents, depths = bufs.draft_tokens, bufs.parents, bufs.tree_position_ids
    node = torch.arange(tokens.shape[1], device=tokens.device)
    newest = state.new_tokens.gather(1, (state.num_new[:, None].long() - 1).clamp(min=0))

    def require(what: str, expected: str, found: Tensor, holds: Tensor, *labels: str) -> None:
        checks.require("draft", what, expected, slots, found, holds, *labels)

    # Spans first: by them all else is found.
    span = state.prefix + state.num_new
    require("prefix + num_new", "the slot's length", span, span == state.lengths)
    last = span + bufs.tree_rows
    require("the drafter's last row", f"at most {bufs.keys.shape[2]}", last, last <= bufs.keys.shape[2])
    require("the root's token", "the newest token", tokens[:, 0], tokens[:, 0] == newest[:, 0])
    require("the token", f"an id below {vocab}", tokens, (tokens >= 0) & (tokens < vocab), "node")
    is_before = torch.where(node == 0, parents == -1, (parents >= 0) & (parents < node))
    require("the parent", "a node before it, -1 of the root", parents, is_before, "node")
    parent = torch.where(is_before, parents, 0).clamp(min=0)
    depth = torch.where(node == 0, 0, depths.gather(1, parent) + 1)
    require("the position", "its parent's and 1", depths, depths == depth, "node")
    mask = bufs.tree_mask[:, 0]
    require("the mask", "its parent's and itself", mask, mask == _grown(mask, parent), "node", "seen node")
    paths = bufs.retrieve_indices
    on_path = paths.clamp(0, tokens.shape[1] - 1)
    up = torch.cat((torch.full_like(paths[..., :1], -1), paths[..., :-1]), -1)
    follows = parents[:, None].expand(-1, paths.shape[1], -1).gather(2, on_path) == up
    is_leaf = (node < bufs.num_leaves[:, None])[..., None]
    is_root = torch.arange(paths.shape[2], device=paths.device) == 0
    follows &= is_leaf & (paths == on_path) & (is_root | (paths > 0))
    holds = torch.where(paths == -1, ~(is_leaf & is_root), follows)
    require("the path's node", "a child of the one before it, -1 after a leaf", paths, holds, "path", "place")
    width = state.new_tokens.shape[1]
    rows = _span(state.prefix, state.num_new, width)
    for name, kept in (("keys", bufs.keys), ("values", bufs.values)):
        found = kept[slots.clamp(min=0)[:, None], :, rows.clamp(0, kept.shape[2] - 1)]
        _require_finite(checks, "draft", f"the drafter's {name}", slots, found, rows >= 0, "new token")
    scores = bufs.workspace.get("score", bufs.host.get("score"))
    if scores is not None:
        scores = scores.view(len(slots), -1)
        require("the candidate's score", "a number", scores, scores == scores, "candidate")


def check_verify(
    checks: Checks, state: SlotState, rows: ForwardRows, bufs: ForwardBuffers, cache: KVCache,
    trees: Trees | None = None,
) -> None:  # fmt: skip
    """Check a forward's rows and what it made of them; ``trees`` None for a prompt's chunk."""
    attention, nodes, places = rows.attention, rows.nodes, rows.places
    slots, vocab = attention.slots.long(), bufs.logits.shape[1]
    node = torch.arange(nodes, device=slots.device)
    if trees is not None:
        is_active = torch.arange(places, device=slots.device) < trees.active_count
        expected = torch.where(is_active, trees.active_slots[:places], -1).long()
        checks.require("verify", "the row's slot", "that of its place", expected, slots, slots == expected)
        slots = expected
    at = slots.clamp(0, len(state.lengths) - 1)
    used = node < attention.counts[:, None]
    by_place = (places, nodes)

    def require(what: str, expected: str, found: Tensor, holds: Tensor, *labels: str) -> None:
        unused = ~used.view(*by_place, *[1] * (found.dim() - 2))
        checks.require("verify", what, expected, slots, found, holds | unused, "node", *labels)

    tokens, positions, kv_rows = (each.view(by_place) for each in (rows.tokens, rows.positions, rows.kv_rows))
    require("the token", f"an id below {vocab}", tokens, (tokens >= 0) & (tokens < vocab))
    require("the cache row", f"below {cache.capacity}", kv_rows, (kv_rows >= 0) & (kv_rows < cache.capacity))
    if trees is not None:
        first = state.lengths[at][:, None]
        require("the cache row", "the slot's length and the node", kv_rows, kv_rows == first + node)
        depth = trees.positions[at]
        require("the position", "the slot's length and the depth", positions, positions == first + depth)
        if attention.paths is not None:
            mask, parent = attention.tree_mask(), trees.parents[at].clamp(0, nodes - 1)
            require("the mask", "its parent's and itself", mask, mask == _grown(mask, parent), "seen node")
    features = bufs.features.reshape(places, nodes, -1)
    _require_finite(checks, "verify", "the feature", slots, features, used, "node")
    logits = bufs.logits.reshape(places, -1, vocab)
    # Some models leave ids out by a logit of -inf.
    is_number = (logits == logits) & (logits < torch.inf)
    is_number |= ~used[..., None] if logits.shape[1] == nodes else (attention.counts == 0)[:, None, None]
    checks.require("verify", "the logit", "a number", slots, logits, is_number, "node", "id")
    _require_rows(checks, "verify", slots, torch.where(used, kv_rows, -1), cache, "node")


def check_prefill(checks: Checks, slots: Tensor, pair_rows: Tensor, bufs: Buffers) -> None:
    """Check the drafter's keys and values of a prompt's pairs: ``slots`` [1], ``pair_rows`` [pairs], -1 for none."""
    for name, kept in (("keys", bufs.keys), ("values", bufs.values)):
        found = kept[slots.long()[:, None], :, pair_rows.clamp(min=0).long()[None]]
        _require_finite(checks, "prefill", f"the drafter's {name}", slots, found, pair_rows[None] >= 0, "pair")


def check_accept(checks: Checks, state: SlotState, choices: Tensor, trees: Trees, capacity: int, vocab: int) -> None:
    """Check what a walk has accepted against the choices int32 [places, nodes] and the trees."""
    accepted, kept = state.record[:-1, 0], state.record[:-1, 1]
    slots = _listed(accepted > 0)
    path, tokens, nodes = state.path.long(), state.new_tokens, trees.parents.shape[1]
    step = torch.arange(path.shape[1], device=path.device)
    used = step < accepted[:, None]

    def require(what: str, expected: str, found: Tensor, holds: Tensor, *labels: str) -> None:
        checks.require("accept", what, expected, slots, found, holds, *labels)

    on_path = path.clamp(0, nodes - 1)
    before = torch.cat((torch.full_like(path[:, :1], -1), path[:, :-1]), 1)
    follows = (path == on_path) & (trees.parents.gather(1, on_path) == before)
    require("the path's node", "a child of the one before it", path, follows | ~used, "step")
    place = state.active_inverse.long().clamp(0, len(choices) - 1)
    require(
        "the token", "the choice at its node", tokens, (tokens == choices[place].gather(1, on_path)) | ~used, "step"
    )
    require("the token", f"an id below {vocab}", tokens, (tokens >= 0) & (tokens < vocab) | ~used, "step")
    drafted = trees.draft_tokens.gather(1, on_path)[:, 1:]
    require("the node's token", "the choice before it", drafted, (drafted == tokens[:, :-1]) | ~used[:, 1:], "step")
    require("num_new", "the tokens accepted", state.num_new, state.num_new == accepted)
    require("the tokens kept", "1 to those accepted", kept, (kept >= 1) & (kept <= accepted))
    span = state.prefix + state.num_new
    require("prefix + num_new", "the slot's length", span, span == state.lengths)
    require("the length", f"at most {capacity}", state.lengths, state.lengths <= capacity)
    most = state.num_generated <= state.max_generated
    require("num_generated", "at most max_generated", state.num_generated, most)


def check_commit(
    checks: Checks, state: SlotState, cache: KVCache, features: Tensor | None, nodes: int, lists_active: bool = True
) -> None:
    """Check what was moved for the accepted tokens; ``features`` [slots, steps, width]: the drafter's next input.

    ``nodes`` of the next tree. ``lists_active``: whether the commit has listed the running slots.
    """
    accepted = state.record[:-1, 0]
    slots, width = _listed(accepted > 0), state.path.shape[1]
    rows = _span(state.lengths - accepted, accepted, width)
    _require_rows(checks, "commit", slots, rows, cache, "step")
    if features is not None:
        _require_finite(checks, "commit", "the drafter's feature", slots, features, rows >= 0, "step")
    if not lists_active:
        return
    running = _listed(state.running != 0)
    place = torch.where(state.running != 0, state.running.cumsum(0) - 1, -1)
    inverse = state.active_inverse
    checks.require(
        "commit", "its place", "that among the running", torch.arange(len(place), device=place.device), inverse,
        inverse == place,
    )  # fmt: skip
    listed = state.active_slots[place.clamp(min=0)]
    checks.require("commit", "the slot at its place", "itself", running, listed, listed == running)
    count = state.active_count.expand(len(place))
    checks.require("commit", "active_count", "the running slots", running, count, count == state.running.sum())
    room = state.lengths + nodes
    checks.require("commit", "the next tree's last row", f"at most {cache.capacity}", running, room,
                   room <= cache.capacity)  # fmt: skip


def _listed(is_listed: Tensor) -> Tensor:
    """Each slot's number, -1 for others: int64 [slots]."""
    return torch.where(is_listed, torch.arange(len(is_listed), device=is_listed.device), -1)


def _span(first: Tensor, count: Tensor, width: int) -> Tensor:
    """``count`` rows from ``first`` on, then -1: int64 [slots, width]."""
    step = torch.arange(width, device=first.device)
    return torch.where(step < count[:, None], first[:, None].long() + step, -1)


def _grown(mask: Tensor, parent: Tensor) -> Tensor:
    """What each node sees if all before it are right: itself, and for all but the root what its parent sees."""
    nodes = mask.shape[1]
    itself = torch.eye(nodes, dtype=torch.bool, device=mask.device)
    inherited = mask.gather(1, parent[..., None].expand(-1, -1, nodes))
    inherited[:, 0] = False
    return inherited | itself


def _require_finite(
    checks: Checks, phase: str, what: str, slots: Tensor, found: Tensor, used: Tensor, label: str
) -> None:
    """``found`` [n, rows, ...] where ``used`` bool [n, rows]."""
    found = found.flatten(2)
    checks.require(phase, what, "finite", slots, found, torch.isfinite(found) | ~used[..., None], label, "number")


def _require_rows(checks: Checks, phase: str, slots: Tensor, rows: Tensor, cache: KVCache, label: str) -> None:
    """Keys and values of all layers at ``rows`` [n, rows], -1 for none, are finite."""
    at = slots.clamp(0, cache.num_slots - 1)[:, None]
    for name, stacks in zip(("key", "value"), zip(*cache.stacks, strict=True), strict=True):
        for stack in stacks:
            # [n, rows, layers, kv_heads, head_dim]
            found = stack[:, at, :, rows.clamp(0, cache.capacity - 1).long()]
            _require_finite(checks, phase, f"the {name}", slots, found, rows >= 0, label)
