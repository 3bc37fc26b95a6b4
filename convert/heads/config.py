"""Configuration of a draft head: every published form in, one flat Llama-style config.json out.

Reads the flat form of SafeAILab, SGLang, SpecForge and ModelOpt, the nested form of speculators, and both ways in which
transformers spells RoPE. Each change names the engine that it is for.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import MismatchError, UnsupportedHeadError
from . import names

AUX_LAYER_KEY = "eagle_aux_hidden_state_layer_ids"
_NESTED_AUX = f"eagle_config.{AUX_LAYER_KEY}"
_NAME_INPUTS = (
    AUX_LAYER_KEY,
    "aux_hidden_state_layer_ids",
    "layer_ids",
    "eagle_config.aux_hidden_state_layer_ids",
    "eagle_config.layer_ids",
    "dflash_config.layer_ids",
)
_NAME_OUTPUTS = (
    "target_layer_ids",
    "dspark_target_layer_ids",
    _NESTED_AUX,
    "eagle_config.target_layer_ids",
    "dflash_config.target_layer_ids",
)
TAP_KEYS = dict.fromkeys(_NAME_INPUTS, 0) | dict.fromkeys(_NAME_OUTPUTS, 1)
"""Keys that name the layers which a draft reads, each with the number that makes an id that of the layer's input.

