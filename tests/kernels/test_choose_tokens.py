"""Choosing tokens: cases by hand, the twin against transformers' own, the kernels against the twin."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
import triton
import triton.language as tl
from eagle_slim.runtime import SamplingConfig, UsageError
from eagle_slim.runtime.api.sampling import build_processors
from eagle_slim.runtime.drafter.tuning.timing import capture
from eagle_slim.runtime.step.kernels import choose_tokens as kernels
from eagle_slim.runtime.step.kernels.choice_kernels import ALL_BARRED, NO_NUMBER
from eagle_slim.runtime.step.kernels.choose_tokens import ChoiceRules, bit_mask, token_bits
from eagle_slim.runtime.step.kernels.token_noise import token_noise, token_noise_ref
from eagle_slim.runtime.step.kernels.token_weights import FAR, ONE, distance_weight_ref, score_distance_ref
from eagle_slim.runtime.target.kernels.machine import NO_FUSION
from kernels.choosing import ALL_RULES, CHAIN_AND_FORK, GREEDY, RULES, SAMPLED, expected_tokens, random_case, row_case
from support.raising import raises_with
from support.sampling import exponentials, splitmix
from support.sweeps import sweep

# The interpreter runs on numpy, where infinities that meet warn.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
SLOW = pytest.mark.slow
WIDE_TREE = [-1, *[(node - 1) // 3 for node in range(1, 60)]]


def rules_of(config: SamplingConfig) -> ChoiceRules:
    return ChoiceRules(not config.is_greedy, config.top_k > 0, config.top_p < 1, config.min_p > 0)


@pytest.fixture
def _stable_sort(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal scores in id order for transformers too, whose top-p leaves open which of them it drops."""
    monkeypatch.setattr(torch, "sort", partial(torch.sort, stable=True))


def test_noise_by_hand() -> None:
    """v = 0.8833, 0.4315, 0.0264, 0.9709; -ln(1 - v) = 2.1482, 0.5648, 0.0268, 3.5364."""
    ids = torch.arange(4)
    # The first outputs of SplitMix64 seeded with 0, as its authors' programs print them.
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC]
    assert splitmix(0, ids).tolist() == published
    exponential = torch.tensor([2.1482, 0.5648, 0.0268, 3.5364])
    torch.testing.assert_close(exponentials(0, ids).float(), exponential, atol=1e-4, rtol=0)
    noise = token_noise_ref(0, ids) / 2**24
    torch.testing.assert_close(noise, exponential.log(), atol=2e-3, rtol=0)


def test_noise_is_exponential_to_the_last_but_a_few_bits(device: str) -> None:
    """The kernel's noise is the twin's, that within a millionth of the logarithm's, and exponentially distributed."""
    from scipy import stats

    size, noise = 1 << 14, []
    for key in (0, 1, -1, -(2**63), 2**63 - 1, 123456789012345678):
        out = torch.empty(size, dtype=torch.int32, device=device)
        _noise_kernel[(1,)](torch.tensor([key], device=device), out, SIZE=size, **NO_FUSION)
        twin = token_noise_ref(key, torch.arange(size, device=device))
        assert torch.equal(out.long(), twin)
        exact = exponentials(key, torch.arange(size)).log() * 2**24
        error = (twin.cpu() - exact).abs()
        assert error.max() <= 8
        noise.append(twin.double().cpu() / 2**24)
    arrivals = torch.cat(noise).exp()
    assert stats.kstest(arrivals.numpy(), "expon").pvalue > 0.001


@triton.jit
def _noise_kernel(key_ptr, out_ptr, SIZE: tl.constexpr):
    ids = tl.arange(0, SIZE)
    tl.store(out_ptr + ids, token_noise(tl.load(key_ptr), ids))


def test_by_hand() -> None:
    """Probabilities 1/7, 2/7, 4/7, 0; -ln(1 - v) over them, by key: the smallest wins of what the cuts leave.

    Key 0: 15.04, 1.98, 0.05. Key 1: 5.85, 4.79, 6.20. Key 3: 0.84, 4.22, 1.66.
    """
    logits = torch.tensor([0.0, math.log(2), math.log(4), float("-inf")])
    case = row_case(logits.repeat(3, 1), torch.tensor([0, 1, 3]))
    case.set_numbers(top_k=2, top_p=0.5, min_p=0.4)
    for choose in (case.choose, case.choose_ref):
        assert choose(GREEDY).flatten().tolist() == [2] * 3
        assert choose(SAMPLED).flatten().tolist() == [2, 1, 0]
        assert choose(replace(SAMPLED, has_top_k=True)).flatten().tolist() == [2, 1, 2]
        assert choose(replace(SAMPLED, has_top_p=True)).flatten().tolist() == [2] * 3
        assert choose(replace(SAMPLED, has_min_p=True)).flatten().tolist() == [2, 1, 2]


