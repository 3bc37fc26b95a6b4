"""LM-head rows that join a slot's draft vocabulary: which ones do after a step, and where the kernel reads them.

Two operations on `drafter.follow.Tails`, each a kernel with a PyTorch twin; nothing of them is known to the host:

* `join_tokens`: the newest tokens of the active slots join their tails, as `FollowRows.join` says;
* `gather_rows`: wherever a place of a tail has a rank whose row does not lie there yet, the row is copied there, in
  the order in which `lm_topk.stream_tails` reads it, and rounded to FP8 where the weights are.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl

from ..drafter.config import DrafterConfig
from ..drafter.follow import UNIT_ROWS, FollowRows, Tails
from .acceptance import SlotState
from .launch_params import LaunchParams
from .lm_topk import HeadTiles
from .packing import cut_chunks, quantize_rows
from .weight_stream import Tile, round_to_e4m3

_MOST_ROWS = 64
"""Rows of a product of a unit: what the matrix units of sm_90 multiply at a time."""


def tail_tiles(cfg: DrafterConfig, params: LaunchParams) -> HeadTiles:
    """How one unit is stored and read: in the steps of the base's LM head, with no more shared memory than there."""
    tile = params.tiles["head"]
    block_n = min(_MOST_ROWS, tile.block_n)
    scaled = cfg.weight_dtype != cfg.dtype
    return HeadTiles(
        stored=UNIT_ROWS, owned=UNIT_ROWS, hidden=cfg.hidden, chunk=tile.block_k, scaled=scaled, several=True,
        tile=Tile(block_n, tile.block_k, tile.stages),
    )  # fmt: skip


def allocate_tails(cfg: DrafterConfig, params: LaunchParams | None, device: torch.device | str) -> Tails | None:
    """Allocate empty tails, with rows for the kernel unless ``params`` is None; None where nothing joins."""
    if cfg.tail_rows == 0:
        return None
    slots, width = cfg.num_slots, cfg.tail_rows
    tails = Tails.allocate(slots, width, device)
    if params is None:
        return tails
    tiles = tail_tiles(cfg, params)
    shape = (slots, width // UNIT_ROWS, cfg.hidden // tiles.chunk, UNIT_ROWS, tiles.chunk)
    scales = torch.ones((slots, width) if tiles.scaled else (1, 1), dtype=torch.float32, device=device)
    rows = torch.zeros(shape, dtype=cfg.weight_dtype, device=device)
    return replace(tails, rows=rows, scales=scales, loaded=torch.full_like(tails.ranks, -1))


def join_tokens_ref(state: SlotState, follow: FollowRows, tails: Tails) -> None:
    """Let the last ``num_new`` tokens of ``state``'s active slots join their tails."""
    for slot in state.active_slots[: int(state.active_count)].tolist():
        new = state.new_tokens[slot, : int(state.num_new[slot])].tolist()
        tails.set_slot(slot, follow.join(tails.read_slot(slot), new), follow)


@triton.jit
def _join_kernel(
    inverse_ptr, new_token_ptr, num_new_ptr, rank_of_id_ptr, rank_ptr, id_ptr, size_ptr,
    MOST: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0)
    if tl.load(inverse_ptr + slot) < 0:
        return
    place = tl.arange(0, BLOCK)
    size = tl.load(size_ptr + slot)
    ranks = tl.load(rank_ptr + slot * WIDTH + place, mask=place < size, other=-1)
    ids = tl.load(id_ptr + slot * WIDTH + place, mask=place < size, other=-1)
    for i in range(0, tl.load(num_new_ptr + slot)):
        token = tl.load(new_token_ptr + slot * TOKENS + i)
        rank = tl.load(rank_of_id_ptr + token)
        highest = tl.max(ranks)
        is_new = (rank >= 0) & (tl.sum((ranks == rank).to(tl.int32)) == 0)
        # In a full tail the rarest makes room for what is less rare.
        joins = tl.where(is_new & ((size < MOST) | (rank < highest)), 1, 0)
        at = tl.where(size < MOST, size, tl.min(tl.where(ranks == highest, place, BLOCK)))
        here = place == tl.where(joins != 0, at, -1)
        ranks = tl.where(here, rank, ranks)
        ids = tl.where(here, token, ids)
        size += tl.where(size < MOST, joins, 0)
    tl.store(rank_ptr + slot * WIDTH + place, ranks, mask=place < size)
    tl.store(id_ptr + slot * WIDTH + place, ids, mask=place < size)
    tl.store(size_ptr + slot, size)


def join_tokens(state: SlotState, follow: FollowRows, tails: Tails) -> None:
    """Run `join_tokens_ref` as one launch, a program a slot. Places within a tail may differ from the twin's."""
    slots, width = tails.ranks.shape
    _join_kernel[(slots,)](
        state.active_inverse, state.new_tokens, state.num_new, follow.rank_of_id, tails.ranks, tails.ids, tails.sizes,
        MOST=follow.most, WIDTH=width, BLOCK=triton.next_power_of_2(width), TOKENS=state.new_tokens.shape[1],
        num_warps=4,
    )  # fmt: skip


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
    rank_ptr, size_ptr, loaded_ptr, row_of_rank_ptr, source_ptr, stride_source, row_ptr, scale_ptr,
    WIDTH: tl.constexpr, UNIT: tl.constexpr, HIDDEN: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
    SCALED: tl.constexpr,
):  # fmt: skip
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
    assert tails.rows is not None
    slots, width = tails.ranks.shape
    hidden = follow.rows.shape[1]
    _gather_kernel[(width, slots)](
        tails.ranks, tails.sizes, tails.loaded, follow.row_of_rank, follow.rows, follow.rows.stride(0), tails.rows,
        tails.scales, WIDTH=width, UNIT=UNIT_ROWS, HIDDEN=hidden, CHUNK=tails.rows.shape[-1],
        BLOCK=triton.next_power_of_2(hidden), SCALED=tails.rows.dtype != follow.rows.dtype, num_warps=4,
    )  # fmt: skip
