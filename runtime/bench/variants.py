"""Decoders that take turns: what each accepts, its runs by the wall clock, and what they come to."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any

from ..generation.decoder import DeviceDecoder
from .drawn_verdicts import DrawnVerdicts
from .random_decoding import StepsRun, fill, run_steps

LENGTH_TOLERANCE = 0.02


@dataclass
class Variant:
    """A decoder, ``facts`` for its row, and the lengths that its verdicts are drawn from; plain decoding has none.

    Several variants may share a decoder and its verdicts.
    """

    decoder: DeviceDecoder
    facts: dict[str, Any]
    verdicts: DrawnVerdicts | None = None
    lengths: list[int] = field(default_factory=list)
    runs: list[StepsRun] = field(default_factory=list)

    def prepare(self, turn: int = 0) -> None:
        """Have the decoder accept this variant's lengths, from the given one on."""
        if self.verdicts is not None:
            self.verdicts.set_(self.lengths, turn)

    def run(self, turn: int, batch: int, prefix: int, steps: int) -> None:
        """Run steps of ``batch`` sequences from a prefix, for the ``turn``-th time; each goes on in the lengths."""
        self.prepare(turn * steps)
        fill(self.decoder, batch, prefix)
        self.runs.append(run_steps(self.decoder, batch, steps))

    def summary(self) -> dict[str, Any]:
        """What was accepted, counted; the median step of all runs; tokens/s of all sequences from the two.

        ``is_length_met``: a tree that is not deep enough accepts less than was drawn.
        """
        tokens, passes = (sum(getattr(run, name) for run in self.runs) for name in ("tokens", "passes"))
        times = [run.step_ms for run in self.runs]
        accepted, step_ms = tokens / passes, statistics.median(times)
        found = {
            "accepted_length": accepted, "step_ms": step_ms, "step_ms_low": min(times), "step_ms_high": max(times),
            "tokens_per_s": accepted * self.runs[0].passes / self.runs[0].steps / step_ms * 1e3,
        }  # fmt: skip
        if self.lengths:
            drawn = sum(self.lengths) / len(self.lengths)
            found["is_length_met"] = abs(accepted / drawn - 1) <= LENGTH_TOLERANCE
        return found
