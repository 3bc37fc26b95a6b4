"""Device code of `choose_tokens`: the launches in their order, each with its result in scratch.

    penalise   a bit for each id that a row's repetition penalty falls on       one program per row and piece
    best       largest score and its lowest id                                  one per row and part
    (cuts)     where top-k and top-p cut: `cut_search`
    mass       weight of what is left                                           one per row and part
    draw       the part, then the token, in which the uniform number falls      one per row

Greedy needs the second and a reduction of it, `pick`. A part is PART neighbouring ids. Scores are made from the logits
anew by each: they are read from the L2, and no buffer of theirs grows with nodes times vocabulary.
"""

import triton
import triton.language as tl

from .token_weights import FAR, ONE, distance_weight, score_distance

TEMPERATURE, TOP_K, TOP_P, MIN_P, PENALTY, MINIMUM = (tl.constexpr(place) for place in range(6))
"""Places in ``numbers``."""
COLDEST = tl.constexpr(1e-30)
"""The largest logit has all the probability long before this; colder, its quotient would overflow."""
_NO_ID = tl.constexpr(0x7FFFFFFF)


@triton.jit
def has_bit(bits_ptr, ids, mask):
    """Whether the bits of ``ids`` are set."""
    words = tl.load(bits_ptr + (ids >> 5), mask=mask, other=0)
    return ((words >> (ids & 31)) & 1) != 0


@triton.jit
def load_scores(
    logits_ptr, penalised_ptr, suppressed_ptr, eos_ptr, numbers_ptr, too_short, ids,
    VOCAB: tl.constexpr, SAMPLED: tl.constexpr, HAS_PENALTY: tl.constexpr, HAS_SUPPRESSED: tl.constexpr,
    HAS_MINIMUM: tl.constexpr,
):  # fmt: skip
    """Logits of one row after the processors and the temperature, fp32; -inf beyond the vocabulary."""
    mask = ids < VOCAB
    score = tl.load(logits_ptr + ids, mask=mask, other=float("-inf")).to(tl.float32)
    if HAS_PENALTY:
        penalty = tl.load(numbers_ptr + PENALTY)
        weaker = tl.where(score < 0, score * penalty, tl.div_rn(score, penalty))
        score = tl.where(has_bit(penalised_ptr, ids, mask), weaker, score)
    if HAS_MINIMUM:
        score = tl.where(too_short & has_bit(eos_ptr, ids, mask), float("-inf"), score)
    if HAS_SUPPRESSED:
        score = tl.where(has_bit(suppressed_ptr, ids, mask), float("-inf"), score)
    if SAMPLED:
        score = tl.div_rn(score, tl.maximum(tl.load(numbers_ptr + TEMPERATURE), COLDEST))
    return score


@triton.jit
def load_distances(
    logits_ptr, penalised_ptr, suppressed_ptr, eos_ptr, numbers_ptr, too_short, largest, ids,
    VOCAB: tl.constexpr, HAS_PENALTY: tl.constexpr, HAS_SUPPRESSED: tl.constexpr, HAS_MINIMUM: tl.constexpr,
):  # fmt: skip
    """Distances of one row's scores below its largest; `FAR` beyond the vocabulary."""
    score = load_scores(
        logits_ptr, penalised_ptr, suppressed_ptr, eos_ptr, numbers_ptr, too_short, ids,
        VOCAB, True, HAS_PENALTY, HAS_SUPPRESSED, HAS_MINIMUM,
    )  # fmt: skip
    return tl.where(ids < VOCAB, score_distance(score, largest), FAR)


