"""Drafting backends by name, generation over one, and the one call: errors, reuse, and the target's own text."""

import copy
import gc
import pickle
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from eagle_slim import runtime
from eagle_slim.runtime import DrafterError, GPUAssertionError, frontier_generate, fused_draft_token_generation
from eagle_slim.runtime.drafter.reference import draft_ref
from eagle_slim.runtime.drafter.tuning.problem import Dims, random_head, random_step
from eagle_slim.runtime.errors import UsageError
from support.raising import raises, raises_with
from support.tiny_models import plain_greedy, random_prompts, tiny_target, write_head
from support.upstream_models import OWN_TRANSFORMERS, build, prompt

NAMES_ELSEWHERE = {
    runtime.DrafterConfig: "H_ea V n_head K TOPK DEPTH T_max V_BLK ANCBLK use_fc use_concat_taps acc_dtype",
    runtime.Weights: "W_fc Wq Wk Wv Wo W1 W2 rms_gamma W_vocab",
    runtime.HeadWeights: "W_fc Wq Wk Wv Wo W1 W2 rms_gamma W_vocab",
    runtime.Buffers: "Kbuf Vbuf pos_id frontier_idx scores next_frontier_idx next_scores next_tokens "
    "cand_token cand_score cand_parent",
    runtime.TreeConfig: "K TOPK DEPTH",
    runtime.DrafterConfig.of: "T_max",
    runtime.launch_drafter: "fallback",
    runtime.patch_eagle_model: "use_triton_drafter",
    runtime.register_triton_backend: "fallback overwrite",
    partial(frontier_generate, object(), [1], head="slim"): "fallback overwrite use_triton_drafter",
    partial(fused_draft_token_generation, object(), [1], drafter="reference", head="slim"): "fallback",
}


def kept_on(model: Any) -> list[Any]:
    return [each for place in vars(model)["_eagle_slim_kept"].values() for each, _ in place.values()]


