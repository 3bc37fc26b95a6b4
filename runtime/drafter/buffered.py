"""A drafter whose whole state lies on the device: it drafts from its buffers and leaves the trees there.

What a step of the decoding loop needs of a drafter is that nothing passes through the host: lengths, new tokens and
active slots are read from `Buffers`, features from one tensor. "triton" is the persistent kernel; "reference" gives the
same results with PyTorch and waits for the device, so that the loop around it can be tested without a GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..config import TreeConfig
from ..kernels import fused_layers
from ..kernels.grid_barrier import ERROR
from ..kernels.launch import SharedPacking, Weights, allocate_buffers, launch_drafter
from ..kernels.prompt_chunks import ChunkRows
from .buffers import cache_shape
from .config import MAX_NEW_TOKENS, DrafterConfig
from .weights import HeadWeights


def allocate_cache(head: HeadWeights, tree: TreeConfig, num_slots: int, capacity: int) -> tuple[Tensor, Tensor]:
    """Allocate keys and values for `BufferedDrafter`s of trees of one depth and top_k."""
    cfg = DrafterConfig.of(head, tree, num_slots, capacity + MAX_NEW_TOKENS)
    keys = torch.zeros(cache_shape(cfg), dtype=cfg.dtype, device=head.device)
    return keys, torch.zeros_like(keys)


class BufferedDrafter:
    """A head over buffers for ``num_slots`` sequences of up to ``capacity`` tokens.

    ``packing``: the head's, shared with others that draft with it; needed by "triton". ``cache``: keys and values that
    other drafters of the head use too, for as many slots or more, as `allocate_cache` makes them. Raises as
    `DrafterConfig.of` and `Weights.pack`.
    """

    def __init__(
        self,
        head: HeadWeights,
        tree: TreeConfig,
        num_slots: int,
        capacity: int,
        backend: str = "triton",
        packing: SharedPacking | None = None,
        cache: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        self.head, self.tree, self.backend = head, tree, backend
        weight_dtype = None if packing is None else packing.weight_dtype
        self.cfg = DrafterConfig.of(head, tree, num_slots, capacity + MAX_NEW_TOKENS, weight_dtype)
        self.weights = Weights(head) if packing is None else packing.weights(self.cfg)
        keys, values = allocate_cache(head, tree, num_slots, capacity) if cache is None else cache
        self.bufs = allocate_buffers(self.cfg, self.weights, (keys[:num_slots], values[:num_slots]))
        device = head.device
        if head.follow is not None:
            # Made here: a captured graph must not be what makes it.
            _ = head.follow.rank_of_id
        self.features = torch.zeros(
            (num_slots, MAX_NEW_TOKENS, self.cfg.feature_width), dtype=head.dtype, device=device
        )
        """[slots, 16, feature_width]: features of the last step's tokens, written by whoever commits them."""
        barrier = self.bufs.workspace.get("barrier", torch.zeros(4, dtype=torch.int32))
        self.error = barrier[ERROR : ERROR + 1]
        """int32 [1]: not 0 after a draft whose grid barrier timed out."""
        half = head.head_dim // 2
        cos, sin = head.rotary.for_length(self.cfg.num_tokens).tables(self.cfg.max_positions)
        self._cos, self._sin = cos[:, :half].contiguous(), sin[:, :half].contiguous()
        w, names = head.tensors, ("self_attn.k_proj", "self_attn.v_proj")
        self._kv_weight = torch.cat([w[f"{name}.weight"] for name in names]).t()
        biased = "self_attn.k_proj.bias" in w
        self._kv_bias = torch.cat([w[f"{name}.bias"] for name in names]) if biased else None

    @property
    def is_tuned(self) -> bool | None:
        """Whether the kernel's launch parameters come from the tuned cache; None for "reference"."""
        packed = self.weights.packed
        return None if packed is None else packed.launches.is_tuned(self.cfg)

    def clear_error_(self) -> None:
        """Make a barrier that timed out usable again."""
        for name in ("barrier", "node_arrivals"):
            if name in self.bufs.workspace:
                self.bufs.workspace[name].zero_()

    def draft(self) -> None:
        """Draft the trees of the active slots into the buffers."""
        launch_drafter(self.cfg, self.features, self.weights, self.bufs, self.backend)

    def prefill(self, features: Tensor, chunk: ChunkRows) -> None:
        """Put the keys and values of a chunk's pairs into the cache: ``features`` [nodes, feature_width].

        The head has one layer, so a pair's key depends on the pair alone: no attention, no MLP.
        """
        head, w = self.head, self.head.tensors
        embedded = torch.index_select(head.embedding, 0, chunk.next_tokens)
        if head.kind == "eagle3":
            hidden = features if features.shape[1] == head.hidden else self._fuse(features)
            inputs = torch.empty((len(embedded), 2 * head.hidden), dtype=head.dtype, device=head.device)
            self._norm(embedded, "input_layernorm.weight", inputs[:, : head.hidden])
            self._norm(hidden, "hidden_norm.weight", inputs[:, head.hidden :])
        else:
            inputs = torch.nn.functional.linear(torch.cat((embedded, features), -1), w["fc.weight"], w.get("fc.bias"))
        kv = inputs @ self._kv_weight
        rotate = fused_layers.rotate_append if kv.is_cuda else fused_layers.rotate_append_ref
        # Positions and slot are the target's own rows'; only the rows to write differ.
        rows = chunk.forward
        rotate(
            kv, self._kv_bias, None, 0.0, self._cos, self._sin, rows.positions, rows.attention.slots, chunk.pair_rows,
            self.bufs.keys, self.bufs.values,
        )  # fmt: skip

    def _fuse(self, features: Tensor) -> Tensor:
        head = self.head
        if norms := head.tap_norms:
            normed = torch.empty_like(features)
            width = features.shape[1] // len(norms)
            for tap, out, name in zip(features.split(width, 1), normed.split(width, 1), norms, strict=True):
                self._norm(tap.contiguous(), name, out)
            features = normed
        return torch.nn.functional.linear(features, head.tensors["fc.weight"], head.tensors.get("fc.bias"))

    def _norm(self, x: Tensor, name: str, out: Tensor) -> None:
        norm = fused_layers.add_norm if x.is_cuda else fused_layers.add_norm_ref
        norm(x, None, self.head.tensors[name], self.head.norm_eps, out)
