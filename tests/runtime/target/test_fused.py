"""The fused target against transformers' own forward, for every family that it takes, prompts in chunks and trees."""

from typing import Any

import pytest
import torch
from eagle_slim.runtime.ops import REHEARSES, Ops
from eagle_slim.runtime.step.kernels.prompt_chunks import ChunkRows, PromptBox, chunk_rows_ref
from eagle_slim.runtime.target.cache import KVCache
from eagle_slim.runtime.target.fused import FusedTarget
from eagle_slim.runtime.target.kernels.tree_rows import ForwardRows, tree_rows_ref
from eagle_slim.runtime.target.known import unfit_reason
from eagle_slim.runtime.tree import Trees, layout_tree
from support.tiny_models import LLAMA3_ROPE, VOCAB, WINDOW, YARN_ROPE, random_prompts, tiny_target
from torch import Tensor, nn

TAPS = (2, 3, 3, 4)
PARENTS = [[-1, 0, 0, 1, 1, 2, 3]]
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, tied": ("llama", {"tie_word_embeddings": True}),
    "llama3 rope": ("llama", {"rope_parameters": {**LLAMA3_ROPE, "rope_theta": 10000.0}}),
    "yarn rope": ("llama", {"rope_parameters": {**YARN_ROPE, "rope_theta": 10000.0}}),
    "mistral": ("mistral", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "qwen3moe": ("qwen3moe", {}),
    "qwen3moe, normalised": ("qwen3moe", {"norm_topk_prob": True}),
    "qwen3moe, every second layer": ("qwen3moe", {"decoder_sparse_step": 2, "num_experts_per_tok": 3}),
    "qwen3moe, but one layer": ("qwen3moe", {"mlp_only_layers": [2], "attention_bias": True}),
    "qwen3moe, windows": ("qwen3moe", {"use_sliding_window": True, "sliding_window": WINDOW}),
    "gptoss": ("gptoss", {}),
    "gptoss, others": (
        "gptoss",
        {"layer_types": ["full_attention"] * 4, "num_experts_per_tok": 3, "swiglu_alpha": 1.0},
    ),
    "gptoss, no biases": ("gptoss", {"attention_bias": False, "num_experts_per_tok": 1, "tie_word_embeddings": True}),
}


def prefill(target: FusedTarget, cache: KVCache, lengths: Tensor, slot: int, prompt: list[int], chunk: int) -> Tensor:
    box = PromptBox.allocate(len(prompt), "cpu")
    box.numbers[:2] = torch.tensor([slot, len(prompt)])
    box.tokens.copy_(torch.tensor(prompt))
    features = []
    for start in range(0, len(prompt), chunk):
        rows, bufs = ChunkRows.allocate(chunk, lengths), target.new_buffers(1, chunk, 1, cache.capacity)
        chunk_rows_ref(box, rows)
        target.forward(rows.forward, cache, bufs, last_row=rows.last_row)
        count = min(chunk, len(prompt) - start)
        lengths[slot] += count
        features.append(bufs.features[:count].clone())
    return torch.cat(features)


