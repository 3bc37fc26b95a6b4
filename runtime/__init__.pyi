from .config import SamplingConfig, TreeConfig
from .drafter.buffers import Buffers
from .drafter.config import DrafterConfig
from .drafter.reference import Drafter, NewPairs, ReferenceDrafter
from .errors import (
    AcceptanceWarning,
    DrafterError,
    HeadWarning,
    PairingError,
    PromptError,
    TargetError,
    TargetWarning,
    UnsupportedModelError,
)
from .generation.output import GenerationOutput
from .generation.requests import RequestOutput
from .generation.stats import GenerationStats
from .kernels.launch import (
    TritonDrafter,
    Weights,
    allocate_buffers,
    check_finished,
    launch_drafter,
    open_tuned_cache,
    prefill_drafter,
)
from .miss_log import MissLog
from .model import SpeculativeModel
from .slots import ActiveSlots
from .tree import DraftTree

__all__ = [
    "AcceptanceWarning",
    "ActiveSlots",
    "Buffers",
    "DraftTree",
    "Drafter",
    "DrafterConfig",
    "DrafterError",
    "GenerationOutput",
    "GenerationStats",
    "HeadWarning",
    "MissLog",
    "NewPairs",
    "PairingError",
    "PromptError",
    "ReferenceDrafter",
    "RequestOutput",
    "SamplingConfig",
    "SpeculativeModel",
    "TargetError",
    "TargetWarning",
    "TreeConfig",
    "TritonDrafter",
    "UnsupportedModelError",
    "Weights",
    "allocate_buffers",
    "check_finished",
    "launch_drafter",
    "open_tuned_cache",
    "prefill_drafter",
]
