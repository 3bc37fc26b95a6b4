"""Random targets and heads of known dimensions, ready to decode from any prefix; and steps as generation runs them.

A target's time does not depend on its weights' values, so random ones tell what a step costs of a model that is not at
hand. What they cannot tell is how many drafted tokens are accepted: see `drawn_verdicts`.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from ..config import TreeConfig
from ..drafter.buffered import BufferedDrafter
from ..drafter.config import MAX_NEW_TOKENS
from ..generation.decoder import DeviceDecoder
from ..kernels.choose_tokens import ChoiceRules
from ..kernels.launch import SharedPacking
from ..target.device_buffers import KVCache
from ..target.fused import FusedTarget
from .problem import MODELS, Dims, first_rows, random_head
from .timing import synchronize, time_queued_us

LAYERS = {"smollm2-135m": 30, "llama-3.2-1b": 16, "llama-3.1-8b": 32, "qwen3-8b": 36}
TIED = ("smollm2-135m", "llama-3.2-1b")
PEAKED = 12.0
"""Gain of a random LM head whose distributions are as peaked as a trained one's: trees then reach their depth."""


def random_target(name: str, dims: Dims, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """Build a random Llama or Qwen3 of these dimensions on the device."""
    import transformers

    kind = "Qwen3" if name.startswith("qwen3") else "Llama"
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=dims.vocab, hidden_size=dims.hidden, intermediate_size=dims.intermediate,
        num_hidden_layers=LAYERS[name], num_attention_heads=dims.heads, num_key_value_heads=dims.kv_heads,
        head_dim=dims.head_dim, max_position_embeddings=131072, tie_word_embeddings=name in TIED,
    )  # fmt: skip
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            model: nn.Module = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    finally:
        torch.set_default_dtype(before)
    return model


