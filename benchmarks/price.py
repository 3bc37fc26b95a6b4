"""Price exact rows: our forward with and without what makes a row's bits independent of its neighbours.

    python -m benchmarks.price [--dims llama-3.1-8b] [--places 1] [--out FILE]

A random target. *Exact*: the fused forward. *Free*: the same in the same kind of graph, but products are cuBLAS's, with
what follows them fused by `torch.compile`, and attention is PyTorch's that takes the mask, wherever that makes the
whole forward faster. Its lengths are constants of its graph, which ours reads on the device: that favours it. Rows:
plain and trees of 16 and 60 nodes after 512 and 8,192 tokens, and prompts of as many tokens, in chunks of 512.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from eagle_slim.runtime.drafter.tuning.problem import MODELS
from eagle_slim.runtime.drafter.tuning.timing import capture
from eagle_slim.runtime.ops import Ops
from eagle_slim.runtime.target.cache import KVCache
from eagle_slim.runtime.target.fused import FusedTarget
from eagle_slim.runtime.target.kernels import products
from eagle_slim.runtime.target.kernels.attention import AttentionParams
from eagle_slim.runtime.target.kernels.tree_rows import ForwardRows, tree_rows
from eagle_slim.runtime.tree import Trees
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from benchmarks.shared.command import Command, show, whole_from, write
from benchmarks.shared.decoding import TIED, random_target
from benchmarks.shared.timing import machine, time_queued_us

MOST_DIFFERENT = 0.05
"""Norm of the difference of logits over their norm, from which on a forward is wrong: rounding leaves less."""


@dataclass(frozen=True)
class PartOps(Ops):
    """Our operations, but for ``parts`` by name; `add_product` is "down" for rows ``intermediate`` wide, else "o"."""

    parts: Mapping[str, Any]
    intermediate: int

    def __call__(self, operation: Any) -> Any:
        """Return what runs in place of the operation."""
        ours = super().__call__(operation)
        if operation is not products.add_product:
            return self.parts.get(operation.__name__, ours)
        o, down = (self.parts.get(name, ours) for name in ("o", "down"))
        return lambda x, *rest: (down if x.shape[1] == self.intermediate else o)(x, *rest)


def qkv_product(
    rows: products.NormedRows,
    norm: products.Norm,
    weight: Tensor,
    bias: None,
    head_norms: None,
    out: products.HeadRows,
    keys: Tensor,
    values: Tensor,
    scratch: object = None,
) -> None:
    """Compute `products.qkv_product` of a Llama whose rows are all in use."""
    kv_heads, head_dim = keys.shape[1], keys.shape[3]
    qkv = ((rows.scaled @ weight.t()).float() * rows.factor(norm)).view(len(rows.scaled), -1, head_dim)
    at, row = out.positions.long(), out.kv_rows.long()
    cos, sin = out.cos[at][:, None], out.sin[at][:, None]
    first, second = qkv[:, :-kv_heads].chunk(2, -1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    out.query.copy_(turned[:, :-kv_heads].flatten(1))
    slot = out.slots.long().repeat_interleave(len(at) // len(out.slots))
    keys[slot, :, row] = turned[:, -kv_heads:].to(keys.dtype)
    values[slot, :, row] = qkv[:, -kv_heads:].to(values.dtype)


def lay_out(places: int, nodes: int, prefix: int, is_path: bool, device: torch.device) -> ForwardRows:
    """Lay out a chunk, or trees in which each node has two children, after ``prefix`` tokens."""
    node = torch.arange(nodes, device=device)
    tree = (node + 1, node - 1, node) if is_path else (node + 1, (node - 1) // 2, (node + 1).float().log2().long())
    slots = torch.arange(places, dtype=torch.int32, device=device)
    rows = ForwardRows.allocate(places, nodes, torch.full_like(slots, prefix), is_path)
    trees = Trees(slots, torch.full_like(slots[:1], places), *(each.expand(places, -1).contiguous() for each in tree))
    Ops.for_device(device)(tree_rows)(trees, rows)
    return rows


def attentions(rows: ForwardRows, prefix: int, group: int, dtype: torch.dtype) -> Iterator[tuple[str, Any]]:
    """Yield PyTorch's attention by every backend that takes the rows' mask; ``group``: query heads of a key head."""
    places, nodes, total = rows.places, rows.nodes, prefix + rows.nodes
    own = rows.attention.tree_mask()[0]
    seen = torch.cat((own.new_ones((nodes, prefix)), own), 1).repeat(group, 1)
    # Rows that begin at whole 32 bytes, which two backends ask for.
    bias = torch.zeros((len(seen), -(-total // 16) * 16), dtype=dtype, device=own.device)[:, :total]
    bias.masked_fill_(~seen, float("-inf"))

    def attention_by(backend: SDPBackend, mask: Any, is_grouped: bool) -> Callable[..., None]:
        def attend(
            query: Tensor,
            keys: Tensor,
            values: Tensor,
            rows: object,
            params: AttentionParams,
            out: Tensor,
            scratch: object,
        ) -> None:
            q = query.view(places, nodes, -1, keys.shape[3]).transpose(1, 2)
            if not is_grouped:  # Query heads of one key head are laid side by side as more queries.
                q = q.reshape(places, keys.shape[1], -1, keys.shape[3])
            k, v = keys[:places, :, :total], values[:places, :, :total]
            with sdpa_kernel(backend):
                attended = F.scaled_dot_product_attention(
                    q, k, v, attn_mask=mask, scale=params.scale, enable_gqa=is_grouped
                )
            out.copy_(attended.reshape(places, -1, nodes, keys.shape[3]).transpose(1, 2).reshape(out.shape))

        return attend

    if rows.attention.paths is None:
        yield "flash", attention_by(SDPBackend.FLASH_ATTENTION, causal_lower_right(nodes, total), True)
    backends = (SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION)
    for backend in backends if own.is_cuda else (SDPBackend.MATH,):
        yield backend.name.lower(), attention_by(backend, bias.expand(places, 1, -1, -1), False)


class Pricer:
    """Times forwards of one model over a cache; ``fuse`` compiles a product and what follows it."""

    def __init__(self, model: nn.Module, cache: KVCache, fuse: Callable[[Any], Any]) -> None:
        self.model, self.cache, self.exact = model, cache, FusedTarget(model, None)
        self.device, self.failed = self.exact.device, dict[str, str]()
        add, gated, head = products.add_product_ref, products.gated_product_ref, products.head_product_ref
        of_part = {"qkv_product": qkv_product, "o": add, "gated_product": gated, "down": add, "head_product": head}
        self.products = [(part, "cublas", fuse(run)) for part, run in of_part.items()]

    def forward(self, rows: ForwardRows, is_prompt: bool, parts: Mapping[str, Any]) -> tuple[Any, Tensor]:
        """Return the forward with ``parts`` in place of ours, a graph on a GPU, and the logits that it writes."""
        ops = PartOps(self.exact.ops.use_kernels, parts, self.exact.intermediate_size)
        target, capacity, count = FusedTarget(self.model, None, ops), self.cache.capacity, len(rows.tokens)
        target.reserve_positions(capacity)
        bufs = target.new_buffers(rows.places, rows.nodes, 1 if is_prompt else count, capacity)
        last = torch.full((1,), count - 1, device=self.device) if is_prompt else None
        run = partial(target.forward, rows, self.cache, bufs, last)
        return (capture(run) if self.device.type == "cuda" else run), bufs.logits

    def time_ms(self, run: Callable[[], object], rounds: int) -> float:
        """Time a forward: milliseconds, the median of means of four in a row."""
        return statistics.median(time_queued_us(run, self.device, 4) for _ in range(rounds)) / 1e3

    @torch.inference_mode()
    def price(self, places: int, nodes: int, prefix: int, is_prompt: bool = False) -> dict[str, Any]:
        """Choose free parts one after another by the whole forward's time, then time exact and free in turn."""
        rows = lay_out(places, nodes, prefix, is_prompt or nodes == 1, self.device)
        exact, expected = self.forward(rows, is_prompt, {})
        exact()
        best, parts, names = self.time_ms(exact, 3), dict[str, Any](), dict[str, str]()
        group = self.exact.num_heads // self.exact.num_kv_heads
        others = (("tree_attention", *each) for each in attentions(rows, prefix, group, expected.dtype))
        for part, name, run in [*self.products, *others]:
            try:
                free, logits = self.forward(rows, is_prompt, parts | {part: run})
                free()
                if (logits.float() - expected.float()).norm() > MOST_DIFFERENT * expected.float().norm():
                    raise RuntimeError("other logits")
                time_ms = self.time_ms(free, 3)
            except RuntimeError as error:
                self.failed[f"{part} by {name}, {places} x {nodes} rows after {prefix}"] = str(error).split("\n")[0]
                continue
            if time_ms < best:
                best, parts, names = time_ms, parts | {part: run}, names | {part: name}
        free, _ = self.forward(rows, is_prompt, parts)
        times = zip(*[[self.time_ms(run, 1) for run in (exact, free)] for _ in range(10)], strict=True)
        exact_ms, free_ms = map(statistics.median, times)
        return {"exact_ms": exact_ms, "free_ms": free_ms, "percent": 100 * (exact_ms / free_ms - 1), "free": names}


