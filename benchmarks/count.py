"""How fast is counting, compared with the bare tokenizer and with one document at a time?

    python -m benchmarks.count --tokenizer FOLDER_OR_FILE [--library fastokens] [--workers 2] [--out FILE]

In one run and interleaved, each pass on fresh text (`texts`):

    bare            the library's batch encoding of texts in memory, on as many threads as there are workers; the
                    token ids are not even looked at
    FR-Spec loop    one document at a time through `tokenizers`, ids into a `collections.Counter` (FR-Spec's fr.py)
    ours            `count_tokens` on a JSON-lines file: reading, parsing, tokenizing, counting, holding out

Rates are tokens per second from the first blocks to the last, without the start of the processes.
"""

from __future__ import annotations

import gzip
import json
import os
import random
import re
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from importlib import resources
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import tokenizers
import torch
from eagle_slim.vocab_tools.counting import count_tokens
from eagle_slim.vocab_tools.encoding import EncoderSpec, TokenizerLibrary, encoder_spec
from eagle_slim.vocab_tools.sources import CorpusSource
from eagle_slim.vocab_tools.tokenizer import LoadedTokenizer, load_tokenizer

from benchmarks.shared.command import Command, show, write
from benchmarks.shared.timing import machine

BATCH = 400
"""Documents that are encoded at a time: about a megabyte."""


@cache
def _material() -> tuple[list[str], list[str]]:
    """Words, and sentences of the built-in chats."""
    data = resources.files("eagle_slim.convert.default").joinpath("self_chat.jsonl.gz").read_bytes()
    chats = [json.loads(line)["messages"] for line in gzip.decompress(data).splitlines()]
    prose = "\n".join(message["content"] for messages in chats for message in messages)
    return sorted(set(re.findall(r"[A-Za-z]{5,}", prose))), re.findall(r"[^.!?\n]+[.!?\n]+\s*", prose)


