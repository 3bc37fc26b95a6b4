"""Upstream's ``topK_genrate`` and ``stable_kv``, answered from buffers on the device.

``topK_genrate(hidden_states, input_ids, head, logits_processor)``: features [1, new, feature_width] of the tokens that
``stable_kv`` does not hold yet, and all ids int64 [1, seq] with the newest token, the tree's root, last. Positions,
depth and ``top_k`` mean the same on both sides; upstream's ``total_tokens`` leaves the root out. Pair t is the feature
of token t with the token after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from ..drafter.drafter import Drafter, check_finished
from ..drafter.launch import prefill_drafter
from ..errors import DrafterError, UsageError
from ..ops import current, side_stream
from ..step.graphs import GraphPool
from ..tree import DraftTree
from .reading import kind_of, tree_of
from .rebind import rebind, restore

UpstreamTree = tuple[Tensor, Tensor, Tensor, Tensor]
"""``topK_genrate``'s four values: draft_tokens int64 [1, nodes], retrieve_indices int64 [leaves, longest path] and
tree_mask float32 [1, 1, nodes, nodes], both on the CPU, tree_position_ids int64 [nodes]."""
StableKV = tuple[tuple[Tensor, Tensor]]
"""Upstream's ``stable_kv``: keys and values of the head's layer, each [1, kv_heads, length, head_dim]."""
_FIRST_CAPACITY = 2048


@contextmanager
def on_buffers(device: torch.device) -> Iterator[None]:
    """Work on buffers of a device, without the caller's autocast, and outside inference mode, whose tensors stay so."""
    with torch.inference_mode(False), torch.no_grad(), torch.autocast(device.type, enabled=False), current(device):
        yield


