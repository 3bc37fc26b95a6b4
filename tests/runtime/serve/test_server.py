"""Endpoints, refusals, faults, limits, keys, and the end of a server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import sysconfig
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import openai
import pytest
from eagle_slim.runtime import SpeculativeModel, TreeConfig
from eagle_slim.runtime.serve import engine
from eagle_slim.runtime.serve.cli import main
from eagle_slim.runtime.step import decoder, prefill
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from support.served import MixedCall, Served, serving, wait_for
from support.tiny_models import write_pair

pytestmark = pytest.mark.filterwarnings("ignore::eagle_slim.runtime.errors.AcceptanceWarning")
HELLO = [{"role": "user", "content": "hello"}]
LONG: dict[str, Any] = {"max_tokens": 120, "temperature": 1.0, "extra_body": {"ignore_eos": True}}
KEYS = ("key of one", "key of another")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def model(pair: tuple[Path, Path]) -> SpeculativeModel:
    tree = TreeConfig(2, 3, 9)
    return SpeculativeModel.from_pretrained(*pair, tree=tree, dtype="float32", max_model_len=200)


@pytest.fixture(scope="module")
def served(model: SpeculativeModel) -> Iterator[Served]:
    options = {"names": ("tiny", "small"), "api_keys": KEYS, "origins": ("http://page",)}
    with serving(lambda: model, slots=2, max_waiting=2, **options) as served:
        yield served


def call(url: str, body: Any = None, key: str = KEYS[0], **headers: str) -> tuple[int, Any, Any]:
    """Return status, headers and body of a response."""
    data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    asked = urllib.request.Request(url, data, {"Authorization": f"Bearer {key}", **headers})
    try:
        with urllib.request.urlopen(asked) as response:
            return response.status, response.headers, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.headers, error.read().decode()


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Chunks and steps that run, in order."""
    ran: list[str] = []

    def noting(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arguments: (ran.append(name), run(*arguments))[1]

    for owner, name in ((prefill.Prefill, "run_chunk"), (decoder.Decoder, "step")):
        monkeypatch.setattr(owner, name, noting(name, getattr(owner, name)))
    return ran


def test_whole_answers_and_streams_have_openais_form(model: SpeculativeModel, served: Served) -> None:
    client = served.client(KEYS[0])
    options: dict[str, Any] = {"model": "small", "messages": HELLO, "temperature": 0, "max_completion_tokens": 20}
    expected = model.chat(HELLO, max_new_tokens=20)
    whole = client.chat.completions.create(**options)
    ChatCompletion.model_validate(whole.model_dump(), strict=True)
    assert whole.choices[0].message.content == expected.text[0]
    assert whole.choices[0].finish_reason == {"eos": "stop"}.get(expected.results[0].finish_reason, "length")
    assert "float32" in str(whole.system_fingerprint)
    assert model.opened is not None
    assert model.opened.head.location not in str(whole.system_fingerprint)
    assert whole.model_extra == {"exactness": expected.stats.exactness}
    chunks = [*client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True})]
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk.model_dump(), strict=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    assert text == expected.text[0]
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]][-1] == whole.choices[0].finish_reason
    usage, stats = chunks[-1].usage, expected.stats
    assert usage.completion_tokens == stats.num_new_tokens == whole.usage.completion_tokens
    assert usage.completion_tokens_details.accepted_prediction_tokens == stats.num_accepted_tokens - stats.num_passes
    assert usage.prompt_tokens == len(expected.results[0].prompt_ids)
    assert usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens - 1
    several = client.completions.create(model="tiny", prompt=["ab", "cd"], n=2, seed=5, max_tokens=4)
    Completion.model_validate(several.model_dump(), strict=True)
    alone = client.completions.create(model="tiny", prompt="cd", n=2, seed=5, max_tokens=4)
    assert [each.text for each in several.choices[2:]] == [each.text for each in alone.choices]
    assert alone.choices[0].text != alone.choices[1].text


def test_messages_are_read_as_templates_take_them(
    model: SpeculativeModel, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = "{{ messages | tojson }}{{ tools | tojson }}{{ thinking }}"
    monkeypatch.setattr(model.tokenizer, "chat_template", template)
    tool_call = {"function": {"name": "f", "arguments": '{"x": 1}'}}
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [tool_call, {"function": {"name": "g", "arguments": ""}}]},
    ]
    body = {"messages": messages, "tools": [{"type": "function"}], "max_tokens": 1, "return_token_ids": True}
    body["chat_template_kwargs"] = {"thinking": True}
    answer = json.loads(call(f"{served.url}/v1/chat/completions", body)[2])
    read, _ = json.JSONDecoder().raw_decode(text := model.tokenizer.decode(answer["prompt_token_ids"]))
    assert read[0] == {"role": "system", "content": "a\nb"}
    assert [each["function"]["arguments"] for each in read[1]["tool_calls"]] == [{"x": 1}, {}]
    assert text.endswith('[{"type": "function"}]True')


