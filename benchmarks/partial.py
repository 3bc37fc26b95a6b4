"""Partial verification: what a step over a part of the cache costs, and how much of what runs ahead is confirmed.

    python -m benchmarks.partial [--prefixes 130000] [--batch 1] [--nodes 16 60] [--out FILE]
    python -m benchmarks.partial --text TEXT --lengths 1500 8000 --blocks 4 8 16 [--ask QUESTION] [--out RATES.json]

The first, on a GPU: random weights of known dimensions. Rows: whole generation at drawn accepted lengths, full passes
in turn with steps that run ahead, for each number of blocks; of the tokens ahead as many are confirmed as
``--survival`` says, the chance of a token once those before it are. The second, anywhere: the built-in head on
beginnings of a text (with ``--ask`` a chat that asks about each), how many tokens full passes did not confirm, and the
mean log-probability that the target gives the answer's tokens.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from eagle_slim.runtime import PartialVerification, SpeculativeModel
from eagle_slim.runtime.settings import TreeConfig

from benchmarks.shared.command import Command, show, write
from benchmarks.shared.decoding import LAYERS, RandomModel, compile_ahead
from benchmarks.shared.partial import measure
from benchmarks.shared.timing import machine

SURVIVAL = (0.98, 0.95, 0.9)


def rates(
    text: str, lengths: Sequence[int], blocks: Sequence[int], num_new: int, ask: str | None = None
) -> Iterator[dict[str, Any]]:
    """How much of what runs ahead is confirmed on beginnings of a text, with the built-in head in float32."""
    model = SpeculativeModel.from_pretrained(dtype="float32", total_tokens=16)
    assert model.tokenizer is not None
    ids = model.tokenizer(text)["input_ids"]
    for length in lengths:
        prompt = [ids[:length]]
        if ask is not None:
            prompt = [model.encode_chat(f"{model.tokenizer.decode(ids[:length])}\n\n{ask}")]
        options: dict[str, Any] = {"max_new_tokens": num_new, "ignore_eos": True, "reuse_prefix": True}
        full = model.generate(prompt, **options)
        for count in blocks:
            for mode in ("exact", "lossy"):
                option = PartialVerification(mode, num_blocks=count, min_length=0, always=True)
                found = model.generate(prompt, partial_verification=option, **options)
                pairs = zip(found.token_ids[0], full.token_ids[0], strict=True)
                stats, own = found.stats, [ours == theirs for ours, theirs in pairs]
                num_ahead = stats.num_accepted_tokens - stats.num_passes + stats.num_rolled_back_tokens
                yield {
                    "tokens": length, "blocks": count, "mode": mode, "new_tokens": num_new,
                    "full_passes": stats.num_passes, "partial_passes": stats.num_partial_passes,
                    "tree_passes": full.stats.num_passes, "tokens_ahead": num_ahead,
                    "rolled_back": stats.num_rolled_back_tokens, "same_tokens": sum(own),
                    "log_prob": mean_log_prob(model, prompt[0], found.token_ids[0]),
                }  # fmt: skip


@torch.inference_mode()
def mean_log_prob(model: SpeculativeModel, prompt: Sequence[int], answer: Sequence[int]) -> float:
    """Mean log-probability that the target gives an answer's tokens."""
    ids = torch.tensor([[*prompt, *answer]], device=model.device)
    logits = model.target.model(ids, logits_to_keep=len(answer) + 1).logits[0, :-1].float()
    chosen = ids[0, -len(answer) :, None]
    return float(torch.log_softmax(logits, -1).gather(1, chosen).mean())


def main(argv: list[str] | None = None) -> None:
    """Run the benchmark; `--help` lists the options."""
    command = Command("partial", __doc__)
    command.add_argument("--text", type=Path, metavar="FILE", help="measure rates on this text instead of time")
    command.add_argument("--ask", metavar="QUESTION", help="ask this about the text, as a chat")
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
    command.add_argument("--steps", type=int, default=60, help="with full passes")
    command.add_argument("--rounds", type=int, default=4)
    args = command.parse_args(argv)
    result: dict[str, Any] = {"rows": []}
    for row in _rates(args, result) if args.text is not None else _times(command, args, result):
        show(row)
        result["rows"].append(row)
        write(result, args.out)


def _rates(args: argparse.Namespace, result: dict[str, Any]) -> Iterator[dict[str, Any]]:
    result |= {"ask": args.ask, "machine": machine(torch.device("cpu"))}
    yield from rates(args.text.read_text(), args.lengths, args.blocks, args.new_tokens, args.ask)


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
