from .corpus.source import CorpusSource
from .counting.count import count_tokens
from .counting.counts import HeldOut, SourceCounts, TokenCounts, merge_counts
from .errors import CorpusError, EagleSlimError, TokenizerError, UsageError, VocabularyError
from .ranking.coverage import measure_coverage
from .ranking.plots import plot_coverage
from .ranking.rank import rank_by_order, rank_vocabulary
from .ranking.report import CoverageReport, SourceCoverage
from .ranking.show import VocabularyListing, show_vocabulary
from .tokenizer.forced import ForcedIds, forced_ids
from .tokenizer.load import load_tokenizer
from .tokenizer.tokenizer import LoadedTokenizer
from .vocabulary.draft_vocab import DraftVocab
from .vocabulary.export_map import export_token_map
from .vocabulary.import_map import import_token_map
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
    "t2d_from_ids",
]
