"""Ways in which people change a loaded model, and stand-ins for the packages they use for it."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers import AttentionInterface
from transformers.models.llama import modeling_llama as llama


class LoraLinear(nn.Module):
    """Shaped as peft's layer: the linear inside, adapters by name, ``weight`` that of the linear."""

    def __init__(self, base_layer: nn.Module, seed: int = 0) -> None:
        super().__init__()
        self.base_layer = base_layer
        weight = base_layer.weight
        rows, columns = weight.shape  # type: ignore[union-attr, misc]
        self.lora_A, self.lora_B = nn.ModuleDict(), nn.ModuleDict()
        for place, name in enumerate(("default", "other")):
            generator = torch.Generator().manual_seed(seed + place)
            self.lora_A[name] = down = nn.Linear(columns, 4, bias=False)
            self.lora_B[name] = up = nn.Linear(4, rows, bias=False)
            for each in (down, up):
                each.weight.data.normal_(generator=generator, std=0.5)
        self.scaling, self._active_adapter, self.merged_adapters = {"default": 1.0, "other": 1.0}, ["default"], []
        self.eval()

    @property
    def weight(self) -> Any:
        return self.base_layer.weight

    @property
    def bias(self) -> Any:
        return self.base_layer.bias

    def set_adapter(self, name: str) -> None:
        self._active_adapter = [name]

    def delta(self, name: str) -> Tensor:
        up, down = self.lora_B[name].weight, self.lora_A[name].weight
        return (up @ down) * self.scaling[name]  # type: ignore[operator]

    def merge(self) -> None:
        for name in self._active_adapter:
            self.base_layer.weight.data += self.delta(name)  # type: ignore[union-attr, operator]
            self.merged_adapters.append(name)

    def forward(self, x: Tensor) -> Tensor:
        result = self.base_layer(x)
        for name in () if self.merged_adapters else self._active_adapter:
            result = result + self.lora_B[name](self.lora_A[name](x)) * self.scaling[name]
        return result


