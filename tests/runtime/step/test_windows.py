"""Windows of drafts: the text of plain decoding, drafts as over all keys, less memory, and prompts taken up again."""

import pytest
from eagle_slim.runtime import SpeculativeModel, TreeConfig
from eagle_slim.runtime.drafter.reference import draft_ref
from eagle_slim.runtime.errors import UsageError
from support.raising import raises
from support.tiny_models import random_prompts, tiny_target, write_head

pytestmark = pytest.mark.filterwarnings("ignore::eagle_slim.runtime.errors.AcceptanceWarning")
WINDOW = 8
OPTIONS = {"max_new_tokens": 12, "ignore_eos": True}


@pytest.fixture
def model(tmp_path):
    target = tiny_target("llama", max_position_embeddings=2048)
    head = write_head(tmp_path, max_position_embeddings=2048)
    return SpeculativeModel.from_pretrained(target, head, tree=TreeConfig(3, 4, 16), draft_window=WINDOW)


def over_all_keys(model):
    """A function drafts from a cache that holds every pair."""
    return model.with_drafter(draft_ref)


def test_long_prompts_beside_short_ones(model):
    prompts = random_prompts([1150, 5, 640])
    output = model.generate(prompts, **OPTIONS)
    expected = over_all_keys(model).generate(prompts, **OPTIONS)
    assert output.token_ids == expected.token_ids == model.generate(prompts, speculative=False, **OPTIONS).token_ids
    assert output.stats.accepted_lengths == expected.stats.accepted_lengths
    assert output.stats.cache_bytes < expected.stats.cache_bytes
    assert "weights, the last 8 tokens (asked for); " in output.stats.path
    everything = model.with_draft_window(0)
    assert everything.draft_window is None
    stats = everything.generate(prompts, **OPTIONS).stats
    assert "the last" not in stats.path
    assert stats.cache_bytes == expected.stats.cache_bytes


def test_the_first_tokens_of_a_text_are_seen_too(model):
    """With windows of 256 tokens and more, and of a chat that goes on."""
    wide = model.with_draft_window(256)
    prompts = random_prompts([1400, 280])
    first = wide.generate(prompts, reuse_prefix=True, **OPTIONS)
    turns = [[*prompt, *answer, 5, 6] for prompt, answer in zip(prompts, first.token_ids, strict=True)]
    output = wide.generate(turns, reuse_prefix=True, **OPTIONS)
    expected = over_all_keys(wide).generate(turns, **OPTIONS)
    assert output.stats.num_reused_tokens > 1600
    assert output.token_ids == expected.token_ids
    assert output.stats.accepted_lengths == expected.stats.accepted_lengths


@pytest.mark.usefixtures("run_ahead")
def test_partial_verification(model):
    """Drafts that ran ahead and are taken back leave the window as it was."""
    prompts, options = random_prompts([1150, 640]), {**OPTIONS, "max_new_tokens": 16, "partial_verification": "exact"}
    output, expected = model.generate(prompts, **options), over_all_keys(model).generate(prompts, **options)
    assert output.token_ids == expected.token_ids
    assert output.stats.num_partial_passes > 0
    for name in ("accepted_lengths", "num_partial_passes", "num_rolled_back_tokens"):
        assert getattr(output.stats, name) == getattr(expected.stats, name)


def test_what_lies_before_the_window_is_not_computed(model, monkeypatch):
    from eagle_slim.runtime.drafter import drafter

    write_pairs, pairs = drafter.write_pairs, list[int]()
    monkeypatch.setattr(drafter, "write_pairs", lambda *args: (pairs.append(len(args[2])), write_pairs(*args)))
    model.generate(random_prompts([1900]), max_new_tokens=2, ignore_eos=True)
    assert sum(pairs) == 1900 - 1024


def test_a_chat_keeps_its_prefix(model):
    """Tokens of the window whose pairs are cached no more are run again."""
    prompt, fresh = random_prompts([1500])[0], over_all_keys(model)
    whole = prompt + model.generate(prompt, reuse_prefix=True, **OPTIONS).token_ids[0]

    def edited(at):
        return [*whole[:at], 9 if whole[at] != 9 else 8, *whole[at + 1 : at + 40]]

    turns = [([*whole, 5, 6, 7], None), (edited(1400), 1399), (edited(900), 899 - WINDOW), (edited(880), 879 - WINDOW)]
    for turn, expected in [*turns, (edited(5), 0), ([*whole[:5], 7], None)]:
        output, own = model.generate(turn, reuse_prefix=True, **OPTIONS), fresh.generate(turn, **OPTIONS)
        assert output.token_ids == own.token_ids
        assert output.stats.accepted_lengths == own.stats.accepted_lengths
        assert expected in (None, output.stats.num_reused_tokens)
    assert model.generate(turns[0][0], reuse_prefix=True, **OPTIONS).stats.num_reused_tokens == 4


@pytest.mark.parametrize(
    ("config", "window"),
    [
        ({"max_position_embeddings": 128}, 128),
        ({"max_position_embeddings": 129}, None),
        ({"draft_window_size": 100}, 100),
        ({"layer_types": ["sliding_attention"], "sliding_window": 3, "draft_window_size": 100}, 3),
    ],
)
def test_the_default_is_what_the_head_was_trained_on(tmp_path, config, window):
    model = SpeculativeModel.from_pretrained(tiny_target("llama"), write_head(tmp_path, **config))
    assert model.draft_window == window
    assert ("by the head's config.json" in model.drafting) == (window is not None)
    assert model.with_draft_window(7).with_draft_window(None).draft_window == window


@pytest.mark.parametrize("window", [-1, True, 2.5, "8"])
def test_no_window(model, window):
    with raises(UsageError, option="draft_window"):
        model.with_draft_window(window)
    with raises(UsageError, option="draft_window"):
        SpeculativeModel.from_pretrained(model.target.model, model.opened, draft_window=window)
