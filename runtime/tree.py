"""The draft tree: which drafted candidates become nodes, in which order, and who is whose ancestor.

The semantics are those of ``topK_genrate`` in EAGLE-2 and EAGLE-3 (Li et al., arXiv:2406.16858 and 2503.01840;
SafeAILab/EAGLE, ``eagle/model/cnets.py``), made exact by one rule: **every selection orders by (fp32 score descending,
candidate index ascending)**. So the chosen set is always closed under parents (a child never scores above its parent,
and its index is larger), which upstream's ``torch.topk`` does not promise.

**Candidates.** ``k = top_k``. Pass 0 (the extend pass) gives the root's k children; each of the ``depth`` levels
expands k nodes, the *frontier*, into k children each. The candidate index is upstream's flat position:

* ``j``                              the root's child of rank j;
* ``k + (l - 1) * k * k + i * k + j``  at level ``l`` = 1 .. depth: the child of rank j of the frontier's node i.

Rank j orders the children of one node by (fp32 logit descending, draft row ascending). A candidate's score is its
parent's score plus its own log-probability over the draft vocabulary, one fp32 addition, root 0; a log-probability
never exceeds 0.

**Frontier.** At level 1 node i is candidate i. At level ``l`` > 1 the frontier is the best k candidates *of level
l - 1*, best first: node i is the i-th by the rule above.

**Nodes.** The best ``total_tokens - 1`` of all candidates, then sorted by candidate index: node 0 is the root, node n
the n-th chosen candidate. A parent's node index is always below its child's. Siblings need not be neighbours, nor
ancestors contiguous.

**Retrieve rows.** One row for each leaf, leaves by ascending node index (upstream's greedy order): the nodes from the
root to that leaf, then -1. Rows from ``num_leaves`` on are -1.

Worked example: depth 2, top_k 2, total_tokens 7; letters are tokens, numbers log-probabilities::

    root --- A -0.5 --- C -1.0 --- G -0.5        candidate   A     B    C     D     E      F    G     H     I      J
         |          |          `-- H -3.0        index       0     1    2     3     4      5    6     7     8      9
         |          `-- D -1.5                   score     -0.5  -1.5 -1.5  -2.0  -1.75  -5.5 -2.0  -4.5  -2.75  -3.75
         `-- B -1.5 --- E -0.25 -- I -1.0
                    |           `- J -2.0        level-2 frontier: C (-1.5), E (-1.75)
                    `-- F -4.0

    best six: A, B, C, E, D, G (D before G: equal scores, lower index; total_tokens 6 would drop G)
    node               0   1  2  3  4  5  6
    draft_tokens    root   A  B  C  D  E  G
    parents           -1   0  0  1  1  2  3
    tree_position_ids  0   1  1  2  2  2  3
    retrieve_indices  [0 1 4 -1]  [0 2 5 -1]  [0 1 3 6]      (leaves D, E, G)

Everything here is a function from tensors to tensors of fixed shape, without waiting for a device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .settings import TreeConfig


@dataclass(frozen=True)
class DraftTree:
    """Draft trees of a batch, in fixed shapes; indices point at nodes of the same sequence.

    Inactive slots: ``draft_tokens``, ``parents``, ``retrieve_indices`` are -1, everything else 0 (False).
    """

    draft_tokens: Tensor
    """int64 [batch, nodes]: target ids, the root first."""
    parents: Tensor
    """int64 [batch, nodes]: parent's node; -1 for the root."""
    tree_mask: Tensor
    """bool [batch, 1, nodes, nodes]: row attends to column (itself and its ancestors)."""
    tree_position_ids: Tensor
    """int64 [batch, nodes]: distance from the root."""
    retrieve_indices: Tensor
    """int64 [batch, nodes, depth + 2]: root-to-leaf paths, padded with -1."""
    num_leaves: Tensor
    """int64 [batch]: rows of ``retrieve_indices`` in use."""

    def to_upstream(self, slot: int = 0, sampling: bool = False) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return one sequence's tree as SafeAILab's ``topK_genrate`` returns it. Waits for the device.

        draft_tokens int64 [1, nodes], retrieve_indices int64 [leaves, longest path], tree_mask float32 [1, 1, nodes,
        nodes], tree_position_ids int64 [nodes]. ``sampling`` sorts the paths as upstream does for a logits processor:
        lexicographically, padding last. A node's children are then tried in the order of the rows.
        """
        width = int(self.tree_position_ids[slot].max()) + 1
        paths = self.retrieve_indices[slot, : int(self.num_leaves[slot]), :width]
        if sampling:
            rows = [[math.inf if node < 0 else node for node in row] for row in paths.tolist()]
            paths = paths[sorted(range(len(rows)), key=rows.__getitem__)]
        return self.draft_tokens[slot][None], paths, self.tree_mask[slot][None].float(), self.tree_position_ids[slot]


class Trees(NamedTuple):
    """The trees of all slots as a step's kernels read them, on one device.

    ``active_slots`` int32 [slots]: the active slots first; place i is slot ``active_slots[i]``. ``active_count``
    int32 [1]: places from this on are skipped. The others are as in `DraftTree`, int64 [slots, nodes].
    """

    active_slots: Tensor
    active_count: Tensor
    draft_tokens: Tensor
    parents: Tensor
    positions: Tensor


def ranked_topk(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k best of the last axis by (fp32 value descending, index ascending): fp32 and int64 [..., k].

    ``scores``: float [..., n], no NaN; -0.0 counts as 0.0. `torch.topk` leaves the order of equal values open; here
    value and index share one integer key.
    """
    values = scores.float() + 0.0
    bits = values.view(torch.int32)
    # The integer order of IEEE bit patterns is the order of the values once negative ones are mirrored.
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    position = torch.arange(scores.shape[-1], device=scores.device)
    keys = (ordered << 32) - position
    indices = torch.topk(keys, k, dim=-1, largest=True, sorted=True).indices
    return values.gather(-1, indices), indices


