"""eagle_slim.json, the manifest beside a slim head: what it was made from, how, and a checksum of everything in it.

Holds no time and no path, so that the same inputs give the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from eagle_slim.vocab_tools.errors import VocabularyError
from eagle_slim.vocab_tools.files import read_object
from eagle_slim.vocab_tools.vocabulary import DraftVocab, checked_provenance
from numpy.typing import NDArray

from ..errors import ArtifactError
from ..names import HeadKind
from .checksums import decode_checksums, encode_checksums
from .files import MANIFEST_NAME

FORMAT_NAME = "eagle-slim artifact"
FORMAT_VERSION = 1

Flavour = Literal["default", "sglang", "lmdeploy"]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The manifest as Python values, by the keys that FORMAT.md describes and in their order.

    Attributes:
        rank_order_ids: int64 [draft_vocab], target ids in rank order; None for a full vocabulary. The rank of a row is
            the position of its id here, and no smaller vocabulary may leave out the first `num_forced`.
        row_checksums: uint8 [draft_vocab, 8], of each `lm_head.weight` row as written; None for EAGLE-1/2.
        tap_layers: inputs of these layers of the target; None for the default of all engines.
    """

    tool: dict[str, str]
    kind: HeadKind
    flavour: Flavour
    draft_vocab: int
    target_vocab: int
    num_forced: int
    head: dict[str, Any]
    target: dict[str, Any]
    lm_head: dict[str, Any] | None
    tokenizer: dict[str, Any] | None
    tap_layers: tuple[int, ...] | None
    coverage: dict[str, Any] | None
    warnings: tuple[str, ...] = ()
    dropped: dict[str, str] = field(default_factory=dict)
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    vocabulary: dict[str, Any] | None
    rank_order_ids: NDArray[np.int64] | None
    row_checksums: NDArray[np.uint8] | None

    @property
    def ranks(self) -> DraftVocab | None:
        """The ranking as a vocabulary; None for a full vocabulary."""
        if self.rank_order_ids is None:
            return None
        provenance = self.vocabulary or {"method": "manifest"}
        return DraftVocab(self.rank_order_ids, self.num_forced, self.target_vocab, checked_provenance(provenance))

    @property
    def num_uncounted(self) -> int | None:
        """Kept ids that the counted text does not hold, forced ones apart; None where that is not known."""
        return None if self.ranks is None else self.ranks.num_uncounted

    @property
    def coverage_summary(self) -> list[dict[str, Any]]:
        """Coverage at the artifact's own size, one entry a source; [] where none was measured."""
        report = self.coverage
        if report is None:
            return []
        at = report["sizes"].index(report["draft_vocab"])
        return [
            {
                "source": source["name"],
                "part": source["part"],
                "tokens": source["tokens"],
                "covered": source["coverage"][at],
                "interval": None if source["low"] is None else [source["low"][at], source["high"][at]],
                "first_ids_instead": source["baseline_first_ids"][at],
            }
            for source in report["sources"]
        ]

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object of the file."""
        arrays = {
            "tap_layers": None if self.tap_layers is None else list(self.tap_layers),
            "warnings": list(self.warnings),
            "rank_order_ids": None if self.rank_order_ids is None else self.rank_order_ids.tolist(),
            "row_checksums": None if self.row_checksums is None else encode_checksums(self.row_checksums),
        }
        values = {each.name: getattr(self, each.name) for each in fields(self)} | arrays
        return {"format": FORMAT_NAME, "format_version": FORMAT_VERSION, **values}

    def to_bytes(self) -> bytes:
        """Return the bytes of the file: indented to be read, with lists of plain values on one line."""
        return (_pretty(self.to_json(), "") + "\n").encode(errors="backslashreplace")

    @classmethod
    def load(cls, folder: Path) -> Manifest:
        """Read a folder's manifest; ArtifactError: missing, not JSON, of another format, or a key of a wrong type."""
        path = folder / MANIFEST_NAME
        if not path.exists():
            problem = f"no {MANIFEST_NAME}; expected a folder that eagle-convert wrote.\nConvert the head first."
            raise ArtifactError.at(folder, problem)
        value = read_object(path, ArtifactError)
        try:
            json.dumps(value, allow_nan=False)
        except ValueError as error:
            raise _broken(path, "it holds NaN or Infinity, which are no JSON") from error
        _check(value, path)
        taps, ranked = value["tap_layers"], value["rank_order_ids"]
        arrays = dict[str, Any](warnings=tuple(value["warnings"]))
        arrays["tap_layers"] = None if taps is None else tuple(taps)
        arrays["rank_order_ids"] = None if ranked is None else np.array(ranked, np.int64)
        if value["row_checksums"] is not None:
            try:
                arrays["row_checksums"] = decode_checksums(value["row_checksums"], value["draft_vocab"])
            except ValueError as error:
                raise _broken(path, f"row_checksums: {error}") from error
        return cls(**{key: value[key] for key in _TYPES} | arrays)


