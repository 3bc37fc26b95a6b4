"""Walk the trees by the target's choices, commit the accepted paths, and list the slots that still run.

Four operations on the state of all slots, each a kernel with a PyTorch twin:

* `walk`: from the root while the target's choice is a drafted child; writes the path, the drafter's next input, the
  lengths, what ends the sequence, and a record for the host;
* `commit_kv`: the accepted nodes' keys and values of all layers move down to the end of the committed rows;
* `commit_features`: the accepted nodes' features become the drafter's next input;
* `list_active`: the slots that are still running, ascending.

The walk over the tree of `eagle_slim.runtime.tree` (root; A, B; C, D under A; E under B; G under C), the target
choosing A, then C, then Z::

    node     0  1  3        token   A  C  Z        accepted 3: two drafted tokens and the target's own
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...tree import Trees
from .slot_state import ENDED_BY_EOS, ENDED_BY_FAULT, ENDED_BY_LENGTH, RECORD_HEAD, RUNNING, SlotState

HEAD = tl.constexpr(RECORD_HEAD)


def walk_ref(
    choices: Tensor, trees: Trees, longest: int, state: SlotState, error: Tensor | None = None, append: bool = False
) -> None:
    """Accept a path in the tree of every active slot of ``state``.

    ``choices`` int32 [batch, nodes]: the target's next token after each node; ``longest``: nodes of the longest path,
    the root included. Tokens after the first end of sequence or the last allowed token are not kept, and the sequence
    ends there. ``error`` int32 [1]: not 0 where the trees are undefined; then nothing is accepted. ``append``: nothing
    was drafted, so the drafter has not taken ``new_tokens`` and the tokens come behind them; they must have room.
    """
    state.record.zero_()
    if error is not None and int(error):
        state.record[-1, 0] = error[0]
        return
    for place in range(min(choices.shape[0], int(state.active_count))):
        slot = int(state.active_slots[place])
        at, path, tokens, ranks = 0, [], [], [0]
        while at >= 0:
            path.append(at)
            tokens.append(int(choices[place, at]))
            siblings = trees.parents[slot] == at
            children = siblings & (trees.draft_tokens[slot] == tokens[-1])
            at = int(children.int().argmax()) if len(path) < longest and bool(children.any()) else -1
            if at >= 0:
                ranks.append(int(siblings[:at].sum()))
        accepted, left = len(path), int(state.max_generated[slot] - state.num_generated[slot])
        ids = set(state.eos_ids[slot].tolist()) - {-1}
        first_eos = next((i + 1 for i, token in enumerate(tokens) if token in ids), accepted + 1)
        kept = min(accepted, first_eos, left)
        ended = ENDED_BY_EOS if kept == first_eos else ENDED_BY_LENGTH if kept == left else RUNNING
        ended = ENDED_BY_FAULT if min(tokens[:kept], default=0) < 0 else ended
        blank = [-1] * (state.path.shape[1] - accepted)
        before = state.new_tokens[slot, : int(state.num_new[slot])].tolist() if append else []
        state.path[slot] = torch.tensor(path + blank)
        waiting = (before + tokens + blank)[: state.new_tokens.shape[1]]
        state.new_tokens[slot, : len(waiting)] = torch.tensor(waiting)
        state.record[slot] = torch.tensor([accepted, kept, ended, *tokens, *blank, *ranks, *[0] * len(blank)])
        state.lengths[slot] += accepted
        state.prefix[slot] += 0 if append else state.num_new[slot]
        state.num_new[slot] = len(before) + accepted
        state.num_generated[slot] += kept
        state.running[slot] = int(ended == RUNNING)


@triton.jit(do_not_specialize=["batch"])
def _walk_kernel(
    choice_ptr,
    trees,
    state,
    error_ptr,
    batch,
    NODES: tl.constexpr,
    BLOCK: tl.constexpr,
    LONGEST: tl.constexpr,
    WIDTH: tl.constexpr,
    ROOM: tl.constexpr,
    EOS: tl.constexpr,
    HAS_ERROR: tl.constexpr,
    APPEND: tl.constexpr,
):
    slot = tl.program_id(0)
    place = tl.load(state.active_inverse + slot)
    step = tl.arange(0, WIDTH)
    record = state.record + slot * (HEAD + 2 * WIDTH)
    if HAS_ERROR:
        error = tl.load(error_ptr)
        if slot == 0:
            tl.store(state.record + tl.num_programs(0) * (HEAD + 2 * WIDTH), error)
        place = tl.where(error != 0, -1, place)
    if (place < 0) | (place >= batch):
        tl.store(record, 0)
        return
    node = tl.arange(0, BLOCK)
    inside = node < NODES
    parent = tl.load(trees.parents + slot * NODES + node, mask=inside, other=-2).to(tl.int32)
    token = tl.load(trees.draft_tokens + slot * NODES + node, mask=inside, other=-1).to(tl.int32)
    choice = tl.load(choice_ptr + place * NODES + node, mask=inside, other=-1)
    path = tl.full((WIDTH,), -1, tl.int32)
    tokens = tl.full((WIDTH,), -1, tl.int32)
    ranks = tl.full((WIDTH,), 0, tl.int32)
    at = 0
    accepted = 0
    rank = 0
    for i in tl.static_range(LONGEST):
        on_path = at >= 0
        chosen = tl.sum(tl.where(node == at, choice, 0))
        path = tl.where((step == i) & on_path, at, path)
        tokens = tl.where((step == i) & on_path, chosen, tokens)
        ranks = tl.where((step == i) & on_path, rank, ranks)
        accepted += tl.where(on_path, 1, 0)
        is_sibling = (parent == at) & on_path & inside
        child = tl.min(tl.where(is_sibling & (token == chosen), node, NODES))
        rank = tl.sum(tl.where(is_sibling & (node < child), 1, 0))
        at = tl.where(child < NODES, child, -1)
    is_eos = tl.full((WIDTH,), 0, tl.int32)
    for i in tl.static_range(EOS):
        eos = tl.load(state.eos_ids + slot * EOS + i)
        is_eos = is_eos | ((tokens == eos) & (eos >= 0)).to(tl.int32)
    first_eos = tl.min(tl.where((is_eos != 0) & (step < accepted), step + 1, WIDTH + 1))
    generated = tl.load(state.num_generated + slot)
    left = tl.load(state.max_generated + slot) - generated
    kept = tl.minimum(tl.minimum(accepted, first_eos), left)
    ended = tl.where(kept == first_eos, 1, tl.where(kept == left, 2, 0))
    ended = tl.where(tl.min(tl.where(step < kept, tokens, 0)) < 0, 3, ended)
    num_new = tl.load(state.num_new + slot)
    before = num_new if APPEND else 0
    tl.store(state.path + slot * WIDTH + step, path)
    tl.store(state.new_tokens + slot * ROOM + before + step, tokens, mask=before + step < ROOM)
    tl.store(record + HEAD + step, tokens)
    tl.store(record + HEAD + WIDTH + step, ranks)
    tl.store(record, accepted)
    tl.store(record + 1, kept)
    tl.store(record + 2, ended)
    tl.store(state.lengths + slot, tl.load(state.lengths + slot) + accepted)
    if not APPEND:
        tl.store(state.prefix + slot, tl.load(state.prefix + slot) + num_new)
    tl.store(state.num_new + slot, before + accepted)
    tl.store(state.num_generated + slot, generated + kept)
    tl.store(state.running + slot, (ended == 0).to(tl.int32))


def walk(
    choices: Tensor, trees: Trees, longest: int, state: SlotState, error: Tensor | None = None, append: bool = False
) -> None:
    """Run `walk_ref` as one launch, a program a slot."""
    batch, nodes = choices.shape
    _walk_kernel[(len(state.lengths),)](
        choices,
        trees,
        state,
        state.record if error is None else error,
        batch,
        HAS_ERROR=error is not None,
        NODES=nodes,
        BLOCK=max(2, triton.next_power_of_2(nodes)),
        LONGEST=longest,
        WIDTH=state.path.shape[1],
        ROOM=state.new_tokens.shape[1],
        EOS=state.eos_ids.shape[1],
        APPEND=append,
        num_warps=1,
    )


def commit_kv_ref(state: SlotState, keys: Tensor, values: Tensor) -> None:
    """Move the accepted rows of the last walk, [layers, slots, kv_heads, capacity, head_dim], to the committed ones."""
    for slot in torch.nonzero(state.record[:-1, 0]).flatten().tolist():
        accepted = int(state.record[slot, 0])
        first = int(state.lengths[slot]) - accepted
        source = first + state.path[slot, :accepted].long()
        for cache in (keys, values):
            cache[:, slot, :, first : first + accepted] = cache[:, slot][:, :, source]


@triton.jit
def _commit_kv_kernel(
    state,
    key_ptr,
    value_ptr,
    stride_layer,
    stride_slot,
    stride_head,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    WIDTH: tl.constexpr,
):
    layer = (tl.program_id(0) // KV_HEADS).to(tl.int64)
    kv_head = tl.program_id(0) % KV_HEADS
    slot = tl.program_id(1).to(tl.int64)
    accepted = tl.load(state.record + slot * (HEAD + 2 * WIDTH))
    if accepted < 2:
        return
    first = tl.load(state.lengths + slot) - accepted
    base = layer * stride_layer + slot * stride_slot + kv_head * stride_head
    step = tl.arange(0, WIDTH)
    d = tl.arange(0, BLOCK_D)
    node = tl.load(state.path + slot * WIDTH + step)
    # The root lies where it belongs, and so does a path without gaps.
    moves = (step < accepted) & (node != step)
    mask = moves[:, None] & (d < HEAD_DIM)[None, :]
    source = base + (first + node)[:, None].to(tl.int64) * HEAD_DIM + d[None, :]
    target = base + (first + step)[:, None].to(tl.int64) * HEAD_DIM + d[None, :]
    key = tl.load(key_ptr + source, mask=mask, other=0.0)
    value = tl.load(value_ptr + source, mask=mask, other=0.0)
    # All sources are read before any is overwritten: another thread's target may be this one's source.
    tl.debug_barrier()
    tl.store(key_ptr + target, key, mask=mask)
    tl.store(value_ptr + target, value, mask=mask)


def commit_kv(state: SlotState, keys: Tensor, values: Tensor) -> None:
    """Run `commit_kv_ref` over layers, key heads and slots: as one launch, as two where values have another width."""
    pairs = [(keys, values)] if keys.shape == values.shape else [(keys, keys), (values, values)]
    for first, second in pairs:
        layers, slots, kv_heads, _, head_dim = first.shape
        _commit_kv_kernel[(layers * kv_heads, slots)](
            state,
            first,
            second,
            *first.stride()[:3],
            KV_HEADS=kv_heads,
            HEAD_DIM=head_dim,
            BLOCK_D=triton.next_power_of_2(head_dim),
            WIDTH=state.path.shape[1],
            num_warps=4,
        )


def commit_features_ref(state: SlotState, features: Tensor, nodes: int, first_row: Tensor, out: Tensor) -> None:
    """Copy the accepted nodes' features.

    ``features`` [rows, width] of the last forward; place i's node n is row ``i * nodes + first_row + n`` (``first_row``
    int32 [1]: 0 for trees, the last token's row for a prompt's chunk); ``out`` [slots, steps, width], beside
    ``new_tokens``.
    """
    for slot in torch.nonzero(state.record[:-1, 0]).flatten().tolist():
        accepted, last = int(state.record[slot, 0]), int(state.num_new[slot])
        first = int(state.active_inverse[slot]) * nodes + int(first_row)
        out[slot, last - accepted : last] = features[first + state.path[slot, :accepted].long()]


@triton.jit(do_not_specialize=["nodes"])
def _commit_features_kernel(
    state,
    feature_ptr,
    stride_row,
    first_row_ptr,
    out_ptr,
    stride_slot,
    stride_step,
    nodes,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
):
    step = tl.program_id(0)
    slot = tl.program_id(1).to(tl.int64)
    accepted = tl.load(state.record + slot * (HEAD + 2 * WIDTH))
    if step >= accepted:
        return
    to = tl.load(state.num_new + slot) - accepted + step
    place = tl.load(state.active_inverse + slot).to(tl.int64)
    row = place * nodes + tl.load(first_row_ptr) + tl.load(state.path + slot * WIDTH + step)
    column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    value = tl.load(feature_ptr + row * stride_row + column, mask=inside, other=0.0)
    tl.store(out_ptr + slot * stride_slot + to * stride_step + column, value, mask=inside)


def commit_features(state: SlotState, features: Tensor, nodes: int, first_row: Tensor, out: Tensor) -> None:
    """Run `commit_features_ref` as one launch."""
    size, block = features.shape[1], 1024
    width = state.path.shape[1]
    _commit_features_kernel[(width, len(state.lengths), triton.cdiv(size, block))](
        state,
        features,
        features.stride(0),
        first_row,
        out,
        *out.stride()[:2],
        nodes,
        SIZE=size,
        BLOCK=block,
        WIDTH=width,
        num_warps=4,
    )


def list_active_ref(state: SlotState) -> None:
    """List the running slots in ``active_slots``, ``active_inverse`` and ``active_count``."""
    running = torch.nonzero(state.running).flatten().to(torch.int32)
    state.active_slots.fill_(-1)
    state.active_slots[: len(running)] = running
    state.active_inverse.fill_(-1)
    state.active_inverse[running.long()] = torch.arange(len(running), dtype=torch.int32, device=running.device)
    state.active_count.fill_(len(running))


@triton.jit
def _list_active_kernel(running_ptr, active_slot_ptr, inverse_ptr, count_ptr, SLOTS: tl.constexpr, BLOCK: tl.constexpr):
    slot = tl.arange(0, BLOCK)
    inside = slot < SLOTS
    running = tl.load(running_ptr + slot, mask=inside, other=0)
    before = slot[:, None] < slot[None, :]
    place = tl.sum(tl.where(before, running[:, None], 0), 0)
    count = tl.sum(running)
    tl.store(inverse_ptr + slot, tl.where(running != 0, place, -1), mask=inside)
    chosen = (place[:, None] == slot[None, :]) & (running != 0)[:, None]
    listed = tl.sum(tl.where(chosen, slot[:, None], 0), 0)
    tl.store(active_slot_ptr + slot, tl.where(slot < count, listed, -1), mask=inside)
    tl.store(count_ptr, count)


def list_active(state: SlotState) -> None:
    """Run `list_active_ref` as one launch of one program."""
    slots = len(state.running)
    _list_active_kernel[(1,)](
        state.running,
        state.active_slots,
        state.active_inverse,
        state.active_count,
        SLOTS=slots,
        BLOCK=max(2, triton.next_power_of_2(slots)),
        num_warps=1,
    )
