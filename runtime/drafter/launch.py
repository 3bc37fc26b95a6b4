"""Draft trees from buffers into buffers: `launch_drafter`, what has to run before it, and the kernel's launch.

The persistent Triton kernel and its PyTorch twin share configuration, weights, buffers and results; the caller says
which (``backend``), and nothing falls back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from ..errors import DrafterError, UsageError, check_choice, misfit
from ..ops import Launches, Ops, count_launches
from ..settings import explain_unknown
from ..tree import layout_tree
from .buffers import BLANK, Buffers, buffer_layout, check_ids, check_room
from .dimensions import DrafterConfig, check_head_fits
from .kernels.ancestor_attention import DraftCache
from .kernels.gated_mlp import MlpShape
from .kernels.lm_topk import HeadTiles, Selection, len_lists
from .kernels.packing import rows_per_program
from .kernels.pair_rows import norm_rows, rotate_append
from .kernels.persistent import (
    DraftHeadShape,
    DraftPlan,
    Features,
    Grid,
    HeadTensors,
    StepInputs,
    draft_kernel,
    is_interpreted,
)
from .kernels.projections import ProgramOutputs
from .kernels.row_operands import RowShape
from .kernels.tree_build import TreeBounds, TreeOutputs
from .launch_params import LaunchParams, block_rows, chip_of, padded_slots
from .packing import PackedHead, StreamLayout, Weights, bias_layout
from .reference import cache_row, draft_ref, fuse_features
from .weights import HeadWeights
from .workspace import BUFFERS, OperandLayout, Workspace, attention_shape

_WIDEST_PIECE = 16384
BACKENDS = ("triton", "reference")
Taps = Tensor | Sequence[Tensor]
"""The target's features: one tensor, or three taps."""
DraftFunction = Callable[[DrafterConfig, Tensor, HeadWeights, Buffers], None]
"""Drafts as `reference.draft_ref` does: from features [slots, new, feature_width], a head and the inputs of buffers,
trees of the active slots into the outputs of these buffers."""
Backend = str | DraftFunction


