"""Logits that are no distribution: an error that names the prompt, the position and the cause."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from eagle_slim.runtime import SpeculativeModel
from eagle_slim.runtime.errors import LogitsError
from eagle_slim.runtime.settings import PartialVerification
from eagle_slim.runtime.step.plan import CallRules
from support.tiny_models import VOCAB, random_prompts, tiny_target, write_head
from torch import Tensor

pytestmark = pytest.mark.filterwarnings("ignore::eagle_slim.runtime.errors.AcceptanceWarning")
PROMPTS = random_prompts([5, 9])
SAMPLED = {"temperature": 1.0, "seed": 1}


@pytest.fixture
def by_twins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choose tokens as on a GPU, where the rules of the call allow it."""
    of = CallRules.of
    monkeypatch.setattr(CallRules, "of", lambda *arguments: of(*arguments[:-1], torch.device("cuda")))


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_head(tmp_path_factory.mktemp("head"))


def build(head: Path, **options: Any) -> SpeculativeModel:
    return SpeculativeModel.from_pretrained(tiny_target("llama"), head, depth=3, top_k=4, total_tokens=12, **options)


@pytest.mark.parametrize("speculative", [True, False])
@pytest.mark.parametrize("sampling", [{}, SAMPLED, {**SAMPLED, "top_k": 3, "top_p": 0.9}], ids=["greedy", "all", "cut"])
@pytest.mark.parametrize("chooser", ["host", "device"])
def test_a_nan_in_the_lm_head_is_told(
    head: Path, request: pytest.FixtureRequest, chooser: str, sampling: dict[str, Any], speculative: bool
) -> None:
    if chooser == "device":
        request.getfixturevalue("by_twins")
    model = build(head)
    with torch.no_grad():
        model.target.model.lm_head.weight[3, 0] = float("nan")
    with pytest.raises(LogitsError, match="New token 0 of prompt 0 cannot be chosen: its logits hold a NaN"):
        model.generate(PROMPTS, max_new_tokens=8, speculative=speculative, **sampling)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_the_position_is_that_of_the_answer(head: Path, value: float) -> None:
    """What is drafted beyond an answer's end may be anything."""

    def spoil(input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores if input_ids.shape[1] != len(PROMPTS[1]) + 6 else torch.full_like(scores, value)

    model = build(head)
    options: dict[str, Any] = {"logits_processor": [spoil], "ignore_eos": True}
    for speculative in (True, False):
        with pytest.raises(LogitsError, match="New token 6 of prompt 1 cannot be chosen"):
            model.generate([PROMPTS[0][:1], PROMPTS[1]], max_new_tokens=8, speculative=speculative, **options)
    assert len(model.generate(PROMPTS[1], max_new_tokens=6, **options).token_ids[0]) == 6


@pytest.mark.parametrize("sampling", [{}, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("chooser", ["host", "device"])
def test_every_token_barred_is_told(
    head: Path, request: pytest.FixtureRequest, chooser: str, sampling: dict[str, Any]
) -> None:
    if chooser == "device":
        request.getfixturevalue("by_twins")
    with pytest.raises(LogitsError, match="New token 0 of prompt 0 cannot be chosen: every token is barred"):
        build(head).generate(PROMPTS, max_new_tokens=8, suppress_tokens=list(range(VOCAB)), **sampling)


@pytest.mark.parametrize("mode", ["exact", "lossy"])
def test_it_is_told_where_steps_run_ahead(tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token whose embedding is no number comes late in the answer, and steps run ahead over it."""
    target = tiny_target("llama", max_position_embeddings=1024)
    head = write_head(tmp_path, max_position_embeddings=1024)
    model = SpeculativeModel.from_pretrained(target, head, depth=3, top_k=4, total_tokens=12)
    small = partial(PartialVerification, num_blocks=2, num_steps=2, num_tokens=7, min_length=0)
    monkeypatch.setattr("eagle_slim.runtime.step.plan.PartialVerification", small)
    prompt = random_prompts([12])
    answer = model.generate(prompt, max_new_tokens=14, partial_verification=mode, ignore_eos=True)
    assert answer.stats.num_partial_passes > 0
    late = next(token for token in answer.token_ids[0][6:] if token not in {*prompt[0], *answer.token_ids[0][:2]})
    with torch.no_grad():
        target.model.embed_tokens.weight[late] = float("nan")
    with pytest.raises(LogitsError, match="its logits hold a NaN"):
        model.generate(prompt, max_new_tokens=14, partial_verification=mode, ignore_eos=True)
