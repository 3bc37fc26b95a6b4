"""`verify_artifact`: every rule of the format, every byte against the manifest, and the source where it is at hand.

Each check stands alone, so that one fault does not hide another; one that another fault makes impossible, or whose
source is not at hand, is skipped with its reason. FORMAT.md gives the reasons for the rules.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from eagle_slim.vocab_tools.errors import EagleSlimError, TokenizerError

from ..artifact.tensors import config_of
from ..engines import ENGINES, HeadFacts, head_findings, require_engines, version_findings
from ..errors import ArtifactError, CheckpointError, SourceError
from ..heads import names
from ..heads.config import with_tap_layers
from ..heads.draft_head import DraftHead
from ..heads.open import open_head
from ..rows.lm_head import fitting, own_lm_head, rows_of_ids
from ..rows.target import is_embedding_of, open_target_lm_head
from ..sources import target as targets
from ..sources.source import open_head_source
from .rules import CHECKS, Doubt, Parts, SkipCheck, config_differences, join, refuse


@dataclass(frozen=True)
class Check:
    """One check: its name, how it ended, and its finding or reason."""

    name: str
    status: Literal["ok", "warning", "failed", "skipped"]
    detail: str

    @classmethod
    def made(cls, name: str, check: Callable[[], str]) -> Check:
        """Run ``check``, which returns its finding, and tell from what it raises how it ended."""
        try:
            return cls(name, "ok", check())
        except SkipCheck as reason:
            return cls(name, "skipped", str(reason))
        except Doubt as doubt:
            return cls(name, "warning", str(doubt))
        except EagleSlimError as error:
            return cls(name, "failed", str(error))


@dataclass(frozen=True)
class Verification:
    """The checks of one artifact, in order."""

    folder: Path
    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        """Whether no check failed."""
        return not self.failed

    @property
    def failed(self) -> tuple[Check, ...]:
        """The checks that failed."""
        return tuple(check for check in self.checks if check.status == "failed")

    def __getitem__(self, name: str) -> Check:
        return {check.name: check for check in self.checks}[name]

    def to_json(self) -> dict[str, Any]:
        """Return the result as `eagle-verify --json` prints it."""
        return {"folder": str(self.folder), "ok": self.ok, "checks": [asdict(check) for check in self.checks]}


def verify_artifact(
    folder: str | Path,
    *,
    head: str | Path | None = None,
    target: str | Path | None = None,
    tokenizer: str | Path | None = None,
    offline: bool = False,
    engines: Sequence[str] = (),
    engine_version: str | None = None,
) -> Verification:
    """Check an artifact, and report on every check.

    Its sources are compared where they are built in, named here, or in the local Hub cache at the recorded revision;
    nothing else is fetched.

    Args:
        folder: the artifact.
        head: folder or repository of the head it was made from; its sub-folder, if it had one, is recorded.
        target: folder or repository of the target; its LM head is compared where the rows came from it.
        tokenizer: folder, tokenizer.json or repository; default the target's.
        offline: fetch nothing for `head`, `target` and `tokenizer` either.
        engines: also check that these engines take it (keys of `engines.ENGINES`).
        engine_version: the version that will serve it, for one engine; default the installed one.

    Raises:
        UsageError: no such engine, or a version that is not a number.
        ArtifactError: there is no such folder. Faults of an artifact are reported, not raised.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ArtifactError.at(folder, "no such folder.\nExpected one that eagle-convert wrote.")
    require_engines(engines, engine_version)
    parts = Parts(folder)
    head_name, target_name, tokenizer_name = (None if it is None else str(it) for it in (head, target, tokenizer))
    sources = _SourceChecks(parts, head_name, target_name, tokenizer_name, offline)
    checks: dict[str, Callable[[], str]] = {name: partial(check, parts) for name, check in CHECKS.items()}
    checks |= {"target": sources.target, "tensors of the source head": sources.source_tensors}
    checks["config of the source head"] = sources.source_config
    checks |= {"lm_head rows of the source": sources.source_rows, "tokenizer": sources.tokenizer}
    checks |= {f"engine {engine}": partial(_check_engine, parts, engine, engine_version) for engine in engines}
    return Verification(folder, tuple(map(Check.made, checks, checks.values())))


