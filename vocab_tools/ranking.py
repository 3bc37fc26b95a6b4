"""Counts → DraftVocab.

Forced ids come first, by count descending and then by id; after them all other ids by weighted count descending, ties
by id. One order serves every size, so vocabularies are nested. Counts (id: count) 0: 5, 1: 9, 2: 9, 3: 0, 4: 7 with
forced id 3 rank as 3, 1, 2, 4, 0.

Floors, shares of single sources that a size must cover, take rarer ids of these sources in place of the last others
(`floors.py`); the ids that stay are ranked in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .counts import TokenCounts
from .errors import UsageError, VocabularyError
from .floors import FloorProblem
from .forced import ForcedIds, forced_ids
from .tokenizer import LoadedTokenizer, check_tokenizer
from .vocabulary import (
    ROUND_TO,
    DraftVocab,
    Floors,
    Provenance,
    check_ids,
    doubts_of_rank,
    lost_floors,
    padding_warning,
    round_up,
    some_ids,
    uncounted_warning,
)

Part = Literal["held-out", "counted", "held-out and counted"]
_Ids = NDArray[np.int64]


def rank_vocabulary(
    counts: TokenCounts,
    size: int | None = None,
    coverage: float | None = None,
    tokenizer: LoadedTokenizer | None = None,
    forced: ForcedIds | Sequence[int] | None = None,
    target_vocab: int | None = None,
    candidates: ArrayLike | DraftVocab | None = None,
    weights: Mapping[str, float] | None = None,
    floors: Mapping[str, float] | None = None,
) -> DraftVocab:
    """Rank the vocabulary by counted text and cut it to a size.

    Args:
        size: number of ids, kept exactly. Without `size` and `coverage` all rankable ids are ranked.
        coverage: take the smallest size that covers this share of the held-out tokens (of the counted ones where
            nothing was held out), sources weighted, rounded up to a multiple of 64, at most all that can be chosen.
        tokenizer: the target's; gives the real ids and, unless `forced` is given, the forced ones.
        forced: ids that must be in, overriding the tokenizer's; a plain sequence of ids has no reasons.
        target_vocab: rows of the target's LM head; ids from there on are never chosen. Default: `counts.vocab_size`.
        candidates: ids the head was trained on, when it already has a map: no others are chosen, forced or not.
        weights: share of each source by name, overriding the counts' own weights.
        floors: share of a source's tokens by name, measured as for `coverage`, that the `size` ids must cover; they
            are chosen to cover the most of all sources, weighted, beside these.

    Raises UsageError for size and coverage together, a size that does not fit, a coverage that none reaches, and floors
    without a size, or that it cannot hold; TokenizerError for counts or candidates made with another tokenizer;
    VocabularyError for candidate ids that break a rule.
    """
    if size is not None and coverage is not None:
        raise UsageError("A size and --coverage exclude each other: give only one of them.")
    if floors and size is None:
        raise UsageError("--floor needs a size (--size, --draft-vocab), whose ids are chosen to hold it.")
    check_floors(floors or {}, [source.name for source in counts.sources])
    provenance: Provenance = {"method": "counts", "sources": counts.account(weights)}
    if target_vocab is None:
        target_vocab, provenance["target_vocab_from"] = counts.vocab_size, "counts"
    warnings = [] if tokenizer is None else check_tokenizer(tokenizer, counts.tokenizer_hash, "the counts")
    if beyond := sum(int(source.counts[target_vocab:].sum()) for source in counts.sources):
        where = f"beyond the target's vocabulary of {target_vocab}"
        warnings.append(f"{beyond:,} counted tokens have ids {where}; they are left out")
    pool, more = _Pool.of(tokenizer, counts.vocab_size, target_vocab, candidates, forced)
    warnings += more
    score = np.pad(counts.weighted(weights), (0, max(target_vocab - counts.vocab_size, 0)))
    order = pool.order_by_score(score)
    if counts.tokenizer_hash is not None:
        provenance["tokenizer_hash"] = counts.tokenizer_hash
    optimistic = []
    if coverage is not None:
        size, account = _size_for_coverage(counts, weights, order, coverage, pool)
        provenance["size_from_coverage"] = account
        if account["measured_on"] == "counted":
            optimistic.append("the size for --coverage was found")
    if floors and size is not None:
        pool.check_size(size)
        order, provenance["floors"], more = _hold_floors(counts, floors, score, order, size, pool)
        warnings += more
        on_counted = [entry["source"] for entry in provenance["floors"]["held"] if entry["measured_on"] == "counted"]
        optimistic.extend(f"the floor of {name} was measured" for name in on_counted)
    advice = "because nothing was held out: other text will be covered less. Count with a held-out part"
    warnings.extend(f"{what} on the counted text itself, {advice}" for what in optimistic)
    provenance["counted_ids"] = int((score[order[len(pool.forced) : size]] > 0).sum())
    vocab = pool.cut(order, size, provenance, warnings)
    # All ids together are ranked to be cut later: only a size that was asked for is warned about.
    return vocab if size is None else vocab.with_warnings(uncounted_warning(vocab))


def rank_by_order(
    order: ArrayLike | DraftVocab | None = None,
    size: int | None = None,
    tokenizer: LoadedTokenizer | None = None,
    forced: ForcedIds | Sequence[int] | None = None,
    target_vocab: int | None = None,
    candidates: ArrayLike | DraftVocab | None = None,
    provenance: Mapping[str, Any] | None = None,
) -> DraftVocab:
    """Rank the vocabulary by a given order, without counts: a token map, or the ids themselves.

    Forced ids come first, in that order; those that it lacks are added, displacing its last ids, with a warning.

    Args:
        order: target ids, most important first, or an imported token map, whose warnings are passed on; None is all
            real ids ascending, which for BPE is merge order.
        size, tokenizer, forced, candidates, target_vocab: as in `rank_vocabulary`; `tokenizer` or the last is needed.

    Raises UsageError for a size that does not fit, and without tokenizer and target_vocab; VocabularyError for ids that
    break a rule; TokenizerError for an order or candidates that were made with another tokenizer.
    """
    account, warnings, counted = Provenance(), list[str](), None
    is_foreign = not isinstance(order, DraftVocab) or order.is_token_map
    if target_vocab is None:
        if tokenizer is None:
            raise UsageError("Ranking by order needs --tokenizer or the size of the target's vocabulary.")
        target_vocab, account["target_vocab_from"] = tokenizer.vocab_size, "tokenizer"
    if tokenizer is not None:
        account["tokenizer_hash"] = tokenizer.tokenizer_hash
    if isinstance(order, DraftVocab):
        _check_made_with(order, tokenizer, "the vocabulary")
        # What an import with a tokenizer told is looked for again here, and forced ids are added.
        is_looked_for = tokenizer is not None and "tokenizer_hash" in order.provenance
        warnings += order.warnings if order.is_token_map and not is_looked_for else ()
        warnings.extend(lost_floors(order, len(order) if size is None else size))
        counted = order.counted_ids
        order = order.target_ids
    pool, more = _Pool.of(tokenizer, target_vocab, target_vocab, candidates, forced)
    warnings += more
    if order is None:
        ranked = pool.order_by_score(np.zeros(target_vocab))
        account["method"] = "ids"
    else:
        ranked, size, more = _ranked_as_given(order, size, pool, warnings, is_foreign)
        warnings += more
        account["method"] = "token map"
    if counted is not None:
        account["counted_ids"] = int(np.isin(ranked[len(pool.forced) : size], counted).sum())
    vocab = pool.cut(ranked, size, {**account, **(provenance or {})}, warnings)  # type: ignore[typeddict-item]
    return vocab.with_warnings(uncounted_warning(vocab))


def check_share(option: str, share: float) -> None:
    """Raise UsageError for the number of an option that is not a share of tokens."""
    if not 0 < share <= 1:
        raise UsageError(f"{option} {share} is not a share of tokens: give a number above 0 and at most 1.")


def check_floors(floors: Mapping[str, float], names: Sequence[str]) -> None:
    """Raise UsageError for a floor that is not a share of tokens, or is of none of the sources of these names."""
    for name, floor in floors.items():
        if name not in names:
            raise UsageError(f"--floor {name}: there is no such source; there are: {', '.join(names)}.")
        check_share(f"--floor {name}", floor)


@dataclass(frozen=True, eq=False)
class _Pool:
    """The ids that may be chosen, and the forced ones of them, int64 [ids] and ascending both.

    `trained` is the number of ids that the head was trained on, None for a head without a map.
    """

    ids: _Ids
    forced: _Ids
    target_vocab: int
    trained: int | None
    account: Provenance

    @classmethod
    def of(
        cls,
        tokenizer: LoadedTokenizer | None,
        num_counts: int,
        target_vocab: int,
        candidates: ArrayLike | DraftVocab | None,
        forced: ForcedIds | Sequence[int] | None,
    ) -> tuple[_Pool, list[str]]:
        """Intersect the tokenizer's ids, the target's rows and the head's trained ids; return also warnings."""
        if target_vocab < 1:
            raise UsageError(f"--target-vocab {target_vocab}: expected the number of rows of the target's LM head.")
        ids = np.arange(num_counts, dtype=np.int64) if tokenizer is None else tokenizer.real_ids
        ids = ids[ids < target_vocab]
        if forced is None:
            forced = () if tokenizer is None else forced_ids(tokenizer)
        is_asked = not isinstance(forced, ForcedIds)
        if not isinstance(forced, ForcedIds):
            forced = ForcedIds(np.unique(np.array([index(token_id) for token_id in forced], np.int64)), {})
        warnings, wanted = list(forced.warnings), forced.ids
        is_real = np.isin(wanted, ids)
        if not is_real.all():
            outside = f"outside the target's vocabulary of {target_vocab}"
            if is_asked:
                raise UsageError(f"--force-id {wanted[~is_real][0]} is {outside}.")
            warnings.append(f"forced ids {outside} are left out: {some_ids(wanted[~is_real])}")
            wanted = wanted[is_real]
        trained, account = None, Provenance()
        if candidates is not None:
            if isinstance(candidates, DraftVocab):
                _check_made_with(candidates, tokenizer, "the candidates")
                candidates = candidates.ascending_ids
            of_head = check_ids(candidates, target_vocab, "ids the head was trained on")
            trained, ids = len(of_head), ids[np.isin(ids, of_head)]
            if len(ids) < trained:
                warnings.append(f"{trained - len(ids)} of the {trained} ids of the head's map belong to no token")
            untrained = wanted[~np.isin(wanted, ids)]
            if len(untrained):
                warnings.append(f"forced ids that this head was never trained on are not added: {some_ids(untrained)}")
            wanted = wanted[np.isin(wanted, ids)]
            account = {"trained_ids": trained, "forced_but_untrained": untrained.tolist()}
        account = {"forced": {str(i): forced.reasons.get(i, "by request") for i in wanted.tolist()}, **account}
        return cls(ids, wanted, target_vocab, trained, account), warnings

    def order_by_score(self, score: NDArray[np.float64]) -> _Ids:
        """Return all ids of the pool: forced first, then by score descending, ties by id."""
        # lexsort's last key is the first in importance.
        order = np.lexsort((self.ids, -score[self.ids], ~np.isin(self.ids, self.forced)))
        return np.take(self.ids, order)

    @property
    def largest_size(self) -> int:
        """The largest N: a head with a map may keep all its rows, another must drop at least one real token."""
        return len(self.ids) if self.trained is not None else len(self.ids) - 1

    def cut(self, order: _Ids, size: int | None, provenance: Provenance, warnings: Sequence[str]) -> DraftVocab:
        """Take the first N of an order as a vocabulary with its provenance, and with a warning of a size to pad."""
        if size is not None:
            self.check_size(size)
        size = len(order) if size is None else size
        # A size that was found for a coverage is a multiple, or as large as it can be.
        is_odd = size < len(self.ids) and "size_from_coverage" not in provenance
        account: Provenance = {**provenance, **self.account, "warnings": list(warnings)}
        vocab = DraftVocab(order[:size], len(self.forced), self.target_vocab, account)
        return vocab.with_warnings(padding_warning(size)) if is_odd else vocab

    def check_size(self, size: int) -> None:
        """Raise UsageError unless `size` of the ids can be chosen."""
        smallest = max(1, len(self.forced))
        if not smallest <= size <= self.largest_size:
            why = f"the {len(self.ids)} real tokens but one: with all of them nothing is cut"
            if self.trained is not None:
                why = f"the head has rows for {self.trained} ids"
            expected = f"at least {smallest} (end of turn, chat markers and single bytes are forced)"
            limits = f"expected {expected} and at most {self.largest_size} ({why})"
            raise UsageError(f"A draft vocabulary of {size} was asked for: {limits}.")


