"""A head laid out for the persistent kernel: one stream of weights for each program, and what lies beside it."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import misfit
from ..settings import explain_fields
from .dimensions import DrafterConfig, check_head_fits, check_kernel_limits
from .kernels.packing import assign_rows, cut_chunks, cut_splits, cut_tiles, quantize_rows, rows_per_program
from .launch_params import PROJECTIONS, StoredLayout, chip_of, group_rows, matrix_shapes, num_groups
from .tuned_cache import Launcher, TunedCache, open_tuned_cache

if TYPE_CHECKING:
    from .weights import HeadWeights


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
    biases: Tensor
    """Biases of fc, qkv, o, gate, up and down, as far as the head has them, one after the other: `bias_layout`."""
    launches: Launcher
    """Launch parameters, and the layout that it is stored in."""
    draft_vocab: int
    """LM-head rows packed; a launch may use the first N of them."""


@dataclass(frozen=True)
class PerMatrix:
    """One number for each matrix of the stream; ``mlp`` is gate and up, side by side."""

    fc: int
    qkv: int
    o: int
    mlp: int
    down: int
    head: int


@dataclass(frozen=True)
class StreamLayout:
    """Places of the matrices in a program's stream, in elements, and the rows of them that a program and a group have.

    ``scales``: number of each matrix's first scale: a program has one for each row, in the stream's order. ``split``:
    programs to a group; 1, and ``group_rows`` 0, for what is cut by rows alone.
    """

    offsets: PerMatrix
    rows: PerMatrix
    scales: PerMatrix
    split: PerMatrix
    group_rows: PerMatrix
    size: int
    num_scales: int

    @classmethod
    def of(cls, cfg: DrafterConfig, layout: StoredLayout, draft_vocab: int) -> StreamLayout:
        """Lay out a head whose LM head has ``draft_vocab`` rows."""
        programs = layout.num_programs
        rows = {name: rows_per_program(outputs, programs) for name, (outputs, _) in matrix_shapes(cfg).items()}
        rows["head"] = rows_per_program(draft_vocab, programs)
        grouped = {name: group_rows(cfg, name, layout.split[name], programs) for name in PROJECTIONS}
        offsets, scales, size, num_scales = {}, {}, 0, 0
        for name, (_, inputs) in matrix_shapes(cfg).items():
            if name in PROJECTIONS:
                split, chunk = layout.split[name], layout.chunks["layer"]
                units = -(-num_groups(split, programs) * split // programs)
                stored = units * -(-inputs // chunk // split) * chunk * grouped[name]
                stored *= cfg.has_fc if name == "fc" else 1
            else:
                stored = rows[name] * (2 if name == "mlp" else 1) * inputs
            offsets[name], scales[name] = size, num_scales
            size += -(-stored // 128) * 128
            num_scales += rows[name] * (2 if name == "mlp" else 1)
        places = PerMatrix(**offsets), PerMatrix(**rows), PerMatrix(**scales)
        groups = PerMatrix(**layout.split, mlp=1, head=1), PerMatrix(**grouped, mlp=0, head=0)
        return cls(*places, *groups, size, num_scales)


_QKV = tuple(f"self_attn.{name}_proj" for name in "qkv")


def pack_head(head: HeadWeights, cfg: DrafterConfig, launches: Launcher, order: Tensor | None = None) -> PackedHead:
    """Lay a head out for the kernel, in the layout of ``launches``; of ``cfg`` the head's dimensions count.

    ``order``: int64 [draft_vocab], LM-head rows best first, when launches shall be able to use fewer rows than are
    packed (`DraftVocab` in rank order); default the head's own order.
    """
    stored, w, device = launches(cfg)[0].layout, head.tensors, head.device
    empty = torch.zeros(1, dtype=cfg.dtype, device=device)
    order = torch.arange(head.draft_vocab, device=device) if order is None else order
    stream, scales = _pack_stream(head, cfg, stored, order)
    biased = {
        "fc": cfg.has_fc_bias,
        **dict.fromkeys(_QKV, cfg.has_qkv_bias),
        "self_attn.o_proj": cfg.has_o_bias,
        **dict.fromkeys((f"mlp.{name}_proj" for name in ("gate", "up", "down")), cfg.has_mlp_bias),
    }
    biases = [w[f"{name}.bias"].to(cfg.dtype) for name, has_bias in biased.items() if has_bias]
    return PackedHead(
        stream=stream,
        scales=scales,
        row_ids=assign_rows(head.draft_to_target[order].int(), stored.num_programs, True).contiguous(),
        embedding=head.embedding.to(cfg.dtype),
        norms={
            "in": w.get("input_layernorm.weight", empty),
            "hidden": w.get("hidden_norm.weight", empty),
            "post": w["post_attention_layernorm.weight"],
            "out": w.get("norm.weight", empty),
            "taps": torch.cat([w[name] for name in head.tap_norms]) if cfg.tap_norms else empty,
            "heads": torch.cat(head.head_norms) if head.head_norms is not None else empty,
        },
        biases=torch.cat(biases) if biases else empty,
        launches=launches,
        draft_vocab=head.draft_vocab,
    )


def _pack_stream(head: HeadWeights, cfg: DrafterConfig, stored: StoredLayout, order: Tensor) -> tuple[Tensor, Tensor]:
    w, programs = head.tensors, stored.num_programs
    matrices = {
        "fc": [w["fc.weight"]] if cfg.has_fc else [],
        "qkv": [torch.cat([w[f"{name}.weight"] for name in _QKV])],
        "o": [w["self_attn.o_proj.weight"]],
        "mlp": [w["mlp.gate_proj.weight"], w["mlp.up_proj.weight"]],
        "down": [w["mlp.down_proj.weight"]],
        "head": [head.lm_head[order]],
    }
    layout = StreamLayout.of(cfg, stored, head.draft_vocab)
    element = cfg.weight_dtype.itemsize
    stream = torch.zeros(programs * layout.size, dtype=cfg.weight_dtype, device=head.device)
    by_program = stream.view(torch.uint8).view(programs, layout.size * element)
    scales = []
    for name in matrices:
        pieces = []
        for matrix in matrices[name]:
            matrix = matrix.to(cfg.dtype)
            if cfg.has_fp8:
                matrix, scale = quantize_rows(matrix)
                # The kernel halves the inputs of down (`gated_mlp`).
                scale = scale * 2 if name == "down" else scale
                scales.append(assign_rows(scale, programs, name == "head", getattr(layout.rows, name)))
            pieces.append(_cut(name, matrix, stored, layout).view(torch.uint8))
        if pieces:
            # gate and up go side by side within each chunk, so that one piece of the stream serves both.
            packed = torch.cat(pieces, dim=2) if name == "mlp" else pieces[0]
            packed = packed.reshape(programs, -1)
            first = getattr(layout.offsets, name) * element
            by_program[:, first : first + packed.shape[1]] = packed
        elif cfg.has_fp8:
            scales.append(torch.zeros(programs, getattr(layout.rows, name), device=head.device))
    return stream, torch.cat(scales, dim=1).contiguous() if scales else torch.ones(1, device=head.device)


def _cut(name: str, matrix: Tensor, stored: StoredLayout, layout: StreamLayout) -> Tensor:
    """Cut a matrix into the pieces of each program: [programs, ...]."""
    programs, chunks = stored.num_programs, stored.chunks
    if name in PROJECTIONS:
        split = stored.split[name]
        grouped = assign_rows(matrix, num_groups(split, programs), rows=getattr(layout.group_rows, name))
        return cut_splits(grouped, split, chunks["layer"], programs)
    if name == "mlp":
        return cut_chunks(assign_rows(matrix, programs), chunks["mlp"])
    return cut_tiles(assign_rows(matrix, programs, True), stored.head_rows, chunks["head"])


def bias_layout(cfg: DrafterConfig) -> PerMatrix:
    """Return where each bias begins in `PackedHead.biases`, the LM head's behind all; a missing one takes no room."""
    sizes = {
        "fc": cfg.has_fc_bias * cfg.hidden,
        "qkv": cfg.has_qkv_bias * cfg.qkv_size,
        "o": cfg.has_o_bias * cfg.hidden,
        "mlp": cfg.has_mlp_bias * 2 * cfg.intermediate,
        "down": cfg.has_mlp_bias * cfg.hidden,
    }
    starts = accumulate(sizes.values(), initial=0)
    return PerMatrix(**dict(zip((*sizes, "head"), starts, strict=True)))


