"""Time a target's way from its files into FP8 on a GPU, and measure its memory.

    python -m benchmarks.load_fp8 --dims llama-3.3-70b [--published] [--out FILE]

The checkpoint has the names, shapes, types and shards of a real one; its data are holes, which take no disk and read as
zeros, so the disk's own time is not in it. ``--published``: with FP8 matrices and a scale a row in the files. First the
numbers of a small random checkpoint, quantised on the GPU, are compared with those quantised on the CPU.
"""

from __future__ import annotations

import json
import resource
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from eagle_slim.runtime.drafter.tuning.problem import MODELS, Dims
from eagle_slim.runtime.opening.target_files import choose_form, load_target, load_target_config
from eagle_slim.runtime.target.fp8_forms import AT_LOAD
from eagle_slim.runtime.target.fp8_loading import load_by_tensor
from eagle_slim.runtime.target.wrapper import TargetModel
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.shared.command import Command, show, whole_from, write
from benchmarks.shared.timing import machine

LAYERS = {"llama-3.1-8b": 32, "llama-3.3-70b": 80}
SHARD_BYTES = 5 << 30
PUBLISHED = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]}
TYPES = {"BF16": 2, "F8_E4M3": 1, "F32": 4}

Entry = tuple[str, str, list[int]]
"""Name, type and shape of a tensor."""


def config_of(dims: Dims, layers: int) -> LlamaConfig:
    """Return the configuration of a Llama of these dimensions."""
    return LlamaConfig(
        vocab_size=dims.vocab,
        hidden_size=dims.hidden,
        intermediate_size=dims.intermediate,
        num_hidden_layers=layers,
        num_attention_heads=dims.heads,
        num_key_value_heads=dims.kv_heads,
        head_dim=dims.head_dim,
        max_position_embeddings=131072,
        tie_word_embeddings=False,
        dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
    )


def entries(config: LlamaConfig, published: bool) -> Iterator[Entry]:
    """List the tensors of a checkpoint in the order of the model."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    for name, weight in model.named_parameters():
        in_fp8 = published and name.endswith("proj.weight")
        yield name, "F8_E4M3" if in_fp8 else "BF16", list(weight.shape)
        if in_fp8:
            yield f"{name}_scale", "F32", [weight.shape[0], 1]


def write_holes(folder: Path, config: LlamaConfig, published: bool) -> int:
    """Write a checkpoint whose data are holes; return its bytes."""
    shards: list[list[tuple[Entry, int]]] = [[]]
    for name, dtype, shape in entries(config, published):
        size = torch.Size(shape).numel() * TYPES[dtype]
        if sum(bytes_ for _, bytes_ in shards[-1]) + size > SHARD_BYTES:
            shards.append([])
        shards[-1].append(((name, dtype, shape), size))
    index: dict[str, str] = {}
    for number, held in enumerate(shards, 1):
        file, header, end = folder / f"model-{number:05}-of-{len(shards):05}.safetensors", {}, 0
        for (name, dtype, shape), size in held:
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
            index[name], end = file.name, end + size
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with file.open("wb") as opened:
            opened.write(len(text).to_bytes(8, "little") + text)
            opened.truncate(8 + len(text) + end)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (folder / "config.json").write_text(
        json.dumps(config.to_dict() | ({"quantization_config": PUBLISHED} if published else {}))
    )
    return sum(size for held in shards for _, size in held)


def check(device: torch.device, folder: Path) -> None:
    """Compare what is quantised on a device with what is on the CPU, bit for bit."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(Dims(512, 1024, 8, 2, 64, 1000), 2), dtype=torch.bfloat16)
    model.save_pretrained(folder)
    config = load_target_config(folder, None, True)
    here, there = (
        load_by_tensor(folder, config, AT_LOAD, torch.bfloat16, place).state_dict()
        for place in (torch.device("cpu"), device)
    )
    wrong = [name for name, each in here.items() if not torch.equal(each, there[name].cpu())]
    assert not wrong, f"{wrong} differ between {device} and the CPU"


def measure(device: torch.device, config: LlamaConfig, published: bool, folder: Path) -> dict[str, Any]:
    """Load a checkpoint of holes onto a device, and pack it for the fused forward."""
    file_bytes = write_holes(folder, config, published)
    before_kb, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    found = load_target_config(folder, None, True)
    form = choose_form(folder, found, "auto" if published else "fp8", None, device, None, True)
    target = TargetModel(load_target(folder, None, device, None, True, found, form), None, "auto")
    row: dict[str, Any] = {"seconds": time.perf_counter() - start, "file_GB": file_bytes / 1e9}
    row["host_peak_GB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    row |= {"host_before_GB": before_kb / 1e6, "weights_GB": target.weight_bytes / 1e9, "target": str(target.backend)}
    if device.type == "cuda":
        row["gpu_peak_GB"] = torch.cuda.max_memory_allocated(device) / 1e9
        row["gpu_reserved_GB"] = torch.cuda.max_memory_reserved(device) / 1e9
    return row


def main(argv: list[str] | None = None) -> None:
    """Run the benchmark; `--help` lists the options."""
    command = Command("load_fp8", __doc__)
    command.add_argument("--dims", default="llama-3.3-70b", choices=sorted(LAYERS))
    command.add_argument("--layers", type=whole_from(1), help="layers of the target; default: all that it has")
    command.add_argument("--published", action="store_true", help="a checkpoint whose files are in FP8")
    args = command.parse_args(argv)
    device = command.gpu()
    layers = args.layers or LAYERS[args.dims]
    with tempfile.TemporaryDirectory() as folder:
        check(device, Path(folder))
    torch.cuda.reset_peak_memory_stats(device)
    with tempfile.TemporaryDirectory() as folder:
        row = measure(device, config_of(MODELS[args.dims], layers), args.published, Path(folder))
    result = {"dims": args.dims, "layers": layers, "published": args.published, "machine": machine(device), **row}
    show(result)
    write(result, args.out)


if __name__ == "__main__":
    main()
