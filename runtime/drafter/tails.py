"""Room for the LM-head rows that join a slot's draft vocabulary, in the form in which the kernel reads them."""

from __future__ import annotations

from dataclasses import replace

import torch

from .dimensions import DrafterConfig
from .follow import UNIT_ROWS, Tails
from .kernels.lm_topk import HeadTiles
from .kernels.weight_stream import Tile
from .launch_params import LaunchParams

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
