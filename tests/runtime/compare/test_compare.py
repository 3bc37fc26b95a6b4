"""`compare`: what is measured over what, in which order, and what is refused."""

import copy
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import pairwise, permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from eagle_slim.runtime import GenerationStats, PromptError, SamplingConfig, SpeculativeModel, TreeConfig
from eagle_slim.runtime.compare import CompareOptions, Comparison, Prompt, compare
from eagle_slim.runtime.compare.candidates import PLAIN, Candidate, find_candidates
from eagle_slim.runtime.compare.report import ALL
from eagle_slim.runtime.compare.run import balanced_orders
from eagle_slim.runtime.errors import DeviceMemoryError, EagleSlimError, LogitsError, UsageError
from eagle_slim.vocab_tools.vocabulary import DraftVocab
from support.raising import raises
from support.tiny_models import tiny_target, write_head, write_pair

pytestmark = pytest.mark.filterwarnings("ignore::eagle_slim.runtime.errors.AcceptanceWarning")
VOCAB = 360
FULL = "full (360)"
RANKED = DraftVocab(np.random.default_rng(0).permutation(VOCAB), 258, VOCAB)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> SpeculativeModel:
    target, head = write_pair(tmp_path_factory.mktemp("pair"))
    model = SpeculativeModel.from_pretrained(target, head, tree=TreeConfig(2, 8, 40))
    assert model.opened is not None
    model.opened = replace(model.opened, ranks=RANKED)
    return model


def greedy(*sizes: Any, **options: Any) -> CompareOptions:
    return CompareOptions(**{"sizes": sizes or ("full",), "modes": ("greedy",), "max_new_tokens": 8, **options})


def drafted(result: Comparison) -> list[Candidate]:
    return list(dict.fromkeys(row.candidate for row in result.rows if not row.candidate.is_plain))


