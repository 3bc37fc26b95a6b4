"""The target model of a head: which one it is, what its configuration says, and whether head and tokenizer fit it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle_slim.vocab_tools.errors import UsageError
from eagle_slim.vocab_tools.files import expand_home
from eagle_slim.vocab_tools.tokenizer.load import LoadedTokenizer, load_tokenizer

from ..artifact.eagle3 import LmHeadSource
from ..artifact.manifest import MANIFEST_NAME, Manifest
from ..errors import MismatchError, SourceError
from ..head.open import DraftHead
from ..sources.builtin import EMBEDDED_TARGET_REPO, embedded_target_folder, embedded_target_provenance
from ..sources.hub import ResolvedSource, open_target_lm_head, target_files
from ..sources.lm_head import TargetLMHead
from ..sources.public_heads import known_target

# Rows that pad a vocabulary for the GPU: gpt-oss, with 1,069, has the most among the models in use.
_MOST_PADDING = 2048
# Gemma-3's tokenizer has one token more than its model has rows; more than a few mean another tokenizer.
_MOST_SURPLUS = 8


RECORDED = "recorded in the head's manifest"


@dataclass(frozen=True)
class TargetChoice:
    """Which target is meant, and on whose word.

    Attributes:
        name: repository or folder; None is the embedded SmolLM2-135M-Instruct.
        reason: where the name came from, for the screen.
    """

    name: str | None
    reason: str


@dataclass(frozen=True)
class Target:
    """A target whose small files are at hand.

    Attributes:
        name: as the user knows it.
        source: folder with config.json and the tokenizer's files, and the commit.
        config: of the language model (the text part of a multimodal one).
        provenance: for the manifest.
    """

    name: str
    source: ResolvedSource
    config: Mapping[str, Any]
    provenance: dict[str, Any]

    @property
    def num_layers(self) -> int | None:
        """Number of decoder layers, or None where the configuration does not say."""
        found = self.config.get("num_hidden_layers")
        return found if isinstance(found, int) else None


def choose_target(
    given: str | None, head: str | None, opened: DraftHead, base_model: str | None
) -> TargetChoice | None:
    """The target to use: as given, else as the head's own files say, else from the table of public heads, else None.

    Args:
        given: the user's word.
        head: repository or folder of the head; None is the built-in one.
        opened: the head.
        base_model: of the head's model card.
    """
    if given is not None:
        return TargetChoice(given, "given")
    if head is None:
        return TargetChoice(None, "the built-in head's")
    if opened.target_name is not None and not is_missing_folder(opened.target_name):
        return TargetChoice(opened.target_name, "named in the head's config.json")
    manifest = opened.source.folder / MANIFEST_NAME if opened.source else None
    if manifest is not None and manifest.is_file():
        recorded = Manifest.load(manifest.parent).target
        if recorded.get("wheel"):
            return TargetChoice(None, RECORDED)
        if recorded.get("repo_id"):
            return TargetChoice(str(recorded["repo_id"]), RECORDED)
    known = known_target(opened.source.repo_id if opened.source else None)
    if known is not None:
        return TargetChoice(known, "from the table of public heads")
    if base_model is not None:
        return TargetChoice(base_model, "named in the head's model card")
    return None


def is_missing_folder(name: str) -> bool:
    """Whether a name is spelled as a path and no such folder is here: one of the machine that trained a head, say."""
    return name.startswith(("/", "./", "../", "~")) and not expand_home(name).is_dir()


def open_target(choice: TargetChoice, revision: str | None, offline: bool) -> Target:
    """Fetch the small files of a target and read its configuration.

    Raises:
        SourceError: it cannot be had, or has no config.json.
    """
    if choice.name is None:
        folder = embedded_target_folder()
        source = ResolvedSource(folder)
        return Target(EMBEDDED_TARGET_REPO, source, _config(folder, EMBEDDED_TARGET_REPO), embedded_target_provenance())
    source = target_files(choice.name, revision=revision, offline=offline)
    provenance: dict[str, Any] = {"repo_id": source.repo_id, "revision": source.commit}
    if source.repo_id is None:
        provenance["name"] = Path(choice.name).resolve().name
    return Target(choice.name, source, _config(source.folder, choice.name), provenance)


def open_lm_head(target: Target, offline: bool) -> TargetLMHead:
    """Open the target's LM head, and nothing else of it. Raises as `source.open_target_lm_head`."""
    return open_target_lm_head(target.source, offline=offline)


