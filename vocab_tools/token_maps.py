"""Token maps: the target id of each draft row, in the forms of published heads and of other tools' files.

docs/vocabulary.md lists the loaders with their versions. Read alone: ids as text in other layouts (NAME.csv, comments
behind `#`), {"token_ids": ids} in JSON, {"d2t": ..., "t2d": ...} in JSON or a `.pt` file, a tensor of ids in a `.pt`
file, a bare d2t in any file whose name begins with d2t, the folder of a head, and an artifact with its rank order.

d2t has two published forms: offsets (SafeAILab, vLLM, SGLang), `target_id = row + d2t[row]`, and absolute ids, which no
engine reads. Ids (1, 4, 5) in a vocabulary of 6:

    d2t, offset form      (1, 3, 3)
    d2t, absolute form    (1, 4, 5)
    t2d                   (F, T, F, F, T, T), the mask over the target's vocabulary

d2t is written with ascending ids, as trainers expect; a vocabulary read from such a file has no smaller prefix.
"""

from __future__ import annotations

import codecs
import io
import json
import re
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .errors import UsageError, VocabularyError, check_choice, errors_of
from .files import check_named, read_json, read_text, regular_file, write_file
from .forced import forced_ids
from .target import TargetConfig
from .tokenizer import LoadedTokenizer, check_tokenizer
from .vocabulary import (
    DraftVocab,
    Provenance,
    check_ids,
    checked_provenance,
    doubts_of_order,
    is_native,
    padding_warning,
    some_ids,
    whole_numbers,
)

D2TForm = Literal["offset", "absolute"]
Loader = Literal["sglang", "fr-spec", "vllm", "vllm-mtp", "mtplx", "tensorfold", "head", "eagle-slim"]

_PICKLES = (".pt", ".pth", ".bin")

# Endings of the names of each loader's files, and whether ids stand in them in rank order.
_FORMS: dict[Loader, tuple[tuple[str, ...], bool]] = {
    **dict.fromkeys(("sglang", "fr-spec"), (_PICKLES, True)),
    "vllm": ((".json", *_PICKLES), False),
    "vllm-mtp": ((".txt", ".npy"), False),
    "mtplx": ((".json",), True),
    "tensorfold": ((".txt",), True),
    "head": ((".safetensors",), False),
    "eagle-slim": ((".json",), False),
}
# Limits that a loader does not report.
_LIMITS: dict[Loader, str] = {
    "sglang": "the list is for --speculative-algorithm EAGLE and NEXTN (with EAGLE3 it is ignored) and for one rank "
    "(--tp 1): of several, each looks the ids up among its own rows of the LM head",
    "fr-spec": "start it with the number in the file's name as --V, and the file beside the head",
    "vllm": "no released vLLM (up to 0.33.0) has draft_token_map: pull requests 59740 and 60226 propose it",
    "vllm-mtp": "VLLM_MTP_DRAFT_VOCAB is a patch of vLLM: MiaAI-Lab's recipes read .txt, qwen3.8-Flash-DGX reads .npy; "
    "one rank only, except with MiaAI-Lab's recipe for two machines",
    "mtplx": "MTPLX_FRSPEC_DRAFT=1 switches it on, MTPLX_FRSPEC_N takes the first ids",
    "tensorfold": "of GLM (GLM53_TF_DRAFT_VOCAB) each of two ranks drafts over the ids of its half only",
}
LOADERS = tuple(_FORMS)
_TIED = "if the LM head is tied to the embedding, SGLang keeps all its rows, yet looks their numbers up in the list"
_MANIFEST_NAME = "eagle_slim.json"
_WHERE_FORM = " (of `eagle-convert` for the map in HEAD, of `eagle-vocab import` for any other)"


def d2t_from_ids(target_ids: ArrayLike) -> NDArray[np.int64]:
    """Return the offset form of a map, int64 [draft_vocab], for the target id of each row in row order."""
    ids = np.asarray(target_ids, np.int64)
    return ids - np.arange(len(ids), dtype=np.int64)


def t2d_from_ids(target_ids: ArrayLike, target_vocab: int) -> NDArray[np.bool_]:
    """Return the membership mask, bool [target_vocab]; raises VocabularyError for duplicate or out-of-range ids."""
    return np.isin(np.arange(target_vocab), check_ids(target_ids, target_vocab, "t2d"))


