"""The cost of a generation: accepted lengths, and seconds by phase."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

PHASES = ("prefill", "draft", "verify", "step")


@dataclass(frozen=True)
class GenerationStats:
    """Statistics of one request or of many.

    The accepted length of a pass is the number of tokens that one target forward over a tree gives: the accepted
    drafted tokens and the target's own. It is counted before a stop cuts the text, and only for sequences that were
    running; the prompt's forward is not a pass.
    """

    accepted_lengths: dict[int, int] = field(default_factory=dict)
    """How many passes had each accepted length."""
    num_new_tokens: int = 0
    """Tokens returned, the first one (from the prompt's forward) included."""
    num_prompt_tokens: int = 0
    prefill_s: float = 0.0
    draft_s: float = 0.0
    verify_s: float = 0.0
    step_s: float = 0.0
    """Whole steps, draft to commit, where they are replayed as one; then draft and verify are 0."""
    total_s: float = 0.0
    num_empty_steps: int = 0
    """Steps that the device ran after everything had ended: the host launches one ahead."""
    cache_bytes: int = 0
    """Memory of the target's keys and values, where the runtime holds them between calls."""
    path: str = ""
    """What ran: loop, target and drafter, each with the reason."""

    @property
    def num_passes(self) -> int:
        """Target passes, summed over sequences (a batched forward is one pass for each running sequence)."""
        return sum(self.accepted_lengths.values())

    @property
    def num_accepted_tokens(self) -> int:
        """Tokens that the passes gave, before cutting at stops."""
        return sum(length * count for length, count in self.accepted_lengths.items())

    @property
    def mean_accepted_length(self) -> float:
        """Tokens per target pass; 0.0 without a pass, 1.0 when nothing drafted was ever accepted."""
        return self.num_accepted_tokens / self.num_passes if self.num_passes else 0.0

    @property
    def host_s(self) -> float:
        """Time outside prefill, draft, verify and whole steps."""
        return max(0.0, self.total_s - self.prefill_s - self.draft_s - self.verify_s - self.step_s)

    @property
    def decode_s(self) -> float:
        """Time after the prompts: everything but prefill."""
        return max(0.0, self.total_s - self.prefill_s)

    @property
    def tokens_per_s(self) -> float:
        """New tokens over the whole time, prefill included."""
        return self.num_new_tokens / self.total_s if self.total_s else 0.0

    @property
    def shares(self) -> dict[str, float]:
        """Share of the whole time for prefill, draft, verify, whole steps and host; sums to 1."""
        parts = {name: getattr(self, f"{name}_s") for name in (*PHASES, "host")}
        whole = sum(parts.values())
        return {name: seconds / whole if whole else 0.0 for name, seconds in parts.items()}

    def to_json(self) -> dict[str, Any]:
        """Return plain numbers, keyed as in this class."""
        return {
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_new_tokens": self.num_new_tokens,
            "num_passes": self.num_passes,
            "num_accepted_tokens": self.num_accepted_tokens,
            "mean_accepted_length": self.mean_accepted_length,
            "accepted_lengths": {str(length): count for length, count in sorted(self.accepted_lengths.items())},
            "prefill_s": self.prefill_s,
            "draft_s": self.draft_s,
            "verify_s": self.verify_s,
            "step_s": self.step_s,
            "host_s": self.host_s,
            "total_s": self.total_s,
            "tokens_per_s": self.tokens_per_s,
            "num_empty_steps": self.num_empty_steps,
            "cache_bytes": self.cache_bytes,
            "path": self.path,
        }

    @classmethod
    def sum(cls, items: Iterable[GenerationStats]) -> GenerationStats:
        """Add up runs that were made one after another."""
        lengths: Counter[int] = Counter()
        names = ("num_new_tokens", "num_prompt_tokens", "prefill_s", "draft_s", "verify_s", "step_s", "total_s",
                 "num_empty_steps")  # fmt: skip
        totals: dict[str, Any] = dict.fromkeys(names, 0)
        for item in items:
            lengths.update(item.accepted_lengths)
            for name in names:
                totals[name] += getattr(item, name)
        return cls(accepted_lengths=dict(sorted(lengths.items())), **totals)


class PhaseTimer:
    """Times phases without making the host wait inside the loop: on a GPU it records events and reads them later."""

    def __init__(self, device: torch.device) -> None:
        self._events = device.type == "cuda"
        self._pairs: list[tuple[str, Any, Any]] = []
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._start = time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Attribute what runs inside to a phase."""
        if self._events:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            yield
            end.record()
            self._pairs.append((name, begin, end))
            return
        started = time.perf_counter()
        yield
        self._seconds[name] += time.perf_counter() - started

    def stop_and_wait(self) -> dict[str, float]:
        """Wait for the device and return ``prefill_s``, ``draft_s``, ``verify_s``, ``total_s``."""
        if self._events:
            torch.cuda.synchronize()
            for name, begin, end in self._pairs:
                self._seconds[name] += begin.elapsed_time(end) / 1e3
        return {f"{name}_s": seconds for name, seconds in self._seconds.items()} | {
            "total_s": time.perf_counter() - self._start
        }
