"""What does converting a head cost, against copying the bytes that it has to read?

    python -m benchmarks.convert --folder /a/disk/with/space [--out FILE]

A synthetic EAGLE-3 head of Llama-3.1-8B's dimensions (128,256 rows, bf16) without an LM head of its own, and a target
of which only the LM head is there. Timed is the call `convert_head`, against `cp` plus fsync of the bytes that it must
read (the head, and the wanted rows of the target's LM head), interleaved in the same run, all of it in the page cache.
Takes 5 GB of disk.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from eagle_slim.convert import ConvertOptions, convert_head
from eagle_slim.convert.vocabulary_choice import VocabRequest
from eagle_slim.runtime.drafter.tuning.problem import MODELS, Dims, random_head
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.shared.command import Command, show, write
from benchmarks.shared.timing import machine

NORMS = ("input_layernorm", "hidden_norm", "post_attention_layernorm")


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


def convert_s(folder: Path, draft_vocab: int) -> float:
    """Convert: seconds. Ends the program where the written rows are not those of the target that were asked for."""
    shutil.rmtree(folder / "out", ignore_errors=True)
    start = time.perf_counter()
    ranked = VocabRequest(token_map=folder / "freq.json")
    options = ConvertOptions(draft_vocab, vocabulary=ranked, target=folder / "target", out=folder / "out")
    convert_head(folder / "head", options)
    seconds = time.perf_counter() - start
    written = load_file(folder / "out" / "model.safetensors")
    wanted = sorted(json.loads((folder / "freq.json").read_text()))
    if (written["d2t"] + torch.arange(draft_vocab)).tolist() != wanted:
        raise SystemExit("the written d2t does not name the ids asked for")
    if not torch.equal(written["lm_head.weight"], load_file(folder / "must-read" / "rows")["rows"]):
        raise SystemExit("the written rows are not the target's")
    return seconds


def copy_s(source: Path, destination: Path) -> float:
    """Copy a folder to the disk, every file of it: seconds."""
    shutil.rmtree(destination, ignore_errors=True)
    start = time.perf_counter()
    subprocess.run(["cp", "-r", "--reflink=never", str(source), str(destination)], check=True)
    subprocess.run(["sync", *map(str, destination.iterdir()), str(destination)], check=True)
    return time.perf_counter() - start


def measure(folder: Path, draft_vocab: int, repeats: int) -> dict[str, Any]:
    """Convert and copy in turn, after once to warm up."""
    found: dict[str, list[float]] = {"convert_s": [], "cp_fsync_s": []}
    for _ in range(repeats + 1):
        # What was written before is on the disk; what is read is in the page cache.
        os.sync()
        found["convert_s"].append(convert_s(folder, draft_vocab))
        os.sync()
        found["cp_fsync_s"].append(copy_s(folder / "must-read", folder / "copied"))
    ours, copied = (statistics.median(seconds[1:]) for seconds in found.values())
    return {"median_convert_s": ours, "median_cp_fsync_s": copied, "ratio": ours / copied, **found}


def main(argv: list[str] | None = None) -> None:
    """Run the benchmark; `--help` lists the options."""
    command = Command("convert", __doc__)
    command.add_argument("--folder", type=Path, required=True, help="where to put files")
    command.add_argument("--dims", choices=MODELS, default="llama-3.1-8b")
    command.add_argument("--draft-vocab", type=int, default=32000)
    command.add_argument("--repeats", type=int, default=5)
    args = command.parse_args(argv)
    args.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        make_files(Path(folder), MODELS[args.dims], args.draft_vocab)
        found = measure(Path(folder), args.draft_vocab, args.repeats)
    about = {"machine": machine(torch.device("cpu")), "cores": os.cpu_count(), "dims": args.dims}
    result = {**about, "draft_vocab": args.draft_vocab, **found}
    show(result)
    write(result, args.out)


if __name__ == "__main__":
    main()
