"""JSON files that hold one array of records, as ShareGPT is published, read as JSON lines.

Between two records stand a comma and white space. With the last byte between them turned into a line end, and with
spaces for the comma and for all other line ends, the bytes are JSON lines in which every record has kept its place. No
string holds a line end; one that does, against the rules, holds a space instead.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

from .blocks import BLOCK_BYTES, MAX_RECORD_BYTES
from .packed import fault_of

_BEGIN = re.compile(rb"(?:\xef\xbb\xbf)?\s*\[\s*")
# Strings whole, since what they hold is no structure. A string is one only before what may follow it: behind a quote
# that is missing or one too many, text and strings change places, and a quote taken alone sets that right.
_OPEN_STRING = rb'"[^"\\]*(?:\\.[^"\\]*)*'
_STRUCTURE = re.compile(_OPEN_STRING + rb'"(?=\s*(?:[,:}\]]|\Z))|,\s*|\\.|["{}\[\]]', re.DOTALL)
_GOES_ON = re.compile(_OPEN_STRING + rb"\\?\Z", re.DOTALL)


@dataclass(frozen=True)
class ArrayPiece:
    """Records of an array that follow each other, or what ends the reading of the file.

    Attributes:
        start, stop: byte offsets in the (decompressed) file. Reading goes on at `stop`; of the last piece that is one
            past the end, so that neither the end of the array nor a fault is met again.
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
    """Cut an array into pieces of a few megabytes; one fault, the last piece, where it cannot be followed to its end.

    Args:
        stream: the file, at byte `start`.
        start: 0, or the `stop` of a piece.
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
                fault = "the array ends here, and the file goes on"
        elif ended:
            fault = fault or "the file ends within the array"
        elif len(held) > MAX_RECORD_BYTES:
            fault = f"no record of the array ends within {MAX_RECORD_BYTES:,} bytes from here on"
        is_last = fault is not None or close is not None
        end = position + len(held) + _rest(stream) + 1 if is_last else position
        if lines.strip():
            yield ArrayPiece(start, position if fault else end, lines)
        if fault is not None:
            yield ArrayPiece(position, end, b"", f"{fault}; the rest is not read")
        if is_last:
            return


def _structure(held: bytes, ended: bool) -> tuple[list[tuple[int, int]], int | None]:
    """Where commas and white space part two records, as (start, stop), and where the array is closed, if it is."""
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
