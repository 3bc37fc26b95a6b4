"""Heads and targets by name: a folder, or a repository of the Hub, resolved to a folder on this disk once."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from eagle_slim.vocab_tools.files import expand_home, regular_file
from eagle_slim.vocab_tools.hub import Choose, Snapshot, fetch, find_snapshot, plain, without

from ..artifact.files import MANIFEST_NAME
from ..artifact.manifest import Manifest
from ..errors import SourceError
from ..names import canonical_names
from ..rows.files import choose_weights, clean_subfolder, list_names, read_index
from .builtin import embedded_head

_TOKENS = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "added_tokens.json")
_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "chat_template.json")
_TARGET_FILES = ("config.json", "generation_config.json", *_TOKENS, *_SETTINGS)
"""Small files of a target: its configuration and its tokenizer."""

_HEAD_FILES = (*_TARGET_FILES, "hf_quant_config.json", MANIFEST_NAME, "README.md")
"""Small files of a head: those of a target, if it has them, manifest, and card (which may name the target)."""


@dataclass(frozen=True)
class ResolvedSource:
    """A head or a target in a folder on this disk, a snapshot of the Hub's cache where `repo_id` and `commit` are set.

    Attributes:
        files: names within `folder` of its files, on the Hub of all; those not asked for are not on this disk.
        subfolder: where in the repository, or in the folder of the user, `folder` is; "" for all of it.
        name: how the user called it, sub-folder included, for messages.
    """

    folder: Path
    repo_id: str | None = None
    commit: str | None = None
    files: tuple[str, ...] = ()
    subfolder: str = ""
    name: str = field(default="", compare=False)

    @property
    def root(self) -> Path:
        """`folder` without the sub-folder."""
        return without(self.folder, self.subfolder)

    @property
    def label(self) -> str:
        """Name in messages: the repository, its commit and the sub-folder, or the folder."""
        if self.repo_id is None:
            return str(self.folder)
        return _joined(f"{self.repo_id}@{(self.commit or '')[:12]}", self.subfolder)

    @property
    def snapshot(self) -> Snapshot:
        """The commit in the cache; only for a source that comes from the Hub."""
        assert self.repo_id is not None
        assert self.commit is not None
        return Snapshot(self.root, self.repo_id, self.commit, self.files)

    @cached_property
    def manifest(self) -> Manifest | None:
        """The manifest of a head that eagle-convert wrote, else None; ArtifactError where it is damaged."""
        return Manifest.load(self.folder) if (self.folder / MANIFEST_NAME).exists() else None

    def on_card(self, key: str) -> str | None:
        """Return what its model card's front matter, or else the repository's, says ("license"); None for several."""
        value = (_front_matter(self.folder) or _front_matter(self.root)).get(key)
        if isinstance(value, list) and len(value) == 1:
            value = value[0]
        return value if isinstance(value, str) and value else None


def open_head_source(
    head: str | Path | None, revision: str | None = None, offline: bool = False, subfolder: str | None = None
) -> ResolvedSource:
    """Return a folder with the weights (safetensors rather than .bin) and the small files of a draft head.

    Args:
        head: folder or Hub repository; None is the built-in head for SmolLM2-135M-Instruct.
        revision: of the repository; refused for a folder.
        subfolder: where in it the head is. The repository's card comes with it where the sub-folder has none.

    Raises UsageError for a sub-folder that would lead out; SourceError without folder, repository, revision,
    sub-folder, access, or connection and copy; CheckpointError for no weights, or an index that is damaged or unsafe;
    UnsupportedHeadError for tensors that no head has.
    """
    inside = clean_subfolder(subfolder)
    name = _joined("the built-in head" if head is None else str(head), inside)
    head = embedded_head() if head is None else head
    whole = _resolve(head, revision, offline, partial(_head_names, subfolder=inside))
    resolved = replace(whole, folder=whole.folder / inside, subfolder=inside, name=name)
    if resolved.repo_id is None:
        if not resolved.folder.is_dir():
            raise _no_subfolder(str(head), inside, [path.name for path in whole.folder.iterdir() if path.is_dir()])
        return replace(resolved, files=tuple(list_names(resolved.folder)))
    chosen = choose_weights(list_names(resolved.folder), resolved.label)
    if chosen.endswith(".index.json"):
        index = read_index(resolved.folder / chosen)
        # A whole model named by mistake is refused before its gigabytes are fetched.
        canonical_names(index, resolved.label)
        fetch(resolved.snapshot, [_joined(inside, shard) for shard in dict.fromkeys(index.values())], offline)
    prefix = f"{inside}/" if inside else ""
    return replace(resolved, files=tuple(name.removeprefix(prefix) for name in whole.files if name.startswith(prefix)))


def target_files(target: str | Path, revision: str | None = None, offline: bool = False) -> ResolvedSource:
    """Return a folder with configuration and tokenizer of a target, no weights; arguments as `open_head_source`."""
    return _resolve(target, revision, offline, lambda found, _: [name for name in found if name in _TARGET_FILES])


def _resolve(source: str | Path, revision: str | None, offline: bool, choose: Choose) -> ResolvedSource:
    folder = expand_home(source)
    if str(source) and folder.is_dir():
        if revision is not None:
            raise SourceError.at(source, f"is a folder and has no revision {revision!r}.\nLeave the revision out.")
        return ResolvedSource(folder, files=tuple(list_names(folder)))
    repo_id = str(source)
    path_like = isinstance(source, Path) or repo_id.startswith(("/", ".", "~")) or repo_id.count("/") > 1 or not repo_id
    if path_like or folder.is_file() or folder.is_symlink():
        kind = "is a file" if folder.is_file() else "no such folder"
        advice = "Expected a folder, or a Hub repository such as name/model."
        raise SourceError.at(plain(repo_id) or "(empty)", f"{kind}.\n{advice}")
    snapshot = find_snapshot(repo_id, revision, offline, choose)
    return ResolvedSource(snapshot.folder, repo_id, snapshot.commit, snapshot.files)


def _head_names(names: Sequence[str], where: str, subfolder: str) -> list[str]:
    folder_of = {name: name.rpartition("/")[0] for name in names}
    beside = [name.rpartition("/")[2] for name in names if folder_of[name] == subfolder]
    if subfolder and not beside:
        raise _no_subfolder(where, subfolder, folder_of.values())
    # Where there are no weights, the message names the folders, too.
    listed = [*beside, *(f"{folder}/" for folder in sorted({*folder_of.values()} - {subfolder, ""}))]
    chosen = [*(name for name in beside if name in _HEAD_FILES), choose_weights(listed, _joined(where, subfolder))]
    above = ["README.md"] if "README.md" in names and "README.md" not in beside else []
    return [_joined(subfolder, name) for name in chosen] + above


def _no_subfolder(where: str, subfolder: str, folders: Collection[str]) -> SourceError:
    found = sorted({folder for folder in folders if folder[:1] not in ("", ".")})
    problem = f"no files in a sub-folder {subfolder!r}.\nIts sub-folders: {', '.join(found[:8]) or 'none'}."
    return SourceError.at(where, problem)


def _front_matter(folder: Path) -> dict[str, Any]:
    import yaml  # type: ignore[import-untyped]  # PyYAML's stubs are a package of their own

    try:
        text = regular_file(folder / "README.md", SourceError).read_text(encoding="utf-8")
        found = re.match(r"---\s*\n(.*?)\n---\s*$", text, re.DOTALL | re.MULTILINE)
        value = yaml.safe_load(found[1]) if found else None
    # A card is prose: what its author got wrong there must not stop a conversion. For impossible dates and numbers
    # YAML's constructors raise whatever happens.
    except (SourceError, OSError, yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _joined(folder: str, name: str) -> str:
    return "/".join(part for part in (folder, name) if part)
