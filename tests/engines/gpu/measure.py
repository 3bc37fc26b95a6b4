"""What every start measures, the same for all engines, from what every engine can give: tokens, drafts and seconds."""

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Json = dict[str, Any]
REPEATS = 3


@dataclass(frozen=True)
class Generated:
    """One batch of answers.

    Attributes:
        tokens: [batch][ids] generated.
        drafts: times any sequence's drafts were verified; 0 without speculation.
        accepted: drafted tokens accepted in them, in all.
    """

    tokens: list[list[int]]
    drafts: int
    accepted: int


Generate = Callable[[Sequence[Sequence[int]], int], Generated]
"""(prompts, tokens to generate for each) -> `Generated`; greedy, and the end-of-text token does not end an answer."""


def speed(generate: Generate, prompts: Sequence[Sequence[int]], batch: int, max_tokens: int) -> Json:
    """Generate ``max_tokens`` for ``batch`` prompts, `REPEATS` times.

    Returns tokens_per_s (of all sequences, prompts' passes included), ms_per_step (median; of one step of all sequences
    side by side, without the prompts: the time of an answer of one token is taken off) and accepted_length.
    """
    chosen = [prompts[i % len(prompts)] for i in range(batch)]
    generate(chosen, 8)
    short = statistics.median(_seconds(generate, chosen, 1)[0] for _ in range(REPEATS))
    runs = [_seconds(generate, chosen, max_tokens) for _ in range(REPEATS)]
    seconds = statistics.median(run[0] for run in runs)
    last = runs[-1][1]
    # Sequences run side by side, so a step of all of them is one draft of each.
    steps = max_tokens - 1 if last.drafts == 0 else last.drafts / batch
    return {
        "batch": batch,
        "max_tokens": max_tokens,
        "tokens_per_s": round(sum(map(len, last.tokens)) / seconds, 1),
        "ms_per_step": round(1e3 * (seconds - short) / steps, 3),
        "seconds": [round(run[0], 4) for run in runs],
        "accepted_length": accepted_length(last),
    }


def accepted_length(generated: Generated) -> float | None:
    """Tokens per verification, the target's own included; None without drafts."""
    return round(1 + generated.accepted / generated.drafts, 3) if generated.drafts else None


def _seconds(generate: Generate, prompts: Sequence[Sequence[int]], max_tokens: int) -> tuple[float, Generated]:
    began = time.perf_counter()
    generated = generate(prompts, max_tokens)
    return time.perf_counter() - began, generated


def run_start(start: Callable[[Json], tuple[Generate, Json]], more: Callable[[Json, Generate], Json]) -> None:
    """Body of a start's process: argument 1 is the job. Says READY, waits for a line on stdin, measures, says RESULT.

    ``start`` builds the engine and returns how to generate and facts about it; ``more`` measures what only this engine
    can. Waiting keeps the measurements of one engine apart from the start of another.
    """
    job: Json = json.loads(sys.argv[1])
    began = time.monotonic()
    generate, facts = start(job)
    facts["start_s"] = round(time.monotonic() - began, 1)
    print("READY " + json.dumps(facts), flush=True)
    sys.stdin.readline()
    prompts = json.loads(Path(job["prompts"]).read_text())
    result: Json = {"text": None, "speeds": []}
    if job["text_tokens"]:
        answers = generate(prompts, job["text_tokens"])
        result["text"] = {"tokens": answers.tokens, "accepted_length": accepted_length(answers)}
    for batch in job["batches"]:
        result["speeds"].append(speed(generate, prompts, batch, job["max_tokens"]))
    result |= more(job, generate)
    print("RESULT " + json.dumps(result), flush=True)
