"""Products of a few rows with a matrix too large for a processor's caches, in float32 on a CPU.

MKL reads the matrix again for each of two or three rows, or takes as long for four as for sixteen. Cut into blocks that
a cache holds, 49,152 rows of 576 take one core of an EPYC 14, 15 and 14 ms for two to four rows, not 23, 34 and 18, and
by its code for Intel's processors 9, 9 and 11, not 9, 9 and 17.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_BLOCK, _MAX_ROWS = 32, 12


def few_rows(inputs: Tensor, weight: Tensor) -> Tensor:
    """Return ``inputs`` [..., in] times ``weight`` [out, in], as `torch.nn.functional.linear` but for rounding."""
    rows = inputs.flatten(0, -2)
    is_read_again = 1 < len(rows) <= _MAX_ROWS and inputs.dtype == torch.float32 and inputs.device.type == "cpu"
    if not is_read_again or len(weight) % _BLOCK:
        return F.linear(inputs, weight)
    blocks = weight.unflatten(0, (-1, _BLOCK))
    products = torch.bmm(rows.expand(len(blocks), -1, -1), blocks.transpose(1, 2))
    return products.transpose(0, 1).reshape(*inputs.shape[:-1], len(weight))
