"""Partial verification: with "exact" the output of plain decoding, whatever runs ahead; "lossy" says that it is."""

import random
from functools import cache

import pytest
import torch
from eagle_slim.runtime import SpeculativeModel, TreeConfig, UnsupportedModelError, UsageError, open_target
from eagle_slim.runtime.settings import PartialVerification
from eagle_slim.runtime.step.kernels.choice_kernels import ChoiceRules
from eagle_slim.runtime.step.kernels.prompt_chunks import MAX_EOS
from eagle_slim.runtime.step.partial import PartialChains, partial_decoder
from eagle_slim.runtime.target.cache import KVCache
from eagle_slim.runtime.target.kernels.attention_kernels import BLOCK
from eagle_slim.runtime.target.short_cache import RECENT, ROWS, ShortCache
from support.sweeps import sweep
from support.tiny_models import VOCAB, tiny_target, write_head

pytestmark = pytest.mark.filterwarnings("ignore::eagle_slim.runtime.errors.AcceptanceWarning")
LONGEST = 1024
TREE = {"tree": TreeConfig(3, 4, 12)}
SAMPLED = {"temperature": 0.9, "top_p": 0.9, "seed": 3}
ALL = 10**6
KINDS = [f"{backend}, {how}" for backend in ("transformers", "fused") for how in ("greedy", "sampled")]
LENGTHS = (0, 40, 63, 64, 320, 383, 384, 700, 1000)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_head(tmp_path_factory.mktemp("head"), max_position_embeddings=LONGEST)


@pytest.fixture(scope="module")
def models(folder):
    @cache
    def build(kind="llama", backend="transformers"):
        target = tiny_target(kind, max_position_embeddings=LONGEST)
        return SpeculativeModel.from_pretrained(open_target(target, target_backend=backend), folder, **TREE)

    return build


def prompts(*lengths):
    draw = random.Random(sum(lengths))
    return [[draw.randrange(3, VOCAB) for _ in range(length)] for length in lengths]


@pytest.mark.parametrize("kind", sweep(KINDS, "transformers, greedy", "fused, sampled"))
def test_all_blocks_are_a_full_pass(models, run_ahead, kind):
    """Then partial passes accept what passes over trees accept, and full ones confirm all of it."""
    model, sampling = models("llama", kind.split(",")[0]), SAMPLED if "sampled" in kind else {}
    given = prompts(5, 70, 450)
    full = model.generate(given, max_new_tokens=24, ignore_eos=True, **sampling)
    run_ahead(num_blocks=ALL)
    found = model.generate(given, max_new_tokens=24, ignore_eos=True, partial_verification="exact", **sampling)
    assert found.token_ids == full.token_ids
    assert found.stats.num_rolled_back_tokens == 0
    # A full pass adds a token of its own.
    assert found.stats.num_passes < full.stats.num_passes <= found.stats.num_partial_passes + found.stats.num_passes


@pytest.mark.parametrize(
    "case",
    sweep(["greedy", "sampled", "batch", "ends", "one ahead", "far ahead", "reused", "penalty"], "greedy", "sampled"),
)
@pytest.mark.parametrize("kind", ["llama", pytest.param("qwen3", marks=pytest.mark.slow)])
def test_exact_is_plain_decoding(models, run_ahead, kind, case):
    model = models(kind)
    given = prompts(500, 333, 65, 7) if case == "batch" else prompts(430 + len(case))
    options = {"max_new_tokens": 24, "ignore_eos": case not in ("ends", "batch")}
    options |= SAMPLED if case in ("sampled", "batch") else {}
    options |= {"repetition_penalty": 1.3} if case == "penalty" else {}
    options |= {"max_slots": 2} if case == "batch" else {}
    others = {"one ahead": {"num_steps": 1, "num_tokens": 1}, "far ahead": {"num_steps": 12, "num_tokens": 40}}
    run_ahead(**others.get(case, {}))
    plain = model.generate(given, speculative=False, **options)
    if case == "ends":
        # Whatever comes up last for the first time.
        options["eos_token_id"] = list(dict.fromkeys(plain.token_ids[0]))[-1]
        plain = model.generate(given, speculative=False, **options)
    if case == "reused":
        options["reuse_prefix"] = True
        model.generate([given[0][:400]], partial_verification="exact", **options)
    found = model.generate(given, partial_verification="exact", **options)
    assert found.token_ids == plain.token_ids
    # An answer may end with the token that its prompt gives.
    assert (found.stats.num_partial_passes > 0) == (found.stats.num_passes > 0)
    assert kind != "llama" or found.stats.num_passes > 0
    assert "passes ahead over 2 blocks (exact)" in found.stats.path
    if case == "reused":
        assert found.stats.num_reused_tokens > 300


def test_lossy_is_what_ran_ahead(models, run_ahead):
    model, given, found = models("llama"), prompts(600), []
    plain = model.generate(given, max_new_tokens=40, ignore_eos=True)
    for num_blocks in (ALL, 1):
        run_ahead(num_blocks=num_blocks)
        found.append(model.generate(given, max_new_tokens=40, ignore_eos=True, partial_verification="lossy"))
    all_of_it, little = found
    assert all_of_it.token_ids == plain.token_ids
    # Random weights attend to all alike, so that little of the prompt gives another text.
    assert little.token_ids != plain.token_ids
    assert little.stats.num_rolled_back_tokens == 0
    assert little.stats.exactness is None
    assert "(lossy)" in little.stats.path


