"""Choose a request's tokens: the keys of its noise, and the logits processors that options ask for.

Every request has one stream of keys, drawn from its own generator (seed, and place in the call, or among the answers to
its prompt where that has a seed of its own). The token at new position i is chosen by the noise that key i gives each
id (`step.kernels.token_noise`). So a request's sampled text depends on neither the drafter, the tree, nor the rest of
the batch, and the distribution is the target's.

A processor is applied wherever the target chooses a token, at the nodes of a tree as in plain decoding. Processors must
depend on nothing but their arguments: they are also called for continuations that are not kept.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from transformers.generation import logits_process as hf

from ..errors import UsageError, misfit

PENALTIES = ("repetition_penalty", "no_repeat_ngram_size", "bad_words_ids", "min_new_tokens", "suppress_tokens")
"""Fields of a `GenerationConfig` that act on greedy decoding too, in transformers' order."""


def noise_keys(seed: int, request_index: int, length: int) -> Tensor:
    """Return the first ``length`` keys of a request's stream: int64 [length], none negative."""
    digest = hashlib.sha256(f"{seed}/{request_index}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.empty(length, dtype=torch.int64).random_(generator=generator)


@dataclass(frozen=True)
class Processors:
    """The logits processors of one request, in transformers' order."""

    steps: tuple[tuple[str, Any], ...]
    """Each processor after the option that asks for it, or the name of its class."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all steps."""
        return tuple(name for name, _ in self.steps)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Apply them to the logits of a position, float32 [1, vocab], after the tokens before it, int64 [1, seq].

        Raises `UsageError` for one that does not return scores of that shape.
        """
        for name, step in self.steps:
            changed: Any = hf.LogitsProcessorList([step])(input_ids, scores)
            if not isinstance(changed, Tensor) or changed.shape != scores.shape or not changed.is_floating_point():
                what = f"{changed.dtype} {list(changed.shape)}" if isinstance(changed, Tensor) else repr(changed)
                expected = f"expected floats {list(scores.shape)}, as it was given"
                advice = "One that changes them in place returns them too."
                raise UsageError(f"Logits processor {name} returned {what}; {expected}. {advice}")
            scores = changed
        return scores


def build_processors(
    options: Mapping[str, Any],
    prompt_length: int,
    eos_ids: Iterable[int],
    vocab_size: int,
    extra: Sequence[Any] = (),
    device: torch.device | str = "cpu",
) -> Processors | None:
    """Build the processors of one request, ``extra`` ones last; None where nothing changes logits.

    Raises `UsageError` for a value that transformers refuses, and for a token id outside the vocabulary.
    """
    eos = sorted(eos_ids)
    place: dict[str, Any] = {"device": str(device)}

    def ends() -> Any:
        # Only where it is needed: threads other than the loop's leave the device alone.
        return torch.tensor(eos, device=device) if eos else None

    builders: dict[str, Callable[[Any], Any]] = {
        "repetition_penalty": lambda v: v != 1 and hf.RepetitionPenaltyLogitsProcessor(float(v)),
        "no_repeat_ngram_size": lambda v: v != 0 and hf.NoRepeatNGramLogitsProcessor(v),
        "bad_words_ids": lambda v: hf.NoBadWordsLogitsProcessor(v, ends()),
        "min_new_tokens": lambda v: (
            v != 0 and eos and hf.MinNewTokensLengthLogitsProcessor(prompt_length, v, ends(), **place)
        ),
        "suppress_tokens": lambda v: hf.SuppressTokensLogitsProcessor(v, **place),
    }
    steps: list[tuple[str, Any]] = []
    for name, value in ((name, options[name]) for name in PENALTIES if name in options):
        if value is True or isinstance(value, str):
            raise misfit(name, "a number, or token ids", value)
        try:
            processor = builders[name](value)
            named = {"bad_words_ids": value, "suppress_tokens": [value]}.get(name, ())
            wrong = [token for token in chain.from_iterable(named) if not 0 <= token < vocab_size]
        except (RuntimeError, TypeError, ValueError) as error:
            raise UsageError(f"transformers refuses {name} = {value!r}: {error}") from error
        if name == "bad_words_ids" and not all(len(word) for word in value):
            raise misfit(name, "words of at least one token", value)
        if wrong:
            raise UsageError(f"{name} names token {wrong[0]}; the target's ids are 0 to {vocab_size - 1}.")
        if processor:
            steps.append((name, processor))
    steps += [(type(processor).__name__, processor) for processor in extra]
    return Processors(tuple(steps)) if steps else None
