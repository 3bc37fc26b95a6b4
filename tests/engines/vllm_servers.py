"""Start `vllm serve` several times in processes that share one import of vLLM, most of a tiny model's time.

An argument: JSON, a list of ``[log file, arguments…]``. A line of stdin, JSON too, is one for `vllm bench serve`, whose
exit code is then printed. Whatever was started ends with stdin.
"""

import json
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable

from vllm.entrypoints.launchers.api_server.entry import main
from vllm.model_executor.models import registry
from vllm.v1.engine import utils

os.environ |= {"VLLM_NO_USAGE_STATS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOG_STATS_INTERVAL": "1"}
# In a process of its own vLLM looks at every class of models anew, and each engine imports all of it again.
registry._run_in_subprocess = lambda look: look()
utils.get_mp_context = lambda: multiprocessing.get_context("fork")


def run(command: Callable[[], object], log: str, *arguments: str) -> int:
    """Start a command in a session of its own; returns its process id, which is its group's."""
    if pid := os.fork():
        return pid
    os.setsid()
    for stream in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    sys.argv = ["vllm", *arguments]
    try:
        command()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def bench() -> None:
    from vllm.benchmarks.serve import add_cli_args
    from vllm.benchmarks.serve import main as bench_serve
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    bench_serve(parser.parse_args())


if __name__ == "__main__":
    started = [run(main, *each) for each in json.loads(sys.argv[1])]
    for line in sys.stdin:
        print("exit code", os.waitpid(run(bench, *json.loads(line)), 0)[1], flush=True)
    for pid in started:
        os.killpg(pid, signal.SIGKILL)
    os._exit(0)
