"""Calls as users of transformers and vLLM write them, beside transformers itself."""

import copy
import logging
import pickle
from functools import partial

import numpy as np
import pytest
import torch
import transformers
from eagle_slim.runtime import SpeculativeModel, TreeConfig, UsageError
from support.raising import raises
from support.tiny_models import random_prompts, tiny_target, write_head, write_pair
from transformers import StoppingCriteria, StoppingCriteriaList
from transformers.utils import ModelOutput

pytestmark = pytest.mark.filterwarnings("ignore::eagle_slim.runtime.errors.AcceptanceWarning")
TREE = {"tree": TreeConfig(3, 4, 16)}
PROMPTS = random_prompts([3, 9, 6])
WIDTH = 9
LEFT = torch.tensor([[0] * (WIDTH - len(prompt)) + prompt for prompt in PROMPTS])
MASK = (LEFT != 0).long()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return SpeculativeModel.from_pretrained(tiny_target("llama"), write_head(tmp_path_factory.mktemp("head")), **TREE)


@pytest.fixture(scope="module")
def chatty(tmp_path_factory):
    target, head = write_pair(tmp_path_factory.mktemp("pair"))
    return SpeculativeModel.from_pretrained(target, head, **TREE)


def theirs(model, ids=LEFT, **options):
    options = {"attention_mask": torch.ones_like(ids) if ids is not LEFT else MASK, "do_sample": False, **options}
    return model.target.model.generate(ids, **options)


def test_a_left_padded_batch_is_returned_as_it_is(model):
    expected = theirs(model, max_new_tokens=12)
    output = model.generate(LEFT, attention_mask=MASK, max_new_tokens=12)
    assert torch.equal(output.sequences, expected)
    assert torch.equal(model.generate(LEFT, max_new_tokens=12).sequences, expected)  # the padding id alone marks it
    assert [row.tolist() for row in output] == pickle.loads(pickle.dumps(output)).tolist() == expected.tolist()
    assert (len(output), output.shape) == (3, expected.shape)
    assert output[:, WIDTH:].tolist() == expected[:, WIDTH:].tolist() == output.token_ids
    assert torch.equal(output[-1], expected[-1])
    for same in (output.cpu(), output.to("cpu"), output.reshape(*output.shape)):
        assert torch.equal(same, expected)
    assert copy.deepcopy(output).tolist() == expected.tolist()
    # An id that also ends a text is no padding, where a mask says so.
    whole = model.generate(LEFT, attention_mask=torch.ones_like(LEFT), eos_token_id=0, max_new_tokens=0)
    assert [result.prompt_ids for result in whole.results] == LEFT.tolist()
    # The length of a padded batch counts its padding.
    ends = {"eos_token_id": [18, 2], "max_length": 16}
    assert torch.equal(model.generate(LEFT, attention_mask=MASK, **ends).sequences, theirs(model, **ends))
    # Lists of other lengths have answers in the same columns.
    assert torch.equal(model.generate(PROMPTS, max_new_tokens=12).sequences, expected)


def test_the_output_is_a_model_output(model):
    options = {"max_new_tokens": 5, "return_dict_in_generate": True}
    output, expected = (make(LEFT, attention_mask=MASK, **options) for make in (model.generate, partial(theirs, model)))
    assert isinstance(output, ModelOutput)
    assert list(output.keys()) == list(dict(output)) == list({**copy.deepcopy(output)}) == ["sequences"]
    assert output.get("sequences") is output["sequences"] is output.to_tuple()[0]
    assert ("sequences" in output, "scores" in output, len(output)) == (True, False, 1)
    with pytest.raises(KeyError):
        output["score"]
    assert torch.equal(output["sequences"], expected["sequences"])


def test_seeds(model):
    def draw(**options):
        return model.generate(LEFT, attention_mask=MASK, max_new_tokens=12, do_sample=True, **options)

    transformers.set_seed(7)
    first, second = draw(), draw()
    assert first.seed != second.seed
    assert first.token_ids != second.token_ids
    torch.manual_seed(7)
    again = draw()
    assert (again.seed, again.token_ids) == (first.seed, first.token_ids)
    assert draw(seed=first.seed).token_ids == first.token_ids == draw(seed=first.seed, speculative=False).token_ids
    state = torch.get_rng_state()
    assert model.generate(LEFT, max_new_tokens=3).seed is None
    assert repr(draw(seed=np.int64(3)).seed) == "3"
    assert torch.equal(torch.get_rng_state(), state)  # nothing is drawn where nothing has to be


@pytest.mark.parametrize("is_drafted", [True, False])
def test_a_seed_for_each_prompt(model, is_drafted):
    options = {"max_new_tokens": 14, "temperature": 1.2, "top_p": 0.95, "speculative": is_drafted, "ignore_eos": True}
    seeds = [11, 2**62, 11]
    whole = model.generate(PROMPTS, seed=seeds, **options)
    assert whole.seed == tuple(seeds)
    alone = model.generate(PROMPTS[1], seed=seeds[1], **options)
    assert alone.token_ids == [whole.token_ids[1]]
    other = model.generate(PROMPTS[::-1], seed=torch.tensor(seeds[::-1]), max_slots=2, **options)
    assert other.token_ids == whole.token_ids[::-1]
    twice = model.generate(PROMPTS, seed=seeds, num_return_sequences=2, **options).token_ids
    assert twice[::2] == whole.token_ids
    assert twice[2] != twice[3]
    assert whole.token_ids == model.generate(PROMPTS, seed=seeds, **{**options, "speculative": True}).token_ids
    same = model.generate([PROMPTS[0]] * 2, seed=[5, 5], **options).token_ids
    assert same[0] == same[1]
    with raises(UsageError, option="seed"):
        model.generate(PROMPTS, seed=seeds[:2], **options)


