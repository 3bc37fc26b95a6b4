"""Options of a comparison: everything but the models and the prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from ..errors import UsageError, misfit
from ..settings import SamplingConfig, TreeConfig

MODES = ("greedy", "sampled")
MARKER = "compare.json"
"""The file that tells a folder of a comparison."""
_SAMPLING = SamplingConfig(temperature=1.0)


@dataclass(frozen=True)
class CompareOptions:
    """Options of `compare`. Raises `UsageError` for values out of range, and for values given twice.

    ``sizes``: numbers of rows, in the order of the head's own ranking, or "full" for all that it has; None is
    "full" and the powers of two from 32,768 to 2,048 that a head can be cut to. ``trees``: shapes of which None is
    the choice by step; None for that of the models, which a CPU chooses unless they were given one. ``windows``:
    tokens that drafts look back on, 0 for all, None for the head's own; without any, the models'. ``sampling``: of
    the mode "sampled". ``batches``: prompts answered at a time; the last group is filled up from the beginning.
    ``partial_verification``: as in `SpeculativeModel.generate`.
    """

    sizes: Sequence[int | Literal["full"]] | None = None
    trees: Sequence[TreeConfig | None] | None = None
    windows: Sequence[int | None] | None = None
    modes: Sequence[str] = MODES
    sampling: SamplingConfig = _SAMPLING
    batches: Sequence[int] = (1,)
    max_new_tokens: int = 128
    partial_verification: str | None = None

    def __post_init__(self) -> None:
        for name in ("sizes", "trees", "windows", "modes", "batches"):
            values = getattr(self, name)
            if values is not None and not (values and len(set(values)) == len(values)):
                raise misfit(name, "one value or more, each once", values)
        for size in self.sizes or ():
            if size != "full" and not (isinstance(size, int) and size > 0):
                raise misfit("sizes", 'numbers of rows, or "full"', size)
        for mode in self.modes:
            if mode not in MODES:
                raise misfit("modes", " or ".join(MODES), mode)
        for name, least in (("batches", 1), ("max_new_tokens", 2)):
            value = getattr(self, name)
            if min(value if isinstance(value, Sequence) else (value,)) < least:
                raise misfit(name, f"at least {least}", value)
        if "sampled" in self.modes and self.sampling.is_greedy:
            raise UsageError('The mode "sampled" needs a temperature above 0. Leave it out to compare greedy decoding.')

    def generation(self, mode: str) -> Mapping[str, Any]:
        """Return the arguments of `SpeculativeModel.generate` that choose tokens as a mode does."""
        return {} if mode == "greedy" else asdict(self.sampling)
