"""Options of a call by transformers' names: keywords, then a given `GenerationConfig`, then the target's own penalties.

What is not served is refused by name: a keyword, a field of a given configuration, and a field of the target's own
configuration that would change greedy decoding. A keyword of None asks for nothing, a field of None is not given.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from ..errors import SamplingWarning, UsageError, misfit
from ..settings import MAX_NEW_TOKENS, SamplingConfig
from ..target.wrapper import TargetModel
from .prompts import check_prompts, read_prompts, read_token_id
from .request import Request
from .sampling import PENALTIES, build_processors, noise_keys

DEFAULT_MAX_NEW_TOKENS = 256
SAMPLING = ("temperature", "top_k", "top_p", "min_p")
_ENDS = ("max_new_tokens", "max_length", "max_time", "eos_token_id", "stop_strings")
_OF_ROWS = ("pad_token_id", "num_return_sequences", "return_dict_in_generate")
_SERVED = ("do_sample", *SAMPLING, *PENALTIES, *_ENDS, *_OF_ROWS)
"""Fields of a `GenerationConfig`."""
_CALLABLES = ("stopping_criteria", "logits_processor")
_OURS = ("attention_mask", "tokenizer", "generation_config", "seed", "stop", "ignore_eos", *_CALLABLES)
"""Further arguments of `generate`."""
_OF_CACHES = ("use_cache", "cache_", "max_cache_", "return_legacy_cache", "prefill_chunk_size", "low_memory")
_OF_DRAFTS = ("is_assistant", "assistant_", "num_assistant_", "target_lookbehind")
_OF_OTHERS = ("_", "bos_token_id", "decoder_start_token_id", "early_stopping", "length_penalty", "transformers_version")
_WITHOUT_EFFECT = (*_OF_CACHES, *_OF_DRAFTS, *_OF_OTHERS, "compile_", "disable_compile")
"""Beginnings of the names of fields that change no token."""
_OFF_AT_ONE = ("num_beams", "num_beam_groups", "guidance_scale", "typical_p", "encoder_repetition_penalty")
_OF_LENGTHS = ("min_length", "forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty")
_OF_LOGITS = ("guidance_scale", "begin_suppress_tokens", "sequence_bias", "renormalize_logits", "watermarking_config")
_OF_ENCODERS = ("encoder_repetition_penalty", "encoder_no_repeat_ngram_size")
_OF_MODES = ("num_beams", "penalty_alpha", "dola_layers", "token_healing")
_ON_GREEDY = (*_OF_LENGTHS, *_OF_LOGITS, *_OF_ENCODERS, *_OF_MODES)
"""Fields of the target's own configuration that would change greedy decoding."""
_AS_IT_IS = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
_PROCESSORS = " What changes logits can be given as a logits_processor, what a chat template makes as token ids."
_WITHOUT_WARNING = {"temperature": (0.0, 1.0), "top_k": (0, 50), "top_p": (1.0,), "min_p": (0.0,)}
"""Values that transformers takes without a warning in greedy decoding."""


@dataclass(frozen=True)
class Call:
    """A call, read and checked."""

    requests: list[Request]
    sampling: SamplingConfig
    options: Mapping[str, Any]
    rows: list[tuple[int, ...]]
    """The prompts as they were given, padding included."""
    device: torch.device
    """The given tensor's; the CPU for anything else."""
    fill: int
    """Id that fills ``sequences`` where an answer has ended."""
    seed: int | tuple[int, ...] | None


