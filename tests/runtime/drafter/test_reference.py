"""The reference drafter against the definition (`support.naive_drafter`), which has no cache."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from eagle_slim.convert.heads.open import open_head
from eagle_slim.runtime import TreeConfig, UnsupportedModelError, prefill_drafter
from eagle_slim.runtime.drafter.drafter import BufferedDrafter, Drafter, check_computable
from eagle_slim.runtime.drafter.rope import apply_rotary, rotary_embedding, rotated_first
from eagle_slim.runtime.drafter.weights import HeadWeights, choose_draft_ids, load_head_weights
from eagle_slim.runtime.opening.pairing import resolve_tap_layers
from eagle_slim.runtime.target.wrapper import TargetModel
from support.naive_drafter import Naive
from support.raising import raises
from support.sweeps import sweep
from support.tiny_models import HIDDEN, LAYERS, LLAMA3_ROPE, VOCAB, YARN_ROPE, tiny_target, write_head
from torch import Tensor

TREE = TreeConfig(depth=3, top_k=3, total_tokens=16)


def head_weights(folder: Path, target_seed: int = 0) -> HeadWeights:
    head = open_head(folder)
    target = TargetModel(tiny_target("llama", target_seed), resolve_tap_layers(head, LAYERS))
    return load_head_weights(head, target, choose_draft_ids(head, None, None))


def feed(drafter: BufferedDrafter, steps: list[tuple[Tensor, list[int]]], slot: int) -> tuple[list[int], list[int]]:
    """Prefill with the first step, then draft after each further one; tokens and parents of the last tree."""
    features, tokens = steps[0]
    prefill_drafter(drafter.cfg, features, torch.tensor(tokens), drafter.weights, drafter.bufs, slot)
    past = len(tokens)
    for features, tokens in steps[1:]:
        drafter.features.fill_(float("nan"))
        drafter.features[slot] = 0
        drafter.features[slot, : len(tokens)] = features
        drafter.bufs.set_step([slot], [tokens], [past])
        drafter.draft()
        past += len(tokens)
    return drafter.bufs.draft_tokens[slot].tolist(), drafter.bufs.parents[slot].tolist()


def head_norms(layer: str) -> dict[str, Tensor]:
    return {f"{layer}self_attn.{name}_norm.weight": torch.linspace(0.5, end, 8) for name, end in (("q", 6), ("k", 3))}


def biases(sizes: dict[str, int]) -> dict[str, Tensor]:
    return {f"midlayer.{name}_proj.bias": torch.linspace(-0.5, 0.5, size) for name, size in sizes.items()}


TAP_NORMS = {f"fc_norm.{i}.weight": torch.linspace(0.5 + i, 1.5, HIDDEN) for i in range(3)}
TWO_TAPS = {"taps": 2, "eagle_aux_hidden_state_layer_ids": [1, 4]}
WIDE = {"fc.weight": torch.randn(48, 3 * HIDDEN, generator=torch.Generator().manual_seed(2)) / 8}
WIDE["embed_tokens.weight"] = torch.randn(VOCAB, 48, generator=torch.Generator().manual_seed(3))
HEADS: dict[str, dict[str, Any]] = {
    "eagle3": {},
    "map": {"draft_ids": [5, 2, 19, 7, 8, 22, 11]},
    "bias": {"attention_bias": True},
    "output-bias": {"attention_bias": True, "extra": biases({"self_attn.o": HIDDEN})},
    "gelu": {"hidden_act": "gelu"},
    "gelu-tanh": {"hidden_act": "gelu_new"},
    "norm-output": {"norm_output": True},
    "norm-before-residual": {"norm_before_residual": True},
    "input-norm": {"norm_before_fc": True, "extra": {"input_norm.weight": torch.linspace(0.5, 1.5, 3 * HIDDEN)}},
    "fc-norm": {"fc_norm": True, "extra": TAP_NORMS},
    "two-fc-norms": {"fc_norm": True, "norm_output": True, "extra": dict(list(TAP_NORMS.items())[:2]), **TWO_TAPS},
    "last-state": {"taps": 1, "eagle_config": {"use_aux_hidden_state": False}},
    "own-width": {"hidden": 48, "target_hidden_size": HIDDEN, "norm_before_fc": True, "draft_ids": [5, 2, 19, 7, 8]}
    | {"extra": {**WIDE, "input_norm.weight": torch.linspace(0.5, 1.5, 3 * HIDDEN)}},
    "one-tap": {"taps": 1, "eagle_aux_hidden_state_layer_ids": [3]},
    "window": {"layer_types": ["sliding_attention"], "sliding_window": 3},
    "window-and-sinks": {"layer_types": ["sliding_attention"], "sliding_window": 3, "sinks": 2},
    "window-of-one": {"layer_types": ["sliding_attention"], "sliding_window": 1},
    "mlp-bias": {"mlp_bias": True, "extra": biases({"mlp.gate": 48, "mlp.up": 48, "mlp.down": HIDDEN})},
    "head-norms": {"extra": head_norms("midlayer.")},
    "eagle-1": {"kind": "eagle"},
    "eagle-1-head-norms": {"kind": "eagle", "extra": head_norms("layers.0.")},
    "eagle-1-window": {"kind": "eagle", "layer_types": ["sliding_attention"], "sliding_window": 6},
}


@pytest.mark.parametrize("head", sweep(HEADS, "eagle3", "map", "window", "eagle-1"))
def test_trees_equal_those_of_the_definition(tmp_path: Path, head: str) -> None:
    sinks, options = HEADS[head].get("sinks", 0), {key: value for key, value in HEADS[head].items() if key != "sinks"}
    weights = replace(head_weights(write_head(tmp_path, **options)), window_sinks=sinks)
    generator = torch.Generator().manual_seed(4)
    counts = [4, 1, 3, 2]
    features = torch.randn(sum(counts), weights.feature_width, generator=generator)
    tokens = torch.randint(VOCAB, (sum(counts),), generator=generator).tolist()
    drafter = Drafter(weights, TREE).on_slots(2, 30)
    naive = Naive(weights)
    ends = [sum(counts[: i + 1]) for i in range(len(counts))]
    for upto in range(2, len(counts) + 1):
        cuts = list(zip([0, *ends[: upto - 1]], ends[:upto], strict=True))
        steps = [(features[a:b], tokens[a:b]) for a, b in cuts]
        expected = naive.draft(features[: ends[upto - 1]], tokens[: ends[upto - 1]], TREE)
        assert feed(drafter, steps, slot=1) == expected
        assert drafter.bufs.draft_tokens[0].eq(-1).all()


@pytest.mark.parametrize("kind", ["eagle3", "eagle"])
def test_a_heads_own_embedding_is_drafted_with_unless_it_is_a_copy(tmp_path: Path, kind: str) -> None:
    model = tiny_target("llama")
    theirs = model.get_input_embeddings().weight.detach()
    for own, expected in ((theirs, theirs), (theirs + 1, theirs + 1)):
        head = open_head(write_head(tmp_path, kind, extra={"embed_tokens.weight": own}))
        target = TargetModel(model, resolve_tap_layers(head, LAYERS))
        found = load_head_weights(head, target, choose_draft_ids(head, None, None)).embedding
        assert torch.equal(found, expected)
        assert (found.data_ptr() == theirs.data_ptr()) == (own is theirs)


def test_an_activation_that_only_the_reference_computes(tmp_path: Path) -> None:
    weights = head_weights(write_head(tmp_path, hidden_act="relu"))
    Drafter(weights, TREE).on_slots(1, 30)
    check_computable(open_head(tmp_path))
    with raises(UnsupportedModelError, option="activation"):
        check_computable(open_head(tmp_path), "triton")
    with raises(UnsupportedModelError, option="activation"):
        Drafter(weights, TREE, "triton")


def theirs(length: int, scaling: dict[str, Any], theta: float, **config: Any) -> tuple[Tensor, Tensor]:
    """Transformers' cosines and sines of a text of this length: two of [length, head_dim]."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    own = LlamaConfig(**config, rope_parameters={**scaling, "rope_theta": theta})
    cos, sin = LlamaRotaryEmbedding(own)(torch.zeros(1), torch.arange(length)[None])
    return cos[0], sin[0]


