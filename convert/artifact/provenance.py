"""Provenance of an artifact: record its source in the manifest, and open the source head again."""

from __future__ import annotations

import json
from typing import Any

from eagle_slim.vocab_tools.vocabulary import DraftVocab

from ..heads.draft_head import DraftHead
from ..heads.open import open_head
from ..rows.dtypes import LONG_NAMES
from ..rows.lm_head import LmHead
from ..sources.builtin import EMBEDDED_HEAD_NAME
from ..sources.source import ResolvedSource, open_head_source
from .manifest import Manifest


def describe_head(source: ResolvedSource, is_builtin: bool, d2t_form: str) -> dict[str, Any]:
    """Describe where a head came from: name, repository, commit, and what was chosen to read it."""
    name = source.repo_id or (EMBEDDED_HEAD_NAME if is_builtin else source.root.resolve().name)
    found = {"name": name, "repo_id": source.repo_id, "revision": source.commit}
    more = {"built_in": is_builtin, "subfolder": source.subfolder, "d2t_form": d2t_form != "auto" and d2t_form}
    return found | {key: value for key, value in more.items() if value}


def describe_lm_head(head: DraftHead, lm_head: LmHead) -> dict[str, Any]:
    """Describe the matrix that the rows come from, and whether they are rounded on the way."""
    found, written = lm_head.info.dtype, lm_head.dtype_written(head)
    return {
        "from": lm_head.origin,
        "tensor": lm_head.name,
        "rows": lm_head.info.num_rows,
        "source_dtype": LONG_NAMES[found],
        "dtype": LONG_NAMES[written],
        "rounded": found != written,
    }


def describe_vocabulary(vocab: DraftVocab) -> dict[str, Any]:
    """Describe how a vocabulary was ranked; its warnings have a list of their own in the manifest."""
    found = {key: value for key, value in vocab.provenance.items() if key != "warnings"}
    if "sources" in found:
        # Counts from memory and from a file differ in the order of their keys alone.
        found["sources"] = json.loads(json.dumps(found["sources"], sort_keys=True))
    return found


def open_original(manifest: Manifest, given: str | None = None, offline: bool = True) -> DraftHead | None:
    """Open the head that an artifact was made from, read as it was then; None where it was a folder and none is given.

    `given` is a folder or repository, of which nothing is fetched with `offline`. Without it, the head is the built-in
    one, or what the Hub's cache holds of the recorded repository at the recorded revision.
    """
    recorded = manifest.head
    name, revision = (recorded.get("repo_id"), recorded.get("revision")) if given is None else (given, None)
    if name is None and not recorded.get("built_in"):
        return None
    source = open_head_source(name, revision, offline or given is None, recorded.get("subfolder"))
    return open_head(source, d2t_form=recorded.get("d2t_form", "auto"), tap_layers=manifest.tap_layers or None)
