"""How fast is counting, against the bare tokenizer and against one document at a time?

    python -m eagle_slim.vocab_tools.bench.count --tokenizer smollm2=FOLDER --tokenizer llama3=tokenizer.json

Per tokenizer, in one run and interleaved, each pass on fresh text that no library has seen:

    bare            the library's batch encoding of texts in memory, on as many threads as there are workers; the
                    token ids are not even looked at
    FR-Spec loop    one document at a time through `tokenizers`, ids into a `collections.Counter` (FR-Spec's fr.py)
    ours            `count_tokens` on a JSON-lines file: reading, parsing, tokenizing, counting, holding out

Rates are tokens per second between the first blocks and the last, so without the start of the processes; that start
is reported apart. `--memory-gigabytes 5` also counts a corpus of that size and reports the peak memory per worker.

The text is made from the shipped chats and the standard library's sources: documents of prose, code and numbers whose
sentences are drawn at random, and in each about every tenth word is replaced by a number or a word made up for it, so
that caches of words are neither useless nor complete. The last line of output is one JSON document.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import platform
import random
import re
import statistics
import sys
import sysconfig
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from importlib import metadata, resources
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from ..corpus.source import CorpusSource
from ..counting.count import count_tokens
from ..tokenizer.encode import BATCH_CHARS, EncoderSpec, encoder_spec
from ..tokenizer.load import load_tokenizer
from ..tokenizer.tokenizer import LoadedTokenizer

_SENTENCE = re.compile(r"[^.!?\n]+[.!?\n]+\s*")
_SKIPPED = {"site-packages", "test", "tests", "idlelib", "lib2to3"}
_WORDS_PER_CHANGE = 10


class TextMaker:
    """Documents without end; every seed gives others."""

    def __init__(self) -> None:
        data = resources.files("eagle_slim.convert.default").joinpath("self_chat.jsonl.gz").read_bytes()
        chats = [json.loads(line)["messages"] for line in gzip.decompress(data).splitlines()]
        prose = "\n".join(message["content"] for messages in chats for message in messages)
        stdlib = Path(sysconfig.get_path("stdlib"))
        files = (file for file in sorted(stdlib.rglob("*.py")) if not _SKIPPED & set(file.relative_to(stdlib).parts))
        code = "".join(file.read_text(encoding="utf-8", errors="ignore") for file in files)
        self._prose = _SENTENCE.findall(prose)
        self._code = [line for line in code.splitlines(keepends=True) if line.strip()]
        self._words = sorted(set(re.findall(r"[A-Za-z]{5,}", prose + code)))

    def documents(self, seed: int) -> Iterator[str]:
        """Yield documents of about 0.5 to 6 KB."""
        draw = random.Random(seed)
        while True:
            pool = self._code if draw.random() < 0.3 else self._prose
            sentences = draw.choices(pool, k=draw.randint(8, 60))
            yield "".join(self._change(sentence, draw.random) for sentence in sentences)

    def _change(self, sentence: str, draw: Callable[[], float]) -> str:
        # random() alone: randrange and choice take five times as long, and a large corpus is to be written.
        words = sentence.split(" ")
        for _ in range(1 + len(words) // _WORDS_PER_CHANGE):
            at = int(draw() * len(words))
            kind = draw()
            if kind < 0.2:
                words[at] = str(int(draw() * 10 ** int(1 + draw() * 6)))
            elif kind < 0.4:
                words[at] = f"{draw() * 1000:.3f}"
            else:
                first = self._words[int(draw() * len(self._words))]
                second = self._words[int(draw() * len(self._words))]
                words[at] = first[: 2 + int(draw() * 5)] + second[-2 - int(draw() * 5) :]
        return " ".join(words)

    def texts(self, seed: int, num_bytes: int) -> list[str]:
        """Documents of so many bytes together."""
        texts = []
        for text in self.documents(seed):
            texts.append(text)
            num_bytes -= len(text)
            if num_bytes <= 0:
                return texts
        raise AssertionError("documents never end")

    def write(self, path: Path, seed: int, num_bytes: int) -> None:
        """Write a JSON-lines file of so many bytes of text."""
        with path.open("w", encoding="utf-8") as file:
            for text in self.documents(seed):
                file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
                num_bytes -= len(text)
                if num_bytes <= 0:
                    return


def _set_threads(threads: int) -> None:
    os.environ["RAYON_NUM_THREADS"] = str(threads)
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if threads > 1 else "false"


def _apart(function: Callable[..., Any], threads: int, *arguments: Any) -> Any:
    """Run in a process of its own with so many tokenizer threads and nothing cached."""
    with ProcessPoolExecutor(1, get_context("spawn"), initializer=_set_threads, initargs=(threads,)) as pool:
        return pool.submit(function, *arguments).result()


def bare(spec: EncoderSpec, seed: int, num_bytes: int) -> float:
    """Tokens per second of batch encoding alone."""
    texts = TextMaker().texts(seed, num_bytes)
    batches: list[list[str]] = [[]]
    size = 0
    for text in texts:
        if size > BATCH_CHARS:
            batches.append([])
            size = 0
        batches[-1].append(text)
        size += len(text)
    if spec.library == "fastokens":
        import fastokens

        fast = fastokens.Tokenizer.from_json_str(spec.tokenizer_json)
        start = time.perf_counter()
        tokens = sum(len(fast.encode_batch_flat(batch)[0]) // 4 for batch in batches)
    else:
        import tokenizers

        tokenizer = tokenizers.Tokenizer.from_str(spec.tokenizer_json)
        start = time.perf_counter()
        tokens = sum(sum(map(len, tokenizer.encode_batch_fast(batch, add_special_tokens=False))) for batch in batches)
    return tokens / (time.perf_counter() - start)


def fr_spec_loop(spec: EncoderSpec, seed: int, num_bytes: int) -> float:
    """Tokens per second of encoding one document at a time and counting in a Counter."""
    import tokenizers

    texts = TextMaker().texts(seed, num_bytes)
    tokenizer = tokenizers.Tokenizer.from_str(spec.tokenizer_json)
    counter: Counter[int] = Counter()
    start = time.perf_counter()
    for text in texts:
        counter.update(tokenizer.encode(text, add_special_tokens=False).ids)
    return counter.total() / (time.perf_counter() - start)


def ours(
    tokenizer: LoadedTokenizer, library: str, workers: int, maker: TextMaker, folder: Path, seed: int, num_bytes: int
) -> tuple[float, float]:
    """Tokens per second of `count_tokens` once it runs, and seconds until then."""
    path = folder / f"{seed}.jsonl"
    maker.write(path, seed, num_bytes)
    path.read_bytes()
    marks: list[tuple[float, int]] = []
    start = time.perf_counter()
    count_tokens(
        [CorpusSource(str(path))],
        tokenizer,
        workers=workers,
        tokenizer_library=library,  # type: ignore[arg-type]
        progress=lambda tokens: marks.append((time.perf_counter(), tokens)),
    )
    path.unlink()
    # Every worker's first block is the warm-up.
    running = marks[workers:]
    return sum(tokens for _, tokens in running) / (running[-1][0] - marks[workers - 1][0]), marks[0][0] - start


def peak_memory(
    tokenizer: LoadedTokenizer, library: str, workers: int, maker: TextMaker, folder: Path, num_bytes: int
) -> dict[str, Any]:
    """Count a large corpus; peak resident memory of this process and of each worker, in MiB."""
    path = folder / "large.jsonl"
    maker.write(path, 10**6, num_bytes)
    peaks: dict[int, float] = {}
    tokens = 0

    def look(block_tokens: int) -> None:
        nonlocal tokens
        tokens += block_tokens
        for child in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
            peaks[int(child)] = _peak_mib(int(child))

    start = time.perf_counter()
    count_tokens(
        [CorpusSource(str(path))],
        tokenizer,
        workers=workers,
        tokenizer_library=library,  # type: ignore[arg-type]
        progress=look,
    )
    seconds = time.perf_counter() - start
    path.unlink()
    # The smallest child is multiprocessing's resource tracker.
    largest = sorted(peaks.values(), reverse=True)[:workers]
    return {
        "bytes": num_bytes,
        "tokens": tokens,
        "seconds": round(seconds, 1),
        "peak_mib_workers": [round(peak) for peak in largest],
        "peak_mib_main": round(_peak_mib(os.getpid())),
    }


def _peak_mib(pid: int) -> float:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0.0
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    return int(found[1]) / 1024 if found else 0.0


def measure(
    name: str, tokenizer: LoadedTokenizer, workers: int, repeats: int, megabytes: dict[str, int], folder: Path
) -> dict[str, Any]:
    """Run all cases of one tokenizer, interleaved, and print their medians."""
    maker = TextMaker()
    spec = encoder_spec(tokenizer.backend, tokenizer.vocab_size)
    libraries = [library for library in ("tokenizers", "fastokens") if _installed(library)]
    rates: dict[str, list[float]] = {}
    starts: dict[str, list[float]] = {}
    seed = 0
    for _ in range(repeats):
        seed += 1
        rates.setdefault("FR-Spec loop", []).append(_apart(fr_spec_loop, 1, spec, seed, megabytes["tokenizers"] << 19))
        for library in libraries:
            num_bytes = megabytes[library] << 20
            encoder = EncoderSpec(spec.tokenizer_json, spec.vocab_size, library)  # type: ignore[arg-type]
            for cores in sorted({1, workers}):
                seed += 1
                rates.setdefault(f"bare {library}, {cores} threads", []).append(
                    _apart(bare, cores, encoder, seed, num_bytes * cores // workers)
                )
                seed += 1
                rate, start = ours(tokenizer, library, cores, maker, folder, seed, num_bytes * cores // workers)
                rates.setdefault(f"ours {library}, {cores} workers", []).append(rate)
                starts.setdefault(f"ours {library}, {cores} workers", []).append(start)
    medians = {case: statistics.median(values) for case, values in rates.items()}
    print(f"\n{name}: {tokenizer.vocab_size:,} ids, median of {repeats}")
    for case, median in medians.items():
        spread = f"{min(rates[case]) / 1e6:.2f} to {max(rates[case]) / 1e6:.2f}"
        start_text = f", start {statistics.median(starts[case]):.1f} s" if case in starts else ""
        print(f"  {case:32} {median / 1e6:7.2f} Mtok/s ({spread}){start_text}")
    ratios = _ratios(medians, libraries, workers)
    for ratio, value in ratios.items():
        print(f"  {ratio:60} {value:6.2f}")
    return {
        "tokens_per_second": {case: round(median) for case, median in medians.items()},
        "start_seconds": {case: round(statistics.median(values), 2) for case, values in starts.items()},
        "ratios": {ratio: round(value, 3) for ratio, value in ratios.items()},
    }


def _ratios(medians: dict[str, float], libraries: list[str], workers: int) -> dict[str, float]:
    ratios = {}
    for library in libraries:
        for cores in sorted({1, workers}):
            mine = medians[f"ours {library}, {cores} workers"]
            ratios[f"ours / bare, {library}, {cores} cores"] = mine / medians[f"bare {library}, {cores} threads"]
            ratios[f"ours / FR-Spec loop, {library}, {cores} workers"] = mine / medians["FR-Spec loop"]
        if workers > 1:
            one = medians[f"ours {library}, 1 workers"]
            ratios[f"{workers} workers / 1, {library}"] = medians[f"ours {library}, {workers} workers"] / one
    if len(libraries) == 2:
        ratios["fastokens / tokenizers per core, ours"] = (
            medians["ours fastokens, 1 workers"] / medians["ours tokenizers, 1 workers"]
        )
    return ratios


def _installed(library: str) -> bool:
    try:
        metadata.version(library)
    except metadata.PackageNotFoundError:
        return False
    return True


def _cpu() -> str:
    try:
        found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        found = None
    return found[1] if found else platform.processor()


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--tokenizer",
        action="append",
        required=True,
        metavar="NAME=T",
        help="Hub id, folder or tokenizer.json; repeat for several",
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--megabytes", type=int, default=48, help="text per pass with `tokenizers`")
    parser.add_argument("--megabytes-fast", type=int, default=256, help="text per pass with `fastokens`")
    parser.add_argument(
        "--memory-gigabytes", type=float, default=0.0, help="count a corpus of this size for its memory"
    )
    parser.add_argument("--folder", type=Path, help="where the generated files go; default: the temporary folder")
    options = parser.parse_args()
    result: dict[str, Any] = {
        "benchmark": "count",
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "versions": {
            package: metadata.version(package)
            for package in ("eagle-slim", "tokenizers", "fastokens", "numpy", "orjson")
            if _installed(package)
        },
        "workers": options.workers,
        "repeats": options.repeats,
        "tokenizers": {},
    }
    megabytes = {"tokenizers": options.megabytes, "fastokens": options.megabytes_fast}
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        for given in options.tokenizer:
            label, _, location = given.rpartition("=")
            tokenizer = load_tokenizer(location)
            if options.repeats:
                result["tokenizers"][label or location] = measure(
                    label or location, tokenizer, options.workers, options.repeats, megabytes, folder
                )
            if options.memory_gigabytes:
                num_bytes = int(options.memory_gigabytes * 1e9)
                memory = peak_memory(tokenizer, "auto", options.workers, TextMaker(), folder, num_bytes)
                print(f"  memory: {memory}")
                result["tokenizers"].setdefault(label or location, {})["memory"] = memory
    sys.stdout.flush()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
