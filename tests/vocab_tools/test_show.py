import numpy as np
import pytest
from eagle_slim.vocab_tools import DraftVocab, TokenizerError, load_tokenizer, rank_vocabulary
from eagle_slim.vocab_tools.show import readable_token, show_vocabulary
from support.small_tokenizers import byte_fallback_bpe, byte_level_bpe, write_folder
from support.token_counts import token_counts


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    added = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "a\u200bb\x1b[31m"]
    folder = write_folder(tmp_path_factory.mktemp("t"), byte_level_bpe(360, added), eos_token="<|im_end|>")
    return load_tokenizer(folder)


def test_tokens_are_readable_and_harmless(tokenizer):
    shown = {"Ġ": " ", "Ċ": "\\n", "Ġagain": " again", "ä": "\\xe4", "\\": "\\\\", "Ā": "\\x00"}
    shown |= {"<|im_end|>": "<|im_end|>", "a\u200bb\x1b[31m": "a\\u200bb\\x1b[31m"}
    assert {token: readable_token(tokenizer, tokenizer.vocab[token]) for token in shown} == shown


def test_sentencepiece_spelling(tmp_path):
    backend = byte_fallback_bpe()
    # As Gemma-3 has them: runs of spaces among the added tokens, spelled with the space mark.
    backend.add_tokens(["▁▁▁"])
    backend.add_special_tokens(["<end▁of▁turn>"])
    tokenizer = load_tokenizer(write_folder(tmp_path / "g", backend))
    shown = {"▁hell": " hell", "<0xE4>": "\\xe4", "▁▁▁": "   ", "<end▁of▁turn>": "<end▁of▁turn>"}
    assert {token: readable_token(tokenizer, tokenizer.vocab[token]) for token in shown} == shown


def column(listing, name):
    return [token[name] for token in listing.tokens]


def test_forced_tokens_the_first_others_and_the_most_frequent_left_out(tokenizer):
    counts = token_counts([0] * 300 + list(range(60, 0, -1)))
    vocab = rank_vocabulary(counts, size=300, tokenizer=tokenizer)
    listing = show_vocabulary(vocab, tokenizer, counts, limit=3)
    assert (listing.size, listing.num_forced, listing.real_tokens) == (300, vocab.num_forced, 360)
    first_out = 300 + (300 - vocab.num_forced)
    assert column(listing, "id")[-6:] == [300, 301, 302, first_out, first_out + 1, first_out + 2]
    assert column(listing, "rank") == [*range(vocab.num_forced + 3), None, None, None]
    assert column(listing, "count")[-6:-3] == [60.0, 59.0, 58.0]
    reasons = dict(zip(column(listing, "token"), column(listing, "forced"), strict=True))
    assert reasons["<|im_end|>"] == "eos, end of turn, chat template"
    lines = listing.text().splitlines()
    # Two headings, and all tokens but the single bytes.
    assert len(lines) == 3 + len(listing.tokens) - 256
    assert "\x1b" not in listing.text()


def test_without_counts_left_out_ids_ascend(tokenizer):
    listing = show_vocabulary(DraftVocab(np.array([0, 5, 1]), 0, 400), tokenizer, limit=4)
    assert column(listing, "id") == [0, 5, 1, 2, 3, 4, 6]
    assert set(column(listing, "count")) == {None}
    # A list's largest id is not the target's last.
    guessed = DraftVocab(np.array([0, 1]), 0, 2, {"target_vocab_from": "largest id"})
    assert column(show_vocabulary(guessed, tokenizer, limit=2), "id") == [0, 1, 2, 3]


def test_what_belongs_to_another_tokenizer_is_refused(tokenizer):
    for vocab, counts, words in (
        (DraftVocab(np.array([380]), 0, 400), None, "Id 380"),
        (DraftVocab(np.array([1]), 0, 400, {"tokenizer_hash": "sha256:0"}), None, "the vocabulary"),
        (DraftVocab(np.array([1]), 0, 400), token_counts([1], None, "sha256:0"), "the counts"),
    ):
        with pytest.raises(TokenizerError, match=words):
            show_vocabulary(vocab, tokenizer, counts)
