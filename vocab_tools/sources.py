"""Sources of text: as a user names them, and opened.

    "[NAME=]LOCATION[,KEY=VALUE...]"  → CorpusSource   `parse_source`
    CorpusSource                      → OpenSource     `open_source`: its files or dataset, the column, what it holds
    OpenSource                        → Block          `OpenSource.blocks`, which records.py reads

Text and JSON lines are read by records.py, here and on the Hub; tables of the Hub are streamed by `datasets`, shard by
shard and never downloaded whole. HF_TOKEN, HF_ENDPOINT, HF_HOME and HF_HUB_OFFLINE work as usual.
"""

from __future__ import annotations

import glob
import itertools
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from .errors import CorpusError, EagleSlimError, UsageError
from .files import expand_home, regular_file
from .hub import causes_of, keep_limit, plain, trouble_of
from .messages import ChatError, kind_of, messages_in_text, normalise_messages
from .records import BATCH_ROWS, PACKED, SEPARATORS, BadRecord, Block, file_blocks, parquet_blocks, reading, rows_blocks

Roles = Literal["assistant", "all"]
Kind = Literal["text", "chat"]

CHAT_COLUMNS = ("messages", "conversations", "conversation")
TEXT_COLUMNS = ("text", "content")
FORMATS = (".jsonl", ".ndjson", ".json", ".txt", ".csv", ".tsv", ".parquet")
READABLE = f"{', '.join(FORMATS[:-1])}, each also packed ({', '.join(PACKED)}), and .parquet"

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9}
_AMOUNT = re.compile(r"(\d+(?:\.\d+)?)([kmgb]?)", re.IGNORECASE)
_PRINTED_CHAT = re.compile(r"\s*\[\s*\{'(role|from|content|value)':")
_COMMIT = re.compile(r"@([0-9a-f]{40})(?:/|$)")
# Records in which a column's kind is looked for.
_ROWS_LOOKED_AT = 1000
_NETWORK = ("huggingface_hub", "httpx", "httpx2", "requests", "aiohttp")


@dataclass(frozen=True)
class CorpusSource:
    """One source of text.

    Attributes:
        location, name: id of a Hub dataset, or a local file, folder or glob, of which a name is made if none is given.
        weight: its share when sources are mixed, relative to the others.
        config, split, revision: of a Hub dataset; by default the only split, or "train".
        column: the column with the text or the chat; None: found by looking at the first records.
        roles: of chats, what is counted: "assistant" turns with their end-of-turn token, or "all" the rendered text.
        max_documents, max_tokens: stop with the document that reaches this number.
        sample: share of the documents to take, drawn by the seed; None: all.

    Raises UsageError for a value out of range.
    """

    location: str
    name: str = ""
    weight: float = 1.0
    config: str | None = None
    split: str | None = None
    revision: str | None = None
    column: str | None = None
    roles: Roles = "assistant"
    max_documents: int | None = None
    max_tokens: int | None = None
    sample: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "location", os.fspath(self.location))
        if self.location in ("", "-"):
            expected = "A source is a dataset id, file, folder or glob; standard input is not read"
            raise UsageError(f"{expected}. Write its text to a file.")
        if not self.name:
            name = Path(self.location).name if looks_local(self.location) else self.location.rsplit("/", 1)[-1]
            for suffix in (*PACKED, *FORMATS):
                name = name.removesuffix(suffix)
            # What is left of a glob; a file may well be called a[1].jsonl.
            if not os.path.exists(expand_home(self.location)):
                name = name.strip("*?[]. ")
            object.__setattr__(self, "name", name or "corpus")
        rules = (
            ("weight", 0 < self.weight < float("inf"), "a number above 0"),
            ("roles", self.roles in ("assistant", "all"), "`assistant` or `all`"),
            ("max_documents", self.max_documents is None or self.max_documents >= 1, "at least 1"),
            ("max_tokens", self.max_tokens is None or self.max_tokens >= 1, "at least 1"),
            ("sample", self.sample is None or 0 < self.sample <= 1, "a number above 0 and at most 1"),
        )
        for setting, holds, expected in rules:
            if not holds:
                found = getattr(self, setting)
                raise UsageError(f"source {self.name}: {setting}: expected {expected}, found {found!r}.")


def amount(text: str) -> int:
    """Read a whole number above 0, or one with a unit (500k, 10M, 1.5B); raises ValueError."""
    match = _AMOUNT.fullmatch(text.strip().replace("_", ""))
    number = float(match[1]) * _UNITS[match[2].lower()] if match else 0.0
    if number < 1 or number != int(number):
        raise ValueError(f"{text!r} is not a number above 0 such as 5000, 500k, 10M or 1.5B")
    return int(number)


