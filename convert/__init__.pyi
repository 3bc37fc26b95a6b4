from .artifact.format import Artifact
from .artifact.manifest import Manifest
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
from .heads.draft_head import DraftHead, LazyTensors
from .heads.open import open_head
from .options import ConvertOptions
from .pipeline import Conversion, convert_head, plan_conversion
from .push import push_folder
from .rows.checkpoint import Checkpoint, open_checkpoint
from .sources.builtin import embedded_head, embedded_target_folder
from .verify.verify import Check, Verification, verify_artifact
from .vocabulary_choice import VocabRequest

__all__ = [
    "Artifact",
    "ArtifactError",
    "Check",
    "Checkpoint",
    "CheckpointError",
    "Conversion",
    "ConvertError",
    "ConvertOptions",
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
    "open_checkpoint",
    "open_head",
    "plan_conversion",
    "push_folder",
    "verify_artifact",
]
