"""SafeAILab's EAGLE."""

from . import rules

_ROPE = (
    "error if new RoPE: rope_scaling {head.rope_kind!r} raises ValueError (only null, 'linear' and 'dynamic' are "
    "known); " + rules.BY_VLLM_OR_SGLANG,
    rules.PARTIAL_ROTATION + "is not read, so it rotates other values; " + rules.BY_VLLM_OR_SGLANG,
)
_MLP = "error if MLP biases: the biases of the MLP are not loaded; " + rules.BY_VLLM_OR_OURS
_NORMS = rules.HEAD_NORMS + "are not loaded, so it drafts wrongly; "

ENGINE = rules.Engine(
    "SafeAILab/EAGLE",
    (),
    None,
    "its state-dict contract tested",
    eagle3=(
        *_ROPE,
        rules.WINDOW_UNKNOWN + rules.BY_VLLM_OR_OURS,
        _MLP,
        *rules.THREE_DEFAULT_TAPS,
        "error if other head_dim: head_dim is ignored, and {head.config[num_attention_heads]} heads of "
        "{head.config[head_dim]} do not make the hidden size {head.config[hidden_size]}; " + rules.BY_VLLM_OR_SGLANG,
        rules.EMBEDDING_UNREAD + rules.BY_VLLM_OR_OURS,
        _NORMS + rules.BY_VLLM_OR_OURS,
        "error if norms before fc: the norms before fc are not loaded; " + rules.BY_VLLM_OR_SGLANG,
        "error if attention biases: the biases of the attention are not loaded; serve it with vLLM",
        rules.RESIDUAL_OF_THE_NORM,
        rules.NORMED_OUTPUT,
        "error if few rows: {head.draft_vocab} rows are fewer than its top_k of 10; take a larger --draft-vocab",
    ),
    eagle=(
        *_ROPE,
        rules.WINDOW_UNKNOWN + "generate with eagle-generate",
        _MLP,
        _NORMS + "generate with eagle-generate",
        rules.NO_TOKEN_MAP,
    ),
)
