"""Device code of `choose_tokens`: the launches in their order, each with its result in scratch.

    penalise   a bit for each id that a row's repetition penalty falls on       one program per row and piece
    best       largest score and its lowest id                                  one per row and tile
    (cuts)     where top-k and top-p cut: `cut_search`
    race       the smallest mark of what the cuts leave (`token_noise`)         one per row and tile
    draw       the id of the smallest of all                                    one per row

Greedy runs `best` and `pick`, a reduction of it. A tile is so many neighbouring ids. Each launch makes the scores from
the logits again, which it reads from the L2: no buffer of scores grows with nodes times vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .token_noise import NOBODY, token_marks
from .token_weights import FAR, ONE, distance_weight, score_distance

TEMPERATURE, TOP_K, TOP_P, MIN_P, PENALTY, MINIMUM = (tl.constexpr(place) for place in range(6))
"""Places in ``numbers``."""
COLDEST = tl.constexpr(1e-30)
"""The largest logit has all the probability long before this; colder, its quotient would overflow."""
WORD_BITS = 32
NO_NUMBER = tl.constexpr(-2)
"""In place of a token: a score is NaN or infinite."""
ALL_BARRED = tl.constexpr(-3)
"""In place of a token: no token is left."""
_NO_ID = tl.constexpr(0x7FFFFFFF)


class ChoiceState(NamedTuple):
    """State that choices depend on, beside logits and trees; on one device."""

    numbers: Tensor
    """float32 [6]: temperature, top_k, top_p, min_p, repetition_penalty, min_new_tokens."""
    keys: Tensor
    """int64 [slots, stream]: number i is the key of the noise that chooses new token i of the slot's request."""
    num_generated: Tensor
    """int32 [slots]: new tokens so far. A node at depth d chooses number ``num_generated + d``."""
    seen: Tensor
    """int32 [slots, ceil(vocab / 32)]: a bit for each id in prompt or answer so far, the root included."""
    suppressed: Tensor
    """int32 [ceil(vocab / 32)], as ``eos``: a bit for each such id."""
    eos: Tensor

    @classmethod
    def allocate(cls, slots: int, stream: int, vocab: int, device: torch.device | str) -> ChoiceState:
        """Allocate with every rule neutral, nothing seen, and keys of 0."""
        words = -(-vocab // WORD_BITS)
        int32: dict[str, Any] = {"dtype": torch.int32, "device": device}
        numbers = torch.tensor([1.0, vocab, 1.0, 0.0, 1.0, 0.0], dtype=torch.float32, device=device)
        return cls(
            numbers,
            torch.zeros(slots, stream, dtype=torch.int64, device=device),
            torch.zeros(slots, **int32),
            torch.zeros(slots, words, **int32),
            torch.zeros(words, **int32),
            torch.zeros(words, **int32),
        )


class ChoiceScratch(NamedTuple):
    """Results that one launch leaves to the next; rows are those of a batch times nodes."""

    tile: int
    """Neighbouring ids that one program takes: a power of two."""
    best_score: Tensor
    """float32 [rows, tiles]: largest score."""
    best_id: Tensor
    """int32 [rows, tiles]: its lowest id."""
    threshold: Tensor
    """int32 [rows]: largest distance that the cuts keep."""
    interval: Tensor
    """int64 [rows, 4]: in which the cut lies, see `cut_search`."""
    counts: Tensor
    """int32 [rows, tiles, 64]: tokens in the bins of the interval."""
    needed: Tensor
    """int32 [rows]: tokens at the threshold that top-p keeps."""
    mass: Tensor
    """int64 [rows, tiles]: weight, or number of tokens, nearer than the interval."""
    num_tied: Tensor
    """int32 [rows, tiles]: tokens at the threshold."""
    best_mark: Tensor
    """int64 [rows, tiles]: smallest mark of the tokens that the cuts leave, without those at top-p's threshold."""
    best_tied: Tensor
    """int64 [rows, tiles]: smallest mark of the tokens at top-p's threshold, where there are any."""
    penalised: Tensor
    """int32 [rows, ceil(vocab / 32)]: seen, or on the node's path."""
    listed: Tensor
    """int32 [rows, capacity]: distances of the tokens in the interval, once few enough are left to search."""
    num_listed: Tensor
    """int32 [rows]"""

    def first(self, rows: int) -> ChoiceScratch:
        """Return the scratch of the first ``rows``."""
        return ChoiceScratch(self.tile, *(tensor[:rows] for tensor in self[1:]))


@dataclass(frozen=True)
class ChoiceRules:
    """Stages that run; their numbers are in `ChoiceState`, so that one CUDA graph serves all values."""

    sampled: bool = False
    """Otherwise greedy, and the next three are without effect."""
    has_top_k: bool = False
    has_top_p: bool = False
    has_min_p: bool = False
    has_penalty: bool = False
    """Of repetition_penalty; the next two of suppress_tokens and of min_new_tokens."""
    has_suppressed: bool = False
    has_minimum: bool = False


@dataclass(frozen=True, kw_only=True)
class ChoiceShape(ChoiceRules):
    """Stages and sizes that the kernels of a choice are compiled for."""

    vocab: int
    words: int
    """Of 32 bits, for a bit for each id."""
    tile: int
    """Neighbouring ids that one program takes, a power of two."""
    tiles: int
    block_tiles: int
    """``tiles`` to a power of two."""
    capacity: int
    """Tokens that a search may list."""
    few: int
    """Tokens in an interval that are not worth another survey."""

    @property
    def has_cut(self) -> bool:
        """Whether a cut is searched for."""
        return self.has_top_k or self.has_top_p

    @property
    def weighted(self) -> bool:
        """Whether the search adds up weights (top-p) rather than numbers of tokens (top-k)."""
        return not self.has_top_k


class ChoiceRow(NamedTuple):
    """One node of one place: int64 ``row`` (place times nodes plus node) and ``slot``.

    ``number``: which new token of the slot's text it chooses.
    """

    row: Any
    slot: Any
    number: Any


@triton.jit
def has_bit(bits_ptr, ids, mask):
    """Tell whether the bits of ``ids`` are set."""
    words = tl.load(bits_ptr + (ids >> 5), mask=mask, other=0)
    return ((words >> (ids & 31)) & 1) != 0


@triton.jit
def is_skipped(trees, nodes):
    """Tell whether this program's row belongs to a place beyond the active ones."""
    return tl.program_id(0) // nodes >= tl.load(trees.active_count)


@triton.jit
def this_row(trees, nodes, state):
    """Return the row with this program's first number."""
    row = tl.program_id(0)
    slot = tl.load(trees.active_slots + row // nodes).to(tl.int64)
    number = tl.load(state.num_generated + slot) + tl.load(trees.positions + slot * nodes + row % nodes)
    return ChoiceRow(row.to(tl.int64), slot, number)


@triton.jit
def load_scores(logits_ptr, at, ids, state, scratch, SHAPE: tl.constexpr):
    """Load the logits of one row after the processors and the temperature, fp32; -inf beyond the vocabulary."""
    mask = ids < SHAPE.vocab
    score = tl.load(logits_ptr + at.row * SHAPE.vocab + ids, mask=mask, other=float("-inf")).to(tl.float32)
    if SHAPE.has_penalty:
        penalty = tl.load(state.numbers + PENALTY)
        weaker = tl.where(score < 0, score * penalty, tl.div_rn(score, penalty))
        score = tl.where(has_bit(scratch.penalised + at.row * SHAPE.words, ids, mask), weaker, score)
    if SHAPE.has_minimum:
        too_short = at.number < tl.load(state.numbers + MINIMUM).to(tl.int64)
        score = tl.where(too_short & has_bit(state.eos, ids, mask), float("-inf"), score)
    if SHAPE.has_suppressed:
        score = tl.where(has_bit(state.suppressed, ids, mask), float("-inf"), score)
    if SHAPE.sampled:
        score = tl.div_rn(score, tl.maximum(tl.load(state.numbers + TEMPERATURE), COLDEST))
    return score


@triton.jit
def largest_of(scratch, at, SHAPE: tl.constexpr):
    """Return the largest score of a row from those of its tiles."""
    tile = tl.arange(0, SHAPE.block_tiles)
    best = tl.load(scratch.best_score + at.row * SHAPE.tiles + tile, mask=tile < SHAPE.tiles, other=float("-inf"))
    largest = tl.max(best, axis=0)
    # Of a row without a distribution no token is taken; its distances must be numbers all the same.
    return tl.where(tl.abs(largest) < float("inf"), largest, 0.0)


@triton.jit
def or_fault(token, best):
    """Return a row's token, or `NO_NUMBER` or `ALL_BARRED`, by the best scores of its tiles: float32 [tiles]."""
    largest = tl.max(best, axis=0)
    is_number = (tl.max((best != best).to(tl.int32), axis=0) == 0) & (largest < float("inf"))
    fault = tl.where(is_number, ALL_BARRED, NO_NUMBER)
    return tl.where(is_number & (largest > float("-inf")), token, fault)


@triton.jit
def load_distances(logits_ptr, at, largest, ids, state, scratch, SHAPE: tl.constexpr):
    """Load the distances of one row's scores below its largest; `FAR` beyond the vocabulary."""
    score = load_scores(logits_ptr, at, ids, state, scratch, SHAPE)
    is_score = (ids < SHAPE.vocab) & (score <= largest)
    return tl.where(is_score, score_distance(tl.where(is_score, score, largest), largest), FAR)


@triton.jit
def load_tile(logits_ptr, at, state, scratch, SHAPE: tl.constexpr):
    """Load the distances of a row's tile with this program's second number: int32 [tile]."""
    ids = tl.program_id(1) * SHAPE.tile + tl.arange(0, SHAPE.tile)
    return load_distances(logits_ptr, at, largest_of(scratch, at, SHAPE), ids, state, scratch, SHAPE)


@triton.jit(do_not_specialize=["nodes"])
def penalise_kernel(trees, nodes, state, scratch, SHAPE: tl.constexpr, BLOCK: tl.constexpr):
    """Join the bits of a slot's seen tokens with those of the node's path."""
    if is_skipped(trees, nodes):
        return
    at = this_row(trees, nodes, state)
    words = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    bits = tl.load(state.seen + at.slot * SHAPE.words + words, mask=words < SHAPE.words, other=0)
    node = at.row % nodes
    while node >= 0:
        token = tl.load(trees.draft_tokens + at.slot * nodes + node).to(tl.int32)
        bits |= tl.where(words == token >> 5, 1 << (token & 31), 0)
        node = tl.load(trees.parents + at.slot * nodes + node)
    tl.store(scratch.penalised + at.row * SHAPE.words + words, bits, mask=words < SHAPE.words)


@triton.jit(do_not_specialize=["nodes"])
def best_kernel(logits_ptr, trees, nodes, state, scratch, SHAPE: tl.constexpr):
    """Find the largest score of a tile, and its lowest id."""
    if is_skipped(trees, nodes):
        return
    at = this_row(trees, nodes, state)
    ids = tl.program_id(1) * SHAPE.tile + tl.arange(0, SHAPE.tile)
    score = load_scores(logits_ptr, at, ids, state, scratch, SHAPE)
    best = tl.max(score, axis=0)
    # The largest of numbers and NaN is a number to the device.
    best = tl.where(tl.max((score != score).to(tl.int32), axis=0) > 0, float("nan"), best)
    to = at.row * SHAPE.tiles + tl.program_id(1)
    tl.store(scratch.best_score + to, best)
    tl.store(scratch.best_id + to, tl.min(tl.where(score == best, ids, _NO_ID), axis=0))


@triton.jit(do_not_specialize=["nodes"])
def pick_kernel(trees, nodes, scratch, out_ptr, SHAPE: tl.constexpr):
    """Choose the lowest id among the best tiles': greedy."""
    row = tl.program_id(0).to(tl.int64)
    token = -1
    if tl.program_id(0) // nodes < tl.load(trees.active_count):
        tile = tl.arange(0, SHAPE.block_tiles)
        mask = tile < SHAPE.tiles
        best = tl.load(scratch.best_score + row * SHAPE.tiles + tile, mask=mask, other=float("-inf"))
        ids = tl.load(scratch.best_id + row * SHAPE.tiles + tile, mask=mask, other=_NO_ID)
        token = or_fault(tl.min(tl.where(best == tl.max(best, axis=0), ids, _NO_ID), axis=0), best)
    tl.store(out_ptr + row, token)


@triton.jit
def takes_part(distance, state, SHAPE: tl.constexpr):
    """Tell whether min-p leaves the distances."""
    kept = distance < FAR
    if SHAPE.has_min_p:
        weight = distance_weight(distance)
        least = tl.load(state.numbers + MIN_P).to(tl.float64) * ONE
        kept = kept & (weight >= tl.ceil(least).to(tl.int64))
    return kept


@triton.jit
def load_key(at, state, stream):
    """Load the key of a row's noise, of ``stream`` keys of its slot: int64."""
    return tl.load(state.keys + at.slot * stream + at.number, mask=at.number < stream, other=0)


@triton.jit(do_not_specialize=["nodes", "stream"])
def race_kernel(logits_ptr, trees, nodes, state, scratch, stream, SHAPE: tl.constexpr):
    """Find the smallest mark of a tile; with top-p, apart for ids at the threshold, which are counted, too."""
    if is_skipped(trees, nodes):
        return
    at = this_row(trees, nodes, state)
    to = at.row * SHAPE.tiles + tl.program_id(1)
    threshold = tl.full([], FAR - 1, tl.int32)
    if SHAPE.has_cut:
        threshold = tl.load(scratch.threshold + at.row)
    if score_distance(tl.load(scratch.best_score + to), largest_of(scratch, at, SHAPE)) > threshold:
        tl.store(scratch.best_mark + to, NOBODY)
        if SHAPE.has_top_p:
            tl.store(scratch.num_tied + to, 0)
        return
    ids = tl.program_id(1) * SHAPE.tile + tl.arange(0, SHAPE.tile)
    distance = load_tile(logits_ptr, at, state, scratch, SHAPE)
    marks = token_marks(distance, load_key(at, state, stream), ids, takes_part(distance, state, SHAPE))
    if SHAPE.has_top_p:
        tied = distance == threshold
        tl.store(scratch.num_tied + to, tl.sum(tied.to(tl.int32), axis=0))
        tl.store(scratch.best_tied + to, tl.min(tl.where(tied, marks, NOBODY), axis=0))
        threshold -= 1
    tl.store(scratch.best_mark + to, tl.min(tl.where(distance <= threshold, marks, NOBODY), axis=0))


@triton.jit(do_not_specialize=["nodes", "stream"])
def draw_kernel(logits_ptr, trees, nodes, state, scratch, out_ptr, stream, SHAPE: tl.constexpr):
    """Choose the id of the smallest mark of all tiles, and of the ids at top-p's threshold that stay: the last ones."""
    if is_skipped(trees, nodes):
        tl.store(out_ptr + tl.program_id(0), -1)
        return
    at = this_row(trees, nodes, state)
    tiles = tl.arange(0, SHAPE.block_tiles)
    mask = tiles < SHAPE.tiles
    best = tl.min(tl.load(scratch.best_mark + at.row * SHAPE.tiles + tiles, mask=mask, other=NOBODY), axis=0)
    if SHAPE.has_top_p:
        num_tied = tl.load(scratch.num_tied + at.row * SHAPE.tiles + tiles, mask=mask, other=0)
        num_cut = tl.maximum(tl.sum(num_tied, axis=0) - tl.load(scratch.needed + at.row), 0)
        before = tl.cumsum(num_tied, axis=0) - num_tied
        stays = (num_tied > 0) & (before >= num_cut)
        best_tied = tl.load(scratch.best_tied + at.row * SHAPE.tiles + tiles, mask=stays, other=NOBODY)
        best = tl.minimum(best, tl.min(best_tied, axis=0))
        # Of one tile some may go and some stay.
        is_cut = (before < num_cut) & (before + num_tied > num_cut)
        if tl.sum(is_cut.to(tl.int32), axis=0) > 0:
            num_cut -= tl.sum(tl.where(is_cut, before, 0), axis=0)
            ids = tl.sum(tl.where(is_cut, tiles, 0), axis=0) * SHAPE.tile + tl.arange(0, SHAPE.tile)
            distance = load_distances(logits_ptr, at, largest_of(scratch, at, SHAPE), ids, state, scratch, SHAPE)
            tied = distance == tl.load(scratch.threshold + at.row)
            stays_here = tied & (tl.cumsum(tied.to(tl.int32), axis=0) > num_cut) & takes_part(distance, state, SHAPE)
            marks = token_marks(distance, load_key(at, state, stream), ids, stays_here)
            best = tl.minimum(best, tl.min(marks, axis=0))
    scores = tl.load(scratch.best_score + at.row * SHAPE.tiles + tiles, mask=mask, other=float("-inf"))
    tl.store(out_ptr + at.row, or_fault((best & 0xFFFFFFFF).to(tl.int32), scores))


@triton.jit
def mark_seen_kernel(
    tokens_ptr,
    active_slots_ptr,
    active_count_ptr,
    seen_ptr,
    STRIDE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Set the bits of one slot's tokens; several may share a word."""
    place = tl.program_id(0)
    if place >= tl.load(active_count_ptr):
        return
    slot = tl.load(active_slots_ptr + place).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    token = tl.load(tokens_ptr + slot * STRIDE + columns, mask=columns < WIDTH, other=-1)
    tl.atomic_or(seen_ptr + slot * WORDS + (token >> 5), 1 << (token & 31), mask=token >= 0)
