"""Loading of mixtures a tensor at a time: a matrix an expert, or all of a layer in one; refused by name; FP8, MXFP4."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from eagle_slim.runtime import SpeculativeModel
from eagle_slim.runtime.errors import SpeedWarning, TargetError
from eagle_slim.runtime.opening import target_files
from eagle_slim.runtime.target import fp8_loading, known
from eagle_slim.runtime.target.fp8_forms import AT_LOAD, Fp8Form, read_form
from eagle_slim.runtime.target.fp8_loading import load_by_tensor
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support.fp8_forms import FORMS, by_row
from support.tiny_models import plain_greedy, random_prompts, tiny_target, write_head
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

CPU = torch.device("cpu")
SIZES = {"hidden_size": 160, "moe_intermediate_size": 48, "decoder_sparse_step": 2, "intermediate_size": 192}
LAYER = "model.layers.1.mlp.experts"
ONE = f"{LAYER}.3.up_proj.weight"
Tensors = dict[str, Tensor]


def write(folder: Path, change: Callable[[Tensors], Any] = lambda _: None, **more: Any) -> nn.Module:
    """Write a mixture as `save_pretrained` does, a matrix an expert, then ``change`` its tensors; more settings."""
    model = tiny_target("qwen3moe", 3, **SIZES)
    model.save_pretrained(folder)  # type: ignore[operator]
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | more))
    return model


def joined(tensors: Tensors) -> None:
    """All experts of each layer in one tensor, as transformers holds them."""
    for layer in (1, 3):
        path = f"model.layers.{layer}.mlp.experts"
        parts = {
            name: torch.stack([tensors.pop(f"{path}.{expert}.{name}.weight") for expert in range(6)])
            for name in ("gate_proj", "up_proj", "down_proj")
        }
        tensors[f"{path}.gate_up_proj"] = torch.cat((parts["gate_proj"], parts["up_proj"]), 1)
        tensors[f"{path}.down_proj"] = parts["down_proj"]


@pytest.mark.parametrize("change", [lambda _: None, joined], ids=["a matrix an expert", "all in one"])
def test_both_forms_are_read_as_they_are(tmp_path: Path, change: Any) -> None:
    expected = write(tmp_path, change)
    config = target_files.load_target_config(tmp_path, None, True)
    loaded = target_files.load_target(tmp_path, torch.float32, CPU, None, True, config)
    assert loaded.state_dict().keys() == expected.state_dict().keys()
    for name, tensor in expected.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    assert known.unfit_reason(loaded) is None
    assert not any(parameter.is_meta for parameter in loaded.parameters())


DAMAGE: dict[str, tuple[Callable[[Tensors], Any], str]] = {
    "missing": (lambda t: t.pop(ONE), rf"{ONE} is missing \(1 of "),
    "too many": (lambda t: t.update({f"{LAYER}.6.up_proj.weight": torch.ones(48, 160)}), rf"{LAYER}\.6\.up_proj"),
    "of another shape": (lambda t: t.update({ONE: torch.ones(48, 159)}), rf"{ONE} is F32 \[48, 159\]"),
    "NaN": (lambda t: t[ONE].fill_(torch.nan), f"{ONE} holds NaN"),
    "twice, in both forms": (
        lambda t: t.update({f"{LAYER}.down_proj": torch.ones(6, 160, 48)}),
        rf"{LAYER}\.0\.gate_proj\.weight is there twice",
    ),
    "router missing": (lambda t: t.pop("model.layers.3.mlp.gate.weight"), r"layers\.3\.mlp\.gate\.weight is missing"),
}


@pytest.mark.parametrize("form", [None, AT_LOAD], ids=["as stored", "fp8"])
@pytest.mark.parametrize("damage", DAMAGE)
def test_what_is_missing_or_too_many_is_refused_by_name(
    tmp_path: Path, damage: str, form: Fp8Form | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, named = DAMAGE[damage]
    write(tmp_path, change)
    if damage != "NaN":  # All else before anything is loaded.
        monkeypatch.setattr(fp8_loading, "safe_open", None)
    with pytest.raises(TargetError, match=named):
        load_by_tensor(tmp_path, target_files.load_target_config(tmp_path, None, True), form, torch.float32, CPU)


@pytest.mark.parametrize("change", [lambda _: None, joined], ids=["a matrix an expert", "all in one"])
def test_little_of_a_file_is_mapped_at_a_time(tmp_path: Path, change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was read counts as memory of the host until the file is closed."""
    write(tmp_path, change)
    read: list[list[int]] = []

    @contextmanager
    def noted(path: Path, framework: str) -> Iterator[Any]:
        sizes = list[int]()
        read.append(sizes)
        with safe_open(path, framework=framework) as file:
            yield SimpleNamespace(
                get_tensor=lambda name: (tensor := file.get_tensor(name), sizes.append(tensor.nbytes))[0]
            )

    monkeypatch.setattr(fp8_loading, "safe_open", noted)
    monkeypatch.setattr(fp8_loading, "_MAPPED_BYTES", most := 200_000)
    load_by_tensor(tmp_path, target_files.load_target_config(tmp_path, None, True), None, torch.float32, CPU)
    assert sum(map(sum, read)) == sum(each.nbytes for each in load_file(tmp_path / "model.safetensors").values())
    assert all(len(sizes) == 1 or sum(sizes) <= most for sizes in read)
    assert any(len(sizes) > 1 for sizes in read)


