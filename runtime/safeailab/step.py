"""What upstream's generation loop does after a draft, by the kernels of a step.

`eagenerate` and `ea_generate` stay upstream's own code. They are run with other bindings for three of the functions of
``eagle/model/utils.py`` that they call, in this one model alone:

* ``tree_decoding``: the same forward, without gathering the logits of every path ([leaves, depth, vocabulary]);
* ``evaluate_posterior``: greedy, the target's choice at every node and the walk down the tree, two kernels; sampled,
  upstream's own function;
* ``update_inference_inputs``: keys, values and features of the path move by one kernel each, the next draft starts
  after them on the device, and only then the host waits for the accepted tokens.

The attention mask of a tree, which the base model makes anew at every forward, is written by one kernel.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from ..drafter.buffers import Buffers
from ..drafter.launch import timed_out
from ..errors import UnsupportedModelError, UsageError
from ..ops import Ops, current
from ..step.kernels.acceptance import RECORD_HEAD, SlotState, commit_features, commit_kv, walk
from ..step.kernels.choice_kernels import ChoiceRules, ChoiceScratch, ChoiceState
from ..step.kernels.choose_tokens import choice_scratch, choose_tokens
from ..tree import Trees, sort_paths
from .drafting import LayerPatch
from .kernels.tree_bias import tree_bias
from .rebind import rebind, restore
from .session import Session

LOOPS = ("eagenerate", "ea_generate")
_REPLACED = ("tree_decoding", "evaluate_posterior", "update_inference_inputs")
_STEP = "_eagle_slim_step"
_NO_END = 1 << 30
_SHARED = ("new_tokens", "num_new", "prefix", "active_slots", "active_inverse", "active_count")


@dataclass(frozen=True)
class _Tensors:
    """What a step works in, beside the drafter's buffers, of which it shares the inputs."""

    bufs: Buffers
    state: SlotState
    choice: ChoiceState
    choices: Tensor
    scratch: ChoiceScratch
    first_row: Tensor
    record: Tensor
    """The state's record on the host, in pinned memory where there is a GPU."""

    @classmethod
    def over(cls, bufs: Buffers, nodes: int, vocab: int) -> _Tensors:
        device = bufs.keys.device
        shared = {name: getattr(bufs, name) for name in _SHARED}
        before = {name: tensor.clone() for name, tensor in shared.items()}
        state = SlotState.allocate(1, 1, device, bufs.new_tokens.shape[1], **shared)
        # Allocating empties the slots; here one is in the middle of its sequence.
        for name, tensor in before.items():
            shared[name].copy_(tensor)
        state.max_generated.fill_(_NO_END)
        return cls(
            bufs, state, ChoiceState.allocate(1, 1, vocab, device),
            torch.zeros((1, nodes), dtype=torch.int32, device=device),
            choice_scratch(1, nodes, vocab, device),
            torch.zeros(1, dtype=torch.int32, device=device),
            torch.empty(state.record.shape, dtype=torch.int32, pin_memory=device.type == "cuda"),
        )  # fmt: skip


