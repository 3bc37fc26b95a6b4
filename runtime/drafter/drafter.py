"""A drafter: what drafts, and its state on the device.

`Drafter` says what drafts: a head, the shape of its trees, and a backend. `Drafter.on_slots` gives it buffers for a
number of sequences. Nothing of a draft passes through the host there: lengths, new tokens and active slots are read
from `Buffers`, features from one tensor. "triton" is the persistent kernel; "reference" gives the same results with
PyTorch and waits for the device; a `DraftFunction` is a drafter of the caller's own over the same buffers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..errors import misfit
from ..ops import Ops
from ..settings import TreeConfig
from .buffers import cache_shape
from .dimensions import DrafterConfig, check_kernel_limits
from .kernels.grid_barrier import ERROR
from .launch import DraftFunction, allocate_buffers, run_draft, timed_out, write_pairs
from .packed_weights import SharedPacking, Weights
from .weights import HeadWeights


@dataclass(eq=False)
class Drafter:
    """A head, the shape of the trees that are drafted with it, and what drafts them.

    ``packing``: the head as the kernel reads it, shared by all drafters over it; "triton" alone has one. Raises
    `UsageError` when the draft vocabulary has fewer rows than ``top_k``; for "triton" as `check_kernel_limits`.
    """

    weights: HeadWeights
    tree: TreeConfig
    backend: str | DraftFunction = "reference"
    packing: SharedPacking | None = None

    def __post_init__(self) -> None:
        check_tree_fits(self.weights.draft_vocab, self.tree)
        if self.backend == "triton":
            if self.packing is None:
                self.packing = SharedPacking(self.weights)
            check_kernel_limits(self._config(1, 1))

    @property
    def name(self) -> str:
        """The backend's name."""
        backend = self.backend
        return getattr(backend, "__name__", type(backend).__name__) if callable(backend) else backend

    @property
    def stored_dtype(self) -> torch.dtype:
        """The type that the head's matrices are stored in."""
        return self.weights.dtype if self.packing is None else self.packing.weight_dtype

    @property
    def draft_bytes(self) -> int:
        """Bytes of weights that drafting a tree reads: the layer, the LM head and all that may join, on each level."""
        # Norms and biases stay as they are; they are negligible.
        return self.weights.num_weights * self.stored_dtype.itemsize * (self.tree.depth + 1)

    def like(self, weights: HeadWeights, tree: TreeConfig, order: Tensor | None = None) -> Drafter:
        """Return a drafter for another tree or draft vocabulary of this head.

        It shares what is packed, unless its rows are not the first of those; then it packs its own, by ``order``:
        int64 [draft_vocab], LM-head rows best first.
        """
        packing = self.packing
        if packing is not None and not packing.serves(weights):
            packing = SharedPacking(weights, order, packing.weight_dtype)
        return Drafter(weights, tree, self.backend, packing)

    def allocate_cache(self, num_slots: int, capacity: int) -> tuple[Tensor, Tensor]:
        """Allocate keys and values for drafters of trees of this depth and top_k."""
        cfg = self._config(num_slots, capacity)
        keys = torch.zeros(cache_shape(cfg), dtype=cfg.dtype, device=self.weights.device)
        return keys, torch.zeros_like(keys)

    def on_slots(
        self, num_slots: int, capacity: int, cache: tuple[Tensor, Tensor] | None = None,
        beside: BufferedDrafter | None = None,
    ) -> BufferedDrafter:  # fmt: skip
        """Give it buffers for ``num_slots`` sequences of up to ``capacity`` tokens.

        ``cache``: keys and values that other drafters of the head use too, for as many slots or more, as
        `allocate_cache` of the largest of them makes them. ``beside``: a drafter of another tree for as many slots,
        whose inputs this one has too. Raises as `DrafterConfig.of` and `Weights.pack`.
        """
        cfg = self._config(num_slots, capacity)
        if cache is not None:
            cfg = replace(cfg, max_positions=cache[0].shape[2])
        return BufferedDrafter(self, cfg, cache, beside)

    def _config(self, num_slots: int, capacity: int) -> DrafterConfig:
        stored = None if self.packing is None else self.packing.weight_dtype
        return DrafterConfig.of(self.weights, self.tree, num_slots, capacity + self.tree.new_tokens_width, stored)


class BufferedDrafter:
    """A drafter over buffers; see `Drafter.on_slots`."""

    def __init__(
        self, drafter: Drafter, cfg: DrafterConfig, cache: tuple[Tensor, Tensor] | None = None,
        beside: BufferedDrafter | None = None,
    ) -> None:  # fmt: skip
        self.drafter, self.cfg, self.head, self.tree = drafter, cfg, drafter.weights, drafter.tree
        self.weights = Weights(self.head) if drafter.packing is None else drafter.packing.weights(cfg)
        slots, device = cfg.num_slots, self.head.device
        shared = None if cache is None else (cache[0][:slots], cache[1][:slots])
        self.bufs = allocate_buffers(cfg, self.weights, shared)
        if beside is not None:
            self.bufs = self.bufs.with_inputs_of(beside.bufs)
        self.ops = Ops.for_device(device)
        shape = (slots, self.tree.new_tokens_width, cfg.feature_width)
        own = torch.zeros(shape, dtype=self.head.dtype, device=device) if beside is None else beside.features
        self.features: Tensor = own
        """[slots, 16 or more, feature_width]: features of the last step's tokens, written by whoever commits them."""
        barrier = self.bufs.workspace.get("barrier", torch.zeros(4, dtype=torch.int32, device=device))
        self.error = barrier[ERROR : ERROR + 1]
        """int32 [1]: not 0 after a draft whose grid barrier timed out."""
        self._tables = self.head.rotary_halves(cfg.max_positions, cfg.num_tokens)
        # Built before capture.
        _ = self.head.kv_projection

    @property
    def waits(self) -> bool:
        """Whether a draft waits for the device, so that no CUDA graph can hold it."""
        return self.drafter.backend != "triton"

    def clear_error_(self) -> None:
        """Make a barrier that timed out usable again."""
        timed_out(self.bufs)

    def draft(self) -> None:
        """Draft the trees of the active slots into the buffers."""
        run_draft(self.cfg, self.features, self.weights, self.bufs, self.drafter.backend)

    def prefill(self, features: Tensor, next_tokens: Tensor, positions: Tensor, rows: Tensor, slots: Tensor) -> None:
        """Put the keys and values of a prompt's pairs into the cache; arguments as `launch.write_pairs`."""
        write_pairs(self.ops, self.head, features, next_tokens, positions, rows, slots, self._tables, self.bufs)


def check_tree_fits(draft_vocab: int, tree: TreeConfig) -> None:
    """Raise `UsageError` unless a node can have ``top_k`` children among ``draft_vocab`` rows of the LM head."""
    if draft_vocab < tree.top_k:
        raise misfit("top_k", f"at most the {draft_vocab} ids that are drafted over", tree.top_k)
