"""What `make demo` runs: the real `eagle-convert --draft-vocab 32000` on the built-in head, verified and summed up.

python -m eagle_slim.convert.demo [FOLDER]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .artifact import PLOT_NAME, WEIGHTS_NAME, Artifact
from .convert import coverage_summary
from .embedded import EMBEDDED_HEAD_NAME, embedded_head
from .errors import ConvertError
from .verify import verify_artifact

DRAFT_VOCAB = 32000


def main(arguments: Sequence[str] | None = None) -> int:
    """Convert into a folder (default out/), verify, print the table. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m eagle_slim.convert.demo", description=__doc__)
    parser.add_argument("folder", nargs="?", default="out", help="where to write (default: out)")
    folder = Path(parser.parse_args(arguments).folder) / f"{EMBEDDED_HEAD_NAME}-v{DRAFT_VOCAB}"

    started = time.monotonic()
    result = _convert(folder)
    converted = time.monotonic()
    if result is None:
        return 1
    verification = verify_artifact(folder)
    try:
        verification.raise_if_failed()
    except ConvertError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(_table(folder, result, len(verification.checks), converted - started, time.monotonic() - converted))
    return 0


def _convert(folder: Path) -> dict[str, Any] | None:
    """Run the installed command as a user would; its messages go to stderr. None where it failed."""
    command = [str(Path(sysconfig.get_path("scripts")) / "eagle-convert"), "--draft-vocab", str(DRAFT_VOCAB)]
    print("$ eagle-convert --draft-vocab", DRAFT_VOCAB, flush=True)
    # --out and --force only so that the demo can be run again and leaves its files in one place.
    done = subprocess.run([*command, "--out", str(folder), "--force", "--json"], stdout=subprocess.PIPE, check=False)
    return None if done.returncode else json.loads(done.stdout)


def _table(folder: Path, result: dict[str, Any], num_checks: int, convert_s: float, verify_s: float) -> str:
    rows, step = result["rows"], result["bytes_per_draft_step"]
    coverage = coverage_summary(Artifact.load(folder).manifest)[0]
    low, high = coverage["interval"]
    head_bytes = (embedded_head() / WEIGHTS_NAME).stat().st_size
    lines = [
        ("", "before", "after"),
        ("rows of the LM head", f"{rows['before']:,}", f"{rows['after']:,}"),
        ("bytes a draft step reads", f"{step['before']:,}", f"{step['after']:,}"),
        ("bytes of the file", f"{head_bytes:,} (no LM head)", f"{(folder / WEIGHTS_NAME).stat().st_size:,}"),
        (
            "held-out tokens covered",
            f"{coverage['first_ids_instead']:.2%} (first {rows['after']:,} ids)",
            f"{coverage['covered']:.2%} (95%: {low:.2%} to {high:.2%})",
        ),
    ]
    widths = [max(len(line[column]) for line in lines) for column in range(3)]
    table = "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )
    return (
        f"\n{table}\n\nconverted in {convert_s:.1f} s, verified in {verify_s:.1f} s: {num_checks} checks, none failed\n"
        f"slim head      {folder}\ncoverage plot  {folder / PLOT_NAME}"
    )


if __name__ == "__main__":
    sys.exit(main())
