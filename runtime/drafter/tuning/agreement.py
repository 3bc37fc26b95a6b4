"""Compare a draft with the fp32 reference by replaying it, so that near-ties do not count.

In bf16 two nodes whose scores nearly tie may swap, and with them whole subtrees, so comparing trees says little. A
replay follows the draft's own choices instead: at each level the reference runs exactly the nodes that the draft
expanded, in fp32, and

* every candidate's log-probability must lie within ``atol`` of the reference's, and their errors' root mean square
  within a quarter of it, where logits have a standard deviation of 3 or less; of a node whose logits are n times as
  wide, errors count as 1/n;
* the children of each node must be distinct and ranked, and as good as the reference's best within twice ``atol``;
* what was appended to the KV cache must lie within ``atol`` too;
* everything discrete is exact: frontiers and nodes are those that `tree.ranked_topk` and `tree.build_tree` choose
  from the draft's own fp32 scores.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...settings import TreeConfig
from ...tree import Candidates, DraftTree, build_tree, level_offset, ranked_topk
from ..buffers import BLANK, Buffers
from ..dimensions import DrafterConfig
from ..drafter import check_finished
from ..kernels.packing import quantize_rows
from ..launch import launch_drafter
from ..packing import Weights
from ..reference import ReferenceDraft
from ..weights import HeadWeights

LOGIT_STD = 3.0
"""Standard deviation of a node's logits that tolerances are for. Without a final norm (EAGLE-1/2) it grows by level."""

LOG_PROB_ATOL = {torch.float32: 2e-4, torch.float16: 0.04, torch.bfloat16: 0.3, torch.float8_e4m3fn: 0.4}
"""Largest error of a log-probability or cached value, by the narrowest type that enters the products.

For logits with a standard deviation of `LOGIT_STD`. Weights are the reference's own, rounded to FP8 where the
kernel stores FP8, so this is the error of rounding activations: 2^-8 for pairs of e4m3, 2^-9 for bf16,
2^-12 for fp16."""


@dataclass(frozen=True)
class Step:
    """Inputs of one draft, by slot, as `Buffers` holds them.

    ``features`` [slots, new, feature_width]; ``new_tokens`` int64 [slots, new]; ``num_new`` and ``prefix`` per slot;
    ``keys``, ``values`` [slots, kv_heads, positions, head_dim]; ``active`` slots ascending.
    """

    features: Tensor
    new_tokens: Tensor
    num_new: tuple[int, ...]
    prefix: tuple[int, ...]
    keys: Tensor
    values: Tensor
    active: tuple[int, ...]

    @classmethod
    def of(cls, features: Tensor | tuple[Tensor, ...], bufs: Buffers) -> Step:
        """Copy a step out of the buffers (waits for the device)."""
        joined = features if isinstance(features, Tensor) else torch.cat(features, -1)
        tokens = bufs.new_tokens[:, : joined.shape[1]].long()
        num_new, prefix = tuple(bufs.num_new.tolist()), tuple(bufs.prefix.tolist())
        active = tuple(sorted(bufs.active_slots[: int(bufs.active_count)].tolist()))
        return cls(joined.clone(), tokens, num_new, prefix, bufs.keys.clone(), bufs.values.clone(), active)


@dataclass(frozen=True)
class Agreement:
    """Result of a replay: errors of log-probabilities and of the cache, and what else was wrong."""

    max_error: float
    rms_error: float
    cache_error: float
    atol: float
    faults: tuple[str, ...]

    @property
    def agrees(self) -> bool:
        """Tell if the draft is right within the tolerance."""
        return not self.faults

    def __str__(self) -> str:
        errors = f"log-probabilities within {self.max_error:.2g} (rms {self.rms_error:.2g})"
        return "; ".join((f"{errors}, cache {self.cache_error:.2g}; tolerance {self.atol:g}", *self.faults))


def candidates_of(bufs: Buffers) -> Candidates:
    """Read the candidates of the persistent kernel's last draft, active sequences by ascending slot."""
    order = torch.argsort(bufs.active_slots[: int(bufs.active_count)])
    ws, count = bufs.workspace, bufs.tree.num_candidates
    tokens, scores, parents = (ws[name][order, :count] for name in ("token", "score", "parent"))
    return Candidates(tokens.long(), scores, parents.long())


