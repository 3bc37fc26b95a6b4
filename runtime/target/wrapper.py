"""The target model: transformers' own weights, norms and rotary embedding, over our cache and attention.

`TargetModel` wraps a loaded causal LM. It accepts decoder-only models with softmax attention and rotary positions, and
refuses everything else by class before any forward. It looks at the model before every call (`TargetModel.look`), as
adapters come and go and weights change between calls; nothing of the model is changed while a forward of ours runs
(`shared_copy`).
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from eagle_slim.vocab_tools.compat import attention_name, is_recurrent, takes_attention
from torch import Tensor, nn
from transformers.cache_utils import Cache

from ..errors import EagleSlimError, PairingError, SpeedWarning, TargetWarning, UnsupportedModelError, UsageError, brief
from ..ops import current, side_stream
from . import attention, fused
from .attention import CacheContext, ShapeProbe
from .cache import ForwardBuffers, KVCache, LayerShape, Target
from .expert_loading import Mxfp4Experts, PackedExperts
from .few_rows import few_rows
from .fp8 import Fp8Linear
from .fused import Choice, FusedTarget, choose_forward, family_of
from .kernels.products import SUMS_VERSION
from .kernels.tree_rows import ForwardRows
from .known import unfit_reason
from .mxfp4 import DEQUANTISED
from .shared_copy import SharedCopy
from .watch import Watch

_ATTENDING = {"attention", "full_attention", "sliding_attention"}
"""Types of layers that attend by softmax and keep nothing else."""
_PROMPT_ADAPTERS = {"ADAPTION_PROMPT", "LILY", "POLY", "SHADOW", "SUPERTUNING", "XLORA"}
"""peft's adapters whose effect on a token depends on other tokens of a forward, or on an argument of ``generate``."""
_RECURRENT = ("ssm_cfg", "state_size", "mamba_d_state", "mamba_d_conv", "conv_L_cache", "rescale_every", "lru_width")
"""Settings of models that keep a recurrent state."""
_LOCKS: WeakKeyDictionary[nn.Module, tuple[threading.RLock, threading.Lock]] = WeakKeyDictionary()
"""Two locks a target, shared by all who wrap it: one that other threads wait for, one that marks a running call."""
_LOCKS_LOCK = threading.Lock()


