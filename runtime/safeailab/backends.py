"""Drafting backends by name, and generation over a named one.

    from eagle_slim.runtime import frontier_generate, register_triton_backend

    register_triton_backend("triton-fp8", draft_weights="fp8")  # the persistent kernel, other weights
    register_triton_backend("mine", my_draft)  # any `DraftFunction`
    output = frontier_generate(model, input_ids, backend="mine", max_new_tokens=128)

"reference" and "triton" are always there.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import Tensor, nn

from ..drafter.draft_weights import check_name
from ..drafter.launch import BACKENDS, DraftFunction
from ..errors import UsageError
from ..model import SpeculativeModel
from ..requests.output import GenerationOutput
from ..settings import TreeConfig
from .joined import Backend, join
from .patch import EaModelPatch, is_patched
from .reading import check_ea_model, is_ea_model, target_lm_head

_MadeOf = tuple[Any, ...]
_registered: dict[str, Backend] = {}
_ea_patches: weakref.WeakKeyDictionary[nn.Module, dict[str, tuple[Backend, _MadeOf, EaModelPatch]]] = (
    weakref.WeakKeyDictionary()
)


def register_triton_backend(
    name: str = "triton",
    draft: DraftFunction | None = None,
    *,
    draft_weights: str = "auto",
    strict: bool = False,
    overwrite: bool = False,
) -> None:
    """Register a drafting backend under a name, for `frontier_generate`.

    Args:
        name: any but "reference". "triton" gives the built-in backend of that name other options.
        draft: a `DraftFunction`, which drafts from buffers into buffers; None is the persistent kernel with the two
            options below.
        draft_weights: "fp8" stores the kernel's matrices in FP8; "auto" in the model's type.
        strict: launch parameters that were not tuned for these dimensions are an error.
        overwrite: replace a backend of that name; otherwise a name that is taken is an error.

    Raises:
        UsageError: a name that is taken or no name at all, what cannot be called, or options beside a function.
    """
    if not isinstance(name, str) or not name:
        raise UsageError(f"A backend's name is a string; got {name!r}.", option="name", found=name)
    is_fixed = name == "reference" or (name == "triton" and draft is not None)
    if is_fixed or (name in _registered and not overwrite):
        hint = "it is built in. Choose another name" if is_fixed else "pass overwrite=True to replace it"
        raise UsageError(f"The backend {name!r} is there already; {hint}.", option="name", found=name)
    check_name(draft_weights)
    if draft is not None and not callable(draft):
        raise UsageError(
            "A backend is a callable of (cfg, features, head, bufs), as drafter.reference.draft_ref; got "
            f"{type(draft).__name__}.",
            option="draft", found=type(draft).__name__,
        )  # fmt: skip
    if draft is not None and (draft_weights != "auto" or strict):
        raise UsageError(
            "draft_weights and strict are options of the persistent kernel: a function of your own has none.",
            option="draft",
        )
    _registered[name] = Backend("triton" if draft is None else draft, draft_weights, strict)


def unregister_backend(name: str) -> None:
    """Forget a registered backend, or the options of "triton". Raises `UsageError` for what was not registered."""
    if name not in _registered:
        raise UsageError(
            f"No backend {name!r} was registered; there are {', '.join(registered_backends())}.",
            option="name", found=name,
        )  # fmt: skip
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

    The drafter is built once for each model and backend, and kept as long as the model; again after the model was moved
    to another device or type, or an EaModel got another ``ea_layer`` or base model. An EaModel is as it was before when
    the call returns.

    Raises:
        UsageError: an unknown backend, another kind of model, a head beside a model that has one.
        DrafterError: the backend cannot run on this device.
    """
    found = _find(backend)
    if not is_ea_model(model):
        if not isinstance(model, SpeculativeModel) and head is None:
            raise UsageError(
                "frontier_generate takes a SpeculativeModel, an EaModel, or a transformers model with its head=; got "
                f"{type(model).__name__} alone.",
                option="model", found=type(model).__name__,
            )  # fmt: skip
        return join(model, found, head, draft_vocab, tree).generate(input_ids, **options)
    if any(each is not None for each in (head, draft_vocab, tree)):
        raise UsageError(
            "An EaModel has its head, vocabulary and tree: leave head, draft_vocab and tree out, or patch it.",
            option="head",
        )
    patch = _ea_patch(model, backend, found)
    # eagenerate begins with reset_kv.
    patch.apply(follow_kv=False)
    try:
        return model.eagenerate(input_ids, **options)  # type: ignore[no-any-return]
    finally:
        patch.remove()


def _find(backend: str) -> Backend:
    if backend in _registered:
        return _registered[backend]
    if backend not in BACKENDS:
        raise UsageError(
            f"backend = {backend!r} is unknown; there are {', '.join(registered_backends())}. register_triton_backend "
            "adds one.",
            option="backend", found=backend, expected=registered_backends(),
        )  # fmt: skip
    return Backend(backend)


def _ea_patch(model: Any, name: str, backend: Backend) -> EaModelPatch:
    check_ea_model(model)
    if is_patched(model):
        raise UsageError(
            "This EaModel is patched: call its eagenerate, or unpatch_ea_model(model) before frontier_generate.",
            option="model",
        )
    made_of = _made_of(model)
    kept = _ea_patches.setdefault(model, {})
    for other in [other for other, (_, before, _) in kept.items() if before != made_of]:
        del kept[other]
    if name not in kept or kept[name][0] != backend:
        patch = EaModelPatch(
            model, drafter=backend.drafter, draft_weights=backend.draft_weights, whole=not callable(backend.drafter),
            strict=backend.strict,
        )  # fmt: skip
        kept[name] = (backend, made_of, patch)
    return kept[name][2]


def _made_of(model: Any) -> _MadeOf:
    """What a patch is built over: it serves as long as all of it is the same."""
    base, weight = model.base_model, model.ea_layer.embed_tokens.weight
    parts = (model.ea_layer, base, getattr(base, "model", None), target_lm_head(model))
    return (*parts, weight.device, weight.dtype)
