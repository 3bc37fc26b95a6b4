"""Which forward a target gets, decided before anything runs, and the reason for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ..errors import UnsupportedModelError, check_choice
from .fused import unfit_reason


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
    device = next(model.parameters()).device
    return choose_forward(asked, "transformers", lambda: unfit_reason(model, tap_layers), device)


def choose_forward(asked: str, other: str, unfit: Callable[[], str | None], device: torch.device) -> Choice:
    """Choose between "fused" and ``other``; ``unfit`` tells why a model is not fused, as the end of a sentence.

    Raises as `choose_target_backend`.
    """
    check_choice("target_backend", asked, ("auto", "fused", other))
    if asked == other:
        return Choice(other, "asked for")
    reason = unfit()
    if asked == "auto":
        reason = reason if reason or device.type == "cuda" else f"the model is on {device}"
        return Choice("fused", f"the model is on {device}") if reason is None else Choice(other, reason)
    if reason is not None:
        raise UnsupportedModelError(
            f"target_backend = 'fused' cannot run this model: {reason}. Use target_backend={other!r}.",
            option="target_backend", reason=reason,
        )  # fmt: skip
    return Choice("fused", "asked for")
