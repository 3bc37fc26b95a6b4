"""What a rule about an engine is, and the rules that several engines share.

A rule is one line: `severity if condition: what happens; what to do instead`. The severity is "error" where the engine
refuses the head or drafts wrongly with it, "warning" where it works with a loss or a condition, "note" where nothing is
wrong but it was not tried. The condition is one of `CONDITIONS`; the rest may hold facts of the head, as
`{head.num_taps}`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, cast

from ..head import config as head_config
from ..head import names
from ..head.config import QWEN3_ARCHITECTURE
from .facts import VOCAB_PADDING, HeadFacts

Severity = Literal["error", "warning", "note"]

# SafeAILab's and FR-Spec's trees take this many candidates per node.
_TREE_TOP_K = 10
# Kinds of RoPE scaling that our GGUF files can state to llama.cpp.
GGUF_ROPE = ("linear", "llama3")
_RULE = re.compile(r"(error|warning|note) if ([^:]+): (.+); (.+)")


@dataclass(frozen=True)
class Engine:
    """An engine and the versions it was tried with.

    Attributes:
        title: its name.
        distributions: names under which pip may know it.
        proven: first and last version tried; releases between them count as proven.
        proof: what was run.
        eagle3, eagle, dflash: the rules for a head, in the order in which they are said, by its kind.
        known: rules that `open_head` warns of too, in its own words.
        serves: whether it serves heads; the others train or repackage them.
    """

    title: str
    distributions: tuple[str, ...]
    proven: tuple[str, str] | None
    proof: str
    eagle3: tuple[str, ...]
    eagle: tuple[str, ...]
    dflash: tuple[str, ...] = ("error if given: a DFlash draft is not known; serve it with vLLM",)
    known: tuple[str, ...] = ()
    serves: bool = True


def apply_rule(rule: str, head: HeadFacts) -> tuple[Severity, str, str] | None:
    """Severity, problem and alternative of a rule where it applies to a head, else None."""
    match = _RULE.fullmatch(rule)
    assert match is not None, rule
    severity, condition, problem, alternative = match.groups()
    if not CONDITIONS[condition](head):
        return None
    return cast(Severity, severity), problem.format(head=head), alternative.format(head=head)


def _has_unknown_rope(head: HeadFacts) -> bool:
    rope = head.config.get("rope_scaling")
    is_old = isinstance(rope, Mapping) and set(rope) == {"type", "factor"} and rope["type"] in ("linear", "dynamic")
    return isinstance(rope, Mapping) and not is_old


def _misses_the_hidden_size(head: HeadFacts) -> bool:
    heads, head_dim = head.config.get("num_attention_heads"), head.config.get("head_dim")
    return isinstance(heads, int) and isinstance(head_dim, int) and heads * head_dim != head.config.get("hidden_size")


def _has_unsaid_taps(head: HeadFacts) -> bool:
    is_other = head.num_taps not in (0, 3)
    return is_other and head.nested_taps is None and not head.config.get("num_aux_hidden_states")


def _has_any(tensors: Mapping[names.HeadKind, tuple[str, ...]], head: HeadFacts) -> bool:
    return any(name in head.tensor_names for name in tensors[head.kind])


def _own_config(head: HeadFacts) -> Mapping[str, object]:
    own = head.config.get("dflash_config")
    return own if isinstance(own, Mapping) else {}


def _has_windowed_layers(head: HeadFacts) -> bool:
    types = head.config.get("layer_types")
    return bool(_own_config(head).get("use_swa")) or (isinstance(types, list) and "sliding_attention" in types)


def _has_unwritten_arithmetic(head: HeadFacts) -> bool:
    """Of a DFlash draft: values or embeddings that are scaled, rotation of neighbouring pairs."""
    both = (_own_config(head), head.config)
    scaled = any(part.get(key) for part in both for key in ("attention_value_scale", "input_embedding_scale"))
    return scaled or any(head.config.get(key) is False for key in ("is_neox_style", "rope_is_neox_style"))


_BIASES_QWEN3_LACKS: Mapping[names.HeadKind, tuple[str, ...]] = {
    kind: (biases[-1], *names.MLP_BIASES[kind]) for kind, biases in names.ATTENTION_BIASES.items()
}
CONDITIONS: dict[str, Callable[[HeadFacts], object]] = {
    "given": lambda head: True,
    # A rule about the norms of q and k covers the class of the heads that have them.
    "another class": lambda head: head.architecture not in ("LlamaForCausalLMEagle3", QWEN3_ARCHITECTURE, None),
    "not Llama's class": lambda head: head.architecture not in ("LlamaForCausalLM", QWEN3_ARCHITECTURE, None),
    "class in Eagle": lambda head: (head.architecture or "").endswith("Eagle"),
    "class not in Eagle": lambda head: not (head.architecture or "Eagle").endswith("Eagle"),
    "z-lab's form": lambda head: "speculators_model_type" not in head.config,
    "Markov head": lambda head: names.MARKOV_OUT in head.tensor_names,
    "not silu": lambda head: head.activation not in ("silu", "swish"),
    # transformers has the same function under a second name.
    "swish": lambda head: head.activation == "swish",
    "slim": lambda head: head.is_slim,
    "full": lambda head: not head.is_slim,
    "few rows": lambda head: head.draft_vocab < _TREE_TOP_K,
    "odd rows": lambda head: head.is_slim and head.draft_vocab % VOCAB_PADDING,
    "window": lambda head: head.sliding_window is not None,
    "no fc.bias": lambda head: names.FC_BIAS not in head.tensor_names,
    "used fc.bias": lambda head: head.nonzero_fc_bias,
    "attention biases": lambda head: _has_any(names.ATTENTION_BIASES, head),
    "MLP biases": lambda head: _has_any(names.MLP_BIASES, head),
    "biases of layers": lambda head: any(map(re.compile(r"layers\..*_proj\.bias").fullmatch, head.tensor_names)),
    "attention sinks": lambda head: any(name.endswith("attention_sink_bias") for name in head.tensor_names),
    "windowed layers": _has_windowed_layers,
    "unwritten arithmetic": _has_unwritten_arithmetic,
    "another width": lambda head: head.config.get("target_hidden_size") not in (None, head.config.get("hidden_size")),
    "bare confidence": lambda head: (
        names.CONFIDENCE in head.tensor_names and not head.config.get("confidence_head_with_markov")
    ),
    "norms of q and k": lambda head: _has_any(names.HEAD_NORMS, head),
    "norms of q and k, biases": lambda head: _has_any(names.HEAD_NORMS, head) and _has_any(_BIASES_QWEN3_LACKS, head),
    "norms of q and k, window": lambda head: _has_any(names.HEAD_NORMS, head) and head.sliding_window is not None,
    "norms before fc": lambda head: any(
        name == "input_norm.weight" or names.is_fc_norm(name) for name in head.tensor_names
    ),
    "norms of taps": lambda head: any(map(names.is_fc_norm, head.tensor_names)),
    "no GGUF": lambda head: head.has_gguf is False,
    "trained embedding": lambda head: (
        names.EMBEDDING in head.tensor_names and head.flag(head_config.EMBEDDING_TRAINED_KEY)
    ),
    "norm before residual": lambda head: head.flag("norm_before_residual"),
    "normed output": lambda head: head.flag("norm_output"),
    "partial rotation": lambda head: head.config.get("partial_rotary_factor") not in (None, 1),
    "new RoPE": _has_unknown_rope,
    "RoPE beyond llama3": lambda head: head.rope_kind not in (None, *GGUF_ROPE),
    "other head_dim": _misses_the_hidden_size,
    "other number of taps": lambda head: head.num_taps not in (0, 3),
    "not three taps": lambda head: head.num_taps != 3,
    "unsaid taps": _has_unsaid_taps,
    # Without captured layers vLLM builds no fc and leaves the file's unread.
    "unsaid taps, used": lambda head: head_config.uses_aux_layers(head.config) and _has_unsaid_taps(head),
    "other taps": lambda head: head.has_other_taps,
    "three other taps": lambda head: head.has_other_taps and head.num_taps in (0, 3),
    "top-level taps": lambda head: head.nested_taps is None and head.has_other_taps,
    "nested taps": lambda head: head.top_level_taps is None and head.nested_taps is not None,
}

BY_VLLM_OR_SGLANG = "serve it with vLLM or SGLang"
BY_VLLM_OR_OURS = "serve it with vLLM or eagle-generate"
BY_TOKEN_MAP = "serve it with SGLang (--speculative-token-map)"
_OTHER_ACTIVATIONS = "draft with SafeAILab/EAGLE or eagle-generate"
_SILU_ONLY = "hidden_act {head.activation!r} raises ValueError (only 'silu' is known)"

ACTIVATION_REFUSED = (
    f"error if not silu: {_SILU_ONLY}; {_OTHER_ACTIVATIONS}",
    f'error if swish: {_SILU_ONLY}; write "silu" into config.json, which is the same function',
)
ACTIVATION_UNREAD = (
    "error if not silu: hidden_act {head.activation!r} is not read: silu is computed in its place, so it drafts "
    "wrongly; " + _OTHER_ACTIVATIONS
)
NO_TOKEN_MAP = (
    "warning if slim: an EAGLE-1/2 head always uses the target's full LM head, and freq_N.pt is not read; serve the "
    "reduced vocabulary with SGLang (--speculative-token-map) or with eagle-generate"
)
# What vLLM and SGLang look up in the same two places.
NUMBER_OF_TAPS = (
    "error if unsaid taps: fc takes {head.num_taps} captured layers, and without eagle_config or num_aux_hidden_states "
    'it builds 3; convert with --tap-layers, or add "num_aux_hidden_states": {head.num_taps} to config.json'
)
THREE_DEFAULT_TAPS = (
    "error if other number of taps: fc takes {head.num_taps} captured layers, it captures 3; " + BY_VLLM_OR_SGLANG,
    "warning if three other taps: it always captures layers (2, n // 2, n - 3), not {head.taps_text}, so fewer drafts "
    "are accepted; " + BY_VLLM_OR_SGLANG,
)
PADDING = (
    "note if odd rows: {head.draft_vocab} rows are padded to {head.padded_vocab}, which was not tried with tensor "
    "parallelism; take --draft-vocab {head.padded_vocab} for more than one GPU"
)
EMBEDDING_UNREAD = (
    "warning if trained embedding: the head's embedding was trained, and the target's is read in its place, so fewer "
    "drafts are accepted; "
)
WINDOW_UNKNOWN = (
    "warning if window: the layer's sliding window of {head.sliding_window} tokens is not known: after that many "
    "tokens it attends to more than it was trained with, so fewer drafts are accepted; "
)
RESIDUAL_OF_THE_NORM = (
    "error if norm before residual: norm_before_residual is not known: the residual is taken before the norm, so it "
    "drafts wrongly; " + BY_VLLM_OR_OURS
)
NORMED_OUTPUT = (
    "error if normed output: norm_output is not known: a draft reads the hidden state before the norm, so later drafts "
    "are wrong; " + BY_VLLM_OR_SGLANG
)
HEAD_NORMS = "error if norms of q and k: the norms of q and k "
PARTIAL_ROTATION = "error if partial rotation: partial_rotary_factor {head.config[partial_rotary_factor]} "
