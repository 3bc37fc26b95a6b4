"""Speeds and verdicts from made-up timings whose truth is known."""

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from eagle_slim.runtime.api.stats import GenerationStats
from eagle_slim.runtime.compare.candidates import PLAIN, Candidate
from eagle_slim.runtime.compare.recommend import recommend
from eagle_slim.runtime.compare.report import ALL, Advice, ComparisonRow
from eagle_slim.runtime.compare.statistics import Timings, measure, ratio
from numpy.typing import NDArray

VERIFY_S = 0.070
TREE = (5, 10, 60)
PASSES = 12
NO_MODEL: Any = None


def timings(draft_s, length, num_prompts=24, nodes=60, verify_s=VERIFY_S, seed=0, difficulty=None):
    """Steps with 3% of timing noise; prompts differ in how much is accepted, by as much for every candidate."""
    random = np.random.default_rng(seed)
    steps = num_prompts * PASSES

    def noisy(seconds: float) -> NDArray[np.float64]:
        return seconds * (1 + 0.03 * random.standard_normal(steps))

    if difficulty is None:
        difficulty = 1 + 0.2 * np.random.default_rng(99).standard_normal(num_prompts)
    accepted = PASSES * length * difficulty
    if length == 1.0:
        accepted = np.full(num_prompts, float(PASSES))
    passes = np.full(num_prompts, float(PASSES))
    times_s = np.stack([noisy(draft_s), noisy(verify_s), noisy(0.002)], 1)
    return Timings(times_s, np.repeat(np.arange(num_prompts), PASSES), accepted, passes, nodes)


PLAIN_TIMINGS = timings(0.0, 1.0, nodes=1, verify_s=0.045, seed=7)


def advise(sizes: dict[str, Timings], draft_bytes: dict[str, int], plain: Timings = PLAIN_TIMINGS) -> Advice:
    found = measure({PLAIN: plain, **sizes})
    num_prompts = len(plain.accepted)
    rows = []
    for name, each in found.items():
        size = draft_bytes.get(name, 0)
        candidate, counts = Candidate(name, name, NO_MODEL, size, size, tree=TREE), [num_prompts] * 3
        measured = GenerationStats({1: 1}), each, ratio(each, found[PLAIN], num_prompts)
        rows.append(ComparisonRow(candidate, "greedy", 1, ALL, *counts, *measured))
    return recommend(rows)[0]


def test_the_true_figures_are_found() -> None:
    even = np.ones(24)
    found = measure({"4096": timings(0.020, 2.5, difficulty=even), PLAIN: PLAIN_TIMINGS})
    assert found["4096"].accepted_length.value == pytest.approx(2.5)
    assert found["4096"].step_s == pytest.approx(0.092, rel=0.01)
    assert found["4096"].tokens_per_s.value == pytest.approx(2.5 / 0.092, rel=0.01)
    speedup = ratio(found["4096"], found[PLAIN], 24)
    assert speedup.value == pytest.approx(2.5 / 0.092 * 0.047, rel=0.01)
    assert speedup.low < 2.5 / 0.092 * 0.047 < speedup.high


@pytest.mark.slow
def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    inside = 0
    for seed in range(100):
        random = np.random.default_rng(seed)
        difficulty = 1 + 0.2 * random.standard_normal(16)
        found = measure({"a": timings(0.020, 2.5, 16, seed=seed, difficulty=difficulty)}, seed)
        estimate = found["a"].accepted_length
        inside += estimate.low <= 2.5 <= estimate.high
    assert inside >= 88  # of 95 expected, with 3 standard deviations


def test_two_sizes_that_differ_are_decided() -> None:
    sizes = {"full": timings(0.060, 2.5, seed=1), "4096": timings(0.020, 2.45, seed=2)}
    advice = advise(sizes, {"full": 49152, "4096": 4096})
    assert (advice.candidate, advice.is_decided, advice.as_fast) == ("4096", True, ("4096",))
    assert advice.beats_plain is True
    advice = advise({"full": sizes["4096"], "4096": sizes["full"]}, {"full": 49152, "4096": 4096})
    assert (advice.candidate, advice.is_decided) == ("full", True)


