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

Slots, depth and number of nodes come with the launch, up to powers of two that are compiled in; so is ``top_k``.

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

from .ancestor_attention import AttentionSplits, DraftAttentionShape, DraftCache, Rope, Rows, attend, merge_heads
from .frontier import ROWS, Frontier, chain_at, choose_frontier
from .gated_mlp import MlpShape, gated_mlp
from .grid_barrier import grid_barrier, leave_grid
from .lm_topk import HeadTiles, Lists, Nodes, ProgramRows, Selection, clear_lists, lists_at, merge_best, stream_topk
from .projections import PartialSums, ProgramOutputs, Residual, finish_residual, finish_rows, multiply_splits
from .row_operands import RowShape, norm_factor, write_carried_row, write_row, write_rows, write_taps
from .selection import LOWEST_KEY, order_key
from .tree_build import TreeBounds, TreeCandidates, TreeOutputs, TreeSize, blank_tree, build_tree
from .weight_stream import NextOperand, Operand, Tile

FC_PASS, QKV_PASS, O_PASS, DOWN_PASS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
"""A level's loop over projections."""


@dataclass(frozen=True)
class DraftHeadShape:
    """Dimensions and options of a draft head."""

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
    fc_in: int
    qkv_in: int
    has_o_bias: bool
    has_mlp_bias: bool
    norm_before_residual: bool
    """The residual of the attention is the feature after ``hidden_norm``."""
    norm_output: bool
    """A node's children take its output after the last RMSNorm as their feature."""
    biases: Any
    """`packing.PerMatrix`: where each bias begins."""

    @property
    def raw_input(self) -> bool:
        """Tell if EAGLE-1/2's embeddings and features stay as they are: their sizes differ too much for FP8 pairs."""
        return self.fused_every_level and self.scaled

    @property
    def fc_in_loop(self) -> bool:
        """Tell if fc goes through the loop over projections: raw input does not."""
        return self.has_fc and not self.raw_input

    @property
    def scales_residual(self) -> bool:
        """Tell if the residual of the attention brings operands to order one; a normalised one is of order one."""
        return self.scaled and not self.norm_before_residual


@dataclass(frozen=True)
class Grid:
    """Sizes of a launch."""

    programs: int
    lists: int
    """Programs, to a multiple of `lm_topk.LIST_BATCH`."""
    stride: int
    """Rows from one of a sequence to its next: a power of two of at least the slots."""
    embed_rows: int
    """Embeddings kept per sequence."""
    width: int
    """Columns of `StepInputs.new_tokens`."""

    @property
    def features(self) -> int:
        """Row of the first feature, after the embeddings."""
        return self.stride * self.embed_rows


@dataclass(frozen=True)
class DraftPlan:
    """All constants that a drafter is compiled for: the head, its layouts, and how the work of each phase is cut."""

    head: DraftHeadShape
    grid: Grid
    stream: Any
    """`packing.StreamLayout`."""
    operands: Any
    """`workspace.OperandLayout`."""
    row: RowShape
    """An embedding, or a feature."""
    taps: RowShape
    """The target's features of a token."""
    layer: Tile
    """All four projections."""
    layer_chunk: int
    """Columns of theirs that are stored together."""
    sum_hidden: ProgramOutputs
    """fc, o and down."""
    sum_qkv: ProgramOutputs
    attention: DraftAttentionShape
    mlp: MlpShape
    lm_head: HeadTiles
    select: Selection
    tree: TreeBounds
    gather: int
    """Embeddings that a program fetches at a time, a power of two."""

    @property
    def has_repeats(self) -> bool:
        """Tell if a sequence may have more new tokens than a product takes: fc and qkv then run several times."""
        return self.select.block_m < int(ROWS.value) * self.grid.stride


class Features(NamedTuple):
    """The target's features of the new tokens, of the model's type: [slots, up to 64, taps]."""

    taps: Any
    stride_slot: Any
    stride_row: Any


class StepInputs(NamedTuple):
    """Inputs of a step, int32: those of `Buffers`, which says what they are."""

    new_tokens: Any
    num_new: Any
    prefix: Any
    active_slots: Any
    active_inverse: Any
    active_count: Any


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


