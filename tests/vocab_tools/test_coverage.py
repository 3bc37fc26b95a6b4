import json

import numpy as np
import pytest
from eagle_slim.vocab_tools import DraftVocab, TokenCounts, TokenizerError, UsageError, VocabularyError, rank_vocabulary
from eagle_slim.vocab_tools.coverage import MEAN, measure_coverage
from hypothesis import given
from hypothesis import strategies as st
from support.raising import raises
from support.token_counts import source, token_counts


def vocab(ids: list[int], forced: int = 0, target_vocab: int = 10, **provenance: str) -> DraftVocab:
    return DraftVocab(np.array(ids), forced, target_vocab, provenance)


def test_interval_of_two_documents_by_hand() -> None:
    # 9 of 10 and 8 of 10 tokens are covered: 0.85, with residuals of 0.5 and -0.5 tokens and a standard error of
    # sqrt(2 / 1 * (0.25 + 0.25)) / 20 = 0.05.
    text = measure_coverage(vocab([5]), token_counts([1] * 10, [[5] * 9 + [0], [5] * 8 + [0, 1]])).sources[0]
    assert (text.part, text.documents, text.tokens) == ("held-out", 2, 20)
    assert text.coverage[-1] == pytest.approx(0.85)
    assert [bound[-1] for bound in text.interval] == pytest.approx([0.85 - 1.96 * 0.05, 0.948], abs=1e-5)
    # Nothing is covered, or all, with certainty beyond the bounds.
    wide = measure_coverage(vocab([5, 7]), token_counts([1] * 10, [[5, 5, 7, 9], [0, 3]])).sources[0]
    assert [bound[-1] for bound in wide.interval] == [0.0, 1.0]


@given(
    st.lists(st.lists(st.integers(0, 11), max_size=6), min_size=1, max_size=8).filter(any),
    st.permutations(range(12)),
    st.integers(1, 12),
)
def test_against_a_loop(documents: list[list[int]], order: list[int], size: int) -> None:
    ranked, counts = vocab(order[:size], target_vocab=12), token_counts([1] * 12, documents)
    report = measure_coverage(ranked, counts, range(1, size + 1))
    tokens = [token for document in documents for token in document]
    for position, smaller in enumerate(report.sizes):
        covered = sum(token in order[:smaller] for token in tokens)
        assert report.sources[0].coverage[position] == pytest.approx(covered / len(tokens))
        assert report.sources[0].baseline[position] == pytest.approx(sum(t < smaller for t in tokens) / len(tokens))


def test_sources_and_their_weighted_mean() -> None:
    chat, code = source([1] * 10, [[0, 0, 1, 9], [0]], "chat", 3), source([1] * 10, [[9, 9], [0, 9]], "code", 1)
    counts = TokenCounts((chat, code), None)
    report = measure_coverage(vocab([0, 1]), counts)
    # The least covered first.
    assert [entry.name for entry in report.sources] == ["code", "chat", MEAN]
    expected = [1 / 4, 4 / 5, 0.75 * 4 / 5 + 0.25 * 1 / 4]
    assert [entry.coverage[-1] for entry in report.sources] == pytest.approx(expected)
    of_code, of_chat, of_all = (entry.error for entry in report.sources)
    assert of_all == pytest.approx(np.sqrt((0.75 * of_chat) ** 2 + (0.25 * of_code) ** 2))
    other = measure_coverage(vocab([0, 1]), counts, weights={"chat": 1})
    assert other.sources[-1].coverage[-1] == pytest.approx(0.5 * 4 / 5 + 0.5 * 1 / 4)
    with pytest.raises(UsageError, match="prose"):
        measure_coverage(vocab([0, 1]), counts, weights={"prose": 1})
    assert report.sources[-1].part == "held-out"
    both = TokenCounts((*counts.sources, source([1] * 10, name="prose")), None)
    assert measure_coverage(vocab([0, 1]), both).sources[-1].part == "held-out and counted"


def test_warnings_are_about_the_size_that_is_used() -> None:
    ranked, counts = vocab([4, 3, 0, 1, 2], target_vocab=5), token_counts([9, 9, 1, 1, 1], [[0, 0, 1, 3]])
    assert measure_coverage(ranked, counts, [2, 5]).warnings == ()
    used = measure_coverage(ranked, counts, [2, 5], draft_vocab=2)
    assert used.draft_vocab == 2
    assert ["25.00%, less than the 75.00% of the first 2 ids" in warning for warning in used.warnings] == [True]
    # The beginning of a sorted list is no ranking.
    listed, counts = vocab([0, 1, 2, 4, 5, 6, 7, 9], method="token map"), token_counts([1] * 10, [[1]])
    assert ["ascend" in warning for warning in measure_coverage(listed, counts, [4, 8]).warnings] == [True]
    assert measure_coverage(listed, counts, [8]).warnings == ()


