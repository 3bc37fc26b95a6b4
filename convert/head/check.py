"""Shapes, dtypes and flags of a draft head: what its configuration says against what its tensors are."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from eagle_slim.vocab_tools.errors import UsageError

from ..errors import CheckpointError, MismatchError, UnsupportedHeadError
from ..weights import names
from ..weights.dtypes import FLOATS, LONG_NAMES
from . import config as head_config
from .tensors import LazyTensors

Shapes = Mapping[str, tuple[int, ...]]


def check_dtypes(tensors: LazyTensors, where: str) -> None:
    """Raise UnsupportedHeadError unless every tensor but the maps is bf16, fp16 or fp32."""
    for name in tensors:
        dtype = tensors.info(name).dtype
        if name not in names.MAPS and dtype not in FLOATS:
            found = LONG_NAMES.get(dtype, dtype)
            raise UnsupportedHeadError(
                f"{where}: {name} is {found}; expected bfloat16, float16 or float32.\n"
                "A quantised head is not converted: convert the unquantised one, then quantise the result.",
                path=where,
                tensor=name,
                found=found,
            )


def check_mlp_bias(config: Mapping[str, Any], where: str) -> None:
    """Raise MismatchError where `mlp_bias` is set: a tensor of that kind is refused by its name, so there is none."""
    if config.get("mlp_bias"):
        raise MismatchError(
            f"{where}: mlp_bias is set in config.json, but the file holds no such biases; vLLM and TensorRT-LLM would "
            "build them and leave them uninitialised.\nSet it to false.",
            path=where,
            key="mlp_bias",
        )


def check_eagle(tensors: LazyTensors, config: Mapping[str, Any], where: str) -> None:
    """Raise MismatchError where the tensors of an EAGLE-1/2 head have other shapes than config.json says."""
    hidden = config["hidden_size"]
    expected = {
        names.FC: (hidden, 2 * hidden),
        names.FC_BIAS: (hidden,),
        names.EMBEDDING: (config["vocab_size"], hidden),
        "layers.0.self_attn.q_proj.weight": (config["num_attention_heads"] * config["head_dim"], hidden),
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
    middle = tensors.shape("midlayer.mlp.gate_proj.weight")[0]
    if config.get("intermediate_size") is None:
        config["intermediate_size"] = middle
    if config["intermediate_size"] != middle:
        raise MismatchError(
            f"{where}: intermediate_size is {config['intermediate_size']}, gate_proj has {middle} rows.\n"
            "Correct config.json, or fetch the head again.",
            path=where,
            key="intermediate_size",
            expected=middle,
            found=config["intermediate_size"],
        )
    _check_shapes(tensors, _eagle3_shapes(config), where)
    if target_hidden != hidden and names.EMBEDDING not in tensors:
        raise MismatchError(
            f"{where}: the head's width {hidden} differs from the target's {target_hidden}, so it needs an "
            "embed_tokens.weight of its own, which is missing.\nFetch the complete head.",
            path=where,
            tensor=names.EMBEDDING,
        )
    _check_attention_biases(tensors, config, where)
    warnings = []
    if config.get("num_hidden_layers") not in (None, 1):
        warnings.append(
            f"num_hidden_layers was {config['num_hidden_layers']}; the head has one layer, and 1 is written"
        )
    config["num_hidden_layers"] = 1
    config["tie_word_embeddings"] = False
    return warnings


def settle_taps(
    config: Mapping[str, Any], tensors: LazyTensors, where: str, given: Sequence[int] | None
) -> tuple[tuple[int, ...] | None, str | None]:
    """Which layers' inputs the head reads (`config.tap_layers`), checked against the width of `fc`, and a warning.

    Raises:
        UsageError: `given` is not a list of numbers.
        CheckpointError: there is no `fc.weight`.
        MismatchError: `fc` or the norms before it take another number of layers than config.json names.
    """
    hidden = config["hidden_size"]
    target_hidden = config.get("target_hidden_size") or hidden
    if not head_config.uses_aux_layers(config):
        if given is not None:
            raise MismatchError(
                f"{where}: --tap-layers for a head that reads only the target's last hidden state.\n"
                "Leave the option out.",
                path=where,
                option="--tap-layers",
            )
        _check_shapes(tensors, {names.FC: (hidden, target_hidden)}, where)
        return (), None
    if names.FC not in tensors:
        raise CheckpointError(
            f"{where}: incomplete EAGLE-3 head: fc.weight is missing.\nFetch the checkpoint again.",
            path=where,
            tensor=names.FC,
        )
    taps, warning = head_config.tap_layers(config, None if given is None else _layer_numbers(given), where)
    rows, columns = tensors.shape(names.FC)
    if rows != hidden or columns % target_hidden:
        raise MismatchError(
            f"{where}: fc.weight: expected [{hidden}, taps * {target_hidden}], found {[rows, columns]}.\n"
            "The hidden sizes of head and target disagree.",
            path=where,
            tensor=names.FC,
            found=(rows, columns),
        )
    count = columns // target_hidden
    stated = config.get("num_aux_hidden_states") or (len(taps) if taps is not None else 3)
    if count != stated or (taps is not None and len(taps) != count):
        raise MismatchError(
            f"{where}: fc.weight takes {count} captured layers, the configuration names {list(taps or ()) or stated}: "
            "expected the same number.\nSay which are right with --tap-layers.",
            path=where,
            taps=count,
            found=list(taps or ()) or stated,
        )
    norms = [name for name in tensors if names.is_fc_norm(name)]
    if norms and sorted(norms) != sorted(f"fc_norm.{index}.weight" for index in range(count)):
        raise MismatchError(
            f"{where}: expected fc_norm.0 to fc_norm.{count - 1}, found {', '.join(norms)}.\nFetch the complete head.",
            path=where,
            found=norms,
        )
    expected: dict[str, tuple[int, ...]] = dict.fromkeys(norms, (target_hidden,))
    expected["input_norm.weight"] = (columns,)
    _check_shapes(tensors, expected, where)
    _check_norm_flag(config, "norm_before_fc", "input_norm.weight", "input_norm.weight" in tensors, where)
    _check_norm_flag(config, "fc_norm", "fc_norm.N.weight", bool(norms), where)
    return taps, warning


def _eagle3_shapes(config: Mapping[str, Any]) -> Shapes:
    hidden, middle = config["hidden_size"], config["intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    layer = "midlayer.self_attn."
    return {
        f"{layer}q_proj.weight": (queries, 2 * hidden),
        f"{layer}k_proj.weight": (keys, 2 * hidden),
        f"{layer}v_proj.weight": (keys, 2 * hidden),
        f"{layer}o_proj.weight": (hidden, queries),
        "midlayer.mlp.gate_proj.weight": (middle, hidden),
        "midlayer.mlp.up_proj.weight": (middle, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, middle),
        "midlayer.input_layernorm.weight": (hidden,),
        "midlayer.hidden_norm.weight": (hidden,),
        "midlayer.post_attention_layernorm.weight": (hidden,),
        "norm.weight": (hidden,),
        names.LM_HEAD: (config["draft_vocab_size"], hidden),
        names.EMBEDDING: (config["vocab_size"], hidden),
        names.FC_BIAS: (hidden,),
        f"{layer}q_proj.bias": (queries,),
        f"{layer}k_proj.bias": (keys,),
        f"{layer}v_proj.bias": (keys,),
        f"{layer}o_proj.bias": (hidden,),
    }


def _check_attention_biases(tensors: LazyTensors, config: Mapping[str, Any], where: str) -> None:
    present = [name for name in names.EAGLE3_ATTENTION_BIASES if name in tensors]
    is_set = bool(config.get("attention_bias"))
    if present and not is_set:
        problem = "attention biases are in the file, but attention_bias is false in config.json"
    elif is_set and not set(names.EAGLE3_ATTENTION_BIASES[:3]) <= set(present):
        problem = (
            "attention_bias is set in config.json, or another bias in the file shows it, but the q, k and v biases are "
            "missing"
        )
    else:
        return
    raise MismatchError(
        f"{where}: {problem}.\nCorrect config.json, or fetch the complete head.",
        path=where,
        key="attention_bias",
        found=present,
    )


def _check_norm_flag(config: Mapping[str, Any], flag: str, tensor: str, is_there: bool, where: str) -> None:
    is_set = bool(config.get(flag))
    if is_set != is_there:
        raise MismatchError(
            f"{where}: {flag} is {str(is_set).lower()} in config.json, but {tensor} is "
            f"{'missing' if is_set else 'in the file'}; engines would load it wrongly.\n"
            "Correct config.json, or fetch the complete head.",
            path=where,
            key=flag,
            found=is_set,
        )


def _check_shapes(tensors: LazyTensors, expected: Shapes, where: str) -> None:
    for name, shape in expected.items():
        if name in tensors and (found := tensors.shape(name)) != shape:
            raise MismatchError(
                f"{where}: {name}: expected shape {list(shape)}, found {list(found)}.\n"
                "Correct config.json, or fetch the head again.",
                path=where,
                tensor=name,
                expected=shape,
                found=found,
            )


def _layer_numbers(given: Any) -> tuple[int, ...]:
    try:
        layers = tuple(given)
        if not any(isinstance(layer, bool | np.bool_) for layer in layers):
            return tuple(map(operator.index, layers))
    except TypeError:
        pass
    raise UsageError(
        f"--tap-layers: expected a list of layer numbers, found {given!r}.", option="--tap-layers", found=given
    )