class Draft(NamedTuple):
    """A launch as one program sees it; what is no address is kept in registers from barrier to barrier."""

    step: StepInputs
    head: HeadTensors
    cache: DraftCache
    ws: Any
    """`Workspace`."""
    out: TreeOutputs
    x_in: Any
    """Address of the embeddings and features as operands."""
    num_active: Any
    depth: Any
    size: TreeSize
    stream: Any
    """Address of this program's stream of weights."""
    scales: Any
    """Address of its scales."""
    first_list: Any
    """int64: its first list of children in `Lists`."""
    num_rows: Any
    """LM-head rows that it has in use."""
    rows: Rows
    row: Any
    """int64 [BLOCK_M]: number of each row."""
    node: Any
    """int32 [BLOCK_M]: the token or node that it is of its sequence."""
    in_use: Any
    """int1 [BLOCK_M]: its sequence is active."""
    max_new: Any
    """Most new tokens of a sequence."""


class Level(NamedTuple):
    """One level of the tree: its nodes, and where the rows of its products come from, [BLOCK_M]."""

    number: Any
    is_extend: Any
    """Level 0: all new tokens enter the cache, and the last of them is the only node."""
    num_nodes: Any
    mask_in: Any
    """int1: rows of fc and qkv in use."""
    mask: Any
    """int1: rows of the nodes."""
    parent_row: Any
    """Row of each node's parent in the level before."""
    embed_row: Any
    """int64: where the row's embedding starts."""
    hidden_row: Any
    """int64: where its feature starts."""


@triton.jit
def next_phase(barrier_ptr, round, PROGRAMS: tl.constexpr):
    """Wait for all programs; returns the number of the barrier."""
    grid_barrier(barrier_ptr, round + 1, PROGRAMS)
    return round + 1


