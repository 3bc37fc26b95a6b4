"""Arguments as transformers takes them: the same tokens as its own generate, or a refusal by name."""

import itertools
import warnings
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from eagle_slim.runtime import SpeculativeModel, TreeConfig
from eagle_slim.runtime.errors import PromptError, SamplingWarning, UsageError
from support.raising import raises
from support.small_tokenizers import byte_level_bpe, write_folder
from support.sweeps import sweep
from support.tiny_models import random_prompts, tiny_target, write_head, write_pair
from transformers import (
    BatchEncoding,
    GenerationConfig,
    MaxLengthCriteria,
    PreTrainedTokenizerFast,
    TextStreamer,
    WatermarkingConfig,
)

pytestmark = pytest.mark.filterwarnings("ignore::eagle_slim.runtime.errors.AcceptanceWarning")
PROMPTS = random_prompts([1, 4, 9])
ENDS = {"eos_token_id": [18, 7]}
HI = {"role": "user", "content": "Hi"}
PENALTIES = {
    "repetition": {"repetition_penalty": 1.3},
    "n-grams": {"no_repeat_ngram_size": 2},
    "bad words": {"bad_words_ids": [[18], [7, 9]]},
    "at least, new": {"min_new_tokens": 12, **ENDS},
    "suppressed": {"suppress_tokens": [18, 7]},
    "several": {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "min_new_tokens": 5, "bad_words_ids": [[11]]},
}


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    head = write_head(tmp_path_factory.mktemp("head"))
    return SpeculativeModel.from_pretrained(tiny_target("llama"), head, tree=TreeConfig(3, 4, 16))


@pytest.fixture
def model(shared, monkeypatch):
    config, target = GenerationConfig(eos_token_id=2, pad_token_id=0), shared.target
    monkeypatch.setattr(target.model, "generation_config", config)
    monkeypatch.setattr(target.text_config, "pad_token_id", target.text_config.pad_token_id)
    monkeypatch.setattr(shared, "tokenizer", None)
    return shared


def own_generate(model, prompts=PROMPTS, **options):
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        output = model.target.model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **options)
        answers.append(output[0, len(prompt) :].tolist())
    return answers


@pytest.fixture(scope="module")
def unpenalised(shared):
    return own_generate(shared, max_new_tokens=20, eos_token_id=2, pad_token_id=0)


@pytest.mark.parametrize("penalty", sweep(PENALTIES, "repetition", "several"))
def test_penalties_equal_the_targets_own(model, unpenalised, penalty):
    """Drafted with keywords, plainly with a configuration."""
    options = {"max_new_tokens": 20, **PENALTIES[penalty]}
    expected = own_generate(model, **options)
    drafted = model.generate(PROMPTS, **options)
    assert drafted.token_ids == expected
    assert max(drafted.stats.accepted_lengths) > 1
    plain = model.generate(PROMPTS, generation_config=GenerationConfig(**options), speculative=False)
    assert plain.token_ids == expected
    assert expected != unpenalised


def test_the_targets_generation_configuration_is_followed(model):
    target = model.target.model
    plain = model.generate(PROMPTS, max_new_tokens=20).token_ids
    target.generation_config = GenerationConfig(repetition_penalty=1.5, temperature=0.6, do_sample=True, eos_token_id=2)
    output = model.generate(PROMPTS, max_new_tokens=20)
    assert output.token_ids == own_generate(model, max_new_tokens=20) != plain
    assert model.generate(PROMPTS, max_new_tokens=20, repetition_penalty=1.0).token_ids == plain


def test_functions_that_return_no_scores_or_no_verdict_are_named(model):
    for processor in (lambda _, scores: None, lambda _, scores: scores[0], lambda _, scores: scores > 0):
        with raises(UsageError, option="processor function"):
            model.generate(PROMPTS, max_new_tokens=4, logits_processor=[processor])
    for verdict in ({}, [], None):
        with raises(UsageError, option="stopping criterion"):
            model.generate([3, 4], stopping_criteria=lambda ids, scores, verdict=verdict: verdict)


def test_a_tree_that_is_none_or_too_deep_is_refused(model):
    wrong = "5,10,60"
    with raises(UsageError, option="tree"):
        model.with_tree(wrong)
    with raises(UsageError, option="depth"):
        model.with_tree(TreeConfig(32, 4, 60)).generate(PROMPTS[0], max_new_tokens=2)


