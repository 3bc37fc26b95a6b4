"""A comparison: what is measured, what is written, what is resumed, and the page in a real browser."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from eagle_slim.runtime import SpeculativeModel
from eagle_slim.runtime.compare_cli import _follow_all
from eagle_slim.runtime.comparison.answers import Answer, AnswerKey, AnswerLog
from eagle_slim.runtime.comparison.charts import png_bytes, series
from eagle_slim.runtime.comparison.compare import (
    ALL,
    PLAIN,
    Candidate,
    CoverageCurve,
    Interrupted,
    Mode,
    Plan,
    answer_coverage,
    compare,
    cut_sizes,
    follow_each,
)
from eagle_slim.runtime.comparison.output import csv_text, html_page, markdown, report_to_json, text_table
from eagle_slim.runtime.comparison.prompt_file import Prompt
from eagle_slim.runtime.comparison.recommend import recommend
from eagle_slim.runtime.comparison.report import CompareReport, build_report
from eagle_slim.runtime.config import TreeConfig
from eagle_slim.runtime.errors import PromptError, UsageError
from eagle_slim.runtime.generation.stats import GenerationStats
from eagle_slim.vocab_tools.vocabulary.draft_vocab import DraftVocab
from support.raising import raises
from support.tiny_models import tiny_target, write_head, write_pair

pytestmark = pytest.mark.filterwarnings("ignore::eagle_slim.runtime.errors.AcceptanceWarning")
GREEDY = Mode("greedy")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> SpeculativeModel:
    target, head = write_pair(tmp_path_factory.mktemp("pair"))
    return SpeculativeModel.from_pretrained(target, head, depth=2, top_k=8, total_tokens=40)


def vocab_of(model: SpeculativeModel, size: int) -> DraftVocab:
    vocab = model.target.text_config.vocab_size
    return DraftVocab(np.random.default_rng(0).permutation(vocab)[:size], 0, vocab)


def test_coverage_of_answers() -> None:
    ranked = np.concatenate([[500, 3], np.setdiff1d(np.arange(600), [500, 3])])
    curve = answer_coverage(ranked[:100], [500, 3, 599, 3])
    assert (curve.sizes[0], curve.sizes[-1]) == (64, 100)
    assert set(curve.covered) == {0.75}
    late = answer_coverage(ranked, [500, int(ranked[299]), int(ranked[299]), int(ranked[599])])
    assert all(share == 0.25 for size, share in zip(late.sizes, late.covered, strict=True) if size < 300)
    assert all(share == 0.75 for size, share in zip(late.sizes, late.covered, strict=True) if 300 <= size < 600)
    assert late.covered[-1] == 1.0


def test_a_comparison_measures_what_generate_gives(model: SpeculativeModel) -> None:
    candidates = cut_sizes(model, [None, vocab_of(model, 100)], "head")
    prompts = [Prompt(("one two", "three"), "talk"), Prompt(("four",), "math")]
    plan = Plan(prompts, [GREEDY, Mode("sampled", {"temperature": 1.0, "seed": 1})], 10, repeats=2)
    steps: list[None] = []
    answers = compare(candidates, plan, advance=lambda: steps.append(None))
    assert len(steps) == len(answers) == plan.num_calls(2) == 36
    report = build_report(candidates, plan, answers)
    assert report.is_complete
    full = candidates[0].label
    assert [(r.candidate, r.category) for r in report.rows if r.mode == "greedy"] == [
        (size, category) for category in (ALL, "talk", "math") for size in (PLAIN, full, "100")
    ]
    assert all(row.num_identical == row.num_answers for row in report.rows)
    assert report.find(full, "greedy", "talk").num_answers == 4
    assert report.find("100", "greedy").draft_vocab == 100
    assert report.find(PLAIN, "sampled").mean_accepted_length == 1.0
    assert report.find(PLAIN, "sampled").speedup.value == 1.0
    # A conversation's second turn follows its first answer.
    first = model.generate(model.encode_chat("one two"), max_new_tokens=10)
    talk = [{"role": "user", "content": "one two"}, {"role": "assistant", "content": first.text[0] or ""}]
    second = model.generate(model.encode_chat([*talk, {"role": "user", "content": "three"}]), max_new_tokens=10)
    expected = GenerationStats.sum([first.stats, second.stats, first.stats, second.stats])
    assert report.find(full, "greedy", "talk").accepted_lengths == expected.accepted_lengths
    assert all(sum(len(a.steps) for a in answers if a.key.candidate == label) for label in (PLAIN, full))
    assert {each.mode for each in recommend(report)} == {"greedy", "sampled"}


def test_every_step_is_timed(model: SpeculativeModel) -> None:
    for options in ({}, {"speculative": False}):
        stats = model.generate([[3, 4], [5, 6, 7]], max_new_tokens=8, ignore_eos=True, max_slots=1, **options).stats
        assert len(stats.steps) == stats.num_passes
        for phase in ("draft_s", "verify_s", "host_s"):
            total = sum(getattr(step, phase) for step in stats.steps)
            assert total == pytest.approx(getattr(stats, phase), rel=1e-6) or phase == "host_s"
            assert total <= stats.total_s


def test_sizes_that_are_the_same_are_one(model: SpeculativeModel, tmp_path: Path) -> None:
    vocab = model.draft_vocab
    order = vocab_of(model, vocab)
    candidates = cut_sizes(model, [None, order, vocab_of(model, 300), vocab_of(model, 300)])
    assert [candidate.label for candidate in candidates] == [f"full ({vocab:,})", "300"]
    slim = SpeculativeModel.from_pretrained(tiny_target("llama"), write_head(tmp_path, draft_ids=[3, 4, 9]), top_k=2)
    assert [candidate.label for candidate in cut_sizes(slim, [None])] == ["all 3 of 24"]


def test_sizes_that_follow_a_text(model: SpeculativeModel, capsys: pytest.CaptureFixture[str]) -> None:
    """Each size as it is and following; one that holds every id has nothing to follow with."""
    full, few = cut_sizes(model, [None, vocab_of(model, 40)])
    follows = (None, "prompt", "text")
    candidates = [*follow_each(full, follows, 12), *follow_each(few, follows, 12)]
    assert [one.label for one in candidates] == [full.label, "40", "40 + prompt", "40 + text"]
    assert [one.label for one in follow_each(full, ("text",), 12)] == [full.label]
    assert [(one.follow, one.follow_rows) for one in candidates[1:]] == [(None, 0), ("prompt", 12), ("text", 12)]
    assert candidates[2].draft_bytes - few.draft_bytes == 12 * few.model.drafter.weights.hidden * 4 * 3
    again = _follow_all([full, few], follows, 12, None)
    assert [one.label for one in again] == [one.label for one in candidates]
    assert f"{full.size}: no id is left" in capsys.readouterr().err
    with raises(UsageError, option="follow", missing="rows"):
        _follow_all([full], (None, "text"), 12, None)
    plan = Plan([Prompt(("one two three",)), Prompt(("four five six",))], [GREEDY], 10)
    report = build_report(candidates, plan, compare(candidates, plan))
    assert all(row.num_identical == row.num_answers for row in report.rows)
    rows = {row.candidate: row.to_json() for row in report.rows}
    assert (rows["40"]["follow"], rows["40 + text"]["follow"], rows["40 + text"]["follow_rows"]) == (None, "text", 12)
    assert rows["40"]["num_missed"] >= rows["40 + prompt"]["num_missed"] >= rows["40 + text"]["num_missed"]
    (advice,) = recommend(report)
    told = [reason for reason in advice.reasons if reason.startswith("40 + ")]
    assert [reason.split(":")[0] for reason in told if "times its speed" in reason] == ["40 + prompt", "40 + text"]
    lines = ["greedy", "greedy, follows the prompt", "greedy, follows the text"]
    assert [name for name, _ in series(report, ALL)] == lines


def test_several_trees_heads_and_batches(model: SpeculativeModel) -> None:
    (full,) = cut_sizes(model, [None], "one")
    chain = Candidate("chain", full.model.with_tree(TreeConfig(3, 1, 4)), full.size, "other")
    prompts = [Prompt((text,), category) for text, category in (("one", "a"), ("two", "a"), ("three", "b"))]
    plan = Plan(prompts, [GREEDY], 8, batches=(1, 2))
    assert plan.groups(2) == [(0, 1), (2, 0)]
    answers = compare([full, chain], plan)
    assert len(answers) == plan.num_calls(2) == 15
    report = build_report([full, chain], plan, answers)
    assert [(row.candidate, row.batch, row.num_answers) for row in report.rows if row.category == ALL] == [
        (name, batch, 3 if batch == 1 else 4) for batch in (1, 2) for name in (PLAIN, full.label, "chain")
    ]
    assert {row.category for row in report.rows if row.batch == 2} == {ALL, "a"}  # the other group is mixed
    assert report.find("chain", "greedy").tree == (3, 1, 4)
    assert chain.draft_bytes < full.draft_bytes * 2
    assert [(each.mode, each.batch) for each in recommend(report)] == [("greedy", 1), ("greedy", 2)]
    assert all(row.num_identical == row.num_answers for row in report.rows)
    assert png_bytes(report, recommend(report))[:8] == b"\x89PNG\r\n\x1a\n"


def test_an_interrupted_comparison_is_taken_up_again(model: SpeculativeModel, tmp_path: Path) -> None:
    candidates = cut_sizes(model, [None, vocab_of(model, 300)])
    prompts = [Prompt(("one", "two"), "a"), Prompt(("three",), "b"), Prompt(("four",), "a")]
    plan = Plan(prompts, [GREEDY], 8)
    path, done = tmp_path / "answers.jsonl", [0]

    def stop_after_five() -> None:
        done[0] += 1
        if done[0] == 5:
            raise KeyboardInterrupt

    with AnswerLog(path, {"what": 1}) as log, pytest.raises(Interrupted) as stop:
        compare(candidates, plan, log, stop_after_five)
    assert len(stop.value.answers) == 5
    partial = build_report(candidates, plan, stop.value.answers)
    assert not partial.is_complete
    assert partial.find(PLAIN, "greedy").num_answers == 2
    assert "interrupted" in markdown(partial, recommend(partial))
    path.write_bytes(path.read_bytes() + b'{"key":[0,1,0,"gree')  # killed in the middle of a line
    calls: list[Any] = []
    with AnswerLog(path, {"what": 1}) as log:
        assert list(log.answers.values()) == [Answer.from_json(answer.to_json()) for answer in stop.value.answers]
        original = SpeculativeModel.generate

        def counting(self: SpeculativeModel, prompts: Any, **options: Any) -> Any:
            calls.append(options)
            return original(self, prompts, **options)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(SpeculativeModel, "generate", counting)
            answers = compare(candidates, plan, log)
    assert sum(options["max_new_tokens"] == 8 for options in calls) == plan.num_calls(2) - 5
    whole = compare(candidates, plan)
    assert [(a.key, a.token_ids, a.num_identical) for a in answers] == [
        (a.key, a.token_ids, a.num_identical) for a in whole
    ]
    assert len(path.read_bytes().splitlines()) == 1 + len(whole)
    with raises(UsageError, differing=["what"]):
        AnswerLog(path, {"what": 2})
    (tmp_path / "letter").write_text("Dear all\n")
    with raises(UsageError, path=str(tmp_path / "letter")):
        AnswerLog(tmp_path / "letter", {})
    assert (tmp_path / "letter").read_text() == "Dear all\n"


def test_one_category_has_no_rows_of_its_own(model: SpeculativeModel) -> None:
    candidates, plan = cut_sizes(model, [None]), Plan([Prompt(("one",), "a"), Prompt(("two",), "a")], [GREEDY], 4)
    report = build_report(candidates, plan, compare(candidates, plan))
    assert [row.category for row in report.rows] == [ALL, ALL]


def test_a_category_called_all_has_rows_of_its_own(model: SpeculativeModel) -> None:
    plan = Plan([Prompt(("one",), ALL), Prompt(("two",), "other")], [GREEDY], 4)
    candidates = cut_sizes(model, [None])
    report = build_report(candidates, plan, compare(candidates, plan))
    answers = {(row.candidate, row.category): row.num_answers for row in report.rows}
    assert {category: answers[PLAIN, category] for _, category in answers} == {ALL: 2, "all (category)": 1, "other": 1}
    assert len(answers) == len(report.rows)


def test_an_opening_is_part_of_the_prompt(model: SpeculativeModel) -> None:
    opening = ({"role": "system", "content": "Be brief."},)
    candidates = cut_sizes(model, [None])
    (plain, _) = compare(candidates, Plan([Prompt(("one",), opening=opening)], [GREEDY], 6))
    expected = model.generate(model.encode_chat([*opening, {"role": "user", "content": "one"}]), max_new_tokens=6)
    assert [list(row) for row in plain.token_ids] == expected.token_ids


def test_a_prompt_without_room_is_refused_before_anything_is_measured(model: SpeculativeModel) -> None:
    plan = Plan([Prompt(("one",)), Prompt(("two",)), Prompt(("x " * 300,))], [GREEDY], 4)
    with raises(PromptError, prompt=2):
        compare(cut_sizes(model, [None]), plan, advance=lambda: pytest.fail("measured"))


def test_a_later_turn_without_room_is_named(model: SpeculativeModel) -> None:
    plan = Plan([Prompt(("one",)), Prompt(("two", "x " * 300))], [GREEDY], 4)
    with pytest.raises(PromptError, match=r"Turn 2 of prompt 1, with the conversation before it, has .* no room"):
        compare(cut_sizes(model, [None]), plan)


def test_nothing_to_compare(model: SpeculativeModel) -> None:
    prompt, (full,) = [Prompt(("x",))], cut_sizes(model, [None])
    with raises(UsageError, sizes=0, prompts=1, modes=1):
        compare([], Plan(prompt, [GREEDY], 4))
    with raises(UsageError, found=[full.label, full.label]):
        compare([full, full], Plan(prompt, [GREEDY], 4))


class MadeUp:
    """Stands for a loaded model where only its figures are looked at."""

    def __init__(self, draft_vocab: int) -> None:
        self.draft_vocab = draft_vocab


def made_up(speeds: dict[str, tuple[int, float, float]], plain_s: float = 0.10) -> CompareReport:
    """A report over 20 prompts in two categories: label to (draft vocabulary, accepted length, seconds per step)."""
    answers = []
    for label, (_, length, seconds) in {PLAIN: (0, 1.0, plain_s), **speeds}.items():
        for group in range(20):
            lengths = {1: 10} if length == 1 else {2: round(10 * (3 - length)), 3: round(10 * (length - 2))}
            step = (0.0, seconds, 0.0) if label == PLAIN else (seconds - 0.05, 0.04, 0.01)
            answers.append(
                Answer(
                    AnswerKey(0, 1, group, "greedy", 0, label), ("math", "</script><b>H")[group % 2], 1, 5, lengths,
                    0.1, seconds * 10, (step,) * 10, ((1, 2, 3),), ("a",), (1,) if label != PLAIN else (),
                )
            )  # fmt: skip
    candidates: Sequence[Any] = [Fake(label, size) for label, (size, _, _) in speeds.items()]
    plan = Plan([Prompt((str(i),)) for i in range(20)], [GREEDY], 24)
    curve = CoverageCurve("these answers", (1000, 4000, 9000), (0.8, 0.95, 1.0))
    setup = {
        "target": "T", "heads": ["</script><b>H"], "target_vocab": 9000, "device": "D", "dtype": "float32",
        "drafter": "reference", "draft_weights": "fp32", "trees": ["depth 3, top_k 4, 25 nodes"], "num_prompts": 20,
        "num_turns": 20,
        "max_new_tokens": 24, "repeats": 1, "versions": {}, "candidates": list(speeds),
    }  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("eagle_slim.runtime.comparison.report.describe", lambda *_: setup)
        return build_report(candidates, plan, answers, [curve])


class Fake:
    """A candidate of made-up figures."""

    head, tree, follow, follow_rows = "H", TreeConfig(3, 4, 25), None, 0

    def __init__(self, label: str, draft_vocab: int) -> None:
        self.label = self.size = label
        self.model, self.draft_bytes = MadeUp(draft_vocab), draft_vocab * 100


SPEEDS = {"full (9,000)": (9000, 2.9, 0.15), "4,000": (4000, 2.8, 0.10), "1,000": (1000, 2.2, 0.09)}
REPORT = made_up(SPEEDS)


def test_the_advice_says_why() -> None:
    (advice,) = recommend(REPORT)
    assert (advice.candidate, advice.draft_vocab, advice.is_decided, advice.beats_plain) == ("4,000", 4000, True, True)
    text = " ".join(advice.reasons)
    assert "2.80 tokens per pass, 100.0 ms a step" in text
    assert "28.0 tokens/s" in text
    assert "2.80 (2.80 to 2.80) times that: faster" in text  # 28.0 against 10.0 of plain decoding


def test_a_plain_pass_longer_than_a_verify_is_told() -> None:
    assert REPORT.remarks == (
        "greedy: plain decoding took 100.0 ms a step, longer than verifying a whole tree (40.0 ms), which is more "
        "work. The speed-ups are too high; measure again.",
    )
    assert made_up(SPEEDS, plain_s=0.03).remarks == ()


def test_table_csv_markdown_and_json_hold_the_same_figures() -> None:
    advice = recommend(REPORT)
    table = text_table(REPORT).splitlines()
    assert re.split("  +", table[0]) == [
        "size", "mode", "batch", "category", "accepted", "missed", "tokens/s", "speed-up", "ms/step", "draft", "verify",
        "host", "passes", "exact",
    ]  # fmt: skip
    expected = [
        "full (9,000)", "greedy", "1", "all", "2.900", "33.3%", "19.3 ±0%", "1.93 ±0%", "150.0", "100.0", "40.0",
        "10.0", "200", "20/20",
    ]  # fmt: skip
    assert re.split("  +", table[2]) == expected
    assert re.split("  +", table[1])[4:6] == ["1.000", "-"]
    page = markdown(REPORT, advice)
    assert f"| {' | '.join(expected)} |" in page
    assert f"**R{advice[0].headline[1:]}**" in page
    rows = list(csv.DictReader(io.StringIO(csv_text(REPORT))))
    data = report_to_json(REPORT, advice)
    assert len(rows) == len(data["rows"]) == len(table) - 1 == 12
    for line, row in zip(rows, data["rows"], strict=True):
        for key, value in row.items():
            if key != "accepted_lengths":
                assert line[key] == ("" if value is None else str(value))
    assert rows[1]["accepted_lengths"] == "2:20 3:180"
    assert data["coverage"][0]["covered"] == [0.8, 0.95, 1.0]
    json.dumps(data, allow_nan=False)


def test_the_picture_depends_on_the_figures_only() -> None:
    first = png_bytes(REPORT, recommend(REPORT))
    assert first[:8] == b"\x89PNG\r\n\x1a\n"
    assert png_bytes(REPORT, recommend(REPORT)) == first
    other = made_up({**SPEEDS, "4,000": (4000, 2.7, 0.10)})
    assert png_bytes(other, recommend(other)) != first


def test_the_page_fetches_nothing_and_cannot_be_broken_out_of() -> None:
    page = html_page(REPORT, recommend(REPORT))
    for reference in ("src=", "href=", "@import", "url(", "fetch(", "import("):
        assert reference not in page
    assert "</script><b>H" not in page
    assert page.count("</script>") == 1
    assert "never changes the output" in page


# Moves the mouse over the middle of the first chart and focuses a point of the second; the tooltips are in the dump.
HOVER = """<script>
const svg = document.querySelector("#length svg"), box = svg.getBoundingClientRect();
const at = { clientX: box.left + box.width * 0.60, clientY: box.top + 80, bubbles: true };
svg.dispatchEvent(new MouseEvent("mousemove", at));
document.querySelectorAll("#speed .point")[0].dispatchEvent(new Event("focus"));
document.getElementById("category").value = "math";
document.getElementById("category").dispatchEvent(new Event("change"));
</script></body>"""


def test_hover_in_a_real_browser(tmp_path: Path) -> None:
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        pytest.skip("needs chromium: apt-get install chromium")
    page = tmp_path / "page.html"
    page.write_text(html_page(REPORT, recommend(REPORT)).replace("</body>", HOVER), encoding="utf-8")
    done = subprocess.run(
        [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}",
         "--virtual-time-budget=2000", "--dump-dom", page.as_uri()],
        capture_output=True, text=True, timeout=1800, check=True,
    )  # fmt: skip
    dom = done.stdout
    tips = [part.split("</figure>")[0] for part in dom.split('class="tip"')[1:]]
    assert len(tips) == 6  # two charts for all prompts and two for each category
    assert "visibility: visible" in tips[0]
    assert "4,000 tokens" in tips[0]
    assert "tokens per pass, greedy: 2.80" in tips[0]
    assert "coverage, these answers: 95.00%" in tips[0]
    assert "1,000 tokens" in tips[1]
    assert "tokens/s, greedy: 24.44" in tips[1]
    assert "plain decoding, greedy: 10.00" in tips[1]
    assert "<li>4,000: 2.80 tokens per pass" in dom
    assert dom.count("recommended (greedy)") == 6
    assert "coverage: share of tokens in the draft vocabulary" in dom
    body = dom.split('<tbody id="body">')[1].split("</tbody>")[0]
    assert body.count("<tr>") == 4
    assert body.count("<td>math</td>") == 4


def test_setup_names_what_was_compared(model: SpeculativeModel) -> None:
    modes = [GREEDY, Mode("sampled", {"temperature": 0.7, "seed": 3})]
    candidates, plan = cut_sizes(model, [None], "head"), Plan([Prompt(("x",))], modes, 4)
    report = build_report(candidates, plan, compare(candidates, plan))
    setup: dict[str, Any] = report.setup
    assert setup["modes"] == {"greedy": {}, "sampled": {"temperature": 0.7, "seed": 3}}
    assert setup["dtype"] == "float32"
    assert setup["trees"] == ["depth 2, top_k 8, 40 nodes"]
    assert (setup["heads"], setup["batches"]) == (["head"], [1])
    assert report.curves == ()
