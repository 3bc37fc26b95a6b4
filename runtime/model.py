"""`SpeculativeModel`: a target and its draft head, generating together.

    model = SpeculativeModel.from_pretrained("meta-llama/Llama-3.1-8B-Instruct", head="out/slim", draft_vocab=16000)
    output = model.generate("Why is the sky blue?", max_new_tokens=100)
    print(output.text[0], output.stats.mean_accepted_length)

Output is the target's own: greedy token for token (exact in fp32), sampled in distribution and, for a seed, the same
tokens that plain decoding with that seed gives.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from jinja2 import TemplateError
from torch import Tensor, nn

from .config import SamplingConfig, TreeConfig
from .drafter.reference import Drafter
from .drafter.weights import gather_lm_head_rows, load_head_weights
from .errors import AcceptanceWarning, PromptError, UsageError
from .generation.loop import GenerationLoop, OnTokens
from .generation.options import SAMPLING, build_processors, join_options
from .generation.requests import Request, RequestOutput
from .generation.stats import GenerationStats
from .loading import (
    DrafterFactory,
    MapForm,
    OpenedHead,
    build_drafter,
    check_dtype,
    check_loaded,
    choose_device,
    hash_of_source,
    load_target,
    load_target_config,
    load_tokenizer_and_hash,
    open_any_head,
    target_location,
)
from .pairing import check_pairing, check_tokenizer, check_vocabulary, resolve_tap_layers
from .target.transformers import TargetModel

if TYPE_CHECKING:
    from eagle_slim.convert.artifact.artifact import Artifact
    from eagle_slim.convert.head.open import DraftHead
    from eagle_slim.vocab_tools.vocabulary.draft_vocab import DraftVocab
    from transformers import GenerationConfig

DEFAULT_TOTAL_TOKENS = 60
DEFAULT_MAX_SLOTS = 16
DEFAULT_MAX_NEW_TOKENS = 256
# Enough passes that a working head cannot stay this low by chance, few enough to warn within one answer.
_WARN_AFTER_PASSES = 32
_WARN_BELOW = 1.05

Prompts = str | Sequence[str] | Tensor | Sequence[int] | Sequence[Sequence[int]] | Mapping[str, Any]


class Streamer(Protocol):
    """What transformers calls a streamer: it gets the prompt, then new tokens, then the end."""

    def put(self, value: Tensor) -> None:
        """Take token ids, int64 [1, seq] for the prompt and [new] afterwards, on the CPU."""

    def end(self) -> None:
        """Hear that nothing more comes."""


@dataclass(frozen=True)
class GenerationOutput:
    """What `SpeculativeModel.generate` returns; ``results`` in the order of the prompts."""

    results: tuple[RequestOutput, ...]
    stats: GenerationStats
    pad_token_id: int = 0

    @property
    def sequences(self) -> Tensor:
        """Prompt and new tokens, padded on the right: int64 [prompts, longest], as transformers returns them."""
        rows = [torch.tensor(result.prompt_ids + result.token_ids) for result in self.results]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=self.pad_token_id)

    @property
    def token_ids(self) -> list[list[int]]:
        """New tokens of each prompt."""
        return [result.token_ids for result in self.results]

    @property
    def text(self) -> list[str | None]:
        """New text of each prompt; None without a tokenizer."""
        return [result.text for result in self.results]


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
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.tokenizer = tokenizer
        self.opened = opened
        self.drafter_kind = drafter_kind
        self.tokenizer_source = tokenizer_source
        """Where the tokenizer was loaded from: Hub id or folder; None when it was handed over, or there is none."""
        self.tokenizer_hash = tokenizer_hash
        """Hash of the tokenizer that ids belong to, as far as target, tokenizer or converted head tell it."""
        if max_model_len is not None:
            _count("max_model_len", max_model_len, 1)
        limits = [limit for limit in (target.max_positions, max_model_len) if limit is not None]
        self.max_model_len = min(limits, default=None)
        """Most tokens of prompt and answer together."""

    @classmethod
    def from_pretrained(
        cls,
        target: str | Path | nn.Module | None = None,
        head: str | Path | DraftHead | Artifact | None = None,
        *,
        draft_vocab: int | DraftVocab | None = None,
        depth: int = 5,
        top_k: int = 10,
        total_tokens: int | None = None,
        dtype: torch.dtype | str = "auto",
        device: torch.device | str | None = None,
        drafter: str | DrafterFactory = "reference",
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
            depth, top_k, total_tokens: shape of the tree (`TreeConfig`); ``total_tokens`` None means 60, or all
                candidates where there are fewer.
            dtype: of target and drafter, "auto" for what the target's files hold; a loaded target's stays as it is.
            device: None is the first GPU where there is one, else the CPU; a loaded target stays where it is.
            drafter: "reference", "triton", or a callable of (weights, tree).
            tokenizer: only needed with a loaded model: for text prompts, stop strings and text output.
            max_model_len: most tokens of prompt and answer; None is the model's own limit.
            revision, head_revision: of Hub repositories.
            head_subfolder: where in its folder or repository the head is.
            tap_layers, d2t_form: for unconverted heads whose files do not say (`convert.head.open_head`).
            offline: only what is on this machine.

        Raises:
            PairingError: head and target do not belong together; nothing has run yet.
            TargetError: transformers cannot load the target.
            UnsupportedModelError: the target's class cannot verify trees, or the head's kind cannot be drafted with.
            UsageError, DrafterError: see `TreeConfig`, `choose_device`, `check_dtype`, `choose_draft_ids`,
                `build_drafter`.
            ConvertError: the head cannot be had or is damaged (`open_head`, `Artifact.load`).
        """
        tree = _tree(depth, top_k, total_tokens)
        if isinstance(target, nn.Module):
            check_loaded(target, dtype, device)
        else:
            check_dtype(dtype)
            place = choose_device(device)
        opened = open_any_head(head, head_revision, offline, d2t_form, tap_layers, head_subfolder)
        if isinstance(target, nn.Module):
            name, model, tokenizer_hash = type(target).__name__, target, None
            text_config: Any = target.config.get_text_config()  # type: ignore[operator, union-attr]
        else:
            location = target_location(opened, target)
            name, model = str(location), None
            text_config = load_target_config(location, revision, offline).get_text_config()
        check_pairing(opened.head, text_config, name)
        loaded_tokenizer, tokenizer_source = None, None
        draft_ids = opened.choose(draft_vocab)
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
        wrapped = TargetModel(model, resolve_tap_layers(opened.head, int(text_config.num_hidden_layers)))
        weights = load_head_weights(opened.head, wrapped, draft_ids, wrapped.dtype, wrapped.device)
        built = build_drafter(drafter, weights, tree)
        return cls(wrapped, built, tokenizer, max_model_len, opened, drafter, tokenizer_source, tokenizer_hash)

    def with_draft_vocab(self, draft_vocab: int | DraftVocab | None) -> SpeculativeModel:
        """Return a model over another draft vocabulary; target, tokenizer and the head's other weights are shared.

        Raises `UsageError` as `choose_draft_ids` does, and for a model that was not built by `from_pretrained`;
        `PairingError` for a vocabulary of another tokenizer.
        """
        if self.opened is None:
            raise UsageError("with_draft_vocab needs the opened head: build the model with from_pretrained.")
        check_vocabulary(draft_vocab, self.tokenizer_hash, type(self.target.model).__name__)
        weights = self.drafter.weights
        ids = self.opened.choose(draft_vocab)
        rows = gather_lm_head_rows(self.opened.head, self.target, ids, weights.dtype, weights.device)
        other = replace(weights, lm_head=rows, draft_to_target=torch.from_numpy(ids).to(weights.device))
        drafter = build_drafter(self.drafter_kind, other, self.drafter.tree)
        return SpeculativeModel(
            self.target,
            drafter,
            self.tokenizer,
            self.max_model_len,
            self.opened,
            self.drafter_kind,
            self.tokenizer_source,
            self.tokenizer_hash,
        )

    @property
    def draft_vocab(self) -> int:
        """Rows that are drafted over."""
        return self.drafter.weights.draft_vocab

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """End-of-sequence ids of the target's generation configuration, else of its configuration."""
        generation = getattr(self.target.model, "generation_config", None)
        found = getattr(generation, "eos_token_id", None)
        if found is None:
            found = getattr(self.target.text_config, "eos_token_id", None)
        return _id_set(found)

    def generate(
        self,
        input_ids: Prompts,
        *,
        attention_mask: Tensor | Sequence[Sequence[int]] | None = None,
        max_new_tokens: int | None = None,
        do_sample: bool | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        seed: int = 0,
        stop: str | Sequence[str] | None = None,
        eos_token_id: int | Sequence[int] | None = None,
        ignore_eos: bool = False,
        pad_token_id: int | None = None,
        streamer: Streamer | None = None,
        max_slots: int = DEFAULT_MAX_SLOTS,
        speculative: bool = True,
        generation_config: GenerationConfig | None = None,
        logits_processor: Sequence[Any] | None = None,
        **options: Any,
    ) -> GenerationOutput:
        """Continue one prompt or many. Calls from several threads take turns.

        Args:
            input_ids: token ids (tensor or array [seq] or [prompts, seq], or lists of any lengths), or text, or what a
                transformers tokenizer returned, which brings its attention mask along.
            attention_mask: [prompts, seq] beside padded ids: 0 marks padding. Without one, the padding id marks it in a
                tensor [prompts, seq], as in transformers, unless it is an end of sequence too.
            max_new_tokens: 0 returns at once with nothing new; None means 256, or what ``max_length`` leaves.
            do_sample, temperature, top_p, top_k: as in transformers; greedy unless ``do_sample`` or a temperature
                above 0 says otherwise. The sampling defaults of the target's own generation configuration are not used.
            seed: with the prompt's place in the call, fixes every draw.
            stop: strings that end an answer, wherever tokens begin and end.
            eos_token_id: instead of the target's own; ``ignore_eos`` runs on beyond any.
            pad_token_id: fills ``sequences``; None takes the target's, else 0.
            streamer: a transformers streamer, for one prompt.
            max_slots: how many prompts run at a time, each with KV memory of its own; the rest wait for a free slot.
            speculative: False decodes plainly, one token per pass: the same output, for comparison.
            generation_config: as in transformers, for what no argument says.
            logits_processor: transformers' processors, or callables like them, of (int64 [1, seq], float32 [1, vocab]);
                functions of these alone (`options`).
            options: further fields of a `GenerationConfig`: ``max_length`` (prompt, without padding, and answer),
                ``min_new_tokens``, ``repetition_penalty``, ``no_repeat_ngram_size``, ``min_p``, ``typical_p``,
                ``num_return_sequences``, ``stop_strings`` and others (`options.PENALTIES`). The target's own generation
                configuration gives the defaults of those that act on greedy decoding too, as in transformers.

        Raises:
            PromptError: an empty prompt, an id outside the vocabulary, or no room in the context.
            UsageError: arguments that contradict each other, cannot be served, or lack a tokenizer.
        """
        given = {
            "max_new_tokens": max_new_tokens,
            "do_sample": do_sample,
            "temperature": temperature,
            "top_p": top_p,
            "top_k": top_k,
            "eos_token_id": eos_token_id,
            "pad_token_id": pad_token_id,
        }
        own = getattr(self.target.model, "generation_config", None)
        keywords = {**given, **options}
        options = join_options(own, generation_config, keywords)
        sampling = _sampling_of(options, keywords, seed)
        eos = frozenset() if ignore_eos else _id_set(options.get("eos_token_id", self.eos_token_ids))
        pad = self._pad(options.get("pad_token_id"))
        prompts = self._prompts(input_ids, attention_mask, None if pad in (eos or self.eos_token_ids) else pad)
        repeats = _count("num_return_sequences", options.get("num_return_sequences", 1), 1)
        if repeats > 1 and sampling.is_greedy:
            raise UsageError(f"num_return_sequences = {repeats} needs sampling: greedy answers are all the same.")
        prompts = [prompt for prompt in prompts for _ in range(repeats)]
        max_slots = _count("max_slots", max_slots, 1)
        if streamer is not None and len(prompts) != 1:
            raise UsageError(f"A streamer follows one prompt, got {len(prompts)}.")
        stop = options.get("stop_strings") if stop is None else stop
        stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
        if stops and self.tokenizer is None:
            raise UsageError("Stop strings need a tokenizer; load the model with one.")
        if not all(isinstance(text, str) and text for text in stops):
            raise UsageError(f"Stop strings are texts of at least one letter; got {list(stops)!r}.")
        requests, vocab_size = [], int(self.target.text_config.vocab_size)
        for index, prompt in enumerate(prompts):
            new = _max_new_tokens(options, len(prompt))
            process = build_processors(
                options, len(prompt), new, eos, vocab_size, logits_processor or (), self.target.device
            )
            decode = self._decode if self.tokenizer else None
            requests.append(Request(index, prompt, new, eos, self.max_model_len, stops, decode, process))
        self._check_room(requests)
        if streamer is not None:
            streamer.put(torch.tensor([prompts[0]]))
        drafter = self.drafter if speculative else None
        loop = GenerationLoop(self.target, drafter, requests, sampling, max_slots, _listener(streamer))
        results, stats = loop.run()
        if streamer is not None:
            streamer.end()
        if speculative:
            _warn_if_nothing_is_accepted(stats, self.drafter)
        return GenerationOutput(tuple(results), stats, min(eos, default=0) if pad is None else pad)

    def encode_chat(self, messages: str | Sequence[Mapping[str, Any]]) -> list[int]:
        """Turn a conversation (or one user message) into a prompt through the tokenizer's chat template.

        Without a template, the last message's text is encoded as it is. Raises `UsageError` without a tokenizer, and
        for what is no conversation or none that the template takes.
        """
        if self.tokenizer is None:
            raise UsageError("A chat needs a tokenizer; load the model with one.")
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        if isinstance(messages, Mapping) or not messages or not all(isinstance(each, Mapping) for each in messages):
            raise UsageError(
                f'A conversation is a list of messages such as {{"role": "user", "content": "Hi"}}; got {messages!r}.'
            )
        if not self.tokenizer.chat_template:
            return self._encode(str(messages[-1].get("content")))
        try:
            text = self.tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
        except (TemplateError, TypeError, ValueError) as error:
            raise UsageError(f"The tokenizer's chat template does not take this conversation: {error}") from error
        ids: list[int] = self.tokenizer(text, add_special_tokens=False).input_ids
        return ids

    def _prompts(self, given: Prompts, attention_mask: Any, pad: int | None) -> list[tuple[int, ...]]:
        if isinstance(given, Mapping):
            if "input_ids" not in given:
                raise UsageError(
                    "This is no prompt: give token ids or text; model.encode_chat(messages) makes a prompt of messages."
                )
            attention_mask = given.get("attention_mask") if attention_mask is None else attention_mask
            given = given["input_ids"]
        if isinstance(given, bytes) or not hasattr(given, "__iter__") or getattr(given, "ndim", 1) == 0:
            raise UsageError(f"A prompt is text or token ids; got {given!r}. (Embeddings cannot be drafted from.)")
        if attention_mask is None and pad is not None and getattr(given, "ndim", 0) == 2:
            attention_mask = given != pad
        values = [given] if isinstance(given, str) else _plain(given)
        mask = None if attention_mask is None else _plain(attention_mask)
        if not values:
            raise PromptError("There is no prompt.")
        if isinstance(values[0], Mapping):
            raise UsageError("These are messages, not a prompt: model.encode_chat(messages) makes a prompt of them.")
        if isinstance(values[0], str):
            if mask is not None:
                raise UsageError("attention_mask goes with token ids; texts have no padding.")
            values = [self._encode(str(text)) for text in values]
        elif isinstance(values[0], (int, float)):
            values = [values]
        elif any(not hasattr(row, "__iter__") or isinstance(row, str) for row in values):
            raise UsageError("A batch is token ids [prompts, seq], lists of token ids, or texts; this mixes them.")
        if mask and isinstance(mask[0], (int, float)):
            mask = [mask]
        prompts = [tuple(_token_id(token) for token in row) for row in values]
        return prompts if mask is None else _without_padding(prompts, mask)

    def _check_room(self, requests: Sequence[Request]) -> None:
        vocab = self.target.embedding.shape[0]
        for request in requests:
            length = len(request.prompt_ids)
            if length == 0:
                raise PromptError(f"Prompt {request.index} is empty; give at least one token (a BOS token, say).")
            wrong = [token for token in request.prompt_ids if not 0 <= token < vocab]
            if wrong:
                raise PromptError(f"Prompt {request.index} has token id {wrong[0]}; the target has 0 to {vocab - 1}.")
            limit = request.context_limit
            if limit is not None and (length > limit or (length == limit and request.max_new_tokens > 0)):
                raise PromptError(
                    f"Prompt {request.index} has {length} tokens; the context of {limit} leaves no room for an answer. "
                    "Shorten the prompt."
                )

    def _encode(self, text: str) -> list[int]:
        if self.tokenizer is None:
            raise UsageError("Text prompts need a tokenizer; give token ids, or load the model with a tokenizer.")
        ids: list[int] = self.tokenizer(text).input_ids
        return ids

    def _decode(self, token_ids: Sequence[int]) -> str:
        assert self.tokenizer is not None
        text = self.tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return str(text)

    def _pad(self, given: int | None) -> int | None:
        """What marks padding: as given, else the target's."""
        configs = (getattr(self.target.model, "generation_config", None), self.target.text_config)
        found = [given, *(getattr(config, "pad_token_id", None) for config in configs)]
        return next((int(token) for token in found if token is not None), None)


