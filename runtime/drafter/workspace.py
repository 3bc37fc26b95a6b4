"""The persistent kernel's workspace: one table of the buffers that its phases (docs/kernels.md) pass to each other.

Nothing here grows with the draft vocabulary times the nodes.
"""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass

import torch
from torch import Tensor

from ..settings import MAX_NEW_TOKENS
from .dimensions import DrafterConfig
from .kernels.ancestor_attention import DraftAttentionShape
from .kernels.frontier import MAX_DEPTH
from .kernels.grid_barrier import STATE_WORDS
from .kernels.lm_topk import len_lists, list_size
from .kernels.selection import LOWEST_KEY
from .kernels.tree_build import TreeBounds
from .launch_params import LaunchParams, block_rows, group_rows, num_groups, padded_slots


@dataclass(frozen=True)
class Buffer:
    """One tensor of the workspace."""

    name: str
    dtype: str
    """One of `element_types`."""
    shape: tuple[str, ...]
    """Names of `sizes`."""
    holds: str


BUFFERS = (
    Buffer("x", "operand", ("operand values",), "inputs of the products, one after the other: `OperandLayout`"),
    Buffer("x_raw", "model", ("raw rows", "hidden"), "embeddings and features of EAGLE-1/2 in front of FP8 weights"),
    Buffer("partial", "fp32", ("part rows", "rows"), "partial sums of a projection: `projections.PartialSums`"),
    Buffer(
        "hidden", "fp32", ("slot rows", "hidden"), "residual that enters the layer: features, then each level's output"
    ),
    Buffer("middle", "fp32", ("slot rows", "hidden"), "residual between attention and MLP"),
    Buffer("qkv", "fp32", ("slot rows", "qkv"), "query, key and value, not rotated"),
    Buffer("squares_post", "fp32", ("programs", "rows"), "sums of squares of `middle`"),
    Buffer("squares_out", "fp32", ("programs", "rows"), "sums of squares of `hidden`"),
    Buffer("scratch", "fp32", ("programs", "rows", "head tile"), "one tile of logits"),
    Buffer("best_max", "fp32", ("programs", "rows"), "largest logit: `lm_topk.Lists`"),
    Buffer("best_sum", "fp32", ("programs", "rows"), "sum of exp(logit - largest)"),
    Buffer("score", "fp32", ("slots", "candidates"), "cumulative log-probability of each candidate"),
    Buffer("frontier_score", "fp32", ("slot rows",), "of each node of the level"),
    Buffer("split_stat", "fp32", ("2", "attention rows"), "running maximum and sum of each split"),
    Buffer("split_acc", "fp32", ("attention rows", "head block"), "weighted sum of values"),
    Buffer("factor", "fp32", ("input rows",), "RMSNorm factor, or divisor, of each embedding and feature"),
    Buffer("best_key", "int64", ("lists", "rows", "list"), "best rows of the LM head: `lm_topk.Lists`"),
    Buffer("child_key", "int64", ("slot rows", "list"), "children of each node of the level, as keys"),
    Buffer("owner", "int32", ("programs", "list"), "programs with the best lists; each its own"),
    Buffer("token", "int32", ("slots", "candidates"), "target id of each candidate"),
    Buffer("parent", "int32", ("slots", "candidates"), "candidate that it is a child of"),
    Buffer("node_of", "int32", ("slots", "candidates"), "node of each chosen candidate"),
    Buffer("chosen", "int32", ("slots", "nodes"), "candidate of each node"),
    Buffer("frontier_candidate", "int32", ("slot rows",), "candidate that each node of the level is"),
    Buffer("frontier_parent", "int32", ("slot rows",), "node of the level before whose child it is"),
    Buffer("frontier_child", "int32", ("slot rows",), "and which child"),
    Buffer("chain", "int32", ("2", "slot rows", "chain"), "ancestors of each node; levels take turns"),
    Buffer("node_arrivals", "int32", ("slots",), "nodes merged; 0 between levels"),
    Buffer("barrier", "int32", ("barrier",), "`grid_barrier`'s state; 0 between launches"),
)
Workspace = namedtuple("Workspace", [buffer.name for buffer in BUFFERS])  # type: ignore[misc]  # the table names them
"""The tensors, or in a kernel their addresses, in the table's order."""


