"""The whole of a comparison before it runs: prompts, candidates and options, and how many calls they make."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

from ..drafter.weights import HeadWeights
from ..errors import UsageError
from ..model import SpeculativeModel
from .candidates import Candidate
from .options import CompareOptions
from .prompt_file import Prompt


@dataclass(frozen=True)
class Plan:
    """Prompts, candidates and options. ``candidates``: plain decoding first, which the others are compared with.

    Raises `UsageError` for no prompt, and for a label given twice.
    """

    prompts: Sequence[Prompt]
    candidates: Sequence[Candidate]
    options: CompareOptions

    def __post_init__(self) -> None:
        labels = [candidate.label for candidate in self.candidates]
        if not self.prompts or len(set(labels)) != len(labels):
            raise UsageError(
                f"A comparison takes one prompt or more, and each size once; got {len(self.prompts)} prompts and "
                f"{', '.join(labels)}.",
                prompts=len(self.prompts), found=labels,
            )  # fmt: skip

    @property
    def model(self) -> SpeculativeModel:
        """The model that decodes plainly."""
        return self.candidates[0].model

    def groups(self, batch: int) -> list[tuple[int, ...]]:
        """Return the numbers of the prompts that are answered together."""
        count = len(self.prompts)
        return [tuple((first + i) % count for i in range(batch)) for first in range(0, count, batch)]

    @property
    def num_calls(self) -> int:
        """How many calls of `generate` it takes."""
        turns = sum(
            max(len(self.prompts[place].turns) for place in group)
            for batch in self.options.batches
            for group in self.groups(batch)
        )
        return len(self.candidates) * turns * len(self.options.modes) * self.options.repeats

    def describe(self) -> dict[str, Any]:
        """Return what is compared, on which device and how, as plain values."""
        model, drafted, options = self.model, self.candidates[1:], self.options
        ahead = options.partial_verification
        device = model.target.device
        threads = torch.get_num_threads()
        cpu = f"CPU, {threads} thread{'s' if threads > 1 else ''}"
        trees = ("depth {}, top_k {}, {} nodes".format(*candidate.tree) for candidate in drafted)
        return {
            "target": (model.opened.target_name if model.opened else None) or type(model.target.model).__name__,
            "heads": list(dict.fromkeys(candidate.head for candidate in drafted)),
            "target_vocab": int(model.target.text_config.vocab_size),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu,
            "dtype": str(model.target.dtype).removeprefix("torch."),
            "drafter": model.drafter.name,
            "draft_weights": model.draft_weights,
            "candidates": [candidate.label for candidate in drafted],
            "follow_rows": max(candidate.follow_rows for candidate in drafted),
            "trees": list(dict.fromkeys(trees)),
            "num_prompts": len(self.prompts),
            "num_turns": sum(len(prompt.turns) for prompt in self.prompts),
            "modes": {mode: options.generation(mode) for mode in options.modes},
            "batches": list(options.batches),
            "max_new_tokens": options.max_new_tokens,
            "partial_verification": ahead and {"ahead": str(ahead), "from": ahead.min_length},
            "repeats": options.repeats,
            "versions": {package: version(package) for package in ("eagle-slim", "torch", "transformers")},
        }

    def fingerprint(self) -> dict[str, Any]:
        """Return what tells one comparison from another as plain values: the prompts too, as a hash."""
        prompts = json.dumps([[prompt.turns, prompt.opening, prompt.category] for prompt in self.prompts])
        return self.describe() | {
            "prompts": hashlib.sha256(prompts.encode()).hexdigest(),
            "chat": self.options.use_chat_template,
            "target_weights": _digest(self.model.target.model.parameters()),
            "heads_and_draft_vocabularies": [_digest_of_head(each.model.drafter.weights) for each in self.candidates],
        }


def _digest_of_head(weights: HeadWeights) -> str:
    follow = weights.follow
    ids = [weights.draft_to_target, *([] if follow is None else [follow.ids])]
    return _digest([*weights.tensors.values(), weights.lm_head], ids)


def _digest(tensors: Iterable[Tensor], whole: Iterable[Tensor] = ()) -> str:
    """Tell tensors from others by values at both ends, and ``whole`` ones by all."""
    found = hashlib.sha256()
    for each in tensors:
        values = each.detach().reshape(-1)
        ends = torch.cat([values[:32], values[-32:]]).cpu().contiguous()
        found.update(f"{tuple(each.shape)}".encode() + ends.view(torch.uint8).numpy().tobytes())
    for each in whole:
        found.update(each.cpu().numpy().tobytes())
    return found.hexdigest()
