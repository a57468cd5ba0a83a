"""One lane: what this process has waiting for, and outstanding on, one replica, and whose turn it is there."""

from __future__ import annotations

import asyncio
import copy
import heapq
import itertools
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from deployments.replica_calls import now
from scoring.adapters import Adapter
from scoring.affinity import Groups, Prefixes
from scoring.batches import LabelBatch, MatrixBatch
from scoring.scores import LabelScores, MatrixScores

_WINDOW_STEPS = 2
_CHUNKS_A_WINDOW = 2
_REPORT_FRESH_S = 5.0  # how long a replica's word on other Routers' tokens counts
_EXPRESS = 1.25  # of the window: how far a call that has nothing outstanding on a lane may fill it


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
        self._prefixes: dict[int, Prefixes] = {}  # by the size of a block
        self.versions: dict[Any, int] = {}  # per teacher's `Lanes`, of the weights that its reads there are meant for
        self.outcomes: asyncio.Queue = asyncio.Queue()  # of `Outcome`
        self.tasks: set[asyncio.Task] = set()  # its chunks under way

    def anew(self, lanes: Any) -> Call:
        """The same call with nothing under way, and free to be meant for other weights of one teacher."""
        call = copy.copy(self)
        call.versions = {other: version for other, version in self.versions.items() if other is not lanes}
        call.outcomes, call.tasks = asyncio.Queue(), set()
        return call

    def prefixes(self, block: int) -> Prefixes:
        """Those of its reads that an engine with blocks of so many tokens may take from its cache."""
        if block not in self._prefixes:
            adapters = [(self.adapters or {}).get(name) for name in self.batch.teachers]
            serials = np.array([0 if adapter is None else adapter.serial for adapter in adapters], np.int64)
            salts = serials[self.batch.teacher_index]
            self._prefixes[block] = Prefixes(self.batch.ids, self.batch.offsets, self.batch.reusable(), block, salts)
        return self._prefixes[block]


@dataclass(eq=False)
class Chunk:
    """Reads of one call that travel together."""

    call: Call
    reads: np.ndarray  # int64 [n]
    tokens: int
    reused: int  # of these, those that the engine it was planned for should find in its cache
    priority: int
    groups: Groups | None = None  # of the plan that it is of
    planned: np.ndarray | None = None  # int64 [n], its reads as that plan numbers them
    done: bool = False
    hedged: bool = False  # where it is sent now is not where it was planned for
    lanes: set[Lane] = field(default_factory=set)  # it waits in or was sent from; two when it was hedged
    tasks: set[asyncio.Task] = field(default_factory=set)


