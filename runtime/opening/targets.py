"""Open a target: its configuration is read and checked, its weights are loaded when it is paired with a head."""

from __future__ import annotations

from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from ..compiling.pool import pool_for
from ..errors import TargetError, UsageError, check_choice, misfit
from ..settings import explain_unknown
from ..target.fp8_forms import Fp8Form
from ..target.location import given_target
from ..target.wrapper import check_supported
from .devices import choose_device, read_dtype
from .target_files import check_target_weights, choose_form, load_target, load_target_config, load_tokenizer_and_hash


@dataclass(frozen=True)
class OpenedTarget:
    """A target ready to be paired: files whose configuration was read, or a loaded ``model``."""

    config: Any
    device: torch.device
    dtype: torch.dtype | None
    """None: that of the files."""
    backend: str = "auto"
    model: nn.Module | None = None
    location: str | Path = ""
    """Folder or repository; empty for a loaded model."""
    revision: str | None = None
    offline: bool = False
    form: Fp8Form | None = None
    name: str | None = None
    """Repository, or name of the folder, for reports; None: as the head says."""

    def __str__(self) -> str:
        return type(self.model).__name__ if self.model is not None else str(self.location)

    def load(self) -> nn.Module:
        """Load the weights, unless they are. Raises as `load_target` does."""
        if self.model is not None:
            return self.model
        return load_target(self.location, self.dtype, self.device, self.revision, self.offline, self.config, self.form)

    def load_tokenizer(self, is_needed: bool = True) -> tuple[Any | None, str | None]:
        """Load the tokenizer beside the weights, if it is needed, and its hash, None where there is none.

        Raises `TokenizerError`, and `TargetError` where transformers cannot load one that is needed.
        """
        if self.model is None:
            with nullcontext() if is_needed else suppress(TargetError):
                return load_tokenizer_and_hash(self.location, self.revision, self.offline, is_needed)
        return None, None


@explain_unknown({})
def open_target(
    target: str | Path | nn.Module,
    *,
    dtype: torch.dtype | str = "auto",
    device: torch.device | str | None = None,
    target_weights: str = "auto",
    target_backend: str = "auto",
    revision: str | None = None,
    offline: bool = False,
) -> OpenedTarget:
    """Open a target to be paired with a head; weights are not loaded yet.

    Args:
        target: Hub id, folder, or a loaded transformers model, which stays as it is, where it is.
        dtype, device, target_weights, revision, offline: as in `SpeculativeModel.from_pretrained`.
        target_backend: "fused" (our own forward, of classes that it knows), "transformers" (the model's), or "auto":
            fused on a GPU where the model is exactly of a class that it knows.

    Raises `UsageError` for an option that cannot be, and where no such folder is; `TargetError` without a
    configuration, and for weights that cannot run here; `UnsupportedModelError` for a loaded model that cannot verify
    trees.
    """
    if transformers.__version__.startswith("4."):
        problem = f"SpeculativeModel needs transformers 5.0 or later, found {transformers.__version__}"
        raise UsageError(f"{problem}. An older one serves patches of SafeAILab's EaModel alone (patch_eagle_model).")
    if not isinstance(offline, bool):
        raise misfit("offline", "True or False", offline)
    check_choice("target_backend", target_backend, ("auto", "fused", "transformers"))
    place, wanted = read_place(target, dtype, device, target_weights)
    if compiler := pool_for(place):
        compiler.prepare()
    if isinstance(target, nn.Module):
        if revision is not None:
            raise UsageError(f"revision = {revision!r}, but the target is loaded already. Leave revision out.")
        return OpenedTarget(target.config, place, wanted, target_backend, target, offline=offline)
    location = given_target(target, offline, revision)
    config = load_target_config(location, revision, offline)
    form = choose_form(location, config, target_weights, wanted, place, revision, offline)
    name = Path(target).resolve().name if Path(target).is_dir() else str(target)
    return OpenedTarget(config, place, wanted, target_backend, None, location, revision, offline, form, name)


def read_place(
    target: object, dtype: torch.dtype | str, device: torch.device | str | None, target_weights: str
) -> tuple[torch.device, torch.dtype | None]:
    """Read device and type of a target before it is opened; type None: that of its files. Raises as `open_target`."""
    wanted = read_dtype(dtype)
    if isinstance(target, nn.Module):
        check_supported(target)
        weight = next(target.parameters())
        if wanted not in (None, weight.dtype):
            raise UsageError(f"dtype = {wanted}, but the loaded target is in {weight.dtype}. Leave dtype out.")
        place = weight.device if device is None else choose_device(device)
        if place.type != weight.device.type or place.index not in (None, weight.device.index):
            problem = f"but the loaded target is on {weight.device}. Leave device out."
            raise UsageError(f"device = {str(device)!r}, {problem}")
        place, wanted = weight.device, weight.dtype
    elif target is None or isinstance(target, (str, Path)):
        place = choose_device(device)
    else:
        raise misfit("target", "a folder, the name of a Hub repository, or a loaded one", target)
    check_target_weights(target_weights, isinstance(target, nn.Module), place, wanted)
    return place, wanted
