"""Names that other libraries keep private, each in one function, so that a release that moves one is met here alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Template
    from torch import Tensor


def compile_chat_template(source: str) -> Template:
    """Compile a chat template in the sandbox of transformers' `apply_chat_template`; raises jinja2's TemplateError."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    compiled: Template = _compile_jinja_template(source)
    return compiled


def http_error_type() -> type[Exception]:
    """Return the base of all errors of the HTTP library that huggingface_hub uses, httpx or httpx2."""
    from huggingface_hub.errors import HfHubHTTPError

    return HfHubHTTPError.__bases__[0]


def tensor_state(tensor: Any) -> tuple[int | None, int]:
    """Return a tensor's version counter, None where it has none (inference mode), and the address of its storage."""
    try:
        version = tensor._version
    except RuntimeError:
        version = None
    return version, tensor.untyped_storage()._cdata


def is_config(value: Any) -> bool:
    """Report whether a value is a configuration that names an attention function."""
    return hasattr(value, "_attn_implementation") and not isinstance(value, type) and not hasattr(value, "forward")


OUTPUTS = ("output_attentions", "_output_attentions", "output_hidden_states")
"""Settings of a configuration by which a forward gives more than logits."""


def attention_name(config: Any) -> str | None:
    """Return the attention function that a configuration names; None where it names none."""
    return getattr(config, "_attn_implementation", None)


def experts_function(config: Any) -> Any | None:
    """Return the registered function that runs experts by a configuration; None for the model's own code."""
    try:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    except ImportError:  # before transformers 5
        return None
    return ALL_EXPERTS_FUNCTIONS.get(getattr(config, "_experts_implementation", None))


def name_attention_(config: Any, name: str) -> None:
    """Name an attention function in one configuration, without a check and not in those inside it."""
    vars(config)["_attn_implementation_internal"] = name


def forget_attention(name: str) -> None:
    """Take a registered attention function and its mask function out of transformers, which has no function for it."""
    from transformers import AttentionInterface, AttentionMaskInterface

    for interface in (AttentionInterface, AttentionMaskInterface):
        interface._global_mapping.pop(name, None)


def is_recurrent(model: Any) -> bool:
    """Report whether a model's class is marked as one that keeps a recurrent state; some of its models have none."""
    return bool(getattr(model, "_is_stateful", False))


def takes_attention(model: Any) -> bool:
    """Report whether a model attends by a registered function."""
    return bool(getattr(model, "_supports_attention_backend", False))


CALLS = ("forward", "__call__", "_call_impl", "_wrapped_call_impl")
"""Methods that a call of a module goes through."""


def forward_hooks(module: Any) -> tuple[Any, ...]:
    """Return the hooks that run before and after a module's forward."""
    return (*module._forward_hooks.values(), *module._forward_pre_hooks.values())


def global_hooks() -> tuple[dict[int, Any], dict[int, Any]]:
    """Return the hooks that run after and before the forward of every module, as PyTorch keeps them."""
    from torch.nn.modules import module

    return module._global_forward_hooks, module._global_forward_pre_hooks


def compiled_call(module: Any) -> Any:
    """Return what a module that was compiled in place runs; None for any other."""
    return module._compiled_call_impl


def unread_attributes() -> frozenset[str]:
    """Return the names of attributes of every module that no forward reads, or that change with others."""
    from torch import nn

    words = ("backward", "state_dict", "persistent", "with_kwargs", "always_called")
    return frozenset(name for name in vars(nn.Module()) if any(word in name for word in words))


def copy_together_(tensors: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source into its tensor, on a GPU in few launches."""
    import torch

    torch._foreach_copy_(list(tensors), list(sources))
