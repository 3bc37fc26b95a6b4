"""Build random drafting problems with the dimensions of known models on a device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...settings import MAX_NEW_TOKENS, TreeConfig
from ..buffers import Buffers
from ..dimensions import DrafterConfig
from ..rope import rotary_embedding
from ..weights import HeadWeights


@dataclass(frozen=True)
class Dims:
    """Dimensions of a model and of a draft head for it."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    kind: str = "eagle3"
    """Or "eagle" for EAGLE-1/2."""
    target_features: int = 0
    """Width of the target's features where it is not that of three taps as wide as the head."""

    @classmethod
    def of(cls, cfg: DrafterConfig) -> Dims:
        """Return the dimensions of a configuration."""
        layer = cfg.hidden, cfg.intermediate, cfg.num_heads, cfg.num_kv_heads, cfg.head_dim
        return cls(*layer, cfg.target_vocab, cfg.kind, cfg.feature_width)

    @property
    def feature_width(self) -> int:
        """Width of the target's features, all taps together."""
        return self.target_features or (3 * self.hidden if self.kind == "eagle3" else self.hidden)


MODELS = {
    "smollm2-135m": Dims(576, 1536, 9, 3, 64, 49152),
    "qwen2.5-0.5b": Dims(896, 4864, 14, 2, 64, 151936),
    "llama-3.2-1b": Dims(2048, 8192, 32, 8, 64, 128256),
    "llama-3.1-8b": Dims(4096, 14336, 32, 8, 128, 128256),
    "qwen3-8b": Dims(4096, 12288, 32, 8, 128, 151936),
    "llama-3.3-70b": Dims(8192, 28672, 64, 8, 128, 128256),
    "qwen3-30b-a3b": Dims(2048, 6144, 32, 4, 128, 151936),
    "gpt-oss-20b": Dims(2880, 17280, 64, 8, 64, 201088),
    "gpt-oss-120b": Dims(2880, 17280, 64, 8, 64, 201088),
}
"""From each model's ``config.json`` on the Hugging Face Hub; of gpt-oss the width is SpecForge's heads'."""


def random_head(
    dims: Dims, device: torch.device, dtype: torch.dtype = torch.bfloat16, seed: int = 0, lm_head_gain: float = 3.0
) -> HeadWeights:
    """Build a head over the full vocabulary, logits' deviation about ``lm_head_gain``; shapes only on "meta"."""
    generator = None if device.type == "meta" else torch.Generator(device).manual_seed(seed)

    def matrix(out: int, size: int, gain: float = 1.0) -> Tensor:
        weight = torch.randn(out, size, generator=generator, device=device, dtype=dtype)
        return weight.mul_(gain * size**-0.5)

    def norm() -> Tensor:
        return 1 + 0.2 * torch.randn(dims.hidden, generator=generator, device=device, dtype=dtype)

    hidden, attention, kv = dims.hidden, dims.heads * dims.head_dim, dims.kv_heads * dims.head_dim
    eagle3 = dims.kind == "eagle3"
    qkv_in = 2 * hidden if eagle3 else hidden
    tensors = {
        "fc.weight": matrix(hidden, dims.feature_width if eagle3 else 2 * hidden),
        "self_attn.q_proj.weight": matrix(attention, qkv_in, 2.0),
        "self_attn.k_proj.weight": matrix(kv, qkv_in, 2.0),
        "self_attn.v_proj.weight": matrix(kv, qkv_in),
        "self_attn.o_proj.weight": matrix(hidden, attention),
        "mlp.gate_proj.weight": matrix(dims.intermediate, hidden),
        "mlp.up_proj.weight": matrix(dims.intermediate, hidden),
        "mlp.down_proj.weight": matrix(hidden, dims.intermediate),
        "post_attention_layernorm.weight": norm(),
    }
    if eagle3:
        tensors |= {"input_layernorm.weight": norm(), "hidden_norm.weight": norm(), "norm.weight": norm()}
    return HeadWeights(
        kind=dims.kind,
        tensors=tensors,
        embedding=matrix(dims.vocab, hidden, hidden**0.5),
        lm_head=matrix(dims.vocab, hidden, lm_head_gain),
        draft_to_target=torch.arange(dims.vocab, device=device),
        rotary=rotary_embedding({"head_dim": dims.head_dim, "rope_theta": 500000.0}, device),
        hidden=hidden,
        num_heads=dims.heads,
        num_kv_heads=dims.kv_heads,
        head_dim=dims.head_dim,
        norm_eps=1e-5,
        activation="silu",
        feature_width=dims.feature_width,
    )


def random_step(cfg: DrafterConfig, prefix: int, num_new: int, bufs: Buffers) -> Tensor:
    """Fill every slot's cache with ``prefix`` random pairs, write ``num_new`` tokens, and return their features."""
    device = bufs.keys.device
    generator = torch.Generator(device).manual_seed(0)
    for cache in (bufs.keys, bufs.values):
        cache.normal_(generator=generator)
    tokens = torch.randint(0, cfg.target_vocab, (cfg.num_slots, num_new), generator=generator, device=device)
    bufs.set_step(list(range(cfg.num_slots)), tokens.tolist(), [prefix] * cfg.num_slots)
    shape = (cfg.num_slots, MAX_NEW_TOKENS, cfg.feature_width)
    return torch.randn(shape, generator=generator, device=device, dtype=cfg.dtype)


def draft_config(
    dims: Dims,
    draft_vocab: int,
    tree: TreeConfig,
    num_slots: int,
    prefix: int,
    dtype: torch.dtype = torch.bfloat16,
    weight_dtype: torch.dtype | None = None,
) -> DrafterConfig:
    """Return the configuration of a draft with `random_head`."""
    head = random_head(dims, torch.device("meta"), dtype).of_rows(slice(draft_vocab))
    return DrafterConfig.of(head, tree, num_slots, prefix + MAX_NEW_TOKENS, weight_dtype)
