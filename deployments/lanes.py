"""How the reads of many calls share the replicas of one teacher: one lane a replica, a window on each.

The reads of a call are planned over the lanes and cut into chunks of about half an engine step. A lane sends chunks
while no more than two steps' tokens are outstanding there, so that the engine never waits, a small call passes a huge
one within three steps, and a caller that dies leaves only seconds of work behind. Chunks that wait are planned again
whenever replicas come, go or run dry, and those of a replica that has fallen silent are sent to another as well.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from deployments.replica_calls import POLL_S, ReplicaLost, Replicas, now
from scoring.adapters import Adapter
from scoring.batches import LabelBatch, MatrixBatch, cut_by_tokens
from scoring.errors import DeadlineExceeded, Overloaded, ScoringError, TeacherUnavailable
from scoring.scores import LabelScores, MatrixScores
from scoring.sharding import plan

logger = logging.getLogger(__name__)

_WINDOW_STEPS = 2
_CHUNKS_A_WINDOW = 4
_EXPRESS = 1.25  # of the window: how far a call that has nothing outstanding on a lane may fill it
_REPORT_FRESH_S = 5.0  # how long a replica's word on other Routers' tokens counts
_REFUSAL_S = 0.1  # how long a replica that refused is left alone
_WATCH_S = 1.0
_QUIET_S = 2.0  # a chunk under way for longer makes its lane ask for the replica's heartbeat
_STALL_S, _STALL_STEPS = 8.0, 3  # no step for the larger of these: seconds, multiples of the longest step seen
_INFO_S = 2.0  # how long one replica may take to say what it is


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
        self.outcomes: asyncio.Queue[Outcome] = asyncio.Queue()
        self.tasks: set[asyncio.Task] = set()  # its chunks under way


@dataclass(frozen=True)
class Outcome:
    """What became of some reads of a call: scores, or why there are none."""

    lanes: Lanes
    reads: np.ndarray  # int64 [n], places in the call's batch
    result: MatrixScores | LabelScores | ScoringError | ReplicaLost
    replica: str | None = None


@dataclass(eq=False)
class _Chunk:
    """Reads of one call that travel together."""

    call: Call
    reads: np.ndarray  # int64 [n]
    tokens: int
    priority: int
    done: bool = False
    lanes: set[_Lane] = field(default_factory=set)  # it waits in or was sent from; two when it was hedged
    tasks: set[asyncio.Task] = field(default_factory=set)


class _Lane:
    """What this process has waiting for, and outstanding on, one replica."""

    def __init__(self, replica: str) -> None:
        self.replica = replica
        self.waiting: dict[Call, deque[_Chunk]] = {}
        self.sent: dict[_Chunk, float] = {}  # with the time
        self.sent_by: Counter[Call] = Counter()  # tokens
        self.waiting_tokens = self.sent_tokens = 0
        self.refuses_until = 0.0
        self.silent = False
        self._others, self._others_until = 0, 0.0

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

    def add(self, chunk: _Chunk, first: bool = False) -> None:
        queue = self.waiting.setdefault(chunk.call, deque())
        queue.appendleft(chunk) if first else queue.append(chunk)
        chunk.lanes.add(self)
        self.waiting_tokens += chunk.tokens

    def next(self) -> _Chunk:
        """The chunk whose turn it is: the most urgent; among equals, that of the call with least under way here."""
        call = min(self.waiting, key=lambda c: (self.waiting[c][0].priority, self.sent_by[c]))
        return self.waiting[call][0]

    def take(self, call: Call) -> Iterable[_Chunk]:
        """Remove and return the chunks of a call that wait."""
        chunks = self.waiting.pop(call, ())
        self.waiting_tokens -= sum(chunk.tokens for chunk in chunks)
        return chunks

    def take_first(self, chunk: _Chunk) -> None:
        queue = self.waiting[chunk.call]
        queue.popleft()
        if not queue:
            del self.waiting[chunk.call]
        self.waiting_tokens -= chunk.tokens

    def send(self, chunk: _Chunk) -> None:
        self.sent[chunk] = now()
        self.sent_tokens += chunk.tokens
        self.sent_by[chunk.call] += chunk.tokens

    def settle(self, chunk: _Chunk) -> None:
        del self.sent[chunk]
        self.sent_tokens -= chunk.tokens
        self.sent_by[chunk.call] -= chunk.tokens
        if not self.sent_by[chunk.call]:
            del self.sent_by[chunk.call]


class Lanes:
    """The lanes of one teacher's replicas, shared by all calls of this process. Use it from one event loop."""

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self._lanes: dict[str, _Lane] = {}
        self._window = self._limit = 0
        self._watching: asyncio.Task | None = None

    def replicas(self) -> tuple[str, ...]:
        """Those that reads are planned over."""
        return tuple(self._lanes)

    def outstanding(self) -> dict[str, int]:
        """The ledger: tokens of this process that wait for or are outstanding on each replica that has any."""
        return {name: lane.load for name, lane in self._lanes.items() if lane.load}

    async def info(self, deadline: float) -> tuple[dict[str, Any], int]:
        """What the first replica that answers says of the teacher, and how many replicas run.

        Raises:
            TeacherUnavailable: none answered before the deadline.
        """
        while True:
            running = await self._replicas.wait(deadline)
            for replica in running:
                try:
                    return await self._replicas.call(replica, "info", min(deadline, now() + _INFO_S)), len(running)
                except (ReplicaLost, DeadlineExceeded):
                    continue
            if now() >= deadline:
                raise TeacherUnavailable(f"no replica of teacher {self._replicas.teacher!r} answered in time")
            await asyncio.sleep(POLL_S)

    async def place(self, call: Call, reads: np.ndarray, avoid: Collection[str] = ()) -> None:
        """Plan these reads of a call and send what fits; the rest waits its turn.

        Args:
            call: the call.
            reads: int64, places in its batch.
            avoid: replicas to leave out while there are others.

        Raises:
            TeacherUnavailable: no replica came before the call's deadline.
            DeadlineExceeded: the call's deadline has come.
            Overloaded: the call is bounded, and its replicas have their fill.
        """
        running = await self._replicas.wait(call.deadline)
        if set(running).isdisjoint(self._lanes):  # the first, or a redeploy that may have other settings
            info, _ = await self.info(call.deadline)
            self._window, self._limit = _WINDOW_STEPS * info["max_batched_tokens"], info["max_outstanding_tokens"]
            running = self._replicas.running() or running
        self._follow(running)
        if now() >= call.deadline:  # past `expire`: what waited now would wait for ever
            raise DeadlineExceeded("no replica took it before its deadline (timeout_s)")
        if call.bounded:
            self._admit(int(call.tokens[reads].sum()))
        self._plan(call, reads, avoid)

    def withdraw(self, call: Call) -> None:
        """Forget a call: what waits is dropped, what was sent is cancelled."""
        for lane in self._lanes.values():
            if lane.take(call):
                self._pump(lane)
        for task in call.tasks:
            task.cancel()

    def expire(self, call: Call) -> None:
        """Fail what of a call still waits here: its deadline has come."""
        error = DeadlineExceeded("its turn did not come before its deadline (timeout_s)")
        for lane in self._lanes.values():
            for chunk in lane.take(call):
                self._copy_ended(lane, chunk, error)

    def _admit(self, tokens: int) -> None:
        load = sum(lane.load + lane.others for lane in self._lanes.values())
        limit = self._limit * len(self._lanes)
        if load and load + tokens > limit:
            raise Overloaded(
                f"{load} tokens are outstanding; {tokens} more would exceed {limit}, which is max_outstanding_tokens "
                f"times {len(self._lanes)} replicas of {self._replicas.teacher!r}",
                retry_after_s=1.0,
            )

    def _plan(self, call: Call, reads: np.ndarray, avoid: Collection[str] = ()) -> None:
        lanes, costs = self._usable(avoid), call.costs[reads]
        # Routers do not see each other's plans. Without a tilt, many of them with few reads each would agree on the
        # same replicas; what they last heard of each other's load is too old to prevent it, and makes it worse.
        tilt = int(costs.mean()) // 2
        shards = plan(costs, {lane.replica: lane.load + random.randint(0, tilt) for lane in lanes})
        for lane in lanes:
            for chunk in self._cut(call, reads[shards.get(lane.replica, _NONE)]):
                lane.add(chunk)
            self._pump(lane)

    def _usable(self, avoid: Collection[str] = ()) -> list[_Lane]:
        """The lanes to plan over: those that nothing speaks against; of what is left, the least bad."""
        lanes = list(self._lanes.values())
        for fit in (
            lambda lane: lane.replica not in avoid,
            lambda lane: not lane.silent,
            lambda lane: now() >= lane.refuses_until,
        ):
            lanes = [lane for lane in lanes if fit(lane)] or lanes
        return lanes

    def _cut(self, call: Call, reads: np.ndarray) -> Iterable[_Chunk]:
        """Chunks of about `window / _CHUNKS_A_WINDOW` tokens, the most urgent reads first."""
        reads = reads[np.argsort(call.batch.priority[reads], kind="stable")]
        tokens = call.tokens[reads]
        for part in cut_by_tokens(tokens, max(self._window // _CHUNKS_A_WINDOW, 1)):
            yield _Chunk(call, reads[part], int(tokens[part].sum()), int(call.batch.priority[reads[part[0]]]))

    def _follow(self, running: Collection[str]) -> None:
        """Have a lane for every replica that runs, and none for others."""
        if set(running) == set(self._lanes):
            return
        lost = [lane for name, lane in self._lanes.items() if name not in running]
        self._lanes = {name: self._lanes.get(name) or _Lane(name) for name in running}
        self._plan_again([*lost, *self._lanes.values()])

    def _plan_again(self, lanes: Iterable[_Lane]) -> None:
        """Plan anew what waits in these lanes."""
        calls: dict[Call, list[np.ndarray]] = {}
        for lane in lanes:
            for call in list(lane.waiting):
                for chunk in lane.take(call):
                    chunk.lanes.discard(lane)
                    if chunk.lanes:  # under way already, whole
                        self._hedge(chunk)
                    elif not chunk.done:
                        calls.setdefault(call, []).append(chunk.reads)
        for call, reads in calls.items():
            self._plan(call, np.concatenate(reads))

    def _pump(self, lane: _Lane) -> None:
        """Send what the lane's window has room for."""
        while lane.waiting and now() >= lane.refuses_until:
            chunk = lane.next()
            room = self._window * (1 if lane.sent_by[chunk.call] else _EXPRESS)
            if lane.sent and lane.sent_tokens + chunk.tokens > room:
                return
            lane.take_first(chunk)
            if chunk.done:
                continue
            lane.send(chunk)
            task = asyncio.create_task(self._send(lane, chunk))
            chunk.tasks.add(task)
            chunk.call.tasks.add(task)
            task.add_done_callback(self._settled(lane, chunk))
            if self._watching is None or self._watching.done():
                self._watching = asyncio.create_task(self._watch())

    def _settled(self, lane: _Lane, chunk: _Chunk) -> Callable[[asyncio.Task], None]:
        def settled(task: asyncio.Task) -> None:
            chunk.tasks.discard(task)
            chunk.call.tasks.discard(task)
            lane.settle(chunk)
            if task.cancelled():
                self._copy_ended(lane, chunk, ReplicaLost("the call was called off"))
            self._go_on(lane)

        return settled

    def _go_on(self, lane: _Lane) -> None:
        """Send what there is room for now; a lane about to run dry shares what waits at others."""
        self._pump(lane)
        if not lane.waiting and lane.sent_tokens <= self._window // _CHUNKS_A_WINDOW:
            self._share_with(lane)

    def _share_with(self, idle: _Lane) -> None:
        behind = [lane for lane in self._lanes.values() if lane is not idle and lane.waiting]
        if behind and idle in self._usable():
            self._plan_again(behind)

    async def _send(self, lane: _Lane, chunk: _Chunk) -> None:
        call = chunk.call
        try:
            scores, outstanding = await self._replicas.call(
                lane.replica,
                call.method,
                call.deadline,
                call.batch.select(chunk.reads),
                timeout_s=max(call.deadline - now(), 0.001),
                trace_headers=call.trace_headers,
                adapters=call.adapters,
            )
        except Overloaded as error:
            lane.refuses_until = now() + _REFUSAL_S
            asyncio.get_running_loop().call_later(_REFUSAL_S, self._go_on, lane)
            self._copy_ended(lane, chunk, error)
        except TeacherUnavailable as error:  # it is leaving
            self._copy_ended(lane, chunk, ReplicaLost(error.message))
        except (ReplicaLost, ScoringError) as error:
            self._copy_ended(lane, chunk, error)
        except Exception as error:
            logger.exception("a chunk could not be sent")
            self._copy_ended(lane, chunk, ScoringError(f"{type(error).__name__}: {error}"))
        else:
            lane.hear(outstanding + chunk.tokens)  # this chunk is settled there, not yet here
            lane.silent = False
            self._ended(chunk, scores, lane.replica)

    def _copy_ended(self, lane: _Lane, chunk: _Chunk, error: ScoringError | ReplicaLost) -> None:
        """A copy came to nothing: with the last one, so does the chunk."""
        chunk.lanes.discard(lane)
        if not chunk.lanes:
            self._ended(chunk, error, lane.replica)

    def _ended(self, chunk: _Chunk, result: Any, replica: str) -> None:
        if chunk.done:
            return
        chunk.done = True
        chunk.call.outcomes.put_nowait(Outcome(self, chunk.reads, result, replica))
        _cancel(chunk)

    async def _watch(self) -> None:
        """While anything is under way: look after lanes that have not answered for a while."""
        while any(lane.sent for lane in self._lanes.values()):
            await asyncio.sleep(_WATCH_S)
            self._follow(self._replicas.running() or tuple(self._lanes))
            quiet = [lane for lane in self._lanes.values() if lane.silent or _age(lane) > _QUIET_S]
            await asyncio.gather(*(self._check(lane) for lane in quiet))

    async def _check(self, lane: _Lane) -> None:
        """Ask a quiet replica for its heartbeat. When it is silent, or takes no steps, others take over its chunks."""
        try:
            beat = await self._replicas.call(lane.replica, "heartbeat", now())
        except ReplicaLost:  # so are its chunks, which will be planned again
            return
        except Exception as error:
            if not isinstance(error, ScoringError):
                logger.exception("the heartbeat of replica %s could not be asked", lane.replica)
            silent = True
        else:
            lane.hear(beat["outstanding_tokens"])
            since = beat["since_last_step_s"]
            still = min(since, _age(lane)) if lane.sent else since
            silent = still > max(_STALL_S, _STALL_STEPS * beat["longest_step_s"])
        if silent and not lane.silent:
            logger.warning("replica %s makes no progress; others take over its reads", lane.replica)
        lane.silent = silent
        if silent:
            self._take_over(lane)
        else:
            self._go_on(lane)

    def _take_over(self, lane: _Lane) -> None:
        """Send the chunks of a silent lane to another lane as well; what only waits there moves."""
        for chunk in lane.sent:
            if not chunk.done:
                self._hedge(chunk)
        self._plan_again([lane])

    def _hedge(self, chunk: _Chunk) -> None:
        """Have a chunk whose lanes are all silent wait at another one too, before everything else of its call."""
        others = [lane for lane in self._lanes.values() if not lane.silent and chunk not in lane.sent]
        if others and all(lane.silent for lane in chunk.lanes):
            least = min(others, key=lambda lane: lane.load)
            least.add(chunk, first=True)
            self._pump(least)


_NONE = np.zeros(0, dtype=np.int64)


def _age(lane: _Lane) -> float:
    """Seconds since the oldest chunk under way was sent."""
    return now() - min(lane.sent.values(), default=now())


def _cancel(chunk: _Chunk) -> None:
    for task in chunk.tasks - {asyncio.current_task()}:
        task.cancel()
