import json

import numpy as np
import pytest
import torch
from eagle_slim.vocab_tools import d2t_from_ids, forced_ids, ids_from_d2t, rank_by_order, read_target, t2d_from_ids
from eagle_slim.vocab_tools.errors import SourceError, TokenizerError, UsageError, VocabularyError
from eagle_slim.vocab_tools.token_maps import LOADERS, export_token_map, import_token_map
from eagle_slim.vocab_tools.tokenizer import load_tokenizer
from eagle_slim.vocab_tools.vocabulary import DraftVocab
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from support.raising import raises
from support.small_tokenizers import byte_level_bpe, write_folder
from support.tampering import Attack

IDS = [1, 4, 5]
OFFSETS = [1, 3, 3]
MASK = [False, True, False, False, True, True]
NAMES = {"sglang": ["draft.pt"], "fr-spec": ["freq_{size}.pt"], "mtplx": ["draft.json"], "tensorfold": ["draft.txt"]}
NAMES |= {"vllm": ["draft.json", "draft.pt"], "vllm-mtp": ["draft.txt", "draft.npy"]}
NAMES |= {"head": ["map.safetensors"], "eagle-slim": ["vocab.json"]}
IN_RANK_ORDER = {"sglang", "fr-spec", "mtplx", "tensorfold", "eagle-slim"}


def test_the_worked_example():
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
def test_round_trip_in_any_row_order(given_map, dtype, mask_dtype):
    ids, target_vocab = given_map
    d2t = d2t_from_ids(ids).astype(dtype)
    t2d = t2d_from_ids(ids, target_vocab).astype(mask_dtype)
    found = ids_from_d2t(d2t, t2d, target_vocab=target_vocab)
    assert found.tolist() == ids
    assert found.dtype == np.int64
    assert np.array_equal(np.flatnonzero(t2d), np.sort(ids))
    assert ids_from_d2t(d2t, None, "offset", target_vocab=target_vocab).tolist() == ids


def test_broken_maps():
    broken = [(OFFSETS, mask, None) for mask in ([True] * 6, MASK[:5], [2, 1, 0, 0, 1, 1])]
    broken += [(OFFSETS, MASK, "absolute"), ([0, 0, 4], None, "absolute")]
    broken += [(values, None, None) for values in ([4, 5, 7], np.zeros(0, np.int64), [0.5, 1.5], [[1, 2]])]
    for d2t, t2d, form in broken:
        with pytest.raises(VocabularyError):
            ids_from_d2t(np.asarray(d2t), t2d, form, target_vocab=6)
    # Offsets of 0, 2 and 5 that are distinct ids, too.
    with pytest.raises(VocabularyError, match="t2d shows the offset form"):
        ids_from_d2t([0, 1, 3], [True, False, True, False, False, True], "absolute", target_vocab=6)


def make(ids=None, target_vocab=12):
    return DraftVocab(np.array([7, 2, 11, 3] if ids is None else ids), 0, target_vocab)


@settings(max_examples=15)
@given(st.sets(st.integers(0, 199), min_size=2), st.randoms(use_true_random=False))
@pytest.mark.parametrize("loader", LOADERS)
def test_round_trip(loader, tmp_path_factory, ids, random):
    order = sorted(ids)
    random.shuffle(order)
    for name in NAMES[loader]:
        path = tmp_path_factory.mktemp("map") / name.format(size=len(order))
        export_token_map(make(order, 200), path, loader)
        found = import_token_map(path, 200)
        assert found.target_vocab == 200
        assert found.ranked == (loader != "head")
        assert found.target_ids.tolist() == (order if loader in IN_RANK_ORDER else sorted(ids))


def fr_spec(path):
    """evaluation/inference_eagle.py of thunlp/FR-Spec 9d40eea, and what src/model/eagle.cuh copies."""
    with path.open("rb") as file:
        remap = torch.tensor(torch.load(file, weights_only=True), dtype=torch.int32, device="cpu")
    return remap[: int(path.stem.removeprefix("freq_"))].tolist()


