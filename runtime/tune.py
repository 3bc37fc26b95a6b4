"""Find launch parameters of the drafter for this GPU, and keep the best.

    EAGLE_SLIM_SHAPES=shapes.json eagle-generate ...                # or any other run: records what is launched
    python -m eagle_slim.runtime.tune --from-shapes shapes.json     # tunes what has no parameters for this GPU yet

Each shape's derived parameters are tried, and a few that differ from them in one thing each. All are checked against
the fp32 reference, then timed as CUDA-graph replays interleaved with those of the derived ones. The winner goes into
the cache (``EAGLE_SLIM_TUNED``, ``--out``, or the one in the package). Weights are random: speed does not depend on
values. A head has one stored layout for all slots, trees and vocabularies: the cache's, or else the derived one.
"""

from __future__ import annotations

import functools
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from statistics import median

import click
import torch
from eagle_slim.vocab_tools.common_cli import EagleCommand, example, run_cli

from .drafter.dimensions import DrafterConfig
from .drafter.kernels.weight_stream import Tile
from .drafter.launch import allocate_buffers, launch_drafter
from .drafter.launch_params import Chip, LaunchParams, StoredLayout, chip_of, choose_launch, chunk_inputs, stage_bytes
from .drafter.packing import PackedHead, Weights, pack_head
from .drafter.tuned_cache import TunedCache, always, cache_key, layout_key, open_tuned_cache, read_shapes
from .drafter.tuning.agreement import draft_and_replay
from .drafter.tuning.precompile import LaunchCase, compile_all
from .drafter.tuning.problem import Dims, draft_config, random_head, random_step
from .drafter.tuning.timing import capture, interleave
from .drafter.weights import HeadWeights
from .errors import DrafterError, UsageError

LEAST_GAIN = 0.005
"""Gains below half a percent are noise, and the derived parameters stay."""
PREFIX = 512

Variants = Mapping[str, LaunchParams]
Measure = Callable[[DrafterConfig, LaunchParams, LaunchParams], tuple[float, float]]
"""(configuration, derived, variant) to microseconds of both; raises `DrafterError` where the variant is wrong."""


@dataclass(frozen=True)
class Trial:
    """One line of the table."""

    name: str
    us: float
    derived_us: float
    fault: str = ""

    @property
    def gain(self) -> float:
        """Share of time that is saved."""
        return 0.0 if self.fault else 1 - self.us / self.derived_us


