"""How much of the exact top 10's probability does a screen keep, after text that it was not made from?

    eagle-convert --draft-vocab full --out full && eagle-screen full --rank 512
    python -m benchmarks.screen full [--out FILE]
    eagle-compare full --drafter reference --screens with,without --modes greedy --sizes full --prompts FILE --out DIR
    python -m benchmarks.screen DIR [--out FILE]
    python -m benchmarks.screen llama-3.1-8b [--states 200000] [--out FILE]     # what making one costs, on a GPU

An artifact's screen is measured, in float32, on drafts after the target's own greedy answers to the prompts of
`examples/`: states of all levels of a tree of depth 5 with 10 children a node, from two places of each answer, each
prompt with the same weight, and by the category of the prompt. Smaller ranks are the first columns of the screen. The
range is over 10,000 resamples of the prompts (2.5 to 97.5%). Beside it: what the rows keep that are most frequent by
the counts of the built-in head, of which the artifact must be one.

Of a comparison's folder: the accepted length with the screen and without, all prompts together, and the ratio of the
two with its range over as many resamples of the prompts.

Of a model's name: how long making a screen takes with a random target and head of its dimensions, on random texts.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from eagle_slim.convert.artifact.artifact import Artifact
from eagle_slim.convert.head.config import default_taps
from eagle_slim.convert.head.screen_file import open_screen_file
from eagle_slim.convert.sources.builtin_counts import load_embedded_counts
from eagle_slim.runtime import SpeculativeModel
from eagle_slim.runtime.compare.answers import Answer
from eagle_slim.runtime.compare.prompt_file import Prompt, load_prompts
from eagle_slim.runtime.drafter.screen import Screen, load_screen
from eagle_slim.runtime.drafter.tuning.arguments import whole_from
from eagle_slim.runtime.drafter.tuning.problem import MODELS, random_head
from eagle_slim.runtime.drafter.tuning.timing import synchronize
from eagle_slim.runtime.screening.collect import MOST_TOKENS, Collected
from eagle_slim.runtime.screening.factors import screen_factors, screen_rows
from eagle_slim.runtime.screening.make import RANKS
from eagle_slim.runtime.screening.recall import TOP, recall
from eagle_slim.runtime.screening.states import states_of_text
from eagle_slim.runtime.settings import TreeConfig
from eagle_slim.runtime.target.choose import Choice
from eagle_slim.runtime.target.wrapper import TargetModel
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.shared.command import Command, show, write
from benchmarks.shared.decoding import LAYERS, PEAKED, random_target
from benchmarks.shared.timing import machine

EXAMPLES = Path(__file__).parents[1] / "examples"
CANDIDATES: tuple[tuple[int, Sequence[int]], ...] = ((2, RANKS), (1, (96,)), (4, (64, 96)))
"""Candidates of each group, and the ranks that are measured with them."""
FREQUENT = (8192, 16384, 32768)
PLACES = 2
QUANTILES = (0.025, 0.975)


def answer_states(model: SpeculativeModel, prompts: Sequence[Prompt], new: int) -> list[Tensor]:
    """States [states, hidden] of drafts after places of each prompt's greedy answer."""
    weights = model.drafter.weights
    asked = [model.encode_chat(prompt.turns[0]) for prompt in prompts]
    answers = model.generate(asked, max_new_tokens=new, speculative=False).results
    found = []
    for prompt, answer in zip(asked, answers, strict=True):
        ids = torch.tensor([*prompt, *answer.token_ids])
        places = np.linspace(len(prompt), len(ids) - 1, PLACES + 2)[1:-1].round().astype(np.int64)
        roots = torch.from_numpy(np.unique(places))
        found.append(states_of_text(model.target, weights, TreeConfig(), ids.to(weights.device), roots).flatten(0, 1))
    return found


def resamples(prompts: int) -> NDArray[np.int64]:
    """Numbers of prompts drawn again: [10,000, prompts]."""
    return np.random.default_rng(0).integers(prompts, size=(10_000, prompts))


def row(shares: NDArray[np.float64], categories: Sequence[str]) -> dict[str, Any]:
    """Of each prompt's share: the mean with its range, and the mean of each category."""
    of_each = {name: float(shares[np.array(categories) == name].mean()) for name in sorted(set(categories))}
    return {
        "share": float(shares.mean()), "range": np.quantile(shares[resamples(len(shares))].mean(1), QUANTILES).tolist(),
        "by_category": of_each,
    }  # fmt: skip


