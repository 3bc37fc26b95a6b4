"""An EaModel drafts and generates with the patches as without: the stand-in always, the real code on request."""

import copy
import pickle
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from eagle_slim.runtime import (
    DrafterError,
    UnsupportedModelError,
    patch_ea_model_with_triton_drafter,
    patch_eagle_model,
    unpatch_ea_model,
    unpatch_eagle_model,
)
from eagle_slim.runtime.drafter.reference import draft_ref
from eagle_slim.runtime.errors import HeadWarning, PairingError, UsageError
from eagle_slim.runtime.safeailab import drafting
from eagle_slim.runtime.safeailab.step import step_of
from eagle_slim.runtime.target import fused
from eagle_slim.vocab_tools import DraftVocab, TokenizerError
from support import upstream_stand_in
from support.raising import raises, raises_with
from support.sampling import first_in_race
from support.small_tokenizers import write_folder
from support.sweeps import sweep
from support.token_counts import token_counts
from support.upstream_models import CASES, NEEDS_UPSTREAM, REAL_CASES, STAND_INS, build, prompt
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers.generation.logits_process import LogitsProcessorList, TemperatureLogitsWarper, TopPLogitsWarper

pytestmark = pytest.mark.filterwarnings(
    # The real code and its transformers, which are not ours to mend.
    "ignore::DeprecationWarning",
    "ignore::FutureWarning",
    "ignore:.*generative capabilities:UserWarning",
)

PATCHES = {"drafter": patch_ea_model_with_triton_drafter, "whole": patch_eagle_model}
FUSED = {"whole": patch_eagle_model, "fused": partial(patch_eagle_model, target_backend="fused")}
"""On a CPU, only the second verifies with the fused forward."""


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    built: dict[str, Any] = {}

    def get(name: str) -> Any:
        if name not in built:
            built[name] = build(name, tmp_path_factory.mktemp("model"))
        return built[name]

    return get


def drafts(model: Any, sampled: bool = False) -> list[tuple[tuple[Any, ...], tuple[Tensor, ...], Any]]:
    """Every draft of a short generation: arguments, the four values, and the ``stable_kv`` after it."""
    layer_class = type(model.ea_layer)
    own, calls = layer_class.topK_genrate, []

    def listening(layer: Any, hidden_states: Tensor, input_ids: Tensor, head: Any, logits_processor: Any) -> Any:
        arguments = (hidden_states, input_ids, head, logits_processor)
        calls.append((arguments, own(layer, *arguments), layer.stable_kv))
        return calls[-1][1]

    layer_class.topK_genrate = listening
    random.seed(0)
    try:
        model.eagenerate(prompt(model, 21), max_new_tokens=12, temperature=0.3 * sampled)
    finally:
        layer_class.topK_genrate = own
    return calls


def assert_same_tree(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> None:
    """Equal in every element, type and device. That holds as no two scores of these models are equal."""
    assert len(found) == len(wanted) == 4
    for name, mine, theirs in zip(("tokens", "paths", "mask", "positions"), found, wanted, strict=True):
        assert (mine.dtype, mine.device) == (theirs.dtype, theirs.device), name
        assert torch.equal(mine, theirs), (name, mine, theirs)


def assert_same_drafts(layer: Any, calls: list[tuple[tuple[Any, ...], tuple[Tensor, ...], Any]]) -> None:
    """Draft what `drafts` recorded again, from an empty cache."""
    layer.reset_kv()
    for arguments, wanted, kv in calls:
        assert_same_tree(layer.topK_genrate(*arguments), wanted)
        torch.testing.assert_close(layer.stable_kv, kv, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_drafts_are_upstreams(model_of: Callable[[str], Any], name: str, sampled: bool) -> None:
    model = model_of(name)
    calls = drafts(model, sampled)
    assert max(call[0][0].shape[1] for call in calls[1:]) > 1, "no draft was accepted"
    patch_ea_model_with_triton_drafter(model, drafter="reference")
    assert_same_drafts(model.ea_layer, calls)
    unpatch_ea_model(model)


@contextmanager
def small_tree(model: Any) -> Iterator[Any]:
    """A tree that Triton's interpreter drafts in a second."""
    layer = model.ea_layer
    before = layer.depth, layer.top_k, layer.total_tokens
    set_tree(layer, 1, 2, 4)
    yield model
    set_tree(layer, *before)


def set_tree(layer: Any, depth: int, top_k: int, total_tokens: int) -> None:
    layer.depth, layer.top_k, layer.total_tokens = depth, top_k, total_tokens
    if hasattr(layer, "init_tree"):
        layer.init_tree()


def texts(model: Any, prompts: list[Tensor], sampled: bool = False) -> list[Tensor]:
    random.seed(1)
    torch.manual_seed(1)
    greedy = [model.eagenerate(ids, max_new_tokens=12) for ids in prompts]
    naive = [model.naivegenerate(prompts[0], max_new_tokens=4)]
    others = naive + list(model.ea_generate(prompts[1], max_new_tokens=4))
    return greedy + others + [model.eagenerate(ids, temperature=0.3, max_new_tokens=8) for ids in prompts * sampled]


def assert_same_texts(found: list[Tensor], wanted: list[Tensor]) -> None:
    assert len(found) == len(wanted)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, wanted, strict=True))


