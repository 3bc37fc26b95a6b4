import io
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from eagle_slim.vocab_tools.errors import UsageError, VocabularyError
from eagle_slim.vocab_tools.ranking.rank import rank_by_order
from eagle_slim.vocab_tools.vocabulary.draft_vocab import DraftVocab
from eagle_slim.vocab_tools.vocabulary.export_map import export_token_map
from eagle_slim.vocab_tools.vocabulary.formats import FORMATS, MapFormat
from eagle_slim.vocab_tools.vocabulary.import_map import import_token_map
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from support.raising import raises

NAMES: dict[MapFormat, str] = {
    "freq": "freq_4.pt",
    "vllm": "draft.json",
    "d2t-pt": "mapping.pt",
    "modelopt": "d2t.pt",
    "safetensors": "map.safetensors",
    "npy": "maps",
    "json": "vocab.json",
}
KEEPS_RANK = ("freq", "vllm", "json")


def make(ids: list[int] | None = None, target_vocab: int = 12) -> DraftVocab:
    return DraftVocab(np.array([7, 2, 11, 3] if ids is None else ids), 0, target_vocab)


def target(folder: Path, kind: MapFormat) -> Path:
    path = folder / NAMES[kind]
    if kind == "npy":
        path.mkdir(exist_ok=True)
    return path


@settings(max_examples=15, deadline=None)
@given(st.sets(st.integers(0, 199), min_size=2), st.randoms(use_true_random=False))
@pytest.mark.parametrize("kind", FORMATS)
def test_round_trip(kind: MapFormat, tmp_path_factory: pytest.TempPathFactory, ids: set[int], random) -> None:
    order = sorted(ids)
    random.shuffle(order)
    path = target(tmp_path_factory.mktemp("map"), kind)
    export_token_map(make(order, 200), path, kind)
    # d2t alone does not show its form where no value repeats.
    form = "offset" if kind == "modelopt" else None
    found = import_token_map(path, 200, form)
    assert found.target_vocab == 200
    if kind in KEEPS_RANK:
        assert found.target_ids.tolist() == order
        assert found.ranked
    else:
        assert found.target_ids.tolist() == sorted(ids)
        assert not found.ranked


def test_freq_is_a_list_of_int_in_rank_order_and_independent_of_the_name(tmp_path: Path) -> None:
    for name in ("freq_4.pt", "another_name.pt"):
        export_token_map(make(), tmp_path / name, "freq")
    value = torch.load(tmp_path / "freq_4.pt", weights_only=True)
    assert value == [7, 2, 11, 3]
    assert all(type(token_id) is int for token_id in value)
    assert (tmp_path / "freq_4.pt").read_bytes() == (tmp_path / "another_name.pt").read_bytes()


def test_maps_are_the_published_tensors(tmp_path: Path) -> None:
    for kind in ("d2t-pt", "safetensors", "npy", "modelopt"):
        export_token_map(make(), target(tmp_path, kind), kind)
    offsets, mask = [2, 2, 5, 8], [i in (2, 3, 7, 11) for i in range(12)]
    pair = torch.load(tmp_path / "mapping.pt", weights_only=True)
    assert (pair["d2t"].tolist(), pair["t2d"].tolist()) == (offsets, mask)
    assert (pair["d2t"].dtype, pair["t2d"].dtype) == (torch.int64, torch.bool)
    tensors = load_file(tmp_path / "map.safetensors")
    assert (tensors["d2t"].tolist(), tensors["t2d"].tolist()) == (offsets, mask)
    assert torch.load(tmp_path / "d2t.pt", weights_only=True).tolist() == offsets
    assert np.load(tmp_path / "maps" / "d2t.npy").tolist() == offsets
    assert np.load(tmp_path / "maps" / "t2d.npy").tolist() == mask


def test_vllm_reads_our_files_as_it_reads_its_own(tmp_path: Path) -> None:
    # vLLM's load_draft_token_ids: a .json file must hold a list, any other file is a torch list or tensor.
    export_token_map(make(), tmp_path / "a.json", "vllm")
    assert json.loads((tmp_path / "a.json").read_text()) == [7, 2, 11, 3]
    export_token_map(make(), tmp_path / "a.pt", "vllm")
    assert torch.load(tmp_path / "a.pt", weights_only=True) == [7, 2, 11, 3]


def test_sglang_tensors_are_read(tmp_path: Path) -> None:
    for dtype in (torch.int64, torch.int32):
        torch.save(torch.tensor([7, 2, 11, 3], dtype=dtype), tmp_path / "hot.pt")
        assert import_token_map(tmp_path / "hot.pt", 12).target_ids.tolist() == [7, 2, 11, 3]


