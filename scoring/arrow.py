"""Answers as an Arrow table, where pyarrow is installed: a row a read.

Columns, as in `MatrixScore`: `response_logprobs`, `rows`, and what was asked for of `logprobs`, `top_ids`,
`top_logprobs`, `tail_logprob`, `entropy` and `rank`; of label reads `logprobs`. Besides `ids` (of the tokens, or the
labels, that were scored), what `meta` says of the read alone, `checkpoint` and `weight_version`, and `error`: the text
of it where a read failed, and has nothing else.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from scoring.batches import bounds_of
from scoring.reads import EXTRAS
from scoring.scores import META_COLUMNS, LabelScores, MatrixScores

LABEL_COLUMNS = ("logprobs",)
_EXTRAS = {"tail": "tail_logprob"}  # whose columns have other names
_INTEGERS = {"rows": np.int64, "top_ids": np.int32, "rank": np.int32}  # all else is float32


def matrix_columns(candidates: bool, top_k: bool, extras: Collection[str]) -> tuple[str, ...]:
    """The columns of scores that answers to matrix reads need, by what was asked."""
    asked = {"logprobs": candidates, "top_ids": top_k, "top_logprobs": top_k} | {
        _EXTRAS.get(name, name): name in extras for name in EXTRAS
    }
    return ("response_logprobs", "rows", *(name for name, there in asked.items() if there))


def table(scores: MatrixScores | LabelScores, ids: np.ndarray, columns: Sequence[str]) -> pa.Table:
    """The answers, as this module says.

    Args:
        ids: as `scoring.score_file.ids_of` makes them.
        columns: those of scores.
    """
    failed = [i in scores.errors for i in range(len(scores))]
    answers = [None if wrong else scores[i] for i, wrong in enumerate(failed)]
    matrix = isinstance(scores, MatrixScores)
    bounds = scores.row_offsets if matrix else scores.offsets
    made: dict[str, pa.Array] = {}
    for name in columns:
        deep = matrix and name in ("logprobs", "top_ids", "top_logprobs")
        dtype = _INTEGERS.get(name, np.float32)
        empty = np.zeros((0, 0) if deep else 0, dtype)  # what was not asked of a read, where its neighbours have it
        parts = [answer and getattr(answer, name) for answer in answers]
        parts = [empty if part is None and answer else part for part, answer in zip(parts, answers, strict=True)]
        made[name] = _lists(parts, dtype, deep)
    pieces = [None if wrong else ids[bounds[i] : bounds[i + 1]] for i, wrong in enumerate(failed)]
    made["ids"] = _lists(pieces, np.int32, deep=False)
    for name in META_COLUMNS:
        made[name] = pa.array(getattr(scores, name), mask=np.array(failed, bool))
    made["checkpoint"] = pa.array([answer and answer.meta.checkpoint for answer in answers], pa.string())
    made["weight_version"] = pa.array([answer and answer.meta.weight_version for answer in answers], pa.int32())
    errors = [str(scores.errors[i].at(None)) if wrong else None for i, wrong in enumerate(failed)]
    made["error"] = pa.array(errors, pa.string())
    return pa.table(made)


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
