"""What does choosing tokens cost a pass, greedy and sampled, against PyTorch's own operations?

    python -m eagle_slim.runtime.bench.choose_tokens [--rounds 20]

Random logits in bf16 for one tree of 60 nodes and for one node of plain decoding, at two vocabularies. Variants,
interleaved in one run, all replayed from CUDA graphs:

    greedy, temperature, top-p, ...    `choose_tokens` with those stages
    torch argmax                       `torch.argmax`, which leaves ties open
    torch <stages>                     transformers' warpers, softmax and `torch.multinomial`

Before it is timed, each variant of ours must give what the twin gives. A sample is the mean of back-to-back replays, so
the logits lie in the L2, as they do after the LM head, where they fit. Medians with 10th and 90th percentile; the last
line is JSON.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from ..config import SamplingConfig
from ..generation.sampling import warp
from ..kernels.choose_tokens import (
    ChoiceRules,
    ChoiceState,
    choice_scratch,
    choose_tokens,
    choose_tokens_ref,
    token_bits,
)
from .baseline import capture
from .timing import interleave, machine

VOCABS = (128256, 49152)
NODES = (60, 1)
REPLAYS = 20
SAMPLED = {
    "temperature": SamplingConfig(0.7),
    "top-p": SamplingConfig(0.7, top_p=0.9),
    "top-k": SamplingConfig(0.7, top_k=20),
    "top-k, top-p": SamplingConfig(0.6, top_k=20, top_p=0.95),
    "min-p": SamplingConfig(0.7, min_p=0.05),
}
PENALTY = 1.1


class Problem:
    """One tree whose nodes form a chain, with a text of 500 random tokens behind it."""

    def __init__(self, vocab: int, nodes: int, device: torch.device) -> None:
        self.logits = (torch.randn(nodes, vocab, device=device) * 3).bfloat16()
        state = ChoiceState.allocate(1, nodes, vocab, device)
        state.uniforms.copy_(torch.rand(1, nodes, dtype=torch.float64))
        state.seen[0] = token_bits(torch.randint(vocab, (500,), device=device), vocab)
        self.state = state
        self.out = torch.empty(1, nodes, dtype=torch.int32, device=device)
        self.scratch = choice_scratch(1, nodes, vocab, device)
        depths = torch.arange(nodes, device=device)[None]
        self.arguments = (
            self.logits, torch.zeros(1, dtype=torch.int32, device=device),
            torch.ones(1, dtype=torch.int32, device=device), torch.randint(vocab, (1, nodes), device=device),
            depths - 1, depths,
        )  # fmt: skip

    def rules(self, config: SamplingConfig) -> ChoiceRules:
        """The stages that a configuration asks for."""
        return ChoiceRules(not config.is_greedy, config.top_k > 0, config.top_p < 1, config.min_p > 0)

    def variant(self, config: SamplingConfig, rules: ChoiceRules) -> Callable[[], None]:
        """`choose_tokens` with numbers of its own, checked against the twin."""
        numbers = torch.tensor(
            [config.temperature or 1.0, config.top_k, config.top_p, config.min_p, PENALTY, 0, 0, 0],
            dtype=torch.float32, device=self.logits.device,
        )  # fmt: skip
        state = replace(self.state, numbers=numbers)

        def run() -> None:
            choose_tokens(*self.arguments, rules, state, self.out, self.scratch)

        run()
        chosen = self.out.clone()
        choose_tokens_ref(*self.arguments, rules, state, self.out)
        assert torch.equal(chosen, self.out), (rules, int((chosen != self.out).sum()))
        return run

    def by_torch(self, config: SamplingConfig) -> Callable[[], Tensor]:
        """The same stages as transformers runs them; draws of PyTorch's own."""
        return lambda: torch.multinomial(warp(self.logits, config).softmax(-1), 1)

    def variants(self) -> dict[str, Callable[[], object]]:
        """All variants by name."""
        greedy = SamplingConfig()
        found: dict[str, Callable[[], object]] = {
            "greedy": self.variant(greedy, ChoiceRules()),
            "greedy, penalty": self.variant(greedy, ChoiceRules(has_penalty=True)),
            "torch argmax": lambda: self.logits.argmax(-1),
        }
        for name, config in SAMPLED.items():
            found[name] = self.variant(config, self.rules(config))
            found[f"torch {name}"] = self.by_torch(config)
        config = SAMPLED["top-k, top-p"]
        found["top-k, top-p, penalty"] = self.variant(config, replace(self.rules(config), has_penalty=True))
        return found


def repeat(run: Callable[[], object], times: int) -> Callable[[], None]:
    """Call several times in a row."""

    def repeated() -> None:
        for _ in range(times):
            run()

    return repeated


def bench(
    device: torch.device,
    vocabs: Sequence[int] = VOCABS,
    nodes: Sequence[int] = NODES,
    rounds: int = 20,
    replays: int = REPLAYS,
    record: Callable[[Callable[[], object]], Callable[[], object]] = capture,
) -> dict[str, Any]:
    """Check, then time all variants; ``record`` makes a graph of one. Returns microseconds a pass, by row and variant.

    Raises `AssertionError` where a variant of ours and the twin differ.
    """
    rows = []
    for vocab in vocabs:
        for count in nodes:
            variants = {
                name: repeat(record(run), replays) for name, run in Problem(vocab, count, device).variants().items()
            }
            times = interleave(variants, device, rounds)
            a_pass = {
                name: {
                    key: value / replays if key.endswith("_us") else value for key, value in asdict(found).items()
                }
                for name, found in times.items()
            }  # fmt: skip
            rows.append({"vocab": vocab, "nodes": count, "times": a_pass})
            print(f"vocabulary {vocab}, {count} nodes", flush=True)
            for name, found in a_pass.items():
                print(f"  {found['median_us']:9.1f} us  {name}", flush=True)
    return {"machine": machine(device), "replays": replays, "rows": rows}


def main() -> None:
    """Print one JSON line last."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(1, "this benchmark needs an NVIDIA GPU\n")
    print(json.dumps(bench(torch.device("cuda", torch.cuda.current_device()), rounds=args.rounds)))


if __name__ == "__main__":
    main()
