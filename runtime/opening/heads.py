"""Open a draft head: an artifact, or one as its authors published it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

import numpy as np
from eagle_slim.convert.errors import UnsupportedHeadError
from eagle_slim.convert.heads import open as published
from eagle_slim.convert.heads.artifact import Artifact
from eagle_slim.convert.heads.draft_head import DraftHead
from eagle_slim.convert.heads.open import D2tForm
from eagle_slim.convert.sources.builtin import EMBEDDED_TARGET_REPO, embedded_target_folder, load_embedded_counts
from eagle_slim.convert.sources.source import open_head_source
from eagle_slim.convert.targets.model import choose_target
from eagle_slim.vocab_tools.ranking import rank_vocabulary
from eagle_slim.vocab_tools.tokenizer import load_tokenizer
from eagle_slim.vocab_tools.vocabulary import DraftVocab
from numpy.typing import NDArray

from ..drafter.weights import choose_draft_ids
from ..errors import UsageError, check_choice, misfit
from ..settings import explain_unknown
from ..target.location import recorded_target


@dataclass(frozen=True)
class OpenedHead:
    """A head ready to be paired: an artifact's, or one as its authors published it."""

    head: DraftHead
    ranks: DraftVocab | None = None
    tokenizer_hash: str | None = None
    target_name: str | None = None
    """Repository or folder of the target; None where the head does not name it."""
    target_folder: str | None = None
    """Name of the local folder that the target was in when the head was converted."""
    folder: Path | None = None
    is_embedded: bool = False
    """Whether it is the unconverted head that the package carries."""

    def __post_init__(self) -> None:
        if self.head.kind == "dflash":
            problem = "is a DFlash draft; this runtime drafts with EAGLE heads.\nServe it with vLLM: method dflash."
            raise UnsupportedHeadError.at(self.head.location, problem)

    @cached_property
    def ranking(self) -> DraftVocab | None:
        """Ranking of the rows: the manifest's, or that of the built-in head by its own counts; None without either."""
        if not self.is_embedded:
            return self.ranks
        tokenizer = load_tokenizer(embedded_target_folder(), offline=True)
        return rank_vocabulary(load_embedded_counts(), tokenizer=tokenizer, target_vocab=self.head.target_vocab)

    def choose(self, draft_vocab: int | np.integer[Any] | DraftVocab | None) -> NDArray[np.int64]:
        """Choose the target ids to draft over, ascending; see `choose_draft_ids`."""
        if isinstance(draft_vocab, np.integer):
            draft_vocab = int(draft_vocab)
        needs_ranking = isinstance(draft_vocab, int) and draft_vocab != self.head.draft_vocab
        ranked = self.ranking if needs_ranking else self.ranks
        if ranked is None:
            return choose_draft_ids(self.head, draft_vocab, None)
        return choose_draft_ids(self.head, draft_vocab, ranked.target_ids, ranked.num_forced)

    def rank_rows(
        self, draft_ids: NDArray[np.int64], draft_vocab: int | np.integer[Any] | DraftVocab | None
    ) -> NDArray[np.int64] | None:
        """Return the rows of ``draft_ids`` (what `choose` gave for ``draft_vocab``) best first, int64 [draft_vocab].

        The first N of them are what `choose` gives for N. Ids that were never ranked come last. None without a ranking.
        """
        given = self.ranking if draft_vocab is None or isinstance(draft_vocab, (int, np.integer)) else draft_vocab
        if given is None or not given.ranked:
            return None
        place = np.full(self.head.target_vocab, len(given), dtype=np.int64)
        place[given.target_ids] = np.arange(len(given))
        return np.argsort(place[draft_ids], kind="stable")

    def target_location(self, revision: str | None = None) -> str | Path:
        """Return the folder or repository of the target that the head names. Raises `UsageError` for none."""
        if self.target_name is not None:
            is_built_in = self.target_name == EMBEDDED_TARGET_REPO and revision is None
            return embedded_target_folder() if is_built_in else self.target_name
        if self.target_folder is not None and self.folder is not None:
            return recorded_target(self.target_folder, self.folder)
        raise UsageError(f"Head {self.head.location} does not say which target it belongs to. Give the target.")


@explain_unknown({})
def open_head(
    head: str | Path | DraftHead | Artifact | None = None,
    *,
    revision: str | None = None,
    offline: bool = False,
    tap_layers: Sequence[int] | None = None,
    d2t_form: D2tForm = "auto",
) -> OpenedHead:
    """Open a head to be paired with a target; only its configuration and small tensors are read.

    ``head``: converted (folder or Hub id), or an unconverted EAGLE-1, -2 or -3 head; None is the built-in one.
    ``revision``: branch, tag or commit of its repository. ``offline``: use only what is on this machine.
    ``tap_layers``: decoder layers of the target whose inputs the head reads, where its files do not say so.
    ``d2t_form``: "offset" or "absolute", where the values of ``d2t`` do not tell (`eagle_slim.convert.open_head`).

    Raises `UsageError` for options of a head that settles them itself; `ConvertError` for one that cannot be had, is
    damaged, or is of a kind that is not drafted with.
    """
    if not isinstance(offline, bool):
        raise misfit("offline", "True or False", offline)
    check_choice("d2t_form", d2t_form, get_args(D2tForm))
    is_embedded, is_told = head is None, tap_layers is not None or d2t_form != "auto"
    if isinstance(head, (DraftHead, Artifact)):
        if is_told or revision is not None:
            raise UsageError("The head is loaded already. Leave revision, tap_layers and d2t_form out.")
    elif head is not None and not isinstance(head, (str, Path)):
        raise misfit("head", "a folder, the name of a Hub repository, or a loaded one", head)
    else:
        source = open_head_source(head, revision=revision, offline=offline)
        if source.manifest is None:
            head = published.open_head(source, d2t_form=d2t_form, tap_layers=tap_layers)
        elif is_told:
            problem = "is a converted head, whose manifest says which tap layers and map form it has"
            raise UsageError(f"{head} {problem}. Leave tap_layers and d2t_form out.")
        else:
            head = Artifact.load(source)
    if isinstance(head, Artifact):
        target = head.manifest.target
        name = EMBEDDED_TARGET_REPO if "wheel" in target else target.get("repo_id")
        return OpenedHead(head.head, head.manifest.ranks, head.tokenizer_hash, name, target.get("name"), head.folder)
    choice = choose_target(head, is_embedded)
    made_with = load_embedded_counts().tokenizer_hash if is_embedded else None
    name = None if choice is None else choice.name or EMBEDDED_TARGET_REPO
    return OpenedHead(head, tokenizer_hash=made_with, target_name=name, is_embedded=is_embedded)
