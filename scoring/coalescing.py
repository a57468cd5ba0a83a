"""Single reads, gathered for a few milliseconds into one call: `submit` of the clients."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from scoring.errors import InvalidRead, ScoringError
from scoring.reads import LabelRead, MatrixRead

_GATHER_S = 0.003

Iterate = Callable[..., AsyncIterator[tuple[int, Any]]]
"""(reads, timeout_s=..., return_exceptions=True) -> (index, score or exception) as they finish."""


class Coalescer:
    """Gathers reads submitted one by one. Use it from one event loop.

    Args:
        iterate: per class of read, what answers many of them.
    """

    def __init__(self, iterate: Mapping[type[MatrixRead] | type[LabelRead], Iterate]) -> None:
        self._iterate = iterate
        self._gathered: dict[tuple[type, float], list[tuple[Any, asyncio.Future]]] = {}
        self._answering: set[asyncio.Task] = set()

    def submit(self, read: MatrixRead | LabelRead, timeout_s: float) -> asyncio.Future:
        """The future score of one read. Cancelled before its call is sent, it is left out; a call all of whose
        futures are cancelled is cancelled.

        Raises:
            InvalidRead: it is no read.
        """
        if type(read) not in self._iterate:
            raise InvalidRead(f"is a {type(read).__name__}; submit takes a MatrixRead or a LabelRead", field="read")
        loop = asyncio.get_running_loop()
        key = type(read), timeout_s
        if key not in self._gathered:
            self._gathered[key] = []
            loop.call_later(_GATHER_S, self._send, key)
        future = loop.create_future()
        self._gathered[key].append((read, future))
        return future

    def _send(self, key: tuple[type, float]) -> None:
        gathered = [(read, future) for read, future in self._gathered.pop(key) if not future.done()]
        if not gathered:
            return
        reads, futures = zip(*gathered, strict=True)
        task = asyncio.create_task(_answer(self._iterate[key[0]], reads, futures, key[1]))
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

        waiting = len(futures)

        def leave_if_alone(_: asyncio.Future) -> None:
            nonlocal waiting
            waiting -= 1
            if not waiting:
                task.cancel()

        for future in futures:
            future.add_done_callback(leave_if_alone)


async def _answer(iterate: Iterate, reads: Sequence[Any], futures: Sequence[asyncio.Future], timeout_s: float) -> None:
    try:
        async for i, score in iterate(reads, timeout_s=timeout_s, return_exceptions=True):
            if futures[i].done():
                continue
            if isinstance(score, ScoringError):
                futures[i].set_exception(score.at(None))
            else:
                futures[i].set_result(score)
    except Exception as error:
        for future in futures:
            if not future.done():
                future.set_exception(error)
    finally:
        for future in futures:
            future.cancel()  # those without an answer: this was cancelled
