"""Compare SafeAILab's EAGLE with its patched drafter and with the whole patch, in one run.

    python benchmarks/safeailab.py --upstream EAGLE --base-model PATH --ea-model PATH --prompt "Why is the sky blue?" \\
        --compare --print_output
    python benchmarks/safeailab.py --upstream EAGLE --base-model PATH --ea-model PATH --prompts question.jsonl \\
        --depths 5 7 --total-tokens 32 60 --runs 5 --out result.json
    python benchmarks/safeailab.py --upstream EAGLE                                           # SmolLM2
    python benchmarks/safeailab.py --upstream EAGLE --dims llama-3.1-8b --draft-vocab 32000
    python benchmarks/safeailab.py --upstream EAGLE --dims llama-3.3-70b --draft-vocab 32000
    python benchmarks/safeailab.py --upstream EAGLE --device cpu --dims tiny --dtype float32 --runs 0

``--upstream`` (or EAGLE_SLIM_UPSTREAM) is a clone of the repository; its transformers version must be installed.
Without a model of your own, ``smollm2-135m`` is the built-in head with its target, and the others are random models
(`ea_model`): that of 70B has 8 of its 80 layers, so that it fits on one GPU; its head, and
what a draft takes, are whole. Greedy, every variant first generates what upstream does (in float32 a difference is a
failure, below it the length that is equal is reported); then all are timed in turn. Attention, MLP and LM head of an
EAGLE-3 draft are timed apart: in upstream's as modules, in the kernel, which is one launch, by its time stamps where
``EAGLE_SLIM_STAMPS=1`` is in the environment.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import inspect
import itertools
import os
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from eagle_slim.runtime.api.output import first_difference
from eagle_slim.runtime.compare.prompts import load_prompts
from eagle_slim.runtime.drafter.kernels.grid_barrier import FIRST_STAMP, STAMPS
from eagle_slim.runtime.errors import PromptFileError, UsageError
from eagle_slim.runtime.opening.devices import choose_device
from eagle_slim.runtime.safeailab.patch import EaModelPatch
from eagle_slim.runtime.settings import TreeConfig
from torch import Tensor

# As a script, too.
sys.path.append(str(Path(__file__).resolve().parents[1]))
from benchmarks.shared.command import Command, show, whole_from, write
from benchmarks.shared.ea_model import BUILT_IN, build_ea_model, encode, load_ea_model, read_prompt
from benchmarks.shared.timing import barriers_of, machine, synchronize

VARIANTS = ("drafter", "whole")
PARTS = {"attention": ("QKV", "attention", "output"), "mlp": ("MLP",), "lm_head": ("LM head, top-k",)}
"""Parts of a draft, and what `barriers_of` calls them."""


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


def generate(model: Any, prompts: list[Tensor], args: argparse.Namespace) -> dict[str, Any]:
    """Generate, and return new ids by prompt, milliseconds of each pass after the first, seconds and peak memory."""
    options = {"temperature": args.temperature, "max_new_tokens": args.new_tokens, "max_length": args.max_length}
    device, passes_ms, answers, seconds = prompts[0].device, [], [], 0.0
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    num_passes = 0
    for prompt in prompts:
        times, output = [], prompt
        synchronize(device)
        start = time.perf_counter()
        for longer in model.ea_generate(prompt, **options):
            synchronize(device)
            times.append(time.perf_counter())
            output = longer
        answers.append(output[0, prompt.shape[1] :].tolist())
        passes_ms += [(after - before) * 1e3 for before, after in itertools.pairwise(times)]
        num_passes, seconds = num_passes + len(times), seconds + times[-1] - start
    return {
        "ids": answers,
        "passes_ms": passes_ms,
        "num_passes": num_passes,
        "seconds": seconds,
        "peak_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
    }


def timed(own: Callable[..., Any], device: torch.device, times: list[float]) -> Callable[..., Any]:
    """Wrap a function so that the milliseconds of each call, between idle devices, are added to ``times``."""

    def call(*arguments: Any, **options: Any) -> Any:
        synchronize(device)
        start = time.perf_counter()
        answer = own(*arguments, **options)
        synchronize(device)
        times.append((time.perf_counter() - start) * 1e3)
        return answer

    return call


def stamped_parts(patch: Any) -> dict[str, float]:
    """Return the ms of the last draft's parts by the kernel's time stamps; empty where it has none."""
    layer = patch.layer if isinstance(patch, EaModelPatch) else patch
    bufs, found = layer.bufs, Counter[str]()
    if not STAMPS.value or bufs.params is None or layer.kind != "eagle3":
        return {}
    stamps = bufs.workspace["barrier"][FIRST_STAMP:].view(torch.int64).tolist()
    names = barriers_of(bufs.params.layout.split, layer.tree.depth)
    # The first stamp is of the end; a part ends at its barrier.
    for name, (begin, end) in zip(names[1:], itertools.pairwise(stamps[1 : 1 + len(names)]), strict=True):
        found[name] += (end - begin) / 1e6
    return {f"draft_{part}_ms": sum(found[name] for name in own) for part, own in PARTS.items()}


def part_times(model: Any, patch: Any, prompts: list[Tensor], args: argparse.Namespace) -> dict[str, float]:
    """Time drafts and verifications of a generation, each from an idle device to its end: medians in milliseconds.

    A draft is a call of ``topK_genrate``, or the replay that stands for it in the whole patch; one for each prompt
    takes that in. A verification is a call of ``tree_decoding``. Attention, MLP and LM head: of upstream's own EAGLE-3
    drafts means, from a generation of their own; of the kernel's the last draft's.
    """
    device, drafts, verifies = prompts[0].device, list[float](), list[float]()
    layer = model.ea_layer

    def listen(owner: Any, name: str, times: list[float]) -> contextlib.AbstractContextManager[object]:
        return mock.patch.object(owner, name, timed(getattr(owner, name), device, times))

    if isinstance(patch, EaModelPatch):
        with listen(patch.layer, "launch", drafts), listen(patch.step, "tree_decoding", verifies), patched(patch):
            generate(model, prompts, args)
    else:
        names = inspect.getmodule(inspect.unwrap(type(model).ea_generate))
        with patched(patch), listen(layer, "topK_genrate", drafts), listen(names, "tree_decoding", verifies):
            generate(model, prompts, args)
    found = {} if patch is None else stamped_parts(patch)
    if patch is None and hasattr(layer, "midlayer"):
        modules = dict(zip(PARTS, (layer.midlayer.self_attn, layer.midlayer.mlp, layer.lm_head), strict=True))
        times: dict[str, list[float]] = {name: [] for name in modules}
        with contextlib.ExitStack() as stack:
            for name, module in modules.items():
                stack.enter_context(listen(module, "forward", times[name]))
            generate(model, prompts, args)
        found = {f"draft_{name}_ms": sum(each) / len(drafts) for name, each in times.items()}
    return {"draft_ms": statistics.median(drafts), "verify_ms": statistics.median(verifies), **found}


def compare_texts(answers: list[list[int]], truth: list[list[int]]) -> dict[str, Any]:
    """Count the tokens that equal upstream's, up to the end of the shorter answer, and whether all do."""
    shorter = [min(len(ids), len(theirs)) for ids, theirs in zip(answers, truth, strict=True)]
    firsts = map(first_difference, answers, truth)
    equal = [length if first is None else first for first, length in zip(firsts, shorter, strict=True)]
    return {"equal_tokens": sum(equal), "is_equal": equal == shorter}


