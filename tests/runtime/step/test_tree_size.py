"""The size of a tree by default: the rule by hand, the tables that ship, and what a call does with it."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from eagle_slim.runtime import SpeculativeModel
from eagle_slim.runtime.settings import TreeConfig
from eagle_slim.runtime.step.tree_size import Step, StepTable, TreeSize, TreeSizes, measured_sizes
from support.tiny_models import random_prompts, tiny_target, write_head

pytestmark = pytest.mark.filterwarnings("ignore::eagle_slim.runtime.errors.AcceptanceWarning")
STEPS = (
    Step(1, 512, 1, 5.0), Step(1, 512, 16, 6.0), Step(1, 512, 60, 7.0),
    Step(1, 8192, 1, 5.0), Step(1, 8192, 16, 6.0), Step(1, 8192, 60, 9.0),
    Step(16, 512, 1, 5.0), Step(16, 512, 16, 20.0),
)  # fmt: skip
SIZES = TreeSizes(
    {1: 1.0, 16: 2.5, 60: 3.0},
    (
        StepTable("GPU A", "cuda", "small", 1_000, 100, STEPS),
        StepTable("GPU A", "cuda", "large", 1_000_000, 100, (Step(1, 512, 1, 5.0), Step(1, 512, 60, 6.0))),
        StepTable("GPU B", "cuda", "large", 1_000_000, 100, (Step(1, 512, 1, 5.0), Step(1, 512, 16, 6.0))),
        StepTable("CPU", "cpu", "small", 1_000, 100, (Step(1, 100, 1, 5.0), Step(1, 100, 60, 16.0))),
    ),
)


@pytest.mark.parametrize(
    ("device", "kind", "weight_bytes", "slots", "context", "nodes"),
    [
        ("GPU A", "cuda", 1_000, 1, 512, 60),  # 3.0 / 7 is more than 2.5 / 6 and 1 / 5
        ("GPU A", "cuda", 1_000, 1, 3000, 16),  # nearer to 8,192 than to 512, by ratio
        ("GPU A", "cuda", 1_000, 1, 1, 60),
        ("GPU A", "cuda", 1_000, 3, 512, 1),  # the next larger number of slots is 16
        ("GPU A", "cuda", 1_000, 99, 99_999, 1),
        ("GPU A", "cuda", 900_000, 1, 512, 60),
        ("GPU B", "cuda", 1_000, 1, 512, 16),  # the same device comes before the same size
        ("GPU C", "cuda", 1_000, 1, 8192, 16),  # no such device: the target nearest in size
        ("GPU C", "cuda", 1_000, 16, 512, 16),  # plain is best where it was measured, which says little of another GPU
        ("CPU", "cpu", 5, 1, 10, 60),  # plain is best on the CPU where it was measured
    ],
)
def test_most_tokens_a_second(device: str, kind: str, weight_bytes: int, slots: int, context: int, nodes: int) -> None:
    size = SIZES.choose(device, kind, weight_bytes, 100, slots, context, most_nodes=60)
    assert size.num_nodes == nodes
    assert ("does not pay" in size.reason) == (nodes == 1)


def test_a_larger_head_drafts_longer() -> None:
    """16 of 20 ms are the draft's: 3.0 / 20 is less than 1 / 5, 3.0 / 12 is more."""
    steps = (Step(1, 100, 1, 5.0), Step(1, 100, 60, 20.0, 16.0))
    sizes = TreeSizes(SIZES.accepted_lengths, (StepTable("GPU A", "cuda", "small", 1_000, 100, steps),))
    assert sizes.choose("GPU A", "cuda", 1_000, 100, 1, 100, most_nodes=60).num_nodes == 1
    assert sizes.choose("GPU A", "cuda", 1_000, 50, 1, 100, most_nodes=60).num_nodes == 60


def test_no_more_nodes_than_the_tree_has() -> None:
    assert SIZES.choose("GPU A", "cuda", 1_000, 100, 1, 512, most_nodes=7).num_nodes == 7
    assert SIZES.choose("none", "xpu", 1_000, 100, 1, 512, most_nodes=7).num_nodes == 7


def test_the_tables_that_ship() -> None:
    sizes = measured_sizes()
    assert {"cuda", "cpu"} == {table.kind for table in sizes.tables}
    lengths = [sizes.accepted_lengths[nodes] for nodes in sorted(sizes.accepted_lengths)]
    assert lengths[0] == 1.0 < lengths[1]
    assert all(later >= 0.98 * before for before, later in itertools.pairwise(lengths))
    for table in sizes.tables:
        for slots, context in {(step.slots, step.context) for step in table.steps}:
            rows = [step for step in table.steps if (step.slots, step.context) == (slots, context)]
            assert 1 in {step.nodes for step in rows if step.nodes in sizes.accepted_lengths}
            size = sizes.choose(table.device, table.kind, table.weight_bytes, table.draft_bytes, slots, context, 60)
            assert size.num_nodes in {step.nodes for step in rows}
            other = sizes.choose("another", table.kind, table.weight_bytes, table.draft_bytes, slots, context, 60)
            assert other.num_nodes > 1


class MeasuredHere(TreeSizes):
    """Tables in which the CPU of the tests stands as if it were a GPU that was measured."""

    def __init__(self) -> None:
        steps = (Step(1, 100, 1, 5.0), Step(1, 100, 16, 6.0), *STEPS[-2:])
        super().__init__(SIZES.accepted_lengths, (StepTable("CPU", "cuda", "tiny", 1_000, 100, steps),))

    def choose(self, device: str, kind: str, *work: int, **_: bool) -> TreeSize:  # type: ignore[override]
        assert (device, kind) == ("CPU", "cpu")
        return super().choose(device, "cuda", *work)


def test_a_call_chooses_its_trees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eagle_slim.runtime.step.plan.measured_sizes", MeasuredHere)
    target, head = tiny_target("llama"), write_head(tmp_path)
    prompts = random_prompts([5, 9, 3])
    answers = []
    for backend in ("transformers", "fused"):
        model = SpeculativeModel.from_pretrained(target, head, depth=3, top_k=4, target_backend=backend)
        one = model.generate(prompts[0], max_new_tokens=8)
        assert "trees of 16 nodes" in one.stats.path
        assert "trees of 16 nodes (fastest where it was measured: CPU, tiny" in one.stats.path
        three = model.generate(prompts, max_new_tokens=8)
        assert "plain decoding" in three.stats.path
        assert three.stats.mean_accepted_length == 1
        assert "plain decoding (drafting does not pay there, 2000 tokens/s beside 3200: CPU, tiny" in three.stats.path
        assert "plain decoding" in model.generate(prompts[:1], max_new_tokens=8, speculative=False).stats.path
        # A number that is given is kept, and so is a tree.
        told = model.with_tree(TreeConfig(3, 4, 24)).generate(prompts, max_new_tokens=8)
        assert "trees of 24 nodes" in told.stats.path
        assert one.token_ids[0] == three.token_ids[0]
        assert told.token_ids == three.token_ids
        answers.append(told.token_ids)
    assert answers[0] == answers[1]
