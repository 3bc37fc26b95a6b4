"""A screen in front of the LM head: which rows it chooses, drafts behind it by PyTorch, and where a head has one."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from eagle_slim.convert import Artifact, VocabRequest, open_head
from eagle_slim.convert.errors import ArtifactError, CheckpointError, MismatchError
from eagle_slim.convert.head.screen_file import SCREEN_FORMAT, SCREEN_NAME, head_digest
from eagle_slim.convert.manifest import MANIFEST_NAME
from eagle_slim.convert.weights.checksums import sha256_file
from eagle_slim.runtime import SpeculativeModel, model
from eagle_slim.runtime.compare import CompareOptions
from eagle_slim.runtime.compare.candidates import find_candidates, rank_heads
from eagle_slim.runtime.drafter import choose
from eagle_slim.runtime.drafter.dimensions import DrafterConfig
from eagle_slim.runtime.drafter.drafter import Drafter
from eagle_slim.runtime.drafter.packed_weights import Weights
from eagle_slim.runtime.drafter.reference import ReferenceDraft
from eagle_slim.runtime.drafter.screen import Screen, best_of_groups, load_screen
from eagle_slim.runtime.errors import UsageError
from eagle_slim.runtime.settings import TreeConfig
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support.conversion import convert
from support.drafting import draft, random_head, union_head, with_follow, with_screen
from support.heads import write_freq
from support.raising import raises
from support.tiny_models import VOCAB, plain_greedy, random_prompts, tiny_target, write_head

pytestmark = pytest.mark.filterwarnings("ignore::eagle_slim.runtime.errors.AcceptanceWarning")

RANKED = [2, 9, 4, 20, 1, 5, 14, 7, 8, 11, 13, 17]


def test_the_example() -> None:
    scores = torch.tensor([1.0, 5, 3, 2, 3])
    assert best_of_groups(scores, 2, 1).tolist() == [2, 1]
    assert best_of_groups(scores, 2, 2).tolist() == [2, 4, 1, 3]
    # Groups 0 to 3 hold rows 0 and 4, 1, 2 and 3.
    assert best_of_groups(scores, 4, 2).tolist() == [4, 0, 1, -1, 2, -1, 3, -1]
    assert best_of_groups(torch.full((3,), float("-inf")), 1, 4).tolist() == [0, 1, 2, -1]


@pytest.mark.parametrize(("rows", "groups", "per_group"), [(1, 1, 1), (65, 3, 2), (64, 16, 4), (5, 7, 2), (40, 1, 16)])
def test_equals_a_sort_of_each_group(rows: int, groups: int, per_group: int) -> None:
    scores = torch.randint(-4, 5, (2, 3, rows), generator=torch.Generator().manual_seed(rows)).float()
    for found, own in zip(best_of_groups(scores, groups, per_group).view(6, -1), scores.view(6, rows), strict=True):
        wanted = []
        for group in range(groups):
            best = sorted(range(group, rows, groups), key=lambda row: (-own[row].item(), row))[:per_group]
            wanted += best + [-1] * (per_group - len(best))
        assert found.tolist() == wanted
        screen = Screen(torch.zeros(rows, 2), torch.zeros(2, 4), torch.zeros(4, 2), groups, per_group)
        assert screen.num_candidates == sum(row >= 0 for row in wanted)


@pytest.mark.parametrize("kind", ["eagle3", "eagle"])
def test_with_every_row_a_candidate_it_is_the_draft_without_one(kind: str) -> None:
    head = with_follow(random_head(kind), 60)
    tails = {0: tuple(range(60)), 1: (3, 4, 50)}
    plain = draft(head, tails)
    assert draft(with_screen(head, head.hidden, head.draft_vocab, 1), tails) == plain
    assert draft(with_screen(head, 4, 6, 1), tails) != plain


def test_rows_that_joined_are_all_scored() -> None:
    head = with_screen(with_follow(random_head(), 60), 8, 6, 2)
    tails = {0: tuple(range(60)), 1: (3, 4, 50)}
    mine = draft(head, tails)
    for slot, tail in tails.items():
        assert mine[slot] == draft(union_head(head, tail))[slot]


def test_candidates_have_the_logits_of_the_lm_head() -> None:
    head = with_screen(random_head(), 16, 7, 3)
    assert head.screen is not None
    cache = (torch.zeros(1, 2, 8, 16), torch.zeros(1, 2, 8, 16))
    reference = ReferenceDraft(head, TreeConfig(1, 2, 5), torch.tensor([0]), torch.tensor([0]), cache)
    output = torch.randn(1, 5, head.hidden, generator=torch.Generator().manual_seed(2))
    plain = ReferenceDraft(replace(head, screen=None), reference.tree, reference.slots, reference.lengths, cache)
    logits, every = reference.logits(output), plain.logits(output)
    chosen = logits.isfinite()
    assert (chosen.sum(-1) == 21).all()
    torch.testing.assert_close(logits[chosen], every[chosen])
    # A screen of a quarter of the columns finds most of the best.
    best = every.topk(4).indices
    assert chosen.gather(-1, best).float().mean() > 0.6


def test_a_screen_of_other_rows() -> None:
    """Known ids keep their rows, others get W_i P."""
    head = with_screen(random_head(), 16, 7, 3)
    assert head.screen is not None
    ids = torch.tensor([3, *head.draft_to_target[5:9].tolist()]).sort().values
    rows = torch.randn(5, head.hidden, generator=torch.Generator().manual_seed(3))
    own = head.draft_to_target.numpy()
    other = head.screen.over(own, ids, rows)
    for place, token in enumerate(ids.tolist()):
        known = token in own
        wanted = head.screen.rows[list(own).index(token)] if known else rows[place] @ head.screen.project
        torch.testing.assert_close(other.rows[place], wanted)


def test_what_does_not_fit_is_refused() -> None:
    head = with_screen(random_head(), 16, 4, 1)
    assert head.screen is not None
    with raises(UsageError, tensor="screen.rows"):
        replace(head, screen=replace(head.screen, rows=head.screen.rows[1:]))
    with raises(UsageError, tensor="screen.project"):
        replace(head.screen, project=head.screen.down)
    with raises(UsageError, option="top_k", found=5):
        Drafter(head, TreeConfig(2, 5, 20))
    fewer = head.of_rows(torch.arange(0, 100, 2))
    assert fewer.screen is not None
    assert torch.equal(fewer.screen.rows, head.screen.rows[:100:2])


def add_screen(folder: Path, **metadata: str) -> Screen:
    """Write a screen of rank 8 beside an artifact's weights and record it in the manifest."""
    head = open_head(folder)
    lm_head = head.tensors.get("lm_head.weight").double()
    project = torch.linalg.eigh(lm_head.T @ lm_head).eigenvectors.flip(1)[:, :8].float().contiguous()
    rows = (lm_head.float() @ project).to(head.dtype)
    found = {
        "format": SCREEN_FORMAT, "rank": "8", "groups": "5", "per_group": "2",
        "draft_vocab_size": str(len(rows)), "head_sha256": head_digest(head), **metadata,
    }  # fmt: skip
    tensors = {"screen.rows": rows, "screen.down": project.T.contiguous(), "screen.project": project}
    path, manifest = folder / SCREEN_NAME, json.loads((folder / MANIFEST_NAME).read_text())
    save_file(tensors, path, found)
    manifest["files"][SCREEN_NAME] = {"size_bytes": path.stat().st_size, "sha256": sha256_file(path)}
    (folder / MANIFEST_NAME).write_text(json.dumps(manifest))
    return Screen(rows, tensors["screen.down"], project, 5, 2)


