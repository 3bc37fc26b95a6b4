"""Errors a user can act on: what, where, expected, found, what to try. All packages' errors derive from the base."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Self

INTERRUPTED = 130
"""Exit code of a command that Ctrl-C, SIGTERM or SIGHUP ended."""


def page(name: str) -> Path:
    """Return the path of a page such as ``docs/upstream.md``, which a clone and a wheel hold beside the packages."""
    return Path(__file__).resolve().parents[1] / name


class EagleSlimError(Exception):
    """Base of all errors raised on purpose; the message is complete and meant for the user."""

    exit_code = 1

    @classmethod
    def at(cls, where: str | Path, problem: str) -> Self:
        """Build the error about a file, a folder or a repository."""
        return cls(f"{printable(str(where))}: {problem}")


class UsageError(EagleSlimError):
    """The arguments are wrong or contradict each other; nothing was read or written."""

    exit_code = 2


class CorpusError(EagleSlimError):
    """A corpus file, line, column or dataset cannot be read."""


class SourceError(EagleSlimError):
    """A folder or a repository of the Hub is missing, closed to this user, or cannot be reached."""


class TokenizerError(EagleSlimError):
    """A tokenizer is missing, unusable, or differs from the one the data was made with."""


class MissingTokenizerFileError(TokenizerError):
    """A tokenizer has no tokenizer.json, perhaps files of another form."""


class VocabularyError(EagleSlimError):
    """Counts, a ranking or a token map break a rule of their format."""


def check_choice(option: str, value: object, choices: Collection[object]) -> None:
    """Raise `UsageError` for a value that is none of `choices`."""
    if value not in choices:
        names = ", ".join(map(repr, choices))
        raise UsageError(f"{option} = {value!r} is unknown; expected one of {names}.")


def printable(text: str) -> str:
    """Return a name or a token's text fit for one line of a terminal: what is not printable is escaped.

    For example a newline becomes `\\n`, the escape that begins a colour `\\x1b`, a zero-width space `\\u200b`, and a
    byte that `surrogateescape` kept `\\xe4`.
    """
    return "".join(character if character.isprintable() else _escaped(character) for character in text)


def _escaped(character: str) -> str:
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:
        return f"\\x{code - 0xDC00:02x}"
    return character.encode("unicode_escape").decode()


@contextmanager
def errors_of(path: str | Path) -> Iterator[None]:
    """Put the file's name before the message of a VocabularyError raised in the block."""
    try:
        yield
    except VocabularyError as error:
        raise VocabularyError(f"{path}: {error}") from error
