"""Choosing the target's next token at every node of every tree: the processors, the warpers and the draw.

    score[i]  = warped and processed logit of token i, as transformers has it (repetition penalty, min_new_tokens,
                suppress_tokens; temperature, top-k, top-p, min-p)
    greedy    = lowest i among the largest scores
    sampled   = first i with weight[0] + .. + weight[i] > floor(uniform * sum of all weights)

The weight of a score is a whole number (`token_weights`), so nothing here depends on the order of additions: a row's
token is the same in any tree, place and batch, and `choose_tokens_ref` gives it to the last bit. Nothing is sorted: the
cuts of top-k and top-p are found by narrowing an interval with histograms (`cut_search`).

Bytes read: the logits once for greedy, three times for sampled, and two or three times more from the L2 for top-k and
top-p, or as often as it takes where more tokens are in question than are listed. Limits: fewer than 2**19 tokens,
logits without NaN. Scores that differ by less than 2**-24, or than the fp32 spacing of their distance from the largest,
count as equal in the cuts; of equal ones top-p keeps the last ids.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
import triton
from torch import Tensor

from ..errors import UsageError
from . import choice_kernels as kernels
from . import cut_search
from .arguments import check_tensors
from .token_weights import MAX_VOCAB, ONE, distance_weight_ref, score_distance_ref

_WORD_BITS = 32
_PENALISE_BLOCK = 4096


@dataclass(frozen=True)
class ChoiceRules:
    """Which stages run; their numbers are in `ChoiceState`, so that one CUDA graph serves all values."""

    sampled: bool = False
    """Otherwise greedy, and the next three are without effect."""
    has_top_k: bool = False
    has_top_p: bool = False
    has_min_p: bool = False
    has_penalty: bool = False
    """repetition_penalty is not 1."""
    has_suppressed: bool = False
    """suppress_tokens."""
    has_minimum: bool = False
    """min_new_tokens."""

    @property
    def flags(self) -> tuple[bool, ...]:
        """All of them in their order: a key for graphs."""
        return tuple(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True)
class ChoiceState:
    """What choices depend on beside logits and trees; on one device."""

    numbers: Tensor
    """float32 [8]: temperature, top_k, top_p, min_p, repetition_penalty, min_new_tokens, 0, 0."""
    uniforms: Tensor
    """float64 [slots, stream], in [0, 1): number i chooses new token i of the slot's request; 0 beyond the end."""
    num_generated: Tensor
    """int32 [slots]: new tokens so far. A node at depth d chooses number ``num_generated + d``."""
    seen: Tensor
    """int32 [slots, ceil(vocab / 32)]: a bit for each id in prompt or answer so far, the root included."""
    suppressed: Tensor
    """int32 [ceil(vocab / 32)]."""
    eos: Tensor
    """int32 [ceil(vocab / 32)]."""

    @classmethod
    def allocate(cls, slots: int, stream: int, vocab: int, device: torch.device | str) -> ChoiceState:
        """Allocate with every rule neutral, nothing seen, and uniforms of 0."""
        words = num_words(vocab)
        int32: dict[str, Any] = {"dtype": torch.int32, "device": device}
        numbers = torch.tensor([1.0, vocab, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0], dtype=torch.float32, device=device)
        return cls(
            numbers, torch.zeros(slots, stream, dtype=torch.float64, device=device), torch.zeros(slots, **int32),
            torch.zeros(slots, words, **int32), torch.zeros(words, **int32), torch.zeros(words, **int32),
        )  # fmt: skip


@dataclass(frozen=True)
class ChoiceScratch:
    """Results that one launch leaves to the next; rows are places times nodes."""

    part: int
    """Neighbouring ids that one program takes: a power of two."""
    best_score: Tensor
    """float32 [rows, parts]."""
    best_id: Tensor
    """int32 [rows, parts]."""
    threshold: Tensor
    """int32 [rows]: largest distance that the cuts keep."""
    interval: Tensor
    """int64 [rows, 4]: in which the cut lies, see `cut_search`."""
    counts: Tensor
    """int32 [rows, parts, 64]: tokens in the bins of the interval."""
    goal: Tensor
    """int64 [rows]: weight that top-p keeps at least."""
    mass: Tensor
    """int64 [rows, parts]: weight nearer than the interval, in the end nearer than the threshold."""
    num_tied: Tensor
    """int32 [rows, parts]: tokens at the threshold."""
    penalised: Tensor
    """int32 [rows, ceil(vocab / 32)]: seen, or on the node's path."""
    listed: Tensor
    """int32 [rows, capacity]: distances of the tokens in the interval, once few enough are left to search."""
    num_listed: Tensor
    """int32 [rows]"""


