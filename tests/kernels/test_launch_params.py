"""Launch parameters: a pure function of dimensions and chip, and a cache that says what it knows."""

import json
from dataclasses import replace

import pytest
import torch
from eagle_slim.runtime import DrafterConfig, DrafterError, TreeConfig, UsageError, Weights
from eagle_slim.runtime.drafter import launch_params, tuned_cache
from eagle_slim.runtime.drafter.launch_params import chip_of, choose_launch
from eagle_slim.runtime.drafter.tuned_cache import TunedCache, cache_key, open_tuned_cache, read_shapes
from eagle_slim.runtime.drafter.tuning.problem import MODELS, draft_config
from kernels.chips import KNOWN_CHIPS
from support.drafting import random_head
from support.raising import raises
from support.sweeps import sweep

TREE = TreeConfig(5, 10, 60)
LAYOUT = '{"layouts": {"GPU/eagle3-h8/t": {"num_programs": 1, "split": {}, "chunks": {}}}, '
EMPTY = LAYOUT + '"launches": {"GPU/eagle3-h8-v9/t": %s}}'


@pytest.mark.parametrize("chip", sweep(KNOWN_CHIPS, 90))
@pytest.mark.parametrize("model", MODELS)
def test_tiles_fit_every_chip_and_the_layout_is_one_for_all_slots_trees_and_vocabularies(model, chip):
    for slots in (1, 3, 8, 16):
        for weight_dtype in (torch.bfloat16, torch.float8_e4m3fn)[: 1 if chip < 89 else 2]:
            cfg = draft_config(MODELS[model], 32000, TREE, slots, 512, weight_dtype=weight_dtype)
            params = choose_launch(cfg, KNOWN_CHIPS[chip])
            other = draft_config(MODELS[model], 4096, TreeConfig(3, 1, 4), 2, 9000, weight_dtype=weight_dtype)
            assert params.layout == choose_launch(other, KNOWN_CHIPS[chip]).layout
            assert params.num_programs == KNOWN_CHIPS[chip].num_sms
            assert set(params.tiles) == set(launch_params.chunk_inputs(cfg))
            for name, tile in params.tiles.items():
                assert all(size % tile.block_k == 0 for size in launch_params.chunk_inputs(cfg)[name])
                assert tile.block_n & (tile.block_n - 1) == 0
                copies = 2 if name == "mlp" else 1
                rows = 16 * (1 << (slots - 1).bit_length())
                stage = tile.block_k * (copies * tile.block_n * weight_dtype.itemsize + rows * 2)
                assert launch_params.stage_bytes(cfg, name, tile) == stage
                assert stage * tile.stages <= KNOWN_CHIPS[chip].shared_bytes
                assert tile.stages > 1
                assert name == "head" or params.layout.chunks[name] % tile.block_k == 0
            for name, split in params.layout.split.items():
                assert 1 <= split <= 4
                assert params.num_programs % split == 0
                if split > 1 and slots == 1:
                    assert (
                        launch_params.group_rows(cfg, name, split, params.num_programs) <= params.tiles["layer"].block_n
                    )


def test_groups_of_programs():
    """Llama-3.1-8B on 132 SMs: 4096 rows over 33 groups of 4 are 125, 6144 over 66 groups of 2 are 94."""
    cfg = draft_config(MODELS["llama-3.1-8b"], 32000, TREE, 1, 512)
    params = choose_launch(cfg, KNOWN_CHIPS[90])
    assert params.layout.split == {"fc": 4, "qkv": 2, "o": 4, "down": 4}
    assert [launch_params.group_rows(cfg, name, params.layout.split[name], 132) for name in ("o", "qkv")] == [125, 94]
    small = draft_config(MODELS["smollm2-135m"], 32000, TREE, 1, 512)
    assert set(choose_launch(small, KNOWN_CHIPS[90]).layout.split.values()) == {1}


def test_the_cache_round_trips(tmp_path):
    path = tmp_path / "tuned.json"
    cfg, chip = draft_config(MODELS["smollm2-135m"], 32000, TREE, 1, 512), KNOWN_CHIPS[90]
    cache = TunedCache(path)
    derived, is_tuned = cache.find(cfg, chip)
    assert (derived, is_tuned) == (choose_launch(cfg, chip), False)
    tuned = replace(derived, part_keys=derived.part_keys * 2)
    cache.store(cfg, chip, tuned)
    cache.save()
    again = TunedCache(path)
    assert again.find(cfg, chip) == (tuned, True)
    assert list(tmp_path.iterdir()) == [path]
    assert launch_params.LaunchParams.from_json(json.loads(json.dumps(tuned.to_json())), tuned.layout) == tuned
    # A head in another layout cannot use what is tuned.
    cfg = draft_config(MODELS["llama-3.1-8b"], 32000, TREE, 1, 512)
    cache.store(cfg, chip, choose_launch(cfg, chip))
    other = replace(launch_params.choose_layout(cfg, chip), split=dict.fromkeys(("fc", "qkv", "o", "down"), 1))
    assert cache.find(cfg, chip, other) == (choose_launch(cfg, chip, other), False)