_CONVERTERS: Mapping[str, Any] = {"weight": float, "max_documents": amount, "max_tokens": amount, "sample": float}
_KEYS = tuple(item.name for item in fields(CorpusSource) if item.name not in ("location", "name"))


def parse_source(spec: str) -> CorpusSource:
    """Parse `[NAME=]LOCATION[,KEY=VALUE...]`.

    Example: `chat=HuggingFaceH4/ultrachat_200k,split=train_sft,weight=3` or `code=src/*.jsonl,column=content`.
    Keys are the fields of `CorpusSource`, with hyphens or underscores. Raises UsageError for another key or value.
    """
    location, *settings = spec.split(",")
    # A comma may belong to the path: take settings from the right only.
    while settings and "=" not in settings[0]:
        location = f"{location},{settings.pop(0)}"
    name, equals, rest = location.partition("=")
    is_named = equals and "/" not in name and not Path(location).exists()
    name, location = (name, rest) if is_named else ("", location)
    chosen: dict[str, Any] = {}
    for setting in settings:
        key, _, value = setting.partition("=")
        key = key.strip().replace("-", "_")
        if key not in _KEYS:
            raise UsageError(f"source {spec!r}: unknown key {key!r}. Known keys: {', '.join(_KEYS)}.")
        if key in chosen:
            raise UsageError(f"source {spec!r}: {key} is given twice.")
        try:
            chosen[key] = _CONVERTERS.get(key, str)(value.strip())
        except (ValueError, KeyError) as error:
            raise UsageError(f"source {spec!r}: {value!r} is not a value for {key}.") from error
    return CorpusSource(location=location.strip(), name=name.strip(), **chosen)


@dataclass(frozen=True)
class SourceFile:
    """One file: its path, or its address on the Hub; its name in provenance; its size in bytes where it is local."""

    path: str
    name: str
    size: int | None = None


def looks_local(location: str) -> bool:
    """Report whether a location is a path or a glob rather than the id of a Hub dataset."""
    if location.startswith((".", "/", "~")) or glob.has_magic(location):
        return True
    return _format_of(location) != "" or expand_home(location).exists()


def _format_of(path: str) -> str:
    """Return the end of a name, without that of a packed file: one of FORMATS, or ""."""
    stem, suffix = os.path.splitext(path.lower())
    if suffix in PACKED:
        suffix = os.path.splitext(stem)[1].replace(".parquet", "")
    return suffix if suffix in FORMATS else ""


def find_files(location: str) -> tuple[SourceFile, ...]:
    """List the files of a path, folder (searched through) or glob, by name; CorpusError for none, or another kind."""
    path = expand_home(location)
    base = path if path.is_dir() else path.parent
    if path.is_dir():
        # Hidden files, and other formats, do not belong to the corpus.
        paths = [path / name for name in glob.glob("**/*", root_dir=path, recursive=True) if _format_of(name)]
    elif path.exists():
        paths = [path]
    elif glob.has_magic(location):
        paths = [Path(name) for name in glob.glob(str(path), recursive=True)]
        while glob.has_magic(str(base)):
            base = base.parent
    else:
        raise CorpusError(f"{location}: no such file or folder.")
    if not (paths := [file for file in paths if not file.is_dir()]):
        raise CorpusError(f"{location}: no corpus file is there. Readable: {READABLE}.")
    # A folder and a file are read once, however many links lead there; a file comes before its links.
    folders = {(os.path.realpath(file.parent), file.name): file for file in sorted(paths, reverse=True)}
    once: dict[object, Path] = {}
    for (folder, name), file in sorted(folders.items(), key=lambda item: (item[1].is_symlink(), item[1])):
        state = file.stat() if file.exists() else None
        once.setdefault((folder, name) if state is None else (state.st_dev, state.st_ino), file)
    unpacked = sorted(file.with_suffix("") if file.suffix.lower() in PACKED else file for file in once.values())
    if twice := next((one for one, other in itertools.pairwise(unpacked) if one == other), None):
        raise CorpusError.at(twice, "is there packed and unpacked. Give a glob of one kind, to count it once.")
    files = []
    for file in sorted(once.values()):
        if not _format_of(file.name):
            raise CorpusError.at(file, f"unknown kind of file. Readable: {READABLE}.")
        size = regular_file(file, CorpusError).stat().st_size
        files.append(SourceFile(str(file.absolute()), file.relative_to(base).as_posix(), size))
    return tuple(files)


