"""Host side of the persistent drafter: what the kernel is handed, and the launch.

Everything that takes time or memory happens in `packed_head.pack_head` and `workspace.allocate_workspace`; `launch`
only starts the kernel, so it can be captured in a CUDA graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import DrafterError
from ..launches import Launches, count_launches
from .buffers import Buffers
from .dimensions import DrafterConfig
from .follow import UNIT_ROWS
from .kernels.ancestor_attention import KVCache
from .kernels.frontier import ROWS
from .kernels.gated_mlp import MlpShape
from .kernels.lm_topk import HeadTiles, Selection, TailRows, len_lists
from .kernels.packing import rows_per_program
from .kernels.persistent import Features, Grid, HeadShape, HeadTensors, Phases, StepInputs, draft_kernel
from .kernels.projections import Share
from .kernels.row_operands import RowShape
from .kernels.tree_build import TreeOutputs, TreeShape
from .launch_params import INTERPRETER, Chip, LaunchParams, block_rows
from .packed_head import PackedHead, StreamLayout, bias_layout
from .workspace import BUFFERS, OperandLayout, Workspace, attention_shape, has_pairs, tail_tiles

_WIDEST_PIECE = 16384


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


def kernel_constants(cfg: DrafterConfig, params: LaunchParams, draft_vocab: int) -> dict[str, Any]:
    """Compile-time constants of `persistent.draft_kernel`; ``draft_vocab`` counts the LM-head rows that are packed."""
    rows, programs = block_rows(cfg), params.num_programs
    layout = params.layout
    stream = StreamLayout.of(cfg, layout, draft_vocab)
    finished = 1 << (max(stream.rows.o, stream.rows.qkv) - 1).bit_length()
    sums = max(16, min(finished, 4096 // rows))
    segments, scaled, tiles = tap_segments(cfg), has_pairs(cfg), params.tiles
    return {
        "HEAD": HeadShape(
            cfg.kind == "eagle", cfg.has_fc, cfg.has_fc_bias, cfg.has_qkv_bias, scaled, cfg.hidden, cfg.intermediate,
            cfg.num_heads * cfg.head_dim, cfg.feature_width, cfg.has_o_bias, cfg.has_mlp_bias,
            cfg.norm_before_residual, cfg.norm_output, bias_layout(cfg),
        ),
        "PHASES": Phases(
            row=RowShape(cfg.hidden, eps=cfg.norm_eps),
            taps=RowShape(cfg.feature_width // segments, segments, cfg.norm_eps, cfg.tap_norms),
            layer=tiles["layer"],
            layer_chunk=layout.chunks["layer"],
            sum_hidden=Share(cfg.hidden, stream.rows.o, sums),
            sum_qkv=Share(cfg.qkv_size, stream.rows.qkv, sums),
            attention=attention_shape(cfg, params),
            mlp=MlpShape(
                cfg.hidden, cfg.intermediate, stream.rows.mlp, layout.chunks["mlp"], scaled, cfg.activation,
                cfg.has_mlp_bias,
            ),
            mlp_tile=tiles["mlp"],
            head=HeadTiles(
                layout.head_rows, stream.rows.head, cfg.hidden, layout.chunks["head"], scaled,
                rows_per_program(cfg.draft_vocab, programs) > min(layout.head_rows, tiles["head"].block_n),
                tiles["head"],
            ),
            select=Selection.of(cfg.top_k, int(ROWS.value), rows, programs),
            tree=TreeShape(cfg.tree.num_candidates, cfg.total_tokens, cfg.tree.path_width),
            gather=1 if rows == int(ROWS.value) else max(1, min(8, 16384 >> (cfg.hidden - 1).bit_length())),
            tail=tail_tiles(cfg, params),
            tail_units=cfg.tail_rows // UNIT_ROWS,
        ),
        "STREAM": stream,
        "OPERANDS": OperandLayout.of(cfg),
        "GRID": Grid(programs, len_lists(programs), cfg.num_slots, cfg.depth, cfg.embed_rows),
    }  # fmt: skip


def compile_options(params: LaunchParams) -> dict[str, Any]:
    """Options of the compiler, besides the constants."""
    return {"num_warps": params.num_warps, **({"maxnreg": params.max_registers} if params.max_registers else {})}


def tap_segments(cfg: DrafterConfig) -> int:
    """Segments in which the kernel reads the features of `fc`: as its RMSNorms cut them, else three equal taps.

    Where three do not divide them, as few equal pieces as hold rows that a program can take at once.
    """
    width = cfg.feature_width
    if cfg.kind == "eagle" or not cfg.has_fc:
        return 1
    if cfg.tap_norms > 1:
        return cfg.tap_norms
    if width % 3 == 0:
        return 3
    return next(count for count in range(1, width + 1) if width % count == 0 and width // count <= _WIDEST_PIECE)


def kernel_arguments(
    cfg: DrafterConfig, features: Tensor | tuple[Tensor, ...], packed: PackedHead, bufs: Buffers
) -> dict[str, Any]:
    """Run-time arguments of `persistent.draft_kernel`, by name."""
    taps, offsets = _tap_addresses(features)
    norms, tails = packed.norms, bufs.tails
    return {
        "features": Features(taps, taps.stride(0), taps.stride(1)),
        "tap_offset_1": offsets[0],
        "tap_offset_2": offsets[1],
        "step": StepInputs(
            bufs.new_tokens, bufs.num_new, bufs.prefix, bufs.active_slots, bufs.active_inverse, bufs.active_count
        ),
        "head": HeadTensors(
            packed.stream, packed.scales, packed.row_ids, packed.embedding, norms["in"], norms["hidden"],
            norms["post"], norms["out"], packed.biases, norms["taps"], packed.cos, packed.sin,
            norms["heads"], cfg.draft_vocab, packed.embedding.stride(0),
        ),
        "cache": KVCache(bufs.keys, bufs.values, bufs.keys.stride(0), bufs.keys.stride(1)),
        "ws": Workspace(*(bufs.workspace[buffer.name] for buffer in BUFFERS)),
        "out": TreeOutputs(
            bufs.draft_tokens, bufs.parents, bufs.tree_mask, bufs.tree_position_ids, bufs.retrieve_indices,
            bufs.num_leaves,
        ),
        "tails": None if tails is None else TailRows(tails.rows, tails.scales, tails.ids, tails.sizes),
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
    device, params = bufs.keys.device, packed.launches.get(cfg)
    if params.num_programs > max(1, chip_of(device).num_sms):
        raise DrafterError(
            f"{params.num_programs} programs cannot be resident at once on {chip_of(device).num_sms} SMs; pack "
            "the head for this device."
        )
    count_launches(Launches([packed.launches.is_tuned(cfg)]))
    cooperative = {"launch_cooperative_grid": True} if device.type == "cuda" else {}
    draft_kernel[(params.num_programs,)](
        **kernel_arguments(cfg, features, packed, bufs),
        **kernel_constants(cfg, params, packed.draft_vocab),
        **compile_options(params),
        **cooperative,
    )
