"""Open a draft head of any published spelling as one `DraftHead`: canonical names, a flat configuration, absolute ids.

A head's own files are checked here, and only small tensors (the map) are read; whether it fits its target is checked
where the target is at hand.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from eagle_slim.vocab_tools.files import read_object

from ..artifact.checksums import sha256_file
from ..artifact.manifest import CONFIG_NAME, WEIGHTS_NAME, Manifest
from ..errors import CheckpointError, MismatchError
from ..rows.checkpoint import Checkpoint, open_checkpoint
from ..sources.source import ResolvedSource, open_head_source
from . import config as head_config
from . import names
from .check import check_dtypes, check_eagle, check_eagle3, settle_taps
from .dflash import checked_part, refuse_mask_embedding, settle_dflash
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
    checkpoint = open_checkpoint(source.folder)
    if source.manifest is not None:
        recorded = source.manifest.files.get(WEIGHTS_NAME, {})
        checkpoint.expect(recorded.get("header_sha256", ""), recorded.get("tensors", {}))
    head = head_from_checkpoint(checkpoint, config, source.name, d2t_form=d2t_form, tap_layers=tap_layers)
    if head.kind == "dflash":
        refuse_mask_embedding(source)
    return replace(head, source=source)


def read_config(folder: Path, where: str, manifest: Manifest | None = None) -> dict[str, Any]:
    """Read a head's config.json, held against the manifest beside it, if there is one.

    A quantisation that ModelOpt keeps in a file of its own is put where others keep it.
    """
    path = folder / CONFIG_NAME
    config = read_object(path, CheckpointError)
    if manifest is not None and sha256_file(path) != manifest.files.get(CONFIG_NAME, {}).get("sha256"):
        problem = f"{CONFIG_NAME} is not as the manifest beside it records.\nConvert the head again."
        raise CheckpointError.at(where, problem)
    quantised = folder / "hf_quant_config.json"
    if quantised.exists():
        found = read_object(quantised, CheckpointError)
        # ModelOpt writes the file with a null algorithm beside unquantised heads.
        if head_config.quantisation(found) is not None:
            config["quantization_config"] = found
    return config


def head_from_checkpoint(
    checkpoint: Checkpoint,
    config: Mapping[str, Any],
    location: str,
    *,
    d2t_form: D2tForm = "auto",
    tap_layers: Sequence[int] | None = None,
) -> DraftHead:
    """Open a head, without its source, from an open checkpoint and its configuration; raises as `open_head`."""
    head_config.refuse_foreign(config, location)
    is_dflash = head_config.is_dflash(config)
    table = names.canonical_names(checkpoint.names, location, is_dflash=is_dflash)
    if table.kind == "dflash" and not is_dflash:
        raise names.other_draft("dflash", location)
    flat = head_config.normalise_config(checked_part(config) if is_dflash else config, location)
    if table.kind == "eagle3" and flat.get("tie_word_embeddings") and names.EMBEDDING in table.stored:
        # Of two tied matrices transformers stores the embedding alone.
        table.stored.setdefault(names.LM_HEAD, table.stored[names.EMBEDDING])
    tensors = LazyTensors(checkpoint, table.stored)
    check_dtypes(tensors, location)
    ids, taps, warnings = None, None, list[str]()
    if table.kind == "eagle":
        if tap_layers is not None:
            problem = "--tap-layers for an EAGLE-1/2 head, which reads the last hidden state alone."
            raise MismatchError.at(location, f"{problem}\nLeave the option out.")
        flat["vocab_size"] = vocab_size(flat, None, location)
        check_eagle(tensors, flat, location)
    else:
        ids = read_map(tensors, flat, location, d2t_form)
        if ids is not None and not bool(np.all(np.diff(ids) > 0)):
            warnings.append("the map was not in ascending order; rows and map are sorted together")
    if table.kind == "dflash":
        taps = settle_dflash(tensors, flat, config, location, tap_layers)
    if table.kind == "eagle3":
        warnings += check_eagle3(tensors, flat, location)
        if d2t_form == "auto" and ids is not None and "t2d" not in tensors and (ids == np.arange(len(ids))).all():
            warnings.append(
                f"d2t is all zero, so the rows are those of the first {len(ids)} ids; a trainer whose map was never "
                "set leaves zeros too, and there is no t2d that shows which it is"
            )
        if names.FC_BIAS in tensors:
            table.dropped[table.stored[names.FC_BIAS]] = "all zero, and not part of EAGLE-3"
        taps = settle_taps(tensors, flat, location, tap_layers)
        if tap_layers is not None and taps:
            flat = head_config.with_tap_layers(flat, taps)
    kept = {name: at for name, at in table.stored.items() if name not in names.MAPS and at not in table.dropped}
    return DraftHead(
        kind=table.kind,
        config=flat,
        tensors=LazyTensors(checkpoint, kept),
        draft_ids_to_target=ids,
        tap_layers=taps,
        warnings=tuple(warnings),
        location=location,
        source_config=dict(config),
        target_name=head_config.metadata_target(config),
        dropped=table.dropped,
    )
