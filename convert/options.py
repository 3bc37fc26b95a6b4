"""Options of a conversion, as `eagle-convert` takes them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Literal, get_args

from eagle_slim.vocab_tools.errors import UsageError, check_choice
from eagle_slim.vocab_tools.files import expand_home
from eagle_slim.vocab_tools.ranking import check_share

from .artifact.manifest import Flavour
from .heads.open import D2tForm
from .rows.files import clean_subfolder
from .sources.builtin import EMBEDDED_HEAD_NAME
from .vocabulary_choice import VocabRequest

DraftVocabSize = int | Literal["full"]


@dataclass(frozen=True)
class ConvertOptions:
    """Options of a conversion; UsageError where they contradict each other, or a value means nothing.

    Attributes:
        draft_vocab: rows to keep, or several sizes; "full" normalises the head without cutting it.
        coverage: instead of a size, the share of the counted text that must be covered.
        target: folder or Hub repository. Default: what the head's files name, else the table of public heads.
        out: folder to write (for several sizes, the folder to write them in); default a name made of head and size.
        flavour: "lmdeploy" (EAGLE-3) or "sglang" (EAGLE-1/2) writes the architecture name that this engine alone reads.
        d2t_form: form of the head's own map, where it cannot be told.
        tap_layers: layers of the target whose inputs the head reads, where its files do not say it right.
    """

    draft_vocab: DraftVocabSize | list[DraftVocabSize] | tuple[DraftVocabSize, ...] | None = None
    coverage: float | None = None
    vocabulary: VocabRequest = field(default_factory=VocabRequest)
    target: str | Path | None = None
    tokenizer: str | Path | None = None
    revision: str | None = None
    subfolder: str | None = None
    out: str | Path | None = None
    force: bool = False
    flavour: Flavour = "default"
    d2t_form: D2tForm = "auto"
    tap_layers: Sequence[int] | None = None
    offline: bool = False

    def __post_init__(self) -> None:
        if (self.draft_vocab is None) == (self.coverage is None) or not self.sizes:
            problem = "Give the size of the draft vocabulary with --draft-vocab, or a --coverage to find one"
            raise UsageError(f"{problem}, and not both.")
        for size in self.sizes:
            if size not in (None, "full") and (type(size) is not int or size < 1):
                raise UsageError(f"--draft-vocab: expected a number of ids or 'full', found {size!r}.")
        if self.vocabulary.floors and (self.coverage is not None or "full" in self.sizes):
            raise UsageError("--floor needs a size of --draft-vocab, whose ids are chosen to hold it.")
        if self.coverage is not None:
            check_share("--coverage", self.coverage)
        if self.out == "":
            raise UsageError("--out: the name is empty. Name the folder to write.")
        clean_subfolder(self.subfolder)
        check_choice("flavour", self.flavour, get_args(Flavour))
        check_choice("d2t_form", self.d2t_form, get_args(D2tForm))

    @property
    def sizes(self) -> tuple[DraftVocabSize | None, ...]:
        """Rows of each artifact, in the order given; None where a coverage tells them."""
        if isinstance(self.draft_vocab, list | tuple):
            return tuple(dict.fromkeys(self.draft_vocab))
        return (self.draft_vocab,)

    def name_of(self, head: str | None, size: DraftVocabSize | None) -> str:
        """Name an artifact: `smollm2-135m-instruct-eagle3-v32000` for the built-in head at 32000 ids."""
        base = EMBEDDED_HEAD_NAME if head is None else os.path.basename(os.path.realpath(expand_home(head)))
        ending = "full" if size == "full" else f"v{size}"
        if size is None:
            ending = f"coverage{self.coverage}"
        flavour = () if self.flavour == "default" else (self.flavour,)
        return "-".join([base, *PurePosixPath(clean_subfolder(self.subfolder)).parts, ending, *flavour])

    def folder_of(self, name: str) -> Path:
        """Return the folder of an artifact of this name."""
        if self.out is None or len(self.sizes) > 1:
            return Path(self.out or "") / name
        return Path(self.out)
