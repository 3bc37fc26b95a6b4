"""The facts about a head that engines differ on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..head import config as head_config
from ..head import names
from ..head.dflash import whole_config
from ..head.draft_head import DraftHead

# vLLM and SGLang pad a vocabulary to this many rows before they split it over tensor-parallel ranks.
VOCAB_PADDING = 64


@dataclass(frozen=True)
class HeadFacts:
    """The facts about a head that engines differ on.

    Attributes:
        kind: "eagle3", "eagle" for EAGLE-1/2, or "dflash".
        config: config.json as the engine will read it; of a DFlash draft all of it in one level.
        tensor_names: canonical names, `d2t` and `t2d` apart.
        draft_vocab: rows of the LM head that is served (EAGLE-1/2: ids in the token map).
        target_vocab: V.
        num_taps: captured target layers that `fc` takes.
        target_layers: decoder layers of the target, or None where the target is not at hand.
        nonzero_fc_bias: whether `fc.bias` is there and does something.
        has_gguf: whether a GGUF file is beside the head; None where that is not asked.
    """

    kind: names.HeadKind
    config: Mapping[str, object]
    tensor_names: frozenset[str]
    draft_vocab: int
    target_vocab: int
    num_taps: int
    target_layers: int | None = None
    nonzero_fc_bias: bool = False
    has_gguf: bool | None = None

    @classmethod
    def of(
        cls,
        head: DraftHead,
        *,
        config: Mapping[str, object] | None = None,
        draft_vocab: int | None = None,
        target_layers: int | None = None,
        has_gguf: bool | None = None,
    ) -> HeadFacts:
        """Facts of an open head; `config` and `draft_vocab` as they will be written, where that differs."""
        num_taps = 0
        if head.kind == "eagle3" and names.FC in head.tensors:
            num_taps = head.tensors.shape(names.FC)[1] // head.target_hidden_size
        config = head.config if config is None else config
        return cls(
            kind=head.kind,
            # Of a DFlash draft `head.config` has a part only, and speculators' form two levels.
            config=whole_config(head.source_config) if head.kind == "dflash" else config,
            tensor_names=frozenset(head.tensors),
            draft_vocab=head.draft_vocab if draft_vocab is None else draft_vocab,
            target_vocab=head.target_vocab,
            num_taps=num_taps,
            target_layers=target_layers,
            nonzero_fc_bias=head.tensors.is_nonzero(names.FC_BIAS),
            has_gguf=has_gguf,
        )

    @property
    def top_level_taps(self) -> list[int] | None:
        """`eagle_aux_hidden_state_layer_ids` of the config itself: inputs of these layers."""
        return _int_list(self.config.get(head_config.AUX_LAYER_KEY))

    @property
    def nested_taps(self) -> list[int] | None:
        """The same key in `eagle_config`: outputs of these layers."""
        nested = self.config.get("eagle_config")
        return _int_list(nested.get(head_config.AUX_LAYER_KEY)) if isinstance(nested, Mapping) else None

    @property
    def taps(self) -> list[int] | None:
        """Inputs of these layers are captured; None for the default of every engine."""
        if self.top_level_taps is not None:
            return self.top_level_taps
        return None if self.nested_taps is None else [layer + 1 for layer in self.nested_taps]

    @property
    def has_other_taps(self) -> bool:
        """Whether the taps are known to differ from the default (2, n // 2, n - 3), or not known to be it."""
        if self.taps is None:
            return False
        layers = self.target_layers
        return layers is None or tuple(self.taps) != head_config.default_taps(layers)

    @property
    def is_slim(self) -> bool:
        """Whether the draft vocabulary is smaller than the target's."""
        return self.draft_vocab < self.target_vocab

    @property
    def architecture(self) -> str | None:
        """The one architecture that engines look at."""
        found = self.config.get("architectures")
        return str(found[0]) if isinstance(found, list) and found else None

    @property
    def activation(self) -> str:
        """Name of the MLP's activation."""
        return str(self.config.get("hidden_act") or "silu")

    @property
    def sliding_window(self) -> int | None:
        """Tokens that the layer attends to, its own included; None for all before it."""
        return head_config.sliding_window(self.config)

    def flag(self, key: str) -> bool:
        """A flag of the config, or of its `eagle_config`."""
        nested = self.config.get("eagle_config")
        return bool(self.config.get(key) or (isinstance(nested, Mapping) and nested.get(key)))

    @property
    def rope_kind(self) -> str | None:
        """Kind of RoPE scaling, or None without one."""
        rope = self.config.get("rope_scaling")
        if self.kind == "dflash":
            # As published: in either key of transformers, whose "default" is none, with base and sections beside it.
            rope = rope or self.config.get("rope_parameters")
            if isinstance(rope, Mapping) and rope.get("rope_type", rope.get("type", "default")) == "default":
                return "of each type of layer" if any(isinstance(part, Mapping) for part in rope.values()) else None
        return str(rope.get("rope_type") or rope.get("type") or "unnamed") if isinstance(rope, Mapping) else None

    @property
    def taps_text(self) -> str:
        """The tap layers as `--tap-layers` takes them."""
        return ",".join(map(str, self.taps or ()))

    @property
    def outputs_text(self) -> str:
        """The layers whose outputs these are."""
        return ",".join(str(layer - 1) for layer in self.taps or ())

    @property
    def tokens_before(self) -> int:
        """Tokens before the current one that a sliding window holds."""
        return (self.sliding_window or 1) - 1

    @property
    def padded_vocab(self) -> int:
        """Rows of the LM head as vLLM and SGLang pad them."""
        return -(-self.draft_vocab // VOCAB_PADDING) * VOCAB_PADDING


def _int_list(value: object) -> list[int] | None:
    return [int(item) for item in value] if isinstance(value, list) and value else None
