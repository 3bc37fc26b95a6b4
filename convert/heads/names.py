"""Tensor names of EAGLE draft heads and DFlash drafts: every published spelling, and the one that is written.

Canonical names are SafeAILab's: `midlayer.` for the one decoder layer of an EAGLE-3 head, `layers.N.` for EAGLE-1/2, no
`model.` prefix. A DFlash draft keeps its own, which z-lab and speculators share and vLLM prefixes itself. Nothing is
guessed: a tensor that is neither renamed nor knowingly dropped makes the head unsupported.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from ..errors import CheckpointError, UnsupportedHeadError

HeadKind = Literal["eagle3", "eagle", "dflash"]

LM_HEAD = "lm_head.weight"
EMBEDDING = "embed_tokens.weight"
FC = "fc.weight"
FC_BIAS = "fc.bias"
MAPS = ("d2t", "t2d")
MARKOV_IN = "markov_head.markov_w1.weight"
MARKOV_OUT = "markov_head.markov_w2.weight"
CONFIDENCE = "confidence_head.proj.weight"
"""DSpark: [target_vocab, rank] of the token before, [draft_vocab, rank], whose rows go with the LM head's; [1, n]."""

_ATTENTION = tuple(f"self_attn.{projection}_proj.weight" for projection in "qkvo")
_MLP = ("mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight")
EAGLE3_LAYER = (
    *(f"midlayer.{name}" for name in (*_ATTENTION, *_MLP)),
    "midlayer.input_layernorm.weight",
    "midlayer.hidden_norm.weight",
    "midlayer.post_attention_layernorm.weight",
)
EAGLE3_REQUIRED = (*EAGLE3_LAYER, "norm.weight")
_EAGLE_REQUIRED = (FC, *(f"layers.0.{name}" for name in (*_ATTENTION, *_MLP, "post_attention_layernorm.weight")))
_LAYERS: Mapping[HeadKind, str] = {"eagle3": "midlayer.", "eagle": "layers.0."}
ATTENTION_BIASES: Mapping[HeadKind, tuple[str, ...]] = {
    kind: tuple(f"{layer}self_attn.{projection}_proj.bias" for projection in "qkvo") for kind, layer in _LAYERS.items()
}
"""Biases of the (first) layer's q, k, v and output projections."""
MLP_BIASES: Mapping[HeadKind, tuple[str, ...]] = {
    kind: tuple(f"{layer}{name.removesuffix('weight')}bias" for name in _MLP) for kind, layer in _LAYERS.items()
}
"""Biases of the (first) layer's gate, up and down projections."""
HEAD_NORMS: Mapping[HeadKind, tuple[str, ...]] = {
    kind: (f"{layer}self_attn.q_norm.weight", f"{layer}self_attn.k_norm.weight") for kind, layer in _LAYERS.items()
}
"""RMSNorms over each head of q and of k in the (first) layer, as Qwen3's attention has them: [head_dim] each."""
_EAGLE3_OPTIONAL = (
    FC, FC_BIAS, LM_HEAD, EMBEDDING, "input_norm.weight", *ATTENTION_BIASES["eagle3"], *MLP_BIASES["eagle3"],
    *HEAD_NORMS["eagle3"], *MAPS,
)  # fmt: skip
_FC_NORM = re.compile(r"fc_norm\.\d+\.weight")
_ANY_LAYER = (
    r"layers\.\d+\.((self_attn\.[qkvo]|mlp\.(gate|up|down))_proj\.(weight|bias)"
    r"|(self_attn\.[qk]_norm|(input|post_attention)_layernorm)\.weight)"
)
_EAGLE_LAYER = re.compile(_ANY_LAYER)

# What only DFlash has outside its layers: the norm of the captured hidden states, which EAGLE-3 has inside its layer.
_DFLASH_NORM = "hidden_norm.weight"
_DFLASH_LAYER = (
    *_ATTENTION, *_MLP, "self_attn.q_norm.weight", "self_attn.k_norm.weight", "input_layernorm.weight",
    "post_attention_layernorm.weight",
)  # fmt: skip
_DFLASH = re.compile(
    r"(fc|hidden_norm|norm|lm_head|embed_tokens|markov_head\.markov_w[12]|confidence_head\.proj)\.weight|d2t|t2d"
    rf"|confidence_head\.proj\.bias|layers\.\d+\.self_attn\.attention_sink_bias|{_ANY_LAYER}"
)

# SGLang's older names of the norms over the captured layers, lowest first.
_LEGACY_FC_NORMS = {"aux_norm_low": "fc_norm.0", "aux_norm_mid": "fc_norm.1", "aux_norm_high": "fc_norm.2"}