def test_the_baseline_is_of_forced_ids_and_of_ids_that_could_be_chosen() -> None:
    ranked, counts = vocab([4, 3], target_vocab=5), token_counts([9, 9, 1, 1, 1], [[0, 0, 1, 3]])
    report = measure_coverage(ranked, counts, [1, 2], candidates=np.array([3, 4]))
    assert report.sources[0].baseline.tolist() == [0.25, 0.25]
    forced = measure_coverage(vocab([9, 5], forced=1), token_counts([1] * 10, [[9, 0, 9, 1]]))
    assert forced.sources[0].baseline[-1] == pytest.approx(3 / 4)


def test_counted_text_is_named_as_such() -> None:
    report = measure_coverage(vocab([0, 1]), token_counts([6, 2, 2]), sizes=[1, 2])
    text = report.sources[0]
    assert (text.part, text.documents, text.tokens, text.interval) == ("counted", 0, 10, None)
    assert text.coverage.tolist() == pytest.approx([0.6, 0.8])
    assert "optimistic" in report.warnings[0]


def test_ids_that_the_text_never_holds_are_told() -> None:
    counts = TokenCounts((source([4, 0, 0, 1], [[0, 2]], name="a"), source([0, 0, 0, 1], name="b")), None)
    # 2 was held out only, 7 is beyond the counts; 1 is forced.
    assert measure_coverage(vocab([1, 0, 2, 3, 7], forced=1), counts, [2, 5]).uncounted == 2
    assert measure_coverage(vocab([1, 0, 2, 3, 7], forced=1), counts, [2, 5], draft_vocab=2).uncounted == 0
    # Ids of the text beyond the target are missed.
    beyond = measure_coverage(vocab([0, 1], target_vocab=2), token_counts([1] * 4, [[0, 3]]))
    assert beyond.sources[0].coverage[-1] == 0.5


def test_sizes() -> None:
    ranked = rank_vocabulary(token_counts(list(range(9000, 0, -1)), [[1, 2, 3]]), size=8000, forced=[5, 6])
    report = measure_coverage(ranked, token_counts([1] * 9000, [[1, 2, 3], [4]]))
    assert report.sizes == (1024, 2048, 4096, 8000)
    with raises(UsageError, option="--sizes"):
        measure_coverage(ranked, token_counts([1] * 9000, [[1]]), sizes=[1])
    unranked = DraftVocab(np.arange(10), 0, 20, ranked=False)
    assert measure_coverage(unranked, token_counts([1] * 20, [[1]])).sizes == (10,)


def test_json_and_table() -> None:
    counts = token_counts([1] * 10, [[5, 5, 7, 9], [0, 3]])
    report = measure_coverage(vocab([5, 0, 7, 3]), counts, sizes=list(np.array([2, 4])))
    value = json.loads(json.dumps(report.to_json()))
    assert value["sizes"] == [2, 4]
    assert value["sources"][0]["coverage"] == [0.5, 0.833333]
    lines = report.table().splitlines()
    assert lines[0].split() == ["source", "text", "size", "covered", "95%", "interval", "first", "ids"]
    assert "83.33%" in lines[2]


def test_floors_and_a_vocabulary_beside() -> None:
    chat, code = source([1] * 10, [[0, 0, 1, 9]], "chat", 3), source([1] * 10, [[9, 9], [0, 9]], "code")
    counts = TokenCounts((chat, code), None)
    floors = {"code": 0.5, "chat": 0.7}
    report = measure_coverage(vocab([0, 1, 9]), counts, [2, 3], floors=floors, beside=vocab([9, 8, 0]), draft_vocab=2)
    code, chat, mean = report.sources
    assert (code.name, code.floor, chat.name, chat.floor, mean.floor) == ("code", 0.5, "chat", 0.7, None)
    beside = [entry.beside.tolist() for entry in report.sources if entry.beside is not None]
    assert beside == [[0.75, 1.0], [0.25, 0.75], pytest.approx([0.375, 0.8125])]
    told = report.to_json()["sources"]
    assert [entry.get("holds") for entry in told] == [[False, True], [True, True], None]
    assert told[0]["beside"] == [0.75, 1.0]
    lines = report.table().splitlines()
    assert lines[0].split()[-3:] == ["ranked", "here", "floor"]
    assert lines[1].endswith("75.00%  50.00% short by 25.00%")
    assert lines[3].split()[-3:] == ["25.00%", "70.00%", "holds"]
    assert lines[5].endswith("-")
    with raises(UsageError, option="--floor"):
        measure_coverage(vocab([0, 1]), counts, floors={"prose": 0.5})


def test_counts_of_another_tokenizer_and_sources_without_a_token_are_refused() -> None:
    with pytest.raises(TokenizerError, match=r"sha256:a.*sha256:b"):
        measure_coverage(vocab([0], tokenizer_hash="sha256:a"), token_counts([1], [[0]], "sha256:b"))
    with pytest.raises(VocabularyError, match="source 'text'"):
        measure_coverage(vocab([0]), token_counts([0, 0]))
