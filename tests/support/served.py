"""A server over a model, in threads of the test's own process, and calls of it with answers to compare."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import openai
import uvicorn
from eagle_slim.runtime import SpeculativeModel
from eagle_slim.runtime.serve.app import Service


@dataclass(frozen=True)
class Served:
    service: Service
    url: str
    stack: ExitStack

    @property
    def is_idle(self) -> bool:
        return not (self.service.engine.running or self.service.engine.waiting)

    def client(self, api_key: str = "none", timeout: float = 300) -> openai.OpenAI:
        client = openai.OpenAI(base_url=f"{self.url}/v1", api_key=api_key, max_retries=0, timeout=timeout)
        return self.stack.enter_context(client)


@contextmanager
def serving(load: Callable[[], SpeculativeModel], **options: Any) -> Iterator[Served]:
    service = Service(load, **{"slots": 4, **options})
    server = uvicorn.Server(uvicorn.Config(service.app(), port=0, log_level="warning", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_for(lambda: server.started and (service.engine.model or service.engine.failure) is not None, 600)
        assert service.engine.failure is None
        port = server.servers[0].sockets[0].getsockname()[1]
        with ExitStack() as stack:
            yield Served(service, f"http://127.0.0.1:{port}", stack)
    finally:
        server.should_exit = True
        thread.join()


def wait_for(happened: Callable[[], bool], timeout_s: float = 120) -> None:
    end = time.monotonic() + timeout_s
    while not happened():
        assert time.monotonic() < end, "this takes too long"
        time.sleep(0.01)


@dataclass(frozen=True)
class MixedCall:
    """A call with options by OpenAI's names."""

    prompt: list[int]
    options: dict[str, Any]
    count: int = 1

    def ask(self, client: openai.OpenAI, is_streamed: bool) -> list[list[int]]:
        """Return the token ids of each answer, through a stream or whole."""
        body: dict[str, Any] = {"model": client.models.list().data[0].id, "prompt": self.prompt, "n": self.count}
        body["extra_body"] = {**self.options, "return_token_ids": True}
        if not is_streamed:
            return [choice.model_extra["token_ids"] for choice in client.completions.create(**body).choices]
        found: list[list[int]] = [[] for _ in range(self.count)]
        for chunk in client.completions.create(**body, stream=True):
            for choice in chunk.choices:
                found[choice.index] += (choice.model_extra or {}).get("token_ids", [])
        return found

    def alone(self, model: SpeculativeModel) -> list[list[int]]:
        """Return what `generate` answers to this prompt alone."""
        options = {**self.options, "max_new_tokens": self.options["max_tokens"], "num_return_sequences": self.count}
        del options["max_tokens"]
        if options.get("temperature") == 0:
            del options["num_return_sequences"], options["seed"]
        else:
            options["seed"] = [options["seed"]]
        answers = model.generate([self.prompt], **options).token_ids
        return answers * (self.count // len(answers))


def mixed_calls(number: int, vocab: int, seed: int = 0, longest: int = 60) -> Sequence[MixedCall]:
    """Calls of every kind of options; some prompts begin alike."""
    draw, calls = random.Random(seed), []
    shared = [draw.randrange(3, vocab) for _ in range(longest)]
    for _ in range(number):
        prompt = shared[: draw.randrange(longest)] if draw.random() < 0.3 else []
        prompt = prompt + [draw.randrange(3, vocab) for _ in range(draw.randrange(1, 12))]
        options: dict[str, Any] = {"max_tokens": draw.randrange(1, 24), "seed": draw.randrange(1000)}
        options["temperature"] = draw.choice([0, 0, 0.7, 1.0, 1.5])
        rules = {"top_p": 0.8, "top_k": 5, "min_p": 0.05} if options["temperature"] else {}
        rules |= {"repetition_penalty": 1.3, "stop": ["e", "th"], "ignore_eos": True}
        options |= {name: rules[name] for name in rules if draw.random() < 0.25}
        calls.append(MixedCall(prompt, options, draw.choice([1, 1, 1, 3])))
    return calls
