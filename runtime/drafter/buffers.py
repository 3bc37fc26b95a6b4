"""The tensors that a draft works in, allocated once: inputs, KV cache and outputs, for the kernel and the reference."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import index
from typing import Any

import torch
from eagle_slim.vocab_tools.compat import tensor_state
from torch import Tensor

from ..errors import UsageError, misfit
from ..settings import MAX_WAITING, TreeConfig, explain_fields
from ..tree import DraftTree
from .dimensions import DrafterConfig, check_kernel_limits
from .kernels.frontier import MAX_DEPTH
from .kernels.persistent import StepInputs
from .launch_params import LaunchParams
from .weights import HeadWeights
from .workspace import allocate_workspace

BLANK = {
    "draft_tokens": -1,
    "parents": -1,
    "tree_mask": False,
    "tree_position_ids": 0,
    "retrieve_indices": -1,
    "num_leaves": 0,
}
"""The outputs, with their values for inactive slots."""
INPUTS = StepInputs._fields
SHARED = (*INPUTS, "keys", "values", "tables")
"""Fields that drafters of different trees share."""


@explain_fields
@dataclass(frozen=True)
class Buffers:
    """Inputs, KV cache and outputs of a draft, allocated once; all on one device, indexed by slot.

    Inputs, written by the caller before each draft: ``new_tokens`` int32 [slots, 64 or more], the token after each new
    feature (the last one is the tree's root); ``num_new`` int32 [slots], 1 to 16 (or more where paths are longer:
    `TreeConfig.new_tokens_width`); ``prefix`` int32 [slots], pairs already in the KV cache; ``active_slots``
    int32 [slots], the active slots first, then -1; ``active_inverse`` int32 [slots], a slot's place among them, -1 for
    an inactive one; ``active_count`` int32 [1]. With four slots of which 3 and 1 run::

        active_slots   [1, 3, -1, -1]     active_inverse  [-1, 0, -1, 1]     active_count  [2]

    State: ``keys``, ``values`` [slots, kv_heads, cache_rows, head_dim]. Outputs as `tree.DraftTree`. ``workspace`` is
    the kernel's own. `buffer_layout` says the shape and type of each; all are contiguous.
    """

    new_tokens: Tensor
    num_new: Tensor
    prefix: Tensor
    active_slots: Tensor
    active_inverse: Tensor
    active_count: Tensor
    keys: Tensor
    values: Tensor
    draft_tokens: Tensor
    parents: Tensor
    tree_mask: Tensor
    tree_position_ids: Tensor
    retrieve_indices: Tensor
    num_leaves: Tensor
    cfg: DrafterConfig
    """Configuration that they are allocated for."""
    tree: TreeConfig
    """Shape of the outputs: the tree of ``cfg``, or a smaller one (`of_tree`)."""
    tables: tuple[Tensor, Tensor]
    """RoPE: cos and sin, each fp32 [positions, head_dim / 2]."""
    params: LaunchParams | None = None
    """Launch parameters that the workspace is for; None without one."""
    workspace: dict[str, Tensor] = field(default_factory=dict)
    host: dict[str, int] = field(init=False, repr=False, compare=False, default_factory=dict)
    """Most new tokens of a sequence as `set_step` wrote them (``new``), and the version of ``num_new`` then."""

    @classmethod
    def allocate(
        cls,
        cfg: DrafterConfig,
        head: HeadWeights,
        params: LaunchParams | None = None,
        shared: Mapping[str, Any] | None = None,
    ) -> Buffers:
        """Allocate for a configuration and its head; outputs start as -2, a value no draft writes.

        ``params``: allocates the kernel's workspace too. ``shared``: fields of other buffers to use instead of new
        ones. Raises as `check_kernel_limits`, with ``params``.
        """
        device, tensors = head.device, dict(shared or {})
        tensors |= {
            name: torch.full(shape, -2 if dtype == torch.int64 else 0, dtype=dtype, device=device)
            for name, (shape, dtype) in buffer_layout(cfg).items()
            if name not in tensors
        }
        if params is not None:
            check_kernel_limits(cfg)
            tensors["workspace"] = allocate_workspace(cfg, params, device)
        if "tables" not in tensors:
            tables = head.rotary.for_length(cfg.num_tokens).tables(cfg.max_positions + MAX_DEPTH)
            tensors["tables"] = tuple(table[:, : cfg.head_dim // 2].contiguous() for table in tables)
        bufs = cls(**tensors, cfg=cfg, tree=cfg.tree, params=params)
        if shared is None or "num_new" not in shared:
            bufs.num_new.fill_(1)
            for name in ("active_slots", "active_inverse"):
                torch.arange(cfg.num_slots, out=getattr(bufs, name))
            bufs.active_count.fill_(cfg.num_slots)
        return bufs

    @property
    def drafted(self) -> DraftTree:
        """The last draft's trees, not copied."""
        return DraftTree(*(getattr(self, name) for name in BLANK))

    def of_tree(self, tree: TreeConfig) -> Buffers:
        """Return buffers for smaller trees over the same memory: outputs in their shapes, all else shared.

        A draft into either overwrites the outputs of the other. Raises `UsageError` for a tree of another ``top_k``,
        deeper or with more nodes.
        """
        bound = self.tree
        if tree.top_k != bound.top_k or tree.depth > bound.depth or tree.total_tokens > bound.total_tokens:
            wanted = f"top_k = {bound.top_k}, at most depth = {bound.depth} and total_tokens = {bound.total_tokens}"
            raise misfit("tree", wanted, tree)
        layout, views = buffer_layout(self.cfg, tree), {}
        for name in BLANK:
            shape, _ = layout[name]
            views[name] = getattr(self, name).view(-1)[: math.prod(shape)].view(shape)
        return replace(self, tree=tree, **views)

    def set_step(self, active: Sequence[int], new_tokens: Sequence[Sequence[int]], prefix: Sequence[int]) -> None:
        """Write a step's inputs from the host: for each active slot, its new tokens and its cached pairs.

        Raises `UsageError`, before anything is written, for no or too many new tokens, ids outside the target's
        vocabulary, a slot out of range or given twice, and a sequence that does not fit the KV cache with its tree.
        """
        if not len(active) == len(new_tokens) == len(prefix):
            found = f"{len(active)} slots, {len(new_tokens)} lists of tokens and {len(prefix)} prefixes"
            raise UsageError(f"A step has new tokens and a prefix for each active slot; got {found}.")
        try:
            active, prefix = [index(slot) for slot in active], [index(past) for past in prefix]
            new_tokens = [[index(token) for token in tokens] for tokens in new_tokens]
        except TypeError as error:
            raise UsageError(f"Slots, new tokens (a list for each slot) and prefixes are integers: {error}.") from error
        slots, width = self.new_tokens.shape
        largest = self.cfg.tree.new_tokens_width
        if len(set(active)) != len(active) or not all(0 <= slot < slots for slot in active):
            raise UsageError(f"active slots {active} must be different and below {slots}.")
        for slot, tokens, past in zip(active, new_tokens, prefix, strict=True):
            if not 1 <= len(tokens) <= largest:
                raise UsageError(f"Slot {slot}: a draft takes 1 to {largest} new tokens, got {len(tokens)}.")
            check_ids(slot, tokens, self.cfg.target_vocab)
            check_room(slot, past, len(tokens), self.cfg)
        inverse, counts, pasts = [-1] * slots, [1] * slots, [0] * slots
        rows = [[0] * width for _ in range(slots)]
        for place, (slot, tokens, past) in enumerate(zip(active, new_tokens, prefix, strict=True)):
            inverse[slot], counts[slot], pasts[slot] = place, len(tokens), past
            rows[slot][: len(tokens)] = tokens
        for target, value in (
            (self.new_tokens, rows),
            (self.num_new, counts),
            (self.prefix, pasts),
            (self.active_slots, [*active, *[-1] * slots][:slots]),
            (self.active_inverse, inverse),
            (self.active_count, [len(active)]),
        ):
            target.copy_(torch.tensor(value, dtype=torch.int32), non_blocking=True)
        # Tensors made in inference mode have no version; what is written to them later would go unnoticed.
        if (version := tensor_state(self.num_new)[0]) is not None:
            self.host.update(new=max(map(len, new_tokens), default=0), version=version)

    def max_new_tokens(self) -> int:
        """Return the most new tokens of a sequence in the last `set_step`; 0 if ``num_new`` was written since."""
        is_known = bool(self.host) and self.host["version"] == tensor_state(self.num_new)[0]
        return self.host["new"] if is_known else 0


