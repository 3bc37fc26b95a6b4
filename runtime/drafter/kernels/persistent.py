"""The persistent drafter: one cooperative launch drafts a whole tree for every active sequence.

One program runs on each SM and stays there for the whole draft. Work moves from phase to phase through buffers that
live in the L2 (`workspace`), with a grid barrier between phases. Weights are the only thing read from memory, each once
per level:

=====  =================================================================================================
rows   embeddings and features of the new tokens become operands: `row_operands`
fc     ``fc`` over the target's taps (EAGLE-3), or over (embedding, feature) at every level (EAGLE-1/2)
qkv    query, key and value of all rows; RMSNorm was applied when the rows were written
att    `ancestor_attention.attend`: norms of q and k, RoPE, KV append, prefix and ancestors; then `merge_heads`
o      output projection, residual, partial sums of squares for the RMSNorm that follows
mlp    `gated_mlp`: gate and up, SiLU; then down, residual, sums of squares
head   `lm_topk.stream_topk`: LM head over the draft vocabulary, k best and log-sum-exp per program
pick   merge per node, score the candidates, `frontier.choose_frontier`, gather the nodes' embeddings
tree   after the last level, `tree_build.build_tree`
=====  =================================================================================================

fc, qkv, o and down go through one loop (`projections`): each pass multiplies, waits, adds up the parts, and does what
follows. One loop instead of four keeps the program small: a level's code is fetched anew at every level, and four
products would each keep addresses in registers.

Level 0 is the extend pass: up to 16 newly accepted tokens per sequence enter the KV cache, and only the last of them
(the last verified feature and the tree's root) goes on past attention. RMSNorm is linear but for one factor per row, so
``o`` and ``down`` write rows already multiplied by the norm's weight, and the factor multiplies the next product's
result.

Depth and number of nodes come with the launch, up to the bounds of `tree_build.TreeShape`; ``top_k`` is compiled in.

Row ``n * stride + a`` of operands and results is token or node n of the a-th active sequence; the stride is the number
of slots as a power of two. A product takes as many rows as a level has (`launch_params.block_rows`), and fc and qkv
take further new tokens in passes of their own. Frontiers and chains keep 16 rows of each sequence. Frontier scores and
candidate numbering follow `eagle_slim.runtime.tree`. Every program takes part in every barrier, so no phase returns
early.

Arguments come in groups: named tuples of addresses, and frozen dataclasses of constants, whose names are capitals.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

from .ancestor_attention import AttentionParts, AttentionShape, Rope, Rows, attend, merge_heads
from .frontier import ROWS, Frontier, chain_at, choose_frontier, frontier_at
from .gated_mlp import MlpShape, gated_mlp
from .grid_barrier import grid_barrier, leave_grid
from .lm_topk import (
    HeadRows,
    HeadTiles,
    Lists,
    Nodes,
    Selection,
    clear_lists,
    lists_at,
    merge_best,
    stream_topk,
)
from .projections import BiasLayout, Parts, Residual, Share, finish_residual, finish_rows, stream_parts
from .row_operands import RowShape, norm_factor, write_carried_row, write_row, write_rows, write_taps
from .selection import LOWEST_KEY, order_key
from .tree_build import TreeCandidates, TreeShape, TreeSize, blank_tree, build_tree, candidates_of
from .weight_stream import NextOperand, Operand, Tile

FC_PASS, QKV_PASS, O_PASS, DOWN_PASS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
"""A level's loop over projections."""


