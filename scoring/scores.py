"""What a caller gets: the answers to a batch of reads, as one flat float32 array and a few columns.

`MatrixScores` and `LabelScores` are sequences: `scores[i]` is the answer to read i, in the order of the reads.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar

import numpy as np

from scoring.batches import SCHEMA_VERSION, bounds_of, end_to_end
from scoring.columns import Columns
from scoring.errors import InvalidRead, ScoringError, WrongEngineAnswer

NO_TOKEN = -1


@dataclass(frozen=True)
class ReadMeta:
    """Where a score comes from. Two scores compare only when these agree.

    Attributes:
        teacher: its name in the configuration.
        weight_version: which weights: 0 are those of the configuration, each change has a higher one.
        checkpoint: hash of the checkpoint, first 16 hex digits; of an adapter "+" and its own after that of its base.
        engine: name and version.
        dtype, head_dtype: of the body and of the output head.
        scores: "logprobs", or "logits" where the configuration asks for them.
        tensor_parallel_size: over how many devices the engine is split (sums run in another order).
        prompt_tokens: tokens the engine saw, prompt and scored response together.
        cached_tokens: how many of them came from the prefix cache.
        ids_beyond_tokenizer: ids of this read in [tokenizer size, vocabulary).
        next_token: the likeliest token after the last one the engine saw; -1 where it saw none (no rows to score).
    """

    teacher: str
    weight_version: int
    checkpoint: str
    engine: str
    dtype: str
    head_dtype: str
    scores: str
    tensor_parallel_size: int
    prompt_tokens: int = 0
    cached_tokens: int = 0
    ids_beyond_tokenizer: int = 0
    next_token: int = NO_TOKEN
    schema_version: int = SCHEMA_VERSION

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


@dataclass(frozen=True, eq=False)
class MatrixScore:
    """The answer to one `MatrixRead` of n rows.

    Attributes:
        logprobs: float32 [n, K]; -inf in padded columns.
        response_logprobs: float32 [n], of the response's own tokens.
        rows: int64 [n], the response positions answered, in the order asked.
        meta: where the numbers come from.
        top_ids: int32 [n, top_k], the teacher's own likeliest tokens, the likeliest first.
        top_logprobs: float32 [n, top_k], theirs.
        tail_logprob: float32 [n], the logarithm of the probability that lies outside the candidates.
        entropy: float32 [n], of the teacher's whole distribution, in nats.
        rank: int32 [n], how many tokens have a logit at least as large as the response's own, which is one of them.

    The last five are None unless asked for.
    """

    logprobs: np.ndarray
    response_logprobs: np.ndarray
    rows: np.ndarray
    meta: ReadMeta
    top_ids: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None
    tail_logprob: np.ndarray | None = None
    entropy: np.ndarray | None = None
    rank: np.ndarray | None = None


@dataclass(frozen=True, eq=False)
class LabelScore:
    """The answer to one `LabelRead`: `logprobs`, float32 [L], in the order of its label ids."""

    logprobs: np.ndarray
    meta: ReadMeta


META_COLUMNS = dict.fromkeys(("prompt_tokens", "cached_tokens", "ids_beyond_tokenizer", "next_token"), np.int32)
"""The columns of both answers that a read's `ReadMeta` is completed from, and their dtypes."""