def ids_from_d2t(
    d2t: ArrayLike, t2d: ArrayLike | None = None, form: D2TForm | None = None, *, target_vocab: int
) -> NDArray[np.int64]:
    """Return the target id of each row, int64 [draft_vocab], in row order.

    `t2d` shows which form a map has. Without it, repeated or negative values mean offsets; values that are all distinct
    and valid as ids may be either, such as (0, 1, 2, ...), and are refused unless `form` says which it is.

    `d2t` has [draft_vocab] integers, `t2d` [target_vocab] booleans or 0 and 1. Raises VocabularyError for a map that is
    ambiguous, contradicts `t2d`, or holds duplicate or out-of-range ids.
    """
    rows = whole_numbers(np.asarray(d2t), "d2t")
    if len(rows) == 0:
        raise VocabularyError("d2t: there are no rows.")
    ids: dict[D2TForm, NDArray[np.int64]] = {"offset": rows + np.arange(len(rows), dtype=np.int64), "absolute": rows}
    if t2d is not None:
        form = _form_by_mask(ids, np.asarray(t2d), target_vocab, form)
    elif form is None and len(np.unique(rows)) == len(rows) and rows.min() >= 0 and rows.max() < target_vocab:
        doubt = "so they may be ids or offsets (target_id = row + d2t[row]), and no t2d decides"
        advice = f"Say which with --d2t-form absolute or offset{_WHERE_FORM}."
        raise VocabularyError(f"d2t: all {len(rows)} values are distinct and valid as ids, {doubt}. {advice}")
    return check_ids(ids[form or "offset"], target_vocab, "d2t")


def _form_by_mask(
    ids: dict[D2TForm, NDArray[np.int64]], mask: NDArray[Any], target_vocab: int, form: D2TForm | None
) -> D2TForm:
    """Return the form in which d2t gives the ids that t2d marks, of `ids` in either."""
    if mask.shape != (target_vocab,):
        raise VocabularyError(f"t2d has shape {list(mask.shape)}, but the target's vocabulary is [{target_vocab}].")
    if mask.dtype.kind not in "biuO" or not np.isin(mask, (0, 1)).all():
        raise VocabularyError("t2d: expected a mask of booleans, or of 0 and 1.")
    expected = np.flatnonzero(mask)
    fitting = [name for name, values in ids.items() if np.array_equal(np.sort(values), expected)]
    if not fitting:
        marked = f"t2d marks {len(expected)} ids, and the {len(ids['offset'])} rows of d2t"
        problem = f"{marked} reach them neither as offsets nor as absolute ids"
        raise VocabularyError(f"d2t and t2d disagree: {problem}. The file is damaged, or its maps are of two models.")
    if form is not None and form not in fitting:
        raise VocabularyError(f"--d2t-form {form} was given, but t2d shows the {fitting[0]} form.")
    if fitting == ["absolute"] and form is None:
        problem = "absolute ids (t2d shows it), where engines expect offsets (target_id = row + d2t[row])"
        raise VocabularyError(f"d2t holds {problem}. Accept it with --d2t-form absolute{_WHERE_FORM}.")
    return form or fitting[0]


def import_token_map(
    path: str | Path,
    target_vocab: int | None = None,
    d2t_form: D2TForm | None = None,
    tokenizer: LoadedTokenizer | None = None,
) -> DraftVocab:
    """Read a token map of any format at the top of this module; its content shows which.

    `path` may be a folder: an artifact, or one with a model.safetensors that holds d2t. Without `target_vocab` the
    length of t2d is taken, else the tokenizer's size or the largest id + 1. With the target's tokenizer, warnings tell
    ids of no token, and forced ones that are left out. A list keeps its order, and of repeated ids the first place.

    Raises UsageError for an empty name, and for `d2t_form` of a map that is no d2t; TokenizerError for our own format,
    made with another tokenizer; VocabularyError for a file that is missing, unreadable or would run code, for
    duplicates in a d2t and ids out of range, and for a d2t in absolute or undecidable form.
    """
    check_named(path)
    path = Path(path)
    source = _read(path)
    if d2t_form is not None and (isinstance(source, DraftVocab) or "d2t" not in source):
        raise UsageError(f"{path}: --d2t-form is for a d2t, and this map lists ids. Leave it out.")
    with errors_of(path):
        if isinstance(source, DraftVocab):
            read = source if target_vocab is None else source.for_target(target_vocab)
        else:
            read = _vocabulary(source, path, target_vocab, d2t_form)
    return read if tokenizer is None else _checked(read, tokenizer)


