"""Token maps of other tools → DraftVocab; formats.py lists them."""

from __future__ import annotations

import codecs
import pickle
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import VocabularyError, errors_of
from ..files import check_named, read_json, regular_file
from .draft_vocab import TARGET_VOCAB_FROM, DraftVocab, is_native, whole_numbers
from .formats import NPY_NAMES, PICKLES
from .token_map import D2TForm, ids_from_d2t

_MANIFEST_NAME = "eagle_slim.json"


def import_token_map(path: str | Path, target_vocab: int | None = None, d2t_form: D2TForm | None = None) -> DraftVocab:
    """Read a token map; its content shows which format it has.

    A bare tensor in a `.pt` file is a list of ids, unless the file is named `d2t...` or its values can only be offsets.
    An artifact of `eagle-convert` keeps its rank order. Ids may stand in a `.txt` file, and under "token_ids" in JSON.

    Args:
        path: file, or a folder: an artifact, one with d2t.npy, or one with a model.safetensors that holds d2t.
        target_vocab: rows of the target's LM head. Without it the length of t2d is taken, else the largest id + 1.
        d2t_form: how d2t is to be read when the file does not show it (see `token_map.ids_from_d2t`).

    Returns:
        The vocabulary, in the file's order for a list of ids and for rows that do not ascend.

    Raises:
        UsageError: the name is empty.
        VocabularyError: missing, unreadable, a pickle that would run code, duplicates, ids out of range, a d2t in
            absolute or undecidable form.
    """
    check_named(path)
    path = Path(path)
    source = _read(path)
    with errors_of(path):
        if isinstance(source, DraftVocab):
            return source if target_vocab is None else source.for_target(target_vocab)
        provenance = {"method": "token map", "file": path.name}
        if source.d2t is None:
            return _from_ids(whole_numbers(source.ids, "ids"), target_vocab, provenance)
        return _from_d2t(whole_numbers(source.d2t, "d2t"), source.t2d, target_vocab, d2t_form, provenance)


def _from_ids(ids: NDArray[np.int64], target_vocab: int | None, provenance: dict[str, Any]) -> DraftVocab:
    ids, provenance["warnings"] = _without_appended(ids)
    if target_vocab is None:
        target_vocab = int(ids.max(initial=0)) + 1
        provenance[TARGET_VOCAB_FROM] = "largest id"
    return DraftVocab(ids, 0, target_vocab, {**provenance, "form": "ids in rank order"})


def _without_appended(ids: NDArray[np.int64]) -> tuple[NDArray[np.int64], list[str]]:
    """Drop what FR-Spec's script repeats, and say so.

    For a tokenizer that puts a BOS before what it encodes, the script takes [BOS, EOS] for the EOS and appends both to
    a list that holds BOS, and perhaps EOS, already: asked for r ids, it writes r + 1 entries, at most r of them
    different.
    """
    _, first = np.unique(ids, return_index=True)
    repeated = np.setdiff1d(np.arange(len(ids)), first)
    if len(ids) - 2 not in repeated or len(repeated) > 2 or repeated[0] < len(ids) - 2:
        return ids, []
    again = " and ".join(f"id {token_id}" for token_id in ids[repeated].tolist())
    warning = (
        f"the token map has {len(ids)} entries, with {again} twice, as FR-Spec's script writes it for tokenizers "
        f"that add a BOS; the first occurrence is kept, which leaves {len(first)} ids"
    )
    return np.delete(ids, repeated), [warning]


