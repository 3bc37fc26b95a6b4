"""LM-head rows that join a slot's draft vocabulary, brought to where the kernel reads them.

`gather_rows`: wherever a place of a tail (`drafter.follow.Tails`) has a rank whose row does not lie there yet, the row
is copied there, in the order in which `lm_topk.stream_tails` reads it, and rounded to FP8 where the weights are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..follow import UNIT_ROWS, FollowRows, Tails
from .packing import cut_chunks, quantize_rows
from .weight_stream import round_to_e4m3


def gather_rows_ref(follow: FollowRows, tails: Tails) -> None:
    """Bring the rows of all tails to where the kernel reads them; without such places nothing is to be done."""
    if tails.rows is None:
        return
    assert tails.scales is not None
    assert tails.loaded is not None
    chunk = tails.rows.shape[-1]
    for slot, size in enumerate(tails.sizes.tolist()):
        ranks = tails.ranks[slot, :size]
        rows = follow.rows_of(ranks.tolist())
        if tails.rows.dtype != rows.dtype:
            rows, tails.scales[slot, :size] = quantize_rows(rows)
        cut = cut_chunks(rows[:, None], chunk)[:, :, 0]  # [size, chunks, columns]
        for place, row in enumerate(cut.view(torch.uint8)):
            tails.rows.view(torch.uint8)[slot, place // UNIT_ROWS, :, place % UNIT_ROWS] = row
        tails.loaded[slot, :size] = ranks


@triton.jit
def _gather_kernel(
    rank_ptr,
    size_ptr,
    loaded_ptr,
    row_of_rank_ptr,
    source_ptr,
    stride_source,
    row_ptr,
    scale_ptr,
    WIDTH: tl.constexpr,
    UNIT: tl.constexpr,
    HIDDEN: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    SCALED: tl.constexpr,
):
    place = tl.program_id(0)
    slot = tl.program_id(1).to(tl.int64)
    if place >= tl.load(size_ptr + slot):
        return
    rank = tl.load(rank_ptr + slot * WIDTH + place)
    if rank == tl.load(loaded_ptr + slot * WIDTH + place):
        return
    source = source_ptr + tl.load(row_of_rank_ptr + rank).to(tl.int64) * stride_source
    column = tl.arange(0, BLOCK)
    inside = column < HIDDEN
    value = tl.load(source + column, mask=inside, other=0.0)
    unit = (slot * (WIDTH // UNIT) + place // UNIT) * (UNIT * HIDDEN)
    to = row_ptr + unit + column // CHUNK * (UNIT * CHUNK) + place % UNIT * CHUNK + column % CHUNK
    if SCALED:
        # `packing.quantize_rows`; PyTorch's division by 448 may differ in the last bit on a GPU.
        value = value.to(tl.float32)
        peak = tl.max(tl.abs(value))
        scale = tl.where(peak > 0, tl.div_rn(peak, 448.0), 1.0)
        tl.store(scale_ptr + slot * WIDTH + place, scale)
        value = round_to_e4m3(tl.minimum(tl.maximum(tl.div_rn(value, scale), -448.0), 448.0))
    tl.store(to, value.to(row_ptr.dtype.element_ty), mask=inside)
    # A thread that reads the new mark would leave before its part of the row is copied.
    tl.debug_barrier()
    tl.store(loaded_ptr + slot * WIDTH + place, rank)


def gather_rows(follow: FollowRows, tails: Tails) -> None:
    """Run `gather_rows_ref` as one launch, a program for each place: those whose row is there end at once."""
    if tails.rows is None:
        return
    slots, width = tails.ranks.shape
    hidden = follow.rows.shape[1]
    _gather_kernel[(width, slots)](
        tails.ranks,
        tails.sizes,
        tails.loaded,
        follow.row_of_rank,
        follow.rows,
        follow.rows.stride(0),
        tails.rows,
        tails.scales,
        WIDTH=width,
        UNIT=UNIT_ROWS,
        HIDDEN=hidden,
        CHUNK=tails.rows.shape[-1],
        BLOCK=triton.next_power_of_2(hidden),
        SCALED=tails.rows.dtype != follow.rows.dtype,
        num_warps=4,
    )
