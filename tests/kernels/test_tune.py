from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import torch
from eagle_slim.runtime import DrafterError, TreeConfig, UsageError, tune
from eagle_slim.runtime.drafter import tuned_cache
from eagle_slim.runtime.drafter.launch_params import INTERPRETER, choose_launch, choose_layout
from eagle_slim.runtime.drafter.tuned_cache import TunedCache, cache_key
from eagle_slim.runtime.drafter.tuning import precompile, timing
from eagle_slim.runtime.drafter.tuning.problem import MODELS, Dims, draft_config
from kernels.chips import KNOWN_CHIPS
from support.raising import exit_code, raises, raises_with

CHIP = KNOWN_CHIPS[90]
TINY = Dims(32, 32, 2, 1, 16, 100)
CFG = draft_config(MODELS["llama-3.1-8b"], 32000, TreeConfig(5, 10, 60), 1, 512)


def choose(times, seconds=1e9):
    clock = [seconds]

    def measure(_cfg, derived, variant):
        clock[0] -= 1
        return times(derived), times(variant)

    return tune.tune(CFG, *tune.trials_of(CFG, CHIP, choose_layout(CFG, CHIP)), measure, lambda: clock[0])


def test_the_fastest_variant_is_chosen():
    derived = choose_launch(CFG, CHIP)

    def times(params):
        return 1000 - 30 * (params.part_keys == 128) - 20 * (params.block_keys == 32)

    best, trials = choose(times)
    assert best == replace(derived, part_keys=128)
    assert max(trial.gain for trial in trials) == pytest.approx(0.03)
    first, tried = tune.trials_of(CFG, CHIP, derived.layout)
    assert first == derived
    assert len(tried) == len(trials) - 1
    assert list(tune.trials_of(CFG, CHIP, derived.layout, num_variants=2)[1]) == list(tried)[:2]
    # Noise changes nothing, and it stops in time.
    assert choose(lambda params: 1000 - 4 * (params.part_keys == 128))[0] == derived
    assert 2 <= len(choose(lambda params: 1000 - 30 * (params.part_keys == 128), seconds=4)[1]) <= 5


def test_wrong_and_unbuildable_variants_lose():
    OutOfResources = type("OutOfResources", (Exception,), {})  # as Triton names it

    def times(params):
        if params.part_keys == 128:
            raise DrafterError("the draft is wrong")
        if params.block_keys == 32:
            raise OutOfResources("shared memory")
        return 1000.0

    best, trials = choose(times)
    assert best == choose_launch(CFG, CHIP)
    assert {trial.fault for trial in trials} == {"", "the draft is wrong", "OutOfResources: shared memory"}

    def broken(params):
        raise DrafterError("no")

    with raises(DrafterError):
        choose(broken)


def test_recorded_shapes_are_tuned_head_by_head(tmp_path, monkeypatch):
    """Those of 90 launches before those of 20, the most launched of a head first."""
    path = tmp_path / "shapes.json"
    monkeypatch.setenv("EAGLE_SLIM_SHAPES", str(path))
    small = replace(draft_config(MODELS["smollm2-135m"], 4096, TreeConfig(2, 4, 10), 2, 3000), has_fc_bias=True)
    two, four = (replace(CFG, num_slots=count) for count in (2, 4))
    launched = (two, 1), (four, 11), (CFG, 2), (replace(four, depth=1), 6), (small, 90)
    counts = Counter({((CHIP, cfg), False): launches for cfg, launches in launched})
    counts[(KNOWN_CHIPS[100], CFG), False] = 500
    monkeypatch.setattr(tuned_cache, "ALL_LAUNCHES", counts)
    TunedCache(tmp_path / "none.json").find(replace(CFG, draft_vocab=4096), CHIP)
    tuned_cache.record_launches()
    found = tune.recorded_configurations(path, CHIP)
    assert [dims for dims, _ in found] == [Dims.of(small), *[Dims.of(CFG)] * 4]
    tuned = [(cfg.num_slots, cfg.draft_vocab) for _, cfg in found]
    assert tuned == [(2, 4096), (4, 32000), (1, 32000), (2, 32000), (1, 4096)]
    for recorded, (_, cfg) in zip((small, four), found, strict=False):
        assert cache_key(cfg, CHIP) == cache_key(recorded, CHIP)
        assert cfg.tree == recorded.tree
    with raises_with(UsageError, "7 of other GPUs"):
        tune.recorded_configurations(path, KNOWN_CHIPS[80])


def test_it_tunes_once(tmp_path, monkeypatch, capsys):
    shapes, tuned = tmp_path / "shapes.json", tmp_path / "tuned.json"
    monkeypatch.setenv("EAGLE_SLIM_SHAPES", str(shapes))
    TunedCache(tmp_path / "none.json").find(CFG, CHIP)
    asked = ["--from-shapes", str(shapes), "--out", str(tuned)]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert exit_code(tune.main, asked) == 1
    assert "needs an NVIDIA GPU" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(tune, "chip_of", lambda _: CHIP)
    monkeypatch.setattr(tune, "compile_all", lambda jobs, *_: [True] * len(jobs))
    monkeypatch.setattr(tune.GraphTimer, "__call__", lambda _, cfg, own, other: (100.0, 100.0 - (other != own) * 20))
    for more, said in (([], "1 of 1 drafts tuned"), ([], "0 of 0 drafts tuned"), (["--again"], "1 of 1 drafts tuned")):
        assert exit_code(tune.main, [*asked, *more]) == 0
        assert said in capsys.readouterr().out
    assert TunedCache(tuned).find(CFG, CHIP)[1]
    assert exit_code(tune.main, [*asked[:-1], str(shapes / "tuned.json")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_every_variant_drafts_right(monkeypatch):
    """The real measurement, where a graph is the call itself: it would refuse a wrong draft."""
    monkeypatch.setattr(tune, "capture", lambda run: lambda: None)
    monkeypatch.setattr(tune, "PREFIX", 16)
    dims = Dims(64, 96, 4, 2, 16, 300)
    cfg = draft_config(dims, 120, TreeConfig(1, 3, 10), 1, tune.PREFIX, torch.float16)
    timer = tune.GraphTimer(dims, torch.device("cpu"), 1)
    derived = choose_launch(cfg, INTERPRETER)
    changed = tune.variants(derived, cfg, INTERPRETER)["one stage less"]
    assert min(timer(cfg, derived, changed)) > 0


def test_variants_are_timed_in_turn():
    order = []
    times = timing.interleave({name: partial(order.append, name) for name in "ab"}, torch.device("cpu"), 3)
    assert "".join(order) == "ab" * 5
    assert [len(times[name]) for name in "ab"] == [3, 3]


def test_compiling_ahead_needs_more_than_one_kernel():
    assert precompile.compile_all([], 90, 1.0) == []
    cfg = draft_config(TINY, 50, TreeConfig(1, 2, 5), 1, 20)
    cases = [precompile.LaunchCase(TINY, cfg, choose_launch(cfg, INTERPRETER))]
    assert precompile.compile_all(cases, 90, 1.0) == [False]
