"""Heads as they are published, through the whole product: converted, verified, and drafted with, against a definition.

What is expected is computed from the published files alone, read here in a few lines, by transformers' own target and
`support.naive_drafter`: every tree, and what every pass accepts, over the head's own vocabulary and the smaller one.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from eagle_slim.convert.heads.config import default_taps
from eagle_slim.convert.verify.verify import verify_artifact
from eagle_slim.convert.vocabulary_choice import VocabRequest
from eagle_slim.runtime import SpeculativeModel
from eagle_slim.runtime.drafter.buffers import Buffers
from eagle_slim.runtime.drafter.dimensions import DrafterConfig
from eagle_slim.runtime.drafter.reference import draft_ref
from eagle_slim.runtime.drafter.weights import HeadWeights
from eagle_slim.runtime.settings import TreeConfig
from safetensors.torch import load_file, save_file
from support.conversion import convert
from support.heads import random, write_freq
from support.naive_drafter import Naive
from support.tiny_models import HIDDEN, LAYERS, VOCAB, plain_greedy, random_prompts, tiny_target, write_head
from torch import Tensor, nn

pytestmark = pytest.mark.filterwarnings("ignore::eagle_slim.runtime.errors.AcceptanceWarning")
TREE = TreeConfig(depth=1, top_k=6, total_tokens=20)
IDS = [5, 2, 19, 7, 8, 22, 11, 3, 4, 20, 21, 9, 10, 12, 13, 14, 15, 16, 6, 17]
KEPT, NEW = 14, 5


def line(size: int, start: float = -0.4, end: float = 0.4) -> Tensor:
    return torch.linspace(start, end, size)


def biases(layer: str, **sizes: int) -> dict[str, Tensor]:
    return {f"{layer}{name}_proj.bias": line(size) for name, size in sizes.items()}


MLP = {"gate": 48, "up": 48, "down": HIDDEN}
TAP_NORMS = {f"fc_norm.{index}.weight": line(HIDDEN, 0.5 + index, 1.5) for index in range(3)}
HEAD_NORMS = {f"midlayer.self_attn.{name}_norm.weight": line(8, 0.5, end) for name, end in (("q", 6), ("k", 3))}
AUX_NORMS = {f"fc_norm.{index}.": f"aux_norm_{name}." for index, name in enumerate(("low", "mid", "high"))}


@dataclass(frozen=True)
class Form:
    """How a head is published: ``options`` of `write_head`, then what its authors spell in another way."""

    options: dict[str, Any] = field(default_factory=dict)
    renamed: dict[str, str] = field(default_factory=dict)
    """Beginnings of tensor names."""
    is_nested: bool = False
    """Whether the configuration is that of vLLM's speculators."""
    is_pickled: bool = False
    types: dict[str, torch.dtype] = field(default_factory=dict)
    """Of tensors whose names begin so."""
    frequencies: list[float] | None = None
    """Of RoPE."""


