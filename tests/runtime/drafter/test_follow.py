"""A draft vocabulary that follows the prompt: which ids join, and what is drafted over base and tail, by PyTorch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from eagle_slim.runtime import SpeculativeModel
from eagle_slim.runtime.drafter.follow import FollowRows, JoinedVocab
from eagle_slim.runtime.errors import UsageError
from eagle_slim.vocab_tools.vocabulary import DraftVocab
from support.raising import raises_with
from support.tiny_models import VOCAB, tiny_target, write_head

pytestmark = pytest.mark.filterwarnings("ignore::eagle_slim.runtime.errors.AcceptanceWarning")

BASE = torch.arange(4)
# Rows of ids 0 to 9 but 8, which the head was never trained on; stored in descending order.
ROWS = torch.tensor([[9.0, 0], [7, 0], [6, 1], [5, 0], [4, 0], [3, 0], [2, 0], [1, 0], [0, 0]])
ROW_OF_ID = torch.tensor([8, 7, 6, 5, 4, 3, 2, 1, -1, 0], dtype=torch.int32)
RANKED = np.array([7, 5, 2, 9])


def follow_of(most: int = 2) -> FollowRows:
    return FollowRows.of(most, BASE, ROWS, ROW_OF_ID, RANKED)


def test_the_example() -> None:
    follow = follow_of()
    assert follow.ids.tolist() == [7, 5, 9, 4, 6]  # ranked ones first, the others by id
    tail = follow.tail_of((2, 9, 8, 5, 9, 7))
    assert follow.ids[list(tail)].tolist() == [7, 5]
    assert follow.tail_of((7, 9, 5, 2, 8, 9)) == tail
    assert follow.ids[list(follow.tail_of((2, 9, 8)))].tolist() == [9]
    assert follow.tail_of(()) == ()
    assert [token for token in range(10) if follow.holds(tail, token)] == [5, 7]
    assert follow.rows_of(tail)[:, 0].tolist() == [7, 5]
    assert (follow.width, follow_of(most=100).width) == (16, 16)


def test_base_and_tail_side_by_side() -> None:
    """Columns by ascending id, each id once; a sequence without a tail has nothing but the base."""
    joined = JoinedVocab.of(BASE, [(0, 2), ()], follow_of())
    assert joined.ids[0].tolist() == [0, 1, 2, 3, 7, 9]
    assert joined.ids[1, :4].tolist() == [0, 1, 2, 3]
    hidden = torch.tensor([[[1.0, 0]], [[1, 0]]])
    logits = joined.logits(torch.tensor([[[0.5, 1, 2, 3]], [[0, 1, 2, 3]]]), hidden)
    assert logits[:, 0].tolist() == [[0.5, 1, 2, 3, 7, 9], [0, 1, 2, 3, -torch.inf, -torch.inf]]


TREE = {"depth": 3, "top_k": 3, "total_tokens": 15}


def small_vocab(ids: list[int]) -> DraftVocab:
    return DraftVocab(np.array(ids), 1, VOCAB)


def test_what_joins_is_drafted(tmp_path: Path) -> None:
    """With every id in the prompt, a following model drafts as the full vocabulary does."""
    target, head = tiny_target("llama"), write_head(tmp_path)
    full = SpeculativeModel.from_pretrained(target, head, **TREE)
    few = full.with_draft_vocab(small_vocab([2, 5, 9, 13, 4]))
    prompt = [list(range(3, VOCAB))]
    lengths = {
        name: model.generate(prompt, max_new_tokens=24, ignore_eos=True).stats.accepted_lengths
        for name, model in {
            "full": full,
            "few": few,
            "prompt": few.with_follow("prompt"),
            "two": few.with_follow("prompt", 2),
            "again": few.with_follow("prompt", 2).with_follow("prompt"),
        }.items()
    }
    # Ids 0 and 1 are not in the prompt, and never drafted.
    assert lengths["prompt"] == lengths["again"] == lengths["full"] != lengths["few"]
    follows = few.with_follow("prompt")
    assert follows.with_follow(None).drafter.weights.follow is None
    # Another base follows with what is outside it.
    other = follows.with_draft_vocab(small_vocab([2, 3, 7, 8])).drafter.weights.follow
    assert other is not None
    assert sorted(other.ids.tolist()) == sorted({*range(VOCAB)} - {2, 3, 7, 8})


@pytest.mark.parametrize(
    ("follow", "rows", "words"),
    [
        ("text", None, ("follow", "text")),
        *(("prompt", rows, ("follow_rows", str(rows))) for rows in (0, 8193, True, 2.5)),
        ("prompt", None, ("follow",)),
    ],
)
def test_what_cannot_be_followed_is_refused(tmp_path: Path, follow: str, rows: object, words: tuple[str, ...]) -> None:
    target, head = tiny_target("llama"), write_head(tmp_path)
    with raises_with(UsageError, *words):
        SpeculativeModel.from_pretrained(target, head, **TREE, follow=follow, follow_rows=rows)  # type: ignore[arg-type]
    with raises_with(UsageError, *words):
        SpeculativeModel.from_pretrained(target, head, **TREE).with_follow(follow, rows)  # type: ignore[arg-type]
