"""On a GPU: a changed model is followed through graphs, one that no counter shows after `refresh`."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from eagle_slim.runtime import SpeculativeModel, TreeConfig
from eagle_slim.runtime.errors import DeviceMemoryError, SpeedWarning
from support.changed_models import CHANGES, OUTCOMES, STEERED, UNCOUNTED
from support.tiny_models import random_prompts, tiny_target, write_head

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::eagle_slim.runtime.errors.AcceptanceWarning"),
    pytest.mark.filterwarnings("ignore::eagle_slim.runtime.errors.SpeedWarning"),
]
PROMPT = random_prompts([70])[0]
OPTIONS: dict[str, Any] = {"max_new_tokens": 12, "ignore_eos": True, "reuse_prefix": True}
FOLLOWED = ["lora on q_proj", "lora on the LM head", "attention subclass", "patched class", "forward hook"]
FOLLOWED += ["parametrization", "load_state_dict", "load_state_dict, assign", "fused optimiser", "LM head's weight"]


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
    name = request.param
    with ExitStack() as stack:
        yield lambda own: CHANGES[name](own, stack), name not in OUTCOMES, name in UNCOUNTED


def test_a_changed_model_is_followed(change: Any, tmp_path: Path) -> None:
    act, is_fused, is_uncounted = change
    own, model = loaded(tmp_path)
    assert model.target.backend.name == "fused"
    assert model.generate(PROMPT, **OPTIONS).token_ids[0] == own_answer(own)
    act(own)
    own.cuda()  # adapters that were added on the host
    if is_uncounted:
        model.refresh()
    for is_reused in (False, True):
        output = model.generate(PROMPT, **OPTIONS)
        assert output.token_ids[0] == own_answer(own)
        assert f"target {'fused' if is_fused else 'transformers'} (" in output.stats.path
        assert (output.stats.num_reused_tokens > 0) is is_reused


@pytest.mark.parametrize("where", ["attribute", "closure of a hook"])
def test_a_plain_tensor_in_a_graph_is_followed(where: str, tmp_path: Path) -> None:
    own, model = loaded(tmp_path)
    replace, read = STEERED[where](own.model.layers[1].mlp, torch.zeros(64, device="cuda"))
    seen = [model.generate(PROMPT, **OPTIONS).token_ids[0]]
    for act in (replace, lambda new: read().copy_(new)):
        act(torch.linspace(-8, 8, 64, device="cuda").roll(len(seen)))
        seen.append(model.generate(PROMPT, **OPTIONS).token_ids[0])
        assert seen[-1] == own_answer(own)
        assert seen[-1] != seen[-2]


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
