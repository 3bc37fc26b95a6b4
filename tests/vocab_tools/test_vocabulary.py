import json
from dataclasses import replace

import numpy as np
import pytest
from eagle_slim.vocab_tools import DraftVocab, UsageError, VocabularyError


def make(ids=None, forced=1, **options):
    return DraftVocab(np.array([2, 9, 0, 7] if ids is None else ids), forced, 10, {"method": "counts"}, **options)


def test_rows_and_ranks_of_the_worked_example():
    vocab = make()
    assert vocab.ascending_ids.tolist() == [0, 2, 7, 9]
    assert vocab.prefix(2).target_ids.tolist() == [2, 9]
    assert vocab.prefix(2).num_forced == 1
    assert vocab.prefix(4) is vocab
    for vocab, size in ((make(forced=2), 1), (make(forced=2), 5), (make(ranked=False), 3), (make(forced=0), 0)):
        with pytest.raises(UsageError, match=f"vocabulary of {size} "):
            vocab.prefix(size)


def test_bad_ids():
    twice = ([1, 2, 1], "id 1 appears again at position 2")
    for ids, problem in (([], "no ids"), twice, ([1, 10], "id 10 at position 1"), ([-1], "id -1 at")):
        with pytest.raises(VocabularyError, match=problem):
            make(np.array(ids, np.int64), forced=0)


def test_ids_cannot_be_changed_behind_its_back():
    ids = np.array([3, 1])
    vocab = DraftVocab(ids, 0, 10)
    ids[0] = 1
    assert vocab.target_ids.tolist() == [3, 1]
    with pytest.raises(ValueError, match="read-only"):
        vocab.target_ids[0] = 5


def test_an_inferred_target_size_gives_way_to_the_real_one():
    inferred = DraftVocab(np.array([2, 9]), 1, 10, {"target_vocab_from": "tokenizer", "method": "ids"})
    padded = inferred.for_target(64)
    assert (padded.target_vocab, padded.num_forced, padded.target_ids.tolist()) == (64, 1, [2, 9])
    assert padded.provenance == inferred.for_target(10).provenance == {"method": "ids"}
    with pytest.raises(VocabularyError, match="id 9"):
        inferred.for_target(9)
    stated = make()
    assert stated.for_target(10) is stated
    # A target padded otherwise is no other target.
    assert (stated.for_target(64).target_vocab, stated.for_target(64).target_ids.tolist()) == (64, [2, 9, 0, 7])
    with pytest.raises(VocabularyError, match="id 9"):
        stated.for_target(9)
    # gpt-oss has 1,069 rows more than its tokenizer has tokens.
    assert stated.for_target(10 + 1069).target_vocab == 1079
    with pytest.raises(VocabularyError, match=r"10.*10000"):
        stated.for_target(10_000)


def test_what_was_saved_is_loaded(tmp_path):
    path = tmp_path / "vocab.json"
    vocab = replace(make(forced=2), provenance={"file": "no UTF-8: \udcff"})
    vocab.save(path)
    again = DraftVocab.load(path)
    assert again.target_ids.tolist() == vocab.target_ids.tolist()
    assert (again.num_forced, again.target_vocab, again.ranked) == (2, 10, True)
    assert again.provenance == vocab.provenance


def test_damaged_files_are_named(tmp_path):
    changes = {"format": ["other"], "version": [9], "target_ids": [[1, 1], [2**70]], "target_vocab": [2**40]}
    accounts = [None, {"warnings": None}, {"warnings": [1]}, {"counted_ids": "3"}, {"counted_ids": -1}, {"floors": 1}]
    accounts += [{"floors": {}}, {"forced": {"a": ""}}, {"forced": {"1": 1}}, {"sources": [{}]}, {"tokenizer_hash": 7}]
    accounts += [{"token_map": "x"}, {"token_map": {"token_map": {"sources": "x"}}}]
    changes |= {"num_forced": [7], "provenance": accounts}
    path, whole = tmp_path / "vocab.json", make().to_json()
    changed = [json.dumps({**whole, key: value}) for key, values in changes.items() for value in values]
    for content in ('{"format": ', "[" * 100_000, *changed):
        path.write_text(content)
        with pytest.raises(VocabularyError, match=str(path)):
            DraftVocab.load(path)
    with pytest.raises(VocabularyError, match=str(tmp_path)):
        DraftVocab.load(tmp_path)
