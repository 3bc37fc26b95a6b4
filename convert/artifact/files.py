"""Names of an artifact's files, and the token map among them, `freq_N.pt`."""

from __future__ import annotations

import io
import pickle
import zipfile

import numpy as np
from numpy.typing import NDArray

MANIFEST_NAME = "eagle_slim.json"
WEIGHTS_NAME = "model.safetensors"
CONFIG_NAME = "config.json"
CARD_NAME = "README.md"
FILE_NAMES = r"(config|eagle_slim)\.json|model\.safetensors|README\.md|freq_\d+\.pt|model-\w+\.gguf"
"""Pattern of the names that a conversion writes."""


def freq_name(draft_vocab: int) -> str:
    """Name the token map with `draft_vocab` ids, as FR-Spec does."""
    return f"freq_{draft_vocab}.pt"


def freq_bytes(rank_order_ids: NDArray[np.int64]) -> bytes:
    """Write a token map as SGLang and FR-Spec read it with `torch.load`: a list[int] in rank order.

    The archive of `torch.save`, whose import takes longer than many a conversion, with a fixed name and time.
    Format: `torch/serialization.py`, `_save`; `caffe2/serialize/inline_container.h`.
    """
    pickled = pickle.dumps([int(token_id) for token_id in rank_order_ids], protocol=2)
    records = {"data.pkl": pickled, "byteorder": b"little", "version": b"3\n"}
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, data in records.items():
            archive.writestr(zipfile.ZipInfo(f"archive/{name}"), data)
    return buffer.getvalue()
