"""Open a draft head of any published spelling as one `DraftHead`: canonical names, a flat configuration, absolute ids.

A head's own files are checked here, and only small tensors (the map) are read; whether it fits its target is checked
where the target is at hand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from eagle_slim.vocab_tools.errors import VocabularyError, check_choice
from eagle_slim.vocab_tools.files import read_object
from eagle_slim.vocab_tools.token_maps import ids_from_d2t
from numpy.typing import NDArray

from .. import names
from ..artifact.checksums import sha256_file
from ..artifact.files import CONFIG_NAME, WEIGHTS_NAME
from ..artifact.manifest import Manifest
from ..errors import CheckpointError, MismatchError, UnsupportedHeadError
from ..rows.checkpoint import Checkpoint, open_checkpoint
from ..rows.files import WEIGHTS, check_blob
from ..sources.source import ResolvedSource, open_head_source
from .check import check_dtypes, check_eagle, check_eagle3, fc_shape, settle_taps
from .config import SIZES, metadata_target, normalise_config, quantisation, refuse_foreign, says_dflash, unread_warnings
from .dflash import in_one_level, settle_dflash
from .draft_head import DraftHead, LazyTensors
from .taps import with_tap_layers

__all__ = ["D2tForm", "DraftHead", "head_from_checkpoint", "open_head", "read_config"]

D2tForm = Literal["auto", "offset", "absolute"]
QUANT_NAME = "hf_quant_config.json"
"""ModelOpt's configuration of a quantisation, which vLLM reads where config.json has none."""

