"""Share of text that a draft vocabulary covers, per source, measured on documents that were never counted.

A token is covered at size N when its id is among the first N ranked ones. The interval is a percentile bootstrap over
documents (Efron 1979): tokens of one document resemble each other, so documents are drawn, not tokens. Every figure
is shown with the baseline that needs no corpus: the same forced ids, then the first ids in id order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ..counting.counts import SourceCounts, TokenCounts
from ..errors import TokenizerError, UsageError, VocabularyError
from ..vocabulary.draft_vocab import DraftVocab
from .report import CONFIDENCE, CoverageReport, SourceCoverage
from .shares import Part, source_shares

MEAN = "all sources"
"""Name of the weighted mean beside the sources."""

_CURVE_POINTS = 64
# Bootstrap weights are drawn for this many documents × resamples at a time: 64 MB of float64.
_WEIGHTS_AT_ONCE = 8_000_000


def measure_coverage(
    vocab: DraftVocab,
    counts: TokenCounts,
    sizes: Sequence[int] | None = None,
    seed: int = 0,
    bootstrap: int = 1000,
    weights: Mapping[str, float] | None = None,
    draft_vocab: int | None = None,
    candidates: NDArray[np.int64] | None = None,
) -> CoverageReport:
    """Measure what share of each source a vocabulary covers.

    Args:
        vocab: ranked ids.
        counts: text with a held-out part; sources without one are measured on the counted text, with a warning.
        sizes: draft-vocabulary sizes to measure; default a grid up to the vocabulary's own size.
        seed: of the bootstrap.
        bootstrap: resamples of the documents; 0 for no interval.
        weights: share of each source in the mean, by name.
        draft_vocab: the size that is to be used, one of `sizes`; the warnings are about it. Default: all of `vocab`.
        candidates: ids that a vocabulary could hold, such as those a head was trained on; the baseline takes the first
            of them. Default all.

    Raises:
        TokenizerError: vocabulary and counts belong to different tokenizers.
        UsageError: a size outside what the vocabulary ranks.
        VocabularyError: a source without tokens.
    """
    _check_same_tokenizer(vocab, counts)
    shown, grid = _sizes(vocab, sizes)
    length = max(vocab.target_vocab, counts.vocab_size)
    buckets = _buckets(vocab.target_ids, grid, length)
    baseline = _buckets(_first_ids(vocab, candidates), grid, length)
    draft_vocab = vocab.size if draft_vocab is None else draft_vocab
    shares = source_shares(counts, weights)
    measured: list[SourceCoverage] = []
    resampled: list[NDArray[np.float64] | None] = []
    for index, source in enumerate(counts.sources):
        rng = np.random.default_rng([seed, index])
        entry, samples = _measure_source(source, shares[index], buckets, baseline, len(grid), bootstrap, rng)
        measured.append(entry)
        resampled.append(samples)
    if len(measured) > 1:
        measured.append(_weighted_mean(measured, resampled, shares))
    return CoverageReport(
        draft_vocab=draft_vocab,
        target_vocab=vocab.target_vocab,
        sizes=grid,
        shown=shown,
        sources=tuple(measured),
        uncounted=_uncounted(vocab, counts, draft_vocab),
        bootstrap=bootstrap,
        seed=seed,
        warnings=tuple(_warnings(measured, grid, draft_vocab)),
    )


def _check_same_tokenizer(vocab: DraftVocab, counts: TokenCounts) -> None:
    known = vocab.provenance.get("tokenizer_hash")
    if known is not None and counts.tokenizer_hash is not None and known != counts.tokenizer_hash:
        raise TokenizerError(
            f"The vocabulary was made with tokenizer {known}, the counts with {counts.tokenizer_hash}. "
            "Count with the vocabulary's tokenizer.",
            expected=known,
            found=counts.tokenizer_hash,
        )


def _uncounted(vocab: DraftVocab, counts: TokenCounts, size: int) -> int:
    """Return how many of the first ids, forced ones aside, no source counted."""
    chosen = vocab.target_ids[vocab.num_forced : size]
    counted = np.any([source.counts > 0 for source in counts.sources], axis=0)
    return len(chosen) - int(counted[chosen[chosen < len(counted)]].sum())


def _sizes(vocab: DraftVocab, sizes: Sequence[int] | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the sizes to show and all sizes to measure, both ascending, the vocabulary's own among them."""
    smallest = max(vocab.num_forced, 1) if vocab.ranked else vocab.size
    if sizes is not None:
        wrong = [size for size in sizes if not smallest <= size <= vocab.size]
        if wrong:
            raise UsageError(
                f"size {wrong[0]}: expected {smallest} to {vocab.size} for this vocabulary.",
                size=wrong[0],
                smallest=smallest,
                largest=vocab.size,
            )
        shown = tuple(sorted({int(size) for size in sizes}))
    else:
        powers = {1 << exponent for exponent in range(10, 21) if smallest <= 1 << exponent < vocab.size}
        shown = tuple(sorted({*powers, vocab.size}))
    start = min(max(smallest, 256), vocab.size)
    curve = np.unique(np.geomspace(start, vocab.size, _CURVE_POINTS).round().astype(int)).tolist()
    # geomspace may round its last point below the size it was given.
    inside = {size for size in curve if smallest <= size <= vocab.size}
    return shown, tuple(sorted({*inside, *shown, vocab.size}))


