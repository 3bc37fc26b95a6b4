import sys
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from eagle_slim.vocab_tools import TokenizerError, encoding
from eagle_slim.vocab_tools.encoding import EncoderSpec, build_encoder, choose_library, encode_all, encoder_spec
from hypothesis import given, settings
from hypothesis import strategies as st
from support.raising import raises
from support.tokenizers import llama3_like, smollm2
from tokenizers import Tokenizer, models, processors

TEXTS = ["Hello, world!", "", "größer 你好 👋\n\n  x", "<|im_start|>user\nHi<|im_end|>", "12345 tokens " * 50]


def spec_of(tokenizer):
    return encoder_spec(tokenizer.backend, tokenizer.vocab_size)


def rows(encoded):
    ids, offsets = encoded.token_ids, encoded.offsets
    return [ids[a:b].tolist() for a, b in pairwise(offsets)]


@pytest.mark.parametrize("library", ["tokenizers", "fastokens"])
def test_both_libraries_give_the_ids_of_tokenizers(library):
    for tokenizer in (smollm2(), llama3_like()):
        encoded = encode_all(build_encoder(replace(spec_of(tokenizer), library=library)), TEXTS)
        assert rows(encoded) == [tokenizer.backend.encode(text, add_special_tokens=False).ids for text in TEXTS]
        assert (encoded.token_ids.dtype, encoded.offsets.dtype) == (np.uint32, np.int64)


def test_nothing_is_added_cut_or_padded():
    backend = Tokenizer.from_str(llama3_like().backend.to_str())
    plain = backend.encode("Hello, world! Hello, world!").ids
    bos = backend.token_to_id("<|begin_of_text|>")
    backend.post_processor = processors.TemplateProcessing("<|begin_of_text|> $A", None, [("<|begin_of_text|>", bos)])
    backend.enable_truncation(3)
    backend.enable_padding(length=99)
    encoded = encode_all(build_encoder(encoder_spec(backend, 600)), ["Hello, world! Hello, world!"])
    assert rows(encoded) == [plain]


def test_a_text_that_a_tokenizer_cannot_encode_is_no_defect():
    words = Tokenizer(models.WordLevel({"the": 0}))
    with pytest.raises(TokenizerError, match=r"cannot encode.*\[UNK\]"):
        build_encoder(encoder_spec(words, 1))(["the", "fox"])


@given(st.lists(st.text("ab \n", max_size=60), max_size=8), st.integers(1, 30), st.integers(1, 40))
@settings(max_examples=60)
def test_long_texts_and_batches_lose_nothing(texts, batch, longest):
    def characters(texts):
        assert all(len(text) <= longest for text in texts)
        assert sum(map(len, texts)) <= max(batch, longest)
        ids = np.array([ord(sign) for text in texts for sign in text], np.uint32)
        return encoding.Encoded(ids, np.cumsum([0, *map(len, texts)], dtype=np.int64))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoding, "BATCH_CHARS", batch)
        patch.setattr(encoding, "MAX_TEXT_CHARS", longest)
        encoded = encode_all(characters, texts)
    assert rows(encoded) == [[ord(sign) for sign in text] for text in texts]


def shift(texts):
    right = build_encoder(spec_of(llama3_like()))(texts)
    ids = right.token_ids.copy()
    ids[right.offsets[3]] += 1
    return encoding.Encoded(ids, right.offsets)


@pytest.mark.parametrize("words", ["at document 3", "no text in the corpus", "fastokens is not installed"])
def test_a_library_that_differs_or_cannot_be_compared_is_refused(words, monkeypatch):
    texts = [""] if "no text" in words else TEXTS
    if "installed" in words:
        monkeypatch.setitem(sys.modules, "fastokens", None)
    elif "document" in words:
        monkeypatch.setattr(encoding, "_fastokens", lambda tokenizer_json: shift)
    probe = [(f"document {number}", text) for number, text in enumerate(texts)]
    library, reason = choose_library("auto", spec_of(llama3_like()), probe)
    assert library == "tokenizers"
    assert words in reason
    with raises(TokenizerError, option="--tokenizer-library"):
        choose_library("fastokens", spec_of(llama3_like()), probe)


def test_auto_takes_fastokens_after_the_probe_and_a_text_that_it_cannot_encode_is_told():
    # As the byte 0x14, which this vocabulary lacks and tokenizers leaves out.
    spec = EncoderSpec(spec_of(llama3_like()).tokenizer_json.replace('"Ĕ"', '"no byte"'), 600)
    assert choose_library("auto", spec, [("a", "\x14")])[0] == "tokenizers"
    with raises(TokenizerError, option="--tokenizer-library"):
        build_encoder(replace(spec, library="fastokens"))(["\x14"])
    probe = [("a", text) for text in TEXTS]
    assert choose_library("auto", spec_of(llama3_like()), probe)[0] == "fastokens"
    assert choose_library("tokenizers", spec_of(llama3_like()), [])[0] == "tokenizers"
    with pytest.raises(TokenizerError, match="fastokens cannot load"):
        choose_library("fastokens", EncoderSpec('{"model": {"type": "Unheard"}}', 10), [])
