"""Rows beyond the draft vocabulary that an artifact keeps in a file of their own, so that they can join it later."""

from __future__ import annotations

from typing import Any

import numpy as np
from eagle_slim.vocab_tools.errors import UsageError
from eagle_slim.vocab_tools.vocabulary.draft_vocab import DraftVocab
from numpy.typing import NDArray

from .inputs import Inputs
from .options import KeepRows
from .vocab_choice import Ranking, ranked_manifest


def check_keep_rows(keep: Any, inputs: Inputs) -> None:
    """Refuse a number of rows that cannot be kept, before anything is counted; "full" keeps all.

    Raises:
        UsageError: an EAGLE-1/2 head, a full vocabulary, no more rows than a draft vocabulary has, or more than there
            are.
    """
    head, sizes = inputs.head, inputs.options.sizes
    if head.kind == "eagle":
        raise _refusal(
            f": an EAGLE-1/2 head has no LM head of its own: every row of {head.location} comes from the target, which "
            "is there whenever it drafts, so nothing need be kept. Leave the option out: this package's runtime "
            "follows a text with such a head as it is."
        )
    if head.row_tensors:
        raise _refusal(f": {', '.join(head.row_tensors)} of {head.location} has rows of its own. Leave the option out.")
    if "full" in sizes:
        raise _refusal(": --draft-vocab full holds every row already. Leave it out, or give a smaller --draft-vocab.")
    if keep == "full":
        return
    if not isinstance(keep, int) or isinstance(keep, bool) or keep < 1:
        raise _refusal(f": expected a number of rows or 'full', found {keep!r}.", found=keep)
    for size in sizes:
        if isinstance(size, int):
            _check_more(keep, size)
    trained = head.trained_ids
    tokens = np.arange(head.target_vocab) if inputs.tokenizer is None else inputs.tokenizer.real_ids
    tokens = tokens[tokens < head.target_vocab]
    num_rankable = int(len(tokens) if trained is None else np.isin(tokens, trained).sum())
    is_all_trained = trained is not None and keep == len(trained)
    if keep > num_rankable and not is_all_trained:
        why = f"was trained on {len(trained)}" if trained is not None else f"has rows for {head.target_vocab}"
        raise _refusal(
            f" {keep}: {head.location} {why} ids, {num_rankable} of which are tokens. Give at most "
            f"{num_rankable}, or full.",
            most=num_rankable,
        )


def choose_kept_ids(keep: KeepRows, ranking: Ranking, vocab: DraftVocab) -> NDArray[np.int64]:
    """The ids whose rows are kept beside a draft vocabulary, int64 [kept]: those that follow it in rank order.

    After those that the ranking holds come, for an artifact that is slimmed again, the others by their rank in it.

    `keep` counts the draft vocabulary's rows, too; "full" is for all that the ranking holds.

    Raises:
        UsageError: no more rows than `vocab` has, or fewer ids are ranked.
    """
    if keep != "full":
        _check_more(keep, len(vocab))
    ranked, trained = ranking.cut(None).target_ids, ranking.head.trained_ids
    own = None if (manifest := ranked_manifest(ranking.head)) is None else manifest.ranks_with_kept
    if own is not None and trained is not None:
        # A token map may name the draft vocabulary alone; an artifact has ranked the others before.
        ranked = np.concatenate([ranked, own.target_ids[np.isin(own.target_ids, trained[~np.isin(trained, ranked)])]])
    if trained is not None and keep == len(trained):
        # All of a trained vocabulary, ids without a token included, as `Ranking.cut` takes it.
        ranked = np.concatenate([ranked, np.setdiff1d(trained, ranked)])
    beyond = ranked[~np.isin(ranked, vocab.target_ids)]
    wanted = len(beyond) if keep == "full" else keep - len(vocab)
    if not 0 < wanted <= len(beyond):
        there = len(vocab) + len(beyond)
        raise _refusal(
            f" {keep}: the ranking holds {there} ids, {len(vocab)} of them in the draft vocabulary. Give a "
            f"number from {len(vocab) + 1} to {there}, or rank by counts, which order every id."
            if len(beyond)
            else f" {keep}: the ranking holds the {len(vocab)} ids of the draft vocabulary and no others.",
            most=there,
        )
    kept: NDArray[np.int64] = beyond[:wanted]
    return kept


def _check_more(keep: int, size: int) -> None:
    if keep <= size:
        raise _refusal(
            f" {keep} counts the rows of the draft vocabulary too, and that has {size}: none would be kept "
            f"beside them. Give more than {size}, or leave the option out.",
            least=size + 1,
        )


def _refusal(problem: str, **facts: Any) -> UsageError:
    return UsageError(f"--keep-rows{problem}", option="--keep-rows", **facts)
