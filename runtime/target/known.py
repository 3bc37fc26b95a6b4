"""Whether the fused forward may run a model: only if every part of it is what its configuration says.

Its modules must be those of a new model of its configuration: of the same classes, with the same children, shapes of
tensors, and attributes that a forward computes with. What a call goes through must be transformers' own, without hooks;
every parameter must be plain, and all of one type.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from itertools import chain
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from eagle_slim.vocab_tools.compat import (
    CALLS,
    compiled_call,
    experts_function,
    forward_hooks,
    global_hooks,
    name_attention_,
)
from torch import Tensor, nn

from ..errors import UnsupportedModelError, check_choice
from .expert_loading import Fp8Experts, Mxfp4Experts
from .fp8 import Fp8Linear

FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3", "Qwen3Moe", "GptOss")
_FILES = {"Qwen3Moe": "qwen3_moe", "GptOss": "gpt_oss"}
"""transformers' names of families that are not theirs in small letters."""
FUSED_ON = ("cuda",)
"""Types of devices on which "auto" is the fused forward."""
_ATTENTION = ("layer_idx", "head_dim", "scaling", "num_key_value_groups", "is_causal", "sliding_window")
_EXPERTS = ("top_k", "norm_topk_prob", "num_experts", "has_gate", "is_concatenated", "is_transposed", "alpha", "limit")
_OTHERS = ("layer_type", "attention_type", "has_sliding_layers", "variance_epsilon", "max_norm")
_ATTRIBUTES = (*_ATTENTION, *_EXPERTS, *_OTHERS)
"""Attributes of modules that a forward computes with."""
_RECORDER = "transformers.utils.output_capturing"
_FUNCTIONALS = {"linear": F.linear, "scaled_dot_product_attention": F.scaled_dot_product_attention, "silu": F.silu}
"""Functions of `torch.nn.functional` that others are known to replace, as they were when this was imported."""


class Choice(NamedTuple):
    """Name of the forward that was chosen, and the reason."""

    name: str
    reason: str

    def __str__(self) -> str:
        return f"{self.name} ({self.reason})"


def choose_forward(asked: str, other: str, unfit: Callable[[], str | None], device: torch.device) -> Choice:
    """Choose between "fused" and ``other``; "auto" takes the fused one on devices of the types `FUSED_ON`.

    ``unfit`` says why a model is not fused, as the end of a sentence. Raises `UsageError` for an unknown name,
    `UnsupportedModelError` for "fused" where the model cannot be fused.
    """
    check_choice("target_backend", asked, ("auto", "fused", other))
    reason = None if asked == other else unfit()
    if asked == "fused" and reason is not None:
        problem = f"target_backend = 'fused' cannot run this model: {reason}"
        raise UnsupportedModelError(f"{problem}. Use target_backend={other!r}.")
    if asked != "auto":
        return Choice(asked, "asked for")
    is_fused = reason is None and device.type in FUSED_ON
    return Choice("fused" if is_fused else other, reason or f"the model is on {device}")


def family_of(model: nn.Module) -> str | None:
    """Return which of `FAMILIES` a model, a base class of it or what it wraps is of."""
    names = {kind.__name__ for module in (model, *model.children()) for kind in type(module).__mro__}
    return next((each for each in FAMILIES if f"{each}ForCausalLM" in names), None)


def unfit_reason(model: nn.Module) -> str | None:
    """Return why a supported model is not fused, as the end of a sentence that says what was found where, or None."""
    return next(_unfit(model), None)


def unfit_head_dim(head_dim: int) -> str | None:
    """Return why the fused forward takes no heads of a width; None if it does."""
    return f"its head_dim is {head_dim}" if head_dim % 2 or head_dim > 256 else None


def _unfit(model: Any) -> Iterator[str]:
    """Say where a model differs from a new one of its configuration; each answer needs that none came before it."""
    config, family = model.config, str(family_of(model))
    if type(model).__name__ != f"{family}ForCausalLM":
        yield f"{type(model).__name__} is none of {', '.join(f'{each}ForCausalLM' for each in FAMILIES)}"
    name = _FILES.get(family, family.lower())
    package = f"transformers.models.{name}"
    file: Any = import_module(f"{package}.modeling_{name}")
    for name, value in vars(file).items():
        is_class, kind = isinstance(value, type) and name.startswith(family), type(value).__name__
        is_own = value.__qualname__ == name and value.__module__.startswith(package) if is_class else True
        if not is_own or (isinstance(value, FunctionType) and not is_of_a_library(value)):
            yield f"a {kind} of {file.__name__} was replaced by {value.__module__}.{value.__qualname__}"
    if family == "Llama" and getattr(config, "sliding_window", None) is not None:
        yield "its configuration has a sliding window, which Llama's layers do not read"
    if getattr(config, "is_causal", True) is False or getattr(config, "attention_chunk_size", None):
        yield "its configuration asks for another attention mask"
    if config.hidden_act not in ("silu", "swish"):
        yield f"its hidden_act is {config.hidden_act}"
    experts = experts_function(config)
    if experts is not None and not is_of_a_library(experts):
        yield f"its experts are run by {experts.__module__}.{experts.__qualname__}"
    if problem := unfit_head_dim(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads):
        yield problem
    own = copy.deepcopy(config)
    name_attention_(own, "eager")  # needs no further package
    with torch.device("meta"):
        wanted = _facts(getattr(file, f"{family}ForCausalLM")(own))
    for fact, found in _facts(model).items():
        if wanted.get(fact, found) != found:
            yield f"{fact} {found}, and its configuration gives {wanted[fact]}"
    yield from unfit_calls(model)
    rotary = model.model.rotary_emb
    kind = getattr(rotary, "rope_type", "default")
    if kind not in ("default", "linear", "llama3", "yarn"):
        yield f"{kind} RoPE changes its frequencies with the length"
    with torch.device("cpu"):
        expected = type(rotary)(config=config)
    found = rotary.inv_freq.detach().cpu()
    if not torch.allclose(found.float(), expected.inv_freq.to(found.dtype).float(), rtol=1e-5, atol=0):
        yield "model.rotary_emb.inv_freq is not that of its configuration"
    if rotary.attention_scaling != expected.attention_scaling or kind != getattr(expected, "rope_type", kind):
        yield "model.rotary_emb is not that of its configuration"


