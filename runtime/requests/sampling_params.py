"""vLLM's names for the arguments of a chat, as `SpeculativeModel.generate` calls them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import UsageError
from .arguments import read_id_set

_RENAMED = {
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "n": "num_return_sequences",
}
_SAME = ("temperature", "top_p", "top_k", "min_p", "seed", "stop", "repetition_penalty", "ignore_eos", "logprobs")
# Fields of a SamplingParams that are not served, with the values that ask for nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "prompt_logprobs": (None,),
    "bad_words": (None, []),
    "logit_bias": (None,),
    "allowed_token_ids": (None,),
    "structured_outputs": (None,),
    "guided_decoding": (None,),
    "thinking_token_budget": (None,),
    "logits_processors": (None, []),
    "extra_args": (None, {}),
    "truncate_prompt_tokens": (None,),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "detokenize": (True,),
}


def read_sampling_params(params: Any, keywords: Mapping[str, Any], eos_ids: frozenset[int]) -> dict[str, Any]:
    """Join a `SamplingParams` (or any object with its fields, or a mapping) with keywords, by `generate`'s names.

    ``eos_ids``: the target's own ends, which ``stop_token_ids`` add to. Raises `UsageError` for a field that asks for
    something that is not served.
    """
    given = {} if params is None else dict(params) if isinstance(params, Mapping) else _fields(params)
    given |= {name: value for name, value in keywords.items() if value is not None}
    options: dict[str, Any] = {}
    if stop_ids := read_id_set(given.pop("stop_token_ids", None)):
        # As in vLLM, ignore_eos is about the target's own ends alone.
        own = frozenset() if given.pop("ignore_eos", False) else eos_ids
        options["eos_token_id"] = sorted(own | stop_ids)
    for name, value in given.items():
        if name in _NEUTRAL:
            if value not in _NEUTRAL[name]:
                raise UsageError(f"chat() cannot serve {name}.", option=name)
        elif value is not None:
            options[_RENAMED.get(name, name)] = value
    # vLLM turns top_k off by -1, and both penalties and stop strings by an empty value.
    if options.get("top_k", 1) in (-1, 0):
        del options["top_k"]
    if not options.get("stop", True):
        del options["stop"]
    if not options.get("temperature", 1.0):
        for name in ("top_p", "top_k", "min_p"):
            options.pop(name, None)
    return options


def _fields(params: Any) -> dict[str, Any]:
    names = (*_RENAMED, *_SAME, *_NEUTRAL, "stop_token_ids")
    return {name: getattr(params, name) for name in names if hasattr(params, name)}