_DROPPED = (
    (re.compile(r"verifier_.*"), "training-time copy of a tensor of the target"),
    (re.compile(r"(.*\.)?rotary_emb\.(inv_freq|cos_cached|sin_cached)"), "recomputed from the configuration"),
)

_WHOLE = "it is not slimmed: serve it as it is, "
_NOWHERE = "it is not slimmed, and none of vLLM 0.32.0, SGLang 0.5.23 and llama.cpp b11434 serves"
OTHER_DRAFTS = {
    "medusa": ("a Medusa head", _WHOLE + 'in vLLM ("method": "medusa")'),
    "mlp_speculator": ("an MLP speculator", _NOWHERE + " one"),
    "mlpspeculator": ("an MLP speculator", _NOWHERE + " one"),
    "peagle": (
        "a P-EAGLE head, which drafts in parallel",
        _WHOLE + 'in vLLM ("method": "eagle3", "parallel_drafting": true), or slim the EAGLE-3 head of the same target',
    ),
    "dflash": ("a DFlash draft model of another form than DFlashDraftModel", _WHOLE + "in vLLM or SGLang"),
    "dspark": ("a DSpark draft model of another form than Qwen3DSparkModel", _WHOLE + "in vLLM or SGLang"),
    # SGLang's `init_lm_head` cuts the target's LM head (`speculative/eagle_worker_v2.py`), but `models/qwen3_5_mtp.py`
    # ignores what it is given where that is the embedding. None of vLLM's `*mtp*.py` reads `draft_vocab_size` or `d2t`.
    # llama.cpp expects a `nextn.shared_head_head` for the whole vocabulary in all of `src/models/`, and reads `d2t` in
    # `eagle3.cpp` and `dflash.cpp` alone.
    "mtp": (
        "a multi-token-prediction (MTP) layer",
        _WHOLE
        + 'with its target and all rows in vLLM 0.32.0 ("method": "mtp") or llama.cpp b11434 (--spec-type draft-mtp), '
        "or, where the LM head is not tied, with fewer rows in SGLang 0.5.23 (--speculative-algorithm NEXTN "
        "--speculative-token-map freq_N.pt, by eagle-vocab export)",
    ),
    "model": (
        "a whole language model",
        _WHOLE
        + 'as a draft model in vLLM ("method": "draft_model") or llama.cpp (--spec-type draft-simple), or slim an '
        "EAGLE head of the target",
    ),
}
"""Drafts that are no EAGLE heads, by a word of their class or type: what each is, and what to do with it."""

_VLLM, _SGLANG, _LLAMA_CPP = "vLLM 0.32.0", "SGLang 0.5.23", "llama.cpp b11434"
_SERVED: Mapping[str, tuple[str, ...]] = {
    "peagle": (_VLLM,),
    "dflash2": (_VLLM,),
    "MedusaModel": (_VLLM,),
    "PEagleDraftModel": (_VLLM,),
    "PeagleLlamaForCausalLM": (_VLLM,),
    "PeagleQwen3ForCausalLM": (_VLLM,),
    "DFlash2DraftModel": (_VLLM, _SGLANG, _LLAMA_CPP),
    "DFlash2BeamDraftModel": (_SGLANG,),
    "MiniMaxDFlash2DraftModel": (_SGLANG,),
    "DFlashLagunaForCausalLM": (_VLLM, _SGLANG),
    "MuseGlimmerAssistantModel": (_VLLM, _SGLANG),
    "DFlashMuseGlimmerAssistantModel": (_VLLM,),
    "LiLiCorrDraftModel": (_VLLM, _SGLANG),
    "DSparkDraftModel": (_VLLM, _SGLANG, _LLAMA_CPP),
    "DSparkV41DraftModel": (_VLLM,),
    "Qwen3OmniDSparkModel": (_VLLM,),
    "K3DSparkModel": (_VLLM,),
    "Gemma4DSparkModel": (_VLLM,),
    "LingDSparkModel": (_SGLANG, _LLAMA_CPP),
    "Lfm2DSparkDraftModel": (_SGLANG, _LLAMA_CPP),
    "DSparkMiniMaxDraftModel": (_SGLANG,),
}
"""Engines that know such a draft by its class or, in speculators' form, its type.

Sources: vLLM's registry and `configs/speculators/algos.py`, SGLang's `EntryClass`, llama.cpp's `conversion`.
"""

