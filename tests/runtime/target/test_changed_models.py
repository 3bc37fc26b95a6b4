"""A model that was changed, before it was loaded and between two calls, answers as its own ``generate`` does.

Every way of `support.changed_models` runs fused, through transformers' forward, or is refused, as its line there says.
"""

import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from eagle_slim.convert.heads.open import open_head
from eagle_slim.runtime import Drafter, SpeculativeModel, TreeConfig, UnsupportedModelError
from eagle_slim.runtime.drafter.weights import choose_draft_ids, load_head_weights
from eagle_slim.runtime.errors import SpeedWarning, UsageError
from eagle_slim.runtime.target import fused
from eagle_slim.runtime.target.wrapper import TargetModel
from support import changed_models
from support.changed_models import CHANGES, FUSED, OUTCOMES, REFUSED, STEERED, UNCOUNTED, PeftStandIn, lora, steer
from support.raising import raises, raises_with
from support.sweeps import sweep
from support.tiny_models import SIZES, plain_greedy, random_prompts, tiny_target, widen, write_head
from torch import nn
from transformers import PhiConfig, PhiForCausalLM, PhimoeConfig, PhimoeForCausalLM

pytestmark = [
    pytest.mark.filterwarnings("ignore::eagle_slim.runtime.errors.AcceptanceWarning"),
    pytest.mark.filterwarnings("ignore::eagle_slim.runtime.errors.SpeedWarning"),
]
PROMPT = random_prompts([12])[0]
QUICK = CHANGES.keys() - {"compiled in place", "compiled layer"}
NEW = 8


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_head(tmp_path_factory.mktemp("head"))


@pytest.fixture
def own() -> Any:
    return tiny_target("llama")


@pytest.fixture(autouse=True)
def _fused_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "FUSED_ON", ("cpu",))


def over(model: Any, head: Path, backend: str = "auto") -> SpeculativeModel:
    opened = open_head(head)
    target = TargetModel(model, (2, 3, 3), backend)
    weights = load_head_weights(opened, target, choose_draft_ids(opened, None, None))
    return SpeculativeModel(target, Drafter(weights, TreeConfig(depth=2, top_k=2, total_tokens=5)))


def answer(model: SpeculativeModel, prompt: list[int] = PROMPT, **options: Any) -> tuple[list[int], str]:
    output = model.generate(prompt, max_new_tokens=NEW, ignore_eos=True, **options)
    return output.token_ids[0], output.stats.path


def own_answer(model: Any, prompt: list[int] = PROMPT) -> list[int]:
    return plain_greedy(model, prompt, NEW, eos=None)


@cache
def unchanged_answer() -> list[int]:
    return own_answer(tiny_target("llama"))


@pytest.fixture
def change(request: pytest.FixtureRequest) -> Iterator[Any]:
    """The name of a change, and what makes it; what is global of it is undone afterwards."""
    with ExitStack() as stack:
        yield request.param, lambda model: CHANGES[request.param](model, stack)
    torch._dynamo.reset()


def check(model: SpeculativeModel, own: Any, expected: str) -> None:
    if expected == REFUSED:
        with pytest.raises((UnsupportedModelError, UsageError)):
            answer(model)
        return
    tokens, path = answer(model, reuse_prefix=True)
    assert tokens == own_answer(own)
    assert f"target {'fused' if expected == FUSED else 'transformers'} (" in path
    assert expected == FUSED or expected in path


@pytest.mark.parametrize("change", sweep(CHANGES, *QUICK), indirect=True)
def test_a_model_changed_before_loading(own: Any, change: Any, head: Path) -> None:
    name, act = change
    act(own)
    if OUTCOMES.get(name) == REFUSED:
        with pytest.raises(UnsupportedModelError):
            answer(over(own, head))
        return
    check(over(own, head), own, OUTCOMES.get(name, FUSED))


@pytest.mark.parametrize("change", sweep(CHANGES, *QUICK, "compiled layer"), indirect=True)
def test_a_model_changed_between_two_calls(own: Any, change: Any, head: Path) -> None:
    name, act = change
    model = over(own, head)
    before, path = answer(model)
    assert before == unchanged_answer()
    assert "target fused" in path
    act(own)
    if name in UNCOUNTED:
        model.refresh()
    check(model, own, REFUSED if name in changed_models.REFUSED_BETWEEN_CALLS else OUTCOMES.get(name, FUSED))


def test_an_explicit_fused_is_refused_by_name(own: Any, head: Path) -> None:
    lora("mlp.up_proj")(own)
    with raises_with(UnsupportedModelError, "target_backend", "model.layers.0.mlp.up_proj is a LoraLinear"):
        over(own, head, "fused")


LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"hidden_act": "gelu"}, "its hidden_act is gelu"),
        ({"head_dim": 258}, "its head_dim is 258"),
        ({"sliding_window": 64}, "its configuration has a sliding window, which Llama's layers do not read"),
        ({"rope_parameters": LONGROPE}, "longrope RoPE changes its frequencies with the length"),
    ],
    ids=lambda value: None if isinstance(value, str) else next(iter(value)),
)
@pytest.mark.filterwarnings("ignore::eagle_slim.runtime.errors.TargetWarning")
def test_a_configuration_that_the_fused_forward_does_not_compute(
    options: dict[str, Any], reason: str, head: Path
) -> None:
    own = tiny_target("llama", **options)
    tokens, path = answer(over(own, head))
    assert tokens == own_answer(own)
    assert f"target transformers ({reason})" in path


@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2", "qwen3"])
def test_each_family_is_fused_and_a_changed_window_or_scaling_is_not(kind: str, head: Path) -> None:
    own = tiny_target(kind)
    model = over(own, head)
    assert model.target.backend.name == "fused"
    attention: Any = own.model.layers[1].self_attn  # type: ignore[union-attr, index]
    attention.scaling *= 2
    if hasattr(attention, "sliding_window"):
        attention.sliding_window = 3
    tokens, path = answer(model)
    assert tokens == own_answer(own)
    assert "target transformers (model.layers.1.self_attn." in path


@pytest.mark.parametrize("noise", ["dropout", "experts"])
def test_a_model_in_training_answers_without_noise(head: Path, noise: str) -> None:
    torch.manual_seed(0)
    target: Any = PhiForCausalLM(PhiConfig(**SIZES, resid_pdrop=0.5, embd_pdrop=0.5, attention_dropout=0.5)).eval()
    if noise == "experts":
        sizes = {**SIZES, "initializer_range": 0.3}
        target = PhimoeForCausalLM(PhimoeConfig(**sizes, num_local_experts=4, input_jitter_noise=0.5)).eval()
    widen(target.named_parameters())
    wanted = plain_greedy(target, [3, 4, 5], 12, eos=None)
    model = SpeculativeModel.from_pretrained(target.train(), head)
    for _ in range(2):
        assert model.generate([3, 4, 5], max_new_tokens=12, ignore_eos=True).token_ids == [wanted]
        assert target.training


def test_adapters_are_switched_scaled_and_taken_away_between_calls(own: Any, head: Path) -> None:
    model = over(own, head)
    plain, _ = answer(model, reuse_prefix=True)
    lora("self_attn.v_proj")(own)
    seen = [plain]

    def check_now() -> None:
        output = model.generate(PROMPT, max_new_tokens=NEW, ignore_eos=True, reuse_prefix=True)
        seen.append(output.token_ids[0])
        assert seen[-1] == own_answer(own)
        assert output.stats.num_reused_tokens == 0
        assert model.generate(PROMPT, max_new_tokens=NEW, ignore_eos=True, reuse_prefix=True).stats.num_reused_tokens

    check_now()
    projections: list[changed_models.LoraLinear] = [layer.self_attn.v_proj for layer in own.model.layers]
    for projection in projections:
        projection.active = "other"
    check_now()
    for projection in projections:
        projection.scaling["other"] = -1.0
    check_now()
    for layer in own.model.layers:
        layer.self_attn.v_proj = layer.self_attn.v_proj.base_layer
    check_now()
    assert seen[-1] == plain
    assert len({tuple(tokens) for tokens in seen}) == 4
    assert model.target.backend.name == "fused"


@pytest.mark.parametrize("tapped", [(2, 3, 3), None], ids=["eagle3", "eagle1"])
def test_a_wrapper_of_a_whole_model_runs_as_the_wrapper_does(own: Any, tapped: Any, tmp_path: Path) -> None:
    lora("self_attn.v_proj")(own)
    written = write_head(tmp_path / "head", kind="eagle3" if tapped else "eagle")
    for wrapped in (PeftStandIn(own), torch.compile(own, backend="eager")):
        model = SpeculativeModel.from_pretrained(wrapped, written, tree=TreeConfig.of(2, 2))
        assert answer(model)[0] == own_answer(own)


def test_what_is_no_target_is_refused(own: Any, head: Path) -> None:
    wrapped = PeftStandIn(own)
    wrapped.peft_config["default"].is_prompt_learning = True
    for other in (nn.DataParallel(own), own.model.layers[0], own.model, wrapped):
        with pytest.raises(UnsupportedModelError):
            SpeculativeModel.from_pretrained(other, head)
    for target, draft, named in ((own.config, head, "target"), (own, own.config, "head")):
        with raises(UsageError, option=named):
            SpeculativeModel.from_pretrained(target, draft)


def test_what_keeps_a_known_model_from_being_fused_is_warned_of_once(own: Any, head: Path) -> None:
    own.model.norm.register_forward_hook(lambda *_: None)
    with pytest.warns(SpeedWarning, match=r"model\.norm has a forward hook"):
        model = over(own, head)
    with warnings.catch_warnings():
        warnings.simplefilter("error", SpeedWarning)
        answer(model)
        own.config.pad_token_id = 1  # looked at anew
        answer(model)


def test_a_recorder_of_hidden_states_is_no_change(own: Any, head: Path) -> None:
    own(torch.tensor([PROMPT]), output_hidden_states=True)
    assert over(own, head).target.backend.name == "fused"