def default_taps(name: str) -> tuple[int, int, int]:
    """Layers whose inputs an EAGLE-3 head reads, as its training code chooses them."""
    return (2, LAYERS[name] // 2, LAYERS[name] - 3)


def weight_bytes(name: str, model: nn.Module) -> int:
    """Bytes of weights that a pass reads: all but the embedding's, unless it is the LM head too."""
    matrices = sum(p.numel() * p.element_size() for key, p in model.named_parameters() if "embed_tokens" not in key)
    embedding: torch.Tensor = model.get_input_embeddings().weight  # type: ignore[operator]
    return matrices + (embedding.numel() * embedding.element_size() if name in TIED else 0)


class RandomModel:
    """A random target and a random head over its whole vocabulary; decoders over them share every weight.

    ``name``: one of `LAYERS`.
    """

    def __init__(self, name: str, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> None:
        self.name, self.dims = name, MODELS[name]
        self.model = random_target(name, self.dims, dtype, device)
        self.target = FusedTarget(self.model, default_taps(name))
        self.head = random_head(self.dims, device, dtype, lm_head_gain=PEAKED)
        self._packings: dict[int, SharedPacking] = {}

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a pass of the target reads."""
        return weight_bytes(self.name, self.model)

    def kv_bytes(self, rows: int) -> int:
        """Bytes of the target's keys and values of ``rows`` tokens."""
        target = self.target
        return 2 * rows * target.num_layers * target.num_kv_heads * target.head_dim * target.dtype.itemsize

    def new_cache(self, num_slots: int, capacity: int) -> KVCache:
        """Allocate a cache of random keys and values, as if every row had been written."""
        cache = KVCache(self.target, num_slots, capacity)
        cache.keys.normal_()
        cache.values.normal_()
        self.target.reserve_positions(capacity + MAX_NEW_TOKENS)
        return cache

    def decoder(self, cache: KVCache, tree: TreeConfig | None, draft_vocab: int = 0) -> DeviceDecoder:
        """Build a decoder over the whole cache that drafts over the first ``draft_vocab`` rows; plain without a tree.

        Packed weights are kept for the next decoder over as many rows.
        """
        if tree is None:
            return DeviceDecoder(self.target, cache, None, cache.num_slots)
        head, packing, backend = first_rows(self.head, draft_vocab), None, "reference"
        if self.target.device.type == "cuda":
            packing, backend = self._packings.setdefault(draft_vocab, SharedPacking(head)), "triton"
        drafter = BufferedDrafter(head, tree, cache.num_slots, cache.capacity, backend, packing)
        drafter.bufs.keys.normal_()
        drafter.bufs.values.normal_()
        return DeviceDecoder(self.target, cache, drafter, cache.num_slots)


def fill(decoder: DeviceDecoder, num_active: int, prefix: int) -> None:
    """Pretend that ``num_active`` sequences of ``prefix`` tokens are running, without an end in sight."""
    decoder.clear_()
    state = decoder.state
    state.lengths[:num_active] = prefix
    state.num_new[:num_active] = 1
    state.prefix[:num_active] = prefix - 1
    state.new_tokens[:num_active, 0] = 7
    state.max_generated.fill_(1 << 30)
    state.running[:num_active] = 1
    decoder.ops.list_active(state)


def phase_times(
    decoder: DeviceDecoder,
    num_active: int,
    prefix: int,
    rules: ChoiceRules,
    rounds: int = 10,
    times: int = 4,
    is_whole: bool = False,
) -> dict[str, float]:
    """Milliseconds of each phase where it stands, and of whole steps: medians of means of ``times`` replays in a row.

    ``is_whole``: of whole steps alone.

    A phase can be repeated: only the walk moves on, by a few rows a time, and no phase depends much on that.
    """
    device = decoder.target.device
    fill(decoder, num_active, prefix)
    row = {}
    for name, run in () if is_whole else decoder.timed_step(num_active, rules):
        run()
        row[f"{name}_ms"] = statistics.median(time_queued_us(run, device, times) for _ in range(rounds)) / 1e3
    samples = []
    for _ in range(rounds):
        fill(decoder, num_active, prefix)
        samples.append(time_queued_us(partial(decoder.step, num_active, rules), device, times))
    return row | {"step_ms": statistics.median(samples) / 1e3}


@dataclass(frozen=True)
class StepsRun:
    """What a run of steps took, by the wall clock, and the tokens that all sequences together gained."""

    seconds: float
    steps: int
    passes: int
    """Steps times sequences."""
    tokens: int

    @property
    def step_ms(self) -> float:
        """Milliseconds a step."""
        return self.seconds * 1e3 / self.steps

    @property
    def accepted_length(self) -> float:
        """Tokens of a sequence in a step."""
        return self.tokens / self.passes

    @property
    def tokens_per_s(self) -> float:
        """Tokens of all sequences."""
        return self.tokens / self.seconds


def run_steps(decoder: DeviceDecoder, num_active: int, steps: int) -> StepsRun:
    """Run greedy steps as `generation.device_loop` does: the host reads each step's record while the next one runs."""
    record, device, rules = decoder.state.record, decoder.target.device, ChoiceRules()
    # One for each step: none is read before its copy is done, or overwritten before it is read.
    values = torch.empty((steps, *record.shape), dtype=record.dtype, pin_memory=record.is_cuda)
    ready: list[torch.cuda.Event] = []
    tokens = 0
    synchronize(device)
    start = time.perf_counter()
    for step in range(steps + 1):
        if step < steps:
            decoder.step(num_active, rules)
            values[step].copy_(record, non_blocking=True)
            if record.is_cuda:
                ready.append(torch.cuda.Event())
                ready[-1].record()
        if step > 0:
            if record.is_cuda:
                ready[step - 1].synchronize()
            tokens += sum(row[0] for row in values[step - 1].tolist()[:-1])
    synchronize(device)
    return StepsRun(time.perf_counter() - start, steps, steps * num_active, tokens)
