"""Which drafter drafts, and in which type its matrices are stored: named by the caller, or chosen.

``draft_weights`` "auto" is the model's own type, also where FP8 would be faster: FP8 drafts slightly other trees, and
from eight sequences at a time on it is slower (docs/kernels.md).
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from eagle_slim.convert.heads.open import DraftHead
from torch import Tensor
from transformers.activations import ACT2FN

from ..errors import DrafterError, SpeedWarning, UnsupportedModelError, UsageError, check_choice
from ..settings import TreeConfig
from .dimensions import check_kernel_activation
from .drafter import Drafter
from .launch import BACKENDS, DraftFunction
from .packed_weights import SharedPacking
from .rope import rotary_embedding
from .weights import HeadWeights

DRAFTERS = ("auto", *BACKENDS)
CHOICES = ("auto", "bf16", "fp8")
NAMES = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64",
    torch.float8_e4m3fn: "fp8",
}  # fmt: skip
"""Short names of the types that matrices can be stored in."""
_FIRST_WITH_FP8 = (8, 9)


def check_drafter(drafter: str | DraftFunction, device: torch.device, names: Sequence[str] = DRAFTERS) -> None:
    """Refuse a drafter that cannot run: `UsageError` for an unknown name, `DrafterError` for "triton" without a GPU.

    With ``TRITON_INTERPRET=1`` in the environment the kernel runs on the CPU, in Triton's interpreter.
    """
    if callable(drafter):
        return
    check_choice("drafter", drafter, names)
    if drafter == "triton" and device.type != "cuda":
        from .kernels.persistent import is_interpreted

        if device.type != "cpu" or not is_interpreted():
            raise DrafterError(
                f"drafter = 'triton' needs an NVIDIA GPU, and the model is on {device}. Use drafter='reference', or "
                "TRITON_INTERPRET=1 in the environment to run the kernel in Triton's interpreter."
            )


def check_draft_weights(
    draft_weights: str, drafter: Any, device: torch.device, dtype: torch.dtype | None = None
) -> None:
    """Refuse a type that the weights cannot be stored in: ``drafter`` as `SpeculativeModel.from_pretrained` takes it.

    ``dtype`` of the model; None while it is not known. Raises `UsageError` for an unknown name, "bf16" for a model of
    another type, and "fp8" with the reference drafter, a callable or a model in float32; `DrafterError` for "fp8"
    without a GPU of sm_89 or later.
    """
    check_choice("draft_weights", draft_weights, CHOICES)
    if draft_weights == "bf16" and dtype not in (None, torch.bfloat16):
        raise UsageError(
            f"draft_weights = 'bf16', and the model is in {_name(dtype)}. The drafter computes in the model's type and "
            "stores its weights in that or in FP8: leave draft_weights out, or load with dtype = 'bfloat16'."
        )
    if draft_weights != "fp8":
        return
    if drafter not in ("auto", "triton"):
        raise UsageError(
            "draft_weights = 'fp8' is for the persistent kernel, and drafter = "
            f"{drafter!r} is asked for. Leave draft_weights out, or take drafter = 'triton'."
        )
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    if capability is None or capability < _FIRST_WITH_FP8:
        chip = "" if capability is None else f" (sm_{capability[0]}{capability[1]})"
        raise DrafterError(
            f"draft_weights = 'fp8' needs an NVIDIA GPU of sm_89 or later, and the model is on {device}{chip}. Leave "
            "draft_weights out."
        )
    if dtype not in (None, torch.bfloat16, torch.float16):
        raise UsageError(
            f"draft_weights = 'fp8' goes with a model in bfloat16 or float16; this one is in {_name(dtype)}. Leave "
            "draft_weights out, or load with dtype = 'bfloat16'."
        )


def check_computable(head: DraftHead, drafter: Any = "auto") -> None:
    """Raise `UnsupportedModelError` for a head that the reference cannot draft with, or, if asked for, the kernel.

    ``drafter`` as `SpeculativeModel.from_pretrained` takes it.
    """
    second_layer = [name for name in head.tensors.names if name.startswith("layers.1.")]
    if second_layer:
        raise UnsupportedModelError(
            f"{head.location}: a head of several decoder layers ({second_layer[0]}) cannot run here. Serve it with "
            "vLLM or SGLang."
        )
    if "input_norm.weight" in head.tensors and "fc_norm.0.weight" in head.tensors:
        raise UnsupportedModelError(
            f"{head.location}: it has both input_norm and fc_norm, and engines differ in which they apply first. Take "
            "out the tensors and the flag of the one that it was trained without."
        )
    activation = str(head.config["hidden_act"])
    if activation not in ACT2FN:
        raise UnsupportedModelError(
            f"{head.location}: hidden_act = {activation!r} is none of transformers' activations. Correct hidden_act in "
            "the head's config.json."
        )
    if drafter == "triton":
        check_kernel_activation(activation)
    rotary_embedding(head.config)


def choose_drafter(
    drafter: str | DraftFunction,
    weights: HeadWeights,
    tree: TreeConfig,
    draft_weights: str = "auto",
    order: Tensor | None = None,
) -> tuple[Drafter, str]:
    """Build the drafter that is asked for, or for "auto" the one that suits; returns it with the reason.

    "auto" takes the kernel on a GPU for heads and trees within its limits. ``order``: int64 [draft_vocab], LM-head
    rows best first, where they are ranked: the kernel packs them so. Raises as `check_drafter`, `check_draft_weights`
    and `Drafter`, and for ``draft_weights`` "fp8" `DrafterError` with a head that only the reference can draft with;
    there is no fallback.
    """
    check_drafter(drafter, weights.device)
    check_draft_weights(draft_weights, drafter, weights.device, weights.dtype)
    if drafter == "reference" or callable(drafter):
        return Drafter(weights, tree, drafter), "asked for"
    if drafter == "auto" and weights.device.type != "cuda":
        return Drafter(weights, tree), f"the model is on {weights.device}"
    packing = SharedPacking(weights, order, torch.float8_e4m3fn if draft_weights == "fp8" else None)
    if drafter == "triton":
        return Drafter(weights, tree, "triton", packing), "asked for"
    try:
        return Drafter(weights, tree, "triton", packing), f"{weights.dtype} on {weights.device}"
    except (UnsupportedModelError, UsageError) as error:
        if draft_weights == "fp8":
            raise DrafterError(
                f"draft_weights = 'fp8' needs the persistent kernel, which cannot take this head: {error} Leave "
                "draft_weights out."
            ) from error
        warnings.warn(
            f"drafter = 'auto' drafts with the reference in plain PyTorch, several times slower than the kernel, which "
            f"cannot take this head or tree: {error} Change that, or take drafter='reference' to say that it is meant.",
            SpeedWarning,
            stacklevel=3,
        )
        return Drafter(weights, tree), str(error)


def _name(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")
