"""Drafting backends by name, generation with a named one, and generation that requires a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..api.output import GenerationOutput
from ..api.prompts import Prompts
from ..drafter.buffers import Buffers
from ..drafter.dimensions import DrafterConfig
from ..drafter.drafter import CHOICES
from ..drafter.launch import DraftFunction, launch_drafter
from ..drafter.packing import Weights
from ..errors import OTHER_NAMES, GPUAssertionError, UsageError, check_choice, misfit
from ..model import SpeculativeModel
from ..settings import TreeConfig, check_tree, explain_unknown
from ..step.graphs import recall
from .patch import EaModelPatch
from .reading import is_ea_model

MAX_KEPT = 4
_registered: dict[str, dict[str, Any]] = {}


@explain_unknown({})
def register_triton_backend(
    name: str = "triton", draft: DraftFunction | None = None, *, draft_weights: str = "auto"
) -> None:
    """Register a drafting backend for `frontier_generate`, under any name but "reference".

    ``draft``: a `DraftFunction`, or None for the persistent kernel, with its ``draft_weights``. "triton" can be given
    other options, not another function. Raises `UsageError` for a name that is taken by something else
    (`unregister_backend`) or no name at all, what cannot be called, and weights beside a function.
    """
    if not isinstance(name, str) or name in ("", "reference") or (name == "triton" and draft is not None):
        raise misfit("name", "neither empty nor that of a built-in backend", name)
    check_choice("draft_weights", draft_weights, CHOICES)
    if draft is not None and (not callable(draft) or draft_weights != "auto"):
        raise misfit("draft", "a DraftFunction, or None with draft_weights", type(draft).__name__)
    how = {"drafter": "triton" if draft is None else draft, "draft_weights": draft_weights}
    if _registered.setdefault(name, how) != how:
        raise misfit("name", "a new one: unregister_backend forgets this one", name)


def unregister_backend(name: str) -> None:
    """Forget a registered backend, or the options of "triton". Raises `UsageError` for what was not registered."""
    if _registered.pop(name, None) is None:
        raise misfit("name", f"one that was registered, of {[*_registered]}", name)


def registered_backends() -> tuple[str, ...]:
    """List the names that `frontier_generate` knows, the built-in ones first."""
    return ("reference", "triton", *(name for name in _registered if name != "triton"))


def frontier_generate(
    model: Any,
    input_ids: Any = None,
    *,
    backend: str = "triton",
    head: Any = None,
    draft_vocab: Any = None,
    tree: TreeConfig | None = None,
    features_concat: Any = None,
    weights: Weights | None = None,
    bufs: Buffers | None = None,
    **options: Any,
) -> GenerationOutput | Tensor | tuple[Any, ...]:
    """Generate with a named drafting backend; the text is the target's own with any. Or draft once, from features.

        output = frontier_generate(model, input_ids, backend="mine", max_new_tokens=128)
        tokens, paths, mask, positions = frontier_generate(config, features_concat=X, weights=weights, bufs=bufs)

    ``model``: a `SpeculativeModel`, a loaded transformers model with its ``head`` (`from_pretrained`), or an
    EaModel. ``input_ids``, ``options`` and the result are those of `SpeculativeModel.generate`, or of ``eagenerate``:
    int64 [1, seq]; ``top_p=0.0`` and ``top_k=0`` are off, as there. Afterwards the EaModel's methods are upstream's
    again. The four drafters used last are kept with the model, and built again after that was moved or got other parts.
    Raises `UsageError` for an unknown backend or model, and a head beside one that has its own; `DrafterError` where it
    cannot run.

    Without a target, a `DrafterConfig` takes the model's place, and ``features_concat`` that of the ids. They,
    ``weights`` and ``bufs``, which holds the new tokens, are those of `launch_drafter`, and so are result and errors;
    `UsageError` where they are not complete, or not alone.
    """
    check_choice("backend", backend, registered_backends())
    how = _registered.get(backend, {"drafter": backend, "draft_weights": "auto"})
    parts = {"head": head, "draft_vocab": draft_vocab, "tree": tree}
    if isinstance(model, DrafterConfig):
        given = [name for name, value in (parts | options).items() if value is not None]
        if weights is None or bufs is None or given or (input_ids is None) is (features_concat is None):
            expected = "A model that is a DrafterConfig goes with features_concat, weights and bufs, and nothing else"
            raise UsageError(f"{expected}; got {given or 'not these three'}. {OTHER_NAMES}")
        features = input_ids if features_concat is None else features_concat
        if how["draft_weights"] == "fp8" and model.weight_dtype != torch.float8_e4m3fn:
            raise misfit("backend", f"one for {model.weight_dtype}, which the configuration has", "fp8")
        return launch_drafter(model, features, weights, bufs, how["drafter"])
    if input_ids is None or any(each is not None for each in (features_concat, weights, bufs)):
        raise misfit("model", "a DrafterConfig, or given with input_ids alone", type(model).__name__)
    if head is None and not isinstance(model, SpeculativeModel) and not is_ea_model(model):
        raise misfit("model", "a SpeculativeModel, an EaModel, or given with its head", type(model).__name__)
    return _generate(model, input_ids, parts, how, options)


def _generate(
    model: Any, input_ids: Any, parts: dict[str, Any], how: dict[str, Any], options: dict[str, Any]
) -> GenerationOutput | Tensor | tuple[Any, ...]:
    """Generate with the drafter that ``how`` names; ``parts``: head, draft_vocab and tree."""
    # Options of other drafters.
    for name in {"fallback", "overwrite", "use_triton_drafter"} & options.keys():
        raise UsageError(f"There is no option {name!r}. {OTHER_NAMES}")
    # Zeros are off, as upstream says it; here top_p = 1.0 and an integer are.
    if isinstance(options.get("top_k"), float) and options["top_k"] == 0:
        options["top_k"] = 0
    built = _build_once(model, parts, how)
    if isinstance(built, SpeculativeModel):
        if options.get("top_p") == 0:
            options["top_p"] = 1.0
        return built.generate(input_ids, **options)
    built.apply()
    try:
        answer: Tensor | tuple[Any, ...] = model.eagenerate(input_ids, **options)
        return answer
    finally:
        built.remove()


def fused_draft_token_generation(
    model: nn.Module | SpeculativeModel | str | Path | None,
    input_ids: Prompts,
    temperature: float = 0.0,
    max_new_tokens: int = 256,
    *,
    drafter: str = "triton",
    draft_weights: str = "auto",
    head: Any = None,
    draft_vocab: Any = None,
    tree: TreeConfig | None = None,
    **options: Any,
) -> GenerationOutput | Tensor | tuple[Any, ...]:
    """Generate as `frontier_generate`, the whole step on the GPU; ``model`` may also be what `from_pretrained` loads.

    Raises `GPUAssertionError` unless ``drafter`` is "reference" or there is an NVIDIA GPU of sm_80 or later with the
    model on it; `UsageError` for what a `SpeculativeModel` or an EaModel has already.
    """
    device = (_place(model) or [torch.device("cuda")])[0]
    has_gpu = device.type == "cuda" and torch.cuda.is_available()
    major, minor = torch.cuda.get_device_capability(device) if has_gpu else (0, 0)
    if drafter == "triton" and major < 8:
        found = f"sm_{major}{minor}" if has_gpu else f"none for a model on {device}"
        advice = 'Move the model to one, or pass drafter="reference" to run in plain PyTorch, slowly.'
        raise GPUAssertionError(f"Expected an NVIDIA GPU of sm_80 (Ampere) or later, found {found}. {advice}")
    if isinstance(model, SpeculativeModel) and draft_weights != "auto":
        raise misfit("draft_weights", "left out, as a SpeculativeModel has its own", draft_weights)
    how = {"drafter": drafter, "draft_weights": draft_weights}
    options |= {"temperature": temperature, "max_new_tokens": max_new_tokens}
    return _generate(model, input_ids, {"head": head, "draft_vocab": draft_vocab, "tree": tree}, how, options)


class _Kept(dict[Any, Any]):
    """Drafters built over a model, by its `_place`; copies and pickles of the model start empty."""

    def __reduce__(self) -> Any:
        return dict, ()


def _build_once(model: Any, parts: dict[str, Any], how: dict[str, Any]) -> Any:
    """Return the `SpeculativeModel`, or the `EaModelPatch`, that drafts as ``how`` says; kept with a loaded model."""
    if parts["tree"] is not None:
        check_tree(parts["tree"])
    build: Any = SpeculativeModel.from_pretrained
    given = {"target": model, **parts, **how}
    if isinstance(model, SpeculativeModel) or is_ea_model(model):
        if any(part is not None for part in parts.values()):
            raise UsageError("This model has its own: leave head, draft_vocab and tree out.")
        build, given = (EaModelPatch, {"model": model, **how}) if is_ea_model(model) else (model.with_drafter, how)
    if isinstance(model, SpeculativeModel) and how == {"drafter": model.drafter.backend, "draft_weights": "auto"}:
        return model
    if not (place := _place(model)):
        return build(**given)
    kept = vars(model).get("_eagle_slim_kept")
    if not isinstance(kept, _Kept) or place not in kept:
        kept = vars(model)["_eagle_slim_kept"] = _Kept({place: {}})
    # Objects by identity: they are kept alive here, so that none takes another's place.
    by_value = str | int | Path | TreeConfig
    key = tuple((name, each if isinstance(each, by_value) else id(each)) for name, each in given.items())
    return recall(kept[place], key, MAX_KEPT, lambda: (build(**given), given))[0]


def _place(model: Any) -> tuple[Any, ...]:
    """Identify a loaded model: device, dtype, and an EaModel's parts with their classes, which patches change."""
    layer = getattr(model, "ea_layer", model)
    first: Any = next(layer.parameters(), None) if isinstance(layer, nn.Module) else layer
    parts = (type(model), layer, type(layer), model.base_model) if is_ea_model(model) else ()
    return (first.device, first.dtype, *parts) if hasattr(first, "dtype") else ()
