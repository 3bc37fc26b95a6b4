"""A `SpeculativeModel` of whatever a caller has, built at the first call and kept with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..config import TreeConfig
from ..draft_weights import check_name
from ..drafter.reference import ReferenceDrafter
from ..errors import UsageError
from ..kernels.launch import TritonDrafter
from ..loading import DrafterFactory
from ..model import SpeculativeModel

_KEPT = "_eagle_slim_joined"
_BY_VALUE = str | int | Path | TreeConfig
_OWN_KINDS = {"reference": ReferenceDrafter, "triton": TritonDrafter}


class _Kept(dict[tuple[Any, ...], tuple[SpeculativeModel, tuple[Any, ...]]]):
    """What was built over a model. It lies in the model, so that both go together; a copy of the model begins anew."""

    def __reduce__(self) -> Any:
        # Whoever reads the model's pickle need not have this package.
        return dict, ()


def join(
    model: Any,
    drafter: str | DrafterFactory,
    head: Any = None,
    draft_vocab: Any = None,
    tree: TreeConfig | None = None,
    draft_weights: str = "auto",
) -> SpeculativeModel:
    """Join a target with a head and a drafter.

    ``model``: a `SpeculativeModel`, whose head, vocabulary and tree are its own; a loaded transformers model; or what
    `SpeculativeModel.from_pretrained` loads. Nothing is kept for the last. ``tree`` None is that of `from_pretrained`.
    Raises `UsageError` for a head, a vocabulary, a tree or ``draft_weights`` beside a `SpeculativeModel`, and as
    `from_pretrained`.
    """
    check_name(draft_weights)
    given = (head, draft_vocab, tree)
    if isinstance(model, SpeculativeModel):
        if any(each is not None for each in given):
            raise UsageError(
                "A SpeculativeModel has its head, vocabulary and tree: leave head, draft_vocab and tree out, or use "
                "with_draft_vocab and with_tree.",
                option="head",
            )
        if draft_weights != "auto":
            raise UsageError(
                f"draft_weights = {draft_weights!r}, and a SpeculativeModel has its drafter's already: leave it out "
                "here, and give draft_weights to from_pretrained.",
                option="draft_weights", found=draft_weights, expected="auto",
            )  # fmt: skip
        own = _OWN_KINDS.get(drafter) if isinstance(drafter, str) else None
        return model if type(model.drafter) is own else _keep(model, (drafter,), lambda: model.with_drafter(drafter))

    def load() -> SpeculativeModel:
        size: dict[str, Any] = {} if tree is None else {
            "depth": tree.depth, "top_k": tree.top_k, "total_tokens": tree.total_tokens
        }  # fmt: skip
        return SpeculativeModel.from_pretrained(
            model, head, draft_vocab=draft_vocab, drafter=drafter, draft_weights=draft_weights, **size
        )

    return _keep(model, (*given, drafter, draft_weights), load) if isinstance(model, nn.Module) else load()


def _keep(model: Any, given: tuple[Any, ...], build: Any) -> SpeculativeModel:
    kept = vars(model).get(_KEPT)
    # Of a model that was unpickled, it is an empty dict.
    if not isinstance(kept, _Kept):
        kept = vars(model)[_KEPT] = _Kept()
    place = _place(model)
    for key in [key for key in kept if key[0] != place]:
        del kept[key]
    # By identity where something is an object: it is kept alive here, so that none takes another's place.
    key = (place, *(each if isinstance(each, _BY_VALUE) else id(each) for each in given))
    if key not in kept:
        kept[key] = (build(), given)
    return kept[key][0]


def _place(model: Any) -> tuple[torch.device, torch.dtype] | None:
    """Where a model is, and in which type: a drafter that was built for another serves it no more."""
    first = model if isinstance(model, SpeculativeModel) else next(model.parameters(), None)
    return None if first is None else (first.device, first.dtype)