@dataclass(frozen=True)
class OpenSource:
    """An opened source: what it holds, and how to read it.

    Attributes:
        kind: "text", or "chat" where the column holds messages.
        column: "" for plain text, and for all columns before one is chosen.
        origin: JSON for provenance, without paths or times.
        table: a table of the Hub, as `datasets` streams it; else there are files.
    """

    source: CorpusSource
    kind: Kind
    column: str
    origin: dict[str, Any]
    files: tuple[SourceFile, ...]
    table: Any = field(default=None, repr=False)

    @property
    def size(self) -> int | None:
        """Bytes on disk, None when not known."""
        return None if self.is_remote else sum(file.size or 0 for file in self.files)

    @property
    def is_remote(self) -> bool:
        """Whether it is read from the Hub."""
        return "dataset" in self.origin

    @property
    def num_shards(self) -> int:
        """Number of files, or of parts of the table."""
        return len(self.files) if self.table is None else self.table.num_shards

    def blocks(self) -> Iterator[Block]:
        """Yield the blocks of all shards in order; raises CorpusError."""
        for shard in range(self.num_shards):
            yield from self.shard_blocks(shard)

    def shard_blocks(self, shard: int) -> Iterator[Block]:
        """Yield the blocks of one shard; raises CorpusError."""
        location = self.source.location
        with hub_errors(location) if self.is_remote else reading(self.files[shard].path):
            if self.table is None:
                file = self.files[shard]
                if _format_of(file.path) == ".parquet":
                    yield from parquet_blocks(file.path, shard, file.size or 0, self.column)
                else:
                    yield from file_blocks(file.path, shard, _format_of(file.path))
                return
            stream = self.table.shard(num_shards=self.num_shards, index=shard)
            if self.column in (stream.column_names or ()):
                stream = stream.select_columns([self.column])
            where = f"{location}, split {self.origin['split']}, shard {shard}"
            yield from rows_blocks(stream.with_format("arrow").iter(BATCH_ROWS), self.column, shard, where)

    def is_plain(self, shard: int) -> bool:
        """Report whether the blocks of a shard are byte ranges of a local file, and hold no data."""
        return not self.is_remote and self.files[shard].path.lower().endswith((".jsonl", ".ndjson", ".txt"))


def open_source(source: CorpusSource) -> OpenSource:
    """Find the files or dataset of a source, and choose the column to read; CorpusError where it cannot be read.

    Raises UsageError for a setting that does not fit, and where no column stands out.
    """
    opened = _open_files(source) if looks_local(source.location) else _open_dataset(source)
    if opened.table is None and all(_format_of(file.path) == ".txt" for file in opened.files):
        if source.column is not None:
            raise UsageError(f"{source.location}: plain text has no columns; leave out column={source.column}.")
        return opened
    row = _first_row(opened)
    printed = {name for name, value in row.items() if isinstance(value, str) and _PRINTED_CHAT.match(value)}
    column, kind = _choose_column(source, row, printed)
    if column in printed:
        advice = "Write them as JSON (`json.dumps`), or name another column with ,column=NAME behind the source."
        raise UsageError.at(source.location, f"column {column!r} holds chats as Python prints them. {advice}")
    return replace(opened, column=column, kind=kind, origin={**opened.origin, "column": column})


def _open_files(source: CorpusSource) -> OpenSource:
    for setting in ("config", "split", "revision"):
        if getattr(source, setting) is not None:
            raise UsageError(f"{source.location}: these are local files, and {setting} is for Hub datasets only.")
    files = find_files(source.location)
    formats = {_format_of(file.path) for file in files}
    if ".txt" in formats and len(formats) > 1:
        advice = "Give them as two sources, each with a glob of its own."
        raise UsageError.at(source.location, f".txt files have no columns, the others have. {advice}")
    return OpenSource(source, "text", "", {"column": None}, files)


def _open_dataset(source: CorpusSource) -> OpenSource:
    import datasets

    location, offline = source.location, bool(datasets.config.HF_HUB_OFFLINE)
    with hub_errors(location):
        builder = datasets.load_dataset_builder(location, source.config, revision=source.revision)
        config = builder.config
        commit = _COMMIT.search(str(builder.base_path or "")) or _COMMIT.search(str(config.data_files))
        revision = commit[1] if commit else source.revision
        origin = {"dataset": location, "config": config.name, "revision": revision}
        kind = type(builder).__module__.rpartition(".")[2]
        changed = {item.name for item in fields(config) if getattr(config, item.name) != item.default}
        changed -= {"sep", "delimiter", *(item.name for item in fields(datasets.BuilderConfig))}
        # Read record by record: see records.py. What else its card says, as `encoding` or `field`, the builder heeds.
        if kind in ("json", "text", "csv") and not changed and not offline:
            split = _choose_split(location, source.split, list(map(str, config.data_files)))
            paths = map(str, config.data_files[split])
            files = tuple(SourceFile(path, path.rpartition("/")[2]) for path in paths)
            forms = {_format_of(file.path) for file in files}
            if "" not in forms and (kind != "csv" or {config.sep} == {SEPARATORS.get(form) for form in forms}):
                return OpenSource(source, "text", "", {**origin, "split": split, "column": None}, files)
        # The commit, not the branch, so that the stream reads the files that were looked at.
        loaded: Any = datasets.load_dataset(location, source.config, revision=revision, streaming=not offline)
        split = _choose_split(location, source.split, list(loaded))
        table = loaded[split].to_iterable_dataset() if offline else loaded[split]
    return OpenSource(source, "text", "", {**origin, "split": split, "column": None}, (), table)


