"""Files that hold one JSON array: the same records, places and counts as in JSON lines, and every way to be damaged."""

import gzip
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from eagle_slim.vocab_tools.corpus import arrays as corpus_arrays
from eagle_slim.vocab_tools.corpus.arrays import array_pieces, begins_array
from eagle_slim.vocab_tools.corpus.blocks import BadRecord
from eagle_slim.vocab_tools.corpus.open import open_corpus
from eagle_slim.vocab_tools.corpus.source import CorpusSource
from eagle_slim.vocab_tools.counting.count import count_tokens
from eagle_slim.vocab_tools.counting.held_out import HeldOutRule
from eagle_slim.vocab_tools.errors import CorpusError
from hypothesis import given
from hypothesis import strategies as st
from support.raising import raises
from support.tokenizers import smollm2

JSON = st.recursive(
    st.none() | st.integers() | st.text(alphabet='ab"\\,[]{}\n é'),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(alphabet='k"]}', max_size=2), inner, max_size=3)
    ),
    max_leaves=6,
)
CHAT = [{"from": "human", "value": 'Hi [there], "you"'}, {"from": "gpt", "value": "Hello}, how\nare you?\\"}]
RECORDS = [{"id": str(number), "conversations": CHAT} for number in range(5)]


def read(data: bytes, start: int = 0) -> tuple[list[tuple[int, bytes]], list[str]]:
    """The records with their places, and the faults."""
    found, faults = [], []
    for piece in array_pieces(io.BytesIO(data[start:]), start):
        place = piece.start
        assert len(piece.lines) <= piece.stop - piece.start
        for line in piece.lines.split(b"\n"):
            if line.strip():
                found.append((place, line))
            place += len(line) + 1
        faults += [piece.fault] if piece.fault else []
    return found, faults


@given(
    records=st.lists(st.dictionaries(st.text(max_size=2), JSON, max_size=3), max_size=5),
    indent=st.sampled_from([None, 0, 2]),
    comma=st.sampled_from([",", ", ", ",\r\n", " ,\n\n "]),
    block=st.integers(1, 40),
)
def test_records_and_places(records: list[dict[str, Any]], indent: int | None, comma: str, block: int) -> None:
    texts = [json.dumps(record, indent=indent, ensure_ascii=False) for record in records]
    data = ("\ufeff [\n" + comma.join(texts) + "\n] \n").encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus_arrays, "BLOCK_BYTES", block + len("\ufeff [\n".encode()))
        found, faults = read(data)
        assert ([json.loads(line) for _, line in found], faults) == (records, [])
        for position, (place, _) in enumerate(found):
            assert data[place : place + 1] == b"{"
            if position:
                assert read(data, place) == (found[position:], [])


@pytest.mark.parametrize(
    ("tail", "kept", "fault"),
    [
        (b'{"a": 3', 2, "ends within the array"),
        (b"", 2, "ends within the array"),
        (b'{"a": "x]', 2, "ends within the array"),
        (b'{"a": 3}]]', 3, "the array ends here, but the file continues"),
        (b'{"a": 3}}, {"a": 4}]', 3, "the array ends here, but the file continues"),
    ],
)
def test_what_cannot_be_followed_is_one_fault(tail: bytes, kept: int, fault: str) -> None:
    data = b'[{"a": 1},\n{"a": 2},' + tail
    found, faults = read(data)
    assert [json.loads(line) for _, line in found] == [{"a": number + 1} for number in range(kept)]
    assert len(faults) == 1
    assert fault in faults[0]
    last = list(array_pieces(io.BytesIO(data), 0))[-1]
    assert last.stop > len(data)


def test_a_record_without_end_is_a_fault_of_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus_arrays, "BLOCK_BYTES", 64)
    monkeypatch.setattr(corpus_arrays, "MAX_RECORD_BYTES", 200)
    data = b'[{"a": 1}, {"a": "' + b"x" * 5000
    pieces = list(array_pieces(io.BytesIO(data), 0))
    assert [piece.fault is None for piece in pieces] == [True, False]
    assert "no record of the array ends within 200 bytes" in str(pieces[1].fault)
    assert pieces[1].stop == len(data) + 1


