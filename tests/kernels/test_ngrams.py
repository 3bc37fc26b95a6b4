"""Barring what would repeat an n-gram: a case by hand, kernel and twin against transformers' own, long texts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from eagle_slim.runtime.errors import UsageError
from eagle_slim.runtime.step.kernels.ngrams import Texts, bar_ngrams, bar_ngrams_ref, keep_text, keep_text_ref
from eagle_slim.runtime.tree import Trees
from kernels.choosing import CHAIN_AND_FORK, random_case
from support.raising import raises
from transformers import NoRepeatNGramLogitsProcessor

Bar = Callable[[torch.Tensor, Trees, Texts, torch.Tensor], None]


def texts_of(trees: Trees, known: list[list[int]], capacity: int) -> Texts:
    """Texts of all slots, each ending with its root's token; what lies behind must not be read."""
    device = trees.draft_tokens.device
    tokens = torch.full((len(known), capacity), -7, dtype=torch.int32)
    for slot, text in enumerate(known):
        tokens[slot, : len(text)] = torch.tensor(text)
        trees.draft_tokens[slot, 0] = text[-1]
    lengths = torch.tensor([len(text) - 1 for text in known], dtype=torch.int32)
    return Texts(tokens.to(device), lengths.to(device))


def numbers_of(size: int, device: str) -> torch.Tensor:
    return torch.tensor([0, 0, 0, 0, 0, 0, size, 0], dtype=torch.float32, device=device)


@pytest.mark.parametrize("bar", [bar_ngrams, bar_ngrams_ref])
def test_by_hand(bar: Bar, device: str) -> None:
    """The example of the module, and the tokens that follow for other n."""
    a, b, c = 1, 2, 3
    case = random_case(5, slots=1, parents=[-1, 0], device=device)
    case.trees.draft_tokens[0, 1] = c
    texts = texts_of(case.trees, [[a, b, c, a, b]], 8)
    for size, barred in ((1, [[a, b, c], [a, b, c]]), (2, [[c], [a]]), (3, [[c], [a]]), (4, [[], [a]]), (6, [[], []])):
        logits = torch.zeros(2, 5, device=device)
        bar(logits, case.trees, texts, numbers_of(size, device))
        assert [row.isneginf().nonzero()[:, 0].tolist() for row in logits] == barred, size
        assert not logits[logits > float("-inf")].any()


@pytest.mark.parametrize("length", [1, 3, 60, pytest.param(700, marks=pytest.mark.slow)])
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_kernel_and_twin_bar_what_transformers_bars(size: int, length: int, device: str) -> None:
    """At every node after its path; places that are not active stay as they are."""
    vocab, parents = 4, CHAIN_AND_FORK
    case = random_case(vocab, slots=3, parents=parents, active=[2, 0], device=device)
    known = torch.randint(vocab, (3, length)).tolist()
    texts = texts_of(case.trees, [text[: length - slot] or text for slot, text in enumerate(known)], length + 9)
    wanted = case.logits.clone()
    for place, slot in enumerate([2, 0]):
        text = texts.tokens[slot, : int(texts.lengths[slot]) + 1].tolist()
        for node in range(len(parents)):
            path, at = [], node
            while at > 0:
                path.insert(0, int(case.trees.draft_tokens[slot, at]))
                at = parents[at]
            row = slice(place * len(parents) + node, place * len(parents) + node + 1)
            ids = torch.tensor([text + path], device=device)
            wanted[row] = NoRepeatNGramLogitsProcessor(size)(ids, case.logits[row])
    for bar in (bar_ngrams, bar_ngrams_ref):
        logits = case.logits.clone()
        bar(logits, case.trees, texts, numbers_of(size, device))
        assert torch.equal(logits, wanted)
    assert wanted.isneginf().any() or length < 60


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_text_of_more_blocks_than_programs(dtype: torch.dtype, device: str) -> None:
    case = random_case(50, slots=1, parents=[-1, 0], dtype=dtype, device=device)
    texts = texts_of(case.trees, [torch.randint(50, (9000,)).tolist()], 9001)
    found, wanted = case.logits.clone(), case.logits.clone()
    bar_ngrams(found, case.trees, texts, numbers_of(2, device))
    bar_ngrams_ref(wanted, case.trees, texts, numbers_of(2, device))
    assert torch.equal(found, wanted)
    assert 1 < int(wanted.isneginf().sum()) < 100


@pytest.mark.parametrize("keep", [keep_text, keep_text_ref])
def test_accepted_tokens_are_kept(keep: Callable[..., None], device: str) -> None:
    """Slot 2 accepted one token behind four, slot 0 three behind two, up to the end; slot 1 is not active."""
    tokens = torch.tensor([[5, 6, 7], [8, 9, -1], [3, -1, -1]], dtype=torch.int32, device=device)
    active = torch.tensor([2, 0, 1], dtype=torch.int32, device=device)
    count, lengths = torch.tensor([2], dtype=torch.int32, device=device), torch.tensor([4, 3, 4], dtype=torch.int32)
    texts = Texts(torch.zeros(3, 5, dtype=torch.int32, device=device), lengths.to(device))
    keep(tokens, active, count, texts)
    assert texts.tokens.tolist() == [[0, 0, 5, 6, 7], [0] * 5, [0, 0, 0, 0, 3]]


def test_refused() -> None:
    case = random_case(50)
    texts, numbers = texts_of(case.trees, [[1, 2], [3]], 4), numbers_of(2, "cpu")
    for wrong, named in (
        ((case.logits[0], case.trees, texts, numbers), "logits"),
        ((case.logits, case.trees, texts._replace(tokens=texts.tokens.long()), numbers), "tokens"),
        ((case.logits, case.trees, texts._replace(lengths=texts.lengths[:1]), numbers), "lengths"),
        ((case.logits, case.trees, texts, numbers[:6]), "numbers"),
    ):
        with raises(UsageError, tensor=named):
            bar_ngrams(*wrong)
    active = case.trees.active_slots
    with raises(UsageError, tensor="texts"):
        keep_text(active[:, None], active, case.trees.active_count, texts._replace(tokens=texts.tokens[:1]))
