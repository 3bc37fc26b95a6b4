"""Who may import what, read from the source itself.

Data flows vocab_tools → convert → runtime, and nothing imports against it; inside each package the folders stand on
floors, and nothing imports upwards. Benchmarks may import all of it, and nothing imports them but tests. Each library
that reaches outside the process is known in one place, so that the other modules run without it. Command-line modules
are imported by no module but another of their kind.
"""

import ast
import graphlib
import re
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# A package may import itself and what stands before it.
PACKAGES = ("vocab_tools", "convert", "runtime")
OTHERS = ("benchmarks", "examples", "tests")
# The folders and files at the top of each package, from the bottom floor up: one may import what stands before the last
# `<` before it, and nothing of its own floor. A file that stands higher than its folder is named with it.
ORDER = {
    "vocab_tools": """
        errors compat < messages < hub < files < common_cli < target < tokenizer < chats encoding < forced records
        < counts sources < workers < ray_workers < counting vocabulary < count_cli < floors token_maps < ranking
        < coverage < show < cli
    """,
    "convert": """
        errors default < atomic names < artifact < rows < sources < heads < engines targets < slim
        < verify vocabulary_choice < options < pipeline < cli removed_cli verify_cli
    """,
    "runtime": """
        errors < compiling/kernels < compiling < ops settings < tree < target/fp8 < target/mxfp4
        < target/kernels < target < drafter/kernels < drafter < drafter/tuning
        < api < opening < step/kernels < step < model < compare options_cli serve < safeailab
        < compare/cli generate_cli serve/cli tune
    """,
}
FLOORS = {package: [floor.split() for floor in order.split("<")] for package, order in ORDER.items()}
NAMES = {package: [name for floor in floors for name in floor] for package, floors in FLOORS.items()}
# Library → pattern of the only files, relative to the root, that may import it.
ONLY_IN = {
    "click": r".*cli\.py|runtime/tune\.py",
    "datasets": r"vocab_tools/sources\.py",
    "huggingface_hub": r"convert/rows/hub_tensor\.py|vocab_tools/(compat|hub)\.py",
    "triton": r"runtime/.*/kernels/.*",
}


def files() -> list[Path]:
    return sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


@cache
def imported(path: Path) -> list[tuple[int, str]]:
    """(line, absolute dotted name) of every module that a file imports, wherever in the file."""
    found = []
    package = ["eagle_slim", *path.relative_to(ROOT).parent.parts]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                found.append((node.lineno, alias.name))
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            found.append((node.lineno, module))
            # `from . import x` and `from eagle_slim import convert` name modules after the word import.
            for alias in node.names:
                found.append((node.lineno, f"{module}.{alias.name}"))
    return found


def refuse(paths: Iterable[Path], is_wrong: Callable[[Path, list[str]], bool]) -> None:
    """Fail if a file imports a name, given by its parts, that it must not."""
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in paths
        for line, name in imported(path)
        if is_wrong(path, name.split("."))
    ]
    assert wrong == []


def all_files() -> list[Path]:
    return [*files(), *(path for folder in OTHERS for path in sorted((ROOT / folder).rglob("*.py")))]


def test_packages_import_in_one_direction() -> None:
    def is_wrong(path: Path, name: list[str]) -> bool:
        above = PACKAGES[PACKAGES.index(path.relative_to(ROOT).parts[0]) + 1 :]
        return name[0] == "eagle_slim" and not {*above}.isdisjoint(name[1:2])

    refuse(files(), is_wrong)


def room(package: str, parts: tuple[str, ...]) -> str:
    """Where in the table a module stands, by its names below the package: the file's own place, or its folder's."""
    own = "/".join(parts[:2])
    return own if own in NAMES[package] else parts[0]


def below(package: str, path: Path) -> tuple[str, ...]:
    return path.relative_to(ROOT / package).with_suffix("").parts


@pytest.mark.parametrize("package", PACKAGES)
def test_every_folder_and_file_has_a_floor(package: str) -> None:
    there = {room(package, below(package, path)) for path in (ROOT / package).rglob("*.py")}
    assert sorted(NAMES[package]) == sorted(there - {"__init__"})


@pytest.mark.parametrize("package", PACKAGES)
def test_contributing_tells_the_floors(package: str) -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    rows = page.split(f"\n### `{package}/`\n\n", 1)[1].split("\n\n", 1)[0]
    named = [name for row in rows.splitlines() for name in re.findall(r"`([^`]+)`", row.partition(": ")[0])]
    commands = re.compile(r".*cli(\.py)?|errors(\.py)?")
    floors = [name for name in NAMES[package] if not commands.fullmatch(name)]
    told = [name.removesuffix("/").removesuffix(".py") for name in named if not commands.fullmatch(name)]
    assert sorted(told) == sorted(floors)


@pytest.mark.parametrize("package", PACKAGES)
def test_nothing_imports_upwards(package: str) -> None:
    height = {name: floor for floor, names in enumerate(FLOORS[package]) for name in names}
    height["__init__"] = len(FLOORS[package])

    def is_wrong(path: Path, name: list[str]) -> bool:
        here = room(package, below(package, path))
        there = room(package, tuple(name[2:])) if name[:2] == ["eagle_slim", package] and name[2:] else here
        return there != here and there in height and height[here] <= height[there]

    refuse(sorted((ROOT / package).rglob("*.py")), is_wrong)


def test_no_imports_run_in_a_circle() -> None:
    modules = {".".join(["eagle_slim", *path.relative_to(ROOT).with_suffix("").parts]): path for path in files()}
    graph = {module: {name for _, name in imported(path)} & set(modules) for module, path in modules.items()}
    graphlib.TopologicalSorter(graph).prepare()


@pytest.mark.parametrize("library", ONLY_IN)
def test_each_library_is_known_in_one_place(library: str) -> None:
    places = {
        path.relative_to(ROOT).as_posix()
        for path in files()
        for _, name in imported(path)
        if name.split(".")[0] == library
    }
    assert places, f"nothing imports {library} any more: take it off the list"
    assert [place for place in sorted(places) if not re.fullmatch(ONLY_IN[library], place)] == []


def test_nothing_imports_a_command_line_but_another() -> None:
    ordinary = [path for path in files() if not re.search(ONLY_IN["click"], path.as_posix())]
    refuse(ordinary, lambda _, name: name[0] == "eagle_slim" and name[-1].endswith("cli"))


def test_nothing_imports_the_benchmarks_but_tests() -> None:
    """Tests import what benchmarks share; a script is for its own tests alone, and no script imports another."""
    scripts = {path.stem for path in (ROOT / "benchmarks").glob("*.py")}
    own = ROOT / "tests" / "benchmarks"
    refuse(files(), lambda _, name: name[0] == "benchmarks")
    refuse(
        (path for path in (ROOT / "tests").rglob("*.py") if not path.is_relative_to(own)),
        lambda _, name: name[0] == "benchmarks" and name[1:2] not in ([], ["shared"]),
    )
    refuse(
        (ROOT / "benchmarks").rglob("*.py"),
        lambda _, name: name[0] == "benchmarks" and not scripts.isdisjoint(name[1:2]),
    )


def test_installed_names_are_ours_alone() -> None:
    """Generic names such as `convert` are installed under `eagle_slim` only, so nothing may import them bare."""
    refuse(all_files(), lambda _, name: name[0] in PACKAGES)
