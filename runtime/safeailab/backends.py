"""Drafting backends by name, generation over a named one, and generation that insists on a GPU.

    from eagle_slim.runtime import frontier_generate, register_triton_backend

    register_triton_backend("triton-fp8", draft_weights="fp8")  # the persistent kernel, other weights
    register_triton_backend("mine", my_draft)  # any `DraftFunction`
    output = frontier_generate(model, input_ids, backend="mine", max_new_tokens=128)

"reference" and "triton" are always there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..drafter.choose import CHOICES
from ..drafter.launch import BACKENDS, DraftFunction
from ..errors import GPUAssertionError, UsageError, check_choice
from ..model import SpeculativeModel
from ..requests.output import GenerationOutput
from ..requests.prompts import Prompts
from ..settings import TreeConfig
from .patch import EaModelPatch, check_unpatched
from .reading import check_ea_model, is_ea_model, target_lm_head

_KEPT = "_eagle_slim_joined"
_OLDEST = (8, 0)
_Built = TypeVar("_Built")


@dataclass(frozen=True)
class Backend:
    """What drafts: a name or a `DraftFunction`, and the type of the persistent kernel's weights."""

    drafter: str | DraftFunction = "triton"
    draft_weights: str = "auto"


_registered: dict[str, Backend] = {}


def register_triton_backend(
    name: str = "triton", draft: DraftFunction | None = None, *, draft_weights: str = "auto", overwrite: bool = False
) -> None:
    """Register a drafting backend under a name, for `frontier_generate`.

    Args:
        name: any but "reference". "triton" gives the built-in backend of that name other options.
        draft: a `DraftFunction`, which drafts from buffers into buffers; None is the persistent kernel.
        draft_weights: of the kernel: "fp8" stores its matrices in FP8; "auto" in the model's type.
        overwrite: replace a backend of that name; otherwise a name that is taken is an error.

    Raises:
        UsageError: a name that is taken or no name at all, what cannot be called, or weights beside a function.
    """
    if not isinstance(name, str) or not name:
        raise UsageError(f"A backend's name is a string; got {name!r}.", option="name", found=name)
    is_fixed = name == "reference" or (name == "triton" and draft is not None)
    if is_fixed or (name in _registered and not overwrite):
        hint = "it is built in. Choose another name" if is_fixed else "pass overwrite=True to replace it"
        raise UsageError(f"The backend {name!r} is there already; {hint}.", option="name", found=name)
    check_choice("draft_weights", draft_weights, CHOICES)
    if draft is not None and (not callable(draft) or draft_weights != "auto"):
        raise UsageError(
            "A backend is a callable of (cfg, features, head, bufs), as drafter.reference.draft_ref, or the persistent "
            f"kernel, which alone has draft_weights; got {type(draft).__name__}.",
            option="draft", found=type(draft).__name__,
        )  # fmt: skip
    _registered[name] = Backend("triton" if draft is None else draft, draft_weights)


def unregister_backend(name: str) -> None:
    """Forget a registered backend, or the options of "triton". Raises `UsageError` for what was not registered."""
    if name not in _registered:
        raise _unknown("name", name)
    del _registered[name]


def registered_backends() -> tuple[str, ...]:
    """Names that `frontier_generate` knows, the built-in ones first."""
    return ("reference", "triton", *(name for name in _registered if name != "triton"))


