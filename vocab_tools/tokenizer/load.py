"""Hub id, folder or tokenizer.json → LoadedTokenizer.

Files are fetched by transformers, so HF_TOKEN, HF_HUB_OFFLINE, HF_ENDPOINT, revisions and the cache work as usual. Only
the small text files are fetched, never weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import TokenizerError
from ..files import expand_home, read_json, regular_file
from ..hub_errors import NOT_ASKED, HubTrouble, not_cached, transfer_errors, trouble_of
from ..hub_session import be_patient, list_folder
from .forced import ForcedIds, forced_ids
from .tokenizer import LoadedTokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["ForcedIds", "LoadedTokenizer", "check_tokenizer", "forced_ids", "load_tokenizer"]

_TOKENIZER = "tokenizer.json"
_SIDE_FILES = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "config.json",
    "chat_template.jinja",
    "chat_template.json",
)
_TOKEN_ID_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")
_TEMPLATE_FOLDER = "additional_chat_templates"

CODE_OF_ITS_OWN = (
    "its class is Python code beside its files (auto_map), which is never run here, and transformers has no class of "
    "its own for it"
)
"""Why transformers refused a model or a tokenizer that it may load only with `trust_remote_code`."""

_WHAT_TO_GIVE = "Give a tokenizer.json, its folder, or a Hub id."


def load_tokenizer(source: str | Path, revision: str | None = None, offline: bool = False) -> LoadedTokenizer:
    """Load a fast tokenizer with its chat template and generation settings.

    Args:
        source: a Hub id, a folder that holds a tokenizer, or a tokenizer.json file.
        revision: branch, tag or commit on the Hub.
        offline: use the local cache only.

    Raises:
        TokenizerError: missing, gated, unreadable, or a tokenizer without a fast (`tokenizers`) form.
    """
    path = expand_home(source)
    if not str(source):
        raise TokenizerError(f"The tokenizer's name is empty. {_WHAT_TO_GIVE}", tokenizer="")
    if path.is_file():
        return _load(str(source), path, _side_files_of(path.parent) if path.name == _TOKENIZER else {}, None)
    if path.is_dir():
        file = path / _TOKENIZER
        return _load(str(source), file if file.is_file() else None, _side_files_of(path), None, folder=path)
    if path.exists():
        regular_file(path, TokenizerError)
    # A Hub id may have dots (org/Llama-3.1-8B) but never more than one slash.
    if path.is_absolute() or str(source).startswith((".", "~")) or path.suffix == ".json" or len(path.parts) > 2:
        raise TokenizerError(f"{source}: no such file or folder. {_WHAT_TO_GIVE}", missing=str(source))
    return _load_from_hub(str(source), revision, offline)


def check_tokenizer(tokenizer: LoadedTokenizer, tokenizer_hash: str | None, where: str) -> list[str]:
    """Check that a tokenizer is the one that some data, named by `where`, was made with; returns warnings to show.

    None for a hash that the data does not record passes with a warning.

    Raises:
        TokenizerError: the hashes differ.
    """
    if tokenizer_hash is None:
        return [f"{where}: no tokenizer is recorded; the ids are taken to be those of {tokenizer.source}"]
    if tokenizer_hash != tokenizer.tokenizer_hash:
        raise TokenizerError(
            f"{where}: made with another tokenizer: expected {tokenizer_hash}, but {tokenizer.source} has "
            f"{tokenizer.tokenizer_hash}. Name the tokenizer that was used then, or count again with this one.",
            where=where,
            expected=tokenizer_hash,
            found=tokenizer.tokenizer_hash,
        )
    return []


def _side_files_of(folder: Path) -> dict[str, Path]:
    found = {name: folder / name for name in _SIDE_FILES if (folder / name).is_file()}
    for template in sorted((folder / _TEMPLATE_FOLDER).glob("*.jinja")):
        found[f"{_TEMPLATE_FOLDER}/{template.stem}"] = template
    return found


def _load_from_hub(source: str, revision: str | None, offline: bool) -> LoadedTokenizer:
    from transformers.utils import cached_file
    from transformers.utils.hub import extract_commit_hash, is_offline_mode

    only_cache = offline or is_offline_mode()
    be_patient()

    def fetch(name: str) -> Path | None:
        try:
            found = cached_file(source, name, revision=revision, local_files_only=only_cache)
        except transfer_errors() as error:
            # The error for a file that the Hub does not have has no cause; where the Hub gave no answer, it has one.
            if type(error) is OSError and error.errno is None and error.__cause__ is None:
                return None
            trouble = trouble_of(error, source, revision)
            if trouble.reason in NOT_ASKED:
                return None
            raise _hub_error(trouble, name) from error
        return None if found is None else Path(found)

    def templates(beside: Path) -> list[str]:
        if not only_cache:
            try:
                return list_folder(source, _TEMPLATE_FOLDER, revision)
            except transfer_errors() as error:
                trouble = trouble_of(error, source, revision)
                # A Hub that is out of reach, or that lists nothing, is no reason; what is in the cache does instead.
                is_broken = trouble.reason == "connection" and trouble.is_passing
                if is_broken or trouble.reason not in ("connection", "HfHubHTTPError", *NOT_ASKED):
                    raise _hub_error(trouble, _TEMPLATE_FOLDER) from error
        return [f"{_TEMPLATE_FOLDER}/{path.name}" for path in (beside / _TEMPLATE_FOLDER).glob("*.jinja")]

    tokenizer_file = fetch(_TOKENIZER)
    side = {name: file for name in _SIDE_FILES if (file := fetch(name)) is not None}
    if tokenizer_file is None and not side:
        raise _hub_error(not_cached(source), _TOKENIZER)
    any_file = tokenizer_file or next(iter(side.values()))
    for name in sorted(templates(any_file.parent)):
        if name.endswith(".jinja") and (file := fetch(name)) is not None:
            side[name.removesuffix(".jinja")] = file
    commit = extract_commit_hash(str(any_file), None)
    return _load(source, tokenizer_file, side, commit, revision=revision, offline=offline)


def _hub_error(trouble: HubTrouble, name: str) -> TokenizerError:
    facts = {**trouble.facts, "repo": trouble.facts["repo_id"], "file": name, "reason": trouble.reason}
    return TokenizerError(f"{name} of {trouble}", **facts)


def _load(
    source: str,
    tokenizer_file: Path | None,
    side: Mapping[str, Path],
    commit: str | None,
    *,
    folder: Path | None = None,
    revision: str | None = None,
    offline: bool = False,
) -> LoadedTokenizer:
    config = _read_json(side.get("tokenizer_config.json"))
    if tokenizer_file is not None:
        backend = _read_backend(tokenizer_file)
        _add_missing_tokens(backend, config, side.get("tokenizer_config.json"))
    else:
        backend = _build_backend(str(folder) if folder else source, revision, offline)
    backend.no_truncation()
    backend.no_padding()
    return LoadedTokenizer(
        backend=backend,
        source=source,
        revision=commit,
        chat_templates=_chat_templates(config, side),
        special_tokens=_special_tokens(config, _read_json(side.get("special_tokens_map.json"))),
        generation_config=_generation_config(side),
    )


def _read_json(file: Path | None) -> dict[str, Any]:
    if file is None:
        return {}
    value = read_json(file, TokenizerError)
    if not isinstance(value, dict):
        raise TokenizerError.at(file, f"expected a JSON object, found {type(value).__name__}.")
    return value


def _read_backend(file: Path) -> Tokenizer:
    from tokenizers import Tokenizer

    try:
        backend = Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises bare Exception from Rust
        raise TokenizerError.at(file, f"`tokenizers` cannot read this as tokenizer.json: {error}.") from error
    if backend.get_vocab_size(with_added_tokens=True) == 0:
        raise TokenizerError(f"{file}: the tokenizer has no tokens.")
    return backend


def _build_backend(source: str, revision: str | None, offline: bool) -> Tokenizer:
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    try:
        # Never code of the folder: without this transformers asks on stdin, which may be a prompt.
        built = AutoTokenizer.from_pretrained(
            source, revision=revision, local_files_only=offline, trust_remote_code=False
        )
    except (OSError, ValueError, ImportError, KeyError) as error:
        reason = CODE_OF_ITS_OWN if "trust_remote_code" in str(error) else str(error)
        raise TokenizerError(
            f"{source}: no tokenizer.json, and transformers cannot build a tokenizer from the other files: {reason}",
            repo=source,
            missing=_TOKENIZER,
        ) from error
    backend = getattr(built, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        raise TokenizerError(
            f"{source}: only a slow (Python) tokenizer, {type(built).__name__}; a tokenizer.json is needed. "
            "Convert it with transformers (`AutoTokenizer.from_pretrained(...).save_pretrained(...)`)."
        )
    return backend


def _add_missing_tokens(backend: Tokenizer, config: Mapping[str, Any], file: Path | None) -> None:
    """Add the tokens that only tokenizer_config.json knows, as transformers does on loading."""
    from tokenizers import AddedToken

    known = set(backend.get_vocab(with_added_tokens=True).values())
    missing = {
        int(key): value for key, value in config.get("added_tokens_decoder", {}).items() if int(key) not in known
    }
    for token_id, entry in sorted(missing.items()):
        options = {key: bool(entry.get(key, False)) for key in ("single_word", "lstrip", "rstrip", "special")}
        token = AddedToken(
            entry["content"], normalized=bool(entry.get("normalized", not options["special"])), **options
        )
        (backend.add_special_tokens if options["special"] else backend.add_tokens)([token])
        found = backend.token_to_id(entry["content"])
        if found != token_id:
            raise TokenizerError(
                f"{file}: added token {entry['content']!r} should have id {token_id}, but tokenizer.json makes it "
                f"{found}. The two files belong to different tokenizers; fetch both from one revision.",
                expected=token_id,
                found=found,
            )


def _chat_templates(config: Mapping[str, Any], side: Mapping[str, Path]) -> dict[str, str]:
    templates: dict[str, str] = {}
    for value in (config.get("chat_template"), _read_json(side.get("chat_template.json")).get("chat_template")):
        if isinstance(value, str):
            templates["default"] = value
        elif isinstance(value, dict):
            templates.update({str(name): str(text) for name, text in value.items()})
        elif isinstance(value, list):
            templates.update({str(entry["name"]): str(entry["template"]) for entry in value})
    for name, file in side.items():
        if file.suffix == ".jinja":
            templates["default" if name == "chat_template.jinja" else file.stem] = file.read_text(encoding="utf-8")
    return templates


def _special_tokens(config: Mapping[str, Any], special_map: Mapping[str, Any]) -> dict[str, str]:
    extra = config.get("extra_special_tokens")
    named = {**special_map, **config, **(extra if isinstance(extra, dict) else {})}
    tokens: dict[str, str] = {}
    for key, value in named.items():
        content = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(content, str):
            tokens[key] = content
    return tokens


def _generation_config(side: Mapping[str, Path]) -> dict[str, Any]:
    generation = _read_json(side.get("generation_config.json"))
    config = _read_json(side.get("config.json"))
    text_config = config.get("text_config")
    for source in (config, text_config if isinstance(text_config, dict) else {}):
        for key in _TOKEN_ID_KEYS:
            if generation.get(key) is None and source.get(key) is not None:
                generation[key] = source[key]
    return generation
