"""Pack an engine for a GPU machine that has no network: what that machine lacks, without what one GPU never uses.

    python tests/engines/gpu/pack.py resolve vllm                      # write vllm.lock beside this file
    python tests/engines/gpu/pack.py build vllm --out build/gpu-packs  # download, strip, compress, split

`resolve` asks uv for everything that the engine needs with the machine's own packages held fixed (`machine.txt`), and
writes what is left to carry. `build` installs exactly that for the machine's Python and platform, removes what a start
never opens, blanks the code of other GPUs (`fatbin.py`) and writes ``NAME-I.tar.xz`` archives, cut into pieces of at
most `PART_BYTES`. `unpack.py` puts them together again. Needs `uv` on the PATH or in $UV.
"""

import argparse
import lzma
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from fatbin import blank_other_architectures
from recipes import GPU_ARCH, PLATFORM, PYTHON, RECIPES, Recipe

HERE = Path(__file__).parent
UV = os.environ.get("UV", "uv")
PART_BYTES = 46 * 2**20
# As many archives as make unpacking, one process each, wait for the largest file only.
ARCHIVES = 4


def canonical(distribution: str) -> str:
    """A distribution's name as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", distribution).lower()


def machine_packages() -> dict[str, str]:
    """By canonical name: the requirement line of every package that the GPU machine has."""
    lines = (HERE / "machine.txt").read_text(encoding="utf-8").splitlines()
    return {canonical(line.partition("==")[0]): line for line in lines if line and not line.startswith("#")}


def resolve(name: str) -> None:
    """Write the lock of a recipe: the pinned distributions to carry, one a line."""
    recipe = RECIPES[name]
    machine = {package: line for package, line in machine_packages().items() if package not in recipe.replaces}
    with tempfile.TemporaryDirectory() as scratch:
        inputs = {
            "requirement": [recipe.requirement],
            "constraint": [line for line in machine.values() if "==" in line],
            "override": list(recipe.overrides),
        }
        for kind, lines in inputs.items():
            Path(scratch, kind).write_text("\n".join(lines) + "\n", encoding="utf-8")
        command = [
            UV, "pip", "compile", "--quiet", f"{scratch}/requirement", "--constraint", f"{scratch}/constraint",
            "--override", f"{scratch}/override", "--python-version", PYTHON, "--python-platform", PLATFORM,
            "--only-binary", ":all:", "--no-header", "--no-annotate",
        ]  # fmt: skip
        if recipe.exclude_newer:
            command += ["--exclude-newer", recipe.exclude_newer]
            # What the machine has stays as it is, however new.
            for package in machine:
                command += ["--exclude-newer-package", f"{package}=2026-11-20"]
        found = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    held = {package for package, line in machine.items() if "==" not in line or line in found}
    unused = re.compile(recipe.never_imported)
    carried = [
        line
        for line in found
        if (package := canonical(line.partition("==")[0])) not in held and not unused.match(package)
    ]
    (HERE / f"{name}.lock").write_text("\n".join(carried) + "\n", encoding="utf-8")


def install(name: str, site: Path) -> None:
    """Unpack every wheel of the lock into ``site``, for the GPU machine's Python."""
    command = [
        UV, "pip", "install", "--quiet", "--no-deps", "--link-mode", "copy", "--target", str(site),
        "--python-version", PYTHON, "--python-platform", PLATFORM, "--only-binary", ":all:",
        "--requirement", str(HERE / f"{name}.lock"),
    ]  # fmt: skip
    subprocess.run(command, check=True)


def slim(recipe: Recipe, site: Path) -> None:
    """Remove and shrink what the recipe names; other GPUs' code goes from every library."""
    for pattern in (*recipe.left_out, "**/__pycache__/*", "**/*.pyi", "**/*.a"):
        for path in site.glob(pattern):
            if path.is_file():
                path.unlink()
    for pattern in recipe.strip_debug:
        for path in site.glob(pattern):
            subprocess.run(["strip", "--strip-debug", str(path)], check=True)
    for path in site.rglob("*.so"):
        blank_other_architectures(path, GPU_ARCH)


def shares(site: Path) -> list[list[Path]]:
    """The files of ``site`` in `ARCHIVES` lists of about equal size, largest files first."""
    lists: list[list[Path]] = [[] for _ in range(ARCHIVES)]
    sizes = [0] * ARCHIVES
    for path in sorted((path for path in site.rglob("*") if path.is_file()), key=lambda path: -path.stat().st_size):
        smallest = sizes.index(min(sizes))
        lists[smallest].append(path)
        sizes[smallest] += path.stat().st_size
    return lists


def compress(site: Path, files: list[Path], archive: Path, preset: int) -> Path:
    """Write ``files`` into a tar.xz with their names below ``site``."""
    with lzma.open(archive, "wb", preset=preset) as stream, tarfile.open(fileobj=stream, mode="w") as tar:
        for path in sorted(files):
            tar.add(path, arcname=str(path.relative_to(site)), recursive=False)
    return archive


def cut(archive: Path) -> Iterator[Path]:
    """Cut an archive that is too large to travel into numbered pieces; yields what is to travel."""
    if archive.stat().st_size <= PART_BYTES:
        yield archive
        return
    with archive.open("rb") as stream:
        for number, piece in enumerate(iter(lambda: stream.read(PART_BYTES), b"")):
            part = archive.with_name(f"{archive.name}.{number:03}")
            part.write_bytes(piece)
            yield part
    archive.unlink()


def build(name: str, out: Path, jit_cache: Path | None) -> None:
    """Write the pieces of one pack into ``out``, replacing those there."""
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob(f"{name}-*.tar.xz*"):
        old.unlink()
    with tempfile.TemporaryDirectory(dir=out) as scratch:
        site = Path(scratch)
        install(name, site)
        slim(RECIPES[name], site)
        if jit_cache is not None:
            for library in jit_cache.glob("*/*.so"):
                folder = site / "jit-cache" / library.parent.name
                folder.mkdir(parents=True)
                shutil.copy(library, folder)
        jobs = [
            (site, files, out / f"{name}-{number}.tar.xz", RECIPES[name].preset)
            for number, files in enumerate(shares(site))
            if files
        ]
        with ProcessPoolExecutor() as pool:
            archives = list(pool.map(compress, *zip(*jobs, strict=True)))
    for part in (part for archive in archives for part in cut(archive)):
        print(f"{part.stat().st_size:>12,} {part}")


def main() -> None:
    """Run one of the two steps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", choices=["resolve", "build"])
    parser.add_argument("name", choices=sorted(RECIPES))
    parser.add_argument("--out", type=Path, default=Path("build/gpu-packs"))
    parser.add_argument("--jit-cache", type=Path, help="kernels that the engine would compile at its first start")
    arguments = parser.parse_args()
    if arguments.step == "resolve":
        resolve(arguments.name)
    else:
        build(arguments.name, arguments.out, arguments.jit_cache)


if __name__ == "__main__":
    main()
