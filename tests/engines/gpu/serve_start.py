"""One start of an engine's own server, which `examples/engine_speed.py` then asks; `run.py` talks to it as to others.

A job is one of `vllm_start.py` or `sglang_start.py` with ``engine`` ("vllm" or "sglang") and ``port``; the command line
is made from the same options. The result has ``served``: the JSON of `engine_speed.py` by the number of questions under
way at a time.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

Json = dict[str, Any]
SPEED = Path(__file__).parents[3] / "examples" / "engine_speed.py"
CONCURRENCY = (1, 16)
QUESTIONS, ANSWER_TOKENS = 16, 128


def command_line(job: Json) -> list[str]:
    """What a user would type to serve a job, the interpreter's path apart."""
    if job["engine"] == "vllm":
        import vllm_start

        options = vllm_start.options(job)
        entry = ["vllm.entrypoints.cli.main", "serve", options.pop("model")]
        options |= {"served_model_name": "smollm2", "port": job["port"]}
        off = {"enable_prefix_caching"}
    else:
        import sglang_start

        options = sglang_start.options(job) | {"served_model_name": "smollm2", "enable_metrics": True}
        entry = ["sglang.launch_server"]
        off = set()
    return ["-m", *entry, *flags(options, off)]


def flags(options: Json, off: set[str]) -> list[str]:
    """Options as flags; what is None stays out, and so does False unless its name is in ``off`` (``--no-NAME``)."""
    line = []
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        if value is True:
            line.append(flag)
        elif value is False:
            line += [f"--no-{flag[2:]}"] if name in off else []
        elif isinstance(value, list):
            line += [flag, *map(str, value)]
        elif value is not None:
            line += [flag, json.dumps(value) if isinstance(value, dict) else str(value)]
    return line


def answers(url: str) -> bool:
    """Whether the server lists its models."""
    try:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def main() -> None:
    """Start the server, say READY, wait for a line on stdin, measure, say RESULT."""
    job: Json = json.loads(sys.argv[1])
    began, url = time.monotonic(), f"http://localhost:{job['port']}"
    line = command_line(job)
    # A server has its engine in another process, unlike vllm_start.py.
    environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    server = subprocess.Popen([sys.executable, *line], stdout=sys.stderr, env=environment)
    while not answers(url):
        if (status := server.poll()) is not None:
            sys.exit(f"The server ended with {status}.")
        time.sleep(0.5)
    facts = {"start_s": round(time.monotonic() - began, 1), "command": ["python", *line]}
    print("READY " + json.dumps(facts), flush=True)
    sys.stdin.readline()
    served = {}
    for concurrency in CONCURRENCY:
        with tempfile.TemporaryDirectory() as folder:
            figures = Path(folder, "speed.json")
            subprocess.run(
                [
                    sys.executable, str(SPEED), "--server", f"head={url}", "--json", str(figures),
                    "--limit", str(QUESTIONS), "--max-tokens", str(ANSWER_TOKENS), "--concurrency", str(concurrency),
                ],
                stdout=sys.stderr, check=True,
            )  # fmt: skip
            served[concurrency] = json.loads(figures.read_text())[0]
    print("RESULT " + json.dumps({"text": None, "speeds": [], "served": served}), flush=True)


if __name__ == "__main__":
    main()
