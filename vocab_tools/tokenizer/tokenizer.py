"""A tokenizer as ranking needs it: which ids are real, what they say, which chat markers it knows, its hash.

The hash names a vocabulary, not a folder: it is over the canonical (id, token, special) list, the normaliser and the
pre-tokeniser. The chat template has a hash of its own, because a changed template changes no id.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def _sha256(value: object) -> str:
    text = json.dumps(value, ensure_ascii=True, sort_keys=True, separators=(",", ":"))
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def bytes_of_symbols() -> dict[str, int]:
    """Return the byte that each symbol of a byte-level vocabulary stands for, 256 entries.

    The table is GPT-2's: printable Latin-1 characters stand for themselves, the other bytes for the code points from
    256 on (`bytes_to_unicode` in openai/gpt-2, `src/encoder.py`).
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    shifted = (byte for byte in range(256) if byte not in set(printable))
    table.update({chr(256 + position): byte for position, byte in enumerate(shifted)})
    return table


_BYTE_OF_SYMBOL = bytes_of_symbols()
_BYTE_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, eq=False)
class LoadedTokenizer:
    """A fast tokenizer with the small files beside it.

    Attributes:
        backend: the `tokenizers.Tokenizer`, truncation and padding switched off.
        source: Hub id or path it came from, as the user gave it.
        revision: commit of the Hub repository, or None for local files.
        chat_templates: Jinja sources by name; the usual single one is called "default".
        special_tokens: role names of tokenizer_config.json ("bos_token", "eos_token", ...) to token text.
        generation_config: generation_config.json; without that file, the token ids that config.json names.
    """

    backend: Tokenizer
    source: str
    revision: str | None = None
    chat_templates: Mapping[str, str] = field(default_factory=dict)
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    generation_config: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def vocab(self) -> dict[str, int]:
        """Token text to id, added tokens included."""
        return dict(self.backend.get_vocab(with_added_tokens=True))

    @cached_property
    def added_tokens(self) -> dict[int, str]:
        """Added tokens by id: markers, reserved slots, and in some vocabularies white space or HTML tags."""
        return {token_id: token.content for token_id, token in self._added.items()}

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of the added tokens that the tokenizer itself calls special."""
        return frozenset(token_id for token_id, token in self._added.items() if token.special)

    @cached_property
    def _added(self) -> dict[int, Any]:
        return dict(sorted(self.backend.get_added_tokens_decoder().items()))

    @cached_property
    def real_ids(self) -> NDArray[np.int64]:
        """Ids that some token has, ascending, int64 [tokens]. A model's padding rows are not among them."""
        return np.unique(np.fromiter(self.vocab.values(), np.int64, len(self.vocab)))

    @cached_property
    def vocab_size(self) -> int:
        """Largest id + 1: the length of a count per id."""
        return int(self.real_ids[-1]) + 1

    @cached_property
    def token_texts(self) -> list[str | None]:
        """Token text by id as the vocabulary spells it, None where no token has the id; [vocab_size] entries."""
        texts: list[str | None] = [None] * self.vocab_size
        for text, token_id in self.vocab.items():
            texts[token_id] = text
        for token_id, text in self.added_tokens.items():
            texts[token_id] = text
        return texts

    @cached_property
    def tokenizer_hash(self) -> str:
        """Hash of the canonical (id, token, special) list, the normaliser and the pre-tokeniser."""
        special = self.special_ids
        tokens = [
            [token_id, text, token_id in special] for token_id, text in enumerate(self.token_texts) if text is not None
        ]
        return _sha256([tokens, self._component("normalizer"), self._component("pre_tokenizer")])

    @property
    def chat_template(self) -> str | None:
        """The Jinja source of the default chat template, or None."""
        return self.chat_templates.get("default")

    @cached_property
    def chat_template_hash(self) -> str | None:
        """Hash of all chat templates, or None without any."""
        return _sha256(dict(self.chat_templates)) if self.chat_templates else None

    @cached_property
    def byte_level(self) -> bool:
        """Whether tokens are spelled in GPT-2's byte alphabet."""
        components = [self._component(name) for name in ("normalizer", "pre_tokenizer", "decoder")]
        return any('"ByteLevel"' in json.dumps(component) for component in components)

    @cached_property
    def byte_of_id(self) -> dict[int, int]:
        """The tokens that stand for one byte: id to byte value, spelled in the byte alphabet or as `<0xNN>`."""
        found: dict[int, int] = {}
        added = self.added_tokens
        for text, token_id in self.vocab.items():
            if token_id in added:
                continue
            fallback = _BYTE_FALLBACK.fullmatch(text)
            if self.byte_level and len(text) == 1 and text in _BYTE_OF_SYMBOL:
                found[token_id] = _BYTE_OF_SYMBOL[text]
            elif fallback:
                found[token_id] = int(fallback.group(1), 16)
        return dict(sorted(found.items()))

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes a token adds to the text (a SentencePiece "▁" is a space); b"" for an unknown id."""
        text = self.token_texts[token_id] if 0 <= token_id < self.vocab_size else None
        if text is None:
            return b""
        # Gemma-3's runs of spaces are added tokens, spelled with "▁"; special markers are never spelled in it.
        if token_id in self.special_ids or (self.byte_level and token_id in self.added_tokens):
            return text.encode()
        if token_id in self.byte_of_id:
            return bytes([self.byte_of_id[token_id]])
        if self.byte_level and all(symbol in _BYTE_OF_SYMBOL for symbol in text):
            return bytes(_BYTE_OF_SYMBOL[symbol] for symbol in text)
        return text.replace("▁", " ").encode()

    def _component(self, name: str) -> Any:
        component = getattr(self.backend, name)
        return None if component is None else json.loads(component.__getstate__())
