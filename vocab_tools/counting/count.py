"""count_tokens: sources and a tokenizer → TokenCounts, over all cores, the same for any number of workers.

How a corpus is read is decided in plan.py, what a block gives in block.py, who runs the blocks in workers.py and
ray_workers.py, and source_run.py takes their results up in order.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Literal

from ..corpus.open import OpenCorpus, open_corpus, refuse_repeated_inputs
from ..corpus.source import CorpusSource
from ..encoding import name_and_version
from ..errors import UsageError
from ..tokenizer import LoadedTokenizer
from .block import CountPlan
from .counts import JSON, SourceCounts, TokenCounts
from .held_out import HeldOutRule
from .plan import make_plan
from .progress import ProgressBar
from .source_run import CountedSource, SourceRun
from .workers import Processes, ThisProcess, Workers

# Below this a corpus is counted sooner than worker processes have loaded the tokenizer.
_SMALL_BYTES = 4 << 20


def count_tokens(
    sources: Sequence[CorpusSource],
    tokenizer: LoadedTokenizer,
    *,
    workers: int | None = None,
    run_on: Literal["local", "ray"] = "local",
    tokenizer_library: Literal["auto", "tokenizers", "fastokens"] = "auto",
    chat_template: str | None = None,
    seed: int = 0,
    held_out: HeldOutRule | None = None,
    on_error: Literal["stop", "skip"] = "stop",
    progress: bool | Callable[[int], None] | None = None,
    notify: Callable[[str], None] | None = None,
) -> TokenCounts:
    """Count the tokens of a corpus.

    The result depends on the sources, the tokenizer, `chat_template`, `seed`, `held_out` and `on_error` alone.

    Args:
        sources: at least one, of unique names.
        tokenizer: from `load_tokenizer`.
        workers: worker processes, each with one tokenizer thread; 0 counts in this process; None: one per core, or 0
            for a small corpus. Processes are spawned, so a script needs `if __name__ == "__main__":`.
        run_on: "local" for this machine, or "ray" for a Ray cluster (see ray_workers.py), where a worker is an actor
            with one CPU, and None means one for each CPU of the cluster.
        tokenizer_library: library that encodes; "auto" takes `fastokens` where it is installed and has given the ids of
            `tokenizers` on a probe of the corpus.
        chat_template: Jinja source in place of the tokenizer's own template.
        seed: decides what is sampled, shuffled and held out.
        held_out: what is held out of each source, see `HeldOutRule`; None: its defaults.
        on_error: "stop" at a record that cannot be read, or "skip" it and count how many were skipped.
        progress: show a progress bar on stderr; None: on a terminal; a function is called with the number of tokens
            that each block adds.
        notify: called with messages for the user, such as skipped records.

    Raises:
        UsageError: no sources, names or inputs that repeat, or a setting that fits no source.
        CorpusError: a source or record cannot be read, or a file changed meanwhile.
        TokenizerError: the tokenizer or its chat template cannot be used.
    """
    say = notify or (lambda message: None)
    corpora, plan = open_for_counting(
        sources, tokenizer, tokenizer_library, chat_template, seed, held_out, on_error, notify
    )
    library = name_and_version(plan.encoder.library)
    counted = []
    with ProgressBar(corpora, progress) as bar, _workers(run_on, plan, workers, corpora) as running:
        for position, corpus in enumerate(corpora):
            counted.append(SourceRun(position, corpus, plan, running, bar, say).count())
    if chat_template is not None:
        tokenizer = replace(tokenizer, chat_templates={"default": chat_template})
    return TokenCounts(
        tuple(
            _source_counts(corpus, of_source, plan, library, tokenizer.chat_template_hash, seed)
            for corpus, of_source in zip(corpora, counted, strict=True)
        ),
        tokenizer.tokenizer_hash,
    )


def open_for_counting(
    sources: Sequence[CorpusSource],
    tokenizer: LoadedTokenizer,
    tokenizer_library: Literal["auto", "tokenizers", "fastokens"] = "auto",
    chat_template: str | None = None,
    seed: int = 0,
    held_out: HeldOutRule | None = None,
    on_error: Literal["stop", "skip"] = "stop",
    notify: Callable[[str], None] | None = None,
) -> tuple[list[OpenCorpus], CountPlan]:
    """Open every source and plan the count after a probe; arguments and errors as `count_tokens`."""
    _check_names(sources)
    corpora = [open_corpus(source, seed) for source in sources]
    refuse_repeated_inputs(corpora)
    say, rule = notify or (lambda message: None), held_out or HeldOutRule()
    return corpora, make_plan(corpora, tokenizer, tokenizer_library, chat_template, seed, rule, on_error == "skip", say)


def _check_names(sources: Sequence[CorpusSource]) -> None:
    if not sources:
        raise UsageError("Nothing to count: name a file, folder, glob or dataset.", missing="source")
    names = [source.name for source in sources]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise UsageError(
            f"Two sources are called {repeated[0]!r}. Give each a name of its own, as in chat=...", source=repeated[0]
        )


def _workers(
    run_on: Literal["local", "ray"], plan: CountPlan, num_workers: int | None, corpora: Sequence[OpenCorpus]
) -> Workers:
    if run_on == "ray":
        from .ray_workers import RayWorkers

        return RayWorkers(plan, num_workers)
    num_workers = _default_workers(corpora) if num_workers is None else num_workers
    return Processes(plan, num_workers) if num_workers else ThisProcess(plan)


def _default_workers(corpora: Sequence[OpenCorpus]) -> int:
    sizes = [corpus.size for corpus in corpora]
    if None not in sizes and sum(size or 0 for size in sizes) < _SMALL_BYTES:
        return 0
    return len(os.sched_getaffinity(0))


def _source_counts(
    corpus: OpenCorpus,
    counted: CountedSource,
    plan: CountPlan,
    library: str,
    template_hash: str | None,
    seed: int,
) -> SourceCounts:
    partial, rule, source = counted.partial, plan.held_out, corpus.source
    counts, held_out = partial.finish(rule)
    num_held_out = held_out.num_documents if held_out else 0
    is_chat = corpus.kind == "chat"
    provenance: dict[str, JSON] = {
        **corpus.origin,
        **({} if counted.files is None else {"files": counted.files}),
        "text": source.roles if is_chat else "all",
        "chat": is_chat,
        "chat_template_hash": template_hash if is_chat else None,
        "documents": partial.documents - num_held_out,
        "tokens": int(counts.sum()),
        "empty_documents": partial.empty,
        "skipped_records": partial.skipped,
        "cuts_in_long_texts": partial.cuts,
        "max_documents": source.max_documents,
        "max_tokens": source.max_tokens,
        "ended_by_limit": counted.limited,
        "sample": source.sample,
        "shuffle": source.shuffle,
        "seed": seed,
        "tokenizer_library": library,
        "held_out": {
            "documents": num_held_out,
            "tokens": held_out.num_tokens if held_out else 0,
            "rule": "smallest hash of (seed, source, document index)",
            **asdict(rule),
        },
    }
    return SourceCounts(source.name, source.weight, counts, held_out, provenance)
