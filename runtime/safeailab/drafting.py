"""Upstream's ``topK_genrate`` and ``stable_kv``, answered by a `Session`.

``topK_genrate(hidden_states, input_ids, head, logits_processor)``: features [1, new, feature_width] of the tokens that
``stable_kv`` does not hold yet, and all ids int64 [1, seq] with the newest token, the tree's root, last. Positions,
depth and ``top_k`` mean the same on both sides; upstream's ``total_tokens`` leaves the root out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..errors import DrafterError, UsageError
from ..settings import TreeConfig
from .reading import kind_of, tree_of
from .rebind import rebind, restore
from .session import Session, StableKV, UpstreamTree

SessionFactory = Callable[[TreeConfig], Session]


class LayerPatch:
    """Drafting for one ``ea_layer``: `apply` puts it in place, `remove` takes it away; both take no time.

    ``build`` makes a session for a tree's size. The size is read at every call, as upstream reads it.
    """

    def __init__(self, layer: Any, lm_head: Any, build: SessionFactory) -> None:
        self.layer, self.lm_head, self.build = layer, lm_head, build
        self.kind = kind_of(layer)
        # Buffers that are made in inference mode could not be written to outside it.
        with torch.inference_mode(False), torch.no_grad():
            self.session = build(tree_of(layer))

    def apply(self) -> None:
        """Draft for the layer from now on, after the ``stable_kv`` that it has."""
        self.write_kv(getattr(self.layer, "stable_kv", None))

        def topK_genrate(  # noqa: N802  # upstream's name
            layer: Any, hidden_states: Tensor, input_ids: Tensor, head: Any, logits_processor: Any
        ) -> UpstreamTree:
            return self.draft(hidden_states, input_ids, head, logits_processor)

        topK_genrate.__doc__ = type(self.layer).topK_genrate.__doc__
        kv = property(lambda layer: self.read_kv(), lambda layer, value: self.write_kv(value))
        rebind(self.layer, {"topK_genrate": topK_genrate, "stable_kv": kv})

    def remove(self) -> None:
        """Leave the layer as it was before `apply`."""
        restore(self.layer)

    def read_kv(self) -> StableKV | None:
        """Copy the drafter's keys and values, as upstream holds them."""
        with torch.inference_mode(False), torch.no_grad():
            return self.session.read_kv()

    def write_kv(self, kv: StableKV | None) -> None:
        """Replace the drafter's keys and values; None empties the cache, as ``reset_kv`` does."""
        with torch.inference_mode(False), torch.no_grad():
            self.session.write_kv(kv)

    def draft(self, hidden_states: Tensor, input_ids: Tensor, head: Any, logits_processor: Any) -> UpstreamTree:
        """See the module's docstring. Raises `UsageError` for features and ids that do not fit each other."""
        self._check(hidden_states, input_ids, head)
        autocast = torch.autocast(hidden_states.device.type, enabled=False)
        with torch.inference_mode(False), torch.no_grad(), autocast:
            self.follow_tree()
            length = self.session.length
            self.session.extend(hidden_states[0], input_ids[0, 1 + length :])
            tokens, paths, mask, positions = self.session.read_tree(logits_processor is not None)
            device = hidden_states.device
            return tokens.to(device), paths, mask, positions.to(device)

    def follow_tree(self) -> None:
        """Build the session again if the layer's depth, top_k or total_tokens were changed; the cache is kept."""
        wanted = tree_of(self.layer)
        if wanted != self.session.tree:
            kv = self.session.read_kv()
            self.session = self.build(wanted)
            self.session.write_kv(kv)

    def _check(self, hidden_states: Tensor, input_ids: Tensor, head: Any) -> None:
        if hidden_states.dim() != 3 or input_ids.dim() != 2 or hidden_states.shape[0] != 1 or input_ids.shape[0] != 1:
            raise UsageError(
                f"topK_genrate takes one sequence: hidden_states [1, new, width] and input_ids [1, seq]; got "
                f"{tuple(hidden_states.shape)} and {tuple(input_ids.shape)}."
            )
        new = input_ids.shape[1] - 1 - self.session.length
        if new < 1 or hidden_states.shape[1] != new:
            raise UsageError(
                f"{input_ids.shape[1]} ids make {input_ids.shape[1] - 1} pairs, of which stable_kv holds "
                f"{self.session.length}: expected hidden_states of {max(new, 1)} tokens, got {hidden_states.shape[1]}. "
                "Call reset_kv() when a new prompt begins."
            )
        weight = self.layer.embed_tokens.weight
        own = self.session.head.embedding
        if (weight.device, weight.dtype) != (own.device, own.dtype):
            raise DrafterError(
                f"The model was moved after it was patched: to {weight.dtype} on {weight.device}, from {own.dtype} on "
                f"{own.device}. Unpatch it, move it, and patch it again."
            )
        if self.kind == "eagle" and head is not self.lm_head:
            raise UsageError(
                "This EAGLE-1/2 head was patched with the LM head of its own target; topK_genrate was given another. "
                "Unpatch the model to draft with it."
            )
