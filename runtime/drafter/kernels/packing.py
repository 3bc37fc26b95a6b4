"""Lay weights out as one stream per program, in the order in which `weight_stream` reads them.

A persistent drafter is bound by reading weights. Each program (one CTA per SM) owns a part of every matrix, and
everything it will read lies in its own linear stream, in reading order::

    region of one matrix:  [in_features / BLOCK_K] [rows of this program] [BLOCK_K]

so each step of a product reads one contiguous piece.

Gate and up are cut by rows: program p has rows ``p * R`` to ``p * R + R - 1`` of both. The layer's other matrices are
cut by rows and by columns (`projections`). Rows of the LM head are dealt round robin (row r to program
``r % programs`` as its row ``r // programs``), so that any prefix of them is balanced too: one packed LM head serves
every smaller draft vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rows_per_program(num_rows: int, num_programs: int) -> int:
    """Count the rows of each program, the last ones of some programs being padding."""
    return -(-num_rows // num_programs)


def chunk_size(in_features: int, largest: int) -> int:
    """Return the largest power of two from 16 to ``largest`` that divides ``in_features``; 0 where 16 does not."""
    size = largest
    while size >= 16 and in_features % size:
        size //= 2
    return size if size >= 16 else 0


def assign_rows(tensor: Tensor, num_programs: int, dealt: bool = False, rows: int | None = None) -> Tensor:
    """Give each program its rows: [out, ...] to [programs, rows, ...]; missing rows are zero. Any dtype.

    ``rows``: rows per program, at least `rows_per_program`.
    Example: 5 rows over 2 programs, in blocks: 0 1 2 | 3 4 -; dealt: 0 2 4 | 1 3 -.
    """
    rows = rows_per_program(tensor.shape[0], num_programs) if rows is None else rows
    padded = torch.zeros(rows * num_programs, *tensor.shape[1:], dtype=tensor.dtype, device=tensor.device)
    padded[: tensor.shape[0]] = tensor
    if dealt:
        return padded.view(rows, num_programs, *tensor.shape[1:]).transpose(0, 1)
    return padded.view(num_programs, rows, *tensor.shape[1:])


def cut_chunks(assigned: Tensor, block_k: int) -> Tensor:
    """Lay rows out in reading order: [programs, rows, in] to [programs, in / block_k, rows, block_k]. Any dtype."""
    chunked: Tensor = assigned.view(torch.uint8).unflatten(2, (-1, block_k * assigned.element_size()))
    return chunked.transpose(1, 2).contiguous().view(assigned.dtype)


def cut_splits(assigned: Tensor, num_splits: int, block_k: int, num_programs: int) -> Tensor:
    """Cut each group's rows by columns and deal the splits to programs, see `projections`.

    [groups, rows, in] to [programs, units, chunks, rows, block_k]: split s of group g is unit ``g * num_splits + s``,
    which lies with program ``unit % programs`` as its number ``unit // programs``. Of C chunks, split s has those from
    ``s * C // num_splits`` to ``(s + 1) * C // num_splits``; splits of fewer chunks than others end in zeros. Any
    dtype.
    """
    cut = cut_chunks(assigned, block_k).view(torch.uint8)
    groups, total = cut.shape[:2]
    units = -(-groups * num_splits // num_programs)
    shape = (units * num_programs, -(-total // num_splits), *cut.shape[2:])
    splits = torch.zeros(shape, dtype=torch.uint8, device=cut.device)
    for split in range(num_splits):
        chunks = cut[:, split * total // num_splits : (split + 1) * total // num_splits]
        splits[split : groups * num_splits : num_splits, : chunks.shape[1]] = chunks
    dealt: Tensor = splits.unflatten(0, (units, num_programs)).transpose(0, 1).contiguous()
    return dealt.view(assigned.dtype)


def cut_tiles(assigned: Tensor, tile_rows: int, block_k: int) -> Tensor:
    """Cut as `cut_chunks` does, ``tile_rows`` rows at a time, one tile after the other: [programs, rows * in].

    The last tile may have fewer rows than the others; nothing is padded.
    """
    tiles = [cut_chunks(tile, block_k).view(torch.uint8).flatten(1) for tile in assigned.split(tile_rows, dim=1)]
    return torch.cat(tiles, dim=1).view(assigned.dtype)


def quantize_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round to e4m3 with one fp32 scale per output row: (float8_e4m3fn [out, in], float32 [out]).

    ``scale = max|row| / 448`` (448 is the largest e4m3 value); a row of zeros has scale 1.
    """
    peak = weight.float().abs().amax(dim=1)
    scale = torch.where(peak > 0, peak / 448.0, torch.ones_like(peak))
    return (weight.float() / scale[:, None]).clamp(-448.0, 448.0).to(torch.float8_e4m3fn), scale