@pytest.mark.parametrize(
    "scaling",
    [None, {"rope_type": "linear", "factor": 4.0}, {"type": "linear", "factor": 4.0}, LLAMA3_ROPE, YARN_ROPE],
    ids=["none", "linear", "linear-legacy", "llama3", "yarn"],
)
def test_rotary_tables_are_transformers_own(scaling: dict[str, Any] | None) -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    # Qwen and Gemma choose head_dim freely; so may a draft head, whose heads do not divide this hidden size.
    free = {**sizes, "hidden_size": 80, "num_attention_heads": 6}
    ours = rotary_embedding({**free, "rope_theta": 5e5, "rope_scaling": scaling, "max_position_embeddings": 256})
    kind = {"rope_type": "default" if scaling is None else "linear", **(scaling or {})}
    tables = ours.tables(200)
    assert all(map(torch.equal, tables, theirs(200, kind, 5e5, **sizes, max_position_embeddings=256)))
    if scaling is not None:
        plain = rotary_embedding({**sizes, "rope_theta": 5e5, "rope_scaling": None, "max_position_embeddings": 256})
        assert not torch.allclose(tables[0], plain.tables(200)[0])


LONGROPE: dict[str, Any] = {"short_factor": [1.0, 1.5], "long_factor": [2.0, 5.0]}
LONGROPE |= {"rope_type": "longrope", "original_max_position_embeddings": 64}


