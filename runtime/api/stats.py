"""The cost of a generation: accepted lengths, tokens outside the draft vocabulary, and seconds by phase."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from itertools import chain
from typing import Any, NamedTuple

import torch


class StepTimes(NamedTuple):
    """Seconds of one step: drafting (all of a replayed step), verifying, and the host's own work that is waited for."""

    draft_s: float
    verify_s: float
    host_s: float


@dataclass(frozen=True)
class GenerationStats:
    """Statistics of one request or of many.

    The accepted length of a pass is the number of tokens that one target forward over a tree adds to the answer: the
    accepted drafted tokens and the target's own, up to the answer's end. The prompt's forward is not a pass.
    """

    accepted_lengths: dict[int, int] = field(default_factory=dict)
    """Passes by accepted length."""
    num_new_tokens: int = 0
    """Tokens returned, the first one (from the prompt's forward) included."""
    num_cut_tokens: int = 0
    """Tokens accepted beyond an answer's end, in no accepted length."""
    missed_ids: dict[int, int] = field(default_factory=dict)
    """Counts of new target ids that the draft vocabulary did not hold; empty with ``speculative=False``."""
    num_reused_tokens: int = 0
    """Prompt tokens that were not run again, as a slot held them from an earlier call."""
    total_s: float = 0.0
    """Seconds of the call, prompts included; 0.0 in the statistics of a single answer, as are ``steps``."""
    steps: tuple[StepTimes, ...] = field(default=(), repr=False)
    """Seconds of each step; a step is one pass of every sequence that runs in it."""
    active_sequences: dict[int, int] = field(default_factory=dict)
    """Steps of the call by number of sequences that ran side by side."""
    finish_reasons: dict[str, int] = field(default_factory=dict)
    """Answers by the reason that ended them (`RequestOutput.finish_reason`)."""
    num_partial_passes: int = 0
    """Target passes over a part of the cache (`PartialVerification`), summed over sequences; in no accepted length."""
    num_rolled_back_tokens: int = 0
    """Tokens that partial passes accepted and full passes rejected."""
    cache_bytes: int = 0
    """Memory of keys and values held between calls, the drafter's too."""
    graph_bytes: int = 0
    """Device memory that capturing the CUDA graphs has taken, those of earlier calls included."""
    tuned_hits: int = 0
    tuned_misses: int = 0
    """Launches of the drafter with derived instead of tuned parameters."""
    path: str = ""
    """Human-readable description of what ran: loop, target and drafter, each with the reason."""
    exactness: str | None = None
    """Why every token is that of plain decoding of its prompt alone, in float32 but for ties within its last bits; None
    where nothing promises that."""
    is_exact: bool = False
    """Whether that holds without exception: a token that differs is then a defect."""

    @property
    def num_passes(self) -> int:
        """Target passes, summed over sequences."""
        return sum(self.accepted_lengths.values())

    @property
    def num_accepted_tokens(self) -> int:
        """Tokens that passes gave: all but the first of each answer, which its prompt's forward gave."""
        return sum(length * count for length, count in self.accepted_lengths.items())

    @property
    def mean_accepted_length(self) -> float:
        """Tokens per target pass; 0.0 without a pass, 1.0 when nothing drafted was ever accepted."""
        return self.num_accepted_tokens / self.num_passes if self.num_passes else 0.0

    @property
    def step_s(self) -> float:
        """Seconds of all steps: the whole time but for prompts."""
        return sum(sum(step) for step in self.steps)

    @property
    def num_missed(self) -> int:
        """New tokens outside the draft vocabulary."""
        return sum(self.missed_ids.values())

    @property
    def missed_rate(self) -> float:
        """Share of the new tokens outside the draft vocabulary: 1 minus its coverage of them; 0.0 without any."""
        return self.num_missed / self.num_new_tokens if self.num_new_tokens else 0.0

    @property
    def tokens_per_s(self) -> float:
        """New tokens over the whole time, prompts included."""
        return self.num_new_tokens / self.total_s if self.total_s else 0.0

    def to_json(self) -> dict[str, Any]:
        """Return plain values, keyed as in this class; of the steps the sum."""
        names = [each.name for each in fields(self) if each.name != "steps"]
        names += [name for name, value in vars(type(self)).items() if isinstance(value, property)]
        values = {name: getattr(self, name) for name in names}
        return {
            name: {str(key): count for key, count in value.items()} if isinstance(value, dict) else value
            for name, value in values.items()
        }

    @classmethod
    def sum(cls, items: Iterable[GenerationStats]) -> GenerationStats:
        """Add up runs that were made one after another."""
        items = list(items)
        total: dict[str, Any] = {}
        for each in fields(cls):
            values = [getattr(item, each.name) for item in items]
            if each.name in ("path", "exactness", "is_exact"):
                total[each.name] = values[0] if len(set(values)) == 1 else each.default
            elif each.name in ("cache_bytes", "graph_bytes"):
                total[each.name] = max(values, default=0)
            elif each.name == "steps":
                total[each.name] = tuple(chain.from_iterable(values))
            elif each.default_factory is dict:
                added: Counter[Any] = Counter()
                for value in values:
                    added.update(value)
                total[each.name] = dict(sorted(added.items()))
            else:
                total[each.name] = sum(values)
        return cls(**total)


class PhaseTimer:
    """Times phases without making the host wait, on a GPU by events. A "draft" or "step" phase begins a step."""

    def __init__(self, device: torch.device) -> None:
        self._has_events = device.type == "cuda"
        self._phases: list[tuple[str, Any, Any]] = []
        """Name of each phase in order, when it began and when it ended."""
        self._start = time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Attribute what runs inside to a phase."""
        begin = self._now()
        yield
        self._phases.append((name, begin, self._now()))

    def stop_and_wait(self) -> dict[str, Any]:
        """Wait for the device; return ``total_s`` and ``steps``."""
        after = self._now()
        if self._has_events:
            torch.cuda.synchronize()
        total_s, steps, seconds = time.perf_counter() - self._start, list[StepTimes](), defaultdict[str, float](float)
        # From the last step to the first: the phases behind a step's beginning are its own.
        for name, begin, end in reversed(self._phases):
            seconds[name] += self._between(begin, end)
            seconds["between"] += self._between(end, after)
            after = begin
            if name in ("draft", "step"):
                steps.append(StepTimes(seconds["draft"] + seconds["step"], seconds["verify"], seconds["between"]))
                seconds.clear()
        return {"total_s": total_s, "steps": tuple(reversed(steps))}

    def _now(self) -> Any:
        """Return the host's time; on a GPU an event, as the host runs ahead of it."""
        if not self._has_events:
            return time.perf_counter()
        return torch.cuda.current_stream().record_event(torch.cuda.Event(enable_timing=True))

    def _between(self, begin: Any, end: Any) -> float:
        return float(begin.elapsed_time(end)) / 1e3 if self._has_events else end - begin
