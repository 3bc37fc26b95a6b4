"""Steps that run ahead, over drawn accepted lengths and drawn confirmations."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from eagle_slim.runtime.settings import PartialVerification, TreeConfig
from eagle_slim.runtime.step.choice import HostChoice
from eagle_slim.runtime.step.decoder import Decoder
from eagle_slim.runtime.step.kernels.choice_kernels import ChoiceRules
from eagle_slim.runtime.step.run_ahead import PartialDecoder
from eagle_slim.runtime.tree import Trees
from torch import Tensor

from benchmarks.shared.decoding import RandomModel, take_turns
from benchmarks.shared.drawn_verdicts import DrawnDecoder, draw_lengths

NUM_SURVIVALS = 256


class DrawnPartialDecoder(PartialDecoder):
    """Runs ahead by drawn lengths, of which full passes confirm as many tokens as ``survivals``, in turn."""

    def __init__(self, lengths: Sequence[int], survivals: Sequence[int], *args: Any) -> None:
        self._lengths = lengths
        super().__init__(*args)
        self.survivals = torch.tensor(survivals, dtype=torch.int32, device=self.target.device)
        self.turn = torch.zeros(1, dtype=torch.int64, device=self.target.device)

    def new_ahead(self, *args: Any) -> Decoder:
        """Run ahead by the drawn lengths."""
        return DrawnDecoder(self._lengths, *args)

    def choose(
        self, logits: Tensor, trees: Trees, rules: ChoiceRules, host: HostChoice | None, choices: Tensor
    ) -> None:  # fmt: skip
        """Choose as ever, then confirm what was drawn."""
        super().choose(logits, trees, rules, host, choices)
        if choices.shape[1] > 1:
            self.count.clamp_(max=self.survivals[self.turn % len(self.survivals)])
            self.take_as_is(choices)
            self.turn += 1


def survivals(chance: float, most: int) -> list[int]:
    """`NUM_SURVIVALS` numbers of tokens before the first that is not confirmed, ``most`` at most.

    In the order of van der Corput's sequence, so that a short run of them has their mean, too.
    """
    if chance >= 1:
        return [most] * NUM_SURVIVALS
    bits = NUM_SURVIVALS.bit_length() - 1
    places = [(int(f"{place:0{bits}b}"[::-1], 2) + 0.5) / NUM_SURVIVALS for place in range(NUM_SURVIVALS)]
    return [min(most, int(math.log(place) / math.log(chance))) for place in places]


@torch.inference_mode()
def measure(
    model: RandomModel, draft_vocab: int, tree: TreeConfig, batch: int, prefix: int,
    options: Sequence[PartialVerification], accepted: float, chances: Sequence[float], steps: int, rounds: int,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Measure a row for every option and chance: ``steps`` with full passes, as many that run ahead, and their ratio.

    The ratio is that of tokens/s. A step that runs ahead holds ``num_steps`` trees, so fewer of them are run.
    """
    room = tree.total_tokens + (steps + 2) * max(option.num_tokens + 1 for option in options)
    cache = model.new_cache(batch, prefix + room)
    lengths = draw_lengths(accepted, tree.path_width)
    full = model.drawn_decoder(cache, tree, draft_vocab, lengths)
    base = {"batch": batch, "prefix": prefix, "nodes": tree.total_tokens}
    for option in options:
        drawn = [survivals(chance, option.num_tokens) for chance in chances]
        ahead = model.drawn_decoder(
            cache, tree, draft_vocab, lengths, drawn[0], kind=DrawnPartialDecoder, option=option
        )
        for chance, own in zip(chances, drawn, strict=True):
            ahead.survivals.copy_(torch.tensor(own))
            numbers = [steps, max(1, steps // option.num_steps)]
            before, now = take_turns([full, ahead], batch, prefix, numbers, rounds)
            yield base | {"blocks": option.num_blocks, "steps_ahead": option.num_steps, "survival": chance,
                          "full": before, "ahead": now,
                          "ratio": now["tokens_per_s"] / before["tokens_per_s"]}  # fmt: skip
