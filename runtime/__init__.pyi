from .config import SamplingConfig, TreeConfig
from .drafter.buffers import Buffers
from .drafter.config import DrafterConfig
from .drafter.follow import FollowRows
from .drafter.reference import Drafter, NewPairs, ReferenceDrafter
from .errors import (
    AcceptanceWarning,
    DrafterError,
    GPUAssertionError,
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
    set_tail,
)
from .miss_log import MissLog
from .model import SpeculativeModel
from .slots import ActiveSlots
from .tree import DraftTree
from .upstream.backends import (
    frontier_generate,
    register_triton_backend,
    registered_backends,
    unregister_backend,
)
from .upstream.fused import fused_draft_token_generation
from .upstream.patch import (
    patch_ea_model_with_triton_drafter,
    patch_eagle_model,
    unpatch_ea_model,
    unpatch_eagle_model,
)

__all__ = [
    "AcceptanceWarning",
    "ActiveSlots",
    "Buffers",
    "DraftTree",
    "Drafter",
    "DrafterConfig",
    "DrafterError",
    "FollowRows",
    "GPUAssertionError",
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
    "frontier_generate",
    "fused_draft_token_generation",
    "launch_drafter",
    "open_tuned_cache",
    "patch_ea_model_with_triton_drafter",
    "patch_eagle_model",
    "prefill_drafter",
    "register_triton_backend",
    "registered_backends",
    "set_tail",
    "unpatch_ea_model",
    "unpatch_eagle_model",
    "unregister_backend",
]
