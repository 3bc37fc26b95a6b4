"""A tokenizer: Hub id, folder or tokenizer.json → which ids are real, what they say, its chat templates, its hash.

The hash names a vocabulary, not a folder: it is over the canonical (id, token, special) list, the normaliser and the
pre-tokeniser. The chat template has a hash of its own, because a changed template changes no id.

Of a repository of the Hub only the small text files are fetched, never weights, and none of its code is ever run.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from .errors import MissingTokenizerFileError, SourceError, TokenizerError, UsageError
from .files import expand_home, place_below, read_object, read_text, regular_file
from .hub import built_in_folder, find_folder
from .target import language_configs

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_TOKENIZER, _CONFIG = "tokenizer.json", "tokenizer_config.json"
_SIDE_FILES = ("special_tokens_map.json", "generation_config.json", "config.json")
_TEMPLATES = ("chat_template.jinja", "chat_template.json")
_TEMPLATE_FOLDER = "additional_chat_templates"

_WHAT_TO_GIVE = "Give a tokenizer.json, its folder, or a Hub id (--tokenizer)."


def _canonical(value: object) -> str:
    return json.dumps(value, ensure_ascii=True, sort_keys=True, separators=(",", ":"))


def _sha256(text: str) -> str:
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def bytes_of_symbols() -> dict[str, int]:
    """Return the byte that each symbol of a byte-level vocabulary stands for, 256 entries.

    The table is GPT-2's: printable Latin-1 characters stand for themselves, the other bytes for the code points from
    256 on (`bytes_to_unicode` in openai/gpt-2, `src/encoder.py`).
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    shifted = {chr(256 + position): byte for position, byte in enumerate(others)}
    return {chr(byte): byte for byte in printable} | shifted


_BYTE_OF_SYMBOL = bytes_of_symbols()
_BYTE_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, eq=False)
class LoadedTokenizer:
    """A fast tokenizer with the small files beside it.

    Attributes:
        backend: truncation and padding are switched off.
        source, revision: Hub id or path as the user gave it; commit of the repository, None for local files.
        chat_templates: Jinja sources by name; the usual single one is called "default".
        special_tokens: role names of tokenizer_config.json ("bos_token", "eos_token", ...) to token text.
        generation_config: generation_config.json, completed by the token ids that config.json names.
        chat_template_kwargs: further variables of the chat template, such as `enable_thinking`.
        is_template_given: whether `with_chat_template` changed the template or its variables.
    """

    backend: Tokenizer
    source: str
    revision: str | None = None
    chat_templates: Mapping[str, str] = field(default_factory=dict)
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    generation_config: Mapping[str, Any] = field(default_factory=dict)
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    is_template_given: bool = False

    def with_chat_template(
        self, template: str | None = None, kwargs: Mapping[str, Any] | None = None
    ) -> LoadedTokenizer:
        """Return this tokenizer with another template, and variables for it; UsageError for one that rendering sets."""
        if reserved := {"messages", "add_generation_prompt"} & (kwargs or {}).keys():
            raise UsageError(f"--chat-template-kwargs: {reserved.pop()} is set by each rendering. Leave it out.")
        templates = self.chat_templates if template is None else {"default": template}
        return replace(self, chat_templates=templates, chat_template_kwargs=kwargs or {}, is_template_given=True)

    @cached_property
    def vocab(self) -> dict[str, int]:
        """Token text to id, added tokens included."""
        return dict(self.backend.get_vocab(with_added_tokens=True))

    @cached_property
    def added_tokens(self) -> dict[int, str]:
        """Added tokens by id: markers, reserved slots, and in some vocabularies white space or HTML tags."""
        return {token_id: token.content for token_id, token in sorted(self.backend.get_added_tokens_decoder().items())}

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of the added tokens that the tokenizer itself calls special."""
        return frozenset(i for i, token in self.backend.get_added_tokens_decoder().items() if token.special)

    @cached_property
    def configured_ids(self) -> tuple[tuple[int, str], ...]:
        """Ids that configuration files name as eos, bos or pad, each with its role; some may be of no token."""
        configured: list[tuple[int, str]] = []
        for role in ("eos", "bos", "pad"):
            value = self.generation_config.get(f"{role}_token_id")
            ids = value if isinstance(value, list) else [value]
            named = self.backend.token_to_id(self.special_tokens.get(f"{role}_token", ""))
            configured += [(token_id, role) for token_id in (*ids, named) if type(token_id) is int]
        return tuple(configured)

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
        texts = {**{token_id: text for text, token_id in self.vocab.items()}, **self.added_tokens}
        return [*map(texts.get, range(self.vocab_size))]

    @cached_property
    def tokenizer_hash(self) -> str:
        """Hash of the canonical (id, token, special) list, the normaliser and the pre-tokeniser."""
        # As JSON at once: a list for each token would have the garbage collector look through all that was imported.
        tokens = ",".join(
            f"[{token_id},{json.dumps(text)},{'true' if token_id in self.special_ids else 'false'}]"
            for token_id, text in enumerate(self.token_texts)
            if text is not None
        )
        components = [self._component(name) for name in ("normalizer", "pre_tokenizer")]
        return _sha256(f"[[{tokens}],{_canonical(components)[1:]}")

    @property
    def chat_template(self) -> str | None:
        """The default chat template, or None."""
        return self.chat_templates.get("default")

    @cached_property
    def chat_template_hash(self) -> str | None:
        """Hash of all chat templates, or None without any."""
        return _sha256(_canonical(dict(self.chat_templates))) if self.chat_templates else None

    @cached_property
    def byte_level(self) -> bool:
        """Whether tokens are spelled in GPT-2's byte alphabet."""
        components = [self._component(name) for name in ("normalizer", "pre_tokenizer", "decoder")]
        return any('"ByteLevel"' in json.dumps(component) for component in components)

    @cached_property
    def byte_of_id(self) -> dict[int, int]:
        """The tokens that stand for one byte: id to byte value, spelled in the byte alphabet or as `<0xNN>`."""
        byte_of_id: dict[int, int] = {}
        for text, token_id in self.vocab.items():
            if self.byte_level and text in _BYTE_OF_SYMBOL:
                byte_of_id[token_id] = _BYTE_OF_SYMBOL[text]
            elif fallback := _BYTE_FALLBACK.fullmatch(text):
                byte_of_id[token_id] = int(fallback[1], 16)
        return {token_id: byte for token_id, byte in sorted(byte_of_id.items()) if token_id not in self.added_tokens}

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