def test_a_penalty_after_no_root() -> None:
    """A prompt's last chunk chooses after a root of -1: the prompt has been seen already, the last id need not be."""
    case = row_case(torch.tensor([[1.0, 3.0, 2.0, 4.0]]), torch.tensor([0]))
    case.trees.draft_tokens.fill_(-1)
    case.state.seen[0] = token_bits(torch.tensor([1]), 4)
    case.set_numbers(repetition_penalty=2.0)
    for choose in (case.choose, case.choose_ref):
        assert choose(replace(GREEDY, has_penalty=True)).tolist() == [[3]]


def test_weights() -> None:
    distances = torch.cat([torch.arange(0, FAR.value, 99991), torch.tensor([FAR.value])])
    exact = torch.exp(-distances.double() / 2**24) * ONE.value
    weights = distance_weight_ref(distances)
    assert ((weights - exact).abs() <= 2e-8 * exact + 1).all()
    assert (weights.diff() <= 0).all()
    assert int(weights[0]) == ONE.value
    assert int(weights[-1]) == 0
    distances = score_distance_ref(torch.tensor([1.0, 2.0, -300.0, float("-inf")]))
    assert distances.tolist() == [1 << 24, 0, FAR.value, FAR.value]


def extreme_rows(vocab: int = 40) -> torch.Tensor:
    """Float32 [6, vocab]: one token with all the mass, all equal, two equal ones, -inf but for one, huge, and tiny."""
    rows = torch.randn(6, vocab)
    rows[0, 17] = 1000.0
    rows[1] = 0.25
    rows[2] = float("-inf")
    rows[2, [5, 30]] = 2.0
    rows[3] = float("-inf")
    rows[3, vocab - 1] = -5.0
    rows[4] *= 1e30
    rows[5] *= 1e-30
    return rows


USUAL = [SamplingConfig(*each) for each in ((0.0,), (1.0,), (0.7, 20), (0.7, 0, 0.9))]
USUAL += [SamplingConfig(1.5, min_p=0.05), SamplingConfig(0.6, top_k=20, top_p=0.95, min_p=0.01)]
EDGES = [SamplingConfig(2.0, top_k=5000), SamplingConfig(1e-45)]
EDGES += [SamplingConfig(1.0, **each) for each in ({"top_p": 1e-6}, {"top_k": 1}, {"min_p": 1.0})]


@pytest.mark.usefixtures("_stable_sort")
@pytest.mark.parametrize("rounded", sweep([False, True], False), ids=["float32", "bf16 ties"])
@pytest.mark.parametrize("config", [*USUAL, *EDGES], ids=str)
def test_the_twin_chooses_as_transformers_does(config: SamplingConfig, rounded: bool) -> None:
    # Scores over so low a temperature are infinite to transformers; the cuts take tiny ones for equal.
    extremes = [extreme_rows()[:5].repeat(8, 1)] if config.temperature > 0.1 else []
    for rows in (*(torch.randn(64, vocab) * 4 for vocab in (3, 100, 3000)), *extremes):
        logits = rows.bfloat16() if rounded else rows
        keys = torch.empty(len(rows), dtype=torch.int64).random_()
        case = row_case(logits, keys)
        case.set_numbers(config.temperature, config.top_k, config.top_p, config.min_p)
        assert torch.equal(case.choose_ref(rules_of(config))[:, 0].long(), expected_tokens(logits, keys, config))


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("sizes", sweep([(33, 32, 8), (1000, 512, 0), (1025, 512, 100)], (33, 32, 8)))
def test_kernels_equal_the_twin(sizes: tuple[int, int, int], name: str, device: str) -> None:
    """Whether the searches list what is left at once, late, or never."""
    vocab, tile, capacity = sizes
    dtypes = {33: torch.float32, 1000: torch.bfloat16, 1025: torch.float16}
    case = random_case(vocab, parents=[-1, 0, 0, 1], dtype=dtypes[vocab], device=device)
    case.logits[:6] = extreme_rows(vocab)
    case.set_numbers(0.8, 25, 0.85, 0.02, 1.3, 5)
    assert torch.equal(case.choose(RULES[name], tile, capacity), case.choose_ref(RULES[name]))