def measure(
    pricer: Pricer, places: int, prefixes: tuple[int, ...] = (512, 8192), chunk: int = 512
) -> Iterator[dict[str, Any]]:
    """Measure a row for plain decoding and every tree after every prefix, and for every prompt."""
    for nodes in (1, 16, 60):
        for prefix in prefixes:
            yield {"places": places, "nodes": nodes, "prefix": prefix, **pricer.price(places, nodes, prefix)}
        # Every number of rows is compiled by itself, up to a limit of PyTorch's.
        torch.compiler.reset()
    for prompt in prefixes:
        # A chunk's time grows evenly with the tokens before it.
        chunks = [pricer.price(1, chunk, begin, is_prompt=True) for begin in sorted({0, prompt - chunk})]
        names = ("exact_ms", "free_ms")
        exact_ms, free_ms = (prompt // chunk * statistics.mean(row[name] for row in chunks) for name in names)
        percent = 100 * (exact_ms / free_ms - 1)
        yield {"prompt": prompt, "exact_ms": exact_ms, "free_ms": free_ms, "percent": percent, "chunks": chunks}


def main(argv: list[str] | None = None) -> None:
    """Run the benchmark; `--help` lists the options."""
    command = Command("price", __doc__)
    command.add_argument("--dims", default="llama-3.1-8b", choices=("llama-3.1-8b", *TIED))
    command.add_argument("--places", type=whole_from(1), default=1, help="sequences side by side (default: 1)")
    args = command.parse_args(argv)
    device = command.gpu()
    model = random_target(args.dims, MODELS[args.dims], torch.bfloat16, device)
    cache = KVCache.allocate(FusedTarget(model, None), args.places, 8192 + 512)
    for keys, values in cache.stacks:
        keys.normal_()
        values.normal_()
    pricer = Pricer(model, cache, partial(torch.compile, dynamic=False))
    result: dict[str, Any] = {"dims": args.dims, "machine": machine(device), "failed": pricer.failed, "rows": []}
    for row in measure(pricer, args.places):
        show(row)
        result["rows"].append(row)
        write(result, args.out)
    print("\n".join(f"not run: {name}: {reason}" for name, reason in pricer.failed.items()), flush=True)


if __name__ == "__main__":
    main()
