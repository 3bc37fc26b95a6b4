"""A target's configuration: rows of its LM head, tied to the embedding or not, and ids that end a text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .errors import SourceError
from .files import expand_home, read_object
from .hub import find_folder

_CONFIG, _GENERATION = "config.json", "generation_config.json"
# Of multimodal targets: transformers' name, InternVL's, DeepSeek-VL's, and Qwen-Omni's, which holds the first.
_LANGUAGE = ("text_config", "llm_config", "language_config", "thinker_config")


@dataclass(frozen=True)
class TargetConfig:
    """Rows of a target's LM head, whether they are its input embedding (None: not said), and ids that end a text."""

    label: str
    vocab_size: int | None
    tied: bool | None
    eos_ids: tuple[int, ...]


def read_target(source: str, offline: bool = False) -> TargetConfig:
    """Read config.json and generation_config.json of a target in a folder or on the Hub; raises SourceError."""
    folder = expand_home(source)
    if not folder.is_dir():
        folder, _ = find_folder(source, None, offline, lambda names, _: sorted({*names} & {_CONFIG, _GENERATION}))
    config = read_object(folder / _CONFIG, SourceError)
    generation = read_object(folder / _GENERATION, SourceError) if (folder / _GENERATION).is_file() else {}
    eos_ids: set[int] = set()
    for part in (*language_configs(config), generation):
        value = part.get("eos_token_id")
        eos_ids.update(each for each in (value if isinstance(value, list) else [value]) if type(each) is int)
    sizes = [part["vocab_size"] for part in language_configs(config) if type(part.get("vocab_size")) is int]
    return TargetConfig(source, sizes[0] if sizes else None, says_tied(config), tuple(sorted(eos_ids)))


def says_tied(config: Mapping[str, Any]) -> bool | None:
    """Report whether a config.json ties the LM head to the input embedding; None where it does not say.

    A multimodal target that says both in its two places says nothing: engines differ in which of them they read.
    """
    said = (part.get("tie_word_embeddings") for part in language_configs(config))
    values = {value for value in said if type(value) is bool}
    return values.pop() if len(values) == 1 else None


def language_configs(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return what describes the language model: the configuration, then the part of a multimodal one that does."""
    parts = [config]
    while inner := [part for key in _LANGUAGE if isinstance(part := parts[-1].get(key), Mapping)]:
        parts.append(inner[0])
    return parts
