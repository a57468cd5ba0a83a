"""Many reads as a few flat arrays: how a batch travels and how the engine takes it.

Nothing here walks token by token: a batch is made with one concatenation per array, a shard is cut with one
gather per array, and the engine takes one read at a time as views.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from scoring.columns import widths_of
from scoring.errors import InvalidRead
from scoring.ids import candidate_matrix, id_vector
from scoring.reads import EXTRAS, LabelRead, MatrixRead

SCHEMA_VERSION = 1
"""Version of every form a batch or its answer takes outside this process."""

# Bits of `MatrixBatch.modes`.
SHARED, OMITTED, ROWS, TAIL, ENTROPY, UNKNOWN_TO_MINUS_INF, RANK = (1 << bit for bit in range(7))
ALL_MODES = (1 << 7) - 1
_EXTRA_BITS = dict(zip(EXTRAS, (TAIL, ENTROPY, RANK), strict=True))
NO_VERSION = -1
_COLUMN_BYTES = 64  # of one read in the arrays that have one entry per read, about


@dataclass(frozen=True, eq=False)
class _Ragged:
    """What both kinds of batch share: N reads, arrays of one row per read, and flat arrays with offsets."""

    def __len__(self) -> int:
        return len(self.teacher_index)

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(len(self)))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} reads, {len(self.ids)} tokens)"

    def __post_init__(self) -> None:
        object.__setattr__(self, "teachers", tuple(self.teachers))
        for f in fields(self):
            if f.name == "teachers":
                continue
            dtype, array = _DTYPES[f.name], np.asarray(getattr(self, f.name))
            if array.dtype != dtype or array.ndim != 1:
                raise InvalidRead(
                    f"is {array.dtype} {list(array.shape)}; a batch holds it as {np.dtype(dtype)}, one-dimensional",
                    field=f.name,
                )
            array = np.ascontiguousarray(array).view()
            array.flags.writeable = False  # so that reads are views of it, not copies
            object.__setattr__(self, f.name, array)
        count = len(self)
        for f in fields(self):
            if f.name == "teachers" or f.name in self._flat:
                continue
            expected = count + 1 if f.name in self._flat.values() else count
            if len(getattr(self, f.name)) != expected:
                raise InvalidRead(
                    f"has {len(getattr(self, f.name))} entries; {count} reads need {expected}", field=f.name
                )
        for flat, offsets in self._flat.items():
            bounds = getattr(self, offsets)
            if bounds[0] != 0 or bounds[-1] != len(getattr(self, flat)) or (bounds[1:] < bounds[:-1]).any():
                raise InvalidRead(
                    f"must rise from 0 to {len(getattr(self, flat))}, the length of {flat}", field=offsets
                )
        if count and not (self.teacher_index.min() >= 0 and self.teacher_index.max() < len(self.teachers)):
            raise InvalidRead(f"must lie in [0, {len(self.teachers)})", field="teacher_index")
        if len(self.teachers) > count:
            raise InvalidRead(f"has {len(self.teachers)} names for {count} reads", field="teachers")
        for name in self.teachers:
            if name is not None and not isinstance(name, str):
                raise InvalidRead(f"holds {name!r}; a teacher is named by a string", field="teachers")

    def _place(self, i: int) -> int:
        """`i`, which may count from the end, as it lies in [0, N)."""
        if not -len(self) <= i < len(self):
            raise IndexError(f"read {i} of {len(self)}")
        return int(i) % len(self)

    @classmethod
    def of(cls, reads: Any):
        """`reads` when it is such a batch; the batch of them when they are reads.

        Raises:
            InvalidRead: it is neither.
        """
        if isinstance(reads, cls):
            return reads
        wanted = f"a list of {cls._read.__name__}, or a {cls.__name__}"
        if isinstance(reads, str | bytes | dict) or not isinstance(reads, Iterable):
            raise InvalidRead(f"is a {type(reads).__name__}; allowed is {wanted}", field="reads")
        reads = list(reads)
        for i, read in enumerate(reads):
            if not isinstance(read, cls._read):
                raise InvalidRead(f"is a {type(read).__name__}; allowed is {wanted}", read=i)
        return cls.from_reads(reads)

    def _common(self, i: int) -> dict[str, Any]:
        """The fields that both kinds of read have, of read i."""
        version = int(self.expect_version[i])
        return {
            "teacher": self.teachers[self.teacher_index[i]],
            "priority": int(self.priority[i]),
            "expect_version": None if version == NO_VERSION else version,
        }

    def select(self, indices: Sequence[int] | np.ndarray):
        """The batch of these reads, in this order.

        Raises:
            IndexError: there is no such read.
        """
        indices = np.arange(len(self))[np.asarray(indices) if len(indices) else slice(0)]  # int64 [n]
        used, teacher_index = np.unique(self.teacher_index[indices], return_inverse=True)
        columns: dict[str, Any] = {
            "teachers": tuple(self.teachers[i] for i in used),
            "teacher_index": teacher_index.astype(np.int32),
        }
        for f in fields(self):
            if f.name in self._flat:
                columns[f.name], columns[self._flat[f.name]] = _pieces(
                    getattr(self, f.name), getattr(self, self._flat[f.name]), indices
                )
            elif f.name not in columns and f.name not in self._flat.values():
                columns[f.name] = getattr(self, f.name)[indices]
        return type(self)(**columns)


@dataclass(frozen=True, eq=False, repr=False)
class MatrixBatch(_Ragged):
    """N matrix reads. Make one with `from_reads`, `from_padded` or `from_packed`.

    `batch[i]` is read i as a `MatrixRead` over views of the arrays.
    """

    ids: np.ndarray  # int32 [sum(C + R)]: prompt then response of every read
    offsets: np.ndarray  # int64 [N + 1] into ids
    prompt_lens: np.ndarray  # int64 [N]
    candidate_ids: np.ndarray  # int32 flat: [R * K], or [K] where SHARED
    candidate_offsets: np.ndarray  # int64 [N + 1] into candidate_ids
    widths: np.ndarray  # int64 [N]: K
    rows: np.ndarray  # int64 flat: the rows asked for, where ROWS
    row_offsets: np.ndarray  # int64 [N + 1] into rows
    modes: np.ndarray  # uint8 [N]: bits above
    top_k: np.ndarray  # int32 [N]
    priority: np.ndarray  # int32 [N]
    expect_version: np.ndarray  # int64 [N], NO_VERSION where none
    teacher_index: np.ndarray  # int32 [N] into teachers
    teachers: tuple[str | None, ...]

    _read = MatrixRead
    _flat = {"ids": "offsets", "candidate_ids": "candidate_offsets", "rows": "row_offsets"}  # noqa: RUF012

    def __post_init__(self) -> None:
        super().__post_init__()
        lengths = np.diff(self.offsets)
        if ((self.prompt_lens < 0) | (self.prompt_lens > lengths)).any():
            raise InvalidRead("must lie between 0 and the length of the read", field="prompt_lens")
        if (self.widths < 0).any():
            raise InvalidRead("must not be negative", field="widths")

    @classmethod
    def from_reads(cls, reads: Sequence[MatrixRead]) -> MatrixBatch:
        """The batch of these reads, in their order."""
        teachers, teacher_index = _teachers(reads)
        ids, offsets = end_to_end(
            [part for r in reads for part in (r.prompt_ids, r.response_ids)], np.int32, per_read=2
        )
        candidates, candidate_offsets = end_to_end(
            [_EMPTY if r.candidate_ids is None else r.candidate_ids.reshape(-1) for r in reads], np.int32
        )
        rows, row_offsets = end_to_end([_NO_ROWS if r.rows is None else r.rows for r in reads], np.int64)
        return cls(
            ids=ids,
            offsets=offsets,
            prompt_lens=np.array([len(r.prompt_ids) for r in reads], dtype=np.int64),
            candidate_ids=candidates,
            candidate_offsets=candidate_offsets,
            widths=np.array([r.width for r in reads], dtype=np.int64),
            rows=rows,
            row_offsets=row_offsets,
            modes=np.array([_mode(r) for r in reads], dtype=np.uint8),
            top_k=np.array([r.top_k for r in reads], dtype=np.int32),
            priority=np.array([r.priority for r in reads], dtype=np.int32),
            expect_version=_versions(reads),
            teacher_index=teacher_index,
            teachers=teachers,
        )

    @classmethod
    def from_padded(
        cls, input_ids: Any, attention_mask: Any, prompt_lens: Any, candidate_ids: Any = None, **options: Any
    ) -> MatrixBatch:
        """From the padded tensors of a training step.

        Args:
            input_ids: int [B, T], prompt then response of each sample, padded on either side.
            attention_mask: [B, T], non-zero where a token is real; the real tokens of a row are one run.
            prompt_lens: int [B], real tokens of each prompt (padding not counted).
            candidate_ids: int [B, M, K] with M >= max R, row r for response position r (not for input token r, so
                M = T raises); rows beyond a response are not looked at. None to score the response's own tokens only.
            options: further fields of `MatrixRead`, the same for every read.
        """
        input_ids, mask = _matrix(input_ids, "input_ids"), _matrix(attention_mask, "attention_mask") != 0
        if mask.shape != input_ids.shape:
            raise InvalidRead(
                f"has shape {list(mask.shape)}; input_ids has {list(input_ids.shape)}", field="attention_mask"
            )
        prompt_lens = id_vector(prompt_lens, "prompt_lens")
        if len(prompt_lens) != len(input_ids):
            raise InvalidRead(f"has {len(prompt_lens)} entries for {len(input_ids)} rows", field="prompt_lens")
        runs = (np.diff(np.pad(mask, ((0, 0), (1, 0))).astype(np.int8), axis=1) == 1).sum(axis=1)  # int [B]
        if (runs > 1).any():
            raise InvalidRead("has a gap: the real tokens of each row must be one run", field="attention_mask")
        packed = input_ids[mask]
        cu_seqlens = bounds_of(mask.sum(axis=1))
        if candidate_ids is not None:
            candidate_ids = _array(candidate_ids)
            response_lens = np.diff(cu_seqlens) - prompt_lens
            if candidate_ids.ndim != 3 or len(candidate_ids) != len(input_ids):
                raise InvalidRead(
                    f"has shape {list(candidate_ids.shape)}; allowed is [{len(input_ids)}, max R, K]",
                    field="candidate_ids",
                )
            if candidate_ids.shape[1] == input_ids.shape[1] > 0:  # a response is at least a prompt token shorter
                raise InvalidRead(
                    f"has {candidate_ids.shape[1]} rows for inputs of {input_ids.shape[1]} tokens; row r belongs to "
                    "response position r, not to input token r: cut the rows of the prompt off",
                    field="candidate_ids",
                )
            if response_lens.max(initial=0) > candidate_ids.shape[1]:
                raise InvalidRead(
                    f"has {candidate_ids.shape[1]} rows; the longest response has {response_lens.max()} tokens",
                    field="candidate_ids",
                )
            real = np.arange(candidate_ids.shape[1]) < response_lens[:, None]
            candidate_ids = candidate_ids[real]
        return cls.from_packed(packed, cu_seqlens, prompt_lens, candidate_ids, **options)

    @classmethod
    def from_packed(
        cls, ids: Any, cu_seqlens: Any, prompt_lens: Any, candidate_ids: Any = None, **options: Any
    ) -> MatrixBatch:
        """From sequences laid end to end.

        Args:
            ids: int [sum(C + R)], prompt then response of each sample.
            cu_seqlens: int [B + 1], where each sample starts, and the end.
            prompt_lens: int [B].
            candidate_ids: int [sum R, K], or None to score the response's own tokens only.
            options: further fields of `MatrixRead`, the same for every read.
        """
        ids = id_vector(ids, "ids")
        bounds = id_vector(cu_seqlens, "cu_seqlens").astype(np.int64)
        prompts = id_vector(prompt_lens, "prompt_lens").astype(np.int64)
        if len(bounds) != len(prompts) + 1 or bounds[0] != 0 or bounds[-1] != len(ids):
            raise InvalidRead(
                f"has {len(bounds)} entries, first and last {bounds[[0, -1]].tolist() if len(bounds) else []}; "
                f"{len(prompts)} reads over {len(ids)} ids need {len(prompts) + 1}, from 0 to {len(ids)}",
                field="cu_seqlens",
            )
        response_lens = np.diff(bounds) - prompts
        wrong = (prompts < 1) | (response_lens < 0)  # bool [B]
        if wrong.any():
            i = int(np.flatnonzero(wrong)[0])
            raise InvalidRead(
                f"is {prompts[i]}; the sample has {bounds[i + 1] - bounds[i]} tokens, of which the prompt has at least "
                "one",
                field=f"prompt_lens[{i}]",
            )
        candidates = None if candidate_ids is None else candidate_matrix(candidate_ids, "candidate_ids")
        starts = bounds_of(response_lens)
        if candidates is not None and (candidates.ndim != 2 or len(candidates) != starts[-1]):
            raise InvalidRead(
                f"has shape {list(candidates.shape)}; allowed is [{starts[-1]}, K], one row per response token",
                field="candidate_ids",
            )
        return cls.from_reads(
            [
                MatrixRead(
                    ids[a : a + c],
                    ids[a + c : b],
                    None if candidates is None else candidates[starts[i] : starts[i + 1]],
                    **options,
                )
                for i, (a, b, c) in enumerate(zip(bounds[:-1], bounds[1:], prompts, strict=True))
            ]
        )

    def __getitem__(self, i: int) -> MatrixRead:
        """Read i.

        Raises:
            IndexError: there is no read i.
            InvalidRead: the arrays do not hold a valid read there (a batch may come from outside).
        """
        i = self._place(i)
        start, end, c = int(self.offsets[i]), int(self.offsets[i + 1]), int(self.prompt_lens[i])
        mode, width = int(self.modes[i]), int(self.widths[i])
        flat = self.candidate_ids[self.candidate_offsets[i] : self.candidate_offsets[i + 1]]
        candidates = None
        if not mode & OMITTED:
            shape = (width,) if mode & SHARED else (end - start - c, width)
            if flat.size != math.prod(shape):  # Python's integers do not wrap
                raise InvalidRead(f"has {flat.size} ids; {list(shape)} are needed", read=i, field="candidate_ids")
            candidates = flat.reshape(shape)
        return MatrixRead(
            self.ids[start : start + c],
            self.ids[start + c : end],
            candidates,
            rows=self.rows[self.row_offsets[i] : self.row_offsets[i + 1]] if mode & ROWS else None,
            top_k=int(self.top_k[i]),
            extras=tuple(name for name, bit in _EXTRA_BITS.items() if mode & bit),
            unknown_candidates="-inf" if mode & UNKNOWN_TO_MINUS_INF else "raise",
            **self._common(i),
        )

    def tokens(self) -> np.ndarray:
        """int64 [N]: tokens of prompt and response of each read."""
        return np.diff(self.offsets)

    def costs(self) -> np.ndarray:
        """int64 [N]: the engine's work for each read, in tokens: a scored row costs a quarter of one more.

        The quarter is the output head's share in a small model (SmolLM2-135M: 28 of 106 million weights).
        """
        return self.tokens() + self.row_counts() // 4

    def reusable(self) -> np.ndarray:
        """int64 [N]: tokens at the start of each read that an engine may take from its cache: those before the token
        that the first scored row is predicted at."""
        first, _ = self._row_bounds()
        return np.clip(self.prompt_lens - 1 + first, 0, self.tokens())

    def row_counts(self) -> np.ndarray:
        """int64 [N]: rows that each read asks for."""
        return np.where(self.modes & ROWS, np.diff(self.row_offsets), self.tokens() - self.prompt_lens)

    def answered_rows(self) -> np.ndarray:
        """int64, flat: the rows that each read asks for, read by read."""
        counts = self.row_counts()
        begins = bounds_of(counts)[:-1]
        rows = np.arange(counts.sum(), dtype=np.int64) - np.repeat(begins, counts)
        rows[np.repeat((self.modes & ROWS) > 0, counts)] = self.rows
        return rows

    def extras(self) -> np.ndarray:
        """int32 [N]: the extras of each read, in the bits of `scoring.columns`."""
        # There they stand in the order of their names, beginning at 1.
        return sum(((self.modes & bit) > 0) << place for place, bit in enumerate(_EXTRA_BITS.values())).astype(np.int32)

    def answer_widths(self) -> np.ndarray:
        """int64 [N]: numbers in each row of each read's answer."""
        return widths_of(self.widths, np.maximum(self.top_k, 0), self.extras())

    def request_bytes(self) -> np.ndarray:
        """int64 [N]: what each read adds to the size of a batch."""
        ids = self.tokens() + np.diff(self.candidate_offsets)
        return 4 * ids + 8 * np.diff(self.row_offsets) + _COLUMN_BYTES

    def answer_bytes(self) -> np.ndarray:
        """int64 [N]: size of each read's scores, with those of rows in between that are not asked for: an engine
        answers one unbroken run of rows."""
        first, end = self._row_bounds()
        return 4 * (end - first) * self.answer_widths()

    def _row_bounds(self) -> tuple[np.ndarray, np.ndarray]:
        """int64 [N] twice: the first row that each read asks for, and the one after its last."""
        first, end = np.zeros(len(self), dtype=np.int64), self.row_counts().astype(np.int64)
        asked = np.flatnonzero(np.diff(self.row_offsets))
        if len(asked):
            first[asked] = np.minimum.reduceat(self.rows, self.row_offsets[asked])
            end[asked] = np.maximum.reduceat(self.rows, self.row_offsets[asked]) + 1
        return first, end


