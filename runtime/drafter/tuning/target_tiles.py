"""Tiles of the target's products and attention: what to try for a recorded shape, and how it is measured.

Tiles decide no bits, so a variant is right where its result equals that of the rule's own tiles to the last bit.
Weights and keys are taken in turn from more memory than an L2 holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from ...errors import DrafterError, UsageError
from ...target.kernels import products
from ...target.kernels.attention import AttentionScratch, AttentionTiles, attention_tiles, can_attend, tree_attention
from ...target.kernels.machine import num_processors
from ...target.kernels.product_kernels import ProductTiles
from ...target.kernels.tree_rows import ForwardRows, tree_rows
from ...tree import Trees
from .timing import capture, interleave

_TURNS_BYTES = 256 << 20
"""Weights, or keys and values, that a sample goes through."""
PREFIXES = (512, 8192)
"""Tokens before the rows while attention is timed, where nobody says; all count alike."""


class TileTask(Protocol):
    """A kernel of one shape."""

    own: Any
    """The tiles of the rule in code."""

    def variants(self) -> dict[str, Any]:
        """Tiles that differ from these in one thing each."""

    def changed(self, changes: dict[str, int]) -> Any:
        """These with the fields of a tuned file; None where they cannot run so."""

    def runs(self, tiles: Any) -> Sequence[Callable[[], Tensor]]:
        """What to time with these tiles, one for each length of text; each returns its result."""


@dataclass
class ProductTask:
    """A product of ``rows`` rows with weights [size, depth]; ``form`` as in `products.product_tiles`."""

    form: str
    size: int
    depth: int
    rows: int
    dtype: torch.dtype
    device: torch.device

    def __post_init__(self) -> None:
        """Draw weights and rows."""
        if self.form not in ("pairs", "sum", "logits"):
            raise UsageError(f"form = {self.form!r} is no form of a product.", option="form", found=self.form)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, device=self.device, dtype=self.dtype).mul_(shape[-1] ** -0.5)

        bytes_each = self.size * self.depth * self.dtype.itemsize
        self._weights = [random(self.size, self.depth) for _ in range(max(1, min(16, _TURNS_BYTES // bytes_each)))]
        self._shape = products.product_shape(self._weights[0])
        if self.form == "logits":
            # As in `products.head_product`.
            self._shape = replace(self._shape, splits=1, split_size=self.depth)
        width, out = (self.size, self.size) if self.form == "sum" else (self.depth, self.size)
        groups = products.num_groups(width)
        self._x = random(self.rows, self.depth)
        self._start = random(self.rows, width)
        squares = torch.ones((self.rows, groups), dtype=torch.float32, device=self.device)
        self._rows = products.NormedRows(self._start.clone(), self._start.clone(), squares)
        self._norm = products.Norm(torch.ones(width, dtype=self.dtype, device=self.device), 1e-5, 1.0)
        self._out = random(self.rows, out // 2 if self.form == "pairs" else out)
        whole = (self._shape, products.tiled_size(self.size))
        self._scratch = products.split_scratch([whole], self.rows, self.device)
        form: Any = self.form
        self._has_bulk = products.has_descriptors(self._weights[0], self._x)
        own = products.product_tiles(
            self._shape, self.rows, form, self.dtype.itemsize, num_processors(self.device), self._has_bulk
        )
        self.own = products.who_sums(own, self._shape, self.rows, self.device)

    def changed(self, changes: dict[str, int]) -> ProductTiles | None:
        """See `TileTask`."""
        tiles = replace(self.own, **changes)  # type: ignore[arg-type]
        if not products.can_launch(tiles, self._shape) or tiles.bulk > self._has_bulk:
            return None
        return products.who_sums(tiles, self._shape, self.rows, self.device)

    def variants(self) -> dict[str, ProductTiles]:
        """See `TileTask`."""
        own, highest = self.own, max(16, 1 << (self.rows - 1).bit_length())
        tried = {
            "one stage less": replace(own, num_stages=max(1, own.num_stages - 1)),
            "one stage more": replace(own, num_stages=own.num_stages + 1),
            "half block_k, twice the stages": replace(
                own, block_k=max(32, own.block_k // 2), num_stages=min(8, 2 * own.num_stages)
            ),
            "double block_k": replace(own, block_k=own.block_k * 2, num_stages=max(2, own.num_stages // 2)),
            "half block_rows": replace(own, block_rows=max(16, own.block_rows // 2)),
            "double block_rows": replace(own, block_rows=min(own.block_rows * 2, highest)),
            "half block_n": replace(own, block_n=max(64, own.block_n // 2)),
            "double block_n": replace(own, block_n=min(128, own.block_n * 2)),
            "other warps": replace(own, num_warps=12 - own.num_warps),
            "nothing ahead": replace(own, ahead=0),
            "twice as far ahead": replace(own, ahead=max(128, own.ahead * 2)),
        }
        if self._has_bulk:
            tried["no descriptors" if own.bulk else "descriptors"] = replace(own, bulk=not own.bulk)
        fit = {name: self.changed(asdict(tiles)) for name, tiles in tried.items()}
        return {name: tiles for name, tiles in fit.items() if tiles not in (None, own)}

    def runs(self, tiles: ProductTiles) -> Sequence[Callable[[], Tensor]]:
        """See `TileTask`; all weights in turn."""
        rows, norm, scratch = self._rows, self._norm, self._scratch

        def run() -> Tensor:
            rows.residual.copy_(self._start)
            for weight in self._weights:
                if self.form == "sum":
                    products.add_product(self._x, weight, None, norm, rows, None, scratch, tiles)
                elif self.form == "pairs":
                    products.gated_product(rows, norm, weight, None, self._out, scratch, tiles)
                else:
                    products.head_product(rows, norm, weight, self._out, tiles)
            return rows.residual if self.form == "sum" else self._out

        return (run,)


@dataclass
class AttentionTask:
    """Attention of ``places`` sequences of ``nodes`` rows, a chain's or a tree's, after ``prefixes`` tokens."""

    group: int
    kv_heads: int
    head_dim: int
    places: int
    nodes: int
    path: bool
    dtype: torch.dtype
    device: torch.device
    prefixes: Sequence[int] = PREFIXES

    def __post_init__(self) -> None:
        """Draw keys and queries, and lay out a tree in which each node has two children."""
        self._capacity = max(self.prefixes) + self.nodes + 1
        heads = self.group * self.kv_heads
        cache = (self.places, self.kv_heads, self._capacity, self.head_dim)
        bytes_each = 2 * self.places * self.kv_heads * self._capacity * self.head_dim * self.dtype.itemsize
        self._caches = [
            tuple(torch.randn(cache, device=self.device, dtype=self.dtype) for _ in range(2))
            for _ in range(max(1, min(16, _TURNS_BYTES // bytes_each)))
        ]
        self._query = torch.randn(self.places * self.nodes, heads * self.head_dim, device=self.device, dtype=self.dtype)
        self._out = torch.empty_like(self._query)
        shape = (heads, self.kv_heads, self.head_dim)
        self._scratch = AttentionScratch.allocate(self.places, self.nodes, [shape], self._capacity, self.device)
        self._lengths = torch.zeros(self.places, dtype=torch.int32, device=self.device)
        self._rows = ForwardRows.allocate(self.places, self.nodes, self._lengths, self.path)
        numbers = range(self.nodes)
        parents = [node - 1 if self.path else (node + 1) // 2 - 1 for node in numbers]
        depths = [node if self.path else (node + 1).bit_length() - 1 for node in numbers]
        slots = torch.arange(self.places, dtype=torch.int32, device=self.device)
        tokens, parents_of, positions = (
            torch.tensor([column] * self.places, device=self.device) for column in (list(numbers), parents, depths)
        )
        count = torch.full((1,), self.places, dtype=torch.int32, device=self.device)
        self._trees = Trees(slots, count, tokens, parents_of, positions)
        self.own = attention_tiles(
            self.places, self.nodes, shape, num_processors(self.device), self.dtype.itemsize
        )  # fmt: skip

    def changed(self, changes: dict[str, int]) -> AttentionTiles | None:
        """See `TileTask`."""
        tiles = replace(self.own, **changes)
        return tiles if can_attend(self.own, tiles) else None

    def variants(self) -> dict[str, AttentionTiles]:
        """See `TileTask`."""
        own = self.own
        twice = own.programs if own.walks else own.programs * 2
        more = {} if own.walks else {"twice the programs": replace(own, programs=twice)}
        if own.num_warps == 4 and self.nodes * self.group > own.rows:
            wide = replace(own, rows=2 * own.rows, num_warps=8)
            more |= {"twice the rows": wide, "twice the rows and the programs": replace(wide, programs=twice)}
            more |= {"twice the rows, one stage less": replace(wide, num_stages=wide.num_stages - 1)}
        tried = {
            **more,
            "half the programs": replace(own, programs=max(1, own.programs // 2)),
            "a quarter of the programs": replace(own, programs=max(1, own.programs // 4)),
            "other warps": replace(own, num_warps=12 - own.num_warps),
            "one stage less": replace(own, num_stages=max(1, own.num_stages - 1)),
            "one stage more": replace(own, num_stages=own.num_stages + 1),
            "half the tail's warps": replace(own, tail_warps=max(1, own.tail_warps // 2)),
            "twice the tail's warps": replace(own, tail_warps=min(8, own.tail_warps * 2)),
        }
        return {name: tiles for name, tiles in tried.items() if tiles != own}

    def runs(self, tiles: AttentionTiles) -> Sequence[Callable[[], Tensor]]:
        """See `TileTask`; all caches in turn, at each of ``prefixes``."""

        def run(prefix: int) -> Tensor:
            self._lengths.fill_(prefix)
            tree_rows(self._trees, self._rows)
            for keys, values in self._caches:
                tree_attention(
                    self._query, keys, values, self._rows.attention, self.head_dim**-0.5, None, self._out,
                    self._scratch, tiles=tiles,
                )  # fmt: skip
            return self._out

        return [lambda prefix=prefix: run(prefix) for prefix in self.prefixes]  # type: ignore[misc]


def trials_of_tiles(task: TileTask, elsewhere: Mapping[str, dict[str, int]], most: int | None) -> dict[str, Any]:
    """What to try beside a task's own tiles, by name: what was found for other GPUs, then ``most`` variants."""
    tried = [
        (name, task.changed(changes)) for name, changes in elsewhere.items() if changes.keys() <= vars(task.own).keys()
    ]
    tried += list(task.variants().items())[:most]
    found: dict[str, Any] = {}
    for name, tiles in tried:
        if tiles not in (None, task.own, *found.values()):
            found[name] = tiles
    return found