def _facts(model: Any) -> dict[str, Any]:
    """Return what decides a forward besides numbers, by the beginning of a sentence that says it."""
    facts: dict[str, Any] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        module = module.plain if type(module) in (Fp8Experts, Mxfp4Experts) else module
        is_fp8 = type(module) is Fp8Linear and path.startswith("model.layers.")
        kind, where = nn.Linear if is_fp8 else type(module), path or type(model).__name__
        tensors = {"weight": module.weight} if is_fp8 else dict(module.named_buffers(recurse=False))
        tensors |= dict(module.named_parameters(recurse=False))
        # Biases of these two are read apart from any other.
        compared = [name for name in tensors if name != "bias" or not path.endswith(("o_proj", "down_proj"))]
        is_shared = getattr(module, "config", model.config) is model.config
        facts |= {
            f"{where} is a": f"{kind.__qualname__} of {kind.__module__}",
            f"{where} has inside": ", ".join(sorted(name for name, _ in module.named_children())) or "nothing",
            f"{where} has a configuration": "of the model" if is_shared else "of its own",
            f"{where} has the tensors": ", ".join(compared) or "none",
            **{f"{where}.{name} is": getattr(module, name, None) for name in _ATTRIBUTES},
            **{f"{where}.{name} has the shape": list(tensor.shape) for name, tensor in tensors.items()},
        }
    return facts


def unfit_calls(model: nn.Module) -> Iterator[str]:
    """Say where modules may compute something other than their classes do, or with tensors that are not plain."""
    if any(global_hooks()):
        yield "a global module hook is registered"
    if any(getattr(F, name) is not function for name, function in _FUNCTIONALS.items()):
        yield "a function of torch.nn.functional was replaced"
    for path, module in model.named_modules():
        where, kind = path or type(model).__name__, type(module)
        # New linears of a resized embedding and slices of a list of layers are so; to them it means nothing.
        if module.training and kind not in (nn.Linear, nn.Embedding, nn.ModuleList):
            yield f"{where} is in training mode: call eval()"
        # transformers' own recorder of hidden states changes nothing.
        if any(getattr(hook, "__globals__", {}).get("__name__") != _RECORDER for hook in forward_hooks(module)):
            yield f"{where} has a forward hook"
        for name, found in vars(module).items():
            method = getattr(kind, name, None)
            # transformers 4 leaves a method itself on modules whose outputs it has recorded.
            if callable(method) and MethodType(method, module) != found:
                yield f"{where} has a {name} of its own"
        if compiled_call(module) is not None:
            yield f"{where} has a compiled call of its own"
        for call in CALLS:
            if not _is_own(kind, call):
                yield f"{call} of {kind.__qualname__} was replaced"
    for path, tensor in chain(model.named_parameters(), model.named_buffers()):
        if type(tensor) not in (nn.Parameter, Tensor, nn.Buffer) or type(tensor.data) is not Tensor:
            yield f"{path} is a {type(tensor).__qualname__} of {type(tensor).__module__}"
        if tensor.layout is not torch.strided or tensor.device.type == "meta":
            yield f"{path} is {tensor.layout} on {tensor.device}"
    dtypes = {weight.dtype for weight in model.parameters()}
    if len(dtypes) > 1 or not dtypes <= {torch.float32, torch.bfloat16, torch.float16}:
        yield f"its weights are {', '.join(sorted(map(str, dtypes)))}, not one of float32, bfloat16, float16"
    if len({weight.device for weight in model.parameters()}) > 1:
        yield "its weights are spread over devices"


def _is_own(kind: type, name: str) -> bool:
    """Report whether a method is defined in its class's file and decorated by torch and transformers alone."""
    owner = next(each for each in kind.__mro__ if name in vars(each))
    function = inspect.unwrap(getattr(kind, name), stop=lambda each: not is_of_a_library(each))
    return isinstance(function, FunctionType) and function.__globals__ is vars(sys.modules[owner.__module__])


def is_of_a_library(function: Any) -> bool:
    """Report whether a function was written in torch or transformers."""
    name = getattr(function, "__globals__", {}).get("__name__")
    return isinstance(function, FunctionType) and str(name).partition(".")[0] in ("torch", "transformers")