def _from_d2t(
    rows: NDArray[np.int64],
    t2d: NDArray[Any] | None,
    target_vocab: int | None,
    form: D2TForm | None,
    provenance: dict[str, Any],
) -> DraftVocab:
    if target_vocab is None and t2d is not None:
        target_vocab = len(t2d)
    if target_vocab is None:
        # Large enough for either form; the real range is not known, so only duplicates can be found.
        ids = ids_from_d2t(rows, None, form, target_vocab=int(rows.max(initial=0)) + len(rows) + 1)
        target_vocab = int(ids.max()) + 1
        provenance[TARGET_VOCAB_FROM] = "largest id"
    else:
        ids = ids_from_d2t(rows, t2d, form, target_vocab=target_vocab)
    ascending = bool(np.all(np.diff(ids) > 0))
    provenance["form"] = "d2t, rows ascending" if ascending else "d2t, rows in rank order"
    return DraftVocab(ids, 0, target_vocab, provenance, ranked=not ascending)


@dataclass(frozen=True, eq=False)
class _Map:
    """The content of a file: ids in rank order, or d2t with or without t2d."""

    ids: Any = None
    d2t: Any = None
    t2d: NDArray[Any] | None = None


def _read(path: Path) -> DraftVocab | _Map:
    if path.is_dir():
        return _read_folder(path)
    regular_file(path, VocabularyError, "token map")
    if path.suffix == ".safetensors":
        return _read_safetensors(path)
    if path.suffix == ".npy":
        return _read_npy(path)
    if path.suffix in PICKLES:
        value = read_pickle(path)
    elif path.suffix == ".json" or _starts_as_json(path):
        value = read_json(path, VocabularyError)
    elif path.suffix in (".txt", ".csv"):
        value = _read_text(path)
    else:
        endings = ".pt, .pth, .bin, .safetensors, .npy, .json or .txt"
        found = path.suffix or "nothing"
        raise VocabularyError(f"{path}: a token map ends in {endings}, not {found!r}.", format=None)
    if is_native(value):
        return DraftVocab.from_json(value, str(path))
    if isinstance(value, dict):
        return _from_mapping(value, path)
    return _Map(d2t=value) if _is_d2t(value, path) else _Map(ids=value)


def _is_d2t(value: Any, path: Path) -> bool:
    """Tell offsets from ids by the file's name, or by values that no list of ids has."""
    if not isinstance(value, np.ndarray) or path.name.startswith("d2t"):
        return isinstance(value, np.ndarray)
    if value.ndim != 1 or value.dtype.kind not in "iu" or not len(value):
        return False
    # Offsets of ascending ids never fall, and repeat where ids are consecutive; a damaged list of ids does not do both.
    steps = np.diff(value.astype(np.int64))
    never_falls = bool((steps >= 0).all()) and bool((steps == 0).any())
    return int(value.min()) < 0 or never_falls