class StepPatch:
    """The step of one `EaModel`; its ``layer_patch`` drafts from buffers.

    Raises `UnsupportedModelError` for a model whose loops do not call what is replaced.
    """

    def __init__(self, model: Any, layer_patch: LayerPatch) -> None:
        self.model, self.layer_patch = model, layer_patch
        self.decoder = model.base_model.model
        self._tensors: _Tensors | None = None
        self._retrieve_indices: Tensor | None = None
        self._evaluate: Callable[..., Any] | None = None
        """Upstream's ``evaluate_posterior``."""
        session = layer_patch.session
        self.ops = Ops(session.backend == "triton")
        for name in LOOPS:
            _check_loop(type(model), name)
        self._mask_method = _mask_method(self.decoder)

    def apply(self) -> None:
        """Generate with the step's kernels from now on."""
        loops = {name: self._loop(type(self.model), name) for name in LOOPS}
        rebind(self.model, {**loops, _STEP: self})
        rebind(self.decoder, _masks_by(self.ops(tree_bias), *self._mask_method))

    def remove(self) -> None:
        """Leave the model as it was before `apply`."""
        restore(self.decoder)
        restore(self.model)

    def _loop(self, model_class: type, name: str) -> Callable[..., Any]:
        original = getattr(model_class, name)
        plain = inspect.unwrap(original)
        replaced = {name: getattr(self, name) for name in _REPLACED}

        @functools.wraps(original)
        def loop(*args: Any, **options: Any) -> Any:
            if args[0].ea_layer is not self.layer_patch.layer:
                raise UsageError(
                    "The model's ea_layer was replaced after it was patched. Put the old one back, unpatch, replace "
                    "it, and patch again.",
                    option="model",
                )
            self._evaluate = plain.__globals__["evaluate_posterior"]
            # Upstream's globals as they are at the call, so that what others change there counts.
            function = FunctionType(
                plain.__code__, {**plain.__globals__, **replaced}, plain.__name__, plain.__defaults__, plain.__closure__
            )
            function.__kwdefaults__ = plain.__kwdefaults__
            return torch.no_grad()(function)(*args, **options)

        return loop

    @property
    def session(self) -> Session:
        """The sequence being drafted for."""
        return self.layer_patch.session

    def tree_decoding(
        self, model: Any, tree_candidates: Tensor, past_key_values: Any, tree_position_ids: Tensor, input_ids: Tensor,
        retrieve_indices: Tensor,
    ) -> tuple[Tensor, Tensor, Any]:  # fmt: skip
        """Run the target over the tree: logits [1, nodes, vocab], features [1, nodes, width], its outputs."""
        positions = (tree_position_ids + input_ids.shape[1])[None]
        outputs, logits, features = model(
            tree_candidates, output_orig=True, past_key_values=past_key_values, position_ids=positions
        )
        if self.layer_patch.kind == "eagle3":
            features = torch.cat(list(outputs["hidden_states"]), -1)
        self._retrieve_indices = retrieve_indices
        session = self.session
        with self._buffers():
            # The next draft's pairs, so that nothing has to grow between the walk and that draft.
            session.reserve(session.length + session.tree.path_width)
            tensors = self._current(logits.shape[-1])
            tensors.state.lengths.fill_(input_ids.shape[1])
        return logits, features, outputs

    @contextmanager
    def _buffers(self) -> Iterator[None]:
        """Work on buffers: ones made in inference mode could not be written to outside it."""
        with torch.inference_mode(False), torch.no_grad(), current(self.session.head.device):
            yield

    def _current(self, vocab: int) -> _Tensors:
        """Return the tensors over the drafter's buffers as they are now."""
        bufs = self.session.bufs
        if self._tensors is None or self._tensors.bufs is not bufs:
            self._tensors = _Tensors.over(bufs, self.session.tree.total_tokens, vocab)
        return self._tensors

    def evaluate_posterior(
        self, logits: Tensor, candidates: Tensor, logits_processor: Any
    ) -> tuple[Tensor, int | None, Tensor | None]:
        """Accept a path into the state.

        Returns what `update_inference_inputs` takes: the path's nodes int32 [width]; when sampling, also how many there
        are and the probabilities of the next token, float [vocab].
        """
        with self._buffers():
            tensors = self._current(logits.shape[-1])
            if logits_processor is None:
                self._accept_greedy(tensors, logits[0])
                return tensors.state.path[0], None, None
            assert self._evaluate is not None
            assert self._retrieve_indices is not None
            by_path = logits[0, self._retrieve_indices]
            best, accepted, probabilities = self._evaluate(by_path, candidates, logits_processor)
            count, path = int(accepted) + 1, tensors.state.path[0]
            path.fill_(-1)
            path[:count] = self._retrieve_indices[int(best), :count]
            return path, count, probabilities

    def _accept_greedy(self, tensors: _Tensors, logits: Tensor) -> None:
        bufs, state = tensors.bufs, tensors.state
        trees = Trees(
            state.active_slots, state.active_count, bufs.draft_tokens, bufs.parents, bufs.tree_position_ids
        )  # fmt: skip
        self.ops(choose_tokens)(
            logits.contiguous(), trees, ChoiceRules(), tensors.choice, tensors.choices, tensors.scratch
        )
        self.ops(walk)(tensors.choices, trees, self.session.tree.path_width, state, self.session.drafter.error)

    def update_inference_inputs(
        self, input_ids: Tensor, candidates: Tensor, best_candidate: Tensor, accept_length: int | None,
        retrieve_indices: Tensor, logits_processor: Any, new_token: int, past_key_values_data_list: list[Tensor],
        current_length_data: Tensor, model: Any, hidden_state_new: Tensor, sample_p: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, int, None, Tensor]:  # fmt: skip
        """Keep the accepted path and draft the next tree: upstream's eight values."""
        session, tensors = self.session, self._tensors
        assert tensors is not None
        state, bufs, drafter = tensors.state, tensors.bufs, session.drafter
        sampled = None
        with self._buffers():
            if sample_p is not None:
                assert accept_length is not None
                sampled = torch.multinomial(sample_p, 1)
                self._write_path(tensors, accept_length, sampled)
            # Copies, as the next draft overwrites what they are made from.
            kept = bufs.draft_tokens[0, state.path[0].clamp(min=0).long()]
            newest = state.new_tokens[0].long()
        # What upstream allocated may be a tensor of inference mode.
        with torch.inference_mode(), current(bufs.keys.device):
            for data in past_key_values_data_list:
                self.ops(commit_kv)(state, data[0::2], data[1::2])
            self.ops(commit_features)(
                state, hidden_state_new[0], session.tree.total_tokens, tensors.first_row, drafter.features
            )
        with self._buffers():
            tensors.record.copy_(state.record, non_blocking=True)
            done = torch.cuda.Event() if state.record.is_cuda else None
            if done is not None:
                done.record()
            session.launch()
            if done is not None:
                done.synchronize()
            record = tensors.record.tolist()
            if record[-1][0]:
                raise timed_out(bufs)
            count = record[0][0]
            session.length += count
            input_ids = torch.cat((input_ids, kept[None, :count].to(input_ids.device)), -1)
            tree = (bufs.draft_tokens, bufs.retrieve_indices[0], bufs.tree_mask, bufs.tree_position_ids[0])
            tokens, paths, mask, positions = (field.clone() for field in tree)
            paths = paths if logits_processor is None else sort_paths(paths)
        with torch.inference_mode():
            current_length_data.fill_(input_ids.shape[1])
        token = newest[count - 1 : count][None]
        return input_ids, tokens, paths, mask, positions, new_token + count, None, token

    def _write_path(self, tensors: _Tensors, count: int, sampled: Tensor) -> None:
        """Write a sampled path into the state, as `acceptance.walk` does for a greedy one."""
        state, bufs = tensors.state, tensors.bufs
        nodes = state.path[0, 1:count].long()
        state.new_tokens[0, : count - 1] = bufs.draft_tokens[0, nodes].int()
        state.new_tokens[0, count - 1 : count] = sampled.int()
        state.prefix.add_(state.num_new)
        state.num_new.fill_(count)
        state.lengths.add_(count)
        state.record.zero_()
        state.record[0, :RECORD_HEAD] = torch.tensor([count, count, 0], dtype=torch.int32)
        state.record[-1, 0] = self.session.drafter.error[0]


