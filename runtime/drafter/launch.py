"""Draft trees from buffers into buffers: `launch_drafter`, and what has to run before it.

The persistent Triton kernel and its PyTorch twin share configuration, weights, buffers and results; the caller says
which (``backend``), and nothing falls back. Kernels are imported only when asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import DrafterError, UsageError, check_choice
from ..ops import Ops
from .buffers import Buffers, check_ids, check_room
from .checks import check_features, check_parts, check_step
from .dimensions import DrafterConfig, check_kernel_limits
from .kernels.grid_barrier import ERROR
from .kernels.pair_rows import add_norm, rotate_append
from .packed_weights import Weights
from .reference import draft_ref
from .weights import HeadWeights

BACKENDS = ("triton", "reference")

DraftFunction = Callable[[DrafterConfig, Tensor, HeadWeights, Buffers], None]
"""Drafts as `reference.draft_ref` does: from features [slots, new, feature_width], a head and the inputs of buffers,
trees of the active slots into the outputs of these buffers."""


def launch_drafter(
    cfg: DrafterConfig,
    X: Tensor | Sequence[Tensor],
    weights: Weights,
    bufs: Buffers,
    backend: str | DraftFunction = "triton",
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Draft the trees of all active slots.

    ``X``: the target's features of the new tokens, [slots, up to 16, feature_width], or three taps of [slots, up to 16,
    target hidden] with equal strides. ``bufs`` holds the other inputs (`Buffers`), the KV cache, which gains the new
    pairs, and the outputs, which are also returned: draft_tokens int64 [slots, total], retrieve_indices int64 [slots,
    total, depth + 2], tree_mask bool [slots, 1, total, total], tree_position_ids int64 [slots, total]; inactive slots
    are -1 and 0.

    "triton" neither allocates nor waits for the device and can be captured in a CUDA graph. "reference" is plain
    PyTorch and waits; a `DraftFunction` does what it does. Raises `UsageError` for features, weights or buffers that
    are not of this configuration, for a step that does not fit (where the host can know it: written by
    `Buffers.set_step`, or lying on the CPU), and an unknown backend; `DrafterError` where the kernel cannot run.
    """
    if not callable(backend):
        check_choice("backend", backend, BACKENDS)
    check_parts(cfg, weights, bufs)
    taps = check_features(cfg, X)
    if taps[0].device != bufs.keys.device:
        raise UsageError(f"Features are on {taps[0].device}, the buffers on {bufs.keys.device}.")
    if weights.head.draft_vocab < cfg.draft_vocab:
        raise UsageError(f"draft_vocab = {cfg.draft_vocab}, but the head has {weights.head.draft_vocab} rows.")
    if backend == "triton" and weights.packed is None:
        raise DrafterError("backend='triton' needs packed weights: Weights.pack(head, cfg).")
    if backend == "triton" and not bufs.workspace:
        raise DrafterError("backend='triton' needs a workspace: allocate_buffers(cfg, weights).")
    if backend != "triton" or bufs.keys.device.type == "cpu":
        check_step(taps[0].shape[1], bufs)
    elif bufs.most_new_tokens() > taps[0].shape[1]:
        raise UsageError(f"A slot has {bufs.most_new_tokens()} new tokens, but features of {taps[0].shape[1]}.")
    run_draft(cfg, X, weights, bufs, backend)
    return bufs.draft_tokens, bufs.retrieve_indices, bufs.tree_mask, bufs.tree_position_ids


def run_draft(
    cfg: DrafterConfig, X: Tensor | Sequence[Tensor], weights: Weights, bufs: Buffers, backend: str | DraftFunction
) -> None:
    """Draft as `launch_drafter` does, from parts that are known to fit each other."""
    if backend == "triton":
        _launch_triton(cfg, X, weights, bufs)
        return
    draft = backend if callable(backend) else draft_ref
    draft(cfg, X if isinstance(X, Tensor) else torch.cat(tuple(X), -1), weights.first_rows(cfg.draft_vocab), bufs)