@explain_fields
@dataclass(frozen=True)
class Weights:
    """A head as tensors for the reference, and packed for the kernel; `UsageError` for packed weights of another."""

    head: HeadWeights
    packed: PackedHead | None = None
    order: Tensor | None = None
    """int64 [draft_vocab]: LM-head rows best first; a draft over fewer rows takes the first of these."""

    def __post_init__(self) -> None:
        if self.packed is not None and self.packed.draft_vocab != self.head.draft_vocab:
            raise misfit("draft_vocab", self.head.draft_vocab, self.packed.draft_vocab)

    @classmethod
    def pack(
        cls, head: HeadWeights, cfg: DrafterConfig, order: Tensor | None = None, cache: TunedCache | None = None
    ) -> Weights:
        """Lay a head out for the kernel on its device, with tuned launch parameters where the cache has them.

        One packing serves every number of slots and every tree; each configuration's launch parameters are looked up
        when it is first used. ``order``: int64 [draft_vocab], LM-head rows best first; then a launch may use any
        smaller ``draft_vocab``. ``cache``: default the one that ``EAGLE_SLIM_TUNED`` names or the one that ships.
        Raises `UsageError` for a configuration or an order of another head, and draft ids that the target does not
        have.
        """
        check_kernel_limits(cfg)
        check_head_fits(cfg, head)
        if order is not None:
            rows = torch.arange(head.draft_vocab, device=order.device)
            if order.dtype != torch.int64 or not torch.equal(order.sort().values, rows):
                wanted = f"int64 with each of the {head.draft_vocab} rows of the LM head once"
                raise misfit("order", wanted, (order.dtype, tuple(order.shape)))
        ids = head.draft_to_target
        if ids.device.type != "meta" and not bool(((ids >= 0) & (ids < cfg.target_vocab)).all()):
            raise misfit("draft_to_target", f"ids of the target, 0 to {cfg.target_vocab - 1}", ids)
        cache, chip = open_tuned_cache() if cache is None else cache, chip_of(head.device)
        launches = functools.cache(partial(cache.find, chip=chip, layout=cache.layout(cfg, chip)))
        # The kernel takes no strides.
        tensors = {name: tensor.contiguous() for name, tensor in head.tensors.items()}
        contiguous = replace(head, tensors=tensors, embedding=head.embedding.contiguous())
        return cls(head, pack_head(contiguous, cfg, launches, order), order)

    def first_rows(self, draft_vocab: int) -> HeadWeights:
        """Return the head with its ``draft_vocab`` best LM-head rows, by ascending id."""
        if draft_vocab == self.head.draft_vocab:
            return self.head
        ranked = torch.arange(self.head.draft_vocab, device=self.head.device) if self.order is None else self.order
        return self.head.of_rows(ranked[:draft_vocab].sort().values)


