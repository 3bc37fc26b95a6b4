"""The public names of `eagle_slim.convert`, and what the package promises about importing it."""

import inspect

import eagle_slim.convert as package

NAMES = """
Artifact ArtifactError Check Checkpoint CheckpointError Conversion ConvertError ConvertOptions DraftHead LazyTensors
Manifest MismatchError OutputError OutputExistsError SourceError UnsupportedHeadError Verification VocabRequest
convert_head embedded_head embedded_target_folder open_checkpoint open_head plan_conversion verify_artifact
"""


def test_names_are_pinned():
    assert set(package.__all__) == set(dir(package)) == set(NAMES.split())
    for name in NAMES.split():
        assert inspect.getdoc(getattr(package, name)), name
