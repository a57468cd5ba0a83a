"""What a caller gets: the answers to a batch of reads, as one flat float32 array and a few columns.

`MatrixScores` and `LabelScores` are sequences: `scores[i]` is the answer to read i, in the order of the reads.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import numpy as np

from scoring.batches import SCHEMA_VERSION, end_to_end
from scoring.errors import InvalidRead, ScoringError, WrongEngineAnswer

NO_TOKEN = -1


@dataclass(frozen=True)
class ReadMeta:
    """Where a score comes from. Two scores compare only when these agree.

    Attributes:
        teacher: its name in the configuration.
        weight_version: which weights: 0 are the checkpoint's, each update adds one.
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
        return asdict(self)


@dataclass(frozen=True, eq=False)
class MatrixScore:
    """The answer to one `MatrixRead` of n rows.

    Attributes:
        logprobs: float32 [n, K]; -inf in padded columns.
        response_logprobs: float32 [n], of the response's own tokens.
        rows: int64 [n], the response positions answered, in the order asked.
        meta: where the numbers come from.
        top_ids, top_logprobs, tail_logprob, entropy: None unless asked for.
    """

    logprobs: np.ndarray
    response_logprobs: np.ndarray
    rows: np.ndarray
    meta: ReadMeta
    top_ids: np.ndarray | None = None  # int32 [n, top_k]
    top_logprobs: np.ndarray | None = None  # float32 [n, top_k]
    tail_logprob: np.ndarray | None = None  # float32 [n]
    entropy: np.ndarray | None = None  # float32 [n]


@dataclass(frozen=True, eq=False)
class LabelScore:
    """The answer to one `LabelRead`: `logprobs`, float32 [L], in the order of its label ids."""

    logprobs: np.ndarray
    meta: ReadMeta