def load_tokenizer(source: str | Path, revision: str | None = None, offline: bool = False) -> LoadedTokenizer:
    """Load a tokenizer, and what is beside it, from a Hub id (`offline`: the cache), a folder or a tokenizer.json.

    Raises TokenizerError for one that is missing, gated, unreadable, or without a tokenizer.json.
    """
    path = expand_home(source)
    if not str(source):
        raise TokenizerError(f"The tokenizer's name is empty. {_WHAT_TO_GIVE}")
    if path.is_file():
        return _load(str(source), path, path.parent if path.name == _TOKENIZER else None)
    if path.is_dir():
        load = _load_built_in if path == built_in_folder() else _load
        return load(str(source), path / _TOKENIZER, path)
    if path.exists():
        regular_file(path, TokenizerError)
    # A Hub id may have dots (org/Llama-3.1-8B) but never more than one slash.
    if path.is_absolute() or str(source).startswith((".", "~")) or path.suffix == ".json" or len(path.parts) > 2:
        raise TokenizerError(f"{source}: no such file or folder. {_WHAT_TO_GIVE}")
    try:
        folder, commit = find_folder(str(source), revision, offline, _wanted)
    except SourceError as error:
        raise TokenizerError(str(error)) from error
    return _load(str(source), folder / _TOKENIZER, folder, commit)


def check_tokenizer(tokenizer: LoadedTokenizer, tokenizer_hash: str | None, where: str) -> list[str]:
    """Check the tokenizer of the data named by `where`: a warning without a hash, TokenizerError for another."""
    if tokenizer_hash is None:
        return [f"{where}: no tokenizer is recorded; the ids are taken to be those of {tokenizer.source}"]
    if tokenizer_hash != tokenizer.tokenizer_hash:
        problem = f"expected {tokenizer_hash}, but {tokenizer.source} has {tokenizer.tokenizer_hash}"
        advice = "Name the one that was used then (--tokenizer), or count again with this one."
        raise TokenizerError(f"{where}: made with another tokenizer: {problem}. {advice}")
    return []


def _wanted(names: Sequence[str], where: str) -> list[str]:
    templates = [name for name in names if name.startswith(f"{_TEMPLATE_FOLDER}/") and name.endswith(".jinja")]
    return [name for name in names if name in (_TOKENIZER, _CONFIG, *_SIDE_FILES, *_TEMPLATES)] + templates


