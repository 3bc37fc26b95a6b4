"""Ways in which people change a loaded model, and stand-ins for the packages they use for it."""

import functools
import types
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import make_dataclass
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization
from transformers import AttentionInterface
from transformers.models.llama import modeling_llama as llama

LAYER = "model.layers.1"
MLP, ATTENTION = f"{LAYER}.mlp", f"{LAYER}.self_attn"
Change = Callable[[Any, ExitStack], object]
"""Changes a model; the stack undoes what is global of it."""


class LoraLinear(nn.Module):
    """Shaped as peft's layer: the linear inside, adapters by name, ``weight`` that of the linear."""

    def __init__(self, base_layer: Any, seed: int = 0) -> None:
        super().__init__()
        self.base_layer = base_layer
        rows, columns = base_layer.weight.shape
        self.lora_A, self.lora_B = nn.ModuleDict(), nn.ModuleDict()
        for place, name in enumerate(("default", "other")):
            generator = torch.Generator().manual_seed(seed + place)
            self.lora_A[name] = down = nn.Linear(columns, 4, bias=False)
            self.lora_B[name] = up = nn.Linear(4, rows, bias=False)
            for each in (down, up):
                each.weight.data.normal_(generator=generator, std=0.5)
        self.scaling, self.active = {"default": 1.0, "other": 1.0}, "default"
        self.eval()

    weight = property(lambda self: self.base_layer.weight)
    bias = property(lambda self: self.base_layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora_B[self.active](self.lora_A[self.active](x)) * self.scaling[self.active]


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


class Wrapper(Tensor):
    """A tensor without storage around another, as quantised ones are."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> "Wrapper":
        wrapper = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        wrapper.inner = inner
        return wrapper

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*(each.inner if isinstance(each, cls) else each for each in args), **(kwargs or {}))


class Doubling(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


class Wrapped(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.inner(x)


def replaced(path: str, name: str, change: Callable[[Any], Any]) -> Change:
    """An attribute of a submodule, replaced by what ``change`` makes of it."""

    def act(model: Any, _: Any) -> None:
        owner = model.get_submodule(path)
        setattr(owner, name, change(getattr(owner, name)))

    return act


def lora(where: str) -> Change:
    def change(model: Any, _: Any = None) -> None:
        parent, _, name = where.partition(".")
        for index, layer in enumerate(model.model.layers):
            setattr(getattr(layer, parent), name, LoraLinear(getattr(getattr(layer, parent), name), seed=10 * index))

    return change


def lora_merged_and_unloaded(model: Any, stack: ExitStack) -> None:
    lora("self_attn.q_proj")(model, stack)
    for layer in model.model.layers:
        adapted = layer.self_attn.q_proj
        adapted.base_layer.weight.data += adapted.lora_B["default"].weight @ adapted.lora_A["default"].weight
        layer.self_attn.q_proj = adapted.base_layer


def subclass(path: str, factor: float) -> Change:
    """Another class of a module, whose first output is multiplied."""

    def change(model: Any, _: Any) -> None:
        module = model.get_submodule(path)
        own = type(module)

        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            output = own.forward(self, *args, **kwargs)
            return (factor * output[0], *output[1:]) if isinstance(output, tuple) else factor * output

        module.__class__ = type(f"My{own.__name__}", (own,), {"forward": forward})

    return change


def patched(owner: Any, name: str, around: Callable[[Any], Any]) -> Change:
    return lambda _, stack: stack.enter_context(mock.patch.object(owner, name, around(getattr(owner, name))))


def attention_with_a_method_of_its_own(model: Any, _: Any) -> None:
    own = llama.LlamaAttention.forward

    def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
        output, weights = own(module, *args, **kwargs)
        return output / 2, weights

    attention = model.get_submodule(ATTENTION)  # as accelerate does
    attention.forward = functools.update_wrapper(functools.partial(forward, attention), own)


def global_hook(_: Any, stack: ExitStack) -> None:
    def double(module: nn.Module, _args: Any, output: Any) -> Any:
        return 2 * output if isinstance(module, llama.LlamaMLP) else None

    stack.callback(nn.modules.module.register_module_forward_hook(double).remove)


def other_weights(model: Any) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(7)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for name, tensor in state.items():
        if tensor.dim() == 2 and ".layers." in name:
            tensor.add_(torch.randn(tensor.shape, generator=generator).to(tensor) * tensor.std())
    return state


def optimised(model: Any, _: Any) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)
    ids = torch.tensor([[3, 4, 5, 6]], device=model.device)
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def bias(path: str, most: float) -> Change:
    def change(model: Any, _: Any) -> None:
        linear = model.get_submodule(path)
        linear.bias = nn.Parameter(torch.linspace(-most, most, len(linear.weight)))

    return change


def fewer_layers(model: Any, _: Any) -> None:
    model.model.layers = model.model.layers[:-1]
    model.config.num_hidden_layers -= 1


def other_attention(name: str) -> Change:
    def change(model: Any, stack: ExitStack) -> None:
        functions = {name: lambda module, query, *_args, **_options: (query.transpose(1, 2), None)}
        stack.enter_context(mock.patch.dict(AttentionInterface._global_mapping, functions))
        model.config._attn_implementation = name

    return change


class Holder:
    """Any object that holds a tensor."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor

    def hook(self, _module: nn.Module, _args: Any, output: Tensor) -> Tensor:
        return output + self.tensor


Steering = tuple[Callable[[Tensor], object], Callable[[], Tensor]]
"""Puts another tensor in the place of one that is added to a module's output; gives the one that is there."""


def steer(module: Any, read: Callable[[Any], Tensor]) -> None:
    """Another class of a module, whose output gains what is read from the module."""
    own = type(module)
    members = {"forward": lambda self, x: own.forward(self, x) + read(self)}
    module.__class__ = type(f"Steered{own.__name__}", (own,), members)


def steered_by_an_attribute(of: Callable[[Any], Any]) -> Callable[[Any, Tensor], Steering]:
    def act(module: Any, tensor: Tensor) -> Steering:
        steer(module, lambda self: self.vector)
        owner = of(module)
        owner.vector = tensor
        return functools.partial(setattr, owner, "vector"), lambda: owner.vector

    return act


def steered_by_what_is_held(hold: Callable[[Tensor], Any], key: Any) -> Callable[[Any, Tensor], Steering]:
    """An attribute that holds the tensor under a key, or as an attribute of that name."""

    def act(module: Any, tensor: Tensor) -> Steering:
        module.held = hold(tensor)
        is_object = isinstance(key, str) and not isinstance(module.held, dict)
        read = (lambda: getattr(module.held, key)) if is_object else (lambda: module.held[key])
        put = functools.partial(setattr if is_object else type(module.held).__setitem__, module.held, key)
        steer(module, lambda _self: read())
        return put, read

    return act


def steered_by_a_closure(module: Any, tensor: Tensor) -> Steering:
    vector = tensor

    def replace(new: Tensor) -> None:
        nonlocal vector
        vector = new

    module.register_forward_hook(lambda _module, _args, output: output + vector)
    return replace, lambda: vector


def steered_by_a_list_in_a_closure(module: Any, tensor: Tensor) -> Steering:
    vectors = [tensor]
    module.register_forward_hook(lambda _module, _args, output: output + vectors[0])
    return functools.partial(vectors.__setitem__, 0), lambda: vectors[0]


def steered_by_a_default(module: Any, tensor: Tensor) -> Steering:
    def hook(_module: nn.Module, _args: Any, output: Tensor, vector: Tensor = tensor) -> Tensor:
        return output + vector

    def replace(new: Tensor) -> None:
        hook.__defaults__ = (new,)

    module.register_forward_hook(hook)
    return replace, lambda: hook.__defaults__[0]  # type: ignore[index]


def steered_by_a_partial(module: Any, tensor: Tensor) -> Steering:
    held = [tensor]
    own = module.forward
    module.forward = functools.partial(lambda vectors, x: own(x) + vectors[0], held)
    return functools.partial(held.__setitem__, 0), lambda: held[0]


def steered_by_a_method_of_an_object(module: Any, tensor: Tensor) -> Steering:
    holder = Holder(tensor)
    module.register_forward_hook(holder.hook)
    return functools.partial(setattr, holder, "tensor"), lambda: holder.tensor


VECTOR: Any = None


def steered_by_a_global(module: Any, tensor: Tensor) -> Steering:
    global VECTOR
    VECTOR = tensor
    module.register_forward_hook(lambda _module, _args, output: output + VECTOR)
    return functools.partial(globals().__setitem__, "VECTOR"), lambda: VECTOR


def steered_by_an_array(module: Any, tensor: Tensor) -> Steering:
    steer(module, lambda self: torch.from_numpy(self.array))
    module.array = tensor.numpy().copy()
    return lambda new: setattr(module, "array", new.numpy().copy()), lambda: torch.from_numpy(module.array)


def steered_by_a_wrapper(module: Any, tensor: Tensor) -> Steering:
    steer(module, lambda self: self.vector)
    module.vector = Wrapper(tensor)
    return lambda new: setattr(module, "vector", Wrapper(new)), lambda: module.vector.inner


STEERED: dict[str, Callable[[Any, Tensor], Steering]] = {
    "attribute": steered_by_an_attribute(lambda module: module),
    "list": steered_by_what_is_held(lambda tensor: [tensor], 0),
    "deque": steered_by_what_is_held(lambda tensor: deque([tensor]), 0),
    "dict": steered_by_what_is_held(lambda tensor: {"a": tensor}, "a"),
    "dataclass": steered_by_what_is_held(make_dataclass("Dataclass", ["tensor"]), "tensor"),
    "dataclass with slots": steered_by_what_is_held(make_dataclass("Slotted", ["tensor"], slots=True), "tensor"),
    "object": steered_by_what_is_held(Holder, "tensor"),
    "class": steered_by_an_attribute(type),
    "closure of a hook": steered_by_a_closure,
    "list in a closure": steered_by_a_list_in_a_closure,
    "default of a hook": steered_by_a_default,
    "partial in a forward's place": steered_by_a_partial,
    "object with a hook": steered_by_a_method_of_an_object,
    "global of a hook": steered_by_a_global,
    "array": steered_by_an_array,
    "wrapper": steered_by_a_wrapper,
}
FUSED = "fused"
REFUSED = "refused"
UNCOUNTED = ("fused optimiser", "merged and unloaded lora")
"""Changes that move no version counter."""
CHANGES: dict[str, Change] = {
    "lora on q_proj": lora("self_attn.q_proj"),
    "lora on the LM head": replaced("", "lm_head", LoraLinear),
    "merged and unloaded lora": lora_merged_and_unloaded,
    "attention subclass": subclass(ATTENTION, 0.5),
    "LM head subclass": subclass("lm_head", -1),
    "patched class": patched(llama.LlamaMLP, "forward", lambda own: lambda self, x: 2 * own(self, x)),
    "patched class, wrapped": patched(
        llama.LlamaRMSNorm, "forward", lambda own: functools.wraps(own)(lambda self, x: 0.5 * own(self, x))
    ),
    "patched function": patched(
        llama, "apply_rotary_pos_emb", lambda own: lambda q, *rest, **options: own(2 * q, *rest, **options)
    ),
    "patched function of PyTorch": patched(F, "silu", lambda own: lambda x, **options: 2 * own(x, **options)),
    "attention's forward, partial": attention_with_a_method_of_its_own,
    "attention's forward, closure": replaced(
        ATTENTION, "forward", lambda own: lambda *a, **options: own(*a, **options)
    ),
    "wrapped linear": replaced(MLP, "down_proj", Wrapped),
    "frequencies": lambda model, _: model.model.rotary_emb.inv_freq.mul_(2),
    "attention scaling of rotary": replaced("model.rotary_emb", "attention_scaling", lambda _: 1.5),
    "activation's forward": replaced(f"{MLP}.act_fn", "forward", lambda _: lambda x: -F.silu(x)),
    "eps": lambda model, _: setattr(model.model.norm, "variance_epsilon", 3.0),
    "eps of the configuration": lambda model, _: model.config.update({"rms_norm_eps": 3.0}),
    "forward hook": lambda model, _: model.get_submodule(LAYER).register_forward_hook(lambda _m, _a, output: -output),
    "forward pre-hook": lambda model, _: model.get_submodule(MLP).register_forward_pre_hook(
        lambda _m, args: (2 * args[0],)
    ),
    "global hook": global_hook,
    "training mode": lambda model, _: model.train(),
    "tensor class": replaced(
        f"{MLP}.up_proj", "weight", lambda own: nn.Parameter(own.detach().as_subclass(Doubled), False)
    ),
    "parametrization": lambda model, _: register_parametrization(
        model.get_submodule(f"{MLP}.up_proj"), "weight", Doubling()
    ),
    "compiled in place": lambda model, _: model.get_submodule(MLP).compile(backend="eager"),
    "compiled layer": replaced("model.layers", "1", lambda layer: torch.compile(layer, backend="eager")),
    "LM head's weight": replaced("lm_head", "weight", lambda own: nn.Parameter(own.detach().roll(3, 0))),
    "tied LM head": lambda model, _: setattr(model.lm_head, "weight", model.model.embed_tokens.weight),
    "load_state_dict": lambda model, _: model.load_state_dict(other_weights(model)),
    "load_state_dict, assign": lambda model, _: model.load_state_dict(other_weights(model), assign=True),
    "fused optimiser": optimised,
    "bias": bias(f"{ATTENTION}.o_proj", 3),
    "bias of the LM head": bias("lm_head", 9),
    "fewer layers": fewer_layers,
    "fewer layers than configured": lambda model, _: model.model.layers.pop(-1),
    "layers in another order": replaced("model", "layers", lambda own: nn.ModuleList([own[1], own[0], *own[2:]])),
    "eager attention": lambda model, _: model.set_attn_implementation("eager"),
    "attention of one's own": other_attention("mine"),
    "sdpa replaced": other_attention("sdpa"),
    "another type": lambda model, _: model.double(),
    "more tokens": lambda model, _: model.resize_token_embeddings(32, mean_resizing=False),
}
OUTCOMES = {
    "lora on q_proj": "q_proj is a LoraLinear",
    "lora on the LM head": "lm_head is a LoraLinear",
    "attention subclass": "layers.1.self_attn is a MyLlamaAttention",
    "LM head subclass": "lm_head is a MyLinear",
    "patched class": "forward of LlamaMLP was replaced",
    "patched class, wrapped": "forward of LlamaRMSNorm was replaced",
    "patched function": "apply_rotary_pos_emb of transformers.models.llama.modeling_llama was replaced",
    "patched function of PyTorch": "a function of torch.nn.functional was replaced",
    "attention's forward, partial": "has a forward of its own",
    "attention's forward, closure": REFUSED,
    "wrapped linear": "down_proj is a Wrapped",
    "activation's forward": "act_fn has a forward of its own",
    "eps": "variance_epsilon is 3.0",
    "eps of the configuration": "its configuration gives 3.0",
    "forward hook": "layers.1 has a forward hook",
    "forward pre-hook": "layers.1.mlp has a forward hook",
    "global hook": "a global module hook is registered",
    "training mode": "is in training mode",
    "tensor class": "up_proj.weight is a Doubled",
    "parametrization": "up_proj is a ParametrizedLinear",
    "compiled in place": "layers.1.mlp has a compiled call of its own",
    "compiled layer": "layers.1 is a OptimizedModule",
    "bias of the LM head": "lm_head.bias is [24], and its configuration gives None",
    "fewer layers than configured": REFUSED,
    "layers in another order": "layers.0.self_attn.layer_idx is 1",
    "attention of one's own": REFUSED,
    "sdpa replaced": REFUSED,
    "another type": "its weights are torch.float64",
}
"""Says how a changed model runs: refused, or by transformers' forward, of which the text is said; others are fused."""
REFUSED_BETWEEN_CALLS = ("fewer layers", "another type", "more tokens")
