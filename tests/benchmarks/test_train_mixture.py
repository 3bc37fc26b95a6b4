"""The small trained mixture's parts: what is copied from a Llama, and the head's passes in training."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from eagle_slim.runtime.drafter.reference import ReferenceDraft
from eagle_slim.runtime.settings import TreeConfig
from support.drafting import random_head
from support.tiny_models import tiny_target

from benchmarks import train_mixture
from benchmarks.train_mixture import TrainedHead, head_losses, mixture_of, target_losses, train

CONFIG = {"num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "head_dim": 16, "rope_theta": 1e4}


def test_passes_in_training_are_those_of_a_draft() -> None:
    head, rows, passes = random_head(), 7, 3
    draw = torch.Generator().manual_seed(0)
    features = torch.randn((1, rows, head.feature_width), generator=draw)
    tokens = torch.randint(300, (1, rows + passes), generator=draw)
    cache = torch.zeros((2, 1, 2, 32, 16))
    draft = ReferenceDraft(head, TreeConfig(2, 1, 4), torch.tensor([0]), torch.tensor([0]), (cache[0], cache[1]))
    wanted = [draft.extend(features, tokens[:, 1 : rows + 1], torch.tensor([rows]))]
    for number in (1, 2):
        seen = torch.ones((1, 1, number), dtype=torch.bool)
        wanted.append(draft.level(wanted[-1], tokens[:, rows + number : rows + number + 1], seen))
    trained = TrainedHead(CONFIG, head.tensors)
    hidden, keys = trained.linear(features, "fc"), []
    for number in range(passes):
        ahead = tokens[:, number + 1 : number + 1 + rows]
        hidden = trained(hidden, F.embedding(ahead, head.embedding), keys)
        torch.testing.assert_close(hidden[:, -1:], wanted[number])


@pytest.mark.parametrize("family", train_mixture.FAMILIES)
def test_a_mixture_begins_as_the_model_that_it_is_made_of_and_learns(
    monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    monkeypatch.setattr(train_mixture, "NOISE", 0.0)
    base = tiny_target("llama")
    tokens = torch.randint(base.config.vocab_size, (4, 24), generator=torch.Generator().manual_seed(0))
    model = mixture_of(base, tokens, family)
    x = torch.randn((1, 5, base.config.hidden_size))
    found = model.model.layers[0].mlp(x)
    torch.testing.assert_close(found[0] if family == "gpt-oss" else found, base.model.layers[0].mlp(x))
    steps = ((number / 30, tokens) for number in range(30))
    losses = train([*model.parameters()], 1e-2, lambda each: target_losses(model, each), steps)
    assert losses[-1][0] < losses[0][0] - 0.5
    hidden = base.config.hidden_size
    head = random_head(hidden=hidden, target_vocab=base.config.vocab_size)
    trained = TrainedHead(CONFIG, {name: each.requires_grad_() for name, each in head.tensors.items()})
    parameters = [*trained.tensors.values()]
    steps = ((number / 20, tokens) for number in range(20))
    losses = train(parameters, 1e-2, lambda each: head_losses(trained, model, (0, 1, 1), each), steps)
    assert losses[-1][0] < losses[0][0]
    assert len(losses[0]) == 1 + train_mixture.PASSES


def test_batches_end_with_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(0.0, 1.0)
    monkeypatch.setattr(train_mixture.time, "perf_counter", lambda: next(clock))
    found = [*train_mixture.batches(torch.arange(40)[:, None], 5, torch.device("cpu"))]
    assert [share for share, _ in found] == [0.2, 0.4, 0.6, 0.8]
    assert len(found[0][1]) == train_mixture.BATCH
