"""Token maps of other tools, read and written, and the two forms of d2t."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from eagle_slim.vocab_tools.errors import UsageError, VocabularyError
from eagle_slim.vocab_tools.ranking import rank_by_order
from eagle_slim.vocab_tools.token_maps import (
    FORMATS,
    MapFormat,
    d2t_from_ids,
    export_token_map,
    ids_from_d2t,
    import_token_map,
    t2d_from_ids,
)
from eagle_slim.vocab_tools.vocabulary import DraftVocab
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from support.raising import raises

IDS = [1, 4, 5]
OFFSETS = [1, 3, 3]
MASK = [False, True, False, False, True, True]
NAMES: dict[MapFormat, str] = {
    "freq": "freq_4.pt",
    "vllm": "draft.json",
    "safetensors": "map.safetensors",
    "json": "vocab.json",
}


def test_the_worked_example() -> None:
    assert d2t_from_ids(IDS).tolist() == OFFSETS
    assert t2d_from_ids(IDS, 6).tolist() == MASK
    assert ids_from_d2t(OFFSETS, target_vocab=6).tolist() == IDS
    assert ids_from_d2t(OFFSETS, MASK, target_vocab=6).tolist() == IDS
    assert ids_from_d2t(IDS, MASK, "absolute", target_vocab=6).tolist() == IDS
    with raises(VocabularyError, option="--d2t-form"):
        ids_from_d2t(IDS, MASK, target_vocab=6)
    # Values that are no ids show offsets without a mask: rows in order of frequency, ids 9, 0, 4.
    assert ids_from_d2t([9, -1, 2], target_vocab=10).tolist() == [9, 0, 4]


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


@pytest.mark.parametrize(
    ("d2t", "t2d", "form"),
    [
        ([1, 3, 3], [True] * 6, None),
        ([1, 3, 3], MASK[:5], None),
        ([1, 3, 3], [2, 1, 0, 0, 1, 1], None),
        ([1, 3, 3], MASK, "absolute"),
        ([0, 0, 4], None, "absolute"),
        ([4, 5, 7], None, None),
        (np.zeros(0, np.int64), None, None),
        ([0.5, 1.5], None, None),
        ([[1, 2]], None, None),
    ],
    ids=["all marked", "short mask", "no mask", "other form", "twice", "too large", "empty", "fractions", "nested"],
)
def test_broken_maps(d2t: Any, t2d: list[Any] | None, form: Any) -> None:
    with pytest.raises(VocabularyError):
        ids_from_d2t(np.asarray(d2t), t2d, form, target_vocab=6)


def make(ids: list[int] | None = None, target_vocab: int = 12) -> DraftVocab:
    return DraftVocab(np.array([7, 2, 11, 3] if ids is None else ids), 0, target_vocab)


@settings(max_examples=15, deadline=None)
@given(st.sets(st.integers(0, 199), min_size=2), st.randoms(use_true_random=False))
@pytest.mark.parametrize("kind", FORMATS)
def test_round_trip(kind: MapFormat, tmp_path_factory: pytest.TempPathFactory, ids: set[int], random) -> None:
    order = sorted(ids)
    random.shuffle(order)
    path = tmp_path_factory.mktemp("map") / NAMES[kind]
    export_token_map(make(order, 200), path, kind)
    found = import_token_map(path, 200)
    assert found.target_vocab == 200
    assert found.ranked == (kind != "safetensors")
    assert found.target_ids.tolist() == (order if found.ranked else sorted(ids))


def test_d2t_and_t2d_are_the_published_tensors(tmp_path: Path) -> None:
    export_token_map(make(), tmp_path / "map.safetensors")
    tensors = load_file(tmp_path / "map.safetensors")
    assert (tensors["d2t"].tolist(), tensors["d2t"].dtype) == ([2, 2, 5, 8], np.int64)
    assert (tensors["t2d"].tolist(), tensors["t2d"].dtype) == ([i in (2, 3, 7, 11) for i in range(12)], np.bool_)


def test_d2t_in_a_torch_file(tmp_path: Path) -> None:
    pair = {"d2t": torch.tensor([2, 2, 5, 8]), "t2d": torch.tensor([i in (2, 3, 7, 11) for i in range(12)])}
    torch.save(pair, tmp_path / "mapping.pt")
    assert import_token_map(tmp_path / "mapping.pt").target_ids.tolist() == [2, 3, 7, 11]
    torch.save(torch.tensor([2, 2, 5, 8]), tmp_path / "d2t.pt")
    assert import_token_map(tmp_path / "d2t.pt", 12).target_ids.tolist() == [2, 3, 7, 11]
    # Under another name it is a list of ids, in which no id comes twice.
    torch.save(torch.tensor([2, 2, 5, 8]), tmp_path / "map.pt")
    with pytest.raises(VocabularyError, match="id 2 appears again"):
        import_token_map(tmp_path / "map.pt", 12)


def test_the_form_of_d2t_is_said_where_the_file_does_not_show_it(tmp_path: Path) -> None:
    torch.save(torch.tensor([2, 3, 7, 11]), tmp_path / "d2t.pt")
    for target_vocab in (12, None):
        with raises(VocabularyError, option="--d2t-form"):
            import_token_map(tmp_path / "d2t.pt", target_vocab)
    assert import_token_map(tmp_path / "d2t.pt", 12, "absolute").target_ids.tolist() == [2, 3, 7, 11]
    torch.save([2, 3, 7, 11], tmp_path / "list.pt")
    with raises(UsageError, option="--d2t-form"):
        import_token_map(tmp_path / "list.pt", 12, "absolute")


def test_ids_as_text_and_under_a_name(tmp_path: Path) -> None:
    for name, text in (("a.txt", "7 2\n11,3\n"), ("a.csv", "7\n2\n11\n3"), ("a.json", '{"token_ids": [7, 2, 11, 3]}')):
        # With the mark that editors of Windows put first, too.
        for encoding in ("utf-8", "utf-8-sig"):
            (tmp_path / name).write_text(text, encoding=encoding)
            found = import_token_map(tmp_path / name, 12)
            assert (found.target_ids.tolist(), found.ranked) == ([7, 2, 11, 3], True)


@pytest.mark.parametrize(
    ("ranked", "again"),
    [([1, 9, 3, 7], [1]), ([9, 3, 1, 7], [1]), ([1, 9, 2, 7], [1, 2])],
    ids=["first", "later", "both"],
)
def test_maps_of_fr_specs_script_for_tokenizers_that_add_a_bos(
    tmp_path: Path, ranked: list[int], again: list[int]
) -> None:
    bos, eos = 1, 2
    # For r = 5: the first r - 1 ids, then tokenizer.encode(eos), which a BOS begins.
    torch.save([*ranked, bos, eos], tmp_path / "freq_5.pt")
    found = import_token_map(tmp_path / "freq_5.pt", 12)
    assert found.target_ids.tolist() == [*ranked, *({eos} - set(ranked))]
    assert [str(token_id) in warning for warning in found.warnings for token_id in again] == [True] * len(again)
    assert rank_by_order(found, forced=[], target_vocab=12).warnings[0] == found.warnings[0]
    with pytest.raises(UsageError, match=rf"only {found.size} .*FR-Spec's script"):
        rank_by_order(found, found.size + 1, forced=[], target_vocab=12)
    torch.save([*ranked, 7, 10], tmp_path / "other.pt")
    assert import_token_map(tmp_path / "other.pt", 12).size == 5
    torch.save([*ranked, 9, bos, eos], tmp_path / "damaged.pt")
    with pytest.raises(VocabularyError, match="id 9 appears again"):
        import_token_map(tmp_path / "damaged.pt", 12)


def test_an_artifact_keeps_its_rank_order(tmp_path: Path) -> None:
    manifest = {"rank_order_ids": [7, 2, 11], "num_forced": 1, "target_vocab": 12, "vocabulary": {"method": "counts"}}
    (tmp_path / "eagle_slim.json").write_text(json.dumps(manifest))
    found = import_token_map(tmp_path)
    assert (found.target_ids.tolist(), found.num_forced, found.target_vocab) == ([7, 2, 11], 1, 12)
    assert found.ranked
    with pytest.raises(VocabularyError, match=r"12.*1300"):
        import_token_map(tmp_path, 1300)
    for change in ({"rank_order_ids": None}, {"vocabulary": ["text"]}):
        (tmp_path / "eagle_slim.json").write_text(json.dumps({**manifest, **change}))
        with pytest.raises(VocabularyError, match=next(iter(change))):
            import_token_map(tmp_path)


def test_a_head_with_a_map_is_read_in_place(tmp_path: Path) -> None:
    save_file(
        {"d2t": np.array([2, 2, 5, 8], np.int32), "lm_head.weight": np.zeros((4, 2), np.float32)},
        tmp_path / "model.safetensors",
    )
    assert import_token_map(tmp_path, 12).target_ids.tolist() == [2, 3, 7, 11]
    assert import_token_map(tmp_path).target_vocab == 12
    save_file({"weight": np.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(VocabularyError, match="neither d2t nor t2d"):
        import_token_map(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(VocabularyError, match=r"without model.safetensors"):
        import_token_map(tmp_path)


def test_target_vocab_comes_from_the_mask_or_the_largest_id(tmp_path: Path) -> None:
    export_token_map(make(), tmp_path / "m.safetensors")
    assert import_token_map(tmp_path / "m.safetensors").target_vocab == 12
    export_token_map(make(), tmp_path / "freq.pt")
    guessed = import_token_map(tmp_path / "freq.pt")
    assert guessed.target_vocab == 12
    assert guessed.provenance["target_vocab_from"] == "largest id"
    export_token_map(make(), tmp_path / "v.json")
    with pytest.raises(VocabularyError, match=r"v.json.*12.*1300"):
        import_token_map(tmp_path / "v.json", 1300)


class _Evil:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


@pytest.mark.parametrize("wrap", [lambda evil: evil, lambda evil: [1, 2, evil], lambda evil: {"d2t": evil}])
def test_a_malicious_pickle_is_refused_and_never_run(tmp_path: Path, wrap) -> None:
    marker = tmp_path / "ran"
    torch.save(wrap(_Evil(marker)), tmp_path / "evil.pt")
    with pytest.raises(VocabularyError, match=r"evil.pt: refused"):
        import_token_map(tmp_path / "evil.pt", 12)
    assert not marker.exists()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.json", [1, 12]),
        ("a.json", []),
        ("a.json", {"ids": [1]}),
        ("a.txt", "7 2 the"),
        ("a.pt", torch.tensor([1.0], dtype=torch.bfloat16)),
        ("a.pt", torch.tensor([[1]])),
        ("a.dat", b"1\n2\n"),
        ("a.pt", b"not a pickle"),
        ("a.safetensors", b"\x00" * 20),
        ("none.pt", None),
    ],
)
def test_bad_files(tmp_path: Path, name: str, content: object) -> None:
    path = tmp_path / name
    if content is None:
        pass
    elif isinstance(content, bytes):
        path.write_bytes(content)
    elif name.endswith(".pt"):
        torch.save(content, path)
    else:
        path.write_text(content if name.endswith(".txt") and isinstance(content, str) else json.dumps(content))
    with pytest.raises(VocabularyError, match=name):
        import_token_map(path, 12)


def test_export_refusals(tmp_path: Path) -> None:
    unranked = DraftVocab(np.array([2, 3]), 0, 12, ranked=False)
    for vocab, name, kind in ((make(), "a.json", "freq"), (make(), "a.dat", None), (unranked, "freq.pt", "freq")):
        with raises(UsageError, option="--format"):
            export_token_map(vocab, tmp_path / name, kind)
    export_token_map(unranked, tmp_path / "ok.safetensors")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["ok.safetensors"]