def test_shapes_are_recorded_for_the_tuner(tmp_path, monkeypatch):
    path, chip = tmp_path / "shapes.json", KNOWN_CHIPS[90]
    monkeypatch.setenv("EAGLE_SLIM_SHAPES", str(path))
    cfg = draft_config(MODELS["smollm2-135m"], 4096, TREE, 4, 512, weight_dtype=torch.float8_e4m3fn)
    cache = TunedCache(tmp_path / "none.json")
    for length in (512, 1024):  # no key
        longer = replace(cfg, max_positions=length + 100)
        assert cache.find(longer, chip) == (choose_launch(cfg, chip), False)
    cache.find(replace(cfg, num_slots=8), KNOWN_CHIPS[100])
    monkeypatch.setattr(tuned_cache, "ALL_LAUNCHES", {((chip, cfg), False): 7, ((chip, cfg), True): 3})
    tuned_cache.record_launches()
    assert list(read_shapes(path).values()) == [0, 0, 0, 10]
    # A file from before says how many rows could join.
    path.write_text("".join(path.read_text().splitlines(True)[:-2]).replace("{", '{"tail_rows": 512, '))
    recorded = [replace(shape, max_positions=cfg.max_positions) for _, shape in read_shapes(path)]
    assert recorded == [cfg, cfg, replace(cfg, num_slots=8)]
    assert [name for name, _ in read_shapes(path)] == ["sm_90", "sm_90", "sm_100"]
    cache.store(cfg, chip, choose_launch(cfg, chip))
    assert cache.find(cfg, chip)[1]
    assert [line["tuned"] for line in map(json.loads, path.read_text().splitlines())] == [False, False, False, True]
    monkeypatch.setenv("EAGLE_SLIM_STRICT", "1")
    assert cache.find(cfg, chip)[1]
    with raises(DrafterError, option=cache_key(replace(cfg, num_slots=1), chip)):
        cache.find(replace(cfg, num_slots=1), chip)
    path.write_text('{"chip": "sm_90"}\n')
    with raises(UsageError):
        read_shapes(path)
    monkeypatch.setenv("EAGLE_SLIM_SHAPES", str(tmp_path / "missing" / "shapes.json"))
    with raises(DrafterError):
        cache.find(replace(cfg, num_slots=2), chip)


def test_the_key_holds_what_speed_depends_on():
    base = draft_config(MODELS["smollm2-135m"], 32000, TREE, 1, 512)
    chip = KNOWN_CHIPS[90]
    alone = {"draft_vocab": 16000, "weight_dtype": torch.float8_e4m3fn, "num_slots": 2, "intermediate": 2048}
    others = [replace(base, **{name: value}) for name, value in alone.items()]
    others.append(replace(base, dtype=torch.float16, weight_dtype=torch.float16))
    keys = {cache_key(cfg, chip) for cfg in (base, *others)} | {cache_key(base, KNOWN_CHIPS[80])}
    assert len(keys) == 7
    assert cache_key(replace(base, max_positions=9000), chip) == cache_key(base, chip)


def test_packing_looks_parameters_up(tmp_path, monkeypatch):
    monkeypatch.setenv("EAGLE_SLIM_TUNED", str(tmp_path / "tuned.json"))
    head = random_head()
    tree = TreeConfig(1, 2, 5)
    cfg = DrafterConfig.of(head, tree, 1, 20)
    cache = open_tuned_cache()
    assert not Weights.pack(head, cfg, cache=cache).packed.launches(cfg)[1]
    cache.store(cfg, chip_of(head.device), choose_launch(cfg, chip_of(head.device)))
    cache.save()
    packed = Weights.pack(head, cfg).packed
    assert packed.launches(cfg)[1]
    assert not packed.launches(DrafterConfig.of(head, tree, 2, 20))[1]


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a": 1}', EMPTY % "{}", EMPTY % '{"tiles": {}}'])
def test_files_of_another_kind(text, tmp_path, monkeypatch):
    (tmp_path / "tuned.json").write_text(text)
    monkeypatch.setenv("EAGLE_SLIM_TUNED", str(tmp_path / "tuned.json"))
    with raises(DrafterError, option="EAGLE_SLIM_TUNED"):
        open_tuned_cache()


@pytest.mark.parametrize("name", ["NVIDIA H100 80GB HBM3", "NVIDIA H200"])
def test_documented_shapes_are_tuned(name, monkeypatch):
    monkeypatch.setenv("EAGLE_SLIM_TUNED", "")
    documented = {"llama-3.1-8b": 32000, "llama-3.3-70b": 32000, "smollm2-135m": 16384}
    chip, tree = replace(KNOWN_CHIPS[90], name=name), TreeConfig(5, 10, 60)
    keys = [
        cache_key(draft_config(MODELS[model], rows, tree, slots, 512), chip)
        for model, rows in documented.items()
        for slots in (1, 2, 4, 8, 16)
    ]
    shipped = open_tuned_cache()
    assert [key for key in keys if key not in shipped.launches] == []
    assert all(key.count("/") == 2 for key in [*shipped.layouts, *shipped.launches])
