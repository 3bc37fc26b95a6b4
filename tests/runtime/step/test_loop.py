"""Speculative output against the target's own: greedy, sampled, batched, on every kind of target and head."""

import json
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import product
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import transformers
from eagle_slim.convert.sources.builtin import load_embedded_counts
from eagle_slim.runtime import SpeculativeModel, TreeConfig, UsageError
from eagle_slim.runtime.drafter import reference
from eagle_slim.runtime.step import plan, prefill
from eagle_slim.vocab_tools.vocabulary import DraftVocab
from support.raising import raises
from support.sweeps import sweep
from support.tiny_models import VOCAB, WINDOW, plain_greedy, random_prompts, tiny_target, write_head

pytestmark = pytest.mark.filterwarnings("ignore::eagle_slim.runtime.errors.AcceptanceWarning")

TREES = {
    "tree": {"tree": TreeConfig(3, 4, 25)},
    "chain": {"tree": TreeConfig(3, 1, 5)},
    "flat": {"tree": TreeConfig(0, 6, 7)},
    "deep": {"tree": TreeConfig(6, 2, 20)},
    "deeper than the kernel's": {"tree": TreeConfig(17, 1, 19)},
    "fewer nodes than levels": {"tree": TreeConfig(6, 2, 3)},
}
KINDS = ("llama", "qwen2", "qwen3", "mistral")
PROMPTS = random_prompts([1, 2, 9, 17])
NEW = 18
DRAFT_IDS = [2, 3, 5, 7, 8, 11, 12, 14, 17, 19, 20, 23]


def build(tmp_path, kind="llama", tree="tree", head=None, **options):
    folder = write_head(tmp_path / "head", **(head or {}))
    return SpeculativeModel.from_pretrained(tiny_target(kind), folder, **TREES[tree], **options)


@cache
def the_targets_own(kind):
    target = tiny_target(kind)
    return [plain_greedy(target, prompt, NEW) for prompt in PROMPTS]


@pytest.mark.parametrize("case", sweep(product(KINDS, TREES), ("llama", "tree"), ("llama", "chain")), ids="-".join)
def test_greedy_equals_the_targets_own(tmp_path, case):
    kind, tree = case
    model = build(tmp_path, kind, tree)
    passes = []
    for prompt, expected in zip(PROMPTS, the_targets_own(kind), strict=True):
        output = model.generate(prompt, max_new_tokens=NEW)
        assert output.token_ids == [expected]
        passes.append(output.stats)
    # The drafts must have mattered: some drafted tokens were accepted, on the tree at least.
    if tree in ("tree", "flat"):
        assert max(max(s.accepted_lengths, default=1) for s in passes) > 1
    if kind in ("qwen2", "mistral"):
        assert max(map(len, PROMPTS)) > WINDOW


def test_two_taps_one_of_them_after_the_last_layer(tmp_path):
    model = build(tmp_path, head={"taps": 2, "eagle_aux_hidden_state_layer_ids": [1, 4]})
    assert model.generate(PROMPTS, max_new_tokens=NEW).token_ids == the_targets_own("llama")


@pytest.mark.parametrize("kind", ["llama", pytest.param("mistral", marks=pytest.mark.slow)])
def test_a_batch_equals_its_prompts_alone(tmp_path, kind):
    model = build(tmp_path, kind)
    together = model.generate(PROMPTS, max_new_tokens=20)
    two_slots = model.generate(PROMPTS, max_new_tokens=20, max_slots=2)
    alone = [model.generate(prompt, max_new_tokens=20) for prompt in PROMPTS]
    assert two_slots.token_ids == together.token_ids == [output.token_ids[0] for output in alone]
    lengths = [output.stats.accepted_lengths for output in alone]
    assert lengths == [r.stats.accepted_lengths for r in together.results]
    assert lengths == [r.stats.accepted_lengths for r in two_slots.results]
    assert together.stats.num_passes == sum(output.stats.num_passes for output in alone)


