"""Types of command-line arguments: what would fail after minutes of measuring is refused before it begins."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path

from ...errors import UsageError


def whole_from(least: int) -> Callable[[str], int]:
    """A whole number of at least ``least``."""

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
    """A file that can be written."""
    try:
        check_output(Path(text), "this option")
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return Path(text)


def check_output(path: Path, option: str) -> None:
    """Raise `UsageError` unless a file can be written, or made together with the folders that are missing.

    ``option``: how to name another one.
    """
    place = path
    while not place.exists() and place != place.parent:
        place = place.parent
    if path.is_dir() or (place != path and not place.is_dir()) or not os.access(place, os.W_OK):
        raise UsageError(f"{path} cannot be written. Name a file in a folder of yours with {option}.")