@dataclass(frozen=True, eq=False)
class _Scores:
    """What both answers share: a column per read, the metas they point into, and the errors of failed reads."""

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
        meta = replace(
            self.metas[self.meta_index[i]],
            prompt_tokens=int(self.prompt_tokens[i]),
            cached_tokens=int(self.cached_tokens[i]),
            ids_beyond_tokenizer=int(self.ids_beyond_tokenizer[i]),
            next_token=int(self.next_token[i]),
        )
        return self._score(i, self.values[self.offsets[i] : self.offsets[i + 1]], meta)

    def raise_first(self):
        """Self, when no read failed; else raises the first failed read's error."""
        if self.errors:
            raise self.errors[min(self.errors)]
        return self

    def split(self, sizes: Sequence[int]) -> list:
        """Consecutive pieces of `sizes` reads each (micro-batches, the callers of a joint call).

        Raises:
            ValueError: the sizes do not add up to the number of reads.
        """
        if sum(sizes) != len(self) or min(sizes, default=0) < 0:
            raise ValueError(f"sizes add up to {sum(sizes)}; there are {len(self)} reads")
        bounds = np.concatenate([[0], np.cumsum(np.asarray(sizes, dtype=np.int64))]).astype(np.int64)
        return [
            self.assemble(int(b - a), [(np.arange(b - a), self, np.arange(a, b))])
            for a, b in itertools.pairwise(bounds)
        ]

    def to_dict(self) -> dict[str, Any]:
        """Plain numpy and builtins, readable without this package: what the named actor answers with.

        Per answer field a list with one entry per read (None where the read failed), and `errors` by read index.
        """
        names = [name for name in self._answer if name != "meta"]
        scores = [None if i in self.errors else self[i] for i in range(len(self))]
        return {
            **{n: [s and np.ascontiguousarray(getattr(s, n)) for s in scores] for n in names},
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
        origin: list[tuple[_Scores, int] | None] = [None] * count
        metas: dict[ReadMeta, int] = {}
        for target, scores, source in parts:
            for t, s in zip(target.tolist(), source.tolist(), strict=True):
                if origin[t] is not None:
                    raise WrongEngineAnswer("was answered twice", read=t)
                origin[t] = (scores, s)
            for meta in scores.metas:
                metas.setdefault(meta, len(metas))
        missing = [t for t, o in enumerate(origin) if o is None]
        if missing:
            raise WrongEngineAnswer(f"{len(missing)} of {count} reads have no answer", read=missing[0])
        columns: dict[str, Any] = {
            name: np.array([getattr(s, name)[i] for s, i in origin], dtype=dtype)
            for name, dtype in cls._columns.items()
        }
        values, offsets = end_to_end([s.values[s.offsets[i] : s.offsets[i + 1]] for s, i in origin], np.float32)
        rows = cls._gather_rows(origin)
        return cls(
            values=values,
            offsets=offsets,
            meta_index=np.array(
                [-1 if i in s.errors else metas[s.metas[s.meta_index[i]]] for s, i in origin], dtype=np.int32
            ),
            metas=tuple(metas),
            errors={t: s.errors[i].at(t) for t, (s, i) in enumerate(origin) if i in s.errors},
            **columns,
            **rows,
        )

    @classmethod
    def failed(cls, error: ScoringError, count: int):
        """The answer to `count` reads that all failed with `error`."""
        zeros = {name: np.zeros(count, dtype) for name, dtype in cls._columns.items()}
        offsets = {f.name: np.zeros(count + 1, np.int64) for f in fields(cls) if f.name.endswith("offsets")}
        flat = {"values": np.zeros(0, np.float32)}
        if "rows" in {f.name for f in fields(cls)}:
            flat["rows"] = np.zeros(0, np.int64)
        return cls(
            **flat,
            **offsets,
            **zeros,
            meta_index=np.full(count, -1, np.int32),
            metas=(),
            errors={i: error.at(i) for i in range(count)},
        )


PER_READ = dict.fromkeys(("prompt_tokens", "cached_tokens", "ids_beyond_tokenizer", "next_token"), np.int32)
"""The columns of both answers that a read's `ReadMeta` is completed from, and their dtypes."""


@dataclass(frozen=True, eq=False, repr=False)
class MatrixScores(_Scores):
    """The answers to a `MatrixBatch`.

    Read i's piece of `values` is its [n, 1 + K] block, row by row: the response's own token first, then the
    candidates.
    """

    widths: np.ndarray  # int64 [N]: K
    rows: np.ndarray  # int64, flat: the rows answered
    row_offsets: np.ndarray  # int64 [N + 1] into rows

    _columns = {**PER_READ, "widths": np.int64}  # noqa: RUF012
    _answer = ("logprobs", "response_logprobs", "rows", "meta")

    def _score(self, i: int, piece: np.ndarray, meta: ReadMeta) -> MatrixScore:
        rows = self.rows[self.row_offsets[i] : self.row_offsets[i + 1]]
        block = piece.reshape(len(rows), 1 + int(self.widths[i]))
        return MatrixScore(logprobs=block[:, 1:], response_logprobs=block[:, 0], rows=rows, meta=meta)

    @classmethod
    def _gather_rows(cls, origin: list[tuple[MatrixScores, int]]) -> dict[str, np.ndarray]:
        rows, row_offsets = end_to_end([s.rows[s.row_offsets[i] : s.row_offsets[i + 1]] for s, i in origin], np.int64)
        return {"rows": rows, "row_offsets": row_offsets}

    def to_padded(self, width: int, fill: float) -> PaddedScores:
        """The answers as rectangular arrays of `width` rows, rows beyond a read's own filled with `fill`.

        Raises:
            ScoringError: a read failed.
            InvalidRead: a read has more rows than `width` (nothing is ever cut off), or the reads' K differ.
        """
        self.raise_first()
        counts = np.diff(self.row_offsets)
        if counts.max(initial=0) > width:
            raise InvalidRead(
                f"has {int(counts.max())} rows; they do not fit a width of {width}", read=int(counts.argmax())
            )
        columns = np.unique(self.widths)
        if len(columns) > 1:
            raise InvalidRead(f"reads have K of {columns.tolist()}; one rectangle needs the same K in all")
        k = int(columns[0]) if len(columns) else 0
        padded = np.full((len(self), width, 1 + k), fill, dtype=np.float32)
        mask = np.arange(width) < counts[:, None]
        padded[mask] = self.values.reshape(-1, 1 + k)
        return PaddedScores(logprobs=padded[..., 1:], response_logprobs=padded[..., 0], mask=mask)

    def torch(self) -> list[dict[str, Any]]:
        """Per read a dict of tensors: `logprobs` [n, K], `response_logprobs` [n], `rows` [n].

        Raises:
            ScoringError: a read failed.
        """
        return _tensors(self.raise_first(), ("logprobs", "response_logprobs", "rows"))


@dataclass(frozen=True, eq=False)
class PaddedScores:
    """Rectangular answers of N reads: `logprobs` float32 [N, width, K], `response_logprobs` float32 [N, width],
    `mask` bool [N, width], True where a row was scored."""

    logprobs: np.ndarray
    response_logprobs: np.ndarray
    mask: np.ndarray

    def torch(self) -> dict[str, Any]:
        """The same three as tensors, by name."""
        import torch

        return {f.name: torch.from_numpy(np.ascontiguousarray(getattr(self, f.name))) for f in fields(self)}


@dataclass(frozen=True, eq=False, repr=False)
class LabelScores(_Scores):
    """The answers to a `LabelBatch`: read i's piece of `values` is float32 [L], in its labels' order."""

    _columns = PER_READ
    _answer = ("logprobs", "meta")

    def _score(self, i: int, piece: np.ndarray, meta: ReadMeta) -> LabelScore:
        return LabelScore(logprobs=piece, meta=meta)

    @classmethod
    def _gather_rows(cls, origin: list) -> dict[str, np.ndarray]:
        return {}

    def torch(self) -> list[dict[str, Any]]:
        """Per read a dict of tensors: `logprobs` [L].

        Raises:
            ScoringError: a read failed.
        """
        return _tensors(self.raise_first(), ("logprobs",))


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


def _tensors(scores: _Scores, names: Sequence[str]) -> list[dict[str, Any]]:
    import torch

    return [{name: torch.from_numpy(np.array(getattr(score, name))) for name in names} for score in scores]
