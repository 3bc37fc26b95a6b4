"""Choose the ids that hold floors, shares that a vocabulary must cover of each of some sources, at the best coverage.

With x_i = 1 for the ids chosen, s_i the weighted share of id i and p_ki its share of source k's counted text:

    maximise Σ_i s_i x_i   with   Σ_i p_ki x_i ≥ g_k   and   Σ_i x_i = N

HiGHS solves it for 0 ≤ x_i ≤ 1 (`scipy.optimize.linprog`). In a corner of that polytope no more ids are fractional than
there are conditions, so rounding them costs almost nothing, and the multipliers λ_k of the conditions give a bound on
any choice: the N largest of s_i + Σ_k λ_k p_ki, less Σ_k λ_k g_k.

Ids are chosen by counted text alone. A floor f_k is a share of the text that is measured, held-out where there is some:
g_k begins there, and rises by what the choice falls short until it does not. Where no choice is found so, HiGHS looks
for whole x_i that hold the floors on the measured text itself (`scipy.optimize.milp`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from .errors import VocabularyError

_MAX_ROUNDS = 30
# Floors on counted text rise by 1.1 times the shortfall and two tokens in a million, so that few rounds are needed.
_RISE, _STEP = 1.1, 2e-6
_TOLERANCE = 1e-12
# HiGHS holds conditions to a millionth.
_MARGIN = 2e-6
_SEARCH_S = 60.0


@dataclass(frozen=True, eq=False)
class FloorProblem:
    """Ids to choose from, and floors to hold, float64 [floors].

    Attributes:
        score: weighted share of counted text per id, float64 [ids].
        is_forced: ids that every choice holds, bool [ids].
        counted, measured: share of each source's counted, and measured, text per id, float64 [floors, ids].
    """

    score: NDArray[np.float64]
    is_forced: NDArray[np.bool_]
    counted: NDArray[np.float64]
    measured: NDArray[np.float64]
    floors: NDArray[np.float64]

    def reached(self, chosen: NDArray[np.bool_]) -> NDArray[np.float64]:
        """Return the share of the measured text that a choice covers of each source, float64 [floors]."""
        return np.asarray(self.measured[:, chosen].sum(axis=1))

    def holds(self, chosen: NDArray[np.bool_]) -> bool:
        """Report whether a choice, bool [ids], holds all floors; sums of float64 shares are a few ulps off."""
        return bool((self.reached(chosen) >= self.floors - _TOLERANCE).all())

    def choose(self, size: int) -> tuple[NDArray[np.bool_], float] | None:
        """Choose `size` ids that hold all floors, bool [ids], by counted text; None where no choice was found so.

        Returns also the most weighted share that any `size` ids cover which hold the floors on counted text.
        """
        needed, bound = self.floors, np.inf
        for _ in range(_MAX_ROUNDS):
            solved = self._solve(needed, size)
            if solved is None:
                return None
            fractions, multipliers = solved
            worth = self.score + multipliers @ self.counted
            chosen = self._largest(worth, fractions, size)
            if bound == np.inf:
                bound = float(worth[chosen].sum() - multipliers @ needed)
            if self.holds(chosen):
                return chosen, bound
            short = self.floors - self.reached(chosen)
            raised = needed + np.where(short > _TOLERANCE, _RISE * short + _STEP, 0)
            # No floor needs to rise above what all ids cover.
            needed = np.maximum(self.floors, np.minimum(raised, self.counted.sum(axis=1)))
        return None

    def search(self, size: int) -> tuple[NDArray[np.bool_], None] | None:
        """Choose `size` ids that hold all floors by the measured text, bool [ids]; None where none were found."""
        from scipy.optimize import Bounds, LinearConstraint, milp

        if self.is_impossible(size):
            return None
        used = np.flatnonzero(self.is_forced | (self.score > 0) | self.measured.any(axis=0))
        num = min(size, len(used))
        covers = LinearConstraint(self.measured[:, used], self.floors + _MARGIN)
        has_size = LinearConstraint(np.ones((1, len(used))), num, num)
        bounds, limits = Bounds(self.is_forced[used], 1), {"time_limit": _SEARCH_S, "mip_rel_gap": 1e-4}
        solution = milp(-self.score[used], integrality=1, bounds=bounds, constraints=[covers, has_size], options=limits)
        if solution.x is None:
            return None
        wanted = np.zeros(len(self.score))
        wanted[used] = np.round(solution.x)
        chosen = np.zeros(len(self.score), np.bool_)
        chosen[np.lexsort((-self.score, -wanted))[:size]] = True
        return (chosen, None) if self.holds(chosen) else None

    def is_impossible(self, size: int) -> bool:
        """Report whether not even parts of `size` ids hold all floors, so that no choice can."""
        return replace(self, counted=self.measured)._solve(self.floors, size) is None

    def _solve(self, needed: NDArray[np.float64], size: int) -> tuple[NDArray[np.float64], NDArray[np.float64]] | None:
        """Return the best x [ids], and λ [floors]; None where `size` ids do not cover what is needed."""
        from scipy.optimize import linprog

        used = np.flatnonzero(self.is_forced | (self.score > 0) | self.counted.any(axis=0))
        conditions = np.vstack([-self.counted[:, used], np.ones(len(used))])
        bounds = np.column_stack([self.is_forced[used], np.ones(len(used))])
        solution = linprog(-self.score[used], conditions, np.append(-needed, size), bounds=bounds)
        if solution.status == 2:
            return None
        if solution.status != 0:
            raise VocabularyError(f"Floors: HiGHS found no solution: {solution.message}.")
        fractions = np.zeros(len(self.score))
        fractions[used] = solution.x
        return fractions, np.maximum(-solution.ineqlin.marginals[:-1], 0.0)

    def _largest(self, worth: NDArray[np.float64], fractions: NDArray[np.float64], size: int) -> NDArray[np.bool_]:
        """Return forced ids and those of the most worth, bool [ids]; of equal worth, those of the larger x.

        Ids whose shares are the same in every source are taken from the lowest on, whichever of them HiGHS took.
        """
        ids = np.arange(len(worth))
        by_fraction = np.empty(len(worth))
        by_fraction[np.lexsort((ids, self._twins))] = fractions[np.lexsort((-fractions, self._twins))]
        rounded = np.round(worth / max(worth.max(), _TOLERANCE), 12)
        order = np.lexsort((ids, -np.round(by_fraction, 6), -rounded, ~self.is_forced))
        chosen = np.zeros(len(worth), np.bool_)
        chosen[order[:size]] = True
        return chosen

    @cached_property
    def _twins(self) -> NDArray[np.int64]:
        """Number of the group of ids with the same shares and forcing, int64 [ids]."""
        columns = np.vstack([self.is_forced, self.score, self.counted])
        return np.unique(columns, axis=1, return_inverse=True)[1].reshape(-1)
