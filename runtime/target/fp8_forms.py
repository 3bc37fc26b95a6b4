"""Forms of published FP8 checkpoints: what a ``quantization_config`` says of the weights' scales.

Each form is read by a list of the settings that it may have; any other setting, or value, is refused by name. The files
say by their dtypes which modules are in FP8, so the lists of modules that were left out are not read. Layouts:
``weight_scale_inv`` and blocks as transformers' finegrained FP8 writes them, ``weight_scale`` as compressed-tensors,
FBGEMM and ModelOpt do. Both multiply the values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import TargetError, brief
from .fp8 import SCALE_BLOCK

_BLOCK = [SCALE_BLOCK, SCALE_BLOCK]
_SCALES = {"tensor": "one scale a matrix", "channel": "one scale a row", "block": "one scale a block of 128 x 128"}


@dataclass(frozen=True)
class Fp8Form:
    """Scales of a target's weights in FP8."""

    method: str | None
    """The ``quant_method`` of a published checkpoint; None quantises a model in a float type while it is loaded."""
    strategy: str
    """"tensor", "channel" (an output row) or "block" (128 x 128)."""

    def __str__(self) -> str:
        source = "quantised while loading" if self.method is None else f"as published ({self.method})"
        return f"{source}, {_SCALES[self.strategy]}"


AT_LOAD = Fp8Form(None, "channel")
Settings = Mapping[str, tuple[Any, ...]]
"""The settings that a form may have, with their values; no value of a setting without any changes what weights are."""


def _free(*names: str) -> Settings:
    return dict.fromkeys(names, ())


_FORMATS = (None, "float-quantized", "naive-quantized")
_GROUP: Settings = {"format": _FORMATS, **_free("weights", "targets", "input_activations", "output_activations")}
_WEIGHTS: Settings = {
    "num_bits": (8,),
    "type": ("float",),
    "symmetric": (None, True),
    "dynamic": (None, False),
    "strategy": (None, *_SCALES),
    "group_size": (None, -1),
    "block_structure": (None, _BLOCK, "128x128"),
    "actorder": (None,),
    **_free("scale_dtype", "zp_dtype", "observer", "observer_kwargs"),
}
_METHODS: dict[str, Settings] = {
    "fp8": {
        "fmt": (None, "e4m3"),
        "weight_block_size": (None, _BLOCK),
        "scale_fmt": (None, "float"),
        "dequantize": (None, False),
        "modules_to_convert": (None, []),
        "activation_scheme": (None, "dynamic", "static"),
        **_free("expert_dtype", "modules_to_not_convert", "ignored_layers", "kv_cache_scheme"),
    },
    "compressed-tensors": {
        "format": (*_FORMATS, "dense"),
        "transform_config": (None, {}),
        **_free("config_groups", "ignore", "kv_cache_scheme", "quantization_status", "global_compression_ratio"),
        **_free("version", "sparsity_config"),
    },
    "fbgemm_fp8": _free("activation_scale_ub", "modules_to_not_convert"),
    "modelopt": {
        "quant_algo": (None, "FP8", "FP8_PER_CHANNEL_PER_TOKEN"),
        "group_size": (None,),
        "quantized_layers": (None, {}),
        **_free("config_groups", "ignore", "exclude_modules", "kv_cache_scheme", "kv_cache_quant_algo", "producer"),
        **_free("quantization", "kv_cache_quantized_layers"),
    },
}
"""By ``quant_method``."""


def read_form(settings: Mapping[str, Any] | None, where: str) -> Fp8Form | None:
    """Read a ``quantization_config``, or ModelOpt's hf_quant_config.json; None where no weight is quantised.

    ``where``: the target, for messages. Raises `TargetError` for any other quantisation, and for settings unknown here.
    """
    if not settings:
        return None
    # ModelOpt's own file has its settings one level deeper, and no method; versions about 0.29 wrote a library for it.
    settings = {**settings, **_object(settings, "quantization", where)}
    library = settings.pop("quant_library", "modelopt" if "quantization" in settings else None)
    method = settings.pop("quant_method", library)
    if not isinstance(method, str) or method not in _METHODS:
        raise _refused(where, f"quant_method = {brief(method)}")
    _check(settings, _METHODS[method], f"{method}: ", where)
    if method == "fp8":
        return Fp8Form(method, "block" if settings.get("weight_block_size") else "tensor")
    if method == "fbgemm_fp8":
        return Fp8Form(method, "channel")
    if method == "modelopt":
        algorithm = settings.get("quant_algo")
        return Fp8Form(method, "tensor" if algorithm == "FP8" else "channel") if algorithm else None
    sparsity = {"format": _object(settings, "sparsity_config", where).get("format")}
    _check(sparsity, {"format": (None, "dense")}, f"{method}: sparsity_config.", where)
    return _read_groups(_object(settings, "config_groups", where), where)


def _read_groups(groups: Mapping[str, Any], where: str) -> Fp8Form | None:
    """Read the groups of compressed-tensors, which must agree on the scales of weights."""
    strategies = set()
    for name in groups:
        group = _object(groups, name, where)
        _check(group, _GROUP, f"compressed-tensors: {name}.", where)
        weights = _object(group, "weights", where)
        if not weights:
            raise _refused(where, f"compressed-tensors: {name} without weights")
        _check(weights, _WEIGHTS, f"compressed-tensors: {name}.weights.", where)
        strategies.add(weights.get("strategy") or "tensor")
    if len(strategies) > 1:
        raise _refused(where, f"compressed-tensors: config_groups of strategies {', '.join(sorted(strategies))}")
    return Fp8Form("compressed-tensors", strategies.pop()) if strategies else None


def _object(settings: Mapping[str, Any], name: str, where: str) -> Mapping[str, Any]:
    """Return a setting that is an object, empty if it is none; anything else is refused."""
    value = settings.get(name) or {}
    if not isinstance(value, Mapping):
        raise _refused(where, f"{name} = {brief(value)}")
    return value


def _check(settings: Mapping[str, Any], known: Settings, prefix: str, where: str) -> None:
    for name, value in settings.items():
        if value is not None and (name not in known or (known[name] and value not in known[name])):
            raise _refused(where, f"{prefix}{name} = {brief(value)}")


def _refused(where: str, found: str) -> TargetError:
    return TargetError(
        f"Target {where}: its quantization_config says {found}, which is not read here. Expected are weights in FP8 "
        f"(e4m3) of {', '.join(_METHODS)}, symmetric, scaled by matrix, row or blocks of 128 x 128. Take another form "
        "of the model, or load it with transformers and pass it to from_pretrained (in Python)."
    )
