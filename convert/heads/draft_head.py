"""`DraftHead`: a draft head, whatever its file looked like, and its tensors under their canonical names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from eagle_slim.vocab_tools.vocabulary import MAX_PADDING
from numpy.typing import NDArray

from .. import names
from ..artifact.manifest import Manifest
from ..errors import MismatchError
from ..rows.checkpoint import Checkpoint
from ..rows.files import TensorInfo, item_size
from ..sources.source import ResolvedSource
from .taps import AUX_LAYER_KEY, default_taps, tap_layers

if TYPE_CHECKING:
    import torch


def has_padding_of(rows: int, vocab: int) -> bool:
    """Tell whether `rows` may be a vocabulary of `vocab` ids, padded for the GPU or not."""
    return vocab <= rows <= vocab + MAX_PADDING


@dataclass(frozen=True)
class LazyTensors:
    """The tensors of a head, read on demand; `stored`: name in the checkpoint by canonical name, else KeyError."""

    source: Checkpoint
    stored: Mapping[str, str]

    def __contains__(self, name: object) -> bool:
        return name in self.stored

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self.stored))

    def info(self, name: str) -> TensorInfo:
        """Return dtype, shape and size of a tensor, from the header."""
        return self.source.info(self.stored[name])

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, from the header."""
        return self.info(name).shape

    def get(self, name: str) -> torch.Tensor:
        """Read the whole tensor, on the CPU, as stored."""
        return self.source.tensor(self.stored[name])

    def rows(self, name: str, ids: NDArray[np.int64]) -> torch.Tensor:
        """Gather rows `ids` [n] of a matrix, [n, columns], bit for bit as stored."""
        return self.source.rows(self.stored[name], ids)

    def is_nonzero(self, name: str) -> bool:
        """Tell whether a floating-point tensor is there and holds a number other than 0 and -0."""
        if name not in self:
            return False
        # Every bit but the sign of each element, which is the highest of its last byte.
        raw = self.source.array(self.stored[name]).reshape(-1, item_size(self.info(name).dtype))
        return bool(raw[:, :-1].any() or (raw[:, -1] & 0x7F).any())


@dataclass(frozen=True)
class DraftHead:
    """A draft head, whatever its file looked like.

    Attributes:
        config: flat config.json; `vocab_size` is the target's V, `draft_vocab_size` the rows of the LM head.
        tensors: by canonical name, without the maps: `fc.weight` [hidden, taps * target_hidden] (EAGLE-1/2:
            [hidden, 2 * hidden]), `midlayer.*` (EAGLE-1/2: `layers.N.*`), `norm.weight` [hidden], and where the file
            has them `lm_head.weight` [draft_vocab, hidden], `embed_tokens.weight` [target_vocab, hidden],
            `input_norm.weight`, `fc_norm.N.weight`; those of a DFlash draft as stored.
        draft_ids_to_target: int64 [draft_vocab], absolute target id of each `lm_head` row in stored order; None where
            row i is target id i (a full vocabulary, or an LM head that is the target's).
        tap_layers: layers of the target whose inputs the head reads, as far as known without the target (`taps`); None
            is every engine's default, (2, n // 2, n - 3) for n layers; () the target's last hidden state alone.
        source: where the files came from, and their manifest and card; None for a head made of an open checkpoint.
        dropped: stored tensor name to the reason why it is not among `tensors`.
    """

    kind: names.HeadKind
    config: dict[str, Any]
    tensors: LazyTensors
    draft_ids_to_target: NDArray[np.int64] | None
    tap_layers: tuple[int, ...] | None
    warnings: tuple[str, ...]
    location: str = ""
    source_config: Mapping[str, Any] = field(default_factory=dict)
    source: ResolvedSource | None = None
    target_name: str | None = None
    dropped: Mapping[str, str] = field(default_factory=dict)

    @property
    def target_vocab(self) -> int:
        """V: the size of the target's vocabulary, with the padding that the head has."""
        return int(self.config["vocab_size"])

    @property
    def draft_vocab(self) -> int:
        """Rows of the LM head: its own, or the target's V where it has none."""
        return self.target_vocab if self.draft_ids_to_target is None else len(self.draft_ids_to_target)

    @property
    def hidden_size(self) -> int:
        """H: width of the head."""
        return int(self.config["hidden_size"])

    @property
    def target_hidden_size(self) -> int:
        """Ht: width of the target."""
        return int(self.config.get("target_hidden_size") or self.hidden_size)

    @property
    def has_lm_head(self) -> bool:
        """Whether the rows come from the head itself rather than from the target."""
        return names.LM_HEAD in self.tensors

    @property
    def row_tensors(self) -> tuple[str, ...]:
        """Its tensors beside the LM head that have one row for each draft id: DSpark's Markov bias."""
        return tuple(name for name in (names.MARKOV_OUT,) if name in self.tensors)

    @property
    def has_head_norms(self) -> bool:
        """Whether its attention normalises each head of q and k, as Qwen3's does."""
        return self.kind != "dflash" and names.HEAD_NORMS[self.kind][0] in self.tensors

    @property
    def dtype_name(self) -> str:
        """Dtype of the head's matrices as safetensors spells it: one of `rows.files.FLOATS`."""
        matrix = "midlayer.mlp.down_proj.weight" if self.kind == "eagle3" else names.FC
        return self.tensors.info(matrix).dtype

    def without_padding(self, vocab: int) -> DraftHead:
        """Return the same head for the `vocab` ids of a target whose vocabulary the head pads."""
        return replace(self, config={**self.config, "vocab_size": vocab})

    def taps(self, num_layers: int | None) -> tuple[int, ...] | None:
        """Find the layers of a target whose inputs the head reads, None for the default of engines; MismatchError."""
        taps = self.tap_layers
        # Layers that no target of so many has are told as such, not as keys that disagree.
        is_beyond = taps and num_layers is not None and max(taps) > num_layers and AUX_LAYER_KEY in self.config
        if self.kind == "eagle3" and taps and not is_beyond:
            taps = tap_layers(self.config, self.location, num_layers)
        if num_layers is not None and taps != () and self.kind != "eagle":
            layers = default_taps(num_layers) if taps is None else taps
            if not all(0 <= layer <= num_layers for layer in layers):
                problem = f"layers {list(layers)} of the target are to be read, and it has {num_layers}"
                problem += f": 0 to {num_layers - 1} for their inputs, {num_layers} for the output of the last."
                advice = "Name the right layers with --tap-layers, or the right target with --target."
                raise MismatchError.at(self.location, f"{problem}\n{advice}")
        return taps

    @property
    def manifest(self) -> Manifest | None:
        """The manifest of a head that eagle-convert wrote, else None."""
        return self.source.manifest if self.source else None

    @property
    def trained_ids(self) -> NDArray[np.int64] | None:
        """Those ids of the target that the head was trained on, ascending; None for all, in whatever order."""
        ids = self.draft_ids_to_target
        return None if ids is None or len(ids) == self.target_vocab else np.sort(ids[ids < self.target_vocab])
