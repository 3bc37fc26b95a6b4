"""Comparison of draft vocabularies: prompts, figures, recommendation, and the page in a real browser."""

from __future__ import annotations

import csv
import io
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from eagle_slim.runtime import SpeculativeModel
from eagle_slim.runtime.comparison.compare import (
    ALL,
    PLAIN,
    CompareReport,
    CoverageCurve,
    Mode,
    Row,
    Size,
    answer_coverage,
    compare,
    num_answers,
)
from eagle_slim.runtime.comparison.output import csv_text, html_page, png_bytes, report_to_json, text_table
from eagle_slim.runtime.comparison.prompt_file import Prompt, load_prompts
from eagle_slim.runtime.comparison.recommend import recommend
from eagle_slim.runtime.errors import PromptError, PromptFileError, UsageError
from eagle_slim.runtime.generation.stats import GenerationStats
from eagle_slim.vocab_tools.vocabulary.draft_vocab import DraftVocab
from support.raising import raises
from support.tiny_models import write_pair

pytestmark = pytest.mark.filterwarnings("ignore::eagle_slim.runtime.errors.AcceptanceWarning")


class TestPrompts:
    def test_turns_and_categories(self, tmp_path: Path) -> None:
        path = tmp_path / "question.jsonl"
        lines = [{"question_id": 81, "category": "writing", "turns": ["One?", "Two?"]}, {"turns": "Alone?"}]
        path.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
        assert load_prompts(path) == [Prompt(("One?", "Two?"), "writing"), Prompt(("Alone?",), "all prompts")]
        assert load_prompts(path, limit=1) == [Prompt(("One?", "Two?"), "writing")]

    def test_plain_text(self, tmp_path: Path) -> None:
        path = tmp_path / "prompts.txt"
        path.write_text("Why is the sky blue?\n\n  [1, 2] is a list  \n")
        assert load_prompts(path) == [Prompt(("Why is the sky blue?",)), Prompt(("[1, 2] is a list",))]

    def test_a_json_list(self, tmp_path: Path) -> None:
        path = tmp_path / "prompts.json"
        path.write_text(json.dumps([{"turns": ["One?"], "category": "a"}, {"turns": "Two?"}], indent=1))
        assert load_prompts(path) == [Prompt(("One?",), "a"), Prompt(("Two?",))]
        path.write_text("[INST] One? [/INST]\n[Two?]\n")
        assert load_prompts(path) == [Prompt(("[INST] One? [/INST]",)), Prompt(("[Two?]",))]

    @pytest.mark.parametrize("line", ['["Why is the sky blue?"]', "[1]", "[" * 100_000, f"[{'1' * 5000}]"], ids=len)
    def test_text_that_looks_like_a_list(self, tmp_path: Path, line: str) -> None:
        path = tmp_path / "prompts.txt"
        path.write_text(line + "\n")
        assert load_prompts(path) == [Prompt((line,))]

    def test_byte_order_mark_and_odd_line_ends(self, tmp_path: Path) -> None:
        path = tmp_path / "prompts.jsonl"
        path.write_bytes(b"\xef\xbb\xbf" + '{"turns": ["a\u2028b"]}\r\n{"turns": ["c\x85"]}\r\n'.encode())
        assert load_prompts(path) == [Prompt(("a\u2028b",)), Prompt(("c\x85",))]

    @pytest.mark.parametrize(
        ("text", "facts"),
        [("", {"prompts": 0}), ('{"turns": ["a"]}\n{"turns": 3}', {"line": 2}),
         ('{"turns": ["a"]}\nplain', {"line": 2}), ('{"turns": ' + "[" * 100_000, {"line": 1}),
         ('[{"turns": ["a"]}, "b"]', {"item": 2}), ('{"turns": []}', {"line": 1}), ('{"turns": [" "]}', {"line": 1})],
    )  # fmt: skip
    def test_bad_files(self, tmp_path: Path, text: str, facts: dict[str, int]) -> None:
        path = tmp_path / "bad.jsonl"
        path.write_text(text)
        with raises(PromptFileError, path=str(path), **facts):
            load_prompts(path)
        with raises(PromptFileError, path=str(tmp_path / "missing")):
            load_prompts(tmp_path / "missing")


