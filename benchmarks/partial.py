"""Partial verification: what does it gain where as many tokens ahead are confirmed as is stated?

    python -m benchmarks.partial [--prefixes 128000] [--batch 1] [--nodes 16 60] [--out FILE]

Random weights of known dimensions, on a GPU. Rows: whole generation at drawn accepted lengths, plain decoding, full
passes and partial verification in turn, for each number of blocks; of the tokens of partial passes as many are
confirmed as ``--survival`` says, the chance of a token once those before it are. ``ratio`` is over full passes with the
same tree, ``over_plain`` and ``full_over_plain`` over plain decoding, ``over_fastest`` over the fastest full passes
after as many tokens; ``is_length_met``: ``--accepted`` was reached. On a text of yours,
``stats.num_partial_passes`` and ``stats.num_rolled_back_tokens`` of a call tell how much survives.
"""

from __future__ import annotations

from typing import Any

from eagle_slim.runtime.settings import PartialVerification, TreeConfig

from benchmarks.shared.command import Command, show, write
from benchmarks.shared.decoding import LAYERS, RandomModel, compile_ahead, measure_partial
from benchmarks.shared.timing import machine


def main(argv: list[str] | None = None) -> None:
    """Run the benchmark; `--help` lists the options."""
    command = Command("partial", __doc__)
    command.add_argument("--blocks", type=int, nargs="+", default=[64, 256])
    command.add_argument("--dims", default="llama-3.1-8b", choices=sorted(LAYERS))
    command.add_argument("--draft-vocab", type=int, default=32000)
    command.add_argument("--prefixes", type=int, nargs="+", default=[128000])
    command.add_argument("--batch", type=int, default=1)
    command.add_argument("--nodes", type=int, nargs="+", default=[16, 60])
    command.add_argument("--ahead", type=int, default=8, metavar="STEPS", help="partial passes between full ones")
    command.add_argument("--accepted", type=float, default=3.0, metavar="TOKENS", help="of a pass over a tree")
    command.add_argument("--survival", type=float, nargs="+", default=[0.98, 0.95], metavar="CHANCE")
    command.add_argument("--steps", type=int, default=60, help="with full passes")
    command.add_argument("--rounds", type=int, default=4)
    args = command.parse_args(argv)
    device = command.gpu()
    model = RandomModel(args.dims, device)
    rows = min(args.draft_vocab, model.dims.vocab)
    trees = [TreeConfig(total_tokens=nodes) for nodes in args.nodes]
    compile_ahead(args.dims, [(tree, args.batch, rows) for tree in trees], device)
    options = [PartialVerification("exact", blocks, args.ahead) for blocks in args.blocks]
    result: dict[str, Any] = {
        "dims": args.dims,
        "draft_vocab": rows,
        "accepted": args.accepted,
        "machine": machine(device),
        "rows": [],
    }
    for prefix in args.prefixes:
        of_prefix: list[dict[str, Any]] = []
        for tree in trees:
            for row in measure_partial(
                model, rows, tree, args.batch, prefix, options, args.accepted, args.survival, args.steps, args.rounds
            ):
                of_prefix.append(row)
                fastest = max(each["full"]["tokens_per_s"] for each in of_prefix)
                for each in of_prefix:
                    each["over_fastest"] = each["ahead"]["tokens_per_s"] / fastest
                show(row)
                result["rows"].append(row)
                write(result, args.out)


if __name__ == "__main__":
    main()
