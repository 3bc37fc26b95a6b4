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
from .kernels.experts import Clamp
from .mxfp4 import SCALED, Mxfp4Weight

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


class PackedExperts(nn.Module):
    """Experts in another form than transformers' module ``plain``, which is without weights."""

    def __init__(self, plain: Any) -> None:
        super().__init__()
        # No module of this one: it has no weights.
        self._plain = (plain,)

    @property
    def plain(self) -> Any:
        """See the class."""
        return self._plain[0]


class Fp8Experts(PackedExperts):
    """Experts whose matrices are in FP8, all of a layer's below one another; dequantised in its own forward.

    ``gate_up`` [experts * 2 * width, hidden], an expert's gate before its up; ``down`` [experts * hidden, width].
    ``has_blocks``: a row has a scale for each block of columns. Raises `UnsupportedModelError` for columns that are no
    multiple of 16.
    """

    gate_up_words: Tensor
    gate_up_scales: Tensor
    down_words: Tensor
    down_scales: Tensor

    def __init__(self, plain: Any, has_blocks: bool, device: torch.device) -> None:
        super().__init__(plain)
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


class Mxfp4Experts(PackedExperts):
    """gpt-oss' experts in MXFP4, all of a layer's below one another; dequantised in its own forward.

    ``gate_up`` [experts * 2 * width, hidden], rows of gate and up in turn; ``down`` [experts * hidden, width]. Raises
    `UnsupportedModelError` for columns that are no multiple of 32.
    """

    gate_up_words: Tensor
    gate_up_scales: Tensor
    down_words: Tensor
    down_scales: Tensor
    gate_up_proj_bias: Tensor
    down_proj_bias: Tensor

    def __init__(self, plain: Any, device: torch.device) -> None:
        super().__init__(plain)
        for name, weight in (("gate_up", plain.gate_up_proj), ("down", plain.down_proj)):
            experts, columns, rows = weight.shape
            if columns % SCALED:
                problem = f"{type(plain).__name__}: its matrices in MXFP4 would have {columns} columns"
                raise UnsupportedModelError(f"{problem}, which must be a multiple of {SCALED}.")
            empty = Mxfp4Weight.empty(experts * rows, columns, device)
            self.register_buffer(f"{name}_words", empty.words)
            self.register_buffer(f"{name}_scales", empty.scales)
        for name in ("gate_up_proj_bias", "down_proj_bias"):
            self.register_parameter(name, getattr(plain, name))

    @property
    def gate_up(self) -> Mxfp4Weight:
        """See the class."""
        return Mxfp4Weight(self.gate_up_words, self.gate_up_scales)

    @property
    def down(self) -> Mxfp4Weight:
        """See the class."""
        return Mxfp4Weight(self.down_words, self.down_scales)

    def forward(self, x: Tensor, router_indices: Tensor, routing_weights: Tensor) -> Tensor:
        """Add what the picked experts [rows, top_k] give of ``x`` [rows, hidden], times their weights."""
        total, clamp = torch.zeros_like(x), Clamp(self.plain.alpha, self.plain.limit)
        for expert in router_indices.unique().tolist():
            row, slot = (router_indices == expert).nonzero(as_tuple=True)
            gate_up, down = (each.of_expert(expert, self.plain.num_experts) for each in (self.gate_up, self.down))
            both = F.linear(x[row], gate_up.dequantised(x.dtype), self.gate_up_proj_bias[expert])
            out = F.linear(clamp.gated(both), down.dequantised(x.dtype), self.down_proj_bias[expert])
            total.index_add_(0, row, out * routing_weights[row, slot, None])
        return total
