"""Reading the arguments of `generate`: numbers, token ids, stop strings, lengths, and how to sample."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from ..errors import SamplingWarning, UsageError, misfit
from ..settings import SamplingConfig
from .options import SAMPLING

DEFAULT_MAX_NEW_TOKENS = 256
_WITHOUT_EFFECT = {
    "temperature": (1.0,), "top_k": (0, 50), "top_p": (1.0,), "min_p": (0.0,), "typical_p": (1.0,),
}  # fmt: skip
"""Values beside greedy decoding of which transformers does not warn."""


def read_count(name: str, value: Any, least: int) -> int:
    """Return a whole number of at least ``least``; numpy's integers count, True does not. Raises `UsageError`."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise misfit(name, f"an integer of at least {least}", value)
    return int(value)


def read_token_id(token: Any) -> int:
    """Return a token id as a plain integer. Raises `UsageError` for anything that is no integer."""
    if isinstance(token, bool) or not isinstance(token, Integral):
        raise UsageError(
            f"Token ids are integers, in lists or in a tensor of at most two dimensions; got {token!r}.", found=token
        )
    return int(token)


def read_id_set(ids: int | Iterable[int] | None) -> frozenset[int]:
    """Return one id or many (a list, a set, a tensor) as a set; None is the empty set. Raises `UsageError`."""
    if ids is None:
        return frozenset()
    values = ids.tolist() if hasattr(ids, "tolist") else ids
    return frozenset(read_token_id(token) for token in (values if isinstance(values, Iterable) else [values]))


def read_tokenizer(given: Any) -> Any:
    """Return a tokenizer. Raises `UsageError` for what is none, such as the name of one."""
    if not callable(given) or not hasattr(given, "decode"):
        raise misfit("tokenizer", "a loaded tokenizer of transformers", given)
    return given


def read_stop_strings(stop: str | Sequence[str] | None, has_tokenizer: bool) -> tuple[str, ...]:
    """Return the stop strings. Raises `UsageError` for an empty one, and for any without a tokenizer."""
    stops = tuple(stop or ()) if isinstance(stop, Iterable | None) and not isinstance(stop, str) else (stop,)
    if stops and not has_tokenizer:
        raise UsageError("Stop strings need a tokenizer. Load the model with one.", option="stop", missing="tokenizer")
    if not all(isinstance(text, str) and text for text in stops):
        raise UsageError(
            f"Stop strings are texts of at least one letter; got {list(stops)!r}.", option="stop", found=list(stops)
        )
    return stops


def read_seeds(seeds: Any, seed: int | None, num_prompts: int) -> tuple[int, ...] | None:
    """Return a seed for each prompt; None where none was given. Raises `UsageError`, also beside ``seed``."""
    if seeds is None:
        return None
    found = seeds.tolist() if hasattr(seeds, "tolist") else seeds
    if seed is not None or not isinstance(found, Sequence) or isinstance(found, str) or len(found) != num_prompts:
        raise misfit("seeds", f"a list of a seed for each of {num_prompts} prompts, and seed left out", seeds)
    return tuple(int(SamplingConfig(seed=each).seed) for each in found)


def read_seconds(name: str, value: Any) -> float:
    """Return a number of seconds above 0. Raises `UsageError`."""
    if isinstance(value, bool) or not isinstance(value, Real) or not float(value) > 0:
        raise misfit(name, "a number of seconds above 0", value)
    return float(value)


def read_criteria(criteria: Any) -> tuple[Callable[[Tensor, Any], Any], ...]:
    """Return stopping criteria: one callable, or a list of them such as a `StoppingCriteriaList`."""
    given = [criteria] if callable(criteria) and not isinstance(criteria, Sequence) else criteria or ()
    if not isinstance(given, Sequence) or not all(callable(criterion) for criterion in given):
        raise UsageError(
            "stopping_criteria is a list of callables of (input_ids, scores), as in transformers.",
            option="stopping_criteria",
        )
    return tuple(given)


def read_max_new_tokens(options: Mapping[str, Any], prompt_length: int) -> int:
    """Return how many tokens to add to a prompt: ``max_new_tokens``, else what ``max_length`` leaves, else 256.

    Raises `UsageError` for a ``max_length`` below the prompt's length, and for numbers that are out of range.
    """
    if "max_new_tokens" in options:
        return read_count("max_new_tokens", options["max_new_tokens"], 0)
    if "max_length" not in options:
        return DEFAULT_MAX_NEW_TOKENS
    length = read_count("max_length", options["max_length"], 0)
    if length < prompt_length:
        raise UsageError(
            f"max_length = {length} counts prompt and answer together, and the prompt alone has {prompt_length} "
            "tokens. Give max_new_tokens to limit the answer alone.",
            option="max_length", expected=prompt_length, found=length,
        )  # fmt: skip
    return length - prompt_length


def read_sampling(options: Mapping[str, Any], keywords: Mapping[str, Any], seed: int | None) -> SamplingConfig:
    """Read how to sample from joined options (`join_options`); of contradicting ``keywords`` ``do_sample`` counts.

    Greedy unless a keyword or a configuration that was given asks for sampling, which draws a seed where it is None,
    from PyTorch's generator, which `torch.manual_seed` sets. Raises `UsageError`.
    """
    named = {name: keywords.get(name) for name in ("do_sample", *SAMPLING)}
    if named["do_sample"] is None and named["temperature"] is None:
        named["do_sample"] = options.get("do_sample")
    first = sampling_config(**named, seed=0 if seed is None else seed)
    if first.is_greedy:
        return SamplingConfig(seed=first.seed)
    found = {name: options[name] for name in SAMPLING if name in options}
    sampling = sampling_config(do_sample=True, **found, seed=first.seed)
    return replace(sampling, seed=int(torch.randint(2**63 - 1, ())) if seed is None else seed)


def sampling_config(
    do_sample: bool | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    seed: int = 0,
    min_p: float | None = None,
    typical_p: float | None = None,
) -> SamplingConfig:
    """Read sampling arguments as `SpeculativeModel.generate` does.

    Greedy decoding ignores what only sampling reads, with a `SamplingWarning` where transformers warns: for values
    that would change something. Raises `UsageError` for numbers out of range, and for sampling at temperature 0.
    """
    if do_sample not in (None, False, True):
        raise misfit("do_sample", "True or False", do_sample)
    cuts = {"top_p": top_p, "top_k": top_k, "min_p": min_p, "typical_p": typical_p}
    given: dict[str, Any] = {name: value for name, value in cuts.items() if value is not None}
    is_cold = temperature is not None and temperature == 0
    if do_sample and is_cold:
        raise UsageError(
            "do_sample=True needs a temperature above 0. Leave temperature out for 1.0.",
            option="temperature", found=temperature,
        )  # fmt: skip
    sampling = SamplingConfig(1.0 if temperature is None or is_cold else temperature, seed=seed, **given)
    if do_sample or (do_sample is None and temperature):
        return sampling
    ignored = [name for name, quiet in _WITHOUT_EFFECT.items() if getattr(sampling, name) not in quiet]
    if ignored:
        warnings.warn(
            f"Decoding is greedy: {', '.join(f'{name}={getattr(sampling, name)}' for name in ignored)} acts on "
            "sampling alone. Give do_sample=True or a temperature above 0 to sample.",
            SamplingWarning,
            stacklevel=5,
        )
    return SamplingConfig(seed=seed)
