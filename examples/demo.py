"""The main job on the built-in head, with the commands that a user types: convert, verify, generate.

    python examples/demo.py        (or: make demo)

Writes into out/, replacing what an earlier demo left there.
"""

import argparse
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

from eagle_slim.convert import Artifact

SIZE = 32000
SLIM = f"smollm2-135m-instruct-eagle3-v{SIZE}"  # the name that eagle-convert gives it by default
PROMPT = "What are three good habits for learning a new language?"


def run(*command: str, folder: Path, last_line_only: bool = False) -> None:
    """Run an installed command in a folder, showing the command and what it prints; end the demo if it fails."""
    print("\n$", " ".join(f'"{word}"' if " " in word else word for word in command), flush=True)
    program = Path(sysconfig.get_path("scripts")) / command[0]
    output = subprocess.PIPE if last_line_only else None
    done = subprocess.run([program, *command[1:]], cwd=folder, stdout=output, text=True, check=False)
    if last_line_only:
        print(done.stdout if done.returncode else done.stdout.splitlines()[-1], flush=True)
    if done.returncode:
        sys.exit(done.returncode)


parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--out", type=Path, default=Path("out"), help="folder to work in (default: out)")
parser.add_argument("--max-new-tokens", default="80", help="length of the answer (default: 80)")
args = parser.parse_args()

args.out.mkdir(parents=True, exist_ok=True)
slim = args.out / SLIM
if slim.exists():
    Artifact.load(slim)  # raises, rather than delete a folder that is no artifact
    shutil.rmtree(slim)
started = time.monotonic()

run("eagle-convert", "--draft-vocab", str(SIZE), folder=args.out)
run("eagle-verify", SLIM, folder=args.out, last_line_only=True)
# float32, so that --check can prove every token equal to the target's own greedy decoding.
run(
    *("eagle-generate", SLIM, "--prompt", PROMPT),
    *("--max-new-tokens", args.max_new_tokens, "--dtype", "float32", "--check"),
    folder=args.out,
)

print(f"\nslim head      {slim}")
print(f"all of it took {time.monotonic() - started:.0f} s")
print(f"""
Try next, after `source .venv/bin/activate`:
  eagle-generate {slim}    # a chat
  eagle-compare {slim} --prompts examples/prompts.jsonl --limit 3 --max-new-tokens 30 --modes greedy
  eagle-convert HEAD --target TARGET --draft-vocab 16000 --dry-run    # your own, Hub ids or folders: only reports""")
