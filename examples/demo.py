"""The main job on the built-in head, with the commands that a user types: convert, verify, generate.

    python examples/demo.py        (or: make demo)

Ends with what the smaller head reads and what drafting with it gives on this machine, over four prompts. Writes into
out/, replacing what an earlier demo left there.
"""

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

from eagle_slim import runtime
from eagle_slim.convert import Artifact
from eagle_slim.runtime.compare import load_prompts

SIZE = 4096
SLIM = f"smollm2-135m-instruct-eagle3-v{SIZE}"  # the name that eagle-convert gives it by default
PROMPT = "What are three good habits for learning a new language?"
MEASURED = Path(__file__).with_name("prompts.jsonl"), 4  # chats and mathematics, as one prompt tells little


def run(*command: str, folder: Path, shown: slice | None = None) -> list[str]:
    """Run an installed command in a folder, showing the command and what it prints; end the demo if it fails.

    Returns the lines that it prints to stdout, of which only those of ``shown`` are shown; None leaves them to it.
    """
    print("\n$", " ".join(f'"{word}"' if " " in word else word for word in command), flush=True)
    program = Path(sysconfig.get_path("scripts")) / command[0]
    output = None if shown is None else subprocess.PIPE
    # Threads that spin while they wait take the cores from each other where other programs run, too.
    env = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ}
    done = subprocess.run([program, *command[1:]], cwd=folder, stdout=output, text=True, check=False, env=env)
    lines = (done.stdout or "").splitlines()
    if shown is not None:
        print("\n".join(lines if done.returncode else lines[shown]), flush=True)
    if done.returncode:
        sys.exit(done.returncode)
    return lines


def measure(head: Path, num_tokens: int) -> str:
    """Answer prompts with drafts and without, in turn; return accepted length and speeds as two lines."""
    import torch  # takes seconds, and commands come first

    torch.set_num_threads(1)  # threads that wait for others would count as busy
    model = runtime.SpeculativeModel.from_pretrained(head=head, dtype="float32").with_tree(None)
    is_cpu = model.target.device.type == "cpu"
    clock = time.process_time if is_cpu else time.perf_counter
    prompts = [model.encode_chat(prompt.turns[0]) for prompt in load_prompts(*MEASURED)]
    seconds, found = {True: 0.0, False: 0.0}, []
    for is_drafted in seconds:  # what is done once
        model.generate(prompts[0], max_new_tokens=3, speculative=is_drafted)
    for prompt in prompts:
        for is_drafted in seconds:
            started = clock()
            output = model.generate(prompt, max_new_tokens=num_tokens, speculative=is_drafted, ignore_eos=True)
            seconds[is_drafted] += clock() - started
            found += [output.stats] * is_drafted
    length = runtime.GenerationStats.sum(found).mean_accepted_length
    drafted, plain = (1e3 * seconds[each] / (len(prompts) * num_tokens) for each in (True, False))
    unit = "ms of one processor" if is_cpu else "ms"
    return f"""accepted length       {length:.2f} tokens per pass of the target
a token               {drafted:.1f} {unit}, {plain:.1f} without drafts: {plain / drafted:.2f} times as fast with them"""


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

converted = run("eagle-convert", "--draft-vocab", str(SIZE), folder=args.out, shown=slice(None))
run("eagle-verify", SLIM, folder=args.out, shown=slice(-1, None))
# float32, so that --check can prove every token equal to the target's own greedy decoding.
run(
    *("eagle-generate", SLIM, "--prompt", PROMPT),
    *("--max-new-tokens", args.max_new_tokens, "--dtype", "float32", "--check"),
    folder=args.out,
)

print("\nmeasuring", flush=True)
measured = measure(slim, int(args.max_new_tokens) // 2)
print(f"""
slim head             {slim}
all of it took        {time.monotonic() - started:.0f} s

Try next, after `source .venv/bin/activate`:
  eagle-generate {slim}    # a chat
  eagle-compare {slim} --prompts examples/prompts.jsonl --limit 3 --max-new-tokens 30 --modes greedy
  eagle-convert HEAD --target TARGET --draft-vocab 16000 --dry-run    # your own, Hub ids or folders: only reports
""")
print(*(line.strip() for line in converted if "bytes per draft step" in line))
print(measured)
