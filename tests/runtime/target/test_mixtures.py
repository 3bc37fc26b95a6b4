"""Mixtures of experts: fused as they are, noticed when they change, and transformers' own forward for all else."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from eagle_slim.runtime import SpeculativeModel
from eagle_slim.runtime.settings import TreeConfig
from eagle_slim.runtime.step import plan, shapes
from eagle_slim.runtime.step.shapes import ShapeChooser
from eagle_slim.runtime.target import fused
from eagle_slim.runtime.target.wrapper import TargetModel
from support.tiny_models import plain_greedy, random_prompts, tiny_target, write_head
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

IGNORED = [f"ignore::eagle_slim.runtime.errors.{name}Warning" for name in ("Speed", "Acceptance")]
pytestmark = pytest.mark.filterwarnings(*IGNORED)
PROMPT = random_prompts([12])[0]
NEW = 8


@pytest.fixture(autouse=True)
def _fused_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "FUSED_ON", ("cpu",))


@pytest.fixture(params=["qwen3moe", "gptoss"])
def own(request: pytest.FixtureRequest) -> Any:
    return tiny_target(request.param, 3)


@pytest.fixture
def model(own: Any, tmp_path: Path) -> SpeculativeModel:
    return SpeculativeModel.from_pretrained(own, write_head(tmp_path / "head"), tree=TreeConfig(2, 2, 5))


def answer(model: SpeculativeModel, **options: Any) -> list[int]:
    tokens: list[int] = model.generate(PROMPT, max_new_tokens=NEW, ignore_eos=True, **options).token_ids[0]
    return tokens


def own_answer(own: Any) -> list[int]:
    return plain_greedy(own, PROMPT, NEW, eos=None)


class LoraExperts(nn.Module):
    """Adapted experts, as peft wraps them: the experts inside, an adapter beside one of them."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A, self.lora_B = nn.Parameter(torch.randn(2, 32)), nn.Parameter(torch.randn(32, 2))

    def forward(self, x: Any, picked: Any, weights: Any) -> Any:
        changed = (picked == 1).any(-1, keepdim=True) * (x @ self.lora_A.t() @ self.lora_B.t())
        return self.base_layer(x, picked, weights) + changed


def test_a_mixture_is_fused_and_reuses_prefixes(own: Any, model: SpeculativeModel) -> None:
    assert model.target.backend.name == "fused"
    width = own.model.layers[0].mlp.experts.down_proj.numel() // (6 * 32)
    experts = 6 * 3 * width * 32 * 4  # bytes of a layer's, of which a token reads two of six
    whole = sum(weight.nbytes for weight in (*own.model.layers.parameters(), own.lm_head.weight))
    assert model.target.weight_bytes == whole - 4 * experts * 4 // 6
    for speculative in (True, False):
        assert answer(model, speculative=speculative) == own_answer(own)
    first = model.generate(PROMPT, max_new_tokens=NEW, ignore_eos=True, reuse_prefix=True)
    again = model.generate(PROMPT, max_new_tokens=NEW, ignore_eos=True, reuse_prefix=True)
    assert first.token_ids == again.token_ids
    assert again.stats.num_reused_tokens > 0


def test_passes_of_a_mixture_are_of_few_rows_and_chunks_of_many(model: SpeculativeModel) -> None:
    """Shapes as a GPU chooses them, and times by rows, each of which may read other experts."""
    runs, costs = model.target.runs, model._decoders.costs
    assert runs.chunk_rows == (64, 512, 2048)
    gpu: Any = SimpleNamespace(device=torch.device("cuda"), runs=runs, exactness="rows are exact")
    decoders: Any = SimpleNamespace(tree=shapes.LARGE, eager_reason=None)
    chosen, _ = plan._choose_shapes(gpu, decoders, 1, None)
    assert chosen == (shapes.CHAIN, *(each for each in (*shapes.OF_MIXTURES, shapes.LARGE) if each != shapes.CHAIN))
    costs.add(None, 1, 100, 3.0)
    costs.add(shapes.CHAIN, 1, 100, 5.0)
    assert costs.guess(shapes.LARGE, 1, 100) == 62.0