class LayerPatch:
    """Drafts for one ``ea_layer``, in buffers that grow; `reserve` and `launch` are for a block `on_buffers`."""

    def __init__(self, layer: Any, lm_head: Any, drafter: Drafter) -> None:
        self.layer, self.lm_head, self.kind = layer, lm_head, kind_of(layer)
        self.spec, self.head = drafter, drafter.weights
        self.length = 0
        """Pairs in the KV cache."""
        with on_buffers(self.head.device):
            self._allocate(_FIRST_CAPACITY)

    def apply(self) -> None:
        """Draft for the layer from now on, after the ``stable_kv`` that it has."""
        self._write_kv(getattr(self.layer, "stable_kv", None))

        def topK_genrate(  # noqa: N802  # upstream's name
            layer: Any, hidden_states: Tensor, input_ids: Tensor, head: Any, logits_processor: Any
        ) -> UpstreamTree:
            self._check(hidden_states, input_ids, head)
            with on_buffers(self.head.device):
                # The size is read at every call, as upstream reads it.
                tree = tree_of(layer)
                if tree != self.tree:
                    kv, self.spec = self._read_kv(), self.spec.like(self.head, tree)
                    self._allocate(_FIRST_CAPACITY)
                    self._write_kv(kv)
                self._extend(hidden_states[0], input_ids[0, 1 + self.length :])
                return self._read_tree(sampling=logits_processor is not None)

        topK_genrate.__doc__ = type(self.layer).topK_genrate.__doc__
        kv = property(lambda layer: self._read_kv(), lambda layer, value: self._write_kv(value))
        rebind(self.layer, {"topK_genrate": topK_genrate, "stable_kv": kv})

    def remove(self) -> None:
        """Leave the layer as it was before `apply`."""
        restore(self.layer)

    def _check(self, hidden_states: Tensor, input_ids: Tensor, head: Any) -> None:
        new = input_ids.shape[-1] - 1 - self.length
        if new < 1 or hidden_states.shape[:-1] != (1, new) or input_ids.shape[:-1] != (1,):
            raise UsageError(
                f"topK_genrate takes one sequence, hidden_states [1, new, width] of the tokens that stable_kv does not "
                f"hold and input_ids [1, seq] of all and the next: with {self.length} in stable_kv, got "
                f"{tuple(hidden_states.shape)} and {tuple(input_ids.shape)}. Call reset_kv() when a new prompt begins."
            )
        weight, embedding = self.layer.embed_tokens.weight, self.head.embedding
        if (weight.device, weight.dtype) != (embedding.device, embedding.dtype):
            now, before = (f"{each.dtype} on {each.device}" for each in (weight, embedding))
            problem = f"The model was moved after it was patched: to {now}, from {before}"
            raise DrafterError(f"{problem}. Unpatch it, move it, and patch it again.")
        if self.kind == "eagle" and head is not self.lm_head:
            raise UsageError(
                "This EAGLE-1/2 head drafts with the LM head of its target, and was given another: unpatch the model."
            )

    def _allocate(self, capacity: int) -> None:
        self.drafter, self.tree = self.spec.on_slots(1, capacity), self.spec.tree
        self.bufs = self.drafter.bufs
        """Inputs, KV cache and outputs."""
        self._graph: Callable[[], None] | None = None
        self._packed_tree: Tensor | None = None

    def reserve(self, num_pairs: int) -> None:
        """Make room for ``num_pairs`` pairs and a tree; what the buffers hold is kept."""
        old = self.bufs
        room = old.keys.shape[2] - self.drafter.cfg.tree_rows
        if num_pairs <= room:
            return
        # A power of two as long as the kernel takes it, so that few sizes occur.
        self._allocate(max(num_pairs, min(2 * room, 131072 - self.tree.new_tokens_width)))
        for name, before in vars(old).items():
            if isinstance(before, Tensor):
                after = getattr(self.bufs, name)
                (after[:, :, : before.shape[2]] if name in ("keys", "values") else after).copy_(before)

    def _extend(self, features: Tensor, next_tokens: Tensor) -> None:
        """Add pairs, [new, feature_width] and int64 [new] with new at least 1, and draft the tree after them."""
        new = len(next_tokens)
        self.reserve(self.length + new)
        features = features.to(self.head.dtype)
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
        if self._graph is None and self.head.device.type == "cuda" and not self.drafter.waits:
            self._graph = captured(self._draft)
        (self._graph or self._draft)()

    def _draft(self) -> None:
        self.drafter.draft()
        bufs = self.bufs
        tensors = (self.drafter.error, bufs.num_leaves, bufs.tree_position_ids, bufs.retrieve_indices, bufs.tree_mask)
        # In a graph's own memory, where a replay writes it again.
        self._packed_tree = torch.cat([each.flatten().to(self.head.device, torch.int16) for each in tensors])

    def _read_tree(self, sampling: bool) -> UpstreamTree:
        """Wait for the last draft and return it, by one copy; ``sampling`` as in `DraftTree.to_upstream`."""
        assert self._packed_tree is not None, "extend() comes first"
        nodes, width = self.tree.total_tokens, self.tree.path_width
        host = self._packed_tree.cpu().long()
        if host[0]:
            check_finished(self.bufs)
        num_leaves, positions = host[1:2], host[2 : 2 + nodes]
        retrieve, mask = host[2 + nodes :].split([nodes * width, nodes * nodes])
        mask, retrieve, tokens = mask.view(1, 1, nodes, nodes), retrieve.view(1, nodes, width), self.bufs.draft_tokens
        tree = DraftTree(tokens, self.bufs.parents, mask, positions[None], retrieve, num_leaves)
        tokens, paths, tree_mask, _ = tree.to_upstream(sampling=sampling)
        return tokens.clone(), paths.clone(), tree_mask, self.bufs.tree_position_ids[0].clone()

    def _read_kv(self) -> StableKV | None:
        if self.length == 0:
            return None
        with on_buffers(self.head.device):
            keys, values = (cache[:, :, : self.length].clone() for cache in (self.bufs.keys, self.bufs.values))
        return ((keys, values),)

    def _write_kv(self, kv: StableKV | None) -> None:
        """Replace the KV cache; None empties it. Raises `UsageError` for tensors of other shapes."""
        if kv is None:
            self.length = 0
            return
        _, kv_heads, _, head_dim = self.bufs.keys.shape
        fits = False
        with suppress(TypeError, ValueError, AttributeError, IndexError):
            ((keys, values),) = kv
            length = keys.shape[2]
            fits = keys.shape == values.shape == (1, kv_heads, length, head_dim)
        if not fits:
            shape = f"[1, {kv_heads}, length, {head_dim}]"
            raise UsageError(f"stable_kv must be None or ((keys, values),), both {shape}, as topK_genrate leaves it.")
        with on_buffers(self.head.device):
            self.reserve(length)
            self.bufs.keys[:, :, :length] = keys
            self.bufs.values[:, :, :length] = values
        self.length = length


def captured(run: Callable[[], None]) -> Callable[[], None]:
    """Record work on the current GPU into a graph, after running it once, and return what replays it."""
    with side_stream():
        run()
    return GraphPool().capture(run)
