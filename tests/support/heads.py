"""Toy draft heads of every published form, and a toy target for them.

All have the same random weights for the same seed, so that two spellings of one head can be compared tensor by tensor.
The target's tokenizer is a byte-level BPE of 360 tokens; its vocabulary is padded to 384 rows.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from support.small_tokenizers import byte_level_bpe, write_folder

VOCAB = 384
TOKENS = 360
HIDDEN = 32
HEADS = 4
KV_HEADS = 2
HEAD_DIM = 8
MIDDLE = 48
LAYERS = 8

Spelling = Literal["midlayer", "layers.0", "model.layers.0", "midlayer.0", "speculators", "legacy-norms"]
Container = Literal["safetensors", "bin", "sharded"]
Tensors = dict[str, torch.Tensor]


def random(shape: Sequence[int], seed: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype)


def trained_ids(count: int = 200, ascending: bool = True) -> np.ndarray:
    """Some ids of the vocabulary, among them the markers 0, 1, 2, for a head that has a map."""
    rng = np.random.default_rng(3)
    ids = np.concatenate([[0, 1, 2], 3 + rng.permutation(TOKENS - 3)[: count - 3]])
    return np.sort(ids) if ascending else rng.permutation(ids)


def write_target(folder, *, tied=False, dtype=torch.bfloat16, hidden=HIDDEN, shards=1):
    """A Hugging Face folder with the tensors that a conversion may read, a tokenizer, and a configuration."""
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    write_folder(folder, byte_level_bpe(TOKENS), generation_config=ids, eos_token="<|im_end|>")
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "tie_word_embeddings": tied}
    sizes = {"hidden_size": hidden, "num_hidden_layers": LAYERS, "vocab_size": VOCAB}
    write_json(folder / "config.json", config | sizes)
    tensors = {"model.embed_tokens.weight": random((VOCAB, hidden), 101, dtype)}
    if not tied:
        tensors["lm_head.weight"] = random((VOCAB, hidden), 102, dtype)
    tensors["model.norm.weight"] = torch.ones(hidden, dtype=dtype)
    write_tensors(folder, tensors, "safetensors" if shards == 1 else "sharded")
    return folder


def target_lm_head(folder: Path) -> torch.Tensor:
    tensors: Tensors = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])


def layer_shapes(prefix, inputs, head_norms=False, hidden=HIDDEN) -> dict[str, tuple[int, ...]]:
    """Shapes of the matrices of a decoder layer, and of norms of q and k; q, k and v take vectors of `inputs`."""
    shapes: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (HEADS * HEAD_DIM, inputs),
        "self_attn.k_proj": (KV_HEADS * HEAD_DIM, inputs),
        "self_attn.v_proj": (KV_HEADS * HEAD_DIM, inputs),
        "self_attn.o_proj": (hidden, HEADS * HEAD_DIM),
        **({f"self_attn.{name}_norm": (HEAD_DIM,) for name in "qk"} if head_norms else {}),
        "mlp.gate_proj": (MIDDLE, hidden),
        "mlp.up_proj": (MIDDLE, hidden),
        "mlp.down_proj": (hidden, MIDDLE),
    }
    return {f"{prefix}{name}.weight": shape for name, shape in shapes.items()}


def eagle3_tensors(
    *, rows, dtype=torch.bfloat16, target_hidden=HIDDEN, taps=3, fc_norms=False, input_norm=False, embedding=False
):
    """The tensors of an EAGLE-3 head by canonical name, without its map; `rows` None leaves out the LM head."""
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (HIDDEN, taps * target_hidden)}
    shapes |= layer_shapes("midlayer.", 2 * HIDDEN)
    norms = ("midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm")
    shapes |= {f"{name}.weight": (HIDDEN,) for name in norms}
    if rows is not None:
        shapes["lm_head.weight"] = (rows, HIDDEN)
    if embedding:
        shapes["embed_tokens.weight"] = (VOCAB, HIDDEN)
    if input_norm:
        shapes["input_norm.weight"] = (taps * target_hidden,)
    if fc_norms:
        shapes |= {f"fc_norm.{tap}.weight": (target_hidden,) for tap in range(taps)}
    return {name: random(shape, number, dtype) for number, (name, shape) in enumerate(shapes.items())}


def eagle3_config(dtype: torch.dtype = torch.bfloat16, **changes: Any) -> dict[str, Any]:
    config: dict[str, Any] = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "vocab_size": VOCAB}
    config |= {"draft_vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": MIDDLE, "num_hidden_layers": 1}
    config |= {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM}
    config |= {"hidden_act": "silu", "rms_norm_eps": 1e-5, "max_position_embeddings": 2048, "rope_theta": 10000.0}
    config |= {"attention_bias": False, "torch_dtype": str(dtype).removeprefix("torch.")}
    config |= {"tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2}
    return {key: value for key, value in (config | changes).items() if value is not ...}


def write_eagle3(
    folder: Path,
    *,
    ids: np.ndarray | None = None,
    lm_head: bool = True,
    dtype: torch.dtype = torch.bfloat16,
    spelling: Spelling = "midlayer",
    container: Container = "safetensors",
    d2t: Literal["offset", "absolute"] | None = "offset",
    d2t_dtype: torch.dtype = torch.int64,
    t2d: bool = True,
    tensors: Tensors | None = None,
    extra: Tensors | None = None,
    **changes: Any,
) -> Path:
    """An EAGLE-3 head, with changes of config.json.

    `ids`: target id of each LM-head row, for a head with a map. `tensors` stand in place of `eagle3_tensors`, without
    the map; `extra` are written under the names given.
    """
    rows = (VOCAB if ids is None else len(ids)) if lm_head else None
    found = dict(eagle3_tensors(rows=rows, dtype=dtype) if tensors is None else tensors)
    if ids is not None and d2t is not None:
        values = ids - np.arange(len(ids)) if d2t == "offset" else ids
        found["d2t"] = torch.from_numpy(values.copy()).to(d2t_dtype)
    if ids is not None and t2d:
        found["t2d"] = torch.from_numpy(np.isin(np.arange(VOCAB), ids))
    found = {spelled(name, spelling): tensor for name, tensor in found.items()} | (extra or {})
    config = eagle3_config(dtype, **({"draft_vocab_size": VOCAB if ids is None else len(ids)} | changes))
    return write_model(folder, as_speculators(config) if spelling == "speculators" else config, found, container)


def spelled(name: str, spelling: Spelling) -> str:
    prefix = {"speculators": "layers.0.", "legacy-norms": "midlayer."}.get(spelling, f"{spelling}.")
    if name.startswith("midlayer."):
        return prefix + name.removeprefix("midlayer.")
    if spelling == "legacy-norms" and name.startswith("fc_norm."):
        return {"0": "aux_norm_low", "1": "aux_norm_mid", "2": "aux_norm_high"}[name.split(".")[1]] + ".weight"
    if spelling == "model.layers.0" and name in ("fc.weight", "norm.weight", "embed_tokens.weight"):
        return f"model.{name}"
    return name


def as_speculators(flat: dict[str, Any]) -> dict[str, Any]:
    outer = ("draft_vocab_size", "norm_before_residual", "target_hidden_size", "eagle_aux_hidden_state_layer_ids")
    verifier = {"name_or_path": "org/target", "architectures": ["LlamaForCausalLM"]}
    config: dict[str, Any] = {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3"}
    config |= {"speculators_version": "0.9.0", "speculators_config": {"algorithm": "eagle3", "verifier": verifier}}
    config["transformer_layer_config"] = {key: value for key, value in flat.items() if key not in outer}
    return config | {key: flat[key] for key in outer if key in flat}


def write_eagle1(folder, *, container="safetensors", extra=None, **changes):
    """An EAGLE-1/2 head, with the `bias` key that SafeAILab's configurations carry."""
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (HIDDEN, 2 * HIDDEN), "embed_tokens.weight": (VOCAB, HIDDEN)}
    shapes |= layer_shapes("layers.0.", HIDDEN) | {"layers.0.post_attention_layernorm.weight": (HIDDEN,)}
    tensors = {name: random(shape, 50 + number) for number, (name, shape) in enumerate(shapes.items())}
    config = eagle3_config(architectures=["LlamaForCausalLM"], draft_vocab_size=..., bias=True)
    return write_model(folder, config | changes, tensors | (extra or {}), container)


