"""One call of `generate`, read: its prompts as requests, how to sample, and what the caller wants back."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

from ..errors import UsageError
from ..settings import SamplingConfig
from ..target.wrapper import TargetModel
from .arguments import (
    read_count,
    read_criteria,
    read_id_set,
    read_max_new_tokens,
    read_sampling,
    read_seconds,
    read_seeds,
    read_stop_strings,
    read_token_id,
    read_tokenizer,
)
from .options import OURS, build_processors, join_options, without_padding
from .prompts import ReadPrompts, check_prompts, read_prompts
from .requests import Request
from .sampling import LogitRecord


@dataclass(frozen=True)
class Call:
    """A call, read and checked."""

    requests: list[Request]
    sampling: SamplingConfig
    options: Mapping[str, Any]
    """Fields of a `GenerationConfig` that are set, by name (`join_options`)."""
    read: ReadPrompts
    fill: int
    """What fills ``sequences`` where an answer has ended."""
    seeds: tuple[int, ...] | None
    """Of each prompt, where they were given."""


def own_eos_ids(target: TargetModel) -> frozenset[int]:
    """End-of-sequence ids of a target's generation configuration, else of its configuration."""
    found = getattr(target.generation_config, "eos_token_id", None)
    return read_id_set(getattr(target.text_config, "eos_token_id", None) if found is None else found)


def read_call(
    target: TargetModel, tokenizer: Any | None, context_limit: int | None, input_ids: Any, keywords: Mapping[str, Any]
) -> Call:
    """Read the arguments of `SpeculativeModel.generate` that say what to generate. Raises as that does.

    ``tokenizer``: the model's own. ``context_limit``: most tokens of prompt and answer together.
    """
    own = {name: keywords.get(name) for name in OURS}
    fields = {name: value for name, value in keywords.items() if name not in OURS}
    if own["inputs"] is not None:
        if input_ids is not None:
            raise UsageError("Give the prompts once, as input_ids or as inputs.", option="inputs")
        input_ids = own["inputs"]
    if input_ids is None:
        raise UsageError("No prompt was given: input_ids is None.", found=None)
    tokenizer = tokenizer if own["tokenizer"] is None else read_tokenizer(own["tokenizer"])
    own_eos = own_eos_ids(target)
    options = join_options(target.generation_config, own["generation_config"], fields)
    # With a seed for each prompt none is drawn for the call.
    sampling = read_sampling(options, fields, 0 if own["seed"] is None and own["seeds"] is not None else own["seed"])
    eos = frozenset() if own["ignore_eos"] else read_id_set(options.get("eos_token_id", own_eos))
    pad = _pad(target, options.get("pad_token_id"))
    padding = None if pad in (eos or own_eos) else pad
    read = read_prompts(input_ids, own["attention_mask"], padding, tokenizer)
    repeats = read_count("num_return_sequences", options.get("num_return_sequences", 1), 1)
    if repeats > 1 and sampling.is_greedy:
        raise UsageError(
            f"num_return_sequences = {repeats} needs sampling: greedy answers to a prompt are all the same. Give a "
            "temperature.",
            option="num_return_sequences", found=repeats,
        )  # fmt: skip
    seeds = read_seeds(own["seeds"], own["seed"], len(read.prompts))
    read = read.repeated(repeats)
    stop = options.get("stop_strings") if own["stop"] is None else own["stop"]
    max_time = options.get("max_time")
    shared: dict[str, Any] = {
        "eos_ids": eos, "context_limit": context_limit, "stop": read_stop_strings(stop, tokenizer is not None),
        "decode": partial(_decode, tokenizer) if tokenizer else None,
        "criteria": read_criteria(own["stopping_criteria"]),
        "deadline": None if max_time is None else time.monotonic() + read_seconds("max_time", max_time),
        "device": target.device,
    }  # fmt: skip
    requests = [
        _read_request(target, options, sampling, index, prompt, len(read.rows[index]), own["logits_processor"], shared)
        for index, prompt in enumerate(read.prompts)
    ]
    if seeds is not None:
        # As if each prompt were alone in its call.
        streams = [(seed, place) for seed in seeds for place in range(repeats)]
        requests = [replace(request, stream=each) for request, each in zip(requests, streams, strict=True)]
    check_prompts(requests, target.embedding.shape[0])
    fill = _fill(target, options.get("eos_token_id")) if pad is None else pad
    return Call(requests, sampling, options, read, fill, seeds)


def _read_request(
    target: TargetModel,
    options: Mapping[str, Any],
    sampling: SamplingConfig,
    index: int,
    prompt: tuple[int, ...],
    padded_length: int,
    logits_processor: Sequence[Any] | None,
    shared: Mapping[str, Any],
) -> Request:
    # As in transformers, lengths of prompt and answer together count the padding that was given.
    new = read_max_new_tokens(options, padded_length)
    wants_logits = options.get("output_scores") or options.get("output_logits")
    record = LogitRecord(sampling) if wants_logits else None
    process = build_processors(
        without_padding(options, padded_length - len(prompt)), len(prompt), new, shared["eos_ids"],
        int(target.text_config.vocab_size), logits_processor or (), target.device, record,
    )  # fmt: skip
    return Request(index, prompt, new, process=process, record=record, **shared)


def _pad(target: TargetModel, given: int | None) -> int | None:
    """Return the id that marks padding: as given, else the target's."""
    found = [given, *(getattr(each, "pad_token_id", None) for each in (target.generation_config, target.text_config))]
    ids = (token.item() if isinstance(token, Tensor) else token for token in found if token is not None)
    return next(map(read_token_id, ids), None)


def _fill(target: TargetModel, ends: Any) -> int:
    """Return what fills ``sequences`` where nothing is named for padding: the first end of sequence, else 0."""
    ends = getattr(target.generation_config, "eos_token_id", None) if ends is None else ends
    first = ends.flatten()[:1].tolist() if isinstance(ends, Tensor) else ends
    if isinstance(first, Iterable):
        first = next(iter(first), None)
    return min(own_eos_ids(target), default=0) if first is None else int(first)


def _decode(tokenizer: Any, token_ids: Sequence[int]) -> str:
    text = tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return str(text)
