"""Random mixtures of experts whose routing is drawn.

A part of each embedding, which stands out of what layers add, holds a number for each expert, and every layer's router
reads them in an order of its own. Routers: ``uniform``, where these numbers are noise, so that rows share few experts;
``biased``, where experts are as frequent as a Zipf law says (exponent 0.5), with an offset of each sequence's own that
is set so that 6 tokens of one touch 24 experts of a layer, as was counted of Qwen3-30B-A3B; in other dimensions as
large a share of what the uniform router touches.
"""

from __future__ import annotations

from typing import Any

import torch
from eagle_slim.runtime.target.fused import FusedTarget
from eagle_slim.runtime.target.kernels.experts import Experts
from torch import Tensor

from .decoding import RandomModel

STAND_OUT = 20.0
"""Size of the part of an embedding that routers read, beside what all layers add, about 1."""
TOUCHED = 24 / 41.1
"""Share of the experts that 6 tokens touch by a uniform router which those of a sequence touch by a biased one."""


class Law:
    """Numbers for experts by token: a base of all, an offset of each class of tokens, and noise of each."""

    def __init__(self, name: str, experts: int, top_k: int, classes: int) -> None:
        draw = torch.Generator().manual_seed(classes)
        self.classes, self.experts, self.top_k, self._draw = classes, experts, top_k, draw
        rank = torch.randperm(experts, generator=draw) + 1
        self.base, self.offsets = torch.zeros(experts), torch.zeros(classes, experts)
        if name == "biased":
            self.base = -0.5 * rank.float().log()
            unit, low, high = torch.randn(classes, experts, generator=draw), 0.0, 8.0
            wanted = TOUCHED * experts * (1 - (1 - top_k / experts) ** 6)
            for _ in range(20):
                self.offsets = unit * (low + high) / 2
                low, high = ((low + high) / 2, high) if self.touched(6) > wanted else (low, (low + high) / 2)

    def touched(self, tokens: int, tries: int = 64) -> float:
        """Count the experts that tokens of a class touch, in the mean."""
        picked = self.numbers(torch.zeros(tries * tokens, dtype=torch.int64)).topk(self.top_k).indices
        return sum(len(each.unique()) for each in picked.view(tries, -1)) / tries

    def numbers(self, tokens: Tensor) -> Tensor:
        """Draw the numbers of tokens, [tokens, experts]."""
        noise = -torch.empty(len(tokens), self.experts).exponential_(generator=self._draw).log()
        return self.base + self.offsets[tokens % self.classes] + noise


class RoutedModel(RandomModel):
    """A random mixture whose tokens are routed as `follow` says."""

    def __init__(
        self, name: str, device: torch.device, dtype: torch.dtype = torch.bfloat16, weights: str = "bf16"
    ) -> None:
        super().__init__(name, device, dtype, weights=weights)
        self.model: Any = self.target.model
        self._numbers: dict[tuple[str, int], Tensor] = {}
        draw = torch.Generator().manual_seed(0)
        assert isinstance(self.target, FusedTarget)
        self.layers = [layer.mlp for layer in self.target.layers if isinstance(layer.mlp, Experts)]
        count = self.layers[0].count
        for each in self.layers:
            each.router.data.zero_()[torch.arange(count), torch.randperm(count, generator=draw)] = 1.0

    def follow(self, law: str, classes: int) -> None:
        """Let tokens be routed by a law, token t as those of class ``t % classes``."""
        embedding, count = self.model.model.embed_tokens.weight.data, self.layers[0].count
        if (law, classes) not in self._numbers:
            drawn = Law(law, count, self.layers[0].top_k, classes)
            numbers = drawn.numbers(torch.arange(len(embedding)))
            numbers = (numbers - numbers.mean(1, keepdim=True)) / numbers.std() * STAND_OUT
            self._numbers[law, classes] = numbers.to(embedding)
        embedding[:, :count] = self._numbers[law, classes]
