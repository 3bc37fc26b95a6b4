"""Open a draft head of any published spelling as one `DraftHead`: canonical names, a flat configuration, absolute ids.

Everything a head's own files can say is checked here; what needs the target is checked where the target is at hand.
Nothing but small tensors (the map) is read when a head is opened.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Protocol, get_args

import numpy as np
from eagle_slim.vocab_tools.errors import UsageError, VocabularyError
from eagle_slim.vocab_tools.vocabulary.token_map import ids_from_d2t

from ..errors import CheckpointError, MismatchError, UnsupportedHeadError
from ..sources.builtin import embedded_head
from ..sources.hub import ResolvedSource, open_head_source
from ..weights import names
from ..weights.checkpoint import FileRecord, open_checkpoint
from . import config as head_config

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

D2tForm = Literal["auto", "offset", "absolute"]

_FLOAT_DTYPES = ("torch.bfloat16", "torch.float16", "torch.float32")


class TensorSource(Protocol):
    """What a checkpoint offers: names, shapes and dtypes at once, tensors and rows when asked."""

    @property
    def names(self) -> Sequence[str]:
        """Names of all tensors."""

    @property
    def files(self) -> Sequence[FileRecord]:
        """What was read so far."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""

    def dtype(self, name: str) -> torch.dtype:
        """Dtype of a tensor."""

    def tensor(self, name: str) -> torch.Tensor:
        """A whole tensor."""

    def rows(self, name: str, ids: NDArray[np.int64]) -> torch.Tensor:
        """Rows `ids` [rows] of a tensor, [rows, ...]."""

    def pieces(self, name: str, ids: NDArray[np.int64] | None = None) -> Iterator[torch.Tensor]:
        """A tensor or its rows `ids` in pieces, each valid until two more have been asked for."""


