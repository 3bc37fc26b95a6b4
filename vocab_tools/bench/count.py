"""How fast is counting, compared with the bare tokenizer and with one document at a time?

    python -m eagle_slim.vocab_tools.bench.count --tokenizer smollm2=FOLDER --tokenizer llama3=tokenizer.json

Per tokenizer, in one run and interleaved, each pass on fresh text (see text.py):

    bare            the library's batch encoding of texts in memory, on as many threads as there are workers; the
                    token ids are not even looked at
    FR-Spec loop    one document at a time through `tokenizers`, ids into a `collections.Counter` (FR-Spec's fr.py)
    ours            `count_tokens` on a JSON-lines file: reading, parsing, tokenizing, counting, holding out

Rates are tokens per second from the first blocks to the last, without the start of the processes, which is reported
separately. `--memory-gigabytes 5` also counts a corpus of that size and reports the peak memory of each worker (on
Linux). The last line of output is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from importlib import metadata
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from ..corpus.source import CorpusSource
from ..counting.count import count_tokens
from ..tokenizer.encode import BATCH_CHARS, EncoderSpec, TokenizerLibrary, encoder_spec
from ..tokenizer.load import load_tokenizer
from ..tokenizer.tokenizer import LoadedTokenizer
from .text import TextMaker


def _set_threads(threads: int) -> None:
    os.environ["RAYON_NUM_THREADS"] = str(threads)
    os.environ["TOKENIZERS_PARALLELISM"] = "true" if threads > 1 else "false"


def _in_new_process(function: Callable[..., float], threads: int, *arguments: Any) -> float:
    """Run in a new process, with this many tokenizer threads and nothing cached."""
    with ProcessPoolExecutor(1, get_context("spawn"), initializer=_set_threads, initargs=(threads,)) as pool:
        return pool.submit(function, *arguments).result()


def bare(spec: EncoderSpec, seed: int, num_bytes: int) -> float:
    """Return the tokens per second of batch encoding alone."""
    batches: list[list[str]] = [[]]
    size = 0
    for text in TextMaker().texts(seed, num_bytes):
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
    """Return the tokens per second of encoding one document at a time and counting in a Counter."""
    import tokenizers

    texts = TextMaker().texts(seed, num_bytes)
    tokenizer = tokenizers.Tokenizer.from_str(spec.tokenizer_json)
    counter: Counter[int] = Counter()
    start = time.perf_counter()
    for text in texts:
        counter.update(tokenizer.encode(text, add_special_tokens=False).ids)
    return counter.total() / (time.perf_counter() - start)


def ours(
    tokenizer: LoadedTokenizer, library: TokenizerLibrary, workers: int, path: Path
) -> tuple[float, float, dict[str, Any]]:
    """Count a file. Return tokens per second once it runs, seconds until then, and the peak memory in MiB."""
    marks: list[tuple[float, int]] = []
    peaks: dict[int, float] = {}
    children = Path(f"/proc/self/task/{os.getpid()}/children")

    def look(tokens: int) -> None:
        marks.append((time.perf_counter(), tokens))
        if children.exists():
            peaks.update({int(child): _peak_mib(int(child)) for child in children.read_text().split()})

    start = time.perf_counter()
    count_tokens([CorpusSource(str(path))], tokenizer, workers=workers, tokenizer_library=library, progress=look)
    seconds = time.perf_counter() - start
    # Every worker's first block is the warm-up.
    running = marks[workers:]
    rate = sum(tokens for _, tokens in running) / (running[-1][0] - marks[workers - 1][0])
    memory = {
        "tokens": sum(tokens for _, tokens in marks),
        "seconds": round(seconds, 1),
        # The smallest child is multiprocessing's resource tracker.
        "peak_mib_workers": [round(peak) for peak in sorted(peaks.values(), reverse=True)[:workers]],
        "peak_mib_main": round(_peak_mib(os.getpid())),
    }
    return rate, marks[0][0] - start, memory


def _peak_mib(pid: int) -> float:
    try:
        found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    except OSError:
        return 0.0
    return int(found[1]) / 1024 if found else 0.0


def measure(
    name: str,
    tokenizer: LoadedTokenizer,
    workers: int,
    repeats: int,
    megabytes: dict[TokenizerLibrary, int],
    path: Path,
) -> dict[str, Any]:
    """Run all cases of one tokenizer, interleaved, and print their medians."""
    maker = TextMaker()
    spec = encoder_spec(tokenizer.backend, tokenizer.vocab_size)
    rates: dict[str, list[float]] = defaultdict(list)
    starts: dict[str, list[float]] = defaultdict(list)
    seed = 0
    for _ in range(repeats):
        seed += 1
        rates["FR-Spec loop"].append(_in_new_process(fr_spec_loop, 1, spec, seed, megabytes["tokenizers"] << 19))
        for library, size in megabytes.items():
            encoder = EncoderSpec(spec.tokenizer_json, spec.vocab_size, library)
            for cores in sorted({1, workers}):
                num_bytes = (size << 20) * cores // workers
                rates[f"bare {library}, {cores} threads"].append(
                    _in_new_process(bare, cores, encoder, seed + 1, num_bytes)
                )
                seed += 2
                maker.write(path, seed, num_bytes)
                path.read_bytes()
                rate, start, _ = ours(tokenizer, library, cores, path)
                rates[f"ours {library}, {cores} workers"].append(rate)
                starts[f"ours {library}, {cores} workers"].append(start)
    medians = {case: statistics.median(values) for case, values in rates.items()}
    print(f"\n{name}: {tokenizer.vocab_size:,} ids, median of {repeats}")
    for case, median in medians.items():
        spread = f"{min(rates[case]) / 1e6:.2f} to {max(rates[case]) / 1e6:.2f}"
        start_text = f", start {statistics.median(starts[case]):.1f} s" if case in starts else ""
        print(f"  {case:32} {median / 1e6:7.2f} Mtok/s ({spread}){start_text}")
    ratios = _ratios(medians, list(megabytes), workers)
    for ratio, value in ratios.items():
        print(f"  {ratio:60} {value:6.2f}")
    return {
        "tokens_per_second": {case: round(median) for case, median in medians.items()},
        "start_seconds": {case: round(statistics.median(values), 2) for case, values in starts.items()},
        "ratios": {ratio: round(value, 3) for ratio, value in ratios.items()},
    }


def _ratios(medians: dict[str, float], libraries: list[TokenizerLibrary], workers: int) -> dict[str, float]:
    ratios = {}
    for library in libraries:
        for cores in sorted({1, workers}):
            mine = medians[f"ours {library}, {cores} workers"]
            ratios[f"ours / bare, {library}, {cores} cores"] = mine / medians[f"bare {library}, {cores} threads"]
            ratios[f"ours / FR-Spec loop, {library}, {cores} workers"] = mine / medians["FR-Spec loop"]
        if workers > 1:
            ratios[f"{workers} workers / 1, {library}"] = mine / medians[f"ours {library}, 1 workers"]
    if len(libraries) == 2:
        fast, plain = (medians[f"ours {library}, 1 workers"] for library in ("fastokens", "tokenizers"))
        ratios["fastokens / tokenizers per core, ours"] = fast / plain
    return ratios


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


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
    packages = ("eagle-slim", "tokenizers", "fastokens", "numpy", "orjson")
    versions = {package: found for package in packages if (found := _version(package))}
    megabytes: dict[TokenizerLibrary, int] = {"tokenizers": options.megabytes}
    if "fastokens" in versions:
        megabytes["fastokens"] = options.megabytes_fast
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        path = Path(folder) / "text.jsonl"
        for given in options.tokenizer:
            label, _, location = given.rpartition("=")
            tokenizer = load_tokenizer(location)
            result = results[label or location] = {}
            if options.repeats:
                result.update(measure(label or location, tokenizer, options.workers, options.repeats, megabytes, path))
            if options.memory_gigabytes:
                num_bytes = int(options.memory_gigabytes * 1e9)
                TextMaker().write(path, 10**6, num_bytes)
                *_, memory = ours(tokenizer, list(megabytes)[-1], options.workers, path)
                result["memory"] = {"bytes": num_bytes, **memory}
                print(f"  memory: {result['memory']}")
    about = {"benchmark": "count", "cpu": _cpu(), "cores": os.cpu_count(), "python": platform.python_version()}
    settings = {"versions": versions, "workers": options.workers, "repeats": options.repeats}
    print(json.dumps({**about, **settings, "tokenizers": results}), flush=True)


if __name__ == "__main__":
    main()
