import re
from functools import partial

import numpy as np
import pytest
from eagle_slim.vocab_tools import DraftVocab, TokenCounts, TokenizerError, UsageError, VocabularyError, load_tokenizer
from eagle_slim.vocab_tools.forced import ForcedIds, forced_ids
from eagle_slim.vocab_tools.ranking import rank_by_order, rank_vocabulary
from hypothesis import given
from hypothesis import strategies as st
from support.raising import raises
from support.small_tokenizers import byte_level_bpe, with_reserved, write_folder
from support.token_counts import source, token_counts


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[int], list[int], int]:
    counts = draw(st.lists(st.integers(0, 5), min_size=3, max_size=60))
    ids = st.integers(0, len(counts) - 1)
    forced = draw(st.lists(ids, unique=True, max_size=len(counts) - 2))
    size = draw(st.integers(max(1, len(forced)), len(counts) - 1))
    return counts, forced, size


@given(cases())
def test_invariants(case):
    counts, forced, size = case
    ranked = rank_vocabulary(token_counts(counts), size=size, forced=forced)
    ids = ranked.target_ids.tolist()
    assert len(ids) == len(set(ids)) == size
    assert set(forced) == set(ids[: len(forced)])
    for part in (ids[: len(forced)], ids[len(forced) :]):
        assert part == sorted(part, key=lambda i: (-counts[i], i))
    left_out = set(range(len(counts))) - set(ids)
    chosen = ids[len(forced) :]
    if chosen and left_out:
        worst = (-counts[chosen[-1]], chosen[-1])
        assert worst < min((-counts[i], i) for i in left_out)


def test_what_cannot_be_ranked_is_refused():
    for asked, error, words in (
        ({"size": 1, "forced": [0, 1]}, UsageError, "of 1 was asked for: expected at least 2"),
        ({"size": 4}, UsageError, "at most 3 .the 4 real"),
        ({"size": 0}, UsageError, "of 0 .*at least 1"),
        ({"size": 2, "coverage": 0.9}, UsageError, "--coverage"),
        ({"coverage": 99}, UsageError, "--coverage"),
        ({"coverage": 1.0}, UsageError, r"3 ids, covers 0\.9"),
        ({"size": 2, "forced": [4]}, UsageError, "--force-id"),
        ({"size": 2, "target_vocab": -3}, UsageError, "--target-vocab"),
        ({"weights": {"text": "3"}}, UsageError, "source text"),
    ):
        with pytest.raises(error) as refused:
            rank_vocabulary(token_counts([1, 2, 3, 4]), **{"forced": [], **asked})
        assert re.search(words, str(refused.value))


def test_a_size_off_64_is_kept_with_a_warning():
    counts = token_counts([1] * 300)
    odd = rank_vocabulary(counts, size=100, forced=[])
    assert odd.size == 100
    assert "not a multiple of 64" in odd.warnings[0]
    assert "128" in odd.warnings[0]
    assert rank_vocabulary(counts, size=128, forced=[]).warnings == ()


def test_padding_rows_and_ids_beyond_the_target_are_never_chosen(tmp_path):
    tokenizer = load_tokenizer(write_folder(tmp_path / "t", byte_level_bpe(300)))
    # 20 rows beyond the tokenizer, with the largest counts of all: a broken corpus must not bring them in.
    counts = token_counts([1] * tokenizer.vocab_size + [1000] * 20, tokenizer_hash=tokenizer.tokenizer_hash)
    ranked = rank_vocabulary(counts, tokenizer=tokenizer, target_vocab=tokenizer.vocab_size + 20)
    assert ranked.target_ids.max() < tokenizer.vocab_size
    assert ranked.target_vocab == tokenizer.vocab_size + 20
    with pytest.raises(UsageError, match="at most 299 "):
        rank_vocabulary(counts, size=tokenizer.vocab_size, tokenizer=tokenizer, target_vocab=tokenizer.vocab_size + 20)
    fewer = rank_vocabulary(counts, tokenizer=tokenizer, target_vocab=280)
    assert fewer.target_ids.max() == 279
    assert any("20,020 counted tokens have ids beyond" in warning for warning in fewer.warnings)
    # Forced ones are warned about: Gemma-3's last token lies outside the embedding rows of the text-only model.
    tokenizer = load_tokenizer(write_folder(tmp_path / "g", with_reserved(byte_level_bpe(300), 1)))
    forced = forced_ids(tokenizer, extra=[300])
    ranked = rank_vocabulary(token_counts([1] * 301), tokenizer=tokenizer, forced=forced, target_vocab=300)
    assert 300 not in ranked.target_ids
    assert any("300" in warning and "outside" in warning for warning in ranked.warnings)