Sources: vLLM 0.32.0, `v1/worker/gpu/spec_decode/eagle/eagle3_utils.py`; SGLang 0.5.23,
`model_executor/model_runner_components/spec_aux_hidden_state.py`; speculators, `models/dflash`.
"""
_LIKE_A_TAP_KEY = re.compile(r"(captur|aux|tap|hidden_state|target|verifier|feature).*layer|layer.*(captur|aux|tap)")
EMBEDDING_TRAINED_KEY = "embed_requires_grad"
QWEN3_ARCHITECTURE = "Eagle3Qwen3ForCausalLM"
"""vLLM's class of EAGLE-3 heads whose layer is Qwen3's (`model_executor/models/qwen3_eagle3.py`)."""

# Keys that must not reach the output: paths of the machine that trained the head, code references, what is flattened,
# and the EAGLE-1/2 flag `bias` that makes vLLM and SGLang build attention biases and leave them uninitialised.
_SPECULATORS_KEYS = ("speculators_config", "speculators_model_type", "speculators_version", "transformer_layer_config")
_DROPPED_KEYS = (
    "_name_or_path",
    "auto_map",
    "bias",
    "dtype",
    "torch_dtype",
    "quantization_config",
    "rope_parameters",
    *_SPECULATORS_KEYS,
)

# Words for no method of quantisation: ModelOpt's, TensorRT-LLM's and transformers'.
_NO_METHODS = ("none", "null", "", "no_quant", "float16", "bfloat16", "float32", "fp16", "bf16")
# Flags by which a DFlashDraftModel has other layers or chooses otherwise (SGLang, `speculative/dflash_utils.py`).
_OTHER_FORM_FLAGS = ("projector_type", "conv_kernel_size", "selector_rank")
TAPS_FLAG = "--tap-layers"
_FULL, _SLIDING = "full_attention", "sliding_attention"

_REQUIRED_SIZES = ("hidden_size", "num_attention_heads")
SIZES = (
    *_REQUIRED_SIZES,
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
    "draft_vocab_size",
    "target_hidden_size",
    "num_aux_hidden_states",
    "max_position_embeddings",
    "num_hidden_layers",
)

# Numbers that a scaled RoPE computes with, and those without which transformers or an engine refuses it, by type.
_LLAMA3_NUMBERS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
# Those of transformers, and vLLM's (`rotary_embedding/__init__.py`).
_SCALINGS = (
    "default",
    "linear",
    "dynamic",
    "yarn",
    "longrope",
    "llama3",
    "proportional",
    "mrope",
    "su",
    "mllama4",
    "ntk",
    "xdrope",
    "deepseek_yarn",
    "deepseek_llama_scaling",
    "openpangu",
    "telechat3-yarn",
)
_SCALING_NUMBERS = (*_LLAMA3_NUMBERS, "alpha")
_SCALING_NEEDS = {"linear": ("factor",), "yarn": ("factor",), "llama3": _LLAMA3_NUMBERS}

# Keys of targets (Granite, MiniCPM, Gemma, Cohere, Falcon-H1, DBRX, GPT-NeoX) that change what a layer computes, each
# with the value that changes nothing, as null does. Of a draft's, vLLM reads logit_scale and SGLang
# final_logit_softcapping, which change no order of tokens.
_NEUTRAL: Mapping[str, float] = {
    "scale_emb": 1, "scale_depth": 1, "embedding_multiplier": 1, "residual_multiplier": 1, "logits_scaling": 1,
    "logit_scale": 1, "lm_head_multiplier": 1, "key_multiplier": 1, "attention_in_multiplier": 1, "rotary_pct": 1,
    "attention_out_multiplier": 1, "attn_logit_softcapping": 0, "final_logit_softcapping": 0, "clip_qkv": 0, "alibi": 0,
    "parallel_attn": 0, "use_parallel_residual": 0,
}  # fmt: skip

# Flags that change the layer's computation, each with the other names that trainers give it.
_NORM_FLAGS = {
    "norm_before_residual": (),
    "norm_before_fc": (),
    "fc_norm": ("use_aux_norm",),
    "norm_output": ("return_hidden_post_norm",),
}
_FLAGS = (*_NORM_FLAGS, "use_aux_hidden_state", "tie_word_embeddings", EMBEDDING_TRAINED_KEY)


def normalise_config(source: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Flatten a head's configuration: nested speculators form, RoPE spelling, defaults made explicit.

    Vocabularies and dtype, and `attention_bias` and `mlp_bias` where no key says them, are left to `open_head`, which
    has the tensors. `norm_before_residual` is written out for the speculators form, whose default (true) differs from
    that of the flat form (false). Raises MismatchError for a key that is missing or of a wrong type.
    """
    for key in ("text_config", "transformer_layer_config"):
        if not isinstance(source.get(key), Mapping | None):
            raise _wrong(where, key, "an object or null", source[key])
    config = flattened_text(source)
    if (nested := config.get("transformer_layer_config")) is not None:
        config = {"norm_before_residual": True, **_over(nested, config, _SPECULATORS_KEYS), "model_type": "llama"}
    if not isinstance(config.get("eagle_config"), Mapping | None):
        raise _wrong(where, "eagle_config", "an object or null", config["eagle_config"])
    if config.get("model_type") == "llama4_text" and config.get("intermediate_size_mlp") is not None:
        # Llama-4 calls the width of its experts intermediate_size; a draft layer has none, and is written as Llama's.
        config["intermediate_size"] = config.pop("intermediate_size_mlp")
    _flatten_rope(config, where)
    _settle_window(config, where)
    for key in (*_FLAGS, *(name for others in _NORM_FLAGS.values() for name in others)):
        for part in (config, _part(config, "eagle_config")):
            if not isinstance(part.get(key), bool | None):
                raise _wrong(where, key, "true, false or null", part[key])  # "false" as text would count as set
    _settle_norm_flags(config)
    _drop_empty_taps(config)
    for key in _DROPPED_KEYS:
        config.pop(key, None)

    for key in SIZES:
        value = config.get(key)
        is_size = type(value) is int and 0 < value < 2**31
        if not is_size and (key in _REQUIRED_SIZES or value is not None):
            raise _wrong(where, key, "a positive integer below 2^31", value)
    heads: int = config["num_attention_heads"]
    defaults = {
        "num_key_value_heads": heads,
        "head_dim": config["hidden_size"] // heads,
        # Those of transformers' LlamaConfig.
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": config.get("qkv_bias"),
    }
    config |= {key: value for key, value in defaults.items() if config.get(key) is None}
    _check_constants(config, where)
    return config


