"""Checks of an artifact alone: every byte as in its manifest, and the rules of FORMAT.md, which has the reasons."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from eagle_slim.vocab_tools.errors import EagleSlimError
from eagle_slim.vocab_tools.files import read_object
from eagle_slim.vocab_tools.token_maps import ids_from_d2t, read_pickle
from eagle_slim.vocab_tools.vocabulary import uncounted_warning
from numpy.typing import NDArray

from .. import names
from ..artifact.checksums import row_checksums, sha256_file
from ..artifact.files import CARD_NAME, CONFIG_NAME, FILE_NAMES, WEIGHTS_NAME, freq_name
from ..artifact.manifest import Manifest
from ..errors import ArtifactError
from ..heads.draft_head import DraftHead
from ..heads.open import QUANT_NAME, head_from_checkpoint
from ..rows.checkpoint import Checkpoint
from ..rows.files import FLOATS, LONG_NAMES, TORCH_SUFFIXES, SafetensorsFile, all_finite
from ..slim.tensors import config_of

_READ_TOO = (*TORCH_SUFFIXES, ".safetensors", ".safetensors.index.json", ".bin.index.json", ".gguf", QUANT_NAME)

Status = Literal["ok", "warning", "failed", "skipped"]

Outcome = tuple[Status, str]
"""Status of a check, and its finding or reason."""


class SkippedError(Exception):
    """A check cannot be made, for the reason that the message gives."""


def settled(found: str, *problems: str) -> Outcome:
    """Return a failure with all problems, or, where there are none, ok with the finding."""
    return ("failed", "; ".join(problems)) if problems else ("ok", found)


class ArtifactParts:
    """The parts of an artifact folder that checks read, each read once; reading one raises as its reader does."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cached_property
    def manifest(self) -> Manifest:
        """Manifest of the folder."""
        return Manifest.load(self.folder)

    @cached_property
    def config(self) -> dict[str, Any]:
        """Content of config.json."""
        return read_object(self.folder / CONFIG_NAME, ArtifactError)

    @cached_property
    def weights(self) -> SafetensorsFile:
        """Header of the weights file, and its mapped data."""
        return SafetensorsFile(self.folder / WEIGHTS_NAME)

    @cached_property
    def digests(self) -> dict[str, str]:
        """Checksum, SHA-256, of every tensor of the weights file."""
        return {name: self.checkpoint.sha256(name) for name in self.weights.tensors}

    @cached_property
    def mask(self) -> NDArray[np.bool_]:
        """Values of t2d, bool [target_vocab]."""
        return self._vector("t2d", "bool")

    @cached_property
    def ids(self) -> NDArray[np.int64]:
        """Target id of each row, int64 [draft_vocab], unique, ascending and in range; of EAGLE-1/2 of the token map."""
        ranked, vocab = self.manifest.rank_order_ids, self.manifest.target_vocab
        if ranked is None:
            return np.arange(vocab)
        if self.manifest.kind == "eagle":
            return np.sort(ranked)
        ids = ids_from_d2t(self._vector("d2t", "int64"), form="offset", target_vocab=vocab)
        falls = np.flatnonzero(np.diff(ids) <= 0)
        if len(falls):
            raise ArtifactError(f"ids do not ascend: row {falls[0] + 1} is below the row before it")
        return ids

    @cached_property
    def head(self) -> DraftHead:
        """Head that the artifact is, opened as any other."""
        return head_from_checkpoint(self.checkpoint, self.config, str(self.folder))

    @property
    def target_layers(self) -> int | None:
        """Decoder layers of the target, where the manifest records them."""
        layers = self.manifest.target.get("num_hidden_layers")
        return layers if isinstance(layers, int) else None

    @property
    def checkpoint(self) -> Checkpoint:
        """Tensors of the weights file, held against no checksums."""
        return Checkpoint.of(self.weights)

    def _vector(self, name: str, dtype: str) -> np.ndarray[Any, Any]:
        """Read a vector of "int64" or "bool"; ArtifactError for any other tensor, CheckpointError for none."""
        info = self.checkpoint.info(name)
        found = LONG_NAMES.get(info.dtype, info.dtype)
        if found != dtype or len(info.shape) != 1:
            raise ArtifactError(f"expected a vector of {dtype}, found {found} {list(info.shape)}")
        return self.checkpoint.array(name).reshape(-1).view(dtype)


