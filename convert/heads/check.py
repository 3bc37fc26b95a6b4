"""Shapes, dtypes and flags of a draft head: what its configuration says against what its tensors are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import CheckpointError, MismatchError, UnsupportedHeadError
from ..rows.dtypes import FLOATS, LONG_NAMES
from . import config as head_config
from . import names
from .draft_head import LazyTensors

Shapes = Mapping[str, tuple[int, ...]]


def check_dtypes(tensors: LazyTensors, where: str) -> None:
    """Raise UnsupportedHeadError unless every tensor but the maps is bf16, fp16 or fp32."""
    for name in tensors:
        dtype = tensors.info(name).dtype
        if name not in names.MAPS and dtype not in FLOATS:
            found = LONG_NAMES.get(dtype, dtype)
            advice = (
                "Store it as float32, or in the type that the target has."
                if dtype == "F64"
                else "A quantised head is not converted: convert the unquantised one, then quantise the result."
            )
            raise UnsupportedHeadError.at(where, f"{name} is {found}; expected bfloat16, float16 or float32.\n{advice}")


def settle_biases(tensors: LazyTensors, config: dict[str, Any], kind: names.HeadKind, where: str) -> None:
    """Settle `attention_bias` and `mlp_bias` by the biases in the file where config.json does not say."""
    attention, mlp = names.ATTENTION_BIASES[kind], names.MLP_BIASES[kind]
    if kind == "eagle" and config.get("qkv_bias"):
        # SafeAILab's key, the only one that its EAGLE-1/2 code reads; transformers writes attention_bias beside it.
        config["attention_bias"] = True
    # Qwen2's configuration has no key for either: its layers always have biases of q, k and v.
    _settle_biases(tensors, config, "attention_bias", attention, attention[:3], where)
    _settle_biases(tensors, config, "mlp_bias", mlp, mlp, where)


def check_head_norms(tensors: LazyTensors, kind: names.HeadKind, is_qwen3: bool, where: str) -> None:
    """Raise CheckpointError for one of the norms of q and k alone, and for none where `is_qwen3` promises them."""
    missing = [name for name in names.HEAD_NORMS[kind] if name not in tensors]
    if len(missing) == 1 or (missing and is_qwen3):
        why = "config.json says a Qwen3 layer" if len(missing) > 1 else "the other one of q and k is there"
        raise CheckpointError.at(where, f"{' and '.join(missing)} missing: {why}.\nFetch the complete head.")


def settle_eagle(tensors: LazyTensors, config: dict[str, Any], where: str) -> None:
    """Check an EAGLE-1/2 head's first layer against its configuration, and put what is settled into the latter."""
    hidden = config["hidden_size"]
    _settle_intermediate(tensors, config, "layers.0.", where)
    expected: dict[str, tuple[int, ...]] = {
        names.FC: (hidden, 2 * hidden),
        names.FC_BIAS: (hidden,),
        names.EMBEDDING: (config["vocab_size"], hidden),
        **_layer_shapes(config, "layers.0.", hidden),
    }
    _check_shapes(tensors, expected, where)


def settle_eagle3(tensors: LazyTensors, config: dict[str, Any], where: str) -> list[str]:
    """Check an EAGLE-3 head's layer against its configuration, and put what is settled into the latter.

    Returns:
        warnings.

    Raises:
        MismatchError: shapes, biases or widths disagree.
    """
    hidden = config["hidden_size"]
    target_hidden = config.get("target_hidden_size") or hidden
    if target_hidden == hidden:
        # Its mere presence stops SafeAILab from loading the target's embedding.
        config.pop("target_hidden_size", None)
    _settle_intermediate(tensors, config, "midlayer.", where)
    _check_shapes(tensors, _eagle3_shapes(config), where)
    if target_hidden != hidden and names.EMBEDDING not in tensors:
        raise MismatchError.at(
            where,
            f"the head's width {hidden} differs from the target's {target_hidden}, so it needs an "
            "embed_tokens.weight of its own, which is missing.\nFetch the complete head.",
        )
    warnings = []
    if config.get("num_hidden_layers") not in (None, 1):
        warnings.append(
            f"num_hidden_layers was {config['num_hidden_layers']}; the head has one layer, and 1 is written"
        )
    config["num_hidden_layers"] = 1
    config["tie_word_embeddings"] = False
    return warnings


