"""From answers to figures: a row for every candidate, mode, batch size and category."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

import numpy as np
import torch

from ..model import SpeculativeModel
from .answers import Answer
from .compare import ALL, PLAIN, Candidate, CoverageCurve, Plan
from .statistics import Estimate, Measured, Stall, Timings, find_disturbed, find_stalls, measure, ratio


@dataclass(frozen=True)
class Row:
    """One line of the table: a candidate (or "plain"), a mode, a batch size, and a category (or "all")."""

    candidate: str
    size: str
    draft_vocab: int
    """0 for plain decoding."""
    draft_bytes: int
    """Bytes of weights that drafting one tree reads; 0 for plain decoding."""
    head: str
    tree: tuple[int, int, int]
    """Depth, top_k and total_tokens; (0, 0, 1) for plain decoding."""
    mode: str
    batch: int
    category: str
    num_prompts: int
    """Prompts (groups of them in a batch) that the intervals are over."""
    num_answers: int
    num_identical: int
    """Answers equal to plain decoding's, token for token."""
    num_new_tokens: int
    accepted_lengths: Mapping[int, int]
    prefill_s: float
    total_s: float
    measured: Measured | None = None
    """None where no step was made: every answer ended with its first token."""
    speedup: Estimate | None = None
    """How many times faster than plain decoding."""
    follow: str | None = None
    """Whose ids join the draft vocabulary: "prompt", "text", or None."""
    follow_rows: int = 0
    """Most ids that join."""
    num_missed: int = 0
    """New tokens that the draft vocabulary did not hold; 0 for plain decoding, which drafts nothing."""

    @property
    def num_passes(self) -> int:
        """Target passes, summed over sequences."""
        return sum(self.accepted_lengths.values())

    @property
    def num_accepted_tokens(self) -> int:
        """Tokens that the passes gave."""
        return sum(length * count for length, count in self.accepted_lengths.items())

    @property
    def mean_accepted_length(self) -> float:
        """Tokens per target pass."""
        return self.num_accepted_tokens / self.num_passes if self.num_passes else 0.0

    @property
    def missed_rate(self) -> float:
        """Share of the new tokens that the draft vocabulary did not hold."""
        return self.num_missed / self.num_new_tokens if self.num_new_tokens else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Decoding speed, prompt processing left out; of all sequences of a batch together."""
        return self.measured.tokens_per_s.value if self.measured else 0.0

    @property
    def step_s(self) -> float:
        """Seconds of one step: medians of drafting, verifying and host work."""
        return self.measured.step_s if self.measured else 0.0

    def to_json(self) -> dict[str, Any]:
        """Return the row's figures under their names; times in seconds, None where nothing was measured."""
        found, depth = self.measured, self.tree[0]
        estimates: dict[str, Estimate | None] = {
            "mean_accepted_length": found.accepted_length if found else None,
            "tokens_per_s": found.tokens_per_s if found else None,
            "speedup": self.speedup,
        }
        intervals = {
            name: None if estimate is None else round(estimate.value, 4) for name, estimate in estimates.items()
        } | {
            f"{name}_{end}": None if estimate is None else _finite(getattr(estimate, end))
            for name, estimate in estimates.items()
            for end in ("low", "high")
        }
        return {
            "candidate": self.candidate,
            "size": self.size,
            "draft_vocab": self.draft_vocab,
            "draft_bytes": self.draft_bytes,
            "follow": self.follow,
            "follow_rows": self.follow_rows,
            "head": self.head,
            "depth": depth,
            "top_k": self.tree[1],
            "total_tokens": self.tree[2],
            "mode": self.mode,
            "batch": self.batch,
            "category": self.category,
            "num_prompts": self.num_prompts,
            "num_answers": self.num_answers,
            "num_identical": self.num_identical,
            "num_new_tokens": self.num_new_tokens,
            "num_passes": self.num_passes,
            "num_accepted_tokens": self.num_accepted_tokens,
            "num_missed": self.num_missed,
            "missed_rate": round(self.missed_rate, 6),
            **intervals,
            "step_s": round(self.step_s, 6),
            "draft_s_per_step": round(found.draft_s, 6) if found else 0.0,
            "verify_s_per_step": round(found.verify_s, 6) if found else 0.0,
            "host_s_per_step": round(found.host_s, 6) if found else 0.0,
            "prefill_s": round(self.prefill_s, 4),
            "total_s": round(self.total_s, 4),
            "accepted_lengths": {str(length): count for length, count in sorted(self.accepted_lengths.items())},
        }


