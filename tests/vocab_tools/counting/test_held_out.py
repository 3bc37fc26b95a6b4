"""Holding out: the caps, and a merge that does not care for order or grouping."""

import numpy as np
import pytest
from eagle_slim.vocab_tools.counting.block import PartialCounts, merge_partial
from eagle_slim.vocab_tools.counting.held_out import (
    Candidates,
    HeldOutRule,
    document_keys,
    key_of_source,
    merge_candidates,
    ranges,
)
from eagle_slim.vocab_tools.errors import UsageError
from hypothesis import given, settings
from hypothesis import strategies as st

VOCAB = 7


def _candidates(*documents: tuple[int, list[int]]) -> Candidates:
    ordered = sorted(documents)
    return Candidates(
        np.array([key for key, _ in ordered], np.uint64),
        np.array([len(ids) for _, ids in ordered], np.int64),
        np.array([token for _, ids in ordered for token in ids], np.int32),
    )


def test_ranges_of_the_docstring() -> None:
    assert ranges(np.array([7, 2]), np.array([2, 3])).tolist() == [7, 8, 2, 3, 4]
    assert ranges(np.zeros(0, np.int64), np.zeros(0, np.int64)).tolist() == []


def test_keys_depend_on_seed_source_purpose_and_index() -> None:
    index = np.arange(1000)
    base = document_keys(key_of_source(0, "a", "held out"), index)
    assert len(np.unique(base)) == 1000
    for other in ((1, "a", "held out"), (0, "b", "held out"), (0, "a", "sample")):
        assert not np.intersect1d(base, document_keys(key_of_source(*other), index)).size
    # Uniform: a tenth of the keys lie in the lowest tenth of the range, within four standard deviations.
    assert abs((base < np.uint64(2**64 // 10)).sum() - 100) < 4 * 9.5
    # The keys decide which documents are held out of published counts: they must not move.
    assert key_of_source(0, "chat", "held out") == 8733710611365451771
    found = document_keys(42, np.array([0, 1, 2**40])).tolist()
    assert found == [14356227768414603074, 11278394287510598221, 9310656467812998315]


def test_number_of_documents_held_out() -> None:
    rule = HeldOutRule(0.05)
    assert [rule.documents_of(n) for n in (0, 1, 2, 29, 30, 100, 1010)] == [0, 0, 1, 1, 2, 5, 51]
    assert HeldOutRule(0).documents_of(100) == 0
    for bad in ({"fraction": 1.0}, {"fraction": -0.1}):
        with pytest.raises(UsageError):
            HeldOutRule(**bad)  # type: ignore[arg-type]


_documents = st.dictionaries(
    st.integers(0, 60), st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=5), max_size=12
)


def _partial(documents: dict[int, list[int]], rule: HeldOutRule) -> PartialCounts:
    candidates, given_up = merge_candidates(Candidates.empty(), _candidates(*documents.items()), rule)
    tokens = sum(map(len, documents.values()))
    return PartialCounts(np.bincount(given_up, minlength=VOCAB), len(documents), tokens, 1, 2, 3, candidates)


def _key(partial: PartialCounts) -> tuple[object, ...]:
    c = partial.candidates
    numbers = (partial.documents, partial.tokens, partial.empty, partial.skipped, partial.cuts, c.bound)
    return (partial.counts.tolist(), *numbers, c.keys.tolist(), c.lengths.tolist(), c.token_ids.tolist())


@given(
    documents=_documents,
    owners=st.lists(st.integers(0, 2), min_size=61, max_size=61),
    max_documents=st.integers(0, 8),
    max_tokens=st.integers(0, 20),
)
@settings(max_examples=200, deadline=None)
def test_merging_parts_in_any_order_and_grouping(
    documents: dict[int, list[int]], owners: list[int], max_documents: int, max_tokens: int
) -> None:
    rule = HeldOutRule(0.5, max_documents, max_tokens)
    a, b, c = (
        _partial({key: ids for key, ids in documents.items() if owners[key] == owner}, rule) for owner in range(3)
    )
    left = merge_partial(merge_partial(a, b, rule), c, rule)
    assert _key(left) == _key(merge_partial(a, merge_partial(b, c, rule), rule))
    assert _key(left) == _key(merge_partial(merge_partial(c, b, rule), a, rule))
    # The same as holding out of all documents at once, by the definition.
    kept: list[int] = []
    for key in sorted(documents):
        if len(kept) == max_documents or sum(len(documents[k]) for k in [*kept, key]) > max_tokens:
            break
        kept.append(key)
    assert left.candidates.keys.tolist() == kept
    rest = [token for key, ids in documents.items() if key not in kept for token in ids]
    assert left.counts.tolist() == np.bincount(np.array(rest, int), minlength=VOCAB).tolist()
    if rule.active:
        counts, held_out = left.finish(rule)
        assert held_out is not None
        assert held_out.num_documents == min(len(kept), rule.documents_of(len(documents)))
        everything = [token for ids in documents.values() for token in ids]
        total = counts + np.bincount(held_out.token_ids, minlength=VOCAB)
        assert total.tolist() == np.bincount(np.array(everything, int), minlength=VOCAB).tolist()
