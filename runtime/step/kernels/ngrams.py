"""`no_repeat_ngram_size` at every node of every tree: what would repeat n tokens of the text before it is barred.

The text of a node is that of its slot, with the root at its end, and then the node's path. With n = 3, for the text
"a b c a b" and c drafted after it::

    node   text           last n - 1   before    barred
    b      a b c a b      a b          a b c     c
    c      a b c a b c    b c          b c a     a

The rule is that of transformers' ``NoRepeatNGramLogitsProcessor``. The logits of what is barred become -inf before
`choose_tokens` reads them, which no other rule takes back. `keep_text` adds what a walk has accepted.

Bytes read: n times a slot's text for each of its nodes, from the L2.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...tensor_checks import check_tensors
from ...tree import Trees
from .choice_kernels import NGRAM

_BLOCK = 512
_PROGRAMS = 16
"""Of a row; each takes every sixteenth block of its text."""


class Texts(NamedTuple):
    """The tokens of every slot, prompt and answer; int32 on one device."""

    tokens: Tensor
    """[slots, capacity]"""
    lengths: Tensor
    """[slots]: place of the newest token, as in `acceptance.SlotState`."""


def bar_ngrams_ref(logits: Tensor, trees: Trees, texts: Texts, numbers: Tensor) -> None:
    """Definition of `bar_ngrams`, node by node; waits for the device."""
    size, nodes = int(numbers[NGRAM.value]), trees.draft_tokens.shape[1]
    rows = logits.view(-1, nodes, logits.shape[1])
    for place in range(min(len(rows), int(trees.active_count))):
        slot = int(trees.active_slots[place])
        known = texts.tokens[slot, : int(texts.lengths[slot]) + 1].tolist()
        for node in range(nodes):
            path, at = list[int](), node
            while at > 0:
                path.insert(0, int(trees.draft_tokens[slot, at]))
                at = int(trees.parents[slot, at])
            text = known + path
            last = text[1 - size :] if size > 1 else []
            starts = range(len(text) - size + 1)
            barred = [text[at + size - 1] for at in starts if text[at : at + size - 1] == last]
            rows[place, node, torch.tensor(barred, dtype=torch.int64)] = float("-inf")


@triton.jit
def _text_at(place, node, slot, trees, texts, NODES: tl.constexpr, CAPACITY: tl.constexpr):
    """Tokens at places of a node's text; -1 outside of it."""
    root = tl.load(texts.lengths + slot)
    token = tl.load(texts.tokens + slot * CAPACITY + place, mask=(place >= 0) & (place <= root), other=-1)
    while node > 0:
        at = slot * NODES + node
        drafted = tl.load(trees.draft_tokens + at).to(tl.int32)
        token = tl.where(place == root + tl.load(trees.positions + at), drafted, token)
        node = tl.load(trees.parents + at)
    return token


@triton.jit
def _bar_ngrams_kernel(
    logits_ptr, trees, texts, number_ptr,
    NODES: tl.constexpr, VOCAB: tl.constexpr, CAPACITY: tl.constexpr, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if row // NODES >= tl.load(trees.active_count):
        return
    slot = tl.load(trees.active_slots + row // NODES).to(tl.int64)
    node = row % NODES
    size = tl.load(number_ptr + NGRAM).to(tl.int32)
    end = tl.load(texts.lengths + slot) + 1 + tl.load(trees.positions + slot * NODES + node).to(tl.int32)
    for first in range(tl.program_id(1) * BLOCK, end - size + 1, PROGRAMS * BLOCK):
        start = first + tl.arange(0, BLOCK)
        repeats = start + size <= end
        for offset in range(size - 1):
            here = _text_at(start + offset, node, slot, trees, texts, NODES, CAPACITY)
            last = _text_at(end - size + 1 + offset, node, slot, trees, texts, NODES, CAPACITY)
            repeats = repeats & (here == last)
        barred = _text_at(start + size - 1, node, slot, trees, texts, NODES, CAPACITY)
        tl.store(logits_ptr + row * VOCAB + barred, float("-inf"), mask=repeats & (barred >= 0) & (barred < VOCAB))


def bar_ngrams(logits: Tensor, trees: Trees, texts: Texts, numbers: Tensor) -> None:
    """Make logits -inf of what would repeat an n-gram, at every node of the active slots' trees; one launch, no wait.

    Args:
        logits: bf16, fp16 or fp32 [places * nodes, vocab]; place i is slot ``active_slots[i]``.
        trees: of all slots; the root's token is the last of its slot's text.
        texts: of all slots.
        numbers: float32 [8], as in `ChoiceState`.

    Raises:
        UsageError: tensors of other shapes, types or devices.
    """
    slots, nodes = trees.draft_tokens.shape
    check_tensors(
        logits.device, logits=(logits, logits.dtype, (None, None)), tokens=(texts.tokens, torch.int32, (slots, None)),
        lengths=(texts.lengths, torch.int32, (slots,)), numbers=(numbers, torch.float32, (8,)),
    )  # fmt: skip
    _bar_ngrams_kernel[(logits.shape[0], _PROGRAMS)](
        logits, trees, texts, numbers, NODES=nodes, VOCAB=logits.shape[1], CAPACITY=texts.tokens.shape[1],
        BLOCK=_BLOCK, PROGRAMS=_PROGRAMS, num_warps=4,
    )  # fmt: skip


def keep_text_ref(tokens: Tensor, active_slots: Tensor, active_count: Tensor, texts: Texts) -> None:
    """Definition of `keep_text`; waits for the device."""
    for slot in active_slots[: int(active_count)].tolist():
        new = tokens[slot][tokens[slot] >= 0]
        end = int(texts.lengths[slot]) + 1
        texts.tokens[slot, end - len(new) : end] = new


@triton.jit
def _keep_text_kernel(
    token_ptr, active_slots_ptr, active_count_ptr, texts,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, CAPACITY: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0)
    if place >= tl.load(active_count_ptr):
        return
    slot = tl.load(active_slots_ptr + place).to(tl.int64)
    column = tl.arange(0, BLOCK)
    token = tl.load(token_ptr + slot * WIDTH + column, mask=column < WIDTH, other=-1)
    to = tl.load(texts.lengths + slot) + 1 - tl.sum((token >= 0).to(tl.int32), axis=0) + column
    tl.store(texts.tokens + slot * CAPACITY + to, token, mask=(token >= 0) & (to < CAPACITY))


def keep_text(tokens: Tensor, active_slots: Tensor, active_count: Tensor, texts: Texts) -> None:
    """Put the tokens that a walk has accepted at the end of active slots' texts; one launch, no wait.

    Args:
        tokens: int32 [slots, width], by slot; -1 pads.
        active_slots: int32 [slots].
        active_count: int32 [1].
        texts: of all slots; ``lengths`` count the tokens already.

    Raises:
        UsageError: tensors of other shapes, types or devices.
    """
    slots = active_slots.numel()
    check_tensors(
        texts.tokens.device, tokens=(tokens, torch.int32, (slots, None)),
        active_slots=(active_slots, torch.int32, (slots,)), active_count=(active_count, torch.int32, (1,)),
        texts=(texts.tokens, torch.int32, (slots, None)), lengths=(texts.lengths, torch.int32, (slots,)),
    )  # fmt: skip
    width = tokens.shape[1]
    _keep_text_kernel[(slots,)](
        tokens, active_slots, active_count, texts, WIDTH=width, BLOCK=triton.next_power_of_2(width),
        CAPACITY=texts.tokens.shape[1], num_warps=1,
    )  # fmt: skip
