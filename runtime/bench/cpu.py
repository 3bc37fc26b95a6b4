"""Does drafting pay on a CPU? `eagle-compare` on one thread, in CPU time, to which other programs add nothing.

    python -m eagle_slim.runtime.bench.cpu --prompts examples/prompts.jsonl --limit 12 --max-new-tokens 24 \
        --modes greedy --dtype bfloat16 --sizes 4096 --tree 5,10,60 --tree 4,4,16 --tree 3,1,5

All arguments are those of `eagle-compare`.
"""

from __future__ import annotations

import runpy
import time

import torch

if __name__ == "__main__":
    # With a single thread the process's own time is what the step would take on an idle core.
    torch.set_num_threads(1)
    time.perf_counter = time.process_time
    runpy.run_module("eagle_slim.runtime.compare_cli", run_name="__main__")
