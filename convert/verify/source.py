"""Checks against what the artifact was made from and what it is for: source head, target, tokenizer."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from eagle_slim.vocab_tools.errors import TokenizerError
from eagle_slim.vocab_tools.forced import forced_ids
from eagle_slim.vocab_tools.tokenizer import LoadedTokenizer

from ..artifact.checksums import row_checksums
from ..artifact.manifest import Manifest
from ..artifact.provenance import folder_beside, open_original
from ..errors import CheckpointError, SourceError
from ..heads import names
from ..heads.draft_head import DraftHead
from ..rows.lm_head import LmHead, fitting, own_lm_head, rows_of_ids
from ..rows.target import open_target_lm_head
from ..sources import target as targets
from ..sources.target import Target, TargetChoice
from .parts import Parts, SkipCheck, join, refuse


@dataclass
class SourceChecks:
    """Checks that are skipped where nothing is at hand to compare with; what the user named must be there."""

    parts: Parts
    head_name: str | None
    target_name: str | None
    tokenizer_name: str | None
    offline: bool
    _target: Target | None = field(default=None, init=False)

    @property
    def checks(self) -> dict[str, Callable[[], str]]:
        """The checks by name, in order."""
        return {
            "tensors of the source head": self.source_tensors,
            "target": self.target,
            "lm_head rows of the source": self.source_rows,
            "tokenizer": self.tokenizer,
        }

    def source_tensors(self) -> str:
        """Every tensor that is copied is bit-identical to the source head's."""
        weights = self.parts.weights
        source = self._source_head
        skipped = {names.LM_HEAD, *names.MAPS, *source.row_tensors}
        # Zeros that a conversion adds where the source has none.
        added = (names.FC_BIAS, *names.ATTENTION_BIASES.get(source.kind, ())[-1:])
        skipped |= {name for name in added if name not in source.tensors}
        problems = []
        copied = [name for name in sorted(weights.tensors) if name not in skipped]
        for name in copied:
            if name not in source.tensors:
                problems.append(f"{name} is not in the source")
            elif source.tensors.source.sha256(source.tensors.stored[name]) != self.parts.digest(name):
                problems.append(f"{name} differs from the source's")
        problems += [
            f"{name} differs from the source's rows" for name in source.row_tensors if not self._has_rows(name)
        ]
        join(problems)
        return f"{len(copied)} tensors bit-identical to {source.location}"

    def _has_rows(self, name: str) -> bool:
        """Whether a tensor with a row for each draft id has the source's rows of these ids."""
        source, weights = self._source_head, self.parts.weights
        rows = rows_of_ids(source, self.parts.ids)
        mine = self.parts.checkpoint.tensor(name) if name in weights.tensors else None
        return mine is not None and mine.equal(source.tensors.rows(name, rows))

    def source_rows(self) -> str:
        """Every lm_head row is the row of its token in the head or the target that it came from."""
        manifest, written = self.parts.with_lm_head(), self.parts.checkpoint
        ids = self.parts.ids if manifest.rank_order_ids is not None else np.arange(manifest.target_vocab)
        if (manifest.lm_head or {}).get("from") == "head":
            source = self._source_head
            refuse(not source.has_lm_head, f"{source.location} has no LM head, and the rows came from a head's own")
            lm_head = own_lm_head(source)
        else:
            source = self.parts.head(str(self.parts.folder))
            lm_head = self._target_lm_head(source)
        gathered, mine_raw = lm_head.gather(source, ids), written.raw(names.LM_HEAD)
        start, different = 0, []
        for chunk in gathered.pieces():
            mine = row_checksums(mine_raw[start : start + len(chunk)])
            different += (start + np.flatnonzero((mine != row_checksums(chunk)).any(axis=1))).tolist()
            start += len(chunk)
        if different:
            refuse(True, f"{len(different)} rows are not those of their tokens, the first is row {different[0]}")
        how = "rounded from" if gathered.rounded else "bit-identical to"
        return f"{start} rows {how} {lm_head.name} of {lm_head.where}"

    def _target_lm_head(self, head: DraftHead) -> LmHead:
        """The LM head of the target that the rows came from, or skip the check."""
        if self._target is None:
            raise SkipCheck("the target that the rows came from is not at hand; name it with --target")
        try:
            opened = open_target_lm_head(self._target.source, offline=self._only_cache)
        except SourceError as error:
            if self.target_name is not None:
                raise
            raise SkipCheck(f"the target's LM head is not at hand; name it with --target ({error})") from error
        return fitting(opened, head, self._target.name)

    def target(self) -> str:
        """Widths, vocabulary and tap layers fit the target."""
        manifest = self.parts.manifest
        choice = self._target_choice(manifest)
        try:
            revision = manifest.target.get("revision") if choice.reason == "recorded" else None
            self._target = targets.open_target(choice, revision, self._only_cache)
        except SourceError as error:
            if self.target_name is not None:
                raise
            raise SkipCheck(f"not at hand; name it with --target ({error})") from error
        if choice.reason == "beside" and any(
            self._target.config.get(key, size) != size for key, size in manifest.target.items() if isinstance(size, int)
        ):
            self._target = None
            raise SkipCheck(f"{choice.name} is of another size than the target was; name that with --target")
        targets.check_head_fits(self.parts.head(str(self.parts.folder)), self._target)
        return f"{self._target.name}: widths, vocabulary and tap layers fit"

    def tokenizer(self) -> str:
        """The vocabulary was chosen for this tokenizer, and holds what it forces and nothing that it lacks."""
        manifest = self.parts.manifest
        loaded = self._tokenizer(manifest)
        recorded = (manifest.tokenizer or {}).get("hash")
        if recorded is None:
            raise SkipCheck("the artifact was made without a tokenizer")
        refuse(
            loaded.tokenizer_hash != recorded, f"another vocabulary: expected {recorded}, found {loaded.tokenizer_hash}"
        )
        ranked = manifest.rank_order_ids
        if ranked is not None:
            outside = np.setdiff1d(ranked, loaded.real_ids)
            trained = (manifest.vocabulary or {}).get("trained_ids")
            refuse(bool(len(outside)) and trained is None, f"{len(outside)} ids belong to no token")
            untrained = (manifest.vocabulary or {}).get("forced_but_untrained", [])
            forced = forced_ids(loaded).ids
            needed = np.setdiff1d(forced[forced < manifest.target_vocab], np.array(untrained, np.int64))
            missing = np.setdiff1d(needed, ranked)
            if len(missing):
                refuse(True, f"{len(missing)} needed ids are missing, the first is {missing[0]}")
        changed = (manifest.tokenizer or {}).get("chat_template_hash") != loaded.chat_template_hash
        return "hash agrees" + ("; its chat template has changed since" if changed else "")

    @property
    def _only_cache(self) -> bool:
        # What the user did not name is searched for on this machine only.
        return self.offline or self.target_name is None

    @cached_property
    def _source_head(self) -> DraftHead:
        manifest = self.parts.manifest
        try:
            found = open_original(manifest, self.head_name or self._at_hand(manifest.head), self.offline)
        except (SourceError, CheckpointError) as error:
            if self.head_name is not None:
                raise
            raise SkipCheck(f"the source head is not at hand; name it with --head ({error})") from error
        if found is None:
            raise SkipCheck("the source head was a local folder, which is not beside it; name it with --head")
        return found

    def _at_hand(self, recorded: Mapping[str, Any]) -> str | None:
        """A local head or target that still lies under its name beside the artifact, if its files have their sizes."""
        found = folder_beside(self.parts.folder, recorded)
        if found is None:
            return None
        sizes = {file["name"]: file["size_bytes"] for file in recorded.get("files", ())}
        inside = found / (recorded.get("subfolder") or "")
        are_there = all((inside / name).is_file() and (inside / name).stat().st_size == sizes[name] for name in sizes)
        return str(found) if are_there else None

    def _target_choice(self, manifest: Manifest) -> TargetChoice:
        if self.target_name is not None:
            return TargetChoice(self.target_name, "given")
        if manifest.target.get("wheel"):
            return TargetChoice(None, "built in")
        if (name := manifest.target.get("repo_id")) is not None:
            return TargetChoice(name, "recorded")
        if (name := self._at_hand(manifest.target)) is not None:
            return TargetChoice(name, "beside")
        was = "was a local folder, which is not beside it" if "name" in manifest.target else "is not recorded"
        raise SkipCheck(f"the target {was}; name it with --target")

    def _tokenizer(self, manifest: Manifest) -> LoadedTokenizer:
        if self.tokenizer_name is None and self._target is None:
            raise SkipCheck("no tokenizer is at hand; name it with --tokenizer or --target")
        with contextlib.suppress(TokenizerError) if self.tokenizer_name is None else contextlib.nullcontext():
            loaded = targets.open_tokenizer(self.tokenizer_name, self._target, manifest.target_vocab, self.offline)
            if loaded is not None:
                return loaded
        raise SkipCheck("the target has no tokenizer; name it with --tokenizer")
