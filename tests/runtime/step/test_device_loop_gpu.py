"""Whole calls on a GPU: exact in fp32 for every fused family, without a wait inside, whatever the slots do."""

import gc
import json
import random
from itertools import product
from pathlib import Path
from unittest import mock

import pytest
import torch
from eagle_slim.runtime import CheckError, LogitsError, SpeculativeModel, open_target
from eagle_slim.runtime.settings import TreeConfig
from eagle_slim.runtime.step import decoders, graphs
from eagle_slim.runtime.step.shapes import ShapeChooser, shapes_for, shapes_up_to
from support.built_decoders import watch_decoders
from support.tiny_models import SIZES, random_prompts, tiny_target, widen, write_head

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::eagle_slim.runtime.errors.AcceptanceWarning")]
TREE = {"tree": TreeConfig(3, 4, 24)}
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize")


@pytest.fixture(autouse=True)
def _exact_products():
    torch.backends.cuda.matmul.allow_tf32 = False


def pair(folder, kind, **tree):
    """A fused model with the persistent drafter in fp32, and prompts of several chunks and of one token."""
    width = {} if kind in ("qwen2", "qwen3") else {"head_dim": 16}
    target = tiny_target(kind, hidden_size=64, intermediate_size=96, max_position_embeddings=512, **width)
    head = write_head(folder, hidden=64)
    opened = open_target(target.cuda(), target_backend="fused")
    model = SpeculativeModel.from_pretrained(opened, head, drafter="triton", **tree or TREE)
    return model, random_prompts([1, 9, 70, 2, 33])


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral"])
def test_greedy_equals_transformers(tmp_path, kind):
    model, prompts = pair(tmp_path, kind)
    wanted = [greedy(model, prompt, 40) for prompt in prompts]
    for options in ({}, {"max_slots": 2}, {"max_slots": 1}, {"speculative": False, "max_slots": 3}):
        output = model.generate(prompts, max_new_tokens=40, **options)
        assert output.token_ids == wanted, options
        assert "CUDA graphs" in output.stats.path


def test_checks_run_within_graphs(tmp_path, monkeypatch):
    model, prompts = pair(tmp_path, "llama")
    expected = model.generate(prompts, max_new_tokens=20, max_slots=2).token_ids
    monkeypatch.setenv("EAGLE_SLIM_CHECK", "1")
    checked = model.with_tree(model.drafter.tree)
    output = checked.generate(prompts, max_new_tokens=20, max_slots=2)
    assert output.token_ids == expected
    assert "CUDA graphs" in output.stats.path
    # The norm's gain is read by the graphs where it lies: in a step that follows the prompt, then in the prompt itself.
    gain, spoiled = model.target.model.model.norm.weight.data, mock.Mock()
    # A streamer's first call brings the prompt.
    spoiled.put.side_effect = lambda _value: gain[0].fill_(torch.nan) if spoiled.put.call_count == 2 else None
    with pytest.raises(CheckError, match=r"after verify, slot 0, node .*: the logit is nan"):
        checked.generate(prompts[1], max_new_tokens=20, ignore_eos=True, streamer=spoiled)
    with pytest.raises(LogitsError, match="New token 0 of prompt 0 cannot be chosen: its logits hold a NaN"):
        checked.generate(prompts[1], max_new_tokens=20)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "top_p": 0.9, "seed": 5}], ids=["greedy", "sampled"])
def test_partial_passes_change_no_token(tmp_path, sampling, run_ahead):
    model, _ = pair(tmp_path, "llama")
    prompts = random_prompts([440, 9, 333])
    options = {"max_new_tokens": 40, "max_slots": 2, "ignore_eos": True, **sampling}
    plain = model.generate(prompts, speculative=False, **options)
    for mode, num_blocks in (("exact", 1), ("lossy", 8)):
        run_ahead(num_blocks=num_blocks)
        found = model.generate(prompts, partial_verification=mode, **options)
        assert found.token_ids == plain.token_ids
        assert found.stats.num_partial_passes > found.stats.num_passes > 0
        assert "steps from CUDA graphs;" in found.stats.path


class InTurn(ShapeChooser):
    """Takes every shape in turn, plain steps among them; each is timed before its first step."""

    def __init__(self, acceptance, costs, shapes):
        super().__init__(acceptance, costs, shapes)
        self.shapes = shapes

    def next(self, batch, *_):
        shapes = shapes_for(batch, self.shapes)
        return shapes[self.steps.total() % len(shapes)]


