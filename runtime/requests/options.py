"""Options of `generate` as in transformers: keywords, a `GenerationConfig`, and the logits processors they ask for.

A processor changes the target's logits at a position, given the tokens before it. It is applied wherever the target
chooses a token, at the nodes of a tree as in plain decoding, so drafting does not change the answer. Processors must
depend on nothing but their arguments: they are also called for continuations that are not kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation import logits_process as hf

from ..errors import UsageError, did_you_mean, misfit
from .sampling import LogitRecord

OURS = (
    "inputs", "attention_mask", "tokenizer", "generation_config", "seed", "seeds", "stop", "stopping_criteria",
    "ignore_eos", "logits_processor",
)  # fmt: skip
"""Arguments of `generate` that are no fields of a `GenerationConfig`."""
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "typical_p")
PENALTIES = (
    "sequence_bias",
    "repetition_penalty",
    "no_repeat_ngram_size",
    "bad_words_ids",
    "min_length",
    "min_new_tokens",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "remove_invalid_values",
    "exponential_decay_length_penalty",
    "suppress_tokens",
    "begin_suppress_tokens",
)
"""Fields of a `GenerationConfig` that act on greedy decoding too."""
_OTHERS = (
    "max_new_tokens", "max_length", "do_sample", "eos_token_id", "pad_token_id", "stop_strings", "num_return_sequences",
    "max_time", "output_logits", "output_scores", "return_dict_in_generate",
)  # fmt: skip
# These do not change what is generated.
_WITHOUT_EFFECT = (
    "assistant_confidence_threshold", "assistant_early_exit", "assistant_lookbehind", "bos_token_id", "cache_config",
    "cache_implementation", "compile_config", "decoder_start_token_id", "disable_compile", "early_stopping",
    "is_assistant", "length_penalty", "low_memory", "max_cache_len", "num_assistant_tokens",
    "num_assistant_tokens_schedule", "prefill_chunk_size", "return_legacy_cache",
    "target_lookbehind", "transformers_version", "use_cache",
)  # fmt: skip
# Fields that are not served, and the value of each that changes nothing; None changes nothing for any field.
_NEUTRAL: dict[str, bool | float] = {
    "num_beams": 1, "num_beam_groups": 1, "diversity_penalty": 0.0, "guidance_scale": 1.0, "penalty_alpha": 0.0,
    "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "encoder_repetition_penalty": 1.0, "encoder_no_repeat_ngram_size": 0,
    "renormalize_logits": False, "token_healing": False, "use_mtp": False, "output_attentions": False,
    "output_hidden_states": False,
}  # fmt: skip
# Penalties whose values hold token ids.
_HOLD_IDS = (
    "sequence_bias", "bad_words_ids", "forced_bos_token_id", "forced_eos_token_id", "suppress_tokens",
    "begin_suppress_tokens",
)  # fmt: skip


def join_options(
    own: GenerationConfig | None, given: GenerationConfig | None, keywords: Mapping[str, Any]
) -> dict[str, Any]:
    """Join keywords, a given configuration and the target's own; the earlier wins. None leaves a field unset.

    Only the `PENALTIES` of the target's own configuration count. Returns the fields that are set, by name. Raises
    `UsageError` for a keyword that transformers does not know, and for a field that cannot be served, such as beams.
    """
    if given is not None and not isinstance(given, GenerationConfig):
        raise UsageError(
            f"generation_config must be transformers' GenerationConfig, got {type(given).__name__}.",
            option="generation_config", found=type(given).__name__,
        )  # fmt: skip
    served = (*SAMPLING, *PENALTIES, *_OTHERS)
    defaults = vars(GenerationConfig())
    found = {} if own is None else {name: getattr(own, name, None) for name in PENALTIES}
    # Names with a leading underscore are transformers' own notes; unknown ones were meant for other software.
    known = {} if given is None else {name: value for name, value in vars(given).items() if name in defaults}
    fields = {name: value for name, value in known.items() if not name.startswith("_")}
    for name, value in [*fields.items(), *keywords.items()]:
        if name in _WITHOUT_EFFECT:
            continue
        if name not in defaults:
            near = did_you_mean(name, (*served, *OURS))
            raise UsageError(f"generate() has no option {name!r}.{near}", option=name)
        if not (value is None or name in served or _asks_nothing(name, value, defaults[name])):
            raise UsageError(
                f"generate() cannot serve {name}. What changes logits can be a logits_processor.", option=name
            )
        if value is not None and name in served:
            found[name] = value
    return {name: value for name, value in found.items() if value is not None}


def without_padding(options: Mapping[str, Any], padding: int) -> Mapping[str, Any]:
    """Return the options for a prompt whose padding, that many tokens, was taken off: ``min_length`` counts it."""
    length = options.get("min_length")
    if not padding or not isinstance(length, Integral):
        return options
    return {**options, "min_length": max(0, int(length) - padding)}


def _asks_nothing(name: str, value: Any, default: Any) -> bool:
    """Whether an unserved field has its neutral value, or its default if it has none; True is not 1, nor False 0."""
    neutral = _NEUTRAL.get(name, default)
    if isinstance(value, bool) != isinstance(neutral, bool) or not isinstance(value, (Real, type(neutral))):
        return False
    return bool(value == neutral)


def _leaves(value: Any) -> Iterable[Any]:
    """Values in nested lists, tuples and tensors, and keys of a mapping; a single value is its own leaf."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, str) or not isinstance(value, Iterable):
        return [value]
    return chain.from_iterable(map(_leaves, value))