def write_dflash(folder, form="z-lab", *, ids=None, extra=None, **changes):
    """A DFlash draft over layers 1, 3 and 5 (their outputs); `ids`: those of an LM head of its own, with its map.

    "z-lab" is flat, "speculators" nested, "dspark" flat with a Markov head of rank 4 and a confidence head.
    """
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (HIDDEN, 3 * HIDDEN)}
    shapes |= {"hidden_norm.weight": (HIDDEN,), "norm.weight": (HIDDEN,)}
    for layer in range(2):
        shapes |= layer_shapes(f"layers.{layer}.", HIDDEN, head_norms=True)
        shapes |= {f"layers.{layer}.{name}_layernorm.weight": (HIDDEN,) for name in ("input", "post_attention")}
    rows = VOCAB if ids is None else len(ids)
    if ids is not None:
        shapes["lm_head.weight"] = (rows, HIDDEN)
    if form == "dspark":
        shapes |= {"markov_head.markov_w1.weight": (VOCAB, 4), "markov_head.markov_w2.weight": (rows, 4)}
        shapes |= {"confidence_head.proj.weight": (1, HIDDEN), "confidence_head.proj.bias": (1,)}
    tensors = {name: random(shape, 200 + number) for number, (name, shape) in enumerate(shapes.items())}
    if ids is not None:
        tensors["d2t"] = torch.from_numpy(ids - np.arange(len(ids)))
        tensors["t2d"] = torch.from_numpy(np.isin(np.arange(VOCAB), ids))
    layer_config = eagle3_config(architectures=..., draft_vocab_size=..., model_type="qwen3")
    layer_config |= {"num_hidden_layers": 2, "tie_word_embeddings": True}
    mask = {"mask_token_id": TOKENS - 1, "target_layer_ids": [1, 3, 5]}
    if form == "z-lab":
        config = {**layer_config, "architectures": ["DFlashDraftModel"], "block_size": 4, "dflash_config": mask}
        config["auto_map"] = {"AutoModel": "dflash.DFlashDraftModel"}
    elif form == "dspark":
        config = {**layer_config, "architectures": ["Qwen3DSparkModel"], "block_size": 4, "markov_rank": 4, **mask}
    else:
        config = as_speculators(layer_config | {"draft_vocab_size": rows})
        config |= {"architectures": ["DFlashSpeculator"], "speculators_model_type": "dflash", "block_size": 4}
        config |= {"aux_hidden_state_layer_ids": [2, 4, 6], "mask_token_id": TOKENS - 1}
    if ids is not None:
        config["draft_vocab_size"] = rows
    return write_model(folder, config | changes, tensors | (extra or {}))


def write_model(folder: Path, config: dict[str, Any], tensors: Tensors, container: Container = "safetensors") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", {key: value for key, value in config.items() if value is not ...})
    write_tensors(folder, tensors, container)
    return folder


def write_tensors(folder: Path, tensors: Tensors, container: Container = "safetensors") -> None:
    """Write tensors as one safetensors file, one `.bin`, or two shards with an index."""
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    if container == "bin":
        torch.save(tensors, folder / "pytorch_model.bin")
        return
    if container == "safetensors":
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return
    names = sorted(tensors)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: tensors[name] for name in part}, folder / file, {"format": "pt"})
    weight_map = {name: file for file, part in parts.items() for name in part}
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})


def config_of(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def change_config(folder: Path, **changes: Any) -> None:
    write_json(folder / "config.json", config_of(folder) | changes)


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def write_freq(path: Path, ids: Sequence[int] | np.ndarray) -> Path:
    torch.save([int(token_id) for token_id in ids], path)
    return path