def test_two_sizes_that_do_not_differ_are_said_to_be_as_fast_and_the_smaller_wins() -> None:
    sizes = {"16384": timings(0.020, 2.5, 48, seed=1), "4096": timings(0.020, 2.5, 48, seed=2)}
    plain = timings(0.0, 1.0, 48, nodes=1, verify_s=0.045, seed=7)
    advice = advise(sizes, {"16384": 16384, "4096": 4096}, plain)
    assert (advice.candidate, advice.is_decided, set(advice.as_fast)) == ("4096", True, {"16384", "4096"})
    assert advice.reasons[1].endswith(" of the speed of 4096: no significant difference.")
    assert advice.reasons[2] == "Of those without a significant difference, 4096 reads the fewest bytes."
    # Other trees read the same bytes.
    same = advise(sizes, {"16384": 4096, "4096": 4096}, plain)
    assert same.candidate == max(sizes, key=lambda name: measure(sizes)[name].tokens_per_s.value)
    assert len(same.reasons) == 2


def test_too_few_prompts_decide_nothing() -> None:
    for num_prompts in (1, 2, 4):
        sizes = {"full": timings(0.060, 2.5, num_prompts, seed=1), "4096": timings(0.020, 2.45, num_prompts, seed=2)}
        plain = timings(0.0, 1.0, num_prompts, nodes=1, verify_s=0.045, seed=7)
        advice = advise(sizes, {"full": 49152, "4096": 4096}, plain)
        assert (advice.is_decided, advice.beats_plain, advice.as_fast) == (False, None, ("full", "4096"))
        assert advice.headline == "greedy: too few prompts to compare, 5 are enough."
        assert "significant" not in "".join(advice.reasons)


def test_one_stall_changes_no_verdict() -> None:
    sizes = {"full": timings(0.060, 2.5, seed=1), "4096": timings(0.020, 2.45, seed=2)}
    for phase in range(3):
        stalled = sizes["4096"].times_s.copy()
        stalled[100, phase] += 1.0
        advice = advise({**sizes, "4096": replace(sizes["4096"], times_s=stalled)}, {"full": 49152, "4096": 4096})
        assert (advice.candidate, advice.is_decided) == ("4096", True)


def test_verifying_is_one_quantity_for_all_sizes() -> None:
    sizes = {"full": timings(0.060, 2.5, seed=1), "16384": timings(0.030, 2.5, seed=3)}
    sizes["4096"] = timings(0.020, 2.45, seed=2)
    busy = {**sizes, "4096": replace(sizes["4096"], times_s=sizes["4096"].times_s * [1, 16, 1])}  # 1,088 beside 68 ms
    found = measure(busy)
    assert found["4096"].verify_s == found["full"].verify_s == pytest.approx(VERIFY_S, rel=0.05)
    assert advise(busy, {"full": 49152, "16384": 16384, "4096": 4096}).candidate == "4096"


def test_trees_of_other_sizes_are_verified_at_their_own_cost() -> None:
    found = measure({"a": timings(0.02, 2.5, nodes=60), "b": timings(0.02, 2.0, nodes=5, verify_s=0.050)})
    assert found["a"].verify_s == pytest.approx(VERIFY_S, rel=0.01)
    assert found["b"].verify_s == pytest.approx(0.050, rel=0.01)


def test_plain_decoding_that_is_faster_is_said_to_be() -> None:
    slow = {"full": timings(0.5, 2.5, seed=1), "4096": timings(0.4, 2.45, seed=2)}
    advice = advise(slow, {"full": 49152, "4096": 4096})
    assert (advice.beats_plain, advice.candidate, advice.draft_vocab, advice.is_decided) == (False, PLAIN, 0, True)
    assert advice.headline.startswith("greedy: plain decoding is faster: 4096 runs at 0.25 (0.2")


def test_an_interval_that_says_nothing_is_not_printed() -> None:
    plain = timings(0.0, 1.0, 2, nodes=1, verify_s=0.045, seed=7)
    found = advise({"a": timings(0.02, 2.0, 2, difficulty=np.array([0.5, 1.5]))}, {"a": 2}, plain)
    assert found.reasons[1] == "a ran at 1.01 times the speed of plain decoding."
    assert (found.is_decided, found.beats_plain) == (False, None)


def test_no_difference_among_enough_prompts_is_said() -> None:
    plain = timings(0.0, 1.0, 6, nodes=1, verify_s=0.045, seed=7)
    found = advise({"a": timings(0.02, 2.0, 6, difficulty=np.array([0.4, 1.6] * 3))}, {"a": 2}, plain)
    wanted = r"greedy: no significant difference: a ran at 1\.\d\d \(.* to .*\) times the .*"
    assert re.fullmatch(wanted, found.headline)