def _buckets(order: NDArray[np.int64], sizes: Sequence[int], length: int) -> NDArray[np.int64]:
    """Return for every id the position of the first size that covers it, int64 [length]; len(sizes) for none."""
    rank = np.full(length, len(order) + max(sizes), np.int64)
    rank[order] = np.arange(len(order))
    return np.searchsorted(np.asarray(sizes), rank, side="right").astype(np.int64)


def _first_ids(vocab: DraftVocab, candidates: NDArray[np.int64] | None) -> NDArray[np.int64]:
    """Return the order of the baseline: the vocabulary's forced ids, then all other candidates ascending."""
    forced = vocab.target_ids[: vocab.num_forced] if vocab.ranked else vocab.target_ids[:0]
    rest = np.full(vocab.target_vocab, candidates is None)
    rest[[] if candidates is None else candidates] = True
    rest[forced] = False
    return np.concatenate([forced, np.flatnonzero(rest)])


def _measure_source(
    source: SourceCounts,
    share: float,
    buckets: NDArray[np.int64],
    baseline: NDArray[np.int64],
    num_sizes: int,
    bootstrap: int,
    rng: np.random.Generator,
) -> tuple[SourceCoverage, NDArray[np.float64] | None]:
    """Return the coverage of one source and its resamples [bootstrap, sizes]."""
    part: Part = "held-out"
    if source.held_out is not None and len(source.held_out.token_ids):
        offsets = source.held_out.doc_offsets
        covered = _covered_by_document(source.held_out.token_ids, offsets, buckets, num_sizes)
        by_baseline = _covered_by_document(source.held_out.token_ids, offsets, baseline, num_sizes).sum(axis=0)
        lengths = np.diff(offsets).astype(np.float64)
    else:
        part = "counted"
        covered = _covered_by_count(source.counts, buckets, num_sizes)[None]
        by_baseline = _covered_by_count(source.counts, baseline, num_sizes)
        lengths = np.array([source.counts.sum()], np.float64)
    tokens = float(lengths.sum())
    if tokens == 0:
        raise VocabularyError(
            f"source {source.name!r}: there are no tokens to measure coverage on.", source=source.name, tokens=0
        )
    samples = _resample(covered, lengths, bootstrap, rng) if len(lengths) > 1 and bootstrap > 0 else None
    low, high = _interval(samples)
    entry = SourceCoverage(
        name=source.name,
        weight=float(share),
        part=part,
        documents=len(lengths) if part == "held-out" else 0,
        tokens=int(tokens),
        coverage=covered.sum(axis=0) / tokens,
        low=low,
        high=high,
        baseline=by_baseline / tokens,
    )
    return entry, samples


