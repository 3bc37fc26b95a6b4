"""The forms of a result, from figures that are made up; the page in a real browser."""

import html
import json
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

from eagle_slim.convert.errors import OutputExistsError
from eagle_slim.runtime.api.stats import GenerationStats, StepTimes
from eagle_slim.runtime.compare import Answer, CompareOptions, Comparison
from eagle_slim.runtime.compare.candidates import PLAIN, Candidate
from eagle_slim.runtime.compare.recommend import recommend
from eagle_slim.runtime.compare.report import build_rows
from support.programs import headless_browser
from support.raising import raises


def made_up(speeds, plain_s=0.1, unmeasured=()):
    """A result over 20 prompts in two categories: label to (draft vocabulary, accepted length, seconds per step)."""
    answers = []
    for label, (_, length, seconds) in {PLAIN: (0, 1.0, plain_s), **speeds}.items():
        for group in range(20):
            lengths = {1: 10} if length == 1 else {2: round(10 * (3 - length)), 3: round(10 * (length - 2))}
            step = (0.0, seconds, 0.0) if label == PLAIN else (seconds - 0.05, 0.04, 0.01)
            steps, missed = (StepTimes(*step),) * 10, {7: 1} if label != PLAIN else {}
            stats = GenerationStats(lengths, num_new_tokens=3, total_s=seconds * 10, steps=steps, missed_ids=missed)
            category = ("math", "</script><b>H")[group % 2]
            answers.append(Answer("greedy", 1, group, 0, label, category, 1, 1, stats))
    model: Any = None
    drafted = [
        Candidate(label, label, model, size, size * 100, head="H", tree=(3, 4, 25))
        for label, (size, _, _) in speeds.items()
    ]
    options = CompareOptions(modes=("greedy",), max_new_tokens=24)
    setup: dict[str, Any] = {"target": "T", "heads": ["</script><b>H"], "device": "D", "dtype": "float32"}
    setup |= {"drafter": "reference", "draft_weights": "fp32", "trees": ["3/4/25"], "num_prompts": 20}
    setup |= {"max_new_tokens": 24, "versions": {}}
    answers = [answer for answer in answers if answer.candidate not in unmeasured]
    rows = build_rows([Candidate(PLAIN, PLAIN, model), *drafted], options, answers)
    return Comparison(rows, setup, recommend(rows), answers)


SPEEDS = {"full (9,000)": (9000, 2.9, 0.15), "4,000": (4000, 2.8, 0.10), "1,000": (1000, 2.2, 0.09)}
RESULT = made_up(SPEEDS)


def test_the_advice_says_why() -> None:
    (advice,) = RESULT.recommendations
    assert (advice.candidate, advice.draft_vocab, advice.is_decided, advice.beats_plain) == ("4,000", 4000, True, True)
    text = " ".join(advice.reasons)
    assert "accepted length 2.80, 100.0 ms a step" in text
    assert "28.0 tokens/s" in text
    # 28.0 against 10.0 of plain decoding.
    assert advice.headline == "greedy: 4,000 beats plain decoding, at 2.80 (2.80 to 2.80) times its speed."


def test_sizes_without_a_step_have_dashes() -> None:
    result = made_up(SPEEDS, unmeasured=("4,000", "1,000"))
    (advice,) = result.recommendations
    assert (advice.candidate, advice.beats_plain) == ("full (9,000)", True)
    rows = [re.split("  +", line) for line in result.to_text().split("\n\n")[0].splitlines()]
    assert rows[3][4:] == rows[4][4:] == ["-"] * 7
    missing = result.to_json()["rows"][2]
    assert {missing[name] for name in ("mean_accepted_length", "missed_rate", "tokens_per_s", "step_s")} == {None}
    (advice,) = made_up(SPEEDS, unmeasured=tuple(SPEEDS)).recommendations
    assert (advice.headline, advice.as_fast) == ("greedy: no step was measured.", ())


def test_a_category_named_all_is_not_taken_for_all_prompts() -> None:
    answers = [replace(each, category="all" if each.category == "math" else "other") for each in RESULT.answers]
    rows = build_rows([row.candidate for row in RESULT.rows[:4]], CompareOptions(modes=("greedy",)), answers)
    assert [row.num_prompts for row in rows if row.category == "all"] == [20] * 4
    assert [row.num_prompts for row in rows if row.category == '"all"'] == [10] * 4