def hidden_states(model: nn.Module, ids: list[int]) -> tuple[Tensor, Tensor]:
    """Transformers' logits [seq, vocab] and tapped hidden states [seq, taps * hidden]."""
    kept: dict[int, Tensor] = {}
    layers = model.model.layers  # type: ignore[union-attr]
    handles = [
        layers[tap].register_forward_pre_hook(lambda _m, args, tap=tap: kept.__setitem__(tap, args[0]))
        for tap in set(TAPS)
        if tap < len(layers)
    ]
    handles.append(layers[-1].register_forward_hook(lambda _m, _a, out: kept.__setitem__(len(layers), out)))
    logits = model(torch.tensor([ids])).logits[0]
    for handle in handles:
        handle.remove()
    last = kept[len(layers)]
    kept[len(layers)] = last[0] if isinstance(last, tuple) else last
    return logits, torch.cat([kept[tap].reshape(len(ids), -1) for tap in TAPS], -1)


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_prompt_and_tree_equal_transformers(family: str) -> None:
    kind, options = FAMILIES[family]
    model = tiny_target(kind, **options)
    assert unfit_reason(model) is None
    prompt = random_prompts([21])[0]
    tokens = torch.randint(3, VOCAB, (1, 7))
    tree = layout_tree(tokens, torch.tensor(PARENTS), path_width=4)
    wanted, wanted_features = [], []
    for node in range(7):
        path = [tokens[0, n].item() for n in range(7) if tree.tree_mask[0, 0, node, n]]
        logits, features = hidden_states(model, prompt + path)
        wanted.append(logits[-1])
        wanted_features.append(features[-1])
    _, prompt_features = hidden_states(model, prompt)

    target = FusedTarget(model, TAPS, Ops(use_kernels=False))
    target.reserve_positions(64)
    lengths = torch.zeros(3, dtype=torch.int32)
    cache = KVCache.allocate(target, 3, 40)
    for tensor in cache.stacks[0]:
        tensor.fill_(float("nan"))  # rows that were never written must reach no result
    found = prefill(target, cache, lengths, 1, prompt, chunk=8)
    torch.testing.assert_close(found, prompt_features, rtol=1e-4, atol=1e-4)
    rows, bufs = ForwardRows.allocate(2, 7, lengths), target.new_buffers(2, 7, 14, cache.capacity)
    slots = [torch.full((3, 7), -1), torch.full((3, 7), -1), torch.zeros((3, 7), dtype=torch.int64)]
    for by_slot, value in zip(slots, (tokens, tree.parents, tree.tree_position_ids), strict=True):
        by_slot[1] = value[0]
    active = torch.tensor([1, -1, -1], dtype=torch.int32)
    tree_rows_ref(Trees(active, torch.tensor([1], dtype=torch.int32), *slots), rows)
    target.forward(rows, cache, bufs)
    torch.testing.assert_close(bufs.logits[:7], torch.stack(wanted), rtol=1e-4, atol=2e-4)
    torch.testing.assert_close(bufs.features[:7], torch.stack(wanted_features), rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_a_rehearsal_runs_each_kind_of_layer_once() -> None:
    """Kinds, by what a kernel is compiled for: 1 and 2 are tapped after, 3's weight lies where no vector load can."""
    model: Any = tiny_target("llama", num_hidden_layers=7)
    unaligned = model.model.layers[3].mlp.down_proj
    flat = torch.zeros(unaligned.weight.numel() + 1)
    unaligned.weight.data = flat[1:].view_as(unaligned.weight).copy_(unaligned.weight)
    target, ran = FusedTarget(model, (2, 3), Ops(use_kernels=False)), []

    class Noted(Ops):
        def __call__(self, operation: Any) -> Any:
            ran.append(operation.__name__)
            return super().__call__(operation)

    target.ops = Noted(use_kernels=False)
    rows, bufs = ForwardRows.allocate(1, 1, torch.zeros(1, dtype=torch.int32)), target.new_buffers(1, 1, 1, 16)
    cache = KVCache.allocate(target, 1, 16)
    token = REHEARSES.set(True)
    target.forward(rows, cache, bufs)
    REHEARSES.reset(token)
    assert ran.count("tree_attention") == 3
    target.forward(rows, cache, bufs)
    assert ran.count("tree_attention") == 3 + 7


@pytest.mark.parametrize("kind", ["qwen2", "qwen3moe", "gptoss"])
def test_weights_are_held_once_and_the_model_still_generates(kind: str) -> None:
    model: Any = tiny_target(kind)
    prompt = torch.tensor(random_prompts([9]))
    before = model.generate(prompt, max_new_tokens=8, do_sample=False)
    names = [name for name, _ in model.named_parameters()]
    first, second = FusedTarget(model, None), FusedTarget(model, None)
    attention, mlp = model.model.layers[0].self_attn, model.model.layers[0].mlp
    assert attention.q_proj.weight.untyped_storage().data_ptr() == attention.v_proj.weight.untyped_storage().data_ptr()
    assert first.layers[0].qkv.data_ptr() == second.layers[0].qkv.data_ptr() == attention.q_proj.weight.data_ptr()
    ours: list[Any] = [each.layers[0].mlp for each in (first, second)]
    experts = getattr(mlp, "experts", None)
    theirs = (
        (mlp.gate_proj.weight, mlp.down_proj.weight) if experts is None else (experts.gate_up_proj, experts.down_proj)
    )
    for each in ours:
        assert [each.gate_up.data_ptr(), each.down.data_ptr()] == [weight.data_ptr() for weight in theirs]
    assert [name for name, _ in model.named_parameters()] == names
    assert torch.equal(model.generate(prompt, max_new_tokens=8, do_sample=False), before)
