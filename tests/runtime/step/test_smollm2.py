"""The real head with its real target: as many target passes as an independent implementation needs, and exact output.

That implementation measured, over the first 12 prompts of examples/prompts.jsonl, greedy, 40 new tokens each, fp32: 160
passes (full vocabulary, depth 5, top_k 10, 60 nodes), 166 (4096 most frequent ids), 254 (full, chain of depth 4), for
468 tokens after the first ones. Here the first prompts of the same runs; `eagle-compare` repeats the whole table.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from eagle_slim.convert.sources.builtin import load_embedded_counts
from eagle_slim.runtime import SpeculativeModel, TreeConfig
from eagle_slim.runtime.errors import UsageError
from eagle_slim.vocab_tools.vocabulary import DraftVocab
from support.conversion import convert
from support.raising import raises
from support.tiny_models import plain_greedy

PROMPTS = Path(__file__).parents[3] / "examples" / "prompts.jsonl"
# (tokens after the first one, passes) of the first prompt.
REDUCED, CHAIN = (39, 18), (39, 27)


@pytest.fixture(scope="module")
def full() -> SpeculativeModel:
    return SpeculativeModel.from_pretrained(dtype=torch.float32, depth=5, top_k=10, total_tokens=60, device="cpu")


@pytest.fixture(scope="module")
def prompts(full: SpeculativeModel) -> list[list[int]]:
    with PROMPTS.open(encoding="utf-8") as lines:
        return [full.encode_chat(json.loads(next(lines))["turns"][0])]


@pytest.fixture(scope="module")
def plain(full: SpeculativeModel, prompts: list[list[int]]) -> list[list[int]]:
    """The target's own greedy answer to the first prompt, by transformers."""
    return [plain_greedy(full.target.model, prompts[0], 40)]


def most_frequent(count: int) -> DraftVocab:
    counts = load_embedded_counts().sources[0].counts
    return DraftVocab(np.argsort(-counts, kind="stable")[:count], 0, len(counts), {})


def test_reduced_vocabulary_and_chain(full: SpeculativeModel, prompts: list[list[int]], plain: list[list[int]]) -> None:
    reduced, chain = full.with_draft_vocab(most_frequent(4096)), full.with_tree(TreeConfig(4, 1, 5))
    for model, expected in ((reduced, REDUCED), (chain, CHAIN)):
        output = model.generate(prompts, max_new_tokens=40)
        assert output.token_ids == plain
        assert (output.stats.num_accepted_tokens, output.stats.num_passes) == expected


@pytest.mark.slow
def test_a_converted_head_drafts_as_its_rows_do_unconverted(
    full: SpeculativeModel, prompts: list[list[int]], plain: list[list[int]], tmp_path: Path
) -> None:
    folder = convert(draft_vocab=2048, out=tmp_path / "slim").folder
    converted = SpeculativeModel.from_pretrained(full.target.model, folder, tokenizer=full.tokenizer)
    assert converted.draft_vocab == 2048
    before = full.with_draft_vocab(2048)
    assert torch.equal(before.drafter.weights.draft_to_target, converted.drafter.weights.draft_to_target)
    assert torch.equal(before.drafter.weights.lm_head, converted.drafter.weights.lm_head)
    output = converted.generate(prompts, max_new_tokens=12)
    assert output.token_ids == [plain[0][:12]]
    assert output.stats.accepted_lengths == before.generate(prompts, max_new_tokens=12).stats.accepted_lengths

    smaller = converted.with_draft_vocab(1024)
    expected = full.with_draft_vocab(1024)
    assert torch.equal(smaller.drafter.weights.draft_to_target, expected.drafter.weights.draft_to_target)
    with raises(UsageError, option="draft_vocab"):
        converted.with_draft_vocab(2049)