def _load(source: str, file: Path, folder: Path | None, commit: str | None = None) -> LoadedTokenizer:
    from tokenizers import Tokenizer

    def beside(name: str) -> dict[str, Any]:
        return read_object(folder / name, TokenizerError) if folder and (folder / name).is_file() else {}

    if not file.is_file():
        way = f"`AutoTokenizer.from_pretrained({source!r}).save_pretrained(FOLDER)`, and give --tokenizer FOLDER"
        advice = f"Make one with transformers, where you trust the code of the repository: {way}."
        raise MissingTokenizerFileError(f"{source}: no {_TOKENIZER}. {place_below(file).strip() or advice}")
    regular_file(file, TokenizerError)
    try:
        backend = Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises bare Exception from Rust
        raise TokenizerError(f"{file}: `tokenizers` cannot read this as tokenizer.json: {error}.") from error
    if backend.get_vocab_size() == 0:
        raise TokenizerError(f"{file}: it has no token. {_WHAT_TO_GIVE}")
    config = beside(_CONFIG)
    _add_missing_tokens(backend, config, file.parent / _CONFIG)
    backend.no_truncation()
    backend.no_padding()
    templates: dict[str, str] = {}
    for name in (_CONFIG, "chat_template.json"):
        templates |= _chat_templates(beside(name).get("chat_template"), f"{folder}/{name}")
    if folder is not None:
        for file in (folder / "chat_template.jinja", *sorted((folder / _TEMPLATE_FOLDER).glob("*.jinja"))):
            if file.is_file():
                templates["default" if file.parent == folder else file.stem] = read_text(file, TokenizerError)
    special_tokens = _special_tokens(config, beside("special_tokens_map.json"))
    generation_config = _generation_config(beside("generation_config.json"), beside("config.json"))
    return LoadedTokenizer(backend, source, commit, templates, special_tokens, generation_config)


_load_built_in = lru_cache(1)(_load)
"""A head's ranking and its target read it, too; its files never change."""


def _add_missing_tokens(backend: Tokenizer, config: Mapping[str, Any], file: Path) -> None:
    """Add the tokens that only tokenizer_config.json knows, as transformers does on loading."""
    from tokenizers import AddedToken

    decoder = config.get("added_tokens_decoder") or {}
    try:
        entries = {int(key): (str(entry["content"]), entry) for key, entry in decoder.items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        form = 'ids with tokens, as in {"2": {"content": "</s>"}}'
        raise TokenizerError(f"{file}: added_tokens_decoder: expected {form}.") from error
    missing = entries.keys() - backend.get_added_tokens_decoder().keys()
    for token_id in sorted(missing.difference(backend.get_vocab(with_added_tokens=True).values()) if missing else ()):
        content, entry = entries[token_id]
        options = {key: bool(entry.get(key, False)) for key in ("single_word", "lstrip", "rstrip", "special")}
        normalized = bool(entry.get("normalized", not options["special"]))
        token = AddedToken(content, normalized=normalized, **options)
        (backend.add_special_tokens if options["special"] else backend.add_tokens)([token])
        if (found := backend.token_to_id(content)) != token_id:
            problem = f"added token {content!r} should have id {token_id}, but tokenizer.json makes it {found}"
            advice = "The two files belong to different tokenizers; fetch both from one revision."
            raise TokenizerError(f"{file}: {problem}. {advice}")


def _chat_templates(value: Any, where: str) -> dict[str, str]:
    """Return templates by name from a text, {name: text}, or [{"name": name, "template": text}]."""
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    if isinstance(value, list) and all(isinstance(entry, dict) for entry in value):
        value = {entry.get("name"): entry.get("template") for entry in value}
    if not isinstance(value, dict) or not all(isinstance(text, str) for item in value.items() for text in item):
        form = '[{"name": "default", "template": "..."}]'
        raise TokenizerError(f"{where}: chat_template: expected a text, or several with their names, as in {form}.")
    return value


def _special_tokens(config: Mapping[str, Any], special_map: Mapping[str, Any]) -> dict[str, str]:
    extra = config.get("extra_special_tokens")
    named = {**special_map, **config, **(extra if isinstance(extra, dict) else {})}
    contents = {key: value.get("content") if isinstance(value, dict) else value for key, value in named.items()}
    return {key: text for key, text in contents.items() if key.endswith("_token") and isinstance(text, str)}


def _generation_config(generation: dict[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    for source in language_configs(config):
        for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
            if generation.get(key) is None and source.get(key) is not None:
                generation[key] = source[key]
    return generation