def texts(seed: int, num_bytes: int) -> Iterator[str]:
    """Yield documents of about 0.5 to 6 KB, ``num_bytes`` in all, that no library has seen; each seed gives others.

    They are put together from sentences of the built-in chats. About every tenth word is replaced by a number or a
    made-up one, so that caches of words are neither useless nor complete.
    """
    words, sentences = _material()
    draw = random.Random(seed)
    while num_bytes > 0:
        parts = "".join(draw.choices(sentences, k=draw.randint(8, 60))).split(" ")
        for _ in range(1 + len(parts) // 10):
            # random() only: randrange and choice take five times as long, and a large corpus is to be written.
            first, second, at = (int(draw.random() * size) for size in (len(words), len(words), len(parts)))
            is_number = draw.random() < 0.4
            parts[at] = f"{draw.random() * 1000:.3f}" if is_number else words[first][:4] + words[second][-4:]
        text = " ".join(parts)
        num_bytes -= len(text)
        yield text


def bare(spec: EncoderSpec) -> Callable[[list[str]], int]:
    """Encode documents in batches; the number of tokens."""
    if spec.library == "fastokens":
        import fastokens

        fast = fastokens.Tokenizer.from_json_str(spec.tokenizer_json)
        return lambda batch: sum(len(fast.encode_batch_flat(part)[0]) // 4 for part in _parts(batch))
    plain = tokenizers.Tokenizer.from_str(spec.tokenizer_json)
    encode = partial(plain.encode_batch_fast, add_special_tokens=False)
    return lambda batch: sum(sum(map(len, encode(part))) for part in _parts(batch))


def _parts(documents: list[str]) -> list[list[str]]:
    return [documents[first : first + BATCH] for first in range(0, len(documents), BATCH)]


def fr_spec_loop(spec: EncoderSpec) -> Callable[[list[str]], int]:
    """Encode one document at a time and count in a Counter; the number of tokens."""
    tokenizer = tokenizers.Tokenizer.from_str(spec.tokenizer_json)

    def count(documents: list[str]) -> int:
        counter: Counter[int] = Counter()
        for text in documents:
            counter.update(tokenizer.encode(text, add_special_tokens=False).ids)
        return counter.total()

    return count


BASELINES = {"bare": bare, "FR-Spec loop": fr_spec_loop}


def baseline_rate(name: str, spec: EncoderSpec, seed: int, num_bytes: int) -> float:
    """Tokens per second of a baseline."""
    documents, run = list(texts(seed, num_bytes)), BASELINES[name](spec)
    start = time.perf_counter()
    return run(documents) / (time.perf_counter() - start)


def _set_threads(threads: int) -> None:
    os.environ["RAYON_NUM_THREADS"] = str(threads)
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if threads > 1 else "false"


def in_new_process(name: str, spec: EncoderSpec, threads: int, seed: int, num_bytes: int) -> float:
    """`baseline_rate` where nothing is cached, and threads are as asked for."""
    with ProcessPoolExecutor(1, get_context("spawn"), _set_threads, (threads,)) as pool:
        return pool.submit(baseline_rate, name, spec, seed, num_bytes).result()


def our_rate(tokenizer: LoadedTokenizer, library: TokenizerLibrary, workers: int, path: Path) -> float:
    """Tokens per second of counting a file, once it runs: every worker's first block is the warm-up."""
    marks: list[tuple[float, int]] = []
    count_tokens(
        [CorpusSource(str(path))], tokenizer, workers=workers, tokenizer_library=library,
        progress=lambda tokens: marks.append((time.perf_counter(), tokens)),
    )  # fmt: skip
    running = marks[workers:]
    return sum(tokens for _, tokens in running) / (running[-1][0] - marks[workers - 1][0])


def measure(
    tokenizer: LoadedTokenizer, library: TokenizerLibrary, workers: int, repeats: int, num_bytes: int
) -> dict[str, Any]:
    """Run all cases in turn: medians and extremes of tokens per second, and ours over the others."""
    plain = encoder_spec(tokenizer.backend, tokenizer.vocab_size)
    spec = EncoderSpec(plain.tokenizer_json, plain.vocab_size, library)
    rates: dict[str, list[float]] = {"ours": [], **{name: [] for name in BASELINES}}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "text.jsonl"
        for seed in range(0, 3 * repeats, 3):
            for place, name in enumerate(BASELINES):
                rates[name].append(in_new_process(name, spec, workers, seed + place, num_bytes))
            lines = (json.dumps({"text": text}) + "\n" for text in texts(seed + 2, num_bytes))
            path.write_text("".join(lines), encoding="utf-8")
            rates["ours"].append(our_rate(tokenizer, library, workers, path))
    medians = {name: statistics.median(values) for name, values in rates.items()}
    ratios = {f"ours / {name}": medians["ours"] / medians[name] for name in BASELINES}
    return {"tokens_per_s": medians, "all_tokens_per_s": rates, **ratios}


def main(argv: list[str] | None = None) -> None:
    """Run the benchmark; `--help` lists the options."""
    command = Command("count", __doc__)
    command.add_argument("--tokenizer", required=True, help="Hub id, folder or tokenizer.json")
    command.add_argument("--library", choices=("tokenizers", "fastokens"), default="tokenizers")
    command.add_argument("--workers", type=int, default=2)
    command.add_argument("--repeats", type=int, default=3)
    command.add_argument("--megabytes", type=int, default=48, help="text per pass; fastokens wants some 256")
    args = command.parse_args(argv)
    tokenizer = load_tokenizer(args.tokenizer)
    found = measure(tokenizer, args.library, args.workers, args.repeats, args.megabytes << 20)
    result: dict[str, Any] = {
        "machine": machine(torch.device("cpu")), "cores": os.cpu_count(), "library": args.library,
        "library_version": version(args.library), "vocab_size": tokenizer.vocab_size, "workers": args.workers, **found,
    }  # fmt: skip
    show(result)
    write(result, args.out)


if __name__ == "__main__":
    main()
