"""Published forms of weights in FP8: their settings, and how a matrix becomes one, worked out block by block."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

Quantise = Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]
WEIGHTS = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "observer": "minmax"}


def by_blocks(weight: Tensor, rows: int, columns: int) -> tuple[Tensor, Tensor, Tensor]:
    """Values, scales [blocks, blocks] and the dequantised matrix of a weight [out, in], worked out block by block."""
    values, wide = torch.empty_like(weight, dtype=torch.float8_e4m3fn), torch.empty_like(weight)
    scales = torch.empty(-(-weight.shape[0] // rows), -(-weight.shape[1] // columns))
    for i, j in [(i, j) for i in range(len(scales)) for j in range(scales.shape[1])]:
        block = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
        scales[i, j] = weight[block].abs().max() / 448
        values[block] = (weight[block] / scales[i, j]).to(torch.float8_e4m3fn)
        wide[block] = values[block].float() * scales[i, j]
    return values, scales, wide


def by_matrix(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    values, scales, wide = by_blocks(weight, *weight.shape)
    return values, scales[0, 0], wide


def by_row(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return by_blocks(weight, 1, weight.shape[1])


def compressed(strategy: str, **more: Any) -> dict[str, Any]:
    group = {
        "weights": {**WEIGHTS, "strategy": strategy, "group_size": None, **more},
        "targets": ["Linear"],
        "input_activations": {"num_bits": 8, "type": "float", "dynamic": True, "strategy": "token"},
    }
    settings = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": group}}
    whole = {"kv_cache_scheme": None, "quantization_status": "compressed", "ignore": ["lm_head", "re:.*o_proj$"]}
    return settings | whole


by_128 = partial(by_blocks, rows=128, columns=128)
BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
FBGEMM = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"], "kv_cache_scheme": {"num_bits": 8}}
FORMS: dict[str, tuple[dict[str, Any], Quantise, str]] = {
    "fp8, blocks": (BLOCKS, by_128, "weight_scale_inv"),
    "fp8, matrices": ({"quant_method": "fp8", "activation_scheme": "static"}, by_matrix, "weight_scale"),
    "compressed-tensors, rows": (compressed("channel"), by_row, "weight_scale"),
    "compressed-tensors, matrices": (compressed("tensor"), by_matrix, "weight_scale"),
    "compressed-tensors, blocks": (compressed("block", block_structure=[128, 128]), by_128, "weight_scale"),
    "fbgemm": (FBGEMM, by_row, "weight_scale"),
    "modelopt": (MODELOPT, by_matrix, "weight_scale"),
}
