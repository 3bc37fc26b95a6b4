"""TokenCounts: mixing, merging, and the file."""

import contextlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from eagle_slim.vocab_tools.counts import HeldOut, SourceCounts, TokenCounts, merge_counts
from eagle_slim.vocab_tools.errors import TokenizerError, UsageError, VocabularyError
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from safetensors.torch import save_file as save_torch_file
from support.token_counts import source, token_counts


def test_one_source_is_weighted_exactly() -> None:
    big = 2**53 + 1
    counts = token_counts([big, 3, 0])
    assert counts.weighted().tolist() == [float(big), 3.0, 0.0]


def test_weights_are_shares_whatever_the_size() -> None:
    counts = TokenCounts((source([8, 0, 0], name="chat", weight=3), source([0, 1, 1], name="code")), None)
    # 10 tokens in all; chat gets 3/4 of them, code 1/4, spread over two ids.
    assert counts.weighted().tolist() == [7.5, 1.25, 1.25]
    assert counts.weighted({"code": 3}).tolist() == [5.0, 2.5, 2.5]
    assert counts.weighted({"chat": 0}).tolist() == [0.0, 1.0, 1.0]


def test_generated_ids_are_added_as_a_source_of_their_own() -> None:
    corpus = TokenCounts((source([50, 40, 0, 1], name="chat"),), "h")
    once = corpus.add([3, 3, 0]).add(iter([2]))
    assert [(each.name, each.counts.tolist()) for each in once.sources] == [
        ("chat", [50, 40, 0, 1]), ("generated", [1, 0, 1, 2]),
    ]  # fmt: skip
    assert once.tokenizer_hash == "h"
    assert corpus.add([1], "code").sources[1].name == "code"
    for wrong in ([4], [-1]):
        with pytest.raises(VocabularyError, match="expected 0 to 3"):
            corpus.add(wrong)
    with pytest.raises(VocabularyError, match="the same text would be counted twice"):
        corpus.add([3]).add([3])


def test_a_source_without_tokens_takes_no_share() -> None:
    counts = TokenCounts((source([1, 3], name="a"), source([0, 0], name="b", weight=9)), None)
    assert counts.weighted().tolist() == [1.0, 3.0]


def test_weights_that_fit_nothing_are_refused() -> None:
    counts = TokenCounts((source([1], name="a"), source([1], name="b")), None)
    with pytest.raises(UsageError, match="no source named 'c' in these counts; they have: a, b"):
        counts.weighted({"c": 1})
    with pytest.raises(UsageError, match="a: expected a weight above 0, found -1"):
        counts.weighted({"a": -1})
    with pytest.raises(UsageError, match="Every source has weight 0"):
        counts.weighted({"a": 0, "b": 0})


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: source([1, -2]), "the count of id 1 is -2"),
        (lambda: source([1], weight=0), "weight above 0, found 0"),
        (lambda: source([1], weight=float("inf")), "weight above 0, found inf"),
        (lambda: source([1, 1], [[2]]), "held-out ids: expected 0 to 1"),
        (lambda: SourceCounts("a", 1.0, np.zeros(2, np.int32), None, {}), "counts: expected int64"),
        (lambda: TokenCounts((), None), "at least one source"),
        (lambda: TokenCounts((source([1]), source([1])), None), "more than once: text"),
        (lambda: TokenCounts((source([1], name="a"), source([1, 2], name="b")), None), "one vocabulary size"),
        (lambda: HeldOut(np.zeros(2, np.int32), np.array([0, 3], np.int64)), "expected to rise from 0 to 2"),
        (lambda: HeldOut(np.zeros(2, np.int32), np.array([0, 2, 1, 2], np.int64)), "expected to rise from 0 to 2"),
    ],
)
def test_bad_counts_are_refused(make: Callable[[], object], words: str) -> None:
    with pytest.raises(VocabularyError, match=words):
        make()


def test_merge_keeps_sources_apart_and_adds_up_parts() -> None:
    first = TokenCounts((source([1, 2], [[0, 1]], name="chat"), source([5, 0], name="code")), "h")
    second = SourceCounts("chat", 1.0, np.array([10, 0]), source([0, 0], [[1], [0, 0]]).held_out, {"made": "elsewhere"})
    merged = merge_counts([first, TokenCounts((second,), "h")], {"code": 2.5})
    chat, code = merged.sources
    assert (chat.name, chat.counts.tolist(), code.counts.tolist(), code.weight) == ("chat", [11, 2], [5, 0], 2.5)
    assert chat.held_out is not None
    # Sorted, so that the order of the parts does not show.
    assert [document.tolist() for document in chat.held_out.documents] == [[0, 0], [0, 1], [1]]
    assert chat.provenance == {"parts": [{"made": "by hand"}, {"made": "elsewhere"}]}
    assert merged.tokenizer_hash == "h"


