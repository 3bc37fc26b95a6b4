"""Answers under load, through the `openai` client, beside those of the same prompts alone."""

from __future__ import annotations

import gc
import http.client
import json
import os
import random
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import openai
import pytest
import torch
from eagle_slim.runtime import SpeculativeModel, TreeConfig
from eagle_slim.runtime.step import prefill
from eagle_slim.runtime.step.plan import CallRules
from support.served import MixedCall, Served, mixed_calls, serving, wait_for
from support.tiny_models import write_pair

pytestmark = pytest.mark.filterwarnings("ignore::eagle_slim.runtime.errors.AcceptanceWarning")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> SpeculativeModel:
    target, head = write_pair(tmp_path_factory.mktemp("pair"))
    return SpeculativeModel.from_pretrained(target, head, tree=TreeConfig(2, 3, 9), dtype="float32", max_model_len=160)


@pytest.fixture(params=["cpu", "cuda"], ids=["chosen on the host", "chosen as on a GPU"])
def served(
    model: SpeculativeModel, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[Served]:
    """Tokens are chosen by a request's rules alone, or by stages and numbers of all slots, and read a step late.

    Prompts of more than eight tokens are run in chunks, between which steps run.
    """
    of, device = CallRules.of, torch.device(request.param)
    monkeypatch.setattr(CallRules, "of", lambda *arguments: of(*arguments[:-1], device))
    monkeypatch.setattr(prefill, "LARGEST_EAGER_CHUNK", 8)
    with serving(lambda: model) as served:
        plan = served.service.engine.plan
        assert plan is not None
        assert (plan.rules.host_reason is None) == (request.param == "cuda")
        yield served


def ask_and_leave(call: MixedCall, client: openai.OpenAI) -> None:
    """Hang up in the middle of an answer, or before it begins."""
    options = {"max_tokens": 100, "temperature": 1.0, "extra_body": {"ignore_eos": True}}
    stream = client.completions.create(
        model=client.models.list().data[0].id, prompt=call.prompt, stream=True, **options
    )
    for _ in range(len(call.prompt) % 3):
        next(iter(stream))
    stream.close()


def compare_under_load(calls: Sequence[MixedCall], model: SpeculativeModel, served: Served, leaves: float) -> None:
    client, draw = served.client(), random.Random(1)
    name = client.models.list().data[0].id
    assert name
    tasks = [partial(call.ask, client, draw.random() < 0.5) for call in calls]
    with ThreadPoolExecutor(12) as clients:
        asked, left = [], []
        for call, task in zip(calls, tasks, strict=True):
            if draw.random() < leaves:
                left.append(clients.submit(ask_and_leave, call, client))
            asked.append(clients.submit(task))
        answers = [each.result() for each in asked]
        assert all(each.result() is None for each in left)
    wait_for(lambda: served.is_idle)
    for call, answer in zip(calls, answers, strict=True):
        assert answer == call.alone(model), call


@pytest.mark.parametrize("number", [40, pytest.param(2000, marks=[pytest.mark.slow, pytest.mark.load])])
def test_answers_under_load_are_those_alone(number: int, model: SpeculativeModel, served: Served) -> None:
    compare_under_load(mixed_calls(number, 300), model, served, leaves=0.2)


@pytest.mark.gpu
@pytest.mark.parametrize("number", [200, pytest.param(2000, marks=[pytest.mark.slow, pytest.mark.load])])
def test_answers_under_load_on_a_gpu(number: int) -> None:
    """The built-in model in bfloat16, whose rows are exact; steps choose their trees, and prompts have two chunks."""
    model = SpeculativeModel.from_pretrained(dtype="bfloat16", device="cuda", max_model_len=1900)
    with serving(lambda: model, slots=16) as served:
        compare_under_load(mixed_calls(number, 40000, longest=900), model, served, leaves=0.1)


def counts() -> dict[str, int]:
    """Objects, threads, open files and resident megabytes of this process."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "megabytes": pages * os.sysconf("SC_PAGE_SIZE") // 1_000_000,
        "objects": len(gc.get_objects()),
        "threads": threading.active_count(),
        "files": len(os.listdir("/proc/self/fd")),
    }


@pytest.mark.slow
@pytest.mark.load
@pytest.mark.parametrize("served", ["cpu"], indirect=True)
def test_many_calls_leave_nothing_behind(served: Served) -> None:
    """A day's worth in short: whole answers, streams, refusals, and clients that hang up."""
    address, calls = served.url.removeprefix("http://"), mixed_calls(200, 300, longest=20)

    def talk(number: int) -> None:
        connection = http.client.HTTPConnection(address)
        for index in range(number):
            call = calls[index % len(calls)]
            body = {"prompt": call.prompt, **call.options, "max_tokens": index % 5, "stream": index % 3 == 0}
            connection.request("POST", "/v1/completions", json.dumps(body))
            if index % 50 == 49:
                connection.close()
                continue
            connection.getresponse().read()
        connection.close()

    def talk_of(number: int) -> dict[str, int]:
        with ThreadPoolExecutor(4) as clients:
            assert [*clients.map(talk, [number // 4] * 4)] == [None] * 4
        wait_for(lambda: served.is_idle)
        return counts()

    # Pools and caches grow in the first calls.
    _, before, after = talk_of(2000), talk_of(9000), talk_of(9000)
    assert after["threads"] <= before["threads"]
    assert after["files"] <= before["files"] + 4
    assert after["objects"] < before["objects"] + 5000
    # What the allocator keeps varies by some; 9,000 calls that left their requests behind, of 5 KB each, are 45 MB.
    assert after["megabytes"] < before["megabytes"] + 25, (before, after)