@pytest.mark.parametrize("name", [*sweep(STAND_INS, "stand-in eagle3"), *REAL_CASES])
@pytest.mark.parametrize("patch", {**PATCHES, **FUSED})
def test_text_is_upstreams(model_of: Callable[[str], Any], name: str, patch: str) -> None:
    model = model_of(name)
    prompts, sampled = [prompt(model, length, seed=length) for length in (21, 3)], patch == "drafter"
    wanted = texts(model, prompts, sampled)
    if patch == "fused" and name == "mixtral eagle":
        with raises(UnsupportedModelError, option="target_backend"):
            FUSED[patch](model, drafter="reference")
        return
    {**PATCHES, **FUSED}[patch](model, drafter="reference")
    assert_same_texts(texts(model, prompts, sampled), wanted)
    unpatch_eagle_model(model)
    ids, new_token, passes = model.eagenerate(prompts[0], max_new_tokens=12, log=True)
    assert passes + 1 < int(new_token) == ids.shape[1] - 21, "no draft was accepted"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["stand-in eagle3", *(pytest.param(name, marks=NEEDS_UPSTREAM) for name in ("llama eagle3", "qwen2 eagle"))]
)
def test_a_base_model_that_changes_while_patched_counts_from_the_next_call(name: str, tmp_path: Path) -> None:
    """Other weights are fused again; with a hook they are upstream's; "fused" by name is refused."""
    patched, plain = models = [build(name, tmp_path / each) for each in ("patched", "plain")]
    ids = [prompt(plain, 9)]
    patch_eagle_model(patched, drafter="reference", target_backend="fused")
    step_of(patched)._asked = "auto"  # as on a GPU, where that is what chose it
    first = step_of(patched)._target
    for _ in range(2):
        assert_same_texts(texts(patched, ids * 2), texts(plain, ids * 2))
    assert step_of(patched)._target is first, "what upstream's loops set is no change"
    for change in (double_weights, assign_weights, negate_by_hook, lambda _: None):
        for model in models:
            change(model.base_model)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fused, "FUSED_ON", ("cpu",))
            assert_same_texts(texts(patched, ids * 2), texts(plain, ids * 2))
        is_hooked = change not in (double_weights, assign_weights)
        assert step_of(patched).backend.name == ("upstream" if is_hooked else "fused")
    step_of(patched)._asked = "fused"
    negate_by_hook(patched.base_model)
    with raises(UnsupportedModelError, option="target_backend"):
        patched.eagenerate(ids[0], max_new_tokens=4)


def double_weights(base: Any) -> None:
    with torch.no_grad():
        base.model.layers[0].mlp.down_proj.weight.mul_(2)


def assign_weights(base: Any) -> None:
    state = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    state["model.layers.1.self_attn.v_proj.weight"] *= -1
    base.load_state_dict(state, assign=True)


def negate_by_hook(base: Any) -> None:
    base.model.layers[1].mlp.register_forward_hook(lambda _module, _args, output: -output)