@dataclass(frozen=True)
class LazyTensors:
    """The tensors of a head under their canonical names, read from the files when asked for.

    Attributes:
        source: the checkpoint behind it.
        stored: canonical name to the name in the checkpoint.
    """

    source: TensorSource
    stored: Mapping[str, str]

    @property
    def names(self) -> tuple[str, ...]:
        """Canonical names, sorted."""
        return tuple(sorted(self.stored))

    def __contains__(self, name: object) -> bool:
        return name in self.stored

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, from the header. KeyError where it is absent."""
        return tuple(self.source.shape(self.stored[name]))

    def dtype(self, name: str) -> torch.dtype:
        """Dtype of a tensor, from the header. KeyError where it is absent."""
        return self.source.dtype(self.stored[name])

    def get(self, name: str) -> torch.Tensor:
        """The whole tensor, on the CPU, as stored. KeyError where it is absent."""
        return self.source.tensor(self.stored[name])

    def pieces(self, name: str) -> Iterator[torch.Tensor]:
        """The tensor in pieces [n, ...], each valid until two more have been asked for. KeyError where it is absent."""
        return self.source.pieces(self.stored[name])

    def digest_of_last_read(self, name: str) -> str:
        """SHA-256 of the bytes of the last `get` or `pieces` of this tensor, as its reader computed it on the way."""
        stored = self.stored[name]
        reads = [
            read for file in self.source.files for read in file.reads if read.tensor == stored and read.rows is None
        ]
        return reads[-1].sha256

    def rows(self, name: str, ids: NDArray[np.int64]) -> torch.Tensor:
        """Rows `ids` [n] of a matrix, [n, columns], bit for bit as stored. KeyError where the matrix is absent."""
        return self.source.rows(self.stored[name], ids)


@dataclass(frozen=True)
class DraftHead:
    """A draft head, whatever its file looked like.

    Attributes:
        kind: "eagle3", or "eagle" for EAGLE-1 and EAGLE-2.
        config: flat config.json; `vocab_size` is the target's V, `draft_vocab_size` the rows of the LM head.
        tensors: canonical names: `fc.weight` [hidden, taps * target_hidden] (EAGLE-1/2: [hidden, 2 * hidden]),
            `midlayer.*` (EAGLE-1/2: `layers.N.*`), `norm.weight` [hidden], and where the file has them
            `lm_head.weight` [draft_vocab, hidden], `embed_tokens.weight` [target_vocab, hidden], `input_norm.weight`,
            `fc_norm.N.weight`. The maps `d2t` and `t2d` are not among them: see `draft_ids_to_target`.
        draft_ids_to_target: int64 [draft_vocab], absolute target id of each `lm_head` row in stored order; None where
            row i is target id i (a full vocabulary, or an LM head that is the target's).
        tap_layers: the head reads the inputs of these decoder layers of the target; None is every engine's default,
            (2, n // 2, n - 3) for n layers; () is the target's last hidden state alone.
        warnings: what a user of the head should know; complete sentences.
        location: the repository or folder, for messages.
        source_config: config.json as it was found.
        source: where the files came from; None for a head opened from an open checkpoint.
        target_name: the target that the head's own configuration names, if it does.
        dropped: stored tensor name to the reason why it is not among `tensors`.
    """

    kind: names.HeadKind
    config: dict[str, Any]
    tensors: LazyTensors
    draft_ids_to_target: NDArray[np.int64] | None
    tap_layers: tuple[int, ...] | None
    warnings: tuple[str, ...]
    location: str = ""
    source_config: Mapping[str, Any] = field(default_factory=dict)
    source: ResolvedSource | None = None
    target_name: str | None = None
    dropped: Mapping[str, str] = field(default_factory=dict)

    @property
    def target_vocab(self) -> int:
        """V: the size of the target's vocabulary, padding rows included."""
        return int(self.config["vocab_size"])

    @property
    def draft_vocab(self) -> int:
        """Rows of the LM head: its own, or the target's V where it has none."""
        return self.target_vocab if self.draft_ids_to_target is None else len(self.draft_ids_to_target)

    @property
    def hidden_size(self) -> int:
        """H: width of the head."""
        return int(self.config["hidden_size"])

    @property
    def target_hidden_size(self) -> int:
        """Ht: width of the target."""
        return int(self.config.get("target_hidden_size") or self.hidden_size)

    @property
    def has_lm_head(self) -> bool:
        """Whether the rows come from the head itself rather than from the target."""
        return names.LM_HEAD in self.tensors

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the head's matrices."""
        return self.tensors.dtype("midlayer.mlp.down_proj.weight" if self.kind == "eagle3" else names.FC)

    @property
    def trained_ids(self) -> NDArray[np.int64] | None:
        """Target ids the head was trained on, ascending; None for all, in whatever order their rows are."""
        if self.draft_ids_to_target is None or self.draft_vocab == self.target_vocab:
            return None
        return np.sort(self.draft_ids_to_target)


def open_head(
    source: str | Path | None = None,
    *,
    revision: str | None = None,
    subfolder: str | None = None,
    offline: bool = False,
    d2t_form: D2tForm = "auto",
    tap_layers: Sequence[int] | None = None,
) -> DraftHead:
    """Open a draft head: EAGLE-3 in any spelling, full or with a map, or EAGLE-1/2.

    Args:
        source: folder or Hub repository; None is the built-in head for SmolLM2-135M-Instruct.
        revision: branch, tag or commit of a Hub repository.
        subfolder: where in the folder or repository the head is, such as "eagle3".
        offline: use only what the local Hub cache holds.
        d2t_form: "offset" (target id = i + d2t[i]), "absolute", or "auto", which tells them apart by the rules of
            `vocab_tools.token_map` and refuses the absolute form.
        tap_layers: overrides what the configuration says; inputs of these decoder layers.

    Raises:
        UsageError: a sub-folder that would lead out, an unknown form, tap layers that are no numbers.
        SourceError: the folder or repository cannot be had, or has no such sub-folder.
        CheckpointError: a damaged, incomplete or unsafe weights file.
        UnsupportedHeadError: a kind of head, or a tensor, that is not converted.
        MismatchError: configuration and tensors disagree, or a map breaks its rules.
    """
    resolved = open_head_source(
        embedded_head() if source is None else source, revision=revision, offline=offline, subfolder=subfolder
    )
    location = str(source or "the built-in head") + (f"/{resolved.subfolder}" if resolved.subfolder else "")
    checkpoint = open_checkpoint(resolved.folder)
    return head_from_checkpoint(
        checkpoint,
        read_config(resolved.folder, location),
        location=location,
        source=resolved,
        d2t_form=d2t_form,
        tap_layers=tap_layers,
    )


def read_config(folder: Path, where: str) -> dict[str, Any]:
    """The head's config.json, with a quantisation that stands in a file of its own (ModelOpt) put where others keep it.

    Raises:
        CheckpointError: config.json is missing or not a JSON object.
    """
    config = _read_object(folder / "config.json", where)
    quantised = folder / "hf_quant_config.json"
    if quantised.is_file():
        algorithms = _read_object(quantised, where).get("quantization")
        # ModelOpt writes the file with a null algorithm beside unquantised heads.
        if isinstance(algorithms, dict) and algorithms.get("quant_algo"):
            config.setdefault("quantization_config", {"quant_algo": algorithms["quant_algo"]})
    return config


def head_from_checkpoint(
    checkpoint: TensorSource,
    config: Mapping[str, Any],
    *,
    location: str,
    source: ResolvedSource | None = None,
    d2t_form: D2tForm = "auto",
    tap_layers: Sequence[int] | None = None,
) -> DraftHead:
    """`open_head` for a checkpoint and configuration that are already open. Raises the same errors."""
    if d2t_form not in get_args(D2tForm):
        raise UsageError(f"d2t_form: expected one of {', '.join(get_args(D2tForm))}, found {d2t_form!r}")
    # The configuration first: an MLA or quantised head is refused by its name rather than by a tensor.
    flat = head_config.normalise_config(config, location)
    table = names.canonical_names(checkpoint.names, location)
    if table.kind == "eagle3" and flat.get("tie_word_embeddings") and names.EMBEDDING in table.stored:
        # Of two tied matrices transformers stores the embedding alone.
        table.stored.setdefault(names.LM_HEAD, table.stored[names.EMBEDDING])
    tensors = LazyTensors(checkpoint, table.stored)
    warnings: list[str] = []
    _check_dtypes(tensors, location)
    if flat["attention_bias"] is None:
        # Qwen2's configuration has no key for it: its layers always have biases of q, k and v.
        flat["attention_bias"] = any(name in tensors for name in names.EAGLE3_ATTENTION_BIASES)
    if flat.get("mlp_bias"):
        # A tensor of that kind is refused by its name, so there is none.
        raise MismatchError(
            f"{location}: mlp_bias is set in config.json, but there are no such biases in the file; vLLM and "
            "TensorRT-LLM would build them and fill them with nothing. Set it to false"
        )
    if table.kind == "eagle":
        if tap_layers is not None:
            raise MismatchError(
                f"{location}: --tap-layers for an EAGLE-1/2 head, which reads the last hidden state alone"
            )
        flat["vocab_size"] = _vocab_size(flat, None, location)
        _check_eagle(tensors, flat, location)
        bias = _nonzero(tensors, names.FC_BIAS)
        if bias:
            warnings.append("fc.bias is not zero: vLLM drops it, so drafts there are worse than elsewhere")
        return DraftHead(
            "eagle", flat, tensors, None, None, tuple(warnings), location, dict(config), source,
            head_config.metadata_target(config), table.dropped,
        )  # fmt: skip

    ids = _map(tensors, flat, location, d2t_form)
    if ids is not None and d2t_form == "auto" and "t2d" not in tensors and np.array_equal(ids, np.arange(len(ids))):
        warnings.append(
            f"d2t is all zero, so the rows are those of the first {len(ids)} ids; a trainer whose map was never set "
            "leaves zeros too, and there is no t2d that shows which it is"
        )
    _check_eagle3(tensors, flat, location, ids, warnings)
    if names.FC_BIAS in tensors:
        if _nonzero(tensors, names.FC_BIAS):
            raise UnsupportedHeadError(
                f"{location}: fc.bias is not zero; EAGLE-3 in vLLM, SafeAILab and LMDeploy has no such bias and would "
                "draft wrongly without an error"
            )
        table.dropped[table.stored[names.FC_BIAS]] = "all zero, and not part of EAGLE-3"
    taps, tap_warning = _taps(flat, tensors, location, tap_layers)
    if tap_layers is not None and taps:
        flat = head_config.with_tap_layers(flat, taps)
    if tap_warning:
        warnings.append(tap_warning)
    kept = {
        name: stored for name, stored in table.stored.items() if name not in names.MAPS and stored not in table.dropped
    }
    return DraftHead(
        "eagle3", flat, LazyTensors(checkpoint, kept), ids, taps, tuple(warnings), location, dict(config), source,
        head_config.metadata_target(config), table.dropped,
    )  # fmt: skip


def with_draft_vocab(head: DraftHead, draft_vocab: int) -> dict[str, Any]:
    """The head's configuration with another `draft_vocab_size`."""
    return head_config.ordered_config({**head.config, "draft_vocab_size": draft_vocab})


def _map(tensors: LazyTensors, config: dict[str, Any], where: str, form: D2tForm) -> NDArray[np.int64] | None:
    """The absolute target id of each LM-head row, or None for the identity. Fills in the vocabulary sizes."""
    d2t = _integers(tensors, "d2t", where)
    t2d = _integers(tensors, "t2d", where)
    vocab = _vocab_size(config, None if t2d is None else len(t2d), where)
    config["vocab_size"] = vocab
    stated = config.get("draft_vocab_size")
    rows = tensors.shape(names.LM_HEAD)[0] if names.LM_HEAD in tensors else None

    # Trainers store the trivial map of a full vocabulary too: zero offsets, every token allowed.
    trivial = (d2t is None or (len(d2t) == vocab and not d2t.any())) and (t2d is None or bool(t2d.all()))
    if trivial:
        if rows is None and stated not in (None, vocab):
            raise MismatchError(
                f"{where}: draft_vocab_size is {stated} of {vocab}, but there is neither lm_head.weight nor d2t; the "
                "rows of such a head cannot be known. Fetch the complete head"
            )
        if rows is not None and rows != vocab:
            raise MismatchError(
                f"{where}: lm_head.weight has {rows} rows for a vocabulary of {vocab} and there is no d2t that says "
                "which tokens they are; fetch the complete head"
            )
        if stated not in (None, vocab):
            raise MismatchError(
                f"{where}: draft_vocab_size: expected {vocab}, the rows of lm_head.weight; found {stated!r}"
            )
        config["draft_vocab_size"] = vocab
        return None

    if rows is None:
        raise MismatchError(
            f"{where}: a map (d2t, t2d) without lm_head.weight: the rows that were trained with it are missing; "
            "fetch the complete head"
        )
    if d2t is None:
        raise MismatchError(
            f"{where}: t2d without d2t: which row of lm_head.weight belongs to which token is not known; "
            "fetch the complete head"
        )
    if len(d2t) != rows or (stated is not None and stated != rows):
        raise MismatchError(
            f"{where}: lm_head.weight has {rows} rows, d2t {len(d2t)} entries, draft_vocab_size is {stated}; "
            "expected three times the same number; "
            + ("correct config.json" if len(d2t) == rows else "the files are of two heads, fetch them again")
        )
    try:
        ids = ids_from_d2t(
            d2t,
            t2d=None if t2d is None else t2d.astype(bool),
            form=None if form == "auto" else form,
            target_vocab=vocab,
        )
    except VocabularyError as error:
        raise MismatchError(f"{where}: {error}") from error
    config["draft_vocab_size"] = rows
    return np.asarray(ids, dtype=np.int64)


def _vocab_size(config: Mapping[str, Any], t2d_length: int | None, where: str) -> int:
    stated = config.get("vocab_size")
    if stated is None and t2d_length is not None:
        return t2d_length
    if not isinstance(stated, int) or stated <= 0:
        raise MismatchError(f"{where}: vocab_size: expected the target's vocabulary size, found {stated!r}")
    if t2d_length is not None and t2d_length != stated:
        raise MismatchError(f"{where}: t2d has {t2d_length} entries, vocab_size is {stated}; expected the same number")
    return stated


def _check_eagle3(
    tensors: LazyTensors,
    config: dict[str, Any],
    where: str,
    ids: NDArray[np.int64] | None,
    warnings: list[str],
) -> None:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    target_hidden = config.get("target_hidden_size") or hidden
    if target_hidden == hidden:
        # Its mere presence stops SafeAILab from loading the target's embedding.
        config.pop("target_hidden_size", None)
    kv_heads, head_dim = config["num_key_value_heads"], config["head_dim"]
    middle = tensors.shape("midlayer.mlp.gate_proj.weight")[0]
    if config.get("intermediate_size") is None:
        config["intermediate_size"] = middle
    if config["intermediate_size"] != middle:
        raise MismatchError(f"{where}: intermediate_size is {config['intermediate_size']}, gate_proj has {middle} rows")
    layer = "midlayer.self_attn."
    expected = {
        f"{layer}q_proj.weight": (heads * head_dim, 2 * hidden),
        f"{layer}k_proj.weight": (kv_heads * head_dim, 2 * hidden),
        f"{layer}v_proj.weight": (kv_heads * head_dim, 2 * hidden),
        f"{layer}o_proj.weight": (hidden, heads * head_dim),
        "midlayer.mlp.gate_proj.weight": (middle, hidden),
        "midlayer.mlp.up_proj.weight": (middle, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, middle),
        "midlayer.input_layernorm.weight": (hidden,),
        "midlayer.hidden_norm.weight": (hidden,),
        "midlayer.post_attention_layernorm.weight": (hidden,),
        "norm.weight": (hidden,),
        names.LM_HEAD: (config["draft_vocab_size"], hidden),
        names.EMBEDDING: (config["vocab_size"], hidden),
        names.FC_BIAS: (hidden,),
        f"{layer}q_proj.bias": (heads * head_dim,),
        f"{layer}k_proj.bias": (kv_heads * head_dim,),
        f"{layer}v_proj.bias": (kv_heads * head_dim,),
        f"{layer}o_proj.bias": (hidden,),
    }
    _check_shapes(tensors, expected, where)
    if target_hidden != hidden and names.EMBEDDING not in tensors:
        raise MismatchError(
            f"{where}: the head's width {hidden} differs from the target's {target_hidden}, so it needs an "
            "embed_tokens.weight of its own, which is missing; fetch the complete head"
        )
    if any(name in tensors for name in names.EAGLE3_ATTENTION_BIASES) and not config.get("attention_bias"):
        raise MismatchError(f"{where}: attention biases in the file, but attention_bias is false in config.json")
    if config.get("attention_bias") and not all(name in tensors for name in names.EAGLE3_ATTENTION_BIASES[:3]):
        raise MismatchError(
            f"{where}: attention_bias is set in config.json, or another bias in the file shows it, but the q, k and v "
            "biases are missing"
        )

    if config.get("num_hidden_layers") not in (None, 1):
        warnings.append(
            f"num_hidden_layers was {config['num_hidden_layers']}; the head has one layer, and 1 is written"
        )
    config["num_hidden_layers"] = 1
    config["tie_word_embeddings"] = False
    if ids is not None and ids.size and not bool(np.all(np.diff(ids) > 0)):
        warnings.append("the map was not in ascending order; rows and map are sorted together")


def _taps(
    config: dict[str, Any], tensors: LazyTensors, where: str, given: Sequence[int] | None
) -> tuple[tuple[int, ...] | None, str | None]:
    hidden = config["hidden_size"]
    target_hidden = config.get("target_hidden_size") or hidden
    if not head_config.uses_aux_layers(config):
        if given is not None:
            raise MismatchError(f"{where}: --tap-layers for a head that reads only the target's last hidden state")
        if names.FC in tensors and tensors.shape(names.FC) != (hidden, target_hidden):
            raise MismatchError(
                f"{where}: fc.weight: expected {[hidden, target_hidden]}, found {list(tensors.shape(names.FC))}"
            )
        return (), None
    if names.FC not in tensors:
        raise CheckpointError(f"{where}: incomplete EAGLE-3 head: fc.weight missing; fetch the checkpoint again")
    taps, warning = head_config.tap_layers(config, None if given is None else _layer_numbers(given), where)
    rows, columns = tensors.shape(names.FC)
    if rows != hidden or columns % target_hidden:
        raise MismatchError(
            f"{where}: fc.weight: expected [{hidden}, taps * {target_hidden}], found {[rows, columns]}; "
            "hidden sizes of head and target disagree"
        )
    count = columns // target_hidden
    stated = config.get("num_aux_hidden_states") or (len(taps) if taps is not None else 3)
    if count != stated or (taps is not None and len(taps) != count):
        raise MismatchError(
            f"{where}: fc.weight takes {count} captured layers, the configuration names {list(taps or ()) or stated}; "
            "expected the same number"
        )
    norms = [name for name in tensors if names.is_fc_norm(name)]
    if norms and sorted(norms) != sorted(f"fc_norm.{index}.weight" for index in range(count)):
        raise MismatchError(f"{where}: expected fc_norm.0 to fc_norm.{count - 1}, found {', '.join(norms)}")
    expected: dict[str, tuple[int, ...]] = dict.fromkeys(norms, (target_hidden,))
    expected["input_norm.weight"] = (columns,)
    _check_shapes(tensors, expected, where)
    _check_norm_flags(config, tensors, where, bool(norms))
    return taps, warning


def _layer_numbers(given: Any) -> tuple[int, ...]:
    try:
        layers = tuple(given)
        if not any(isinstance(layer, bool | np.bool_) for layer in layers):
            return tuple(map(operator.index, layers))
    except TypeError:
        pass
    raise UsageError(f"--tap-layers: expected a list of layer numbers, found {given!r}")


def _check_norm_flags(config: Mapping[str, Any], tensors: LazyTensors, where: str, has_fc_norms: bool) -> None:
    before, each = bool(config.get("norm_before_fc")), bool(config.get("fc_norm"))
    if before != ("input_norm.weight" in tensors):
        raise MismatchError(
            f"{where}: norm_before_fc is {str(before).lower()} in config.json, but input_norm.weight is "
            f"{'missing' if before else 'in the file'}; engines would load it wrongly"
        )
    if each != has_fc_norms:
        raise MismatchError(
            f"{where}: fc_norm is {str(each).lower()} in config.json, but fc_norm.N.weight are "
            f"{'missing' if each else 'in the file'}; engines would load it wrongly"
        )


def _check_eagle(tensors: LazyTensors, config: dict[str, Any], where: str) -> None:
    hidden = config["hidden_size"]
    expected = {
        names.FC: (hidden, 2 * hidden),
        names.FC_BIAS: (hidden,),
        names.EMBEDDING: (config["vocab_size"], hidden),
        "layers.0.self_attn.q_proj.weight": (config["num_attention_heads"] * config["head_dim"], hidden),
    }
    _check_shapes(tensors, expected, where)


def _check_shapes(tensors: LazyTensors, expected: Mapping[str, tuple[int, ...]], where: str) -> None:
    for name, shape in expected.items():
        if name in tensors and tensors.shape(name) != shape:
            raise MismatchError(f"{where}: {name}: expected shape {list(shape)}, found {list(tensors.shape(name))}")


def _check_dtypes(tensors: LazyTensors, where: str) -> None:
    for name in tensors:
        if name not in names.MAPS and str(tensors.dtype(name)) not in _FLOAT_DTYPES:
            raise UnsupportedHeadError(
                f"{where}: {name} is {str(tensors.dtype(name)).removeprefix('torch.')}; expected bfloat16, float16 or "
                "float32 (a quantised head is not converted: convert the unquantised one, then quantise the result)"
            )


def _integers(tensors: LazyTensors, name: str, where: str) -> NDArray[np.int64] | None:
    if name not in tensors:
        return None
    tensor = tensors.get(name)
    if tensor.is_floating_point() or tensor.dim() != 1:
        raise MismatchError(
            f"{where}: {name}: expected a vector of integers, found {tensor.dtype} {list(tensor.shape)}"
        )
    values: NDArray[np.int64] = tensor.numpy().astype(np.int64)
    return values


def _nonzero(tensors: LazyTensors, name: str) -> bool:
    return name in tensors and bool(tensors.get(name).any())


def _read_object(path: Path, where: str) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse_constant)
    except FileNotFoundError:
        raise CheckpointError(
            f"{where}: {path.name} is missing; a head needs its config.json beside the weights"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{where}: {path.name} cannot be read as JSON ({error})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{where}: {path.name}: expected a JSON object, found {type(value).__name__}")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON value")
