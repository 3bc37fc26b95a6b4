"""Detection of changes of a model, checked before every call, so as cheaply as can be.

A snapshot is a copy of what a forward may read: attributes of modules, of their classes and of what they hold; cells,
defaults and globals of hooks and patched methods; functions of the classes' files. A tensor is its object, storage,
layout and version counter, which misses writes through ``.data`` or by a fused optimiser (`TargetModel.refresh`).
"""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache, partial
from types import CodeType, FunctionType, GenericAlias, GetSetDescriptorType, ModuleType
from typing import Any
from unittest.mock import ANY  # equal to everything

import numpy as np
import torch.nn.functional as F
from eagle_slim.vocab_tools import compat
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .known import LIBRARIES, is_of_a_library

_LARGEST = 1 << 16
"""Entries of a container, and bytes of an array, up to which a change inside is noticed."""
_DEEPEST = 6
"""Containers and objects inside one another, up to which it is."""
_UNREAD = ("generation_config", "_eagle_slim_kept", "__warningregistry__", "__annotations__")
_PLAIN = (Tensor, nn.Parameter)
_OPAQUE = (type, property, GenericAlias, GetSetDescriptorType, ModuleType, logging.Logger)
_CACHED = type(lru_cache(int))
_ENTRIES = -1


class Watch:
    """Snapshot of a model to compare with later; ``unread``: attributes of modules to ignore."""

    def __init__(self, model: nn.Module, unread: Iterable[str] = ()) -> None:
        self.is_blind = any(each.is_inference() for each in (*model.parameters(), *model.buffers()))
        """Whether tensors of inference mode, which have no version counter, can be written unseen."""
        self._unread = compat.unread_attributes().union(_UNREAD, unread)
        modules = list(model.modules())
        self._taken: dict[int, Any] = {id(each): each for each in modules}
        """Objects whose contents are compared, by id; kept here, so that no other object gets that id."""
        self._contents: list[tuple[dict[Any, Any], Callable[[], Mapping[Any, Any]]]] = []
        """Contents as they were, and what reads them as they are."""
        classes = {kind for each in modules for kind in type(each).__mro__ if kind is not object}
        for each in (*modules, *classes):
            self._compare(partial(vars, each))
        for file in {F.__name__, *(kind.__module__ for kind in classes)}:
            if file.partition(".")[0] in LIBRARIES:
                self._compare(partial(vars, sys.modules[file]), _DEEPEST + 1)
        configs = [each for each in self._taken.values() if compat.is_config(each)]
        self._compare(lambda: {id(each): ALL_ATTENTION_FUNCTIONS.get(compat.attention_name(each)) for each in configs})
        self._compare(lambda: {id(each): compat.experts_function(each) for each in configs})
        self._compare(lambda: {"hooks": compat.global_hooks(), "classes": list(map(type, modules))})

    def has_changed(self) -> bool:
        """Report whether anything that a forward depends on has changed; waits for no device."""
        return any(True for _ in self._written())

    def ignore_written(self) -> None:
        """Ignore what has been written since: after a forward, what it leaves for others (recordings, counts)."""
        for before, name in self._written():
            before[name] = ANY

    def _written(self) -> Iterator[tuple[dict[Any, Any], Any]]:
        """Yield names under which something else is found now, with the contents as they were."""
        for before, read in self._contents:
            now = read()
            if _differ(before, now):
                for name in (before.keys() | now.keys()) - self._unread:
                    if _differ(before.get(name, _OPAQUE), now.get(name, _OPAQUE)):
                        yield before, name

    def _compare(self, read: Callable[[], Mapping[Any, Any]], depth: int = 0) -> None:
        before = dict[Any, Any]()
        for name, each in read().items():
            # Entries are as deep as attributes.
            before[name] = each if name in self._unread else self._frozen(each, depth - (name == _ENTRIES))
        self._contents.append((before, read))

    def _frozen(self, value: Any, depth: int) -> Any:
        """Return what is equal to a value until it changes: a container's copy; what an object holds is compared."""
        if isinstance(value, (Tensor, np.ndarray)):
            return _Seen(value)
        if depth > _DEEPEST or isinstance(value, _OPAQUE) or id(value) in self._taken or is_of_a_library(value):
            return value
        kind: Any = next((kind for kind in (dict, list, tuple, set) if isinstance(value, kind)), None)
        if kind is None and _contents_of(value):
            self._taken[id(value)] = value
            self._compare(partial(_contents_of, value), depth + 1)
        if kind is None or len(value) > _LARGEST:
            return value
        if kind is dict:
            return {key: self._frozen(each, depth + 1) for key, each in value.items()}
        return set(value) if kind is set else kind(self._frozen(each, depth + 1) for each in value)


class _Seen:
    """Equal to a tensor or an array as long as it is the same one in the same state."""

    __array_ufunc__ = None  # an array leaves the comparison to this

    def __init__(self, tensor: Any) -> None:
        self._tensor, self._state = tensor, _state(tensor)
        # Its address is not used again meanwhile.
        self._storage = StorageWeakRef(tensor.untyped_storage()) if type(tensor) in _PLAIN else None

    def __eq__(self, other: object) -> bool:
        return other is self._tensor and _state(other) == self._state


def _state(tensor: Any) -> Any:
    if type(tensor) not in _PLAIN:
        if isinstance(tensor, np.ndarray):
            return tensor.shape, tensor.dtype, tensor.tobytes() if tensor.nbytes <= _LARGEST else tensor.ctypes.data
        if hasattr(tensor, "__tensor_flatten__"):  # it wraps others and has no storage
            inner = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
            return [(id(each), _state(each)) for each in inner]
    return *compat.tensor_state(tensor), tensor.data_ptr(), tensor.dtype, tensor.stride(), tensor.shape


def _differ(old: Any, new: Any) -> bool:
    try:
        return bool(old != new)
    except Exception:  # a value's comparison is a program of its own, perhaps only for others of its kind
        return True


def _contents_of(value: Any) -> dict[Any, Any]:
    """Read what an object refers to: attributes and variables by name, entries as one, all else by place."""
    named = getattr(value, "__dict__", {})
    if isinstance(value, _CACHED):  # what it keeps are its function's values
        return named
    if not isinstance(value, FunctionType):
        parts = [each for each in gc.get_referents(value) if each is not named]
        if not 0 < len(parts) <= _LARGEST:
            return named
        # Of entries, those that a forward adds are ignored only together.
        return {**({_ENTRIES: parts} if hasattr(type(value), "__len__") else dict(enumerate(parts))), **named}
    found = {**named, "parts": (value.__code__, value.__defaults__, value.__kwdefaults__, value.__closure__)}
    for name in _names(value.__code__):
        each: Any = value.__globals__.get(name)
        # Another file's function is not what this one computes with.
        is_other = isinstance(each, FunctionType) and each.__module__ != value.__module__
        found[f"global {name}"] = (each.__code__, id(each)) if is_other else each
    return found


@lru_cache(_LARGEST)
def _names(code: CodeType) -> set[str]:
    return set(code.co_names).union(*(_names(each) for each in code.co_consts if isinstance(each, CodeType)))
