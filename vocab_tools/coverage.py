"""Share of text that a draft vocabulary covers, per source, measured on documents that were never counted.

A token is covered at size N when its id is among the first N ranked ones. Every figure is shown with the baseline that
needs no corpus: the same forced ids, then the first ids in id order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .counts import SourceCounts, TokenCounts
from .errors import TokenizerError, UsageError, VocabularyError, printable
from .ranking import Part, check_floors
from .vocabulary import DraftVocab, doubts_of_rank

MEAN = "all sources"
"""Name of the weighted mean beside the sources."""

# Half the width, in standard errors, of an interval that holds 95% of a normal distribution.
_NORMAL_QUANTILE = 1.959964


@dataclass(frozen=True, eq=False)
class SourceCoverage:
    """Coverage of one source, by size.

    Attributes:
        weight: share of the source in the mean, 1 in sum.
        part: "counted" where nothing was held out (optimistic: the same text made the ranking).
        documents: number measured; 0 for counted text, where documents are not known.
        coverage, baseline, beside: share of the tokens that the vocabulary, the first ids, and the vocabulary that it
            is compared with cover, float64 [sizes].
        error: standard error of the coverage over documents, float64 [sizes]; None with fewer than two documents.
    """

    name: str
    weight: float
    part: Part
    documents: int
    tokens: int
    coverage: NDArray[np.float64]
    error: NDArray[np.float64] | None
    baseline: NDArray[np.float64]
    beside: NDArray[np.float64] | None = None
    floor: float | None = None

    @property
    def interval(self) -> tuple[NDArray[np.float64], NDArray[np.float64]] | None:
        """Bounds of the 95% interval, float64 [sizes] each; None where the error is not known."""
        if self.error is None:
            return None
        width = _NORMAL_QUANTILE * self.error
        return np.maximum(self.coverage - width, 0.0), np.minimum(self.coverage + width, 1.0)

    def to_json(self) -> dict[str, Any]:
        """Return the entry of a report."""
        low, high = self.interval or (None, None)
        entry = {name: getattr(self, name) for name in ("name", "weight", "part", "documents", "tokens")}
        shares = {"coverage": self.coverage, "low": low, "high": high, "baseline_first_ids": self.baseline}
        if self.beside is not None:
            shares["beside"] = self.beside
        for name, values in shares.items():
            entry[name] = None if values is None else [round(value, 6) for value in values.tolist()]
        if self.floor is not None:
            entry |= {"floor": self.floor, "holds": (self.coverage >= self.floor).tolist()}
        return {**entry, "weight": round(self.weight, 6)}


@dataclass(frozen=True, eq=False)
class CoverageReport:
    """Coverage of a draft vocabulary over sizes and sources.

    Attributes:
        draft_vocab: size that is to be used, one of `sizes`, which ascend.
        sources: the least covered at `draft_vocab` first, then "all sources" when there are several.
        uncounted: number of the first `draft_vocab` ids, forced ids aside, that never occur in the counted text.
        warnings: sources on which the ranking loses to the baseline or measured on counted text; sorted lists.
    """

    draft_vocab: int
    target_vocab: int
    sizes: tuple[int, ...]
    sources: tuple[SourceCoverage, ...]
    uncounted: int
    warnings: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the report JSON-ready; shares are rounded to six digits."""
        return {
            "draft_vocab": self.draft_vocab,
            "target_vocab": self.target_vocab,
            "confidence": 0.95,
            "uncounted": self.uncounted,
            "sizes": list(self.sizes),
            "sources": [source.to_json() for source in self.sources],
            "warnings": list(self.warnings),
        }

    def table(self) -> str:
        """Return a plain text table: one row per source and size, in percent."""
        has_beside = self.sources[0].beside is not None
        has_floors = any(source.floor is not None for source in self.sources)
        titles = ("source", "text", "size", "covered", "95% interval", "first ids")
        rows = [titles + ("ranked here",) * has_beside + ("floor",) * has_floors]
        for source in self.sources:
            name, text = printable(source.name), f"{source.part}, {source.tokens:,} tokens"
            for position, size in enumerate(self.sizes):
                covered, first = source.coverage[position], source.baseline[position]
                low, high = source.interval or (None, None)
                interval = "-" if low is None or high is None else f"{low[position]:.2%} – {high[position]:.2%}"
                cells = [name, text, str(size), f"{covered:.2%}", interval, f"{first:.2%}"]
                if source.beside is not None:
                    cells.append(f"{source.beside[position]:.2%}")
                if source.floor is not None:
                    verdict = "holds" if covered >= source.floor else f"short by {source.floor - covered:.2%}"
                    cells.append(f"{source.floor:.2%} {verdict}")
                elif has_floors:
                    cells.append("-")
                rows.append(tuple(cells))
                name = text = ""
        return aligned(rows, num_left=2)


