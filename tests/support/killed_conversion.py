"""Run one conversion again and again, each time in a child that gets a signal at a later moment; a script for tests.

    python killed_conversion.py HEAD TOKEN_MAP OUT SIGNAL

Moments are everything that happens to files below OUT's folder, and every write and flush. After each the artifact OUT
is verified: it must be the old one or the new one, whole (or, between two renames, the old one aside). Prints a JSON
object with the number of moments and what was found after each.
"""

import contextlib
import json
import mmap
import os
import signal
import sys
from pathlib import Path

EVENTS = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.scandir")


def main() -> None:
    head, token_map, out, name = sys.argv[1:5]
    os.environ["OMP_NUM_THREADS"] = "1"
    from eagle_slim.convert import Artifact, ConvertOptions, VocabRequest, convert_head, verify_artifact
    from eagle_slim.convert.cli import main as command

    request = VocabRequest(token_map=token_map)
    moment = {"count": -1, "at": None}
    sent = mmap.mmap(-1, 1)  # shared with the child: whether the moment came

    folder = str(Path(out).parent)

    def audit(event: str, arguments: tuple[object, ...]) -> None:
        if moment["count"] >= 0 and event in EVENTS and folder in str(arguments):
            tick()

    def tick() -> None:
        if moment["count"] < 0:
            return
        moment["count"] += 1
        if moment["count"] == moment["at"]:
            sent[0] = 1
            os.kill(os.getpid(), getattr(signal, name))

    sys.addaudithook(audit)
    for call in ("write", "fsync"):
        original = getattr(os, call)

        def ticking(*arguments, original=original):
            tick()
            return original(*arguments)

        setattr(os, call, ticking)

    def convert() -> None:
        sizes = ["--draft-vocab", "8"]
        command([head, *sizes, "--token-map", token_map, "--out", out, "--force", "--json"])

    # Once beforehand, so that no moment falls into the loading of modules.
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(sys.stderr):
        convert()
    found = []
    at = 0
    # A signal that Python handles runs the same clean-up wherever it falls; a kill leaves what was there.
    stride = 1 if name == "SIGKILL" else 3
    lost = False
    while True:
        convert_head(head, ConvertOptions(draft_vocab=5, vocabulary=request, out=out, force=True))
        at += stride
        sent[0] = 0
        child = os.fork()
        if child == 0:
            silent = os.open(os.devnull, os.O_WRONLY)
            os.dup2(silent, 1)
            os.dup2(silent, 2)
            moment.update(count=0, at=at)
            try:
                convert()
            except SystemExit as stop:
                # Without the interpreter's own farewell, which takes longer than the conversion.
                os._exit(stop.code if isinstance(stop.code, int) else 3)
        _, status = os.waitpid(child, 0)
        # Between the two renames the old artifact is aside, and the next run puts it back.
        aside = Path(out).with_name(f".{Path(out).name}.eagle-slim-old")
        whole = out if Path(out).exists() else aside
        checked = verify_artifact(whole, head=head)
        leftovers = sorted(
            path.name for path in Path(out).parent.iterdir() if path.name.startswith(f".{Path(out).name}.")
        )
        found.append(
            {
                "draft_vocab": Artifact.load(whole).manifest.draft_vocab,
                "ok": checked.ok,
                "exit": os.waitstatus_to_exitcode(status),
                "leftovers": leftovers,
                "aside": whole == aside,
            }
        )
        if name == "SIGINT" and sent[0] and status == 0 and not lost:
            # An interrupt that falls into a callback which Python lets no exception out of is lost: the same moment
            # again, once.
            lost = True
            assert found.pop()["ok"]
            at -= stride
            continue
        if not sent[0] or at > 500:
            break
    print(json.dumps({"moments": at, "found": found}))


if __name__ == "__main__":
    main()
