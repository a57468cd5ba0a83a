"""Many rows scored by the deployed teachers, as a step of a Ray Data pipeline: see docs/bulk.md.

Rows go from the workers that read them to the actors here and on to the workers that write, in Ray's object store; the
driver only says what is to be done. Each actor holds a `ScoringClient` and asks one batch at a time, so `concurrency`
batches are under way, and Ray Data reads on only as far as it has room: nothing piles up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa
import ray.data

from deployments.client import ScoringClient
from deployments.router import APP_NAME
from scoring import arrow, score_file
from scoring.batches import LabelBatch, MatrixBatch
from scoring.errors import OF_THE_SERVICE, InvalidRead
from scoring.row_reads import LabelReads, MatrixReads
from scoring.tokenizer import Tokenizer

_TIMEOUT_S = 3600.0  # for one batch: a service that grows or restarts has that long
_BATCH_ROWS = 256


def score(
    rows: ray.data.Dataset,
    *,
    teacher: str | None = None,
    tokenizer: str | None = None,
    top_k: int = 0,
    extras: Sequence[str] = (),
    concurrency: int = 2,
    batch_size: int = _BATCH_ROWS,
    app_name: str = APP_NAME,
) -> ray.data.Dataset:
    """The rows with the scores of their responses beside their own columns; see `scoring.arrow` for which.

    Args:
        rows: with the columns of `scoring.row_reads.MatrixReads`, and any others.
        teacher: who scores; None is the application's default.
        tokenizer: folder of the teacher's tokenizer, the same on every node, for rows with text.
        top_k, extras: as in `MatrixRead`.
        concurrency: actors, each with one batch under way.
        batch_size: rows of a batch.
        app_name: the Serve application.

    A row that makes no read, or whose read fails, has its `error`. A service that cannot answer ends the pipeline.
    """
    reads = MatrixReads(teacher, None, top_k, tuple(extras))
    return _scored(rows, reads, tokenizer, concurrency, batch_size, app_name)


def score_labels(
    rows: ray.data.Dataset,
    *,
    teacher: str | None = None,
    tokenizer: str | None = None,
    label_ids: Sequence[int] | None = None,
    concurrency: int = 2,
    batch_size: int = _BATCH_ROWS,
    app_name: str = APP_NAME,
) -> ray.data.Dataset:
    """The same of label reads: `label_ids` for all rows, or the columns of `scoring.row_reads.LabelReads`."""
    return _scored(rows, LabelReads(teacher, None, label_ids), tokenizer, concurrency, batch_size, app_name)


class Scorer:
    """One actor of the pipeline."""

    def __init__(self, reads: MatrixReads | LabelReads, tokenizer: str | None, app_name: str) -> None:
        self._reads = reads if tokenizer is None else replace(reads, tokenizer=Tokenizer(tokenizer))
        self._client = ScoringClient(app_name)

    def __call__(self, rows: pa.Table) -> pa.Table:
        """The rows with their scores beside them. What was there under the name of such a column is replaced."""
        made, bad = [], {}
        known = [name for name in self._reads.columns if name in rows.column_names]
        for i, fields in enumerate(rows.select(known).to_pylist()):
            try:
                made.append(self._reads.read(fields))
            except InvalidRead as error:
                bad[i] = error
        if isinstance(self._reads, MatrixReads):
            batch, ask = MatrixBatch.from_reads(made), self._client.read_matrix
            columns = arrow.matrix_columns("candidate_ids" in known, bool(self._reads.top_k), self._reads.extras)
        else:
            batch, ask, columns = LabelBatch.from_reads(made), self._client.read_labels, arrow.LABEL_COLUMNS
        scores = ask(batch, timeout_s=_TIMEOUT_S, return_exceptions=True)
        for error in scores.errors.values():
            if isinstance(error, OF_THE_SERVICE):
                raise error
        answers = arrow.table(scores.with_failed(bad), score_file.ids_of(batch, scores), columns)
        own = rows.select([name for name in rows.column_names if name not in answers.column_names])
        return pa.table({**_columns(own), **_columns(answers)})


def _scored(
    rows: ray.data.Dataset,
    reads: MatrixReads | LabelReads,
    tokenizer: str | None,
    concurrency: int,
    batch_size: int,
    app_name: str,
) -> ray.data.Dataset:
    return rows.map_batches(
        Scorer,
        fn_constructor_args=(reads, tokenizer, app_name),
        batch_size=batch_size,
        batch_format="pyarrow",
        compute=ray.data.ActorPoolStrategy(size=concurrency),
        num_cpus=0,  # it waits for the teachers, which ask Ray for none either
        udf_modifying_row_count=False,
    )


def _columns(table: pa.Table) -> dict[str, Any]:
    return dict(zip(table.column_names, table.columns, strict=True))
