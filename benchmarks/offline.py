"""What do counting and converting cost, against what nobody can do without?

    python -m benchmarks.offline --rows counting --tokenizer FOLDER_OR_FILE [--library fastokens] [--workers 2]
    python -m benchmarks.offline --rows converting --folder /a/disk/with/space

`counting`: `count_tokens` on a JSON-lines file (reading, parsing, tokenizing, counting, holding out), against the
library's batch encoding of texts in memory on as many threads as there are workers, whose ids are not even looked at.
Interleaved, each pass on fresh text in a new process. Rates are tokens per second from the first blocks to the last,
without the start of the processes, and per second of processor time, with it.

`converting`: `convert_head` on a synthetic EAGLE-3 head of Llama-3.1-8B's dimensions (128,256 rows, bf16) without an LM
head of its own, and a target of which only the LM head is there, against `cp` plus fsync of the bytes that it must read
(the head, and the kept rows of the target's LM head), with the peak of its private memory (RssAnon). Interleaved, each
conversion in a new process, all of it in the page cache. Takes 5 GB of disk.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import torch
from eagle_slim.runtime.drafter.tuning.problem import MODELS, Dims, random_head
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.shared.command import Command, show, write
from benchmarks.shared.timing import machine

NORMS = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
# Programs of their own: each prints tokens and seconds, and the processor's seconds of all its processes.
_PRINT = """
own, children = os.times()[:2], os.times()[2:4]
print(json.dumps([tokens, seconds, sum(own) + sum(children)]))
"""
OURS = f"""
import json, os, sys, time
from eagle_slim.vocab_tools import CorpusSource, count_tokens, load_tokenizer
def main():
    tokenizer, library, workers, path = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
    marks = []
    counts = count_tokens(
        [CorpusSource(path)], load_tokenizer(tokenizer), workers=workers, tokenizer_library=library,
        progress=lambda tokens: marks.append((time.perf_counter(), tokens)),
    )
    warm = max(1, workers)
    return sum(tokens for _, tokens in marks[warm:]), marks[-1][0] - marks[warm - 1][0]
if __name__ == "__main__":
    tokens, seconds = main()
{_PRINT.replace(chr(10), chr(10) + "    ")}
"""
BARE = f"""
import json, os, sys, time
library, workers, path = sys.argv[2], int(sys.argv[3]), sys.argv[4]
os.environ["RAYON_NUM_THREADS"] = str(max(1, workers))
os.environ["TOKENIZERS_PARALLELISM"] = "true" if workers > 1 else "false"
from eagle_slim.vocab_tools import load_tokenizer
definition = load_tokenizer(sys.argv[1]).backend.to_str()
texts = [json.loads(line)["text"] for line in open(path, encoding="utf-8")]
batches = [texts[first : first + 400] for first in range(0, len(texts), 400)]
if library == "fastokens":
    import fastokens
    fast = fastokens.Tokenizer.from_json_str(definition)
    encode = lambda batch: len(fast.encode_batch_flat(batch, add_special_tokens=False)[0]) // 4
else:
    import tokenizers
    plain = tokenizers.Tokenizer.from_str(definition)
    encode = lambda batch: sum(map(len, plain.encode_batch_fast(batch, add_special_tokens=False)))
start = time.perf_counter()
tokens = sum(map(encode, batches))
seconds = time.perf_counter() - start
{_PRINT}
"""
CONVERT = """
import json, pathlib, sys, threading, time
from eagle_slim.convert import ConvertOptions, convert_head
from eagle_slim.convert.vocabulary_choice import VocabRequest
folder, peak_kb = pathlib.Path(sys.argv[1]), 0
def watch():
    global peak_kb
    while True:
        time.sleep(0.005)
        status = pathlib.Path("/proc/self/status").read_text()
        peak_kb = max(peak_kb, int(status.split("RssAnon:")[1].split()[0]))