def test_coverage_of_answers() -> None:
    ranked = np.concatenate([[500, 3], np.setdiff1d(np.arange(600), [500, 3])])
    curve = answer_coverage(ranked[:100], [500, 3, 599, 3])
    assert (curve.sizes[0], curve.sizes[-1]) == (64, 100)
    assert set(curve.covered) == {0.75}
    late = answer_coverage(ranked, [500, int(ranked[299]), int(ranked[299]), int(ranked[599])])
    assert all(share == 0.25 for size, share in zip(late.sizes, late.covered, strict=True) if size < 300)
    assert all(share == 0.75 for size, share in zip(late.sizes, late.covered, strict=True) if 300 <= size < 600)
    assert late.covered[-1] == 1.0


def made_up(speeds: dict[str, tuple[int, float, float]], plain_s: float = 0.10, spread: float = 0.0) -> CompareReport:
    """A report of 100 passes per size: label to (draft vocabulary, accepted length, seconds per pass)."""
    rows = []
    for label, (rows_used, length, seconds) in {PLAIN: (0, 1.0, plain_s), **speeds}.items():
        stats = GenerationStats(
            {1: 100} if length == 1 else {2: round(100 * (3 - length)), 3: round(100 * (length - 2))},
            num_new_tokens=round(100 * length), draft_s=seconds * 20, verify_s=seconds * 70, total_s=seconds * 100,
        )  # fmt: skip
        times = (seconds * (1 - spread), seconds * (1 + spread))
        rows += [Row(label, rows_used, "greedy", c, 4, 4, stats, times) for c in (ALL, "math")]
    curve = CoverageCurve("these answers", (1000, 4000, 9000), (0.8, 0.95, 1.0))
    setup = {
        "target": "T", "head": "</script><b>H", "target_vocab": 9000, "device": "D", "dtype": "float32",
        "drafter": "reference", "depth": 3, "top_k": 4, "total_tokens": 25, "num_prompts": 4, "num_turns": 4,
        "max_new_tokens": 24, "repeats": 2, "versions": {},
    }  # fmt: skip
    return CompareReport(tuple(rows), (curve,), setup)


class TestRecommendation:
    def test_the_fastest(self) -> None:
        report = made_up({"full": (9000, 2.9, 0.15), "4000": (4000, 2.8, 0.10), "1000": (1000, 2.2, 0.09)})
        advice = recommend(report)
        assert (advice.size, advice.draft_vocab, advice.beats_plain) == ("4000", 4000, True)
        text = " ".join(advice.reasons)
        assert "2.80 tokens per pass at 100.0 ms" in text
        assert "28.0 tokens/s" in text
        assert "45% faster" in text  # 28.0 against 19.3 of the full vocabulary
        assert "180% faster" in text  # against 10.0 of plain decoding

    def test_the_largest_of_those_that_noise_cannot_tell_apart(self) -> None:
        sizes = {"full": (9000, 2.9, 0.15), "4000": (4000, 2.8, 0.101), "1000": (1000, 2.8, 0.100)}
        assert recommend(made_up(sizes)).size == "4000"
        assert recommend(made_up({**sizes, "4000": (4000, 2.8, 0.105)})).size == "1000"
        # Repeats that differ by 10% widen what counts as the same.
        assert recommend(made_up({**sizes, "4000": (4000, 2.8, 0.105)}, spread=0.10)).size == "4000"

    def test_plain_decoding_may_be_faster_and_is_said_to_be(self) -> None:
        advice = recommend(made_up({"full": (9000, 2.5, 0.5), "1000": (1000, 2.4, 0.4)}))
        assert (advice.size, advice.beats_plain) == ("1000", False)
        assert "plain decoding is faster" in advice.headline
        assert any("40% slower" in reason for reason in advice.reasons)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> SpeculativeModel:
    target, head = write_pair(tmp_path_factory.mktemp("pair"))
    return SpeculativeModel.from_pretrained(target, head, depth=2, top_k=8, total_tokens=40)


