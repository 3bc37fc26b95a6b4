"""Whether steps that run ahead pay, told by the tokens that full passes confirm: no clock, so one seed gives one text.

    running ahead   tokens of a full pass / cost of the cycle that it ends
    full passes     tokens of a tree      / 1

Costs are in steps with full passes over trees (`step.tree_size`). A tree's tokens are those that partial passes
accept: what they see of the prefix changes which tokens these are, hardly how many.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..settings import PartialVerification

_LEAST_PASSES = 6
"""Full passes before anything is concluded."""


@dataclass
class AheadPace:
    """Of one call; ``cost``: of its cycles."""

    option: PartialVerification
    cost: float
    num_passes: int = 0
    """Full passes of all sequences."""
    num_accepted: int = 0
    """Tokens that these gave."""
    num_partial: int = 0
    """Partial passes of all sequences."""
    num_partial_tokens: int = 0
    """Tokens that these accepted, also those for which the chain had no place."""
    num_lost: int = 0
    """Tokens ahead that full passes did not confirm."""

    @property
    def loses(self) -> str | None:
        """Where running ahead is slower, a sentence that says so with its figures."""
        if self.option.always or self.num_passes < _LEAST_PASSES:
            return None
        if self.num_accepted * self.num_partial >= self.cost * self.num_partial_tokens * self.num_passes:
            return None
        num_ahead = self.num_accepted - self.num_passes + self.num_lost
        return (
            f"running ahead does not pay here: {num_ahead - self.num_lost} of {num_ahead} tokens ahead were confirmed, "
            f"and a full pass with those before it costs {self.cost:.1f} steps"
        )
