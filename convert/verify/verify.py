"""`verify_artifact`: every rule of the format, every byte against the manifest, and the source where it is at hand.

Each check stands alone, so that one fault does not hide another; one that another fault makes impossible, or whose
source is not at hand, is skipped with its reason. FORMAT.md gives the reasons for the rules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from eagle_slim.vocab_tools.errors import EagleSlimError

from ..engines import ENGINES, HeadFacts, head_findings, require_engines, version_findings
from ..errors import ArtifactError
from .rules import CHECKS, Doubt, Parts, SkipCheck, join
from .source import SourceChecks


@dataclass(frozen=True)
class Check:
    """One check: its name, how it ended, and its finding or reason."""

    name: str
    status: Literal["ok", "warning", "failed", "skipped"]
    detail: str

    @classmethod
    def made(cls, name: str, check: Callable[[], str]) -> Check:
        """Run a check."""
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
        """The result as `eagle-verify --json` prints it."""
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
    sources = SourceChecks(parts, head_name, target_name, tokenizer_name, offline)
    checks = {name: partial(check, parts) for name, check in CHECKS.items()} | sources.checks
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
        has_gguf=any(name.endswith(".gguf") for name in manifest.files),
    )
    findings = [*head_findings(facts, engine), *version_findings(engine, version)]
    errors, warnings, notes = (
        [str(found) for found in findings if found.severity == severity] for severity in ("error", "warning", "note")
    )
    join(errors)
    if warnings:
        raise Doubt("; ".join(warnings))
    return "; ".join(notes) or f"{ENGINES[engine].title} takes it: {ENGINES[engine].proof}"
