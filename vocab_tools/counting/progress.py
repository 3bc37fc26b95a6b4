"""The progress bar of a count."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from ..corpus.open import OpenCorpus


class ProgressBar:
    """Progress on stderr: share of the corpus, tokens, tokens per second."""

    def __init__(
        self,
        corpora: Sequence[OpenCorpus],
        progress: bool | Callable[[int], None] | None,
    ) -> None:
        from tqdm import tqdm

        self._call = progress if callable(progress) else None
        if self._call is not None:
            progress = False
        sizes = [corpus.size for corpus in corpora]
        known = [size for size in sizes if size is not None]
        self._tokens = 0
        self._started = time.monotonic()
        self._bar = tqdm(
            total=sum(known) if len(known) == len(sizes) else None,
            desc="counting",
            disable=None if progress is None else not progress,
            delay=0 if progress else 1,
            bar_format="{desc}: {percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}"
            if len(known) == len(sizes)
            else "{desc}: {elapsed}{postfix}",
        )

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def moved(self, size: int, tokens: int) -> None:
        """Advance by a block: its size in units of `OpenCorpus.size`, and its tokens."""
        if self._call:
            self._call(tokens)
        self._tokens += tokens
        seconds = max(time.monotonic() - self._started, 1e-9)
        rate = self._tokens / seconds
        self._bar.set_postfix_str(f"{self._tokens / 1e6:.1f}M tokens, {rate / 1e6:.2f}M tokens/s", refresh=False)
        self._bar.update(size)
