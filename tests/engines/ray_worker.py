"""Count with `count_tokens` on a local Ray cluster of several processes, or without Ray.

A job: ``{"sources": [specs], "tokenizer": folder, "run_on": "ray" or "local", "folder": path}`` and optionally
``workers``, ``on_error``, ``gather`` (so many processes begin a unit before any of them ends one) and ``kill`` (the
process that begins the unit of this number, counted from 0 in the order of beginning, dies by SIGKILL). Result:
``sha256`` of the counts, ``notes`` told to the user, ``killed`` and ``counted_by``: process ids.
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
from eagle_slim.vocab_tools import ray_workers
from eagle_slim.vocab_tools.counting import count_tokens
from eagle_slim.vocab_tools.sources import parse_source, with_unique_names
from eagle_slim.vocab_tools.tokenizer import load_tokenizer
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
    folder = Path(tempfile.mkdtemp(dir=job["folder"]))
    # Ray pickles a class of this script by value, so that its processes run this one.
    ray_workers._UnitCounter = watched(job, folder)

    counts = count_tokens(
        with_unique_names([parse_source(spec) for spec in job["sources"]]),
        load_tokenizer(job["tokenizer"]),
        run_on=job["run_on"],
        workers=job.get("workers", 2),
        on_error=job.get("on_error", "stop"),
        notify=notes.append,
    )
    began = who_began(folder)
    return {
        "sha256": hashlib.sha256(counts.to_bytes()).hexdigest(),
        "tokens": counts.num_tokens,
        "notes": notes,
        "killed": began[job["kill"]] if "kill" in job and began else None,
        "counted_by": began,
    }


if __name__ == "__main__":
    # One cluster for all jobs; a command that finds none starts its own, which test_the_command does.
    ray.init(num_cpus=2, include_dashboard=False, logging_level="warning", log_to_driver=False)
    serve(run)
    ray.shutdown()
