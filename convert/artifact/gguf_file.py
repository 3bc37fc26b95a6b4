"""The slim head as one GGUF file for llama.cpp: its keys, its tensors under llama.cpp's names, and its map.

Made of the artifact's own config.json and model.safetensors, tensor by tensor, so the same artifact gives the same
bytes. The map becomes absolute ids: for rows of the ids (1, 4, 5), (1, 3, 3) in safetensors and (1, 4, 5) here.
Names and keys are those of `gguf_layout.py`. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from eagle_slim.vocab_tools.tokenizer.tokenizer import LoadedTokenizer
from numpy.typing import NDArray

from ..errors import ArtifactError, MismatchError
from ..head import names
from ..head.draft_head import DraftHead
from ..rows.dtypes import first_nonfinite_row, rounded
from ..rows.safetensors_file import Bytes
from ..rows.writer import TensorPlan, array_plan
from .checksums import sha256_file
from .gguf_layout import GgufLayout, gguf_layout

GgufType = Literal["f32", "f16", "bf16", "q8_0"]
"""Element type of the matrices; norms are float32, the map is int64."""

_ALIGNMENT = 32
# Q8_0: 32 int8 and their float16 scale.
_BLOCK, _BLOCK_BYTES = 32, 34
# llama.cpp's `llama_ftype`, which its tools show; it reads each tensor's own type.
_FILE_TYPES: Mapping[str, int] = {"F32": 0, "F16": 1, "Q8_0": 7, "BF16": 32}
_MASK_KEY = "tokenizer.ggml.mask_token_id"
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)


@dataclass(frozen=True)
class GgufChoice:
    """Which GGUF files to write, one for each type of the matrices, and what they say of the target."""

    kinds: Sequence[GgufType]
    taps: Sequence[int]
    tokenizer: LoadedTokenizer


@dataclass(frozen=True)
class _GgufPlan(TensorPlan):
    """A tensor of a type that safetensors lacks, too."""

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensor's data."""
        return math.prod(self.shape) // _BLOCK * _BLOCK_BYTES if self.dtype == "Q8_0" else super().size_bytes


def gguf_name(kind: GgufType) -> str:
    """File name of the GGUF with matrices of a type."""
    return f"model-{kind}.gguf"


def check_widths(head: DraftHead, kind: GgufType) -> None:
    """Refuse a type that does not divide the rows of a matrix.

    Raises:
        MismatchError: q8_0, and a row is not made of blocks of 32.
    """
    for name in head.tensors if kind == "q8_0" else ():
        shape = head.tensors.shape(name)
        if len(shape) == 2 and shape[1] % _BLOCK:
            raise MismatchError.at(
                head.location,
                f"{name}: q8_0 has blocks of {_BLOCK} values, and a row has {shape[1]}.\nTake --gguf bf16.",
                tensor=name,
                found=shape[1],
            )


def write_gguf(folder: Path, head: DraftHead, kind: GgufType, choice: GgufChoice, name: str) -> dict[str, Any]:
    """Write the GGUF file of an artifact and return its entry for the manifest; llama.cpp's tools show `name`.

    Raises:
        MismatchError: a value is too large for float16.
        OSError: the disk refused.
    """
    plans = gguf_plans(head, kind)
    path = folder / gguf_name(kind)
    with path.open("xb") as file:
        file.write(_start(head, kind, choice, name, plans))
        for plan in plans:
            file.write(bytes(-file.tell() % _ALIGNMENT))
            for piece in plan.chunks():
                file.write(piece.reshape(-1).data)
        file.write(bytes(-file.tell() % _ALIGNMENT))
        file.flush()
        os.fsync(file.fileno())
    return {"size_bytes": path.stat().st_size, "sha256": sha256_file(path)}


def gguf_plans(head: DraftHead, kind: GgufType) -> list[TensorPlan]:
    """The tensors of the file, in its order: shapes [rows, columns], as safetensors has them."""
    layout = gguf_layout(head)
    plans = [_plan(head, name, kind, layout) for name in head.tensors]
    if (factors := _rope_factors(layout.rope)) is not None:
        plans.append(array_plan("rope_freqs.weight", factors))
    if head.draft_ids_to_target is not None:
        plans.append(array_plan("d2t", head.draft_ids_to_target))
    return plans