@pytest.mark.parametrize("patch", [pytest.param("whole", marks=pytest.mark.slow), "fused"])
def test_a_step_runs_on_kernels(model_of: Callable[[str], Any], patch: str) -> None:
    with small_tree(model_of("stand-in eagle3")) as model:
        wanted = next(model.ea_generate(prompt(model)))
        FUSED[patch](model)
        found = next(model.ea_generate(prompt(model)))
        unpatch_eagle_model(model)
    assert torch.equal(found, wanted)


def _with_top_p(_: Any, temperature: float) -> Any:
    return LogitsProcessorList([TemperatureLogitsWarper(temperature), TopPLogitsWarper(0.9)])


@pytest.mark.parametrize("processor", sweep([None, _with_top_p], None), ids=["temperature", "top-p"])
@pytest.mark.parametrize("patch", FUSED)
def test_sampled_tokens_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patch: str, processor: Any) -> None:
    """Every token wins the race that the pass's key for its depth starts after all tokens before it."""
    if processor is not None:
        monkeypatch.setattr(upstream_stand_in.EaModel, "processor", processor)
    model = build("stand-in eagle3", tmp_path)
    ids, passes = prompt(model, 9), []
    FUSED[patch](model, drafter="reference")
    for longer in model.ea_generate(ids, temperature=0.25, max_new_tokens=60):
        passes.append((longer.shape[1] - ids.shape[1], step_of(model)._tensors.choice.keys[0].tolist()))
    unpatch_eagle_model(model)
    model.base_model.model.tree_mask = None
    logits = model.base_model(longer, upstream_stand_in.initialize_past_key_values(128)[0]).logits[0]
    scores = model.processor(0.25)(None, logits)
    begin, lengths = ids.shape[1], []
    for (end, keys), before in zip(passes[:-1], [0, *(end for end, _ in passes)], strict=False):
        lengths.append(end - before)
        for depth, place in enumerate(range(begin + before, begin + end)):
            assert first_in_race(scores[place], keys[depth]) == int(longer[0, place + 1])
    assert max(lengths) > 1, "no draft was accepted"
    assert len({tuple(keys) for _, keys in passes}) == len(passes), "keys are drawn anew for every pass"


def test_a_base_model_that_is_not_fused_says_why(tmp_path: Path) -> None:
    model = build("stand-in eagle3", tmp_path)
    with raises(UsageError, option="target_backend"):
        patch_eagle_model(model, drafter="reference", target_backend="transformers")
    patch_eagle_model(model, drafter="reference")
    assert "is on cpu" in str(step_of(model).backend)
    base = model.base_model
    base.model.layers.pop(1)
    unpatch_eagle_model(model)
    with raises_with(UnsupportedModelError, "target_backend", "2 layers"):
        patch_eagle_model(model, drafter="reference", target_backend="fused")
    patch_eagle_model(model, drafter="reference")
    assert step_of(model).backend.name == "upstream"


def snapshot(model: Any) -> list[tuple[type, dict[str, Any]]]:
    parts = model, model.ea_layer, model.base_model, model.base_model.model
    return [(type(part), dict(vars(part))) for part in parts]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("patch", PATCHES)
def test_unpatching_restores_the_object(model_of: Callable[[str], Any], name: str, patch: str) -> None:
    model = model_of(name)
    model.eagenerate(prompt(model), max_new_tokens=4)
    before = snapshot(model)
    assert PATCHES[patch](model, drafter="reference") is model
    assert isinstance(model, before[0][0])
    assert isinstance(model.ea_layer, before[1][0])
    model.ea_layer.topK_genrate(*_next_draft(model))
    assert unpatch_ea_model(model) is model
    for (kind, members), (old_kind, old_members) in zip(snapshot(model), before, strict=True):
        assert kind is old_kind
        assert members.keys() == old_members.keys()
        assert all(members[key] is old_members[key] for key in members)
    assert unpatch_eagle_model(model) is model


def _next_draft(model: Any) -> tuple[Any, ...]:
    kv = model.ea_layer.stable_kv
    held = 0 if kv is None else kv[0][0].shape[2]
    width = model.ea_layer.fc.weight.shape[1] // (1 if hasattr(model.ea_layer, "midlayer") else 2)
    return torch.randn(1, 2, width), prompt(model, held + 3), model.base_model.lm_head, None


