"""How long ranking takes on a vocabulary of 262,144 tokens, beside the plain Python way.

Baseline: a `Counter` built from the same counts and `most_common`, as FR-Spec's script ranks, with forced ids put
first. Both are checked to choose the same ids before anything is timed. Counts are Zipf distributed with many ties.

    python -m eagle_slim.vocab_tools.bench.rank
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ..counting.counts import SourceCounts, TokenCounts
from ..ranking.rank import rank_vocabulary


def _python_ranking(counts: NDArray[np.int64], forced: list[int], size: int) -> list[int]:
    wanted = set(forced)
    counter = Counter({token_id: int(count) for token_id, count in enumerate(counts)})
    first = sorted(wanted, key=lambda token_id: (-counter[token_id], token_id))
    # most_common is stable, and the ids were inserted ascending: ties are by id.
    rest = [token_id for token_id, _ in counter.most_common() if token_id not in wanted]
    return (first + rest)[:size]


def _milliseconds(call: Callable[[], object], repeats: int) -> list[float]:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - start))
    return times


def main() -> None:
    """Check, time, print a table and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=262_144)
    parser.add_argument("--size", type=int, default=32_000)
    parser.add_argument("--repeats", type=int, default=9)
    arguments = parser.parse_args()
    rng = np.random.default_rng(0)
    counts = rng.permutation((1e7 / np.arange(1, arguments.vocab + 1)).astype(np.int64))
    forced = rng.choice(arguments.vocab, 300, replace=False).tolist()
    counted = TokenCounts((SourceCounts("zipf", 1.0, counts, None, {}),), None)

    def ours() -> NDArray[np.int64]:
        return rank_vocabulary(counted, size=arguments.size, forced=forced).target_ids

    def baseline() -> list[int]:
        return _python_ranking(counts, forced, arguments.size)

    if ours().tolist() != baseline():
        sys.exit("the two rankings differ")
    result = {"vocab": arguments.vocab, "size": arguments.size, "machine": platform.machine()}
    for name, call in (("rank_vocabulary", ours), ("counter_most_common", baseline)):
        times = _milliseconds(call, arguments.repeats)
        result[f"{name}_ms"] = round(statistics.median(times), 2)
        print(f"{name:<22} median {statistics.median(times):8.2f} ms   min {min(times):.2f}   max {max(times):.2f}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