@pytest.mark.filterwarnings("ignore:.*length:UserWarning")
@pytest.mark.parametrize("place", sweep(["keywords", "configuration", "both"], "keywords"))
def test_lengths_mean_what_transformers_means_in_every_combination(model, place):
    """With an end that comes at once if it may; of the target's own generate, beside the 256 tokens of ours."""
    lengths = {"max_new_tokens": (None, 3, 12), "max_length": (None, 14), "min_new_tokens": (None, 0, 6)}
    for values in itertools.product(*lengths.values()):
        options = {name: value for name, value in zip(lengths, values, strict=True) if value is not None}
        if not {"max_new_tokens", "max_length"} & set(options):
            continue
        expected = own_generate(model, PROMPTS[2:], eos_token_id=[18, 7], **options)
        names = list(options)
        by_config = names if place == "configuration" else names[::2] if place == "both" else []
        config = GenerationConfig(**{name: options[name] for name in by_config})
        keywords = {name: options[name] for name in names if name not in by_config}
        found = model.generate(PROMPTS[2:], generation_config=config, eos_token_id=[18, 7], **keywords)
        assert found.token_ids == expected, options


def test_a_keyword_of_none_switches_off_what_the_target_asks_for(model, monkeypatch):
    plain = own_generate(model, PROMPTS[2:], max_new_tokens=12, eos_token_id=None)
    first, second = plain[0][:2]
    asked = {"repetition_penalty": 1.8, "suppress_tokens": [first], "bad_words_ids": [[first, second]]}
    for name, value in {**asked, "no_repeat_ngram_size": 1, "eos_token_id": [second]}.items():
        monkeypatch.setattr(model.generation_config, name, value)
        ends = {"eos_token_id": None, "max_new_tokens": 12}
        assert model.generate(PROMPTS[2:], **{**ends, name: None}).token_ids == plain
        unset = GenerationConfig(**{name: None, "max_new_tokens": 12})
        more = {} if name == "eos_token_id" else {"eos_token_id": None}
        changed = own_generate(model, PROMPTS[2:], max_new_tokens=12, **more)
        assert model.generate(PROMPTS[2:], generation_config=unset, **more).token_ids == changed != plain
        monkeypatch.undo()


def test_a_configuration_that_asks_for_more_is_refused(model):
    asked = {"watermarking_config": WatermarkingConfig(), "token_healing": True, "stop_strings": ["a"]}
    asked |= {"forced_eos_token_id": 5, "encoder_repetition_penalty": 1.5, "encoder_no_repeat_ngram_size": 2}
    for name, value in asked.items():
        model.target.model.generation_config = GenerationConfig(**{name: value})
        with raises(UsageError, option=name.replace("_strings", "")):
            model.generate(PROMPTS, max_new_tokens=4)


def test_padding_ids(model):
    for generation, of_the_text, pad in (
        ({"pad_token_id": 21}, None, 21),
        ({}, 22, 22),
        ({"eos_token_id": [2, 5]}, None, 2),
        ({"eos_token_id": 2, "pad_token_id": 20}, 22, 20),
    ):
        model.target.model.generation_config = GenerationConfig(**generation)
        model.target.text_config.pad_token_id = of_the_text
        assert model.generate([[3], [4, 5]], max_new_tokens=0).sequences.tolist() == [[pad, 3], [4, 5]]


def test_an_id_that_may_be_padding_or_text_is_told_apart_by_a_mask(model):
    options: dict[str, Any] = {"pad_token_id": 2, "eos_token_id": 2, "max_new_tokens": 2}
    wanted = model.generate([[3, 4], [5, 6, 7]], **options).token_ids
    # It ends turns of the model's chats whatever ends this call.
    for end, rows in itertools.product((2, 9), ([[2, 3, 4], [5, 6, 7]], [[3, 4, 2, 2], [5, 6, 7, 8]], [[3, 4, 2, 2]])):
        with raises(
            UsageError, "pad_token_id 2 ends sequences and begins or ends some prompts. Give an attention_mask"
        ):
            model.generate(torch.tensor(rows), **options | {"eos_token_id": end})
    padded = torch.tensor([[2, 3, 4], [5, 6, 7]])
    assert model.generate(padded, attention_mask=padded != 2, **options).token_ids == wanted
    for rows in ([[3, 2, 4], [5, 6, 2]], [[3, 4, 2]], [[2, 3, 4]]):
        for own in (options, {**options, "eos_token_id": 9}):
            assert model.generate(torch.tensor(rows), **own).token_ids == model.generate(rows, **own).token_ids
    # An id that ends nothing pads; within a prompt it may be text.
    other = {**options, "pad_token_id": 8}
    assert model.generate(torch.tensor([[8, 3, 4], [5, 6, 7]]), **other).token_ids == wanted
    within = torch.tensor([[3, 8, 4], [8, 8, 7]])
    with raises(UsageError, "pad_token_id 8 also stands within a prompt. Give an attention_mask"):
        model.generate(within, **other)
    output = model.generate(within, attention_mask=torch.ones_like(within), **other)
    assert output.token_ids == model.generate(within.tolist(), **other).token_ids


