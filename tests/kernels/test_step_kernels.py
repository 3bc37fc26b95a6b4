"""The kernels around a step's products against their twins: norms and rotation of pairs, rows and acceptance."""

import random

import pytest
import torch
from eagle_slim.runtime.drafter.kernels import pair_rows
from eagle_slim.runtime.step.kernels import acceptance, prompt_chunks, slot_state
from eagle_slim.runtime.step.kernels.prompt_chunks import ChunkRows, PromptBox
from eagle_slim.runtime.step.kernels.slot_state import SlotState
from eagle_slim.runtime.target.kernels import tree_rows
from eagle_slim.runtime.target.kernels.tree_rows import ForwardRows
from eagle_slim.runtime.tree import Trees, layout_tree
from kernels.tolerances import OP_ATOL

# bf16 stores are truncated in the interpreter, so a last place may differ there.
DTYPES = [torch.float32, torch.float16]


def random_parents(nodes, width, seed=0):
    """A random tree whose paths have at most ``width`` nodes: int64 [nodes]."""
    generator = random.Random(seed)
    parents, depth = [-1], [0]
    for node in range(1, nodes):
        parent = generator.choice([n for n in range(max(0, node - 8), node) if depth[n] < width - 1] or [0])
        parents.append(parent)
        depth.append(depth[parent] + 1)
    return torch.tensor(parents)


def fields_of(tree, device):
    return [field.to(device) for field in (tree.draft_tokens, tree.parents, tree.tree_position_ids)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "hidden"), [(1, 64), (7, 96), (3, 1000)])
def test_norm_rows(device, dtype, rows, hidden):
    x = torch.randn(rows, hidden, dtype=dtype, device=device)
    weight = torch.randn(hidden, dtype=dtype, device=device)
    results = []
    for run in (pair_rows.norm_rows, pair_rows.norm_rows_ref):
        wide = x.new_zeros(rows, 2 * hidden)
        run(x, weight, 1e-5, wide[:, hidden:])
        results.append(wide)
    torch.testing.assert_close(*results, rtol=1e-3, atol=OP_ATOL[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 16), (6, 2, 24), (0, 3, 8)])
@pytest.mark.parametrize("with_extras", [True, False])
def test_rotate_append(device, dtype, heads, kv_heads, head_dim, with_extras):
    width = (heads + 2 * kv_heads) * head_dim
    qkv = torch.randn(6, width, dtype=dtype, device=device)
    bias = torch.randn(width, dtype=dtype, device=device) if with_extras else None
    norms = tuple(torch.randn(head_dim, dtype=dtype, device=device) for _ in range(2)) if with_extras else None
    angles = torch.rand(20, head_dim // 2, device=device) * 6
    ints = {"dtype": torch.int32, "device": device}
    positions, slots = torch.tensor([4, 5, 6, 0, 9, 9], **ints), torch.tensor([2, 0], **ints)
    kv_rows = torch.tensor([4, 5, 6, 0, 3, -1], **ints)
    results = []
    for run in (pair_rows.rotate_append, pair_rows.rotate_append_ref):
        x, keys = qkv.clone(), torch.zeros(3, kv_heads, 10, head_dim, dtype=dtype, device=device)
        values = torch.zeros_like(keys)
        run(x, bias, norms, 1e-6, (angles.cos(), angles.sin()), positions, slots, kv_rows, keys, values)
        results.append((x[:, : heads * head_dim], keys, values))
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted, rtol=2e-3, atol=OP_ATOL[dtype])


@pytest.mark.parametrize(("nodes", "places"), [(1, 1), (7, 3), (60, 2), (65, 1), (128, 2)])
def test_tree_rows(device, nodes, places):
    slots = 4
    parents = torch.stack([random_parents(nodes, 7, seed) for seed in range(slots)])
    tree = layout_tree(torch.randint(0, 99, (slots, nodes)), parents, path_width=7)
    lengths = torch.tensor([5, 0, 17, 3], dtype=torch.int32, device=device)
    active = torch.tensor([2, 3, -1, -1], dtype=torch.int32, device=device)
    count = torch.tensor([2], dtype=torch.int32, device=device)
    trees = Trees(active, count, *fields_of(tree, device))
    found, wanted = (ForwardRows.allocate(places, nodes, lengths) for _ in range(2))
    for rows, run in ((found, tree_rows.tree_rows), (wanted, tree_rows.tree_rows_ref)):
        for tensor in (rows.tokens, rows.positions, rows.kv_rows):
            tensor.fill_(-7)
        run(trees, rows)
    assert_equal_rows(found, wanted)
    mask = tree.tree_mask[2, 0]
    assert torch.equal(found.attention.tree_mask()[0].cpu(), mask)


