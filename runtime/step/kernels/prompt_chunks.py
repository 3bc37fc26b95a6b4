"""Run a prompt, which the host uploads once as a `PromptBox`, into a slot chunk by chunk.

`begin_prompt` empties the slot, except for rows that the prompt reuses; for every chunk `chunk_rows` lays out the next
rows, from the slot's length on, and `end_chunk` adds them to the length. The last chunk lists the slot in the
`SlotState` of `acceptance.walk`, which takes the choice after the prompt's last token as that after a root.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...target.kernels.tree_rows import ForwardRows
from .slot_state import SlotState

MAX_EOS = 8
_HEAD = 4


@dataclass(frozen=True)
class PromptBox:
    """Prompt as the host uploads it: ``tokens`` int32 [capacity] and ``numbers`` int32 [4 + 8].

    The numbers: slot, tokens of the prompt, most new tokens, tokens whose rows the slot already has (not the prompt's
    last one), then end-of-sequence ids padded with -1.
    """

    numbers: Tensor
    tokens: Tensor

    @classmethod
    def allocate(cls, capacity: int, device: torch.device | str) -> PromptBox:
        """Allocate an empty box: a prompt of no tokens for slot 0."""
        numbers = torch.zeros(_HEAD + MAX_EOS, dtype=torch.int32, device=device)
        return cls(numbers, torch.zeros(capacity, dtype=torch.int32, device=device))


@dataclass(frozen=True)
class ChunkRows:
    """A chunk of a prompt: the rows of the forward, and the (feature, next token) pairs for the drafter."""

    forward: ForwardRows
    next_tokens: Tensor
    """int32 [nodes]: the token after each row's."""
    pair_rows: Tensor
    """int32 [nodes]: where the pair's key goes in the drafter's cache; -1 where the next token is not known yet."""
    last_row: Tensor
    """int64 [1]: the last row in use."""
    first_row: Tensor
    """int32 [1]: the same, for `acceptance.commit_features`."""

    @classmethod
    def allocate(cls, nodes: int, lengths: Tensor) -> ChunkRows:
        """Allocate for ``nodes`` rows; ``lengths`` int32 [slots] is shared."""
        next_tokens, pair_rows = (torch.zeros(nodes, dtype=torch.int32, device=lengths.device) for _ in range(2))
        last_row = torch.zeros(1, dtype=torch.int64, device=lengths.device)
        forward = ForwardRows.allocate(1, nodes, lengths, is_path=True)
        return cls(forward, next_tokens, pair_rows, last_row, last_row.int())


def begin_prompt_ref(box: PromptBox, state: SlotState) -> None:
    """Empty the box's slot behind the rows that stay, and note where its sequence ends."""
    slot = int(box.numbers[0])
    for name in ("num_generated", "running", "prefix", "num_new"):
        getattr(state, name)[slot] = 0
    state.lengths[slot] = box.numbers[3]
    state.max_generated[slot] = box.numbers[2]
    state.eos_ids[slot] = box.numbers[_HEAD:]


@triton.jit
def _begin_prompt_kernel(number_ptr, state, EOS: tl.constexpr):
    slot = tl.load(number_ptr)
    tl.store(state.lengths + slot, tl.load(number_ptr + 3))
    tl.store(state.num_generated + slot, 0)
    tl.store(state.running + slot, 0)
    tl.store(state.prefix + slot, 0)
    tl.store(state.num_new + slot, 0)
    tl.store(state.max_generated + slot, tl.load(number_ptr + 2))
    i = tl.arange(0, EOS)
    tl.store(state.eos_ids + slot * EOS + i, tl.load(number_ptr + 4 + i))


def begin_prompt(box: PromptBox, state: SlotState) -> None:
    """Run `begin_prompt_ref` as one launch."""
    _begin_prompt_kernel[(1,)](box.numbers, state, EOS=MAX_EOS, num_warps=1)


def chunk_rows_ref(box: PromptBox, out: ChunkRows) -> None:
    """Lay out the next rows of the box's prompt, which begin at the slot's length."""
    forward, attention, nodes = out.forward, out.forward.attention, out.forward.nodes
    slot, size = box.numbers[:1], box.numbers[1]
    length = attention.lengths[slot.long()]
    row = torch.arange(nodes, dtype=torch.int32, device=size.device)
    at = length + row
    count = (size - length).clamp(0, nodes)
    used = row < count
    known = used & (at + 1 < size)
    last = len(box.tokens) - 1
    forward.tokens.copy_(torch.where(used, box.tokens[at.clamp(max=last).long()], 0))
    forward.positions.copy_(torch.where(used, at, 0))
    forward.kv_rows.copy_(torch.where(used, at, -1))
    out.next_tokens.copy_(torch.where(known, box.tokens[(at + 1).clamp(max=last).long()], 0))
    out.pair_rows.copy_(torch.where(known, at, -1))
    attention.depths.copy_(row[None])
    attention.slots.copy_(slot)
    attention.counts.copy_(count)
    out.last_row.copy_((count - 1).clamp(min=0))
    out.first_row.copy_(out.last_row)


