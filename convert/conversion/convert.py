"""`convert_head`: a draft head and a vocabulary in, slim artifacts out. The library function behind `eagle-convert`.

Three steps: open the inputs once (`inputs.py`), rank the vocabulary once (`vocab_choice.py`), write an artifact for
each size (`write.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from eagle_slim.vocab_tools.counts import TokenCounts
from eagle_slim.vocab_tools.sources import CorpusSource
from eagle_slim.vocab_tools.tokenizer.tokenizer import LoadedTokenizer

from ..atomic import check_output, require_space
from ..manifest import MANIFEST_NAME
from ..rows.lm_head import all_ids
from .inputs import Inputs, open_inputs
from .options import ConvertOptions
from .result import Conversion
from .vocab_choice import Ranking, Say, default_corpus, make_ranking
from .write import Planned, plan_slim

Count = Callable[[Sequence[CorpusSource], LoadedTokenizer], TokenCounts]


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
        titles, folders: of each artifact.
    """

    inputs: Inputs
    options: ConvertOptions
    titles: Sequence[str]
    folders: Sequence[Path]
    say: Say

    @cached_property
    def plans(self) -> tuple[Planned, ...]:
        """What will be written, as far as it is known before text is counted."""
        return self._planned(self._ranking)

    @property
    def text(self) -> tuple[Sequence[CorpusSource], LoadedTokenizer] | None:
        """What must be counted first, and the tokenizer; None where nothing must."""
        if self._ranking is None or not self._ranking.is_guess or self.inputs.tokenizer is None:
            return None
        return self.options.vocabulary.corpus or (default_corpus(),), self.inputs.tokenizer

    @cached_property
    def _ranking(self) -> Ranking | None:
        return self._ranked(None)

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
        """Count where text is to be counted, and write the artifacts; arguments and errors as `convert_head`."""
        plans = self.plans
        if self.text is not None:
            self.check_values()
            if count is None:
                from eagle_slim.vocab_tools.counting import count_tokens

                count = count_tokens
            plans = self._planned(self._ranked(count))
        done = []
        for plan in plans:
            self.say(f"writing {plan.folder}")
            done.append(plan.write())
        return tuple(done)

    def check_values(self) -> None:
        """Read what would be written and refuse what writing would; before text is counted, every token's row."""
        ranking, plans = self._ranking, self.plans
        if ranking is not None and self.text is not None:
            plans = (plan_slim(self.inputs, ranking, ranking.cut(None), self.folders[0], self.titles[0]),)
        for plan in plans:
            plan.check_values()

    def _ranked(self, count: Count | None) -> Ranking | None:
        """The vocabulary in rank order; before text is counted (`count` None) by id. None where none is cut."""
        request = self.options.vocabulary
        if any(size != "full" for size in self.options.sizes):
            return make_ranking(
                self.inputs.head,
                request,
                self.inputs.tokenizer,
                embedded=self.inputs.is_builtin,
                offline=self.options.offline,
                count=count,
                say=self.say,
                target=None if self.inputs.target is None else self.inputs.target.name,
            )
        if not request.is_default or request.force_ids:
            self.say(
                "--draft-vocab full keeps every row in its place: counts, maps, text and forced ids change nothing"
            )
        return None

    def _planned(self, ranking: Ranking | None) -> tuple[Planned, ...]:
        found = []
        # All of them before the first is written: a size that does not fit leaves nothing behind.
        for size, title, folder in zip(self.options.sizes, self.titles, self.folders, strict=True):
            vocab = None
            if size == "full":
                all_ids(self.inputs.head)
            elif ranking is not None:
                vocab = ranking.cut(size, None if ranking.is_guess else self.options.coverage)
            found.append(plan_slim(self.inputs, ranking, vocab, folder, title))
        return tuple(found)


def prepare_conversion(
    head: str | Path | None, options: ConvertOptions, *, say: Say = lambda message: None
) -> PreparedConversion:
    """Do everything of `convert_head` that comes before counting and writing; arguments and errors are the same.

    Whatever can end a conversion is looked at here: the output, the head, the target's LM head, the tokenizer, the
    sizes, the weights of sources, and the space on the disk. `check_values` reads the tensors, which writing does too.
    """
    head = None if head is None else str(head)
    titles = [options.name_of(head, size) for size in options.sizes]
    folders = [options.folder_of(title) for title in titles]
    for folder in folders:
        check_output(folder, options.force, MANIFEST_NAME)
    inputs = open_inputs(head, options, say)
    prepared = PreparedConversion(inputs, options, titles, folders, say)
    require_space(folders[0], sum(plan.disk_bytes or 0 for plan in prepared.plans))
    return prepared
