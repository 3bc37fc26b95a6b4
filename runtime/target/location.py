"""Finding a target: the one that the user names, or the folder that a head was converted with."""

from __future__ import annotations

import json
import os
import warnings
from contextlib import suppress
from pathlib import Path

from eagle_slim.convert.artifact.files import MANIFEST_NAME
from eagle_slim.convert.sources.builtin import EMBEDDED_TARGET_REPO, embedded_target_folder
from eagle_slim.convert.targets.model import is_missing_folder
from eagle_slim.vocab_tools.files import expand_home
from eagle_slim.vocab_tools.hub import HubError, find_snapshot, is_offline

from ..errors import TargetWarning, UsageError

MODELS_FOLDER = "EAGLE_SLIM_MODELS"
"""Environment variable: a folder that holds models by name."""


def given_target(given: str | Path, offline: bool, revision: str | None = None) -> str | Path:
    """Return where the target is that the user names: a folder, or a repository of the Hub.

    Offline, and only then, the built-in copy stands in for its repository where that is not in the Hub's cache, with a
    `TargetWarning`. Raises `UsageError` for a folder that is not there, and for a draft head in a target's place.
    """
    if is_missing_folder(str(given)):
        raise UsageError(f"Target {given}: there is no such folder. Name a folder or a Hub repository (name/model).")
    folder = expand_home(given)
    if folder.is_dir():
        if is_draft_head(folder):
            advice = "Name it with head= (on the command line as HEAD), and leave the target out"
            other = "or name the model that the head belongs to"
            raise UsageError(f"{given} is a draft head, not a target. {advice} {other}.")
        return folder
    if str(given) == EMBEDDED_TARGET_REPO and revision is None and (offline or is_offline()):
        with suppress(HubError):
            find_snapshot(EMBEDDED_TARGET_REPO, None, True, lambda names, _: [*{"config.json"} & {*names}])
            return given
        what = f"{given} is not on this machine; the built-in copy stands in for it"
        how = "Its weights are dequantised (Q4_1 and Q8_0 to bfloat16), so its output differs from the repository's"
        warnings.warn(f"{what}. {how}.", TargetWarning, stacklevel=4)
        return embedded_target_folder()
    return given


def recorded_target(name: str, head_folder: Path) -> Path:
    """Return the folder of a target that a head was converted with, of which only the name is recorded.

    It may lie beside the head's folder, or in the folder that the environment variable EAGLE_SLIM_MODELS names. Raises
    `UsageError` naming both places when it is in neither.
    """
    models = os.environ.get(MODELS_FOLDER)
    beside = head_folder.resolve().parent
    for folder in (beside, expand_home(models)) if models else (beside,):
        if (folder / name / "config.json").is_file() and not is_draft_head(folder / name):
            return folder / name
    raise UsageError(
        f"Head {head_folder} was converted with the target folder {name!r}, which is neither beside it ({beside}) nor "
        f"in {MODELS_FOLDER} ({models or 'which is not set'}). Name the target (--target, or target= in Python)."
    )


def is_draft_head(folder: Path) -> bool:
    """Report whether a folder holds a draft head: an artifact, or a configuration that names an EAGLE class."""
    if (folder / MANIFEST_NAME).is_file():
        return True
    with suppress(OSError, ValueError, KeyError, TypeError):
        names = json.loads((folder / "config.json").read_text(encoding="utf-8"))["architectures"]
        return "eagle" in str(names).lower()
    return False
