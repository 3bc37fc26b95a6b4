"""Triton's interpreter without what it does over and over."""

from __future__ import annotations

from typing import Any


def patch_once() -> None:
    """Let the interpreter prepare its language once per launch and module, not at every call inside a kernel.

    It puts its own functions in the place of Triton's by looking through all of `triton.language`: when a kernel is
    launched, and again whenever a kernel calls a function, where nothing is left to replace. That took 40% of the time
    of a small kernel. The same functions are replaced as before, and put back when the launch ends.
    """
    from triton.runtime import interpreter

    prepare = interpreter._patch_lang
    prepared: set[int] = set()

    def prepare_once(function: Any) -> Any:
        module = id(function.__globals__)
        scope = interpreter._LangPatchScope() if module in prepared else prepare(function)
        prepared.add(module)
        restore = scope.restore

        # Called for the launch alone: what is prepared inside stays until then.
        def restore_all() -> None:
            prepared.clear()
            restore()

        scope.restore = restore_all
        return scope

    interpreter._patch_lang = prepare_once