def tree_of(bufs: Buffers) -> DraftTree:
    """Copy the buffers' outputs."""
    return DraftTree(*(getattr(bufs, name).clone() for name in BLANK))


def exact_head(head: HeadWeights, cfg: DrafterConfig) -> HeadWeights:
    """Return the head in fp32 as a kernel of this configuration stores it: rounded to FP8 where weights are FP8."""

    def exact(name: str, tensor: Tensor) -> Tensor:
        tensor = tensor.to(cfg.dtype)
        if not cfg.has_fp8 or tensor.dim() < 2:
            return tensor.float()
        rounded, scale = quantize_rows(tensor)
        return rounded.float() * scale[:, None]

    return replace(
        head,
        tensors={name: exact(name, tensor) for name, tensor in head.tensors.items()},
        embedding=head.embedding.to(cfg.dtype).float(),
        lm_head=exact("lm_head", head.lm_head),
        rotary=head.rotary.for_length(cfg.num_tokens),
    )


@torch.inference_mode()
def replay(
    head: HeadWeights,
    tree: TreeConfig,
    step: Step,
    drafted: Candidates,
    result: DraftTree | None,
    keys: Tensor | None = None,
    values: Tensor | None = None,
    atol: float = LOG_PROB_ATOL[torch.float32],
    exact_ties: bool = True,
) -> Agreement:
    """Replay a draft (module docstring).

    ``head`` in fp32 with exactly the rows drafted over (`exact_head`); ``drafted``, ``result`` the draft's candidates
    and outputs (None to leave those out); ``keys``, ``values`` its cache afterwards, None to leave that out.
    ``exact_ties`` False accepts any choice among equal scores (`torch.topk`).
    """
    device, top_k, errors, faults = head.device, tree.top_k, list[Tensor](), list[str]()
    slots = torch.tensor(step.active, device=device)
    num_new = torch.tensor(step.num_new, device=device)[slots]
    tokens, longest = step.new_tokens[slots].clamp(min=0), int(num_new.max())
    cache = step.keys.float().clone(), step.values.float().clone()
    draft = ReferenceDraft(head, tree, slots, torch.tensor(step.prefix, device=device)[slots], cache)
    output = draft.extend(step.features[slots, :longest], tokens[:, :longest], num_new)
    itself = torch.eye(top_k, dtype=torch.bool, device=device).expand(len(step.active), top_k, top_k)
    ancestors = itself
    base = torch.zeros(len(step.active), 1, device=device)
    try:
        for level in range(tree.depth + 1):
            if level > 0:
                expanded, place, base = _read_frontier(drafted, level, top_k, exact_ties, faults)
                parent = torch.zeros_like(place) if level == 1 else place // top_k
                hidden = draft.carry(output).gather(1, parent[..., None].expand(-1, -1, output.shape[-1]))
                if level > 1:
                    ancestors = ancestors.gather(1, parent[..., None].expand_as(ancestors))
                    ancestors = torch.cat((ancestors, itself), 2)
                output = draft.level(hidden, drafted.tokens.gather(1, expanded), ancestors)
            error, missed = _check_children(draft.logits(output), head, drafted, level, top_k, base, faults)
            errors.append(error.flatten().double())
            if not missed <= 2 * atol:
                faults.append(f"level {level}: children are worse than the best by {missed:.3g}")
    except _NotReplayableError as stop:
        infinite = float("inf")
        return Agreement(infinite, infinite, infinite, atol, (str(stop),))
    largest, rms = _largest(torch.cat(errors)), float(torch.cat(errors).square().mean().sqrt())
    if not largest <= atol:
        faults.append(f"a log-probability is off by {largest:.3g}")
    if not rms <= atol / 4:
        faults.append(f"log-probabilities are off by {rms:.3g} on average")
    cache_error = 0.0
    if keys is not None and values is not None:
        cache_error = _cache_error(step, tree.depth * top_k, (keys, values), cache)
        if not cache_error <= atol:
            faults.append(f"the KV cache is off by {cache_error:.3g}")
    if result is not None:
        roots = tokens.gather(1, (num_new - 1)[:, None])[:, 0]
        wanted = build_tree(roots, drafted, tree)
        for name in BLANK:
            if not torch.equal(getattr(result, name)[slots], getattr(wanted, name)):
                faults.append(f"{name} is not what tree.build_tree gives")
    return Agreement(largest, rms, cache_error, atol, tuple(faults))