def converted(folder: Path, name: str = "slim", draft_vocab: int = 9, seed: int = 0, **options: object) -> Path:
    head = write_head(folder / f"{name}-head", draft_ids=sorted(RANKED), seed=seed)
    request = VocabRequest(token_map=write_freq(folder / "freq.pt", RANKED))
    convert(head, vocabulary=request, out=folder / name, draft_vocab=draft_vocab, **options)
    return folder / name


def test_a_screen_of_another_head_is_refused(tmp_path: Path) -> None:
    slim = converted(tmp_path)
    with raises(CheckpointError):
        load_screen(slim, open_head(slim))
    wanted = add_screen(slim)
    found = load_screen(slim, open_head(slim))
    assert torch.equal(found.rows, wanted.rows)
    assert (found.groups, found.per_group) == (5, 2)
    other, smaller = converted(tmp_path, "other", seed=4), converted(tmp_path, "smaller", draft_vocab=8)
    with raises(MismatchError, key="head_sha256"):
        load_screen(slim, open_head(other))
    with raises(MismatchError, key="draft_vocab_size", expected=8, found=9):
        load_screen(slim, open_head(smaller))
    for key, value in (("format", "2"), ("rank", "x"), ("groups", "0"), ("per_group", "-1")):
        add_screen(slim, **{key: value})
        with raises(ArtifactError, key=key, found=value):
            load_screen(slim, open_head(slim))
    add_screen(slim)
    tensors = {**load_file(slim / SCREEN_NAME), "screen.rows": torch.zeros(9, 7)}
    with safe_open(slim / SCREEN_NAME, "pt") as file:
        metadata = file.metadata()
    save_file(tensors, slim / SCREEN_NAME, metadata)
    with raises(ArtifactError, tensor="screen.rows"):
        load_screen(slim, open_head(slim))


