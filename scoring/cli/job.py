"""A file scored: pieces asked a few at a time, kept as they are answered, and joined at the end."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from scoring import score_file, wire
from scoring.cli.display import Display
from scoring.cli.finished import FinishedPieces
from scoring.cli.pieces import Piece
from scoring.columns import widths_of
from scoring.errors import OF_THE_SERVICE, InvalidRead, ScoringError
from scoring.http_client import AsyncHttpScoringClient
from scoring.scores import LabelScores, MatrixScores, ReadMeta

# What an answer says of its source, and `teachers()` of a teacher: scores compare only where these agree.
SOURCE = ("checkpoint", "weight_version", "engine", "dtype", "head_dtype", "scores", "tensor_parallel_size")


class TeacherChanged(ScoringError):
    """The teacher is not the one it was when the run began."""


@dataclass
class Totals:
    """Of a whole output: its reads, those that failed, tokens prefilled, and the scores of the tokens asked about."""

    reads: int = 0
    failed: int = 0
    tokens: int = 0
    scores: int = 0
    sum: float = 0.0

    def add(self, scores: MatrixScores | LabelScores) -> None:
        self.reads += len(scores)
        self.failed += len(scores.errors)
        self.tokens += int(scores.prompt_tokens.sum(dtype=np.int64))
        own = _own(scores)
        self.scores += len(own)
        self.sum += float(own.sum(dtype=np.float64))

    @property
    def mean(self) -> float | None:
        return self.sum / self.scores if self.scores else None


def source_of(teacher: Mapping[str, Any]) -> dict[str, Any]:
    """What scores of a teacher come from."""
    return {name: teacher[name] for name in SOURCE}


def totals_of(finished: FinishedPieces, count: int) -> Totals:
    totals = Totals()
    for path in finished.paths(count):
        totals.add(score_file.load(path).scores)
    return totals


async def ask_pieces(
    kind: wire.Kind,
    pieces: Iterator[Piece],
    finished: FinishedPieces,
    source: Mapping[str, Any],
    client: AsyncHttpScoringClient,
    concurrency: int,
    display: Display,
) -> int:
    """Ask what is not finished yet. Returns how many pieces there are.

    Args:
        source: what the answers must come from.
        concurrency: pieces under way at a time.

    Raises:
        ScoringError: the service cannot answer; `finished` has what it answered before.
        TeacherChanged: an answer has another source.
        WrongInput: the rows cannot be read.
        asyncio.CancelledError: on SIGTERM.
    """
    task = asyncio.current_task()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)

    async def ask(piece: Piece) -> None:
        scores = await _answer(kind, piece, client)
        _check_source(scores.metas, source)
        failed = await asyncio.to_thread(finished.put, piece, scores)
        for i in sorted(failed):
            display.failure(piece.places[i], failed[i].at(None))
        display.advance(piece.size, len(piece), int(scores.prompt_tokens.sum()))

    count, changed = 0, 0
    under_way: set[asyncio.Task] = set()
    try:
        while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
            count += 1
            state = finished.state(piece)
            if state == "finished":
                display.found(piece.size)
                continue
            if state == "changed":
                changed += 1
                if changed == 1:
                    display.say(
                        f"the rows from {piece.places[0]} to {piece.places[-1]}, or the options, are not those of the "
                        "run before: they, and whatever else has changed, are scored anew"
                    )
            if len(under_way) == concurrency:
                await _some_done(under_way)
            under_way.add(asyncio.create_task(ask(piece)))
        while under_way:
            await _some_done(under_way)
    finally:
        for asking in under_way:
            asking.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)
    return count


async def _some_done(under_way: set[asyncio.Task]) -> None:
    """Wait for one to be done, and take out those that are. Raises what any raised."""
    done, _ = await asyncio.wait(under_way, return_when=asyncio.FIRST_COMPLETED)
    under_way -= done
    for task in done:
        task.result()


async def _answer(kind: wire.Kind, piece: Piece, client: AsyncHttpScoringClient) -> MatrixScores | LabelScores:
    """The answers to the reads of a piece, with the errors of those that failed by themselves."""
    ask = client.read_matrix if kind == "matrix" else client.read_labels
    try:
        scores = await ask(piece.batch, return_exceptions=True)
    except InvalidRead as error:  # of the call as a whole: one read that is more than a call may hold
        if len(piece.batch) > 1:
            raise
        scores = wire.SCORES[kind].failed(error, 1)
    for error in scores.errors.values():
        if isinstance(error, OF_THE_SERVICE):
            raise error
    return scores


def _check_source(metas: tuple[ReadMeta, ...], source: Mapping[str, Any]) -> None:
    for meta in metas:
        for name in SOURCE:
            if (now := getattr(meta, name)) != source[name]:
                raise TeacherChanged(
                    f"the teacher has changed while it scored: its {name} was {source[name]}, it is {now}"
                )


def _own(scores: MatrixScores | LabelScores) -> np.ndarray:
    """float32, flat: of each row the response token's own score; of label reads every score."""
    if isinstance(scores, LabelScores):
        return scores.values
    counts = np.diff(scores.row_offsets)  # int64 [N]: rows of each read
    widths = np.repeat(widths_of(scores.widths, scores.top_k, scores.extras), counts)  # int64 [sum n]: of each row
    return scores.values[np.cumsum(widths) - widths]
