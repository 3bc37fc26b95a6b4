"""Rotary positions of a draft head, from transformers' own initialisation of every scaling.

Su et al., arXiv:2104.09864, in the half-split layout that Llama uses: ``x * cos + rotate_half(x) * sin``.

Two scalings depend on the length of the text: "dynamic" (NTK) has another base for every length beyond
``max_position_embeddings``, "longrope" (arXiv:2402.13753) other factors beyond ``original_max_position_embeddings``.
Where transformers changes them in the middle of a text, keys already cached keep the old ones. A drafter fixes them
once, for as many tokens as its cache has room for (`RotaryEmbedding.for_length`), so all keys of a text agree.

A head that rotates a part of each attention head (`partial_rotary_factor`) rotates its first values, as speculators
trains it and vLLM serves it: value i with value i + part / 2. Scores do not depend on the order of values, so queries
and keys are put in one (`rotated_first`) in which these are value i and value i + head_dim / 2, and what stays as it is
has frequency 0.
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
    """The embedding for texts of up to a number of tokens, where the scaling depends on it."""

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

    Where a scaling depends on the length, the result is for short texts (`RotaryEmbedding.for_length`). Raises
    `UnsupportedModelError` for a scaling that transformers does not know or that lacks a parameter, and for a part to
    rotate with a scaling that changes sizes.
    """
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    scaling = dict(config.get("rope_scaling") or {})
    # At top level too, where `normalise_config` puts it.
    scaling.pop("partial_rotary_factor", None)
    kind = str(scaling.get("rope_type") or scaling.get("type") or "default")
    kind = _OTHER_NAMES.get(kind, kind)
    theta = config["rope_theta"]
    if kind == "dynamic" and scaling.get("alpha"):
        # To Hunyuan and vLLM (`dynamic_ntk_alpha_rope.py`) this means another base, whatever the length.
        rotates = rotary_dim(config)
        kind, theta = "default", theta * scaling["alpha"] ** (rotates / (rotates - 2))
    if config.get("original_max_position_embeddings"):
        # Where Phi-3 keeps it.
        scaling.setdefault("original_max_position_embeddings", config["original_max_position_embeddings"])
    head_dim, rotated = config["head_dim"], rotary_dim(config)
    if head_dim % 2:
        raise UnsupportedModelError(f"The head's head_dim = {head_dim} is odd; RoPE rotates two values together.")

    # transformers before 5 looks for longrope's beside the scaling alone.
    length = "original_max_position_embeddings"
    beside = {length: scaling[length]} if kind == "longrope" and length in scaling else {}

    def whole(frequencies: Tensor, factor: float) -> RotaryEmbedding:
        if rotated < head_dim and factor != 1.0:
            raise ValueError("it changes the size of what is rotated, which is a part")
        still = torch.zeros((head_dim - rotated) // 2)
        return RotaryEmbedding(torch.cat((frequencies.float().cpu(), still)).to(device), factor)

    try:
        # One head alone: its width is all that counts, and LlamaConfig refuses hidden sizes that heads do not divide.
        sizes = {"hidden_size": rotated, "head_dim": rotated, "num_attention_heads": 1, "num_key_value_heads": 1}
        sizes["max_position_embeddings"] = config.get("max_position_embeddings") or 2048
        named = None if kind == "default" else {**scaling, "rope_type": kind}
        llama = LlamaConfig(**sizes, rope_theta=theta, rope_scaling=named, **beside)
        if kind in _BY_LENGTH:

            def for_length(num_tokens: int) -> RotaryEmbedding:
                frequencies, factor = ROPE_INIT_FUNCTIONS[kind](llama, None, seq_len=num_tokens)
                return whole(frequencies, float(factor))

            for_length(_LONGEST)
            short = for_length(1)
            return RotaryEmbedding(short.inverse_frequencies, short.scaling, for_length)
        rotary = LlamaRotaryEmbedding(llama)
        return whole(rotary.inv_freq, float(rotary.attention_scaling))
    except (KeyError, TypeError, ValueError) as error:
        raise UnsupportedModelError(
            f"The head's RoPE scaling {scaling or None} with rope_theta = {config['rope_theta']} cannot be initialised "
            f"({type(error).__name__}: {error}). Correct rope_scaling in the head's config.json."
        ) from error


def rotary_dim(config: Mapping[str, Any]) -> int:
    """Return how many values of each attention head are rotated, by ``config.json`` as `normalise_config` checks it."""
    return int(config["head_dim"] * (config.get("partial_rotary_factor") or 1))


def rotated_first(rows: Tensor, head_dim: int, rotated: int) -> Tensor:
    """Put rows [heads * head_dim, ...] in the order in which value i is rotated with value i + head_dim / 2.

    Rows of q, of k, or of their norms. ``rotated``: how many of a head's first values are rotated, value i with
    value i + rotated / 2.
    """
    order = torch.arange(head_dim, device=rows.device)
    pairs = order[:rotated].view(2, -1), order[rotated:].view(2, -1)
    heads: Tensor = rows.unflatten(0, (-1, head_dim))
    return heads[:, torch.cat(pairs, 1).flatten()].flatten(0, 1)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate ``x`` [batch, heads, nodes, head_dim] by fp32 ``cos``, ``sin`` [batch, nodes, head_dim]."""
    first, second = x.float().chunk(2, -1)
    rotated = x.float() * cos[:, None] + torch.cat((-second, first), -1) * sin[:, None]
    return rotated.to(x.dtype)
