"""One artifact: worked out from inputs and vocabulary, and written with manifest, card and side files."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..artifact import dflash, eagle1, eagle3
from ..artifact.artifact import PLOT_NAME, freq_bytes, freq_name, write_artifact
from ..artifact.gguf_file import gguf_bytes
from ..artifact.model_card import model_card
from ..atomic import free_bytes, require_space
from ..engines.facts import HeadFacts
from ..engines.registry import Finding, conversion_findings
from ..head.draft_head import DraftHead
from ..head.open import open_head
from ..head.screen_file import has_screen
from ..lm_head.lm_head import LmHead, fitting, own_lm_head
from ..manifest import Manifest
from ..weights import names
from ..weights.dtypes import item_size
from ..weights.rows import GatheredRows
from ..weights.writer import TensorPlan
from .gguf import gguf_title, gguf_writer
from .inputs import Inputs
from .provenance import manifest_of, what_was_read
from .result import Conversion
from .screen import Screen, cut_screen
from .vocab_choice import Ranking

if TYPE_CHECKING:
    import numpy as np
    from eagle_slim.vocab_tools.ranking.report import CoverageReport
    from eagle_slim.vocab_tools.vocabulary.draft_vocab import DraftVocab
    from numpy.typing import NDArray


@dataclass(frozen=True)
class Planned:
    """One artifact of which everything is known but what is read while it is written.

    Attributes:
        folder: where it will be.
        title: its name on the model card.
        inputs: what it is made from.
        head, lm_head: of `inputs`, each with a record of reads of its own, so that a manifest lists what was read for
            this artifact alone.
        manifest: without what `Manifest` gets from writing; its warnings are all that a user is told.
        config: config.json.
        findings: what engines make of it.
        tensors, gathered: of the weights file, and the LM-head rows among them (None for EAGLE-1/2).
        kept: the same of the file of kept rows; None without one.
        screen: tensors and metadata of the screen, of an artifact that has one; None without one.
        coverage: on held-out text; None where there was none.
        is_guess: text must be counted first: the ids, and with a coverage or a cost the size, stand in for others.
    """

    folder: Path
    title: str
    inputs: Inputs
    head: DraftHead
    lm_head: LmHead | None
    manifest: Manifest
    config: dict[str, Any]
    findings: Sequence[Finding]
    tensors: Sequence[TensorPlan]
    gathered: GatheredRows | None
    kept: tuple[Sequence[TensorPlan], GatheredRows] | None
    screen: Screen | None
    coverage: CoverageReport | None
    is_guess: bool

    @property
    def draft_vocab(self) -> int | None:
        """Rows it will have; None where only counted text tells the size."""
        return None if self.is_guess and self.inputs.options.sizes == (None,) else self.manifest.draft_vocab

    @property
    def num_kept(self) -> int | None:
        """Rows that are kept beyond them; None as `draft_vocab`."""
        if self.draft_vocab is None and self.inputs.options.keep_rows is not None:
            return None
        return 0 if self.kept is None else len(self.kept[1].row_ids)

    @property
    def kept_bytes(self) -> int | None:
        """Bytes of these, which take disk space and no time of a draft step; None as `num_kept`."""
        return None if self.num_kept is None else sum(plan.size_bytes for plan in self.kept[0]) if self.kept else 0

    @property
    def bytes_before(self) -> int:
        """Weights that one draft step of the head reads, LM head included."""
        return bytes_per_draft_step(self.head, self.inputs.rows_before)

    @property
    def bytes_after(self) -> int | None:
        """Weights that one draft step will read, LM head included; None as `draft_vocab`."""
        return None if self.draft_vocab is None else bytes_per_draft_step(self.head, self.draft_vocab)

    @property
    def disk_bytes(self) -> int | None:
        """Bytes of the tensors that will be written; None as `draft_vocab`."""
        if self.draft_vocab is None:
            return None
        gguf = 0 if self.inputs.gguf is None else sum(gguf_bytes(self.tensors, kind) for kind in self.inputs.gguf.kinds)
        screen = 0 if self.screen is None else sum(plan.size_bytes for plan in self.screen[0])
        return sum(plan.size_bytes for plan in self.tensors) + (self.kept_bytes or 0) + screen + gguf

    def to_json(self) -> dict[str, Any]:
        """The plan as `eagle-convert --dry-run --json` prints it."""
        shown = ("draft_vocab", "bytes_before", "bytes_after", "num_kept", "kept_bytes", "disk_bytes")
        return {
            "folder": str(self.folder),
            **{name: getattr(self, name) for name in shown},
            "num_forced": self.manifest.num_forced,
            "rows_before": self.inputs.rows_before,
            "free_bytes": free_bytes(self.folder),
            "warnings": list(self.manifest.warnings),
        }

    def check_values(self) -> None:
        """Read all that would be written, and refuse what writing would: NaN, and values that overflow a dtype."""
        for plan in (*self.tensors, *(self.kept[0] if self.kept else ())):
            deque(plan.chunks(), maxlen=0)

    def write(self) -> Conversion:
        """Write the artifact, whole or not at all. Raises as `convert_head`."""
        manifest, before, rows_before = self.manifest, self.bytes_before, self.inputs.rows_before
        gguf = self.inputs.gguf
        after = bytes_per_draft_step(self.head, manifest.draft_vocab)
        require_space(self.folder, self.disk_bytes or 0)
        side_files = {}
        if manifest.rank_order_ids is not None:
            side_files[freq_name(manifest.draft_vocab)] = freq_bytes(manifest.rank_order_ids)
        if self.coverage is not None:
            from eagle_slim.vocab_tools.ranking.plots import render_coverage

            side_files[PLOT_NAME] = render_coverage(self.coverage)

        def card(finished: Manifest) -> str:
            return model_card(
                finished,
                title=self.title,
                bytes_before=before,
                bytes_after=after,
                rows_before=rows_before,
                licence=self.inputs.licence,
                plot=None if self.coverage is None else PLOT_NAME,
                refused={found.engine for found in self.findings if found.severity == "error"},
            )

        written = write_artifact(
            self.folder,
            manifest,
            self.config,
            self.tensors,
            self.gathered,
            self.kept,
            self.screen,
            side_files,
            card,
            after_read=lambda: what_was_read(manifest, self.head, self.lm_head),
            derived=(lambda place: {}) if gguf is None else gguf_writer(gguf, gguf_title(manifest)),
            force=self.inputs.options.force,
        )
        return Conversion(self.folder, written, self.coverage, rows_before, before, after)


def plan_slim(
    inputs: Inputs,
    ranking: Ranking | None,
    vocab: DraftVocab | None,
    kept_ids: NDArray[np.int64] | None,
    folder: Path,
    title: str,
) -> Planned:
    """Work out one artifact.

    Args:
        inputs: what it is made from.
        ranking: where the vocabulary comes from; None for a full one.
        vocab: the ids to keep; None for all of them.
        kept_ids: int64 [kept], further ids in rank order whose rows are kept in a file of their own; None for none.
        folder: where it goes.
        title: its name on the model card.

    Raises:
        MismatchError: an id that the head has no row for.
    """
    head = inputs.head.forked()
    lm_head = _lm_head(head, inputs)
    rows = len(vocab) if vocab is not None else head.target_vocab
    config = _config(head, inputs, rows)
    findings = _findings(head, inputs, config, rows)
    measured = None if ranking is None or vocab is None else ranking.coverage(vocab)
    manifest = manifest_of(inputs, head, lm_head, ranking, vocab, measured, findings)
    plans: Sequence[TensorPlan]
    if head.kind != "eagle":
        assert lm_head is not None
        plan_tensors = eagle3.plan_tensors if head.kind == "eagle3" else dflash.plan_tensors
        plans, gathered = plan_tensors(head, lm_head, None if vocab is None else vocab.ascending_ids)
        kept = None if kept_ids is None else eagle3.plan_kept_rows(head, lm_head, kept_ids)
    else:
        plans, gathered, kept = eagle1.plan_tensors(head), None, None
    return Planned(
        folder, title, inputs, head, lm_head, manifest, config, findings, plans, gathered, kept, _screen(inputs, vocab),
        coverage=None if measured is None else measured[0],
        is_guess=ranking is not None and vocab is not None and ranking.is_guess,
    )  # fmt: skip


def bytes_per_draft_step(head: DraftHead, rows: int) -> int:
    """Bytes of weights that one draft step reads with an LM head of `rows` rows; the embedding's few rows left out."""
    # Of an embedding, and of what DSpark looks up by the token before, a few rows are read.
    apart = (names.LM_HEAD, names.EMBEDDING, names.MARKOV_IN, *head.row_tensors)
    total = sum(head.tensors.info(name).size_bytes for name in head.tensors if name not in apart)
    total += rows * sum(head.tensors.info(name).row_bytes for name in head.row_tensors)
    dtype = head.tensors.info(names.LM_HEAD).dtype if head.has_lm_head else head.dtype_name
    return total + rows * head.hidden_size * item_size(dtype)


