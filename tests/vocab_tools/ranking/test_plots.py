from dataclasses import replace
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pytest
from eagle_slim.vocab_tools.counting.counts import TokenCounts
from eagle_slim.vocab_tools.ranking.coverage import measure_coverage
from eagle_slim.vocab_tools.ranking.plots import plot_coverage, render_coverage
from eagle_slim.vocab_tools.ranking.rank import rank_vocabulary
from eagle_slim.vocab_tools.ranking.report import CoverageReport
from support.token_counts import source


@pytest.fixture(scope="module")
def report() -> CoverageReport:
    rng = np.random.default_rng(0)
    counts = TokenCounts(
        tuple(
            source(rng.integers(0, 50, 3000), [rng.integers(0, 3000, 30).tolist() for _ in range(5)], name=name)
            for name in ("chat", "code")
        ),
        None,
    )
    return measure_coverage(rank_vocabulary(counts, size=2048, forced=[]), counts)


def test_bytes_depend_on_the_figures_only(report: CoverageReport, tmp_path: Path) -> None:
    first = render_coverage(report)
    with mpl.rc_context({"lines.linewidth": 9, "font.size": 20}):
        assert render_coverage(report) == first
    plot_coverage(report, tmp_path / "a.png")
    plot_coverage(report, tmp_path / "b.png")
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes() == first
    lower = replace(report.sources[0], coverage=report.sources[0].coverage * 0.5)
    assert render_coverage(replace(report, sources=(lower, *report.sources[1:]))) != first


def test_full_coverage_and_a_single_size_can_be_drawn(report: CoverageReport) -> None:
    full = replace(report.sources[0], coverage=np.ones(len(report.sizes)), low=None, high=None)
    assert render_coverage(replace(report, sources=(full,))).startswith(b"\x89PNG")
    one = replace(report.sources[0], coverage=np.array([0.5]), baseline=np.array([0.4]), low=None, high=None)
    single = replace(report, sizes=(2048,), shown=(2048,), sources=(one,))
    assert render_coverage(single).startswith(b"\x89PNG")
