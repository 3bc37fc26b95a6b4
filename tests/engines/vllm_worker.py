"""Serve prompts with a real ``vllm.LLM``.

A job: ``{"target": folder, "head": folder or null, "prompts": [[ids]]}`` and optionally ``method`` ("eagle3"), ``k``
(drafted tokens, 3), ``max_tokens`` (32), ``dtype`` ("bfloat16"), ``max_model_len`` (512). An argument: ranks (1).
A result: ``{"tokens": [[ids]], "drafts": n, "drafted": n, "accepted": n, "per_position": [n]}``.
Temperature is 0: the CPU build samples wrong tokens at temperature 1 whatever the head (see docs/engines.md).
"""

import gc
import os
import sys

from protocol import Json, serve

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

# vLLM collects garbage a dozen times while it starts and ends, each time all that it imported: most of a tiny model's
# time. Once after each job is enough.
_collect, gc.collect = gc.collect, lambda *_: 0


def run(job: Json) -> Json:
    tensor_parallel = int(sys.argv[1]) if sys.argv[1:] else 1
    # Tensor parallelism needs worker processes; without it the engine runs right here, which starts faster.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1" if tensor_parallel > 1 else "0"
    if tensor_parallel > 1:
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(map(str, sorted(os.sched_getaffinity(0))[:tensor_parallel]))
    from vllm import LLM, SamplingParams
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
    from vllm.model_executor.models import registry

    # In a process of its own vLLM looks at every class of models anew, so that none touches a GPU.
    registry._run_in_subprocess = lambda look: look()

    speculative = None
    if job["head"]:
        speculative = {"model": job["head"], "method": job.get("method", "eagle3")}
        speculative["num_speculative_tokens"] = job.get("k", 3)
    llm = None
    try:
        llm = LLM(
            model=job["target"],
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=job.get("max_model_len", 512),
            max_num_seqs=16,
            dtype=job.get("dtype", "bfloat16"),
            tensor_parallel_size=tensor_parallel,
            enable_prefix_caching=False,
            kv_cache_memory_bytes=2**28,
            disable_log_stats=False,
            speculative_config=speculative,
        )
        length = job.get("max_tokens", 32)
        sampling = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, detokenize=False)
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in job["prompts"]], sampling, use_tqdm=False)
        result: Json = {"tokens": [list(output.outputs[0].token_ids) for output in outputs]}
        names = {"drafts": "drafts", "draft_tokens": "drafted", "accepted_tokens": "accepted"}
        names = {f"vllm:spec_decode_num_{name}": ours for name, ours in names.items()}
        names["vllm:spec_decode_num_accepted_tokens_per_pos"] = "per_position"
        for metric in llm.get_metrics():
            if metric.name in names:
                value = getattr(metric, "value", None)
                result[names[metric.name]] = metric.values if value is None else value
        return result
    finally:
        del llm
        cleanup_dist_env_and_memory()
        _collect()


if __name__ == "__main__":
    serve(run)
