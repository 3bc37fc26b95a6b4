"""One call from a transformers model and its head to an answer, for machines with a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..errors import GPUAssertionError, UsageError
from ..model import SpeculativeModel
from ..requests.output import GenerationOutput
from ..requests.prompts import Prompts
from ..settings import TreeConfig
from .joined import Backend, join
from .reading import is_ea_model

if TYPE_CHECKING:
    from eagle_slim.convert.artifact.artifact import Artifact
    from eagle_slim.convert.head.open import DraftHead

_OLDEST = (8, 0)


def fused_draft_token_generation(
    model: nn.Module | SpeculativeModel | str | Path | None,
    input_ids: Prompts,
    temperature: float = 0.0,
    max_new_tokens: int = 256,
    *,
    head: str | Path | DraftHead | Artifact | None = None,
    draft_vocab: Any = None,
    tree: TreeConfig | None = None,
    drafter: str = "triton",
    draft_weights: str = "auto",
    **options: Any,
) -> GenerationOutput:
    """Generate with a transformers model and its draft head, the whole step on the GPU: one call.

        output = fused_draft_token_generation(model, input_ids, max_new_tokens=128, head="out/slim")
        print(output.results[0].token_ids)

    The first call with a loaded model and a head takes the head's tensors, packs them, and keeps them for as long as
    the model lives; later calls with the same arguments only generate, unless the model was moved to another device or
    type.

    Args:
        model: a loaded transformers causal LM; a `SpeculativeModel`, whose head and tree are its own; or what
            `SpeculativeModel.from_pretrained` loads (a Hub id, a folder, None for the built-in one), at every call.
        input_ids: prompts, as `SpeculativeModel.generate` takes them.
        temperature: 0 is greedy.
        max_new_tokens: most new tokens of an answer.
        head, draft_vocab: of `SpeculativeModel.from_pretrained`.
        tree: size of the draft tree; None is that of `from_pretrained`.
        drafter: "triton", or "reference" to run without a GPU.
        draft_weights: "fp8" stores the drafter's matrices in FP8 (sm_89 and later); "auto" in the model's type. A
            `SpeculativeModel` has its own: give it to `from_pretrained`.
        options: of `SpeculativeModel.generate` (top_p, top_k, seed, eos_token_id, tokenizer, ...).

    Returns:
        The `GenerationOutput`; the text is the target's own.

    Raises:
        GPUAssertionError: "triton" without an NVIDIA GPU of sm_80 or later that torch can use, or with a model that
            lies elsewhere.
        UsageError: an EaModel, a head, vocabulary, tree or ``draft_weights`` beside a `SpeculativeModel`, and as
            `from_pretrained` and `generate`.
    """
    if is_ea_model(model):
        raise UsageError(
            "fused_draft_token_generation takes a transformers model; this is an EaModel. Call "
            "frontier_generate(model, input_ids, backend=\"triton\"), or patch_eagle_model(model) and its eagenerate.",
            option="model", found=type(model).__name__,
        )  # fmt: skip
    if drafter == "triton":
        assert_gpu(_device_of(model))
    if draft_weights != "auto" and isinstance(model, SpeculativeModel):
        raise UsageError(
            f"draft_weights = {draft_weights!r}, and a SpeculativeModel has its drafter's already: leave it out "
            "here, and give draft_weights to from_pretrained.",
            option="draft_weights", found=draft_weights, expected="auto",
        )  # fmt: skip
    whole = join(model, Backend(drafter, draft_weights), head, draft_vocab, tree)
    return whole.generate(input_ids, temperature=temperature, max_new_tokens=max_new_tokens, **options)


def assert_gpu(device: torch.device | None) -> None:
    """Raise `GPUAssertionError` unless the persistent drafter can run on a device; None is the first GPU."""
    expected = "an NVIDIA GPU of sm_80 (Ampere) or later"
    advice = 'Move the model to one, or pass drafter="reference" to run in plain PyTorch, slowly.'
    if device is not None and device.type != "cuda":
        found = f"a model on {device}" + ("" if torch.cuda.is_available() else ", and no GPU that torch can use")
    elif not torch.cuda.is_available():
        found = "none that torch can use" + (
            " (this build of torch is without CUDA)" if torch.version.cuda is None else " (see nvidia-smi)"
        )
    elif (capability := torch.cuda.get_device_capability(device)) < _OLDEST:
        found = f"{torch.cuda.get_device_name(device)}, sm_{capability[0]}{capability[1]}"
    else:
        return
    raise GPUAssertionError(
        f"Fused generation needs a GPU: expected {expected}, found {found}. {advice}", expected=expected, found=found
    )


def _device_of(model: Any) -> torch.device | None:
    if isinstance(model, SpeculativeModel):
        return model.device
    return next(model.parameters()).device if isinstance(model, nn.Module) else None
