"""Choose the tokens that a slim head keeps: the defaults of `eagle-convert`; the ranking itself is `vocab_tools`'."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from eagle_slim.vocab_tools.counts import TokenCounts, merge_counts, mixed_weights
from eagle_slim.vocab_tools.coverage import CoverageReport, measure_coverage
from eagle_slim.vocab_tools.errors import UsageError, check_choice
from eagle_slim.vocab_tools.files import check_named
from eagle_slim.vocab_tools.forced import ForcedIds, forced_ids
from eagle_slim.vocab_tools.ranking import check_floors, rank_by_order, rank_vocabulary
from eagle_slim.vocab_tools.sources import CorpusSource
from eagle_slim.vocab_tools.token_maps import import_token_map
from eagle_slim.vocab_tools.tokenizer import LoadedTokenizer
from eagle_slim.vocab_tools.vocabulary import DraftVocab

from .artifact.manifest import Manifest
from .heads.draft_head import DraftHead
from .sources.builtin import embedded_counts_with_held_out, load_embedded_counts

_DEFAULT_CORPUS = CorpusSource(
    "HuggingFaceH4/ultrachat_200k", split="train_sft", column="messages", roles="assistant", max_tokens=10_000_000
)
_DEFAULT_CORPUS_NOTE = (
    f"{_DEFAULT_CORPUS.location} (MIT licence, split train_sft, assistant turns only, the first 10,000,000 tokens)"
)
"""Chats that are counted for a named head when no vocabulary is given."""

_SHOWN_SIZES = (4096, 8192, 16384, 32768, 65536, 131072)

Say = Callable[[str], object]
Count = Callable[[Sequence[CorpusSource], LoadedTokenizer], TokenCounts]


@dataclass(frozen=True)
class VocabRequest:
    """Source of a ranking: at most one of the first four, of which "ids" is the order of the ids.

    `weights` has the share of each source by name, `floors` that of a source's held-out tokens that every size must
    cover. `force_added`: "all" forces every added token.
    """

    counts: tuple[TokenCounts | str | Path, ...] = ()
    token_map: DraftVocab | str | Path | None = None
    corpus: tuple[CorpusSource, ...] = ()
    order: Literal["ids"] | None = None
    weights: Mapping[str, float] | None = None
    floors: Mapping[str, float] | None = None
    force_added: Literal["chat", "all"] = "chat"
    force_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for path in (self.token_map, *self.counts):
            check_named(path)
        check_choice("order", self.order, (None, "ids"))
        check_choice("force_added", self.force_added, ("chat", "all"))
        given = (self.counts, self.token_map, self.corpus, self.order)
        options = ("--counts", "--token-map", "--dataset", "--order")
        used = [name for name, value in zip(options, given, strict=True) if value is not None and value != ()]
        if len(used) > 1:
            raise UsageError(f"{' and '.join(used)} exclude each other: each alone decides which tokens are kept.")
        if (self.weights or self.floors) and (self.token_map is not None or self.order is not None):
            option = "--weights" if self.weights else "--floor"
            raise UsageError(f"{option} is about sources of counts, and a token map or --order ids has no counts.")

    @property
    def is_default(self) -> bool:
        """Whether nothing was asked for."""
        return not (self.counts or self.corpus or self.order) and self.token_map is None


@dataclass(frozen=True)
class Ranking:
    """A ranked vocabulary, to be cut to any size.

    `counts` make the order; None for a token map or id order. `measured` are counts with a held-out part, to measure
    coverage, and a note on that text; None without one.
    """

    head: DraftHead
    request: VocabRequest
    tokenizer: LoadedTokenizer | None
    counts: TokenCounts | None = None
    measured: tuple[TokenCounts, str] | None = None

    def cut(self, size: int | None, coverage: float | None = None) -> DraftVocab:
        """Cut a vocabulary of a size, or the smallest that covers a share of the text; without either, of all ids."""
        if coverage is not None and self.measured is not None and self.measured[0] is not self.counts:
            # These counts hold nothing out: find the size with the counts that do.
            sized = self._cut(self.measured[0], None, coverage)
            vocab = self._cut(self.counts, len(sized), None)
            found = sized.provenance["size_from_coverage"]
            return replace(vocab, provenance={**vocab.provenance, "size_from_coverage": found})
        # Floors are measured on what the ranking did not see.
        seen = self.counts if self.measured is None or not self.request.floors else self.measured[0]
        vocab = self._cut(seen, size, coverage)
        trained = self.head.trained_ids
        if size is not None and trained is not None and len(vocab) < size == len(trained):
            # The whole of a trained vocabulary, ids without a token included: the head is only normalised.
            rest = np.setdiff1d(trained, vocab.target_ids)
            vocab = replace(vocab, target_ids=np.concatenate([vocab.target_ids, rest]))
        return vocab

    def _cut(self, counts: TokenCounts | None, size: int | None, coverage: float | None) -> DraftVocab:
        trained = self.head.trained_ids
        if size is not None and trained is not None and size == len(trained):
            size = None
        forced: ForcedIds | tuple[int, ...] = self.request.force_ids
        if self.tokenizer is not None:
            forced = forced_ids(self.tokenizer, self.request.force_added, self.request.force_ids)
        common: dict[str, Any] = {"tokenizer": self.tokenizer, "forced": forced, "candidates": trained}
        common["target_vocab"] = vocab = self.head.target_vocab
        if counts is not None:
            common["floors"] = self.request.floors if size is not None else None
            return rank_vocabulary(counts, size, coverage, weights=self.request.weights, **common)
        if coverage is not None:
            raise UsageError("--coverage needs counted text: give --counts or --dataset, or a size with --draft-vocab.")
        if self.request.token_map is None:
            return rank_by_order(None, size, **common)
        given = self.request.token_map
        if not isinstance(given, DraftVocab):
            given = import_token_map(given, target_vocab=vocab)
        if not given.ranked and size is not None and size < len(given):
            # An unranked map has no smaller prefix; `prefix` says so.
            given.prefix(size)
        origin = {key: value for key, value in given.provenance.items() if key != "warnings"}
        return rank_by_order(given, size, provenance={"token_map": origin}, **common)

    def coverage(self, vocab: DraftVocab) -> tuple[CoverageReport, str] | None:
        """Measure what a vocabulary covers of text that the ranking did not see, with a note; None without counts.

        Where the ranking was made from all text, one made without the held-out part is measured at the same size.
        """
        if self.measured is None:
            return None
        counts, note = self.measured
        # A ranking with floors is of one size.
        ranked = self._cut(counts, len(vocab) if self.request.floors else None, None)
        size = min(len(vocab), len(ranked))
        shown = sorted({size, *(step for step in _SHOWN_SIZES if max(ranked.num_forced, 1) <= step <= len(ranked))})
        report = measure_coverage(
            ranked, counts, shown, weights=self.request.weights, draft_vocab=size, candidates=self.head.trained_ids
        )
        return report, note


def make_ranking(
    head: DraftHead,
    request: VocabRequest,
    tokenizer: LoadedTokenizer | None,
    *,
    embedded: bool,
    offline: bool,
    count: Count,
    say: Say,
    sizes: Sequence[int] = (),
) -> Ranking:
    """Make the ranking that a request names, once for all `sizes`; one that cannot be cut is refused before counting.

    `embedded`: the head is the built-in one, which has counts of its own. `offline`: the default dataset is refused.
    Raises UsageError where a tokenizer is needed and there is none, or a weight is for no source; CorpusError,
    TokenizerError and VocabularyError for text, or a file of counts, that cannot be used.
    """
    if request.is_default and (manifest := ranked_manifest(head)) is not None:
        if request.weights or request.floors:
            option = "--weights" if request.weights else "--floor"
            raise UsageError(f"{option} is for counts, and an artifact is cut by its own ranks.\nGive --counts.")
        ranks = _ranks_within(manifest, head.target_vocab)
        lacking = manifest.draft_vocab - len(ranks)
        without = f", without {lacking} ids that the target lacks" if lacking else ""
        say(f"vocabulary: the rank order in the head's own manifest{without}")
        if tokenizer is None:
            request = replace(request, force_ids=(*ranks.target_ids[: ranks.num_forced].tolist(), *request.force_ids))
        return Ranking(head, replace(request, token_map=ranks), tokenizer)
    if tokenizer is None and (request.token_map is None or request.force_added == "all"):
        why = "the vocabulary cannot be ranked without one"
        if request.token_map is not None:
            why = "--force-added all keeps its added tokens"
        made = "AutoTokenizer.from_pretrained(TARGET).save_pretrained(FOLDER)"
        advice = f"Name one with --tokenizer. From files of another form transformers makes one: {made}."
        raise UsageError.at(head.location, f"no tokenizer.json is at hand, and {why}.\n{advice}")
    if request.token_map is not None or request.order is not None:
        return Ranking(head, request, tokenizer)
    assert tokenizer is not None
    if request.is_default and embedded:
        say("vocabulary: built-in counts of text that SmolLM2-135M-Instruct wrote itself (9.4 M tokens)")
        counts = load_embedded_counts()
        return Ranking(head, request, tokenizer, counts, embedded_counts_with_held_out(counts, tokenizer))
    if request.counts:
        given = (item if isinstance(item, TokenCounts) else TokenCounts.load(item) for item in request.counts)
        counts = merge_counts(list(given))
    else:
        sources = request.corpus
        if not sources and offline:
            advice = "Give --counts, --token-map, --order or a local --dataset."
            raise UsageError(f"--offline forbids the default vocabulary, counts of {_DEFAULT_CORPUS_NOTE}.\n{advice}")
        if not sources:
            sources = (_DEFAULT_CORPUS,)
            say(f"vocabulary: no corpus was named; counting {_DEFAULT_CORPUS_NOTE}")
        mixed_weights({source.name: source.weight for source in sources}, request.weights)
        check_floors(request.floors or {}, [source.name for source in sources])
        by_id = Ranking(head, replace(request, corpus=(), order="ids", weights=None, floors=None), tokenizer)
        for size in sizes:
            by_id.cut(size)
        counts = count(sources, tokenizer)
    has_held_out = any(source.held_out is not None and source.held_out.num_tokens > 0 for source in counts.sources)
    return Ranking(head, request, tokenizer, counts, (counts, "") if has_held_out else None)


def _ranks_within(manifest: Manifest, target_vocab: int) -> DraftVocab:
    """Return the ranks of an artifact but for ids that its target lacks: it may have been made without the target."""
    ranks = manifest.ranks
    assert ranks is not None
    is_there, forced, provenance = ranks.target_ids < target_vocab, ranks.num_forced, ranks.provenance.copy()
    if ranks.counted_ids is not None:
        provenance["counted_ids"] = int((ranks.counted_ids < target_vocab).sum())
    return DraftVocab(ranks.target_ids[is_there], int(is_there[:forced].sum()), target_vocab, provenance)


def ranked_manifest(head: DraftHead) -> Manifest | None:
    """Return the manifest of a head that is an artifact with ranks already, or None."""
    return head.manifest if head.manifest is not None and head.manifest.rank_order_ids is not None else None