def test_shapes_that_change_at_every_step_change_no_token(
    own: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = shapes.OF_MIXTURES
    monkeypatch.setattr(plan, "_choose_shapes", lambda *_: (every, "for a test"))
    monkeypatch.setattr(ShapeChooser, "next", lambda own, *_: every[own.steps.total() % len(every)])
    monkeypatch.setattr(ShapeChooser, "is_unmeasured", lambda *_: False)
    model, prompts = SpeculativeModel.from_pretrained(own, write_head(tmp_path / "head")), random_prompts([5, 9, 14])
    output = model.generate(prompts, max_new_tokens=20, ignore_eos=True)
    assert list(output.token_ids) == [plain_greedy(own, prompt, 20, eos=None) for prompt in prompts]
    assert all(f"{each.total_tokens} nodes" in output.stats.path for each in every if each is not None)


def test_sampled_answers_are_those_of_plain_decoding(model: SpeculativeModel) -> None:
    prompts = random_prompts([5, 9, 14])
    options: dict[str, Any] = {"max_new_tokens": NEW, "temperature": 1.0, "seed": [1, 2, 3], "ignore_eos": True}
    found = [model.generate(prompts, speculative=each, **options).token_ids for each in (True, False)]
    assert found[0] == found[1]


@pytest.mark.parametrize("name", ["router", "experts.gate_up_proj", "experts.down_proj"])
def test_weights_written_between_calls_are_followed(name: str, own: Any, model: SpeculativeModel) -> None:
    before = answer(model, reuse_prefix=True)
    mlp = own.model.layers[1].mlp
    router: Any = mlp.router if hasattr(mlp, "router") else mlp.gate
    weight = router.weight if name == "router" else mlp.get_parameter(name)
    with torch.no_grad():
        weight.copy_(weight.roll(1, 0) * -2)
    output = model.generate(PROMPT, max_new_tokens=NEW, ignore_eos=True, reuse_prefix=True)
    assert output.token_ids[0] == own_answer(own) != before
    assert output.stats.num_reused_tokens == 0
    assert model.target.backend.name == "fused"


def test_an_adapter_on_experts_is_noticed(own: Any, model: SpeculativeModel) -> None:
    before = answer(model)
    mlp = own.model.layers[1].mlp
    mlp.experts = LoraExperts(mlp.experts).eval()
    assert answer(model) == own_answer(own) != before
    assert "model.layers.1.mlp.experts" in model.target.backend.reason
    mlp.experts = mlp.experts.base_layer
    assert answer(model) == before
    assert model.target.backend.name == "fused"


@pytest.mark.parametrize(
    ("own", "path", "value"),
    [
        ("qwen3moe", "gate.top_k", 1),
        ("qwen3moe", "gate.norm_topk_prob", True),
        ("gptoss", "router.top_k", 1),
        ("gptoss", "experts.limit", 0.2),
        ("gptoss", "experts.alpha", 3.0),
    ],
    indirect=["own"],
)
def test_a_module_that_differs_from_its_configuration_is_not_fused(
    path: str, value: Any, own: Any, model: SpeculativeModel
) -> None:
    module, _, name = path.partition(".")
    setattr(own.model.layers[2].mlp.get_submodule(module), name, value)
    assert answer(model) == own_answer(own)
    assert f"model.layers.2.mlp.{path}" in str(model.target.backend)


def test_experts_run_by_a_function_of_someone_else_are_not_fused(
    own: Any, model: SpeculativeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = answer(model)
    functions = ALL_EXPERTS_FUNCTIONS._global_mapping
    monkeypatch.setitem(functions, "grouped_mm", lambda *given: -2 * functions["batched_mm"](*given))
    assert answer(model) == own_answer(own) != before
    assert "its experts are run by" in model.target.backend.reason


def test_other_mixtures_run_in_transformers_forward(tmp_path: Path) -> None:
    sizes = {"vocab_size": 24, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 4}
    config = MixtralConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, num_local_experts=4)
    other: Any = MixtralForCausalLM(config).eval()
    target = TargetModel(other, None, "auto")
    assert target.backend.name == "transformers"
    assert "MixtralForCausalLM is none of" in target.backend.reason