def assert_equal_rows(found, wanted):
    for name in ("tokens", "positions", "kv_rows"):
        assert torch.equal(getattr(found, name), getattr(wanted, name)), name
    for name in ("slots", "counts", "paths", "depths"):
        mine, theirs = getattr(found.attention, name), getattr(wanted.attention, name)
        assert mine is theirs is None or torch.equal(mine, theirs), name


@pytest.mark.parametrize(("length", "size", "nodes"), [(0, 8, 8), (0, 3, 8), (8, 30, 8), (24, 30, 8), (0, 300, 512)])
def test_prompt_chunks(device, length, size, nodes):
    results = []
    for begin, lay_out, end in (
        (prompt_chunks.begin_prompt, prompt_chunks.chunk_rows, prompt_chunks.end_chunk),
        (prompt_chunks.begin_prompt_ref, prompt_chunks.chunk_rows_ref, prompt_chunks.end_chunk_ref),
    ):
        box = PromptBox.allocate(600, device)
        box.numbers.copy_(torch.tensor([1, size, 9, length, 2, 7, *[-1] * 6]))
        box.tokens.copy_(torch.arange(600) * 3)
        state = some_state(3, device, [0, 2], num_eos=8)
        begin(box, state)
        assert int(state.lengths[1]) == length
        rows = ChunkRows.allocate(nodes, state.lengths)
        lay_out(box, rows)
        end(box, nodes, state)
        results.append((rows, state))
    (rows, state), (wanted_rows, wanted) = results
    assert_equal_rows(rows.forward, wanted_rows.forward)
    for name in ("next_tokens", "pair_rows", "last_row", "first_row"):
        assert torch.equal(getattr(rows, name), getattr(wanted_rows, name)), name
    assert_equal_states(state, wanted)
    is_last = length + nodes >= size
    assert state.active_slots.tolist() == ([1, -1, -1] if is_last else [-1, -1, -1])
    assert int(state.lengths[1]) == (size - 1 if is_last else length + nodes)
    count = min(nodes, size - length)
    assert rows.forward.tokens[:count].tolist() == [3 * (length + row) for row in range(count)]
    assert rows.pair_rows[:count].tolist() == [length + row if length + row + 1 < size else -1 for row in range(count)]


def some_state(slots, device, running, num_eos=2):
    state = SlotState.allocate(slots, num_eos, device)
    state.lengths.copy_(torch.arange(slots) * 3 + 4)
    state.num_new.fill_(2)
    state.prefix.copy_(state.lengths - 2)
    state.max_generated.fill_(100)
    for slot in running:
        state.running[slot] = 1
    acceptance.list_active_ref(state)
    return state


def assert_equal_states(found, wanted):
    for name in found._fields:
        assert torch.equal(getattr(found, name), getattr(wanted, name)), name


