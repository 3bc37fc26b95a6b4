"""Show the cost of floors: five domains in Llama-3 tokens, ranked without floors and with them.

    python examples/floors.py tests/data/llama3-domain-counts.npz --size 16384 --floor german=0.93,code=0.925

The file holds counts per id and no documents: a twentieth of each count is held out by binomial draws (seed 0), as one
document. German has a tenth of the weight of each other domain, as where one request in forty is German.
"""

import argparse

import numpy as np
from eagle_slim.vocab_tools import HeldOut, SourceCounts, TokenCounts, measure_coverage, rank_vocabulary
from eagle_slim.vocab_tools.common_cli import parse_shares

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("counts", help="npz file: counts per id, int64 [vocab], by the name of the domain")
parser.add_argument("--size", type=int, default=16384, help="ids to keep (default: %(default)s)")
parser.add_argument("--floor", default="german=0.93,code=0.925", metavar="NAME=SHARE,...", help="default: %(default)s")
args = parser.parse_args()

draws, sources = np.random.default_rng(0), []
for name, counted in np.load(args.counts).items():
    held_out = draws.binomial(counted, 1 / 20)
    token_ids = np.repeat(np.arange(len(counted), dtype=np.int32), held_out)
    weight = 0.1 if name == "german" else 1.0
    sources.append(
        SourceCounts(name, weight, counted - held_out, HeldOut(token_ids, np.array([0, len(token_ids)])), {})
    )
counts, floors = TokenCounts(tuple(sources), None), parse_shares("--floor", [args.floor])

plain = rank_vocabulary(counts, args.size, forced=())
ranked = rank_vocabulary(counts, args.size, forced=(), floors=floors)
print("`ranked here` is without floors.")
print(measure_coverage(ranked, counts, [args.size], beside=plain, floors=floors).table())
account = ranked.provenance["floors"]
others = len(np.setdiff1d(ranked.target_ids, plain.target_ids))
print(f"{others:,} of {args.size:,} ids are others. They cover {account['weighted']:.4%} of the weighted counted text.")
if account["weighted_bound"] is not None:
    print(f"No ids that hold these floors on the counted text cover more than {account['weighted_bound']:.4%} of it.")
