"""Detection of changes of a model, checked before every call, so as cheaply as can be.

A snapshot holds what a forward may read: attributes, tensors, children, hooks and classes of all modules; containers,
arrays, configurations and other objects that they hold; cells, defaults and globals of hooks and patched methods; the
functions of the classes' files. Of a tensor it holds the object, storage, layout and version counter. A counter misses
what is written through ``.data`` or by a fused optimiser, which is followed after `TargetModel.refresh`.
"""

from __future__ import annotations

import functools
import logging
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from operator import itemgetter
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch.nn.functional as F
from eagle_slim.vocab_tools.compat import CALLS, attention_name, global_hooks, tensor_state, unread_attributes
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .known import LIBRARIES, is_of_a_library

_LARGEST = 4096
"""Entries of a container, and bytes of an array, up to which a change inside is noticed."""
_DEEPEST = 6
"""Containers and objects inside one another, up to which it is."""
_OPAQUE = (type, ModuleType, logging.Logger)


class Watch:
    """Snapshot of a model to compare with later; ``unread``: attributes of modules to ignore."""

    def __init__(self, model: nn.Module, unread: Iterable[str] = ()) -> None:
        self._unread = unread_attributes().union(("generation_config", "_eagle_slim_kept"), unread)
        self._modules = list(model.modules())
        self._types = list(map(type, self._modules))
        self._taken: dict[int, Any] = {}
        """Objects whose contents are compared, by id; kept here, so that no other object gets that id."""
        self._spaces: list[tuple[dict[str, Any], Mapping[str, Any]]] = []
        """Namespaces as they were, and as they are."""
        self._reads: list[tuple[list[Any], Callable[[], Iterable[Any]]]] = []
        """Values of what has no namespace as they were, and their reader."""
        for each in (*self._modules, *global_hooks()):
            self._take(each, 0)
        kinds = {base for kind in self._types for base in kind.__mro__ if base is not object}
        for kind in kinds:
            # Of a library's class what a call goes through may be patched by functions with contents of their own.
            self._take_space(vars(kind), 0, CALLS if kind.__module__.partition(".")[0] in LIBRARIES else None)
        for file in (vars(sys.modules[name]) for name in {F.__name__, *(kind.__module__ for kind in kinds)}):
            names = [name for name, value in file.items() if type(value) is FunctionType]
            if len(names) > 1:
                read = functools.partial(itemgetter(*names), file)
                self._reads.append((list(read()), read))
        configs = [each for each in self._taken.values() if is_config(each)]
        self._take_read(lambda: [ALL_ATTENTION_FUNCTIONS.get(attention_name(each)) for each in configs], 0)

    def has_changed(self) -> bool:
        """Report whether anything that a forward depends on has changed; waits for no device."""
        return (
            list(map(type, self._modules)) != self._types
            or any(_differ(before, now) and self._differ(before, now) for before, now in self._spaces)
            or any(_differ(before, list(read())) for before, read in self._reads)
        )

    def ignore_written(self) -> None:
        """Ignore what has been written since: after a forward, what it leaves for others (recordings, counts)."""
        for before, space in self._spaces:
            before |= {name: _ANY for name, value in space.items() if _differ(before.get(name), value)}
        for values, read in self._reads:
            values[:] = [_ANY if _differ(*pair) else pair[0] for pair in zip(values, read(), strict=True)]

    def _differ(self, before: dict[str, Any], space: Mapping[str, Any]) -> bool:
        one, other = ({k: each[k] for k in each.keys() - self._unread} for each in (before, space))
        return _differ(one, other)

    def _take(self, value: Any, depth: int) -> None:
        """Compare the contents of an object from now on, if it has any."""
        if isinstance(value, dict):
            return self._take_space(value, depth)
        if id(value) in self._taken or depth > _DEEPEST or isinstance(value, _OPAQUE):
            return None
        read = _reader(value)
        space = {} if type(value) is FunctionType and read is None else getattr(value, "__dict__", {})
        if read is not None or space:
            self._taken[id(value)] = value
        if read is not None:
            self._take_read(read, depth)
        if space:
            self._take_space(space, depth)
        return None

    def _take_space(self, space: Mapping[str, Any], depth: int, names: Iterable[str] | None = None) -> None:
        """Compare a namespace from now on; contents of its values only of those ``names``, where they are given."""
        read = set(space if names is None else names) - self._unread
        before = {name: self._frozen(each, depth) if name in read else each for name, each in space.items()}
        self._spaces.append((before, space))

    def _take_read(self, read: Callable[[], Iterable[Any]], depth: int) -> None:
        self._reads.append(([self._frozen(each, depth) for each in read()], read))

    def _frozen(self, value: Any, depth: int) -> Any:
        """Return what is equal to a value until it changes; copies containers, so that a change inside is noticed."""
        if isinstance(value, (Tensor, np.ndarray)):
            return _Seen(value)
        if not isinstance(value, (dict, list, tuple, set)) or len(value) > _LARGEST or depth > _DEEPEST:
            self._take(value, depth + 1) if not isinstance(value, dict) else None
            return value
        if isinstance(value, dict):
            return {key: self._frozen(each, depth + 1) for key, each in value.items()}
        if isinstance(value, set):
            return set(value)
        return (tuple if isinstance(value, tuple) else list)(self._frozen(each, depth + 1) for each in value)


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


