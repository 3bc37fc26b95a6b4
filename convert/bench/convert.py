"""What does converting a head cost, against copying the bytes that it has to read?

    python -m eagle_slim.convert.bench.convert --folder /a/disk/with/space

A synthetic EAGLE-3 head of Llama-3.1-8B's dimensions (128,256 rows, bf16) without an LM head of its own, and its target
in shards of 5 GB. The shards are sparse files: only the LM head has data, so that 2.6 GB of disk suffice. Reported:

    time        of the call `convert_head`, against `cp` plus fsync of the bytes that it must read (the head, and the
                kept rows of the target's LM head), interleaved in the same run; page cache warm, and dropped
    memory      peak anonymous memory (RssAnon, sampled every millisecond) above the process after its imports, against
                the size of the slim output
    hashing     bytes that pass through SHA-256, against the bytes read and the bytes written
    network     bytes that a Hub on loopback sends for head and target, against head plus LM-head tensor; from a
                checkout only, as the server belongs to the tests

Every measurement is a process of its own; sampling and counting are not done in the processes that are timed. The
last line of output is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

_MEBIBYTE = 1 << 20


@dataclass(frozen=True)
class Sizes:
    """Dimensions of the synthetic pair; the defaults are Llama-3.1-8B's."""

    vocab: int = 128256
    draft_vocab: int = 32000
    hidden: int = 4096
    intermediate: int = 14336
    heads: int = 32
    kv_heads: int = 8
    shard_bytes: int = 5_000_000_000
    shards: int = 4

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden // self.heads

    def head_tensors(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of an EAGLE-3 head without LM head."""
        wide, kv = 2 * self.hidden, self.kv_heads * self.head_dim
        return {
            "fc.weight": (self.hidden, 3 * self.hidden),
            "midlayer.self_attn.q_proj.weight": (self.hidden, wide),
            "midlayer.self_attn.k_proj.weight": (kv, wide),
            "midlayer.self_attn.v_proj.weight": (kv, wide),
            "midlayer.self_attn.o_proj.weight": (self.hidden, self.hidden),
            "midlayer.mlp.gate_proj.weight": (self.intermediate, self.hidden),
            "midlayer.mlp.up_proj.weight": (self.intermediate, self.hidden),
            "midlayer.mlp.down_proj.weight": (self.hidden, self.intermediate),
            "midlayer.input_layernorm.weight": (self.hidden,),
            "midlayer.hidden_norm.weight": (self.hidden,),
            "midlayer.post_attention_layernorm.weight": (self.hidden,),
            "norm.weight": (self.hidden,),
        }

    def config(self) -> dict[str, Any]:
        """The configuration of the head; with another class name and no `draft_vocab_size`, that of the target."""
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "vocab_size": self.vocab,
            "draft_vocab_size": None,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": 1,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 131072,
            "rope_theta": 500000.0,
            "torch_dtype": "bfloat16",
            "bos_token_id": 128000 % self.vocab,
            "eos_token_id": 128001 % self.vocab,
        }


def main(argv: list[str] | None = None) -> None:
    """Run the benchmark; `--help` lists the options."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--folder", type=Path, help="where to put files and results; a temporary folder by default")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--no-network", action="store_true", help="leave the Hub on loopback out")
    for name, value in asdict(Sizes()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.child:
        _child(json.loads(args.child))
        return
    sizes = Sizes(**{name: getattr(args, name) for name in asdict(Sizes())})
    if args.folder:
        args.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="convert-bench-", dir=args.folder) as folder:
        print(json.dumps(_run(Path(folder), sizes, args.repeats, not args.no_network)))


def _run(folder: Path, sizes: Sizes, repeats: int, network: bool) -> dict[str, Any]:
    print(f"making the head and {sizes.shards} sparse shards of {sizes.shard_bytes:,} bytes", flush=True)
    kept = _make_files(folder, sizes)
    must_read = sum(file.stat().st_size for file in (folder / "must-read").iterdir())
    local = {
        "head": str(folder / "head"),
        "target": str(folder / "target"),
        "token_map": str(folder / "freq.json"),
        "draft_vocab": sizes.draft_vocab,
        "out": str(folder / "out"),
    }
    result: dict[str, Any] = {"sizes": asdict(sizes), "machine": _machine(), "must_read_bytes": must_read}
    counted = _measure({**local, "count": True})
    sampled = [_measure({**local, "sample": True}) for _ in range(2)]
    result["hashing"] = {key: counted[key] for key in ("hashed_bytes", "read_bytes", "output_bytes")}
    result["memory"] = memory = {
        "peak_anonymous_bytes": max(run["peak_anonymous_bytes"] for run in sampled),
        "output_bytes": counted["output_bytes"],
    }
    _check(folder / "out", folder, kept, sizes)
    for cache in ("warm", "cold"):
        ours, copies = [], []
        for _ in range(repeats):
            _settle(folder, cache == "cold")
            ours.append(_measure(local))
            _settle(folder, cache == "cold")
            copies.append(_copy(folder / "must-read", folder / "copied"))
        seconds = [run["seconds"] for run in ours]
        ratio = statistics.median(seconds) / statistics.median(copies)
        cpu = [run["cpu_seconds"] for run in ours]
        result[cache] = {"convert_s": seconds, "convert_cpu_s": cpu, "cp_fsync_s": copies, "ratio": ratio}
        print(
            f"{cache}: convert {statistics.median(seconds):.2f} s ({min(seconds):.2f}-{max(seconds):.2f}; "
            f"{statistics.median(cpu):.2f} s of CPU), "
            f"cp + fsync {statistics.median(copies):.2f} s ({min(copies):.2f}-{max(copies):.2f}), ratio {ratio:.2f}",
            flush=True,
        )
    print(
        f"memory: peak {memory['peak_anonymous_bytes'] / 1e6:,.0f} MB above the imports, "
        f"output {memory['output_bytes'] / 1e6:,.0f} MB; hashed {counted['hashed_bytes'] / 1e6:,.0f} MB of "
        f"{counted['read_bytes'] / 1e6:,.0f} MB read and {counted['output_bytes'] / 1e6:,.0f} MB written",
        flush=True,
    )
    if network:
        result["network"] = _over_the_network(folder, sizes, local)
        shares = {name: f"{run['ratio']:.4f}" for name, run in result["network"].items()}
        print(f"network: bytes sent / (head + LM-head tensor): {shares}", flush=True)
    return result


