"""Tiny EaModels: the stand-in, and those of the real code in the folder that EAGLE_SLIM_UPSTREAM names."""

import json
import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from support import upstream_stand_in
from support.small_tokenizers import byte_level_bpe, write_folder
from support.tiny_models import LLAMA3_ROPE, widen
from torch import nn

UPSTREAM = os.environ.get("EAGLE_SLIM_UPSTREAM") or None
LIKELY = slice(20, 24)
_HIDDEN = 32

STAND_INS = {"stand-in eagle3": ("eagle3", 24), "stand-in eagle3 full": ("eagle3", 48), "stand-in eagle": ("eagle", 48)}
REAL = {
    "llama eagle3": ("Llama", "eagle3", 64),
    "llama eagle3 full": ("Llama", "eagle3", None),
    "qwen3 eagle3": ("Qwen3", "eagle3", 64),
    "llama eagle": ("Llama", "eagle", None),
    "qwen2 eagle": ("Qwen2", "eagle", None),
    "mixtral eagle": ("Mixtral", "eagle", None),
    "llama 3.1 eagle3": ("Llama", "eagle3", 64, LLAMA3_ROPE),
    "llama linear eagle3": ("Llama", "eagle3", 64, {"type": "linear", "factor": 2.0}),
}
NEEDS_UPSTREAM = pytest.mark.skipif(
    UPSTREAM is None, reason="EAGLE_SLIM_UPSTREAM names no clone of SafeAILab/EAGLE (docs/upstream.md)"
)
OWN_TRANSFORMERS = pytest.mark.skipif(
    tuple(map(int, version("transformers").split(".")[:2])) < (5, 0),
    reason="SpeculativeModel needs transformers 5.0; upstream's code runs with an older one",
)
REAL_CASES = [pytest.param(name, marks=NEEDS_UPSTREAM) for name in REAL]
CASES = [*STAND_INS, *REAL_CASES]


def build(name: str, folder: Path, seed: int = 0) -> Any:
    # With which drafts are accepted.
    torch.manual_seed(seed + 5 if name in STAND_INS else seed)
    if name in STAND_INS:
        return upstream_stand_in.EaModel(*STAND_INS[name]).eval()
    return _real(folder, *REAL[name])


def prompt(model: Any, length: int = 9, seed: int = 0) -> torch.Tensor:
    embedding = model.ea_layer.embed_tokens.weight
    ids = torch.randint(3, embedding.shape[0], (1, length), generator=torch.Generator().manual_seed(seed))
    return ids.to(embedding.device)


def _real(folder: Path, family: str, kind: str, draft_vocab: int | None, rope: dict[str, Any] | None = None) -> Any:
    assert UPSTREAM is not None
    if UPSTREAM not in sys.path:
        sys.path.insert(0, UPSTREAM)
    import transformers
    from eagle.model import cnets, cnets1
    from eagle.model.configs import EConfig
    from eagle.model.ea_model import EaModel

    transformers.logging.set_verbosity_error()
    tokenizer = byte_level_bpe(300, ["<|im_start|>", "<|im_end|>"])
    vocab = tokenizer.get_vocab_size()
    base, head = folder / "base", folder / "head"
    write_folder(base, tokenizer, tokenizer_class="PreTrainedTokenizerFast", eos_token="<|im_end|>")
    common = {"vocab_size": vocab, "hidden_size": _HIDDEN, "intermediate_size": 48, "num_attention_heads": 4}
    common |= {"num_key_value_heads": 2, "max_position_embeddings": 512}
    sizes = {**common, "num_hidden_layers": 8, "head_dim": 8, "rope_scaling": rope}
    sizes |= {"num_local_experts": 2, "num_experts_per_tok": 1}
    target = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**sizes))
    widen(target.named_parameters())
    target.save_pretrained(base)
    # Upstream finds the embedding through an index only.
    index = {"metadata": {}, "weight_map": dict.fromkeys(target.state_dict(), "model.safetensors")}
    (base / "model.safetensors.index.json").write_text(json.dumps(index))

    rows = draft_vocab or vocab
    config = {**common, "model_type": "llama", "num_hidden_layers": 1, "rms_norm_eps": 1e-5}
    config |= {"hidden_act": "silu", "rope_theta": 10000.0, "bias": True}
    if kind == "eagle3":
        config["draft_vocab_size"] = rows
    head.mkdir()
    (head / "config.json").write_text(json.dumps(config))
    layer = (cnets if kind == "eagle3" else cnets1).Model(EConfig.from_pretrained(str(head / "config.json")), bias=True)
    with torch.no_grad():
        for parameter in layer.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    state = {name: tensor for name, tensor in layer.state_dict().items() if "embed" not in name}
    if kind == "eagle3":
        others = torch.randperm(vocab - LIKELY.stop)[: rows - (LIKELY.stop - LIKELY.start)] + LIKELY.stop
        ids = torch.arange(vocab) if rows == vocab else torch.cat((torch.arange(vocab)[LIKELY], others)).sort().values
        state |= {"d2t": ids - torch.arange(rows), "t2d": torch.zeros(vocab, dtype=torch.bool).index_fill(0, ids, True)}
    torch.save(state, head / "pytorch_model.bin")
    tree = {"total_token": 8, "depth": 2, "top_k": 3, "torch_dtype": torch.float32}
    paths = {"base_model_path": str(base), "ea_model_path": str(head)}
    model = EaModel.from_pretrained(use_eagle3=kind == "eagle3", **paths, **tree).eval()
    # A few tokens are likely in target and head alike, so that drafts are accepted.
    weight = torch.full((vocab, 1), 0.1)
    weight[LIKELY] = 1.0
    with torch.no_grad():
        model.base_model.lm_head.weight.mul_(weight)
        if kind == "eagle3":
            shift = model.ea_layer.d2t if rows != vocab else 0
            model.ea_layer.lm_head.weight.mul_(2 * weight[torch.arange(rows) + shift])
    return model
