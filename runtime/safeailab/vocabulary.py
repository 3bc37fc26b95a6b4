"""Slimming the draft vocabulary of an `EaModel`: by counts, a token map, or a `DraftVocab`."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
from eagle_slim.vocab_tools.counts import TokenCounts, is_counts_file
from eagle_slim.vocab_tools.ranking import rank_vocabulary
from eagle_slim.vocab_tools.token_maps import import_token_map
from eagle_slim.vocab_tools.tokenizer import LoadedTokenizer, load_tokenizer
from eagle_slim.vocab_tools.vocabulary import DraftVocab
from numpy.typing import NDArray

from ..drafter.weights import check_available
from ..errors import HeadWarning, UsageError, misfit
from .reading import trained_ids


def choose_ids(
    model: Any,
    draft_vocab: int | DraftVocab | str | Path | None = None,
    counts: TokenCounts | str | Path | None = None,
    token_map: DraftVocab | str | Path | None = None,
    tokenizer: LoadedTokenizer | str | Path | None = None,
) -> NDArray[np.int64] | None:
    """Choose the target ids to draft over: int64 [draft_vocab] ascending; None for all that the head has.

    Arguments as in `patch_ea_model_with_triton_drafter`. Ids of a map that the head was not trained on are left out,
    with a `HeadWarning`; a `DraftVocab` that holds such ids is refused.

    Raises `UsageError` for a number without a ranking, counts without a number, several rankings, and ids that the head
    does not have; `VocabularyError` and `TokenizerError` as the files' readers do.
    """
    ranking = draft_vocab if isinstance(draft_vocab, str | Path | DraftVocab) else None
    if sum(each is not None for each in (ranking, counts, token_map)) > 1:
        raise UsageError("counts, token_map, and draft_vocab as a DraftVocab or a path each rank the ids: give one.")
    available = np.sort(trained_ids(model))
    vocab_size = int(model.ea_layer.embed_tokens.weight.shape[0])
    if isinstance(ranking, DraftVocab):
        ids = ranking.for_target(vocab_size).ascending_ids
        check_available(ids, available)
        return ids
    if ranking is not None:
        if is_counts_file(ranking):
            raise UsageError(f"{ranking} holds counts: give it as counts=, and draft_vocab=N, how many ids to keep.")
        return _cut_map(ranking, None, available, vocab_size)
    size = _read_size(draft_vocab, len(available))
    if token_map is not None:
        return _cut_map(token_map, size, available, vocab_size)
    if counts is not None and size is None:
        raise UsageError("counts rank the ids and do not say how many to keep: give draft_vocab=N with them.")
    if size in (None, len(available)):
        return None
    if counts is None:
        raise UsageError(f"draft_vocab = {size} needs a ranking of the ids: give counts=, token_map=, or a DraftVocab.")
    source: Any = model.base_model_name_or_path if tokenizer is None else tokenizer
    loaded = source if isinstance(source, LoadedTokenizer) else load_tokenizer(str(source), offline=True)
    counts = counts if isinstance(counts, TokenCounts) else TokenCounts.load(counts)
    among = None if len(available) == vocab_size else available
    vocab = rank_vocabulary(counts, size, tokenizer=loaded, target_vocab=vocab_size, candidates=among)
    for sentence in vocab.warnings:
        warnings.warn(sentence, HeadWarning, stacklevel=4)
    return vocab.ascending_ids


def _read_size(draft_vocab: Any, largest: int) -> int | None:
    if draft_vocab is None:
        return None
    if isinstance(draft_vocab, bool) or not isinstance(draft_vocab, int | np.integer):
        raise misfit("draft_vocab", "a number of ids, a DraftVocab, a path or None (all)", draft_vocab)
    if not 1 <= draft_vocab <= largest:
        raise misfit("draft_vocab", f"from 1 to {largest}, the rows of this head", int(draft_vocab))
    return int(draft_vocab)


def _cut_map(
    token_map: DraftVocab | str | Path, size: int | None, available: NDArray[np.int64], vocab_size: int
) -> NDArray[np.int64]:
    vocab = token_map if isinstance(token_map, DraftVocab) else import_token_map(token_map, vocab_size)
    vocab = vocab.for_target(vocab_size)
    is_known = np.isin(vocab.target_ids, available)
    if not is_known.all():
        unknown = f"{int((~is_known).sum())} of the map's {vocab.size} ids"
        what = f"{unknown} are not among the {len(available)} that the head was trained on. They are left out."
        warnings.warn(what, HeadWarning, stacklevel=4)
        num_forced = int(is_known[: vocab.num_forced].sum())
        vocab = DraftVocab(vocab.target_ids[is_known], num_forced, vocab_size, vocab.provenance, vocab.ranked)
    return (vocab if size is None else vocab.prefix(size)).ascending_ids