@pytest.mark.parametrize("comma", [b",", b", ", b",\n"])
@pytest.mark.parametrize(
    "broken",
    [
        b'{"a": "x}',
        b'{"a": x"}',
        b'{"a: "x", "b": "y"}',
        b'{"a": "x, "b": ": y"}',
        b'{"a": "the "x" of \\"y\\""}',
        b'{"a": "x "} y"}',
        b'{"a": "x\r\ny"}',
    ],
)
@pytest.mark.parametrize("block", [30, 4 << 20])
def test_a_broken_record_does_not_hide_the_next(
    monkeypatch: pytest.MonkeyPatch, block: int, broken: bytes, comma: bytes
) -> None:
    monkeypatch.setattr(corpus_arrays, "BLOCK_BYTES", block)
    after = [b'{"a": 2}', b'{"a": "]"}', b'{"a": "", "b": ["x, y", "\\"}"]}'] * 20
    found, faults = read(b"[" + comma.join([b'{"a": 1}', broken, *after]) + b"]")
    lines = [line.strip() for _, line in found]
    if b'"}' in broken[:-2]:
        # The record seems to end before it does, and then the array: the rest is lost, and that is said.
        assert (lines[0], len(faults)) == (b'{"a": 1}', 1)
        assert "the array ends here, but the file continues; the rest is not read" in faults[0]
    else:
        assert lines == [b'{"a": 1}', broken.replace(b"\n", b" "), *after]
        assert faults == []


def test_a_line_end_in_a_string_is_a_space_in_it() -> None:
    records = [{"text": f"{number} of them"} for number in range(1000)]
    found, faults = read(json.dumps(records).replace("3 of", "3\nof").encode())
    assert ([json.loads(line) for _, line in found], faults) == (records, [])


def test_many_escapes_behind_a_broken_string_take_no_time() -> None:
    broken = b'{"a": "' + b'\\"' * 200_000 + b" x}"
    found, faults = read(b"[" + broken + b', {"a": 2}]')
    assert ([line.strip() for _, line in found], faults) == ([broken, b'{"a": 2}'], [])


def test_only_an_array_is_one() -> None:
    assert [begins_array(head) for head in (b"[", b"\xef\xbb\xbf\n [1", b'{"a": [', b"", b"x[")] == [
        True,
        True,
        False,
        False,
        False,
    ]


@pytest.mark.parametrize(("name", "indent"), [("chats.json", None), ("chats.json.gz", 2)])
def test_counts_are_those_of_json_lines(tmp_path: Path, name: str, indent: int | None) -> None:
    data = json.dumps(RECORDS, indent=indent).encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    array, lines = (
        count_tokens(
            [CorpusSource(str(tmp_path / file))],
            smollm2(),
            workers=0,
            tokenizer_library="tokenizers",
            held_out=HeldOutRule(fraction=0.0),
        ).sources[0]
        for file in (name, "chats.jsonl")
    )
    assert np.array_equal(array.counts, lines.counts)
    assert array.provenance["documents"] == 5
    assert array.provenance["column"] == "conversations"
    assert array.provenance["files"][0]["bytes"] == (tmp_path / name).stat().st_size


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("name", ["a.json", "a.json.gz"])
def test_blocks_go_on_behind_any_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, whole: bool) -> None:
    monkeypatch.setattr(corpus_arrays, "BLOCK_BYTES", 40)
    data = json.dumps([{"text": "x" * number} for number in range(20)])[: None if whole else -1].encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    corpus = open_corpus(CorpusSource(str(tmp_path / name)))
    blocks = list(corpus.shard_blocks(0, 0))
    values = [list(block.read("text").values(np.arange(len(block.read("text").positions)))) for block in blocks]
    found = [value for part in values for value in part]
    assert found[:19] == ["x" * number for number in range(19)]
    assert found[19:] == ["x" * 19] if whole else isinstance(found[19], BadRecord)
    assert not corpus.is_cheap_to_cut(0)
    for position, block in enumerate(blocks):
        assert [after.start for after in corpus.shard_blocks(0, block.stop)] == [
            b.start for b in blocks[position + 1 :]
        ]


def test_a_bad_record_is_named_by_its_line(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('[\n {"text": "x"},\n {"text": 5},\n {"text": "y"}\n]')
    with raises(CorpusError, place=f"{tmp_path / 'a.json'}, line 3"):
        count_tokens(
            [CorpusSource(str(tmp_path / "a.json"))],
            smollm2(),
            workers=0,
            tokenizer_library="tokenizers",
            held_out=HeldOutRule(fraction=0.0),
        )