def _checked(vocab: DraftVocab, tokenizer: LoadedTokenizer) -> DraftVocab:
    """Warn about ids that no token has, and about forced ids that are left out."""
    known, warnings = vocab.provenance.get("tokenizer_hash"), list(vocab.warnings)
    if known is not None:
        check_tokenizer(tokenizer, known, "the vocabulary")
    beyond = np.setdiff1d(vocab.target_ids, tokenizer.real_ids)
    if len(beyond):
        last = f"whose last is {tokenizer.vocab_size - 1} (padding rows, or another model's list)"
        warnings.append(f"{len(beyond)} ids belong to no token of the tokenizer, {last}: {some_ids(beyond)}")
    forced = forced_ids(tokenizer)
    missing = np.setdiff1d(forced.ids, vocab.target_ids).tolist()
    if missing:
        why = [f"{token_id} ({forced.reasons[token_id]})" for token_id in missing[:8]] + ["..."] * (len(missing) > 8)
        left_out = f"{len(missing)} of {len(forced.ids)} ids that a draft vocabulary should hold are left out"
        warnings.append(f"{left_out}, so a draft stops before each of them: {'; '.join(why)}")
    account: Provenance = {**vocab.provenance, "tokenizer_hash": tokenizer.tokenizer_hash, "warnings": warnings}
    target_vocab = vocab.target_vocab
    if vocab.is_size_inferred and tokenizer.vocab_size > target_vocab:
        target_vocab, account["target_vocab_from"] = tokenizer.vocab_size, "tokenizer"
    return replace(vocab, provenance=account, target_vocab=target_vocab)


def _vocabulary(source: dict[str, Any], path: Path, target_vocab: int | None, d2t_form: D2TForm | None) -> DraftVocab:
    provenance: Provenance = {"method": "token map", "file": path.name}
    warnings: list[str] = []
    if is_d2t := "d2t" in source:
        rows, t2d = whole_numbers(source["d2t"], "d2t"), source.get("t2d")
        if t2d is not None:
            # JSON may have anything there.
            t2d = np.asarray(t2d, None if isinstance(t2d, np.ndarray) else object)
            target_vocab = t2d.size if target_vocab is None else target_vocab
        # Large enough for either form; where the real range is not known, only duplicates can be found.
        limit = int(rows.max(initial=0)) + len(rows) + 1 if target_vocab is None else target_vocab
        ids = ids_from_d2t(rows, t2d, d2t_form, target_vocab=limit)
    else:
        ids = whole_numbers(source["ids"], "ids")
        named = re.fullmatch(r"freq_(\d+)", path.stem)
        if named and int(named[1]) != len(ids):
            holds = f"{int(named[1])} ids and holds {len(ids)}"
            warnings.append(f"the file is named for {holds}: FR-Spec reads as many as its --V says")
        _, first = np.unique(ids, return_index=True)
        again = np.delete(ids, first)
        if len(again) > len(first):
            problem = f"{len(ids)} entries name {len(first)} ids: a mask (t2d) or counts"
            raise VocabularyError(f"{problem}. Give d2t, or ids.")
        # FR-Spec's script repeats an id for tokenizers that add a BOS.
        if len(again):
            places = f"{len(ids)} entries, and again id {some_ids(again)}"
            warnings.append(f"the token map has {places}; the first place counts, which leaves {len(first)} ids")
            ids = ids[np.sort(first)]
    if target_vocab is None:
        target_vocab = int(ids.max(initial=0)) + 1
        provenance["target_vocab_from"] = "largest id"
    ascends = bool(np.all(np.diff(ids) > 0))
    forms = ("d2t, rows in rank order", "d2t, rows ascending") if is_d2t else ("ids in rank order", "ids, ascending")
    provenance["form"] = forms[ascends]
    provenance["warnings"] = [*warnings, *doubts_of_order(ids)]
    return DraftVocab(ids, 0, target_vocab, provenance, ranked=not (is_d2t and ascends))


