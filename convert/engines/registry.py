"""Which engines there are, and what each makes of a head in a version that was tried, or in another.

The rules were read in, or executed with, the versions in `ENGINES`; docs/engines.md says which of the two, and by which
test.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import metadata

from eagle_slim.vocab_tools.errors import UsageError

from ..head import names
from . import llama_cpp, lmdeploy, safeailab, sglang, specforge, speculators, tensorrt_llm, vllm
from .facts import HeadFacts
from .rules import Engine, Severity, apply_rule

ENGINES: dict[str, Engine] = {
    "vllm": vllm.ENGINE,
    "sglang": sglang.ENGINE,
    "tensorrt-llm": tensorrt_llm.ENGINE,
    "llama.cpp": llama_cpp.ENGINE,
    "safeailab": safeailab.ENGINE,
    "lmdeploy": lmdeploy.ENGINE,
    "speculators": speculators.ENGINE,
    "specforge": specforge.ENGINE,
}
_WATCH = "watch the accepted length of the first requests (docs/engines.md)"

# architectures[0] by kind and flavour; a flavour that is not here has no name of its own. SGLang and vLLM read the
# same name differently for EAGLE-1/2: one needs the ending, the other prefixes the name and then does not know it.
_ARCHITECTURES = {
    ("eagle3", "lmdeploy"): {"": "LlamaForCausalLM"},
    ("eagle", "sglang"): {"Qwen2": "Qwen2ForCausalLMEagle", "": "LlamaForCausalLMEagle"},
}


@dataclass(frozen=True)
class Finding:
    """One thing that an engine makes of a head.

    Attributes:
        engine: key in `ENGINES`.
        severity, problem, alternative: as `rules.py` says.
        is_about_version: whether it is about the engine's version rather than the head.
    """

    engine: str
    severity: Severity
    problem: str
    alternative: str
    is_about_version: bool = False

    def __str__(self) -> str:
        return f"{ENGINES[self.engine].title}: {self.problem}; {self.alternative}"


def check_engine(facts: HeadFacts, engine: str, *, version: str | None = None) -> list[Finding]:
    """What an engine of `ENGINES` makes of a head, and whether the version that will serve it was tried.

    Without a version, an installed one is looked for.
    """
    require_engines([engine], version)
    return [*_findings(facts, engine), *_findings(facts, engine, ENGINES[engine].known), *_of_version(engine, version)]


def require_engines(engines: Sequence[str], version: str | None = None) -> None:
    """Refuse names of engines that are not known, and what is no version number, before anything is read.

    Raises:
        UsageError: such a name or version, or one version for several engines.
    """
    for engine in engines:
        if engine not in ENGINES:
            raise UsageError(
                f"--engine: expected one of {', '.join(ENGINES)}, found {engine!r}.", option="--engine", found=engine
            )
    if version is not None:
        if len(engines) != 1:
            raise UsageError("--engine-version goes with exactly one --engine.", option="--engine-version")
        _numbers(version)


def conversion_findings(facts: HeadFacts) -> list[Finding]:
    """What to say when a head is converted: errors and warnings of every serving engine, in the order of `ENGINES`.

    Left out are the architecture name of an EAGLE-3 head, which is chosen with `--for` and no trait of the head, and
    what `open_head` has warned of already.
    """
    if facts.kind == "eagle3":
        facts = replace(facts, config={key: value for key, value in facts.config.items() if key != "architectures"})
    found = [finding for key, engine in ENGINES.items() if engine.serves for finding in _findings(facts, key)]
    return [finding for finding in found if finding.severity != "note"]


def in_words(findings: Sequence[Finding]) -> list[str]:
    """One sentence for each finding; one that several engines share is said once."""
    engines: dict[tuple[str, str], list[str]] = {}
    for finding in findings:
        engines.setdefault((finding.problem, finding.alternative), []).append(ENGINES[finding.engine].title)
    return [f"{', '.join(titles)}: {problem}; {alternative}" for (problem, alternative), titles in engines.items()]


def flavoured_architecture(kind: names.HeadKind, flavour: str, architecture: str) -> str:
    """The class name to write for an engine: `architecture`, or the one spelling that the flavour's engine reads."""
    spellings = _ARCHITECTURES.get((kind, flavour), {})
    return next((name for prefix, name in spellings.items() if architecture.startswith(prefix)), architecture)


def _findings(facts: HeadFacts, engine: str, rules: Sequence[str] | None = None) -> list[Finding]:
    if rules is None:
        rules = getattr(ENGINES[engine], facts.kind)
    return [Finding(engine, *found) for rule in rules if (found := apply_rule(rule, facts)) is not None]


def _of_version(key: str, stated: str | None) -> list[Finding]:
    engine = ENGINES[key]
    if engine.proven is None:
        return [Finding(key, "warning", f"{engine.proof}, but no version of it was executed", _WATCH, True)]
    version = stated or _installed_version(engine.distributions)
    first, last = engine.proven
    span = f"{first if first == last else f'{first} to {last}'} ({engine.proof})"
    if version is None:
        return [Finding(key, "note", f"not installed here; proven with {span}", "see docs/engines.md", True)]
    if _numbers(first) <= _numbers(version) <= _numbers(last):
        return []
    problem = f"version {version}{'' if stated else ' installed here'} is outside the proven range {span}"
    return [Finding(key, "warning", problem, f"use the proven version, or {_WATCH}", True)]


def _installed_version(distributions: Sequence[str]) -> str | None:
    for name in distributions:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def _numbers(version: str) -> tuple[int, ...]:
    """The release part of a version, padded: '0.32.0+cpu' and '0.32' are both (0, 32, 0, 0)."""
    match = re.match(r"[vb]?(\d+(?:\.\d+)*)", version)
    if match is None:
        raise UsageError(
            f"--engine-version: expected a version number such as 0.32.0, found {version!r}.",
            option="--engine-version",
            found=version,
        )
    parts = [int(part) for part in match[1].split(".")]
    return tuple(parts[:4] + [0] * (4 - len(parts)))
