"""How fast does llama.cpp draft with all rows of the built-in head, and with fewer, on this CPU?

    python -m benchmarks.llama_cpp [--sizes full,16384,4096] [--kinds bf16,q8_0] [--out FILE]

SmolLM2's GGUF answers questions of `examples/prompts.jsonl`, greedily, on one thread: plainly, and with chains of
drafts from each head, all in turn for each question of each round, each round beginning with another. Timed is the
decoding, by processor time, which what else runs on the machine disturbs least: that of the whole process less that of
one which stops after the first pass. The program's own clock stands beside it. Milliseconds are of all answers
together, ratios of the same question in the same round: their median and quartiles. Counted are answers that are those
of plain decoding. llama.cpp is built where it is not in the cache, by `shared/llama_cpp.py`.
"""

from __future__ import annotations

import platform
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
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


def answer_in_turn(
    program: Path, prompt: str, heads: dict[str, Path | None], order: Sequence[str], depth: int, new: int
) -> dict[str, Figures]:
    """Answer a question with every head: seconds, tokens and passes after the first pass, and whether as plainly."""
    found: dict[str, Figures] = {}
    texts = {}
    for name in order:
        first = generate(program, prompt, heads[name], depth=depth, num_tokens=0)
        whole = generate(program, prompt, heads[name], depth=depth, num_tokens=new)
        texts[name] = whole.text
        found[name] = {
            "processor_s": whole.processor_s - first.processor_s,
            "clock_s": whole.decode_s - first.decode_s,
            "tokens": whole.num_tokens - first.num_tokens,
            "passes": whole.num_passes - first.num_passes,
        }
    for name, text in texts.items():
        # Accepted drafts may end an answer a few tokens later.
        length = min(len(text), len(texts["plain"]))
        found[name]["as_plain"] = text[:length] == texts["plain"][:length]
    return found


def summary(answers: Sequence[dict[str, Figures]]) -> list[dict[str, Any]]:
    """A row for each head: of all answers together, and speed against plain decoding and the first head of its type."""
    heads = list(answers[0])
    baselines = ("plain", heads[1].split()[0])
    rows = []
    for name in heads:
        total = {key: sum(each[name][key] for each in answers) for key in answers[0][name]}
        row: dict[str, Any] = {
            "head": name,
            "ms_per_token": total["processor_s"] / total["tokens"] * 1e3,
            "clock_ms_per_token": total["clock_s"] / total["tokens"] * 1e3,
            "accepted_length": total["tokens"] / total["passes"],
            "as_plain": f"{total['as_plain']:.0f} of {len(answers)}",
        }
        for baseline in baselines:
            other = baseline if baseline == "plain" else f"{baseline} {name.split()[-1]}"
            if other != name and other in heads:
                ratios = [_tokens_per_s(each[name]) / _tokens_per_s(each[other]) for each in answers]
                low, middle, high = statistics.quantiles(ratios, method="inclusive") if ratios[1:] else ratios * 3
                row |= {f"speed / {baseline}": middle, f"quartiles / {baseline}": [low, high]}
        rows.append(row)
    return rows


def _tokens_per_s(figures: Figures) -> float:
    return figures["tokens"] / figures["processor_s"]


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
    answers: list[dict[str, Figures]] = []
    with tempfile.TemporaryDirectory() as folder:
        heads = make_heads(Path(folder), sizes, kinds)
        prompts, names = chat_prompts(args.prompts), list(heads)
        for number in range(args.rounds):
            start = number % len(names)
            order = names[start:] + names[:start]
            for prompt in prompts:
                answers.append(answer_in_turn(program, prompt, heads, order, args.depth, args.new))
            rows = summary(answers)
            write({"machine": about, "setup": setup, "rows": rows, "answers": answers}, args.out)
    for row in rows:
        show(row)


if __name__ == "__main__":
    main()
