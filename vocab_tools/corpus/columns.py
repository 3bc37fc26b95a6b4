"""Which column of a corpus holds the text or the chats, found out from its first records."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from ..chats import kind_of, messages_in_text
from ..errors import CorpusError, UsageError
from .source import CorpusSource

Kind = Literal["text", "chat"]

CHAT_COLUMNS = ("messages", "conversations", "conversation")
TEXT_COLUMNS = ("text", "content")
# Records in which a column's kind is looked for.
_ROWS_LOOKED_AT = 1000


def first_values(rows: Iterable[Mapping[str, Any]], wanted: Sequence[str]) -> dict[str, Any] | None:
    """Return the first row, its nulls filled in from the next rows until no column of `wanted` is null.

    A null does not show what its column holds, and real tables begin with nulls. None without rows.
    """
    found: dict[str, Any] | None = None
    for row in itertools.islice(rows, _ROWS_LOOKED_AT):
        known = {} if found is None else {column: value for column, value in found.items() if value is not None}
        found = {**row, **known}
        if all(found[column] is not None for column in wanted if column in found):
            break
    return found


def wanted_columns(source: CorpusSource) -> tuple[str, ...]:
    """Return the columns whose values decide which column is read."""
    return (*CHAT_COLUMNS, *TEXT_COLUMNS) if source.column is None else (source.column,)


def choose_column(source: CorpusSource, row: Mapping[str, Any]) -> tuple[str, Kind]:
    """Choose the column to read, which the source may name, by a row of `first_values`; and say what it holds.

    Raises:
        UsageError: there is no such column, or no column stands out; fact `columns` lists what there is.
        CorpusError: the column holds neither text nor chats.
    """
    columns = list(row)
    has = f"The records have {', '.join(columns)}."
    if source.column is not None:
        if source.column not in row:
            raise UsageError(
                f"{source.location}: there is no column {source.column!r}. {has}", column=source.column, columns=columns
            )
        return source.column, _kind(row[source.column])
    for column in CHAT_COLUMNS:
        if _kind(row.get(column)) == "chat":
            return column, "chat"
    for column in TEXT_COLUMNS:
        if isinstance(row.get(column), str):
            return column, "text"
    for column in (*CHAT_COLUMNS, *TEXT_COLUMNS):
        if not isinstance(row.get(column, ""), str):
            found = kind_of(row[column])
            raise CorpusError(
                f"{source.location}: column {column!r} holds {found} in the first records.", column=column, found=found
            )
    strings = [column for column, value in row.items() if isinstance(value, str)]
    # Beside a null or a list, which may be the text, a lone string is as likely the id of the record.
    if len(strings) == 1 and not any(value is None or isinstance(value, (list, dict)) for value in row.values()):
        return strings[0], _kind(row[strings[0]])
    raise UsageError(
        f"{source.location}: say which column holds the text, as in `,column=NAME`. {has}", columns=columns
    )


def _kind(value: Any) -> Kind:
    is_chat = isinstance(value, list) or (isinstance(value, str) and messages_in_text(value) is not None)
    return "chat" if is_chat else "text"
