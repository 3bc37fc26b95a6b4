"""What does SafeAILab's EAGLE gain from the patches? Its own generation, patched drafter, fully patched, in one run.

    python -m eagle_slim.runtime.bench.upstream --upstream EAGLE --compare --out upstream.json
    python -m eagle_slim.runtime.bench.upstream --upstream EAGLE --dims llama-3.1-8b --draft-vocab 32000 --compare
    python -m eagle_slim.runtime.bench.upstream --upstream EAGLE --device cpu --dims tiny --dtype float32

``--upstream`` (or EAGLE_SLIM_UPSTREAM) is a clone of the repository; its transformers version must be installed.
``smollm2-135m`` is the built-in head with its target, the others are random models in which few tokens are probable, so
that drafts are accepted. Every variant first generates what upstream does (in float32 a difference is a failure, below
it the length that is equal is reported); ``--compare`` then times them in turn. The last line is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..config import TreeConfig
from ..upstream.patch import EaModelPatch
from .precompile import compile_all, job_of
from .problem import MODELS, Dims
from .random_decoding import LAYERS
from .timing import machine

VARIANTS = ("upstream", "drafter", "whole")
TINY = Dims(64, 96, 4, 2, 16, 320)
_PROBABLE = 16
_PROMPT = "<|im_start|>user\nWhat are three good habits for learning a new language?<|im_end|>\n<|im_start|>assistant\n"


@dataclass(frozen=True)
class Case:
    """What to build."""

    dims: str
    kind: str
    draft_vocab: int
    dtype: torch.dtype
    device: torch.device
    max_positions: int


def build_ea_model(case: Case) -> Any:
    """Build an EaModel by upstream's own constructor, on the device."""
    EaModel = importlib.import_module("eagle.model.ea_model").EaModel
    LlamaForCausalLM = importlib.import_module("eagle.model.modeling_llama_kv").LlamaForCausalLM
    is_real = case.dims == "smollm2-135m" and case.kind == "eagle3"
    dims = TINY if case.dims == "tiny" else MODELS[case.dims]
    with tempfile.TemporaryDirectory() as name, _on(case.device, case.dtype):
        folder = Path(name)
        if is_real:
            base, state, own = _smollm2(LlamaForCausalLM, case)
        else:
            base, state, own = LlamaForCausalLM(_target_config(case, dims)), {}, {}
        config = _write_folder(folder, case, dims, own)
        tree = TreeConfig()
        model = EaModel(
            case.kind == "eagle3", base, str(folder), str(config), tree.total_tokens, tree.depth, tree.top_k, 1.0, state
        )
    model.ea_layer.embed_tokens.weight.data = base.model.embed_tokens.weight.data
    if not is_real:
        heads = [base.lm_head, *([model.ea_layer.lm_head] if case.kind == "eagle3" else [])]
        for head in heads:
            # Random logits of order one, and few of them large: so that a drafted token is often the target's.
            torch.nn.init.normal_(head.weight, std=dims.hidden**-0.5)
            head.weight.data[_PROBABLE:] *= 0.05
            head.weight.data[:_PROBABLE] *= 4
    return model.eval()


@contextlib.contextmanager
def _on(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            yield
    finally:
        torch.set_default_dtype(before)


def _target_config(case: Case, dims: Dims) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=dims.vocab, hidden_size=dims.hidden, intermediate_size=dims.intermediate,
        num_hidden_layers=LAYERS.get(case.dims, 8), num_attention_heads=dims.heads, num_key_value_heads=dims.kv_heads,
        max_position_embeddings=case.max_positions, tie_word_embeddings=False,
    )  # fmt: skip


def _smollm2(model_class: Any, case: Case) -> tuple[Any, dict[str, Tensor], dict[str, Any]]:
    """Load the built-in head and its target: base model, upstream's state dict, what the head's configuration says."""
    from eagle_slim.convert.sources.builtin import embedded_target_folder

    from ..loading import open_any_head

    base = model_class.from_pretrained(embedded_target_folder(), torch_dtype=case.dtype).to(case.device)
    head = open_any_head(None).head
    state = {name: head.tensors.get(name).to(case.device, case.dtype) for name in head.tensors.names}
    # The head drafts with the target's own LM head, and upstream's EAGLE-3 always has one.
    state["lm_head.weight"] = base.lm_head.weight.data
    own = {name: head.config[name] for name in ("rope_theta", "rms_norm_eps")}
    return base, state, own | {"draft_vocab_size": base.lm_head.weight.shape[0]}


