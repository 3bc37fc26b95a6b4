"""Gate and up, and the activation between them: the operand of ``down``.

    out[r] = activate(factor[r] * gate(x[r]) + gate_bias) * (factor[r] * up(x[r]) + up_bias)

    silu(v) = v * sigmoid(v)        gelu(v) = v * (1 + erf(v / sqrt(2))) / 2
    gelu_tanh(v) = v * (1 + tanh(sqrt(2 / pi) * (v + 0.044715 * v**3))) / 2

GELU and its tanh form are Hendrycks and Gimpel's (arXiv:1606.08415). ``factor`` is RMSNorm's. Each program has rows of
gate and up side by side in its stream, so that one piece of it serves both. With FP8 weights ``out`` is halved: pairs
of e4m3 numbers hold magnitudes to 448, halved, activations to 896. Bytes moved: both matrices once.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from .weight_stream import Tile, hidden_zero, operand_dot, operand_mask, operand_rows, operand_sum, store_activation


@dataclass(frozen=True)
class MlpShape:
    """Gate and up: ``hidden`` inputs, ``intermediate`` outputs of each, of which a program has ``rows``."""

    hidden: int
    intermediate: int
    rows: int
    chunk: int
    """Columns stored together: a multiple of the tile's ``block_k``."""
    scaled: bool
    """Rows have a scale each: the weights are FP8."""
    activation: str
    """One of `drafter.dimensions.ACTIVATIONS`."""
    biased: bool
    tile: Tile


@triton.jit
def activate(value, NAME: tl.constexpr):
    """Apply the activation of that name (module docstring), in fp32."""
    if NAME == "gelu":
        return value * (0.5 + 0.5 * tl.erf(value * 0.7071067811865476))
    elif NAME == "gelu_tanh":
        # (1 + tanh(u)) / 2 = sigmoid(2 u); far below 0 the exponential would overflow.
        twice = 1.5957691216057308 * (value + 0.044715 * value * value * value)
        return value * tl.sigmoid(tl.maximum(twice, -80.0))
    else:
        return value * tl.sigmoid(value)


@triton.jit
def gated_mlp(
    x_ptr,  # [BLOCK_M, hidden]
    factor,  # fp32 [BLOCK_M]
    mask_m,  # int1 [BLOCK_M]: rows in use
    region_ptr,  # this program's region [hidden / chunk, 2, rows, chunk]
    scale_ptr,  # fp32 [2, rows], read when scaled
    bias_ptr,  # [2, intermediate], read when biased
    out_ptr,  # [BLOCK_M, intermediate]
    SHAPE: tl.constexpr,  # `MlpShape`
):
    """Write this program's columns of the result."""
    HIDDEN: tl.constexpr = SHAPE.hidden
    R: tl.constexpr = SHAPE.rows
    ACTIVATION: tl.constexpr = SHAPE.activation
    TILE: tl.constexpr = SHAPE.tile
    BLOCK_N: tl.constexpr = TILE.block_n
    BLOCK_K: tl.constexpr = TILE.block_k
    CHUNK: tl.constexpr = SHAPE.chunk
    PARTS: tl.constexpr = CHUNK // BLOCK_K
    zero = hidden_zero()
    offs_m = (tl.arange(0, mask_m.shape[0]) + zero).to(tl.int64)
    offs_n = tl.arange(0, BLOCK_N) + zero
    offs_k = tl.arange(0, BLOCK_K) + zero
    x_row = operand_rows(x_ptr, offs_m * HIDDEN, HIDDEN)
    mask_x = operand_mask(x_ptr, mask_m)
    for n0 in tl.range(0, R, BLOCK_N, disable_licm=True):
        region = region_ptr + n0 * CHUNK
        w_offs = offs_n[:, None] * CHUNK + offs_k[None, :]
        mask_w = (n0 + offs_n < R)[:, None]
        gate = tl.zeros([BLOCK_N, mask_x.shape[0]], tl.float32)
        up = tl.zeros([BLOCK_N, mask_x.shape[0]], tl.float32)
        for k in tl.range(0, HIDDEN // BLOCK_K + zero, num_stages=TILE.stages):
            x_offs = x_row[None, :] + (k * BLOCK_K + offs_k)[:, None]
            x = tl.load(x_ptr + x_offs, mask=mask_x[None, :], other=0.0)
            slab = region + k * (2 * R * CHUNK)
            if PARTS > 1:
                slab = region + k // PARTS * (2 * R * CHUNK) + k % PARTS * BLOCK_K
            gate = operand_dot(tl.load(slab + w_offs, mask=mask_w, other=0.0), x, gate)
            up = operand_dot(tl.load(slab + R * CHUNK + w_offs, mask=mask_w, other=0.0), x, up)
        gate = operand_sum(x_ptr, gate)
        up = operand_sum(x_ptr, up)
        feature = tl.program_id(0) * R + n0 + offs_n
        mine = (n0 + offs_n < R) & (feature < SHAPE.intermediate)
        if SHAPE.scaled:
            gate *= tl.load(scale_ptr + n0 + offs_n, mask=mine, other=0.0)[:, None]
            up *= tl.load(scale_ptr + R + n0 + offs_n, mask=mine, other=0.0)[:, None]
        gate *= factor[None, :]
        if SHAPE.biased:
            gate += tl.load(bias_ptr + feature, mask=mine, other=0.0).to(tl.float32)[:, None]
            up_bias = tl.load(bias_ptr + SHAPE.intermediate + feature, mask=mine, other=0.0).to(tl.float32)
            mixed = activate(gate, ACTIVATION) * (up * factor[None, :] + up_bias[:, None])
        else:
            mixed = activate(gate, ACTIVATION) * up * factor[None, :]
        mixed *= 0.5 if SHAPE.scaled else 1.0
        mask = mine[:, None] & mask_m[None, :]
        store_activation(out_ptr, offs_m[None, :], feature[:, None], mixed, mask, SHAPE.intermediate)
