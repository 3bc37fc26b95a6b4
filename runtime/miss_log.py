"""A log of what was generated, in the format of `eagle-vocab count`, from which the next draft vocabulary is ranked.

**All** generated tokens are counted, those that the draft vocabulary missed and those that it held. A ranking needs
both: merged with the counts of a corpus (`eagle-vocab merge`), each source is normalised and weighed, so that an id's
score is its frequency in a mixture of the corpus and of this use. A log of missed ids alone would give them the whole
weight of the source, and rank them before ids that are common here and were held; in the next round they would be held,
count nothing, and leave again. `eagle-vocab show VOCAB --counts LOG` lists which of the counted ids a vocabulary
misses; the provenance says how many they were.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from eagle_slim.vocab_tools.counting.counts import SourceCounts, TokenCounts
from eagle_slim.vocab_tools.errors import TokenizerError, VocabularyError
from eagle_slim.vocab_tools.files import refuse_existing

from .requests.output import GenerationOutput

if TYPE_CHECKING:
    from .model import SpeculativeModel

METHOD = "generated"
_SOURCE = "generated"


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
        self._sources: dict[str, SourceCounts] = {}

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
        return sum(source.num_tokens for source in self._sources.values())

    def add(self, output: GenerationOutput, draft_vocab: int | str | None = None, source: str = _SOURCE) -> None:
        """Add what a call generated.

        Args:
            output: of `SpeculativeModel.generate`.
            draft_vocab: size or `vocabulary_name` of the draft vocabulary, under which the provenance says how much was
                missed. None says nothing, and plain decoding misses nothing.
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
        counts, num_answers, digest = np.zeros(self.vocab_size, np.int64), 0, hashlib.sha256()
        for answer in answers:
            ids = np.asarray(answer, dtype=np.int64)
            counts += np.bincount(ids[ids < self.vocab_size], minlength=self.vocab_size)
            num_answers += 1
            digest.update(ids.tobytes())
        provenance = {
            "method": METHOD,
            "text": "all generated tokens",
            "targets": [self.target],
            "answers": num_answers,
            "tokens": int(counts.sum()),
            "missed": {str(size): {"tokens": n, "missed": of_them} for size, (n, of_them) in (missed or {}).items()},
            "sha256": digest.hexdigest(),
        }
        _add(self._sources, SourceCounts(source, 1.0, counts, None, provenance))

    def to_counts(self) -> TokenCounts:
        """What was added since the last save. Raises `VocabularyError` when that is nothing."""
        return TokenCounts(tuple(self._sources.values()), self.tokenizer_hash)

    def save(self, path: str | Path) -> int:
        """Add to a file of counts, whole or not at all, and empty this log; returns how many tokens were added.

        The weights of a log that is there stay. Runs at the same time need a file each, which `eagle-vocab merge` adds
        up.

        Raises:
            UsageError, VocabularyError, TokenizerError: as `check_log`.
            OSError: the disk refused.
        """
        if not self._sources:
            return 0
        added, there = self.num_tokens, check_log(path, self)
        sources = {} if there is None else {source.name: source for source in there.sources}
        for source in self._sources.values():
            _add(sources, source)
        TokenCounts(tuple(sources.values()), self.tokenizer_hash).save(path)
        self._sources.clear()
        return added


def vocabulary_name(draft_vocab: int, follows: object) -> str:
    """A draft vocabulary as the provenance of a log names it: its size, and whether ids of the prompt join it."""
    return f"{draft_vocab} and what joins from the prompt" if follows else str(draft_vocab)


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
            f"{path}: holds counts of a corpus, or merged ones, not a log. Give the log another file, and add the two "
            "up with eagle-vocab merge.",
            path=str(path),
            found=[source.name for source in there.sources],
        )
    for name, error in (("tokenizer_hash", TokenizerError), ("vocab_size", VocabularyError)):
        expected, found = getattr(log or there, name), getattr(there, name)
        if expected != found:
            raise error(
                f"{path}: a log of another tokenizer ({name} {found}, this model's {expected}). Give another file.",
                path=str(path), expected=expected, found=found,
            )  # fmt: skip
    return there


def _add(into: dict[str, SourceCounts], new: SourceCounts) -> None:
    """Add counts to those of the same name."""
    before = into.get(new.name)
    if before is None:
        into[new.name] = new
        return
    old, more = before.provenance, new.provenance
    missed = {
        size: {
            name: sum(part["missed"][size][name] for part in (old, more) if size in part["missed"])
            for name in ("tokens", "missed")
        }
        for size in {**old["missed"], **more["missed"]}
    }
    provenance = {
        **old,
        "targets": sorted({*old["targets"], *more["targets"]}),
        "answers": old["answers"] + more["answers"],
        "tokens": old["tokens"] + more["tokens"],
        "missed": missed,
        "sha256": hashlib.sha256(f"{old['sha256']}{more['sha256']}".encode()).hexdigest(),
    }
    into[new.name] = SourceCounts(before.name, before.weight, before.counts + new.counts, None, provenance)