@dataclass(frozen=True, eq=False)
class _Scores:
    """What both answers share: a column per read, the metas they point into, and the errors of failed reads.

    `per_read` names the columns with one entry per read, beside `meta_index`, and their dtypes; `flat` the arrays that
    pieces of reads lie in end to end, their dtypes, and the offsets that tell the pieces apart.
    """

    per_read: ClassVar[dict[str, Any]] = META_COLUMNS
    flat: ClassVar[dict[str, tuple[Any, str]]] = {"values": (np.float32, "offsets")}

    values: np.ndarray  # float32, flat
    offsets: np.ndarray  # int64 [N + 1] into values; a failed read has none
    prompt_tokens: np.ndarray  # int32 [N]
    cached_tokens: np.ndarray  # int32 [N]
    ids_beyond_tokenizer: np.ndarray  # int32 [N]
    next_token: np.ndarray  # int32 [N]
    meta_index: np.ndarray  # int32 [N] into metas; -1 for a failed read
    metas: tuple[ReadMeta, ...]
    errors: dict[int, ScoringError] = field(default_factory=dict, kw_only=True)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(len(self)))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} reads, {len(self.errors)} failed)"

    def __getitem__(self, i: int):
        """The answer to read i, or its exception in that place (as `asyncio.gather(return_exceptions=True)` does;
        without that argument no failed read gets this far).

        Raises:
            IndexError: there is no read i.
        """
        if not isinstance(i, int | np.integer):
            raise TypeError(f"scores are indexed by one integer, not {type(i).__name__}")
        if not -len(self) <= i < len(self):
            raise IndexError(f"read {i} of {len(self)}")
        i = int(i) % len(self)
        if i in self.errors:
            return self.errors[i]
        columns = {name: int(getattr(self, name)[i]) for name in META_COLUMNS}
        meta = replace(self.metas[self.meta_index[i]], **columns)
        return self._score(i, self.values[self.offsets[i] : self.offsets[i + 1]], meta)

    def raise_first(self):
        """Self, when no read failed; else raises the first failed read's error."""
        if self.errors:
            raise self.errors[min(self.errors)]
        return self

    def with_failed(self, failed: Mapping[int, ScoringError]):
        """These answers, with reads that were not asked put in their places: `failed` by place in the whole."""
        if not failed:
            return self
        count = len(self) + len(failed)
        asked = np.array([i for i in range(count) if i not in failed], dtype=np.int64)  # int64 [len(self)]
        parts = [(np.array([i]), self.failed(error, 1), np.array([0])) for i, error in failed.items()]
        return self.assemble(count, [(asked, self, np.arange(len(self))), *parts])

    def split(self, sizes: Sequence[int]) -> list:
        """Consecutive pieces of `sizes` reads each (micro-batches, the callers of a joint call).

        Raises:
            ValueError: the sizes do not add up to the number of reads.
        """
        if sum(sizes) != len(self) or min(sizes, default=0) < 0:
            raise ValueError(f"sizes add up to {sum(sizes)}; there are {len(self)} reads")
        return [
            self.assemble(b - a, [(np.arange(b - a), self, np.arange(a, b))])
            for a, b in itertools.pairwise(bounds_of(sizes).tolist())
        ]

    def to_dict(self) -> dict[str, Any]:
        """Plain numpy and builtins, readable without this package: what the named actor answers with.

        Per answer field a list with one entry per read (None where the read failed, or did not ask for it), and
        `errors` by read index.
        """
        names = [name for name in self._answer if name != "meta"]
        scores = [None if i in self.errors else self[i] for i in range(len(self))]
        return {
            **{n: [s and _contiguous(getattr(s, n)) for s in scores] for n in names},
            "meta": [s and s.meta.to_dict() for s in scores],
            "errors": {i: e.to_dict() for i, e in self.errors.items()},
            "schema_version": SCHEMA_VERSION,
        }

    @classmethod
    def assemble(cls, count: int, parts: Sequence[tuple[np.ndarray, _Scores, np.ndarray]]):
        """One answer for `count` reads from pieces of others.

        Args:
            count: reads of the whole.
            parts: (target, scores, source): read `source[j]` of `scores` becomes read `target[j]`.

        Raises:
            WrongEngineAnswer: a read is answered twice, or not at all.
        """
        times = np.zeros(count, np.int64)
        for target, _, _ in parts:
            np.add.at(times, target, 1)
        if (times > 1).any():
            raise WrongEngineAnswer("was answered twice", read=int(np.flatnonzero(times > 1)[0]))
        if (times < 1).any():
            missing = np.flatnonzero(times < 1)
            raise WrongEngineAnswer(f"{len(missing)} of {count} reads have no answer", read=int(missing[0]))
        arrays: dict[str, np.ndarray] = {name: np.empty(count, dtype) for name, dtype in cls.per_read.items()}
        for name, column in arrays.items():
            for target, scores, source in parts:
                column[target] = getattr(scores, name)[source]
        for name, (dtype, offsets) in cls.flat.items():
            pieces: list[np.ndarray | None] = [None] * count
            for target, scores, source in parts:
                flat, bounds = getattr(scores, name), getattr(scores, offsets)
                begins, ends = bounds[source].tolist(), bounds[source + 1].tolist()
                for t, begin, end in zip(target.tolist(), begins, ends, strict=True):
                    pieces[t] = flat[begin:end]
            arrays[name], arrays[offsets] = end_to_end(pieces, dtype)
        metas: dict[ReadMeta, int] = {}
        meta_index, errors = np.empty(count, np.int32), {}
        for target, scores, source in parts:
            # Where each of the part's metas lies in the whole; a failed read's -1 finds the -1 at the end.
            places = np.array([*(metas.setdefault(meta, len(metas)) for meta in scores.metas), -1], np.int32)
            meta_index[target] = places[scores.meta_index[source]]
            if scores.errors:
                at = zip(target.tolist(), source.tolist(), strict=True)
                errors |= {t: scores.errors[s].at(t) for t, s in at if s in scores.errors}
        return cls(meta_index=meta_index, metas=tuple(metas), errors=errors, **arrays)

    @classmethod
    def failed(cls, error: ScoringError, count: int):
        """The answer to `count` reads that all failed with `error`."""
        arrays = {name: np.zeros(count, dtype) for name, dtype in cls.per_read.items()}
        for name, (dtype, offsets) in cls.flat.items():
            arrays[name], arrays[offsets] = np.zeros(0, dtype), np.zeros(count + 1, np.int64)
        return cls(
            **arrays,
            meta_index=np.full(count, -1, np.int32),
            metas=(),
            errors={i: error.at(i) for i in range(count)},
        )


