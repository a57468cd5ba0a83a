"""Reads gathered into pieces: what one call asks, one file on disk keeps, and a run that is killed may lose."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from scoring import wire
from scoring.batches import LabelBatch, MatrixBatch
from scoring.cli.ending import WrongInput
from scoring.cli.rows import Row
from scoring.errors import InvalidRead
from scoring.reads import LabelRead, MatrixRead
from scoring.row_reads import LabelReads, MatrixReads

# A piece is closed by the read that reaches one of these.
_READS = 512
_TOKENS = 16_384
_BYTES = 8 << 20  # of request and answer


@dataclass(frozen=True, eq=False)
class Piece:
    """Consecutive rows.

    Attributes:
        number: of the piece, from 0.
        batch: the reads of its rows, without those that make none.
        bad: why the others make none, by place in the piece.
        places: of all its rows, for people.
        size: how far they bring one through the file.
    """

    number: int
    batch: MatrixBatch | LabelBatch
    bad: dict[int, InvalidRead]
    places: list[str]
    size: int
    key: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", _key(self.batch, self.bad))

    def __len__(self) -> int:
        return len(self.places)


def cut(kind: wire.Kind, rows: Iterable[Row], reads: MatrixReads | LabelReads) -> Iterator[Piece]:
    """The rows of a file in pieces, the same ones whenever the rows are the same.

    Raises:
        WrongInput: no row of the first piece makes a read: this is not the file, or not the options, that were meant.
    """
    number, made, bad, places, size = 0, [], {}, [], 0
    tokens = volume = 0

    def piece() -> Piece:
        if number == 0 and places and not made:
            raise WrongInput(f"{places[0]}: {bad[0]}")
        return Piece(number, wire.BATCH[kind].from_reads(made), bad, places, size)

    for row in rows:
        try:
            if isinstance(row.fields, InvalidRead):
                raise row.fields
            read = reads.read(row.fields)
            more_tokens, more_bytes = _weight(read)
            tokens, volume = tokens + more_tokens, volume + more_bytes
            made.append(read)
        except InvalidRead as error:
            bad[len(places)] = error
        places.append(row.place)
        size += row.size
        if len(places) >= _READS or tokens >= _TOKENS or volume >= _BYTES:
            yield piece()
            number, made, bad, places, size = number + 1, [], {}, [], 0
            tokens = volume = 0
    if places:
        yield piece()


def _weight(read: MatrixRead | LabelRead) -> tuple[int, int]:
    """Tokens of a read, and bytes of its ids and its answer."""
    if isinstance(read, LabelRead):
        return len(read.prompt_ids), 4 * (len(read.prompt_ids) + 2 * len(read.label_ids))
    tokens = len(read.prompt_ids) + len(read.response_ids)
    candidates = 0 if read.candidate_ids is None else read.candidate_ids.size
    return tokens, 4 * (tokens + candidates + read.row_count * read.columns.width)


def _key(batch: MatrixBatch | LabelBatch, bad: dict[int, InvalidRead]) -> str:
    """Names what is asked: every id and option of the reads, in their order."""
    total = hashlib.sha256(json.dumps([batch.teachers, [(i, str(error)) for i, error in bad.items()]]).encode())
    for f in fields(batch):
        if f.name != "teachers":
            array: Any = getattr(batch, f.name)
            total.update(f"{f.name} {len(array)} ".encode())
            total.update(np.ascontiguousarray(array).data)
    return total.hexdigest()[:32]