@dataclass(frozen=True)
class Processors:
    """The logits processors of one request, in transformers' order."""

    steps: tuple[tuple[str, Any], ...]
    """Each with the option that asks for it, or the name of its class."""

    @property
    def names(self) -> tuple[str, ...]:
        """Of all steps."""
        return tuple(name for name, _ in self.steps)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Apply them: the tokens before a position int64 [1, seq], and its logits float32 [1, vocab].

        Raises `UsageError` for one that does not return scores of that shape.
        """
        for name, step in self.steps:
            found: Any = hf.LogitsProcessorList([step])(input_ids, scores)
            if not isinstance(found, Tensor) or found.shape != scores.shape:
                what = f"a tensor {list(found.shape)}" if isinstance(found, Tensor) else repr(found)
                raise UsageError(
                    f"Logits processor {name} returned {what}; expected scores {list(scores.shape)}, as it was given. "
                    "One that changes them in place returns them too.",
                    option="logits_processor", expected=tuple(scores.shape), found=found,
                )  # fmt: skip
            scores = found
        return scores


def build_processors(
    options: Mapping[str, Any],
    prompt_length: int,
    max_new_tokens: int,
    eos_ids: Iterable[int],
    vocab_size: int,
    extra: Sequence[Any] = (),
    device: torch.device | str = "cpu",
    record: LogitRecord | None = None,
) -> Processors | None:
    """Build the processors of one request; None where nothing changes logits.

    ``vocab_size``: logits per position. ``extra`` processors come last; ``record`` is called with what goes in and what
    comes out. Raises `UsageError` for a value that transformers refuses, a token id outside the vocabulary or both
    forced and suppressed, and an ``extra`` that is no list of callables.
    """
    if not isinstance(extra, Sequence) or not all(callable(processor) for processor in extra):
        raise UsageError(
            f"logits_processor is a list of callables of (input_ids, scores); got {extra!r}.", option="logits_processor"
        )
    begin = prompt_length + int(prompt_length <= 1 and "forced_bos_token_id" in options)
    eos = sorted(eos_ids)
    place: dict[str, Any] = {"device": str(device)}
    eos_tensor: Any = torch.tensor(eos, device=device) if eos else None
    builders: dict[str, Callable[[Any], Any]] = {
        "sequence_bias": lambda v: hf.SequenceBiasLogitsProcessor(v),
        "repetition_penalty": lambda v: v != 1 and hf.RepetitionPenaltyLogitsProcessor(float(v)),
        "no_repeat_ngram_size": lambda v: v and hf.NoRepeatNGramLogitsProcessor(v),
        "bad_words_ids": lambda v: hf.NoBadWordsLogitsProcessor(v, eos_tensor),
        "min_length": lambda v: v and eos and hf.MinLengthLogitsProcessor(v, eos_tensor, **place),
        "min_new_tokens": lambda v: (
            v and eos and hf.MinNewTokensLengthLogitsProcessor(prompt_length, v, eos_tensor, **place)
        ),
        "forced_bos_token_id": lambda v: hf.ForcedBOSTokenLogitsProcessor(v),
        "forced_eos_token_id": lambda v: hf.ForcedEOSTokenLogitsProcessor(prompt_length + max_new_tokens, v, **place),
        "remove_invalid_values": lambda v: v and hf.InfNanRemoveLogitsProcessor(),
        "exponential_decay_length_penalty": lambda v: (
            eos and hf.ExponentialDecayLengthPenalty(tuple(v), eos_tensor, prompt_length)
        ),
        "suppress_tokens": lambda v: hf.SuppressTokensLogitsProcessor(v, **place),
        "begin_suppress_tokens": lambda v: hf.SuppressTokensAtBeginLogitsProcessor(v, begin, **place),
    }
    built: list[tuple[str, Any]] = []
    for name in PENALTIES:
        if name not in options:
            continue
        if options[name] is True and name != "remove_invalid_values":
            raise misfit(name, "a number, or token ids", True)
        try:
            processor = builders[name](options[name])
        except (TypeError, ValueError) as error:
            raise UsageError(f"transformers refuses {name} = {options[name]!r}: {error}", option=name) from error
        if name == "bad_words_ids" and not all(len(word) for word in options[name]):
            raise UsageError(f"A bad word has at least one token; got {name} = {options[name]!r}.", option=name)
        # A bias may be given as a list of (ids, bias); the processor holds ids alone, as keys.
        for token in _leaves(getattr(processor, "sequence_bias", options[name])) if name in _HOLD_IDS else ():
            if isinstance(token, bool) or not isinstance(token, Integral) or not 0 <= int(token) < vocab_size:
                raise UsageError(
                    f"{name} names token {token!r}; the target's ids are 0 to {vocab_size - 1}.", option=name, id=token
                )
        if processor:
            built.append((name, processor))
    for name, length in (("forced_bos_token_id", 1), ("forced_eos_token_id", prompt_length + max_new_tokens - 1)):
        forced = set(_leaves(options.get(name, ())))
        for other in ("suppress_tokens", *(("begin_suppress_tokens",) if length == begin else ())):
            if length >= prompt_length and forced and forced <= set(_leaves(options.get(other, ()))):
                raise UsageError(
                    f"{name} = {options[name]!r} is in {other}, which leaves no token. Take it out of one of them.",
                    option=name, other=other,
                )  # fmt: skip
    steps = [*built, *((type(processor).__name__, processor) for processor in extra)]
    if record is not None:
        steps = [("output_scores", record.before), *steps, ("output_scores", record.after)]
    return Processors(tuple(steps)) if steps else None