@dataclass(frozen=True, eq=False, repr=False)
class MatrixScores(_Scores):
    """The answers to a `MatrixBatch`.

    Read i's piece of `values` is its block [n, columns(i).width], row by row: see `scoring.columns`.
    """

    widths: np.ndarray  # int64 [N]: K
    top_k: np.ndarray  # int32 [N]
    extras: np.ndarray  # int32 [N]: the bits TAIL, ENTROPY and RANK
    rows: np.ndarray  # int64, flat: the rows answered
    row_offsets: np.ndarray  # int64 [N + 1] into rows

    per_read = META_COLUMNS | {"widths": np.int64, "top_k": np.int32, "extras": np.int32}
    flat = _Scores.flat | {"rows": (np.int64, "row_offsets")}
    _answer = tuple(f.name for f in fields(MatrixScore))

    def columns(self, i: int) -> Columns:
        """What each row of read i's block holds."""
        return Columns.of(int(self.widths[i]), int(self.top_k[i]), int(self.extras[i]))

    def _score(self, i: int, piece: np.ndarray, meta: ReadMeta) -> MatrixScore:
        rows = self.rows[self.row_offsets[i] : self.row_offsets[i + 1]]
        columns = self.columns(i)
        return MatrixScore(**columns.apart(piece.reshape(len(rows), columns.width)), rows=rows, meta=meta)

    def to_padded(self, width: int, fill: float) -> PaddedScores:
        """The answers as rectangular arrays of `width` rows, rows beyond a read's own filled with `fill` (of `top_ids`
        and `rank` with -1).

        Raises:
            ScoringError: a read failed.
            InvalidRead: a read has more rows than `width` (nothing is ever cut off), or the reads differ in K, `top_k`
                or `extras`.
        """
        self.raise_first()
        counts = np.diff(self.row_offsets)
        if counts.max(initial=0) > width:
            raise InvalidRead(
                f"has {int(counts.max())} rows; they do not fit a width of {width}", read=int(counts.argmax())
            )
        for name, what in (("widths", "K"), ("top_k", "top_k"), ("extras", "extras")):
            if len(different := np.unique(getattr(self, name))) > 1:
                raise InvalidRead(
                    f"reads have {what} of {different.tolist()}; one rectangle needs the same {what} in all"
                )
        columns = self.columns(0) if len(self) else Columns(0)
        mask = np.arange(width) < counts[:, None]
        rectangles = {
            name: part if part is None else _spread(part, mask, fill if part.dtype == np.float32 else NO_TOKEN)
            for name, part in columns.apart(self.values.reshape(-1, columns.width)).items()
        }
        return PaddedScores(**rectangles, mask=mask)

    def torch(self) -> list[dict[str, Any]]:
        """Per read a dict of tensors: `logprobs` [n, K], `response_logprobs` [n], `rows` [n], and what was asked for of
        `top_ids`, `top_logprobs` [n, top_k], `tail_logprob`, `entropy` and `rank` [n].

        Raises:
            ScoringError: a read failed.
        """
        return [_tensors(score) for score in self.raise_first()]


