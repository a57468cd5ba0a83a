"""From what callers hold (lists, arrays, tensors) to int32 token ids, or a sentence about what is wrong.

Only the type is judged here. Whether an id lies in a teacher's vocabulary is for `limits.py`, which knows it.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np

from scoring.errors import InvalidRead

PAD = -1
"""The candidate id of an unused column. Allowed only as a trailing run of a row; it scores -inf."""

_INT32_MAX = np.iinfo(np.int32).max
# One long row among many short ones must not cost gigabytes: beyond the first number of ids, padding may make a ragged
# matrix this many times larger.
_FREELY_PADDED, _MOST_PADDING = 1 << 20, 4


def id_vector(value: Any, field: str) -> np.ndarray:
    """`value` as int32 [n].

    Raises:
        InvalidRead: it is not one-dimensional, or holds anything but integers that fit an int32.
    """
    array = _as_array(value, field)
    if array.ndim != 1:
        raise InvalidRead(f"has shape {_shape(array)}; token ids are one flat list [n]", field=field)
    return _int32(array, field)


def candidate_matrix(value: Any, field: str, rows: int | None = None) -> np.ndarray:
    """`value` as int32 [K] (one set for all rows) or [R, K] (one row per response position).

    Rows of different lengths are padded with `PAD` on the right. `PAD` itself is accepted only there.

    Args:
        rows: how many rows [R, K] must have.

    Raises:
        InvalidRead: wrong type, more than two dimensions, another number of rows, or a negative id that is not a
            trailing pad.
    """
    if isinstance(value, list | tuple) and any(_is_row(row) for row in value):
        _check_rows(len(value), rows, field)  # before anything is padded
        array = _stack_lists(value, field)
        if array is None:
            array = _stack_rows([id_vector(row, f"{field}[{r}]") for r, row in enumerate(value)], field)
    else:
        array = _as_array(value, field)
    if array.ndim not in (1, 2):
        raise InvalidRead(f"has shape {_shape(array)}; allowed are [K] and [R, K]", field=field)
    if array.ndim == 2:
        _check_rows(len(array), rows, field)
    array = _int32(array, field)
    negative = array < 0
    if negative.any():
        inner = negative.copy()
        inner[..., :-1] &= ~negative[..., 1:]  # a pad followed by an id is not trailing
        inner[..., -1] = False
        wrong = (array < PAD) | inner
        if wrong.any():
            at = tuple(int(i) for i in np.argwhere(wrong)[0])
            raise InvalidRead(
                f"is {int(array[at])}; an id is at least 0, and {PAD} is allowed only as a trailing run of a "
                "row, where it marks unused columns",
                field=f"{field}[{']['.join(map(str, at))}]",
            )
    return array


def row_indices(value: Any, response_length: int, field: str = "rows") -> np.ndarray | None:
    """`rows` of a read as int64 [n] positions in the response, in the caller's order; None means all.

    Accepts a slice (as Python slices a sequence, positive step), an integer vector or a boolean mask [R].

    Raises:
        InvalidRead: an index that is negative, repeated or at least R; a mask of another length.
    """
    if value is None:
        return None
    if isinstance(value, slice):
        for part in (value.start, value.stop, value.step):
            if part is not None and (isinstance(part, bool) or not isinstance(part, int | np.integer)):
                raise InvalidRead(f"is {value}; a slice of rows has integer bounds", field=field)
        start, stop = value.start or 0, response_length if value.stop is None else value.stop
        step = 1 if value.step is None else value.step
        if step < 1 or not (0 <= start <= response_length and 0 <= stop <= response_length):
            raise InvalidRead(
                f"is {value}; a slice of rows has bounds in [0, {response_length}] (the response's length) "
                "and a positive step",
                field=field,
            )
        return np.arange(start, stop, step, dtype=np.int64)
    if isinstance(value, list | tuple) and value and set(map(type, value)) <= {bool, np.bool_}:
        value = np.array(value, dtype=bool)
    array = _as_array(value, field, allow_bool=True)
    if array.ndim != 1:
        raise InvalidRead(f"has shape {_shape(array)}; rows are one flat list", field=field)
    if array.dtype == bool:
        if len(array) != response_length:
            raise InvalidRead(
                f"is a mask of {len(array)} flags; the response has {response_length} positions", field=field
            )
        return np.flatnonzero(array).astype(np.int64)
    array = _int32(array, field).astype(np.int64)
    outside = (array < 0) | (array >= response_length)
    if outside.any():
        at = int(np.flatnonzero(outside)[0])
        raise InvalidRead(
            f"is {int(array[at])}; rows lie in [0, {response_length}) (the response's length)",
            field=f"{field}[{at}]",
        )
    unique, counts = np.unique(array, return_counts=True)
    if len(unique) != len(array):
        raise InvalidRead(f"names row {int(unique[counts > 1][0])} more than once", field=field)
    return array


def _as_array(value: Any, field: str, allow_bool: bool = False) -> np.ndarray:
    """`value` as an integer array (bool too where allowed), without ever changing a value's type."""
    if hasattr(value, "detach"):  # a torch tensor, without importing torch
        if value.is_floating_point():  # bfloat16 has no NumPy counterpart
            if value.numel():
                raise InvalidRead(f"has dtype {value.dtype}; token ids are integers", field=field)
            value = value.int()
        value = value.detach().cpu().numpy()
    if isinstance(value, np.ndarray):
        if allow_bool and value.dtype == bool:
            return value
        if value.dtype.kind in "iu" or value.size == 0:
            return value if value.size else value.astype(np.int32)
        raise InvalidRead(f"has dtype {value.dtype}; token ids are integers", field=field)
    if isinstance(value, range):
        return np.arange(value.start, value.stop, value.step, dtype=np.int64)
    if not isinstance(value, list | tuple):
        hint = ": give its input_ids" if isinstance(value, Mapping) and "input_ids" in value else ""
        raise InvalidRead(
            f"is a {type(value).__name__} ({_short(value)}); token ids are a list or an array of integers{hint}",
            field=field,
        )
    if not set(map(type, value)) <= {int}:  # bool is a subclass of int, not int itself: it goes the slow way
        for i, x in enumerate(value):
            if isinstance(x, bool) or not isinstance(x, int | np.integer):
                raise InvalidRead(
                    f"is {_short(x)} (a {type(x).__name__}); token ids are integers", field=f"{field}[{i}]"
                )
    try:
        return np.array(value, dtype=np.int64)
    except OverflowError:
        i = next(i for i, x in enumerate(value) if abs(int(x)) > _INT32_MAX)
        raise InvalidRead(f"is {value[i]}; {_RANGE}", field=f"{field}[{i}]") from None