class _NotReplayableError(Exception):
    """A draft whose next level cannot be run."""


def _level_range(level: int, top_k: int) -> slice:
    return slice(level_offset(level, top_k), level_offset(level + 1, top_k))


def _read_frontier(
    drafted: Candidates, level: int, top_k: int, exact_ties: bool, faults: list[str]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the nodes that a level expands, [active, top_k]: candidate index, index in the level before, and score."""
    before = _level_range(level - 1, top_k)
    parents = drafted.parents[:, _level_range(level, top_k)].unflatten(1, (top_k, top_k))
    previous, expanded = drafted.scores[:, before], parents[..., 0]
    if not (parents == expanded[..., None]).all():
        raise _NotReplayableError(f"level {level}: parents are mixed")
    place = expanded - before.start
    best, wanted = ranked_topk(previous, top_k)
    if not torch.equal(previous.gather(1, place.clamp(0, previous.shape[1] - 1)), best):
        faults.append(f"level {level}: the frontier is not the best {top_k} candidates of the level before")
    elif exact_ties and not torch.equal(place, wanted):
        faults.append(f"level {level}: the frontier breaks ties by another rule")
    if not ((place >= 0) & (place < previous.shape[1])).all():
        raise _NotReplayableError(f"level {level}: parents out of range")
    return expanded, place, previous.gather(1, place)


def _check_children(
    logits: Tensor, head: HeadWeights, drafted: Candidates, level: int, top_k: int, base: Tensor, faults: list[str]
) -> tuple[Tensor, float]:
    """Return the errors of a level's log-probabilities, and how much worse its children are than the best.

    ``logits`` [active, width, draft_vocab]: the reference's; ``base``: scores of the parents.
    """
    children = (logits.shape[1], top_k)
    tokens, scores = (
        each[:, _level_range(level, top_k)].unflatten(1, children) for each in (drafted.tokens, drafted.scores)
    )
    row_of = torch.full((head.embedding.shape[0],), -1, dtype=torch.int64, device=logits.device)
    row_of[head.draft_to_target] = torch.arange(head.draft_vocab, device=logits.device)
    log_probs = torch.log_softmax(logits, -1)
    spread = (logits.std(-1, correction=0, keepdim=True) / LOGIT_STD).clamp(min=1.0)
    rows = row_of[tokens.clamp(0, len(row_of) - 1)]
    if not (rows >= 0).all():
        raise _NotReplayableError(f"level {level}: tokens outside the vocabulary")
    expected = log_probs.gather(2, rows)
    best_log_probs = ranked_topk(log_probs, top_k)[0]
    missed = _largest((best_log_probs - expected.sort(-1, descending=True).values) / spread)
    if any(len(set(node)) < top_k for sequence in rows.tolist() for node in sequence):
        faults.append(f"level {level}: a node has one child twice")
    if not (scores[..., 1:] <= scores[..., :-1]).all():
        faults.append(f"level {level}: children are not ranked")
    return ((scores - base[..., None]) - expected) / spread, missed


def _cache_error(step: Step, tree_rows: int, found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> float:
    """Return the largest error of the keys and values of the step's sequences and their trees."""
    largest = 0.0
    for slot in step.active:
        stop = step.prefix[slot] + step.num_new[slot] + tree_rows
        for mine, reference in zip(found, expected, strict=True):
            largest = max(largest, _largest(mine[slot, :, :stop].float() - reference[slot, :, :stop]))
    return largest


def draft_and_replay(cfg: DrafterConfig, features: Tensor, weights: Weights, bufs: Buffers) -> Agreement:
    """Draft the step that ``bufs`` hold with the persistent kernel, and replay it (waits for the device)."""
    step = Step.of(features, bufs)
    launch_drafter(cfg, features, weights, bufs)
    check_finished(bufs)
    head, atol = exact_head(weights.head, cfg), LOG_PROB_ATOL[cfg.weight_dtype]
    return replay(head, bufs.tree, step, candidates_of(bufs), tree_of(bufs), bufs.keys, bufs.values, atol)


def _largest(error: Tensor) -> float:
    """Return the largest magnitude; NaN counts as infinite."""
    return float(error.abs().nan_to_num(float("inf")).max())
