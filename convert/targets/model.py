"""The target model of a head: which one it is, what its configuration says, and whether head and tokenizer fit it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from eagle_slim.vocab_tools.files import expand_home, read_object
from eagle_slim.vocab_tools.target import language_configs
from eagle_slim.vocab_tools.tokenizer import LoadedTokenizer, load_tokenizer
from eagle_slim.vocab_tools.vocabulary import MAX_PADDING

from ..errors import MismatchError, SourceError
from ..heads.config import position_warnings
from ..heads.draft_head import DraftHead, has_padding_of
from ..sources.builtin import EMBEDDED_TARGET_REPO, embedded_target_folder, embedded_target_provenance, or_built_in
from ..sources.source import ResolvedSource, target_files

# Gemma-3's tokenizer has one token more than its model has rows; more than a few mean another tokenizer.
_MAX_SURPLUS = 8

RECORDED = "recorded in the head's manifest"


@dataclass(frozen=True)
class TargetChoice:
    """The repository or folder of a target, None for the embedded SmolLM2-135M-Instruct, and who named it."""

    name: str | None
    reason: str


@dataclass(frozen=True)
class HeadTarget:
    """A target whose small files are at hand; `config` is that of the language model, as of a multimodal one's part."""

    name: str
    source: ResolvedSource
    config: Mapping[str, Any]
    provenance: dict[str, Any]

    @property
    def num_layers(self) -> int | None:
        """Number of decoder layers, or None where the configuration does not say."""
        found = self.config.get("num_hidden_layers")
        return found if isinstance(found, int) else None

    def doubts_of(self, head: DraftHead) -> list[str]:
        """Warn of what the configuration lacks, or has otherwise than a head that fits."""
        lacking = [key for key in ("hidden_size", "num_hidden_layers") if self.config.get(key) is None]
        what = f"config.json of the target {self.name} names no {' and no '.join(lacking)}"
        warnings = [f"{what}, with which the head would be compared"] if lacking else []
        return warnings + position_warnings(head.config, self.config)

    @property
    def facts(self) -> dict[str, Any]:
        """Facts about it that engines differ on, as `engines.HeadFacts` names them; None for what is not said."""
        # The type of the weights that engines take by default.
        dtype = self.config.get("dtype") or self.config.get("torch_dtype")
        dtype = dtype.removeprefix("torch.") if isinstance(dtype, str) else None
        return {"target_layers": self.num_layers, "target_type": self.config.get("model_type"), "target_dtype": dtype}


def choose_target(head: DraftHead, is_builtin: bool = False) -> TargetChoice | None:
    """Choose the target that config.json, manifest, table of public heads or card say; None where none does."""
    if is_builtin:
        return TargetChoice(None, "the built-in head's")
    if head.target_name is not None and not is_missing_folder(head.target_name):
        return TargetChoice(head.target_name, "named in the head's config.json")
    recorded = {} if head.manifest is None else head.manifest.target
    if recorded.get("wheel") or recorded.get("repo_id"):
        return TargetChoice(None if recorded.get("wheel") else str(recorded["repo_id"]), RECORDED)
    if head.source is None:
        return None
    if (known := known_target(head.source.repo_id)) is not None:
        return TargetChoice(known, "from the table of public heads")
    if (named := head.source.on_card("base_model")) is not None:
        return TargetChoice(named, "named in the head's model card")
    return None


def known_target(head: str | None) -> str | None:
    """Return the target of a public head, as the author names it, from public_heads.json; None for other heads."""
    targets = json.loads((Path(__file__).parent / "public_heads.json").read_text(encoding="utf-8"))
    # The Hub does not tell upper from lower case when it looks a repository up.
    return {name.lower(): target for name, target in targets.items()}.get((head or "").lower())


def is_missing_folder(name: str) -> bool:
    """Tell whether a name is a path, perhaps of the machine that trained a head, and no such folder is here."""
    return name.startswith(("/", "./", "../", "~")) and not expand_home(name).is_dir()