SAME_VALUE = [
    (1, "foo max_length reuse_prefix attention_mask penalty_alpha"),
    (0, "max_slots max_time encoder_repetition_penalty"),
    (5, "num_return_sequences min_length"),
    (-1, "max_new_tokens seed"),
    (-1.0, "repetition_penalty temperature"),
    (3.5, "max_new_tokens max_slots min_p guidance_scale"),
    (3.0, "max_new_tokens"),
    (True, "no_repeat_ngram_size num_beams"),
    ("no", "do_sample speculative ignore_eos time_phases seed tokenizer eos_token_id"),
    ("1.2", "temperature repetition_penalty"),
    ([3], "inputs stopping_criteria logits_processor stop"),
    ([[3], [5, 24]], "bad_words_ids"),
    ([[3], []], "bad_words_ids"),
]
OWN_VALUE = {"generation_config": {}, "past_key_values": (), "temprature": None, "streamer": print}
OWN_VALUE |= {"constraints": torch.tensor([1, 1]), "stopping_criteria": MaxLengthCriteria, "seed": [1, 2]}
OWN_VALUE |= {"attention_mask": [[1]], "suppress_tokens": [3, 24]}
ALONE = [*OWN_VALUE.items(), *((name, value) for value, names in SAME_VALUE for name in names.split())]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        *(({name: value}, name) for name, value in ALONE),
        ({"generation_config": GenerationConfig(num_beams=4)}, "num_beams"),
        ({"do_sample": True, "temperature": 0.0}, "temperature"),
        ({"temperature": 1.0, "top_p": 0.0}, "top_p"),
        ({"temperature": 1.0, "top_k": -1}, "top_k"),
        ({"stop": ["a"], "stop_strings": ["b"]}, "stop_strings"),
    ],
    ids=str,
)
def test_what_cannot_be_served(model, options, named):
    model.tokenizer = object()
    with raises(UsageError, option=named):
        model.generate([3, 4], **options)


def test_greedy_ignores_sampling_options(model):
    expected = model.generate(PROMPTS, max_new_tokens=8).token_ids
    for options, named in (
        ({"top_p": 0.9}, "top_p=0.9"),
        ({"min_p": 0.1, "do_sample": False}, "min_p=0.1"),
        ({"do_sample": False, "temperature": 0.7, "top_k": 5}, "temperature=0.7, top_k=5"),
        ({"temperature": 0.0, "top_p": 0.9}, "top_p=0.9"),
        ({"do_sample": False, "temperature": 1.0, "top_k": 50}, None),
    ):
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always", SamplingWarning)
            assert model.generate(PROMPTS, max_new_tokens=8, **options).token_ids == expected
        assert [str(each.message).split(": ")[1].split(" acts")[0] for each in found] == ([named] if named else [])
        assert not found or found[0].filename == __file__


def test_what_asks_for_nothing_is_taken(model):
    neutral = "encoder_repetition_penalty", "typical_p", "length_penalty", "repetition_penalty"
    off = dict.fromkeys(neutral, 1.0) | {"top_k": 50, "max_new_tokens": 8, "num_assistant_tokens": 20}
    off |= dict.fromkeys(("num_beams", "guidance_scale", "bos_token_id"), 1)
    off |= dict.fromkeys(("penalty_alpha", "no_repeat_ngram_size", "min_length"), 0)
    off |= {"renormalize_logits": False, "output_scores": False, "use_cache": True, "cache_implementation": "static"}
    expected = own_generate(model, max_new_tokens=8)
    config = GenerationConfig()
    vars(config).update(off)
    assert model.generate(PROMPTS, generation_config=config).token_ids == expected
    unset = {**dict.fromkeys(vars(GenerationConfig())), "max_new_tokens": 8}
    assert model.generate(PROMPTS, **unset).token_ids == expected


