"""Norms of q and k: what each engine makes of the class that is written for them, and of Llama's.

That vLLM accepts every draft with the first is a case of `test_vllm.py`.
"""

import json
import shutil
from pathlib import Path

import pytest
from engines import oracle
from engines.artifacts import OracleFiles, config_of
from engines.protocol import Json, ask
from engines.test_sglang import load
from safetensors.torch import load_file, save_file


@pytest.fixture(scope="module")
def artifact(oracle_files: OracleFiles) -> Path:
    return oracle_files.artifact("head_norms", 320)


@pytest.fixture(scope="module")
def as_llama(artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The artifact under the class of other EAGLE-3 heads."""
    folder = tmp_path_factory.mktemp("as-llama") / "head"
    shutil.copytree(artifact, folder)
    config = config_of(folder) | {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.engine("vllm")
def test_vllm_refuses_llamas_class_and_accepts_nothing_without_the_norms(
    oracle_files: OracleFiles, as_llama: Path
) -> None:
    without = as_llama.with_name("without")
    shutil.copytree(as_llama, without)
    tensors = load_file(without / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not name.endswith(("q_norm.weight", "k_norm.weight"))}
    save_file(kept, without / "model.safetensors", {"format": "pt"})
    prompt = oracle.prompt(0)
    job: Json = {"target": str(oracle_files.target), "prompts": [prompt], "k": 3, "max_model_len": 128}
    heads = [{"head": str(folder), "method": "eagle3"} for folder in (as_llama, without)]
    refused, served = ask("vllm_worker.py", [{**job, **head} for head in heads])
    assert "k_norm" in refused["error"]
    assert served["tokens"] == [oracle.continuation(prompt, 32)]
    assert served["accepted"] == 0 < served["drafted"]


@pytest.mark.engine("sglang")
def test_sglang_refuses_their_class_and_drops_them_from_llamas(
    oracle_files: OracleFiles, artifact: Path, as_llama: Path
) -> None:
    jobs = [{"head": str(folder), "algorithm": "EAGLE3"} for folder in (artifact, as_llama)]
    refused, loaded = load(oracle_files, jobs)
    assert refused["error"].startswith("ValueError")
    assert (loaded["class"], loaded["unloaded"]) == ("LlamaForCausalLMEagle3", [])


@pytest.mark.engine("lmdeploy")
def test_lmdeploy_refuses_both(artifact: Path) -> None:
    flavour = artifact.with_name("head-norms-for-lmdeploy")
    shutil.copytree(artifact, flavour)
    (flavour / "config.json").write_text(json.dumps(config_of(flavour) | {"architectures": ["LlamaForCausalLM"]}))
    theirs, llamas = ask("lmdeploy_worker.py", [{"head": str(artifact)}, {"head": str(flavour)}])
    assert theirs["error"].startswith("RuntimeError")
    assert llamas["error"].startswith("KeyError")


@pytest.mark.engine("specforge")
def test_specforge_has_no_such_class(artifact: Path) -> None:
    (refused,) = ask("specforge_worker.py", [{"head": str(artifact)}])
    assert "Eagle3Qwen3ForCausalLM" in refused["error"]


@pytest.mark.engine("speculators")
def test_speculators_converter_loses_them(oracle_files: OracleFiles, artifact: Path, tmp_path: Path) -> None:
    job = {"head": str(artifact), "target": str(oracle_files.target), "out": str(tmp_path / "out")}
    (result,) = ask("speculators_worker.py", [job])
    assert "k_norm" in result["error"]
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert "layers.0.self_attn.q_proj.weight" in written
    assert not any(name.endswith(("q_norm.weight", "k_norm.weight")) for name in written)
