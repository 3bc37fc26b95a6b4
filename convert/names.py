"""Tensor names of EAGLE draft heads and DFlash drafts: every published spelling, and the one that is written.

Canonical names are SafeAILab's: `midlayer.` for the one decoder layer of an EAGLE-3 head, `layers.N.` for EAGLE-1/2, no
`model.` prefix. A DFlash draft keeps its own, which z-lab and speculators share and vLLM prefixes itself. Nothing is
guessed: a tensor that is neither renamed nor knowingly dropped makes the head unsupported.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from eagle_slim.vocab_tools.errors import page

from .errors import CheckpointError, UnsupportedHeadError

HeadKind = Literal["eagle3", "eagle", "dflash"]

LM_HEAD = "lm_head.weight"
EMBEDDING = "embed_tokens.weight"
FC = "fc.weight"
FC_BIAS = "fc.bias"
MAPS = ("d2t", "t2d")
MARKOV_IN = "markov_head.markov_w1.weight"
MARKOV_OUT = "markov_head.markov_w2.weight"
"""DSpark: [target_vocab, rank] of the token before; [draft_vocab, rank], whose rows go with the LM head's."""

MATRICES = (*(f"self_attn.{name}_proj" for name in "qkvo"), *(f"mlp.{name}_proj" for name in ("gate", "up", "down")))
_LAYERS: Mapping[HeadKind, str] = {"eagle3": "midlayer.", "eagle": "layers.0."}
ATTENTION_BIASES: Mapping[HeadKind, tuple[str, ...]] = {
    kind: tuple(f"{layer}{name}.bias" for name in MATRICES[:4]) for kind, layer in _LAYERS.items()
}
"""Biases of the (first) layer's q, k, v and output projections."""
MLP_BIASES: Mapping[HeadKind, tuple[str, ...]] = {
    kind: tuple(f"{layer}{name}.bias" for name in MATRICES[4:]) for kind, layer in _LAYERS.items()
}
"""Biases of the (first) layer's gate, up and down projections."""
HEAD_NORMS: Mapping[HeadKind, tuple[str, ...]] = {
    kind: (f"{layer}self_attn.q_norm.weight", f"{layer}self_attn.k_norm.weight") for kind, layer in _LAYERS.items()
}
"""RMSNorms over each head of q and of k in the (first) layer, as Qwen3's attention has them: [head_dim] each."""

_IN_LAYER = (
    r"(self_attn\.[qkvo]|mlp\.(gate|up|down))_proj\.(weight|bias)"
    r"|(self_attn\.[qk]_norm|(input|post_attention)_layernorm)\.weight"
)
_KNOWN: Mapping[HeadKind, re.Pattern[str]] = {
    "eagle3": re.compile(
        rf"midlayer\.({_IN_LAYER}|hidden_norm\.weight)|fc\.bias|d2t|t2d"
        r"|(fc|norm|lm_head|embed_tokens|input_norm|fc_norm\.\d+)\.weight"
    ),
    "eagle": re.compile(rf"layers\.\d{{1,3}}\.({_IN_LAYER})|fc\.bias|(fc|embed_tokens)\.weight"),
    "dflash": re.compile(
        rf"layers\.\d{{1,3}}\.({_IN_LAYER}|self_attn\.attention_sink_bias)|confidence_head\.proj\.bias|d2t|t2d"
        r"|(fc|hidden_norm|norm|lm_head|embed_tokens|markov_head\.markov_w[12]|confidence_head\.proj)\.weight"
    ),
}
_CALLED = {"eagle3": "an EAGLE-3 head", "eagle": "an EAGLE-1/2 head", "dflash": "a DFlash draft"}

# What only DFlash has outside its layers: the norm of the captured hidden states, which EAGLE-3 has inside its layer.
_DFLASH_NORM = "hidden_norm.weight"

# SGLang's older names of the norms over the captured layers, lowest first, and spellings of the one layer.
_EAGLE3_PREFIXES = {"aux_norm_low.": "fc_norm.0.", "aux_norm_mid.": "fc_norm.1.", "aux_norm_high.": "fc_norm.2."}
_EAGLE3_PREFIXES |= {"layers.0.": "midlayer.", "midlayer.0.": "midlayer."}

_DROPPED = (
    (re.compile(r"verifier_.*"), "training-time copy of a tensor of the target"),
    (re.compile(r"(.*\.)?rotary_emb\.(inv_freq|cos_cached|sin_cached)"), "recomputed from the configuration"),
)

