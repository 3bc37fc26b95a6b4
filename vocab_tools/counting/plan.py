"""How a corpus will be counted, found out on a probe of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Literal

import numpy as np

from ..chats import ChatSpec, chat_spec
from ..corpus.blocks import BadRecord
from ..corpus.open import OpenCorpus
from ..encoding import SpanEncoder, choose_library, encoder_spec
from ..errors import UsageError
from ..tokenizer import LoadedTokenizer
from .block import BlockCounter, CountPlan, DocumentReader, SourcePlan
from .held_out import HeldOutRule, key_of_source

_PROBE_TEXTS = 400
_PROBE_CHARS = 400_000
_PROBE_CHATS = 50


def make_plan(
    corpora: Sequence[OpenCorpus],
    tokenizer: LoadedTokenizer,
    requested: Literal["auto", "tokenizers", "fastokens"],
    chat_template: str | None,
    seed: int,
    rule: HeldOutRule,
    skip_bad: bool,
    say: Callable[[str], None],
) -> CountPlan:
    """Decide how a corpus is counted: which library tokenizes it and how its chats are cut, each after a probe.

    The arguments are those of `count_tokens`; `say` is told what was chosen and why.

    Raises:
        UsageError: a chat template without chats.
        TokenizerError: the library or the template cannot be used.
    """
    has_chat = any(corpus.kind == "chat" for corpus in corpora)
    if chat_template is not None and not has_chat:
        raise UsageError("A chat template was given, but no source holds chats.", option="--chat-template")
    chat: ChatSpec | None = chat_spec(tokenizer, chat_template) if has_chat else None
    encoder = encoder_spec(tokenizer.backend, tokenizer.vocab_size)
    sources = tuple(
        SourcePlan(
            kind=corpus.kind,
            column=corpus.column,
            roles=corpus.source.roles,
            exact=False,
            sample=corpus.source.sample,
            sample_key=key_of_source(seed, corpus.source.name, "sample"),
            held_out_key=key_of_source(seed, corpus.source.name, "held out"),
        )
        for corpus in corpora
    )
    plan = CountPlan(encoder, chat, sources, skip_bad, rule)
    if any(source.kind == "chat" and source.roles == "assistant" for source in sources):
        plan = replace(plan, sources=_probe_chats(corpora, plan, say))
    library, reason = choose_library(requested, encoder, _probe_texts(corpora, plan))
    if requested == "auto":
        say(f"tokenizing with {library}: {reason}")
    return replace(plan, encoder=replace(encoder, library=library))


@dataclass(frozen=True)
class _Place:
    """Where a probed document is; the line number is looked up only when it is printed."""

    corpus: OpenCorpus
    shard: int
    position: int

    def __str__(self) -> str:
        return self.corpus.place_of(BadRecord(self.shard, self.position, ""))


def _probe_texts(corpora: Sequence[OpenCorpus], plan: CountPlan) -> Iterator[tuple[object, str]]:
    reader = DocumentReader(plan)
    for source, corpus in enumerate(corpora):
        for block in corpus.probe_blocks:
            texts = chars = 0
            for position, document in reader.documents(source, block):
                if isinstance(document, BadRecord):
                    continue
                for piece in document:
                    text = piece.text[:_PROBE_CHARS]
                    yield _Place(corpus, block.shard, position), text
                    texts, chars = texts + 1, chars + len(text)
                if texts >= _PROBE_TEXTS or chars >= _PROBE_CHARS:
                    break


def _probe_chats(corpora: Sequence[OpenCorpus], plan: CountPlan, say: Callable[[str], None]) -> tuple[SourcePlan, ...]:
    """Check on real conversations that tokens do not change where texts are cut at the added tokens."""
    counter = BlockCounter(plan)
    sources = list(plan.sources)
    for position, (corpus, source) in enumerate(zip(corpora, plan.sources, strict=True)):
        if source.kind != "chat" or source.roles != "assistant":
            continue
        place = _changed_by_cutting(corpus, position, plan, counter)
        if place is not None:
            say(
                f"{corpus.source.name}: tokenizing whole conversations, which is slower: this tokenizer gives other "
                f"tokens when a text is cut at its added tokens (seen at {place})"
            )
            sources[position] = replace(source, exact=True)
    return tuple(sources)


def _changed_by_cutting(corpus: OpenCorpus, position: int, plan: CountPlan, counter: BlockCounter) -> _Place | None:
    """Return the first probed conversation that has other tokens when it is cut, or None."""
    exactly = replace(plan, sources=(replace(plan.sources[position], exact=True),))
    spans = SpanEncoder(plan.encoder.tokenizer_json)
    for block in corpus.probe_blocks:
        in_pieces = DocumentReader(plan).documents(position, block)
        as_a_whole = DocumentReader(exactly).documents(0, block)
        for (at, pieces), (_, whole) in islice(zip(in_pieces, as_a_whole, strict=True), _PROBE_CHATS):
            if isinstance(pieces, BadRecord) or isinstance(whole, BadRecord) or not pieces:
                continue
            expected = [spans.encode(piece.text, piece.spans or ()) for piece in whole]
            if not np.array_equal(counter.encode_document(pieces), np.concatenate(expected)):
                return _Place(corpus, block.shard, at)
    return None
