"""Steps as a GPU runs them, with the twins on the CPU: all tokens chosen by one operation, records read a step late."""

from unittest import mock

import pytest
import torch
from eagle_slim.runtime import LogitsError, SpeculativeModel, TreeConfig, open_target
from eagle_slim.runtime.step.decoders import KeptRows, capacity_for, match_slots
from eagle_slim.runtime.step.plan import CallRules
from support.sweeps import sweep
from support.tiny_models import VOCAB, random_prompts, tiny_target, write_head

pytestmark = pytest.mark.filterwarnings("ignore::eagle_slim.runtime.errors.AcceptanceWarning")
TREE = {"tree": TreeConfig(3, 3, 15)}
OPTIONS = [
    {},
    {"temperature": 0.8, "seed": 3},
    {"temperature": 1.3, "top_k": 5, "top_p": 0.9, "min_p": 0.02, "seed": 4},
    {"repetition_penalty": 1.3},
    {"min_new_tokens": 9, "suppress_tokens": [5, 6, 7]},
    {"bad_words_ids": [[5], [6], [2], [18]], "suppress_tokens": [7], "eos_token_id": [2, 18]},
    {"temperature": 1.0, "repetition_penalty": 0.8, "min_new_tokens": 4, "seed": 5},
]


@pytest.fixture
def by_twins(monkeypatch):
    """Choose tokens as on a GPU, where the rules of the call allow it."""
    of = CallRules.of
    monkeypatch.setattr(CallRules, "of", lambda *arguments: of(*arguments[:-1], torch.device("cuda")))


@pytest.mark.parametrize("options", sweep(OPTIONS, OPTIONS[0], OPTIONS[2], OPTIONS[4]))
def test_host_and_device_choose_alike(tmp_path, options, request):
    """One rule: node by node on the host, all nodes on the device."""
    model = SpeculativeModel.from_pretrained(tiny_target("qwen3"), write_head(tmp_path), **TREE)
    prompts = random_prompts([5, 12, 3])
    host = model.generate(prompts, max_new_tokens=16, **options)
    assert len(host.stats.steps) == sum(host.stats.active_sequences.values())
    request.getfixturevalue("by_twins")
    drafted = model.generate(prompts, max_new_tokens=16, **options)
    assert len(drafted.stats.steps) > sum(drafted.stats.active_sequences.values())
    assert drafted.token_ids == host.token_ids
    assert drafted.stats.accepted_lengths == host.stats.accepted_lengths
    assert drafted.token_ids == model.generate(prompts, max_new_tokens=16, speculative=False, **options).token_ids


@pytest.mark.usefixtures("by_twins")
def test_more_ends_than_the_device_has_places_for(tmp_path):
    target = tiny_target("llama")
    model = SpeculativeModel.from_pretrained(target, write_head(tmp_path), **TREE)
    prompt = random_prompts([9])[0]
    answer = model.generate(prompt, max_new_tokens=20, ignore_eos=True).token_ids[0]
    ends = sorted({*range(24)} - set(answer[:5]))
    output = model.generate(prompt, max_new_tokens=20, eos_token_id=ends)
    first = next(place for place, token in enumerate(answer) if token in ends)
    assert len(ends) > 8
    assert output.token_ids == [answer[: first + 1]]
    assert output.results[0].finish_reason == "eos"


@pytest.mark.parametrize("chooser", ["host", "device"])
def test_logits_that_are_no_distribution_are_told(tmp_path, request, chooser):
    if chooser == "device":
        request.getfixturevalue("by_twins")
    model, prompts = SpeculativeModel.from_pretrained(tiny_target("llama"), write_head(tmp_path), **TREE), [[4, 5], [6]]
    sampled = {"temperature": 1.0, "seed": 1}
    for options in ({}, sampled):
        with pytest.raises(LogitsError, match="New token 0 of prompt 0 cannot be chosen: every token is barred"):
            model.generate(prompts, suppress_tokens=list(range(VOCAB)), **options)
    with torch.no_grad():
        model.target.model.lm_head.weight[3, 0] = float("nan")
    for options in ({}, sampled, {**sampled, "top_k": 3, "top_p": 0.9}, {"speculative": False}):
        with pytest.raises(LogitsError, match="New token 0 of prompt 0 cannot be chosen: its logits hold a NaN"):
            model.generate(prompts, **options)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_token_that_cannot_be_chosen_is_told_by_its_place_in_the_answer(tmp_path, value):
    """Drafts beyond an answer's end may be anything."""
    prompts = random_prompts([1, 9])

    def spoil(input_ids, scores):
        return scores if input_ids.shape[1] != len(prompts[1]) + 6 else torch.full_like(scores, value)

    model = SpeculativeModel.from_pretrained(tiny_target("llama"), write_head(tmp_path), **TREE)
    options = {"logits_processor": [spoil], "ignore_eos": True}
    for speculative in (True, False):
        with pytest.raises(LogitsError, match="New token 6 of prompt 1 cannot be chosen"):
            model.generate(prompts, max_new_tokens=8, speculative=speculative, **options)
    assert len(model.generate(prompts[1], max_new_tokens=6, **options).token_ids[0]) == 6


