"""Answers of a comparison as they come: one record per call of `generate`, kept as JSON lines to resume from."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from ..errors import UsageError


class AnswerKey(NamedTuple):
    """Which call of `generate` it was; ``group`` is the number of the first prompt, ``turn`` counts from 0."""

    repeat: int
    batch: int
    group: int
    mode: str
    turn: int
    candidate: str


@dataclass(frozen=True)
class Answer:
    """What one call gave and cost.

    ``category`` is None for a batch of several categories. ``num_identical``: answers equal to plain decoding's, token
    for token. ``steps``: draft, verify and host seconds of each step. ``token_ids`` and ``texts`` by prompt answered.
    """

    key: AnswerKey
    category: str | None
    num_identical: int
    num_prompt_tokens: int
    accepted_lengths: Mapping[int, int]
    prefill_s: float
    total_s: float
    steps: tuple[tuple[float, float, float], ...]
    token_ids: tuple[tuple[int, ...], ...]
    texts: tuple[str, ...]
    missed: tuple[int, ...] = ()
    """By prompt answered, tokens that the draft vocabulary did not hold; empty for plain decoding."""
    is_exact: bool = False
    """Whether the target promises that drafting changes no token; then none was changed."""

    @property
    def num_missed(self) -> int:
        """Tokens that the draft vocabulary did not hold, of all the answers."""
        return sum(self.missed)

    @property
    def num_answers(self) -> int:
        """Prompts of the group that were answered."""
        return len(self.token_ids)

    def to_json(self) -> dict[str, Any]:
        """Return plain values; times in whole microseconds, so that a line stays short."""
        steps = [[round(seconds * 1e6) for seconds in step] for step in self.steps]
        return {**asdict(self), "key": list(self.key), "steps": steps}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Answer:
        """Read what `to_json` wrote."""
        lists = {name: tuple(value[name]) for name in ("texts", "missed")}
        return cls(**{
            **value, **lists, "key": AnswerKey(*value["key"]), "token_ids": tuple(map(tuple, value["token_ids"])),
            "accepted_lengths": {int(length): count for length, count in value["accepted_lengths"].items()},
            "steps": tuple((draft / 1e6, verify / 1e6, host / 1e6) for draft, verify, host in value["steps"]),
        })  # fmt: skip


class AnswerLog:
    """A file of answers: a first line that says what is compared, then a line per answer, each on disk when written."""

    def __init__(self, path: str | Path, plan: Mapping[str, Any]) -> None:
        """Open a file for appending; ``plan`` is everything that the answers depend on, as plain values.

        Raises `UsageError` when the file holds answers to another plan, or is no such file. A last line that was cut
        short by a kill is dropped.
        """
        self.path, self.answers = Path(path), dict[AnswerKey, Answer]()
        plan = json.loads(json.dumps(plan))
        whole = self._read(plan) if self.path.exists() else b""
        # What is there already stays, also where this process is killed.
        self._file: BinaryIO = self.path.open("r+b" if whole else "wb")
        self._file.seek(len(whole))
        self._file.truncate()
        if not whole:
            self._file.write(_line({"plan": plan}))
            self._file.flush()

    def append(self, answer: Answer) -> None:
        """Add an answer and bring it to the disk."""
        self.answers[answer.key] = answer
        self._file.write(_line(answer.to_json()))
        self._file.flush()
        os.fsync(self._file.fileno())

    def __enter__(self) -> AnswerLog:
        return self

    def __exit__(self, *_error: object) -> None:
        self._file.close()
        if not self.answers:
            # There is nothing to resume from.
            self.path.unlink()

    def _read(self, plan: Mapping[str, Any]) -> bytes:
        lines = self.path.read_bytes().splitlines(keepends=True)
        if lines and not lines[-1].endswith(b"\n"):
            lines.pop()
        if not lines:
            return b""
        try:
            found = json.loads(lines[0])["plan"]
            read = [Answer.from_json(json.loads(line)) for line in lines[1:]]
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(
                f"{self.path}: not a file of answers that eagle-compare wrote ({error}). Move it away, or give another "
                "--out.",
                path=str(self.path),
            ) from error
        if found != plan:
            differing = sorted(name for name in {*found, *plan} if found.get(name) != plan.get(name))
            raise UsageError(
                f"{self.path}: holds answers of another comparison, which differs in {', '.join(differing)}. Give the "
                "same arguments to resume it, or --force to start over.",
                path=str(self.path), differing=differing,
            )  # fmt: skip
        self.answers = {answer.key: answer for answer in read}
        return b"".join(lines)


def _line(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
