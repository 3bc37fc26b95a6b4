"""Reading weights: bit-identical tensors and rows from every format; refusals of all that is damaged or unsafe."""

import json
import os
import struct
from contextlib import suppress

import numpy as np
import pytest
import torch
from eagle_slim.convert import CheckpointError, open_checkpoint
from eagle_slim.convert.rows import checkpoint as checkpoint_module
from eagle_slim.convert.rows.files import choose_weights
from eagle_slim.convert.targets.matrix import find_lm_head, open_local_lm_head, ties_embedding
from safetensors.torch import save_file
from support.heads import write_tensors
from support.raising import raises_with
from support.tampering import Attack

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.int64, torch.int8, torch.bool]


def random_bits(shape, dtype, seed=0):
    """Every bit pattern, NaN and infinity among them."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    count = int(np.prod(shape)) * dtype.itemsize
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator).view(dtype).reshape(shape)


def same_bits(one, other):
    return one.dtype == other.dtype and one.shape == other.shape and raw(one) == raw(other)


def raw(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def write_index(folder, weight_map):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_every_dtype_is_read_bit_for_bit(tmp_path, dtype, suffix):
    shapes = {"matrix": (37, 5), "cube": (4, 3, 2), "vector": (9,), "empty": (0, 4)}
    tensors = {name: random_bits(shape, dtype, seed) for seed, (name, shape) in enumerate(shapes.items())}
    tensors["scalar"] = random_bits((1,), dtype, 4)[0]
    write_tensors(tmp_path, tensors, suffix)
    checkpoint = open_checkpoint(tmp_path)
    assert set(checkpoint.names) == set(tensors)
    for name, expected in tensors.items():
        assert checkpoint.info(name).shape == tuple(expected.shape)
        assert same_bits(checkpoint.tensor(name), expected)
    for name, ids in [("matrix", [36, 0, 1, 2, 2, 35]), ("cube", [3, 1]), ("vector", [8, 0]), ("matrix", [])]:
        wanted = tensors[name].view(torch.uint8) if dtype.itemsize == 1 else tensors[name]
        expected = wanted[torch.tensor(ids, dtype=torch.int64)].view(dtype)
        assert same_bits(checkpoint.rows(name, ids), expected), (name, ids)


@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (333, 3), (64, 2, 5), (3, 0)])
@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_pieces_are_the_tensor(tmp_path, monkeypatch, shape, suffix):
    monkeypatch.setattr(checkpoint_module, "PIECE_BYTES", 100)
    tensor = random_bits(shape, torch.bfloat16) if shape else random_bits((1,), torch.bfloat16)[0]
    write_tensors(tmp_path, {"before": torch.zeros(3, dtype=torch.int8), "t": tensor}, suffix)
    checkpoint = open_checkpoint(tmp_path)
    assert b"".join(piece.tobytes() for piece in checkpoint.pieces("t")) == raw(tensor)
    ids = np.random.default_rng(0).integers(0, max(shape[:1], default=0) or 1, 200 if shape and shape[0] else 0)
    expected = raw(tensor[torch.from_numpy(ids)]) if shape else b""
    assert b"".join(piece.tobytes() for piece in checkpoint.pieces("t", ids)) == expected


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_views_and_shared_storages_in_a_bin_of_any_pickle_protocol(tmp_path, protocol):
    """Names that are also names of classes, too, and more tensors than one byte counts."""
    base = torch.arange(24.0).reshape(6, 4)
    tensors = {"torch": base, "OrderedDict": base.t(), "ü": base[2:4].bfloat16()}
    tensors |= {"shared": base, "slice": base[2:4], "wide": base[0].expand(3, 4)}
    tensors["p"] = torch.nn.Parameter(torch.ones(2))
    tensors |= {f"t{number}": torch.full((2,), float(number)) for number in range(300)}
    torch.save(tensors, tmp_path / "pytorch_model.bin", pickle_protocol=protocol)
    checkpoint = open_checkpoint(tmp_path)
    assert {*checkpoint.names} == {*tensors}
    for name, expected in tensors.items():
        assert torch.equal(checkpoint.tensor(name), expected), name
        assert torch.equal(checkpoint.rows(name, [1, 0]), expected[[1, 0]]), name
    assert checkpoint.tensor("OrderedDict").is_contiguous()
    checkpoint.tensor("torch").zero_()
    assert torch.equal(checkpoint.tensor("shared"), base)


def test_flipped_bits_of_a_bin_are_found_by_its_checksums(tmp_path):
    path, tensor = tmp_path / "pytorch_model.bin", torch.arange(1000.0)
    torch.save({"a": tensor}, path)
    content, wrong = path.read_bytes(), []
    for place in np.random.default_rng(0).integers(0, len(content), 100):
        path.write_bytes(content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :])
        with suppress(CheckpointError):
            wrong += [place] if not torch.equal(open_checkpoint(tmp_path).tensor("a"), tensor) else []
    assert wrong == []
    within = content.index(tensor.numpy().tobytes()) + 2000
    path.write_bytes(content[:within] + bytes([content[within] ^ 4]) + content[within + 1 :])
    with raises_with(CheckpointError, "data/0", "checksum"):
        open_checkpoint(tmp_path)


def test_a_bin_without_checksums_and_as_torch_wrote_it_before_1_6(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"a": torch.arange(3.0)}, tmp_path / "pytorch_model.bin")
    finally:
        torch.serialization.set_crc32_options(True)
    assert open_checkpoint(tmp_path).tensor("a").tolist() == [0, 1, 2]
    tensors = {"a": torch.randn(5, 3), "b": torch.ones(2, dtype=torch.bfloat16)}
    torch.save(tensors, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    checkpoint = open_checkpoint(tmp_path)
    assert torch.equal(checkpoint.rows("a", [4, 0]), tensors["a"][[4, 0]])
    assert torch.equal(checkpoint.tensor("b"), tensors["b"])


def test_sharded_and_only_the_needed_shards(tmp_path):
    one, two = {"a": torch.ones(2), "b": torch.zeros(3)}, {"lm_head.weight": torch.randn(4, 2)}
    shards = {"model-00001-of-00002.safetensors": one, "model-00002-of-00002.safetensors": two}
    for name, tensors in shards.items():
        save_file(tensors, tmp_path / name)
    write_index(tmp_path, {tensor: name for name, tensors in shards.items() for tensor in tensors})
    checkpoint = open_checkpoint(tmp_path)
    assert set(checkpoint.names) == {"a", "b", "lm_head.weight"}
    assert torch.equal(checkpoint.tensor("a"), one["a"])
    assert torch.equal(checkpoint.rows("lm_head.weight", [3]), two["lm_head.weight"][[3]])
    (tmp_path / "model-00001-of-00002.safetensors").unlink()
    with raises_with(CheckpointError, "not there"):
        open_checkpoint(tmp_path)
    head = open_local_lm_head(tmp_path, "target")
    assert (head.name, head.info.shape) == ("lm_head.weight", (4, 2))
    assert [file.path.name for file in head.checkpoint.files] == ["model-00002-of-00002.safetensors"]
    assert torch.equal(head.checkpoint.tensor(head.name), two["lm_head.weight"])
    save_file(two, tmp_path / "model.safetensors")
    with raises_with(CheckpointError, "two models"):
        open_checkpoint(tmp_path)
    # mlx_lm writes an index of one file, too.
    write_index(tmp_path, dict.fromkeys(two, "model.safetensors"))
    assert torch.equal(open_checkpoint(tmp_path).tensor("lm_head.weight"), two["lm_head.weight"])


def test_choice_of_weights():
    for names, chosen in (
        (["model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"], "model.safetensors"),
        (["pytorch_model.bin", "model.safetensors.index.json"], "model.safetensors.index.json"),
        (["training_args.bin", "eagle3.safetensors", "consolidated.safetensors"], "eagle3.safetensors"),
        (["pytorch_model.bin.index.json", "rng.pt"], "pytorch_model.bin.index.json"),
    ):
        assert choose_weights(names, "here") == chosen
    for none in ([], ["config.json"], ["a.safetensors", "b.safetensors"], ["model-00001-of-00002.safetensors"]):
        with raises_with(CheckpointError, *none or ["no weights"]) as caught:
            choose_weights(none, "here")
        assert (".index.json too" in str(caught.value)) == any("-of-" in name for name in none)
    for none in (["best-of-n/"], ["sub/model-00001-of-00002.safetensors"], ["best-of-n.md"]):
        with raises_with(CheckpointError, *none, "--subfolder"):
            choose_weights(none, "here")


def test_lm_head_names():
    assert find_lm_head(["model.embed_tokens.weight", "lm_head.weight"], "t") == "lm_head.weight"
    assert find_lm_head(["model.embed_tokens.weight", "model.norm.weight"], "t") == "model.embed_tokens.weight"
    name = "language_model.model.embed_tokens.weight"
    assert find_lm_head(["vision.embed_tokens.weight", name], "t") == name
    with raises_with(CheckpointError, "my_head.weight"):
        find_lm_head(["my_head.weight"], "t")
    with raises_with(CheckpointError, "tie_word_embeddings"):
        find_lm_head(["model.embed_tokens.weight"], "t", tied=False)
    assert find_lm_head(["lm_head.weight", "talker.code_predictor.lm_head.0.weight"], "t") == "lm_head.weight"
    for other in ("lm_head.qweight", "language_model.lm_head.bias"):
        with raises_with(CheckpointError, other):
            find_lm_head(["lm_head.weight", "model.embed_tokens.weight", other], "t")
        assert find_lm_head(["model.embed_tokens.weight", other], "t", tied=True) == "model.embed_tokens.weight"


def test_whether_a_target_ties_its_lm_head(tmp_path):
    assert ties_embedding(tmp_path) is None
    for config, tied in (
        ("{}", None),
        ('{"tie_word_embeddings": true}', True),
        ('{"tie_word_embeddings": false}', False),
        ('{"tie_word_embeddings": null, "text_config": {"tie_word_embeddings": true}}', True),
        ('{"tie_word_embeddings": false, "text_config": {"tie_word_embeddings": true}}', None),
        ("[1]", None),
        ("{", None),
    ):
        (tmp_path / "config.json").write_text(config)
        assert ties_embedding(tmp_path) is tied


def test_a_tied_lm_head_is_the_embedding_even_beside_another(tmp_path):
    names = ["lm_head.weight", "model.embed_tokens.weight"]
    assert find_lm_head(names[:1], "t", tied=True) == "lm_head.weight"
    embedding, other = torch.randn(5, 2), torch.randn(5, 2)
    save_file({"model.embed_tokens.weight": embedding, "lm_head.weight": other}, tmp_path / "model.safetensors")
    for tied, name, expected in (("true", names[1], embedding), ("false", names[0], other)):
        (tmp_path / "config.json").write_text(f'{{"tie_word_embeddings": {tied}}}')
        head = open_local_lm_head(tmp_path, "target")
        assert head.name == name
        assert torch.equal(head.checkpoint.tensor(head.name), expected)


def test_lm_head_of_integers_is_refused(tmp_path):
    save_file({"lm_head.weight": torch.ones(4, 2, dtype=torch.int8)}, tmp_path / "model.safetensors")
    with raises_with(CheckpointError, "lm_head.weight", "I8"):
        open_local_lm_head(tmp_path, "target")


def test_damaged_files_are_refused_by_their_names(tmp_path):
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    truncated, huge = ({"a": entry | {"shape": shape}} for shape in ([2], [1 << 62, 1 << 62]))
    packed = [
        struct.pack("<Q", len(json.dumps(header))) + json.dumps(header).encode() + bytes(size)
        for header, size in ((truncated, 7), (huge, 8))
    ]
    torch.save({"a": torch.randn(100)}, tmp_path / "pytorch_model.bin")
    whole = (tmp_path / "pytorch_model.bin").read_bytes()
    cut = [whole[:size] for size in (0, 1, 10, len(whole) // 2, len(whole) - 1)]
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n"
    # The .bin first: beside it the safetensors would be taken.
    for name, contents in (
        ("pytorch_model.bin", [*cut, b"\x81" + whole[1:]]),
        ("model.safetensors", [b"", b"<!DOCTYPE html><html>" + b" " * 100, *packed]),
    ):
        for content in (*contents, pointer):
            (tmp_path / name).write_bytes(content)
            with raises_with(CheckpointError, str(tmp_path / name), *["Git LFS pointer"] * (content == pointer)):
                open_checkpoint(tmp_path)


def test_wrong_rows_and_names(tmp_path):
    save_file({"a": torch.ones(3, 2), "scalar": torch.tensor(1.0)}, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    for ids, word in ([3], "row 3 was asked for, of 3"), ([-1], "row -1"):
        with raises_with(CheckpointError, "a", word):
            checkpoint.rows("a", ids)
    with raises_with(CheckpointError, "b"):
        checkpoint.tensor("b")


def test_not_a_file_or_folder(tmp_path):
    with raises_with(CheckpointError, str(tmp_path / "nothing")):
        open_checkpoint(tmp_path / "nothing")
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(CheckpointError):
        open_checkpoint(tmp_path)
    os.mkfifo(tmp_path / "pytorch_model.bin")
    with raises_with(CheckpointError, str(tmp_path / "pytorch_model.bin")):
        open_checkpoint(tmp_path)


def test_shard_names_that_lead_elsewhere(tmp_path):
    outside = ("../evil.safetensors", "/etc/passwd", "/tmp/x.safetensors", "a/../../x.safetensors", "a\\b.safetensors")
    for shard in (*outside, "", ".", "x\0.safetensors", "config.json", 7, None, ["x.safetensors"]):
        save_file({"a": torch.ones(1)}, tmp_path.parent / "evil.safetensors")
        write_index(tmp_path, {"a": shard})
        with raises_with(CheckpointError, repr(shard)):
            open_checkpoint(tmp_path)


def test_indexes_that_are_none_or_disagree_with_their_shards(tmp_path):
    save_file({"a": torch.ones(1)}, tmp_path / "x.safetensors")
    one_too_many = '{"weight_map": {"a": "x.safetensors", "b": "x.safetensors"}}'
    for text in ("", "[]", "{}", '{"weight_map": {}}', '{"weight_map": []}', '{"weight_map": {"a":', one_too_many):
        (tmp_path / "model.safetensors.index.json").write_text(text)
        with raises_with(CheckpointError, "x.safetensors" if "x.s" in text else "model.safetensors.index.json"):
            open_checkpoint(tmp_path)


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_malicious_pickle_is_refused_and_not_run(tmp_path, protocol):
    proof, path = tmp_path / "was-run", tmp_path / "pytorch_model.bin"
    torch.save({"a": torch.ones(1), "b": Attack(proof)}, path, pickle_protocol=protocol)
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin: refused.*would call .*system") as caught:
        open_checkpoint(tmp_path)
    assert "safetensors" in str(caught.value)
    assert not proof.exists()


def test_pickles_of_other_things(tmp_path):
    for value, words in (
        ([torch.ones(1)], ["list"]),
        ({}, ["dict"]),
        ({"step": 3, "a": torch.ones(1)}, ["step", "int"]),
        ({"state_dict": {"a": torch.ones(1)}}, ["state_dict", "dict"]),
        ({3: torch.ones(1)}, ["3", "Tensor"]),
        ({"a": torch.ones(3).to_sparse()}, ["a"]),
        ({"a": torch.ones(3, dtype=torch.complex128)}, ["a", "complex128"]),
    ):
        torch.save(value, tmp_path / "pytorch_model.bin")
        with raises_with(CheckpointError, *words):
            open_checkpoint(tmp_path)
