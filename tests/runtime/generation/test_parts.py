"""Attention masks, the accepting walk, sampling, slots, cache and statistics, each by a case worked by hand."""

from __future__ import annotations

import math

import pytest
import torch
from eagle_slim.runtime.config import SamplingConfig
from eagle_slim.runtime.generation.accept import accept_path
from eagle_slim.runtime.generation.sampling import choose_tokens, stream_window, uniform_stream, warp
from eagle_slim.runtime.generation.stats import GenerationStats, PhaseTimer
from eagle_slim.runtime.slots import ActiveSlots
from eagle_slim.runtime.target.attention import masked_attention, tree_attention_mask
from eagle_slim.runtime.target.cache import SlotCache
from eagle_slim.runtime.tree import layout_tree


def test_mask_of_prefix_and_ancestors() -> None:
    tree = layout_tree(torch.tensor([[9, 1, 2]] * 2), torch.tensor([[-1, 0, 0]] * 2), path_width=2)
    mask = tree_attention_mask(torch.tensor([2, 3]), tree.tree_mask[:, 0], tree.tree_position_ids, 6, None)
    assert mask[0, 0].int().tolist() == [[1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 0, 0], [1, 1, 1, 0, 1, 0]]
    assert mask[1, 0].int().tolist() == [[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 0, 1]]


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


