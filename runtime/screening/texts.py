"""Token ids of texts, from the sources that `eagle-vocab count` takes, mixed by weight in an order that stays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from eagle_slim.vocab_tools.corpus.blocks import BadRecord
from eagle_slim.vocab_tools.corpus.open import OpenCorpus
from eagle_slim.vocab_tools.corpus.source import CorpusSource
from eagle_slim.vocab_tools.counting.block import BlockCounter, DocumentReader
from eagle_slim.vocab_tools.counting.count import open_for_counting
from eagle_slim.vocab_tools.errors import CorpusError
from eagle_slim.vocab_tools.tokenizer.tokenizer import LoadedTokenizer
from numpy.typing import NDArray


class Texts:
    """Texts of some sources; chats are whole conversations, as the template writes them.

    Raises as `open_for_counting`.
    """

    def __init__(self, sources: Sequence[CorpusSource], tokenizer: LoadedTokenizer, say: Callable[[str], None]) -> None:
        whole = [replace(source, roles="all") for source in sources]
        self._corpora, plan = open_for_counting(whole, tokenizer, notify=say)
        self._reader, self._counter = DocumentReader(plan), BlockCounter(plan)

    @property
    def identity(self) -> list[Any]:
        """JSON that changes when the texts, or their order, do."""
        return [[corpus.source.weight, corpus.column, corpus.identity] for corpus in self._corpora]

    @property
    def origin(self) -> list[dict[str, Any]]:
        """Where they come from, JSON without paths or times."""
        return [
            {"name": corpus.source.name, "weight": corpus.source.weight, **corpus.origin} for corpus in self._corpora
        ]

    def __iter__(self) -> Iterator[NDArray[np.int64]]:
        """Yield the ids [tokens] of each text, always from the source that is furthest behind its weight.

        Raises `CorpusError` for a record that cannot be read.
        """
        running = {place: self._read(place, corpus) for place, corpus in enumerate(self._corpora)}
        taken = dict.fromkeys(running, 0)
        while running:
            place = min(running, key=lambda place: taken[place] / self._corpora[place].source.weight)
            text = next(running[place], None)
            if text is None:
                del running[place]
                continue
            taken[place] += 1
            yield text

    def _read(self, place: int, corpus: OpenCorpus) -> Iterator[NDArray[np.int64]]:
        source, documents, tokens = corpus.source, 0, 0
        for block in corpus.blocks():
            for _, document in self._reader.documents(place, block):
                if isinstance(document, BadRecord):
                    raise CorpusError(f"{corpus.place_of(document)}: {document.reason}")
                text = self._counter.encode_document(document).astype(np.int64)
                documents, tokens = documents + 1, tokens + len(text)
                yield text
                if documents == source.max_documents or tokens >= (source.max_tokens or np.inf):
                    return