@dataclass(frozen=True)
class CompareReport:
    """Everything that was measured; `recommend` draws the conclusions."""

    rows: tuple[Row, ...]
    curves: tuple[CoverageCurve, ...]
    setup: dict[str, Any]
    remarks: tuple[str, ...] = ()
    """Stalls and other disturbances of the measurement, as sentences."""
    is_complete: bool = True
    """Whether all answers that were planned are in."""
    categories: tuple[str, ...] = field(default=())
    """Categories with rows of their own; none where there is only one."""

    def find(self, candidate: str, mode: str, category: str = ALL, batch: int | None = None) -> Row:
        """Return one row, of the first batch size unless one is given. Raises KeyError when it is not there."""
        for row in self.rows:
            if (row.candidate, row.mode, row.category) == (candidate, mode, category) and batch in (None, row.batch):
                return row
        raise KeyError((candidate, mode, category, batch))

    @property
    def modes(self) -> list[str]:
        """Names of the modes, in the order they were run."""
        return list(dict.fromkeys(row.mode for row in self.rows))

    @property
    def batches(self) -> list[int]:
        """Batch sizes, in the order they were run."""
        return list(dict.fromkeys(row.batch for row in self.rows))

    @property
    def candidates(self) -> list[str]:
        """Labels of the candidates, in the order given, without plain decoding."""
        return list(dict.fromkeys(row.candidate for row in self.rows if row.candidate != PLAIN))


def build_report(
    candidates: Sequence[Candidate],
    plan: Plan,
    answers: Sequence[Answer],
    curves: Iterable[CoverageCurve] = (),
) -> CompareReport:
    """Work out the figures of every candidate, mode, batch size and category from answers, all of them or a part."""
    labels = {PLAIN: None, **{candidate.label: candidate for candidate in candidates}}
    categories = list(dict.fromkeys(answer.category for answer in answers if answer.category is not None))
    shown = [ALL, *(categories if len(categories) > 1 else [])]
    rows: list[Row] = []
    remarks: list[str] = []
    for mode in dict.fromkeys(mode.name for mode in plan.modes):
        for batch in plan.batches:
            run = [answer for answer in answers if (answer.key.mode, answer.key.batch) == (mode, batch)]
            for category in shown:
                chosen = [answer for answer in run if category in (ALL, answer.category)]
                if chosen:
                    found, timings = _measure(labels, chosen)
                    rows += _rows(labels, chosen, found, (mode, batch, category))
                    if category == ALL:
                        remarks += _remarks(timings, found, mode if batch == 1 else f"{mode}, batch {batch}")
    return CompareReport(
        tuple(rows),
        tuple(curves),
        describe(candidates[0].model, candidates, plan),
        tuple(remarks),
        len(answers) == plan.num_calls(len(candidates)),
        tuple(shown[1:]),
    )


def describe(model: SpeculativeModel, candidates: Sequence[Candidate], plan: Plan) -> dict[str, Any]:
    """Return what was compared, on which device and how, as plain values."""
    device = model.target.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    kind = model.drafter_kind
    return {
        "target": (model.opened.target_name if model.opened else None) or type(model.target.model).__name__,
        "heads": list(dict.fromkeys(candidate.head for candidate in candidates)),
        "target_vocab": int(model.target.text_config.vocab_size),
        "device": name,
        "dtype": str(model.target.dtype).removeprefix("torch."),
        "drafter": kind if isinstance(kind, str) else type(model.drafter).__name__,
        "draft_weights": model.draft_weights,
        "candidates": [candidate.label for candidate in candidates],
        "follow_rows": max(candidate.follow_rows for candidate in candidates),
        "trees": list(dict.fromkeys(_tree_name(candidate) for candidate in candidates)),
        "num_prompts": len(plan.prompts),
        "num_turns": sum(len(prompt.turns) for prompt in plan.prompts),
        "modes": {mode.name: mode.options for mode in plan.modes},
        "batches": list(plan.batches),
        "max_new_tokens": plan.max_new_tokens,
        "repeats": plan.repeats,
        "versions": {package: version(package) for package in ("eagle-slim", "torch", "transformers")},
    }


def _tree_name(candidate: Candidate) -> str:
    return f"depth {candidate.tree.depth}, top_k {candidate.tree.top_k}, {candidate.tree.total_tokens} nodes"


