"""States collected text by text: the second moment of most, and the others as they are, held out to measure on.

What has been collected is saved now and then, so that a run that was interrupted goes on with the next text.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from eagle_slim.vocab_tools.files import write_file
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from ..errors import UsageError
from .factors import SecondMoment

MOST_TOKENS = 256
"""Tokens of a text that are run."""
ROOTS = 8
"""Places of a text from which trees are drafted, spread over its last three quarters: a chat begins with a template."""
LEAST_TOKENS = 32
# No divisor of the usual weights, so that texts of every source are among them.
_HELD_OUT_EVERY = 7
_HELD_OUT_OF_TEXT = 256
_MOST_HELD_OUT = 4096
_SAVE_SECONDS = 30.0
_KEY = "eagle_slim.screen_resume"

DraftStates = Callable[[NDArray[np.int64], NDArray[np.int64]], Tensor]
"""(token ids [tokens], roots [roots]) to states [states, hidden]."""


def text_roots(text: NDArray[np.int64]) -> NDArray[np.int64] | None:
    """Where trees are drafted from in a text's first `MOST_TOKENS` tokens; None for one that is too short."""
    count = min(len(text), MOST_TOKENS)
    return None if count < LEAST_TOKENS else np.unique(np.linspace(count // 4, count - 1, ROOTS).astype(np.int64))


class Collected:
    """States of ``num_texts`` texts so far; ``file`` keeps them for the same ``identity`` (JSON)."""

    def __init__(self, hidden: int, device: torch.device, file: Path, identity: Any) -> None:
        self.moment = SecondMoment(hidden, device)
        self.held_out: list[Tensor] = []
        self.num_texts = 0
        """Texts that were read, those that are too short among them."""
        self._num_used = 0
        self._file, self._identity = file, json.loads(json.dumps(identity))

    @property
    def num_held_out(self) -> int:
        """States that are held out."""
        return sum(len(states) for states in self.held_out)

    def run(self, texts: Iterable[NDArray[np.int64]], draft: DraftStates, wanted: int, progress: Any) -> None:
        """Collect until ``wanted`` states are in the moment, or no text is left; ``progress(done, total)``."""
        try:
            saved_at = time.monotonic()
            for text in islice(texts, self.num_texts, None):
                if self.moment.count >= wanted and self.held_out:
                    break
                self._take(text, draft)
                progress(min(self.moment.count, wanted), wanted)
                if time.monotonic() - saved_at >= _SAVE_SECONDS:
                    self.save()
                    saved_at = time.monotonic()
        finally:
            # An error or an interrupt may have ended it; and what comes after may be refused, and then needs no second
            # run over the text.
            self.save()

    def _take(self, text: NDArray[np.int64], draft: DraftStates) -> None:
        if (roots := text_roots(text)) is not None:
            states = draft(text[:MOST_TOKENS], roots)
            is_held_out = self._num_used % _HELD_OUT_EVERY == 1 and self.num_held_out < _MOST_HELD_OUT
            if is_held_out:
                chosen = torch.linspace(0, len(states) - 1, min(_HELD_OUT_OF_TEXT, len(states))).long()
                self.held_out.append(states[chosen.to(states.device)])
            else:
                self.moment.add_(states)
            self._num_used += 1
        self.num_texts += 1

    def save(self) -> None:
        """Write the file, whole or not at all. Raises OSError."""
        tensors = {"total": self.moment.total.cpu()}
        if self.held_out:
            tensors["held_out"] = torch.cat(self.held_out).float().cpu()
        saved = {"count": self.moment.count, "texts": self.num_texts, "used": self._num_used}
        write_file(self._file, save(tensors, {_KEY: json.dumps({"identity": self._identity, **saved})}))

    def load_(self, dtype: torch.dtype) -> bool:
        """Go on from the file, if there is one; ``dtype`` of states.

        Raises `UsageError` for the file of other texts, another head or another model, and for a damaged one.
        """
        if not self._file.exists():
            return False
        place = self.moment.total.device
        try:
            with safe_open(self._file, "pt") as file:
                saved = json.loads((file.metadata() or {})[_KEY])
                total = file.get_tensor("total").to(place)
                held_out = file.get_tensor("held_out").to(place, dtype) if "held_out" in file.keys() else None  # noqa: SIM118 - not a dict
        except (SafetensorError, OSError, KeyError, ValueError) as error:
            raise UsageError(
                f"{self._file}: the saved state cannot be read ({error}). Start over with --restart.", path=self._file
            ) from error
        if saved["identity"] != self._identity or total.shape != self.moment.total.shape:
            raise UsageError(
                f"{self._file}: this is the saved state for other texts, another head, target or tree. Give what it "
                "was begun with to go on, or start over with --restart.",
                path=self._file,
            )
        self.moment.total, self.moment.count = total, saved["count"]
        self.held_out = [] if held_out is None else [held_out]
        self.num_texts, self._num_used = saved["texts"], saved["used"]
        return True

    def remove(self) -> None:
        """Remove the file."""
        self._file.unlink(missing_ok=True)
