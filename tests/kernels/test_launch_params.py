"""Launch parameters: a pure function of dimensions and chip, and a cache that says what it knows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from eagle_slim.runtime.bench.problem import MODELS, draft_config
from eagle_slim.runtime.config import TreeConfig
from eagle_slim.runtime.drafter.config import DrafterConfig
from eagle_slim.runtime.errors import DrafterError
from eagle_slim.runtime.kernels.host import chip_of
from eagle_slim.runtime.kernels.launch import Weights, open_tuned_cache
from eagle_slim.runtime.kernels.launch_params import (
    KNOWN_CHIPS,
    LaunchParams,
    TunedCache,
    cache_key,
    choose_launch,
    chunk_inputs,
    default_cache,
    fit_split,
    group_rows,
    is_strict,
    stage_bytes,
)
from support.drafting import problem, random_head
from support.raising import raises

TREE = TreeConfig(5, 10, 60)


@pytest.mark.parametrize("chip", KNOWN_CHIPS)
@pytest.mark.parametrize("model", MODELS)
def test_tiles_fit_every_chip(model: str, chip: int) -> None:
    for slots in (1, 3, 8, 16):
        for weight_dtype in (torch.bfloat16, torch.float8_e4m3fn)[: 1 if chip < 89 else 2]:
            cfg = draft_config(MODELS[model], 32000, TREE, slots, 512, weight_dtype=weight_dtype)
            params = choose_launch(cfg, KNOWN_CHIPS[chip])
            assert params.num_programs == KNOWN_CHIPS[chip].num_sms
            assert set(params.tiles) == set(chunk_inputs(cfg))
            for name, tile in params.tiles.items():
                assert all(size % tile.block_k == 0 for size in chunk_inputs(cfg)[name])
                assert tile.block_n & (tile.block_n - 1) == 0
                copies = 2 if name == "mlp" else 1
                rows = 16 * (1 << (slots - 1).bit_length())
                stage = tile.block_k * (copies * tile.block_n * weight_dtype.itemsize + rows * 2)
                assert stage_bytes(cfg, name, tile) == stage
                assert stage * tile.stages <= KNOWN_CHIPS[chip].shared_bytes
                assert tile.stages > 1
            for name, split in params.split.items():
                assert 1 <= split <= 4
                assert params.num_programs % split == 0
                if split > 1:
                    assert group_rows(cfg, name, split, params.num_programs) <= params.tiles["layer"].block_n


def test_groups_of_programs() -> None:
    """Llama-3.1-8B on 132 SMs: 4096 rows over 33 groups of 4 are 125, 6144 over 66 groups of 2 are 94."""
    cfg = draft_config(MODELS["llama-3.1-8b"], 32000, TREE, 1, 512)
    params = choose_launch(cfg, KNOWN_CHIPS[90])
    assert params.split == {"fc": 4, "qkv": 2, "o": 4, "down": 4}
    assert [group_rows(cfg, name, params.split[name], 132) for name in ("o", "qkv")] == [125, 94]
    assert fit_split(cfg, "o", KNOWN_CHIPS[90], most=2) == 2
    assert fit_split(cfg, "o", KNOWN_CHIPS[90], most=1) == 1
    small = draft_config(MODELS["smollm2-135m"], 32000, TREE, 1, 512)
    assert set(choose_launch(small, KNOWN_CHIPS[90]).split.values()) == {1}


def test_the_cache_round_trips(tmp_path: Path) -> None:
    path = tmp_path / "tuned.json"
    cfg, chip = draft_config(MODELS["smollm2-135m"], 32000, TREE, 1, 512), KNOWN_CHIPS[90]
    cache = TunedCache(path)
    derived = cache.lookup(cfg, chip)
    assert (derived, cache.hits, cache.misses) == (choose_launch(cfg, chip), 0, 1)
    tuned = replace(derived, part_keys=derived.part_keys * 2)
    cache.store(cfg, chip, tuned)
    cache.save()
    again = TunedCache(path)
    assert again.lookup(cfg, chip, strict=True) == tuned
    assert (again.hits, again.misses) == (1, 0)
    assert list(tmp_path.iterdir()) == [path]
    assert LaunchParams.from_json(json.loads(json.dumps(tuned.to_json()))) == tuned


def test_groups_beyond_the_kernels_are_refused() -> None:
    params = choose_launch(draft_config(MODELS["smollm2-135m"], 32000, TREE, 1, 512), KNOWN_CHIPS[90])
    with raises(DrafterError, split={**params.split, "o": 8}):
        LaunchParams.from_json({**params.to_json(), "split": {**params.split, "o": 8}})


def test_the_key_holds_what_speed_depends_on() -> None:
    base = draft_config(MODELS["smollm2-135m"], 32000, TREE, 1, 512)
    chip = KNOWN_CHIPS[90]
    others = [
        replace(base, draft_vocab=16000), replace(base, weight_dtype=torch.float8_e4m3fn), replace(base, num_slots=2),
        replace(base, intermediate=2048), replace(base, dtype=torch.float16, weight_dtype=torch.float16),
    ]  # fmt: skip
    keys = {cache_key(cfg, chip) for cfg in (base, *others)} | {cache_key(base, KNOWN_CHIPS[80])}
    assert len(keys) == 7
    assert cache_key(replace(base, max_positions=9000), chip) == cache_key(base, chip)


def test_strict_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head = random_head()
    monkeypatch.setenv("EAGLE_SLIM_TUNED", str(tmp_path / "none.json"))
    with raises(DrafterError, path=tmp_path / "none.json") as missed:
        problem(head, TreeConfig(1, 2, 5), [3], [1], strict=True)
    assert missed.value.facts["key"].startswith("interpreter/eagle3-h64")
    assert "Run python -m eagle_slim.runtime.tune for this head" in str(missed.value)
    assert not is_strict()
    monkeypatch.setenv("EAGLE_SLIM_STRICT", "1")
    assert is_strict()
    with raises(DrafterError, path=tmp_path / "none.json"):
        problem(head, TreeConfig(1, 2, 5), [3], [1])
    for off in ("0", "false", "No", " off ", ""):
        monkeypatch.setenv("EAGLE_SLIM_STRICT", off)
        assert not is_strict()
    _, _, weights, _ = problem(head, TreeConfig(1, 2, 5), [3], [1])
    assert isinstance(weights, Weights)


def test_lookups_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE_SLIM_TUNED", str(tmp_path / "tuned.json"))
    head = random_head()
    tree = TreeConfig(1, 2, 5)
    cfg = DrafterConfig.of(head, tree, 1, 20)
    cache = open_tuned_cache()
    Weights.pack(head, cfg, cache=cache)
    cache.store(cfg, chip_of(head.device), choose_launch(cfg, chip_of(head.device)))
    cache.save()
    Weights.pack(head, cfg, cache=cache, strict=True)
    Weights.pack(head, DrafterConfig.of(head, tree, 2, 20), cache=cache)
    assert (cache.hits, cache.misses) == (1, 2)
    Weights.pack(head, cfg, strict=True)  # reads the file


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a": 1}', '{"a": {"tiles": {}}}'])
def test_files_of_another_kind(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tuned.json").write_text(text)
    monkeypatch.setenv("EAGLE_SLIM_TUNED", str(tmp_path / "tuned.json"))
    with raises(DrafterError, path=tmp_path / "tuned.json") as refused:
        open_tuned_cache()
    assert "EAGLE_SLIM_TUNED" in str(refused.value)


def test_the_shipped_cache_can_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE_SLIM_TUNED", "")
    cache = default_cache()
    assert cache.path.name == "tuned.json"
    for key, values in cache.entries.items():
        assert key.count("/") == 2
        assert LaunchParams.from_json(values).num_programs > 0
