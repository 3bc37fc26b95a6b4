"""Datasets of the Hugging Face Hub, streamed through `datasets` shard by shard.

Nothing is downloaded whole. With HF_HUB_OFFLINE set, a dataset that was prepared in the local cache is read from there.
HF_TOKEN, HF_ENDPOINT, HF_HOME and HF_DATASETS_CACHE work as usual.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ..errors import CorpusError, EagleSlimError, UsageError
from ..hub_errors import causes, is_given_up, trouble_of
from ..hub_session import be_patient
from .blocks import Block, RowsBlock

_BATCH_ROWS = 100
_BLOCK_BYTES = 2 << 20
_COMMIT = re.compile(r"@([0-9a-f]{40})(?:/|$)")
_ADVICE = (
    "Check the spelling. A private or gated dataset needs access: accept its terms on its page, then set HF_TOKEN or "
    "run `hf auth login`."
)


class HubDataset:
    """One split of a dataset, opened for streaming.

    Attributes:
        split: the split that was opened.
        config: the configuration that was opened.
        commit: commit of the repository, or None where `datasets` does not say.
        num_shards: number of shards, which are read in order.

    Raises:
        CorpusError: there is no such dataset, or it cannot be read.
        UsageError: no such configuration or split.
    """

    def __init__(self, dataset_id: str, config: str | None, split: str | None, revision: str | None) -> None:
        import datasets

        self._id = dataset_id
        self.commit: str | None
        with _readable_errors(dataset_id):
            builder = datasets.load_dataset_builder(dataset_id, config, revision=revision)
            found = _COMMIT.search(str(builder.base_path or "")) or _COMMIT.search(str(builder.config.data_files))
            self.commit = found.group(1) if found else None
            self.config = builder.config.name
            if datasets.config.HF_HUB_OFFLINE:
                loaded: Any = datasets.load_dataset(dataset_id, config, revision=revision)
            else:
                # The commit, not the branch: what is streamed later is then what was looked at now.
                loaded = datasets.load_dataset(dataset_id, config, revision=self.commit or revision, streaming=True)
        self.split = _choose_split(dataset_id, split, list(loaded))
        stream = loaded[self.split]
        self._stream: Any = stream.to_iterable_dataset() if datasets.config.HF_HUB_OFFLINE else stream
        self.num_shards: int = self._stream.num_shards

    def first_rows(self) -> Iterator[dict[str, Any]]:
        """Yield the rows from the first on, with all their columns."""
        with _readable_errors(self._id):
            for table in self._stream.with_format("arrow").iter(1):
                yield table.to_pylist()[0]

    def blocks_of(self, shard: int, start: int, column: str) -> Iterator[Block]:
        """Cut one shard into blocks, from row `start` on."""
        import pyarrow as pa

        stream = self._stream.shard(num_shards=self.num_shards, index=shard)
        if stream.column_names and column in stream.column_names:
            stream = stream.select_columns([column])
        stream = stream.skip(start) if start else stream
        held: list[Any] = []
        row = start
        with _readable_errors(self._id):
            for table in stream.with_format("arrow").iter(_BATCH_ROWS):
                if column not in table.column_names:
                    raise CorpusError(
                        f"{self._id}: no column {column!r} in shard {shard}; it has {', '.join(table.column_names)}."
                    )
                held.extend(table.column(column).chunks)
                if sum(chunk.nbytes for chunk in held) >= _BLOCK_BYTES:
                    values = pa.chunked_array(held)
                    yield RowsBlock(shard, row, row + len(values), 0, values)
                    held, row = [], row + len(values)
            if held:
                values = pa.chunked_array(held)
                yield RowsBlock(shard, row, row + len(values), 0, values)


def _choose_split(dataset_id: str, split: str | None, present: list[str]) -> str:
    if split is None:
        if len(present) == 1:
            return present[0]
        if "train" in present:
            return "train"
        raise UsageError(f"{dataset_id}: name a split, one of {', '.join(present)}.")
    if split not in present:
        raise UsageError(
            f"{dataset_id}: there is no split {split!r}; it has {', '.join(present)}.", split=split, splits=present
        )
    return split


@contextmanager
def _readable_errors(dataset_id: str) -> Iterator[None]:
    """Bound what `datasets` asks for, and turn what it and the network raise into errors a user can act on."""
    be_patient()
    try:
        yield
    except EagleSlimError:
        raise
    except Exception as error:
        readable = _readable(dataset_id, error)
        if readable is None:
            raise
        raise readable from error


def _readable(dataset_id: str, error: Exception) -> EagleSlimError | None:
    from datasets.exceptions import DatasetNotFoundError, DatasetsError

    if any(is_given_up(cause) for cause in causes(error)):
        trouble = trouble_of(error, dataset_id)
        return CorpusError(f"{trouble}\nLocal files always work.", dataset=dataset_id, **trouble.facts)
    first_line = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__).rstrip(".")
    message = f"{dataset_id}: cannot be read as a dataset: {first_line}."
    if isinstance(error, DatasetNotFoundError):
        return CorpusError(f"{message} {_ADVICE}")
    if isinstance(error, ValueError) and ("Config name is missing" in str(error) or "BuilderConfig" in str(error)):
        return UsageError(f"{dataset_id}: {str(error).strip()}", dataset=dataset_id, setting="config")
    if isinstance(error, ConnectionError | OSError) or "Offline" in type(error).__name__:
        return CorpusError(
            f"{message} If the network is down or HF_HUB_OFFLINE is set, only a dataset that is already in the cache "
            "can be read; local files always work.",
            dataset=dataset_id,
            offline=True,
        )
    if isinstance(error, DatasetsError | ValueError | RuntimeError) or "pyarrow" in type(error).__module__:
        return CorpusError(message)
    return None