def _screen(inputs: Inputs, vocab: DraftVocab | None) -> Screen | None:
    if not has_screen(inputs.head):
        return None
    return cut_screen(open_head(inputs.source), None if vocab is None else vocab.ascending_ids, inputs.options.offline)


def _lm_head(head: DraftHead, inputs: Inputs) -> LmHead | None:
    if head.kind == "eagle":
        return None
    if head.has_lm_head:
        return own_lm_head(head)
    assert inputs.target is not None
    assert inputs.lm_head is not None
    return fitting(inputs.lm_head, head, inputs.target.name)


def _config(head: DraftHead, inputs: Inputs, rows: int) -> dict[str, Any]:
    if head.kind == "eagle3":
        return eagle3.slim_config(head, rows, inputs.options.flavour)
    if head.kind == "dflash":
        return dflash.slim_config(head, rows)
    return eagle1.repaired_config(head, inputs.options.flavour)


def _findings(head: DraftHead, inputs: Inputs, config: dict[str, Any], rows: int) -> list[Finding]:
    facts = HeadFacts.of(
        # What is read to judge the head is no part of what the artifact is made from.
        inputs.head.forked(),
        config=config,
        draft_vocab=rows,
        target_layers=None if inputs.target is None else inputs.target.num_layers,
    )
    if head.kind == "eagle":
        # Added where it is missing, see `eagle1.plan_tensors`.
        facts = replace(facts, tensor_names=facts.tensor_names | {names.FC_BIAS})
    return conversion_findings(facts)