def test_coverage_finds_the_smallest_size_on_the_held_out_part():
    # Ranked 0, 1, 2, ... by counts; the held-out text has 90 tokens in the first 100 ids and 10 beyond them.
    counts = token_counts(list(range(400, 0, -1)), [list(range(90)), list(range(110, 120))])
    found = rank_vocabulary(counts, coverage=0.9, forced=[])
    assert found.size == 128
    account = found.provenance["size_from_coverage"]
    assert account["smallest"] == 90
    assert account["measured_on"] == "held-out"
    assert account["reached"] == pytest.approx(1.0)
    assert rank_vocabulary(counts, coverage=0.901, forced=[]).provenance["size_from_coverage"]["smallest"] == 111
    # Without one it says so.
    found = rank_vocabulary(token_counts([80, 10, 6, 4, 0]), coverage=0.9, forced=[])
    account = found.provenance["size_from_coverage"]
    assert (account["asked"], account["measured_on"], account["smallest"]) == (0.9, "counted", 2)
    # 64 would be the rounded size; there are five tokens, so four can be had.
    assert found.size == 4
    assert any("nothing was held out" in warning for warning in found.warnings)
    held_out = rank_vocabulary(token_counts([80, 10, 6, 4, 0], [[0] * 9 + [1]]), coverage=0.9, forced=[])
    assert not any("nothing was held out" in warning for warning in held_out.warnings)
    # Nor is a part of the sources measured on another text than the others.
    both = TokenCounts((source([80, 10, 6, 4, 0], [[0] * 9 + [1]], name="a"), source([1] * 5, name="b")), None)
    found = rank_vocabulary(both, coverage=0.5, forced=[])
    assert found.provenance["size_from_coverage"]["measured_on"] == "counted"


def test_ids_that_were_never_counted_are_known_and_warned_about():
    # 100 ids occur in the text; of the three forced ids one does.
    counts = token_counts([9] * 100 + [0] * 300)
    ranked = rank_vocabulary(counts, size=256, forced=[5, 200, 201])
    assert (ranked.num_forced, ranked.num_uncounted) == (3, 256 - 3 - 99)
    assert ["154 of the 256 ids" in warning for warning in ranked.warnings] == [True]
    assert DraftVocab.from_json(ranked.to_json(), "").num_uncounted == 154
    assert (ranked.prefix(103).num_uncounted, ranked.prefix(102).num_uncounted) == (1, 0)
    # 1 of 103 ids is less than 1%, 2 of 104 are more. All ids are ranked to be cut later.
    for size, warned in ((103, False), (104, True), (None, False)):
        warnings = rank_vocabulary(counts, size=size, forced=[5, 200, 201]).warnings
        assert any("never occur" in warning for warning in warnings) == warned
    assert rank_by_order(size=64, forced=[], target_vocab=400).num_uncounted is None
    weighed = TokenCounts((source([5, 0, 0, 0], name="a"), source([0, 5, 0, 0], name="b")), None)
    assert rank_vocabulary(weighed, size=3, forced=[], weights={"b": 0}).num_uncounted == 2


