"""The persistent drafter: one cooperative launch drafts a whole tree for every active sequence.

One program runs on each SM and stays there for the whole draft. Work moves from phase to phase through buffers that
live in the L2, with a grid barrier between phases; weights are the only thing read from memory, each once per level:

====  ==================================================================================================
fuse  features of the new tokens: ``fc`` over the target's taps (EAGLE-3), or over (embedding, feature) at
      every level (EAGLE-1/2)
qkv   RMSNorms were applied by whoever wrote the rows; q, k, v of all rows
att   `ancestor_attention.attend_unit`: RoPE, KV append, prefix + ancestors; then `merge_parts`
o     output projection, residual, partial sums of squares for the RMSNorm that follows
mlp   gate and up, SiLU; then down, residual, sums of squares
head  `lm_topk.stream_topk`: LM head over the draft vocabulary, k best and log-sum-exp per program
pick  merge per node; candidates' scores; best top_k become the next frontier; their embeddings are gathered
tree  after the last level, `tree_build.build_tree`
====  ==================================================================================================

Level 0 is the extend pass: up to 16 newly accepted tokens per sequence enter the KV cache and only the last of them
(the pair of the last verified feature and the tree's root) goes on past attention. RMSNorm is linear but for one factor
per row, so ``o`` and ``down`` write rows already times the norm's weight and the factor multiplies the next product's
result.

Rows are numbered ``r = 16 * a + n``: node n of the a-th active sequence. Frontier scores and candidate numbering follow
`eagle_slim.runtime.tree`. Every program takes part in every barrier, so no phase returns early.
"""

import triton
import triton.language as tl

from .ancestor_attention import attend_unit, merge_parts, query_place
from .grid_barrier import grid_barrier, leave_grid
from .lm_topk import clear_lists, merge_best, stream_topk
from .selection import LOWEST_KEY, count_ahead, key_index, key_value, order_key
from .tree_build import blank_tree, build_tree
from .weight_stream import (
    hidden_zero,
    operand_dot,
    operand_mask,
    operand_rows,
    operand_sum,
    prefetch_l2,
    store_activation,
    stream_matmul,
)