def _read(path: Path) -> DraftVocab | dict[str, Any]:
    """Return our own format as it is, other content as "ids", or as "d2t" with or without "t2d"."""
    if path.is_dir():
        if (path / _MANIFEST_NAME).is_file():
            return _read_artifact(path)
        path = path / "model.safetensors"
        if not path.is_file():
            raise VocabularyError(f"{path.parent}: a folder without {path.name}. Name the token map's file.")
    regular_file(path, VocabularyError, "token map")
    if path.suffix == ".safetensors":
        return _read_safetensors(path)
    readers = {**dict.fromkeys(_PICKLES, read_pickle), ".txt": _read_text, ".csv": _read_text, ".npy": _read_array}
    is_json = path.suffix == ".json"
    if path.suffix not in (".json", *_PICKLES):
        with path.open("rb") as file:
            is_json = file.read(64).removeprefix(codecs.BOM_UTF8).lstrip()[:1] in (b"[", b"{")
    if is_json:
        value = read_json(path, VocabularyError)
    elif path.suffix in readers:
        value = readers[path.suffix](path)
    else:
        endings = ".pt, .pth, .bin, .safetensors, .json, .npy or .txt"
        raise VocabularyError(f"{path}: a token map ends in {endings}, not {path.suffix or 'nothing'!r}.")
    if is_native(value):
        return DraftVocab.from_json(value, str(path))
    if isinstance(value, dict):
        if "d2t" in value:
            return value
        if not {"ids", "token_ids"} & value.keys():
            keys = ", ".join(repr(key) for key in list(value)[:5])
            wanted = "expected a list of ids, ids, token_ids, or d2t (and t2d)"
            raise VocabularyError(f"{path}: {wanted}; found an object with keys {keys}.")
        return {"ids": value.get("ids", value.get("token_ids"))}
    return {"d2t" if path.name.startswith("d2t") else "ids": value}


def _read_text(path: Path) -> list[int]:
    """Read ids as text, separated by spaces, commas or the ends of lines; `#` begins a comment."""
    lines = read_text(path, VocabularyError).splitlines()
    rows = [row for line in lines if (row := line.partition("#")[0].replace(",", " ").split())]
    words = [word for row in rows for word in row]
    for word in words:
        if not (word.isascii() and word.isdigit() and len(word) < 20):
            raise VocabularyError(f"{path}: expected ids, found {word[:40]!r}. Leave ids alone, without a header.")
    # A header may be numbers, too: pandas names a column of a series 0.
    if len(rows) > 1 and set(map(len, rows[1:] if len(rows) > 2 else rows)) in ({2}, {3}):
        raise VocabularyError(f"{path}: {len(rows[1])} numbers a line are a table. Put the ids alone on one line.")
    return [int(word) for word in words]


def _read_array(path: Path) -> Any:
    try:
        return np.load(path, allow_pickle=False)
    except Exception as error:  # of all kinds on a damaged header
        raise VocabularyError(f"{path}: not a readable array of numbers: {error}.") from error


def _read_artifact(path: Path) -> DraftVocab:
    """Read the rank order that the manifest of an artifact keeps, with its forced ids."""
    where = str(path / _MANIFEST_NAME)
    manifest = read_json(where, VocabularyError)
    wanted = {"rank_order_ids": list, "num_forced": int, "target_vocab": int}
    for key, kind in wanted.items():
        if not isinstance(manifest, dict) or type(manifest.get(key)) is not kind:
            raise VocabularyError(f"{where}: {key}: expected {kind.__name__}; a full vocabulary has no ranks.")
    provenance = manifest.get("vocabulary") or {"method": "token map", "file": path.name}
    with errors_of(where):
        ids = whole_numbers(manifest["rank_order_ids"], "rank_order_ids")
        account = checked_provenance(provenance, "vocabulary")
        return DraftVocab(ids, manifest["num_forced"], manifest["target_vocab"], account)


def _read_safetensors(path: Path) -> dict[str, Any]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "numpy") as file:
            names = list(file.keys())
            by_name = {short: [name for name in names if name.rsplit(".", 1)[-1] == short] for short in ("d2t", "t2d")}
            if len(by_name["d2t"]) != 1 or len(by_name["t2d"]) > 1:
                what = ", ".join(map(repr, by_name["d2t"] + by_name["t2d"])) or "neither d2t nor t2d"
                raise VocabularyError(f"{path}: expected one tensor d2t and at most one t2d, found {what}.")
            d2t = file.get_tensor(by_name["d2t"][0])
            t2d = file.get_tensor(by_name["t2d"][0]) if by_name["t2d"] else None
    # numpy does not know bfloat16 and raises a TypeError.
    except (SafetensorError, OSError, TypeError) as error:
        raise VocabularyError(f"{path}: not a readable safetensors file: {error}.") from error
    return {"d2t": d2t, "t2d": t2d}


