"""Host side of the persistent drafter: pack the weights, lay out the workspace, launch.

Everything that takes time or memory happens in `pack_head` and `allocate_workspace`; `launch` only starts the kernel,
so it can be captured in a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from ..drafter.buffers import Buffers
from ..drafter.config import MAX_NEW_TOKENS, DrafterConfig
from ..drafter.weights import HeadWeights
from ..errors import DrafterError
from .ancestor_attention import heads_per_attention_unit
from .grid_barrier import ERROR
from .launch_params import (
    INTERPRETER,
    PROJECTIONS,
    Chip,
    LaunchParams,
    block_rows,
    group_rows,
    in_features,
    num_groups,
    out_features,
)
from .lm_topk import empty_lists, head_tiles, len_lists, merge_blocks
from .packing import assign_rows, cut_chunks, cut_parts, cut_tiles, quantize_rows, rows_per_program
from .persistent import draft_kernel


@dataclass(frozen=True)
class PackedHead:
    """A head's matrices as streams, one per program, and the small tensors that the kernel reads beside them."""

    stream: Tensor
    """weight dtype [programs * stream_size]."""
    scales: Tensor
    """float32 [programs, rows]: one per row of the stream; [1] when the weights are not FP8."""
    row_ids: Tensor
    """int32 [programs, head rows]: target id of each LM-head row."""
    embedding: Tensor
    norms: dict[str, Tensor]
    fc_bias: Tensor
    qkv_bias: Tensor
    cos: Tensor
    sin: Tensor
    params: LaunchParams
    draft_vocab: int
    """LM-head rows packed; a launch may use the first N of them."""


def chip_of(device: torch.device) -> Chip:
    """Describe the device kernels will run on."""
    if device.type != "cuda":
        return INTERPRETER
    properties = torch.cuda.get_device_properties(device)
    return Chip(
        properties.name,
        properties.major * 10 + properties.minor,
        properties.shared_memory_per_block_optin,  # type: ignore[attr-defined]  # torch's stubs lack it
        properties.multi_processor_count,
    )


