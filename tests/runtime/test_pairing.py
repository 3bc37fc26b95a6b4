"""Heads and targets that do not belong together, or cannot work, are refused before anything runs."""

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from eagle_slim.convert.heads.open import open_head as open_published_head
from eagle_slim.runtime import (
    PairingError,
    SpeculativeModel,
    TreeConfig,
    UnsupportedModelError,
    open_head,
    open_target,
    pair,
)
from eagle_slim.runtime.drafter.weights import choose_draft_ids
from eagle_slim.runtime.errors import EagleSlimError, TargetError, UsageError
from eagle_slim.runtime.target.wrapper import check_supported
from eagle_slim.vocab_tools import DraftVocab, load_tokenizer
from support.changed_models import PeftStandIn, Wrapper
from support.conversion import BY_ID, convert
from support.raising import raises, raises_with
from support.small_tokenizers import byte_level_bpe, write_folder
from support.tiny_models import HIDDEN, VOCAB, plain_greedy, tiny_target, write_head, write_pair
from torch import nn

TWO_NORMS = {
    "fc_norm": True,
    "norm_before_fc": True,
    "extra": {
        "input_norm.weight": torch.ones(3 * HIDDEN),
        **{f"fc_norm.{tap}.weight": torch.ones(HIDDEN) for tap in range(3)},
    },
}


@pytest.mark.parametrize(
    ("head", "options", "kind", "words"),
    [
        ({"hidden": 16}, {}, PairingError, ("hidden size", "16", "32")),
        ({"vocab": 20}, {}, PairingError, ("vocab_size", "20", "24")),
        ({"vocab": 64, "draft_ids": [3, 4, 30]}, {"tree": TreeConfig(1, 1, 3)}, PairingError, ("id 30", "24")),
        ({"hidden_act": "geglu"}, {}, EagleSlimError, ("activation", "geglu")),
        (TWO_NORMS, {}, EagleSlimError, ("input_norm",)),
        ({}, {"drafter": "quick"}, EagleSlimError, ("drafter", "quick")),
        ({}, {"drafter": "triton"}, EagleSlimError, ("drafter", "cpu")),
        ({"draft_ids": [3, 4, 9]}, {"tree": TreeConfig(1, 5, 8)}, EagleSlimError, ("top_k", "5")),
    ],
    ids=["hidden", "vocabulary", "id", "activation", "two norms", "no such drafter", "no GPU", "top_k"],
)
def test_what_cannot_run_is_refused_before_weights_are_loaded(tmp_path, monkeypatch, head, options, kind, words):
    monkeypatch.setattr("eagle_slim.runtime.drafter.drafter.is_interpreted", lambda: False)
    folder = tmp_path / "target"
    tiny_target("llama").config.save_pretrained(folder)  # no weights beside it
    with raises_with(kind, *words):
        SpeculativeModel.from_pretrained(folder, write_head(tmp_path / "head", **head), device="cpu", **options)


def test_rows_that_pad_the_heads_vocabulary_are_never_drafted(tmp_path: Path) -> None:
    model = SpeculativeModel.from_pretrained(tiny_target("llama"), write_head(tmp_path, vocab=30))
    assert model.draft_vocab == VOCAB == 24


def test_what_a_heads_files_leave_in_doubt_is_warned_of(tmp_path: Path) -> None:
    head = write_head(tmp_path)
    (tmp_path / "model_old.safetensors").write_bytes(next(tmp_path.glob("*.safetensors")).read_bytes())
    with pytest.warns(UserWarning, match="model_old"):
        SpeculativeModel.from_pretrained(tiny_target("llama"), head)


LONGROPE = {"rope_type": "longrope", "factor": 2.0}
SMALL = {"vocab_size": 24, "hidden_size": 32, "num_hidden_layers": 2}