def test_one_text_counted_with_other_settings_is_still_one_text() -> None:
    def of(**changes: object) -> TokenCounts:
        told = {"files": [{"name": "a", "bytes": 9}], "column": "text", "text": "all", "seed": 0, "digest": "0f"}
        return TokenCounts((replace(source([1, 2]), provenance={**told, **changes}),), "h")

    for other in (of(column="answer"), of(digest="f0", max_tokens=5)):
        assert merge_counts([of(), other]).sources[0].counts.tolist() == [2, 4]
    assert merge_counts([of(sample=0.1), of(sample=0.1, seed=1)]).sources[0].counts.tolist() == [2, 4]
    for again in (of(seed=1), of(held_out={"share": 0.0})):
        with pytest.raises(VocabularyError, match="the same text would be counted twice"):
            merge_counts([of(), again])


def test_counts_of_before_are_listed_as_parts() -> None:
    def of(name: str) -> TokenCounts:
        told = {"files": [{"name": name, "bytes": 9, "sha256": name}], "column": "text", "held_out": {"fraction": 0.05}}
        return TokenCounts((replace(source([1, 2]), provenance=told),), "h")

    merged = merge_counts([of("b"), of("a")]).sources[0]
    assert [part["files"][0]["name"] for part in merged.provenance["parts"]] == ["a", "b"]
    assert merge_counts([of("a"), of("b")]).to_bytes() == merge_counts([of("b"), of("a")]).to_bytes()


def test_a_weight_of_0_leaves_a_source_out_as_in_a_ranking() -> None:
    both = TokenCounts((source([8, 0], name="chat"), source([0, 1], name="code")), None)
    merged = merge_counts([both], {"chat": 0})
    assert [each.name for each in merged.sources] == ["code"]
    assert (merged.weighted() > 0).tolist() == (both.weighted({"chat": 0}) > 0).tolist() == [False, True]
    for weights in ({"chat": 0, "code": 0}, {"chat": -1}):
        with pytest.raises(UsageError, match="above 0"):
            merge_counts([both], weights)


def test_merging_what_does_not_belong_together_is_refused() -> None:
    one = token_counts([1, 2], tokenizer_hash="a")
    with pytest.raises(TokenizerError, match="different tokenizers cannot be merged; found a, b"):
        merge_counts([one, token_counts([1, 2], tokenizer_hash="b")])
    with pytest.raises(VocabularyError, match=r"different vocabulary sizes.*\[2, 3\]"):
        merge_counts([one, token_counts([1, 2, 3], tokenizer_hash="a")])
    with pytest.raises(VocabularyError, match="the same text would be counted twice"):
        merge_counts([one, one])
    with pytest.raises(VocabularyError, match="the same text would be counted twice"):
        merge_counts([merge_counts([one, TokenCounts((_part("x"),), "a")]), TokenCounts((_part("x"),), "a")])
    with pytest.raises(UsageError, match="no source named 'y'"):
        merge_counts([one], {"y": 1})
    with pytest.raises(UsageError, match=r"'text' has the weights \[1\.0, 2\.0\]"):
        merge_counts([one, TokenCounts((_part("x", weight=2.0),), "a")])
    with pytest.raises(UsageError, match="Nothing to merge"):
        merge_counts([])


def _part(made: str, weight: float = 1.0) -> SourceCounts:
    return SourceCounts("text", weight, np.array([1, 1]), None, {"made": made})


_names = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=8)


@st.composite
def _token_counts(draw: st.DrawFn) -> TokenCounts:
    vocab = draw(st.integers(1, 6))
    sources = []
    for name in draw(st.lists(_names, min_size=1, max_size=3, unique=True)):
        counts = draw(st.lists(st.integers(0, 2**62), min_size=vocab, max_size=vocab))
        documents = draw(st.none() | st.lists(st.lists(st.integers(0, vocab - 1), max_size=4), max_size=4))
        sources.append(source(counts, documents, name, draw(st.floats(1e-3, 1e3))))
    return TokenCounts(tuple(sources), draw(st.none() | _names))


