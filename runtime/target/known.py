"""Whether the fused forward may run a model: only if every part of it is what its configuration says.

Every module on the path of a forward must be of exactly the known class, with exactly the known children; every
parameter plain, of one type, and of the shape that the configuration gives; attributes that a forward computes with
must have the configuration's values; each ``forward`` must be transformers' own, without hooks.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from itertools import chain
from types import FunctionType, MethodType
from typing import Any

import torch
import torch.nn.functional as F
from eagle_slim.vocab_tools.compat import CALLS, compiled_call, forward_hooks, global_hooks, name_attention_
from torch import Tensor, nn

from ..errors import UnsupportedModelError, check_choice
from .expert_loading import Fp8Experts
from .fp8 import Fp8Linear, Weight

FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3", "Qwen3Moe")
_FILES = {"Qwen3Moe": "qwen3_moe"}
"""transformers' names of families that are not theirs in small letters."""
FUSED_ON = ("cuda",)
"""Types of devices on which "auto" is the fused forward."""
_PARTS = ("ForCausalLM", "Model", "DecoderLayer", "Attention", "MLP", "RMSNorm", "RotaryEmbedding")
_ATTENTION = ("layer_idx", "head_dim", "scaling", "num_key_value_groups", "is_causal", "sliding_window")
_EXPERTS = ("top_k", "norm_topk_prob", "num_experts", "has_gate", "is_concatenated", "is_transposed")
_ATTRIBUTES = (
    *_ATTENTION,
    *_EXPERTS,
    "layer_type",
    "attention_type",
    "has_sliding_layers",
    "variance_epsilon",
    "max_norm",
)
"""Attributes of modules that a forward computes with."""
LIBRARIES = ("torch", "transformers")
_RECORDER = "transformers.utils.output_capturing"
_FUNCTIONALS = {"linear": F.linear, "scaled_dot_product_attention": F.scaled_dot_product_attention, "silu": F.silu}
"""Functions of `torch.nn.functional` that others are known to replace, as they were when this was imported."""


@dataclass(frozen=True)
class Choice:
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
    if asked == other:
        return Choice(other, "asked for")
    reason, on_device = unfit(), f"the model is on {device}"
    if asked == "auto":
        is_fused = reason is None and device.type in FUSED_ON
        return Choice("fused" if is_fused else other, reason or on_device)
    if reason is not None:
        problem = f"target_backend = 'fused' cannot run this model: {reason}"
        raise UnsupportedModelError(f"{problem}. Use target_backend={other!r}.")
    return Choice("fused", "asked for")


def unfit_reason(model: nn.Module) -> str | None:
    """Return why a model is not fused, as the end of a sentence that says what was found where; None if it can be.

    For models that `wrapper.check_supported` passes.
    """
    family = _family_of(type(model))
    if family is None:
        return f"{type(model).__name__} is none of {', '.join(f'{each}ForCausalLM' for each in FAMILIES)}"
    name = _FILES.get(family, family.lower())
    file: Any = import_module(f"transformers.models.{name}.modeling_{name}")
    kinds = {part: getattr(file, f"{family}{part}") for part in _PARTS}
    for part, kind in kinds.items():
        if (kind.__module__, kind.__qualname__) != (file.__name__, f"{family}{part}"):
            return f"{family}{part} of transformers was replaced by {kind.__module__}.{kind.__qualname__}"
    for value in vars(file).values():
        if isinstance(value, FunctionType) and not is_of_a_library(value):
            return f"a function of {file.__name__} was replaced by {value.__module__}.{value.__qualname__}"
    config, kind = model.config, kinds["ForCausalLM"]
    found = _unfit_config(config, family) or _mismatch(model, config, kind)
    return found or unfit_modules(model) or _unfit_rotary(model, config)


def is_of_a_known_family(model: nn.Module) -> bool:
    """Report whether a model, a base class of it or what it wraps is of a family that can be fused."""
    kinds = (kind for module in (model, *model.children()) for kind in type(module).__mro__)
    return any(_family_of(kind) is not None for kind in kinds)


def _family_of(kind: type) -> str | None:
    return next((each for each in FAMILIES if kind.__name__ == f"{each}ForCausalLM"), None)


def unfit_modules(model: nn.Module) -> str | None:
    """Return why modules may compute something other than their classes do (a hook, a patch); None if none."""
    if any(global_hooks()):
        return "a global module hook is registered"
    if any(getattr(F, name) is not function for name, function in _FUNCTIONALS.items()):
        return "a function of torch.nn.functional was replaced"
    for path, module in model.named_modules():
        where, kind = path or type(model).__name__, type(module)
        # New linears of a resized embedding and slices of a list of layers are so; to them it means nothing.
        if module.training and kind not in (nn.Linear, nn.Embedding, nn.ModuleList):
            return f"{where} is in training mode: call eval()"
        # transformers' own recorder of hidden states changes nothing.
        if any(getattr(hook, "__globals__", {}).get("__name__") != _RECORDER for hook in forward_hooks(module)):
            return f"{where} has a forward hook"
        own = next((name for name in vars(module) if _is_hidden(module, name)), None)
        if own is not None or compiled_call(module) is not None:
            return f"{where} has a {own or 'compiled call'} of its own"
        changed = next((call for call in CALLS if not is_own(kind, call)), None)
        if changed is not None:
            return f"{changed} of {kind.__qualname__} was replaced"
    return _unfit_tensors(model)


def _is_hidden(module: nn.Module, name: str) -> bool:
    """Report whether an attribute of a module shadows a method of its class with another function."""
    method, found = getattr(type(module), name, None), vars(module)[name]
    # transformers 4 leaves a method itself on modules whose outputs it has recorded.
    is_same = isinstance(found, MethodType) and found.__self__ is module and found.__func__ is method
    return callable(method) and not is_same


