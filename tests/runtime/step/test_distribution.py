"""Sampled output is distributed as the target's: chi-square on token triples.

The expectation is computed from the target alone, with transformers' warpers; a control shows that the test would see
a wrong temperature.
"""

import itertools

import numpy as np
import pytest
import torch
from eagle_slim.runtime import SamplingConfig, SpeculativeModel, TreeConfig
from support.sampling import warp
from support.tiny_models import tiny_target, write_head

pytestmark = pytest.mark.filterwarnings("ignore::eagle_slim.runtime.errors.AcceptanceWarning")
VOCAB = 8
PROMPT = [3, 5, 4]
DRAWS = 1500
LENGTH = 3
ONE, LESS = ({}, {"top_p": 0.85}, {"min_p": 0.1}, {"top_p": 0.9, "top_k": 6}), ({}, {"top_k": 5})
WARPERS = [{"temperature": value, **cuts} for value, each in ((1.0, ONE), (0.7, LESS)) for cuts in each]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> SpeculativeModel:
    target = tiny_target("llama", seed=7, vocab_size=VOCAB, num_hidden_layers=2)
    with torch.no_grad():
        target.lm_head.weight.mul_(0.35)  # softer, so that every token has a chance
    head = write_head(tmp_path_factory.mktemp("head"), vocab=VOCAB, eagle_aux_hidden_state_layer_ids=[0, 1, 2])
    return SpeculativeModel.from_pretrained(target, head, tree=TreeConfig(2, 4, 24))


def joint_probabilities(model: SpeculativeModel, sampling: SamplingConfig) -> np.ndarray:
    """The target's probability of every continuation of `LENGTH` tokens: float64 [VOCAB] * LENGTH."""
    prefixes = torch.tensor([[*PROMPT, *p] for p in itertools.product(range(VOCAB), repeat=LENGTH - 1)])
    with torch.no_grad():
        logits = model.target.model(prefixes).logits[:, len(PROMPT) - 1 :]
    joint = torch.ones([VOCAB] * LENGTH, dtype=torch.float64)
    for step in range(LENGTH):
        p = warp(logits[:, step], sampling).softmax(-1, dtype=torch.float64)  # [prefixes, VOCAB]
        # Prefixes that agree in the first `step` tokens give the same row.
        rows = p.reshape(*[VOCAB] * (LENGTH - 1), VOCAB)[(..., *[0] * (LENGTH - 1 - step), slice(None))]
        joint = joint * rows.reshape(*rows.shape, *[1] * (LENGTH - 1 - step))
    return joint.numpy()


def chi_square_p(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """P-value of the observed counts; cells expected below 5 are put together."""
    from scipy import stats

    expected = probabilities * counts.sum()
    large = expected >= 5
    f_obs = [*counts[large], counts[~large].sum()]
    f_exp = [*expected[large], expected[~large].sum()]
    if f_exp[-1] < 5:
        f_obs[-2:], f_exp[-2:] = [sum(f_obs[-2:])], [sum(f_exp[-2:])]
    return float(stats.chisquare(f_obs, np.array(f_exp) * sum(f_obs) / sum(f_exp)).pvalue)


@pytest.mark.parametrize("warpers", WARPERS, ids=str)
@pytest.mark.slow
def test_sampled_output_has_the_targets_distribution(model: SpeculativeModel, warpers: dict[str, float]) -> None:
    # EOS would end answers early and hide later tokens, so that it is an ordinary token here.
    output = model.generate([PROMPT] * DRAWS, max_new_tokens=LENGTH, ignore_eos=True, seed=20, max_slots=250, **warpers)
    drawn = np.array(output.token_ids)
    assert drawn.shape == (DRAWS, LENGTH)
    # Many tokens came out of trees, not one by one: the claim is about accepted drafts.
    assert output.stats.mean_accepted_length > 1.3
    counts = np.zeros([VOCAB] * LENGTH)
    np.add.at(counts, tuple(drawn.T), 1)
    joint = joint_probabilities(model, SamplingConfig(**warpers))
    np.testing.assert_allclose(joint.sum(), 1.0)
    assert counts[joint == 0].sum() == 0
    assert chi_square_p(counts.ravel(), joint.ravel()) > 0.001
    wrong = joint_probabilities(model, SamplingConfig(**{**warpers, "temperature": warpers["temperature"] * 1.5}))
    assert chi_square_p(counts.ravel(), wrong.ravel()) < 1e-6