def test_repruning_chooses_only_trained_ids():
    trained = [1, 3, 5, 7]
    forced = ForcedIds(np.array([0, 3]), {0: "eos", 3: "bos"})
    ranked = rank_vocabulary(token_counts([9, 1, 9, 2, 9, 3, 9, 4]), forced=forced, candidates=trained)
    assert ranked.target_ids.tolist() == [3, 7, 5, 1]
    assert ranked.provenance["forced_but_untrained"] == [0]
    assert any("never trained" in warning and "0" in warning for warning in ranked.warnings)
    whole = rank_vocabulary(token_counts([9] * 8), size=4, forced=forced, candidates=trained)
    assert whole.ascending_ids.tolist() == trained
    with pytest.raises(UsageError, match=r"of 5 was asked for: .*at most 4 .the head has rows for 4 ids"):
        rank_vocabulary(token_counts([9] * 8), size=5, forced=[], candidates=trained)
    with pytest.raises(VocabularyError, match="id 1 appears again"):
        rank_vocabulary(token_counts([9] * 8), forced=[], candidates=[1, 1])


def test_a_token_map_keeps_its_order_behind_the_forced_ids():
    added = rank_by_order([4, 2, 8, 6], forced=[9], target_vocab=10)
    assert added.target_ids.tolist() == [9, 4, 2, 8]
    # Without a map, the order of the ids.
    assert rank_by_order(size=4, forced=[7, 5], target_vocab=10).target_ids.tolist() == [5, 7, 0, 1]
    with raises(UsageError, option="--tokenizer"):
        rank_by_order(size=4)
    assert any("lacks 1 forced ids" in warning for warning in added.warnings)
    with pytest.raises(UsageError, match="of 5 was asked for, but only 4"):
        rank_by_order([4, 2, 8, 6], size=5, forced=[], target_vocab=10)
    with pytest.raises(VocabularyError, match="id 12"):
        rank_by_order([4, 12], forced=[], target_vocab=10)


def test_a_vocabulary_of_another_tokenizer_is_refused(tmp_path):
    one, other = (load_tokenizer(write_folder(tmp_path / str(size), byte_level_bpe(size))) for size in (300, 310))
    vocab = rank_by_order(tokenizer=one, forced=[], target_vocab=320)
    assert np.array_equal(rank_by_order(vocab, 8, one, [], 320).target_ids, vocab.target_ids[:8])
    with pytest.raises(TokenizerError, match="the vocabulary"):
        rank_by_order(vocab, 8, other, [], 320)
    counts = token_counts([1] * 310, tokenizer_hash=other.tokenizer_hash)
    assert len(rank_vocabulary(counts, None, None, None, [], 320, candidates=vocab)) == len(vocab)
    for rank in (partial(rank_vocabulary, counts), partial(rank_by_order, None)):
        with pytest.raises(TokenizerError, match="the candidates"):
            rank(tokenizer=other, forced=[], target_vocab=320, candidates=vocab)


def test_only_ids_that_would_have_been_taken_are_missed():
    """A ranking of the whole vocabulary has ids that a head with fewer rows lacks, and says nothing of the first."""
    for size, told in ((4, False), (6, True), (None, True)):
        ranked = rank_by_order([4, 2, 8, 6, 1, 3, 5], size, forced=[], target_vocab=10, candidates=[2, 4, 6, 8, 3, 5])
        assert ranked.target_ids.tolist()[:4] == [4, 2, 8, 6]
        assert any("left out" in warning for warning in ranked.warnings) == told


def test_the_beginning_of_ids_that_ascend_is_doubted():
    even = range(0, 40, 2)
    for order, size, is_doubted in (
        (even, 10, True),
        (even, 20, False),
        ([38, *even[:-1]], 10, False),
        ([1, 3, 5], 2, False),
    ):
        ranked = rank_by_order(list(order), size, forced=[], target_vocab=100)
        assert any("ascend" in warning for warning in ranked.warnings) == is_doubted
