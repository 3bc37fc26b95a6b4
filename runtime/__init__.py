"""Generation with converted draft heads: lossless, on transformers models, with a plain PyTorch reference.

from eagle_slim.runtime import SpeculativeModel

model = SpeculativeModel.from_pretrained(target, head=..., draft_vocab=16000)
output = model.generate("Why is the sky blue?", max_new_tokens=100)
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import SamplingConfig, TreeConfig
    from .drafter.config import Buffers, DrafterConfig
    from .drafter.reference import Drafter, NewPairs, ReferenceDrafter
    from .errors import AcceptanceWarning, DrafterError, PairingError, PromptError, TargetError, UnsupportedModelError
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
    from .model import GenerationOutput, SpeculativeModel
    from .slots import ActiveSlots
    from .tree import DraftTree

_HOMES = {
    "AcceptanceWarning": "errors",
    "ActiveSlots": "slots",
    "Buffers": "drafter.config",
    "DraftTree": "tree",
    "Drafter": "drafter.reference",
    "DrafterConfig": "drafter.config",
    "DrafterError": "errors",
    "GenerationOutput": "model",
    "GenerationStats": "generation.stats",
    "NewPairs": "drafter.reference",
    "PairingError": "errors",
    "PromptError": "errors",
    "ReferenceDrafter": "drafter.reference",
    "RequestOutput": "generation.requests",
    "SamplingConfig": "config",
    "SpeculativeModel": "model",
    "TreeConfig": "config",
    "TargetError": "errors",
    "TritonDrafter": "kernels.launch",
    "UnsupportedModelError": "errors",
    "Weights": "kernels.launch",
    "allocate_buffers": "kernels.launch",
    "check_finished": "kernels.launch",
    "launch_drafter": "kernels.launch",
    "open_tuned_cache": "kernels.launch",
    "prefill_drafter": "kernels.launch",
}

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
    "NewPairs",
    "PairingError",
    "PromptError",
    "ReferenceDrafter",
    "RequestOutput",
    "SamplingConfig",
    "SpeculativeModel",
    "TargetError",
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


def __getattr__(name: str) -> Any:
    # transformers and torch load when a name is first used, so that `--help` and the small modules stay quick.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
