"""Load a target in FP8, or one with experts (MXFP4, too), a tensor at a time: no second copy of it is ever made.

transformers builds the model without memory (on the meta device), of the families that the fused forward takes. Each
tensor is read from its safetensors file straight to the device: the files of a model in a float type are quantised
there, a row at one scale; a published checkpoint's values and scales are taken as they are. Norms, biases, embedding
and LM head are in the model's type, and so is every linear layer that a published checkpoint left out.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from math import ceil
from pathlib import Path
from typing import Any

import torch
from eagle_slim.convert.rows.checkpoint import Checkpoint, open_checkpoint
from eagle_slim.convert.rows.files import FLOATS, TORCH_SUFFIXES, choose_weights, list_names, read_index
from eagle_slim.convert.sources.source import target_files
from eagle_slim.vocab_tools.hub import fetch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig

from ..errors import TargetError, UnsupportedModelError
from .expert_loading import WHOLE, Fp8Experts, Mxfp4Experts, expert_parts
from .fp8 import SCALE_BLOCK, Fp8Linear, Fp8Weight, quantise_rows
from .fp8_forms import Fp8Form
from .fused import FAMILIES, family_of
from .mxfp4 import DEQUANTISED, LARGEST_SCALE, SCALED, Mxfp4Weight

_PACKED: tuple[tuple[str, ...], ...] = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)
"""Linear layers of a decoder layer; those that the fused forward multiplies by at once are in one storage."""
MIXTURES = ("qwen3_moe", "gpt_oss")
"""Types of models that are loaded so whatever the type of their weights."""
_MAPPED_BYTES = 1 << 30
"""Tensors that are read while a file is open."""
_SCALES = ("weight_scale", "weight_scale_inv")
_TABLE = "rotary_emb.inv_freq"
UNREAD = ("input_scale", "output_scale", "activation_scale", "q_scale", "k_scale", "v_scale", "kv_scale", _TABLE)
"""Ends of names of tensors that are not used: scales of activations and of the KV cache, and computed tables."""
_TYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
_EMBEDDING, _LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"


def fetch_target(target: str | Path, revision: str | None, offline: bool) -> Path:
    """Return a folder with a target's safetensors files and configurations; a repository's are fetched.

    Raises `TargetError` for weights of another format, and the errors of `target_files`, `choose_weights` and `fetch`.
    """
    source = target_files(target, revision, offline)
    chosen = choose_weights(list(source.files) if source.repo_id else list_names(source.folder), source.label)
    if chosen.removesuffix(".index.json").endswith(TORCH_SUFFIXES):
        raise TargetError(
            f"Target {target}: its weights are in {chosen}; in FP8, or with experts, they are loaded from safetensors "
            "files. Load it once with transformers and write it with save_pretrained, or take another copy of it."
        )
    if source.repo_id:
        fetch(source.snapshot, [chosen], offline)
        if chosen.endswith(".index.json"):
            fetch(source.snapshot, dict.fromkeys(read_index(source.folder / chosen).values()), offline)
    return source.folder


def load_by_tensor(
    folder: Path, config: Any, form: Fp8Form | None, dtype: torch.dtype | None, device: torch.device
) -> nn.Module:
    """Load a target in evaluation mode on a device, its decoder layers' matrices in FP8 if it has a ``form``.

    ``form``: of a published checkpoint, or `AT_LOAD`; ``dtype``: of all else, None: as the embedding is stored. Raises
    `UnsupportedModelError` for another family, `TargetError` for tensors that cannot be, `CheckpointError` for damaged
    files.
    """
    own = copy.deepcopy(config)
    # It is read, and the model that comes is not transformers' quantised one.
    vars(own).pop("quantization_config", None)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(own, dtype=dtype)
    known = [family for family in FAMILIES if family != "GptOss"] if form is not None else FAMILIES
    if family_of(model) not in known:
        problem = f"{type(model).__name__} has no forward for weights in FP8, which {', '.join(known)} have"
        advice = "Take a target of these, or one that is not in FP8 (without target_weights)."
        raise UnsupportedModelError(f"{problem}. {advice}")
    checkpoint = open_checkpoint(folder)
    if dtype is None:
        model.config.dtype = dtype = _TYPES.get(checkpoint.info(_EMBEDDING).dtype, torch.bfloat16)
    loader = _Loader(model, checkpoint, form, dtype, device)
    loader.load()
    # Computed where transformers computes it, so that positions have the same bits.
    with torch.device("cpu"):
        rotary = type(model.model.rotary_emb)(config=model.config)
    model.model.rotary_emb = rotary.to(device)
    model.tie_weights()
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    if loader.has_fp8:
        unused = f", {loader.num_unused} scales of activations and cache not used" if loader.num_unused else ""
        model.packed_note = f"weights in FP8 {form}, activations in {str(dtype).removeprefix('torch.')}{unused}"
    if loader.has_mxfp4:
        model.packed_note = f"experts in MXFP4 as published, all else in {str(dtype).removeprefix('torch.')}"
    loaded: nn.Module = model.eval()
    return loaded


@dataclass(frozen=True)
class _Entry:
    """A tensor that a checkpoint must have, of one of ``shapes`` and of ``dtypes``; ``put`` takes its name, and it."""

    shapes: tuple[tuple[int, ...], ...]
    put: Callable[[str, Tensor], None]
    dtypes: tuple[str, ...] = FLOATS


class _Loader:
    """Places the tensors of a checkpoint in a model on the meta device."""

    def __init__(
        self, model: Any, checkpoint: Checkpoint, form: Fp8Form | None, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.model, self.checkpoint, self.form, self.dtype, self.device = model, checkpoint, form, dtype, device
        self.num_unused, self._method = 0, None if form is None else form.method
        self._strategy = "" if form is None else form.strategy
        self.has_fp8 = self.has_mxfp4 = False
        parameters = model.named_parameters()
        self._entries = {name: _Entry((tuple(each.shape),), self._put_parameter) for name, each in parameters}
        for index, layer in enumerate(model.model.layers):
            prefix, has_experts = f"model.layers.{index}.", hasattr(layer.mlp, "experts")
            for names in (_PACKED[:2] if has_experts else _PACKED) if form is not None else ():
                self._replace(layer, prefix, names)
            if has_experts:
                self._replace_experts(layer.mlp, f"{prefix}mlp.experts")

    def load(self) -> None:
        expected = {*self._entries}
        if missing := sorted(expected.difference(self.checkpoint.names)):
            raise self._wrong(missing[0], f"is missing ({len(missing)} of {len(expected)} tensors are)")
        for name in self.checkpoint.names:
            if name in expected:
                self._check(name)
            elif name.endswith(UNREAD):
                self.num_unused += not name.endswith(_TABLE)
            elif name != _LM_HEAD or not self._is_tied():
                raise self._wrong(name, f"is not a tensor of {type(self.model).__name__} with this configuration")
        for file in self.checkpoint.files:
            for name in sorted(expected.intersection(file.tensors)):
                if self.checkpoint.file_of(name) is not file:
                    raise self._wrong(name, f"is there twice, in {file.path.name}, too")
        for path, names in self._batches(expected):
            with safe_open(path, framework="pt") as opened:
                for name in names:
                    self._entries[name].put(name, opened.get_tensor(name).to(self.device, copy=True))

    def _batches(self, names: set[str]) -> Iterator[tuple[Path, list[str]]]:
        """Yield a file and the tensors to read while it is open: what is mapped counts as memory until it is closed."""
        of_file = {name: self.checkpoint.file_of(name).path for name in names}
        for path, each in groupby(sorted(names, key=lambda name: (of_file[name], name)), of_file.__getitem__):
            batch, size = list[str](), 0
            for name in each:
                size += self.checkpoint.info(name).size_bytes
                if batch and size > _MAPPED_BYTES:
                    yield path, batch
                    batch, size = [], self.checkpoint.info(name).size_bytes
                batch.append(name)
            yield path, batch

    def _replace_experts(self, mlp: Any, path: str) -> None:
        """Have the matrices of each expert, or of all, placed among those of all; ``path``: of the experts."""
        experts = mlp.experts
        if hasattr(experts, "limit"):  # gpt-oss, whose experts are in one tensor
            self._replace_gpt_oss(mlp, path)
            return
        places = {f"{part}.weight": (name, rows) for part, name, rows in expert_parts(experts, path)}
        if any(f"{path}.{name}" in self.checkpoint.names for name in WHOLE):
            if twice := [name for name in places if name in self.checkpoint.names]:
                raise self._wrong(twice[0], f"is there twice: {path} has all experts in one tensor, too")
            places = {f"{path}.{name}": (name, slice(None)) for name in WHOLE}
        in_fp8 = [self.form is not None and self._is_fp8(name) for name in places]
        if not all(in_fp8) and any(in_fp8):
            raise self._wrong([*places][in_fp8.index(True)], f"is in FP8, but not all matrices of {path}")
        whole = {name: getattr(experts, name) for name in WHOLE}
        for name in WHOLE:
            del self._entries[f"{path}.{name}"]
        if any(in_fp8):
            mlp.experts = replaced = Fp8Experts(experts, self._strategy == "block", self.device)
            whole = dict(zip(WHOLE, (replaced.gate_up, replaced.down), strict=True))
        for stored, (name, rows) in places.items():
            weight = whole[name]
            if any(in_fp8):
                self._expect_fp8(stored, Fp8Weight(weight.words[rows], weight.scales[rows]))
            else:
                out = len(range(*rows.indices(weight.shape[0] * weight.shape[1])))
                self._entries[stored] = _Entry(((out, weight.shape[2]),), partial(self._put_rows, experts, name, rows))

    def _replace_gpt_oss(self, mlp: Any, path: str) -> None:
        """Have experts placed as packed if they are stored so; else they are tensors like others."""
        if not any(f"{path}.{name}_blocks" in self.checkpoint.names for name in WHOLE):
            return
        count = mlp.experts.num_experts
        mlp.experts = replaced = Mxfp4Experts(mlp.experts, self.device)
        for name, weight in zip(WHOLE, (replaced.gate_up, replaced.down), strict=True):
            del self._entries[f"{path}.{name}"]
            rows, columns = weight.shape
            scales = count, rows // count, columns // SCALED
            for ending, shape in (("blocks", (*scales, SCALED // 2)), ("scales", scales)):
                self._entries[f"{path}.{name}_{ending}"] = _Entry((shape,), partial(self._put_mxfp4, weight), ("U8",))
        self.has_mxfp4 = True

    def _replace(self, layer: Any, prefix: str, names: tuple[str, ...]) -> None:
        """Replace linear layers that become FP8; matrices multiplied together lie in one storage, row after row."""
        in_fp8 = [self._is_fp8(f"{prefix}{name}.weight") for name in names]
        if not any(in_fp8):
            return
        if not all(in_fp8):
            first = f"{prefix}{names[in_fp8.index(True)]}.weight"
            raise self._wrong(first, f"is in FP8, but not all of {', '.join(names)}, which are multiplied by at once")
        linears = [layer.get_submodule(name) for name in names]
        sizes, columns = [linear.out_features for linear in linears], linears[0].in_features
        groups = ceil(columns / SCALE_BLOCK) if self._strategy == "block" else 1
        if columns % 16:
            problem = f"has {columns} columns, and matrices in FP8 need a multiple of 16"
            raise UnsupportedModelError(f"{type(self.model).__name__}: {prefix}{names[0]} {problem}.")
        words = torch.empty((sum(sizes), columns // 4), dtype=torch.int32, device=self.device)
        scales = torch.empty((sum(sizes), groups), dtype=torch.float32, device=self.device)
        for name, linear, *parts in zip(names, linears, words.split(sizes), scales.split(sizes), strict=True):
            weight = Fp8Weight(*parts)
            parent, _, attribute = name.rpartition(".")
            setattr(layer.get_submodule(parent), attribute, Fp8Linear(weight, linear.bias))
            self._expect_fp8(f"{prefix}{name}.weight", weight)

    def _expect_fp8(self, name: str, weight: Fp8Weight) -> None:
        """Have a matrix, and its scales where a published checkpoint has them, fill a weight in FP8."""
        self.has_fp8 = True
        shape = out, columns = tuple(weight.shape)
        if self._method is None:
            self._entries[name] = _Entry((shape,), partial(self._quantise, weight))
            return
        self._entries[name] = _Entry((shape,), partial(self._put_fp8, weight), ("F8_E4M3",))
        blocks = ceil(out / SCALE_BLOCK), ceil(columns / SCALE_BLOCK)
        shapes: dict[str, tuple[tuple[int, ...], ...]]
        shapes = {"block": (blocks,), "channel": ((out, 1), (out,)), "tensor": ((), (1,))}
        scales = [f"{name.removesuffix('.weight')}.{each}" for each in _SCALES]
        stored = next((each for each in scales if each in self.checkpoint.names), scales[self._method == "fp8"])
        self._entries[stored] = _Entry(shapes[self._strategy], partial(self._put_fp8_scales, weight))

    def _is_fp8(self, name: str) -> bool:
        """Report whether a matrix becomes FP8: all of a model in a float type, of a published one those stored so."""
        is_stored = name in self.checkpoint.names
        return self._method is None or (is_stored and self.checkpoint.info(name).dtype.startswith("F8"))

    def _is_tied(self) -> bool:
        """Report whether the LM head is the embedding; a stored one must then be equal to it."""
        if _LM_HEAD in self._entries:
            return False
        embedding, lm_head = map(self.checkpoint.array, (_EMBEDDING, _LM_HEAD))
        if embedding.shape != lm_head.shape or (embedding != lm_head).any():
            raise self._wrong(_LM_HEAD, f"differs from {_EMBEDDING}, which config.json ties it to")
        return True

    def _check(self, name: str) -> None:
        info, entry = self.checkpoint.info(name), self._entries[name]
        # All experts of a layer below one another, but for the axis between.
        found = info.shape if len(info.shape) < 3 else (info.shape[0] * info.shape[1], *info.shape[2:])
        if info.dtype not in entry.dtypes or not {found, info.shape} & {*entry.shapes}:
            words = " or ".join(str(list(shape)) for shape in entry.shapes)
            raise self._wrong(name, f"is {info.dtype} {list(info.shape)}, expected {' or '.join(entry.dtypes)} {words}")

    def _put_parameter(self, name: str, tensor: Tensor) -> None:
        path, _, attribute = name.rpartition(".")
        kept = nn.Parameter(self._finite(name, tensor.to(self.dtype)), requires_grad=False)
        self.model.get_submodule(path).register_parameter(attribute, kept)

    def _put_rows(self, experts: Any, attribute: str, rows: slice, name: str, tensor: Tensor) -> None:
        """Put a matrix among those of all experts, in the model's type; ``rows``: of all below one another."""
        whole = getattr(experts, attribute)
        if whole.is_meta:
            empty = torch.empty(whole.shape, dtype=self.dtype, device=self.device)
            experts.register_parameter(attribute, whole := nn.Parameter(empty, requires_grad=False))
        whole.data.flatten(0, 1)[rows] = self._finite(name, tensor.to(self.dtype)).view(-1, tensor.shape[-1])

    def _quantise(self, weight: Fp8Weight, name: str, tensor: Tensor) -> None:
        quantised = quantise_rows(self._finite(name, tensor).view(-1, tensor.shape[-1]))
        weight.words.copy_(quantised.words)
        weight.scales.copy_(quantised.scales)

    def _put_fp8(self, weight: Fp8Weight, name: str, tensor: Tensor) -> None:
        # E4M3 has no infinity; its NaN are all ones below the sign.
        if ((tensor.view(torch.uint8) & 0x7F) == 0x7F).any():
            raise self._wrong(name, "holds NaN")
        weight.words.copy_(Fp8Weight.of(tensor.view(-1, tensor.shape[-1]), weight.scales).words)

    def _put_fp8_scales(self, weight: Fp8Weight, name: str, tensor: Tensor) -> None:
        scales = self._finite(name, tensor.float())
        if self._strategy == "block":
            scales = scales.view(-1, scales.shape[-1]).repeat_interleave(SCALE_BLOCK, 0)[: len(weight.scales)]
        weight.scales.copy_(scales.reshape(-1, weight.scales.shape[1]))

    def _put_mxfp4(self, weight: Mxfp4Weight, name: str, tensor: Tensor) -> None:
        is_scales = name.endswith("_scales")
        if is_scales and (tensor > LARGEST_SCALE).any():
            where = self.checkpoint.file_of(name).path
            raise TargetError(f"{where}: {name} has a scale above 2, which is not read here: {DEQUANTISED}.")
        (weight.put_scales if is_scales else weight.put_blocks)(tensor)

    def _finite(self, name: str, tensor: Tensor) -> Tensor:
        if not tensor.isfinite().all():
            raise self._wrong(name, f"holds NaN, infinity, or a number too large for {tensor.dtype}")
        return tensor

    def _wrong(self, name: str, problem: str) -> TargetError:
        is_stored = name in self.checkpoint.names
        where = self.checkpoint.file_of(name).path if is_stored else self.checkpoint.where
        expected = "Expected is the checkpoint of a whole model, as its config.json describes it"
        return TargetError(f"{where}: {name} {problem}. {expected}: fetch it again, or take another copy.")