def load(slim: Path, **options: object) -> SpeculativeModel:
    return SpeculativeModel.from_pretrained(
        tiny_target("llama"), Artifact.load(slim), depth=2, top_k=3, total_tokens=10, **options
    )


def test_options(tmp_path: Path) -> None:
    slim = converted(tmp_path, keep_rows=12)
    with raises(UsageError, option="screen", missing="screen"):
        load(slim, screen=True)
    for found in ("auto", None):
        with raises(UsageError, option="screen", found=found):
            load(slim, screen=found)
    own = add_screen(slim)
    assert load(slim).drafter.weights.screen is None
    assert "screen" not in load(slim).drafting

    asked = load(slim, screen=True)
    assert asked.drafter.weights.screen is not None
    assert torch.equal(asked.drafter.weights.screen.rows, own.rows.to(asked.dtype))
    behind = "behind a screen of rank 8"
    assert asked.drafting.endswith(behind)
    prompts = random_prompts([5, 2])
    output = asked.generate(prompts, max_new_tokens=8)
    assert output.token_ids == [plain_greedy(asked.target.model, prompt, 8) for prompt in prompts]
    assert behind in output.stats.path

    compared = CompareOptions(sizes=("full", 5), screens=(True, False))
    labels = {
        each.label: each.screen_rank for each in find_candidates(rank_heads([asked], compared, print), compared, print)
    }
    whole = f"all 9 of {VOCAB}"
    assert labels == {f"{whole} + screen": 8, whole: 0, "5 + screen": 8, "5": 0}
    assert asked.with_screen(True).drafter.weights is asked.drafter.weights
    bare = SpeculativeModel(asked.target, asked.with_screen(False).drafter)
    with raises(UsageError):
        bare.with_screen(True)

    larger = asked.with_draft_vocab(12).drafter.weights
    assert larger.screen is not None
    torch.testing.assert_close(larger.screen.rows, larger.lm_head @ larger.screen.project)
    assert asked.with_tree(TreeConfig(1, 2, 5)).drafting == asked.drafting


def test_the_kernel_drafts_without_a_screen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for together they are refused wherever they meet; "auto" takes the reference, and says so."""
    # As on a GPU, but for the device: nothing is launched.
    monkeypatch.setattr(choose, "check_drafter", lambda *_: None)
    monkeypatch.setattr(choose, "check_draft_weights", lambda *_: None)
    monkeypatch.setattr(model, "check_drafter", lambda *_: None)
    monkeypatch.setattr(model, "check_draft_weights", lambda *_: None)
    slim = converted(tmp_path)
    add_screen(slim)
    with raises(UsageError, option="drafter", found="triton", expected="reference"):
        load(slim, screen=True, drafter="triton")
    with raises(UsageError, option="draft_weights", found="fp8", expected="auto"):
        load(slim, screen=True, draft_weights="fp8")

    asked = load(slim, screen=True)
    assert (asked.drafter.name, asked.drafter_reason) == (
        "reference", "the persistent kernel has no screens",
    )  # fmt: skip
    with raises(UsageError, option="drafter", found="triton"):
        asked.with_drafter("triton")
    with raises(UsageError, option="draft_weights", found="fp8"):
        asked.with_drafter("auto", "fp8")
    fast = load(slim, drafter="triton")
    assert fast.with_screen(False).drafter.name == "triton"
    with raises(UsageError, option="drafter", found="triton"):
        fast.with_screen(True)

    head = with_screen(random_head(hidden=64), 16, 7, 3)
    with raises(UsageError, option="backend", found="triton"):
        Weights.pack(head, DrafterConfig.of(head, TreeConfig(2, 3, 10), 1, 32))