def test_a_bare_tensor_that_can_only_be_offsets_is_one_whatever_its_name(tmp_path: Path) -> None:
    torch.save(torch.tensor([9, -1, 2]), tmp_path / "map.pt")
    assert import_token_map(tmp_path / "map.pt", 12).target_ids.tolist() == [9, 0, 4]
    export_token_map(make(), tmp_path / "other.pt", "modelopt")
    assert import_token_map(tmp_path / "other.pt", 12).target_ids.tolist() == sorted(make().target_ids.tolist())
    torch.save(torch.zeros(5, dtype=torch.int64), tmp_path / "first.pt")
    assert import_token_map(tmp_path / "first.pt", 12).target_ids.tolist() == [0, 1, 2, 3, 4]
    # One id twice among many is a damaged list of ids.
    torch.save(torch.tensor([7, 2, 11, 3, 7]), tmp_path / "twice.pt")
    with raises(VocabularyError, path=str(tmp_path / "twice.pt"), repeated=7):
        import_token_map(tmp_path / "twice.pt", 12)


def test_ids_as_text_and_under_a_name(tmp_path: Path) -> None:
    for name, text in (("a.txt", "7 2\n11,3\n"), ("a.csv", "7\n2\n11\n3"), ("a.json", '{"token_ids": [7, 2, 11, 3]}')):
        # With the mark that editors of Windows put first, too.
        for encoding in ("utf-8", "utf-8-sig"):
            (tmp_path / name).write_text(text, encoding=encoding)
            found = import_token_map(tmp_path / name, 12)
            assert (found.target_ids.tolist(), found.ranked) == ([7, 2, 11, 3], True)
    for name, text in (("b.txt", "7 2 the"), ("b.txt", "7 -1"), ("b.txt", ""), ("b.json", '{"token_ids": [1.5]}')):
        (tmp_path / name).write_text(text)
        with pytest.raises(VocabularyError):
            import_token_map(tmp_path / name, 12)


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
    with raises(UsageError, usable=found.size) as caught:
        rank_by_order(found, found.size + 1, forced=[], target_vocab=12)
    assert "FR-Spec's script" in str(caught.value)
    assert f"at most {found.size}" in str(caught.value)
    torch.save([*ranked, 7, 10], tmp_path / "other.pt")
    assert import_token_map(tmp_path / "other.pt", 12).size == 5
    torch.save([*ranked, 9, bos, eos], tmp_path / "damaged.pt")
    with raises(VocabularyError, repeated=9):
        import_token_map(tmp_path / "damaged.pt", 12)


def test_an_artifact_keeps_its_rank_order(tmp_path: Path) -> None:
    manifest = {"rank_order_ids": [7, 2, 11], "num_forced": 1, "target_vocab": 12, "vocabulary": {"method": "counts"}}
    (tmp_path / "eagle_slim.json").write_text(json.dumps(manifest))
    found = import_token_map(tmp_path)
    assert (found.target_ids.tolist(), found.num_forced, found.target_vocab) == ([7, 2, 11], 1, 12)
    assert found.ranked
    with raises(VocabularyError, expected=12, found=13):
        import_token_map(tmp_path, 13)
    (tmp_path / "eagle_slim.json").write_text(json.dumps({**manifest, "rank_order_ids": None}))
    with raises(VocabularyError, path=str(tmp_path / "eagle_slim.json"), field="rank_order_ids"):
        import_token_map(tmp_path)


def test_a_head_with_a_map_is_read_in_place(tmp_path: Path) -> None:
    save_file(
        {"d2t": np.array([2, 2, 5, 8], np.int32), "lm_head.weight": np.zeros((4, 2), np.float32)},
        tmp_path / "model.safetensors",
    )
    assert import_token_map(tmp_path, 12).target_ids.tolist() == [2, 3, 7, 11]
    assert import_token_map(tmp_path).target_vocab == 12


def test_target_vocab_comes_from_the_mask_or_the_largest_id(tmp_path: Path) -> None:
    export_token_map(make(), tmp_path / "m.safetensors")
    assert import_token_map(tmp_path / "m.safetensors").target_vocab == 12
    export_token_map(make(), tmp_path / "freq.pt")
    guessed = import_token_map(tmp_path / "freq.pt")
    assert guessed.target_vocab == 12
    assert guessed.provenance["target_vocab_from"] == "largest id"
    export_token_map(make(), tmp_path / "v.json")
    with raises(VocabularyError, path=str(tmp_path / "v.json"), expected=12, found=13):
        import_token_map(tmp_path / "v.json", 13)


def test_a_bare_tensor_named_d2t_is_offsets_or_refused(tmp_path: Path) -> None:
    torch.save(torch.tensor([2, 2, 5, 8]), tmp_path / "d2t.pt")
    assert import_token_map(tmp_path / "d2t.pt", 12).target_ids.tolist() == [2, 3, 7, 11]
    torch.save(torch.tensor([2, 3, 7, 11]), tmp_path / "d2t.pt")
    with pytest.raises(VocabularyError, match="--d2t-form"):
        import_token_map(tmp_path / "d2t.pt", 12)
    assert import_token_map(tmp_path / "d2t.pt", 12, "absolute").target_ids.tolist() == [2, 3, 7, 11]
    with raises(VocabularyError, form="unknown"):
        import_token_map(tmp_path / "d2t.pt")
    torch.save([2, 2, 5, 8], tmp_path / "list.pt")
    with raises(VocabularyError, repeated=2):
        import_token_map(tmp_path / "list.pt", 12)


