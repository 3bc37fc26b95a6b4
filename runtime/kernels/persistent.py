"""The persistent drafter: one cooperative launch drafts a whole tree for every active sequence.

One program runs on each SM and stays there for the whole draft. Work moves from phase to phase through buffers that
live in the L2, with a grid barrier between phases; weights are the only thing read from memory, each once per level:

====  ==================================================================================================
fc    features of the new tokens: ``fc`` over the target's taps (EAGLE-3), or over (embedding, feature) at
      every level (EAGLE-1/2)
qkv   RMSNorms were applied by whoever wrote the rows; q, k, v of all rows
att   `ancestor_attention.attend_unit`: RoPE, KV append, prefix + ancestors; then `merge_parts`
o     output projection, residual, partial sums of squares for the RMSNorm that follows
mlp   gate and up, SiLU; then down, residual, sums of squares
head  `lm_topk.stream_topk`: LM head over the draft vocabulary, k best and log-sum-exp per program
pick  merge per node; candidates' scores; best top_k become the next frontier; their embeddings are gathered
tree  after the last level, `tree_build.build_tree`
====  ==================================================================================================

fc, qkv, o and down go through one loop (`projections`): each pass multiplies, waits, adds up the parts, and does what
follows. One loop instead of four keeps the program small: a level's code is read anew at every level, and what the
compiler computes ahead for each product would fill the registers.

Level 0 is the extend pass: up to 16 newly accepted tokens per sequence enter the KV cache and only the last of them
(the pair of the last verified feature and the tree's root) goes on past attention. RMSNorm is linear but for one factor
per row, so ``o`` and ``down`` write rows already times the norm's weight and the factor multiplies the next product's
result.

Rows are numbered ``r = 16 * a + n``: node n of the a-th active sequence. Frontier scores and candidate numbering follow
`eagle_slim.runtime.tree`. Every program takes part in every barrier, so no phase returns early.
"""

import triton
import triton.language as tl

from .ancestor_attention import attend, merge_heads
from .grid_barrier import grid_barrier, leave_grid
from .lm_topk import clear_lists, merge_best, stream_topk
from .projections import finish_residual, finish_rows, stream_parts
from .selection import LOWEST_KEY, count_ahead, key_index, key_value, order_key
from .tree_build import blank_tree, build_tree
from .weight_stream import (
    hidden_zero,
    operand_dot,
    operand_mask,
    operand_rows,
    operand_sum,
    store_activation,
)

ROWS = tl.constexpr(16)
FC_PASS, QKV_PASS, O_PASS, DOWN_PASS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
"""A level's loop over projections."""


