import gzip
import itertools
import json
import random
import signal
import subprocess
import sys
import textwrap
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from eagle_slim.vocab_tools import CorpusSource, count_tokens, encoding, merge_counts, records
from eagle_slim.vocab_tools.errors import CorpusError, EagleSlimError, UsageError, VocabularyError
from eagle_slim.vocab_tools.tokenizer import LoadedTokenizer
from eagle_slim.vocab_tools.workers import draws
from support.programs import need_processes
from support.tokenizers import WORDS, llama3_like, smollm2
from tokenizers import Tokenizer, models


def write_jsonl(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


def some_texts(count, seed=0):
    draw = random.Random(seed)
    words = WORDS.split(" ")
    return [" ".join(draw.choices(words, k=draw.randint(1, 40))) for _ in range(count)]


def naive(texts):
    counter = Counter()
    for text in texts:
        counter.update(llama3_like().backend.encode(text, add_special_tokens=False).ids)
    return [counter[token_id] for token_id in range(llama3_like().vocab_size)]


def count(*sources, **arguments):
    named = [source if isinstance(source, CorpusSource) else CorpusSource(str(source)) for source in sources]
    return count_tokens(named, llama3_like(), **{"workers": 0, **arguments})


def everything(counts, source=0):
    found = counts.sources[source]
    held_out = [] if found.held_out is None else found.held_out.token_ids
    return (found.counts + np.bincount(held_out, minlength=counts.vocab_size)).tolist()


def of_documents(counts):
    held_out = counts.sources[0].held_out
    return Counter(tuple(document.tolist()) for document in held_out.documents)


def test_held_out_documents_are_whole_and_not_counted(tmp_path):
    texts = some_texts(2000)
    path = write_jsonl(tmp_path / "a.jsonl", texts)
    counts = count(path, held_out=0.1)
    assert everything(counts) == naive(texts)
    assert counts.tokenizer_hash == llama3_like().tokenizer_hash
    kept = of_documents(counts)
    assert kept <= Counter(tuple(llama3_like().backend.encode(text).ids) for text in texts)
    # Of 2,000 drawn with a chance of 0.1, within four standard deviations.
    assert abs(kept.total() - 200) < 4 * 13.4
    provenance = counts.sources[0].provenance
    assert provenance["documents"] + provenance["held_out"]["documents"] == 2000 - provenance["empty_documents"]
    assert provenance["held_out"]["documents"] == kept.total()
    other = count(path, held_out=0.1, seed=1)
    assert of_documents(other) != kept
    # A document without a token is none.
    almost_all = count(write_jsonl(tmp_path / "b.jsonl", ["", "one", "two"]), held_out=0.999999)
    assert almost_all.sources[0].provenance["held_out"]["documents"] == 2


def test_which_documents_are_held_out_does_not_change():
    """Counts that were published are merged with later ones."""
    hashes = np.array([0, 1, 2**63], np.uint64)
    assert draws(hashes, 0).tolist() == pytest.approx([0.0, 0.3381666012719898, 0.14749805011688957])
    assert draws(hashes, 3).tolist() == pytest.approx([0.026433771592597816, 0.9710027535867963, 0.3814471959558805])


def test_counts_of_parts_add_up_to_the_counts_of_the_whole(tmp_path):
    for name, seed in (("a", 0), ("b", 1), ("c", 2)):
        write_jsonl(tmp_path / f"{name}.jsonl", some_texts(200, seed))

    a, b, c, whole = (
        count(CorpusSource(str(tmp_path / pattern), name="x", weight=2), held_out=0.05)
        for pattern in ("a.jsonl", "b.jsonl", "c.jsonl", "*.jsonl")
    )
    for parts in ([a, b, c], [c, a, b], [merge_counts([b, c]), a]):
        assert merge_counts(parts).to_bytes() == whole.to_bytes()
    assert whole.sources[0].provenance["held_out"]["documents"] > 10
    other_seed = count(CorpusSource(str(tmp_path / "a.jsonl"), name="x", weight=2), held_out=0.05, seed=1)
    for parts in ([merge_counts([b, c]), b], [c, whole], [a, other_seed]):
        with pytest.raises(VocabularyError, match="counted twice"):
            merge_counts(parts)


def test_workers_blocks_and_compression_change_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "BLOCK_BYTES", 5000)
    texts = some_texts(300)
    plain = write_jsonl(tmp_path / "a.jsonl", texts)
    packed = tmp_path / "a.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    arguments = {"held_out": 0.1, "tokenizer_library": "tokenizers"}
    whole = count(plain, **arguments)
    assert everything(whole) == naive(texts)
    provenance = whole.sources[0].provenance
    assert provenance["files"] == [{"name": "a.jsonl", "bytes": plain.stat().st_size}]
    assert str(tmp_path) not in json.dumps(provenance)
    need_processes()
    two = count(plain, workers=2, **arguments)
    assert two.to_bytes() == whole.to_bytes()
    other = count(packed, **arguments)
    assert other.sources[0].counts.tolist() == whole.sources[0].counts.tolist()
    assert of_documents(other) == of_documents(whole)