def kept_by_frequency(lm_head: Tensor, states: Tensor, rank_of_row: Tensor, sizes: Sequence[int]) -> list[float]:
    """The share of the exact top 10's probability of states [states, hidden] that the most frequent rows hold."""
    best, rows = torch.nn.functional.linear(states, lm_head).topk(TOP)
    return [float((best.softmax(-1) * (rank_of_row[rows] < size)).sum(-1).mean()) for size in sizes]


def run(folder: Path, prompts: Sequence[Prompt], new: int, device: str | None, out: Path | None) -> dict[str, Any]:
    """Measure the screen of one artifact; writes what there is after each number of candidates."""
    artifact = Artifact.load(folder)
    model = SpeculativeModel.from_pretrained(
        head=artifact, device=device, dtype="float32", drafter="reference", target_backend="transformers", screen=False
    )
    lm_head = model.drafter.weights.lm_head
    metadata = open_screen_file(folder, artifact.head).header.metadata
    loaded = load_screen(folder, artifact.head)
    rows, down, project = (tensor.to(lm_head.device) for tensor in (loaded.rows, loaded.down, loaded.project))
    categories = [prompt.category for prompt in prompts]
    states = answer_states(model, prompts, new)
    result: dict[str, Any] = {
        "machine": machine(model.device), "dtype": str(model.dtype)[6:], "draft_vocab": len(lm_head),
        "prompts": len(prompts), "new_tokens": new, "states": sum(map(len, states)),
        "made_from": {name: metadata[name] for name in ("states", "text", "damping", "groups")}, "rows": [],
    }  # fmt: skip
    for per_group, wanted in CANDIDATES:
        screen = Screen(rows.to(lm_head.dtype), down, project, loaded.groups, per_group)
        ranks = [rank for rank in wanted if rank <= screen.rank]
        kept = [recall(screen, each, lm_head, ranks) for each in states]
        for rank in ranks:
            read = round(len(lm_head) * rank / lm_head.shape[1]) + screen.num_candidates
            facts = {"rank": rank, "candidates": screen.num_candidates, "rows_read": read}
            result["rows"].append(facts | row(np.array([shares[rank] for shares in kept]), categories))
            show(result["rows"][-1])
        write(result, out)
    ids = model.drafter.weights.draft_to_target.cpu().numpy()
    counts = load_embedded_counts().weighted()[ids]
    rank_of_row = torch.from_numpy(np.argsort(np.argsort(-counts, kind="stable"))).to(lm_head.device)
    sizes = [size for size in FREQUENT if size < len(lm_head)]
    shares = np.array([kept_by_frequency(lm_head, each, rank_of_row, sizes) for each in states])
    for size, of_size in zip(sizes, shares.T, strict=True):
        result["rows"].append({"frequent": size, "rows_read": size} | row(of_size, categories))
        show(result["rows"][-1])
    write(result, out)
    return result


def accepted(answers: Sequence[Answer]) -> dict[str, Any]:
    """Accepted lengths of greedy answers, one at a time, with a screen and without, and their ratio with its range."""
    found: dict[str, list[list[int]]] = {"with": [], "without": []}
    for answer in sorted(answers, key=lambda answer: answer.key.group):
        if answer.key.candidate != "plain":
            name = "with" if answer.key.candidate.endswith(" + screen") else "without"
            lengths = answer.accepted_lengths
            found[name].append([sum(length * times for length, times in lengths.items()), sum(lengths.values())])
    of_prompts = np.array([found["with"], found["without"]])

    def accepted_lengths(prompts: NDArray[np.int64]) -> NDArray[np.float64]:
        tokens, passes = np.moveaxis(of_prompts[:, prompts].sum(-2), -1, 0)
        return np.asarray(tokens / passes)

    screened, plain = accepted_lengths(np.arange(of_prompts.shape[1])).tolist()
    drawn = accepted_lengths(resamples(of_prompts.shape[1]))
    return {
        "accepted_length": {"with": screened, "without": plain}, "ratio": screened / plain,
        "range": np.quantile(drawn[0] / drawn[1], QUANTILES).tolist(), "tokens_and_passes": found,
    }  # fmt: skip