_NOT_IN_EAGLE1 = {
    LM_HEAD: "every engine uses the target's LM head",
    "layers.0.input_layernorm.weight": "no engine normalises the input of the first layer",
}

OTHER_DRAFTS = {
    "medusa": ("a Medusa head", 'in vLLM ("method": "medusa")'),
    "mlpspeculator": (
        "an MLP speculator, which none of vLLM 0.32.0, SGLang 0.5.23 and llama.cpp b11434 serves",
        "in an engine that knows its class",
    ),
    "peagle": (
        "a P-EAGLE head, which drafts in parallel",
        'in vLLM ("method": "eagle3", "parallel_drafting": true), or slim the EAGLE-3 head of the same target',
    ),
    "dflash": ("a DFlash draft of another form than DFlashDraftModel", "in an engine that knows its class"),
    "dspark": ("a DSpark draft of another form than Qwen3DSparkModel", "in an engine that knows its class"),
    # What each engine reads: docs/serving.md, MTP.
    "mtp": (
        "a multi-token-prediction (MTP) layer",
        'with its target and all rows in vLLM 0.32.0 ("method": "mtp") or llama.cpp b11434 (--spec-type draft-mtp), '
        "or, where the LM head is not tied, with fewer rows in SGLang 0.5.23 (--speculative-algorithm NEXTN "
        "--speculative-token-map LIST.pt, by eagle-vocab export --for sglang)",
    ),
    "model": (
        "a whole language model",
        'as a draft model in vLLM ("method": "draft_model") or llama.cpp (--spec-type draft-simple), or slim an EAGLE '
        "head of the target",
    ),
}
"""Drafts that are no EAGLE heads, by a word of their class or type: their name, and where to serve them as they are."""

# Marks of heads that resemble EAGLE and are not converted, with the name to refuse them by.
_FOREIGN = (
    (re.compile(r".*\.(kv_a_proj_with_mqa|kv_b_proj|q_a_proj|q_b_proj|kv_a_layernorm)\b.*"), "an MLA attention head"),
    (
        re.compile(
            r".*\.(weight_(scale|scale_inv|scale_2|global_scale|zero_point|packed|shape|g_idx)|qweight|qzeros|scales|g_idx"
            r"|input_(scale|global_scale|zero_point)|[kv]_scale|SCB|weight\.(absmax|quant_map|nested_.*|quant_state.*))"
        ),
        "a quantised head",
    ),
    (re.compile(r"(.*\.)?mlp\.(experts|router|gate\.weight|shared_expert).*"), "a mixture-of-experts head"),
    (re.compile(r"(.*\.)?sinks"), "an attention with sinks"),
    (re.compile(r"parallel_draft_heads\..*"), "a head that drafts several tokens in parallel (ModelOpt)"),
)
# EAGLE-1/2 may have several layers, one of EAGLE-3 is written without a number.
_SECOND_LAYER = (re.compile(r"(midlayer|layers)\.[1-9]\d*\..*"), "an EAGLE-3 head of several layers")
_OTHER_MARKS = {
    "medusa": re.compile(r"(medusa_head|medusa_heads)\..*|\d+\.\d+\.linear\.weight"),
    "mlpspeculator": re.compile(r"speculator\.(emb|proj|head|ln)\.\d+\..*"),
    "peagle": re.compile(r"mask_hidden"),
    # DeepSeek-V3's and GLM's names, and Qwen3.5's.
    "mtp": re.compile(r"(.*\.)?(eh_proj|enorm|hnorm)\.weight|mtp\..*"),
}


@dataclass(frozen=True)
class NameTable:
    """Canonical names of a checkpoint's tensors: `stored` has the name in it by canonical name, `dropped` reasons."""

    kind: HeadKind
    stored: dict[str, str]
    dropped: dict[str, str]


