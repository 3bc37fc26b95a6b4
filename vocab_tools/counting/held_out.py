"""Which documents are held out: a random part that is never counted, the same for any number of workers.

Every document has a 64-bit key, a hash of (seed, source, document index). The documents with the smallest keys are set
aside with their tokens, up to a cap of documents and tokens; a document pushed out by smaller keys is counted after
all. At the end the smallest keys make up the wanted fraction, and the rest is counted.

`Candidates` is the state in between. Merging them is associative and does not depend on the order. This rests on
`bound`: no document whose key reaches it may come back, even after the document that exceeded the cap is gone.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..errors import UsageError

NO_BOUND = 2**64 - 1


@dataclass(frozen=True)
class HeldOutRule:
    """How much of each source is held out.

    Attributes:
        fraction: share of the documents, 0 for none. At least one document is held out of two or more.
        max_documents: cap on the documents per source.
        max_tokens: cap on the tokens per source; a single longer document is always counted.
    """

    fraction: float = 0.05
    max_documents: int = 4096
    max_tokens: int = 1_000_000

    def __post_init__(self) -> None:
        if not 0 <= self.fraction < 1:
            raise UsageError(f"held-out fraction: expected at least 0 and below 1, found {self.fraction}.")

    @property
    def active(self) -> bool:
        """Whether anything can be held out at all."""
        return self.fraction > 0 and self.max_documents > 0 and self.max_tokens > 0

    def documents_of(self, num_documents: int) -> int:
        """Return how many of `num_documents` documents to hold out."""
        if not self.active or num_documents < 2:
            return 0
        return max(1, int(self.fraction * num_documents + 0.5))


def key_of_source(seed: int, source: str, purpose: str) -> int:
    """64-bit key of (seed, source); `purpose` keeps sampling and holding out independent of each other."""
    digest = hashlib.blake2b(f"{seed}\0{source}\0{purpose}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def document_keys(source_key: int, index: NDArray[np.int64]) -> NDArray[np.uint64]:
    """Keys of documents, uint64 [documents]: splitmix64 (Steele, Lea, Flood 2014) of index and source, twice over."""
    x = index.astype(np.uint64)
    for _ in range(2):
        x = (x + np.uint64(source_key)) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        x = x ^ (x >> np.uint64(31))
    return x


@dataclass(frozen=True, eq=False)
class Candidates:
    """Documents that may be held out, in ascending order of their keys.

    Attributes:
        keys: uint64 [documents].
        lengths: tokens per document, int64 [documents].
        token_ids: int32 [tokens], of all documents, concatenated.
        bound: keys at or above this one have been given up.
    """

    keys: NDArray[np.uint64]
    lengths: NDArray[np.int64]
    token_ids: NDArray[np.int32]
    bound: int = NO_BOUND

    @classmethod
    def empty(cls) -> Candidates:
        """No documents."""
        return cls(np.zeros(0, np.uint64), np.zeros(0, np.int64), np.zeros(0, np.int32))

    def head(self, num_documents: int) -> tuple[Candidates, NDArray[np.int32]]:
        """Keep the smallest keys; returns what is kept and the token ids of the others, which are to be counted."""
        tokens = int(self.lengths[:num_documents].sum())
        kept = Candidates(self.keys[:num_documents], self.lengths[:num_documents], self.token_ids[:tokens], self.bound)
        return kept, self.token_ids[tokens:]


def merge_candidates(a: Candidates, b: Candidates, rule: HeldOutRule) -> tuple[Candidates, NDArray[np.int32]]:
    """Merge two sets and apply the caps.

    Returns:
        The merged candidates, and the token ids (int32) of the documents given up, which are to be counted.
    """
    keys = np.concatenate([a.keys, b.keys])
    lengths = np.concatenate([a.lengths, b.lengths])
    token_ids = np.concatenate([a.token_ids, b.token_ids])
    bound = min(a.bound, b.bound)
    order = np.argsort(keys, kind="stable")
    # Sorted already, as when one side is empty: nothing to move.
    if not np.array_equal(order, np.arange(len(order))):
        starts = (np.cumsum(lengths) - lengths)[order]
        keys, lengths = keys[order], lengths[order]
        token_ids = token_ids[ranges(starts, lengths)]
    num_kept = int(np.searchsorted(keys, np.uint64(bound)))
    over_cap = np.flatnonzero(np.cumsum(lengths[:num_kept]) > rule.max_tokens)
    limit = min(int(over_cap[0]) if len(over_cap) else num_kept, rule.max_documents)
    if limit < num_kept:
        bound = int(keys[limit])
        num_kept = int(np.searchsorted(keys, np.uint64(bound)))
    return Candidates(keys, lengths, token_ids, bound).head(num_kept)


def ranges(starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the positions of all ranges, concatenated: starts [7, 2] with lengths [2, 3] give [7, 8, 2, 3, 4]."""
    ends = np.cumsum(lengths)
    shifts: NDArray[np.int64] = np.repeat(starts - (ends - lengths), lengths)
    shifts += np.arange(len(shifts))
    return shifts