@pytest.mark.parametrize("patch", PATCHES)
def test_other_models_are_as_they_were(tmp_path: Path, patch: str) -> None:
    model, other = build("stand-in eagle3", tmp_path), build("stand-in eagle3", tmp_path, seed=3)
    wanted, method = other.eagenerate(prompt(other), max_new_tokens=6), type(other).eagenerate
    PATCHES[patch](model, drafter="reference")
    assert torch.equal(other.eagenerate(prompt(other), max_new_tokens=6), wanted)
    assert type(other).eagenerate is method
    copied = copy.deepcopy(model)
    assert [kind for kind, _ in snapshot(copied)] == [kind for kind, _ in snapshot(other)]
    assert pickle.dumps(model), "a patched model can be saved, by the same reduction that copies it"
    ids = prompt(model)
    assert torch.equal(copied.eagenerate(ids, max_new_tokens=6), model.eagenerate(ids, max_new_tokens=6))


def test_stable_kv_can_be_read_set_and_emptied(tmp_path: Path) -> None:
    model = build("stand-in eagle3", tmp_path)
    calls = drafts(model)
    patch_ea_model_with_triton_drafter(model, drafter="reference")
    layer = model.ea_layer
    layer.stable_kv = None
    assert layer.stable_kv is None
    layer.topK_genrate(*calls[0][0])
    kept = layer.stable_kv
    before = kept[0][0].clone()
    layer.topK_genrate(*calls[1][0])
    layer.reset_kv()
    layer.topK_genrate(*_next_draft(model))
    assert torch.equal(kept[0][0], before), "what was read must not change under its reader"
    # Another prompt came between; the first goes on where it was.
    layer.stable_kv = kept
    assert_same_tree(layer.topK_genrate(*calls[1][0]), calls[1][1])
    with raises(UsageError):
        layer.stable_kv = (before,)
    with raises(UsageError):
        layer.stable_kv = ((torch.zeros(1, 1, 3, 4), torch.zeros(1, 1, 3, 4)),)


def test_the_tree_may_change_between_drafts(tmp_path: Path) -> None:
    model = build("stand-in eagle3", tmp_path)
    first = drafts(model)[0]
    layer = model.ea_layer
    with small_tree(model):
        second = drafts(model)[1]
    patch_ea_model_with_triton_drafter(model, drafter="reference")
    layer.reset_kv()
    assert_same_tree(layer.topK_genrate(*first[0]), first[1])
    set_tree(layer, 1, 2, 4)
    assert_same_tree(layer.topK_genrate(*second[0]), second[1])


@pytest.mark.parametrize("patch", PATCHES)
def test_inference_mode_comes_and_buffers_grow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patch: str) -> None:
    monkeypatch.setattr(drafting, "_FIRST_CAPACITY", 8)
    model = build("stand-in eagle3", tmp_path)
    wanted, start = (model.eagenerate(prompt(model), max_new_tokens=count) for count in (24, 6))
    with torch.inference_mode():
        PATCHES[patch](model, drafter="reference")
        assert torch.equal(model.eagenerate(prompt(model), max_new_tokens=6), start)
    assert torch.equal(model.eagenerate(prompt(model), max_new_tokens=24), wanted)
    assert model.ea_layer.stable_kv[0][0].shape[2] == wanted.shape[1]


