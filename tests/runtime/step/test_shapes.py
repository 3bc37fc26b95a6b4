"""Shapes of trees, chosen by step: the same text whatever drafts it, and the choice that times and records give."""

import itertools
import random
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from eagle_slim.runtime import Drafter, SpeculativeModel, TreeConfig
from eagle_slim.runtime.drafter.buffers import INPUTS
from eagle_slim.runtime.step import plan, shapes
from eagle_slim.runtime.step.decoder import Decoder
from eagle_slim.runtime.step.decoders import Decoders
from eagle_slim.runtime.step.kernels.slot_state import SlotState
from eagle_slim.runtime.step.shapes import CHAIN, LARGE, LONG, SHORT, Acceptance, Costs, ShapeChooser
from support.drafting import random_head
from support.sweeps import sweep
from support.tiny_models import random_prompts, tiny_target, write_head

pytestmark = pytest.mark.filterwarnings("ignore::eagle_slim.runtime.errors.AcceptanceWarning")
TREE = TreeConfig(3, 4, 24)
TIMES = {LARGE: 8.4, None: 5.5, CHAIN: 6.1, SHORT: 6.6, LONG: 7.5}
PROMPTS = random_prompts([5, 9, 3, 14])


def model_of_any_shape(tmp_path, monkeypatch, order, seen=None):
    """A model whose steps take the shapes of ``order`` in turn; ``seen``: whether each drafted, and nodes accepted."""
    monkeypatch.setattr(plan, "_choose_shapes", lambda *_: ((TREE, CHAIN, SHORT, None), "for a test"))

    class InTurn(ShapeChooser):
        def __init__(self, *given):
            super().__init__(*given)
            self.turns = itertools.cycle(order)

        def next(self, *_):
            return next(self.turns)

        def see(self, shape, verdicts):
            super().see(shape, verdicts)
            if seen is not None:
                seen.extend((shape is not None, len(ranks)) for ranks in verdicts.values())

        def is_unmeasured(self, shape, places):
            return False

    # In float64, so that no near-tie of a sampled token falls the other way.
    target = tiny_target("llama").double()
    monkeypatch.setattr(Decoders, "new_chooser", lambda own, shapes: InTurn(own.acceptance, own.costs, shapes))
    model = SpeculativeModel.from_pretrained(target, write_head(tmp_path / "head"), tree=TreeConfig.of(3, 4))
    return model.with_tree(None)


ORDERS = {
    "each in turn": (TREE, None, CHAIN, SHORT),
    "back after three": (None, None, None, TREE),
    # More plain steps than there are places for their tokens.
    "back after seventy": (*[None] * 70, TREE, TREE),
    "back from the brim": (*[None] * 11, CHAIN, None, SHORT),
}
SAMPLED = {"temperature": 0.8, "seed": 3}


@cache
def plain_text(is_sampled):
    with tempfile.TemporaryDirectory() as folder:
        model = SpeculativeModel.from_pretrained(tiny_target("llama").double(), write_head(Path(folder)))
    options = SAMPLED if is_sampled else {}
    return model.generate(PROMPTS, max_new_tokens=90, ignore_eos=True, speculative=False, **options).token_ids


@pytest.mark.parametrize("order", sweep(ORDERS, "each in turn"))
@pytest.mark.parametrize("is_sampled", [False, True], ids=["greedy", "sampled"])
def test_a_call_may_change_its_tree_between_any_two_steps(tmp_path, monkeypatch, order, is_sampled):
    model = model_of_any_shape(tmp_path, monkeypatch, ORDERS[order])
    options = SAMPLED if is_sampled else {}
    # Each comes back to trees.
    num_new = 90 if len(ORDERS[order]) > 40 else 45
    found = model.generate(PROMPTS, max_new_tokens=num_new, ignore_eos=True, max_slots=3, **options)
    assert found.token_ids == [tokens[:num_new] for tokens in plain_text(is_sampled)]
    words = {None: "plain decoding", TREE: "24 nodes", CHAIN: "3 nodes", SHORT: "8 nodes"}
    assert all(words[shape] in found.stats.path for shape in ORDERS[order])


@pytest.mark.parametrize("is_compiled", [False, True])
def test_a_prompts_token_does_not_wait_for_the_kernels_of_steps(tmp_path, monkeypatch, is_compiled):
    told = []
    run, rules_of = Decoder.timed_step, plan.CallRules.of

    def timed_step(*given):
        told.append("step")
        return run(*given)

    monkeypatch.setattr(Decoder, "is_compiled", lambda *_: is_compiled)
    monkeypatch.setattr(Decoder, "timed_step", timed_step)
    # As on a GPU, where a step is launched before the tokens of the one before are read.
    monkeypatch.setattr(plan.CallRules, "of", lambda *given: replace(rules_of(*given), host_reason=None))
    model = model_of_any_shape(tmp_path, monkeypatch, [None])
    criteria = [lambda *_: bool(told.append("token"))]
    model.generate(PROMPTS[0], max_new_tokens=2, ignore_eos=True, stopping_criteria=criteria)
    assert told[:2] == (["step", "token"] if is_compiled else ["token", "step"])


