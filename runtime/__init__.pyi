from . import compare
from .api.output import GenerationOutput
from .api.request import RequestOutput
from .api.stats import GenerationStats
from .drafter.buffers import Buffers
from .drafter.dimensions import DrafterConfig
from .drafter.drafter import Drafter
from .drafter.follow import FollowRows
from .drafter.launch import (
    DraftFunction,
    allocate_buffers,
    check_finished,
    launch_drafter,
    prefill_drafter,
    set_tail,
)
from .drafter.packing import Weights
from .drafter.rope import RotaryEmbedding
from .drafter.tuned_cache import open_tuned_cache
from .drafter.weights import HeadWeights
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
from .model import SpeculativeModel
from .safeailab.backends import (
    frontier_generate,
    fused_draft_token_generation,
    register_triton_backend,
    registered_backends,
    unregister_backend,
)
from .safeailab.patch import (
    patch_ea_model_with_triton_drafter,
    patch_eagle_model,
    unpatch_ea_model,
    unpatch_eagle_model,
)
from .settings import SamplingConfig, TreeConfig
from .tree import DraftTree

__all__ = [
    "AcceptanceWarning",
    "Buffers",
    "DraftFunction",
    "DraftTree",
    "Drafter",
    "DrafterConfig",
    "DrafterError",
    "FollowRows",
    "GPUAssertionError",
    "GenerationOutput",
    "GenerationStats",
    "HeadWarning",
    "HeadWeights",
    "PairingError",
    "PromptError",
    "RequestOutput",
    "RotaryEmbedding",
    "SamplingConfig",
    "SpeculativeModel",
    "TargetError",
    "TargetWarning",
    "TreeConfig",
    "UnsupportedModelError",
    "Weights",
    "allocate_buffers",
    "check_finished",
    "compare",
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
