"""The plan of a call, decided before it begins: rules of its choices, trees, slots, and partial verification.

Also the `Source` that a generation loop takes its requests from; a server's is a queue (`serve.engine`).
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..api.options import Call, read_count, read_flag
from ..api.request import Request
from ..api.sampling import PENALTIES
from ..errors import UnsupportedModelError, UsageError
from ..settings import PartialVerification, SamplingConfig, TreeConfig
from ..target.short_cache import full_passes_reason
from ..target.wrapper import TargetModel
from .decoders import Decoders
from .graphs import bucket_of
from .kernels.choice_kernels import COLDEST, ChoiceRules
from .kernels.choose_tokens import token_bits
from .shapes import OF_MIXTURES, ON_CPU, SHAPES, first_shape, shape_by_size, shapes_up_to

DEFAULT_MAX_SLOTS = 16
_BY_KERNELS = {"repetition_penalty", "min_new_tokens", "suppress_tokens"}
"""Options whose processors the kernels know."""


@dataclass(frozen=True)
class CallRules:
    """Rules by which the requests of a call choose tokens.

    On the device the kernels do all of it. On the host, ``host_reason`` saying why, ``Request.process`` applies the
    processors, and ``rules`` are without their stages.
    """

    rules: ChoiceRules
    numbers: Tensor
    """float32 [6] on the CPU, as a slot's in `ChoiceState`."""
    suppressed: Tensor | None = None
    """Bits of suppressed ids, if there are any."""
    host_reason: str | None = None

    @classmethod
    def of(
        cls,
        options: Mapping[str, Any],
        sampling: SamplingConfig,
        requests: Sequence[Request],
        vocab_size: int,
        device: torch.device,
    ) -> CallRules:
        """Read the rules of a call from joined options; all requests of a call have the same processors."""
        names = {name for request in requests if request.process is not None for name in request.process.names}
        # A bad word of one token is a suppressed one, unless it ends the answer, which transformers lets it.
        words = [list(word) for word in options.get("bad_words_ids", ())] if "bad_words_ids" in names else []
        if all(len(word) == 1 for word in words):
            names = {"suppress_tokens" if name == "bad_words_ids" else name for name in names}
        ends = {token for request in requests for token in request.eos_ids}
        barred = {*options.get("suppress_tokens", ()), *(word[0] for word in words if word[0] not in ends)}
        reason = f"the model is on {device}" if device.type != "cuda" else None
        if reason is None and not names <= _BY_KERNELS:
            reason = f"{min(names - _BY_KERNELS)} is applied on the host"
        known = names if reason is None else set()
        sampled = not sampling.is_greedy
        rules = ChoiceRules(
            sampled=sampled,
            has_top_k=sampled and sampling.top_k > 0,
            has_top_p=sampled and sampling.top_p < 1,
            has_min_p=sampled and sampling.min_p > 0,
            has_penalty="repetition_penalty" in known,
            has_suppressed="suppress_tokens" in known,
            has_minimum="min_new_tokens" in known,
        )
        temperature = 0 if sampling.is_greedy else max(sampling.temperature, COLDEST.value)
        warpers = temperature, sampling.top_k or vocab_size, sampling.top_p, sampling.min_p
        numbers = *warpers, options.get("repetition_penalty", 1), options.get("min_new_tokens", 0)
        bits = token_bits(torch.tensor(sorted(barred), dtype=torch.int64), vocab_size) if rules.has_suppressed else None
        return cls(rules, torch.tensor(numbers, dtype=torch.float32), bits, reason)


