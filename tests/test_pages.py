"""README.md and docs/: what they may weigh, and that every figure of README is the one that was measured.

A figure of README links to a section of docs/measurements.md. There a line `In README: **NUMBER**: FIELD of ROW` names
the rows of the section's results that prove it, by values that they and what they lie in have.
"""

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text("utf-8")
MEASUREMENTS = "docs/measurements.md"
NUMBER = r"\d[\d,]*(?:\.\d+)?"
PROOF = re.compile(rf"\*\*({NUMBER})\*\*: `(\w+)` of\s+`([^`]+)`(?:\s+over\s+`([^`]+)`)?")


def shown(text: str) -> list[str]:
    """The lines of a page, without the targets of their links."""
    return re.sub(r"\]\([^)]*\)", "]", text).splitlines()


def code(text: str) -> str:
    return "".join(re.findall(r"^```\w*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))


def prose(text: str) -> str:
    """A page without its blocks, code spans and links' targets."""
    without = re.sub(r"^```\w*\n.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`]*`", "", without))


def test_readme_is_read_in_a_minute() -> None:
    lines = README.splitlines()
    assert len(lines) <= 75
    assert max(map(len, shown(README))) <= 140
    first = {
        line.split()[0]: number for number, line in reversed(list(enumerate(lines, 1))) if line in code(README) and line
    }
    assert first["pip"] <= 20
    assert first["eagle-convert"] <= 28
    rows = README.split("## Do you gain?")[1].split("\n\n")[0].splitlines()[3:]
    assert len(rows) <= 6
    assert any("nothing" in row for row in rows)


def test_readme_has_neither_dates_nor_commits_nor_footnotes() -> None:
    months = "January|February|March|April|May|June|July|August|September|October|November|December"
    found = re.findall(rf"\b20\d\d\b|\b(?:{months})\b|\b(?=[0-9a-f]*\d)[0-9a-f]{{7,40}}\b|[†‡¹²³]|\\\*", prose(README))
    assert found == []


def test_docs_are_no_longer_than_they_may_be() -> None:
    pages = sorted((ROOT / "docs").rglob("*.md"))
    assert sum(len(page.read_text("utf-8").splitlines()) for page in pages) <= 1250
    long = [
        f"{page.name}:{at}"
        for page in pages
        for at, line in enumerate(shown(page.read_text("utf-8")), 1)
        if len(line) > 150
    ]
    assert long == []


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text("utf-8")
    pages = {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert pages <= set(re.findall(r"\]\(([\w-]+\.md)", index))
    assert len(index.splitlines()) <= 40


def test_pages_that_code_names_exist() -> None:
    folders = ("convert", "runtime", "vocab_tools", "benchmarks", "examples", "tests")
    sources = [path.read_text("utf-8") for folder in folders for path in (ROOT / folder).rglob("*.py")]
    named = {name for text in sources for name in re.findall(r"docs/[\w-]+\.md", text)}
    assert len(named) > 4
    assert [name for name in sorted(named) if not (ROOT / name).is_file()] == []


def figures() -> list[tuple[str, str, str]]:
    """(number, what follows it, anchor) of every figure of README that links to a measurement."""
    links = re.findall(rf"\[([^\]]*)\]\({re.escape(MEASUREMENTS)}#([\w-]+)\)", README)
    return [(*found, anchor) for text, anchor in links for found in re.findall(rf"({NUMBER})\s?(%?)", text)]


def test_every_figure_of_readme_links_to_a_measurement() -> None:
    unlinked = re.sub(rf"\[[^\]]*\]\({re.escape(MEASUREMENTS)}#[^)]*\)", "", README)
    assert re.findall(rf"{NUMBER}\s?(?:×|%|times\b|ms\b|s\b|seconds?\b|tokens/s)", prose(unlinked)) == []
    assert re.findall(r"(?<!Python )(?<!to )(?<![\w.-])\d+\.\d+", prose(unlinked)) == []
    assert len(figures()) >= 7


def test_figures_of_other_pages_are_in_the_sections_that_they_link_to() -> None:
    page = (ROOT / MEASUREMENTS).read_text("utf-8")
    missing = [
        (path.name, number, anchor)
        for path in (ROOT / "docs").glob("*.md")
        for text, anchor in re.findall(r"\[([^\]]*)\]\(measurements\.md#([\w-]+)\)", path.read_text("utf-8"))
        for number in re.findall(NUMBER, text)
        if not re.search(rf"(?<![\d.,]){re.escape(number)}(?!\d|[.,]\d)", section(page, anchor))
    ]
    assert missing == []


def section(page: str, anchor: str) -> str:
    parts = re.split(r"^## ", page, flags=re.MULTILINE)[1:]
    (found,) = (
        part for part in parts if re.sub(r"[^\w\- ]", "", part.split("\n")[0].lower()).replace(" ", "-") == anchor
    )
    return found


def rows(value: Any, around: dict[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Every object of a result, and with it what is said beside the lists and objects that it lies in, machines too."""
    if isinstance(value, dict):
        plain = {name: each for name, each in value.items() if not isinstance(each, dict | list)}
        around = around | value.get("machine", {}) | plain
        yield plain, around
        for name, each in value.items():
            yield from rows(each, around | {"key": name})
    elif isinstance(value, list):
        for each in value:
            yield from rows(each, around)


@cache
def result(path: Path) -> Any:
    return json.loads(path.read_text("utf-8"))


def meets(own: dict[str, Any], row: dict[str, Any], wanted: list[list[str]]) -> bool:
    """Whether a row has all values, one of them of its own; of a commit the beginning."""
    found = [(str(row.get(name))[: len(value) if name == "commit" else None], value) for name, value in wanted]
    return all(each == value for each, value in found) and any(name in own or name == "key" for name, _ in wanted)


def proven(text: str, field: str, conditions: str) -> float:
    """The one value that a field has in the rows, of the results that a section links to, which meet conditions."""
    found = set()
    for name in re.findall(r"\]\(\.\./(benchmarks/results/[\w.-]+\.json)\)", text):
        whole = result(ROOT / name)
        if conditions == "the file":
            found |= {whole[field]} if field in whole else set()
        else:
            wanted = [" ".join(each.split()).split("=", 1) for each in conditions.split(",")]
            found |= {own[field] for own, row in rows(whole, {}) if field in own and meets(own, row, wanted)}
    assert len(found) == 1, (field, conditions, found)
    return float(found.pop())


def check_figure(number: str, unit: str, text: str) -> None:
    """Raise where a section's results do not have a number, rounded as it is printed."""
    (proof,) = (match for match in PROOF.finditer(text) if match[1] == number)
    _, field, conditions, others = proof.groups()
    value = proven(text, field, conditions)
    if others is not None:
        value /= proven(text, field, others)
        value = (value - 1) * 100 if unit else value
    places = len(number.partition(".")[2])
    assert round(value, places) == float(number.replace(",", ""))
    # The reader finds it there too.
    assert re.search(rf"(?<![\d.,]){re.escape(number)}(?!\d|[.,]\d)", text.replace(proof[0], ""))


@pytest.mark.parametrize(("number", "unit", "anchor"), figures())
def test_the_linked_result_has_a_figure_of_readme(number: str, unit: str, anchor: str) -> None:
    text = section((ROOT / MEASUREMENTS).read_text("utf-8"), anchor)
    check_figure(number, unit, text)
    # Another number, or a proof from another row, would be seen.
    wrong = re.sub(r"\d", lambda digit: str((int(digit[0]) + 1) % 10), number)
    with pytest.raises(AssertionError):
        check_figure(wrong, unit, text.replace(f"**{number}**", f"**{wrong}**"))
