"""One start of ``vllm.LLM`` on a GPU; see `measure.run_start` for how `run.py` talks to it.

A job: ``target``, ``head`` (null: plain decoding), ``prompts`` (a file), ``text_tokens``, ``batches``, ``max_tokens``;
optionally ``k`` (drafted tokens, 3), ``method`` ("eagle3"), ``dummy`` (weights are made up and drafts accepted by lot:
``synthetic_length`` tokens a step, 2.5), ``broken`` (artifacts to load into the running engine), ``eager``.
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
from safetensors.torch import load_file

MAX_BATCH = 16
_METRICS = {"vllm:spec_decode_num_drafts": "drafts", "vllm:spec_decode_num_accepted_tokens": "accepted"}
_engine: list[Any] = []


def start(job: Json) -> tuple[Generate, Json]:
    """Build the engine of a job."""
    from vllm import LLM, SamplingParams, __version__

    k = job.get("k", 3)
    if job.get("dummy"):
        # Learned from the names in a head's file, which dummy weights have not; without it the target's rows are used.
        from vllm.model_executor.models.llama_eagle3 import Eagle3LlamaForCausalLM

        Eagle3LlamaForCausalLM.has_own_lm_head = True
    speculative = None
    if job["head"]:
        speculative = {"model": job["head"], "method": job.get("method", "eagle3"), "num_speculative_tokens": k}
        if job.get("dummy"):
            speculative["rejection_sample_method"] = "synthetic"
            speculative["synthetic_acceptance_length"] = job.get("synthetic_length", 2.5)
    per_sequence = (k + 1) if speculative else 1
    llm = LLM(
        model=job["target"],
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=1024,
        max_num_seqs=MAX_BATCH,
        max_num_batched_tokens=4096,
        # Fixed sizes: engines that start side by side would mistake each other's memory for their own.
        gpu_memory_utilization=0.2 if job.get("dummy") else 0.05,
        kv_cache_memory_bytes=3 * 2**30 if job.get("dummy") else 2**30,
        load_format="dummy" if job.get("dummy") else "auto",
        enforce_eager=job.get("eager", False),
        # Exactly the batches that are measured, drafted tokens included, and single tokens for the drafter's own steps.
        compilation_config={
            "cudagraph_capture_sizes": sorted({*job["batches"], *(batch * per_sequence for batch in job["batches"])})
        },
        enable_prefix_caching=False,
        disable_log_stats=False,
        speculative_config=speculative,
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

    runner = _model_runner(llm)
    facts = {
        "drafter_rows": None if speculative is None else _draft_model(llm).lm_head.weight.shape[0],
        "version": __version__,
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name(),
        "runner": type(runner).__module__,
        "cuda_graphs": not job.get("eager", False),
    }
    return generate, facts


def _model_runner(llm: Any) -> Any:
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner


def _draft_model(llm: Any) -> Any:
    runner = _model_runner(llm)
    return (getattr(runner, "speculator", None) or runner.drafter).model


def broken_maps(job: Json, generate: Generate) -> Json:
    """Load each broken artifact into the running engine with vLLM's own loader, and generate with it.

    The map is zeroed before, as it is in a new engine: a file without one leaves it so.
    """
    if not job.get("broken"):
        return {}
    draft_model = _draft_model(_engine[0])
    prompts = json.loads(Path(job["prompts"]).read_text())
    found = {}
    for name, folder in job["broken"].items():
        draft_model.draft_id_to_target_id.data.zero_()
        draft_model.load_weights(iter(load_file(Path(folder) / "model.safetensors", device="cuda").items()))
        answers = generate(prompts, job["text_tokens"])
        found[name] = {"tokens": answers.tokens, "accepted_length": accepted_length(answers)}
    return {"broken": found}


if __name__ == "__main__":
    run_start(start, broken_maps)
