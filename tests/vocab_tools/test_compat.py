"""Private names of other libraries: that they are still there, and do what is expected of them."""

import torch
from eagle_slim.vocab_tools import compat
from torch import nn
from transformers import LlamaConfig, MambaForCausalLM
from transformers import LlamaForCausalLM as Llama


def test_a_counter_and_an_address_tell_of_writes() -> None:
    tensor = torch.ones(3)
    before = compat.tensor_state(tensor)
    tensor.add_(1)
    assert compat.tensor_state(tensor) == (before[0] + 1, before[1])  # type: ignore[operator]
    other = torch.ones(3)
    tensor.data = other
    assert compat.tensor_state(tensor)[1] == compat.tensor_state(other)[1] != before[1]
    with torch.inference_mode():
        assert compat.tensor_state(torch.ones(3))[0] is None


def test_a_configuration_names_one_attention_function() -> None:
    config = LlamaConfig()
    compat.name_attention_(config, "mine")
    assert (compat.attention_name(config), config._attn_implementation) == ("mine", "mine")
    assert compat.attention_name(None) is None
    assert compat.is_config(config)
    assert not any(map(compat.is_config, (LlamaConfig, nn.Linear(1, 1), {}, None)))
    assert {name for name in dir(config) if name in compat.OUTPUTS} >= {"output_attentions", "output_hidden_states"}


def test_classes_say_what_their_models_do() -> None:
    assert (compat.is_recurrent(MambaForCausalLM), compat.takes_attention(MambaForCausalLM)) == (True, False)
    assert (compat.is_recurrent(Llama), compat.takes_attention(Llama)) == (False, True)
    assert (compat.is_recurrent(nn.Linear), compat.takes_attention(nn.Linear)) == (False, False)


def test_a_call_of_a_module_goes_through_these_methods_and_hooks() -> None:
    linear = nn.Linear(1, 1)
    assert all(callable(getattr(linear, name)) for name in compat.CALLS)
    after, before = linear.register_forward_hook(print), linear.register_forward_pre_hook(repr)
    assert compat.forward_hooks(linear) == (print, repr)
    after.remove()
    before.remove()
    assert not compat.forward_hooks(linear)
    handle = nn.modules.module.register_module_forward_hook(print)
    assert [list(hooks.values()) for hooks in compat.global_hooks()] == [[print], []]
    handle.remove()
    assert compat.compiled_call(linear) is None
    linear.compile(backend="eager")
    assert compat.compiled_call(linear) is not None


def test_attributes_that_no_forward_reads() -> None:
    read = vars(nn.Module()).keys() - compat.unread_attributes()
    assert read == {"training", "_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks"}


def test_tensors_are_copied_together() -> None:
    tensors, sources = [torch.zeros(2), torch.zeros(3, dtype=torch.int32)], [torch.arange(2.0), torch.arange(3)]
    compat.copy_together_(tensors, sources)
    assert [tensor.tolist() for tensor in tensors] == [[0, 1], [0, 1, 2]]
    assert tensors[1].dtype == torch.int32
