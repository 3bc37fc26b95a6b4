"""Texts and numbers of others: quoted where they go into files of ours, refused by place, or ignored in a card."""

import json
import math
import shutil
from collections import namedtuple
from dataclasses import replace

import pytest
import yaml
from eagle_slim.convert import MismatchError, VocabRequest, atomic
from eagle_slim.convert.cli import main as convert_command
from eagle_slim.vocab_tools.tokenizer import load_tokenizer
from support.conversion import BY_ID, by_map, convert
from support.heads import TOKENS, change_config, config_of, write_eagle3, write_json
from support.raising import raises_with
from support.token_counts import token_counts

RANKED = range(40)


def front_matter(folder):
    return yaml.safe_load((folder / "README.md").read_text().split("\n---\n")[0].removeprefix("---\n"))


def converted(tmp_path, card):
    """Front matter of the artifact of a head with this one."""
    head = write_eagle3(tmp_path / "head")
    (head / "README.md").write_text(f"---\n{card}\n---\n")
    options = {"draft_vocab": 8, "vocabulary": by_map(tmp_path, RANKED), "out": tmp_path / "out", "force": True}
    return front_matter(convert(head, **options).folder)


def test_a_licence_is_one_text_of_the_front_matter(tmp_path):
    for licence in ("mit\nmodel-index: [evil]", "no", "a: b", "- x", "1.0", "#", "'", "mit\n---\n# Buy"):
        found = converted(tmp_path, f"license: {json.dumps(licence)}")
        assert set(found) == {"license", "pipeline_tag", "tags"}
        assert found["license"] == licence
        assert "\n# Buy" not in (tmp_path / "out" / "README.md").read_text()


def test_a_card_that_yaml_cannot_read_stops_no_conversion(tmp_path):
    for odd in ("date: 2024-02-30", "a: " + "[" * 600, "a: " + "9" * 6000, "a: !!int ''", "a: !!bool x"):
        assert converted(tmp_path, f"license: mit\n{odd}")["license"] == "unknown"


def test_a_target_that_a_head_names_is_quoted_in_the_commands(tmp_path):
    head = write_eagle3(tmp_path / "head", spelling="speculators")
    config = config_of(head)
    config["speculators_config"]["verifier"]["name_or_path"] = "x/y; rm -rf ~"
    write_json(head / "config.json", config)
    done = convert(head, draft_vocab=8, vocabulary=by_map(tmp_path, RANKED), tokenizer=None, out=tmp_path / "out")
    card = (done.folder / "README.md").read_text()
    assert "vllm serve 'x/y; rm -rf ~' " in card
    assert front_matter(done.folder)["base_model"] == "x/y; rm -rf ~"


@pytest.mark.parametrize("value", [math.inf, math.nan, -1, "32", True, 2.5])
@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "vocab_size"])
def test_sizes_of_a_target_that_are_none(tmp_path, target, key, value):
    change_config(target, **{key: value})
    with raises_with(MismatchError, str(target), key):
        convert(write_eagle3(tmp_path / "head"), draft_vocab=320, target=target, vocabulary=BY_ID, out=tmp_path / "out")


def refused_alike(run, tmp_path, head, out):
    arguments = (convert_command, head, "--draft-vocab", "8", "--token-map", "freq.pt", "--out", out)
    by_map(tmp_path, RANKED)
    before = sorted(tmp_path.rglob("*"))
    (dry, _, planned), (real, _, said) = run(*arguments, "--dry-run"), run(*arguments)
    assert (dry, real) == (1, 1)
    errors = [[line for line in err.splitlines() if not line.startswith("writing ")] for err in (planned, said)]
    assert errors[0] == errors[1]
    assert ".eagle-slim-" not in said
    assert sorted(tmp_path.rglob("*")) == before
    return said


def test_a_dry_run_refuses_a_name_that_is_too_long_and_a_disk_without_room(run, tmp_path, monkeypatch):
    head, usage = write_eagle3(tmp_path / "head"), namedtuple("usage", "total used free")
    for length in (240, 300):
        assert "too long" in refused_alike(run, tmp_path, head, "n" * length)
    monkeypatch.setattr(atomic.shutil, "disk_usage", lambda path: usage(10**9, 10**9 - 5, 5))
    assert "the disk has 5" in refused_alike(run, tmp_path, head, "out")


def test_a_full_disk_is_told_without_the_names_of_temporary_folders(run, tmp_path, head, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: namedtuple("usage", "total free")(10**12, 10**12))

    def full(path, plans):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr("eagle_slim.convert.pipeline.write_safetensors", full)
    by_map(tmp_path, RANKED)
    code, _, err = run(convert_command, head, "--draft-vocab", "8", "--token-map", "freq.pt", "--out", "o")
    assert (code, "No space left" in err, ".eagle-slim-" in err) == (1, True, False)


def test_odd_accounts_of_counts(tmp_path, head, target):
    counted = token_counts([1] * TOKENS, None, load_tokenizer(target).tokenizer_hash)

    def converted(out, provenance):
        odd = replace(counted, sources=(replace(counted.sources[0], provenance=provenance),))
        options = {"draft_vocab": 320, "target": target, "vocabulary": VocabRequest(counts=(odd,))}
        return front_matter(convert(head, **options, out=tmp_path / out).folder)

    with raises_with(MismatchError, "NaN"):
        converted("none", {"x": math.nan})
    converted("a number", {"parts": 7})
    converted("numbers", {"parts": [7]})
    found = converted("a dataset", {"dataset": "a/b\nlicense: x"})
    assert (found["datasets"], found["license"]) == (["a/b\nlicense: x"], "unknown")