def unread_warnings(config: Mapping[str, Any]) -> list[str]:
    """Warn of keys that change what a target's layer computes, and that engines do not read for a draft.

    Heads have them from their target, whose whole configuration NeMo Automodel copies, and are trained without: vLLM
    and SGLang build a plain Llama layer, and with them eagle-generate.
    """
    head_dim, changing = config["head_dim"], []
    own = {"attention_multiplier": head_dim**-0.5, "query_pre_attn_scalar": head_dim}
    for key, value in {**_NEUTRAL, **own, "dim_model_base": config["hidden_size"]}.items():
        found = value if config.get(key) is None else config[key]
        if not isinstance(found, int | float) or not math.isclose(found, value, rel_tol=1e-3):
            changing.append(key)
    # Of the target's layers, from which it was copied, the first counts; 0 means that it is not rotated.
    rotated = config.get("no_rope_layers")
    changing += ["no_rope_layers"] if isinstance(rotated, list) and rotated[:1] == [0] else []
    changing += ["position_embedding_type"] if config.get("position_embedding_type") in ("alibi", "nope") else []
    if not changing:
        return []
    said = ", ".join(f"{key} = {config[key]!r}" for key in changing)
    what = "engines and eagle-generate draft without this, so a head that was trained with it has fewer drafts accepted"
    return [f"{said}: {what}"]


