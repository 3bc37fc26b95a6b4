"""A row's bits are its own: the fused forward with kernels, cut and combined in every way, against one token at a time.

Logits, keys and values of a token are compared bit for bit between plain decoding and chunks of any size, nodes of
random trees, chains, and other sequences beside them, in caches poisoned behind the committed rows.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from eagle_slim.runtime.ops import Ops
from eagle_slim.runtime.target.cache import KVCache
from eagle_slim.runtime.target.expert_loading import Mxfp4Experts
from eagle_slim.runtime.target.fp8 import Fp8Linear, quantise_rows
from eagle_slim.runtime.target.fused import FusedTarget
from eagle_slim.runtime.target.kernels.attention_kernels import REACH
from eagle_slim.runtime.target.kernels.tree_rows import ForwardRows, tree_rows
from eagle_slim.runtime.tree import Trees
from support.tiny_models import tiny_target
from torch import Tensor

VOCAB = 96
SMALL = {"vocab_size": VOCAB, "num_hidden_layers": 2, "max_position_embeddings": 4096}
LARGE = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
NINE_HEADS = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3}
QWEN2 = {"hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14}

OTHERS = ("qwen2", "qwen3", "mistral", "qwen3moe", "gptoss")
MIXTURE = {"hidden_size": 1024, "num_attention_heads": 8, "num_experts": 64, "moe_intermediate_size": 384}
MIXTURE |= {"num_experts_per_tok": 8, "num_hidden_layers": 4}
GPT_OSS = {"hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64, "num_key_value_heads": 8}
GPT_OSS |= {"head_dim": 64, "num_local_experts": 8, "num_experts_per_tok": 4, "sliding_window": 128}


@dataclass(frozen=True)
class Text:
    """Random tokens, and what plain decoding of them one at a time left."""

    target: FusedTarget
    tokens: list[int]
    logits: Tensor
    keys: Tensor
    values: Tensor

    @property
    def capacity(self) -> int:
        return self.keys.shape[3]


class Slots:
    """A cache of some slots that hold the text's first rows, poisoned behind them."""

    def __init__(self, text: Text, lengths: Sequence[int]) -> None:
        self.target, device = text.target, text.target.device
        self.lengths = torch.tensor(lengths, dtype=torch.int32, device=device)
        self.cache = KVCache.allocate(text.target, len(lengths), text.capacity)
        for mine, theirs in zip(self.cache.stacks[0], (text.keys, text.values), strict=True):
            mine.fill_(float("nan"))
            for slot, length in enumerate(self.lengths.tolist()):
                mine[:, slot, :, :length] = theirs[:, 0, :, :length]

    def run(self, tokens: Tensor, parents: Tensor | None, order: Sequence[int]) -> Tensor:
        """Forward trees int64 [slots, nodes] (``parents`` None: paths) of the slots in ``order``; logits by place."""
        nodes, device = tokens.shape[1], tokens.device
        rows = ForwardRows.allocate(len(order), nodes, self.lengths, parents is None)
        if parents is None:
            parents = torch.arange(-1, nodes - 1, device=device).expand(len(tokens), nodes)
        depths = torch.tensor([depths_of(row) for row in parents.tolist()], device=device)
        active = torch.tensor([*order, *[-1] * (len(tokens) - len(order))], dtype=torch.int32, device=device)
        count = torch.tensor([len(order)], dtype=torch.int32, device=device)
        tree_rows(Trees(active, count, tokens, parents.contiguous(), depths), rows)
        bufs = self.target.new_buffers(len(order), nodes, len(order) * nodes, self.cache.capacity)
        self.target.forward(rows, self.cache, bufs)
        return bufs.logits.view(len(order), nodes, -1)


def depths_of(parents: Sequence[int]) -> list[int]:
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return depths


def assert_same(found: Tensor, wanted: Tensor, case: object) -> None:
    """Equal bits; in the interpreter, whose products are NumPy's, equal but for rounding."""
    if found.is_cuda:
        differing = (found != wanted).nonzero()
        assert len(differing) == 0, (case, len(differing), differing[:5].tolist())
    else:
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4, msg=str(case))


