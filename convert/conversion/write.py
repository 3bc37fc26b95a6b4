"""One artifact: the rows of a vocabulary gathered from the inputs and written with manifest, card and side files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..artifact import dflash, eagle1, eagle3
from ..artifact.artifact import PLOT_NAME, freq_bytes, freq_name, write_artifact
from ..artifact.model_card import model_card
from ..atomic import require_space
from ..engines.facts import HeadFacts
from ..engines.registry import Finding, conversion_findings
from ..head.draft_head import DraftHead
from ..lm_head.lm_head import LmHead, fitting, own_lm_head
from ..manifest import Manifest
from ..weights import names
from ..weights.dtypes import item_size
from ..weights.writer import TensorPlan
from .inputs import Inputs
from .provenance import manifest_of, what_was_read
from .result import Conversion
from .vocab_choice import Ranking

if TYPE_CHECKING:
    import numpy as np
    from eagle_slim.vocab_tools.vocabulary.draft_vocab import DraftVocab
    from numpy.typing import NDArray


def write_slim(
    inputs: Inputs,
    ranking: Ranking | None,
    vocab: DraftVocab | None,
    kept_ids: NDArray[np.int64] | None,
    folder: Path,
    title: str,
) -> Conversion:
    """Write one artifact.

    Args:
        inputs: what it is made from.
        ranking: where the vocabulary comes from; None for a full one.
        vocab: the ids to keep; None for all of them.
        kept_ids: int64 [kept], further ids in rank order whose rows are kept in a file of their own; None for none.
        folder: where it goes.
        title: its name on the model card.
    """
    # With a record of reads of its own, so that a manifest lists what was read for this size alone.
    head = inputs.head.forked()
    lm_head = _lm_head(head, inputs)
    rows = len(vocab) if vocab is not None else head.target_vocab
    rows_before = inputs.rows_before
    before, after = (bytes_per_draft_step(head, count) for count in (rows_before, rows))
    require_space(folder, after + kept_bytes(head, 0 if kept_ids is None else len(kept_ids)))
    config = _config(head, inputs, rows)
    findings = _findings(head, inputs, config, rows)
    measured = None if ranking is None or vocab is None else ranking.coverage(vocab)
    report = None if measured is None else measured[0]
    manifest = manifest_of(inputs, head, lm_head, ranking, vocab, measured, findings)
    plans: Sequence[TensorPlan]
    if head.kind != "eagle":
        assert lm_head is not None
        plan_tensors = eagle3.plan_tensors if head.kind == "eagle3" else dflash.plan_tensors
        plans, gathered = plan_tensors(head, lm_head, None if vocab is None else vocab.ascending_ids)
        kept = None if kept_ids is None else eagle3.plan_kept_rows(head, lm_head, kept_ids)
    else:
        plans, gathered, kept = eagle1.plan_tensors(head), None, None
    side_files = {}
    if vocab is not None:
        side_files[freq_name(len(vocab))] = freq_bytes(vocab.target_ids)
    if report is not None:
        from eagle_slim.vocab_tools.ranking.plots import render_coverage

        side_files[PLOT_NAME] = render_coverage(report)

    def card(finished: Manifest) -> str:
        return model_card(
            finished,
            title=title,
            bytes_before=before,
            bytes_after=after,
            rows_before=rows_before,
            licence=inputs.licence,
            plot=None if report is None else PLOT_NAME,
            refused={found.engine for found in findings if found.severity == "error"},
        )

    written = write_artifact(
        folder,
        manifest,
        config,
        plans,
        gathered,
        kept,
        side_files,
        card,
        after_read=lambda: what_was_read(manifest, head, lm_head),
        force=inputs.options.force,
    )
    return Conversion(folder, written, report, rows_before, before, after)


def bytes_per_draft_step(head: DraftHead, rows: int) -> int:
    """Bytes of weights that one draft step reads with an LM head of `rows` rows; the embedding's few rows left out."""
    # Of an embedding, and of what DSpark looks up by the token before, a few rows are read.
    apart = (names.LM_HEAD, names.EMBEDDING, names.MARKOV_IN, *head.row_tensors)
    total = sum(head.tensors.info(name).size_bytes for name in head.tensors if name not in apart)
    return total + rows * (_row_bytes(head) + sum(head.tensors.info(name).row_bytes for name in head.row_tensors))


def kept_bytes(head: DraftHead, rows: int) -> int:
    """Bytes of so many kept rows with their ids, the header of the file left out."""
    return rows * (_row_bytes(head) + 8)


def _row_bytes(head: DraftHead) -> int:
    dtype = head.tensors.info(names.LM_HEAD).dtype if head.has_lm_head else head.dtype_name
    return head.hidden_size * item_size(dtype)


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
        inputs.head,
        config=config,
        draft_vocab=rows,
        target_layers=None if inputs.target is None else inputs.target.num_layers,
    )
    if head.kind == "eagle":
        # Added where it is missing, see `eagle1.plan_tensors`.
        facts = replace(facts, tensor_names=facts.tensor_names | {names.FC_BIAS})
    return conversion_findings(facts)
