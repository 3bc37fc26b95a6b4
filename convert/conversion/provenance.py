"""How an artifact was made, for its manifest: head, target, LM head, tokenizer, vocabulary, and what was read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

from eagle_slim.vocab_tools.coverage import CoverageReport
from eagle_slim.vocab_tools.tokenizer.tokenizer import LoadedTokenizer
from eagle_slim.vocab_tools.vocabulary import DraftVocab

from ..engines import Finding, in_words
from ..head import names
from ..head.draft_head import DraftHead
from ..manifest import Manifest
from ..rows.dtypes import LONG_NAMES
from ..rows.lm_head import LmHead
from ..rows.types import FileRecord
from ..sources.builtin import EMBEDDED_HEAD_NAME
from .inputs import Inputs
from .target import RECORDED
from .vocab_choice import Ranking, ranked_manifest

NOT_COMPARED = "the target was not at hand: the head was not compared with it"


def manifest_of(
    inputs: Inputs,
    head: DraftHead,
    lm_head: LmHead | None,
    ranking: Ranking | None,
    vocab: DraftVocab | None,
    measured: tuple[CoverageReport, str] | None,
    findings: Sequence[Finding],
) -> Manifest:
    """The manifest as far as it is known before anything is written: without `files` and `row_checksums`."""
    tokenizer = _tokenizer(inputs.tokenizer)
    if tokenizer is None and ranking is not None and ranking.recorded_tokenizer is not None:
        tokenizer = dict(ranking.recorded_tokenizer)
    warnings = [*head.warnings, *(lm_head.warnings if lm_head is not None else ())]
    if vocab is not None:
        warnings += vocab.warnings
        if tokenizer is None:
            warnings.append("no tokenizer was at hand: end-of-turn and other needed tokens were not looked for")
    if measured is not None:
        warnings += measured[0].warnings
    if inputs.target is None:
        # That of an artifact was at hand when the artifact was made, or this stands among its warnings.
        ranked = ranked_manifest(head)
        if ranked is None or NOT_COMPARED in ranked.warnings:
            warnings.append(NOT_COMPARED)
    warnings += in_words(findings)
    return Manifest(
        kind=head.kind,
        flavour=inputs.options.flavour,
        tool={"name": "eagle-slim", "version": version("eagle-slim")},
        draft_vocab=head.target_vocab if vocab is None else len(vocab),
        target_vocab=head.target_vocab,
        num_forced=0 if vocab is None else vocab.num_forced,
        rank_order_ids=None if vocab is None else vocab.target_ids,
        row_checksums=None,
        head=_head(inputs),
        target=_target(inputs),
        lm_head=None if lm_head is None else _lm_head(head, lm_head),
        tokenizer=tokenizer,
        vocabulary=None if vocab is None else _vocabulary(vocab),
        tap_layers=head.tap_layers,
        coverage=None
        if measured is None
        else {**measured[0].to_json(), "shown": list(measured[0].shown), "note": measured[1]},
        dropped=_dropped(head),
        warnings=tuple(warnings),
    )


def what_was_read(manifest: Manifest, head: DraftHead, lm_head: LmHead | None) -> dict[str, Any]:
    """The parts of the manifest that are known only when everything has been read."""
    found = {"head": {**manifest.head, "files": _records(head.tensors.source.files)}}
    if lm_head is not None and lm_head.origin == "target":
        records = [{**record, "name": lm_head.file} for record in _records(lm_head.checkpoint.files)]
        found["target"] = {**manifest.target, "files": records}
    return found


def _head(inputs: Inputs) -> dict[str, Any]:
    source = inputs.source
    name = source.repo_id or (EMBEDDED_HEAD_NAME if inputs.is_builtin else source.root.resolve().name)
    found = {"name": name, "repo_id": source.repo_id, "revision": source.commit}
    if source.subfolder:
        found["subfolder"] = source.subfolder
    if source.weights_file:
        found["weights_file"] = source.weights_file
    return found if inputs.options.d2t_form == "auto" else {**found, "d2t_form": inputs.options.d2t_form}


def _target(inputs: Inputs) -> dict[str, Any]:
    if inputs.target is not None:
        config = inputs.target.config
        sizes = {key: config[key] for key in ("hidden_size", "num_hidden_layers", "vocab_size") if key in config}
        return {**inputs.target.provenance, **sizes}
    if inputs.choice is not None and inputs.choice.reason == RECORDED:
        assert inputs.source.manifest is not None
        return {key: value for key, value in inputs.source.manifest.target.items() if key != "files"}
    return {"repo_id": None if inputs.choice is None else inputs.choice.name, "revision": None}


def _lm_head(head: DraftHead, lm_head: LmHead) -> dict[str, Any]:
    found, written = lm_head.dtype_name, lm_head.dtype_written(head)
    return {
        "from": lm_head.origin,
        "tensor": lm_head.name,
        "rows": lm_head.shape[0],
        "source_dtype": LONG_NAMES[found],
        "dtype": LONG_NAMES[written],
        "rounded": found != written,
    }


def _vocabulary(vocab: DraftVocab) -> dict[str, Any]:
    """The ranking's provenance; counts from memory and from a file differ in nothing but the order of their keys."""
    found = dict(vocab.provenance)
    if "sources" in found:
        found["sources"] = json.loads(json.dumps(found["sources"], sort_keys=True))
    # Warnings have a list of their own in the manifest.
    return {key: value for key, value in found.items() if key != "warnings"}


def _tokenizer(tokenizer: LoadedTokenizer | None) -> dict[str, Any] | None:
    if tokenizer is None:
        return None
    return {
        "hash": tokenizer.tokenizer_hash,
        "chat_template_hash": tokenizer.chat_template_hash,
        "vocab_size": tokenizer.vocab_size,
        "tokens": len(tokenizer.real_ids),
    }


def _dropped(head: DraftHead) -> dict[str, str]:
    dropped = dict(head.dropped)
    if head.kind == "eagle3" and names.EMBEDDING in head.tensors and not head.has_own_embedding:
        dropped[head.tensors.stored[names.EMBEDDING]] = "every engine shares the target's embedding"
    return dict(sorted(dropped.items()))


def _records(files: Sequence[FileRecord]) -> list[dict[str, Any]]:
    """What was read of each file, JSON-ready; files of which nothing was read are left out."""
    return [
        {"name": file.path.name, "size_bytes": file.size_bytes, "reads": [asdict(read) for read in file.reads]}
        for file in files
        if file.reads
    ]