@pytest.mark.parametrize("mode", ["exact", "lossy"])
def test_no_distribution_is_told_where_steps_run_ahead(tmp_path, mode, run_ahead):
    """A token whose embedding is no number comes late in the answer, and steps run ahead over it."""
    target = tiny_target("llama", max_position_embeddings=1024)
    model = SpeculativeModel.from_pretrained(target, write_head(tmp_path, max_position_embeddings=1024), **TREE)
    run_ahead(num_steps=2, num_tokens=7)
    prompt, options = random_prompts([12]), {"max_new_tokens": 14, "partial_verification": mode, "ignore_eos": True}
    answer = model.generate(prompt, **options)
    assert answer.stats.num_partial_passes > 0
    late = next(token for token in answer.token_ids[0][6:] if token not in {*prompt[0], *answer.token_ids[0][:2]})
    with torch.no_grad():
        target.model.embed_tokens.weight[late] = float("nan")
    with pytest.raises(LogitsError, match="its logits hold a NaN"):
        model.generate(prompt, **options)


@pytest.mark.parametrize("backend", sweep(["fused", "transformers"], "fused"))
@pytest.mark.parametrize("is_drafted", [True, False])
def test_a_chat_keeps_its_prefix(tmp_path, is_drafted, backend):
    """Turns that go on, an edited history, another conversation, and plain turns between: tokens of a fresh run."""
    target, head = tiny_target("llama"), write_head(tmp_path)
    model = SpeculativeModel.from_pretrained(open_target(target, target_backend=backend), head, **TREE)
    fresh = SpeculativeModel.from_pretrained(open_target(target, target_backend=backend), head, **TREE)
    options = {"max_new_tokens": 12, "ignore_eos": True, "speculative": is_drafted}
    prompt = random_prompts([70])[0]
    first = model.generate(prompt, reuse_prefix=True, **options)
    assert first.stats.num_reused_tokens == 0
    whole = prompt + first.token_ids[0]
    turns = {
        "next": [*whole, 5, 6, 7],
        "the same once more": [*whole, 5, 6, 7],
        "edited": [*prompt[:40], 9 if prompt[40] != 9 else 8, *prompt[41:], 4],
        "shorter": prompt[:30],
        "unrelated": random_prompts([20], seed=3)[0],
    }
    reused = {}
    for name, turn in turns.items():
        output = model.generate(turn, reuse_prefix=True, **options)
        expected = fresh.generate(turn, **options)
        assert output.token_ids == expected.token_ids, name
        assert output.stats.accepted_lengths == expected.stats.accepted_lengths, name
        assert output.results[0].stats.num_reused_tokens == output.stats.num_reused_tokens
        reused[name] = output.stats.num_reused_tokens
    # The newest token has no row, with a drafter neither have its last step's tokens; the last that has is run again.
    assert len(whole) - 2 - (4 if is_drafted else 0) <= reused["next"] <= len(whole) - 2
    assert reused["the same once more"] >= len(turns["next"]) - 2
    assert reused["edited"] == 39
    assert reused["shorter"] == 29
    assert reused["unrelated"] <= 1
    assert model.generate(turns["next"], **options).stats.num_reused_tokens == 0


@pytest.mark.parametrize("backend", ["fused", "transformers"])
def test_each_prompt_goes_to_the_slot_that_holds_most_of_it(tmp_path, backend):
    target, head = tiny_target("qwen2"), write_head(tmp_path)
    small = {"tree": TreeConfig(2, 2, 5)}
    model = SpeculativeModel.from_pretrained(open_target(target, target_backend=backend), head, **small)
    prompts = random_prompts([12, 20, 9])
    options = {"max_new_tokens": 6, "ignore_eos": True}
    first = model.generate(prompts, reuse_prefix=True, **options)
    turns = [[*prompt, *answer, 5, 6] for prompt, answer in zip(prompts, first.token_ids, strict=True)][::-1]
    output = model.generate(turns, reuse_prefix=True, **options)
    assert all(result.stats.num_reused_tokens >= len(result.prompt_ids) - 8 for result in output.results)
    fresh = SpeculativeModel.from_pretrained(open_target(target, target_backend=backend), head, **small)
    assert output.token_ids == fresh.generate(turns, **options).token_ids
    plain = model.generate(turns, reuse_prefix=True, speculative=False, **options)
    assert plain.token_ids == output.token_ids
    # A plain call leaves the drafter's cache where it was: no pair of it may be missing later.
    longer = [[*turn, *answer, 7] for turn, answer in zip(turns, plain.token_ids, strict=True)]
    assert model.generate(longer, reuse_prefix=True, **options).token_ids == fresh.generate(longer, **options).token_ids


