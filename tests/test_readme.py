"""What README.md prints, run as printed and in order; of all pages links and names; help of all options."""

import ast
import builtins
import inspect
import os
import re
import subprocess
import sys
import sysconfig
from functools import partial
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path

import click
import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *ROOT.glob("*/FORMAT.md"), *ROOT.glob("benchmarks/*.md")]
BLOCK = re.compile(r"^(<!-- not run by the tests: [^\n]*-->\n)?```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks() -> list[tuple[str, str]]:
    """(language, text) of every block but those that install packages, or take a head and a target of the reader's."""
    found = [(match[2], match[3]) for match in BLOCK.finditer((ROOT / "README.md").read_text("utf-8"))]
    return [(language, text) for language, text in found if not text.startswith(("pip ", "eagle-convert HEAD "))]


@pytest.mark.slow
def test_readme(tmp_path: Path) -> None:
    printed = []
    for language, text in blocks():
        program = {"bash": ["bash", "-e", "-u", "-o", "pipefail", "-c"], "python": [sys.executable, "-c"]}[language]
        env = {**os.environ, "PYTHONUTF8": "1", "PATH": f"{sysconfig.get_path('scripts')}:{os.environ['PATH']}"}
        run = partial(subprocess.run, cwd=tmp_path, env=env, capture_output=True, encoding="utf-8", timeout=1800)
        done = run([*program, text])
        assert done.returncode == 0, done.stderr
        printed.append(done)
    shell, python = printed
    told = [line[2:] for line in dict(blocks())["bash"].splitlines() if line.startswith("# ")]
    assert len(told) == 4
    length = re.compile(r"([\d.]+) tokens per target pass")
    for line in told:
        if stated := length.match(line):
            # By the last bits of one processor.
            found = length.search(shell.stderr)
            assert found is not None
            assert float(found[1]) == pytest.approx(float(stated[1]), abs=0.2)
        else:
            assert line in shell.stdout + shell.stderr
    # Sampled, in bfloat16.
    assert float(python.stdout.splitlines()[-1].split()[-1]) > 1.2
    assert [path.name for path in tmp_path.iterdir()] == ["slim"]


def test_contributing_is_short_and_its_glossary_too() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    assert len(page.split()) <= 1300
    glossary = page.split("\n## Glossary\n", 1)[1].split("\n## ", 1)[0]
    assert len(re.findall(r"^\* \*\*", glossary, re.MULTILINE)) <= 12


def anchors(path: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    prose = re.sub(r"```.*?```", "", path.read_text("utf-8"), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", sorted(path.relative_to(ROOT).as_posix() for path in PAGES))
def test_links_lead_somewhere(page: str) -> None:
    path = ROOT / page
    for link in re.findall(r"\]\(([^)\s]+)\)", path.read_text("utf-8")):
        if "://" not in link:
            name, _, anchor = link.partition("#")
            linked = (path.parent / name) if name else path
            assert linked.exists(), link
            assert not anchor or anchor in anchors(linked), link


def test_pages_import_names_that_exist() -> None:
    texts = [block[2] for page in PAGES for block in BLOCK.findall(page.read_text("utf-8")) if block[1] == "python"]
    lines = [node for text in texts for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)]
    ours = [(str(line.module), each.name) for line in lines for each in line.names if "eagle_slim" in str(line.module)]
    assert len(ours) > 10
    assert [(module, name) for module, name in ours if not hasattr(import_module(module), name)] == []


def test_errors_that_docstrings_and_pages_name_are_public() -> None:
    known = set(dir(builtins))
    for package in map(import_module, ("eagle_slim.vocab_tools", "eagle_slim.convert", "eagle_slim.runtime")):
        known |= set(package.__all__)
        for name in set(package.__all__) - {"compare"}:
            members = [value for key, value in inspect.getmembers(getattr(package, name)) if key[0] != "_"]
            told = " ".join(inspect.getdoc(each) or "" for each in (getattr(package, name), *members))
            assert set(re.findall(r"\b[A-Z]\w+(?:Error|Warning)\b", told)) <= known, name
    docs = [page.read_text("utf-8") for page in PAGES if page.name != "CHANGELOG.md"]
    assert set(re.findall(r"`(\w+Error)`", "".join(docs))) <= known


def test_every_option_of_every_command_is_explained() -> None:
    scripts = [each for each in entry_points(group="console_scripts") if each.value.startswith("eagle_slim.")]
    names = [name for script in scripts for name in vars(import_module(script.module)).values()]
    groups = [each for each in names if isinstance(each, click.Command)]
    commands = [command for each in groups for command in (each, *getattr(each, "commands", {}).values())]
    options = [option for command in commands for option in command.params if isinstance(option, click.Option)]
    assert len(options) > 100
    assert [option.opts for option in options if not option.help] == []