def test_a_difference_is_an_error_where_none_may_be(model: SpeculativeModel, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, made = [Prompt(("one two",)), Prompt(("three", "four"))], SpeculativeModel.generate

    def promise(proof: str | None, is_spoiled: bool) -> None:
        def generate(*args: Any, **options: Any) -> Any:
            output = made(*args, **options)
            if is_spoiled and options.get("speculative"):
                output.results[0].token_ids[3:] = []
            return replace(output, stats=replace(output.stats, exactness=proof, is_exact=proof is not None))

        monkeypatch.setattr(SpeculativeModel, "generate", generate)

    promise("rows are exact (sums v1)", False)
    result = compare(model, prompts, greedy())
    assert all(row.stats.is_exact and row.num_identical == row.num_answers for row in result.rows)
    assert [row.cells()["exact"] for row in result.rows] == ["equal", "equal"]
    promise("rows are exact (sums v1)", True)
    with pytest.raises(EagleSlimError, match="at token 3: its end instead of"):
        compare(model, prompts, greedy())
    promise(None, True)
    row = compare(model, prompts, greedy()).rows[1]
    assert (row.stats.is_exact, row.num_identical, row.num_answers) == (False, 0, 3)


def test_a_comparison_measures_what_generate_gives(model: SpeculativeModel) -> None:
    prompts = [Prompt(("one two", "three"), "talk"), Prompt(("four",), "math")]
    sampling = SamplingConfig(0.7, top_p=0.9, seed=3)
    asked = greedy("full", 300, modes=("greedy", "sampled"), sampling=sampling, max_new_tokens=10)
    steps: list[tuple[int, int]] = []
    result = compare(model, prompts, asked, progress=lambda done, total: steps.append((done, total)))
    assert steps == [(done, 18) for done in range(1, 19)]
    assert result.is_complete
    expected = [(size, category) for category in (ALL, "talk", "math") for size in (PLAIN, FULL, "300")]
    assert [(row.label, row.category) for row in result.rows if row.mode == "greedy"] == expected
    assert all(row.num_identical == row.num_answers for row in result.rows)
    # The prompt's forward gave the first token of an answer, passes the others and none beyond its end.
    assert all(row.stats.num_accepted_tokens == row.stats.num_new_tokens - row.num_answers for row in result.rows)
    rows = {(row.label, row.mode, row.category): row for row in result.rows}
    talk_row, plain = rows[FULL, "greedy", "talk"], rows[PLAIN, "sampled", ALL]
    assert (talk_row.num_answers, rows["300", "greedy", ALL].candidate.draft_vocab) == (2, 300)
    assert plain.speedup is not None
    assert (plain.stats.mean_accepted_length, plain.speedup.value) == (1.0, 1.0)
    # A conversation's second turn follows its first answer.
    first = model.generate(model.encode_chat("one two"), max_new_tokens=10)
    talk = [{"role": "user", "content": "one two"}, {"role": "assistant", "content": first.text[0] or ""}]
    second = model.generate(model.encode_chat([*talk, {"role": "user", "content": "three"}]), max_new_tokens=10)
    expected = GenerationStats.sum([first.stats, second.stats])
    assert talk_row.stats.accepted_lengths == expected.accepted_lengths
    assert all(sum(len(a.stats.steps) for a in result.answers if a.candidate == label) for label in (PLAIN, FULL))
    assert {each.mode for each in result.recommendations} == {"greedy", "sampled"}
    setup = result.setup
    assert setup["modes"] == {"greedy": {}, "sampled": asdict(sampling)}
    assert setup["dtype"] == "float32"
    assert setup["trees"] == ["2/8/40"]
    assert setup["heads"] == ["head"]


def test_sizes_that_are_the_same_are_one(model: SpeculativeModel, tmp_path: Path) -> None:
    one = [Prompt(("one",))]
    result = compare(model, one, greedy("full", VOCAB, 300))
    assert [each.label for each in drafted(result)] == [FULL, "300"]
    target, head = tiny_target("llama", vocab_size=VOCAB), write_head(tmp_path, draft_ids=[3, 4, 9], vocab=VOCAB)
    slim = SpeculativeModel.from_pretrained(target, head, tokenizer=model.tokenizer, tree=TreeConfig.of(5, 2))
    assert [each.label for each in drafted(compare(slim, one, greedy()))] == ["all 3 of 360"]


def test_heads_are_told_apart_by_their_folders(
    model: SpeculativeModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(write_head(tmp_path / "mine", vocab=VOCAB))
    write_head(tmp_path / "other", vocab=VOCAB)
    names = (".", "../other", "../mine")
    target, tokenizer = model.target.model, model.tokenizer
    mine, other, same = (SpeculativeModel.from_pretrained(target, each, tokenizer=tokenizer) for each in names)
    result = compare([mine, other], [Prompt(("one",))], greedy("full"))
    assert result.setup["heads"] == ["mine", "other"]
    assert [each.label for each in drafted(result)] == [f"mine: {FULL}", f"other: {FULL}"]
    with raises(UsageError, option="models"):
        compare([mine, same], [Prompt(("one",))])


def test_windows(model: SpeculativeModel) -> None:
    result = compare(model, [Prompt(("one two three four",))], greedy(windows=(None, 0, 3)))
    assert [(each.label, each.draft_window) for each in drafted(result)] == [
        (f"{FULL}, window all", None),
        (f"{FULL}, window 3", 3),
    ]
    assert result.setup["draft_windows"] == [None, 3]
    assert all(row.num_identical == row.num_answers for row in result.rows)
    assert [
        each.draft_window for each in drafted(compare(model.with_draft_window(5), [Prompt(("one",))], greedy()))
    ] == [5]


def test_a_cpu_chooses_its_trees_unless_they_are_given(model: SpeculativeModel) -> None:
    """Of 60 nodes, as a GPU compares, it would be slower than plain decoding."""
    chosen = find_candidates([model.with_tree(None)], CompareOptions(sizes=("full",)))
    given = find_candidates([model], CompareOptions(sizes=("full",)))
    assert [each.tree_words for each in (*chosen, *given)] == ["auto", "2/8/40"]


@pytest.mark.slow
def test_several_trees_heads_and_batches(model: SpeculativeModel, tmp_path: Path) -> None:
    prompts = [Prompt((text,), category) for text, category in (("one", "a"), ("two", "a"), ("three", "b"))]
    target, head = model.target.model, write_head(tmp_path / "other", vocab=VOCAB)
    other = SpeculativeModel.from_pretrained(target, head, tokenizer=model.tokenizer, tree=TreeConfig.of(1, 2))
    trees = (TreeConfig(2, 8, 40), None)
    result = compare([model, other], prompts, greedy(trees=trees, batches=(1, 2)))
    labels = [f"{head}: {FULL}, tree {tree}" for head in ("head", "other") for tree in ("2/8/40", "auto")]
    assert len(result.answers) == 5 * (3 + 2)
    expected = [(name, batch, 3 if batch == 1 else 4) for batch in (1, 2) for name in (PLAIN, *labels)]
    assert [(row.label, row.batch, row.num_answers) for row in result.rows if row.category == ALL] == expected
    # The second pair is filled up from the beginning, and its prompts are of two categories.
    assert [a.group for a in result.answers if (a.batch, a.candidate) == (2, PLAIN)] == [0, 2]
    assert {row.category for row in result.rows if row.batch == 2} == {ALL, "a"}
    assert [candidate.tree for candidate in drafted(result)[:2]] == [(2, 8, 40), (0, 0, 0)]
    assert [(each.mode, each.batch) for each in result.recommendations] == [("greedy", 1), ("greedy", 2)]
    assert all(row.num_identical == row.num_answers for row in result.rows)


def test_the_order_of_each_prompt_is_drawn_and_balanced() -> None:
    for count, rows in ((2, 2), (3, 6), (4, 4)):
        orders = balanced_orders(count, np.random.default_rng(0))
        block = [next(orders) for _ in range(rows)]
        for place in range(count):
            assert Counter(order[place] for order in block) == dict.fromkeys(range(count), rows // count)
        pairs = Counter(pair for order in block for pair in pairwise(order))
        assert pairs == dict.fromkeys(permutations(range(count), 2), rows // count)
    assert len({tuple(next(orders)) for _ in range(60)}) > rows


def test_a_single_category_has_no_rows_of_its_own(model: SpeculativeModel) -> None:
    result = compare(model, [Prompt(("one",), "a"), Prompt(("two",), "a")], greedy())
    assert [(row.label, row.category, row.num_answers) for row in result.rows] == [(PLAIN, ALL, 2), (FULL, ALL, 2)]


def test_a_prompt_without_room_is_refused_before_anything_is_measured(model: SpeculativeModel) -> None:
    with raises(PromptError) as caught:
        prompts = [Prompt((text,)) for text in ("one", "two", "x " * 300)]
        compare(model, prompts, greedy(), progress=lambda *_: pytest.fail("measured"))
    assert caught.value.prompt == 2


def test_a_later_turn_without_room_is_left_out_and_told(model: SpeculativeModel) -> None:
    result = compare(model, [Prompt(("one", "x " * 300, "two")), Prompt(("two",))], greedy())
    assert result.is_complete
    assert [row.num_answers for row in result.rows] == [2, 2]
    (omission,) = result.omissions
    assert omission.prompt == 0
    assert (omission.candidate, omission.is_fault) == (PLAIN, False)
    assert re.match("turn 2 left out: .* no room", omission.message)


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make `generate` raise an error wherever the first function says so of the draft vocabulary and the prompts."""
    made = SpeculativeModel.generate

    def fail(is_asked: Callable[..., bool], error: BaseException, warms: bool = False) -> None:
        def generate(self: SpeculativeModel, ids: Any, **options: Any) -> Any:
            draft_vocab = self.draft_vocab if options.get("speculative", True) else 0
            # Shorter ones make warm.
            if (options["max_new_tokens"] > 2 or warms) and is_asked(draft_vocab, ids):
                raise error
            return made(self, ids, **options)

        monkeypatch.setattr(SpeculativeModel, "generate", generate)

    return fail


@pytest.mark.parametrize("fault", [DeviceMemoryError, LogitsError])
def test_batches_that_fail(model: SpeculativeModel, failing: Callable[..., None], fault: type[EagleSlimError]) -> None:
    failing(lambda draft_vocab, ids: len(ids) == 2, fault("too small"))
    result = compare(model, [Prompt(("one",)), Prompt(("two",))], greedy(batches=(1, 2)))
    assert [(row.batch, row.num_answers) for row in result.rows] == [(1, 2), (1, 2)]
    assert [(each.batch, each.is_fault) for each in result.omissions] == [(2, False)]
    with raises(EagleSlimError, option="too small"):
        compare(model, [Prompt(("one",)), Prompt(("two",))], greedy(batches=(2,)))


def test_a_later_turn_that_the_template_refuses_is_left_out(model: SpeculativeModel, tmp_path: Path) -> None:
    only_first = "{% if messages|length > 2 %}{{ raise_exception('one turn') }}{% endif %}{{ messages[0]['content'] }}"
    tokenizer = copy.deepcopy(model.tokenizer)
    tokenizer.chat_template = only_first
    head = write_head(tmp_path / "other", vocab=VOCAB)
    other = SpeculativeModel.from_pretrained(model.target.model, head, tokenizer=tokenizer, tree=TreeConfig(2, 2, 7))
    prompts = [Prompt((text, *more)) for text, more in (("a", ()), ("b", ("c", "d")), ("e", ()))]
    steps: list[tuple[int, int]] = []
    result = compare(other, prompts, greedy(), progress=lambda *step: steps.append(step))
    assert ([row.num_answers for row in result.rows], steps[-1], result.is_complete) == ([3, 3], (10, 10), True)
    (omission,) = result.omissions
    assert (omission.candidate, omission.prompt, omission.is_fault) == (PLAIN, 1, False)
    assert re.match("turn 2 left out: .*one turn", omission.message)


def test_a_candidate_that_fails_costs_no_other(model: SpeculativeModel, failing: Callable[..., None]) -> None:
    prompts = [Prompt((f"question {number}",)) for number in range(9)]
    asked = Counter[int]()

    def is_broken(draft_vocab: int, ids: Any) -> bool:
        asked[draft_vocab] += 1
        return draft_vocab == 300 and asked[300] > 3

    failing(is_broken, RuntimeError("CUDA error: an illegal\nmemory access"))
    result = compare(model, prompts, greedy("full", 300))
    found = [(row.label, row.num_answers, row.num_prompts, row.is_compared) for row in result.rows]
    assert found == [(PLAIN, 9, 9, True), (FULL, 9, 9, True), ("300", 3, 3, False)]
    alone = result.rows[2]
    assert alone.stats.num_new_tokens == sum(a.stats.num_new_tokens for a in result.answers if a.candidate == "300")
    assert alone.speedup is not None
    assert result.recommendations[0].as_fast == (FULL,)
    assert result.recommendations[0].reasons[-1] == "300 is not compared, as it failed too often."
    (omission,) = result.omissions
    told = "300, batch 1, prompt 3 (6 times): turn 1 left out: RuntimeError: CUDA error: an illegal memory access"
    assert str(omission) == told
    assert omission.is_fault


def test_a_single_failure_leaves_its_turn_out_for_all(model: SpeculativeModel, failing: Callable[..., None]) -> None:
    prompts, second = [Prompt((text,)) for text in ("one", "two", "three")], model.encode_chat("two")
    failing(lambda draft_vocab, ids: draft_vocab == 300 and ids[0] == second, MemoryError())
    result = compare(model, prompts, greedy("full", 300))
    assert [(row.num_answers, row.num_prompts, row.is_compared) for row in result.rows] == [(2, 2, True)] * 3
    assert Counter(answer.candidate for answer in result.answers) == {PLAIN: 3, FULL: 3, "300": 2}
    # Where plain decoding fails, nothing can be compared.
    failing(lambda draft_vocab, ids: draft_vocab == 0 and ids[0] == second, MemoryError())
    result = compare(model, prompts, greedy("full", 300))
    assert [row.num_answers for row in result.rows] == [2] * 3


def test_candidates_that_fail_in_turn_keep_their_figures(model: SpeculativeModel, failing: Callable[..., None]) -> None:
    prompts = [Prompt((text,)) for text in ("one", "two")]
    broken = dict(zip((VOCAB, 300), (model.encode_chat(prompt.turns[0]) for prompt in prompts), strict=True))
    failing(lambda draft_vocab, ids: ids[0] == broken.get(draft_vocab), RuntimeError("no"))
    result = compare(model, prompts, greedy("full", 300))
    assert [(row.num_answers, row.is_compared) for row in result.rows] == [(2, True), (1, False), (1, False)]
    assert all(row.measured for row in result.rows)


def test_what_does_not_start_is_left_out(model: SpeculativeModel, failing: Callable[..., None]) -> None:
    prompts, broken = [Prompt(("one",)), Prompt(("two",))], {300}
    failing(lambda draft_vocab, ids: draft_vocab in broken and len(ids) == 2, RuntimeError("does not fit"), warms=True)
    rows = compare(model, prompts, greedy("full", 300, batches=(1, 2))).rows
    assert [(row.batch, row.num_answers) for row in rows] == [(1, 2)] * 3 + [(2, 2), (2, 2), (2, 0)]
    broken.add(VOCAB)
    with pytest.raises(RuntimeError, match="does not fit"):
        compare(model, prompts, greedy("full", 300, batches=(2,)), progress=lambda *_: pytest.fail("measured"))


def test_ctrl_c_keeps_what_was_answered(model: SpeculativeModel, failing: Callable[..., None]) -> None:
    prompts, second = [Prompt(("one",)), Prompt(("two",))], model.encode_chat("two")
    failing(lambda draft_vocab, ids: ids[0] == second, KeyboardInterrupt())
    result = compare(model, prompts, greedy())
    assert ([row.num_answers for row in result.rows], result.is_complete) == ([1, 1], False)
    with pytest.raises(KeyboardInterrupt):
        compare(model, prompts[1:], greedy())


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"sizes": ()}, "sizes"),
        ({"sizes": ("all",)}, "all"),
        ({"sizes": (0,)}, "0"),
        ({"modes": ("greedy", "greedy")}, "modes"),
        ({"modes": ("wild",)}, "wild"),
        ({"batches": (0, 1)}, "batches"),
        ({"max_new_tokens": 1}, "max_new_tokens"),
        ({"sampling": SamplingConfig()}, "temperature"),
    ],
    ids=str,
)
def test_options_out_of_range(options: dict[str, Any], word: str) -> None:
    with raises(UsageError, option=word):
        CompareOptions(**options)


def test_what_cannot_be_compared(model: SpeculativeModel, tmp_path: Path) -> None:
    prompts = [Prompt(("x",))]
    with raises(UsageError, option="prompts"):
        compare(model, [], greedy())
    elsewhere = SpeculativeModel.from_pretrained(*write_pair(tmp_path, seed=1))
    for models in ([], [model, model.with_tree(TreeConfig(1, 1, 2))], [model, elsewhere]):
        with raises(UsageError, option="models"):
            compare(models, prompts, greedy())
    with raises(UsageError, option="5000"):
        compare(model, prompts, greedy(5000))