def is_own(kind: type, name: str) -> bool:
    """Report whether a method is defined in its class's file and decorated by torch and transformers alone."""
    function: Any = getattr(kind, name)
    owner = next(each for each in kind.__mro__ if name in vars(each))
    while hasattr(function, "__wrapped__"):
        if not is_of_a_library(function):
            return False
        function = function.__wrapped__
    return isinstance(function, FunctionType) and function.__globals__ is vars(sys.modules[owner.__module__])


def _mismatch(model: nn.Module, config: Any, kind: Any) -> str | None:
    """Return the first difference between a model and a new one of its configuration; None if they agree."""
    own = copy.deepcopy(config)
    name_attention_(own, "eager")  # needs no further package
    with torch.device("meta"):
        expected: nn.Module = kind(own)
    modules = dict(model.named_modules(remove_duplicate=False))
    for path, module in model.named_modules():
        if type(module) is Fp8Experts:
            modules |= {f"{path}.{name}".rstrip("."): each for name, each in module.plain.named_modules()}
    for path, wanted in expected.named_modules():
        module, where = modules[path], path or kind.__name__
        is_fp8 = type(module) is Fp8Linear and type(wanted) is nn.Linear and path.startswith("model.layers.")
        if type(module) is not type(wanted) and not is_fp8:
            found = f"{type(module).__qualname__} of {type(module).__module__}"
            return f"{where} is a {found}, not a {type(wanted).__qualname__}"
        children, others = ({name for name, _ in each.named_children()} for each in (module, wanted))
        if extra := ", ".join(sorted(children ^ others)):
            return f"{where} has {', '.join(sorted(children)) or 'nothing'} inside; {extra} is unexpected or missing"
        if getattr(module, "config", config) is not config:
            return f"{where} has another configuration than the model"
        for name in _ATTRIBUTES:
            value = getattr(wanted, name, None)
            if getattr(module, name, value) != value:
                return f"{where}.{name} is {getattr(module, name)!r}, and its configuration gives {value!r}"
        given, tensors = _tensors(module), _tensors(wanted)
        # Biases of these two are read apart from any other.
        free = {"bias"} if path.endswith(("o_proj", "down_proj")) else set()
        if (given.keys() ^ tensors.keys()) - free:
            return f"{where} has the tensors {', '.join(given)}, not {', '.join(tensors)}"
        for name in given.keys() & tensors.keys():
            size, shape = list(given[name].shape), list(tensors[name].shape)
            if size != shape:
                return f"{where}.{name} has the shape {size}, and its configuration gives {shape}"
    return None


def _tensors(module: nn.Module) -> dict[str, Weight]:
    if isinstance(module, Fp8Linear):
        return {"weight": module.weight} | ({} if module.bias is None else {"bias": module.bias})
    return dict(chain(module.named_parameters(recurse=False), module.named_buffers(recurse=False)))


def _unfit_config(config: Any, family: str) -> str | None:
    if family == "Llama" and getattr(config, "sliding_window", None) is not None:
        return "its configuration has a sliding window, which Llama's layers do not read"
    if getattr(config, "is_causal", True) is False or getattr(config, "attention_chunk_size", None):
        return "its configuration asks for another attention mask"
    if config.hidden_act not in ("silu", "swish"):
        return f"its hidden_act is {config.hidden_act}"
    return unfit_head_dim(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def unfit_head_dim(head_dim: int) -> str | None:
    """Return why the fused forward takes no heads of a width; None if it does."""
    return f"its head_dim is {head_dim}" if head_dim % 2 or head_dim > 256 else None


def _unfit_rotary(model: Any, config: Any) -> str | None:
    """Return why a model's rotary embedding is not that of its configuration; None if it is."""
    rotary = model.model.rotary_emb
    kind = str(getattr(rotary, "rope_type", "default"))
    if kind not in ("default", "linear", "llama3", "yarn"):
        return f"{kind} RoPE changes its frequencies with the length"
    with torch.device("cpu"):
        expected = type(rotary)(config=config)
    found = rotary.inv_freq.detach().cpu()
    own = expected.inv_freq.to(found.dtype)
    if found.shape != own.shape or not torch.allclose(found.float(), own.float(), rtol=1e-5, atol=0):
        return "model.rotary_emb.inv_freq is not that of its configuration"
    if rotary.attention_scaling != expected.attention_scaling or kind != getattr(expected, "rope_type", kind):
        return "model.rotary_emb is not that of its configuration"
    return None


def _unfit_tensors(model: nn.Module) -> str | None:
    """Return why parameters are not plain matrices of one type on one device; None if they are."""
    for path, tensor in chain(model.named_parameters(), model.named_buffers()):
        if type(tensor) not in (nn.Parameter, Tensor, nn.Buffer) or type(tensor.data) is not Tensor:
            return f"{path} is a {type(tensor).__qualname__} of {type(tensor).__module__}"
        if tensor.layout is not torch.strided or tensor.device.type == "meta":
            return f"{path} is {tensor.layout} on {tensor.device}"
    weights = list(model.parameters())
    dtypes = {weight.dtype for weight in weights}
    if len(dtypes) > 1 or not dtypes <= {torch.float32, torch.bfloat16, torch.float16}:
        return f"its weights are {', '.join(sorted(map(str, dtypes)))}, not one of float32, bfloat16, float16"
    return "its weights are spread over devices" if len({weight.device for weight in weights}) > 1 else None


def is_of_a_library(function: Any) -> bool:
    """Report whether a function was written in torch or transformers."""
    name = getattr(function, "__globals__", {}).get("__name__")
    return isinstance(function, FunctionType) and str(name).partition(".")[0] in LIBRARIES