def test_limits_fall_on_the_same_document_in_any_blocks(tmp_path, monkeypatch):
    texts = some_texts(120)
    path = write_jsonl(tmp_path / "a.jsonl", texts)
    lengths = [len(llama3_like().backend.encode(text).ids) for text in texts]
    limit, expected = sum(lengths[:50]) - 1, naive(texts[:50])
    limits = [{"max_documents": 50}, {"max_tokens": limit}, {"max_tokens": limit + 1}]
    limits += [{"max_tokens": 10**9, "max_documents": 50}]
    for block_bytes, settings in itertools.product((1 << 20, 3000, 200), limits):
        monkeypatch.setattr(records, "BLOCK_BYTES", block_bytes)
        counts = count(CorpusSource(str(path), **settings))
        assert everything(counts) == expected
        assert counts.sources[0].provenance["ended_by_limit"] is True


def test_a_bad_line_behind_the_limit_is_not_met(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", some_texts(20))
    path.write_text(path.read_text() + "broken\n" + json.dumps({"text": "end"}) + "\n")
    counts = count(CorpusSource(str(path), max_documents=20))
    assert counts.sources[0].provenance["skipped_records"] == 0
    with pytest.raises(CorpusError, match=r"a\.jsonl, line 21: not JSON.*--on-error skip"):
        count(CorpusSource(str(path), max_documents=21))


def test_the_seed_draws_samples(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [f"document {number}" for number in range(1000)])

    def sampled(seed):
        counts = count(CorpusSource(str(path), sample=0.2), seed=seed, held_out=0)
        return int(counts.sources[0].provenance["documents"])

    # Another draw than that of what is held out.
    half = count(CorpusSource(str(path), sample=0.5), held_out=0.5).sources[0].provenance
    assert min(half["documents"], half["held_out"]["documents"]) > 200

    drawn = [sampled(seed) for seed in (0, 0, 1, 2, 3)]
    assert abs(drawn[0] - 200) < 4 * 12.7
    assert drawn[0] == drawn[1]
    assert len(set(drawn)) > 1


def test_skipped_records_are_told_and_long_texts_cut(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "BLOCK_BYTES", 2000)
    monkeypatch.setattr(encoding, "MAX_TEXT_CHARS", 100)
    # Cut before spaces, where this tokenizer starts a new word anyway.
    good = [*some_texts(40), " ".join(some_texts(5))]
    lines = [json.dumps({"text": text}) for text in good]
    lines.insert(5, "{")
    lines.insert(30, '{"text": 5}')
    lines.insert(31, '{"text": "half \\ud800 pair"}')
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(lines))
    told = []
    counts = count(path, on_error="skip", notify=told.append)
    assert everything(counts) == naive(good)
    assert counts.sources[0].provenance["skipped_records"] == 3
    said = "\n".join(told)
    for words in ("a.jsonl, line 6: not JSON", "a.jsonl, line 31: ", "line 32: half of a surrogate pair"):
        assert words in said
    assert "3 records skipped in total" in said


def test_sources_that_do_not_fit(tmp_path):
    source = CorpusSource(str(write_jsonl(tmp_path / "a.jsonl", ["x"])))
    tokenizer = llama3_like()
    for sources, loaded, held_out, words in (
        ([], tokenizer, 0.0, "Nothing to count"),
        ([source, source], tokenizer, 0.0, "found a, a"),
        ([source], tokenizer.with_chat_template("{{ messages }}"), 0.0, "no source holds chats"),
        ([source], tokenizer.with_chat_template(kwargs={"thinking": True}), 0.0, "no source holds chats"),
        ([source], tokenizer, 1.0, "--held-out"),
    ):
        with pytest.raises(UsageError, match=words):
            count_tokens(sources, loaded, held_out=held_out)
    options: dict[str, Any] = {"run_on": "spark", "on_error": "ignore", "tokenizer_library": "tiktoken"}
    for option, word in options.items():
        with pytest.raises(UsageError, match=f"{option}.*{word}"):
            count_tokens([source], tokenizer, **{option: word})
    with pytest.raises(UsageError, match="messages is set by each rendering"):
        tokenizer.with_chat_template(kwargs={"messages": []})
    (tmp_path / "a.jsonl").write_text('{"text": ""}\nbroken\n')
    with pytest.raises(CorpusError, match=r"Empty documents: 1; records skipped: 1"):
        count(source, on_error="skip")
    (tmp_path / "a.csv").write_text('text\nfine\n"a" broken line\n')
    with pytest.raises(CorpusError, match=r"a\.csv, line 3"):
        count(tmp_path / "a.csv", on_error="skip")


