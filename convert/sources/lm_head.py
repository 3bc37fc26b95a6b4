"""Which tensor of a target is its LM head, by the names under which published checkpoints store it.

Where config.json ties the LM head to the input embedding, the embedding is it even beside a stored LM head: so vLLM,
SGLang and transformers 4 load such a target. transformers 5 takes the stored one where the two differ.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import CheckpointError
from ..files import read_regular
from ..weights.checkpoint import Checkpoint, FileRecord, open_checkpoint, same_tensors
from ..weights.dtypes import FLOATS
from ..weights.paths import choose_weights, list_names, path_inside, read_index
from ..weights.types import shorten

if TYPE_CHECKING:
    import torch
    from numpy.typing import ArrayLike

LM_HEAD_NAMES = (
    "lm_head.weight",
    "language_model.lm_head.weight",
    "model.lm_head.weight",
    "model.language_model.lm_head.weight",
    "language_model.model.lm_head.weight",
    "text_model.lm_head.weight",
    "transformer.lm_head.weight",
    "embed_out.weight",
    "output.weight",
)
"""Spellings of an LM head of its own: plain, inside multimodal models, GPT-NeoX, original Llama and Mistral."""

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
    "transformer.wte.weight",
    "wte.weight",
    "tok_embeddings.weight",
)
"""Spellings of the input embedding, which is the LM head too where none of `LM_HEAD_NAMES` exists."""


def find_lm_head(names: Collection[str], where: str, tied: bool = False) -> tuple[str, bool]:
    """Return the name of the LM-head tensor among `names`, and whether it is the (tied) input embedding.

    Args:
        names: of the target's tensors.
        where: names the target in messages.
        tied: whether its config.json ties the two (`ties_embedding`).

    Raises:
        CheckpointError: there is neither under any known name.
    """
    kinds = [(LM_HEAD_NAMES, False), (EMBEDDING_NAMES, True)]
    for spellings, is_embedding in reversed(kinds) if tied else kinds:
        for name in spellings:
            if name in names:
                return name, is_embedding
    near = sorted(name for name in names if "head" in name or "embed" in name)[:8]
    raise CheckpointError(
        f"{where}: no LM head: expected {LM_HEAD_NAMES[0]} or {EMBEDDING_NAMES[0]}, perhaps under language_model., "
        f"found {shorten(near, 300) if near else 'no tensor with such a name'}.\n"
        "Expected a causal language model in the Hugging Face layout.",
        path=where,
        found=near,
    )


def unused_lm_head(names: Collection[str], chosen: str) -> str | None:
    """Name of an LM head that is stored beside `chosen`, the tied embedding; None without one."""
    return next((name for name in LM_HEAD_NAMES if name in names), None) if chosen in EMBEDDING_NAMES else None


def lm_head_bias(names: Collection[str], lm_head: str) -> str | None:
    """Name of the bias that is stored with an LM head; None without one."""
    bias = f"{lm_head.removesuffix('weight')}bias"
    return bias if bias in names and lm_head not in EMBEDDING_NAMES else None


def ties_embedding(folder: Path) -> bool:
    """Whether the config.json in `folder` ties the LM head to the input embedding.

    A multimodal target must not say otherwise in one of its two places; engines differ in which of them they read.
    """
    try:
        config = json.loads(read_regular(folder / "config.json"))
    except (OSError, ValueError):
        return False
    if not isinstance(config, dict):
        return False
    parts = (config, config.get("text_config"))
    said = [part[_TIE] for part in parts if isinstance(part, dict) and part.get(_TIE) is not None]
    return bool(said) and all(value is True for value in said)


@dataclass(frozen=True)
class TargetLMHead:
    """The LM head of a target, opened without the rest of the target.

    Attributes:
        checkpoint: holds at least this tensor; records what was read.
        name: of the tensor, as the target spells it.
        tied: whether it is the input embedding: config.json says so, or there is no LM head.
        file: name of the weights file of the target that holds it.
        etag: identifies the content of that file on the Hub (its sha256 for large files); None for a folder.
        label: names the target in messages.
        unused: name of an LM head that is stored beside a tied embedding, if the two differ or were not compared.
        bias: name of the LM head's bias, if the target has one.
    """

    checkpoint: Checkpoint
    name: str
    tied: bool
    file: str
    etag: str | None
    label: str
    unused: str | None = None
    bias: str | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """`(target_vocab, hidden)`; the vocabulary may be padded beyond the tokenizer's."""
        rows, hidden = self.checkpoint.shape(self.name)
        return rows, hidden

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which the target stores the tensor."""
        return self.checkpoint.dtype(self.name)

    def rows(self, ids: ArrayLike) -> torch.Tensor:
        """Read rows `ids` [rows] as [rows, hidden], bit for bit, in that order (`Checkpoint.rows`)."""
        return self.checkpoint.rows(self.name, ids)

    def tensor(self) -> torch.Tensor:
        """Read the whole tensor [target_vocab, hidden] (`Checkpoint.tensor`)."""
        return self.checkpoint.tensor(self.name)

    def forked(self) -> TargetLMHead:
        """The same LM head with a record of reads of its own (`Checkpoint.fork`)."""
        return replace(self, checkpoint=self.checkpoint.fork())

    @property
    def files(self) -> tuple[FileRecord, ...]:
        """What was read so far (`Checkpoint.files`)."""
        return self.checkpoint.files


def open_local_lm_head(folder: Path, label: str) -> TargetLMHead:
    """Open the LM head of a target in a folder; of a sharded target only the shard that holds it need be there.

    Raises:
        CheckpointError: the weights are damaged, or no tensor is an LM head.
    """
    shards = _shards(folder)
    said = ties_embedding(folder)
    whole = open_checkpoint(folder) if shards is None else None
    stored = whole.names if whole is not None else tuple(shards or ())
    name, tied = find_lm_head(stored, label, said)
    checkpoint = open_checkpoint(folder, {name}) if whole is None else whole
    unused = unused_lm_head(stored, name)
    if unused is not None and (shards is None or (folder / shards[unused]).is_file()):
        # Opened anew: what is read for this comparison is not what the conversion read.
        both = open_checkpoint(folder, {name, unused})
        unused = None if same_tensors(both, name, both, unused) else unused
    return lm_head_of(checkpoint, name, tied, None, label, unused, lm_head_bias(stored, name))


def _shards(folder: Path) -> Mapping[str, str] | None:
    """The shard of each tensor of a sharded checkpoint, by its index; None without an index."""
    chosen = choose_weights(list_names(folder), str(folder))
    return read_index(path_inside(folder, chosen)).shard_of if chosen.endswith(".index.json") else None


def lm_head_of(
    checkpoint: Checkpoint,
    name: str,
    tied: bool,
    etag: str | None,
    label: str,
    unused: str | None = None,
    bias: str | None = None,
) -> TargetLMHead:
    """Check the form of the tensor and return it as an LM head.

    Raises:
        CheckpointError: the tensor is not a matrix of floating-point numbers (an LM head quantised to integers, say).
    """
    info = checkpoint.info(name)
    if len(info.shape) != 2 or info.dtype not in FLOATS:
        raise CheckpointError(
            f"{label}: {name}: expected a matrix of bf16, fp16 or fp32, found {info.dtype} {list(info.shape)}.\n"
            "Give the unquantised target with --target.",
            path=label,
            tensor=name,
            found=info.dtype,
        )
    return TargetLMHead(checkpoint, name, tied, checkpoint.path_of(name).name, etag, label, unused, bias)
