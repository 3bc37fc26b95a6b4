"""Choosing tokens on a GPU: real vocabularies against the twin, and from a CUDA graph with new inputs."""

from __future__ import annotations

import pytest
import torch
from eagle_slim.runtime.drafter.tuning.timing import capture
from eagle_slim.runtime.step.kernels.choose_tokens import ChoiceRules, choice_scratch, choose_tokens
from kernels.choosing import ALL_RULES, RULES, random_case

pytestmark = pytest.mark.gpu
TREE = [-1, *[(node - 1) // 3 for node in range(1, 60)]]


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
@pytest.mark.parametrize("vocab", [128256, 49152, 50257])
def test_kernels_equal_the_twin(vocab: int, rules: ChoiceRules) -> None:
    case = random_case(vocab, slots=2, parents=TREE, active=[1], dtype=torch.bfloat16, device="cuda")
    for numbers in ((0.7, 20, 0.9, 0.01, 1.1, 4), (1.5, 50000, 0.5, 1e-4, 2.0, 0), (0.05, 3, 0.999, 0.3, 0.5, 9)):
        case.set_numbers(*numbers)
        wanted = case.choose_ref(rules)
        assert torch.equal(case.choose(rules, part=4096), wanted)
        if rules.has_top_k or rules.has_top_p:
            assert torch.equal(case.choose(rules, part=1024, capacity=0), wanted)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
@pytest.mark.parametrize("rules", [ChoiceRules(), ALL_RULES], ids=["greedy", "everything"])
def test_one_graph_serves_all_values(rules: ChoiceRules) -> None:
    """Replays follow logits, numbers, keys and active slots; nothing is allocated and nothing waits."""
    vocab = 49152
    case = random_case(vocab, slots=2, parents=TREE, dtype=torch.bfloat16, device="cuda")
    case.set_numbers(0.7, 20, 0.9, 0.01, 1.1, 4)
    out = torch.empty(2, case.nodes, dtype=torch.int32, device="cuda")
    scratch = choice_scratch(2, case.nodes, vocab, "cuda")

    def choose() -> None:
        choose_tokens(case.logits, case.trees, rules, case.state, out, scratch)

    choose()
    allocated = torch.cuda.memory_stats()["allocation.all.allocated"]
    with torch.cuda.device(0):
        try:
            torch.cuda.set_sync_debug_mode("error")
            choose()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == allocated
    graph = capture(choose)
    for active, numbers in (([1, 0], (1.2, 100, 0.7, 0.0, 1.3, 0)), ([0], (0.4, 5000, 0.95, 0.02, 0.8, 8))):
        case.trees.active_slots.copy_(torch.tensor(active + [1 - active[0]] * (2 - len(active)), dtype=torch.int32))
        case.trees.active_count.fill_(len(active))
        case.set_numbers(*numbers)
        case.logits.copy_(torch.randn(case.logits.shape) * 3)
        case.state.keys.random_()
        graph()
        assert torch.equal(out, case.choose_ref(rules))
