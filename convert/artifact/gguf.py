"""The slim EAGLE-3 head as a GGUF file for llama.cpp, written with the `gguf` library.

Names and keys are those of llama.cpp b11434: `src/models/eagle3.cpp`, and its own converter, `conversion/llama.py`,
which makes the same tensors and keys of the artifact (`make test-engines-all`). The map becomes absolute ids: for rows
of the ids (1, 4, 5), `d2t` is (1, 3, 3) in safetensors and (1, 4, 5) here.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import gguf
import numpy as np
from eagle_slim.vocab_tools.errors import UsageError
from eagle_slim.vocab_tools.tokenizer import LoadedTokenizer
from numpy.typing import NDArray

from ..engines import HeadFacts, head_findings
from ..errors import MismatchError, UnsupportedHeadError
from ..heads import names
from ..heads.config import default_taps
from ..heads.draft_head import DraftHead
from ..heads.open import open_head
from ..sources.builtin import LAYER_TENSORS
from .checksums import sha256_file

GgufType = Literal["f32", "f16", "bf16", "q8_0"]
"""Element type of the matrices; norms are float32, the map is int64."""
GgufRequest = GgufType | Literal["auto"]

_TYPE_OF: Mapping[str, GgufType] = {"BF16": "bf16", "F16": "f16", "F32": "f32"}
# Q8_0: a float16 scale and 32 int8.
_BLOCK, _BLOCK_BYTES = 32, 34
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
_NAMES = {
    names.FC: "fc.weight",
    "norm.weight": "output_norm.weight",
    names.LM_HEAD: "output.weight",
    names.EMBEDDING: "token_embd.weight",
    "input_norm.weight": "enc.output_norm.weight",
    "midlayer.hidden_norm.weight": "blk.0.attn_norm_2.weight",
    **{f"midlayer.{name}.weight": f"blk.0.{stored}.weight" for stored, name in LAYER_TENSORS.items()},
}


@dataclass(frozen=True)
class GgufChoice:
    """GGUF files to write, one for each type of the matrices, and what they say of the target.

    `taps`: the head reads the inputs of these decoder layers of the target.
    """

    kinds: Sequence[GgufType]
    taps: Sequence[int]
    tokenizer: LoadedTokenizer


def choose_gguf(
    head: DraftHead, kinds: Sequence[GgufRequest], target_layers: int | None, tokenizer: LoadedTokenizer | None
) -> GgufChoice:
    """Settle the GGUF files of a head that llama.cpp serves; the type "auto" is the head's own.

    Raises:
        UnsupportedHeadError: llama.cpp does not serve it, with the reason.
        MismatchError: q8_0, and a matrix has rows that are not made of blocks of 32.
        UsageError: the target's number of layers (`target_layers`) or its tokenizer is needed and not known.
    """
    if head.kind == "dflash":
        problem = "--gguf: written for EAGLE-3 heads.\nMake a DFlash draft's with llama.cpp: docs/serving/dflash.md."
        raise UnsupportedHeadError.at(head.location, problem)
    found = head_findings(HeadFacts.of(head, target_layers=target_layers), "llama.cpp")
    if errors := [str(finding) for finding in found if finding.severity == "error"]:
        problem = f"--gguf: no file can be written.\n{'; '.join(errors)}."
        raise UnsupportedHeadError.at(head.location, problem)
    types = tuple(dict.fromkeys(_TYPE_OF[head.dtype_name] if kind == "auto" else kind for kind in kinds))
    for name in head.tensors if "q8_0" in types else ():
        shape = head.tensors.shape(name)
        if len(shape) == 2 and shape[1] % _BLOCK:
            problem = f"{name}: q8_0 has blocks of {_BLOCK} values, and a row has {shape[1]}.\nTake --gguf bf16."
            raise MismatchError.at(head.location, problem)
    taps = head.taps(target_layers)
    if taps is None and target_layers is not None:
        taps = default_taps(target_layers)
    if tokenizer is None or taps is None:
        problem = "--gguf: the file holds the target's tokens and its captured layers, and the target is not known."
        raise UsageError(f"{problem}\nName it with --target.")
    return GgufChoice(types, taps, tokenizer)


def write_gguf(folder: Path, choice: GgufChoice, name: str) -> dict[str, dict[str, Any]]:
    """Write the GGUF files of an artifact from its config.json and model.safetensors; return their manifest entries.

    `name` is the model's, which llama.cpp's tools show. Raises MismatchError where a value is too large for a type.
    """
    head, written = open_head(folder), {}
    for kind in choice.kinds:
        path = folder / f"model-{kind}.gguf"
        _write(path, head, kind, choice, name)
        written[path.name] = {"size_bytes": path.stat().st_size, "sha256": sha256_file(path)}
    return written


def _write(path: Path, head: DraftHead, kind: GgufType, choice: GgufChoice, name: str) -> None:
    writer = gguf.GGUFWriter(path, "eagle3")
    writer.add_name(name)
    # For llama.cpp's tools to show; it reads each tensor's own type.
    writer.add_file_type(gguf.LlamaFileType["ALL_F32" if kind == "f32" else f"MOSTLY_{kind.upper()}"])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in _keys(head).items():
        add[type(value)](f"eagle3.{key}", value)
    # As int32, like llama.cpp's own converter.
    writer.add_key_value("eagle3.target_layers", list(choice.taps), gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.INT32)
    _add_tokenizer(writer, choice.tokenizer, head.target_vocab)
    found = {"rope_freqs.weight": _rope_factors(head), "d2t": head.draft_ids_to_target}
    extra = {name: values for name, values in found.items() if values is not None}
    for stored in head.tensors:
        shape = head.tensors.shape(stored)
        element_type = gguf.GGMLQuantizationType[kind.upper() if len(shape) == 2 else "F32"]
        block, size = gguf.GGML_QUANT_SIZES[element_type]
        num_bytes = math.prod(shape) // block * size
        writer.add_tensor_info(_NAMES[stored], shape, np.dtype(np.float32), num_bytes, element_type)
    for name, values in extra.items():
        writer.add_tensor_info(name, values.shape, values.dtype, values.nbytes)
    with contextlib.closing(writer):
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        # One tensor in memory at a time.
        for stored in head.tensors:
            writer.write_tensor_data(_tensor(head, stored, kind))
        for values in extra.values():
            writer.write_tensor_data(values)


def _keys(head: DraftHead) -> dict[str, Any]:
    config, scaling = head.config, head.config.get("rope_scaling") or {}
    linear = {"rope.scaling.type": "linear", "rope.scaling.factor": float(scaling.get("factor", 1))}
    return {
        "vocab_size": head.target_vocab,
        "context_length": int(config.get("max_position_embeddings") or 2048),
        "embedding_length": head.hidden_size,
        "block_count": 1,
        "feed_forward_length": int(config["intermediate_size"]),
        "attention.head_count": int(config["num_attention_heads"]),
        "attention.head_count_kv": int(config["num_key_value_heads"]),
        "attention.key_length": int(config["head_dim"]),
        "attention.value_length": int(config["head_dim"]),
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.dimension_count": int(config["head_dim"]),
        "rope.freq_base": float(config["rope_theta"]),
        "target_hidden_size": head.target_hidden_size,
        "norm_before_residual": bool(config.get("norm_before_residual")),
        "norm_before_fc": "input_norm.weight" in head.tensors,
        **(linear if "linear" in (scaling.get("rope_type"), scaling.get("type")) else {}),
    }


def _tensor(head: DraftHead, name: str, kind: GgufType) -> NDArray[Any]:
    """Encode a tensor in a type of GGUF: the bytes of q8_0 and bf16, the numbers of the others."""
    values: NDArray[np.float32] = head.tensors.get(name).float().numpy()
    if values.ndim == 1:
        return values
    part = name.removeprefix("midlayer.self_attn.")
    if part in ("q_proj.weight", "k_proj.weight"):
        # llama.cpp rotates neighbouring values in `eagle3`, where transformers rotates halves of a head.
        heads = head.config["num_attention_heads" if part == "q_proj.weight" else "num_key_value_heads"]
        values = values.reshape(heads, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
    with np.errstate(over="ignore"):
        result: NDArray[Any] = gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind.upper()])
    scales = result
    if kind == "q8_0":
        scales = np.ascontiguousarray(result.reshape(-1, _BLOCK_BYTES)[:, :2]).view(np.float16)
    if kind in ("f16", "q8_0") and not np.isfinite(scales).all():
        raise MismatchError.at(head.location, f"{name} holds a value too large for {kind}.\nTake --gguf bf16.")
    return result


def _rope_factors(head: DraftHead) -> NDArray[np.float32] | None:
    """Return the divisors of the frequencies, float32 [head_dim / 2], with Llama-3's scaling; None without.

    Source: `_compute_llama3_parameters` in transformers, `modeling_rope_utils.py`.
    """
    scaling, head_dim = head.config.get("rope_scaling") or {}, head.config["head_dim"]
    if "llama3" not in (scaling.get("rope_type"), scaling.get("type")):
        return None
    exponents = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    turns = scaling["original_max_position_embeddings"] / (2 * math.pi * float(head.config["rope_theta"]) ** exponents)
    low, high, factor = (float(scaling[key]) for key in ("low_freq_factor", "high_freq_factor", "factor"))
    # 1 from `high` turns within the original context on, `factor` up to `low`, and smoothly between them.
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    factors: NDArray[np.float32] = (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)
    return factors


def _add_tokenizer(writer: Any, tokenizer: LoadedTokenizer, target_vocab: int) -> None:
    """Add the target's tokens, their types and special ids, padded to the rows of the vocabulary.

    llama.cpp encodes and decodes with the target's own file alone, so the head's needs no rule of how text is split.
    """
    model = json.loads(tokenizer.backend.to_str())["model"]
    is_byte_level = model["type"] == "BPE" and tokenizer.byte_level
    texts = [*tokenizer.token_texts[:target_vocab], *[None] * (target_vocab - tokenizer.vocab_size)]
    types = [_UNUSED if text is None else _NORMAL for text in texts]
    for token_id in tokenizer.added_tokens:
        if token_id < target_vocab:
            types[token_id] = _CONTROL if token_id in tokenizer.special_ids else _USER_DEFINED
    if is_byte_level:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("default")
        writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]])
    else:
        writer.add_tokenizer_model("llama")
        writer.add_token_scores([-1000.0] * target_vocab)
        for token_id in tokenizer.byte_of_id:
            types[token_id] = _BYTE
    writer.add_token_list([f"[PAD{index}]" if text is None else text for index, text in enumerate(texts)])
    for role in ("bos", "eos", "unk", "pad"):
        special = tokenizer.vocab.get(tokenizer.special_tokens.get(f"{role}_token", ""), target_vocab)
        if special < target_vocab:
            getattr(writer, f"add_{role}_token_id")(special)
            if role == "unk" and not is_byte_level:
                types[special] = _UNKNOWN
    writer.add_token_types(types)