@triton.jit
def is_row_too_short(
    row, active_slots_ptr, positions_ptr, num_generated_ptr, numbers_ptr,
    NODES: tl.constexpr, HAS_MINIMUM: tl.constexpr,
):  # fmt: skip
    """Whether the token after a row's node may not yet end the text."""
    too_short = False
    if HAS_MINIMUM:
        slot = tl.load(active_slots_ptr + row // NODES)
        node = row % NODES
        number = tl.load(num_generated_ptr + slot)
        number += tl.load(positions_ptr + slot.to(tl.int64) * NODES + node)
        too_short = number < tl.load(numbers_ptr + MINIMUM).to(tl.int64)
    return too_short


@triton.jit
def largest_of(best_score_ptr, row, PARTS: tl.constexpr, BLOCK_P: tl.constexpr):
    """Largest score of a row from those of its parts."""
    part = tl.arange(0, BLOCK_P)
    best = tl.load(best_score_ptr + row * PARTS + part, mask=part < PARTS, other=float("-inf"))
    return tl.max(best, axis=0)


@triton.jit
def load_part(
    logits_ptr, active_slots_ptr, positions_ptr, num_generated_ptr, penalised_ptr, suppressed_ptr, eos_ptr,
    numbers_ptr, best_score_ptr, row,
    NODES: tl.constexpr, VOCAB: tl.constexpr, WORDS: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_P: tl.constexpr, HAS_PENALTY: tl.constexpr, HAS_SUPPRESSED: tl.constexpr, HAS_MINIMUM: tl.constexpr,
):  # fmt: skip
    """`load_distances` of a row's part with this program's number: int32 [PART]."""
    too_short = is_row_too_short(
        row, active_slots_ptr, positions_ptr, num_generated_ptr, numbers_ptr, NODES, HAS_MINIMUM
    )  # fmt: skip
    part = tl.program_id(1)
    return load_distances(
        logits_ptr + row * VOCAB, penalised_ptr + row * WORDS, suppressed_ptr, eos_ptr, numbers_ptr, too_short,
        largest_of(best_score_ptr, row, PARTS, BLOCK_P), part * PART + tl.arange(0, PART),
        VOCAB, HAS_PENALTY, HAS_SUPPRESSED, HAS_MINIMUM,
    )  # fmt: skip


@triton.jit
def penalise_kernel(
    seen_ptr, draft_tokens_ptr, parents_ptr, active_slots_ptr, active_count_ptr, penalised_ptr,
    NODES: tl.constexpr, WORDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Join the bits of what a slot has seen with those of the node's path."""
    row = tl.program_id(0)
    place = row // NODES
    if place >= tl.load(active_count_ptr):
        return
    slot = tl.load(active_slots_ptr + place).to(tl.int64)
    words = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    bits = tl.load(seen_ptr + slot * WORDS + words, mask=words < WORDS, other=0)
    node = (row % NODES).to(tl.int64)
    while node >= 0:
        token = tl.load(draft_tokens_ptr + slot * NODES + node).to(tl.int32)
        bits |= tl.where(words == token >> 5, 1 << (token & 31), 0)
        node = tl.load(parents_ptr + slot * NODES + node)
    tl.store(penalised_ptr + row.to(tl.int64) * WORDS + words, bits, mask=words < WORDS)


@triton.jit
def best_kernel(
    logits_ptr, active_slots_ptr, active_count_ptr, positions_ptr, num_generated_ptr,
    penalised_ptr, suppressed_ptr, eos_ptr, numbers_ptr, best_score_ptr, best_id_ptr,
    NODES: tl.constexpr, VOCAB: tl.constexpr, WORDS: tl.constexpr, PART: tl.constexpr, SAMPLED: tl.constexpr,
    HAS_PENALTY: tl.constexpr, HAS_SUPPRESSED: tl.constexpr, HAS_MINIMUM: tl.constexpr,
):  # fmt: skip
    """Largest score of a part, and its lowest id."""
    row = tl.program_id(0).to(tl.int64)
    place = row // NODES
    if place >= tl.load(active_count_ptr):
        return
    too_short = is_row_too_short(
        row, active_slots_ptr, positions_ptr, num_generated_ptr, numbers_ptr, NODES, HAS_MINIMUM
    )  # fmt: skip
    ids = tl.program_id(1) * PART + tl.arange(0, PART)
    score = load_scores(
        logits_ptr + row * VOCAB, penalised_ptr + row * WORDS, suppressed_ptr, eos_ptr, numbers_ptr, too_short, ids,
        VOCAB, SAMPLED, HAS_PENALTY, HAS_SUPPRESSED, HAS_MINIMUM,
    )  # fmt: skip
    best = tl.max(score, axis=0)
    at = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(best_score_ptr + at, best)
    tl.store(best_id_ptr + at, tl.min(tl.where(score == best, ids, _NO_ID), axis=0))


@triton.jit
def pick_kernel(
    active_count_ptr, best_score_ptr, best_id_ptr, out_ptr,
    NODES: tl.constexpr, PARTS: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Greedy: lowest id among the best parts'."""
    row = tl.program_id(0).to(tl.int64)
    token = -1
    if row // NODES < tl.load(active_count_ptr):
        part = tl.arange(0, BLOCK_P)
        mask = part < PARTS
        best = tl.load(best_score_ptr + row * PARTS + part, mask=mask, other=float("-inf"))
        ids = tl.load(best_id_ptr + row * PARTS + part, mask=mask, other=_NO_ID)
        token = tl.min(tl.where(best == tl.max(best, axis=0), ids, _NO_ID), axis=0)
    tl.store(out_ptr + row, token)


@triton.jit
def least_weight(numbers_ptr):
    """Smallest weight that min-p keeps: int64."""
    least = tl.load(numbers_ptr + MIN_P).to(tl.float64) * ONE
    return tl.ceil(least).to(tl.int64)


@triton.jit
def mass_kernel(
    logits_ptr, active_slots_ptr, active_count_ptr, positions_ptr, num_generated_ptr,
    penalised_ptr, suppressed_ptr, eos_ptr, numbers_ptr, best_score_ptr, threshold_ptr, mass_ptr, num_tied_ptr,
    NODES: tl.constexpr, VOCAB: tl.constexpr, WORDS: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_P: tl.constexpr, HAS_CUT: tl.constexpr, HAS_MIN_P: tl.constexpr, HAS_PENALTY: tl.constexpr,
    HAS_SUPPRESSED: tl.constexpr, HAS_MINIMUM: tl.constexpr,
):  # fmt: skip
    """Weight of a part's tokens nearer than the threshold, and how many lie at it."""
    row = tl.program_id(0).to(tl.int64)
    place = row // NODES
    if place >= tl.load(active_count_ptr):
        return
    distance = load_part(
        logits_ptr, active_slots_ptr, positions_ptr, num_generated_ptr, penalised_ptr, suppressed_ptr, eos_ptr,
        numbers_ptr, best_score_ptr, row,
        NODES, VOCAB, WORDS, PART, PARTS, BLOCK_P, HAS_PENALTY, HAS_SUPPRESSED, HAS_MINIMUM,
    )  # fmt: skip
    part = tl.program_id(1)
    threshold = FAR
    if HAS_CUT:
        threshold = tl.load(threshold_ptr + row)
    weight = tl.where(distance < threshold, distance_weight(distance), 0)
    if HAS_MIN_P:
        weight = tl.where(weight >= least_weight(numbers_ptr), weight, 0)
    tl.store(mass_ptr + row * PARTS + part, tl.sum(weight, axis=0))
    if HAS_CUT:
        tl.store(num_tied_ptr + row * PARTS + part, tl.sum((distance == threshold).to(tl.int32), axis=0))


@triton.jit
def draw_kernel(
    logits_ptr, active_slots_ptr, active_count_ptr, positions_ptr, num_generated_ptr, uniforms_ptr, stream,
    penalised_ptr, suppressed_ptr, eos_ptr, numbers_ptr, best_score_ptr, threshold_ptr, goal_ptr, mass_ptr,
    num_tied_ptr, out_ptr,
    NODES: tl.constexpr, VOCAB: tl.constexpr, WORDS: tl.constexpr, PART: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_P: tl.constexpr, HAS_CUT: tl.constexpr, HAS_TOP_P: tl.constexpr, HAS_MIN_P: tl.constexpr,
    HAS_PENALTY: tl.constexpr, HAS_SUPPRESSED: tl.constexpr, HAS_MINIMUM: tl.constexpr,
):  # fmt: skip
    """First token at which the weights kept, in id order, exceed the uniform number's share of their sum."""
    row = tl.program_id(0).to(tl.int64)
    place = row // NODES
    if place >= tl.load(active_count_ptr):
        tl.store(out_ptr + row, -1)
        return
    slot = tl.load(active_slots_ptr + place).to(tl.int64)
    number = tl.load(num_generated_ptr + slot) + tl.load(positions_ptr + slot * NODES + row % NODES)
    parts = tl.arange(0, BLOCK_P)
    mask = parts < PARTS
    mass = tl.load(mass_ptr + row * PARTS + parts, mask=mask, other=0)
    cut_before = tl.zeros([BLOCK_P], tl.int32)
    threshold = FAR
    tied_weight = tl.zeros([], tl.int64)
    if HAS_CUT:
        threshold = tl.load(threshold_ptr + row)
        tied_weight = distance_weight(threshold)
        num_tied = tl.load(num_tied_ptr + row * PARTS + parts, mask=mask, other=0)
        if HAS_TOP_P:
            # Of those at the threshold the last ids stay, as many as are needed.
            missing = tl.load(goal_ptr + row) - tl.sum(mass, axis=0)
            needed = (missing + tied_weight - 1) // tl.maximum(tied_weight, 1)
            num_cut = tl.maximum(tl.sum(num_tied, axis=0) - needed, 0).to(tl.int32)
            tied_before = tl.cumsum(num_tied, axis=0) - num_tied
            cut_before = tl.minimum(tl.maximum(num_cut - tied_before, 0), num_tied)
        if HAS_MIN_P:
            tied_weight = tl.where(tied_weight >= least_weight(numbers_ptr), tied_weight, 0)
        mass += (num_tied - cut_before) * tied_weight
    reached = tl.cumsum(mass, axis=0)
    total = tl.sum(mass, axis=0)
    uniform = tl.load(uniforms_ptr + slot * stream + number, mask=number < stream, other=0.0)
    # Rounding must not leave the point beyond the last token.
    point = tl.minimum((uniform * total.to(tl.float64)).to(tl.int64), total - 1)
    part = tl.sum((reached <= point).to(tl.int32), axis=0)
    point -= tl.sum(tl.where(parts < part, mass, 0), axis=0)

    too_short = False
    if HAS_MINIMUM:
        too_short = number < tl.load(numbers_ptr + MINIMUM).to(tl.int64)
    distance = load_distances(
        logits_ptr + row * VOCAB, penalised_ptr + row * WORDS, suppressed_ptr, eos_ptr, numbers_ptr, too_short,
        largest_of(best_score_ptr, row, PARTS, BLOCK_P), part * PART + tl.arange(0, PART),
        VOCAB, HAS_PENALTY, HAS_SUPPRESSED, HAS_MINIMUM,
    )  # fmt: skip
    weight = tl.where(distance < threshold, distance_weight(distance), 0)
    if HAS_MIN_P:
        weight = tl.where(weight >= least_weight(numbers_ptr), weight, 0)
    if HAS_CUT:
        tied = distance == threshold
        stays = tl.cumsum(tied.to(tl.int32), axis=0) > tl.sum(tl.where(parts == part, cut_before, 0), axis=0)
        weight = tl.where(tied & stays, tied_weight, weight)
    offset = tl.sum((tl.cumsum(weight, axis=0) <= point).to(tl.int32), axis=0)
    tl.store(out_ptr + row, part * PART + offset)


@triton.jit
def mark_seen_kernel(
    tokens_ptr, active_slots_ptr, active_count_ptr, seen_ptr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Set the bits of one slot's tokens; several may share a word."""
    place = tl.program_id(0)
    if place >= tl.load(active_count_ptr):
        return
    slot = tl.load(active_slots_ptr + place).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    token = tl.load(tokens_ptr + slot * WIDTH + columns, mask=columns < WIDTH, other=-1)
    tl.atomic_or(seen_ptr + slot * WORDS + (token >> 5), 1 << (token & 31), mask=token >= 0)