@pytest.mark.parametrize("name", CASES)
def test_a_slim_vocabulary_drafts_its_ids_only(model_of: Callable[[str], Any], name: str) -> None:
    model = model_of(name)
    wanted = model.eagenerate(prompt(model), max_new_tokens=12)
    layer = model.ea_layer
    vocab = layer.embed_tokens.weight.shape[0]
    trained = torch.arange(vocab) if not hasattr(layer, "d2t") else torch.arange(len(layer.d2t)) + layer.d2t
    ids = trained[: len(trained) // 2].tolist()
    patch_eagle_model(model, DraftVocab(np.array(ids), 0, vocab), drafter="reference")
    tokens = layer.topK_genrate(*_next_draft(model))[0]
    assert set(tokens[0, 1:].tolist()) <= set(ids)
    assert torch.equal(model.eagenerate(prompt(model), max_new_tokens=12), wanted)
    unpatch_eagle_model(model)


def test_a_vocabulary_may_come_from_a_map_or_a_number(tmp_path: Path) -> None:
    model = build("stand-in eagle3", tmp_path)
    ids = (torch.arange(24) + model.ea_layer.d2t).tolist()
    ranked = DraftVocab(np.array(ids[::-1]), 0, 48)

    def drafted(*args: Any, **options: Any) -> set[int]:
        patch_ea_model_with_triton_drafter(model, *args, drafter="reference", **options)
        model.ea_layer.reset_kv()
        tokens = model.ea_layer.topK_genrate(*_next_draft(model))[0][0, 1:].tolist()
        unpatch_ea_model(model)
        return set(tokens)

    torch.save(torch.tensor(ids[::-1]), tmp_path / "freq_24.pt")
    assert drafted(6, token_map=tmp_path / "freq_24.pt") <= set(ids[-6:])
    assert drafted(6, token_map=ranked) <= set(ids[-6:])
    assert drafted(tmp_path / "freq_24.pt") <= set(ids)
    assert drafted(24) <= set(ids)
    untrained = sorted(set(range(48)) - set(ids))
    with pytest.warns(HeadWarning, match="24 of the map's 48 ids"):
        assert drafted(4, token_map=DraftVocab(np.array(untrained + ids[::-1]), 0, 48)) <= set(ids[-4:])
    counts, foreign = "counts.safetensors", DraftVocab(np.array([*ids[:4], untrained[0]]), 0, 48)
    for given in (
        {"draft_vocab": 6},
        {"draft_vocab": 0},
        {"draft_vocab": foreign},
        {"counts": counts},
        {"draft_vocab": 6, "counts": counts, "token_map": ranked},
        {"draft_vocab": ranked, "token_map": ranked},
    ):
        with raises(UsageError, option="draft_vocab"):
            patch_eagle_model(model, **given)


def test_another_layer_than_was_patched_is_refused(tmp_path: Path) -> None:
    """Upstream would draft with the new one, and the step would go on over what the old one drafted."""
    model, other = build("stand-in eagle3", tmp_path), build("stand-in eagle3", tmp_path, seed=3)
    old, new, ids = model.ea_layer, other.ea_layer, prompt(model)
    wanted, kinds = model.eagenerate(ids, max_new_tokens=6), snapshot(model)
    patch_eagle_model(model, drafter="reference")
    model.ea_layer = new
    for generate in (model.eagenerate, model.ea_generate):
        with raises(UsageError, option="model"):
            generate(ids)
    with raises(UsageError, option="model"):
        patch_eagle_model(model, drafter="reference")
    model.ea_layer = old
    assert torch.equal(model.eagenerate(ids, max_new_tokens=6), wanted)
    model.ea_layer = new
    unpatch_eagle_model(model)
    found = [type(part) for part in (model, old, new, model.base_model.model)]
    assert found == [kinds[place][0] for place in (0, 1, 1, 3)]
    wanted = model.eagenerate(ids, max_new_tokens=6)
    patch_eagle_model(model, drafter="reference")
    assert torch.equal(model.eagenerate(ids, max_new_tokens=6), wanted)


def test_a_vocabulary_may_come_from_counts(tmp_path: Path) -> None:
    model = build("stand-in eagle", tmp_path)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(47)}, unk_token="w0"))
    words.add_special_tokens(["<|end|>"])
    folder = write_folder(tmp_path / "base", words, eos_token="<|end|>")
    counts = token_counts([*range(100, 148)])
    counts.save(tmp_path / "counts.safetensors")
    with pytest.raises(TokenizerError):  # of no folder "stand-in"
        patch_eagle_model(model, 8, counts=counts, drafter="reference")
    for each, tokenizer in ((counts, str(folder)), (tmp_path / "counts.safetensors", None)):
        model.base_model_name_or_path = str(folder)
        with pytest.warns(HeadWarning):
            patch_eagle_model(model, 8, counts=each, tokenizer=tokenizer, drafter="reference")
        model.ea_layer.reset_kv()
        # The end of sequence is forced, the others are the most frequent.
        assert set(model.ea_layer.topK_genrate(*_next_draft(model))[0][0, 1:].tolist()) <= set(range(40, 48))
        unpatch_eagle_model(model)
    with raises(UsageError, option="draft_vocab"):
        patch_eagle_model(model, tmp_path / "counts.safetensors")