@triton.jit
def write_row(
    source_ptr, x_ptr, factor_ptr, row, norm_ptr,
    EPS: tl.constexpr, NORMED: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write one row of SIZE values as an operand, through RMSNorm when NORMED, and its RMSNorm factor."""
    offs = tl.arange(0, BLOCK) + hidden_zero()
    mask = offs < SIZE
    x = tl.load(source_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    factor = tl.rsqrt(tl.sum(x * x, axis=0) / SIZE + EPS)
    tl.store(factor_ptr + row, factor)
    if NORMED:
        x = x * factor * tl.load(norm_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    store_activation(x_ptr, row.to(tl.int64), offs, x, mask, SIZE)


@triton.jit
def write_taps(
    source_ptr, source_offset_1, source_offset_2, x_ptr, row, factor_ptr,
    SEGMENTS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Write one row of SEGMENTS pieces of SIZE values as an operand; SCALED: divided by ``max|row| / 256``, which is
    stored at ``factor_ptr``."""
    offs = tl.arange(0, BLOCK) + hidden_zero()
    divisor = 1.0
    if SCALED:
        peak = tl.zeros([BLOCK], tl.float32)
        for part in tl.static_range(SEGMENTS):
            start = source_offset_1 if part == 1 else (source_offset_2 if part == 2 else 0)
            value = tl.load(source_ptr + start + offs, mask=offs < SIZE, other=0.0).to(tl.float32)
            peak = tl.maximum(peak, tl.abs(value))
        divisor = tl.max(peak, axis=0) / 256.0
        divisor = tl.where(divisor > 0, divisor, 1.0)
        tl.store(factor_ptr, divisor)
    for part in tl.static_range(SEGMENTS):
        start = source_offset_1 if part == 1 else (source_offset_2 if part == 2 else 0)
        x = tl.load(source_ptr + start + offs, mask=offs < SIZE, other=0.0).to(tl.float32) / divisor
        store_activation(x_ptr, row.to(tl.int64), part * SIZE + offs, x, offs < SIZE, SEGMENTS * SIZE)


@triton.jit
def norm_features(
    hidden_ptr, x_in_ptr, factor_ptr, norm_ptr, active_slots_ptr, num_new_ptr, num_active,
    NUM_CTAS: tl.constexpr, FEATURES: tl.constexpr, EPS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Normalise the new tokens' features, row by row."""
    for index in tl.range(tl.program_id(0), num_active * ROWS, NUM_CTAS, disable_licm=True):
        row = index + num_active * 0
        slot = tl.load(active_slots_ptr + row // ROWS)
        if row % ROWS < tl.load(num_new_ptr + slot):
            source_ptr = hidden_ptr + row.to(tl.int64) * SIZE
            write_row(source_ptr, x_in_ptr, factor_ptr, FEATURES + row, norm_ptr, EPS, True, SIZE, BLOCK)


@triton.jit
def norm_factor(squares_ptr, mask_m, NUM_CTAS: tl.constexpr, EPS: tl.constexpr, SIZE: tl.constexpr,
                BLOCK_M: tl.constexpr):  # fmt: skip
    """RMSNorm's factor of each row from the programs' partial sums of squares [NUM_CTAS, BLOCK_M]: fp32 [BLOCK_M]."""
    CHUNK: tl.constexpr = 4096 // BLOCK_M
    zero = hidden_zero()
    offs_p = tl.arange(0, CHUNK) + zero
    offs_m = tl.arange(0, BLOCK_M) + zero
    total = tl.zeros([BLOCK_M], tl.float32)
    for first in tl.static_range(0, NUM_CTAS, CHUNK):
        mask = ((first + offs_p) < NUM_CTAS)[:, None] & mask_m[None, :]
        part = tl.load(squares_ptr + (first + offs_p)[:, None] * BLOCK_M + offs_m[None, :], mask=mask, other=0.0)
        total += tl.sum(part, axis=0)
    return tl.rsqrt(total / SIZE + EPS)


@triton.jit
def select(index, at_0, at_1, at_2, at_3):
    """One of four values."""
    return tl.where(index < 2, tl.where(index == 0, at_0, at_1), tl.where(index == 2, at_2, at_3))


@triton.jit
def gated_mlp(
    x_ptr, factor, mask_m, region_ptr, scale_ptr, out_ptr,
    HIDDEN: tl.constexpr, INTERMEDIATE: tl.constexpr, R: tl.constexpr, SCALED: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_M: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write ``silu(gate) * up`` of this program's rows as operand of down; ``factor`` is RMSNorm's, per row."""
    zero = hidden_zero()
    offs_m = (tl.arange(0, BLOCK_M) + zero).to(tl.int64)
    offs_n = tl.arange(0, BLOCK_N) + zero
    offs_k = tl.arange(0, BLOCK_K) + zero
    x_row = operand_rows(x_ptr, offs_m * HIDDEN, HIDDEN)
    mask_x = operand_mask(x_ptr, mask_m)
    for n0 in tl.range(0, R, BLOCK_N, disable_licm=True):
        region = region_ptr + n0 * BLOCK_K
        w_offs = offs_n[:, None] * BLOCK_K + offs_k[None, :]
        mask_w = (n0 + offs_n < R)[:, None]
        gate = tl.zeros([BLOCK_N, mask_x.shape[0]], tl.float32)
        up = tl.zeros([BLOCK_N, mask_x.shape[0]], tl.float32)
        for k in tl.range(0, HIDDEN // BLOCK_K + zero, num_stages=STAGES):
            x_offs = x_row[None, :] + (k * BLOCK_K + offs_k)[:, None]
            x = tl.load(x_ptr + x_offs, mask=mask_x[None, :], other=0.0)
            slab = region + k * (2 * R * BLOCK_K)
            gate = operand_dot(tl.load(slab + w_offs, mask=mask_w, other=0.0), x, gate)
            up = operand_dot(tl.load(slab + R * BLOCK_K + w_offs, mask=mask_w, other=0.0), x, up)
        gate = operand_sum(x_ptr, gate)
        up = operand_sum(x_ptr, up)
        feature = tl.program_id(0) * R + n0 + offs_n
        mine = (n0 + offs_n < R) & (feature < INTERMEDIATE)
        if SCALED:
            gate *= tl.load(scale_ptr + n0 + offs_n, mask=mine, other=0.0)[:, None]
            up *= tl.load(scale_ptr + R + n0 + offs_n, mask=mine, other=0.0)[:, None]
        gate *= factor[None, :]
        mixed = gate * tl.sigmoid(gate) * up * factor[None, :]
        # FP8 pairs hold magnitudes to 448; halved, activations to 896.
        mixed *= 0.5 if SCALED else 1.0
        mask = mine[:, None] & mask_m[None, :]
        store_activation(out_ptr, offs_m[None, :], feature[:, None], mixed, mask, INTERMEDIATE)


@triton.jit
def choose_frontier(
    key_ptr,  # int64 [nodes, MAX_K]: children of this level's nodes of one sequence, by score and candidate
    num_nodes,
    first_candidate,
    level,
    frontier_score_ptr,
    frontier_candidate_ptr,
    frontier_parent_ptr,  # node of this level whose child it is
    frontier_child_ptr,  # and which child
    chain_ptr,  # int32 [ROWS, MAX_DEPTH] of this level's nodes
    next_chain_ptr,  # of the next level's
    TOP_K: tl.constexpr,
    MAX_K: tl.constexpr,
    PAIRS: tl.constexpr,
    MAX_DEPTH: tl.constexpr,
):
    """Choose the best TOP_K candidates of a level as the next level's nodes, and extend their ancestor chains."""
    zero = hidden_zero()
    offs_k = tl.arange(0, MAX_K) + zero
    offs_e = tl.arange(0, MAX_DEPTH) + zero
    place = tl.arange(0, PAIRS) + zero
    num_keys = num_nodes * MAX_K
    key = tl.load(key_ptr + place, mask=place < num_keys, other=LOWEST_KEY)
    rank = count_ahead(key, key_ptr, num_keys, 1, MAX_K)
    chosen = (key != LOWEST_KEY) & (rank < TOP_K)
    candidate = key_index(key)
    tl.store(frontier_score_ptr + rank, key_value(key), mask=chosen)
    tl.store(frontier_candidate_ptr + rank, first_candidate + candidate, mask=chosen)
    tl.store(frontier_parent_ptr + rank, candidate // TOP_K, mask=chosen)
    tl.store(frontier_child_ptr + rank, candidate % TOP_K, mask=chosen)
    tl.debug_barrier()
    mask_k = offs_k < TOP_K
    parent = tl.load(frontier_parent_ptr + offs_k, mask=mask_k, other=0)
    older = (offs_e < level - 1)[None, :] & mask_k[:, None]
    chain = tl.load(chain_ptr + parent[:, None] * MAX_DEPTH + offs_e[None, :], mask=older, other=-1)
    chain = tl.where((offs_e == level - 1)[None, :], (level - 1) * TOP_K + parent[:, None], chain)
    tl.store(next_chain_ptr + offs_k[:, None] * MAX_DEPTH + offs_e[None, :], chain, mask=mask_k[:, None])


# Separate taps lie anywhere: their distances must not make another kernel.
@triton.jit(do_not_specialize=["tap_offset_1", "tap_offset_2"])
def draft_kernel(
    # what the target handed over, per slot
    tap_ptr,  # taps of the new tokens [slots, 16, taps]
    tap_offset_1: tl.int64, tap_offset_2: tl.int64, stride_tap_slot, stride_tap_row,
    new_token_ptr,  # int32 [slots, 16]: the token after each feature; the last one is the root
    num_new_ptr, prefix_ptr,  # int32 [slots]
    active_slots_ptr, active_inverse_ptr, active_count_ptr,  # int32 [slots], [slots] (-1: inactive), [1]
    # weights
    stream_ptr, scale_ptr, row_id_ptr, embed_ptr, norm_in_ptr, norm_hidden_ptr, norm_post_ptr, norm_out_ptr,
    fc_bias_ptr, qkv_bias_ptr, cos_ptr, sin_ptr, draft_vocab, stride_embed,
    # KV cache [slots, kv_heads, positions, head_dim]
    key_ptr, value_ptr, stride_cache_slot, stride_cache_head,
    # operands of products (`store_activation`), one after the other; and raw embeddings and features in front of FP8 fc
    x_ptr, x_raw_ptr,
    # fp32 workspace
    partial_ptr, hidden_ptr, middle_ptr, qkv_ptr, squares_post_ptr, squares_out_ptr, scratch_ptr,
    best_max_ptr, best_sum_ptr, score_ptr, frontier_score_ptr, part_stat_ptr, part_acc_ptr, factor_ptr,
    best_key_ptr, child_key_ptr,  # int64
    # int32 workspace
    owner_ptr, token_ptr, parent_ptr, node_of_ptr, chosen_ptr, frontier_candidate_ptr, frontier_parent_ptr,
    frontier_child_ptr, chain_ptr, node_arrivals_ptr, barrier_ptr,
    # outputs
    draft_tokens_ptr, parents_ptr, tree_mask_ptr, position_ptr, retrieve_ptr, num_leaves_ptr,
    NUM_CTAS: tl.constexpr, CTAS: tl.constexpr, LISTS: tl.constexpr, SLOTS: tl.constexpr, BLOCK_M: tl.constexpr,
    FUSED_EVERY_LEVEL: tl.constexpr,  # EAGLE-1/2
    HAS_FC: tl.constexpr, HAS_FC_BIAS: tl.constexpr, HAS_QKV_BIAS: tl.constexpr, SCALED: tl.constexpr,
    HIDDEN: tl.constexpr, TAPS: tl.constexpr, TAP_SIZE: tl.constexpr, INTERMEDIATE: tl.constexpr,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, EPS: tl.constexpr,
    TOP_K: tl.constexpr, MAX_K: tl.constexpr, PAIRS: tl.constexpr, DEPTH: tl.constexpr, TOTAL: tl.constexpr,
    MAX_DEPTH: tl.constexpr, CANDIDATES: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_W: tl.constexpr,
    EMBED_ROWS: tl.constexpr, FEATURES: tl.constexpr,  # embeddings kept per sequence; row of the first feature
    # where operands begin: embeddings then features, taps or fused features, attention, post-norm, mlp, head input
    X_IN: tl.constexpr, X_FC: tl.constexpr, X_ATTN: tl.constexpr, X_POST: tl.constexpr, X_MLP: tl.constexpr,
    X_HEAD: tl.constexpr,
    # the stream of one program: regions' offsets in elements, rows per program, programs and rows of a group
    STREAM: tl.constexpr, AT_QKV: tl.constexpr, AT_O: tl.constexpr, AT_MLP: tl.constexpr, AT_DOWN: tl.constexpr,
    AT_HEAD: tl.constexpr, SCALES: tl.constexpr,
    R_HIDDEN: tl.constexpr, R_QKV: tl.constexpr, R_MLP: tl.constexpr, R_HEAD: tl.constexpr, TILE_HEAD: tl.constexpr,
    SPLIT_FC: tl.constexpr, SPLIT_QKV: tl.constexpr, SPLIT_O: tl.constexpr, SPLIT_DOWN: tl.constexpr,
    G_FC: tl.constexpr, G_QKV: tl.constexpr, G_O: tl.constexpr, G_DOWN: tl.constexpr,
    # launch parameters
    BLOCK_HIDDEN: tl.constexpr, BLOCK_TAP: tl.constexpr, BLOCK_R: tl.constexpr,
    N_LAYER: tl.constexpr, K_LAYER: tl.constexpr, S_LAYER: tl.constexpr, N_MLP: tl.constexpr, K_MLP: tl.constexpr,
    S_MLP: tl.constexpr, N_HEAD: tl.constexpr, K_HEAD: tl.constexpr, S_HEAD: tl.constexpr,
    PART_KEYS: tl.constexpr, MAX_PARTS: tl.constexpr, QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr,
    HEADS_PER_UNIT: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    """Draft; see the module docstring. All shapes are fixed by the constants, all counts are read on the device."""
    QKV_SIZE: tl.constexpr = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    ATTENTION: tl.constexpr = HEADS * HEAD_DIM
    QKV_IN: tl.constexpr = HIDDEN if FUSED_EVERY_LEVEL else 2 * HIDDEN
    FC_IN: tl.constexpr = 2 * HIDDEN if FUSED_EVERY_LEVEL else TAPS * TAP_SIZE
    # In front of FP8 weights, EAGLE-1/2's embeddings and features stay as they are: their sizes differ too much.
    RAW_IN: tl.constexpr = FUSED_EVERY_LEVEL and SCALED
    FC_IN_LOOP: tl.constexpr = HAS_FC and not RAW_IN
    WIDTH: tl.constexpr = DEPTH + 2
    pid = tl.program_id(0)
    num_active = tl.load(active_count_ptr)
    my_stream = stream_ptr + pid.to(tl.int64) * STREAM
    my_scale = scale_ptr + pid * SCALES
    my_lists = pid.to(tl.int64) * BLOCK_M
    offs_m = tl.arange(0, BLOCK_M)
    seq = offs_m // ROWS
    node = offs_m % ROWS
    in_use = seq < num_active
    row_slot = tl.load(active_slots_ptr + seq, mask=in_use, other=0)
    row_new = tl.load(num_new_ptr + row_slot, mask=in_use, other=0)
    row_prefix = tl.load(prefix_ptr + row_slot, mask=in_use, other=0)
    own_row = offs_m.to(tl.int64)
    ones = tl.full([BLOCK_M], 1.0, tl.float32)
    my_vocab = (draft_vocab - pid + NUM_CTAS - 1) // NUM_CTAS
    zero = pid * 0  # added to loop counters: the interpreter's are Python integers, a program's are tensors
    round = 0
    x_in_ptr = x_ptr + X_IN
    if RAW_IN:
        x_in_ptr = x_raw_ptr

    for index in range(NUM_CTAS + pid, LISTS, NUM_CTAS):
        clear_lists(best_key_ptr + index * BLOCK_M * MAX_K, BLOCK_M, MAX_K)
    for index in tl.range(pid, SLOTS, NUM_CTAS, disable_licm=True):
        slot = index + zero
        if tl.load(active_inverse_ptr + slot) < 0:
            blank_tree(
                slot, draft_tokens_ptr, parents_ptr, tree_mask_ptr, position_ptr, retrieve_ptr, num_leaves_ptr,
                TOTAL, BLOCK_T, WIDTH, BLOCK_W,
            )  # fmt: skip

    # Extend: features and embeddings of the new tokens.
    for index in tl.range(pid, num_active * ROWS, NUM_CTAS, disable_licm=True):
        unit = index + zero
        a = unit // ROWS
        i = unit % ROWS
        slot = tl.load(active_slots_ptr + a).to(tl.int64)
        if i < tl.load(num_new_ptr + slot):
            token = tl.load(new_token_ptr + slot * ROWS + i).to(tl.int64)
            write_row(
                embed_ptr + token * stride_embed, x_in_ptr, factor_ptr, a * EMBED_ROWS + i, norm_in_ptr,
                EPS, not FUSED_EVERY_LEVEL, HIDDEN, BLOCK_HIDDEN,
            )  # fmt: skip
            taps_ptr = tap_ptr + slot * stride_tap_slot + i * stride_tap_row
            if FUSED_EVERY_LEVEL or not HAS_FC:
                write_row(
                    taps_ptr, x_in_ptr, factor_ptr, FEATURES + unit, norm_hidden_ptr,
                    EPS, not FUSED_EVERY_LEVEL, HIDDEN, BLOCK_HIDDEN,
                )  # fmt: skip
                offs_h = tl.arange(0, BLOCK_HIDDEN)
                feature = tl.load(taps_ptr + offs_h, mask=offs_h < HIDDEN, other=0.0).to(tl.float32)
                tl.store(hidden_ptr + unit.to(tl.int64) * HIDDEN + offs_h, feature, mask=offs_h < HIDDEN)
            else:
                write_taps(
                    taps_ptr, tap_offset_1, tap_offset_2, x_ptr + X_FC, unit, factor_ptr + FEATURES + unit,
                    TAPS, TAP_SIZE, BLOCK_TAP, SCALED,
                )  # fmt: skip
    round += 1
    grid_barrier(barrier_ptr, round, NUM_CTAS)

    for step in tl.range(0, DEPTH + 1, disable_licm=True):
        level = step + zero
        extend = level == 0
        num_nodes = tl.where(extend, 1, TOP_K)
        mask_in = in_use & (node < tl.where(extend, row_new, TOP_K))
        mask_m = in_use & (node < num_nodes)
        known = mask_m & (level + offs_m * 0 > 0)
        parent_row = tl.load(frontier_parent_ptr + offs_m, mask=known, other=0)
        child = tl.load(frontier_child_ptr + offs_m, mask=known, other=0)
        embed_row = (seq * EMBED_ROWS + tl.where(extend, node, parent_row * TOP_K + child)).to(tl.int64) * HIDDEN
        hidden_row = (FEATURES + seq * ROWS + tl.where(extend, node, parent_row)).to(tl.int64) * HIDDEN
        # FP8 pairs want operands of order one: rows not yet normalised take the factor of the feature they came from,
        # which the extend pass knows only after `norm_features`.
        x_scale = ones

        # Rows of the extend pass each have a feature of their own.
        fused_scale = ones
        if FUSED_EVERY_LEVEL and SCALED:
            source = FEATURES + seq * ROWS + tl.where(extend, node, parent_row)
            fused_scale = tl.load(factor_ptr + source, mask=mask_in, other=1.0)

        if RAW_IN:
            stream_parts(
                x_raw_ptr, embed_row, hidden_row, mask_in, my_stream, partial_ptr, SPLIT_FC, G_FC,
                FC_IN // K_LAYER, HIDDEN // K_LAYER, HIDDEN, NUM_CTAS, N_LAYER, K_LAYER, BLOCK_M, S_LAYER,
            )  # fmt: skip
            if SPLIT_FC > 1:
                round += 1
                grid_barrier(barrier_ptr, round, NUM_CTAS)
            else:
                tl.debug_barrier()
            finish_rows(
                partial_ptr, SPLIT_FC, G_FC, mask_in, my_scale, ones, fc_bias_ptr, hidden_ptr,
                x_ptr + X_FC, fused_scale, HIDDEN, R_HIDDEN, SCALED, HAS_FC_BIAS, True, BLOCK_R, BLOCK_M,
            )  # fmt: skip
            round += 1
            grid_barrier(barrier_ptr, round, NUM_CTAS)

        first_pass = tl.where(extend, FC_PASS if FC_IN_LOOP else QKV_PASS, QKV_PASS)
        if FUSED_EVERY_LEVEL and FC_IN_LOOP:
            first_pass = zero + FC_PASS
        for index in tl.range(first_pass, 4, disable_licm=True):
            which = index + zero
            # In EAGLE-3 qkv, in EAGLE-1/2 fc takes (embedding, feature); the other projections have rows of their own.
            pairs = which == (FC_PASS if FUSED_EVERY_LEVEL else QKV_PASS)
            x_start = select(
                which, X_IN if FUSED_EVERY_LEVEL else X_FC, X_FC if FUSED_EVERY_LEVEL else X_IN, X_ATTN, X_MLP
            )
            row_size = select(which, HIDDEN if FUSED_EVERY_LEVEL else FC_IN, HIDDEN, ATTENTION, INTERMEDIATE)
            in_features = select(which, FC_IN, QKV_IN, ATTENTION, INTERMEDIATE)
            split = select(which, SPLIT_FC, SPLIT_QKV, SPLIT_O, SPLIT_DOWN)
            group_rows = select(which, G_FC, G_QKV, G_O, G_DOWN)
            stream_parts(
                x_ptr + x_start, tl.where(pairs, embed_row, own_row * row_size), hidden_row,
                tl.where(which <= QKV_PASS, mask_in, mask_m),
                my_stream + select(which, 0, AT_QKV, AT_O, AT_DOWN), partial_ptr, split, group_rows,
                in_features // K_LAYER, tl.where(pairs, HIDDEN // K_LAYER, in_features), row_size,
                NUM_CTAS, N_LAYER, K_LAYER, BLOCK_M, S_LAYER,
            )  # fmt: skip
            if split > 1:
                round += 1
                grid_barrier(barrier_ptr, round, NUM_CTAS)
            else:
                tl.debug_barrier()  # the sums are the program's own

            if FC_IN_LOOP:  # noqa: SIM102 - this one is decided by the compiler
                if which == FC_PASS:
                    row_factor = ones
                    if SCALED:
                        row_factor = tl.load(factor_ptr + FEATURES + offs_m, mask=mask_in, other=0.0)
                    finish_rows(
                        partial_ptr, split, group_rows, mask_in, my_scale, row_factor, fc_bias_ptr, hidden_ptr,
                        x_ptr + X_FC, fused_scale, HIDDEN, R_HIDDEN, SCALED, HAS_FC_BIAS, FUSED_EVERY_LEVEL,
                        BLOCK_R, BLOCK_M,
                    )  # fmt: skip
                    if not FUSED_EVERY_LEVEL:
                        round += 1
                        grid_barrier(barrier_ptr, round, NUM_CTAS)
                        norm_features(
                            hidden_ptr, x_in_ptr, factor_ptr, norm_hidden_ptr, active_slots_ptr, num_new_ptr,
                            num_active, NUM_CTAS, FEATURES, EPS, HIDDEN, BLOCK_HIDDEN,
                        )  # fmt: skip
            if which == QKV_PASS:
                finish_rows(
                    partial_ptr, split, group_rows, mask_in, my_scale + R_HIDDEN, 1.0 / fused_scale, qkv_bias_ptr,
                    qkv_ptr, x_ptr, fused_scale, QKV_SIZE, R_QKV, SCALED, HAS_QKV_BIAS, False, BLOCK_R, BLOCK_M,
                )  # fmt: skip
                round += 1
                grid_barrier(barrier_ptr, round, NUM_CTAS)
                attend(
                    qkv_ptr, key_ptr, value_ptr, stride_cache_slot, stride_cache_head, cos_ptr, sin_ptr, chain_ptr,
                    part_stat_ptr, part_acc_ptr, seq, row_slot, row_prefix, row_new, num_active, level,
                    NUM_CTAS, SLOTS, HEADS, KV_HEADS, HEAD_DIM, TOP_K, MAX_DEPTH, PART_KEYS, MAX_PARTS,
                    HEADS_PER_UNIT, BLOCK_KEYS, BLOCK_D, BLOCK_HALF,
                )  # fmt: skip
                round += 1
                grid_barrier(barrier_ptr, round, NUM_CTAS)
                merge_heads(
                    part_stat_ptr, part_acc_ptr, x_ptr + X_ATTN, seq, row_prefix, num_active, num_nodes,
                    NUM_CTAS, HEADS, KV_HEADS, HEAD_DIM, PART_KEYS, MAX_PARTS, QUERIES, HEADS_PER_UNIT, BLOCK_D,
                )  # fmt: skip
            elif which == O_PASS:
                if SCALED:
                    origin = FEATURES + seq * ROWS + tl.where(extend, row_new - 1, parent_row)
                    x_scale = tl.load(factor_ptr + origin, mask=mask_m, other=1.0)
                source = seq * ROWS + tl.where(extend, row_new - 1, node if FUSED_EVERY_LEVEL else parent_row)
                finish_residual(
                    partial_ptr, split, group_rows, mask_m, my_scale + R_HIDDEN + R_QKV, hidden_ptr, source,
                    middle_ptr, x_ptr + X_POST, norm_post_ptr, x_scale, squares_post_ptr,
                    HIDDEN, R_HIDDEN, SCALED, True, BLOCK_R, BLOCK_M,
                )  # fmt: skip
                round += 1
                grid_barrier(barrier_ptr, round, NUM_CTAS)
                factor = norm_factor(squares_post_ptr, mask_m, NUM_CTAS, EPS, HIDDEN, BLOCK_M) / x_scale
                gated_mlp(
                    x_ptr + X_POST, factor, mask_m, my_stream + AT_MLP, my_scale + 2 * R_HIDDEN + R_QKV,
                    x_ptr + X_MLP, HIDDEN, INTERMEDIATE, R_MLP, SCALED, N_MLP, K_MLP, BLOCK_M, S_MLP,
                )  # fmt: skip
            elif which == DOWN_PASS:
                finish_residual(
                    partial_ptr, split, group_rows, mask_m, my_scale + 2 * R_HIDDEN + R_QKV + 2 * R_MLP, middle_ptr,
                    offs_m, hidden_ptr, x_ptr + X_HEAD, norm_out_ptr, x_scale, squares_out_ptr,
                    HIDDEN, R_HIDDEN, SCALED, not FUSED_EVERY_LEVEL, BLOCK_R, BLOCK_M,
                )  # fmt: skip
            round += 1
            grid_barrier(barrier_ptr, round, NUM_CTAS)

        if FUSED_EVERY_LEVEL:
            factor = 1.0 / x_scale
        else:
            factor = norm_factor(squares_out_ptr, mask_m, NUM_CTAS, EPS, HIDDEN, BLOCK_M) / x_scale
        stream_topk(
            x_ptr + X_HEAD, own_row * HIDDEN, factor, mask_m, num_active, num_nodes,
            my_stream + AT_HEAD, my_scale + 3 * R_HIDDEN + R_QKV + 2 * R_MLP, row_id_ptr + pid * R_HEAD, my_vocab,
            scratch_ptr + my_lists * N_HEAD, best_key_ptr + my_lists * MAX_K, best_max_ptr + my_lists,
            best_sum_ptr + my_lists,
            TILE_HEAD, HIDDEN // K_HEAD, TOP_K, MAX_K, ROWS, N_HEAD, K_HEAD, BLOCK_M, S_HEAD,
            SCALED, R_HEAD > TILE_HEAD,
        )  # fmt: skip
        round += 1
        grid_barrier(barrier_ptr, round, NUM_CTAS)

        # Several programs merge the same node; the first records it, the others gather its children's embeddings.
        last = level == DEPTH
        num_rows = num_active * num_nodes
        copies = tl.where(last, 1, tl.minimum(tl.maximum(NUM_CTAS // num_rows, 1), TOP_K + 2))
        first_candidate = tl.where(extend, 0, TOP_K + (level - 1) * TOP_K * TOP_K)
        for index in tl.range(pid, num_rows * copies, NUM_CTAS, disable_licm=True):
            unit = index + zero
            copy = unit // num_rows
            a = (unit % num_rows) // num_nodes
            n = (unit % num_rows) % num_nodes
            row = a * ROWS + n
            rank, value, token, lse = merge_best(
                best_key_ptr + row * MAX_K, best_max_ptr + row, best_sum_ptr + row, owner_ptr + pid * MAX_K,
                tl.minimum(draft_vocab, NUM_CTAS), BLOCK_M * MAX_K, BLOCK_M, CTAS, TOP_K, MAX_K, PAIRS,
            )  # fmt: skip
            if copy == 0:
                base = tl.load(frontier_score_ptr + row, mask=level > 0, other=0.0)
                score = base + tl.minimum(value - lse, 0.0)
                parent = tl.load(frontier_candidate_ptr + row, mask=level > 0, other=-1)
                mask = rank < TOP_K
                at = a * CANDIDATES + first_candidate + n * TOP_K + rank
                tl.store(score_ptr + at, score, mask=mask)
                tl.store(token_ptr + at, token, mask=mask)
                tl.store(parent_ptr + at, parent + token * 0, mask=mask)
                key = order_key(score, n * TOP_K + rank)
                tl.store(child_key_ptr + row * MAX_K + rank, key, mask=mask)
                offs_k = tl.arange(0, MAX_K)
                tl.store(
                    child_key_ptr + row * MAX_K + offs_k, tl.full([MAX_K], LOWEST_KEY, tl.int64), mask=offs_k >= TOP_K
                )
                tl.debug_barrier()
                if tl.atomic_add(node_arrivals_ptr + a, 1, sem="acq_rel") == num_nodes - 1:
                    tl.store(node_arrivals_ptr + a, 0)
                    slot = tl.load(active_slots_ptr + a)
                    if last:
                        root = tl.load(new_token_ptr + slot.to(tl.int64) * ROWS + tl.load(num_new_ptr + slot) - 1)
                        build_tree(
                            token_ptr + a * CANDIDATES, score_ptr + a * CANDIDATES, parent_ptr + a * CANDIDATES,
                            node_of_ptr + a * CANDIDATES, chosen_ptr + a * TOTAL, root, slot,
                            draft_tokens_ptr, parents_ptr, tree_mask_ptr, position_ptr, retrieve_ptr, num_leaves_ptr,
                            CANDIDATES, BLOCK_C, TOTAL, BLOCK_T, WIDTH, BLOCK_W,
                        )  # fmt: skip
                    else:
                        choose_frontier(
                            child_key_ptr + a * ROWS * MAX_K, num_nodes, first_candidate, level,
                            frontier_score_ptr + a * ROWS, frontier_candidate_ptr + a * ROWS,
                            frontier_parent_ptr + a * ROWS, frontier_child_ptr + a * ROWS,
                            chain_ptr + ((level % 2) * SLOTS + a) * ROWS * MAX_DEPTH,
                            chain_ptr + (((level + 1) % 2) * SLOTS + a) * ROWS * MAX_DEPTH,
                            TOP_K, MAX_K, PAIRS, MAX_DEPTH,
                        )  # fmt: skip
            if ((copy > 0) | (copies == 1)) & (level < DEPTH):
                for job in tl.range(tl.maximum(copy - 1, 0), TOP_K + 1, tl.maximum(copies - 1, 1), disable_licm=True):
                    if job < TOP_K:
                        child_token = tl.max(tl.where(rank == job, token, 0), axis=0).to(tl.int64)
                        to_row = a * EMBED_ROWS + n * TOP_K + job
                        write_row(
                            embed_ptr + child_token * stride_embed, x_in_ptr, factor_ptr, to_row, norm_in_ptr,
                            EPS, not FUSED_EVERY_LEVEL, HIDDEN, BLOCK_HIDDEN,
                        )  # fmt: skip
                    else:
                        write_row(
                            hidden_ptr + row.to(tl.int64) * HIDDEN, x_in_ptr, factor_ptr, FEATURES + row,
                            norm_hidden_ptr, EPS, not FUSED_EVERY_LEVEL, HIDDEN, BLOCK_HIDDEN,
                        )  # fmt: skip
        if level < DEPTH:
            round += 1
            grid_barrier(barrier_ptr, round, NUM_CTAS)
    leave_grid(barrier_ptr, NUM_CTAS)
