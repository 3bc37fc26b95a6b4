"""Draft with PyTorch's own operations (cuBLAS, SDPA, `torch.topk`), eager or as one CUDA graph.

This is what a careful engineer can do without writing a kernel: everything stays on the device, shapes are fixed, the
extend pass goes past attention with one row only, query heads of one kv head share a row block so that SDPA needs no
repeated keys, and the tree is built by `tree.build_tree`. It computes what `launch_drafter` computes.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from eagle_slim.runtime.drafter.buffers import Buffers
from eagle_slim.runtime.drafter.dimensions import DrafterConfig
from eagle_slim.runtime.drafter.rope import apply_rotary
from eagle_slim.runtime.drafter.weights import HeadWeights
from eagle_slim.runtime.tree import Candidates, build_tree, join_levels
from torch import Tensor


class TorchDraft:
    """One draft over fixed prefixes; `run` is free of host waits, so a CUDA graph can hold it. EAGLE-3 only."""

    def __init__(self, cfg: DrafterConfig, head: HeadWeights, bufs: Buffers, features: Tensor) -> None:
        self.cfg, self.head, self.w = cfg, head, head.tensors
        self.features = features
        self.new = int(bufs.num_new[0])
        self.prefix = int(bufs.prefix[0])
        assert (bufs.num_new == self.new).all(), "one length for all slots"
        assert (bufs.prefix == self.prefix).all(), "one length for all slots"
        self.tokens = bufs.new_tokens[:, : self.new].long()
        self.keys, self.values = bufs.keys.clone(), bufs.values.clone()
        projections = [self.w[f"self_attn.{x}_proj.weight"] for x in "qkv"]
        self.qkv_weight = torch.cat(projections)
        self.gate_up = torch.cat([self.w["mlp.gate_proj.weight"], self.w["mlp.up_proj.weight"]])
        positions = torch.arange(cfg.max_positions, device=features.device)
        self.cos, self.sin = head.rotary.at(positions)
        self.candidates: Candidates | None = None
        """Candidates of the last draft, for `agreement.replay`."""

    def run(self) -> tuple[Tensor, ...]:
        """Draft; returns the fields of `tree.DraftTree`."""
        cfg, top_k, slots = self.cfg, self.cfg.top_k, self.cfg.num_slots
        past = self.prefix + self.new
        hidden = F.linear(self.features[:, : self.new], self.w["fc.weight"])
        rows = slice(self.prefix, past)
        seen = torch.ones(slots, 1, past, dtype=torch.bool, device=hidden.device)
        hidden = self.layer(hidden, self.tokens, rows, self.cos[rows], self.sin[rows], seen, last_only=True)
        scores, tokens = self.children(hidden)
        scores, tokens = scores[:, 0], tokens[:, 0]
        level_scores, level_tokens, frontiers = [scores], [tokens], []
        frontier = torch.arange(top_k, device=hidden.device).expand(slots, top_k)
        hidden = hidden.expand(-1, top_k, -1)
        own = torch.eye(top_k, dtype=torch.bool, device=hidden.device).expand(slots, -1, -1)
        ancestors = own
        seen = seen.expand(-1, top_k, -1)
        for level in range(1, cfg.depth + 1):
            frontiers.append(frontier)
            rows = slice(past + (level - 1) * top_k, past + level * top_k)
            at = past - 1 + level
            cos, sin = (table[at].expand(top_k, -1) for table in (self.cos, self.sin))
            hidden = self.layer(hidden, tokens, rows, cos, sin, torch.cat((seen, ancestors), -1))
            log_probs, children = self.children(hidden)
            child_scores = (scores[..., None] + log_probs).flatten(1)
            children = children.flatten(1)
            level_scores.append(child_scores)
            level_tokens.append(children)
            scores, frontier = torch.topk(child_scores, top_k)
            parent = frontier // top_k
            tokens = children.gather(1, frontier)
            hidden = hidden.gather(1, parent[..., None].expand_as(hidden))
            ancestors = torch.cat((ancestors.gather(1, parent[..., None].expand_as(ancestors)), own), 2)
        self.candidates = join_levels(level_tokens, level_scores, frontiers, top_k)
        tree = build_tree(self.tokens[:, -1], self.candidates, cfg.tree)
        return tree.draft_tokens, tree.retrieve_indices, tree.tree_mask, tree.tree_position_ids

    def layer(
        self, hidden: Tensor, tokens: Tensor, rows: slice, cos: Tensor, sin: Tensor, mask: Tensor,
        last_only: bool = False,
    ) -> Tensor:  # fmt: skip
        """Run the decoder layer on [slots, nodes, hidden]; ``mask`` bool [slots, queries, keys]."""
        cfg, w = self.cfg, self.w
        embedded = F.rms_norm(self.head.embedding[tokens], (cfg.hidden,), w["input_layernorm.weight"], cfg.norm_eps)
        normed = F.rms_norm(hidden, (cfg.hidden,), w["hidden_norm.weight"], cfg.norm_eps)
        inputs = torch.cat((embedded, normed), -1)
        fused = F.linear(inputs, self.qkv_weight).unflatten(-1, (-1, cfg.head_dim)).transpose(1, 2)
        query, key, value = fused.split([cfg.num_heads, cfg.num_kv_heads, cfg.num_kv_heads], 1)
        self.keys[:, :, rows] = apply_rotary(key, cos[None], sin[None])
        self.values[:, :, rows] = value
        query = apply_rotary(query, cos[None], sin[None])
        if last_only:
            query, hidden = query[:, :, -1:], hidden[:, -1:]
        group = cfg.num_heads // cfg.num_kv_heads
        nodes = query.shape[2]
        grouped = query.unflatten(1, (cfg.num_kv_heads, group)).flatten(2, 3)
        mask = mask[:, None].repeat(1, 1, group, 1)
        keys, values = (cache[:, :, : rows.stop] for cache in (self.keys, self.values))
        attended = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask)
        attended = attended.unflatten(2, (group, nodes)).permute(0, 3, 1, 2, 4).flatten(2)
        hidden = hidden + F.linear(attended, w["self_attn.o_proj.weight"])
        normed = F.rms_norm(hidden, (cfg.hidden,), w["post_attention_layernorm.weight"], cfg.norm_eps)
        gate, up = F.linear(normed, self.gate_up).chunk(2, -1)
        return hidden + F.linear(F.silu(gate) * up, w["mlp.down_proj.weight"])

    def children(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities and target ids of each node's best children: [slots, nodes, top_k]."""
        normed = F.rms_norm(hidden, (self.cfg.hidden,), self.w["norm.weight"], self.cfg.norm_eps)
        logits = F.linear(normed, self.head.lm_head)
        best, rows = torch.topk(logits, self.cfg.top_k)
        lse = torch.logsumexp(logits.float(), -1, keepdim=True)
        return best.float() - lse, self.head.draft_to_target[rows]
