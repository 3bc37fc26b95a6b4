"""The benchmark of the drop-in around the stand-in of SafeAILab's EAGLE: checks, times, what is refused."""

import json
import re
import sys
from types import SimpleNamespace

import pytest
import torch
from eagle_slim.runtime.settings import TreeConfig
from support import upstream_stand_in
from support.raising import exit_code
from support.upstream_models import NEEDS_UPSTREAM, UPSTREAM, build, prompt

from benchmarks import safeailab


@pytest.fixture
def arguments(tmp_path):
    """Reads a command line with a folder that looks like a clone."""
    clone = tmp_path / "EAGLE" / "eagle" / "model" / "ea_model.py"
    clone.parent.mkdir(parents=True)
    clone.touch()
    return lambda *line: safeailab.parse(["--upstream", str(tmp_path / "EAGLE"), "--device", "cpu", *line])


@pytest.mark.slow
def test_variants(arguments, tmp_path, monkeypatch, capsys):
    model = build("stand-in eagle3", tmp_path)
    # Upstream's allocates what a tree of another size needs.
    monkeypatch.setattr(model.ea_layer, "init_tree", lambda: None, raising=False)
    line = "--runs 1 --new-tokens 6 --depths 1 2 --total-tokens 8 --top-k 3 --target-backend fused"
    args = arguments(*line.split())
    verify, prompts, rows = upstream_stand_in.tree_decoding, [prompt(model), prompt(model, 5)], []
    for tree in args.trees:
        rows += safeailab.run(model, tree, prompts, args)
    assert [(row["tree"], row["variant"]) for row in rows] == [
        ([depth, 3, 8], variant) for depth in (1, 2) for variant in ("upstream", "drafter", "whole")
    ]
    assert all(row["is_equal"] and row["equal_tokens"] == row["new_tokens"] >= 12 for row in rows)
    times = ("draft_ms", "verify_ms", "pass_ms", "tokens_per_s", "draft_speedup", "speedup")
    assert all(row[name] > 0 for row in rows for name in times)
    for row in rows:
        is_own = row["variant"] == "upstream"
        assert [row.get(f"draft_{part}_ms", 0) > 0 for part in ("mlp", "lm_head")] == [is_own] * 2, "a launch has none"
    assert {row.get("forward") for row in rows} == {None, "fused (asked for)"}
    assert upstream_stand_in.tree_decoding is verify, "what was listened to is as it was"
    args = arguments("--runs", "0", "--new-tokens", "4", "--temperature", "0.5", "--compare", "whole", "--print_output")
    capsys.readouterr()
    rows = safeailab.run(model, TreeConfig(1, 3, 8), prompts[:1], args)
    assert [row["variant"] for row in rows] == ["upstream", "whole"]
    assert not any({"is_equal", "speedup", "pass_ms"} & set(row) for row in rows)
    assert "\nwhole: [" in capsys.readouterr().out
    theirs = arguments("--base_model_path", "a", "--ea_model_path", "b", "--prompt", "one", "--max_new_tokens", "4")
    assert (theirs.base_model, theirs.ea_model, theirs.new_tokens, theirs.warmup) == ("a", "b", 4, 0)
    args = arguments("--runs", "1", "--warmup", "--print_eagle_timers", "--new-tokens", "4", "--compare", "whole")
    rows = safeailab.run(model, TreeConfig(1, 3, 8), prompts[:1], args)
    assert [row["variant"] for row in rows] == ["upstream", "whole"]
    assert "\nwhole: draft " in capsys.readouterr().out
    assert arguments("--compare").compare == arguments().compare == ("drafter", "whole")
    assert safeailab.generate(model, prompts[:1], arguments("--max-length", "9"))["num_passes"] == 1