def no_lm_head(manifest: Manifest) -> str | None:
    """Return why a check of LM head or map is not made: of EAGLE-1/2; None where it is."""
    return "EAGLE-1/2 heads have no map and no LM head of their own" if manifest.kind == "eagle" else None


def _full(manifest: Manifest, what: str) -> str | None:
    return f"a full vocabulary has no {what}" if manifest.rank_order_ids is None else None


@dataclass(frozen=True)
class Rule:
    """One check, `run` once all that it needs could be read.

    `needs` names `ArtifactParts`, in this order: where one cannot be read, this check fails with the reason, and every
    later one that needs it is skipped. `skip` returns the reason why an artifact has nothing to check, or None.
    """

    name: str
    run: Callable[[ArtifactParts], Outcome]
    needs: tuple[str, ...] = ("manifest",)
    skip: Callable[[Manifest], str | None] = lambda _: None

    def outcome(self, parts: ArtifactParts, unread: set[str]) -> Outcome:
        """Make the check; `unread` are the parts that could not be read, to which it adds."""
        for need in self.needs:
            if need in unread:
                return "skipped", f"{need} could not be read"
            try:
                getattr(parts, need)
            except EagleSlimError as error:
                unread.add(need)
                return "failed", str(error)
            if need == "manifest" and (reason := self.skip(parts.manifest)) is not None:
                return "skipped", reason
        try:
            return self.run(parts)
        except SkippedError as reason:
            return "skipped", str(reason)
        except EagleSlimError as error:
            return "failed", str(error)


def _weights(parts: ArtifactParts) -> Outcome:
    weights = parts.weights
    if weights.metadata.get("format") != "pt":
        return "failed", f"metadata: expected format 'pt', found {weights.metadata}"
    return "ok", f"{len(weights.tensors)} tensors, {weights.size_bytes:,} bytes"


def _stray_files(parts: ArtifactParts) -> Outcome:
    """Check that no other weights lie in the folder (SafeAILab reads pytorch_model.bin first), nor a quantisation."""
    others = sorted({path.name for path in parts.folder.iterdir()} - {*parts.manifest.files})
    # The token map, also a pickle, is no weights file.
    token_map = freq_name(parts.manifest.draft_vocab)
    weights = ", ".join(name for name in others if name.endswith(_READ_TOO) and name != token_map)
    return ("failed", f"{weights}: an engine may read this, too, or instead; remove it") if weights else ("ok", "none")


def _file_checksums(parts: ArtifactParts) -> Outcome:
    manifest = parts.manifest
    written = {CONFIG_NAME} if manifest.rank_order_ids is None else {CONFIG_NAME, freq_name(manifest.draft_vocab)}
    problems = [f"the manifest does not record {name}" for name in sorted(written - manifest.files.keys())]
    small = {name: entry for name, entry in manifest.files.items() if name != WEIGHTS_NAME}
    for name, entry in small.items():
        path = parts.folder / name
        if not re.fullmatch(FILE_NAMES, name) or "sha256" not in entry:
            problems.append(f"{name} is no file of an artifact, or has no checksum")
        elif not path.is_file():
            problems.append(f"{name} is missing")
        # People edit a model card, and the Hub adds to it.
        elif name != CARD_NAME and (path.stat().st_size, sha256_file(path)) != (entry["size_bytes"], entry["sha256"]):
            problems.append(f"{name} is not as it was written")
    return settled(f"{len(small)} files", *problems)