@dataclass(frozen=True, eq=False, repr=False)
class LabelBatch(_Ragged):
    """N label reads. Make one with `from_reads`. `batch[i]` is read i as a `LabelRead`."""

    ids: np.ndarray  # int32 [sum C]
    offsets: np.ndarray  # int64 [N + 1] into ids
    label_ids: np.ndarray  # int32 [sum L]
    label_offsets: np.ndarray  # int64 [N + 1] into label_ids
    priority: np.ndarray  # int32 [N]
    expect_version: np.ndarray  # int64 [N], NO_VERSION where none
    teacher_index: np.ndarray  # int32 [N] into teachers
    teachers: tuple[str | None, ...]

    _read = LabelRead
    _flat = {"ids": "offsets", "label_ids": "label_offsets"}  # noqa: RUF012

    @classmethod
    def from_reads(cls, reads: Sequence[LabelRead]) -> LabelBatch:
        """The batch of these reads, in their order."""
        teachers, teacher_index = _teachers(reads)
        ids, offsets = end_to_end([r.prompt_ids for r in reads], np.int32)
        labels, label_offsets = end_to_end([r.label_ids for r in reads], np.int32)
        return cls(
            ids=ids,
            offsets=offsets,
            label_ids=labels,
            label_offsets=label_offsets,
            priority=np.array([r.priority for r in reads], dtype=np.int32),
            expect_version=_versions(reads),
            teacher_index=teacher_index,
            teachers=teachers,
        )

    def __getitem__(self, i: int) -> LabelRead:
        i = self._place(i)
        return LabelRead(
            self.ids[self.offsets[i] : self.offsets[i + 1]],
            self.label_ids[self.label_offsets[i] : self.label_offsets[i + 1]],
            **self._common(i),
        )

    def tokens(self) -> np.ndarray:
        """int64 [N]: tokens of each prompt."""
        return np.diff(self.offsets)

    def costs(self) -> np.ndarray:
        """int64 [N]: the engine's work for each read, in tokens."""
        return self.tokens()

    def reusable(self) -> np.ndarray:
        """int64 [N]: tokens at the start of each read that an engine may take from its cache: all but the last."""
        return np.maximum(self.tokens() - 1, 0)

    def request_bytes(self) -> np.ndarray:
        """int64 [N]: what each read adds to the size of a batch."""
        return 4 * (self.tokens() + np.diff(self.label_offsets)) + _COLUMN_BYTES

    def answer_bytes(self) -> np.ndarray:
        """int64 [N]: size of each read's scores."""
        return 4 * np.diff(self.label_offsets)


