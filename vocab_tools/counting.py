"""count_tokens: sources and a tokenizer → TokenCounts, over all cores, the same for any number of workers.

The library that encodes is chosen after a probe of the sources. Workers count their blocks (workers.py,
ray_workers.py); results are added in the order of the source, which only limits on documents and tokens need.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice
from typing import Literal, get_args

import numpy as np

from .chats import chat_spec
from .counts import JSON, HeldOut, SourceCounts, TokenCounts
from .encoding import TokenizerLibrary, choose_library, encoder_spec, name_and_version
from .errors import CorpusError, UsageError, check_choice
from .ray_workers import ray_tasks
from .records import BadRecord
from .sources import CorpusSource, OpenSource, open_source
from .tokenizer import LoadedTokenizer
from .workers import MAX_REPORTS, BlockCounter, Count, CountPlan, Tally, processes, this_process

# Below this a corpus is counted sooner than worker processes have loaded the tokenizer.
_SMALL_BYTES = 4 << 20
_PROBE_BLOCKS = 4
_PROBE_TEXTS = 400
_PROBE_CHARS = 4000
_Say = Callable[[str], None]


def count_tokens(
    sources: Sequence[CorpusSource],
    tokenizer: LoadedTokenizer,
    *,
    workers: int | None = None,
    run_on: Literal["local", "ray"] = "local",
    tokenizer_library: TokenizerLibrary | Literal["auto"] = "auto",
    seed: int = 0,
    held_out: float = 0.01,
    on_error: Literal["stop", "skip"] = "stop",
    progress: bool | Callable[[int], None] | None = None,
    notify: _Say | None = None,
) -> TokenCounts:
    """Count the tokens of a corpus.

    The result depends on the sources, the tokenizer, `seed`, `held_out` and `on_error` alone.

    Args:
        workers: worker processes, each with one tokenizer thread, or tasks on Ray; 0 counts in this process; None: one
            per core, or 0 for a small corpus. Processes are spawned: a script needs `if __name__ == "__main__":`.
        tokenizer_library: "auto" takes `fastokens` where it gives the ids of `tokenizers` on a probe of the corpus.
        held_out: share of each source's documents that is held out, by a hash of their text and `seed`.
        progress: whether to show a bar on stderr; None: on a terminal; a function gets the tokens of each block.
        notify: called with messages for the user, such as skipped records.

    Raises UsageError for no sources, a name twice, or a setting that fits no source; CorpusError for a source or record
    that cannot be read; TokenizerError for a tokenizer or chat template that cannot be used.
    """
    from tqdm import tqdm

    say = notify or (lambda message: None)
    if not 0 <= held_out < 1:
        raise UsageError(f"--held-out: expected at least 0 and below 1, found {held_out}.")
    check_choice("run_on", run_on, ("local", "ray"))
    check_choice("on_error", on_error, ("stop", "skip"))
    check_choice("tokenizer_library", tokenizer_library, ("auto", *get_args(TokenizerLibrary)))
    if not sources:
        raise UsageError("Nothing to count: name a file, folder, glob or dataset.")
    names = [source.name for source in sources]
    if len({*names}) < len(names):
        advice = "Give each a name of its own, as in chat=..."
        raise UsageError(f"Source names must be unique; found {', '.join(names)}. {advice}")
    opened = [open_source(source) for source in sources]
    has_chat = any(source.kind == "chat" for source in opened)
    if tokenizer.is_template_given and not has_chat:
        raise UsageError("--chat-template or --chat-template-kwargs was given, but no source holds chats.")
    encoder = encoder_spec(tokenizer.backend, tokenizer.vocab_size)
    chat = chat_spec(tokenizer) if has_chat else None
    read = tuple(replace(source, files=(), table=None) for source in opened)
    plan = CountPlan(encoder, chat, read, on_error == "skip", seed, held_out)
    library, reason = choose_library(tokenizer_library, encoder, _probe_texts(plan, opened))
    if tokenizer_library == "auto":
        say(f"tokenizing with {library}: {reason}")
    plan = replace(plan, encoder=replace(encoder, library=library))
    counted: list[SourceCounts] = []
    apart = 0
    sizes = [source.size for source in opened]
    size = None if None in sizes else sum(each or 0 for each in sizes)
    is_hidden = None if progress is None else callable(progress) or not progress
    bar = tqdm(desc="counting", total=size, unit="B", unit_scale=True, disable=is_hidden, delay=0 if progress else 1)

    def moved(block_size: int, tokens: int) -> None:
        bar.update(block_size)
        if callable(progress):
            progress(tokens)

    if run_on == "ray":
        counter = ray_tasks(plan, workers)
    else:
        if workers is None:
            workers = 0 if size is not None and size < _SMALL_BYTES else len(os.sched_getaffinity(0))
        counter = processes(plan, workers) if workers else this_process(plan)
    with bar, counter as count:
        for at, source in enumerate(opened):
            total, last = _count_source(at, source, plan, count, moved, say)
            counted.append(_source_counts(source, total, last, plan, tokenizer))
            apart += total.apart
            if held_out and counted[-1].held_out is None:
                kept = f"{source.source.name}: none of its {total.documents:,} documents was held out"
                advice = "so its coverage can only be measured on what was counted; hold out a larger share"
                say(f"{kept}, {advice}")
    if apart:
        why = "without an end of turn: the chat template refuses them, or does not show them"
        say(f"{apart:,} messages hold words that were counted by themselves, {why}")
    return TokenCounts(tuple(counted), tokenizer.tokenizer_hash)


def _probe_texts(plan: CountPlan, opened: Sequence[OpenSource]) -> Iterator[tuple[str, str]]:
    """Yield places and texts of blocks spread over the files of each source; of the Hub, of its first block alone."""
    counter = BlockCounter(plan)
    for at, source in enumerate(opened):
        places = range(1 if source.is_remote else _PROBE_BLOCKS)
        for shard in sorted({source.num_shards * place // _PROBE_BLOCKS for place in places}):
            for block in islice(source.shard_blocks(shard), 1):
                records = (document for _, document, _ in counter.documents(at, block))
                documents = (document for document in records if not isinstance(document, BadRecord))
                for piece in islice(chain.from_iterable(documents), _PROBE_TEXTS):
                    yield f"a text of source {source.source.name}", piece.text[:_PROBE_CHARS]


def _count_source(
    at: int, source: OpenSource, plan: CountPlan, count: Count, moved: Callable[[int, int], None], say: _Say
) -> tuple[Tally, int | None]:
    """Count a source to its end or its limit; return the counts, and the shard in which the limit fell or None."""
    asked, limited_in, num_reported = source.source, None, 0
    max_documents, max_tokens = asked.max_documents or math.inf, asked.max_tokens or math.inf
    total = Tally(np.zeros(plan.encoder.vocab_size, np.int64))
    for block, result in count(at, source):
        documents, tokens = max_documents - total.documents, max_tokens - total.tokens
        if result.documents >= documents or result.tokens >= tokens:
            result, limited_in = BlockCounter(plan).count_up_to(at, block, documents, tokens), block.shard
        for number, reason in result.bad:
            if not plan.skip_bad:
                advice = "Mend the record, or leave such records out with `eagle-vocab count --on-error skip`."
                raise CorpusError(f"{block.place(number)}: {reason}. {advice}")
            if num_reported < MAX_REPORTS:
                say(f"skipped {block.place(number)}: {reason}")
            num_reported += 1
        total.add(result)
        moved(block.size, result.tokens)
        if limited_in is not None:
            break
    if not total.tokens:
        hint = f"Empty documents: {total.empty:,}; records skipped: {total.skipped:,}; sample: {asked.sample or 1:g}."
        if total.empty and source.kind == "chat" and asked.roles == "assistant":
            hint = f"None of its conversations ({total.empty:,}) has an assistant turn; count them with roles=all."
        raise CorpusError(f"{asked.location}: no tokens in this source. {hint}")
    if total.skipped:
        say(f"{asked.name}: {total.skipped:,} records skipped in total")
    return total, limited_in


def _source_counts(
    opened: OpenSource, total: Tally, limited_in: int | None, plan: CountPlan, tokenizer: LoadedTokenizer
) -> SourceCounts:
    source, is_chat, kwargs = opened.source, opened.kind == "chat", tokenizer.chat_template_kwargs
    held_out = HeldOut.of_documents(total.held_out) if total.held_out else None
    read = opened.files if limited_in is None else opened.files[: limited_in + 1]
    files = sorted(read, key=lambda file: file.name)
    provenance: dict[str, JSON] = {
        **opened.origin,
        **({"files": [{"name": file.name, "bytes": file.size} for file in files]} if files else {}),
        "text": source.roles if is_chat else "all",
        "chat": is_chat,
        "chat_template_hash": tokenizer.chat_template_hash if is_chat else None,
        **({"chat_template_kwargs": dict(kwargs)} if is_chat and kwargs else {}),
        "documents": total.documents - len(total.held_out),
        "tokens": int(total.counts.sum()),
        "empty_documents": total.empty,
        "skipped_records": total.skipped,
        "digest": f"{total.digest:016x}",
        "max_documents": source.max_documents,
        "max_tokens": source.max_tokens,
        "ended_by_limit": limited_in is not None,
        "sample": source.sample,
        "seed": plan.seed,
        "tokenizer_library": name_and_version(plan.encoder.library),
        "held_out": {
            "documents": len(total.held_out),
            "tokens": held_out.num_tokens if held_out else 0,
            "rule": "hash of the text and the seed",
            "share": plan.held_out,
        },
    }
    return SourceCounts(source.name, source.weight, total.counts, held_out, provenance)
