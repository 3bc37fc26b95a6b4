"""Time counting and converting beside the tokenizer library alone and beside copying the bytes.

`counting`: `count_tokens` on a JSON-lines file (reading, parsing, tokenizing, counting, holding out), against the batch
encoding of fastokens of texts in memory on as many threads as there are workers, whose ids are not even looked at:
tokens per second from the first blocks to the last, without the start of the processes, on fresh text each time. Each
pass here and below is a new process, in turn with the baseline.

`converting`: `convert_head` on a synthetic EAGLE-3 head of Llama-3.1-8B's dimensions (128,256 rows, bf16) without an LM
head of its own, and a target of which only the LM head is there, against `cp` plus fsync of the bytes that it must read
(the head, and the kept rows of the target's LM head), all of it in the page cache. Takes 5 GB of disk.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from statistics import median
from typing import Any

import torch
from eagle_slim.convert import embedded_target_folder
from eagle_slim.runtime.drafter.tuning.problem import MODELS, random_head
from safetensors.torch import load_file, save_file

from benchmarks.shared.command import Command, show, write
from benchmarks.shared.timing import machine

# Programs of their own; each prints two numbers, what was done and the seconds of it.
OURS = """
import json, sys, time
from eagle_slim.vocab_tools import CorpusSource, count_tokens, load_tokenizer
workers, marks = int(sys.argv[2]), []
count_tokens(
    [CorpusSource(sys.argv[3])], load_tokenizer(sys.argv[1]), workers=workers, tokenizer_library="fastokens",
    progress=lambda tokens: marks.append((time.perf_counter(), tokens)),
)
warm = max(1, workers)
print(json.dumps([sum(tokens for _, tokens in marks[warm:]), marks[-1][0] - marks[warm - 1][0]]))
"""
BARE = """
import json, os, sys, time
os.environ["RAYON_NUM_THREADS"] = str(max(1, int(sys.argv[2])))
import fastokens
from eagle_slim.vocab_tools import load_tokenizer
fast = fastokens.Tokenizer.from_json_str(load_tokenizer(sys.argv[1]).backend.to_str())
texts = [json.loads(line)["text"] for line in open(sys.argv[3], encoding="utf-8")]
batches = [texts[first : first + 400] for first in range(0, len(texts), 400)]
start = time.perf_counter()
tokens = sum(len(fast.encode_batch_flat(batch, add_special_tokens=False)[0]) // 4 for batch in batches)
print(json.dumps([tokens, time.perf_counter() - start]))
"""
CONVERT = """
import json, pathlib, sys, time
from eagle_slim.convert import ConvertOptions, VocabRequest, convert_head
folder, start = pathlib.Path(sys.argv[1]), time.perf_counter()
ranked = VocabRequest(token_map=folder / "freq.json")
options = ConvertOptions(int(sys.argv[2]), vocabulary=ranked, target=folder / "target", out=folder / "out")
(done,) = convert_head(folder / "head", options)
print(json.dumps([done.manifest.draft_vocab, time.perf_counter() - start]))
"""


def run(program: str, *arguments: object) -> tuple[float, float]:
    """Run a program in a new process: the two numbers that it prints."""
    command = [sys.executable, "-c", program, *map(str, arguments)]
    first, second = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return first, second


def texts(seed: int, num_bytes: int) -> Iterator[str]:
    """Yield documents of about 0.5 to 6 KB, ``num_bytes`` in all, of sentences of the built-in chats.

    About every tenth word is replaced by a made-up one, so that caches of words are neither useless nor complete.
    """
    data = resources.files("eagle_slim.convert.default").joinpath("self_chat.jsonl.gz").read_bytes()
    chats = [json.loads(line)["messages"] for line in gzip.decompress(data).splitlines()]
    prose = "\n".join(message["content"] for messages in chats for message in messages)
    words, sentences = re.findall(r"[A-Za-z]{5,}", prose), re.findall(r"[^.!?\n]+[.!?\n]+\s*", prose)
    draw = random.Random(seed)
    while num_bytes > 0:
        parts = "".join(draw.choices(sentences, k=draw.randint(8, 60))).split(" ")
        for _ in range(1 + len(parts) // 10):
            # random() only: randrange and choice take five times as long, and a large corpus is to be written.
            first, second, at = (int(draw.random() * size) for size in (len(words), len(words), len(parts)))
            parts[at] = words[first][:4] + words[second][-4:]
        text = " ".join(parts)
        num_bytes -= len(text)
        yield text


def counting(args: argparse.Namespace) -> dict[str, Any]:
    """Count and encode in turn: tokens per second, and the ratio of the medians."""
    found: dict[str, list[float]] = {"ours": [], "bare": []}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "texts.jsonl"
        for repeat in range(args.repeats):
            lines = (json.dumps({"text": text}) + "\n" for text in texts(repeat, args.megabytes << 20))
            path.write_text("".join(lines), encoding="utf-8")
            for name, program in (("ours", OURS), ("bare", BARE)):
                tokens, seconds = run(program, args.tokenizer or embedded_target_folder(), args.workers, path)
                found[name].append(tokens / seconds)
    ours, bare = median(found["ours"]), median(found["bare"])
    return {"workers": args.workers, "median_ours": ours, "median_bare": bare, "ratio": ours / bare, **found}


def make_files(folder: Path, draft_vocab: int) -> None:
    """Write head, target and token map, and ``must-read``, a folder of just the bytes that must be read."""
    dims = MODELS["llama-3.1-8b"]
    head = random_head(dims, torch.device("cpu"))
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": dims.vocab,
        "hidden_size": dims.hidden,
        "intermediate_size": dims.intermediate,
        "num_hidden_layers": 32,
        "num_attention_heads": dims.heads,
        "num_key_value_heads": dims.kv_heads,
        "head_dim": dims.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
    }
    outer = ("fc.weight", "norm.weight")
    tensors = {name if name in outer else f"midlayer.{name}": tensor for name, tensor in head.tensors.items()}
    for name, weights in (("head", tensors), ("target", {"lm_head.weight": head.lm_head})):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
        save_file(weights, folder / name / "model.safetensors")
    # Frequent tokens have low ids in BPE vocabularies, so the wanted rows are dense at first and thin out.
    shares = 1.0 / (torch.arange(dims.vocab) + 1000.0)
    ranked = torch.multinomial(shares, draft_vocab, generator=torch.Generator().manual_seed(0))
    (folder / "freq.json").write_text(json.dumps(ranked.tolist()))
    (folder / "must-read").mkdir()
    shutil.copyfile(folder / "head" / "model.safetensors", folder / "must-read" / "head")
    ids = ranked.sort().values
    save_file({"lm_head.weight": head.lm_head[ids], "ids": ids}, folder / "must-read" / "rows")


def check_rows(folder: Path) -> None:
    """End the program where the written rows are not those of the target that were asked for."""
    written, wanted = load_file(folder / "out" / "model.safetensors"), load_file(folder / "must-read" / "rows")
    ids = written["d2t"] + torch.arange(len(written["d2t"]))
    if not ids.equal(wanted["ids"]) or not written["lm_head.weight"].equal(wanted["lm_head.weight"]):
        raise SystemExit("the written rows are not the target's of the ids asked for")


def copy_s(source: Path, destination: Path) -> float:
    """Copy a folder of files to the disk: seconds."""
    shutil.rmtree(destination, ignore_errors=True)
    start = time.perf_counter()
    subprocess.run(["cp", "-r", "--reflink=never", str(source), str(destination)], check=True)
    subprocess.run(["sync", *map(str, destination.iterdir()), str(destination)], check=True)
    return time.perf_counter() - start


def converting(args: argparse.Namespace) -> dict[str, Any]:
    """Convert and copy in turn, after once to warm up."""
    found: dict[str, list[float]] = {"convert_s": [], "cp_fsync_s": []}
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        make_files(folder, args.draft_vocab)
        for _ in range(args.repeats + 1):
            shutil.rmtree(folder / "out", ignore_errors=True)
            # What was written before is on the disk; what is read is in the page cache.
            os.sync()
            found["convert_s"].append(run(CONVERT, folder, args.draft_vocab)[1])
            check_rows(folder)
            os.sync()
            found["cp_fsync_s"].append(copy_s(folder / "must-read", folder / "copied"))
    ours, copied = (median(found[name][1:]) for name in ("convert_s", "cp_fsync_s"))
    return {"median_convert_s": ours, "median_cp_fsync_s": copied, "ratio": ours / copied, **found}


ROWS = {"counting": counting, "converting": converting}


def main(argv: list[str] | None = None) -> None:
    """Run the benchmark; `--help` lists the options."""
    command = Command("offline", __doc__, ROWS)
    command.add_argument("--repeats", type=int, default=3)
    command.add_argument("--tokenizer", help="counting: Hub id, folder or tokenizer.json; default SmolLM2's")
    command.add_argument("--workers", type=int, default=2)
    command.add_argument("--megabytes", type=int, default=256, help="text per pass")
    command.add_argument("--folder", type=Path, help="converting: an existing folder to put files in")
    command.add_argument("--draft-vocab", type=int, default=32000)
    args = command.parse_args(argv)
    result: dict[str, Any] = {"machine": machine(torch.device("cpu")), "cores": os.cpu_count()}
    for name in command.chosen(args):
        result[name] = ROWS[name](args)
        show(result[name])
    write(result, args.out)


if __name__ == "__main__":
    main()