def vllm(path):
    """load_draft_token_map and build_draft_token_ids, vllm/v1/spec_decode/draft_vocab.py at 2a0f48f; 7 ends a text."""
    found = json.loads(path.read_text()) if path.suffix == ".json" else torch.load(path, weights_only=True)
    assert isinstance(found, list)
    return torch.unique(torch.tensor([*found, 7]), sorted=True).tolist()


def vllm_mtp(path):
    """files/patch_mtp_draft_vocab.py of MiaAI-Lab's recipes at 5f3f5ec; src/patch_mtp_draft_vocab.py of Flash-DGX."""
    if path.suffix == ".npy":
        return np.load(path).astype(np.int64).tolist()
    return sorted({int(line) for line in path.read_text().splitlines() if line.strip()})


def mtplx(path):
    """load_frspec_ids, mtplx/frspec_draft.py at 49a1948, with MTPLX_FRSPEC_N=3."""
    ids = json.loads(path.read_text()).get("ids")[:3]
    assert len(set(ids)) == len(ids)
    return ids


def tensorfold(path):
    """read_ids of glm53-tensorfold-spark 5624dfc (patch 0420), by its tests; at 362618e draft_token_ids sorts."""
    ranked = [int(part) for line in path.read_text().splitlines() for part in line.partition("#")[0].split()]
    assert np.unique(np.loadtxt(path, dtype=np.int64).reshape(-1)).tolist() == sorted(ranked)
    return ranked


def sglang(path):
    """load_token_map of sglang/srt/speculative/spec_utils.py in 0.5.16 and 0.5.23, which tests/engines run."""
    return torch.tensor(torch.load(path, weights_only=True)).tolist()


RANKED, ASCENDING = [7, 2, 11, 3], [2, 3, 7, 11]
READERS = {"sglang": (sglang, RANKED), "fr-spec": (fr_spec, RANKED), "tensorfold": (tensorfold, RANKED)}
READERS |= {"vllm": (vllm, ASCENDING), "vllm-mtp": (vllm_mtp, ASCENDING), "mtplx": (mtplx, RANKED[:3])}


@pytest.mark.parametrize("loader", READERS)
def test_as_its_loader_reads_it(tmp_path, loader):
    read, expected = READERS[loader]
    for name in NAMES[loader]:
        path = tmp_path / name.format(size=4)
        export_token_map(make(), path, loader)
        assert read(path) == expected


@pytest.mark.parametrize("loader", LOADERS)
def test_a_list_that_is_not_right_is_told(tmp_path, loader):
    """One id too many, too few, twice, or out of order, in the file of each loader."""
    tokenizer = load_tokenizer(write_folder(tmp_path / "t", byte_level_bpe(300)))
    whole = [*forced_ids(tokenizer).ids.tolist(), 270]

    def warnings_of(ids, name):
        path = tmp_path / name.format(size=len(ids))
        export_token_map(DraftVocab(np.array(ids), 0, 310), path, loader)
        try:
            return " ".join(import_token_map(path, 310, tokenizer=tokenizer).warnings)
        finally:
            path.unlink()

    for name in NAMES[loader]:
        assert not warnings_of(whole, name)
        assert "no token" in warnings_of([*whole, 305], name)
        assert f"{whole[3]} (byte" in warnings_of([*whole[:3], *whole[4:]], name)
        if loader in IN_RANK_ORDER - {"eagle-slim"}:
            assert "ascend but for 1 places (id 270" in warnings_of([*whole[:9], 290, 270], name)


def test_what_a_ranking_mends_is_not_told_of_it(tmp_path):
    """An imported list lacks forced ids, which a ranking adds; where the tokenizer lies is nobody else's business."""
    tokenizer = load_tokenizer(write_folder(tmp_path / "t", byte_level_bpe(300)))
    (tmp_path / "list.json").write_text("[290, 270, 305]")
    read = import_token_map(tmp_path / "list.json", 310, tokenizer=tokenizer)
    ranked = rank_by_order(read, None, tokenizer, target_vocab=310)
    told = [" ".join(vocab.warnings) for vocab in (read, ranked)]
    assert ["a draft stops" in text for text in told] == [True, False]
    assert not any(str(tmp_path) in text for text in told)
    (tmp_path / "list.json").write_text("[290, 270]")
    assert import_token_map(tmp_path / "list.json", tokenizer=tokenizer).target_vocab == 300


