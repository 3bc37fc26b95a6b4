"""The additive attention mask of a draft tree behind a prefix, for a forward that adds one to its scores.

    bias[node, key] = 0 where the node attends to the key, else the smallest number of the type

Keys are the ``length`` rows of the prefix, which every node sees, then the tree's own nodes. Every element is written
once; nothing else is made on the way. With a prefix of 2 and a root with two children (0: visible, -: the smallest)::

    root   0 0 | 0 - -
    A      0 0 | 0 0 -
    B      0 0 | 0 - 0
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...errors import UsageError

_BLOCK = 1024


def tree_bias_ref(tree_mask: Tensor, key_mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Definition of `tree_bias`."""
    nodes, length = _sizes(tree_mask, key_mask)
    prefix = torch.ones((nodes, length), dtype=torch.bool, device=tree_mask.device)
    seen = torch.cat((prefix, tree_mask != 0), 1) & (key_mask != 0)
    bias = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
    return bias.masked_fill_(~seen, torch.finfo(dtype).min)


@triton.jit
def _tree_bias_kernel(
    mask_ptr, stride_node, key_mask_ptr, out_ptr, length, lowest, NODES: tl.constexpr, BLOCK: tl.constexpr
):
    node = tl.program_id(0)
    keys = length + NODES
    key = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = key < keys
    own = key - length
    in_tree = tl.load(mask_ptr + node * stride_node + own, mask=inside & (own >= 0), other=1) != 0
    seen = in_tree & (tl.load(key_mask_ptr + key, mask=inside, other=1) != 0)
    tl.store(out_ptr + node.to(tl.int64) * keys + key, tl.where(seen, 0.0, lowest), mask=inside)


def tree_bias(tree_mask: Tensor, key_mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Write a tree's attention bias in one launch.

    Args:
        tree_mask: bool or float [nodes, nodes]: row attends to column where it is not 0; rows contiguous.
        key_mask: bool or integer [length + nodes]: 0 hides a key from all nodes, as padding is hidden.
        dtype: of the result: float32, bfloat16 or float16.

    Returns:
        ``dtype`` [nodes, length + nodes], on the masks' device.

    Raises:
        UsageError: masks of other shapes, or on different devices.
    """
    nodes, length = _sizes(tree_mask, key_mask)
    out = torch.empty((nodes, length + nodes), dtype=dtype, device=tree_mask.device)
    _tree_bias_kernel[(nodes, triton.cdiv(length + nodes, _BLOCK))](
        _plain(tree_mask), tree_mask.stride(0), _plain(key_mask), out, length, torch.finfo(dtype).min,
        NODES=nodes, BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip
    return out


def _plain(mask: Tensor) -> Tensor:
    return mask.view(torch.uint8) if mask.dtype == torch.bool else mask


def _sizes(tree_mask: Tensor, key_mask: Tensor) -> tuple[int, int]:
    nodes = tree_mask.shape[-1]
    fits = tree_mask.shape == (nodes, nodes) and key_mask.dim() == 1 and len(key_mask) >= nodes
    if not fits or tree_mask.device != key_mask.device or tree_mask.stride(-1) != 1 or not key_mask.is_contiguous():
        raise UsageError(
            "A tree's mask is [nodes, nodes] and the keys' mask [length + nodes], both with contiguous rows on one "
            f"device; got {tuple(tree_mask.shape)} on {tree_mask.device} and {tuple(key_mask.shape)} on "
            f"{key_mask.device}.",
            tensor="tree_mask", found=(tuple(tree_mask.shape), tuple(key_mask.shape)),
        )  # fmt: skip
    return nodes, len(key_mask) - nodes
