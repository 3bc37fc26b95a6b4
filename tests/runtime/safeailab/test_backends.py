"""Drafting backends by name, generation over one, and the one call: errors, reuse, and the target's own text."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from eagle_slim.runtime import (
    DrafterError,
    GPUAssertionError,
    SpeculativeModel,
    TreeConfig,
    frontier_generate,
    fused_draft_token_generation,
    patch_eagle_model,
    register_triton_backend,
    registered_backends,
    unregister_backend,
)
from eagle_slim.runtime.drafter.choose import CHOICES
from eagle_slim.runtime.drafter.reference import draft_ref
from eagle_slim.runtime.drafter.weights import HeadWeights
from eagle_slim.runtime.errors import UsageError
from support.raising import raises
from support.tiny_models import plain_greedy, random_prompts, tiny_target, write_head
from support.upstream_models import OWN_TRANSFORMERS, build, prompt

TREE = TreeConfig(2, 3, 8)


@pytest.fixture(autouse=True)
def _no_backend_stays() -> Iterator[None]:
    yield
    for name in ("triton", *registered_backends()[2:]):
        with suppress(UsageError):
            unregister_backend(name)


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_head(tmp_path_factory.mktemp("head"))


class Counting:
    """A user's drafter."""

    def __init__(self) -> None:
        self.drafts = 0

    def __call__(self, cfg: Any, features: Any, head: HeadWeights, bufs: Any) -> None:
        self.drafts += 1
        draft_ref(cfg, features, head, bufs)


def kept(model: Any) -> list[Any]:
    """What was built over a model and is kept with it."""
    return [built for built, _ in vars(model)["_eagle_slim_joined"].values()]


@pytest.fixture
def counting() -> Counting:
    draft = Counting()
    register_triton_backend("counting", draft)
    return draft


@OWN_TRANSFORMERS
def test_a_speculative_model_drafts_with_any_backend(
    head: Path, counting: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tiny_target("llama")
    model = SpeculativeModel.from_pretrained(target, head, depth=2, top_k=3, total_tokens=8)
    ids = random_prompts([7])[0]
    wanted = plain_greedy(target, ids, 8, None)
    assert registered_backends() == ("reference", "triton", "counting")
    for backend in ("reference", "counting", "counting"):
        output = frontier_generate(model, ids, backend=backend, max_new_tokens=8, ignore_eos=True)
        assert list(output.results[0].token_ids) == wanted
    assert len(kept(model)) == 1, "its own drafter needs no other; the other was built once"
    assert counting.drafts > 1
    loaded: dict[str, Any] = {"head": head, "tree": TREE, "backend": "counting", "max_new_tokens": 8}
    for _ in range(2):
        output = frontier_generate(target, ids, ignore_eos=True, **loaded)
        assert list(output.results[0].token_ids) == wanted
    assert len(kept(target)) == 1, "once more for the model without a head of its own"
    monkeypatch.setattr("eagle_slim.runtime.drafter.kernels.persistent.is_interpreted", lambda: False)
    with raises(DrafterError, option="drafter", expected="cuda"):
        frontier_generate(model, ids, max_new_tokens=8)


def test_the_kernels_options_have_a_name(tmp_path: Path) -> None:
    """In the interpreter, where only launch parameters of a GPU are tuned."""
    model = build("stand-in eagle3", tmp_path)
    register_triton_backend("fp8", draft_weights="fp8")
    with raises(DrafterError, option="draft_weights", expected="cuda", found="cpu"):
        frontier_generate(model, prompt(model), backend="fp8", max_new_tokens=1)
    with raises(UsageError, option="head"):
        frontier_generate(model, prompt(model), backend="reference", head="slim")


def test_an_ea_model_drafts_with_any_backend(tmp_path: Path, counting: Counting) -> None:
    model = build("stand-in eagle3", tmp_path)
    prompts = [prompt(model, 9), prompt(model, 30, seed=1)]
    wanted = [model.eagenerate(ids, max_new_tokens=12) for ids in prompts]
    kind, members = type(model.ea_layer), dict(vars(model.ea_layer))
    for backend in ("reference", "counting"):
        found = [frontier_generate(model, ids, backend=backend, max_new_tokens=12) for ids in prompts]
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, wanted, strict=True))
        assert type(model.ea_layer) is kind
        assert vars(model.ea_layer).items() >= {"depth": 2, "top_k": 3}.items()
        assert vars(model.ea_layer).keys() == members.keys()
    assert len(kept(model)) == 2
    assert counting.drafts > 1
    patch_eagle_model(model, drafter="reference")
    with raises(UsageError, option="model"):
        frontier_generate(model, prompts[0], backend="reference")