def open_target(name: str | None, revision: str | None, offline: bool) -> HeadTarget:
    """Fetch and read a target's small files; the embedded ones for None, and where that repository cannot be had."""
    if name is None:
        source = ResolvedSource(embedded_target_folder())
        return HeadTarget(EMBEDDED_TARGET_REPO, source, _config(source), embedded_target_provenance())
    read = partial(target_files, revision=revision, offline=offline)
    source = or_built_in(name, read) if revision is None else read(name)
    if name == EMBEDDED_TARGET_REPO and source.repo_id is None:
        return open_target(None, None, offline)
    provenance: dict[str, Any] = {"repo_id": source.repo_id, "revision": source.commit}
    if source.repo_id is None:
        provenance["name"] = Path(name).resolve().name
    return HeadTarget(name, source, _config(source), provenance)


def check_head_fits(head: DraftHead, target: HeadTarget) -> None:
    """Raise MismatchError where a target's configuration has other sizes than a head, or lacks a layer that it taps."""
    for key, value in {"hidden_size": head.target_hidden_size, "vocab_size": head.target_vocab}.items():
        found = target.config.get(key)
        if found is not None and not (has_padding_of(value, found) if key == "vocab_size" else value == found):
            problem = f"{key}: the head {head.location} expects {value}, found {found}"
            advice = "This is not the target that the head was trained for: give that one with --target."
            if key == "vocab_size" and 0 < found - value <= MAX_PADDING:
                advice = f"The head lacks the last {found - value} ids, be they padding or tokens. {advice}"
            raise MismatchError.at(f"target {target.name}", f"{problem}.\n{advice}")
    head.taps(target.num_layers)


def open_tokenizer(
    given: str | Path | None, target: HeadTarget | None, target_vocab: int, offline: bool
) -> LoadedTokenizer | None:
    """Load the tokenizer that is given, else the tokenizer.json of the target; None where there is neither.

    Raises TokenizerError, and MismatchError where its hash or its number of tokens is not the target's.
    """
    of_target = None
    if target is not None and (target.source.folder / "tokenizer.json").is_file():
        # Under the target's name, since nobody knows the cache folder that holds it.
        of_target = replace(load_tokenizer(target.source.folder, offline=True), source=target.name)
    tokenizer = of_target if given is None else or_built_in(given, partial(load_tokenizer, offline=offline))
    if tokenizer is None:
        return None
    if of_target is not None and of_target.tokenizer_hash != tokenizer.tokenizer_hash:
        hashes = f"hash {tokenizer.tokenizer_hash[:23]}…, expected {of_target.tokenizer_hash[:23]}…"
        problem = f"tokenizer {given}: its vocabulary is not that of the target {of_target.source} ({hashes})"
        raise MismatchError(f"{problem}.\nLeave --tokenizer out to use the target's own.")
    surplus, missing = int((tokenizer.real_ids >= target_vocab).sum()), target_vocab - tokenizer.vocab_size
    if surplus > _MAX_SURPLUS or missing > max(MAX_PADDING, target_vocab // 20):
        problem = f"has ids up to {tokenizer.vocab_size - 1}, the target's vocabulary has {target_vocab} rows"
        advice = "This is the tokenizer of another model: name the right one with --tokenizer or --target."
        raise MismatchError(f"tokenizer {tokenizer.source}: {problem}.\n{advice}")
    return tokenizer


def check_own_tokenizer(head: DraftHead, tokenizer: LoadedTokenizer | None) -> None:
    """Raise MismatchError where the vocabulary of a head that is an artifact was chosen for another tokenizer."""
    recorded = None if head.manifest is None else (head.manifest.tokenizer or {}).get("hash")
    if tokenizer is not None and recorded not in (None, tokenizer.tokenizer_hash):
        problem = f"the vocabulary was chosen for another tokenizer than that of {tokenizer.source}"
        raise MismatchError.at(head.location, f"{problem}.\nName the right one with --target or --tokenizer.")


def _config(source: ResolvedSource) -> dict[str, Any]:
    config = read_object(source.folder / "config.json", SourceError)
    config = {key: value for part in language_configs(config) for key, value in part.items()}
    for key in ("hidden_size", "num_hidden_layers", "vocab_size"):
        value = config.get(key)
        if value is not None and (type(value) is not int or value < 1):
            raise MismatchError.of_key(source.label, key, "a positive integer", value)
    return config
