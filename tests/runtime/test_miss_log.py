"""The log of generated tokens: what is counted, that it adds up, merges and ranks, and what is refused."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from eagle_slim.runtime import GenerationOutput, GenerationStats, MissLog, RequestOutput
from eagle_slim.runtime.compare import CompareOptions, Prompt
from eagle_slim.runtime.compare.answers import Answer, AnswerKey
from eagle_slim.runtime.compare.candidates import PLAIN, Candidate
from eagle_slim.runtime.compare.plan import Plan
from eagle_slim.runtime.compare.run import log_of_answers
from eagle_slim.runtime.miss_log import check_log
from eagle_slim.vocab_tools import TokenCounts, merge_counts, rank_vocabulary
from eagle_slim.vocab_tools.errors import TokenizerError, UsageError, VocabularyError
from support.raising import raises
from support.token_counts import token_counts


def output(*answers: list[int], missed: dict[int, int] | None = None) -> GenerationOutput:
    results = tuple(RequestOutput([1], answer, None, "length", GenerationStats()) for answer in answers)
    stats = GenerationStats(num_new_tokens=sum(map(len, answers)), missed_ids=missed or {})
    return GenerationOutput(results, stats)


def new_log(tokenizer_hash: str | None = "h", size: int = 10) -> MissLog:
    return MissLog(size, tokenizer_hash, "a/target")


def test_all_tokens_are_counted_and_a_log_is_added_to(tmp_path: Path) -> None:
    path, log = tmp_path / "use.safetensors", new_log()
    log.add(output([3, 3, 5], [9], missed={9: 1}), draft_vocab=4)
    assert (log.num_tokens, log.save(path), log.num_tokens, log.save(path)) == (4, 4, 0, 0)
    log.add(output([5, 11]), draft_vocab=4)  # 11 is a padding row of the model
    log.add(output([2], missed={2: 1}), draft_vocab=6, source="code")
    log.save(path)
    counts = TokenCounts.load(path)
    assert [(source.name, source.weight) for source in counts.sources] == [("generated", 1.0), ("code", 1.0)]
    assert counts.sources[0].counts.tolist() == [0, 0, 0, 2, 0, 2, 0, 0, 0, 1]
    assert counts.tokenizer_hash == "h"
    provenance = counts.sources[0].provenance
    assert provenance["missed"] == {"4": {"tokens": 6, "missed": 1}}
    assert (provenance["answers"], provenance["tokens"], provenance["targets"]) == (3, 5, ["a/target"])
    assert counts.sources[1].provenance["missed"] == {"6": {"tokens": 1, "missed": 1}}


def test_the_same_text_gives_the_same_bytes_and_is_not_merged_twice(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        log = new_log()
        log.add(output([1, 2], [4] if name == "c" else [3]))
        log.save(tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    a, b, c = (TokenCounts.load(tmp_path / name) for name in ("a", "b", "c"))
    with raises(VocabularyError, repeated="provenance"):
        merge_counts([a, b])
    assert merge_counts([a, c]).sources[0].counts.tolist() == [0, 2, 2, 1, 1, 0, 0, 0, 0, 0]


def test_merged_with_a_corpus_it_ranks_what_is_common_here_before_what_is_rare_there(tmp_path: Path) -> None:
    base = token_counts([50, 40, 30, 20, 10, 5, 0, 0, 1, 0], tokenizer_hash="h")
    assert rank_vocabulary(base, 4).target_ids.tolist() == [0, 1, 2, 3]
    log = new_log()
    log.add(output([7, 7, 7, 3, 3, 3, 0, 0, 6]))
    log.save(tmp_path / "log")
    merged = merge_counts([base, TokenCounts.load(tmp_path / "log")], {"generated": 0.5})
    # Shares, of 156 and of 9 tokens, by 1 and 0.5: 0 and 3 lead, then 1, then 7, which here is a third of the text.
    assert rank_vocabulary(merged, 5).target_ids.tolist() == [0, 3, 1, 2, 7]
    equal = merge_counts([base, TokenCounts.load(tmp_path / "log")])
    assert rank_vocabulary(equal, 4).target_ids.tolist() == [0, 3, 7, 1]


def test_files_that_are_no_log_of_this_tokenizer(tmp_path: Path) -> None:
    path = tmp_path / "log"
    token_counts([1] * 10, tokenizer_hash="h").save(path)
    with raises(VocabularyError, path=str(path), found=["text"]):
        check_log(path)
    before = path.read_bytes()
    log = new_log()
    log.add(output([1]))
    with raises(VocabularyError, path=str(path)):
        log.save(path)
    assert path.read_bytes() == before
    assert log.num_tokens == 1
    log.save(tmp_path / "own")
    with raises(TokenizerError, expected="other", found="h"):
        check_log(tmp_path / "own", new_log("other"))
    with raises(VocabularyError, expected=11, found=10):
        check_log(tmp_path / "own", new_log(size=11))
    with raises(UsageError, found="folder"):
        check_log(tmp_path)
    with raises(UsageError, found=None):
        check_log(tmp_path / "nowhere" / "log")
    (tmp_path / "text").write_text("not counts")
    with raises(VocabularyError, path=str(tmp_path / "text")):
        check_log(tmp_path / "text")
    assert check_log(tmp_path / "new") is None


def test_a_kill_leaves_the_log_as_it_was_or_as_it_will_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, log = tmp_path / "log", new_log()
    log.add(output([1]))
    log.save(path)
    before = path.read_bytes()
    for name in ("write", "fsync", "replace"):
        child = os.fork()
        if child == 0:
            monkeypatch.setattr(os, name, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
            log.add(output([2]))
            log.save(path)
            os._exit(0)
        os.waitpid(child, 0)
        found = path.read_bytes()
        assert found == before or TokenCounts.load(path).num_tokens == 2


def test_of_a_comparison_each_text_is_counted_once() -> None:
    prompts = [Prompt(("a",), "code"), Prompt(("b", "c"), "chat"), Prompt(("d",), "code")]
    heads = {"four": "head", "four, tree 1/2/3": "head", "other": "second"}
    drafted = [Candidate(label, "4 + prompt", None, 4, follow="prompt", head=head) for label, head in heads.items()]
    plain = Candidate(PLAIN, PLAIN, None)
    plan = Plan(prompts, [plain, *drafted], CompareOptions(modes=("greedy",), repeats=2, batches=(2, 1)))

    def answer(candidate: str, group: int, turn: int, rows: list[list[int]], category: str | None, *, repeat: int = 0,
               batch: int = 2, missed: tuple[int, ...] = ()) -> Answer:  # fmt: skip
        key = AnswerKey(repeat, batch, group, "greedy", turn, candidate)
        tokens = tuple(map(tuple, rows))
        return Answer(key, category, 0, 1, {1: 1}, 0.0, 0.0, (), tokens, ("",) * len(rows), missed)

    answers = [
        answer(PLAIN, 0, 0, [[1], [2]], None),
        answer(PLAIN, 0, 1, [[3]], None),
        answer(PLAIN, 2, 0, [[4], [1]], "code"),  # filled up with the first prompt
        answer("four", 0, 0, [[1], [2]], None, missed=(0, 1)),
        answer("four", 0, 1, [[3]], None, missed=(0,)),
        answer("four", 2, 0, [[4], [1]], "code", missed=(1, 0)),
        answer("four, tree 1/2/3", 2, 0, [[4], [1]], "code", missed=(1, 0)),
        answer("other", 2, 0, [[4], [1]], "code", missed=(1, 1)),
        answer(PLAIN, 0, 0, [[1], [2]], None, repeat=1),
        answer(PLAIN, 0, 0, [[1]], "code", batch=1),
    ]

    counts = log_of_answers(new_log(), plan, answers).to_counts()
    found = {source.name: np.flatnonzero(source.counts).tolist() for source in counts.sources}
    assert found == {"code": [1, 4], "chat": [2, 3]}
    assert counts.num_tokens == 4
    name = "4 and what joins from the prompt"
    code, chat = (source.provenance["missed"] for source in counts.sources)
    assert code == {name: {"tokens": 2, "missed": 1}, f"second: {name}": {"tokens": 2, "missed": 2}}
    assert chat == {name: {"tokens": 2, "missed": 1}}
    # A batch larger than the file answers each prompt several times; another mode is another text.
    plan = Plan(prompts[:2], [plain], CompareOptions(batches=(5,)))
    first = answer(PLAIN, 0, 0, [[1], [2], [1], [2], [1]], None, batch=5)
    second = answer(PLAIN, 0, 1, [[3], [3]], None, batch=5)
    third = replace(first, key=first.key._replace(mode="sampled"))
    counts = log_of_answers(new_log(), plan, [first, second, third]).to_counts()
    assert sum(source.counts for source in counts.sources).tolist() == [0, 2, 2, 1, 0, 0, 0, 0, 0, 0]
