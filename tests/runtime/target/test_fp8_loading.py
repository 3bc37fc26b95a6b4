"""Targets with weights in FP8: quantised while they are loaded, and published in each form; what is refused by name."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from eagle_slim.runtime import EagleSlimError, TargetError, TreeConfig, UnsupportedModelError, UsageError
from eagle_slim.runtime.model import SpeculativeModel
from eagle_slim.runtime.opening import target_files
from eagle_slim.runtime.target.fp8_forms import AT_LOAD, Fp8Form, read_form
from eagle_slim.runtime.target.fp8_loading import fetch_target, load_by_tensor
from eagle_slim.runtime.target.wrapper import TargetModel
from safetensors.torch import load_file, save_file
from support.fp8_forms import FORMS, by_row, compressed
from support.heads import change_config
from support.hub_server import HubServer, connected
from support.sweeps import sweep
from support.tiny_models import plain_greedy, random_prompts, tiny_target, write_head
from torch import Tensor, nn

CPU = torch.device("cpu")
SIZES = {"hidden_size": 160, "intermediate_size": 192, "num_hidden_layers": 4, "head_dim": 40}
"""Blocks of 128 that are cut off on both sides."""


def write_target(folder: Path, kind: str = "llama", **overrides: Any) -> nn.Module:
    model = tiny_target(kind, **{**SIZES, **overrides})
    model.save_pretrained(folder)  # type: ignore[operator]
    return model


def publish(folder: Path, form: str, change: Callable[[dict[str, Tensor]], None] | None = None) -> nn.Module:
    """Write a checkpoint of a form, o_proj left out as in its float type; returns the dequantised model."""
    settings, quantise, scale = FORMS[form]
    model = write_target(folder, "qwen2")
    tensors, wide = load_file(folder / "model.safetensors"), model.state_dict()
    for name in [name for name in tensors if name.endswith("proj.weight") and "o_proj" not in name]:
        values, scales, wide[name] = quantise(tensors[name])
        tensors |= {name: values, name.replace("weight", scale): scales}
        if "k_proj" in name:
            tensors |= {name.replace("weight", each): torch.ones(1) for each in ("input_scale", "k_scale")}
    if change is not None:
        change(tensors)
    save_file(tensors, folder / "model.safetensors")
    change_config(folder, quantization_config=settings)
    model.load_state_dict(wide)
    return model


def load(folder: Path, form: Fp8Form | None = None) -> nn.Module:
    """Load in float32 on the CPU, which `from_pretrained` refuses: tokens are then decided clearly."""
    config = target_files.load_target_config(folder, None, True)
    form = form or read_form(getattr(config, "quantization_config", None), str(folder))
    assert form is not None
    return load_by_tensor(fetch_target(folder, None, True), config, form, torch.float32, CPU)


def check_tokens(tmp_path: Path, loaded: nn.Module, dequantised: nn.Module) -> SpeculativeModel:
    head = write_head(tmp_path / "head", hidden=160)
    model = SpeculativeModel.from_pretrained(loaded, head, tree=TreeConfig(3, 3, 8))
    prompts = random_prompts([7, 13])
    expected = [plain_greedy(dequantised, prompt, 12) for prompt in prompts]
    for speculative in (True, False):
        assert list(model.generate(prompts, max_new_tokens=12, speculative=speculative).token_ids) == expected
    # Its own generate dequantises at every use.
    assert plain_greedy(loaded, prompts[0], 12) == expected[0]
    return model


@pytest.mark.parametrize("kind", sweep(["llama", "qwen2", "qwen3"], "llama"))
def test_a_target_is_quantised_while_it_is_loaded(tmp_path: Path, kind: str) -> None:
    options = {"tie_word_embeddings": True} if kind == "llama" else {}
    expected = write_target(tmp_path / "target", kind, **options)
    for name, weight in expected.state_dict().items():
        if ".layers." in name and name.endswith("proj.weight"):
            weight.copy_(by_row(weight)[2])
    model = check_tokens(tmp_path, load(tmp_path / "target", AT_LOAD), expected)
    matrices = sum(w.numel() for name, w in expected.state_dict().items() if ".layers." in name and w.dim() == 2)
    rows = sum(len(w) for name, w in expected.state_dict().items() if ".layers." in name and w.dim() == 2)
    rest = sum(w.numel() for name, w in expected.state_dict().items() if ".layers." in name and w.dim() == 1)
    assert model.target.weight_bytes == matrices + 4 * (rows + rest + expected.lm_head.weight.numel())  # type: ignore[union-attr, operator]
    told = "weights in FP8 quantised while loading, one scale a row, activations in float32"
    assert told in model.generate([[3]], max_new_tokens=1).stats.path


@pytest.mark.parametrize("form", sweep(FORMS, "fp8, blocks"))
def test_a_published_form_has_the_tokens_of_its_dequantised_model(tmp_path: Path, form: str) -> None:
    dequantised = publish(tmp_path / "target", form)
    model = check_tokens(tmp_path, load(tmp_path / "target"), dequantised)
    path = model.generate([[3]], max_new_tokens=1).stats.path
    assert FORMS[form][0]["quant_method"] in path
    assert "8 scales of activations and cache not used" in path


def test_shards_of_a_repository_may_part_what_is_multiplied_at_once(tmp_path: Path) -> None:
    expected = publish(tmp_path / "target", "compressed-tensors, rows")
    tensors = load_file(tmp_path / "target" / "model.safetensors")
    (tmp_path / "target" / "model.safetensors").unlink()
    shards = {name: f"model-{index % 2 + 1}-of-2.safetensors" for index, name in enumerate(tensors)}
    for shard in set(shards.values()):
        save_file({name: each for name, each in tensors.items() if shards[name] == shard}, tmp_path / "target" / shard)
    (tmp_path / "target" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    files = {path.name: path.read_bytes() for path in (tmp_path / "target").iterdir()}
    with HubServer() as hub, connected(hub, tmp_path / "home"):
        hub.add_model("someone/fp8", files)
        folder = fetch_target("someone/fp8", None, offline=False)
        assert fetch_target("someone/fp8", None, offline=True) == folder
    check_tokens(tmp_path, load(folder), expected)


Q, LAYER = "model.layers.0.self_attn.q_proj.weight", "model.layers.1."
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def widen_one(tensors: dict[str, Tensor]) -> None:
    del tensors[f"{LAYER}mlp.up_proj.weight_scale"]
    tensors[f"{LAYER}mlp.up_proj.weight"] = torch.ones(192, 160)


DAMAGE: dict[str, tuple[str, Callable[[dict[str, Tensor]], Any], str]] = {
    "scale missing": ("fp8, blocks", lambda t: t.pop(f"{Q}_scale_inv"), f"{Q}_scale_inv is missing"),
    "scale a row missing": ("fbgemm", lambda t: t.pop(f"{Q}_scale"), f"{Q}_scale is missing"),
    "scale of another shape": ("fp8, blocks", lambda t: t.update({f"{Q}_scale_inv": torch.ones(2, 1)}), r"\[2, 1\]"),
    "scale a row, of one too few": ("fbgemm", lambda t: t.update({f"{Q}_scale": torch.ones(159)}), r"\[159\]"),
    "scale NaN": ("fbgemm", lambda t: t[f"{Q}_scale"].fill_(torch.nan), f"{Q}_scale holds NaN"),
    "value NaN": ("fbgemm", lambda t: t[Q][3].view(torch.uint8).fill_(0xFF), f"{Q} holds NaN"),
    "e5m2": ("fbgemm", lambda t: t.update({Q: t[Q].float().to(torch.float8_e5m2)}), "F8_E5M2"),
    "infinite norm": ("fbgemm", lambda t: t["model.norm.weight"].fill_(torch.inf), "model.norm.weight"),
    "norm missing": ("fbgemm", lambda t: t.pop("model.norm.weight"), "model.norm.weight is missing"),
    "tensor too many": ("fbgemm", lambda t: t.update(surplus=torch.ones(1)), "surplus"),
    "embedding of another shape": ("fbgemm", lambda t: t.update({EMBEDDING: torch.ones(3, 160)}), r"\[3, 160\]"),
    "FP8 and a float type in one product": ("fbgemm", widen_one, f"{LAYER}mlp.gate_proj"),
    "LM head in FP8": ("fbgemm", lambda t: t.update({HEAD: t[HEAD].to(torch.float8_e4m3fn)}), HEAD),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_refused_by_the_name_of_file_and_tensor(tmp_path: Path, damage: str) -> None:
    form, change, named = DAMAGE[damage]
    publish(tmp_path, form, change)
    with pytest.raises(TargetError, match=named) as error:
        load(tmp_path)
    assert str(tmp_path) in str(error.value)


OTHERS: dict[str, dict[str, Any]] = {
    "quant_method": {"quant_method": "gptq", "bits": 4},
    "num_bits": compressed("channel", num_bits=4),
    "type": compressed("channel", type="int"),
    "symmetric": compressed("channel", symmetric=False),
    "strategy": compressed("group", group_size=128),
    "block_structure": compressed("block", block_structure=[64, 64]),
    "transform_config": {**compressed("tensor"), "transform_config": {"config_groups": {"u": {}}}},
    "sparsity_config.format": {**compressed("tensor"), "sparsity_config": {"format": "sparse-24-bitmask"}},
    "without weights": {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"input_activations": {}}}},
    "weight_block_size": {"quant_method": "fp8", "weight_block_size": [32, 32]},
    "scale_fmt": {**FORMS["fp8, blocks"][0], "scale_fmt": "ue8m0"},
    "quant_algo": {"quantization": {"quant_algo": "NVFP4", "group_size": 16}},
    "surprise": {"quant_method": "fbgemm_fp8", "surprise": 1},
    "config_groups": {"quant_method": "compressed-tensors", "config_groups": ["FP8"]},
    "'fp8'": {"quant_method": ["fp8"]},
}


@pytest.mark.parametrize("named", OTHERS)
def test_another_quantisation_is_refused_by_name(named: str) -> None:
    with pytest.raises(TargetError, match=named):
        read_form(OTHERS[named], "somewhere")


@pytest.mark.parametrize(
    "settings",
    [
        None,
        {},
        {"quant_method": "compressed-tensors", "format": "dense", "kv_cache_scheme": {"num_bits": 8}},
        {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8", "kv_cache_quantized_layers": {"0": "FP8"}}},
    ],
)
def test_what_quantises_no_weight_is_none(settings: dict[str, Any] | None) -> None:
    assert read_form(settings, "somewhere") is None


def test_a_configuration_of_modelopt_may_name_it_as_a_library() -> None:
    assert read_form({"quant_library": "modelopt", "quant_algo": "FP8"}, "") == Fp8Form("modelopt", "tensor")


def test_modelopts_own_file_is_found_beside_a_configuration_that_does_not_say(tmp_path: Path) -> None:
    write_target(tmp_path)
    config = target_files.load_target_config(tmp_path, None, True)
    settings = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(settings))
    with HubServer() as hub, connected(hub, tmp_path / "home"):
        hub.add_model("nvidia/fp8", {"hf_quant_config.json": json.dumps(settings).encode()})
        hub.add_model("someone/plain", {"config.json": b"{}"})
        for target in (tmp_path, "nvidia/fp8"):
            with pytest.raises(TargetError, match=r"published in FP8.*modelopt.*sm_89"):
                target_files.choose_form(target, config, "auto", None, CPU, None, False)
        for offline in (False, True):
            assert target_files.choose_form("someone/plain", config, "auto", None, CPU, None, offline) is None


@pytest.mark.parametrize(
    ("options", "named"), [({}, "sm_89"), ({"dtype": "float32"}, "float32"), ({"target_weights": "int8"}, "'int8'")]
)
def test_the_option_is_refused_where_nothing_runs_it(options: dict[str, Any], named: str) -> None:
    with pytest.raises(UsageError, match=f"target_weights.*{named}"):
        SpeculativeModel.from_pretrained(device="cpu", **{"target_weights": "fp8", **options})


def test_what_only_transformers_runs_is_refused(tmp_path: Path) -> None:
    write_target(tmp_path)
    model = load(tmp_path, AT_LOAD)
    with pytest.raises(UnsupportedModelError, match="asked for"):
        TargetModel(model, None, "transformers")
    target = TargetModel(model, None, "auto")
    model.model.layers[0].register_forward_hook(lambda *_: None)  # type: ignore[union-attr, index, operator]
    with pytest.raises(UnsupportedModelError, match="forward hook"):
        target.look()


def test_weights_of_another_format_are_refused_by_name(tmp_path: Path) -> None:
    write_target(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(TargetError, match=r"pytorch_model\.bin"):
        fetch_target(tmp_path, None, True)


@pytest.mark.parametrize("form", [None, AT_LOAD], ids=["in bfloat16", "in FP8"])
def test_unknown_positions_and_adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: Fp8Form | None) -> None:
    monkeypatch.setattr(target_files, "lacks_fp8", lambda _: None)
    monkeypatch.setattr(transformers.utils, "is_peft_available", lambda: False)
    write_target(tmp_path)
    config = target_files.load_target_config(tmp_path, None, True)
    config.rope_parameters = {"rope_type": "mrope"}
    with pytest.raises(TargetError, match="mrope"):
        target_files.load_target(tmp_path, torch.bfloat16, CPU, None, True, config, form)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(TargetError, match="adapter_config"):
        target_files.load_target(tmp_path, torch.bfloat16, CPU, None, True, config, form)


def test_columns_that_no_kernel_takes_are_refused(tmp_path: Path) -> None:
    write_target(tmp_path, intermediate_size=168)
    with pytest.raises(UnsupportedModelError, match="down_proj has 168 columns"):
        load(tmp_path, AT_LOAD)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("form", [None, "fp8, blocks", "compressed-tensors, matrices"])
def test_drafted_tokens_are_plain_ones_on_a_gpu(tmp_path: Path, form: str | None) -> None:
    if form is None:
        write_target(tmp_path / "target")
    else:
        publish(tmp_path / "target", form)
    head, weights = write_head(tmp_path / "head", hidden=160), "fp8" if form is None else "auto"
    options: dict[str, Any] = {"dtype": "bfloat16", "tree": TreeConfig(3, 3, 8), "target_weights": weights}
    model = SpeculativeModel.from_pretrained(tmp_path / "target", head, **options)
    prompts = random_prompts([70, 9, 1])
    output, plain = (model.generate(prompts, max_new_tokens=30, speculative=each) for each in (True, False))
    assert output.token_ids == plain.token_ids
    assert "weights in FP8" in output.stats.path
    assert output.stats.exactness is not None


def test_another_family_is_refused_by_name(tmp_path: Path) -> None:
    from transformers import GemmaConfig

    GemmaConfig(hidden_size=32, num_hidden_layers=1, vocab_size=24).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="GemmaForCausalLM"):
        load_by_tensor(tmp_path, target_files.load_target_config(tmp_path, None, True), AT_LOAD, torch.float32, CPU)


def test_a_tied_lm_head_that_differs_is_refused(tmp_path: Path) -> None:
    write_target(tmp_path, tie_word_embeddings=True)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    kept = copy.deepcopy(load(tmp_path, AT_LOAD).state_dict())
    assert torch.equal(kept["lm_head.weight"], kept["model.embed_tokens.weight"])
    tensors["lm_head.weight"][5, 3] += 1
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(EagleSlimError, match=r"lm_head\.weight differs"):
        load(tmp_path, AT_LOAD)
