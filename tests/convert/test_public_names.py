"""The public names of `eagle_slim.convert`, and what the package promises about importing it."""

import inspect

import eagle_slim.convert as package

NAMES = {
    "Artifact", "ArtifactError", "Check", "Checkpoint", "CheckpointError", "Conversion", "ConvertError",
    "ConvertOptions", "DraftHead", "LazyTensors", "Manifest", "MismatchError", "OutputError", "OutputExistsError",
    "SourceError", "UnsupportedHeadError", "Verification", "VocabRequest", "convert_head", "embedded_head",
    "embedded_target_folder", "open_checkpoint", "open_head", "plan_conversion",
    "push_folder", "verify_artifact",
}  # fmt: skip


def test_names_are_pinned():
    assert set(package.__all__) == set(dir(package)) == NAMES
    for name in NAMES:
        assert inspect.getdoc(getattr(package, name)), name


def test_parameters_of_the_commands_functions():
    for function in (package.convert_head, package.plan_conversion):
        assert list(inspect.signature(function).parameters) == ["head", "options", "count", "say"]
    options = inspect.signature(package.ConvertOptions).parameters
    assert list(options) == [
        "draft_vocab", "coverage", "vocabulary", "target", "tokenizer", "revision", "subfolder", "out", "force",
        "flavour", "d2t_form", "tap_layers", "gguf", "offline",
    ]  # fmt: skip
    verify = inspect.signature(package.verify_artifact).parameters
    assert list(verify)[:5] == ["folder", "head", "target", "tokenizer", "offline"]
    assert all(parameter.annotation is not inspect.Parameter.empty for parameter in options.values())