@pytest.mark.parametrize(("vocab", "tile", "capacity"), [(33, 32, 8), pytest.param(1025, 512, 100, marks=SLOW)])
def test_a_slots_tokens_are_those_of_its_own_rules_alone(vocab: int, tile: int, capacity: int, device: str) -> None:
    """Whatever stages run for the others: each slot with numbers of its own, beside those that change nothing."""
    neutral = [1.0, vocab, 1.0, 0.0, 1.0, 0.0]
    own = {
        GREEDY: [0.0, vocab, 1.0, 0.0, 1.0, 0.0],
        SAMPLED: [0.7, *neutral[1:]],
        replace(SAMPLED, has_top_k=True): [1.5, 3, *neutral[2:]],
        replace(SAMPLED, has_top_p=True): [1.5, vocab, 0.6, *neutral[3:]],
        replace(SAMPLED, has_min_p=True, has_penalty=True): [1.1, vocab, 1.0, 0.1, 1.4, 0.0],
    }
    case = random_case(vocab, slots=len(own), parents=[-1, 0], device=device)
    # Most scores lie so low that they have no weight.
    case.logits[4::2] *= 12
    case.state.suppressed.zero_()
    case.state.numbers.copy_(torch.tensor([*own.values()], dtype=torch.float32))
    alone = torch.stack([case.choose_ref(rules)[slot] for slot, rules in enumerate(own)])
    for rules in (ALL_RULES, replace(ALL_RULES, has_top_k=False)):
        rows = [slot for slot, each in enumerate(own) if rules.covers(each)]
        assert torch.equal(case.choose(rules, tile, capacity)[rows], alone[rows])
        assert torch.equal(case.choose_ref(rules)[rows], alone[rows])
    assert len(rows) == len(own) - 1


@SLOW
def test_ties_at_every_cut(device: str) -> None:
    """Three values only, so that each cut falls among equals; of those top-p keeps the last ids."""
    case = random_case(300, slots=1, device=device)
    case.logits = torch.randint(0, 3, case.logits.shape, device=device).float()
    for top_k, top_p in ((50, 0.5), (150, 0.9), (299, 0.05)):
        case.set_numbers(top_k=top_k, top_p=top_p)
        rules = replace(SAMPLED, has_top_k=True, has_top_p=True)
        assert torch.equal(case.choose(rules, 128, capacity=120), case.choose_ref(rules))
    case.set_numbers(top_p=0.05)
    rules = replace(SAMPLED, has_top_p=True)
    kept = case.choose(rules, 128).flatten()
    for row, token in zip(case.logits, kept.tolist(), strict=True):
        assert token > int((row == row.max()).nonzero()[0])


@pytest.mark.parametrize("config", [SamplingConfig(0.0), SamplingConfig(0.9, top_k=40, top_p=0.9)], ids=str)
def test_processors_along_paths(config: SamplingConfig, device: str) -> None:
    """Each node as transformers' processors see it: the prompt, the answer so far, and the node's path."""
    vocab, penalty, minimum = 200, 1.7, 4
    case = random_case(vocab, device=device)
    case.set_numbers(config.temperature, config.top_k, config.top_p, repetition_penalty=penalty, min_new_tokens=minimum)
    eos = bit_mask(case.state.eos[0], vocab).nonzero()[:, 0].tolist()
    suppressed = bit_mask(case.state.suppressed[0], vocab).nonzero()[:, 0].tolist()
    options = {"repetition_penalty": penalty, "min_new_tokens": minimum, "suppress_tokens": suppressed}
    wanted = []
    for slot in range(2):
        # The end of text is what everyone would choose.
        case.logits[slot * case.nodes :][: case.nodes, eos] = 20.0
        generated = int(case.state.num_generated[slot])
        text = torch.randint(vocab, (30,)).tolist()
        case.state.seen[slot] = token_bits(torch.tensor([*text, int(case.trees.draft_tokens[slot, 0])]), vocab)
        # ``generated`` tokens are new, the root the last of them.
        processors = build_processors(options, len(text) + 1 - generated, eos, vocab)
        for node in range(case.nodes):
            path = [node]
            while (parent := CHAIN_AND_FORK[path[0]]) >= 0:
                path.insert(0, parent)
            ids = torch.tensor([text + case.trees.draft_tokens[slot, path].tolist()])
            row = case.logits[slot * case.nodes + node : slot * case.nodes + node + 1].float().cpu()
            number = generated + len(path) - 1
            scores = processors(ids, row)
            wanted.append(int(expected_tokens(scores, case.state.keys[slot, number : number + 1], config)))
    rules = replace(rules_of(config), has_penalty=True, has_suppressed=True, has_minimum=True)
    assert case.choose(rules).flatten().tolist() == wanted
    assert case.choose_ref(rules).flatten().tolist() == wanted
    assert set(wanted) & set(eos)  # reached, where it may be


@pytest.mark.parametrize("name", ["greedy", "everything"])
def test_places_beyond_the_active_ones_are_skipped(name: str, device: str) -> None:
    case = random_case(100, slots=4, parents=[-1, 0], active=[3, 1], device=device)
    case.set_numbers(0.8, 25, 0.85, 0.02, 1.3, 5)
    case.logits[2 * case.nodes :] = float("nan")
    chosen = case.choose(RULES[name], 64)
    assert (chosen[2:] == -1).all()
    assert (chosen[:2] >= 0).all()
    assert torch.equal(chosen, case.choose_ref(RULES[name]))
    case.trees.active_count.zero_()
    assert (case.choose(RULES[name], 64) == -1).all()


