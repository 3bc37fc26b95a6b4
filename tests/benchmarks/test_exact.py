"""The proof that drafted answers are plain ones, whole but small: what it covers, what it finds, what it tells."""

from __future__ import annotations

import itertools
import json
from typing import Any

import numpy as np
import pytest
from eagle_slim.runtime import SpeculativeModel
from eagle_slim.runtime.settings import TreeConfig
from eagle_slim.vocab_tools import DraftVocab

from benchmarks import exact
from benchmarks.shared import quality

pytestmark = pytest.mark.filterwarnings("ignore::eagle_slim.runtime.errors.AcceptanceWarning")
TREES = (TreeConfig(2, 4, 20), TreeConfig(3, 1, 4))
CALLS = ((1, 70), (4, 70), (0, 140), (6, 240), (1, 240))


@pytest.fixture
def fuzz(model: SpeculativeModel, pool: exact.Pool) -> exact.Fuzz:
    ranked = DraftVocab(np.random.default_rng(0).permutation(360), 0, 360)
    models = {"full": model, "300": model.with_draft_vocab(ranked.prefix(300))}
    return exact.Fuzz(models, pool, TREES, 0, CALLS)


@pytest.mark.slow
def test_every_kind_of_case_is_compared(fuzz: exact.Fuzz) -> None:
    # It is asked before every episode, and after each of its calls.
    turns = iter([False] * len(fuzz.variants) * (1 + len(CALLS)))
    fuzz.run(lambda: next(turns, True), itertools.count())
    result = fuzz.result()
    assert (result["answers_that_differ"], result["differences"]) == (0, [])
    kinds = result["tokens_by_kind"]
    assert {variant.name for variant in fuzz.variants} <= set(kinds)
    assert {*exact.RULES, "chat", "text", "random", "long", "next turn", "full rows", "300 rows"} <= set(kinds)
    assert all(count > 0 for count in kinds.values())
    for name in ("reuse_prefix True", "reuse_prefix False"):
        assert 0 < kinds[name] < result["tokens"]
    assert sum(kinds[name] for name in {variant.name for variant in fuzz.variants}) == result["tokens"]
    assert result["reused_prompt_tokens"] > 0
    assert set(result["calls_broken_off"]) == {"RuntimeError", "KeyboardInterrupt"}
    assert any("trees of 20 nodes" in path for path in result["paths"])
    assert len(result["exactness"]) == 1
    assert "float32" in result["exactness"][0]
    json.dumps(result)


def test_a_wrong_token_is_found_and_told(fuzz: exact.Fuzz, monkeypatch: pytest.MonkeyPatch) -> None:
    generate, wrong = exact.generate, 5

    def spoiled(model: SpeculativeModel, questions: Any, *args: Any, **options: Any) -> Any:
        output = generate(model, questions, *args, **options)
        if model is not fuzz.pool.model and len(questions) == 4:
            for result in output.results[2:3]:
                result.token_ids[0] ^= wrong
        return output

    monkeypatch.setattr(exact, "generate", spoiled)
    fuzz.run(lambda: False, [1])
    (difference,) = fuzz.result()["differences"]
    assert (difference["episode"], difference["call"], difference["place"], difference["token"]) == (1, 1, 2, 0)
    assert difference["found"] == [difference["plain"][0] ^ wrong]
    assert difference["prompt"]
    # The same episode again is the same calls.
    again = exact.Fuzz(fuzz.models, fuzz.pool, TREES, 0, CALLS)
    again.run(lambda: False, [1])
    assert again.result() == fuzz.result()


def test_quality_of_float32_is_perfect(model: SpeculativeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    text = np.random.default_rng(1).integers(3, 340, 200).tolist()
    whole = model.target.model
    found = quality.measure_quality(model, text, whole, num_tokens=60, window=32)
    assert found["tokens"] == 72
    for row in found["quality"].values():
        assert row["kl_divergence"] == pytest.approx(0, abs=1e-8)
        assert row["equal_argmax"] == 1
    prompt_logits = quality.prompt_logits
    monkeypatch.setattr(quality, "prompt_logits", lambda *args: 1.1 * prompt_logits(*args))
    found = quality.measure_quality(model, text, whole, num_tokens=60, window=32)
    assert not found["is_good"]
    assert found["quality"]["prompt"]["kl_divergence"] > 1e-3
    with pytest.raises(ValueError, match="pieces of 32 tokens"):
        quality.measure_quality(model, text, whole, num_tokens=600, window=32)


def test_text_and_trees() -> None:
    assert len(exact.read_text()) > 100_000
    rng = exact.random.Random(0)
    trees = [exact.random_tree(rng) for _ in range(50)]
    assert max(tree.total_tokens for tree in trees) > 100
    assert len(set(trees)) > 40
