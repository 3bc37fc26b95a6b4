import numpy as np
import pytest
from eagle_slim.vocab_tools.errors import VocabularyError
from eagle_slim.vocab_tools.vocabulary.token_map import d2t_from_ids, ids_from_d2t, t2d_from_ids
from hypothesis import given
from hypothesis import strategies as st
from support.raising import raises

IDS = [1, 4, 5]
OFFSETS = [1, 3, 3]
MASK = [False, True, False, False, True, True]


def test_the_worked_example() -> None:
    assert d2t_from_ids(IDS).tolist() == OFFSETS
    assert t2d_from_ids(IDS, 6).tolist() == MASK
    assert ids_from_d2t(OFFSETS, target_vocab=6).tolist() == IDS
    assert ids_from_d2t(OFFSETS, MASK, target_vocab=6).tolist() == IDS


@st.composite
def maps(draw: st.DrawFn) -> tuple[list[int], int]:
    target_vocab = draw(st.integers(1, 300))
    ids = draw(st.lists(st.integers(0, target_vocab - 1), min_size=1, unique=True))
    return ids, target_vocab


@given(maps(), st.sampled_from([np.int32, np.int64]), st.sampled_from([np.bool_, np.uint8, np.int64]))
def test_round_trip_in_any_row_order(given_map: tuple[list[int], int], dtype: type, mask_dtype: type) -> None:
    ids, target_vocab = given_map
    d2t = d2t_from_ids(ids).astype(dtype)
    t2d = t2d_from_ids(ids, target_vocab).astype(mask_dtype)
    found = ids_from_d2t(d2t, t2d, target_vocab=target_vocab)
    assert found.tolist() == ids
    assert found.dtype == np.int64
    assert np.array_equal(np.flatnonzero(t2d), np.sort(ids))
    assert ids_from_d2t(d2t, None, "offset", target_vocab=target_vocab).tolist() == ids


@given(maps())
def test_absolute_form_is_never_taken_for_offsets(given_map: tuple[list[int], int]) -> None:
    ids, target_vocab = given_map
    mask = t2d_from_ids(ids, target_vocab)
    # A few maps, such as the single row 0, are the same numbers in both forms.
    offsets_fit = np.array_equal(np.sort(np.asarray(ids) + np.arange(len(ids))), np.sort(ids))
    if not offsets_fit:
        with raises(VocabularyError, form="absolute"):
            ids_from_d2t(ids, mask, target_vocab=target_vocab)
    assert ids_from_d2t(ids, mask, "absolute", target_vocab=target_vocab).tolist() == ids
    with raises(VocabularyError, form="unknown"):
        ids_from_d2t(ids, target_vocab=target_vocab)


def test_negative_offsets_show_the_form_without_a_mask() -> None:
    # ModelOpt's frequency order: ids 9, 0, 4 are offsets 9, -1, 2.
    assert ids_from_d2t([9, -1, 2], target_vocab=10).tolist() == [9, 0, 4]


def test_values_too_large_for_ids_in_both_forms_are_out_of_range() -> None:
    with raises(VocabularyError, target_vocab=10):
        ids_from_d2t([7, 8, 12], target_vocab=10)


@pytest.mark.parametrize(
    ("d2t", "t2d", "form", "facts"),
    [
        ([1, 3, 3], [True] * 6, None, {"form": "neither"}),
        ([1, 3, 3], MASK[:5], None, {"tensor": "t2d", "found": [5]}),
        ([1, 3, 3], [2, 1, 0, 0, 1, 1], None, {"tensor": "t2d", "expected": "mask"}),
        ([1, 3, 3], MASK, "absolute", {"form": "offset"}),
        ([0, 0, 4], None, "absolute", {"repeated": 0}),
        ([3, 2, 2], None, "offset", {"repeated": 3}),
        ([0, 9, 9], None, None, {"id": 10, "target_vocab": 6}),
        (np.zeros(0, np.int64), None, None, {"found": 0}),
        ([0.5, 1.5], None, None, {"expected": "integers"}),
        ([[1, 2]], None, None, {"expected": "integers"}),
    ],
)
def test_broken_maps(d2t: list, t2d: list | None, form: str | None, facts: dict) -> None:
    with raises(VocabularyError, **facts):
        ids_from_d2t(np.asarray(d2t), t2d, form, target_vocab=6)
