"""Shapes, dtypes and flags of a draft head: its configuration against its tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .. import names
from ..errors import CheckpointError, MismatchError, UnsupportedHeadError
from ..rows.files import FLOATS, LONG_NAMES
from .config import EMBEDDING_TRAINED_KEY
from .draft_head import LazyTensors
from .taps import TAPS_FLAG, could_be_inputs, layer_ids, tap_layers, uses_aux_layers


def check_dtypes(tensors: LazyTensors, where: str) -> None:
    """Raise UnsupportedHeadError unless every tensor but the maps is bf16, fp16 or fp32; MismatchError for a scalar."""
    for name in tensors:
        dtype = tensors.info(name).dtype
        if not tensors.shape(name):
            raise MismatchError.at(where, f"{name}: expected rows of numbers, found a scalar.\nFetch the head again.")
        if name not in names.MAPS and dtype not in FLOATS:
            problem = f"{name} is {LONG_NAMES.get(dtype, dtype)}; expected bfloat16, float16 or float32"
            raise UnsupportedHeadError.at(where, f"{problem}.\nConvert an unquantised head in one of these.")


def check_eagle(tensors: LazyTensors, config: dict[str, Any], where: str) -> list[str]:
    """Check an EAGLE-1/2 head's layers, and settle its configuration, as `check_eagle3`."""
    _settle_layer(tensors, config, "eagle", where)
    hidden, vocab, layers = config["hidden_size"], config["vocab_size"], names.num_layers(tensors)
    expected = {names.FC: (hidden, 2 * hidden), names.FC_BIAS: (hidden,), names.EMBEDDING: (vocab, hidden)}
    for layer in range(layers):
        expected |= layer_shapes(config, f"layers.{layer}.", hidden)
    check_shapes(tensors, expected, where)
    return _settle_num_layers(config, layers)


def check_eagle3(tensors: LazyTensors, config: dict[str, Any], where: str) -> list[str]:
    """Check an EAGLE-3 head's layer, put into the configuration what only the tensors tell, and return warnings.

    Raises CheckpointError, MismatchError, and UnsupportedHeadError for an `fc.bias` that is not zero.
    """
    hidden = config["hidden_size"]
    target_hidden = config.get("target_hidden_size") or hidden
    if target_hidden == hidden:
        # Its mere presence stops SafeAILab from loading the target's embedding.
        config.pop("target_hidden_size", None)
    _settle_layer(tensors, config, "eagle3", where)
    expected = layer_shapes(config, "midlayer.", 2 * hidden)
    expected |= dict.fromkeys(("midlayer.hidden_norm.weight", "norm.weight", names.FC_BIAS), (hidden,))
    expected[names.LM_HEAD] = (config["draft_vocab_size"], hidden)
    expected[names.EMBEDDING] = (config["vocab_size"], hidden)
    check_shapes(tensors, expected, where)
    if target_hidden != hidden and names.EMBEDDING not in tensors:
        problem = f"the head's width {hidden} differs from the target's {target_hidden}, so it needs an"
        missing = "embed_tokens.weight of its own, which is missing"
        raise MismatchError.at(where, f"{problem} {missing}.\nFetch the complete head.")
    if tensors.is_nonzero(names.FC_BIAS):
        problem = "EAGLE-3 in vLLM, SafeAILab and LMDeploy has no such bias and would draft wrongly without an error"
        advice = "SGLang and TensorRT-LLM serve it as it is, with bias: true in config.json"
        advice += "; only a head without it is converted."
        raise UnsupportedHeadError.at(where, f"fc.bias is not zero; {problem}.\n{advice}")
    warnings = _settle_num_layers(config, 1)
    if config.get(EMBEDDING_TRAINED_KEY) and names.EMBEDDING not in tensors:
        loss = "but the file has none: the target's is used, so fewer drafts may be accepted"
        warnings.append(f"{EMBEDDING_TRAINED_KEY} says that the embedding was trained, {loss}")
    config["tie_word_embeddings"] = False
    return warnings


def _settle_num_layers(config: dict[str, Any], layers: int) -> list[str]:
    """Write the layers that the file has, with a warning: engines build as many as said, and leave some unfilled."""
    old, config["num_hidden_layers"] = config.get("num_hidden_layers"), layers
    return [] if old in (None, layers) else [f"num_hidden_layers was {old}; the head has {layers}, which is written"]


