"""Tiles of the target's kernels from a file, by shape; strict mode; counts; and how the tuner measures them."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from eagle_slim.runtime import launches, tune
from eagle_slim.runtime.drafter.tuned_cache import TunedCache
from eagle_slim.runtime.drafter.tuning import problem, target_tiles
from eagle_slim.runtime.errors import DrafterError, UsageError
from eagle_slim.runtime.settings import TreeConfig
from eagle_slim.runtime.target.kernels import products
from eagle_slim.runtime.target.kernels.product_kernels import ProductTiles
from kernels.chips import KNOWN_CHIPS
from support.raising import raises

CPU = torch.device("cpu")
SUM = {"form": "sum", "size": 64, "depth": 128, "rows": 3, "dtype": "float32"}
TREE = {"group": 2, "kv_heads": 2, "head_dim": 16, "places": 2, "nodes": 5, "path": False, "dtype": "float32"}
SUM_KEY = "interpreter/form=sum-size=64-depth=128-rows=16/float32"


@pytest.fixture(autouse=True)
def tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "tuned.json"
    path.write_text(json.dumps({"layouts": {}, "launches": {}, "products": {SUM_KEY: {"num_stages": 4}}}))
    monkeypatch.setenv("EAGLE_SLIM_TUNED", str(path))
    monkeypatch.setattr(target_tiles, "_TURNS_BYTES", 1)
    return path


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The tiles of the products that are launched; nothing is computed."""
    found: list[Any] = []

    class Kernel:
        def __getitem__(self, grid: object) -> Any:
            return lambda *_, **constants: found.append(constants["TILES"])

    monkeypatch.setattr(products.kernels, "add_product_kernel", Kernel())
    return found


def add(rows: int) -> None:
    x, weight = torch.zeros(rows, 128), torch.zeros(64, 128)
    normed = products.NormedRows(torch.zeros(rows, 64), torch.zeros(rows, 64), torch.zeros(rows, 1))
    scratch = products.split_scratch([(products.product_shape(weight), 128)], rows, CPU)
    products.add_product(x, weight, None, products.Norm(torch.ones(64), 1e-5, 1.0), normed, None, scratch)