@pytest.fixture
def drafts(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """One entry for each draft of a user's own function, registered as "mine"; no backend stays."""
    monkeypatch.setattr("eagle_slim.runtime.safeailab.backends._registered", {})
    calls: list[None] = []
    runtime.register_triton_backend("mine", lambda *parts: calls.append(draft_ref(*parts)))
    return calls


def test_names_and_functions_are_checked(drafts: list[None]) -> None:
    for name, draft in (("triton", draft_ref), ("reference", None), ("mine", draft_ref), ("", None)):
        with raises(UsageError, option="name"):
            runtime.register_triton_backend(name, draft)
    for draft, draft_weights in ((3, "auto"), (draft_ref, "fp8")):
        with raises(UsageError, option="draft"):
            runtime.register_triton_backend("new", draft, draft_weights=draft_weights)  # type: ignore[arg-type]
    with raises(UsageError, option="draft_weights"):
        runtime.register_triton_backend("new", draft_weights="int4")
    for _ in range(2):
        runtime.register_triton_backend()
    with raises(UsageError, option="name"):
        runtime.register_triton_backend(draft_weights="fp8")
    runtime.unregister_backend("triton")
    runtime.register_triton_backend(draft_weights="fp8")
    assert runtime.registered_backends() == ("reference", "triton", "mine")
    with raises(UsageError, option="backend"):
        frontier_generate(object(), [1], backend="other")
    with raises(UsageError, option="model"):
        frontier_generate(torch.nn.Linear(2, 2), [1])
    runtime.unregister_backend("mine")
    with raises(UsageError, option="name"):
        runtime.unregister_backend("mine")


@OWN_TRANSFORMERS
def test_a_model_keeps_the_drafters_used_last(tmp_path: Path, drafts: list[None]) -> None:
    target, head, ids = tiny_target("llama"), write_head(tmp_path), random_prompts([7])[0]
    for total_tokens in range(4, 10):
        tree = runtime.TreeConfig(2, 3, total_tokens)
        frontier_generate(target, ids, backend="mine", head=head, tree=tree, max_new_tokens=2)
        assert kept_on(target)[-1].drafter.tree == tree
    assert [each.drafter.tree.total_tokens for each in kept_on(target)] == [6, 7, 8, 9]


@OWN_TRANSFORMERS
def test_a_transformers_model_drafts_with_any_backend(tmp_path: Path, drafts: list[None]) -> None:
    target, head, ids = tiny_target("llama"), write_head(tmp_path), random_prompts([7])[0]

    def check(call: Any, model: Any, **options: Any) -> None:
        output = call(model, ids, max_new_tokens=8, ignore_eos=True, **options)
        assert list(output.results[0].token_ids) == plain_greedy(target, ids, 8, None)

    loading: dict[str, Any] = {"head": head, "tree": runtime.TreeConfig(2, 3, 8)}
    for _ in range(2):
        check(frontier_generate, target, backend="mine", **loading)
        check(fused_draft_token_generation, target, drafter="reference", **loading)
    assert drafts
    model = kept_on(target)[1]
    assert len(kept_on(target)) == 2, "the second calls took what was there"
    for backend in ("reference", "mine", "mine"):
        check(frontier_generate, model, backend=backend)
    assert len(kept_on(model)) == 1, "its own drafter needs no other"
    sampled = {"temperature": 0.7, "seed": 5, "max_new_tokens": 6}
    for off, refused in (({"top_p": 0.0}, "top_p"), ({"top_k": 0, "top_p": 0}, "top_p"), ({"top_k": 0.0}, "top_k")):
        wanted = model.generate(ids, **sampled).token_ids
        assert frontier_generate(model, ids, backend="mine", **sampled, **off).token_ids == wanted
        for given, loads in ((model, {}), (target, loading)):
            found = fused_draft_token_generation(given, ids, drafter="reference", **loads, **sampled, **off)
            assert found.token_ids == wanted
        with raises(UsageError, option=refused):
            model.generate(ids, **sampled, **off)
    for given in ({"head": head}, {"draft_weights": "fp8"}, {"tree": (2, 3, 8)}):
        with raises(UsageError, option=next(iter(given))):
            fused_draft_token_generation(model, ids, drafter="reference", **given)  # type: ignore[arg-type]
    assert b"eagle_slim." not in pickle.dumps(target)
    other, gone = copy.deepcopy(target).double(), weakref.ref(target)
    target.double()
    check(fused_draft_token_generation, target, drafter="reference", **loading)
    assert [each.drafter.weights.dtype for each in kept_on(target)] == [torch.float64]
    model, target = None, other
    gc.collect()
    assert gone() is None, "what was kept went with its model"
    check(frontier_generate, target, backend="reference", **loading)


def test_an_ea_model_drafts_with_any_backend(tmp_path: Path, drafts: list[None]) -> None:
    model, other = build("stand-in eagle3", tmp_path), build("stand-in eagle3", tmp_path, seed=3)
    for layer in (model.ea_layer, other.ea_layer):
        model.ea_layer = layer
        kinds = type(model), type(layer)
        for backend in ("reference", "mine", "mine"):
            found = frontier_generate(model, prompt(model), backend=backend, max_new_tokens=12)
            assert (type(model), type(layer)) == kinds, "its methods are upstream's again"
            assert torch.equal(found, model.eagenerate(prompt(model), max_new_tokens=12))
        assert [patch.layer.layer for patch in kept_on(model)] == [layer, layer], "built once for a layer and backend"
    assert drafts
    runtime.register_triton_backend("fp8", draft_weights="fp8")
    with raises(DrafterError, option="draft_weights"):
        frontier_generate(model, prompt(model), backend="fp8")
    wanted = model.eagenerate(prompt(model), max_new_tokens=12)
    found = fused_draft_token_generation(model, prompt(model), max_new_tokens=12, drafter="reference")
    assert torch.equal(found, wanted)
    assert len(kept_on(model)) == 2, "frontier_generate's"
    with raises(UsageError, option="head"):
        fused_draft_token_generation(model, prompt(model), drafter="reference", head="slim")
    with raises(GPUAssertionError):
        fused_draft_token_generation(model, prompt(model))
    runtime.patch_eagle_model(model, drafter="reference")
    with raises(UsageError, option="model"):
        frontier_generate(model, prompt(model), backend="mine")


def test_features_alone_draft_a_tree(drafts: list[None]) -> None:
    head = random_head(Dims(32, 48, 4, 2, 8, 60), torch.device("cpu"), torch.float32)
    config = runtime.DrafterConfig.of(head, runtime.TreeConfig(2, 3, 8), num_slots=2, capacity=16)
    weights, trees = runtime.Weights(head), []
    for backend in ("reference", "mine"):
        bufs = runtime.allocate_buffers(config, weights)
        features_concat = random_step(config, 5, 2, bufs)
        trees.append(frontier_generate(config, features_concat, weights=weights, bufs=bufs, backend=backend))
        assert trees[-1][0] is bufs.draft_tokens
    assert len(drafts) == 1
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*trees, strict=True))
    assert int(trees[0][0].min()) >= 0
    low, mid, high = features_concat.clone().chunk(3, -1)
    for features in (features_concat, {"X_concat": features_concat}, {"X_low": low, "X_mid": mid, "X_high": high}):
        bufs.draft_tokens.zero_()
        frontier_generate(config, features_concat=features, weights=weights, bufs=bufs, backend="mine")
        assert torch.equal(bufs.draft_tokens, trees[0][0])
    with raises(UsageError, option="features"):
        runtime.launch_drafter(config, {"X_low": low, "X_high": high}, weights, bufs, "reference")
    whole: dict[str, Any] = {"weights": weights, "bufs": bufs}
    for parts in ({}, {"weights": weights}, {**whole, "max_new_tokens": 3}, {**whole, "features_concat": low}):
        with raises(UsageError, option="model"):
            frontier_generate(config, features_concat, backend="mine", **parts)
    for parts in ({"weights": weights}, {"features_concat": low}):
        with raises(UsageError, option="model"):
            frontier_generate(torch.nn.Linear(2, 2), [1], **parts)
    runtime.register_triton_backend("fp8", draft_weights="fp8")
    with raises(UsageError, option="backend"):
        frontier_generate(config, features_concat, weights=weights, bufs=bufs, backend="fp8")