class TargetModel(Target):
    """A transformers causal LM that verifies draft trees.

    ``tap_layers``: the features are the hidden states entering these decoder layers (``num_layers`` itself means
    leaving the last one), concatenated; None: the last hidden state after the final norm. ``backend``: "transformers",
    "fused" or "auto": the fused forward on a GPU where `known.unfit_reason` finds nothing.

    Raises `UnsupportedModelError` for a model that cannot verify trees or not with the ``backend`` asked for,
    `PairingError` for tap layers out of range, `UsageError` for an unknown backend.
    """

    layers: nn.ModuleList
    backend: Choice
    """The forward that generation uses, and why."""

    def __init__(self, model: nn.Module, tap_layers: Sequence[int] | None, backend: str = "transformers") -> None:
        attention.register(self)
        self.model = model
        with _LOCKS_LOCK:
            self._locks = _LOCKS.setdefault(model, (threading.RLock(), threading.Lock()))
        self.tap_layers = None if tap_layers is None else tuple(tap_layers)
        self._asked = backend
        self._warned: set[str] = set()
        self.users: WeakSet[Any] = WeakSet()
        """Holders of caches and graphs of this model, each with methods ``drop`` and ``forget`` (cached rows alone)."""
        self.version = -1
        """Incremented when the model is found changed; caches and graphs belong to one version."""
        self._sizes: dict[str, object] = {}
        self._watch: Watch | None = None
        self._fused: FusedTarget | None = None
        self._copy: SharedCopy | None = None
        self.look()

    def look(self) -> None:
        """Read the model anew if it has changed since the last look.

        To be called with the lock held. Raises `UnsupportedModelError` where a changed model cannot be run as asked,
        and `UsageError` where it is of another type, on another device, or of other sizes.
        """
        if self._watch is not None and not self._watch.has_changed():
            if self._watch.is_blind:
                # A forward reads the tensors as they are now; cached rows may be of others.
                for each in tuple(self.users):
                    each.forget()
            return
        # What holds the old weights goes before the new ones are packed, so that there is room.
        self._watch = self._fused = self._copy = None
        for each in tuple(self.users):
            each.drop()
        # Parameters that become views of packed storage must stay usable outside inference mode.
        with torch.inference_mode(False), torch.no_grad():
            self._take()

    def refresh(self) -> None:
        """Read the model anew, changed or not; to be called with the lock held. Raises as `look`."""
        self._watch = None
        self.look()

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Let this thread alone generate with the model; others wait, whichever `TargetModel` over it they use.

        Forwards that are not ours need not wait. Locks are held by ``with`` alone, so that no interrupt keeps one.
        Raises `UsageError` in the thread that holds it already, which would wait forever.
        """
        others, own = self._locks
        with others:
            # Other threads wait above, so whoever holds it is this one.
            if own.locked():
                raise UsageError(
                    "generate() was called within a call, by a streamer, a criterion or a processor. Let it end first."
                )
            with own:
                yield

    def _take(self) -> None:
        check_supported(self.model)
        self.layers = find_decoder_layers(self.model)
        for layer in self.tap_layers or ():
            if not 0 <= layer <= len(self.layers):
                has = f"{type(self.model).__name__} has layers 0 to {len(self.layers) - 1}"
                taps = f"The head taps the inputs of decoder layers {self.tap_layers}"
                raise PairingError(f"{taps}; {has}. The head was trained for another target.")
        # What the drafter's weights and buffers were made for.
        sizes = {
            "dtype": self.dtype,
            "device": self.device,
            "number of layers": len(self.layers),
            "hidden size": self.hidden_size,
            "vocabulary": self.vocab_size,
        }
        for name, value in self._sizes.items():
            if sizes[name] != value:
                problem = f"was {value} when this model was built from it, and is {sizes[name]} now"
                advice = "Change it back, or build the model again with from_pretrained."
                raise UsageError(f"The target's {name} {problem}. {advice}")
        self._sizes = sizes
        self.backend = self._choose_backend()
        with current(self.device):
            if self.backend.name == "fused":
                self._fused = FusedTarget(self.model, self.tap_layers)
            else:
                self._copy = SharedCopy(self.model, attention.ATTENTION_NAME)
                self._record_features(self._copy)
                lm_head: Any = self._copy.of(self.model.get_output_embeddings())
                # Quantised weights multiply themselves.
                is_plain = type(lm_head) is nn.Linear and type(lm_head.weight) is nn.Parameter
                if is_plain and lm_head.bias is None:
                    vars(lm_head).setdefault("forward", partial(few_rows, weight=lm_head.weight))
        for name in ("layer_shapes", "eager_reason", "weight_bytes"):
            vars(self).pop(name, None)
        self.version += 1
        watch = Watch(self.model)
        if self._copy is not None:
            # A forward may leave something in what is compared: no change of the model.
            _ = self.layer_shapes
            watch.ignore_written()
        # Last: it means that all else was taken.
        self._watch = watch

    def _choose_backend(self) -> Choice:
        """Choose a forward; a `SpeedWarning` says once what keeps a model of a known family from the fused one."""
        packed = {type(each) for each in self.model.modules() if isinstance(each, (Fp8Linear, PackedExperts))}
        if packed:
            is_fp4 = Mxfp4Experts in packed
            reason = "it was asked for" if self._asked == "transformers" else unfit_reason(self.model)
            note = str(getattr(self.model, "packed_note", "experts in MXFP4" if is_fp4 else "weights in FP8"))
            if reason is not None:
                advice = DEQUANTISED if is_fp4 else "load the target in another form (without target_weights = 'fp8')"
                problem = f"The target has {note}, which transformers' own forward does not run: {reason}"
                raise UnsupportedModelError(f"{problem}. Undo that, or {advice}.")
            if is_fp4 and self.device.type not in fused.FUSED_ON:
                self._warn_once(f"On the {self.device.type} experts are unpacked at each use, slowly: {DEQUANTISED}.")
            return Choice("fused", note)
        backend = choose_forward(self._asked, "transformers", lambda: unfit_reason(self.model), self.device)
        could_be = self._asked == "auto" and self.device.type in fused.FUSED_ON and family_of(self.model)
        if could_be and backend.name != "fused":
            self._warn_once(f"transformers' own forward runs it, more slowly than ours could: {backend.reason}.")
        return backend

    def _warn_once(self, message: str, kind: type[UserWarning] = SpeedWarning) -> None:
        if message not in self._warned:
            self._warned.add(message)
            warnings.warn(message, kind, stacklevel=3)

    @property
    def runs(self) -> Target:
        """The target that runs forwards: the fused one, or this."""
        return self._fused or self

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UsageError(
            "A SpeculativeModel cannot be copied or pickled, as it holds KV caches and graphs. Build another with "
            "from_pretrained over a copy of the target, or share the target: with_draft_vocab, with_tree, with_drafter."
        )

    @property
    def generation_config(self) -> Any:
        """The model's generation configuration; None where it has none."""
        return getattr(self.model, "generation_config", None)

    @cached_property
    def weight_bytes(self) -> int:
        """Bytes of the weights that a token reads: those of the decoder layers and of the LM head."""
        layers = chain.from_iterable(chain(layer.parameters(), layer.buffers()) for layer in self.layers)
        unread = 0 if self._fused is None else self._fused.unread_bytes
        return sum(weight.nbytes for weight in (*layers, self.lm_head)) - unread

    @property
    def max_positions(self) -> int | None:
        """Context the model was made for, in tokens; None if its configuration does not say."""
        limits = (getattr(self.text_config, "max_position_embeddings", None), self.longrope_limit)
        return min((int(limit) for limit in limits if limit is not None), default=None)

    @property
    def longrope_limit(self) -> int | None:
        """Length beyond which longrope changes a forward's frequencies, but not its cached keys'; None without it."""
        own = getattr(self.text_config, "original_max_position_embeddings", None)
        kinds = [rope for rope in _rope_kinds(self.text_config) if rope.get("rope_type") == "longrope"]
        return next((rope.get("original_max_position_embeddings", own) for rope in kinds), None)

    @cached_property
    def layer_shapes(self) -> tuple[LayerShape, ...]:
        """Shapes of the layers with keys and values of their own, found by a forward over one token.

        Raises `UnsupportedModelError` for a model that does not attend through our function, leaves out a tapped layer,
        or hands on hidden states of another form.
        """
        probe = ShapeProbe()
        token = torch.zeros((1, 1), dtype=torch.int64, device=self.device)
        try:
            self._run(token, token, probe, None)
        except (EagleSlimError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # a model's own code may raise anything
            raise UnsupportedModelError(f"{type(self.model).__name__} cannot run a token: {brief(error)}.") from error
        skipped = sorted(set(probe.shapes) - probe.attended)
        if skipped or not probe.attended:
            how = f"by a forward of its own, not by the registered function {attention.ATTENTION_NAME!r}"
            where = f"{type(self.model).__name__} attends in layer {skipped[0] if skipped else 0}"
            raise UnsupportedModelError(f"{where} {how}.")
        window: Any = getattr(self.text_config, "sliding_window", None)
        is_cut = "sliding_attention" in (getattr(self.text_config, "layer_types", None) or ["sliding_attention"])
        if is_cut and window not in (None, *probe.windows) and window < (self.max_positions or window + 1):
            what = f"{type(self.model).__name__} does not read sliding_window = {window} of its configuration"
            other = "transformers' generate cuts its KV cache there, and gives another text than with use_cache=False"
            self._warn_once(f"{what}: each token sees all before it. {other}.", TargetWarning)
        return tuple(shape for _, shape in sorted(probe.shapes.items()))

    @cached_property
    def eager_reason(self) -> str | None:
        """Why the forward cannot be captured in a CUDA graph, found by a trial; None if it can."""
        if self.device.type != "cuda":
            return f"the model is on {self.device}"
        if self._fused is not None:
            return None
        name = type(self.model).__name__
        if self.longrope_limit is not None:
            return f"{name} changes its rotary frequencies with the length (longrope)"
        if not all(shape.fits_kernel for shape in self.layer_shapes):
            return f"{name} has heads that the attention kernel does not take"
        rows = ForwardRows.allocate(1, 1, torch.zeros(1, dtype=torch.int32, device=self.device))
        bufs, cache = self.new_buffers(1, 1, 1, 16), KVCache.allocate(self, 1, 16)
        try:
            with torch.inference_mode(), current(self.device), side_stream() as stream:
                self.forward(rows, cache, bufs)
                with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream, capture_error_mode="thread_local"):
                    self.forward(rows, cache, bufs)
        except Exception as error:  # a model's own code may raise anything under capture
            torch.cuda.synchronize(self.device)
            return f"the forward of {name} cannot be captured: {brief(error)}"
        return None

    @property
    def has_exact_rows(self) -> bool:
        """Whether a row's bits depend on that row alone."""
        return self._fused is not None and self._fused.ops.use_kernels

    @property
    def exactness(self) -> str | None:
        """Why, and how far, tokens do not depend on the rows beside theirs; None where nothing promises it."""
        if self.has_exact_rows:
            return f"rows are exact (sums {SUMS_VERSION})"
        is_precise = self.dtype == torch.float32
        return "rows are float32, which rounds differently at ties within its last bits alone" if is_precise else None

    def new_buffers(self, places: int, nodes: int, logit_rows: int, capacity: int) -> ForwardBuffers:
        """See `Target.new_buffers`."""
        if self.device.type != "cuda":
            return ForwardBuffers()
        return ForwardBuffers.allocate(self, places, nodes, logit_rows, capacity, use_kernels=True)

    def forward(self, rows: ForwardRows, cache: KVCache, bufs: ForwardBuffers, last_row: Tensor | None = None) -> None:
        """See `Target.forward`."""
        shape = (rows.places, rows.nodes)
        positions = rows.positions.view(shape).long()
        if self.longrope_limit is not None:
            # Nodes that can no longer be kept must not change the frequencies of those that can.
            positions = positions.clamp(max=self.longrope_limit - 1)
        context = CacheContext(rows, cache, bufs, last_row)
        logits, features = self._run(rows.tokens.view(shape).long(), positions, context, last_row)
        logits, features = logits.flatten(0, 1), features.flatten(0, 1)
        if bufs.is_dynamic:
            bufs.logits, bufs.features = logits, features
        else:
            bufs.logits.copy_(logits)
            bufs.features.copy_(features)

    def _run(
        self, token_ids: Tensor, positions: Tensor, context: CacheContext | ShapeProbe, last_row: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Run tokens int64 [places, nodes]: logits [places, nodes or rows, vocab], features [places, nodes, width]."""
        assert self._copy is not None, "the fused forward runs"
        name, taps = type(self.model).__name__, self._copy.taps
        taps.clear()
        with torch.inference_mode():
            output = self._copy.model(
                input_ids=token_ids,
                position_ids=positions,
                past_key_values=_ContextCache(context, self.text_config),
                use_cache=True,
                # By index: a number lets some models leave out the other positions' hidden states as well.
                logits_to_keep=0 if last_row is None else last_row,
                **{attention.CONTEXT_ARGUMENT: context},
            )
        for place, layer in enumerate(self.tap_layers or ()):
            if place not in taps:
                raise UnsupportedModelError(
                    f"{name} leaves out decoder layer {layer} in a forward over text, and the head reads its input."
                )
        expected = [*token_ids.shape, self.hidden_size]
        if other := [list(tap.shape) for tap in taps.values() if list(tap.shape) != expected]:
            raise UnsupportedModelError(
                f"{name} hands hidden states of shape {other[0]} from layer to layer, where a head reads {expected}."
            )
        features = torch.cat([taps[place] for place in sorted(taps)], -1)
        taps.clear()
        return output.logits.to(self.dtype), features.to(self.dtype)

    def _record_features(self, copy: SharedCopy) -> None:
        """Register hooks that record each forward's features in the copy's ``taps``, by index into ``tap_layers``."""

        # Not the copy, which holds the hooks: a target that is let go is free at once.
        taps = copy.taps

        def keep(place: int, read: Callable[[Any, Any], Tensor]) -> Callable[..., None]:
            return lambda _module, args, given: taps.update({place: read(args, given)})

        if self.tap_layers is None:
            copy.of(self.model.get_decoder()).register_forward_hook(keep(0, _output_states))
        for place, layer in enumerate(self.tap_layers or ()):
            if layer == len(self.layers):
                copy.of(self.layers[-1]).register_forward_hook(keep(place, _output_states))
            else:
                copy.of(self.layers[layer]).register_forward_pre_hook(keep(place, _input_states), with_kwargs=True)


def _input_states(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0] if args else kwargs["hidden_states"]


def _output_states(_args: tuple[Any, ...], output: Any) -> Any:
    return output[0] if isinstance(output, tuple) else getattr(output, "last_hidden_state", output)


class _ContextCache(Cache):  # type: ignore[misc]  # transformers carries no types
    """Cache in transformers' form that hands keys and values to a forward's context."""

    def __init__(self, context: CacheContext | ShapeProbe, text_config: Any) -> None:
        super().__init__(layers=[])
        self._context = context
        # Mllama of transformers 5.5 asks of each layer whether it is empty, and leaves out those over images that are.
        self._may_ask = hasattr(text_config, "cross_attention_layers")

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return self._context.store(layer_idx, key_states, value_states)

    def get_seq_length(self, layer_idx: int | None = None) -> int:
        """Return 0: positions are given with every forward. Raises `UnsupportedModelError` for a layer that asks."""
        if layer_idx is not None and not self._may_ask:
            raise UnsupportedModelError(
                f"Decoder layer {layer_idx} computes with the length of the KV cache, which differs between sequences."
            )
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Return 0; only masks ask for it, and none is made (`attention.mark_window`)."""
        return 0


def check_supported(model: nn.Module) -> None:
    """Raise `UnsupportedModelError`, naming the class and the reason, unless the model can verify trees."""
    for problem in _problems(model):
        raise UnsupportedModelError(f"{type(model).__name__} {problem}")


def _problems(model: Any) -> Iterator[str]:
    """Say why a model cannot verify trees, as the rest of a sentence that begins with its class."""
    config: Any = getattr(model, "config", None)
    if config is None or not hasattr(model, "get_output_embeddings"):
        yield "is not a transformers model; load the target with AutoModelForCausalLM, and pass it unwrapped."
    adapters = getattr(model, "peft_config", None)
    if isinstance(adapters, dict) and any(getattr(each, "is_prompt_learning", False) for each in adapters.values()):
        yield "has an adapter that puts rows before the prompt (prompt or prefix tuning). Use one such as LoRA."
    for kind in _prompt_adapters(model):
        yield f"has an adapter that looks at the whole prompt ({kind}), which is run in parts: unload it, or use LoRA."
    # Whoever else wraps generate changes what a forward of ours does not see.
    origin = str(getattr(getattr(model, "generate", None), "__module__", None) or "transformers")
    if origin.partition(".")[0] not in ("transformers", "peft"):
        yield f"has a generate of its own ({origin}), which ours would leave out. Pass the model without it."
    devices = set((getattr(model, "hf_device_map", None) or {}).values())
    if len(devices) > 1:
        places = ", ".join(sorted(map(str, devices)))
        yield f"is spread over {places}; its KV cache lies on one device. Load the target on a single one."
    if any(weight.is_meta for weight in model.parameters()):
        yield "has weights that are not loaded, or offloaded: they are on the meta device. Load all on a single one."
    asked = (attention_name(getattr(module, "config", None)) for module in model.modules())
    for name in {each for each in asked if isinstance(each, str)}:
        if not attention.is_built_in(name):
            effect = "which verifying trees would replace by softmax attention"
            advice = "Set one of transformers' own with set_attn_implementation, such as 'sdpa'."
            yield f"attends by a function of its own ({name!r}), {effect}. {advice}"
    text = config.get_text_config()
    can = "The runtime verifies trees on decoder-only models with softmax attention and rotary positions."
    if getattr(config, "is_encoder_decoder", False):
        yield f"is an encoder-decoder model. {can}"
    if model.get_output_embeddings() is None:
        yield f"has no LM head (an encoder, or a bare decoder). {can}"
    types = set(getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or ())
    # A configuration of attention layers alone, as some Granite 4.0 models have, in a class for hybrid ones.
    attends = bool(types) and types <= _ATTENDING
    attends = attends and not any(isinstance(module, nn.Conv1d) for module in model.get_decoder().modules())
    has_marks = any(getattr(text, mark, None) is not None for mark in _RECURRENT)
    if not attends and (has_marks or is_recurrent(model)):
        yield f"keeps a recurrent state, which cannot be rolled back to an accepted path. {can}"
    if any(type(module).__module__.startswith("torch.ao.nn.quantized.dynamic") for module in model.modules()):
        yield "is quantised dynamically: logits depend on what is beside a token. Quantise its weights alone."
    if others := types - _ATTENDING:
        yield f"has layers of type {', '.join(sorted(others))}; only full and sliding attention work. {can}"
    is_alibi = getattr(text, "alibi", False) or getattr(text, "position_embedding_type", None) == "alibi"
    if is_alibi or not any(getattr(text, name, None) for name in ("rope_parameters", "rope_theta", "rotary_dim")):
        yield f"has no rotary positions. {can}"
    if any("dynamic" in str(rope.get("rope_type")) for rope in _rope_kinds(text)):
        yield "uses dynamic RoPE scaling, which changes frequencies of keys already cached; use linear, yarn, llama3."
    if not takes_attention(model):
        yield f"does not take a registered attention function in this version of transformers. {can}"


def _prompt_adapters(model: Any) -> set[str]:
    """Return the kinds of a model's active adapters that act on more than the token that a forward runs."""
    adapters, active = getattr(model, "peft_config", None), getattr(model, "active_adapters", None)
    if not isinstance(adapters, dict):
        return set()
    found = set()
    for name, adapter in adapters.items():
        kind = str(getattr(adapter, "peft_type", "")).removeprefix("PeftType.")
        # The active ones of X-LoRA are those that it mixes.
        if not isinstance(active, list) or name in active or kind == "XLORA":
            found |= {kind} & _PROMPT_ADAPTERS
            found |= {"activated LoRA"} if getattr(adapter, "alora_invocation_tokens", None) else set()
    return found


def _rope_kinds(text_config: Any) -> list[dict[str, Any]]:
    """List the rotary settings of a configuration, which may hold them by type of layer."""
    settings = [getattr(text_config, name, None) for name in ("rope_parameters", "rope_scaling")]
    found = [rope for rope in settings if isinstance(rope, dict)]
    return found + [rope for outer in found for rope in outer.values() if isinstance(rope, dict)]


def find_decoder_layers(model: nn.Module) -> nn.ModuleList:
    """Return the decoder layers: the ModuleList whose length is the configuration's number of layers."""
    count = model.config.get_text_config().num_hidden_layers  # type: ignore[union-attr, operator]
    # The decoder first: a vision tower may have as many layers.
    parts: Any = (model.get_decoder(), model.base_model)  # type: ignore[operator]
    lists = (m for part in parts for m in part.modules() if isinstance(m, nn.ModuleList))
    found = next((layers for layers in lists if len(layers) == count), None)
    if found is None:
        raise UnsupportedModelError(
            f"{type(model).__name__} has no list of {count} decoder layers to read features from."
        )
    return found