def frontier_generate(
    model: Any,
    input_ids: Any,
    *,
    backend: str = "triton",
    head: Any = None,
    draft_vocab: Any = None,
    tree: TreeConfig | None = None,
    **options: Any,
) -> GenerationOutput | Tensor | tuple[Any, ...]:
    """Generate with a named drafting backend; the text is the target's own with any.

    Args:
        model: a `SpeculativeModel`, a loaded transformers model with its ``head``, or a loaded EaModel of SafeAILab's
            EAGLE.
        input_ids: prompts as `SpeculativeModel.generate` takes them; int64 [1, seq] for an EaModel.
        backend: a name that is built in or was registered.
        head, draft_vocab: of `SpeculativeModel.from_pretrained`, for a transformers model.
        tree: size of the draft tree, for a transformers model; None is that of `from_pretrained`.
        options: of `SpeculativeModel.generate`; of ``eagenerate`` for an EaModel (max_new_tokens, temperature, ...).

    Returns:
        What those return: a `GenerationOutput`; for an EaModel its ids int64 [1, seq], prompt included.

    The drafter is built once for each model and backend, and kept with the model; again after the model was moved to
    another device or type, or an EaModel got another ``ea_layer`` or base model. An EaModel's methods are upstream's
    again when the call returns.

    Raises:
        UsageError: an unknown backend, another kind of model, a head beside a model that has one.
        DrafterError: the backend cannot run on this device.
    """
    if backend not in (*_registered, *BACKENDS):
        raise _unknown("backend", backend)
    found = _registered.get(backend, Backend(backend))
    if not is_ea_model(model):
        if not isinstance(model, SpeculativeModel) and head is None:
            raise UsageError(
                "frontier_generate takes a SpeculativeModel, an EaModel, or a transformers model with its head=; got "
                f"{type(model).__name__} alone.",
                option="model", found=type(model).__name__,
            )  # fmt: skip
        return _join(model, found, head, draft_vocab, tree).generate(input_ids, **options)
    _refuse_beside("An EaModel", head, draft_vocab, tree)
    check_ea_model(model)
    check_unpatched(model)
    base, weight = model.base_model, model.ea_layer.embed_tokens.weight
    made_of = (model.ea_layer, base, base.model, target_lm_head(model), weight.device, weight.dtype)
    patch = _keep(model, made_of, (found,), lambda: EaModelPatch(
        model, drafter=found.drafter, draft_weights=found.draft_weights, whole=not callable(found.drafter)
    ))  # fmt: skip
    # eagenerate begins with reset_kv.
    patch.apply(follow_kv=False)
    try:
        return model.eagenerate(input_ids, **options)  # type: ignore[no-any-return]
    finally:
        patch.remove()


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
) -> GenerationOutput:
    """Generate with a transformers model and its draft head, the whole step on the GPU: one call.

        output = fused_draft_token_generation(model, input_ids, max_new_tokens=128, head="out/slim")
        print(output.results[0].token_ids)

    As `frontier_generate`, with a drafter that is checked for instead of named, and a ``model`` that may also be what
    `SpeculativeModel.from_pretrained` loads (a Hub id, a folder, None for the built-in one), at every call.
    ``drafter``: "triton", or "reference" to run without a GPU. ``draft_weights``: "fp8" stores the drafter's matrices
    in FP8 (sm_89 and later); "auto" in the model's type. ``temperature`` 0 is greedy.

    Raises:
        GPUAssertionError: "triton" without an NVIDIA GPU of sm_80 or later that torch can use, or with a model that
            lies elsewhere.
        UsageError: an EaModel, a head, vocabulary, tree or ``draft_weights`` beside a `SpeculativeModel`, and as
            `from_pretrained` and `generate`.
    """
    if is_ea_model(model):
        raise UsageError(
            "fused_draft_token_generation takes a transformers model; this is an EaModel. Call "
            "frontier_generate(model, input_ids, backend=\"triton\"), or patch_eagle_model(model) and its eagenerate.",
            option="model", found=type(model).__name__,
        )  # fmt: skip
    if drafter == "triton":
        place = _place(model)
        assert_gpu(None if place is None else place[0])
    check_choice("draft_weights", draft_weights, CHOICES)
    if draft_weights != "auto" and isinstance(model, SpeculativeModel):
        raise UsageError(
            f"draft_weights = {draft_weights!r}, and a SpeculativeModel has its drafter's already: leave it out "
            "here, and give draft_weights to from_pretrained.",
            option="draft_weights", found=draft_weights, expected="auto",
        )  # fmt: skip
    whole = _join(model, Backend(drafter, draft_weights), head, draft_vocab, tree)
    return whole.generate(input_ids, temperature=temperature, max_new_tokens=max_new_tokens, **options)


