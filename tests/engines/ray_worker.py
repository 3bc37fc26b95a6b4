"""Count with `count_tokens` on a local Ray cluster of several processes, or without Ray.

A job: ``{"sources": [specs], "tokenizer": folder, "run_on": "ray" or "local", "out": path}`` and optionally
``workers``, ``on_error``, ``resume_file``, ``gather`` (so many processes begin a unit before any of them ends one),
``kill`` (the process that begins the unit of this number, counted from 0 in the order of beginning, dies by SIGKILL)
and ``interrupt`` (stop, as by Ctrl-C, when the first result is there). Result: ``sha256`` of the counts file,
``notes`` told to the user, ``killed`` and ``counted_by``: process ids.
"""

import hashlib
import os
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray
from eagle_slim.vocab_tools.corpus.source import parse_source, with_unique_names
from eagle_slim.vocab_tools.counting import ray_workers, resume
from eagle_slim.vocab_tools.counting.count import CountingInterruptedError, count_tokens
from eagle_slim.vocab_tools.tokenizer.load import load_tokenizer
from protocol import Json, serve

GATHER_SECONDS = 1200


def watched(job: Json, folder: Path) -> type:
    """The counting actor, which also writes the process id of whoever begins a unit into a file of `folder` each."""

    class WatchedCounter(ray_workers._UnitCounter):
        def __call__(self, batch: dict[str, Any]) -> Iterator[dict[str, list[Any]]]:
            number = begin_unit(folder)
            if number == job.get("kill"):
                os.kill(os.getpid(), signal.SIGKILL)
            deadline = time.monotonic() + GATHER_SECONDS
            while len(set(who_began(folder))) < job.get("gather", 1) and time.monotonic() < deadline:
                time.sleep(0.02)
            yield from super().__call__(batch)

    return WatchedCounter


def begin_unit(folder: Path) -> int:
    number = 0
    while True:
        try:
            # Linked whole: a reader never finds a file without its content.
            with tempfile.NamedTemporaryFile("w", dir=folder, prefix=".") as file:
                file.write(str(os.getpid()))
                file.flush()
                os.link(file.name, folder / f"{number:06d}")
            return number
        except FileExistsError:
            number += 1


def who_began(folder: Path) -> list[int]:
    """Process ids, in the order in which units were begun."""
    return [int(path.read_text()) for path in sorted(folder.glob("[0-9]*"))]


def run(job: Json) -> Json:
    notes: list[str] = []
    folder = Path(tempfile.mkdtemp(dir=Path(job["out"]).parent))
    # Ray pickles a class of this script by value, so that its processes run this one.
    ray_workers._UnitCounter = watched(job, folder)

    def progress(tokens: int) -> None:
        if job.get("interrupt"):
            raise KeyboardInterrupt

    out = Path(job["out"])
    resume.SAVE_SECONDS = 0.0
    try:
        counts = count_tokens(
            with_unique_names([parse_source(spec) for spec in job["sources"]]),
            load_tokenizer(job["tokenizer"]),
            run_on=job["run_on"],
            workers=job.get("workers", 2),
            on_error=job.get("on_error", "stop"),
            resume_file=Path(job["resume_file"]) if "resume_file" in job else None,
            save_to=out,
            progress=progress,
            notify=notes.append,
        )
    except CountingInterruptedError as error:
        return {"interrupted": str(error)}
    began = who_began(folder)
    return {
        "sha256": hashlib.sha256(out.read_bytes()).hexdigest(),
        "tokens": counts.num_tokens,
        "notes": [note for note in notes if "going on from" not in note],
        "killed": began[job["kill"]] if "kill" in job and began else None,
        "counted_by": began,
    }


if __name__ == "__main__":
    # One cluster for all jobs; a command that finds none starts its own, which test_the_command does.
    ray.init(num_cpus=2, include_dashboard=False, logging_level="warning", log_to_driver=False)
    serve(run)
    ray.shutdown()
