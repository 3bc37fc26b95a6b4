"""Where two answers differ."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import EagleSlimError


def first_difference(found: Sequence[int], own: Sequence[int]) -> int | None:
    """Place of the first token that differs, or that only one of both has; None where they are equal."""
    if list(found) == list(own):
        return None
    return next((i for i, (a, b) in enumerate(zip(found, own, strict=False)) if a != b), min(len(found), len(own)))


def difference(answer: str, found: Sequence[int], own: Sequence[int], place: int, proof: str) -> EagleSlimError:
    """Return the error for a token that differs where none can; ``proof``: `GenerationStats.exactness`."""
    ends = [str(tokens[place]) if place < len(tokens) else "its end" for tokens in (found, own)]
    return EagleSlimError(
        f"{answer} differs from plain decoding at token {place}: {ends[0]} instead of {ends[1]}. It cannot, "
        f"as {proof}: please report it, with the prompt, the options, the GPU and the version of Triton.",
        token=place, found=ends[0], expected=ends[1],
    )  # fmt: skip