def _tensor_checksums(parts: ArtifactParts) -> Outcome:
    entry, size_bytes = parts.manifest.files.get(WEIGHTS_NAME, {}), parts.weights.size_bytes
    if size_bytes != entry.get("size_bytes"):
        return "failed", f"expected {entry.get('size_bytes')} bytes, found {size_bytes}"
    recorded: Mapping[str, str] = entry.get("tensors", {})
    parts.checkpoint.expect(entry.get("header_sha256", ""), recorded)
    changed = ", ".join(sorted(name for name, digest in parts.digests.items() if digest != recorded[name]))
    return ("failed", f"{changed} not as written") if changed else ("ok", f"header and {len(recorded)} tensors")


def _tensor_names(parts: ArtifactParts) -> Outcome:
    """Check that there are the tensors of the format alone, by canonical name: vLLM and LMDeploy fail on any other."""
    tensors, manifest = parts.weights.tensors, parts.manifest
    table = names.canonical_names(tensors, WEIGHTS_NAME)
    problems = [f"{stored} should be called {name}" for name, stored in table.stored.items() if stored != name]
    problems += [f"{name} has no place here: {reason}" for name, reason in table.dropped.items()]
    if table.kind != manifest.kind:
        problems.append(f"these are the tensors of {table.kind}, the manifest says {manifest.kind}")
    if manifest.kind != "eagle":
        maps = names.MAPS if manifest.rank_order_ids is not None else ()
        problems += [f"{name} is missing" for name in sorted((*maps, names.LM_HEAD)) if name not in tensors]
        problems += [f"{name} with a full vocabulary" for name in names.MAPS if name in tensors and name not in maps]
    if manifest.kind == "eagle3" and names.FC_BIAS in tensors:
        problems.append(f"{names.FC_BIAS} has no place in EAGLE-3: vLLM drops it silently")
    if manifest.kind == "eagle" and names.FC_BIAS not in tensors:
        problems.append(f"{names.FC_BIAS} is missing: SGLang would leave its bias uninitialised")
    return settled(f"{len(table.stored)} tensors, {table.kind}", *problems)


def _t2d(parts: ArtifactParts) -> Outcome:
    vocab, marked, ids = parts.manifest.target_vocab, np.flatnonzero(parts.mask), parts.ids
    if len(parts.mask) != vocab:
        return "failed", f"expected {vocab} entries, found {len(parts.mask)}"
    if not np.array_equal(marked, ids):
        return "failed", f"marks {len(marked)} ids that are not those of d2t ({len(ids)})"
    return "ok", f"marks the same {len(ids)} ids"


def _ranks(parts: ArtifactParts) -> Outcome:
    manifest, ranks = parts.manifest, parts.manifest.ranks
    assert ranks is not None
    ranked = ranks.target_ids
    forced = {int(token_id) for token_id in (manifest.vocabulary or {}).get("forced", {})}
    if forced != set(ranked[: manifest.num_forced].tolist()):
        return "failed", f"the first {manifest.num_forced} ranks are not the {len(forced)} forced ids"
    if not np.array_equal(np.sort(ranked), parts.ids):
        return "failed", "the ranked ids are not those of d2t"
    detail = f"{len(ranked)} ids, {manifest.num_forced} of them forced"
    if manifest.num_uncounted is not None:
        detail += f", {manifest.num_uncounted} never counted"
    return "warning" if uncounted_warning(ranks) else "ok", detail


def _rows(parts: ArtifactParts) -> Outcome:
    manifest, shape = parts.manifest, parts.checkpoint.info(names.LM_HEAD).shape
    if len(shape) != 2 or shape[0] != manifest.draft_vocab:
        return "failed", f"lm_head.weight is {list(shape)}, expected {manifest.draft_vocab} rows"
    if manifest.row_checksums is None:
        return "failed", "the manifest has no row checksums"
    checksums = row_checksums(parts.checkpoint.array(names.LM_HEAD))
    changed = np.flatnonzero((checksums != manifest.row_checksums).any(axis=1))
    if len(changed):
        return "failed", f"{len(changed)} rows are not as they were written, the first is row {changed[0]}"
    return "ok", f"{len(checksums)} rows"