def test_what_cannot_be_patched_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with raises(UsageError, option="model"):
        patch_eagle_model(torch.nn.Linear(2, 2))
    model = build("stand-in eagle3", tmp_path)
    with raises(UsageError, option="drafter"):
        patch_eagle_model(model, drafter="eager")
    with monkeypatch.context() as changed:
        changed.setattr("eagle_slim.runtime.drafter.drafter.is_interpreted", lambda: False)
        with raises(DrafterError, option="drafter"):
            patch_eagle_model(model)
    with raises(UsageError, option="use_triton"):
        patch_ea_model_with_triton_drafter(model, use_triton=False, drafter=draft_ref)
    patch_ea_model_with_triton_drafter(model, use_triton=False)
    with raises(UsageError, option="model"):
        patch_ea_model_with_triton_drafter(model, drafter="reference")
    layer = model.ea_layer
    features, ids, head, _ = _next_draft(model)
    with raises(UsageError):
        layer.topK_genrate(features[:, :1], ids, head, None)
    with raises(UsageError):
        layer.topK_genrate(features.expand(2, -1, -1), ids.expand(2, -1), head, None)
    model.half()
    with raises(DrafterError):
        layer.topK_genrate(features, ids, head, None)
    unpatch_eagle_model(model)

    twice, deep, rewritten, lacking, spread, dynamic, other = (
        build(f"stand-in {kind}", tmp_path) for kind in ("eagle3", *["eagle"] * 6)
    )
    twice.ea_layer.d2t[1] -= 1
    deep.ea_layer.layers.append(deep.ea_layer.layers[0])
    rewritten.__class__ = type("Rewritten", (type(rewritten),), {"eagenerate": lambda self, ids: ids})
    del lacking.ea_layer.depth
    spread.ea_layer.fc.to("meta")
    rotary = dynamic.ea_layer.layers[0].self_attn.rotary_emb
    rotary.__class__ = type("DynamicRotary", (type(rotary),), {})
    with raises(PairingError):
        patch_eagle_model(twice, drafter="reference")
    for each, named in (
        (deep, "of neither kind"),
        (rewritten, "tree_decoding"),
        (lacking, "no depth"),
        (spread, "cpu, meta"),
        (dynamic, "dynamic RoPE"),
    ):
        with raises_with(UnsupportedModelError, named):
            patch_eagle_model(each, drafter="reference")
    patch_eagle_model(other, drafter="reference", target_backend="fused")
    with raises(UsageError):
        other.ea_layer.topK_genrate(torch.randn(1, 2, 16), ids, torch.nn.Linear(16, 48), None)
    set_tree(other.ea_layer, 40, 2, 50)
    with raises(UsageError, option="depth"):
        other.eagenerate(ids)


@NEEDS_UPSTREAM
@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama eagle3", "llama eagle"])
def test_drafts_and_text_on_a_gpu_are_upstreams(tmp_path: Path, name: str) -> None:
    model = build(name, tmp_path).to("cuda")
    # Upstream keeps these beside its buffers, where `to` does not find them.
    model.ea_layer.init_tree()
    prompts = [prompt(model, length, seed=length) for length in (21, 3, 40)]
    greedy, sampled, wanted = drafts(model), drafts(model, sampled=True), texts(model, prompts, sampled=True)
    assert max(call[0][0].shape[1] for call in greedy[1:]) > 1, "no draft was accepted"
    patch_ea_model_with_triton_drafter(model)
    for calls in (greedy, sampled):
        model.ea_layer.reset_kv()
        for arguments, tree, _ in calls:
            assert_same_tree(model.ea_layer.topK_genrate(*arguments), tree)
    assert_same_texts(texts(model, prompts, sampled=True), wanted)
    unpatch_eagle_model(model)
    for backend in ("auto", "upstream"):
        patch_eagle_model(model, target_backend=backend)
        assert step_of(model).backend.name == ("upstream" if backend == "upstream" else "fused")
        found = texts(model, prompts, sampled=True)
        assert_same_texts(found[: -len(prompts)], wanted[: -len(prompts)])
        assert_same_texts(texts(model, prompts, sampled=True), found)
        unpatch_eagle_model(model)
