"""Engines that cannot run here: what they demand of the file, checked against their source as FORMATS quoted it.

SafeAILab/EAGLE (cnets.py, configs.py, ea_model.py) loads by attribute name with `strict=False`, so that a wrong name
is silent; TensorRT-LLM (modeling_speculative.py) loads module by module. Both are spelled out here as small models that
load the way the engine does, and must then draft the oracle's tokens.
"""

import pytest
import torch
from engines import oracle
from engines.artifacts import OracleFiles
from safetensors.torch import load_file
from support.heads import config_of
from torch import nn
from torch.nn import functional as F


class SafeAILabHead(nn.Module):
    """`cnets.Model` of SafeAILab/EAGLE: attribute names are tensor names; `d2t` and `t2d` are buffers."""

    def __init__(self, config: dict) -> None:
        super().__init__()
        rope_scaling = config["rope_scaling"]
        # configs.py: anything but null and the two old forms raises.
        assert rope_scaling is None or (set(rope_scaling) == {"type", "factor"}), rope_scaling
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        # cnets.py ignores the config's head_dim.
        self.heads, self.head_dim = heads, hidden // heads
        kv_rows = config["num_key_value_heads"] * self.head_dim
        self.embed_tokens = nn.Embedding(config["vocab_size"], hidden)
        self.lm_head = nn.Linear(hidden, config["draft_vocab_size"], bias=False)
        self.fc = nn.Linear(3 * config.get("target_hidden_size", hidden), hidden, bias=False)
        widths = {"q": heads * self.head_dim, "k": kv_rows, "v": kv_rows}
        attention = {f"{name}_proj": nn.Linear(2 * hidden, rows, bias=False) for name, rows in widths.items()}
        attention["o_proj"] = nn.Linear(heads * self.head_dim, hidden, bias=False)
        middle, eps = config["intermediate_size"], config["rms_norm_eps"]
        mlp = {f"{name}_proj": nn.Linear(hidden, middle, bias=False) for name in ("gate", "up")}
        mlp["down_proj"] = nn.Linear(middle, hidden, bias=False)
        norms = ("hidden_norm", "input_layernorm", "post_attention_layernorm")
        self.midlayer = nn.ModuleDict({name: nn.RMSNorm(hidden, eps=eps) for name in norms})
        self.midlayer.update({"self_attn": nn.ModuleDict(attention), "mlp": nn.ModuleDict(mlp)})
        self.norm = nn.RMSNorm(hidden, eps=eps)
        self.register_buffer("d2t", torch.zeros(config["draft_vocab_size"], dtype=torch.long))
        self.register_buffer("t2d", torch.zeros(config["vocab_size"], dtype=torch.bool))
        if config["vocab_size"] == config["draft_vocab_size"]:
            del self.d2t, self.t2d

    def forward(self, feature: torch.Tensor, token: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """One draft step at one position: feature [taps * hidden] or [hidden], token [] -> (feature, target id)."""
        hidden = feature if feature.shape[-1] == self.norm.normalized_shape[0] else self.fc(feature)
        layer = self.midlayer
        both = torch.cat([layer["input_layernorm"](self.embed_tokens(token)), layer["hidden_norm"](hidden)])
        # A position that sees only itself: attention is its own value, whatever q and k are.
        hidden = hidden + layer["self_attn"]["o_proj"](layer["self_attn"]["v_proj"](both))
        normed, mlp = layer["post_attention_layernorm"](hidden), layer["mlp"]
        hidden = hidden + mlp["down_proj"](F.silu(mlp["gate_proj"](normed)) * mlp["up_proj"](normed))
        draft = self.lm_head(self.norm(hidden)).argmax()
        # cnets.py skips the map where both vocabularies have one size.
        return hidden, draft + self.d2t[draft] if hasattr(self, "d2t") else draft


def tapped(token: int, taps: tuple[int, ...] = oracle.DEFAULT_TAPS) -> torch.Tensor:
    """What the oracle target's layers hand to the head for a token: its code with each layer's marker."""
    states = []
    for layer in taps:
        state = oracle.codes()[token].clone()
        state[oracle.MARKER] += layer
        states.append(state)
    return torch.cat(states)


@pytest.mark.parametrize(("head", "draft_vocab"), [("full", 640), ("mapped", 320), ("full", "full")])
def test_safeailab_loads_every_tensor_by_name_and_drafts_the_right_tokens(oracle_files, head, draft_vocab):
    folder = oracle_files.artifact(head, draft_vocab)
    assert not list(folder.glob("*.bin")), "ea_model.py reads pytorch_model.bin before model.safetensors"
    model = SafeAILabHead(config_of(folder)).float()
    missing, unexpected = model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    assert missing == ["embed_tokens.weight"]  # taken from the base model, unless target_hidden_size is in the config
    assert not unexpected
    assert "target_hidden_size" not in config_of(folder)
    target = load_file(oracle_files.target / "model.safetensors")
    model.embed_tokens.weight.data = target["model.embed_tokens.weight"].float()

    tokens = oracle.prompt(0, length=2) + oracle.continuation(oracle.prompt(0, length=2), 4)
    feature = tapped(tokens[0])
    for position in range(1, 5):
        feature, drafted = model(feature, torch.tensor(tokens[position]))
        assert int(drafted) == tokens[position + 1]


@pytest.mark.parametrize(("head", "draft_vocab"), [("full", 640), ("mapped", 320), ("full", "full")])
def test_tensorrt_llm_finds_every_parameter(oracle_files: OracleFiles, head: str, draft_vocab: int | str) -> None:
    folder = oracle_files.artifact(head, draft_vocab)
    config, tensors = config_of(folder), load_file(folder / "model.safetensors")
    # Read as attributes, so that a config without them fails; a tied embedding would skip lm_head.
    dtype = getattr(torch, config["torch_dtype"])
    assert (config["attention_bias"], config["tie_word_embeddings"]) == (False, False)
    # `Eagle3ForCausalLM` asks for what SafeAILab's class has, but for the embedding, which is the target's.
    wanted = {name: (value.shape, dtype) for name, value in SafeAILabHead(config).named_parameters()}
    del wanted["embed_tokens.weight"]
    if config["vocab_size"] != config["draft_vocab_size"]:
        wanted["d2t"] = ((config["draft_vocab_size"],), torch.int64)
    found = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items() if name != "t2d"}
    # Anything else would be ignored: silently lost.
    assert found == wanted
    # The two-model path strips Eagle3 and prefixes EAGLE3; only this name is registered.
    assert "EAGLE3" + config["architectures"][0].replace("Eagle3", "") == "EAGLE3LlamaForCausalLM"