@pytest.mark.parametrize(("softcap", "with_sinks"), [(None, False), (2.0, False), (None, True), (2.0, True)])
def test_grouped_attention_equals_the_formula(softcap: float | None, with_sinks: bool) -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 5, 8), torch.randn(2, 2, 5, 6)
    mask = torch.rand(2, 1, 3, 5) < 0.6
    mask[..., 0] = True
    sinks = torch.randn(4) if with_sinks else None
    out = masked_attention(query, key, value, mask, 0.3, softcap, sinks)
    for b in range(2):
        for head in range(4):
            for node in range(3):
                scores = key[b, head // 2] @ query[b, head, node] * 0.3
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                weights = torch.where(mask[b, 0, node], scores.exp(), 0.0)
                total = weights.sum() + (sinks[head].exp() if sinks is not None else 0.0)
                torch.testing.assert_close(out[b, head, node], weights @ value[b, head // 2] / total)


A, B, C, D, E, G, Z = range(1, 8)


def logits_for(choices: list[list[int]]) -> torch.Tensor:
    """Logits whose argmax after node n of sequence b is choices[b][n]: [batch, nodes, 8]."""
    return torch.nn.functional.one_hot(torch.tensor(choices), 8).float()


def test_accepting_walk_of_the_worked_example() -> None:
    tokens, parents = torch.tensor([[0, A, B, C, D, E, G]]), torch.tensor([[-1, 0, 0, 1, 1, 2, 3]])
    tree = layout_tree(tokens, parents, path_width=4)
    #        after root, A, B, C, D, E, G
    cases = {
        (A, C, Z, Z, Z, Z, Z): ([0, 1, 3, -1], [A, C, Z, -1]),
        (A, C, Z, G, Z, Z, A): ([0, 1, 3, 6], [A, C, G, A]),
        (B, C, E, Z, Z, D, Z): ([0, 2, 5, -1], [B, E, D, -1]),
        (Z, C, E, G, Z, D, Z): ([0, -1, -1, -1], [Z, -1, -1, -1]),
        (C, C, E, G, Z, D, Z): ([0, -1, -1, -1], [C, -1, -1, -1]),  # C is a node, but no child of the root
    }
    for choices, (nodes, emitted) in cases.items():
        path = accept_path(tree, logits_for([list(choices)]), lambda rows, _step: rows.argmax(-1))
        assert path.nodes.tolist() == [nodes]
        assert path.tokens.tolist() == [emitted]
        assert path.lengths.tolist() == [sum(t >= 0 for t in emitted)]


def test_walks_of_a_batch_are_independent_and_hear_their_step() -> None:
    tree = layout_tree(torch.tensor([[0, A, B], [0, B, A]]), torch.tensor([[-1, 0, 1]] * 2), path_width=3)
    steps: list[int] = []

    def choose(rows: torch.Tensor, step: int) -> torch.Tensor:
        steps.append(step)
        return rows.argmax(-1)

    path = accept_path(tree, logits_for([[A, B, Z], [A, B, Z]]), choose)
    assert path.tokens.tolist() == [[A, B, Z], [A, -1, -1]]
    assert steps == [0, 1, 2]


def test_sampling_inverts_the_cumulative_distribution() -> None:
    logits = torch.tensor([0.2, 0.0, 0.5, 0.3]).log().expand(5, 4)
    uniforms = torch.tensor([0.0, 0.199, 0.2, 0.699, 0.9999999], dtype=torch.float64)
    assert choose_tokens(logits, uniforms, SamplingConfig(temperature=1.0)).tolist() == [0, 0, 2, 2, 3]
    assert choose_tokens(logits, uniforms, SamplingConfig()).tolist() == [2] * 5


@pytest.mark.parametrize("temperature", [1e-4, 1e-30, 1e-38, 1e-45])
def test_the_coldest_sampling_takes_the_largest_logit(temperature: float) -> None:
    logits = torch.tensor([[-3.0, 40.0, 39.99, 0.0], [-9.0, -8.0, -8.5, -70.0]])
    for uniform in (0.0, 0.5, 0.999999):
        chosen = choose_tokens(logits, torch.full((2,), uniform, dtype=torch.float64), SamplingConfig(temperature))
        assert chosen.tolist() == [1, 1]


def test_warpers_keep_what_their_names_say() -> None:
    logits = torch.tensor([[0.1, 0.4, 0.3, 0.2]]).log()
    assert warp(logits, SamplingConfig(1.0, top_k=2)).isfinite().tolist() == [[False, True, True, False]]
    assert warp(logits, SamplingConfig(1.0, top_p=0.65)).isfinite().tolist() == [[False, True, True, False]]
    cooled = warp(logits, SamplingConfig(0.5)).softmax(-1)
    torch.testing.assert_close(cooled, torch.tensor([[0.01, 0.16, 0.09, 0.04]]) / 0.30)


def test_streams_depend_on_seed_and_request_alone() -> None:
    assert torch.equal(uniform_stream(3, 1, 10), uniform_stream(3, 1, 20)[:10])
    firsts = {float(uniform_stream(seed, request, 1)) for seed in range(8) for request in range(8)}
    assert len(firsts) == 64
    window = stream_window([torch.arange(4.0).double(), torch.arange(9.0).double()], [3, 5], 3, torch.device("cpu"))
    assert window.tolist() == [[3, 0, 0], [5, 6, 7]]
    draws = uniform_stream(0, 0, 20000)
    assert abs(float(draws.mean()) - 0.5) < 4 / math.sqrt(12 * 20000)


def test_active_slots_of_the_example() -> None:
    active = ActiveSlots.of([3, 1], 4)
    assert active.indices == (1, 3)
    assert active.active_slots.tolist() == [1, 3, -1, -1]
    assert active.active_inverse.tolist() == [-1, 0, -1, 1]
    assert active.active_count.tolist() == [2]
    rows = active.gather(torch.arange(8).view(4, 2))
    assert rows.tolist() == [[2, 3], [6, 7]]
    assert active.scatter(rows, -1).tolist() == [[-1, -1], [2, 3], [-1, -1], [6, 7]]


def test_cache_keeps_the_accepted_path_only() -> None:
    cache = SlotCache(num_slots=2, capacity=12, device="cpu")
    both, second = ActiveSlots.of([0, 1], 2), ActiveSlots.of([1], 2)

    def rows(first: float, count: int, batch: int) -> torch.Tensor:
        return (first + torch.arange(count)).view(1, 1, count, 1) + 100 * torch.arange(batch).view(batch, 1, 1, 1)

    cache.begin(second, 4)
    cache.update(rows(0, 4, 1), -rows(0, 4, 1), 0)
    cache.commit(1, 4)
    cache.begin(both, 7)
    keys, values = cache.update(rows(10, 7, 2), -rows(10, 7, 2), 0)
    assert keys.shape == (2, 1, 11, 1)
    assert keys[1, 0, :, 0].tolist() == [0, 1, 2, 3, 110, 111, 112, 113, 114, 115, 116]
    assert torch.equal(values, -keys)
    cache.commit_path(both, torch.tensor([[0, 1, -1], [0, 2, 5]]), [2, 3])
    assert cache.lengths == [2, 7]
    cache.begin(both, 1)
    keys, _ = cache.update(rows(50, 1, 2), rows(50, 1, 2), 0)
    assert keys[0, 0, :3, 0].tolist() == [10, 11, 50]
    assert keys[1, 0, :, 0].tolist() == [0, 1, 2, 3, 110, 112, 115, 150]


def test_statistics_add_up() -> None:
    one = GenerationStats({1: 2, 3: 1}, num_new_tokens=6, prefill_s=1.0, draft_s=1.0, verify_s=2.0, total_s=5.0)
    assert (one.num_passes, one.num_accepted_tokens) == (3, 5)
    assert one.mean_accepted_length == pytest.approx(5 / 3)
    assert one.host_s == 1.0
    assert sum(one.shares.values()) == pytest.approx(1.0)
    other = GenerationStats({3: 4}, num_new_tokens=13, total_s=5.0, missed_ids={7: 2, 5: 1})
    third = GenerationStats(num_new_tokens=6, missed_ids={5: 1, 9: 3})
    missed = GenerationStats.sum(iter([other, third]))
    assert list(missed.missed_ids.items()) == [(9, 3), (5, 2), (7, 2)]
    assert (missed.num_missed, missed.missed_rate, one.missed_rate) == (7, 7 / 19, 0.0)
    assert missed.to_json()["missed_ids"] == {"9": 3, "5": 2, "7": 2}
    both = GenerationStats.sum([one, other])
    assert both.accepted_lengths == {1: 2, 3: 5}
    assert both.tokens_per_s == pytest.approx(1.9)
    assert GenerationStats().mean_accepted_length == 0.0


def test_phases_are_timed_apart() -> None:
    import time

    timer = PhaseTimer(torch.device("cpu"))
    with timer.phase("draft"):
        time.sleep(0.02)
    with timer.phase("verify"):
        time.sleep(0.01)
    seconds = timer.stop_and_wait()
    assert seconds["draft_s"] >= 0.02
    assert 0.01 <= seconds["verify_s"] <= seconds["total_s"] - seconds["draft_s"]
    assert seconds["prefill_s"] == 0.0
