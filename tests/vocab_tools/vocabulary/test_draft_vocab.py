import json
from pathlib import Path

import numpy as np
import pytest
from eagle_slim.vocab_tools.errors import UsageError, VocabularyError
from eagle_slim.vocab_tools.vocabulary.draft_vocab import DraftVocab
from support.raising import raises


def make(ids: list[int] | None = None, forced: int = 1, **options: object) -> DraftVocab:
    return DraftVocab(np.array([2, 9, 0, 7] if ids is None else ids), forced, 10, {"method": "counts"}, **options)


def test_rows_and_ranks_of_the_worked_example() -> None:
    vocab = make()
    assert vocab.ascending_ids.tolist() == [0, 2, 7, 9]
    assert vocab.prefix(2).target_ids.tolist() == [2, 9]
    assert vocab.prefix(2).num_forced == 1


def test_prefix_bounds() -> None:
    vocab = make(forced=2)
    assert vocab.prefix(4) is vocab
    with raises(UsageError, size=1, smallest=2):
        vocab.prefix(1)
    with raises(UsageError, size=5, largest=4):
        vocab.prefix(5)
    with raises(UsageError, size=3, ranked=False):
        make(ranked=False).prefix(3)
    with raises(UsageError, size=0):
        make(forced=0).prefix(0)


@pytest.mark.parametrize(
    ("ids", "facts"),
    [
        ([], {"found": 0}),
        ([1, 2, 1], {"repeated": 1, "position": 2}),
        ([1, 10], {"id": 10, "position": 1, "target_vocab": 10}),
        ([-1], {"id": -1, "position": 0}),
    ],
)
def test_bad_ids(ids: list[int], facts: dict[str, int]) -> None:
    with raises(VocabularyError, **facts):
        make(np.array(ids, np.int64), forced=0)


def test_ids_cannot_be_changed_behind_its_back() -> None:
    ids = np.array([3, 1])
    vocab = DraftVocab(ids, 0, 10)
    ids[0] = 1
    assert vocab.target_ids.tolist() == [3, 1]
    with pytest.raises(ValueError, match="read-only"):
        vocab.target_ids[0] = 5


def test_an_inferred_target_size_gives_way_to_the_real_one() -> None:
    inferred = DraftVocab(np.array([2, 9]), 1, 10, {"target_vocab_from": "tokenizer", "method": "ids"})
    padded = inferred.for_target(64)
    assert (padded.target_vocab, padded.num_forced, padded.target_ids.tolist()) == (64, 1, [2, 9])
    assert padded.provenance == {"method": "ids"}
    with raises(VocabularyError, id=9, target_vocab=9):
        inferred.for_target(9)
    stated = make()
    assert stated.for_target(10) is stated
    with raises(VocabularyError, expected=10, found=64):
        stated.for_target(64)


def test_save_and_load(tmp_path: Path) -> None:
    path = tmp_path / "vocab.json"
    vocab = make(forced=2)
    vocab.save(path)
    again = DraftVocab.load(path)
    assert again.target_ids.tolist() == vocab.target_ids.tolist()
    assert (again.num_forced, again.target_vocab, again.ranked) == (2, 10, True)
    assert again.provenance == {"method": "counts"}
    assert [file.name for file in tmp_path.iterdir()] == ["vocab.json"]


@pytest.mark.parametrize(
    ("change", "facts"),
    [
        ({"format": "other"}, {"field": "format"}),
        ({"version": 9}, {"field": "version"}),
        ({"target_ids": [1, 1]}, {"repeated": 1}),
        ({"target_ids": [1.0]}, {"field": "target_ids", "expected": "integers"}),
        ({"target_ids": [True]}, {"field": "target_ids", "expected": "integers"}),
        ({"target_ids": [2**70]}, {"field": "target_ids", "expected": "int64"}),
        ({"num_forced": 7}, {"field": "num_forced"}),
        ({"target_vocab": "10"}, {"field": "target_vocab"}),
        ({"provenance": None}, {"field": "provenance"}),
    ],
)
def test_damaged_files(tmp_path: Path, change: dict, facts: dict) -> None:
    path = tmp_path / "vocab.json"
    path.write_text(json.dumps({**make().to_json(), **change}))
    with raises(VocabularyError, path=str(path), **facts):
        DraftVocab.load(path)


def test_missing_and_unreadable_files(tmp_path: Path) -> None:
    with raises(VocabularyError, missing=str(tmp_path / "none.json")):
        DraftVocab.load(tmp_path / "none.json")
    (tmp_path / "half.json").write_text('{"format": ')
    (tmp_path / "deep.json").write_text("[" * 100_000)
    for name in ("half.json", "deep.json"):
        with raises(VocabularyError, path=str(tmp_path / name)):
            DraftVocab.load(tmp_path / name)
