"""The host files that CONTRIBUTING lists as a token's way are those in which a profiler sees a call."""

import gc
import re
import sys
from pathlib import Path

import pytest
import torch
from eagle_slim.runtime import SpeculativeModel, TreeConfig
from support.tiny_models import tiny_target, write_head

ROOT = Path(__file__).resolve().parents[3]


def listed():
    host = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("* **Host.**")[1].split("* **Prompt.**")[0]
    return {name for name in re.findall(r"`([\w/]+\.py)`", host) if not name.startswith("tests/")}


def passed(model, **options):
    """Files of the runtime, those of kernels apart, that a call runs Python functions of, once all is built."""
    for _ in range(3):
        model.generate([3, 4, 5], max_new_tokens=8, ignore_eos=True, **options)
    # What goes later, models of other tests, would call on its way.
    gc.collect()
    files = set()

    def watch(frame, event, argument):
        files.add(frame.f_code.co_filename)

    sys.setprofile(watch)
    try:
        model.generate([3, 4, 5], max_new_tokens=8, ignore_eos=True, **options)
    finally:
        sys.setprofile(None)
    own = [Path(file).resolve() for file in files]
    names = [file.relative_to(ROOT / "runtime").as_posix() for file in own if file.is_relative_to(ROOT / "runtime")]
    return {name for name in names if "kernels/" not in name}


def test_a_token_passes_the_files_that_are_listed(tmp_path):
    model = SpeculativeModel.from_pretrained(tiny_target("llama"), write_head(tmp_path), tree=TreeConfig.of(2, 3))
    model = model.with_tree(None)
    assert len(listed()) <= 20
    assert listed() - passed(model) == set()


@pytest.mark.gpu
def test_a_token_passes_no_other_files_on_a_gpu():
    model = SpeculativeModel.from_pretrained(dtype=torch.bfloat16, device="cuda")
    for sampling in ({}, {"temperature": 0.7, "seed": 1}):
        model.warmup(max_length=64, **sampling)
        assert sorted(passed(model, **sampling)) == sorted(listed())