@dataclass(frozen=True)
class HeadShape:
    """What the head computes."""

    fused_every_level: bool
    """EAGLE-1/2: fc takes (embedding, feature) at every level."""
    has_fc: bool
    has_fc_bias: bool
    has_qkv_bias: bool
    scaled: bool
    """Weights are FP8, with a scale for each row."""
    hidden: int
    intermediate: int
    attention: int
    """heads * head_dim."""
    feature_width: int
    has_o_bias: bool
    has_mlp_bias: bool
    norm_before_residual: bool
    """The residual of the attention is the feature after ``hidden_norm``."""
    norm_output: bool
    """A node's children take its output after the last RMSNorm as their feature."""
    biases: BiasLayout

    @property
    def qkv_in(self) -> int:
        """Inputs of qkv: (embedding, feature) in EAGLE-3, the fused feature in EAGLE-1/2."""
        return self.hidden if self.fused_every_level else 2 * self.hidden

    @property
    def fc_in(self) -> int:
        """Inputs of fc."""
        return 2 * self.hidden if self.fused_every_level else self.feature_width

    @property
    def raw_input(self) -> bool:
        """Whether EAGLE-1/2's embeddings and features stay as they are: their sizes differ too much for FP8 pairs."""
        return self.fused_every_level and self.scaled

    @property
    def fc_in_loop(self) -> bool:
        """Whether fc goes through the loop over projections: raw input does not."""
        return self.has_fc and not self.raw_input


@dataclass(frozen=True)
class Phases:
    """How the work of each phase is cut."""

    row: RowShape
    """An embedding, or a feature."""
    taps: RowShape
    """The target's features of a token."""
    layer: Tile
    """All four projections."""
    layer_chunk: int
    """Columns of theirs that are stored together."""
    sum_hidden: Share
    """fc, o and down."""
    sum_qkv: Share
    attention: AttentionShape
    mlp: MlpShape
    mlp_tile: Tile
    head: HeadTiles
    select: Selection
    tree: TreeShape
    gather: int
    """Embeddings that a program fetches at a time, a power of two."""


@dataclass(frozen=True)
class Grid:
    """How much there is of everything."""

    programs: int
    lists: int
    """Programs, to a multiple of `lm_topk.LIST_BATCH`."""
    slots: int
    embed_rows: int
    """Embeddings kept per sequence."""
    width: int
    """Places of a slot in `StepInputs.new_tokens`."""

    @property
    def stride(self) -> int:
        """Rows from one of a sequence to its next."""
        return int(triton.next_power_of_2(self.slots))

    @property
    def features(self) -> int:
        """Row of the first feature, after the embeddings."""
        return self.stride * self.embed_rows


class Features(NamedTuple):
    """The target's features of the new tokens, of the model's type: [slots, up to 64, taps]."""

    taps: Any
    stride_slot: Any
    stride_row: Any


class StepInputs(NamedTuple):
    """What `Buffers.set_step` writes: int32."""

    new_tokens: Any
    """[slots, width]: the token after each feature; the last of ``num_new`` is the root."""
    num_new: Any
    """[slots]."""
    prefix: Any
    """[slots]."""
    active_slots: Any
    """[slots]."""
    active_inverse: Any
    """[slots]; -1: inactive."""
    active_count: Any
    """[1]."""


class HeadTensors(NamedTuple):
    """`packing.PackedHead`."""

    stream: Any
    scales: Any
    row_ids: Any
    embedding: Any
    norm_in: Any
    norm_hidden: Any
    norm_post: Any
    norm_out: Any
    biases: Any
    norm_taps: Any
    """[feature_width]: of the RMSNorms before fc."""
    cos: Any
    sin: Any
    norm_heads: Any
    """[2 * head_dim]: of the RMSNorms over each head, q's and then k's."""
    draft_vocab: Any
    """LM-head rows in use."""
    stride_embedding: Any


@triton.jit
def next_phase(barrier_ptr, round, PROGRAMS: tl.constexpr):
    """Wait for all programs; returns the number of the barrier."""
    grid_barrier(barrier_ptr, round + 1, PROGRAMS)
    return round + 1