@pytest.mark.parametrize("name", ["greedy", "sampled", "everything"])
@pytest.mark.parametrize("value", ["nan", pytest.param("inf", marks=SLOW), pytest.param("-inf", marks=SLOW)])
def test_a_row_without_a_distribution_has_no_token(value: str, name: str, device: str) -> None:
    """One NaN or infinite score among others, in the last tile; or no token left."""
    case = random_case(100, parents=[-1, 0], device=device)
    case.set_numbers(top_k=9, top_p=0.9, min_p=0.01)
    case.logits[3, 99 if value != "-inf" else slice(None)] = float(value)
    case.state.suppressed.zero_()
    choices = case.choose(RULES[name], tile=32)
    assert int(choices.flatten()[3]) == (ALL_BARRED.value if value == "-inf" else NO_NUMBER.value)
    assert torch.equal(choices, case.choose_ref(RULES[name]))
    assert int((choices < 0).sum()) == 1


def test_accepted_tokens_are_marked(device: str) -> None:
    seen = torch.zeros(3, 4, dtype=torch.int32, device=device)
    seen[2, 0] = 1
    tokens = torch.tensor([[1, 2, -1], [5, 6, 7], [31, 32, 127]], dtype=torch.int32, device=device)
    active = torch.tensor([2, 0, 1], dtype=torch.int32, device=device)
    count = torch.tensor([2], dtype=torch.int32, device=device)
    wanted = seen.clone()
    kernels.mark_seen(tokens, active, count, seen)
    kernels.mark_seen_ref(tokens, active, count, wanted)
    assert torch.equal(seen, wanted)
    marked = [bit_mask(words, 128).nonzero()[:, 0].tolist() for words in seen]
    assert marked == [[1, 2], [], [0, 31, 32, 127]]


def test_logits_in_float64_and_vocabularies_beyond_int64_sums_are_refused() -> None:
    case = random_case(50)
    for logits in (case.logits.double(), torch.zeros(10, 1 << 19)):
        case.logits = logits
        with raises_with(UsageError, "logits"):
            case.choose(GREEDY)


@pytest.mark.gpu
@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
@pytest.mark.parametrize("vocab", [128256, 49152, 50257])
def test_kernels_equal_the_twin_at_real_vocabularies(vocab: int, rules: ChoiceRules) -> None:
    case = random_case(vocab, slots=2, parents=WIDE_TREE, active=[1], dtype=torch.bfloat16, device="cuda")
    for numbers in ((0.7, 20, 0.9, 0.01, 1.1, 4), (1.5, 50000, 0.5, 1e-4, 2.0, 0), (0.05, 3, 0.999, 0.3, 0.5, 9)):
        case.set_numbers(*numbers)
        wanted = case.choose_ref(rules)
        assert torch.equal(case.choose(rules, tile=4096), wanted)
        if rules.has_top_k or rules.has_top_p:
            assert torch.equal(case.choose(rules, tile=1024, capacity=0), wanted)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
@pytest.mark.parametrize("rules", [GREEDY, ALL_RULES], ids=["greedy", "everything"])
def test_one_graph_serves_all_values(rules: ChoiceRules) -> None:
    """Replays follow logits, numbers, keys and active slots; nothing is allocated and nothing waits."""
    vocab = 49152
    case = random_case(vocab, slots=2, parents=WIDE_TREE, dtype=torch.bfloat16, device="cuda")
    case.set_numbers(0.7, 20, 0.9, 0.01, 1.1, 4)
    out = torch.empty(2, case.nodes, dtype=torch.int32, device="cuda")
    scratch = kernels.choice_scratch(2, case.nodes, vocab, "cuda")

    def choose() -> None:
        kernels.choose_tokens(case.logits, case.trees, rules, case.state, out, scratch)

    choose()
    allocated = torch.cuda.memory_stats()["allocation.all.allocated"]
    with torch.cuda.device(0):
        try:
            torch.cuda.set_sync_debug_mode("error")
            choose()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == allocated
    graph = capture(choose)
    for active, numbers in (([1, 0], (1.2, 100, 0.7, 0.0, 1.3, 0)), ([0], (0.4, 5000, 0.95, 0.02, 0.8, 8))):
        case.trees.active_slots.copy_(torch.tensor(active + [1 - active[0]] * (2 - len(active)), dtype=torch.int32))
        case.trees.active_count.fill_(len(active))
        case.set_numbers(*numbers)
        case.logits.copy_(torch.randn(case.logits.shape) * 3)
        case.state.keys.random_()
        graph()
        assert torch.equal(out, case.choose_ref(rules))
