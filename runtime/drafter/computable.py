"""What of a head no drafter can compute, told from its files alone, before a target is loaded for it."""

from __future__ import annotations

from typing import Any

from eagle_slim.convert.head.open import DraftHead
from transformers.activations import ACT2FN

from ..errors import UnsupportedModelError
from .dimensions import check_kernel_activation
from .rope import rotary_embedding


def check_computable(head: DraftHead, drafter: Any = "auto") -> None:
    """Raise `UnsupportedModelError` for a head that the reference cannot draft with, or, if asked for, the kernel.

    ``drafter`` as `SpeculativeModel.from_pretrained` takes it.
    """
    second_layer = [name for name in head.tensors.names if name.startswith("layers.1.")]
    if second_layer:
        raise UnsupportedModelError(
            f"{head.location}: a head of several decoder layers ({second_layer[0]}) cannot run here. Serve it with "
            "vLLM or SGLang.",
            tensor=second_layer[0],
        )
    if "input_norm.weight" in head.tensors and "fc_norm.0.weight" in head.tensors:
        raise UnsupportedModelError(
            f"{head.location}: it has both input_norm and fc_norm, and engines differ in which they apply first. Take "
            "out the tensors and the flag of the one that it was trained without.",
            tensor="input_norm.weight",
        )
    activation = str(head.config["hidden_act"])
    if activation not in ACT2FN:
        raise UnsupportedModelError(
            f"{head.location}: hidden_act = {activation!r} is none of transformers' activations. Correct hidden_act in "
            "the head's config.json.",
            option="activation", found=activation, expected=sorted(ACT2FN),
        )  # fmt: skip
    if drafter == "triton":
        check_kernel_activation(activation)
    rotary_embedding(head.config)
