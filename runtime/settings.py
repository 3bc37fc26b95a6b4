"""Shape of a draft tree, and how tokens are chosen: small frozen configurations, validated when built.

Glossary of dimensions used throughout: batch (sequences), slots (places for sequences), seq (positions), nodes
(``total_tokens``, root included), depth, hidden, heads, kv_heads, head_dim, target_vocab, draft_vocab.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import wraps
from numbers import Integral, Real
from typing import ParamSpec, TypeVar

from .errors import OTHER_NAMES, UsageError, check_choice, misfit

_P = ParamSpec("_P")
_R = TypeVar("_R")
MAX_NEW_TOKENS = 16
"""Newly accepted tokens that a step has places for, per slot, unless the tree has longer paths."""
MAX_WAITING = 64
"""Tokens of a slot that plain steps keep for the drafter, which takes them together."""


def explain_unknown(moved: Mapping[str, str]) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Make an unknown keyword of a function a `UsageError`, which says what to write for the names in ``moved``."""

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        known = inspect.signature(function).parameters

        @wraps(function)
        def checked(*args: _P.args, **keywords: _P.kwargs) -> _R:
            for name in keywords:
                if name not in known:
                    near = [f"Did you mean {each}?" for each in get_close_matches(name, known, n=1)]
                    hint = moved.get(name) or " ".join([*near, OTHER_NAMES])
                    called = function.__qualname__.removesuffix(".__init__")
                    raise UsageError(f"{called} takes no {name!r}. {hint}")
            return function(*args, **keywords)

        return checked

    return decorate


def explain_fields(cls: type[_R]) -> type[_R]:
    """Make an unknown field of a dataclass a `UsageError`, as `explain_unknown` does for a function."""
    cls.__init__ = explain_unknown({})(cls.__init__)  # type: ignore[method-assign]
    return cls


@explain_fields
@dataclass(frozen=True)
class TreeConfig:
    """Size of the draft tree, with the meaning the three numbers have in EAGLE-2 and EAGLE-3.

    ``depth``: passes after the first one; a path holds up to ``depth + 1`` drafted tokens. ``top_k``: children per
    expanded node, and nodes expanded per level; 1 drafts a chain. ``total_tokens``: nodes sent to the target, the root
    included. Raises `UsageError` for a number out of range, or more nodes than candidates and the root.
    """

    depth: int = 5
    top_k: int = 10
    total_tokens: int = 60

    @classmethod
    @explain_unknown({})
    def of(cls, depth: int, top_k: int, total_tokens: int | None = None) -> TreeConfig:
        """Build one; ``total_tokens`` None is 60, or all candidates and the root where there are fewer."""
        if total_tokens is None:
            total_tokens = min(cls.total_tokens, cls(depth, top_k, 2).num_candidates + 1)
        return cls(depth, top_k, total_tokens)

    def __post_init__(self) -> None:
        for name, smallest in (("depth", 0), ("top_k", 1), ("total_tokens", 2)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < smallest:
                raise misfit(name, f"an integer of at least {smallest}", value)
        if self.total_tokens - 1 > self.num_candidates:
            raise UsageError(
                f"total_tokens = {self.total_tokens} asks for {self.total_tokens - 1} drafted nodes, but depth = "
                f"{self.depth} and top_k = {self.top_k} give only top_k + depth * top_k^2 = {self.num_candidates} "
                f"candidates. Lower total_tokens to at most {self.num_candidates + 1}, or raise depth or top_k "
                "(of commands: --draft-top-k)."
            )

    @property
    def num_candidates(self) -> int:
        """Drafted candidates among which the tree is chosen: ``top_k + depth * top_k ** 2``."""
        return self.top_k + self.depth * self.top_k**2

    @property
    def path_width(self) -> int:
        """Longest path in nodes, root included: ``depth + 2``."""
        return self.depth + 2

    @property
    def new_tokens_width(self) -> int:
        """Places for the tokens that a step accepts: `MAX_NEW_TOKENS`, or the next power of two for longer paths."""
        return max(MAX_NEW_TOKENS, 1 << (self.path_width - 1).bit_length())


def check_tree(tree: object) -> TreeConfig:
    """Return a tree's shape. Raises `UsageError` for anything else."""
    if not isinstance(tree, TreeConfig):
        raise misfit("tree", "a TreeConfig, such as TreeConfig(depth=5, top_k=10, total_tokens=60)", tree)
    return tree


@dataclass(frozen=True)
class PartialVerification:
    """Let steps run ahead on a part of the cache, between passes over all of it (`step.partial`).

    ``mode``: "exact" keeps what the full pass confirms; "lossy" keeps what the partial passes accepted.
    ``num_blocks``: blocks of 64 keys that a partial pass sees of the prefix, for each layer and KV head, besides the
    most recent ones. ``num_steps``: partial passes between two full ones. ``num_tokens``: most tokens that they are
    ahead. ``min_length``: tokens of the longest prompt of a call from which steps run ahead at all. Raises `UsageError`
    for another mode.
    """

    mode: str = "exact"
    num_blocks: int = 64
    num_steps: int = 8
    num_tokens: int = 31
    min_length: int = 65536

    def __post_init__(self) -> None:
        check_choice("partial_verification", self.mode, ("exact", "lossy"))

    @property
    def chain(self) -> TreeConfig:
        """Tree that a full pass verifies: the newest token, and the tokens ahead."""
        return TreeConfig(depth=self.num_tokens - 1, top_k=1, total_tokens=self.num_tokens + 1)

    def __str__(self) -> str:
        return f"{self.num_steps} passes ahead over {self.num_blocks} blocks ({self.mode})"


@explain_fields
@dataclass(frozen=True)
class SamplingConfig:
    """Choose the target's next token by the usual warpers, in transformers' order.

    ``temperature`` 0 is greedy (the others are then without effect). ``top_k`` 0, ``top_p`` 1.0 and ``min_p`` 0.0 are
    off. ``seed`` with the request's index fixes every draw. Raises `UsageError` for values out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        for name in ("temperature", "top_k", "top_p", "seed", "min_p"):
            value, whole = getattr(self, name), name in ("top_k", "seed")
            if isinstance(value, bool) or not isinstance(value, Integral if whole else Real):
                raise misfit(name, "an integer" if whole else "a number", value)
        for name, holds, expected in (
            ("temperature", 0 <= self.temperature < math.inf, "0 (greedy) or positive"),
            ("top_k", self.top_k >= 0, "0 (off) or positive"),
            ("top_p", 0 < self.top_p <= 1, "in (0, 1]"),
            ("min_p", 0 <= self.min_p <= 1, "in [0, 1]"),
            ("seed", 0 <= self.seed < 2**63, "in [0, 2^63)"),
        ):
            if not holds:
                raise misfit(name, expected, getattr(self, name))

    @property
    def is_greedy(self) -> bool:
        """Whether the most probable token is always taken."""
        return self.temperature == 0
