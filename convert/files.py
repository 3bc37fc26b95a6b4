"""Reading files that others wrote: never a pipe or a device, on which a reader would wait for ever."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any, NoReturn

from eagle_slim.vocab_tools.errors import EagleSlimError


def read_regular(path: Path) -> bytes:
    """Return the content of a regular file; OSError where it is missing, a folder, a pipe or a device."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return path.read_bytes()


def read_object(path: Path, error_type: type[EagleSlimError], where: str) -> dict[str, Any]:
    """Read a file that holds one JSON object.

    Raises `error_type` where it is missing or holds anything else; messages begin with `where`.
    """
    try:
        value = json.loads(read_regular(path), parse_constant=_refuse_constant)
    except FileNotFoundError:
        advice = "Expected a folder in Hugging Face's format, with this file beside the weights."
        raise error_type(f"{where}: {path.name} is missing.\n{advice}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise error_type(f"{where}: {path.name} cannot be read as JSON ({error}).") from error
    if not isinstance(value, dict):
        raise error_type(f"{where}: {path.name}: expected a JSON object, found {type(value).__name__}.")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON value")