threading.Thread(target=watch, daemon=True).start()
start = time.perf_counter()
ranked = VocabRequest(token_map=folder / "freq.json")
options = ConvertOptions(int(sys.argv[2]), vocabulary=ranked, target=folder / "target", out=folder / "out")
convert_head(folder / "head", options)
print(json.dumps([time.perf_counter() - start, peak_kb / 1024]))
"""


@cache
def _material() -> tuple[list[str], list[str]]:
    """Words, and sentences of the built-in chats."""
    data = resources.files("eagle_slim.convert.default").joinpath("self_chat.jsonl.gz").read_bytes()
    chats = [json.loads(line)["messages"] for line in gzip.decompress(data).splitlines()]
    prose = "\n".join(message["content"] for messages in chats for message in messages)
    return sorted(set(re.findall(r"[A-Za-z]{5,}", prose))), re.findall(r"[^.!?\n]+[.!?\n]+\s*", prose)


def texts(seed: int, num_bytes: int) -> Iterator[str]:
    """Yield documents of about 0.5 to 6 KB, ``num_bytes`` in all, that no library has seen; each seed gives others.

    They are put together from sentences of the built-in chats. About every tenth word is replaced by a number or a
    made-up one, so that caches of words are neither useless nor complete.
    """
    words, sentences = _material()
    draw = random.Random(seed)
    while num_bytes > 0:
        parts = "".join(draw.choices(sentences, k=draw.randint(8, 60))).split(" ")
        for _ in range(1 + len(parts) // 10):
            # random() only: randrange and choice take five times as long, and a large corpus is to be written.
            first, second, at = (int(draw.random() * size) for size in (len(words), len(words), len(parts)))
            is_number = draw.random() < 0.4
            parts[at] = f"{draw.random() * 1000:.3f}" if is_number else words[first][:4] + words[second][-4:]
        text = " ".join(parts)
        num_bytes -= len(text)
        yield text


def rates(program: str, args: argparse.Namespace, path: Path) -> dict[str, float]:
    """Run a program on a file: tokens per second, and per second of processor time."""
    command = [sys.executable, "-c", program, args.tokenizer, args.library, str(args.workers), str(path)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    tokens, seconds, processor_s = json.loads(done.stdout.splitlines()[-1])
    return {"tokens_per_s": tokens / seconds, "tokens_per_processor_s": tokens / processor_s}


def counting(args: argparse.Namespace) -> dict[str, Any]:
    """Count and encode in turn: medians over the repeats, and ours over the others."""
    programs = {"ours": OURS, "bare": BARE}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in programs}
    with tempfile.TemporaryDirectory() as folder:
        for repeat in range(args.repeats):
            path = Path(folder) / f"{repeat}.jsonl"
            lines = (json.dumps({"text": text}) + "\n" for text in texts(repeat, args.megabytes << 20))
            path.write_text("".join(lines), encoding="utf-8")
            for name, program in programs.items():
                found[name].append(rates(program, args, path))
            path.unlink()
    medians = {
        name: {rate: statistics.median(row[rate] for row in rows) for rate in rows[0]} for name, rows in found.items()
    }
    ratio = medians["ours"]["tokens_per_s"] / medians["bare"]["tokens_per_s"]
    about = {"library": args.library, "workers": args.workers, "megabytes": args.megabytes}
    return {**about, **medians, "ours / bare": ratio, "all": found}


def make_files(folder: Path, dims: Dims, draft_vocab: int) -> None:
    """Write head, target and token map, and ``must-read``, a folder of just the bytes that must be read."""
    head = random_head(dims, torch.device("cpu"))
    inner = {name: tensor for name, tensor in head.tensors.items() if name.startswith(("self_attn", "mlp", *NORMS))}
    outer = {name: tensor for name, tensor in head.tensors.items() if name not in inner}
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": dims.vocab,
        "hidden_size": dims.hidden, "intermediate_size": dims.intermediate, "num_hidden_layers": 1,
        "num_attention_heads": dims.heads, "num_key_value_heads": dims.kv_heads, "head_dim": dims.head_dim,
        "hidden_act": "silu", "rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "rope_theta": 500000.0,
        "torch_dtype": "bfloat16",
    }  # fmt: skip
    _save(folder / "target", {"lm_head.weight": head.lm_head}, config | {"num_hidden_layers": 32})
    tensors = outer | {f"midlayer.{name}": tensor for name, tensor in inner.items()}
    _save(folder / "head", tensors, config | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": None})
    # Frequent tokens have low ids in BPE vocabularies, so the wanted rows are dense at first and thin out.
    weights = 1.0 / (np.arange(dims.vocab) + 1000.0)
    rng = np.random.default_rng(0)
    ranked = rng.choice(dims.vocab, draft_vocab, replace=False, p=weights / weights.sum())
    (folder / "freq.json").write_text(json.dumps(ranked.tolist()))
    must_read = folder / "must-read"
    must_read.mkdir()
    shutil.copyfile(folder / "head" / "model.safetensors", must_read / "head")
    save_file({"rows": head.lm_head[torch.from_numpy(np.sort(ranked))]}, must_read / "rows")


def _save(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")


def convert(folder: Path, draft_vocab: int) -> tuple[float, float]:
    """Convert: seconds, and MiB of private memory at the peak.

    Ends the program where the written rows are not those of the target that were asked for.
    """
    shutil.rmtree(folder / "out", ignore_errors=True)
    command = [sys.executable, "-c", CONVERT, str(folder), str(draft_vocab)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    seconds, peak_mib = json.loads(done.stdout)
    written = load_file(folder / "out" / "model.safetensors")
    wanted = sorted(json.loads((folder / "freq.json").read_text()))
    if (written["d2t"] + torch.arange(draft_vocab)).tolist() != wanted:
        raise SystemExit("the written d2t does not name the ids asked for")
    if not torch.equal(written["lm_head.weight"], load_file(folder / "must-read" / "rows")["rows"]):
        raise SystemExit("the written rows are not the target's")
    return seconds, peak_mib


def copy_s(source: Path, destination: Path) -> float:
    """Copy a folder to the disk, every file of it: seconds."""
    shutil.rmtree(destination, ignore_errors=True)
    start = time.perf_counter()
    subprocess.run(["cp", "-r", "--reflink=never", str(source), str(destination)], check=True)
    subprocess.run(["sync", *map(str, destination.iterdir()), str(destination)], check=True)
    return time.perf_counter() - start


def converting(args: argparse.Namespace) -> dict[str, Any]:
    """Convert and copy in turn, after once to warm up."""
    found: dict[str, list[float]] = {"convert_s": [], "cp_fsync_s": [], "peak_mib": []}
    args.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        make_files(folder, MODELS[args.dims], args.draft_vocab)
        for _ in range(args.repeats + 1):
            # What was written before is on the disk; what is read is in the page cache.
            os.sync()
            seconds, peak_mib = convert(folder, args.draft_vocab)
            found["convert_s"].append(seconds)
            found["peak_mib"].append(peak_mib)
            os.sync()
            found["cp_fsync_s"].append(copy_s(folder / "must-read", folder / "copied"))
    ours, copied = (statistics.median(found[name][1:]) for name in ("convert_s", "cp_fsync_s"))
    about = {"dims": args.dims, "draft_vocab": args.draft_vocab}
    return {**about, "median_convert_s": ours, "median_cp_fsync_s": copied, "ratio": ours / copied, **found}


ROWS = {"counting": counting, "converting": converting}


def main(argv: list[str] | None = None) -> None:
    """Run the benchmark; `--help` lists the options."""
    command = Command("offline", __doc__, ROWS)
    command.add_argument("--repeats", type=int, default=3)
    command.add_argument("--tokenizer", help="counting: Hub id, folder or tokenizer.json")
    command.add_argument("--library", choices=("tokenizers", "fastokens"), default="fastokens")
    command.add_argument("--workers", type=int, default=2)
    command.add_argument("--megabytes", type=int, default=256, help="text per pass")
    command.add_argument("--folder", type=Path, help="converting: where to put files")
    command.add_argument("--dims", choices=MODELS, default="llama-3.1-8b")
    command.add_argument("--draft-vocab", type=int, default=32000)
    args = command.parse_args(argv)
    names = command.chosen(args)
    for name, needed in (("counting", "tokenizer"), ("converting", "folder")):
        if name in names and getattr(args, needed) is None:
            command.error(f"{name} needs --{needed}")
    result: dict[str, Any] = {"machine": machine(torch.device("cpu")), "cores": os.cpu_count()}
    for name in names:
        result[name] = ROWS[name](args)
        show({key: value for key, value in result[name].items() if key != "all"})
    write(result, args.out)


if __name__ == "__main__":
    main()
