"""Ends of generation, and prompts that cannot begin: each case has one defined result."""

import itertools
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from eagle_slim.runtime import AcceptanceWarning, PromptError, SpeculativeModel, TreeConfig, UsageError
from eagle_slim.runtime.api.request import Request
from support.raising import raises, raises_with
from support.tiny_models import plain_greedy, random_prompts, tiny_target, write_head
from tokenizers.decoders import ByteFallback

ignore_acceptance = pytest.mark.filterwarnings("ignore::eagle_slim.runtime.errors.AcceptanceWarning")
TREE = {"tree": TreeConfig(3, 4, 25)}
PROMPT = random_prompts([7])[0]


def build(tmp_path: Path, **options: Any) -> SpeculativeModel:
    return SpeculativeModel.from_pretrained(tiny_target("llama"), write_head(tmp_path / "head"), **TREE, **options)


def test_a_warm_up_reaches_no_further_than_the_context(tmp_path: Path) -> None:
    model = build(tmp_path, max_model_len=20)
    assert model.warmup().cache_bytes == model.warmup(max_length=20).cache_bytes > 0


def test_no_new_tokens(tmp_path: Path) -> None:
    output = build(tmp_path).generate(PROMPT, max_new_tokens=0)
    assert (output.token_ids, output.results[0].finish_reason, output.stats.num_passes) == ([[]], "length", 0)
    assert output.sequences.tolist() == [PROMPT]


@ignore_acceptance
def test_more_new_tokens_than_the_context_or_the_memory_holds(tmp_path: Path) -> None:
    model = build(tmp_path, max_model_len=20)
    output = model.generate(PROMPT, max_new_tokens=10**12, temperature=1.0, seed=4, ignore_eos=True)
    assert (len(output.token_ids[0]), output.results[0].finish_reason) == (13, "context")
    room = model.generate(PROMPT, max_new_tokens=13, temperature=1.0, seed=4, ignore_eos=True)
    assert output.token_ids == room.token_ids


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([], ["No prompt"]),
        ([[3, 4], []], ["Prompt 1 is empty"]),
        ([3, 99], ["Prompt 0", "id 99"]),
        ([3] * 290, ["290", "256"]),
        ([3] * 256, ["256"]),
    ],
    ids=["nothing", "empty", "id", "longer", "full"],
)
def test_prompts_that_cannot_begin(tmp_path: Path, prompt: Any, words: list[str]) -> None:
    with raises_with(PromptError, *words):
        build(tmp_path).generate(prompt, max_new_tokens=4, temperature=1.0, num_return_sequences=2)


@ignore_acceptance
@pytest.mark.parametrize("room", [1, 2, 5, 11])
def test_context_full_in_the_middle_of_a_tree(tmp_path: Path, room: int) -> None:
    model = build(tmp_path, max_model_len=len(PROMPT) + room)
    output = model.generate(PROMPT, max_new_tokens=50, ignore_eos=True)
    assert output.results[0].finish_reason == "context"
    assert output.token_ids == [plain_greedy(model.target.model, PROMPT, room, eos=None)]


@ignore_acceptance
def test_longrope_up_to_the_length_where_it_changes(tmp_path: Path) -> None:
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    target = tiny_target("llama", rope_parameters={**rope, "original_max_position_embeddings": 30})
    model = SpeculativeModel.from_pretrained(target, write_head(tmp_path / "head"), **TREE)
    assert model.max_model_len == 30
    prompts = random_prompts([4, 22])  # beside a short one, whose forwards it shares
    output = model.generate(prompts, max_new_tokens=20, ignore_eos=True)
    assert output.token_ids == [plain_greedy(target, prompt, min(20, 30 - len(prompt)), eos=None) for prompt in prompts]
    assert [result.finish_reason for result in output.results] == ["length", "context"]


def test_eos_inside_an_accepted_path_cuts_the_rest(tmp_path: Path) -> None:
    model = build(tmp_path)
    tokens = model.generate(PROMPT, max_new_tokens=24, ignore_eos=True)
    free = tokens.token_ids[0]
    # Every token in turn as the end: some fall inside an accepted path, wherever paths begin and end.
    inside = 0
    for eos in dict.fromkeys(free):
        expected = free[: free.index(eos) + 1]
        output = model.generate(PROMPT, max_new_tokens=24, eos_token_id=eos)
        assert output.token_ids == [expected]
        assert output.results[0].finish_reason == "eos"
        # The first token is the prefill's, the rest come from passes; what they accepted beyond the end is apart.
        assert output.stats.num_accepted_tokens == len(expected) - 1
        inside += output.stats.num_cut_tokens > 0
    assert inside > 0


