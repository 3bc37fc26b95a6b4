"""Tap layers: those of the target whose inputs a draft reads, under every public key, each with its own counting."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ..errors import MismatchError

AUX_LAYER_KEY = "eagle_aux_hidden_state_layer_ids"
TAPS_FLAG = "--tap-layers"
_COMMON = {"layer_ids": 0, "target_layer_ids": 1}
TAP_KEYS: Mapping[str, Mapping[str, int]] = {
    "": {AUX_LAYER_KEY: 0, "aux_hidden_state_layer_ids": 0, "dspark_target_layer_ids": 1, **_COMMON},
    "eagle_config": {AUX_LAYER_KEY: 1, "aux_hidden_state_layer_ids": 0, **_COMMON},
    "dflash_config": _COMMON,
}
"""Keys by the object that holds them, each with the number that makes an id that of the layer's input.

Sources: vLLM 0.32.0, `v1/worker/gpu/spec_decode/eagle/eagle3_utils.py`; SGLang 0.5.23,
`model_executor/model_runner_components/spec_aux_hidden_state.py`; speculators, `models/dflash`.
"""
# A list of numbers under a name with "layer" and one of these is refused: what it counts is not known.
_LIKE_TAPS = ("captur", "aux", "tap", "hidden_state", "target", "verifier", "feature")


def section(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Return the object under a key, an empty one where it is none; for "" the whole configuration."""
    found = config.get(key) if key else config
    return found if isinstance(found, Mapping) else {}


def default_taps(num_layers: int) -> tuple[int, int, int]:
    """Return the layers whose inputs every engine captures for an EAGLE-3 head that names none: 2, n // 2, n - 3."""
    return 2, num_layers // 2, num_layers - 3


def uses_aux_layers(config: Mapping[str, Any]) -> bool:
    """Tell whether an EAGLE-3 head reads captured layers, as all but a few do, and not the last hidden state alone."""
    return section(config, "eagle_config").get("use_aux_hidden_state") is not False


def tap_layers(config: Mapping[str, Any], where: str, num_layers: int | None = None) -> tuple[int, ...] | None:
    """Read the layers whose inputs a draft takes from every key that names them (`TAP_KEYS`); None where none does.

    Under a key that names outputs of layers, [1, 17, 33] are the inputs (2, 18, 34). The list in `eagle_config` names
    outputs, SGLang's reading, but inputs where its largest id is `num_layers`, the target's number of layers, as SGLang
    has it for gpt-oss: no such layer has an output. Raises MismatchError where two keys disagree, a key that is not
    known names layers, or a list holds something else.
    """
    readings = {}
    for place, name, ids in _named(config):
        key, shift = f"{place}.{name}".lstrip("."), TAP_KEYS[place].get(name)
        if shift is None:
            doubt = "whether their inputs or their outputs is not known"
            problem = f"{key}: {ids} seem to be layers of the target that the head reads, and {doubt}"
            raise MismatchError.at(where, f"{problem}.\nName the layers whose inputs it reads with {TAPS_FLAG}.")
        layers = layer_ids(ids, where, key, lowest=-shift)
        if (place, name) == ("eagle_config", AUX_LAYER_KEY) and max(layers) == num_layers:
            shift = 0
        readings[key] = tuple(layer + shift for layer in layers)
    if len(set(readings.values())) > 1:
        listed = "; ".join(f"{key}: inputs of layers {list(ids)}" for key, ids in readings.items())
        ask = "Name the target, whose number of layers may tell, or say" if num_layers is None else "Say"
        problem = f"the keys that name the layers which the head reads disagree: {listed}"
        raise MismatchError.at(where, f"{problem}.\n{ask} which with {TAPS_FLAG}.")
    return next(iter(readings.values()), None)


def could_be_inputs(config: Mapping[str, Any]) -> int | None:
    """Return the number of target layers with which the list in `eagle_config` would name inputs; None without it."""
    ids: Any = section(config, "eagle_config").get(AUX_LAYER_KEY)
    return max(ids) if _is_list_of_numbers(ids) else None


def with_tap_layers(config: Mapping[str, Any], layers: tuple[int, ...]) -> dict[str, Any]:
    """Set both keys so that vLLM and SGLang capture the inputs of the same `layers`, and remove all others."""
    named = {(place, name) for place, name, _ in _named(config)}
    eagle_config = section(config, "eagle_config")
    kept = {name: value for name, value in config.items() if ("", name) not in named}
    nested = {name: value for name, value in eagle_config.items() if ("eagle_config", name) not in named}
    outputs = [layer - 1 for layer in layers]
    return {**kept, AUX_LAYER_KEY: list(layers), "eagle_config": {**nested, AUX_LAYER_KEY: outputs}}


def drop_empty_taps(config: dict[str, Any]) -> None:
    """Drop empty lists of tap layers: the default for every reader but SGLang, which would capture no layer at all."""
    for name in TAP_KEYS[""]:
        if config.get(name) == []:
            del config[name]
    if nested := config.get("eagle_config"):
        known = TAP_KEYS["eagle_config"]
        config["eagle_config"] = {name: value for name, value in nested.items() if value != [] or name not in known}


def layer_ids(value: Any, where: str, key: str, lowest: int) -> tuple[int, ...]:
    """Check the layers under a key, or given with `TAPS_FLAG`: ascending from `lowest`, else MismatchError."""
    # Engines capture a layer once, on the way through the target.
    is_right = isinstance(value, list | tuple) and all(type(layer) is int for layer in value)
    if is_right and sorted(set(value)) == list(value) and all(lowest <= layer < 2**31 for layer in value):
        return tuple(value)
    advice = "" if key == TAPS_FLAG else f"\nSay which are right with {TAPS_FLAG}."
    problem = f"{key}: expected ascending layer numbers from {lowest} on, each once, found {value!r}.{advice}"
    raise MismatchError.at(where, problem)


def _named(config: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Yield the object, key and value of every entry that names tap layers, or looks as if it did."""
    for place, known in TAP_KEYS.items():
        for name, value in section(config, place).items():
            lower = name.lower()
            is_like_one = "layer" in lower and any(word in lower for word in _LIKE_TAPS)
            if (name in known and value not in (None, [])) or (is_like_one and _is_list_of_numbers(value)):
                yield place, name, value


def _is_list_of_numbers(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(type(each) is int for each in value)