def test_a_shapes_tiles_come_from_the_file(
    tuned: Path, seen: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shapes = tmp_path / "shapes.json"
    monkeypatch.setenv("EAGLE_SLIM_SHAPES", str(shapes))
    own = {rows: products.product_tiles(products.product_shape(torch.zeros(64, 128)), rows, "sum", 4, 132)
           for rows in (3, 40)}  # fmt: skip
    with launches.counted_apart() as counts, caplog.at_level(logging.INFO):
        for rows in (3, 7, 40):
            add(rows)
    assert own[3].num_stages != 4
    assert [tiles.num_stages for tiles in seen] == [4, 4, own[40].num_stages]
    assert seen[2] == own[40]
    assert counts == {("products", True): 2, ("products", False): 1}
    # Every shape once, tuned or not; what the file holds is said once.
    lines = [json.loads(line) for line in shapes.read_text().splitlines()]
    assert [(line["rows"], line["tuned"]) for line in lines] == [(3, True), (7, True), (40, False)]
    assert lines[0] == {"kernel": "products", "chip": "interpreter", **SUM, "tuned": True}
    said = [record.getMessage() for record in caplog.records if "are tuned" in record.getMessage()]
    assert said == [
        f"Launch parameters: 0 drafts of 0 heads, 1 products and 0 attentions are tuned, for interpreter, in {tuned}."
    ]


def test_numbers_of_rows_that_share_tiles_have_one_name() -> None:
    def of_rows(count: int) -> str:
        return launches.shape_key("x", {**SUM, "rows": count})

    for same in ((1, 1), (2, 16), (17, 32), (33, 64), (65, 128), (257, 512)):
        assert of_rows(same[0]) == of_rows(same[1]) != of_rows(same[1] + 1)
    keys = [launches.shape_key("x", {**TREE, "places": places}) for places in (1, 2, 3, 4, 5)]
    assert len(set(keys)) == 4
    assert keys[2] == keys[3]


def test_what_other_gpus_have_is_tried_first(tuned: Path, tmp_path: Path) -> None:
    cache, chip = TunedCache(tuned), KNOWN_CHIPS[90]
    cfg = problem.draft_config(problem.MODELS["smollm2-135m"], 4096, TreeConfig(2, 4, 10), 1, 512)
    derived = tune.trials_of(cfg, chip)[0]
    found = replace(derived, part_keys=256)
    cache.store(cfg, replace(chip, name="NVIDIA/other"), found)
    half = replace(chip, name="half", num_sms=66)
    cache.store(cfg, half, tune.trials_of(cfg, half)[0])
    elsewhere = cache.elsewhere(cfg, chip)
    assert elsewhere == {"as on NVIDIA/other": found}
    assert list(tune.trials_of(cfg, chip, most=0, elsewhere=elsewhere)[1].values()) == [found]
    key = SUM_KEY.replace("interpreter", "NVIDIA/this")
    assert cache.tiles_elsewhere("products", key) == {"as on interpreter": {"num_stages": 4}}
    task = target_tiles.task_of("products", SUM, CPU)
    wrong = {"b": {"block_n": 512}, "c": {}}
    tried = target_tiles.trials_of_tiles(task, {"a": {"num_stages": 4}, **wrong}, 1)
    assert next(iter(tried.items())) == ("a", replace(task.own, num_stages=4))
    assert len(tried) == 2


def test_strict_mode_names_what_is_missing(seen: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE_SLIM_STRICT", "1")
    add(3)
    for _ in range(2):
        with raises(DrafterError, kernel="products", key=SUM_KEY.replace("rows=16", "rows=64")):
            add(40)
    assert len(seen) == 1


def test_tiles_for_experiments(seen: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE_SLIM_TILES", '{"products": {"num_warps": 8}, "attention": {"num_stages": 2}}')
    add(3)
    assert (seen[0].num_warps, seen[0].num_stages) == (8, 4)
    wrong = {'{"products": {"block_n": 512}}': DrafterError, '{"products": {"block_k": 96}}': DrafterError,
             '{"products": {"colour": 1}}': DrafterError, '{"drafter": {}}': UsageError, "{": UsageError}  # fmt: skip
    for text, error in wrong.items():
        monkeypatch.setenv("EAGLE_SLIM_TILES", text)
        with pytest.raises(error, match="EAGLE_SLIM_TILES"):
            add(3)


def test_what_no_longer_fits_is_a_miss(tuned: Path, seen: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    other = tuned.with_name("other.json")
    other.write_text(json.dumps({"layouts": {}, "launches": {}, "products": {SUM_KEY: {"block_rows": 512}}}))
    monkeypatch.setenv("EAGLE_SLIM_TUNED", str(other))
    with launches.counted_apart() as counts:
        add(3)
    assert seen[0].block_rows != 512
    assert counts == {("products", False): 1}


def test_a_graph_counts_its_launches_at_every_replay() -> None:
    with launches.counted_apart() as call:
        with launches.counted_apart() as graph:
            launches.count("attention", True)
        assert not call
        for _ in range(3):
            launches.count_again(graph)
    assert call == {("attention", True): 3}


def test_the_cache_keeps_all_kernels_of_all_gpus(tuned: Path) -> None:
    cache = TunedCache(tuned)
    cache.tiles["attention"]["NVIDIA H100/x"] = {"num_warps": 8}
    cache.save()
    assert TunedCache(tuned).tiles == {
        "products": {SUM_KEY: {"num_stages": 4}}, "attention": {"NVIDIA H100/x": {"num_warps": 8}},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "shape"),
    [("products", SUM), ("products", {**SUM, "form": "pairs"}), ("products", {**SUM, "form": "logits"}),
     pytest.param("attention", TREE, marks=pytest.mark.slow),
     pytest.param("attention", {**TREE, "path": True}, marks=pytest.mark.slow)],
)  # fmt: skip
def test_tasks_compute_the_same_with_every_tile(kind: str, shape: dict[str, Any]) -> None:
    task = target_tiles.task_of(kind, shape, CPU, (3, 70))
    expected = [run().clone() for run in task.runs(task.own)]
    tried = task.variants()
    assert len(tried) >= 4
    assert task.own not in tried.values()
    # Of the interpreter's products the last bits depend on the library's.
    for tiles in list(tried.values())[:2]:
        for run, result in zip(task.runs(tiles), expected, strict=True):
            torch.testing.assert_close(run(), result)


@pytest.mark.gpu
@pytest.mark.parametrize("path", [False, True])
@pytest.mark.parametrize(("group", "nodes", "places"), [(4, 60, 1), (4, 16, 4), (1, 128, 2), (8, 33, 1), (4, 1, 16)])
def test_attention_has_the_same_bits_with_every_tile(group: int, nodes: int, places: int, path: bool) -> None:
    shape = {"group": group, "kv_heads": 2, "head_dim": 128, "places": places, "nodes": nodes, "path": path}
    task = target_tiles.task_of("attention", {**shape, "dtype": "bfloat16"}, torch.device("cuda"), (1, 100, 1500, 5000))
    expected = [run().clone() for run in task.runs(task.own)]
    for name, tiles in task.variants().items():
        for run, result in zip(task.runs(tiles), expected, strict=True):
            assert torch.equal(run(), result), name


def test_variants_with_other_bits_lose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target_tiles, "capture", lambda run: run)

    class Task:
        own = ProductTiles(64, 64, 16, 4, 3)

        def runs(self, tiles: ProductTiles) -> list[Any]:
            return [lambda: torch.tensor(1.0 if tiles.num_stages < 9 else 1.5)]

    measure = target_tiles.measure_tiles(Task(), 3, CPU)  # type: ignore[arg-type]
    assert min(measure(None, ProductTiles(64, 64, 16, 4, 2))) > 0
    with raises(DrafterError):
        measure(None, ProductTiles(64, 64, 16, 4, 9))


def test_one_command_tunes_all_kernels(
    tuned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shapes, chip = tmp_path / "shapes.json", KNOWN_CHIPS[90]
    monkeypatch.setenv("EAGLE_SLIM_SHAPES", str(shapes))
    cfg = problem.draft_config(problem.MODELS["smollm2-135m"], 4096, TreeConfig(2, 4, 10), 1, 512)
    TunedCache(tmp_path / "none.json").find(cfg, chip)
    for kind, shape in (("products", SUM), ("attention", TREE)):
        launches.record({"kernel": kind, "chip": chip.name, **shape})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(tune, "chip_of", lambda _: chip)
    monkeypatch.setattr(tune, "compile_all", lambda jobs, *_: [True] * len(jobs))
    # Drafts are faster with parts of 128 keys, the target's kernels with 8 warps.
    monkeypatch.setattr(tune.GraphTimer, "__call__", lambda _, cfg, own, other: (100.0, 100.0 - (other != own) * 20))
    task_of = target_tiles.task_of
    monkeypatch.setattr(tune, "task_of", lambda kind, shape, _, lengths: task_of(kind, shape, CPU, lengths))
    monkeypatch.setattr(
        tune, "measure_tiles", lambda *_: lambda own, other: (100.0, 90.0 if other.num_warps == 8 else 101.0)
    )
    asked = [str(shapes), "--out", str(tuned), "--variants", "9"]
    tune.main(asked)
    assert "3 of 3 shapes tuned" in capsys.readouterr().out
    cache = TunedCache(tuned)
    assert cache.find(cfg, chip)[1]
    keys = {kind: launches.shape_key(chip.name, shape) for kind, shape in (("products", SUM), ("attention", TREE))}
    # Only what the rule has not; of attention in fp32 it has 8 warps.
    assert cache.tiles["products"][keys["products"]] == {"num_warps": 8}
    assert cache.tiles["attention"][keys["attention"]].keys().isdisjoint({"num_warps", "head_dim"})
    # What other GPUs have stays; what is tuned is not tuned again unless that is asked for.
    assert cache.tiles["products"][SUM_KEY] == {"num_stages": 4}
    tune.main(asked)
    assert "0 of 0 shapes tuned" in capsys.readouterr().out
    tune.main([*asked, "--again", "--kernels", "attention"])
    assert "1 of 1 shapes tuned" in capsys.readouterr().out


def test_shapes_of_another_kind_are_refused() -> None:
    for kind, shape in (("products", TREE), ("attention", {**TREE, "dtype": "floaty"})):
        with raises(UsageError):
            target_tiles.task_of(kind, shape, CPU)