class _Any:
    def __eq__(self, _other: object) -> bool:
        return True


_ANY = _Any()


def is_config(value: Any) -> bool:
    """Report whether a value is a configuration that names an attention function."""
    return hasattr(value, "_attn_implementation") and not isinstance(value, (nn.Module, type))


def _differ(before: Any, now: Any) -> bool:
    """Compare a frozen value with what is there now."""
    try:
        return bool(before != now)
    except (KeyError, RuntimeError, TypeError, ValueError):
        # Values of a kind that cannot be compared took the place of others.
        return True


def _state(tensor: Any) -> Any:
    if isinstance(tensor, np.ndarray):
        return tensor.shape, tensor.dtype, tensor.tobytes() if tensor.nbytes <= _LARGEST else tensor.ctypes.data
    if hasattr(tensor, "__tensor_flatten__"):  # it wraps others and has no storage
        return [(id(each), _state(each)) for each in (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])]
    return *tensor_state(tensor), tensor.data_ptr(), tensor.dtype, tensor.stride(), tensor.shape


def _reader(value: Any) -> Callable[[], Iterable[Any]] | None:
    """Return what reads the contents of a function that is no library's, a partial, a method or an object's slots."""
    if isinstance(value, functools.partial):
        return lambda: (value.func, value.args, value.keywords)
    if isinstance(value, MethodType):
        return lambda: (value.__self__, value.__func__)
    if isinstance(value, FunctionType):
        if is_of_a_library(value):
            return None
        names = list(set(_names(value.__code__)) & value.__globals__.keys())
        return functools.partial(_read_function, value, names)
    slots = list(chain.from_iterable(getattr(kind, "__slots__", ()) for kind in type(value).__mro__))
    return (lambda: [getattr(value, name, None) for name in slots]) if slots else None


def _read_function(function: FunctionType, names: list[str]) -> Iterator[Any]:
    """Yield all that a function computes with: code, defaults, cells and the globals of some names."""
    yield from (function.__code__, function.__defaults__, function.__kwdefaults__)
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not set yet
            yield None
    for each in map(function.__globals__.get, names):
        # Of another file's function no more than which it is.
        is_foreign = isinstance(each, FunctionType) and each.__module__ != function.__module__
        yield id(each) if is_foreign else each


def _names(code: CodeType) -> Iterator[str]:
    """Yield the names that code and the code inside it use."""
    yield from code.co_names
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _names(each)