def choice_scratch(
    places: int, nodes: int, vocab: int, device: torch.device | str, part: int = 2048, capacity: int = 8192
) -> ChoiceScratch:
    """Allocate the scratch of `choose_tokens` for ``places`` trees of ``nodes`` nodes.

    ``part``, a power of two: ids that a program takes at a time. ``capacity``: tokens that a search may list. Both
    change speed, never results. A vocabulary smaller than a part is one part of its own size.
    """
    part = min(part, max(16, triton.next_power_of_2(vocab)))
    rows, parts = places * nodes, triton.cdiv(vocab, part)
    int32: dict[str, Any] = {"dtype": torch.int32, "device": device}
    int64: dict[str, Any] = {"dtype": torch.int64, "device": device}
    return ChoiceScratch(
        part, torch.empty(rows, parts, dtype=torch.float32, device=device), torch.empty(rows, parts, **int32),
        torch.empty(rows, **int32), torch.empty(rows, 4, **int64),
        torch.empty(rows, parts, cut_search.BINS.value, **int32), torch.empty(rows, **int64),
        torch.empty(rows, parts, **int64), torch.empty(rows, parts, **int32),
        torch.empty(rows, num_words(vocab), **int32), torch.empty(rows, capacity, **int32), torch.empty(rows, **int32),
    )  # fmt: skip