# Marks of heads that resemble EAGLE and are something else, with the name to refuse them by.
_FOREIGN = (
    (re.compile(r".*\.(kv_a_proj_with_mqa|kv_b_proj|q_a_proj|q_b_proj|kv_a_layernorm)\b.*"), "an MLA attention head"),
    (
        re.compile(
            r".*\.(weight_(scale|scale_inv|scale_2|global_scale|zero_point|packed|shape|g_idx)|qweight|qzeros|scales|g_idx"
            r"|input_(scale|global_scale|zero_point)|[kv]_scale|SCB|weight\.(absmax|quant_map|nested_.*|quant_state.*))"
        ),
        "a quantised head",
    ),
    (re.compile(r"(.*\.)?mlp\.(experts|gate\.weight|shared_expert).*"), "a mixture-of-experts head"),
)
_OTHER_MARKS = {
    "medusa": re.compile(r"(medusa_head|medusa_heads)\..*|\d+\.\d+\.linear\.weight"),
    "mlp_speculator": re.compile(r"speculator\.(emb|proj|head|ln)\.\d+\..*"),
    "peagle": re.compile(r"mask_hidden"),
    # DeepSeek-V3's and GLM's names, and Qwen3.5's.
    "mtp": re.compile(r"(.*\.)?(eh_proj|enorm|hnorm)\.weight|mtp\..*"),
}
_SECOND_LAYER = re.compile(r"(midlayer|layers)\.[1-9]\d*\..*")


@dataclass(frozen=True)
class NameTable:
    """Canonical names of the tensors of one checkpoint.

    Attributes:
        kind: "eagle3", "eagle" for EAGLE-1 and EAGLE-2, or "dflash" for DFlash and DSpark.
        stored: canonical name to the name in the checkpoint.
        dropped: stored name to the reason why it is left out.
    """

    kind: HeadKind
    stored: dict[str, str]
    dropped: dict[str, str]


def canonical_names(names: Iterable[str], where: str) -> NameTable:
    """Work out the kind of a head from its tensor names and give each its canonical name.

    `midlayer.`, `layers.0.`, `midlayer.0.`, `model.layers.0.` and the like become `midlayer.` for EAGLE-3.

    Raises:
        UnsupportedHeadError: another kind of head, or a tensor that has no place in one of these kinds.
        CheckpointError: two stored names mean the same tensor, or a needed tensor is missing.
    """
    ordered = sorted(names)
    if is_dflash(ordered):
        return dflash_names(ordered, where)
    bare = {name: name.removeprefix("module.").removeprefix("model.") for name in ordered}
    refuse_others(ordered, where)
    # What an incomplete head lacks may be any of these.
    is_eagle3 = any(
        name.endswith(".hidden_norm.weight") or name.startswith("midlayer.") or name in MAPS for name in bare.values()
    )
    kind: HeadKind = "eagle3" if is_eagle3 else "eagle"
    # EAGLE-1/2 may have several layers, one of EAGLE-3 is written without a number.
    several = ((_SECOND_LAYER, "an EAGLE-3 head of several layers"),) if kind == "eagle3" else ()
    for name, short in bare.items():
        for pattern, meaning in (*_FOREIGN, *several):
            if pattern.fullmatch(short):
                raise UnsupportedHeadError.at(
                    where,
                    f"tensor {name} marks {meaning}, which is not converted.\n"
                    "Expected an unquantised EAGLE-3, EAGLE-1 or EAGLE-2 head with a Llama or Qwen3 decoder layer.",
                )
    if kind == "eagle" and FC not in bare.values():
        raise UnsupportedHeadError.at(
            where,
            f"neither an EAGLE-3 head (no hidden_norm) nor an EAGLE-1/2 head (no fc.weight).\nFound {_some(ordered)}.",
        )

    stored: dict[str, str] = {}
    dropped: dict[str, str] = {}
    for name, short in bare.items():
        reason = next((why for pattern, why in _DROPPED if pattern.fullmatch(short)), None)
        if reason is None and kind == "eagle" and short == LM_HEAD:
            reason = "every engine uses the target's LM head with EAGLE-1/2, and vLLM refuses a file that has one"
        if reason is not None:
            dropped[name] = reason
            continue
        canonical = _rename(short, kind)
        if not _known(canonical, kind):
            raise UnsupportedHeadError.at(
                where,
                f"tensor {name} has no place in an {'EAGLE-3' if kind == 'eagle3' else 'EAGLE-1/2'} head.\n"
                "A head of another kind is refused rather than guessed at.",
            )
        if canonical in stored:
            raise CheckpointError.at(
                where, f"tensors {stored[canonical]} and {name} both mean {canonical}.\nKeep one of them."
            )
        stored[canonical] = name

    required = EAGLE3_REQUIRED if kind == "eagle3" else _EAGLE_REQUIRED
    missing = [name for name in required if name not in stored]
    if missing:
        advice = "Fetch the checkpoint again."
        if all(name.endswith("norm.weight") for name in missing):
            advice += " A head that was trained without these norms is not converted."
        raise CheckpointError.at(
            where,
            f"incomplete {'EAGLE-3' if kind == 'eagle3' else 'EAGLE-1/2'} head: {_some(missing)} missing.\n{advice}",
        )
    return NameTable(kind, stored, dropped)


