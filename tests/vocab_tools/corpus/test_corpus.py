"""Corpora: which files, which column, which records, and what is said of bad ones."""

import bz2
import gzip
import itertools
import json
import lzma
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from eagle_slim.vocab_tools.corpus import blocks as corpus_blocks
from eagle_slim.vocab_tools.corpus import file_blocks
from eagle_slim.vocab_tools.corpus.blocks import BadRecord, Block, cut_text, document_index, text_documents
from eagle_slim.vocab_tools.corpus.open import open_corpus
from eagle_slim.vocab_tools.corpus.packed import PACKED
from eagle_slim.vocab_tools.corpus.source import CorpusSource, amount, parse_source, with_unique_names
from eagle_slim.vocab_tools.errors import CorpusError, UsageError
from hypothesis import given
from hypothesis import strategies as st
from support.raising import raises

TEXTS = [f"text number {number} of many, größer 你好 👋" for number in range(60)]


def read_all(source: CorpusSource, after: tuple[int, int] | None = None) -> list[tuple[int, int, Any]]:
    """(shard, position, value or reason) of every record."""
    corpus = open_corpus(source)
    return [record for block in corpus.blocks(after) for record in read_block(block, corpus.column)]


def read_block(block: Block, column: str) -> Iterator[tuple[int, int, Any]]:
    records = block.read(column)
    for position, value in zip(
        records.positions.tolist(), records.values(np.arange(len(records.positions))), strict=True
    ):
        yield block.shard, position, value.reason if isinstance(value, BadRecord) else value


def values(source: CorpusSource) -> list[Any]:
    return [value for _, _, value in read_all(source)]


def jsonl(rows: list[Any]) -> bytes:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def bad_places(source: CorpusSource) -> list[tuple[str, str]]:
    corpus = open_corpus(source)
    found = []
    for block in corpus.blocks():
        records = block.read(corpus.column)
        for value in records.values(np.arange(len(records.positions))):
            if isinstance(value, BadRecord):
                found.append((corpus.place_of(value), value.reason))
    return found


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """The same texts in every format."""
    rows = [{"text": text, "id": number} for number, text in enumerate(TEXTS)]
    (tmp_path / "a.jsonl").write_bytes(jsonl(rows))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(jsonl(rows)))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "c.parquet", row_group_size=25)
    (tmp_path / "d.json").write_bytes(jsonl(rows))
    (tmp_path / "e.ndjson").write_bytes(jsonl(rows))
    return tmp_path


