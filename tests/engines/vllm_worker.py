"""Run vLLM jobs in a process of its own: JSON jobs on stdin, one JSON result per line on stdout, prefixed ``RESULT ``.

A job: ``{"target": folder, "head": folder or null, "method": "eagle3", "k": 3, "prompts": [[ids]], "max_tokens": 32,
"dtype": "bfloat16"}``. A result: ``{"tokens": [[ids]], "drafts": n, "drafted": n, "accepted": n, "per_position": [n]}``
or ``{"error": "Type: message"}`` when vLLM refused to load.
"""

import gc
import json
import os
import sys

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")


def run(job: dict) -> dict:
    from vllm import LLM, SamplingParams
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    speculative = None
    if job["head"]:
        speculative = {"model": job["head"], "method": job["method"], "num_speculative_tokens": job["k"]}
    llm = None
    try:
        llm = LLM(
            model=job["target"],
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=job.get("max_model_len", 512),
            max_num_seqs=8,
            dtype=job["dtype"],
            enable_prefix_caching=False,
            disable_log_stats=False,
            speculative_config=speculative,
        )
        sampling = SamplingParams(temperature=0, max_tokens=job["max_tokens"], ignore_eos=True, detokenize=False)
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in job["prompts"]], sampling, use_tqdm=False)
        result: dict = {"tokens": [list(output.outputs[0].token_ids) for output in outputs]}
        names = {
            "vllm:spec_decode_num_drafts": "drafts",
            "vllm:spec_decode_num_draft_tokens": "drafted",
            "vllm:spec_decode_num_accepted_tokens": "accepted",
            "vllm:spec_decode_num_accepted_tokens_per_pos": "per_position",
        }
        for metric in llm.get_metrics():
            if metric.name in names:
                value = getattr(metric, "value", None)
                result[names[metric.name]] = metric.values if value is None else value
        return result
    except Exception as error:  # the engine's own refusal is the result under test
        return {"error": f"{type(error).__name__}: {error}"}
    finally:
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


if __name__ == "__main__":
    for line in sys.stdin:
        print("RESULT " + json.dumps(run(json.loads(line))), flush=True)
