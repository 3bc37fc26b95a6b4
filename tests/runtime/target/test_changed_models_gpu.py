"""On a GPU: a changed model is followed through graphs, and rows of other weights are found by their bits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from eagle_slim.runtime import SpeculativeModel, TreeConfig
from eagle_slim.runtime.errors import DeviceMemoryError, SpeedWarning
from eagle_slim.runtime.step.decoder import hold_row
from eagle_slim.runtime.target.cache import KVCache
from support.changed_models import CHANGES, FUSED
from support.tiny_models import random_prompts, tiny_target, write_head

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::eagle_slim.runtime.errors.AcceptanceWarning"),
    pytest.mark.filterwarnings("ignore::eagle_slim.runtime.errors.SpeedWarning"),
]
PROMPT = random_prompts([70])[0]
OPTIONS: dict[str, Any] = {"max_new_tokens": 12, "ignore_eos": True, "reuse_prefix": True}
FOLLOWED = (
    "lora on q_proj",
    "lora on the LM head",
    "attention subclass",
    "patched class",
    "forward hook",
    "parametrization",
    "load_state_dict",
    "load_state_dict, assign",
    "fused optimiser",
    "LM head's weight",
)


@pytest.fixture(autouse=True)
def _exact_products() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


def loaded(folder: Path, **head: Any) -> tuple[Any, SpeculativeModel]:
    own = tiny_target("llama", hidden_size=64, intermediate_size=96, head_dim=16).cuda()
    written = write_head(folder, hidden=64, **head)
    return own, SpeculativeModel.from_pretrained(own, written, tree=TreeConfig(3, 4, 16))


def own_answer(own: Any) -> list[int]:
    ids = torch.tensor([PROMPT], device="cuda")
    output = own.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, eos_token_id=99)
    return output[0, len(PROMPT) :].tolist()


@pytest.fixture(params=FOLLOWED)
def change(request: pytest.FixtureRequest) -> Iterator[Any]:
    act, expected, _ = CHANGES[request.param]
    with ExitStack() as stack:
        yield lambda own: act(own, stack), expected


def test_a_changed_model_is_followed(change: Any, tmp_path: Path) -> None:
    act, expected = change
    own, model = loaded(tmp_path)
    assert model.target.backend.name == "fused"
    assert model.generate(PROMPT, **OPTIONS).token_ids[0] == own_answer(own)
    act(own)
    own.cuda()  # adapters that were added on the host
    for _ in range(2):
        output = model.generate(PROMPT, **OPTIONS)
        assert output.token_ids[0] == own_answer(own)
        assert f"target {'fused' if expected == FUSED else 'transformers'} (" in output.stats.path
    assert output.stats.num_reused_tokens > 0


def test_one_bit_of_the_weights_is_enough_to_keep_nothing(tmp_path: Path) -> None:
    own, model = loaded(tmp_path)
    model.generate(PROMPT, **OPTIONS)
    assert model.generate(PROMPT, **OPTIONS).stats.num_reused_tokens > 0
    weight = own.model.layers[0].self_attn.k_proj.weight
    weight.data.mul_(1 + 2**-22)
    version = model.target.version
    assert model.generate(PROMPT, **OPTIONS).stats.num_reused_tokens == 0
    assert model.target.version == version
    assert model.generate(PROMPT, **OPTIONS).stats.num_reused_tokens > 0


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
def test_a_held_row_is_compared_without_a_wait() -> None:
    cache = KVCache.over(*torch.randn(2, 3, 2, 1, 6, 4, device="cuda"))
    flag = torch.zeros(2, dtype=torch.int32, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        for place, is_exact in enumerate((True, False)):
            held = hold_row(cache, 1, 4, is_exact)
            cache.layers[2][1][1, :, 4] *= 1 + 2**-22
            flag[place].copy_(held())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert flag.tolist() == [1, 0]


def test_full_memory_is_told_and_the_next_call_works(tmp_path: Path) -> None:
    own = tiny_target("llama", hidden_size=64, intermediate_size=96, head_dim=16, max_position_embeddings=1 << 30)
    model = SpeculativeModel.from_pretrained(own.cuda(), write_head(tmp_path, hidden=64), drafter="reference")
    with pytest.raises(DeviceMemoryError, match="max_new_tokens"):
        model.generate(PROMPT, max_new_tokens=400_000_000)
    assert model.generate(PROMPT, **OPTIONS).token_ids[0] == own_answer(own)


def test_a_drafter_that_lands_on_the_reference_is_warned_of(tmp_path: Path) -> None:
    with pytest.warns(SpeedWarning, match="drafter='reference'"):
        _, model = loaded(tmp_path, hidden_act="relu")
    assert model.drafter.backend == "reference"
    assert model.with_tree(model.drafter.tree).drafter.reason == model.drafter.reason != "asked for"
