from pathlib import Path

import numpy as np
import pytest
from eagle_slim.vocab_tools.errors import UsageError
from eagle_slim.vocab_tools.ranking.rank import rank_vocabulary
from eagle_slim.vocab_tools.ranking.smoothing import smooth_counts
from eagle_slim.vocab_tools.tokenizer.load import load_tokenizer
from eagle_slim.vocab_tools.tokenizer.tokenizer import LoadedTokenizer
from support.raising import raises
from support.small_tokenizers import byte_level_bpe, reversed_ids, write_folder
from support.token_counts import token_counts

VOCAB = 360


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> LoadedTokenizer:
    return load_tokenizer(write_folder(tmp_path_factory.mktemp("t"), byte_level_bpe(VOCAB)))


@pytest.fixture(scope="module")
def law(tokenizer: LoadedTokenizer) -> np.ndarray:
    """Rates that follow the model: Zipf-Mandelbrot means over merge rank, Gamma noise of shape 0.5."""
    assert tokenizer.merge_rank is not None
    rank = np.where(tokenizer.merge_rank < 0, tokenizer.merge_rank.max(), tokenizer.merge_rank)
    mean = (rank + 10.0) ** -1.2
    rates = mean * np.random.default_rng(1).gamma(0.5, 2.0, len(rank))
    return rates / rates.sum()


def drawn(law: np.ndarray, tokens: int, held_out: int, seed: int = 0):
    rng = np.random.default_rng(seed)
    documents = rng.choice(len(law), (held_out // 50, 50), p=law).tolist() if held_out else None
    return token_counts(rng.multinomial(tokens, law), documents)


def test_posterior_by_hand(tokenizer: LoadedTokenizer) -> None:
    # (count + a) / (T + a / p), normalised; the fitted prior itself comes out at count 0 as a / (T + a / p).
    counts = token_counts([0] * 3 + [7, 1] + [0] * (VOCAB - 5))
    smoothed = smooth_counts(counts, tokenizer, 0.5)
    rank = np.where(tokenizer.merge_rank < 0, tokenizer.merge_rank.max(), tokenizer.merge_rank)
    prior = (rank + smoothed.shift) ** -smoothed.exponent
    prior /= prior.sum()
    expected = (counts.sources[0].counts + 0.5) / (8 + 0.5 / prior)
    assert smoothed.score == pytest.approx(expected / expected.sum())


def test_extremes_are_the_counts_and_the_ids(tokenizer: LoadedTokenizer, law: np.ndarray) -> None:
    counts = drawn(law, 2000, 0)
    plain = rank_vocabulary(counts, forced=[])
    weak = rank_vocabulary(counts, tokenizer=tokenizer, forced=[], smooth=1e-9)
    seen = int((counts.sources[0].counts > 0).sum())
    assert set(weak.target_ids[:seen]) == set(plain.target_ids[:seen])
    strong = rank_vocabulary(counts, tokenizer=tokenizer, forced=[], smooth=1e12)
    merges = [i for i in strong.target_ids if i >= 259]
    assert merges == sorted(merges)


def test_auto_finds_a_likelier_rate_than_the_counts_or_the_ids_alone(
    tokenizer: LoadedTokenizer, law: np.ndarray
) -> None:
    smoothed = smooth_counts(drawn(law, 1000, 20_000), tokenizer, "auto")
    assert smoothed.chosen_on == "held-out"
    assert 0.05 < smoothed.strength < 5
    weak, strong = (smooth_counts(drawn(law, 1000, 0), tokenizer, x) for x in (1e-3, 1e2))

    def divergence(score: np.ndarray) -> float:
        return float(law @ np.log(law / score))

    assert divergence(smoothed.score) < 0.5 * min(divergence(weak.score), divergence(strong.score))
    assert smoothed.strength == max(smoothed.log_likelihood, key=smoothed.log_likelihood.__getitem__)


def test_the_order_does_not_depend_on_the_size(tokenizer: LoadedTokenizer, law: np.ndarray) -> None:
    counts = drawn(law, 1000, 2000)
    large = rank_vocabulary(counts, size=320, tokenizer=tokenizer, smooth="auto")
    small = rank_vocabulary(counts, size=280, tokenizer=tokenizer, smooth="auto")
    assert (large.num_uncounted is None, large.prefix(280).num_uncounted) == (False, None)
    assert large.prefix(280).target_ids.tolist() == small.target_ids.tolist()
    assert large.provenance["smoothing"]["chosen_on"] == "held-out"
    assert set(large.provenance["smoothing"]) == {"prior", "exponent", "shift", "strength", "chosen_on"}


def test_fewer_rows_than_tokens(tokenizer: LoadedTokenizer, law: np.ndarray) -> None:
    ranked = rank_vocabulary(drawn(law, 1000, 500), tokenizer=tokenizer, smooth="auto", target_vocab=300)
    assert ranked.target_ids.max() == 299


def test_refusals(tokenizer: LoadedTokenizer, law: np.ndarray, tmp_path: Path) -> None:
    counts = drawn(law, 1000, 0)
    shuffled = load_tokenizer(write_folder(tmp_path / "r", reversed_ids(byte_level_bpe(VOCAB))))
    with raises(UsageError, tokenizer=shuffled.source):
        smooth_counts(counts, shuffled, 1.0)
    with raises(UsageError, strength="auto"):
        smooth_counts(counts, tokenizer, "auto")
    for strength in (0, -1, float("inf")):
        with raises(UsageError, strength=strength):
            smooth_counts(counts, tokenizer, strength)
    with raises(UsageError, missing="tokenizer"):
        rank_vocabulary(counts, smooth="auto")