ROWS = tl.constexpr(16)


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
def scale_row(
    source_ptr, source_offset_1, source_offset_2, x_ptr, row, scale_ptr,
    SEGMENTS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write one row of SEGMENTS pieces of SIZE values as an operand, divided by ``max|row| / 256``, and that
    divisor."""
    offs = tl.arange(0, BLOCK) + hidden_zero()
    peak = tl.zeros([BLOCK], tl.float32)
    for part in tl.static_range(SEGMENTS):
        start = source_offset_1 if part == 1 else (source_offset_2 if part == 2 else 0)
        peak = tl.maximum(peak, tl.abs(tl.load(source_ptr + start + offs, mask=offs < SIZE, other=0.0).to(tl.float32)))
    scale = tl.max(peak, axis=0) / 256.0
    scale = tl.where(scale > 0, scale, 1.0)
    tl.store(scale_ptr, scale)
    for part in tl.static_range(SEGMENTS):
        start = source_offset_1 if part == 1 else (source_offset_2 if part == 2 else 0)
        x = tl.load(source_ptr + start + offs, mask=offs < SIZE, other=0.0).to(tl.float32) / scale
        store_activation(x_ptr, row.to(tl.int64), part * SIZE + offs, x, offs < SIZE, SEGMENTS * SIZE)


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
def project_residual(
    x_ptr, x_row, mask_m, region_ptr, scale_ptr, next_ptr,
    residual_ptr, residual_row, sum_ptr, normed_ptr, norm_ptr, normed_scale, squares_ptr,
    K: tl.constexpr, N: tl.constexpr, R: tl.constexpr, HAS_NORM: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_M: tl.constexpr, STAGES: tl.constexpr,
    PREFETCH: tl.constexpr, BULK: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """o and down: project, add the residual; write the sum (fp32), its squares, and it times the next norm's weight.

    ``normed_scale`` brings the rows of that operand to order one where they are stored as FP8 pairs.
    """
    zero = hidden_zero()
    pid = tl.program_id(0) + zero
    offs_n = tl.arange(0, BLOCK_N) + zero
    offs_m = tl.arange(0, BLOCK_M) + zero
    squares = tl.zeros([BLOCK_M], tl.float32)
    for n0 in range(0, R, BLOCK_N):
        feature = pid * R + n0 + offs_n
        mask = ((n0 + offs_n < R) & (feature < N))[:, None] & mask_m[None, :]
        residual = tl.load(residual_ptr + residual_row[None, :] * N + feature[:, None], mask=mask, other=0.0)
        weight = 1.0
        if HAS_NORM:
            weight = tl.load(norm_ptr + feature, mask=feature < N, other=0.0).to(tl.float32)[:, None]
        acc = stream_matmul(
            x_ptr, x_row, x_row, x_row, mask_m, region_ptr + n0 * BLOCK_K, R - n0,
            R * BLOCK_K, K // BLOCK_K, K // BLOCK_K, K // BLOCK_K, K, BLOCK_N, BLOCK_K, BLOCK_M, STAGES,
        )  # fmt: skip
        if n0 + BLOCK_N >= R:
            prefetch_l2(next_ptr, PREFETCH, BULK)
        if SCALED:
            acc *= tl.load(scale_ptr + n0 + offs_n, mask=n0 + offs_n < R, other=0.0)[:, None]
        acc = tl.where(mask, acc + residual, 0.0)
        squares += tl.sum(acc * acc, axis=0)
        place = offs_m[None, :] * N + feature[:, None]
        tl.store(sum_ptr + place, acc, mask=mask)
        normed = acc * weight * normed_scale[None, :]
        store_activation(normed_ptr, offs_m.to(tl.int64)[None, :], feature[:, None], normed, mask, N)
    tl.store(squares_ptr + pid * BLOCK_M + offs_m, squares)


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


@triton.jit
def draft_kernel(
    # what the target handed over, per slot
    tap_ptr, tap_offset_1, tap_offset_2, stride_tap_slot, stride_tap_row,  # taps of the new tokens [slots, 16, taps]
    new_token_ptr,  # int32 [slots, 16]: the token after each feature; the last one is the root
    num_new_ptr, prefix_ptr,  # int32 [slots]
    active_slots_ptr, active_inverse_ptr, active_count_ptr,  # int32 [slots], [slots] (-1: inactive), [1]
    # weights
    stream_ptr, scale_ptr, row_id_ptr, embed_ptr, norm_in_ptr, norm_hidden_ptr, norm_post_ptr, norm_out_ptr,
    fc_bias_ptr, qkv_bias_ptr, cos_ptr, sin_ptr, draft_vocab, stride_embed,
    # KV cache [slots, kv_heads, positions, head_dim]
    key_ptr, value_ptr, stride_cache_slot, stride_cache_head,
    # operands (`store_activation`): embeddings then features (one tensor), taps, attention, post-norm, mlp, head
    # input, fused
    x_in_ptr, x_taps_ptr, x_attn_ptr, x_post_ptr, x_mlp_ptr, x_head_ptr, x_fused_ptr,
    # fp32 workspace
    hidden_ptr, middle_ptr, qkv_ptr, squares_post_ptr, squares_out_ptr, scratch_ptr,
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
    # the stream of one program: regions' offsets in elements, and rows per program
    STREAM: tl.constexpr, AT_QKV: tl.constexpr, AT_O: tl.constexpr, AT_MLP: tl.constexpr, AT_DOWN: tl.constexpr,
    AT_HEAD: tl.constexpr, SCALES: tl.constexpr,
    R_HIDDEN: tl.constexpr, R_QKV: tl.constexpr, R_MLP: tl.constexpr, R_HEAD: tl.constexpr, TILE_HEAD: tl.constexpr,
    # launch parameters
    BLOCK_HIDDEN: tl.constexpr, BLOCK_TAP: tl.constexpr,
    K_FC: tl.constexpr, N_FC: tl.constexpr, S_FC: tl.constexpr, K_QKV: tl.constexpr, N_QKV: tl.constexpr,
    S_QKV: tl.constexpr, K_O: tl.constexpr, N_O: tl.constexpr, S_O: tl.constexpr, K_MLP: tl.constexpr,
    N_MLP: tl.constexpr, S_MLP: tl.constexpr, K_DOWN: tl.constexpr, N_DOWN: tl.constexpr, S_DOWN: tl.constexpr,
    K_HEAD: tl.constexpr, N_HEAD: tl.constexpr, S_HEAD: tl.constexpr,
    # bytes of each region that are asked into the L2 before the barrier in front of it
    P_FC: tl.constexpr, P_QKV: tl.constexpr, P_O: tl.constexpr, P_MLP: tl.constexpr, P_DOWN: tl.constexpr,
    P_HEAD: tl.constexpr, BULK: tl.constexpr,
    PART_KEYS: tl.constexpr, MAX_PARTS: tl.constexpr, QUERIES: tl.constexpr, BLOCK_KEYS: tl.constexpr,
    HEADS_PER_UNIT: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_HALF: tl.constexpr,
):  # fmt: skip
    """Draft; see the module docstring. All shapes are fixed by the constants, all counts are read on the device."""
    QKV: tl.constexpr = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    HEAD_GROUPS: tl.constexpr = (HEADS // KV_HEADS + HEADS_PER_UNIT - 1) // HEADS_PER_UNIT
    QKV_IN: tl.constexpr = HIDDEN if FUSED_EVERY_LEVEL else 2 * HIDDEN
    FC_IN: tl.constexpr = 2 * HIDDEN if FUSED_EVERY_LEVEL else TAPS * TAP_SIZE
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
    own_row = offs_m.to(tl.int64)
    my_vocab = (draft_vocab - pid + NUM_CTAS - 1) // NUM_CTAS
    zero = pid * 0  # added to loop counters: the interpreter's are Python integers, a program's are tensors
    round = 0

    for index in range(NUM_CTAS + pid, LISTS, NUM_CTAS):
        clear_lists(best_key_ptr + index * BLOCK_M * MAX_K, BLOCK_M, MAX_K)
    for index in range(pid, SLOTS, NUM_CTAS):
        slot = index + zero
        if tl.load(active_inverse_ptr + slot) < 0:
            blank_tree(
                slot, draft_tokens_ptr, parents_ptr, tree_mask_ptr, position_ptr, retrieve_ptr, num_leaves_ptr,
                TOTAL, BLOCK_T, WIDTH, BLOCK_W,
            )  # fmt: skip

    # Extend: features and embeddings of the new tokens.
    for index in range(pid, num_active * ROWS, NUM_CTAS):
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
            elif SCALED:
                scale_row(
                    taps_ptr, tap_offset_1, tap_offset_2, x_taps_ptr, unit, factor_ptr + FEATURES + unit,
                    TAPS, TAP_SIZE, BLOCK_TAP,
                )  # fmt: skip
    if HAS_FC and not FUSED_EVERY_LEVEL:
        if SCALED:
            round += 1
            grid_barrier(barrier_ptr, round, NUM_CTAS)
        tap_row = row_slot.to(tl.int64) * stride_tap_slot + node.to(tl.int64) * stride_tap_row
        offs_fc = tl.arange(0, N_FC)
        mask_m = in_use & (node < row_new)
        for n0 in range(0, R_HIDDEN, N_FC):
            if SCALED:
                acc = stream_matmul(
                    x_taps_ptr, own_row * FC_IN, own_row, own_row, mask_m, my_stream + n0 * K_FC, R_HIDDEN - n0,
                    R_HIDDEN * K_FC, FC_IN // K_FC, FC_IN // K_FC, FC_IN // K_FC, FC_IN, N_FC, K_FC, BLOCK_M, S_FC,
                )  # fmt: skip
            else:
                acc = stream_matmul(
                    tap_ptr, tap_row, tap_row + tap_offset_1, tap_row + tap_offset_2, mask_m,
                    my_stream + n0 * K_FC, R_HIDDEN - n0,
                    R_HIDDEN * K_FC, FC_IN // K_FC, TAP_SIZE // K_FC, 2 * TAP_SIZE // K_FC, FC_IN,
                    N_FC, K_FC, BLOCK_M, S_FC,
                )  # fmt: skip
            if n0 + N_FC >= R_HIDDEN:
                prefetch_l2(my_stream + AT_QKV, P_QKV, BULK)
            feature = pid * R_HIDDEN + n0 + offs_fc
            mine = (n0 + offs_fc < R_HIDDEN) & (feature < HIDDEN)
            if SCALED:
                acc *= tl.load(my_scale + n0 + offs_fc, mask=mine, other=0.0)[:, None]
                acc *= tl.load(factor_ptr + FEATURES + offs_m, mask=mask_m, other=0.0)[None, :]
            if HAS_FC_BIAS:
                acc += tl.load(fc_bias_ptr + feature, mask=mine, other=0.0).to(tl.float32)[:, None]
            tl.store(
                hidden_ptr + offs_m[None, :] * HIDDEN + feature[:, None], acc, mask=mine[:, None] & mask_m[None, :]
            )
        round += 1
        grid_barrier(barrier_ptr, round, NUM_CTAS)
        for index in range(pid, num_active * ROWS, NUM_CTAS):
            unit = index + zero
            slot = tl.load(active_slots_ptr + unit // ROWS)
            if unit % ROWS < tl.load(num_new_ptr + slot):
                write_row(
                    hidden_ptr + unit.to(tl.int64) * HIDDEN, x_in_ptr, factor_ptr, FEATURES + unit, norm_hidden_ptr,
                    EPS, True, HIDDEN, BLOCK_HIDDEN,
                )  # fmt: skip
    round += 1
    grid_barrier(barrier_ptr, round, NUM_CTAS)

    for step in range(DEPTH + 1):
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
        # FP8 pairs want operands of order one: rows not yet normalised take the factor of the feature they came from.
        x_scale = tl.full([BLOCK_M], 1.0, tl.float32)
        if SCALED:
            source = FEATURES + seq * ROWS + tl.where(extend, row_new - 1, parent_row)
            x_scale = tl.load(factor_ptr + source, mask=mask_m, other=1.0)

        # Rows of the extend pass each have a feature of their own.
        fused_scale = tl.full([BLOCK_M], 1.0, tl.float32)
        if FUSED_EVERY_LEVEL:
            if SCALED:
                source = FEATURES + seq * ROWS + tl.where(extend, node, parent_row)
                fused_scale = tl.load(factor_ptr + source, mask=mask_in, other=1.0)
            offs_fc = tl.arange(0, N_FC)
            for n0 in range(0, R_HIDDEN, N_FC):
                acc = stream_matmul(
                    x_in_ptr, embed_row, hidden_row, embed_row, mask_in,
                    my_stream + n0 * K_FC, R_HIDDEN - n0,
                    R_HIDDEN * K_FC, FC_IN // K_FC, HIDDEN // K_FC, FC_IN // K_FC, HIDDEN,
                    N_FC, K_FC, BLOCK_M, S_FC,
                )  # fmt: skip
                if n0 + N_FC >= R_HIDDEN:
                    prefetch_l2(my_stream + AT_QKV, P_QKV, BULK)
                feature = pid * R_HIDDEN + n0 + offs_fc
                mine = (n0 + offs_fc < R_HIDDEN) & (feature < HIDDEN)
                if SCALED:
                    acc *= tl.load(my_scale + n0 + offs_fc, mask=mine, other=0.0)[:, None]
                if HAS_FC_BIAS:
                    acc += tl.load(fc_bias_ptr + feature, mask=mine, other=0.0).to(tl.float32)[:, None]
                place = offs_m[None, :] * HIDDEN + feature[:, None]
                mask = mine[:, None] & mask_in[None, :]
                tl.store(hidden_ptr + place, acc, mask=mask)
                fused = acc * fused_scale[None, :]
                store_activation(x_fused_ptr, own_row[None, :], feature[:, None], fused, mask, HIDDEN)
            round += 1
            grid_barrier(barrier_ptr, round, NUM_CTAS)

        hidden = hidden_zero()
        offs_qkv = tl.arange(0, N_QKV) + hidden
        rows_qkv = offs_m + hidden
        for n0 in range(0, R_QKV, N_QKV):
            if FUSED_EVERY_LEVEL:
                acc = stream_matmul(
                    x_fused_ptr, own_row * HIDDEN, own_row, own_row, mask_in,
                    my_stream + AT_QKV + n0 * K_QKV, R_QKV - n0,
                    R_QKV * K_QKV, QKV_IN // K_QKV, QKV_IN // K_QKV, QKV_IN // K_QKV, QKV_IN,
                    N_QKV, K_QKV, BLOCK_M, S_QKV,
                ) / fused_scale[None, :]  # fmt: skip
            else:
                acc = stream_matmul(
                    x_in_ptr, embed_row, hidden_row, embed_row, mask_in,
                    my_stream + AT_QKV + n0 * K_QKV, R_QKV - n0,
                    R_QKV * K_QKV, QKV_IN // K_QKV, HIDDEN // K_QKV, QKV_IN // K_QKV, HIDDEN,
                    N_QKV, K_QKV, BLOCK_M, S_QKV,
                )  # fmt: skip
            if n0 + N_QKV >= R_QKV:
                prefetch_l2(my_stream + AT_O, P_O, BULK)
            feature = pid * R_QKV + n0 + offs_qkv
            mine = (n0 + offs_qkv < R_QKV) & (feature < QKV)
            if SCALED:
                acc *= tl.load(my_scale + R_HIDDEN + n0 + offs_qkv, mask=mine, other=0.0)[:, None]
            if HAS_QKV_BIAS:
                acc += tl.load(qkv_bias_ptr + feature, mask=mine, other=0.0).to(tl.float32)[:, None]
            tl.store(qkv_ptr + rows_qkv[None, :] * QKV + feature[:, None], acc, mask=mine[:, None] & mask_in[None, :])
        round += 1
        grid_barrier(barrier_ptr, round, NUM_CTAS)

        num_units = num_active * KV_HEADS * HEAD_GROUPS
        most_parts = tl.minimum(tl.maximum(NUM_CTAS // num_units, 1), MAX_PARTS)
        for index in range(pid, num_units * most_parts, NUM_CTAS):
            unit = index + zero
            group = unit % num_units
            part = unit // num_units
            kv_head = (group // HEAD_GROUPS) % KV_HEADS
            a = group // (HEAD_GROUPS * KV_HEADS)
            slot = tl.load(active_slots_ptr + a).to(tl.int64)
            prefix = tl.load(prefix_ptr + slot)
            num_new = tl.load(num_new_ptr + slot)
            num_parts = tl.minimum(most_parts, tl.cdiv(prefix, PART_KEYS) + 2)
            if part < num_parts:
                cache = slot * stride_cache_slot + kv_head.to(tl.int64) * stride_cache_head
                row = (a * ROWS).to(tl.int64)
                parts = (group * most_parts).to(tl.int64) * HEADS_PER_UNIT * ROWS
                attend_unit(
                    qkv_ptr + row * QKV, key_ptr + cache, value_ptr + cache, cos_ptr, sin_ptr,
                    chain_ptr + ((level % 2) * SLOTS * ROWS + row) * MAX_DEPTH,
                    part_stat_ptr + parts * 2, part_acc_ptr + parts * BLOCK_D,
                    kv_head, group % HEAD_GROUPS, part, num_parts, prefix, num_new, level,
                    HEADS, KV_HEADS, HEAD_DIM, TOP_K, MAX_DEPTH, HEADS_PER_UNIT, BLOCK_KEYS, BLOCK_D, BLOCK_HALF,
                )  # fmt: skip
        round += 1
        grid_barrier(barrier_ptr, round, NUM_CTAS)
        num_queries = num_active * num_nodes * HEADS
        for first in range(pid * QUERIES, num_queries, NUM_CTAS * QUERIES):
            query = first + tl.arange(0, QUERIES) + hidden_zero()
            a = query // (num_nodes * HEADS)
            n = query // HEADS % num_nodes
            head = query % HEADS
            mask_q = query < num_queries
            slot = tl.load(active_slots_ptr + a, mask=mask_q, other=0)
            prefix = tl.load(prefix_ptr + slot, mask=mask_q, other=0)
            num_parts = tl.minimum(most_parts, tl.cdiv(prefix, PART_KEYS) + 2)
            group, row = query_place(a, n, head, HEADS, KV_HEADS, HEADS_PER_UNIT)
            merge_parts(
                part_stat_ptr, part_acc_ptr, (group * most_parts).to(tl.int64), row, num_parts, mask_q,
                x_attn_ptr, a * ROWS + n, head * HEAD_DIM, HEADS * HEAD_DIM,
                HEADS_PER_UNIT * ROWS, HEAD_DIM, BLOCK_D, MAX_PARTS,
            )  # fmt: skip
        round += 1
        grid_barrier(barrier_ptr, round, NUM_CTAS)

        residual_row = seq * ROWS + tl.where(extend, row_new - 1, node if FUSED_EVERY_LEVEL else parent_row)
        project_residual(
            x_attn_ptr, own_row * HEADS * HEAD_DIM, mask_m, my_stream + AT_O, my_scale + R_HIDDEN + R_QKV,
            my_stream + AT_MLP, hidden_ptr, residual_row, middle_ptr, x_post_ptr, norm_post_ptr, x_scale,
            squares_post_ptr, HEADS * HEAD_DIM, HIDDEN, R_HIDDEN, True, N_O, K_O, BLOCK_M, S_O, P_MLP, BULK, SCALED,
        )  # fmt: skip
        round += 1
        grid_barrier(barrier_ptr, round, NUM_CTAS)

        factor = norm_factor(squares_post_ptr, mask_m, NUM_CTAS, EPS, HIDDEN, BLOCK_M) / x_scale
        hidden = hidden_zero()
        rows_mlp = own_row + hidden
        offs_mlp = tl.arange(0, N_MLP) + hidden
        offs_kk = tl.arange(0, K_MLP) + hidden
        for n0 in range(0, R_MLP, N_MLP):
            region = my_stream + AT_MLP + n0 * K_MLP
            w_offs = offs_mlp[:, None] * K_MLP + offs_kk[None, :]
            mask_w = (n0 + offs_mlp < R_MLP)[:, None]
            mask_x = operand_mask(x_post_ptr, mask_m)
            x_row = operand_rows(x_post_ptr, rows_mlp * HIDDEN, HIDDEN)
            gate = tl.zeros([N_MLP, mask_x.shape[0]], tl.float32)
            up = tl.zeros([N_MLP, mask_x.shape[0]], tl.float32)
            for k in tl.range(0, HIDDEN // K_MLP, num_stages=S_MLP):
                x_offs = x_row[None, :] + (k * K_MLP + offs_kk)[:, None]
                x = tl.load(x_post_ptr + x_offs, mask=mask_x[None, :], other=0.0)
                slab = region + k * (2 * R_MLP * K_MLP)
                gate = operand_dot(tl.load(slab + w_offs, mask=mask_w, other=0.0), x, gate)
                up = operand_dot(tl.load(slab + R_MLP * K_MLP + w_offs, mask=mask_w, other=0.0), x, up)
            gate = operand_sum(x_post_ptr, gate)
            up = operand_sum(x_post_ptr, up)
            if n0 + N_MLP >= R_MLP:
                prefetch_l2(my_stream + AT_DOWN, P_DOWN, BULK)
            feature = pid * R_MLP + n0 + offs_mlp
            mine = (n0 + offs_mlp < R_MLP) & (feature < INTERMEDIATE)
            if SCALED:
                at = my_scale + 2 * R_HIDDEN + R_QKV + n0 + offs_mlp
                gate *= tl.load(at, mask=mine, other=0.0)[:, None]
                up *= tl.load(at + R_MLP, mask=mine, other=0.0)[:, None]
            gate *= factor[None, :]
            mixed = gate * tl.sigmoid(gate) * up * factor[None, :]
            # FP8 pairs hold magnitudes to 448; halved, activations to 896.
            mixed *= 0.5 if SCALED else 1.0
            mask = mine[:, None] & mask_m[None, :]
            store_activation(x_mlp_ptr, rows_mlp[None, :], feature[:, None], mixed, mask, INTERMEDIATE)
        round += 1
        grid_barrier(barrier_ptr, round, NUM_CTAS)

        project_residual(
            x_mlp_ptr, own_row * INTERMEDIATE, mask_m, my_stream + AT_DOWN, my_scale + 2 * R_HIDDEN + R_QKV + 2 * R_MLP,
            my_stream + AT_HEAD, middle_ptr, offs_m, hidden_ptr, x_head_ptr, norm_out_ptr, x_scale, squares_out_ptr,
            INTERMEDIATE, HIDDEN, R_HIDDEN, not FUSED_EVERY_LEVEL, N_DOWN, K_DOWN, BLOCK_M, S_DOWN, P_HEAD, BULK,
            SCALED,
        )  # fmt: skip
        round += 1
        grid_barrier(barrier_ptr, round, NUM_CTAS)

        if FUSED_EVERY_LEVEL:
            factor = 1.0 / x_scale
        else:
            factor = norm_factor(squares_out_ptr, mask_m, NUM_CTAS, EPS, HIDDEN, BLOCK_M) / x_scale
        stream_topk(
            x_head_ptr, own_row * HIDDEN, factor, mask_m, num_active, num_nodes,
            my_stream + AT_HEAD, my_scale + 3 * R_HIDDEN + R_QKV + 2 * R_MLP, row_id_ptr + pid * R_HEAD, my_vocab,
            scratch_ptr + my_lists * N_HEAD, best_key_ptr + my_lists * MAX_K, best_max_ptr + my_lists,
            best_sum_ptr + my_lists,
            my_stream if FUSED_EVERY_LEVEL else my_stream + AT_QKV,
            TILE_HEAD, HIDDEN // K_HEAD, TOP_K, MAX_K, ROWS, N_HEAD, K_HEAD, BLOCK_M, S_HEAD,
            P_FC if FUSED_EVERY_LEVEL else P_QKV, BULK, SCALED, R_HEAD > TILE_HEAD,
        )  # fmt: skip
        round += 1
        grid_barrier(barrier_ptr, round, NUM_CTAS)

        # Several programs merge the same node; the first records it, the others gather its children's embeddings.
        last = level == DEPTH
        num_rows = num_active * num_nodes
        copies = tl.minimum(tl.maximum(NUM_CTAS // num_rows, 1), TOP_K + 2)
        first_candidate = tl.where(extend, 0, TOP_K + (level - 1) * TOP_K * TOP_K)
        for index in range(pid, num_rows * copies, NUM_CTAS):
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
                for job in range(tl.maximum(copy - 1, 0), TOP_K + 1, tl.maximum(copies - 1, 1)):
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