def allocate_buffers(cfg: DrafterConfig, weights: Weights, cache: tuple[Tensor, Tensor] | None = None) -> Buffers:
    """Allocate everything a draft with these weights writes, the kernel's workspace included when they are packed.

    ``cache``: as in `Buffers.allocate`.
    """
    device, params = weights.head.device, None if weights.packed is None else weights.packed.launches.get(cfg)
    bufs = Buffers.allocate(cfg, device, cache)
    if params is not None:
        from .workspace import allocate_workspace

        check_kernel_limits(cfg)
        bufs.workspace.update(allocate_workspace(cfg, params, device))
    if cfg.tail_rows:
        from .workspace import allocate_tails

        bufs = replace(bufs, tails=allocate_tails(cfg, params, device))
    return bufs


def set_tail(cfg: DrafterConfig, weights: Weights, bufs: Buffers, slot: int, token_ids: Sequence[int]) -> None:
    """Let token ids of a sequence join its slot's draft vocabulary, in the place of what joined it before.

    Those that the base holds or the head was never trained on do not; of more than ``follow.most`` the best ranked
    (`drafter.follow`). Raises `UsageError` for a head without rows to follow with, and for slots and ids out of range.
    """
    follow = weights.head.follow
    if follow is None or bufs.tails is None:
        raise UsageError("This head has no rows that could join a draft vocabulary: follow is None.")
    _check_slot(cfg, slot)
    check_ids(slot, token_ids, cfg.target_vocab)
    bufs.tails.set_slot(slot, follow.tail_of(token_ids), follow)
    if bufs.tails.rows is not None:
        from .kernels.tail_rows import gather_rows

        gather_rows(follow, bufs.tails)


def check_finished(bufs: Buffers) -> None:
    """Wait for the device and raise `DrafterError` if a draft did not finish properly."""
    if bufs.workspace and int(bufs.workspace["barrier"][ERROR]):
        raise timed_out(bufs)


def timed_out(bufs: Buffers) -> DrafterError:
    """Make a grid barrier that timed out usable again, and return the error to raise."""
    for name in ("barrier", "node_arrivals"):
        if name in bufs.workspace:
            bufs.workspace[name].zero_()
    return DrafterError(
        "The drafter's grid barrier timed out: not all its programs were running at once, or one of them failed. The "
        "draft is undefined. Is another process using the GPU's SMs exclusively?"
    )


def prefill_drafter(
    cfg: DrafterConfig,
    X: Tensor | Sequence[Tensor],
    next_tokens: Tensor,
    weights: Weights,
    bufs: Buffers,
    slot: int,
    start: int = 0,
) -> None:
    """Fill a slot's KV cache with a prompt's pairs, in chunks.

    ``X`` [seq, feature_width] of any float type, or three taps side by side; ``next_tokens`` int64 [seq]: the token
    after each feature; pairs take the positions from ``start`` on. Waits for the device. Raises `UsageError` when they
    and a tree do not fit, and for other shapes, slots and token ids.
    """
    check_parts(cfg, weights, bufs)
    if isinstance(X, (tuple, list)) and len(X) == 3 and all(isinstance(tap, Tensor) for tap in X):
        X = torch.cat(tuple(X), -1)
    _check_slot(cfg, slot)
    given = tuple(tuple(each.shape) if isinstance(each, Tensor) else type(each).__name__ for each in (X, next_tokens))
    are_ids = isinstance(next_tokens, Tensor) and not next_tokens.is_floating_point()
    num_pairs = len(next_tokens) if are_ids else 0
    if not are_ids or not isinstance(X, Tensor) or given != ((num_pairs, cfg.feature_width), (num_pairs,)):
        raise UsageError(
            f"A prompt has features [seq, {cfg.feature_width}], one tensor or three taps, and int64 next tokens [seq]; "
            f"got {given[0]} and {given[1]}."
        )
    check_room(slot, start, len(next_tokens), bufs.tree_rows, bufs.keys.shape[2])
    head, device = weights.head, bufs.keys.device
    next_tokens = next_tokens.to(device, torch.int64)
    check_ids(slot, next_tokens.tolist(), cfg.target_vocab)
    tables = head.rotary_halves(cfg.max_positions, cfg.num_tokens)
    rows = torch.arange(start, start + len(next_tokens), dtype=torch.int32, device=device)
    chunk = 1024
    for features, tokens, at in zip(X.split(chunk), next_tokens.split(chunk), rows.split(chunk), strict=True):
        if len(tokens):
            slots = torch.tensor([slot], dtype=torch.int32, device=device)
            features = features.to(device, head.dtype)
            write_pairs(Ops.for_device(device), head, features, tokens, at, at, slots, tables, bufs)


