from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from eagle_slim.vocab_tools import SourceCounts, TokenCounts, UsageError, VocabularyError, measure_coverage
from eagle_slim.vocab_tools.floors import FloorProblem
from eagle_slim.vocab_tools.ranking import rank_vocabulary
from eagle_slim.vocab_tools.vocabulary import lost_floors
from hypothesis import given, settings
from hypothesis import strategies as st
from support.raising import raises, raises_with
from support.sweeps import sweep
from support.token_counts import held_out, source

# Weighted shares are 0.72, 0.09, 0.09, 0.06, 0.02, 0.02.
TWO = TokenCounts((source([8, 1, 1, 0, 0, 0], name="en", weight=9), source([0, 0, 0, 6, 2, 2], name="zh")), None)


def test_the_worked_example():
    assert rank_vocabulary(TWO, 3, forced=[]).target_ids.tolist() == [0, 1, 2]
    # The last is held already.
    asked = ({"zh": 0.6}, {"zh": 0.8}, {"zh": 1.0}, {"zh": 0.6, "en": 0.9}, {"en": 1.0})
    expected = ([0, 1, 3], [0, 3, 4], [3, 4, 5], [0, 1, 3], [0, 1, 2])
    for floors, ids in zip(asked, expected, strict=True):
        ranked = rank_vocabulary(TWO, 3, forced=[], floors=floors)
        assert ranked.target_ids.tolist() == ids
        account = ranked.provenance["floors"]
        assert account["size"] == 3
        assert account["weighted"] == pytest.approx(np.array([0.72, 0.09, 0.09, 0.06, 0.02, 0.02])[ids].sum())
        assert all(entry["reached"] >= entry["asked"] - 1e-9 for entry in account["held"])
        assert any("on the counted text itself" in warning for warning in ranked.warnings)
    # Forced ids stay, and count for the floors.
    assert rank_vocabulary(TWO, 3, forced=[5], floors={"zh": 0.8}).target_ids.tolist() == [5, 0, 3]


def test_a_size_that_is_too_small_is_refused_with_one_that_would_do():
    # Ids beyond the target are no way to hold a floor.
    with raises_with(UsageError, "--floor", "no size does", "zh 60.00% (floor 90.00%)"):
        rank_vocabulary(TWO, 4, forced=[], target_vocab=5, floors={"zh": 0.9})
    counts = TokenCounts((source([4] * 100 + [0] * 200, name="en"), source([0] * 100 + [2] * 200, name="zh")), None)
    # Without floors, 64 ids of the first source.
    with raises_with(UsageError, "--floor", "64 ids", "128 would do", "en 64.00% (floor 60.00%)", "zh 0.00%"):
        rank_vocabulary(counts, 64, forced=[], floors={"en": 0.6, "zh": 0.3})
    assert rank_vocabulary(counts, 128, forced=[], floors={"en": 0.6, "zh": 0.3}).size == 128
    # Held-out text of 65 common ids, and a floor that all of its counted text, 300 ids, would need.
    counts = TokenCounts((source([9] * 65 + [1] * 235, [list(range(65))]),), None)
    with raises_with(UsageError, "--floor", "128 would do"):
        rank_vocabulary(counts, 64, forced=[], floors={"text": 1.0})


def test_floors_that_mean_nothing_are_refused():
    for asked, error, word in (
        ({"floors": {"de": 0.5}, "size": 3}, UsageError, "de"),
        ({"floors": {"zh": 0.5}}, UsageError, "--floor"),
        ({"floors": {"zh": 0.5}, "coverage": 0.5}, UsageError, "--floor"),
        ({"floors": {"zh": 97.0}, "size": 3}, UsageError, "--floor"),
        ({"floors": {"none": 0.5}, "size": 3}, VocabularyError, "none"),
    ):
        empty = source([0] * 6, name="none")
        with raises(error, option=word):
            rank_vocabulary(TokenCounts((*TWO.sources, empty), None), forced=[], **asked)


def shares_of(counts):
    array = np.array(counts, float)
    return array / array.sum(axis=1, keepdims=True)


@st.composite
def problems(draw: st.DrawFn) -> tuple[FloorProblem, int]:
    num_ids, num_floors = draw(st.integers(3, 9)), draw(st.integers(1, 3))
    row = st.lists(st.integers(0, 9), min_size=num_ids, max_size=num_ids).filter(any)
    counted = shares_of(draw(st.lists(row, min_size=num_floors, max_size=num_floors)))
    floors = np.array(draw(st.lists(st.floats(0.05, 1.0), min_size=num_floors, max_size=num_floors)))
    size = draw(st.integers(1, num_ids))
    forced = draw(st.sets(st.integers(0, num_ids - 1), max_size=size))
    is_forced = np.isin(np.arange(num_ids), sorted(forced))
    return FloorProblem(shares_of([draw(row)])[0], is_forced, counted, counted, floors), size


def choices(problem, size):
    everything = [np.isin(np.arange(len(problem.score)), ids) for ids in combinations(range(len(problem.score)), size)]
    return [chosen for chosen in everything if problem.holds(chosen) and chosen[problem.is_forced].all()]