def test_a_comparison_measures_what_generate_gives(model: SpeculativeModel) -> None:
    vocab = model.target.text_config.vocab_size
    order = np.random.default_rng(0).permutation(vocab)
    sizes = [Size("full", None), Size("100", DraftVocab(order[:100], 0, vocab))]
    prompts = [Prompt(("one two", "three"), "talk"), Prompt(("four",), "math")]
    modes = [Mode("greedy"), Mode("sampled", {"temperature": 1.0, "seed": 1})]
    steps: list[None] = []
    report = compare(model, sizes, prompts, modes, 10, repeats=2, rank_order=order, advance=lambda: steps.append(None))
    assert len(steps) == num_answers(sizes, prompts, modes, 2) == 36
    assert [(r.size, r.category) for r in report.rows if r.mode == "greedy"] == [
        (size, category) for category in (ALL, "talk", "math") for size in (PLAIN, "full", "100")
    ]
    assert all(row.num_identical == row.num_answers for row in report.rows)
    assert report.find("full", "greedy", "talk").num_answers == 4
    assert report.find("100", "greedy").draft_vocab == 100
    assert report.find(PLAIN, "sampled").stats.mean_accepted_length == 1.0
    # A conversation's second turn follows its first answer.
    first = model.generate(model.encode_chat("one two"), max_new_tokens=10)
    talk = [{"role": "user", "content": "one two"}, {"role": "assistant", "content": first.text[0] or ""}]
    second = model.generate(model.encode_chat([*talk, {"role": "user", "content": "three"}]), max_new_tokens=10)
    expected = GenerationStats.sum([first.stats, second.stats, first.stats, second.stats])
    assert report.find("full", "greedy", "talk").stats.accepted_lengths == expected.accepted_lengths
    assert len(report.find("full", "greedy").per_pass_s) == 2
    assert recommend(report).size in ("full", "100")


def test_a_category_called_all_has_rows_of_its_own(model: SpeculativeModel) -> None:
    prompts = [Prompt(("one",), ALL), Prompt(("two",), "other")]
    report = compare(model, [Size("full", None)], prompts, [Mode("greedy")], 4)
    answers = {(row.size, row.category): row.num_answers for row in report.rows}
    assert {category: answers["full", category] for _, category in answers} == {ALL: 2, "all (category)": 1, "other": 1}
    assert len(answers) == len(report.rows)


def test_a_prompt_without_room_is_refused_before_anything_is_measured(model: SpeculativeModel) -> None:
    prompts = [Prompt(("one",)), Prompt(("two",)), Prompt(("x " * 300,))]
    with raises(PromptError, prompt=2):
        compare(model, [Size("full", None)], prompts, [Mode("greedy")], 4, advance=lambda: pytest.fail("measured"))


def test_a_later_turn_without_room_is_named(model: SpeculativeModel) -> None:
    prompts = [Prompt(("one",)), Prompt(("two", "x " * 300))]
    with pytest.raises(PromptError, match=r"Turn 2 of prompt 1, with the conversation before it, has .* no room"):
        compare(model, [Size("full", None)], prompts, [Mode("greedy")], 4)


def test_nothing_to_compare(model: SpeculativeModel) -> None:
    prompt = [Prompt(("x",))]
    with raises(UsageError, sizes=0, prompts=1, modes=1):
        compare(model, [], prompt, [Mode("greedy")], 4)
    with raises(UsageError, found=["full", "full"]):
        compare(model, [Size("full", None), Size("full", None)], prompt, [Mode("greedy")], 4)


