"""What a built wheel holds, and that it runs where nothing of the checkout is in reach."""

import json
import os
import re
import shlex
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("convert", "runtime", "vocab_tools")
HEAVY = {"torch", "transformers", "datasets", "huggingface_hub", "triton", "tokenizers", "pyarrow"}


def files_of(folder: Path) -> set[str]:
    """Paths of all files of the three packages below a folder, without what Python compiles."""
    found = (path for package in PACKAGES for path in (folder / package).rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix() for path in found if path.suffix != ".pyc"}


def python(installed: Path, *arguments: str) -> str:
    """Run the environment's own interpreter somewhere else; its standard output."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    command, cwd = [str(installed.parents[3] / "bin" / "python"), *arguments], installed.parents[3]
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder `eagle_slim` of an environment that holds the wheel, and sees our dependencies but not the checkout.

    The wheel is built aside, as setuptools also packs what an earlier build left in the folder `build`.
    """
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    source.mkdir()
    for name in (*PACKAGES, "docs", "pyproject.toml", "setup.py", "README.md", "LICENSE"):
        (source / name).symlink_to(ROOT / name)
    build = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", build, str(folder)], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("*.whl")
    venv.create(folder / "env", symlinks=True)
    (site_packages,) = (folder / "env" / "lib").glob("python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site_packages)
    dependencies = [path for path in sys.path if path.endswith("site-packages")]
    # Python 3.11 reads this file in the locale's encoding.
    (site_packages / "dependencies.pth").write_text(f"import sys; sys.path += {dependencies!a}")
    return site_packages / "eagle_slim"


def test_every_file_of_the_packages_is_in_the_wheel(installed: Path) -> None:
    assert sorted(files_of(ROOT) ^ files_of(installed)) == []


def test_the_pages_that_messages_name_are_in_the_wheel(installed: Path) -> None:
    sources = [path.read_text("utf-8") for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    named = {name for text in sources for name in re.findall(r"\bpage\(.([\w/]+\.md)", text)}
    assert len(named) > 1
    paths = "import sys; from eagle_slim.vocab_tools.errors import page; print(*map(page, sys.argv[1:]), sep='\\n')"
    told = [Path(line) for line in python(installed, "-c", paths, *sorted(named)).splitlines()]
    assert told == [installed / name for name in sorted(named)]


def test_pages_are_the_clone_s_and_have_no_link_that_leads_nowhere(installed: Path) -> None:
    link = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")
    pages = {path.relative_to(installed).as_posix(): path for path in installed.rglob("*.md")}
    assert set(pages) >= {"convert/FORMAT.md", *(f"docs/{page.name}" for page in (ROOT / "docs").glob("*.md"))}
    outside = set()
    for name, path in pages.items():
        text = path.read_text("utf-8")
        targets = [target.partition("#")[0] for _, target in link.findall(text) if "://" not in target]
        assert [target for target in targets if not (path.parent / target).exists()] == []
        # Of what stays in the clone a reader learns the path.
        path_there = r" \(`([\w/.-]+)` of the repository\)"
        assert [told for told in re.findall(path_there, text) if not (ROOT / told).exists()] == []
        outside |= set(re.findall(path_there, text))
        assert re.sub(path_there, "", link.sub(r"\1", text)) == link.sub(r"\1", (ROOT / name).read_text("utf-8"))
    assert {told.split("/")[0] for told in outside} == {"CONTRIBUTING.md", "benchmarks", "tests"}


def test_the_description_has_no_link_that_leads_nowhere(installed: Path) -> None:
    (metadata,) = installed.parent.glob("eagle_slim-*.dist-info/METADATA")
    text = metadata.read_text("utf-8").partition("\n\n")[2]
    assert text.startswith("# eagle-slim\n")
    assert "## Limits" in text
    assert "![" not in text
    assert all(link.startswith("https://") for link in re.findall(r"\]\(([^)]*)\)", text))


@pytest.mark.slow
def test_what_readme_has_to_try_runs_there(installed: Path) -> None:
    section = (ROOT / "README.md").read_text("utf-8").split("## Try it")[1].split("\n## ")[0]
    commands = [shlex.split(line, comments=True) for line in section.splitlines() if line.startswith("eagle-")]
    assert [command[0] for command in commands] == ["eagle-convert", "eagle-verify", "eagle-generate"]
    for command in commands:
        python(installed, "-c", RUN, *command)


RUN = """
import sys
from importlib.metadata import distribution
sys.argv = sys.argv[1:]
distribution("eagle-slim").entry_points.select(group="console_scripts")[sys.argv[0]].load()()
"""


IMPORT_ALL = """
import importlib, json, pkgutil, sys
modules = []
for package in sys.argv[1:]:
    package = importlib.import_module(f"eagle_slim.{package}")
    inside = pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    modules += [package, *(importlib.import_module(module.name) for module in inside)]
    for name in package.__all__:
        getattr(package, name)
print(json.dumps([module.__file__ for module in modules]))
"""


@pytest.mark.slow
def test_every_module_and_public_name_is_imported_from_there(installed: Path) -> None:
    imported = {Path(file) for file in json.loads(python(installed, "-c", IMPORT_ALL, *PACKAGES))}
    assert imported == {path for package in PACKAGES for path in (installed / package).rglob("*.py")}


COMMAND = """
import sys
from importlib.metadata import distribution
scripts = distribution("eagle-slim").entry_points.select(group="console_scripts")
if sys.argv[1:]:
    start = scripts[sys.argv[1]].load()
    sys.argv[1:] = ["--help"]
    try:
        start()
    except SystemExit as end:
        print("exit code", end.code or 0)
    print(*sys.modules)
else:
    print(*(script.name for script in scripts))
"""


def test_every_command_starts_there_and_loads_no_heavy_library_to_help(installed: Path) -> None:
    commands = python(installed, "-c", COMMAND).split()
    assert len(commands) == 8
    for name in commands:
        *shown, code, modules = python(installed, "-c", COMMAND, name).splitlines()
        # Those say what to run instead, as an error.
        is_gone = name in ("eagle-push", "eagle-servers")
        assert (code, "Usage:" in "".join(shown)) == ("exit code 2" if is_gone else "exit code 0", not is_gone), name
        assert HEAVY.isdisjoint(modules.split()), name
