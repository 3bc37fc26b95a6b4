"""GGUF files for llama.cpp: of a conversion, and of an artifact that exists."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from eagle_slim.vocab_tools.errors import UsageError
from eagle_slim.vocab_tools.tokenizer.tokenizer import LoadedTokenizer

from ..artifact.gguf_file import GgufChoice, GgufType, check_widths, gguf_name, write_gguf
from ..artifact.gguf_layout import gguf_layout
from ..artifact.manifest import Manifest
from ..engines.facts import HeadFacts
from ..engines.registry import check_engine
from ..errors import MismatchError, UnsupportedHeadError
from ..head.config import default_taps
from ..head.draft_head import DraftHead
from ..head.open import open_head
from ..sources import target as targets

GgufRequest = GgufType | Literal["auto"]

_TYPE_OF: dict[str, GgufType] = {"BF16": "bf16", "F16": "f16", "F32": "f32"}


def choose_gguf(
    head: DraftHead, kinds: Sequence[GgufRequest], target: targets.Target | None, tokenizer: LoadedTokenizer | None
) -> GgufChoice:
    """The GGUF files of a head, once it is certain that llama.cpp can serve it; a kind "auto" is the head's own type.

    Raises:
        UnsupportedHeadError: it cannot, with the reason.
        MismatchError: a type does not divide the rows of a matrix, or config.json of a DFlash draft says too little.
        UsageError: the target or its tokenizer is not known.
    """
    layers = None if target is None else target.num_layers
    errors = [
        finding
        for finding in check_engine(HeadFacts.of(head, target_layers=layers), "llama.cpp")
        if finding.severity == "error"
    ]
    if errors:
        raise UnsupportedHeadError.at(
            head.location, f"no GGUF can be written.\n{'; '.join(map(str, errors))}.", option="--gguf"
        )
    types = tuple(dict.fromkeys(_TYPE_OF[head.dtype_name] if kind == "auto" else kind for kind in kinds))
    for kind in types:
        check_widths(head, kind)
    if tokenizer is None:
        raise UsageError(
            "--gguf: the file holds the target's tokens, and no tokenizer is at hand.\nName the target with --target, "
            "or its tokenizer with --tokenizer.",
            option="--gguf",
        )
    taps = head.tap_layers
    if head.kind == "dflash":
        _check_dflash(head, target)
    if taps is None:
        if layers is None:
            raise UsageError(
                "--gguf: the file names the captured layers, (2, n // 2, n - 3) of n, and how many layers the target "
                "has is not known.\nName it with --target, or the layers with --tap-layers.",
                option="--gguf",
            )
        taps = default_taps(layers)
    return GgufChoice(types, taps, tokenizer)


def _check_dflash(head: DraftHead, target: targets.Target | None) -> None:
    """Refuse what is seen only when the file is laid out, before anything is written."""
    gguf_layout(head)
    if head.tap_layers is None:
        raise MismatchError.at(
            head.location,
            "target_layer_ids: expected the captured layers, found none.\nWrite them into config.json.",
            key="target_layer_ids",
        )
    family = "" if target is None else str(target.config.get("model_type"))
    if family.startswith("gemma"):
        raise UnsupportedHeadError.at(
            head.location,
            f"no GGUF can be written: the embedding of {family}, which the draft borrows, is scaled, and that is not "
            "written for llama.cpp.\nServe the draft with vLLM.",
            option="--gguf",
            found=family,
        )


def gguf_writer(choice: GgufChoice, name: str) -> Callable[[Path], dict[str, Any]]:
    """A function that writes GGUF files beside an artifact's other files, and returns the manifest's entries."""

    def write(folder: Path) -> dict[str, Any]:
        head = open_head(folder)
        return {gguf_name(kind): write_gguf(folder, head, kind, choice, name) for kind in choice.kinds}

    return write


def gguf_title(manifest: Manifest) -> str:
    """Name of the head in its GGUF files: that of the original, and the rows of its LM head."""
    return f"{manifest.head['name']} v{manifest.draft_vocab}"
