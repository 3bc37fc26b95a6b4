"""EAGLE_SLIM_CHECK=1: silent on sound steps; for each kind of wrong number, its slot, phase and value."""

import re

import pytest
from eagle_slim.runtime import CheckError, DrafterError, SpeculativeModel, TreeConfig
from eagle_slim.runtime.drafter.reference import draft_ref
from eagle_slim.runtime.step.kernels import acceptance
from support.tiny_models import random_prompts, tiny_target, write_head

pytestmark = pytest.mark.filterwarnings("ignore::eagle_slim.runtime.errors.AcceptanceWarning")
TREE = {"tree": TreeConfig(3, 4, 12)}
PROMPTS = random_prompts([3, 9, 5])


@pytest.fixture(autouse=True)
def _checked(monkeypatch):
    monkeypatch.setenv("EAGLE_SLIM_CHECK", "1")


def build(tmp_path, **options):
    return SpeculativeModel.from_pretrained(tiny_target("llama"), write_head(tmp_path / "head"), **(TREE | options))


def test_sound_steps_pass_with_the_same_answers(tmp_path, monkeypatch):
    for tree, options in (
        (TreeConfig(3, 4, 12), {}),
        (TreeConfig(3, 1, 5), {"temperature": 0.8, "top_p": 0.9, "seed": 3}),
        (TreeConfig(3, 4, 12), {"speculative": False}),
        (TreeConfig(3, 4, 12), {"repetition_penalty": 1.2, "max_slots": 2, "ignore_eos": True}),
    ):
        answers = []
        for is_checked in "10":
            monkeypatch.setenv("EAGLE_SLIM_CHECK", is_checked)
            answers.append(build(tmp_path, tree=tree).generate(PROMPTS, max_new_tokens=12, **options).token_ids)
        assert answers[0] == answers[1]


def spoil_draft(spoil):
    def draft(cfg, features, head, bufs):
        draft_ref(cfg, features, head, bufs)
        spoil(bufs)

    return draft


DRAFT = {
    "tokens": (lambda b: b.draft_tokens[1, 5].fill_(24), "slot 1, node 5: the token is 24, expected an id below 24"),
    "root": (lambda b: b.draft_tokens[2, 0].sub_(1), "slot 2: the root's token is"),
    "parents": (lambda b: b.parents[0, 4].fill_(7), "slot 0, node 4: the parent is 7, expected a node before it"),
    "positions": (lambda b: b.tree_position_ids[1, 3].fill_(9), "slot 1, node 3: the position is 9"),
    "mask": (lambda b: b.tree_mask[2, 0, 3, 11].fill_(True), "slot 2, node 3, seen node 11: the mask is 1"),
    "spans": (lambda b: b.prefix[1].add_(1), "slot 1: prefix + num_new is"),
}


@pytest.mark.parametrize("name", DRAFT)
def test_wrong_drafts_are_named(tmp_path, monkeypatch, name):
    spoil, message = DRAFT[name]
    monkeypatch.setattr("eagle_slim.runtime.drafter.launch.draft_ref", spoil_draft(spoil))
    model = build(tmp_path)
    with pytest.raises(CheckError, match="after draft, " + re.escape(message)):
        model.generate(PROMPTS, max_new_tokens=12, ignore_eos=True)


@pytest.mark.parametrize("name", ["tokens", "root", "parents", "positions", "mask", "nothing"])
def test_a_function_that_drafts_no_tree_is_told(tmp_path, monkeypatch, name):
    monkeypatch.delenv("EAGLE_SLIM_CHECK")
    model = build(tmp_path, drafter=spoil_draft(DRAFT[name][0]) if name in DRAFT else lambda *_: None)
    with pytest.raises(DrafterError, match=r"no tree: slot \d, node"):
        model.generate(PROMPTS, max_new_tokens=12, ignore_eos=True)


@pytest.mark.parametrize("what", ["logits", "features"])
def test_numbers_of_a_forward_are_named(tmp_path, monkeypatch, what):
    model, calls = build(tmp_path), []
    forward = model.target.runs.forward

    def spoiled(rows, cache, bufs, last_row=None):
        forward(rows, cache, bufs, last_row)
        calls.append(last_row is None)
        # The second step: both slots run, of 12 rows each.
        if sum(calls) == 2:
            {"logits": bufs.logits, "features": bufs.features}[what][14, 3] = float("inf")

    monkeypatch.setattr(model.target.runs, "forward", spoiled)
    at = {"logits": "id 3: the logit", "features": "number 3: the feature"}[what]
    with pytest.raises(CheckError, match=rf"after verify, slot 1, node 2, {at}.* is inf, expected"):
        model.generate(PROMPTS[:2], max_new_tokens=12, ignore_eos=True)
    # A fault does not outlive its call.
    monkeypatch.undo()
    assert len(model.generate(PROMPTS[0], max_new_tokens=4, ignore_eos=True).token_ids[0]) == 4


ACCEPTED = {
    "path": (lambda s: s.path[1].fill_(3), "slot 1, step 0: the path's node is 3"),
    "token": (lambda s: s.new_tokens[0, 0].add_(30), "slot 0, step 0: the token is"),
    "length": (lambda s: s.lengths[1].add_(1), "slot 1: prefix + num_new is"),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_wrong_paths_and_spans_are_named(tmp_path, monkeypatch, name):
    (spoil, message), walk = ACCEPTED[name], acceptance.walk_ref

    def spoiled(choices, trees, longest, state, *rest):
        walk(choices, trees, longest, state, *rest)
        # Steps alone: there both slots have taken part.
        if int((state.record[:-1, 0] > 0).sum()) == 2:
            spoil(state)

    monkeypatch.setattr(acceptance, "walk_ref", spoiled)
    with pytest.raises(CheckError, match="after accept, " + re.escape(message)):
        build(tmp_path).generate(PROMPTS[:2], max_new_tokens=12, ignore_eos=True)
