"""SafeAILab's EaModel, built by upstream's own constructor without a download; its clone must be on the path."""

from __future__ import annotations

import importlib
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from eagle_slim.convert.sources.builtin import embedded_target_folder
from eagle_slim.runtime.drafter.tuning.problem import MODELS, Dims
from eagle_slim.runtime.opening.heads import open_head
from eagle_slim.runtime.settings import TreeConfig
from torch import Tensor

from benchmarks.shared.decoding import FEW_LAYERS, LAYERS

BUILT_IN = "smollm2-135m"
TINY = Dims(64, 96, 4, 2, 16, 320)
MAX_POSITIONS = 2048
TOO_LARGE = ("llama-3.3-70b",)
"""Targets that do not fit on one GPU with all of their layers."""
_PROBABLE = 16
_PROMPT = "<|im_start|>user\nWhat are three good habits for learning a new language?<|im_end|>\n<|im_start|>assistant\n"


def load_ea_model(base_model: str, ea_model: str, use_eagle3: bool, dtype: torch.dtype, device: torch.device) -> Any:
    """Load an EaModel by upstream's own ``from_pretrained``."""
    EaModel = importlib.import_module("eagle.model.ea_model").EaModel
    # A device_map needs accelerate, which a CPU can do without.
    where = {"device_map": str(device)} if device.type == "cuda" else {}
    return EaModel.from_pretrained(
        use_eagle3=use_eagle3, base_model_path=base_model, ea_model_path=ea_model, torch_dtype=dtype, **where
    ).eval()


def encode(tokenizer: Any, text: str, device: torch.device) -> Tensor:
    """Encode a prompt, as a message where the tokenizer has a chat template: int64 [1, seq]."""
    if getattr(tokenizer, "chat_template", None):
        ids = tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)
    else:
        ids = tokenizer(text).input_ids
    return torch.tensor([ids], device=device)


def build_ea_model(dims: str, dtype: torch.dtype, device: torch.device, draft_vocab: int = 0) -> Any:
    """Build an EaModel with an EAGLE-3 head.

    ``dims``: `BUILT_IN` for the built-in head with its target; "tiny" or a name of `problem.MODELS` for a random model
    in which few tokens are probable, so that drafts are accepted. ``draft_vocab``: rows of a random head, 0 for all.
    A random target has the model's own layers, "tiny" and one that is `TOO_LARGE` 8. The hidden states of "tiny" follow
    its tokens, so that its texts vary.
    """
    EaModel = importlib.import_module("eagle.model.ea_model").EaModel
    LlamaForCausalLM = importlib.import_module("eagle.model.modeling_llama_kv").LlamaForCausalLM
    sizes = TINY if dims == "tiny" else MODELS[dims]
    changes: dict[str, Any] = {"draft_vocab_size": draft_vocab or sizes.vocab}
    state: dict[str, Tensor] = {}
    with tempfile.TemporaryDirectory() as folder, device:
        if dims == BUILT_IN:
            base = LlamaForCausalLM.from_pretrained(embedded_target_folder(), torch_dtype=dtype).to(device)
            head = open_head().head
            state = {name: head.tensors.get(name).to(device, dtype) for name in head.tensors}
            # The head drafts with the target's own LM head, and upstream's EAGLE-3 always has one.
            state["lm_head.weight"] = base.lm_head.weight.data
            changes = {name: head.config[name] for name in ("rope_theta", "rms_norm_eps")}
            changes |= {"draft_vocab_size": sizes.vocab}
        else:
            from transformers import LlamaConfig

            layers = FEW_LAYERS if dims in TOO_LARGE else LAYERS.get(dims, FEW_LAYERS)
            config = LlamaConfig(**_config(sizes), num_hidden_layers=layers, tie_word_embeddings=False)
            base = LlamaForCausalLM(config).to(dtype)
            if dims == "tiny":
                base.model.embed_tokens.weight.data.mul_(50)
        path = _write_folder(Path(folder), sizes, changes)
        tree = TreeConfig()
        model = EaModel(True, base, folder, str(path), tree.total_tokens, tree.depth, tree.top_k, 1.0, state)
    model.ea_layer.embed_tokens.weight.data = base.model.embed_tokens.weight.data
    for lm_head in (base.lm_head, model.ea_layer.lm_head) if not state else ():
        # Random logits of order one, and few of them large: so that a drafted token is often the target's.
        torch.nn.init.normal_(lm_head.weight, std=sizes.hidden**-0.5)
        lm_head.weight.data[_PROBABLE:] *= 0.05
        lm_head.weight.data[:_PROBABLE] *= 4
    return model.eval()


def _config(dims: Dims) -> dict[str, int]:
    return {
        "vocab_size": dims.vocab,
        "hidden_size": dims.hidden,
        "intermediate_size": dims.intermediate,
        "num_attention_heads": dims.heads,
        "num_key_value_heads": dims.kv_heads,
        "max_position_embeddings": MAX_POSITIONS,
    }


def _write_folder(folder: Path, dims: Dims, changes: dict[str, Any]) -> Path:
    """Write what upstream's constructor reads: a tokenizer and a head's configuration, of which it returns the path."""
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    config = _config(dims) | {
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "bias": True,
        "rope_theta": 10000.0,
        # With it, upstream reads no embedding from the target's files.
        "target_hidden_size": dims.hidden,
    }
    path = folder / "head.json"
    path.write_text(json.dumps(config | changes))
    return path


def read_prompt(dims: str, device: torch.device, length: int = 128) -> Tensor:
    """Return a prompt, int64 [1, seq]: a question to the built-in model, ``length`` random ids to the others."""
    if dims == BUILT_IN:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(embedded_target_folder() / "tokenizer.json"))
        ids = tokenizer.encode(_PROMPT, add_special_tokens=False).ids
    else:
        ids = torch.randint(0, 300, (length,), generator=torch.Generator().manual_seed(0)).tolist()
    return torch.tensor([ids], device=device)
