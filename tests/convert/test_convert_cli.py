import json
import subprocess
import sys

import pytest
from eagle_slim.convert import Artifact, removed_cli
from eagle_slim.convert.cli import main as convert_command
from eagle_slim.convert.verify_cli import main as verify_command
from eagle_slim.vocab_tools import count_tokens, load_tokenizer
from eagle_slim.vocab_tools.sources import parse_source
from support.heads import write_eagle3, write_freq, write_target
from support.raising import exit_code
from support.small_tokenizers import byte_level_bpe, write_folder


@pytest.fixture
def token_map(tmp_path):
    return write_freq(tmp_path / "freq.pt", [2, 0, 1, 300, 17, 44, 4, 359, 100, 9])


def test_convert_then_verify(run, head, token_map, tmp_path):
    code, out, err = run(convert_command, head, "--draft-vocab", "8", "--token-map", token_map)
    assert code == 0
    assert "wrote head-v8" in out
    assert "384 → 8" in out
    assert "writing head-v8" in err
    assert Artifact.load(tmp_path / "head-v8").manifest.rank_order_ids.tolist() == [2, 0, 1, 300, 17, 44, 4, 359]
    code, out, _ = run(verify_command, "head-v8", "--head", head)
    assert code == 0
    assert "ok       d2t" in out
    assert "skipped" in out
    (tmp_path / "head-v8" / "pytorch_model.bin").write_bytes(b"")
    code, out, _ = run(verify_command, "head-v8", "--json")
    result = json.loads(out)
    assert (code, result["ok"]) == (1, False)
    assert [check["name"] for check in result["checks"] if check["status"] == "failed"] == ["stray files"]


def test_dataset_to_artifact_in_one_command(run, tmp_path):
    head, target = write_eagle3(tmp_path / "head", lm_head=False), write_target(tmp_path / "target")
    chats = [{"messages": [{"role": "assistant", "content": f"def main(): {n} fox"}]} for n in range(200)]
    (tmp_path / "chats.jsonl").write_text("\n".join(json.dumps(chat) for chat in chats))
    tokens = write_folder(tmp_path / "tokens", byte_level_bpe(), generation_config={"eos_token_id": 2})
    assert (tokens / "tokenizer.json").read_bytes() == (target / "tokenizer.json").read_bytes()
    arguments = (head, "--target", target, "--tokenizer", tokens, "--dataset", "chat=chats.jsonl", "--json")
    before = sorted(tmp_path.iterdir())
    for place, *size in (("o", "--coverage", "0.9"), ("out", "--draft-vocab", "270", "--draft-vocab", "300,270")):
        code, plan, err = run(convert_command, *arguments, *size, "--out", place, "--dry-run")
        assert code == 0, err
        assert sorted(tmp_path.iterdir()) == before
        code, out, err = run(convert_command, *arguments, *size, "--out", place)
        assert code == 0, err
        assert json.loads(plan) == json.loads(out)
        before = sorted(tmp_path.iterdir())
    results = json.loads(out)
    assert [result["draft_vocab"] for result in results] == [270, 300]
    assert results[0]["coverage"][0]["source"] == "chat"
    assert results[0]["coverage"][0]["part"] == "held-out"
    manifest = json.loads((tmp_path / "out" / "head-v270" / "eagle_slim.json").read_text())
    provenance = manifest["vocabulary"]["sources"][0]["provenance"]
    assert str(tmp_path) not in json.dumps(manifest)
    assert provenance["documents"] > 100
    # Counts from a file give the same artifact.
    count_tokens([parse_source("chat=chats.jsonl")], load_tokenizer(tokens)).save("kept.safetensors")
    counts = ("--counts", "kept.safetensors", "--draft-vocab", "300", "--out", "b")
    code, _, err = run(convert_command, *arguments[:5], *counts)
    assert code == 0, err
    first, second = tmp_path / "out" / "head-v300", tmp_path / "b"
    for path in first.iterdir():
        assert path.read_bytes() == (second / path.name).read_bytes(), path.name


def test_every_failure_has_its_code_and_leaves_nothing(run, head, token_map, tmp_path):
    usage = [
        ((head,), "--draft-vocab"),
        ((head, "--draft-vocab", "many"), "many"),
        ((head, "--draft-vocab", "0"), "found 0"),
        ((head, "--draft-vocab", "8", "--for", "vllm"), "'vllm' is not one of 'sglang', 'lmdeploy'"),
        ((head, "--draft-vocab", "8", "--tap-layers", "2,x"), "2,x"),
        ((head, "--draft-vocab", "8", "--weights", "chat"), "NAME=SHARE"),
        ((head, "--draft-vocab", "8", "--token-map", token_map, "--for", "sglang"), "Leave --for out"),
        ((head, "--draft-vocab", "11", "--token-map", token_map), "10 usable ids"),
        ((head, "--draft-vocab", "full,auto"), "'full,auto' does not have the form"),
        ((head, "--draft-vocb", "8"), "--draft-vocab"),
        # Before the head is looked for.
        ((tmp_path / "nothing", "--draft-vocab", "8", "--token-map", token_map, "--out", "freq.pt"), "exists already"),
    ]
    failures = [
        ((tmp_path / "nothing", "--draft-vocab", "8", "--token-map", token_map), "nothing"),
        ((head, "--draft-vocab", "8", "--token-map", tmp_path / "nothing.pt"), "nothing.pt"),
    ]
    before = sorted(tmp_path.iterdir())
    for cases, expected in ((usage, 2), (failures, 1)):
        for arguments, message in cases:
            code, out, err = run(convert_command, *arguments)
            assert code == expected, (arguments, err)
            assert message in err
            assert "Traceback" not in err
            assert not out
    assert sorted(tmp_path.iterdir()) == before
    assert run(verify_command, tmp_path / "nothing")[0] == 1


@pytest.mark.parametrize("command", ["vocab_tools.cli show", "convert.cli", "convert.verify_cli"])
def test_the_module_of_a_command_runs_it(command):
    line = [sys.executable, "-m", *f"eagle_slim.{command}".split()]
    done = subprocess.run(line, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 2
    assert "Missing" in done.stderr or "--draft-vocab" in done.stderr


@pytest.mark.parametrize("given", [["--gguf"], ["--gguf", "bf16"], ["--gguf=bf16,q8_0"]])
def test_what_is_gone_names_what_does_its_work_now(run, capsys, head, given):
    code, out, err = run(convert_command, head, "--draft-vocab", "8", *given)
    assert (code, out, "convert_hf_to_gguf.py" in err) == (2, "", True)
    for command, instead in ((removed_cli.push, "hf upload"), (removed_cli.servers, "examples/same_text.py")):
        assert exit_code(command) == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n"), instead in err) == ("", 1, True)
