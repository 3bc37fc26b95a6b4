"""How fast does llama.cpp draft with all rows of the built-in head, and with fewer, on this CPU?

    python -m benchmarks.llama_cpp [--sizes full,16384,4096] [--kinds bf16,q8_0] [--out FILE]

SmolLM2's GGUF answers questions of `examples/prompts.jsonl`, greedily, on one thread: plainly, and with chains of
drafts from each head, all in turn for each question of each round, each round beginning with another. Timed is the
decoding, by processor time, which what else runs on the machine disturbs least: that of the whole process less that of
one which stops after the first pass. The program's own clock stands beside it. Ratios are of the same round; the median
of rounds and their least and greatest are given, and how many answers are those of plain decoding. llama.cpp is built
where it is not in the cache, by `shared/llama_cpp.py`.
"""

from __future__ import annotations

import platform
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from eagle_slim.runtime.drafter.tuning.arguments import whole_from

from benchmarks.shared.command import Command, show, write
from benchmarks.shared.llama_cpp import build, chat_prompts, generate, pinned
from benchmarks.shared.timing import machine

Figures = dict[str, float]


def make_heads(folder: Path, sizes: Sequence[str], kinds: Sequence[str]) -> dict[str, Path | None]:
    """The built-in head's GGUF files by the names of rows, and none for plain decoding."""
    convert = [sys.executable, "-m", "eagle_slim.convert.cli", "--offline", "--draft-vocab", ",".join(sizes)]
    # One size is written into the folder itself, several side by side.
    subprocess.run([*convert, "--out", folder / "slim", "--gguf", ",".join(kinds)], check=True, stdout=subprocess.PIPE)
    places = {size: f"slim/*-{size if size == 'full' else f'v{size}'}" for size in sizes} if sizes[1:] else {}
    heads: dict[str, Path | None] = {"plain": None}
    for kind in kinds:
        for size in sizes:
            (heads[f"{size} {kind}"],) = folder.glob(f"{places.get(size, 'slim')}/model-{kind}.gguf")
    return heads


def one_round(
    program: Path, prompts: Sequence[str], heads: dict[str, Path | None], order: Sequence[str], depth: int, new: int
) -> dict[str, Figures]:
    """Answer every question with every head: milliseconds a token, what was accepted, and answers as plain ones."""
    sums = ("s", "clock_s", "tokens", "passes", "as_plain")
    found: dict[str, Figures] = {name: dict.fromkeys(sums, 0.0) for name in heads}
    for prompt in prompts:
        texts = {}
        for name in order:
            first = generate(program, prompt, heads[name], depth=depth, num_tokens=0)
            whole = generate(program, prompt, heads[name], depth=depth, num_tokens=new)
            figures = found[name]
            figures["s"] += whole.processor_s - first.processor_s
            figures["clock_s"] += whole.decode_s - first.decode_s
            figures["tokens"] += whole.num_tokens - first.num_tokens
            figures["passes"] += whole.num_passes - first.num_passes
            texts[name] = whole.text
        for name, text in texts.items():
            # An accepted draft may end a few tokens later.
            length = min(len(text), len(texts["plain"]))
            found[name]["as_plain"] += text[:length] == texts["plain"][:length]
    return {
        name: {
            "ms_per_token": figures["s"] / figures["tokens"] * 1e3,
            "clock_ms_per_token": figures["clock_s"] / figures["tokens"] * 1e3,
            "accepted_length": figures["tokens"] / figures["passes"],
            "as_plain": figures["as_plain"],
        }
        for name, figures in found.items()
    }


def summary(rounds: Sequence[dict[str, Figures]], baselines: Sequence[str]) -> Iterator[dict[str, Any]]:
    """A row for each head: medians over the rounds, and speed against each baseline that the rounds have.

    A baseline is "plain", or a size, which means the head of that size and the row's own type.
    """
    for name in rounds[0]:
        row: dict[str, Any] = {"head": name}
        row |= {key: statistics.median(each[name][key] for each in rounds) for key in rounds[0][name]}
        for baseline in baselines:
            other = baseline if baseline == "plain" else f"{baseline} {name.split()[-1]}"
            if other != name and other in rounds[0]:
                ratios = [each[other]["ms_per_token"] / each[name]["ms_per_token"] for each in rounds]
                row[f"speed / {baseline}"] = statistics.median(ratios)
                row[f"range / {baseline}"] = [min(ratios), max(ratios)]
        yield row


def processor() -> str:
    """The processor's name, as Linux says it."""
    try:
        found = re.search(r"model name\s*: (.+)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
    except OSError:
        found = None
    return found[1] if found else platform.processor() or platform.machine()


def main(argv: list[str] | None = None) -> None:
    """Run the benchmark; `--help` lists the options."""
    command = Command("llama_cpp", __doc__)
    command.add_argument("--sizes", default="full,16384,4096", help="rows of the head, the first is the baseline")
    command.add_argument("--kinds", default="bf16,q8_0", help="types of the head's matrices")
    command.add_argument("--prompts", type=whole_from(1), default=4)
    command.add_argument("--new", type=whole_from(1), default=48, help="tokens of an answer")
    command.add_argument("--depth", type=whole_from(1), default=3, help="drafts of a pass")
    command.add_argument("--rounds", type=whole_from(1), default=5)
    args = command.parse_args(argv)
    sizes, kinds = args.sizes.split(","), args.kinds.split(",")
    program = build()
    about = {**machine(torch.device("cpu")), "device": processor(), "llama.cpp": f"b{pinned()[1].split('.')[0]}"}
    setup = {key: getattr(args, key) for key in ("prompts", "new", "depth")}
    rounds: list[dict[str, Figures]] = []
    with tempfile.TemporaryDirectory() as folder:
        heads = make_heads(Path(folder), sizes, kinds)
        prompts, names = chat_prompts(args.prompts), list(heads)
        for number in range(args.rounds):
            start = number % len(names)
            rounds.append(one_round(program, prompts, heads, names[start:] + names[:start], args.depth, args.new))
            rows = list(summary(rounds, ("plain", sizes[0])))
            write({"machine": about, "setup": setup, "rows": rows, "rounds": rounds}, args.out)
    for row in rows:
        show(row)


if __name__ == "__main__":
    main()
