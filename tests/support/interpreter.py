"""A shorter way through Triton's interpreter, which is most of the time of a test of kernels.

At each call of a kernel, and of each function in it, the interpreter replaces the builtins of `triton.language`, and
looks through all members for them. Which are builtins does not change; inside a kernel all are replaced already.
"""

import inspect
from types import SimpleNamespace
from typing import Any


def remember_builtins() -> None:
    """Have the interpreter look through the members of a module or class once."""
    from triton.language import core
    from triton.runtime import interpreter

    names: dict[Any, list[str]] = {}

    def getmembers(owner: Any) -> list[tuple[str, Any]]:
        if owner not in names:
            names[owner] = [name for name, member in inspect.getmembers(owner) if core.is_builtin(member)]
        is_replaced = not any(core.is_builtin(getattr(owner, name)) for name in names[owner][:1])
        return [] if is_replaced else [(name, getattr(owner, name)) for name in names[owner]]

    interpreter.inspect = SimpleNamespace(**vars(inspect) | {"getmembers": getmembers})
