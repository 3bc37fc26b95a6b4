import shutil
import warnings
from pathlib import Path

import pytest
import torch
import transformers
from eagle_slim.convert.sources.builtin import EMBEDDED_TARGET_REPO, embedded_target_folder
from eagle_slim.runtime import PairingError, SpeculativeModel, TreeConfig, open_head
from eagle_slim.runtime.errors import HeadWarning, SpeedWarning, TargetWarning, UsageError
from eagle_slim.runtime.opening import devices
from eagle_slim.runtime.target.location import given_target
from support.conversion import BY_ID, convert
from support.raising import raises
from support.small_tokenizers import byte_level_bpe, write_folder
from support.tiny_models import SIZES, tiny_target, write_head, write_pair


@pytest.fixture
def slim(tmp_path: Path) -> Path:
    target, head = write_pair(tmp_path / "parts")
    own = target.rename(tmp_path / "parts" / "my-target")
    return convert(head, draft_vocab=340, target=own, out=tmp_path / "slim", vocabulary=BY_ID).folder


def test_a_local_target_is_found_by_its_head(slim: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE_SLIM_MODELS", "~no-such-user/models")
    with raises(UsageError):
        SpeculativeModel.from_pretrained(head=slim)
    monkeypatch.delenv("EAGLE_SLIM_MODELS")
    with pytest.raises(UsageError, match=r"neither beside it .* nor in EAGLE_SLIM_MODELS .*--target"):
        SpeculativeModel.from_pretrained(head=slim)
    monkeypatch.setenv("EAGLE_SLIM_MODELS", str(tmp_path / "parts"))
    assert SpeculativeModel.from_pretrained(head=slim).config.name_or_path == str(tmp_path / "parts" / "my-target")
    monkeypatch.delenv("EAGLE_SLIM_MODELS")
    shutil.copytree(tmp_path / "parts" / "my-target", tmp_path / "my-target")
    assert SpeculativeModel.from_pretrained(head=slim).draft_vocab == 340


def test_another_target_of_the_recorded_name_is_refused(slim: Path, tmp_path: Path) -> None:
    other = shutil.copytree(tmp_path / "parts" / "my-target", tmp_path / "my-target")
    write_folder(other, byte_level_bpe(340, ["<|im_start|>", "<|im_end|>"]), tokenizer_class="PreTrainedTokenizerFast")
    with raises(PairingError):
        SpeculativeModel.from_pretrained(head=slim)


def test_a_head_in_the_place_of_a_target(slim: Path, tmp_path: Path) -> None:
    for head in (slim, write_head(tmp_path / "unconverted")):
        with raises(UsageError, option="head"):
            SpeculativeModel.from_pretrained(head)
        with pytest.raises(UsageError, match=r"is a draft head, not a target\. Name it with head="):
            SpeculativeModel.from_pretrained(str(head), slim)


def test_the_built_in_target_by_its_name_offline_and_only_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    assert given_target(EMBEDDED_TARGET_REPO, offline=False) == EMBEDDED_TARGET_REPO
    assert given_target(EMBEDDED_TARGET_REPO, offline=True, revision="main") == EMBEDDED_TARGET_REPO
    assert open_head().target_location(revision="main") == EMBEDDED_TARGET_REPO
    with pytest.warns(TargetWarning, match="dequantised"):
        assert given_target(EMBEDDED_TARGET_REPO, offline=True) == embedded_target_folder()


@pytest.mark.parametrize("name", ["midlayer.mlp.up_proj.weight", "norm.weight", "lm_head.weight"])
def test_a_damaged_head_warns_once(tmp_path: Path, name: str) -> None:
    from safetensors.torch import load_file, save_file

    folder = write_head(tmp_path, extra={"lm_head.weight": torch.randn(24, 32)})
    tensors = load_file(folder / "model.safetensors")
    tensors[name].view(-1)[3] = float("nan")
    save_file(tensors, folder / "model.safetensors")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = SpeculativeModel.from_pretrained(tiny_target("llama"), folder, tree=TreeConfig.of(1, 2))
        model.generate([3, 4], max_new_tokens=2)
    found = [str(each.message) for each in caught if each.category is HeadWarning]
    assert len(found) == 1
    assert name.removeprefix("midlayer.") in found[0]


@pytest.mark.parametrize(
    ("stored", "instructions", "dtype"),
    [
        ("bfloat16", "avx512f avx512_bf16", "auto"),
        ("bfloat16", "avx512f avx512_fp16", torch.float32),
        ("bfloat16", "", torch.float32),
        ("float16", "asimd asimdhp", "auto"),
        ("float16", "bf16", torch.float32),
        ("float32", "", "auto"),
        (None, "", "auto"),
    ],
)
def test_sixteen_bits_only_where_the_processor_multiplies_in_them(monkeypatch, stored, instructions, dtype):
    monkeypatch.setattr(devices, "cpu_instructions", lambda: frozenset(instructions.split()))
    config = transformers.LlamaConfig(**SIZES)
    config.dtype = None if stored is None else getattr(torch, stored)
    assert devices.dtype_on_cpu(config) == dtype


def test_a_model_is_loaded_in_it_where_it_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, head = write_pair(tmp_path)
    transformers.AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16).save_pretrained(target)
    monkeypatch.setattr(devices, "cpu_instructions", frozenset)
    model = SpeculativeModel.from_pretrained(target, head, tree=TreeConfig.of(2, 4), device="cpu")
    assert model.dtype == model.drafter.weights.dtype == torch.float32
    told = SpeculativeModel.from_pretrained(target, head, tree=TreeConfig.of(2, 4), device="cpu", dtype="bfloat16")
    assert told.dtype == torch.bfloat16
    needed = 4 * sum(weight.numel() for weight in model.target.model.parameters())
    monkeypatch.setattr(devices, "free_memory_bytes", lambda: needed)
    with pytest.warns(SpeedWarning, match="the target stays in bfloat16"):
        kept = SpeculativeModel.from_pretrained(target, head, tree=TreeConfig.of(2, 4), device="cpu")
    assert kept.dtype == torch.bfloat16


def test_free_memory_is_that_of_the_control_group_where_it_is_less(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal:  9000 kB\nMemAvailable:   4000 kB\n")
    assert devices.free_memory_bytes(tmp_path, tmp_path) == 4000 * 1024
    (tmp_path / "memory.max").write_text("max\n")
    assert devices.free_memory_bytes(tmp_path, tmp_path) == 4000 * 1024
    (tmp_path / "memory.max").write_text("3000000\n")
    (tmp_path / "memory.stat").write_text("anon 1000000\nfile 5000\n")
    assert devices.free_memory_bytes(tmp_path, tmp_path) == 2_000_000
    assert devices.free_memory_bytes() > 0