_DTYPES = {
    "ids": np.int32,
    "offsets": np.int64,
    "prompt_lens": np.int64,
    "candidate_ids": np.int32,
    "candidate_offsets": np.int64,
    "widths": np.int64,
    "rows": np.int64,
    "row_offsets": np.int64,
    "modes": np.uint8,
    "top_k": np.int32,
    "label_ids": np.int32,
    "label_offsets": np.int64,
    "priority": np.int32,
    "expect_version": np.int64,
    "teacher_index": np.int32,
}
_EMPTY = np.zeros(0, dtype=np.int32)
_NO_ROWS = np.zeros(0, dtype=np.int64)


def _mode(read: MatrixRead) -> int:
    mode = 0 if read.candidate_ids is not None else OMITTED
    if read.candidate_ids is not None and read.candidate_ids.ndim == 1:
        mode |= SHARED
    if read.rows is not None:
        mode |= ROWS
    if read.unknown_candidates == "-inf":
        mode |= UNKNOWN_TO_MINUS_INF
    for name in read.extras:
        mode |= _EXTRA_BITS[name]
    return mode


def _teachers(reads: Sequence[MatrixRead | LabelRead]) -> tuple[tuple[str | None, ...], np.ndarray]:
    names = tuple(dict.fromkeys(r.teacher for r in reads))
    place = {name: i for i, name in enumerate(names)}
    return names, np.array([place[r.teacher] for r in reads], dtype=np.int32)


