"""RoPE of a draft head: both spellings of transformers in, `rope_theta` and `rope_scaling` out, and their numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import MismatchError

# Those of transformers, and vLLM's of one model each (`rotary_embedding/__init__.py`).
_COMMON = ("default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional", "mrope", "su", "ntk")
_SCALINGS = (*_COMMON, "mllama4", "xdrope", "deepseek_yarn", "deepseek_llama_scaling", "openpangu", "telechat3-yarn")
# Numbers that a scaled RoPE computes with, and those without which transformers or an engine refuses it, by type.
_LLAMA3_NUMBERS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
_NUMBERS = (*_LLAMA3_NUMBERS, "alpha")
_AT_TOP = ("rope_theta", "partial_rotary_factor")
_NEEDED = {"linear": ("factor",), "yarn": ("factor",), "llama3": _LLAMA3_NUMBERS}


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
    rope = config.get(key)
    if rope is None:
        return {}
    if not isinstance(rope, Mapping):
        raise MismatchError.of_key(where, key, "an object or null", rope)
    rope = _without_null(rope)
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
        raise MismatchError.at(
            where,
            f"RoPE is given for {' and '.join(rope)} layers apart, and layer_types does not name the head's layer.\n"
            "Put the right parameters into config.json as rope_theta and rope_scaling.",
        )
    return _without_null(by_type[0])


def _without_null(rope: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in rope.items() if value is not None}