FORMS = {
    "SafeAILab": Form(
        {"draft_ids": IDS, "bias": False, "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 40},
        is_pickled=True, types={"d2t": torch.int32, "norm": torch.float32, "midlayer.mlp": torch.float16},
    ),
    "speculators": Form(
        {
            "draft_ids": sorted(IDS), "fc_norm": True, "attention_bias": True, "mlp_bias": True,
            "embed_requires_grad": True,
            "layer_types": ["sliding_attention"], "sliding_window": 4, "hidden_act": "gelu_pytorch_tanh",
            "extra": {**biases("midlayer.mlp.", **MLP), **biases("midlayer.self_attn.", o=HIDDEN), **TAP_NORMS,
                      "verifier_norm.weight": line(HIDDEN),
                      "embed_tokens.weight": random((VOCAB, HIDDEN), 6, torch.float32)},
            "rope_parameters": {
                "rope_type": "linear", "factor": 2.0, "rope_theta": 1e6, "partial_rotary_factor": 0.5,
            },
            "rope_theta": 1e4,
        },
        {"midlayer.": "layers.0."}, is_nested=True,
        frequencies=[1e6 ** (-2 * pair / 4) / 2 for pair in range(2)],
    ),
    "speculators, Qwen3's layer": Form(
        {
            "model_type": "qwen3", "draft_ids": sorted(IDS), "fc_norm": True, "partial_rotary_factor": 0.5,
            "extra": {**HEAD_NORMS, **TAP_NORMS},
        },
        {"midlayer.": "layers.0."}, is_nested=True, frequencies=[1e4 ** (-2 * pair / 4) for pair in range(2)],
    ),
    "SGLang, tap norms by their older names": Form(
        {
            "use_aux_norm": True, "extra": TAP_NORMS, "own_lm_head": True,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 3]},
        },
        AUX_NORMS,
    ),
    "NVIDIA": Form(
        {
            "draft_vocab_size": None, "extra": {"input_norm.weight": line(3 * HIDDEN, 0.5, 1.5)},
            "eagle_config": {"norm_before_fc": True, "return_hidden_post_norm": True, "next_layer_regular": True},
            "rope_scaling": {
                "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
        {"midlayer.": "layers.0."},
        # 64 / 4 tokens and shorter waves as they are, 64 and longer ones divided by 8, those between by both.
        frequencies=[
            1.0, 0.1 * (0.125 * (1 - (64 / (20 * math.pi) - 1) / 3) + (64 / (20 * math.pi) - 1) / 3), 0.00125, 0.000125
        ],
    ),
    "AngelSlim, wide heads": Form(
        {
            "draft_ids": IDS, "architectures": ["Eagle3LlamaForCausalLM"], "head_dim": 16, "hidden_act": "swish",
            "extra": {
                f"midlayer.self_attn.{name}_proj.weight": random((rows, 64), rows + columns, torch.float32) / 4
                for name, rows, columns in (("q", 64, 1), ("k", 32, 2), ("v", 32, 3), ("o", 32, 4))
            },
        },
        {"midlayer.": "model.layers.0."},
    ),
    "of a vision-language target, tied": Form(
        {
            "tie_word_embeddings": True, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]},
            "extra": {"embed_tokens.weight": random((VOCAB, HIDDEN), 5, torch.float32) / 2},
        },
    ),
    "the last hidden state alone": Form(
        {"draft_ids": IDS, "taps": 1, "eagle_config": {"use_aux_hidden_state": False}},
    ),
    "EAGLE-1": Form(
        {"kind": "eagle", "bias": False, "extra": {"fc.bias": torch.zeros(HIDDEN)}},
        {"layers.0.": "model.layers.0."}, is_pickled=True,
    ),
    "EAGLE-2 with every bias": Form(
        {
            "kind": "eagle", "attention_bias": True, "mlp_bias": True, "hidden_act": "gelu", "bias": True,
            "layer_types": ["sliding_attention"], "sliding_window": 3,
            "extra": {**biases("layers.0.mlp.", **MLP), **biases("layers.0.self_attn.", o=HIDDEN),
                      "layers.0.input_layernorm.weight": line(HIDDEN)},
        },
    ),
}  # fmt: skip


def publish(folder: Path, form: Form) -> Path:
    """Write a head in its form."""
    write_head(folder, **form.options)
    tensors = load_file(folder / "model.safetensors")
    if form.options.get("bias") is False:
        tensors.pop("fc.bias", None)
    for start, dtype in form.types.items():
        tensors |= {name: tensor.to(dtype) for name, tensor in tensors.items() if name.startswith(start)}
    for old, new in form.renamed.items():
        tensors = {new + name.removeprefix(old) if name.startswith(old) else name: t for name, t in tensors.items()}
    (folder / "model.safetensors").unlink()
    if form.is_pickled:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors")
    if form.is_nested:
        path = folder / "config.json"
        flat = json.loads(path.read_text())
        outer = {name: flat.pop(name) for name in ("draft_vocab_size", "fc_norm")}
        outer |= {"speculators_model_type": "eagle3", "architectures": ["Eagle3Speculator"]}
        path.write_text(json.dumps(outer | {"transformer_layer_config": flat}))
    return folder


def read(folder: Path, form: Form, target: Any) -> tuple[SimpleNamespace, tuple[int, ...] | None]:
    """The published files in the names of `HeadWeights`, and whose inputs the head reads."""
    bin_file = folder / "pytorch_model.bin"
    stored = torch.load(bin_file, weights_only=True) if bin_file.exists() else load_file(folder / "model.safetensors")
    tensors = {}
    for name, tensor in stored.items():
        for new, old in {new: old for old, new in form.renamed.items()}.items():
            name = old + name.removeprefix(new) if name.startswith(new) else name
        tensors[name.removeprefix("midlayer.").removeprefix("layers.0.")] = tensor
    settings = form.options
    nested = settings.get("eagle_config", {})
    kind = settings.get("kind", "eagle3")
    ids = tensors.pop("d2t") + torch.arange(len(tensors.pop("t2d").nonzero())) if "d2t" in tensors else None
    lm_head = tensors.pop("lm_head.weight", target.lm_head.weight)
    if settings.get("tie_word_embeddings"):
        lm_head = tensors["embed_tokens.weight"]
    embedding = (
        tensors["embed_tokens.weight"] if "embed_requires_grad" in settings else target.model.embed_tokens.weight
    )
    head = SimpleNamespace(
        kind=kind, tensors={name: tensor.float() for name, tensor in tensors.items()}, hidden=HIDDEN,
        embedding=embedding, lm_head=lm_head.float(), num_heads=4, num_kv_heads=2,
        draft_to_target=torch.arange(VOCAB) if ids is None else ids.long(), head_dim=settings.get("head_dim", 8),
        norm_eps=1e-5, sliding_window=settings.get("sliding_window"), norm_before_residual=form.is_nested,
        activation={"gelu_pytorch_tanh": "gelu_new", "swish": "silu"}.get(
            settings.get("hidden_act", "silu"), settings.get("hidden_act", "silu")
        ),
        norm_output="return_hidden_post_norm" in nested,
    )  # fmt: skip
    if kind == "eagle" or nested.get("use_aux_hidden_state") is False:
        return head, None
    shifted = nested.get("eagle_aux_hidden_state_layer_ids")
    return head, default_taps(LAYERS) if shifted is None else tuple(layer + 1 for layer in shifted)


