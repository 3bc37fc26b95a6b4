"""Reuse rows that slots still hold of finished sequences, so that a prompt which continues one is not run again.

After "a b c d" was answered with "e f g", the target's cache has rows for all but the newest token g, and the drafter's
has pairs up to where the last step began. Of the next prompt, "a b c d e f X", all that the slot holds and the prompt
begins with is taken over, token by token; an edited history shares less, and an unrelated prompt nothing::

    held     a b c d e f g          prompt   a b c d e f X
    rows     a b c d e f            taken    a b c d e          run   f X

The last shared token is run again. Its feature pairs with the token after it, and its new keys and values must be those
that the slot held (`HeldRow`): else the weights were changed in a way that nothing else shows (through ``.data``, by a
fused optimiser), and the whole prompt is run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..target.cache import KVCache


def capacity_for(rows: int) -> int:
    """Return the rows to allocate for ``rows``: a power of two from 1024 on, so that few sizes occur.

    Beyond 131,072 exactly as many: there a power of two would cost gigabytes, and more positions than the persistent
    drafter takes.
    """
    return rows if rows > 131072 else max(1024, 1 << (rows - 1).bit_length())


@dataclass(frozen=True)
class KeptRows:
    """A sequence whose rows are still in a slot: all but the newest of ``tokens``, and ``num_pairs`` of the drafter."""

    tokens: tuple[int, ...] = ()
    num_pairs: int = 0

    def num_shared(self, prompt: Sequence[int], is_drafted: bool) -> int:
        """How many tokens at the beginning of a prompt need not be run: all shared ones but the last that has a row."""
        most = min(len(self.tokens) - 1, len(prompt))
        common = next((i for i, (a, b) in enumerate(zip(self.tokens, prompt, strict=False)) if a != b), most)
        shared = min(most, common) - 1
        return max(0, min(shared, self.num_pairs) if is_drafted else shared)

    def cut(self, prompt: Sequence[int], shared: int) -> KeptRows:
        """Return the rows that stay valid after reusing ``shared`` tokens (`num_shared`)."""
        return KeptRows(tuple(prompt[: shared + 1]), min(self.num_pairs, shared))


class HeldRow:
    """Keys and values of one token in all layers, as a slot holds them before the token is run again.

    ``is_exact``: the same weights give the same bits, however a prompt is cut into forwards; else they give nearly the
    same numbers. Nothing here waits for the device.
    """

    def __init__(self, cache: KVCache, slot: int, row: int, is_exact: bool) -> None:
        self._rows = [tensor[:, slot, :, row] for stack in cache.stacks for tensor in stack]
        self._before = [tensor.clone() for tensor in self._rows]
        self._is_exact = is_exact

    def has_changed(self) -> Tensor:
        """Whether the row is another now, as bool []; the run of its token comes before."""
        return torch.stack([self._differs(*pair) for pair in zip(self._rows, self._before, strict=True)]).any()

    def _differs(self, now: Tensor, before: Tensor) -> Tensor:
        """Bool []; both [layers, kv_heads, head_dim]."""
        if self._is_exact:
            return (now.contiguous().view(torch.uint8) != before.view(torch.uint8)).any()
        # Roundings of all layers before: 1.4e-3 of the largest number in float32, 0.35 in bfloat16.
        tolerance = 4 * torch.finfo(now.dtype).eps ** 0.5
        largest = before.abs().amax((1, 2))
        is_near: Tensor = ((now - before).abs().amax((1, 2)) <= tolerance * largest).all()
        return ~is_near


def match_slots(
    prompts: Sequence[Sequence[int]], kept: Sequence[KeptRows], free: Sequence[int], is_drafted: bool
) -> list[tuple[int, int]]:
    """Give each prompt a free slot, those first that share most with it: (slot, shared tokens) by prompt.

    There must be as many free slots as prompts, or more.
    """
    found: dict[int, tuple[int, int]] = {}
    shared = {(place, slot): kept[slot].num_shared(prompt, is_drafted)
              for place, prompt in enumerate(prompts) for slot in free}  # fmt: skip
    for place, slot in sorted(shared, key=lambda pair: (-shared[pair], *pair)):
        if place not in found and all(slot != taken for taken, _ in found.values()):
            found[place] = (slot, shared[place, slot])
    return [found[place] for place in range(len(prompts))]
