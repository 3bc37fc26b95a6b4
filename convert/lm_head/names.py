"""Which tensor of a target is its LM head, by the names under which published checkpoints store it.

Where config.json ties the LM head to the input embedding, the embedding is it even beside a stored LM head: so vLLM,
SGLang and transformers 4 load such a target. transformers 5 takes the stored one where the two differ.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from ..errors import CheckpointError
from ..files import read_object
from ..weights.types import shorten

LM_HEAD_NAMES = (
    "lm_head.weight",
    "language_model.lm_head.weight",
    "model.lm_head.weight",
    "model.language_model.lm_head.weight",
    "language_model.model.lm_head.weight",
    "text_model.lm_head.weight",
)
"""Spellings of an LM head of its own: plain, and inside multimodal models."""

_TIE = "tie_word_embeddings"

EMBEDDING_NAMES = (
    "model.embed_tokens.weight",
    "language_model.model.embed_tokens.weight",
    "model.language_model.embed_tokens.weight",
    "model.language_model.model.embed_tokens.weight",
    "language_model.embed_tokens.weight",
    "text_model.embed_tokens.weight",
    "model.text_model.embed_tokens.weight",
    "embed_tokens.weight",
)
"""Spellings of the input embedding, which is the LM head too where none of `LM_HEAD_NAMES` exists."""


def find_lm_head(names: Collection[str], where: str, tied: bool = False) -> str:
    """Return the name of the LM-head tensor among `names`: the embedding first where they are `tied`, else last.

    Raises:
        CheckpointError: there is neither under any known name.
    """
    spellings = EMBEDDING_NAMES + LM_HEAD_NAMES if tied else LM_HEAD_NAMES + EMBEDDING_NAMES
    if (found := next((name for name in spellings if name in names), None)) is not None:
        return found
    near = sorted(name for name in names if "head" in name or "embed" in name)[:8]
    raise CheckpointError.at(
        where,
        f"no LM head: expected {LM_HEAD_NAMES[0]} or {EMBEDDING_NAMES[0]}, perhaps under language_model., "
        f"found {shorten(near, 300) if near else 'no tensor with such a name'}.\n"
        "Expected a causal language model in the Hugging Face layout.",
        found=near,
    )


def unused_lm_head(names: Collection[str], chosen: str) -> str | None:
    """Name of an LM head that is stored beside `chosen`, the tied embedding; None without one."""
    return next((name for name in LM_HEAD_NAMES if name in names), None) if chosen in EMBEDDING_NAMES else None


def ties_embedding(folder: Path) -> bool:
    """Whether the config.json in `folder` ties the LM head to the input embedding.

    A multimodal target must not say otherwise in one of its two places; engines differ in which of them they read.
    """
    try:
        config = read_object(folder / "config.json", CheckpointError, str(folder))
    except CheckpointError:
        return False
    parts = (config, config.get("text_config"))
    said = [part[_TIE] for part in parts if isinstance(part, dict) and part.get(_TIE) is not None]
    return bool(said) and all(value is True for value in said)
