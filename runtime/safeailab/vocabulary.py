"""Slim an `EaModel`'s draft vocabulary on the way: from counts, from a token map, or from a `DraftVocab`."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from eagle_slim.vocab_tools.counts import TokenCounts, is_counts_file
from eagle_slim.vocab_tools.ranking import rank_vocabulary
from eagle_slim.vocab_tools.token_maps import import_token_map
from eagle_slim.vocab_tools.tokenizer import LoadedTokenizer, load_tokenizer
from eagle_slim.vocab_tools.vocabulary import DraftVocab

from ..drafter.weights import check_available
from ..errors import HeadWarning, UsageError, misfit
from .reading import trained_ids

if TYPE_CHECKING:
    from numpy.typing import NDArray


def choose_ids(
    model: Any,
    draft_vocab: int | DraftVocab | str | Path | None,
    counts: TokenCounts | str | Path | None,
    token_map: DraftVocab | str | Path | None,
    tokenizer: LoadedTokenizer | str | Path | None = None,
) -> NDArray[np.int64] | None:
    """Choose the target ids to draft over: int64 [draft_vocab] ascending; None for all that the head has.

    ``draft_vocab``: a number of ids (of ``counts`` or ``token_map``, best first), a `DraftVocab`, or the path of one or
    of a token map. Ids of a map that the head was not trained on are left out, with a `HeadWarning`; a `DraftVocab`
    that holds such ids is refused. With counts, forced ids come from the target's ``tokenizer``; None is that of the
    model's own folder.

    Raises `UsageError` for a number without a ranking, a ranking without what it ranks by, both rankings at once, and
    ids that the head does not have; `VocabularyError` and `TokenizerError` as the files' readers do.
    """
    if counts is not None and token_map is not None:
        raise UsageError("counts and token_map exclude each other: give one ranking.")
    if isinstance(draft_vocab, str | Path):
        if counts is not None or token_map is not None:
            raise UsageError(
                f"draft_vocab = {str(draft_vocab)!r} names a ranking, and another was given with it: give one."
            )
        if is_counts_file(draft_vocab):
            raise UsageError(
                f"{draft_vocab} holds counts, which do not say how many ids to keep. Give draft_vocab=N and "
                f"counts={str(draft_vocab)!r}."
            )
        draft_vocab, token_map = None, draft_vocab
    available = np.sort(trained_ids(model))
    if isinstance(draft_vocab, DraftVocab):
        if counts is not None or token_map is not None:
            raise UsageError("A DraftVocab says itself which ids it has: leave counts and token_map out.")
        ids = draft_vocab.for_target(_vocab_size(model)).ascending_ids
        check_available(ids, available)
        return ids
    size = _read_size(draft_vocab, len(available))
    if counts is not None:
        return _ranked_by_counts(model, size, counts, available, tokenizer)
    if token_map is not None:
        return _cut_map(model, size, token_map, available)
    if size not in (None, len(available)):
        raise UsageError(f"draft_vocab = {size} needs a ranking of the ids: give counts=, token_map=, or a DraftVocab.")
    return None


def _vocab_size(model: Any) -> int:
    return int(model.ea_layer.embed_tokens.weight.shape[0])


def _read_size(draft_vocab: Any, largest: int) -> int | None:
    if draft_vocab is None:
        return None
    if isinstance(draft_vocab, bool) or not isinstance(draft_vocab, int | np.integer):
        raise misfit("draft_vocab", "a number of ids, a DraftVocab, a path or None (all)", draft_vocab)
    if not 1 <= draft_vocab <= largest:
        raise misfit("draft_vocab", f"from 1 to {largest}, the rows of this head", int(draft_vocab))
    return int(draft_vocab)


def _ranked_by_counts(
    model: Any,
    size: int | None,
    counts: TokenCounts | str | Path,
    available: NDArray[np.int64],
    tokenizer: LoadedTokenizer | str | Path | None,
) -> NDArray[np.int64] | None:
    if size is None:
        raise UsageError("counts rank the ids and do not say how many to keep: give draft_vocab=N with them.")
    if size == len(available):
        return None
    loaded = counts if isinstance(counts, TokenCounts) else TokenCounts.load(counts)
    vocab_size = _vocab_size(model)
    source: Any = model.base_model_name_or_path if tokenizer is None else tokenizer
    vocab = rank_vocabulary(
        loaded, size,
        tokenizer=source if isinstance(source, LoadedTokenizer) else load_tokenizer(str(source), offline=True),
        target_vocab=vocab_size, candidates=None if len(available) == vocab_size else available,
    )  # fmt: skip
    for sentence in vocab.warnings:
        warnings.warn(sentence, HeadWarning, stacklevel=4)
    return vocab.ascending_ids


def _cut_map(
    model: Any, size: int | None, token_map: DraftVocab | str | Path, available: NDArray[np.int64]
) -> NDArray[np.int64]:
    vocab_size = _vocab_size(model)
    vocab = token_map if isinstance(token_map, DraftVocab) else import_token_map(token_map, vocab_size)
    vocab = vocab.for_target(vocab_size)
    is_known = np.isin(vocab.target_ids, available)
    if not is_known.all():
        warnings.warn(
            f"{int((~is_known).sum())} of the map's {vocab.size} ids are not among the {len(available)} that the head "
            "was trained on. They are left out.",
            HeadWarning,
            stacklevel=4,
        )
        num_forced = int(is_known[: vocab.num_forced].sum())
        vocab = DraftVocab(vocab.target_ids[is_known], num_forced, vocab_size, vocab.provenance, vocab.ranked)
    return (vocab if size is None else vocab.prefix(size)).ascending_ids
