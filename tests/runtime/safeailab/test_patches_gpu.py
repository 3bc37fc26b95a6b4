"""The patches on a GPU, around the real code of SafeAILab's EAGLE, and the calls that need a GPU."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from eagle_slim.runtime import (
    SpeculativeModel,
    frontier_generate,
    fused_draft_token_generation,
    patch_ea_model_with_triton_drafter,
    patch_eagle_model,
    unpatch_eagle_model,
)
from support.upstream_models import NEEDS_UPSTREAM, OWN_TRANSFORMERS, build, prompt

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]


@NEEDS_UPSTREAM
@pytest.mark.parametrize("name", ["llama eagle3", "llama eagle"])
def test_drafts_and_text_are_upstreams(tmp_path: Path, name: str) -> None:
    model = build(name, tmp_path).to("cuda")
    # Upstream keeps these beside its buffers, where `to` does not find them.
    model.ea_layer.init_tree()
    prompts = [prompt(model, length, seed=length).cuda() for length in (21, 3, 40)]

    def texts() -> list[torch.Tensor]:
        random.seed(1)
        torch.manual_seed(1)
        return [model.eagenerate(ids, max_new_tokens=24, temperature=t) for t in (0.0, 0.3) for ids in prompts]

    calls, own, layer_class = [], type(model.ea_layer).topK_genrate, type(model.ea_layer)

    def listening(layer, hidden_states, input_ids, head, logits_processor):  # type: ignore[no-untyped-def]
        arguments = (hidden_states, input_ids, head, logits_processor)
        calls.append((layer.stable_kv, arguments, own(layer, *arguments)))
        return calls[-1][2]

    layer_class.topK_genrate = listening
    wanted = texts()
    layer_class.topK_genrate = own
    assert max(arguments[0].shape[1] for kv, arguments, _ in calls if kv is not None) > 1, "no draft was accepted"
    patch_ea_model_with_triton_drafter(model)
    for kv, arguments, tree in calls:
        model.ea_layer.stable_kv = kv
        for mine, theirs in zip(model.ea_layer.topK_genrate(*arguments), tree, strict=True):
            assert (mine.device, mine.dtype) == (theirs.device, theirs.dtype)
            assert torch.equal(mine, theirs)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(texts(), wanted, strict=True))
    unpatch_eagle_model(model)
    patch_eagle_model(model)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(texts(), wanted, strict=True))
    unpatch_eagle_model(model)


@OWN_TRANSFORMERS
def test_a_named_backend_and_the_one_call_give_the_targets_text() -> None:
    model = SpeculativeModel.from_pretrained(dtype=torch.float32, device="cuda", drafter="reference")
    ids = model.encode_chat("What is the capital of France?")
    wanted = model.generate(ids, max_new_tokens=16, speculative=False).results[0].token_ids
    assert frontier_generate(model, ids, backend="triton", max_new_tokens=16).results[0].token_ids == wanted
    output = fused_draft_token_generation(model.target.model, ids, max_new_tokens=16)
    assert output.results[0].token_ids == wanted
    assert output.stats.mean_accepted_length > 1.5
    assert "drafter triton" in output.stats.path