@dataclass(frozen=True)
class OperandLayout:
    """Offsets of the products' inputs in one tensor, in stored elements."""

    inputs: int
    """Embeddings, then features."""
    fc: int
    """Taps (EAGLE-3) or fused features (EAGLE-1/2)."""
    attention: int
    post: int
    """After attention and its norm."""
    mlp: int
    head: int
    size: int

    @classmethod
    def of(cls, cfg: DrafterConfig) -> OperandLayout:
        """Lay the operands out one after the other; pairs of e4m3 numbers take two elements a value."""
        rows = padded_slots(cfg) * MAX_NEW_TOKENS
        operands = {
            "inputs": input_rows(cfg) * cfg.hidden,
            "fc": rows * (cfg.fc_in if cfg.kind == "eagle3" else cfg.hidden),
            "attention": rows * cfg.num_heads * cfg.head_dim,
            "post": rows * cfg.hidden,
            "mlp": rows * cfg.intermediate,
            "head": rows * cfg.hidden,
        }
        starts, at = {}, 0
        for name, size in operands.items():
            starts[name] = at
            at += -(-size * (2 if cfg.has_fp8 else 1) // 128) * 128
        return cls(**starts, size=at)


def element_types(cfg: DrafterConfig) -> dict[str, torch.dtype]:
    """Return the dtypes that `BUFFERS` names. Operands are of the weights' type: the model's, or pairs of e4m3."""
    return {
        "operand": cfg.weight_dtype,
        "model": cfg.dtype,
        "fp32": torch.float32,
        "int64": torch.int64,
        "int32": torch.int32,
    }


def input_rows(cfg: DrafterConfig) -> int:
    """Count the rows of embeddings and, after them, features."""
    return padded_slots(cfg) * (cfg.embed_rows + MAX_NEW_TOKENS)


def attention_shape(cfg: DrafterConfig, params: LaunchParams) -> DraftAttentionShape:
    """Return the shape of a configuration's attention units."""
    # A power of two, with an accumulator of at most 128 by 128.
    most = 8 if cfg.head_dim <= 128 else 4
    return DraftAttentionShape(
        cfg.num_heads,
        cfg.num_kv_heads,
        cfg.head_dim,
        cfg.top_k,
        min(1 << (cfg.num_heads // cfg.num_kv_heads - 1).bit_length(), most),
        params.block_keys,
        padded_slots(cfg),
        params.part_keys,
        window=cfg.sliding_window or 0,
        sinks=cfg.window_sinks,
        head_norms=cfg.has_head_norms,
        norm_eps=cfg.norm_eps,
    )


def sizes(cfg: DrafterConfig, params: LaunchParams) -> dict[str, int]:
    """Return the sizes that `BUFFERS` names."""
    programs, slot_rows = params.num_programs, padded_slots(cfg) * MAX_NEW_TOKENS
    attention = attention_shape(cfg, params)
    split, bounds = params.layout.split.items(), TreeBounds.of(cfg.tree)
    return {
        "2": 2,
        "slots": cfg.num_slots,
        "slot rows": slot_rows,
        "rows": block_rows(cfg),
        "programs": programs,
        "lists": len_lists(programs),
        "list": list_size(cfg.top_k),
        "candidates": bounds.candidates,
        "nodes": bounds.total,
        "chain": MAX_DEPTH,
        "hidden": cfg.hidden,
        "qkv": cfg.qkv_size,
        "input rows": input_rows(cfg),
        "raw rows": input_rows(cfg) if cfg.kind == "eagle" and cfg.has_fp8 else 1,
        "operand values": OperandLayout.of(cfg).size,
        "part rows": max(num_groups(n, programs) * n * group_rows(cfg, name, n, programs) for name, n in split),
        "attention rows": max(programs, cfg.num_slots * attention.groups) * attention.group_rows,
        "head block": attention.block_d,
        "head tile": params.tiles["head"].block_n,
        "barrier": STATE_WORDS,
    }


def allocate_workspace(cfg: DrafterConfig, params: LaunchParams, device: torch.device | str) -> dict[str, Tensor]:
    """Allocate `BUFFERS`, poisoned: NaN in floats; integers are what the kernel expects to find, 0 or empty lists."""
    size, types = sizes(cfg, params), element_types(cfg)
    return {
        buffer.name: _fresh([size[name] for name in buffer.shape], types[buffer.dtype], device) for buffer in BUFFERS
    }


def _fresh(shape: list[int], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    if dtype == torch.float8_e4m3fn:  # whose NaN is 0x7F
        return torch.full(shape, 0x7F, dtype=torch.uint8, device=device).view(dtype)
    fill = {torch.int32: 0, torch.int64: LOWEST_KEY.value}.get(dtype, float("nan"))
    return torch.full(shape, fill, dtype=dtype, device=device)
