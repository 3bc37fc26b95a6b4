"""The engine starts, in waves that are run together."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Json = dict[str, Any]
BROKEN = ("missing", "reordered", "shifted")
TEXT_TOKENS, SPEED_TOKENS, BATCHES = 128, 256, (1, 4, 16)
# Tokens a step that dummy heads are given, whose real drafts would all be wrong.
SYNTHETIC_LENGTH = 2.5
TOPK_8 = {"topk": 8, "steps": 4, "draft_tokens": 32}
EAGLE2_TOPK_4 = {"algorithm": "EAGLE", "topk": 4, "steps": 3, "draft_tokens": 16, "token_map": "eagle2/freq_320.pt"}


@dataclass(frozen=True)
class Start:
    """One engine start.

    Attributes:
        name: unique in the plan.
        engine: "vllm" or "sglang".
        model: folder below the models' folder.
        head: folder below ``model``; None decodes plainly.
        options: what `vllm_start.py` or `sglang_start.py` understand beyond that.
        gpus: those that it uses, where there are as many; two are ranks of one engine.
        served: through the engine's own server, with `serve_start.py`.
        packs: what it is imported from, the first first; None for the engine's own.
    """

    name: str
    engine: str
    model: str
    head: str | None
    options: Json = field(default_factory=dict)
    gpus: tuple[int, ...] = (0,)
    served: bool = False
    packs: tuple[str, ...] | None = None

    def job(self, models: Path) -> Json:
        """The job of the start's process."""
        folder, dummy = models / self.model, self.model not in ("smollm2", "oracle")
        paths = {"target": folder / "target", "prompts": folder / "prompts.json"}
        options = dict(self.options)
        if "token_map" in options:
            options["token_map"] = str(folder / options["token_map"])
        if "broken" in options:
            options["broken"] = {how: str(folder / f"{self.head}-{how}") for how in options["broken"]}
        return {
            "engine": self.engine,
            **{name: str(path) for name, path in paths.items()},
            "head": None if self.head is None else str(folder / self.head),
            "dummy": dummy,
            "text_tokens": 0 if dummy else TEXT_TOKENS,
            "max_tokens": SPEED_TOKENS,
            "batches": BATCHES,
            "synthetic_length": SYNTHETIC_LENGTH,
            "tensor_parallel": len(self.gpus),
            **options,
        }


WAVES: dict[str, list[Start]] = {
    "vllm": [
        Start("vllm plain", "vllm", "smollm2", None),
        Start("vllm full, 3 drafts", "vllm", "smollm2", "full"),
        Start("vllm 16384, 3 drafts", "vllm", "smollm2", "16384"),
        Start("vllm 4096, 3 drafts, then its broken maps", "vllm", "smollm2", "4096", {"broken": BROKEN}),
        Start("vllm 16384, 5 drafts", "vllm", "smollm2", "16384", {"k": 5}),
    ],
    "sglang-plain": [Start("sglang plain", "sglang", "smollm2", None)],
    "sglang": [
        Start("sglang 16384, chain of 3", "sglang", "smollm2", "16384"),
        Start("sglang 16384, tree, topk 8", "sglang", "smollm2", "16384", TOPK_8),
        # The oracle needs no weights to be carried; its drafts are all accepted exactly if everything is read right.
        Start("sglang oracle EAGLE-2 with a token map, tree, topk 4", "sglang", "oracle", "eagle2", EAGLE2_TOPK_4),
    ],
    "sglang-broken": [
        Start("sglang 4096, chain of 3, its map missing", "sglang", "smollm2", "4096-missing", {"batches": (16,)}),
    ],
    "older-vllm": [
        Start("vllm 0.20.2, 16384, 3 drafts", "vllm", "smollm2", "16384", packs=("older-vllm", "vllm")),
    ],
    "vllm-8b": [
        Start("vllm llama-8b full", "vllm", "llama-8b", "full", gpus=(1,)),
        Start("vllm llama-8b 32000", "vllm", "llama-8b", "32000", gpus=(1,)),
        Start("vllm llama-8b 16000", "vllm", "llama-8b", "16000", gpus=(1,)),
    ],
    "vllm-qwen3": [
        Start("vllm qwen3-8b full", "vllm", "qwen3-8b", "full"),
        Start("vllm qwen3-8b 16000", "vllm", "qwen3-8b", "16000"),
    ],
    "serve": [
        Start("sglang server, 16384, chain of 3", "sglang", "smollm2", "16384", served=True),
        Start("vllm server, 16384, 3 drafts", "vllm", "smollm2", "16384", gpus=(1,), served=True),
    ],
    # Two tensor-parallel ranks; the 9 attention heads of SmolLM2 cannot be shared by two.
    "two-ranks": [
        Start("sglang oracle EAGLE-3, chain of 3, two ranks", "sglang", "oracle", "eagle3", gpus=(0, 1)),
        Start("vllm llama-8b 16000, two ranks", "vllm", "llama-8b", "16000", gpus=(0, 1)),
    ],
}  # fmt: skip
