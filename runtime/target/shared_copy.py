"""A copy of a model's modules over the same weights: what our forward runs, so that the user's model stays as it is.

transformers picks an attention function by name in the configuration, which all layers and threads share; another name
there would reach whoever runs the same modules meanwhile. So our forward runs other modules, of the same classes, in
evaluation mode, with copies of the configurations that name our function. All else is the model's own.
"""

from __future__ import annotations

import copy
import functools
from types import MethodType
from typing import Any

from eagle_slim.vocab_tools.compat import OUTPUTS, is_config, name_attention_
from torch import Tensor, nn

_DICTS = tuple(name for name, value in vars(nn.Module()).items() if isinstance(value, (dict, set)))


class SharedCopy:
    """Modules that attend by the function named ``attention``, over the parameters of ``model``.

    A `torch.compile`d module runs uncompiled. A changed model needs another copy (`watch`).
    """

    def __init__(self, model: nn.Module, attention: str) -> None:
        self._attention = attention
        modules = list(model.modules())
        self._copies: dict[int, tuple[Any, Any]] = {id(each): (each, object.__new__(type(each))) for each in modules}
        """Originals and copies, by the original's id; kept with it, so that no other object gets that id."""
        self.taps: dict[int, Tensor] = {}
        """Tensors that hooks on the copies recorded, by place."""
        for module in modules:
            copied = vars(self.of(module))
            copied.update({name: self.of(value) for name, value in vars(module).items()}, training=False)
            # What a forward assigns (longrope its frequencies) and the hooks that we add stay with the copy.
            copied.update({name: copied[name].copy() for name in _DICTS})
            for children in (copied[name] for name in _DICTS if isinstance(copied[name], dict)):
                children.update({key: self.of(each) for key, each in children.items() if isinstance(each, nn.Module)})
        self.model: nn.Module = self.of(model)

    def of(self, value: Any) -> Any:
        """Return the copy of a module, of a configuration, or of a method bound to one; anything else as it is."""
        if id(value) in self._copies:
            return self._copies[id(value)][1]
        if is_config(value):
            copied = copy.copy(value)
            self._copies[id(value)] = value, copied
            # Nothing but logits comes out of our forwards.
            outputs = dict.fromkeys(vars(value).keys() & OUTPUTS, False)
            vars(copied).update({name: self.of(each) for name, each in vars(value).items()} | outputs, return_dict=True)
            name_attention_(copied, self._attention)
            return copied
        if callable(value) and (inner := getattr(value, "_torchdynamo_orig_callable", None)) is not None:
            return self.of(inner)
        if isinstance(value, MethodType):  # accelerate puts some on a module itself, to act on its copy
            return MethodType(value.__func__, self.of(value.__self__))
        if isinstance(value, functools.partial):
            return functools.partial(self.of(value.func), *map(self.of, value.args), **value.keywords)
        return value
