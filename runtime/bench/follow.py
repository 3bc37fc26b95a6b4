"""How many tokens does a pass give when the draft vocabulary follows the prompt or the text?

    python -m eagle_slim.runtime.bench.follow [--prompts FILE] [--sizes 1024 2048 ...] [--new 40] [--rows 512]
                                              [--limit N] [--out FILE]

The built-in head with its target, in float32, greedy. The target answers each prompt once. Every size then drafts along
that answer, nothing, the prompt or the text being followed: each tree is drafted from the target's own features and
walked down the answer, which is what verifying it would accept. So a pass costs a draft and no forward of the target,
and accepted lengths are those of `generate`; the first prompt is generated as well, and must give the same ones.
Nothing is timed: `eagle-compare --follow` does that. The file is written after every prompt; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..comparison.prompt_file import Prompt, load_prompts
from ..drafter.follow import DEFAULT_FOLLOW_ROWS
from ..drafter.reference import NewPairs, ReferenceDrafter
from ..drafter.weights import HeadWeights
from ..model import SpeculativeModel
from ..slots import ActiveSlots
from .timing import machine

SIZES = (1024, 2048, 4096, 8192, 16384, 32000)
FOLLOWS = (None, "prompt", "text")


@dataclass(frozen=True)
class Answer:
    """A prompt with the target's greedy answer and, for every token, the target's features."""

    category: str
    tokens: list[int]
    """Prompt, answer, and as many tokens behind it as a path may overshoot."""
    num_prompt: int
    num_new: int
    """Tokens of the answer: it ends with the first end of sequence, or where it was cut."""
    features: Tensor
    """[seq, feature_width]."""


@torch.inference_mode()
def answer(model: SpeculativeModel, prompt: Prompt, new: int) -> Answer:
    """Let the target answer, one token at a time, and keep its features."""
    ids = model.encode_chat(prompt.turns[0])
    room = model.drafter.tree.path_width
    output = model.generate([ids], max_new_tokens=new + room, speculative=False, ignore_eos=True).token_ids[0]
    ends = [place + 1 for place, token in enumerate(output[:new]) if token in model.eos_token_ids]
    tokens = [*ids, *output]
    target = model.target
    features = target.prefill(target.new_cache(1, len(tokens)), 0, torch.tensor(tokens)).features[0]
    return Answer(prompt.category, tokens, len(ids), min([new, *ends]), features)


@torch.inference_mode()
def accepted_lengths(model: SpeculativeModel, told: Answer) -> tuple[list[int], int]:
    """Draft along an answer: tokens accepted by each pass, and how many ids had joined at the end."""
    weights, tree = model.drafter.weights, model.drafter.tree
    drafter, active = ReferenceDrafter(weights, tree), ActiveSlots.of([0], 1)
    drafter.allocate(1, len(told.tokens))
    first, width = told.num_prompt, tree.path_width
    drafter.prefill(0, told.features[: first - 1], torch.tensor(told.tokens[1:first]))
    follow = weights.follow
    if follow is not None:
        drafter.join(0, told.tokens[:first])
    lengths: list[int] = []
    done, new = first, 1
    while done < first + told.num_new:
        fresh = told.tokens[done : done + new]
        if follow is not None and follow.source == "text":
            drafter.join(0, fresh)
        done += new
        if done >= first + told.num_new:
            break
        features, tokens = torch.zeros(1, width, told.features.shape[1]), torch.full((1, width), -1)
        features[0, :new], tokens[0, :new] = told.features[done - new - 1 : done - 1], torch.tensor(fresh)
        drafted = drafter.draft(active, NewPairs(features, tokens, torch.tensor([new]), (new,)))
        new = _walk(drafted.draft_tokens[0].tolist(), drafted.parents[0].tolist(), told.tokens[done : done + width])
        lengths.append(new)
    return lengths, len(drafter.tails[0])


def _walk(tokens: Sequence[int], parents: Sequence[int], truth: Sequence[int]) -> int:
    """How many tokens a verified tree gives: its nodes along the truth, and the target's own token after them."""
    node = 0
    for accepted, token in enumerate(truth):
        children = [n for n, parent in enumerate(parents) if parent == node and tokens[n] == token]
        if not children or accepted + 1 == len(truth):
            return accepted + 1
        node = children[0]
    return len(truth)