@pytest.mark.parametrize("block_bytes", [50, 700, 1 << 20])
@pytest.mark.parametrize("name", ["a.jsonl", "b.jsonl.gz", "c.parquet", "d.json", "e.ndjson"])
def test_every_format_gives_the_texts_in_order(
    files: Path, name: str, block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_blocks, "BLOCK_BYTES", block_bytes)
    source = CorpusSource(str(files / name))
    found = read_all(source)
    assert [value for _, _, value in found] == TEXTS
    if name == "c.parquet":
        assert [position for _, position, _ in found] == list(range(60))
    else:
        lines = (files / "a.jsonl").read_bytes().splitlines(keepends=True)
        assert [position for _, position, _ in found] == np.cumsum([0, *map(len, lines[:-1])]).tolist()
    corpus = open_corpus(source)
    # Going on behind any block gives the rest.
    stops = [(block.shard, block.stop) for block in corpus.blocks()]
    assert block_bytes > 50 or len(stops) > 10, "lines and row groups are split"
    for stop in {stops[0], stops[len(stops) // 2], stops[-1]}:
        assert read_all(source, stop) == [record for record in found if record[1] >= stop[1]]
    sizes = sum(block.size for block in corpus.blocks())
    assert corpus.size is not None
    assert abs(sizes - corpus.size) <= len(stops)


def test_folders_and_globs(files: Path) -> None:
    (files / "sub").mkdir()
    (files / "sub" / "z.jsonl").write_bytes(jsonl([{"text": "deep"}]))
    (files / ".hidden.jsonl").write_bytes(jsonl([{"text": "hidden"}]))
    (files / "notes.md").write_text("not a corpus")
    assert values(CorpusSource(str(files))) == [*TEXTS * 5, "deep"]
    assert values(CorpusSource(str(files / "[ab].*"))) == TEXTS * 2
    assert values(CorpusSource(str(files / "**" / "*.jsonl"))) == [*TEXTS, "deep"]
    (files / "docs").mkdir()
    (files / "docs" / "notes.md").write_text("not a corpus")
    with raises(CorpusError, path=str(files / "docs"), found=0):
        open_corpus(CorpusSource(str(files / "docs")))
    with raises(CorpusError, found=0):
        open_corpus(CorpusSource(str(files / "*.nothing")))
    with raises(CorpusError, missing=str(files / "missing.jsonl")):
        open_corpus(CorpusSource(str(files / "missing.jsonl")))
    with raises(CorpusError, path=str(files / "notes.md"), format=None):
        open_corpus(CorpusSource(str(files / "notes.md")))


def pack(data: bytes, suffix: str) -> bytes:
    if suffix == ".zst":
        packed: bytes = pa.Codec("zstd").compress(data, asbytes=True)
        return packed
    return {".gz": gzip, ".bz2": bz2, ".xz": lzma}[suffix].compress(data)


def test_a_file_and_its_packed_copy_are_not_both_counted(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(jsonl([{"text": "a"}]))
    (tmp_path / "a.jsonl.zst").write_bytes(pack(jsonl([{"text": "a"}]), ".zst"))
    with raises(CorpusError, path=str(tmp_path / "a.jsonl.zst"), same_as=str(tmp_path / "a.jsonl")):
        open_corpus(CorpusSource(str(tmp_path)))
    assert values(CorpusSource(str(tmp_path / "*.jsonl"))) == ["a"]


def test_columns_are_found_or_asked_for(tmp_path: Path) -> None:
    def column_of(row: dict[str, Any], column: str | None = None) -> tuple[str, str]:
        path = tmp_path / "a.jsonl"
        path.write_bytes(jsonl([row]))
        corpus = open_corpus(CorpusSource(str(path), column=column))
        return corpus.column, corpus.kind

    chat = [{"role": "user", "content": "x"}]
    assert column_of({"id": 1, "text": "x"}) == ("text", "text")
    assert column_of({"text": "x", "messages": chat}) == ("messages", "chat")
    assert column_of({"conversations": chat}) == ("conversations", "chat")
    assert column_of({"id": 1, "body": "x"}) == ("body", "text")
    assert column_of({"a": "x", "b": "y"}, "b") == ("b", "text")
    told = json.dumps(chat)
    assert column_of({"text": "x", "messages": told}) == ("messages", "chat")
    assert column_of({"id": 1, "talk": told}) == ("talk", "chat")
    assert column_of({"a": "x", "b": told}, "b") == ("b", "chat")
    assert column_of({"text": '[{"name": "x"}]'}) == ("text", "text")
    assert column_of({"messages": "[citation needed]"}) == ("messages", "text")
    for other in (["Hi", "Hello"], {"q": "Hi", "a": "Hello"}, None):
        with raises(UsageError, columns=["id", "data"]):
            column_of({"id": "f00d", "data": other})
    with raises(CorpusError, column="text", found="a value of type int"):
        column_of({"id": "f00d", "text": 5})
    with pytest.raises(UsageError, match=r"say which column holds the text.*The records have a, b\."):
        column_of({"a": "x", "b": "y"})
    with raises(UsageError, column="c", columns=["a"]):
        column_of({"a": "x"}, "c")


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_a_column_that_begins_with_nulls_is_known_by_its_first_value(tmp_path: Path, name: str) -> None:
    def column_of(rows: list[dict[str, Any]], column: str | None = None) -> tuple[str, str]:
        path = tmp_path / name
        if path.suffix == ".parquet":
            pq.write_table(pa.Table.from_pylist(rows), path)
        else:
            path.write_bytes(jsonl(rows))
        corpus = open_corpus(CorpusSource(str(path), column=column))
        return corpus.column, corpus.kind

    chat = [{"role": "user", "content": "x"}]
    assert column_of([{"text": None, "id": 1}, {"text": None, "id": 2}, {"text": "x", "id": 3}]) == ("text", "text")
    assert column_of([{"messages": None, "text": "x"}, {"messages": chat, "text": "y"}]) == ("messages", "chat")
    assert column_of([{"turns": None, "a": "x"}, {"turns": chat, "a": "y"}], "turns") == ("turns", "chat")
    with raises(CorpusError, column="text", found="nothing"):
        column_of([{"text": None, "id": 1}])


def test_bad_lines_are_named_by_file_line_and_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [
        b'{"text": "fine"}',
        b"",
        b'{"text": "cut off',
        b"[1, 2]",
        b'{"other": 1, "more": 2}',
        b'{"text": "bad \xff byte"}',
        b'{"text": "half \\ud800 pair"}',
        b'{"text": NaN}',
        b'{"text": "NaN elsewhere is taken", "x": NaN}',
        b"   ",
        b'{"text": "crlf"}\r',
        b'{"text": "last, no line end"}',
    ]
    expected = [
        (3, "not JSON: Unterminated string"),
        (4, "expected a JSON object, found list"),
        (5, "no column 'text'; the line has 'other', 'more'"),
        (6, "not UTF-8 text: byte 0xff"),
        (7, "half of a surrogate pair"),
    ]
    plain, packed = tmp_path / "a.jsonl", tmp_path / "b.jsonl.gz"
    plain.write_bytes(b"\xef\xbb\xbf" + b"\n".join(lines))
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    for path in (plain, packed):
        for block_bytes in (40, 1 << 20):
            monkeypatch.setattr(file_blocks, "BLOCK_BYTES", block_bytes)
            found = bad_places(CorpusSource(str(path)))
            assert [place for place, _ in found] == [f"{path}, line {line}" for line, _ in expected]
            for (_, reason), (_, start) in zip(found, expected, strict=True):
                assert reason.startswith(start)
            good = [value for value in values(CorpusSource(str(path))) if isinstance(value, str)]
            assert [text for text in good if text.startswith(("fine", "NaN", "crlf", "last"))] == [
                "fine",
                "NaN elsewhere is taken",
                "crlf",
                "last, no line end",
            ]


def test_a_line_without_end_is_one_bad_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_blocks, "BLOCK_BYTES", 100)
    monkeypatch.setattr(file_blocks, "MAX_RECORD_BYTES", 300)
    monkeypatch.setattr(corpus_blocks, "MAX_RECORD_BYTES", 300)
    rows = jsonl([{"text": "a"}, {"text": "b" * 1000}, {"text": "c"}, {"text": "d" * 250}])
    for path, data in ((tmp_path / "a.jsonl", rows), (tmp_path / "b.jsonl.gz", gzip.compress(rows))):
        path.write_bytes(data)
        found = values(CorpusSource(str(path)))
        assert (found[0], found[2:]) == ("a", ["c", "d" * 250])
        assert found[1].startswith("the line is too long: at most 300 bytes, found 1,01")
        assert bad_places(CorpusSource(str(path)))[0][0] == f"{path}, line 2"


@pytest.mark.parametrize("suffix", PACKED)
def test_packed_files_hold_what_plain_ones_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str) -> None:
    monkeypatch.setattr(file_blocks, "BLOCK_BYTES", 5000)
    rows = jsonl([{"text": f"{n} " * (n % 300)} for n in range(400)])
    # Two streams behind each other, as parallel packers write them, are one file.
    middle = rows.index(b"\n", len(rows) // 2) - 3
    path = tmp_path / f"a.jsonl{suffix.upper()}"
    path.write_bytes(pack(rows[:middle], suffix) + pack(rows[middle:], suffix))
    (tmp_path / "b.jsonl").write_bytes(rows)
    assert values(CorpusSource(str(path))) == values(CorpusSource(str(tmp_path / "b.jsonl")))
    corpus = open_corpus(CorpusSource(str(path)))
    blocks = list(corpus.shard_blocks(0, 0))
    assert len(blocks) > 10
    assert sum(block.size for block in blocks) == path.stat().st_size
    assert [block.start for block in corpus.shard_blocks(0, blocks[5].stop)] == [block.start for block in blocks[6:]]


@pytest.mark.parametrize("suffix", PACKED)
def test_a_damaged_stream_gives_what_is_before_the_damage(tmp_path: Path, suffix: str) -> None:
    draw = random.Random(0)
    # bzip2 needs more than it packs at a time.
    num_rows = 900 if suffix == ".bz2" else 300
    rows = [{"text": draw.randbytes(1500).hex()} for _ in range(num_rows)]
    data = pack(jsonl(rows), suffix)
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(data[: len(data) // 2])
    found = values(CorpusSource(str(path)))
    assert found[-1].startswith(f"the {suffix} stream is damaged from about here")
    assert found[:-1] == [row["text"] for row in rows[: len(found) - 1]]
    assert len(found) > 0.3 * num_rows
    ((place, _),) = bad_places(CorpusSource(str(path)))
    assert place == f"{path}, line {len(found)}"
    path.write_bytes(b"not packed at all\n" * 20)
    with raises(CorpusError, path=str(path)) as caught:
        open_corpus(CorpusSource(str(path)))
    assert caught.value.facts["fault"].startswith(f"{path}, line 1: the {suffix} stream is damaged")


def test_damaged_parquet_is_named(tmp_path: Path, files: Path) -> None:
    good = (files / "c.parquet").read_bytes()
    start = pq.ParquetFile(files / "c.parquet").metadata.row_group(1).column(0).dictionary_page_offset
    path = tmp_path / "bad.parquet"
    path.write_bytes(good[:start] + b"\xff" * 60 + good[start + 60 :])
    ((place, reason),) = bad_places(CorpusSource(str(path), column="text"))
    assert place == f"{path}, row 25"
    assert reason.startswith("row group 1 cannot be read: ")
    assert values(CorpusSource(str(path)))[:25] == TEXTS[:25]
    path.write_bytes(good[: len(good) // 2])
    with raises(CorpusError, path=str(path)) as caught:
        open_corpus(CorpusSource(str(path)))
    assert caught.value.facts["fault"].startswith(f"{path}, row 0: damaged Parquet file")


def test_files_without_a_readable_record_are_named(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"text": "one"}, indent=2))
    with raises(CorpusError, path=str(path)) as caught:
        open_corpus(CorpusSource(str(path)))
    assert caught.value.facts["fault"].startswith(f"{path}, line 1: not JSON")
    path.write_text("")
    with raises(CorpusError, fault=f"{path} is empty."):
        open_corpus(CorpusSource(str(path)))


# Plain text


def test_text_documents_end_at_blank_lines() -> None:
    paragraph = b"line one\nline two\n\n"
    data = paragraph * 500
    documents = text_documents(data)
    assert documents[0][0] == 0
    assert all(a[1] == b[0] for a, b in itertools.pairwise(documents))
    assert documents[-1][1] == len(data)
    for start, stop in documents[:-1]:
        assert data[start:stop].endswith(b"\n\n")
        assert 4096 <= stop - start < 4096 + 2 * len(paragraph)


@given(st.binary(max_size=400) | st.text(max_size=300).map(str.encode), st.integers(1, 40), st.integers(8, 80))
def test_text_is_never_lost_or_cut_within_a_character(data: bytes, fill: int, most: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus_blocks, "TEXT_DOCUMENT_BYTES", fill)
        patch.setattr(corpus_blocks, "MAX_PARAGRAPH_BYTES", most)
        documents = text_documents(data)
    assert b"".join(data[start:stop] for start, stop in documents) == data
    assert all(0 < stop - start <= most for start, stop in documents)
    try:
        data.decode()
    except UnicodeDecodeError:
        return
    for start, stop in documents:
        data[start:stop].decode()


def test_cut_text_prefers_blank_line_then_line_then_space_then_character() -> None:
    assert cut_text(b"a\n\nb\nc d") == 3
    assert cut_text(b"ab\nc d") == 3
    assert cut_text(b"ab cd") == 3
    assert cut_text("abé".encode()) == 2
    assert cut_text(b"abcd") == 4
    assert cut_text(b"\xff" * 8) > 0


def test_text_files_are_the_same_however_blocks_are_cut(tmp_path: Path) -> None:
    text = "\n\n".join(f"Paragraph {number}: {'word ' * (number % 90)}größer." for number in range(3000))
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(text.encode()))
    plain, packed = values(CorpusSource(str(tmp_path / "a.txt"))), values(CorpusSource(str(tmp_path / "b.txt.gz")))
    assert "".join(plain) == text
    assert packed == plain
    assert open_corpus(CorpusSource(str(tmp_path / "a.txt"))).kind == "text"


def test_undecodable_text_is_named_by_line(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"first\nsecond\nthird \xe9\n" + b"x" * 5000 + b"\n\nand more\n")
    ((place, reason),) = bad_places(CorpusSource(str(path)))
    assert (place, reason) == (f"{path}, line 3", "not UTF-8 text: byte 0xe9, invalid continuation byte")
    path.write_bytes("wide".encode("utf-16"))
    assert bad_places(CorpusSource(str(path)))[0][0] == f"{path}, line 1"


def test_text_has_no_columns_and_does_not_mix(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    with raises(UsageError, column="text"):
        open_corpus(CorpusSource(str(tmp_path / "a.txt"), column="text"))
    (tmp_path / "b.jsonl").write_bytes(jsonl([{"text": "x"}]))
    with raises(UsageError, path=str(tmp_path), formats=["txt", "jsonl"]):
        open_corpus(CorpusSource(str(tmp_path)))


# Sources as text


def test_parse_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    parsed = parse_source("chat=HuggingFaceH4/ultrachat_200k,split=train_sft,weight=3,max-tokens=50")
    assert parsed == CorpusSource("HuggingFaceH4/ultrachat_200k", "chat", 3.0, split="train_sft", max_tokens=50)
    assert parse_source("x.jsonl,max-tokens=1.5M,max-documents=2k") == CorpusSource(
        "x.jsonl", max_tokens=1_500_000, max_documents=2000
    )
    assert parse_source("org/data").name == "data"
    assert parse_source("some/code-*.jsonl.gz").name == "code-"
    assert parse_source("some/code.jsonl.zst").name == "code"
    (tmp_path / "a[1].jsonl").touch()
    assert parse_source("a[1].jsonl").name == "a[1]"
    assert CorpusSource(tmp_path / "b.txt") == CorpusSource(str(tmp_path / "b.txt"))  # type: ignore[arg-type]
    assert parse_source("x.jsonl,column=body,shuffle=yes").shuffle is True
    assert parse_source("a,b.jsonl,column=body").location == "a,b.jsonl"
    (tmp_path / "k=v.jsonl").write_bytes(b"")
    assert parse_source("k=v.jsonl").location == "k=v.jsonl"


@pytest.mark.parametrize(
    ("text", "number"), [("5", 5), ("500k", 500_000), ("10M", 10_000_000), ("1.5B", 1_500_000_000), ("1_000", 1000)]
)
def test_amounts(text: str, number: int) -> None:
    assert amount(text) == number


@pytest.mark.parametrize("text", ["0", "-1", "1.5", "k", "ten"])
def test_no_amounts(text: str) -> None:
    with pytest.raises(ValueError, match="is not a number above 0"):
        amount(text)


@pytest.mark.parametrize(
    ("spec", "setting"),
    [
        ("org/x,colum=a", "colum"),
        ("org/x,weight=heavy", "weight"),
        ("org/x,weight=-1", "weight"),
        ("org/x,roles=user", "roles"),
        ("org/x,sample=2", "sample"),
        ("org/x,max-documents=0", "max_documents"),
        ("", "location"),
    ],
)
def test_parse_source_refuses(spec: str, setting: str) -> None:
    with raises(UsageError, setting=setting):
        parse_source(spec)


def test_local_files_take_no_hub_settings(files: Path) -> None:
    with raises(UsageError, setting="split"):
        open_corpus(CorpusSource(str(files / "a.jsonl"), split="train"))


def test_names_are_made_unique() -> None:
    sources = with_unique_names([CorpusSource("a/x"), CorpusSource("b/x"), CorpusSource("y"), CorpusSource("c/x")])
    assert [source.name for source in sources] == ["x", "x-2", "y", "x-3"]


def test_document_index_is_unique() -> None:
    index = np.concatenate([document_index(shard, np.arange(0, 2**40, 2**38)) for shard in range(5)])
    assert len(np.unique(index)) == len(index)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_unreadable_file(files: Path) -> None:
    (files / "a.jsonl").chmod(0)
    with raises(CorpusError, path=str(files / "a.jsonl")):
        open_corpus(CorpusSource(str(files / "a.jsonl")))
