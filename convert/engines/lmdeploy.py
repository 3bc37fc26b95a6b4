"""LMDeploy, its PyTorch engine."""

from . import rules

ENGINE = rules.Engine(
    "LMDeploy",
    ("lmdeploy",),
    ("0.18.0", "0.18.0"),
    "its loader run on CPU",
    eagle3=(
        "error if not Llama's class: architecture {head.architecture} raises RuntimeError; convert with --for lmdeploy",
        *rules.THREE_DEFAULT_TAPS,
        "error if norms before fc: the norms before fc raise KeyError; " + rules.BY_VLLM_OR_SGLANG,
        rules.HEAD_NORMS + "are not known: their class raises RuntimeError, Llama's KeyError; " + rules.BY_VLLM_OR_OURS,
        "error if attention biases: the biases of the attention raise KeyError; serve it with vLLM",
        "error if MLP biases: the biases of the MLP raise KeyError; " + rules.BY_VLLM_OR_OURS,
        rules.ACTIVATION_UNREAD,
        rules.WINDOW_UNKNOWN + rules.BY_VLLM_OR_OURS,
        rules.RESIDUAL_OF_THE_NORM,
        rules.NORMED_OUTPUT,
        "error if full: without a d2t all drafts become token 0, and a full vocabulary is written without one; "
        "convert with --draft-vocab smaller than {head.target_vocab}",
    ),
    dflash=(
        "error if given: d2t raises KeyError in its loader of DFlash drafts, which chooses from the target's whole LM "
        "head; serve it with vLLM",
    ),
    eagle=(
        "error if given: an EAGLE-1/2 head with fc.bias raises KeyError, and a reduced vocabulary is not known; "
        + rules.BY_TOKEN_MAP,
    ),
)