def test_without_shared_memory_one_process_is_advised(tmp_path, monkeypatch):
    path = write_jsonl(tmp_path / "a.jsonl", some_texts(4))
    monkeypatch.setattr("multiprocessing.synchronize.SemLock.__init__", mock.Mock(side_effect=OSError(38, "No shm")))
    with pytest.raises(EagleSlimError, match=r"No shm.*--workers 0"):
        count(path, workers=2)


RUN = """
    import multiprocessing
    import sys
    sys.path.insert(0, {tests!r})
    from eagle_slim.vocab_tools import records
    from eagle_slim.vocab_tools.counting import count_tokens
    from eagle_slim.vocab_tools.sources import CorpusSource
    from support.tokenizers import llama3_like

    def progress(tokens):
        print(*multiprocessing.active_children(), flush=True)
        sys.stdin.read()

    if __name__ == "__main__":
        records.BLOCK_BYTES = 4000
        count_tokens([CorpusSource(sys.argv[1])], llama3_like(), workers=2, progress=progress)
"""


@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGINT])
def test_workers_end_with_the_process_that_started_them(tmp_path, by):
    need_processes()
    path = write_jsonl(tmp_path / "a.jsonl", some_texts(400))
    script = tmp_path / "run.py"
    script.write_text(textwrap.dedent(RUN.format(tests=str(Path(__file__).parents[1]))))
    command, streams = [sys.executable, str(script), str(path)], dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
    with subprocess.Popen(command, **streams, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout.readline().split() != []
        process.send_signal(by)
        # Workers hold its output open, too: this ends with the last of them.
        process.communicate(timeout=1800)
        assert process.returncode != 0


def test_a_token_that_ends_the_prompt_and_begins_the_answer_is_not_counted(tmp_path):
    tokens = ["a", "b", "c", "d", "bc", "abc", "<s>", "</s>"]
    backend = Tokenizer(models.BPE({token: at for at, token in enumerate(tokens)}, [("b", "c"), ("a", "bc")]))
    backend.add_special_tokens(["<s>", "</s>"])
    template = (
        "{% for m in messages %}<s>ab{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}<s>ab{% endif %}"
    )
    tokenizer = LoadedTokenizer(backend, "tiny", chat_templates={"default": template})
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": [{"role": "assistant", "content": "cdd"}]}))
    # The prompt alone is three tokens, "<s>", "a" and "b", and two before the answer.
    assert backend.encode("<s>abcdd</s>").ids == [6, 5, 3, 3, 7]
    counts = count_tokens([CorpusSource(str(tmp_path / "a.jsonl"))], tokenizer, workers=0, held_out=0)
    assert {tokens[at]: number for at, number in enumerate(counts.sources[0].counts) if number} == {"d": 2, "</s>": 1}


def test_answers_of_chats_are_counted_and_what_no_turn_holds_is_told(tmp_path):
    question = {"role": "user", "content": "Hi"}
    chats = [
        [question, {"role": "assistant", "content": "Hello!"}],
        # The template knows no reasoning.
        [question, {"role": "assistant", "content": "Good day", "reasoning_content": "be polite"}],
    ]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))

    def count(**settings):
        told = []
        options = {"workers": 0, "held_out": 0, "notify": told.append, "tokenizer_library": "tokenizers"}
        counts = count_tokens([CorpusSource(str(path), **settings)], smollm2(), **options)
        return counts.sources[0].counts.tolist(), told

    def ids(*texts):
        encodings = smollm2().backend.encode_batch(list(texts), add_special_tokens=False)
        found = [token_id for encoding in encodings for token_id in encoding.ids]
        return np.bincount(found, minlength=smollm2().vocab_size).tolist()

    counted, told = count()
    assert counted == ids("Hello!<|im_end|>", "Good day<|im_end|>", "be polite")
    assert [message.split()[0] for message in told if "by themselves" in message] == ["1"]
    header = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    header += "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    everything, told = count(roles="all")
    assert everything == ids(header + "Hello!<|im_end|>\n", header + "Good day<|im_end|>\n", "be polite")
    assert [message.split()[0] for message in told if "by themselves" in message] == ["1"]
