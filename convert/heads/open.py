"""Open a draft head of any published spelling as one `DraftHead`: canonical names, a flat configuration, absolute ids.

Everything a head's own files can say is checked here; what needs the target is checked where the target is at hand.
Nothing but small tensors (the map) is read when a head is opened.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..artifact.checksums import sha256_file
from ..artifact.manifest import CONFIG_NAME, WEIGHTS_NAME, Manifest
from ..errors import CheckpointError, MismatchError, UnsupportedHeadError
from ..files import read_object
from ..rows.checkpoint import Checkpoint, open_checkpoint
from ..sources.source import ResolvedSource, open_head_source
from . import config as head_config
from . import names
from .check import check_dtypes, check_head_norms, settle_biases, settle_eagle, settle_eagle3, settle_taps
from .dflash import open_dflash
from .draft_head import DraftHead, LazyTensors
from .map import D2tForm, read_map, vocab_size

__all__ = ["D2tForm", "DraftHead", "head_from_checkpoint", "open_head", "read_config"]


def open_head(
    source: str | Path | ResolvedSource | None = None,
    *,
    revision: str | None = None,
    subfolder: str | None = None,
    offline: bool = False,
    d2t_form: D2tForm = "auto",
    tap_layers: Sequence[int] | None = None,
) -> DraftHead:
    """Open a draft head: EAGLE-3 in any spelling, full or with a map, EAGLE-1/2, or a DFlash draft.

    Args:
        source: folder or Hub repository, or what `open_head_source` returned for it; None is the built-in head for
            SmolLM2-135M-Instruct.
        revision: branch, tag or commit of a Hub repository.
        subfolder: where in the folder or repository the head is, such as "eagle3".
        offline: use only what the local Hub cache holds.
        d2t_form: "offset" (target id = i + d2t[i]), "absolute", or "auto", which tells them apart by the rules of
            `vocab_tools.token_map` and refuses the absolute form.
        tap_layers: overrides what the configuration says; inputs of these decoder layers.

    Raises:
        UsageError: a sub-folder that would lead out.
        SourceError: the folder or repository cannot be had, or has no such sub-folder.
        CheckpointError: a damaged, incomplete or unsafe weights file.
        UnsupportedHeadError: a kind of head, or a tensor, that is not converted.
        MismatchError: configuration and tensors disagree, or a map breaks its rules.
    """
    if not isinstance(source, ResolvedSource):
        source = open_head_source(source, revision=revision, offline=offline, subfolder=subfolder)
    # A draft of another kind is called by its name even where its weights have unusual ones.
    config = read_config(source.folder, source.name, source.manifest)
    head_config.refuse_foreign(config, source.name)
    checkpoint = open_checkpoint(source.folder, weights_file=source.weights_file)
    if source.manifest is not None and source.weights_file in ("", WEIGHTS_NAME):
        recorded = source.manifest.files.get(WEIGHTS_NAME, {})
        checkpoint.expect(recorded.get("header_sha256", ""), recorded.get("tensors", {}))
    return head_from_checkpoint(
        checkpoint,
        config,
        location=source.name,
        source=source,
        d2t_form=d2t_form,
        tap_layers=tap_layers,
    )


def read_config(folder: Path, where: str, manifest: Manifest | None = None) -> dict[str, Any]:
    """Read a head's config.json, held against the manifest beside it, if there is one.

    A quantisation that ModelOpt keeps in a file of its own is put where others keep it.
    """
    path = folder / CONFIG_NAME
    config = read_object(path, CheckpointError, where)
    if manifest is not None and sha256_file(path) != manifest.files.get(CONFIG_NAME, {}).get("sha256"):
        problem = f"{CONFIG_NAME} is not as the manifest beside it records.\nConvert the head again."
        raise CheckpointError.at(where, problem)
    quantised = folder / "hf_quant_config.json"
    if quantised.exists():
        found = read_object(quantised, CheckpointError, where)
        # ModelOpt writes the file with a null algorithm beside unquantised heads.
        if head_config.quantisation(found) is not None:
            config["quantization_config"] = found
    return config


def head_from_checkpoint(
    checkpoint: Checkpoint,
    config: Mapping[str, Any],
    *,
    location: str,
    source: ResolvedSource | None = None,
    d2t_form: D2tForm = "auto",
    tap_layers: Sequence[int] | None = None,
) -> DraftHead:
    """`open_head` for a checkpoint and configuration that are already open. Raises the same errors."""
    names.refuse_others(checkpoint.names, location)
    if names.is_dflash(checkpoint.names) or head_config.is_dflash(config):
        return open_dflash(checkpoint, config, location, source, d2t_form, tap_layers)
    # The configuration first: an MLA or quantised head is refused by its name rather than by a tensor.
    flat = head_config.normalise_config(config, location)
    table = names.canonical_names(checkpoint.names, location)
    if table.kind == "eagle3" and flat.get("tie_word_embeddings") and names.EMBEDDING in table.stored:
        # Of two tied matrices transformers stores the embedding alone.
        table.stored.setdefault(names.LM_HEAD, table.stored[names.EMBEDDING])
    tensors = LazyTensors(checkpoint, table.stored)
    check_dtypes(tensors, location)
    check_head_norms(tensors, table.kind, head_config.says_qwen3(config), location)
    settle_biases(tensors, flat, table.kind, location)
    ids, taps, warnings = None, None, list[str]()
    if table.kind == "eagle3":
        ids, taps, warnings = _eagle3(tensors, flat, location, d2t_form, tap_layers)
    elif tap_layers is not None:
        problem = "--tap-layers for an EAGLE-1/2 head, which reads the last hidden state alone.\nLeave the option out."
        raise MismatchError.at(location, problem)
    else:
        flat["vocab_size"] = vocab_size(flat, None, location)
        settle_eagle(tensors, flat, location)
    if table.kind == "eagle3" and names.FC_BIAS in tensors:
        table.dropped[table.stored[names.FC_BIAS]] = "all zero, and not part of EAGLE-3"
    kept = {
        name: stored
        for name, stored in table.stored.items()
        if table.kind == "eagle" or (name not in names.MAPS and stored not in table.dropped)
    }
    return DraftHead(
        kind=table.kind,
        config=flat,
        tensors=LazyTensors(checkpoint, kept),
        draft_ids_to_target=ids,
        tap_layers=taps,
        warnings=tuple(warnings),
        location=location,
        source_config=dict(config),
        source=source,
        target_name=head_config.metadata_target(config),
        dropped=table.dropped,
    )


def _eagle3(
    tensors: LazyTensors, config: dict[str, Any], where: str, d2t_form: D2tForm, given_taps: Sequence[int] | None
) -> tuple[NDArray[np.int64] | None, tuple[int, ...] | None, list[str]]:
    """Settle map, taps and configuration of an EAGLE-3 head; returns ids [draft_vocab], tap layers and warnings."""
    warnings = []
    ids = read_map(tensors, config, where, d2t_form)
    if ids is not None and d2t_form == "auto" and "t2d" not in tensors and np.array_equal(ids, np.arange(len(ids))):
        warnings.append(
            f"d2t is all zero, so the rows are those of the first {len(ids)} ids; a trainer whose map was never set "
            "leaves zeros too, and there is no t2d that shows which it is"
        )
    warnings += settle_eagle3(tensors, config, where)
    if config.get(head_config.EMBEDDING_TRAINED_KEY) and names.EMBEDDING not in tensors:
        warnings.append(
            f"{head_config.EMBEDDING_TRAINED_KEY} says that the embedding was trained, but the file has none: the "
            "target's is used, so fewer drafts may be accepted"
        )
    if ids is not None and ids.size and not bool(np.all(np.diff(ids) > 0)):
        warnings.append("the map was not in ascending order; rows and map are sorted together")
    if tensors.is_nonzero(names.FC_BIAS):
        raise UnsupportedHeadError.at(
            where,
            "fc.bias is not zero; EAGLE-3 in vLLM, SafeAILab and LMDeploy has no such bias and would draft "
            "wrongly without an error.\nSGLang and TensorRT-LLM serve it as it is, with bias: true in config.json; "
            "only a head without it is converted.",
        )
    taps = settle_taps(config, tensors, where, given_taps)
    if given_taps is not None and taps:
        written = head_config.with_tap_layers(config, taps)
        config.clear()
        config.update(written)
    return ids, taps, warnings
