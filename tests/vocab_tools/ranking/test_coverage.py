import json

import numpy as np
import pytest
from eagle_slim.vocab_tools.counting.counts import TokenCounts
from eagle_slim.vocab_tools.errors import TokenizerError, UsageError, VocabularyError
from eagle_slim.vocab_tools.ranking.coverage import MEAN, measure_coverage
from eagle_slim.vocab_tools.ranking.rank import rank_vocabulary
from eagle_slim.vocab_tools.ranking.shares import source_shares, tokens_for_sizing
from eagle_slim.vocab_tools.vocabulary.draft_vocab import DraftVocab
from hypothesis import given
from hypothesis import strategies as st
from support.raising import raises
from support.token_counts import source, token_counts


def vocab(ids: list[int], forced: int = 0, target_vocab: int = 10, **provenance: str) -> DraftVocab:
    return DraftVocab(np.array(ids), forced, target_vocab, provenance)


def test_interval_of_two_documents_by_hand() -> None:
    # Drawing two of two documents with replacement gives both first (1/4), both second (1/4) or one of each (1/2),
    # so coverage is 3/4, 0 or 3/6, and the 95% interval spans the extremes.
    report = measure_coverage(vocab([5, 7]), token_counts([1] * 10, [[5, 5, 7, 9], [0, 3]]), bootstrap=2000)
    text = report.sources[0]
    assert (text.part, text.documents, text.tokens) == ("held-out", 2, 6)
    assert text.low is not None
    assert text.high is not None
    assert (text.low[-1], text.high[-1]) == (0.0, 0.75)
    assert text.coverage[-1] == pytest.approx(3 / 6)


def test_the_same_seed_gives_the_same_interval() -> None:
    counts = token_counts([1] * 10, [[1, 2], [3, 4, 5], [0], [7, 7]])
    first, again, other = (measure_coverage(vocab([1, 3, 7]), counts, seed=seed) for seed in (0, 0, 1))
    assert first.to_json() == again.to_json()
    assert first.sources[0].coverage.tolist() == other.sources[0].coverage.tolist()


@given(
    st.lists(st.lists(st.integers(0, 11), max_size=6), min_size=1, max_size=8).filter(any),
    st.permutations(range(12)),
    st.integers(1, 12),
)
def test_against_a_loop(documents: list[list[int]], order: list[int], size: int) -> None:
    report = measure_coverage(
        vocab(order[:size], target_vocab=12), token_counts([1] * 12, documents), range(1, size + 1), bootstrap=20
    )
    tokens = [token for document in documents for token in document]
    for position, smaller in enumerate(report.sizes):
        covered = sum(token in order[:smaller] for token in tokens)
        assert report.sources[0].coverage[position] == pytest.approx(covered / len(tokens))
        assert report.sources[0].baseline[position] == pytest.approx(sum(t < smaller for t in tokens) / len(tokens))


def test_sources_and_their_weighted_mean() -> None:
    counts = TokenCounts(
        (
            source([1] * 10, [[0, 0, 1, 9], [0]], name="chat", weight=3),
            source([1] * 10, [[9, 9], [0, 9]], name="code", weight=1),
        ),
        None,
    )
    report = measure_coverage(vocab([0, 1]), counts)
    assert [entry.name for entry in report.sources] == ["chat", "code", MEAN]
    assert report.at("chat") == pytest.approx(4 / 5)
    assert report.at("code") == pytest.approx(1 / 4)
    assert report.at(MEAN) == pytest.approx(0.75 * 4 / 5 + 0.25 * 1 / 4)
    other = measure_coverage(vocab([0, 1]), counts, weights={"chat": 1})
    assert other.at(MEAN) == pytest.approx(0.5 * 4 / 5 + 0.5 * 1 / 4)
    with raises(UsageError, source="prose"):
        measure_coverage(vocab([0, 1]), counts, weights={"prose": 1})


def test_losing_to_the_first_ids_is_warned_about() -> None:
    counts = TokenCounts((source([1] * 10, [[0, 1]], name="code"), source([1] * 10, [[8, 9]], name="chat")), None)
    report = measure_coverage(vocab([8, 9]), counts)
    assert len([warning for warning in report.warnings if "first 2 ids" in warning]) == 1
    assert report.warnings[0].startswith("source 'code': the ranking covers 0.00%, less than the 100.00%")
    assert measure_coverage(vocab([0, 1]), counts).warnings == ()


def test_warnings_are_about_the_size_that_is_used() -> None:
    vocab, counts = DraftVocab(np.array([4, 3, 0, 1, 2]), 0, 5), token_counts([9, 9, 1, 1, 1], [[0, 0, 1, 3]])
    assert measure_coverage(vocab, counts, [2, 5]).warnings == ()
    used = measure_coverage(vocab, counts, [2, 5], draft_vocab=2)
    assert used.draft_vocab == 2
    assert ["25.00%, less than the 75.00% of the first 2 ids" in warning for warning in used.warnings] == [True]