def num_words(vocab: int) -> int:
    """Words of 32 bits that hold a bit for each id."""
    return -(-vocab // _WORD_BITS)


def token_bits(ids: Tensor, vocab: int) -> Tensor:
    """Set the bits of ids, int64 [count] without repetition needed: int32 [ceil(vocab / 32)] on their device."""
    marks = torch.zeros(num_words(vocab) * _WORD_BITS, dtype=torch.int64, device=ids.device)
    marks[ids] = 1
    words = (marks.view(-1, _WORD_BITS) << torch.arange(_WORD_BITS, device=ids.device)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def bit_mask(words: Tensor, vocab: int) -> Tensor:
    """Read bits back: int32 [ceil(vocab / 32)] to bool [vocab]."""
    bits = (words[:, None] >> torch.arange(_WORD_BITS, device=words.device, dtype=torch.int32)) & 1
    return bits.flatten()[:vocab] != 0


def choose_tokens_ref(
    logits: Tensor,
    active_slots: Tensor,
    active_count: Tensor,
    draft_tokens: Tensor,
    parents: Tensor,
    positions: Tensor,
    rules: ChoiceRules,
    state: ChoiceState,
    out: Tensor,
    scratch: ChoiceScratch | None = None,
) -> None:
    """Definition of `choose_tokens`, node by node, which needs no ``scratch``; waits for the device."""
    places, nodes = out.shape
    rows = logits.view(places, nodes, -1)
    out.fill_(-1)
    for place in range(min(places, int(active_count))):
        slot = int(active_slots[place])
        for node in range(nodes):
            number = int(state.num_generated[slot]) + int(positions[slot, node])
            path, ancestor = [], node
            while ancestor >= 0:
                path.append(ancestor)
                ancestor = int(parents[slot, ancestor])
            scores = _process(rows[place, node].float(), draft_tokens[slot, path], slot, number, rules, state)
            if rules.sampled:
                stream = state.uniforms[slot]
                uniform = float(stream[number]) if number < len(stream) else 0.0
                out[place, node] = _draw(scores, rules, state.numbers, uniform)
            else:
                out[place, node] = (scores == scores.max()).nonzero()[0, 0]


def _process(scores: Tensor, path: Tensor, slot: int, number: int, rules: ChoiceRules, state: ChoiceState) -> Tensor:
    """Apply the processors to float32 [vocab] for new token ``number`` of a slot after the tokens of a path."""
    vocab = len(scores)
    if rules.has_penalty:
        seen = bit_mask(state.seen[slot], vocab)
        seen[path[path >= 0]] = True
        penalty = state.numbers[4]
        scores = torch.where(seen, torch.where(scores < 0, scores * penalty, scores / penalty), scores)
    if rules.has_minimum and number < int(state.numbers[5]):
        scores = scores.masked_fill(bit_mask(state.eos, vocab), float("-inf"))
    if rules.has_suppressed:
        scores = scores.masked_fill(bit_mask(state.suppressed, vocab), float("-inf"))
    return scores


def _draw(scores: Tensor, rules: ChoiceRules, numbers: Tensor, uniform: float) -> int:
    """Draw from float32 [vocab]: temperature, cuts, then the inverse of the cumulative weights in id order."""
    distances = score_distance_ref(scores / numbers[0].clamp(min=kernels.COLDEST.value))
    weights = distance_weight_ref(distances)
    if rules.has_top_k:
        kth = min(int(numbers[1]), len(scores))
        weights = weights.masked_fill(distances > distances.sort().values[kth - 1], 0)
    if rules.has_top_p:
        least_probable_first = distances.sort(descending=True, stable=True).indices
        total = int(weights.sum())
        cut = min(int((1.0 - float(numbers[2])) * total), total - 1)
        is_cut = weights[least_probable_first].cumsum(0) <= cut
        weights = weights.masked_fill(torch.zeros_like(is_cut).scatter(0, least_probable_first, is_cut), 0)
    if rules.has_min_p:
        weights = weights.masked_fill(weights < float(numbers[3]) * ONE.value, 0)
    reached = weights.cumsum(0)
    total = int(reached[-1])
    return int((reached <= min(int(uniform * total), total - 1)).sum())


def choose_tokens(
    logits: Tensor,
    active_slots: Tensor,
    active_count: Tensor,
    draft_tokens: Tensor,
    parents: Tensor,
    positions: Tensor,
    rules: ChoiceRules,
    state: ChoiceState,
    out: Tensor,
    scratch: ChoiceScratch,
) -> None:
    """Choose a token at every node of the active slots' trees: two launches for greedy, three sampled, nine with cuts.

    Allocates nothing and does not wait, so a CUDA graph can hold it.

    Args:
        logits: bf16, fp16 or fp32 [places * nodes, vocab]; place i is slot ``active_slots[i]``.
        active_slots: int32 [slots].
        active_count: int32 [1]: places beyond are skipped.
        draft_tokens: int64 [slots, nodes], the root first; -1 for a root that nothing needs to be told of.
        parents: int64 [slots, nodes], -1 for the root.
        positions: int64 [slots, nodes]: depth of each node.
        rules: which stages run.
        state: their numbers.
        out: int32 [places, nodes]: the chosen ids; -1 in places that are skipped.
        scratch: from `choice_scratch` for these sizes.

    Raises:
        UsageError: tensors of other shapes, types or devices, or a vocabulary beyond 2**19 - 1.
    """
    _check(logits, active_slots, active_count, draft_tokens, parents, positions, state, out, scratch)
    nodes = out.shape[1]
    rows, vocab = logits.shape
    parts = triton.cdiv(vocab, scratch.part)
    words = num_words(vocab)
    if rules.has_penalty:
        kernels.penalise_kernel[(rows, triton.cdiv(words, _PENALISE_BLOCK))](
            state.seen, draft_tokens, parents, active_slots, active_count, scratch.penalised,
            NODES=nodes, WORDS=words, BLOCK=_PENALISE_BLOCK, num_warps=8,
        )  # fmt: skip
    row_arguments = (active_slots, active_count, positions, state.num_generated)
    score_arguments = (scratch.penalised, state.suppressed, state.eos, state.numbers)
    common: dict[str, Any] = {
        "NODES": nodes, "VOCAB": vocab, "WORDS": words, "PART": scratch.part, "HAS_PENALTY": rules.has_penalty,
        "HAS_SUPPRESSED": rules.has_suppressed, "HAS_MINIMUM": rules.has_minimum,
    }  # fmt: skip
    reduction = {"PARTS": parts, "BLOCK_P": triton.next_power_of_2(parts)}
    kernels.best_kernel[(rows, parts)](
        logits, *row_arguments, *score_arguments, scratch.best_score, scratch.best_id,
        **common, SAMPLED=rules.sampled, num_warps=8,
    )  # fmt: skip
    if not rules.sampled:
        kernels.pick_kernel[(rows,)](
            active_count, scratch.best_score, scratch.best_id, out, NODES=nodes, **reduction, num_warps=1
        )
        return
    has_cut = rules.has_top_k or rules.has_top_p
    if has_cut:
        of_row = (logits, *row_arguments, *score_arguments, scratch.best_score, scratch.interval)
        listed = (scratch.listed, scratch.num_listed, scratch.listed.shape[1])
        few = min(cut_search.FEW, scratch.listed.shape[1])
        search: dict[str, Any] = {"NODES": nodes, **reduction, "WEIGHTED": not rules.has_top_k}
        for is_first in (True, False):
            cut_search.survey_kernel[(rows, parts)](
                *of_row, scratch.counts, scratch.mass, few, **common | search, FIRST=is_first, num_warps=8
            )
            cut_search.narrow_kernel[(rows,)](
                active_count, state.numbers, scratch.interval, scratch.counts, scratch.mass, scratch.num_listed,
                few, **search, FIRST=is_first, num_warps=4,
            )  # fmt: skip
        cut_search.collect_kernel[(rows, parts)](*of_row, scratch.mass, *listed, **common | search, num_warps=8)
        cut_search.cut_kernel[(rows,)](
            *of_row, scratch.mass, *listed, scratch.threshold, scratch.goal, **common, **reduction,
            HAS_TOP_K=rules.has_top_k, HAS_TOP_P=rules.has_top_p, num_warps=16,
        )  # fmt: skip
    kernels.mass_kernel[(rows, parts)](
        logits, *row_arguments, *score_arguments, scratch.best_score, scratch.threshold, scratch.mass,
        scratch.num_tied, **common, **reduction, HAS_CUT=has_cut, HAS_MIN_P=rules.has_min_p, num_warps=8,
    )  # fmt: skip
    kernels.draw_kernel[(rows,)](
        logits, *row_arguments, state.uniforms, state.uniforms.shape[1], *score_arguments, scratch.best_score,
        scratch.threshold, scratch.goal, scratch.mass, scratch.num_tied, out, **common, **reduction,
        HAS_CUT=has_cut, HAS_TOP_P=rules.has_top_p, HAS_MIN_P=rules.has_min_p, num_warps=8,
    )  # fmt: skip


def _check(
    logits: Tensor,
    active_slots: Tensor,
    active_count: Tensor,
    draft_tokens: Tensor,
    parents: Tensor,
    positions: Tensor,
    state: ChoiceState,
    out: Tensor,
    scratch: ChoiceScratch,
) -> None:
    """Refuse tensors that do not fit each other."""
    if out.dim() != 2 or logits.dim() != 2 or logits.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise UsageError(
            f"logits must be bfloat16, float16 or float32 [places * nodes, vocab] and out [places, nodes]; got "
            f"{logits.dtype} {list(logits.shape)} and {list(out.shape)}.",
            tensor="logits",
        )
    places, nodes = out.shape
    vocab = logits.shape[1]
    if not 1 <= vocab < MAX_VOCAB:
        raise UsageError(f"vocab must be 1 to {MAX_VOCAB - 1}; got {vocab}.", vocab=vocab)
    rows, words, slots = places * nodes, num_words(vocab), active_slots.numel()
    trees = (torch.int64, (slots, nodes))
    check_tensors(
        out.device, logits=(logits, logits.dtype, (rows, vocab)), out=(out, torch.int32, (places, nodes)),
        active_slots=(active_slots, torch.int32, (slots,)), active_count=(active_count, torch.int32, (1,)),
        draft_tokens=(draft_tokens, *trees), parents=(parents, *trees), positions=(positions, *trees),
        numbers=(state.numbers, torch.float32, (8,)), uniforms=(state.uniforms, torch.float64, (slots, None)),
        num_generated=(state.num_generated, torch.int32, (slots,)), seen=(state.seen, torch.int32, (slots, words)),
        suppressed=(state.suppressed, torch.int32, (words,)), eos=(state.eos, torch.int32, (words,)),
        best_score=(scratch.best_score, torch.float32, (rows, triton.cdiv(vocab, scratch.part))),
        penalised=(scratch.penalised, torch.int32, (rows, words)), listed=(scratch.listed, torch.int32, (rows, None)),
    )  # fmt: skip


def mark_seen_ref(tokens: Tensor, active_slots: Tensor, active_count: Tensor, seen: Tensor) -> None:
    """Definition of `mark_seen`; waits for the device."""
    for slot in active_slots[: int(active_count)].tolist():
        for token in tokens[slot].tolist():
            if token >= 0:
                bit = token % _WORD_BITS
                seen[slot, token // _WORD_BITS] |= -(2**31) if bit == _WORD_BITS - 1 else 1 << bit


def mark_seen(tokens: Tensor, active_slots: Tensor, active_count: Tensor, seen: Tensor) -> None:
    """Set the bits of accepted tokens in ``seen``, for active slots; one launch, no wait.

    Args:
        tokens: int32 [slots, width], by slot; -1 pads.
        active_slots: int32 [slots].
        active_count: int32 [1].
        seen: int32 [slots, ceil(vocab / 32)].

    Raises:
        UsageError: tensors of other shapes, types or devices.
    """
    slots = active_slots.numel()
    check_tensors(
        seen.device, tokens=(tokens, torch.int32, (slots, None)), active_slots=(active_slots, torch.int32, (slots,)),
        active_count=(active_count, torch.int32, (1,)), seen=(seen, torch.int32, (slots, None)),
    )  # fmt: skip
    width = tokens.shape[1]
    kernels.mark_seen_kernel[(slots,)](
        tokens, active_slots, active_count, seen,
        WIDTH=width, BLOCK=triton.next_power_of_2(width), WORDS=seen.shape[1], num_warps=1,
    )  # fmt: skip
