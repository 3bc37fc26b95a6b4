"""Operations between the matrix products of a prompt's pairs: norms, and rotation into the drafter's cache.

Each operation is a kernel, a host function and a PyTorch twin (``_ref``) of the same arguments, which defines it. Rows
are pairs of one prompt, [rows, width]; sums are fp32, and what transformers rounds to the model's type between two
operations is rounded here too. Bytes moved: each operand once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

_NORM_ELEMENTS_PER_WARP = 512


def norm_rows_ref(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """Write the RMSNorm of ``x`` to ``out``.

    ``x``, ``out`` [rows, hidden] and ``weight`` [hidden] of one float type; ``out`` may be a column block of a wider
    tensor.
    """
    out.copy_(rms_norm(x, weight, eps))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Apply RMSNorm as Llama rounds it: statistics in fp32, the weight applied in the model's type."""
    x32 = x.float()
    return weight * (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


@triton.jit
def _norm_rows_kernel(x_ptr, weight_ptr, out_ptr, stride_out, eps, HIDDEN: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < HIDDEN
    x = tl.load(x_ptr + row * HIDDEN + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x) / HIDDEN + eps)
    normed = (x * scale).to(out_ptr.dtype.element_ty).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * stride_out + column, normed * weight, mask=inside)


def norm_rows(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """Run `norm_rows_ref` as one launch, a program a row."""
    rows, hidden = x.shape
    block = triton.next_power_of_2(hidden)
    warps = min(8, max(1, block // _NORM_ELEMENTS_PER_WARP))
    _norm_rows_kernel[(rows,)](x, weight, out, out.stride(0), eps, HIDDEN=hidden, BLOCK=block, num_warps=warps)


def rotate_append_ref(
    qkv: Tensor,
    bias: Tensor | None,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    tables: tuple[Tensor, Tensor],
    positions: Tensor,
    slots: Tensor,
    kv_rows: Tensor,
    keys: Tensor,
    values: Tensor,
) -> None:
    """Turn a row's q, k, v into what attention reads: q in place, k and v into the cache.

    ``qkv`` [rows, (heads + 2 * kv_heads) * head_dim], q first; ``bias`` of the same width. ``norms``: the weights
    [head_dim] of RMSNorms over each head of q and of k (Qwen3). ``tables``: cos and sin, fp32 [table, head_dim / 2],
    halves rotated against each other as in Llama; ``positions`` int32 [rows] point into them. ``slots`` int32 [places]:
    row r belongs to place ``r // (rows / places)``; ``kv_rows`` int32 [rows]: where its key goes, -1 nowhere.
    ``keys``, ``values`` [slots, kv_heads, capacity, head_dim].
    """
    rows = qkv.shape[0]
    _, kv_heads, _, head_dim = keys.shape
    heads = qkv.shape[1] // head_dim - 2 * kv_heads
    cos, sin = (table[positions.long()][:, None] for table in tables)
    if bias is not None:
        qkv += bias
    split = qkv.view(rows, heads + 2 * kv_heads, head_dim)
    q, k, v = split.split((heads, kv_heads, kv_heads), 1)
    if norms is not None:
        q, k = (rms_norm(x, weight, eps) for x, weight in zip((q, k), norms, strict=True))
    q, k = (_rotate(x, cos, sin) for x in (q, k))
    split[:, :heads] = q
    kept = kv_rows >= 0
    slot = slots.long().repeat_interleave(rows // len(slots))[kept]
    keys[slot, :, kv_rows[kept].long()] = k[kept].to(keys.dtype)
    values[slot, :, kv_rows[kept].long()] = v[kept]


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.float().chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


class CacheRows(NamedTuple):
    """A layer's keys and values, and the distances of slots and heads in them, in elements."""

    key_rows: Tensor
    value_rows: Tensor
    stride_slot: int
    stride_head: int


@triton.jit
def _rotate_append_kernel(
    qkv_ptr,
    bias_ptr,
    norm_q_ptr,
    norm_k_ptr,
    eps,
    cos_ptr,
    sin_ptr,
    position_ptr,
    slot_ptr,
    kv_row_ptr,
    cache,
    NODES: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    BIAS: tl.constexpr,
    NORM: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    HALF: tl.constexpr = HEAD_DIM // 2
    i = tl.arange(0, BLOCK)
    inside = i < HALF
    base = row * (HEADS + 2 * KV_HEADS) * HEAD_DIM + head * HEAD_DIM
    first = tl.load(qkv_ptr + base + i, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(qkv_ptr + base + HALF + i, mask=inside, other=0.0).to(tl.float32)
    kind = qkv_ptr.dtype.element_ty
    if BIAS:
        first += tl.load(bias_ptr + head * HEAD_DIM + i, mask=inside, other=0.0).to(tl.float32)
        second += tl.load(bias_ptr + head * HEAD_DIM + HALF + i, mask=inside, other=0.0).to(tl.float32)
        first, second = first.to(kind).to(tl.float32), second.to(kind).to(tl.float32)
    if head < HEADS + KV_HEADS:
        if NORM:
            scale = tl.rsqrt((tl.sum(first * first) + tl.sum(second * second)) / HEAD_DIM + eps)
            norm_ptr = norm_q_ptr
            if head >= HEADS:
                norm_ptr = norm_k_ptr
            w1 = tl.load(norm_ptr + i, mask=inside, other=0.0).to(tl.float32)
            w2 = tl.load(norm_ptr + HALF + i, mask=inside, other=0.0).to(tl.float32)
            first = (w1 * (first * scale).to(kind).to(tl.float32)).to(kind).to(tl.float32)
            second = (w2 * (second * scale).to(kind).to(tl.float32)).to(kind).to(tl.float32)
        position = tl.load(position_ptr + row).to(tl.int64)
        cos = tl.load(cos_ptr + position * HALF + i, mask=inside, other=0.0)
        sin = tl.load(sin_ptr + position * HALF + i, mask=inside, other=0.0)
        first, second = first * cos - second * sin, second * cos + first * sin
    if head < HEADS:
        tl.store(qkv_ptr + base + i, first, mask=inside)
        tl.store(qkv_ptr + base + HALF + i, second, mask=inside)
    else:
        kv_row = tl.load(kv_row_ptr + row).to(tl.int64)
        slot = tl.load(slot_ptr + row // NODES).to(tl.int64)
        kept = i < tl.where(kv_row >= 0, HALF, 0)
        at = slot * cache.stride_slot + kv_row * HEAD_DIM + i
        if head < HEADS + KV_HEADS:
            at += (head - HEADS) * cache.stride_head
            tl.store(cache.key_rows + at, first, mask=kept)
            tl.store(cache.key_rows + at + HALF, second, mask=kept)
        else:
            at += (head - HEADS - KV_HEADS) * cache.stride_head
            tl.store(cache.value_rows + at, first, mask=kept)
            tl.store(cache.value_rows + at + HALF, second, mask=kept)


def rotate_append(
    qkv: Tensor,
    bias: Tensor | None,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    tables: tuple[Tensor, Tensor],
    positions: Tensor,
    slots: Tensor,
    kv_rows: Tensor,
    keys: Tensor,
    values: Tensor,
) -> None:
    """Run `rotate_append_ref` as one launch, a program for each head of each row."""
    rows = qkv.shape[0]
    _, kv_heads, _, head_dim = keys.shape
    heads = qkv.shape[1] // head_dim - 2 * kv_heads
    _rotate_append_kernel[(rows, heads + 2 * kv_heads)](
        qkv,
        qkv if bias is None else bias,
        *((qkv, qkv) if norms is None else norms),
        eps,
        *tables,
        positions,
        slots,
        kv_rows,
        CacheRows(keys, values, keys.stride(0), keys.stride(1)),
        NODES=rows // len(slots),
        HEADS=heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        BLOCK=triton.next_power_of_2(head_dim // 2),
        BIAS=bias is not None,
        NORM=norms is not None,
        num_warps=1,
    )
