import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from eagle_slim.vocab_tools.counts import HeldOut, SourceCounts, TokenCounts, merge_counts
from eagle_slim.vocab_tools.errors import TokenizerError, UsageError, VocabularyError
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from safetensors.torch import save as save_torch
from support.token_counts import source, token_counts


def test_weights_are_shares_whatever_the_size():
    counts = TokenCounts((source([8, 0, 0], name="chat", weight=3), source([0, 1, 1], name="code")), None)
    # 10 tokens in all; chat gets 3/4 of them, code 1/4, spread over two ids.
    assert counts.weighted().tolist() == [7.5, 1.25, 1.25]
    assert counts.weighted({"code": 3}).tolist() == [5.0, 2.5, 2.5]
    assert counts.weighted({"chat": 0}).tolist() == [0.0, 1.0, 1.0]
    empty = TokenCounts((source([1, 3], name="a"), source([0, 0], name="b", weight=9)), None)
    assert [empty.weighted(each).tolist() for each in (None, {"a": 0})] == [[1.0, 3.0], [0.0, 0.0]]
    # One source is weighted exactly.
    assert token_counts([2**53 + 1, 3]).weighted().tolist() == [float(2**53 + 1), 3.0]
    for weights, words in (
        ({"c": 1}, "no source named 'c'.*chat, code"),
        ({"chat": -1}, "weight above 0 .*found -1"),
        ({"chat": 1e308, "code": 1e308}, "at most 1e300, found 1e"),
        ({"chat": 0, "code": 0}, "Every source has weight 0"),
    ):
        with pytest.raises(UsageError, match=words):
            counts.weighted(weights)


def test_generated_ids_are_added_as_a_source_of_their_own():
    corpus = TokenCounts((source([50, 40, 0, 1], name="chat"),), "h")
    once = corpus.add([3, 3, 0]).add(iter([2]))
    found = {each.name: each.counts.tolist() for each in once.sources}
    assert found == {"chat": [50, 40, 0, 1], "generated": [1, 0, 1, 2]}
    assert once.tokenizer_hash == "h"
    assert corpus.add([1], "code").sources[1].name == "code"
    for wrong in ([4], [-1]):
        with pytest.raises(VocabularyError, match="expected 0 to 3"):
            corpus.add(wrong)
    with pytest.raises(TypeError):
        corpus.add([1.5])
    with pytest.raises(VocabularyError, match="the same text would be counted twice"):
        corpus.add([3]).add([3])


def test_bad_counts_are_refused():
    for make, words in (
        (lambda: source([1, -2]), "from 0 on, found int64 .* from -2 on"),
        (lambda: source([1], weight=0), "weight above 0 .*found 0"),
        (lambda: source([1, 1], [[2]]), "held-out ids: expected 0 to 1"),
        (lambda: SourceCounts("a", 1.0, np.zeros(2, np.int32), None, {}), "counts: expected int64"),
        (lambda: TokenCounts((), None), "at least one source"),
        (lambda: TokenCounts((source([1]), source([1])), None), "more than once: text"),
        (lambda: HeldOut(np.zeros(2, np.int32), np.array([0, 3], np.int64)), "expected to rise from 0 to 2"),
        (lambda: HeldOut(np.zeros(2, np.int32), np.array([0, 2, 1, 2], np.int64)), "expected to rise from 0 to 2"),
    ):
        with pytest.raises(VocabularyError, match=words):
            make()


def test_merge_keeps_sources_apart_and_adds_up_parts():
    first = TokenCounts((source([1, 2], [[0, 1]], name="chat"), source([5, 0], name="code")), "h")
    second = SourceCounts("chat", 1.0, np.array([10, 0]), source([0, 0], [[1], [0, 0]]).held_out, {"made": "elsewhere"})
    merged = merge_counts([first, TokenCounts((second,), "h")], {"code": 2.5})
    assert [each.name for each in merge_counts([first], {"chat": 0}).sources] == ["code"]
    chat, code = merged.sources
    assert (chat.name, chat.counts.tolist(), code.counts.tolist(), code.weight) == ("chat", [11, 2], [5, 0], 2.5)
    # Sorted, so that the order of the parts does not show.
    assert [document.tolist() for document in chat.held_out.documents] == [[0, 0], [0, 1], [1]]
    assert chat.provenance == {"parts": [{"made": "by hand"}, {"made": "elsewhere"}]}
    assert merged.tokenizer_hash == "h"


def test_what_cannot_be_merged_is_refused():
    one = token_counts([1, 2], tokenizer_hash="a")
    heavier = TokenCounts((SourceCounts("text", 2.0, np.array([1, 1]), None, {"made": "x"}),), "a")
    for parts, error, words in (
        ([one, token_counts([1, 2], tokenizer_hash="b")], TokenizerError, "found text: a; text: b"),
        ([one, token_counts([1, 2, 3], tokenizer_hash="a")], VocabularyError, r"vocabulary sizes.*\[2, 3\]"),
        ([one, one], VocabularyError, "counted twice"),
        ([one, heavier], UsageError, r"weights \[1\.0, 2\.0\]"),
        ([], UsageError, "Nothing to merge"),
    ):
        with pytest.raises(error, match=words):
            merge_counts(parts, {})


