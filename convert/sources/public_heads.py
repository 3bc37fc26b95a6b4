"""Public EAGLE heads and the target model each was trained for, for heads whose own files do not say.

Targets are the repositories that the heads' authors name on their cards.
"""

from __future__ import annotations

_TARGETS = {
    # SafeAILab, EAGLE-3
    "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B": "meta-llama/Llama-3.1-8B-Instruct",
    "yuhuili/EAGLE3-LLaMA3.3-Instruct-70B": "meta-llama/Llama-3.3-70B-Instruct",
    "yuhuili/EAGLE3-DeepSeek-R1-Distill-LLaMA-8B": "deepseek-ai/DeepSeek-R1-Distill-Llama-8B",
    "yuhuili/EAGLE3-Vicuna1.3-13B": "lmsys/vicuna-13b-v1.3",
    # SafeAILab, EAGLE-1 and EAGLE-2
    "yuhuili/EAGLE-LLaMA3-Instruct-8B": "meta-llama/Meta-Llama-3-8B-Instruct",
    "yuhuili/EAGLE-LLaMA3-Instruct-70B": "meta-llama/Meta-Llama-3-70B-Instruct",
    "yuhuili/EAGLE-LLaMA3.1-Instruct-8B": "meta-llama/Llama-3.1-8B-Instruct",
    "yuhuili/EAGLE-llama2-chat-7B": "meta-llama/Llama-2-7b-chat-hf",
    "yuhuili/EAGLE-llama2-chat-13B": "meta-llama/Llama-2-13b-chat-hf",
    "yuhuili/EAGLE-llama2-chat-70B": "meta-llama/Llama-2-70b-chat-hf",
    "yuhuili/EAGLE-Vicuna-7B-v1.3": "lmsys/vicuna-7b-v1.3",
    "yuhuili/EAGLE-Vicuna-13B-v1.3": "lmsys/vicuna-13b-v1.3",
    "yuhuili/EAGLE-Vicuna-33B-v1.3": "lmsys/vicuna-33b-v1.3",
    "yuhuili/EAGLE-Qwen2-7B-Instruct": "Qwen/Qwen2-7B-Instruct",
    "yuhuili/EAGLE-Qwen2-72B-Instruct": "Qwen/Qwen2-72B-Instruct",
    "yuhuili/EAGLE-mixtral-instruct-8x7B": "mistralai/Mixtral-8x7B-Instruct-v0.1",
    # lmsys (SpecForge)
    "lmsys/sglang-EAGLE3-LLaMA3.1-Instruct-8B": "meta-llama/Llama-3.1-8B-Instruct",
    "lmsys/EAGLE3-gpt-oss-120b-bf16": "openai/gpt-oss-120b",
    "lmsys/Qwen3-235B-A22B-EAGLE3": "Qwen/Qwen3-235B-A22B",
    "lmsys/sglang-EAGLE3-Llama-4-Scout-17B-16E-Instruct-v1": "meta-llama/Llama-4-Scout-17B-16E-Instruct",
    "lmsys/sglang-EAGLE3-Llama-4-Maverick-17B-128E-Instruct-v1": "meta-llama/Llama-4-Maverick-17B-128E-Instruct",
    # NVIDIA (ModelOpt)
    "nvidia/gpt-oss-120b-Eagle3": "openai/gpt-oss-120b",
    "nvidia/gpt-oss-120b-Eagle3-v2": "openai/gpt-oss-120b",
    "nvidia/gpt-oss-120b-Eagle3-v3": "openai/gpt-oss-120b",
    "nvidia/Llama-4-Maverick-17B-128E-Eagle3": "meta-llama/Llama-4-Maverick-17B-128E-Instruct",
    # z-lab (DFlash)
    "z-lab/Qwen3-4B-DFlash-b16": "Qwen/Qwen3-4B",
    "z-lab/Qwen3-8B-DFlash-b16": "Qwen/Qwen3-8B",
    "z-lab/Qwen3-Coder-30B-A3B-DFlash": "Qwen/Qwen3-Coder-30B-A3B-Instruct",
    "z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat": "meta-llama/Llama-3.1-8B-Instruct",
    "z-lab/gpt-oss-20b-DFlash": "openai/gpt-oss-20b",
    # Others
    "nebius/EAGLE3-gpt-oss-120b": "openai/gpt-oss-120b",
    "AngelSlim/Qwen3-1.7B_eagle3": "Qwen/Qwen3-1.7B",
    "AngelSlim/Qwen3-4B_eagle3": "Qwen/Qwen3-4B",
    "AngelSlim/Qwen3-8B_eagle3": "Qwen/Qwen3-8B",
    "AngelSlim/Qwen3-14B_eagle3": "Qwen/Qwen3-14B",
    "AngelSlim/Qwen3-32B_eagle3": "Qwen/Qwen3-32B",
    "AngelSlim/Qwen3-a3B_eagle3": "Qwen/Qwen3-30B-A3B",
    "Tengyunw/qwen3_8b_eagle3": "Qwen/Qwen3-8B",
    "Tengyunw/qwen3_30b_moe_eagle3": "Qwen/Qwen3-30B-A3B",
    "JinnP/SGLang-EAGLE3-Qwen3-Coder-30B": "Qwen/Qwen3-Coder-30B-A3B-Instruct",
    "thoughtworks/GLM-4.7-Flash-Eagle3": "zai-org/GLM-4.7-Flash",
    "thoughtworks/Qwen3-32B-Eagle3": "Qwen/Qwen3-32B",
    "Ex0bit/Qwen3.6-27B-PRISM-EAGLE3": "Qwen/Qwen3.6-27B",
}
# The Hub does not tell upper from lower case when it looks a repository up.
_BY_LOWER_NAME = {head.lower(): target for head, target in _TARGETS.items()}


def known_target(head: str | None) -> str | None:
    """Return the target repository of a public head, or None where the head is not in the table."""
    return None if head is None else _BY_LOWER_NAME.get(head.lower())
