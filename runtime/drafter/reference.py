"""Drafting a tree with an EAGLE head: the interface of a drafter, and the plain PyTorch reference.

Positions. A sequence x_0 .. x_n has features f_0 .. f_{n-1} from the target; the drafter's input number t is the pair
(f_t, embedding of x_{t+1}) at rotary position t, and its output predicts x_{t+2}. The newest token x_n is the root of
the next tree: it is in the drafter's cache as part of pair n-1, and not yet in the target's. Level l of the tree stands
at position n - 1 + l.

EAGLE-3 (arXiv:2503.01840), one pass over a pair (h, e): at pass 0 ``h = fc(taps)``, later the parent's output;
``a = cat(norm(e), norm(h))``; ``y = h + attention(a)``; ``y = y + mlp(norm(y))``; logits are ``lm_head(norm(y))`` and
y is the children's h. Where the head says so, taps pass an RMSNorm before ``fc`` (all of them together, or each its
own), the residual of the attention is ``norm(h)``, and the children's h is ``norm(y)``.

EAGLE-1/2 (arXiv:2401.15077, 2406.16858): ``a = fc(cat(e, h))`` at every pass, attention without a norm before it,
residual from ``a``, and logits are the target's ``lm_head(y)`` with no norm.

What was computed for accepted tokens stays in the cache; each pass computes its own nodes only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.activations import ACT2FN

from ..config import TreeConfig
from ..errors import UsageError
from ..slots import ActiveSlots
from ..target.attention import masked_attention, tree_attention_mask
from ..target.cache import SlotRows
from ..tree import DraftTree, build_tree, join_levels, rank_children, select_frontier
from .follow import JoinedVocab
from .rope import apply_rotary
from .weights import HeadWeights


@dataclass(frozen=True)
class NewPairs:
    """What the last step added to each sequence; all indexed by slot, rows of inactive slots are ignored.

    ``features`` [slots, depth + 2, feature_width] of the newly committed tokens, ``next_tokens`` int64
    [slots, depth + 2] the token after each (the last one is the root of the next tree), ``num_new`` int64 [slots] how
    many of them count (at least 1). ``num_new_host`` is the same for the active slots, in their order, on the host.
    """

    features: Tensor
    next_tokens: Tensor
    num_new: Tensor
    num_new_host: tuple[int, ...]


class Drafter(Protocol):
    """What generation needs of a drafter; `ReferenceDrafter` is the definition, kernels give the same results."""

    @property
    def tree(self) -> TreeConfig:
        """Shape of the trees."""

    @property
    def weights(self) -> HeadWeights:
        """The head it drafts with."""

    def allocate(self, num_slots: int, capacity: int) -> None:
        """Prepare ``num_slots`` empty slots for sequences of up to ``capacity`` tokens each."""

    def prefill(self, slot: int, features: Tensor, next_tokens: Tensor) -> None:
        """Add a prompt's pairs to a slot that was reset: [seq, feature_width] and int64 [seq]; seq may be 0."""

    def draft(self, active: ActiveSlots, pairs: NewPairs) -> DraftTree:
        """Add the new pairs of the active slots and draft their trees; fields are indexed by slot."""

    def join(self, slot: int, token_ids: Sequence[int]) -> None:
        """Let token ids of a slot's text join its draft vocabulary; called where ``weights.follow`` is set."""

    def reset_slot(self, slot: int, num_pairs: int = 0) -> None:
        """Forget a slot's sequence, but for its first ``num_pairs`` pairs (only asked for by ``reuse_prefix``)."""