@pytest.mark.parametrize("scaling", [LONGROPE, {"rope_type": "dynamic", "factor": 2.0}], ids=["longrope", "dynamic"])
def test_scalings_by_length_are_transformers_own_at_that_length(scaling: dict[str, Any]) -> None:
    """A text that transformers takes in whole has the frequencies of its length from the first token on."""
    limit = scaling.get("original_max_position_embeddings", 128)
    sizes = {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4}
    config = {**sizes, "rope_theta": 1e4, "rope_scaling": scaling, "max_position_embeddings": 128}
    ours = rotary_embedding(config)
    tables = {}
    for length in (limit - 1, limit, limit + 1, 2 * limit):
        tables[length] = ours.for_length(length).tables(length)
        wanted = theirs(length, scaling, 1e4, **sizes, max_position_embeddings=128)
        assert all(map(torch.equal, tables[length], wanted))
    assert torch.equal(tables[limit - 1][0], tables[limit][0][:-1])
    assert not torch.equal(tables[limit][0], tables[2 * limit][0][:limit])
    assert torch.equal(ours.tables(limit)[0], tables[limit][0])


def test_other_names_and_places_of_a_scaling() -> None:
    """Text has plain positions under Qwen2-VL's; Phi-3 says "su" and keeps the length beside the scaling."""
    sizes = {"head_dim": 4, "rope_theta": 1e4, "max_position_embeddings": 128}
    for scaling in ({"type": "mrope", "mrope_section": [1, 1]}, {"rope_type": "default", "mrope_section": [1, 1]}):
        plain = rotary_embedding({**sizes, "rope_scaling": None})
        assert torch.equal(rotary_embedding({**sizes, "rope_scaling": scaling}).tables(9)[0], plain.tables(9)[0])
    length = {"original_max_position_embeddings": LONGROPE["original_max_position_embeddings"]}
    factors = {name: LONGROPE[name] for name in ("short_factor", "long_factor")}
    ours = rotary_embedding({**sizes, **length, "rope_scaling": {"type": "su", **factors}})
    expected = rotary_embedding({**sizes, "rope_scaling": LONGROPE})
    for tokens in (64, 65):
        assert torch.equal(ours.for_length(tokens).tables(9)[0], expected.for_length(tokens).tables(9)[0])


def test_a_part_of_each_head_is_rotated_as_transformers_does() -> None:
    """Scores of rotated queries and keys are those of GPT-NeoX's code, which rotates the first values alone."""
    from transformers.models.gpt_neox.modeling_gpt_neox import apply_rotary_pos_emb

    config = {"head_dim": 12, "rope_theta": 1e4, "partial_rotary_factor": 0.7}  # 8 of 12 values
    query, key = torch.randn(2, 3, 12, 5, generator=torch.Generator().manual_seed(3))  # 3 heads, 5 positions
    ours = rotary_embedding({**config, "rope_scaling": None})
    plain = rotary_embedding({**config, "head_dim": 8, "partial_rotary_factor": None, "rope_scaling": None})
    cos, sin = ours.tables(5)
    rotated = [
        apply_rotary(rotated_first(rows.flatten(0, 1), 12, 8).view(1, 3, 12, 5).transpose(2, 3), cos[None], sin[None])
        for rows in (query, key)
    ]
    expected = apply_rotary_pos_emb(query.mT[None], key.mT[None], *(table[None] for table in plain.tables(5)))
    scores, wanted = (found[0] @ found[1].mT for found in (rotated, expected))
    torch.testing.assert_close(scores, wanted, rtol=0, atol=1e-5)