@triton.jit
def norm_features(draft, PLAN: tl.constexpr):
    """Normalise the new tokens' features, row by row."""
    ROW: tl.constexpr = PLAN.row
    ws = draft.ws
    for index in tl.range(tl.program_id(0), draft.num_active * ROWS, PLAN.grid.programs, disable_licm=True):
        unit = index + draft.num_active * 0
        slot = tl.load(draft.step.active_slots + unit // ROWS)
        if unit % ROWS < tl.load(draft.step.num_new + slot):
            row = unit % ROWS * PLAN.grid.stride + unit // ROWS
            source_ptr = ws.hidden + row.to(tl.int64) * PLAN.row.size
            norm_ptr = draft.head.norm_hidden
            write_row(source_ptr, draft.x_in, ws.factor, PLAN.grid.features + row, norm_ptr, True, ROW)


@triton.jit
def select(index, at_0, at_1, at_2, at_3):
    """Return one of four values."""
    return tl.where(index < 2, tl.where(index == 0, at_0, at_1), tl.where(index == 2, at_2, at_3))


@triton.jit
def read_new_tokens(features, tap_offset_1, tap_offset_2, draft, PLAN: tl.constexpr):
    """Extend: features and embeddings of the new tokens become operands."""
    ROW: tl.constexpr = PLAN.row
    TAPS: tl.constexpr = PLAN.taps
    FEATURES: tl.constexpr = PLAN.grid.features
    HIDDEN: tl.constexpr = PLAN.head.hidden
    NORMED: tl.constexpr = not PLAN.head.fused_every_level
    step, head, ws = draft.step, draft.head, draft.ws
    pid = tl.program_id(0)
    zero = pid * 0
    for index in tl.range(pid, draft.num_active * ROWS, PLAN.grid.programs, disable_licm=True):
        unit = index + zero
        a = unit // ROWS
        i = unit % ROWS
        slot = tl.load(step.active_slots + a).to(tl.int64)
        if i < tl.load(step.num_new + slot):
            token = tl.load(step.new_tokens + slot * PLAN.grid.width + i).to(tl.int64)
            row = i * PLAN.grid.stride + a
            embedding_ptr = head.embedding + token * head.stride_embedding
            write_row(embedding_ptr, draft.x_in, ws.factor, row, head.norm_in, NORMED, ROW)
            taps_ptr = features.taps + slot * features.stride_slot + i * features.stride_row
            if PLAN.head.fused_every_level or not PLAN.head.has_fc:
                write_row(taps_ptr, draft.x_in, ws.factor, FEATURES + row, head.norm_hidden, NORMED, ROW)
                offs_h = tl.arange(0, PLAN.row.block)
                feature = tl.load(taps_ptr + offs_h, mask=offs_h < HIDDEN, other=0.0).to(tl.float32)
                tl.store(ws.hidden + row.to(tl.int64) * HIDDEN + offs_h, feature, mask=offs_h < HIDDEN)
            else:
                x_ptr = ws.x + PLAN.operands.fc
                factor_ptr = ws.factor + FEATURES + row
                scaled: tl.constexpr = PLAN.head.scaled
                write_taps(taps_ptr, tap_offset_1, tap_offset_2, x_ptr, row, factor_ptr, head.norm_taps, TAPS, scaled)


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
def write_feature(draft, row, PLAN: tl.constexpr):
    """Write a node's output as the feature of its children."""
    ROW: tl.constexpr = PLAN.row
    head, factor_ptr = draft.head, draft.ws.factor
    source_ptr = draft.ws.hidden + row.to(tl.int64) * PLAN.head.hidden
    target = PLAN.grid.features + row
    if PLAN.head.norm_output:
        write_carried_row(source_ptr, draft.x_in, factor_ptr, target, head.norm_out, head.norm_hidden, ROW)
    else:
        is_normed: tl.constexpr = not PLAN.head.fused_every_level
        write_row(source_ptr, draft.x_in, factor_ptr, target, head.norm_hidden, is_normed, ROW)


@triton.jit
def choose_nodes(draft, a, level, first_candidate, PLAN: tl.constexpr):
    """Choose the next level's nodes of the a-th sequence, or after the last level the nodes of its tree."""
    TREE: tl.constexpr = PLAN.tree
    SELECT: tl.constexpr = PLAN.select
    GRID: tl.constexpr = PLAN.grid
    step, ws = draft.step, draft.ws
    slot = tl.load(step.active_slots + a)
    if level.number == draft.depth:
        newest = tl.load(step.num_new + slot) - 1
        root = tl.load(step.new_tokens + slot.to(tl.int64) * GRID.width + newest)
        at = a * TREE.candidates
        tree = TreeCandidates(ws.token + at, ws.score + at, ws.parent + at, ws.node_of + at, ws.chosen + a * TREE.total)
        build_tree(tree, root, slot, draft.out, draft.size, TREE)
    else:
        row = a * ROWS
        keys_ptr = ws.child_key + row * PLAN.select.max_k
        score_ptr = ws.frontier_score + row
        candidate_ptr = ws.frontier_candidate + row
        nodes = Frontier(score_ptr, candidate_ptr, ws.frontier_parent + row, ws.frontier_child + row)
        chain = chain_at(ws.chain, level.number, row, GRID.stride)
        next_chain = chain_at(ws.chain, level.number + 1, row, GRID.stride)
        choose_frontier(keys_ptr, level.num_nodes, first_candidate, level.number, nodes, chain, next_chain, SELECT)


@triton.jit
def gather_children(draft, rank, token, a, node, row, first_job, stride, PLAN: tl.constexpr):
    """Write the embeddings of a node's children and, as one more job, its output as their feature.

    Of the ``top_k + 1`` jobs this program does every ``stride``-th from ``first_job`` on.
    """
    ROW: tl.constexpr = PLAN.row
    TOP_K: tl.constexpr = PLAN.select.top_k
    GATHER: tl.constexpr = PLAN.gather
    NORMED: tl.constexpr = not PLAN.head.fused_every_level
    head, ws = draft.head, draft.ws
    if GATHER > 1:
        for first in tl.range(first_job, TOP_K, GATHER * stride, disable_licm=True):
            jobs = first + tl.arange(0, GATHER) * stride
            child_token = tl.max(tl.where(rank[None, :] == jobs[:, None], token[None, :], 0), axis=1)
            source = child_token.to(tl.int64) * head.stride_embedding
            to = a * PLAN.grid.embed_rows + node * TOP_K + jobs
            in_use = jobs < TOP_K
            write_rows(head.embedding, source, in_use, draft.x_in, ws.factor, to, head.norm_in, NORMED, ROW)
        if first_job == TOP_K % stride:
            write_feature(draft, row, PLAN)
    else:
        for job in tl.range(first_job, TOP_K + 1, stride, disable_licm=True):
            if job < TOP_K:
                child_token = tl.max(tl.where(rank == job, token, 0), axis=0).to(tl.int64)
                source_ptr = head.embedding + child_token * head.stride_embedding
                to = a * PLAN.grid.embed_rows + node * TOP_K + job
                write_row(source_ptr, draft.x_in, ws.factor, to, head.norm_in, NORMED, ROW)
            else:
                write_feature(draft, row, PLAN)


@triton.jit
def pick(draft, level, PLAN: tl.constexpr):
    """Merge each node's children, score them, choose the next frontier or build the tree, and gather embeddings.

    Several programs merge the same node; the first records it, the others gather its children's embeddings. The
    program that merges a sequence's last node chooses.
    """
    TREE: tl.constexpr = PLAN.tree
    SELECT: tl.constexpr = PLAN.select
    PROGRAMS: tl.constexpr = PLAN.grid.programs
    TOP_K: tl.constexpr = SELECT.top_k
    ws, num_nodes = draft.ws, level.num_nodes
    pid = tl.program_id(0)
    zero = pid * 0
    last = level.number == draft.depth
    num_rows = draft.num_active * num_nodes
    copies = tl.where(last, 1, tl.minimum(tl.maximum(PROGRAMS // num_rows, 1), TOP_K + 2))
    first_candidate = tl.where(level.number == 0, 0, TOP_K + (level.number - 1) * TOP_K * TOP_K)
    for index in tl.range(pid, num_rows * copies, PROGRAMS, disable_licm=True):
        unit = index + zero
        copy = unit // num_rows
        a = (unit % num_rows) // num_nodes
        node = (unit % num_rows) % num_nodes
        row = node * PLAN.grid.stride + a
        frontier_row = a * ROWS + node
        lists = lists_at(Lists(ws.best_key, ws.best_max, ws.best_sum), row, SELECT)
        num_lists = tl.minimum(draft.head.draft_vocab, PROGRAMS)
        rank, value, token, lse = merge_best(lists, ws.owner + pid * SELECT.max_k, num_lists, SELECT)
        if copy == 0:
            base = tl.load(ws.frontier_score + frontier_row, mask=level.number > 0, other=0.0)
            score = base + tl.minimum(value - lse, 0.0)
            parent = tl.load(ws.frontier_candidate + frontier_row, mask=level.number > 0, other=-1)
            record_children(ws, rank, score, token, parent, a, node, first_candidate, SELECT, TREE)
            tl.debug_barrier()
            if tl.atomic_add(ws.node_arrivals + a, 1, sem="acq_rel") == num_nodes - 1:
                tl.store(ws.node_arrivals + a, 0)
                choose_nodes(draft, a, level, first_candidate, PLAN)
        if ((copy > 0) | (copies == 1)) & (level.number < draft.depth):
            first_job = tl.maximum(copy - 1, 0)
            gather_children(draft, rank, token, a, node, row, first_job, tl.maximum(copies - 1, 1), PLAN)


@triton.jit
def begin(step, head, cache, ws, out, depth, total_tokens, PLAN: tl.constexpr):
    """Read how much there is to do: returns the `Draft` of this program."""
    STREAM: tl.constexpr = PLAN.stream
    PROGRAMS: tl.constexpr = PLAN.grid.programs
    BLOCK_M: tl.constexpr = PLAN.select.block_m
    TOP_K: tl.constexpr = PLAN.select.top_k
    pid = tl.program_id(0)
    num_active = tl.load(step.active_count)
    stream = head.stream + pid.to(tl.int64) * STREAM.size
    scales = head.scales + pid * STREAM.num_scales
    first_list = pid.to(tl.int64) * BLOCK_M
    offs_m = tl.arange(0, BLOCK_M)
    seq = offs_m % PLAN.grid.stride
    node = offs_m // PLAN.grid.stride
    in_use = seq < num_active
    slot = tl.load(step.active_slots + seq, mask=in_use, other=0)
    num_new = tl.load(step.num_new + slot, mask=in_use, other=0)
    prefix = tl.load(step.prefix + slot, mask=in_use, other=0)
    rows = Rows(seq, slot, prefix, num_new)
    max_new = tl.maximum(tl.max(num_new, axis=0), 1)
    num_rows = (head.draft_vocab - pid + PROGRAMS - 1) // PROGRAMS
    x_in = ws.x + PLAN.operands.inputs
    if PLAN.head.raw_input:
        x_in = ws.x_raw
    size = TreeSize(TOP_K + depth * TOP_K * TOP_K, total_tokens, depth + 2)
    return Draft(
        step,
        head,
        cache,
        ws,
        out,
        x_in,
        num_active,
        depth,
        size,
        stream,
        scales,
        first_list,
        num_rows,
        rows,
        offs_m.to(tl.int64),
        node,
        in_use,
        max_new,
    )


@triton.jit
def rows_of_level(draft, number, PLAN: tl.constexpr):
    """Find where the rows of a level come from: returns its `Level`."""
    STRIDE: tl.constexpr = PLAN.grid.stride
    HIDDEN: tl.constexpr = PLAN.head.hidden
    TOP_K: tl.constexpr = PLAN.select.top_k
    ws, seq, node = draft.ws, draft.rows.seq, draft.node
    offs_m = tl.arange(0, PLAN.select.block_m)
    is_extend = number == 0
    num_nodes = tl.where(is_extend, 1, TOP_K)
    # Where there are several passes, reading rows after a sequence's new tokens costs less than masks for each.
    num_in = ROWS if PLAN.has_repeats else draft.rows.num_new
    mask_in = draft.in_use & (node < tl.where(is_extend, num_in, TOP_K))
    mask = draft.in_use & (node < num_nodes)
    known = mask & (number + offs_m * 0 > 0)
    parent = tl.load(ws.frontier_parent + seq * ROWS + node, mask=known, other=0)
    child = tl.load(ws.frontier_child + seq * ROWS + node, mask=known, other=0)
    parent_row = parent * STRIDE + seq
    embed_row = seq * PLAN.grid.embed_rows + parent * TOP_K + child
    embed_row = tl.where(is_extend, offs_m, embed_row).to(tl.int64) * HIDDEN
    hidden_row = (PLAN.grid.features + tl.where(is_extend, offs_m, parent_row)).to(tl.int64) * HIDDEN
    return Level(number, is_extend, num_nodes, mask_in, mask, parent_row, embed_row, hidden_row)


@triton.jit
def fused_operand(draft, level, PLAN: tl.constexpr):
    """Return where fc leaves its result as an operand, and the factors that raw features are multiplied by."""
    factor = tl.full([PLAN.select.block_m], 1.0, tl.float32)
    # Rows of the extend pass each have a feature of their own.
    if PLAN.head.raw_input:
        source = PLAN.grid.features + tl.where(level.is_extend, tl.arange(0, PLAN.select.block_m), level.parent_row)
        factor = tl.load(draft.ws.factor + source, mask=level.mask_in, other=1.0)
    return NextOperand(draft.ws.x + PLAN.operands.fc, factor)


@triton.jit
def fuse_raw(draft, level, fused, round, PLAN: tl.constexpr):
    """Multiply by fc where embeddings and features stay as they are; returns the number of the barrier."""
    LAYER: tl.constexpr = PLAN.layer
    SUM_HIDDEN: tl.constexpr = PLAN.sum_hidden
    HEAD: tl.constexpr = PLAN.head
    split: tl.constexpr = PLAN.stream.split.fc
    ws = draft.ws
    sums = PartialSums(ws.partial, split, PLAN.stream.group_rows.fc)
    segment: tl.constexpr = HEAD.hidden // PLAN.layer_chunk
    raw = Operand(ws.x_raw, level.embed_row, level.hidden_row, level.mask_in, segment, HEAD.hidden)
    num_chunks: tl.constexpr = HEAD.fc_in // PLAN.layer_chunk
    multiply_splits(raw, draft.stream, sums, num_chunks, PLAN.grid.programs, PLAN.layer_chunk, LAYER)
    if split > 1:
        round = next_phase(ws.barrier, round, PLAN.grid.programs)
    else:
        tl.debug_barrier()
    factor = tl.full([PLAN.select.block_m], 1.0, tl.float32)
    bias = draft.head.biases + HEAD.biases.fc
    finish_rows(sums, level.mask_in, factor, draft.scales, bias, ws.hidden, fused, SUM_HIDDEN, HEAD.has_fc_bias, True)
    return next_phase(ws.barrier, round, PLAN.grid.programs)


@triton.jit
def multiply(draft, level, which, first, round, PLAN: tl.constexpr):
    """Multiply rows from ``first`` on by projection ``which``: returns `PartialSums`, and the number of the barrier."""
    LAYER: tl.constexpr = PLAN.layer
    HEAD: tl.constexpr = PLAN.head
    FUSED: tl.constexpr = HEAD.fused_every_level
    STREAM: tl.constexpr = PLAN.stream
    OPERANDS: tl.constexpr = PLAN.operands
    # In EAGLE-3 qkv, in EAGLE-1/2 fc takes (embedding, feature); the other projections have rows of their own.
    pairs = which == (FC_PASS if FUSED else QKV_PASS)
    x_fc: tl.constexpr = OPERANDS.inputs if FUSED else OPERANDS.fc
    x_qkv: tl.constexpr = OPERANDS.fc if FUSED else OPERANDS.inputs
    x_start = select(which, x_fc, x_qkv, OPERANDS.attention, OPERANDS.mlp)
    row_size = select(which, HEAD.hidden if FUSED else HEAD.fc_in, HEAD.hidden, HEAD.attention, HEAD.intermediate)
    in_features = select(which, HEAD.fc_in, HEAD.qkv_in, HEAD.attention, HEAD.intermediate)
    split = select(which, STREAM.split.fc, STREAM.split.qkv, STREAM.split.o, STREAM.split.down)
    group_rows = select(which, STREAM.group_rows.fc, STREAM.group_rows.qkv, STREAM.group_rows.o, STREAM.group_rows.down)
    sums = PartialSums(draft.ws.partial, split, group_rows)
    operand_row = tl.where(pairs, level.embed_row, draft.row * row_size)
    operand_mask = tl.where(which <= QKV_PASS, level.mask_in, level.mask)
    region = draft.stream + select(which, 0, STREAM.offsets.qkv, STREAM.offsets.o, STREAM.offsets.down)
    num_chunks = in_features // PLAN.layer_chunk
    segment = tl.where(pairs, HEAD.hidden // PLAN.layer_chunk, in_features)
    x_ptr = draft.ws.x + x_start + first * row_size * (2 if HEAD.scaled else 1)
    operand = Operand(x_ptr, operand_row, level.hidden_row, operand_mask, segment, row_size)
    multiply_splits(operand, region, sums, num_chunks, PLAN.grid.programs, PLAN.layer_chunk, LAYER)
    if split > 1:
        round = next_phase(draft.ws.barrier, round, PLAN.grid.programs)
    else:
        tl.debug_barrier()  # the sums are the program's own
    return sums, round


@triton.jit
def finish_fc(draft, level, sums, first, is_last, fused, round, PLAN: tl.constexpr):
    """Add up fc; EAGLE-3's features are normalised behind a barrier. Returns the number of the barrier."""
    SUM_HIDDEN: tl.constexpr = PLAN.sum_hidden
    HEAD: tl.constexpr = PLAN.head
    FUSED: tl.constexpr = HEAD.fused_every_level
    ws = draft.ws
    factor = tl.full([PLAN.select.block_m], 1.0, tl.float32)
    if HEAD.scaled:
        row = PLAN.grid.features + first + tl.arange(0, PLAN.select.block_m)
        factor = tl.load(ws.factor + row, mask=level.mask_in, other=0.0)
    bias = draft.head.biases + HEAD.biases.fc
    out_ptr = ws.hidden + first * HEAD.hidden
    operand = NextOperand(fused.ptr + first * HEAD.hidden, fused.factor)
    finish_rows(sums, level.mask_in, factor, draft.scales, bias, out_ptr, operand, SUM_HIDDEN, HEAD.has_fc_bias, FUSED)
    if not FUSED:  # noqa: SIM102 - this one is decided by the compiler
        if is_last:
            round = next_phase(ws.barrier, round, PLAN.grid.programs)
            norm_features(draft, PLAN)
    return round


@triton.jit
def finish_qkv(draft, level, sums, first, is_last, fused, round, PLAN: tl.constexpr):
    """Add up q, k and v, and attend once all rows are there. Returns the number of the barrier."""
    SUM_QKV: tl.constexpr = PLAN.sum_qkv
    ATTENTION: tl.constexpr = PLAN.attention
    PROGRAMS: tl.constexpr = PLAN.grid.programs
    ws, head = draft.ws, draft.head
    factor = 1.0 / fused.factor
    scales = draft.scales + PLAN.stream.scales.qkv
    bias = head.biases + PLAN.head.biases.qkv
    out_ptr = ws.qkv + first * PLAN.sum_qkv.features
    has_bias: tl.constexpr = PLAN.head.has_qkv_bias
    finish_rows(sums, level.mask_in, factor, scales, bias, out_ptr, fused, SUM_QKV, has_bias, False)
    if is_last:
        round = next_phase(ws.barrier, round, PROGRAMS)
        rows, num_active = draft.rows, draft.num_active
        rope = Rope(head.cos, head.sin, head.norm_heads)
        splits = AttentionSplits(ws.split_stat, ws.split_acc)
        attend(ws.qkv, draft.cache, rope, ws.chain, splits, rows, num_active, level.number, PROGRAMS, ATTENTION)
        round = next_phase(ws.barrier, round, PROGRAMS)
        merge_heads(splits, ws.x + PLAN.operands.attention, rows, num_active, level.num_nodes, PROGRAMS, ATTENTION)
    return round


@triton.jit
def finish_o(draft, level, sums, factor, x_scale, round, PLAN: tl.constexpr):
    """Add up o and the residual; then gate, up and the activation. Returns the number of the barrier."""
    SUM_HIDDEN: tl.constexpr = PLAN.sum_hidden
    ROW: tl.constexpr = PLAN.row
    MLP: tl.constexpr = PLAN.mlp
    HEAD: tl.constexpr = PLAN.head
    NORMED: tl.constexpr = HEAD.norm_before_residual
    ws, head = draft.ws, draft.head
    newest = (draft.rows.num_new - 1) * PLAN.grid.stride + draft.rows.seq
    offs_m = tl.arange(0, PLAN.select.block_m)
    source = tl.where(level.is_extend, newest, offs_m if HEAD.fused_every_level else level.parent_row)
    scales = draft.scales + PLAN.stream.scales.o
    bias = head.biases + HEAD.biases.o
    residual = Residual(ws.hidden, source, factor, head.norm_hidden, ws.middle, ws.squares_post, head.norm_post)
    operand = NextOperand(ws.x + PLAN.operands.post, x_scale)
    finish_residual(sums, level.mask, scales, bias, residual, operand, SUM_HIDDEN, HEAD.has_o_bias, True, NORMED)
    round = next_phase(ws.barrier, round, PLAN.grid.programs)
    x_ptr = ws.x + PLAN.operands.post
    factor = norm_factor(ws.squares_post, level.mask, PLAN.grid.programs, ROW) / x_scale
    region_ptr = draft.stream + PLAN.stream.offsets.mlp
    scales = draft.scales + PLAN.stream.scales.mlp
    bias = head.biases + HEAD.biases.mlp
    gated_mlp(x_ptr, factor, level.mask, region_ptr, scales, bias, ws.x + PLAN.operands.mlp, MLP)
    return round


@triton.jit
def finish_down(draft, level, sums, x_scale, PLAN: tl.constexpr):
    """Add up down and the residual: the output of each node."""
    SUM_HIDDEN: tl.constexpr = PLAN.sum_hidden
    HEAD: tl.constexpr = PLAN.head
    BLOCK_M: tl.constexpr = PLAN.select.block_m
    HAS_NORM: tl.constexpr = not HEAD.fused_every_level
    ws, head = draft.ws, draft.head
    scales = draft.scales + PLAN.stream.scales.down
    bias = head.biases + HEAD.biases.down
    row = tl.arange(0, BLOCK_M)
    factor = tl.full([BLOCK_M], 1.0, tl.float32)
    residual = Residual(ws.middle, row, factor, head.norm_post, ws.hidden, ws.squares_out, head.norm_out)
    operand = NextOperand(ws.x + PLAN.operands.head, x_scale)
    finish_residual(sums, level.mask, scales, bias, residual, operand, SUM_HIDDEN, HEAD.has_mlp_bias, HAS_NORM, False)


@triton.jit
def rank_rows(draft, level, x_scale, PLAN: tl.constexpr):
    """Multiply each node's output by this program's rows of the LM head, and keep the best of them."""
    ROW: tl.constexpr = PLAN.row
    SELECT: tl.constexpr = PLAN.select
    LM_HEAD: tl.constexpr = PLAN.lm_head
    STREAM: tl.constexpr = PLAN.stream
    ws, head = draft.ws, draft.head
    factor = 1.0
    if not PLAN.head.fused_every_level:
        factor = norm_factor(ws.squares_out, level.mask, PLAN.grid.programs, ROW)
    factor = factor / x_scale
    nodes = Nodes(draft.num_active, level.num_nodes)
    scratch = ws.scratch + draft.first_list * PLAN.lm_head.tile.block_n
    ids_ptr = head.row_ids + tl.program_id(0) * STREAM.rows.head
    rows = ProgramRows(draft.stream + STREAM.offsets.head, draft.scales + STREAM.scales.head, ids_ptr, draft.num_rows)
    lists = lists_at(Lists(ws.best_key, ws.best_max, ws.best_sum), draft.first_list, SELECT)
    x_row = draft.row * PLAN.head.hidden
    x_ptr = ws.x + PLAN.operands.head
    stream_topk(x_ptr, factor, x_row, level.mask, nodes, rows, scratch, lists, SELECT, LM_HEAD)


@triton.jit
def draft_level(draft, number, round, PLAN: tl.constexpr):
    """Run one level of the tree up to its children; returns the number of the barrier."""
    PROGRAMS: tl.constexpr = PLAN.grid.programs
    HEAD: tl.constexpr = PLAN.head
    level = rows_of_level(draft, number, PLAN)
    # FP8 pairs want operands of order one: rows not yet normalised take the factor of the feature they came from,
    # which the extend pass knows only after `norm_features`.
    x_scale = tl.full([PLAN.select.block_m], 1.0, tl.float32)
    fused = fused_operand(draft, level, PLAN)
    if HEAD.raw_input:
        round = fuse_raw(draft, level, fused, round, PLAN)
    first_pass = tl.where(level.is_extend, FC_PASS if HEAD.fc_in_loop else QKV_PASS, QKV_PASS)
    if HEAD.fused_every_level and HEAD.fc_in_loop:
        first_pass = tl.program_id(0) * 0 + FC_PASS
    repeats = 1  # of fc and of qkv, each time over further new tokens
    if PLAN.has_repeats:
        repeats = tl.where(level.is_extend, tl.cdiv(draft.max_new * PLAN.grid.stride, PLAN.select.block_m), 1)
    for index in tl.range(first_pass * repeats, 2 * repeats + 2, disable_licm=True):
        which = index + tl.program_id(0) * 0
        first = 0  # row of this pass
        is_last = True
        if PLAN.has_repeats:
            is_repeated = index < 2 * repeats
            which = tl.where(is_repeated, index // repeats, index - 2 * repeats + 2)
            first = tl.where(is_repeated, index % repeats, 0) * PLAN.select.block_m
            is_last = index % repeats == repeats - 1
        sums, round = multiply(draft, level, which, first, round, PLAN)
        if HEAD.fc_in_loop:  # noqa: SIM102 - this one is decided by the compiler
            if which == FC_PASS:
                round = finish_fc(draft, level, sums, first, is_last, fused, round, PLAN)
        if which == QKV_PASS:
            round = finish_qkv(draft, level, sums, first, is_last, fused, round, PLAN)
        elif which == O_PASS:
            # RMSNorm's factor of the feature that each node came from.
            factor = tl.full([PLAN.select.block_m], 1.0, tl.float32)
            if HEAD.scaled or HEAD.norm_before_residual:
                newest = (draft.rows.num_new - 1) * PLAN.grid.stride + draft.rows.seq
                origin = PLAN.grid.features + tl.where(level.is_extend, newest, level.parent_row)
                factor = tl.load(draft.ws.factor + origin, mask=level.mask, other=1.0)
            if HEAD.scales_residual:
                x_scale = factor
            round = finish_o(draft, level, sums, factor, x_scale, round, PLAN)
        elif which == DOWN_PASS:
            finish_down(draft, level, sums, x_scale, PLAN)
        round = next_phase(draft.ws.barrier, round, PROGRAMS)
    rank_rows(draft, level, x_scale, PLAN)
    round = next_phase(draft.ws.barrier, round, PROGRAMS)
    pick(draft, level, PLAN)
    return round


# Separate taps lie anywhere, and slots and trees change: none must make another kernel.
@triton.jit(do_not_specialize=["tap_offset_1", "tap_offset_2", "num_slots", "depth", "total_tokens"])
def draft_kernel(
    features,  # `Features`
    tap_offset_1: tl.int64,  # where the second and third tap begin, in values from the first
    tap_offset_2: tl.int64,
    num_slots,
    depth,  # of the trees of this launch, and their nodes: at most those of `TreeBounds`
    total_tokens,
    step,  # `StepInputs`
    head,  # `HeadTensors`
    cache,  # `DraftCache`
    ws,  # `Workspace`
    out,  # `TreeOutputs`
    PLAN: tl.constexpr,  # `DraftPlan`
):
    """Draft; see the module docstring. All bounds are fixed by the constants, all counts are read on the device."""
    SELECT: tl.constexpr = PLAN.select
    TREE: tl.constexpr = PLAN.tree
    PROGRAMS: tl.constexpr = PLAN.grid.programs
    pid = tl.program_id(0)
    zero = pid * 0  # added to loop counters: the interpreter's are Python integers, a program's are tensors
    draft = begin(step, head, cache, ws, out, depth, total_tokens, PLAN)
    round = 0
    for index in range(PROGRAMS + pid, PLAN.grid.lists, PROGRAMS):
        clear_lists(ws.best_key + index * PLAN.select.block_m * PLAN.select.max_k, SELECT)
    for index in tl.range(pid, num_slots, PROGRAMS, disable_licm=True):
        slot = index + zero
        if tl.load(step.active_inverse + slot) < 0:
            blank_tree(slot, out, draft.size, TREE)
    read_new_tokens(features, tap_offset_1, tap_offset_2, draft, PLAN)
    round = next_phase(ws.barrier, round, PROGRAMS)
    for index in tl.range(0, depth + 1, disable_licm=True):
        number = index + zero
        round = draft_level(draft, number, round, PLAN)
        if number < depth:
            round = next_phase(ws.barrier, round, PROGRAMS)
    leave_grid(ws.barrier, PROGRAMS)


def is_interpreted() -> bool:
    """Tell if kernels run in Triton's interpreter, as ``TRITON_INTERPRET=1`` has it when they are imported."""
    return not isinstance(draft_kernel, triton.JITFunction)
