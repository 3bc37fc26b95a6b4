"""The text of a stream: its parts are the whole answer's text, whatever tokens and stop strings divide."""

from __future__ import annotations

import random

import pytest
import torch
from eagle_slim.runtime.api.request import Request
from eagle_slim.runtime.serve.protocol import ServedAnswer
from eagle_slim.runtime.step.kernels.choice_kernels import ChoiceRules
from eagle_slim.runtime.step.plan import CallRules
from support.small_tokenizers import byte_fallback_bpe, byte_level_bpe

TOKENIZERS = {"byte level": byte_level_bpe(), "byte fallback": byte_fallback_bpe()}


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_parts_are_the_whole_text(kind: str) -> None:
    tokenizer, draw = TOKENIZERS[kind], random.Random(0)
    # Single bytes, whole letters of several, words, an end, and a letter that begins a stop string twice. With byte
    # fallback one byte more makes letters of those before it, which only happens where text is no text.
    pieces = [tokenizer.encode(text).ids for text in ("hello", "你好", " über", "the", " lazy dog")] + [[2]]
    pieces += [[token] for token in range(3, tokenizer.get_vocab_size())] if kind == "byte level" else []
    for _ in range(300):
        ids = [token for _ in range(draw.randrange(1, 20)) for token in draw.choice([draw.choice(pieces), pieces[1]])]
        stop = draw.choice([(), ("lo", "he l"), ("好", "zy d"), ("ll", "l")])
        request = Request(
            0,
            (5,),
            len(ids),
            frozenset({2}),
            stop=stop,
            decode=lambda ids: tokenizer.decode(ids, skip_special_tokens=False),
        )
        answer, sent = ServedAnswer(request, CallRules(ChoiceRules(), torch.tensor([]))), ""
        while answer.finish_reason is None:
            before = len(request.token_ids)
            request.emit(ids[before : before + draw.randrange(1, 4)])
            answer.token_ids, answer.finish_reason = list(request.token_ids), request.finish_reason
            rest = answer.new_text()
            if answer.finish_reason is None:
                sent += rest
                assert not any(each in sent for each in stop)
        assert sent + rest == request.text()
