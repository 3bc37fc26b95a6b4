"""A drafter of the caller's own, over the same buffers, in a `SpeculativeModel` and in a patched `EaModel`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from eagle_slim.runtime import (
    Buffers,
    DrafterConfig,
    DrafterError,
    SpeculativeModel,
    patch_ea_model_with_triton_drafter,
    patch_eagle_model,
    unpatch_eagle_model,
)
from eagle_slim.runtime.drafter.reference import draft_ref
from eagle_slim.runtime.drafter.weights import HeadWeights
from support.raising import raises
from support.tiny_models import plain_greedy, random_prompts, tiny_target, write_head
from support.upstream_models import OWN_TRANSFORMERS, build, prompt


class Counting:
    """A user's drafter."""

    def __init__(self) -> None:
        self.drafts = 0

    def __call__(self, cfg: DrafterConfig, features: torch.Tensor, head: HeadWeights, bufs: Buffers) -> None:
        self.drafts += 1
        draft_ref(cfg, features, head, bufs)


@OWN_TRANSFORMERS
def test_a_speculative_model_drafts_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, counting = tiny_target("llama"), Counting()
    ids = random_prompts([7])[0]
    wanted = plain_greedy(target, ids, 8, None)
    model = SpeculativeModel.from_pretrained(
        target, write_head(tmp_path), drafter="reference", depth=2, top_k=3, total_tokens=8
    )
    for each in (model, model.with_drafter(counting)):
        assert list(each.generate(ids, max_new_tokens=8, ignore_eos=True).results[0].token_ids) == wanted
    assert counting.drafts > 1
    monkeypatch.setattr("eagle_slim.runtime.drafter.kernels.persistent.is_interpreted", lambda: False)
    with raises(DrafterError, option="drafter", expected="cuda"):
        model.with_drafter("triton")


@pytest.mark.parametrize("patch", [patch_ea_model_with_triton_drafter, patch_eagle_model])
def test_a_patched_model_drafts_with_it(tmp_path: Path, patch: object) -> None:
    model, counting = build("stand-in eagle3", tmp_path), Counting()
    ids = prompt(model, 9)
    wanted = model.eagenerate(ids, max_new_tokens=12)
    patch(model, drafter=counting)  # type: ignore[operator]
    found = model.eagenerate(ids, max_new_tokens=12)
    assert torch.equal(found, wanted)
    assert counting.drafts > 1
    unpatch_eagle_model(model)
    with raises(DrafterError, option="draft_weights", expected="cuda", found="cpu"):
        patch(model, draft_weights="fp8")  # type: ignore[operator]