def _covered_by_document(
    token_ids: NDArray[np.int32], offsets: NDArray[np.int64], buckets: NDArray[np.int64], num_sizes: int
) -> NDArray[np.float64]:
    """Return how many tokens of each document each size covers, float64 [documents, sizes]."""
    documents = len(offsets) - 1
    owner = np.repeat(np.arange(documents), np.diff(offsets))
    cells = owner * (num_sizes + 1) + buckets[token_ids]
    hits = np.bincount(cells, minlength=documents * (num_sizes + 1)).reshape(documents, num_sizes + 1)
    return np.cumsum(hits, axis=1)[:, :num_sizes].astype(np.float64)


def _covered_by_count(counts: NDArray[np.int64], buckets: NDArray[np.int64], num_sizes: int) -> NDArray[np.float64]:
    """Return how many counted tokens each size covers, float64 [sizes]."""
    hits = np.bincount(buckets[: len(counts)], weights=counts, minlength=num_sizes + 1)
    return np.cumsum(hits)[:num_sizes].astype(np.float64)


def _resample(
    covered: NDArray[np.float64], lengths: NDArray[np.float64], bootstrap: int, rng: np.random.Generator
) -> NDArray[np.float64]:
    """Return coverage under documents drawn with replacement, float64 [bootstrap, sizes]."""
    documents = len(lengths)
    at_once = max(1, _WEIGHTS_AT_ONCE // documents)
    rows = []
    for start in range(0, bootstrap, at_once):
        draws = min(at_once, bootstrap - start)
        picks = rng.integers(0, documents, (draws, documents)) + documents * np.arange(draws)[:, None]
        times = np.bincount(picks.ravel(), minlength=draws * documents).reshape(draws, documents).astype(np.float64)
        # A resample that has only empty documents gets coverage 0.
        rows.append((times @ covered) / np.maximum(times @ lengths, 1.0)[:, None])
    return np.concatenate(rows)


def _interval(samples: NDArray[np.float64] | None) -> tuple[NDArray[np.float64] | None, NDArray[np.float64] | None]:
    if samples is None:
        return None, None
    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(samples, [tail, 100 - tail], axis=0)
    return low, high


def _weighted_mean(
    measured: Sequence[SourceCoverage], resampled: Sequence[NDArray[np.float64] | None], shares: NDArray[np.float64]
) -> SourceCoverage:
    samples = None
    if all(sample is not None for sample in resampled):
        samples = np.sum([share * sample for share, sample in zip(shares, resampled, strict=True)], axis=0)
    low, high = _interval(samples)
    return SourceCoverage(
        name=MEAN,
        weight=1.0,
        part="held-out" if all(entry.part == "held-out" for entry in measured) else "counted",
        documents=sum(entry.documents for entry in measured),
        tokens=sum(entry.tokens for entry in measured),
        coverage=np.sum([entry.weight * entry.coverage for entry in measured], axis=0),
        low=low,
        high=high,
        baseline=np.sum([entry.weight * entry.baseline for entry in measured], axis=0),
    )


def _warnings(measured: Sequence[SourceCoverage], sizes: Sequence[int], size: int) -> list[str]:
    found = []
    position = list(sizes).index(size)
    for entry in measured:
        covered, first = entry.coverage[position], entry.baseline[position]
        if covered < first:
            subject = entry.name if entry.name == MEAN else f"source {entry.name!r}"
            found.append(
                f"{subject}: the ranking covers {100 * covered:.2f}%, less than the {100 * first:.2f}% of the first "
                f"{size} ids, which need no corpus. Count text of this kind, or give it more weight"
            )
    counted = [entry.name for entry in measured if entry.part == "counted" and entry.name != MEAN]
    if counted:
        found.append(
            f"coverage of {', '.join(repr(name) for name in counted)} is measured on the counted text itself, because "
            "nothing was held out: it is optimistic"
        )
    return found