def aligned(rows: Sequence[Sequence[str]], num_left: int) -> str:
    """Return rows of cells as a plain text table: the first ``num_left`` columns left-aligned, the others right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = zip(row, widths, strict=True)
        padded = [cell.ljust(width) if i < num_left else cell.rjust(width) for i, (cell, width) in enumerate(cells)]
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


def measure_coverage(
    vocab: DraftVocab,
    counts: TokenCounts,
    sizes: Sequence[int] | None = None,
    weights: Mapping[str, float] | None = None,
    draft_vocab: int | None = None,
    candidates: NDArray[np.int64] | None = None,
    beside: DraftVocab | None = None,
    floors: Mapping[str, float] | None = None,
) -> CoverageReport:
    """Measure what share of each source a vocabulary covers.

    Args:
        counts: sources without a held-out part are measured on the counted text, with a warning.
        sizes: draft-vocabulary sizes to measure; default powers of two up to the vocabulary's own size.
        weights, floors: by the source's name, share in the mean, and share of its tokens that must be covered.
        draft_vocab: the size that is to be used, one of `sizes`; the warnings are about it. Default: the largest.
        candidates: ids that a vocabulary could hold, of which the baseline takes the first. Default all.
        beside: another vocabulary, of at least the same sizes, to measure on the same text.

    Raises TokenizerError where vocabulary and counts are of different tokenizers; UsageError for a size outside what
    the vocabulary ranks, or a floor of an unknown source; VocabularyError for a source without tokens.
    """
    known = vocab.provenance.get("tokenizer_hash")
    if known is not None and counts.tokenizer_hash is not None and known != counts.tokenizer_hash:
        problem = f"The vocabulary was made with tokenizer {known}, the counts with {counts.tokenizer_hash}"
        raise TokenizerError(f"{problem}. Count with the vocabulary's tokenizer.")
    grid = _sizes(vocab, sizes)
    first_ids = np.arange(vocab.target_vocab) if candidates is None else np.sort(candidates)
    forced = vocab.target_ids[: vocab.num_forced if vocab.ranked else 0]
    first_ids = np.concatenate([forced, first_ids[~np.isin(first_ids, forced)]])
    orders = [vocab.target_ids, first_ids, *([] if beside is None else [beside.target_ids])]
    # Of every order and id, the index of the first size that covers it; len(grid) for none.
    buckets = np.full((len(orders), max(vocab.target_vocab, counts.vocab_size)), len(grid))
    for indices, order in zip(buckets, orders, strict=True):
        indices[order] = np.searchsorted(np.asarray(grid), np.arange(len(order)), side="right")
    draft_vocab = grid[-1] if draft_vocab is None else draft_vocab
    chosen_weights = counts.source_weights(weights)
    check_floors(floors or {}, [source.name for source in counts.sources])
    measured = []
    for source in counts.sources:
        weight = chosen_weights[source.name] / sum(chosen_weights.values())
        entry = _measure_source(source, weight, buckets, len(grid))
        measured.append(replace(entry, floor=(floors or {}).get(source.name)))
    at = grid.index(draft_vocab)
    measured.sort(key=lambda entry: float(entry.coverage[at]))
    if len(measured) > 1:
        measured.append(_weighted_mean(measured))
    chosen = vocab.target_ids[vocab.num_forced : draft_vocab]
    counted = np.any([source.counts > 0 for source in counts.sources], axis=0)
    sorted_list = doubts_of_rank(vocab.target_ids, grid[0]) if vocab.is_token_map else []
    return CoverageReport(
        draft_vocab=draft_vocab,
        target_vocab=vocab.target_vocab,
        sizes=grid,
        sources=tuple(measured),
        uncounted=len(chosen) - int(counted[chosen[chosen < len(counted)]].sum()),
        warnings=(*_warnings(measured, at, draft_vocab), *sorted_list),
    )


def _sizes(vocab: DraftVocab, sizes: Sequence[int] | None) -> tuple[int, ...]:
    """Return the sizes to measure, ascending; without any, powers of two from 1,024 on and the vocabulary's own."""
    smallest = max(vocab.num_forced, 1) if vocab.ranked else vocab.size
    if sizes is None:
        steps = (1 << power for power in range(10, 21))
        sizes = [*(size for size in steps if smallest <= size < vocab.size), vocab.size]
    for size in sizes:
        if not smallest <= size <= vocab.size:
            raise UsageError(f"--sizes {size}: expected {smallest} to {vocab.size} for this vocabulary.")
    return tuple(sorted({int(size) for size in sizes}))


