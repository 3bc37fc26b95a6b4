"""SGLang."""

from . import rules

_BOTH = (
    *rules.ACTIVATION_REFUSED,
    "error if MLP biases: the biases of the MLP are dropped, so it drafts wrongly; " + rules.BY_VLLM_OR_OURS,
)

ENGINE = rules.Engine(
    "SGLang",
    ("sglang",),
    ("0.5.16", "0.5.23"),
    "the first drafted on an H200, the last's loader run on CPU",
    eagle3=(
        *_BOTH,
        rules.HEAD_NORMS
        + "raise ValueError, as it has no class for such a layer (Llama's drops them without a word); "
        + rules.BY_VLLM_OR_OURS,
        "error if another class: architecture {head.architecture} is not one of its draft classes; "
        "convert without --for lmdeploy",
        "error if attention biases: the biases of q, k and v are dropped, so it drafts wrongly; serve it with vLLM",
        rules.EMBEDDING_UNREAD + rules.BY_VLLM_OR_OURS,
        # It counts the tokens before the current one.
        rules.WINDOW_UNKNOWN + "serve it with --speculative-draft-window-size {head.tokens_before}",
        rules.RESIDUAL_OF_THE_NORM,
        rules.NUMBER_OF_TAPS,
        rules.PADDING,
    ),
    eagle=(
        *_BOTH,
        rules.HEAD_NORMS + "are dropped, so it drafts wrongly; generate with eagle-generate",
        "error if class not in Eagle: architecture {head.architecture} is loaded as a plain decoder, not as a draft "
        "head; convert with --for sglang",
        "error if no fc.bias: fc.bias is missing and would stay random; convert the head, which adds a bias of zeros",
        "warning if slim: the token map is applied to one rank's shard of the LM head, so with tensor parallelism it "
        "is wrong; serve it with --tp 1",
        rules.WINDOW_UNKNOWN + "generate with eagle-generate",
    ),
    dflash=(
        "error if Markov head: the Markov head is built with all rows, and fewer do not load; serve it with vLLM",
        "warning if given: a DFlash draft chooses from the target's whole LM head: the gathered rows and the map are "
        "not read; serve the reduced vocabulary with vLLM",
    ),
    known=(
        "warning if top-level taps: tap layers at top level are not read, so the default layers are captured and fewer "
        "drafts are accepted; convert with --tap-layers {head.taps_text}, which writes both keys",
    ),
)