def _size_for_coverage(
    counts: TokenCounts, weights: Mapping[str, float] | None, order: _Ids, coverage: float, pool: _Pool
) -> tuple[int, dict[str, Any]]:
    """Return the smallest allowed size that covers a share of the held-out tokens, and the account of it."""
    check_share("--coverage", coverage)
    chosen, part, measured = counts.source_weights(weights), "held-out", counts.held_out_counts
    # Where a source with a weight above 0 held nothing out, all are measured on their counted text.
    if any(chosen[source.name] > 0 and not source.num_tokens for source in measured.sources):
        part, measured = "counted", counts
    mixed = measured.weighted(weights)
    if not mixed.any():
        raise VocabularyError("No source with a weight above 0 holds a token. Count some text first.")
    reached = np.cumsum(np.pad(mixed, (0, pool.target_vocab))[order]) / mixed.sum()
    # Sums of float64 shares are a few ulps off the exact figure.
    enough = np.flatnonzero(reached >= coverage - 1e-12)
    if len(enough) == 0 or enough[0] + 1 > pool.largest_size:
        largest = f"{pool.largest_size} ids, covers {float(reached[pool.largest_size - 1]):.6f}"
        problem = f"--coverage {coverage} of the {part} tokens cannot be reached"
        raise UsageError(f"{problem}: the largest draft vocabulary, {largest}.")
    smallest = max(int(enough[0]) + 1, len(pool.forced), 1)
    size = min(round_up(smallest), pool.largest_size)
    account = {"asked": coverage, "measured_on": part, "smallest": smallest, "reached": float(reached[size - 1])}
    return size, account


