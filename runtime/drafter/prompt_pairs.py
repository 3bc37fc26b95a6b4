"""Keys and values of a prompt's pairs. A head has one layer, so a pair's key depends on the pair alone."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops import Ops
from .buffers import Buffers
from .kernels.pair_rows import add_norm, rotate_append
from .weights import HeadWeights


def write_pairs(
    ops: Ops,
    head: HeadWeights,
    features: Tensor,
    next_tokens: Tensor,
    positions: Tensor,
    rows: Tensor,
    slots: Tensor,
    tables: tuple[Tensor, Tensor],
    bufs: Buffers,
) -> None:
    """Compute the keys and values of pairs of one slot, without attention or MLP, into the drafter's cache.

    ``features`` [pairs, feature_width] of the head's type; ``next_tokens`` [pairs] the token after each;
    ``positions``, ``rows`` int32 [pairs]: RoPE position, and row of the cache, -1 for none; ``slots`` int32 [1];
    ``tables`` cos and sin, each fp32 [positions, head_dim / 2]. Waits for nothing with kernels.
    """
    w, hidden = head.tensors, head.hidden
    embedded = torch.index_select(head.embedding, 0, next_tokens)
    if head.kind == "eagle3":
        inputs = torch.empty((len(embedded), 2 * hidden), dtype=head.dtype, device=head.device)
        ops(add_norm)(embedded, None, w["input_layernorm.weight"], head.norm_eps, inputs[:, :hidden])
        fused = _fuse(ops, head, features)
        ops(add_norm)(fused, None, w["hidden_norm.weight"], head.norm_eps, inputs[:, hidden:])
    else:
        inputs = F.linear(torch.cat((embedded, features), -1), w["fc.weight"], w.get("fc.bias"))
    weight, bias = head.kv_projection
    ops(rotate_append)(
        inputs @ weight, bias, head.head_norms, head.norm_eps, *tables, positions, slots, rows, bufs.keys, bufs.values
    )


def _fuse(ops: Ops, head: HeadWeights, features: Tensor) -> Tensor:
    """As `reference.fuse_features`."""
    if features.shape[1] == head.hidden:
        return features
    if norms := head.tap_norms:
        normed = torch.empty_like(features)
        width = features.shape[1] // len(norms)
        for tap, out, name in zip(features.split(width, 1), normed.split(width, 1), norms, strict=True):
            ops(add_norm)(tap.contiguous(), None, head.tensors[name], head.norm_eps, out)
        features = normed
    return F.linear(features, head.tensors["fc.weight"], head.tensors.get("fc.bias"))