def settle_taps(
    tensors: LazyTensors, config: Mapping[str, Any], where: str, given: Sequence[int] | None
) -> tuple[int, ...] | None:
    """Find the layers whose inputs an EAGLE-3 head reads, as known without the target (`DraftHead.taps`).

    Raises CheckpointError without `fc.weight`, MismatchError where it or config.json tells other layers, or none.
    """
    hidden = config["hidden_size"]
    target_hidden = config.get("target_hidden_size") or hidden
    if not uses_aux_layers(config):
        if given is not None:
            problem = "--tap-layers for a head that reads only the target's last hidden state.\nLeave the option out."
            raise MismatchError.at(where, problem)
        # ModelOpt exports an fc of all taps that such a head was trained without; vLLM leaves it unread.
        if target_hidden != hidden:
            check_shapes(tensors, {names.FC: fc_shape(config, 1)}, where)
        elif names.FC in tensors:
            count = max(1, tensors.shape(names.FC)[-1] // target_hidden)
            check_shapes(tensors, {names.FC: fc_shape(config, count)}, where)
        return ()
    if names.FC not in tensors:
        raise CheckpointError.at(where, "incomplete EAGLE-3 head: fc.weight is missing.\nFetch the checkpoint again.")
    if given is not None:
        taps: tuple[int, ...] | None = layer_ids(given, where, TAPS_FLAG, lowest=0)
    else:
        try:
            taps = tap_layers(config, where)
        except MismatchError:
            # Whether the keys disagree, only the target's number of layers tells: `DraftHead.taps` asks it.
            taps = tap_layers(config, where, could_be_inputs(config))
    count = tensors.shape(names.FC)[-1] // target_hidden
    check_shapes(tensors, {names.FC: fc_shape(config, count)}, where)
    stated = config.get("num_aux_hidden_states") or count
    if count != stated:
        raise MismatchError.of_key(where, "num_aux_hidden_states", f"{count}, as fc.weight takes", stated)
    if count != (3 if taps is None else len(taps)):
        named = f"{TAPS_FLAG if given else 'the configuration'} names {list(taps or ()) or 'none'}"
        advice = f"Name the {count} layers whose inputs the head reads with {TAPS_FLAG}."
        raise MismatchError.at(where, f"fc.weight takes {count} captured layers, {named}.\n{advice}")
    norms = [name for name in tensors if name.startswith("fc_norm.")]
    if norms and sorted(norms) != sorted(f"fc_norm.{index}.weight" for index in range(count)):
        problem = f"expected fc_norm.0 to fc_norm.{count - 1}, found {', '.join(norms)}.\nFetch the complete head."
        raise MismatchError.at(where, problem)
    input_norms = [name for name in tensors if name == "input_norm.weight"]
    expected = {**dict.fromkeys(norms, (target_hidden,)), **dict.fromkeys(input_norms, (count * target_hidden,))}
    check_shapes(tensors, expected, where)
    for flag, present in (("norm_before_fc", input_norms), ("fc_norm", norms)):
        if bool(config.get(flag)) != bool(present):
            raise _wrong_flag(flag, config.get(flag), present, where)
    return taps


def fc_shape(config: Mapping[str, Any], count: int) -> tuple[int, int]:
    """Return the shape of `fc.weight` over `count` hidden states of the target."""
    hidden = config["hidden_size"]
    return hidden, count * (config.get("target_hidden_size") or hidden)


def layer_shapes(config: Mapping[str, Any], layer: str, inputs: int) -> dict[str, tuple[int, ...]]:
    """List the shapes of all tensors that a decoder layer may have; `inputs`: columns of the q, k and v projections."""
    hidden, middle, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    attention = ((queries, inputs), (keys, inputs), (keys, inputs), (hidden, queries))
    mlp = ((middle, hidden), (middle, hidden), (hidden, middle))
    matrices = dict(zip(names.MATRICES, (*attention, *mlp), strict=True))
    return {
        **{f"{layer}{name}.weight": shape for name, shape in matrices.items()},
        **{f"{layer}{name}.bias": shape[:1] for name, shape in matrices.items()},
        **{f"{layer}self_attn.{name}_norm.weight": (head_dim,) for name in "qk"},
        **{f"{layer}{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")},
    }


def check_shapes(tensors: LazyTensors, expected: Mapping[str, tuple[int, ...]], where: str) -> None:
    """Raise MismatchError unless each tensor of `expected` that is there has the shape given."""
    for name, shape in expected.items():
        if name in tensors and (found := tensors.shape(name)) != shape:
            problem = f"{name}: expected shape {list(shape)}, found {list(found)}."
            raise MismatchError.at(where, f"{problem}\nCorrect config.json, or fetch the head again.")


def _settle_layer(tensors: LazyTensors, config: dict[str, Any], kind: names.HeadKind, where: str) -> None:
    """Settle `intermediate_size`, `attention_bias` and `mlp_bias` by the tensors where config.json does not say."""
    missing = [name for name in names.HEAD_NORMS[kind] if name not in tensors]
    if len(missing) == 1:
        raise CheckpointError.at(where, f"{missing[0]} missing, of the norms of q and k.\nFetch the complete head.")
    attention, mlp = names.ATTENTION_BIASES[kind], names.MLP_BIASES[kind]
    if kind == "eagle" and config.get("qkv_bias"):
        # SafeAILab's key, the only one that its EAGLE-1/2 code reads; transformers writes attention_bias beside it.
        config["attention_bias"] = True
    # Qwen2's configuration has no key for either: its layers always have biases of q, k and v.
    for flag, possible, needed in (("attention_bias", attention, attention[:3]), ("mlp_bias", mlp, mlp)):
        present = [name for name in possible if name in tensors]
        if config.get(flag) is None:
            config[flag] = bool(present)
        if bool(present) != bool(config[flag]) or (present and not all(name in tensors for name in needed)):
            raise _wrong_flag(flag, config[flag], present, where)
    if config.get("intermediate_size") is None:
        config["intermediate_size"] = tensors.shape(mlp[0].replace(".bias", ".weight"))[0]


def _wrong_flag(flag: str, value: object, found: Sequence[str], where: str) -> MismatchError:
    problem = f"{flag} is {str(bool(value)).lower()}, and the file holds {', '.join(found) or 'no such tensor'}"
    advice = "Correct config.json, or fetch the complete head."
    return MismatchError.at(where, f"{problem}; engines would load it wrongly.\n{advice}")
