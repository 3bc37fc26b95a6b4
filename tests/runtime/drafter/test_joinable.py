"""Rows that may join a draft vocabulary: where each kind of head has them, and what is said where there are none."""

from pathlib import Path

import numpy as np
import pytest
import torch
from eagle_slim.convert import Artifact, VocabRequest, open_head
from eagle_slim.convert.errors import SourceError
from eagle_slim.convert.head.kept_rows import KEPT_ROWS_NAME
from eagle_slim.runtime import SpeculativeModel
from eagle_slim.runtime.compare import CompareOptions
from eagle_slim.runtime.compare.candidates import Candidate, find_candidates, rank_heads
from eagle_slim.runtime.drafter.joinable import load_joinable_rows
from eagle_slim.runtime.errors import UsageError
from eagle_slim.runtime.target.wrapper import TargetModel
from safetensors.torch import load_file
from support.conversion import convert
from support.heads import write_freq
from support.hub_server import HubServer, connected
from support.raising import raises
from support.tiny_models import VOCAB, tiny_target, write_head

TRAINED = [1, 2, 4, 5, 7, 8, 9, 11, 13, 14, 17, 20]
RANKED = [2, 9, 4, 20, 1, 5, 14, 7, 8, 11, 13, 17]


@pytest.fixture(scope="module")
def target() -> TargetModel:
    return TargetModel(tiny_target("llama"), (2, 3, 3))


def converted(folder: Path, head: Path, **options: object) -> Artifact:
    request = VocabRequest(token_map=write_freq(folder / "freq.pt", RANKED))
    done = convert(head, vocabulary=request, out=folder / "slim", **options)
    return Artifact.load(done.folder)


def joinable(head, target, draft_ids, dtype=torch.float32):
    return load_joinable_rows(head, target, np.array(draft_ids), dtype, torch.device("cpu"))


def candidates(model: SpeculativeModel, **asked: object) -> list[Candidate]:
    options = CompareOptions(**asked)
    return find_candidates(rank_heads([model], options, print), options, print)


def test_kept_rows_of_an_artifact(tmp_path: Path, target: TargetModel) -> None:
    head = write_head(tmp_path / "head", draft_ids=TRAINED)
    artifact = converted(tmp_path, head, draft_vocab=4, keep_rows=9)
    found = joinable(artifact.head, target, sorted(RANKED[:4]))
    assert found.target_ids.tolist() == sorted(RANKED[:9])
    assert found.rank_order.tolist() == RANKED[:9]
    assert "kept" in found.origin
    source = load_file(head / "model.safetensors")["lm_head.weight"]
    for token in RANKED[:9]:
        assert torch.equal(found.rows[found.row_of_id[token]], source[TRAINED.index(token)])
    assert (found.row_of_id.dtype, found.row_of_id.shape) == (torch.int32, (VOCAB,))
    assert joinable(artifact.head, target, [2], torch.bfloat16).rows.dtype == torch.bfloat16


def test_a_head_with_more_rows_than_are_drafted_over(tmp_path: Path, target: TargetModel) -> None:
    mapped = open_head(write_head(tmp_path / "mapped", draft_ids=TRAINED))
    assert joinable(mapped, target, TRAINED[:3]).target_ids.tolist() == TRAINED
    with raises(UsageError, option="follow", missing="rows"):
        joinable(mapped, target, TRAINED)
    full = open_head(write_head(tmp_path / "full", own_lm_head=True))
    assert joinable(full, target, TRAINED).target_ids.tolist() == list(range(VOCAB))
    artifact = converted(tmp_path, tmp_path / "mapped", draft_vocab=6)
    assert joinable(artifact.head, target, RANKED[:4]).target_ids.tolist() == sorted(RANKED[:6])
    # The head that it was made from is at hand beside it, until another stands there.
    found = joinable(artifact.head, target, RANKED[:6])
    assert (found.target_ids.tolist(), found.origin) == (TRAINED, f"the rows of {tmp_path / 'mapped'}")
    write_head(tmp_path / "mapped", draft_ids=TRAINED, seed=9)
    with pytest.raises(UsageError) as refused:
        joinable(artifact.head, target, RANKED[:6])
    assert "eagle-convert mapped --draft-vocab 6 --keep-rows" in str(refused.value)


@pytest.mark.parametrize("kind", ["eagle3", "eagle"])
def test_a_head_that_drafts_with_the_targets_rows(tmp_path: Path, target: TargetModel, kind: str) -> None:
    head = open_head(write_head(tmp_path / "head", kind=kind))
    found = joinable(head, target, [1, 2])
    assert found.rows.data_ptr() == target.lm_head.data_ptr()
    assert torch.equal(found.row_of_id, torch.arange(VOCAB, dtype=torch.int32))
    assert joinable(head, target, [1, 2], torch.bfloat16).rows.dtype == torch.bfloat16