def _make_files(folder: Path, sizes: Sizes) -> NDArray[np.int64]:
    """Write head, target, token map, and the files that hold just the bytes to be read; return the kept ids."""
    from ..weights import stream
    from ..weights.safetensors_file import SafetensorsFile

    rng = np.random.default_rng(0)
    (folder / "head").mkdir()
    (folder / "head" / "config.json").write_text(json.dumps(sizes.config()))
    _write_safetensors(folder / "head" / "model.safetensors", sizes.head_tensors(), rng, set(sizes.head_tensors()))

    target = folder / "target"
    target.mkdir()
    config = sizes.config() | {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 32}
    del config["draft_vocab_size"]
    (target / "config.json").write_text(json.dumps(config))
    weight_map: dict[str, str] = {}
    for shard in range(1, sizes.shards + 1):
        name = f"model-{shard:05d}-of-{sizes.shards:05d}.safetensors"
        filler = (sizes.shard_bytes // 2 // sizes.hidden, sizes.hidden)
        tensors: dict[str, tuple[int, ...]] = {f"model.layers.{shard}.mlp.up_proj.weight": filler}
        if shard == sizes.shards:
            tensors["lm_head.weight"] = (sizes.vocab, sizes.hidden)
        _write_safetensors(target / name, tensors, rng, {"lm_head.weight"})
        weight_map |= dict.fromkeys(tensors, name)
    (target / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))

    # Frequent tokens have low ids in BPE vocabularies, so the kept rows are dense at first and thin out.
    weights = 1.0 / (np.arange(sizes.vocab) + 1000.0)
    ranked = rng.choice(sizes.vocab, sizes.draft_vocab, replace=False, p=weights / weights.sum())
    (folder / "freq.json").write_text(json.dumps(ranked.tolist()))
    kept = np.sort(ranked)
    must_read = folder / "must-read"
    must_read.mkdir()
    shutil.copyfile(folder / "head" / "model.safetensors", must_read / "head")
    rows, _ = stream.read(SafetensorsFile(target / weight_map["lm_head.weight"]), "lm_head.weight", kept)
    with open(must_read / "rows", "wb") as file:
        file.write(rows.data)
    os.sync()
    return kept


