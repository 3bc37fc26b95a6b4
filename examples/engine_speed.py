"""Compare draft heads where they are served: ask running servers the same questions, print speed and accepted length.

    vllm serve TARGET --port 8000 --speculative-config '{"method": "eagle3", "model": "./full", ...}'
    vllm serve TARGET --port 8001 --speculative-config '{"method": "eagle3", "model": "./slim", ...}'
    python examples/engine_speed.py --server full=http://localhost:8000 --server slim=http://localhost:8001

One server serves one head, so give one --server for each; they are asked one after the other. Any server with OpenAI's
chat API gives the speed; the accepted length is read from the metrics of vLLM, and of SGLang if it was started with
--enable-metrics. Servers on one GPU share its memory, but only one is asked at a time, so each runs at full speed.
"""

import argparse
import http.client
import json
import re
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{.*\})?\s+(\S+)")


class ServerError(Exception):
    """A server that cannot be measured; the message says which, why, and what to try."""


@dataclass(frozen=True)
class Speed:
    """What one server did with all questions.

    Attributes:
        label: from the command line.
        model: name under which the server serves its target.
        answers: questions answered.
        tokens: tokens generated, as the server counts them.
        tokens_per_s: of all answers together, the prompts' passes included.
        accepted_length: tokens per pass of the target that verified drafts, the target's own included; None if unknown.
        note: why the accepted length is missing or how far it can be trusted; empty if there is nothing to say.
    """

    label: str
    model: str
    answers: int
    tokens: int
    tokens_per_s: float
    accepted_length: float | None
    note: str


def fetch(url: str, body: dict[str, Any] | None = None, timeout_s: float = 600) -> str:
    """GET ``url``, or POST ``body`` to it as JSON; returns the answer's text.

    Raises:
        ServerError: there is no answer, or the answer is an error.
    """
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            text: str = answer.read().decode(errors="replace")
            return text
    except urllib.error.HTTPError as error:
        detail = error.read(500).decode(errors="replace").strip()
        raise ServerError(f"{url} answers {error.code} {error.reason}: {detail}") from error
    except (http.client.HTTPException, OSError, UnicodeError) as error:
        # An answer that is not HTTP is quoted as it came.
        reason = str(getattr(error, "reason", error)).strip() or type(error).__name__
        raise ServerError(f"{url} does not answer ({reason}). Is the server up, and is that its port?") from error


def read_metrics(text: str) -> dict[str, float]:
    """Sum every metric of a Prometheus page over its labels, by name; lines that are not samples are ignored."""
    totals: dict[str, float] = {}
    for line in text.splitlines():
        if not (found := _SAMPLE.match(line)):
            continue
        with suppress(ValueError):
            totals[found[1]] = totals.get(found[1], 0.0) + float(found[2])
    return totals


def accepted_length(before: dict[str, float], after: dict[str, float], answers: int) -> tuple[float | None, str]:
    """Tokens per verifying pass between two pages of metrics, and a note.

    vLLM counts drafts and the drafted tokens accepted. SGLang counts passes that verify drafts and tokens generated, of
    which the first of every answer comes from the prompt's pass; before it counted passes it gave only the accepted
    length of its last log interval.
    """

    def gained(name: str) -> float:
        return after.get(name, 0.0) - before.get(name, 0.0)

    if "vllm:spec_decode_num_drafts_total" in after:
        drafts = gained("vllm:spec_decode_num_drafts_total")
        if drafts <= 0:
            return None, "vLLM drafted nothing: it was started without a head, or the answers were too short."
        return 1 + gained("vllm:spec_decode_num_accepted_tokens_total") / drafts, ""
    if "sglang:spec_verify_calls_total" in after:
        passes = gained("sglang:spec_verify_calls_total")
        if passes <= 0:
            return None, "SGLang drafted nothing: it was started without a head, or the answers were too short."
        return (gained("sglang:generation_tokens_total") - answers) / passes, ""
    if after.get("sglang:spec_accept_length", 0.0) > 0:
        return after["sglang:spec_accept_length"], "SGLang's own average of its last log interval."
    if any(name.startswith(("vllm:", "sglang:")) for name in after):
        return None, "its metrics mention no drafts: the server was started without a head."
    return None, "its metrics are neither vLLM's nor SGLang's."


def metrics_of(url: str) -> tuple[dict[str, float], str]:
    """The metrics of a server, or none and why."""
    try:
        return read_metrics(fetch(f"{url}/metrics", timeout_s=30)), ""
    except ServerError as error:
        return {}, f"{error} (SGLang shows metrics only with --enable-metrics.)"


