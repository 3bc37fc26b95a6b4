"""Partial verification: what a step over a part of the cache costs, and how much of what runs ahead is confirmed.

    python -m benchmarks.partial [--prefixes 131072] [--batch 1] [--nodes 16 60] [--rates RATES.json] [--out FILE]
    python -m benchmarks.partial --text PROMPTS.txt --lengths 1500 8000 --blocks 4 8 16 [--out RATES.json]

The first, on a GPU: random weights of known dimensions. Rows: whole generation at drawn accepted lengths, full passes
in turn with steps that run ahead, for each number of blocks; of the tokens ahead as many are confirmed as
``--survival`` says, the chance of a token once those before it are. The second, anywhere: the built-in head on parts of
a text, and how many tokens full passes did not confirm.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from eagle_slim.runtime import PartialVerification, SpeculativeModel
from eagle_slim.runtime.settings import TreeConfig
from eagle_slim.runtime.step.decoder import Decoder
from eagle_slim.runtime.step.host_choice import HostChoice
from eagle_slim.runtime.step.kernels.choice_kernels import ChoiceRules
from eagle_slim.runtime.step.run_ahead import PartialDecoder, RunAhead
from eagle_slim.runtime.tree import Trees
from torch import Tensor

from benchmarks.shared.command import Command, show, write
from benchmarks.shared.decoding import LAYERS, RandomModel, compile_ahead, take_turns
from benchmarks.shared.drawn_verdicts import NUM_LENGTHS, DrawnDecoder, draw_lengths
from benchmarks.shared.timing import machine

SURVIVAL = (0.999, 0.995, 0.98)


class DrawnPartialDecoder(PartialDecoder):
    """Runs ahead by drawn lengths, of which full passes confirm as many tokens as ``survivals``, in turn."""

    def __init__(self, lengths: Sequence[int], survivals: Sequence[int], *args: Any) -> None:
        class DrawnRunAhead(RunAhead):
            def _decoder(self, *inner: Any) -> Decoder:
                target, cache, drafter, slots, waits, pool, offsets = inner
                return DrawnDecoder(lengths, target, cache, drafter, slots, waits, pool, offsets)

        self.kind = DrawnRunAhead
        super().__init__(*args)
        self.survivals = torch.tensor(survivals, dtype=torch.int32, device=self.target.device)
        self.turn = torch.zeros(1, dtype=torch.int64, device=self.target.device)

    def choose(
        self, logits: Tensor, trees: Trees, rules: ChoiceRules, host: HostChoice | None, choices: Tensor
    ) -> None:  # fmt: skip
        """Choose as ever, then confirm what was drawn."""
        super().choose(logits, trees, rules, host, choices)
        if choices.shape[1] > 1:
            self.run_ahead.confirm(self.survivals[self.turn % len(self.survivals)])
            self.run_ahead.take_as_is(choices)
            self.turn += 1


def survivals(chance: float, most: int, seed: int = 0) -> list[int]:
    """Draw `NUM_LENGTHS` numbers of tokens before the first that is not confirmed, ``most`` at most."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.rand((NUM_LENGTHS, most), generator=generator) < chance
    return drawn.int().cumprod(1).sum(1).tolist()


