"""Checks of an artifact alone: every byte as in its manifest, and the rules of the format.

A rule catches what at least one engine accepts silently and then gets wrong; FORMAT.md has the reasons.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from eagle_slim.vocab_tools.files import read_object
from eagle_slim.vocab_tools.token_maps import ids_from_d2t, read_pickle
from eagle_slim.vocab_tools.vocabulary import uncounted_warning
from numpy.typing import NDArray

from ..artifact.checksums import row_checksums, sha256_file
from ..artifact.format import CARD_NAME, OWN_NAMES, freq_name
from ..artifact.manifest import CONFIG_NAME, WEIGHTS_NAME, Manifest
from ..artifact.tensors import config_of
from ..errors import ArtifactError
from ..heads import names
from ..heads.draft_head import DraftHead
from ..heads.open import QUANT_NAME, head_from_checkpoint
from ..rows.checkpoint import Checkpoint
from ..rows.dtypes import FLOATS, LONG_NAMES, all_finite
from ..rows.paths import TORCH_SUFFIXES
from ..rows.safetensors_file import SafetensorsFile

_MAPS = frozenset(names.MAPS)
_READ_TOO = (*TORCH_SUFFIXES, ".safetensors", ".safetensors.index.json", ".bin.index.json", ".gguf", QUANT_NAME)
_T = TypeVar("_T")


class SkipCheck(Exception):  # noqa: N818  (not an error: the check cannot be made)
    """The check cannot be made; the message says why."""


class Doubt(Exception):  # noqa: N818  (not an error: the artifact is sound)
    """The check found a loss or a condition, and no fault of the artifact; the message names it."""


def _part(read: Callable[[Any], _T]) -> _T:
    """Make a property that is read once: where reading fails, its own check fails and every later one is skipped."""
    name = read.__name__

    def get(parts: Parts) -> _T:
        if name not in parts.found:
            parts.found[name] = SkipCheck(f"{name} could not be read")
            parts.found[name] = read(parts)
        if isinstance(parts.found[name], SkipCheck):
            raise parts.found[name]
        return parts.found[name]  # type: ignore[no-any-return]

    return property(get)  # type: ignore[return-value]


@dataclass
class Parts:
    """The parts of an artifact folder that checks read; `found` has those read so far, by name."""

    folder: Path
    found: dict[str, Any] = field(default_factory=dict)

    @_part
    def manifest(self) -> Manifest:
        """The manifest."""
        return Manifest.load(self.folder)

    @_part
    def config(self) -> dict[str, Any]:
        """config.json."""
        return read_object(self.folder / CONFIG_NAME, ArtifactError)

    @_part
    def weights(self) -> SafetensorsFile:
        """The header of the weights file."""
        return SafetensorsFile(self.folder / WEIGHTS_NAME)

    @_part
    def digests(self) -> dict[str, str]:
        """SHA-256 of every tensor of the weights file."""
        return {name: self.checkpoint.sha256(name) for name in self.weights.tensors}

    @_part
    def ids(self) -> NDArray[np.int64]:
        """Target id of each row, int64 [draft_vocab]: of int64 offsets, unique, ascending and in range."""
        vocab = self.with_map().target_vocab
        ids = ids_from_d2t(self.vector("d2t", "int64"), form="offset", target_vocab=vocab)
        falls = np.flatnonzero(np.diff(ids) <= 0)
        if len(falls):
            raise ArtifactError(f"ids do not ascend: row {falls[0] + 1} is below the row before it")
        return ids

    @_part
    def head(self) -> DraftHead:
        """The artifact, opened as any head is."""
        return head_from_checkpoint(self.checkpoint, self.config, str(self.folder))

    @property
    def target_layers(self) -> int | None:
        """Decoder layers of the target, where the manifest records them."""
        layers = self.manifest.target.get("num_hidden_layers")
        return layers if isinstance(layers, int) else None

    @property
    def checkpoint(self) -> Checkpoint:
        """The tensors of the weights file."""
        return Checkpoint.of(self.weights)

    def vector(self, name: str, dtype: str) -> np.ndarray[Any, Any]:
        """Read a vector of "int64" or "bool"; ArtifactError for any other tensor, CheckpointError for none."""
        info = self.checkpoint.info(name)
        found = LONG_NAMES.get(info.dtype, info.dtype)
        refuse(
            found != dtype or len(info.shape) != 1, f"expected a vector of {dtype}, found {found} {list(info.shape)}"
        )
        return self.checkpoint.array(name).reshape(-1).view(dtype)

    def with_lm_head(self) -> Manifest:
        """Return the manifest of an artifact with an LM head, or skip the check."""
        if self.manifest.kind == "eagle":
            raise SkipCheck("EAGLE-1/2 heads have no map and no LM head of their own")
        return self.manifest

    def with_map(self) -> Manifest:
        """Return the manifest of an artifact with an LM head over a reduced vocabulary, or skip the check."""
        if self.with_lm_head().rank_order_ids is None:
            raise SkipCheck("a full vocabulary has no map")
        return self.manifest


def refuse(condition: bool, message: str) -> None:
    """Raise ArtifactError with `message` where `condition` holds."""
    if condition:
        raise ArtifactError(message)


def join(problems: Sequence[str]) -> None:
    """Raise ArtifactError with all problems, if there are any."""
    refuse(bool(problems), "; ".join(problems))


def _weights(parts: Parts) -> str:
    """The safetensors header is sound and carries the metadata that loaders ask for."""
    metadata = parts.weights.metadata
    refuse(metadata.get("format") != "pt", f"metadata: expected format 'pt', found {dict(metadata)}")
    return f"{len(parts.weights.tensors)} tensors, {parts.weights.size_bytes:,} bytes"


def _stray_files(parts: Parts) -> str:
    """No other weights lie in the folder (SafeAILab reads pytorch_model.bin first), and no file that quantises them."""
    others = sorted({path.name for path in parts.folder.iterdir()} - {*parts.manifest.files})
    # The token map, also a pickle, is no weights file.
    own = freq_name(parts.manifest.draft_vocab)
    weights = [name for name in others if name.endswith(_READ_TOO) and name != own]
    refuse(bool(weights), f"{', '.join(weights)}: an engine may read this, too, or instead; remove it")
    return "none"


def _file_checksums(parts: Parts) -> str:
    """Every small file has the size and SHA-256 that the manifest records, and the name of a file of an artifact."""
    manifest = parts.manifest
    written = {CONFIG_NAME} if manifest.rank_order_ids is None else {CONFIG_NAME, freq_name(manifest.draft_vocab)}
    problems = [f"the manifest does not record {name}" for name in sorted(written - manifest.files.keys())]
    small = {name: entry for name, entry in manifest.files.items() if name != WEIGHTS_NAME}
    for name, entry in small.items():
        path = parts.folder / name
        if not re.fullmatch(OWN_NAMES, name) or "sha256" not in entry:
            problems.append(f"{name} is no file of an artifact, or has no checksum")
        elif not path.is_file():
            problems.append(f"{name} is missing")
        # People edit a model card, and the Hub adds to it.
        elif name != CARD_NAME and (path.stat().st_size, sha256_file(path)) != (entry["size_bytes"], entry["sha256"]):
            problems.append(f"{name} is not as it was written")
    join(problems)
    return f"{len(small)} files"


def _tensor_checksums(parts: Parts) -> str:
    """Size, header and tensors of the weights are those that the manifest records."""
    entry, size_bytes = parts.manifest.files.get(WEIGHTS_NAME, {}), parts.weights.size_bytes
    refuse(size_bytes != entry.get("size_bytes"), f"expected {entry.get('size_bytes')} bytes, found {size_bytes}")
    recorded: Mapping[str, str] = entry.get("tensors", {})
    parts.checkpoint.expect(entry.get("header_sha256", ""), recorded)
    changed = sorted(name for name, digest in parts.digests.items() if digest != recorded[name])
    refuse(bool(changed), f"{', '.join(changed)} not as written")
    return f"header and {len(recorded)} tensors"


def _tensor_names(parts: Parts) -> str:
    """Exactly the tensors of the format, under their canonical names: vLLM and LMDeploy fail on any other."""
    tensors, manifest = parts.weights.tensors, parts.manifest
    table = names.canonical_names(tensors, WEIGHTS_NAME)
    problems = [f"{stored} should be called {name}" for name, stored in table.stored.items() if stored != name]
    problems += [f"{name} has no place here: {reason}" for name, reason in table.dropped.items()]
    if table.kind != manifest.kind:
        problems.append(f"these are the tensors of {table.kind}, the manifest says {manifest.kind}")
    if manifest.kind != "eagle":
        wanted = {names.LM_HEAD} | (_MAPS if manifest.rank_order_ids is not None else frozenset())
        problems += [f"{name} is missing" for name in sorted(wanted - set(tensors))]
        problems += [f"{name} with a full vocabulary" for name in sorted((_MAPS & set(tensors)) - wanted)]
    if manifest.kind == "eagle3" and names.FC_BIAS in tensors:
        problems.append(f"{names.FC_BIAS} has no place in EAGLE-3: vLLM drops it silently")
    if manifest.kind == "eagle" and names.FC_BIAS not in tensors:
        problems.append(f"{names.FC_BIAS} is missing: SGLang would leave its bias uninitialised")
    join(problems)
    return f"{len(table.stored)} tensors, {table.kind}"


def _t2d(parts: Parts) -> str:
    """t2d marks exactly the ids of d2t."""
    manifest = parts.with_map()
    mask = parts.vector("t2d", "bool")
    refuse(len(mask) != manifest.target_vocab, f"expected {manifest.target_vocab} entries, found {len(mask)}")
    ids, marked = parts.ids, np.flatnonzero(mask)
    refuse(not np.array_equal(marked, ids), f"marks {len(marked)} ids that are not those of d2t ({len(ids)})")
    return f"marks the same {len(ids)} ids"


def _ranks(parts: Parts) -> str:
    """The manifest ranks exactly the ids of the map, forced ids first."""
    manifest = parts.manifest
    ranked, ranks = manifest.rank_order_ids, manifest.ranks
    if ranked is None or ranks is None:
        raise SkipCheck("a full vocabulary has no ranks")
    forced = {int(token_id) for token_id in (manifest.vocabulary or {}).get("forced", {})}
    refuse(
        forced != set(ranked[: manifest.num_forced].tolist()),
        f"the first {manifest.num_forced} ranks are not the {len(forced)} forced ids",
    )
    refuse(
        manifest.kind != "eagle" and not np.array_equal(np.sort(ranked), parts.ids),
        "the ranked ids are not those of d2t",
    )
    found = f"{len(ranked)} ids, {manifest.num_forced} of them forced"
    if manifest.num_uncounted is not None:
        found += f", {manifest.num_uncounted} never counted"
    if uncounted_warning(ranks):
        raise Doubt(found)
    return found


def _rows(parts: Parts) -> str:
    """Every lm_head row has the checksum of the row that was written there."""
    manifest, shape = parts.with_lm_head(), parts.checkpoint.info(names.LM_HEAD).shape
    refuse(
        len(shape) != 2 or shape[0] != manifest.draft_vocab,
        f"lm_head.weight is {list(shape)}, expected {manifest.draft_vocab} rows",
    )
    expected = manifest.row_checksums
    if expected is None:
        raise ArtifactError("the manifest has no row checksums")
    found = row_checksums(parts.checkpoint.array(names.LM_HEAD))
    changed = np.flatnonzero((found != expected).any(axis=1))
    if len(changed):
        raise ArtifactError(f"{len(changed)} rows are not as they were written, the first is row {changed[0]}")
    return f"{len(found)} rows"


def _finite_values(parts: Parts) -> str:
    """No tensor holds NaN or infinity."""
    tensors, checkpoint = parts.weights.tensors, parts.checkpoint
    floating = {name: tensors[name].dtype for name in sorted(tensors) if tensors[name].dtype in FLOATS}
    bad = [name for name in floating if not all(all_finite(x, floating[name]) for x in checkpoint.pieces(name))]
    refuse(bool(bad), f"NaN or infinity in {', '.join(bad)}")
    return f"{len(floating)} tensors"


def _config_values(parts: Parts) -> str:
    """config.json is what a conversion writes: values that engines demand, and none that misleads them."""
    head, manifest = parts.head, parts.manifest
    refuse(head.target_vocab != manifest.target_vocab, f"vocab_size: the manifest has {manifest.target_vocab}")
    join(config_differences(config_of(head, manifest.draft_vocab, manifest.flavour), parts.config))
    return f"{len(parts.config)} keys, hidden {head.hidden_size}, {LONG_NAMES[head.dtype_name]}"


def config_differences(expected: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """List the keys whose values, as JSON has them, differ."""
    known, here = ({key: json.dumps(config[key], sort_keys=True) for key in config} for config in (expected, found))
    differing = [key for key in sorted({*known, *here}) if known.get(key) != here.get(key)]
    return [f"{key}: expected {known.get(key, 'no such key')}, found {here.get(key, 'none')}" for key in differing]


def _tap_layers(parts: Parts) -> str:
    """config.json names the tap layers of the manifest."""
    manifest = parts.with_lm_head()
    layers = parts.head.taps(parts.target_layers)
    refuse(layers != manifest.tap_layers, f"config.json names {layers}, the manifest {manifest.tap_layers}")
    return "default of all engines" if layers is None else f"inputs of layers {list(layers)}"


def _freq(parts: Parts) -> str:
    """The token map for SGLang and FR-Spec is a list of exactly the ranked ids."""
    manifest = parts.manifest
    if manifest.rank_order_ids is None:
        raise SkipCheck("a full vocabulary has no token map")
    path = parts.folder / freq_name(manifest.draft_vocab)
    refuse(not path.is_file(), f"{path.name} is missing")
    value = read_pickle(path)
    refuse(
        not isinstance(value, list) or value != manifest.rank_order_ids.tolist(),
        f"{path.name}: expected the {manifest.draft_vocab} ranked ids as a list, in rank order",
    )
    return f"{path.name}: {manifest.draft_vocab} ids"


CHECKS: dict[str, Callable[[Parts], str]] = {
    "manifest": lambda parts: f"{parts.manifest.tool.get('name')} {parts.manifest.tool.get('version')}",
    "config.json": lambda parts: f"{len(parts.config)} keys",
    "model.safetensors": _weights,
    "stray files": _stray_files,
    "file checksums": _file_checksums,
    "tensor checksums": _tensor_checksums,
    "tensor names": _tensor_names,
    "d2t": lambda parts: f"{len(parts.ids)} ascending ids of {parts.manifest.target_vocab}",
    "t2d": _t2d,
    "ranks": _ranks,
    "lm_head rows": _rows,
    "finite values": _finite_values,
    "config values": _config_values,
    "tap layers in config": _tap_layers,
    "freq_N.pt": _freq,
}
"""The checks by name, in order: those of the files first, on which the others build.

Each returns a finding or raises; where it only reads a part, that part says what must hold.
"""