def variants(params: LaunchParams, cfg: DrafterConfig, chip: Chip) -> Variants:
    """Return variants over the same layout, each with one change that fits, most promising first."""

    def fits(name: str, tile: Tile) -> bool:
        divides = all(size % tile.block_k == 0 for size in chunk_inputs(cfg)[name])
        readable = tile.block_k >= 16 and (name == "head" or tile.block_k <= params.layout.chunks[name])
        return readable and divides and stage_bytes(cfg, name, tile) * tile.stages <= chip.shared_bytes * 0.9

    def with_tiles(change: Callable[[Tile], Tile]) -> LaunchParams | None:
        tiles = {name: change(tile) if fits(name, change(tile)) else tile for name, tile in params.tiles.items()}
        return replace(params, tiles=tiles) if tiles != params.tiles else None

    found: dict[str, LaunchParams | None] = {
        "one stage less": with_tiles(lambda tile: replace(tile, stages=max(1, tile.stages - 1))),
        "other keys per tile": replace(params, block_keys=32 if params.block_keys == 64 else 64),
        "half block_k, more stages": with_tiles(
            lambda tile: Tile(tile.block_n, tile.block_k // 2, min(8, 2 * tile.stages))
        ),
        "two stages less": with_tiles(lambda tile: replace(tile, stages=max(1, tile.stages - 2))),
        "one stage more": with_tiles(lambda tile: replace(tile, stages=tile.stages + 1)),
        "parts of 128 keys": replace(params, part_keys=128),
    }
    return {name: variant for name, variant in found.items() if variant is not None}


def trials_of(
    cfg: DrafterConfig, chip: Chip, layout: StoredLayout, num_variants: int | None = None
) -> tuple[LaunchParams, Variants]:
    """Return the derived parameters over a layout, and the first ``num_variants`` variants by name."""
    derived = choose_launch(cfg, chip, layout)
    return derived, dict(islice(variants(derived, cfg, chip).items(), num_variants))


def tune(
    cfg: DrafterConfig, derived: LaunchParams, tried: Variants, measure: Measure, left: Callable[[], float]
) -> tuple[LaunchParams, list[Trial]]:
    """Choose the derived parameters or one of the ``tried``; the best so far when no time (seconds) is ``left``."""
    trials: list[Trial] = []

    def attempt(name: str, params: LaunchParams) -> Trial:
        try:
            derived_us, us = measure(cfg, derived, params)
            trial = Trial(name, us, derived_us)
        except DrafterError as error:
            trial = Trial(name, float("inf"), float("inf"), str(error))
        except Exception as error:  # Triton has no common base for what does not compile or fit
            known = ("OutOfResources", "CompilationError", "CompileTimeAssertionFailure")
            if type(error).__name__ not in known and "PassManager" not in str(error):
                raise
            trial = Trial(name, float("inf"), float("inf"), f"{type(error).__name__}: {error}")
        trials.append(trial)
        return trial

    if attempt("derived", derived).fault:
        raise DrafterError(f"The derived launch parameters do not work here: {trials[0].fault}")
    for name, params in tried.items():
        if left() > 0:
            attempt(name, params)
    best = max(trials, key=lambda trial: trial.gain)
    return tried[best.name] if best.gain > LEAST_GAIN else derived, trials


class GraphTimer:
    """Measure by CUDA-graph replays of a random problem, after checking it against the fp32 reference."""

    def __init__(self, dims: Dims, device: torch.device, rounds: int) -> None:
        self.dims, self.device, self.rounds = dims, device, rounds
        self._head = functools.cache(functools.partial(random_head, dims, device))
        self._packed: tuple[object, HeadWeights, PackedHead] | None = None
        self._derived: tuple[DrafterConfig, LaunchParams, Callable[[], object]] | None = None

    def __call__(self, cfg: DrafterConfig, derived: LaunchParams, variant: LaunchParams) -> tuple[float, float]:
        """See `Measure`."""
        if self._derived is None or self._derived[:2] != (cfg, derived):
            self._derived = (cfg, derived, self._graph(cfg, derived))
        runs = {"derived": self._derived[2], "variant": self._graph(cfg, variant)}
        times = interleave(runs, self.device, self.rounds)
        return median(times["derived"]), median(times["variant"])

    def _graph(self, cfg: DrafterConfig, params: LaunchParams) -> Callable[[], object]:
        weights = self._weights(cfg, params)
        bufs = allocate_buffers(cfg, weights)
        features = random_step(cfg, PREFIX, 4, bufs)
        agreement = draft_and_replay(cfg, features, weights, bufs)
        if not agreement.agrees:
            raise DrafterError(f"the draft is wrong: {agreement}")
        return capture(lambda: launch_drafter(cfg, features, weights, bufs))

    def _weights(self, cfg: DrafterConfig, params: LaunchParams) -> Weights:
        """Return the head in one layout, packed once for all parameters over it."""
        key, launches = (params.layout, cfg.draft_vocab, cfg.weight_dtype), always(params)
        if self._packed is None or self._packed[0] != key:
            self._packed = None  # before the next one, so that there is room
            head = self._head(cfg.dtype).of_rows(slice(cfg.draft_vocab))
            self._packed = (key, head, pack_head(head, cfg, launches))
        _, head, packed = self._packed
        return Weights(head, replace(packed, launches=launches))


def recorded_configurations(path: Path, chip: Chip) -> list[tuple[Dims, DrafterConfig]]:
    """Read the drafts recorded on ``chip``, one for each key, those of a head together, the most launched first."""
    recorded = read_shapes(path)
    of_chip = [(cfg, launches) for (name, cfg), launches in recorded.items() if name == chip.name]
    if not of_chip:
        raise UsageError(
            f"{path} holds no shape of {chip.name} ({len(recorded)} of other GPUs). Use EAGLE_SLIM_SHAPES here."
        )
    counts = Counter[str]()
    for cfg, launches in of_chip:
        counts.update({layout_key(cfg, chip): launches, cache_key(cfg, chip): launches})

    def order(item: tuple[DrafterConfig, int]) -> tuple[int, str, int, int]:
        (cfg, launches), head = item, layout_key(item[0], chip)
        return -counts[head], head, -counts[cache_key(cfg, chip)], -launches

    wanted: dict[str, tuple[Dims, DrafterConfig]] = {}
    for cfg, _ in sorted(of_chip, key=order):
        # Biases and the length of the cache are in no key; a random head has none of the one, and a prefix of its own.
        dims, tree = Dims.of(cfg), cfg.tree
        with_prefix = draft_config(dims, cfg.draft_vocab, tree, cfg.num_slots, PREFIX, cfg.dtype, cfg.weight_dtype)
        wanted.setdefault(cache_key(cfg, chip), (dims, with_prefix))
    return list(wanted.values())


def print_trials(cfg: DrafterConfig, trials: list[Trial], best: LaunchParams) -> None:
    """Print the table of one shape."""
    weights = str(cfg.weight_dtype).removeprefix("torch.")
    print(f"hidden {cfg.hidden}, draft_vocab {cfg.draft_vocab}, {cfg.num_slots} slots, {weights}: {best.to_json()}")
    for trial in trials:
        shown = trial.fault or f"{trial.us:9.1f} us   derived {trial.derived_us:9.1f} us   {trial.gain:+.1%}"
        print(f"  {trial.name:40s} {shown}", flush=True)


@click.command(cls=EagleCommand, epilog=example("python -m eagle_slim.runtime.tune --from-shapes shapes.json"))
@click.option("--from-shapes", type=click.Path(), required=True, help="File that EAGLE_SLIM_SHAPES=FILE recorded.")
@click.option("--again", is_flag=True, help="Tune what has tuned parameters, too.")
@click.option("--rounds", type=click.IntRange(1), default=15, show_default=True, help="Samples of each variant.")
@click.option("--variants", type=click.IntRange(0), help="Try as many, the most promising. Default: all.")
@click.option("--budget", type=float, default=300, show_default=True, help="Seconds until no new variant is begun.")
@click.option("--out", type=click.Path(), help="Cache to add to. Default: the one that launches read.")
def run(from_shapes: str, again: bool, rounds: int, variants: int | None, budget: float, out: str | None) -> None:
    """Find launch parameters of the drafter for this GPU: checked, timed, and the best saved after each draft."""
    started = time.perf_counter()
    if not torch.cuda.is_available():
        raise DrafterError("Tuning needs an NVIDIA GPU.")
    device = torch.device("cuda", torch.cuda.current_device())
    chip = chip_of(device)
    cache: TunedCache = TunedCache(Path(out)) if out else open_tuned_cache()
    try:
        cache.save()
    except OSError as error:
        raise UsageError(f"{cache.path} cannot be written ({error}). Name another file with --out.") from error

    def left() -> float:
        return budget - (time.perf_counter() - started)

    todo = [
        (dims, cfg, *trials_of(cfg, chip, cache.layout(cfg, chip), variants))
        for dims, cfg in recorded_configurations(Path(from_shapes), chip)
        if again or cache_key(cfg, chip) not in cache.launches
    ]
    print(f"{len(todo)} drafts to tune for {chip.name}", flush=True)
    jobs = [LaunchCase(dims, cfg, each) for dims, cfg, derived, tried in todo for each in (derived, *tried.values())]
    compiled = sum(compile_all(jobs, chip.capability, max(1.0, left() * 0.6)))
    print(f"{compiled} of {len(jobs)} kernels compiled ahead, {left():.0f} s left", flush=True)
    done = 0
    timer: GraphTimer | None = None
    for dims, cfg, derived, tried in todo:
        if left() < 0:
            break
        if timer is None or timer.dims != dims:
            timer = GraphTimer(dims, device, rounds)
        best, trials = tune(cfg, derived, tried, timer, left)
        print_trials(cfg, trials, best)
        cache.store(cfg, chip, best)
        cache.save()
        done += 1
    print(f"{done} of {len(todo)} drafts tuned in {budget - left():.0f} s, kept in {cache.path.name}")


main = functools.partial(run_cli, run, prog_name="python -m eagle_slim.runtime.tune")


if __name__ == "__main__":
    main()