def test_values_of_other_types_are_no_prompts(model):
    values = [[3.0, 4.0], b"a", [b"a"], 3, None, [[3], 4], [3, "a"], ["a", 3], [[[3]]], [HI], HI]
    for prompt in (*values, *map(torch.tensor, ([[3.5]], [[True]], 3))):
        with raises(UsageError, option="input_ids"):
            model.generate(prompt, max_new_tokens=2)


def test_a_mapping_holds_what_is_read_and_nothing_else(model):
    ids = torch.tensor([[3, 4, 5]])
    expected = model.generate(ids, max_new_tokens=4).token_ids
    read = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "token_type_ids": torch.zeros_like(ids)}
    for given in (read, {**read, "token_type_ids": [[0, 0, 0]], "pixel_values": None}, BatchEncoding(read)):
        assert model.generate(given, max_new_tokens=4).token_ids == expected
    others = {
        "position_ids": ids,
        "pixel_values": torch.ones(1, 3, 2, 2),
        "inputs_embeds": torch.ones(1, 3, 32),
        "atention_mask": [[0, 1, 1]],
        "max_new_tokens": 2,
        "token_type_ids": torch.tensor([[0, 1, 0]]),
    }
    for name, value in others.items():
        with raises(UsageError, option=name):
            model.generate({"input_ids": ids, name: value}, max_new_tokens=4)
        if name != "max_new_tokens":
            with raises(UsageError, option=name):
                model.generate(input_ids=ids, **{name: value})


@pytest.mark.parametrize("messages", [[], ["Hi"], HI, [HI | {"role": "system"}], [HI | {"content": ["Hi"]}]], ids=str)
def test_what_is_no_conversation(model, tmp_path, messages):
    refusal = "{% if messages[0].role == 'system' %}{{ raise_exception('no system here') }}{% endif %}"
    folder = write_folder(tmp_path, byte_level_bpe(), refusal + "{{ messages[0].role + messages[0].content }}")
    model.tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    with raises(UsageError, option="messages"):
        model.encode_chat(messages)
    with pytest.raises(PromptError, match="character 6"):
        model.encode_chat([HI | {"content": "Hi\udfff"}])
    model.tokenizer.chat_template = "{{ 1 / 0 }}"
    with raises(UsageError, option="messages"):
        model.encode_chat("Hi")
    model.tokenizer.chat_template = None
    with pytest.raises(PromptError, match="character 2"):
        model.generate("Hi\udfff")
    for role, content in (("system", "Hi"), ("user", None)):
        with raises(UsageError, option="messages"):
            model.encode_chat([HI | {"role": role}, HI | {"content": content}])


def test_an_answer_in_channels_is_the_next_turns_history(model, tmp_path):
    """gpt-oss' template refuses channels in a text, and beside a call takes either words or thoughts."""
    template = (
        "{% for m in messages %}{% if '<|channel|>final<|message|>' in m.content %}{{ raise_exception('channels') }}"
        "{% elif m.tool_calls and m.content and m.thinking %}{{ raise_exception('both') }}{% elif m.tool_calls %}"
        "<{{ m.thinking }}>{{ m.tool_calls[0].function.name + (m.tool_calls[0].function.arguments | tojson) }}"
        "{% else %}{{ m.role[0] + '<' ~ m.thinking ~ '>' + m.content }}{% endif %}{% endfor %}"
    )
    folder = write_folder(tmp_path, byte_level_bpe(), template)
    model.tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    start, thought = "<|start|>assistant", "<|channel|>analysis<|message|>A?<|end|>"
    for said, shown in (
        (f"{thought}{start}<|channel|>final<|message|>B!", "a<A?>B!"),
        ("<|channel|>analysis<|message|>cut", "a<cut>"),
        (f'{thought}{start} to=functions.f<|channel|>commentary json<|message|>{{"x": 1}}', '<A?>f{"x": 1}'),
        ("<|channel|>commentary<|message|>Wait<|end|><|start|>assistant to=functions.f<|message|>{", '<Wait>f"{"'),
        ("plain", "a<>plain"),
    ):
        ids = model.encode_chat([HI, {"role": "assistant", "content": said}, HI])
        assert model.tokenizer.decode(ids) == f"u<>Hi{shown}u<>Hi"
    model.tokenizer.chat_template = "{{ messages[0].content }}"
    content = f"{thought}B"
    assert model.tokenizer.decode(model.encode_chat([{"role": "assistant", "content": content}])) == content


