"""Measure `eagle-serve` over HTTP beside `generate` in as many slots, in the same run; its clients are other processes.

    python -m benchmarks.serve [--rows REGEX] [--out benchmarks/results/DATE-h100-serve.json]

``smollm2/N``, ``8b/N`` (Llama-3.1-8B's dimensions, random weights): N clients that begin together, each of which takes
the next call of one list, as `generate`'s slots do, prompts of 512 tokens, 128 new, greedy: tokens/s of `generate`, of
whole answers and of streams, and the median of their ratios for the same prompts; all answers must be the same tokens.
``…/idle``: one stream at a time: the first token beside the time of a call of `generate` for one token, and the median
gap between chunks beside a step's. ``…/long``: while other answers run, a prompt of 30,000 tokens comes (of 6,000 for
smollm2): the longest gap between two chunks of theirs before and after. ``8b/beside``: 1 and 16 streams at once, asked
of ours and of the servers of engines that ``--servers NAME=PORT ...`` names, in turn.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from eagle_slim.runtime import SpeculativeModel
from transformers import AutoTokenizer

from benchmarks.shared.command import Command, show, write
from benchmarks.shared.timing import machine
from benchmarks.shared.whole_models import model_of_8b

MODELS = ("smollm2", "8b")
ROWS = (*(f"{model}/{kind}" for model in MODELS for kind in ("1", "4", "16", "idle", "long")), "8b/beside")
PROMPT, NEW, ROUNDS, SETTLED_S = 512, 128, 3, 1.0
"""Tokens of a prompt and of an answer; times that each way is measured; seconds that answers have run when a long
prompt comes."""
CALLS = {"smollm2": 12, "8b": 6}
"""Calls of each client: so many that beginning and end, where not all slots are taken, weigh little."""
LONG_PROMPT, LONG_NEW = {"smollm2": 6000, "8b": 30000}, {"smollm2": 6000, "8b": 1500}
"""Tokens of that prompt, and of the answers that run."""
BESIDE_LEN, PROMPT_IDS = 1024, (1000, 40000)
"""Room of an answer where engines beside ours are asked, which take a part of the memory; ids of their prompts."""
_CLIENT = Path(__file__).parent / "shared" / "http_client.py"


def prompts_of(model: SpeculativeModel, number: int, first: int, length: int | None = None) -> list[list[int]]:
    """Return prompts of so many tokens out of the benchmarks' questions, from the ``first`` on, each another."""
    text = (Path(__file__).parent / "prompts.jsonl").read_text(encoding="utf-8")
    length = PROMPT if length is None else length
    ids: list[int] = model.tokenizer(text).input_ids  # type: ignore[misc]
    # Nothing of one is reused for another.
    starts = [(61 * i) % len(ids) for i in range(first, first + number)]
    ids *= 2 + length // len(ids)
    return [ids[start : start + length] for start in starts]


def call_from_processes(port: int, calls: Sequence[dict[str, Any]], clients: int) -> list[dict[str, Any]]:
    """Have calls made by so many processes, each of which takes the next one that is left, as `generate`'s slots do."""
    source, sink = os.pipe()
    command = [sys.executable, "-S", str(_CLIENT), str(port), str(source)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "pass_fds": (source,), "text": True}
    processes = [subprocess.Popen(command, **pipes) for _ in range(clients)]
    done: dict[str, Any] = {}
    for process in processes:
        assert process.stdin is not None
        process.stdin.write(json.dumps(calls))
        process.stdin.close()
    streams = [process.stdout for process in processes if process.stdout is not None]
    assert [stream.readline() for stream in streams] == ["ready\n"] * clients
    os.write(sink, b"".join(b"%04d" % number for number in range(len(calls))))
    for end in (source, sink):
        os.close(end)
    for process, stream in zip(processes, streams, strict=True):
        with stream:
            done |= json.load(stream)
        process.wait()
    return [done[str(number)] for number in range(len(calls))]


class Server:
    """A server in this process over a model; ``slots`` of it."""

    def __init__(self, model: SpeculativeModel, slots: int) -> None:
        import uvicorn
        from eagle_slim.runtime.serve.app import Service

        self.service = Service(lambda: model, slots=slots)
        options: dict[str, Any] = {"log_level": "warning", "access_log": False, "proxy_headers": False}
        config = uvicorn.Config(self.service.app(), port=0, timeout_graceful_shutdown=5, **options)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run)
        self._thread.start()
        began = time.time()
        engine = self.service.engine
        while not self._server.started or (engine.model is None and engine.failure is None):
            time.sleep(0.1)
        if engine.failure is not None:
            self.close()
            raise engine.failure
        self.ready_s = time.time() - began
        self.port = self._server.servers[0].sockets[0].getsockname()[1]

    def close(self) -> None:
        """End the server; the model stays."""
        self._server.should_exit = True
        self._thread.join()


