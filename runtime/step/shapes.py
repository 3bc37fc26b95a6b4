"""Choose the draft tree of every step: the shape with the most expected tokens a second, by what is measured here.

    tokens a second = sequences * expected tokens(shape) / step time(shape, batch, context)

`Costs` holds step times of this device, `Acceptance` how often drafted tokens were accepted, both kept by the model
from call to call; a `ShapeChooser` is one call's. Where every row is exact the text does not depend on the shape, so
that a call may change it between two steps, or decode plainly and come back. Elsewhere `shape_by_size` fixes it before
the call, from sizes alone.

**Expected tokens.** With p_l the probability that the best child at level l is accepted once its parent is, a shape of
d levels gives ``1 + sum over l of the product over i <= l of H_i``. A chain has ``H_i = p_i``; a tree catches other
children, too: ``H_i = 1 - (1 - p_i) ** width``, of a constant width. p_l is learned by the model and, with more weight,
by the call; a level not seen yet is taken to be like the one above it. Each shape has a correction factor, its *gain*,
learned from its own steps: tokens accepted over tokens expected from the best children of the same steps, so that it
depends neither on the text nor on what was known before.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import TypeAlias

from ..settings import TreeConfig

Shape: TypeAlias = "TreeConfig | None"
"""None decodes plainly."""
CHAIN, SHORT, LONG, LARGE = TreeConfig(1, 1, 3), TreeConfig(2, 4, 8), TreeConfig(5, 4, 16), TreeConfig(5, 10, 60)
SHAPES: tuple[Shape, ...] = (None, CHAIN, SHORT, LONG, LARGE)
"""From plain decoding to the 60 nodes of EAGLE-3."""
OF_MIXTURES: tuple[Shape, ...] = (None, TreeConfig(0, 1, 2), CHAIN, TreeConfig(2, 1, 4), SHORT, LONG)
"""Of a target with experts, of which each row of a pass reads more."""
ON_CPU = (TreeConfig(0, 1, 2), CHAIN, TreeConfig(1, 3, 4))
"""Products of four rows are the largest that take a CPU little longer than of one."""

MAX_ROWS = 256
"""Rows of a pass of all sequences beyond which it costs more than a larger tree gives."""
_FIRST_RATE = 0.5
"""Guess of p_1, which a few steps correct."""
_WIDTHS = {CHAIN: 1.0, SHORT: 1.5, LONG: 1.6, LARGE: 1.9}
"""Their widths on real text."""
_MODEL, _CALL, _SEQUENCE = (4.0, 80.0), (8.0, 128.0), (4.0, 200.0)
"""Of what the model, a call and a sequence learn: weight of the prior in observations, and observations after which an
old one counts a third (exponential forgetting)."""
_SHAPE_WEIGHT, _HOPE = 64.0, 0.6
"""Weight of a shape's prior, in drafted tokens, and a bonus that shrinks with its tries, so that it is tried again."""
_SHAPE_CALL_WEIGHT = 40.0
"""Weight of the model's gain of a shape in that of a call, in drafted tokens."""
_SWITCH = 1.02
"""Least gain for which the shape changes, so that it does not flap."""
_EVERY = 3
"""Steps that keep a choice, or a probe: taking the waiting pairs, before the first of them, is paid once for all."""
_PROBE_SHARE = 0.004
"""Share of the time of plain steps that probes may cost; taking the waiting pairs is not counted."""
_PROBE_FIRST = 1.2
"""Plain steps that probes may cost besides for every new sequence: its text may be of another kind."""


class _Rate:
    """A success rate with exponential forgetting."""

    def __init__(self, memory: float) -> None:
        self._keep, self.hits, self.tries = 1 - 1 / memory, 0.0, 0.0

    def add(self, hits: float, tries: float) -> None:
        keep = self._keep**tries
        self.hits, self.tries = self.hits * keep + hits, self.tries * keep + tries

    def given(self, prior: float, weight: float) -> float:
        """Estimate the rate from a prior that counts as ``weight`` observations."""
        return (self.hits + prior * weight) / (self.tries + weight)


