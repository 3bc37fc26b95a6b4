"""Private names of other libraries: that they are still there, and do what is expected of them."""

import pytest
import torch
from eagle_slim.vocab_tools.compat import compile_chat_template, copy_together_, http_error_type
from huggingface_hub import get_session
from jinja2 import TemplateError


def test_templates_are_compiled_as_transformers_does() -> None:
    template = compile_chat_template("{%- for m in messages %}{{ m | tojson }}{% continue %}{% endfor %}")
    assert template.render(messages=[{"content": "<ä>"}]) == '{"content": "<ä>"}'
    with pytest.raises(TemplateError, match="no tools"):
        compile_chat_template("{{ raise_exception('no tools') }}").render()
    with pytest.raises(TemplateError):
        compile_chat_template("{{ messages.append(1) }}").render(messages=[])


def test_the_http_library_s_errors_have_one_base() -> None:
    with pytest.raises(http_error_type()):
        # Nothing listens on port 0.
        get_session().get("http://127.0.0.1:0/")


def test_tensors_are_copied_together() -> None:
    tensors, sources = [torch.zeros(2), torch.zeros(3, dtype=torch.int32)], [torch.arange(2.0), torch.arange(3)]
    copy_together_(tensors, sources)
    assert [tensor.tolist() for tensor in tensors] == [[0, 1], [0, 1, 2]]
    assert tensors[1].dtype == torch.int32