def body(prompt: Sequence[int], stream: bool, new: int | None = None) -> dict[str, Any]:
    """Return a call for a greedy answer of ``new`` tokens; None is `NEW`."""
    fixed = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return {"prompt": list(prompt), "max_tokens": NEW if new is None else new, "stream": stream, **fixed}


def run_row(model: SpeculativeModel, server: Server, clients: int, calls_each: int) -> dict[str, Any]:
    """Measure ``clients`` calls at a time, each way in turn, beside `generate` with the same prompts."""
    rates: dict[str, list[float]] = {"generate": [], "whole": [], "streamed": []}
    ratios: dict[str, list[float]] = {"whole_ratio": [], "streamed_ratio": []}
    options: dict[str, Any] = {"max_new_tokens": NEW, "ignore_eos": True, "max_slots": clients}
    number, different = clients * calls_each, 0
    model.generate(prompts_of(model, number, 0), **options)
    for turn in range(2 * ROUNDS):
        way, prompts = ("whole", "streamed")[turn % 2], prompts_of(model, number, (turn + 1) * number)
        output = model.generate(prompts, **options)
        calls = call_from_processes(server.port, [body(prompt, way == "streamed") for prompt in prompts], clients)
        took = max(call["times"][-1] for call in calls) - min(call["sent"] for call in calls)
        rates["generate"].append(output.stats.tokens_per_s)
        rates[way].append(number * NEW / took)
        ratios[f"{way}_ratio"].append(rates[way][-1] / rates["generate"][-1])
        different += sum(call["tokens"] != alone for call, alone in zip(calls, output.token_ids, strict=True))
    medians = {f"{name}_tokens_s": statistics.median(values) for name, values in rates.items()}
    medians |= {name: statistics.median(values) for name, values in ratios.items()}
    return {**medians, "different": different, "spread": {k: [min(v), max(v)] for k, v in (rates | ratios).items()}}


def run_idle(model: SpeculativeModel, server: Server) -> dict[str, Any]:
    """Measure single streams beside calls of `generate`."""
    prompts = prompts_of(model, 12, 1000)
    calls = call_from_processes(server.port, [body(prompt, True) for prompt in prompts], 1)
    first_s = statistics.median(call["times"][0] - call["sent"] for call in calls[2:])
    gaps = [after - before for call in calls[2:] for before, after in pairwise(call["times"])]
    alone = [model.generate(prompt, max_new_tokens=1).stats.total_s for prompt in prompts]
    output = model.generate(prompts[-1], max_new_tokens=NEW, ignore_eos=True)
    steps = [sum(step) for step in output.stats.steps]
    return {
        "first_token_ms": 1e3 * first_s,
        "one_token_of_generate_ms": 1e3 * statistics.median(alone[2:]),
        "gap_ms": 1e3 * statistics.median(gaps),
        "step_ms": 1e3 * statistics.median(steps),
    }


def run_long(model: SpeculativeModel, server: Server, name: str, slots: int) -> dict[str, Any]:
    """Measure the gaps of running streams around the arrival of a long prompt."""
    prompts, long = prompts_of(model, slots - 1, 2000), prompts_of(model, 1, 3000, LONG_PROMPT[name])[0]
    found: list[Any] = []
    running = [body(prompt, True, new=LONG_NEW[name]) for prompt in prompts]
    thread = threading.Thread(target=lambda: found.extend(call_from_processes(server.port, running, len(running))))
    thread.start()
    while len(server.service.engine.running) < slots - 1 and thread.is_alive():
        time.sleep(0.01)
    time.sleep(SETTLED_S)
    began = time.time()
    call = call_from_processes(server.port, [body(long, True, new=4)], 1)[0]
    thread.join()
    before, during = list[float](), list[float]()
    for answer in found:
        for one, other in pairwise(answer["times"]):
            if began - 0.8 * SETTLED_S < other < began:
                before.append(other - one)
            if call["sent"] < other < call["times"][0]:
                during.append(other - one)
    worst = {"longest_gap_before_ms": 1e3 * max(before, default=0.0), "longest_gap_ms": 1e3 * max(during, default=0.0)}
    return {
        **worst,
        "median_gap_ms": 1e3 * statistics.median(during or [0.0]),
        "long_s": call["times"][0] - call["sent"],
    }


