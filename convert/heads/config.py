"""Configuration of a draft head: every published form in, one flat Llama-style config.json out.

Reads the flat form of SafeAILab, SGLang, SpecForge and ModelOpt, the nested form of speculators, and both ways in which
transformers spells RoPE. What it changes, and which engine each change is for, is said beside the rule.
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
_INPUTS, _OUTPUTS = 0, 1
TAP_KEYS = {
    AUX_LAYER_KEY: _INPUTS,
    "aux_hidden_state_layer_ids": _INPUTS,
    "layer_ids": _INPUTS,
    "target_layer_ids": _OUTPUTS,
    "dspark_target_layer_ids": _OUTPUTS,
    _NESTED_AUX: _OUTPUTS,
    "eagle_config.aux_hidden_state_layer_ids": _INPUTS,
    "eagle_config.layer_ids": _INPUTS,
    "eagle_config.target_layer_ids": _OUTPUTS,
    "dflash_config.layer_ids": _INPUTS,
    "dflash_config.target_layer_ids": _OUTPUTS,
}
"""Keys that name the layers which a draft reads: what to add to an id for the layer whose input it is.

Sources: vLLM 0.32.0, `v1/worker/gpu/spec_decode/eagle/eagle3_utils.py`; SGLang 0.5.23,
`model_executor/model_runner_components/spec_aux_hidden_state.py`; speculators, `models/dflash`.
"""
_LIKE_A_TAP_KEY = re.compile(r"(captur|aux|tap|hidden_state|target|verifier|feature).*layer|layer.*(captur|aux|tap)")
EMBEDDING_TRAINED_KEY = "embed_requires_grad"
QWEN3_ARCHITECTURE = "Eagle3Qwen3ForCausalLM"
"""vLLM's class of EAGLE-3 heads whose layer is Qwen3's (`model_executor/models/qwen3_eagle3.py`)."""

# Keys that must not reach the output: paths of the machine that trained the head, code references, and the EAGLE-1/2
# flag `bias` that makes vLLM and SGLang build attention biases and leave them uninitialised.
_DROPPED_KEYS = ("_name_or_path", "auto_map", "bias", "dtype", "torch_dtype", "quantization_config", "rope_parameters")
_SPECULATORS_KEYS = ("speculators_config", "speculators_model_type", "speculators_version", "transformer_layer_config")

# config.json is written in this order, then the head's other keys by name.
_KEY_ORDER = (
    "architectures", "model_type", "vocab_size", "draft_vocab_size", "hidden_size", "target_hidden_size",
    "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act",
    "rms_norm_eps", "max_position_embeddings", "rope_theta", "rope_scaling", "attention_bias", "mlp_bias",
    "tie_word_embeddings", "torch_dtype", "bos_token_id", "eos_token_id", "pad_token_id",
)  # fmt: skip

# What stands for no method of quantisation: ModelOpt's, TensorRT-LLM's and transformers' words.
_NO_METHODS = ("none", "null", "", "no_quant", "float16", "bfloat16", "float32", "fp16", "bf16")
# Flags by which a DFlashDraftModel has other layers or chooses otherwise (SGLang, `speculative/dflash_utils.py`).
_OTHER_FORM_FLAGS = ("projector_type", "conv_kernel_size", "selector_rank")
_TAPS_FLAG = "--tap-layers"
_FULL, _SLIDING = "full_attention", "sliding_attention"

REQUIRED_KEYS = ("hidden_size", "num_attention_heads")
_SIZES = (
    "num_key_value_heads", "head_dim", "intermediate_size", "vocab_size", "draft_vocab_size", "target_hidden_size",
    "num_aux_hidden_states", "max_position_embeddings", "num_hidden_layers",
)  # fmt: skip
# What transformers' LlamaConfig takes where config.json says nothing.
_DEFAULTS = {"hidden_act": "silu", "rms_norm_eps": 1e-6}

# Numbers that a scaled RoPE computes with, and those without which transformers or an engine refuses it, by type.
_LLAMA3_NUMBERS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
_SCALING_NUMBERS = (*_LLAMA3_NUMBERS, "alpha")
_SCALING_NEEDS = {"linear": ("factor",), "yarn": ("factor",), "llama3": _LLAMA3_NUMBERS}

# Flags that change what the layer computes, each with the other names that trainers give it.
_NORM_FLAGS = {
    "norm_before_residual": (),
    "norm_before_fc": (),
    "fc_norm": ("use_aux_norm",),
    "norm_output": ("return_hidden_post_norm",),
}


def normalise_config(source: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Flatten a head's configuration: nested speculators form, RoPE spelling, defaults made explicit.

    What only the tensors tell (vocabularies, dtype, and `attention_bias` and `mlp_bias`, None here where no key says
    them) `open_head` adds. `norm_before_residual` is written out for the speculators form, whose default (true) differs
    from that of the flat form (false).

    Raises:
        UnsupportedHeadError: an architecture or quantisation that is not converted.
        MismatchError: a key is missing or of a wrong type.
    """
    refuse_foreign(source, where)
    config = flattened_text(source, where)
    nested = config.get("transformer_layer_config")
    if nested is not None:
        if not isinstance(nested, Mapping):
            raise _wrong(where, "transformer_layer_config", "an object", nested)
        outer = {key: value for key, value in config.items() if key not in _SPECULATORS_KEYS}
        config = {**nested, **outer}
        config.setdefault("norm_before_residual", True)
        config["model_type"] = "llama"
    if config.get("model_type") == "llama4_text" and config.get("intermediate_size_mlp") is not None:
        # Llama-4 calls the width of its experts intermediate_size; a draft layer has none, and is written as Llama's.
        config["intermediate_size"] = config.pop("intermediate_size_mlp")
    if not isinstance(config.get("eagle_config"), Mapping | None):
        raise _wrong(where, "eagle_config", "an object or null", config["eagle_config"])
    _flatten_rope(config, where)
    _settle_window(config, where)
    _settle_norm_flags(config)
    _drop_empty_taps(config)
    for key in (*_DROPPED_KEYS, *_SPECULATORS_KEYS):
        config.pop(key, None)

    for key in (*REQUIRED_KEYS, *_SIZES):
        value = config.get(key)
        is_size = type(value) is int and 0 < value < 2**31
        if not is_size and (key in REQUIRED_KEYS or value is not None):
            raise _wrong(where, key, "a positive integer below 2^31", value)
    heads: int = config["num_attention_heads"]
    if config.get("num_key_value_heads") is None:
        config["num_key_value_heads"] = heads
    if config.get("head_dim") is None:
        config["head_dim"] = config["hidden_size"] // heads
    config |= {key: value for key, value in _DEFAULTS.items() if config.get(key) is None}
    _check_constants(config, where)
    if config.get("attention_bias") is None:
        config["attention_bias"] = config.get("qkv_bias")
    return config