def read_call(
    target: TargetModel, tokenizer: Any | None, context_limit: int | None, input_ids: Any, keywords: Mapping[str, Any]
) -> Call:
    """Read the arguments of `SpeculativeModel.generate` that say what to generate. Raises as that does."""
    given = {name: keywords.get(name) for name in _OURS}
    stop = given["stop"]
    fields = {name: value for name, value in keywords.items() if name not in _OURS}
    tokenizer = tokenizer if given["tokenizer"] is None else read_tokenizer(given["tokenizer"])
    options = join_options(target.generation_config, given["generation_config"], fields)
    # Properties of transformers' models take a while, and a server reads many calls.
    text_config, device = target.text_config, target.device
    configs = (target.generation_config, text_config)
    target_ends = _read_ids("eos_token_id", *(getattr(config, "eos_token_id", None) for config in configs))
    no_end = fields.get("eos_token_id", ()) is None
    ends = [] if no_end else _read_ids("eos_token_id", options.get("eos_token_id"), target_ends)
    vocab = int(text_config.vocab_size)
    # No token has ids outside the vocabulary, so they end nothing.
    eos = frozenset(token for token in ends if 0 <= token < vocab)
    if given["ignore_eos"] is not None and read_flag("ignore_eos", given["ignore_eos"]):
        eos = frozenset()
    target_pads = (getattr(config, "pad_token_id", None) for config in configs)
    pads = _read_ids("pad_token_id", options.get("pad_token_id"), *target_pads)
    padding = (pads[0], pads[0] in (*eos, *target_ends)) if pads else None
    prompts = read_prompts(input_ids, given["attention_mask"], padding, tokenizer)
    seeds = _read_seeds(given["seed"], len(prompts))
    sampling = read_sampling(options, fields, given["seed"] if seeds is None else seeds[0])
    repeats = read_count("num_return_sequences", options.get("num_return_sequences", 1), 1)
    if repeats > 1 and sampling.is_greedy:
        raise UsageError(f"num_return_sequences = {repeats} needs a temperature: greedy answers to a prompt are equal.")
    prompts = [prompt for prompt in prompts for _ in range(repeats)]
    shared: dict[str, Any] = {
        "eos_ids": eos,
        "context_limit": context_limit,
        "stop": _read_stop(options.get("stop_strings") if stop is None else stop, tokenizer is not None),
        "decode": (lambda ids: str(tokenizer.decode(ids, **_AS_IT_IS))) if tokenizer else None,
        "criteria": _read_callables("stopping_criteria", given["stopping_criteria"]),
        "deadline": _read_deadline(options.get("max_time")),
        "device": device,
    }
    if stop is not None and keywords.get("stop_strings") is not None:
        raise UsageError("stop is stop_strings: give it once.")
    processors, requests = _read_callables("logits_processor", given["logits_processor"]), []
    for index, (row, prompt) in enumerate(prompts):
        # As in transformers, a length of prompt and answer together counts the padding that was given.
        new = _read_max_new_tokens(options, len(row))
        process = build_processors(options, len(prompt), eos, vocab, processors, device)
        requests.append(Request(index // repeats, prompt, new, process=process, **shared))
    check_prompts(requests, target.embedding.shape[0])
    for index, request in enumerate(() if sampling.is_greedy else requests):
        # With a seed of its own a prompt's draws are those that it would have alone in its call.
        stream = (sampling.seed, index)
        if seeds is not None:
            stream = (seeds[request.index], index % repeats)
        # For the room in the context, and for one path more: a pass may accept tokens beyond the answer's end.
        request.keys = noise_keys(*stream, request.max_tokens - len(request.prompt_ids) + MAX_NEW_TOKENS)
    seed = None if sampling.is_greedy else int(sampling.seed) if seeds is None else seeds
    ids = input_ids["input_ids"] if isinstance(input_ids, Mapping) else input_ids
    given_on = ids.device if isinstance(ids, Tensor) else torch.device("cpu")
    return Call(requests, sampling, options, [row for row, _ in prompts], given_on, (*pads, *ends, 0)[0], seed)


def join_options(
    target_config: GenerationConfig | None, given: GenerationConfig | None, keywords: Mapping[str, Any]
) -> dict[str, Any]:
    """Join what was given with the target's own penalties and stop strings. Raises `UsageError` for others."""
    if given is not None and not isinstance(given, GenerationConfig):
        raise misfit("generation_config", "transformers' GenerationConfig", given)
    for name in _ON_GREEDY:
        if not _asks_nothing(name, getattr(target_config, name, None)):
            raise UsageError(
                f"The target's own generation_config asks for {name}, which is not served; set it to None.{_PROCESSORS}"
            )
    known = vars(GenerationConfig())
    joined = {name: getattr(target_config, name, None) for name in (*PENALTIES, "stop_strings")}
    # Names in a configuration that transformers does not know belong to other software.
    fields = {} if given is None else {name: value for name, value in vars(given).items() if name in known}
    for name, value in [*fields.items(), *keywords.items()]:
        if name not in known:
            near = get_close_matches(name, ("input_ids", *_SERVED, *_OURS), n=1)
            hint = f" Did you mean {near[0]}?" if near else _PROCESSORS
            raise UsageError(f"There is no option {name!r}.{hint}")
        if name in _SERVED:
            joined[name] = joined.get(name) if value is None and name not in keywords else value
        elif not _asks_nothing(name, value):
            raise UsageError(f"The option {name!r} is not served.{_PROCESSORS}")
    return {name: value for name, value in joined.items() if value is not None}


def _asks_nothing(name: str, value: Any) -> bool:
    """Return whether a field that is not served has no effect, or is off; True is not 1, nor False 0."""
    if value is None or value is False or name.startswith(_WITHOUT_EFFECT):
        return True
    return type(value) in (int, float) and value == (1 if name in _OFF_AT_ONE else 0)


def read_flag(name: str, value: Any) -> bool:
    """Return True or False; nothing else is a truth value. Raises `UsageError`."""
    if not isinstance(value, bool):
        raise misfit(name, "True or False", value)
    return value


def read_count(name: str, value: Any, least: int) -> int:
    """Return a whole number of at least ``least``; numpy's integers count, True does not. Raises `UsageError`."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise misfit(name, f"an integer of at least {least}", value)
    return int(value)


def read_tokenizer(given: Any) -> Any:
    """Return a tokenizer. Raises `UsageError` for anything else, such as the name of one."""
    if isinstance(given, type) or not (callable(given) and hasattr(given, "decode")):
        raise misfit("tokenizer", "a loaded tokenizer of transformers", given)
    return given


def read_sampling(options: Mapping[str, Any], keywords: Mapping[str, Any], seed: int | None) -> SamplingConfig:
    """Read how to sample from joined options (`join_options`); where ``keywords`` disagree, ``do_sample`` wins.

    Sampling draws a seed where it is None. Greedy decoding ignores what only sampling reads, with a `SamplingWarning`
    for keywords that would change something. Raises `UsageError` for numbers out of range.
    """
    temperature, do_sample = keywords.get("temperature"), keywords.get("do_sample")
    if do_sample is None and temperature is None:
        do_sample = options.get("do_sample")
    is_hot = temperature is not None and not SamplingConfig(temperature=temperature).is_greedy
    samples = is_hot if do_sample is None else read_flag("do_sample", do_sample)
    named = options if samples else keywords
    given = {name: named[name] for name in SAMPLING if named.get(name) is not None}
    sampling = SamplingConfig(**{"temperature": 1.0, **given}, seed=0 if seed is None else seed)
    if samples and sampling.is_greedy:
        raise UsageError("do_sample=True needs a temperature above 0. Leave temperature out for 1.0.")
    if samples:
        return replace(sampling, seed=int(torch.randint(2**63 - 1, ()))) if seed is None else sampling
    ignored = [f"{name}={value}" for name, value in given.items() if value not in _WITHOUT_WARNING[name]]
    if ignored:
        message = f"{', '.join(ignored)} acts on sampling alone. Give a temperature above 0 to sample."
        warnings.warn(f"Decoding is greedy: {message}", SamplingWarning, stacklevel=5)
    return SamplingConfig(seed=sampling.seed)


def _read_stop(stop: Any, has_tokenizer: bool) -> tuple[str, ...]:
    given = stop.tolist() if hasattr(stop, "tolist") else () if stop is None else stop
    stops = tuple(given) if isinstance(given, Iterable) and not isinstance(given, (str, Mapping)) else (given,)
    if stops and not has_tokenizer:
        raise UsageError("stop strings need a tokenizer. Load the model with one.")
    if not all(isinstance(text, str) and text for text in stops):
        raise misfit("stop", "texts of at least one letter", list(stops))
    return stops


def _read_seeds(seed: Any, num_prompts: int) -> tuple[int, ...] | None:
    seeds = seed.tolist() if hasattr(seed, "tolist") else seed
    if not isinstance(seeds, Sequence) or isinstance(seeds, str):
        return None
    if len(seeds) != num_prompts:
        raise misfit("seed", f"an integer, or a list of one for each of {num_prompts} prompts", seed)
    return tuple(int(SamplingConfig(seed=each).seed) for each in seeds)


def _read_deadline(max_time: Any) -> float | None:
    if max_time is None:
        return None
    if isinstance(max_time, bool) or not isinstance(max_time, Real) or not float(max_time) > 0:
        raise misfit("max_time", "a number of seconds above 0", max_time)
    return time.monotonic() + float(max_time)


def _read_callables(name: str, given: Any) -> tuple[Callable[[Tensor, Any], Any], ...]:
    """Return one callable, or a list of them such as a `StoppingCriteriaList` of transformers, as a tuple."""
    calls = [given] if callable(given) and not isinstance(given, Sequence) else () if given is None else given
    # A class would make an object of what it is called with.
    if not isinstance(calls, Sequence) or not all(callable(each) and not isinstance(each, type) for each in calls):
        raise misfit(name, "a list of callables of (input_ids, scores), as in transformers", given)
    return tuple(calls)


def _read_max_new_tokens(options: Mapping[str, Any], prompt_length: int) -> int:
    if "max_new_tokens" in options:
        return read_count("max_new_tokens", options["max_new_tokens"], 0)
    if "max_length" not in options:
        return DEFAULT_MAX_NEW_TOKENS
    length = read_count("max_length", options["max_length"], 0)
    if length < prompt_length:
        raise UsageError(
            f"max_length = {length} counts the prompt's {prompt_length} tokens, too. Give max_new_tokens in its place."
        )
    return length - prompt_length


def _read_ids(name: str, *given: Any) -> list[int]:
    """Return the first of ``given`` that is not None, an id or a list, set or tensor of them, as a list; else []."""
    ids: Any = next((each for each in given if each is not None), [])
    values = ids.tolist() if hasattr(ids, "tolist") else ids
    return [read_token_id(token, name) for token in (values if isinstance(values, Iterable) else [values])]