def test_max_new_tokens_cuts_an_accepted_path(tmp_path: Path) -> None:
    model = build(tmp_path)
    free = model.generate(PROMPT, max_new_tokens=12, ignore_eos=True).token_ids[0]
    cut = [model.generate(PROMPT, max_new_tokens=n, ignore_eos=True) for n in range(1, 12)]
    assert [output.token_ids[0] for output in cut] == [free[:n] for n in range(1, 12)]
    assert cut[0].stats.num_passes == 0  # one token comes from the prompt's forward
    assert cut[0].token_ids == [plain_greedy(model.target.model, PROMPT, 1)]
    assert [output.stats.num_accepted_tokens for output in cut] == list(range(11))
    assert any(output.stats.num_cut_tokens for output in cut)
    # A pass of an answer of two tokens adds one, whatever was accepted: no reason to warn that nothing is.
    short = model.generate(random_prompts([3, 5, 8, 13] * 8), max_new_tokens=2, ignore_eos=True).stats
    assert (short.num_passes, short.mean_accepted_length) == (32, 1.0)
    assert short.num_cut_tokens >= 2


def test_stop_strings_within_and_across_tokens_of_several_letters() -> None:
    words = {0: "Hel", 1: "lo. ", 2: "Us", 3: "er: x", 4: "é"[:0]}
    state = Request(0, (1,), 10, stop=("User:",), decode=lambda ids: "".join(words[i] for i in ids))
    state.emit([0, 1, 4, 2, 4, 3, 0])
    assert state.token_ids == [0, 1, 4, 2, 4, 3]
    assert state.output().text == "Hello. "
    assert state.finish_reason == "stop"


def test_a_stop_string_among_tokens_of_single_bytes() -> None:
    """Of a run of such tokens that begins inside a letter the tokenizer decodes nothing."""
    decode = ByteFallback().decode
    state = Request(0, (1,), 99, stop=("終",), decode=lambda ids: decode([f"<0x{each:02X}>" for each in ids]))
    state.emit("世界世界世界終わり".encode())
    assert state.output().text == "世界世界世界"


def test_streamer_is_called_with_the_prompt_then_every_token_once(tmp_path: Path) -> None:
    streamer = mock.Mock()
    output = build(tmp_path).generate(PROMPT, max_new_tokens=20, ignore_eos=True, streamer=streamer)
    heard = [call.args[0].flatten().tolist() for call in streamer.put.call_args_list]
    assert heard[0] == PROMPT
    assert list(itertools.chain(*heard[1:])) == output.token_ids[0]
    assert len(heard) == 2 + output.stats.num_passes
    assert streamer.end.call_count == 1


def test_a_context_without_room_and_text_without_a_tokenizer(tmp_path: Path) -> None:
    with raises(UsageError, option="max_model_len"):
        build(tmp_path, max_model_len=0)
    with raises(UsageError, option="tokenizer"):
        build(tmp_path).generate("hello")


def test_hardly_any_acceptance_is_warned_about(tmp_path: Path) -> None:
    # The target chooses neither at any pass.
    head = write_head(tmp_path / "head", draft_ids=[4, 8])
    model = SpeculativeModel.from_pretrained(tiny_target("llama"), head, tree=TreeConfig(1, 1, 3))
    with pytest.warns(AcceptanceWarning, match="tap layers"):
        output = model.generate(random_prompts([5, 6, 7]), max_new_tokens=40, ignore_eos=True)
    assert output.stats.mean_accepted_length < 1.05
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.generate(random_prompts([5, 6, 7]), max_new_tokens=40, ignore_eos=True)
        # Short answers, one after another, tell it as well.
        other = model.with_tree(TreeConfig(1, 1, 3))
        for prompt in random_prompts([5, 6]):
            other.generate(prompt, max_new_tokens=16, ignore_eos=True)
    with pytest.warns(AcceptanceWarning, match="of 4. drafts"):
        other.generate(random_prompts([7]), max_new_tokens=16, ignore_eos=True)