def _measure(
    labels: Mapping[str, Candidate | None], answers: Sequence[Answer]
) -> tuple[dict[str, Measured], dict[str, Timings]]:
    """Measure on the prompts that every candidate has answered in full: a comparison may have been interrupted."""
    by_label: dict[str, list[Answer]] = {label: [] for label in labels}
    for answer in answers:
        by_label[answer.key.candidate].append(answer)
    turns = [{(a.key.repeat, a.key.group, a.key.turn) for a in each} for each in by_label.values()]
    complete = set.intersection(*turns)
    groups = {group: place for place, group in enumerate(sorted({group for _, group, _ in complete}))}
    timings = {}
    for label, each in by_label.items():
        used = [a for a in each if (a.key.repeat, a.key.group, a.key.turn) in complete]
        steps = np.array([step for a in used for step in a.steps], dtype=np.float64).reshape(-1, 3)
        owners = [groups[a.key.group] for a in used for _ in a.steps]
        accepted, passes = np.zeros(len(groups)), np.zeros(len(groups))
        for a in used:
            passes[groups[a.key.group]] += sum(a.accepted_lengths.values())
            accepted[groups[a.key.group]] += sum(length * count for length, count in a.accepted_lengths.items())
        candidate = labels[label]
        nodes = 1 if candidate is None else candidate.tree.total_tokens
        timings[label] = Timings(
            steps[:, 0], steps[:, 1], steps[:, 2], np.array(owners, dtype=np.int64), accepted, passes, nodes
        )
    return measure(timings) if groups else {}, timings


def _rows(
    labels: Mapping[str, Candidate | None],
    answers: Sequence[Answer],
    found: Mapping[str, Measured],
    place: tuple[str, int, str],
) -> Iterable[Row]:
    mode, batch, category = place
    for label, candidate in labels.items():
        own = [answer for answer in answers if answer.key.candidate == label]
        lengths: Counter[int] = Counter()
        for answer in own:
            lengths.update(answer.accepted_lengths)
        num_prompts = len({answer.key.group for answer in own})
        tree = None if candidate is None else candidate.tree
        speedup = ratio(found[label], found[PLAIN], num_prompts) if label in found and PLAIN in found else None
        yield Row(
            label,
            PLAIN if candidate is None else candidate.size or label,
            0 if candidate is None else candidate.model.draft_vocab,
            0 if candidate is None else candidate.draft_bytes,
            "" if candidate is None else candidate.head,
            (0, 0, 1) if tree is None else (tree.depth, tree.top_k, tree.total_tokens),
            mode,
            batch,
            category,
            num_prompts,
            sum(answer.num_answers for answer in own),
            sum(answer.num_identical for answer in own),
            sum(len(row) for answer in own for row in answer.token_ids),
            dict(sorted(lengths.items())),
            sum(answer.prefill_s for answer in own),
            sum(answer.total_s for answer in own),
            found.get(label),
            speedup,
            None if candidate is None else candidate.follow,
            0 if candidate is None else candidate.follow_rows,
            sum(answer.num_missed for answer in own),
        )


def _remarks(timings: Mapping[str, Timings], found: Mapping[str, Measured], where: str) -> Iterable[str]:
    for stall in find_stalls(timings):
        yield _stall_remark(stall, where)
    for label in find_disturbed(found):
        own, pooled = found[label].own_verify_s, found[label].verify_s
        yield (
            f"{where}, {label}: verifying took {own * 1e3:.1f} ms a step, {pooled * 1e3:.1f} ms over all candidates, "
            "though the work is the same. The machine was busy with something else; measure again when it is quiet."
        )
    plain = found.get(PLAIN)
    slower = [each.verify_s for label, each in found.items() if label != PLAIN]
    if plain and slower and plain.verify_s > 1.25 * min(slower):
        yield (
            f"{where}: plain decoding took {plain.verify_s * 1e3:.1f} ms a step, longer than verifying a whole tree "
            f"({min(slower) * 1e3:.1f} ms), which is more work. The speed-ups are too high; measure again."
        )


def _stall_remark(stall: Stall, where: str) -> str:
    return (
        f"{where}, {stall.candidate}: {stall.num_stalled} of {stall.num_steps} steps stalled, the longest for "
        f"{stall.longest_s * 1e3:.0f} ms where {stall.median_s * 1e3:.1f} ms are usual. The medians leave them out."
    )


def _finite(value: float) -> float | None:
    return round(value, 4) if np.isfinite(value) else None
