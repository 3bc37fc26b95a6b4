"""Which layers of the target a draft reads: every public key with its own counting, and refusals of what is not known.

All heads here are for a target of 8 layers, or of as many as a test says. Numbers are inputs of layers: (2, 4, 5) is
what leaves the layers 1, 3 and 4.
"""

import pytest
from eagle_slim.convert import MismatchError, open_head
from eagle_slim.convert.engines import HeadFacts, head_findings
from eagle_slim.runtime.opening.pairing import resolve_tap_layers
from support.conversion import BY_ID, convert
from support.heads import VOCAB, eagle3_tensors, write_eagle1, write_eagle3
from support.raising import raises

AUX = "eagle_aux_hidden_state_layer_ids"


def write(folder, count=3, **changes):
    return write_eagle3(folder, tensors=eagle3_tensors(rows=VOCAB, taps=count), **changes)


def test_each_key_with_its_own_counting(tmp_path):
    for changes, layers, expected in (
        ({}, 8, (2, 4, 5)),
        ({AUX: [1, 3, 6]}, 8, (1, 3, 6)),
        ({AUX: [2, 4, 8]}, 8, (2, 4, 8)),
        ({"aux_hidden_state_layer_ids": [1, 3, 6]}, 8, (1, 3, 6)),
        ({"eagle_config": {AUX: [1, 3, 6]}}, 8, (2, 4, 7)),
        ({"eagle_config": {AUX: [1, 3, 8]}}, 8, (1, 3, 8)),
        ({"eagle_config": {AUX: [1, 3, 8]}}, 9, (2, 4, 9)),
        ({"eagle_config": {AUX: [-1, 3, 6]}}, 8, (0, 4, 7)),
        ({"eagle_config": {"layer_ids": [1, 3, 6]}}, 8, (1, 3, 6)),
        ({"layer_ids": [1, 3, 8]}, 8, (1, 3, 8)),
        ({"target_layer_ids": [1, 3, 7]}, 8, (2, 4, 8)),
        ({"eagle_config": {"target_layer_ids": [0, 3, 6]}}, 8, (1, 4, 7)),
        ({AUX: [2, 4, 5], "eagle_config": {AUX: [1, 3, 4]}, "target_layer_ids": [1, 3, 4]}, 8, (2, 4, 5)),
        ({AUX: [2, 4, 8], "eagle_config": {AUX: [2, 4, 8]}}, 8, (2, 4, 8)),
        ({AUX: [], "eagle_config": {AUX: [], "layer_ids": []}}, 8, (2, 4, 5)),
        ({"layer_types": ["full_attention"], "mlp_only_layers": [3]}, 8, (2, 4, 5)),
        ({AUX: [1, 2, 4, 6, 8], "num_aux_hidden_states": 5}, 8, (1, 2, 4, 6, 8)),
        ({"target_layer_ids": [7]}, 8, (8,)),
    ):
        head = open_head(write(tmp_path / "head", len(expected), **changes))
        assert resolve_tap_layers(head, layers) == expected


def test_what_cannot_be_known_is_opened_only_with_layers_given(tmp_path):
    three = [{AUX: layers} for layers in ([2, 4], [5, 4, 2], [1, "3", 6])]
    three += [{"eagle3_layers_to_capture": [1, 3, 6]}, {"target_layer_ids": [-2, 1, 3]}]
    three += [{"eagle_config": {"aux_layers": [1, 3, 6]}}, {"eagle_config": {AUX: [1, 1, 3]}}]
    three += [{AUX: [1, 3, 6], "target_layer_ids": [1, 3, 6]}]
    for count, changes in ((5, {}), (5, {"num_aux_hidden_states": 5}), *((3, changes) for changes in three)):
        folder = write(tmp_path / "head", count, **changes)
        with pytest.raises(MismatchError) as caught:
            open_head(folder)
        assert "--tap-layers" in str(caught.value)
        given = (0, 1, 3, 6, 8)[-count:]
        head = open_head(folder, tap_layers=given)
        assert resolve_tap_layers(head, 8) == given
        assert {key for key in head.config if "layer" in key and isinstance(head.config[key], list)} == {AUX}
        assert head.config[AUX] == list(given)
        assert head.config["eagle_config"] == {AUX: [layer - 1 for layer in given]}


def test_two_equal_lists_are_told_apart_by_the_number_of_layers(tmp_path, target):
    """Both name inputs where the last id is no layer's output, else the one in eagle_config names outputs."""
    head = open_head(write(tmp_path / "head", **{AUX: [2, 4, 5], "eagle_config": {AUX: [2, 4, 5]}}))
    assert head.taps(5) == (2, 4, 5)
    for layers in (8, None):
        with raises(MismatchError, option="--tap-layers"):
            head.taps(layers)
    with raises(MismatchError, option="--tap-layers"):
        convert(tmp_path / "head", draft_vocab=8, target=target, out=tmp_path / "out", vocabulary=BY_ID)


def test_layers_that_the_target_has_not_and_given_ones_that_are_none(tmp_path):
    for changes, layers in (({AUX: [1, 3, 9]}, 8), ({"target_layer_ids": [1, 3, 8]}, 8), ({}, 2)):
        folder = write(tmp_path / "head", **changes)
        with raises(MismatchError, option="--tap-layers"):
            open_head(folder).taps(layers)
    with raises(MismatchError, option="layers [1, 2, 9] of the target are to be read, and it has 8"):
        open_head(folder, tap_layers=[1, 2, 9]).taps(8)
    for given in ((2, 4), (-1, 4, 5), (4, 2, 5), 3):
        with pytest.raises(MismatchError, match="--tap-layers"):
            open_head(folder, tap_layers=given)
    with raises(MismatchError, option="--tap-layers names [2, 4]"):
        open_head(folder, tap_layers=(2, 4))
    with raises(MismatchError, option="--tap-layers"):
        open_head(write_eagle1(tmp_path / "eagle1"), tap_layers=[2, 4, 5])


def test_fc_over_one_state_of_the_heads_width_is_skipped_by_engines(tmp_path):
    own, last = {AUX: [3], "eagle_config": {AUX: [2]}}, {"eagle_config": {"use_aux_hidden_state": False}}
    for changes, skipped in ((own, [False, True, False]), (last, [True] * 3)):
        facts = HeadFacts.of(open_head(write(tmp_path / str(skipped[0]), 1, **changes)), target_layers=8)
        found = [" ".join(map(str, head_findings(facts, name))) for name in ("vllm", "sglang", "tensorrt-llm")]
        assert ["fc is not applied" in problems for problems in found] == skipped


def test_what_captures_other_layers_is_said_of_each_engine(tmp_path):
    for changes, vllm, sglang in (
        ({AUX: [2, 4, 7]}, "", "it"),
        ({"eagle_config": {AUX: [1, 3, 6]}}, "runner V1 and runner V2", ""),
        ({"target_layer_ids": [1, 3, 6]}, "runner V1", "it"),
        ({"eagle_config": {"layer_ids": [2, 4, 7]}}, "runner V1", "it"),
        ({AUX: [2, 4, 7], "eagle_config": {AUX: [1, 3, 6]}}, "", ""),
    ):
        facts = HeadFacts.of(open_head(write(tmp_path / "head", **changes)), target_layers=8)
        for engine, readers in (("vllm", vllm), ("sglang", sglang)):
            found = [each.problem for each in head_findings(facts, engine) if "--tap-layers 2,4,7" in each.alternative]
            expected = [f"config.json names the tap layers where {readers} would capture others"]
            assert found == (expected if readers else [])
