"""Places of experts' tensors: checkpoints hold a matrix of each expert, a model those of all experts in two tensors.

transformers' own form, with all experts of a layer in a tensor of three axes, is read, too, but not published in FP8.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import UnsupportedModelError
from .fp8 import SCALE_BLOCK, Fp8Weight

WHOLE = ("gate_up_proj", "down_proj")
"""transformers' names of all experts' matrices."""


def expert_parts(experts: Any, path: str) -> Iterator[tuple[str, str, slice]]:
    """Yield of each matrix of each expert its path in a checkpoint, the tensor it belongs to, and its rows there.

    ``path``: of the experts. Rows are counted over all experts of a layer.
    """
    hidden, width = experts.hidden_dim, experts.intermediate_dim
    for expert in range(experts.num_experts):
        first = 2 * width * expert
        yield f"{path}.{expert}.gate_proj", WHOLE[0], slice(first, first + width)
        yield f"{path}.{expert}.up_proj", WHOLE[0], slice(first + width, first + 2 * width)
        yield f"{path}.{expert}.down_proj", WHOLE[1], slice(hidden * expert, hidden * expert + hidden)


class Fp8Experts(nn.Module):
    """Experts whose matrices are in FP8, all of a layer's below one another; dequantised in its own forward.

    ``gate_up`` [experts * 2 * width, hidden], an expert's gate before its up; ``down`` [experts * hidden, width].
    ``plain``: transformers' module in its place, without weights. ``has_blocks``: a row has a scale for each block of
    columns. Raises `UnsupportedModelError` for columns that are no multiple of 16.
    """

    gate_up_words: Tensor
    gate_up_scales: Tensor
    down_words: Tensor
    down_scales: Tensor

    def __init__(self, plain: Any, has_blocks: bool, device: torch.device) -> None:
        super().__init__()
        # No module of this one: it has no weights.
        self._plain = (plain,)
        self.act_fn = plain.act_fn
        for name, weight in (("gate_up", plain.gate_up_proj), ("down", plain.down_proj)):
            experts, rows, columns = weight.shape
            if columns % 16:
                problem = f"{type(plain).__name__}: its matrices in FP8 would have {columns} columns"
                raise UnsupportedModelError(f"{problem}, which must be a multiple of 16.")
            count = ceil(columns / SCALE_BLOCK) if has_blocks else 1
            words = torch.empty((experts * rows, columns // 4), dtype=torch.int32, device=device)
            self.register_buffer(f"{name}_words", words)
            scales = torch.empty((experts * rows, count), dtype=torch.float32, device=device)
            self.register_buffer(f"{name}_scales", scales)

    @property
    def plain(self) -> Any:
        """See the class."""
        return self._plain[0]

    @property
    def gate_up(self) -> Fp8Weight:
        """See the class."""
        return Fp8Weight(self.gate_up_words, self.gate_up_scales)

    @property
    def down(self) -> Fp8Weight:
        """See the class."""
        return Fp8Weight(self.down_words, self.down_scales)

    def forward(self, x: Tensor, picked: Tensor, weights: Tensor) -> Tensor:
        """Add what the ``picked`` experts [rows, top_k] give of ``x`` [rows, hidden], times their ``weights``."""
        gate_up, down = (each.dequantised(x.dtype).chunk(self.plain.num_experts) for each in (self.gate_up, self.down))
        total = torch.zeros_like(x)
        for expert in picked.unique().tolist():
            row, slot = (picked == expert).nonzero(as_tuple=True)
            gate, up = F.linear(x[row], gate_up[expert]).chunk(2, -1)
            total.index_add_(0, row, F.linear(F.silu(gate) * up, down[expert]) * weights[row, slot, None])
        return total
