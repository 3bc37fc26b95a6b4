"""Matrices of a target in FP8 (e4m3) with fp32 scales: the type, a layer that holds one, and quantising."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LARGEST = 448.0
"""Largest number of e4m3."""
SCALE_BLOCK = 128
"""Columns that share a scale where a row has several."""
_CHUNK = 1 << 24
"""Numbers that are quantised at a time."""


@dataclass(frozen=True)
class Fp8Weight:
    """A matrix [out, in] in FP8, ``in`` a multiple of 16; `of` makes one of numbers in their own order.

    ``words`` int32 [out, in / 4]: four numbers each, what a thread of a matrix instruction multiplies. Of every 16
    columns of a row, word t has columns ``2 t + i`` and ``8 + 2 t + i`` in its half i. The first one's bits are where
    bf16 has them: the sign is bit 15, exponent and mantissa are bits 10 to 4. The other's fill the gaps: bit 11; bits
    14 to 12 and 3 to 0.
    ``scales`` fp32 [out, groups]. One group: a row's scale. ceil(in / 128) groups: a scale for every 128 columns of a
    row. Published scales of 128 x 128 blocks are repeated for each row of a block, so that matrices of any number of
    rows can be packed behind one another. Both are contiguous.
    """

    words: Tensor
    scales: Tensor

    @classmethod
    def of(cls, values: Tensor, scales: Tensor) -> Fp8Weight:
        """Bring numbers, float8_e4m3fn [out, in], into the order of ``words``."""
        out, size = values.shape
        first, other = values.view(torch.uint8).view(out, size // 16, 2, 4, 2).unbind(2)
        low = first << 4 | other & 15
        high = first & 128 | other & 112 | other >> 4 & 8 | first >> 4 & 7
        return cls(torch.stack((low, high), -1).view(out, size).view(torch.int32), scales)

    @property
    def values(self) -> Tensor:
        """A copy of the numbers in their own order: float8_e4m3fn [out, in]."""
        out, size = self.shape
        low, high = self.words.view(torch.uint8).view(out, size // 16, 4, 2, 2).unbind(-1)
        first = high & 128 | (high & 7) << 4 | low >> 4
        other = (high & 8) << 4 | high & 112 | low & 15
        return torch.stack((first, other), 2).view(out, size).view(torch.float8_e4m3fn)

    @property
    def shape(self) -> torch.Size:
        """Shape of the matrix, [out, in]."""
        return torch.Size((self.words.shape[0], 4 * self.words.shape[1]))

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """Return the matrix [out, in] in another type, each number rounded once from fp32."""
        scales = self.scales
        if scales.shape[1] > 1:
            scales = scales.repeat_interleave(SCALE_BLOCK, 1)[:, : self.shape[1]]
        return (self.values.float() * scales).to(dtype)


Weight = Tensor | Fp8Weight
"""A matrix [out, in], in the model's type or in FP8."""


class Fp8Linear(nn.Module):
    """A linear layer whose ``weight`` is an `Fp8Weight`; its own forward dequantises, for models run as a reference."""

    words: Tensor
    scales: Tensor
    bias: nn.Parameter | None

    def __init__(self, weight: Fp8Weight, bias: nn.Parameter | None = None) -> None:
        super().__init__()
        self.register_buffer("words", weight.words)
        self.register_buffer("scales", weight.scales)
        self.register_parameter("bias", bias)

    @property
    def weight(self) -> Fp8Weight:
        """The matrix."""
        return Fp8Weight(self.words, self.scales)

    def forward(self, x: Tensor) -> Tensor:
        """Multiply by the dequantised matrix."""
        return F.linear(x, self.weight.dequantised(x.dtype), self.bias)


def quantise_rows(weight: Tensor) -> Fp8Weight:
    """Round a matrix [out, in] to e4m3 with one scale an output row: its largest magnitude over 448, 1 for zeros.

    Some rows at a time: there is never a whole copy in fp32. Does not look for NaN and infinity.
    """
    out, size = weight.shape
    values = torch.empty((out, size), dtype=torch.float8_e4m3fn, device=weight.device)
    scales = torch.empty((out, 1), dtype=torch.float32, device=weight.device)
    count = max(1, _CHUNK // size)
    for first in range(0, out, count):
        part = weight[first : first + count].float()
        largest = part.abs().amax(1, keepdim=True)
        # Divide by a tensor: by a number a GPU multiplies with its reciprocal, which rounds otherwise than a CPU.
        scale = torch.where(largest > 0, largest / largest.new_tensor(LARGEST), 1.0)
        scales[first : first + count] = scale
        values[first : first + count] = (part / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return Fp8Weight.of(values, scales)