def decode(kind, dtype, device, length, begin=0, is_fp8=False, is_mxfp4=False, **sizes):
    """Decode random tokens plainly, one at a time; the first ``begin`` at once."""
    model: Any = tiny_target(kind, **SMALL | sizes).to(device=device, dtype=dtype)
    for layer in model.model.layers if is_fp8 else ():
        for block in (layer.self_attn, layer.mlp):
            for name, linear in list(block.named_children()):
                if name.endswith("_proj"):
                    setattr(block, name, Fp8Linear(quantise_rows(linear.weight.detach()), linear.bias))
    for layer in model.model.layers if is_mxfp4 else ():
        layer.mlp.experts = experts = Mxfp4Experts(layer.mlp.experts, torch.device(device))
        for weight in (experts.gate_up, experts.down):
            weight.words.random_(-(1 << 31), (1 << 31) - 1)
            weight.put_scales(torch.randint(117, 122, (weight.shape[0], weight.shape[1] // 32), device=device))
    target = FusedTarget(model, None, Ops(use_kernels=True))
    capacity = length + 192
    target.reserve_positions(capacity)
    tokens = random.Random(3).choices(range(VOCAB), k=length)
    slots = Slots.__new__(Slots)
    slots.target, slots.cache = target, KVCache.allocate(target, 1, capacity)
    slots.lengths = torch.zeros(1, dtype=torch.int32, device=device)
    logits = []
    if begin:
        logits += slots.run(torch.tensor([tokens[:begin]], device=device), None, [0])[0].clone()
        slots.lengths += begin
    for token in tokens[begin:]:
        logits.append(slots.run(torch.tensor([[token]], device=device), None, [0])[0, 0].clone())
        slots.lengths += 1
    return Text(target, tokens, torch.stack(logits), *slots.cache.stacks[0])


def random_tree(text: Text, length: int, nodes: int, seed: int) -> tuple[list[int], list[int], list[int]]:
    """Tokens, parents, and the nodes that go on as the text does, in order."""
    draw = random.Random(seed)
    tokens, parents, depths, path = [text.tokens[length]], [-1], [0], [0]
    while len(tokens) < nodes:
        after = length + len(path)
        if after < len(text.tokens) and len(path) < REACH and draw.random() < 0.4:
            parent, token = path[-1], text.tokens[after]
            path.append(len(tokens))
        else:
            parent, token = draw.randrange(len(tokens)), draw.randrange(VOCAB)
            parent = parent if depths[parent] < REACH else 0
        tokens.append(token)
        parents.append(parent)
        depths.append(depths[parent] + 1)
    return tokens, parents, path


def check_trees(text: Text, lengths: Sequence[int], nodes: int, order: Sequence[int], seed: int) -> None:
    """Trees of sequences side by side: every node that goes on as the text does has the text's bits."""
    slots = Slots(text, lengths)
    trees = [random_tree(text, length, nodes, seed + slot) for slot, length in enumerate(lengths)]
    tokens, parents = (torch.tensor([tree[part] for tree in trees], device=text.target.device) for part in (0, 1))
    logits = slots.run(tokens, parents, order)
    for place, slot in enumerate(order):
        for depth, node in enumerate(trees[slot][2]):
            at, row = lengths[slot] + depth, lengths[slot] + node
            assert_same(logits[place, node], text.logits[at], (lengths[slot], depth, node))
            for mine, theirs in zip(slots.cache.stacks[0], (text.keys, text.values), strict=True):
                assert_same(mine[:, slot, :, row], theirs[:, 0, :, at], (lengths[slot], depth, node))


def check_chunks(text: Text, start: int, size: int) -> None:
    """A prompt's rows from ``start`` on, ``size`` at a time, have the text's bits."""
    slots = Slots(text, [start])
    for at in range(start, len(text.tokens), size):
        part = torch.tensor([text.tokens[at : at + size]], device=text.target.device)
        logits = slots.run(part, None, [0])[0]
        assert_same(logits, text.logits[at : at + size], (start, size, at))
        slots.lengths += part.shape[1]
    for mine, theirs in zip(slots.cache.stacks[0], (text.keys, text.values), strict=True):
        assert_same(mine[:, 0, :, : len(text.tokens)], theirs[:, 0, :, : len(text.tokens)], (start, size))


@pytest.mark.parametrize(
    "kind",
    ["llama", *(pytest.param(kind, marks=pytest.mark.slow) for kind in OTHERS)],
)
@torch.inference_mode()
def test_small(device: str, kind: str) -> None:
    """In the interpreter too, where layouts are not seen but masks, cuts and places are."""
    layers = 1 if kind == "llama" else 2
    text = decode(kind, torch.float32, device, 52, begin=49, hidden_size=32, num_hidden_layers=layers)
    check_chunks(text, 0, 30)
    check_trees(text, [49, 3, 34], 7, [2, 0], 5)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kind", "dtype", "length", "sizes"),
    [
        ("llama", torch.bfloat16, 700, LARGE),
        ("llama", torch.bfloat16, 700, LARGE | {"is_fp8": True}),
        ("qwen2", torch.bfloat16, 300, QWEN2 | {"is_fp8": True}),
        ("llama", torch.float16, 300, LARGE | {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True}),
        ("llama", torch.bfloat16, 700, NINE_HEADS | {"num_hidden_layers": 4}),
        ("llama", torch.bfloat16, 300, {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32}),
        ("llama", torch.float32, 300, {"hidden_size": 256, "num_key_value_heads": 4}),
        ("qwen2", torch.bfloat16, 300, QWEN2),
        ("qwen3", torch.bfloat16, 300, {"hidden_size": 1024, "num_attention_heads": 8}),
        ("qwen3moe", torch.bfloat16, 300, MIXTURE),
        ("qwen3moe", torch.float16, 300, MIXTURE | {"decoder_sparse_step": 2, "norm_topk_prob": True}),
        ("gptoss", torch.bfloat16, 700, GPT_OSS),
        ("gptoss", torch.bfloat16, 300, GPT_OSS | {"is_mxfp4": True}),
        ("mistral", torch.float16, 300, {"hidden_size": 512, "num_attention_heads": 2, "num_key_value_heads": 2}),
    ],
)
@torch.inference_mode()
def test_every_cut(device: str, kind: str, dtype: torch.dtype, length: int, sizes: dict[str, Any]) -> None:
    text = decode(kind, dtype, device, length, **sizes)
    for start, size in ((0, length), (0, 64), (0, 33), (63, 128), (130, 5), (97, 60)):
        check_chunks(text, start, size)
    borders = [1, 7, 63, 64, 65, 95, 96, 97, 127, 128, 129, 159, 160, 191, 255, 256, 257]
    borders += [383, 384, 447, 511, 512, 513, 543, 544, 600]
    borders = [border for border in borders if border + 2 < length]
    for seed, border in enumerate(borders):
        for nodes in (6, 17, 60, 128):
            check_trees(text, [border], nodes, [0], seed)
    draw = random.Random(9)
    for count, nodes in ((2, 60), (3, 60), (4, 16), (8, 60), (16, 1), (16, 16), (16, 60)):
        lengths = [draw.choice(borders) for _ in range(count)]
        order = draw.sample(range(count), draw.randint(1, count))
        check_trees(text, lengths, nodes, order, count)