def variants(
    model: SpeculativeModel, sizes: Sequence[int], rows: int
) -> Iterator[tuple[dict[str, Any], SpeculativeModel]]:
    """Every size with everything that it may follow, and the full vocabulary."""
    for size, follow in product(sizes, FOLLOWS):
        cut = model.with_draft_vocab(size)
        yield {"draft_vocab": size, "follow": follow}, cut if follow is None else cut.with_follow(follow, rows)
    yield {"draft_vocab": model.draft_vocab, "follow": None}, model


def outside(weights: HeadWeights, told: Answer) -> int:
    """Tokens of an answer that the base does not hold."""
    base = set(weights.draft_to_target.tolist())
    return sum(token not in base for token in told.tokens[told.num_prompt : told.num_prompt + told.num_new])


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Accepted lengths by size and what is followed, a column for each category, in Markdown."""
    columns = list(dict.fromkeys(category for row in rows for category in row["categories"]))
    lines = ["| rows | follows | " + " | ".join(columns) + " |", "| --- | --- |" + " --- |" * len(columns)]
    fixed: dict[str, float] = {}
    for row in rows:
        cells = []
        for category in columns:
            found = row["categories"][category]
            length = found["tokens"] / found["passes"]
            if row["follow"] is None:
                fixed[category] = length
                cells.append(f"{length:.3f}")
            else:
                cells.append(f"{length:.3f} ({length / fixed[category] - 1:+.1%})")
        lines.append(f"| {row['draft_vocab']:,} | {row['follow'] or '-'} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, default=Path("examples/follow_prompts.jsonl"))
    parser.add_argument("--limit", type=int, help="prompts of each category")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--new", type=int, default=40, help="tokens of an answer")
    parser.add_argument("--rows", type=int, default=DEFAULT_FOLLOW_ROWS, help="most ids that join")
    parser.add_argument("--out", type=Path, help="write the JSON here as well")
    args = parser.parse_args()
    model = SpeculativeModel.from_pretrained(dtype=torch.float32, device="cpu", drafter="reference")
    by_category: dict[str, list[Prompt]] = {}
    for prompt in load_prompts(args.prompts):
        by_category.setdefault(prompt.category, []).append(prompt)
    chosen = [own[place] for place in range(max(map(len, by_category.values()))) for own in by_category.values()
              if place < len(own) and place < (args.limit or len(own))]  # fmt: skip
    found = [(row | {"categories": {}}, cut) for row, cut in variants(model, args.sizes, args.rows)]
    result: dict[str, Any] = {}
    for place, prompt in enumerate(chosen):
        told = answer(model, prompt, args.new)
        for row, cut in found:
            lengths, joined = accepted_lengths(cut, told)
            if place == 0 and row["draft_vocab"] == args.sizes[0]:
                stats = cut.generate([told.tokens[: told.num_prompt]], max_new_tokens=args.new).stats
                real = sorted(stats.accepted_lengths.items())
                assert real == sorted((n, lengths.count(n)) for n in set(lengths)), (row, real, lengths)
            for name in (told.category, "all"):
                sums = row["categories"].setdefault(
                    name, {"prompts": 0, "passes": 0, "tokens": 0, "new_tokens": 0, "outside_base": 0, "joined": 0}
                )
                for key, value in (
                    ("prompts", 1), ("passes", len(lengths)), ("tokens", sum(lengths)), ("new_tokens", told.num_new),
                    ("outside_base", outside(cut.drafter.weights, told)), ("joined", joined),
                ):  # fmt: skip
                    sums[key] += value
        result = {
            "machine": machine(torch.device("cpu")), "prompts": args.prompts.name, "new_tokens": args.new,
            "follow_rows": args.rows, "rows": [row for row, _ in found],
        }  # fmt: skip
        if args.out:
            args.out.write_text(json.dumps(result, indent=1) + "\n")
        print(f"{place + 1} of {len(chosen)} prompts: {told.category}, {told.num_new} tokens", flush=True)
    print(table(result["rows"]))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