def _plain(values: Any) -> list[Any]:
    """Tensors and arrays, and lists of them, as lists."""
    if hasattr(values, "tolist"):
        found: list[Any] = values.tolist()
        return found
    return [value.tolist() if hasattr(value, "tolist") else value for value in values]


def _token_id(token: Any) -> int:
    if isinstance(token, bool) or not isinstance(token, Integral):
        raise UsageError(f"Token ids are integers, in lists or a tensor of at most two dimensions; got {token!r}.")
    return int(token)


def _count(name: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise UsageError(f"{name} must be an integer of at least {least}, got {value!r}.")
    return int(value)


def _max_new_tokens(options: Mapping[str, Any], prompt_length: int) -> int:
    if "max_new_tokens" in options:
        return _count("max_new_tokens", options["max_new_tokens"], 0)
    if "max_length" not in options:
        return DEFAULT_MAX_NEW_TOKENS
    length = _count("max_length", options["max_length"], 0)
    if length < prompt_length:
        raise UsageError(f"max_length = {length} is less than a prompt of {prompt_length} tokens; it counts both.")
    return length - prompt_length


def _without_padding(prompts: Sequence[tuple[int, ...]], mask: Sequence[Sequence[Any]]) -> list[tuple[int, ...]]:
    lengths, expected = [len(keep) for keep in mask], [len(prompt) for prompt in prompts]
    if lengths != expected:
        raise UsageError(f"attention_mask has rows of {lengths} entries, input_ids of {expected}; expected the same.")
    return [tuple(compress(prompt, keep)) for prompt, keep in zip(prompts, mask, strict=True)]


def _tree(depth: int, top_k: int, total_tokens: int | None) -> TreeConfig:
    if total_tokens is None:
        smallest = TreeConfig(depth, top_k, 2)
        total_tokens = min(DEFAULT_TOTAL_TOKENS, smallest.num_candidates + 1)
    return TreeConfig(depth, top_k, total_tokens)


def _sampling_of(options: Mapping[str, Any], keywords: Mapping[str, Any], seed: int) -> SamplingConfig:
    """Read how to sample from joined options; the ``keywords`` among them must not contradict each other."""
    named = {name: keywords.get(name) for name in ("do_sample", *SAMPLING)}
    if named["do_sample"] is None and named["temperature"] is None:
        named["do_sample"] = options.get("do_sample")
    if sampling_config(**named, seed=seed).is_greedy:
        return SamplingConfig(seed=seed)
    found = {name: options[name] for name in SAMPLING if name in options}
    return sampling_config(do_sample=True, **found, seed=seed)


def sampling_config(
    do_sample: bool | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    seed: int = 0,
    min_p: float | None = None,
    typical_p: float | None = None,
) -> SamplingConfig:
    """Read sampling arguments as `SpeculativeModel.generate` does. Raises `UsageError` when they contradict."""
    cuts = {"top_p": top_p, "top_k": top_k, "min_p": min_p, "typical_p": typical_p}
    given: dict[str, Any] = {name: value for name, value in cuts.items() if value is not None}
    if do_sample is None:
        if temperature is None and given:
            raise UsageError(f"{', '.join(given)}: for sampling only: give do_sample=True or a temperature as well.")
        do_sample = bool(temperature)
    if not do_sample:
        if temperature:
            raise UsageError(f"do_sample=False asks for greedy, temperature={temperature} for sampling; give one.")
        return SamplingConfig(seed=seed)
    if temperature == 0:
        raise UsageError("do_sample=True needs a temperature above 0; leave it out for 1.0.")
    return SamplingConfig(1.0 if temperature is None else temperature, seed=seed, **given)


def _listener(streamer: Streamer | None) -> OnTokens | None:
    if streamer is None:
        return None

    def on_tokens(_place: int, token_ids: Sequence[int]) -> None:
        streamer.put(torch.tensor(list(token_ids)))

    return on_tokens


def _id_set(ids: int | Iterable[int] | None) -> frozenset[int]:
    if ids is None:
        return frozenset()
    values = ids.tolist() if hasattr(ids, "tolist") else ids
    return frozenset(_token_id(token) for token in (values if isinstance(values, Iterable) else [values]))


def _warn_if_nothing_is_accepted(stats: GenerationStats, drafter: Drafter) -> None:
    if stats.num_passes < _WARN_AFTER_PASSES or stats.mean_accepted_length >= _WARN_BELOW:
        return
    warnings.warn(
        f"Of {stats.num_passes} drafts hardly any token was accepted ({stats.mean_accepted_length:.2f} tokens per "
        "pass). The output is exact all the same. Likely causes: the head was trained for another target or another "
        "version of it; the map d2t is of the other form (d2t_form); other tap layers (tap_layers); a draft vocabulary "
        f"of {drafter.weights.draft_vocab} that misses this text's tokens; or prompts without the chat template that "
        "the head was trained on.",
        AcceptanceWarning,
        stacklevel=3,
    )
