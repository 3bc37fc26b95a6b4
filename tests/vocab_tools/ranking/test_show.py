import json
from pathlib import Path

import numpy as np
import pytest
from eagle_slim.vocab_tools.errors import TokenizerError
from eagle_slim.vocab_tools.ranking.rank import rank_vocabulary
from eagle_slim.vocab_tools.ranking.show import readable_token, show_vocabulary
from eagle_slim.vocab_tools.tokenizer.load import load_tokenizer
from eagle_slim.vocab_tools.tokenizer.tokenizer import LoadedTokenizer
from eagle_slim.vocab_tools.vocabulary.draft_vocab import DraftVocab
from support.raising import raises
from support.small_tokenizers import byte_fallback_bpe, byte_level_bpe, write_folder
from support.token_counts import token_counts


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> LoadedTokenizer:
    added = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "a\u200bb\x1b[31m"]
    return load_tokenizer(
        write_folder(tmp_path_factory.mktemp("t"), byte_level_bpe(360, added), eos_token="<|im_end|>")
    )


@pytest.mark.parametrize(
    ("token", "shown"),
    [
        ("Ġ", " "),
        ("Ċ", "\\n"),
        ("A", "A"),
        ("Ġagain", " again"),
        ("ä", "\\xe4"),
        ("\\", "\\\\"),
        ("Ā", "\\x00"),
        ("<|im_end|>", "<|im_end|>"),
        ("a\u200bb\x1b[31m", "a\\u200bb\\x1b[31m"),
    ],
)
def test_tokens_are_readable_and_harmless(tokenizer: LoadedTokenizer, token: str, shown: str) -> None:
    assert readable_token(tokenizer, tokenizer.vocab[token]) == shown


def test_sentencepiece_spelling(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_folder(tmp_path / "t", byte_fallback_bpe()))
    assert readable_token(tokenizer, tokenizer.vocab["▁hell"]) == " hell"
    assert readable_token(tokenizer, tokenizer.vocab["<0xE4>"]) == "\\xe4"
    # As Gemma-3 has them: runs of spaces among the added tokens, spelled with the space mark.
    backend = byte_fallback_bpe()
    backend.add_tokens(["▁▁▁"])
    backend.add_special_tokens(["<end▁of▁turn>"])
    gemma = load_tokenizer(write_folder(tmp_path / "g", backend))
    assert readable_token(gemma, gemma.vocab["▁▁▁"]) == "   "
    assert readable_token(gemma, gemma.vocab["<end▁of▁turn>"]) == "<end▁of▁turn>"


def test_listing(tokenizer: LoadedTokenizer) -> None:
    counts = token_counts([0] * 300 + list(range(60, 0, -1)))
    vocab = rank_vocabulary(counts, size=300, tokenizer=tokenizer)
    listing = show_vocabulary(vocab, tokenizer, counts, limit=3)
    assert (listing.size, listing.num_forced, listing.real_tokens) == (300, len(listing.forced), 360)
    assert [row.token_id for row in listing.held] == [300, 301, 302]
    assert [row.rank for row in listing.held] == [vocab.num_forced, vocab.num_forced + 1, vocab.num_forced + 2]
    assert [row.count for row in listing.held] == [60.0, 59.0, 58.0]
    assert listing.last[-1].rank == 299
    first_out = 300 + (300 - vocab.num_forced)
    assert [row.token_id for row in listing.left_out] == [first_out, first_out + 1, first_out + 2]
    assert all(row.reason for row in listing.forced)
    end = next(row for row in listing.forced if row.text == "<|im_end|>")
    assert end.reason is not None
    assert end.reason.startswith("eos")
    json.dumps(listing.to_json())
    text = listing.text()
    assert "300 of 360 tokens" in text
    assert "\x1b" not in text


def test_without_counts_left_out_ids_ascend(tokenizer: LoadedTokenizer) -> None:
    listing = show_vocabulary(DraftVocab(np.array([0, 5, 1]), 0, 400), tokenizer, limit=4)
    assert [row.token_id for row in listing.left_out] == [2, 3, 4, 6]
    assert [row.token_id for row in listing.held] == [0, 5, 1]
    assert listing.last == ()
    assert listing.held[0].count is None


def test_refusals(tokenizer: LoadedTokenizer) -> None:
    with raises(TokenizerError, ids=[380]):
        show_vocabulary(DraftVocab(np.array([380]), 0, 400), tokenizer)
    with raises(TokenizerError, where="the vocabulary", expected="sha256:0"):
        show_vocabulary(DraftVocab(np.array([1]), 0, 400, {"tokenizer_hash": "sha256:0"}), tokenizer)
    with raises(TokenizerError, where="the counts", expected="sha256:0"):
        show_vocabulary(DraftVocab(np.array([1]), 0, 400), tokenizer, token_counts([1], None, "sha256:0"))