def assert_gpu(device: torch.device | None) -> None:
    """Raise `GPUAssertionError` unless the persistent drafter can run on a device; None is the first GPU."""
    expected = "an NVIDIA GPU of sm_80 (Ampere) or later"
    if device is not None and device.type != "cuda":
        found = f"a model on {device}"
    elif not torch.cuda.is_available():
        found = f"none that torch can use (torch's CUDA: {torch.version.cuda})"
    elif (capability := torch.cuda.get_device_capability(device)) < _OLDEST:
        found = f"{torch.cuda.get_device_name(device)}, sm_{capability[0]}{capability[1]}"
    else:
        return
    raise GPUAssertionError(
        f"Fused generation needs a GPU: expected {expected}, found {found}. Move the model to one, or pass "
        'drafter="reference" to run in plain PyTorch, slowly.',
        expected=expected, found=found,
    )  # fmt: skip


def _unknown(option: str, name: str) -> UsageError:
    known = registered_backends()
    return UsageError(
        f"{option} = {name!r} is unknown; there are {', '.join(known)}. register_triton_backend adds one.",
        option=option, found=name, expected=known,
    )  # fmt: skip


def _refuse_beside(model: str, *given: Any) -> None:
    if any(each is not None for each in given):
        raise UsageError(f"{model} has its own: leave head, draft_vocab and tree out.", option="head")


def _join(model: Any, backend: Backend, head: Any, draft_vocab: Any, tree: TreeConfig | None) -> SpeculativeModel:
    """A `SpeculativeModel` that drafts with a backend, of a loaded model kept with it; else loaded at every call."""
    if isinstance(model, SpeculativeModel):
        _refuse_beside("A SpeculativeModel", head, draft_vocab, tree)
        if model.drafter.name == backend.drafter and backend == Backend(backend.drafter):
            return model
        other = model.with_drafter
        return _keep(model, _place(model), (backend,), lambda: other(backend.drafter, backend.draft_weights))

    def load() -> SpeculativeModel:
        size: dict[str, Any] = {} if tree is None else vars(tree)
        return SpeculativeModel.from_pretrained(
            model, head, draft_vocab=draft_vocab, drafter=backend.drafter, draft_weights=backend.draft_weights, **size
        )

    given = (head, draft_vocab, tree, backend)
    return _keep(model, _place(model), given, load) if isinstance(model, nn.Module) else load()


_BY_VALUE = str | int | Path | TreeConfig | Backend


class _Kept(dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]]):
    """What was built over a model. It lies in the model, so that both go together; a copy of the model begins anew."""

    def __reduce__(self) -> Any:
        # Whoever reads the model's pickle need not have this package.
        return dict, ()


def _keep(model: Any, place: Any, given: tuple[Any, ...], build: Callable[[], _Built]) -> _Built:
    """Build once; anew when the model's ``place`` has changed, whatever was ``given`` then."""
    kept = vars(model).get(_KEPT)
    # Of a model that was unpickled, it is an empty dict.
    if not isinstance(kept, _Kept):
        kept = vars(model)[_KEPT] = _Kept()
    for key in [key for key in kept if key[0] != place]:
        del kept[key]
    # By identity where something is an object: it is kept alive here, so that none takes another's place.
    key = (place, *(each if isinstance(each, _BY_VALUE) else id(each) for each in given))
    if key not in kept:
        kept[key] = (build(), given)
    built: _Built = kept[key][0]
    return built


def _place(model: Any) -> tuple[torch.device, torch.dtype] | None:
    """Where a model is, and in which type: a drafter that was built for another serves it no more."""
    first = next(model.parameters(), None) if isinstance(model, nn.Module) else model
    return None if first is None or not hasattr(first, "dtype") else (first.device, first.dtype)