@pytest.mark.parametrize("is_forced", [False, True], ids=["as measured", "changed at every step"])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.8, "top_p": 0.9, "seed": 5}], ids=["greedy", "sampled"])
def test_shapes_chosen_by_step_change_no_token(tmp_path, sampling, is_forced, monkeypatch):
    model, prompts = pair(tmp_path, "llama", tree=TreeConfig.of(3, 4))
    model = model.with_tree(None)
    if is_forced:
        monkeypatch.setattr(
            decoders.Decoders, "new_chooser", lambda own, shapes: InTurn(own.acceptance, own.costs, shapes)
        )
    options = {"max_new_tokens": 60, "ignore_eos": True, **sampling}
    plain = model.generate(prompts, speculative=False, **options)
    for slots in (1, 4):
        found = model.generate(prompts, max_slots=slots, **options)
        assert found.token_ids == plain.token_ids
        assert "CUDA graphs" in found.stats.path
        assert "as measured here" in found.stats.path
        if is_forced:
            shapes = shapes_for(slots, shapes_up_to(model.drafter.tree))
            words = [f"trees of {shape.total_tokens} nodes" if shape else "plain decoding" for shape in shapes]
            assert len(words) >= 4
            assert all(f"{each} in " in found.stats.path for each in words)


def greedy(model, prompt, count):
    ids, rest = torch.tensor([prompt], device="cuda"), {"do_sample": False, "pad_token_id": 0}
    output = model.target.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, **rest)
    return output[0, len(prompt) :].tolist()


@pytest.mark.parametrize("family", ["Phi3", "Gemma2", "Gemma3"])
def test_transformers_forward_is_captured(tmp_path, family):
    """Targets that are not fused run the same steps over transformers' own forward."""
    import transformers

    sizes = {**SIZES, "hidden_size": 64, "intermediate_size": 96, "max_position_embeddings": 512, "head_dim": 16}
    kind = "Gemma3TextConfig" if family == "Gemma3" else f"{family}Config"
    config = getattr(transformers, kind)(**sizes)
    target = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    widen(target.named_parameters())
    head = write_head(tmp_path, hidden=64)
    model = SpeculativeModel.from_pretrained(target.cuda(), head, drafter="triton", **TREE)
    prompts = random_prompts([1, 9, 70])
    output = model.generate(prompts, max_new_tokens=40)
    assert "CUDA graphs" in output.stats.path, output.stats.path
    assert output.token_ids == [greedy(model, prompt, 40) for prompt in prompts]


def smollm2(dtype, drafter):
    # The tree that was measured, whatever size is the fastest on this GPU.
    model = SpeculativeModel.from_pretrained(dtype=dtype, device="cuda", drafter=drafter, tree=TreeConfig())
    lines = (Path(__file__).parents[3] / "examples" / "prompts.jsonl").read_text(encoding="utf-8").splitlines()[:12]
    return model, [model.encode_chat(json.loads(line)["turns"][0]) for line in lines]


@pytest.mark.parametrize("drafter", ["triton", "reference"])
def test_smollm2_in_fp32_needs_the_measured_passes(drafter: str) -> None:
    model, prompts = smollm2(torch.float32, drafter)
    output = model.generate(prompts, max_new_tokens=40)
    plain = model.generate(prompts, max_new_tokens=40, speculative=False)
    assert "CUDA graphs" in output.stats.path
    assert output.token_ids == plain.token_ids
    assert output.token_ids == [greedy(model, prompt, 40) for prompt in prompts]
    assert output.stats.num_accepted_tokens == output.stats.num_new_tokens - len(prompts) == 468
    assert output.stats.num_passes == pytest.approx(160, abs=2)
    assert f"; drafter {drafter}, fp32 weights, the last 768 tokens" in output.stats.path
    sampled = {"max_new_tokens": 40, "temperature": 1.0, "top_p": 0.9, "seed": 1}
    drafted = model.generate(prompts, **sampled)
    assert drafted.token_ids == model.generate(prompts, speculative=False, **sampled).token_ids


def test_smollm2_in_bf16_is_exact():
    model, prompts = smollm2(torch.bfloat16, "auto")
    output = model.generate(prompts, max_new_tokens=40)
    assert output.token_ids == model.generate(prompts, max_new_tokens=40, speculative=False).token_ids
    assert output.stats.mean_accepted_length == pytest.approx(2.925, rel=0.05)


