"""What does SafeAILab's EAGLE gain from the patches? Its own generation, patched drafter, fully patched, in one run.

    python -m benchmarks.safeailab --upstream EAGLE --out benchmarks/results/DATE-h200-upstream-smollm2.json
    python -m benchmarks.safeailab --upstream EAGLE --dims llama-3.1-8b --draft-vocab 32000
    python -m benchmarks.safeailab --upstream EAGLE --device cpu --dims tiny --dtype float32 --rounds 0

``--upstream`` (or EAGLE_SLIM_UPSTREAM) is a clone of the repository; its transformers version must be installed.
``smollm2-135m`` is the built-in head with its target, the others are random models (`ea_model`). Every variant first
generates what upstream does (in float32 a difference is a failure, below it the length that is equal is reported);
then they are timed in turn.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from eagle_slim.runtime.drafter.tuning.timing import synchronize
from eagle_slim.runtime.safeailab.patch import EaModelPatch
from eagle_slim.runtime.settings import TreeConfig
from torch import Tensor

from benchmarks.shared.command import Command, show, write
from benchmarks.shared.ea_model import BUILT_IN, build_ea_model, read_prompt
from benchmarks.shared.timing import machine


@contextlib.contextmanager
def patched(patch: Any) -> Iterator[None]:
    """Put a patch on for a while; None does nothing."""
    if patch is not None:
        patch.apply()
    try:
        yield
    finally:
        if patch is not None:
            patch.remove()


def generate(model: Any, prompt: Tensor, max_new_tokens: int) -> dict[str, Any]:
    """Generate greedily: the new ids, milliseconds of each pass after the first, tokens/s, and memory at the peak."""
    times, output = [], prompt
    is_gpu = prompt.is_cuda
    if is_gpu:
        torch.cuda.reset_peak_memory_stats(prompt.device)
    synchronize(prompt.device)
    start = time.perf_counter()
    for longer in model.ea_generate(prompt, max_new_tokens=max_new_tokens):
        synchronize(prompt.device)
        times.append(time.perf_counter())
        output = longer
    ids = output[0, prompt.shape[1] :].tolist()
    return {
        "ids": ids, "passes_ms": [(after - before) * 1e3 for before, after in itertools.pairwise(times)],
        "num_passes": len(times), "tokens_per_s": len(ids) / (times[-1] - start),
        "peak_bytes": torch.cuda.max_memory_allocated(prompt.device) if is_gpu else None,
    }  # fmt: skip


def draft_ms(model: Any, prompt: Tensor, max_new_tokens: int) -> float:
    """Median milliseconds of a call of ``topK_genrate`` in a generation, from an idle device to its answer."""
    times, own = [], model.ea_layer.topK_genrate

    def timed(*arguments: Any, **options: Any) -> Any:
        synchronize(prompt.device)
        start = time.perf_counter()
        answer = own(*arguments, **options)
        synchronize(prompt.device)
        times.append((time.perf_counter() - start) * 1e3)
        return answer

    with mock.patch.object(model.ea_layer, "topK_genrate", timed):
        generate(model, prompt, max_new_tokens)
    # The first takes in the prompt.
    return statistics.median(times[1:])


def equal_length(ids: list[int], truth: list[int]) -> int:
    """Tokens up to the first difference; the shorter one's length if one begins the other."""
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(ids, truth, strict=False))
    return len(list(pairs))


