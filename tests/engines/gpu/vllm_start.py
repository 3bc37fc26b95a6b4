"""One start of ``vllm.LLM`` on a GPU; see `measure.run_start` for how `run.py` talks to it.

A job: ``target``, ``head`` (null: plain decoding), ``prompts`` (a file), ``text_tokens``, ``batches``, ``max_tokens``;
optionally ``k`` (drafted tokens, 3), ``method`` ("eagle3"), ``dummy`` (weights are made up and drafts accepted by lot:
``synthetic_length`` tokens a step, 2.5), ``broken`` (artifacts to load into the running engine), ``eager``,
``tensor_parallel`` (ranks, 1).
"""

import os

# Several starts share one GPU and one machine, and nothing of them reaches a network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

import json
from pathlib import Path
from typing import Any

import torch
from measure import Generate, Generated, Json, accepted_length, run_start

MAX_BATCH = 16
_METRICS = {"vllm:spec_decode_num_drafts": "drafts", "vllm:spec_decode_num_accepted_tokens": "accepted"}
_engine: list[Any] = []


def options(job: Json) -> Json:
    """Arguments of ``vllm.LLM``, and of ``vllm serve``, for a job."""
    k, ranks, dummy = job.get("k", 3), job.get("tensor_parallel", 1), bool(job.get("dummy"))
    speculative = None
    if job["head"]:
        speculative = {"model": job["head"], "method": job.get("method", "eagle3"), "num_speculative_tokens": k}
        if dummy:
            speculative["rejection_sample_method"] = "synthetic"
            speculative["synthetic_acceptance_length"] = job.get("synthetic_length", 2.5)
    per_sequence = (k + 1) if speculative else 1
    return {
        "model": job["target"],
        "dtype": "bfloat16",
        "max_model_len": 1024,
        "max_num_seqs": MAX_BATCH,
        "max_num_batched_tokens": 4096,
        # Fixed sizes: engines that start side by side would mistake each other's memory for their own.
        "gpu_memory_utilization": 0.2 if dummy else 0.05,
        "kv_cache_memory_bytes": 3 * 2**30 if dummy else 2**30,
        "load_format": "dummy" if dummy else "auto",
        "enforce_eager": job.get("eager", False),
        # Exactly the batches that are measured, drafted tokens included, and single tokens for the drafter's own steps.
        "compilation_config": {
            "cudagraph_capture_sizes": sorted({*job["batches"], *(batch * per_sequence for batch in job["batches"])})
        },
        "enable_prefix_caching": False,
        "tensor_parallel_size": ranks,
        # Ranks talk through NCCL alone: not every pair of GPUs can read each other's memory.
        "disable_custom_all_reduce": ranks > 1,
        "speculative_config": speculative,
    }


def start(job: Json) -> tuple[Generate, Json]:
    """Build the engine of a job.

    Raises:
        RuntimeError: the drafter has not the rows that its configuration names, so nothing would be learned from it.
    """
    ranks = job.get("tensor_parallel", 1)
    if job.get("dummy"):
        # Read by vllm_extension.py, in the workers.
        os.environ["EAGLE_SLIM_OWN_LM_HEAD"] = "1"
    if ranks > 1:
        os.environ.setdefault("VLLM_WORKER_MULTIPROCESSING_METHOD", "spawn")
        for shortcut in ("VLLM_ALLREDUCE_USE_SYMM_MEM", "VLLM_ALLREDUCE_USE_FLASHINFER"):
            os.environ.setdefault(shortcut, "0")
    from vllm import LLM, SamplingParams, __version__

    llm = LLM(
        **options(job),
        skip_tokenizer_init=True,
        disable_log_stats=False,
        worker_extension_cls="vllm_extension.Extension",
    )
    _engine.append(llm)

    def counters() -> dict[str, int]:
        return {_METRICS[metric.name]: metric.value for metric in llm.get_metrics() if metric.name in _METRICS} or {
            "drafts": 0,
            "accepted": 0,
        }

    def generate(prompts: list[list[int]], max_tokens: int) -> Generated:
        before = counters()
        sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
        after = counters()
        return Generated(
            [list(output.outputs[0].token_ids) for output in outputs],
            **{name: after[name] - before[name] for name in before},
        )

    drafters = llm.collective_rpc("drafter_facts")
    rows = sum(drafter["rows"] for drafter in drafters) if job["head"] else None
    if job.get("dummy") and rows is not None:
        named = json.loads((Path(job["head"]) / "config.json").read_text())["draft_vocab_size"]
        if not named <= rows < named + 64 * ranks:
            raise RuntimeError(f"The drafter has {rows} rows, where its configuration names {named}.")
    facts = {
        "drafter_rows": rows,
        "version": __version__,
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name(),
        "ranks": ranks,
        "runner": drafters[0]["runner"],
        "cuda_graphs": not job.get("eager", False),
    }
    return generate, facts


def broken_maps(job: Json, generate: Generate) -> Json:
    """Load each broken artifact into the running engine, and generate with it."""
    if not job.get("broken"):
        return {}
    prompts = json.loads(Path(job["prompts"]).read_text())
    found = {}
    for name, folder in job["broken"].items():
        _engine[0].collective_rpc("load_drafter", args=(folder,))
        answers = generate(prompts, job["text_tokens"])
        found[name] = {"tokens": answers.tokens, "accepted_length": accepted_length(answers)}
    return {"broken": found}


if __name__ == "__main__":
    run_start(start, broken_maps)