def test_what_slots_hold():
    """The example of `decoders`: rows for a to f, and the pairs before the last step, which began after a b c d."""
    kept = KeptRows(tuple("abcdefg"), num_pairs=3)
    assert kept.num_shared("abcdefX", is_drafted=False) == 5
    assert kept.num_shared("abcdefgX", is_drafted=False) == 5  # g has no row
    assert kept.num_shared("abcdefX", is_drafted=True) == 3
    assert KeptRows(tuple("abcdefg"), num_pairs=6).num_shared("abcdefX", is_drafted=True) == 5
    assert kept.num_shared("abc", is_drafted=False) == 2
    assert kept.num_shared("Xbc", is_drafted=True) == KeptRows().num_shared("abc", is_drafted=False) == 0
    assert KeptRows(("a",)).num_shared("ab", is_drafted=False) == 0
    # Pair t holds token t + 1.
    assert KeptRows(tuple("abcdefg"), 6).cut("abcX", 2) == KeptRows(tuple("abc"), 2)
    assert kept.cut("Xb", 0) == KeptRows(("X",), 0)
    assert match_slots(["Xy", "abcd"], [kept, KeptRows()], [0, 1], is_drafted=False) == [(1, 0), (0, 3)]
    # Two chats with one system message beside each other: each has a slot, and goes on there.
    chats = KeptRows(tuple("sys, how are you? fine")), KeptRows()
    assert match_slots(["sys, who?"], chats, [0, 1], is_drafted=False) == [(1, 0)]
    assert match_slots(["sys, how are you? fine!"], chats, [0, 1], is_drafted=False) == [(0, 20)]
    assert match_slots(["sys, how are you?"], chats, [0, 1], is_drafted=False) == [(0, 16)]  # once more
    assert match_slots(["sys, who?"], chats[:1], [0], is_drafted=False) == [(0, 4)]
    # Where none is empty, the one that gives most.
    both = KeptRows(tuple("sys, " + 20 * "x")), KeptRows(tuple("sy, a"))
    assert match_slots(["sys, " + 20 * "y"], both, [0, 1], is_drafted=False) == [(0, 4)]


@pytest.mark.parametrize("backend", ["fused", "transformers"])
def test_a_failed_call_leaves_nothing_to_reuse(tmp_path, backend):
    target = open_target(tiny_target("llama"), target_backend=backend)
    model = SpeculativeModel.from_pretrained(target, write_head(tmp_path), tree=TreeConfig(2, 2, 5))
    prompt = random_prompts([9])[0]
    wanted = model.generate(prompt, max_new_tokens=8, ignore_eos=True).token_ids

    streamer = mock.Mock()
    streamer.put.side_effect = [None, None, None, KeyboardInterrupt]  # the prompt, its first token, one step, the next
    with pytest.raises(KeyboardInterrupt):
        model.generate(prompt, max_new_tokens=8, ignore_eos=True, streamer=streamer, reuse_prefix=True)
    again = model.generate(prompt, max_new_tokens=8, ignore_eos=True, reuse_prefix=True)
    assert again.stats.num_reused_tokens == 0
    assert again.token_ids == wanted
    assert model.generate(prompt, max_new_tokens=0, reuse_prefix=True).token_ids == [[]]
    assert model.generate(prompt, max_new_tokens=8, reuse_prefix=True).stats.num_reused_tokens > 0


def test_models_that_share_a_drafter_take_over_no_pairs_of_each_other(tmp_path):
    options = {"tree": TreeConfig(2, 2, 5)}
    target, head = tiny_target("llama"), write_head(tmp_path)
    one = SpeculativeModel.from_pretrained(target, head, **options)
    other = SpeculativeModel(one.target, one.drafter)
    fresh = SpeculativeModel.from_pretrained(target, head, **options)
    prompts, generate = random_prompts([9, 20, 14]), {"max_new_tokens": 8, "ignore_eos": True}
    one.generate(prompts, reuse_prefix=True, **generate)
    other.generate(prompts[1], reuse_prefix=True, **generate)
    output, expected = one.generate(prompts, reuse_prefix=True, **generate), fresh.generate(prompts, **generate)
    assert output.token_ids == expected.token_ids
    assert output.stats.accepted_lengths == expected.stats.accepted_lengths


def test_the_cache_grows_in_powers_of_two_up_to_the_longest_contexts():
    assert [capacity_for(rows) for rows in (1, 1024, 1025, 70_000, 131_072)] == [1024, 1024, 2048, 131_072, 131_072]
    assert capacity_for(131_072 + 61) == 131_133
