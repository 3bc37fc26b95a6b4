"""Names that other libraries keep private, each in one function, so that a release that moves one is met here alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

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


def copy_together_(tensors: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source into its tensor, on a GPU in few launches."""
    import torch

    torch._foreach_copy_(list(tensors), list(sources))
