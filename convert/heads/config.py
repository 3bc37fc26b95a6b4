"""Configuration of a draft head: every published form in, one flat Llama-style config.json out.

Reads the flat form of SafeAILab, SGLang, SpecForge and ModelOpt, and the nested form of speculators; of RoPE both
spellings of transformers. Each change names the engine that it is for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from .. import names
from ..errors import MismatchError, UnsupportedHeadError
from .taps import drop_empty_taps, section

EMBEDDING_TRAINED_KEY = "embed_requires_grad"
QWEN3_ARCHITECTURE = "Eagle3Qwen3ForCausalLM"
"""vLLM's class of EAGLE-3 heads whose layer is Qwen3's (`model_executor/models/qwen3_eagle3.py`)."""

# Keys that must not reach the output: paths of the machine that trained the head, code references, what is flattened,
# and the EAGLE-1/2 flag `bias` that makes vLLM and SGLang build attention biases and leave them uninitialised.
_SPECULATORS_KEYS = ("speculators_config", "speculators_model_type", "speculators_version", "transformer_layer_config")
_DROPPED_KEYS = ("_name_or_path", "auto_map", "bias", "dtype", "torch_dtype", "quantization_config", "rope_parameters")

# The token of places that are drafted in parallel (vLLM, `v1/spec_decode/llm_base_proposer.py`).
_PARALLEL_TOKENS = ("ptd_token_id", "pard_token")
# Flags by which a DFlashDraftModel has other layers or chooses otherwise (SGLang, `speculative/dflash_utils.py`).
_OTHER_FORM_FLAGS = ("projector_type", "conv_kernel_size", "selector_rank")
_REQUIRED_SIZES = ("hidden_size", "num_attention_heads")
_WIDTHS = ("num_key_value_heads", "head_dim", "intermediate_size", "vocab_size", "draft_vocab_size")
_COUNTS = ("target_hidden_size", "num_aux_hidden_states", "max_position_embeddings", "num_hidden_layers")
SIZES = (*_REQUIRED_SIZES, *_WIDTHS, *_COUNTS, "draft_window_size")

# Keys of targets (Granite, MiniCPM, Gemma, Cohere, Falcon-H1, DBRX, GPT-NeoX, gpt-oss) that change what a layer
# computes, each with the value that changes nothing, as null does. Of a draft's, vLLM reads logit_scale and SGLang
# final_logit_softcapping, which change no order of tokens.
_SCALES = ("scale_emb", "scale_depth", "embedding_multiplier", "residual_multiplier", "logits_scaling", "logit_scale")
_FACTORS = ("lm_head_multiplier", "key_multiplier", "attention_in_multiplier", "rotary_pct", "attention_out_multiplier")
_CAPS = ("attn_logit_softcapping", "final_logit_softcapping", "swiglu_limit", "clip_qkv", "alibi")
_SWITCHES = ("parallel_attn", "use_parallel_residual")
_NEUTRAL = {**dict.fromkeys((*_SCALES, *_FACTORS), 1.0), **dict.fromkeys((*_CAPS, *_SWITCHES), 0.0)}

# Flags that change the layer's computation, and other names that trainers give two of them.
_NORM_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
_SYNONYMS = {"use_aux_norm": "fc_norm", "return_hidden_post_norm": "norm_output"}
_FLAGS = (*_NORM_FLAGS, *_SYNONYMS, "use_aux_hidden_state", "tie_word_embeddings", EMBEDDING_TRAINED_KEY)

# Those of transformers, and vLLM's of one model each (`rotary_embedding/__init__.py`).
_COMMON = ("default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional", "mrope", "su", "ntk")
_SCALINGS = (*_COMMON, "mllama4", "xdrope", "deepseek_yarn", "deepseek_llama_scaling", "openpangu", "telechat3-yarn")
# Numbers that a scaled RoPE computes with, and those without which transformers or an engine refuses it, by type.
_LLAMA3_NUMBERS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
_NUMBERS = (*_LLAMA3_NUMBERS, "alpha")
_AT_TOP = ("rope_theta", "partial_rotary_factor")
_NEEDED = {"linear": ("factor",), "yarn": ("factor",), "llama3": _LLAMA3_NUMBERS}

_SLIDING = "sliding_attention"
# Words for no method: ModelOpt's, TensorRT-LLM's and transformers'.
_NO_METHODS = ("none", "null", "", "no_quant", "float16", "bfloat16", "float32", "fp16", "bf16")


def normalise_config(source: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Flatten a head's configuration: nested speculators form, RoPE spelling, defaults made explicit.

    Vocabularies and dtype, and `attention_bias` and `mlp_bias` where no key says them, are left to `open_head`, which
    has the tensors. `norm_before_residual` is written out for the speculators form, whose default (true) differs from
    that of the flat form (false). Raises MismatchError for a key that is missing or of a wrong type.
    """
    _check_objects(source, where, "text_config", "transformer_layer_config")
    config = flattened_text(source)
    if (nested := config.get("transformer_layer_config")) is not None:
        config = {"norm_before_residual": True, **_over(nested, config, _SPECULATORS_KEYS), "model_type": "llama"}
    _check_objects(config, where, "eagle_config", "rope_parameters", "rope_scaling")
    if config.get("model_type") == "llama4_text" and config.get("intermediate_size_mlp") is not None:
        # Llama-4 calls the width of its experts intermediate_size; a draft layer has none, and is written as Llama's.
        config["intermediate_size"] = config.pop("intermediate_size_mlp")
    flatten_rope(config, where)
    settle_window(config, where)
    for key in _FLAGS:
        # "false" as text would count as set.
        for flag in (section(config, place).get(key) for place in ("", "eagle_config")):
            if not isinstance(flag, bool | None):
                raise MismatchError.of_key(where, key, "true, false or null", flag)
    # vLLM and SGLang read these flags at top level and know no other name; of norm_before_fc they believe eagle_config
    # first, and TensorRT-LLM reads it there alone.
    eagle_config = section(config, "eagle_config")
    for name in (*_NORM_FLAGS, *_SYNONYMS):
        if config.get(name) or eagle_config.get(name):
            config[_SYNONYMS.get(name, name)] = True
    if config.get("norm_before_fc"):
        config["eagle_config"] = {**eagle_config, "norm_before_fc": True}
    drop_empty_taps(config)
    for key in (*_DROPPED_KEYS, *_SPECULATORS_KEYS):
        config.pop(key, None)

    for key in SIZES:
        value = config.get(key)
        is_size = type(value) is int and 0 < value < 2**31
        if not is_size and (key in _REQUIRED_SIZES or value is not None):
            raise MismatchError.of_key(where, key, "a positive integer below 2^31", value)
    defaults = {
        "num_key_value_heads": config["num_attention_heads"],
        "head_dim": config["hidden_size"] // config["num_attention_heads"],
        # Those of transformers' LlamaConfig.
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": config.get("qkv_bias"),
    }
    config |= {key: value for key, value in defaults.items() if config.get(key) is None}
    if not isinstance(config["hidden_act"], str):
        raise MismatchError.of_key(where, "hidden_act", "a name", config["hidden_act"])
    check_positive({"rms_norm_eps": config["rms_norm_eps"]}, where)
    check_rope(config, where)
    return config