@pytest.mark.parametrize(
    ("eos", "most", "kept", "ended"),
    [
        ([-1, -1], 100, 3, slot_state.RUNNING),
        ([5, -1], 100, 2, slot_state.ENDED_BY_EOS),
        ([8, 7], 100, 3, slot_state.ENDED_BY_EOS),
        ([7, -1], 2, 2, slot_state.ENDED_BY_LENGTH),
        ([-1, -1], 3, 3, slot_state.ENDED_BY_LENGTH),
        ([5, -1], 2, 2, slot_state.ENDED_BY_EOS),
    ],
)
@pytest.mark.parametrize("walk", [acceptance.walk, acceptance.walk_ref])
def test_ends_in_the_middle_of_a_path(device, walk, eos, most, kept, ended):
    """root 9; A 1, B 2; C 3, D 4 under A; E 5 under B; G 6 under C; the target chooses B, E, then 7."""
    tree = layout_tree(torch.tensor([[9, 1, 2, 3, 4, 5, 6]]), torch.tensor([[-1, 0, 0, 1, 1, 2, 3]]), path_width=4)
    state = some_state(1, device, [0])
    state.eos_ids[0] = torch.tensor(eos)
    state.max_generated[0] = most
    choices = torch.tensor([[2, 0, 5, 0, 0, 7, 0]], dtype=torch.int32, device=device)
    walk(choices, Trees(state.active_slots, state.active_count, *fields_of(tree, device)), 4, state)
    assert state.record[0, :3].tolist() == [3, kept, ended]
    assert int(state.running[0]) == int(ended == slot_state.RUNNING)
    assert int(state.num_generated[0]) == kept
    if ended == slot_state.RUNNING:
        assert state.path[0, :4].tolist() == [0, 2, 5, -1]
        assert state.record[0, 3:7].tolist() == [2, 5, 7, -1]
        # Ranks: of the root, of B, which A precedes, and of E.
        assert state.record[0, 3 + 16 : 3 + 20].tolist() == [0, 1, 0, 0]
        assert (state.lengths[0], state.prefix[0], state.num_new[0]) == (4 + 3, 4, 3)


@pytest.mark.parametrize("walk", [acceptance.walk, acceptance.walk_ref])
def test_plain_steps_keep_what_the_drafter_has_not_taken(device, walk):
    state = some_state(2, device, [1])
    state.new_tokens[1, :2] = torch.tensor([5, 6])
    root = torch.full((2, 1), -1, dtype=torch.int64, device=device)
    trees = Trees(state.active_slots, state.active_count, root, root, torch.zeros_like(root))
    features, out = torch.arange(8.0, device=device)[:, None].expand(8, 40).contiguous(), torch.zeros(2, 16, 40)
    out = out.to(device)
    first = torch.zeros(1, dtype=torch.int32, device=device)
    for token in (7, 8):
        walk(torch.tensor([[token]], dtype=torch.int32, device=device), trees, 1, state, append=True)
        acceptance.commit_features(state, features + token, 1, first, out)
    assert state.new_tokens[1, :5].tolist() == [5, 6, 7, 8, -1]
    # Lengths began with 7 and prefixes with 5.
    assert (state.lengths[1], state.prefix[1], state.num_new[1], state.num_generated[1]) == (9, 5, 4, 2)
    assert out[1, :5, 0].tolist() == [0, 0, 7, 8, 0]


@pytest.mark.parametrize(("nodes", "width"), [(1, 1), (7, 4), (60, 7), (128, 12)])
def test_acceptance_equals_its_twins(device, nodes, width):
    slots, places = 4, 4
    parents = torch.stack([random_parents(nodes, width, seed) for seed in range(slots)])
    tree = layout_tree(torch.randint(0, 5, (slots, nodes)), parents, path_width=width)
    choices = torch.randint(0, 5, (places, nodes), dtype=torch.int32, device=device)
    wanted = some_state(slots, device, [0, 2, 3])
    wanted.eos_ids[:, 0] = 4
    wanted.num_generated.copy_(torch.tensor([0, 0, 98, 3]))
    found = SlotState(*(tensor.clone() for tensor in wanted))
    trees = Trees(wanted.active_slots, wanted.active_count, *fields_of(tree, device))
    acceptance.walk_ref(choices, trees, width, wanted)
    acceptance.walk(choices, trees, width, found)
    assert_equal_states(found, wanted)

    keys = torch.randn(2, slots, 2, 30 + nodes, 12, device=device)
    caches = [(keys.clone(), -keys), (keys.clone(), -keys)]
    acceptance.commit_kv(found, *caches[0])
    acceptance.commit_kv_ref(wanted, *caches[1])
    for mine, theirs in zip(*caches, strict=True):
        assert torch.equal(mine, theirs)

    features = torch.randn(places * nodes + 3, 40, device=device)
    first = torch.tensor([3], dtype=torch.int32, device=device)
    out = [torch.zeros(slots, 16, 40, device=device) for _ in range(2)]
    acceptance.commit_features(found, features, nodes, first, out[0])
    acceptance.commit_features_ref(wanted, features, nodes, first, out[1])
    assert torch.equal(*out)

    acceptance.list_active(found)
    acceptance.list_active_ref(wanted)
    assert_equal_states(found, wanted)
