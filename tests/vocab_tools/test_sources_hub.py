import gzip
import json
import time
from importlib import import_module

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from eagle_slim.vocab_tools import CorpusError, UsageError, count_tokens
from eagle_slim.vocab_tools.sources import CorpusSource, open_source
from huggingface_hub import constants
from support.hub_server import Fault, HubServer, connected
from support.tokenizers import llama3_like

# `datasets` and aiohttp leave files and sockets to the garbage collector.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

ROWS = 250
CARD = "---\nconfigs:\n- config_name: default\n  data_files: {}\n  {}\n---\n"
# By file and setting: what a card may say of how its file is read, a file that needs it, and its text.
SETTINGS = {
    ("train.csv", 'sep: ";"'): ("id;text\n7;a, b\n", "a, b"),
    ("train.csv", "encoding: latin-1"): ("id,text\n7,café\n".encode("latin-1"), "café"),
    ("train.csv", 'quotechar: "\'"'): ("id,text\n7,'a, b'\n", "a, b"),
    ("train.csv", "skiprows: 1"): ("made by hand\nid,text\n7,x\n", "x"),
    ("train.tsv", 'delimiter: "\\t"'): ("id\ttext\n7\t12\n", "12"),
    ("train.jsonl", "encoding: latin-1"): ('{"text": "café"}\n'.encode("latin-1"), "café"),
}
DATES = b'{"text": "2024-01-01"}\n{"text": "2024-01-02"}\n'


def parquet(shard):
    sink = pa.BufferOutputStream()
    rows = [{"text": f"shard {shard} row {row}", "id": row} for row in range(ROWS)]
    pq.write_table(pa.Table.from_pylist(rows), sink, row_group_size=100)
    return sink.getvalue().to_pybytes()


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    import_module("datasets")  # takes seconds; `connected` changes it where it is imported
    with HubServer() as server:
        server.add_dataset(
            "org/texts",
            {f"data/train-{shard:05d}-of-00003.parquet": parquet(shard) for shard in range(3)}
            | {"data/test-00000-of-00001.parquet": parquet(9)},
        )
        chats = [{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}] * 5
        server.add_dataset("org/chats", {"train.jsonl": "\n".join(json.dumps(chat) for chat in chats)})
        server.add_dataset("org/dates", {"train.jsonl.gz": gzip.compress(DATES)})
        server.add_dataset("org/fields", {"train.csv": "id,text\n7,2024-01-01\n8,NA\n9,12\n"})
        for number, ((file, setting), (content, _)) in enumerate(SETTINGS.items()):
            server.add_dataset(f"org/set-{number}", {file: content, "README.md": CARD.format(file, setting)})
        with connected(server, tmp_path_factory.mktemp("home")):
            yield server


def texts(source):
    opened = open_source(source)
    return [value for block in opened.blocks() for _, value in block.records(opened.column)]


def test_streams_every_shard_in_order(hub):
    source = CorpusSource("org/texts")
    assert texts(source) == [f"shard {shard} row {row}" for shard in range(3) for row in range(ROWS)]
    corpus = open_source(source)
    assert (corpus.kind, corpus.column, corpus.size) == ("text", "text", None)
    expected = {"dataset": "org/texts", "config": "default", "split": "train", "column": "text"}
    assert corpus.origin == expected | {"revision": hub.repos["dataset", "org/texts"].branches["main"]}
    assert texts(CorpusSource("org/texts", split="test"))[0] == "shard 9 row 0"
    assert list(corpus.blocks())[1].place(17) == "org/texts, split train, shard 1, row 17"


def test_only_what_a_limit_needs_is_fetched(hub):
    hub.requests.clear()
    count_tokens([CorpusSource("org/texts", max_documents=10)], llama3_like(), workers=0)
    assert hub.bytes_sent("train-00000-of-00003.parquet") > 0
    assert hub.bytes_sent("train-00002-of-00003.parquet") == 0
    within = count_tokens([CorpusSource("org/texts", max_documents=600)], llama3_like(), workers=0, held_out=0)
    assert within.sources[0].provenance["documents"] == 600


def test_json_lines_of_the_hub_are_read_as_lines(hub):
    counts = count_tokens([CorpusSource("org/chats")], llama3_like(), workers=0, held_out=0)
    turn = llama3_like().backend.encode("Hello<|eot_id|>").ids
    assert counts.sources[0].counts.tolist() == (5 * np.bincount(turn, minlength=counts.vocab_size)).tolist()
    assert counts.sources[0].provenance["files"] == [{"name": "train.jsonl", "bytes": None}]
    assert texts(CorpusSource("org/dates")) == ["2024-01-01", "2024-01-02"]
    # Fields, too.
    assert texts(CorpusSource("org/fields")) == ["2024-01-01", "NA", "12"]


def test_what_a_card_says_of_its_files_is_heeded(hub):
    for number, (_, text) in enumerate(SETTINGS.values()):
        assert texts(CorpusSource(f"org/set-{number}")) == [text]


def test_what_is_not_there_is_named(hub):
    for source, error, words in (
        (CorpusSource("org/missing"), CorpusError, "org/missing: .*HF_TOKEN"),
        (CorpusSource("org/texts", split="dev"), UsageError, "no split 'dev'; it has train, test"),
        (CorpusSource("org/texts", config="other"), UsageError, "other"),
        (CorpusSource("org/texts", column="body"), UsageError, "no column 'body'"),
    ):
        with pytest.raises(error, match=words):
            open_source(source)


@pytest.mark.parametrize(("name", "file"), [("org/texts", "00000-of-00003.parquet"), ("org/chats", "train.jsonl")])
def test_a_file_that_never_comes_is_given_up(hub, tmp_path, monkeypatch, name, file):
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.3)
    monkeypatch.setattr("datasets.config.STREAMING_READ_MAX_RETRIES", 1)
    monkeypatch.setattr("datasets.config.STREAMING_READ_RETRY_INTERVAL", 0)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    monkeypatch.setattr(hub, "faults", [(file, Fault(silent=True))])
    with connected(hub, tmp_path), pytest.raises(CorpusError, match="does not answer"):
        open_source(CorpusSource(name))


def test_offline_reads_what_was_prepared(hub, tmp_path):
    from datasets import load_dataset

    with connected(hub, tmp_path):
        load_dataset("org/texts")
        online = texts(CorpusSource("org/texts"))
    with connected(hub, tmp_path, offline=True):
        hub.requests.clear()
        assert texts(CorpusSource("org/texts")) == online
        assert hub.bytes_sent() == 0
        with pytest.raises(CorpusError, match="only what is in the cache already"):
            open_source(CorpusSource("org/chats"))