def test_an_id_twice_is_told_and_counted_once(tmp_path):
    torch.save([7, 2, 7, 11, 3], tmp_path / "a.pt")
    (tmp_path / "a.json").write_text('{"ids": [7, 2, 7, 11, 3]}')
    (tmp_path / "a.txt").write_text("7\n2\n7\n11\n3\n")
    np.save(tmp_path / "a.npy", np.array([7, 2, 7, 11, 3]))
    for path in tmp_path.iterdir():
        found = import_token_map(path, 12)
        assert found.target_ids.tolist() == [7, 2, 11, 3]
        assert ["again id 7;" in warning for warning in found.warnings] == [True]
    torch.save([7, 2, 11], tmp_path / "freq_4.pt")
    assert ["4 ids and holds 3" in warning for warning in import_token_map(tmp_path / "freq_4.pt").warnings] == [True]


def test_an_own_vocabulary_of_another_tokenizer_is_refused(tmp_path):
    tokenizer = load_tokenizer(write_folder(tmp_path / "t", byte_level_bpe(300)))
    DraftVocab(np.array([7]), 0, 12, {"tokenizer_hash": "sha256:a"}).save(tmp_path / "v.json")
    with pytest.raises(TokenizerError, match="sha256:a"):
        import_token_map(tmp_path / "v.json", tokenizer=tokenizer)


def test_d2t_and_t2d_are_the_published_tensors(tmp_path):
    export_token_map(make(), tmp_path / "map.safetensors", "head")
    tensors = load_file(tmp_path / "map.safetensors")
    assert (tensors["d2t"].tolist(), tensors["d2t"].dtype) == ([2, 2, 5, 8], np.int64)
    assert (tensors["t2d"].tolist(), tensors["t2d"].dtype) == ([i in ASCENDING for i in range(12)], np.bool_)
    pair = {name: torch.from_numpy(tensor) for name, tensor in tensors.items()}
    torch.save(pair | {"lm_head.weight": torch.ones(4, 2, dtype=torch.bfloat16)}, tmp_path / "mapping.pt")
    assert import_token_map(tmp_path / "mapping.pt").target_ids.tolist() == [2, 3, 7, 11]
    torch.save(torch.tensor([2, 2, 5, 8]), tmp_path / "d2t.pt")
    (tmp_path / "d2t.json").write_text("[2, 2, 5, 8]")
    (tmp_path / "d2t.txt").write_text("2 2 5 8")
    for path in tmp_path.glob("d2t*"):
        assert import_token_map(path, 12).target_ids.tolist() == [2, 3, 7, 11], path


def test_the_form_of_d2t_is_said_where_the_file_does_not_show_it(tmp_path):
    torch.save(torch.tensor([2, 3, 7, 11]), tmp_path / "d2t.pt")
    for target_vocab in (12, None):
        with raises(VocabularyError, option="--d2t-form"):
            import_token_map(tmp_path / "d2t.pt", target_vocab)
    assert import_token_map(tmp_path / "d2t.pt", 12, "absolute").target_ids.tolist() == [2, 3, 7, 11]
    torch.save([2, 3, 7, 11], tmp_path / "list.pt")
    with raises(UsageError, option="--d2t-form"):
        import_token_map(tmp_path / "list.pt", 12, "absolute")


def test_ids_as_text_and_under_a_name(tmp_path):
    texts = {"a.txt": "# ranked\n7 2 11\n\n3,  # rare\n", "a.csv": "7\n2\n11\n3"}
    for name, text in (texts | {"a.json": '{"token_ids": [7, 2, 11, 3]}'}).items():
        # With the mark that editors of Windows put first, too.
        for encoding in ("utf-8", "utf-8-sig"):
            (tmp_path / name).write_text(text, encoding=encoding)
            found = import_token_map(tmp_path / name, 12)
            assert (found.target_ids.tolist(), found.ranked) == ([7, 2, 11, 3], True)


