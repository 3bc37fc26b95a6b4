"""Draft rows ↔ target ids, in the two published forms.

Offset form (SafeAILab, vLLM, SGLang, SpecForge): `target_id = row + d2t[row]`. Absolute form: `target_id = d2t[row]`,
which no engine reads, though files with it exist. Ids (1, 4, 5) in a vocabulary of 6:

    d2t, offset form      (1, 3, 3)
    d2t, absolute form    (1, 4, 5)
    t2d                   (F, T, F, F, T, T)

`t2d` is the membership mask over the target's vocabulary, and `nonzero(t2d) == d2t + arange` when rows ascend.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..errors import VocabularyError
from .draft_vocab import check_ids, whole_numbers

D2TForm = Literal["offset", "absolute"]

# The option of eagle-convert is about the head's own map.
_OF_A_FILE = " (where this is a token map's own file, of eagle-vocab import)"


def d2t_from_ids(target_ids: ArrayLike) -> NDArray[np.int64]:
    """Return the offset form of a map, int64 [draft_vocab], for the target id of each row in row order."""
    ids = np.asarray(target_ids, np.int64)
    return ids - np.arange(len(ids), dtype=np.int64)


def t2d_from_ids(target_ids: ArrayLike, target_vocab: int) -> NDArray[np.bool_]:
    """Return the membership mask, bool [target_vocab].

    Raises:
        VocabularyError: duplicate or out-of-range ids.
    """
    ids = check_ids(target_ids, target_vocab, "t2d")
    mask = np.zeros(target_vocab, np.bool_)
    mask[ids] = True
    return mask


def ids_from_d2t(
    d2t: ArrayLike, t2d: ArrayLike | None = None, form: D2TForm | None = None, *, target_vocab: int
) -> NDArray[np.int64]:
    """Return the target id of each row, int64 [draft_vocab], in row order.

    `t2d` shows which form a map has. Without it, repeated or negative values mean offsets; values that are all distinct
    and valid as ids look absolute, and are refused unless `form` says which it is. (Offsets of
    ascending ids never fall, so without a repeat every step must skip an id; a map such as (0, 1, 2, ...) reads
    either way.)

    Args:
        d2t: integers [draft_vocab].
        t2d: mask [target_vocab], bool or 0/1 integers.
        form: "offset" or "absolute" where the map does not show it; it must still agree with `t2d`.
        target_vocab: size of the target's vocabulary.

    Raises:
        VocabularyError: the map is ambiguous, contradicts `t2d`, or holds duplicate or out-of-range ids.
    """
    values = whole_numbers(np.asarray(d2t), "d2t")
    offset_ids = values + np.arange(len(values), dtype=np.int64)
    if len(values) == 0:
        raise VocabularyError("d2t: there are no rows.", found=0)
    if t2d is not None:
        ids = _ids_by_mask(values, offset_ids, _mask(t2d, target_vocab), form)
    elif form is not None:
        ids = offset_ids if form == "offset" else values
    elif len(np.unique(values)) < len(values) or values.min() < 0:
        ids = offset_ids
    elif values.max() < target_vocab:
        raise VocabularyError(
            f"d2t: all {len(values)} values are distinct and valid as ids, so this looks like absolute ids, where "
            "engines expect offsets (target_id = row + d2t[row]), and there is no t2d to decide. "
            f"Say which it is with --d2t-form absolute or --d2t-form offset{_OF_A_FILE}.",
            form="unknown",
        )
    else:
        ids = offset_ids
    return check_ids(ids, target_vocab, "d2t")


def _mask(t2d: ArrayLike, target_vocab: int) -> NDArray[np.bool_]:
    mask: NDArray[Any] = np.asarray(t2d)
    if mask.shape != (target_vocab,):
        raise VocabularyError(
            f"t2d has shape {list(mask.shape)}, but the target's vocabulary is [{target_vocab}].",
            tensor="t2d",
            found=list(mask.shape),
        )
    if mask.dtype.kind not in "biu" or not np.isin(mask, (0, 1)).all():
        raise VocabularyError("t2d: expected a mask of booleans, or of 0 and 1.", tensor="t2d", expected="mask")
    return mask.astype(np.bool_)


def _ids_by_mask(
    values: NDArray[np.int64], offset_ids: NDArray[np.int64], mask: NDArray[np.bool_], form: str | None
) -> NDArray[np.int64]:
    expected = np.flatnonzero(mask)
    candidates: dict[str, NDArray[np.int64]] = {"offset": offset_ids, "absolute": values}
    fitting = [name for name, ids in candidates.items() if np.array_equal(np.sort(ids), expected)]
    if not fitting:
        raise VocabularyError(
            f"d2t and t2d disagree: t2d marks {len(expected)} ids, and the {len(values)} rows of d2t reach "
            "them neither as offsets nor as absolute ids. The file is damaged, or its maps are of two models.",
            form="neither",
        )
    if form is not None and form not in fitting:
        raise VocabularyError(f"--d2t-form {form} was given, but t2d shows the {fitting[0]} form.", form=fitting[0])
    if fitting == ["absolute"] and form is None:
        raise VocabularyError(
            "d2t holds absolute ids (t2d shows it), where engines expect offsets "
            f"(target_id = row + d2t[row]). Accept it with --d2t-form absolute{_OF_A_FILE}.",
            form="absolute",
        )
    return candidates[form or fitting[0]]
