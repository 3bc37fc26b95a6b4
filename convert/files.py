"""Opening files that others wrote: never a pipe or a device, on which a reader would wait for ever."""

from __future__ import annotations

import errno
import json
import math
import os
import stat
from pathlib import Path
from typing import Any, NoReturn

from eagle_slim.vocab_tools.errors import EagleSlimError


def open_regular(path: Path | str) -> int:
    """Open a regular file for reading and return its descriptor; links are followed.

    Raises:
        OSError: it cannot be opened, or is a folder, a pipe, a socket or a device.
    """
    # Without O_NONBLOCK, opening a pipe waits until somebody writes to it.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return descriptor


def read_regular(path: Path | str) -> bytes:
    """Return the content of a regular file; raises as `open_regular`."""
    with os.fdopen(open_regular(path), "rb") as file:
        return file.read()


def read_object(path: Path, error_type: type[EagleSlimError], where: str) -> dict[str, Any]:
    """Read a file that holds one JSON object.

    Raises `error_type` where it is missing or holds anything else; messages begin with `where`.
    """
    try:
        value = json.loads(
            read_regular(path), parse_constant=_refuse_constant, parse_int=_whole_number, parse_float=_finite
        )
    except FileNotFoundError:
        advice = "Expected the folder that has it beside the weights."
        if (path.parent / "params.json").is_file():
            advice = (
                "This is Mistral's own format (params.json), which is not read: give a repository in Hugging Face's."
            )
        raise error_type(f"{where}: {path.name} is missing.\n{advice}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise error_type(f"{where}: {path.name} cannot be read as JSON ({error}).") from error
    if not isinstance(value, dict):
        found = type(value).__name__
        raise error_type(f"{where}: {path.name}: expected a JSON object, found {found}.")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON value")


def _whole_number(text: str) -> int:
    value = int(text)
    if not -(2**63) <= value < 2**63:
        raise ValueError(f"{text[:24]}… does not fit 64 bits")
    return value


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:24]} is no finite number")
    return value