class PeftStandIn(nn.Module):
    """A wrapper around a whole model as peft's: what it lacks is asked of the model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.base_model, self.peft_config = model, {"default": types.SimpleNamespace(is_prompt_learning=False)}

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("base_model"), name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.base_model(*args, **kwargs)


class Doubled(Tensor):
    """A weight of another tensor class, which counts twice in a product: a stand-in for quantised ones."""

    @classmethod
    def __torch_function__(cls, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            x, weight, *rest = args
            return F.linear(x, 2 * weight.as_subclass(Tensor), *rest)
        return super().__torch_function__(func, kinds, args, kwargs or {})


class Doubling(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


class HalvedAttention(llama.LlamaAttention):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output, weights = super().forward(*args, **kwargs)
        return output / 2, weights


class DoubledMLP(llama.LlamaMLP):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class NegatedLayer(llama.LlamaDecoderLayer):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return -super().forward(*args, **kwargs)


class FasterRotary(llama.LlamaRotaryEmbedding):
    def forward(self, x: Tensor, position_ids: Tensor) -> Any:
        return super().forward(x, 3 * position_ids)


class SoftcappedHead(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return -5 * torch.tanh(super().forward(x) / 5)


class ScaledEmbedding(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        return 3 * super().forward(ids)


class Wrapped(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.inner(x)


Undo = Callable[[], object]
Change = Callable[[Any], "Undo | None"]


def _layer(model: Any, index: int = 1) -> Any:
    return model.model.layers[index]


def lora(where: str) -> Change:
    def change(model: Any) -> None:
        for index in range(len(model.model.layers)):
            parent = getattr(_layer(model, index), where.partition(".")[0])
            name = where.partition(".")[2]
            setattr(parent, name, LoraLinear(getattr(parent, name), seed=10 * index))

    return change


def lora_on_the_head(model: Any) -> None:
    model.lm_head = LoraLinear(model.lm_head)


def lora_merged(model: Any) -> None:
    lora("self_attn.q_proj")(model)
    for layer in model.model.layers:
        layer.self_attn.q_proj.merge()


def lora_merged_and_unloaded(model: Any) -> None:
    lora_merged(model)
    for layer in model.model.layers:
        layer.self_attn.q_proj = layer.self_attn.q_proj.base_layer


def other_class(where: Callable[[Any], Any], kind: type) -> Change:
    def change(model: Any) -> None:
        where(model).__class__ = kind

    return change


def patched_class(model: Any) -> Undo:
    own = llama.LlamaMLP.forward
    llama.LlamaMLP.forward = lambda self, x: 2 * own(self, x)  # type: ignore[assignment]
    return lambda: setattr(llama.LlamaMLP, "forward", own)


def patched_class_that_names_the_original(model: Any) -> Undo:
    own = llama.LlamaRMSNorm.forward

    @functools.wraps(own)
    def forward(self: Any, x: Tensor) -> Any:
        return 0.5 * own(self, x)

    llama.LlamaRMSNorm.forward = forward
    return lambda: setattr(llama.LlamaRMSNorm, "forward", own)


def patched_function(model: Any) -> Undo:
    own = llama.apply_rotary_pos_emb
    llama.apply_rotary_pos_emb = lambda q, k, *rest, **options: own(2 * q, k, *rest, **options)
    return lambda: setattr(llama, "apply_rotary_pos_emb", own)


def forward_of_its_own(model: Any) -> None:
    mlp = _layer(model).mlp
    mlp.forward = types.MethodType(lambda self, x: 2 * llama.LlamaMLP.forward(self, x), mlp)


def attention_with_a_method_of_its_own(model: Any) -> None:
    own = llama.LlamaAttention.forward

    def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
        output, weights = own(module, *args, **kwargs)
        return output / 2, weights

    attention = _layer(model).self_attn  # as accelerate does
    attention.forward = functools.update_wrapper(functools.partial(forward, attention), own)


def attention_behind_a_closure(model: Any) -> None:
    attention = _layer(model).self_attn
    own = attention.forward
    attention.forward = lambda *args, **kwargs: own(*args, **kwargs)


def wrapped_linear(model: Any) -> None:
    mlp = _layer(model).mlp
    mlp.down_proj = Wrapped(mlp.down_proj)


def frequencies(model: Any) -> None:
    model.model.rotary_emb.inv_freq.mul_(2)


def attention_scaling(model: Any) -> None:
    model.model.rotary_emb.attention_scaling = 1.5


def activation(model: Any) -> None:
    _layer(model).mlp.act_fn = nn.Tanh()


def negated_silu(model: Any) -> None:
    act = _layer(model).mlp.act_fn
    act.forward = lambda x: -F.silu(x)


def eps(model: Any) -> None:
    _layer(model).input_layernorm.variance_epsilon = 3.0


def eps_of_the_configuration(model: Any) -> None:
    model.config.rms_norm_eps = 3.0


def scaling(model: Any) -> None:
    _layer(model).self_attn.scaling *= 3


def forward_hook(model: Any) -> None:
    _layer(model).register_forward_hook(lambda _module, _args, output: -output)


def forward_pre_hook(model: Any) -> None:
    _layer(model).mlp.register_forward_pre_hook(lambda _module, args: (2 * args[0],))


def global_hook(model: Any) -> Undo:
    def double(module: nn.Module, _args: Any, output: Any) -> Any:
        return 2 * output if isinstance(module, llama.LlamaMLP) else None

    return nn.modules.module.register_module_forward_hook(double).remove


def training(model: Any) -> None:
    model.train()


def tensor_class(model: Any) -> None:
    mlp = _layer(model).mlp
    mlp.up_proj.weight = nn.Parameter(mlp.up_proj.weight.detach().as_subclass(Doubled), requires_grad=False)


def parametrized(model: Any) -> None:
    parametrize.register_parametrization(_layer(model).mlp.up_proj, "weight", Doubling())


def weight_norm(model: Any) -> None:
    linear = nn.utils.parametrizations.weight_norm(_layer(model).self_attn.v_proj)
    linear.parametrizations.weight.original0.data.mul_(2)  # type: ignore[union-attr]


def compiled_in_place(model: Any) -> None:
    _layer(model).mlp.compile(backend="eager")


def compiled_layer(model: Any) -> None:
    model.model.layers[1] = torch.compile(_layer(model), backend="eager")


def other_head(model: Any) -> None:
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().roll(3, 0))


def tied(model: Any) -> None:
    model.lm_head.weight = model.model.embed_tokens.weight


def other_weights(model: Any) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for name, tensor in state.items():
        if tensor.dim() == 2 and ".layers." in name:
            tensor.add_(torch.randn(tensor.shape, generator=generator).to(tensor) * tensor.std())
    return state


def loaded(model: Any) -> None:
    model.load_state_dict(other_weights(model))


def loaded_by_assignment(model: Any) -> None:
    model.load_state_dict(other_weights(model), assign=True)


def changed_through_data(model: Any) -> None:
    for name, tensor in other_weights(model).items():
        model.get_parameter(name).data.copy_(tensor)


def optimised(model: Any, fused: bool = False) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=fused)
    ids = torch.tensor([[3, 4, 5, 6]], device=model.device)
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def bias_added(model: Any) -> None:
    _layer(model).self_attn.o_proj.bias = nn.Parameter(torch.linspace(-3, 3, 32))


def bias_of_the_head(model: Any) -> None:
    model.lm_head.bias = nn.Parameter(torch.linspace(-9, 9, model.lm_head.weight.shape[0]))


def fewer_layers(model: Any) -> None:
    model.model.layers = model.model.layers[:-1]
    model.config.num_hidden_layers -= 1


def fewer_layers_than_configured(model: Any) -> None:
    del model.model.layers[-1]


def reordered(model: Any) -> None:
    layers = list(model.model.layers)
    model.model.layers = nn.ModuleList([layers[1], layers[0], *layers[2:]])


def eager_attention(model: Any) -> None:
    model.set_attn_implementation("eager")


def attention_of_ones_own(model: Any) -> None:
    AttentionInterface.register("mine", lambda module, query, *_args, **_options: (query.transpose(1, 2), None))
    model.config._attn_implementation = "mine"


def sdpa_replaced(model: Any) -> Undo:
    own = AttentionInterface._global_mapping["sdpa"]
    AttentionInterface.register("sdpa", lambda module, query, *_args, **_options: (query.transpose(1, 2), None))
    return lambda: AttentionInterface.register("sdpa", own)


def autocast(model: Any) -> Undo:
    mode = torch.autocast("cpu", torch.bfloat16)
    mode.__enter__()
    return lambda: mode.__exit__(None, None, None)


def in_double(model: Any) -> None:
    model.double()


def resized(model: Any) -> None:
    model.resize_token_embeddings(32, mean_resizing=False)


def a_step_of_a_fused_optimiser(model: Any) -> None:
    optimised(model, fused=True)


FUSED = "fused"
REFUSED = "refused"
CHANGES: dict[str, tuple[Change, str, str]] = {
    # what is done: how it runs when it was done before loading, and when between two calls
    "lora on q_proj": (lora("self_attn.q_proj"), "q_proj is a LoraLinear", ""),
    "lora on down_proj": (lora("mlp.down_proj"), "down_proj is a LoraLinear", ""),
    "lora on the LM head": (lora_on_the_head, "lm_head is a LoraLinear", ""),
    "merged lora": (lora_merged, "q_proj is a LoraLinear", ""),
    "merged and unloaded lora": (lora_merged_and_unloaded, FUSED, ""),
    "attention subclass": (other_class(lambda m: _layer(m).self_attn, HalvedAttention), "HalvedAttention", ""),
    "MLP subclass": (other_class(lambda m: _layer(m).mlp, DoubledMLP), "layers.1.mlp is a DoubledMLP", ""),
    "layer subclass": (other_class(_layer, NegatedLayer), "layers.1 is a NegatedLayer", ""),
    "rotary subclass": (other_class(lambda m: m.model.rotary_emb, FasterRotary), "FasterRotary", ""),
    "LM head subclass": (other_class(lambda m: m.lm_head, SoftcappedHead), "lm_head is a SoftcappedHead", ""),
    "embedding subclass": (other_class(lambda m: m.model.embed_tokens, ScaledEmbedding), "ScaledEmbedding", ""),
    "patched class": (patched_class, "forward of LlamaMLP was replaced", ""),
    "patched class, wrapped": (patched_class_that_names_the_original, "forward of LlamaRMSNorm was replaced", ""),
    "patched function": (patched_function, "a function of transformers.models.llama", ""),
    "forward of its own": (forward_of_its_own, "layers.1.mlp has a forward of its own", ""),
    "attention's forward, partial": (attention_with_a_method_of_its_own, "has a forward of its own", ""),
    "attention's forward, closure": (attention_behind_a_closure, REFUSED, ""),
    "wrapped linear": (wrapped_linear, "down_proj is a Wrapped", ""),
    "frequencies": (frequencies, "inv_freq is not that of its configuration", ""),
    "attention scaling of rotary": (attention_scaling, "rotary_emb is not that of its configuration", ""),
    "activation": (activation, "act_fn is a Tanh", ""),
    "activation's forward": (negated_silu, "act_fn has a forward of its own", ""),
    "eps": (eps, "variance_epsilon is 3.0", ""),
    "eps of the configuration": (eps_of_the_configuration, "its configuration gives 3.0", ""),
    "scaling": (scaling, "self_attn.scaling is", ""),
    "forward hook": (forward_hook, "layers.1 has a forward hook", ""),
    "forward pre-hook": (forward_pre_hook, "layers.1.mlp has a forward hook", ""),
    "global hook": (global_hook, "a global module hook is registered", ""),
    "training mode": (training, "is in training mode", ""),
    "tensor class": (tensor_class, "up_proj.weight is a Doubled", ""),
    "parametrization": (parametrized, "up_proj is a ParametrizedLinear", ""),
    "weight norm": (weight_norm, "v_proj is a ParametrizedLinear", ""),
    "compiled in place": (compiled_in_place, "layers.1.mlp has a compiled call of its own", ""),
    "compiled layer": (compiled_layer, "layers.1 is a OptimizedModule", ""),
    "LM head's weight": (other_head, FUSED, ""),
    "tied LM head": (tied, FUSED, ""),
    "load_state_dict": (loaded, FUSED, ""),
    "load_state_dict, assign": (loaded_by_assignment, FUSED, ""),
    "weights through .data": (changed_through_data, FUSED, ""),
    "optimiser": (optimised, FUSED, ""),
    "fused optimiser": (a_step_of_a_fused_optimiser, FUSED, ""),
    "bias": (bias_added, FUSED, ""),
    "bias of the LM head": (bias_of_the_head, "lm_head has the tensors weight, bias", ""),
    "fewer layers": (fewer_layers, FUSED, REFUSED),
    "fewer layers than configured": (fewer_layers_than_configured, REFUSED, ""),
    "layers in another order": (reordered, "layers.0.self_attn.layer_idx is 1", ""),
    "eager attention": (eager_attention, FUSED, ""),
    "attention of one's own": (attention_of_ones_own, REFUSED, ""),
    "sdpa replaced": (sdpa_replaced, REFUSED, ""),
    "autocast": (autocast, "torch.autocast in bfloat16 is on", ""),
    "another type": (in_double, "its weights are torch.float64", REFUSED),
    "more tokens": (resized, FUSED, REFUSED),
}  # fmt: skip
"""A text is what is said of transformers' forward; an empty one means the same as before loading."""