def settle_dflash(tensors: LazyTensors, config: Mapping[str, Any], taps: int, where: str) -> None:
    """Check the tensors of a DFlash draft against its configuration; `taps`: captured layers that it names.

    Raises:
        MismatchError: shapes, widths or numbers of layers disagree.
    """
    hidden, vocab, rows = config["hidden_size"], config["vocab_size"], config["draft_vocab_size"]
    for key in ("num_hidden_layers", "intermediate_size"):
        if config.get(key) is None:
            raise MismatchError.at(where, f"{key}: expected a positive integer, found none.\nCorrect config.json.")
    layers = names.dflash_layers(tensors.names)
    if config["num_hidden_layers"] != layers:
        raise MismatchError.at(
            where, f"num_hidden_layers is {config['num_hidden_layers']}, the file has {layers} layers.\nFetch it again."
        )
    target_hidden = config.get("target_hidden_size") or hidden
    columns = tensors.shape(names.FC)[-1]
    if columns != taps * target_hidden:
        raise MismatchError.at(
            where,
            f"fc.weight takes {columns} features, the configuration names {taps} captured layers of {target_hidden}.\n"
            "Correct config.json, or fetch the draft again.",
        )
    rank = tensors.shape(names.MARKOV_OUT)[-1] if names.MARKOV_OUT in tensors else 0
    expected: dict[str, tuple[int, ...]] = {
        names.FC: (hidden, columns),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
        names.LM_HEAD: (rows, hidden),
        names.EMBEDDING: (vocab, hidden),
        names.MARKOV_IN: (vocab, rank),
        names.MARKOV_OUT: (rows, rank),
    }
    for layer in range(layers):
        expected |= _layer_shapes(config, f"layers.{layer}.", hidden)
        expected |= {f"layers.{layer}.self_attn.{name}_norm.weight": (config["head_dim"],) for name in "qk"}
    _check_shapes(tensors, expected, where)


def settle_taps(
    config: Mapping[str, Any], tensors: LazyTensors, where: str, given: Sequence[int] | None
) -> tuple[int, ...] | None:
    """Which layers' inputs the head reads, as far as it is known without its target (`DraftHead.taps`).

    Raises:
        CheckpointError: there is no `fc.weight`.
        MismatchError: `fc` or the norms before it take another number of layers than config.json names, or the layers
            cannot be known: only --tap-layers can name them.
    """
    hidden = config["hidden_size"]
    target_hidden = config.get("target_hidden_size") or hidden
    if not head_config.uses_aux_layers(config):
        if given is not None:
            raise MismatchError.at(
                where, "--tap-layers for a head that reads only the target's last hidden state.\nLeave the option out."
            )
        _check_shapes(tensors, {names.FC: (hidden, target_hidden)}, where)
        return ()
    if names.FC not in tensors:
        raise CheckpointError.at(where, "incomplete EAGLE-3 head: fc.weight is missing.\nFetch the checkpoint again.")
    taps = _stated_taps(config, where) if given is None else head_config.given_tap_layers(given, where)
    rows, columns = tensors.shape(names.FC)
    if rows != hidden or columns % target_hidden:
        raise MismatchError.at(
            where,
            f"fc.weight: expected [{hidden}, taps * {target_hidden}], found {[rows, columns]}.\n"
            "The hidden sizes of head and target disagree.",
        )
    count = columns // target_hidden
    stated = config.get("num_aux_hidden_states") or count
    if count != (3 if taps is None else len(taps)) or count != stated:
        raise MismatchError.at(
            where,
            f"fc.weight takes {count} captured layers, the configuration names {list(taps or ()) or 'none'}.\n"
            f"Name the {count} layers whose inputs the head reads with --tap-layers.",
        )
    norms = [name for name in tensors if names.is_fc_norm(name)]
    if norms and sorted(norms) != sorted(f"fc_norm.{index}.weight" for index in range(count)):
        raise MismatchError.at(
            where, f"expected fc_norm.0 to fc_norm.{count - 1}, found {', '.join(norms)}.\nFetch the complete head."
        )
    expected: dict[str, tuple[int, ...]] = dict.fromkeys(norms, (target_hidden,))
    expected["input_norm.weight"] = (columns,)
    _check_shapes(tensors, expected, where)
    _check_norm_flag(config, "norm_before_fc", "input_norm.weight", "input_norm.weight" in tensors, where)
    _check_norm_flag(config, "fc_norm", "fc_norm.N.weight", bool(norms), where)
    return taps


