"""Answers as they are generated: what a streamer is, and one that prints text up to a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor
from transformers import TextStreamer


class Streamer(Protocol):
    """What transformers calls a streamer: it gets the prompt, then new tokens, then the end."""

    def put(self, value: Tensor) -> None:
        """Take token ids, int64 [1, seq] for the prompt and [new] afterwards, on the CPU."""

    def end(self) -> None:
        """End of stream."""


class StopTextStreamer(TextStreamer):  # type: ignore[misc]  # transformers carries no types
    """Prints an answer as `RequestOutput.text` has it; what may be the beginning of a stop string is held back."""

    def __init__(self, tokenizer: Any, stop: Sequence[str] = (), **decode: Any) -> None:
        super().__init__(tokenizer, skip_prompt=True, **decode)
        self.stop = tuple(stop)
        self._held_back = ""
        self._stopped = False

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """See `TextStreamer.on_finalized_text`."""
        text = "" if self._stopped else self._held_back + text
        ends = [text.find(stop) for stop in self.stop if stop in text]
        self._stopped = self._stopped or bool(ends)
        ready = min(ends, default=len(text) if stream_end else len(text) - self._length_that_may_begin_a_stop(text))
        self._held_back = text[ready:]
        super().on_finalized_text(text[:ready], stream_end)

    def _length_that_may_begin_a_stop(self, text: str) -> int:
        """Length of the longest end of ``text`` that a stop string begins with."""
        lengths = range(max((len(stop) for stop in self.stop), default=1) - 1, 0, -1)
        return next((n for n in lengths if any(stop.startswith(text[-n:]) for stop in self.stop) and n <= len(text)), 0)