def check_gguf(path: Path, head: DraftHead, kind: GgufType, taps: Sequence[int] | None) -> str:
    """Compare every tensor of a GGUF file, and what places it, with the artifact; return what was compared, in words.

    `kind` is what the file's name says, `taps` the layers it must name, None where they are not known.

    Raises:
        ArtifactError: the file cannot be read, or differs.
    """
    import gguf

    try:
        reader = gguf.GGUFReader(path)
        found = {tensor.name: tensor for tensor in reader.tensors}
        said = {
            key: field.contents()
            for key, field in reader.fields.items()
            if key == _MASK_KEY or not key.startswith("tokenizer")
        }
        num_tokens = len(reader.fields["tokenizer.ggml.tokens"].data)
    except (ValueError, IndexError, KeyError, OSError) as error:
        raise ArtifactError.at(path, f"cannot be read as GGUF ({error}).\nWrite it again.") from error
    plans = gguf_plans(head, kind)
    problems = []
    layout = gguf_layout(head)
    expected: dict[str, Any] = {"general.architecture": layout.architecture, **layout.keys}
    if layout.mask_id is not None:
        expected[_MASK_KEY] = layout.mask_id
    if taps is not None:
        expected[layout.taps_key()] = list(taps)
    for key, value in expected.items():
        if not np.array_equal(np.asarray(said.get(key)), np.asarray(value)):
            problems.append(f"{key} is {said.get(key)!r}, expected {value!r}")
    if num_tokens != head.target_vocab:
        problems.append(f"it has {num_tokens} tokens, expected {head.target_vocab}")
    if sorted(found) != sorted(plan.name for plan in plans):
        problems.append("its tensors are not those of the head")
    else:
        problems += [f"{plan.name} differs" for plan in plans if not _same(found[plan.name], plan)]
    if problems:
        raise ArtifactError.at(path, f"{'; '.join(problems)}.\nWrite it again: eagle-convert DIR --gguf {kind} --force")
    return f"{len(plans)} tensors as in model.safetensors, {num_tokens} tokens"


def _same(tensor: Any, plan: TensorPlan) -> bool:
    if tensor.tensor_type.name != plan.dtype or tuple(map(int, tensor.shape[::-1])) != plan.shape:
        return False
    raw, start = np.ascontiguousarray(tensor.data).reshape(-1).view(np.uint8), 0
    for piece in plan.chunks():
        end = start + piece.size
        if not np.array_equal(raw[start:end], piece.reshape(-1)):
            return False
        start = end
    return start == len(raw)


def gguf_bytes(tensors: Sequence[TensorPlan], kind: GgufType) -> int:
    """Bytes of the tensors of the file, from those of the slim head; its start, with the tokenizer, is left out."""
    kept = [plan for plan in tensors if plan.name not in names.MAPS]
    types = [kind.upper() if len(plan.shape) == 2 else "F32" for plan in kept]
    return sum(
        _GgufPlan(each.name, dtype, each.shape, each.chunks).size_bytes for each, dtype in zip(kept, types, strict=True)
    )


def _plan(head: DraftHead, name: str, kind: GgufType, layout: GgufLayout) -> TensorPlan:
    info = head.tensors.info(name)
    wanted = kind.upper() if len(info.shape) == 2 else "F32"
    rows = None
    if name in layout.rotated:
        rows = np.arange(info.shape[0]).reshape(layout.rotated[name], 2, -1).swapaxes(1, 2).reshape(-1)

    def chunks() -> Generator[Bytes, None, str]:
        for piece in head.tensors.source.pieces(info.name, rows):
            yield _encoded(piece, info.dtype, wanted, f"{head.location}: {name}")
        return ""

    return _GgufPlan(layout.names[name], wanted, info.shape, chunks)


