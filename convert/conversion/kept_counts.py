"""Counts of a corpus that outlive the conversion they were made for, where it ends before it is done."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from eagle_slim.vocab_tools.corpus.source import CorpusSource
from eagle_slim.vocab_tools.counting.counts import TokenCounts
from eagle_slim.vocab_tools.errors import CorpusError, UsageError
from eagle_slim.vocab_tools.tokenizer.tokenizer import LoadedTokenizer


class KeptCounts:
    """Counts, and keeps what was counted when the block it manages is left by an error, saying how to go on.

    Args:
        save_to: where the user wants the counts; None for nowhere, so that they go when all is well.
        out: the output, beside which they are kept then.
        notify: told how to go on.
        options: of `count_tokens`.
    """

    def __init__(self, save_to: Path | None, out: Path, notify: Callable[[str], None], **options: Any) -> None:
        self.done = False
        self._is_ours = save_to is None
        self._file = save_to or out.with_name(f".{out.name}.counts.safetensors")
        self._notify = notify
        self._options = options

    def count(self, sources: Sequence[CorpusSource], tokenizer: LoadedTokenizer) -> TokenCounts:
        """Count; see `count_tokens`. What another count has left for the same output is dropped."""
        from eagle_slim.vocab_tools.counting.count import count_tokens

        def count(restart: bool) -> TokenCounts:
            return count_tokens(
                sources,
                tokenizer,
                notify=self._notify,
                save_to=self._file,
                resume_file=self._resume_file,
                restart=restart,
                **self._options,
            )

        try:
            counts = count(restart=False)
        except (UsageError, CorpusError) as error:
            if not self._is_ours or error.facts.get("path") != self._resume_file:
                raise
            self._notify(f"{self._resume_file} is of another count: starting over")
            counts = count(restart=True)
        self.done = True
        return counts

    def check(self, sources: Sequence[CorpusSource], tokenizer: LoadedTokenizer) -> None:
        """Open the text and look at its beginning, and refuse what `count` would refuse before it counts."""
        from eagle_slim.vocab_tools.counting.count import open_for_counting

        named = inspect.signature(open_for_counting).parameters
        open_for_counting(sources, tokenizer, **{name: self._options[name] for name in self._options if name in named})

    def __enter__(self) -> KeptCounts:
        return self

    def __exit__(self, kind: object, error: BaseException | None, *_: object) -> None:
        if error is None:
            if self.done and self._is_ours:
                self._file.unlink(missing_ok=True)
        elif self.done:
            self._notify(f"The counts are kept: go on with --counts {self._file} instead of --dataset.")
        elif self._resume_file.exists() and getattr(error, "facts", {}).get("path") != self._resume_file:
            # An interrupted count has said it itself.
            self._notify(
                f"What was counted so far is kept in {self._resume_file}: the same command goes on from there."
            )

    @property
    def _resume_file(self) -> Path:
        from eagle_slim.vocab_tools.counting.resume import resume_file_beside

        return resume_file_beside(self._file)
