"""A log of what was generated, in the format of `eagle-vocab count`, from which the next draft vocabulary is ranked.

Counted are **all** generated tokens, those that the draft vocabulary missed and those that it held. A ranking needs
both: merged with the counts of a corpus (`eagle-vocab merge`), each source is weighed by its share and normalised, so
that an id's score is its frequency in a mixture of the corpus and of this use. Missed ids alone would come with the
whole weight of the source, before ids that are common here and were held; and in the next round, where they are held,
with none, so that they would leave again. Which of the counted ids a vocabulary misses follows from the vocabulary
(`eagle-vocab show VOCAB --counts LOG`); how many they were stands in the provenance.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from eagle_slim.vocab_tools.counting.counts import SourceCounts, TokenCounts
from eagle_slim.vocab_tools.errors import TokenizerError, VocabularyError
from eagle_slim.vocab_tools.files import refuse_existing

from .generation.output import GenerationOutput

if TYPE_CHECKING:
    from .model import SpeculativeModel

METHOD = "generated"
_SOURCE = "generated"


@dataclass
class _Source:
    """What was generated under one name since the last save."""

    counts: np.ndarray[tuple[int], np.dtype[np.int64]]
    answers: int = 0
    missed: dict[str, dict[str, int]] = field(default_factory=dict)
    digest: Any = field(default_factory=hashlib.sha256)


class MissLog:
    """Counts of generated tokens, to be added to a file.

        log = MissLog.of(model)
        log.add(model.generate("Write a parser."), source="code")
        log.save("use.counts.safetensors")

    Args:
        vocab_size: length of the counts: the tokenizer's largest id + 1, as `eagle-vocab count` has it.
        tokenizer_hash: of the tokenizer that ids belong to, or None where it is not known.
        target: what generated, for the provenance.
    """

    def __init__(self, vocab_size: int, tokenizer_hash: str | None, target: str) -> None:
        self.vocab_size, self.tokenizer_hash, self.target = vocab_size, tokenizer_hash, target
        self._sources: dict[str, _Source] = {}

    @classmethod
    def of(cls, model: SpeculativeModel) -> MissLog:
        """An empty log for what a model generates."""
        size = int(model.target.text_config.vocab_size)
        if model.tokenizer is not None:
            # Rows that pad a model's vocabulary have no token, and no counts of a corpus.
            size = max(model.tokenizer.get_vocab().values()) + 1
        name = None if model.opened is None else model.opened.target_name
        return cls(size, model.tokenizer_hash, name or type(model.target.model).__name__)

    @property
    def num_tokens(self) -> int:
        """Tokens since the last save."""
        return sum(int(source.counts.sum()) for source in self._sources.values())

    def add(self, output: GenerationOutput, draft_vocab: int | str | None = None, source: str = _SOURCE) -> None:
        """Add what a call generated.

        Args:
            output: of `SpeculativeModel.generate`.
            draft_vocab: size or `vocabulary_name` of the draft vocabulary, under which the provenance says how much was
                missed; None to say nothing, as is done of plain decoding too.
            source: name of the source of counts, such as "code"; `eagle-vocab merge` and `rank` weigh by it.
        """
        stats = output.stats
        missed: dict[int | str, tuple[int, int]] = {}
        if draft_vocab is not None and stats.num_checked_tokens:
            missed = {draft_vocab: (stats.num_checked_tokens, stats.num_missed)}
        self.add_tokens(output.token_ids, missed, source)

    def add_tokens(
        self,
        answers: Iterable[Sequence[int]],
        missed: Mapping[int | str, tuple[int, int]] | None = None,
        source: str = _SOURCE,
    ) -> None:
        """Add answers, int ids; those beyond the tokenizer's, of a model's padding rows, are not counted.

        ``missed``: by size or name of a draft vocabulary, tokens generated with it and how many it missed.
        """
        into = self._sources.setdefault(source, _Source(np.zeros(self.vocab_size, np.int64)))
        for answer in answers:
            ids = np.asarray(answer, dtype=np.int64)
            into.counts += np.bincount(ids[ids < self.vocab_size], minlength=self.vocab_size)
            into.digest.update(ids.tobytes())
            into.answers += 1
        for size, (tokens, count) in (missed or {}).items():
            _add_missed(into.missed, str(size), tokens, count)

    def to_counts(self) -> TokenCounts:
        """What was added since the last save. Raises `VocabularyError` when that is nothing."""
        sources = []
        for name, source in self._sources.items():
            provenance = {
                "method": METHOD,
                "text": "all generated tokens",
                "targets": [self.target],
                "answers": source.answers,
                "tokens": int(source.counts.sum()),
                "missed": source.missed,
                "sha256": source.digest.hexdigest(),
            }
            sources.append(SourceCounts(name, 1.0, source.counts, None, provenance))
        return TokenCounts(tuple(sources), self.tokenizer_hash)

    def save(self, path: str | Path) -> int:
        """Add to a file of counts, whole or not at all, and begin anew; returns how many tokens were added.

        A log that is there is added to, its weights stay. Logs of runs at the same time must be files of their own:
        `eagle-vocab merge` adds them up.

        Raises:
            UsageError, VocabularyError, TokenizerError: as `check_log`.
            OSError: the disk refused.
        """
        added = self.num_tokens
        if not self._sources:
            return 0
        there, new = check_log(path, self), self.to_counts()
        (new if there is None else _joined(there, new)).save(path)
        self._sources.clear()
        return added


def vocabulary_name(model: SpeculativeModel) -> str:
    """A draft vocabulary as the provenance of a log names it: its size, and what may join it."""
    follow = model.drafter.weights.follow
    return str(model.draft_vocab) + ("" if follow is None else f" and what joins from the {follow.source}")


def check_log(path: str | Path, log: MissLog | None = None) -> TokenCounts | None:
    """Make sure that a log can be written, or added to, before anything is generated; returns what the file holds.

    Raises:
        UsageError: a folder, or a file in a folder that does not exist.
        VocabularyError: another file is there; or, with ``log``, counts of another length.
        TokenizerError: with ``log``: it holds counts of another tokenizer.
    """
    path = refuse_existing(path, force=True)
    if not path.exists():
        return None
    there = TokenCounts.load(path)
    if any(source.provenance.get("method") != METHOD for source in there.sources):
        raise VocabularyError(
            f"{path}: holds counts of a corpus, or merged ones, to which what is generated is not added. Give another "
            "file for the log, and add the two up with eagle-vocab merge.",
            path=str(path),
            found=[source.name for source in there.sources],
        )
    if log is not None and there.tokenizer_hash != log.tokenizer_hash:
        raise TokenizerError(
            f"{path}: a log of another tokenizer (hash {there.tokenizer_hash}, this model's {log.tokenizer_hash}). "
            "Give another file.",
            path=str(path),
            expected=log.tokenizer_hash,
            found=there.tokenizer_hash,
        )
    if log is not None and there.vocab_size != log.vocab_size:
        raise VocabularyError(
            f"{path}: a log of {there.vocab_size} ids, this model's tokenizer has {log.vocab_size}. Give another file.",
            path=str(path),
            expected=log.vocab_size,
            found=there.vocab_size,
        )
    return there


def _joined(there: TokenCounts, new: TokenCounts) -> TokenCounts:
    sources = {source.name: source for source in there.sources}
    for source in new.sources:
        before = sources.get(source.name)
        sources[source.name] = source if before is None else _added(before, source)
    return TokenCounts(tuple(sources.values()), there.tokenizer_hash)


def _added(before: SourceCounts, new: SourceCounts) -> SourceCounts:
    old, more = before.provenance, new.provenance
    missed: dict[str, dict[str, int]] = {}
    for part in (old["missed"], more["missed"]):
        for size, found in part.items():
            _add_missed(missed, size, found["tokens"], found["missed"])
    provenance = {
        **old,
        "targets": sorted({*old["targets"], *more["targets"]}),
        "answers": old["answers"] + more["answers"],
        "tokens": old["tokens"] + more["tokens"],
        "missed": missed,
        "sha256": hashlib.sha256(f"{old['sha256']}{more['sha256']}".encode()).hexdigest(),
    }
    return SourceCounts(before.name, before.weight, before.counts + new.counts, None, provenance)


def _add_missed(into: dict[str, dict[str, int]], size: str, tokens: int, missed: int) -> None:
    found = into.setdefault(size, {"tokens": 0, "missed": 0})
    found["tokens"] += tokens
    found["missed"] += missed