def run(model: Any, tree: TreeConfig, prompts: list[Tensor], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Check the variants with one tree, then time them ``args.runs`` times in turn."""
    layer = model.ea_layer
    # As its constructor would.
    layer.depth, layer.top_k, layer.total_tokens = tree.depth, tree.top_k, tree.total_tokens - 1
    layer.init_tree()
    answers = {"upstream": [generate(model, prompts, args)]}
    # Built after upstream's own run, whose memory must not count it; both share the packed weights.
    drafter = "triton" if prompts[0].is_cuda else "reference"
    whole = EaModelPatch(model, drafter=drafter, target_backend=args.target_backend)
    patches = {"upstream": None, "drafter": whole.layer, "whole": whole}
    patches = {name: patch for name, patch in patches.items() if patch is None or name in args.compare}
    for turn in range(1 + args.warmup + args.runs):
        for variant, patch in patches.items():
            if turn > 0 or patch is not None:
                with patched(patch):
                    found = generate(model, prompts, args)
                if not 0 < turn <= args.warmup:
                    answers.setdefault(variant, []).append(found)
    rows: list[dict[str, Any]] = []
    for variant, (first, *timed_answers) in answers.items():
        length = sum(map(len, first["ids"]))
        row = {
            "tree": [tree.depth, tree.top_k, tree.total_tokens],
            "variant": variant,
            "new_tokens": length,
            "prompt_tokens": sum(prompt.shape[1] for prompt in prompts),
            "num_passes": first["num_passes"],
            "accepted_length": length / first["num_passes"],
            "peak_gb": None if first["peak_bytes"] is None else first["peak_bytes"] / 1e9,
        }
        if whole.step is not None and variant == "whole":
            row["forward"] = str(whole.step.backend)
        if args.temperature == 0:
            row |= compare_texts(first["ids"], answers["upstream"][0]["ids"])
        if args.runs:
            passes_ms = [ms for answer in timed_answers for ms in answer["passes_ms"]]
            row["pass_ms"] = statistics.median(passes_ms) if passes_ms else None
            speeds = [sum(map(len, answer["ids"])) / answer["seconds"] for answer in timed_answers]
            row["tokens_per_s"] = statistics.median(speeds)
            row |= part_times(model, patches[variant], prompts, args)
            base = rows[0] if rows else row
            row["draft_speedup"] = base["draft_ms"] / row["draft_ms"]
            row["speedup"] = row["tokens_per_s"] / base["tokens_per_s"]
        rows.append(row)
        show(row)
        if args.print_eagle_timers and args.runs:
            print(f"{variant}: draft {row['draft_ms']:.3f} ms, verify {row['verify_ms']:.3f} ms")
        for ids in first["ids"] if args.print_output else ():
            print(f"{variant}: {model.tokenizer.decode(ids) if args.base_model else ids}")
    return rows


def main(argv: list[str] | None = None) -> None:
    """Check, and compare. Exit 1 where float32 text differs."""
    args = parse(argv)
    sys.path.insert(0, str(args.upstream))
    import transformers

    transformers.logging.set_verbosity_error()
    device, dtype, clone = torch.device(args.device), getattr(torch, args.dtype), str(args.upstream)
    git = ["git", "-C", clone, "rev-parse", "--show-prefix", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout
    torch.manual_seed(0)
    if args.base_model:
        model = load_ea_model(args.base_model, args.ea_model, args.use_eagle3, dtype, device)
        prompts = [encode(model.tokenizer, text, device) for text in args.prompt]
    else:
        model = build_ea_model(args.dims, dtype, device, args.draft_vocab)
        prompts = [read_prompt(args.dims, device)]
    result: dict[str, Any] = {
        "model": args.base_model or args.dims,
        "head": args.ea_model or "random or built in",
        "layers": len(model.base_model.model.layers),
        "dtype": args.dtype,
        "temperature": args.temperature,
        "num_prompts": len(prompts),
        "runs": args.runs,
        # A folder inside of another repository has a prefix.
        "upstream": commit.strip() if commit.startswith("\n") else "unknown",
        "transformers": transformers.__version__,
        "machine": machine(device),
        "rows": [],
    }
    head = getattr(model.ea_layer, "lm_head", model.base_model.lm_head)
    result["draft_vocab"] = head.weight.shape[0]
    for tree in args.trees:
        result["rows"] += run(model, tree, prompts, args)
        write(result, args.out)
        # The next tree's first row is upstream's own memory again.
        gc.collect()
    if dtype == torch.float32 and not all(row.get("is_equal", True) for row in result["rows"]):
        sys.exit(1)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line; ``prompt`` becomes a list of texts, ``trees`` one of `TreeConfig`."""
    command = Command("safeailab", __doc__)
    add = command.add_argument
    add("--upstream", type=Path, default=os.environ.get("EAGLE_SLIM_UPSTREAM"), help="clone of EAGLE")
    add("--base-model", "--base_model_path", metavar="PATH", help="target, as of EaModel.from_pretrained")
    add("--ea-model", "--ea_model_path", metavar="PATH", help="head, as of EaModel.from_pretrained")
    add("--use-eagle3", action=argparse.BooleanOptionalAction, default=True, help="as EaModel.from_pretrained")
    add("--prompt", action="append", default=[], metavar="TEXT", help="to a model of your own; may be repeated")
    add("--prompts", type=Path, metavar="FILE", help="a prompt a line, or JSON lines with turns or prompt")
    add("--dims", choices=["tiny", BUILT_IN, "llama-3.2-1b", "llama-3.1-8b", "llama-3.3-70b"], help="a random model's")
    add("--draft-vocab", type=whole_from(1), default=0, help="LM-head rows of a random head (default: all)")
    add(
        "--compare",
        nargs="*",
        choices=VARIANTS,
        default=[],
        metavar="VARIANT",
        help="patches beside upstream's own: drafter, whole (default, and without a value: both)",
    )
    add("--print_output", "--print-output", action="store_true", help="print what each variant generated, once")
    add("--depths", type=int, nargs="+", default=[5], help="of the trees (default: 5)")
    add("--total-tokens", type=int, nargs="+", default=[60], help="nodes of the trees, with the root (default: 60)")
    add("--top-k", type=int, default=10)
    add("--new-tokens", "--max_new_tokens", type=whole_from(1), default=64, help="for each prompt")
    add("--max-length", type=whole_from(1), default=2048, help="of upstream's KV cache, in tokens (default: 2048)")
    add("--temperature", type=float, default=0.0, help="above 0, texts are not compared")
    add("--runs", type=whole_from(0), default=3, help="that are timed; 0 only checks")
    add("--warmup", type=whole_from(0), nargs="?", const=1, default=0, metavar="N", help="untimed runs before those")
    add("--print_eagle_timers", "--print-eagle-timers", action="store_true", help="print a draft's and a pass's ms")
    add("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    add("--device", default="cuda")
    add("--target-backend", choices=("auto", "fused", "upstream"), default="auto", help="forward of the whole patch")
    args = command.parse_args(argv)
    if args.upstream is None or not (Path(args.upstream) / "eagle" / "model" / "ea_model.py").is_file():
        command.error("--upstream (or EAGLE_SLIM_UPSTREAM) must name a clone of github.com/SafeAILab/EAGLE")
    try:
        args.prompt += [prompt.turns[0] for prompt in load_prompts(args.prompts)] if args.prompts else []
        args.trees = [TreeConfig(depth, args.top_k, n) for depth in args.depths for n in args.total_tokens]
        choose_device(args.device)
    except (PromptFileError, UsageError) as error:
        command.error(str(error))
    own = args.base_model, args.ea_model, args.prompt
    if any(own) and (not all(own) or args.dims or args.draft_vocab):
        command.error(
            "a model of your own needs --base-model, --ea-model and --prompt or --prompts, and takes no --dims, "
            "--draft-vocab"
        )
    args.dims, args.compare = args.dims or BUILT_IN, args.compare or VARIANTS
    return args


if __name__ == "__main__":
    main()
