"""Drafting in plain PyTorch: the definition of the persistent kernel, over the same buffers.

Positions. A sequence x_0 .. x_n has features f_0 .. f_{n-1} from the target; the drafter's input number t is the pair
(f_t, embedding of x_{t+1}) at rotary position t, and its output predicts x_{t+2}. The newest token x_n is the root of
the next tree: it is in the drafter's cache as part of pair n-1, and not yet in the target's. Level l of the tree stands
at position n - 1 + l.

EAGLE-3 (arXiv:2503.01840), one pass over a pair (h, e): at pass 0 ``h = fc(taps)``, later the parent's output;
``a = cat(norm(e), norm(h))``; ``y = h + attention(a)``; ``y = y + mlp(norm(y))``; logits are ``lm_head(norm(y))`` and
y is the children's h. Where the head says so, taps pass an RMSNorm before ``fc`` (all of them together, or each its
own), the residual of the attention is ``norm(h)``, and the children's h is ``norm(y)``. Where it has norms of q and k,
each of their heads passes an RMSNorm before it is rotated (Qwen3, arXiv:2505.09388; transformers' `Qwen3Attention`).

EAGLE-1/2 (arXiv:2401.15077, 2406.16858): ``a = fc(cat(e, h))`` at every pass, attention without a norm before it,
residual from ``a``, and logits are the target's ``lm_head(y)`` with no norm.

What was computed for accepted tokens stays in the cache; each pass computes its own nodes only.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from transformers.activations import ACT2FN

from ..settings import TreeConfig
from ..target.attention import tree_attention_mask
from ..target.cache import read_rows
from ..target.few_rows import few_rows
from ..target.kernels.attention import AttentionParams, masked_attention
from ..tree import DraftTree, build_tree, join_levels, rank_children, ranked_topk
from .buffers import BLANK, Buffers
from .dimensions import DrafterConfig
from .kernels.pair_rows import rms_norm
from .rope import apply_rotary
from .weights import HeadWeights


@torch.inference_mode()
def draft_ref(cfg: DrafterConfig, features: Tensor, head: HeadWeights, bufs: Buffers) -> None:
    """Draft the trees of the active slots into ``bufs``; waits for the device.

    ``features`` [slots, new, feature_width]: those of the new tokens, ``bufs.num_new`` of them in use. ``head`` has
    ``cfg.draft_vocab`` LM-head rows.
    """
    for name, blank in BLANK.items():
        getattr(bufs, name).fill_(blank)
    count = int(bufs.active_count)
    if not count:
        return
    slots = bufs.active_slots[:count].long()
    fixed = replace(head, rotary=head.rotary.for_length(cfg.num_tokens))
    draft = ReferenceDraft(fixed, cfg.tree, slots, bufs.prefix[slots].long(), (bufs.keys, bufs.values))
    num_new = bufs.num_new[slots].long()
    new = int(num_new.max())
    tree = draft.run(features[slots, :new], bufs.new_tokens[slots, :new].long(), num_new)
    for name in BLANK:
        getattr(bufs, name)[slots] = getattr(tree, name)


class ReferenceDraft:
    """One draft of some sequences: the head's layer over their keys and values.

    ``slots`` int64 [active]: their places in ``cache``, keys and values [slots, kv_heads, positions, head_dim];
    ``lengths`` int64 [active]: cached pairs.
    """

    def __init__(
        self, head: HeadWeights, tree: TreeConfig, slots: Tensor, lengths: Tensor, cache: tuple[Tensor, Tensor]
    ) -> None:
        self.head, self.tree, self.slots, self.lengths = head, tree, slots, lengths
        self.keys, self.values = cache
        self.activation = ACT2FN[head.activation]
        self.are_first = slots.tolist() == list(range(len(slots)))
        """Whether these are the first slots, so that their caches need not be gathered."""

    def run(self, features: Tensor, tokens: Tensor, num_new: Tensor) -> DraftTree:
        """Draft after new pairs; fields of the result are [active, ...].

        ``features`` [active, new, feature_width] and ``tokens`` int64 [active, new], ``num_new`` int64 [active] of them
        in use.
        """
        top_k, active = self.tree.top_k, len(self.slots)
        tokens = tokens.clamp(min=0)
        roots = tokens.gather(1, (num_new - 1)[:, None])[:, 0]
        output = self.extend(features, tokens, num_new)
        log_probs, ranked = self._rank(output)
        scores, tokens = log_probs[:, 0], ranked[:, 0]  # [active, top_k]
        level_scores, level_tokens, level_frontiers = [scores], [tokens], []

        frontier = torch.arange(top_k, device=tokens.device).expand(active, top_k)
        hidden = self.carry(output).expand(-1, top_k, -1)
        itself = torch.eye(top_k, dtype=torch.bool, device=tokens.device).expand(active, top_k, top_k)
        ancestors = itself  # [active, top_k, drafted so far]: what each frontier node attends to, itself included
        for _ in range(self.tree.depth):
            level_frontiers.append(frontier)
            output = self.level(hidden, tokens, ancestors)
            log_probs, ranked = self._rank(output)
            children = ranked.flatten(1)  # [active, top_k * top_k]
            child_scores = (scores[..., None] + log_probs).flatten(1)
            level_scores.append(child_scores)
            level_tokens.append(children)

            scores, frontier = ranked_topk(child_scores, top_k)
            parent = frontier // top_k  # [active, top_k]: which frontier node each comes from
            tokens = children.gather(1, frontier)
            hidden = self.carry(output).gather(1, parent[..., None].expand_as(output))
            ancestors = ancestors.gather(1, parent[..., None].expand_as(ancestors))
            ancestors = torch.cat((ancestors, itself), 2)

        candidates = join_levels(level_tokens, level_scores, level_frontiers, top_k)
        return build_tree(roots, candidates, self.tree)

    def extend(self, features: Tensor, tokens: Tensor, num_new: Tensor) -> Tensor:
        """Add new pairs after the cached ones; returns the last one's output [active, 1, hidden]. See `run`."""
        active, new = tokens.shape
        positions = torch.arange(new, device=tokens.device).expand(active, new)
        causal = torch.ones((active, new, new), dtype=torch.bool, device=tokens.device).tril()
        hidden = fuse_features(self.head, features.to(self.head.device, self.head.dtype))
        # What comes out of a sequence's unused rows is undefined, and they are not cached.
        output = self.layer(hidden, tokens, causal, positions, positions < num_new[:, None])
        self.lengths = self.lengths + num_new
        return output.gather(1, (num_new - 1)[:, None, None].expand(-1, 1, output.shape[-1]))

    def level(self, hidden: Tensor, tokens: Tensor, ancestors: Tensor) -> Tensor:
        """Run the nodes of one level: ``hidden`` [active, top_k, hidden] to outputs of the same shape.

        ``ancestors`` bool [active, top_k, drafted so far]: what each attends to, itself included.
        """
        positions = torch.arange(ancestors.shape[2], device=tokens.device).expand(len(tokens), -1) // self.tree.top_k
        return self.layer(hidden, tokens, ancestors, positions)

    def layer(
        self, hidden: Tensor, tokens: Tensor, tree_mask: Tensor, row_positions: Tensor, is_cached: Tensor | None = None
    ) -> Tensor:
        """Run the decoder layer.

        ``hidden`` [active, nodes, hidden]; ``tokens`` int64 [active, nodes]. After the ``lengths`` cached rows come the
        rows of this draft, the nodes' own last: ``tree_mask`` bool [active, nodes, rows], ``row_positions`` int64
        [active, rows], counted from the first position that is not cached. ``is_cached`` bool [active, nodes]: which
        nodes' keys and values to keep; None keeps all.
        """
        head, w = self.head, self.head.tensors
        embedded = head.embedding[tokens]
        if head.kind == "eagle3":
            normed = self._norm(hidden, w["hidden_norm.weight"])
            residual = normed if head.norm_before_residual else hidden
            inputs = torch.cat((self._norm(embedded, w["input_layernorm.weight"]), normed), -1)
        else:
            residual = inputs = head.project(torch.cat((embedded, hidden), -1), "fc")

        nodes, num_rows = tokens.shape[1], row_positions.shape[1]
        positions = row_positions[:, -nodes:]
        cos, sin = head.rotary.at(self.lengths[:, None] + positions)
        query = apply_rotary(self._heads(inputs, "q", head.num_heads), cos, sin)
        key = apply_rotary(self._heads(inputs, "k", head.num_kv_heads), cos, sin)
        rows = self.lengths[:, None] + torch.arange(num_rows - nodes, num_rows, device=tokens.device)
        self._write(rows, key, self._heads(inputs, "v", head.num_kv_heads), is_cached)
        newest = positions if is_cached is None else positions.masked_fill(~is_cached, 0)
        keys, values, lengths = self._seen(num_rows, self.lengths + newest.amax(1))
        mask = tree_attention_mask(lengths, tree_mask, positions, keys.shape[2], head.sliding_window, row_positions)
        column = torch.arange(keys.shape[2], device=tokens.device)
        mask = mask | ((column < head.window_sinks) & (column < lengths[:, None]))[:, None, None]
        attended = masked_attention(query, keys, values, mask, AttentionParams(head.head_dim**-0.5))
        hidden = residual + head.project(attended.transpose(1, 2).flatten(2), "self_attn.o_proj")

        normed = self._norm(hidden, w["post_attention_layernorm.weight"])
        gate = self.activation(head.project(normed, "mlp.gate_proj"))
        return hidden + head.project(gate * head.project(normed, "mlp.up_proj"), "mlp.down_proj")

    def _write(self, rows: Tensor, key: Tensor, value: Tensor, is_cached: Tensor | None) -> None:
        """Store ``key``, ``value`` [active, kv_heads, nodes, head_dim] at ``rows`` int64 [active, nodes]."""
        kept = torch.ones_like(rows, dtype=torch.bool) if is_cached is None else is_cached
        slots, kept_rows = (
            self.slots[:, None].expand_as(rows)[kept],
            cache_row(rows[kept], self.keys.shape[2], self.head.window_sinks),
        )
        for cache, new in ((self.keys, key), (self.values, value)):
            cache[slots, :, kept_rows] = new.transpose(1, 2)[kept]

    def _seen(self, num_rows: int, newest: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Read keys and values [active, kv_heads, length, head_dim] of the prefix and of ``num_rows`` rows after it.

        The last result are the prefixes' lengths in them: what lies before the window of queries at ``newest`` int64
        [active] is left out, but for the sinks, which are turned on to lie right before it.
        """
        window, sinks, length = self.head.sliding_window, self.head.window_sinks, int(self.lengths.max()) + num_rows
        if window is None or length <= window:
            read = partial(read_rows, slots=self.slots, length=length, are_first=self.are_first)
            return read(self.keys), read(self.values), self.lengths
        gap = (newest - window + 1 - sinks).clamp(min=0)
        column = torch.arange(sinks + window + num_rows, device=gap.device)
        position = column + torch.where(column < sinks, 0, gap[:, None])
        rows = cache_row(position, self.keys.shape[2], sinks)
        keys, values = (each[self.slots[:, None], :, rows].transpose(1, 2) for each in (self.keys, self.values))
        cos, sin = (each[:, None] / self.head.rotary.scaling for each in self.head.rotary.at(gap))
        keys[:, :, :sinks] = apply_rotary(keys[:, :, :sinks], cos, sin)
        return keys, values, self.lengths - gap

    def carry(self, output: Tensor) -> Tensor:
        """Turn a node's output into its children's hidden state."""
        return self.final(output) if self.head.norm_output else output

    def final(self, output: Tensor) -> Tensor:
        """Turn a node's output into the LM head's input."""
        return self._norm(output, self.head.tensors["norm.weight"]) if self.head.kind == "eagle3" else output

    def logits(self, output: Tensor) -> Tensor:
        """Compute logits over the draft vocabulary: float32 [..., draft_vocab]."""
        return few_rows(self.final(output), self.head.lm_head).float()

    def _rank(self, output: Tensor) -> tuple[Tensor, Tensor]:
        """Rank each node's children: log-probabilities fp32 and target ids int64, both [active, nodes, top_k]."""
        log_probs, rows = rank_children(self.logits(output), self.tree.top_k)
        return log_probs, self.head.draft_to_target[rows]

    def _heads(self, inputs: Tensor, projection: str, heads: int) -> Tensor:
        """Project to [active, heads, nodes, head_dim], each head of q and k through its norm where there is one."""
        projected = self.head.project(inputs, f"self_attn.{projection}_proj").view(*inputs.shape[:2], heads, -1)
        norm = self.head.tensors.get(f"self_attn.{projection}_norm.weight")
        return (projected if norm is None else self._norm(projected, norm)).transpose(1, 2)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight, self.head.norm_eps)


def cache_row(position: Tensor, num_rows: int, sinks: int) -> Tensor:
    """Return the cache's rows of positions: behind the last row it begins anew, after the sinks'."""
    return torch.where(position < num_rows, position, sinks + (position - sinks) % (num_rows - sinks))


def fuse_features(head: HeadWeights, features: Tensor) -> Tensor:
    """Turn features [..., feature_width] of the head's type into the hidden state of pass 0 [..., hidden].

    A single tap as wide as the head needs no ``fc``: the rule of SafeAILab's and SGLang's EAGLE-3.
    """
    if head.kind == "eagle" or features.shape[-1] == head.hidden:
        return features
    if norms := head.tap_norms:
        taps = zip(features.chunk(len(norms), -1), norms, strict=True)
        features = torch.cat([rms_norm(tap, head.tensors[name], head.norm_eps) for tap, name in taps], -1)
    return head.project(features, "fc")
