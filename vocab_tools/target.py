"""What a target's configuration says: rows of its LM head, tied to the embedding or not, and ids that end a text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .errors import SourceError
from .files import expand_home, read_object
from .hub import find_snapshot

_CONFIG = "config.json"
_GENERATION = "generation_config.json"


@dataclass(frozen=True)
class TargetConfig:
    """What matters of a target to a list of its ids.

    Attributes:
        label: folder or Hub repository, as the user named it.
        vocab_size: rows of the LM head, None where the configuration does not tell.
        tied: whether the LM head is the input embedding; None where the configuration does not tell.
        eos_ids: ids that end a text, ascending.
    """

    label: str
    vocab_size: int | None
    tied: bool | None
    eos_ids: tuple[int, ...]


def read_target(source: str, offline: bool = False) -> TargetConfig:
    """Read config.json and generation_config.json of a target in a folder or on the Hub.

    Raises:
        SourceError: there is no such folder or repository, or no readable config.json in it.
    """
    folder = expand_home(source)
    if not folder.is_dir():
        folder = find_snapshot(source, None, offline, _wanted).folder
    config = read_object(folder / _CONFIG, SourceError)
    generation = read_object(folder / _GENERATION, SourceError) if (folder / _GENERATION).is_file() else {}
    parts = [*parts_of(config), generation]
    eos_ids: set[int] = set()
    for value in (part.get("eos_token_id") for part in parts):
        eos_ids.update(value if isinstance(value, list) else [] if value is None else [value])
    sizes = [part["vocab_size"] for part in parts if type(part.get("vocab_size")) is int]
    return TargetConfig(source, sizes[0] if sizes else None, says_tied(config), tuple(sorted(eos_ids)))


def says_tied(config: Mapping[str, Any]) -> bool | None:
    """Whether a config.json ties the LM head to the input embedding; None where it does not say.

    A multimodal target that says both in its two places says nothing: engines differ in which of them they read.
    """
    said = {part["tie_word_embeddings"] for part in parts_of(config) if type(part.get("tie_word_embeddings")) is bool}
    return said.pop() if len(said) == 1 else None


def parts_of(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the objects of a config.json that describe the language model: itself, and its text_config."""
    return [part for part in (config, config.get("text_config")) if isinstance(part, Mapping)]


def _wanted(names: Sequence[str], where: str) -> list[str]:
    return [name for name in names if name in (_CONFIG, _GENERATION)]