def test_a_kept_drafter_serves_what_it_was_built_over(tmp_path: Path, counting: Counting) -> None:
    model, other = build("stand-in eagle3", tmp_path), build("stand-in eagle3", tmp_path, seed=3)
    ids = prompt(model)

    def is_upstreams(backend: str) -> bool:
        found = frontier_generate(model, ids, backend=backend, max_new_tokens=12)
        return torch.equal(found, model.eagenerate(ids, max_new_tokens=12))

    for layer in (model.ea_layer, other.ea_layer):
        model.ea_layer = layer
        assert is_upstreams("reference")
        assert is_upstreams("counting")
        assert {patch.layer.layer for patch in kept(model)} == {layer}
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        model.double()
        assert is_upstreams("counting")
    finally:
        torch.set_default_dtype(default)
    assert [patch.layer.session.head.dtype for patch in kept(model)] == [torch.float64]


@OWN_TRANSFORMERS
def test_kept_drafters_go_with_their_models(tmp_path: Path, head: Path) -> None:
    model: Any = build("stand-in eagle3", tmp_path)
    frontier_generate(model, prompt(model), backend="reference", max_new_tokens=1)
    target: Any = tiny_target("llama")
    fused_draft_token_generation(target, [[5, 6]], max_new_tokens=1, head=head, drafter="reference", tree=TREE)
    gone = weakref.ref(model), weakref.ref(target)
    del model, target
    gc.collect()
    assert [each() for each in gone] == [None, None]


def test_names_and_factories_are_checked(counting: Counting) -> None:
    for name, factory in (("triton", counting), ("reference", None), ("counting", counting), ("", None), ("new", 3)):
        with raises(UsageError, option="name" if factory != 3 else "draft"):
            register_triton_backend(name, factory)
    register_triton_backend(draft_weights="bf16")
    assert registered_backends() == ("reference", "triton", "counting")
    with raises(UsageError, option="name", found="triton") as caught:
        register_triton_backend(draft_weights="fp8")
    assert "overwrite=True" in str(caught.value)
    register_triton_backend(draft_weights="fp8", overwrite=True)
    with raises(UsageError, option="draft"):
        register_triton_backend("new", counting, draft_weights="fp8")
    with raises(UsageError, option="draft_weights", found="int4"):
        register_triton_backend("new", draft_weights="int4")
    register_triton_backend("counting", Counting(), overwrite=True)
    with raises(UsageError, option="backend", found="mine", expected=("reference", "triton", "counting")):
        frontier_generate(object(), [1], backend="mine")
    with raises(UsageError, option="model", found="Linear"):
        frontier_generate(torch.nn.Linear(2, 2), [1], backend="reference")
    with raises(UsageError, option="name", found="mine"):
        unregister_backend("mine")


@OWN_TRANSFORMERS
def test_one_call_generates_and_keeps_what_it_built(head: Path) -> None:
    target = tiny_target("llama")
    ids = random_prompts([7])[0]
    wanted = plain_greedy(target, ids, 8, None)
    options: dict[str, Any] = {"head": head, "drafter": "reference", "ignore_eos": True, "tree": TREE}
    output = fused_draft_token_generation(target, ids, max_new_tokens=8, **options)
    assert list(output.results[0].token_ids) == wanted
    ((joined, _),) = target._eagle_slim_joined.values()
    fused_draft_token_generation(target, ids, 0.7, 8, seed=1, top_k=4, **options)
    ((again, _),) = target._eagle_slim_joined.values()
    assert again is joined
    output = fused_draft_token_generation(joined, ids, max_new_tokens=8, drafter="reference", ignore_eos=True)
    assert list(output.results[0].token_ids) == wanted
    with raises(UsageError, option="head"):
        fused_draft_token_generation(joined, ids, head=head, drafter="reference")
    for draft_weights, expected in (("int4", CHOICES), ("fp8", "auto")):
        with raises(UsageError, option="draft_weights", found=draft_weights, expected=expected):
            fused_draft_token_generation(joined, ids, drafter="reference", draft_weights=draft_weights)
    assert b"eagle_slim." not in pickle.dumps(target)
    target = copy.deepcopy(target)
    fused_draft_token_generation(target, ids, max_new_tokens=1, **options)
    target.double()
    output = fused_draft_token_generation(target, ids, max_new_tokens=8, **options)
    assert list(output.results[0].token_ids) == plain_greedy(target, ids, 8, None)
    ((moved, _),) = target._eagle_slim_joined.values()
    assert moved.drafter.weights.dtype == torch.float64


def test_one_call_says_what_gpu_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with raises(GPUAssertionError, expected="an NVIDIA GPU of sm_80 (Ampere) or later") as caught:
        fused_draft_token_generation(tiny_target("llama"), [1, 2])
    assert "a model on cpu" in caught.value.facts["found"]
    assert 'drafter="reference"' in str(caught.value)
    assert isinstance(caught.value, DrafterError)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with raises(GPUAssertionError) as caught:
        fused_draft_token_generation(None, [1, 2])
    assert caught.value.facts["found"].startswith("none that torch can use")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    with raises(GPUAssertionError, found="Tesla T4, sm_75"):
        fused_draft_token_generation(None, [1, 2])
    with raises(UsageError, option="model", found="EaModel"):
        fused_draft_token_generation(build("stand-in eagle3", tmp_path), [1, 2])
