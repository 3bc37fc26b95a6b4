"""The built-in counts, and a measurement of what they cover on text that made no ranking.

`default/counts.safetensors` counts every answer token of 25,789 texts that SmolLM2-135M-Instruct wrote itself; the
4,000 chats of `default/self_chat.jsonl.gz` are among them. To measure coverage on text that made no ranking, a tenth of
those chats is taken out of the counts again and a second ranking is made from what remains.
"""

from __future__ import annotations

import gzip
import json

import numpy as np
from eagle_slim.vocab_tools.counts import HeldOut, SourceCounts, TokenCounts
from eagle_slim.vocab_tools.tokenizer import LoadedTokenizer

from .builtin import embedded_chats, embedded_counts

HELD_OUT_SHARE = 0.1
HELD_OUT_SEED = 0


def load_embedded_counts() -> TokenCounts:
    """The counts of the shipped ranking: all of the text, nothing held out."""
    return TokenCounts.load(embedded_counts())


def embedded_counts_with_held_out(counts: TokenCounts, tokenizer: LoadedTokenizer) -> tuple[TokenCounts, str]:
    """The built-in counts without a seeded tenth of the shipped chats, that tenth held out, and a note that says so.

    Tokens of the answers, the end-of-turn token of each included, as the counts have them. An id that the tenth has
    more often than the counts is left at 0: text that was written token by token need not come back from the tokenizer
    as the same tokens.
    """
    source = counts.sources[0]
    with gzip.open(embedded_chats(), "rt", encoding="utf-8") as lines:
        chats = [json.loads(line)["messages"] for line in lines]
    chosen = np.random.default_rng(HELD_OUT_SEED).permutation(len(chats))[: int(len(chats) * HELD_OUT_SHARE)]
    answers = [
        [message["content"] for message in chats[number] if message["role"] == "assistant"] for number in sorted(chosen)
    ]
    end_of_turn = int(tokenizer.generation_config["eos_token_id"])
    documents = [
        np.concatenate([np.array([*encoding.ids, end_of_turn], np.int32) for encoding in encodings])
        for encodings in (tokenizer.backend.encode_batch_fast(turns, add_special_tokens=False) for turns in answers)
    ]
    token_ids = np.concatenate(documents)
    offsets = np.concatenate([[0], np.cumsum([len(document) for document in documents])]).astype(np.int64)
    remaining = np.maximum(source.counts - np.bincount(token_ids, minlength=len(source.counts)), 0)
    held_out = HeldOut(token_ids, offsets)
    note = (
        f"{held_out.num_documents} of the {len(chats)} shipped chats, chosen by seed {HELD_OUT_SEED}: their "
        f"{held_out.num_tokens:,} answer tokens were taken out of the counts and the vocabulary ranked again for this "
        "figure; the ranking in the artifact uses all counts"
    )
    measured = SourceCounts(source.name, source.weight, remaining, held_out, source.provenance)
    return TokenCounts((measured,), counts.tokenizer_hash), note