def test_what_is_refused_and_what_stays_full(models, run_ahead, folder):
    model, given = models("llama"), prompts(20)
    for wrong in ("some", True):
        with pytest.raises(UsageError, match="expected one of 'exact', 'lossy'"):
            model.generate(given, partial_verification=wrong)
    with pytest.raises(UsageError, match="lossy"):
        model.generate(given, partial_verification="lossy", repetition_penalty=1.5)
    plain = model.generate(given, partial_verification="exact", speculative=False, max_new_tokens=4)
    assert "every pass is full (plain decoding)" in plain.stats.path
    for kind, backend in (("mistral", "transformers"), ("mistral", "fused"), ("qwen2", "transformers")):
        target = open_target(tiny_target(kind), target_backend=backend)
        windowed = SpeculativeModel.from_pretrained(target, folder, **TREE)
        with pytest.raises(UnsupportedModelError, match="sliding window"):
            windowed.generate(given, partial_verification="exact")
    run_ahead(min_length=65536)
    short = model.generate(given, partial_verification="exact", max_new_tokens=4)
    assert "every pass is full (20 tokens; runs ahead from 65,536)" in short.stats.path
    assert short.stats.num_partial_passes == 0


def test_the_part_holds_what_it_should(models):
    """Sinks, the best blocks of Quest's scores and the recent rows of every slot, each KV head its own, in order."""
    target, num_blocks = models("llama").target.runs, 3
    whole = KVCache.allocate(target, len(LENGTHS), LONGEST)
    for tensor in whole.stacks[0]:
        tensor.normal_()
    part = ShortCache(target, whole, num_blocks, num_new=20, num_changed=16)
    part.queries.normal_()
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    for slot in range(len(LENGTHS)):
        part.bound_slot(torch.tensor([slot]))
    # Rows that are written later are bounded again.
    for slot, length in enumerate(LENGTHS):
        whole.stacks[0][0][:, slot, :, max(0, length - 16) : length] += 3.0
    part.take(lengths)
    keys, values = part.cache.stacks[0]
    for slot, length in enumerate(LENGTHS):
        recent = max(0, length // BLOCK - RECENT)
        count = min(num_blocks, recent)
        assert int(part.lengths[slot]) == count * BLOCK + length - recent * BLOCK
        assert int(part.offsets[slot]) == (recent - count) * BLOCK
        for layer, head in ((0, 0), (3, 1)):
            own = whole.stacks[0][0][layer, slot, head]
            blocks = sorted(best_blocks(own, part.queries[layer, slot, head], recent, num_blocks))
            rows = [row for block in blocks for row in range(block * BLOCK, (block + 1) * BLOCK)]
            rows += range(recent * BLOCK, length)
            assert torch.equal(keys[layer, slot, head, : len(rows)], own[rows])
            assert torch.equal(values[layer, slot, head, : len(rows)], whole.stacks[0][1][layer, slot, head, rows])


def best_blocks(keys, queries, recent, num_blocks):
    """The first block, and of those before ``recent`` the best."""
    scores = {}
    for block in range(1, recent):
        own = keys[block * BLOCK : (block + 1) * BLOCK]
        bounds = [torch.maximum(query * own.amin(0), query * own.amax(0)).sum() for query in queries]
        scores[block] = float(max(bounds))
    best = sorted(scores, key=lambda block: -scores[block])[: num_blocks - 1]
    return [0, *best] if recent else []


@pytest.mark.parametrize("backend", ["transformers", "fused"])
def test_queries_are_those_of_the_last_rows(models, backend):
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    model, (prompt,) = models("llama", backend), prompts(100)
    target, option = model.target.runs, PartialVerification(num_blocks=2, min_length=0)
    target.reserve_positions(200)
    decoder = partial_decoder(target, KVCache.allocate(target, 1, 150), model.drafter.on_slots(1, 150), option)
    decoder.slots.box.numbers.copy_(torch.tensor([0, len(prompt), 1, 0, *[-1] * MAX_EOS]))
    decoder.slots.box.tokens[: len(prompt)] = torch.tensor(prompt)
    with torch.inference_mode():
        for chunk in decoder.prompts.begin(len(prompt)):
            decoder.prompts.run_chunk(chunk, ChoiceRules())
        decoder.prompts.end()
    assert isinstance(decoder.drafts, PartialChains)
    llama = model.target.model.model
    tokens, positions = torch.tensor([prompt[::-1][:ROWS]]), torch.tensor([[99 - back for back in range(ROWS)]])
    layer = llama.layers[0]
    with torch.inference_mode():
        query = layer.self_attn.q_proj(layer.input_layernorm(llama.embed_tokens(tokens))).unflatten(2, (4, -1))
        cos, sin = llama.rotary_emb(query, positions)
        query, _ = apply_rotary_pos_emb(query.transpose(1, 2), query.transpose(1, 2), cos, sin)
    # Two heads share a KV head.
    expected = query[0].unflatten(0, (2, 2)).transpose(1, 2).flatten(1, 2)
    torch.testing.assert_close(decoder.drafts.part.queries[0, 0], expected)
