"""`SpeculativeModel`: a target and its draft head, generating together.

    model = SpeculativeModel.from_pretrained("meta-llama/Llama-3.1-8B-Instruct", head="out/slim", draft_vocab=16000)
    output = model.generate("Why is the sky blue?", max_new_tokens=100)
    print(output.text[0], output.stats.mean_accepted_length)

Output is the target's own: greedy token for token, sampled in distribution and, for a seed, the same tokens that plain
decoding with that seed gives. Both are exact in fp32; below it a near-tie can round differently.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from .config import SamplingConfig, TreeConfig
from .draft_weights import NAMES, check_draft_weights, stored_dtype
from .drafter.computable import check_computable
from .drafter.follow import DEFAULT_FOLLOW_ROWS, check_follow
from .drafter.reference import Drafter, check_tree_fits
from .drafter.weights import HeadWeights, gather_lm_head_rows, load_head_weights
from .errors import AcceptanceWarning, UsageError
from .generation.arguments import (
    read_count,
    read_criteria,
    read_id_set,
    read_max_new_tokens,
    read_sampling,
    read_seconds,
    read_stop_strings,
)
from .generation.choice_rules import DeviceRules, device_rules
from .generation.decoder import WarmUp
from .generation.device import DeviceDecoders, try_captured
from .generation.device_loop import DeviceLoop
from .generation.kept_rows import KeptPieces
from .generation.logit_records import LogitRecord
from .generation.loop import GenerationLoop
from .generation.missed import HeldIds
from .generation.options import build_processors, join_options, without_padding
from .generation.output import GenerationOutput, with_logprobs
from .generation.prompts import Messages, Prompts, check_prompts, encode_conversation, read_prompts
from .generation.requests import Request, start
from .generation.sampling_params import read_sampling_params
from .generation.stats import GenerationStats
from .generation.streaming import Streamer, send_tokens
from .generation.tree_size import TreeSize, device_name, measured_sizes
from .kernels.launch import TritonDrafter
from .loading import (
    DrafterFactory,
    MapForm,
    OpenedHead,
    build_drafter,
    check_drafter,
    check_dtype,
    check_loaded,
    choose_device,
    choose_drafter,
    hash_of_source,
    load_target,
    load_target_config,
    load_tokenizer_and_hash,
    named_dtype,
    open_any_head,
    read_device_map,
    target_location,
)
from .pairing import check_pairing, check_tokenizer, check_vocabulary, resolve_tap_layers
from .target.choose import choose_target_backend
from .target.transformers import TargetModel

if TYPE_CHECKING:
    import numpy as np
    from eagle_slim.convert.artifact.artifact import Artifact
    from eagle_slim.convert.head.open import DraftHead
    from eagle_slim.vocab_tools.vocabulary.draft_vocab import DraftVocab
    from numpy.typing import NDArray
    from transformers import GenerationConfig

DEFAULT_MAX_SLOTS = 16
# Enough passes that a working head cannot stay this low by chance, few enough to warn within one answer.
_WARN_AFTER_PASSES = 32
_WARN_BELOW = 1.05


class SpeculativeModel:
    """A target with a drafter. Build it with `from_pretrained`, or from parts that are loaded already."""

    def __init__(
        self,
        target: TargetModel,
        drafter: Drafter,
        tokenizer: Any | None = None,
        max_model_len: int | None = None,
        opened: OpenedHead | None = None,
        drafter_kind: str | DrafterFactory = "reference",
        tokenizer_source: str | None = None,
        tokenizer_hash: str | None = None,
        is_tree_sized: bool = False,
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.tokenizer = tokenizer
        self.opened = opened
        self.drafter_kind = drafter_kind
        self.tokenizer_source = tokenizer_source
        """Hub id or folder that the tokenizer was loaded from; None if it was given as an object, or there is none."""
        self.tokenizer_hash = tokenizer_hash
        """Hash of the tokenizer that ids belong to; None if neither target, tokenizer nor converted head tells it."""
        if max_model_len is not None:
            read_count("max_model_len", max_model_len, 1)
        limits = [limit for limit in (target.max_positions, max_model_len) if limit is not None]
        self.max_model_len = min(limits, default=None)
        """Most tokens of prompt and answer together."""
        self.drafter_reason = "asked for"
        """Why this drafter."""
        self.is_tree_sized = is_tree_sized
        """Whether each call chooses the size of its trees (`tree_size`), up to the drafter's; else they have that."""
        self._drafters = {drafter.tree: drafter}
        self._pieces = KeptPieces()
        if target.on_device is None and target.device.type == "cuda" and target.pieces_reason is None:
            tried = try_captured(target, drafter)
            target.on_device, target.pieces_reason = (None, tried) if isinstance(tried, str) else (tried, None)
        self._decoders = None if target.on_device is None else DeviceDecoders(target.on_device, drafter)

    @classmethod
    def from_pretrained(
        cls,
        target: str | Path | nn.Module | None = None,
        head: str | Path | DraftHead | Artifact | None = None,
        *,
        draft_vocab: int | DraftVocab | None = None,
        follow: str | None = None,
        follow_rows: int = DEFAULT_FOLLOW_ROWS,
        depth: int = 5,
        top_k: int = 10,
        total_tokens: int | None = None,
        dtype: torch.dtype | str = "auto",
        torch_dtype: torch.dtype | str | None = None,
        device: torch.device | str | None = None,
        device_map: Any = None,
        drafter: str | DrafterFactory = "auto",
        draft_weights: str = "auto",
        target_backend: str = "auto",
        tokenizer: Any | None = None,
        max_model_len: int | None = None,
        revision: str | None = None,
        head_revision: str | None = None,
        head_subfolder: str | None = None,
        tap_layers: Sequence[int] | None = None,
        d2t_form: MapForm = "auto",
        offline: bool = False,
    ) -> SpeculativeModel:
        """Load a head with its target.

        Args:
            target: Hub id, folder, or a loaded transformers model; None takes the one that the head names.
            head: converted head (folder or Hub id), or an unconverted EAGLE-1, -2 or -3 head; None is the built-in one.
            draft_vocab: rows to draft over: any number from the forced ids up to the converted head's, without
                converting again (the built-in head is ranked by its own counts); or a `DraftVocab`; None takes all.
            follow: "prompt" lets ids of each prompt join its draft vocabulary, "text" those of its answer too: ids that
                ``draft_vocab`` leaves out and the head was trained on. Needs their rows: a head with more rows than
                ``draft_vocab``, one that drafts with the target's LM head, or one converted with ``--keep-rows``.
            follow_rows: most ids that join a sequence, 1 to 8,192; of more, the rarest stay out.
            depth, top_k, total_tokens: shape of the tree (`TreeConfig`); ``total_tokens`` None chooses in each call,
                by sequences and context, from measured steps (`generation.tree_size`): up to 60 nodes, down to plain
                decoding where drafting does not pay. A number is kept.
            dtype: of target and drafter, "auto" for what the target's files hold; a loaded target's stays as it is.
                ``torch_dtype`` is its older name in transformers.
            device: None is the first GPU where there is one, else the CPU; a loaded target stays where it is.
            device_map: a device, as transformers spells it: "cuda", "cuda:1", "cpu", 0, {"": 0}, or "auto" for None.
            drafter: "triton" (the persistent kernel), "reference" (plain PyTorch), or a callable of (weights, tree);
                "auto" takes the kernel where the GPU and the head allow it.
            draft_weights: type in which the drafter stores the head's matrices: "fp8" (the kernel only, from sm_89 on:
                half the bytes, slightly other drafts), "bf16" (for a model in it), or "auto" for the model's own.
            target_backend: "fused" (our forward for Llama, Mistral, Qwen2 and Qwen3), "transformers" (its own), or
                "auto": fused on a GPU where the model is exactly of a class that it knows.
            tokenizer: only needed with a loaded model: for text prompts, stop strings and text output.
            max_model_len: most tokens of prompt and answer together; None is the model's own limit.
            revision, head_revision: of Hub repositories.
            head_subfolder: where in its folder or repository the head is.
            tap_layers, d2t_form: for unconverted heads whose files do not say (`convert.head.open_head`).
            offline: use only what is on this machine.

        Raises:
            PairingError: head and target do not belong together; no weights were loaded.
            TargetError: transformers cannot load the target.
            UnsupportedModelError: the target's class cannot verify trees, or the head's kind cannot be drafted with.
            UsageError, DrafterError: see `TreeConfig`, `choose_device`, `check_dtype`, `choose_draft_ids`,
                `check_drafter`, `build_drafter`, `check_draft_weights`, `check_tree_fits`.
            ConvertError: the head cannot be had or is damaged (`open_head`, `Artifact.load`).
        """
        tree = TreeConfig.of(depth, top_k, total_tokens)
        if follow is not None:
            check_follow(follow, follow_rows)
        dtype = dtype if torch_dtype is None else torch_dtype
        device = device if device_map is None else read_device_map(device_map, device)
        if isinstance(target, nn.Module):
            check_loaded(target, dtype, device)
            place = next(target.parameters()).device
        else:
            check_dtype(dtype)
            place = choose_device(device)
        check_drafter(drafter, place)
        check_draft_weights(draft_weights, drafter, place, named_dtype(dtype))
        opened = open_any_head(head, head_revision, offline, d2t_form, tap_layers, head_subfolder)
        check_computable(opened.head, drafter)
        if isinstance(target, nn.Module):
            name, model, tokenizer_hash = type(target).__name__, target, None
            text_config: Any = target.config.get_text_config()  # type: ignore[operator, union-attr]
        else:
            location = target_location(opened, target, offline, revision)
            name, model = str(location), None
            text_config = load_target_config(location, revision, offline).get_text_config()
        check_pairing(opened.head, text_config, name)
        loaded_tokenizer, tokenizer_source = None, None
        draft_ids = opened.choose(draft_vocab)
        check_tree_fits(len(draft_ids), tree)
        if model is None:
            loaded_tokenizer, tokenizer_hash = load_tokenizer_and_hash(location, revision, offline)
            check_tokenizer(opened.tokenizer_hash, tokenizer_hash, opened.head.location, name)
            tokenizer_source = None if tokenizer or not loaded_tokenizer else str(location)
        if tokenizer is not None:
            tokenizer_hash = hash_of_source(tokenizer) or tokenizer_hash
            check_tokenizer(opened.tokenizer_hash, tokenizer_hash, opened.head.location, name)
        tokenizer_hash = tokenizer_hash or opened.tokenizer_hash
        check_vocabulary(draft_vocab, tokenizer_hash, name)
        tokenizer = tokenizer or loaded_tokenizer
        if model is None:
            model = load_target(location, dtype, place, revision, offline)
        taps = resolve_tap_layers(opened.head, int(text_config.num_hidden_layers))
        wrapped = TargetModel(model, taps, choose_target_backend(target_backend, model, taps))
        weights = load_head_weights(opened.head, wrapped, draft_ids, wrapped.dtype, wrapped.device, offline)
        if follow is not None:
            rows = opened.rows_to_follow(wrapped, weights, follow, follow_rows)
            weights = replace(weights, follow=rows)
        kind, reason = choose_drafter(drafter, weights, tree, draft_weights)
        order = _rank_rows(opened, draft_ids, draft_vocab, weights.device) if kind == "triton" else None
        built = build_drafter(kind, weights, tree, order, stored_dtype(draft_weights))
        whole = cls(
            wrapped, built, tokenizer, max_model_len, opened, kind, tokenizer_source, tokenizer_hash,
            is_tree_sized=total_tokens is None,
        )  # fmt: skip
        whole.drafter_reason = reason
        return whole

    def with_draft_vocab(self, draft_vocab: int | DraftVocab | None) -> SpeculativeModel:
        """Return a model over another draft vocabulary; target, tokenizer and the head's other weights are shared.

        The kernel's packed weights are too, where the vocabulary is the first part, by rank, of what was packed.

        Raises `UsageError` as `choose_draft_ids` does, and for a model that was not built by `from_pretrained`;
        `PairingError` for a vocabulary of another tokenizer.
        """
        if self.opened is None:
            raise UsageError("with_draft_vocab needs the opened head: build the model with from_pretrained.")
        check_vocabulary(draft_vocab, self.tokenizer_hash, type(self.target.model).__name__)
        weights = self.drafter.weights
        ids = self.opened.choose(draft_vocab)
        rows = gather_lm_head_rows(
            self.opened.head, self.target, ids, weights.dtype, weights.device, self.opened.offline
        )
        kept = torch.from_numpy(ids).to(weights.device)
        follow = None if weights.follow is None else weights.follow.over(kept)
        other = replace(weights, lm_head=rows, draft_to_target=kept, follow=follow)
        order = _rank_rows(self.opened, ids, draft_vocab, weights.device) if self.drafter_kind == "triton" else None
        return self._with_weights(other, order)

    def with_follow(
        self,
        follow: str | None,
        follow_rows: int = DEFAULT_FOLLOW_ROWS,
        rank_order: NDArray[np.int64] | None = None,
    ) -> SpeculativeModel:
        """Return a model whose draft vocabulary follows the prompt or the text, or stays as it is (None).

        ``rank_order``: target ids best first, which say what is rare; None takes the head's own ranking. Everything
        loaded is shared. Raises `UsageError` as `from_pretrained` does, and for a model that was not built by it.
        """
        weights = self.drafter.weights
        if follow is None:
            return self._with_weights(replace(weights, follow=None))
        check_follow(follow, follow_rows)
        if self.opened is None:
            raise UsageError("with_follow needs the opened head: build the model with from_pretrained.")
        rows = self.opened.rows_to_follow(self.target, weights, follow, follow_rows, rank_order)
        return self._with_weights(replace(weights, follow=rows))

    def with_tree(self, tree: TreeConfig) -> SpeculativeModel:
        """Return a model that drafts trees of another shape, in every call; everything loaded is shared.

        Raises `UsageError` for a tree that needs more children than the draft vocabulary has.
        """
        return self._with_drafter(self._build_drafter(self.drafter.weights, tree), is_tree_sized=False)

    def with_drafter(self, drafter: str | DrafterFactory) -> SpeculativeModel:
        """Return a model with another drafter, as in `from_pretrained`; everything loaded is shared.

        Weights stored in FP8 stay so. Raises `DrafterError` for a drafter that cannot run here, `UsageError` for an
        unknown name (`build_drafter`), and for one other than the kernel where weights are in FP8.
        """
        weights, tree = self.drafter.weights, self.drafter.tree
        stored = "fp8" if self.draft_weights == "fp8" else "auto"
        kind, reason = choose_drafter(drafter, weights, tree, stored)
        if kind == "triton" and isinstance(self.drafter, TritonDrafter):
            built: Drafter = self.drafter.like(weights, tree)
        else:
            ids, order = weights.draft_to_target.cpu().numpy(), None
            if kind == "triton" and self.opened is not None:
                order = _rank_rows(self.opened, ids, None, weights.device)
            built = build_drafter(kind, weights, tree, order)
        other = self._with_drafter(built, self.is_tree_sized, kind)
        other.drafter_reason = reason
        return other

    def _with_weights(self, weights: HeadWeights, order: Tensor | None = None) -> SpeculativeModel:
        return self._with_drafter(self._build_drafter(weights, self.drafter.tree, order), self.is_tree_sized)

    def _build_drafter(self, weights: HeadWeights, tree: TreeConfig, order: Tensor | None = None) -> Drafter:
        """Build a drafter of this model's kind for another tree or vocabulary."""
        own = self.drafter
        if self.drafter_kind == "triton" and isinstance(own, TritonDrafter):
            return own.like(weights, tree, order)
        return build_drafter(self.drafter_kind, weights, tree)

    def _with_drafter(
        self, drafter: Drafter, is_tree_sized: bool, kind: str | DrafterFactory | None = None
    ) -> SpeculativeModel:
        return SpeculativeModel(
            self.target,
            drafter,
            self.tokenizer,
            self.max_model_len,
            self.opened,
            self.drafter_kind if kind is None else kind,
            self.tokenizer_source,
            self.tokenizer_hash,
            is_tree_sized,
        )

    @property
    def draft_weights(self) -> str:
        """Type in which the drafter stores the head's matrices: "bf16", "fp16", "fp32", "fp64" or "fp8"."""
        own = self.drafter
        stored = own.packing.weight_dtype if isinstance(own, TritonDrafter) else None
        return NAMES[own.weights.dtype if stored is None else stored]

    @property
    def drafting(self) -> str:
        """The drafter and its weights in words."""
        return f"drafter {self.drafter_kind}, {self.draft_weights} weights"

    @property
    def device(self) -> torch.device:
        """Where the target is."""
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
    def generation_config(self) -> GenerationConfig | None:
        """Generation configuration of the target; None where it has none."""
        return getattr(self.target.model, "generation_config", None)

    @property
    def draft_vocab(self) -> int:
        """Rows that are drafted over, without those that join a sequence."""
        return self.drafter.weights.draft_vocab

    @property
    def draft_bytes(self) -> int:
        """Bytes of weights that drafting one tree reads: the layer, the LM head and all that may join, a level."""
        weights = self.drafter.weights
        # Norms and biases stay as they are; beside the matrices they are nothing.
        size = 1 if self.draft_weights == "fp8" else weights.dtype.itemsize
        return weights.num_weights * size * (self.drafter.tree.depth + 1)

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """End-of-sequence ids of the target's generation configuration, else of its configuration."""
        found = getattr(self.generation_config, "eos_token_id", None)
        if found is None:
            found = getattr(self.target.text_config, "eos_token_id", None)
        return read_id_set(found)

    def generate(
        self,
        input_ids: Prompts | None = None,
        *,
        inputs: Prompts | None = None,
        attention_mask: Tensor | Sequence[Sequence[int]] | None = None,
        max_new_tokens: int | None = None,
        do_sample: bool | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        seed: int | None = None,
        stop: str | Sequence[str] | None = None,
        stopping_criteria: Any = None,
        tokenizer: Any | None = None,
        eos_token_id: int | Sequence[int] | None = None,
        ignore_eos: bool = False,
        pad_token_id: int | None = None,
        streamer: Streamer | None = None,
        max_slots: int = DEFAULT_MAX_SLOTS,
        speculative: bool = True,
        time_phases: bool = False,
        reuse_prefix: bool = False,
        generation_config: GenerationConfig | None = None,
        logits_processor: Sequence[Any] | None = None,
        **options: Any,
    ) -> GenerationOutput:
        """Continue one prompt or many. Calls from several threads take turns.

        Args:
            input_ids: token ids (tensor or array [seq] or [prompts, seq], or lists of any lengths), or text, or the
                output of a transformers tokenizer, which brings its attention mask along.
            attention_mask: [prompts, seq] beside padded ids: 0 marks padding. Without one, the padding id marks it in a
                tensor [prompts, seq], as in transformers, unless it is an end of sequence too.
            max_new_tokens: 0 returns at once with nothing new; None means 256, or what ``max_length`` leaves.
            do_sample, temperature, top_p, top_k: as in transformers; greedy unless ``do_sample`` or a temperature
                above 0 asks for sampling. Sampling defaults of the target's own generation configuration are not used.
            inputs: another name for ``input_ids``.
            seed: fixes every draw, together with the prompt's place in the call. None draws one from PyTorch's
                generator, so that `torch.manual_seed` or transformers' `set_seed` fix it; the output says which it was.
            stop: strings that end an answer, wherever tokens begin and end (``stop_strings`` in transformers).
            stopping_criteria: transformers' criteria, or callables like them; asked for each prompt by itself, without
                padding, and with None for scores.
            tokenizer: for text and stop strings, instead of the model's own.
            eos_token_id: instead of the target's own; with ``ignore_eos`` no id ends an answer.
            pad_token_id: fills ``sequences``; None takes the target's, else 0.
            streamer: a transformers streamer, for one prompt.
            max_slots: how many prompts run at a time, each with KV memory of its own; the rest wait for a free slot.
            speculative: False decodes plainly, one token per pass: the same output, for comparison.
            time_phases: on a GPU, run a step phase by phase, so that `GenerationStats` tells draft and verify apart and
                a profiler sees their names; a little slower than whole steps.
            reuse_prefix: take over what the slots still hold of earlier calls: tokens that a prompt shares with such a
                sequence from the beginning on, as the next turn of a chat does, are not run again
                (``stats.num_reused_tokens``). In float32 the answer is the same; below it a prompt cut differently can
                round a near-tie differently.
            generation_config: as in transformers, for what no argument says.
            logits_processor: transformers' processors, or callables like them, of (int64 [1, seq], float32 [1, vocab]);
                functions of these alone (`options`).
            options: further fields of a `GenerationConfig`: ``max_length`` (prompt, with its padding, and answer),
                ``min_new_tokens``, ``repetition_penalty``, ``no_repeat_ngram_size``, ``min_p``, ``typical_p``,
                ``num_return_sequences``, ``max_time``, ``output_scores``, ``output_logits``,
                ``return_dict_in_generate`` and others (`options.PENALTIES`). The target's own generation configuration
                gives the defaults of those that act on greedy decoding too, as in transformers.

        Raises:
            PromptError: an empty prompt, an id outside the vocabulary, or no room in the context.
            UsageError: arguments that contradict each other, cannot be served, or lack a tokenizer.
        """
        if inputs is not None:
            if input_ids is not None:
                raise UsageError("Give the prompts once, as input_ids or as inputs.", option="inputs")
            input_ids = inputs
        if input_ids is None:
            raise UsageError("No prompt was given: input_ids is None.", found=None)
        tokenizer = self.tokenizer if tokenizer is None else tokenizer
        given = {
            "max_new_tokens": max_new_tokens,
            "do_sample": do_sample,
            "temperature": temperature,
            "top_p": top_p,
            "top_k": top_k,
            "eos_token_id": eos_token_id,
            "pad_token_id": pad_token_id,
        }
        own = self.generation_config
        keywords = {**given, **options}
        options = join_options(own, generation_config, keywords)
        sampling = read_sampling(options, keywords, seed)
        eos = frozenset() if ignore_eos else read_id_set(options.get("eos_token_id", self.eos_token_ids))
        pad = self._pad(options.get("pad_token_id"))
        padding = None if pad in (eos or self.eos_token_ids) else pad
        read = read_prompts(input_ids, attention_mask, padding, tokenizer)
        repeats = read_count("num_return_sequences", options.get("num_return_sequences", 1), 1)
        if repeats > 1 and sampling.is_greedy:
            raise UsageError(
                f"num_return_sequences = {repeats} needs sampling: greedy answers to a prompt are all the same. Give a "
                "temperature.",
                option="num_return_sequences", found=repeats,
            )  # fmt: skip
        read = read.repeated(repeats)
        prompts = read.prompts
        max_slots = read_count("max_slots", max_slots, 1)
        if streamer is not None and len(prompts) != 1:
            raise UsageError(
                f"A streamer follows one prompt, got {len(prompts)}.", option="streamer", found=len(prompts)
            )
        stops = read_stop_strings(options.get("stop_strings") if stop is None else stop, tokenizer is not None)
        criteria = read_criteria(stopping_criteria)
        max_time = options.get("max_time")
        deadline = None if max_time is None else time.monotonic() + read_seconds("max_time", max_time)
        has_scores, has_logits = bool(options.get("output_scores")), bool(options.get("output_logits"))
        vocab_size, decode = int(self.target.text_config.vocab_size), partial(_decode, tokenizer) if tokenizer else None
        device = self.target.device
        requests = []
        for index, prompt in enumerate(prompts):
            # As in transformers, lengths of prompt and answer together count the padding that was given.
            padded = len(read.rows[index])
            new = read_max_new_tokens(options, padded)
            record = LogitRecord(sampling) if has_scores or has_logits else None
            process = build_processors(
                without_padding(options, padded - len(prompt)),
                len(prompt),
                new,
                eos,
                vocab_size,
                logits_processor or (),
                device,
                record,
            )
            requests.append(
                Request(
                    index, prompt, new, eos, self.max_model_len, stops, decode, process, criteria, deadline, record,
                    device,
                )
            )  # fmt: skip
        check_prompts(requests, self.target.embedding.shape[0])
        if streamer is not None:
            streamer.put(torch.tensor([prompts[0]]))
        size = self._tree_size(requests, max_slots, speculative)
        drafter = self._drafter_for(size.num_nodes)
        listener = None if streamer is None else send_tokens(streamer)
        # Where a measured size turns drafting off for a call, its tokens are missed or not all the same.
        held = HeldIds.of(self.drafter.weights) if speculative else None
        loop: DeviceLoop | GenerationLoop
        rules = self._device_rules(drafter, options, sampling, requests)
        if isinstance(rules, DeviceRules):
            assert self._decoders is not None
            states = start(requests, sampling, listener, held)
            loop = DeviceLoop(
                self._decoders, self.target.lock, states, rules, max_slots, None if drafter is None else drafter.tree,
                time_phases, reuse_prefix,
            )  # fmt: skip
        else:
            loop = GenerationLoop(
                self.target, drafter, requests, sampling, max_slots, listener, self._pieces, reuse_prefix, held
            )
        results, stats = loop.run()
        tree = "plain decoding" if drafter is None else f"trees of {size.num_nodes} nodes"
        # The reason for a target's forward is told with it.
        why = "" if isinstance(rules, DeviceRules) or rules == self.target.backend.reason else f" ({rules})"
        path = f"{loop.path}{why}; target {self.target.backend}; {self.drafting}; {tree} ({size.reason})"
        stats = replace(stats, num_nodes=size.num_nodes, path=path)
        if streamer is not None:
            streamer.end()
        if drafter is not None:
            _warn_if_nothing_is_accepted(stats, self.drafter)
        return GenerationOutput(
            tuple(results),
            stats,
            self._fill(options) if pad is None else pad,
            None if sampling.is_greedy else sampling.seed,
            tuple(read.rows),
            read.device,
            has_scores,
            has_logits,
            bool(options.get("return_dict_in_generate")),
        )

    def chat(
        self, messages: str | Messages | Sequence[Messages], sampling_params: Any = None, **options: Any
    ) -> GenerationOutput:
        """Answer a conversation, or a list of conversations, through the chat template.

        ``sampling_params``: vLLM's `SamplingParams`, or an object or mapping with its fields. ``options``: its fields
        by name (``max_tokens``, ``n``, ``logprobs``, ``stop_token_ids``, ...), or arguments of `generate`. With
        ``logprobs`` = k each result holds the log-probabilities of the k most probable ids and of its own at each
        position, before penalties and temperature. Raises `UsageError` and `PromptError` as `encode_chat` and
        `generate` do.
        """
        is_one = isinstance(messages, str) or not messages or isinstance(messages[0], Mapping)
        conversations: Sequence[Any] = [messages] if is_one else messages
        keywords = read_sampling_params(sampling_params, options, self.eos_token_ids)
        logprobs = keywords.pop("logprobs", None)
        if logprobs is not None:
            keywords["output_logits"] = True
        output = self.generate([self.encode_chat(each) for each in conversations], **keywords)
        return output if logprobs is None else with_logprobs(output, read_count("logprobs", logprobs, 0))

    def warmup(
        self, num_prompts: int = 1, max_length: int = 2048, *, max_slots: int = DEFAULT_MAX_SLOTS,
        speculative: bool = True, **options: Any,
    ) -> WarmUp:  # fmt: skip
        """Compile and capture, before the first prompt comes, all that calls like the one described will use.

        Args:
            num_prompts: prompts of a call; fewer at a time are served as well.
            max_length: most tokens of a prompt and its answer together. The KV cache is allocated for them.
            max_slots, speculative: as in `generate`.
            options: how tokens are chosen, as in `generate` (``temperature``, ``top_p``, ``repetition_penalty``, ...):
                each combination of stages has graphs of its own, which serve all values.

        Returns the time for it, compilation and capture apart, and the memory. Where steps run in pieces there is
        nothing to get ready. A tree whose size is chosen is that of a prompt of half the length. Raises `UsageError`
        as `generate` does.
        """
        num_prompts, max_slots = read_count("num_prompts", num_prompts, 1), read_count("max_slots", max_slots, 1)
        prompt = (0,) * (read_count("max_length", max_length, 2) // 2)
        joined = join_options(self.generation_config, None, options)
        sampling = read_sampling(joined, options, seed=0)
        eos, vocab_size = self.eos_token_ids, int(self.target.text_config.vocab_size)
        new = max_length - len(prompt)
        process = build_processors(joined, len(prompt), new, eos, vocab_size, (), self.device, None)
        requests = [Request(0, prompt, new, eos, process=process)] * num_prompts
        size = self._tree_size(requests, max_slots, speculative)
        drafter = self._drafter_for(size.num_nodes)
        rules = self._device_rules(drafter, joined, sampling, requests)
        if isinstance(rules, str):
            return WarmUp()
        assert self._decoders is not None
        tree = None if drafter is None else drafter.tree
        with self.target.lock.hold():
            return self._decoders.warm_up(min(num_prompts, max_slots), max_length, tree, rules.rules)

    def _tree_size(self, requests: Sequence[Request], max_slots: int, speculative: bool) -> TreeSize:
        """How many nodes the trees of a call have."""
        if not speculative:
            return TreeSize(1, "asked for")
        tree = self.drafter.tree
        if not self.is_tree_sized:
            return TreeSize(tree.total_tokens, "asked for")
        slots = max(1, min(len(requests), max_slots, DEFAULT_MAX_SLOTS))
        context = max((len(request.prompt_ids) for request in requests), default=1)
        device = self.device
        # The tables are of 16-bit models; in a wider type verifying and drafting grow alike.
        share = 2 / self.dtype.itemsize
        return measured_sizes().choose(
            device_name(device), device.type,
            round(self.target.weight_bytes * share), round(self.draft_bytes * share), slots, context,
            tree.total_tokens,
        )  # fmt: skip

    def _drafter_for(self, num_nodes: int) -> Drafter | None:
        """Return a drafter of trees of a size, None for plain decoding."""
        if num_nodes == 1:
            return None
        tree = replace(self.drafter.tree, total_tokens=num_nodes)
        if tree not in self._drafters:
            self._drafters[tree] = self._build_drafter(self.drafter.weights, tree)
        return self._drafters[tree]

    def _device_rules(
        self, drafter: Drafter | None, options: Mapping[str, Any], sampling: SamplingConfig, requests: Sequence[Request]
    ) -> DeviceRules | str:
        """Return the rules if the whole call can run on the device, else why it runs in pieces."""
        if self._decoders is None:
            return self.target.pieces_reason or self.target.backend.reason
        if drafter is not None and self._decoders.backend is None:
            return f"{type(drafter).__name__} drafts on the host"
        return device_rules(options, sampling, requests, self._decoders.target.vocab_size)

    def encode_chat(self, messages: str | Messages) -> list[int]:
        """Turn a conversation (or one user message) into a prompt through the tokenizer's chat template.

        Without a template, the last message's text is encoded as it is. Raises `UsageError` without a tokenizer, for
        anything that is no conversation, and for one that the template refuses.
        """
        return encode_conversation(self.tokenizer, messages)

    def _fill(self, options: Mapping[str, Any]) -> int:
        """Return what fills ``sequences`` where nothing is named for padding: the first end of sequence, else 0."""
        ends = options.get("eos_token_id", getattr(self.generation_config, "eos_token_id", None))
        first = ends.flatten()[:1].tolist() if isinstance(ends, Tensor) else ends
        if isinstance(first, Iterable):
            first = next(iter(first), None)
        return min(self.eos_token_ids, default=0) if first is None else int(first)

    def _pad(self, given: int | None) -> int | None:
        """Return the id that marks padding: as given, else the target's."""
        configs = (getattr(self.target.model, "generation_config", None), self.target.text_config)
        found = [given, *(getattr(config, "pad_token_id", None) for config in configs)]
        return next((int(token) for token in found if token is not None), None)


def _rank_rows(
    opened: OpenedHead, draft_ids: NDArray[np.int64], draft_vocab: int | DraftVocab | None, device: torch.device
) -> Tensor | None:
    ranked = opened.rank_rows(draft_ids, draft_vocab)
    return None if ranked is None else torch.from_numpy(ranked).to(device)


def _decode(tokenizer: Any, token_ids: Sequence[int]) -> str:
    text = tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return str(text)


def _warn_if_nothing_is_accepted(stats: GenerationStats, drafter: Drafter) -> None:
    if stats.num_passes < _WARN_AFTER_PASSES or stats.mean_accepted_length >= _WARN_BELOW:
        return
    warnings.warn(
        f"Hardly any token of {stats.num_passes} drafts was accepted ({stats.mean_accepted_length:.2f} tokens per "
        "pass). The output is exact all the same. Likely causes: the head was trained for another target or another "
        "version of it; its map d2t has the other form (d2t_form); it reads other tap layers (tap_layers); a draft "
        f"vocabulary of {drafter.weights.draft_vocab} misses this text's tokens; or the prompts lack the chat template "
        "that the head was trained on.",
        AcceptanceWarning,
        stacklevel=3,
    )
