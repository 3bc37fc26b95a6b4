"""One sequence of pairs, and the tree drafted after it: what stands behind upstream's ``topK_genrate``.

Drafts from buffers on the device; the persistent kernel is replayed from a CUDA graph. Pairs are numbered as in
`drafter.reference`: pair t is the feature of token t with the token after it; ``length`` of them are in the drafter's
KV cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

import torch
from torch import Tensor

from ..drafter.buffers import Buffers
from ..drafter.drafter import Drafter
from ..drafter.launch import check_finished, prefill_drafter
from ..errors import UsageError
from ..ops import side_stream
from ..settings import TreeConfig
from ..tree import DraftTree

UpstreamTree = tuple[Tensor, Tensor, Tensor, Tensor]
"""``topK_genrate``'s four values: draft_tokens int64 [1, nodes], retrieve_indices int64 [leaves, longest path] and
tree_mask float32 [1, 1, nodes, nodes], both on the CPU, tree_position_ids int64 [nodes]."""

StableKV = tuple[tuple[Tensor, Tensor]]
"""Upstream's ``stable_kv``: keys and values of the head's layer, each [1, kv_heads, length, head_dim]."""

_FIRST_CAPACITY = 2048


class Session:
    """A drafter over buffers for one sequence, which grow with it.

    Raises as `Drafter.on_slots`; `DrafterError` when a draft's grid barrier timed out.
    """

    def __init__(self, drafter: Drafter) -> None:
        self.spec, self.head = drafter, drafter.weights
        self.length = 0
        """Pairs in the KV cache."""
        self.drafter = drafter.on_slots(1, _FIRST_CAPACITY)
        self._graph: Callable[[], None] | None = None
        self._packed_tree: Tensor | None = None

    @property
    def tree(self) -> TreeConfig:
        """Shape of its trees."""
        return self.spec.tree

    @property
    def bufs(self) -> Buffers:
        """Inputs, KV cache and outputs; others after growth."""
        return self.drafter.bufs

    def reserve(self, num_pairs: int) -> None:
        """Make room for ``num_pairs`` pairs and a tree; what the buffers hold is kept."""
        old = self.drafter
        room = old.bufs.keys.shape[2] - old.cfg.tree_rows
        if num_pairs <= room:
            return
        # A power of two as long as the kernel takes it, so that few sizes occur.
        self.drafter = self.spec.on_slots(1, max(num_pairs, min(2 * room, 131072 - self.tree.new_tokens_width)))
        self._graph = self._packed_tree = None
        self.drafter.features.copy_(old.features)
        for field in fields(Buffers):
            before = getattr(old.bufs, field.name)
            if not isinstance(before, Tensor):
                continue
            after = getattr(self.bufs, field.name)
            (after[:, :, : before.shape[2]] if field.name in ("keys", "values") else after).copy_(before)

    def extend(self, features: Tensor, next_tokens: Tensor) -> None:
        """Add pairs, [new, feature_width] and int64 [new] with new at least 1, and draft the tree after them."""
        new = len(next_tokens)
        self.reserve(self.length + new)
        features = features.to(self.head.device, self.head.dtype)
        next_tokens = next_tokens.to(self.head.device)
        if new > self.tree.new_tokens_width:
            drafter, left = self.drafter, new - 1
            prefill_drafter(
                drafter.cfg, features[:left], next_tokens[:left], drafter.weights, drafter.bufs, 0, self.length
            )
            self.length += left
            features, next_tokens, new = features[left:], next_tokens[left:], 1
        bufs = self.bufs
        self.drafter.features[0, :new] = features
        bufs.new_tokens[0, :new] = next_tokens
        bufs.num_new.fill_(new)
        bufs.prefix.fill_(self.length)
        self.launch()
        self.length += new

    def launch(self) -> None:
        """Draft from what the buffers hold, without waiting; ``length`` is the caller's to advance."""
        if self.head.device.type != "cuda" or self.drafter.waits:
            self._draft()
            return
        with torch.cuda.device(self.head.device):
            if self._graph is None:
                self._graph = captured(self._draft)
            self._graph()

    def _draft(self) -> None:
        self.drafter.draft()
        bufs = self.bufs
        parts = (self.drafter.error, bufs.num_leaves, bufs.tree_position_ids, bufs.retrieve_indices, bufs.tree_mask)
        packed = torch.cat([part.flatten().to(self.head.device, torch.int16) for part in parts])
        if self._packed_tree is None:
            self._packed_tree = torch.empty_like(packed)
        self._packed_tree.copy_(packed)

    def read_tree(self, sampling: bool) -> UpstreamTree:
        """Wait for the last draft and return it, by one copy to the host; with ``sampling`` the paths are sorted as
        `DraftTree.to_upstream` does."""
        assert self._packed_tree is not None, "extend() comes first"
        nodes, width = self.tree.total_tokens, self.tree.path_width
        host = self._packed_tree.cpu().long()
        if host[0]:
            check_finished(self.bufs)
        num_leaves, positions = int(host[1]), host[2 : 2 + nodes]
        retrieve, mask = host[2 + nodes :].split([nodes * width, nodes * nodes])
        tree = DraftTree(
            self.bufs.draft_tokens,
            self.bufs.parents, mask.bool().view(1, 1, nodes, nodes), positions[None],
            retrieve.view(1, nodes, width), torch.tensor([num_leaves]),
        )  # fmt: skip
        tokens, paths, tree_mask, _ = tree.to_upstream(sampling=sampling)
        return tokens.clone(), paths.clone(), tree_mask, self.bufs.tree_position_ids[0].clone()

    def read_kv(self) -> StableKV | None:
        """Copy the KV cache; None when it is empty."""
        if self.length == 0:
            return None
        keys, values = (cache[:, :, : self.length].clone() for cache in (self.bufs.keys, self.bufs.values))
        return ((keys, values),)

    def write_kv(self, kv: StableKV | None) -> None:
        """Replace the KV cache; None empties it. Raises `UsageError` for tensors of other shapes."""
        if kv is None:
            self.length = 0
            return
        keys, values = _check_kv(kv, self.bufs.keys.shape[1], self.bufs.keys.shape[3])
        self.reserve(keys.shape[2])
        self.length = keys.shape[2]
        self.bufs.keys[:, :, : self.length] = keys
        self.bufs.values[:, :, : self.length] = values


def captured(run: Callable[[], None]) -> Callable[[], None]:
    """Record work on the current GPU into a graph and return what replays it.

    It runs once before, and again when replayed, so twice with the same inputs it must give the same.
    """
    graph = torch.cuda.CUDAGraph()
    with side_stream() as stream:
        run()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            run()
    return graph.replay


def _check_kv(kv: StableKV, kv_heads: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """Take keys and values out of upstream's nesting."""
    found: object = type(kv).__name__
    try:
        ((keys, values),) = kv
        found = tuple(keys.shape), tuple(values.shape)
        shape = (1, kv_heads, keys.shape[2], head_dim)
        fits = found == (shape, shape)
    except (TypeError, ValueError, AttributeError, IndexError):
        fits = False
    if not fits:
        raise UsageError(
            f"stable_kv must be None or ((keys, values),), both [1, {kv_heads}, length, {head_dim}], as topK_genrate "
            f"leaves it; got {found}."
        )
    return keys, values
