"""Which forward a target gets, decided before anything runs, and the reason for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from ..errors import UnsupportedModelError, UsageError
from .fused import unfit_reason

TARGET_BACKENDS = ("auto", "fused", "transformers")


@dataclass(frozen=True)
class Choice:
    """What was chosen, by name, and why."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name} ({self.reason})"


def choose_target_backend(asked: str, model: nn.Module, tap_layers: Sequence[int] | None) -> Choice:
    """Choose the fused forward or transformers' own.

    "auto" takes the fused one on a GPU where the model's classes are exactly those that it knows. Raises `UsageError`
    for an unknown name, `UnsupportedModelError` for "fused" where the model cannot be fused.
    """
    if asked not in TARGET_BACKENDS:
        raise UsageError(
            f"target_backend = {asked!r} is unknown; expected one of {', '.join(TARGET_BACKENDS)}.",
            option="target_backend", found=asked,
        )  # fmt: skip
    if asked == "transformers":
        return Choice("transformers", "asked for")
    reason = unfit_reason(model, tap_layers)
    if asked == "fused":
        if reason is not None:
            raise UnsupportedModelError(
                f"target_backend = 'fused' cannot run this target: {reason}. Use target_backend='transformers'.",
                option="target_backend", reason=reason,
            )  # fmt: skip
        return Choice("fused", "asked for")
    if reason is not None:
        return Choice("transformers", reason)
    device = next(model.parameters()).device
    if device.type != "cuda":
        return Choice("transformers", f"the model is on {device}")
    return Choice("fused", f"{type(model).__name__} on {device}")
