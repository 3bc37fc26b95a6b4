import bz2
import csv
import gzip
import io
import json
import random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from eagle_slim.vocab_tools import CorpusError, UsageError, records
from eagle_slim.vocab_tools.records import PACKED, BadRecord, cut_text, text_documents
from eagle_slim.vocab_tools.sources import CorpusSource, amount, open_source, parse_source
from hypothesis import given
from hypothesis import strategies as st

TEXTS = [f"text number {number} of many, größer 你好 👋" for number in range(60)]
TEXTS += ['"] , [{', "\\", "}", "a\nb\r\n", ", "]


def values(location, **settings):
    return [value.reason if isinstance(value, BadRecord) else value for _, value in placed(location, **settings)]


def placed(location, **settings):
    """(place, value) of every record; the place of a good text document is not told."""
    opened = open_source(CorpusSource(str(location), **settings))
    found = []
    for block in opened.blocks():
        for number, value in block.records(opened.column):
            told = block.place(number) if opened.column or isinstance(value, BadRecord) else ""
            found.append((told, value))
    return found


def faults(location, **settings):
    return [(place, value.reason) for place, value in placed(location, **settings) if isinstance(value, BadRecord)]


def jsonl(rows):
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def fields(rows, separator):
    """The rows as a table of fields, with a mark before UTF-8 as spreadsheets write it."""
    buffer = io.StringIO(newline="")
    writer = csv.DictWriter(buffer, rows[0], delimiter=separator)
    writer.writeheader()
    writer.writerows(rows)
    return buffer.getvalue().encode("utf-8-sig")


def pack(data, suffix):
    if suffix == ".bz2":
        return bz2.compress(data)
    packed = pa.Codec(PACKED[suffix]).compress(data, asbytes=True)
    return packed


@pytest.fixture
def files(tmp_path):
    rows = [{"text": text, "id": number} for number, text in enumerate(TEXTS)]
    (tmp_path / "a.jsonl").write_bytes(jsonl(rows))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(jsonl(rows)))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "c.parquet", row_group_size=25)
    (tmp_path / "d.json").write_bytes(jsonl(rows))
    (tmp_path / "e.json").write_text(json.dumps(rows, indent=1))
    (tmp_path / "f.json.gz").write_bytes(gzip.compress(b"\xef\xbb\xbf \n" + json.dumps(rows).encode() + b" \n"))
    (tmp_path / "g.csv").write_bytes(fields(rows, ","))
    (tmp_path / "h.tsv.gz").write_bytes(gzip.compress(fields(rows, "\t")))
    # Two streams behind each other, as parallel packers write them, are one file.
    middle = len(jsonl(rows)) // 2
    for suffix in PACKED:
        streams = pack(jsonl(rows)[:middle], suffix) + pack(jsonl(rows)[middle:], suffix)
        (tmp_path / f"p{suffix[1:]}.jsonl{suffix.upper()}").write_bytes(streams)
    return tmp_path


CHAT = [{"role": "user", "content": "x"}]
NAMES = ["a.jsonl", "b.jsonl.gz", "c.parquet", "d.json", "e.json", "f.json.gz", "g.csv", "h.tsv.gz"]
NAMES += [f"p{suffix[1:]}.jsonl{suffix.upper()}" for suffix in PACKED]


@pytest.mark.parametrize("block_bytes", [7, 50, 700, 1 << 20])
@pytest.mark.parametrize("name", NAMES)
def test_every_format_gives_the_texts_in_order_and_their_places(files, name, block_bytes, monkeypatch):
    monkeypatch.setattr(records, "BLOCK_BYTES", block_bytes)
    units = {"c.parquet": ("row", 0), **dict.fromkeys(("e.json", "f.json.gz", "g.csv", "h.tsv.gz"), ("record", 1))}
    unit, first = units.get(name, ("line", 1))
    expected = [(f"{files / name}, {unit} {number}", text) for number, text in enumerate(TEXTS, first)]
    assert placed(files / name) == expected
    opened = open_source(CorpusSource(str(files / name)))
    blocks = list(opened.blocks())
    assert block_bytes > 50 or len(blocks) >= (1 if name == "c.parquet" else 10)
    assert abs(sum(block.size for block in blocks) - (opened.size or 0)) <= len(blocks)


