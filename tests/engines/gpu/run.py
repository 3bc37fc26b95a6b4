"""Start engines on a GPU and measure them: ``python run.py --site SITE --models MODELS --out FILE [WAVE ...]``.

All starts of a wave (several names joined by commas are one) begin together, each in a process of its own; only when
every one of them is ready, or has failed, are they measured, one after the other, so that no start disturbs a
measurement. One line of JSON per start is written at once: ``{"name", "engine", "job", "facts", "result"}``, or "error"
and "log". Standard library only.
"""

import argparse
import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from starts import WAVES, Start

HERE = Path(__file__).parent
Json = dict[str, Any]
LOG_TAIL = 3000


class Process:
    """A start's process, whose lines with a marker are read as they come and whose others go to a log file."""

    def __init__(self, start: Start, models: Path, site: Path, log: Path) -> None:
        self.start, self.log = start, log
        self.job = start.job(models)
        self.answers: queue.Queue[Json | None] = queue.Queue()
        packs = [site / start.engine, site / "smollm2", HERE]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([*map(str, packs), os.environ.get("PYTHONPATH", "")]),
            # What sglang_kernels.py compiled; the compiler's ninja lies beside the interpreter.
            "TVM_FFI_CACHE_DIR": str(site / "sglang" / "jit-cache"),
            # Two starts that write one folder of compiled models at the same time could read each other's halves.
            "VLLM_CACHE_ROOT": str(log.with_suffix(".cache").absolute()),
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        }
        self._log = log.open("wb")
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / f"{start.engine}_start.py"), json.dumps(self.job)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environment,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            for marker in (b"READY ", b"RESULT "):
                if line.startswith(marker):
                    self.answers.put(json.loads(line[len(marker) :]))
                    break
            else:
                self._log.write(line)
        self.answers.put(None)

    def answer(self, deadline: float) -> tuple[Json | None, str | None]:
        """The next answer, or None and why there is none."""
        try:
            found = self.answers.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            return None, "out of time"
        return found, None if found is not None else f"ended with {self._process.wait()}"

    def go(self) -> None:
        """Let the start measure."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"go\n")
        self._process.stdin.flush()

    def end(self) -> str:
        """Kill the process and what it started; returns the end of its log."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        # A process that left the group could hold the pipe open for ever.
        self._reader.join(timeout=5)
        for stream in (self._process.stdin, self._process.stdout, self._log):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()
        return self.log.read_text(errors="replace")[-LOG_TAIL:]


def run_wave(starts: list[Start], arguments: argparse.Namespace) -> None:
    """Run one wave and append its lines to the output file."""
    began = time.monotonic()
    arguments.logs.mkdir(parents=True, exist_ok=True)
    processes = [
        Process(start, arguments.models, arguments.site, arguments.logs / f"{start.name.replace(' ', '_')}.log")
        for start in starts
    ]
    ready_by = began + arguments.ready_s
    rows: list[Json] = []
    for process in processes:
        facts, error = process.answer(ready_by)
        # They began together, so one that needs much longer than another hangs.
        ready_by = min(ready_by, time.monotonic() + arguments.patience_s)
        rows.append({"name": process.start.name, "engine": process.start.engine, "job": process.job, "facts": facts})
        if error:
            rows[-1]["error"] = f"start: {error}"
            rows[-1]["log"] = process.end()
            write(rows[-1], arguments.out)
        print(f"{time.monotonic() - began:6.1f} s  {process.start.name}: {error or 'ready'}", flush=True)
    for process, row in zip(processes, rows, strict=True):
        if "error" in row:
            continue
        process.go()
        row["result"], error = process.answer(time.monotonic() + arguments.measure_s)
        log = process.end()
        if error:
            row |= {"error": f"measurement: {error}", "log": log}
        write(row, arguments.out)
        print(f"{time.monotonic() - began:6.1f} s  {process.start.name}: {error or summary(row)}", flush=True)


def write(row: Json, out: Path) -> None:
    """Append a row to the output file; of a failure, the end of its log is printed too."""
    with out.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(row) + "\n")
    if "error" in row:
        print("\n".join(row["log"].splitlines()[-12:]), flush=True)


def summary(row: Json) -> str:
    """One line for the eye."""
    text = row["result"]["text"] or {}
    speeds = [f"{one['batch']}: {one['tokens_per_s']} tok/s {one['ms_per_step']} ms" for one in row["result"]["speeds"]]
    broken = {how: one["accepted_length"] for how, one in row["result"].get("broken", {}).items()}
    started, accepted = row["facts"]["start_s"], text.get("accepted_length")
    return f"started in {started} s; accepted {accepted}; {'; '.join(speeds)} {broken or ''}"


def main() -> None:
    """Run the waves named, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("waves", nargs="*", default=list(WAVES), metavar="WAVE", help=f"of {', '.join(WAVES)}")
    parser.add_argument("--site", type=Path, required=True, help="where unpack.py put the packs")
    parser.add_argument("--models", type=Path, required=True, help="where models.py put the models")
    parser.add_argument("--out", type=Path, required=True, help="file to append JSON lines to")
    parser.add_argument("--logs", type=Path, default=Path("logs"), help="folder of the starts' own output")
    parser.add_argument("--ready-s", type=float, default=240, help="seconds a wave may take to start")
    parser.add_argument("--patience-s", type=float, default=75, help="seconds a start may be later than the one before")
    parser.add_argument("--measure-s", type=float, default=60, help="seconds a start may take to measure")
    arguments = parser.parse_args()
    for name in arguments.waves:
        print(f"wave {name}", flush=True)
        run_wave([start for part in name.split(",") for start in WAVES[part]], arguments)


if __name__ == "__main__":
    main()
