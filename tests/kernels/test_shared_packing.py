"""A head is packed once, whatever number of slots, tree, length and draft vocabulary it drafts with."""

from dataclasses import replace

import pytest
import torch
from eagle_slim.runtime import DrafterConfig, SpeculativeModel, TreeConfig, UsageError, launch_drafter, open_target
from eagle_slim.runtime.drafter import packing
from eagle_slim.runtime.drafter.buffers import BLANK
from eagle_slim.runtime.drafter.drafter import Drafter, bound_of
from eagle_slim.runtime.drafter.packing import SharedPacking
from eagle_slim.vocab_tools.vocabulary import DraftVocab
from support.drafting import problem, random_head
from support.raising import raises
from support.tiny_models import VOCAB, tiny_target, write_head

TREE = TreeConfig(2, 3, 8)


@pytest.fixture
def packings(monkeypatch):
    """Draft vocabularies of the heads that have been packed."""
    sizes, pack = list[int](), packing.pack_head

    def counted(head, *arguments):
        sizes.append(head.draft_vocab)
        return pack(head, *arguments)

    monkeypatch.setattr(packing, "pack_head", counted)
    return sizes


def test_one_packing_for_a_model(tmp_path, packings):
    target, head = tiny_target("llama"), write_head(tmp_path)
    ranked = DraftVocab(torch.randperm(VOCAB, generator=torch.Generator().manual_seed(1)).numpy(), 1, VOCAB)
    loaded = SpeculativeModel.from_pretrained(open_target(target, target_backend="fused"), head, draft_vocab=ranked)
    ids = loaded.drafter.weights.draft_to_target.numpy()
    assert loaded.opened is not None
    order = torch.from_numpy(loaded.opened.rank_rows(ids, ranked))
    drafter = Drafter(loaded.drafter.weights, TREE, "triton", SharedPacking(loaded.drafter.weights, order))
    model = SpeculativeModel(loaded.target, drafter, opened=loaded.opened)

    def allocate(model, slots, tokens):
        decoder = model._decoders.get(slots, tokens, model.drafter.tree)
        assert decoder.drafts.drafter is not None
        assert decoder.drafts.drafter.cfg.draft_vocab == model.draft_vocab
        packed = decoder.drafts.drafter.weights.packed
        assert packed is not None
        assert not packed.launches(decoder.drafts.drafter.cfg)[1]

    for slots, tokens in ((1, 100), (2, 100), (4, 1500), (1, 100)):
        allocate(model, slots, tokens)
    allocate(model.with_draft_vocab(ranked.prefix(10)), 2, 100)
    allocate(model.with_draft_vocab(ranked.prefix(15)).with_tree(TreeConfig(3, 2, 7)), 1, 3000)
    assert packings == [VOCAB]
    allocate(model.with_draft_vocab(DraftVocab(ranked.target_ids[::-1].copy(), 1, VOCAB).prefix(10)), 2, 100)
    assert packings == [VOCAB, 10]


def test_two_slots_draft_over_fewer_rows_from_the_packing_of_one(packings, device):
    """Against the reference over these rows alone."""
    head, tree = random_head(device=device), TreeConfig(1, 3, 8)
    order = torch.randperm(head.draft_vocab, generator=torch.Generator().manual_seed(2)).to(device)
    packing = SharedPacking(head, order)
    packing.weights(DrafterConfig.of(head, tree, 1, 10))
    kept = order[:50].sort().values
    few = replace(head, lm_head=head.lm_head[kept], draft_to_target=head.draft_to_target[kept])
    assert packing.serves(few)
    cfg, features, own, bufs = problem(few, tree, [5, 9], [2, 1])
    packings.clear()
    keys, values = bufs.keys.clone(), bufs.values.clone()
    expected = [output.clone() for output in launch_drafter(cfg, features, own, bufs, "reference")]
    for backend in ("triton", "reference"):
        bufs.keys.copy_(keys)
        bufs.values.copy_(values)
        drafted = launch_drafter(cfg, features, packing.weights(cfg), bufs, backend)
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(drafted, expected, strict=True))
    assert packings == []


@pytest.mark.parametrize("backend", ["reference", pytest.param("triton", marks=pytest.mark.slow)])
def test_drafters_of_several_trees_over_the_same_inputs(backend: str, device: str) -> None:
    """Smaller trees of one kernel, and chains of another: each drafts what a drafter of that tree alone does."""
    head = random_head(device=device)
    wide = Drafter(head, bound_of([TreeConfig(1, 3, 12), TreeConfig(2, 3, 8)]), backend).on_slots(2, 30)
    assert wide.tree == TreeConfig(2, 3, 12)
    chains = wide.of_bound(TreeConfig(4, 1, 6))
    assert chains.error is wide.error
    wide.features.normal_(generator=torch.Generator(device).manual_seed(1))
    step = ([1, 0], [[3, 5], [7]], [0, 0])
    wide.bufs.set_step(*step)
    for drafter in (wide.of_tree(TreeConfig(1, 3, 7)), chains.of_tree(TreeConfig(2, 1, 4)), chains, wide):
        own = Drafter(head, drafter.tree, backend).on_slots(2, 30)
        own.features.copy_(wide.features)
        own.bufs.set_step(*step)
        for each in (drafter, own):
            each.draft()
        for name in BLANK:
            assert torch.equal(getattr(drafter.bufs, name), getattr(own.bufs, name)), (drafter.tree, name)
        assert drafter.cfg.with_tree(drafter.tree).num_tokens == own.cfg.num_tokens == wide.cfg.num_tokens


def test_trees_beyond_the_bound_are_refused():
    drafter = Drafter(random_head(), TreeConfig(2, 3, 12)).on_slots(1, 30)
    for tree in (TreeConfig(3, 3, 12), TreeConfig(2, 3, 13), TreeConfig(2, 2, 8)):
        with raises(UsageError, option="tree"):
            drafter.of_tree(tree)
    with raises(UsageError, option="tree"):
        drafter.of_bound(TreeConfig(7, 1, 8))