def test_the_baseline_is_of_ids_that_could_be_chosen() -> None:
    vocab, counts = DraftVocab(np.array([4, 3]), 0, 5), token_counts([9, 9, 1, 1, 1], [[0, 0, 1, 3]])
    report = measure_coverage(vocab, counts, [1, 2], candidates=np.array([3, 4]))
    assert report.sources[0].baseline.tolist() == [0.25, 0.25]
    assert report.sources[0].coverage.tolist() == [0.0, 0.25]
    assert report.warnings == ()


def test_forced_ids_are_in_the_baseline_too() -> None:
    report = measure_coverage(vocab([9, 5], forced=1), token_counts([1] * 10, [[9, 0, 1]]))
    assert report.sources[0].baseline[-1] == pytest.approx(2 / 3)


def test_counted_text_is_named_as_such() -> None:
    report = measure_coverage(vocab([0, 1]), token_counts([6, 2, 2]), sizes=[1, 2])
    text = report.sources[0]
    assert (text.part, text.documents, text.tokens) == ("counted", 0, 10)
    assert text.coverage.tolist() == pytest.approx([0.6, 0.8])
    assert text.low is None
    assert "optimistic" in report.warnings[0]
    assert "counted" in report.table()


def test_ids_that_the_text_never_holds_are_told() -> None:
    counts = TokenCounts((source([4, 0, 0, 1], [[0, 2]], name="a"), source([0, 0, 0, 1], name="b")), None)
    report = measure_coverage(vocab([1, 0, 2, 3, 7], forced=1), counts, [2, 5])
    # 2 was held out only, 7 is beyond the counts; 1 is forced.
    assert (report.uncounted, report.to_json()["uncounted"]) == (2, 2)
    assert measure_coverage(vocab([1, 0, 2, 3, 7], forced=1), counts, [2, 5], draft_vocab=2).uncounted == 0


def test_ids_beyond_the_target_are_missed() -> None:
    report = measure_coverage(vocab([0, 1], target_vocab=2), token_counts([1] * 4, [[0, 3]]))
    assert report.at("text") == pytest.approx(0.5)


def test_sizes() -> None:
    ranked = rank_vocabulary(token_counts(list(range(9000, 0, -1)), [[1, 2, 3]]), size=8000, forced=[5, 6])
    report = measure_coverage(ranked, token_counts([1] * 9000, [[1, 2, 3], [4]]))
    assert report.shown == (1024, 2048, 4096, 8000)
    assert set(report.shown) <= set(report.sizes)
    assert report.sizes[0] >= 256
    assert list(report.sizes) == sorted(set(report.sizes))
    with raises(UsageError, size=1, smallest=2, largest=8000):
        measure_coverage(ranked, token_counts([1] * 9000, [[1]]), sizes=[1])
    unranked = DraftVocab(np.arange(10), 0, 20, ranked=False)
    assert measure_coverage(unranked, token_counts([1] * 20, [[1]])).sizes == (10,)


def test_json_and_table() -> None:
    sizes = list(np.array([2, 4]))
    report = measure_coverage(vocab([5, 0, 7, 3]), token_counts([1] * 10, [[5, 5, 7, 9], [0, 3]]), sizes=sizes)
    value = json.loads(json.dumps(report.to_json()))
    assert value["sizes"] == [2, 4]
    assert value["sources"][0]["coverage"] == [0.5, 0.833333]
    lines = report.table().splitlines()
    assert lines[0].split() == ["source", "text", "size", "covered", "95%", "interval", "first", "ids", "difference"]
    assert "83.33%" in lines[2]
    assert "+50.00" in lines[2]


def test_refusals() -> None:
    with raises(TokenizerError, expected="sha256:a", found="sha256:b"):
        measure_coverage(vocab([0], tokenizer_hash="sha256:a"), token_counts([1], [[0]], "sha256:b"))
    with raises(VocabularyError, source="text", tokens=0):
        measure_coverage(vocab([0]), token_counts([0, 0]))


def test_shares() -> None:
    counts = TokenCounts(
        (source([8, 2], [[0]], name="a", weight=1), source([0, 5], [[1, 1]], name="b", weight=3)), None
    )
    assert source_shares(counts).tolist() == [0.25, 0.75]
    found, part = tokens_for_sizing(counts)
    assert (found.tolist(), part) == (pytest.approx([0.25, 0.75]), "held-out")
    partly = TokenCounts((source([8, 2], [[0]], name="a"), source([0, 5], name="b", weight=3)), None)
    found, part = tokens_for_sizing(partly)
    assert (found.tolist(), part) == (pytest.approx([0.2, 0.8]), "counted")
    # A source that weighs nothing need not have a held-out part.
    assert tokens_for_sizing(partly, {"b": 0})[1] == "held-out"
    with raises(UsageError, weights={"a": 0.0, "b": 0.0}):
        source_shares(counts, {"a": 0, "b": 0})
