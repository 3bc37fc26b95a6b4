"""Count with `count_tokens` on a local Ray cluster of several processes, or without Ray.

A job: ``{"sources": [specs], "tokenizer": folder, "engine": "ray" or "local", "out": path}`` and optionally
``workers``, ``on_error``, ``checkpoint``, ``kill`` (SIGKILL one worker process when the first result is there) and
``interrupt`` (stop, as by Ctrl-C, at that moment). Result: ``sha256`` of the counts file, ``notes`` told to the user,
``killed`` and ``workers_seen``, process ids.
"""

import hashlib
import os
import signal
from contextlib import suppress
from pathlib import Path

import psutil
import ray
from eagle_slim.vocab_tools.corpus import parse_source, with_unique_names
from eagle_slim.vocab_tools.counting import CountingInterruptedError, count_tokens
from eagle_slim.vocab_tools.tokenizer import load_tokenizer
from protocol import Json, serve


def workers_alive() -> list[int]:
    """Process ids of the counting actors that this process's cluster runs."""
    alive = []
    for child in psutil.Process().children(recursive=True):
        # Ray ends processes as it likes: one may be gone, or a zombie, between the listing and the question.
        with suppress(psutil.NoSuchProcess):
            if any("UnitCounter" in word for word in child.cmdline()):
                alive.append(child.pid)
    return alive


def run(job: Json) -> Json:
    notes: list[str] = []
    killed: list[int] = []
    seen: set[int] = set()

    def progress(tokens: int) -> None:
        if job["engine"] != "ray":
            return
        alive = workers_alive()
        seen.update(alive)
        if job.get("interrupt"):
            raise KeyboardInterrupt
        if job.get("kill") and not killed and alive:
            os.kill(alive[0], signal.SIGKILL)
            killed.append(alive[0])

    out = Path(job["out"])
    try:
        counts = count_tokens(
            with_unique_names([parse_source(spec) for spec in job["sources"]]),
            load_tokenizer(job["tokenizer"]),
            engine=job["engine"],
            workers=job.get("workers", 2),
            on_error=job.get("on_error", "stop"),
            checkpoint=Path(job["checkpoint"]) if "checkpoint" in job else None,
            checkpoint_seconds=0.0,
            save_to=out,
            progress=progress,
            notify=notes.append,
        )
    except CountingInterruptedError as error:
        return {"interrupted": str(error)}
    return {
        "sha256": hashlib.sha256(out.read_bytes()).hexdigest(),
        "tokens": counts.num_tokens,
        "notes": [note for note in notes if "checkpoint" not in note],
        "killed": killed,
        "workers_seen": sorted(seen),
    }


if __name__ == "__main__":
    # One cluster for all jobs; a command that finds none starts its own, which test_the_command does.
    ray.init(num_cpus=2, include_dashboard=False, logging_level="warning", log_to_driver=False)
    serve(run)
    ray.shutdown()
