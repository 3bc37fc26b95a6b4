"""Drawn verdicts of benchmarks: lengths, ranks, paths in the drafted tree, and steps that accept what was drawn."""

import pytest
import torch
from eagle_slim.runtime import TreeConfig, UsageError
from eagle_slim.runtime.drafter.tuning import problem
from eagle_slim.runtime.settings import PartialVerification
from eagle_slim.runtime.tree import Trees, layout_tree
from support.raising import raises

from benchmarks.shared import decoding, drawn_verdicts
from benchmarks.shared.drawn_verdicts import LEVELS, NUM_LENGTHS, NUM_RANKS, draw_lengths, draw_paths, draw_ranks

TINY = problem.Dims(64, 96, 4, 2, 16, 90)


def test_lengths_have_the_mean_asked_for_and_follow_a_law_cut_off() -> None:
    for mean in (1.0, 1.004, 2.79, 3.0, 4.5, 7.0):
        lengths = draw_lengths(mean, 7, seed=3)
        assert len(lengths) == NUM_LENGTHS
        assert set(lengths) <= set(range(1, 8))
        assert sum(lengths) == round(mean * NUM_LENGTHS)
        assert lengths == draw_lengths(mean, 7, seed=3)
    # Of three lengths with mean 2 each is as frequent.
    assert sorted(draw_lengths(2.0, 3)) == [1] * 80 + [2] * 80 + [3] * 80
    with raises(UsageError, option="7.1"):
        draw_lengths(7.1, 7)


def test_ranks_have_the_chances_asked_for() -> None:
    """At the first level 0.5, 0.1, 0.02 and so on; nothing at the others."""
    ranks = draw_ranks(lambda level: 0.5 if level == 0 else 0.0)
    assert ranks.shape == (NUM_RANKS, LEVELS)
    shares = [(ranks[:, 0] == rank).double().mean().item() for rank in range(3)]
    assert shares == pytest.approx([0.5, 0.1, 0.02], abs=0.03)
    assert (ranks[:, 1:] >= 16).all()


@pytest.mark.parametrize(
    ("drawn", "own", "expected"),
    [
        (1, 8, [8, 50, 50, 50, 50, 50, 50]),  # the root's own choice is no child of it
        (1, 2, [0, 50, 50, 50, 50, 50, 50]),  # ... or is one: the smallest id that is none
        (2, 50, [1, 50, 50, 50, 50, 50, 50]),
        (3, 50, [1, 3, 50, 50, 50, 50, 50]),
        (4, 50, [1, 3, 50, 6, 50, 50, 50]),
        (5, 50, [1, 3, 50, 6, 50, 50, 50]),  # deeper than the tree is
        ([0, 1], 50, [1, 4, 50, 50, 50, 50, 50]),  # A, then D, which has no children
        ([1, 0], 50, [2, 50, 5, 50, 50, 50, 50]),  # B, then E
        ([0, 0, 0], 50, [1, 3, 50, 6, 50, 50, 50]),  # A, C, G
        ([0, 2, 0], 50, [1, 50, 50, 50, 50, 50, 50]),  # A has two children only
        ([2, 0], 2, [0, 50, 50, 50, 50, 50, 50]),
    ],
)
def test_paths_of_the_example_tree(device: str, drawn: int | list[int], own: int, expected: list[int]) -> None:
    """root 9; A 1, B 2; C 3, D 4 under A; E 5 under B; G 6 under C; slot 1 of two is the only active one."""
    row = drawn if isinstance(drawn, int) else [*drawn, *[1 << 20] * (LEVELS - len(drawn))]
    table, turns, owed = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([row] * 5, [0, 3], [0, 0]))
    assert example_choices(own, table, turns, owed) == [expected, [50] * 7]
    assert turns.tolist() == [0, 4]