def test_folders_and_globs(files):
    (files / "sub").mkdir()
    (files / "sub" / "z.jsonl").write_bytes(jsonl([{"text": "deep"}]))
    (files / ".hidden.jsonl").write_bytes(jsonl([{"text": "hidden"}]))
    (files / "notes.md").write_text("not a corpus")
    # What a link leads to again is not counted again.
    (files / "the_same").symlink_to(files)
    (files / "aa.jsonl").symlink_to(files / "a.jsonl")
    (files / "hard.jsonl").hardlink_to(files / "a.jsonl")
    assert values(files) == [*TEXTS * len(NAMES), "deep"]
    assert values(files / "[ab].*") == TEXTS * 2
    assert values(files / "**" / "*.jsonl") == [*TEXTS, "deep"]
    opened = open_source(CorpusSource(str(files / "**" / "*.jsonl")))
    assert [file.name for file in opened.files] == ["a.jsonl", "sub/z.jsonl"]
    (files / "docs").mkdir()
    (files / "docs" / "notes.md").write_text("not a corpus")
    for nothing in ("docs", "*.nothing", "missing.jsonl", "notes.md"):
        with pytest.raises(CorpusError, match=nothing.replace("*", r"\*")):
            open_source(CorpusSource(str(files / nothing)))
    (files / "a.jsonl.zst").write_bytes(pack(b"{}", ".zst"))
    with pytest.raises(CorpusError, match=r"a\.jsonl: .* packed and unpacked"):
        open_source(CorpusSource(str(files)))


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_the_column_is_found_or_asked_for(tmp_path, name):
    for rows, asked, found in (
        ([{"id": 1, "text": "x"}], None, ("text", "text")),
        ([{"text": "x", "messages": CHAT}], None, ("messages", "chat")),
        ([{"conversations": CHAT}], None, ("conversations", "chat")),
        ([{"a": "x", "b": "y"}], "b", ("b", "text")),
        ([{"text": "x", "messages": json.dumps(CHAT)}], None, ("messages", "chat")),
        ([{"id": 1, "talk": json.dumps(CHAT)}], None, ("talk", "chat")),
        ([{"text": '[{"from": "Berlin", "to": "Rome"}]'}], None, ("text", "text")),
        ([{"text": '[{"role": "admin", "name": "x"}]'}], None, ("text", "text")),
        ([{"text": json.dumps(CHAT)}], None, ("text", "chat")),
        ([{"messages": "[citation needed]"}], None, ("messages", "text")),
        # A null does not show what its column holds.
        ([{"text": None, "id": 1}, {"text": "x", "id": 3}], None, ("text", "text")),
        # What Python prints is no chat, but stands in nobody's way.
        ([{"raw": str(CHAT), "text": "x"}], None, ("text", "text")),
        ([{"messages": str(CHAT), "conversations": CHAT, "raw": str(CHAT)}], None, ("conversations", "chat")),
        ([{"messages": str(CHAT), "b": "x"}], "b", ("b", "text")),
        ([{"turns": None, "a": "x"}, {"turns": CHAT, "a": "y"}], "turns", ("turns", "chat")),
    ):
        if name == "a.parquet":
            pq.write_table(pa.Table.from_pylist(rows), tmp_path / name)
        else:
            (tmp_path / name).write_bytes(jsonl(rows))
        opened = open_source(CorpusSource(str(tmp_path / name), column=asked))
        assert (opened.column, opened.kind) == found


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        (
            "a.csv",
            b"a,text\n1,2\n\n1,2,3\n",
            "a.csv, line 4: expected 2 fields, as in the first line, found 3.*as .jsonl",
        ),
        ("a.csv", b'a,text\n1,"cut off\n', "a.csv, line 2: unexpected end of data. Write it with a CSV writer's"),
        ("a.csv", b'a,text\n1,"he \\"said\\""\n', "a.csv, line 2: ',' expected after '\"'.* quotes, or as .jsonl"),
        ("a.csv", b"id;text\n1;hello\n", "a.csv, line 1: found one column 'id;text': .* by commas in .csv"),
        ("a.csv", b"text,text\nx,y\n", "a.csv, line 1: two columns have one name, of text, text. Rename one"),
        ("a.tsv", b"text\ncaf\xe9\n", "a.tsv, line 2: not UTF-8 text: invalid continuation byte. Write it in UTF-8"),
        ("a.csv", "text\nhello\n".encode("utf-16-le"), "a.csv, line 1: a column's name holds NUL|line contains NUL"),
        ("a.csv", b"text\r\n" + b"0123456789\r\n" * 9000 + b'"x\n\xff"\n', "a.csv, line 9003: not UTF-8 text"),
        (
            "a.csv.gz",
            gzip.compress(b"\xef\xbb\xbftext\r\xff", mtime=0),
            "a.csv.gz, line 2: not UTF-8 text: invalid start",
        ),
    ],
)
def test_a_table_of_fields_that_is_none_stops_with_its_line(tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CorpusError, match=words):
        values(tmp_path / name)


