"""What a caller asks: `MatrixRead` and `LabelRead`.

A read is checked for everything that needs no teacher when it is made: types, shapes, row counts. What needs a
teacher (vocabulary, length, widths) is checked by `limits.py`, before the engine sees it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

import numpy as np

from scoring.columns import Columns
from scoring.errors import InvalidRead
from scoring.ids import candidate_matrix, id_vector, row_indices

EXTRAS = ("tail", "entropy", "rank")


@dataclass(frozen=True, eq=False, slots=True)
class MatrixRead:
    """One prefill over prompt + response; log-probabilities of candidates at response positions.

    The answer's row r holds `log p(candidate_ids[r, k] given prompt + response[:r])`: row r predicts
    `response_ids[r]`. With C prompt ids, that is the model's output at position C - 1 + r. With three
    tokens, of which the first is the prompt, and with `log_p(ids)` for the model's float32 [V] after `ids`:

        >>> (score,) = read_matrix([MatrixRead([11], [12, 13], candidate_ids=[[12], [13]])])
        >>> bool(np.abs(score.logprobs - [[log_p([11])[12]], [log_p([11, 12])[13]]]).max() < 3e-5)
        True

    Args:
        prompt_ids: int [C], at least one id.
        response_ids: int [R]; R = 0 is allowed and gives zero rows.
        candidate_ids: int [R, K], one row per response position; or int [K], the same for every position; or
            None, when only the response's own tokens are wanted (then `logprobs` is [R, 0]). Lists of unequal
            rows are padded with -1 on the right. A -1 scores -inf and is allowed only as a trailing run of a
            row.
        rows: which response positions are answered: a slice, integers or a boolean mask [R]. The answer keeps
            the order given. None means all.
        top_k: how many of the teacher's own likeliest tokens to return beside the candidates, with their
            log-probabilities.
        extras: any of "tail" (the logarithm of the probability outside the candidates), "entropy" (of the
            teacher's whole distribution, in nats) and "rank" (how many tokens the teacher likes at least as much as
            the response's own, itself included: 1 is the best).
        teacher: name of the teacher; None is the application's default.
        priority: smaller is served first.
        expect_version: the weight version the read was made for; another one raises `VersionMismatch`.
        unknown_candidates: "raise", or "-inf" to score candidates beyond the teacher's vocabulary as -inf.
            Response ids beyond it always raise.

    Arrays, lists and tensors are accepted; they are stored as int32 arrays.

    Raises:
        InvalidRead: naming the field, what was given and what is allowed.
    """

    prompt_ids: np.ndarray  # int32 [C]
    response_ids: np.ndarray  # int32 [R]
    candidate_ids: np.ndarray | None = None  # int32 [R, K] or [K]
    _: KW_ONLY
    rows: np.ndarray | slice | None = None  # int64 [n] once made
    top_k: int = 0
    extras: tuple[str, ...] = ()
    teacher: str | None = None
    priority: int = 0
    expect_version: int | None = None
    unknown_candidates: Literal["raise", "-inf"] = "raise"

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "prompt_ids", _prompt(self.prompt_ids))
        put(self, "response_ids", id_vector(self.response_ids, "response_ids"))
        length = len(self.response_ids)
        if self.candidate_ids is not None:
            put(self, "candidate_ids", candidate_matrix(self.candidate_ids, "candidate_ids", rows=length))
        put(self, "rows", row_indices(self.rows, length))
        put(self, "top_k", _integer(self.top_k, "top_k", 0))
        put(self, "extras", _extras(self.extras))
        _check_options(self)
        if self.unknown_candidates not in ("raise", "-inf"):
            raise InvalidRead(
                f'is {self.unknown_candidates!r}; allowed are "raise" and "-inf"', field="unknown_candidates"
            )

    @property
    def width(self) -> int:
        """K: candidates per row."""
        return 0 if self.candidate_ids is None else self.candidate_ids.shape[-1]

    @property
    def columns(self) -> Columns:
        """What a row of the answer holds."""
        return Columns(self.width, self.top_k, **{name: name in self.extras for name in EXTRAS})

    @property
    def row_count(self) -> int:
        """Rows of the answer."""
        return len(self.response_ids) if self.rows is None else len(self.rows)


@dataclass(frozen=True, eq=False, slots=True)
class LabelRead:
    """One token after a prompt; the full-vocabulary log-probabilities of chosen label ids.

    Args:
        prompt_ids: int [C], at least one id.
        label_ids: int [L], at least one; the answer keeps their order. Repeated ids are allowed.
        teacher, priority, expect_version: as for `MatrixRead`.

    Raises:
        InvalidRead: naming the field, what was given and what is allowed.
    """

    prompt_ids: np.ndarray  # int32 [C]
    label_ids: np.ndarray  # int32 [L]
    _: KW_ONLY
    teacher: str | None = None
    priority: int = 0
    expect_version: int | None = None

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "prompt_ids", _prompt(self.prompt_ids))
        put(self, "label_ids", id_vector(self.label_ids, "label_ids"))
        if not len(self.label_ids):
            raise InvalidRead("is empty; a label read needs at least one label id", field="label_ids")
        _check_options(self)


def read_from_fields(cls: type, fields: Any) -> MatrixRead | LabelRead:
    """A read from a JSON object.

    Raises:
        InvalidRead: `fields` is no object, has an unknown field or lacks a required one, or a value is wrong.
    """
    if not isinstance(fields, dict):
        raise InvalidRead(f"is a {type(fields).__name__}; a read is an object with the fields of {cls.__name__}")
    names = [name for name in cls.__dataclass_fields__ if name != "_"]
    for name in fields:
        if name not in names:
            raise InvalidRead(f"is not a field of {cls.__name__}; its fields are {', '.join(names)}", field=name)
    for name in names[:2]:
        if name not in fields:
            raise InvalidRead(f"is missing; {cls.__name__} needs {names[0]} and {names[1]}", field=name)
    return cls(**fields)


def _prompt(value: Any) -> np.ndarray:
    prompt = id_vector(value, "prompt_ids")
    if not len(prompt):
        raise InvalidRead("is empty; a prompt has at least one token (often the BOS token)", field="prompt_ids")
    return prompt


def _check_options(read: MatrixRead | LabelRead) -> None:
    if read.teacher is not None and not isinstance(read.teacher, str):
        raise InvalidRead(f"is {read.teacher!r}; a teacher is named by a string", field="teacher")
    object.__setattr__(read, "priority", _integer(read.priority, "priority", -(2**31)))
    if read.expect_version is not None:
        object.__setattr__(read, "expect_version", _integer(read.expect_version, "expect_version", 0))


def _integer(value: Any, field: str, lowest: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not lowest <= value < 2**31:
        raise InvalidRead(f"is {value!r}; allowed are integers from {lowest} to 2**31 - 1", field=field)
    return int(value)


def _extras(value: Any) -> tuple[str, ...]:
    given = (value,) if isinstance(value, str) else value
    if not isinstance(given, Iterable) or isinstance(given, Mapping):
        raise InvalidRead(f"is {value!r}; allowed are any of {', '.join(EXTRAS)}", field="extras")
    given = tuple(given)
    for name in given:
        if name not in EXTRAS:
            raise InvalidRead(f"names {name!r}; allowed are any of {', '.join(EXTRAS)}", field="extras")
    return tuple(name for name in EXTRAS if name in given)
