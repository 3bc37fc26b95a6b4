"""Compile every kernel that a step launches outside the drafter, for a chip that is not there, at Llama-3.1-8B's size.

    python -m kernels.compiled_step --chip 90 [--fp8]

That which draws verdicts for benchmarks is among them. The host functions run as they are; in the place of a launch the
kernel is compiled for what it was called with. Prints one JSON object: for each kernel its shared memory, registers,
spills, warps, and operands that are overwritten (`machine_code`); exit status 1 where there are such. Must run without
``TRITON_INTERPRET``.
"""

import argparse
import json
import sys
from dataclasses import replace
from typing import Any

import torch
from eagle_slim.runtime.drafter.kernels import pair_rows
from eagle_slim.runtime.drafter.launch_params import Chip
from eagle_slim.runtime.step.kernels import acceptance, prompt_chunks
from eagle_slim.runtime.step.kernels.choose_tokens import mark_seen
from eagle_slim.runtime.step.kernels.prompt_chunks import ChunkRows, PromptBox
from eagle_slim.runtime.step.kernels.slot_state import SlotState
from eagle_slim.runtime.target.fp8 import SCALE_BLOCK, Fp8Weight
from eagle_slim.runtime.target.kernels import attention, experts, machine, products, tree_rows
from eagle_slim.runtime.target.kernels.attention import AttentionParams, AttentionScratch, tree_attention
from eagle_slim.runtime.target.kernels.tree_rows import ForwardRows
from eagle_slim.runtime.target.mxfp4 import Mxfp4Weight
from eagle_slim.runtime.tree import Trees
from kernels.chips import KNOWN_CHIPS
from kernels.choosing import ALL_RULES, RULES, random_case
from kernels.compiled_drafter import POINTERS, assembler_report, to_ptx
from kernels.machine_code import FAULTS
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from benchmarks.shared.drawn_verdicts import draw_paths

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MIDDLE, SLOTS, NODES, CHUNK, VOCAB = 4096, 32, 8, 128, 14336, 2, 60, 512, 128256


class Compiler:
    """Takes the place of launches; ``reports`` by kernel and a word that tells its variants apart."""

    def __init__(self, chip: Chip) -> None:
        self.chip = chip
        self.variant = ""
        self.reports: dict[str, dict[str, Any]] = {}

    def launch(self, kernel: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        given = ("num_warps", "num_stages", "maxnreg", "enable_fp_fusion", "launch_pdl")
        options = {name: keywords.pop(name) for name in given if name in keywords}
        values = dict(zip(kernel.arg_names, args, strict=False)) | keywords
        # None, too, as in a launch: kernels without FP8 weights have no scales.
        constant = {name for name, value in values.items() if name.isupper() or value is None}
        constants = {(place,): values[name] for place, name in enumerate(kernel.arg_names) if name in constant}
        types = {name: "constexpr" if name in constant else self._type(value) for name, value in values.items()}
        types = {name: types[name] for name in kernel.arg_names}
        aligned = {
            place: [["tt.divisibility", 16]]
            for index, (name, parameter) in enumerate(zip(kernel.arg_names, kernel.params, strict=True))
            if name not in constant and not parameter.do_not_specialize
            for place, value in self._places(index, values[name])
            if isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0)
        }
        source = ASTSource(kernel, types, constants, aligned)
        compiled = to_ptx(source, self.chip, options)
        report = assembler_report(compiled.asm["ptx"], self.chip, always_lists=self.chip.capability == 90)
        report |= {"shared_bytes": compiled.metadata.shared, "num_warps": compiled.metadata.num_warps}
        self.reports[f"{kernel.__name__} {self.variant}".strip()] = report

    @staticmethod
    def _places(index: int, value: Any) -> list[tuple[tuple[int, ...], Any]]:
        """Where an argument is, or each field of a group, as Triton counts."""
        if isinstance(value, tuple):
            return [((index, field), each) for field, each in enumerate(value)]
        return [((index,), value)]

    def _type(self, value: Any) -> Any:
        if isinstance(value, tuple):
            return type(value)(*(self._type(each) for each in value))
        if isinstance(value, torch.Tensor):
            return POINTERS[value.dtype]
        if isinstance(value, TensorDescriptor):
            return f"tensordesc<{POINTERS[value.base.dtype][1:]}[{','.join(map(str, value.block_shape))}]>"
        return "fp32" if isinstance(value, float) else "i32"