def _write_folder(folder: Path, case: Case, dims: Dims, own: dict[str, Any]) -> Path:
    """Write what upstream's constructor reads: a tokenizer, a row in the embedding's place, a head's configuration."""
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    save_file({"model.embed_tokens.weight": torch.zeros(1, dims.hidden, device="cpu")}, folder / "model.safetensors")
    index = {"metadata": {}, "weight_map": {"model.embed_tokens.weight": "model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = {
        "vocab_size": dims.vocab, "hidden_size": dims.hidden, "intermediate_size": dims.intermediate,
        "num_hidden_layers": 1, "num_attention_heads": dims.heads, "num_key_value_heads": dims.kv_heads,
        "max_position_embeddings": case.max_positions, "rms_norm_eps": 1e-5, "hidden_act": "silu", "bias": True,
        "rope_theta": 10000.0,
    }  # fmt: skip
    if case.kind == "eagle3":
        # With it, upstream reads no embedding from the target's files.
        config |= {"draft_vocab_size": case.draft_vocab, "target_hidden_size": dims.hidden}
    path = folder / "head.json"
    path.write_text(json.dumps(config | own))
    return path


def read_prompt(case: Case, length: int) -> Tensor:
    """Return a prompt, int64 [1, seq]: a question to the real model, random ids to the others."""
    if case.dims == "smollm2-135m" and case.kind == "eagle3":
        from eagle_slim.convert.sources.builtin import embedded_target_folder
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(embedded_target_folder() / "tokenizer.json"))
        ids = tokenizer.encode(_PROMPT, add_special_tokens=False).ids
    else:
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, 300, (length,), generator=generator).tolist()
    return torch.tensor([ids], device=case.device)


@contextlib.contextmanager
def as_variant(variant: str, patch: EaModelPatch | None) -> Iterator[None]:
    """Put on what a variant has; the same packed weights serve both patches."""
    if variant == "upstream":
        yield
        return
    assert patch is not None
    put_on = patch if variant == "whole" else patch.layer
    put_on.apply()
    try:
        yield
    finally:
        put_on.remove()


def generate(model: Any, prompt: Tensor, max_new_tokens: int) -> dict[str, Any]:
    """Generate greedily: the new ids, milliseconds of each pass after the first, and seconds in all."""
    times, output = [], prompt
    _wait(prompt.device)
    start = time.perf_counter()
    for longer in model.ea_generate(prompt, max_new_tokens=max_new_tokens):
        _wait(prompt.device)
        times.append(time.perf_counter())
        output = longer
    new_ids = output[0, prompt.shape[1] :].tolist()
    passes = [(after - before) * 1e3 for before, after in itertools.pairwise(times)]
    return {"ids": new_ids, "passes_ms": passes, "num_passes": len(times), "seconds": times[-1] - start}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def record_draft(model: Any, prompt: Tensor, max_new_tokens: int) -> tuple[Any, tuple[Any, ...]]:
    """Run upstream's generation and return the ``stable_kv`` before its last draft, and that draft's arguments."""
    layer_class = type(model.ea_layer)
    own, calls = layer_class.topK_genrate, []

    def listening(layer: Any, hidden_states: Tensor, input_ids: Tensor, head: Any, logits_processor: Any) -> Any:
        calls.append((layer.stable_kv, (hidden_states, input_ids, head, logits_processor)))
        return own(layer, hidden_states, input_ids, head, logits_processor)

    layer_class.topK_genrate = listening
    try:
        generate(model, prompt, max_new_tokens)
    finally:
        layer_class.topK_genrate = own
    return calls[-1]


def draft_ms(model: Any, stable_kv: Any, arguments: tuple[Any, ...], rounds: int) -> float:
    """Median milliseconds of one call of ``topK_genrate``, from an idle device to its answer."""
    times = []
    device = arguments[0].device
    for _ in range(rounds + 3):
        model.ea_layer.stable_kv = stable_kv
        _wait(device)
        start = time.perf_counter()
        model.ea_layer.topK_genrate(*arguments)
        _wait(device)
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times[3:])


def set_tree(model: Any, tree: TreeConfig) -> None:
    """Have the model draft trees of this size, as its constructor would."""
    layer = model.ea_layer
    layer.depth, layer.top_k, layer.total_tokens = tree.depth, tree.top_k, tree.total_tokens - 1
    layer.init_tree()


def equal_length(ids: list[int], truth: list[int]) -> int:
    """Tokens up to the first difference; the shorter one's length if one begins the other."""
    for place, (found, wanted) in enumerate(zip(ids, truth, strict=False)):
        if found != wanted:
            return place
    return min(len(ids), len(truth))