def canonical_names(names: Iterable[str], where: str, *, is_dflash: bool = False) -> NameTable:
    """Find the kind of a head by its tensor names, and give each its canonical name.

    `midlayer.`, `layers.0.`, `midlayer.0.`, `model.layers.0.` and the like become `midlayer.` for EAGLE-3.
    `is_dflash`: config.json says a DFlash draft, whatever the tensors are. Raises UnsupportedHeadError for another kind
    of head, or a tensor that has no place in one of these kinds; CheckpointError where two stored names mean the same
    tensor, or a needed tensor is missing.
    """
    ordered = sorted(names)
    bare = {name: name.removeprefix("module.").removeprefix("model.") for name in ordered}
    shorts = set(bare.values())
    for draft, pattern in _OTHER_MARKS.items():
        if any(map(pattern.fullmatch, shorts)):
            raise other_draft(draft, where)
    if FC not in shorts and {EMBEDDING, "layers.0.self_attn.q_proj.weight", "norm.weight"} <= shorts:
        raise other_draft("model", where)
    # An incomplete head may lack any of these.
    is_eagle3 = any(re.fullmatch(r"(?s).*\.hidden_norm\.weight|midlayer\..*|d2t|t2d", name) for name in shorts)
    kind: HeadKind = "eagle3" if is_eagle3 else "eagle"
    if is_dflash or _DFLASH_NORM in ordered:
        kind, bare = "dflash", {name: name for name in ordered}
    for name, short in bare.items():
        for pattern, meaning in (*_FOREIGN, *([_SECOND_LAYER] if kind == "eagle3" else [])):
            if pattern.fullmatch(short):
                wanted = "an unquantised EAGLE-3, EAGLE-1 or EAGLE-2 head with a Llama or Qwen3 decoder layer"
                problem = f"tensor {name} marks {meaning}, which is not converted.\nExpected {wanted}."
                raise UnsupportedHeadError.at(where, problem)
    if kind == "eagle" and FC not in bare.values():
        problem = "neither an EAGLE-3 head (no hidden_norm) nor an EAGLE-1/2 head (no fc.weight)"
        raise UnsupportedHeadError.at(where, f"{problem}.\nFound {_some(ordered) or 'no tensors'}.")

    stored, dropped = dict[str, str](), dict[str, str]()
    for name, short in bare.items():
        reason = next((why for pattern, why in _DROPPED if pattern.fullmatch(short)), None)
        if reason is None and kind == "eagle" and short in _NOT_IN_EAGLE1:
            reason = f"{_NOT_IN_EAGLE1[short]} with EAGLE-1/2, and vLLM refuses a file that has one"
        if reason is not None:
            dropped[name] = reason
            continue
        prefix = next((old for old in _EAGLE3_PREFIXES if kind == "eagle3" and short.startswith(old)), "")
        canonical = _EAGLE3_PREFIXES.get(prefix, "") + short.removeprefix(prefix)
        if _KNOWN[kind].fullmatch(canonical) is None:
            advice = (
                f"Nothing is guessed: if it is one of the tensors in {page('convert/FORMAT.md')}, rename it in a copy."
            )
            raise UnsupportedHeadError.at(where, f"tensor {name} has no place in {_CALLED[kind]}.\n{advice}")
        if canonical in stored:
            problem = f"tensors {stored[canonical]} and {name} both mean {canonical}.\nKeep one of them."
            raise CheckpointError.at(where, problem)
        stored[canonical] = name

    if missing := [name for name in _required(kind, stored) if name not in stored]:
        advice = "Fetch the checkpoint again."
        if all(name.endswith("norm.weight") for name in missing):
            advice += " A head that was trained without these norms is not converted."
        raise CheckpointError.at(where, f"{_some(missing)} missing, which {_CALLED[kind]} needs.\n{advice}")
    return NameTable(kind, stored, dropped)


def num_layers(names: Iterable[str]) -> int:
    """Count the decoder layers that the tensors of an EAGLE-1/2 head or a DFlash draft name."""
    return 1 + max((int(name.split(".")[1]) for name in names if name.startswith("layers.")), default=0)


def other_draft(draft: str, where: str) -> UnsupportedHeadError:
    """Make the error about a draft that is no EAGLE head, a key of `OTHER_DRAFTS`, in one line."""
    name, advice = OTHER_DRAFTS[draft]
    return UnsupportedHeadError.at(where, f"this is {name}; it is not slimmed: serve it as it is, {advice}.")


def _required(kind: HeadKind, stored: Collection[str]) -> list[str]:
    inside = [*(f"{name}.weight" for name in MATRICES), "input_layernorm.weight", "post_attention_layernorm.weight"]
    if kind == "eagle3":
        return [*(f"midlayer.{name}" for name in (*inside, "hidden_norm.weight")), "norm.weight"]
    inside += [] if kind == "eagle" else ["self_attn.q_norm.weight", "self_attn.k_norm.weight"]
    layers = [f"layers.{layer}.{name}" for layer in range(num_layers(stored)) for name in inside]
    if kind == "eagle":
        # The first layer is trained without this norm.
        return [FC, *(name for name in layers if name != "layers.0.input_layernorm.weight")]
    markov = [MARKOV_IN, MARKOV_OUT] if {MARKOV_IN, MARKOV_OUT} & set(stored) else []
    return [FC, _DFLASH_NORM, "norm.weight", *layers, *markov]


def _some(names: list[str]) -> str:
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")