def test_files_that_are_no_counts_are_refused(tmp_path):
    path = tmp_path / "x.safetensors"
    with pytest.raises(VocabularyError, match="no such counts file"):
        TokenCounts.load(path)
    for content in (b"not safetensors at all", save_torch({"a": torch.zeros(3, dtype=torch.bfloat16)})):
        path.write_bytes(content)
        with pytest.raises(VocabularyError, match="not a file of token counts"):
            TokenCounts.load(path)


ACCOUNT = {"files": [{"name": "a.jsonl"}], "digest": "0a", "held_out": {"documents": 0, "tokens": 0, "share": 0.01}}
ACCOUNT |= dict.fromkeys(("documents", "tokens", "empty_documents", "skipped_records"), 1)
NO_ACCOUNTS = ({"files": None}, {"files": [{}]}, {"digest": None}, {"digest": "x"}, {"held_out": {}}, {"tokens": "9"})


def test_parts_that_were_counted_otherwise_are_listed():
    for share, num_documents in ((0.01, 2), (0.5, None)):
        other = ACCOUNT | {
            "files": [{"name": "b.jsonl"}],
            "digest": "0b",
            "held_out": ACCOUNT["held_out"] | {"share": share},
        }
        parts = [TokenCounts((replace(source([4, 5]), provenance=each),), None) for each in (ACCOUNT, other)]
        (merged,) = merge_counts(parts).sources
        assert merged.counts.tolist() == [8, 10]
        assert merged.provenance.get("documents") == num_documents
        assert (num_documents is None) == ("parts" in merged.provenance)


@pytest.mark.parametrize("change", NO_ACCOUNTS)
@pytest.mark.parametrize("merged", [False, True])
def test_an_account_that_cannot_be_added_to_another_is_refused_with_its_file(tmp_path, change, merged):
    path = tmp_path / "counts.safetensors"
    for account, is_sound in ((ACCOUNT, True), (ACCOUNT | change, False)):
        provenance = {"parts": [{"made": "by hand"}, account]} if merged else account
        TokenCounts((replace(source([4, 5]), provenance=provenance),), None).save(path)
        if is_sound:
            assert TokenCounts.load(path).sources[0].provenance == provenance
        else:
            with pytest.raises(VocabularyError, match=f"{path}: .*damaged"):
                TokenCounts.load(path)


def test_files_of_another_version_or_without_a_part_are_refused(tmp_path):
    for change, words in (
        (lambda tensors, header: header.update(version=3), "format version 3"),
        (lambda tensors, header: tensors.pop("held_out.0.doc_offsets"), "damaged"),
        (lambda tensors, header: header.pop("sources"), "damaged"),
        (lambda tensors, header: header["sources"][0].update(provenance=None), "damaged"),
        (lambda tensors, header: header["sources"][0].update(name=[]), "damaged"),
        (lambda tensors, header: header.update(tokenizer_hash=[]), "damaged"),
        (lambda tensors, header: header["sources"][0].update(weight=10**400), "at most 1e300"),
        (lambda tensors, header: tensors.update({"held_out.0.doc_offsets": np.zeros(0, np.int64)}), "damaged"),
    ):
        path = tmp_path / "counts.safetensors"
        token_counts([4, 5], [[0, 1]]).save(path)
        tensors = dict(load_file(path))
        with safe_open(path, "numpy") as file:
            header = json.loads(file.metadata()["eagle_slim.token_counts"])
        change(tensors, header)
        save_file(tensors, path, {"eagle_slim.token_counts": json.dumps(header)})
        with pytest.raises(VocabularyError, match=f"{path}: .*{words}"):
            TokenCounts.load(path)


def test_saved_counts_are_loaded(tmp_path):
    path = tmp_path / "counts.safetensors"
    sources = source([4, 5], [[0, 1], []], name="größer", weight=0.1), source([2**62, 0], name="no UTF-8: \udcff")
    counts = TokenCounts(sources, "h")
    counts.save(path)
    loaded = TokenCounts.load(path)
    assert (loaded.to_bytes(), loaded.tokenizer_hash) == (counts.to_bytes(), "h")
    for before, after in zip(counts.sources, loaded.sources, strict=True):
        assert (before.name, before.weight, before.provenance) == (after.name, after.weight, after.provenance)
        assert before.counts.tolist() == after.counts.tolist()
    assert [document.tolist() for document in loaded.sources[0].held_out.documents] == [[0, 1], []]