def test_fr_specs_script_repeats_ids_for_a_tokenizer_that_adds_a_bos(tmp_path):
    # For r = 5: the first r - 1 ids, then BOS 1 and EOS 2.
    torch.save([1, 9, 2, 7, 1, 2], tmp_path / "freq_5.pt")
    found = import_token_map(tmp_path / "freq_5.pt", 12)
    assert found.target_ids.tolist() == [1, 9, 2, 7]
    assert ["5 ids and holds 6" in found.warnings[0], "again id 1, 2;" in found.warnings[1]] == [True, True]
    assert rank_by_order(found, forced=[], target_vocab=12).warnings[:2] == found.warnings
    with pytest.raises(UsageError, match=r"only 4 .*again id 1, 2"):
        rank_by_order(found, 5, forced=[], target_vocab=12)


def test_an_artifact_keeps_its_rank_order(tmp_path):
    manifest = {"rank_order_ids": [7, 2, 11], "num_forced": 1, "target_vocab": 12, "vocabulary": {"method": "counts"}}
    (tmp_path / "eagle_slim.json").write_text(json.dumps(manifest))
    found = import_token_map(tmp_path)
    assert (found.target_ids.tolist(), found.num_forced, found.target_vocab) == ([7, 2, 11], 1, 12)
    assert found.ranked
    with pytest.raises(VocabularyError, match=r"12.*13000"):
        import_token_map(tmp_path, 13000)
    for change in ({"rank_order_ids": None}, {"vocabulary": ["text"]}):
        (tmp_path / "eagle_slim.json").write_text(json.dumps({**manifest, **change}))
        with pytest.raises(VocabularyError, match=next(iter(change))):
            import_token_map(tmp_path)


