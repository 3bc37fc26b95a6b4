"""The states that a head hands to its LM head when it drafts after places of a text, all levels of the tree.

They are taken from the drafting code itself (`ReferenceDraft`): the target runs over the text, the head over its pairs,
and from each place a tree grows as it does in generation, from the head's own outputs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..drafter.reference import ReferenceDraft, fuse_features
from ..drafter.weights import HeadWeights
from ..settings import TreeConfig
from ..target.wrapper import TargetModel


def states_a_root(tree: TreeConfig) -> int:
    """How many states one tree gives: that of its root, and ``top_k`` a level."""
    return 1 + tree.depth * tree.top_k


@torch.inference_mode()
def states_of_text(
    target: TargetModel, head: HeadWeights, tree: TreeConfig, token_ids: Tensor, roots: Tensor
) -> Tensor:
    """Draft after places of a text: [roots, `states_a_root`, hidden], level by level, of the head's type.

    ``token_ids`` int64 [tokens], on the head's device; ``roots`` int64 [roots] on the CPU, ascending: the place of the
    newest token of each draft, from 1 on. Nothing may join the head's draft vocabulary, and all its rows are scored.
    """
    newest = int(roots[-1])
    features = _features(target, token_ids[: newest + 1])[:, :newest].to(head.dtype)
    shape = (1, head.num_kv_heads, newest + states_a_root(tree), head.head_dim)
    keys, values = (torch.zeros(shape, dtype=head.dtype, device=head.device) for _ in range(2))
    first = torch.zeros(1, dtype=torch.int64, device=head.device)
    # The pairs of the text, run at once.
    pairs = ReferenceDraft(head, tree, first, first, (keys, values))
    positions = torch.arange(newest, device=head.device)[None]
    causal = torch.ones((1, newest, newest), dtype=torch.bool, device=head.device).tril()
    outputs = pairs.layer(fuse_features(head, features), token_ids[None, 1 : newest + 1], causal, positions)
    places = roots.to(head.device)
    drafts = _Recorder(head, tree, pairs, places, outputs[0, places - 1, None])
    drafts.run(features[:, :1], token_ids[places][:, None], torch.ones_like(places))
    return torch.cat(drafts.states, 1)


def _features(target: TargetModel, token_ids: Tensor) -> Tensor:
    """What the drafter reads of the target at each token [1, tokens, feature_width]."""
    with target.lock.forward.hold(), target.record_features() as taps:
        # By index, as `TargetModel` asks for rows: a number lets some models leave out the other hidden states.
        last = torch.zeros(1, dtype=torch.int64, device=token_ids.device)
        target.model(input_ids=token_ids[None], use_cache=False, logits_to_keep=last)
    return torch.cat([taps[place] for place in sorted(taps)], -1)


class _Recorder(ReferenceDraft):
    """Drafts after several places of one text, which begin with the pairs up to each."""

    def __init__(
        self, head: HeadWeights, tree: TreeConfig, pairs: ReferenceDraft, roots: Tensor, outputs: Tensor
    ) -> None:
        cache: Any = tuple(part.repeat(len(roots), 1, 1, 1) for part in (pairs.keys, pairs.values))
        super().__init__(head, tree, torch.arange(len(roots), device=roots.device), roots, cache)
        self.outputs = outputs
        self.states: list[Tensor] = []

    def extend(self, features: Tensor, tokens: Tensor, num_new: Tensor) -> Tensor:
        """The outputs of the roots' pairs, which were computed with the text."""
        return self.outputs

    def final(self, output: Tensor) -> Tensor:
        """See `ReferenceDraft.final`; keeps what it returns."""
        self.states.append(super().final(output))
        return self.states[-1]