def read_pickle(path: Path) -> Any:
    """Read a `.pt` file of lists and tensors, given as arrays; VocabularyError for any other, of which nothing runs."""
    import torch

    def as_numpy(value: Any) -> Any:
        # Weights beside a map may be of types that numpy lacks.
        return value.numpy() if isinstance(value, torch.Tensor) and not value.is_floating_point() else value

    try:
        with warnings.catch_warnings():
            # torch warns about odd pickle protocols; whatever it returns is checked below.
            warnings.simplefilter("ignore", UserWarning)
            value = torch.load(path, map_location="cpu", weights_only=True)
        return {key: as_numpy(part) for key, part in value.items()} if isinstance(value, dict) else as_numpy(value)
    # torch's reader raises all kinds of errors on a damaged file, and numpy TypeError for bfloat16.
    except Exception as error:
        # torch names the cause amid advice on how to switch the protection off.
        if code := re.search(r"(?:GLOBAL|Can only (?:build|create)[^\n]* got) (\S+)", str(error)):
            why = f"the pickle holds more than lists and tensors and would call {code[1]} when it is loaded"
            raise VocabularyError(f"{path}: refused, because {why}. Ask its author for a plain list of ids.") from error
        cause = str(error).rpartition("WeightsUnpickler error:")[2].strip().partition("\n")[0]
        raise VocabularyError(f"{path}: not a readable torch file: {cause[:200] or type(error).__name__}.") from error


def export_token_map(
    vocab: DraftVocab, path: str | Path, loader: Loader, target: TargetConfig | None = None
) -> list[str]:
    """Write a vocabulary as a loader takes it; the bytes depend on the ids only, not on the file's name.

    Returns warnings that the loader does not give: its limits, and oddities of these ids. Raises UsageError where the
    loader takes no file of this name, needs ids in rank order and these have none, or cannot serve the target with
    fewer rows; OSError where the file cannot be written.
    """
    path = Path(path)
    check_choice("--for", loader, LOADERS)
    endings, is_ranked = _FORMS[loader]
    if path.suffix not in endings:
        raise UsageError(f"{path}: a file --for {loader} ends in {' or '.join(endings)}.")
    if loader == "fr-spec" and path.stem != f"freq_{vocab.size}":
        raise UsageError(f"{path}: --for fr-spec the name is freq_{vocab.size}.pt: FR-Spec finds the file by --V.")
    if is_ranked and not vocab.ranked:
        problem = "ids are listed in rank order, but these come from a map in ascending order, which has none"
        advice = "Rank them with counts first (`eagle-vocab rank --candidates`)."
        raise UsageError(f"--for {loader} {problem}. {advice}")
    warnings = [_LIMITS[loader]] if loader in _LIMITS else []
    if loader == "sglang" and (target is None or target.tied is not False):
        if target is not None and target.tied:
            raise UsageError(f"--target {target.label} ties its LM head: {_TIED}. Serve it without a list.")
        warnings.append(f"{_TIED}; --target checks it{'' if target is None else f', and {target.label} does not say'}")
    if target is not None:
        missing = np.setdiff1d(np.array(target.eos_ids, np.int64), vocab.target_ids)
        added = "; vLLM adds them to its rows" if loader == "vllm" else ""
        if len(missing):
            warnings.append(f"ids that end a text of {target.label} are not in the list: {some_ids(missing)}{added}")
    if loader == "eagle-slim":
        vocab.save(path)
        return warnings
    ids = vocab.target_ids if is_ranked else vocab.ascending_ids
    write_file(path, _encode(ids, vocab.target_vocab, loader, path.suffix))
    return warnings + padding_warning(vocab.size)


def _encode(ids: NDArray[np.int64], target_vocab: int, loader: Loader, suffix: str) -> bytes:
    if loader == "head":
        from safetensors.numpy import save

        maps = {"d2t": d2t_from_ids(ids), "t2d": t2d_from_ids(ids, target_vocab)}
        return bytes(save(maps, metadata={"format": "pt"}))
    listed, buffer = ids.tolist(), io.BytesIO()
    if suffix == ".txt":
        buffer.writelines(b"%d\n" % token_id for token_id in listed)
    elif suffix == ".json":
        buffer.write(json.dumps({"ids": listed} if loader == "mtplx" else listed).encode() + b"\n")
    elif suffix == ".npy":
        np.save(buffer, ids)
    else:
        import torch

        torch.save(listed, buffer)
    return buffer.getvalue()