def test_a_head_with_a_map_is_read_in_place(tmp_path):
    tensors = {"d2t": np.array([2, 2, 5, 8], np.int32), "lm_head.weight": np.zeros((4, 2), np.float32)}
    save_file(tensors, tmp_path / "model.safetensors")
    assert import_token_map(tmp_path, 12).target_ids.tolist() == [2, 3, 7, 11]
    assert import_token_map(tmp_path).target_vocab == 12
    save_file({"weight": np.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(VocabularyError, match="neither d2t nor t2d"):
        import_token_map(tmp_path)
    maps = {"d2t": np.zeros(2, np.int64), "a.t2d": np.ones(2, np.bool_), "b.t2d": np.ones(2, np.bool_)}
    save_file(maps, tmp_path / "model.safetensors")
    with pytest.raises(VocabularyError, match=r"at most one t2d, found 'd2t', 'a\.t2d', 'b\.t2d'"):
        import_token_map(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(VocabularyError, match=r"without model.safetensors"):
        import_token_map(tmp_path)


def test_target_vocab_comes_from_the_mask_or_the_largest_id(tmp_path):
    export_token_map(make(), tmp_path / "m.safetensors", "head")
    assert import_token_map(tmp_path / "m.safetensors").target_vocab == 12
    export_token_map(make(), tmp_path / "freq.pt", "sglang")
    guessed = import_token_map(tmp_path / "freq.pt")
    assert guessed.target_vocab == 12
    assert guessed.provenance["target_vocab_from"] == "largest id"
    export_token_map(make(), tmp_path / "v.json", "eagle-slim")
    with pytest.raises(VocabularyError, match=r"v.json.*12.*13000"):
        import_token_map(tmp_path / "v.json", 13000)


@pytest.mark.parametrize("wrap", [lambda evil: evil, lambda evil: [1, 2, evil], lambda evil: {"d2t": evil}])
def test_a_malicious_pickle_is_refused_and_never_run(tmp_path, wrap):
    marker = tmp_path / "ran"
    torch.save(wrap(Attack(marker)), tmp_path / "evil.pt")
    with pytest.raises(VocabularyError, match=r"evil.pt: refused.* posix\.system when") as caught:
        import_token_map(tmp_path / "evil.pt", 12)
    assert "weights_only" not in str(caught.value)
    assert not marker.exists()


def test_bad_files(tmp_path):
    contents = {
        "a.json": (b"[1, 12]", b"[]", b'{"tokens": [1]}', b"[" + b"7" * 5000 + b"]"),
        "a.npy": (b"not an array", b"\x93NUMPY\x01\x00\x10\x00{'descr': '<i8',\n"),
        "a.txt": (b"-7 2", b"7 2 the", b"7" * 5000, b"1 7 9\n2 3 8\n"),
        "a.csv": (b",0\n0,7\n1,2\n",),
        "a.pt": (torch.tensor([1.0], dtype=torch.bfloat16), torch.tensor([[1]]), b"not a pickle"),
        "a.dat": (b"1\n2\n",),
        "a.safetensors": (b"\x00" * 20,),
    }
    for name, content in ((name, content) for name, found in contents.items() for content in found):
        if isinstance(content, bytes):
            (tmp_path / name).write_bytes(content)
        else:
            torch.save(content, tmp_path / name)
        with pytest.raises(VocabularyError, match=name):
            import_token_map(tmp_path / name, 12)
    for mask in (5, "abc", {}, [[1], [1, 0]], [None, 1, 1], [[1, 0, 1]]):
        (tmp_path / "a.json").write_text(json.dumps({"d2t": [0, 1, 1], "t2d": mask}))
        with pytest.raises(VocabularyError, match=r"a\.json: t2d"):
            import_token_map(tmp_path / "a.json")
    torch.save(torch.tensor([0, 0, 1, 1, 0, 1]), tmp_path / "t2d.pt")
    for name, words in (("none.pt", r"none\.pt"), ("t2d.pt", "mask")):
        with pytest.raises(VocabularyError, match=words):
            import_token_map(tmp_path / name, 12)


def test_export_refusals(tmp_path):
    unranked = DraftVocab(np.array([2, 3]), 0, 12, ranked=False)
    refused = [(make(), "a.json", "sglang"), (make(), "freq_5.pt", "fr-spec")]
    refused += [(unranked, "freq_2.pt", "fr-spec"), (unranked, "a.json", "mtplx"), (make(), "a.pt", "tensorrt")]
    for vocab, name, loader in refused:
        with raises(UsageError, option="--for"):
            export_token_map(vocab, tmp_path / name, loader)
    export_token_map(unranked, tmp_path / "ok.safetensors", "head")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["ok.safetensors"]


def test_what_a_target_says_of_its_lm_head(tmp_path):
    for config, generation, vocab_size, tied, eos_ids in (
        ({"vocab_size": 12, "tie_word_embeddings": True, "eos_token_id": 3}, None, 12, True, (3,)),
        ({"text_config": {"vocab_size": 12, "eos_token_id": 3}, "tie_word_embeddings": False}, {}, 12, False, (3,)),
        ({"tie_word_embeddings": False, "text_config": {"tie_word_embeddings": True}}, {}, None, None, ()),
        ({"eos_token_id": [5, 3]}, {"eos_token_id": 9}, None, None, (3, 5, 9)),
        ({"vocab_size": "12", "eos_token_id": [None, 3, "4"]}, None, None, None, (3,)),
    ):
        (tmp_path / "config.json").write_text(json.dumps(config))
        (tmp_path / "generation_config.json").unlink(missing_ok=True)
        if generation is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps(generation))
        found = read_target(str(tmp_path))
        assert (found.vocab_size, found.tied, found.eos_ids) == (vocab_size, tied, eos_ids)


def test_limits_of_a_loader_are_told_and_a_target_that_it_cannot_serve_is_refused(tmp_path):
    def target(**config):
        (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 9, **config}))
        return read_target(str(tmp_path))

    with raises(SourceError):
        read_target(str(tmp_path))
    with raises(UsageError, option="--target"):
        export_token_map(make(), tmp_path / "a.pt", "sglang", target(tie_word_embeddings=True))
    assert not (tmp_path / "a.pt").exists()
    for config, warned in (({"tie_word_embeddings": False}, False), ({}, True)):
        told = " ".join(export_token_map(make(), tmp_path / "a.pt", "sglang", target(**config)))
        assert ("tied to the embedding" in told) == warned
        assert "end a text" in told
        assert "--tp 1" in told
        assert "multiple of 64" in told
    assert any("--target" in line for line in export_token_map(make(), tmp_path / "a.pt", "sglang"))
    assert "vLLM adds them" in " ".join(export_token_map(make(), tmp_path / "v.json", "vllm", target()))
    assert export_token_map(make(), tmp_path / "own.json", "eagle-slim") == []