def _check_objects(config: Mapping[str, Any], where: str, *keys: str) -> None:
    for key in keys:
        if not isinstance(config.get(key), Mapping | None):
            raise MismatchError.of_key(where, key, "an object or null", config[key])


def unread_warnings(config: Mapping[str, Any]) -> list[str]:
    """Warn of keys that change what a target's layer computes, and that engines do not read for a draft.

    Heads have them from their target, whose whole configuration NeMo Automodel copies, and are trained without: vLLM
    and SGLang build a plain Llama layer, and with them eagle-generate.
    """
    head_dim, changing = config["head_dim"], []
    by_size = {"attention_multiplier": head_dim**-0.5, "query_pre_attn_scalar": head_dim}
    for key, neutral in {**_NEUTRAL, **by_size, "dim_model_base": config["hidden_size"]}.items():
        value = neutral if config.get(key) is None else config[key]
        is_number = isinstance(value, int | float) and not abs(value) > 1e300
        if not is_number or not math.isclose(value, neutral, rel_tol=1e-3):
            changing.append(key)
    # Of the target's layers, from which it was copied, the first counts; 0 means that it is not rotated.
    rotated = config.get("no_rope_layers")
    changing += ["no_rope_layers"] if isinstance(rotated, list) and rotated[:1] == [0] else []
    changing += ["position_embedding_type"] if config.get("position_embedding_type") in ("alibi", "nope") else []
    settings = ", ".join(f"{key} = {config[key]!r}" for key in changing)
    what = "engines and eagle-generate draft without this, so a head that was trained with it has fewer drafts accepted"
    return [f"{settings}: {what}"] if changing else []