def test_drafts_after_plain_steps_are_those_without_them(tmp_path, monkeypatch):
    """The drafter has the same pairs, so a tree is accepted as far as where every step drafts."""
    gained = []
    for order in ((TREE,), (*[None] * 25, TREE)):
        found = []
        model_of_any_shape(tmp_path, monkeypatch, order, found).generate(PROMPTS[1], max_new_tokens=70, ignore_eos=True)
        # By the place in the answer where a step began.
        starts = itertools.accumulate((1 + accepted for _, accepted in found), initial=0)
        gained.append({at: accepted for at, (drafted, accepted) in zip(starts, found, strict=False) if drafted})
    always, rarely = gained
    shared = always.keys() & rarely.keys()
    assert shared
    assert {at: always[at] for at in shared} == {at: rarely[at] for at in shared}


def test_waiting_pairs_of_slots_that_do_not_run_stay():
    """Three slots with 3, 1 and 4 tokens that the drafter has not taken; the last does not run."""
    drafter = Drafter(random_head(target_vocab=90, draft_vocab=40), CHAIN).on_slots(3, 64)
    state = SlotState.allocate(3, 1, "cpu", 16, **{name: getattr(drafter.bufs, name) for name in INPUTS})
    state.active_inverse.copy_(torch.tensor([0, 1, -1]))
    state.prefix.copy_(torch.tensor([5, 7, 2]))
    state.num_new.copy_(torch.tensor([3, 1, 4]))
    state.new_tokens[:, :4] = torch.tensor([[11, 12, 13, -1], [21, -1, -1, -1], [31, 32, 33, 34]])
    drafter.features.copy_(torch.arange(64.0)[None, :, None].expand_as(drafter.features))
    drafter.bufs.keys.fill_(-9)
    drafter.take_pairs(state.prefix, state.num_new, state.new_tokens, state.active_inverse, drafter.features)
    assert state.prefix.tolist() == [7, 7, 2]
    assert state.num_new.tolist() == [1, 1, 4]
    assert state.new_tokens[:, 0].tolist() == [13, 21, 31]
    assert drafter.features[:, 0, 0].tolist() == [2, 0, 0]
    written = [row for row in range(12) if bool((drafter.bufs.keys[:, :, row] != -9).any())]
    assert written == [5, 6]


def chooser(times, learned=None):
    costs = Costs(1_000_000, 10)
    for shape, ms in times.items():
        costs.add(shape, 1, 100, ms)
    return ShapeChooser(learned or Acceptance(), costs, tuple(times))


def test_the_best_is_taken():
    for ranks, times, wanted in (
        # A larger tree accepts no more.
        ([0, 0, 0, 0, 0], TIMES, LONG),
        ([], TIMES, None),
        ([0], TIMES, CHAIN),
        # The same acceptance where a large tree costs more than it gives.
        ([0, 0, 0, 0, 0], TIMES | {LARGE: 40.0, LONG: 22.0}, SHORT),
    ):
        found = chooser(times)
        for _ in range(400):
            shape = found.next(1, 100, [0])
            found.see(shape, {0: ranks[: 0 if shape is None else shape.depth + 1]})
        last = [found.next(1, 100, [0]) for _ in range(20)]
        assert max(last, key=last.count) == wanted


def test_a_shape_is_judged_by_the_best_children_of_its_own_steps():
    """So neither hard text nor a wrong first guess speaks against it."""
    learned = Acceptance()
    found = chooser(TIMES, learned)
    found.see(SHORT, {index: [] for index in range(20)})
    found.see(CHAIN, {0: [0, 0], 1: [0], 2: []})
    assert learned.gain(SHORT).tries == 0
    assert (learned.gain(CHAIN).hits, learned.gain(CHAIN).tries) == (3, 3)
    found.see(SHORT, {0: [1, 0], 1: [0, 2]})
    # Of four tokens, the best children's chain has one; the width lets expect less than twice as many.
    assert learned.gain(SHORT).hits == 4
    assert 1 < learned.gain(SHORT).tries < 2


def test_plain_decoding_comes_back_to_trees_once_drafts_are_accepted_again():
    found = chooser(TIMES)
    for _ in range(300):
        found.see(found.next(1, 100, [0]), {0: []})
    drafted = [found.next(1, 100, [0]) is not None for _ in range(2000)]
    assert 0 < sum(drafted[:300]) < 60
    # A probe lasts as long as a choice.
    probes = [len([*steps]) for is_draft, steps in itertools.groupby(drafted[100:-100]) if is_draft]
    assert len(probes) > 2
    assert set(probes[1:-1]) == {3}
    for _ in range(1500):
        shape = found.next(1, 100, [0])
        found.see(shape, {0: [0] * (0 if shape is None else shape.depth + 1)})
    assert found.next(1, 100, [0]) is not None


