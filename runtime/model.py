"""`SpeculativeModel`: a target and its draft head, generating together.

    model = SpeculativeModel.from_pretrained("meta-llama/Llama-3.1-8B-Instruct", head="out/slim", draft_vocab=16000)
    output = model.chat("Why is the sky blue?", max_new_tokens=100)
    print(output.text[0], output.stats.mean_accepted_length)

Output is the target's own: greedy token for token, sampled in distribution and, for a seed, the same tokens that plain
decoding with that seed gives. Both are exact where the target is fused, on a GPU; in fp32 elsewhere but for ties within
its last bits; in other types a near-tie can round differently. `GenerationStats.exactness` says which of these holds.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from eagle_slim.convert.heads.artifact import Artifact
from eagle_slim.convert.heads.config import default_window, sliding_window
from eagle_slim.convert.heads.draft_head import DraftHead
from eagle_slim.vocab_tools.vocabulary import DraftVocab
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers.generation.streamers import BaseStreamer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from .api.options import read_call, read_count, read_tokenizer
from .api.output import DictOutput, GenerationOutput, RowsOutput, join_sequences
from .api.prompts import Messages, Prompts, encode_conversation
from .api.request import Request, collect
from .drafter.drafter import (
    NAMES,
    Drafter,
    check_computable,
    check_draft_weights,
    check_drafter,
    check_tree_fits,
    choose_drafter,
)
from .drafter.launch import DraftFunction
from .drafter.weights import gather_lm_head_rows, load_head_weights
from .errors import AcceptanceWarning, UsageError, misfit
from .opening.heads import OpenedHead, open_head
from .opening.pairing import check_pairing, check_tokenizers, check_vocabulary, resolve_tap_layers
from .opening.targets import OpenedTarget, open_target, read_place
from .ops import current, garbage_kept
from .settings import TreeConfig, check_tree, explain_unknown
from .step.decoders import Decoders
from .step.graphs import WarmUp
from .step.loop import GenerationLoop
from .step.plan import DEFAULT_MAX_SLOTS, CallRules, Plan, Source, describe, plan_call, plan_service
from .target.wrapper import TargetModel

# Enough passes that a working head cannot stay this low by chance, few enough to warn within one answer.
_WARN_AFTER_PASSES = 32
_WARN_BELOW = 1.05
_TREE = "Give the tree's shape as tree=TreeConfig(depth=5, top_k=10, total_tokens=60)."
_HEAD = "Give it to open_head, and what that returns as head."
_FOLLOW = "It was removed. Draft over 16,000 rows instead (draft_vocab), which gains as much."
_MOVED = {
    **dict.fromkeys(("depth", "top_k", "total_tokens"), _TREE),
    **dict.fromkeys(("tap_layers", "d2t_form"), _HEAD),
    **dict.fromkeys(("follow", "follow_rows"), _FOLLOW),
    "target_backend": "Give it to open_target, and what that returns as target.",
}
"""Options of other functions now, and what to write instead."""

# A pipeline of transformers logs an error for a class that is not among these. No configuration has this key.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["eagle_slim"] = "SpeculativeModel"


class SpeculativeModel:
    """A target with a drafter. Build it with `from_pretrained`, or from parts that are loaded already."""

    # A pipeline of transformers prints them.
    input_modalities = output_modalities = ("text",)

    def __init__(
        self,
        target: TargetModel,
        drafter: Drafter,
        tokenizer: Any | None = None,
        max_model_len: int | None = None,
        opened: OpenedHead | None = None,
        tokenizer_hash: str | None = None,
        is_tree_sized: bool = False,
    ) -> None:
        self.target, self.drafter, self.tokenizer, self.opened = target, drafter, tokenizer, opened
        self.tokenizer_hash = tokenizer_hash
        if max_model_len is not None:
            read_count("max_model_len", max_model_len, 1)
        limits = [limit for limit in (target.max_positions, max_model_len) if limit is not None]
        self.max_model_len = min(limits, default=None)
        self.is_tree_sized = is_tree_sized
        """Whether steps choose trees up to the drafter's (`step.shapes`); else every step has that."""
        self._decoders = Decoders(target, drafter)
        self._num_drafts, self._num_accepted, self._has_warned = 0, 0, False
        """Passes over drafts of calls that were too short to tell whether the head works, and their tokens."""

    @classmethod
    @explain_unknown(_MOVED)
    def from_pretrained(
        cls,
        target: str | Path | nn.Module | OpenedTarget | None = None,
        head: str | Path | DraftHead | Artifact | OpenedHead | None = None,
        *,
        draft_vocab: int | DraftVocab | None = None,
        tree: TreeConfig | None = None,
        dtype: torch.dtype | str = "auto",
        device: torch.device | str | None = None,
        drafter: str | DraftFunction = "auto",
        draft_weights: str = "auto",
        target_weights: str = "auto",
        tokenizer: Any | None = None,
        max_model_len: int | None = None,
        draft_window: int | None = None,
        revision: str | None = None,
        head_revision: str | None = None,
        offline: bool = False,
    ) -> SpeculativeModel:
        """Load a head with its target: `open_head`, `open_target` and `pair`.

        Args:
            target: as in `open_target`, or what that returned; None takes the one that the head names.
            head: as in `open_head`, or what that returned.
            draft_vocab, tree, drafter, draft_weights, max_model_len, draft_window: as in `pair`.
            dtype: of target and drafter; "auto" is that of the target's files, but float32 on a CPU without
                instructions for it (`dtype_on_cpu`).
            device: None is the first GPU, else the CPU.
            target_weights: "fp8" quantises the matrices of the decoder layers while they are loaded, one scale a row
                (`target.fp8_loading`): half the bytes, and the output of the quantised model; from sm_89 on. "auto"
                leaves them as the files have them: a checkpoint published in FP8 is loaded in FP8.
            tokenizer: only needed with a loaded model: for text prompts, stop strings and text output.
            revision, head_revision: of the Hub repositories of target and head.
            offline: use only what is on this machine, for what is not opened yet.

        Raises as `open_head`, `open_target` and `pair` do; `PairingError` before weights are loaded.
        """
        if isinstance(target, OpenedTarget):
            given = {"dtype": dtype != "auto", "device": device is not None, "target_weights": target_weights != "auto"}
            given |= {"revision": revision is not None, "offline": offline and not target.offline}
            if names := ", ".join(name for name, is_given in given.items() if is_given):
                raise UsageError(f"The target is opened already. Give {names} to open_target instead.")
            place, wanted = target.device, target.dtype
        else:
            place, wanted = read_place(target, dtype, device, target_weights)
        check_drafter(drafter, place)
        check_draft_weights(draft_weights, drafter, place, wanted)
        if isinstance(head, OpenedHead) and head_revision is not None:
            raise UsageError("The head is opened already. Give its revision to open_head instead of head_revision.")
        opened = head if isinstance(head, OpenedHead) else open_head(head, revision=head_revision, offline=offline)
        if not isinstance(target, OpenedTarget):
            location = opened.target_location(revision) if target is None else target
            found = open_target(
                location, dtype=dtype, device=device, target_weights=target_weights, revision=revision, offline=offline
            )
            target = replace(found, name=opened.target_name) if target is None else found
        return pair(
            target,
            opened,
            draft_vocab=draft_vocab,
            tree=tree,
            drafter=drafter,
            draft_weights=draft_weights,
            tokenizer=tokenizer,
            max_model_len=max_model_len,
            draft_window=draft_window,
        )

    def with_draft_vocab(self, draft_vocab: int | DraftVocab | None) -> SpeculativeModel:
        """Return a model over another draft vocabulary; target, tokenizer and the head's other weights are shared.

        The kernel's packed weights are too, where the vocabulary is the first part, by rank, of what was packed. Raises
        `UsageError` as `choose_draft_ids` does, and for a model that was not built by `from_pretrained`; `PairingError`
        for a vocabulary of another tokenizer.
        """
        if self.opened is None:
            raise UsageError("with_draft_vocab needs the opened head: build the model with from_pretrained.")
        check_vocabulary(draft_vocab, self.tokenizer_hash, type(self.target.model).__name__)
        weights, ids = self.drafter.weights, self.opened.choose(draft_vocab)
        rows = gather_lm_head_rows(self.opened.head, self.target, ids)
        other = replace(weights, lm_head=rows, draft_to_target=torch.from_numpy(ids).to(weights.device))
        order = _rank_rows(self.opened, ids, draft_vocab, weights.device)
        return self._with_drafter(self.drafter.like(other, self.drafter.tree, order), self.is_tree_sized)

    def with_tree(self, tree: TreeConfig | None) -> SpeculativeModel:
        """Return a model that drafts trees of another shape; None: each step chooses one up to this model's.

        Everything loaded is shared. Raises `UsageError` for a tree that needs more rows than the draft vocabulary has.
        """
        if tree is None:
            return self._with_drafter(self.drafter, is_tree_sized=True)
        shaped = self.drafter.like(self.drafter.weights, check_tree(tree))
        return self._with_drafter(shaped, is_tree_sized=False)

    def with_draft_window(self, draft_window: int | None) -> SpeculativeModel:
        """Return a model whose drafts look back on other tokens, as in `pair`; everything loaded is shared.

        Raises `UsageError` for a number below 0.
        """
        own = None if self.opened is None else sliding_window(self.opened.head.config)
        weights = self.drafter.weights.with_window(self._window_of(draft_window), own)
        return self._with_drafter(self.drafter.like(weights, self.drafter.tree), self.is_tree_sized)

    def _window_of(self, draft_window: int | None) -> int | None:
        if draft_window is not None:
            return read_count("draft_window", draft_window, 0) or None
        return None if self.opened is None else default_window(self.opened.head.config, self.target.max_positions)

    def with_drafter(self, drafter: str | DraftFunction, draft_weights: str = "auto") -> SpeculativeModel:
        """Return a model with another drafter, as in `from_pretrained`; everything loaded is shared.

        ``draft_weights`` "auto" leaves weights in FP8 as they are. Raises as `choose_drafter`.
        """
        weights, current = self.drafter.weights, self.drafter
        if draft_weights == "auto" and self.draft_weights == "fp8":
            draft_weights = "fp8"
        order = None if current.packing is None else current.packing.order
        built = choose_drafter(drafter, weights, current.tree, draft_weights, order)
        if built.packing is not None and current.packing is not None and built.stored_dtype == current.stored_dtype:
            built = replace(built, packing=current.packing)
        return self._with_drafter(built, self.is_tree_sized)

    def _with_drafter(self, drafter: Drafter, is_tree_sized: bool) -> SpeculativeModel:
        return SpeculativeModel(
            self.target, drafter, self.tokenizer, self.max_model_len, self.opened, self.tokenizer_hash, is_tree_sized
        )

    def __repr__(self) -> str:
        head = "loaded weights" if self.opened is None else self.opened.head.location
        vocab = f"{self.draft_vocab:,} of {self.target.vocab_size:,} ids"
        target = f"{type(self.target.model).__name__} in {str(self.dtype)[6:]} on {self.device}"
        return f"{type(self).__name__}(target: {target}; head: {head}; draft vocabulary: {vocab}; {self.drafting})"

    def can_generate(self) -> bool:
        """Return True, for a pipeline of transformers."""
        return True

    @property
    def hf_device_map(self) -> dict[str, torch.device]:
        """Device of the target, so that a pipeline leaves it there."""
        return {"": self.device}

    @property
    def draft_weights(self) -> str:
        """Type in which the drafter stores the head's matrices: "bf16", "fp16", "fp32", "fp64" or "fp8"."""
        return NAMES[self.drafter.stored_dtype]

    @cached_property
    def drafting(self) -> str:
        """The drafter, its weights and its window in words."""
        window, words = self.draft_window, f"drafter {self.drafter.name}, {self.draft_weights} weights"
        if window is None:
            return words
        reason = "by the head's config.json" if window == self._window_of(None) else "asked for"
        return f"{words}, the last {window:,} tokens ({reason})"

    @property
    def draft_window(self) -> int | None:
        """Most tokens of the context that a draft looks back on; None for all."""
        return self.drafter.weights.sliding_window

    @property
    def device(self) -> torch.device:
        """Device of the target."""
        return self.target.device

    @property
    def dtype(self) -> torch.dtype:
        """Type of the target's weights."""
        return self.target.dtype

    @property
    def config(self) -> Any:
        """Configuration of the target."""
        return self.target.model.config

    @property
    def generation_config(self) -> Any:
        """Generation configuration of the target; None where it has none."""
        return self.target.generation_config

    @property
    def draft_vocab(self) -> int:
        """Rows that are drafted over."""
        return self.drafter.weights.draft_vocab

    @current(torch.device("cpu"))
    def generate(
        self,
        input_ids: Prompts | None = None,
        *,
        streamer: BaseStreamer | None = None,
        max_slots: int = DEFAULT_MAX_SLOTS,
        speculative: bool = True,
        reuse_prefix: bool = False,
        time_phases: bool = False,
        partial_verification: str | None = None,
        **options: Any,
    ) -> GenerationOutput:
        """Continue one prompt or many, without a chat template (`chat`). Calls from several threads take turns.

        Args:
            input_ids: token ids (tensor or array [seq] or [prompts, seq], or lists of any lengths), or text, or the
                output of a transformers tokenizer, which brings its attention mask along.
            streamer: a transformers streamer, for one prompt; its ``end`` is called where the call fails too.
            max_slots: most prompts at a time (on a GPU 16), each with KV memory of its own; the rest wait.
            speculative: False decodes plainly, one token per pass: the same output, for comparison.
            reuse_prefix: do not run tokens again that a prompt shares with a sequence of an earlier call from the
                beginning on, as the next turn of a chat does (``stats.num_reused_tokens``). The answer is the same in
                float32 and where ``stats.exactness`` says so; elsewhere a near-tie can round differently.
            time_phases: on a GPU, run a step phase by phase, a little slower: ``stats.steps`` tells them apart.
            partial_verification: for very long prompts, "exact" lets steps run ahead on a part of the KV cache and
                returns what passes over all of it confirm: the same output. "lossy" returns what runs ahead as it is.
            options: what to generate, as in transformers, each an argument or a field of ``generation_config``:

                max_new_tokens: 256 by default, or what ``max_length`` leaves (prompt, with its padding, and answer).
                do_sample, temperature, top_p, top_k, min_p: greedy unless ``do_sample`` or a temperature asks for
                    sampling, whatever the target's own generation configuration says.
                min_new_tokens, repetition_penalty, no_repeat_ngram_size, suppress_tokens, bad_words_ids, stop_strings:
                    default to the target's own generation configuration.
                eos_token_id: default the target's own; None: no end. pad_token_id: fills ``sequences``.
                    num_return_sequences, max_time (seconds), return_dict_in_generate. What follows are arguments alone.
                attention_mask: [prompts, seq] beside padded ids: 0 marks padding. Without one, the padding id marks it
                    in a tensor [prompts, seq], unless it ends sequences, too; what may be either is refused.
                seed: fixes every draw, together with the prompt's place in the call; None draws one from PyTorch's
                    generator. A list holds a seed for each prompt, whose draws depend on nothing else in the call.
                stop: strings that end an answer, wherever tokens begin and end (``stop_strings`` in transformers).
                stopping_criteria: callables asked for each prompt by itself, without padding, and with None for scores.
                logits_processor: callables of (int64 [1, seq], float32 [1, vocab]), of these alone (`api.sampling`).
                ignore_eos: True lets no id end an answer.
                tokenizer: for text and stop strings, instead of the model's own.

        Raises `PromptError` for an empty prompt, an id outside the vocabulary, or no room in the context; `UsageError`
        for options that contradict each other, are not served, or lack a tokenizer; `LogitsError` for logits that
        are no distribution; `DeviceMemoryError`.
        """
        is_streamer = hasattr(streamer, "put") and hasattr(streamer, "end") and not isinstance(streamer, type)
        if not (streamer is None or is_streamer):
            raise misfit("streamer", "a streamer of transformers, such as TextStreamer(tokenizer)", streamer)
        try:
            call = read_call(self.target, self.tokenizer, self.max_model_len, input_ids, options)
            plan = plan_call(
                self.target,
                self._decoders,
                call,
                self.is_tree_sized,
                max_slots=max_slots,
                speculative=speculative,
                reuse_prefix=reuse_prefix,
                time_phases=time_phases,
                partial_verification=partial_verification,
            )
            if streamer is not None:
                if len(call.requests) != 1:
                    raise UsageError(f"A streamer follows one prompt, got {len(call.requests)}.")
                streamer.put(torch.tensor([call.requests[0].prompt_ids]))
            for request in call.requests:
                request.streamer = streamer
                # Also where steps choose to decode plainly: tokens outside the vocabulary are still counted.
                request.head = self.drafter.weights if speculative else None
            loop = GenerationLoop(self._decoders, Source(call.requests, plan.rules), plan)
            results, stats = collect(call.requests, loop.run())
        finally:
            # Whoever reads from the streamer must not wait for ever.
            if streamer is not None:
                streamer.end()
        chosen = loop.chooser
        path = describe(plan, self.target, self._decoders, self.drafting, {} if chosen is None else chosen.steps)
        stats = replace(stats, path=path)
        if plan.is_exact:
            stats = replace(stats, exactness=self.target.exactness, is_exact=self.target.has_exact_rows)
        if chosen is not None:
            self._warn_if_nothing_is_accepted(chosen.num_drafts, chosen.num_accepted)
        elif plan.is_drafted:
            # Short answers cut off much of what is accepted, which says nothing about the head.
            self._warn_if_nothing_is_accepted(stats.num_passes, stats.num_accepted_tokens + stats.num_cut_tokens)
        kind = DictOutput if call.options.get("return_dict_in_generate") else RowsOutput
        answers = [result.token_ids for result in results]
        sequences = join_sequences(call.rows, answers, call.fill, call.device)
        return kind(sequences, tuple(results), stats, call.seed)

    def chat(self, messages: str | Messages | Sequence[Messages], **options: Any) -> GenerationOutput:
        """Answer a conversation, or a list of conversations, through the chat template.

        ``options``: those of `generate`, by name; vLLM's ``max_tokens`` and ``n`` are ``max_new_tokens`` and
        ``num_return_sequences``. ``reuse_prefix`` is the default where it changes no answer: in float32, and where rows
        are exact. Raises `UsageError` and `PromptError` as `encode_chat` and `generate` do.
        """
        is_list = isinstance(messages, Sequence) and not isinstance(messages, str) and len(messages) > 0
        is_one = not is_list or isinstance(messages[0], Mapping)
        conversations: Sequence[Any] = [messages] if is_one else messages
        renamed = {"max_tokens": "max_new_tokens", "n": "num_return_sequences"}
        keywords = {renamed.get(name, name): value for name, value in options.items()}
        if len(keywords) < len(options):
            raise UsageError("max_tokens is max_new_tokens, and n num_return_sequences: give each once.")
        keywords.setdefault("reuse_prefix", self.target.exactness is not None)
        return self.generate([self.encode_chat(each) for each in conversations], **keywords)

    def refresh(self) -> None:
        """Follow a write that moves no version counter: through ``.data``, or by a fused optimiser.

        What is derived from the target is made anew, for all models that share it. Every other change of the target is
        noticed before each call. Raises as a call after a change does.
        """
        with self.target.hold():
            self.target.refresh()

    def warmup(
        self,
        num_prompts: int = 1,
        max_length: int = 2048,
        *,
        max_slots: int = DEFAULT_MAX_SLOTS,
        speculative: bool = True,
        partial_verification: str | None = None,
        **options: Any,
    ) -> WarmUp:
        """Compile and capture, before the first prompt comes, all that calls like the one described will use.

        Args:
            num_prompts: most prompts of a call.
            max_length: most tokens of a prompt and its answer together, for which the KV cache is allocated.
            max_slots, speculative, partial_verification, options: as in `generate`; each combination of stages
                (temperature, ``top_p``, penalties, ...) has graphs of its own, which serve all values.

        On a CPU there is nothing to get ready. Trees that steps choose among are also timed, at half of ``max_length``.
        Raises `UsageError` as `generate` does.
        """
        num_prompts = read_count("num_prompts", num_prompts, 1)
        max_length = min(read_count("max_length", max_length, 2), self.max_model_len or max_length)
        half = max(1, max_length // 2)
        described = {"max_new_tokens": max_length - half, "seed": 0, **options}
        call = read_call(self.target, self.tokenizer, self.max_model_len, [[0] * half], described)
        plan = plan_call(
            self.target,
            self._decoders,
            replace(call, requests=call.requests * num_prompts),
            self.is_tree_sized,
            max_slots=max_slots,
            speculative=speculative,
            partial_verification=partial_verification,
        )
        slots, rules = min(num_prompts, plan.max_slots), plan.rules.rules
        return self._decoders.run(lambda: self._decoders.warm_up(slots, max_length, plan.shapes, rules, plan.partial))

    def read_requests(self, input_ids: Prompts, options: Mapping[str, Any]) -> list[tuple[Request, CallRules]]:
        """Read prompts and options as `generate` does, which raises the same; for a `Source` of `serve`."""
        call = read_call(self.target, self.tokenizer, self.max_model_len, input_ids, options)
        rules = CallRules.of(call.options, call.sampling, call.requests, self.target.runs.vocab_size, self.device)
        return [(request, rules) for request in call.requests]

    def plan_service(self, max_slots: int, speculative: bool = True) -> Plan:
        """Plan for requests of any rules (`serve`), and compile and capture all that they will use.

        ``max_slots``: most answers side by side, each with KV memory for ``max_model_len`` tokens.
        """
        length = self.max_model_len
        if length is None:
            raise UsageError("The model does not say how long its context is. Give max_model_len.")
        call = read_call(self.target, self.tokenizer, length, [[0]], {"max_new_tokens": length})
        call = replace(call, requests=call.requests * max_slots)
        reuse = self.target.exactness is not None
        options: dict[str, Any] = {"max_slots": max_slots, "speculative": speculative, "reuse_prefix": reuse}
        plan = plan_call(self.target, self._decoders, call, self.is_tree_sized, **options)
        plan = plan_service(plan, self.target.weight_bytes)
        for rules in plan.stages:
            self._decoders.run(partial(self._decoders.warm_up, max_slots, length, plan.shapes, rules))
        return plan

    def serve(self, source: Source, plan: Plan) -> None:
        """Answer the requests of a source by a plan of `plan_service` until none waits or runs; other calls wait.

        Raises `DeviceMemoryError`, and `DrafterError` for a defect.
        """
        GenerationLoop(self._decoders, source, plan).run()

    def describe(self, plan: Plan) -> str:
        """Describe what runs by a plan, as in `GenerationStats.path`."""
        return describe(plan, self.target, self._decoders, self.drafting, {})

    def encode_chat(self, messages: str | Messages) -> list[int]:
        """Turn a conversation (or one user message) into token ids by the chat template, or else its last message.

        Raises `UsageError` without a tokenizer, and for what is no conversation or refused by the template.
        """
        return encode_conversation(self.tokenizer, messages)

    def _warn_if_nothing_is_accepted(self, num_drafts: int, num_accepted: int) -> None:
        drafts, accepted = self._num_drafts + num_drafts, self._num_accepted + num_accepted
        is_enough = drafts >= _WARN_AFTER_PASSES
        self._num_drafts, self._num_accepted = (0, 0) if is_enough else (drafts, accepted)
        if is_enough and accepted < _WARN_BELOW * drafts and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"Hardly any token of {drafts} drafts was accepted ({accepted / drafts:.2f} tokens per pass). The "
                "output is exact all the same. Likely causes: the head was trained for another target or version of "
                f"it; its d2t_form or tap layers are wrong; a draft vocabulary of {self.draft_vocab} misses this "
                "text's tokens; or the prompts lack the chat template that the head was trained on.",
                AcceptanceWarning,
                stacklevel=4,
            )


