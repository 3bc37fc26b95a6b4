"""`convert_head`: a draft head and a vocabulary in, slim artifacts out. The library function behind `eagle-convert`.

Three steps: open the inputs once (`inputs.py`), rank the vocabulary once (`vocab_choice.py`), write an artifact for
each size (`write.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from eagle_slim.vocab_tools.ranking.size_from_cost import StepCost

from ..atomic import check_output, free_bytes, require_space
from ..manifest import MANIFEST_NAME
from .inputs import Inputs, check_sizes, num_rankable, open_inputs
from .kept_choice import check_keep_rows, choose_kept_ids
from .options import ConvertOptions, DraftVocabSize
from .result import Conversion, Planned
from .vocab_choice import Ranking, Say, make_ranking
from .write import bytes_per_draft_step, kept_bytes, write_slim

if TYPE_CHECKING:
    from eagle_slim.vocab_tools.corpus.source import CorpusSource
    from eagle_slim.vocab_tools.counting.counts import TokenCounts
    from eagle_slim.vocab_tools.tokenizer.tokenizer import LoadedTokenizer
    from eagle_slim.vocab_tools.vocabulary.draft_vocab import DraftVocab

Count = Callable[[Sequence["CorpusSource"], "LoadedTokenizer"], "TokenCounts"]


def convert_head(
    head: str | Path | None,
    options: ConvertOptions,
    *,
    count: Count | None = None,
    say: Say = lambda message: None,
) -> tuple[Conversion, ...]:
    """Convert a draft head to slim artifacts, one for each size of draft vocabulary.

    Args:
        head: folder or Hub repository; None is the built-in head for SmolLM2-135M-Instruct.
        options: what is made of it.
        count: counts a corpus; default `count_tokens` with one worker per core.
        say: called, with a sentence, for each default that is used and each thing that is done.

    Returns:
        One conversion per size, in the order given.

    Raises:
        UsageError, OutputExistsError: contradictory arguments, or existing output; nothing was read.
        SourceError, CheckpointError, UnsupportedHeadError, MismatchError: the inputs (see convert/errors.py).
        CorpusError, TokenizerError, VocabularyError: the vocabulary (see vocab_tools/errors.py).
        OutputError: the result cannot be written.
    """
    return prepare_conversion(head, options, say=say).convert(count)


@dataclass(frozen=True)
class PreparedConversion:
    """A conversion of which everything but the counting and the writing is done and checked.

    Attributes:
        inputs: opened, compared with each other, and at hand.
        options: of the conversion.
        cost: that finds the size, for the size "auto".
        titles, folders: of each artifact.
        num_forced: as `check_sizes` found them.
        say: told what is being done.
    """

    inputs: Inputs
    options: ConvertOptions
    cost: StepCost | None
    titles: Sequence[str]
    folders: Sequence[Path]
    num_forced: Mapping[DraftVocabSize | None, int | None]
    say: Say

    @property
    def plans(self) -> tuple[Planned, ...]:
        """What will be written."""
        head = self.inputs.head
        found = []
        for size, folder in zip(self.options.sizes, self.folders, strict=True):
            rows = head.target_vocab if size == "full" else size
            kept = self._num_kept(rows)
            found.append(
                Planned(
                    folder,
                    rows,
                    self.num_forced[size],
                    self.inputs.rows_before,
                    bytes_per_draft_step(head, self.inputs.rows_before),
                    None if rows is None else bytes_per_draft_step(head, rows),
                    kept,
                    None if kept is None else kept_bytes(head, kept),
                    free_bytes(folder),
                )
            )
        return tuple(found)

    def _num_kept(self, rows: int | None) -> int | None:
        """Rows that are kept beside a draft vocabulary of a size; None where only the ranking tells."""
        keep = self.options.keep_rows
        if keep is None:
            return 0
        return None if keep == "full" or rows is None else keep - rows

    @property
    def access(self) -> dict[str, str]:
        """What the conversion reads from, in words, by what it is."""
        inputs = self.inputs
        found = {"head": inputs.source.label if inputs.source.repo_id else inputs.head.location}
        if inputs.lm_head is not None and inputs.target is not None:
            found["LM head"] = f"{inputs.lm_head.name} of target {inputs.target.name}, at hand"
        elif inputs.head.has_lm_head:
            found["LM head"] = "the head's own"
        found["tokenizer"] = "none" if inputs.tokenizer is None else f"at hand, {inputs.tokenizer.vocab_size:,} ids"
        found["vocabulary"] = self.options.vocabulary.summary
        return found

    def convert(self, count: Count | None = None) -> tuple[Conversion, ...]:
        """Rank the vocabulary and write the artifacts; arguments and errors as `convert_head`."""
        ranking, request, keep = None, self.options.vocabulary, self.options.keep_rows
        sizes = self.options.sizes
        if any(size != "full" for size in sizes):
            if count is None:
                from eagle_slim.vocab_tools.counting.count import count_tokens

                count = count_tokens
            ranking = make_ranking(
                self.inputs.head,
                request,
                self.inputs.tokenizer,
                embedded=self.inputs.is_builtin,
                offline=self.options.offline,
                count=count,
                say=self.say,
                target=None if self.inputs.target is None else self.inputs.target.name,
            )
        elif not request.is_default or request.force_ids:
            self.say(
                "--draft-vocab full keeps every row in its place: counts, maps, text and forced ids change nothing"
            )
        # All of them before the first is written: a size that does not fit leaves nothing behind.
        vocabs = [None if size == "full" or ranking is None else self._cut(ranking, size) for size in sizes]
        kept = [
            None if vocab is None or ranking is None or keep is None else choose_kept_ids(keep, ranking, vocab)
            for vocab in vocabs
        ]
        done = []
        for vocab, kept_ids, title, folder in zip(vocabs, kept, self.titles, self.folders, strict=True):
            self.say(f"writing {folder}")
            done.append(write_slim(self.inputs, ranking, vocab, kept_ids, folder, title))
        return tuple(done)

    def _cut(self, ranking: Ranking, size: int | None) -> DraftVocab:
        if self.cost is None:
            return ranking.cut(size, self.options.coverage)
        vocab = ranking.cut_by_cost(self.cost)
        self.say(f"the measured cost and the coverage of the ranking are fastest at {len(vocab):,} rows")
        return vocab


def prepare_conversion(
    head: str | Path | None, options: ConvertOptions, *, say: Say = lambda message: None
) -> PreparedConversion:
    """Do everything of `convert_head` that comes before counting and writing; arguments and errors are the same.

    Whatever can end a conversion is looked at here: the output, the head, the target's LM head, the tokenizer, the
    sizes, and the space on the disk.
    """
    cost = None if options.cost is None else StepCost.load(options.cost)
    head = None if head is None else str(head)
    titles = [options.name_of(head, size) for size in options.sizes]
    folders = [options.folder_of(title) for title in titles]
    for folder in folders:
        check_output(folder, options.force, MANIFEST_NAME)
    inputs = open_inputs(head, options, say)
    if options.keep_rows is not None:
        check_keep_rows(options.keep_rows, inputs, num_rankable(inputs))
    elif (own := inputs.head.manifest) is not None and own.kept_rows is not None:
        say(f"the {len(own.kept_rows):,} rows that {inputs.head.location} keeps are not kept again without --keep-rows")
    prepared = PreparedConversion(inputs, options, cost, titles, folders, check_sizes(inputs), say)
    require_space(folders[0], sum((plan.bytes_after or 0) + (plan.kept_bytes or 0) for plan in prepared.plans))
    return prepared
