"""Results of eagle-compare whose truth is known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

SIZES = (64, 1000, 4000, 16000, 48000)
COVERED = (0.4, 0.8, 0.93, 0.985, 1.0)


def comparison(folder: Path, per_row_s: float, sizes: tuple[int, ...] = (4000, 16000, 48000)) -> Path:
    """What eagle-compare would write for steps of 0.05 s and this much per row."""
    rows: list[dict[str, Any]] = []
    for size in (0, *sizes):
        chance = 0.6 * float(np.interp(np.log(max(size, 64)), np.log(SIZES), COVERED))
        rows.append({
            "category": "all", "mode": "greedy", "batch": 1, "head": "h", "depth": 5 if size else 0, "top_k": 10,
            "total_tokens": 60, "draft_vocab": size, "tokens_per_s": 9.0, "draft_s_per_step": 0.01 + per_row_s * size,
            "verify_s_per_step": 0.035, "host_s_per_step": 0.005,
            "mean_accepted_length": sum(chance**k for k in range(7)),
        })  # fmt: skip
    # A size that follows a text costs more than its rows, and must not enter.
    rows.append({**rows[-1], "follow": "text", "draft_s_per_step": 7.0, "mean_accepted_length": 6.0})
    report = {"rows": rows, "coverage": [{"sizes": SIZES, "covered": COVERED}], "setup": {"device": "here"}}
    report |= {
        "is_complete": True,
        "remarks": [],
        "recommendations": [{"mode": "greedy", "batch": 1, "is_decided": True}],
    }
    (folder / "compare.json").write_text(json.dumps(report))
    return folder / "compare.json"
