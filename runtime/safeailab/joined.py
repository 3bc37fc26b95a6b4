"""A `SpeculativeModel` of whatever a caller has, built at the first call and kept with it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..drafter.draft_weights import check_name
from ..drafter.launch import DraftFunction
from ..errors import UsageError
from ..model import SpeculativeModel
from ..settings import TreeConfig

_KEPT = "_eagle_slim_joined"


@dataclass(frozen=True)
class Backend:
    """What drafts: a name or a `DraftFunction`, and options of the persistent kernel."""

    drafter: str | DraftFunction = "triton"
    draft_weights: str = "auto"
    strict: bool = False


_BY_VALUE = str | int | Path | TreeConfig | Backend


class _Kept(dict[tuple[Any, ...], tuple[SpeculativeModel, tuple[Any, ...]]]):
    """What was built over a model. It lies in the model, so that both go together; a copy of the model begins anew."""

    def __reduce__(self) -> Any:
        # Whoever reads the model's pickle need not have this package.
        return dict, ()


def join(
    model: Any,
    backend: Backend,
    head: Any = None,
    draft_vocab: Any = None,
    tree: TreeConfig | None = None,
) -> SpeculativeModel:
    """Join a target with a head and a drafter.

    ``model``: a `SpeculativeModel`, whose head, vocabulary and tree are its own; a loaded transformers model; or what
    `SpeculativeModel.from_pretrained` loads. Nothing is kept for the last. ``tree`` None is that of `from_pretrained`.
    Raises `UsageError` for a head, a vocabulary, a tree or ``draft_weights`` beside a `SpeculativeModel`, and as
    `from_pretrained`.
    """
    check_name(backend.draft_weights)
    given = (head, draft_vocab, tree)
    if isinstance(model, SpeculativeModel):
        if any(each is not None for each in given):
            raise UsageError(
                "A SpeculativeModel has its head, vocabulary and tree: leave head, draft_vocab and tree out, or use "
                "with_draft_vocab and with_tree.",
                option="head",
            )
        own = model.drafter.name == backend.drafter and backend == Backend(backend.drafter)
        if own:
            return model
        return _keep(
            model, (backend,),
            lambda: model.with_drafter(backend.drafter, backend.draft_weights, strict=backend.strict),
        )  # fmt: skip

    def load() -> SpeculativeModel:
        size: dict[str, Any] = {} if tree is None else {
            "depth": tree.depth, "top_k": tree.top_k, "total_tokens": tree.total_tokens
        }  # fmt: skip
        loaded = SpeculativeModel.from_pretrained(
            model, head, draft_vocab=draft_vocab, drafter=backend.drafter, draft_weights=backend.draft_weights, **size
        )
        if not backend.strict:
            return loaded
        return loaded.with_drafter(backend.drafter, backend.draft_weights, strict=True)

    return _keep(model, (*given, backend), load) if isinstance(model, nn.Module) else load()


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