class _Levels:
    """Rates at which the best child of each level was accepted."""

    def __init__(self, weight: float, memory: float) -> None:
        self._weight, self._memory = weight, memory
        self._rates: list[_Rate] = []

    def add(self, level: int, hits: int, tries: int) -> None:
        if level == len(self._rates):
            self._rates.append(_Rate(self._memory))
        self._rates[level].add(hits, tries)

    def given(self, priors: Sequence[float] | None, num_levels: int) -> list[float]:
        """Estimate the rates from those of ``priors``; without, each from the level above it."""
        found = list[float]()
        for level in range(num_levels):
            prior = priors[level] if priors is not None else found[-1] if found else _FIRST_RATE
            found.append(self._rates[level].given(prior, self._weight) if level < len(self._rates) else prior)
        return found


class Acceptance:
    """Acceptance of the best child at each level, and the gain of each shape; kept by a model."""

    def __init__(self) -> None:
        self.levels = _Levels(*_MODEL)
        self._gains: dict[TreeConfig, _Rate] = {}

    def gain(self, shape: TreeConfig) -> _Rate:
        """Return drafted tokens that a shape had accepted, over those expected."""
        return self._gains.setdefault(shape, _Rate(_MODEL[1]))


class Costs:
    """Step times of this device, ms, by shape, batch (sequences that a step is launched for) and context.

    A context that was not measured takes the time of the nearest that was, and for each token more the time to read its
    keys and values (``token_bytes``) as fast as a plain step reads the target's ``weight_bytes``.
    """

    def __init__(self, weight_bytes: int, token_bytes: int, is_mixture: bool = False) -> None:
        self._weight_bytes, self._token_bytes, self._is_mixture = weight_bytes, token_bytes, is_mixture
        self.times: dict[tuple[Shape, int], dict[int, tuple[float, float]]] = {}
        """For each octave of contexts: a mean context and a mean time."""
        self._fastest: dict[int, float] = {}
        """Of plain steps, by batch."""

    def add(self, shape: Shape, batch: int, context: float, ms: float) -> None:
        """Take the time of a step, of ``context`` tokens in the mean of its sequences."""
        octaves, octave = self.times.setdefault((shape, batch), {}), math.frexp(context)[1]
        mean, old = octaves.get(octave, (context, ms))
        # Another program, or a slow host, makes single steps long.
        octaves[octave] = (mean + 0.1 * (context - mean), old + 0.1 * (min(ms, 1.5 * old) - old))
        if shape is None:
            self._fastest[batch] = min(time for _, time in octaves.values())

    def get(self, shape: Shape, batch: int, context: float) -> float | None:
        """Return the time of a step; None before one was measured for a batch of this size."""
        octaves = self.times.get((shape, batch))
        if octaves is None:
            return None
        octave = math.frexp(context)[1]
        at, ms = octaves.get(octave) or octaves[min(octaves, key=lambda other: abs(other - octave))]
        each_token = batch * self._token_bytes / self._weight_bytes * self._fastest.get(batch, 0.0)
        return max(0.5 * ms, ms + (context - at) * each_token)

    def guess(self, shape: Shape, batch: int, context: float) -> float:
        """Return the time of a step, or guess it from the shapes measured for a batch of this size, by levels.

        Of a mixture by nodes, each of which may read other experts: no shape is tried for a time that is too short.
        """
        measured = self.get(shape, batch, context)
        if measured is not None:
            return measured
        known = {other: self.get(other, batch, context) for other, of in self.times if of == batch}
        plain = known.get(None)
        drafted = {other: ms for other, ms in known.items() if other is not None and ms is not None}
        if plain is None or not drafted or shape is None:
            return next((ms for ms in known.values() if ms is not None), 1.0)

        def size(tree: TreeConfig) -> int:
            return tree.total_tokens - 1 if self._is_mixture else tree.depth + 1

        nearest = min(drafted, key=lambda other: abs(size(other) - size(shape)))
        return plain + (drafted[nearest] - plain) * size(shape) / size(nearest)


