"""Attention over a prefix and each node's own ancestors, against one node and head at a time."""

from __future__ import annotations

import pytest
import torch
from eagle_slim.runtime.drafter.kernels.ancestor_attention import ancestor_attention_ref
from kernels.example_tree import CHAINS
from kernels.parts import ancestor_attention
from kernels.tolerances import OP_ATOL
from torch import Tensor

MAX_DEPTH = 8


def random_chain(slots: int, level: int, top_k: int) -> Tensor:
    """Chains of a random tree: each node of a level descends from some node of the level before."""
    chain = torch.full((slots, 16, MAX_DEPTH), -1, dtype=torch.int32)
    for slot in range(slots):
        paths: list[list[int]] = [[] for _ in range(top_k)]
        for above in range(1, level):
            parents = torch.randint(top_k, (top_k,)).tolist()
            paths = [paths[parent] + [(above - 1) * top_k + parent] for parent in parents]
        for node, path in enumerate(paths):
            chain[slot, node, : len(path)] = torch.tensor(path, dtype=torch.int32)
    return chain


def setup(
    slots: int, heads: int, kv_heads: int, head_dim: int, top_k: int, level: int, dtype: torch.dtype, device: str
) -> dict[str, object]:
    prefix = torch.randint(0, 90, (slots,), dtype=torch.int32)
    num_new = torch.randint(1, 17, (slots,), dtype=torch.int32)
    positions = 90 + 16 + top_k * max(level, 1)
    cache = (slots, kv_heads, positions, head_dim)
    angles = torch.rand(positions + MAX_DEPTH, head_dim // 2) * 6.3
    values: dict[str, object] = {
        "qkv": torch.randn(slots, 16, (heads + 2 * kv_heads) * head_dim), "keys": torch.randn(cache).to(dtype),
        "values": torch.randn(cache).to(dtype), "cos": angles.cos(), "sin": angles.sin(),
        "chain": random_chain(slots, level, top_k), "prefix": prefix, "num_new": num_new,
    }  # fmt: skip
    # Rows that nothing may read: everything after the rows in use.
    for slot in range(slots):
        end = int(prefix[slot] + (num_new[slot] + (level - 1) * top_k if level else 0))
        for name in ("keys", "values"):
            values[name][slot, :, end:] = float("nan")  # type: ignore[index]
        values["qkv"][slot, int(num_new[slot]) if level == 0 else top_k :] = float("nan")  # type: ignore[index]
    moved = {name: value.to(device) for name, value in values.items() if isinstance(value, Tensor)}
    return {**moved, "level": level, "heads": heads, "kv_heads": kv_heads, "top_k": top_k}


@pytest.mark.parametrize(
    ("slots", "heads", "kv_heads", "head_dim", "top_k", "level", "parts", "block_t", "window"),
    [
        (1, 2, 1, 16, 3, 0, 1, 64, None),
        (2, 4, 2, 20, 4, 1, 2, 16, None),
        (1, 6, 2, 64, 5, 3, 3, 16, None),
        (1, 3, 3, 96, 2, 4, 5, 32, None),
        pytest.param(2, 8, 1, 16, 16, 2, 8, 16, None, marks=pytest.mark.slow),
        (1, 4, 4, 6, 1, 6, 4, 16, None),
        pytest.param(1, 12, 1, 32, 10, 5, 1, 32, None, marks=pytest.mark.slow),
        # A window of the node alone, of some of its ancestors, of some new tokens, and of some of the prefix.
        (2, 2, 1, 8, 3, 4, 3, 16, 1),
        (2, 2, 1, 8, 3, 5, 1, 16, 3),
        (3, 2, 1, 8, 3, 0, 2, 16, 4),
        (2, 4, 2, 8, 3, 2, 6, 16, 37),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float16, marks=pytest.mark.slow)])
def test_equals_the_definition(
    slots: int, heads: int, kv_heads: int, head_dim: int, top_k: int, level: int, parts: int, block_t: int,
    window: int | None, dtype: torch.dtype, device: str,
) -> None:  # fmt: skip
    given = setup(slots, heads, kv_heads, head_dim, top_k, level, dtype, device)
    twin = {name: value.cpu().clone() if isinstance(value, Tensor) else value for name, value in given.items()}
    nodes = 1 if level == 0 else top_k
    out = ancestor_attention(**given, num_parts=parts, block_t=block_t, window=window)[:, :nodes]  # type: ignore[arg-type]
    wanted = ancestor_attention_ref(**twin, window=window)[:, :nodes]  # type: ignore[arg-type]
    torch.testing.assert_close(out.float().cpu(), wanted, rtol=0, atol=OP_ATOL[dtype])
    for name in ("keys", "values"):
        torch.testing.assert_close(
            given[name].float().cpu(), twin[name].float(), rtol=0, atol=OP_ATOL[dtype], equal_nan=True
        )  # type: ignore[union-attr]


@pytest.mark.parametrize("level", [0, 1, 3])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 20), (3, 3, 64), (6, 1, 96)])
def test_norms_of_queries_and_keys(level: int, heads: int, kv_heads: int, head_dim: int, device: str) -> None:
    given = setup(2, heads, kv_heads, head_dim, 3, level, torch.float32, device)
    # Of any size, which the norms take away; the smallest is not far above eps.
    given["qkv"] *= torch.logspace(-3, 2, 16, device=device)[None, :, None]  # type: ignore[operator]
    given["norms"], given["eps"] = torch.rand(2, head_dim, device=device) + 0.5, 1e-6
    twin = {name: value.cpu().clone() if isinstance(value, Tensor) else value for name, value in given.items()}
    nodes, atol = 1 if level == 0 else 3, OP_ATOL[torch.float32]
    out = ancestor_attention(**given, num_parts=3, block_t=16)[:, :nodes]  # type: ignore[arg-type]
    wanted = ancestor_attention_ref(**twin)[:, :nodes]  # type: ignore[arg-type]
    torch.testing.assert_close(out.cpu(), wanted, rtol=1e-5, atol=atol)
    keys: Tensor = given["keys"]  # type: ignore[assignment]
    torch.testing.assert_close(keys.cpu(), twin["keys"], rtol=0, atol=atol, equal_nan=True)


def test_a_node_sees_its_ancestors_only(device: str) -> None:
    """The worked example: slots 0 1 | 2 3 hold A B | C E; G, with chain [0, 2], sees A and C, never B or E."""
    given = setup(1, 2, 1, 16, 2, 3, torch.float32, device)
    chain, prefix, num_new = given["chain"], given["prefix"], given["num_new"]
    chain[0, :2, :2] = torch.tensor([CHAINS["G"], CHAINS["I"]])  # type: ignore[index]
    first = int(prefix[0] + num_new[0])  # type: ignore[index]

    def g(changed_slot: int | None) -> Tensor:
        copy = {name: value.clone() if isinstance(value, Tensor) else value for name, value in given.items()}
        if changed_slot is not None:
            copy["values"][0, :, first + changed_slot] += 5  # type: ignore[index]
        return ancestor_attention(**copy, num_parts=2, block_t=16)[0, 0]  # type: ignore[arg-type]

    untouched = g(None)
    seen = [slot for slot in range(4) if not torch.equal(g(slot), untouched)]
    assert seen == CHAINS["G"]