@dataclass(frozen=True)
class StreamLayout:
    """Where each matrix lies in a program's stream, in elements, and how many rows of it a program and a group own."""

    offsets: dict[str, int]
    rows: dict[str, int]
    group_rows: dict[str, int]
    stored: dict[str, int]
    """Elements of each region."""
    size: int
    tile_rows: int
    """Rows of one stored tile of the LM head."""

    @classmethod
    def of(cls, cfg: DrafterConfig, params: LaunchParams, draft_vocab: int) -> StreamLayout:
        """Lay out a head whose LM head has ``draft_vocab`` rows."""
        programs = params.num_programs
        rows = {name: rows_per_program(size, programs) for name, size in out_features(cfg).items()}
        tile_rows, rows["head"] = head_tiles(draft_vocab, programs, params.tiles["head"].block_n)
        grouped = {name: group_rows(cfg, name, params.split[name], programs) for name in PROJECTIONS}
        offsets, stored, at = {}, {}, 0
        for name, size in in_features(cfg).items():
            if name in PROJECTIONS:
                split, block_k = params.split[name], params.tiles["layer"].block_k
                units = -(-num_groups(split, programs) * split // programs)
                stored[name] = units * -(-size // block_k // split) * block_k * grouped[name]
                stored[name] *= cfg.has_fc if name == "fc" else 1
            else:
                stored[name] = rows[name] * (2 if name == "mlp" else 1) * size
            offsets[name] = at
            at += -(-stored[name] // 128) * 128
        return cls(offsets, rows, grouped, stored, at, tile_rows)

    @property
    def scale_rows(self) -> int:
        """Rows of a program's stream, for one scale each."""
        return sum(self.rows.values()) + self.rows["mlp"]


def pack_head(head: HeadWeights, cfg: DrafterConfig, params: LaunchParams, order: Tensor | None = None) -> PackedHead:
    """Lay a head out for the kernel.

    ``order``: int64 [draft_vocab], LM-head rows best first, when launches shall be able to use fewer rows than are
    packed (`DraftVocab` in rank order); default the head's own order.
    """
    w, programs, tiles = head.tensors, params.num_programs, params.tiles
    device = head.device
    empty = torch.zeros(1, dtype=cfg.dtype, device=device)
    order = torch.arange(head.draft_vocab, device=device) if order is None else order
    projections = [f"self_attn.{x}_proj" for x in "qkv"]
    matrices = {
        "fc": [w["fc.weight"]] if cfg.has_fc else [],
        "qkv": [torch.cat([w[f"{name}.weight"] for name in projections])],
        "o": [w["self_attn.o_proj.weight"]],
        "mlp": [w["mlp.gate_proj.weight"], w["mlp.up_proj.weight"]],
        "down": [w["mlp.down_proj.weight"]],
        "head": [head.lm_head[order]],
    }
    layout = StreamLayout.of(cfg, params, head.draft_vocab)
    element = cfg.weight_dtype.itemsize
    stream = torch.zeros(programs * layout.size, dtype=cfg.weight_dtype, device=device)
    by_program = stream.view(torch.uint8).view(programs, layout.size * element)
    scales = []
    for name in matrices:
        parts = []
        for matrix in matrices[name]:
            matrix = matrix.to(cfg.dtype)
            if cfg.weight_dtype != cfg.dtype:
                matrix, scale = quantize_rows(matrix)
                # The kernel halves the inputs of down (see there).
                scale = scale * 2 if name == "down" else scale
                scales.append(assign_rows(scale, programs, name == "head", layout.rows[name]))
            if name in PROJECTIONS:
                split = params.split[name]
                grouped = assign_rows(matrix, num_groups(split, programs), rows=layout.group_rows[name])
                parts.append(cut_parts(grouped, split, tiles["layer"].block_k, programs))
            elif name == "mlp":
                parts.append(cut_chunks(assign_rows(matrix, programs), tiles["mlp"].block_k))
            else:
                assigned = assign_rows(matrix, programs, True, layout.rows["head"])
                parts.append(cut_tiles(assigned, layout.tile_rows, tiles["head"].block_k))
        if parts:
            # gate and up go side by side within each chunk, so that one piece of the stream serves both.
            packed = torch.cat([part.view(torch.uint8) for part in parts], dim=2) if name == "mlp" else parts[0]
            packed = packed.reshape(programs, -1).view(torch.uint8)
            first = layout.offsets[name] * element
            by_program[:, first : first + packed.shape[1]] = packed
        elif cfg.weight_dtype != cfg.dtype:
            scales.append(torch.zeros(programs, layout.rows[name], device=device))
    cos, sin = rotary_tables(head, cfg.max_positions)
    biases = [w[f"{name}.bias"] for name in projections] if cfg.has_qkv_bias else []
    return PackedHead(
        stream=stream,
        scales=torch.cat(scales, dim=1).contiguous() if scales else torch.ones(1, device=device),
        row_ids=assign_rows(head.draft_to_target[order].int(), programs, True, layout.rows["head"]).contiguous(),
        embedding=head.embedding.to(cfg.dtype),
        norms={
            "in": w.get("input_layernorm.weight", empty),
            "hidden": w.get("hidden_norm.weight", empty),
            "post": w["post_attention_layernorm.weight"],
            "out": w.get("norm.weight", empty),
        },
        fc_bias=w["fc.bias"] if cfg.has_fc_bias else empty,
        qkv_bias=torch.cat(biases) if biases else empty,
        cos=cos,
        sin=sin,
        params=params,
        draft_vocab=head.draft_vocab,
    )


def rotary_tables(head: HeadWeights, num_positions: int) -> tuple[Tensor, Tensor]:
    """Cos and sin of every position of a KV cache and of the deepest tree above it: fp32 [positions, head_dim / 2]."""
    cos, sin = head.rotary.tables(num_positions + MAX_DEPTH)
    half = head.head_dim // 2
    return cos[:, :half].contiguous(), sin[:, :half].contiguous()


def allocate_workspace(cfg: DrafterConfig, params: LaunchParams, device: torch.device | str) -> dict[str, Tensor]:
    """Allocate what the kernel passes between phases, NaN at first; nothing grows with draft_vocab times nodes."""
    slots, programs, rows = cfg.num_slots, params.num_programs, block_rows(cfg)
    slot_rows = slots * MAX_NEW_TOKENS
    in_rows = slots * cfg.embed_rows + slot_rows
    candidates = cfg.tree.num_candidates
    group = cfg.num_heads // cfg.num_kv_heads
    per_unit = heads_per_attention_unit(group, cfg.head_dim)
    groups = slots * cfg.num_kv_heads * -(-group // per_unit)
    parts = max(programs, groups) * per_unit * MAX_NEW_TOKENS
    block_d = triton.next_power_of_2(cfg.head_dim)
    layout = OperandLayout.of(cfg)
    raw = (in_rows, cfg.hidden) if layout.raw_input else (1, 1)
    partial = max(
        num_groups(split, programs) * split * group_rows(cfg, name, split, programs)
        for name, split in params.split.items()
    )
    floats = {
        "partial": (partial, rows), "hidden": (slot_rows, cfg.hidden), "middle": (slot_rows, cfg.hidden),
        "qkv": (slot_rows, cfg.qkv_size),
        "squares_post": (programs, rows), "squares_out": (programs, rows),
        "scratch": (programs, rows, params.tiles["head"].block_n),
        "best_max": (programs, rows), "best_sum": (programs, rows), "score": (slots, candidates),
        "frontier_score": (slot_rows,), "part_stat": (2 * parts,), "part_acc": (parts * block_d,), "factor": (in_rows,),
    }  # fmt: skip
    ints = {
        "owner": (programs, cfg.max_k), "token": (slots, candidates), "parent": (slots, candidates),
        "node_of": (slots, candidates), "chosen": (slots, cfg.total_tokens), "frontier_candidate": (slot_rows,),
        "frontier_parent": (slot_rows,), "frontier_child": (slot_rows,), "chain": (2, slot_rows, MAX_DEPTH),
        "node_arrivals": (slots,), "barrier": (4,),
    }  # fmt: skip
    nan = float("nan")
    return {
        "x": _operands(cfg, layout, device),
        "x_raw": torch.full(raw, nan, dtype=cfg.dtype, device=device),
        **{name: torch.full(shape, nan, dtype=torch.float32, device=device) for name, shape in floats.items()},
        **{name: torch.zeros(shape, dtype=torch.int32, device=device) for name, shape in ints.items()},
        "best_key": empty_lists(programs, rows, cfg.max_k, device),
        "child_key": empty_lists(slot_rows, 1, cfg.max_k, device),
    }


@dataclass(frozen=True)
class OperandLayout:
    """Where the inputs of matrix products begin in one tensor, in stored elements."""

    offsets: dict[str, int]
    size: int
    raw_input: bool
    """EAGLE-1/2's embeddings and features in front of FP8 weights lie apart, in the model's type."""

    @classmethod
    def of(cls, cfg: DrafterConfig) -> OperandLayout:
        """``in``: embeddings, then features; ``fc``: taps (EAGLE-3) or fused features (EAGLE-1/2)."""
        rows = cfg.num_slots * MAX_NEW_TOKENS
        sizes = {
            "in": (cfg.num_slots * cfg.embed_rows + rows) * cfg.hidden,
            "fc": rows * (cfg.fc_in if cfg.kind == "eagle3" else cfg.hidden),
            "attn": rows * cfg.num_heads * cfg.head_dim, "post": rows * cfg.hidden, "mlp": rows * cfg.intermediate,
            "head": rows * cfg.hidden,
        }  # fmt: skip
        pairs = cfg.weight_dtype != cfg.dtype
        offsets, at = {}, 0
        for name, size in sizes.items():
            offsets[name] = at
            at += -(-size * (2 if pairs else 1) // 128) * 128
        return cls(offsets, at, pairs and cfg.kind == "eagle")


def _operands(cfg: DrafterConfig, layout: OperandLayout, device: torch.device | str) -> Tensor:
    if cfg.weight_dtype == cfg.dtype:
        return torch.full((layout.size,), float("nan"), dtype=cfg.dtype, device=device)
    # 0x7F is e4m3's NaN.
    return torch.full((layout.size,), 0x7F, dtype=torch.uint8, device=device).view(cfg.weight_dtype)


MAX_DEPTH = 16
"""Columns of the ancestor chains: a power of two above the largest depth."""


def kernel_constants(cfg: DrafterConfig, params: LaunchParams, draft_vocab: int) -> dict[str, Any]:
    """Compile-time constants of `persistent.draft_kernel`; ``draft_vocab`` counts the LM-head rows that are packed."""
    tiles, programs, rows = params.tiles, params.num_programs, block_rows(cfg)
    layout = StreamLayout.of(cfg, params, draft_vocab)
    separate = tap_segments(cfg)
    shapes: dict[str, int] = {}
    for name, tile in tiles.items():
        shapes |= {
            f"N_{name.upper()}": tile.block_n,
            f"K_{name.upper()}": tile.block_k,
            f"S_{name.upper()}": tile.stages,
        }
    for name in PROJECTIONS:
        shapes |= {f"SPLIT_{name.upper()}": params.split[name], f"G_{name.upper()}": layout.group_rows[name]}
    operands = {f"X_{name.upper()}": offset for name, offset in OperandLayout.of(cfg).offsets.items()}
    group = cfg.num_heads // cfg.num_kv_heads
    block_d = triton.next_power_of_2(cfg.head_dim)
    finished = triton.next_power_of_2(max(layout.rows["o"], layout.rows["qkv"]))
    return {
        "NUM_CTAS": programs, **merge_blocks(programs), "LISTS": len_lists(programs),
        "SLOTS": cfg.num_slots, "BLOCK_M": rows,
        "FUSED_EVERY_LEVEL": cfg.kind == "eagle", "HAS_FC": cfg.has_fc, "HAS_FC_BIAS": cfg.has_fc_bias,
        "HAS_QKV_BIAS": cfg.has_qkv_bias, "SCALED": cfg.weight_dtype != cfg.dtype, "HIDDEN": cfg.hidden,
        "TAPS": separate, "TAP_SIZE": cfg.feature_width // separate, "INTERMEDIATE": cfg.intermediate,
        "HEADS": cfg.num_heads, "KV_HEADS": cfg.num_kv_heads, "HEAD_DIM": cfg.head_dim, "EPS": cfg.norm_eps,
        "TOP_K": cfg.top_k, "MAX_K": cfg.max_k,
        "DEPTH": cfg.depth, "TOTAL": cfg.total_tokens, "MAX_DEPTH": MAX_DEPTH,
        "CANDIDATES": cfg.tree.num_candidates, "BLOCK_C": triton.next_power_of_2(cfg.tree.num_candidates),
        "BLOCK_T": max(16, triton.next_power_of_2(cfg.total_tokens)),
        "BLOCK_W": triton.next_power_of_2(cfg.tree.path_width), "EMBED_ROWS": cfg.embed_rows,
        "FEATURES": cfg.num_slots * cfg.embed_rows, "STREAM": layout.size,
        **{f"AT_{name.upper()}": layout.offsets[name] for name in ("qkv", "o", "mlp", "down", "head")},
        "SCALES": layout.scale_rows, "R_HIDDEN": layout.rows["o"], "R_QKV": layout.rows["qkv"],
        "R_MLP": layout.rows["mlp"], "R_HEAD": layout.rows["head"], "TILE_HEAD": layout.tile_rows,
        "BLOCK_HIDDEN": triton.next_power_of_2(cfg.hidden),
        "BLOCK_TAP": triton.next_power_of_2(cfg.feature_width // separate),
        "BLOCK_R": max(16, min(finished, 4096 // rows)), **shapes, **operands,
        "PART_KEYS": params.part_keys, "MAX_PARTS": 16, "QUERIES": 4,
        "BLOCK_KEYS": params.block_keys,
        "HEADS_PER_UNIT": heads_per_attention_unit(group, cfg.head_dim), "BLOCK_D": block_d,
        "BLOCK_HALF": max(16, block_d // 2),
    }  # fmt: skip


def compile_options(params: LaunchParams) -> dict[str, Any]:
    """What the compiler is told besides the constants."""
    return {"num_warps": params.num_warps, **({"maxnreg": params.max_registers} if params.max_registers else {})}


def tap_segments(cfg: DrafterConfig) -> int:
    """Segments in which the kernel can read the features: three equal taps, otherwise one piece."""
    return 3 if cfg.kind == "eagle3" and cfg.has_fc and cfg.feature_width % 3 == 0 else 1


def kernel_arguments(
    cfg: DrafterConfig, features: Tensor | tuple[Tensor, ...], packed: PackedHead, bufs: Buffers
) -> dict[str, Any]:
    """Run-time arguments of `persistent.draft_kernel`, by name."""
    taps, offsets = _tap_addresses(features)
    ws = bufs.workspace
    names = (
        "x", "x_raw", "partial", "hidden", "middle", "qkv", "squares_post", "squares_out", "scratch", "best_max",
        "best_sum", "score", "frontier_score", "part_stat", "part_acc", "factor",
        "best_key", "child_key", "owner", "token", "parent", "node_of", "chosen", "frontier_candidate",
        "frontier_parent", "frontier_child", "chain", "node_arrivals", "barrier",
    )  # fmt: skip
    return {
        "tap_ptr": taps, "tap_offset_1": offsets[0], "tap_offset_2": offsets[1],
        "stride_tap_slot": taps.stride(0), "stride_tap_row": taps.stride(1),
        "new_token_ptr": bufs.new_tokens, "num_new_ptr": bufs.num_new, "prefix_ptr": bufs.prefix,
        "active_slots_ptr": bufs.active_slots, "active_inverse_ptr": bufs.active_inverse,
        "active_count_ptr": bufs.active_count,
        "stream_ptr": packed.stream, "scale_ptr": packed.scales, "row_id_ptr": packed.row_ids,
        "embed_ptr": packed.embedding, "norm_in_ptr": packed.norms["in"], "norm_hidden_ptr": packed.norms["hidden"],
        "norm_post_ptr": packed.norms["post"], "norm_out_ptr": packed.norms["out"], "fc_bias_ptr": packed.fc_bias,
        "qkv_bias_ptr": packed.qkv_bias, "cos_ptr": packed.cos, "sin_ptr": packed.sin,
        "draft_vocab": cfg.draft_vocab, "stride_embed": packed.embedding.stride(0),
        "key_ptr": bufs.keys, "value_ptr": bufs.values,
        "stride_cache_slot": bufs.keys.stride(0), "stride_cache_head": bufs.keys.stride(1),
        **{f"{name}_ptr": ws[name] for name in names},
        "draft_tokens_ptr": bufs.draft_tokens, "parents_ptr": bufs.parents, "tree_mask_ptr": bufs.tree_mask,
        "position_ptr": bufs.tree_position_ids, "retrieve_ptr": bufs.retrieve_indices,
        "num_leaves_ptr": bufs.num_leaves,
    }  # fmt: skip


def _tap_addresses(features: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, tuple[int, int]]:
    """Turn concatenated or separate taps into one base tensor and the element offsets of the second and third tap."""
    if isinstance(features, Tensor):
        width = features.shape[-1]
        tap = width // 3
        return features, (tap, 2 * tap)
    first, second, third = features
    element = first.element_size()
    distances = [tap.data_ptr() - first.data_ptr() for tap in (second, third)]
    return first, (distances[0] // element, distances[1] // element)


def launch(cfg: DrafterConfig, features: Tensor | tuple[Tensor, ...], packed: PackedHead, bufs: Buffers) -> None:
    """Start the kernel: no allocation, no wait."""
    device = bufs.keys.device
    if packed.params.num_programs > max(1, chip_of(device).num_sms):
        raise DrafterError(
            f"{packed.params.num_programs} programs cannot be resident at once on {chip_of(device).num_sms} SMs; pack "
            "the head for this device."
        )
    cooperative = {"launch_cooperative_grid": True} if device.type == "cuda" else {}
    draft_kernel[(packed.params.num_programs,)](
        **kernel_arguments(cfg, features, packed, bufs),
        **kernel_constants(cfg, packed.params, packed.draft_vocab),
        **compile_options(packed.params),
        **cooperative,
    )


def check_finished(bufs: Buffers) -> None:
    """Wait for the last draft and raise `DrafterError` if its grid barrier timed out; the next draft starts afresh."""
    if int(bufs.workspace["barrier"][ERROR]):
        for name in ("barrier", "node_arrivals"):
            bufs.workspace[name].zero_()
        raise DrafterError(
            "The drafter's grid barrier timed out: not all programs were running at once, or one of them failed. The "
            "draft is undefined. Is another process using the GPU's SMs exclusively?"
        )
