"""Parquet, in and out, where pyarrow is installed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from scoring import score_file
from scoring.cli.ending import WrongInput
from scoring.cli.rows import Row
from scoring.reads import EXTRAS
from scoring.scores import LabelScores, MatrixScores

try:
    import pyarrow as pa
    from pyarrow import parquet as pq

    from scoring import arrow
except ImportError:
    raise WrongInput("Parquet needs pyarrow: pip install 'teacher-scoring[bulk]'") from None

_ROWS_AT_ONCE = 64
_BUFFER = 1 << 20
_GROUP_BYTES = 32 << 20  # of a row group of the output, about


class ParquetRows:
    """The rows of a Parquet file; of its columns only those that will be looked at are read."""

    def __init__(self, path: Path, columns: Collection[str]) -> None:
        self._path = path
        try:
            self._file = pq.ParquetFile(path, buffer_size=_BUFFER, pre_buffer=False)
        except pa.ArrowInvalid as error:
            raise WrongInput(f"{path}: is no Parquet file ({error})") from None
        there = self._file.schema_arrow.names
        self._columns = [name for name in columns if name in there]
        if not self._columns:
            raise WrongInput(
                f"{path}: has none of the columns {', '.join(columns)}; its columns are {', '.join(there)}"
            )
        self.total = self._file.metadata.num_rows

    def __iter__(self) -> Iterator[Row]:
        number = 0
        for batch in self._file.iter_batches(_ROWS_AT_ONCE, columns=self._columns):
            for fields in batch.to_pylist():
                number += 1
                yield Row(f"{self._path}: row {number}", 1, fields)


def write(path: Path, pieces: Callable[[], Iterable[Path]], about: Mapping[str, Any]) -> None:
    """Write the scores of files of `score_file` as one Parquet file, with memory for some of them at a time: the
    columns of `scoring.arrow`; where all of it comes from is in the file's metadata, as JSON.

    Args:
        pieces: gives the files, at least one; called twice.
    """
    metas: dict[str, None] = {}
    columns: dict[str, None] = {}
    for piece in map(score_file.load, pieces()):
        metas |= dict.fromkeys(json.dumps(meta.to_dict()) for meta in piece.scores.metas)
        columns |= dict.fromkeys(_columns(piece.scores))
    metadata = {"metas": f"[{', '.join(metas)}]", "about": json.dumps(about)}
    partial = Path(f"{path}.partial")
    writer, held, size = None, [], 0
    try:
        for piece in map(score_file.load, pieces()):
            table = arrow.table(piece.scores, piece.ids, list(columns))
            writer = writer or pq.ParquetWriter(partial, table.schema.with_metadata(metadata))
            held, size = [*held, table], size + table.nbytes
            if size >= _GROUP_BYTES:
                writer.write_table(pa.concat_tables(held))
                held, size = [], 0
        if held:
            writer.write_table(pa.concat_tables(held))
    finally:
        if writer is not None:
            writer.close()
    with partial.open("rb") as stream:
        os.fsync(stream.fileno())
    partial.replace(path)


def _columns(scores: MatrixScores | LabelScores) -> tuple[str, ...]:
    if isinstance(scores, LabelScores):
        return arrow.LABEL_COLUMNS
    extras = [name for place, name in enumerate(EXTRAS) if (scores.extras & 1 << place).any()]
    return arrow.matrix_columns(bool(scores.widths.any()), bool(scores.top_k.any()), extras)
