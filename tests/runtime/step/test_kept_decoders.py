"""Decoders and graphs that are kept from call to call: so many, and built anew they answer the same."""

import copy
import gc
import itertools
import pickle
import weakref
from functools import partial

import pytest
import torch
import transformers
from eagle_slim.runtime import DeviceMemoryError, SpeculativeModel, TreeConfig, UsageError
from eagle_slim.runtime.opening.target_files import load_target
from eagle_slim.runtime.settings import PartialVerification
from eagle_slim.runtime.step import decoders
from eagle_slim.runtime.step.decoders import MAX_DECODERS, Decoders
from eagle_slim.runtime.step.graphs import recall
from eagle_slim.runtime.step.partial import PartialChains
from support.built_decoders import watch_decoders
from support.raising import raises, raises_with
from support.tiny_models import random_prompts, tiny_target, write_head, write_pair

pytestmark = pytest.mark.filterwarnings("ignore::eagle_slim.runtime.errors.AcceptanceWarning")


@pytest.fixture
def model(tmp_path):
    return SpeculativeModel.from_pretrained(tiny_target("llama"), write_head(tmp_path), tree=TreeConfig(2, 2, 5))


def test_what_was_not_used_for_longest_makes_room():
    kept = {}
    for key in "abca":
        assert recall(kept, key, 3, partial(str.upper, key)) == key.upper()
    recall(kept, "d", 3, lambda: " ".join(kept))
    # It had gone before the new one was built.
    assert kept == {"c": "C", "a": "A", "d": "c a"}


def test_decoders_are_bounded_and_built_anew(model, monkeypatch):
    """One for each number of prompts, drafted and plain."""
    prompts, built = random_prompts([5, 9, 3, 12, 7, 4, 8]), watch_decoders(monkeypatch)
    kinds = [(count, is_drafted) for count in range(1, 8) for is_drafted in (True, False)]
    assert len(kinds) > MAX_DECODERS
    answers = {count: set() for count, _ in kinds}
    for count, is_drafted in kinds * 2:
        output = model.generate(prompts[:count], max_new_tokens=8, ignore_eos=True, speculative=is_drafted)
        answers[count].add(str(output.token_ids))
        assert len(built.alive) <= MAX_DECODERS
    assert len(built.alive) == MAX_DECODERS
    assert all(len(each) == 1 for each in answers.values())
    before = built.count
    assert before == len(kinds) * 2
    model.generate(prompts, max_new_tokens=8, speculative=False)
    assert built.count == before


def test_a_slot_keeps_its_prefix_without_its_decoder(model, monkeypatch):
    monkeypatch.setattr(decoders, "MAX_DECODERS", 1)
    built, prompt = watch_decoders(monkeypatch), random_prompts([20])[0]
    # The cache has a slot more than the prompt needs.
    model.warmup(2, 100)
    options = {"max_new_tokens": 8, "ignore_eos": True, "reuse_prefix": True}
    first = model.generate(prompt, **options)
    model.warmup(2, 100)
    turn = [*prompt, *first.token_ids[0], 5, 6]
    output = model.generate(turn, **options)
    assert built.count == 4
    assert len(built.alive) == 1
    assert output.stats.num_reused_tokens >= len(prompt)
    assert output.token_ids == model.generate(turn, max_new_tokens=8, ignore_eos=True).token_ids


@pytest.mark.parametrize("place", ["cache", "forward"])
def test_full_memory_ends_one_call_only(model, place, monkeypatch):
    prompt = random_prompts([9])[0]
    wanted = model.generate(prompt, max_new_tokens=8, ignore_eos=True).token_ids
    # The same with nothing allocated.
    model = model.with_tree(model.drafter.tree)
    forward, allocate, calls, caches = model.target.forward, decoders.KVCache.allocate, itertools.count(1), []

    def out_of_memory(*given, **options):
        if next(calls) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has 79 GiB.")
        forward(*given, **options)

    def noted(*given):
        cache = allocate(*given) if place == "forward" else torch.empty(1 << 60, dtype=torch.uint8)
        caches.append(weakref.ref(cache))
        return cache

    with monkeypatch.context() as patch:
        patch.setattr(decoders.KVCache, "allocate", noted)
        if place == "forward":
            patch.setattr(model.target, "forward", out_of_memory)
        with raises(DeviceMemoryError, option="max_slots") as caught:
            model.generate(prompt, max_new_tokens=8)
    assert "max_new_tokens" in str(caught.value)
    assert "alloc_cpu" not in str(caught.value)
    del caught
    gc.collect()
    assert [cache() for cache in caches] == [None] * (place == "forward")
    assert model.generate(prompt, max_new_tokens=8, ignore_eos=True, reuse_prefix=True).token_ids == wanted


def test_a_target_that_does_not_fit_is_told_with_its_size(tmp_path, monkeypatch):
    target, _ = write_pair(tmp_path)

    def to(_model, *_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")

    monkeypatch.setattr(transformers.PreTrainedModel, "to", to)
    with raises_with(DeviceMemoryError, "dtype", "in float32"):
        load_target(target, torch.float32, torch.device("cpu"), None, offline=True)


def test_a_model_cannot_be_copied_but_its_target_can(model):
    for act in (copy.deepcopy, pickle.dumps):
        with raises(UsageError, option="SpeculativeModel cannot be copied"):
            act(model)
    own = model.target.model
    prompt = torch.tensor(random_prompts([9]))
    wanted = own.generate(prompt, max_new_tokens=4)
    for same in (copy.deepcopy(own), pickle.loads(pickle.dumps(own))):
        assert torch.equal(same.generate(prompt, max_new_tokens=4), wanted)


def test_a_decoder_goes_at_once(model):
    """Its memory is there for the next one without waiting for cycles to be collected."""
    kept = Decoders(model.target, model.drafter)
    decoder = kept.get(2, 40, kept.tree, PartialVerification("exact", 1, min_length=0))
    assert isinstance(decoder.drafts, PartialChains)
    gone = weakref.ref(decoder)
    gc.disable()
    try:
        del decoder
        kept.drop()
        assert gone() is None
    finally:
        gc.enable()