def step_of(model: object) -> StepPatch | None:
    """Return the step that was applied to a model last and not removed."""
    step: StepPatch | None = getattr(type(model), _STEP, None)
    return step


def _check_loop(model_class: type, name: str) -> None:
    """Refuse a loop that does not call what is replaced: its text would not change, or not as a whole."""
    loop: Any = getattr(model_class, name, None)
    code = getattr(inspect.unwrap(loop), "__code__", None)
    missing = [called for called in _REPLACED if code is None or called not in code.co_names]
    if missing:
        raise UnsupportedModelError(
            f"{model_class.__name__}.{name} does not call {missing[0]}, which this replaces. docs/upstream.md names "
            "the versions of SafeAILab's EAGLE that are known to work; patch_ea_model_with_triton_drafter replaces "
            "the drafter alone.",
            method=name, missing=missing[0],
        )  # fmt: skip


def _masks_by(tree_bias: Callable[..., Tensor], name: str, original: Callable[..., Any]) -> Mapping[str, Any]:
    """Members for `rebind`: masks of whole trees by the kernel, all others by the model's own method."""

    def of_llama(
        decoder: Any, attention_mask: Tensor | None, input_shape: Any, inputs_embeds: Tensor, past_length: int
    ) -> Any:
        tree = _whole_tree(decoder, attention_mask, input_shape[-1], past_length + input_shape[-1])
        if tree is None:
            return original(decoder, attention_mask, input_shape, inputs_embeds, past_length)
        # As upstream: float32, whatever the model's type.
        return _bias(tree, attention_mask, past_length, inputs_embeds.device, torch.float32)

    def of_qwen2(decoder: Any, attention_mask: Tensor | None, **options: Any) -> Any:
        nodes, keys = options["sequence_length"], options["target_length"]
        tree = _whole_tree(decoder, attention_mask, nodes, keys)
        if tree is None:
            return original(decoder, attention_mask, **options)
        return _bias(tree, attention_mask, keys - nodes, options["device"], options["dtype"])

    def _bias(
        tree: Tensor, attention_mask: Tensor | None, length: int, device: torch.device, dtype: torch.dtype
    ) -> Tensor:
        tree = tree.to(device)
        keys = torch.ones(length + len(tree), dtype=torch.bool, device=device)
        key_mask = keys if attention_mask is None else attention_mask[0].to(device)
        with current(device):
            return tree_bias(tree, key_mask, dtype)[None, None]

    return {name: of_qwen2 if name == _QWEN2_MASK else of_llama}


_LLAMA_MASK = "_prepare_decoder_attention_mask"
_QWEN2_MASK = "_prepare_4d_causal_attention_mask_with_cache_position"


def _mask_method(decoder: Any) -> tuple[str, Callable[..., Any]]:
    """Find where a base model makes its mask: Llama, Qwen3 and Mixtral in one method, Qwen2 in another."""
    for name in (_LLAMA_MASK, _QWEN2_MASK):
        if hasattr(type(decoder), name):
            return name, inspect.getattr_static(type(decoder), name)
    raise UnsupportedModelError(
        f"{type(decoder).__name__} makes its attention mask neither in {_LLAMA_MASK} nor in {_QWEN2_MASK}. "
        "patch_ea_model_with_triton_drafter replaces the drafter alone.",
        method=_LLAMA_MASK, found=type(decoder).__name__,
    )  # fmt: skip


def _whole_tree(decoder: Any, attention_mask: Tensor | None, nodes: int, keys: int) -> Tensor | None:
    """Return the tree's mask [nodes, nodes] if the forward is over one whole tree of one sequence."""
    mask = getattr(decoder, "tree_mask", None)
    if mask is None or mask.shape[0] != 1 or mask.shape[-1] != nodes:
        return None
    if attention_mask is not None and attention_mask.shape != (1, keys):
        return None
    tree: Tensor = mask[0, 0]
    return tree