def of_comparison(folder: Path, out: Path | None) -> dict[str, Any]:
    """What the folder of a comparison with and without a screen tells of accepted lengths."""
    compared = json.loads((folder / "compare.json").read_text("utf-8"))
    lines = (folder / "answers.jsonl").read_text("utf-8").splitlines()[1:]
    result = {
        "machine": machine(torch.device("cpu")), "setup": compared["setup"],
        **accepted([Answer.from_json(json.loads(line)) for line in lines]), "rows": compared["rows"],
    }  # fmt: skip
    show({name: result[name] for name in ("accepted_length", "ratio", "range")})
    write(result, out)
    return result


@torch.inference_mode()
def making(name: str, device: torch.device, num_rows: int, num_states: int, rank: int) -> dict[str, Any]:
    """Seconds of each part of making a screen of ``num_rows`` rows from ``num_states`` states, in bf16."""
    dims = MODELS[name]
    model = random_target(name, dims, torch.bfloat16, device)
    target = TargetModel(model, default_taps(LAYERS[name]), Choice("transformers", "asked for"))
    head = random_head(dims, device, torch.bfloat16, lm_head_gain=PEAKED).of_rows(slice(num_rows))
    synchronize(device)
    rng, seconds = np.random.default_rng(0), [time.perf_counter()]

    def draft(text: NDArray[np.int64], roots: NDArray[np.int64]) -> Tensor:
        ids = torch.from_numpy(text).to(device)
        return states_of_text(target, head, TreeConfig(), ids, torch.from_numpy(roots)).flatten(0, 1)

    def note() -> None:
        synchronize(device)
        seconds.append(time.perf_counter())

    with tempfile.TemporaryDirectory() as folder:
        collected = Collected(dims.hidden, device, Path(folder) / "resume", {})
        collected.run((rng.integers(dims.vocab, size=MOST_TOKENS) for _ in count()), draft, num_states, lambda *_: None)
    note()
    project, down = screen_factors(collected.moment.damped(1e-3), head.lm_head, max(RANKS))
    note()
    screen = Screen(screen_rows(head.lm_head, project, head.dtype), down, project, 128, 2)
    kept = recall(screen, torch.cat(collected.held_out), head.lm_head, RANKS)
    screen_rows(head.lm_head, project[:, :rank], head.dtype)
    note()
    parts = np.diff(seconds).tolist()
    return {
        "dims": name, "machine": machine(device), "rows": num_rows, "states": collected.moment.count, "rank": rank,
        "held_out": collected.num_held_out, "texts": collected.num_texts, "seconds": sum(parts),
        **dict(zip(("collect_s", "factors_s", "recall_s"), parts, strict=True)), "recall_of_random_states": kept,
    }  # fmt: skip


def main(argv: list[str] | None = None) -> None:
    """Run the benchmark; `--help` lists the options."""
    parser = Command("screen", __doc__)
    parser.add_argument(
        "source", help="an artifact of the built-in head with a screen, a comparison, or a model's name"
    )
    parser.add_argument("--states", type=whole_from(1), default=200_000, help="of a model's name: how many")
    parser.add_argument("--draft-vocab", type=whole_from(256), default=32_000, help="of a model's name: rows")
    parser.add_argument("--every", type=whole_from(1), default=1, metavar="N", help="every N-th prompt only")
    parser.add_argument("--new-tokens", type=whole_from(4), default=64, help="tokens of each answer")
    parser.add_argument("--device", help="such as cuda; default the first GPU, else the CPU")
    args = parser.parse_args(argv)
    if args.source in LAYERS:
        made = making(args.source, parser.gpu(), args.draft_vocab, args.states, rank=256)
        show(made)
        write(made, args.out)
        return
    folder = Path(args.source)
    if (folder / "compare.json").exists():
        of_comparison(folder, args.out)
        return
    files = sorted(EXAMPLES.glob("*.jsonl"))
    prompts = [prompt for file in files for prompt in load_prompts(file)][:: args.every]
    run(folder, prompts, args.new_tokens, args.device, args.out)


if __name__ == "__main__":
    main()
