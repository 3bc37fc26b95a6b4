"""Rows that may join a draft vocabulary: where each kind of head has them, and what is said where there are none."""

from pathlib import Path

import numpy as np
import pytest
import torch
from eagle_slim.convert import Artifact, VocabRequest, open_head
from eagle_slim.runtime.drafter.weights import JoinableRows, load_joinable_rows
from eagle_slim.runtime.errors import NothingToFollowError, UsageError
from eagle_slim.runtime.target.wrapper import TargetModel
from safetensors.torch import load_file
from support.conversion import convert
from support.heads import write_freq
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


def ids_of(found: JoinableRows) -> list[int]:
    """The ids that have a row, ascending."""
    return torch.nonzero(found.row_of_id >= 0).flatten().tolist()


def joinable(head, target, draft_ids):
    return load_joinable_rows(head, target, np.array(draft_ids))


def test_rows_of_an_artifact_beyond_the_draft_vocabulary(tmp_path: Path, target: TargetModel) -> None:
    head = write_head(tmp_path / "head", draft_ids=TRAINED)
    artifact = converted(tmp_path, head, draft_vocab=9)
    found = joinable(artifact.head, target, sorted(RANKED[:4]))
    assert found.rank_order.tolist() == RANKED[:9]
    assert ids_of(found) == sorted(RANKED[:9])
    source = load_file(head / "model.safetensors")["lm_head.weight"]
    for token in RANKED[:9]:
        assert torch.equal(found.rows[found.row_of_id[token]], source[TRAINED.index(token)])
    assert (found.row_of_id.dtype, found.row_of_id.shape) == (torch.int32, (VOCAB,))
    with raises(UsageError, option="follow"):
        joinable(artifact.head, target, RANKED[:9])


def test_a_head_with_more_rows_than_are_drafted_over(tmp_path: Path, target: TargetModel) -> None:
    mapped = open_head(write_head(tmp_path / "mapped", draft_ids=TRAINED))
    assert ids_of(joinable(mapped, target, TRAINED[:3])) == TRAINED
    with raises(NothingToFollowError):
        joinable(mapped, target, TRAINED)
    full = open_head(write_head(tmp_path / "full", own_lm_head=True))
    assert ids_of(joinable(full, target, TRAINED)) == list(range(VOCAB))


@pytest.mark.parametrize("kind", ["eagle3", "eagle"])
def test_a_head_that_drafts_with_the_targets_rows(tmp_path: Path, target: TargetModel, kind: str) -> None:
    head = open_head(write_head(tmp_path / "head", kind=kind))
    found = joinable(head, target, [1, 2])
    assert found.rows.data_ptr() == target.lm_head.data_ptr()
    assert torch.equal(found.row_of_id, torch.arange(VOCAB, dtype=torch.int32))


def test_an_artifact_whose_rows_were_the_targets_own(tmp_path: Path, target: TargetModel) -> None:
    folder = tmp_path / "target"
    target.model.save_pretrained(folder)
    head = write_head(tmp_path / "head")
    artifact = converted(tmp_path, head, draft_vocab=4, target=folder)
    found = joinable(artifact.head, target, RANKED[:4])
    assert ids_of(found) == list(range(VOCAB))
    # Another target has other rows, whatever the manifest says.
    other = TargetModel(tiny_target("llama", seed=5), (2, 3, 3))
    with raises(NothingToFollowError):
        joinable(artifact.head, other, RANKED[:4])
