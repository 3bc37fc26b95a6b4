"""Does a process that answers for hours stay right and within its memory, whatever befalls its calls?

    python -m benchmarks.soak [--tokens 1000000] [--seconds 3600] [--out benchmarks/results/DATE-h200-soak.json]

The built-in target and head, on a GPU or a CPU. Three models live as long as the process: one that chooses the size of
its trees, one of small trees, one over 4,096 rows. Calls ask any number of the questions of `benchmarks.exact`, greedy
and sampled, drafted and plain, next turns among them. One call in four has a fault: a streamer that raises, an
interrupt at any place, another's memory beside it, or a limit of the allocator that leaves it little more than it has.
One answer in ten, and all of the call after one that a fault has ended, are compared with plain decoding of their
question alone. After each 30 calls the device's memory, and the most that the host has held, are noted.

Exit status 1 where a token differs, nothing was compared, or the second half of the run held at some time more than
1.05 times the memory that the first half did; what no fault explains ends the run with its traceback.
"""

from __future__ import annotations

import gc
import random
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from eagle_slim.runtime import SpeculativeModel
from eagle_slim.runtime.api.output import first_difference
from eagle_slim.runtime.drafter.tuning.arguments import whole_from
from eagle_slim.runtime.drafter.tuning.timing import synchronize
from eagle_slim.runtime.step.decoder import BUCKETS

from benchmarks.shared.command import Command, show, write
from benchmarks.shared.decoding import compile_ahead
from benchmarks.shared.faults import LIMIT, STREAMER, FaultyStreamer, explains, faults_on, injected
from benchmarks.shared.questions import (
    MOST_DIFFERENCES,
    NEW,
    SHORT,
    TREES,
    Pool,
    Question,
    generate,
    read_chats,
    read_text,
)
from benchmarks.shared.timing import machine

EVERY = 30
"""Calls between two notes of the memory."""
FAULTY, CHECKED = 0.25, 0.1
"""Shares of the calls, and of the answers."""
GROWTH = 1.05


