from .artifact.artifact import Artifact
from .audit.verify import Check, Verification, verify_artifact
from .conversion.convert import PreparedConversion, convert_head, prepare_conversion
from .conversion.options import ConvertOptions
from .conversion.result import Conversion
from .conversion.vocab_choice import VocabRequest
from .conversion.write import Planned
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
from .head.draft_head import DraftHead
from .head.open import open_head
from .head.tensors import LazyTensors
from .manifest import Manifest
from .push import push_folder
from .rows.checkpoint import Checkpoint, open_checkpoint
from .sources.builtin import embedded_head, embedded_target_folder, export_embedded_target

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
    "Planned",
    "PreparedConversion",
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
    "prepare_conversion",
    "push_folder",
    "verify_artifact",
]