def test_what_a_tree_is_not_deep_enough_for_is_owed(device: str) -> None:
    """Of 5 tokens the tree has 4, so that the next 2 are 3 and the 1 after them is one again."""
    table, turns, owed = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([5, 2, 1], [0, -37], [0, 0]))
    found = []
    for _ in range(3):
        found.append(example_choices(50, table, turns, owed)[0][:4])
        found.append(owed.tolist())
    assert found == [[1, 3, 50, 6], [0, 1], [1, 3, 50, 50], [0, 0], [50, 50, 50, 50], [0, 0]]


def example_choices(own: int, table: torch.Tensor, turns: torch.Tensor, owed: torch.Tensor) -> list[list[int]]:
    """Of the tree below: choices of 50, of the root's ``own``, once a path is drawn."""
    tokens, parents = torch.tensor([[9, 1, 2, 3, 4, 5, 6]] * 2), torch.tensor([[-1, 0, 0, 1, 1, 2, 3]] * 2)
    tree, device = layout_tree(tokens, parents, path_width=4), table.device
    choices = torch.full((2, 7), 50, dtype=torch.int32, device=device)
    choices[0, 0] = own
    active, count = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([1, -1], [1]))
    trees = Trees(active, count, *(x.to(device) for x in (tree.draft_tokens, tree.parents, tree.tree_position_ids)))
    draw_paths(choices, trees, table, turns, owed)
    found: list[list[int]] = choices.tolist()
    return found


@pytest.mark.parametrize("place", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_steps_accept_what_was_drawn(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """Two sequences, each beginning elsewhere in the table; tokens are those that the lengths add up to."""
    monkeypatch.setitem(problem.MODELS, "tiny", TINY)
    monkeypatch.setitem(decoding.LAYERS, "tiny", 4)
    with torch.inference_mode():
        dtype = torch.float32 if place == "cpu" else torch.bfloat16
        model = decoding.RandomModel("tiny", torch.device(place), dtype)
        tree = TreeConfig(2, 4, 20)
        lengths = draw_lengths(2.5, tree.path_width)
        decoder = model.drawn_decoder(model.new_cache(2, 120), tree, 60, lengths)
        decoding.fill(decoder, 2, 30, turn=7)
        run = decoding.run_steps(decoder, 2, 5)
    taken = [lengths[7:12], lengths[44:49]]
    assert run.tokens == sum(map(sum, taken))
    assert decoder.state.lengths.tolist() == [30 + sum(slot) for slot in taken]
    assert run.passes == 10


def test_rows_of_partial_verification(random_model: decoding.RandomModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """With every token confirmed, a step gives all that its partial passes accept, and one more."""
    monkeypatch.setattr(decoding, "draw_lengths", lambda *a: [2] * 240)
    tree = TreeConfig(3, 4, 8)
    option = PartialVerification(num_blocks=2, num_steps=3, num_tokens=9)
    rows = list(decoding.measure_partial(random_model, 60, tree, 2, 400, [option], 2.0, [1.0, 0.5], steps=6, rounds=1))
    assert [row["survival"] for row in rows] == [1.0, 0.5]
    assert [row["full"]["accepted_length"] for row in rows] == [2.0, 2.0]
    assert rows[0]["ahead"]["accepted_length"] == 3 * 2 + 1
    assert 1 <= rows[1]["ahead"]["accepted_length"] < 3 * 2 + 1
    for row in rows:
        assert row["plain"]["accepted_length"] == 1.0
        assert row["ratio"] == row["ahead"]["tokens_per_s"] / row["full"]["tokens_per_s"]
        assert row["over_plain"] == row["ahead"]["tokens_per_s"] / row["plain"]["tokens_per_s"]
        assert row["full_over_plain"] == row["full"]["tokens_per_s"] / row["plain"]["tokens_per_s"]


def test_survivals() -> None:
    drawn = drawn_verdicts.survivals(0.9, 31, 28)
    assert max(drawn) <= 31
    # The mean of a geometric law that is cut off.
    assert sum(drawn) / 28 == pytest.approx(sum(0.9**k for k in range(1, 32)), rel=0.02)
    assert set(drawn_verdicts.survivals(1.0, 31, 28)) == {31}