def _hold_floors(
    counts: TokenCounts, floors: Mapping[str, float], score: NDArray[np.float64], order: _Ids, size: int, pool: _Pool
) -> tuple[_Ids, Floors, list[str]]:
    """Return an order whose first `size` ids hold the floors, as it is where they do; the account of it; warnings."""
    named = [{source.name: source.counts for source in each.sources} for each in (counts, counts.held_out_counts)]
    texts, held_out = (np.stack([np.pad(each[name], (0, pool.target_vocab)) for name in floors]) for each in named)
    if not texts.any(axis=1).all():
        names = ", ".join(floors)
        raise VocabularyError(f"--floor: one source of {names} holds no token. Count some of its text first.")
    measured_on = ["held-out" if tokens.any() else "counted" for tokens in held_out]
    measured = np.where(held_out.any(axis=1, keepdims=True), held_out, texts)
    problem = FloorProblem(
        score=(score / max(float(score.sum()), 1.0))[pool.ids],
        is_forced=np.isin(pool.ids, pool.forced),
        counted=(texts / texts.sum(axis=1, keepdims=True))[:, pool.ids],
        measured=(measured / measured.sum(axis=1, keepdims=True))[:, pool.ids],
        floors=np.array(list(floors.values())),
    )
    chosen, bound, warnings = np.isin(pool.ids, order[:size]), None, []
    if not problem.holds(chosen):
        solution = problem.choose(size) or problem.search(size)
        if solution is None:
            covered = zip(floors.items(), problem.reached(chosen), strict=True)
            falls = ", ".join(f"{name} {share:.2%} (floor {floor:.2%})" for (name, floor), share in covered)
            cannot = f"{size} ids cannot hold" if problem.is_impossible(size) else f"no {size} ids were found that hold"
            enough, largest = _size_for_floors(problem, np.searchsorted(pool.ids, order), size, pool), pool.largest_size
            none = "no size does" if enough is None and problem.is_impossible(largest) else "none was found of any size"
            advice = f"{enough} would do" if enough else f"{none}, up to {largest}: ask for less"
            without_floors = f"Ranked without floors, {size} cover {falls}."
            raise UsageError(f"--floor: {cannot} all of these floors; {advice}. {without_floors}")
        chosen, bound = solution
        if bound is None and "held-out" in measured_on:
            warnings.append("only ids chosen by the held-out text itself hold the floors: other text is covered less")
        order = order[np.argsort(~np.isin(order, pool.ids[chosen]), kind="stable")]
    entries, shares = [], problem.reached(chosen).tolist()
    for (name, floor), reached, part in zip(floors.items(), shares, measured_on, strict=True):
        entries.append({"source": name, "asked": floor, "reached": reached, "measured_on": part})
    weighted = float(problem.score[chosen].sum())
    return order, {"size": size, "held": entries, "weighted": weighted, "weighted_bound": bound}, warnings


