"""How much of the exact top 10's probability does a screen keep, after text that it was not made from?

    eagle-convert --draft-vocab full --out full && eagle-screen full --rank 512
    python -m benchmarks.screen full [--out FILE]

An artifact's screen is measured, in float32, on drafts after the target's own greedy answers to the prompts of
`examples/`: states of all levels of a tree of depth 5 with 10 children a node, from two places of each answer, each
prompt with the same weight, and by the category of the prompt. Smaller ranks are the first columns of the screen. The
range is over 10,000 resamples of the prompts (2.5 to 97.5%). Beside it: what the rows keep that are most frequent by
the counts of the built-in head, of which the artifact must be one.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from eagle_slim.convert.artifact.artifact import Artifact
from eagle_slim.convert.head.screen_file import open_screen_file
from eagle_slim.convert.sources.builtin_counts import load_embedded_counts
from eagle_slim.runtime import SpeculativeModel
from eagle_slim.runtime.compare.prompt_file import Prompt, load_prompts
from eagle_slim.runtime.drafter.screen import Screen, load_screen
from eagle_slim.runtime.drafter.tuning.arguments import whole_from
from eagle_slim.runtime.screening.make import RANKS
from eagle_slim.runtime.screening.recall import TOP, recall
from eagle_slim.runtime.screening.states import states_of_text
from eagle_slim.runtime.settings import TreeConfig
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.shared.command import Command, show, write
from benchmarks.shared.timing import machine

EXAMPLES = Path(__file__).parents[1] / "examples"
CANDIDATES: tuple[tuple[int, Sequence[int]], ...] = ((2, RANKS), (1, (96,)), (4, (64, 96)))
"""Candidates of each group, and the ranks that are measured with them."""
FREQUENT = (8192, 16384, 32768)
PLACES = 2


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


def row(shares: NDArray[np.float64], categories: Sequence[str]) -> dict[str, Any]:
    """Of each prompt's share: the mean with its range, and the mean of each category."""
    draws = np.random.default_rng(0).integers(len(shares), size=(10_000, len(shares)))
    of_each = {name: float(shares[np.array(categories) == name].mean()) for name in sorted(set(categories))}
    return {
        "share": float(shares.mean()), "range": np.quantile(shares[draws].mean(1), (0.025, 0.975)).tolist(),
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


def main(argv: list[str] | None = None) -> None:
    """Run the benchmark; `--help` lists the options."""
    parser = Command("screen", __doc__)
    parser.add_argument("artifact", type=Path, help="of the built-in head, with a screen")
    parser.add_argument("--every", type=whole_from(1), default=1, metavar="N", help="every N-th prompt only")
    parser.add_argument("--new-tokens", type=whole_from(4), default=64, help="tokens of each answer")
    parser.add_argument("--device", help="such as cuda; default the first GPU, else the CPU")
    args = parser.parse_args(argv)
    files = sorted(EXAMPLES.glob("*.jsonl"))
    prompts = [prompt for file in files for prompt in load_prompts(file)][:: args.every]
    run(args.artifact, prompts, args.new_tokens, args.device, args.out)


if __name__ == "__main__":
    main()
