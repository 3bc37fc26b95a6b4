"""JSON files that hold one array of records, as ShareGPT is published, read as JSON lines.

A comma and white space separate two records. The last byte between them is turned into a line end, the comma and all
other line ends into spaces. The bytes are then JSON lines in which every record has kept its position. Valid strings
hold no line ends; in an invalid one, the line end becomes a space.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

from .blocks import BLOCK_BYTES, MAX_RECORD_BYTES
from .packed import fault_of

_BEGIN = re.compile(rb"(?:\xef\xbb\xbf)?\s*\[\s*")
# Strings are matched whole, because commas and brackets in them are not structure. They count as strings only before
# what may follow a string: after a missing or surplus quote, text and strings swap places, and a quote matched alone
# swaps them back.
_OPEN_STRING = rb'"[^"\\]*(?:\\.[^"\\]*)*'
_STRUCTURE = re.compile(_OPEN_STRING + rb'"(?=\s*(?:[,:}\]]|\Z))|,\s*|\\.|["{}\[\]]', re.DOTALL)
_GOES_ON = re.compile(_OPEN_STRING + rb"\\?\Z", re.DOTALL)


@dataclass(frozen=True)
class ArrayPiece:
    """Consecutive records of an array, or what makes the rest of the file unreadable.

    Attributes:
        start, stop: byte offsets in the (decompressed) file. Reading continues at `stop`; for the last piece that is
            one past the end, so that neither the end of the array nor a fault is met again.
        lines: the records as JSON lines, each at its offset from `start`; b"" for a fault.
        fault: what is wrong with the rest of the file; None for records.
    """

    start: int
    stop: int
    lines: bytes
    fault: str | None = None


def begins_array(head: bytes) -> bool:
    """Whether the first bytes of a file begin an array."""
    return _BEGIN.match(head) is not None


def array_pieces(stream: BinaryIO, start: int) -> Iterator[ArrayPiece]:
    """Cut an array into pieces of a few megabytes; the last piece is a fault where the array cannot be read to its end.

    The stream is at byte `start`: 0, or the `stop` of a piece.
    """
    held, position = b"", start
    while True:
        # Filled up to a block, so that pieces end at the same places wherever reading began.
        wanted = BLOCK_BYTES - len(held) if len(held) < BLOCK_BYTES else BLOCK_BYTES
        more = stream.read(wanted)
        fault = fault_of(stream)
        held += more
        ended = len(more) < wanted
        if position == 0 and (begin := _BEGIN.match(held)):
            position, held = begin.end(), held[begin.end() :]
        gaps, close = _structure(held, ended)
        cut = close if close is not None else gaps[-1][1] if gaps else 0
        lines, held = _as_lines(held[:cut], gaps), held[cut:]
        start, position = position, position + cut
        if close is not None:
            held += stream.read(BLOCK_BYTES)
            fault = fault_of(stream)
            if held[1:].strip():
                fault = "the array ends here, but the file continues"
        elif ended:
            fault = fault or "the file ends within the array"
        elif len(held) > MAX_RECORD_BYTES:
            fault = f"no record of the array ends within {MAX_RECORD_BYTES:,} bytes from here"
        is_last = fault is not None or close is not None
        end = position + len(held) + _rest(stream) + 1 if is_last else position
        if lines.strip():
            yield ArrayPiece(start, position if fault else end, lines)
        if fault is not None:
            yield ArrayPiece(position, end, b"", f"{fault}; the rest is not read")
        if is_last:
            return


def _structure(held: bytes, ended: bool) -> tuple[list[tuple[int, int]], int | None]:
    """Return the (start, stop) of the gaps between records, and the position of the closing bracket, if it is there."""
    depth = 0
    found: list[tuple[int, int]] = []
    for match in _STRUCTURE.finditer(held):
        sign, stop = match[0][:1], match.end()
        if sign == b'"':
            is_alone = stop - match.start() == 1
            if is_alone and not ended and _GOES_ON.match(held, match.start()):
                # The string may end in what was not read yet.
                break
        elif sign in (b"{", b"["):
            depth += 1
        elif sign == b",":
            if depth == 0:
                if stop == len(held) and not ended:
                    break
                found.append(match.span())
        elif sign == b"\\":
            pass
        elif depth == 0:
            return found, match.start()
        else:
            depth -= 1
    return found, None


def _as_lines(records: bytes, gaps: list[tuple[int, int]]) -> bytes:
    lines = bytearray(records.replace(b"\n", b" "))
    for start, stop in gaps:
        lines[start] = ord(" ")
        lines[stop - 1] = ord("\n")
    return bytes(lines)


def _rest(stream: BinaryIO) -> int:
    """Number of bytes to the end of a stream, which are read."""
    size = 0
    while window := stream.read(BLOCK_BYTES):
        size += len(window)
    return size
