from .counting import count_tokens
from .counts import HeldOut, SourceCounts, TokenCounts, merge_counts
from .coverage import CoverageReport, SourceCoverage, measure_coverage
from .errors import CorpusError, EagleSlimError, SourceError, TokenizerError, UsageError, VocabularyError
from .forced import ForcedIds, forced_ids
from .ranking import rank_by_order, rank_vocabulary
from .show import VocabularyListing, show_vocabulary
from .sources import CorpusSource
from .target import TargetConfig, read_target
from .token_maps import d2t_from_ids, export_token_map, ids_from_d2t, import_token_map, t2d_from_ids
from .tokenizer import LoadedTokenizer, load_tokenizer
from .vocabulary import DraftVocab

__all__ = [
    "CorpusError", "CorpusSource", "CoverageReport", "DraftVocab", "EagleSlimError", "ForcedIds", "HeldOut",
    "LoadedTokenizer", "SourceCounts", "SourceCoverage", "SourceError", "TargetConfig", "TokenCounts", "TokenizerError",
    "UsageError", "VocabularyError", "VocabularyListing", "count_tokens", "d2t_from_ids", "export_token_map",
    "forced_ids", "ids_from_d2t", "import_token_map", "load_tokenizer", "measure_coverage", "merge_counts",
    "rank_by_order", "rank_vocabulary", "read_target", "show_vocabulary", "t2d_from_ids",
]  # fmt: skip
