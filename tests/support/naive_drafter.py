"""A drafter without any cache: the definition, each node's path run from scratch, word by word.

It knows no slots, no mask and no scratch rows, so an error in any of them shows as another tree.
"""

import math

import torch
from eagle_slim.runtime import HeadWeights, TreeConfig
from torch import Tensor
from transformers.masking_utils import sliding_window_overlay


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)


def rotate(x: Tensor, position: int, frequencies: list[float]) -> Tensor:
    """One head's vector [head_dim] at one position: pairs (i, i + their number) turned by position * frequency i."""
    half, out = len(frequencies), x.clone()
    for i, frequency in enumerate(frequencies):
        angle = position * frequency
        a, b = x[..., i], x[..., i + half]
        out[..., i] = a * math.cos(angle) - b * math.sin(angle)
        out[..., i + half] = b * math.cos(angle) + a * math.sin(angle)
    return out


class Naive:
    """The definition, one sequence of (hidden, token) pairs at a time: outputs of every pair, all recomputed.

    RoPE turns pair i by the position times 10,000^(-2i/d).
    """

    def __init__(self, weights: HeadWeights) -> None:
        self.w, self.t = weights, weights.tensors
        self.frequencies = [10000.0 ** (-2 * i / weights.head_dim) for i in range(weights.head_dim // 2)]

    def first_hidden(self, features: Tensor) -> Tensor:
        if self.w.kind == "eagle" or features.shape[-1] == self.w.hidden:
            return features
        if "input_norm.weight" in self.t:
            features = rms_norm(features, self.t["input_norm.weight"], self.w.norm_eps)
        if "fc_norm.0.weight" in self.t:
            pieces = features.split(len(self.t["fc_norm.0.weight"]), -1)
            gains = [self.t[f"fc_norm.{i}.weight"] for i in range(len(pieces))]
            features = torch.cat([rms_norm(*each, self.w.norm_eps) for each in zip(pieces, gains, strict=True)], -1)
        return features @ self.t["fc.weight"].T

    def outputs(self, hidden: list[Tensor], tokens: list[int]) -> list[Tensor]:
        """Causal attention over the given pairs at positions 0, 1, 2 ...; outputs before the final norm."""
        w, t, eps = self.w, self.t, self.w.norm_eps
        residuals, queries, keys, values = [], [], [], []
        for position, (h, token) in enumerate(zip(hidden, tokens, strict=True)):
            e = w.embedding[token]
            if w.kind == "eagle3":
                normed = rms_norm(h, t["hidden_norm.weight"], eps)
                x = torch.cat([rms_norm(e, t["input_layernorm.weight"], eps), normed])
                residuals.append(normed if w.norm_before_residual else h)
            else:
                x = self.project("fc", torch.cat([e, h]))
                residuals.append(x)

            def heads(name: str, count: int, x: Tensor = x) -> Tensor:
                found = self.project(f"self_attn.{name}_proj", x).view(count, w.head_dim)
                weight = t.get(f"self_attn.{name}_norm.weight")
                return found if weight is None else rms_norm(found, weight, eps)

            queries.append(rotate(heads("q", w.num_heads), position, self.frequencies))
            keys.append(heads("k", w.num_kv_heads))
            values.append(heads("v", w.num_kv_heads))
        results = []
        for position, query in enumerate(queries):
            window, mixed = sliding_window_overlay(w.sliding_window or len(queries)), []
            seen = [j for j in range(position + 1) if window(0, 0, position, j) or j < w.window_sinks]
            # The sinks move up to the window.
            moved = position + 1 - len(seen)
            places = [j + moved * (j < w.window_sinks) for j in seen]
            turned = [rotate(keys[j], place, self.frequencies) for j, place in zip(seen, places, strict=True)]
            for head in range(w.num_heads):
                shared = head // (w.num_heads // w.num_kv_heads)
                scores = torch.stack([query[head] @ key[shared] for key in turned])
                weights = (scores / math.sqrt(w.head_dim)).softmax(0)
                mixed.append(sum(weight * values[j][shared] for weight, j in zip(weights, seen, strict=True)))
            y = residuals[position] + self.project("self_attn.o_proj", torch.cat(mixed))
            z = rms_norm(y, t["post_attention_layernorm.weight"], eps)
            gate = self.activate(self.project("mlp.gate_proj", z))
            results.append(y + self.project("mlp.down_proj", gate * self.project("mlp.up_proj", z)))
        return results

    def project(self, name: str, x: Tensor) -> Tensor:
        return self.t[f"{name}.weight"] @ x + self.t.get(f"{name}.bias", torch.zeros(()))

    def activate(self, x: Tensor) -> Tensor:
        if self.w.activation == "gelu":
            return x * (1 + torch.erf(x / math.sqrt(2))) / 2
        if self.w.activation == "gelu_new":
            return x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2
        assert self.w.activation == "silu"
        return x * torch.sigmoid(x)

    def children(self, output: Tensor, k: int) -> list[tuple[float, int]]:
        normed = rms_norm(output, self.t["norm.weight"], self.w.norm_eps) if self.w.kind == "eagle3" else output
        log_probs = (self.w.lm_head @ normed).log_softmax(0).tolist()
        best = sorted(range(len(log_probs)), key=lambda row: (-log_probs[row], row))[:k]
        return [(log_probs[row], int(self.w.draft_to_target[row])) for row in best]

    def carry(self, output: Tensor) -> Tensor:
        return rms_norm(output, self.t["norm.weight"], self.w.norm_eps) if self.w.norm_output else output

    def draft(self, features: Tensor, tokens: list[int], tree: TreeConfig) -> tuple[list[int], list[int]]:
        """Draft tokens and parents for a sequence: ``features`` [n, width] and the n tokens after them."""
        base = list(self.first_hidden(features))
        k = tree.top_k
        # (score, token, parent candidate, hidden and tokens of the path after the sequence)
        root_output = self.outputs(base, tokens)[-1]
        hidden = [self.carry(root_output)]
        level = [(score, token, -1, hidden, [token]) for score, token in self.children(root_output, k)]
        candidates, frontier = list(level), list(enumerate(level))
        for _ in range(tree.depth):
            offset = len(candidates)
            level = []
            for index, (score, _token, _parent, path_hidden, path_tokens) in frontier:
                output = self.outputs(base + path_hidden, tokens + path_tokens)[-1]
                for log_prob, child in self.children(output, k):
                    path = ([*path_hidden, self.carry(output)], [*path_tokens, child])
                    level.append((score + log_prob, child, index, *path))
            candidates += level
            best = sorted(range(len(level)), key=lambda i: (-level[i][0], i))[:k]
            frontier = [(offset + i, level[i]) for i in best]
        chosen = sorted(sorted(range(len(candidates)), key=lambda i: (-candidates[i][0], i))[: tree.total_tokens - 1])
        place = {candidate: node + 1 for node, candidate in enumerate(chosen)}
        parents = [-1] + [place.get(candidates[c][2], 0) for c in chosen]
        return [tokens[-1]] + [candidates[c][1] for c in chosen], parents
