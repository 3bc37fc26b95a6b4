"""Upstream's ``topK_genrate`` and ``stable_kv``, answered by a `Session`.

``topK_genrate(hidden_states, input_ids, head, logits_processor)``: features [1, new, feature_width] of the tokens that
``stable_kv`` does not hold yet, and all ids int64 [1, seq] with the newest token, the tree's root, last. Positions,
depth and ``top_k`` mean the same on both sides; upstream's ``total_tokens`` leaves the root out.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..drafter.drafter import Drafter
from ..errors import DrafterError, UsageError
from .reading import kind_of, tree_of
from .rebind import rebind, restore
from .session import Session, StableKV, UpstreamTree, on_buffers


class LayerPatch:
    """Drafting for one ``ea_layer``: `apply` puts it in place, `remove` takes it away; both take no time."""

    def __init__(self, layer: Any, lm_head: Any, drafter: Drafter) -> None:
        self.layer, self.lm_head = layer, lm_head
        self.kind = kind_of(layer)
        with on_buffers(drafter.weights.device):
            self.session = Session(drafter)

    def apply(self) -> None:
        """Draft for the layer from now on, after the ``stable_kv`` that it has."""
        self._write_kv(getattr(self.layer, "stable_kv", None))

        def topK_genrate(  # noqa: N802  # upstream's name
            layer: Any, hidden_states: Tensor, input_ids: Tensor, head: Any, logits_processor: Any
        ) -> UpstreamTree:
            return self._draft(hidden_states, input_ids, head, logits_processor)

        topK_genrate.__doc__ = type(self.layer).topK_genrate.__doc__
        kv = property(lambda layer: self._read_kv(), lambda layer, value: self._write_kv(value))
        rebind(self.layer, {"topK_genrate": topK_genrate, "stable_kv": kv})

    def remove(self) -> None:
        """Leave the layer as it was before `apply`."""
        restore(self.layer)

    def _read_kv(self) -> StableKV | None:
        with on_buffers(self.session.head.device):
            return self.session.read_kv()

    def _write_kv(self, kv: StableKV | None) -> None:
        with on_buffers(self.session.head.device):
            self.session.write_kv(kv)

    def _draft(self, hidden_states: Tensor, input_ids: Tensor, head: Any, logits_processor: Any) -> UpstreamTree:
        self._check(hidden_states, input_ids, head)
        session, device = self.session, hidden_states.device
        with on_buffers(session.head.device):
            # The size is read at every call, as upstream reads it.
            session.follow(tree_of(self.layer))
            session.extend(hidden_states[0], input_ids[0, 1 + session.length :])
            tokens, paths, mask, positions = session.read_tree(logits_processor is not None)
            return tokens.to(device), paths, mask, positions.to(device)

    def _check(self, hidden_states: Tensor, input_ids: Tensor, head: Any) -> None:
        """Raise `UsageError` for features and ids that do not fit each other, `DrafterError` for a moved model."""
        new = input_ids.shape[-1] - 1 - self.session.length
        if new < 1 or hidden_states.shape[:-1] != (1, new) or input_ids.shape[:-1] != (1,):
            raise UsageError(
                f"topK_genrate takes one sequence, hidden_states [1, new, width] of the tokens that stable_kv does not "
                f"hold and input_ids [1, seq] of all and the next: with {self.session.length} in stable_kv, got "
                f"{tuple(hidden_states.shape)} and {tuple(input_ids.shape)}. Call reset_kv() when a new prompt begins."
            )
        weight, own = self.layer.embed_tokens.weight, self.session.head.embedding
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