def test_text_and_json_hold_the_same_figures() -> None:
    (advice,) = RESULT.recommendations
    table, *told = RESULT.to_text().split("\n\n")
    lines = table.splitlines()
    names = "size  mode  batch  category  accepted length  missed  tokens/s  speed-up  ms/step  passes  exact"
    full = "full (9,000)  greedy  1  all  2.900  33.3%  19.3  1.93  150.0  200  20/20"
    assert re.split("  +", lines[0]) == names.split("  ")
    assert re.split("  +", lines[2]) == full.split("  ")
    assert re.split("  +", lines[1])[4:6] == ["1.000", "-"]
    assert told == ["\n  ".join([advice.headline, *advice.reasons])]
    data = json.loads(json.dumps(RESULT.to_json(), allow_nan=False))
    assert len(data["rows"]) == len(lines) - 1 == 12
    row = data["rows"][1]
    assert (row["candidate"], row["num_passes"]) == ("full (9,000)", 200)
    assert row["accepted_lengths"] == {"2": 20, "3": 180}
    assert (row["mean_accepted_length"], row["missed_rate"], row["step_s"]) == (2.9, 0.333333, 0.15)


def test_a_folder_is_written_once(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    RESULT.write(folder)
    assert json.loads((folder / "compare.json").read_text()) == json.loads(json.dumps(RESULT.to_json()))
    assert sorted(path.name for path in folder.iterdir()) == ["compare.html", "compare.json"]
    with raises(OutputExistsError):
        RESULT.write(folder)
    RESULT.write(folder, force=True)


def test_the_page_fetches_nothing_and_cannot_be_broken_out_of() -> None:
    page = RESULT.to_html()
    for reference in ("src=", "href=", "@import", "url(", "fetch(", "import("):
        assert reference not in page
    assert "</script><b>H" not in page
    assert page.count("</script>") == 1
    assert "never changes the output" in page


# Moves the mouse over the middle of the second chart, focuses a point of the first, and notes what stands where; the
# tooltips are in the dump.
VISIT = """<script>
const box = id => document.querySelector(id).getBoundingClientRect(), svg = document.querySelector("#length svg");
const at = { clientX: box("#length svg").left + box("#length svg").width * 0.60, clientY: 80, bubbles: true };
svg.dispatchEvent(new MouseEvent("mousemove", at));
document.querySelector("#speed .point").dispatchEvent(new Event("focus"));
const points = [...document.querySelectorAll("#length .interval")].map(path => path.getBoundingClientRect());
const seen = {
  window: innerWidth, page: document.documentElement.scrollWidth, table: [box("#body").left, box("#body").right],
  order: ["#picks", "#body", "#speed", "#length"].map(id => box(id).top),
  clipped: points.filter(p => p.top < box("#length svg").top || p.bottom > box("#length svg").bottom).length,
  mode: document.getElementById("mode"),
};
document.body.dataset.seen = JSON.stringify(seen);
</script></body>"""


def visit(tmp_path: Path, result: Comparison, width: int) -> tuple[str, dict[str, Any]]:
    """The page's elements once its script has run, and what `VISIT` saw."""
    page = tmp_path / "page.html"
    page.write_text(result.to_html().replace("</body>", VISIT), encoding="utf-8")
    command = [*headless_browser(tmp_path / "profile"), f"--window-size={width},900", "--virtual-time-budget=2000"]
    command += ["--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=True)
    found = re.search(r'data-seen="(.*?)"', done.stdout)
    assert found is not None
    return done.stdout, json.loads(html.unescape(found[1]))


def rows_of(dom: str) -> list[tuple[str, str]]:
    return re.findall(r"<tr(.*?)>(.*?)</tr>", dom.split('<tbody id="body">')[1].split("</tbody>")[0])


def test_the_page_in_a_real_browser(tmp_path: Path) -> None:
    dom, seen = visit(tmp_path, RESULT, 1280)
    assert seen["window"] == 1280
    assert seen["order"] == sorted(seen["order"])  # the table before the charts
    assert 0 <= seen["table"][0] < seen["table"][1] <= 1280  # and whole
    assert seen["page"] <= 1280
    assert (seen["mode"], seen["clipped"]) == (None, 0)
    tips = [part.split("</figure>")[0] for part in dom.split('class="tip"')[1:]]
    assert len(tips) == 2
    assert "visibility: visible" in tips[1]
    assert "<b>4,000 tokens</b>" in tips[1]
    assert "accepted length, greedy: 2.80" in tips[1]
    assert "<b>1,000 tokens</b>" in tips[0]
    assert "tokens/s, greedy: 24.44" in tips[0]
    assert "plain decoding, greedy: 10.00" in tips[0]
    assert "<li>4,000: accepted length 2.80" in dom
    assert dom.count("recommended (greedy)") == 2
    assert "at most 24 new tokens." in dom
    rows = rows_of(dom)
    assert [cells.split("</td>")[0].split(">")[-1] for _, cells in rows] == [PLAIN, *SPEEDS]
    assert [cells.count(">all</td>") for _, cells in rows] == [1] * 4
    assert [cells.split("</td>")[0].split(">")[-1] for given, cells in rows if 'class="advice"' in given] == ["4,000"]