class Source:
    """Requests for a loop, whose thread alone calls this: those of one call, by rules that are the same for all."""

    def __init__(self, requests: Sequence[Request], rules: CallRules) -> None:
        self._waiting, self._rules = deque(each for each in requests if each.finish_reason is None), rules
        self.num_slots = len(self._waiting)
        """Most that run side by side."""
        self.prompt_lengths: Sequence[int] = [len(each.prompt_ids) for each in self._waiting]
        """Tokens of the prompts that are known before."""
        self.max_tokens = max((each.max_tokens for each in self._waiting), default=0)
        """Most tokens of a prompt and its answer."""

    def has_waiting(self) -> bool:
        """Return whether there is a request to take; asked while no other runs, it may wait for one for a moment."""
        return bool(self._waiting)

    def take(self, number: int) -> list[tuple[Request, CallRules]]:
        """Take up to ``number`` requests, those first that came first."""
        return [(self._waiting.popleft(), self._rules) for _ in range(min(number, len(self._waiting)))]

    def publish(self, waits: bool = False) -> None:
        """Look at what requests have become: called where some have new tokens, or have ended.

        ``waits``: whether the loop's thread is about to wait for the device.
        """

    def fail(self, request: Request, error: Exception) -> None:
        """Take note that a request has failed; raises where all others are to fail with it."""
        raise error


@dataclass(frozen=True)
class Plan:
    """Decisions on how one call runs; ``reason``: why these shapes."""

    rules: CallRules
    shapes: tuple[TreeConfig | None, ...]
    """Trees that its steps may have, the first step's first; None decodes plainly."""
    reason: str
    max_slots: int
    time_phases: bool
    reuse_prefix: bool
    partial: PartialVerification | None
    """Sizes of partial verification (`partial`); None where every pass is full."""
    full_reason: str
    """Why every pass is full where partial verification was asked for."""
    stages: tuple[ChoiceRules, ...]
    """Stages of steps and chunks: the first of these that covers the rules of all their requests; each covers those
    before it."""
    is_exact: bool
    """Whether drafted tokens equal plain ones but for the target's rounding (`TargetModel.exactness`)."""
    is_service: bool = False
    """Whether requests come without end: times are not kept, and between two steps runs one chunk of a prompt."""
    max_entering: int = 1
    """Prompts of one chunk that a service runs between two steps."""

    @property
    def tree(self) -> TreeConfig | None:
        """The tree of the first step, and of all steps where none is chosen."""
        return self.shapes[0]

    @property
    def is_drafted(self) -> bool:
        """Whether a step may have a tree."""
        return any(shape is not None for shape in self.shapes)


def plan_call(
    target: TargetModel,
    decoders: Decoders,
    call: Call,
    is_tree_sized: bool,
    *,
    max_slots: int = DEFAULT_MAX_SLOTS,
    speculative: bool = True,
    reuse_prefix: bool = False,
    time_phases: bool = False,
    partial_verification: str | None = None,
) -> Plan:
    """Plan a call; options as in `SpeculativeModel.generate`.

    ``is_tree_sized``: whether trees are chosen (`shapes`), up to the drafter's, instead of being that. Raises
    `UsageError` for options that contradict each other, `UnsupportedModelError` for a target without partial passes.
    """
    max_slots = read_count("max_slots", max_slots, 1)
    for name, value in (("speculative", speculative), ("reuse_prefix", reuse_prefix), ("time_phases", time_phases)):
        read_flag(name, value)
    rules = CallRules.of(call.options, call.sampling, call.requests, target.runs.vocab_size, target.device)
    slots = max(1, min(len(call.requests), max_slots, DEFAULT_MAX_SLOTS))
    context = max((len(request.prompt_ids) for request in call.requests), default=1)
    shapes: tuple[TreeConfig | None, ...] = (decoders.tree if speculative else None,)
    reason = "asked for"
    if speculative and is_tree_sized:
        fixed_for = rules.host_reason or (partial_verification and "partial verification")
        shapes, reason = _choose_shapes(target, decoders, slots, fixed_for)
    tree = shapes[0]
    partial, full_reason = None, ""
    if partial_verification is not None:
        partial, full_reason = _choose_partial(partial_verification, target, call.requests, rules, tree, context)
    # Processors that are not ours may look at more than a row.
    is_ours = all(set(PENALTIES).issuperset(request.process.names) for request in call.requests if request.process)
    is_exact = is_ours and (partial is None or partial.mode == "exact")
    by_phase = time_phases or not decoders.has_graphs
    decided = (rules, shapes, reason, max_slots, by_phase, reuse_prefix, partial, full_reason)
    return Plan(*decided, (rules.rules,), is_exact)


