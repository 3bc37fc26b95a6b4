"""Matrices of experts in MXFP4 (OCP Microscaling Formats 1.0): numbers of 4 bits, a power of two for every 32 columns.

A number is e2m1: 0, 0.5, 1, 1.5, 2, 3, 4 or 6, with a sign; a scale is e8m0: 2^(byte - 127). Every product of the two
is a bf16 number.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from .fp8 import Weight

SCALED = 32
"""Columns that share a scale."""
LARGEST_SCALE = 128
"""Largest byte of a scale that is taken: 2, so numbers up to 12."""
DEQUANTISED = "load it with transformers' Mxfp4Config(dequantize=True) and pass the model"
"""Advice for a target in MXFP4 that is not to stay in it."""
_LIFT = 126
_NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_CHUNK = 1 << 26
"""Numbers that are brought into order at a time."""
_RUNS = (((8, 12), (7, 6)), ((8, 18), (7, 12)), ((8, 8), (7, 2)), ((8, 6), (4, 8), (3, 0)))
"""Of each of the four numbers of a word's lower half, bits that stay together, and how far up they are."""


@dataclass(frozen=True)
class Mxfp4Weight:
    """A matrix [out, in] in MXFP4, ``in`` a multiple of 32; `put_blocks` and `put_scales` fill it.

    ``words`` int32 [out, in / 8]. Of every 32 columns of a row, word t has columns ``2 t + i``, ``8 + 2 t + i``,
    ``16 + 2 t + i`` and ``24 + 2 t + i`` in its half i: what a thread of two matrix instructions multiplies. The first
    one's bits are where bf16 has them, but for the exponent's bias (sign bit 15; 8 to 6); the next one's are rotated up
    by 6 bits of 32, the third one's 4 bits lower; the last one's 6 lower, but the exponent's upper one is bit 10.
    ``scales`` int32 [ceil(in / 128), out]: the bytes of four scales, each 126 larger, which makes up for the bias.
    """

    words: Tensor
    scales: Tensor

    @classmethod
    def empty(cls, out: int, size: int, device: torch.device) -> Mxfp4Weight:
        """Allocate a matrix [out, size]."""
        words, scales = (out, size // 8), (-(-size // 128), out)
        return cls(*(torch.empty(shape, dtype=torch.int32, device=device) for shape in (words, scales)))

    def put_blocks(self, blocks: Tensor) -> None:
        """Take a checkpoint's ``_blocks``, uint8 [..., in / 32, 16]: two numbers a byte, the lower bits first."""
        bytes_of = blocks.reshape(len(self.words), -1, 4, 4)  # [out, groups, number, t]
        count = max(1, _CHUNK // self.shape[1])
        for words, part in zip(self.words.split(count), bytes_of.split(count), strict=True):
            numbers, word = part.to(torch.int32), torch.zeros_like(words).view(len(words), -1, 4)
            for number, runs in enumerate(_RUNS):
                for half in (0, 1):
                    code = numbers[:, :, number] >> 4 * half
                    for mask, shift in runs:
                        word |= (code & mask) << (shift + 16 * half) % 32
            words.copy_(word.flatten(1))

    def put_scales(self, scales: Tensor) -> None:
        """Take a checkpoint's ``_scales``, uint8 [..., in / 32], all up to `LARGEST_SCALE`."""
        biased = scales.reshape(len(self.words), -1).to(torch.int32) + _LIFT
        four = F.pad(biased, (0, -biased.shape[1] % 4)).view(len(biased), -1, 4)
        shift = torch.arange(0, 32, 8, dtype=torch.int32, device=four.device)
        self.scales.copy_((four << shift).sum(2, dtype=torch.int32).t())

    @property
    def shape(self) -> torch.Size:
        """Shape of the matrix, [out, in]."""
        return torch.Size((self.words.shape[0], 8 * self.words.shape[1]))

    @property
    def nbytes(self) -> int:
        """Bytes of the numbers and scales."""
        return self.words.nbytes + self.scales.nbytes

    def of_expert(self, expert: int, count: int) -> Mxfp4Weight:
        """Return the matrix of one of ``count`` experts that are below one another."""
        return Mxfp4Weight(self.words.chunk(count)[expert], self.scales.chunk(count, 1)[expert])

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """Return the matrix [out, in] in another type."""
        out, size = self.shape
        half, words = torch.arange(0, 32, 16, device=self.words.device), self.words.view(out, -1, 4, 1)
        parts = [torch.stack([words >> (shift + half) % 32 & mask for mask, shift in runs]).sum(0) for runs in _RUNS]
        codes = torch.stack(parts, 2)  # [out, groups, number, t, i]
        numbers = torch.tensor([*_NUMBERS, *(-each for each in _NUMBERS)], device=codes.device)[codes]
        shift = torch.arange(0, 32, 8, dtype=torch.int32, device=self.scales.device)
        scales = (self.scales.t()[..., None] >> shift & 255).flatten(1)[:, : size // SCALED] - _LIFT - 127
        return torch.ldexp(numbers.view(out, -1, SCALED), scales[..., None]).view(out, size).to(dtype)


ExpertWeight = Weight | Mxfp4Weight
"""Matrices of a layer's experts below one another."""