@torch.inference_mode()
def measure(
    model: RandomModel, draft_vocab: int, tree: TreeConfig, batch: int, prefix: int,
    options: Sequence[PartialVerification], accepted: float, chances: Sequence[float], steps: int, rounds: int,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """A row of steps with full passes, and one for every option and chance; ratios are of tokens/s to the first."""
    room = tree.total_tokens + (steps + 2) * max(option.num_tokens + 1 for option in options)
    cache = model.new_cache(batch, prefix + room)
    lengths = draw_lengths(accepted, tree.path_width)
    full = model.drawn_decoder(cache, tree, draft_vocab, lengths)
    base = {"batch": batch, "prefix": prefix, "nodes": tree.total_tokens}
    for option in options:
        for chance in chances:
            drawn = survivals(chance, option.num_tokens)
            ahead = model.drawn_partial_decoder(DrawnPartialDecoder, cache, tree, draft_vocab, lengths, drawn, option)
            before, now = take_turns([full, ahead], batch, prefix, steps, rounds)
            yield base | {"blocks": option.num_blocks, "steps_ahead": option.num_steps, "survival": chance,
                          "full": before, "ahead": now,
                          "ratio": now["tokens_per_s"] / before["tokens_per_s"]}  # fmt: skip


def rates(text: str, lengths: Sequence[int], blocks: Sequence[int], num_new: int) -> Iterator[dict[str, Any]]:
    """How much of what runs ahead is confirmed on parts of a text, with the built-in head in float32."""
    model = SpeculativeModel.from_pretrained(dtype="float32", total_tokens=16)
    assert model.tokenizer is not None
    ids = model.tokenizer(text)["input_ids"]
    for length in lengths:
        prompt = [ids[:length]]
        options: dict[str, Any] = {"max_new_tokens": num_new, "ignore_eos": True, "reuse_prefix": True}
        full = model.generate(prompt, **options)
        for count in blocks:
            for mode in ("exact", "lossy"):
                option = PartialVerification(mode, num_blocks=count, min_length=0)
                found = model.generate(prompt, partial_verification=option, **options)
                pairs = zip(found.token_ids[0], full.token_ids[0], strict=True)
                stats, own = found.stats, [ours == theirs for ours, theirs in pairs]
                num_ahead = stats.num_accepted_tokens - stats.num_passes + stats.num_rolled_back_tokens
                yield {
                    "tokens": length, "blocks": count, "mode": mode, "new_tokens": num_new,
                    "full_passes": stats.num_passes, "partial_passes": stats.num_partial_passes,
                    "tree_passes": full.stats.num_passes, "tokens_ahead": num_ahead,
                    "rolled_back": stats.num_rolled_back_tokens, "same_tokens": sum(own),
                }  # fmt: skip


def main(argv: list[str] | None = None) -> None:
    """Run the benchmark; `--help` lists the options."""
    command = Command("partial", __doc__)
    command.add_argument("--text", type=Path, metavar="FILE", help="measure rates on this text instead of time")
    command.add_argument("--lengths", type=int, nargs="+", default=[1500, 4000, 8000])
    command.add_argument("--new-tokens", type=int, default=64)
    command.add_argument("--blocks", type=int, nargs="+", default=[64, 128, 256, 512])
    command.add_argument("--dims", default="llama-3.1-8b", choices=sorted(LAYERS))
    command.add_argument("--draft-vocab", type=int, default=32000)
    command.add_argument("--prefixes", type=int, nargs="+", default=[130000])
    command.add_argument("--batch", type=int, default=1)
    command.add_argument("--nodes", type=int, nargs="+", default=[16, 60])
    command.add_argument("--ahead", type=int, default=8, metavar="STEPS", help="partial passes between full ones")
    command.add_argument("--accepted", type=float, default=3.0, metavar="TOKENS", help="of a pass over a tree")
    command.add_argument("--survival", type=float, nargs="+", default=list(SURVIVAL), metavar="CHANCE")
    command.add_argument("--steps", type=int, default=20)
    command.add_argument("--rounds", type=int, default=3)
    args = command.parse_args(argv)
    result: dict[str, Any] = {"rows": []}
    for row in _rates(args, result) if args.text is not None else _times(command, args, result):
        show(row)
        result["rows"].append(row)
        write(result, args.out)


def _rates(args: argparse.Namespace, result: dict[str, Any]) -> Iterator[dict[str, Any]]:
    result |= {"machine": machine(torch.device("cpu"))}
    yield from rates(args.text.read_text(), args.lengths, args.blocks, args.new_tokens)


def _times(command: Command, args: argparse.Namespace, result: dict[str, Any]) -> Iterator[dict[str, Any]]:
    device = command.gpu()
    model = RandomModel(args.dims, device)
    rows = min(args.draft_vocab, model.dims.vocab)
    trees = [TreeConfig(total_tokens=nodes) for nodes in args.nodes]
    compile_ahead(args.dims, [(tree, args.batch, rows) for tree in trees], device)
    options = [PartialVerification("exact", blocks, args.ahead) for blocks in args.blocks]
    result |= {"dims": args.dims, "draft_vocab": rows, "accepted": args.accepted, "machine": machine(device)}
    for prefix in args.prefixes:
        for tree in trees:
            yield from measure(model, rows, tree, args.batch, prefix, options, args.accepted, args.survival,
                               args.steps, args.rounds)  # fmt: skip


if __name__ == "__main__":
    main()
