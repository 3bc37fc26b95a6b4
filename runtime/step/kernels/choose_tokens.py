"""Choosing the target's next token at every node of every tree: the processors, the warpers and the draw.

    score[i]  = warped and processed logit of token i, as transformers has it (repetition penalty, min_new_tokens,
                suppress_tokens; temperature, top-k, top-p, min-p)
    greedy    = lowest i among the largest scores
    sampled   = lowest i with the smallest score distance plus noise of i (`token_noise`), of those that the cuts leave

Distances, noise and weights are whole numbers, so their sums do not depend on the order: a row's token is the same in
any tree, place and batch, and `choose_tokens_ref` gives the same. The cuts of top-k and top-p are found without
sorting (`cut_search`).

Bytes read: the logits once for greedy, twice for sampled, and two or three times more from the L2 with top-k or top-p
(more often where a search's list overflows). Scores that differ by less than 2**-24, or than the fp32 spacing of their
distance from the largest, count as equal in the cuts; of equal ones top-p keeps the last ids. Scores 32 or more below
the largest never win. A row with a NaN or an infinite score, or of barred tokens alone, gets `NO_NUMBER` or
`ALL_BARRED` in place of a token.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from ...errors import LogitsError, UsageError
from ...target.kernels.machine import NO_FUSION
from ...tree import Trees
from . import choice_kernels as kernels
from . import cut_search
from .choice_kernels import WORD_BITS, ChoiceRules, ChoiceScratch, ChoiceShape, ChoiceState
from .token_noise import race_ref
from .token_weights import FAR, MAX_VOCAB, ONE, distance_weight_ref, score_distance_ref

_PENALISE_BLOCK = 4096
_FEW = 1024


def choice_scratch(
    batch: int, nodes: int, vocab: int, device: torch.device | str, tile: int = 2048, capacity: int = 8192
) -> ChoiceScratch:
    """Allocate the scratch of `choose_tokens` for ``batch`` trees of ``nodes`` nodes.

    ``tile``, a power of two: ids that a program takes at a time. ``capacity``: tokens that a search may list. Both
    change speed, never results. A vocabulary smaller than a tile is one tile of its own size.
    """
    tile = min(tile, max(16, triton.next_power_of_2(vocab)))
    tiles, int32, int64 = triton.cdiv(vocab, tile), torch.int32, torch.int64

    def empty(dtype: torch.dtype, *shape: int) -> Tensor:
        return torch.empty(batch * nodes, *shape, dtype=dtype, device=device)

    return ChoiceScratch(
        tile,
        best_score=empty(torch.float32, tiles),
        best_id=empty(int32, tiles),
        threshold=empty(int32),
        interval=empty(int64, 4),
        counts=empty(int32, tiles, cut_search.BINS.value),
        needed=empty(int32),
        mass=empty(int64, tiles),
        num_tied=empty(int32, tiles),
        best_mark=empty(int64, tiles),
        best_tied=empty(int64, tiles),
        penalised=empty(int32, triton.cdiv(vocab, WORD_BITS)),
        listed=empty(int32, capacity),
        num_listed=empty(int32),
    )


def token_bits(ids: Tensor, vocab: int) -> Tensor:
    """Set a bit for each of ``ids`` int64 [count], which may repeat: int32 [ceil(vocab / 32)] on their device."""
    marks = torch.zeros(triton.cdiv(vocab, WORD_BITS) * WORD_BITS, dtype=torch.int64, device=ids.device)
    marks[ids] = 1
    words = (marks.view(-1, WORD_BITS) << torch.arange(WORD_BITS, device=ids.device)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def bit_mask(words: Tensor, vocab: int) -> Tensor:
    """Read bits back: int32 [ceil(vocab / 32)] to bool [vocab]."""
    bits = (words[:, None] >> torch.arange(WORD_BITS, device=words.device, dtype=torch.int32)) & 1
    return bits.flatten()[:vocab] != 0


def choose_tokens_ref(
    logits: Tensor,
    trees: Trees,
    rules: ChoiceRules,
    state: ChoiceState,
    out: Tensor,
    scratch: ChoiceScratch | None = None,
) -> None:
    """Definition of `choose_tokens`, node by node, which needs no ``scratch``; waits for the device."""
    batch, nodes = out.shape
    rows = logits.view(batch, nodes, -1)
    out.fill_(-1)
    for place in range(min(batch, int(trees.active_count))):
        slot = int(trees.active_slots[place])
        for node in range(nodes):
            number = int(state.num_generated[slot]) + int(trees.positions[slot, node])
            path, ancestor = [], node
            while ancestor >= 0:
                path.append(ancestor)
                ancestor = int(trees.parents[slot, ancestor])
            scores = rows[place, node].float()
            scores = _process(scores, trees.draft_tokens[slot, path], slot, number, rules, state)
            keys = state.keys[slot]
            key = int(keys[number]) if number < len(keys) else 0
            out[place, node] = find_fault(scores) or choose_token(scores, rules, state.numbers, key)


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


def find_fault(scores: Tensor) -> int:
    """Return `NO_NUMBER` or `ALL_BARRED` for processed scores, float [vocab], that are no distribution; else 0."""
    largest = float(scores.max())
    if largest == float("-inf"):
        return int(kernels.ALL_BARRED.value)
    return 0 if abs(largest) < float("inf") else int(kernels.NO_NUMBER.value)


def no_distribution(fault: int, prompt: int, position: int) -> LogitsError:
    """Return the error for a new token of a prompt, counted from 0, that could not be chosen."""
    reason = (
        "every token is barred by suppress_tokens, bad_words_ids, min_new_tokens or a logits processor"
        if fault == kernels.ALL_BARRED.value
        else "its logits hold a NaN or an infinite value, as weights of the target or a logits processor may give them"
    )
    return LogitsError(f"New token {position} of prompt {prompt} cannot be chosen: {reason}.")


def choose_token(scores: Tensor, rules: ChoiceRules, numbers: Tensor, key: int) -> int:
    """Choose from processed scores, float32 [vocab]: the rule that all choices follow.

    ``numbers`` and ``key`` as in `ChoiceState`. Waits for the device.
    """
    if not rules.sampled:
        return int((scores == scores.max()).nonzero()[0, 0])
    scores = scores / numbers[0].clamp(min=kernels.COLDEST.value)
    distances = score_distance_ref(scores)
    kept = distances < int(FAR.value)
    if rules.has_top_k:
        kth = min(int(numbers[1]), len(scores))
        kept &= distances <= distances.sort().values[kth - 1]
    if rules.has_top_p:
        weights = distance_weight_ref(distances).masked_fill(~kept, 0)
        least_probable_first = distances.sort(descending=True, stable=True).indices
        total = int(weights.sum())
        cut = min(int((1.0 - float(numbers[2])) * total), total - 1)
        is_cut = weights[least_probable_first].cumsum(0) <= cut
        kept &= ~torch.zeros_like(is_cut).scatter(0, least_probable_first, is_cut)
    if rules.has_min_p:
        kept &= distance_weight_ref(distances) >= float(numbers[3]) * ONE.value
    return race_ref(distances, key, kept)


def choose_tokens(
    logits: Tensor, trees: Trees, rules: ChoiceRules, state: ChoiceState, out: Tensor, scratch: ChoiceScratch
) -> None:
    """Choose a token at every node of the active slots' trees: two launches for greedy, three sampled, nine with cuts.

    Allocates nothing and does not wait, so a CUDA graph can hold it.

    Args:
        logits: bf16, fp16 or fp32 [batch * nodes, vocab]; place i is slot ``active_slots[i]``.
        trees: of all slots; ``draft_tokens`` -1 for a root that is not to be penalised again.
        rules, state: which stages run, and their numbers.
        out: int32 [batch, nodes]: the chosen ids, `NO_NUMBER` or `ALL_BARRED`; -1 in places that are skipped.
        scratch: from `choice_scratch` for these sizes.

    Raises `UsageError` for logits of another type, and for a vocabulary beyond 2**19 - 1.
    """
    vocab, tile, capacity = logits.shape[1], scratch.tile, scratch.listed.shape[1]
    if logits.dtype not in (torch.bfloat16, torch.float16, torch.float32) or not 1 <= vocab < MAX_VOCAB:
        raise UsageError(
            f"logits must be bfloat16, float16 or float32 over 1 to {MAX_VOCAB - 1} ids; got {logits.dtype} over "
            f"{vocab}."
        )
    tiles = triton.cdiv(vocab, tile)
    shape = ChoiceShape(
        **vars(rules),
        vocab=vocab,
        words=triton.cdiv(vocab, WORD_BITS),
        tile=tile,
        tiles=tiles,
        block_tiles=triton.next_power_of_2(tiles),
        capacity=capacity,
        few=min(_FEW, capacity),
    )
    rows, nodes = len(logits), out.shape[1]
    if rules.has_penalty:
        kernels.penalise_kernel[(rows, triton.cdiv(shape.words, _PENALISE_BLOCK))](
            trees, nodes, state, scratch, SHAPE=shape, BLOCK=_PENALISE_BLOCK, num_warps=8
        )
    kernels.best_kernel[(rows, tiles)](logits, trees, nodes, state, scratch, SHAPE=shape, num_warps=8)
    if not rules.sampled:
        kernels.pick_kernel[(rows,)](trees, nodes, scratch, out, SHAPE=shape, num_warps=1)
        return
    if shape.has_cut:
        for is_first in (True, False):
            cut_search.survey_kernel[(rows, tiles)](
                logits, trees, nodes, state, scratch, SHAPE=shape, FIRST=is_first, num_warps=8
            )
            cut_search.narrow_kernel[(rows,)](trees, nodes, state, scratch, SHAPE=shape, FIRST=is_first, num_warps=4)
        cut_search.collect_kernel[(rows, tiles)](logits, trees, nodes, state, scratch, SHAPE=shape, num_warps=8)
        cut_search.cut_kernel[(rows,)](logits, trees, nodes, state, scratch, SHAPE=shape, num_warps=16)
    given, options = (logits, trees, nodes, state, scratch), {"SHAPE": shape, "num_warps": 8, **NO_FUSION}
    kernels.race_kernel[(rows, tiles)](*given, state.keys.shape[1], **options)
    kernels.draw_kernel[(rows,)](*given, out, state.keys.shape[1], **options)


def mark_seen_ref(tokens: Tensor, active_slots: Tensor, active_count: Tensor, seen: Tensor) -> None:
    """Definition of `mark_seen`; waits for the device."""
    for slot in active_slots[: int(active_count)].tolist():
        seen[slot] |= token_bits(tokens[slot][tokens[slot] >= 0].long(), seen.shape[1] * WORD_BITS)


def mark_seen(tokens: Tensor, active_slots: Tensor, active_count: Tensor, seen: Tensor) -> None:
    """Set the bits of active slots' accepted tokens in ``seen`` int32 [slots, ceil(vocab / 32)]; one launch, no wait.

    ``tokens`` int32 [slots or more, width], -1 pads; ``active_slots`` int32 [slots]; ``active_count`` int32 [1].
    """
    width = tokens.shape[1]
    kernels.mark_seen_kernel[(len(active_slots),)](
        tokens,
        active_slots,
        active_count,
        seen,
        STRIDE=tokens.stride(0),
        WIDTH=width,
        BLOCK=triton.next_power_of_2(width),
        WORDS=seen.shape[1],
        num_warps=1,
    )