def ask(port: int, clients: int, calls_each: int, seed: int) -> dict[str, float]:
    """Ask a server for streams of random prompts, so many at once."""
    draw = torch.Generator().manual_seed(seed)
    prompts = torch.randint(*PROMPT_IDS, (clients * calls_each, PROMPT), generator=draw).tolist()
    calls = call_from_processes(port, [body(prompt, True) for prompt in prompts], clients)
    if any(len(call["tokens"]) < NEW // 2 for call in calls):
        raise RuntimeError(f"port {port}: an answer has {min(len(call['tokens']) for call in calls)} tokens, not {NEW}")
    took = max(call["times"][-1] for call in calls) - min(call["sent"] for call in calls)
    return {
        "tokens_s": len(calls) * NEW / took,
        "first_token_ms": 1e3 * statistics.median(call["times"][0] - call["sent"] for call in calls),
        "token_ms": 1e3 * statistics.median((call["times"][-1] - call["times"][0]) / (NEW - 1) for call in calls),
    }


def run_beside(ports: dict[str, int], seed: int = 0) -> Iterator[dict[str, Any]]:
    """Ask each server that answers in turn, once to warm up; medians."""
    for name, port in list(ports.items()):
        try:
            socket.create_connection(("127.0.0.1", port), timeout=10).close()
        except OSError as error:
            del ports[name]
            yield {"server": name, "not_run": f"port {port}: {error}"}
    for clients, calls_each in ((1, 4), (16, 1)):
        asked: dict[str, list[dict[str, float]]] = {name: [] for name in ports}
        for turn in range(-1, ROUNDS):
            for name, port in ports.items():
                seed += 1
                found = ask(port, clients, calls_each, seed)
                if turn >= 0:
                    asked[name].append(found)
        for name, turns in asked.items():
            middle = {key: statistics.median(turn[key] for turn in turns) for key in turns[0]}
            yield {"server": name, "clients": clients, **middle, "turns": turns}


def built(
    name: str, device: torch.device, folder: Path | None = None, max_model_len: int = 32000
) -> tuple[SpeculativeModel, int]:
    """Return a model, and the slots that its memory suffices for.

    ``folder``: of a tokenizer for 8B's dimensions, whose room ``max_model_len`` is.
    """
    if name == "smollm2":
        return SpeculativeModel.from_pretrained(dtype=torch.bfloat16, device=device, max_model_len=8000), 16
    if folder is None:
        tokenizer = SpeculativeModel.from_pretrained(dtype=torch.bfloat16, device=device).tokenizer
    else:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    slots = 16 if torch.cuda.mem_get_info()[1] > 100e9 else 8
    return model_of_8b(device, tokenizer, max_model_len), slots


def main(arguments: list[str] | None = None) -> None:
    """Measure the chosen rows."""
    command = Command("serve", __doc__, ROWS)
    command.add_argument("--servers", nargs="+", default=[], metavar="NAME=PORT", help="of engines, on this machine")
    command.add_argument("--tokenizer", type=Path, help="folder of one for 8B's dimensions; default: the built-in")
    command.add_argument("--wait", action="store_true", help="measure after a line on stdin; READY says when it can be")
    args = command.parse_args(arguments)
    rows, device = command.chosen(args), command.gpu()
    others = {name: int(port) for name, _, port in (server.partition("=") for server in args.servers)}
    sys.setswitchinterval(1e-5)
    result: dict[str, Any] = {"machine": machine(device), "rows": []}
    for name in MODELS:
        chosen = [row.split("/")[1] for row in rows if row.startswith(f"{name}/")]
        if not chosen:
            continue
        model, slots = built(name, device, args.tokenizer, BESIDE_LEN if chosen == ["beside"] else 32000)
        server = Server(model, slots)
        if args.wait:
            for clients in (1, slots):
                ask(server.port, clients, 1, seed=clients)
            print("READY {}", flush=True)
            sys.stdin.readline()
        try:
            for kind in chosen:
                if kind == "beside":
                    for found in run_beside({"eagle-slim": server.port} | others):
                        result["rows"].append({"row": f"{name}/{kind}", **found})
                        show(result["rows"][-1])
                        write(result, args.out)
                    continue
                if kind.isdigit():
                    found = run_row(model, server, min(slots, int(kind)), CALLS[name])
                else:
                    found = run_idle(model, server) if kind == "idle" else run_long(model, server, name, slots)
                result["rows"].append({"row": f"{name}/{kind}", "slots": slots, "ready_s": server.ready_s, **found})
                show(result["rows"][-1])
                write(result, args.out)
        finally:
            server.close()
        del model, server
        torch.cuda.empty_cache()
    if args.wait:
        print("RESULT {}", flush=True)


if __name__ == "__main__":
    main()