@triton.jit
def norm_features(
    hidden_ptr,
    x_ptr,
    factor_ptr,
    norm_ptr,
    step,
    num_active,
    SHAPE: tl.constexpr,
    GRID: tl.constexpr,
):
    """Normalise the new tokens' features, row by row."""
    for index in tl.range(tl.program_id(0), num_active * ROWS, GRID.programs, disable_licm=True):
        unit = index + num_active * 0
        slot = tl.load(step.active_slots + unit // ROWS)
        if unit % ROWS < tl.load(step.num_new + slot):
            row = unit % ROWS * GRID.stride + unit // ROWS
            source_ptr = hidden_ptr + row.to(tl.int64) * SHAPE.size
            write_row(source_ptr, x_ptr, factor_ptr, GRID.features + row, norm_ptr, True, SHAPE)


@triton.jit
def select(index, at_0, at_1, at_2, at_3):
    """One of four values."""
    return tl.where(index < 2, tl.where(index == 0, at_0, at_1), tl.where(index == 2, at_2, at_3))


@triton.jit
def read_new_tokens(
    features,
    tap_offset_1,
    tap_offset_2,
    step,
    head,
    ws,
    x_in_ptr,
    num_active,
    HEAD: tl.constexpr,
    PHASES: tl.constexpr,
    OPERANDS: tl.constexpr,
    GRID: tl.constexpr,
):
    """Extend: features and embeddings of the new tokens become operands."""
    FEATURES: tl.constexpr = GRID.features
    HIDDEN: tl.constexpr = HEAD.hidden
    NORMED: tl.constexpr = not HEAD.fused_every_level
    ROW: tl.constexpr = PHASES.row
    TAPS: tl.constexpr = PHASES.taps
    BLOCK: tl.constexpr = ROW.block
    pid = tl.program_id(0)
    zero = pid * 0
    for index in tl.range(pid, num_active * ROWS, GRID.programs, disable_licm=True):
        unit = index + zero
        a = unit // ROWS
        i = unit % ROWS
        slot = tl.load(step.active_slots + a).to(tl.int64)
        if i < tl.load(step.num_new + slot):
            token = tl.load(step.new_tokens + slot * GRID.width + i).to(tl.int64)
            row = i * GRID.stride + a
            write_row(
                head.embedding + token * head.stride_embedding, x_in_ptr, ws.factor, row, head.norm_in, NORMED, ROW
            )
            taps_ptr = features.taps + slot * features.stride_slot + i * features.stride_row
            if HEAD.fused_every_level or not HEAD.has_fc:
                write_row(taps_ptr, x_in_ptr, ws.factor, FEATURES + row, head.norm_hidden, NORMED, ROW)
                offs_h = tl.arange(0, BLOCK)
                feature = tl.load(taps_ptr + offs_h, mask=offs_h < HIDDEN, other=0.0).to(tl.float32)
                tl.store(ws.hidden + row.to(tl.int64) * HIDDEN + offs_h, feature, mask=offs_h < HIDDEN)
            else:
                write_taps(
                    taps_ptr,
                    tap_offset_1,
                    tap_offset_2,
                    ws.x + OPERANDS.fc,
                    row,
                    ws.factor + FEATURES + row,
                    head.norm_taps,
                    TAPS,
                    HEAD.scaled,
                )


@triton.jit
def record_children(ws, rank, score, token, parent, a, node, first_candidate, SELECT: tl.constexpr, TREE: tl.constexpr):
    """Write a node's children as candidates of the tree, and as keys to choose the next frontier from."""
    TOP_K: tl.constexpr = SELECT.top_k
    MAX_K: tl.constexpr = SELECT.max_k
    mask = rank < TOP_K
    at = a * TREE.candidates + first_candidate + node * TOP_K + rank
    tl.store(ws.score + at, score, mask=mask)
    tl.store(ws.token + at, token, mask=mask)
    tl.store(ws.parent + at, parent + token * 0, mask=mask)
    key_ptr = ws.child_key + (a * ROWS + node) * MAX_K
    tl.store(key_ptr + rank, order_key(score, node * TOP_K + rank), mask=mask)
    offs_k = tl.arange(0, MAX_K)
    tl.store(key_ptr + offs_k, tl.full([MAX_K], LOWEST_KEY, tl.int64), mask=offs_k >= TOP_K)


@triton.jit
def write_feature(head, ws, x_in_ptr, row, HEAD: tl.constexpr, ROW: tl.constexpr, GRID: tl.constexpr):
    """Write a node's output as the feature of its children."""
    source_ptr = ws.hidden + row.to(tl.int64) * HEAD.hidden
    target = GRID.features + row
    if HEAD.norm_output:
        write_carried_row(source_ptr, x_in_ptr, ws.factor, target, head.norm_out, head.norm_hidden, ROW)
    else:
        write_row(source_ptr, x_in_ptr, ws.factor, target, head.norm_hidden, not HEAD.fused_every_level, ROW)


@triton.jit
def pick(
    step,
    head,
    ws,
    out,
    x_in_ptr,
    num_active,
    num_nodes,
    level,
    depth,
    size,
    HEAD: tl.constexpr,
    PHASES: tl.constexpr,
    GRID: tl.constexpr,
):
    """Merge each node's children, score them, choose the next frontier or build the tree, and gather embeddings.

    Several programs merge the same node; the first records it, the others gather its children's embeddings. The
    program that merges a sequence's last node chooses.
    """
    SELECT: tl.constexpr = PHASES.select
    TREE: tl.constexpr = PHASES.tree
    ROW: tl.constexpr = PHASES.row
    TOP_K: tl.constexpr = SELECT.top_k
    MAX_K: tl.constexpr = SELECT.max_k
    NORMED: tl.constexpr = not HEAD.fused_every_level
    GATHER: tl.constexpr = PHASES.gather
    pid = tl.program_id(0)
    zero = pid * 0
    frontier = Frontier(ws.frontier_score, ws.frontier_candidate, ws.frontier_parent, ws.frontier_child)
    last = level == depth
    num_rows = num_active * num_nodes
    copies = tl.where(last, 1, tl.minimum(tl.maximum(GRID.programs // num_rows, 1), TOP_K + 2))
    first_candidate = tl.where(level == 0, 0, TOP_K + (level - 1) * TOP_K * TOP_K)
    for index in tl.range(pid, num_rows * copies, GRID.programs, disable_licm=True):
        unit = index + zero
        copy = unit // num_rows
        a = (unit % num_rows) // num_nodes
        n = (unit % num_rows) % num_nodes
        row = n * GRID.stride + a
        own = a * ROWS + n
        rank, value, token, lse = merge_best(
            lists_at(Lists(ws.best_key, ws.best_max, ws.best_sum), row, SELECT),
            ws.owner + pid * MAX_K,
            tl.minimum(head.draft_vocab, GRID.programs),
            SELECT,
        )
        if copy == 0:
            base = tl.load(frontier.score + own, mask=level > 0, other=0.0)
            score = base + tl.minimum(value - lse, 0.0)
            parent = tl.load(frontier.candidate + own, mask=level > 0, other=-1)
            record_children(ws, rank, score, token, parent, a, n, first_candidate, SELECT, TREE)
            tl.debug_barrier()
            if tl.atomic_add(ws.node_arrivals + a, 1, sem="acq_rel") == num_nodes - 1:
                tl.store(ws.node_arrivals + a, 0)
                slot = tl.load(step.active_slots + a)
                if last:
                    newest = tl.load(step.num_new + slot) - 1
                    root = tl.load(step.new_tokens + slot.to(tl.int64) * GRID.width + newest)
                    drafted = TreeCandidates(ws.token, ws.score, ws.parent, ws.node_of, ws.chosen)
                    build_tree(candidates_of(drafted, a, TREE), root, slot, out, size, TREE)
                else:
                    choose_frontier(
                        ws.child_key + a * ROWS * MAX_K,
                        num_nodes,
                        first_candidate,
                        level,
                        frontier_at(frontier, a * ROWS),
                        chain_at(ws.chain, level, a * ROWS, GRID.slots),
                        chain_at(ws.chain, level + 1, a * ROWS, GRID.slots),
                        SELECT,
                    )
        if ((copy > 0) | (copies == 1)) & (level < depth):
            first_job = tl.maximum(copy - 1, 0)
            stride = tl.maximum(copies - 1, 1)
            if GATHER > 1:
                for first in tl.range(first_job, TOP_K, GATHER * stride, disable_licm=True):
                    jobs = first + tl.arange(0, GATHER) * stride
                    child_token = tl.max(tl.where(rank[None, :] == jobs[:, None], token[None, :], 0), axis=1)
                    write_rows(
                        head.embedding,
                        child_token.to(tl.int64) * head.stride_embedding,
                        jobs < TOP_K,
                        x_in_ptr,
                        ws.factor,
                        a * GRID.embed_rows + n * TOP_K + jobs,
                        head.norm_in,
                        NORMED,
                        ROW,
                    )
                if first_job == TOP_K % stride:
                    write_feature(head, ws, x_in_ptr, row, HEAD, ROW, GRID)
            else:
                for job in tl.range(first_job, TOP_K + 1, stride, disable_licm=True):
                    if job < TOP_K:
                        child_token = tl.max(tl.where(rank == job, token, 0), axis=0).to(tl.int64)
                        write_row(
                            head.embedding + child_token * head.stride_embedding,
                            x_in_ptr,
                            ws.factor,
                            a * GRID.embed_rows + n * TOP_K + job,
                            head.norm_in,
                            NORMED,
                            ROW,
                        )
                    else:
                        write_feature(head, ws, x_in_ptr, row, HEAD, ROW, GRID)


# Separate taps lie anywhere, and trees change between steps: neither must make another kernel.
@triton.jit(do_not_specialize=["tap_offset_1", "tap_offset_2", "depth", "total_tokens"])
def draft_kernel(
    features,  # `Features`
    tap_offset_1: tl.int64,  # where the second and third tap begin, in values from the first
    tap_offset_2: tl.int64,
    depth,  # of the trees of this launch, and their nodes: at most those of `TreeShape`
    total_tokens,
    step,  # `StepInputs`
    head,  # `HeadTensors`
    cache,  # `KVCache`
    ws,  # `Workspace`
    out,  # `TreeOutputs`
    HEAD: tl.constexpr,  # `HeadShape`
    PHASES: tl.constexpr,  # `Phases`
    STREAM: tl.constexpr,  # `StreamLayout`
    OPERANDS: tl.constexpr,  # `OperandLayout`
    GRID: tl.constexpr,  # `Grid`
):
    """Draft; see the module docstring. All bounds are fixed by the constants, all counts are read on the device."""
    PROGRAMS: tl.constexpr = GRID.programs
    FEATURES: tl.constexpr = GRID.features
    EMBED_ROWS: tl.constexpr = GRID.embed_rows
    HIDDEN: tl.constexpr = HEAD.hidden
    SCALED: tl.constexpr = HEAD.scaled
    FUSED: tl.constexpr = HEAD.fused_every_level
    FC_IN: tl.constexpr = HEAD.fc_in
    STRIDE: tl.constexpr = GRID.stride
    ATTENTION: tl.constexpr = PHASES.attention
    SELECT: tl.constexpr = PHASES.select
    LM_HEAD: tl.constexpr = PHASES.head
    MLP: tl.constexpr = PHASES.mlp
    MLP_TILE: tl.constexpr = PHASES.mlp_tile
    TREE: tl.constexpr = PHASES.tree
    ROW: tl.constexpr = PHASES.row
    LAYER: tl.constexpr = PHASES.layer
    CHUNK: tl.constexpr = PHASES.layer_chunk
    SUM_HIDDEN: tl.constexpr = PHASES.sum_hidden
    SUM_QKV: tl.constexpr = PHASES.sum_qkv
    BLOCK_M: tl.constexpr = SELECT.block_m
    TOP_K: tl.constexpr = SELECT.top_k
    pid = tl.program_id(0)
    num_active = tl.load(step.active_count)
    my_stream = head.stream + pid.to(tl.int64) * STREAM.size
    my_scale = head.scales + pid * STREAM.num_scales
    my_lists = pid.to(tl.int64) * BLOCK_M
    offs_m = tl.arange(0, BLOCK_M)
    seq = offs_m % STRIDE
    node = offs_m // STRIDE
    in_use = seq < num_active
    row_slot = tl.load(step.active_slots + seq, mask=in_use, other=0)
    row_new = tl.load(step.num_new + row_slot, mask=in_use, other=0)
    row_prefix = tl.load(step.prefix + row_slot, mask=in_use, other=0)
    rows = Rows(seq, row_slot, row_prefix, row_new)
    most_new = tl.maximum(tl.max(row_new, axis=0), 1)
    own_row = offs_m.to(tl.int64)
    ones = tl.full([BLOCK_M], 1.0, tl.float32)
    my_vocab = (head.draft_vocab - pid + PROGRAMS - 1) // PROGRAMS
    zero = pid * 0  # added to loop counters: the interpreter's are Python integers, a program's are tensors
    round = 0
    x_in_ptr = ws.x + OPERANDS.inputs
    if HEAD.raw_input:
        x_in_ptr = ws.x_raw
    rope = Rope(head.cos, head.sin)
    unit_parts = AttentionParts(ws.part_stat, ws.part_acc)
    lists = Lists(ws.best_key, ws.best_max, ws.best_sum)
    size = TreeSize(TOP_K + depth * TOP_K * TOP_K, total_tokens, depth + 2)

    for index in range(PROGRAMS + pid, GRID.lists, PROGRAMS):
        clear_lists(ws.best_key + index * BLOCK_M * SELECT.max_k, SELECT)
    for index in tl.range(pid, GRID.slots, PROGRAMS, disable_licm=True):
        slot = index + zero
        if tl.load(step.active_inverse + slot) < 0:
            blank_tree(slot, out, size, TREE)
    read_new_tokens(
        features, tap_offset_1, tap_offset_2, step, head, ws, x_in_ptr, num_active, HEAD, PHASES, OPERANDS, GRID
    )
    round = next_phase(ws.barrier, round, PROGRAMS)

    for step_index in tl.range(0, depth + 1, disable_licm=True):
        level = step_index + zero
        extend = level == 0
        num_nodes = tl.where(extend, 1, TOP_K)
        # Where there are several passes, reading rows after a sequence's new tokens costs less than masks for each.
        num_in = row_new if BLOCK_M == ROWS * STRIDE else ROWS
        mask_in = in_use & (node < tl.where(extend, num_in, TOP_K))
        mask_m = in_use & (node < num_nodes)
        known = mask_m & (level + offs_m * 0 > 0)
        parent = tl.load(ws.frontier_parent + seq * ROWS + node, mask=known, other=0)
        child = tl.load(ws.frontier_child + seq * ROWS + node, mask=known, other=0)
        parent_row = parent * STRIDE + seq
        embed_row = tl.where(extend, offs_m, seq * EMBED_ROWS + parent * TOP_K + child).to(tl.int64) * HIDDEN
        hidden_row = (FEATURES + tl.where(extend, offs_m, parent_row)).to(tl.int64) * HIDDEN
        # FP8 pairs want operands of order one: rows not yet normalised take the factor of the feature they came from,
        # which the extend pass knows only after `norm_features`.
        x_scale = ones

        # Rows of the extend pass each have a feature of their own.
        fused_scale = ones
        if HEAD.raw_input:
            source = FEATURES + tl.where(extend, offs_m, parent_row)
            fused_scale = tl.load(ws.factor + source, mask=mask_in, other=1.0)
        fused = NextOperand(ws.x + OPERANDS.fc, fused_scale)

        if HEAD.raw_input:
            raw_parts = Parts(ws.partial, STREAM.split.fc, STREAM.group_rows.fc)
            raw = Operand(ws.x_raw, embed_row, hidden_row, mask_in, HIDDEN // CHUNK, HIDDEN)
            stream_parts(raw, my_stream, raw_parts, FC_IN // CHUNK, PROGRAMS, CHUNK, LAYER)
            if STREAM.split.fc > 1:
                round = next_phase(ws.barrier, round, PROGRAMS)
            else:
                tl.debug_barrier()
            finish_rows(
                raw_parts,
                mask_in,
                ones,
                my_scale,
                head.biases + HEAD.biases.fc,
                ws.hidden,
                fused,
                SUM_HIDDEN,
                SCALED,
                HEAD.has_fc_bias,
                True,
            )
            round = next_phase(ws.barrier, round, PROGRAMS)

        first_pass = tl.where(extend, FC_PASS if HEAD.fc_in_loop else QKV_PASS, QKV_PASS)
        if FUSED and HEAD.fc_in_loop:
            first_pass = zero + FC_PASS
        repeats = 1  # of fc and of qkv, each time over further new tokens
        if BLOCK_M < ROWS * STRIDE:
            repeats = tl.where(extend, tl.cdiv(most_new * STRIDE, BLOCK_M), 1)
        for index in tl.range(first_pass * repeats, 2 * repeats + 2, disable_licm=True):
            which = index + zero
            first = 0  # row of this pass
            is_last = True
            if BLOCK_M < ROWS * STRIDE:
                is_repeated = index < 2 * repeats
                which = tl.where(is_repeated, index // repeats, index - 2 * repeats + 2)
                first = tl.where(is_repeated, index % repeats, 0) * BLOCK_M
                is_last = index % repeats == repeats - 1
            # In EAGLE-3 qkv, in EAGLE-1/2 fc takes (embedding, feature); the other projections have rows of their own.
            pairs = which == (FC_PASS if FUSED else QKV_PASS)
            x_start = select(
                which,
                OPERANDS.inputs if FUSED else OPERANDS.fc,
                OPERANDS.fc if FUSED else OPERANDS.inputs,
                OPERANDS.attention,
                OPERANDS.mlp,
            )
            row_size = select(which, HIDDEN if FUSED else FC_IN, HIDDEN, HEAD.attention, HEAD.intermediate)
            in_features = select(which, FC_IN, HEAD.qkv_in, HEAD.attention, HEAD.intermediate)
            split = select(which, STREAM.split.fc, STREAM.split.qkv, STREAM.split.o, STREAM.split.down)
            group_rows = select(
                which, STREAM.group_rows.fc, STREAM.group_rows.qkv, STREAM.group_rows.o, STREAM.group_rows.down
            )
            parts = Parts(ws.partial, split, group_rows)
            operand_row = tl.where(pairs, embed_row, own_row * row_size)
            operand_mask = tl.where(which <= QKV_PASS, mask_in, mask_m)
            region = my_stream + select(which, 0, STREAM.offsets.qkv, STREAM.offsets.o, STREAM.offsets.down)
            num_chunks = in_features // CHUNK
            segment = tl.where(pairs, HIDDEN // CHUNK, in_features)
            x_ptr = ws.x + x_start + first * row_size * (2 if SCALED else 1)
            operand = Operand(x_ptr, operand_row, hidden_row, operand_mask, segment, row_size)
            stream_parts(operand, region, parts, num_chunks, PROGRAMS, CHUNK, LAYER)
            if split > 1:
                round = next_phase(ws.barrier, round, PROGRAMS)
            else:
                tl.debug_barrier()  # the sums are the program's own

            if HEAD.fc_in_loop:  # noqa: SIM102 - this one is decided by the compiler
                if which == FC_PASS:
                    row_factor = ones
                    if SCALED:
                        row_factor = tl.load(ws.factor + FEATURES + first + offs_m, mask=mask_in, other=0.0)
                    finish_rows(
                        parts,
                        mask_in,
                        row_factor,
                        my_scale,
                        head.biases + HEAD.biases.fc,
                        ws.hidden + first * HIDDEN,
                        NextOperand(fused.ptr + first * HIDDEN, fused_scale),
                        SUM_HIDDEN,
                        SCALED,
                        HEAD.has_fc_bias,
                        FUSED,
                    )
                    if not FUSED:  # noqa: SIM102 - this one is decided by the compiler
                        if is_last:
                            round = next_phase(ws.barrier, round, PROGRAMS)
                            norm_features(ws.hidden, x_in_ptr, ws.factor, head.norm_hidden, step, num_active, ROW, GRID)
            if which == QKV_PASS:
                finish_rows(
                    parts,
                    mask_in,
                    1.0 / fused_scale,
                    my_scale + STREAM.scales.qkv,
                    head.biases + HEAD.biases.qkv,
                    ws.qkv + first * SUM_QKV.features,
                    fused,
                    SUM_QKV,
                    SCALED,
                    HEAD.has_qkv_bias,
                    False,
                )
                if is_last:
                    round = next_phase(ws.barrier, round, PROGRAMS)
                    attend(
                        ws.qkv,
                        head.norm_heads,
                        cache,
                        rope,
                        ws.chain,
                        unit_parts,
                        rows,
                        num_active,
                        level,
                        PROGRAMS,
                        ATTENTION,
                    )
                    round = next_phase(ws.barrier, round, PROGRAMS)
                    merge_heads(unit_parts, ws.x + OPERANDS.attention, rows, num_active, num_nodes, PROGRAMS, ATTENTION)
            elif which == O_PASS:
                feature_factor = ones
                if SCALED or HEAD.norm_before_residual:
                    origin = FEATURES + tl.where(extend, (row_new - 1) * STRIDE + seq, parent_row)
                    feature_factor = tl.load(ws.factor + origin, mask=mask_m, other=1.0)
                # A normalised residual is of order one already.
                if SCALED and not HEAD.norm_before_residual:
                    x_scale = feature_factor
                source = tl.where(extend, (row_new - 1) * STRIDE + seq, offs_m if FUSED else parent_row)
                finish_residual(
                    parts,
                    mask_m,
                    my_scale + STREAM.scales.o,
                    head.biases + HEAD.biases.o,
                    Residual(ws.hidden, source, feature_factor, head.norm_hidden),
                    ws.middle,
                    head.norm_post,
                    NextOperand(ws.x + OPERANDS.post, x_scale),
                    ws.squares_post,
                    SUM_HIDDEN,
                    SCALED,
                    HEAD.has_o_bias,
                    True,
                    HEAD.norm_before_residual,
                )
                round = next_phase(ws.barrier, round, PROGRAMS)
                factor = norm_factor(ws.squares_post, mask_m, PROGRAMS, ROW) / x_scale
                gated_mlp(
                    ws.x + OPERANDS.post,
                    factor,
                    mask_m,
                    my_stream + STREAM.offsets.mlp,
                    my_scale + STREAM.scales.mlp,
                    head.biases + HEAD.biases.mlp,
                    ws.x + OPERANDS.mlp,
                    MLP,
                    MLP_TILE,
                )
            elif which == DOWN_PASS:
                finish_residual(
                    parts,
                    mask_m,
                    my_scale + STREAM.scales.down,
                    head.biases + HEAD.biases.down,
                    Residual(ws.middle, offs_m, ones, head.norm_post),
                    ws.hidden,
                    head.norm_out,
                    NextOperand(ws.x + OPERANDS.head, x_scale),
                    ws.squares_out,
                    SUM_HIDDEN,
                    SCALED,
                    HEAD.has_mlp_bias,
                    not FUSED,
                    False,
                )
            round = next_phase(ws.barrier, round, PROGRAMS)

        factor = (1.0 if FUSED else norm_factor(ws.squares_out, mask_m, PROGRAMS, ROW)) / x_scale
        nodes = Nodes(num_active, num_nodes)
        my_scratch = ws.scratch + my_lists * LM_HEAD.tile.block_n
        my_head = HeadRows(
            my_stream + STREAM.offsets.head,
            my_scale + STREAM.scales.head,
            head.row_ids + pid * STREAM.rows.head,
            my_vocab,
        )
        stream_topk(
            ws.x + OPERANDS.head,
            factor,
            own_row * HIDDEN,
            mask_m,
            nodes,
            my_head,
            my_scratch,
            lists_at(lists, my_lists, SELECT),
            SELECT,
            LM_HEAD,
        )
        round = next_phase(ws.barrier, round, PROGRAMS)
        pick(step, head, ws, out, x_in_ptr, num_active, num_nodes, level, depth, size, HEAD, PHASES, GRID)
        if level < depth:
            round = next_phase(ws.barrier, round, PROGRAMS)
    leave_grid(ws.barrier, PROGRAMS)


def is_interpreted() -> bool:
    """Whether kernels run in Triton's interpreter, as ``TRITON_INTERPRET=1`` has it when they are imported."""
    return not isinstance(draft_kernel, triton.JITFunction)