def flattened_text(source: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten a `text_config`, where heads of multimodal targets keep their sizes; engines would read nothing else.

    Likewise a `model`, of vLLM's old configurations of EAGLE-1/2 heads (`transformers_utils/configs/eagle.py`).
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
    kept = {key: value for key, value in outer.items() if key not in without and not (value is None and key in nested)}
    return {**nested, **kept}


def metadata_target(source: Mapping[str, Any]) -> str | None:
    """Read the target model that a configuration names: the verifier of the speculators form; None without one."""
    name = section(section(source, "speculators_config"), "verifier").get("name_or_path")
    return name if isinstance(name, str) and name else None


def says_dflash(source: Mapping[str, Any]) -> bool:
    """Tell whether a configuration is that of a DFlash or DSpark draft of a form that is converted (`dflash.py`)."""
    form, architectures = source.get("speculators_model_type"), source.get("architectures")
    if form is not None:
        return form in ("dflash", "dspark")
    return isinstance(architectures, list) and architectures[:1] in (["DFlashDraftModel"], ["Qwen3DSparkModel"])


def refuse_foreign(source: Mapping[str, Any], where: str) -> None:
    """Raise UnsupportedHeadError for a configuration of another kind of draft, and for a quantised head."""
    found = source.get("architectures")
    architectures = found if isinstance(found, list) else [found]
    kind = source.get("speculators_model_type")
    words = " ".join(map(str, [*architectures, source.get("model_type"), kind])).lower().replace("_", "")
    for draft in names.OTHER_DRAFTS:
        is_converted = draft in ("dflash", "dspark") and says_dflash(source)
        if draft != "model" and draft in words and not is_converted:
            raise names.other_draft(draft, where)
    if not says_dflash(source) and any(source.get(key) is not None for key in _PARALLEL_TOKENS):
        raise names.other_draft("peagle", where)
    problem = None
    for key in _OTHER_FORM_FLAGS:
        if value := section(source, "dflash_config").get(key):
            problem = f"dflash_config.{key} is {value!r}: a DFlash draft of another form.\nServe it as it is."
    if kind not in (None, "eagle3") and not says_dflash(source):
        problem = f"speculators_model_type {kind!r} is not converted.\nExpected 'eagle3'."
    for place in ("", "text_config", "transformer_layer_config", "eagle_config"):
        if (method := quantisation(section(source, place).get("quantization_config"))) is not None:
            problem = f"the head is quantised ({method}); its rows are not defined without their scales.\n"
            problem += "Convert the unquantised head, then quantise the result."
    if problem is not None:
        raise UnsupportedHeadError.at(where, problem)


def flatten_rope(config: dict[str, Any], where: str) -> None:
    """Spell RoPE as `rope_theta` and `rope_scaling`, null for no scaling.

    transformers 5 writes all of it into `rope_parameters`, and reads `rope_scaling` as another name of that; a base or
    a partial rotation in there overrides one at top level. Raises MismatchError where the two disagree.
    """
    parameters, scaling = (_of_the_layer(key, config, where) for key in ("rope_parameters", "rope_scaling"))
    # Of two that disagree transformers 5 takes rope_scaling, and vLLM rope_parameters.
    spelled = {("rope_type" if key == "type" else key): value for key, value in scaling.items()}
    if any(spelled.get(key, value) != value for key, value in parameters.items()):
        expected = f"what rope_parameters says, {dict(parameters)}"
        raise MismatchError.of_key(where, "rope_scaling", expected, dict(scaling))
    both = {**parameters, **scaling}
    config |= {key: both[key] for key in _AT_TOP if key in both}
    rest = {key: value for key, value in (scaling or parameters).items() if key != "rope_theta"}
    does_more = set(rest) - {"rope_type", "type", "partial_rotary_factor"}
    config["rope_scaling"] = rest if does_more or kind_of(rest) != "default" else None
    if config.get("rope_theta") is None:
        config["rope_theta"] = 10000.0


def check_rope(config: Mapping[str, Any], where: str) -> None:
    """Raise MismatchError for a flattened RoPE of an unknown type, or numbers that no rotation is computed with."""
    scaling, head_dim, part = config["rope_scaling"] or {}, config["head_dim"], config.get("partial_rotary_factor")
    kind = kind_of(scaling)
    if kind not in _SCALINGS:
        raise MismatchError.of_key(where, "rope_scaling.rope_type", f"one of {', '.join(_SCALINGS)}", kind)
    keys = [key for key in _NUMBERS if key in scaling or key in _NEEDED.get(kind, ())]
    check_positive({key: config[key] for key in _AT_TOP if config.get(key) is not None}, where)
    check_positive({f"rope_scaling.{key}": scaling.get(key) for key in keys}, where)
    if part is not None and int(part * head_dim) not in range(2, head_dim + 1, 2):
        expected = f"a share that is an even number of the {head_dim} values"
        raise MismatchError.of_key(where, "partial_rotary_factor", expected, part)


def check_positive(numbers: Mapping[str, Any], where: str) -> None:
    """Raise MismatchError unless each value is a positive finite number."""
    for key, value in numbers.items():
        if type(value) not in (int, float) or not 0 < value < 1e300:
            raise MismatchError.of_key(where, key, "a positive number", value)


def kind_of(scaling: Mapping[str, Any]) -> str:
    """Return the type of a RoPE scaling, under either of its keys; "default" for none."""
    return scaling.get("rope_type") or scaling.get("type") or "default"


def _of_the_layer(key: str, config: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Read the RoPE parameters under a key: those of the head's layer where each type has its own; {} without any."""
    rope = _without_null(config.get(key) or {})
    by_type = [value for value in rope.values() if isinstance(value, Mapping)]
    if not by_type:
        return rope
    if len(by_type) < len(rope):
        expected = "parameters of one kind of layer, or an object for each kind and nothing else"
        raise MismatchError.of_key(where, key, expected, rope)
    types = config.get("layer_types")
    first = types[0] if isinstance(types, list) and types else None
    if first in rope:
        return _without_null(rope[first])
    if first is not None or any(value != by_type[0] for value in by_type):
        problem = f"RoPE is given for {' and '.join(rope)} layers apart, and layer_types does not name the head's layer"
        advice = "Put the right parameters into config.json as rope_theta and rope_scaling."
        raise MismatchError.at(where, f"{problem}.\n{advice}")
    return _without_null(by_type[0])


def _without_null(rope: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in rope.items() if value is not None}


def settle_window(config: dict[str, Any], where: str) -> None:
    """State whether the head's one layer has a sliding window, in the keys that vLLM and transformers read.

    `layer_types` decides, its first entry where it was copied from a target of many layers. Without it transformers
    gives Qwen a window from layer `max_window_layers` on; `sliding_window` alone gives no draft layer one anywhere.
    Raises MismatchError for keys of a wrong type, or that contradict each other.
    """
    types, window = config.get("layer_types"), config.get("sliding_window")
    if not isinstance(types, list | None):
        raise MismatchError.of_key(where, "layer_types", "a list or null", types)
    if types is not None and types[:1] != [_SLIDING]:
        # What every engine computes for any other; transformers refuses a list that is longer than the layers, and vLLM
        # looks up an EAGLE-1/2 layer after the target's, where it has no entry.
        del config["layer_types"]
        if types:
            return
    if not types and not (config.get("use_sliding_window") and window and config.get("max_window_layers") == 0):
        return
    why = f"as layer_types says {_SLIDING}"
    if type(window) is not int or window <= 0:
        raise MismatchError.of_key(where, "sliding_window", f"a positive number of tokens, {why}", window)
    if config.get("use_sliding_window") is False:
        raise MismatchError.of_key(where, "use_sliding_window", f"true, {why}", False)
    config |= {"layer_types": [_SLIDING], "use_sliding_window": True}


def sliding_window(config: Mapping[str, Any]) -> int | None:
    """Read the sliding window of a normalised configuration, in tokens, the query's own included; None without one.

    As in transformers, vLLM and speculators, a key is seen if query position - key position < window.
    """
    types = config.get("layer_types")
    return config["sliding_window"] if isinstance(types, list) and types[:1] == [_SLIDING] else None


def default_window(config: Mapping[str, Any], target_positions: int | None) -> int | None:
    """Read the tokens that drafts of a head look back on: its window, or the length of the texts it was trained on.

    That is `draft_window_size`, or a `max_position_embeddings` of at most half the target's: after longer ones hardly
    any draft is accepted. None for all tokens.
    """
    window, trained = sliding_window(config) or config.get("draft_window_size"), config.get("max_position_embeddings")
    if not window and trained and target_positions and 2 * trained <= target_positions:
        window = trained
    return int(window) if window else None


def position_warnings(config: Mapping[str, Any], target: Mapping[str, Any]) -> list[str]:
    """Warn of a `max_position_embeddings` of at most a quarter of the target's, and say what to do."""
    name = "max_position_embeddings"
    own, targets = config.get(name), target.get(name)
    if not (own and type(targets) is int and 4 * own <= targets) or sliding_window(config) is not None:
        return []
    return [
        f"{name} is {own}, the target's {targets}: after longer texts engines accept hardly any draft. Correct it in "
        "the head's config.json if a script left it there; else serve with a window: SGLang "
        f"--speculative-draft-window-size {own}, vLLM Ascend --additional-config '{{\"draft_window_size\": {own}}}'. "
        "This runtime takes one by itself"
    ]


def quantisation(config: Any) -> str | None:
    """Read the method by which a `quantization_config` quantises weights; None for one that quantises none."""
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
        and not any(isinstance(group, Mapping) and group.get("weights") for group in groups.values()),
        any(config.get(key) in (16, 32) for key in ("bits", "w_bit")),
        method == "bitsandbytes" and not (config.get("load_in_8bit") or config.get("load_in_4bit")),
        isinstance(ignored, list) and any(pattern in ("*", ".*", "re:.*") for pattern in ignored),
    )
    return None if any(says_nothing) else str(method)
