"""The real head with its real target: as many target passes as an independent implementation needs, and exact output.

That implementation measured, over the first 12 prompts of examples/prompts.jsonl, greedy, 40 new tokens each, fp32: 160
passes (full vocabulary, depth 5, top_k 10, 60 nodes), 166 (4096 most frequent ids), 254 (full, chain of depth 4), for
468 tokens after the first ones. Here the first prompt of the same runs; `eagle-compare` repeats the whole table.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from eagle_slim.convert.sources.builtin import load_embedded_counts
from eagle_slim.runtime import SpeculativeModel, TreeConfig
from eagle_slim.vocab_tools.vocabulary import DraftVocab
from support.tiny_models import plain_greedy

PROMPTS = Path(__file__).parents[3] / "examples" / "prompts.jsonl"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("vocabulary", "tree", "num_passes"),
    [("full", TreeConfig(4, 1, 5), 27), ("most frequent", TreeConfig(5, 10, 60), 18)],
)
def test_passes_and_text_of_the_first_prompt(vocabulary: str, tree: TreeConfig, num_passes: int) -> None:
    model = SpeculativeModel.from_pretrained(dtype=torch.float32, device="cpu").with_tree(tree)
    if vocabulary == "most frequent":
        counts = load_embedded_counts().sources[0].counts
        most_frequent = DraftVocab(np.argsort(-counts, kind="stable")[:4096], 0, len(counts), {})
        model = model.with_draft_vocab(most_frequent)
    with PROMPTS.open(encoding="utf-8") as lines:
        prompt = model.encode_chat(json.loads(next(lines))["turns"][0])
    output = model.generate(prompt, max_new_tokens=40)
    assert output.token_ids == [plain_greedy(model.target.model, prompt, 40)]
    # The first token is the prompt's.
    assert (output.stats.num_accepted_tokens, output.stats.num_passes) == (39, num_passes)