@explain_unknown({})
def launch_drafter(
    cfg: DrafterConfig, X: Taps | Mapping[str, Tensor], weights: Weights, bufs: Buffers, backend: Backend = "triton"
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draft the trees of all active slots.

    ``X``: the target's features of the new tokens, [slots, n, feature_width], of n up to 64 at most 16 in use; or three
    taps [slots, n, target hidden] of equal strides; or a dict of X_concat, or X_low, X_mid, X_high. ``bufs``: the other
    inputs (`Buffers`), the KV cache, which gains the new pairs, and the outputs (``bufs.drafted``), of which are also
    returned: draft_tokens int64 [slots, total], retrieve_indices int64 [slots, total, depth + 2], tree_mask bool
    [slots, 1, total, total], tree_position_ids int64 [slots, total]; inactive slots are -1 and 0.

    "triton" neither allocates nor waits for the device and can be captured in a CUDA graph. "reference" is plain
    PyTorch and waits; a `DraftFunction` does what it does. Raises `UsageError` for features, weights or buffers of
    another configuration, fewer features than new tokens (as `Buffers.set_step` wrote them) and an unknown backend;
    `DrafterError` where the kernel cannot run, and for a `DraftFunction` that writes no tree.
    """
    if not callable(backend):
        check_choice("backend", backend, BACKENDS)
    _check_fits(cfg, weights, bufs)
    if isinstance(X, Mapping):
        X = _named_features(X)
    taps = _check_features(cfg, X)
    if taps[0].device != bufs.keys.device:
        raise UsageError(f"Features are on {taps[0].device}, the buffers on {bufs.keys.device}.")
    if backend == "triton":
        if weights.packed is None:
            raise DrafterError("backend='triton' needs packed weights: Weights.pack(head, cfg).")
        if weights.packed.launches(cfg)[0] != bufs.params:
            raise DrafterError("backend='triton' needs the workspace of these weights: allocate_buffers(cfg, weights).")
    if bufs.max_new_tokens() > taps[0].shape[1]:
        raise UsageError(f"A slot has {bufs.max_new_tokens()} new tokens, but features of {taps[0].shape[1]}.")
    run_draft(cfg, X, weights, bufs, backend)
    return bufs.draft_tokens, bufs.retrieve_indices, bufs.tree_mask, bufs.tree_position_ids


def run_draft(cfg: DrafterConfig, X: Taps, weights: Weights, bufs: Buffers, backend: Backend) -> None:
    """Draft as `launch_drafter` does, without its checks."""
    if backend == "triton":
        assert weights.packed is not None
        launch(cfg, X, weights.packed, bufs)
        return
    draft, cfg = backend if callable(backend) else draft_ref, cfg.with_tree(bufs.tree)
    draft(cfg, X if isinstance(X, Tensor) else torch.cat(tuple(X), -1), weights.first_rows(cfg.draft_vocab), bufs)
    if callable(backend):
        _check_drafted(cfg, bufs)


def _check_drafted(cfg: DrafterConfig, bufs: Buffers) -> None:
    """Raise `DrafterError` where a `DraftFunction` wrote no tree: the walk over it might not end."""
    slots = bufs.active_slots[: int(bufs.active_count)].long()
    tokens, parents = bufs.draft_tokens[slots], bufs.parents[slots]
    node = torch.arange(tokens.shape[1], device=tokens.device)
    wrong = torch.where(node == 0, parents != -1, (parents < 0) | (parents >= node))
    wrong |= (tokens < 0) | (tokens >= cfg.target_vocab)
    wrong[:, :1] |= tokens[:, :1] != bufs.new_tokens[slots].gather(1, bufs.num_new[slots, None].long() - 1)
    if not wrong.any():
        tree = layout_tree(tokens, parents, cfg.tree.path_width)
        wrong = bufs.tree_position_ids[slots] != tree.tree_position_ids
        wrong |= (bufs.tree_mask[slots] != tree.tree_mask)[:, 0].any(-1)
    for place, number in wrong.nonzero().tolist():
        found = f"node {number} has token {int(tokens[place, number])} and parent {int(parents[place, number])}"
        nodes = f"the newest token as the root (parent -1), then ids below {cfg.target_vocab} behind their parents"
        expected = f"Expected {nodes}, and mask and positions as tree.layout_tree gives them."
        raise DrafterError(f"The drafting function wrote no tree: slot {int(slots[place])}, {found}. {expected}")


@explain_unknown({})
def allocate_buffers(cfg: DrafterConfig, weights: Weights, cache: tuple[Tensor, Tensor] | None = None) -> Buffers:
    """Allocate everything a draft with these weights writes, the kernel's workspace included when they are packed.

    ``cache``: keys and values, each [slots, kv_heads, positions, head_dim], to use instead of new ones; other buffers
    may share them. Raises `UsageError`, with packed weights, for a configuration outside the kernel's limits.
    """
    params = None if weights.packed is None else weights.packed.launches(cfg)[0]
    shared = {} if cache is None else {"keys": cache[0], "values": cache[1]}
    return Buffers.allocate(cfg, weights.head, params, shared)


@explain_unknown({})
def prefill_drafter(
    cfg: DrafterConfig, X: Taps, next_tokens: Tensor, weights: Weights, bufs: Buffers, slot: int, start: int = 0
) -> None:
    """Fill a slot's KV cache with a prompt's pairs, in chunks.

    ``X`` [seq, feature_width] of any float type, or three taps side by side; ``next_tokens`` int64 [seq]: the token
    after each feature; pairs take the positions from ``start`` on. Waits for the device. Raises `UsageError` when they
    and a tree do not fit, and for other shapes, slots and token ids.
    """
    _check_fits(cfg, weights, bufs)
    X = X if isinstance(X, Tensor) else torch.cat(tuple(X), -1)
    if not 0 <= slot < cfg.num_slots:
        raise UsageError(f"Slot {slot} is not among the {cfg.num_slots} of this configuration (0 is the first).")
    if X.shape != (len(next_tokens), cfg.feature_width) or next_tokens.dim() != 1 or next_tokens.is_floating_point():
        expected = f"features [seq, {cfg.feature_width}], one tensor or three taps, and int64 next tokens [seq]"
        found = f"{tuple(X.shape)} and {next_tokens.dtype} {tuple(next_tokens.shape)}"
        raise UsageError(f"A prompt has {expected}; got {found}.")
    check_room(slot, start, len(next_tokens), cfg)
    head, device = weights.head, bufs.keys.device
    next_tokens = next_tokens.to(device, torch.int64)
    check_ids(slot, next_tokens.tolist(), cfg.target_vocab)
    rows = torch.arange(start, start + len(next_tokens), dtype=torch.int32, device=device)
    chunk = 1024
    for features, tokens, at in zip(X.split(chunk), next_tokens.split(chunk), rows.split(chunk), strict=True):
        if len(tokens):
            slots = torch.tensor([slot], dtype=torch.int32, device=device)
            features = features.to(device, head.dtype)
            write_pairs(head, features, tokens, at, at, slots, bufs)


def write_pairs(
    head: HeadWeights, features: Tensor, tokens: Tensor, positions: Tensor, rows: Tensor, slots: Tensor, bufs: Buffers
) -> None:
    """Compute the keys and values of pairs of one slot, without attention or MLP, into the drafter's cache.

    A head has one layer, so a pair's key depends on the pair alone. ``features`` [pairs, feature_width] of the head's
    type; ``tokens`` [pairs] the token after each; ``positions``, ``rows`` int32 [pairs]: RoPE position, and position to
    cache it at, -1 for none; ``slots`` int32 [1]. Waits for nothing with kernels.
    """
    ops, w, hidden = Ops.for_device(head.device), head.tensors, head.hidden
    embedded = torch.index_select(head.embedding, 0, tokens)
    if head.kind == "eagle3":
        inputs = torch.empty((len(embedded), 2 * hidden), dtype=head.dtype, device=head.device)
        ops(norm_rows)(embedded, w["input_layernorm.weight"], head.norm_eps, inputs[:, :hidden])
        ops(norm_rows)(fuse_features(head, features), w["hidden_norm.weight"], head.norm_eps, inputs[:, hidden:])
    else:
        inputs = head.project(torch.cat((embedded, features), -1), "fc")
    weight, bias = head.kv_projection
    keys, values = bufs.keys, bufs.values
    if (num_rows := keys.shape[2]) < bufs.cfg.max_positions:
        last = rows.view(len(slots), -1).amax(1, keepdim=True).expand(len(slots), len(rows) // len(slots)).flatten()
        # Of two positions with one row the later one stays.
        is_kept = (rows > last - (num_rows - head.window_sinks)) | (rows < head.window_sinks)
        rows = torch.where(is_kept & (rows >= 0), cache_row(rows, num_rows, head.window_sinks), -1)
    ops(rotate_append)(
        inputs @ weight, bias, head.head_norms, head.norm_eps, bufs.tables, positions, slots, rows, keys, values
    )


def _named_features(X: Mapping[str, Tensor]) -> Taps:
    if X.keys() == {"X_concat"}:
        return X["X_concat"]
    if X.keys() == {"X_low", "X_mid", "X_high"}:
        return X["X_low"], X["X_mid"], X["X_high"]
    raise misfit("features", "X_concat, or X_low, X_mid and X_high", [*X])


def _check_features(cfg: DrafterConfig, X: Taps) -> Sequence[Tensor]:
    """Refuse features of another configuration; returns the taps, one or three."""
    separate = not isinstance(X, Tensor)
    taps = tuple(X) if isinstance(X, (tuple, list)) else (X,)
    forms = {(tap.shape, tap.stride(), tap.dtype, tap.device) for tap in taps if isinstance(tap, Tensor)}
    if len(forms) != 1 or len(taps) != (3 if separate else 1) or not all(isinstance(tap, Tensor) for tap in taps):
        raise misfit("features", "one tensor, or three of one shape, layout and type on one device", type(X).__name__)
    if separate and not (cfg.kind == "eagle3" and cfg.has_fc and cfg.tap_norms in (0, 1, 3)):
        raise UsageError("Only an EAGLE-3 head with fc takes three taps; this one takes one tensor of features.")
    shape, width = taps[0].shape, cfg.feature_width // len(taps)
    slots, largest = buffer_layout(cfg)["new_tokens"][0]
    if len(shape) != 3 or shape[0] != slots or not 1 <= shape[1] <= largest or shape[2] != width:
        expected = f"[{slots} slots, 1 to {largest} new tokens, {cfg.feature_width}]"
        raise misfit("features", expected, [tuple(tap.shape) for tap in taps])
    if any(tap.dtype != cfg.dtype or tap.stride(-1) != 1 for tap in taps):
        raise UsageError(f"Features must be {cfg.dtype} with contiguous rows; got {taps[0].dtype}, {taps[0].stride()}.")
    return taps


def _check_fits(cfg: DrafterConfig, weights: Weights, bufs: Buffers) -> None:
    """Refuse weights and buffers of another configuration: the kernel would read and write out of bounds."""
    for name, given, kind in (("cfg", cfg, DrafterConfig), ("weights", weights, Weights), ("bufs", bufs, Buffers)):
        if not isinstance(given, kind):
            raise misfit(name, kind.__name__, type(given).__name__)
    check_head_fits(cfg, weights.head)
    if bufs.cfg != cfg:
        different = [name for name, value in vars(cfg).items() if getattr(bufs.cfg, name) != value]
        raise UsageError(f"The buffers are of other {', '.join(different)}: take allocate_buffers(cfg, weights).")
    device = weights.head.device
    for name, (shape, dtype) in buffer_layout(cfg, bufs.tree).items():
        tensor = getattr(bufs, name)
        if (tensor.shape, tensor.dtype, tensor.device) != (shape, dtype, device) or not tensor.is_contiguous():
            found = f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}, strides {tensor.stride()}"
            raise misfit(name, f"{dtype} {list(shape)}, contiguous, on {device}", found)
    if weights.head.draft_vocab < cfg.draft_vocab:
        raise UsageError(f"draft_vocab = {cfg.draft_vocab}, but the head has {weights.head.draft_vocab} rows.")
    packed = weights.packed
    if packed is not None and packed.stream.dtype != cfg.weight_dtype:
        expected = f"{packed.stream.dtype}, as the weights are packed, or take Weights.pack(head, cfg)"
        raise misfit("weight_dtype", expected, cfg.weight_dtype)


def kernel_constants(cfg: DrafterConfig, params: LaunchParams, draft_vocab: int) -> dict[str, Any]:
    """Return constants of `persistent.draft_kernel`; ``draft_vocab`` counts the LM-head rows that are packed."""
    rows, programs, layout = block_rows(cfg), params.num_programs, params.layout
    stream = StreamLayout.of(cfg, layout, draft_vocab)
    segments, new_width = tap_segments(cfg), buffer_layout(cfg)["new_tokens"][0][1]
    outputs = 1 << (max(stream.rows.o, stream.rows.qkv) - 1).bit_length()
    outputs = max(16, min(outputs, 4096 // rows))
    chunk, tile = layout.chunks["mlp"], params.tiles["mlp"]
    gates = cfg.hidden, cfg.intermediate, stream.rows.mlp
    plan = DraftPlan(
        head=_head_shape(cfg),
        grid=Grid(programs, len_lists(programs), padded_slots(cfg), cfg.embed_rows, new_width),
        stream=stream,
        operands=OperandLayout.of(cfg),
        row=RowShape(cfg.hidden, eps=cfg.norm_eps),
        taps=RowShape(cfg.feature_width // segments, segments, cfg.norm_eps, cfg.tap_norms),
        layer=params.tiles["layer"],
        layer_chunk=layout.chunks["layer"],
        sum_hidden=ProgramOutputs(cfg.hidden, stream.rows.o, outputs, cfg.has_fp8),
        sum_qkv=ProgramOutputs(cfg.qkv_size, stream.rows.qkv, outputs, cfg.has_fp8),
        attention=attention_shape(cfg, params),
        mlp=MlpShape(*gates, chunk, cfg.has_fp8, cfg.activation, cfg.has_mlp_bias, tile),
        lm_head=_head_tiles(cfg, params, stream.rows.head),
        select=Selection.of(cfg.top_k, padded_slots(cfg), rows, programs),
        tree=TreeBounds.of(cfg.tree),
        gather=1 if cfg.num_slots == 1 else max(1, min(8, 16384 >> (cfg.hidden - 1).bit_length())),
    )
    return {"PLAN": plan}


def _head_shape(cfg: DrafterConfig) -> DraftHeadShape:
    common = [each.name for each in fields(DraftHeadShape) if hasattr(cfg, each.name)]
    return DraftHeadShape(
        fused_every_level=cfg.kind == "eagle",
        scaled=cfg.has_fp8,
        attention=cfg.num_heads * cfg.head_dim,
        biases=bias_layout(cfg),
        **{name: getattr(cfg, name) for name in common},
    )


def _head_tiles(cfg: DrafterConfig, params: LaunchParams, rows: int) -> HeadTiles:
    layout, tile = params.layout, params.tiles["head"]
    has_several = rows_per_program(cfg.draft_vocab, params.num_programs) > min(layout.head_rows, tile.block_n)
    return HeadTiles(layout.head_rows, rows, cfg.hidden, layout.chunks["head"], cfg.has_fp8, has_several, tile)


def compile_options(params: LaunchParams) -> dict[str, Any]:
    """Return options of the compiler, besides the constants."""
    return {"num_warps": params.num_warps, **({"maxnreg": params.max_registers} if params.max_registers else {})}


def tap_segments(cfg: DrafterConfig) -> int:
    """Cut the features of `fc` into segments that the kernel reads: as its RMSNorms cut them, else three equal taps.

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


def kernel_arguments(cfg: DrafterConfig, features: Taps, packed: PackedHead, bufs: Buffers) -> dict[str, Any]:
    """Return run-time arguments of `persistent.draft_kernel`, by name."""
    if isinstance(features, Tensor):
        taps, tap_width = features, features.shape[-1] // 3
        offsets = [tap_width, 2 * tap_width]
    else:
        taps = features[0]
        offsets = [(tap.data_ptr() - taps.data_ptr()) // taps.element_size() for tap in features[1:]]
    parts = {name: getattr(packed, name) for name in ("stream", "scales", "row_ids", "embedding", "biases")}
    norms = {f"norm_{name}": norm for name, norm in packed.norms.items()}
    cos, sin = bufs.tables
    stride = packed.embedding.stride(0)
    return {
        "features": Features(taps, taps.stride(0), taps.stride(1)),
        "tap_offset_1": offsets[0],
        "tap_offset_2": offsets[1],
        "num_slots": cfg.num_slots,
        "depth": bufs.tree.depth,
        "total_tokens": bufs.tree.total_tokens,
        "step": StepInputs(*(getattr(bufs, name) for name in StepInputs._fields)),
        "head": HeadTensors(**parts, **norms, cos=cos, sin=sin, draft_vocab=cfg.draft_vocab, stride_embedding=stride),
        "cache": DraftCache(bufs.keys, bufs.values, bufs.keys.stride(0), bufs.keys.stride(1)),
        "ws": Workspace(*(bufs.workspace[buffer.name] for buffer in BUFFERS)),
        "out": TreeOutputs(*(getattr(bufs, name) for name in BLANK)),
    }


def launch(cfg: DrafterConfig, features: Taps, packed: PackedHead, bufs: Buffers) -> None:
    """Start the kernel: no allocation, no wait. Raises `DrafterError` where it cannot run."""
    device = bufs.keys.device
    (params, is_tuned), chip = packed.launches(cfg), chip_of(device)
    if params.num_programs > max(1, chip.num_sms):
        raise DrafterError(
            f"{params.num_programs} programs do not fit on {chip.num_sms} SMs: pack the head on this device."
        )
    if not (device.type == "cuda" or is_interpreted()):
        raise DrafterError(
            f"backend='triton' needs an NVIDIA GPU, the buffers are on {device}. Use backend='reference', or "
            "TRITON_INTERPRET=1 in the environment to run it in Triton's interpreter, which computes bfloat16 wrongly."
        )
    count_launches(Launches([((chip, cfg), is_tuned)]))
    cooperative = {"launch_cooperative_grid": True} if device.type == "cuda" else {}
    draft_kernel[(params.num_programs,)](
        **kernel_arguments(cfg, features, packed, bufs),
        **kernel_constants(cfg, params, packed.draft_vocab),
        **compile_options(params),
        **cooperative,
    )
