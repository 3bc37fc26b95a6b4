"""Count tokens on real text and rank the vocabulary.

One public function per command of `eagle-vocab`; everything here is imported on first use.

    count     count_tokens(sources, tokenizer) → TokenCounts
    merge     merge_counts(counts) → TokenCounts
    rank      rank_vocabulary(counts, size) → DraftVocab; rank_by_order(order) for ids or a token map
    coverage  measure_coverage(vocab, counts) → CoverageReport; plot_coverage(report, path)
    show      show_vocabulary(vocab, tokenizer) → VocabularyListing
    import    import_token_map(path) → DraftVocab
    export    export_token_map(vocab, path, format)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .corpus.corpus import CorpusSource
    from .counting.count import count_tokens
    from .counting.counts import HeldOut, SourceCounts, TokenCounts, merge_counts
    from .errors import CorpusError, EagleSlimError, TokenizerError, UsageError, VocabularyError
    from .ranking.coverage import CoverageReport, SourceCoverage, measure_coverage
    from .ranking.plots import plot_coverage
    from .ranking.rank import rank_by_order, rank_vocabulary
    from .ranking.show import VocabularyListing, show_vocabulary
    from .ranking.smoothing import SmoothedCounts, smooth_counts
    from .tokenizer.forced import ForcedIds, forced_ids
    from .tokenizer.load import load_tokenizer
    from .tokenizer.tokenizer import LoadedTokenizer
    from .vocabulary.draft_vocab import DraftVocab
    from .vocabulary.interchange import export_token_map, import_token_map
    from .vocabulary.token_map import d2t_from_ids, ids_from_d2t, t2d_from_ids

__all__ = [
    "CorpusError",
    "CorpusSource",
    "CoverageReport",
    "DraftVocab",
    "EagleSlimError",
    "ForcedIds",
    "HeldOut",
    "LoadedTokenizer",
    "SmoothedCounts",
    "SourceCounts",
    "SourceCoverage",
    "TokenCounts",
    "TokenizerError",
    "UsageError",
    "VocabularyError",
    "VocabularyListing",
    "count_tokens",
    "d2t_from_ids",
    "export_token_map",
    "forced_ids",
    "ids_from_d2t",
    "import_token_map",
    "load_tokenizer",
    "measure_coverage",
    "merge_counts",
    "plot_coverage",
    "rank_by_order",
    "rank_vocabulary",
    "show_vocabulary",
    "smooth_counts",
    "t2d_from_ids",
]

_NAMES_OF_MODULE = {
    "corpus.corpus": ("CorpusSource",),
    "counting.count": ("count_tokens",),
    "counting.counts": ("HeldOut", "SourceCounts", "TokenCounts", "merge_counts"),
    "ranking.coverage": ("CoverageReport", "SourceCoverage", "measure_coverage"),
    "vocabulary.draft_vocab": ("DraftVocab",),
    "errors": ("CorpusError", "EagleSlimError", "TokenizerError", "UsageError", "VocabularyError"),
    "tokenizer.forced": ("ForcedIds", "forced_ids"),
    "vocabulary.interchange": ("export_token_map", "import_token_map"),
    "tokenizer.tokenizer": ("LoadedTokenizer",),
    "ranking.plots": ("plot_coverage",),
    "ranking.rank": ("rank_by_order", "rank_vocabulary"),
    "ranking.show": ("VocabularyListing", "show_vocabulary"),
    "ranking.smoothing": ("SmoothedCounts", "smooth_counts"),
    "vocabulary.token_map": ("d2t_from_ids", "ids_from_d2t", "t2d_from_ids"),
    "tokenizer.load": ("load_tokenizer",),
}
_MODULE_OF_NAME = {name: module for module, names in _NAMES_OF_MODULE.items() for name in names}


def __getattr__(name: str) -> Any:
    # PEP 562: `eagle-vocab --help` must not import torch, transformers or matplotlib.
    if name not in _MODULE_OF_NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULE_OF_NAME[name]}", __name__), name)


def __dir__() -> list[str]:
    return __all__
