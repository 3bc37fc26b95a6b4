"""Committed results: each is cited or read, and says what it was measured on and at which commit of the history."""

import json

import pytest
from support.programs import ROOT, unknown_commits

RESULTS = sorted((ROOT / "benchmarks" / "results").iterdir())


def machines(value):
    if isinstance(value, dict):
        yield from [value["machine"]] if "machine" in value else []
        value = list(value.values())
    for part in value if isinstance(value, list) else []:
        yield from machines(part)


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.name)
def test_results(path):
    readers = ("*.md", "docs/*.md", "benchmarks/**/*.py", "tests/kernels/*.py")
    assert any(path.name in page.read_text("utf-8") for pattern in readers for page in ROOT.glob(pattern))
    result = json.loads(path.read_text("utf-8"))
    # Engines are started by other scripts: their file says once what all ran on, and of each start the commit.
    found = [result["versions"] | result | start for start in result.get("starts", [])] or list(machines(result))
    versions = {"torch", "vllm", "sglang"} if "starts" in result else {"torch", "triton"}
    assert found
    assert all({"device", "commit"} | versions <= set(each) for each in found)
    assert unknown_commits({str(each["commit"]) for each in found}) == []


def test_the_newest_of_each_question_is_kept():
    assert len(RESULTS) <= 16
