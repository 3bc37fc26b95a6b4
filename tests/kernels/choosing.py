"""Cases for `choose_tokens`: a batch of small trees with everything that a choice depends on, and what is expected."""

from dataclasses import dataclass, replace

import torch
from eagle_slim.runtime.settings import SamplingConfig
from eagle_slim.runtime.step.kernels import choose_tokens as kernels
from eagle_slim.runtime.step.kernels.choose_tokens import ChoiceRules, ChoiceState, token_bits
from eagle_slim.runtime.tree import Trees
from support.sampling import first_in_race, warp
from torch import Tensor

GREEDY, SAMPLED = ChoiceRules(), ChoiceRules(sampled=True)
ALL_RULES = ChoiceRules(True, True, True, True, True, True, True)
RULES = {
    "greedy": GREEDY,
    "greedy, processed": replace(ALL_RULES, sampled=False),
    "sampled": SAMPLED,
    "top-k": replace(SAMPLED, has_top_k=True),
    "top-p": replace(SAMPLED, has_top_p=True),
    "min-p": replace(SAMPLED, has_min_p=True),
    "top-k, min-p": replace(SAMPLED, has_top_k=True, has_min_p=True),
    "everything": ALL_RULES,
}
CHAIN_AND_FORK = [-1, 0, 0, 1, 3]
"""Parents: node 4 lies below 3, 1 and the root, node 2 beside."""


@dataclass
class Case:
    logits: Tensor
    trees: Trees
    state: ChoiceState
    nodes: int

    def set_numbers(self, temperature=1.0, top_k=1, top_p=1.0, min_p=0.0, repetition_penalty=1.0, min_new_tokens=0):
        numbers = [temperature, top_k, top_p, min_p, repetition_penalty, min_new_tokens]
        self.state.numbers.copy_(torch.tensor(numbers, dtype=torch.float32))

    def choose(self, rules: ChoiceRules, tile: int = 512, capacity: int = 8192) -> Tensor:
        places, vocab = self.logits.shape[0] // self.nodes, self.logits.shape[1]
        out = torch.full((places, self.nodes), -7, dtype=torch.int32, device=self.logits.device)
        scratch = kernels.choice_scratch(places, self.nodes, vocab, self.logits.device, tile, capacity)
        kernels.choose_tokens(self.logits, self.trees, rules, self.state, out, scratch)
        return out

    def choose_ref(self, rules: ChoiceRules) -> Tensor:
        out = torch.full((self.logits.shape[0] // self.nodes, self.nodes), -7, dtype=torch.int32)
        out = out.to(self.logits.device)
        kernels.choose_tokens_ref(self.logits, self.trees, rules, self.state, out)
        return out


def random_case(vocab, slots=2, parents=CHAIN_AND_FORK, active=None, dtype=torch.float32, device="cpu", scale=3.0):
    """Random logits, trees of one shape, keys, and texts; all numbers neutral."""
    parents, active = list(parents), list(range(slots) if active is None else active)
    nodes = len(parents)
    depths = [0]
    for parent in parents[1:]:
        depths.append(depths[parent] + 1)
    state = ChoiceState.allocate(slots, 16 + max(depths), vocab, device)
    state.keys.copy_(torch.empty(state.keys.shape, dtype=torch.int64).random_())
    state.num_generated.copy_(torch.arange(slots) * 3 % 7)
    for slot in range(slots):
        state.seen[slot] = token_bits(torch.randint(vocab, (20,)), vocab).to(device)
    state.suppressed.copy_(token_bits(torch.randint(vocab, (max(1, vocab // 50),)), vocab))
    state.eos.copy_(token_bits(torch.randint(vocab, (2,)), vocab))
    padded = active + [slot for slot in range(slots) if slot not in active]
    return Case(
        (torch.randn(len(padded) * nodes, vocab) * scale).to(dtype).to(device),
        Trees(
            torch.tensor(padded, dtype=torch.int32, device=device),
            torch.tensor([len(active)], dtype=torch.int32, device=device),
            torch.randint(vocab, (slots, nodes)).to(device),
            torch.tensor([parents] * slots, device=device),
            torch.tensor([depths] * slots, device=device),
        ),
        state,
        nodes,
    )


def row_case(logits: Tensor, keys: Tensor) -> Case:
    """Each row of float [rows, vocab] a slot of its own with one node and one key: int64 [rows]."""
    rows, vocab = logits.shape
    case = random_case(vocab, slots=rows, parents=[-1])
    case.logits = logits
    case.state.num_generated.zero_()
    case.state.keys[:, 0] = keys
    return case


def expected_tokens(logits: Tensor, keys: Tensor, sampling: SamplingConfig) -> Tensor:
    """One token per row by transformers' warpers and a race in float64: float [rows, vocab], int64 [rows] to [rows]."""
    if sampling.is_greedy:
        return logits.argmax(-1)
    rows = zip(warp(logits, sampling), keys.tolist(), strict=True)
    return torch.tensor([first_in_race(scores, key) for scores, key in rows])
