"""Read the target id of each row of an LM head (d2t, t2d), in every form that trainers store."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from eagle_slim.vocab_tools.errors import VocabularyError
from eagle_slim.vocab_tools.token_maps import ids_from_d2t
from numpy.typing import NDArray

from ..errors import MismatchError
from . import names
from .draft_head import LazyTensors

D2tForm = Literal["auto", "offset", "absolute"]

_INTEGERS = {"I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8, "U8": np.uint8, "BOOL": np.uint8}


def read_map(tensors: LazyTensors, config: dict[str, Any], where: str, form: D2tForm) -> NDArray[np.int64] | None:
    """Read the target id of each LM-head row, int64 [draft_vocab]; None for the identity.

    Fills in `vocab_size` and `draft_vocab_size` of `config`.

    Raises:
        MismatchError: map, LM head and configuration disagree, or the map breaks its rules.
    """
    d2t, t2d = _integers(tensors, "d2t", where), _integers(tensors, "t2d", where)
    vocab = vocab_size(config, None if t2d is None else len(t2d), where)
    config["vocab_size"] = vocab
    stated = config.get("draft_vocab_size")
    rows = tensors.shape(names.LM_HEAD)[0] if names.LM_HEAD in tensors else None
    # Trainers store the trivial map of a full vocabulary too: zero offsets, every token allowed.
    is_trivial = (d2t is None or (len(d2t) == vocab and not d2t.any())) and (t2d is None or bool(t2d.all()))
    problem, advice = None, "Fetch the complete head."
    if is_trivial:
        if rows not in (None, vocab):
            problem = (
                f"lm_head.weight has {rows} rows for a vocabulary of {vocab}, and no d2t says which tokens they are"
            )
        elif stated not in (None, vocab) and rows is None:
            problem = f"draft_vocab_size is {stated} of {vocab}, but there is neither lm_head.weight nor d2t"
        elif stated not in (None, vocab):
            problem = f"draft_vocab_size: expected {vocab}, the rows of lm_head.weight, found {stated!r}"
            advice = "Correct config.json."
    elif rows is None:
        problem = "a map (d2t, t2d) without lm_head.weight: the rows that were trained with it are missing"
    elif d2t is None:
        problem = "t2d without d2t: which row of lm_head.weight belongs to which token is not known"
    elif len(d2t) != rows or stated not in (None, rows):
        problem = f"lm_head.weight has {rows} rows, d2t {len(d2t)} entries, and draft_vocab_size is {stated}"
        advice = "Correct config.json." if len(d2t) == rows else "The files are of two heads: fetch them again."
    if problem is not None:
        raise MismatchError.at(where, f"{problem}.\n{advice}")
    if is_trivial or d2t is None:
        config["draft_vocab_size"] = vocab
        return None
    config["draft_vocab_size"] = rows
    mask = None if t2d is None else t2d.astype(bool)
    try:
        ids = ids_from_d2t(d2t, t2d=mask, form=None if form == "auto" else form, target_vocab=vocab)
    except VocabularyError as error:
        raise MismatchError.at(where, f"{error}") from error
    return np.asarray(ids, dtype=np.int64)


def vocab_size(config: Mapping[str, Any], t2d_length: int | None, where: str) -> int:
    """Find V, in config.json or by the length of `t2d`.

    Raises:
        MismatchError: neither says it, or they disagree.
    """
    stated: int | None = config.get("vocab_size")
    if stated is None and t2d_length is not None:
        return t2d_length
    if stated is None:
        raise MismatchError.at(where, "vocab_size: expected the target's vocabulary size.\nCorrect config.json.")
    if t2d_length not in (None, stated):
        problem = f"t2d has {t2d_length} entries, vocab_size is {stated}: expected the same number."
        raise MismatchError.at(where, f"{problem}\nCorrect config.json, or fetch the head again.")
    return stated


def _integers(tensors: LazyTensors, name: str, where: str) -> NDArray[np.int64] | None:
    if name not in tensors:
        return None
    info = tensors.info(name)
    if info.dtype not in _INTEGERS or len(info.shape) != 1:
        problem = (
            f"{name}: expected a vector of integers, found {info.dtype} {list(info.shape)}.\nFetch the head again."
        )
        raise MismatchError.at(where, problem)
    values = tensors.source.raw(tensors.stored[name]).reshape(-1).view(_INTEGERS[info.dtype])
    return values.astype(np.int64)