def unsupported_models() -> dict[str, tuple[Any, str]]:
    t = transformers
    heads = {"num_attention_heads": 4}
    llama = {**SMALL, **heads, "intermediate_size": 32, "num_key_value_heads": 4}
    gpt = {"vocab_size": 24, "n_layer": 2, "n_head": 4}
    t5 = {"vocab_size": 24, "d_model": 32, "num_layers": 2, "num_heads": 4, "d_ff": 32, "d_kv": 8}
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    hybrid = ["conv", "full_attention"]
    return {
        "quantised": (lambda: torch.ao.quantization.quantize_dynamic(tiny_target("llama"), {torch.nn.Linear}), "quant"),
        "mamba": (lambda: t.MambaForCausalLM(t.MambaConfig(**SMALL, state_size=4)), "recurrent state"),
        "gpt2": (lambda: t.GPT2LMHeadModel(t.GPT2Config(**gpt, n_embd=32)), "rotary"),
        "t5": (lambda: t.T5ForConditionalGeneration(t.T5Config(**t5)), "encoder-decoder"),
        "bert": (lambda: t.BertModel(t.BertConfig(**SMALL, **heads, intermediate_size=32)), "LM head"),
        "lfm2": (lambda: t.Lfm2ForCausalLM(t.Lfm2Config(**llama, layer_types=hybrid)), "recurrent|type conv"),
        "dynamic": (lambda: t.LlamaForCausalLM(t.LlamaConfig(**llama, rope_parameters=dynamic)), "dynamic RoPE"),
    }


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.parametrize("name", unsupported_models())
def test_other_kinds_of_models_are_refused_by_class(name: str) -> None:
    build, reason = unsupported_models()[name]
    model = build()
    with pytest.raises(UnsupportedModelError, match=reason) as error:
        check_supported(model)
    assert type(model).__name__ in str(error.value)


@pytest.mark.parametrize(
    ("adapter", "named"),
    [
        ({"is_prompt_learning": True}, "prefix tuning"),
        ({"peft_type": "PeftType.LORA", "alora_invocation_tokens": [3, 4]}, "activated LoRA"),
        ({"peft_type": "PeftType.XLORA"}, "XLORA"),
        ({"peft_type": "PeftType.LILY"}, "LILY"),
        ({"peft_type": "PeftType.POLY"}, "POLY"),
        ({"peft_type": "PeftType.LORA", "alora_invocation_tokens": None}, None),
    ],
    ids=str,
)
def test_adapters_that_look_at_the_prompt_are_refused_by_name(adapter: dict[str, Any], named: str | None) -> None:
    model = PeftStandIn(tiny_target("llama"))
    model.peft_config = {"default": SimpleNamespace(**adapter)}
    with raises_with(UnsupportedModelError, named) if named else nullcontext():
        check_supported(model)


def test_an_adapter_that_is_not_active_is_no_reason(tmp_path: Path) -> None:
    model = PeftStandIn(tiny_target("llama"))
    activated = SimpleNamespace(peft_type="PeftType.LORA", alora_invocation_tokens=[3, 4])
    model.peft_config = {"default": SimpleNamespace(peft_type="PeftType.LORA"), "second": activated}
    model.active_adapters = ["default"]  # type: ignore[assignment]
    check_supported(model)
    model.active_adapters = ["second"]  # type: ignore[assignment]
    with raises_with(UnsupportedModelError, "activated LoRA"):
        check_supported(model)


def test_a_generate_of_its_own_is_refused() -> None:
    class Prefixed(transformers.LlamaForCausalLM):
        def generate(self, *args: Any, **options: Any) -> Any:
            return super().generate(*args, **options)

    model = Prefixed(tiny_target("llama").config)
    with raises_with(UnsupportedModelError, "generate of its own", __name__):
        check_supported(model)
    check_supported(torch.compile(tiny_target("llama"), backend="eager"))


def test_a_target_spread_over_devices_is_refused() -> None:
    target = tiny_target("llama")
    target.hf_device_map = {"model.layers.0": 0, "model.layers.1": "cpu"}
    with pytest.raises(UnsupportedModelError, match="0, cpu"):
        check_supported(target)
    target.hf_device_map = {"": "cpu"}
    check_supported(target)
    target.lm_head.to("meta")
    with pytest.raises(UnsupportedModelError, match="not loaded, or offloaded"):
        check_supported(target)