def lm_head_rows(head: DraftHead, lm_head: TargetLMHead, where: str) -> LmHeadSource:
    """The target's LM head as the source of the slim head's rows.

    Raises:
        MismatchError: its shape is not [vocab_size, hidden_size] of the head.
    """
    rows, hidden = lm_head.shape
    if hidden != head.hidden_size:
        raise MismatchError(
            f"{where}: {lm_head.name} has rows of {hidden}, the head {head.location} needs rows of {head.hidden_size} "
            "(its hidden_size); this is not the target that the head was trained for, name it with --target"
        )
    if rows != head.target_vocab:
        raise MismatchError(
            f"{where}: {lm_head.name} has {rows} rows, the head {head.location} was trained for a vocabulary of "
            f"{head.target_vocab}; this is not its target, name it with --target"
        )
    warnings: list[str] = []
    if lm_head.unused is not None:
        warnings.append(
            f"{where} stores {lm_head.unused} beside an embedding that its config.json ties: the rows are the "
            f"embedding's, as in vLLM and SGLang (transformers 5 takes {lm_head.unused} where the two differ). If that "
            "is the right one, set tie_word_embeddings to false in a copy of the target"
        )
    return LmHeadSource(lm_head.checkpoint, lm_head.name, "target", where, tuple(warnings))


def check_head_fits(head: DraftHead, target: Target) -> None:
    """Compare a head with the configuration of a target.

    Raises:
        MismatchError: widths or vocabularies disagree, or a tapped layer does not exist.
    """
    expected = {"hidden_size": head.target_hidden_size, "vocab_size": head.target_vocab}
    for key, value in expected.items():
        found = target.config.get(key)
        if isinstance(found, int) and found != value:
            raise MismatchError(
                f"target {target.name}: {key}: the head {head.location} expects {value}, found {found}; this is not "
                "the target that the head was trained for, name it with --target"
            )
    layers = target.num_layers
    if layers is not None and head.tap_layers and not all(0 <= layer <= layers for layer in head.tap_layers):
        raise MismatchError(
            f"head {head.location} reads the inputs of layers {list(head.tap_layers)}, but target {target.name} has "
            f"{layers} layers; name the right target with --target, or the layers with --tap-layers"
        )


def open_tokenizer(
    given: str | None, revision: str | None, target: Target | None, target_vocab: int, offline: bool
) -> LoadedTokenizer | None:
    """The tokenizer: as given, else the target's own; None where there is neither.

    Raises:
        UsageError: a revision of a tokenizer that is not given.
        MismatchError: it is not the target's tokenizer, by its hash or by its size.
        TokenizerError: it cannot be loaded.
    """
    if given is None and revision is not None:
        raise UsageError(f"--tokenizer-revision {revision} is of no tokenizer; name the repository with --tokenizer")
    own = target.source.folder if target is not None and _has_tokenizer(target.source.folder) else None
    if given is None and own is None:
        return None
    if given is None:
        tokenizer = load_tokenizer(str(own), offline=True)
        name = target.name if target is not None else str(own)
    else:
        tokenizer = load_tokenizer(given, revision=revision, offline=offline)
        name = given
        if own is not None:
            expected = load_tokenizer(str(own), offline=True)
            if expected.tokenizer_hash != tokenizer.tokenizer_hash:
                raise MismatchError(
                    f"tokenizer {given}: its vocabulary is not that of the target {target.name if target else ''} "
                    f"(hash {tokenizer.tokenizer_hash[:23]}…, expected {expected.tokenizer_hash[:23]}…); leave "
                    "--tokenizer out to use the target's own"
                )
    check_tokenizer_size(tokenizer, target_vocab, name)
    return tokenizer


def check_tokenizer_size(tokenizer: LoadedTokenizer, target_vocab: int, name: str) -> None:
    """Refuse a tokenizer whose ids cannot be those of a vocabulary of `target_vocab` rows.

    Raises:
        MismatchError: many tokens beyond the vocabulary, or many rows without a token.
    """
    surplus = int((tokenizer.real_ids >= target_vocab).sum())
    missing = target_vocab - tokenizer.vocab_size
    if surplus > _MOST_SURPLUS or missing > max(_MOST_PADDING, target_vocab // 20):
        raise MismatchError(
            f"tokenizer {name}: has ids up to {tokenizer.vocab_size - 1}, the target's vocabulary has {target_vocab} "
            "rows; this is the tokenizer of another model, name the right one with --tokenizer or --target"
        )


def _has_tokenizer(folder: Path) -> bool:
    return any(
        (folder / name).is_file()
        for name in ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")
    )


def _config(folder: Path, name: str) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SourceError(f"target {name}: no config.json; expected a model in the Hugging Face layout") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise SourceError(f"target {name}: config.json cannot be read as JSON ({error})") from error
    if not isinstance(config, dict):
        raise SourceError(f"target {name}: config.json: expected a JSON object, found {type(config).__name__}")
    text = config.get("text_config")
    return {**config, **text} if isinstance(text, dict) else config
