"""Attention masks, sampling, cache and statistics, each by a case worked by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from eagle_slim.runtime.api.sampling import noise_keys
from eagle_slim.runtime.api.stats import GenerationStats, PhaseTimer, StepTimes
from eagle_slim.runtime.target.attention import tree_attention_mask
from eagle_slim.runtime.target.cache import KVCache, LayerShape
from eagle_slim.runtime.tree import layout_tree


def test_window_counts_positions_on_the_path_not_rows() -> None:
    # Root (position 4), children 1 and 2 (both at 5), and 3 under 2 (at 6). Window 3: two positions back at most.
    tree = layout_tree(torch.tensor([[9, 1, 2, 3]]), torch.tensor([[-1, 0, 0, 2]]), path_width=3)
    mask = tree_attention_mask(torch.tensor([4]), tree.tree_mask[:, 0], tree.tree_position_ids, 8, 3)
    assert mask[0, 0].int().tolist() == [
        [0, 0, 1, 1, 1, 0, 0, 0],
        [0, 0, 0, 1, 1, 1, 0, 0],
        [0, 0, 0, 1, 1, 0, 1, 0],
        [0, 0, 0, 0, 1, 0, 1, 1],
    ]
    # Four children, then 5 under 4 and 6 under 5: node 4 lies in row 8 and at position 5, two before node 6.
    tree = layout_tree(torch.tensor([[9, 1, 2, 3, 4, 5, 6]]), torch.tensor([[-1, 0, 0, 0, 0, 4, 5]]), path_width=4)
    mask = tree_attention_mask(torch.tensor([4]), tree.tree_mask[:, 0], tree.tree_position_ids, 11, 2)
    assert mask[0, 0, 6].int().tolist() == [0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1]


def test_streams_depend_on_seed_and_request_alone() -> None:
    assert torch.equal(noise_keys(3, 1, 10), noise_keys(3, 1, 20)[:10])
    firsts = {int(noise_keys(seed, request, 1)) for seed in range(8) for request in range(8)}
    assert len(firsts) == 64
    keys = noise_keys(0, 0, 20000)
    assert len(keys.unique()) == 20000
    assert abs(float(keys.double().mean()) / 2**63 - 0.5) < 4 / math.sqrt(12 * 20000)


class TwoKinds:
    """A target of three layers, of which the second has keys wider than its values."""

    layer_shapes = (LayerShape(4, 2, 8, 8), LayerShape(4, 2, 12, 8), LayerShape(4, 2, 8, 8))
    dtype, device = torch.float32, torch.device("cpu")


def test_layers_of_one_shape_lie_together() -> None:
    cache = KVCache.allocate(TwoKinds(), num_slots=3, capacity=5)
    assert [tuple(keys.shape) for keys, _ in cache.stacks] == [(2, 3, 2, 5, 8), (1, 3, 2, 5, 12)]
    for layer, (keys, values) in enumerate(cache.layers):
        keys.fill_(layer)
        assert values.shape == (3, 2, 5, 8)
    assert cache.stacks[0][0][:, 0, 0, 0, 0].tolist() == [0, 2]
    fewer = cache.first(2)
    assert (fewer.num_slots, fewer.capacity) == (2, 5)
    fewer.layers[1][0].fill_(7)
    assert cache.stacks[1][0][0, :, 0, 0, 0].tolist() == [7, 7, 1]
    assert cache.size_bytes == 4 * 3 * 2 * 5 * (8 * 5 + 12)


def test_statistics_add_up() -> None:
    one = GenerationStats({1: 2, 3: 1}, num_new_tokens=6, steps=(StepTimes(1.0, 2.0, 0.5),), total_s=5.0)
    assert (one.num_passes, one.num_accepted_tokens) == (3, 5)
    assert one.mean_accepted_length == pytest.approx(5 / 3)
    assert one.step_s == 3.5
    other = GenerationStats({3: 4}, num_new_tokens=13, num_cut_tokens=2, total_s=5.0, missed_ids={7: 2, 5: 1})
    third = GenerationStats(num_new_tokens=6, missed_ids={5: 1, 9: 3})
    missed = GenerationStats.sum(iter([other, third]))
    assert missed.missed_ids == {5: 2, 7: 2, 9: 3}
    assert (missed.num_missed, missed.missed_rate, one.missed_rate) == (7, 7 / 19, 0.0)
    assert missed.to_json()["missed_ids"] == {"5": 2, "7": 2, "9": 3}
    both = GenerationStats.sum([one, other])
    assert (both.accepted_lengths, both.num_cut_tokens) == ({1: 2, 3: 5}, 2)
    assert both.tokens_per_s == pytest.approx(1.9)
    assert GenerationStats().mean_accepted_length == 0.0
    # Two steps of three sequences and one of one gave 5 tokens; then one of one gave 12.
    first = replace(one, active_sequences={1: 1, 3: 2}, finish_reasons={"eos": 2, "length": 1})
    whole = GenerationStats.sum([first, replace(other, active_sequences={1: 1}, finish_reasons={"eos": 1})])
    assert (whole.active_sequences, whole.finish_reasons) == ({1: 2, 3: 2}, {"eos": 3, "length": 1})


class Event:
    """A stand-in for a CUDA event: the GPU reaches it when all before is done, at ``done`` at the earliest."""

    host = done = 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record_event(self, event: Event) -> Event:
        """Stand in for the stream, too."""
        event.at = Event.done = max(Event.host, Event.done)
        return event

    def elapsed_time(self, other: Event) -> float:
        return (other.at - self.at) * 1e3


def test_a_gpu_s_steps_add_up_though_the_host_runs_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: Event(enable_timing=True))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    timer = PhaseTimer(torch.device("cuda"))
    # Steps of a second on the GPU, which the host begins earlier, later and irregularly; it is late for the fourth.
    for begun in (0.0, 0.1, 1.8, 3.5, 3.6):
        Event.host = max(Event.host, begun)
        with timer.phase("step"):
            Event.done = max(Event.host, Event.done) + 1.0
    with timer.phase("prefill"):
        Event.done += 2.0
    Event.host = 8.0
    steps = timer.stop_and_wait()["steps"]
    assert [step.draft_s for step in steps] == pytest.approx([1.0] * 5)
    assert [step.host_s for step in steps] == pytest.approx([0.0, 0.0, 0.5, 0.0, 0.5])
    assert sum(map(sum, steps)) == pytest.approx(8.0 - 2.0)
