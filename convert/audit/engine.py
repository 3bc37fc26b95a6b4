"""Checks for the engines that are to serve an artifact: do they take such a head, in a version that was tried?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from ..engines.facts import HeadFacts
from ..engines.registry import ENGINES, check_engine
from ..errors import ArtifactError
from .findings import Doubt, Findings


@dataclass(frozen=True)
class EngineChecks:
    """The last group: one check for each engine asked about.

    Attributes:
        found: what the other groups have read.
        engines: keys in `ENGINES`.
        version: of the engine, where one is asked about; None looks for an installed one.
    """

    found: Findings
    engines: Sequence[str]
    version: str | None

    def all(self) -> Iterator[tuple[str, Callable[[], str]]]:
        """Name and function of each check, in order."""
        for engine in self.engines:
            yield f"engine {engine}", partial(self.engine, engine)

    def engine(self, engine: str) -> str:
        """Errors of `check_engine` fail, its warnings are doubts, its notes come with the ok."""
        findings = check_engine(self._facts(), engine, version=self.version)
        texts = {
            severity: "; ".join(str(finding) for finding in findings if finding.severity == severity)
            for severity in ("error", "warning", "note")
        }
        if texts["error"]:
            raise ArtifactError(texts["error"])
        if texts["warning"]:
            raise Doubt(texts["warning"])
        return texts["note"] or f"{ENGINES[engine].title} takes it: {ENGINES[engine].proof}"

    def _facts(self) -> HeadFacts:
        manifest, head = self.found.need_manifest(), self.found.need_head("model.safetensors")
        layers = manifest.target.get("num_hidden_layers")
        return HeadFacts.of(
            head,
            config=self.found.need_config(),
            draft_vocab=manifest.draft_vocab,
            target_layers=layers if isinstance(layers, int) else None,
        )