@dataclass(frozen=True, eq=False)
class PaddedScores:
    """Rectangular answers of N reads: `logprobs` float32 [N, width, K], `response_logprobs` float32 [N, width],
    `mask` bool [N, width], True where a row was scored; `top_ids` int32 and `top_logprobs` float32 [N, width, top_k],
    `tail_logprob` and `entropy` float32 [N, width], `rank` int32 [N, width], None unless asked for."""

    logprobs: np.ndarray
    response_logprobs: np.ndarray
    mask: np.ndarray
    top_ids: np.ndarray | None = None
    top_logprobs: np.ndarray | None = None
    tail_logprob: np.ndarray | None = None
    entropy: np.ndarray | None = None
    rank: np.ndarray | None = None

    def torch(self) -> dict[str, Any]:
        """The same as tensors, by name, without those that are None."""
        return _tensors(self)


def _spread(rows: np.ndarray, mask: np.ndarray, fill: float) -> np.ndarray:
    """[N, width, ...]: `rows` [sum n, ...] where `mask` [N, width] is True, `fill` elsewhere."""
    spread = np.full((*mask.shape, *rows.shape[1:]), fill, dtype=rows.dtype)
    spread[mask] = rows
    return spread


@dataclass(frozen=True, eq=False, repr=False)
class LabelScores(_Scores):
    """The answers to a `LabelBatch`: read i's piece of `values` is float32 [L], in its labels' order."""

    _answer = ("logprobs", "meta")

    def _score(self, i: int, piece: np.ndarray, meta: ReadMeta) -> LabelScore:
        return LabelScore(logprobs=piece, meta=meta)

    def torch(self) -> list[dict[str, Any]]:
        """Per read a dict of tensors: `logprobs` [L].

        Raises:
            ScoringError: a read failed.
        """
        return [_tensors(score) for score in self.raise_first()]


def one_by_one(
    target: np.ndarray, scores: MatrixScores | LabelScores, source: np.ndarray, return_exceptions: bool
) -> Iterator[tuple[int, Any]]:
    """(target, score) of every read of a part, as `assemble` takes it.

    Raises:
        ScoringError: of the first read that failed, with its target as index, unless `return_exceptions`.
    """
    for read, place in zip(target.tolist(), source.tolist(), strict=True):
        score = scores[place]
        if isinstance(score, ScoringError):
            score = score.at(read)
            if not return_exceptions:
                raise score
        yield read, score


def _contiguous(array: np.ndarray | None) -> np.ndarray | None:
    return array if array is None else np.ascontiguousarray(array)


def _tensors(answer: Any) -> dict[str, Any]:
    """The arrays of an answer as tensors of their own, by name."""
    import torch

    arrays = {f.name: getattr(answer, f.name) for f in fields(answer)}
    return {name: torch.from_numpy(np.array(a)) for name, a in arrays.items() if isinstance(a, np.ndarray)}