class Soak:
    """Makes calls of living models; ``most`` questions at a time, no prompt longer than ``longest``."""

    def __init__(self, models: Sequence[SpeculativeModel], pool: Pool, seed: int, most: int, longest: int) -> None:
        self.models, self.pool, self.seed, self.most, self.longest = models, pool, seed, most, longest
        self.device = models[0].device
        self.calls = self.tokens = self.checked = 0
        self.counts: Counter[str] = Counter()
        self.memory: list[dict[str, int]] = []
        self.differences: list[dict[str, Any]] = []
        self._was_ended, self._busy_s = False, 0.0

    def run(self, is_over: Callable[[Soak], bool]) -> None:
        """Make calls until it is over."""
        while not is_over(self):
            self.call(random.Random(f"{self.seed}/{self.calls}"))
            self.calls += 1
            if self.calls % EVERY == 0:
                self.note_memory()

    def call(self, rng: random.Random) -> None:
        """Make one call, and check of its answers what is to be checked."""
        model, new = rng.choice(self.models), rng.choice((1, *[self.pool.new_tokens] * 4))
        # The first calls import what is imported late, which no interrupt may leave half done.
        fault = rng.choice(faults_on(self.device)) if self.calls > 1 and rng.random() < FAULTY else None
        count = 1 if fault == STREAMER else rng.choice((1, 1, rng.randint(1, self.most), self.most))
        questions = self.pool.draw(rng, count, rng.choice((min(SHORT, self.longest), self.longest)))
        if count == 1 and rng.random() < 0.5:
            questions = [self.pool.next_turn(questions[0], rng)]
        options: dict[str, Any] = {"max_slots": rng.choice((16, rng.randint(1, 16))), "speculative": rng.random() < 0.9}
        options |= {"reuse_prefix": rng.random() < 0.5}
        streamer = FaultyStreamer(rng.randint(0, new // 2)) if fault == STREAMER else None
        if fault == LIMIT and rng.random() < 0.5:
            # Another model has no cache yet, and asks for all of it.
            model = model.with_tree(model.drafter.tree)
        began = time.perf_counter()
        try:
            with injected(fault, self.device, rng, self._busy_s / max(1, self.calls)):
                output = generate(model, questions, new, streamer=streamer, **options)
        except BaseException as error:
            if not explains(fault, error):
                raise
            self.counts[f"{fault}: calls ended"] += 1
            self._was_ended = True
            return
        self._busy_s += time.perf_counter() - began
        self.counts[f"{fault or 'no fault'}: calls answered"] += 1
        for place, (question, found) in enumerate(zip(questions, output.token_ids, strict=True)):
            self.tokens += len(found)
            if self._was_ended or rng.random() < CHECKED:
                where = {"call": self.calls, "place": place, "fault": fault, "new_tokens": new, **options}
                self._check(question, found, self.pool.answer(question)[:new], where)
        self._was_ended = False

    def _check(self, question: Question, found: Sequence[int], own: Sequence[int], where: dict[str, Any]) -> None:
        self.checked += 1
        first = first_difference(found, own)
        if first is not None:
            where |= {"token": first, "plain": own[first : first + 1], "found": found[first : first + 1]}
            self.differences.append({**question._asdict(), **where})

    def note_memory(self) -> None:
        """Note what the device holds, without what only waits to be collected, and what the host has held."""
        gc.collect()
        noted = {"calls": self.calls, "tokens": self.tokens}
        if self.device.type == "cuda":
            synchronize(self.device)
            torch.cuda.empty_cache()
            free, total = torch.cuda.mem_get_info(self.device)
            noted |= {"device_bytes": total - free, "allocated_bytes": torch.cuda.memory_allocated(self.device)}
        self.memory.append({**noted, "host_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10})

    @property
    def growth(self) -> float | None:
        """The most memory of the second half of the run beside that of the first; None before there are four notes."""
        held = [noted.get("device_bytes", noted["host_peak_bytes"]) for noted in self.memory]
        half = len(held) // 2
        return max(held[half:]) / max(held[:half]) if half > 1 else None

    @property
    def is_good(self) -> bool:
        """Whether all that was compared is right, and memory has not grown."""
        return bool(self.checked and not self.differences and (self.growth or 0) <= GROWTH)

    def result(self) -> dict[str, Any]:
        """What was done and found."""
        return {
            "seed": self.seed, "calls": self.calls, "tokens": self.tokens, "answers_checked": self.checked,
            "counts": dict(sorted(self.counts.items())), "memory_growth": self.growth, "is_good": self.is_good,
            "answers_that_differ": len(self.differences), "differences": self.differences[:MOST_DIFFERENCES],
            "memory": self.memory,
        }  # fmt: skip


def main(argv: list[str] | None = None) -> None:
    """Run the benchmark; `--help` lists the options."""
    command = Command("soak", __doc__)
    command.add_argument("--tokens", type=whole_from(1), default=1_000_000, help="stop after generating this many")
    command.add_argument("--seconds", type=whole_from(1), default=3600, help="or after this time, compilation apart")
    command.add_argument("--questions", type=whole_from(16), default=96, help="each is decoded plainly once")
    command.add_argument("--new", type=whole_from(2), default=NEW, help="most new tokens of an answer")
    command.add_argument("--prompts", type=whole_from(1), default=48, help="most prompts of a call")
    command.add_argument("--longest", type=whole_from(64), default=8192, help="tokens of a prompt")
    command.add_argument("--seed", type=whole_from(0), default=0)
    args = command.parse_args(argv)
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    on_gpu = device.type == "cuda"
    model = SpeculativeModel.from_pretrained(dtype=torch.bfloat16 if on_gpu else torch.float32, device=device)
    models = [model, model.with_tree(TREES[1]), model.with_draft_vocab(4096)]
    if on_gpu:
        shapes = [(t, slots, m.draft_vocab) for t in TREES[:2] for m in models for slots in BUCKETS]
        compile_ahead("smollm2-135m", shapes, device)
        for each in models:
            # A cache grows with the longest prompt so far, which may come late: none grows from here on.
            each.warmup(16, min(args.longest + args.new, each.max_model_len or args.longest + args.new))
    assert model.tokenizer is not None
    text = model.tokenizer(read_text(), add_special_tokens=False)["input_ids"]
    pool = Pool(model, read_chats(model), text, args.seed, args.questions, args.new)
    soak, start = Soak(models, pool, args.seed, args.prompts, args.longest), time.perf_counter()

    def is_over(soak: Soak) -> bool:
        took_s = time.perf_counter() - start
        if soak.calls % EVERY == 0:
            write({"machine": machine(device), "seconds": took_s} | soak.result(), args.out)
        return bool(soak.tokens >= args.tokens or took_s >= args.seconds)

    soak.run(is_over)
    soak.note_memory()
    result = {"machine": machine(device), "seconds": time.perf_counter() - start} | soak.result()
    write(result, args.out)
    show({name: value for name, value in result.items() if name not in ("memory", "differences")})
    sys.exit(0 if soak.is_good else 1)


if __name__ == "__main__":
    main()
