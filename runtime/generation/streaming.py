"""Text as it is generated, for the eye: up to a stop string, which is not part of the answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import TextStreamer


class StopTextStreamer(TextStreamer):  # type: ignore[misc]  # transformers carries no types
    """Prints an answer as `RequestOutput.text` has it; letters that may begin a stop string wait for the next ones."""

    def __init__(self, tokenizer: Any, stop: Sequence[str] = (), **decode: Any) -> None:
        super().__init__(tokenizer, skip_prompt=True, **decode)
        self.stop = tuple(stop)
        self._waiting = ""
        self._stopped = False

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """See `TextStreamer.on_finalized_text`."""
        text = "" if self._stopped else self._waiting + text
        ends = [text.find(stop) for stop in self.stop if stop in text]
        self._stopped = self._stopped or bool(ends)
        ready = min(ends, default=len(text) if stream_end else len(text) - self._may_begin_a_stop(text))
        self._waiting = text[ready:]
        super().on_finalized_text(text[:ready], stream_end)

    def _may_begin_a_stop(self, text: str) -> int:
        """Length of the longest end of ``text`` that a stop string begins with."""
        lengths = range(max((len(stop) for stop in self.stop), default=1) - 1, 0, -1)
        return next((n for n in lengths if any(stop.startswith(text[-n:]) for stop in self.stop) and n <= len(text)), 0)
