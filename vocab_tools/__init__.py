"""Count tokens on real text and rank the vocabulary.

One public function per command of `eagle-vocab`; everything here is imported on first use.

    count     count_tokens(sources, tokenizer) → TokenCounts
    merge     merge_counts(counts) → TokenCounts
    rank      rank_vocabulary(counts, size) → DraftVocab; rank_by_order(order) for ids or a token map
    coverage  measure_coverage(vocab, counts) → CoverageReport
    show      show_vocabulary(vocab, tokenizer) → VocabularyListing
    import    import_token_map(path) → DraftVocab
    export    export_token_map(vocab, path, loader, read_target(target))
"""

import lazy_loader

# Which name lives where is said in __init__.pyi. A module is imported when one of its names is first used, so that
# `--help` loads neither torch nor transformers.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