_RANGE = "a token id lies in [0, vocabulary size), and never above 2**31 - 1"


def _int32(array: np.ndarray, field: str) -> np.ndarray:
    """`array` as contiguous int32 that nobody writes to, refusing values that do not fit."""
    if array.dtype != np.int32:
        if array.size and (array.max() > _INT32_MAX or array.min() < -_INT32_MAX):
            at = tuple(int(i) for i in np.argwhere((array > _INT32_MAX) | (array < -_INT32_MAX))[0])
            raise InvalidRead(f"is {int(array[at])}; {_RANGE}", field=f"{field}[{']['.join(map(str, at))}]")
        array = array.astype(np.int32)
    elif array.flags.writeable:  # the caller may use its buffer again
        array = array.copy()
    return np.ascontiguousarray(array)


def _check_rows(given: int, due: int | None, field: str) -> None:
    if due is not None and given != due:
        raise InvalidRead(
            f"has {given} rows; the response has {due} tokens, and each needs its row "
            "(select positions with rows=, or give one flat list [K] for all of them)",
            field=field,
        )


def _is_row(value: Any) -> bool:
    return isinstance(value, list | tuple | range | np.ndarray) or hasattr(value, "detach")


def _stack_lists(rows: list | tuple, field: str) -> np.ndarray | None:
    """What `_stack_rows` makes of rows that are lists of Python's integers, as they come in JSON, without a loop over
    them; None where they are anything else, or do not fit an int32."""
    if not set(map(type, rows)) <= {list} or not set(map(type, itertools.chain.from_iterable(rows))) <= {int}:
        return None
    try:
        ids = np.array(list(itertools.chain.from_iterable(rows)), dtype=np.int32)
    except OverflowError:
        return None
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    stacked = _padded(lengths, field)
    stacked[np.arange(stacked.shape[1]) < lengths[:, None]] = ids
    return stacked


def _stack_rows(rows: list[np.ndarray], field: str) -> np.ndarray:
    stacked = _padded(np.array([len(row) for row in rows]), field)
    for r, row in enumerate(rows):
        stacked[r, : len(row)] = row
    return stacked


def _padded(lengths: np.ndarray, field: str) -> np.ndarray:
    """int32 [R, longest], of pads."""
    width, given = int(lengths.max()), int(lengths.sum())
    if len(lengths) * width > max(_FREELY_PADDED, _MOST_PADDING * given):
        raise InvalidRead(
            f"has {len(lengths)} rows and one of {width} ids, but {given} ids in all; rows this uneven are not padded: "
            "give an array [R, K] that is",
            field=field,
        )
    return np.full((len(lengths), width), PAD, dtype=np.int32)


def _shape(array: np.ndarray) -> str:
    return str(list(array.shape))


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