def test_tensors_of_inference_mode_have_no_counter_and_run(head: Path) -> None:
    usual: Any = tiny_target("llama")
    with torch.inference_mode():
        own: Any = tiny_target("llama")
    model = over(own, head)
    assert answer(model, reuse_prefix=True)[0] == own_answer(usual)
    for each in (own, usual):
        with torch.inference_mode():
            each.model.layers[1].mlp.down_proj.weight.mul_(-3)
    assert answer(model, reuse_prefix=True)[0] == own_answer(usual)


def test_what_no_counter_shows_is_followed_after_refresh(own: Any, head: Path) -> None:
    """Also beside a sequence that takes over nothing, with prompts that wait, and with tokens chosen on the host."""
    model = over(own, head)
    prompts = random_prompts([12, 9, 14, 7])
    options: dict[str, Any] = {"max_new_tokens": NEW, "ignore_eos": True, "reuse_prefix": True, "max_slots": 2}
    model.generate(prompts[:2], **options)
    for place, host in enumerate((False, True)):
        own.model.layers[place].self_attn.v_proj.weight.data *= -1.5
        model.refresh()
        processed = {"logits_processor": [lambda _ids, scores: scores]} if host else {}
        output = model.generate(prompts, **options, **processed)
        assert output.token_ids == [own_answer(own, prompt) for prompt in prompts]
        assert output.stats.num_reused_tokens == 0
    assert model.generate(prompts[2:], **options).stats.num_reused_tokens > 0


@pytest.mark.parametrize("where", sweep(STEERED, "attribute", "list in a closure"))
def test_a_plain_tensor_that_a_forward_reads_is_followed(own: Any, where: str, head: Path) -> None:
    model = over(own, head)
    replace, read = STEERED[where](own.model.layers[1].mlp, torch.zeros(32))
    seen = [answer(model, reuse_prefix=True)[0]]
    assert seen == [unchanged_answer()]
    for act in (replace, lambda new: read().copy_(new), replace):
        act(torch.linspace(-8, 8, 32).roll(5 * len(seen)))
        output = model.generate(PROMPT, max_new_tokens=NEW, ignore_eos=True, reuse_prefix=True)
        seen.append(output.token_ids[0])
        assert seen[-1] == own_answer(own)
        assert seen[-1] != seen[-2]
        assert output.stats.num_reused_tokens == 0


def test_a_plain_tensor_that_is_added_or_taken_away_is_followed(own: Any, head: Path) -> None:
    mlp = own.model.layers[1].mlp
    steer(mlp, lambda self: getattr(self, "vector", torch.zeros(32)))
    model = over(own, head)
    assert answer(model, reuse_prefix=True)[0] == unchanged_answer()
    mlp.vector = torch.linspace(-8, 8, 32)
    assert answer(model, reuse_prefix=True)[0] == own_answer(own) != unchanged_answer()
    del mlp.vector
    assert answer(model, reuse_prefix=True)[0] == unchanged_answer()


@pytest.mark.parametrize("kind", [list, deque])
def test_what_a_forward_leaves_behind_is_no_change(own: Any, kind: Callable[[Any], Any], head: Path) -> None:
    mlp, states, counts = own.model.layers[1].mlp, kind([None]), {"calls": 0}

    def record(_module: nn.Module, _args: Any, output: torch.Tensor) -> None:
        states.append(output)
        counts["calls"] += 1
        mlp.last = output

    mlp.register_forward_hook(record)
    model = over(own, head)
    for is_reused in (False, True, True):
        output = model.generate(PROMPT, max_new_tokens=NEW, ignore_eos=True, reuse_prefix=True)
        assert (output.stats.num_reused_tokens > 0) is is_reused
        assert len(states) - 1 == counts["calls"] > 0


def test_what_a_cached_function_keeps_and_very_many_entries_are_not_compared(own: Any, head: Path) -> None:
    cached, many = cache(abs), deque(range(1 << 17))
    own.model.layers[1].mlp.held = cached, many
    model = over(own, head)
    answer(model, reuse_prefix=True)
    many.append(cached(-1))
    output = model.generate(PROMPT, max_new_tokens=NEW, ignore_eos=True, reuse_prefix=True)
    assert output.stats.num_reused_tokens > 0


def test_what_compares_itself_with_its_own_kind_alone_is_replaced(own: Any, head: Path) -> None:
    class Scale:
        def __init__(self, times: float) -> None:
            self.times = times

        def __eq__(self, other: Any) -> bool:
            return bool(self.times == other.times)

    mlp = own.model.layers[1].mlp
    steer(mlp, lambda self: torch.zeros(32) if self.scale is None else self.scale.times)
    mlp.scale = Scale(2.0)
    model = over(own, head)
    assert answer(model, reuse_prefix=True)[0] == own_answer(own) != unchanged_answer()
    mlp.scale = None
    assert answer(model, reuse_prefix=True)[0] == unchanged_answer()