@explain_unknown(_MOVED)
@current(torch.device("cpu"))
def pair(
    target: OpenedTarget,
    head: OpenedHead,
    *,
    draft_vocab: int | DraftVocab | None = None,
    tree: TreeConfig | None = None,
    drafter: str | DraftFunction = "auto",
    draft_weights: str = "auto",
    tokenizer: Any | None = None,
    max_model_len: int | None = None,
    draft_window: int | None = None,
) -> SpeculativeModel:
    """Check that a head and a target belong together, load their weights, and build the model.

    Warns of what the head's files leave in doubt.

    Args:
        draft_vocab: rows to draft over, without converting again, or a `DraftVocab`; None takes all.
        tree: shape of every step's tree. None: where rows are exact, steps choose between plain decoding and trees of
            up to 60 nodes, by measured times and acceptance (`step.shapes`); elsewhere sizes alone fix the tree before
            the call. For trees up to another shape, give that and call `SpeculativeModel.with_tree` with None.
        drafter: "triton" (the persistent kernel), "reference" (plain PyTorch), or a `DraftFunction` of your own; "auto"
            takes the kernel where the GPU and the head allow it.
        draft_weights: type in which the drafter stores the head's matrices: "fp8" (the kernel only, from sm_89 on: half
            the bytes, slightly other drafts), "bf16" (for a model in it), or "auto" for the model's own.
        tokenizer: instead of the target's own, or for a loaded one.
        max_model_len: most tokens of prompt and answer together; None is the model's own limit.
        draft_window: most tokens of the context that a draft looks back on, and the drafter's cache holds; 0 for all.
            None: the head's own window, or its ``max_position_embeddings`` where that is at most half the target's.

    Raises `PairingError` for what does not belong together, before weights are loaded; `TargetError` and
    `UnsupportedModelError` for a target that cannot be loaded or cannot verify trees; `UsageError` and `DrafterError`
    as `choose_draft_ids`, `choose_drafter` and `check_tree_fits`.
    """
    for name, given, kind in (("target", target, OpenedTarget), ("head", head, OpenedHead)):
        if not isinstance(given, kind):
            raise misfit(name, f"what open_{name} returns", given)
    shape = TreeConfig() if tree is None else check_tree(tree)
    if tokenizer is not None:
        read_tokenizer(tokenizer)
    if max_model_len is not None:
        read_count("max_model_len", max_model_len, 1)
    if draft_window is not None:
        read_count("draft_window", draft_window, 0)
    check_drafter(drafter, target.device)
    check_draft_weights(draft_weights, drafter, target.device, target.dtype)
    draft_ids = head.choose(draft_vocab)
    check_computable(head.head, drafter)
    check_tree_fits(len(draft_ids), shape)
    for warning in head.head.warnings:
        warnings.warn(warning, stacklevel=6)
    text_config = target.config.get_text_config()
    check_pairing(head.head, text_config, str(target))
    if target.name is not None:
        head = replace(head, target_name=target.name)
    if head.head.target_vocab != text_config.vocab_size:
        # Rows that pad the head's vocabulary are never drafted: the target has no such tokens.
        head = replace(head, head=head.head.without_padding(int(text_config.vocab_size)))
        draft_ids = head.choose(draft_vocab)
    with garbage_kept():
        loaded, tokenizer_hash = target.load_tokenizer(is_needed=tokenizer is None)
        tokenizer_hash = check_tokenizers(head, str(target), tokenizer_hash, tokenizer)
        check_vocabulary(draft_vocab, tokenizer_hash, str(target))
        taps = resolve_tap_layers(head.head, int(text_config.num_hidden_layers))
        wrapped = TargetModel(target.load(), taps, target.backend)
        weights = load_head_weights(head.head, wrapped, draft_ids)
        # Packed in rank order, so that smaller vocabularies find their rows in it.
        order = _rank_rows(head, draft_ids, draft_vocab, weights.device)
        built = choose_drafter(drafter, weights, shape, draft_weights, order)
    model = SpeculativeModel(wrapped, built, tokenizer or loaded, max_model_len, head, tokenizer_hash, tree is None)
    return model if draft_window is None else model.with_draft_window(draft_window)


def _rank_rows(
    opened: OpenedHead, draft_ids: NDArray[np.int64], draft_vocab: int | DraftVocab | None, device: torch.device
) -> Tensor | None:
    ranked = opened.rank_rows(draft_ids, draft_vocab) if device.type == "cuda" else None
    return None if ranked is None else torch.from_numpy(ranked).to(device)
