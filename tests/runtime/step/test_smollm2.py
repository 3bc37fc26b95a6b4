"""The real head with its real target: as many target passes as an independent implementation needs, and exact output.

That implementation measured, over the first 12 prompts of examples/prompts.jsonl, greedy, 40 new tokens each, fp32: 160
passes (full vocabulary, depth 5, top_k 10, 60 nodes), 166 (4096 most frequent ids), 254 (full, chain of depth 4), for
468 tokens after the first ones. Here the first prompt of the same runs; `eagle-compare` repeats the whole table.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from eagle_slim.convert.sources.builtin import load_embedded_counts
from eagle_slim.runtime import SpeculativeModel, TreeConfig
from eagle_slim.vocab_tools.vocabulary import DraftVocab
from support.tiny_models import plain_greedy

PROMPTS = Path(__file__).parents[3] / "examples" / "prompts.jsonl"


def test_reduced_vocabulary_and_chain() -> None:
    full = SpeculativeModel.from_pretrained(dtype=torch.float32, depth=5, top_k=10, total_tokens=60, device="cpu")
    with PROMPTS.open(encoding="utf-8") as lines:
        prompt = full.encode_chat(json.loads(next(lines))["turns"][0])
    plain = plain_greedy(full.target.model, prompt, 40)
    counts = load_embedded_counts().sources[0].counts
    most_frequent = DraftVocab(np.argsort(-counts, kind="stable")[:4096], 0, len(counts), {})
    reduced, chain = full.with_draft_vocab(most_frequent), full.with_tree(TreeConfig(4, 1, 5))
    for model, num_passes in ((reduced, 18), (chain, 27)):
        output = model.generate(prompt, max_new_tokens=40)
        assert output.token_ids == [plain]
        # The first token is the prompt's.
        assert (output.stats.num_accepted_tokens, output.stats.num_passes) == (39, num_passes)
