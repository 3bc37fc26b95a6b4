"""`verify_artifact`: every rule of the format, every byte against the manifest, and the source where it is at hand.

Each check stands alone, so that one fault does not hide another; one that another fault makes impossible, or whose
source is not at hand, is skipped with its reason. FORMAT.md gives the reasons for the rules.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from eagle_slim.vocab_tools.errors import TokenizerError

from .. import names
from ..artifact.manifest import Manifest
from ..engines import ENGINES, HeadFacts, head_findings, require_engines, version_findings
from ..errors import ArtifactError, CheckpointError, SourceError
from ..heads.draft_head import DraftHead
from ..heads.open import open_head
from ..heads.taps import with_tap_layers
from ..slim.tensors import config_of
from ..sources.source import open_head_source
from ..targets import model as targets
from ..targets.lm_head import fitting, own_lm_head, rows_of_ids
from ..targets.matrix import is_embedding_of, open_target_lm_head
from .rules import RULES, ArtifactParts, Outcome, Rule, SkippedError, Status, config_differences, no_lm_head, settled

_WITH_HEAD = ("manifest", "weights", "config", "head")


@dataclass(frozen=True)
class Check:
    """One check: its name, how it ended, and its finding or reason."""

    name: str
    status: Status
    detail: str


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
        head: folder or repository of the head it was made from; its sub-folder, if it had one, is recorded.
        target: folder or repository; its LM head is compared where the rows came from it.
        offline: fetch nothing for `head`, `target` and `tokenizer` either.
        engines: also check that these engines take it (keys of `engines.ENGINES`).
        engine_version: the version that will serve it, for one engine; default the installed one.

    Raises UsageError for an unknown engine or no version, ArtifactError for no folder; faults are reported, not raised.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ArtifactError.at(folder, "no such folder.\nExpected one that eagle-convert wrote.")
    require_engines(engines, engine_version)
    head_name, target_name, tokenizer_name = (None if it is None else str(it) for it in (head, target, tokenizer))
    sources = _SourceChecks(head_name, target_name, tokenizer_name, offline)
    check = partial(_check_engine, version=engine_version, sources=sources)
    of_engines = (Rule(f"engine {engine}", partial(check, engine=engine), _WITH_HEAD) for engine in engines)
    parts, unread = ArtifactParts(folder), set[str]()
    rules = (*RULES, *sources.rules(), *of_engines)
    return Verification(folder, tuple(Check(rule.name, *rule.outcome(parts, unread)) for rule in rules))


def _check_engine(parts: ArtifactParts, engine: str, version: str | None, sources: _SourceChecks) -> Outcome:
    opened, recorded = sources.target, {"target_type": parts.manifest.target.get("model_type")}
    of_target = {**(recorded if opened is None else opened.facts), "target_layers": parts.target_layers}
    facts = HeadFacts.of(parts.head, config=parts.config, draft_vocab=parts.manifest.draft_vocab, **of_target)
    findings = [*head_findings(facts, engine), *version_findings(engine, version)]
    errors, warnings, notes = (
        [str(found) for found in findings if found.severity == severity] for severity in ("error", "warning", "note")
    )
    if warnings and not errors:
        return "warning", "; ".join(warnings)
    return settled("; ".join(notes) or f"{ENGINES[engine].title} takes it: {ENGINES[engine].proof}", *errors)


@dataclass
class _SourceChecks:
    """Checks that are skipped where their source is not on this machine, unless the user named it."""

    head_name: str | None
    target_name: str | None
    tokenizer_name: str | None
    offline: bool
    target: targets.HeadTarget | None = field(default=None, init=False)
    _head: DraftHead | None = field(default=None, init=False)

    def rules(self) -> tuple[Rule, ...]:
        """List the checks, in order: that of the target opens it for those after it."""
        return (
            Rule("target", self._check_target, _WITH_HEAD),
            Rule("tensors of the source head", self._check_tensors, ("manifest", "weights", "digests")),
            Rule("config of the source head", self._check_config, ("manifest", "config")),
            Rule("lm_head rows of the source", self._check_rows, ("manifest", "weights", "ids"), no_lm_head),
            Rule("tokenizer", self._check_tokenizer),
        )

    def _check_target(self, parts: ArtifactParts) -> Outcome:
        recorded, name, revision = parts.manifest.target, self.target_name, None
        if name is None and not recorded.get("wheel"):
            name, revision = recorded.get("repo_id"), recorded.get("revision")
            if name is None:
                was = "was a local folder" if "name" in recorded else "is not recorded"
                raise SkippedError(f"the target {was}; name it with --target")
        with _skipping("the target", "--target", self.target_name):
            self.target = found = targets.open_target(name, revision, self._only_cache)
        targets.check_head_fits(parts.head, found)
        sizes = {key: found.config.get(key) for key in ("hidden_size", "num_hidden_layers")}
        others = [key for key, size in sizes.items() if recorded.get(key, size) != size]
        problems = [f"the manifest records {key} {recorded[key]}, it is {sizes[key]}" for key in others]
        doubts = found.doubts_of(parts.head)
        if doubts and not problems:
            return "warning", "; ".join(doubts)
        return settled(f"{found.name}: widths, vocabulary and tap layers fit", *problems)

    def _check_tensors(self, parts: ArtifactParts) -> Outcome:
        """Compare every tensor that is copied with the source head's; an embedding left out with the target's."""
        source = self._source_head(parts.manifest)
        apart = {names.LM_HEAD, *names.MAPS, *source.row_tensors}
        # Zeros that a conversion adds where the source has none.
        added = (names.FC_BIAS, *names.ATTENTION_BIASES.get(source.kind, ())[-1:])
        apart |= {name for name in added if name not in source.tensors}
        copied = [name for name in sorted(parts.weights.tensors) if name not in apart]
        problems = []
        for name in copied:
            if name not in source.tensors:
                problems.append(f"{name} is not in the source")
            elif replace(source.tensors.info(name), name=name) != parts.weights.tensors[name] or (
                source.tensors.source.sha256(source.tensors.stored[name]) != parts.digests[name]
            ):
                problems.append(f"{name} differs from the source's")
        for name in source.row_tensors:
            rows, written = source.tensors.rows(name, rows_of_ids(source, parts.ids)), parts.checkpoint.tensor(name)
            if written.dtype != rows.dtype or not written.equal(rows):
                problems.append(f"{name} differs from the source's rows")
        is_left_out = names.EMBEDDING in source.tensors and names.EMBEDDING not in parts.weights.tensors
        is_copy = is_embedding_of(self.target.source, source) if is_left_out and self.target is not None else None
        if is_left_out and is_copy is False:
            problems.append(f"{names.EMBEDDING} is left out, and is no copy of the target's")
        doubt = "; that the target has its embedding is not known here" if is_left_out and is_copy is None else ""
        return settled(f"{len(copied)} tensors bit-identical to {source.location}{doubt}", *problems)

    def _check_config(self, parts: ArtifactParts) -> Outcome:
        source, manifest, config = self._source_head(parts.manifest), parts.manifest, parts.config
        expected = config_of(source, manifest.draft_vocab, manifest.flavour)
        if manifest.kind == "eagle3" and manifest.tap_layers:
            # The source was opened with these layers, which the artifact may name under other keys.
            expected, config = (with_tap_layers(each, manifest.tap_layers) for each in (expected, config))
        return settled(f"{len(config)} keys", *config_differences(expected, config))

    def _check_rows(self, parts: ArtifactParts) -> Outcome:
        written, ids = parts.checkpoint, parts.ids
        if (parts.manifest.lm_head or {}).get("from") == "head":
            source = self._source_head(parts.manifest)
            if not source.has_lm_head:
                return "failed", f"{source.location} has no LM head, and the rows came from a head's own"
            lm_head = own_lm_head(source)
        else:
            source, target = parts.head, self.target
            if target is None:
                raise SkippedError("the target that the rows came from is not at hand; name it with --target")
            with _skipping("the target's LM head", "--target", self.target_name):
                opened = open_target_lm_head(target.source, self._only_cache)
            lm_head = fitting(opened, source, target.name)
        gathered, info = lm_head.gather(source, ids), written.info(names.LM_HEAD)
        expected = (gathered.dtype, (len(ids), lm_head.info.shape[1]))
        if (info.dtype, info.shape) != expected:
            return "failed", f"expected {expected}, found {(info.dtype, info.shape)}"
        different = gathered.differing(written.array(names.LM_HEAD))
        if len(different):
            return "failed", f"{len(different)} rows are not those of their tokens, the first is row {different[0]}"
        how = "rounded from" if gathered.rounded else "bit-identical to"
        return "ok", f"{len(ids)} rows {how} {lm_head.name} of {lm_head.where}"

    def _check_tokenizer(self, parts: ArtifactParts) -> Outcome:
        recorded, vocab = parts.manifest.tokenizer or {}, parts.manifest.target_vocab
        if self.tokenizer_name is None and self.target is None:
            raise SkippedError("no tokenizer is at hand; name it with --tokenizer or --target")
        with _skipping("the target's tokenizer", "--tokenizer", self.tokenizer_name):
            loaded = targets.open_tokenizer(self.tokenizer_name, self.target, vocab, self.offline)
        if loaded is None or "hash" not in recorded:
            raise SkippedError("the target has no tokenizer, or the artifact was made without one")
        expected, found = recorded["hash"], loaded.tokenizer_hash
        if found != expected:
            return "failed", f"another vocabulary: expected {expected}, found {found}"
        changed = recorded.get("chat_template_hash") != loaded.chat_template_hash
        return "ok", "hash agrees" + ("; its chat template has changed since" if changed else "")

    @property
    def _only_cache(self) -> bool:
        # What the user did not name is searched for on this machine only.
        return self.offline or self.target_name is None

    def _source_head(self, manifest: Manifest) -> DraftHead:
        """Open the head that the artifact was made from, read as it was then; at the recorded revision unless named."""
        if self._head is not None:
            return self._head
        recorded, name, revision = manifest.head, self.head_name, None
        if name is None:
            name, revision = recorded.get("repo_id"), recorded.get("revision")
            if name is None and not recorded.get("built_in"):
                raise SkippedError("the source head was a local folder; name it with --head")
        form, taps = recorded.get("d2t_form", "auto"), manifest.tap_layers or None
        with _skipping("the source head", "--head", self.head_name):
            only_cache = self.offline or self.head_name is None
            source = open_head_source(name, revision, only_cache, recorded.get("subfolder"))
            self._head = open_head(source, d2t_form=form, tap_layers=taps)
        return self._head


@contextlib.contextmanager
def _skipping(what: str, option: str, named: str | None) -> Iterator[None]:
    """Skip the check that reads a source which cannot be had, unless the user named it."""
    try:
        yield
    except (SourceError, CheckpointError, TokenizerError) as error:
        if named is not None:
            raise
        raise SkippedError(f"{what} is not at hand; name it with {option} ({error})") from error