def test_an_artifact_whose_rows_were_the_targets_own(tmp_path: Path, target: TargetModel) -> None:
    folder = tmp_path / "target"
    target.model.save_pretrained(folder)
    head = write_head(tmp_path / "head")
    artifact = converted(tmp_path, head, draft_vocab=4, target=folder)
    found = joinable(artifact.head, target, RANKED[:4])
    assert found.origin == "the target's LM head"
    assert len(found.target_ids) == VOCAB
    # Another target has other rows, whatever the manifest says.
    other = TargetModel(tiny_target("llama", seed=5), (2, 3, 3))
    with raises(UsageError, missing="rows"):
        joinable(artifact.head, other, RANKED[:4])


def test_more_rows_than_the_artifact_drafts_over_can_be_drafted_over(tmp_path: Path) -> None:
    model = tiny_target("llama")
    artifact = converted(tmp_path, write_head(tmp_path / "head", draft_ids=TRAINED), draft_vocab=4, keep_rows=9)
    small = SpeculativeModel.from_pretrained(model, artifact, depth=2, top_k=2)
    assert small.draft_vocab == 4
    large = small.with_draft_vocab(7)
    assert large.drafter.weights.draft_to_target.tolist() == sorted(RANKED[:7])
    assert large.opened is not None
    rows = large.opened.rank_rows(large.opened.choose(9), 9)
    assert large.opened.choose(9)[rows].tolist() == RANKED[:9]
    direct = SpeculativeModel.from_pretrained(model, artifact, draft_vocab=7, depth=2, top_k=2)
    whole = SpeculativeModel.from_pretrained(model, tmp_path / "head", depth=2, top_k=2)
    places = torch.searchsorted(whole.drafter.weights.draft_to_target, direct.drafter.weights.draft_to_target)
    for each in (large, direct):
        assert torch.equal(each.drafter.weights.lm_head, whole.drafter.weights.lm_head[places])
    with raises(UsageError, option="draft_vocab"):
        small.with_draft_vocab(10)
    (tmp_path / "slim" / KEPT_ROWS_NAME).unlink()
    assert SpeculativeModel.from_pretrained(model, tmp_path / "slim", depth=2, top_k=2).draft_vocab == 4


def test_kept_rows_follow_by_their_rank_in_a_comparison(tmp_path: Path) -> None:
    artifact = converted(tmp_path, write_head(tmp_path / "head", draft_ids=TRAINED), draft_vocab=4, keep_rows=9)
    model = SpeculativeModel.from_pretrained(tiny_target("llama"), artifact, depth=2, top_k=2)
    other = write_freq(tmp_path / "other.pt", RANKED[3::-1])
    for token_map in (None, other):
        (found,) = candidates(model, sizes=("full",), follow=("prompt",), token_map=token_map)
        follow = found.model.drafter.weights.follow
        assert follow is not None
        assert follow.ids.tolist() == RANKED[4:9]


def test_a_comparison_takes_the_sizes_that_an_artifact_keeps_rows_for(tmp_path: Path) -> None:
    artifact = converted(tmp_path, write_head(tmp_path / "head", draft_ids=TRAINED), draft_vocab=4, keep_rows=9)
    model = SpeculativeModel.from_pretrained(tiny_target("llama"), artifact, depth=2, top_k=2)

    def compared(token_map: Path | None, *sizes: int | str) -> dict[str, list[int]]:
        found = candidates(model, sizes=sizes, token_map=token_map)
        return {each.label: each.model.drafter.weights.draft_to_target.tolist() for each in found}

    own = f"all 4 of {VOCAB}"
    assert compared(None, "full", 4, 7) == {own: sorted(RANKED[:4]), "7": sorted(RANKED[:7])}
    other = write_freq(tmp_path / "other.pt", RANKED[::-1])
    assert compared(other, "full", 4) == {own: sorted(RANKED[:4]), "4": sorted(RANKED[5:9])}


def test_offline_nothing_is_fetched_later_either(tmp_path: Path) -> None:
    model, tree = tiny_target("llama"), {"depth": 2, "top_k": 2}
    artifact = converted(tmp_path, write_head(tmp_path / "head", draft_ids=TRAINED), draft_vocab=4, keep_rows=9)
    with HubServer() as hub, connected(hub, tmp_path / "home"):
        hub.add_model("someone/slim", {path.name: path.read_bytes() for path in artifact.folder.iterdir()})
        online = SpeculativeModel.from_pretrained(model, "someone/slim", **tree)
        offline = SpeculativeModel.from_pretrained(model, "someone/slim", offline=True, **tree)
        with raises(SourceError, offline=True):
            SpeculativeModel.from_pretrained(model, "someone/slim", draft_vocab=7, offline=True, **tree)
        with raises(SourceError, offline=True):
            offline.with_draft_vocab(7)
        with raises(SourceError, offline=True):
            offline.with_follow("prompt")
        assert hub.bytes_sent(KEPT_ROWS_NAME) == 0
        assert online.with_draft_vocab(7).draft_vocab == 7
        assert offline.with_follow("prompt").drafter.weights.num_joining == 5
