"""The part of upstream's generation loop after a draft, run by the kernels of a step.

`eagenerate` and `ea_generate` stay upstream's own code. In this one model three of the functions of
``eagle/model/utils.py`` that they call are bound to others:

* ``tree_decoding``: the fused forward over the tree in upstream's KV cache (`forward`), or the base model's own; both
  without gathering the logits of every path ([leaves, depth, vocabulary]);
* ``evaluate_posterior``: the target's choice at every node, greedy or sampled, and the walk down the tree;
* ``update_inference_inputs``: keys, values and features of the path move, the next draft starts after them on the
  device, and only then the host waits for the accepted tokens, once a pass.

Sampled, a node's choice is drawn from the target's own distribution, and the walk goes on where it is a drafted child,
each with the probability with which upstream accepts it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from ..drafter.buffers import INPUTS, Buffers
from ..drafter.drafter import reset_barrier, timed_out
from ..errors import UnsupportedModelError, UsageError
from ..ops import Ops, current
from ..settings import TreeConfig
from ..step.kernels.acceptance import commit_features, commit_kv, walk
from ..step.kernels.choice_kernels import ChoiceRules, ChoiceState
from ..step.kernels.choose_tokens import choice_scratch, choose_tokens, no_distribution
from ..step.kernels.slot_state import ENDED_BY_FAULT, RECORD_HEAD, SlotState
from ..target.watch import Watch
from ..tree import Trees
from .drafting import LayerPatch, on_buffers
from .forward import TreeForward, take_forward
from .reading import KNOWN_TO_WORK
from .rebind import rebind

_LOOPS = ("eagenerate", "ea_generate")
_REPLACED = ("tree_decoding", "evaluate_posterior", "update_inference_inputs")
_STEP = "_eagle_slim_step"
_NO_END = 1 << 30


class _Tensors:
    def __init__(self, bufs: Buffers, tree: TreeConfig, vocab: int) -> None:
        device, nodes = bufs.keys.device, tree.total_tokens
        shared = {name: getattr(bufs, name) for name in INPUTS}
        # Shared afterwards, as allocating empties the slots: this one is in the middle of its sequence.
        self.bufs, self.state = bufs, SlotState.allocate(1, 1, device, tree.new_tokens_width)._replace(**shared)
        self.state.max_generated.fill_(_NO_END)
        self.trees = Trees(
            self.state.active_slots, self.state.active_count, bufs.draft_tokens, bufs.parents, bufs.tree_position_ids
        )
        # A key for every depth of a tree, drawn again for each tree.
        self.choice = ChoiceState.allocate(1, tree.path_width, vocab, device)
        self.choices = torch.zeros((1, nodes), dtype=torch.int32, device=device)
        self.scratch = choice_scratch(1, nodes, vocab, device)
        self.first_row = torch.zeros(1, dtype=torch.int32, device=device)
        self.record = torch.empty(self.state.record.shape, dtype=torch.int32, pin_memory=device.type == "cuda")


class StepPatch:
    """The step of one `EaModel`. Raises as `take_forward`, and `UnsupportedModelError` where it cannot be replaced."""

    def __init__(self, model: Any, layer_patch: LayerPatch, target_backend: str = "auto") -> None:
        self.model, self.layer_patch = model, layer_patch
        for name in _LOOPS:
            _check_loop(type(model), name)
        self._device = layer_patch.head.device
        self.ops = Ops(layer_patch.spec.backend == "triton" or self._device.type == "cuda")
        self._asked = target_backend
        self._take_base_model()
        self._tensors: _Tensors | None = None

    def _take_base_model(self) -> None:
        self.backend, self._target = take_forward(self._asked, self.model, self.ops)
        self._forward: TreeForward | None = None
        # Packing has made views of some weights: looked at afterwards. What upstream's loops set is no change.
        self._watch = Watch(self.model.base_model, ("tree_mask", "tree_mode"))

    def apply(self) -> None:
        """Generate with the step's kernels from now on."""
        loops = {name: self._loop(type(self.model), name) for name in _LOOPS}
        rebind(self.model, {**loops, _STEP: self})

    def _loop(self, model_class: type, name: str) -> Callable[..., Any]:
        original = getattr(model_class, name)
        plain = inspect.unwrap(original)
        replaced = {name: getattr(self, name) for name in _REPLACED}

        @functools.wraps(original)
        def loop(*args: Any, **options: Any) -> Any:
            if args[0].ea_layer is not self.layer_patch.layer:
                raise UsageError(
                    "The model's ea_layer was replaced after it was patched: put the old one back, unpatch, and patch."
                )
            if self._watch.has_changed():
                self._take_base_model()
            # Upstream's globals as they are at the call, so that what others change there counts.
            function = FunctionType(
                plain.__code__, {**plain.__globals__, **replaced}, plain.__name__, plain.__defaults__, plain.__closure__
            )
            function.__kwdefaults__ = plain.__kwdefaults__
            return torch.no_grad()(function)(*args, **options)

        return loop

    def tree_decoding(
        self,
        model: Any,
        tree_candidates: Tensor,
        past_key_values: Any,
        tree_position_ids: Tensor,
        input_ids: Tensor,
        retrieve_indices: Tensor,
    ) -> tuple[Tensor, Tensor, Any]:
        """Run the target over the tree: logits [1, nodes, vocab], features [1, nodes, width], upstream's outputs."""
        drafting = self.layer_patch
        with on_buffers(self._device):
            # The next draft's pairs, so that nothing has to grow between the walk and that draft.
            drafting.reserve(drafting.length + drafting.tree.path_width)
            if self._tensors is None or self._tensors.bufs is not drafting.bufs:
                self._tensors = _Tensors(drafting.bufs, drafting.tree, model.base_model.lm_head.weight.shape[0])
                self._forward = None
            tensors = self._tensors
            tensors.state.lengths.fill_(input_ids.shape[1])
            if self._target is not None:
                (data,) = model.past_key_values_data
                if self._forward is None or self._forward.data is not data:
                    state = tensors.state
                    self._forward = TreeForward(self._target, data, drafting.tree, tensors.trees, state.lengths)
        if self._forward is not None:
            # What upstream allocated may be a tensor of inference mode.
            with torch.inference_mode(), current(self._device):
                self._forward.run()
            return self._forward.logits[None], self._forward.features[None], None
        positions = (tree_position_ids + input_ids.shape[1])[None]
        outputs, logits, features = model(
            tree_candidates, output_orig=True, past_key_values=past_key_values, position_ids=positions
        )
        if self.layer_patch.kind == "eagle3":
            features = torch.cat(list(outputs["hidden_states"]), -1)
        return logits, features, outputs

    def evaluate_posterior(self, logits: Tensor, candidates: Tensor, logits_processor: Any) -> tuple[None, None, None]:
        """Accept a path into the state, where `update_inference_inputs` finds it; ``logits`` [1, nodes, vocab]."""
        tensors, rules, scores = self._tensors, ChoiceRules(sampled=logits_processor is not None), logits[0]
        assert tensors is not None
        with on_buffers(self._device):
            if rules.sampled:
                scores = logits_processor(None, scores)
                tensors.choice.keys.random_()
            self.ops(choose_tokens)(
                scores.contiguous(), tensors.trees, rules, tensors.choice, tensors.choices, tensors.scratch
            )
            width = self.layer_patch.tree.path_width
            self.ops(walk)(tensors.choices, tensors.trees, width, tensors.state, self.layer_patch.drafter.error)
            # A token that is none must not be drafted from; its record raises when it is read.
            tensors.state.new_tokens.clamp_(min=0)
        return None, None, None

    def update_inference_inputs(
        self,
        input_ids: Tensor,
        candidates: Tensor,
        best_candidate: None,
        accept_length: None,
        retrieve_indices: Tensor,
        logits_processor: Any,
        new_token: int,
        past_key_values_data_list: list[Tensor],
        current_length_data: Tensor,
        model: Any,
        hidden_state_new: Tensor,
        sample_p: None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, int, None, Tensor]:
        """Keep the accepted path and draft the next tree: upstream's eight values."""
        drafting, tensors = self.layer_patch, self._tensors
        assert tensors is not None
        state, bufs, drafter = tensors.state, tensors.bufs, drafting.drafter
        with on_buffers(self._device):
            # Copies, as the next draft overwrites what they are made from.
            kept = bufs.draft_tokens[0, state.path[0].clamp(min=0).long()]
            newest = state.new_tokens[0].long()
        # What upstream allocated may be a tensor of inference mode.
        with torch.inference_mode(), current(self._device):
            for data in past_key_values_data_list:
                self.ops(commit_kv)(state, data[0::2], data[1::2])
            # Upstream's own forward gives another type under autocast.
            features = hidden_state_new[0].to(drafter.features.dtype)
            self.ops(commit_features)(state, features, drafting.tree.total_tokens, tensors.first_row, drafter.features)
        with on_buffers(self._device):
            tensors.record.copy_(state.record, non_blocking=True)
            done = torch.cuda.Event() if state.record.is_cuda else None
            if done is not None:
                done.record()
            drafting.launch()
            if done is not None:
                done.synchronize()
            record = tensors.record.tolist()
            if record[-1][0]:
                reset_barrier(bufs)
                raise timed_out()
            count, _, ended = record[0][:RECORD_HEAD]
            if ended == ENDED_BY_FAULT:
                raise no_distribution(record[0][RECORD_HEAD + count - 1], 0, new_token + count - 1)
            drafting.length += count
            input_ids = torch.cat((input_ids, kept[None, :count]), -1)
            tree = (bufs.draft_tokens, bufs.retrieve_indices[0], bufs.tree_mask, bufs.tree_position_ids[0])
            tokens, paths, mask, positions = (field.clone() for field in tree)
        with torch.inference_mode():
            current_length_data.fill_(input_ids.shape[1])
        token = newest[count - 1 : count][None]
        return input_ids, tokens, paths, mask, positions, new_token + count, None, token


def step_of(model: object) -> StepPatch | None:
    """Return the step that was applied to a model last and not removed."""
    step: StepPatch | None = getattr(type(model), _STEP, None)
    return step


def _check_loop(model_class: type, name: str) -> None:
    loop: Any = getattr(model_class, name, None)
    code = getattr(inspect.unwrap(loop), "__code__", None)
    missing = [called for called in _REPLACED if code is None or called not in code.co_names]
    if missing:
        problem = f"{model_class.__name__}.{name} does not call {missing[0]}, which this replaces"
        advice = "patch_ea_model_with_triton_drafter replaces the drafter alone."
        raise UnsupportedModelError(f"{problem}. {KNOWN_TO_WORK} {advice}")
