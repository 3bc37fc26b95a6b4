"""`verify_artifact`: every rule of the format, every byte against the manifest, and the source where it is at hand.

Each check stands alone, so that one fault does not hide another. A check that another fault makes impossible, or that
needs something that is not at hand, is skipped with its reason. FORMAT.md gives the reasons for the rules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from eagle_slim.vocab_tools.errors import EagleSlimError

from ..engines import ENGINES, HeadFacts, check_engine, require_engines
from ..errors import ArtifactError
from .files import FileChecks
from .findings import Doubt, Findings, SkipCheck, refuse
from .rules import RuleChecks
from .source import SourceChecks

Status = Literal["ok", "warning", "failed", "skipped"]


@dataclass(frozen=True)
class Check:
    """One check: its name, how it ended, and what was found."""

    name: str
    status: Status
    detail: str

    def to_json(self) -> dict[str, str]:
        """The check as JSON."""
        return {"name": self.name, "status": self.status, "detail": self.detail}


@dataclass(frozen=True)
class Verification:
    """The checks of one artifact, in order."""

    folder: Path
    checks: tuple[Check, ...] = field(default_factory=tuple)

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
        return {"folder": str(self.folder), "ok": self.ok, "checks": [check.to_json() for check in self.checks]}


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

    What it was made from is at hand when it is built in, named here, in the local Hub cache at the revision that the
    manifest records, or a folder beside the artifact of the recorded name and sizes; nothing else is fetched.

    Args:
        folder: the artifact.
        head: folder or repository of the head it was made from; its sub-folder, if it had one, is recorded.
        target: folder or repository of the target; its LM head is compared where the rows came from it.
        tokenizer: folder, tokenizer.json or repository; default the target's.
        offline: fetch nothing for `head`, `target` and `tokenizer` either.
        engines: also check that these engines take it (keys of `engines.registry.ENGINES`).
        engine_version: the version that will serve it, for one engine; default the installed one.

    Raises:
        UsageError: no such engine, or a version that is not a number.
        ArtifactError: there is no such folder. Faults of an artifact are reported, not raised.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ArtifactError.at(folder, "no such folder.\nExpected one that eagle-convert wrote.")
    require_engines(engines, engine_version)
    found = Findings(folder)
    checks: list[Check] = []

    def run(name: str, check: Callable[[], str]) -> None:
        try:
            checks.append(Check(name, "ok", check()))
        except SkipCheck as reason:
            checks.append(Check(name, "skipped", str(reason)))
        except Doubt as doubt:
            checks.append(Check(name, "warning", str(doubt)))
        except EagleSlimError as error:
            checks.append(Check(name, "failed", str(error)))

    named = (None if value is None else str(value) for value in (head, target, tokenizer))
    head_name, target_name, tokenizer_name = named
    sources = SourceChecks(found, head_name, target_name, tokenizer_name, offline)
    for group in (FileChecks(found), RuleChecks(found), sources):
        for name, check in group.all():
            run(name, check)
    for engine in engines:
        run(f"engine {engine}", partial(_check_engine, found, engine, engine_version))
    return Verification(folder, tuple(checks))


def _check_engine(found: Findings, engine: str, version: str | None) -> str:
    """Whether an engine takes such a head, in a version that was tried; its notes come with the ok."""
    manifest, head = found.need_manifest(), found.need_head("model.safetensors")
    layers = manifest.target.get("num_hidden_layers")
    facts = HeadFacts.of(
        head,
        config=found.need_config(),
        draft_vocab=manifest.draft_vocab,
        target_layers=layers if isinstance(layers, int) else None,
        has_gguf=any(name.endswith(".gguf") for name in manifest.files),
    )
    findings = check_engine(facts, engine, version=version)
    texts = {
        severity: "; ".join(str(finding) for finding in findings if finding.severity == severity)
        for severity in ("error", "warning", "note")
    }
    refuse(bool(texts["error"]), texts["error"])
    if texts["warning"]:
        raise Doubt(texts["warning"])
    return texts["note"] or f"{ENGINES[engine].title} takes it: {ENGINES[engine].proof}"
