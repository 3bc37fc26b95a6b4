"""Drafts of the whole kernel with several programs, small enough for Triton's interpreter."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from eagle_slim.runtime.drafter.launch_params import Chip, LaunchParams, choose_launch
from eagle_slim.runtime.drafter.packing import Weights, pack_head
from eagle_slim.runtime.drafter.tuned_cache import always
from eagle_slim.runtime.drafter.workspace import allocate_workspace
from eagle_slim.runtime.settings import TreeConfig
from kernels.replaying import FIELDS, run
from support.drafting import problem, random_head, with_options


@dataclass(frozen=True)
class Case:
    programs: int
    tree: tuple[int, int, int]
    prefixes: list[int]
    num_new: list[int]
    active: list[int] | None = None
    head: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    fp8: bool = False
    change: Callable[[LaunchParams], LaunchParams] = lambda params: params
    smaller: tuple[int, int, int] | None = None
    """Tree to draft within the bound ``tree``."""


def groups_of(**split: int) -> Callable[[LaunchParams], LaunchParams]:
    return lambda params: replace(params, layout=replace(params.layout, split=split))


OPTIONS: dict[str, dict[str, Any]] = {
    "each tap normed": {
        **{"tap_norms": 3, "activation": "gelu", "sliding_window": 4},
        **dict.fromkeys(("norm_before_residual", "norm_output", "o_bias", "mlp_bias", "head_norms"), True),
    },
    "all taps normed": {"tap_norms": 1, "norm_output": True, "activation": "gelu_pytorch_tanh"},
}
"""Of a head, for `with_options`."""
FOURS, SOME = groups_of(fc=4, qkv=4, o=4, down=4), groups_of(fc=2, qkv=1, o=4, down=2)
FEWER = groups_of(fc=2, qkv=1, o=1, down=2)
EAGLE = {"kind": "eagle"}
MANY_NEW = [4, 30, 1, 12, 5], [16, 2, 1, 5, 9]
"""Prefixes, and more new tokens than rows."""

CASES = {
    "groups of four": Case(8, (3, 4, 20), [5], [3], change=FOURS),
    "alone, a smaller tree": Case(5, (2, 3, 15), [4, 30, 1, 12], [16, 2, 1, 5], [3, 0], smaller=(1, 3, 9)),
    "more new tokens than rows": Case(4, (2, 3, 15), *MANY_NEW, [3, 0, 4, 2], change=SOME),
    "eagle, more new tokens than rows": Case(3, (1, 2, 6), *MANY_NEW, [3, 0, 4], EAGLE, change=FEWER),
    "mixed, programs left out": Case(5, (2, 3, 15), [200, 3], [2, 7], head={"qkv_bias": True}, change=SOME),
    "more parts than programs": Case(3, (2, 3, 15), [70], [2], change=FOURS),
    "eagle": Case(6, (2, 4, 20), [7], [2], head={"kind": "eagle"}, change=groups_of(fc=2, qkv=1, o=2, down=4)),
    "fewer rows than programs": Case(7, (2, 5, 25), [5], [1], head={"draft_vocab": 5}),
    "widest": Case(4, (2, 16, 128), [5], [2], head={"draft_vocab": 61}),
    "fp8": Case(4, (2, 3, 15), [9, 4], [2, 5], [1], fp8=True, change=groups_of(fc=4, qkv=2, o=4, down=4)),
    "each tap normed, fp8": Case(
        5, (2, 3, 15), [9, 40], [2, 5], None, {}, {**OPTIONS["each tap normed"], "sliding_window": 20}, True, SOME
    ),
    "all taps normed": Case(
        6, (2, 3, 15), [9, 4], [2, 5], [1, 0], options={**OPTIONS["all taps normed"], "sliding_window": 2}
    ),
    "eagle, norms of heads": Case(
        5, (2, 3, 15), [70, 4], [2, 16], head={"kind": "eagle", "head_dim": 20}, options={"head_norms": True}
    ),
    "eagle, fp8": Case(4, (2, 3, 15), [9, 4], [2, 5], head={"kind": "eagle"}, fp8=True),
}


def draft(case: Case, chip: Chip, dtype: torch.dtype) -> dict[str, Any]:
    """Draft on poisoned memory, then compare with the replay and, in fp32, with the reference's tree."""
    head = with_options(random_head(dtype=dtype, **case.head), **case.options)
    weight_dtype = torch.float8_e4m3fn if case.fp8 else None
    tree = TreeConfig(*case.tree)
    cfg, features, _, bufs = problem(head, tree, case.prefixes, case.num_new, case.active, weight_dtype)
    params = case.change(choose_launch(cfg, chip))
    weights = Weights(head, pack_head(head, cfg, always(params)))
    bufs = replace(bufs, params=params, workspace=allocate_workspace(cfg, params, bufs.keys.device))
    if case.smaller is not None:
        bufs = bufs.of_tree(TreeConfig(*case.smaller))
    drafted = run(cfg, features, weights, bufs)
    left = [name for name in ("barrier", "node_arrivals") if bufs.workspace[name].any()]
    reference = drafted.reference_tree() if dtype == torch.float32 else drafted.tree
    different = [name for name in FIELDS if not torch.equal(getattr(drafted.tree, name), getattr(reference, name))]
    return {"agrees": drafted.agreement.agrees, "is": str(drafted.agreement), "different": different, "left": left}
