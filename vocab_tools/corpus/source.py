"""A source of text as a user names it: CorpusSource, and the grammar `[NAME=]LOCATION[,KEY=VALUE...]`."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from ..errors import UsageError
from ..files import expand_home
from .find import FORMATS, looks_local
from .packed import PACKED

Roles = Literal["assistant", "all"]

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9}
_AMOUNT = re.compile(r"(\d+(?:\.\d+)?)([kmgb]?)", re.IGNORECASE)


@dataclass(frozen=True)
class CorpusSource:
    """One source of text.

    Attributes:
        location: id of a Hub dataset, or a local file, folder or glob.
        name: how counts and reports call it; empty: made from the location.
        weight: its share when sources are mixed, relative to the others.
        config: configuration ("subset") of a Hub dataset.
        split: split of a Hub dataset; None: the only one, or "train".
        revision: branch, tag or commit of a Hub dataset.
        column: the column with the text or the chat; None: found by looking at the first record.
        roles: of chats, what is counted: "assistant" turns with their end-of-turn token, or "all" the rendered text.
        max_documents: stop after this many documents.
        max_tokens: stop with the document that reaches this many tokens.
        sample: share of the documents to take, drawn by the seed; None: all.
        shuffle: take the files or shards in an order drawn by the seed.

    Raises:
        UsageError: a value is out of range; fact `setting` names it.
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
    shuffle: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "location", os.fspath(self.location))
        if not self.location:
            raise UsageError(
                "A corpus source needs a location: a dataset id, file, folder or glob.", setting="location"
            )
        if not self.name:
            object.__setattr__(self, "name", _default_name(self.location))
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
                raise UsageError(
                    f"source {self.name}: {setting}: expected {expected}, found {found!r}.", setting=setting
                )


def _default_name(location: str) -> str:
    name = Path(location).name if looks_local(location) else location.rsplit("/", 1)[-1]
    for suffix in (*PACKED, *FORMATS):
        name = name.removesuffix(suffix)
    # What is left of a glob; a file may well be called a[1].jsonl.
    if not os.path.exists(expand_home(location)):
        name = name.strip("*?[]. ")
    return name or "corpus"


def amount(text: str) -> int:
    """Read a whole number above 0, or one with a unit: 500k, 10M, 1.5B.

    Raises:
        ValueError: it is not one.
    """
    found = _AMOUNT.fullmatch(text.strip().replace("_", "").replace(",", ""))
    number = float(found[1]) * _UNITS[found[2].lower()] if found else 0.0
    if number < 1 or number != int(number):
        raise ValueError(f"{text!r} is not a number above 0 such as 5000, 500k, 10M or 1.5B")
    return int(number)


_CONVERTERS: Mapping[str, Any] = {
    "weight": float,
    "max_documents": amount,
    "max_tokens": amount,
    "sample": float,
    "shuffle": lambda text: {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}[text],
}
HUB_SETTINGS = ("config", "split", "revision")
_KEYS = tuple(item.name for item in fields(CorpusSource) if item.name not in ("location", "name"))


def parse_source(spec: str) -> CorpusSource:
    """Parse `[NAME=]LOCATION[,KEY=VALUE...]`.

    Example: `chat=HuggingFaceH4/ultrachat_200k,split=train_sft,weight=3` or `code=src/*.jsonl,column=content`.
    Keys are the fields of `CorpusSource`; a hyphen may stand for an underscore.

    Raises:
        UsageError: an unknown key or a value of the wrong kind; fact `setting` is the key.
    """
    location, *settings = spec.split(",")
    # A comma may belong to the path: take settings from the right only.
    while settings and "=" not in settings[0]:
        location = f"{location},{settings.pop(0)}"
    name, equals, rest = location.partition("=")
    if equals and "/" not in name and not Path(location).exists():
        location = rest
    else:
        name = ""
    if location.strip() == "-":
        raise UsageError("Standard input is not read. Write the text to a file, and name the file.")
    chosen: dict[str, Any] = {}
    for setting in settings:
        key, _, value = setting.partition("=")
        key = key.strip().replace("-", "_")
        if key not in _KEYS:
            raise UsageError(f"source {spec!r}: unknown key {key!r}. Known keys: {', '.join(_KEYS)}.", setting=key)
        try:
            chosen[key] = _CONVERTERS.get(key, str)(value.strip())
        except (ValueError, KeyError) as error:
            raise UsageError(f"source {spec!r}: {value!r} is not a value for {key}.", setting=key) from error
    return CorpusSource(location=location.strip(), name=name.strip(), **chosen)


def with_unique_names(sources: Sequence[CorpusSource]) -> list[CorpusSource]:
    """Number the names that sources share: `data`, `data-2`, ..."""
    taken: dict[str, int] = {}
    renamed = []
    for source in sources:
        taken[source.name] = taken.get(source.name, 0) + 1
        number = taken[source.name]
        renamed.append(source if number == 1 else replace(source, name=f"{source.name}-{number}"))
    return renamed
