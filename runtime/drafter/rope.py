"""Rotary positions of a draft head, from transformers' own initialisation of every scaling.

Su et al., arXiv:2104.09864, in the half-split layout that Llama uses: ``x * cos + rotate_half(x) * sin``.

Two scalings depend on the length of the text: "dynamic" (NTK) has another base for every length beyond
``max_position_embeddings``, "longrope" (arXiv:2402.13753) other factors beyond ``original_max_position_embeddings``.
Where transformers changes them in the middle of a text, keys already cached keep the old ones. A drafter fixes them
once, for as many tokens as its cache has room for (`RotaryEmbedding.for_length`), so all keys of a text agree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..errors import UnsupportedModelError

_BY_LENGTH = ("dynamic", "longrope")
# "mrope" gives images positions of their own: text has plain ones. "su" is longrope in the first Phi-3 models.
# Both as transformers reads them (configuration_qwen2_vl.py, configuration_phi3.py).
_OTHER_NAMES = {"mrope": "default", "su": "longrope"}
_LONGEST = 1 << 20
"""Beyond every length at which a scaling changes: to see that it can be computed there."""


@dataclass(frozen=True)
class RotaryEmbedding:
    """``inverse_frequencies`` float32 [head_dim / 2], and the factor that some scalings put on cos and sin."""

    inverse_frequencies: Tensor
    scaling: float
    by_length: Callable[[int], RotaryEmbedding] | None = field(default=None, repr=False, compare=False)
    """The embedding for texts of up to so many tokens, of a scaling that depends on it."""

    def for_length(self, num_tokens: int) -> RotaryEmbedding:
        """Return the embedding for texts of up to ``num_tokens`` tokens: this one, unless the scaling depends on it."""
        return self if self.by_length is None else self.by_length(num_tokens)

    def tables(self, num_positions: int) -> tuple[Tensor, Tensor]:
        """Return cos and sin of positions 0 .. ``num_positions`` - 1: float32 [num_positions, head_dim]."""
        return self.at(torch.arange(num_positions, device=self.inverse_frequencies.device))

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin at ``positions`` int64 [...]: float32 [..., head_dim]."""
        angles = positions[..., None].float() * self.inverse_frequencies
        angles = torch.cat((angles, angles), -1)
        return angles.cos() * self.scaling, angles.sin() * self.scaling


def rotary_embedding(config: Mapping[str, Any], device: torch.device | str = "cpu") -> RotaryEmbedding:
    """Initialise from a head's ``config.json`` (``rope_theta``, ``rope_scaling``, ``head_dim``).

    A scaling that depends on the length is that of short texts; `RotaryEmbedding.for_length` gives the others. Raises
    `UnsupportedModelError` for a scaling that transformers does not know or that lacks a parameter, and for partial
    rotation.
    """
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    scaling = dict(config.get("rope_scaling") or {})
    kind = str(scaling.get("rope_type") or scaling.get("type") or "default")
    kind = _OTHER_NAMES.get(kind, kind)
    if config.get("original_max_position_embeddings"):
        # Where Phi-3 keeps it.
        scaling.setdefault("original_max_position_embeddings", config["original_max_position_embeddings"])
    if config.get("partial_rotary_factor", 1.0) != 1.0:
        raise UnsupportedModelError(
            "The head rotates only a part of each attention head (partial_rotary_factor = "
            f"{config['partial_rotary_factor']}); draft heads of the Llama kind rotate all of it.",
            field="partial_rotary_factor", found=config["partial_rotary_factor"],
        )  # fmt: skip
    head_dim = config["head_dim"]
    if head_dim % 2:
        raise UnsupportedModelError(
            f"The head's head_dim = {head_dim} is odd; RoPE rotates two values together.",
            field="head_dim",
            found=head_dim,
        )
    try:
        # One head alone: its width is all that counts, and LlamaConfig refuses hidden sizes that heads do not divide.
        llama = LlamaConfig(
            hidden_size=head_dim,
            num_attention_heads=1,
            num_key_value_heads=1,
            head_dim=head_dim,
            max_position_embeddings=config.get("max_position_embeddings") or 2048,
            rope_theta=config["rope_theta"],
            rope_scaling=None if kind == "default" else {**scaling, "rope_type": kind},
        )
        if kind in _BY_LENGTH:

            def for_length(num_tokens: int) -> RotaryEmbedding:
                frequencies, factor = ROPE_INIT_FUNCTIONS[kind](llama, None, seq_len=num_tokens)
                return RotaryEmbedding(frequencies.float().to(device), float(factor))

            for_length(_LONGEST)
            short = for_length(1)
            return RotaryEmbedding(short.inverse_frequencies, short.scaling, for_length)
        rotary = LlamaRotaryEmbedding(llama)
    except (KeyError, TypeError, ValueError) as error:
        raise UnsupportedModelError(
            f"The head's RoPE scaling {scaling or None} with rope_theta = {config['rope_theta']} cannot be initialised "
            f"({type(error).__name__}: {error}). Correct rope_scaling in the head's config.json.",
            field="rope_scaling", found=kind,
        ) from error  # fmt: skip
    return RotaryEmbedding(rotary.inv_freq.float().to(device), float(rotary.attention_scaling))


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate ``x`` [batch, heads, nodes, head_dim] by fp32 ``cos``, ``sin`` [batch, nodes, head_dim]."""
    first, second = x.float().chunk(2, -1)
    rotated = x.float() * cos[:, None] + torch.cat((-second, first), -1) * sin[:, None]
    return rotated.to(x.dtype)
