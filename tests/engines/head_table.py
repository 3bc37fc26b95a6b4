"""Which engine takes which kind of head: the table of docs/engines.md.

Only the kinds of heads are stated here; what an engine makes of each comes from its rules in `convert/engines.py`.
"""

from __future__ import annotations

from dataclasses import replace

from eagle_slim.convert.engines import ENGINES, HeadFacts, flavoured_architecture, head_findings
from eagle_slim.convert.heads import names

_CONFIG = {"architectures": ["LlamaForCausalLMEagle3"], "hidden_size": 512, "num_attention_heads": 8, "head_dim": 64}
EAGLE3 = HeadFacts("eagle3", _CONFIG, frozenset({names.FC}), 640, 2048, num_taps=3, target_layers=8)
"""An ordinary EAGLE-3 head with a reduced vocabulary."""
EAGLE1 = HeadFacts(
    "eagle", _CONFIG | {"architectures": ["LlamaForCausalLM"]}, frozenset({names.FC, names.FC_BIAS}), 320, 2048, 0
)
"""An ordinary EAGLE-1/2 head with a token map."""
DFLASH = HeadFacts("dflash", {}, frozenset({names.LM_HEAD}), 640, 2048, 0)
"""A DFlash draft with LM-head rows of its own."""


def with_config(facts: HeadFacts, **changes: object) -> HeadFacts:
    """The same head with other keys in config.json."""
    return replace(facts, config={**facts.config, **changes})


_WINDOW = {"layer_types": ["sliding_attention"], "sliding_window": 2048}
_TAPS = {"eagle_aux_hidden_state_layer_ids": [1, 3, 6]}
_BIASED = frozenset({names.FC, names.ATTENTION_BIASES["eagle3"][0]})
_MLP_BIASED = frozenset({names.FC, names.MLP_BIASES["eagle3"][0]})
QWEN3 = with_config(
    replace(EAGLE3, tensor_names=frozenset({names.FC, *names.HEAD_NORMS["eagle3"]})),
    architectures=["Eagle3Qwen3ForCausalLM"], model_type="qwen3",
)  # fmt: skip
HEADS: dict[str, HeadFacts] = {
    "EAGLE-3 with a reduced vocabulary": EAGLE3,
    "… with its full vocabulary (`--draft-vocab full`)": replace(EAGLE3, draft_vocab=2048),
    "EAGLE-1/2 with a token map": EAGLE1,
    "… with a non-zero `fc.bias`": replace(EAGLE1, nonzero_fc_bias=True),
    "… with a sliding window": with_config(EAGLE1, **_WINDOW),
    "`fc` over more or fewer than 3 target layers, unconverted": replace(EAGLE3, num_taps=4),
    "only the target's last hidden state": with_config(
        replace(EAGLE3, num_taps=1), eagle_config={"use_aux_hidden_state": False}
    ),
    "tap layers other than (2, n/2, n-3), converted with `--tap-layers`": with_config(
        EAGLE3, **_TAPS, eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 2, 5]}
    ),
    "… named at top level only": with_config(EAGLE3, **_TAPS),
    "… named in `eagle_config` only": with_config(EAGLE3, eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 2, 5]}),
    "`rope_scaling` other than null, `linear`, `dynamic`": with_config(EAGLE3, rope_scaling={"rope_type": "llama3"}),
    "… `yarn`": with_config(EAGLE3, rope_scaling={"rope_type": "yarn", "factor": 4.0}),
    "`partial_rotary_factor` below 1": with_config(EAGLE3, partial_rotary_factor=0.5),
    "`head_dim` × heads ≠ hidden size (Qwen3 style)": with_config(EAGLE3, head_dim=128),
    "norms before `fc`": replace(EAGLE3, tensor_names=frozenset({names.FC, "input_norm.weight"})),
    "a norm for each captured layer (`fc_norm`)": replace(
        EAGLE3, tensor_names=frozenset({names.FC, *(f"fc_norm.{layer}.weight" for layer in range(3))})
    ),
    "`norm_before_residual` (default of speculators' format)": with_config(EAGLE3, norm_before_residual=True),
    "`norm_output`": with_config(EAGLE3, norm_output=True),
    "biases in the attention": replace(EAGLE3, tensor_names=_BIASED),
    "biases in the MLP": replace(EAGLE3, tensor_names=_MLP_BIASED),
    "norms of q and k (Qwen3's layer)": QWEN3,
    "… with biases of its output projection or MLP": replace(QWEN3, tensor_names=QWEN3.tensor_names | _MLP_BIASED),
    "… in an EAGLE-1/2 head": replace(EAGLE1, tensor_names=EAGLE1.tensor_names | frozenset(names.HEAD_NORMS["eagle"])),
    "an embedding that was trained (`embed_requires_grad`)": with_config(
        replace(EAGLE3, tensor_names=frozenset({names.FC, names.EMBEDDING})), embed_requires_grad=True
    ),
    "`hidden_act` other than `silu`": with_config(EAGLE3, hidden_act="gelu"),
    "`hidden_act: swish` (the same function: write `silu`)": with_config(EAGLE3, hidden_act="swish"),
    "a sliding window in its own layer": with_config(EAGLE3, **_WINDOW),
    "DFlash with a reduced vocabulary": DFLASH,
    "DSpark with a reduced vocabulary": replace(DFLASH, tensor_names=frozenset({names.LM_HEAD, names.MARKOV_OUT})),
}


def severity(facts: HeadFacts, engine: str) -> str | None:
    """The worst that an engine makes of a head itself, versions apart: "error", "warning" or None."""
    found = {finding.severity for finding in head_findings(facts, engine)}
    return next((worst for worst in ("error", "warning") if worst in found), None)


def written_for(facts: HeadFacts, engine: str) -> HeadFacts:
    """The head as `--for` writes it, where `engine` reads a class name of its own."""
    name = flavoured_architecture(facts.kind, engine, str(facts.architecture))
    return with_config(facts, architectures=[name])


def head_table() -> str:
    """The table in Markdown: ✓ takes it, (✓) with a loss or a condition, – refuses it or drafts wrongly."""
    marks = {None: "✓", "warning": "(✓)", "error": "–"}
    rows = [["head", *(engine.title for engine in ENGINES.values())], ["---"] * (len(ENGINES) + 1)]
    rows += [
        [words, *(marks[severity(written_for(facts, engine), engine)] for engine in ENGINES)]
        for words, facts in HEADS.items()
    ]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)
