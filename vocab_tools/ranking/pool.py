"""Which ids may be chosen, which must be, and how an order of them is cut to a size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..errors import UsageError
from ..tokenizer.forced import ForcedIds, forced_ids
from ..tokenizer.load import check_tokenizer
from ..tokenizer.tokenizer import LoadedTokenizer
from ..vocabulary.draft_vocab import DraftVocab, check_ids

ROUND_TO = 64
"""Serving engines pad and shard draft rows by 64 (`DEFAULT_VOCAB_PADDING_SIZE` of vLLM and SGLang)."""


@dataclass(frozen=True, eq=False)
class Pool:
    """The ids that may be chosen, and those that must be.

    Attributes:
        ids: may be chosen, int64 [pool], ascending.
        forced: must be, int64 [forced], ascending, all in `ids`.
        reasons: why, by id.
        target_vocab: rows of the target's LM head.
        trained: how many ids the head was trained on, None for a head without a map.
        untrained: forced ids that the head never trained.
        warnings: for the user; more are added on the way.
    """

    ids: NDArray[np.int64]
    forced: NDArray[np.int64]
    reasons: Mapping[int, str]
    target_vocab: int
    trained: int | None
    untrained: list[int]
    warnings: list[str]

    @classmethod
    def of(
        cls,
        tokenizer: LoadedTokenizer | None,
        num_counts: int,
        target_vocab: int,
        candidates: ArrayLike | DraftVocab | None,
        forced: ForcedIds | Sequence[int] | None,
        warnings: list[str],
    ) -> Pool:
        """Intersect the tokenizer's ids, the target's rows and the head's trained ids."""
        if target_vocab < 1:
            raise UsageError(
                f"target_vocab: expected the number of rows of the target's LM head, found {target_vocab}.",
                target_vocab=target_vocab,
            )
        real = np.arange(num_counts, dtype=np.int64) if tokenizer is None else tokenizer.real_ids
        real = real[real < target_vocab]
        if forced is None:
            forced = () if tokenizer is None else forced_ids(tokenizer)
        reasons: Mapping[int, str] = forced.reasons if isinstance(forced, ForcedIds) else {}
        wanted = np.unique(np.asarray(forced.ids if isinstance(forced, ForcedIds) else [*map(index, forced)], np.int64))
        if isinstance(forced, ForcedIds):
            warnings.extend(forced.warnings)
        outside = wanted[~np.isin(wanted, real)]
        if len(outside):
            if not isinstance(forced, ForcedIds):
                raise UsageError(
                    f"Forced id {outside[0]} is not a token of the target's vocabulary of {target_vocab}.",
                    id=int(outside[0]),
                )
            warnings.append(
                f"{len(outside)} forced ids are outside the target's vocabulary of {target_vocab} and left out: "
                f"{some(outside.tolist())}"
            )
            wanted = wanted[np.isin(wanted, real)]
        if candidates is None:
            return cls(real, wanted, reasons, target_vocab, None, [], warnings)
        if isinstance(candidates, DraftVocab):
            check_made_with(candidates, tokenizer, "the candidates")
            candidates = candidates.ascending_ids
        trained = check_ids(candidates, target_vocab, "ids the head was trained on")
        pool = real[np.isin(real, trained)]
        if len(pool) < len(trained):
            warnings.append(
                f"{len(trained) - len(pool)} of the {len(trained)} ids that the head was trained on belong to no token"
            )
        untrained = wanted[~np.isin(wanted, pool)].tolist()
        if untrained:
            warnings.append(
                f"{len(untrained)} forced ids were never trained in this head and are not added: {some(untrained)}"
            )
        kept = wanted[np.isin(wanted, pool)]
        return cls(pool, kept, reasons, target_vocab, len(trained), untrained, warnings)

    def order_by_score(self, score: NDArray[np.float64]) -> NDArray[np.int64]:
        """Return all ids of the pool: forced first, then by score descending, ties by id."""
        held = np.zeros(self.target_vocab, np.float64)
        held[: len(score)] = score[: self.target_vocab]
        is_other = ~np.isin(self.ids, self.forced)
        # lexsort's last key is the first in importance.
        ordered: NDArray[np.int64] = self.ids[np.lexsort((self.ids, -held[self.ids], is_other))]
        return ordered

    @property
    def largest_size(self) -> int:
        """The largest N: a head with a map may keep all its rows, another must drop at least one real token."""
        return len(self.ids) if self.trained is not None else len(self.ids) - 1

    def cut(self, order: NDArray[np.int64], size: int | None, provenance: dict[str, Any]) -> DraftVocab:
        """Take the first N of an order and record how it came about."""
        if size is None:
            size = len(order)
        else:
            self.check_size(size)
        # A size that was found for a coverage is a multiple, or as large as it can be.
        if size % ROUND_TO and size < len(self.ids) and "size_from_coverage" not in provenance:
            self.warnings.append(
                f"a draft vocabulary of {size} is not a multiple of {ROUND_TO}: it is kept exactly, but serving "
                f"engines pad it, and tensor parallelism needs a multiple (the next is {round_up(size)})"
            )
        provenance["forced"] = {str(i): self.reasons.get(i, "by request") for i in self.forced.tolist()}
        if self.trained is not None:
            provenance["trained_ids"] = self.trained
            provenance["forced_but_untrained"] = self.untrained
        provenance["warnings"] = self.warnings
        return DraftVocab(order[:size], len(self.forced), self.target_vocab, provenance)

    def check_size(self, size: int) -> None:
        """Raise UsageError for a size that no order of these ids has."""
        if size < 1:
            raise UsageError(f"A draft vocabulary of {size} is too small: at least one id is needed.", size=size)
        if size < len(self.forced):
            raise UsageError(
                f"A draft vocabulary of {size} is smaller than the {len(self.forced)} forced ids (end of turn, chat "
                f"markers, single bytes). Ask for at least {len(self.forced)}.",
                size=size,
                forced=len(self.forced),
            )
        if self.trained is not None and size > len(self.ids):
            raise UsageError(
                f"A draft vocabulary of {size} was asked for, but the head has rows for {self.trained} ids only "
                f"({len(self.ids)} of them usable), and others cannot be made up. Ask for at most {len(self.ids)}.",
                size=size,
            )
        if self.trained is None and size >= len(self.ids):
            raise UsageError(
                f"A draft vocabulary of {size} is not smaller than the {len(self.ids)} real tokens of the target. "
                "Ask for fewer, or convert with `--draft-vocab full`, which writes the whole head without a map.",
                size=size,
                real=len(self.ids),
            )


def check_made_with(vocab: DraftVocab, tokenizer: LoadedTokenizer | None, where: str) -> None:
    """Raise TokenizerError for a vocabulary, named by `where`, that records another tokenizer than the one given."""
    made_with = vocab.provenance.get("tokenizer_hash")
    if tokenizer is not None and made_with is not None:
        check_tokenizer(tokenizer, made_with, where)


def round_up(size: int) -> int:
    """Return the next multiple of 64 at or above a size."""
    return -(-size // ROUND_TO) * ROUND_TO


def some(ids: list[int]) -> str:
    """Return the first ids as text, for a message."""
    shown = ", ".join(str(token_id) for token_id in ids[:8])
    return shown + (", ..." if len(ids) > 8 else "")