class AtToken(StoppingCriteria):
    """Ends a row at a token, as criteria are written for transformers."""

    def __init__(self, token):
        self.token = token

    def __call__(self, input_ids, scores, **_):
        return input_ids[:, -1] == self.token


def test_stopping_criteria(model):
    for token in (18, 7, 11):
        criteria = StoppingCriteriaList([AtToken(token)])
        expected = theirs(model, max_new_tokens=30, stopping_criteria=criteria)
        output = model.generate(LEFT, attention_mask=MASK, max_new_tokens=30, stopping_criteria=criteria)
        assert torch.equal(output.sequences, expected)
        reasons = {result.finish_reason for result in output.results if result.token_ids[-1] == token}
        assert reasons <= {"criteria"}
    (result,) = model.generate(PROMPTS[0], max_new_tokens=30, stopping_criteria=lambda ids, scores: True).results
    assert (len(result.token_ids), result.finish_reason) == (1, "criteria")


def test_stop_strings_with_a_tokenizer(chatty):
    tokenizer = chatty.tokenizer
    ids = tokenizer("hello", return_tensors="pt").input_ids
    bare = SpeculativeModel(chatty.target, chatty.drafter)
    free = bare.generate(ids, max_new_tokens=24, ignore_eos=True, tokenizer=tokenizer)
    stop = free.text[0][6:9]
    options = {"max_new_tokens": 24, "stop_strings": [stop], "tokenizer": tokenizer}
    options["eos_token_id"] = 9999
    assert torch.equal(bare.generate(ids, **options).sequences, theirs(chatty, ids, **options))
    with raises(UsageError, option="stop"):
        bare.generate(ids, stop_strings=[stop])


def test_max_time(model):
    expected = theirs(model, max_new_tokens=5)
    assert torch.equal(model.generate(input_ids=LEFT, max_new_tokens=5, max_time=100.0).sequences, expected)
    result = model.generate(PROMPTS[0], max_new_tokens=200, ignore_eos=True, max_time=1e-6).results[0]
    assert result.finish_reason == "time"
    assert 1 <= len(result.token_ids) < 200


def test_another_default_device(chatty, monkeypatch):
    options = [{}, {"temperature": 1.0, "seed": 1, "top_p": 0.9}, {"suppress_tokens": [3], "stop": ["e"]}]
    wanted = [chatty.generate(PROMPTS, max_new_tokens=6, **each).tolist() for each in options]
    with torch.device("meta"):  # as set_default_device("cuda"), beside a model on the CPU
        opened = chatty.opened
        built = SpeculativeModel.from_pretrained(chatty.target.model, opened, tokenizer=chatty.tokenizer, **TREE)
        built.warmup()
        for model in (chatty, built, built.with_draft_window(4), built.with_draft_vocab(None)):
            found = [model.generate(PROMPTS, max_new_tokens=6, **each).tolist() for each in options]
            assert found == wanted


def test_chats_by_vllms_names(chatty):
    hello, bye = ([{"role": "user", "content": text}] for text in ("hello", "good bye"))
    one = chatty.chat(hello, max_tokens=8)
    assert one.token_ids == chatty.generate(chatty.encode_chat(hello), max_new_tokens=8).token_ids
    again = chatty.chat(hello, max_tokens=8)
    assert again.token_ids == one.token_ids
    assert again.stats.num_reused_tokens > 0
    assert chatty.chat(hello, max_tokens=8, reuse_prefix=False).stats.num_reused_tokens == 0
    both = chatty.chat([hello, bye], max_tokens=8, temperature=0)
    assert both.token_ids == [*one.token_ids, *chatty.chat(bye, max_tokens=8).token_ids]
    several = chatty.chat("hello", n=2, max_tokens=6, temperature=1.0, seed=5)
    own = {"num_return_sequences": 2, "max_new_tokens": 6, "temperature": 1.0, "seed": 5}
    assert several.token_ids == chatty.generate(chatty.encode_chat("hello"), **own).token_ids


def test_a_pipeline_of_transformers(chatty, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    options = {"max_new_tokens": 9, "do_sample": False}
    texts, answers = ["a b", "c"], []
    told = {"framework": "pt"} if transformers.__version__.startswith("4.") else {}
    for model in (chatty, chatty.target.model):
        pipe = transformers.pipeline("text-generation", model=model, tokenizer=chatty.tokenizer, **told)
        if model is chatty:
            assert told or "SpeculativeModel" in repr(pipe)
        answers.append([pipe(texts, **options), pipe(texts[0], return_full_text=False, **options)])
    assert answers[0] == answers[1]
    assert "LlamaForCausalLM in float32 on cpu" in repr(chatty)
    assert "not supported" not in caplog.text


def test_a_mistyped_option_is_told_what_was_meant(model):
    for name, meant in (("max_new_token", "max_new_tokens"), ("temprature", "temperature"), ("inputs", "input_ids")):
        with raises(UsageError, option=name) as caught:
            model.generate([3, 4], **{name: 1})
        assert f"Did you mean {meant}?" in str(caught.value)
    with raises(UsageError, option="qqq") as caught:
        model.generate([3, 4], qqq=1)
    assert "Did you mean" not in str(caught.value)