def _encoded(rows: Bytes, dtype: str, wanted: str, where: str) -> Bytes:
    """Rows uint8 [n, row_bytes] of one of `FLOATS` in another type."""
    if wanted == dtype:
        return rows
    if wanted == "Q8_0":
        import gguf

        values = rounded(rows, dtype, "F32").view(np.float32)
        blocks: Bytes = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
        return blocks
    result = rounded(rows, dtype, wanted)
    if first_nonfinite_row(result, wanted) is not None:
        raise MismatchError(f"{where} holds a value too large for float16.\nTake --gguf bf16.", found=where)
    return result


def _start(head: DraftHead, kind: GgufType, choice: GgufChoice, name: str, plans: Sequence[TensorPlan]) -> bytes:
    """All that comes before the tensors' data."""
    import gguf
    from gguf.gguf_writer import WriterState

    layout = gguf_layout(head)
    writer = gguf.GGUFWriter(None, layout.architecture)
    writer.add_name(name)
    writer.add_file_type(_FILE_TYPES[kind.upper()])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for key, value in layout.keys.items():
        add = writer.add_bool if isinstance(value, bool) else writer.add_float32
        if isinstance(value, int) and not isinstance(value, bool):
            add = writer.add_uint32
        add(key, value)
    scaling = layout.rope.get("rope_scaling") or {}
    if (scaling.get("rope_type") or scaling.get("type")) == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(float(scaling["factor"]))
    # As int32, like llama.cpp's own converter.
    writer.add_key_value(layout.taps_key(), list(choice.taps), gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.INT32)
    _add_tokenizer(writer, choice.tokenizer, head.target_vocab)
    if layout.mask_id is not None:
        writer.add_mask_token_id(layout.mask_id)
    for plan in plans:
        kind_of_tensor = gguf.GGMLQuantizationType[plan.dtype]
        writer.add_tensor_info(plan.name, plan.shape, np.dtype(np.float32), plan.size_bytes, kind_of_tensor)
    # Into memory: the data follows piece by piece, which the package's own writer cannot do.
    start = io.BytesIO()
    writer.fout, writer.state = [start], WriterState.EMPTY
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    return start.getvalue()


def _rope_factors(config: Mapping[str, Any]) -> NDArray[np.float32] | None:
    """What each frequency is divided by, float32 [head_dim / 2], with Llama-3's scaling; None without.

    Source: `_compute_llama3_parameters` in transformers, `modeling_rope_utils.py`.
    """
    scaling = config.get("rope_scaling") or {}
    if (scaling.get("rope_type") or scaling.get("type")) != "llama3":
        return None
    head_dim = config["head_dim"]
    rotated = int(head_dim * (config.get("partial_rotary_factor") or 1))
    half = np.arange(0, rotated, 2, dtype=np.float64) / rotated
    turns = scaling["original_max_position_embeddings"] / (2 * math.pi * float(config["rope_theta"]) ** half)
    low, high, factor = (float(scaling[key]) for key in ("low_freq_factor", "high_freq_factor", "factor"))
    # 1 from `high` turns within the original context on, `factor` up to `low`, and smoothly between them.
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    factors: NDArray[np.float32] = (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)
    # llama.cpp wants one for each pair of a head, whether it rotates or not.
    return np.pad(factors, (0, head_dim // 2 - len(factors)), constant_values=1)


def _add_tokenizer(writer: Any, tokenizer: LoadedTokenizer, target_vocab: int) -> None:
    """The target's tokens, their types and special ids, with padding up to the rows of the vocabulary.

    llama.cpp encodes and decodes with the target's own file alone, so the head's needs no rule of how text is split.
    """
    import json

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
    for role, add in (
        ("bos_token", writer.add_bos_token_id),
        ("eos_token", writer.add_eos_token_id),
        ("unk_token", writer.add_unk_token_id),
        ("pad_token", writer.add_pad_token_id),
    ):
        special = tokenizer.vocab.get(tokenizer.special_tokens.get(role, ""), target_vocab)
        if special < target_vocab:
            add(special)
            if role == "unk_token" and not is_byte_level:
                types[special] = _UNKNOWN
    writer.add_token_types(types)