def flattened_text(source: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten a `text_config`, where heads of multimodal targets keep their sizes; engines would read nothing else.

    Likewise a `model`, where old configurations of vLLM keep those of an EAGLE-1/2 head
    (`transformers_utils/configs/eagle.py`).
    """
    whole = source.get("model")
    if source.get("model_type") == "eagle" and isinstance(whole, Mapping):
        source = {**{key: value for key, value in source.items() if key not in ("model", "model_type")}, **whole}
    nested = source.get("text_config")
    if nested is None:
        return dict(source)
    return {**_over(nested, source, ("text_config", "vision_config")), "model_type": "llama"}


def _over(nested: Mapping[str, Any], outer: Mapping[str, Any], without: Sequence[str]) -> dict[str, Any]:
    """Put the keys of an object, but for some, over those of one inside it; null, which says nothing, gives way."""
    said = {key: value for key, value in outer.items() if key not in without and not (value is None and key in nested)}
    return {**nested, **said}


def metadata_target(source: Mapping[str, Any]) -> str | None:
    """Read the target model that a configuration names: the verifier of the speculators form; None without one."""
    name = _part(_part(source, "speculators_config"), "verifier").get("name_or_path")
    return name if isinstance(name, str) and name else None


def uses_aux_layers(config: Mapping[str, Any]) -> bool:
    """Tell whether an EAGLE-3 head reads captured layers, as all but a few do, and not the last hidden state alone."""
    return _part(config, "eagle_config").get("use_aux_hidden_state") is not False


def sliding_window(config: Mapping[str, Any]) -> int | None:
    """Read the sliding window of a normalised configuration, in tokens, the query's own included; None without one.

    As in transformers, vLLM and speculators, a key is seen if query position - key position < window.
    """
    types = config.get("layer_types")
    return config["sliding_window"] if isinstance(types, list) and types[:1] == [_SLIDING] else None


def default_taps(num_layers: int) -> tuple[int, int, int]:
    """Return the layers whose inputs every engine captures for an EAGLE-3 head that names none: 2, n // 2, n - 3."""
    return 2, num_layers // 2, num_layers - 3


def tap_layers(config: Mapping[str, Any], where: str, num_layers: int | None = None) -> tuple[int, ...] | None:
    """Read the layers whose inputs a draft takes from every key that names them (`TAP_KEYS`); None where none does.

    Under a key that names outputs of layers, [1, 17, 33] are the inputs (2, 18, 34). The list in `eagle_config` names
    outputs, SGLang's reading, but inputs where its largest id is `num_layers`, the target's number of layers, as SGLang
    has it for gpt-oss: no such layer has an output. Raises MismatchError where two keys disagree, a key that is not
    known names layers, or a list holds something else.
    """
    readings = {}
    for key, ids in _tap_lists(config).items():
        if key not in TAP_KEYS:
            raise MismatchError.at(
                where,
                f"{key}: {ids} seem to be layers of the target that the head reads, and whether their inputs or their "
                f"outputs is not known.\nName the layers whose inputs it reads with {TAPS_FLAG}.",
            )
        shift = TAP_KEYS[key]
        layers = layer_ids(ids, where, key, lowest=-shift)
        if key == _NESTED_AUX and max(layers) == num_layers:
            shift = 0
        readings[key] = tuple(layer + shift for layer in layers)
    if len(set(readings.values())) > 1:
        said = "; ".join(f"{key}: inputs of layers {list(ids)}" for key, ids in readings.items())
        ask = "Name the target, whose number of layers may tell, or say" if num_layers is None else "Say"
        raise MismatchError.at(
            where,
            f"the keys that name the layers which the head reads disagree: {said}.\n{ask} which with {TAPS_FLAG}.",
        )
    return next(iter(readings.values()), None)


def could_be_inputs(config: Mapping[str, Any]) -> int | None:
    """Return the number of target layers with which the list in `eagle_config` would name inputs; None without it."""
    ids = _part(config, "eagle_config").get(AUX_LAYER_KEY)
    return max(ids) if isinstance(ids, list) and ids and all(type(layer) is int for layer in ids) else None


def with_tap_layers(config: Mapping[str, Any], layers: tuple[int, ...]) -> dict[str, Any]:
    """Set both keys so that vLLM and SGLang capture the inputs of the same `layers`, and remove all others."""
    named = _tap_lists(config)
    kept = {key: value for key, value in config.items() if key not in named}
    nested = _part(config, "eagle_config").items()
    nested_kept = {key: value for key, value in nested if f"eagle_config.{key}" not in named}
    outputs = [layer - 1 for layer in layers]
    return {**kept, AUX_LAYER_KEY: list(layers), "eagle_config": {**nested_kept, AUX_LAYER_KEY: outputs}}


def _tap_lists(config: Mapping[str, Any]) -> dict[str, Any]:
    """Collect the values under `TAP_KEYS`, and lists of numbers under any key that looks like one, by key."""
    found = {}
    for place in ("", "eagle_config", "dflash_config"):
        for name, value in (_part(config, place) if place else config).items():
            key = f"{place}.{name}" if place else name
            is_list = isinstance(value, list) and bool(value) and all(type(each) is int for each in value)
            is_like_one = is_list and _LIKE_A_TAP_KEY.search(name.lower())
            if is_like_one or (key in TAP_KEYS and value not in (None, [])):
                found[key] = value
    return found


def _part(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return the object under a key; an empty one where it is none."""
    found = config.get(key)
    return found if isinstance(found, Mapping) else {}


def is_dflash(source: Mapping[str, Any]) -> bool:
    """Tell whether a configuration is that of a DFlash or DSpark draft of a form that is converted (`dflash.py`)."""
    form, found = source.get("speculators_model_type"), source.get("architectures")
    if form is not None:
        return form in ("dflash", "dspark")
    return isinstance(found, list) and found[:1] in (["DFlashDraftModel"], ["Qwen3DSparkModel"])


def refuse_foreign(source: Mapping[str, Any], where: str) -> None:
    """Raise UnsupportedHeadError for a configuration of another kind of draft, and for a quantised head."""
    found = source.get("architectures")
    architectures = found if isinstance(found, list) else [found]
    kind = source.get("speculators_model_type")
    said = " ".join(map(str, [*architectures, source.get("model_type"), kind])).lower().replace("_", "")
    for draft in names.OTHER_DRAFTS:
        is_converted = draft in ("dflash", "dspark") and is_dflash(source)
        if draft != "model" and draft in said and not is_converted:
            raise names.other_draft(draft, where)
    problem = None
    for key in _OTHER_FORM_FLAGS:
        if value := _part(source, "dflash_config").get(key):
            problem = f"dflash_config.{key} is {value!r}: a DFlash draft of another form.\nServe it as it is."
    if kind not in (None, "eagle3") and not is_dflash(source):
        problem = f"speculators_model_type {kind!r} is not converted.\nExpected 'eagle3'."
    for place in ("", "text_config", "transformer_layer_config", "eagle_config"):
        part = _part(source, place) if place else source
        if (method := quantisation(part.get("quantization_config"))) is not None:
            problem = (
                f"the head is quantised ({method}); its rows are not defined without their scales.\n"
                "Convert the unquantised head, then quantise the result."
            )
    if problem is not None:
        raise UnsupportedHeadError.at(where, problem)


def quantisation(config: Any) -> str | None:
    """Read the method by which a `quantization_config` quantises weights; None for one that quantises none.

    Trainers leave such ones behind: no method, no group with weights, 16 bits, or all modules left out.
    """
    if not isinstance(config, Mapping):
        return None
    if isinstance(config.get("quantization"), Mapping):
        return quantisation(config["quantization"])
    method = next((config[key] for key in ("quant_algo", "quant_method") if config.get(key)), None)
    groups, ignored = config.get("config_groups"), config.get("ignore")
    says_nothing = (
        str(method).lower() in _NO_METHODS,
        "quant_algo" in config and str(config["quant_algo"]).lower() in _NO_METHODS,
        isinstance(groups, Mapping) and not any(_part(groups, name).get("weights") for name in groups),
        any(config.get(key) in (16, 32) for key in ("bits", "w_bit")),
        method == "bitsandbytes" and not (config.get("load_in_8bit") or config.get("load_in_4bit")),
        isinstance(ignored, list) and any(pattern in ("*", ".*", "re:.*") for pattern in ignored),
    )
    return None if any(says_nothing) else str(method)


def _check_constants(config: Mapping[str, Any], where: str) -> None:
    scaling = config["rope_scaling"] or {}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if not isinstance(config["hidden_act"], str):
        raise _wrong(where, "hidden_act", "a name", config["hidden_act"])
    if kind not in _SCALINGS:
        raise _wrong(where, "rope_scaling.rope_type", f"one of {', '.join(_SCALINGS)}", kind)
    keys = ("rms_norm_eps", "rope_theta", "partial_rotary_factor")
    numbers = {key: config[key] for key in keys if config.get(key) is not None}
    needed = _SCALING_NEEDS.get(kind, ())
    numbers |= {f"rope_scaling.{key}": scaling.get(key) for key in _SCALING_NUMBERS if key in scaling or key in needed}
    for key, value in numbers.items():
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise _wrong(where, key, "a positive number", value)
    part, head_dim = config.get("partial_rotary_factor"), config["head_dim"]
    if part is not None and int(part * head_dim) not in range(2, head_dim + 1, 2):
        raise _wrong(where, "partial_rotary_factor", f"a share that is an even number of the {head_dim} values", part)


def _wrong(where: str, key: str, expected: str, found: object) -> MismatchError:
    return MismatchError.at(where, f"{key}: expected {expected}, found {found!r}.\nCorrect config.json.")


def _drop_empty_taps(config: dict[str, Any]) -> None:
    """Drop empty lists of tap layers: the default for every reader but SGLang, which would capture no layer at all."""
    for key in TAP_KEYS:
        if config.get(key) == []:
            del config[key]
    if nested := config.get("eagle_config"):
        kept = {key: value for key, value in nested.items() if value != [] or f"eagle_config.{key}" not in TAP_KEYS}
        config["eagle_config"] = kept


def _settle_norm_flags(config: dict[str, Any]) -> None:
    """Put a flag that is set under any name, at top level or in `eagle_config`, where every engine reads it.

    vLLM and SGLang read these flags at top level and know no other name; of `norm_before_fc` they believe
    `eagle_config` first, and TensorRT-LLM reads it there alone.
    """
    nested = _part(config, "eagle_config")
    for flag, others in _NORM_FLAGS.items():
        if any(config.get(name) or nested.get(name) for name in (flag, *others)):
            config[flag] = True
    if config.get("norm_before_fc"):
        config["eagle_config"] = {**nested, "norm_before_fc": True}


def _settle_window(config: dict[str, Any], where: str) -> None:
    """State whether the head's one layer has a sliding window, in the keys that vLLM and transformers read.

    `layer_types` decides, its first entry where it was copied from a target of many layers. Without it transformers
    gives Qwen a window from layer `max_window_layers` on; `sliding_window` alone gives no draft layer one anywhere.
    """
    types, window = config.get("layer_types"), config.get("sliding_window")
    if not isinstance(types, list | None):
        raise _wrong(where, "layer_types", "a list or null", types)
    if types is not None and types[:1] != [_SLIDING]:
        # What every engine computes for any other; transformers refuses a list that is longer than the layers, and vLLM
        # looks up an EAGLE-1/2 layer after the target's, where it has no entry.
        del config["layer_types"]
        if types:
            return
    if not types and not (config.get("use_sliding_window") and window and config.get("max_window_layers") == 0):
        return
    if type(window) is not int or window <= 0:
        raise _wrong(where, "sliding_window", f"a positive number of tokens, as layer_types says {_SLIDING}", window)
    if config.get("use_sliding_window") is False:
        raise _wrong(where, "use_sliding_window", f"true, as layer_types says {_SLIDING}", False)
    config |= {"layer_types": [_SLIDING], "use_sliding_window": True}


def _flatten_rope(config: dict[str, Any], where: str) -> None:
    """Spell RoPE as `rope_theta` and `rope_scaling`, null for no scaling.

    transformers 5 writes all of it into `rope_parameters`, and reads `rope_scaling` as another name of that; a base or
    a partial rotation in there overrides one at top level.
    """
    parameters, scaling = (_rope_of_the_layer(key, config, where) for key in ("rope_parameters", "rope_scaling"))
    # Of two that disagree transformers 5 takes rope_scaling, and vLLM rope_parameters.
    spelled = {("rope_type" if key == "type" else key): value for key, value in scaling.items()}
    if any(spelled.get(key, value) != value for key, value in parameters.items()):
        raise _wrong(where, "rope_scaling", f"what rope_parameters says, {dict(parameters)}", dict(scaling))
    for key in ("rope_theta", "partial_rotary_factor"):
        for rope in (parameters, scaling):
            if rope.get(key) is not None:
                config[key] = rope[key]
    rest = {key: value for key, value in (scaling or parameters).items() if key != "rope_theta" and value is not None}
    is_plain = (rest.get("rope_type") or rest.get("type") or "default") == "default"
    does_more = set(rest) - {"rope_type", "type", "partial_rotary_factor"}
    config["rope_scaling"] = rest if does_more or not is_plain else None
    if config.get("rope_theta") is None:
        config["rope_theta"] = 10000.0


def _rope_of_the_layer(key: str, config: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Read the RoPE parameters under a key: those of the head's layer where each type has its own; {} without any."""
    rope = config.get(key)
    if rope is None:
        return {}
    if not isinstance(rope, Mapping):
        raise _wrong(where, key, "an object or null", rope)
    rope = {name: value for name, value in rope.items() if value is not None}
    by_type = [value for value in rope.values() if isinstance(value, Mapping)]
    if not by_type:
        return rope
    if len(by_type) < len(rope):
        raise _wrong(where, key, "parameters of one kind of layer, or an object for each kind and nothing else", rope)
    types = config.get("layer_types")
    first = types[0] if isinstance(types, list) and types else None
    if first in rope:
        return rope[first]  # type: ignore[no-any-return]
    if first is not None or any(value != by_type[0] for value in by_type):
        raise MismatchError.at(
            where,
            f"RoPE is given for {' and '.join(rope)} layers apart, and layer_types does not name the head's layer.\n"
            "Put the right parameters into config.json as rope_theta and rope_scaling.",
        )
    return by_type[0]


def layer_ids(value: Any, where: str, key: str, lowest: int) -> tuple[int, ...]:
    """Check the layers under a key, or given with `TAPS_FLAG`: ascending from `lowest`, else MismatchError."""
    # Engines capture a layer once, on the way through the target.
    is_right = isinstance(value, list | tuple) and all(type(layer) is int for layer in value)
    if is_right and sorted(set(value)) == list(value) and all(lowest <= layer < 2**31 for layer in value):
        return tuple(value)
    advice = "" if key == TAPS_FLAG else f"\nSay which are right with {TAPS_FLAG}."
    problem = f"{key}: expected ascending layer numbers from {lowest} on, each once, found {value!r}.{advice}"
    raise MismatchError.at(where, problem)
