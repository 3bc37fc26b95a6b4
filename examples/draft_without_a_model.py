"""Launch the drafter alone, over random weights: no target, no head from a file.

    python examples/draft_without_a_model.py

The docstrings of `HeadWeights`, `DrafterConfig` and `Buffers` have every field and shape. Without a GPU, set
TRITON_INTERPRET=1 and ``dtype`` to `torch.float32`.
"""

import torch
from eagle_slim.runtime import (
    Buffers,
    DrafterConfig,
    HeadWeights,
    RotaryEmbedding,
    TreeConfig,
    Weights,
    allocate_buffers,
    frontier_generate,
    launch_drafter,
)

device, dtype = torch.device("cuda" if torch.cuda.is_available() else "cpu"), torch.bfloat16
hidden, intermediate, num_heads, num_kv_heads, head_dim, vocab = 64, 96, 4, 2, 16, 320


def random(*shape: int) -> torch.Tensor:
    """Return weights that keep a row's size."""
    return torch.randn(*shape, device=device, dtype=dtype) * shape[-1] ** -0.5


layer = {  # as EAGLE-3 heads name them, without the layer's prefix
    "fc.weight": random(hidden, 3 * hidden),  # three taps of the target, side by side
    "self_attn.q_proj.weight": random(num_heads * head_dim, 2 * hidden),
    "self_attn.k_proj.weight": random(num_kv_heads * head_dim, 2 * hidden),
    "self_attn.v_proj.weight": random(num_kv_heads * head_dim, 2 * hidden),
    "self_attn.o_proj.weight": random(hidden, num_heads * head_dim),
    "mlp.gate_proj.weight": random(intermediate, hidden),
    "mlp.up_proj.weight": random(intermediate, hidden),
    "mlp.down_proj.weight": random(hidden, intermediate),
}
norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm", "norm")
head = HeadWeights(
    kind="eagle3",
    tensors=layer | {f"{name}.weight": torch.ones(hidden, device=device, dtype=dtype) for name in norms},
    embedding=random(vocab, hidden) * hidden**0.5,
    lm_head=random(vocab, hidden) * 3,
    draft_to_target=torch.arange(vocab, device=device),  # of a slim head: the target's ids, ascending
    rotary=RotaryEmbedding(10000.0 ** -(torch.arange(0, head_dim, 2, device=device) / head_dim), scaling=1.0),
    hidden=hidden,
    num_heads=num_heads,
    num_kv_heads=num_kv_heads,
    head_dim=head_dim,
    norm_eps=1e-5,
    activation="silu",
    feature_width=3 * hidden,
)
config = DrafterConfig.of(head, TreeConfig(depth=2, top_k=2, total_tokens=6), num_slots=1, capacity=64)
weights = Weights.pack(head, config)  # Weights(head) for the reference alone
bufs: Buffers = allocate_buffers(config, weights)
bufs.set_step(active=[0], new_tokens=[[7, 11]], prefix=[0])  # the tokens after each feature; the last is the root
features_concat = random(1, 2, 3 * hidden) * hidden**0.5  # [slots, new tokens, feature_width]
draft_tokens, retrieve_indices, tree_mask, tree_position_ids = launch_drafter(config, features_concat, weights, bufs)
# One slot's tree in the shapes of upstream's topK_genrate; sampling=True: in its order for sampling.
tokens, paths, mask, positions = bufs.drafted.to_upstream(slot=0)
# Features by name, or tap by tap as X_low, X_mid and X_high; by the name of a registered backend:
launch_drafter(config, {"X_concat": features_concat}, weights, bufs)
frontier_generate(config, features_concat=features_concat, weights=weights, bufs=bufs, backend="triton")