@dataclass(frozen=True)
class Settings:
    """What a replica takes."""

    window: int  # tokens of work that this process keeps outstanding there
    limit: int  # `max_outstanding_tokens`, of all processes
    block: int  # tokens of a block of its prefix cache; 0 without one

    @classmethod
    def of(cls, info: Mapping[str, Any]) -> Settings:
        block = info["block_size"] if info.get("prefix_reuse") else 0
        return cls(_WINDOW_STEPS * info["max_batched_tokens"], info["max_outstanding_tokens"], block)

    @property
    def chunk(self) -> int:
        """Tokens of work that travel together, about."""
        return max(self.window // _CHUNKS_A_WINDOW, 1)


class Lane:
    """What this process has waiting for, and outstanding on, one replica."""

    def __init__(self, replica: str, settings: Settings, version: int | None = None) -> None:
        self.replica, self.settings = replica, settings
        self.version = version  # of its weights, as last heard; None before that
        self.waiting: dict[Call, deque[Chunk]] = {}
        self.sent: dict[Chunk, float] = {}  # with the time
        self.sent_by: Counter[Call] = Counter()  # work
        self.load = self.sent_load = 0  # work of all that is here, and of what is sent
        self.tokens = self.sent_tokens = 0  # the same in tokens, cached or not
        self.refuses_until = 0.0
        self.silent = False
        self._others, self._others_until = 0, 0.0
        self._work: dict[Chunk, int] = {}
        self._found = 1.0  # of the tokens that its cache was lately thought to hold, the part that it held
        # A heap of (priority, work under way, number, call); an entry that is no longer so is passed over.
        self._turns: list[tuple[int, int, int, Call]] = []
        self._number = itertools.count()

    @property
    def others(self) -> int:
        """Tokens that other Routers had outstanding here, by the replica's last word; it is soon forgotten."""
        return self._others if now() < self._others_until else 0

    def hear(self, outstanding: int) -> None:
        """Take in what the replica says is outstanding there, of all Routers."""
        self._others, self._others_until = max(outstanding - self.sent_tokens, 0), now() + _REPORT_FRESH_S

    def work(self, tokens: Any, reused: Any) -> Any:
        """int64 [n] or an integer: the work for reads of which the engine should find so many tokens in its cache, as
        far as it lately did.

        A token that is found counts too, so that a full window is no more than half of what the replica takes.
        """
        least = tokens * 2 * self.settings.window // self.settings.limit
        return np.maximum(tokens - (reused * self._found).astype(np.int64), np.minimum(least, tokens))

    def note_cached(self, chunk: Chunk, found: int) -> None:
        """Take in how many tokens of a chunk the engine has found in its cache."""
        if chunk.reused:
            self._found += (min(found / chunk.reused, 1.0) - self._found) / 2

    def add(self, chunk: Chunk, hedge: bool = False) -> None:
        """Have a chunk wait here; one that was planned for another lane before all others of its call, and without
        counting on what is cached there."""
        queue = self.waiting.setdefault(chunk.call, deque())
        queue.appendleft(chunk) if hedge else queue.append(chunk)
        chunk.lanes.add(self)
        chunk.hedged = chunk.hedged or hedge
        self._weigh(chunk)
        self.tokens += chunk.tokens
        if queue[0] is chunk:
            self._set_turn(chunk.call)

    def next(self) -> Chunk:
        """The chunk whose turn it is: the most urgent; among equals, that of the call with least under way here."""
        while True:
            priority, work, _, call = self._turns[0]
            if call in self.waiting and (priority, work) == (self.waiting[call][0].priority, self.sent_by[call]):
                return self.waiting[call][0]
            heapq.heappop(self._turns)

    def take(self, call: Call) -> Iterable[Chunk]:
        """Remove and return the chunks of a call that wait."""
        chunks = self.waiting.pop(call, ())
        for chunk in chunks:
            self._drop(chunk)
        return chunks

    def has_room(self, chunk: Chunk) -> bool:
        """Whether the window has room for the chunk whose turn it is; on an idle lane it has."""
        self._weigh(chunk)  # more is known of the cache than when it was added
        room = self.settings.window * (1 if self.sent_by[chunk.call] else _EXPRESS)
        return not self.sent or self.sent_load + self._work[chunk] <= room

    def send_next(self) -> Chunk | None:
        """Take the chunk whose turn it is as sent; None where its answer has come from elsewhere meanwhile."""
        chunk = self.next()
        queue = self.waiting[chunk.call]
        queue.popleft()
        if not queue:
            del self.waiting[chunk.call]
        if chunk.done:
            self._drop(chunk)
        else:
            self.sent[chunk] = now()
            self.sent_tokens += chunk.tokens
            self.sent_load += self._work[chunk]
            self.sent_by[chunk.call] += self._work[chunk]
        self._set_turn(chunk.call)
        return None if chunk.done else chunk

    def settle(self, chunk: Chunk) -> None:
        """The call that a chunk was sent with has ended."""
        del self.sent[chunk]
        self.sent_tokens -= chunk.tokens
        self.sent_load -= self._work[chunk]
        self.sent_by[chunk.call] -= self._work[chunk]
        if not self.sent_by[chunk.call]:
            del self.sent_by[chunk.call]
        self._drop(chunk)
        self._set_turn(chunk.call)

    def _weigh(self, chunk: Chunk) -> None:
        reused = 0 if chunk.hedged else chunk.reused
        work = int(self.work(np.int64(chunk.tokens), np.int64(reused)))
        self.load += work - self._work.get(chunk, 0)
        self._work[chunk] = work

    def _drop(self, chunk: Chunk) -> None:
        self.load -= self._work.pop(chunk)
        self.tokens -= chunk.tokens

    def _set_turn(self, call: Call) -> None:
        """Call this when what decides the call's turn has changed."""
        if call in self.waiting:
            heapq.heappush(self._turns, self._turn(call))
        if len(self._turns) > 2 * len(self.waiting):  # so that it keeps few calls, and their batches, that have ended
            self._turns = [self._turn(call) for call in self.waiting]
            heapq.heapify(self._turns)

    def _turn(self, call: Call) -> tuple[int, int, int, Call]:
        return self.waiting[call][0].priority, self.sent_by[call], next(self._number), call
