"""Give one object other methods, and take them back.

The object's class becomes a subclass of its own, made for it alone; what the methods remember lies in that subclass. So
nothing is written to the object's ``__dict__``, other objects of its class are untouched, and `isinstance` still holds.
A copy or a pickle of the object is of its own class, without the methods.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_OWN = "_eagle_slim_own_class"


def rebind(target: object, members: Mapping[str, Any]) -> None:
    """Put ``members`` (functions, properties) in front of those of the object's class."""
    original = type(target)

    def reduce(self: Any, protocol: Any) -> Any:
        return (_new, (original,), *original.__reduce_ex__(self, max(2, int(protocol)))[2:])

    names = {"__module__": original.__module__, "__qualname__": original.__qualname__, "__doc__": original.__doc__}
    body = {**names, "__reduce_ex__": reduce, **members, _OWN: original}
    metaclass: Any = type(original)
    target.__class__ = metaclass(original.__name__, (original,), body)


def _new(original: Any) -> Any:
    # Not copyreg's, for which pickle asks that the object be of this class.
    return original.__new__(original)


def restore(target: object) -> None:
    """Undo the last `rebind`."""
    target.__class__ = getattr(type(target), _OWN)


def is_rebound(target: object) -> bool:
    """Tell if `rebind` was done and not undone."""
    return hasattr(type(target), _OWN)