def _choose_split(location: str, split: str | None, present: list[str]) -> str:
    chosen = split or (present[0] if len(present) == 1 else "train")
    if chosen not in present:
        problem = "name a split, one of" if split is None else f"there is no split {split!r}; it has"
        raise UsageError(f"{location}: {problem} {', '.join(present)}.")
    return chosen


@contextmanager
def hub_errors(location: str) -> Iterator[None]:
    """Turn what `datasets` and the network raise into errors a user can act on."""
    keep_limit()
    try:
        yield
    except EagleSlimError:
        raise
    except Exception as error:
        if any(type(cause).__module__.partition(".")[0] in _NETWORK for cause in causes_of(error)):
            raise CorpusError(f"{trouble_of(error, location)}\nLocal files always work.") from error
        if isinstance(error, ValueError) and ("Config name is missing" in str(error) or "BuilderConfig" in str(error)):
            problem = f"{plain(error, 1000)}. Name one with ,config=NAME behind the source."
            raise UsageError(f"{location}: {problem}") from error
        problem = f"{location}: cannot be read as a dataset: {plain(error)}."
        if isinstance(error, ConnectionError):
            problem += " Without the network, or with HF_HUB_OFFLINE, only what is in the cache already can be read."
        elif isinstance(error, FileNotFoundError):
            problem += " Check the spelling; a private or gated dataset needs access, and HF_TOKEN or `hf auth login`."
        raise CorpusError(f"{problem} Local files always work.") from error


def _first_row(opened: OpenSource) -> dict[str, Any]:
    """Return the first row, with nulls filled in from the next rows while a column that may be chosen is null."""
    source = opened.source
    wanted = (*CHAT_COLUMNS, *TEXT_COLUMNS) if source.column is None else (source.column,)
    first: dict[str, Any] | None = None
    fault = ""
    rows = ((block, number, row) for block in opened.blocks() for number, row in block.records(None))
    for block, number, row in itertools.islice(rows, _ROWS_LOOKED_AT):
        if isinstance(row, BadRecord):
            fault = fault or f"{block.place(number)}: {row.reason}."
            continue
        first = {**row, **{column: value for column, value in (first or {}).items() if value is not None}}
        if all(first[column] is not None for column in wanted if column in first):
            break
    if first is None:
        raise CorpusError.at(source.location, f"no record can be read. {fault or 'It is empty.'}")
    return first


def _choose_column(source: CorpusSource, row: Mapping[str, Any], printed: set[str]) -> tuple[str, Kind]:
    """Return the column meant, maybe a printed one, and its kind, by the source's setting or a row of `_first_row`."""
    names = (name if isinstance(value, str) else f"{name} ({kind_of(value)})" for name, value in row.items())
    has = f"The records have {', '.join(names)}."
    if source.column is not None:
        if source.column not in row:
            raise UsageError(f"{source.location}: there is no column {source.column!r}. {has}")
        return source.column, _kind(row[source.column])
    chats = [column for column in CHAT_COLUMNS if _kind(row.get(column)) == "chat"]
    if chats := chats or [column for column in CHAT_COLUMNS if column in printed]:
        return chats[0], "chat"
    for column in TEXT_COLUMNS:
        # A message a row is a part of a chat, of which users wrote a part, too. Not all JSON with a "from" is a chat.
        if isinstance(row.get(column), str) and "role" not in row:
            with suppress(ChatError):
                return column, "chat" if normalise_messages(row[column])[0]["content"] else "text"
            return column, "text"
    strings = [column for column, value in row.items() if isinstance(value, str)]
    doubtful = {column for column, value in row.items() if value is None or isinstance(value, list | dict)}
    doubtful |= {*CHAT_COLUMNS, *TEXT_COLUMNS} & row.keys() - {*strings}
    # Beside a null, a list or a column of a usual name, a lone string is as likely the id of the record.
    if len(strings) == 1 and not doubtful:
        return strings[0], _kind(row[strings[0]])
    raise UsageError(f"{source.location}: say which column holds the text, with ,column=NAME behind the source. {has}")


def _kind(value: Any) -> Kind:
    is_chat = isinstance(value, list) or (isinstance(value, str) and messages_in_text(value) is not None)
    return "chat" if is_chat else "text"
