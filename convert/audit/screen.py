"""Checks of the screen of an artifact; none where it has none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..head import names
from ..head.screen_file import DOWN, PROJECT, ROWS, SCREEN_NAME, open_screen_file
from ..rows.checkpoint import Checkpoint
from ..rows.dtypes import rounded
from ..rows.safetensors_file import SafetensorsFile
from .findings import Findings, all_finite, join, needed, refuse, written_otherwise
from .source import SourceChecks

# Rows are rounded to at worst bfloat16, and sums of float32 differ by far less from one processor to another.
_TOLERANCE = 2.0**-7


@dataclass
class ScreenChecks:
    """The fifth group; `source` knows what the artifact was made from."""

    found: Findings
    source: SourceChecks
    _file: SafetensorsFile | None = None

    def all(self) -> Iterator[tuple[str, Callable[[], str]]]:
        """Name and function of each check, in order."""
        if self.found.manifest is not None and SCREEN_NAME in self.found.manifest.files:
            yield "screen", self.layout
            yield "screen: checksums", self.checksums
            yield "screen: rows", self.rows

    def layout(self) -> str:
        """The file has the tensors that it should have, and was made for this head and vocabulary."""
        self._file = open_screen_file(self.found.folder, self.found.need_head(str(self.found.folder)))
        told = self._file.header.metadata
        return f"rank {told['rank']} over {told['draft_vocab_size']} rows, {self._file.size_bytes:,} bytes"

    def checksums(self) -> str:
        """Size, header and tensors are those that the manifest records, and finite."""
        file, checkpoint = self._need_file(), self._checkpoint
        problems = written_otherwise(file, self.found.need_manifest().files[SCREEN_NAME], checkpoint.sha256)
        problems += [f"NaN or infinity in {name}" for name in file.tensors if not all_finite(checkpoint, name)]
        join(problems)
        return f"header and {len(file.tensors)} tensors"

    def rows(self) -> str:
        """Its rows are those of the LM head, projected, and its two factors fit each other."""
        project, down = self._floats(PROJECT), self._floats(DOWN)
        off = float(np.abs(down @ project - np.eye(len(down), dtype=np.float32)).max())
        refuse(off > _TOLERANCE, f"{DOWN} times {PROJECT} is {off:.3g} off the identity that it should be")
        pieces, dtype = self._lm_head_rows()
        dtype_here, start, wrong = self._need_file().tensors[ROWS].dtype, 0, []
        written = self._checkpoint.raw(ROWS)
        for piece in pieces:
            expected = _floats(piece, dtype) @ project
            mine = _floats(written[start : start + len(piece)], dtype_here)
            apart = np.abs(mine - expected).max(1) > _TOLERANCE * np.abs(expected).max(1)
            wrong += (start + np.flatnonzero(apart)).tolist()
            start += len(piece)
        if wrong:
            refuse(True, f"{len(wrong)} rows are not those of the LM head, projected; the first is row {wrong[0]}")
        return f"{start} rows are those of the LM head, projected"

    def _lm_head_rows(self) -> tuple[Iterator[NDArray[np.uint8]], str]:
        """The LM-head rows that are screened, piece by piece as uint8 [n, row_bytes], and their dtype."""
        if self.found.need_manifest().kind == "eagle":
            gathered, _ = self.source.gather(np.arange(self.found.need_manifest().target_vocab))
            return gathered.chunks(), gathered.dtype
        return self.found.checkpoint.pieces(names.LM_HEAD), self.found.need_weights().tensors[names.LM_HEAD].dtype

    def _floats(self, name: str) -> NDArray[np.float32]:
        return _floats(self._checkpoint.raw(name), self._need_file().tensors[name].dtype)

    def _need_file(self) -> SafetensorsFile:
        return needed(self._file, f"{SCREEN_NAME} could not be read")

    @property
    def _checkpoint(self) -> Checkpoint:
        return Checkpoint.of(self._need_file())


def _floats(raw: NDArray[np.uint8], dtype: str) -> NDArray[np.float32]:
    """Numbers of any float dtype, uint8 [rows, row_bytes], as float32 [rows, columns]."""
    return rounded(raw, dtype, "F32").view(np.float32)
