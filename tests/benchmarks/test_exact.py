"""The proof that drafted answers are plain ones, whole but small: what it covers, what it finds, what it tells."""

import itertools
import json
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from eagle_slim.runtime import SpeculativeModel, TreeConfig
from eagle_slim.runtime.drafter.tuning import problem
from eagle_slim.vocab_tools import DraftVocab

from benchmarks import exact
from benchmarks.shared import decoding, quality

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
    assert result["tokens_of_their_answers"] == sum(map(len, fuzz.pool.answers.values()))
    assert result["tokens_a_pass"]["plain"] == 1
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


def test_shapes_change_at_every_step(fuzz: exact.Fuzz) -> None:
    shapes, steps = [None, *TREES], exact.Counter[Any]()
    chooser = exact.ChangingShapes(shapes, exact.random.Random(0), steps)
    chosen = [chooser.next(1, 10.0) for _ in range(400)]
    drafted = [pair for pair in itertools.pairwise(chosen) if None not in pair]
    assert all(before != after for before, after in drafted)
    assert set(chosen) == set(shapes)
    plain_runs = [len(run) for run in "".join("p" if each is None else " " for each in chosen).split()]
    # Longer than what a drafter takes at a time, too.
    assert {1, 2, 21} <= set(plain_runs)
    assert chooser.steps is steps


def test_a_random_qwen2_is_often_guessed_and_its_biases_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(problem.MODELS, "qwen2-tiny", problem.Dims(128, 96, 4, 2, 32, 0))
    monkeypatch.setitem(decoding.LAYERS, "qwen2-tiny", 2)
    tokenizer = mock.MagicMock(eos_token_id=2)
    tokenizer.__len__.return_value = 5000
    tokenizer.decode.return_value = ""
    model = decoding.guessable_model("qwen2-tiny", torch.device("cpu"), tokenizer, "bf16", max_model_len=100)
    assert type(model.target.model).__name__ == "Qwen2ForCausalLM"
    assert model.target.backend.name == "fused"
    biases = [each for name, each in model.target.model.named_parameters() if name.endswith("bias")]
    assert len(biases) == 2 * 3
    assert all(0.1 < float(each.detach().std()) < 0.6 for each in biases)
    model = model.with_tree(TreeConfig(2, 4, 8))
    output = model.generate([[5, 9, 100], [77]], max_new_tokens=24, ignore_eos=True)
    assert output.stats.mean_accepted_length > 2
    assert max(max(answer) for answer in output.token_ids) < 4096


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
