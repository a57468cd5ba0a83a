"""One lane: what this process has waiting for, and outstanding on, one replica, and whose turn it is there."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from deployments.replica_calls import now
from scoring.adapters import Adapter
from scoring.batches import LabelBatch, MatrixBatch
from scoring.scores import LabelScores, MatrixScores

_WINDOW_STEPS = 2
_CHUNKS_A_WINDOW = 4
_REPORT_FRESH_S = 5.0  # how long a replica's word on other Routers' tokens counts
_SPARE_TURNS = 64


class Call:
    """One batch under way. What becomes of its reads arrives in `outcomes`.

    Args:
        answer: the class of its answer.
        method: of the replica.
        batch: the reads.
        deadline: on the event loop's clock.
        trace_headers: for the engine.
        adapters: those that its reads name as their teacher.
        bounded: refuse what exceeds the replicas' `max_outstanding_tokens` here, instead of letting it wait.
    """

    def __init__(
        self,
        answer: type[MatrixScores] | type[LabelScores],
        method: str,
        batch: MatrixBatch | LabelBatch,
        deadline: float,
        trace_headers: Mapping[str, str] | None = None,
        adapters: Mapping[str, Adapter] | None = None,
        bounded: bool = False,
    ) -> None:
        self.answer, self.method, self.batch, self.deadline = answer, method, batch, deadline
        self.trace_headers, self.adapters, self.bounded = trace_headers, adapters, bounded
        self.tokens, self.costs = batch.tokens(), batch.costs()  # int64 [N] each
        self.outcomes: asyncio.Queue = asyncio.Queue()  # of `Outcome`
        self.tasks: set[asyncio.Task] = set()  # its chunks under way


@dataclass(eq=False)
class Chunk:
    """Reads of one call that travel together."""

    call: Call
    reads: np.ndarray  # int64 [n]
    tokens: int
    priority: int
    done: bool = False
    lanes: set[Lane] = field(default_factory=set)  # it waits in or was sent from; two when it was hedged
    tasks: set[asyncio.Task] = field(default_factory=set)


@dataclass(frozen=True)
class Settings:
    """What a replica takes."""

    window: int  # tokens that this process keeps outstanding there
    limit: int  # `max_outstanding_tokens`, of all processes

    @classmethod
    def of(cls, info: Mapping[str, Any]) -> Settings:
        return cls(_WINDOW_STEPS * info["max_batched_tokens"], info["max_outstanding_tokens"])

    @property
    def chunk(self) -> int:
        """Tokens that travel together, about."""
        return max(self.window // _CHUNKS_A_WINDOW, 1)


class Lane:
    """What this process has waiting for, and outstanding on, one replica."""

    def __init__(self, replica: str, settings: Settings) -> None:
        self.replica, self.settings = replica, settings
        self.waiting: dict[Call, deque[Chunk]] = {}
        self.sent: dict[Chunk, float] = {}  # with the time
        self.sent_by: Counter[Call] = Counter()  # tokens
        self.waiting_tokens = self.sent_tokens = 0
        self.refuses_until = 0.0
        self.silent = False
        self._others, self._others_until = 0, 0.0
        # A heap of (priority, tokens under way, number, call); an entry that is no longer so is passed over.
        self._turns: list[tuple[int, int, int, Call]] = []
        self._number = itertools.count()

    @property
    def load(self) -> int:
        """Tokens of this process ahead of whatever is planned here next."""
        return self.waiting_tokens + self.sent_tokens

    @property
    def others(self) -> int:
        """Tokens that other Routers had outstanding here, by the replica's last word; it is soon forgotten."""
        return self._others if now() < self._others_until else 0

    def hear(self, outstanding: int) -> None:
        """Take in what the replica says is outstanding there, of all Routers."""
        self._others, self._others_until = max(outstanding - self.sent_tokens, 0), now() + _REPORT_FRESH_S

    def add(self, chunk: Chunk, first: bool = False) -> None:
        queue = self.waiting.setdefault(chunk.call, deque())
        queue.appendleft(chunk) if first else queue.append(chunk)
        chunk.lanes.add(self)
        self.waiting_tokens += chunk.tokens
        if queue[0] is chunk:
            self._set_turn(chunk.call)

    def next(self) -> Chunk:
        """The chunk whose turn it is: the most urgent; among equals, that of the call with least under way here."""
        while True:
            priority, tokens, _, call = self._turns[0]
            if call in self.waiting and (priority, tokens) == (self.waiting[call][0].priority, self.sent_by[call]):
                return self.waiting[call][0]
            heapq.heappop(self._turns)

    def take(self, call: Call) -> Iterable[Chunk]:
        """Remove and return the chunks of a call that wait."""
        chunks = self.waiting.pop(call, ())
        self.waiting_tokens -= sum(chunk.tokens for chunk in chunks)
        return chunks

    def take_first(self, chunk: Chunk) -> None:
        queue = self.waiting[chunk.call]
        queue.popleft()
        if not queue:
            del self.waiting[chunk.call]
        self.waiting_tokens -= chunk.tokens
        self._set_turn(chunk.call)

    def send(self, chunk: Chunk) -> None:
        self.sent[chunk] = now()
        self.sent_tokens += chunk.tokens
        self.sent_by[chunk.call] += chunk.tokens
        self._set_turn(chunk.call)

    def settle(self, chunk: Chunk) -> None:
        del self.sent[chunk]
        self.sent_tokens -= chunk.tokens
        self.sent_by[chunk.call] -= chunk.tokens
        if not self.sent_by[chunk.call]:
            del self.sent_by[chunk.call]
        self._set_turn(chunk.call)

    def _set_turn(self, call: Call) -> None:
        """Call this when what decides the call's turn has changed."""
        if call in self.waiting:
            entry = self.waiting[call][0].priority, self.sent_by[call], next(self._number), call
            heapq.heappush(self._turns, entry)
        if len(self._turns) > 2 * len(self.waiting) + _SPARE_TURNS:  # so that it keeps no call that has ended
            calls, self._turns = tuple(self.waiting), []
            for call in calls:
                entry = self.waiting[call][0].priority, self.sent_by[call], next(self._number), call
                self._turns.append(entry)
            heapq.heapify(self._turns)
