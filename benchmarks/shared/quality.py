"""KL divergence of 16-bit forwards from a float32 one of the same weights, over real text: ours and transformers'.

Ours twice: the forward of a prompt, and whole steps over trees, in which a logits processor has the text chosen, token
by token, and each token is chosen by the logits of the node before it. All are compared at the same positions.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from eagle_slim.runtime import GenerationOutput, SpeculativeModel
from torch import Tensor

from benchmarks.shared.decoding import prompt_logits

WINDOW, OPENING, BATCH = 512, 8, 16
"""Tokens of a piece of text; of these the prompt of the steps over trees; pieces side by side there."""
NUM_TOKENS = 20_000
TOLERANCE = 1.02


@torch.inference_mode()
def measure_quality(
    model: SpeculativeModel, text: Sequence[int], whole: Any, num_tokens: int = NUM_TOKENS, window: int = WINDOW
) -> dict[str, Any]:
    """Measure each forward's mean KL divergence and share of equal argmax over ``num_tokens`` or more of ``text``.

    ``whole``: a model whose weights are those of the float32 forward: the target's own, or what it was quantised from.
    ``is_good``: neither of ours is worse than transformers' by more than `TOLERANCE`. Raises ValueError for too little
    text, and where pieces begin alike.
    """
    transformers: Any = model.target.model
    precise = type(whole)(copy.deepcopy(whole.config)).float().to(model.device).eval()
    precise.load_state_dict({name: tensor.float() for name, tensor in whole.state_dict().items()})
    scored = window - OPENING
    count = -(-num_tokens // scored)
    pieces = [list(text[place : place + window]) for place in range(0, len(text) - window + 1, window)][:count]
    if len(pieces) < count or len({tuple(piece[:OPENING]) for piece in pieces}) < count:
        raise ValueError(f"{count} pieces of {window} tokens that begin differently are needed, got {len(pieces)}")
    sums: dict[str, list[Tensor]] = {name: [] for name in ("transformers", "prompt", "trees")}
    path = ""
    for first in range(0, count, BATCH):
        group = pieces[first : first + BATCH]
        output, logits_of_trees = decode_as_trees(model, group)
        path = output.stats.path
        for piece, trees in zip(group, logits_of_trees, strict=True):
            ids = torch.tensor([piece], device=model.device)
            where = slice(OPENING - 1, window - 1)
            wanted = precise(ids).logits[0, where]
            found = {
                "transformers": transformers(ids).logits[0, where],
                "prompt": prompt_logits(model.target.runs, piece)[where],
            }
            for name, logits in (found | {"trees": trees}).items():
                sums[name].append(torch.stack(list(distances(wanted, logits.to(model.device)))))
    means = {name: (torch.stack(each).sum(0) / (count * scored)).tolist() for name, each in sums.items()}
    quality = {name: {"kl_divergence": kl, "equal_argmax": equal} for name, (kl, equal) in means.items()}
    kl, equal = means["transformers"]
    is_good = all(means[name][0] <= kl * TOLERANCE and means[name][1] * TOLERANCE >= equal for name in means)
    return {"tokens": count * scored, "path": path, "quality": quality, "is_good": is_good}


def distances(wanted: Tensor, found: Tensor) -> Iterator[Tensor]:
    """Sum the KL divergence, and equal argmax, over positions; logits [positions, vocab], float64 results."""
    true, other = wanted.double().log_softmax(-1), found.double().log_softmax(-1)
    yield (true.exp() * (true - other)).sum()
    yield (wanted.argmax(-1) == found.argmax(-1)).sum().double()


def decode_as_trees(model: SpeculativeModel, pieces: Sequence[Sequence[int]]) -> tuple[GenerationOutput, list[Tensor]]:
    """Decode pieces of text side by side, as if the target chose each next token of them.

    Returns the output, and the target's logits for each piece, float32 [new tokens, vocab].
    """
    by_opening = {tuple(piece[:OPENING]): piece for piece in pieces}
    logits: dict[tuple[int, ...], dict[int, Tensor]] = {opening: {} for opening in by_opening}

    def choose_text(ids: Tensor, scores: Tensor) -> Tensor:
        opening = tuple(ids[0, :OPENING].tolist())
        piece = by_opening[opening]
        # A position of a draft that is not kept is chosen, and written, again.
        logits[opening][ids.shape[1]] = scores[0].clone()
        # A draft may continue past the end of the text.
        token = piece[min(ids.shape[1], len(piece) - 1)]
        return torch.full_like(scores, -torch.inf).index_fill(1, torch.tensor([token], device=scores.device), 0.0)

    output = model.generate(
        [list(piece[:OPENING]) for piece in pieces],
        max_new_tokens=len(pieces[0]) - OPENING,
        ignore_eos=True,
        logits_processor=[choose_text],
    )
    if output.token_ids != [list(piece[OPENING:]) for piece in pieces]:
        raise AssertionError("the steps did not follow the text")
    places = range(OPENING, len(pieces[0]))
    return output, [torch.stack([found[place] for place in places]) for found in logits.values()]
