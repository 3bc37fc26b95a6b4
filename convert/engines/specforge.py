"""SpecForge, which trains heads."""

from . import rules

_TRAIN_THERE = "train the head where it was trained before"
_UNKNOWN = "not known, so it trains another layer; train the head with speculators"

ENGINE = rules.Engine(
    "SpecForge",
    ("specforge",),
    ("0.2.0", "0.2.0"),
    "loaded, its mapping check run",
    eagle3=(
        "error if another class: architecture {head.architecture} is not registered; convert without --for lmdeploy",
        "error if attention biases: the biases of the attention are not loaded; " + _TRAIN_THERE,
        "error if MLP biases: the biases of the MLP are not loaded; " + _TRAIN_THERE,
        rules.HEAD_NORMS + "raise ValueError, as it has no class for such a layer; train the head with speculators",
        rules.EMBEDDING_UNREAD + _TRAIN_THERE,
        rules.PARTIAL_ROTATION + "is not read, so it rotates other values; " + _TRAIN_THERE,
        "error if norm before residual: norm_before_residual is " + _UNKNOWN,
        "warning if window: the layer's sliding window of {head.sliding_window} tokens is " + _UNKNOWN,
    ),
    dflash=(
        "warning if given: a DFlash draft is trained with the target's whole LM head, so rows and map are lost; "
        "train the draft first, then convert it",
    ),
    eagle=("error if given: it trains EAGLE-3 heads only; train the head with SafeAILab's code",),
    serves=False,
)
