"""One artifact: worked out from inputs and vocabulary, and written with manifest, card and side files."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from eagle_slim.vocab_tools.coverage import CoverageReport
from eagle_slim.vocab_tools.vocabulary import DraftVocab

from ..artifact import dflash, eagle1, eagle3
from ..artifact.artifact import (
    CARD_NAME,
    CONFIG_NAME,
    METADATA,
    PLOT_NAME,
    WEIGHTS_NAME,
    freq_bytes,
    freq_name,
    record_of,
    record_of_bytes,
)
from ..artifact.model_card import model_card
from ..atomic import atomic_directory, free_bytes, require_space
from ..engines import Finding, HeadFacts, conversion_findings
from ..head import names
from ..head.draft_head import DraftHead
from ..manifest import MANIFEST_NAME, Manifest
from ..rows.dtypes import item_size
from ..rows.gather import GatheredRows
from ..rows.lm_head import LmHead, fitting, own_lm_head
from ..rows.writer import TensorPlan, write_safetensors
from .inputs import Inputs
from .provenance import manifest_of, what_was_read
from .result import Conversion
from .vocab_choice import Ranking


@dataclass(frozen=True)
class Planned:
    """One artifact of which everything is known but what is read while it is written.

    Attributes:
        title: its name on the model card.
        head, lm_head: of `inputs`, each with a record of reads of its own, so that a manifest lists what was read for
            this artifact alone.
        manifest: without what `Manifest` gets from writing; its warnings are all that a user is told.
        config: config.json.
        findings: what engines make of it.
        tensors, gathered: of the weights file, and the LM-head rows among them (None for EAGLE-1/2).
        coverage: on held-out text; None where there was none.
        is_guess: text must be counted first: the ids, and with a coverage the size, stand in for others.
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
    coverage: CoverageReport | None
    is_guess: bool

    @property
    def draft_vocab(self) -> int | None:
        """Rows it will have; None where only counted text tells the size."""
        return None if self.is_guess and self.inputs.options.sizes == (None,) else self.manifest.draft_vocab

    @property
    def bytes_before(self) -> int:
        """Weights that one draft step of the head reads, LM head included."""
        return bytes_per_draft_step(self.head, self.head.draft_vocab)

    @property
    def bytes_after(self) -> int | None:
        """Weights that one draft step will read, LM head included; None as `draft_vocab`."""
        return None if self.draft_vocab is None else bytes_per_draft_step(self.head, self.draft_vocab)

    @property
    def disk_bytes(self) -> int | None:
        """Bytes that will be written, but for the plot and what only reading tells; None as `draft_vocab`."""
        if self.draft_vocab is None:
            return None
        ranked = self.manifest.rank_order_ids
        checksums = None if self.gathered is None else np.zeros((len(self.gathered.row_ids), 8), np.uint8)
        manifest = replace(self.manifest, row_checksums=checksums)
        small = [self._config_bytes(), manifest.to_bytes(), self._card(manifest)]
        small += [] if ranked is None else [freq_bytes(ranked)]
        tensors = sum(plan.size_bytes for plan in self.tensors)
        gguf = 0 if self.inputs.gguf is None else len(self.inputs.gguf.kinds) * tensors
        return tensors + gguf + sum(map(len, small))

    def to_json(self) -> dict[str, Any]:
        """The plan as `eagle-convert --dry-run --json` prints it."""
        shown = ("draft_vocab", "bytes_before", "bytes_after", "disk_bytes")
        return {
            "folder": str(self.folder),
            **{name: getattr(self, name) for name in shown},
            "num_forced": self.manifest.num_forced,
            "rows_before": self.head.draft_vocab,
            "free_bytes": free_bytes(self.folder),
            "warnings": list(self.manifest.warnings),
        }

    def check_values(self) -> None:
        """Read all that would be written, and refuse what writing would: NaN, and values that overflow a dtype."""
        for plan in self.tensors:
            deque(plan.chunks(), maxlen=0)
        if self.inputs.gguf is not None:
            from ..artifact import gguf

            gguf.check_values(self.tensors, self.inputs.gguf.kinds)

    def write(self) -> Conversion:
        """Write the artifact, whole or not at all. Raises as `convert_head`."""
        after = bytes_per_draft_step(self.head, self.manifest.draft_vocab)
        require_space(self.folder, self.disk_bytes or 0)
        small = self._side_files()
        with atomic_directory(self.folder, force=self.inputs.options.force, marker=MANIFEST_NAME) as folder:
            files = {WEIGHTS_NAME: record_of(write_safetensors(folder / WEIGHTS_NAME, self.tensors, METADATA))}
            # Before the GGUF files, which are made of it.
            (folder / CONFIG_NAME).write_bytes(self._config_bytes())
            if self.inputs.gguf is not None:
                from ..artifact.gguf import write_gguf

                title = f"{self.manifest.head['name']} v{self.manifest.draft_vocab}"
                files |= write_gguf(folder, self.inputs.gguf, title)
            manifest = replace(
                self.manifest,
                row_checksums=None if self.gathered is None else self.gathered.checksums,
                files=dict(files),
                **what_was_read(self.manifest, self.head, self.lm_head),
            )
            for name, data in {CONFIG_NAME: self._config_bytes(), **small, CARD_NAME: self._card(manifest)}.items():
                (folder / name).write_bytes(data)
                files[name] = record_of_bytes(data)
            manifest = replace(manifest, files=dict(sorted(files.items())))
            (folder / MANIFEST_NAME).write_bytes(manifest.to_bytes())
        return Conversion(self.folder, manifest, self.coverage, self.head.draft_vocab, self.bytes_before, after)

    def _config_bytes(self) -> bytes:
        return (json.dumps(self.config, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()

    def _card(self, manifest: Manifest) -> bytes:
        return model_card(
            manifest,
            title=self.title,
            bytes_before=self.bytes_before,
            bytes_after=bytes_per_draft_step(self.head, manifest.draft_vocab),
            rows_before=self.head.draft_vocab,
            licence=self.inputs.licence,
            plot=None if self.coverage is None else PLOT_NAME,
            refused={found.engine for found in self.findings if found.severity == "error"},
        ).encode()

    def _side_files(self) -> dict[str, bytes]:
        found = {}
        if self.manifest.rank_order_ids is not None:
            found[freq_name(self.manifest.draft_vocab)] = freq_bytes(self.manifest.rank_order_ids)
        if self.coverage is not None:
            from eagle_slim.vocab_tools.coverage import render_coverage

            found[PLOT_NAME] = render_coverage(self.coverage)
        return found


def plan_slim(
    inputs: Inputs,
    ranking: Ranking | None,
    vocab: DraftVocab | None,
    folder: Path,
    title: str,
) -> Planned:
    """Work out one artifact; without ranking and vocabulary, one of all ids.

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
    else:
        plans, gathered = eagle1.plan_tensors(head), None
    return Planned(
        folder, title, inputs, head, lm_head, manifest, config, findings, plans, gathered,
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