_TYPES: dict[str, Any] = {
    **dict.fromkeys(("kind", "flavour"), str),
    **dict.fromkeys(("draft_vocab", "target_vocab", "num_forced"), int),
    **dict.fromkeys(("tool", "head", "target", "dropped", "files"), dict),
    **dict.fromkeys(("lm_head", "tokenizer", "coverage", "vocabulary"), dict | None),
    **dict.fromkeys(("tap_layers", "rank_order_ids"), list | None),
    "warnings": list,
    "row_checksums": str | None,
}
"""Types that JSON gives the keys."""

_NAMES = ("name", "repo_id", "revision")
_TEXTS = (
    *(("head", name) for name in (*_NAMES, "subfolder", "d2t_form")),
    *(("target", name) for name in (*_NAMES, "wheel")),
    *(("tokenizer", name) for name in ("hash", "chat_template_hash")),
    *(("lm_head", name) for name in ("from", "tensor", "source_dtype", "dtype")),
)
"""Keys within those objects that name something, or are null or absent."""


def _check(value: dict[str, Any], path: Path) -> None:
    if value.get("format") != FORMAT_NAME:
        raise _broken(path, f"not a manifest of eagle-slim (no format: {FORMAT_NAME!r})")
    if (found := value.get("format_version")) != FORMAT_VERSION:
        raise _broken(path, f"format_version {found!r}, this eagle-slim reads {FORMAT_VERSION}")
    for key, kind in _TYPES.items():
        if key not in value or not isinstance(value[key], kind) or isinstance(value[key], bool):
            found = "nothing" if key not in value else type(value[key]).__name__
            raise _broken(path, f"{key}: expected {getattr(kind, '__name__', kind)}, found {found}")
    for key, part in _TEXTS:
        if not isinstance(text := (value[key] or {}).get(part), str | None):
            raise _broken(path, f"{key}: {part}: expected a text or null, found {type(text).__name__}")
    for name, entry in value["files"].items():
        is_entry = isinstance(entry, dict) and isinstance(entry.get("tensors", {}), dict)
        if not is_entry or type(entry.get("size_bytes")) is not int:
            raise _broken(path, f"files: {name}: expected an object with size_bytes, and tensors an object")
    try:
        checked_provenance(value["vocabulary"] or {}, "vocabulary")
    except VocabularyError as error:
        raise _broken(path, str(error).rstrip(".")) from error
    for key, kind in (("warnings", str), ("tap_layers", int)):
        if not all(type(each) is kind for each in value[key] or ()):
            raise _broken(path, f"{key}: expected {kind.__name__} in it alone, found {value[key]!r:.80}")
    if value["kind"] not in get_args(HeadKind) or value["flavour"] not in get_args(Flavour):
        raise _broken(path, f"unknown kind {value['kind']!r} or flavour {value['flavour']!r}")
    rows, vocab, ranked = value["draft_vocab"], value["target_vocab"], value["rank_order_ids"]
    if not 0 < rows <= vocab < 2**31:
        raise _broken(path, f"draft_vocab is {rows} of a target_vocab of {vocab}")
    if ranked is None and rows < vocab:
        raise _broken(path, f"rank_order_ids: expected {rows} ids, found none")
    if ranked is not None:
        if len(ranked) != rows or not all(type(each) is int and 0 <= each < vocab for each in ranked):
            raise _broken(path, f"rank_order_ids: expected {rows} ids below {vocab}, found {len(ranked)} entries")
        if not 0 <= value["num_forced"] <= rows:
            raise _broken(path, f"num_forced is {value['num_forced']} of {rows} ids")


def _broken(where: Path, problem: str) -> ArtifactError:
    return ArtifactError.at(where, f"{problem}.\nConvert the head again.")


def _pretty(value: Any, indent: str) -> str:
    deeper = indent + " "
    if isinstance(value, Mapping) and value:
        entries = [f"{deeper}{json.dumps(str(key))}: {_pretty(entry, deeper)}" for key, entry in value.items()]
        return "{\n" + ",\n".join(entries) + f"\n{indent}}}"
    if isinstance(value, (list, tuple)) and any(isinstance(entry, (Mapping, list, tuple)) for entry in value):
        entries = [f"{deeper}{_pretty(entry, deeper)}" for entry in value]
        return "[\n" + ",\n".join(entries) + f"\n{indent}]"
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
