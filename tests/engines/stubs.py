"""Stand-ins for GPU-only packages, so that an engine's own loader can be executed on a machine without a GPU.

Only names given to `install` are stubbed, and only if they are not installed. A stub can be imported, subclassed and
used as a decorator; it computes nothing, so a loader that really needed one would fail or leave a tensor unloaded.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Iterable, Sequence


class _Meta(type):
    def __getattr__(cls, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return _stub_class(name)


class _Stub(metaclass=_Meta):
    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def __call__(self, *args: object, **kwargs: object) -> object:
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else _Stub()

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Stub()


def _stub_class(name: str) -> type:
    return _Meta(name, (_Stub,), {})


class _StubModule(types.ModuleType):
    __path__: Sequence[str] = []

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return _stub_class(name) if name[:1].isupper() else _Stub()


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, packages: frozenset[str]) -> None:
        self.packages = packages

    def find_spec(self, fullname: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] in self.packages:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _StubModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def install(packages: Iterable[str]) -> frozenset[str]:
    """Stub every one of ``packages`` (top-level import names) that is not installed; returns those stubbed."""
    missing = frozenset(name for name in packages if importlib.util.find_spec(name) is None)
    sys.meta_path.append(_Finder(missing))
    return missing
