"""Read a target's files with transformers: configuration, form of its FP8 weights, weights, tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import torch
from eagle_slim.vocab_tools.errors import EagleSlimError, MissingTokenizerFileError
from eagle_slim.vocab_tools.files import read_object
from eagle_slim.vocab_tools.hub import keep_limit, trouble_of
from eagle_slim.vocab_tools.tokenizer import LoadedTokenizer, load_tokenizer
from torch import nn

from ..errors import DeviceMemoryError, TargetError, UsageError, check_choice
from ..ops import lacks_fp8
from ..target.fp8_forms import AT_LOAD, Fp8Form, read_form
from ..target.fp8_loading import MIXTURES, UNREAD, fetch_target, load_by_tensor
from .devices import dtype_on_cpu

Dtype = torch.dtype | None
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


@contextmanager
def _naming(target: str | Path) -> Iterator[None]:
    keep_limit()
    try:
        yield
    except (EagleSlimError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        said = str(error) if isinstance(error, (OSError, ValueError)) else f"{type(error).__name__}: {error}"
        # Without transformers' list of every model type it knows.
        reason = " ".join(said.split("\nModel type should be one of")[0].split()).rstrip(".")
        if "trust_remote_code" in reason:
            reason = "its class is code beside its files (auto_map), never run here, and transformers has none for it"
        folder = "" if Path(target).exists() else "there is no such folder here, and "
        # Nothing of a folder is fetched, so the Hub cannot be the reason there.
        if folder and isinstance(error, OSError) and (trouble := trouble_of(error, str(target))).is_unreachable:
            raise TargetError(f"Target {target}: {folder}{trouble}") from error
        raise TargetError(
            f"Target {target}: {folder}transformers cannot load it ({reason}). Expected the folder of a causal "
            "language model, or its repository on the Hub (name/model). A model of another class, such as a "
            "vision-language one, has to be loaded by you and passed to from_pretrained (in Python)."
        ) from error


def load_target_config(target: str | Path, revision: str | None, offline: bool) -> Any:
    """Load a target's configuration. Raises `TargetError`."""
    from transformers import AutoConfig

    with _naming(target):
        # Never code of the folder: without this transformers asks on stdin, which may be the prompt.
        return AutoConfig.from_pretrained(target, revision=revision, local_files_only=offline, trust_remote_code=False)


def check_target_weights(target_weights: str, is_loaded: bool, device: torch.device, dtype: Dtype) -> None:
    """Raise `UsageError` for an unknown name, and for "fp8" with a loaded model, device or type that cannot have it."""
    check_choice("target_weights", target_weights, ("auto", "fp8"))
    if target_weights == "fp8":
        reason = "quantises while a target is loaded, and this one is" if is_loaded else _unfit_for_fp8(device, dtype)
        if reason is not None:
            raise UsageError(f"target_weights = 'fp8' {reason}. Leave target_weights out.")


def _unfit_for_fp8(device: torch.device, dtype: Dtype) -> str | None:
    """Return why weights in FP8 cannot be, as the end of a sentence; ``dtype``: of all else, None if not known yet."""
    if dtype not in (None, torch.bfloat16, torch.float16):
        return f"goes with activations in bfloat16 or float16, and these are in {dtype} (see dtype)"
    return lacks_fp8(device)


def choose_form(
    target: Path | str, config: Any, asked: str, dtype: Dtype, device: torch.device, revision: str | None, offline: bool
) -> Fp8Form | None:
    """Return how a target's weights are in FP8: as published, or quantised where it was ``asked`` for; None: not.

    A ``quantization_config`` that is read or quantises nothing leaves ``config``. Raises `TargetError` for other forms.
    """
    from transformers.utils import cached_file, has_file

    settings, name = getattr(config, "quantization_config", None), "hf_quant_config.json"
    if not settings:
        where: dict[str, Any] = {"revision": revision, "local_files_only": offline}
        with _naming(target):
            file = cached_file(target, name, **where) if has_file(str(target), name, **where) else None
        settings = None if file is None else read_object(Path(file), TargetError)
    if config.model_type == "gpt_oss":
        if asked == "fp8":
            raise TargetError(f"Target {target}: gpt-oss has no forward for weights in FP8. Leave target_weights out.")
        if (settings or {}).get("quant_method") == "mxfp4":
            # Names of tensors say what is packed, and transformers, which loads adapters, reads the settings.
            return None
    form = read_form(settings, str(target))
    vars(config).pop("quantization_config", None)
    if form is not None and (reason := _unfit_for_fp8(device, dtype)) is not None:
        raise TargetError(
            f"Target {target}: it is published in FP8 ({form.method}), which {reason}. Take the model that it was made "
            "from, or load it with transformers, which may dequantise it, and pass it to from_pretrained (in Python)."
        )
    return AT_LOAD if form is None and asked == "fp8" else form


