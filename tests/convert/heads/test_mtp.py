"""Models whose draft is a multi-token-prediction layer are named; the large vocabularies of hybrid ones are ranked."""

import numpy as np
import pytest
from eagle_slim.convert import UnsupportedHeadError
from eagle_slim.convert.heads.names import canonical_names
from eagle_slim.convert.vocabulary_choice import VocabRequest
from eagle_slim.vocab_tools.counting import count_tokens
from eagle_slim.vocab_tools.sources import CorpusSource
from safetensors.torch import load_file
from support.conversion import convert
from support.heads import HIDDEN, random, write_dflash, write_json, write_tensors
from support.raising import raises_with
from support.small_tokenizers import TEXT, byte_level_bpe, many_tokens, write_folder

LAYER = "model.layers.0.self_attn.q_norm.weight"
ROWS, TOKENS = 248_320, 248_077


@pytest.mark.parametrize(
    "name",
    [
        "mtp.layers.0.self_attn.q_proj.weight",  # Qwen3.5, 3.6, 3.8
        "model.layers.61.eh_proj.weight",  # DeepSeek-V3
        "model.layers.92.enorm.weight",  # GLM-4.5
    ],
)
def test_an_mtp_layer_is_named_with_the_engine_that_takes_a_map_for_it(name: str) -> None:
    with pytest.raises(UnsupportedHeadError) as caught:
        canonical_names([LAYER, "lm_head.weight", name], "org/model")
    everything = ("this is a multi-token-prediction (MTP) layer", "all rows in vLLM 0.32.0", "or llama.cpp b11434")
    for words in (*everything, "with fewer rows in SGLang 0.5.23", "--speculative-token-map freq_N.pt"):
        assert words in str(caught.value)


@pytest.mark.slow
def test_a_hybrid_target_of_248320_rows_is_counted_ranked_and_cut(tmp_path) -> None:
    """Its tokenizer has fewer tokens than the LM head has rows, and its configuration is nested."""
    folder = write_folder(tmp_path / "target", many_tokens(byte_level_bpe(), TOKENS), eos_token="<|im_end|>")
    text = {"hidden_size": HIDDEN, "num_hidden_layers": 8, "vocab_size": ROWS, "layer_types": ["linear_attention"] * 8}
    write_json(folder / "config.json", {"model_type": "qwen3_5", "text_config": text, "tie_word_embeddings": False})
    lm_head = random((ROWS, HIDDEN), 5)
    write_tensors(folder, {"lm_head.weight": lm_head, "mtp.fc.weight": random((HIDDEN, 2 * HIDDEN), 6)}, "safetensors")
    corpus = tmp_path / "text.txt"
    corpus.write_text("\n".join(TEXT) + " the fox again" * 50)
    sources, draft = (CorpusSource(str(corpus)),), write_dflash(tmp_path / "draft", vocab_size=ROWS)

    def count(corpora, tokenizer):
        return count_tokens(corpora, tokenizer, workers=0)

    request = VocabRequest(corpus=sources)
    done = convert(draft, draft_vocab=400, target=folder, out=tmp_path / "slim", vocabulary=request, count=count)
    new = load_file(done.folder / "model.safetensors")
    ids = new["d2t"].numpy() + np.arange(400)
    assert new["lm_head.weight"].equal(lm_head[ids])
    assert new["t2d"].shape == (ROWS,)
    # Markers and bytes are forced, all that was counted is in, and no row of padding.
    assert set(range(259)) <= set(ids.tolist())
    assert {byte_level_bpe().token_to_id(token) for token in ("Ġthe", "Ġfox")} <= set(ids.tolist())
    assert ids.max() < TOKENS
    with raises_with(UnsupportedHeadError, "multi-token-prediction"):
        convert(folder, draft_vocab=400, target=folder, out=tmp_path / "mtp", vocabulary=VocabRequest(order="ids"))