@torch.inference_mode()
def passes(
    target: nn.Module, naive: Naive, taps: tuple[int, ...] | None, text: list[int], known: int
) -> Iterator[tuple[list[int], list[int], int]]:
    """Tokens and parents of every tree, drafted from scratch, and how many tokens it adds; until `NEW` are there.

    ``text``: the prompt, of ``known`` tokens, and what the target says, for longer than that.
    """
    states = target(torch.tensor([text]), output_hidden_states=True).hidden_states
    features = states[-1][0] if taps is None else torch.cat([states[tap][0] for tap in taps], -1)
    end = known + NEW
    known += 1  # by the prompt's forward
    while known < end:
        tokens, parents = naive.draft(features[: known - 1], text[1:known], TREE)
        node, length = 0, 1
        while node := next(
            (n for n in range(1, len(tokens)) if parents[n] == node and tokens[n] == text[known + length - 1]), 0
        ):
            length += 1
        # What is accepted beyond the answer's end is cut.
        yield tokens, parents, min(length, end - known)
        known += length


def converted(tmp_path: Path, folder: Path, target: nn.Module) -> Path:
    """The head over the best ``KEPT`` of `IDS`, in that order."""
    target.save_pretrained(tmp_path / "target")  # type: ignore[operator]
    request = VocabRequest(token_map=write_freq(tmp_path / "freq.pt", IDS))
    done = convert(folder, draft_vocab=KEPT, vocabulary=request, target=tmp_path / "target", out=tmp_path / "slim")
    assert verify_artifact(done.folder, head=folder, target=str(tmp_path / "target")).ok
    return done.folder


def over(head: SimpleNamespace, ids: list[int]) -> SimpleNamespace:
    """The head over fewer of its ids."""
    rows = [head.draft_to_target.tolist().index(token) for token in ids]
    return SimpleNamespace(**{**vars(head), "lm_head": head.lm_head[rows], "draft_to_target": torch.tensor(ids)})


def check(source: Path, expected: Naive, taps: tuple[int, ...] | None, target: nn.Module) -> None:
    """Hold every tree and accepted length of a generation, and its text, against the definition."""
    trees = []

    def recorded(cfg: DrafterConfig, features: Tensor, head: HeadWeights, bufs: Buffers) -> None:
        draft_ref(cfg, features, head, bufs)
        trees.append((bufs.draft_tokens[0].tolist(), bufs.parents[0].tolist()))

    prompt = random_prompts([5])[0]
    answer = plain_greedy(target, prompt, NEW + TREE.depth + 1, eos=None)
    model = SpeculativeModel.from_pretrained(
        target, source, drafter=recorded, depth=TREE.depth, top_k=TREE.top_k, total_tokens=TREE.total_tokens
    )
    output = model.generate([prompt], max_new_tokens=NEW)
    assert output.token_ids == [answer[:NEW]]
    defined = passes(target, expected, taps, prompt + answer, len(prompt))
    tokens, parents, lengths = zip(*defined, strict=True)
    assert trees == list(zip(tokens, parents, strict=True))
    assert output.stats.accepted_lengths == Counter(lengths)


@pytest.mark.parametrize("name", FORMS)
def test_a_published_head_drafts_as_defined_before_and_after_conversion(tmp_path: Path, name: str) -> None:
    form, target = FORMS[name], tiny_target("llama")
    folder = publish(tmp_path / "head", form)
    head, taps = read(folder, form, target)
    slim = converted(tmp_path, folder, target)
    for source, expected in ((folder, head), (slim, over(head, sorted(IDS[:KEPT])))):
        check(source, Naive(expected, form.frequencies), taps, target)