@settings(max_examples=60)
@given(problems())
def test_against_every_choice(case):
    problem, size = case
    best = max((problem.score[chosen].sum() for chosen in choices(problem, size)), default=None)
    found = problem.choose(size)
    if found is not None:
        chosen, bound = found
        assert chosen.sum() == size
        assert problem.holds(chosen)
        assert chosen[problem.is_forced].all()
        assert problem.score[chosen].sum() <= best + 1e-9 <= bound + 2e-9
    # With a tenth of a point to spare a choice is always found, and none is called impossible that there is.
    roomy = replace(problem, floors=problem.floors + 0.001)
    searched = problem.search(size)
    assert searched is not None or not choices(roomy, size)
    assert not (best is not None and problem.is_impossible(size))
    if searched is not None:
        assert searched[0].sum() == size
        assert problem.holds(searched[0])
        assert searched[0][problem.is_forced].all()


@pytest.mark.parametrize("is_held_out", [False, True])
@pytest.mark.parametrize("seed", sweep([5, 11, 17, 20], 11, 20))
def test_floors_that_a_choice_holds_are_held(seed, is_held_out):
    rng = np.random.default_rng(seed)
    num_ids, num_sources = int(rng.choice([60, 300, 2000])), int(rng.integers(1, 5))
    size = int(num_ids * rng.uniform(0.1, 0.6))
    text = [np.floor(rng.pareto(1.1, num_ids) * rng.choice([3, 30])).astype(np.int64) + 1 for _ in range(num_sources)]
    written = [rng.choice(num_ids, 3000, p=counts / counts.sum()) for counts in text]
    measured = [np.bincount(ids, minlength=num_ids) for ids in written] if is_held_out else text
    best = np.argsort(-sum(rng.uniform(0.05, 1) * counts / counts.sum() for counts in text))[:size]
    floors = {str(at): counts[best].sum() / counts.sum() - 0.001 for at, counts in enumerate(measured)}
    kept = [held_out([ids.tolist()]) if is_held_out else None for ids in written]
    sources = [SourceCounts(str(at), 1.0, counts, kept[at], {}) for at, counts in enumerate(text)]
    ranked = rank_vocabulary(TokenCounts(tuple(sources), None), size, forced=[], floors=floors)
    for at, floor in enumerate(floors.values()):
        assert measured[at][ranked.target_ids].sum() >= (floor - 1e-12) * measured[at].sum()


def zipf(rng, num_ids, num_shared):
    """Shares of a source: its own order of the ids, the most common ones in common with others."""
    order = np.concatenate([np.arange(num_shared), num_shared + rng.permutation(num_ids - num_shared)])
    shares = np.empty(num_ids)
    shares[order] = 1 / np.arange(1, num_ids + 1)
    return shares / shares.sum()


def test_the_best_choice_of_many_ids_is_within_a_thousandth_of_the_bound():
    rng = np.random.default_rng(0)
    counted = np.stack([zipf(rng, 2000, 40) for _ in range(3)])
    score, is_forced = np.array([0.8, 0.1, 0.1]) @ counted, np.arange(2000) >= 1990
    problem = FloorProblem(score, is_forced, counted, counted, np.array([0.7, 0.75, 0.75]))
    assert not problem.holds(np.isin(np.arange(2000), np.argsort(-problem.score)[:600]))
    chosen, bound = problem.choose(600)
    assert problem.holds(chosen)
    assert bound - 0.001 <= problem.score[chosen].sum() <= bound
    # Deterministic.
    assert np.array_equal(problem.choose(600)[0], chosen)


@pytest.mark.parametrize("seed", range(5))
def test_floors_hold_on_held_out_documents_and_on_new_ones_within_their_interval(seed):
    rng = np.random.default_rng(seed)
    text = {name: zipf(rng, 1500, 30) for name in ("en", "zh", "code")}

    def written(name, num_documents):
        return [rng.choice(1500, size=100, p=text[name]) for _ in range(num_documents)]

    def counts_of(num_held_out):
        sources = []
        for name, weight in (("en", 8.0), ("zh", 1.0), ("code", 1.0)):
            counts = np.bincount(np.concatenate(written(name, 300)), minlength=1500)
            kept = held_out([document.tolist() for document in written(name, num_held_out)])
            sources.append(SourceCounts(name, weight, counts, kept, {}))
        return TokenCounts(tuple(sources), None)

    counts, floors = counts_of(60), {"zh": 0.8, "code": 0.78}
    plain = measure_coverage(rank_vocabulary(counts, 512, forced=[]), counts, [512], floors=floors)
    assert not all(entry.coverage[-1] >= (entry.floor or 0) for entry in plain.sources)
    ranked = rank_vocabulary(counts, 512, forced=[], floors=floors)
    for measured, slack in ((measure_coverage(ranked, counts, [512], floors=floors), 0), (None, 4)):
        report = measured or measure_coverage(ranked, counts_of(60), [512], floors=floors)
        for entry in report.sources:
            assert entry.coverage[-1] >= (entry.floor or 0) - slack * entry.error[-1] - 1e-9
    assert "512" in lost_floors(ranked, 448)[0]
    assert lost_floors(ranked, 512) == []


def test_held_out_text_that_the_counts_do_not_tell_takes_every_id_of_its_source():
    counts = TokenCounts((source([1] * 8 + [0] * 4, [[6, 7]], name="a"), source([0] * 8 + [9] * 4, name="b")), None)
    assert rank_vocabulary(counts, 9, forced=[], floors={"a": 1.0}).target_ids.tolist() == [8, *range(8)]
    with raises_with(UsageError, "--floor", "no size does"):
        rank_vocabulary(counts, 7, forced=[], candidates=[0, 1, 2, 3, 4, 5, 8, 9, 10, 11], floors={"a": 1.0})
