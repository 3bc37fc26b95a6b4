"""`compare_servers`: the same prompts answered by running servers, their speeds, and whether their texts agree.

The servers answer each group of prompts one after another, in balanced orders, so that a machine that slows down does
so for all. A request begins with a line of its own, the same for all servers, so that no prefix cache holds its prompt.
Where a text differs from the first server's, both are asked again, untimed, for log-probabilities.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import version
from multiprocessing.pool import ThreadPool
from statistics import median

import numpy as np

from ..api.output import first_difference
from ..api.stats import GenerationStats, StepTimes
from ..errors import EagleSlimError
from .candidates import Candidate
from .options import CompareOptions
from .prompts import Prompt
from .recommend import recommend
from .report import Answer, Comparison, Finding, build_rows
from .run import Progress, balanced_orders, groups_of
from .server import Reply, Server, count_passes

_MOST_FAILURES = 3
"""Groups in a row without an answer after which a server is not asked again."""


def compare_servers(
    servers: Sequence[Server],
    prompts: Sequence[Prompt],
    *,
    concurrency: Sequence[int] = (1,),
    rounds: int = 1,
    max_new_tokens: int = 128,
    progress: Progress = lambda done, total: None,
    tell: Callable[[str], object] = lambda message: None,
) -> Comparison:
    """Let every server answer the first turn of every prompt greedily, and compare it with the first server.

    ``concurrency``: how many prompts are asked at once, the last group filled up from the beginning; ``rounds``: how
    often every prompt is asked. ``progress`` is called after each group with how many were answered of how many, and
    ``tell`` with each fault and each difference. Ctrl-C ends it early, as in `compare`.

    Raises `UsageError` for a number out of range, `EagleSlimError` where no server answers.
    """
    options = CompareOptions(modes=("greedy",), batches=concurrency, max_new_tokens=max_new_tokens)
    run = _Run(servers, prompts, options, rounds, tell)
    is_complete = run.answer_all(progress)
    if not run.answers:
        raise EagleSlimError(f"No server answers: {run.findings[0]}")
    candidates = [Candidate(each.label, each.label, each, tree=(0, 0, 0)) for each in servers]
    rows = build_rows(candidates, options, run.answers)
    setup = {
        "servers": [f"{each.label} ({each.url})" for each in servers],
        "num_prompts": len(prompts),
        "rounds": rounds,
        "max_new_tokens": max_new_tokens,
        "versions": {"eagle-slim": version("eagle-slim")},
    }
    measured = {row.label for row in rows if row.measured}
    advice = recommend(rows) if servers[0].label in measured and len(measured) > 1 else []
    return Comparison(rows, setup, advice, run.answers, is_complete, run.findings)


class _Run:
    """The requests of one comparison."""

    def __init__(
        self,
        servers: Sequence[Server],
        prompts: Sequence[Prompt],
        options: CompareOptions,
        rounds: int,
        tell: Callable[[str], object],
    ) -> None:
        self.servers, self.prompts, self.options, self.tell = servers, prompts, options, tell
        # A prefix cache may still hold the prompts of another run.
        self.prefix = secrets.token_hex(4)
        count = len(prompts)
        self.groups = [group for size in options.batches for _ in range(rounds) for group in groups_of(count, size)]
        self.failures = {server.label: 0 for server in servers}
        self.answers, self.findings = list[Answer](), list[Finding]()

    def answer_all(self, progress: Progress) -> bool:
        """Ask everything; returns whether it came to the end."""
        orders = balanced_orders(len(self.servers), np.random.default_rng(0))
        done, total = 0, len(self.servers) * len(self.groups)
        try:
            for server in self.servers:
                # First answers are slow. A fault is told when it comes again. The answer is counted before others are.
                server.counts(server.counts(), server.ask("Hi", 8).tokens)
            for number, group in enumerate(self.groups):
                replies, passes = dict[str, list[Reply]](), dict[str, tuple[float, float]]()
                for server in [self.servers[place] for place in next(orders)]:
                    if self.failures[server.label] < _MOST_FAILURES:
                        replies[server.label], passes[server.label] = self._ask(server, number)
                        self._check(server, group, replies[server.label])
                    done += 1
                    progress(done, total)
                self._compare(number, replies, passes)
        except KeyboardInterrupt:
            if not self.answers:
                raise
            return False
        return True

    def _ask(self, server: Server, number: int, with_logprobs: bool = False) -> tuple[list[Reply], tuple[float, float]]:
        """Ask a group at once; returns `count_passes` too, as what metrics count late is not the next group's."""
        texts = [self.prompts[place].turns[0] for place in self.groups[number]]
        asked = [f"[{self.prefix}-{number}-{slot}]\n{text}" for slot, text in enumerate(texts)]
        before = server.counts()
        with ThreadPool(len(asked)) as pool:
            found = pool.map(lambda text: server.ask(text, self.options.max_new_tokens, with_logprobs), asked, 1)
        return found, count_passes(before, server.counts(before, sum(reply.tokens for reply in found)), found)

    def _tell(self, finding: Finding) -> None:
        self.findings.append(finding)
        self.tell(str(finding))

    def _check(self, server: Server, group: Sequence[int], replies: Sequence[Reply]) -> None:
        """Tell what went wrong, and count the groups in a row without an answer."""
        for place, reply in zip(group, replies, strict=True):
            if reply.problem:
                self._tell(Finding(server.label, reply.problem, len(group), place))
        has_answered = any(reply.ended_s for reply in replies)
        self.failures[server.label] = 0 if has_answered else self.failures[server.label] + 1
        if self.failures[server.label] == _MOST_FAILURES:
            self._tell(Finding(server.label, f"not asked again, after {_MOST_FAILURES} times without an answer"))

    def _compare(
        self, number: int, replies: Mapping[str, Sequence[Reply]], passes: Mapping[str, tuple[float, float]]
    ) -> None:
        """Keep the answers to a group, and find where their texts differ from the first server's."""
        group, again, base = self.groups[number], list[Reply](), replies.get(self.servers[0].label, ())
        for server in [each for each in self.servers if each.label in replies]:
            own = replies[server.label]
            slots = [slot for slot, reply in enumerate(base) if reply.ended_s and own[slot].ended_s]
            differing = [slot for slot in slots if base[slot].text != own[slot].text]
            if any(reply.ended_s for reply in own):
                names, same = ("greedy", len(group), group[0], server.label, None), len(slots) - len(differing)
                self.answers.append(Answer(*names, same, len(slots), _stats(own, *passes[server.label])))
            if differing:
                again = again or self._ask(self.servers[0], number, with_logprobs=True)[0]
                own_again, _ = self._ask(server, number, with_logprobs=True)
                for slot in differing:
                    place = Finding(server.label, "", len(group), group[slot])
                    self._tell(_difference(place, (base[slot], own[slot]), (again[slot], own_again[slot])))


