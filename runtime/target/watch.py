"""Detection of changes of a model, checked before every call, so as cheaply as can be.

Compared are the classes and attributes of all modules, their hooks and children, the configurations, the functions of
the classes, and of every tensor its object, storage, address, type, layout and version counter. A counter misses what
is written through ``.data`` or by a fused optimiser: rows that are taken over are compared by value for that
(`step.decoder.hold_row`).
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable
from itertools import chain
from operator import itemgetter
from types import FunctionType
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules import module as module_file
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .known import CALLS

_UNREAD = {
    "_parameters", "_buffers", "_non_persistent_buffers_set", "_backward_pre_hooks", "_backward_hooks",
    "_is_full_backward_hook", "_forward_hooks_with_kwargs", "_forward_hooks_always_called",
    "_forward_pre_hooks_with_kwargs", "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks", "_eagle_slim_kept", "generation_config",
}  # fmt: skip
"""Attributes of a module that no forward reads, and its tensors, which are compared apart."""


class Watch:
    """Snapshot of a model to compare with later; ``unread``: attributes to ignore."""

    def __init__(self, model: nn.Module, unread: Iterable[str] = ()) -> None:
        self._modules = list(model.modules())
        self._attributes = [vars(module) for module in self._modules]
        self._unread = _UNREAD.union(unread)
        self._names = self._read_names()
        getters = {each: itemgetter(*each) for each in set(self._names)}
        self._getters = [getters[each] for each in self._names]
        self._values = [_frozen(get(each)) for get, each in zip(self._getters, self._attributes, strict=True)]
        self._sizes = list(map(len, self._attributes))
        self._types = list(map(type, self._modules))
        self._configs = configs_in(chain.from_iterable(map(dict.values, self._attributes)))
        self._settings = [_frozen(vars(config)) for config in self._configs]
        kinds = dict.fromkeys(self._types)
        self._kinds = [(kind, call) for kind in kinds for call in CALLS]
        self._files = [vars(sys.modules[kind.__module__]) for kind in kinds if kind.__module__ in sys.modules]
        self._functions = self._read_functions()
        self._holders: list[dict[str, Any]] = [
            holder for each in self._modules for holder in (each._parameters, each._buffers)
        ]
        tensors = self._read_tensors()
        # Weakly, so that weights which were replaced can go; a storage's address is not used again meanwhile.
        self._tensors = [weakref.ref(tensor) for tensor in tensors]
        plain = (tensor for tensor in tensors if type(tensor) in (Tensor, nn.Parameter))
        self._storages = [StorageWeakRef(tensor.untyped_storage()) for tensor in plain]
        self._states = list(map(_state, tensors))

    def has_changed(self) -> bool:
        """Whether anything that a forward depends on has changed; waits for no device."""
        try:
            tensors = self._read_tensors()
            return (
                len(tensors) != len(self._tensors)
                or not all(tensor is before() for tensor, before in zip(tensors, self._tensors, strict=True))
                or list(map(_state, tensors)) != self._states
                or (list(map(len, self._attributes)) != self._sizes and self._read_names() != self._names)
                or list(map(type, self._modules)) != self._types
                or [get(each) for get, each in zip(self._getters, self._attributes, strict=True)] != self._values
                or list(map(vars, self._configs)) != self._settings
                or self._read_functions() != self._functions
            )
        except (KeyError, RuntimeError, TypeError, ValueError):
            # An attribute went, or values of a kind that cannot be compared took the place of others.
            return True

    def _read_names(self) -> list[tuple[str, ...]]:
        """List the names of the attributes that are compared, by module."""
        unread = self._unread
        return [
            tuple(name for name, value in each.items() if name not in unread and not isinstance(value, Tensor))
            for each in self._attributes
        ]

    def _read_tensors(self) -> list[Tensor]:
        return [each for each in chain.from_iterable(map(dict.values, self._holders)) if each is not None]

    def _read_functions(self) -> list[Any]:
        """List the functions that a forward calls: methods, functions of their files, global hooks, attention."""
        functions = [getattr(kind, call) for kind, call in self._kinds]
        files = [each for file in self._files for each in file.values() if type(each) is FunctionType]
        hooks = (*module_file._global_forward_hooks.values(), *module_file._global_forward_pre_hooks.values())
        attention = [ALL_ATTENTION_FUNCTIONS.get(config._attn_implementation) for config in self._configs]
        return [*functions, *files, *hooks, *attention, F.linear, F.scaled_dot_product_attention, F.silu]


def is_config(value: Any) -> bool:
    """Whether a value is a configuration that names an attention function."""
    return hasattr(value, "_attn_implementation") and not isinstance(value, (nn.Module, type))


def configs_in(values: Iterable[Any]) -> list[Any]:
    """List the configurations among some values, and those inside them."""
    found: dict[int, Any] = {}
    left = list(values)
    while left:
        each = left.pop()
        if id(each) not in found and is_config(each):
            found[id(each)] = each
            left.extend(vars(each).values())
    return list(found.values())


def _frozen(value: Any) -> Any:
    """Copy containers, so that a change in place is noticed."""
    if isinstance(value, dict):
        return {key: _frozen(each) for key, each in value.items()}
    if type(value) in (list, tuple, set):
        return type(value)(map(_frozen, value))
    return value


def _state(tensor: Tensor) -> tuple[Any, ...]:
    if hasattr(tensor, "__tensor_flatten__"):  # it wraps others and has no storage
        inner = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
        return tuple((id(each), _state(each)) for each in inner)
    try:
        version = tensor._version
    except RuntimeError:  # made under inference mode: it has no counter
        version = None
    storage = tensor.untyped_storage()._cdata
    return version, storage, tensor.data_ptr(), tensor.dtype, tensor.stride(), tensor.shape