class ReferenceDrafter:
    """The plain PyTorch drafter, on CPU or GPU, in any float type.

    Raises `UsageError` when the draft vocabulary has fewer rows than ``top_k``.
    """

    def __init__(self, weights: HeadWeights, tree: TreeConfig) -> None:
        check_tree_fits(weights.draft_vocab, tree)
        self.weights = weights
        self.tree = tree
        self.lengths: list[int] = []
        self.tails: list[tuple[int, ...]] = []
        """Ranks that joined each slot's draft vocabulary (`follow`)."""
        self.num_computed = 0
        """Node positions computed so far: counts work, so that a test can hold that nothing is computed twice."""
        self._cache: SlotRows | None = None
        self._activation = ACT2FN[weights.activation]
        self._rotary = weights.rotary

    def allocate(self, num_slots: int, capacity: int) -> None:
        """See `Drafter.allocate`; scratch rows for one tree come on top of ``capacity``."""
        weights = self.weights
        rows = capacity + self.tree.path_width + self.tree.depth * self.tree.top_k
        like = torch.empty((1, weights.num_kv_heads, 1, weights.head_dim), dtype=weights.dtype, device=weights.device)
        self._cache = SlotRows(num_slots, rows, like, like)
        self._rotary = weights.rotary.for_length(capacity)
        self.lengths = [0] * num_slots
        self.tails = [()] * num_slots

    def reset_slot(self, slot: int, num_pairs: int = 0) -> None:
        """See `Drafter.reset_slot`."""
        self.lengths[slot] = num_pairs
        self.tails[slot] = ()

    def join(self, slot: int, token_ids: Sequence[int]) -> None:
        """See `Drafter.join`."""
        assert self.weights.follow is not None, "there is nothing to follow with"
        self.tails[slot] = self.weights.follow.join(self.tails[slot], token_ids)

    @torch.inference_mode()
    def prefill(self, slot: int, features: Tensor, next_tokens: Tensor, chunk: int = 1024) -> None:
        """See `Drafter.prefill`."""
        active = ActiveSlots.of([slot], len(self.lengths), self.weights.device)
        for part, tokens in zip(torch.split(features, chunk), torch.split(next_tokens, chunk), strict=True):
            if len(tokens):
                self._extend(active, self._fuse(part)[None], tokens[None])
                self.lengths[slot] += len(tokens)

    @torch.inference_mode()
    def draft(self, active: ActiveSlots, pairs: NewPairs) -> DraftTree:
        """See `Drafter.draft`."""
        top_k = self.tree.top_k
        next_tokens, num_new = active.gather(pairs.next_tokens), active.gather(pairs.num_new)
        last = (num_new - 1)[:, None]  # [active, 1]
        roots = next_tokens.gather(1, last)[:, 0]
        output = self._extend(active, self._fuse(active.gather(pairs.features)), next_tokens.clamp(min=0))
        output = output.gather(1, last[..., None].expand(-1, -1, output.shape[-1]))  # [active, 1, hidden]
        for slot, count in zip(active.indices, pairs.num_new_host, strict=True):
            self.lengths[slot] += count

        joined = self._joined(active)
        log_probs, ranked = self._rank(output, joined)
        scores, tokens = log_probs[:, 0], ranked[:, 0]  # [active, top_k]
        level_scores, level_tokens, level_frontiers = [scores], [tokens], []

        frontier = torch.arange(top_k, device=tokens.device).expand(len(active.indices), top_k)
        hidden = self._carry(output).expand(-1, top_k, -1)
        own = torch.eye(top_k, dtype=torch.bool, device=tokens.device).expand(len(active.indices), top_k, top_k)
        ancestors = own  # [active, top_k, drafted so far]: what each frontier node attends to, itself included
        for level in range(1, self.tree.depth + 1):
            level_frontiers.append(frontier)
            output = self._level(active, hidden, tokens, ancestors, level)
            log_probs, ranked = self._rank(output, joined)
            children = ranked.flatten(1)  # [active, top_k * top_k]
            child_scores = (scores[..., None] + log_probs).flatten(1)
            level_scores.append(child_scores)
            level_tokens.append(children)

            scores, frontier = select_frontier(child_scores, top_k)
            parent = frontier // top_k  # [active, top_k]: which frontier node each comes from
            tokens = children.gather(1, frontier)
            hidden = self._carry(output).gather(1, parent[..., None].expand_as(output))
            ancestors = ancestors.gather(1, parent[..., None].expand_as(ancestors))
            ancestors = torch.cat((ancestors, own), 2)

        candidates = join_levels(level_tokens, level_scores, level_frontiers, top_k)
        return scatter_tree(build_tree(roots, candidates, self.tree), active)

    def _extend(self, active: ActiveSlots, hidden: Tensor, next_tokens: Tensor) -> Tensor:
        """Run new pairs after the committed ones: hidden [active, new, hidden] to outputs of the same shape."""
        new = next_tokens.shape[1]
        lengths = self._length_tensor(active)
        positions = torch.arange(new, device=lengths.device).expand(len(lengths), new)
        causal = torch.ones((len(lengths), new, new), dtype=torch.bool, device=lengths.device).tril()
        return self._pass(active, hidden, next_tokens, lengths, causal, positions)

    def _level(self, active: ActiveSlots, hidden: Tensor, tokens: Tensor, ancestors: Tensor, level: int) -> Tensor:
        """Run the frontier of one level: [active, top_k, hidden] to outputs of the same shape."""
        lengths, top_k = self._length_tensor(active), self.tree.top_k
        positions = torch.arange(level * top_k, device=lengths.device).expand(len(lengths), -1) // top_k
        return self._pass(active, hidden, tokens, lengths, ancestors, positions)

    def _pass(
        self,
        active: ActiveSlots,
        hidden: Tensor,
        tokens: Tensor,
        lengths: Tensor,
        tree_mask: Tensor,
        row_positions: Tensor,
    ) -> Tensor:
        """Run the decoder layer.

        ``hidden`` [active, nodes, hidden]; ``tokens`` int64 [active, nodes]; ``lengths`` int64 [active] committed rows
        of the cache. After those come the rows of this draft, the nodes' own last: ``tree_mask`` bool [active, nodes,
        rows], ``row_positions`` int64 [active, rows], counted from the first position that is not committed.
        """
        weights, w = self.weights, self.weights.tensors
        assert self._cache is not None, "allocate() comes first"
        self.num_computed += tokens.numel()
        embedded = weights.embedding[tokens]
        if weights.kind == "eagle3":
            normed = self._norm(hidden, w["hidden_norm.weight"])
            residual = normed if weights.norm_before_residual else hidden
            inputs = torch.cat((self._norm(embedded, w["input_layernorm.weight"]), normed), -1)
        else:
            residual = inputs = F.linear(torch.cat((embedded, hidden), -1), w["fc.weight"], w.get("fc.bias"))

        nodes, num_rows = tokens.shape[1], row_positions.shape[1]
        rows = lengths[:, None] + torch.arange(num_rows - nodes, num_rows, device=lengths.device)
        positions = row_positions[:, -nodes:]
        cos, sin = self._rotary.at(lengths[:, None] + positions)
        query = apply_rotary(self._heads(inputs, "q", weights.num_heads), cos, sin)
        key = apply_rotary(self._heads(inputs, "k", weights.num_kv_heads), cos, sin)
        self._cache.write_(active, rows, key, self._heads(inputs, "v", weights.num_kv_heads))
        kv_length = max(self.lengths[slot] for slot in active.indices) + num_rows
        mask = tree_attention_mask(lengths, tree_mask, positions, kv_length, weights.sliding_window, row_positions)
        attended = masked_attention(query, *self._cache.read(active, kv_length), mask, weights.head_dim**-0.5)
        attended = attended.transpose(1, 2).flatten(2)
        hidden = residual + F.linear(attended, w["self_attn.o_proj.weight"], w.get("self_attn.o_proj.bias"))

        normed = self._norm(hidden, w["post_attention_layernorm.weight"])
        gate = self._activation(self._mlp(normed, "gate"))
        return hidden + self._mlp(gate * self._mlp(normed, "up"), "down")

    def _mlp(self, inputs: Tensor, projection: str) -> Tensor:
        w, name = self.weights.tensors, f"mlp.{projection}_proj"
        return F.linear(inputs, w[f"{name}.weight"], w.get(f"{name}.bias"))

    def _fuse(self, features: Tensor) -> Tensor:
        """Turn the target's features [..., feature_width] into the hidden state of pass 0 [..., hidden]."""
        w = self.weights.tensors
        features = features.to(self.weights.device, self.weights.dtype)
        # A single tap as wide as the head needs no fc: the rule of SafeAILab's and SGLang's EAGLE-3.
        if self.weights.kind == "eagle" or features.shape[-1] == self.weights.hidden:
            return features
        if norms := self.weights.tap_norms:
            taps = features.chunk(len(norms), -1)
            features = torch.cat([self._norm(tap, w[name]) for tap, name in zip(taps, norms, strict=True)], -1)
        return F.linear(features, w["fc.weight"], w.get("fc.bias"))

    def _carry(self, output: Tensor) -> Tensor:
        """Turn a node's output into its children's hidden state."""
        if self.weights.kind == "eagle3" and self.weights.norm_output:
            return self._norm(output, self.weights.tensors["norm.weight"])
        return output

    def _final(self, output: Tensor) -> Tensor:
        """Turn a node's output into what the LM head takes."""
        return self._norm(output, self.weights.tensors["norm.weight"]) if self.weights.kind == "eagle3" else output

    def _logits(self, output: Tensor) -> Tensor:
        """LM head over the draft vocabulary: float32 [..., draft_vocab]."""
        return F.linear(self._final(output), self.weights.lm_head).float()

    def _joined(self, active: ActiveSlots) -> JoinedVocab | None:
        """Base and tails of the active sequences; None where nothing has joined."""
        tails = [self.tails[slot] for slot in active.indices]
        if self.weights.follow is None or not any(tails):
            return None
        return JoinedVocab.of(self.weights.draft_to_target, tails, self.weights.follow)

    def _rank(self, output: Tensor, joined: JoinedVocab | None) -> tuple[Tensor, Tensor]:
        """Rank each node's children: log-probabilities fp32 and target ids int64, both [active, nodes, top_k]."""
        logits = self._logits(output)
        if joined is None:
            log_probs, rows = rank_children(logits, self.tree.top_k)
            return log_probs, self.weights.draft_to_target[rows]
        log_probs, columns = rank_children(joined.logits(logits, self._final(output)), self.tree.top_k)
        return log_probs, joined.ids.gather(1, columns.flatten(1)).view_as(columns)

    def _heads(self, inputs: Tensor, projection: str, heads: int) -> Tensor:
        """Project to [active, heads, nodes, head_dim]."""
        w, name = self.weights.tensors, f"self_attn.{projection}_proj"
        projected = F.linear(inputs, w[f"{name}.weight"], w.get(f"{name}.bias"))
        return projected.view(*inputs.shape[:2], heads, -1).transpose(1, 2)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMSNorm as Llama rounds it: statistics in fp32, the weight applied in the model's type."""
        x32 = x.float()
        return weight * (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + self.weights.norm_eps)).to(x.dtype)

    def _length_tensor(self, active: ActiveSlots) -> Tensor:
        lengths = [self.lengths[slot] for slot in active.indices]
        return torch.tensor(lengths, dtype=torch.int64, device=self.weights.device)


def check_tree_fits(draft_vocab: int, tree: TreeConfig) -> None:
    """Raise `UsageError` unless every node can have ``top_k`` children among ``draft_vocab`` rows."""
    if draft_vocab < tree.top_k:
        raise UsageError(
            f"top_k = {tree.top_k} children of a node cannot be drafted from {draft_vocab} ids. Lower top_k, "
            "or draft over more ids.",
            option="top_k", expected=draft_vocab, found=tree.top_k,
        )  # fmt: skip


def scatter_tree(tree: DraftTree, active: ActiveSlots) -> DraftTree:
    """Put the trees of the active sequences back by slot, inactive slots blank."""
    return DraftTree(
        active.scatter(tree.draft_tokens, -1),
        active.scatter(tree.parents, -1),
        active.scatter(tree.tree_mask, False),
        active.scatter(tree.tree_position_ids, 0),
        active.scatter(tree.retrieve_indices, -1),
        active.scatter(tree.num_leaves, 0),
    )