def test_parts_of_the_kernels_draft_by_its_stamps(monkeypatch):
    # Barriers of a draft of one level, a millisecond apart: inputs, fc twice, QKV, attention twice, output, MLP twice
    # (down), LM head; the first stamp is of the end.
    stamps = torch.tensor([20, *range(3, 13), 0]) * 1_000_000
    barrier = torch.cat((torch.zeros(safeailab.FIRST_STAMP, dtype=torch.int32), stamps.view(torch.int32)))
    split = dict.fromkeys(("fc", "qkv", "o", "down"), 1)
    bufs = SimpleNamespace(params=SimpleNamespace(layout=SimpleNamespace(split=split)), workspace={"barrier": barrier})
    layer = SimpleNamespace(bufs=bufs, kind="eagle3", tree=TreeConfig(0, 2, 3))
    assert safeailab.stamped_parts(layer) == {}
    monkeypatch.setattr(safeailab, "STAMPS", SimpleNamespace(value=True))
    parts = {"draft_attention_ms": 4, "draft_mlp_ms": 2, "draft_lm_head_ms": 1}
    assert safeailab.stamped_parts(layer) == parts


def test_the_first_difference():
    texts = [[1, 2, 3], [4, 5]]
    assert safeailab.compare_texts(texts, [[1, 2, 3, 9], [4]]) == {"equal_tokens": 4, "is_equal": True}
    assert safeailab.compare_texts(texts, [[1, 2, 7], [4, 5]]) == {"equal_tokens": 4, "is_equal": False}


def test_prompts_and_what_is_refused(arguments, tmp_path, capsys):
    own = ("--base-model", "here", "--ea-model", "there")
    (tmp_path / "lines.txt").write_text("one\n\ntwo\n")
    records = [{"question_id": 1, "turns": ["three", "later"]}, {"prompt": "four"}]
    (tmp_path / "question.jsonl").write_text("\n".join(map(json.dumps, records)))
    args = arguments(*own, "--prompt", "zero", "--prompts", str(tmp_path / "lines.txt"))
    assert args.prompt == ["zero", "one", "two"]
    assert arguments(*own, "--prompts", str(tmp_path / "question.jsonl")).prompt == ["three", "four"]
    (tmp_path / "wrong.jsonl").write_text("{}")
    for line, words in (
        (("--upstream", str(tmp_path)), "must name a clone"),
        (("--base-model", "here", "--prompt", "one"), "--ea-model"),
        (own, "--prompt"),
        ((*own, "--prompt", "one", "--dims", "tiny"), "--dims"),
        (("--prompt", "one"), "--base-model"),
        ((*own, "--prompts", str(tmp_path / "wrong.jsonl")), "wrong.jsonl"),
        (("--new-tokens", "0"), "argument --new-tokens"),
        (("--device", "cuda:99"), "device = 'cuda:99'"),
        (("--depths", "0"), "depth"),
    ):
        assert exit_code(arguments, *line) == 2
        assert words in capsys.readouterr().err


@NEEDS_UPSTREAM
def test_drafts_of_the_tiny_model_are_accepted(capsys):
    line = "--device cpu --dims tiny --dtype float32 --runs 0 --compare drafter"
    safeailab.main(["--upstream", str(UPSTREAM), *line.split()])
    lengths = [float(text) for text in re.findall(r"'accepted_length': ([\d.]+)", capsys.readouterr().out)]
    assert len(lengths) == 2
    assert min(lengths) > 1.5


@NEEDS_UPSTREAM
def test_a_model_of_ones_own(tmp_path, monkeypatch):
    build("llama eagle3", tmp_path)
    # What the command adds to it goes with the test.
    monkeypatch.setattr(sys, "path", [*sys.path])
    line = "--prompt hello --prompt again --new-tokens 8 --depths 2 --total-tokens 8 --top-k 3 --runs 1 --device cpu"
    line += " --dtype float32 --target-backend fused --compare --print_output"
    folders = {"upstream": UPSTREAM, "base-model": tmp_path / "base", "ea-model": tmp_path / "head"}
    paths = (folders | {"out": tmp_path / "result.json"}).items()
    safeailab.main([*(f"--{name}={path}" for name, path in paths), *line.split()])
    result = json.loads((tmp_path / "result.json").read_text())
    assert [row["is_equal"] for row in result["rows"]] == [True] * 3
    assert (result["num_prompts"], result["draft_vocab"], result["layers"]) == (2, 64, 8)