def load_target(
    target: str | Path,
    dtype: Dtype,
    device: torch.device,
    revision: str | None,
    offline: bool,
    config: Any = None,
    form: Fp8Form | None = None,
) -> nn.Module:
    """Load a causal LM in evaluation mode. Raises `TargetError`, and `DeviceMemoryError` where it does not fit."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import is_peft_available
    from transformers.utils.peft_utils import find_adapter_config_file

    wanted: Any = dtype
    weights = "in FP8"
    if form is not None:
        wanted = dtype or config.dtype
        reason = _unfit_for_fp8(device, wanted) if wanted else "names no type in its config.json"
        if reason is not None:
            name = f"Target {target}, whose weights are to be in FP8,"
            raise TargetError(f"{name} {reason}. Load it with dtype='bfloat16'.")
    try:
        with _naming(target):
            config = config or load_target_config(target, revision, offline)
            is_mixture, takes_adapters = config.model_type in MIXTURES, form is None and is_peft_available()
            where: dict[str, Any] = {"revision": revision, "local_files_only": offline}
            adapter = None if takes_adapters and not is_mixture else find_adapter_config_file(target, **where)
            if adapter and not takes_adapters:
                needs = "the package peft" if form is None else "a target that is not in FP8"
                raise ValueError(f"it has an adapter (adapter_config.json), which needs {needs}; or merge it first")
            if dtype is None and form is None and device.type == "cpu":
                wanted = dtype_on_cpu(config)
            stored = config.dtype if wanted in (None, "auto") else wanted
            if form is not None or (is_mixture and not adapter):
                weights = weights if form is not None else f"in {str(stored or 'their type').removeprefix('torch.')}"
                return load_by_tensor(fetch_target(target, revision, offline), config, form, stored, device)
            model, found = AutoModelForCausalLM.from_pretrained(
                target,
                config=config,
                dtype=wanted or "auto",
                trust_remote_code=False,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                **where,
            )
            # transformers draws such weights at random.
            if drawn := [*found["missing_keys"], *(name for name, *_ in found["mismatched_keys"])]:
                problem = "are missing, or have other shapes than its config.json says"
                raise ValueError(f"{len(drawn)} tensors, such as {min(drawn)}, {problem}")
            # It does without these: a bias, or scales whose weights it then takes unscaled.
            modules, surplus = dict(model.named_modules()), found["unexpected_keys"]
            if left := [each for each in surplus if each.rpartition(".")[0] in modules and not each.endswith(UNREAD)]:
                problem = "belong to layers that have none by its config.json, which may lack a quantization_config"
                raise ValueError(f"{len(left)} tensors, such as {min(left)}, {problem}")
        needed = sum(weight.nbytes for weight in model.parameters())
        weights = f"{needed / 1e9:.1f} GB in {str(model.dtype).removeprefix('torch.')}"
        return cast(nn.Module, model.to(device).eval())
    except torch.OutOfMemoryError as error:
        reason = str(error).partition(". ")[0]
    raise DeviceMemoryError(
        f"Target {target}: its weights are {weights}, and the memory of {device} does not suffice ({reason}). Load it "
        "in a narrower type (dtype, target_weights), take a smaller target or another device, or free memory there."
    )


def load_tokenizer_and_hash(
    target: str | Path, revision: str | None, offline: bool, is_needed: bool = True
) -> tuple[Any | None, str | None]:
    """Load a target's tokenizer and its hash; (None, None) for a local folder without a tokenizer.

    One that is not needed is loaded for its hash alone, where no tokenizer.json gives that.
    """
    folder = Path(target)
    if folder.is_dir() and not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        return None, None
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    loaded: LoadedTokenizer | None = None
    # From files of another form, such as SentencePiece's, transformers makes one.
    with suppress(MissingTokenizerFileError):
        loaded = load_tokenizer(str(target), revision=revision, offline=offline)
        if not is_needed:
            return None, loaded.tokenizer_hash
    where: dict[str, Any] = {"revision": revision, "local_files_only": offline}
    with _naming(target):
        try:
            tokenizer = AutoTokenizer.from_pretrained(target, **where, trust_remote_code=False)
        except ValueError as error:
            if "trust_remote_code" not in str(error):
                raise
            # A class that only code of the folder has; its tokenizer.json, which is loaded above, needs none.
            tokenizer = PreTrainedTokenizerFast.from_pretrained(target, **where)
    if loaded is None and (backend := getattr(tokenizer, "backend_tokenizer", None)) is not None:
        loaded = LoadedTokenizer(backend, str(target))
    return tokenizer, None if loaded is None else loaded.tokenizer_hash