def plan_service(plan: Plan, weight_bytes: int) -> Plan:
    """Plan for requests that come without end, with any rules, from the plan of a greedy call.

    ``weight_bytes``: of the target. Short prompts of a small one enter together: they take less time than a chunk of a
    large one's.
    """
    greedy = plan.rules.rules
    sampled = replace(greedy, sampled=True)
    by_share = replace(sampled, has_top_p=True, has_min_p=True)
    # Searching for top-k takes long for slots without one.
    stages = (greedy, sampled, by_share, replace(by_share, has_top_k=True, has_penalty=True))
    max_entering = min(8, max(1, 2**32 // weight_bytes))
    return replace(plan, stages=stages, time_phases=False, is_service=True, max_entering=max_entering)


def describe(
    plan: Plan, target: TargetModel, decoders: Decoders, drafting: str, steps: Mapping[TreeConfig | None, int]
) -> str:
    """Describe what ran, with the reasons; ``steps``: those of each shape, where they chose it."""
    how = "steps from CUDA graphs"
    if not decoders.has_graphs:
        how = f"eager steps ({decoders.eager_reason})"
    elif decoders.eager_reason is not None:
        how += f" but for the target ({decoders.eager_reason})"
    if plan.rules.host_reason is not None and decoders.has_graphs:
        how += f", tokens chosen on the host ({plan.rules.host_reason})"
    rows = target.exactness or "rows are not exact"
    trees = ", ".join(f"{_words(shape)} in {count} steps" for shape, count in Counter(steps).most_common())
    path = f"{how}; target {target.backend}; {rows}; {drafting}; {trees or _words(plan.tree)} ({plan.reason})"
    if plan.partial is not None or plan.full_reason:
        path += f"; partial verification: {plan.full_reason or plan.partial}"
    return path


def _words(shape: TreeConfig | None) -> str:
    return "plain decoding" if shape is None else f"trees of {shape.total_tokens} nodes"


def _choose_shapes(
    target: TargetModel, decoders: Decoders, slots: int, fixed_for: str | None
) -> tuple[tuple[TreeConfig | None, ...], str]:
    """Choose the shapes of a call, the first step's first, and say why; ``fixed_for``: why steps cannot choose."""
    is_gpu, is_mixture, tree = target.device.type == "cuda", target.runs.is_mixture, decoders.tree
    shapes = shapes_up_to(tree, ON_CPU if not is_gpu else OF_MIXTURES if is_mixture else SHAPES)
    if decoders.eager_reason is not None or target.exactness is None:
        fixed_for = decoders.eager_reason or "rows are not exact"
    if fixed_for is None:
        first = first_shape(bucket_of(slots), shapes, is_mixture)
        others = [shape for shape in shapes if shape != first]
        return (first, *others), "the most tokens a second, as measured here"
    # Steps without graphs take as long as the host needs to launch them.
    draft_bytes = 0 if decoders.eager_reason else decoders.drafter.draft_bytes // (tree.depth + 1)
    fixed = shape_by_size(is_gpu, slots, target.weight_bytes, draft_bytes, shapes)
    return (fixed,), f"by sizes alone: {fixed_for}"


def _choose_partial(
    mode: str, target: TargetModel, requests: Sequence[Request], rules: CallRules, tree: TreeConfig | None, context: int
) -> tuple[PartialVerification | None, str]:
    """Return the sizes of a call's partial verification; or None, and why every pass is full."""
    option, reason = PartialVerification(mode), full_passes_reason(target.runs)
    if reason is not None:
        raise UnsupportedModelError(f"partial_verification cannot run this target: {reason}. Leave it out.")
    if mode == "lossy" and rules.host_reason is not None and any(request.process for request in requests):
        raise UsageError(
            'partial_verification="lossy" leaves out logits processors that run on the host. Give none, or "exact".'
        )
    if tree is None:
        return None, "every pass is full (plain decoding)"
    if context < option.min_length:
        return None, f"every pass is full ({context:,} tokens; runs ahead from {option.min_length:,})"
    return option, ""
