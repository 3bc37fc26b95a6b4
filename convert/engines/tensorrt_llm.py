"""TensorRT-LLM, its PyTorch backend."""

from . import rules

ENGINE = rules.Engine(
    "TensorRT-LLM",
    ("tensorrt_llm",),
    None,
    "its source read",
    eagle3=(
        "warning if another class: architecture {head.architecture} is known to the one-model path only; "
        "convert without --for lmdeploy",
        rules.ACTIVATION_UNREAD,
        rules.HEAD_NORMS + "are not loaded, so it drafts wrongly; " + rules.BY_VLLM_OR_OURS,
        rules.EMBEDDING_UNREAD + rules.BY_VLLM_OR_OURS,
        rules.WINDOW_UNKNOWN + rules.BY_VLLM_OR_OURS,
        rules.RESIDUAL_OF_THE_NORM,
        "warning if other taps: tap layers are taken from the speculative config, not from the head; set "
        "eagle3_layers_to_capture to [{head.outputs_text}] (outputs of layers)",
    ),
    dflash=("warning if given: what it makes of a DFlash draft was not read; serve it with vLLM",),
    eagle=(
        "error if given: its PyTorch backend has no EAGLE-1/2 head with a reduced vocabulary; " + rules.BY_TOKEN_MAP,
    ),
)
