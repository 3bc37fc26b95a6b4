"""Command lines of benchmarks: rows chosen by name, the GPU, and results."""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch


def whole_from(least: int) -> Callable[[str], int]:
    """Return a parser of whole numbers from ``least`` on."""

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if number < least:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {least} on")
        return number

    return parse


def output_file(text: str) -> Path:
    """Parse the path of a file that can be written; missing folders will be made."""
    path = place = Path(text)
    while not place.exists() and place != place.parent:
        place = place.parent
    if path.is_dir() or (place != path and not place.is_dir()) or not os.access(place, os.W_OK):
        raise argparse.ArgumentTypeError(f"{path} cannot be written. Name a file in a folder of yours.")
    return path


class Command(argparse.ArgumentParser):
    """The parser of ``python -m benchmarks.NAME``, with ``--out FILE`` and, where there are rows, ``--rows REGEX``."""

    def __init__(self, name: str, description: str | None, rows: Iterable[str] | None = None) -> None:
        super().__init__(
            prog=f"python -m benchmarks.{name}",
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self._rows = None if rows is None else list(rows)
        if self._rows is not None:
            self.add_argument("--rows", metavar="REGEX", default="", help="only rows whose name this matches")
            self.add_argument("--list", action="store_true", help="print the names of the rows and stop")
        self.add_argument("--out", type=output_file, help="write the result here, as JSON")

    def chosen(self, args: argparse.Namespace) -> list[str]:
        """Return the names that ``--rows`` matches; ends the program after ``--list``, and where there is none."""
        try:
            names = [name for name in self._rows or () if re.search(args.rows, name)]
        except re.error as error:
            self.error(f"argument --rows: {args.rows!r} is no regular expression: {error}")
        if not names:
            self.error("no row matches")
        if args.list:
            print("\n".join(names))
            self.exit()
        return names

    def gpu(self) -> torch.device:
        """Return the current GPU; ends the program where there is none."""
        if not torch.cuda.is_available():
            self.exit(2, "this benchmark needs an NVIDIA GPU\n")
        return torch.device("cuda", torch.cuda.current_device())


def show(row: dict[str, Any]) -> None:
    """Print a row with its numbers rounded."""
    print({name: round(value, 3) if isinstance(value, float) else value for name, value in row.items()}, flush=True)


def write(result: dict[str, Any], out: Path | None) -> None:
    """Write a result, which may be all that there is so far."""
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=1) + "\n")