def test_an_expert_in_two_shards_is_refused_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    save_file(tensors, tmp_path / "a.safetensors")
    save_file({ONE: tensors[ONE]}, tmp_path / "b.safetensors")
    index = {"weight_map": dict.fromkeys(tensors, "a.safetensors") | {ONE: "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    monkeypatch.setattr(fp8_loading, "safe_open", None)
    with pytest.raises(TargetError, match=rf"b\.safetensors: {ONE} is there twice, in a\.safetensors, too"):
        load_by_tensor(tmp_path, target_files.load_target_config(tmp_path, None, True), None, torch.float32, CPU)


def check_tokens(tmp_path: Path, loaded: nn.Module, dequantised: nn.Module) -> None:
    model = SpeculativeModel.from_pretrained(loaded, write_head(tmp_path / "head", hidden=160))
    prompts = random_prompts([7, 13])
    expected = [plain_greedy(dequantised, prompt, 8) for prompt in prompts]
    assert list(model.generate(prompts, max_new_tokens=8).token_ids) == expected
    assert model.target.backend.name == "fused"
    # Its own generate dequantises at every use.
    assert plain_greedy(loaded, prompts[0], 8) == expected[0]


def rounded(tensor: Tensor, quantise: Callable[[Tensor], Any]) -> Tensor:
    """The dequantised matrices; of experts each by itself."""
    if tensor.dim() == 2:
        return quantise(tensor)[2]  # type: ignore[no-any-return]
    halves = tensor.chunk(2, 1) if tensor.shape[1] == 96 else (tensor,)
    return torch.cat([torch.stack([quantise(each)[2] for each in half]) for half in halves], 1)


@pytest.mark.parametrize("change", [lambda _: None, joined], ids=["a matrix an expert", "all in one"])
def test_experts_are_quantised_while_they_are_loaded(tmp_path: Path, change: Any) -> None:
    expected = write(tmp_path / "target", change)
    for name, weight in expected.state_dict().items():
        if ".layers." in name and ("proj.weight" in name or ".experts." in name):
            weight.copy_(rounded(weight, by_row))
    config = target_files.load_target_config(tmp_path / "target", None, True)
    check_tokens(tmp_path, load_by_tensor(tmp_path / "target", config, AT_LOAD, torch.float32, CPU), expected)


@pytest.mark.parametrize("form", ["fp8, blocks", "compressed-tensors, rows"])
def test_a_published_form_has_the_tokens_of_its_dequantised_model(tmp_path: Path, form: str) -> None:
    settings, quantise, scale = FORMS[form]

    def publish(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith("proj.weight")]:
            values, scales, _ = quantise(tensors[name])
            tensors |= {name: values, name.replace("weight", scale): scales}

    expected = write(tmp_path / "target", publish, quantization_config=settings)
    for name, weight in expected.state_dict().items():
        if ".layers." in name and ("proj.weight" in name or ".experts." in name):
            weight.copy_(rounded(weight, partial(quantise)))
    config = target_files.load_target_config(tmp_path / "target", None, True)
    found = read_form(config.quantization_config, "here")
    check_tokens(tmp_path, load_by_tensor(tmp_path / "target", config, found, torch.float32, CPU), expected)


def test_experts_in_fp8_and_in_a_float_type_are_refused_by_name(tmp_path: Path) -> None:
    settings, quantise, scale = FORMS["fp8, blocks"]

    def publish(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith("proj.weight") and name != ONE]:
            values, scales, _ = quantise(tensors[name])
            tensors |= {name: values, name.replace("weight", scale): scales}

    write(tmp_path, publish, quantization_config=settings)
    config = target_files.load_target_config(tmp_path, None, True)
    form = read_form(config.quantization_config, "here")
    with pytest.raises(TargetError, match=rf"{LAYER}\.0\.gate_proj\.weight is in FP8, but not all matrices of {LAYER}"):
        load_by_tensor(tmp_path, config, form, torch.float32, CPU)


def test_an_adapter_beside_a_mixture_is_left_to_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    found = model, {"missing_keys": [], "mismatched_keys": [], "unexpected_keys": []}
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **options: found)
    for has_peft in (True, False):
        monkeypatch.setattr(transformers.utils, "is_peft_available", lambda has_peft=has_peft: has_peft)
        with nullcontext() if has_peft else pytest.raises(TargetError, match="needs the package peft"):
            assert target_files.load_target(tmp_path, torch.float32, CPU, None, True) is model


OSS_SIZES = {"hidden_size": 160, "intermediate_size": 64, "vocab_size": 24}
OSS_LAYER = "model.layers.2.mlp.experts"


def write_gpt_oss(folder: Path, change: Callable[[Tensors], Any] = lambda _: None, is_packed: bool = True) -> nn.Module:
    """Write gpt-oss as published, in bf16 and without a dtype in config.json, and return its dequantised model."""
    model: Any = tiny_target("gptoss", 3, **OSS_SIZES).bfloat16()
    tensors = {name: tensor.contiguous().clone() for name, tensor in model.state_dict().items()}
    for path in [name for name in tensors if is_packed and name.endswith(("experts.gate_up_proj", "down_proj"))]:
        count, columns, rows = tensors.pop(path).shape
        blocks = torch.randint(256, (count, rows, columns // 32, 16)).to(torch.uint8)
        scales = torch.randint(120, 123, blocks.shape[:-1]).to(torch.uint8)
        tensors |= {f"{path}_blocks": blocks, f"{path}_scales": scales}
        model.get_parameter(path).data = convert_moe_packed_tensors(blocks, scales)
    change(tensors)
    model.config.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    settings = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}
    config = {name: value for name, value in config.items() if name not in ("dtype", "torch_dtype")}
    (folder / "config.json").write_text(json.dumps(config | (settings if is_packed else {})))
    save_file(tensors, folder / "model.safetensors")
    return model.float()  # type: ignore[no-any-return]


def load_gpt_oss(folder: Path, dtype: torch.dtype | None = torch.float32, asked: str = "auto") -> Any:
    config = target_files.load_target_config(folder, None, True)
    form = target_files.choose_form(folder, config, asked, dtype, torch.device("meta"), None, True)
    return load_by_tensor(folder, config, form, dtype, CPU)


@pytest.mark.filterwarnings("ignore::eagle_slim.runtime.errors.SpeedWarning")
def test_mxfp4_has_the_tokens_of_its_dequantised_model(tmp_path: Path) -> None:
    expected = write_gpt_oss(tmp_path / "target")
    loaded = load_gpt_oss(tmp_path / "target")
    check_tokens(tmp_path, loaded, expected)
    with pytest.warns(SpeedWarning, match=r"On the cpu experts are unpacked .* Mxfp4Config\(dequantize=True\)"):
        model = SpeculativeModel.from_pretrained(loaded, tmp_path / "head")
    assert "experts in MXFP4 as published, all else in float32" in model.target.backend.reason
    half = 6 * 160 * 64 * 3 // 2  # bytes of a layer's numbers, beside a byte for 32 of them
    read = sum(weight.nbytes for weight in (*loaded.model.layers.parameters(), loaded.lm_head.weight))
    scales = 4 * (-(-160 // 128) * 6 * 128 + 6 * 160)
    assert model.target.weight_bytes == read + 4 * ((half + scales) - (half + scales) * 4 // 6)


def test_gpt_oss_in_bf16_is_read_as_it_is(tmp_path: Path) -> None:
    expected = write_gpt_oss(tmp_path / "target", is_packed=False)
    loaded = load_gpt_oss(tmp_path / "target", None)
    assert loaded.dtype == loaded.config.dtype == torch.bfloat16
    for name, tensor in expected.state_dict().items():
        assert torch.equal(loaded.state_dict()[name].float(), tensor), name
    assert known.unfit_reason(loaded) is None


OSS_DAMAGE: dict[str, tuple[Callable[[Tensors], Any], str]] = {
    "missing": (lambda t: t.pop(f"{OSS_LAYER}.down_proj_blocks"), rf"{OSS_LAYER}\.down_proj_blocks is missing \(1 of "),
    "an expert missing": (
        lambda t: t.update({f"{OSS_LAYER}.gate_up_proj_blocks": torch.zeros(5, 128, 5, 16, dtype=torch.uint8)}),
        rf"{OSS_LAYER}\.gate_up_proj_blocks is U8 \[5, 128, 5, 16\], expected U8 \[6, 128, 5, 16\]",
    ),
    "in both forms": (
        lambda t: t.update({f"{OSS_LAYER}.down_proj": torch.ones(6, 64, 160)}),
        r"down_proj is not a tensor",
    ),
    "too large": (
        lambda t: t[f"{OSS_LAYER}.down_proj_scales"][3, 1, 1].fill_(129),
        r"down_proj_scales has a scale above 2, .* Mxfp4Config",
    ),
}


@pytest.mark.parametrize("damage", OSS_DAMAGE)
def test_damaged_mxfp4_is_refused_by_name(tmp_path: Path, damage: str) -> None:
    change, named = OSS_DAMAGE[damage]
    write_gpt_oss(tmp_path, change)
    with pytest.raises(TargetError, match=named):
        load_gpt_oss(tmp_path)


def test_gpt_oss_is_not_quantised_again(tmp_path: Path) -> None:
    write_gpt_oss(tmp_path)
    with pytest.raises(TargetError, match="gpt-oss has no forward for weights in FP8"):
        load_gpt_oss(tmp_path, asked="fp8")