class _Evil:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


@pytest.mark.parametrize("wrap", [lambda evil: evil, lambda evil: [1, 2, evil], lambda evil: {"d2t": evil}])
def test_a_malicious_pickle_is_refused_and_never_run(tmp_path: Path, wrap) -> None:
    marker = tmp_path / "ran"
    torch.save(wrap(_Evil(marker)), tmp_path / "evil.pt")
    with raises(VocabularyError, path=str(tmp_path / "evil.pt"), refused="pickle"):
        import_token_map(tmp_path / "evil.pt", 12)
    assert not marker.exists()


def test_numpy_objects_are_refused(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    np.save(tmp_path / "d2t.npy", np.array([_Evil(marker)], dtype=object), allow_pickle=True)
    with raises(VocabularyError, path=str(tmp_path / "d2t.npy")):
        import_token_map(tmp_path / "d2t.npy", 12)
    assert not marker.exists()


@pytest.mark.parametrize(
    ("name", "content", "facts"),
    [
        ("a.json", [1, 12], {"id": 12, "target_vocab": 12}),
        ("a.json", [1.5], {"expected": "integers"}),
        ("a.json", [True], {"expected": "integers"}),
        ("a.json", [[1]], {"expected": "integers"}),
        ("a.json", [], {"found": 0}),
        ("a.json", {"ids": [1]}, {"keys": ["ids"]}),
        ("a.json", {"d2t": [2, 2], "t2d": [1, 1]}, {"tensor": "t2d", "found": [2]}),
        ("a.json", "text", {"expected": "integers"}),
        ("a.pt", torch.tensor([1.0]), {"expected": "integers"}),
        ("a.pt", torch.tensor([1.0], dtype=torch.bfloat16), {"expected": "integers"}),
        ("a.pt", torch.tensor([[1]]), {"expected": "integers"}),
        ("a.pt", {"state": 1}, {"keys": ["state"]}),
        ("a.dat", b"1\n2\n", {"format": None}),
        ("a.pt", b"not a pickle", {}),
        ("a.pt", b"", {}),
        ("a.safetensors", b"\x00" * 20, {}),
        ("t2d.npy", b"", {}),
        ("d2t.npy", b"", {}),
    ],
)
def test_bad_files(tmp_path: Path, name: str, content: object, facts: dict[str, object]) -> None:
    path = tmp_path / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif name.endswith(".pt"):
        torch.save(content, path)
    else:
        path.write_text(json.dumps(content))
    with raises(VocabularyError, **facts) as caught:
        import_token_map(path, 12)
    assert name in str(caught.value)


def test_missing_files_and_folders(tmp_path: Path) -> None:
    with raises(VocabularyError, missing=str(tmp_path / "none.pt")):
        import_token_map(tmp_path / "none.pt")
    with raises(VocabularyError, path=str(tmp_path), missing="d2t.npy"):
        import_token_map(tmp_path)
    save_file({"weight": np.zeros(2)}, tmp_path / "x.safetensors")
    with raises(VocabularyError, found="neither d2t nor t2d"):
        import_token_map(tmp_path / "x.safetensors")


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_damaged_torch_files_give_our_error_or_valid_ids(tmp_path_factory: pytest.TempPathFactory, data) -> None:
    buffer = io.BytesIO()
    torch.save([3, 1, 2], buffer)
    raw = bytearray(buffer.getvalue())
    for place in data.draw(st.lists(st.integers(0, len(raw) - 1), min_size=1, max_size=6)):
        raw[place] ^= data.draw(st.integers(1, 255))
    cut = data.draw(st.integers(0, len(raw)))
    path = tmp_path_factory.mktemp("fuzz") / "freq.pt"
    path.write_bytes(raw[:cut] if data.draw(st.booleans()) else raw)
    try:
        found = import_token_map(path, 12)
    except VocabularyError:
        return
    assert len(set(found.target_ids.tolist())) == found.size


def test_export_refusals(tmp_path: Path) -> None:
    with raises(UsageError, path=tmp_path / "a.json", format="freq"):
        export_token_map(make(), tmp_path / "a.json", "freq")
    with raises(UsageError, path=tmp_path / "a.dat", format=None):
        export_token_map(make(), tmp_path / "a.dat")
    unranked = DraftVocab(np.array([2, 3]), 0, 12, ranked=False)
    with raises(UsageError, format="freq", ranked=False):
        export_token_map(unranked, tmp_path / "freq.pt")
    export_token_map(unranked, tmp_path / "ok.safetensors")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["ok.safetensors"]