class SharedPacking:
    """A head that is packed at its first draft, shared by all its drafters.

    One serves every number of slots, every tree, every length, and every draft vocabulary that is the first of its
    rows in ``order`` (int64 [draft_vocab], LM-head rows best first; None for the head's own order).
    """

    def __init__(self, head: HeadWeights, order: Tensor | None = None, weight_dtype: torch.dtype | None = None) -> None:
        self.head, self.order = head, order
        self.weight_dtype = weight_dtype or head.dtype
        self._weights: Weights | None = None

    def weights(self, cfg: DrafterConfig) -> Weights:
        """Return the packed head, packed at the first call. Raises as `Weights.pack` does."""
        if self._weights is None:
            self._weights = Weights.pack(self.head, cfg, self.order)
        return self._weights

    def serves(self, head: HeadWeights) -> bool:
        """Tell if ``head`` is this one with all or the first of its LM-head rows."""
        mine, ids = self.head, head.draft_to_target
        shared = (head.tensors is mine.tensors, head.embedding is mine.embedding, head.rotary is mine.rotary)
        if not all(shared) or len(ids) > mine.draft_vocab or ids.device != mine.device:
            return False
        ranked = mine.draft_to_target if self.order is None else mine.draft_to_target[self.order]
        return torch.equal(ranked[: len(ids)].sort().values, ids)