def run_all(compiler: Compiler) -> None:
    """Call every host function once, attention for a tree, a chunk and a window."""
    bf16 = {"dtype": torch.bfloat16}
    rows = SLOTS * NODES
    width = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    x, wide = torch.zeros(rows, HIDDEN, **bf16), torch.zeros(rows, 3 * HIDDEN, **bf16)
    pair_rows.norm_rows(x, x[0], 1e-5, wide[:, :HIDDEN])
    state = SlotState.allocate(SLOTS, prompt_chunks.MAX_EOS, "cpu")
    keys = torch.zeros(2, SLOTS, KV_HEADS, 1024, HEAD_DIM, **bf16)
    table, qkv = torch.zeros(64, HEAD_DIM // 2), torch.zeros(rows, width, **bf16)
    tree = [torch.zeros(SLOTS, NODES, dtype=torch.int64)] * 3
    trees = Trees(state.active_slots, state.active_count, *tree)
    forward = ForwardRows.allocate(SLOTS, NODES, state.lengths)
    tree_rows.tree_rows(trees, forward)
    norms = (qkv[0, :HEAD_DIM], qkv[0, :HEAD_DIM])
    rotated = forward.positions, forward.attention.slots, forward.kv_rows
    pair_rows.rotate_append(qkv, qkv[0], norms, 1e-6, (table, table), *rotated, keys[0], keys[0])
    box, chunk = PromptBox.allocate(1024, "cpu"), ChunkRows.allocate(CHUNK, state.lengths)
    prompt_chunks.begin_prompt(box, state)
    prompt_chunks.chunk_rows(box, chunk)
    prompt_chunks.end_chunk(box, CHUNK, state)
    capped = {"softcap": 50.0, "sinks": torch.zeros(HEADS, **bf16)}
    for variant, places, nodes, attends, window, options in (
        ("tree", SLOTS, NODES, forward.attention, None, {}),
        ("tree, window", SLOTS, NODES, forward.attention, 4096, {}),
        ("tree, window, capped, sinks", SLOTS, NODES, forward.attention, 4096, capped),
        ("root", SLOTS, 1, ForwardRows.allocate(SLOTS, 1, state.lengths, is_path=True).attention, None, {}),
        ("chunk", 1, CHUNK, chunk.forward.attention, None, {}),
    ):
        compiler.variant = variant
        out = torch.zeros(places * nodes, HEADS * HEAD_DIM, **bf16)
        query = torch.zeros(places * nodes, width, **bf16)
        scratch = AttentionScratch.allocate(places, nodes, [(HEADS, KV_HEADS, HEAD_DIM)], 1024, torch.device("cpu"))
        params = AttentionParams(0.1, window, **options)
        tree_attention(query, keys[0], keys[0], attends, params, out, scratch)
    for groups in (0, 1, 2) if compiler.chip.capability >= 89 else (0,):
        multiply(compiler, groups)
        run_experts(compiler, groups)
    run_gpt_oss(compiler)
    compiler.variant = ""
    choices = torch.zeros(SLOTS, NODES, dtype=torch.int32)
    acceptance.walk(choices, trees, 7, state, state.active_count)
    acceptance.commit_kv(state, keys, keys)
    acceptance.commit_features(state, wide, NODES, state.active_count, torch.zeros(SLOTS, 16, 3 * HIDDEN, **bf16))
    acceptance.list_active(state)
    case = random_case(VOCAB, parents=[-1] + [0] * (NODES - 1), dtype=torch.bfloat16)
    for rules in (*RULES.values(), ALL_RULES):
        case.choose(rules, tile=2048)
    mark_seen(state.new_tokens, state.active_slots, state.active_count, torch.zeros(SLOTS, VOCAB // 32).int())
    draw_paths(choices, trees, torch.ones(240, dtype=torch.int32), state.lengths, state.lengths)
    compiler.variant = "ranks"
    draw_paths(choices, trees, torch.ones(240, 16, dtype=torch.int32), state.lengths, state.lengths)


def weight(groups: int, *shape: int) -> Any:
    # Never written, so no memory is taken.
    if not groups:
        return torch.empty(shape, dtype=torch.bfloat16)
    scales = torch.empty(shape[0], 1 if groups == 1 else -(-shape[1] // SCALE_BLOCK))
    return Fp8Weight(torch.empty(shape[0], shape[1] // 4, dtype=torch.int32), scales)


def multiply(compiler: Compiler, groups: int) -> None:
    """Call every product for a plain token, a tree and a chunk, with and without what they may be given.

    ``groups``: of scales of each row of FP8 weights, as many as for rows or as for columns; 0 multiplies bf16 weights.
    """
    kind = ("", ", FP8", ", FP8 by blocks")[groups]
    keys = torch.zeros(SLOTS, KV_HEADS, 1024, HEAD_DIM, dtype=torch.bfloat16)
    cases = ((1, None), (32, None), (NODES, None), (NODES, True), (256, None), (CHUNK, None), (128, None))
    # Of FP8 weights each entry of their tables of tiles once; those for scales of blocks are the narrower ones.
    for rows, norms in (cases, cases[:2] + cases[3::2], cases[3::2])[groups]:
        compiler.variant = f"{rows} rows{', norms' if norms else ''}{kind}"
        x, query = (torch.zeros(rows, HIDDEN, dtype=torch.bfloat16) for _ in range(2))
        gated, logits = (torch.zeros(rows, size, dtype=torch.bfloat16) for size in (MIDDLE, VOCAB))
        normed = products.NormedRows(x, x, torch.zeros(rows, products.num_groups(HIDDEN)))
        qkv, table = weight(groups, (HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN), torch.zeros(64, 64)
        gate_up, down, lm_head = (
            weight(groups, 2 * MIDDLE, HIDDEN),
            weight(groups, HIDDEN, MIDDLE),
            weight(groups, VOCAB, HIDDEN),
        )
        lift = products.lift_of(qkv, torch.bfloat16)
        norm, bias = products.Norm(x[0], 1e-5, 1.0, lift), gated[0] if norms else None
        ints = torch.zeros(rows, dtype=torch.int32)
        heads = products.HeadRows(table, table, ints, ints[:1], ints, query)
        head_norms = (x[0, :HEAD_DIM], x[0, :HEAD_DIM]) if norms else None
        scratch = products.SplitScratch(torch.zeros(1), ints)
        products.qkv_product(normed, norm, qkv, bias, head_norms, heads, keys, keys, scratch)
        products.gated_product(normed, norm, gate_up, bias, gated, scratch, lift)
        if groups:
            products.add_product(gated, down, bias, norm, normed, x if norms else None, scratch)
            if groups == 1:
                # Sizes of a 70B model, whose tiles are those of many programs.
                compiler.variant += ", wide"
                products.qkv_product(
                    normed, norm, weight(groups, 10240, HIDDEN), bias, head_norms, heads, keys, keys, scratch
                )
                products.add_product(
                    gated, weight(groups, 8192, MIDDLE), bias, norm, normed, x if norms else None, scratch
                )
            continue
        products.embed(x, ints, norm, normed, x if norms else None)
        products.add_product(x, weight(groups, HIDDEN, HIDDEN), bias, norm, normed, x if norms else None, scratch)
        products.add_product(gated, down, bias, norm, normed, None, scratch)
        products.norm_rows(normed, norm, x)
        products.head_product(normed, norm, lm_head, logits)
        if rows >= 128:
            # Half heads, which no descriptor copies.
            compiler.variant += ", heads of 64"
            keys_64 = keys.view(SLOTS, KV_HEADS, -1, 64)
            products.qkv_product(
                normed, norm, weight(groups, 48 * 64, HIDDEN), None, None, heads, keys_64, keys_64, scratch
            )
    compiler.variant = ""


def run_experts(compiler: Compiler, groups: int) -> None:
    """Call a layer of experts, of Qwen3-30B-A3B's size, for a token, trees and chunks; ``groups`` as in `multiply`."""
    count, width, hidden, top_k = 128, 768, 2048, 8
    # Every size is compiled for one GPU; for the others the smallest, one of some experts, and the largest.
    for rows in (1, 4, 16, NODES, CHUNK, 4 * CHUNK) if compiler.chip.capability == 90 else (1, 16, 4 * CHUNK):
        compiler.variant = f"{rows} rows{('', ', FP8', ', FP8 by blocks')[groups]}"
        weights = weight(groups, count * 2 * width, hidden), weight(groups, count * hidden, width)
        router, x = torch.empty(count, hidden, dtype=torch.bfloat16), torch.zeros(rows, hidden, dtype=torch.bfloat16)
        normed = products.NormedRows(x, x, torch.zeros(rows, products.num_groups(hidden)))
        norm = products.Norm(x[0], 1e-5, 1.0, products.lift_of(weights[0], torch.bfloat16))
        layer = experts.Experts(router, *weights, top_k, True)
        routing = experts.Routing.allocate(layer, rows)
        experts.route(normed, norm, layer, torch.zeros(rows, dtype=torch.int32), routing)
        experts.gated_experts(normed, norm, layer, routing, norm.lift)
        experts.add_experts(layer, routing, norm, normed, x if rows == NODES else None)


def run_gpt_oss(compiler: Compiler) -> None:
    """Call a layer of experts in MXFP4, of gpt-oss-20b's size, for a token, a tree, and prompts."""
    count, width, hidden, top_k, bf16 = 32, 2880, 2880, 4, {"dtype": torch.bfloat16}
    sizes = count, count * 2 * width, count * hidden
    gate_up, down = (Mxfp4Weight.empty(size, hidden, torch.device("cpu")) for size in sizes[1:])
    biases = experts.Biases(*(torch.empty(size, **bf16) for size in sizes))
    layer = experts.Experts(
        torch.empty(count, hidden, **bf16), gate_up, down, top_k, False, biases, experts.Clamp(1.702, 7.0)
    )
    # Of the chips of all kernels sm_120 has least shared memory, of which float32 takes most.
    prompts = {90: (torch.bfloat16,), 120: (torch.bfloat16, torch.float32)}.get(compiler.chip.capability, ())
    for rows, dtype in [(1, torch.bfloat16), (NODES, torch.bfloat16), *((CHUNK, each) for each in prompts)]:
        compiler.variant = f"{rows} rows, MXFP4, {dtype}"
        x = torch.zeros(rows, hidden, dtype=dtype)
        layer = replace(layer, router=layer.router.to(dtype), biases=experts.Biases(*(b.to(dtype) for b in biases)))
        normed = products.NormedRows(x, x, torch.zeros(rows, products.num_groups(hidden)))
        norm, routing = products.Norm(x[0], 1e-5, 1.0), experts.Routing.allocate(layer, rows)
        experts.route(normed, norm, layer, torch.zeros(rows, dtype=torch.int32), routing)
        experts.gated_experts(normed, norm, layer, routing)
        experts.add_experts(layer, routing, norm, normed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chip", type=int, choices=sorted(KNOWN_CHIPS), required=True)
    parser.add_argument("--fp8", action="store_true", help="products of FP8 weights alone")
    args = parser.parse_args()
    compiler = Compiler(KNOWN_CHIPS[args.chip])
    machine.major_capability = products.major_capability = lambda _device: compiler.chip.capability // 10
    products.programs_wait = lambda _device: True
    products.overwrites_operands = experts.overwrites_operands = lambda _device: compiler.chip.capability == 90
    overlaps = compiler.chip.capability >= 90
    launch = machine.NO_FUSION | ({"launch_pdl": True} if overlaps else {})
    products.overlapping = experts.overlapping = attention.overlapping = lambda _device: (overlaps, launch)
    JITFunction.__getitem__ = lambda kernel, _grid: lambda *args, **keywords: compiler.launch(kernel, args, keywords)
    if args.fp8:
        for groups in (1, 2):
            multiply(compiler, groups)
            run_experts(compiler, groups)
    else:
        run_all(compiler)
    print(json.dumps(compiler.reports))
    for name, report in compiler.reports.items():
        if wrong := {fault: report[fault] for fault in FAULTS if report[fault]}:
            sys.exit(f"{name} may compute wrongly: {wrong}")


if __name__ == "__main__":
    main()