def compile_tiles(
    job: tuple[str, dict[str, Any], torch.device, Mapping[str, dict[str, int]], int | None],
) -> None:
    """Launch a recorded shape with all that is going to be tried: kind, shape, device, and as `trials_of_tiles`."""
    kind, shape, device, elsewhere, most = job
    task = task_of(kind, shape, device, (1,))
    for tiles in (task.own, *trials_of_tiles(task, elsewhere, most).values()):
        with suppress(Exception):  # what does not compile or fit is said where it is measured
            task.runs(tiles)[0]()
    del task
    torch.cuda.empty_cache()


TASKS = {"products": ProductTask, "attention": AttentionTask}


def task_of(kind: str, shape: dict[str, Any], device: torch.device, prefixes: Sequence[int] = PREFIXES) -> TileTask:
    """Build a recorded shape's task. Raises `UsageError` for values that are no shape of this kind."""
    task: Any = TASKS[kind]
    names = [field.name for field in fields(task) if field.name not in ("device", "prefixes")]
    if [*shape] != names or not hasattr(torch, str(shape["dtype"])):
        raise UsageError(f"{shape} is no shape of {kind}; expected {', '.join(names)}.", found=shape)
    lengths = {"prefixes": prefixes} if kind == "attention" else {}
    made: TileTask = task(**{**shape, "dtype": getattr(torch, shape["dtype"])}, device=device, **lengths)
    return made


def measure_tiles(task: TileTask, rounds: int, device: torch.device) -> Callable[[Any, Any], tuple[float, float]]:
    """Return what measures (own, variant), in microseconds of both.

    The variant's are its own's times the mean ratio over lengths of text. Raises `DrafterError` for a variant whose
    result has other bits.
    """
    expected = [run().clone() for run in task.runs(task.own)]
    own_graphs = [capture(run) for run in task.runs(task.own)]

    def measure(_own: Any, tiles: Any) -> tuple[float, float]:
        runs = task.runs(tiles)
        if not all(torch.equal(run(), result) for run, result in zip(runs, expected, strict=True)):
            raise DrafterError("the result has other bits than the rule's own tiles give")
        own_us, ratios = 0.0, []
        for own, run in zip(own_graphs, runs, strict=True):
            times = interleave({"own": own, "variant": capture(run)}, device, rounds)
            own_us += times["own"].median_us
            ratios.append(times["variant"].median_us / times["own"].median_us)
        return own_us, own_us * sum(ratios) / len(ratios)

    return measure