def write_pairs(
    ops: Ops,
    head: HeadWeights,
    features: Tensor,
    next_tokens: Tensor,
    positions: Tensor,
    rows: Tensor,
    slots: Tensor,
    tables: tuple[Tensor, Tensor],
    bufs: Buffers,
) -> None:
    """Compute the keys and values of pairs of one slot, without attention or MLP, into the drafter's cache.

    A head has one layer, so a pair's key depends on the pair alone.

    ``features`` [pairs, feature_width] of the head's type; ``next_tokens`` [pairs] the token after each;
    ``positions``, ``rows`` int32 [pairs]: RoPE position, and row of the cache, -1 for none; ``slots`` int32 [1];
    ``tables`` cos and sin, each fp32 [positions, head_dim / 2]. Waits for nothing with kernels.
    """
    w, hidden = head.tensors, head.hidden
    embedded = torch.index_select(head.embedding, 0, next_tokens)
    if head.kind == "eagle3":
        inputs = torch.empty((len(embedded), 2 * hidden), dtype=head.dtype, device=head.device)
        ops(add_norm)(embedded, None, w["input_layernorm.weight"], head.norm_eps, inputs[:, :hidden])
        fused = _fuse(ops, head, features)
        ops(add_norm)(fused, None, w["hidden_norm.weight"], head.norm_eps, inputs[:, hidden:])
    else:
        inputs = F.linear(torch.cat((embedded, features), -1), w["fc.weight"], w.get("fc.bias"))
    weight, bias = head.kv_projection
    ops(rotate_append)(
        inputs @ weight, bias, head.head_norms, head.norm_eps, *tables, positions, slots, rows, bufs.keys, bufs.values
    )


def _fuse(ops: Ops, head: HeadWeights, features: Tensor) -> Tensor:
    """Fuse features as `reference.fuse_features` does, by operations."""
    if features.shape[1] == head.hidden:
        return features
    if norms := head.tap_norms:
        normed = torch.empty_like(features)
        width = features.shape[1] // len(norms)
        for tap, out, name in zip(features.split(width, 1), normed.split(width, 1), norms, strict=True):
            ops(add_norm)(tap.contiguous(), None, head.tensors[name], head.norm_eps, out)
        features = normed
    return F.linear(features, head.tensors["fc.weight"], head.tensors.get("fc.bias"))


def _check_slot(cfg: DrafterConfig, slot: int) -> None:
    if not 0 <= slot < cfg.num_slots:
        raise UsageError(f"Slot {slot} is not among the {cfg.num_slots} of this configuration (0 is the first).")


def _launch_triton(cfg: DrafterConfig, X: Tensor | Sequence[Tensor], weights: Weights, bufs: Buffers) -> None:
    from .kernel_launch import launch

    assert weights.packed is not None
    try:
        launch(cfg, X if isinstance(X, Tensor) else (X[0], X[1], X[2]), weights.packed, bufs)
    except (RuntimeError, ValueError) as error:
        # What Triton says without a GPU, and with one where the tensors are not on it.
        no_gpu = ("active drivers", "cannot be accessed from Triton")
        if bufs.keys.is_cuda or not any(words in str(error) for words in no_gpu):
            raise
        raise DrafterError(
            f"backend='triton' needs an NVIDIA GPU, the buffers are on {bufs.keys.device}. Use backend='reference', or "
            "TRITON_INTERPRET=1 in the environment to run the kernel in Triton's interpreter."
        ) from error
