from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from eagle_slim.runtime import HeadWeights, SpeculativeModel, TreeConfig
from eagle_slim.runtime.drafter.drafter import Drafter, check_draft_weights, choose_drafter
from eagle_slim.runtime.drafter.packing import SharedPacking
from eagle_slim.runtime.drafter.reference import draft_ref
from eagle_slim.runtime.errors import DrafterError, SpeedWarning, UsageError
from support.drafting import random_head
from support.raising import raises, raises_with
from support.tiny_models import random_prompts, tiny_target, write_head

GPU, CPU = torch.device("cuda"), torch.device("cpu")
TREE = TreeConfig(2, 3, 12)


@pytest.fixture
def sm_89(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 9))


def test_what_can_be_stored(sm_89: None) -> None:
    check_draft_weights("auto", "reference", CPU, torch.float16)
    check_draft_weights("bf16", "reference", CPU, torch.bfloat16)
    for drafter in ("auto", "triton"):
        for dtype in (torch.bfloat16, torch.float16, None):
            check_draft_weights("fp8", drafter, GPU, dtype)


def test_what_cannot(sm_89: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for draft_weights, drafter, dtype in (
        ("int4", "auto", None),
        ("bf16", "auto", torch.float16),
        ("bf16", "auto", torch.float32),
        ("fp8", "triton", torch.float32),
        ("fp8", "reference", None),
        ("fp8", draft_ref, None),
    ):
        with raises(UsageError, option="draft_weights"):
            check_draft_weights(draft_weights, drafter, GPU, dtype)
    with raises(DrafterError, option="draft_weights"):
        check_draft_weights("fp8", "auto", CPU)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 6))
    with raises_with(DrafterError, "sm_86"):
        check_draft_weights("fp8", "auto", GPU)


def test_a_head_that_no_kernel_takes_is_no_reason_to_leave_fp8(sm_89: None, monkeypatch: pytest.MonkeyPatch) -> None:
    head = replace(random_head(dtype=torch.bfloat16), activation="relu")
    monkeypatch.setattr(HeadWeights, "device", GPU)
    with pytest.warns(SpeedWarning, match="relu"):
        assert choose_drafter("auto", head, TREE).name == "reference"
    with raises(DrafterError, option="draft_weights"):
        choose_drafter("auto", head, TREE, "fp8")


def test_refused_before_anything_is_loaded() -> None:
    in_float32: Any = {"dtype": "float32", "device": "cpu"}
    for draft_weights, error in (("fp8", DrafterError), ("bf16", UsageError)):
        with raises(error, option="draft_weights"):
            SpeculativeModel.from_pretrained("no/target", "no/head", draft_weights=draft_weights, **in_float32)


def test_kept_by_other_trees_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = SpeculativeModel.from_pretrained(tiny_target("llama"), write_head(tmp_path), draft_weights="auto")
    assert model.draft_weights == "fp32"
    stats = model.generate(random_prompts([4]), max_new_tokens=2).stats
    assert "; drafter reference, fp32 weights; " in stats.path
    head = random_head(dtype=torch.float16)
    drafter = Drafter(head, TREE, "triton", SharedPacking(head, weight_dtype=torch.float8_e4m3fn))
    scaled = SpeculativeModel(model.target, drafter)
    assert scaled.draft_weights == scaled.with_tree(TreeConfig(1, 3, 8)).draft_weights == "fp8"
    # Nor are they lost with another drafter; what cannot hold them is refused.
    with raises(UsageError, option="draft_weights"):
        scaled.with_drafter("reference")
    monkeypatch.setattr("eagle_slim.runtime.drafter.drafter.check_draft_weights", lambda *_: None)
    assert scaled.with_drafter("triton").draft_weights == "fp8"
    plain = SpeculativeModel(model.target, Drafter(head, TREE))
    assert plain.drafting == "drafter reference, fp16 weights"
