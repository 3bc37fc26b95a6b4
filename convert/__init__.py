"""Draft heads in, slim artifacts out.

    from eagle_slim.convert import convert_head, verify_artifact

    (conversion,) = convert_head(draft_vocab=32000, out="slim-head")
    verify_artifact(conversion.folder).raise_if_failed()

Names are loaded when first used, so that importing this package stays quick.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .artifact.artifact import Artifact
    from .artifact.manifest import Manifest
    from .audit.verify import Check, Verification, verify_artifact
    from .conversion.convert import Conversion, convert_head
    from .conversion.vocab_choice import VocabRequest
    from .errors import (
        ArtifactError,
        CheckpointError,
        ConvertError,
        MismatchError,
        OutputError,
        OutputExistsError,
        SourceError,
        UnsupportedHeadError,
    )
    from .head.open import DraftHead, LazyTensors, open_head
    from .sources.builtin import embedded_head, embedded_target_folder, export_embedded_target
    from .sources.hub import push_folder
    from .weights.checkpoint import Checkpoint, open_checkpoint

__all__ = [
    "Artifact",
    "ArtifactError",
    "Check",
    "Checkpoint",
    "CheckpointError",
    "Conversion",
    "ConvertError",
    "DraftHead",
    "LazyTensors",
    "Manifest",
    "MismatchError",
    "OutputError",
    "OutputExistsError",
    "SourceError",
    "UnsupportedHeadError",
    "Verification",
    "VocabRequest",
    "convert_head",
    "embedded_head",
    "embedded_target_folder",
    "export_embedded_target",
    "open_checkpoint",
    "open_head",
    "push_folder",
    "verify_artifact",
]

_MODULES = {
    "Artifact": "artifact.artifact",
    "Check": "audit.verify",
    "Checkpoint": "weights.checkpoint",
    "Conversion": "conversion.convert",
    "DraftHead": "head.open",
    "LazyTensors": "head.open",
    "Manifest": "artifact.manifest",
    "Verification": "audit.verify",
    "VocabRequest": "conversion.vocab_choice",
    "convert_head": "conversion.convert",
    "embedded_head": "sources.builtin",
    "embedded_target_folder": "sources.builtin",
    "export_embedded_target": "sources.builtin",
    "open_checkpoint": "weights.checkpoint",
    "open_head": "head.open",
    "push_folder": "sources.hub",
    "verify_artifact": "audit.verify",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULES.get(name, 'errors')}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