def test_a_chat_takes_its_options_by_name(model):
    with raises(UsageError, option="n"):
        model.chat("Hi", n=1, num_return_sequences=1)
    model.tokenizer = object()
    no_list: Any
    for no_list in (5, iter([HI])):
        with raises(UsageError, option="messages"):
            model.chat(no_list)


def test_an_end_in_every_form(model):
    expected = own_generate(model, max_new_tokens=30, eos_token_id=5)
    # Ids that no token has end nothing.
    for eos in (5, np.int64(5), torch.tensor(5), torch.tensor([5]), [5], (5, 30), {5}, [5, -1, 24, 10**6]):
        assert model.generate(PROMPTS, max_new_tokens=30, eos_token_id=eos).token_ids == expected, repr(eos)


def test_a_loaded_target_stays_as_it_is(tmp_path):
    target, head = tiny_target("llama"), write_head(tmp_path)
    wrong = {"dtype": (torch.float16, "bfloat16", "float7"), "device": ("meta", "gpu")}
    wrong |= {"offline": ("x",), "tokenizer": ("name/model",), "draft_vocab": ("full", 24.0), "tree": ((5, 10, 60),)}
    wrong |= {"max_model_len": (0,), "revision": ("main",), "target_weights": ("fp8",)}
    for option, value in ((name, each) for name in wrong for each in wrong[name]):
        with raises(UsageError, option=option):
            SpeculativeModel.from_pretrained(target, head, **{option: value})


def test_an_old_transformers_is_told(monkeypatch):
    monkeypatch.setattr("eagle_slim.runtime.opening.targets.transformers.__version__", "4.53.3")
    with raises(UsageError, option="transformers 5.0"):
        SpeculativeModel.from_pretrained()


def test_what_a_target_is_loaded_in(tmp_path):
    loaded, head = tiny_target("llama"), write_head(tmp_path / "own")
    own = {"dtype": "float32", "device": "cpu", "draft_vocab": np.int64(24)}
    assert SpeculativeModel.from_pretrained(loaded, head, **own).draft_vocab == 24
    target, head = write_pair(tmp_path)
    for wrong in ("int8", "Tensor", 7, torch.float8_e4m3fn):
        with raises(UsageError, option="dtype"):
            SpeculativeModel.from_pretrained(target, head, dtype=wrong)
    for dtype in ("bfloat16", torch.bfloat16):
        assert SpeculativeModel.from_pretrained(target, head, dtype=dtype).target.dtype == torch.bfloat16


def test_exactness_says_what_holds_in_each_type(model, tmp_path):
    stats = model.generate([3, 4], max_new_tokens=2).stats
    assert "float32" in str(stats.exactness)
    assert not stats.is_exact, "only an exact row's ties are decided alike"
    assert model.generate([3, 4], max_new_tokens=2, logits_processor=[lambda _, scores: scores]).stats.exactness is None
    half = SpeculativeModel.from_pretrained(tiny_target("llama").bfloat16(), write_head(tmp_path))
    assert half.generate([3, 4], max_new_tokens=2).stats.exactness is None


def test_a_streamer_is_ended_where_the_call_fails(model):
    reader = mock.Mock()
    reader.put.side_effect = KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        model.generate([3, 4], streamer=reader)
    with raises(UsageError, option="max_new_tokens"):
        model.generate([3, 4], streamer=reader, max_new_tokens=-1)
    with raises(UsageError, option="streamer"):
        model.generate(PROMPTS, streamer=reader)
    with raises(UsageError, option="streamer"):
        model.generate([3, 4], streamer=TextStreamer)
    with raises(UsageError, option="tokenizer"):
        model.generate([3, 4], tokenizer=PreTrainedTokenizerFast)
    assert reader.end.call_count == 3


def test_values_of_other_types_are_refused_by_name(model):
    pair = torch.tensor([1, 2])
    wrong = {"suppress_tokens": [[3]], "no_repeat_ngram_size": pair, "repetition_penalty": pair, "temperature": pair}
    wrong |= {"stop": pair, "stopping_criteria": pair, "min_new_tokens": []}
    for name, value in wrong.items():
        with raises(UsageError, option=name):
            model.generate([3, 4], **{name: value})
