"""Errors of reading, converting and writing, one class per thing a user can do about it.

EagleSlimError                    exit code 1: what, where, expected, found, what to try
├── SourceError                   of `vocab_tools`: a folder or repository cannot be had
└── ConvertError
    ├── CheckpointError           a weights file is damaged, incomplete or unsafe: fetch it again, or another one
    ├── UnsupportedHeadError      a head of a kind that is not converted: another head
    ├── MismatchError             head, target, tokenizer and vocabulary do not belong together
    ├── ArtifactError             a converted head breaks its format: convert it again
    └── OutputError               the result cannot be written: another folder, more disk
        └── OutputExistsError     exit code 2: the output is there already: --force or another name
"""

from __future__ import annotations

from eagle_slim.vocab_tools.errors import EagleSlimError
from eagle_slim.vocab_tools.errors import SourceError as SourceError


class ConvertError(EagleSlimError):
    """Base of the errors of this package."""


class CheckpointError(ConvertError):
    """A weights file is damaged, incomplete, unsafe, or does not hold what its index claims."""


class UnsupportedHeadError(ConvertError):
    """The draft head is of a kind, or holds a tensor, that is not converted."""


class MismatchError(ConvertError):
    """Head, target, tokenizer and vocabulary do not belong together."""

    @classmethod
    def of_key(cls, where: str, key: str, expected: str, found: object) -> MismatchError:
        """Build the error about a value in a head's config.json."""
        return cls.at(where, f"{key}: expected {expected}, found {found!r}.\nCorrect config.json.")


class ArtifactError(ConvertError):
    """A converted head breaks the artifact format."""


class OutputError(ConvertError):
    """The result cannot be written: no space, no permission, a read-only disk."""


class OutputExistsError(OutputError):
    """The output exists and nothing said that it may be replaced; nothing was read or written."""

    exit_code = 2
