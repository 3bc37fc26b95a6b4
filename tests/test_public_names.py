"""The public names of packages, each with a docstring."""

import inspect
from importlib import import_module

import pytest

NAMES = {
    "vocab_tools": """
        CorpusError CorpusSource CoverageReport DraftVocab EagleSlimError ForcedIds HeldOut LoadedTokenizer
        SourceCounts SourceCoverage SourceError TargetConfig TokenCounts TokenizerError UsageError VocabularyError
        VocabularyListing count_tokens d2t_from_ids export_token_map forced_ids ids_from_d2t import_token_map
        load_tokenizer measure_coverage merge_counts rank_by_order rank_vocabulary read_target show_vocabulary
        t2d_from_ids
    """,
    "convert": """
        Artifact ArtifactError Check Checkpoint CheckpointError Conversion ConvertError ConvertOptions DraftHead
        LazyTensors Manifest MismatchError OutputError OutputExistsError SourceError UnsupportedHeadError Verification
        VocabRequest convert_head embedded_head embedded_target_folder open_checkpoint open_head plan_conversion
        verify_artifact
    """,
}


@pytest.mark.parametrize("package", NAMES)
def test_public_names(package: str) -> None:
    module = import_module(f"eagle_slim.{package}")
    assert module.__all__ == dir(module) == NAMES[package].split()
    assert all(inspect.getdoc(getattr(module, name)) for name in module.__all__)
