from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
from eagle_slim.runtime import GenerationStats, TreeConfig
from eagle_slim.runtime.api.stats import StepTimes
from eagle_slim.runtime.compare.prompts import Prompt

from benchmarks import shapes
from benchmarks.shared import decoding
from benchmarks.shared.decoding import RandomModel, run_steps
from benchmarks.shared.drawn_verdicts import LEVELS, DrawnVerdicts


def test_a_row_is_judged_by_its_medians() -> None:
    row = shapes.judged("x", {"plain": [10, 11, 12], "1,1,3": [20, 19, 30], "chosen": [19.7, 19.8, 1]}, {})
    assert (row["best"], row["over_plain"], row["over_best"]) == ("1,1,3", 19.7 / 11, 19.7 / 20)
    assert row["is_good"]
    parts = {"plain": [1]}
    bad = shapes.judged("x", {"plain": [10], "1,1,3": [20], "chosen": [19.3]}, parts)
    assert not bad["is_good"]
    # What the next row's first calls add is none of this one's.
    parts["plain"].append(2)
    assert bad["parts"] == {"plain": [1]}


def test_rounds_end_before_one_that_would_take_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 0.0, 10.0, 20.0])
    monkeypatch.setattr(shapes.time, "perf_counter", lambda: next(clock))
    assert shapes._in_turn({"plain": lambda: 1.0}, rounds=9, seconds=29) == {"plain": [1.0, 1.0]}


def test_every_variant_of_text_answers_and_the_choice_forgets(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shapes.SpeculativeModel, "from_pretrained", lambda **_: model)
    monkeypatch.setattr(shapes, "MAX_LENGTH", 128)
    found = shapes.TextVariants("full", 2, {}, [None, shapes.TREES[0]], torch.device("cpu"))
    known = found.base._decoders
    known.acceptance.gain(shapes.TREES[0]).add(1, 1)
    tokens_per_s = found.measure([Prompt(("hello",)), Prompt(("good day",))], 4, 2, 1000)
    assert {name: len(values) for name, values in tokens_per_s.items()} == {"plain": 2, "1,1,3": 2, "chosen": 2}
    assert all(value > 0 for values in tokens_per_s.values() for value in values)
    assert {name: len(rounds) for name, rounds in found.parts.items()} == {"plain": 2, "1,1,3": 2, "chosen": 2}


def test_the_first_draft_after_plain_steps_stands_apart() -> None:
    tree, times = shapes.TREES[0], [StepTimes(1.0, 0.0, 0.1), StepTimes(4.0, 0.0, 0.2), StepTimes(2.0, 1.0, 0.3)]
    parts = shapes.parts_of(10, [GenerationStats(steps=tuple(times))], [[None, tree, tree]], 0.5)
    assert parts["steps"] == {"plain": [1, 1, 1000], "1,1,3 after plain": [1, 4, 4000], "1,1,3": [1, 3, 3000]}
    assert (parts["between_s"], parts["prompts_s"]) == pytest.approx((0.6, 1.4))


def test_variants_of_drawn_verdicts_take_their_law(random_model: RandomModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shapes, "ROWS", 60)
    monkeypatch.setattr(decoding.Decoder, "time_step", lambda *_: 1.0)
    found = shapes.DrawnVariants(random_model, 2, [None, shapes.TREES[0]], 3)
    tokens_per_s = found.measure("0.3", 1, 1000)
    assert list(tokens_per_s) == ["plain", "1,1,3", "chosen"]
    assert isinstance(found.decoder.steps.revise, DrawnVerdicts)
    assert torch.equal(found.decoder.steps.revise.drawn, shapes.draw_ranks(shapes.LAWS["0.3"]))


def test_a_mixture_is_drawn_beside_plain_decoding(random_model: RandomModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shapes, "ROWS", 60)
    monkeypatch.setattr(decoding.Decoder, "time_step", lambda *_: 1.0)
    monkeypatch.setattr(type(random_model.target), "is_mixture", True)
    found = shapes.DrawnVariants(random_model, 1, [None, shapes.TREES[0]], 3)
    assert list(found.measure("0.2", 1, 1000)) == ["plain", "chosen"]
    assert torch.equal(found.decoder.steps.revise.drawn, shapes.draw_ranks(lambda _: 0.2))
    assert found.parts["chosen"][0]["timing_s"] > 0
    every = shapes.shapes_of("drawn/qwen3-30b-a3b/1")
    assert every == [*shapes.OF_MIXTURES, shapes.LARGE]
    assert shapes.shapes_of("drawn/llama-3.1-8b/1") == shapes.shapes_of("slots/1") == [*shapes.SHAPES]


def test_rows_of_a_kind_share_their_models() -> None:
    rows = ("slots/16", "text/512/german", "text/512/code", "drawn/llama-3.1-8b/0.1/4", "drawn/llama-3.1-8b/0.3/4")
    kinds = [shapes.kind_of(row) for row in rows]
    assert kinds == ["slots/16", "text/512", "text/512", "drawn/llama-3.1-8b/4", "drawn/llama-3.1-8b/4"]
    assert [shapes.slots_of(kind) for kind in kinds] == [16, 1, 1, 4, 4]


def test_steps_of_any_shape_accept_the_drawn_ranks(random_model: RandomModel) -> None:
    """Each step that drafts takes the next row; the second slot begins 37 rows on; a chain has best children only."""
    ranks = torch.full((64, LEVELS), 1 << 20, dtype=torch.int32)
    ranks[:3, :2] = torch.tensor([[1, 9], [0, 0], [0, 9]])
    ranks[37:40, :2] = torch.tensor([[9, 0], [1, 0], [0, 9]])
    tree, chain = TreeConfig(2, 4, 20), TreeConfig(1, 1, 3)
    decoder = random_model.drawn_decoder(random_model.new_cache(2, 120), tree, 60, ranks)
    decoder.fill_(2, 30)
    chooser = mock.Mock(steps=Counter(), is_unmeasured=lambda *_: False)
    chooser.next.side_effect = [tree, chain, None, tree]
    with torch.inference_mode():
        found = run_steps(decoder, 2, 4, chooser, 30)
    seen = [(tree, {0: [1], 1: []}), (chain, {0: [0, 0], 1: []}), (None, {0: [], 1: []}), (tree, {0: [0], 1: [0]})]
    assert [call.args for call in chooser.see.call_args_list] == seen
    assert found.tokens == 4 * 2 + 5
    assert chooser.steps == {tree: 2, chain: 1, None: 1}
