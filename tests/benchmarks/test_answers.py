"""Whole calls with a tiny model: every variant, and what its row says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from eagle_slim.runtime import SpeculativeModel
from eagle_slim.vocab_tools import DraftVocab
from support.tiny_models import VOCAB, random_prompts, tiny_target, write_head

from benchmarks import answers


@pytest.mark.filterwarnings("ignore::eagle_slim.runtime.errors.AcceptanceWarning")
def test_rows(tmp_path: Path) -> None:
    head = write_head(tmp_path, draft_ids=list(range(20)))
    model = SpeculativeModel.from_pretrained(
        tiny_target("llama"), head, target_backend="fused", depth=2, top_k=3, total_tokens=8
    )
    # Only of a converted head, or of the built-in one, a number says which rows.
    over = model.with_draft_vocab
    model.with_draft_vocab = lambda size: over(DraftVocab(np.arange(size), 0, VOCAB))  # type: ignore[method-assign]
    rows = answers.measure(model, random_prompts([9]), ["full", "10"], 4, 1)
    assert [(row["draft_vocab"], row["sampled"]) for row in rows] == [
        ("plain", False), ("plain", True), (20, False), (20, True), (10, False), (10, True)
    ]  # fmt: skip
    assert {row["equal_answers"] for row in rows} == {"1/1"}
    for row in rows:
        assert row["step_ms"] == pytest.approx(1e3 * row["accepted_length"] / row["decode_tokens_per_s"])
        assert row["tokens_per_s"] > 0
        assert row["first_token_ms"] > 0
    assert rows[0]["accepted_length"] == 1 < rows[2]["accepted_length"]
