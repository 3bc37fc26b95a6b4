"""Load a target in FP8, or one with experts (MXFP4, too), a tensor at a time: no second copy of it is ever made.

transformers builds the model without memory (on the meta device), of the families that the fused forward takes. Each
tensor is read from its safetensors file straight to the device: the files of a model in a float type are quantised
there, a row at one scale; a published checkpoint's values and scales are taken as they are. Norms, biases, embedding
and LM head are in the model's type, and so is every linear layer that a published checkpoint left out.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
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
_MATRICES = (".weight", *WHOLE)
"""Ends of names of matrices, all others among those in FP8 being of scales."""
_MAPPED_BYTES = 1 << 30
"""Tensors that are read while a file is open."""
_SCALES = ("weight_scale", "weight_scale_inv")
_TABLE = "rotary_emb.inv_freq"
UNREAD = ("input_scale", "output_scale", "activation_scale", "q_scale", "k_scale", "v_scale", "kv_scale", _TABLE)
"""Ends of names of tensors that are not used: scales of activations and of the KV cache, and computed tables."""
_Shapes = list[tuple[int, ...]]
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
        raise UnsupportedModelError(
            f"{type(model).__name__} has no forward for weights in FP8, which {', '.join(known)} have. Take a target "
            "of these, or one that is not in FP8 (without target_weights)."
        )
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
    if form is not None and loader.linears:
        unused = f", {loader.num_unused} scales of activations and cache not used" if loader.num_unused else ""
        model.packed_note = f"weights in FP8 {form}, activations in {str(dtype).removeprefix('torch.')}{unused}"
    if loader.packed:
        model.packed_note = f"experts in MXFP4 as published, all else in {str(dtype).removeprefix('torch.')}"
    loaded: nn.Module = model.eval()
    return loaded


class _Loader:
    """Places the tensors of a checkpoint in a model on the meta device."""

    def __init__(
        self, model: Any, checkpoint: Checkpoint, form: Fp8Form | None, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.model, self.checkpoint, self.form, self.dtype, self.device = model, checkpoint, form, dtype, device
        self.num_unused, self._is_published = 0, form is not None and form.method is not None
        self._strategy = "" if form is None else form.strategy
        self.linears: dict[str, Fp8Linear] = {}
        """Layers in FP8, by the names of their weights and scales."""
        self._parts: dict[str, tuple[Any, str, slice]] = {}
        """Of experts in the model's type, by name: their module, its tensor, and their rows there."""
        self.packed: dict[str, tuple[Mxfp4Weight, tuple[int, ...]]] = {}
        """Of experts in MXFP4, by name: the weight, and the shape of what is stored."""
        self._rest = dict(model.named_parameters())
        for index, layer in enumerate(model.model.layers):
            prefix, has_experts = f"model.layers.{index}.", hasattr(layer.mlp, "experts")
            for names in (_PACKED[:2] if has_experts else _PACKED) if form is not None else ():
                self._replace(layer, prefix, names)
            if has_experts:
                self._replace_experts(layer.mlp, f"{prefix}mlp.experts")

    def load(self) -> None:
        """Check all names, shapes and types, then read one tensor after another."""
        expected = {*self._rest, *self.linears, *self._parts, *self.packed}
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
                    self._place(name, opened.get_tensor(name).to(self.device, copy=True))

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
        for name in WHOLE:
            del self._rest[f"{path}.{name}"]
        if not any(in_fp8):
            self._parts |= {stored: (experts, *place) for stored, place in places.items()}
            return
        mlp.experts = replaced = Fp8Experts(experts, self._strategy == "block", self.device)
        weights = dict(zip(WHOLE, (replaced.gate_up, replaced.down), strict=True))
        for stored, (name, rows) in places.items():
            weight = weights[name]
            linear = Fp8Linear(Fp8Weight(weight.words[rows], weight.scales[rows]))
            scale = [self._scale_of(stored.removesuffix(".weight"))] if self._is_published else []
            self.linears |= dict.fromkeys([stored, *scale], linear)

    def _replace_gpt_oss(self, mlp: Any, path: str) -> None:
        """Have experts placed as packed if they are stored so; else they are tensors like others."""
        if not any(f"{path}.{name}_blocks" in self.checkpoint.names for name in WHOLE):
            return
        count = mlp.experts.num_experts
        mlp.experts = replaced = Mxfp4Experts(mlp.experts, self.device)
        for name, weight in zip(WHOLE, (replaced.gate_up, replaced.down), strict=True):
            del self._rest[f"{path}.{name}"]
            rows, columns = weight.shape
            scales = count, rows // count, columns // SCALED
            self.packed[f"{path}.{name}_blocks"] = weight, (*scales, SCALED // 2)
            self.packed[f"{path}.{name}_scales"] = weight, scales

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
        for name, linear, *weight in zip(names, linears, words.split(sizes), scales.split(sizes), strict=True):
            path = f"{prefix}{name}"
            replaced = Fp8Linear(Fp8Weight(*weight), linear.bias)
            parent, _, attribute = name.rpartition(".")
            setattr(layer.get_submodule(parent), attribute, replaced)
            del self._rest[f"{path}.weight"]
            tensors = [f"{path}.weight", *([self._scale_of(path)] if self._is_published else [])]
            self.linears |= dict.fromkeys(tensors, replaced)

    def _is_fp8(self, name: str) -> bool:
        """Report whether a matrix becomes FP8: all of a model in a float type, of a published one those stored so."""
        is_stored = name in self.checkpoint.names
        return not self._is_published or (is_stored and self.checkpoint.info(name).dtype.startswith("F8"))

    def _scale_of(self, path: str) -> str:
        names = [f"{path}.{name}" for name in _SCALES]
        return next((name for name in names if name in self.checkpoint.names), names[0])

    def _is_tied(self) -> bool:
        """Report whether the LM head is the embedding; a stored one must then be equal to it."""
        if _LM_HEAD in self._rest:
            return False
        embedding, lm_head = map(self.checkpoint.array, (_EMBEDDING, _LM_HEAD))
        if embedding.shape != lm_head.shape or (embedding != lm_head).any():
            raise self._wrong(_LM_HEAD, f"differs from {_EMBEDDING}, which config.json ties it to")
        return True

    def _check(self, name: str) -> None:
        """Hold a tensor's shape and type against those expected."""
        info = self.checkpoint.info(name)
        dtypes: tuple[str, ...] = FLOATS
        shape = self._shape_of(name)
        shapes: _Shapes = [shape]
        if name in self.linears and not name.endswith(_MATRICES):
            out, columns = shape
            blocks = ceil(out / SCALE_BLOCK), ceil(columns / SCALE_BLOCK)
            allowed: dict[str, _Shapes] = {"block": [blocks], "channel": [(out, 1), (out,)], "tensor": [(), (1,)]}
            shapes = allowed[self._strategy]
        elif name in self.linears and self._is_published:
            dtypes = ("F8_E4M3",)
        elif name in self.packed:
            dtypes = ("U8",)
        # All experts of a layer below one another, but for the axis between.
        found = info.shape if len(info.shape) < 3 else (info.shape[0] * info.shape[1], *info.shape[2:])
        if info.dtype not in dtypes or not {found, info.shape} & {*shapes}:
            words = " or ".join(str(list(shape)) for shape in shapes)
            raise self._wrong(name, f"is {info.dtype} {list(info.shape)}, expected {' or '.join(dtypes)} {words}")

    def _shape_of(self, name: str) -> tuple[int, ...]:
        if name in self._parts:
            experts, attribute, rows = self._parts[name]
            whole = getattr(experts, attribute)
            return len(range(*rows.indices(whole.shape[0] * whole.shape[1]))), whole.shape[2]
        if name in self.packed:
            return self.packed[name][1]
        return tuple(self._rest[name].shape if name in self._rest else self.linears[name].weight.shape)

    def _place(self, name: str, tensor: Tensor) -> None:
        """Put a tensor into its module: as it is, in the model's type, or quantised."""
        if name in self._parts:
            experts, attribute, rows = self._parts[name]
            whole = getattr(experts, attribute)
            if whole.is_meta:
                empty = torch.empty(whole.shape, dtype=self.dtype, device=self.device)
                experts.register_parameter(attribute, whole := nn.Parameter(empty, requires_grad=False))
            whole.data.flatten(0, 1)[rows] = self._finite(name, tensor.to(self.dtype)).view(-1, tensor.shape[-1])
            return
        if name in self._rest:
            path, _, attribute = name.rpartition(".")
            kept = nn.Parameter(self._finite(name, tensor.to(self.dtype)), requires_grad=False)
            self.model.get_submodule(path).register_parameter(attribute, kept)
            return
        if name in self.packed:
            packed, is_scales = self.packed[name][0], name.endswith("_scales")
            if is_scales and (tensor > LARGEST_SCALE).any():
                where = self.checkpoint.file_of(name).path
                raise TargetError(f"{where}: {name} has a scale above 2, which is not read here: {DEQUANTISED}.")
            (packed.put_scales if is_scales else packed.put_blocks)(tensor)
            return
        linear, tensor = self.linears[name], tensor.flatten(0, -2) if tensor.dim() > 2 else tensor
        if not name.endswith(_MATRICES):
            scales = self._finite(name, tensor.float())
            if self._strategy == "block":
                scales = scales.repeat_interleave(SCALE_BLOCK, 0)[: len(linear.scales)]
            linear.scales.copy_(scales.reshape(-1, linear.scales.shape[1]))
        elif self._is_published:
            # E4M3 has no infinity; its NaN are all ones below the sign.
            if ((tensor.view(torch.uint8) & 0x7F) == 0x7F).any():
                raise self._wrong(name, "holds NaN")
            linear.words.copy_(Fp8Weight.of(tensor, linear.scales).words)
        else:
            weight = quantise_rows(self._finite(name, tensor))
            linear.words.copy_(weight.words)
            linear.scales.copy_(weight.scales)

    def _finite(self, name: str, tensor: Tensor) -> Tensor:
        if not tensor.isfinite().all():
            raise self._wrong(name, f"holds NaN, infinity, or a number too large for {tensor.dtype}")
        return tensor

    def _wrong(self, name: str, problem: str) -> TargetError:
        is_stored = name in self.checkpoint.names
        where = self.checkpoint.file_of(name).path if is_stored else self.checkpoint.where
        return TargetError(
            f"{where}: {name} {problem}. Expected is the checkpoint of a whole model, as its config.json describes it: "
            "fetch it again, or take another copy."
        )
