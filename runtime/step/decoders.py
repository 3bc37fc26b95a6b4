"""Decoders, kept from call to call: one KV cache, and a decoder for each number of slots and tree.

A prompt that continues a finished sequence reuses the rows that its slot still holds. After "a b c d" was answered with
"e f g", the target's cache has rows for all but the newest token g, and the drafter's has pairs up to where the last
step began. Of the next prompt, "a b c d e f X", all that the slot holds and the prompt begins with is reused, token by
token; an edited history shares less, and an unrelated prompt nothing::

    kept     a b c d e f g          prompt   a b c d e f X
    rows     a b c d e f            reused   a b c d e          run   f X

The last shared token is run again, as its feature pairs with the token after it. Of a drafter with a window the slot
holds the last pairs alone: where the window of a shorter prompt begins before them, its tokens are run again, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from ..drafter.drafter import Drafter
from ..errors import DeviceMemoryError
from ..ops import current, ranges_wanted
from ..settings import PartialVerification, TreeConfig
from ..target.cache import KVCache, Target
from ..target.wrapper import TargetModel
from .decoder import Decoder
from .graphs import BUCKETS, GraphPool, WarmUp, bucket_of, buckets_up_to, recall
from .kernels.choice_kernels import ChoiceRules
from .partial import partial_decoder
from .shapes import Acceptance, Costs, ShapeChooser, shapes_for

Result = TypeVar("Result")
MAX_DECODERS = 12
"""Decoders that are kept: those used last."""


def capacity_for(rows: int) -> int:
    """Return the rows to allocate for ``rows``: a power of two from 1024 on, so that few sizes occur.

    Beyond 131,072 exactly as many: there a power of two would cost gigabytes, and more positions than the persistent
    drafter takes.
    """
    return rows if rows > 131072 else max(1024, 1 << (rows - 1).bit_length())


@dataclass(frozen=True)
class KeptRows:
    """A finished sequence in a slot: rows of all ``tokens`` but the last, and ``num_pairs`` pairs of the drafter.

    Pairs before ``first_pair`` are not held any more.
    """

    tokens: tuple[int, ...] = ()
    num_pairs: int = 0
    first_pair: int = 0
    owner: str | None = None
    """As in `Request`, whose rows they are."""

    def num_shared(self, prompt: Sequence[int], is_drafted: bool, window: int = 0) -> int:
        """Count the first tokens of a prompt that need not be run: shared ones that have a row, but for the last.

        ``window``: of the drafter, whose pairs must be there.
        """
        longest = min(len(self.tokens) - 1, len(prompt))
        common = next((i for i, (a, b) in enumerate(zip(self.tokens, prompt, strict=False)) if a != b), longest)
        shared = min(longest, common) - 1
        if is_drafted:
            shared = min(shared, self.num_pairs)
            if self.first_pair > max(0, shared - window):
                shared -= window
        return max(0, shared)

    def cut(self, prompt: Sequence[int], shared: int) -> KeptRows:
        """Return the rows that stay valid after reusing ``shared`` tokens (`num_shared`)."""
        pairs, first = min(self.num_pairs, shared), min(self.first_pair, shared)
        return replace(self, tokens=tuple(prompt[: shared + 1]), num_pairs=pairs, first_pair=first)


class Decoders:
    """Builds `Decoder`s and keeps `MAX_DECODERS` of them with their graphs, as long as the cache is large enough.

    The drafter's tree is the largest of their trees.
    """

    def __init__(self, target: TargetModel, drafter: Drafter) -> None:
        self.model, self.drafter, self.tree = target, drafter, drafter.tree
        self._cache: KVCache | None = None
        self._draft_cache: tuple[Tensor, Tensor] | None = None
        self._decoders: dict[tuple[int, TreeConfig | None, PartialVerification | None], Decoder] = {}
        layers = target.runs.layer_shapes
        token_bytes = target.dtype.itemsize * sum(each.kv_heads * (each.key_dim + each.value_dim) for each in layers)
        self.acceptance = Acceptance()
        """Of the head, learned by steps that choose their shape; so are ``costs``, times of this device."""
        self.costs = Costs(target.weight_bytes, token_bytes, target.runs.is_mixture)
        self.num_steps = Counter[int]()
        """Steps by the bucket that their sequences need."""
        self._pool = GraphPool() if self.has_graphs else None
        self.kept: list[KeptRows] = []
        """Rows that each slot of the cache still holds of its last sequence."""
        target.users.add(self)
        # A target that cannot run is refused now, not in the first call.
        _ = self.eager_reason

    @property
    def target(self) -> Target:
        """The target that runs the forwards."""
        return self.model.runs

    @property
    def eager_reason(self) -> str | None:
        """Why the target's forward is not in the graphs; None where it is."""
        return "EAGLE_SLIM_RANGES names all that runs" if ranges_wanted() else self.model.eager_reason

    def drop(self) -> None:
        """Free the caches and all decoders with their graphs."""
        self._decoders.clear()
        self._cache = self._draft_cache = None
        self.kept = []

    def run(self, act: Callable[[], Result]) -> Result:
        """Run a call with the model held and looked at; the caller's autocast has no effect.

        Raises `DeviceMemoryError` where the device's memory does not suffice, with all of it free again.
        """
        try:
            with self.model.hold():
                self.model.look()
                with torch.autocast(self.model.device.type, enabled=False):
                    return act()
        except RuntimeError as error:
            # A CPU's error has no type of its own.
            if not isinstance(error, torch.OutOfMemoryError) and "DefaultCPUAllocator" not in str(error):
                raise
            reason = str(error).rpartition("DefaultCPUAllocator: ")[2].partition(". ")[0]
        # Only here, as the error's traceback holds the tensors of all frames.
        with self.model.hold():
            self.drop()
        if self.model.device.type == "cuda":
            torch.cuda.empty_cache()
        raise DeviceMemoryError(
            f"The memory of {self.model.device} does not suffice ({reason}). Lower max_slots, the lengths of prompts "
            "and answers (max_new_tokens, max_model_len) or the trees' size (total_tokens); draft_weights='fp8', a "
            "smaller draft_vocab and fewer other programs on the device leave more, too. What this call held is free "
            "again."
        )

    def new_chooser(self, shapes: Sequence[TreeConfig | None]) -> ShapeChooser:
        """Return what chooses the shape of each step of a call."""
        return ShapeChooser(self.acceptance, self.costs, shapes)

    @property
    def has_graphs(self) -> bool:
        """Whether steps are replayed from CUDA graphs, where they can be captured."""
        return self.target.device.type == "cuda" and not ranges_wanted()

    @property
    def max_slots(self) -> int | None:
        """Most sequences side by side; None for any number: only kernels and their graphs have a limit."""
        return BUCKETS[-1] if self.target.device.type == "cuda" or self.drafter.packing is not None else None

    @property
    def cache_bytes(self) -> int:
        """Memory of the keys and values, the target's and the drafter's."""
        drafter = sum(tensor.nbytes for tensor in self._draft_cache or ())
        return drafter + (0 if self._cache is None else self._cache.size_bytes)

    @property
    def graph_bytes(self) -> int:
        """Device memory of all decoders' graphs."""
        return sum(decoder.graphs.size_bytes for decoder in self._decoders.values())

    def forget(self) -> None:
        """Reuse no rows of finished sequences."""
        self.kept = [KeptRows()] * len(self.kept)

    def get(
        self, num_sequences: int, max_tokens: int, tree: TreeConfig | None, partial: PartialVerification | None = None
    ) -> Decoder:
        """Return a decoder for that many sequences side by side, `max_slots` at most, of up to ``max_tokens`` each.

        ``tree``: the largest of its steps; None decodes plainly. ``partial``: as in `Plan`. The model must be held. A
        cache that has to grow takes all decoders with it: their graphs hold its addresses.
        """
        shapes = [self.tree] if partial is None else [self.tree, partial.chain]
        # Each number of slots has graphs of its own: few sizes shall occur.
        num_slots = bucket_of(num_sequences) if self.has_graphs else num_sequences
        nodes = max(max(shape.total_tokens, shape.path_width) for shape in shapes)
        # A spare row takes what a captured forward writes for rows without a token.
        cache, needed = self._cache, max_tokens + nodes + 1
        if cache is None or cache.num_slots < num_slots or cache.capacity < needed:
            slots = num_slots if cache is None else max(num_slots, cache.num_slots)
            capacity = capacity_for(max(needed, 0 if cache is None else cache.capacity))
            # The old one goes before the new one comes, so that there is room.
            cache = None
            self.drop()
            self.kept = [KeptRows()] * slots
            cache = KVCache.allocate(self.target, slots, capacity)
            self.target.reserve_positions(capacity + max(shape.new_tokens_width for shape in shapes))
            # Set last: a cache means that setup finished.
            self._cache = cache
        key = num_slots, tree, partial
        return recall(self._decoders, key, MAX_DECODERS, lambda: self._build(cache, *key))

    def _build(
        self, whole: KVCache, num_slots: int, tree: TreeConfig | None, partial: PartialVerification | None
    ) -> Decoder:
        waits, cache = self.eager_reason is not None, whole.first(num_slots)
        if tree is None:
            return Decoder.of_drafter(self.target, cache, None, waits, self._pool)
        if self._draft_cache is None:
            # The largest trees' need the most rows.
            self._draft_cache = self.drafter.allocate_cache(whole.num_slots, whole.capacity)
        drafter = self.drafter.like(self.drafter.weights, tree)
        buffered = drafter.on_slots(num_slots, whole.capacity, self._draft_cache)
        if partial is None:
            return Decoder.of_drafter(self.target, cache, buffered, waits, self._pool)
        return partial_decoder(self.target, cache, buffered, partial, waits, self._pool)

    def _time_shapes(
        self, decoder: Decoder, num_slots: int, length: int, trees: Sequence[TreeConfig | None], rules: ChoiceRules
    ) -> None:
        """Time a step of each shape over made-up sequences of ``length`` tokens, for each bucket of them."""
        for bucket in buckets_up_to(num_slots):
            num_active = min(bucket, num_slots)
            decoder.fill_(num_active, length)
            for tree in shapes_for(bucket, trees):
                ms = decoder.time_step(num_active, rules, tree)
                self.costs.add(tree, decoder.batch_for(num_active), length, ms)
        decoder.clear_()
        # They were written over what the slots held.
        self.forget()

    @torch.inference_mode()
    def warm_up(
        self,
        num_sequences: int,
        max_tokens: int,
        trees: Sequence[TreeConfig | None],
        rules: ChoiceRules,
        partial: PartialVerification | None = None,
    ) -> WarmUp:
        """Compile and capture for calls of up to that many sequences and tokens. The model must be held.

        ``trees``: the shapes that steps may have; with ``partial`` they have that of its chains.
        """
        with current(self.target.device):
            num_slots = min(num_sequences, self.max_slots or num_sequences)
            decoder = self.get(num_slots, max_tokens, trees[0] if len(trees) == 1 else self.tree, partial)
            decoder.clear_()
            trees = trees if partial is None else [decoder.tree]
            warm_up = decoder.warm_up(rules, num_slots, trees)
            if len(trees) > 1 and decoder.graphs.can_capture:
                self._time_shapes(decoder, num_slots, max_tokens // 2, trees, rules)
        return replace(warm_up, cache_bytes=self.cache_bytes)


def match_slots(
    prompts: Sequence[Sequence[int]],
    kept: Sequence[KeptRows],
    free: Sequence[int],
    is_drafted: bool,
    window: int | None = None,
) -> list[tuple[int, int]]:
    """Give each prompt a free slot, those first that share most with it: (slot, shared tokens) by prompt.

    ``window``: of the drafter. There must be as many free slots as prompts, or more.
    """
    matches: dict[int, tuple[int, int]] = {}
    shared = {
        (index, slot): kept[slot].num_shared(prompt, is_drafted, window or 0)
        for index, prompt in enumerate(prompts)
        for slot in free
    }
    # An empty slot, so that both texts can be continued, is better than one that gives less than 3/4 of the shorter.
    sizes = {(index, slot): min(len(prompts[index]), len(kept[slot].tokens)) for index, slot in shared}
    for index, slot in sorted(shared, key=lambda pair: (4 * shared[pair] < 3 * sizes[pair], -shared[pair], *pair)):
        if index not in matches and all(slot != taken for taken, _ in matches.values()):
            matches[index] = (slot, shared[index, slot])
    return [matches[index] for index in range(len(prompts))]
