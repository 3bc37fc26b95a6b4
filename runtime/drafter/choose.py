"""Which drafter drafts: named by the caller, or chosen by device, head and tree."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import DrafterError, UnsupportedModelError, UsageError, check_choice
from ..settings import TreeConfig
from .draft_weights import check_draft_weights, stored_dtype
from .drafter import Drafter
from .launch import BACKENDS, DraftFunction
from .packed_weights import SharedPacking
from .weights import HeadWeights

DRAFTERS = ("auto", *BACKENDS)


def check_drafter(
    drafter: str | DraftFunction, device: torch.device, names: Sequence[str] = DRAFTERS, option: str = "drafter"
) -> None:  # fmt: skip
    """Refuse a drafter that cannot run: `UsageError` for an unknown name, `DrafterError` for "triton" without a GPU.

    With ``TRITON_INTERPRET=1`` in the environment the kernel runs on the CPU, in Triton's interpreter.
    """
    if callable(drafter):
        return
    check_choice(option, drafter, names)
    if drafter == "triton" and device.type != "cuda":
        from .kernels.persistent import is_interpreted

        if device.type != "cpu" or not is_interpreted():
            raise DrafterError(
                f"{option} = 'triton' needs an NVIDIA GPU, and the model is on {device}. Use {option}='reference', or "
                "TRITON_INTERPRET=1 in the environment to run the kernel in Triton's interpreter.",
                option=option, expected="cuda", found=device.type,
            )  # fmt: skip


def choose_drafter(
    drafter: str | DraftFunction,
    weights: HeadWeights,
    tree: TreeConfig,
    draft_weights: str = "auto",
    order: Tensor | None = None,
) -> tuple[Drafter, str]:
    """Build the drafter that is asked for, or for "auto" the one that suits; returns it with the reason.

    "auto" takes the kernel on a GPU for heads and trees within its limits. ``order``: int64 [draft_vocab], LM-head rows
    best first, where they are ranked: the kernel packs them so. Raises as `check_drafter`, `check_draft_weights` and
    `Drafter`, and `DrafterError` for ``draft_weights`` "fp8" with a head that only the reference can draft with; there
    is no fallback.
    """
    check_drafter(drafter, weights.device)
    check_draft_weights(draft_weights, drafter, weights.device, weights.dtype)
    if drafter == "reference" or callable(drafter):
        return Drafter(weights, tree, drafter), "asked for"
    if drafter == "auto" and weights.device.type != "cuda":
        return Drafter(weights, tree), f"the model is on {weights.device}"
    packing = SharedPacking(weights, order, stored_dtype(draft_weights))
    if drafter == "triton":
        return Drafter(weights, tree, "triton", packing), "asked for"
    try:
        return Drafter(weights, tree, "triton", packing), f"{weights.dtype} on {weights.device}"
    except (UnsupportedModelError, UsageError) as error:
        if draft_weights == "fp8":
            raise DrafterError(
                f"draft_weights = 'fp8' needs the persistent kernel, which cannot take this head: {error} Leave "
                "draft_weights out.",
                **{**error.facts, "option": "draft_weights"},
            ) from error  # fmt: skip
        return Drafter(weights, tree), str(error)
