"""Which forward a target gets, decided before anything runs, and the reason for it."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
from torch import nn

from ..errors import UnsupportedModelError, check_choice
from .known import is_of_a_known_family, unfit_reason


@dataclass(frozen=True)
class Choice:
    """Name of the forward that was chosen, and the reason."""

    name: str
    reason: str
    is_loss: bool = False
    """Whether the other one would have run, and sooner, but for something that was found in the model."""

    def __str__(self) -> str:
        return f"{self.name} ({self.reason})"


def choose_target_backend(
    asked: str,
    model: nn.Module,
    autocast: tuple[bool, torch.dtype] = (False, torch.bfloat16),
    fused_on: Collection[str] = ("cuda",),
) -> Choice:
    """Choose the fused forward or transformers' own.

    "auto" takes the fused one on devices of the types ``fused_on`` where the model is what `known` says. ``autocast``:
    whether the caller is within `torch.autocast`, and in which type. Raises `UsageError` for an unknown name,
    `UnsupportedModelError` for "fused" where the model cannot be fused.
    """
    device = next(model.parameters()).device

    def unfit() -> str | None:
        if autocast[0]:
            return f"torch.autocast in {str(autocast[1]).removeprefix('torch.')} is on"
        return unfit_reason(model)

    choice = choose_forward(asked, "transformers", unfit, device, fused_on)
    could_be = asked == "auto" and device.type in fused_on and is_of_a_known_family(model)
    return Choice(choice.name, choice.reason, is_loss=could_be and choice.name != "fused")


def choose_forward(
    asked: str,
    other: str,
    unfit: Callable[[], str | None],
    device: torch.device,
    fused_on: Collection[str] = ("cuda",),
) -> Choice:
    """Choose between "fused" and ``other``; ``unfit`` tells why a model is not fused, as the end of a sentence.

    Raises as `choose_target_backend`.
    """
    check_choice("target_backend", asked, ("auto", "fused", other))
    if asked == other:
        return Choice(other, "asked for")
    reason = unfit()
    if asked == "auto":
        reason = reason if reason or device.type in fused_on else f"the model is on {device}"
        return Choice("fused", f"the model is on {device}") if reason is None else Choice(other, reason)
    if reason is not None:
        raise UnsupportedModelError(
            f"target_backend = 'fused' cannot run this model: {reason}. Use target_backend={other!r}."
        )
    return Choice("fused", "asked for")