def _starts_as_json(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(64).removeprefix(codecs.BOM_UTF8).lstrip()[:1] in (b"[", b"{")


def _read_text(path: Path) -> list[int]:
    """Ids as text, separated by spaces, commas or the ends of lines."""
    parts = path.read_text(encoding="utf-8-sig", errors="replace").replace(",", " ").split()
    wrong = next((part for part in parts if not (part.isascii() and part.isdigit())), None)
    if wrong is not None:
        raise VocabularyError.at(path, f"expected ids, found {wrong[:40]!r}.", found=wrong)
    return [int(part) for part in parts]


def _from_mapping(value: dict[Any, Any], path: Path) -> _Map:
    if "token_ids" in value:
        return _Map(ids=value["token_ids"])
    if "d2t" in value:
        t2d = value.get("t2d")
        return _Map(d2t=value["d2t"], t2d=None if t2d is None else np.asarray(t2d))
    keys = ", ".join(repr(key) for key in list(value)[:5])
    raise VocabularyError(
        f"{path}: expected a list of ids, token_ids, or d2t (and t2d); found an object with keys {keys}.",
        keys=list(value),
    )


def _read_folder(path: Path) -> DraftVocab | _Map:
    if (path / _MANIFEST_NAME).is_file():
        return _read_artifact(path)
    for name, read in (("d2t.npy", _read_npy), ("model.safetensors", _read_safetensors)):
        if (path / name).is_file():
            return read(path / name)
    raise VocabularyError.at(
        path, "a folder without d2t.npy and without model.safetensors. Name the token map's file.", missing="d2t.npy"
    )


def _read_artifact(path: Path) -> DraftVocab:
    """The rank order that the manifest of an artifact keeps, with its forced ids."""
    where = str(path / _MANIFEST_NAME)
    manifest = read_json(where, VocabularyError)
    wanted = {"rank_order_ids": list, "num_forced": int, "target_vocab": int}
    for key, kind in wanted.items():
        if not isinstance(manifest, dict) or type(manifest.get(key)) is not kind:
            raise VocabularyError.at(
                where, f"{key}: expected {kind.__name__}; a full vocabulary has no ranks.", field=key
            )
    provenance = manifest.get("vocabulary") or {"method": "token map", "file": path.name}
    with errors_of(where):
        ids = whole_numbers(manifest["rank_order_ids"], "rank_order_ids")
        return DraftVocab(ids, manifest["num_forced"], manifest["target_vocab"], provenance)


def _read_safetensors(path: Path) -> _Map:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "numpy") as file:
            names = list(file.keys())
            found = {short: [name for name in names if name.rsplit(".", 1)[-1] == short] for short in ("d2t", "t2d")}
            if len(found["d2t"]) != 1 or len(found["t2d"]) > 1:
                what = ", ".join(found["d2t"] + found["t2d"]) or "neither d2t nor t2d"
                raise VocabularyError(f"{path}: expected one tensor d2t and at most one t2d, found {what}.", found=what)
            d2t = file.get_tensor(found["d2t"][0])
            t2d = file.get_tensor(found["t2d"][0]) if found["t2d"] else None
    # numpy does not know bfloat16 and raises a TypeError.
    except (SafetensorError, OSError, TypeError) as error:
        raise VocabularyError(f"{path}: not a readable safetensors file: {error}.") from error
    return _Map(d2t=d2t, t2d=t2d)


def _read_npy(path: Path) -> _Map:
    if path.name != "d2t.npy":
        raise VocabularyError(f"{path}: numpy maps are read from d2t.npy, with t2d.npy beside it.")
    arrays = []
    for file in (path, path.with_name(NPY_NAMES[1])):
        if not file.is_file():
            continue
        try:
            arrays.append(np.load(file, allow_pickle=False))
        except (OSError, ValueError, EOFError) as error:
            raise VocabularyError.at(file, f"not a readable numpy file: {error}.") from error
    return _Map(d2t=arrays[0], t2d=arrays[1] if len(arrays) > 1 else None)


def read_pickle(path: Path) -> Any:
    """Read a `.pt` file without running anything in it; tensors become numpy arrays.

    Raises:
        VocabularyError: damaged, or it holds more than lists and tensors.
    """
    import torch

    try:
        with warnings.catch_warnings():
            # torch warns about odd pickle protocols; whatever it returns is checked below.
            warnings.simplefilter("ignore", UserWarning)
            value = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise VocabularyError.at(
            path,
            f"refused, because the pickle holds more than lists and tensors and could run code when loaded "
            f"({_first_line(error)}). Ask its author for a plain list of ids.",
            refused="pickle",
        ) from error
    # torch's reader raises all kinds of errors on a damaged file: struct.error, AssertionError, KeyError, ...
    except Exception as error:
        raise VocabularyError(f"{path}: not a readable torch file: {_first_line(error)}.") from error
    if isinstance(value, dict):
        return {key: _numpy(part) for key, part in value.items()}
    return _numpy(value)


def _numpy(value: Any) -> Any:
    import torch

    if not isinstance(value, torch.Tensor):
        return value
    # numpy does not know bfloat16; a float map is refused later, by its dtype.
    plain = value.float() if value.dtype == torch.bfloat16 else value
    return np.asarray(plain.detach().numpy())


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)[:200]
