"""Checks of the rows that an artifact keeps beyond its draft vocabulary; none where it keeps none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from ..artifact.artifact import kept_problem
from ..artifact.checksums import row_checksums
from ..head import names
from ..head.kept_rows import KEPT_ROWS_NAME, layout_problem
from ..manifest import KeptRows
from ..rows.checkpoint import Checkpoint
from ..rows.dtypes import all_finite
from ..rows.safetensors_file import SafetensorsFile
from .findings import Findings, join, needed, refuse, written_otherwise
from .source import SourceChecks


@dataclass
class KeptChecks:
    """The fourth group; `source` knows what the artifact was made from."""

    found: Findings
    source: SourceChecks
    _file: SafetensorsFile | None = None

    def all(self) -> Iterator[tuple[str, Callable[[], str]]]:
        """Name and function of each check, in order."""
        if self.found.manifest is not None and self.found.manifest.kept_rows is not None:
            yield "kept rows", self.layout
            yield "kept rows: checksums", self.checksums
            yield "kept rows of the source", self.source_rows

    def layout(self) -> str:
        """The file has the tensors, the ids and the dtype that it should have, and no id of the draft vocabulary."""
        kept, manifest = self._kept, self.found.need_manifest()
        path = self.found.folder / KEPT_ROWS_NAME
        refuse(not path.is_file(), f"{KEPT_ROWS_NAME} is missing")
        file = SafetensorsFile(path)
        refuse((problem := layout_problem(file, kept)) is not None, str(problem))
        self._file = file
        refuse((problem := kept_problem(manifest)) is not None, str(problem))
        lm_head, rows = self.found.need_weights().tensors.get(names.LM_HEAD), file.tensors[names.LM_HEAD]
        if lm_head is not None:
            refuse(
                (rows.dtype, rows.shape[1:]) != (lm_head.dtype, lm_head.shape[1:]),
                f"the rows are {rows.dtype} {list(rows.shape)}, lm_head.weight {lm_head.dtype} {list(lm_head.shape)}",
            )
        return f"{len(kept)} rows beyond the {manifest.draft_vocab}, {file.size_bytes:,} bytes"

    def checksums(self) -> str:
        """Size, header, tensors and every row are those that the manifest records, and finite."""
        file, kept = self._need_file(), self._kept
        entry = self.found.need_manifest().files.get(KEPT_ROWS_NAME)
        refuse(entry is None, f"the manifest does not record {KEPT_ROWS_NAME}")
        assert entry is not None
        checkpoint = self._checkpoint
        problems = written_otherwise(file, entry, checkpoint.sha256)
        dtype, first, changed = file.tensors[names.LM_HEAD].dtype, 0, []
        for piece in checkpoint.pieces(names.LM_HEAD):
            expected = kept.row_checksums[first : first + len(piece)]
            changed += (first + np.flatnonzero((row_checksums(piece) != expected).any(axis=1))).tolist()
            if not all_finite(piece, dtype):
                problems.append(f"NaN or infinity in rows {first} to {first + len(piece) - 1}")
            first += len(piece)
        if changed:
            problems.append(f"{len(changed)} rows are not as they were written, the first is row {changed[0]}")
        join(problems)
        return f"header and {len(file.tensors)} tensors, {first} rows"

    def source_rows(self) -> str:
        """Every row is the row of its token in the head or the target that it came from."""
        self._need_file()
        return self.source.compare_rows(self._kept.rank_order_ids, self._checkpoint)

    @property
    def _kept(self) -> KeptRows:
        return needed(self.found.need_manifest().kept_rows, "no rows are kept")

    def _need_file(self) -> SafetensorsFile:
        return needed(self._file, f"{KEPT_ROWS_NAME} could not be read")

    @property
    def _checkpoint(self) -> Checkpoint:
        return Checkpoint.of(self._need_file())