def measure(label: str, url: str, questions: list[str], max_tokens: int, concurrency: int) -> Speed:
    """Ask one server all questions, ``concurrency`` at a time, after one that warms it up.

    Raises:
        ServerError: it does not answer, or not as OpenAI's API does.
    """
    try:
        model = json.loads(fetch(f"{url}/v1/models", timeout_s=30))["data"][0]["id"]
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise ServerError(f"{url}/v1/models does not list a model as OpenAI's API does.") from error

    def ask(question: str) -> int:
        body = {
            "model": model,
            "messages": [{"role": "user", "content": question}],
            "max_tokens": max_tokens,
            "temperature": 0,
        }
        answer = fetch(f"{url}/v1/chat/completions", body)
        try:
            return int(json.loads(answer)["usage"]["completion_tokens"])
        except (ValueError, KeyError, TypeError) as error:
            raise ServerError(f"{url} answers without usage.completion_tokens: {answer[:200]}") from error

    ask(questions[0])
    before, note = metrics_of(url)
    began = time.perf_counter()
    with ThreadPoolExecutor(concurrency) as pool:
        tokens = sum(pool.map(ask, questions))
    seconds = time.perf_counter() - began
    length = None
    if not note:
        # SGLang's processes report their counts a moment after the answer.
        time.sleep(1)
        after, note = metrics_of(url)
        if not note:
            length, note = accepted_length(before, after, len(questions))
    return Speed(label, model, len(questions), tokens, tokens / seconds, length, note)


def parse_arguments() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--server", action="append", required=True, metavar="LABEL=URL",
        help="name of a head and the server that serves it, without /v1; repeat for more than one",
    )  # fmt: skip
    prompts = Path(__file__).with_name("prompts.jsonl")
    parser.add_argument("--prompts", type=Path, default=prompts, help="questions, one JSON object with turns per line")
    parser.add_argument("--limit", type=int, help="ask only that many of the questions")
    parser.add_argument("--max-tokens", type=int, default=256, help="tokens to generate per answer (default: 256)")
    parser.add_argument("--concurrency", type=int, default=1, help="questions asked at the same time (default: 1)")
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    arguments = parser.parse_args()
    arguments.servers = {}
    for server in arguments.server:
        label, separator, url = server.partition("=")
        if not (label and separator and is_server_url(url)):
            parser.error(f"--server {server!r} is not LABEL=URL, such as slim=http://localhost:8000")
        if label in arguments.servers:
            parser.error(f"--server {label}=… is given twice; give every head a label of its own")
        arguments.servers[label] = url.rstrip("/")
    for option in ("limit", "max_tokens", "concurrency"):
        if (value := getattr(arguments, option)) is not None and value < 1:
            parser.error(f"--{option.replace('_', '-')} must be at least 1, got {value}")
    if arguments.json and not arguments.json.parent.is_dir():
        parser.error(f"--json {arguments.json}: there is no folder {arguments.json.parent}; make it first")
    if arguments.json and arguments.json.is_dir():
        parser.error(f"--json {arguments.json} is a folder; name a file in it")
    return arguments


def is_server_url(url: str) -> bool:
    """Whether ``url`` has http or https, a host, and a port that is a number, or none."""
    try:
        parts = urllib.parse.urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def read_questions(path: Path, limit: int | None) -> list[str]:
    """First turn of each line; raises ValueError naming the line that has none."""
    questions = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines()[:limit], start=1):
        try:
            questions.append(str(json.loads(line)["turns"][0]))
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise ValueError(f'{path}, line {number}: expected {{"turns": ["question", …]}}.') from error
    if not questions:
        raise ValueError(f"{path} holds no question.")
    return questions


def main() -> int:
    """Measure every server and print a table; return 1 if one could not be measured or accepts almost nothing."""
    arguments = parse_arguments()
    try:
        questions = read_questions(arguments.prompts, arguments.limit)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    speeds, failed = [], False
    width = max(map(len, [*arguments.servers, "head"]))
    print(f"{'head':{width}}  tokens/s  accepted length")
    for label, url in arguments.servers.items():
        try:
            speed = measure(label, url, questions, arguments.max_tokens, arguments.concurrency)
        except ServerError as error:
            print(f"{label}: {error}", file=sys.stderr)
            failed = True
            continue
        speeds.append(speed)
        length = "unknown" if speed.accepted_length is None else f"{speed.accepted_length:.2f}"
        print(f"{label:{width}}  {speed.tokens_per_s:8.1f}  {length}", flush=True)
        if speed.note:
            print(f"{label}: {speed.note}", file=sys.stderr)
        if speed.accepted_length is not None and speed.accepted_length < 1.1:
            print(
                f"{label}: almost nothing is accepted. Engines serve a head with a wrong map without an error: run "
                "eagle-verify on the head, with --target, and see docs/engines.md.",
                file=sys.stderr,
            )
            failed = True
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(speed) for speed in speeds], indent=2) + "\n", encoding="utf-8")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