def _check_engine(parts: Parts, engine: str, version: str | None) -> str:
    """Check the head against an engine, and the engine's version; notes come with the ok."""
    manifest = parts.manifest
    facts = HeadFacts.of(
        parts.head,
        config=parts.config,
        draft_vocab=manifest.draft_vocab,
        target_layers=parts.target_layers,
    )
    findings = [*head_findings(facts, engine), *version_findings(engine, version)]
    errors, warnings, notes = (
        [str(found) for found in findings if found.severity == severity] for severity in ("error", "warning", "note")
    )
    join(errors)
    if warnings:
        raise Doubt("; ".join(warnings))
    return "; ".join(notes) or f"{ENGINES[engine].title} takes it: {ENGINES[engine].proof}"


@dataclass
class _SourceChecks:
    """Checks that are skipped where their source is not on this machine, unless the user named it."""

    parts: Parts
    head_name: str | None
    target_name: str | None
    tokenizer_name: str | None
    offline: bool
    _target: targets.Target | None = field(default=None, init=False)

    def source_tensors(self) -> str:
        """Every tensor that is copied is bit-identical to the source head's; an embedding left out, to the target's."""
        parts, source = self.parts, self._source_head
        skipped = {names.LM_HEAD, *names.MAPS, *source.row_tensors}
        # Zeros that a conversion adds where the source has none.
        added = (names.FC_BIAS, *names.ATTENTION_BIASES.get(source.kind, ())[-1:])
        skipped |= {name for name in added if name not in source.tensors}
        copied = [name for name in sorted(parts.weights.tensors) if name not in skipped]
        problems = []
        for name in copied:
            if name not in source.tensors:
                problems.append(f"{name} is not in the source")
            elif replace(source.tensors.info(name), name=name) != parts.weights.tensors[name] or (
                source.tensors.source.sha256(source.tensors.stored[name]) != parts.digests[name]
            ):
                problems.append(f"{name} differs from the source's")
        for name in source.row_tensors:
            rows, mine = source.tensors.rows(name, rows_of_ids(source, parts.ids)), parts.checkpoint.tensor(name)
            if mine.dtype != rows.dtype or not mine.equal(rows):
                problems.append(f"{name} differs from the source's rows")
        is_left_out = names.EMBEDDING in source.tensors and names.EMBEDDING not in parts.weights.tensors
        is_copy = is_embedding_of(self._target.source, source) if is_left_out and self._target is not None else None
        if is_left_out and is_copy is False:
            problems.append(f"{names.EMBEDDING} is left out, and is no copy of the target's")
        join(problems)
        doubt = "; that the target has its embedding is not known here" if is_left_out and is_copy is None else ""
        return f"{len(copied)} tensors bit-identical to {source.location}{doubt}"

    def source_config(self) -> str:
        """config.json has the values that a conversion of the source head writes."""
        manifest, found = self.parts.manifest, self.parts.config
        expected = config_of(self._source_head, manifest.draft_vocab, manifest.flavour)
        if manifest.kind == "eagle3" and manifest.tap_layers:
            # The source was opened with these layers, which the artifact may name under other keys.
            expected, found = (with_tap_layers(config, manifest.tap_layers) for config in (expected, found))
        join(config_differences(expected, found))
        return f"{len(found)} keys"

    def source_rows(self) -> str:
        """Every lm_head row is the row of its token in the head or the target that it came from."""
        manifest, written = self.parts.with_lm_head(), self.parts.checkpoint
        ids = self.parts.ids if manifest.rank_order_ids is not None else np.arange(manifest.target_vocab)
        if (manifest.lm_head or {}).get("from") == "head":
            source = self._source_head
            refuse(not source.has_lm_head, f"{source.location} has no LM head, and the rows came from a head's own")
            lm_head = own_lm_head(source)
        else:
            source = self.parts.head
            if self._target is None:
                raise SkipCheck("the target that the rows came from is not at hand; name it with --target")
            with self._skipped_unless_named("the target's LM head", "--target", self.target_name):
                lm_head = open_target_lm_head(self._target.source, offline=self._only_cache)
            lm_head = fitting(lm_head, source, self._target.name)
        gathered, info = lm_head.gather(source, ids), written.info(names.LM_HEAD)
        expected = (gathered.dtype, (len(ids), lm_head.info.shape[1]))
        refuse((info.dtype, info.shape) != expected, f"expected {expected}, found {(info.dtype, info.shape)}")
        different = gathered.differing(written.array(names.LM_HEAD))
        if len(different):
            raise ArtifactError(f"{len(different)} rows are not those of their tokens, the first is row {different[0]}")
        how = "rounded from" if gathered.rounded else "bit-identical to"
        return f"{len(ids)} rows {how} {lm_head.name} of {lm_head.where}"

    def target(self) -> str:
        """Widths, vocabulary and tap layers fit the target."""
        recorded, name, revision = self.parts.manifest.target, self.target_name, None
        if name is None and not recorded.get("wheel"):
            name, revision = recorded.get("repo_id"), recorded.get("revision")
            if name is None:
                was = "was a local folder" if "name" in recorded else "is not recorded"
                raise SkipCheck(f"the target {was}; name it with --target")
        with self._skipped_unless_named("the target", "--target", self.target_name):
            self._target = targets.open_target(name, revision, self._only_cache)
        targets.check_head_fits(self.parts.head, self._target)
        sizes = {key: self._target.config.get(key) for key in ("hidden_size", "num_hidden_layers")}
        others = [key for key, size in sizes.items() if recorded.get(key, size) != size]
        join([f"the manifest records {key} {recorded[key]}, it is {sizes[key]}" for key in others])
        return f"{self._target.name}: widths, vocabulary and tap layers fit"

    def tokenizer(self) -> str:
        """The tokenizer is the one that the vocabulary was chosen for."""
        recorded = self.parts.manifest.tokenizer or {}
        if self.tokenizer_name is None and self._target is None:
            raise SkipCheck("no tokenizer is at hand; name it with --tokenizer or --target")
        vocab = self.parts.manifest.target_vocab
        with self._skipped_unless_named("the target's tokenizer", "--tokenizer", self.tokenizer_name):
            loaded = targets.open_tokenizer(self.tokenizer_name, self._target, vocab, self.offline)
        if loaded is None or "hash" not in recorded:
            raise SkipCheck("the target has no tokenizer, or the artifact was made without one")
        expected, found = recorded["hash"], loaded.tokenizer_hash
        refuse(found != expected, f"another vocabulary: expected {expected}, found {found}")
        changed = recorded.get("chat_template_hash") != loaded.chat_template_hash
        return "hash agrees" + ("; its chat template has changed since" if changed else "")

    @property
    def _only_cache(self) -> bool:
        # What the user did not name is searched for on this machine only.
        return self.offline or self.target_name is None

    @contextlib.contextmanager
    def _skipped_unless_named(self, what: str, option: str, named: str | None) -> Iterator[None]:
        """Skip the check where its source cannot be had, unless the user named it."""
        try:
            yield
        except (SourceError, CheckpointError, TokenizerError) as error:
            if named is not None:
                raise
            raise SkipCheck(f"{what} is not at hand; name it with {option} ({error})") from error

    @cached_property
    def _source_head(self) -> DraftHead:
        """The head that the artifact was made from, read as it was then; at the recorded revision unless named."""
        manifest, recorded, name, revision = self.parts.manifest, self.parts.manifest.head, self.head_name, None
        if name is None:
            name, revision = recorded.get("repo_id"), recorded.get("revision")
            if name is None and not recorded.get("built_in"):
                raise SkipCheck("the source head was a local folder; name it with --head")
        with self._skipped_unless_named("the source head", "--head", self.head_name):
            is_offline = self.offline or self.head_name is None
            source = open_head_source(name, revision, is_offline, recorded.get("subfolder"))
            form = recorded.get("d2t_form", "auto")
            return open_head(source, d2t_form=form, tap_layers=manifest.tap_layers or None)
