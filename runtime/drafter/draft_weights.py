"""The type in which a draft head's matrices are stored, as users name it: ``draft_weights``.

"auto" is the model's own type, also where FP8 would be faster: FP8 drafts slightly other trees, and from eight
sequences at a time on it is slower (docs/kernels.md).
"""

from __future__ import annotations

from typing import Any

import torch

from ..errors import DrafterError, UsageError, check_choice

CHOICES = ("auto", "bf16", "fp8")
NAMES = {
    torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64",
    torch.float8_e4m3fn: "fp8",
}  # fmt: skip
"""Of the types that matrices can be stored in."""
_FIRST_WITH_FP8 = (8, 9)


def check_name(draft_weights: str) -> None:
    """Raise `UsageError` for a name that is none of `CHOICES`."""
    check_choice("draft_weights", draft_weights, CHOICES)


def check_draft_weights(
    draft_weights: str, drafter: Any, device: torch.device, dtype: torch.dtype | None = None
) -> None:
    """Refuse what cannot be stored so: ``drafter`` as `SpeculativeModel.from_pretrained` takes it.

    ``dtype`` of the model; None while it is not known. Raises `UsageError` for an unknown name, "bf16" for a model of
    another type, and "fp8" with the reference drafter, a callable or a model in float32; `DrafterError` for "fp8"
    without a GPU of sm_89 or later.
    """
    check_name(draft_weights)
    if draft_weights == "bf16" and dtype not in (None, torch.bfloat16):
        raise UsageError(
            f"draft_weights = 'bf16', and the model is in {_name(dtype)}. The drafter computes in the model's type and "
            "stores its weights in that or in FP8: leave draft_weights out, or load with dtype = 'bfloat16'.",
            option="draft_weights", found=dtype, expected=torch.bfloat16,
        )  # fmt: skip
    if draft_weights != "fp8":
        return
    if drafter not in ("auto", "triton"):
        raise UsageError(
            "draft_weights = 'fp8' is for the persistent kernel, and drafter = "
            f"{drafter!r} is asked for. Leave draft_weights out, or take drafter = 'triton'.",
            option="draft_weights", found=drafter, expected="triton",
        )  # fmt: skip
    if device.type != "cuda":
        raise DrafterError(
            f"draft_weights = 'fp8' needs an NVIDIA GPU of sm_89 or later, and the model is on {device}. Leave "
            "draft_weights out.",
            option="draft_weights", expected="cuda", found=device.type,
        )  # fmt: skip
    capability = torch.cuda.get_device_capability(device)
    chip = f"sm_{capability[0]}{capability[1]}"
    if capability < _FIRST_WITH_FP8:
        raise DrafterError(
            f"draft_weights = 'fp8' needs a GPU of sm_89 or later; {device} is {chip}. Leave draft_weights out.",
            option="draft_weights", expected="sm_89", found=chip,
        )  # fmt: skip
    if dtype not in (None, torch.bfloat16, torch.float16):
        raise UsageError(
            f"draft_weights = 'fp8' goes with a model in bfloat16 or float16; this one is in {_name(dtype)}. Leave "
            "draft_weights out, or load with dtype = 'bfloat16'.",
            option="draft_weights", found=dtype, expected=(torch.bfloat16, torch.float16),
        )  # fmt: skip


def stored_dtype(draft_weights: str) -> torch.dtype | None:
    """The type to store matrices in; None for the model's own."""
    return torch.float8_e4m3fn if draft_weights == "fp8" else None


def _name(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")
