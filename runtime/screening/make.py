"""A screen for an artifact: states of its head on text, the factors, the recall on held-out states, and the file."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from eagle_slim.convert.artifact.additions import add_files
from eagle_slim.convert.artifact.artifact import Artifact, record_of
from eagle_slim.convert.conversion.vocab_choice import default_corpus
from eagle_slim.convert.errors import OutputExistsError
from eagle_slim.convert.head.screen_file import DOWN, PROJECT, ROWS, SCREEN_FORMAT, SCREEN_NAME, head_digest
from eagle_slim.convert.sources.builtin import embedded_chats, embedded_code_chats
from eagle_slim.convert.weights.dtypes import safetensors_dtype
from eagle_slim.convert.weights.writer import TensorPlan, whole, write_safetensors
from eagle_slim.vocab_tools.corpus.source import CorpusSource
from eagle_slim.vocab_tools.tokenizer.load import load_tokenizer
from numpy.typing import NDArray
from torch import Tensor

from ..drafter.screen import Screen
from ..errors import UsageError
from ..model import SpeculativeModel
from .collect import LEAST_TOKENS, MOST_TOKENS, ROOTS, Collected
from .factors import screen_factors, screen_rows
from .recall import recall
from .states import states_of_text
from .texts import Texts

RANKS = (32, 64, 96, 128, 192, 256, 384, 512)
"""That are measured, and among which the smallest that is good enough is chosen."""
WANTED_RECALL = 0.995
STATES_OF_WIDTH = 16
"""States for each dimension of the head, unless a number is given."""
_LEAST_OF_WIDTH = 4
_IDENTITY_VERSION = 1


@dataclass(frozen=True)
class ScreenOptions:
    """How a screen is made.

    Attributes:
        rank: columns of it, or "auto" for the smallest of `RANKS` that keeps `WANTED_RECALL`.
        states: how many it is fitted to; None is `STATES_OF_WIDTH` for each dimension of the head.
        sources: text; none is the chats of the built-in target for its heads, else the default of `eagle-convert`.
        damping: what is added along the diagonal of the second moment, as a share of its mean.
        depth, top_k: of the trees that are drafted.
        groups, per_group: the best ``per_group`` rows of each of ``groups`` groups are candidates.

    Raises:
        UsageError: a value that means nothing.
    """

    rank: int | Literal["auto"] = "auto"
    states: int | None = None
    sources: tuple[CorpusSource, ...] = ()
    damping: float = 1e-3
    depth: int = 5
    top_k: int = 10
    groups: int = 128
    per_group: int = 2

    def __post_init__(self) -> None:
        for name in ("rank", "states", "groups", "per_group"):
            value = getattr(self, name)
            if value not in ("auto", None) and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise UsageError(f"{name} = {value!r}: expected a number of at least 1.", option=name, found=value)
        if not 0 < self.damping < 1:
            raise UsageError(f"damping = {self.damping!r}: expected a share between 0 and 1.", option="damping")


@dataclass(frozen=True)
class MadeScreen:
    """A screen that was written.

    Attributes:
        recall: by rank, the share of the exact top 10's probability that its candidates hold, on held-out states.
        rows, hidden: of the LM head.
        states, held_out: how many it was fitted to, and how many `recall` was measured on.
        num_candidates: rows that are scored exactly.
    """

    folder: Path
    rank: int
    recall: Mapping[int, float]
    rows: int
    hidden: int
    states: int
    held_out: int
    num_candidates: int
    size_bytes: int

    def rows_read(self, rank: int) -> int:
        """What a level reads with a screen of a rank, in rows of the LM head."""
        return round(self.rows * rank / self.hidden) + self.num_candidates

    def to_json(self) -> dict[str, Any]:
        """As `eagle-screen --json` prints it."""
        found = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {**found, "folder": str(self.folder), "recall": {str(rank): kept for rank, kept in self.recall.items()}}

    def to_text(self) -> str:
        """A table of ranks, and what was written."""
        head = f"{'rank':>6}  {'of the top 10':>13}  rows read a level, of {self.rows:,}"
        lines = [
            f"{rank:>6}  {kept:>13.2%}  {self.rows_read(rank):,}{' *' if rank == self.rank else ''}"
            for rank, kept in self.recall.items()
        ]
        return "\n".join([
            head, *lines,
            f"wrote {self.folder / SCREEN_NAME}: rank {self.rank}, {self.size_bytes / 1e6:.1f} MB, from "
            f"{self.states:,} states (measured on {self.held_out:,} of other texts)",
        ])  # fmt: skip


def make_screen(
    folder: str | Path,
    options: ScreenOptions,
    *,
    target: str | Path | torch.nn.Module | None = None,
    revision: str | None = None,
    dtype: str = "auto",
    device: str | None = None,
    offline: bool = False,
    force: bool = False,
    restart: bool = False,
    progress: Callable[[int, int], object] = lambda done, total: None,
    say: Callable[[str], None] = lambda message: None,
) -> MadeScreen:
    """Make the screen of an artifact, and add it to its folder in one step.

    Interrupted, it leaves what it has collected beside the folder (`NAME.screen.resume`); the same call goes on.

    Args:
        folder: the artifact.
        options: of the screen.
        target, revision, dtype, device, offline: as `SpeculativeModel.from_pretrained` takes them.
        force: replace a screen that is there.
        restart: leave unused what an interrupted call has left.
        progress: called with states collected and wanted.
        say: called with a sentence for each default and each thing done.

    Raises:
        OutputExistsError: there is a screen already.
        UsageError: a rank beyond the head's width, too little text, or no rank that keeps enough.
        CorpusError: a text cannot be read.
        Others as `Artifact.load` and `SpeculativeModel.from_pretrained`.
    """
    artifact = Artifact.load(folder)
    folder, head = artifact.folder, artifact.head
    if (folder / SCREEN_NAME).exists() and not force:
        raise OutputExistsError.at(folder / SCREEN_NAME, "exists already.\nGive --force to replace it.")
    ranks = _ranks(options.rank, head.hidden_size)
    say("loading the head with its target")
    model = SpeculativeModel.from_pretrained(
        target, artifact, dtype=dtype, device=device, drafter="reference", target_backend="transformers", screen=False,
        revision=revision, offline=offline, depth=options.depth, top_k=options.top_k,
    )  # fmt: skip
    collected, texts = _collect(model, artifact, options, revision, offline, restart, progress, say)
    weights, moment = model.drafter.weights, collected.moment
    say(f"factors for {moment.count:,} states of {collected.num_texts:,} texts")
    project, down = screen_factors(moment.damped(options.damping), weights.lm_head, max(ranks))
    stored = head.dtype if head.kind == "eagle" else head.tensors.dtype("lm_head.weight")
    drafted = screen_rows(weights.lm_head, project, stored).to(weights.dtype)
    screen = Screen(drafted, down, project, options.groups, options.per_group)
    held_out = torch.cat(collected.held_out)
    kept = recall(screen, held_out, weights.lm_head, ranks)
    rank = _choose(options.rank, kept)
    # An EAGLE-1/2 head has every row of the target's LM head, whichever it drafts over.
    lm_head = model.target.lm_head.detach() if head.kind == "eagle" else weights.lm_head
    rows = screen_rows(lm_head, project[:, :rank], stored)
    metadata = {
        "format": SCREEN_FORMAT, "rank": str(rank), "groups": str(options.groups),
        "per_group": str(options.per_group), "damping": str(options.damping), "head_sha256": head_digest(head),
        "draft_vocab_size": str(len(rows)), "states": str(moment.count), "text": json.dumps(texts.origin),
        "tree": json.dumps([options.depth, options.top_k]), "held_out": str(len(held_out)),
        "recall": json.dumps({str(rank): round(share, 6) for rank, share in kept.items()}),
    }  # fmt: skip
    plans = [_plan(ROWS, rows), _plan(DOWN, down[:rank]), _plan(PROJECT, project[:, :rank])]
    if not all(bool(tensor.isfinite().all()) for tensor in (rows, down, project)):
        raise UsageError(f"{folder}: the screen holds NaN or infinity. Run eagle-verify: the weights are damaged.")

    def write(new: Path) -> dict[str, dict[str, Any]]:
        return {SCREEN_NAME: record_of(write_safetensors(new / SCREEN_NAME, plans, metadata))}

    entry = add_files(artifact, {SCREEN_NAME}, write)[SCREEN_NAME]
    collected.remove()
    return MadeScreen(
        folder, rank, kept, len(weights.lm_head), head.hidden_size, moment.count, len(held_out),
        screen.num_candidates, entry["size_bytes"],
    )  # fmt: skip


def _collect(
    model: SpeculativeModel,
    artifact: Artifact,
    options: ScreenOptions,
    revision: str | None,
    offline: bool,
    restart: bool,
    progress: Callable[[int, int], object],
    say: Callable[[str], None],
) -> tuple[Collected, Texts]:
    folder, weights, tree = artifact.folder.resolve(), model.drafter.weights, model.drafter.tree
    if model.tokenizer_source is None:
        raise UsageError(f"{folder}: the target has no tokenizer to read text with. Name another with --target.")
    texts = Texts(_sources(options, artifact, say), load_tokenizer(model.tokenizer_source, revision, offline), say)
    identity = {
        "version": _IDENTITY_VERSION, "head": head_digest(artifact.head), "tokenizer": model.tokenizer_hash,
        "target": [type(model.target.model).__name__, model.tokenizer_source, revision], "dtype": str(weights.dtype),
        "tree": [tree.depth, tree.top_k], "texts": [MOST_TOKENS, LEAST_TOKENS, ROOTS, texts.identity],
    }  # fmt: skip
    file = folder.with_name(f"{folder.name}.screen.resume")
    collected = Collected(weights.hidden, weights.device, file, identity)
    if restart:
        collected.remove()
    if collected.load_(weights.dtype):
        say(f"going on from {file}: {collected.moment.count:,} states are there already")

    def draft(text: NDArray[np.int64], roots: NDArray[np.int64]) -> Tensor:
        ids, places = torch.from_numpy(text).to(weights.device), torch.from_numpy(roots)
        return states_of_text(model.target, weights, tree, ids, places).flatten(0, 1)

    wanted = options.states or STATES_OF_WIDTH * weights.hidden
    least = min(wanted, _LEAST_OF_WIDTH * weights.hidden)
    collected.run(texts, draft, wanted, progress)
    if collected.moment.count < least or not collected.held_out:
        raise UsageError(
            f"The text gives {collected.moment.count:,} states of {collected.num_texts:,} texts, {least:,} are needed, "
            f"and one text of every seven to measure on. Name more text with --dataset; texts below {LEAST_TOKENS} "
            "tokens are left out.",
            option="--dataset", expected=least, found=collected.moment.count,
        )  # fmt: skip
    if collected.moment.count < wanted:
        say(f"the text gives {collected.moment.count:,} states, {wanted:,} were wanted")
    return collected, texts


def _sources(options: ScreenOptions, artifact: Artifact, say: Callable[[str], None]) -> tuple[CorpusSource, ...]:
    if options.sources:
        return options.sources
    if artifact.manifest.target.get("wheel"):
        say("text: the built-in chats, every fourth with code")
        return CorpusSource(str(embedded_chats()), weight=3.0), CorpusSource(str(embedded_code_chats()))
    source = default_corpus()
    say(f"text: {source.location}")
    return (source,)


def _ranks(rank: int | str, hidden: int) -> tuple[int, ...]:
    known = [each for each in RANKS if each <= hidden] or [hidden]
    if isinstance(rank, str):
        return tuple(known)
    if rank > hidden:
        raise UsageError(
            f"rank = {rank}: the head's states have {hidden} dimensions, and a screen of as many keeps all of them. "
            "Give a smaller rank.",
            option="rank", expected=hidden, found=rank,
        )  # fmt: skip
    return tuple(sorted({*known, rank}))


def _choose(rank: int | str, kept: Mapping[int, float]) -> int:
    if isinstance(rank, int):
        return rank
    found = next((each for each, share in kept.items() if share >= WANTED_RECALL), None)
    if found is None:
        table = ", ".join(f"{each}: {share:.2%}" for each, share in kept.items())
        raise UsageError(
            f"No rank keeps {WANTED_RECALL:.1%} of the exact top 10 ({table}). Choose one with --rank; what was "
            "collected is kept, so that it takes no second run over the text.",
            option="rank", found=dict(kept),
        )  # fmt: skip
    return found


def _plan(name: str, tensor: Tensor) -> TensorPlan:
    dtype = safetensors_dtype(tensor.dtype)
    assert dtype is not None
    raw = tensor.cpu().contiguous().view(torch.uint8).numpy()
    return TensorPlan(name, dtype, tuple(tensor.shape), whole(raw))