def test_a_field_is_text_whatever_it_looks_like(tmp_path):
    chat = '""role"": ""user"", ""content"": ""x""'
    (tmp_path / "a.csv").write_text(f'text,messages\n2024-01-01,"[{{{chat}}}]"\n,null\n' + "x" * 200_000 + ",NA\n")
    assert values(tmp_path / "a.csv", column="text") == ["2024-01-01", "", "x" * 200_000]
    assert csv.field_size_limit() < 2**31  # where a C long has 32 bits, too
    opened = open_source(CorpusSource(str(tmp_path / "a.csv")))
    assert (opened.column, opened.kind) == ("messages", "chat")


def test_no_column_stands_out(tmp_path):
    for row, asked, words in (
        ({"id": "f00d", "text": 5}, None, r",column=NAME behind .* have id, text \(a value of type int\)"),
        ({"a": "x"}, "c", "no column 'c'.* have a"),
        ({"text": "x", "role": "prompter"}, None, ",column=NAME"),
        ({"messages": str(CHAT), "id": "x"}, None, "column 'messages' holds chats as Python prints them.*json.dumps"),
        ({"text": "y", "conversations": str(CHAT)}, None, "column 'conversations' holds .*,column=NAME"),
        ({"a": str(CHAT), "b": str(CHAT)}, "b", "column 'b' holds"),
        ({"a": str(CHAT), "b": "x"}, None, "say which column"),
        ({"a": str(CHAT), "id": 7}, None, "column 'a' holds"),
        ({"text": str(CHAT), "raw": str(CHAT)}, None, "column 'text' holds"),
    ):
        (tmp_path / "a.jsonl").write_bytes(jsonl([row]))
        with pytest.raises(UsageError, match=words):
            open_source(CorpusSource(str(tmp_path / "a.jsonl"), column=asked))


