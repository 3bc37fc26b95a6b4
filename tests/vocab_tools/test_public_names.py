from eagle_slim import vocab_tools

PUBLIC = """
CorpusError CorpusSource CoverageReport DraftVocab EagleSlimError ForcedIds HeldOut LoadedTokenizer
SourceCounts SourceCoverage SourceError TargetConfig TokenCounts TokenizerError UsageError VocabularyError
VocabularyListing count_tokens d2t_from_ids export_token_map forced_ids ids_from_d2t import_token_map load_tokenizer
measure_coverage merge_counts rank_by_order rank_vocabulary read_target show_vocabulary t2d_from_ids
""".split()  # noqa: SIM905 - a list of names reads best as a paragraph


def test_the_public_names_are_these() -> None:
    assert vocab_tools.__all__ == PUBLIC
    assert dir(vocab_tools) == PUBLIC
    assert all(getattr(vocab_tools, name).__doc__ for name in PUBLIC)