def _measure_source(source: SourceCounts, weight: float, buckets: NDArray[np.int64], num_sizes: int) -> SourceCoverage:
    """Measure one source on held-out documents, or else on its counts as one; `buckets` is [orders, ids]."""
    part: Part = "held-out"
    token_ids: NDArray[Any]
    if source.held_out is not None and source.held_out.num_tokens:
        token_ids, times = source.held_out.token_ids, np.ones(source.held_out.num_tokens, np.int64)
        lengths = np.diff(source.held_out.doc_offsets)
        owner = np.repeat(np.arange(len(lengths)), lengths)
    else:
        part, token_ids, times = "counted", np.arange(len(source.counts)), source.counts
        lengths, owner = np.array([source.counts.sum()]), np.zeros(len(token_ids), np.int64)
    tokens = int(lengths.sum())
    if tokens == 0:
        raise VocabularyError(f"source {source.name!r}: there are no tokens to measure coverage on.")
    # Of each document, how many tokens each size is the first to cover; the last place is for those none does.
    hits = np.zeros((len(buckets), len(lengths), num_sizes + 1))
    for document_hits, bucket_of_id in zip(hits, buckets, strict=True):
        np.add.at(document_hits, (owner, bucket_of_id[token_ids]), times)
    covered, first, *other = hits.cumsum(axis=2)[:, :, :num_sizes]
    return SourceCoverage(
        name=source.name,
        weight=weight,
        part=part,
        documents=len(lengths) if part == "held-out" else 0,
        tokens=tokens,
        coverage=covered.sum(axis=0) / tokens,
        error=_standard_error(covered, lengths),
        baseline=first.sum(axis=0) / tokens,
        beside=other[0].sum(axis=0) / tokens if other else None,
    )


def _standard_error(covered: NDArray[np.float64], lengths: NDArray[np.int64]) -> NDArray[np.float64] | None:
    """Return the standard error of covered tokens over all tokens, float64 [sizes]; None for fewer than two documents.

    Tokens of one document resemble each other, so documents are the sample: the ratio estimator's linearised variance
    (Cochran, Sampling Techniques, 1977, section 6.4), n / (n - 1) · Σ (covered - ratio · length)² / (Σ length)².
    `covered` [documents, sizes] and `lengths` [documents] are tokens.
    """
    documents, tokens = len(lengths), lengths.sum()
    if documents < 2:
        return None
    residuals = covered - covered.sum(axis=0) / tokens * lengths[:, None]
    variance = documents / (documents - 1) * (residuals**2).sum(axis=0) / float(tokens) ** 2
    return np.asarray(np.sqrt(variance))


def _weighted_mean(measured: Sequence[SourceCoverage]) -> SourceCoverage:
    weights = np.array([entry.weight for entry in measured])
    errors = [entry.error for entry in measured if entry.error is not None]
    others = [entry.beside for entry in measured if entry.beside is not None]
    return SourceCoverage(
        name=MEAN,
        weight=1.0,
        part=measured[0].part if len({entry.part for entry in measured}) == 1 else "held-out and counted",
        documents=sum(entry.documents for entry in measured),
        tokens=sum(entry.tokens for entry in measured),
        coverage=weights @ np.stack([entry.coverage for entry in measured]),
        error=np.sqrt(weights**2 @ np.stack(errors) ** 2) if len(errors) == len(measured) else None,
        baseline=weights @ np.stack([entry.baseline for entry in measured]),
        beside=weights @ np.stack(others) if others else None,
    )


def _warnings(measured: Sequence[SourceCoverage], position: int, size: int) -> list[str]:
    warnings = []
    for entry in measured:
        covered, first = entry.coverage[position], entry.baseline[position]
        if covered < first:
            subject = entry.name if entry.name == MEAN else f"source {entry.name!r}"
            loss = f"the ranking covers {100 * covered:.2f}%, less than the {100 * first:.2f}% of the first {size} ids"
            advice = "Count text of this kind, or give it more weight"
            warnings.append(f"{subject}: {loss}, which need no corpus. {advice}")
    if counted := [repr(entry.name) for entry in measured if entry.part == "counted" and entry.name != MEAN]:
        why = "because nothing was held out: it is optimistic"
        warnings.append(f"coverage of {', '.join(counted)} is measured on the counted text itself, {why}")
    return warnings
