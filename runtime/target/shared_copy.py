"""A copy of a model's modules over the same weights: what our forward runs, so that the user's model stays as it is.

transformers picks an attention function by name in the configuration, which every attention layer and every thread
shares. Another name there, for the time of a forward or for good, would reach whoever runs the same modules meanwhile:
the model's own ``generate``, an inner module, an adapter's wrapper, in this thread or in another. So our forward runs
other module objects: of the same classes, with copies of the configurations that name our function. Copied are only the
modules that have a configuration and those around them, some hundred small objects, and those that may add noise in
training, whose copies are not; all others (linears, adapters), all parameters and all hooks are the model's own.
"""

from __future__ import annotations

import copy
import functools
from types import MethodType
from typing import Any

from torch import Tensor, nn

from .watch import is_config

_OWN_DICTS = (
    "_buffers",
    "_parameters",
    "_forward_hooks",
    "_forward_pre_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks_always_called",
)
_OUTPUTS = ("output_attentions", "_output_attentions", "output_hidden_states")


class SharedCopy:
    """Modules that attend by the function named ``attention``, over the parameters of ``model``.

    A `torch.compile`d module runs uncompiled. A changed model needs another copy (`watch`).
    """

    def __init__(self, model: nn.Module, attention: str) -> None:
        self._attention = attention
        # Copies by their original's id; kept with it, so that no other object gets that id.
        self._configs: dict[int, tuple[Any, Any]] = {}
        self._copies: dict[int, tuple[nn.Module, nn.Module]] = {}
        self._shares: dict[int, bool] = {}
        self.taps: dict[int, Tensor] = {}
        """Tensors that hooks on the copies recorded, by place."""
        self.model = self._copy(model)
        """The copy of the model itself."""
        for original, copied in self._copies.values():
            # Methods that were put on a module itself (accelerate does so) are to act on its copy.
            vars(copied).update({name: _bound(value, original, copied) for name, value in vars(copied).items()})

    def of(self, module: nn.Module) -> nn.Module:
        """Return a module's copy, or the module itself where it is shared."""
        found = self._copies.get(id(_plain(module)))
        return module if found is None else found[1]

    def _copy(self, module: nn.Module) -> nn.Module:
        module = _plain(module)
        if self._is_shared(module):
            return module
        if id(module) not in self._copies:
            copied = copy.copy(module)
            self._copies[id(module)] = module, copied
            attributes = {name: self._replaced(value) for name, value in vars(copied).items()}
            children = {name: None if child is None else self._copy(child) for name, child in module._modules.items()}
            # What a forward assigns (longrope its frequencies) and the hooks that we add stay with the copy.
            own = {name: copy.copy(attributes[name]) for name in _OWN_DICTS}
            vars(copied).update({**attributes, **own, "_modules": children, "training": False})
        return self._copies[id(module)][1]

    def _is_shared(self, module: nn.Module) -> bool:
        """Whether no module in this one reads a configuration, nor adds noise in training."""
        if id(module) not in self._shares:
            # Modules of a model, such as routers to experts, may add noise by themselves.
            is_noisy = isinstance(module, nn.Dropout) or type(module).__module__.startswith("transformers")
            reads = (module.training and is_noisy) or any(map(is_config, vars(module).values()))
            children = [_plain(child) for child in module._modules.values() if child is not None]
            self._shares[id(module)] = not reads and all(map(self._is_shared, children))
        return self._shares[id(module)]

    def _replaced(self, value: Any) -> Any:
        """Copy a configuration and those inside it; return anything else as it is."""
        if not is_config(value):
            return value
        if id(value) not in self._configs:
            copied = copy.copy(value)
            self._configs[id(value)] = value, copied
            settings = {name: self._replaced(each) for name, each in vars(value).items()}
            # Nothing but logits comes out of our forwards.
            settings |= {name: False for name in _OUTPUTS if name in settings}
            settings |= {"return_dict": True, "_attn_implementation_internal": self._attention}
            vars(copied).update(settings)
        return self._configs[id(value)][1]


def _plain(module: nn.Module) -> nn.Module:
    """Unwrap a module from `torch.compile`."""
    while "_orig_mod" in module._modules and type(module).__name__ == "OptimizedModule":
        inner = module._modules["_orig_mod"]
        assert inner is not None
        module = inner
    return module


def _bound(value: Any, original: nn.Module, copied: nn.Module) -> Any:
    """Rebind a method of ``original`` to ``copied``, also inside a partial; return anything else as it is."""
    inner = getattr(value, "_torchdynamo_orig_callable", None)
    if callable(value) and inner is not None:
        return _bound(inner, original, copied)
    if isinstance(value, MethodType) and value.__self__ is original:
        return MethodType(value.__func__, copied)
    if isinstance(value, functools.partial):
        arguments = [copied if each is original else each for each in value.args]
        return functools.partial(_bound(value.func, original, copied), *arguments, **value.keywords)
    return value
