"""Texts → token ids, in batches, through `tokenizers` or `fastokens`.

`fastokens` is only ever used after it has given the ids of `tokenizers` on a probe of the very corpus.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from itertools import chain
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from .errors import TokenizerError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TokenizerLibrary = Literal["tokenizers", "fastokens"]

# Characters per call: `tokenizers` keeps about 100 bytes per token until a call returns.
BATCH_CHARS = 1 << 20
MAX_TEXT_CHARS = 1 << 20


@dataclass(frozen=True)
class EncoderSpec:
    """The description of an encoder, from which any process builds it; see `encoder_spec`."""

    tokenizer_json: str
    vocab_size: int
    library: TokenizerLibrary = "tokenizers"


def encoder_spec(backend: Tokenizer, vocab_size: int) -> EncoderSpec:
    """Describe a tokenizer, without truncation, padding and post-processor."""
    definition = json.loads(backend.to_str())
    definition.update(truncation=None, padding=None, post_processor=None)
    return EncoderSpec(json.dumps(definition, ensure_ascii=False), vocab_size)


@dataclass(frozen=True, eq=False)
class Encoded:
    """Token ids of several texts, concatenated, uint32 [tokens], and where each begins, int64 [texts + 1]."""

    token_ids: NDArray[np.uint32]
    offsets: NDArray[np.int64]


Encode = Callable[[Sequence[str]], Encoded]
"""Encodes a small batch of texts as they are: special tokens in a text are recognised, none are added."""


def name_and_version(library: TokenizerLibrary) -> str:
    """Return the name and version of an installed library, for provenance."""
    return f"{library} {version(library)}"


def build_encoder(spec: EncoderSpec) -> Encode:
    """Build an encoder; raises TokenizerError where its library is missing or cannot load the tokenizer."""
    if spec.library == "fastokens":
        return _fastokens(spec.tokenizer_json)
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(spec.tokenizer_json)

    def encode(texts: Sequence[str]) -> Encoded:
        try:
            encodings = tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        except Exception as error:  # tokenizers raises bare Exception from Rust
            raise TokenizerError(f"tokenizers cannot encode the corpus with this tokenizer: {error}.") from error
        offsets = np.zeros(len(encodings) + 1, np.int64)
        # The quickest way from lists of int to memory: 8 ns per token, half of numpy's.
        ids = array("I")
        for position, encoding in enumerate(encodings, 1):
            ids.extend(encoding.ids)
            offsets[position] = len(ids)
        return Encoded(np.frombuffer(ids, np.uint32), offsets)

    return encode


def _fastokens(tokenizer_json: str) -> Encode:
    try:
        import fastokens
    except ImportError as error:
        raise TokenizerError("fastokens is not installed. Try: pip install fastokens") from error
    try:
        tokenizer = fastokens.Tokenizer.from_json_str(tokenizer_json)
    except Exception as error:  # fastokens raises bare exceptions from Rust
        raise TokenizerError(f"fastokens cannot load this tokenizer: {error}") from error

    def encode(texts: Sequence[str]) -> Encoded:
        try:
            ids, offsets = tokenizer.encode_batch_flat(list(texts), add_special_tokens=False)
        except Exception as error:  # any error at all
            problem = "cannot encode the corpus (--tokenizer-library tokenizers may)"
            raise TokenizerError(f"fastokens {problem}: {error}") from error
        return Encoded(np.frombuffer(ids, np.uint32), np.frombuffer(offsets, np.uint64).astype(np.int64))

    return encode


def encode_all(encode: Encode, texts: Sequence[str]) -> Encoded:
    """Encode any number of texts of any length in bounded memory.

    A text over MAX_TEXT_CHARS is encoded in pieces, cut after a line end or before a space, so that at such a cut a
    token may differ from those of the whole.
    """
    if not texts:
        return Encoded(np.zeros(0, np.uint32), np.zeros(1, np.int64))
    pieces = [_pieces(text) for text in texts]
    batches = [encode(batch) for batch in _batches(list(chain.from_iterable(pieces)))]
    offsets = np.cumsum(np.concatenate([np.zeros(1, np.int64), *(np.diff(batch.offsets) for batch in batches)]))
    token_ids = np.concatenate([batch.token_ids for batch in batches])
    return Encoded(token_ids, offsets[np.cumsum([0, *map(len, pieces)])])


def _pieces(text: str) -> list[str]:
    pieces = []
    start = 0
    while len(text) - start > MAX_TEXT_CHARS:
        stop = start + MAX_TEXT_CHARS
        cuts = (text.rfind("\n", start, stop) + 1, text.rfind(" ", start + 1, stop), stop)
        cut = next(cut for cut in cuts if cut > start)
        pieces.append(text[start:cut])
        start = cut
    return [*pieces, text[start:]]


def _batches(texts: Sequence[str]) -> Iterator[Sequence[str]]:
    start = size = 0
    for position, text in enumerate(texts):
        if size and size + len(text) > BATCH_CHARS:
            yield texts[start:position]
            start, size = position, 0
        size += len(text)
    yield texts[start:]


def encode_tail(tokenizer: Tokenizer, text: str, start: int) -> NDArray[np.uint32]:
    """Encode a text and keep the tokens that begin at or behind the character `start`, uint32 [tokens]."""
    encoding = tokenizer.encode(text, add_special_tokens=False)
    kept = [token_id for token_id, (begin, _) in zip(encoding.ids, encoding.offsets, strict=True) if begin >= start]
    return np.array(kept, np.uint32)


def choose_library(
    requested: TokenizerLibrary | Literal["auto"], spec: EncoderSpec, probe: Iterable[tuple[str, str]]
) -> tuple[TokenizerLibrary, str]:
    """Return the library that encodes the corpus, and why.

    "auto" takes `fastokens` where it is installed and gives the ids of `tokenizers` on the probe: (place, text) of some
    texts of the corpus. Raises TokenizerError where `fastokens` was requested, and is not installed, wrong or untried.
    """
    if requested == "tokenizers":
        return "tokenizers", "as asked for"
    try:
        reason = _difference(spec, build_encoder(replace(spec, library="fastokens")), list(probe))
    except TokenizerError as error:
        reason = str(error).rstrip(".")
    if not reason:
        return "fastokens", f"{name_and_version('fastokens')} gave the ids of tokenizers on texts of the corpus"
    if requested == "fastokens":
        raise TokenizerError(f"{reason}. Use --tokenizer-library tokenizers.")
    return "tokenizers", reason


def _difference(spec: EncoderSpec, fast: Encode, probe: Sequence[tuple[str, str]]) -> str:
    """Say why an encoder may not stand in for `tokenizers` on a probe; "" where it may."""
    texts = [text for _, text in probe]
    if not any(texts):
        return "found no text in the corpus to compare fastokens with tokenizers on"
    expected, found = (encode_all(encode, texts) for encode in (build_encoder(spec), fast))
    rows = (np.split(encoded.token_ids, encoded.offsets[1:-1]) for encoded in (expected, found))
    for (place, _), one, other in zip(probe, *rows, strict=True):
        if not np.array_equal(one, other):
            return f"fastokens gives other ids than tokenizers at {place}"
    return ""
