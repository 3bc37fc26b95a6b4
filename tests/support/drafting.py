"""Random draft heads and drafting problems for the kernel tests."""

from dataclasses import replace

import torch
from eagle_slim.runtime import Buffers, DrafterConfig, Weights, allocate_buffers, prefill_drafter
from eagle_slim.runtime.drafter.rope import rotary_embedding
from eagle_slim.runtime.drafter.tuning.problem import Dims
from eagle_slim.runtime.drafter.tuning.problem import random_head as problem_head

BIASED = ("self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
SIZES = {"hidden": 64, "intermediate": 96, "heads": 4, "kv_heads": 2, "head_dim": 16, "target_vocab": 300}


def random_head(
    kind="eagle3", draft_vocab=120, target_hidden=0, qkv_bias=False, dtype=torch.float32, device="cpu", **options
):
    """A head of the drafter's tests; options: sizes as in `SIZES`, ``seed`` and ``rope_scaling``."""
    seed, rope_scaling = options.pop("seed", 0), options.pop("rope_scaling", None)
    hidden, intermediate, heads, kv_heads, head_dim, target_vocab = {**SIZES, **options}.values()
    dims = Dims(hidden, intermediate, heads, kv_heads, head_dim, target_vocab, kind, 3 * target_hidden)
    whole = problem_head(dims, torch.device(device), dtype, seed)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randperm(target_vocab, generator=generator)[:draft_vocab].sort().values
    biased = {"fc": hidden} if kind == "eagle" else {}
    for name, size in zip("qkv" if qkv_bias else "", (heads, kv_heads, kv_heads), strict=False):
        biased[f"self_attn.{name}_proj"] = size * head_dim
    tensors = dict(whole.tensors)
    for name, size in biased.items():
        tensors[f"{name}.bias"] = (torch.randn(size, generator=generator) * size**-0.5).to(device, dtype)
    rope = {"head_dim": head_dim, "max_position_embeddings": 131072, "rope_theta": 1e4, "rope_scaling": rope_scaling}
    return replace(whole.of_rows(ids.to(device)), tensors=tensors, rotary=rotary_embedding(rope, device))


def with_options(head, tap_norms=0, o_bias=False, mlp_bias=False, head_norms=False, **fields):
    """Give a head options: RMSNorms before fc (1: ``input_norm``), random biases, and other fields of `HeadWeights`.

    ``head_norms``: RMSNorms over each head of q and of k.
    """
    generator = torch.Generator().manual_seed(1)

    def vector(size: int, mean: float, spread: float) -> torch.Tensor:
        return (mean + spread * torch.randn(size, generator=generator)).to(head.device, head.dtype)

    tensors = dict(head.tensors)
    for index in range(tap_norms):
        name = "input_norm.weight" if tap_norms == 1 else f"fc_norm.{index}.weight"
        tensors[name] = vector(head.feature_width // tap_norms, 1.0, 0.2)
    for name in "qk" if head_norms else "":
        tensors[f"self_attn.{name}_norm.weight"] = vector(head.head_dim, 1.5, 0.5)
    sizes = {name: tensors[f"{name}.weight"].shape[0] for name in BIASED}
    for name in BIASED[: 1 if o_bias else 0] + BIASED[1 if mlp_bias else len(BIASED) :]:
        tensors[f"{name}.bias"] = vector(sizes[name], 0.0, 0.3)
    return replace(head, tensors=tensors, **fields)


def problem(head, tree, prefixes, num_new, active=None, weight_dtype=None, holds_window=False):
    """Set up a drafting step: caches filled to ``prefixes``, random features and tokens for the new positions."""
    slots = len(prefixes)
    device = head.device
    generator = torch.Generator().manual_seed(0)
    cfg = DrafterConfig.of(head, tree, slots, max(prefixes) + 16, weight_dtype, holds_window)
    weights = Weights.pack(head, cfg)
    bufs = allocate_buffers(cfg, weights)
    active = list(range(slots)) if active is None else active
    for slot in active:
        past = torch.randn(prefixes[slot], head.feature_width, generator=generator).to(device, head.dtype)
        tokens = torch.randint(0, cfg.target_vocab, (prefixes[slot],), generator=generator).to(device)
        prefill_drafter(cfg, past, tokens, weights, bufs, slot)
    new_tokens = [torch.randint(0, cfg.target_vocab, (num_new[slot],), generator=generator).tolist() for slot in active]
    bufs.set_step(active, new_tokens, [prefixes[slot] for slot in active])
    features = torch.randn(slots, 16, head.feature_width, generator=generator).to(device, head.dtype)
    return cfg, features, weights, bufs


def nan_fill(bufs: Buffers) -> None:
    for name, tensor in bufs.workspace.items():
        if tensor.dtype == torch.float8_e4m3fn:
            tensor.view(torch.uint8).fill_(0x7F)
        elif tensor.is_floating_point():
            tensor.fill_(float("nan"))
        elif name not in ("node_arrivals", "barrier"):
            tensor.fill_(-(2**30))
    for name in ("draft_tokens", "parents", "tree_position_ids", "retrieve_indices", "num_leaves"):
        getattr(bufs, name).fill_(-2)
    bufs.tree_mask.fill_(True)
