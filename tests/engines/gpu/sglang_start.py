"""One start of ``sglang.Engine`` on a GPU; see `measure.run_start` for how `run.py` talks to it.

A job: ``target``, ``head`` (null: plain decoding), ``prompts`` (a file), ``text_tokens``, ``batches``, ``max_tokens``;
optionally ``algorithm`` ("EAGLE3" or "EAGLE"), ``steps`` (3), ``topk`` (1), ``draft_tokens`` (nodes of the tree, root
included; steps + 1), ``token_map``, ``dummy``, ``eager``.

Attention runs in SGLang's Triton kernels: its FlashAttention library is 1.1 GB and is not carried.
"""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from measure import Generate, Generated, Json, run_start

MAX_BATCH = 16


def start(job: Json) -> tuple[Generate, Json]:
    """Build the engine of a job."""
    import sglang

    options: Json = {}
    if job["head"]:
        steps = job.get("steps", 3)
        options = {
            "speculative_algorithm": job.get("algorithm", "EAGLE3"),
            "speculative_draft_model_path": job["head"],
            "speculative_num_steps": steps,
            "speculative_eagle_topk": job.get("topk", 1),
            "speculative_num_draft_tokens": job.get("draft_tokens", steps + 1),
            "speculative_token_map": job.get("token_map"),
        }
    engine = sglang.Engine(
        model_path=job["target"],
        skip_tokenizer_init=True,
        dtype="bfloat16",
        load_format="dummy" if job.get("dummy") else "auto",
        context_length=1024,
        # Of what was free before the engines beside this one took theirs; max_total_tokens is what is used.
        mem_fraction_static=0.7,
        max_total_tokens=16384,
        max_running_requests=MAX_BATCH,
        cuda_graph_bs_decode=sorted(job["batches"]),
        disable_decode_cuda_graph=job.get("eager", False),
        disable_prefill_cuda_graph=True,
        disable_radix_cache=True,
        attention_backend="triton",
        sampling_backend="pytorch",
        grammar_backend="none",
        skip_server_warmup=True,
        random_seed=0,
        log_level="warning",
        # Engines that start side by side look for free ports from here on.
        port=20000 + os.getpid() % 20 * 1500,
        **options,
    )

    def generate(prompts: list[list[int]], max_tokens: int) -> Generated:
        sampling = {"temperature": 0, "max_new_tokens": max_tokens, "ignore_eos": True}
        outputs = engine.generate(input_ids=[list(ids) for ids in prompts], sampling_params=sampling)
        info = [output["meta_info"] for output in outputs]
        return Generated(
            [list(output["output_ids"]) for output in outputs],
            drafts=sum(one.get("spec_verify_ct", 0) for one in info),
            accepted=sum(one.get("spec_num_correct_drafts", 0) for one in info),
        )

    facts = {
        "version": sglang.__version__,
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name(),
        "attention": "triton",
        "cuda_graphs": not job.get("eager", False),
    }
    return generate, facts


# SGLang spawns processes that import this file again.
if __name__ == "__main__":
    run_start(start, lambda job, generate: {})