def _versions(reads: Sequence[MatrixRead | LabelRead]) -> np.ndarray:
    return np.array([NO_VERSION if r.expect_version is None else r.expect_version for r in reads], dtype=np.int64)


def end_to_end(pieces: Sequence[np.ndarray], dtype: Any, per_read: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """A ragged array of its pieces: all of them end to end, and int64 [N + 1] where each read's begin, with the end.

    Args:
        dtype: of the flat array.
        per_read: pieces of one read.
    """
    lengths = np.array([len(piece) for piece in pieces], dtype=np.int64).reshape(-1, per_read).sum(axis=1)
    flat = np.concatenate(pieces).astype(dtype, copy=False) if pieces else np.zeros(0, dtype)
    return flat, bounds_of(lengths)


def bounds_of(lengths: Any) -> np.ndarray:
    """int64 [N + 1]: where each of N pieces laid end to end begins, with the end."""
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def cut_by_tokens(tokens: np.ndarray, size: int) -> list[np.ndarray]:
    """Runs of consecutive reads, int64 places each, that begin where another `size` tokens have gone by.

    Args:
        tokens: int64 [N], of each read.
        size: tokens of a run, about: the last read of one may reach beyond.
    """
    if not len(tokens):
        return []
    run = (np.cumsum(tokens) - tokens) // size  # int64 [N]
    return np.split(np.arange(len(tokens)), np.flatnonzero(np.diff(run)) + 1)


def _pieces(flat: np.ndarray, offsets: np.ndarray, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The pieces `indices` of a ragged array as one of their own."""
    return end_to_end([flat[offsets[i] : offsets[i + 1]] for i in indices], flat.dtype)


def _array(value: Any) -> np.ndarray:
    return np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)


def _matrix(value: Any, field: str) -> np.ndarray:
    array = _array(value)
    if array.ndim != 2:
        raise InvalidRead(f"has shape {list(array.shape)}; allowed is [B, T]", field=field)
    return array