def _stats(replies: Sequence[Reply], passes: float, verified: float) -> GenerationStats:
    """Return the figures of a group; none unless every prompt has an answer whose tokens are known."""
    if not all(reply.ended_s and reply.tokens for reply in replies):
        return GenerationStats()
    total_s = max(reply.ended_s for reply in replies) - min(reply.began_s for reply in replies)
    first_s = median(reply.first_s - reply.began_s for reply in replies)
    # Only the sum of the passes' lengths is known.
    length, num_longer = divmod(int(verified), int(passes) or 1)
    lengths = {length: int(passes) - num_longer, length + 1: num_longer} if passes else {}
    num_tokens = sum(reply.tokens for reply in replies)
    return GenerationStats(lengths, num_tokens, total_s=total_s, steps=(StepTimes(first_s, 0.0, total_s - first_s),))


def _difference(place: Finding, timed: tuple[Reply, Reply], again: tuple[Reply, Reply]) -> Finding:
    """Say where a text begins to differ from the first server's; ``again``: both with log-probabilities."""
    character = first_difference(*(list(map(ord, reply.text)) for reply in timed)) or 0
    place = replace(place, message=f"differs from character {character} on", character=character)
    if any(one.text[: character + 1] != two.text[: character + 1] for one, two in zip(timed, again, strict=True)):
        return replace(place, message=f"{place.message}, but not when asked again")
    for token, ((expected, likely), (found, _)) in enumerate(zip(*(reply.choices for reply in again), strict=False)):
        if expected != found:
            margin = likely[expected] - likely[found] if found in likely else None
            words = f"token {token} is {found.decode(errors='replace')!r}, not {expected.decode(errors='replace')!r}"
            by = "" if margin is None else f", by {margin:.3f} in log-probability"
            return replace(place, message=f"{place.message}: {words}{by}", token=token, margin=margin)
    return place