def rank_children(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Rank each node's children by (logit descending, draft row ascending): ``logits`` float [..., draft_vocab].

    Returns log-probabilities over the whole draft vocabulary, fp32 [..., top_k], and draft rows, int64 [..., top_k].
    """
    values, rows = ranked_topk(logits, top_k)
    log_sum_exp = torch.logsumexp(logits.float(), dim=-1, keepdim=True)
    log_probs = (values - log_sum_exp).clamp(max=0.0)
    # NaN would rank first: a tree would have nodes without their parents, and a walk to the root would not end.
    return log_probs.masked_fill(log_probs.isnan(), float("-inf")), rows


def level_offset(level: int, top_k: int) -> int:
    """Return the candidate index of a level's first candidate (level 0: the root's children)."""
    return 0 if level == 0 else top_k + (level - 1) * top_k**2


@dataclass(frozen=True)
class Candidates:
    """All drafted candidates of a batch, by candidate index: every field [batch, top_k + depth * top_k ** 2].

    ``tokens`` int64, target ids; ``scores`` float32, cumulative log-probabilities; ``parents`` int64, candidate
    indices, -1 for the root's children.
    """

    tokens: Tensor
    scores: Tensor
    parents: Tensor


def join_levels(
    level_tokens: Sequence[Tensor], level_scores: Sequence[Tensor], level_frontiers: Sequence[Tensor], top_k: int
) -> Candidates:
    """Join the candidates of all levels under their numbers.

    ``level_tokens[l]``, ``level_scores[l]``: [batch, top_k] for l = 0, else [batch, top_k * top_k] (node, then rank).
    ``level_frontiers[l]``: int64 [batch, top_k], which candidates *of level l* level l + 1 expanded (index within level
    l), for l < depth.
    """
    batch = level_tokens[0].shape[0]
    parents = [torch.full((batch, top_k), -1, dtype=torch.int64, device=level_tokens[0].device)]
    for level, frontier in enumerate(level_frontiers):
        expanded = frontier + level_offset(level, top_k)  # [batch, top_k]
        parents.append(expanded.repeat_interleave(top_k, dim=1))
    return Candidates(torch.cat(list(level_tokens), 1), torch.cat(list(level_scores), 1), torch.cat(parents, 1))


def build_tree(root_tokens: Tensor, candidates: Candidates, config: TreeConfig) -> DraftTree:
    """Choose the nodes and lay out the tree after ``root_tokens``, int64 [batch]; all on one device."""
    chosen = ranked_topk(candidates.scores, config.total_tokens - 1)[1].sort(dim=-1).values
    parent_candidates = candidates.parents.gather(1, chosen)
    # Closed under parents, so the search always meets the parent itself.
    parents = torch.searchsorted(chosen, parent_candidates.clamp(min=0).contiguous()) + 1
    parents = torch.where(parent_candidates < 0, 0, parents)
    parents = torch.cat([torch.full_like(parents[:, :1], -1), parents], 1)
    tokens = torch.cat([root_tokens[:, None], candidates.tokens.gather(1, chosen)], 1)
    return layout_tree(tokens, parents, config.path_width)


def layout_tree(tokens: Tensor, parents: Tensor, path_width: int) -> DraftTree:
    """Derive mask, positions and paths from the parents of each node.

    ``tokens``, ``parents``: int64 [batch, nodes], node 0 the root with parent -1, each parent below its child.
    ``path_width``: columns of ``retrieve_indices``, at least the longest path.
    """
    batch, nodes = tokens.shape
    device = tokens.device
    node_ids = torch.arange(nodes, device=device).expand(batch, nodes)

    ancestors = [node_ids]  # ancestors[a][b, n]: n's a-th ancestor, -1 above the root
    for _ in range(path_width - 1):
        last = ancestors[-1]
        ancestors.append(torch.where(last < 0, -1, parents.gather(1, last.clamp(min=0))))
    chain = torch.stack(ancestors, -1)  # [batch, nodes, path_width]

    tree_mask = (chain[..., None] == node_ids[:, None, None, :]).any(2)  # [batch, nodes, nodes]
    positions = (chain >= 0).sum(-1) - 1  # [batch, nodes]

    # Reversing each chain by its own length puts the root first: column c holds ancestor number position - c.
    columns = torch.arange(path_width, device=device).expand(batch, nodes, path_width)
    step = positions[..., None] - columns
    paths = torch.where(step < 0, -1, chain.gather(2, step.clamp(min=0)))

    is_parent = (parents[:, None, :] == node_ids[:, :, None]).any(-1)  # [batch, nodes]
    num_leaves = (~is_parent).sum(-1)
    leaves_first = torch.sort(is_parent.to(torch.int8), dim=-1, stable=True).indices
    retrieve = paths.gather(1, leaves_first[..., None].expand_as(paths))
    retrieve = torch.where(node_ids[..., None] < num_leaves[:, None, None], retrieve, -1)
    return DraftTree(tokens, parents, tree_mask[:, None], positions, retrieve, num_leaves)