def _write_safetensors(
    path: Path, tensors: dict[str, tuple[int, ...]], rng: np.random.Generator, filled: set[str]
) -> None:
    """Write bf16 tensors; those in `filled` get random finite values, the others are holes in the file."""
    header, end = {}, 0
    for name, shape in tensors.items():
        size = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name, shape in tensors.items():
            left = 2 * int(np.prod(shape))
            if name not in filled:
                file.seek(left, os.SEEK_CUR)
                continue
            while left:
                # The exponent's top bit stays clear: no infinity, no NaN.
                values = rng.integers(0, 1 << 16, min(left, 64 * _MEBIBYTE) // 2, dtype=np.uint16) & 0xBFFF
                file.write(values.tobytes())
                left -= values.nbytes
        file.truncate(8 + len(text) + end)


def _check(out: Path, folder: Path, kept: NDArray[np.int64], sizes: Sizes) -> None:
    """Correctness first: rows and map are those asked for."""
    from safetensors import safe_open

    with safe_open(str(out / "model.safetensors"), "pt") as file:
        d2t = file.get_tensor("d2t").numpy()
        rows = _raw(file.get_tensor("lm_head.weight"))
    if not np.array_equal(d2t + np.arange(sizes.draft_vocab), kept):
        raise SystemExit("the written d2t does not name the ids asked for")
    if rows != (folder / "must-read" / "rows").read_bytes():
        raise SystemExit("the written rows are not the target's")


def _raw(tensor: Any) -> bytes:
    import torch

    return bytes(tensor.reshape(-1).view(torch.uint8).numpy().data)


def _measure(job: dict[str, Any], env: dict[str, str] | None = None) -> dict[str, Any]:
    shutil.rmtree(job["out"], ignore_errors=True)
    command = [sys.executable, "-m", __spec__.name if __spec__ else __name__, "--child", json.dumps(job)]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"the measured process failed with {done.returncode}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def _child(job: dict[str, Any]) -> None:
    """Measure one conversion in this process and print what came of it as JSON."""
    from eagle_slim.convert.bench.counting import count_reads, count_sha256

    from ..conversion.convert import convert_head
    from ..conversion.vocab_choice import VocabRequest

    counted = (count_sha256(), count_reads()) if job.get("count") else None
    before = _anonymous_bytes()
    peak, stop = [before], threading.Event()

    def sample() -> None:
        while not stop.wait(0.001):
            peak[0] = max(peak[0], _anonymous_bytes())

    sampler = threading.Thread(target=sample)
    if job.get("sample"):
        sampler.start()
    cpu, start = time.process_time(), time.perf_counter()
    (conversion,) = convert_head(
        job["head"],
        draft_vocab=job["draft_vocab"],
        vocabulary=VocabRequest(token_map=Path(job["token_map"])),
        target=job["target"],
        out=job["out"],
    )
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu
    stop.set()
    if job.get("sample"):
        sampler.join()
    output = sum(file.stat().st_size for file in conversion.folder.iterdir())
    print(
        json.dumps(
            {
                "seconds": seconds,
                "cpu_seconds": cpu_seconds,
                "peak_anonymous_bytes": peak[0] - before if job.get("sample") else None,
                "output_bytes": output,
                "hashed_bytes": counted[0].bytes if counted else None,
                "read_bytes": counted[1].bytes if counted else None,
            }
        )
    )


def _anonymous_bytes() -> int:
    with open("/proc/self/status", "rb") as status:
        for line in status:
            if line.startswith(b"RssAnon:"):
                return int(line.split()[1]) * 1024
    raise SystemExit("this kernel does not tell anonymous memory apart (RssAnon in /proc/self/status)")


def _copy(source: Path, destination: Path) -> float:
    """Seconds for `cp` plus fsync of every file of a folder."""
    shutil.rmtree(destination, ignore_errors=True)
    start = time.perf_counter()
    subprocess.run(["cp", "-r", "--reflink=never", str(source), str(destination)], check=True)
    for path in (*destination.iterdir(), destination):
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)
    return time.perf_counter() - start


def _settle(folder: Path, cold: bool) -> None:
    """Let the disk finish what was written before, then drop the inputs from the page cache, or read them into it."""
    os.sync()
    for path in (*(folder / "must-read").iterdir(), folder / "head" / "model.safetensors", *_lm_head_shard(folder)):
        with open(path, "rb") as file:
            if cold:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            elif path.parent.name != "target":
                while file.read(16 * _MEBIBYTE):
                    pass
    if not cold:
        _read_lm_head(folder)


def _lm_head_shard(folder: Path) -> list[Path]:
    return sorted((folder / "target").glob("*.safetensors"))[-1:]


def _read_lm_head(folder: Path) -> None:
    from ..weights.safetensors_file import SafetensorsFile

    (shard,) = _lm_head_shard(folder)
    span = SafetensorsFile(shard).tensors["lm_head.weight"]
    with open(shard, "rb") as file:
        file.seek(span.offset)
        left = span.size_bytes
        while left:
            left -= len(file.read(min(left, 16 * _MEBIBYTE)))


def _over_the_network(folder: Path, sizes: Sizes, local: dict[str, Any]) -> dict[str, Any]:
    support = Path(__file__).resolve().parents[2] / "tests"
    if not (support / "support" / "hub_server.py").is_file():
        raise SystemExit("the Hub on loopback belongs to the tests: run from a checkout, or with --no-network")
    sys.path.insert(0, str(support))
    from support.hub_server import HubServer  # type: ignore[import-not-found, unused-ignore]

    needed = (folder / "head" / "model.safetensors").stat().st_size + 2 * sizes.vocab * sizes.hidden
    runs: dict[str, Any] = {}
    with HubServer() as hub:
        for name in ("head", "target"):
            hub.add_model(f"bench/{name}", {path.name: path for path in (folder / name).iterdir()})
        job = {**local, "head": "bench/head", "target": "bench/target", "sample": True}
        for name in ("first", "again"):
            hub.reset_counts()
            run = _measure(job, hub.env(folder / "home"))
            sent = hub.bytes_sent()
            runs[name] = {
                "seconds": run["seconds"],
                "sent_bytes": sent,
                "ratio": sent / needed,
                "requests": len(hub.requests),
                "peak_anonymous_bytes": run["peak_anonymous_bytes"],
            }
    return runs


def _machine() -> dict[str, Any]:
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    return {
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "commit": commit.stdout.strip() or None,
    }


if __name__ == "__main__":
    main()