REPORT = made_up({"full": (9000, 2.9, 0.15), "4000": (4000, 2.8, 0.10), "1000": (1000, 2.2, 0.09)})


def test_table_csv_and_json_hold_the_same_figures() -> None:
    table = text_table(REPORT).splitlines()
    assert table[0].split() == [
        "size", "mode", "category", "accepted", "tokens/s", "ms/pass", "draft", "verify", "host", "passes", "exact",
    ]  # fmt: skip
    assert table[3].split() == [
        "full",
        "greedy",
        "all",
        "2.900",
        "19.3",
        "150.0",
        "30.0",
        "105.0",
        "15.0",
        "100",
        "4/4",
    ]
    rows = list(csv.DictReader(io.StringIO(csv_text(REPORT))))
    data = report_to_json(REPORT, recommend(REPORT))
    assert len(rows) == len(data["rows"]) == len(table) - 1 == 8
    for line, row in zip(rows, data["rows"], strict=True):
        for key, value in row.items():
            if key != "accepted_lengths":
                assert line[key] == str(value)
    assert rows[2]["accepted_lengths"] == "2:10 3:90"
    assert data["coverage"][0]["covered"] == [0.8, 0.95, 1.0]
    json.dumps(data, allow_nan=False)


def test_the_picture_depends_on_the_figures_only() -> None:
    first = png_bytes(REPORT, recommend(REPORT))
    assert first[:8] == b"\x89PNG\r\n\x1a\n"
    assert png_bytes(REPORT, recommend(REPORT)) == first
    other = made_up({"full": (9000, 2.9, 0.15), "4000": (4000, 2.7, 0.10), "1000": (1000, 2.2, 0.09)})
    assert png_bytes(other, recommend(other)) != first


def test_the_page_fetches_nothing_and_cannot_be_broken_out_of() -> None:
    page = html_page(REPORT, recommend(REPORT))
    for reference in ("src=", "href=", "@import", "url(", "fetch(", "import("):
        assert reference not in page
    assert "</script><b>H" not in page
    assert page.count("</script>") == 1


# Moves the mouse over the middle of the first chart and focuses a point of the second; the tooltips are in the dump.
HOVER = """<script>
const svg = document.querySelector("#length svg"), box = svg.getBoundingClientRect();
const at = { clientX: box.left + box.width * 0.62, clientY: box.top + 80, bubbles: true };
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
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    dom = done.stdout
    tips = [part.split("</figure>")[0] for part in dom.split('class="tip"')[1:]]
    assert len(tips) == 2
    assert "visibility: visible" in tips[0]
    assert "4,000 tokens" in tips[0]
    assert "tokens per pass, greedy: 2.80" in tips[0]
    assert "coverage, these answers: 95.00%" in tips[0]
    assert "1,000 tokens" in tips[1]
    assert "tokens/s, greedy: 24.44" in tips[1]
    assert "plain decoding, greedy: 10.00" in tips[1]
    assert "<li>Greedy, 4000: 2.80 tokens per pass" in dom
    body = dom.split('<tbody id="body">')[1].split("</tbody>")[0]
    assert body.count("<tr>") == 4
    assert body.count("<td>math</td>") == 4


def test_setup_names_the_pair(model: SpeculativeModel) -> None:
    modes = [Mode("greedy"), Mode("sampled", {"temperature": 0.7, "seed": 3})]
    report = compare(model, [Size("full", None)], [Prompt(("x",))], modes, 4)
    setup: dict[str, Any] = report.setup
    assert setup["modes"] == {"greedy": {}, "sampled": {"temperature": 0.7, "seed": 3}}
    assert setup["dtype"] == "float32"
    assert (setup["depth"], setup["top_k"], setup["total_tokens"]) == (2, 8, 40)
    assert report.curves == ()
