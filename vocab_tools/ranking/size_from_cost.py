"""The size of a draft vocabulary that is fastest by a measured cost: time per row against predicted acceptance.

A comparison of a few sizes (`eagle-compare`) gives the time of a step as ``fixed + per_row * rows`` and the accepted
length at coverages that it measured as well. A drafted token is accepted with a chance of ``rate`` times the coverage,
and a path ends with the first that is not, so a path of at most d tokens gives 1 + p + ... + p^d tokens with
p = rate * coverage. With the coverage of any ranking that predicts tokens per second at every size.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import UsageError
from ..files import check_named

_STEP = 64
# A gain in speed below this is not worth more bytes.
_MARGIN = 0.01


@dataclass(frozen=True)
class StepCost:
    """What a step costs on one device, in seconds, and how drafts fare there.

    Attributes:
        fixed_s: of a step, whatever the size: verifying, the host, and drafting without the LM head.
        per_row_s: of each row of the draft vocabulary.
        depth: drafted tokens of the longest path.
        rate: chance that a drafted token is accepted whose id is in the draft vocabulary.
        device: where it was measured.
        sizes: that it was measured at.
        doubts: why the comparison did not settle which size is fastest; none if it did.
    """

    fixed_s: float
    per_row_s: float
    depth: int
    rate: float
    device: str
    sizes: tuple[int, ...]
    doubts: tuple[str, ...] = ()

    @classmethod
    def load(cls, path: str | Path) -> StepCost:
        """Read compare.json, or its folder: greedy if it is there, one prompt at a time, its first head and tree.

        Raises:
            UsageError: the file is none, or holds fewer than two sizes that can be told apart by their rows.
        """
        check_named(path, "comparison")
        try:
            path = Path(path)
            path = path / "compare.json" if path.is_dir() else path
            report = json.loads(path.read_text(encoding="utf-8"))
            rows = [r for r in report["rows"] if r["category"] == "all" and r["draft_vocab"] and r["tokens_per_s"]]
            # A size that follows a text has more rows than its own.
            rows = [row for row in rows if row.get("follow") is None]
            first = min(rows, key=lambda row: (row["mode"] != "greedy", row["batch"]))
            names = ("mode", "batch", "head", "depth", "top_k", "total_tokens")
            same = [row for row in rows if all(row[name] == first[name] for name in names)]
            sizes = np.array([row["draft_vocab"] for row in same], dtype=np.float64)
            draft_s = np.array([row["draft_s_per_step"] for row in same], dtype=np.float64)
            rest_s = np.array([row["verify_s_per_step"] + row["host_s_per_step"] for row in same], dtype=np.float64)
            lengths = np.array([row["mean_accepted_length"] for row in same], dtype=np.float64)
            curve, device = report["coverage"][0], report["setup"]["device"]
            doubts = tuple(_doubts(report, first["mode"], first["batch"]))
            covered = np.interp(np.log(sizes), np.log(curve["sizes"]), curve["covered"])
        except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
            found = "no speed of a draft vocabulary or no coverage in it"
            if isinstance(error, OSError):
                found = str(error.strerror)
            elif isinstance(error, json.JSONDecodeError | UnicodeDecodeError):
                found = f"no JSON: {error}"
            elif isinstance(error, KeyError):
                found = f"no {error} in it"
            raise UsageError(
                f"{path}: expected the compare.json of a comparison with a ranking, found {found}. Make one with "
                "eagle-compare --sizes full,16384,4096 --out DIR.",
                option="--cost", path=str(path), found=found,
            ) from error  # fmt: skip
        if len(set(sizes)) < 2:
            raise UsageError(
                f"{path}: a cost per row takes two sizes or more, found {len(set(sizes))}. Compare more --sizes.",
                option="--cost",
                found=len(set(sizes)),
            )
        slope, intercept = np.polyfit(sizes, draft_s, 1)
        depth = int(first["depth"]) + 1
        return cls(
            float(max(intercept, 0.0) + np.median(rest_s)), float(max(slope, 0.0)), depth,
            _fit_rate(covered, lengths, depth), str(device), tuple(int(size) for size in sizes), doubts,
        )  # fmt: skip

    def accepted_length(self, coverage: NDArray[np.float64]) -> NDArray[np.float64]:
        """Predict tokens per pass from shares of covered tokens, float64 of any shape."""
        return _lengths(self.rate * coverage, self.depth)

    def tokens_per_s(self, sizes: NDArray[np.float64], coverage: NDArray[np.float64]) -> NDArray[np.float64]:
        """Predict decoding speed at sizes with these coverages."""
        return self.accepted_length(coverage) / (self.fixed_s + self.per_row_s * sizes)


def choose_size(
    cost: StepCost, sizes: Sequence[int], covered: Sequence[float], smallest: int, largest: int
) -> tuple[int, dict[str, Any]]:
    """Choose the smallest size, a multiple of 64 or ``largest``, whose predicted speed is within 1% of the best.

    ``sizes`` and ``covered`` are the coverage curve of the ranking, ascending; ``smallest`` and ``largest`` what it
    allows. Returns the account for the manifest, too.
    """
    first = -(-max(smallest, 1) // _STEP) * _STEP
    candidates = np.array([*range(first, largest, _STEP), largest], dtype=np.float64)
    coverage = np.interp(np.log(candidates), np.log(np.asarray(sizes, dtype=np.float64)), covered)
    speeds = cost.tokens_per_s(candidates, coverage)
    chosen = int(np.flatnonzero(speeds >= speeds.max() * (1 - _MARGIN))[0])
    return int(candidates[chosen]), {
        "device": cost.device,
        "measured_sizes": list(cost.sizes),
        "step_fixed_s": round(cost.fixed_s, 9),
        "step_per_row_s": round(cost.per_row_s, 12),
        "acceptance_rate": round(cost.rate, 6),
        "coverage": round(float(coverage[chosen]), 6),
        "predicted_accepted_length": round(float(cost.accepted_length(coverage)[chosen]), 4),
        "predicted_speed_against_all": round(float(speeds[chosen] / speeds[-1]), 4),
        "best_predicted_size": int(candidates[int(speeds.argmax())]),
        "margin": _MARGIN,
    }


def _doubts(report: Mapping[str, Any], mode: str, batch: int) -> Iterator[str]:
    if not report["is_complete"]:
        yield "the comparison was not completed"
    for advice in report["recommendations"]:
        if (advice["mode"], advice["batch"]) == (mode, batch) and not advice["is_decided"]:
            yield f"the comparison decided nothing ({advice['headline']})"
    # Every remark is of a disturbance, and begins with the mode.
    yield from (f"the comparison was disturbed ({remark})" for remark in report["remarks"] if remark.startswith(mode))


def _lengths(chance: NDArray[np.float64], depth: int) -> NDArray[np.float64]:
    powers = np.stack([chance**k for k in range(depth + 1)])
    total: NDArray[np.float64] = powers.sum(0)
    return total


def _fit_rate(covered: NDArray[np.float64], lengths: NDArray[np.float64], depth: int) -> float:
    """Find the rate whose predicted lengths are nearest to the measured ones."""
    rates = np.linspace(0.0, 1.0, 2001)
    errors = [float(((_lengths(rate * covered, depth) - lengths) ** 2).sum()) for rate in rates]
    return float(rates[int(np.argmin(errors))])
