"""Does a log of what was generated make the next draft vocabulary better, on other prompts of the same kind?

    python -m eagle_slim.runtime.bench.vocabulary_round [--prompts FILE] [--draft-vocab 2048] [--new 40] [--out FILE]

One round with the built-in target and head: answer every second prompt with the built-in ranking and log the tokens;
merge the log with the built-in counts by a weight; rank again; answer the **other** prompts with every vocabulary. The
answers are the target's own and the same for all (float32), so that accepted length and missed rate differ by the
vocabulary alone. For comparison: twice the rows without a log; and a log of the missed ids alone by the same weight,
with the vocabulary of a second round, whose log holds what the first round's vocabulary misses. Vocabularies of the
same ids are measured once.
Intervals are over prompts, from resamples that draw the same prompts for both sides.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from eagle_slim.convert.sources.builtin import embedded_target_folder
from eagle_slim.convert.sources.builtin_counts import load_embedded_counts
from eagle_slim.vocab_tools.counting.counts import TokenCounts, merge_counts
from eagle_slim.vocab_tools.ranking.rank import rank_vocabulary
from eagle_slim.vocab_tools.tokenizer.load import load_tokenizer
from eagle_slim.vocab_tools.vocabulary.draft_vocab import DraftVocab

from ..comparison.prompt_file import load_prompts
from ..comparison.statistics import NUM_RESAMPLES, Estimate
from ..config import TreeConfig
from ..generation.stats import GenerationStats
from ..miss_log import MissLog
from ..model import SpeculativeModel
from .timing import commit, machine

_PROMPTS = Path(__file__).parents[2] / "examples" / "code_prompts.jsonl"
_SOURCE = "code"


def answer(model: SpeculativeModel, prompts: Sequence[list[int]], new: int) -> list[Any]:
    """Answer prompts greedily, one after another."""
    return [model.generate(prompt, max_new_tokens=new) for prompt in prompts]


def figures(outputs: Sequence[Any], base: Sequence[Any]) -> dict[str, Any]:
    """Accepted length and missed rate of answers, and the ratio of accepted lengths to those of other ones."""
    stats = GenerationStats.sum(output.stats for output in outputs)
    ratio = _ratio([output.stats for output in outputs], [output.stats for output in base])
    return {
        "accepted_length": round(stats.mean_accepted_length, 4),
        "passes": stats.num_passes,
        "missed_rate": round(stats.missed_rate, 4),
        "accepted_length_ratio": round(ratio.value, 4),
        "ratio_95%": [round(ratio.low, 4), round(ratio.high, 4)],
    }


def _ratio(one: Sequence[GenerationStats], other: Sequence[GenerationStats]) -> Estimate:
    accepted, passes = (
        np.array([[getattr(each, name) for each in side] for side in (one, other)], dtype=np.float64)
        for name in ("num_accepted_tokens", "num_passes")
    )
    count = len(one)
    draws = np.random.default_rng(0).multinomial(count, np.full(count, 1 / count), size=NUM_RESAMPLES)
    weights = np.concatenate([np.ones((1, count), dtype=np.int64), draws])
    lengths = (accepted @ weights.T) / (passes @ weights.T)
    ratios = lengths[0] / lengths[1]
    return Estimate.of(float(ratios[0]), ratios[1:], count)


def ranked(counts: TokenCounts, size: int, weight: float | None) -> DraftVocab:
    """Rank the built-in target's ids, the log weighed against the built-in counts, which have weight 1."""
    weights = None if weight is None else {_SOURCE: weight}
    return rank_vocabulary(counts, size, tokenizer=load_tokenizer(embedded_target_folder()), weights=weights)


def missed_only(log: TokenCounts, vocab: DraftVocab) -> TokenCounts:
    """The counts of a log without the ids that a vocabulary holds."""
    (source,) = log.sources
    counts = source.counts.copy()
    counts[vocab.target_ids] = 0
    return replace(log, sources=(replace(source, counts=counts),))


def main() -> None:
    """Measure, print a line for each vocabulary, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, default=_PROMPTS)
    parser.add_argument("--draft-vocab", type=int, default=2048)
    parser.add_argument("--weights", type=float, nargs="+", default=[0.1, 0.3, 1.0])
    parser.add_argument("--new", type=int, default=40)
    parser.add_argument("--tree", default="5,10,60", help="Depth, children per node, nodes.")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    size = arguments.draft_vocab
    base_counts = load_embedded_counts()
    base = ranked(base_counts, size, None)
    tree = TreeConfig(*map(int, arguments.tree.split(",")))
    model = SpeculativeModel.from_pretrained(draft_vocab=base, dtype=torch.float32, device=arguments.device)
    model = model.with_tree(tree)
    prompts = [model.encode_chat(prompt.turns[0]) for prompt in load_prompts(arguments.prompts)]
    logged, others = prompts[::2], prompts[1::2]

    log = MissLog.of(model)
    seen = answer(model, logged, arguments.new)
    for output in seen:
        log.add(output, size, _SOURCE)
    with tempfile.TemporaryDirectory() as folder:
        # Through the file, as `eagle-generate --miss-log` and `eagle-vocab merge` do it.
        log.save(Path(folder) / "log.safetensors")
        counts = TokenCounts.load(Path(folder) / "log.safetensors")
    merged = merge_counts([base_counts, counts])
    vocabularies: dict[str, DraftVocab] = {"built-in ranking": base}
    for weight in arguments.weights:
        vocabularies[f"with the log, weight {weight:g}"] = ranked(merged, size, weight)
        first = ranked(merge_counts([base_counts, missed_only(counts, base)]), size, weight)
        vocabularies[f"with the missed ids alone, weight {weight:g}"] = first
        # The answers are the same for every vocabulary, and so is a second log of all tokens.
        second = ranked(merge_counts([base_counts, missed_only(counts, first)]), size, weight)
        vocabularies[f"with the missed ids alone, weight {weight:g}, second round"] = second
    vocabularies["built-in ranking, twice the rows"] = ranked(base_counts, 2 * size, None)
    rows: list[dict[str, Any]] = []
    answered: dict[bytes, list[Any]] = {}
    for name, vocab in vocabularies.items():
        key = vocab.ascending_ids.tobytes()
        if key not in answered:
            answered[key] = answer(model.with_draft_vocab(vocab), others, arguments.new)
        outputs, before = answered[key], answered[base.ascending_ids.tobytes()]
        equal = sum(one.token_ids == other.token_ids for one, other in zip(outputs, before, strict=True))
        replaced = len(np.setdiff1d(vocab.target_ids, base.target_ids))
        row = {"vocabulary": name, "rows": len(vocab), "ids_not_in_base": replaced, **figures(outputs, before)}
        rows.append(row | {"equal_answers": f"{equal}/{len(before)}"})
        print(rows[-1], flush=True)
    report = {
        "machine": machine(model.device),
        "commit": commit(),
        "prompts": arguments.prompts.name,
        "logged_prompts": len(logged),
        "other_prompts": len(others),
        "new_tokens": arguments.new,
        "tree": f"depth {tree.depth}, top_k {tree.top_k}, {tree.total_tokens} nodes",
        "log": {"tokens": counts.num_tokens, "distinct_ids": int((counts.sources[0].counts > 0).sum()),
                **figures(seen, seen)},
        "rows": rows,
    }  # fmt: skip
    if arguments.out:
        arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
