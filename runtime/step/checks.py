"""``EAGLE_SLIM_CHECK=1``: rules that hold after every phase of a step, checked on the device.

For debugging wrong drafts. Each rule is a comparison of tensors that ends in one small tensor, the first fault: nothing
waits, so that a graph can hold it. After a fault no slot runs any more, so that later phases read nothing by wrong
numbers; the loop raises `CheckError` when it reads that step's record.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import CheckError
from ..target.cache import ForwardBuffers
from ..target.kernels.tree_rows import ForwardRows
from ..tree import Trees
from .kernels.slot_state import SlotState


class Checks:
    """Rules of one decoder, and the first fault found; ``entering``: its state of entering prompts."""

    def __init__(self, device: torch.device, state: SlotState, entering: SlotState) -> None:
        self.fault = torch.zeros(4, dtype=torch.float64, device=device)
        """Number of the rule from 1 on, slot, place within it, and value; all 0 without a fault."""
        self._state, self._entering = state, entering
        self._slot = torch.arange(len(state.lengths), device=device)
        self._rules: list[tuple[str, str, str, tuple[int, ...], tuple[str, ...]]] = []

    def check_draft(self, trees: Trees, tree_mask: Tensor, vocab: int) -> None:
        """Check the trees of the active slots, and the spans of the drafter's cache."""
        state, tokens, parents, depths = self._state, trees.draft_tokens, trees.parents, trees.positions
        mask, node = tree_mask[:, 0], torch.arange(tokens.shape[1], device=tokens.device)
        newest = state.new_tokens.gather(1, (state.num_new[:, None].long() - 1).clamp(min=0))
        span = state.prefix + state.num_new
        is_before = torch.where(node == 0, parents == -1, (parents >= 0) & (parents < node))
        parent = torch.where(is_before, parents, 0).clamp(min=0)
        depth = torch.where(node == 0, 0, depths.gather(1, parent) + 1)
        self._require(
            "draft",
            torch.where(state.active_inverse >= 0, self._slot, -1),
            ("prefix + num_new", "the slot's length", span, span == state.lengths),
            ("the root's token", "the newest token", tokens[:, 0], tokens[:, 0] == newest[:, 0]),
            ("the token", f"an id below {vocab}", tokens, (tokens >= 0) & (tokens < vocab), "node"),
            ("the parent", "a node before it, -1 of the root", parents, is_before, "node"),
            ("the position", "its parent's and 1", depths, depths == depth, "node"),
            ("the mask", "its parent's and itself", mask, mask == _grown(mask, parent), "node", "seen node"),
        )

    def check_verify(self, rows: ForwardRows, bufs: ForwardBuffers, trees: Trees) -> None:
        """Check the rows of a forward over trees, and that its results are numbers."""
        attention, (batch, nodes) = rows.attention, (rows.places, rows.nodes)
        slots, node = attention.slots.long(), torch.arange(nodes, device=attention.slots.device)
        at, unused = slots.clamp(min=0), (node >= attention.counts[:, None])[..., None]
        first, depths, parent = attention.lengths[at][:, None], trees.positions[at], trees.parents[at].clamp(min=0)
        positions, kv_rows, mask = rows.positions.view(batch, -1), rows.kv_rows.view(batch, -1), attention.tree_mask()
        features, logits = bufs.features.reshape(batch, nodes, -1), bufs.logits.view(batch, nodes, -1)
        # Some models leave ids out by a logit of -inf.
        are_numbers, skip = (logits == logits) & (logits < torch.inf), unused[..., 0]
        self._require(
            "verify",
            slots,
            ("the cache row", "the length and the node", kv_rows, (kv_rows == first + node) | skip, "node"),
            ("the position", "the length and the depth", positions, (positions == first + depths) | skip, "node"),
            ("the mask", "its parent's and itself", mask, (mask == _grown(mask, parent)) | unused, "node", "seen node"),
            ("the feature", "finite", features, torch.isfinite(features) | unused, "node", "number"),
            ("the logit", "a number", logits, are_numbers | unused, "node", "id"),
        )

    def check_accept(self, choices: Tensor, trees: Trees) -> None:
        """Check accepted paths against the choices int32 [batch, nodes] and the trees."""
        state = self._state
        accepted, path = state.record[:-1, 0], state.path.long()
        # A plain step adds its token behind those that the drafter has not taken.
        behind = (state.num_new - accepted)[:, None] + torch.arange(path.shape[1], device=path.device)
        tokens = state.new_tokens.gather(1, behind.clamp(0, state.new_tokens.shape[1] - 1))
        unused = torch.arange(path.shape[1], device=path.device) >= accepted[:, None]
        on_path = path.clamp(0, trees.parents.shape[1] - 1)
        before = torch.cat((torch.full_like(path[:, :1], -1), path[:, :-1]), 1)
        follows = (path == on_path) & (trees.parents.gather(1, on_path) == before)
        chosen = choices[state.active_inverse.long().clamp(0, len(choices) - 1)].gather(1, on_path)
        span = state.prefix + state.num_new
        self._require(
            "accept",
            torch.where(accepted > 0, self._slot, -1),
            ("the path's node", "a child of the one before it", path, follows | unused, "step"),
            ("the token", "the choice at its node", tokens, (tokens == chosen) | unused, "step"),
            ("prefix + num_new", "the slot's length", span, span == state.lengths),
        )

    def _require(self, phase: str, slots: Tensor, *rules: Any) -> None:
        """Keep the first fault of ``rules``, and let no slot run any more if there is one.

        A rule: the value's name, the expected value in words, ``values`` [n, ...], a mask of the right ones, names
        of all axes but the first. ``slots`` [n]: the slot of each row, -1 for rows that are not checked.
        """
        for what, expected, values, holds, *labels in rules:
            rule = (phase, what, expected, tuple(values.shape[1:]), tuple(labels))
            if rule not in self._rules:
                self._rules.append(rule)
            wrong = ~holds.reshape(len(slots), -1) & (slots >= 0)[:, None]
            first = wrong.flatten().to(torch.uint8).argmax(0, keepdim=True)
            slot, value = slots[first // wrong.shape[1]], values.reshape(-1)[first]
            number = torch.full_like(first, self._rules.index(rule) + 1)
            fault = torch.cat([each.double() for each in (number, slot, first % wrong.shape[1], value)])
            self.fault.copy_(torch.where(wrong.any() & (self.fault[0] == 0), fault, self.fault))
        is_sound = self.fault[0] == 0
        for state in (self._state, self._entering):
            state.running.mul_(is_sound)
            state.active_count.mul_(is_sound)
            for listed in (state.active_slots, state.active_inverse):
                listed.copy_(torch.where(is_sound, listed, -1))

    def raise_fault(self) -> None:
        """Wait for the device, and raise `CheckError` for the first fault."""
        number, slot, within, value = self.fault.tolist()
        if number == 0:
            return
        phase, what, expected, shape, labels = self._rules[int(number) - 1]
        indices = np.unravel_index(int(within), shape)
        at = "".join(f", {label} {index}" for label, index in zip(labels, indices, strict=True))
        problem = f"after {phase}, slot {int(slot)}{at}: {what} is {value:.12g}, expected {expected}"
        raise CheckError(f"EAGLE_SLIM_CHECK: {problem}. What follows of this step is undefined.")


def _grown(mask: Tensor, parent: Tensor) -> Tensor:
    """Return the mask that the parents give: a node sees itself and all that its parent sees."""
    inherited = mask.gather(1, parent[..., None].expand(-1, -1, mask.shape[1]))
    inherited[:, 0] = False
    return inherited | torch.eye(mask.shape[1], dtype=torch.bool, device=mask.device)
