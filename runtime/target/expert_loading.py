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
    """Experts in another form than transformers' module ``plain``, which is without weights; dequantised in forward.

    ``gate_up`` and ``down`` [experts * hidden, width]: matrices of a layer's experts, all below one another. Raises
    `UnsupportedModelError` for columns that are no multiple of what the form packs.
    """

    gate_up_words: Tensor
    gate_up_scales: Tensor
    down_words: Tensor
    down_scales: Tensor

    def __init__(self, plain: Any, gate_up: Fp8Weight | Mxfp4Weight, down: Fp8Weight | Mxfp4Weight) -> None:
        super().__init__()
        # No module of this one: it has no weights.
        self._plain, self._kind = (plain,), type(down)
        for name, weight in (("gate_up", gate_up), ("down", down)):
            self.register_buffer(f"{name}_words", weight.words)
            self.register_buffer(f"{name}_scales", weight.scales)

    @property
    def plain(self) -> Any:
        """See the class."""
        return self._plain[0]

    @property
    def gate_up(self) -> Any:
        """See the class."""
        return self._kind(self.gate_up_words, self.gate_up_scales)

    @property
    def down(self) -> Any:
        """See the class."""
        return self._kind(self.down_words, self.down_scales)


def _check_columns(plain: Any, columns: int, form: str, step: int) -> None:
    if columns % step:
        problem = f"{type(plain).__name__}: its matrices in {form} would have {columns} columns"
        raise UnsupportedModelError(f"{problem}, which must be a multiple of {step}.")


class Fp8Experts(PackedExperts):
    """Experts in FP8: ``gate_up`` [experts * 2 * width, hidden], an expert's gate before its up.

    ``has_blocks``: a row has a scale for each block of columns.
    """

    def __init__(self, plain: Any, has_blocks: bool, device: torch.device) -> None:
        matrices = []
        for experts, rows, columns in (plain.gate_up_proj.shape, plain.down_proj.shape):
            _check_columns(plain, columns, "FP8", 16)
            words = torch.empty((experts * rows, columns // 4), dtype=torch.int32, device=device)
            count = ceil(columns / SCALE_BLOCK) if has_blocks else 1
            matrices.append(Fp8Weight(words, torch.empty((len(words), count), dtype=torch.float32, device=device)))
        super().__init__(plain, *matrices)
        self.act_fn = plain.act_fn

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
    """gpt-oss' experts in MXFP4: ``gate_up`` [experts * 2 * width, hidden], rows of gate and up in turn."""

    gate_up_proj_bias: Tensor
    down_proj_bias: Tensor

    def __init__(self, plain: Any, device: torch.device) -> None:
        matrices = []
        for experts, columns, rows in (plain.gate_up_proj.shape, plain.down_proj.shape):
            _check_columns(plain, columns, "MXFP4", SCALED)
            matrices.append(Mxfp4Weight.empty(experts * rows, columns, device))
        super().__init__(plain, *matrices)
        for name in ("gate_up_proj_bias", "down_proj_bias"):
            self.register_parameter(name, getattr(plain, name))

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