@pytest.mark.parametrize("block_bytes", [40, 1 << 20])
@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_bad_lines_are_named_by_line_and_reason(tmp_path, monkeypatch, name, block_bytes):
    lines = [b'{"text": "fine"}', b"", b'{"text": "cut off', b"[1, 2]", b'{"other": 1, "more": 2}']
    lines += [b'{"text": "bad \xff byte"}', b'{"text": "NaN elsewhere is taken", "x": NaN}']
    lines += [b'{"text": "large", "x": 1000000000000000000000000000000}', b"   ", b'{"text": "crlf"}\r']
    lines += [b'{"text": "last, no line end"}']
    expected = [
        (3, "not JSON: Unterminated string"),
        (4, "expected a JSON object, found list"),
        (5, "no column 'text'; the line has 'other', 'more'"),
        (6, "not JSON: 'utf-8' codec can't decode byte 0xff"),
    ]
    monkeypatch.setattr(records, "BLOCK_BYTES", block_bytes)
    data = b"\xef\xbb\xbf" + b"\n".join(lines)
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    found = faults(tmp_path / name)
    assert [place for place, _ in found] == [f"{tmp_path / name}, line {line}" for line, _ in expected]
    for (_, reason), (_, start) in zip(found, expected, strict=True):
        assert reason.startswith(start)
    good = [value for _, value in placed(tmp_path / name) if isinstance(value, str)]
    assert good == ["fine", "NaN elsewhere is taken", "large", "crlf", "last, no line end"]


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst", "a.parquet"])
def test_a_damaged_file_is_named(tmp_path, name):
    draw = random.Random(0)
    path = tmp_path / name
    rows = [{"text": draw.randbytes(1500).hex()} for _ in range(300)]
    if name == "a.parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_bytes(pack(jsonl(rows), path.suffix))
    good = path.read_bytes()
    for damaged in (good[: len(good) // 2], b"not packed at all\n" * 20):
        path.write_bytes(damaged)
        with pytest.raises(CorpusError, match=f"{name}: cannot be read"):
            values(path)


def test_a_file_that_becomes_shorter_is_named(files):
    (block,) = open_source(CorpusSource(str(files / "a.jsonl"))).blocks()
    (files / "a.jsonl").write_bytes(jsonl([{"text": "one"}]))
    with pytest.raises(CorpusError, match=r"a\.jsonl: it became shorter"):
        list(block.records("text"))


def test_a_file_without_a_readable_record_is_named(tmp_path):
    for data, words in (
        (b'{\n "text": "one"\n}', r"a\.json, line 1: not JSON: .*one record a line is expected"),
        (b"", "It is empty"),
        (b"[]", "It is empty"),
        (b"[1, 2]", r"a\.json, record 1: expected a JSON object, found int"),
        (b'[{"text": "x"},\n{"text": "x"}, {"text"', r"a\.json: not JSON: .* line 2"),
    ):
        (tmp_path / "a.json").write_bytes(data)
        with pytest.raises(CorpusError, match=words):
            open_source(CorpusSource(str(tmp_path / "a.json")))


@pytest.mark.parametrize("column", [None, "text"])
def test_two_columns_of_one_name_are_named(tmp_path, column):
    pq.write_table(
        pa.Table.from_arrays([pa.array(["x"]), pa.array(["y"])], names=["text", "text"]), tmp_path / "a.parquet"
    )
    with pytest.raises(CorpusError, match=r"a\.parquet: two columns have one name"):
        open_source(CorpusSource(str(tmp_path / "a.parquet"), column=column))


def test_text_documents_end_at_blank_lines():
    paragraph = b"line one\nline two\n\n"
    for start, stop in text_documents(paragraph * 500)[:-1]:
        assert (start % len(paragraph), stop % len(paragraph)) == (0, 0)
        assert 4096 <= stop - start < 4096 + 2 * len(paragraph)


@given(st.binary(max_size=400) | st.text(max_size=300).map(str.encode), st.integers(1, 40), st.integers(8, 80))
def test_text_is_never_lost_or_cut_within_a_character(data, fill, most):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records, "TEXT_DOCUMENT_BYTES", fill)
        patch.setattr(records, "MAX_PARAGRAPH_BYTES", most)
        documents = text_documents(data)
    assert b"".join(data[start:stop] for start, stop in documents) == data
    assert all(0 < stop - start <= most for start, stop in documents)
    try:
        data.decode()
    except UnicodeDecodeError:
        return
    for start, stop in documents:
        data[start:stop].decode()


def test_cut_text_prefers_blank_line_then_line_then_space_then_character():
    assert cut_text(b"a\n\nb\nc d") == 3
    assert cut_text(b"ab\nc d") == 3
    assert cut_text(b"ab cd") == 3
    assert cut_text("abé".encode()) == 2
    assert cut_text(b"abcd") == 4
    assert cut_text(b"\xff" * 8) > 0


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
def test_text_in_many_blocks_is_cut_at_blank_lines(tmp_path, monkeypatch, name):
    monkeypatch.setattr(records, "BLOCK_BYTES", 100_000)
    text = "\r\n\n\n" + "\n\n".join(f"Paragraph {number}: {'word ' * (number % 90)}größer." for number in range(3000))
    (tmp_path / name).write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    documents = values(tmp_path / name)
    assert "".join(documents) == text
    assert all(document.endswith("\n\n") for document in documents[:-1])


def test_undecodable_text_is_named_by_line(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"first\nsecond\nthird \xe9\n" + b"x" * 5000 + b"\n\nand more\n")
    assert faults(path) == [(f"{path}, line 3", "not UTF-8 text: byte 0xe9, invalid continuation byte")]


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le"])
@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.jsonl"])
def test_utf_16_without_its_mark_is_not_taken_for_text(tmp_path, encoding, name):
    data = '{"text": "Hello"}\n'.encode(encoding)
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    with pytest.raises(CorpusError, match=f"{name}: not UTF-8 text: NUL among its first bytes.* Write it in UTF-8"):
        values(tmp_path / name)


@pytest.mark.parametrize("setting", ["column", "split"])
def test_text_files_have_no_columns_no_splits_and_do_not_mix(tmp_path, setting):
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(UsageError, match=setting):
        open_source(CorpusSource(str(tmp_path / "a.txt"), **{setting: "text"}))
    (tmp_path / "b.jsonl").write_bytes(jsonl([{"text": "x"}]))
    with pytest.raises(UsageError, match="two sources"):
        open_source(CorpusSource(str(tmp_path)))


def test_parse_source(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    parsed = parse_source("chat=HuggingFaceH4/ultrachat_200k,split=train_sft,weight=3,max-tokens=50")
    assert parsed == CorpusSource("HuggingFaceH4/ultrachat_200k", "chat", 3.0, split="train_sft", max_tokens=50)
    limited = parse_source("x.jsonl,max-tokens=1.5M,max-documents=2k")
    assert limited == CorpusSource("x.jsonl", max_tokens=1_500_000, max_documents=2000)
    assert [amount(text) for text in ("5", "500k", "1.5B", "1_000")] == [5, 500_000, 1_500_000_000, 1000]
    assert parse_source("org/data").name == "data"
    assert parse_source("some/code-*.jsonl.gz").name == "code-"
    assert parse_source("some/code.jsonl.zst").name == "code"
    (tmp_path / "a[1].jsonl").touch()
    assert parse_source("a[1].jsonl").name == "a[1]"
    assert CorpusSource(tmp_path / "b.txt") == CorpusSource(str(tmp_path / "b.txt"))
    assert parse_source("a,b.jsonl,column=body").location == "a,b.jsonl"
    (tmp_path / "k=v.jsonl").write_bytes(b"")
    assert parse_source("k=v.jsonl").location == "k=v.jsonl"


def test_parse_source_refuses():
    for spec, words in (
        ("org/x,colum=a", "colum"),
        ("org/x,weight=heavy", "weight"),
        ("org/x,weight=-1", "weight"),
        ("org/x,weight=1,weight=2", "weight is given twice"),
        ("org/x,roles=user", "roles"),
        ("org/x,sample=2", "sample"),
        *((f"org/x,max-documents={text}", "max_documents") for text in ("0", "-1", "1.5", "k", "ten")),
        ("", "dataset id, file, folder or glob"),
        ("-", "standard input is not read"),
    ):
        with pytest.raises(UsageError, match=words):
            parse_source(spec)
