"""The heads published for gpt-oss, at toy sizes: the keys and tensor names of each, and what is made of it.

Target: 8 layers. Keys are those of ModelOpt's exporter (`hf_spec_configs.py`), of speculators'
`Eagle3SpeculatorConfig`, of SpecForge's `configs/gpt-oss-*.json`, and of the loaders of vLLM, SGLang and TensorRT-LLM.
"""

import pytest
import torch
from eagle_slim.convert import UnsupportedHeadError, open_head, verify_artifact
from eagle_slim.convert.engines import HeadFacts, conversion_findings
from support.conversion import BY_ID, convert
from support.heads import config_of, eagle3_tensors, trained_ids, write_eagle3, write_target
from support.raising import raises_with

AUX = "eagle_aux_hidden_state_layer_ids"
IDS = trained_ids()
MODELOPT = {"use_aux_hidden_state": True, "use_last_layernorm": True, "next_layer_regular": True, AUX: [1, 3, 4]}
LAST_STATE = {"draft_vocab_size": None, "eagle_config": {**MODELOPT, "use_aux_hidden_state": False, AUX: []}}
NO_ROWS = {"tensors": eagle3_tensors(rows=None), "draft_vocab_size": None, "spelling": "layers.0"}
NO_FC = {"tensors": {name: each for name, each in NO_ROWS["tensors"].items() if name != "fc.weight"}}
YARN = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}
BEFORE_FC, OUTPUT = {"norm_before_fc": True}, {"fc_norm": True, "norm_output": True}
OLD_NAMES = {"spelling": "legacy-norms", "use_aux_norm": True, "return_hidden_post_norm": True}
WIDTH = {"target_hidden_size": 48, "norm_before_fc": True}


def own_rows(**options):
    return {"ids": IDS, "tensors": eagle3_tensors(rows=len(IDS), **options)}


INPUT_NORM = own_rows(input_norm=True) | BEFORE_FC
READ = {
    # name: (the head, layers whose inputs it reads, settled keys of its configuration)
    "nvidia, long context": (NO_ROWS | {"eagle_config": MODELOPT}, (2, 4, 5), {}),
    "nvidia, short context": (NO_FC | LAST_STATE, (), {}),
    "nvidia, short context, an fc left over": (NO_ROWS | LAST_STATE, (), {}),
    "nvidia, v3": (INPUT_NORM | {"eagle_config": {**MODELOPT, AUX: [4, 6, 8]}}, (4, 6, 8), BEFORE_FC),
    "speculators": (INPUT_NORM | {"spelling": "speculators", AUX: [2, 4, 6]}, (2, 4, 6), BEFORE_FC),
    "lmsys, zhuyksir": (own_rows() | {"eagle_config": {AUX: [1, 3, 6]}, "rope_scaling": YARN}, (2, 4, 7), {}),
    "nebius": (own_rows() | {"d2t_dtype": torch.int32, "t2d": False}, None, {}),
    "dogacel": (own_rows(fc_norms=True, taps=2) | OUTPUT | {"eagle_config": {AUX: [0, 6]}}, (1, 7), OUTPUT),
    "dogacel, old names": (own_rows(fc_norms=True) | OLD_NAMES, None, OUTPUT),
    "of its own width": (own_rows(target_hidden=48, input_norm=True, embedding=True) | WIDTH, None, WIDTH),
}


@pytest.mark.parametrize(("arguments", "taps", "settled"), READ.values(), ids=READ)
def test_read(tmp_path, arguments, taps, settled):
    head = open_head(write_eagle3(tmp_path / "head", **arguments))
    assert head.taps(8) == taps
    flags = ("norm_before_fc", "fc_norm", "norm_output")
    assert {key for key in flags if head.config.get(key)} == {key for key in flags if settled.get(key)}
    # An fc without captured layers is dropped, as vLLM leaves it unread.
    assert ("fc.weight" in head.tensors) == (taps != ())
    is_left = taps == () and "fc.weight" in arguments["tensors"]
    assert any("fc.weight" in each and "is left out" in each for each in head.warnings) == is_left
    target = write_target(tmp_path / "target", hidden=head.target_hidden_size)
    rows = 300 if head.draft_ids_to_target is None else 190
    done = convert(tmp_path / "head", draft_vocab=rows, target=target, out=tmp_path / "out", vocabulary=BY_ID)
    assert verify_artifact(done.folder, head=tmp_path / "head", target=target).ok
    again = open_head(done.folder)
    assert (again.taps(8), again.draft_vocab) == (taps, rows)
    assert config_of(done.folder).items() >= settled.items()


REFUSED = {
    "amazon, four layers": ({"ptd_token_id": 7, "extra": {"layers.1.mlp.up_proj.weight": torch.ones(4, 4)}}, "P-EAGLE"),
    "speculators' P-EAGLE": ({"pard_token": 7}, '"parallel_drafting": true'),
    "ModelOpt, parallel": ({"extra": {"parallel_draft_heads.0.weight": torch.ones(4, 4)}}, "tokens in parallel"),
    "SpecForge, experts": ({"extra": {"midlayer.mlp.router.weight": torch.ones(4, 4)}}, "a mixture-of-experts head"),
    "sinks": ({"extra": {"midlayer.self_attn.sinks": torch.ones(4)}}, "an attention with sinks"),
}


@pytest.mark.parametrize(("changes", "words"), REFUSED.values(), ids=REFUSED)
def test_refused_by_name(tmp_path, changes, words):
    with raises_with(UnsupportedHeadError, words):
        open_head(write_eagle3(tmp_path / "head", ids=IDS, **changes))


@pytest.mark.parametrize(("target_type", "losses"), [("gpt_oss", 0), ("llama", 2), (None, 2)])
def test_sglang_reads_inputs_up_to_the_last_output_of_gpt_oss_alone(tmp_path, target_type, losses):
    head = open_head(write_eagle3(tmp_path / "head", eagle_config={AUX: [4, 6, 8]}))
    facts = HeadFacts.of(head, target_layers=8, target_type=target_type)
    assert sum(found.engine == "sglang" for found in conversion_findings(facts)) == losses
    # The same states by the key of which SGLang takes outputs, as `--tap-layers` writes it.
    written = HeadFacts.of(open_head(tmp_path / "head", tap_layers=[4, 6, 8]), target_layers=8, target_type="gpt_oss")
    assert not any(found.engine == "sglang" for found in conversion_findings(written))


def test_layers_that_only_the_target_tells_are_not_advised_without_it(tmp_path):
    """[4, 6, 8] are inputs of a target of 8 layers; without it "--tap-layers 5,7,9" would make another head."""
    head = open_head(write_eagle3(tmp_path / "head", eagle_config={AUX: [4, 6, 8]}))
    for layers, advice in ((8, "--tap-layers 4,6,8"), (None, "--target")):
        ways = {found.alternative for found in conversion_findings(HeadFacts.of(head, target_layers=layers))}
        assert any(advice in way for way in ways)
        assert not any("5,7,9" in way for way in ways)