@pytest.mark.parametrize(
    ("path", "body", "status", "named"),
    [
        ("chat/completions", b"{", 400, "JSON"),
        ("chat/completions", [], 400, "object"),
        ("chat/completions", {"messages": HELLO, "model": "other"}, 404, "other"),
        ("chat/completions", {"messages": "hello"}, 400, "messages"),
        ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "content"),
        ("chat/completions", {"messages": [*HELLO, {"content": "x"}]}, 400, "messages[1].role"),
        ("chat/completions", {"messages": []}, 400, "messages"),
        ("chat/completions", {"messages": HELLO, "max_completion_tokens": 0}, 400, "max_completion_tokens"),
        ("chat/completions", {"messages": HELLO, "response_format": {"type": "json_object"}}, 400, "response_format"),
        ("chat/completions", {"messages": HELLO, "tool_choice": "required"}, 400, "tool_choice"),
        ("chat/completions", {"messages": HELLO, "logprobs": True}, 400, "logprobs"),
        ("chat/completions", {"messages": HELLO, "temperature": "hot"}, 400, "temperature"),
        ("chat/completions", {"messages": HELLO, "top_p": 0}, 400, "top_p"),
        ("chat/completions", {"messages": HELLO, "max_tokens": 0}, 400, "max_tokens"),
        ("chat/completions", {"messages": HELLO, "n": 99}, 400, "n asks for 99 answers"),
        ("chat/completions", {"messages": HELLO, "tools": [{"type": "function"}]}, 400, "takes no tools"),
        ("chat/completions", {"messages": HELLO, "stream": "yes"}, 400, "stream"),
        ("chat/completions", {"messages": HELLO, "chat_template_kwargs": {"tokenize": True}}, 400, "tokenize"),
        ("chat/completions", {"messages": HELLO, "chat_template_kwargs": {"messages": 1}}, 400, "messages is not"),
        ("chat/completions", {"messages": [{"role": "user", "content": "x" * 900}]}, 400, "context"),
        ("completions", {"prompt": ""}, 400, "empty"),
        ("completions", {"prompt": {"a": 1}}, 400, "prompt"),
        ("completions", {"prompt": [[1, "a"]]}, 400, "prompt must be token ids"),
        ("completions", {"prompt": ["a", [1]]}, 400, "mixes"),
        ("completions", {"prompt": [{"role": "user"}]}, 400, "prompt must be a text"),
        ("completions", {"prompt": [99999]}, 400, "99999"),
        ("completions", {"prompt": "x", "seed": True}, 400, "seed"),
        ("completions", {"prompt": "x", "temperature": 0, "seed": "a"}, 400, "seed"),
        ("completions", {"prompt": "x", "temperature": False}, 400, "temperature"),
        ("completions", {"prompt": ["x"] * 5}, 400, "5 answers"),
        ("completions", {"prompt": "x", "stream": True, "stream_options": {"include_usage": 1}}, 400, "include_usage"),
        ("completions", {"prompt": "x", "stop": [3]}, 400, "stop"),
        ("completions", {"prompt": "x", "stop": {"a": 1}}, 400, "stop"),
        ("completions", {"prompt": "x", "repetition_penalty": 0}, 400, "repetition_penalty"),
        ("completions", {"prompt": "x", "logit_bias": {"3": 4}}, 400, "logit_bias"),
        ("completions", {"prompt": "x", "frequency_penalty": 0.5}, 400, "frequency_penalty"),
        ("completions", {"prompt": "x", "temprature": 0.5}, 400, "temprature"),
        ("completions", {"prompt": "x", "a\nb": 1}, 400, "a\nb"),
        ("nothing", {}, 404, "Not Found"),
    ],
)
def test_a_wrong_call_is_refused_in_openais_form(
    path: str, body: Any, status: int, named: str, served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "eagle_slim.serve")
    found, _, text = call(f"{served.url}/v1/{path}", body)
    error = json.loads(text)["error"]
    assert (found, error["type"]) == (status, "invalid_request_error")
    assert named in error["message"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["param"] in (body if isinstance(body, dict) and body else [None])
    # A line, which no client can break into two or fill.
    call(f"{served.url}/v1/%1b%5b31m%0a{'x' * 9000}")
    assert [line.isprintable() and len(line) < 300 for line in caplog.messages] == [True, True]


def test_fields_without_effect_are_taken(served: Served) -> None:
    body = {"messages": HELLO, "max_tokens": 1, "user": "me", "metadata": {}, "logit_bias": {}, "presence_penalty": 0.0}
    body |= {"logprobs": False, "tool_choice": "none", "tools": [{}], "stop": [], "response_format": {"type": "text"}}
    for more in ({"seed": None}, {"seed": -1}, {"seed": 2**63}, {"top_k": -1}, {"top_k": -1, "temperature": 0}):
        assert call(f"{served.url}/v1/chat/completions", {**body, **more})[0] == 200


def test_keys_metrics_health_models_and_pages(served: Served) -> None:
    url = served.url
    assert call(f"{url}/health", key="")[0] == 200
    assert call(f"{url}/v1/models", key="third")[0] == call(f"{url}/v1/completions", {}, key="")[0] == 401
    assert [each["id"] for each in json.loads(call(f"{url}/v1/models")[2])["data"]] == ["tiny", "small"]
    assert json.loads(call(f"{url}/v1/models/tiny")[2])["max_model_len"] == 200
    assert call(f"{url}/v1/models/other")[0] == 404
    assert call(f"{url}/v1/completions")[1]["allow"] == "POST"
    headers = call(f"{url}/health", Origin="http://page")[1]
    assert headers["access-control-allow-origin"] == "http://page"
    assert "access-control-allow-origin" not in call(f"{url}/health", Origin="http://other")[1]
    prompt = list(range(3, 40))
    cached = []
    for key in (KEYS[0], KEYS[0], KEYS[1]):
        answer = served.client(key).completions.create(model="tiny", prompt=prompt, max_tokens=2, temperature=0)
        cached.append(answer.usage.prompt_tokens_details.cached_tokens)
    assert cached == [0, len(prompt) - 1, 0]
    metrics = call(f"{url}/metrics", key="")[2]
    assert 'vllm:prefix_cache_hits_total{model_name="tiny"}' in metrics
    for name in ("num_requests_running", "prompt_tokens_total", "time_to_first_token_seconds_bucket"):
        assert f"vllm:{name}{{" in metrics
    assert "key of" not in metrics


def test_too_many_calls_are_told_to_come_later(model: SpeculativeModel, served: Served, ran: list[str]) -> None:
    """Two run and two wait, as long as the model is held; the short prompts of the first two enter together."""
    client, threads = served.client(KEYS[0]), []
    wait_for(lambda: served.is_idle)
    with model.target.hold():
        for _ in range(4):
            options = {"model": "tiny", "prompt": "ab", "max_tokens": 2}
            threads.append(threading.Thread(target=client.completions.create, kwargs=options))
            threads[-1].start()
        engine = served.service.engine
        wait_for(lambda: len(engine.waiting) + len(engine.running) == 4)
        with pytest.raises(openai.RateLimitError) as refused:
            client.completions.create(model="tiny", prompt="ab")
        assert int(refused.value.response.headers["retry-after"]) >= 1
    for thread in threads:
        thread.join()
    wait_for(lambda: served.is_idle)
    assert ran[:3] == ["run_chunk", "run_chunk", "step"]


@pytest.mark.parametrize("is_streamed", [True, False])
def test_a_client_that_hangs_up_frees_its_slot(
    is_streamed: bool, served: Served, ran: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_streamed:
        step = decoder.Decoder.step
        monkeypatch.setattr(decoder.Decoder, "step", lambda *given: (time.sleep(0.1), step(*given))[1])
    client = served.client(KEYS[0], timeout=300 if is_streamed else 1.0)
    if is_streamed:
        stream = client.completions.create(model="tiny", prompt="ab", stream=True, **LONG)
        next(iter(stream))
        stream.close()
    else:
        with pytest.raises(openai.APITimeoutError):
            client.completions.create(model="tiny", prompt="ab", **LONG)
    wait_for(lambda: served.is_idle)
    assert ran.count("step") < 60


def test_a_fault_of_one_answer_is_its_own(
    model: SpeculativeModel, served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The loop decodes text for stop strings alone; the third fault comes when a stream has begun."""
    caplog.set_level("INFO", "eagle_slim.serve")
    decode = model.tokenizer.decode

    def refuse(ids: list[int], **options: Any) -> str:
        if threading.current_thread().name == "engine" and len(ids) >= least:
            raise ValueError("a strange tokenizer")
        return decode(ids, **options)

    other = MixedCall([5, 6, 7], {"max_tokens": 40, "temperature": 0, "ignore_eos": True, "seed": 0})
    alone = other.alone(model)
    monkeypatch.setattr(model.tokenizer, "decode", refuse)
    found: list[Any] = []
    client = served.client(KEYS[1])
    thread = threading.Thread(target=lambda: found.extend(other.ask(client, is_streamed=True)))
    thread.start()
    for is_streamed, least in ((False, 1), (True, 1), (True, 4)):
        with pytest.raises(openai.InternalServerError if least == 1 else openai.APIError, match="ValueError"):
            [*client.completions.create(model="tiny", prompt="ab", stop="\x00", stream=is_streamed, **LONG)]
    # Its other answers, most of which wait, end with it.
    with pytest.raises(openai.InternalServerError, match="ValueError"):
        client.completions.create(model="tiny", prompt="ab", stop="\x00", n=2, **LONG)
    thread.join()
    assert found == alone
    wait_for(lambda: served.is_idle)
    lines = [record.message for record in caplog.records]
    assert sum("ended by" in line and "fault" in line for line in lines) == 4
    assert not any(line.startswith("/v1/") for line in lines)


def test_no_answer_waits_longer_than_a_chunk(served: Served, ran: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A long prompt comes while an answer runs, whose tokens are told before each chunk."""
    run_chunk, running, untold = prefill.Prefill.run_chunk, served.service.engine.running, []

    def look(*given: Any) -> None:
        untold.extend(len(request.token_ids) - answer.num_told for request, answer in running.items())
        run_chunk(*given)

    monkeypatch.setattr(prefill.Prefill, "run_chunk", look)
    monkeypatch.setattr(prefill, "LARGEST_EAGER_CHUNK", 4)
    monkeypatch.setattr(engine, "_PAUSE_S", 0)
    client = served.client(KEYS[0])
    stream = iter(client.completions.create(model="tiny", prompt=[3], stream=True, **LONG))
    next(stream)
    client.completions.create(model="tiny", prompt=[4] * 60, max_tokens=2)
    assert len([*stream]) > 1
    assert set(untold) == {0}
    begins = ran.index("step")
    assert ran[begins:].count("run_chunk") == 15
    assert ("run_chunk", "run_chunk") not in zip(ran[begins:], ran[begins + 1 :], strict=False)


@pytest.mark.parametrize("ends", ["by itself", pytest.param("by the limit", marks=pytest.mark.slow)])
def test_sigterm_lets_answers_end(ends: str, pair: tuple[Path, Path]) -> None:
    """The command, with an answer that ends within the limit, or not."""
    program, (target, head) = Path(sysconfig.get_path("scripts")) / "eagle-serve", pair
    command = [sys.executable, program, head, "--target", target, "--port", "0", "--max-model-len", "240"]
    command += ["--depth", "2", "--draft-top-k", "2", "--total-tokens", "4", "--grace"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    limit = "60" if ends == "by itself" else "1"
    server = subprocess.Popen([*command, limit], stderr=subprocess.PIPE, text=True, env=environment)
    try:
        assert server.stderr is not None
        banner = next(line for line in server.stderr if "http://" in line)
        url = next(word.rstrip(":") for word in banner.split() if word.startswith("http://"))
        assert "trees of 4 nodes (asked for)" in next(server.stderr)
        taken = [*command[:2], "--port", url.rpartition(":")[2].partition("/")[0]]
        second = subprocess.run(taken, capture_output=True, text=True, env=environment, timeout=60)
        assert (second.returncode, "port" in second.stderr, "--port 0" in second.stderr) == (1, True, True)
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
            name = client.models.list().data[0].id
            chunks = client.completions.create(model=name, prompt="ab", stream=True, **LONG)
            rest = [next(chunks)]
            server.send_signal(signal.SIGTERM)
            # A quick machine ends it within the shortest limit, too.
            with suppress(*() if ends == "by itself" else (Exception,)):
                rest += chunks
                assert rest[-1].choices[0].finish_reason == "length"
        log = server.communicate(timeout=60)[1]
        assert server.returncode == 0, log
        assert " drafted); first token after" in log
    finally:
        server.kill()
        server.communicate()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "grace", "code"), [(signal.SIGTERM, "60", 0), (signal.SIGTERM, "0", 0), (signal.SIGINT, "0", 130)]
)
def test_a_signal_ends_a_server_that_loads(
    number: signal.Signals, grace: str, code: int, pair: tuple[Path, Path]
) -> None:
    command = [sys.executable, "-m", "eagle_slim.runtime.serve.cli", pair[1], "--target", pair[0], "--port", "0"]
    server = subprocess.Popen([*command, "--grace", grace], stderr=subprocess.PIPE, text=True)
    try:
        assert server.stderr is not None
        next(line for line in server.stderr if line.startswith("loading"))
        server.send_signal(number)
        log = server.communicate(timeout=60)[1]
        assert (server.returncode, "error" in log) == (code, False), log
    finally:
        server.kill()
        server.communicate()


@pytest.mark.parametrize(
    ("args", "given"), [(["--api-key", ""], "good"), (["--api-key", " "], ""), ([], ""), ([], " \n")]
)
def test_an_empty_key_is_refused(
    args: list[str], given: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EAGLE_SLIM_API_KEY", given)
    with pytest.raises(SystemExit) as ended:
        main(args)
    assert (ended.value.code, "is empty, which every call would match" in capsys.readouterr().err) == (2, True)