_Vector = NDArray[np.int64] | None
_INTEGERS = {"I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8, "U8": np.uint8, "BOOL": np.uint8}

_UNSET_MAP = "a trainer whose map was never set leaves zeros too, and there is no t2d that shows which it is"


def open_head(
    source: str | Path | ResolvedSource | None = None,
    *,
    revision: str | None = None,
    subfolder: str | None = None,
    offline: bool = False,
    d2t_form: D2tForm = "auto",
    tap_layers: Sequence[int] | None = None,
) -> DraftHead:
    """Open a draft head: EAGLE-3 in any spelling, full or with a map, EAGLE-1/2, or a DFlash draft.

    Args:
        source: folder or Hub repository, or what `open_head_source` returned for it; None is the built-in head.
        d2t_form: "offset" (target id = i + d2t[i]), "absolute", or "auto", which tells them apart by the rules of
            `vocab_tools.token_maps` and refuses the absolute form.
        tap_layers: overrides what the configuration says; inputs of these decoder layers.

    Raises as `open_head_source`; CheckpointError for damaged, incomplete or unsafe weights, UnsupportedHeadError for a
    head or a tensor that is not converted, MismatchError where configuration and tensors disagree, or a map breaks its
    rules.
    """
    check_choice("d2t_form", d2t_form, get_args(D2tForm))
    if not isinstance(source, ResolvedSource):
        source = open_head_source(source, revision=revision, offline=offline, subfolder=subfolder)
    # A draft of another kind is called by its name even where its weights have unusual ones.
    config = read_config(source.folder, source.name, source.manifest)
    refuse_foreign(config, source.name)
    checkpoint = open_checkpoint(source.folder)
    checkpoint.check_index()
    for file in checkpoint.files:
        check_blob(file.path)
    if source.manifest is not None:
        recorded = source.manifest.files.get(WEIGHTS_NAME, {})
        checkpoint.expect(recorded.get("header_sha256", ""), recorded.get("tensors", {}))
    head = head_from_checkpoint(checkpoint, config, source.name, d2t_form=d2t_form, tap_layers=tap_layers)
    if head.kind == "dflash" and "mask_embedding.pt" in source.files:
        problem = "mask_embedding.pt replaces a row of the target's embedding, and is not carried over."
        raise UnsupportedHeadError.at(source.name, f"{problem}\nServe the draft as it is.")
    read = [file.path.name for file in checkpoint.files]
    if others := [name for name in source.files if WEIGHTS.fullmatch(name) and name not in read]:
        problem = f"{', '.join(others[:4])}: not read, as {read[0]} is; an engine may read them instead, or too"
        head = replace(head, warnings=(*head.warnings, f"{problem}: keep one head alone in its folder"))
    return replace(head, source=source)


def read_config(folder: Path, where: str, manifest: Manifest | None = None) -> dict[str, Any]:
    """Read a head's config.json, held against a manifest beside it, with ModelOpt's quantisation from its own file."""
    path, quantised = folder / CONFIG_NAME, folder / QUANT_NAME
    config = read_object(path, CheckpointError)
    if manifest is not None and sha256_file(path) != manifest.files.get(CONFIG_NAME, {}).get("sha256"):
        problem = f"{CONFIG_NAME} is not as the manifest beside it records.\nConvert the head again."
        raise CheckpointError.at(where, problem)
    # ModelOpt writes the file with a null algorithm beside unquantised heads.
    if quantised.exists() and quantisation(found := read_object(quantised, CheckpointError)) is not None:
        config["quantization_config"] = found
    return config


def head_from_checkpoint(
    checkpoint: Checkpoint,
    config: Mapping[str, Any],
    location: str,
    *,
    d2t_form: D2tForm = "auto",
    tap_layers: Sequence[int] | None = None,
) -> DraftHead:
    """Open a head, without its source, from an open checkpoint and its configuration; raises as `open_head`."""
    refuse_foreign(config, location)
    is_dflash = says_dflash(config)
    table = names.canonical_names(checkpoint.names, location, is_dflash=is_dflash)
    if table.kind == "dflash" and not is_dflash:
        raise names.other_draft("dflash", location)
    whole = in_one_level(config) if is_dflash else {}
    # RoPE and windows of a DFlash draft, which may differ by layer, are copied unread.
    part = {key: whole[key] for key in (*SIZES, "hidden_act", "rms_norm_eps") if key in whole}
    flat = normalise_config(part if is_dflash else config, location)
    if table.kind == "eagle3" and flat.get("tie_word_embeddings") and names.EMBEDDING in table.stored:
        # Of two tied matrices transformers stores the embedding alone.
        table.stored.setdefault(names.LM_HEAD, table.stored[names.EMBEDDING])
    tensors = LazyTensors(checkpoint, table.stored)
    check_dtypes(tensors, location)
    ids, taps = None, None
    warnings = unread_warnings({**whole, **flat})
    d2t, t2d = (_integers(tensors, name, location) for name in names.MAPS)
    stated = flat.get("vocab_size")
    vocab = stated if t2d is None else len(t2d)
    if vocab is None or stated not in (None, vocab):
        also = "" if t2d is None else f" and {vocab} entries of t2d"
        problem = f"vocab_size: expected the target's vocabulary size, found {stated}{also}"
        raise MismatchError.at(location, f"{problem}.\nCorrect config.json, or fetch the head again.")
    flat["vocab_size"] = vocab
    if table.kind == "eagle":
        if tap_layers is not None:
            problem = "--tap-layers for an EAGLE-1/2 head, which reads the last hidden state alone."
            raise MismatchError.at(location, f"{problem}\nLeave the option out.")
        warnings += check_eagle(tensors, flat, location)
    else:
        ids = _target_ids(d2t, t2d, tensors, flat, location, d2t_form)
        if ids is not None and not bool(np.all(np.diff(ids) > 0)):
            warnings.append("the map was not in ascending order; rows and map are sorted together")
    if table.kind == "dflash":
        taps = settle_dflash(tensors, flat, whole, location, tap_layers)
    if table.kind == "eagle3":
        warnings += check_eagle3(tensors, flat, location)
        if d2t_form == "auto" and ids is not None and t2d is None and (ids == np.arange(len(ids))).all():
            warnings.append(f"d2t is all zero, so the rows are those of the first {len(ids)} ids; {_UNSET_MAP}")
        if names.FC_BIAS in tensors:
            table.dropped[table.stored[names.FC_BIAS]] = "all zero, and not part of EAGLE-3"
        taps = settle_taps(tensors, flat, location, tap_layers)
        if taps == () and names.FC in tensors and tensors.shape(names.FC) != fc_shape(flat, 1):
            reason = table.dropped[table.stored[names.FC]] = "the head reads the target's last hidden state as it is"
            warnings.append(f"fc.weight {list(tensors.shape(names.FC))} is left out: by config.json {reason}")
        if tap_layers is not None and taps:
            flat = with_tap_layers(flat, taps)
    kept = {name: at for name, at in table.stored.items() if name not in names.MAPS and at not in table.dropped}
    return DraftHead(
        kind=table.kind,
        config=flat,
        tensors=LazyTensors(checkpoint, kept),
        draft_ids_to_target=ids,
        tap_layers=taps,
        warnings=tuple(warnings),
        location=location,
        source_config=dict(config),
        target_name=metadata_target(config),
        dropped=table.dropped,
    )


def _target_ids(
    d2t: _Vector, t2d: _Vector, tensors: LazyTensors, config: dict[str, Any], where: str, form: D2tForm
) -> _Vector:
    """Find the target id of each LM-head row, int64 [draft_vocab], None for the identity; set `draft_vocab_size`."""
    vocab, stated = config["vocab_size"], config.get("draft_vocab_size")
    rows = tensors.shape(names.LM_HEAD)[0] if names.LM_HEAD in tensors else None
    is_tied = tensors.stored.get(names.LM_HEAD) == tensors.stored.get(names.EMBEDDING)
    # Trainers store the trivial map of a full vocabulary too: zero offsets, every token allowed.
    is_trivial = (d2t is None or (len(d2t) == vocab and not d2t.any())) and (t2d is None or bool(t2d.all()))
    problem, advice = None, "Fetch the complete head."
    if is_trivial:
        if rows is not None and rows > vocab:
            problem, advice = f"lm_head.weight has {rows} rows, and vocab_size is {vocab}", "Correct config.json."
        elif rows not in (None, vocab):
            problem = f"lm_head.weight has {rows} rows of {vocab}, and no d2t says which tokens they are"
        elif stated not in (None, vocab):
            problem = f"draft_vocab_size is {stated}, but there is no lm_head.weight of so many rows, and no d2t"
    elif rows is None or (d2t is not None and len(d2t) < rows and is_tied):
        problem = "a map (d2t, t2d) without lm_head.weight: the rows that were trained with it are missing"
    elif d2t is None:
        problem = "t2d without d2t: which row of lm_head.weight belongs to which token is not known"
    elif len(d2t) != rows or stated not in (None, rows):
        problem = f"lm_head.weight has {rows} rows, d2t {len(d2t)} entries, and draft_vocab_size is {stated}"
        advice = "Correct config.json." if len(d2t) == rows else "The files are of two heads: fetch them again."
    if problem is not None:
        raise MismatchError.at(where, f"{problem}.\n{advice}")
    config["draft_vocab_size"] = vocab if is_trivial else rows
    if is_trivial or d2t is None:
        return None
    mask = None if t2d is None else t2d.astype(bool)
    try:
        return ids_from_d2t(d2t, t2d=mask, form=None if form == "auto" else form, target_vocab=vocab)
    except VocabularyError as error:
        raise MismatchError.at(where, f"{error}") from error


def _integers(tensors: LazyTensors, name: str, where: str) -> _Vector:
    if name not in tensors:
        return None
    info = tensors.info(name)
    if info.dtype not in _INTEGERS or len(info.shape) != 1:
        problem = f"{name}: expected a vector of integers, found {info.dtype} {list(info.shape)}."
        raise MismatchError.at(where, f"{problem}\nFetch the head again.")
    return tensors.source.array(tensors.stored[name]).reshape(-1).view(_INTEGERS[info.dtype]).astype(np.int64)