def _size_for_floors(problem: FloorProblem, order: _Ids, size: int, pool: _Pool) -> int | None:
    """Return a size near the smallest that holds floors which `size` ids do not; None where not even the largest does.

    `order`: places of the ids as they rank without floors, of which a longer beginning may hold them.
    """
    largest = pool.largest_size
    holds = (problem.measured[:, order].cumsum(axis=1) >= problem.floors[:, None] - 1e-12).all(axis=0)
    enough = round_up(int(holds.argmax()) + 1) if holds.any() else largest + 1
    if enough > largest and problem.choose(largest) is None:
        return None
    enough = min(enough, largest)
    # A solution takes seconds of a large problem, minutes near the smallest size, and advice need not be exact.
    for _ in range(5):
        middle = max(round_up(size + 1), (size + enough) // 2 // ROUND_TO * ROUND_TO)
        if middle >= enough or enough - size <= enough // 8:
            break
        is_enough = problem.choose(middle) is not None
        size, enough = (size, middle) if is_enough else (middle, enough)
    return enough


def _ranked_as_given(
    order: ArrayLike, size: int | None, pool: _Pool, known: Sequence[str], is_foreign: bool
) -> tuple[_Ids, int, list[str]]:
    """Return the pool's ids in a given order, forced ones first, the size (by default the order's), and warnings."""
    warnings: list[str] = []
    order = check_ids(order, pool.target_vocab, "token map")
    usable = order[np.isin(order, pool.ids)]
    # Those behind the size asked for would not be taken anyway.
    gone = order[:size][~np.isin(order[:size], pool.ids)]
    if len(gone):
        why = "belong to no token" if pool.trained is None else "have no row in this head or belong to no token"
        warnings.append(f"{len(gone)} ids of the token map {why} and are left out: {some_ids(gone)}")
    missing = pool.forced[~np.isin(pool.forced, usable)]
    if len(missing):
        lacks = f"lacks {len(missing)} forced ids; they are added in place of its last ones"
        warnings.append(f"the token map {lacks}: {some_ids(missing)}")
    is_forced = np.isin(usable, pool.forced)
    ranked = np.concatenate([usable[is_forced], missing, usable[~is_forced]])
    if size is None:
        size = min(max(len(usable), len(pool.forced)), pool.largest_size)
    elif size > len(ranked):
        pool.check_size(size)
        why = f" ({'; '.join([*known, *warnings])})" if known or warnings else ""
        found = f"only {len(ranked)} usable ids are ranked{why}"
        raise UsageError(f"A draft vocabulary of {size} was asked for, but {found}.")
    # Our own order may ascend: by id, where the lowest ids are the forced ones.
    elif is_foreign and size < len(usable):
        warnings.extend(doubts_of_rank(order, size))
    return ranked, size, warnings


def _check_made_with(vocab: DraftVocab, tokenizer: LoadedTokenizer | None, where: str) -> None:
    """Raise TokenizerError for a vocabulary, named by `where`, that records another tokenizer than the one given."""
    made_with = vocab.provenance.get("tokenizer_hash")
    if tokenizer is not None and made_with is not None:
        check_tokenizer(tokenizer, made_with, where)