def test_the_cache_grows_keeps_a_prefix_and_two_models_live_side_by_side(tmp_path):
    model, prompts = pair(tmp_path / "a", "llama")
    other, _ = pair(tmp_path / "b", "mistral")
    short = model.generate(prompts[:1], max_new_tokens=20).token_ids
    assert other.generate(prompts[:2], max_new_tokens=20).token_ids == [greedy(other, p, 20) for p in prompts[:2]]
    model.generate(prompts, max_new_tokens=400, ignore_eos=True)
    assert model.generate(prompts[:1], max_new_tokens=20, reuse_prefix=True).token_ids == short
    turn = [*prompts[0], *short[0], 5, 6]
    output = model.generate(turn, max_new_tokens=20, reuse_prefix=True)
    assert output.stats.num_reused_tokens >= len(turn) - 9
    assert output.token_ids == [greedy(model, turn, 20)]


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events:UserWarning")
def test_nothing_waits_between_the_first_and_the_last_step(tmp_path):
    from torch.profiler import ProfilerActivity, profile

    model, prompts = pair(tmp_path, "llama")
    model.generate(prompts[:2], max_new_tokens=60, ignore_eos=True)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        model.generate(prompts[:2], max_new_tokens=60, ignore_eos=True)
    events = sorted(trace.events(), key=lambda event: event.time_range.start)
    launches = [event for event in events if event.name == "cudaGraphLaunch"]
    assert len(launches) > 20
    first, last = launches[3].time_range.start, launches[-1].time_range.start
    inside = [event.name for event in events if first < event.time_range.start < last]
    assert [name for name in inside if name in WAITS or "Pageable" in name] == []
    # Of each step one copy, of its record, and one wait, for the event behind it.
    steps = inside.count("cudaGraphLaunch")
    assert inside.count("cudaMemcpyAsync") <= steps + 1
    assert inside.count("cudaEventSynchronize") <= steps + 1


def test_phases_have_names_and_times(tmp_path, monkeypatch):
    model, prompts = pair(tmp_path, "llama")
    whole = model.generate(prompts[:1], max_new_tokens=20, ignore_eos=True)
    assert whole.stats.step_s > 0 == sum(step.verify_s for step in whole.stats.steps)
    named = []
    push = torch.cuda.nvtx.range_push
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", lambda name: (named.append(name), push(name))[1])
    phases = model.generate(prompts[:1], max_new_tokens=20, ignore_eos=True, time_phases=True)
    assert phases.token_ids == whole.token_ids
    assert named[:4] == ["draft", "verify", "accept", "commit"]
    assert set(named) == set(named[:4])
    assert all(step.draft_s > 0 < step.verify_s for step in phases.stats.steps)


@pytest.fixture
def captures(monkeypatch):
    """Counts the graphs that are captured."""
    counted = mock.create_autospec(graphs.GraphPool.capture, side_effect=graphs.GraphPool.capture)
    monkeypatch.setattr(graphs.GraphPool, "capture", counted)
    return counted


def test_after_warming_up_a_call_captures_nothing(tmp_path, monkeypatch, captures):
    model, prompts = pair(tmp_path, "llama")
    built = watch_decoders(monkeypatch)
    options = {"temperature": 0.8, "top_p": 0.9}
    first = model.warmup(4, 300, **options)
    assert first.num_graphs == captures.call_count == 5
    assert first.capture_s > 0 < first.compile_s
    assert first.cache_bytes > 0
    assert model.warmup(4, 300, **options).num_graphs == 0
    output = model.generate(prompts[:4], max_new_tokens=20, **options)
    assert built.count == 1
    assert captures.call_count == 5
    assert output.stats.graph_bytes == first.graph_bytes
    assert output.stats.cache_bytes == first.cache_bytes
    assert model.warmup(4, 300, speculative=False).num_graphs == 5


def test_partial_verification_is_warmed_up_too(tmp_path, captures, run_ahead):
    model, _ = pair(tmp_path, "llama")
    run_ahead(num_blocks=1)
    assert model.warmup(1, 300, partial_verification="exact").num_graphs == captures.call_count == 3
    options = {"max_new_tokens": 20, "ignore_eos": True}
    found = model.generate(random_prompts([100]), partial_verification="exact", **options)
    assert found.stats.num_partial_passes > 0
    assert captures.call_count == 3


def test_memory_after_300_calls_is_that_after_30(tmp_path, monkeypatch):
    """Random calls over more numbers of slots and rules than are kept: each is built and captured many times."""
    monkeypatch.setattr(decoders, "MAX_DECODERS", 3)
    monkeypatch.setattr(graphs, "MAX_RULES", 3)
    model, prompts = pair(tmp_path, "llama")
    built = watch_decoders(monkeypatch)
    sampled = {"temperature": 0.8, "seed": 1}
    rules = [{}, sampled, {**sampled, "top_p": 0.9}, {"repetition_penalty": 1.2}, {"suppress_tokens": [5]}]
    kinds = list(product((1, 2, 4), (True, False), rules))
    rng = random.Random(0)
    used, found = [], []
    for calls in (rng.sample(kinds, 30), rng.choices(kinds, k=270)):
        for count, is_drafted, options in calls:
            output = model.generate(prompts[:count], max_new_tokens=12, speculative=is_drafted, **options)
            found.append(((count, rules.index(options)), output.token_ids))
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        used.append(total - free)
    answers = dict(found)
    assert len(answers) == 15
    assert all(token_ids == answers[kind] for kind, token_ids in found)
    assert len(built.alive) == 3
    assert all(len(each.graphs.kept) <= 3 for each in built.alive)
    # Half of what cuBLAS keeps for one more stream.
    assert used[1] - used[0] < 16 << 20