@pytest.mark.parametrize("scaling", [{"rope_type": "dynamic"}, {"rope_type": "xdrope"}, LONGROPE], ids=str)
def test_rotary_scalings_a_cache_cannot_follow(tmp_path: Path, scaling: dict[str, Any]) -> None:
    with raises(UnsupportedModelError):
        SpeculativeModel.from_pretrained(tiny_target("llama"), write_head(tmp_path, rope_scaling=scaling))


class Packed(Wrapper):
    """Multiplies and widens, and can do nothing else, as quantised tensors of torchao."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten.index, torch.ops.aten.abs, torch.ops.aten.eq):
            raise NotImplementedError(str(func))
        out = super().__torch_dispatch__(func, kinds, args, kwargs)
        return cls(out) if func.overloadpacket is torch.ops.aten.detach else out

    def dequantize(self) -> torch.Tensor:
        return self.inner


def test_a_head_without_rows_of_its_own_takes_those_of_a_quantised_target(tmp_path: Path) -> None:
    target: Any = tiny_target("llama")
    wanted = plain_greedy(target, [3, 4, 5], 12)
    target.lm_head.weight = nn.Parameter(Packed(target.lm_head.weight.detach()), requires_grad=False)
    model = SpeculativeModel.from_pretrained(target, write_head(tmp_path), tree=TreeConfig(2, 2, 5))
    assert model.generate([3, 4, 5], max_new_tokens=12).token_ids == [wanted]


def test_the_three_steps_of_from_pretrained(tmp_path: Path) -> None:
    target, folder = tiny_target("llama"), write_head(tmp_path / "head")
    head = open_head(folder, tap_layers=(0, 1, 2))
    fused = open_target(target, target_backend="fused")
    model = pair(fused, head, draft_vocab=VOCAB, tree=TreeConfig(2, 3, 8))
    assert (model.target.backend.name, model.drafter.tree, model.is_tree_sized) == ("fused", TreeConfig(2, 3, 8), False)
    assert model.target.tap_layers == (0, 1, 2)
    again = SpeculativeModel.from_pretrained(fused, head)
    assert (again.target.backend.name, again.is_tree_sized) == ("fused", True)
    options = {"max_new_tokens": 9, "ignore_eos": True}
    assert model.generate([[3, 4]], **options).token_ids == again.generate([[3, 4]], **options).token_ids


def test_no_weights_are_loaded_before_a_pair_is_checked(tmp_path: Path) -> None:
    tiny_target("llama").config.save_pretrained(tmp_path / "target")  # no weights beside it
    opened = open_target(tmp_path / "target")
    with raises_with(PairingError, "hidden size", "16", "32"):
        pair(opened, open_head(write_head(tmp_path / "narrow", hidden=16)))
    with raises(TargetError):
        pair(opened, open_head(write_head(tmp_path / "head")))


def test_what_belongs_to_an_opened_target_or_head_is_said_where_it_is_opened(tmp_path: Path) -> None:
    written = write_head(tmp_path / "head")
    target, head = open_target(tiny_target("llama")), open_head(written)
    for option, value in (("dtype", "float32"), ("device", "cpu"), ("target_weights", "fp8"), ("revision", "main")):
        with raises_with(UsageError, option, "open_target"):
            SpeculativeModel.from_pretrained(target, head, **{option: value})
    with raises_with(UsageError, "head_revision", "open_head"):
        SpeculativeModel.from_pretrained(target, head, head_revision="main")
    for wrong in ({"tap_layers": (0, 1, 2)}, {"d2t_form": "offset"}, {"revision": "main"}):
        with raises_with(UsageError, "loaded already", *wrong):
            open_head(head.head, **wrong)  # type: ignore[arg-type]
    with raises(UsageError, option="d2t_form"):
        open_head(written, d2t_form="absolut")  # type: ignore[arg-type]
    with raises(UsageError, option="target_backend"):
        open_target(tiny_target("llama"), target_backend="fusd")
    for given in ((written, head), (target, written)):
        with raises_with(UsageError, "what open_", "returns"):
            pair(*given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("option", "now"),
    [
        *((name, "tree=TreeConfig(") for name in ("depth", "top_k", "total_tokens")),
        *((name, "open_head") for name in ("tap_layers", "d2t_form")),
        ("target_backend", "open_target"),
        ("follow", "draft_vocab"),
        ("torch_dtype", "Did you mean dtype?"),
        ("use_triton_drafter", "docs/upstream.md"),
    ],
)
def test_an_option_that_is_not_there_is_told_what_to_write(option: str, now: str) -> None:
    with raises_with(UsageError, option, now):
        SpeculativeModel.from_pretrained("no/such-target", **{option: 1})


@pytest.mark.parametrize("device", [{"": "cpu"}, 2**63, True], ids=str)
def test_a_device_is_no_map_of_devices(tmp_path: Path, device: Any) -> None:
    with raises(UsageError, option="device"):
        SpeculativeModel.from_pretrained(tiny_target("llama"), write_head(tmp_path), device=device)


def test_a_target_that_nobody_names_or_that_is_not_there(tmp_path: Path) -> None:
    for target in (None, tmp_path / "missing"):
        with raises(UsageError, option="arget"):
            SpeculativeModel.from_pretrained(target, write_head(tmp_path / "head"))


class TestDraftVocabulary:
    RANKED = np.array([7, 3, 20, 1, 11])

    def head(self, tmp_path: Path, **options: Any) -> Any:
        return open_published_head(write_head(tmp_path, **options))

    def test_any_prefix_of_the_ranks(self, tmp_path: Path) -> None:
        head = self.head(tmp_path, draft_ids=sorted(self.RANKED.tolist()))
        assert choose_draft_ids(head, 3, self.RANKED, num_forced=2).tolist() == [3, 7, 20]
        assert choose_draft_ids(head, None, self.RANKED).tolist() == [1, 3, 7, 11, 20]
        assert choose_draft_ids(head, 5, self.RANKED).tolist() == [1, 3, 7, 11, 20]
        for wrong in (1, 6, 0):
            with raises(UsageError, option="draft_vocab"):
                choose_draft_ids(head, wrong, self.RANKED, num_forced=2)

    def test_without_ranks_only_all_or_a_vocabulary(self, tmp_path: Path) -> None:
        head = self.head(tmp_path, draft_ids=[4, 9, 2])
        assert choose_draft_ids(head, None, None).tolist() == [2, 4, 9]
        with raises_with(UsageError, "draft_vocab", "eagle-convert"):
            choose_draft_ids(head, 2, None)
        for beyond in (0, 4, True):
            with raises(UsageError, option="draft_vocab") as caught:
                choose_draft_ids(head, beyond, None)
            assert "eagle-convert" not in str(caught.value)
        assert choose_draft_ids(head, DraftVocab(np.array([9, 4]), 0, VOCAB, {}), None).tolist() == [4, 9]
        with raises(UsageError, option="draft_vocab"):
            choose_draft_ids(head, DraftVocab(np.array([9, 5]), 0, VOCAB, {}), None)

    def test_rows_belong_to_their_ids_whatever_the_order_of_the_file(self, tmp_path: Path) -> None:
        from safetensors.torch import load_file

        ids = [9, 4, 17, 2]
        folder = write_head(tmp_path, draft_ids=ids)
        vocab = DraftVocab(np.array([17, 4]), 0, VOCAB, {})
        target = tiny_target("llama")
        with pytest.warns(UserWarning, match="ascending order"):
            model = SpeculativeModel.from_pretrained(target, folder, draft_vocab=vocab, tree=TreeConfig.of(1, 2))
        stored = load_file(folder / "model.safetensors")["lm_head.weight"]
        assert model.drafter.weights.draft_to_target.tolist() == [4, 17]
        assert torch.equal(model.drafter.weights.lm_head, stored[[ids.index(4), ids.index(17)]])

    def test_rows_come_from_the_target_where_the_head_has_none(self, tmp_path: Path) -> None:
        target = tiny_target("llama")
        vocab = DraftVocab(np.array([20, 5, 6]), 0, VOCAB, {})
        head = write_head(tmp_path)
        model = SpeculativeModel.from_pretrained(target, head, draft_vocab=vocab, tree=TreeConfig.of(1, 2))
        assert torch.equal(model.drafter.weights.lm_head, target.lm_head.weight[[5, 6, 20]])
        assert model.draft_vocab == 3
        assert model.drafter.weights.hidden == HIDDEN


NO_LENGTH = '{"model_type": "llama", "max_position_embeddings": null}'


@pytest.mark.parametrize(
    "config", [None, "{}", "{", '{"model_type": "unheard"}', '{"model_type": "llama"}', NO_LENGTH], ids=str
)
def test_a_target_that_transformers_cannot_load(tmp_path: Path, config: str | None) -> None:
    folder = tmp_path / "target"
    folder.mkdir()
    if config is not None:
        (folder / "config.json").write_text(config)
    if config == '{"model_type": "llama"}':
        tiny_target("llama").config.save_pretrained(folder)
        (folder / "model.safetensors").write_bytes(b"not tensors")
    with raises(TargetError):
        SpeculativeModel.from_pretrained(folder, write_head(tmp_path / "head"))


@pytest.mark.parametrize("rows", [0, VOCAB - 4], ids=["missing", "another shape"])
def test_weights_that_a_targets_files_lack_are_not_drawn_at_random(tmp_path: Path, rows: int) -> None:
    from safetensors.torch import load_file, save_file

    tiny_target("llama").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    kept = tensors.pop("lm_head.weight")[:rows].contiguous()
    save_file(tensors | ({"lm_head.weight": kept} if rows else {}), tmp_path / "model.safetensors", {"format": "pt"})
    with raises_with(TargetError, "lm_head.weight", "config.json"):
        SpeculativeModel.from_pretrained(tmp_path, write_head(tmp_path / "head"))


@pytest.mark.parametrize("name", ["lm_head.weight_scale", "model.layers.1.self_attn.q_proj.bias"])
def test_scales_and_biases_that_the_configuration_does_not_name_are_not_left_out(tmp_path: Path, name: str) -> None:
    from safetensors.torch import load_file, save_file

    tiny_target("llama").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors") | {"model.layers.1.self_attn.k_scale": torch.ones(1)}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    SpeculativeModel.from_pretrained(tmp_path, write_head(tmp_path / "head"))
    save_file(tensors | {name: torch.ones(1)}, tmp_path / "model.safetensors", {"format": "pt"})
    with raises_with(TargetError, name, "quantization_config"):
        SpeculativeModel.from_pretrained(tmp_path, tmp_path / "head")


def test_a_vision_language_repository_is_no_causal_model(tmp_path: Path) -> None:
    text = tiny_target("llama").config
    transformers.LlavaConfig(text_config=text).save_pretrained(tmp_path / "target")
    with pytest.raises(TargetError, match=r"LlavaConfig'> for this kind of AutoModel.* loaded by you") as error:
        SpeculativeModel.from_pretrained(tmp_path / "target", write_head(tmp_path / "head"))
    assert "Model type should be one of" not in str(error.value)


def test_a_tokenizer_beside_a_loaded_target_is_checked(tmp_path: Path) -> None:
    target, head = write_pair(tmp_path)
    slim = convert(head, draft_vocab=340, target=target, out=tmp_path / "slim", vocabulary=BY_ID).folder
    loaded = transformers.AutoModelForCausalLM.from_pretrained(target)
    own = transformers.AutoTokenizer.from_pretrained(target)
    assert SpeculativeModel.from_pretrained(loaded, slim, tokenizer=own).draft_vocab == 340
    for given in (target, open_target(target)):
        opened = SpeculativeModel.from_pretrained(given, slim).opened
        assert opened is not None
        assert opened.target_name == target.name
    tokens = byte_level_bpe(340, ["<|im_start|>", "<|im_end|>"])
    write_folder(tmp_path / "other", tokens, tokenizer_class="PreTrainedTokenizerFast")
    other = transformers.AutoTokenizer.from_pretrained(tmp_path / "other")
    for name in (loaded, target):
        with raises(PairingError):
            SpeculativeModel.from_pretrained(name, slim, tokenizer=other)
    # So is the target's own, even one that transformers cannot load.
    own.save_pretrained(tmp_path / "own")
    own = transformers.AutoTokenizer.from_pretrained(tmp_path / "own")
    (target / "tokenizer.json").write_bytes((tmp_path / "other" / "tokenizer.json").read_bytes())
    (target / "tokenizer_config.json").write_text('{"extra_special_tokens": 1}')
    with pytest.raises(TargetError):
        SpeculativeModel.from_pretrained(target, head)
    with raises(PairingError):
        SpeculativeModel.from_pretrained(target, slim, tokenizer=own)


def test_a_vocabulary_of_another_tokenizer_is_refused(tmp_path: Path) -> None:
    target, head = write_pair(tmp_path)
    vocab = json.loads((target / "config.json").read_text())["vocab_size"]
    own = load_tokenizer(target).tokenizer_hash
    right, wrong = (DraftVocab(np.arange(300), 0, vocab, {"tokenizer_hash": made}) for made in (own, "sha256:0"))
    model = SpeculativeModel.from_pretrained(target, head, draft_vocab=right)
    assert model.with_draft_vocab(right).draft_vocab == 300
    with raises(PairingError):
        model.with_draft_vocab(wrong)
    tokenizer = transformers.AutoTokenizer.from_pretrained(target)
    for name in (target, transformers.AutoModelForCausalLM.from_pretrained(target)):
        with raises(PairingError):
            SpeculativeModel.from_pretrained(name, head, draft_vocab=wrong, tokenizer=tokenizer)


def test_a_target_whose_tokenizer_has_files_of_another_form(tmp_path: Path) -> None:
    """As SentencePiece's of Vicuna; the error's own advice, to make a tokenizer.json elsewhere, leads on."""
    target, head = write_pair(tmp_path)
    definition = json.loads((target / "tokenizer.json").read_text())["model"]
    (target / "tokenizer.json").unlink()
    (target / "vocab.json").write_text(json.dumps(definition["vocab"]))
    (target / "merges.txt").write_text("\n".join(map(" ".join, definition["merges"])))
    config = json.loads((target / "tokenizer_config.json").read_text())
    (target / "tokenizer_config.json").write_text(json.dumps({**config, "tokenizer_class": "Qwen2Tokenizer"}))
    own = transformers.AutoTokenizer.from_pretrained(target)
    own.save_pretrained(tmp_path / "own")
    with raises(UsageError, option="--tokenizer"):
        convert(head, draft_vocab=340, target=target, out=tmp_path / "slim", vocabulary=BY_ID)
    options = {"draft_vocab": 340, "target": target, "tokenizer": tmp_path / "own", "vocabulary": BY_ID}
    slim = convert(head, out=tmp_path / "slim", **options)
    model = SpeculativeModel.from_pretrained(target, slim.folder)
    assert model.tokenizer_hash == slim.manifest.tokenizer["hash"] == load_tokenizer(tmp_path / "own").tokenizer_hash
    expected = model.chat("Hi", max_new_tokens=4).token_ids
    (target / "vocab.json").unlink()
    with pytest.raises(TargetError, match="vocab"):
        SpeculativeModel.from_pretrained(target, slim.folder)
    given = SpeculativeModel.from_pretrained(target, slim.folder, tokenizer=own)
    assert given.chat("Hi", max_new_tokens=4).token_ids == expected
