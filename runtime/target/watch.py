"""Detection of changes of a model, checked before every call, so as cheaply as can be.

A snapshot holds what a forward may read: attributes, tensors, children, hooks and classes of all modules; containers,
arrays, configurations and other objects that they hold; cells, defaults and globals of hooks and patched methods; the
functions of the classes' files. Of a tensor it holds the object, storage, layout and version counter. A counter misses
what is written through ``.data`` or by a fused optimiser, which is followed after `TargetModel.refresh`.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from operator import itemgetter
from types import CellType, CodeType, FunctionType, GenericAlias, MethodType, ModuleType
from typing import Any
from unittest.mock import ANY  # equal to everything

import numpy as np
import torch.nn.functional as F
from eagle_slim.vocab_tools.compat import (
    attention_name,
    experts_function,
    global_hooks,
    is_config,
    tensor_state,
    unread_attributes,
)
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .known import is_of_a_library

_LARGEST = 1 << 16
"""Entries of a container, and bytes of an array, up to which a change inside is noticed."""
_DEEPEST = 6
"""Containers and objects inside one another, up to which it is."""
_OPAQUE = (type, GenericAlias, ModuleType, logging.Logger)
_PARTS: dict[type, tuple[str, ...]] = {
    FunctionType: ("__code__", "__defaults__", "__kwdefaults__", "__closure__"),
    MethodType: ("__self__", "__func__"),
    CellType: ("cell_contents",),
    partial: ("func", "args", "keywords"),
}
"""Attributes of objects that hold something elsewhere than in ``__dict__`` and slots."""
Contents = Callable[[], Mapping[Any, Any]]


class Watch:
    """Snapshot of a model to compare with later; ``unread``: attributes of modules to ignore."""

    def __init__(self, model: nn.Module, unread: Iterable[str] = ()) -> None:
        self.is_blind = any(each.is_inference() for each in (*model.parameters(), *model.buffers()))
        """Whether tensors of inference mode, which have no version counter, can be written unseen."""
        self._unread = unread_attributes().union(("generation_config", "_eagle_slim_kept"), unread)
        modules = list(model.modules())
        self._taken: dict[int, Any] = {id(each): each for each in modules}
        """Objects whose contents are compared, by id; kept here, so that no other object gets that id."""
        self._contents: list[tuple[dict[str, Any], Contents]] = []
        """Contents as they were, and what reads them as they are."""
        classes = {kind for each in modules for kind in type(each).__mro__ if kind is not object}
        for each in (*modules, *classes):
            self._compare(partial(vars, each), 0)
        for file in {F.__name__, *(kind.__module__ for kind in classes)}:
            held = vars(sys.modules[file])
            names = [name for name, value in held.items() if isinstance(value, FunctionType)]
            self._compare(partial(_pick, itemgetter("__name__", *names), held), _DEEPEST)
        configs = [each for each in self._taken.values() if is_config(each)]
        self._compare(lambda: {id(each): ALL_ATTENTION_FUNCTIONS.get(attention_name(each)) for each in configs}, 0)
        self._compare(lambda: {id(each): experts_function(each) for each in configs}, 0)
        self._compare(lambda: {"hooks": global_hooks(), "classes": list(map(type, modules))}, 0)

    def has_changed(self) -> bool:
        """Report whether anything that a forward depends on has changed; waits for no device."""
        try:
            pairs = ((before, read()) for before, read in self._contents)
            return any(old != new and self._read_part(old) != self._read_part(new) for old, new in pairs)
        except (KeyError, RuntimeError, TypeError, ValueError):
            # Something went, or values of a kind that cannot be compared took the place of others.
            return True

    def ignore_written(self) -> None:
        """Ignore what has been written since: after a forward, what it leaves for others (recordings, counts)."""
        for before, read in self._contents:
            for name, value in read().items():
                with suppress(RuntimeError, TypeError, ValueError):
                    if before.get(name) == value:
                        continue
                before[name] = ANY

    def _read_part(self, contents: Mapping[Any, Any]) -> dict[Any, Any]:
        return {name: contents[name] for name in contents.keys() - self._unread}

    def _compare(self, read: Contents, depth: int) -> None:
        """Compare from now on what ``read`` gives."""
        before = dict(read())
        self._contents.append((before, read))
        for name, value in before.items():
            if name not in self._unread:
                before[name] = self._frozen(value, depth)
            elif isinstance(value, Tensor):
                before[name] = ANY

    def _frozen(self, value: Any, depth: int) -> Any:
        """Return what is equal to a value until it changes: a container's copy; what an object holds is compared."""
        if isinstance(value, (Tensor, np.ndarray)):
            return _Seen(value)
        if depth > _DEEPEST or isinstance(value, _OPAQUE) or is_of_a_library(value):
            return value
        if isinstance(value, (dict, list, tuple)) and len(value) <= _LARGEST:
            if isinstance(value, dict):
                return {key: self._frozen(each, depth + 1) for key, each in value.items()}
            return (tuple if isinstance(value, tuple) else list)(self._frozen(each, depth + 1) for each in value)
        kinds = type(value).__mro__
        names = [name for kind in kinds for name in _PARTS.get(kind, getattr(kind, "__slots__", ()))]
        if id(value) not in self._taken and (names or hasattr(value, "__dict__")):
            self._taken[id(value)] = value
            used = set(_names(value.__code__)) if isinstance(value, FunctionType) else ()
            self._compare(partial(_read, value, names, used), depth + 1)
        return set(value) if isinstance(value, set) else value


class _Seen:
    """Equal to a tensor or an array as long as it is the same one in the same state.

    It is held weakly, so that weights which were replaced can go; a storage's address is not used again meanwhile.
    """

    __array_ufunc__ = None

    def __init__(self, tensor: Tensor | np.ndarray[Any, Any]) -> None:
        self._tensor, self._state = weakref.ref(tensor), _state(tensor)
        is_plain = type(tensor) in (Tensor, nn.Parameter)
        self._storage = StorageWeakRef(tensor.untyped_storage()) if is_plain else None  # type: ignore[union-attr]

    def __eq__(self, other: object) -> bool:
        return other is self._tensor() and _state(other) == self._state


def _state(tensor: Any) -> Any:
    if isinstance(tensor, np.ndarray):
        return tensor.shape, tensor.dtype, tensor.tobytes() if tensor.nbytes <= _LARGEST else tensor.ctypes.data
    if hasattr(tensor, "__tensor_flatten__"):  # it wraps others and has no storage
        return [(id(each), _state(each)) for each in (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])]
    return *tensor_state(tensor), tensor.data_ptr(), tensor.dtype, tensor.stride(), tensor.shape


def _pick(get: Callable[[Any], Any], held: Mapping[str, Any]) -> dict[str, Any]:
    return {"functions": get(held)}


def _read(value: Any, names: Iterable[str], used: Iterable[str]) -> dict[str, Any]:
    """Read attributes of an object, and the globals that a function has ``used``."""
    found = dict(getattr(value, "__dict__", {}))
    for name in names:
        with suppress(AttributeError, ValueError):  # not set yet
            found[name] = getattr(value, name)
    for name in used:
        each = found[f"global {name}"] = value.__globals__.get(name)
        if isinstance(each, FunctionType) and each.__module__ != value.__module__:
            found[f"global {name}"] = (each.__code__, id(each))  # of another file's function not what it computes with
    return found


def _names(code: CodeType) -> Iterator[str]:
    """Yield the names that code and the code inside it use."""
    yield from code.co_names
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _names(each)