def _finite_values(parts: ArtifactParts) -> Outcome:
    tensors, checkpoint = parts.weights.tensors, parts.checkpoint
    floating = {name: tensors[name].dtype for name in sorted(tensors) if tensors[name].dtype in FLOATS}
    bad = [name for name in floating if not all(all_finite(x, floating[name]) for x in checkpoint.pieces(name))]
    return ("failed", f"NaN or infinity in {', '.join(bad)}") if bad else ("ok", f"{len(floating)} tensors")


def _config_values(parts: ArtifactParts) -> Outcome:
    """Check that config.json is what a conversion writes: what engines demand, and nothing that misleads them."""
    head, manifest = parts.head, parts.manifest
    if head.target_vocab != manifest.target_vocab:
        return "failed", f"vocab_size: the manifest has {manifest.target_vocab}"
    differing = config_differences(config_of(head, manifest.draft_vocab, manifest.flavour), parts.config)
    return settled(f"{len(parts.config)} keys, hidden {head.hidden_size}, {LONG_NAMES[head.dtype_name]}", *differing)


def config_differences(expected: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """List the keys whose values, as JSON has them, differ."""
    known, here = ({key: json.dumps(config[key], sort_keys=True) for key in config} for config in (expected, found))
    differing = [key for key in sorted({*known, *here}) if known.get(key) != here.get(key)]
    return [f"{key}: expected {known.get(key, 'no such key')}, found {here.get(key, 'none')}" for key in differing]


def _tap_layers(parts: ArtifactParts) -> Outcome:
    layers, recorded = parts.head.taps(parts.target_layers), parts.manifest.tap_layers
    if layers != recorded:
        return "failed", f"config.json names {layers}, the manifest {recorded}"
    return "ok", "default of all engines" if layers is None else f"inputs of layers {list(layers)}"


def _token_map(parts: ArtifactParts) -> Outcome:
    ranked, rows = parts.manifest.rank_order_ids, parts.manifest.draft_vocab
    assert ranked is not None
    path = parts.folder / freq_name(rows)
    if not path.is_file():
        return "failed", f"{path.name} is missing"
    value = read_pickle(path)
    if not isinstance(value, list) or value != ranked.tolist():
        return "failed", f"{path.name}: expected the {rows} ranked ids as a list, in rank order"
    return "ok", f"{path.name}: {rows} ids"


_STORED = ("manifest", "weights")
RULES = (
    Rule("manifest", lambda parts: ("ok", f"{parts.manifest.tool.get('name')} {parts.manifest.tool.get('version')}")),
    Rule("config.json", lambda parts: ("ok", f"{len(parts.config)} keys"), ("config",)),
    Rule("model.safetensors", _weights, ("weights",)),
    Rule("stray files", _stray_files),
    Rule("file checksums", _file_checksums),
    Rule("tensor checksums", _tensor_checksums, (*_STORED, "digests")),
    Rule("tensor names", _tensor_names, _STORED),
    Rule(
        "d2t",
        lambda parts: ("ok", f"{len(parts.ids)} ascending ids of {parts.manifest.target_vocab}"),
        (*_STORED, "ids"),
        lambda manifest: no_lm_head(manifest) or _full(manifest, "map"),
    ),
    Rule("t2d", _t2d, (*_STORED, "mask", "ids"), lambda manifest: no_lm_head(manifest) or _full(manifest, "map")),
    Rule("ranks", _ranks, (*_STORED, "ids"), lambda manifest: _full(manifest, "ranks")),
    Rule("lm_head rows", _rows, _STORED, no_lm_head),
    Rule("finite values", _finite_values, ("weights",)),
    Rule("config values", _config_values, (*_STORED, "config", "head")),
    Rule("tap layers in config", _tap_layers, (*_STORED, "config", "head"), no_lm_head),
    Rule("freq_N.pt", _token_map, ("manifest",), lambda manifest: _full(manifest, "token map")),
)
"""The checks of an artifact alone, in order: those of the files first, on which the others build."""
