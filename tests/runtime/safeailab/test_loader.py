"""SafeAILab's own loader takes a slim artifact, and its EaModel drafts with it in as many passes as ours.

Its code needs another transformers than ours: each half runs in its own environment, and both are held to one list.
"""

import json
import sys
from pathlib import Path

import pytest
import torch
from eagle_slim.convert import ConvertOptions, convert_head, embedded_target_folder
from eagle_slim.runtime import SpeculativeModel, TreeConfig
from safetensors import safe_open
from support.upstream_models import NEEDS_UPSTREAM, OWN_TRANSFORMERS, UPSTREAM

PROMPTS = Path(__file__).parents[3] / "examples" / "prompts.jsonl"
NEW_TOKENS = 25
PASSES = [10, 6, 12, 5]
"""Of the first four prompts, with 16,384 rows of the built-in head and trees of depth 5, top_k 10 and 60 nodes."""


def questions() -> list[str]:
    with PROMPTS.open(encoding="utf-8") as lines:
        return [json.loads(next(lines))["turns"][0] for _ in PASSES]


@pytest.fixture
def slim(tmp_path: Path) -> Path:
    (conversion,) = convert_head(None, ConvertOptions(draft_vocab=16384, out=tmp_path / "slim"))
    return conversion.folder


@pytest.mark.slow
@OWN_TRANSFORMERS
def test_passes_of_the_slim_head_here(slim: Path) -> None:
    model = SpeculativeModel.from_pretrained(head=slim, dtype=torch.float32, device="cpu", tree=TreeConfig())
    found = [model.generate(model.encode_chat(text), max_new_tokens=NEW_TOKENS) for text in questions()]
    assert [output.stats.num_passes for output in found] == PASSES


@NEEDS_UPSTREAM
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore:.*generative:UserWarning")
def test_upstream_needs_as_many_passes(slim: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Its loader asks the Hub for pytorch_model.bin before it reads model.safetensors.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(sys, "path", [str(UPSTREAM), *sys.path])
    from eagle.model.ea_model import EaModel

    base = tmp_path / "base"
    base.mkdir()
    for file in embedded_target_folder().iterdir():
        (base / file.name).symlink_to(file)
    with safe_open(base / "model.safetensors", "pt") as weights:
        index = {"metadata": {}, "weight_map": dict.fromkeys(weights.keys(), "model.safetensors")}
    # Upstream finds the embedding through an index only.
    (base / "model.safetensors.index.json").write_text(json.dumps(index))
    sizes = {"total_token": 60, "depth": 5, "top_k": 10, "torch_dtype": torch.float32}
    paths = {"base_model_path": str(base), "ea_model_path": str(slim)}
    model = EaModel.from_pretrained(use_eagle3=True, **paths, **sizes).eval()
    assert model.ea_layer.lm_head.weight.shape[0] == 16384
    found = []
    for text in questions():
        ids = model.tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)
        # Upstream goes on until it has more than this, the last pass's own token left out.
        _, _, last = model.eagenerate(torch.tensor([ids]), max_new_tokens=NEW_TOKENS - 2, log=True)
        found.append(last + 1)
    assert found == PASSES
