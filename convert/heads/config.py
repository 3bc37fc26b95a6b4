"""Configuration of a draft head: every published form in, one flat Llama-style config.json out.

Reads the flat form of SafeAILab, SGLang, SpecForge and ModelOpt, and the nested form of speculators. Each change names
the engine that it is for.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from .. import names
from ..errors import MismatchError, UnsupportedHeadError
from .quantisation import quantisation
from .rope import check_positive, check_rope, flatten_rope
from .taps import drop_empty_taps, section
from .window import settle_window

EMBEDDING_TRAINED_KEY = "embed_requires_grad"
QWEN3_ARCHITECTURE = "Eagle3Qwen3ForCausalLM"
"""vLLM's class of EAGLE-3 heads whose layer is Qwen3's (`model_executor/models/qwen3_eagle3.py`)."""

# Keys that must not reach the output: paths of the machine that trained the head, code references, what is flattened,
# and the EAGLE-1/2 flag `bias` that makes vLLM and SGLang build attention biases and leave them uninitialised.
_SPECULATORS_KEYS = ("speculators_config", "speculators_model_type", "speculators_version", "transformer_layer_config")
_DROPPED_KEYS = ("_name_or_path", "auto_map", "bias", "dtype", "torch_dtype", "quantization_config", "rope_parameters")

# Flags by which a DFlashDraftModel has other layers or chooses otherwise (SGLang, `speculative/dflash_utils.py`).
_OTHER_FORM_FLAGS = ("projector_type", "conv_kernel_size", "selector_rank")
_REQUIRED_SIZES = ("hidden_size", "num_attention_heads")
_WIDTHS = ("num_key_value_heads", "head_dim", "intermediate_size", "vocab_size", "draft_vocab_size")
_COUNTS = ("target_hidden_size", "num_aux_hidden_states", "max_position_embeddings", "num_hidden_layers")
SIZES = (*_REQUIRED_SIZES, *_WIDTHS, *_COUNTS)

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
            raise MismatchError.of_key(where, key, "an object or null", source[key])
    config = flattened_text(source)
    if (nested := config.get("transformer_layer_config")) is not None:
        config = {"norm_before_residual": True, **_over(nested, config, _SPECULATORS_KEYS), "model_type": "llama"}
    if not isinstance(config.get("eagle_config"), Mapping | None):
        raise MismatchError.of_key(where, "eagle_config", "an object or null", config["eagle_config"])
    if config.get("model_type") == "llama4_text" and config.get("intermediate_size_mlp") is not None:
        # Llama-4 calls the width of its experts intermediate_size; a draft layer has none, and is written as Llama's.
        config["intermediate_size"] = config.pop("intermediate_size_mlp")
    flatten_rope(config, where)
    settle_window(config, where)
    for key in (*_FLAGS, *(name for others in _NORM_FLAGS.values() for name in others)):
        # "false" as text would count as set.
        for flag in (section(config, place).get(key) for place in ("", "eagle_config")):
            if not isinstance(flag, bool | None):
                raise MismatchError.of_key(where, key, "true, false or null", flag)
    _settle_norm_flags(config)
    drop_empty_taps(config)
    for key in (*_DROPPED_KEYS, *_SPECULATORS_KEYS):
        config.pop(key, None)

    for key in SIZES:
        value = config.get(key)
        is_size = type(value) is int and 0 < value < 2**31
        if not is_size and (key in _REQUIRED_SIZES or value is not None):
            raise MismatchError.of_key(where, key, "a positive integer below 2^31", value)
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
    if not isinstance(config["hidden_act"], str):
        raise MismatchError.of_key(where, "hidden_act", "a name", config["hidden_act"])
    check_positive({"rms_norm_eps": config["rms_norm_eps"]}, where)
    check_rope(config, where)
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
        is_number = isinstance(found, int | float) and not abs(found) > 1e300
        if not is_number or not math.isclose(found, value, rel_tol=1e-3):
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
    name = section(section(source, "speculators_config"), "verifier").get("name_or_path")
    return name if isinstance(name, str) and name else None


def says_dflash(source: Mapping[str, Any]) -> bool:
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
        is_converted = draft in ("dflash", "dspark") and says_dflash(source)
        if draft != "model" and draft in said and not is_converted:
            raise names.other_draft(draft, where)
    problem = None
    for key in _OTHER_FORM_FLAGS:
        if value := section(source, "dflash_config").get(key):
            problem = f"dflash_config.{key} is {value!r}: a DFlash draft of another form.\nServe it as it is."
    if kind not in (None, "eagle3") and not says_dflash(source):
        problem = f"speculators_model_type {kind!r} is not converted.\nExpected 'eagle3'."
    for place in ("", "text_config", "transformer_layer_config", "eagle_config"):
        if (method := quantisation(section(source, place).get("quantization_config"))) is not None:
            problem = (
                f"the head is quantised ({method}); its rows are not defined without their scales.\n"
                "Convert the unquantised head, then quantise the result."
            )
    if problem is not None:
        raise UnsupportedHeadError.at(where, problem)


def _settle_norm_flags(config: dict[str, Any]) -> None:
    """Put a flag that is set under any name, at top level or in `eagle_config`, where every engine reads it.

    vLLM and SGLang read these flags at top level and know no other name; of `norm_before_fc` they believe
    `eagle_config` first, and TensorRT-LLM reads it there alone.
    """
    nested = section(config, "eagle_config")
    for flag, others in _NORM_FLAGS.items():
        if any(config.get(name) or nested.get(name) for name in (flag, *others)):
            config[flag] = True
    if config.get("norm_before_fc"):
        config["eagle_config"] = {**nested, "norm_before_fc": True}
