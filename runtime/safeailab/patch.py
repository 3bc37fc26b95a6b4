"""Patch a loaded `EaModel` of SafeAILab's EAGLE: its drafter alone, or its whole generation step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eagle_slim.vocab_tools.counts import TokenCounts
from eagle_slim.vocab_tools.tokenizer import LoadedTokenizer
from eagle_slim.vocab_tools.vocabulary import DraftVocab

from ..drafter.drafter import check_drafter, choose_drafter
from ..drafter.launch import BACKENDS, DraftFunction
from ..errors import UsageError
from ..settings import explain_unknown
from .drafting import LayerPatch
from .reading import check_ea_model, is_ea_model, read_head, tree_of
from .rebind import is_rebound, restore
from .step import StepPatch, step_of
from .vocabulary import choose_ids


@explain_unknown({})
def patch_ea_model_with_triton_drafter(
    model: Any,
    draft_vocab: int | DraftVocab | str | Path | None = None,
    *,
    counts: TokenCounts | str | Path | None = None,
    token_map: DraftVocab | str | Path | None = None,
    tokenizer: LoadedTokenizer | str | Path | None = None,
    use_triton: bool = True,
    drafter: str | DraftFunction = "triton",
    draft_weights: str = "auto",
) -> Any:
    """Draft an `EaModel`'s trees with the persistent kernel; everything else stays upstream's.

        patch_ea_model_with_triton_drafter(model, draft_vocab=16000, token_map="freq_32768.pt")
        output_ids = model.eagenerate(input_ids, max_new_tokens=256)
        unpatch_ea_model(model)

    ``model.ea_layer.topK_genrate`` answers as upstream's; of equal scores the lower candidate wins. Weights are taken
    from the model's own tensors, now: what is loaded into the model later does not count until it is patched again.
    ``reset_kv`` and ``stable_kv`` keep their meaning, and ``depth``, ``top_k`` and ``total_tokens`` may be changed.

    Args:
        model: a loaded EaModel, with an EAGLE-3 head (cnets.Model) or an EAGLE-1/2 one (cnets1.Model), on one device.
        draft_vocab: number of the best ids by ``counts`` or ``token_map``, a `DraftVocab`, or a path; None takes all.
        counts: `TokenCounts`, or their file; ids that the target's tokenizer needs come first.
        token_map: ids best first (FR-Spec's ``freq_N.pt``, JSON, ``d2t``, a converted head: `import_token_map`).
        tokenizer: with counts, the target's, or its folder on this machine; None is the one of the model's own folder.
        use_triton: False is ``drafter="reference"``.
        drafter: "triton", "reference" for the same in plain PyTorch, on any device, or a `DraftFunction` of your own.
        draft_weights: "fp8" stores the drafter's matrices in FP8 (sm_89 and later); "auto" in the model's type.

    Returns the model. Raises `UsageError` for no EaModel, one that is patched already, a vocabulary that does not fit
    (`choose_ids`), or ``use_triton=False`` beside a drafter of your own; `UnsupportedModelError` for a model on several
    devices or a head outside what can be drafted with; `DrafterError` for "triton" without an NVIDIA GPU and without
    ``TRITON_INTERPRET=1``, and "fp8" where it cannot run.
    """
    if not use_triton:
        if drafter not in BACKENDS:
            raise UsageError("use_triton=False is drafter='reference', and another drafter was given: leave one out.")
        drafter = "reference"
    vocabulary = {"draft_vocab": draft_vocab, "counts": counts, "token_map": token_map, "tokenizer": tokenizer}
    EaModelPatch(model, drafter, draft_weights, None, **vocabulary).apply()
    return model


@explain_unknown({})
def patch_eagle_model(
    model: Any,
    draft_vocab: int | DraftVocab | str | Path | None = None,
    *,
    counts: TokenCounts | str | Path | None = None,
    token_map: DraftVocab | str | Path | None = None,
    tokenizer: LoadedTokenizer | str | Path | None = None,
    drafter: str | DraftFunction = "triton",
    draft_weights: str = "auto",
    target_backend: str = "auto",
) -> Any:
    """Draft an `EaModel`'s trees with the persistent kernel, and replace what follows a draft by kernels too.

        patch_eagle_model(model)
        for output_ids in model.ea_generate(input_ids):
            ...
        unpatch_eagle_model(model)

    Beyond `patch_ea_model_with_triton_drafter`: the base model's forward over a tree, in upstream's own KV cache, the
    choice of tokens, the acceptance, and the copying of the accepted path. Greedy text is the same up to rounding;
    sampled text has the same distribution, from other random numbers (`torch.manual_seed`). Plain generation and a
    prompt's forward are as they were.

    ``target_backend``: "fused" verifies trees with our forward over the base model's weights (Llama, Qwen2, Qwen3),
    "upstream" with the base model's own; "auto" takes the fused one on a GPU where it can run. Raises
    `UnsupportedModelError`, with the reason, for "fused" where it cannot. Other arguments, result and errors are those
    of `patch_ea_model_with_triton_drafter`.
    """
    vocabulary = {"draft_vocab": draft_vocab, "counts": counts, "token_map": token_map, "tokenizer": tokenizer}
    EaModelPatch(model, drafter, draft_weights, target_backend, **vocabulary).apply()
    return model


def unpatch_ea_model(model: Any) -> Any:
    """Undo `patch_ea_model_with_triton_drafter` or `patch_eagle_model` and return the model.

    The object is exactly what it was (matrices that the fused forward packed side by side stay so, as views), and so is
    an ``ea_layer`` that was replaced since. A model that is not patched is returned as it is. Raises `UsageError` for
    anything but an EaModel.
    """
    if not is_ea_model(model):
        check_ea_model(model)
    layers = {model.ea_layer}
    if step := step_of(model):
        layers.add(step.layer_patch.layer)
        restore(model)
    for layer in filter(is_rebound, layers):
        restore(layer)
    return model


unpatch_eagle_model = unpatch_ea_model


class EaModelPatch:
    """A patch that is put on and taken off at no cost; ``target_backend`` None patches the drafter alone."""

    def __init__(
        self,
        model: Any,
        drafter: str | DraftFunction = "triton",
        draft_weights: str = "auto",
        target_backend: str | None = "auto",
        **vocabulary: Any,
    ) -> None:
        check_ea_model(model)
        if is_rebound(model) or is_rebound(model.ea_layer):
            raise UsageError("This EaModel is patched already: unpatch_ea_model(model) comes first.")
        check_drafter(drafter, model.ea_layer.embed_tokens.weight.device, BACKENDS)
        head = read_head(model, choose_ids(model, **vocabulary))
        built = choose_drafter(drafter, head, tree_of(model.ea_layer), draft_weights)
        self.layer = LayerPatch(model.ea_layer, model.base_model.lm_head, built)
        self.step = None if target_backend is None else StepPatch(model, self.layer, target_backend)

    def apply(self) -> None:
        """Put the patch on; see `LayerPatch.apply`."""
        self.layer.apply()
        if self.step is not None:
            self.step.apply()

    def remove(self) -> None:
        """Take the patch off."""
        if self.step is not None:
            restore(self.step.model)
        self.layer.remove()