def refuse_others(names: Iterable[str], where: str) -> None:
    """Raise UnsupportedHeadError where these are the tensors of a draft that is no EAGLE head, or of a whole model."""
    bare = {name.removeprefix("module.").removeprefix("model.") for name in names}
    for draft, pattern in _OTHER_MARKS.items():
        if any(map(pattern.fullmatch, bare)):
            raise other_draft(draft, where)
    if FC not in bare and {EMBEDDING, "layers.0.self_attn.q_proj.weight", "norm.weight"} <= bare:
        raise other_draft("model", where)


def is_dflash(names: Iterable[str]) -> bool:
    """Whether these are the tensors of a DFlash draft."""
    return _DFLASH_NORM in names


def dflash_layers(names: Iterable[str]) -> int:
    """Number of decoder layers that a DFlash draft's tensors name."""
    return 1 + max((int(name.split(".")[1]) for name in names if name.startswith("layers.")), default=0)


def other_draft(draft: str, where: str, architecture: str | None = None) -> UnsupportedHeadError:
    """The error about a draft that is no EAGLE head, a key of `OTHER_DRAFTS`, in one line.

    Of a class that config.json names, only engines that know it are named.
    """
    found, advice = OTHER_DRAFTS[draft]
    if architecture is not None and draft not in ("mtp", "model"):
        engines = _SERVED.get(architecture)
        advice = f"{_NOWHERE} its class, {architecture}" if engines is None else _WHOLE + "in " + " or ".join(engines)
        if engines is not None and draft in ("medusa", "peagle"):
            advice = OTHER_DRAFTS[draft][1]
    return UnsupportedHeadError.at(where, f"this is {found}; {advice}.")


def is_fc_norm(name: str) -> bool:
    """Whether a canonical name is one of the norms over the captured layers, `fc_norm.N.weight`."""
    return _FC_NORM.fullmatch(name) is not None


def dflash_names(names: Iterable[str], where: str) -> NameTable:
    """The names of a DFlash draft, which are kept; raises as `canonical_names`."""
    ordered = sorted(names)
    dropped = {name: why for name in ordered for pattern, why in _DROPPED if pattern.fullmatch(name)}
    stored = {name: name for name in ordered if name not in dropped}
    if (unknown := next((name for name in stored if _DFLASH.fullmatch(name) is None), None)) is not None:
        raise UnsupportedHeadError.at(
            where,
            f"tensor {unknown} has no place in a DFlash draft.\nExpected the unquantised tensors of z-lab's or "
            "speculators' DFlash, or DSpark's with a plain Markov head.",
        )
    required = [FC, _DFLASH_NORM, "norm.weight"]
    required += [f"layers.{layer}.{name}" for layer in range(dflash_layers(stored)) for name in _DFLASH_LAYER]
    required += [MARKOV_IN, MARKOV_OUT] if {MARKOV_IN, MARKOV_OUT} & set(stored) else []
    if missing := [name for name in required if name not in stored]:
        raise CheckpointError.at(
            where, f"incomplete DFlash draft: {_some(missing)} missing.\nFetch the checkpoint again."
        )
    return NameTable("dflash", stored, dropped)


def _rename(short: str, kind: HeadKind) -> str:
    if kind == "eagle":
        return short
    for old, new in _LEGACY_FC_NORMS.items():
        if short.startswith(f"{old}."):
            return new + short.removeprefix(old)
    for prefix in ("layers.0.", "midlayer.0."):
        if short.startswith(prefix):
            return "midlayer." + short.removeprefix(prefix)
    return short


def _known(canonical: str, kind: HeadKind) -> bool:
    if kind == "eagle3":
        return canonical in EAGLE3_REQUIRED or canonical in _EAGLE3_OPTIONAL or is_fc_norm(canonical)
    return canonical in (FC, FC_BIAS, EMBEDDING) or _EAGLE_LAYER.fullmatch(canonical) is not None


def _some(names: list[str]) -> str:
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