def test_a_context_not_met_yet_takes_the_time_of_its_keys():
    costs = Costs(weight_bytes=1_000_000, token_bytes=100)
    costs.add(None, 2, 100, 5.0)
    costs.add(CHAIN, 2, 100, 6.0)
    # 9,900 tokens more of two sequences are 1,980,000 bytes: 1.98 times the weights, which take 5 ms.
    assert costs.get(CHAIN, 2, 10_000) == pytest.approx(6.0 + 1.98 * 5.0)
    costs.add(CHAIN, 2, 10_000, 14.0)
    assert costs.get(CHAIN, 2, 10_000) == 14.0
    assert costs.get(CHAIN, 4, 100) is None


def test_shapes_stay_within_the_tree_that_was_asked_for():
    assert shapes.shapes_up_to(LARGE) == (None, CHAIN, SHORT, LONG, LARGE)
    assert shapes.shapes_up_to(TreeConfig(3, 4, 52)) == (None, CHAIN, SHORT, TreeConfig(3, 4, 52))
    assert shapes.shapes_up_to(TreeConfig(5, 1, 7)) == (None, CHAIN, TreeConfig(5, 1, 7))


def test_a_mixture_has_passes_of_few_rows_and_guesses_by_rows():
    pair, four = TreeConfig(0, 1, 2), TreeConfig(2, 1, 4)
    assert shapes.shapes_up_to(LARGE, shapes.OF_MIXTURES) == (None, pair, CHAIN, four, SHORT, LONG, LARGE)
    assert shapes.first_shape(1, shapes.OF_MIXTURES, is_mixture=True) == CHAIN
    costs = Costs(1_000_000, 10, is_mixture=True)
    costs.add(None, 1, 100, 3.0)
    costs.add(CHAIN, 1, 100, 5.0)
    assert [costs.guess(each, 1, 100) for each in (pair, four, LARGE)] == [4.0, 6.0, 62.0]


# Milliseconds of steps of Qwen3-30B-A3B's dimensions with a uniform router on an H200, by nodes.
OF_MIXTURE = {1: 2.8, 2: 3.9, 3: 4.5, 4: 5.4, 8: 8.3, 16: 11.5}


@pytest.mark.parametrize("rate", [0.0, 0.2, 0.3, 0.4, 0.6, 0.8, 1.0])
def test_a_mixtures_choice_costs_little_where_drafts_do_not_pay(rate: float) -> None:
    """Chains whose drafts are accepted with one chance, nothing learned before; a new shape is timed by two steps."""
    times = {shape: OF_MIXTURE[1 if shape is None else shape.total_tokens] for shape in shapes.OF_MIXTURES}
    order = sorted(times, key=lambda shape: shape != CHAIN)
    found = ShapeChooser(Acceptance(), Costs(6_000_000_000, 98_304, is_mixture=True), order)
    draw, spent, tokens = random.Random(0), 0.0, 0
    for _ in range(1000):
        shape = found.next(1, 512, [0])
        while missing := [each for each in {shape, None} if found.is_unmeasured(each, 1)]:
            for each in missing:
                found.time(each, 1, 512, times[each])
                spent += 2 * times[each]
            shape = found.next(1, 512, [0])
        drafts = 0 if shape is None else shape.depth + 1
        accepted = next((level for level in range(drafts) if draw.random() >= rate), drafts)
        found.see(shape, {0: [0] * accepted})
        found.time(shape, 1, 512, times[shape])
        spent, tokens = spent + times[shape], tokens + 1 + accepted
    assert tokens * times[None] / spent > (0.98 if rate < 0.5 else 1.1)


def test_no_step_passes_over_more_rows_than_pay() -> None:
    assert shapes.shapes_for(4, shapes.SHAPES) == [None, CHAIN, SHORT, LONG, LARGE]
    assert shapes.shapes_for(16, shapes.SHAPES) == [None, CHAIN, SHORT, LONG]
    times = {LARGE: 1.0, None: 5.0, CHAIN: 6.0}
    found = chooser(times)
    for shape, ms in times.items():
        found.time(shape, 8, 100, ms)
    assert LARGE not in {found.next(8, 100, [*range(8)]) for _ in range(40)}
    assert LARGE in {found.next(1, 100, [0]) for _ in range(40)}


def test_sizes_alone_fix_a_shape_where_the_text_may_depend_on_it():
    every = shapes.SHAPES
    assert shapes.shape_by_size(True, 1, 16_000, 500, every) == LARGE
    assert shapes.shape_by_size(True, 16, 16_000, 500, every) == CHAIN
    assert shapes.shape_by_size(True, 1, 16_000, 4_000, every) == CHAIN
    assert shapes.shape_by_size(True, 1, 16_000, 9_000, every) is None

    # A CPU passes over few rows.
    def fixed(batch, tree):
        return shapes.shape_by_size(False, batch, 16_000, 4_000, shapes.shapes_up_to(tree, shapes.ON_CPU))

    assert fixed(1, LARGE) == fixed(2, LARGE) == TreeConfig(1, 3, 4)
    assert fixed(4, LARGE) == TreeConfig(0, 1, 2)
    # Within the tree that was asked for.
    assert fixed(1, TreeConfig(5, 1, 7)) == CHAIN
    assert fixed(1, TreeConfig(0, 2, 3)) == TreeConfig(0, 2, 3)