def _peak(device: torch.device) -> int | None:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def run_tree(model: Any, tree: TreeConfig, prompt: Tensor, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Check all variants with one tree, then time them if asked to."""
    device = prompt.device
    set_tree(model, tree)
    rows: dict[str, dict[str, Any]] = {}
    truth: list[int] = []
    # Built after upstream's own run, whose memory must not count it, nor that of the tree before.
    patch = None
    gc.collect()
    for variant in VARIANTS:
        if variant != "upstream" and patch is None:
            patch = EaModelPatch(model, drafter=arguments.drafter)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
        with as_variant(variant, patch):
            answer = generate(model, prompt, arguments.new_tokens)
        truth = truth or answer["ids"]
        rows[variant] = {
            "tree": [tree.depth, tree.top_k, tree.total_tokens], "variant": variant, "prompt_tokens": prompt.shape[1],
            "new_tokens": len(answer["ids"]), "num_passes": answer["num_passes"],
            "accepted_length": len(answer["ids"]) / answer["num_passes"],
            "equal_tokens": equal_length(answer["ids"], truth),
            "is_equal": equal_length(answer["ids"], truth) >= min(len(truth), len(answer["ids"])),
            "peak_bytes": _peak(device),
        }  # fmt: skip
    if arguments.compare:
        stable_kv, call = record_draft(model, prompt, arguments.new_tokens)
        passes: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
        speeds: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
        for _ in range(arguments.rounds):
            for variant in VARIANTS:
                with as_variant(variant, patch):
                    answer = generate(model, prompt, arguments.new_tokens)
                passes[variant] += answer["passes_ms"]
                speeds[variant].append(len(answer["ids"]) / answer["seconds"])
        for variant in VARIANTS:
            # The drafts of both patches are the same call.
            if variant != "whole":
                with as_variant(variant, patch):
                    rows[variant]["draft_ms"] = draft_ms(model, stable_kv, call, arguments.draft_rounds)
            rows[variant] |= {
                "pass_ms": statistics.median(passes[variant]),
                "tokens_per_s": statistics.median(speeds[variant]),
            }
    for row in rows.values():
        print({name: round(value, 3) if isinstance(value, float) else value for name, value in row.items()}, flush=True)
    return list(rows.values())


def read_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--upstream", type=Path, default=os.environ.get("EAGLE_SLIM_UPSTREAM"), help="clone of EAGLE")
    parser.add_argument("--compare", action="store_true", help="time the variants after checking them")
    parser.add_argument(
        "--dims", default="smollm2-135m", choices=["tiny", "smollm2-135m", "llama-3.2-1b", "llama-3.1-8b"]
    )
    parser.add_argument("--kind", default="eagle3", choices=["eagle3", "eagle"], help="EAGLE-3, or EAGLE-1/2")
    parser.add_argument("--draft-vocab", type=int, help="LM-head rows of a random EAGLE-3 head (default: all)")
    parser.add_argument("--trees", nargs="+", default=["5,10,60"], metavar="DEPTH,TOP_K,TOTAL")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--draft-rounds", type=int, default=10)
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--drafter", choices=["triton", "reference"], help="default: triton on a GPU")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.upstream is None or not (Path(arguments.upstream) / "eagle" / "model" / "ea_model.py").is_file():
        parser.error("--upstream (or EAGLE_SLIM_UPSTREAM) must name a clone of github.com/SafeAILab/EAGLE")
    arguments.drafter = arguments.drafter or ("triton" if arguments.device.startswith("cuda") else "reference")
    return arguments


def main() -> None:
    """Check, compare, and print a table; JSON last. Exit 1 where float32 text differs."""
    arguments = read_arguments()
    sys.path.insert(0, str(arguments.upstream))
    import transformers

    transformers.logging.set_verbosity_error()
    device, dtype = torch.device(arguments.device), getattr(torch, arguments.dtype)
    vocab = (TINY if arguments.dims == "tiny" else MODELS[arguments.dims]).vocab
    positions = arguments.prompt_tokens + arguments.new_tokens + 512
    case = Case(arguments.dims, arguments.kind, arguments.draft_vocab or vocab, dtype, device, max(2048, positions))
    trees = [TreeConfig(*(int(number) for number in text.split(","))) for text in arguments.trees]
    if device.type == "cuda" and case.dims in MODELS and case.kind == "eagle3" and dtype == torch.bfloat16:
        # The capacity is no constant of the kernel.
        compile_all([job_of(case.dims, tree, 1, 2048, case.draft_vocab, device) for tree in trees], seconds=60)
    torch.manual_seed(0)
    model = build_ea_model(case)
    prompt = read_prompt(case, arguments.prompt_tokens)
    rows: list[dict[str, Any]] = []
    for tree in trees:
        rows += run_tree(model, tree, prompt, arguments)
    report = {
        "dims": arguments.dims, "kind": arguments.kind, "draft_vocab": case.draft_vocab, "dtype": arguments.dtype,
        "drafter": arguments.drafter, "upstream": _upstream_commit(arguments.upstream),
        "transformers": transformers.__version__, "machine": machine(device), "rows": rows,
    }  # fmt: skip
    if arguments.out:
        arguments.out.write_text(json.dumps(report, indent=1))
    print(json.dumps(report))
    if dtype == torch.float32 and not all(row["is_equal"] for row in rows):
        sys.exit(1)


def _upstream_commit(folder: Path) -> str:
    """The commit of the clone: a file COMMIT beside it, or git's answer, or "unknown"."""
    import subprocess

    named = folder / "COMMIT"
    if named.is_file():
        return named.read_text().strip()
    done = subprocess.run(["git", "-C", str(folder), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


if __name__ == "__main__":
    main()
