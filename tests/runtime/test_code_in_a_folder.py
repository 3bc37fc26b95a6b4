"""Folders whose config.json names Python code of their own: it is never run, and nobody is asked on stdin."""

import json
from pathlib import Path

import pytest
import torch
from eagle_slim.runtime.errors import TargetError
from eagle_slim.runtime.opening.target_files import load_target, load_target_config, load_tokenizer_and_hash
from eagle_slim.vocab_tools.tokenizer import load_tokenizer
from support.small_tokenizers import byte_level_bpe, write_folder
from support.tiny_models import tiny_target

CODE = "import pathlib\npathlib.Path({mark!r}).touch()\n"
MAP = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
MAP |= {"AutoTokenizer": ["own.OwnTokenizer", None]}


def with_code(tmp_path: Path, **changes) -> Path:
    """A target whose configurations name its `own.py`, which leaves a file `ran` when it is imported."""
    folder = write_folder(tmp_path / "target", byte_level_bpe(360))
    tiny_target("llama").save_pretrained(folder)
    (folder / "own.py").write_text(CODE.format(mark=str(tmp_path / "ran")))
    for name in ("config.json", "tokenizer_config.json"):
        path = folder / name
        config = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({**config, "auto_map": MAP, **changes}))
    return folder


@pytest.fixture
def no_input(monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked on stdin"))


@pytest.mark.usefixtures("no_input")
def test_a_class_that_transformers_has_is_used_and_the_folders_code_is_not(tmp_path):
    folder = with_code(tmp_path)
    assert type(load_target_config(folder, None, True)).__name__ == "LlamaConfig"
    assert type(load_target(folder, torch.float32, torch.device("cpu"), None, True)).__name__ == "LlamaForCausalLM"
    tokenizer, tokenizer_hash = load_tokenizer_and_hash(folder, None, True)
    assert tokenizer_hash == load_tokenizer(folder).tokenizer_hash
    assert tokenizer.encode("ab")
    assert not (tmp_path / "ran").exists()


@pytest.mark.usefixtures("no_input")
def test_a_class_that_only_the_folder_has_is_refused_with_advice_that_exists(tmp_path):
    folder = with_code(tmp_path, model_type="own")
    for load in (load_target_config, lambda *args: load_target(args[0], None, torch.device("cpu"), *args[1:])):
        with pytest.raises(TargetError) as caught:
            load(folder, None, True)
        assert "auto_map" in str(caught.value)
        assert "trust_remote_code" not in str(caught.value)
    assert not (tmp_path / "ran").exists()