def cache_shape(cfg: DrafterConfig) -> tuple[int, int, int, int]:
    """Return the shape of a KV cache's keys, which is that of its values."""
    return cfg.num_slots, cfg.num_kv_heads, cfg.cache_rows, cfg.head_dim


def buffer_layout(cfg: DrafterConfig, tree: TreeConfig | None = None) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return the shape and dtype of each tensor of `Buffers`, the kernel's workspace aside.

    ``tree``: what outputs are for, by default the tree of ``cfg``.
    """
    tree = cfg.tree if tree is None else tree
    slots, total, cache = cfg.num_slots, tree.total_tokens, cache_shape(cfg)
    int32, int64 = torch.int32, torch.int64
    return {
        "new_tokens": ((slots, max(MAX_WAITING, cfg.tree.new_tokens_width)), int32),
        **dict.fromkeys(("num_new", "prefix", "active_slots", "active_inverse"), ((slots,), int32)),
        "active_count": ((1,), int32),
        **dict.fromkeys(("keys", "values"), (cache, cfg.dtype)),
        **dict.fromkeys(("draft_tokens", "parents", "tree_position_ids"), ((slots, total), int64)),
        "tree_mask": ((slots, 1, total, total), torch.bool),
        "retrieve_indices": ((slots, total, tree.path_width), int64),
        "num_leaves": ((slots,), int64),
    }


def check_ids(slot: int, token_ids: Sequence[int], target_vocab: int) -> None:
    """Raise `UsageError` for an id that the target does not have."""
    wrong = [token for token in token_ids if not 0 <= token < target_vocab]
    if wrong:
        raise UsageError(f"Slot {slot}: token id {wrong[0]}; the target has 0 to {target_vocab - 1}.")


def check_room(slot: int, prefix: int, num_new: int, cfg: DrafterConfig) -> None:
    """Raise `UsageError` when a sequence and its tree do not fit the KV cache."""
    if prefix < 0 or prefix + num_new + cfg.tree_rows > cfg.max_positions:
        needed = f"{prefix} cached pairs, {num_new} new and {cfg.tree_rows} tree rows"
        room = f"the drafter's KV cache of {cfg.max_positions} positions"
        raise UsageError(f"Slot {slot}: {needed} exceed {room}. Allocate more, or end this sequence.")