def test_prompts_in_every_form_that_tokenizers_return(tmp_path):
    model = build(tmp_path)
    prompts = random_prompts([3, 5])
    padded, mask = [[0, 0, *prompts[0]], prompts[1]], [[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]
    encoded = {"input_ids": torch.tensor(padded), "attention_mask": torch.tensor(mask)}
    for given, keep, expected in (
        (prompts, None, prompts),
        ([np.array(prompt) for prompt in prompts], None, prompts),
        ([torch.tensor(prompt) for prompt in prompts], None, prompts),
        (padded, mask, prompts),
        (np.array(padded), np.array(mask), prompts),
        (torch.tensor(padded), mask, prompts),
        (transformers.BatchEncoding(encoded), None, prompts),
        ({"input_ids": padded, "attention_mask": mask}, None, prompts),
        (prompts[0], None, prompts[:1]),
        (np.array(prompts[0]), None, prompts[:1]),
        (list(np.array(prompts[0])), None, prompts[:1]),
        (torch.tensor(padded[0]), torch.tensor(mask[0]), prompts[:1]),
        (torch.tensor([padded[0]]), torch.tensor(mask[0]), prompts[:1]),
    ):
        found = model.generate(given, attention_mask=keep, max_new_tokens=0)
        assert [list(result.prompt_ids) for result in found.results] == expected, given


def test_threads_take_turns_with_a_target(tmp_path):
    model = build(tmp_path)
    head = write_head(tmp_path / "other", kind="eagle")
    other = SpeculativeModel.from_pretrained(model.target.model, head, **TREES["chain"])
    alone = [model.generate(prompt, max_new_tokens=10, ignore_eos=True).token_ids for prompt in PROMPTS]
    with ThreadPoolExecutor(4) as pool:
        jobs = [
            pool.submit(one.generate, prompt, max_new_tokens=10, ignore_eos=True)
            for one, prompt in product((model, other, model), PROMPTS)
        ]
    assert [job.result().token_ids for job in jobs] == alone * 3
    assert model.config._attn_implementation == "sdpa"


def test_a_streamer_that_generates_is_refused(tmp_path):
    model = build(tmp_path)
    streamer = mock.Mock()
    streamer.put.side_effect = lambda value: value.dim() == 1 and model.generate(PROMPTS[1], max_new_tokens=2)
    with raises(UsageError, option="streamer"):
        model.generate(PROMPTS[0], max_new_tokens=8, streamer=streamer)
    with raises(UsageError, option="criterion"):
        model.generate(PROMPTS[0], stopping_criteria=lambda *_: bool(model.generate(PROMPTS[1])))
    assert model.generate(PROMPTS[0], max_new_tokens=8).token_ids == [plain_greedy(model.target.model, PROMPTS[0], 8)]


def test_a_long_prompt_in_chunks_gives_the_same(tmp_path, monkeypatch):
    model = build(tmp_path, "mistral")
    prompt = random_prompts([50], seed=3)[0]
    whole = model.generate(prompt, max_new_tokens=12)
    monkeypatch.setattr(prefill, "LARGEST_EAGER_CHUNK", 7)
    assert model.generate(prompt, max_new_tokens=12).token_ids == whole.token_ids
    assert whole.token_ids == [plain_greedy(model.target.model, prompt, 12)]


def test_who_ran_is_counted(tmp_path):
    model = build(tmp_path)
    # A prompt's forward gives the first token, each plain step one for every sequence: four steps of two, four of one.
    output = model.generate(PROMPTS[:3], max_new_tokens=5, max_slots=2, ignore_eos=True, speculative=False)
    stats = output.stats
    assert (stats.active_sequences, stats.finish_reasons) == ({1: 4, 2: 4}, {"length": 3})
    drafted = model.generate(PROMPTS, max_new_tokens=24)
    assert sum(count * steps for count, steps in drafted.stats.active_sequences.items()) == drafted.stats.num_passes
    assert drafted.stats.finish_reasons == Counter(result.finish_reason for result in drafted.results)


def test_what_was_drafted_from_is_never_computed_again(tmp_path, monkeypatch):
    """A draft computes the pairs of the last step's tokens and its own nodes; a prompt's pairs take no pass at all."""
    model, positions, layer = build(tmp_path), list[int](), reference.ReferenceDraft.layer

    def counted(draft, hidden, tokens, *rest):
        positions.append(tokens.shape[1])
        return layer(draft, hidden, tokens, *rest)

    monkeypatch.setattr(reference.ReferenceDraft, "layer", counted)
    output = model.generate(random_prompts([12])[0], max_new_tokens=24, ignore_eos=True)
    tree, lengths = model.drafter.tree, output.stats.accepted_lengths
    extended = sum(positions[:: tree.depth + 1])
    # The first token, then what each step but the last accepted.
    assert 0 < 1 + sum(length * count for length, count in lengths.items()) - extended <= tree.path_width
    assert sum(positions) == extended + output.stats.num_passes * tree.depth * tree.top_k


def test_a_drafter_of_the_callers_own(tmp_path):
    """It drafts from the buffers; what it drafts are target ids of the draft vocabulary."""
    seen = set()

    def watched(cfg, features, head, bufs):
        reference.draft_ref(cfg, features, head, bufs)
        seen.update(bufs.draft_tokens[0, 1:].tolist())

    model = build(tmp_path, head={"draft_ids": DRAFT_IDS}, drafter=watched)
    output = model.generate(PROMPTS[2], max_new_tokens=20)
    assert output.token_ids == model.with_drafter("reference").generate(PROMPTS[2], max_new_tokens=20).token_ids
    assert output.token_ids == model.with_drafter(watched).generate(PROMPTS[2], max_new_tokens=20).token_ids
    assert "drafter watched" in output.stats.path
    assert seen <= set(DRAFT_IDS)
    assert len(seen) > len(DRAFT_IDS) // 2
    assert max(seen) < VOCAB


def test_what_the_draft_vocabulary_did_not_hold_is_counted(tmp_path, monkeypatch):
    """With an early end of sequence, slots that are taken again, and a stop in the middle of an accepted path."""
    model = build(tmp_path, head={"draft_ids": DRAFT_IDS})
    output = model.generate(random_prompts([1, 9, 5, 2]), max_new_tokens=12, max_slots=2)
    expected = Counter(token for row in output.token_ids for token in row if token not in DRAFT_IDS)
    assert output.stats.missed_ids == dict(expected)
    assert expected
    assert output.stats.missed_rate == sum(expected.values()) / output.stats.num_new_tokens
    for result in output.results:
        assert result.stats.missed_ids == Counter(token for token in result.token_ids if token not in DRAFT_IDS)
    plain = model.generate(random_prompts([3]), max_new_tokens=4, speculative=False).stats
    assert (plain.missed_ids, plain.missed_rate) == ({}, 0.0)
    # Plain decoding that was chosen as the fastest misses as any other tree.
    with monkeypatch.context() as patch:
        patch.setattr(plan, "_choose_shapes", lambda *_: ((None,), "measured"))
        chosen = model.generate(random_prompts([9]), max_new_tokens=12)
    assert chosen.stats.missed_ids == Counter(token for token in chosen.token_ids[0] if token not in DRAFT_IDS)
    assert build(tmp_path / "full").generate(random_prompts([3]), max_new_tokens=4).stats.num_missed == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("vocabulary", "tree", "num_passes"),
    [("full", TreeConfig(4, 1, 5), 27), ("most frequent", TreeConfig(5, 10, 60), 18)],
)
def test_the_real_head_takes_the_passes_of_an_independent_implementation(vocabulary, tree, num_passes):
    """For 468 tokens of 12 prompts: 160 (full vocabulary, depth 5, top_k 10, 60 nodes), 166 (4096 most frequent ids),
    254 (full, chain of depth 4). Here the first prompt of these runs; `eagle-compare` repeats the whole table."""
    model = SpeculativeModel.from_pretrained(dtype=torch.float32, device="cpu").with_tree(tree)
    if vocabulary == "most frequent":
        counts = load_embedded_counts().sources[0].counts
        most_frequent = DraftVocab(np.argsort(-counts, kind="stable")[:4096], 0, len(counts), {})
        model = model.with_draft_vocab(most_frequent)
    with (Path(__file__).parents[3] / "examples" / "prompts.jsonl").open(encoding="utf-8") as lines:
        prompt = model.encode_chat(json.loads(next(lines))["turns"][0])
    output = model.generate(prompt, max_new_tokens=40)
    assert output.token_ids == [plain_greedy(model.target.model, prompt, 40)]
    # The first token is the prompt's.
    assert (output.stats.num_accepted_tokens, output.stats.num_passes) == (39, num_passes)