class ShapeChooser:
    """Chooses the shape of each step of one call, among ``shapes``; the first one begins."""

    def __init__(self, acceptance: Acceptance, costs: Costs, shapes: Sequence[Shape]) -> None:
        self._learned, self._costs, self._shapes = acceptance, costs, tuple(shapes)
        self._num_levels = max(0 if shape is None else shape.depth for shape in shapes) + 1
        self._call = _Levels(*_CALL)
        self._gains: dict[TreeConfig, _Rate] = defaultdict(lambda: _Rate(_CALL[1]))
        self._sequences: dict[int, _Levels] = {}
        self._rates: dict[int, list[float]] = {}
        """Of each sequence, p of each level, as of the last choice."""
        # Where times are known, the first step chooses, too.
        self._shape = self._taken = self._shapes[0]
        self._since, self._credit_ms = _EVERY, 0.0
        self.steps: Counter[Shape] = Counter()
        """Steps that each shape had, counted by whoever runs them."""
        self.num_drafts = self.num_accepted = 0
        """Drafts of all sequences, and the tokens that the passes over them gave."""

    def next(
        self, batch: int, context: float, sequences: Sequence[int], ready: Callable[[Shape], bool] = lambda _: True
    ) -> Shape:
        """Choose the next step's shape, for ``batch`` sequences of ``context`` tokens in the mean.

        ``sequences``: numbers of those that run; ``ready``: whether the kernels of a shape are compiled. Those of plain
        decoding are waited for.
        """
        usable = [each for each in shapes_for(batch, self._shapes) if each is None or ready(each)]
        self._since += 1
        if self._taken in usable and (self._since <= _EVERY or self.is_unmeasured(self._taken, batch)):
            return self._taken
        self._since = 1
        costs = {each: self._costs.guess(each, batch, context) for each in usable}
        new = [each for each in sequences if each not in self._sequences]
        # Those that have ended are forgotten: a server's are without end.
        self._sequences = {each: self._sequences.get(each) or _Levels(*_SEQUENCE) for each in sequences}
        self._credit_ms += _PROBE_FIRST * costs.get(None, 0.0) * len(new) / max(1, len(sequences))
        self._rates = dict(zip(sequences, self._rates_of(sequences), strict=True))
        by_sequence = self._rates.values()
        # Expected tokens of a sequence a millisecond.
        rates = {
            each: sum(self.expected(each, levels) for levels in by_sequence) / len(by_sequence) / ms
            for each, ms in costs.items()
        }
        best = max(rates, key=rates.__getitem__)
        if rates[best] > rates.get(self._shape, 0.0) * _SWITCH:
            self._shape = best
        self._taken = self._probe(rates, costs) if self._shape is None else self._shape
        return self._taken

    def _probe(self, rates: Mapping[Shape, float], costs: Mapping[Shape, float]) -> Shape:
        """Draft now and then while decoding plainly, to learn; what all probes cost is bounded."""
        plain = costs[None]
        self._credit_ms += _PROBE_SHARE * _EVERY * plain
        probe = max((shape for shape in rates if shape is not None), key=rates.__getitem__, default=None)
        if probe is None:
            return None
        # Its time, less that of plain steps for as many tokens.
        loss = _EVERY * max(costs[probe] * (1 - rates[probe] * plain), 0.05 * plain)
        if self._credit_ms < loss:
            return None
        self._credit_ms -= loss
        return probe

    def is_unmeasured(self, shape: Shape, batch: int) -> bool:
        """Return whether no step of this shape was timed for a batch of this size."""
        return (shape, batch) not in self._costs.times

    def time(self, shape: Shape, batch: int, context: float, ms: float) -> None:
        """Take the time of a step; the first of a shape lets the next step choose anew."""
        if self.is_unmeasured(shape, batch):
            self._since = _EVERY
        self._costs.add(shape, batch, context, ms)

    def expected(self, shape: Shape, levels: Sequence[float]) -> float:
        """Return the tokens of a pass that are expected, the target's own among them; ``levels``: p of each."""
        if shape is None:
            return 1.0
        gain = self._learned.gain(shape)
        hope = _HOPE / math.sqrt(_SHAPE_WEIGHT + gain.tries)
        of_call = self._gains[shape].given(gain.given(1.0, _SHAPE_WEIGHT), _SHAPE_CALL_WEIGHT)
        return 1 + _drafted(levels[: shape.depth + 1], _width_of(shape)) * (of_call + hope)

    def _rates_of(self, sequences: Sequence[int]) -> list[list[float]]:
        """Return p of each level, for each of the sequences: its own steps count most, then the call's, the model's."""
        call = self._call.given(self._learned.levels.given(None, self._num_levels), self._num_levels)
        return [self._sequences[each].given(call, self._num_levels) for each in sequences]

    def see(self, shape: Shape, verdicts: Mapping[int, Sequence[int]]) -> None:
        """Take the verdicts on one step's drafts: by sequence, the rank of each accepted node, in order."""
        if shape is None or not verdicts:
            return
        num_tokens = sum(map(len, verdicts.values()))
        self.num_drafts += len(verdicts)
        self.num_accepted += len(verdicts) + num_tokens
        # Deeper levels of a small tree lack nodes.
        full = shape.depth + 1 if shape.top_k == 1 else min(shape.depth + 1, max(1, shape.total_tokens // 4))
        for sequence, ranks in verdicts.items():
            of_sequence = self._sequences.setdefault(sequence, _Levels(*_SEQUENCE))
            for level in range(min(full, len(ranks) + 1)):
                is_best = len(ranks) > level and ranks[level] == 0
                for learned in (self._learned.levels, self._call, of_sequence):
                    learned.add(level, is_best, 1)
        expected = 0.0
        if not self._rates.keys() >= verdicts.keys():
            self._rates = dict(zip(verdicts, self._rates_of([*verdicts]), strict=True))
        for sequence, ranks in verdicts.items():
            chained = len(list(takewhile(lambda rank: rank == 0, ranks)))
            levels = self._rates[sequence][: shape.depth + 1]
            expected += chained * _drafted(levels, _width_of(shape)) / _drafted(levels, 1.0)
        for gain in (self._learned.gain(shape), self._gains[shape]):
            gain.add(num_tokens, expected)


def _drafted(levels: Sequence[float], width: float) -> float:
    """Return the drafted tokens that are expected to be accepted, by the rates of the levels alone."""
    expected, reached = 0.0, 1.0
    for rate in levels:
        reached *= 1 - (1 - rate) ** width
        expected += reached
    return expected


def _width_of(shape: TreeConfig) -> float:
    return _WIDTHS.get(shape, 1.0 if shape.top_k == 1 else _WIDTHS[LONG])


def shapes_up_to(tree: TreeConfig, shapes: Sequence[Shape] = SHAPES) -> tuple[Shape, ...]:
    """List the shapes within a tree's depth, top_k and number of nodes, and the tree itself, the largest last."""
    within = [
        shape
        for shape in shapes
        if shape is None
        or (shape.depth <= tree.depth and shape.top_k <= tree.top_k and shape.total_tokens < tree.total_tokens)
    ]
    return (*within, tree)


def shapes_for(batch: int, shapes: Sequence[Shape]) -> list[Shape]:
    """List those of the shapes that are not too large for as many sequences in a step."""
    return [shape for shape in shapes if shape is None or shape.total_tokens * batch <= MAX_ROWS]


def first_shape(batch: int, shapes: Sequence[Shape], is_mixture: bool = False) -> Shape:
    """Return the shape to begin with before anything was measured: smaller the more sequences a step has."""
    wanted = CHAIN if is_mixture or batch > 8 else LARGE if batch <= 2 else LONG
    return _largest_within(wanted, shapes)


def shape_by_size(is_gpu: bool, batch: int, weight_bytes: int, draft_bytes: int, shapes: Sequence[Shape]) -> Shape:
    """Fix a call's shape from sizes alone, where the text may depend on it.

    ``weight_bytes``: of the target; ``draft_bytes``: that drafting one level reads. A level takes as long as its
    bytes, and one that reads half of what the target does never pays.
    """
    if is_gpu and 2 * draft_bytes > weight_bytes:
        return None
    if is_gpu and 12 * draft_bytes > weight_bytes:
        return _largest_within(CHAIN, shapes)
    return first_shape(batch, shapes) if is_gpu else _largest_within(ON_CPU[-1] if batch <= 2 else ON_CPU[0], shapes)


def _largest_within(wanted: TreeConfig, shapes: Sequence[Shape]) -> Shape:
    trees = [shape for shape in shapes if shape is not None and shape.total_tokens <= wanted.total_tokens]
    return trees[-1] if trees else shapes[-1]