@triton.jit
def _chunk_rows_kernel(
    number_ptr,
    prompt_ptr,
    length_ptr,
    token_ptr,
    position_ptr,
    kv_row_ptr,
    next_token_ptr,
    pair_row_ptr,
    depth_ptr,
    slot_ptr,
    count_ptr,
    last_row_ptr,
    first_row_ptr,
    NODES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(number_ptr)
    size = tl.load(number_ptr + 1)
    length = tl.load(length_ptr + slot)
    count = tl.minimum(tl.maximum(size - length, 0), NODES)
    inside = row < NODES
    used = row < count
    at = length + row
    known = row < tl.minimum(count, size - 1 - length)
    tl.store(token_ptr + row, tl.load(prompt_ptr + at, mask=used, other=0), mask=inside)
    tl.store(position_ptr + row, tl.where(used, at, 0), mask=inside)
    tl.store(kv_row_ptr + row, tl.where(used, at, -1), mask=inside)
    tl.store(next_token_ptr + row, tl.load(prompt_ptr + at + 1, mask=known, other=0), mask=inside)
    tl.store(pair_row_ptr + row, tl.where(known, at, -1), mask=inside)
    tl.store(depth_ptr + row, row, mask=inside)
    if tl.program_id(0) == 0:
        last = tl.maximum(count - 1, 0)
        tl.store(slot_ptr, slot)
        tl.store(count_ptr, count)
        tl.store(last_row_ptr, last.to(tl.int64))
        tl.store(first_row_ptr, last)


def chunk_rows(box: PromptBox, out: ChunkRows) -> None:
    """Run `chunk_rows_ref` as one launch."""
    forward, attention = out.forward, out.forward.attention
    block = min(256, max(2, triton.next_power_of_2(forward.nodes)))
    _chunk_rows_kernel[(triton.cdiv(forward.nodes, block),)](
        box.numbers,
        box.tokens,
        attention.lengths,
        forward.tokens,
        forward.positions,
        forward.kv_rows,
        out.next_tokens,
        out.pair_rows,
        attention.depths,
        attention.slots,
        attention.counts,
        out.last_row,
        out.first_row,
        NODES=forward.nodes,
        BLOCK=block,
        num_warps=1,
    )


def end_chunk_ref(box: PromptBox, nodes: int, state: SlotState) -> None:
    """Move the slot's length on by a chunk; after the last, list the slot in ``state`` as the only active one.

    The walk to come commits the prompt's last token as it commits a root, so the length stops before that token, and
    all pairs but its own are in the drafter's cache.
    """
    slot, size = int(box.numbers[0]), int(box.numbers[1])
    length = int(state.lengths[slot])
    count = min(max(size - length, 0), nodes)
    is_last = count > 0 and length + count == size
    state.lengths[slot] = length + count - is_last
    state.active_inverse.fill_(-1)
    state.active_slots.fill_(-1)
    state.active_count.fill_(int(is_last))
    if is_last:
        state.num_new[slot] = size - 1
        state.active_inverse[slot] = 0
        state.active_slots[0] = slot


@triton.jit
def _end_chunk_kernel(number_ptr, state, NODES: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr):
    slot = tl.load(number_ptr)
    size = tl.load(number_ptr + 1)
    length = tl.load(state.lengths + slot)
    count = tl.minimum(tl.maximum(size - length, 0), NODES)
    end = length + count
    is_last = tl.where((count > 0) & (end == size), 1, 0)
    tl.store(state.lengths + slot, end - is_last)
    i = tl.arange(0, BLOCK)
    inside = i < SLOTS
    tl.store(state.active_inverse + i, tl.where(i == slot, is_last, 0) - 1, mask=inside)
    tl.store(state.active_slots + i, tl.where((i == 0), tl.where(is_last != 0, slot, -1), -1), mask=inside)
    tl.store(state.active_count, is_last)
    if is_last != 0:
        tl.store(state.num_new + slot, size - 1)


def end_chunk(box: PromptBox, nodes: int, state: SlotState) -> None:
    """Run `end_chunk_ref` as one launch."""
    slots = len(state.lengths)
    _end_chunk_kernel[(1,)](
        box.numbers, state, NODES=nodes, SLOTS=slots, BLOCK=max(2, triton.next_power_of_2(slots)), num_warps=1
    )