def run(
    model: Any, tree: TreeConfig, prompt: Tensor, drafter: str, new_tokens: int, rounds: int
) -> list[dict[str, Any]]:
    """Check all variants with one tree, then time them ``rounds`` times in turn."""
    layer = model.ea_layer
    # As its constructor would.
    layer.depth, layer.top_k, layer.total_tokens = tree.depth, tree.top_k, tree.total_tokens - 1
    layer.init_tree()
    patches: dict[str, Any] = {"upstream": None}
    answers: dict[str, list[dict[str, Any]]] = {"upstream": [], "drafter": [], "whole": []}
    for _ in range(rounds + 1):
        for variant, found in answers.items():
            if variant not in patches:
                # Built after upstream's own run, whose memory must not count it; both share the packed weights.
                whole = EaModelPatch(model, drafter=drafter)
                patches |= {"drafter": whole.layer, "whole": whole}
            with patched(patches[variant]):
                found.append(generate(model, prompt, new_tokens))
    truth, rows = answers["upstream"][0]["ids"], []
    for variant, (first, *timed) in answers.items():
        equal, length = equal_length(first["ids"], truth), len(first["ids"])
        row = {
            "tree": [tree.depth, tree.top_k, tree.total_tokens], "variant": variant, "new_tokens": length,
            "prompt_tokens": prompt.shape[1], "num_passes": first["num_passes"],
            "accepted_length": length / first["num_passes"], "equal_tokens": equal,
            "is_equal": equal == min(len(truth), length), "peak_bytes": first["peak_bytes"],
        }  # fmt: skip
        if timed:
            if variant != "whole":  # the drafts of both patches are the same call
                with patched(patches[variant]):
                    row["draft_ms"] = draft_ms(model, prompt, new_tokens)
            row["pass_ms"] = statistics.median(ms for answer in timed for ms in answer["passes_ms"])
            row["tokens_per_s"] = statistics.median(answer["tokens_per_s"] for answer in timed)
        rows.append(row)
        show(row)
    return rows


def main(argv: list[str] | None = None) -> None:
    """Check, and compare. Exit 1 where float32 text differs."""
    command = Command("safeailab", __doc__)
    command.add_argument("--upstream", type=Path, default=os.environ.get("EAGLE_SLIM_UPSTREAM"), help="clone of EAGLE")
    command.add_argument("--dims", default=BUILT_IN, choices=["tiny", BUILT_IN, "llama-3.2-1b", "llama-3.1-8b"])
    command.add_argument("--draft-vocab", type=int, default=0, help="LM-head rows of a random head (default: all)")
    command.add_argument("--tree", type=int, nargs=3, default=[5, 10, 60], metavar=("DEPTH", "TOP_K", "NODES"))
    command.add_argument("--new-tokens", type=int, default=64)
    command.add_argument("--rounds", type=int, default=3, help="that are timed; 0 only checks")
    command.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    command.add_argument("--device", default="cuda")
    command.add_argument("--drafter", choices=["triton", "reference"], help="default: triton on a GPU")
    args = command.parse_args(argv)
    if args.upstream is None or not (Path(args.upstream) / "eagle" / "model" / "ea_model.py").is_file():
        command.error("--upstream (or EAGLE_SLIM_UPSTREAM) must name a clone of github.com/SafeAILab/EAGLE")
    drafter = args.drafter or ("triton" if args.device.startswith("cuda") else "reference")
    sys.path.insert(0, str(args.upstream))
    import transformers

    transformers.logging.set_verbosity_error()
    device, dtype = torch.device(args.device), getattr(torch, args.dtype)
    clone = str(args.upstream)
    commit = subprocess.run(["git", "-C", clone, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    torch.manual_seed(0)
    model, prompt = build_ea_model(args.dims, dtype, device, args.draft_vocab), read_prompt(args.dims, device)
    result: dict[str, Any] = {
        "dims": args.dims, "draft_vocab": model.ea_layer.lm_head.weight.shape[0], "dtype": args.dtype,
        "drafter": drafter, "upstream": commit.stdout.strip() or "unknown",
        "transformers": transformers.__version__, "machine": machine(device),
        "rows": run(model, TreeConfig(*args.tree), prompt, drafter, args.new_tokens, args.rounds),
    }  # fmt: skip
    write(result, args.out)
    if dtype == torch.float32 and not all(row["is_equal"] for row in result["rows"]):
        sys.exit(1)


if __name__ == "__main__":
    main()