def flattened_text(source: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The configuration without a `text_config`, where heads of multimodal targets keep their sizes.

    Engines would take that for the whole configuration, and miss what stands beside it. Nor with a `model`, where old
    configurations of vLLM have all of an EAGLE-1/2 head's (`transformers_utils/configs/eagle.py`).
    """
    whole = source.get("model")
    if source.get("model_type") == "eagle" and isinstance(whole, Mapping):
        source = {**{key: value for key, value in source.items() if key not in ("model", "model_type")}, **whole}
    nested = source.get("text_config")
    if not isinstance(nested, Mapping | None):
        raise _wrong(where, "text_config", "an object or null", nested)
    if nested is None:
        return dict(source)
    outer = {key: value for key, value in source.items() if key not in ("text_config", "vision_config")}
    return {**nested, **outer, "model_type": "llama"}


def ordered_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The same configuration with its keys in the order of the format."""
    first = {key: config[key] for key in _KEY_ORDER if key in config}
    return {**first, **{key: config[key] for key in sorted(config) if key not in first}}


def metadata_target(source: Mapping[str, Any]) -> str | None:
    """The target model that a head's own configuration names (the verifier of the speculators form), if any."""
    verifier = source.get("speculators_config")
    verifier = verifier.get("verifier") if isinstance(verifier, Mapping) else None
    name = verifier.get("name_or_path") if isinstance(verifier, Mapping) else None
    return name if isinstance(name, str) and name else None


def uses_aux_layers(config: Mapping[str, Any]) -> bool:
    """False for the rare EAGLE-3 head that reads only the target's last hidden state (`use_aux_hidden_state` false)."""
    nested = config.get("eagle_config")
    return not (isinstance(nested, Mapping) and nested.get("use_aux_hidden_state") is False)


def says_qwen3(source: Mapping[str, Any]) -> bool:
    """Whether a head's own configuration, flat or nested, has an EAGLE-3 layer with Qwen3's norms of q and k.

    What vLLM goes by: the class, or in speculators' form the model type (`transformers_utils/configs/speculators`).
    """
    nested, found = source.get("transformer_layer_config"), source.get("architectures")
    is_named = isinstance(found, list) and found[:1] == [QWEN3_ARCHITECTURE]
    return is_named or (isinstance(nested, Mapping) and nested.get("model_type") == "qwen3")


def sliding_window(config: Mapping[str, Any]) -> int | None:
    """Tokens that the layer attends to, its own included, by a normalised configuration; None for all before it.

    Counted as by transformers, vLLM and speculators: a key is seen if query position - key position < window.
    """
    types = config.get("layer_types")
    return config["sliding_window"] if isinstance(types, list) and types[:1] == [_SLIDING] else None


def default_taps(num_layers: int) -> tuple[int, int, int]:
    """The layers whose inputs every engine captures for an EAGLE-3 head that names none: 2, n // 2, n - 3."""
    return 2, num_layers // 2, num_layers - 3


def tap_layers(config: Mapping[str, Any], where: str, num_layers: int | None = None) -> tuple[int, ...] | None:
    """Work out which layers' inputs a draft reads, from every key that names them (`TAP_KEYS`).

    Under a key that names outputs of layers, [1, 17, 33] are the inputs (2, 18, 34). The list in `eagle_config` names
    outputs, SGLang's reading, but inputs where its largest id is `num_layers`, the target's number of layers, as SGLang
    has it for gpt-oss: no such layer has an output. None means that the configuration names no layers.

    Raises:
        MismatchError: two keys disagree, a key that is not known names layers, or a list holds something else.
    """
    found = _tap_lists(config, where)
    if unknown := [key for key in found if key not in TAP_KEYS]:
        raise MismatchError.at(
            where,
            f"{unknown[0]}: {found[unknown[0]]} seem to be layers of the target that the head reads, and whether their "
            f"inputs or their outputs is not known.\nName the layers whose inputs it reads with {_TAPS_FLAG}.",
        )
    readings = {}
    for key, ids in found.items():
        shift = TAP_KEYS[key]
        if key == _NESTED_AUX and num_layers is not None and max(ids) == num_layers:
            shift = 0
        readings[key] = tuple(layer + shift for layer in ids)
    if len(set(readings.values())) > 1:
        said = "; ".join(f"{key}: inputs of layers {list(ids)}" for key, ids in readings.items())
        ask = "Name the target, whose number of layers may tell, or say" if num_layers is None else "Say"
        problem = (
            f"the keys that name the layers which the head reads disagree: {said}.\n{ask} which with {_TAPS_FLAG}."
        )
        raise MismatchError.at(where, problem)
    return next(iter(readings.values()), None)


def could_be_inputs(config: Mapping[str, Any]) -> int | None:
    """The number of layers of a target with which the list in `eagle_config` would name inputs; None without it."""
    nested = config.get("eagle_config")
    ids = nested.get(AUX_LAYER_KEY) if isinstance(nested, Mapping) else None
    return max(ids) if isinstance(ids, list) and ids and all(type(layer) is int for layer in ids) else None


def with_tap_layers(config: Mapping[str, Any], layers: tuple[int, ...]) -> dict[str, Any]:
    """The configuration with both keys set so that vLLM and SGLang capture the inputs of the same `layers`.

    Other keys that name layers go, so that none disagrees.
    """
    named = _tap_lists(config, "config.json", is_checked=False)
    kept = {key: value for key, value in config.items() if key not in named}
    nested = {
        key: value for key, value in (config.get("eagle_config") or {}).items() if f"eagle_config.{key}" not in named
    }
    nested[AUX_LAYER_KEY] = [layer - 1 for layer in layers]
    return {**kept, AUX_LAYER_KEY: list(layers), "eagle_config": nested}


def given_tap_layers(given: Sequence[int], where: str) -> tuple[int, ...]:
    """Check what `--tap-layers` gave: ascending numbers of layers. Raises MismatchError."""
    return _layer_ids(list(given), where, _TAPS_FLAG, lowest=0)


def _tap_lists(config: Mapping[str, Any], where: str, *, is_checked: bool = True) -> dict[str, Any]:
    """The lists of layers that a configuration names, by their keys: `TAP_KEYS`, and any that look like one."""
    found = {}
    for place in ("", "eagle_config", "dflash_config"):
        part = config.get(place) if place else config
        for name, value in part.items() if isinstance(part, Mapping) else ():
            key = f"{place}.{name}" if place else name
            is_like_one = isinstance(value, list) and bool(value) and all(type(each) is int for each in value)
            if key in TAP_KEYS and value not in (None, []):
                found[key] = _layer_ids(value, where, key, lowest=-TAP_KEYS[key]) if is_checked else value
            elif key not in TAP_KEYS and is_like_one and _LIKE_A_TAP_KEY.search(name.lower()):
                found[key] = value
    return found


def is_dflash(source: Mapping[str, Any]) -> bool:
    """Whether a configuration is that of a DFlash or DSpark draft of a form that is converted (`dflash.py`)."""
    form, found = source.get("speculators_model_type"), source.get("architectures")
    if form is not None:
        return form in ("dflash", "dspark")
    return isinstance(found, list) and found[:1] in (["DFlashDraftModel"], ["Qwen3DSparkModel"])


def refuse_foreign(source: Mapping[str, Any], where: str) -> None:
    """Raise UnsupportedHeadError for a configuration of another kind of draft, and for a quantised head."""
    architectures = source.get("architectures")
    kind = source.get("speculators_model_type")
    said = [*(architectures if isinstance(architectures, list) else []), source.get("model_type"), kind]
    for draft in names.OTHER_DRAFTS:
        if draft in ("dflash", "dspark") and is_dflash(source):
            continue
        if draft != "model" and any(draft in str(name).lower() for name in said):
            named = next((name for name in (kind, *said) if isinstance(name, str)), None)
            raise names.other_draft(draft, where, None if named == source.get("model_type") else named)
    own = source.get("dflash_config")
    flags = {key: own[key] for key in _OTHER_FORM_FLAGS if own.get(key)} if isinstance(own, Mapping) else {}
    for key, value in flags.items():
        raise UnsupportedHeadError.at(
            where,
            f"dflash_config.{key} is {value!r}: a DFlash draft of another form, which is not converted.\n"
            "Serve it as it is, in an engine that reads this flag.",
        )
    for name in map(str, architectures if isinstance(architectures, list) else [architectures]):
        if "deepseek" in name.lower() or "MLA" in name:
            raise UnsupportedHeadError.at(
                where,
                f"architecture {name} is an MLA head, which is not converted.\nExpected a Llama-style EAGLE head.",
            )
    if kind not in (None, "eagle3") and not is_dflash(source):
        raise UnsupportedHeadError.at(where, f"speculators_model_type {kind!r} is not converted; expected 'eagle3'.")
    for place in ("", "text_config", "transformer_layer_config", "eagle_config"):
        part = source.get(place) if place else source
        method = quantisation(part.get("quantization_config")) if isinstance(part, Mapping) else None
        if method is not None:
            raise UnsupportedHeadError.at(
                where,
                f"the head is quantised ({method}); its rows are not defined without their scales.\n"
                "Convert the unquantised head, then quantise the result.",
            )


def quantisation(config: Any) -> str | None:
    """The method by which a `quantization_config` quantises weights; None for one that quantises none.

    Trainers copy the target's or leave what says nothing: no method, no group with weights, 16 bits, all left out.
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
        isinstance(groups, Mapping)
        and not any(isinstance(each, Mapping) and each.get("weights") for each in groups.values()),
        any(config.get(key) in (16, 32) for key in ("bits", "w_bit")),
        method == "bitsandbytes" and not (config.get("load_in_8bit") or config.get("load_in_4bit")),
        isinstance(ignored, list) and any(pattern in ("*", ".*", "re:.*") for pattern in ignored),
    )
    return None if any(says_nothing) else str(method)


def _check_constants(config: Mapping[str, Any], where: str) -> None:
    numbers = {key: config[key] for key in ("rms_norm_eps", "rope_theta")}
    scaling = config["rope_scaling"] or {}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if not isinstance(kind, str):
        raise _wrong(where, "rope_scaling.rope_type", "a name, such as 'linear'", kind)
    needed = _SCALING_NEEDS.get(kind, ())
    numbers |= {f"rope_scaling.{key}": scaling.get(key) for key in _SCALING_NUMBERS if key in scaling or key in needed}
    for key, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise _wrong(where, key, "a positive number", value)
    part = config.get("partial_rotary_factor")
    if part is not None and (isinstance(part, bool) or not isinstance(part, int | float) or not 0 < part <= 1):
        raise _wrong(where, "partial_rotary_factor", "a share above 0 and at most 1", part)
    if not isinstance(config["hidden_act"], str):
        raise _wrong(where, "hidden_act", "a name, such as 'silu'", config["hidden_act"])


def _wrong(where: str, key: str, expected: str, found: object) -> MismatchError:
    return MismatchError.at(where, f"{key}: expected {expected}, found {found!r}.\nCorrect config.json.")


def _drop_empty_taps(config: dict[str, Any]) -> None:
    """An empty list of tap layers means the default to every reader but SGLang, which would capture no layer at all."""
    nested = config.get("eagle_config")
    if isinstance(nested, Mapping):
        kept = {key: value for key, value in nested.items() if value != [] or f"eagle_config.{key}" not in TAP_KEYS}
        config["eagle_config"] = kept
    for key in TAP_KEYS:
        if config.get(key) == []:
            del config[key]


def _settle_norm_flags(config: dict[str, Any]) -> None:
    """Put a flag that is set under any name, at top level or in `eagle_config`, where every engine reads it.

    vLLM and SGLang read these flags at top level and know no other name; of `norm_before_fc` they believe
    `eagle_config` first, and TensorRT-LLM reads it there alone.
    """
    nested = config.get("eagle_config")
    nested = nested if isinstance(nested, Mapping) else {}
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
    types = config.get("layer_types")
    window = config.get("sliding_window")
    if not isinstance(types, list | None):
        raise _wrong(where, "layer_types", "a list or null", types)
    if isinstance(types, list) and types[:1] in ([], [_FULL]):
        # The default; vLLM looks up an EAGLE-1/2 layer after the target's, where a list has no entry.
        del config["layer_types"]
    if types:
        if types[:1] != [_SLIDING]:
            return
    elif not (config.get("use_sliding_window") and window and config.get("max_window_layers") == 0):
        return
    if type(window) is not int or window <= 0:
        raise _wrong(where, "sliding_window", f"a positive number of tokens, as layer_types says {_SLIDING}", window)
    if config.get("use_sliding_window") is False:
        raise MismatchError.at(
            where, f"layer_types says {_SLIDING}, use_sliding_window is false.\nCorrect the wrong one in config.json."
        )
    config["layer_types"] = [_SLIDING]
    config["use_sliding_window"] = True


def _flatten_rope(config: dict[str, Any], where: str) -> None:
    """Spell RoPE as `rope_theta` and `rope_scaling`, null for no scaling.

    transformers 5 writes all of it into `rope_parameters`, and reads `rope_scaling` as another name of that; a base or
    a partial rotation in there overrides one at top level.
    """
    parameters, scaling = (_rope_of_the_layer(key, config, where) for key in ("rope_parameters", "rope_scaling"))
    for key in ("rope_theta", "partial_rotary_factor"):
        for rope in (scaling, parameters):
            if rope.get(key) is not None:
                config[key] = rope[key]
                break
    rest = {key: value for key, value in (scaling or parameters).items() if key != "rope_theta" and value is not None}
    is_plain = (rest.get("rope_type") or rest.get("type") or "default") == "default"
    does_more = set(rest) - {"rope_type", "type", "partial_rotary_factor"}
    config["rope_scaling"] = rest if does_more or not is_plain else None
    if config.get("rope_theta") is None:
        config["rope_theta"] = 10000.0


def _rope_of_the_layer(key: str, config: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """The parameters under a key for the head's one layer, where they stand apart for each type of it; {} for none."""
    rope = config.get(key)
    if rope is None:
        return {}
    if not isinstance(rope, Mapping):
        raise _wrong(where, key, "an object or null", rope)
    by_type = {name: value for name, value in rope.items() if isinstance(value, Mapping)}
    if not by_type or len(by_type) < len(rope):
        return rope
    types = config.get("layer_types")
    first = types[0] if isinstance(types, list) and types else None
    if first in by_type:
        return by_type[first]
    values = list(by_type.values())
    if any(value != values[0] for value in values):
        raise MismatchError.at(
            where,
            f"RoPE is given for {' and '.join(by_type)} layers apart, and layer_types does not say which the "
            "head's layer is.\nPut the right parameters into config.json as rope_theta and rope_scaling.",
        )
    return values[0]


def _layer_ids(value: Any, where: str, key: str, lowest: int) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(layer) is int and lowest <= layer < 2**31 for layer in value):
        expected = f"a list of layer numbers from {lowest} on"
    elif sorted(set(value)) != value:
        # Engines capture a layer once, on the way through the target.
        expected = "ascending layer numbers, each once"
    else:
        return tuple(value)
    advice = "" if key == _TAPS_FLAG else f"\nSay which are right with {_TAPS_FLAG}."
    problem = f"{key}: expected {expected}, found {value!r}.{advice}"
    raise MismatchError.at(where, problem)