def _stated_taps(config: Mapping[str, Any], where: str) -> tuple[int, ...] | None:
    try:
        return head_config.tap_layers(config, where)
    except MismatchError:
        # Whether the keys disagree, only the target's number of layers tells: `DraftHead.taps` asks it.
        return head_config.tap_layers(config, where, head_config.could_be_inputs(config))


def _eagle3_shapes(config: Mapping[str, Any]) -> Shapes:
    hidden = config["hidden_size"]
    return {
        **_layer_shapes(config, "midlayer.", 2 * hidden),
        "midlayer.hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
        names.LM_HEAD: (config["draft_vocab_size"], hidden),
        names.EMBEDDING: (config["vocab_size"], hidden),
        names.FC_BIAS: (hidden,),
    }


def _layer_shapes(config: Mapping[str, Any], layer: str, inputs: int) -> Shapes:
    """Shapes of a decoder layer's tensors, all that it may have; `inputs`: width of what q, k and v take."""
    hidden, middle = config["hidden_size"], config["intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    matrices = {
        "self_attn.q_proj": (queries, inputs),
        "self_attn.k_proj": (keys, inputs),
        "self_attn.v_proj": (keys, inputs),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (middle, hidden),
        "mlp.up_proj": (middle, hidden),
        "mlp.down_proj": (hidden, middle),
    }
    return {
        **{f"{layer}{name}.weight": shape for name, shape in matrices.items()},
        **{f"{layer}{name}.bias": shape[:1] for name, shape in matrices.items()},
        **{f"{layer}self_attn.{name}_norm.weight": (config["head_dim"],) for name in "qk"},
        f"{layer}input_layernorm.weight": (hidden,),
        f"{layer}post_attention_layernorm.weight": (hidden,),
    }


def _settle_intermediate(tensors: LazyTensors, config: dict[str, Any], layer: str, where: str) -> None:
    middle = tensors.shape(f"{layer}mlp.gate_proj.weight")[0]
    if config.get("intermediate_size") is None:
        config["intermediate_size"] = middle
    if config["intermediate_size"] != middle:
        raise MismatchError.at(
            where,
            f"intermediate_size is {config['intermediate_size']}, gate_proj has {middle} rows.\n"
            "Correct config.json, or fetch the head again.",
        )


def _settle_biases(
    tensors: LazyTensors, config: dict[str, Any], flag: str, possible: Sequence[str], needed: Sequence[str], where: str
) -> None:
    present = [name for name in possible if name in tensors]
    missing = [name for name in needed if name not in tensors]
    if config.get(flag) is None:
        config[flag] = bool(present)
    is_set = bool(config[flag])
    if present and not is_set:
        problem = (
            f"{flag} is false in config.json, but {present[0]} is in the file; engines would leave it out.\n"
            f"Set {flag} to true"
        )
    elif present and missing:
        problem = f"{present[0]} is in the file, but {', '.join(missing)} missing.\nFetch the complete head"
    elif is_set and missing:
        problem = (
            f"{flag} is set in config.json, but the file holds no such biases; engines would build them and leave them "
            f"uninitialised.\nSet {flag} to false"
        )
    else:
        return
    raise MismatchError.at(where, f"{problem}.")


def _check_norm_flag(config: Mapping[str, Any], flag: str, tensor: str, is_there: bool, where: str) -> None:
    is_set = bool(config.get(flag))
    if is_set != is_there:
        raise MismatchError.at(
            where,
            f"{flag} is {str(is_set).lower()} in config.json, but {tensor} is "
            f"{'missing' if is_set else 'in the file'}; engines would load it wrongly.\n"
            "Correct config.json, or fetch the complete head.",
        )


def _check_shapes(tensors: LazyTensors, expected: Shapes, where: str) -> None:
    for name, shape in expected.items():
        if name in tensors and (found := tensors.shape(name)) != shape:
            raise MismatchError.at(
                where,
                f"{name}: expected shape {list(shape)}, found {list(found)}.\n"
                "Correct config.json, or fetch the head again.",
            )
