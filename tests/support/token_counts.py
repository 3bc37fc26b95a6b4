from collections.abc import Sequence

import numpy as np
from eagle_slim.vocab_tools.counts import HeldOut, SourceCounts, TokenCounts


def held_out(documents: Sequence[Sequence[int]]) -> HeldOut:
    offsets = np.cumsum([0, *(len(document) for document in documents)], dtype=np.int64)
    return HeldOut(np.array([token for document in documents for token in document], np.int32), offsets)


def source(counts, documents=None, name="text", weight=1.0):
    kept = None if documents is None else held_out(documents)
    return SourceCounts(name, weight, np.array(counts, np.int64), kept, {"made": "by hand"})


def token_counts(counts, documents=None, tokenizer_hash=None):
    return TokenCounts((source(counts, documents),), tokenizer_hash)