def test_names_used_elsewhere_are_refused_with_the_place_of_their_table() -> None:
    page = (Path(__file__).parents[3] / "docs" / "upstream.md").read_text()
    table = page.split("### Names used elsewhere")[1].split("\n#")[0]
    assert all(f"`{name}`" in table for name in ("head_dim", "fallback"))
    for owner, names in NAMES_ELSEWHERE.items():
        for name in names.split():
            assert f"`{name}`" in table
            with raises_with(UsageError, name, "docs/upstream.md"):
                owner(**{name: 1})


@pytest.mark.slow
def test_the_example_drafts_from_random_weights() -> None:
    block = (Path(__file__).parents[3] / "examples" / "draft_without_a_model.py").read_text("utf-8")
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    # In float32 kernel and reference decide alike.
    assert "torch.bfloat16" in block
    exec(compile(block.replace("torch.bfloat16", "torch.float32"), "draft_without_a_model.py", "exec"), names)
    config, bufs = names["config"], names["bufs"]
    runtime.check_finished(bufs)
    drafted = [getattr(bufs, name).clone() for name in ("draft_tokens", "parents", "retrieve_indices", "tree_mask")]
    runtime.launch_drafter(config, names["features_concat"], names["weights"], bufs, "reference")
    found = [getattr(bufs, name) for name in ("draft_tokens", "parents", "retrieve_indices", "tree_mask")]
    assert drafted[0].shape == (1, 6)
    assert int(drafted[0][0, 0]) == 11
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(drafted, found, strict=True))


def test_one_call_says_what_gpu_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    for model, has_gpu, found in ((torch.nn.Linear(2, 2), True, "cpu"), (None, False, "cuda"), (None, True, "sm_75")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda has_gpu=has_gpu: has_gpu)
        with raises(GPUAssertionError) as caught:
            fused_draft_token_generation(model, [1, 2])
        assert found in str(caught.value)
        assert 'drafter="reference"' in str(caught.value)
    assert isinstance(caught.value, DrafterError)


@pytest.mark.gpu
@OWN_TRANSFORMERS
def test_a_named_backend_and_the_one_call_give_the_targets_text() -> None:
    model = runtime.SpeculativeModel.from_pretrained(dtype=torch.float32, device="cuda", drafter="reference")
    ids = model.encode_chat("What is the capital of France?")
    wanted = model.generate(ids, max_new_tokens=16, speculative=False).results[0].token_ids
    assert frontier_generate(model, ids, backend="triton", max_new_tokens=16).results[0].token_ids == wanted
    # A tree that is asked for drafts from the first step on.
    tree = runtime.TreeConfig(5, 10, 60)
    output = fused_draft_token_generation(model.target.model, ids, max_new_tokens=16, tree=tree)
    assert output.results[0].token_ids == wanted
    assert output.stats.mean_accepted_length > 1.5
    assert "drafter triton" in output.stats.path
