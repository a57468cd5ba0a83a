"""Parquet, in and out, where pyarrow is installed."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from scoring import score_file
from scoring.batches import bounds_of
from scoring.cli.ending import WrongInput
from scoring.cli.rows import Row
from scoring.columns import ENTROPY, TAIL
from scoring.score_file import ScoreFile
from scoring.scores import META_COLUMNS, LabelScores, MatrixScores

try:
    import pyarrow as pa
    from pyarrow import parquet as pq
except ImportError:
    raise WrongInput("Parquet needs pyarrow: pip install 'teacher-scoring[bulk]'") from None

_ROWS_AT_ONCE = 64
_BUFFER = 1 << 20
_GROUP_BYTES = 32 << 20  # of a row group of the output, about
_FLOATS = ("response_logprobs", "logprobs", "top_logprobs", "tail_logprob", "entropy")
_DTYPES = dict.fromkeys(_FLOATS, np.float32) | {"rows": np.int64, "top_ids": np.int32}


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
    """Write the scores of files of `score_file` as one Parquet file, a row a read, with memory for some of them.

    Columns, as in `MatrixScore`: `response_logprobs`, `rows`, and what was asked for of `logprobs`, `top_ids`,
    `top_logprobs`, `tail_logprob` and `entropy`; of label reads `logprobs`. Besides `ids` (of the tokens, or labels,
    that were scored), what `meta` says of the read alone, and `error`: the text of it where a read failed, and has
    nothing else. The rest of `meta` is in the file's metadata.

    Args:
        pieces: gives the files, at least one; called twice.
    """
    metas: dict[str, None] = {}
    names: dict[str, None] = {}
    for piece in map(score_file.load, pieces()):
        metas |= dict.fromkeys(json.dumps(meta.to_dict()) for meta in piece.scores.metas)
        names |= dict.fromkeys(_answered(piece.scores))
    metadata = {"metas": f"[{', '.join(metas)}]", "about": json.dumps(about)}
    partial = Path(f"{path}.partial")
    writer, held, size = None, [], 0
    try:
        for piece in map(score_file.load, pieces()):
            table = _table(piece, list(names))
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
    partial.replace(path)


def _answered(scores: MatrixScores | LabelScores) -> list[str]:
    """The columns that the answers of a piece need."""
    if isinstance(scores, LabelScores):
        return ["logprobs"]
    asked = {
        "response_logprobs": True,
        "rows": True,
        "logprobs": scores.widths.any(),
        "top_ids": scores.top_k.any(),
        "top_logprobs": scores.top_k.any(),
        "tail_logprob": (scores.extras & TAIL).any(),
        "entropy": (scores.extras & ENTROPY).any(),
    }
    return [name for name, there in asked.items() if there]


def _table(piece: ScoreFile, names: Sequence[str]) -> pa.Table:
    scores = piece.scores
    failed = [i in scores.errors for i in range(len(scores))]
    answers = [None if wrong else scores[i] for i, wrong in enumerate(failed)]
    bounds = scores.offsets if isinstance(scores, LabelScores) else scores.row_offsets
    columns: dict[str, Any] = {}
    for name in names:
        deep = name in ("top_ids", "top_logprobs") or (name == "logprobs" and isinstance(scores, MatrixScores))
        columns[name] = _lists([answer and getattr(answer, name) for answer in answers], _DTYPES[name], deep)
    ids = [None if wrong else piece.ids[bounds[i] : bounds[i + 1]] for i, wrong in enumerate(failed)]
    columns["ids"] = _lists(ids, np.int32, deep=False)
    for name in META_COLUMNS:
        columns[name] = pa.array(getattr(scores, name), mask=np.array(failed, bool))
    columns["error"] = pa.array(
        [str(scores.errors[i].at(None)) if wrong else None for i, wrong in enumerate(failed)], pa.string()
    )
    return pa.table(columns)


def _lists(parts: Sequence[np.ndarray | None], dtype: Any, deep: bool) -> pa.ListArray:
    """A list a part, null for None; of parts with two dimensions (`deep`) a list of lists."""
    there = [part for part in parts if part is not None]
    values = pa.array(np.concatenate([np.zeros(0, dtype), *(part.reshape(-1) for part in there)]).astype(dtype))
    if deep:
        values = pa.ListArray.from_arrays(_bounds([part.shape[1] for part in there for _ in part]), values)
    missing = pa.array([part is None for part in parts], pa.bool_())
    return pa.ListArray.from_arrays(_bounds([0 if part is None else len(part) for part in parts]), values, mask=missing)


def _bounds(lengths: Sequence[int]) -> pa.Array:
    return pa.array(bounds_of(lengths), pa.int32())
