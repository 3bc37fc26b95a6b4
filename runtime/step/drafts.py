"""Drafts that a decoder's steps verify: a drafter's trees, here, or chains that were accepted elsewhere (`partial`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..drafter.drafter import BufferedDrafter, barriers_of, bound_of
from ..errors import UsageError
from ..settings import TreeConfig
from ..target.kernels.attention_kernels import REACH
from ..target.kernels.tree_rows import ForwardRows
from ..tree import Trees
from .kernels.choice_kernels import ChoiceRules
from .shapes import OF_MIXTURES, SHAPES, shapes_up_to
from .slots import Slots


class TreeBuffers:
    """Trees of one shape in all slots of a decoder, and the buffers of a step over them.

    ``drafter`` writes the trees; None: they are chains of ``nodes`` nodes, which something else writes. A chain of its
    root alone is plain decoding. Raises `UsageError` for a tree too deep for the attention.
    """

    def __init__(self, slots: Slots, drafter: BufferedDrafter | None, nodes: int) -> None:
        target, cache, state = slots.target, slots.cache, slots.state
        self.state, self.drafter = state, drafter
        self.nodes = nodes if drafter is None else drafter.tree.total_tokens
        self.longest = nodes if drafter is None else drafter.tree.path_width
        """Nodes of the longest path."""
        self.is_path = drafter is None or drafter.tree.top_k == 1
        """Whether every node's parent is the one before it."""
        self.mask = None if drafter is None else drafter.bufs.tree_mask
        """As `tree.DraftTree.tree_mask`; None for chains."""
        if drafter is None:
            node = torch.arange(nodes, device=target.device).expand(cache.num_slots, -1).contiguous()
            written = torch.zeros_like(node), node - 1, node
        else:
            written = drafter.bufs.draft_tokens, drafter.bufs.parents, drafter.bufs.tree_position_ids
        if not self.is_path and min(self.longest, self.nodes) - 1 > REACH:
            found = f"depth = {self.longest - 2} gives {self.longest - 1}"
            advice = f"Lower depth to {REACH - 1}, or draft a chain (top_k = 1, --draft-top-k 1)."
            raise UsageError(f"A tree that branches is at most {REACH} levels deep; {found}. {advice}")
        self.trees = Trees(state.active_slots, state.active_count, *written)
        self.bufs = target.new_buffers(cache.num_slots, self.nodes, cache.num_slots * self.nodes, cache.capacity)
        self.choices = torch.zeros((cache.num_slots, self.nodes), dtype=torch.int32, device=target.device)
        """[batch, nodes]: the target's next token after each node."""
        self._rows: dict[int, ForwardRows] = {}

    def rows(self, batch: int) -> ForwardRows:
        """Return the rows of a forward over the trees of ``batch`` sequences."""
        if batch not in self._rows:
            self._rows[batch] = ForwardRows.allocate(batch, self.nodes, self.state.lengths, self.is_path)
        return self._rows[batch]

    def write_roots(self) -> None:
        """Write every slot's newest token as the root of its tree."""
        newest = (self.state.num_new[:, None].long() - 1).clamp(min=0)
        self.trees.draft_tokens[:, :1] = self.state.new_tokens.gather(1, newest)


class Drafts(ABC):
    """Drafts of all slots of a decoder, and all that depends on their kind."""

    drafter: BufferedDrafter | None
    """Takes the pairs of prompts and of plain steps; None decodes plainly."""
    tree: TreeConfig | None
    """The largest shape, and that of steps where none is chosen; None decodes plainly."""
    waits: bool
    """Whether a draft waits for the host, so that no CUDA graph can hold it."""
    barriers: Sequence[Tensor]
    """Tensors that are zero before each call."""
    tallies: Mapping[str, Tensor]
    """Tensors [] of fields of `GenerationStats`, counted since a call began."""
    prompt_queries: Tensor | None = None
    """Rows for the queries of a prompt's last rows (`ForwardBuffers.queries`); None where nothing needs them."""

    @abstractmethod
    def buffers(self, tree: TreeConfig | None) -> TreeBuffers:
        """Return the trees and buffers of a shape up to ``tree``, built when it is first wanted; None: plain steps."""

    @abstractmethod
    def draft(self, trees: TreeBuffers, batch: int, rules: ChoiceRules) -> None:
        """Write the trees of the next step of up to ``batch`` sequences."""

    def commit_step(self) -> None:  # noqa: B027  # most have nothing to note
        """Take note of what the pass over a step's trees accepted."""

    def commit_chunk(self) -> None:  # noqa: B027
        """Take note of a prompt's chunk, with ``prompt_queries`` alone."""

    def enter(self, slot: Tensor) -> None:  # noqa: B027
        """Take note of a prompt that has entered a slot int32 [1], with ``prompt_queries`` alone."""


class DrafterTrees(Drafts):
    """Trees of a drafter, of its own shape and of smaller ones; without a drafter, plain steps. See `Drafts`."""

    def __init__(self, slots: Slots, drafter: BufferedDrafter | None) -> None:
        self._slots, self.drafter = slots, drafter
        self.tree = None if drafter is None else drafter.tree
        self.waits = drafter is not None and drafter.waits
        self._drafters = {} if drafter is None else {drafter.tree.top_k: drafter}
        """By top_k: each drafts all trees up to its own."""
        self._buffers: dict[TreeConfig | None, TreeBuffers] = {}
        self.barriers = [] if drafter is None else barriers_of(drafter.bufs)
        self.tallies = {}

    def buffers(self, tree: TreeConfig | None) -> TreeBuffers:
        """See `Drafts.buffers`."""
        if tree not in self._buffers:
            drafter = None if tree is None else self._drafter_of(tree)
            self._buffers[tree] = TreeBuffers(self._slots, drafter, 1)
        return self._buffers[tree]

    def _drafter_of(self, tree: TreeConfig) -> BufferedDrafter:
        assert self.drafter is not None
        if tree.top_k not in self._drafters:
            target = self._slots.target
            shapes = shapes_up_to(self.drafter.tree, OF_MIXTURES if target.is_mixture else SHAPES)
            alike = [shape for shape in shapes if shape and shape.top_k == tree.top_k]
            drafter = self.drafter.of_bound(bound_of([tree, *alike]))
            self._drafters[tree.top_k] = drafter
            self.barriers = [*self.barriers, *barriers_of(drafter.bufs)]
        drafter = self._drafters[tree.top_k]
        return drafter if drafter.tree == tree else drafter.of_tree(tree)

    def draft(self, trees: TreeBuffers, batch: int, rules: ChoiceRules) -> None:
        """See `Drafts.draft`."""
        if trees.drafter is not None:
            trees.drafter.draft()
        else:
            trees.write_roots()


def take_pairs(drafter: BufferedDrafter, slots: Slots) -> None:
    """Have the drafter take the pairs that wait in the slots' state, but for each last one."""
    assert slots.features is not None
    state = slots.state
    drafter.take_pairs(state.prefix, state.num_new, state.new_tokens, state.active_inverse, slots.features)
