"""What is looked at before the first token is counted."""

import contextlib
import json
import os
import subprocess
import sys

import pytest
import torch
from eagle_slim.convert import (
    Artifact,
    ArtifactError,
    CheckpointError,
    MismatchError,
    VocabRequest,
    verify_artifact,
)
from eagle_slim.convert.cli import main as convert_command
from eagle_slim.vocab_tools.tokenizer import load_tokenizer
from safetensors.torch import save_file
from support.conversion import convert
from support.heads import (
    HIDDEN,
    TOKENS,
    VOCAB,
    random,
    write_eagle1,
    write_eagle3,
    write_freq,
)
from support.raising import waiting_for_nothing
from support.token_counts import token_counts


def never(*_):
    pytest.fail("counted, although the conversion cannot be finished")


class TestCheapChecks:
    def test_weights_of_the_target_that_are_damaged_or_missing_or_of_another_width(self, tmp_path, target):
        head = write_eagle3(tmp_path / "head", lm_head=False)
        weights = target / "model.safetensors"
        for damage in (lambda: weights.write_bytes(weights.read_bytes()[:-8]), weights.unlink):
            damage()
            with pytest.raises(CheckpointError):
                convert(head, draft_vocab=300, target=target, out=tmp_path / "out", count=never)
        save_file({"lm_head.weight": random((VOCAB, 8), 0)}, target / "model.safetensors")
        with pytest.raises(MismatchError, match=r"lm_head\.weight is \[384, 8\]"):
            convert(head, draft_vocab=300, target=target, out=tmp_path / "out", count=never)


def warnings_of(err):
    return [line for line in err.splitlines() if line.startswith("warning: ")]


class TestDryRun:
    """It looks at all that a real run looks at, and says the same of it."""

    def test_its_warnings_are_those_of_the_real_run(self, run, tmp_path):
        head = write_eagle1(tmp_path / "old", bias=random((HIDDEN,), 1))
        ranking = ("--token-map", write_freq(tmp_path / "freq.pt", range(330)))
        arguments = (head, *ranking, "--draft-vocab", "310,320", "--out", "o")
        code, _, dry = run(convert_command, *arguments, "--dry-run")
        assert code == 0, dry
        code, out, _ = run(convert_command, *arguments, "--dry-run", "--json")
        code, _, real = run(convert_command, *arguments)
        assert code == 0, real
        for words in ("fc.bias is dropped", "no tokenizer was at hand", "multiple of 64"):
            assert words in dry
        assert warnings_of(dry) == warnings_of(real)
        told = {f"warning: {warning}" for plan in json.loads(out) for warning in plan["warnings"]}
        assert told == set(warnings_of(real))


NO_TORCH = """
import sys
from eagle_slim.convert import cli, push_cli, verify_cli
at_import = {"transformers"} & set(sys.modules)
cli.convert.main(sys.argv[1:], standalone_mode=False)
print(*sorted(at_import | {"torch", "datasets"} & set(sys.modules)))
"""


def test_safetensors_to_safetensors_needs_no_torch(tmp_path, target):
    head = write_eagle3(tmp_path / "head", lm_head=False)
    (tmp_path / "map.json").write_text(json.dumps(list(range(320))))
    arguments = [head, "--draft-vocab", "300", "--target", target, "--token-map", tmp_path / "map.json"]
    done = subprocess.run(
        [sys.executable, "-c", NO_TORCH, *map(str, arguments), "--out", tmp_path / "o"],
        capture_output=True, text=True, timeout=1800,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == ""
    assert len(torch.load(tmp_path / "o" / "freq_300.pt", weights_only=True)) == 300


class TestNeverCounted:
    def test_ids_that_no_text_holds_are_told_of_everywhere(self, run, tmp_path, target):
        counts = [0] * TOKENS
        counts[300], counts[301], counts[302], counts[303] = 9, 8, 7, 6
        token_counts(counts, None, load_tokenizer(str(target)).tokenizer_hash).save(tmp_path / "few.safetensors")
        head = write_eagle3(tmp_path / "head")
        arguments = (head, "--draft-vocab", "320", "--target", target, "--counts", "few.safetensors", "--out", "o")
        code, out, err = run(convert_command, *arguments)
        assert code == 0, err
        missing = 320 - 259 - 4
        assert f"never counted         {missing}" in out
        assert f"{missing} of the 320 ids never occur in the counted text" in err
        assert Artifact.load(tmp_path / "o").manifest.num_uncounted == missing
        assert f"{missing} of the 320 ids never occur" in (tmp_path / "o" / "README.md").read_text()
        check = verify_artifact(tmp_path / "o")["ranks"]
        assert (check.status, f"{missing} never counted" in check.detail) == ("warning", True)


class TestDoubts:
    def convert(self, tmp_path, head, **options):
        request = VocabRequest(token_map=write_freq(tmp_path / "freq.pt", range(10)))
        return convert(head, draft_vocab=8, vocabulary=request, out=tmp_path / "out", force=True, **options)

    def test_what_several_engines_make_of_a_head_is_said_once(self, tmp_path):
        done = self.convert(tmp_path, write_eagle1(tmp_path / "head"))
        assert len([warning for warning in done.manifest.warnings if "full LM head" in warning]) == 1

    @pytest.mark.parametrize(
        "name", ["config.json", "README.md", "eagle_slim.json", "model.safetensors", "hf_quant_config.json"]
    )
    def test_a_pipe_in_place_of_a_file_is_not_waited_for(self, tmp_path, name):
        head = write_eagle3(tmp_path / "head")
        (head / name).unlink(missing_ok=True)
        os.mkfifo(head / name)
        refused = pytest.raises((ArtifactError, CheckpointError))
        with waiting_for_nothing(), contextlib.nullcontext() if name == "README.md" else refused:
            self.convert(tmp_path, head)
