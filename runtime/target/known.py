"""Whether the fused forward may run a model: only if every part of it is what its configuration says.

Its modules must be those of a new model of its configuration: of the same classes, with tensors of the same shapes and
the same attributes that a forward computes with. What a call goes through must be transformers' own, without hooks.
"""

from __future__ import annotations

import copy
import inspect
import sys
from types import FunctionType, MethodType
from typing import Any

import torch
import torch.nn.functional as F
from eagle_slim.vocab_tools import compat
from torch import nn

from .expert_loading import Fp8Experts, Mxfp4Experts
from .fp8 import Fp8Linear
from .fused import FAMILIES, family_of, unfit_kind

LIBRARIES = ("torch", "transformers")
_ATTENTION = ("layer_idx", "head_dim", "scaling", "num_key_value_groups", "is_causal", "sliding_window")
_EXPERTS = ("top_k", "norm_topk_prob", "num_experts", "has_gate", "is_concatenated", "is_transposed", "alpha", "limit")
_OTHERS = ("layer_type", "attention_type", "has_sliding_layers", "variance_epsilon", "max_norm")
_TENSORS = ("weight", "bias", "gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias", "sinks")
_READ = (*_ATTENTION, *_EXPERTS, *_OTHERS, *_TENSORS)
"""Attributes of modules that a forward computes with."""
_FUNCTIONALS = {"linear": F.linear, "scaled_dot_product_attention": F.scaled_dot_product_attention, "silu": F.silu}
"""Functions of `torch.nn.functional` that others are known to replace, as they were when this was imported."""


def unfit_reason(model: Any) -> str | None:
    """Return why a supported model is not fused, as the end of a sentence that says what was found where, or None."""
    config, family, file = model.config, str(family_of(model)), sys.modules[type(model).__module__]
    if type(model).__name__ != f"{family}ForCausalLM" or not file.__name__.startswith("transformers.models."):
        return f"{type(model).__name__} is none of transformers' {', '.join(f'{each}ForCausalLM' for each in FAMILIES)}"
    for name, value in vars(file).items():
        is_own = not isinstance(value, FunctionType) or is_of_a_library(value)
        if isinstance(value, type) and name.startswith(family):
            is_own = value.__qualname__ == name and value.__module__.startswith(f"{file.__package__}.")
        if not is_own:
            return f"{name} of {file.__name__} was replaced by {value.__module__}.{value.__qualname__}"
    experts = compat.experts_function(config)
    if experts is not None and not is_of_a_library(experts):
        return f"its experts are run by {experts.__module__}.{experts.__qualname__}"
    own = copy.deepcopy(config)
    compat.name_attention_(own, "eager")  # needs no further package
    with torch.device("meta"):
        wanted = _facts(type(model)(own))
    found = _facts(model)
    for fact in wanted | found:
        if found.get(fact) != wanted.get(fact):
            return f"{fact} {found.get(fact)}, and its configuration gives {wanted.get(fact)}"
    return unfit_calls(model)


def _facts(model: Any) -> dict[str, Any]:
    """Return what decides a forward besides numbers, by the beginning of a sentence that says it."""
    facts: dict[str, Any] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        module = module.plain if type(module) in (Fp8Experts, Mxfp4Experts) else module
        where, kind = path or type(model).__name__, type(module)
        if kind is Fp8Linear and path.startswith("model.layers."):
            kind = nn.Linear
        facts[f"{where} is a"] = f"{kind.__qualname__} of {kind.__module__}"
        facts[f"{where} has a configuration of its own:"] = getattr(module, "config", model.config) is not model.config
        for name in _READ:
            value: Any = getattr(module, name, None)
            # Biases of these two are read apart from any other.
            if not isinstance(value, nn.Module) and (name != "bias" or not path.endswith(("o_proj", "down_proj"))):
                facts[f"{where}.{name} is"] = list(value.shape) if hasattr(value, "shape") else value
    return facts


def unfit_calls(model: Any) -> str | None:
    """Say where modules may compute something other than their classes do, or the fused forward something else."""
    if any(compat.global_hooks()):
        return "a global module hook is registered"
    if any(getattr(F, name) is not function for name, function in _FUNCTIONALS.items()):
        return "a function of torch.nn.functional was replaced"
    for path, module in model.named_modules():
        where, kind = path or type(model).__name__, type(module)
        # New linears of a resized embedding and slices of a list of layers are so; to them it means nothing.
        if module.training and kind not in (nn.Linear, nn.Embedding, nn.ModuleList):
            return f"{where} is in training mode: call eval()"
        # transformers' own recorder of hidden states changes nothing.
        if any(_file_of(hook) != "transformers.utils.output_capturing" for hook in compat.forward_hooks(module)):
            return f"{where} has a forward hook"
        for name, found in vars(module).items():
            method = getattr(kind, name, None)
            # transformers 4 leaves a method itself on modules whose outputs it has recorded.
            if callable(method) and MethodType(method, module) != found:
                return f"{where} has a {name} of its own"
        if compat.compiled_call(module) is not None:
            return f"{where} has a compiled call of its own"
        for call in compat.CALLS:
            # Decorated by torch and transformers alone.
            function = inspect.unwrap(getattr(kind, call), stop=lambda each: not is_of_a_library(each))
            if _file_of(function) not in {each.__module__ for each in kind.__mro__}:
                return f"{call} of {kind.__qualname__} was replaced"
    return unfit_kind(model)


def is_of_a_library(function: Any) -> bool:
    """Report whether a function was written in torch or transformers."""
    return _file_of(function).partition(".")[0] in LIBRARIES


def _file_of(function: Any) -> str:
    """Return the name of the module that a function was written in; "" for what is no function."""
    return str(function.__globals__.get("__name__")) if isinstance(function, FunctionType) else ""