def _same(a: TokenCounts, b: TokenCounts) -> bool:
    return a.to_bytes() == b.to_bytes()


@given(_token_counts())
@settings(max_examples=40, deadline=None)
def test_save_and_load_are_inverse_and_bytes_repeat(
    tmp_path_factory: pytest.TempPathFactory, counts: TokenCounts
) -> None:
    path = tmp_path_factory.mktemp("counts") / "counts.safetensors"
    counts.save(path)
    loaded = TokenCounts.load(path)
    assert _same(loaded, counts)
    for before, after in zip(counts.sources, loaded.sources, strict=True):
        assert (before.name, before.weight, before.provenance) == (after.name, after.weight, after.provenance)
        assert np.array_equal(before.counts, after.counts)


def test_files_that_are_no_counts_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    with pytest.raises(VocabularyError, match="no such counts file"):
        TokenCounts.load(path)
    path.write_bytes(b"not safetensors at all")
    with pytest.raises(VocabularyError, match=r"not a readable safetensors file.*`eagle-vocab count`"):
        TokenCounts.load(path)
    for tensor in (torch.zeros(3), torch.zeros(3, dtype=torch.bfloat16)):
        save_torch_file({"a": tensor}, path)
        with pytest.raises(VocabularyError, match="but not token counts"):
            TokenCounts.load(path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensors, header: header.update(version=3), "format version 3"),
        (lambda tensors, header: header.update(tokenizer_hash="another"), "another checksum"),
        (lambda tensors, header: tensors.update({"counts.0": np.array([4, 7])}), "another checksum"),
        (lambda tensors, header: header.pop("sources"), "damaged"),
        (lambda tensors, header: tensors.pop("counts.0"), "damaged"),
        (lambda tensors, header: header["sources"][0].update(provenance=["x"]), "provenance: expected"),
        (lambda tensors, header: header["sources"][0].update(weight="1"), "weight: expected"),
        (lambda tensors, header: header.update(tokenizer_hash=5), "tokenizer_hash: expected"),
        (lambda tensors, header: tensors.pop("held_out.0.token_ids"), "one is missing"),
        (lambda tensors, header: tensors.update(extra=np.zeros(1)), "belong to no source: extra"),
        (lambda tensors, header: tensors.update({"counts.0": np.array([-1, 0])}), "the count of id 0 is -1"),
        (
            lambda tensors, _: tensors.update({"held_out.0.doc_offsets": np.array([0, 9])}),
            "expected to rise from 0 to 2",
        ),
    ],
)
def test_tampered_files_are_refused(tmp_path: Path, change: Callable[[Any, Any], object], words: str) -> None:
    path = tmp_path / "counts.safetensors"
    token_counts([4, 5], [[0, 1]]).save(path)
    tensors = dict(load_file(path))
    header = json.loads(_metadata(path))
    change(tensors, header)
    save_file(tensors, path, {"eagle_slim.token_counts": json.dumps(header)})
    with pytest.raises(VocabularyError, match=f"{path}: .*{words}"):
        TokenCounts.load(path)


def test_a_flipped_bit_is_never_read_as_other_counts(tmp_path: Path) -> None:
    path = tmp_path / "counts.safetensors"
    counts = token_counts([4, 5], [[0, 1]], "hash")
    counts.save(path)
    data = path.read_bytes()
    for place in range(len(data)):
        damaged = bytearray(data)
        damaged[place] ^= 1 << place % 8
        path.write_bytes(bytes(damaged))
        with contextlib.suppress(VocabularyError):
            assert _same(TokenCounts.load(path), counts), place


def test_a_file_of_version_1_has_no_checksum(tmp_path: Path) -> None:
    path = tmp_path / "counts.safetensors"
    counts = token_counts([4, 5], [[0, 1]], "hash")
    counts.save(path)
    header = json.loads(_metadata(path))
    assert header.pop("checksum")
    save_file(dict(load_file(path)), path, {"eagle_slim.token_counts": json.dumps({**header, "version": 1})})
    assert _same(TokenCounts.load(path), counts)
    save_file(dict(load_file(path)), path, {"eagle_slim.token_counts": json.dumps(header)})
    with pytest.raises(VocabularyError, match="checksum"):
        TokenCounts.load(path)


def _metadata(path: Path) -> str:
    from safetensors import safe_open

    with safe_open(path, "numpy") as file:
        return file.metadata()["eagle_slim.token_counts"]
