"""Matrices of a target in FP8 (e4m3) with fp32 scales: the type, a layer that holds one, and quantising."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LARGEST = 448.0
"""Largest number of e4m3."""
SCALE_BLOCK = 128
"""Columns that share a scale where a row has several."""
_CHUNK = 1 << 24
"""Numbers that are quantised at a time."""


class Fp8Weight(NamedTuple):
    """A matrix [out, in] in FP8.

    ``values`` float8_e4m3fn [out, in] and ``scales`` fp32 [out, groups], both contiguous. One group: a row's scale.
    ceil(in / 128) groups: a scale for every 128 columns of a row. Published scales of 128 x 128 blocks are repeated for
    each row of a block, so that matrices of any number of rows can be packed behind one another.
    """

    values: Tensor
    scales: Tensor

    @property
    def shape(self) -> torch.Size:
        """Shape of the matrix, [out, in]."""
        return self.values.shape

    @property
    def device(self) -> torch.device:
        """Device of the matrix."""
        return self.values.device

    @property
    def nbytes(self) -> int:
        """Bytes of values and scales."""
        return self.values.nbytes + self.scales.nbytes

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

    values: Tensor
    scales: Tensor
    bias: nn.Parameter | None

    def __init__(self, weight: Fp8Weight, bias: nn.Parameter | None = None) -> None:
        super().__init__()
        self.register_buffer("values", weight.values)
        self.register_buffer("scales", weight.scales)
        self.register_parameter("bias", bias)

    @property
    def weight(self) -> Fp8Weight:
        """The matrix."""
        return Fp8Weight(self.values, self.scales)

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
        scale = torch.where(largest > 0, largest / LARGEST, 1.0)
        scales[first : first + count] = scale
        values[first : first + count] = (part / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return Fp8Weight(values, scales)
