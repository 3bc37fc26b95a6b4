"""A tiny model that whole calls are made of, and a random one of dimensions named tiny."""

import pytest

# What imports Triton is imported in the fixtures: this file is read before the interpreter is chosen.


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    from eagle_slim.runtime import SpeculativeModel, TreeConfig, open_target
    from support.tiny_models import write_pair

    target, head = write_pair(tmp_path_factory.mktemp("pair"))
    opened = open_target(target, target_backend="fused")
    return SpeculativeModel.from_pretrained(opened, head, tree=TreeConfig(2, 4, 20))


@pytest.fixture
def pool(model):
    import numpy as np

    from benchmarks.exact import Pool

    text = np.random.default_rng(0).integers(3, 340, 250).tolist()
    return Pool(model, [model.encode_chat("hello"), model.encode_chat("good day")], text, 0, 32, new_tokens=9)


@pytest.fixture
def random_model(monkeypatch):
    import torch
    from eagle_slim.runtime.drafter.tuning import problem

    from benchmarks.shared import decoding

    monkeypatch.setitem(problem.MODELS, "tiny", problem.Dims(32, 48, 4, 2, 8, 90))
    monkeypatch.setitem(decoding.LAYERS, "tiny", 4)
    return decoding.RandomModel("tiny", torch.device("cpu"), torch.float32)
