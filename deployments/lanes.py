"""How the reads of many calls share the replicas of one teacher: one lane a replica, a window on each.

The reads of a call are planned over the lanes and cut into chunks of about an engine step. A lane sends chunks
while no more than two steps' tokens are outstanding there, so that the engine never waits, a small call passes a huge
one within three steps, and a caller that dies leaves only seconds of work behind. Chunks that wait are planned again
whenever replicas come, go or run dry, and those of a replica that has fallen silent are sent to another as well.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from deployments.lane import Call, Chunk, Lane, Settings
from deployments.replica_calls import POLL_S, ReplicaLost, Replicas, now
from deployments.shared import Shared
from scoring.adapters import Adapter
from scoring.affinity import Affinity, Groups, Part, alone, find_groups, plan_by_prefix
from scoring.batches import cut_by_tokens
from scoring.errors import DeadlineExceeded, Overloaded, ScoringError, TeacherUnavailable, VersionMismatch
from scoring.scores import LabelScores, MatrixScores
from scoring.sharding import plan

logger = logging.getLogger(__name__)

_REFUSAL_S = 0.1  # how long a replica that refused is left alone,
_BEHIND_S = 0.5  # and one that has older weights than others
_WATCH_S = 1.0
_QUIET_S = 2.0  # a chunk under way for longer makes its lane ask for the replica's heartbeat
_STALL_S, _STALL_STEPS = 8.0, 3  # no step for the larger of these: seconds, multiples of the longest step seen
_LONG = 1 << 20  # tokens of a batch whose prefixes are hashed beside the event loop
_INFO_S = 2.0  # how long one replica may take to say what it is


@dataclass(frozen=True)
class Outcome:
    """What became of some reads of a call: scores, or why there are none."""

    lanes: Lanes
    reads: np.ndarray  # int64 [n], places in the call's batch
    result: MatrixScores | LabelScores | ScoringError | ReplicaLost
    replica: str | None = None


class Lanes:
    """The lanes of one teacher's replicas, shared by all calls of this process. Use it from one event loop."""

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self._lanes: dict[str, Lane] = {}
        self._left: set[Lane] = set()  # of replicas that run no longer, while they owe answers
        self._settings: Settings | None = None  # of the replica that was asked last,
        self._version = 0  # and of its weights
        self._watching: asyncio.Task | None = None
        self._affinity = Affinity()
        self._asking = Shared(lambda: self._ask("info"))
        self._learning: set[asyncio.Task] = set()

    @property
    def version(self) -> int:
        """The newest version of the weights that a replica is known to have; what new calls are meant for."""
        return max((lane.version for lane in self._lanes.values() if lane.version is not None), default=self._version)

    def hear_versions(self, versions: Mapping[str, int]) -> None:
        """Take in which weights replicas have."""
        for name, version in versions.items():
            if name in self._lanes:
                self._hear_version(self._lanes[name], version)

    def _hear_version(self, lane: Lane, version: int) -> None:
        """New weights have nothing in their cache."""
        if lane.version not in (None, version):
            self._affinity.forget({lane.replica})
        lane.version = version

    def replicas(self) -> tuple[str, ...]:
        """Those that reads are planned over."""
        return tuple(self._lanes)

    def outstanding(self) -> dict[str, int]:
        """The ledger: tokens of this process, cached or not, that wait for or are outstanding on each replica that has
        any."""
        tokens = Counter()
        for lane in (*self._lanes.values(), *self._left):
            tokens[lane.replica] += lane.tokens
        return dict(+tokens)

    async def info(self, deadline: float) -> tuple[dict[str, Any], int]:
        """What the first replica that answers says of the teacher, and how many replicas run. One call for all who
        ask meanwhile.

        Raises:
            TeacherUnavailable: none answered before the deadline.
        """
        running = await self._replicas.wait(deadline)
        return await self._by(deadline, self._asking.result()), len(self._replicas.running() or running)

    async def adapter_checkpoint(self, adapter: Adapter, deadline: float) -> str:
        """The hashes of the teacher and of one of its adapters, as the first replica that answers says them.

        Raises:
            TeacherUnavailable: none answered before the deadline.
            InvalidAdapter: that replica found no weights in its folder.
        """
        return await self._by(deadline, self._ask("adapter_checkpoint", adapter))

    async def _by(self, deadline: float, answer: Awaitable[Any]) -> Any:
        try:
            async with asyncio.timeout_at(deadline):
                return await answer
        except TimeoutError:
            raise TeacherUnavailable(f"no replica of teacher {self._replicas.teacher!r} answered in time") from None

    async def place(self, call: Call, reads: np.ndarray, avoid: Collection[str] = (), again: bool = False) -> None:
        """Plan these reads of a call and send what fits; the rest waits its turn.

        Args:
            call: the call.
            reads: int64, places in its batch.
            avoid: replicas to leave out while there are others.
            again: they were lost before: count on nothing that a replica should have in its cache.

        Raises:
            TeacherUnavailable: no replica came before the call's deadline.
            DeadlineExceeded: the call's deadline has come.
            Overloaded: the call is bounded, and its replicas have their fill.
        """
        running = await self._replicas.wait(call.deadline)
        if set(running).isdisjoint(self._lanes):  # the first, or a redeploy that may have other settings
            info, _ = await self.info(call.deadline)
            self._settings, self._version = Settings.of(info), info["weight_version"]
        if self._settings.block and len(call.batch.ids) > _LONG:
            await asyncio.to_thread(call.prefixes, self._settings.block)
        self._follow(self._replicas.running() or running)
        if now() >= call.deadline:  # past `expire`: what waited now would wait for ever
            raise DeadlineExceeded("no replica took it before its deadline (timeout_s)")
        if call.bounded:
            self._admit(int(call.tokens[reads].sum()))
        self._plan(call, reads, avoid, again)

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
        load = sum(lane.tokens + lane.others for lane in self._lanes.values())
        limit = sum(lane.settings.limit for lane in self._lanes.values())
        if load and load + tokens > limit:
            raise Overloaded(
                f"{load} tokens are outstanding; {tokens} more would exceed {limit}, which is max_outstanding_tokens "
                f"times {len(self._lanes)} replicas of {self._replicas.teacher!r}",
                retry_after_s=1.0,
            )

    def _plan(self, call: Call, reads: np.ndarray, avoid: Collection[str] = (), again: bool = False) -> None:
        call.versions.setdefault(self, self.version)
        lanes, costs, priority = self._usable(avoid), call.costs[reads], call.batch.priority[reads]
        blocks = {lane.settings.block for lane in lanes}
        block = blocks.pop() if len(blocks) == 1 else 0  # not all reuse prefixes in the same way: a redeploy rolls
        groups = find_groups(call.prefixes(block), reads) if block else None
        saved = int(groups.tokens[groups.of_read].sum() - groups.tokens.sum()) if groups else 0
        # Routers do not see each other's plans. Without a tilt, many of them with few reads each would agree on the
        # same replicas; what they last heard of each other's load is too old to prevent it, and makes it worse.
        tilt = (int(costs.sum()) - saved) // len(reads) // 2
        loads = {lane.replica: lane.load + random.randint(0, tilt) for lane in lanes}
        if groups:
            homes, held = self._affinity.homes(groups) if not again else ({}, np.zeros_like(groups.tokens))
            parts = plan_by_prefix(costs, priority, loads, groups, homes, held)
        else:
            parts = {name: alone(shard, priority) for name, shard in plan(costs, loads).items()}
        for lane in lanes:
            if part := parts.get(lane.replica):
                for chunk in _cut(call, reads, part, groups, lane):
                    lane.add(chunk)
            self._pump(lane)

    def _usable(self, avoid: Collection[str] = ()) -> list[Lane]:
        """The lanes to plan over: those that nothing speaks against; of what is left, the least bad."""
        lanes = list(self._lanes.values())
        for fit in (
            lambda lane: lane.replica not in avoid,
            lambda lane: not lane.silent,
            lambda lane: now() >= lane.refuses_until,
        ):
            lanes = [lane for lane in lanes if fit(lane)] or lanes
        return lanes

    def _follow(self, running: Collection[str]) -> None:
        """Have a lane for every replica that runs, and none for others."""
        if set(running) == set(self._lanes):
            return
        lost = [lane for name, lane in self._lanes.items() if name not in running]
        if lost:
            self._affinity.forget({lane.replica for lane in lost})
        self._left.update(lane for lane in lost if lane.sent)
        # The first ones are taken to have what the one has that was asked. Others are asked: in a rolling redeploy they
        # may have other settings.
        version = None if self._lanes else self._version
        added = [Lane(name, self._settings, version) for name in running if name not in self._lanes]
        if added and self._lanes:
            learning = asyncio.create_task(self._learn(added))
            self._learning.add(learning)
            learning.add_done_callback(self._learning.discard)
        lanes = {lane.replica: lane for lane in (*self._lanes.values(), *added)}
        self._lanes = {name: lanes[name] for name in running}
        self._plan_again([*lost, *self._lanes.values()])

    async def _learn(self, newcomers: list[Lane]) -> None:
        """Ask one of the replicas that came together what they take."""
        for newcomer in newcomers:
            try:
                info = await self._replicas.call(newcomer.replica, "info", now() + _INFO_S)
            except Exception:  # whatever it is, another may answer
                continue
            self._settings = Settings.of(info)
            self._hear_version(newcomer, info["weight_version"])
            for lane in newcomers:
                lane.settings = self._settings
                self._pump(lane)
            return

    async def _ask(self, method: str, *args: Any) -> Any:
        """What the first replica that answers says."""
        while True:
            for replica in await self._replicas.wait(float("inf")):
                try:
                    return await self._replicas.call(replica, method, now() + _INFO_S, *args)
                except (ReplicaLost, DeadlineExceeded):
                    continue
            await asyncio.sleep(POLL_S)

    def _plan_again(self, lanes: Iterable[Lane]) -> None:
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

    def _pump(self, lane: Lane) -> None:
        """Send what the lane's window has room for."""
        while lane.waiting and now() >= lane.refuses_until:
            if not lane.has_room(lane.next()):
                return
            if (chunk := lane.send_next()) is None:
                continue
            if chunk.groups is not None:
                self._affinity.keep(chunk.groups, {lane.replica: chunk.planned})
            task = asyncio.create_task(self._send(lane, chunk))
            chunk.tasks.add(task)
            chunk.call.tasks.add(task)
            task.add_done_callback(self._settled(lane, chunk))
            if self._watching is None or self._watching.done():
                self._watching = asyncio.create_task(self._watch())

    def _settled(self, lane: Lane, chunk: Chunk) -> Callable[[asyncio.Task], None]:
        def settled(task: asyncio.Task) -> None:
            chunk.tasks.discard(task)
            chunk.call.tasks.discard(task)
            lane.settle(chunk)
            if not lane.sent:
                self._left.discard(lane)
            if task.cancelled():
                self._copy_ended(lane, chunk, ReplicaLost("the call was called off"))
            self._go_on(lane)

        return settled

    def _go_on(self, lane: Lane) -> None:
        """Send what there is room for now; a lane about to run dry shares what waits at others."""
        self._pump(lane)
        if not lane.waiting and lane.sent_load <= lane.settings.chunk:
            self._share_with(lane)

    def _share_with(self, idle: Lane) -> None:
        behind = [lane for lane in self._lanes.values() if lane is not idle and lane.waiting]
        if behind and idle in self._usable():
            self._plan_again(behind)

    async def _send(self, lane: Lane, chunk: Chunk) -> None:
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
                version=call.versions[self],
            )
        except Overloaded as error:
            self._leave_alone(lane, _REFUSAL_S)
            self._copy_ended(lane, chunk, error)
        except VersionMismatch as error:
            self._hear_version(lane, error.details["weight_version"])
            if lane.version < self.version:
                self._leave_alone(lane, _BEHIND_S)
            self._copy_ended(lane, chunk, error)
        except TeacherUnavailable as error:  # it is leaving
            self._copy_ended(lane, chunk, ReplicaLost(error.message))
        except (ReplicaLost, ScoringError) as error:
            self._copy_ended(lane, chunk, error)
        except Exception as error:
            logger.exception("a chunk could not be sent")
            self._copy_ended(
                lane, chunk, ScoringError(f"failed unexpectedly ({type(error).__name__}); the log says why")
            )
        else:
            lane.hear(outstanding + chunk.tokens)  # this chunk is settled there, not yet here
            lane.note_cached(chunk, int(scores.cached_tokens.sum()))
            lane.silent = False
            for meta in scores.metas[:1]:
                self._hear_version(lane, meta.weight_version)
            self._ended(chunk, scores, lane.replica)

    def _leave_alone(self, lane: Lane, seconds: float) -> None:
        """Send nothing to a replica for a while."""
        lane.refuses_until = now() + seconds
        asyncio.get_running_loop().call_later(seconds, self._go_on, lane)

    def _copy_ended(self, lane: Lane, chunk: Chunk, error: ScoringError | ReplicaLost) -> None:
        """A copy came to nothing: with the last one, so does the chunk."""
        chunk.lanes.discard(lane)
        if not chunk.lanes:
            self._ended(chunk, error, lane.replica)

    def _ended(self, chunk: Chunk, result: Any, replica: str) -> None:
        if chunk.done:
            return
        chunk.done = True
        chunk.call.outcomes.put_nowait(Outcome(self, chunk.reads, result, replica))
        _cancel(chunk)

    async def _watch(self) -> None:
        """While anything is under way: look after lanes that have not answered for a while."""
        while self._left or any(lane.sent for lane in self._lanes.values()):
            await asyncio.sleep(_WATCH_S)
            self._follow(self._replicas.running() or tuple(self._lanes))
            lanes = (*self._lanes.values(), *self._left)
            quiet = [lane for lane in lanes if lane.silent or _age(lane) > _QUIET_S]
            await asyncio.gather(*(self._check(lane) for lane in quiet))

    async def _check(self, lane: Lane) -> None:
        """Ask a quiet replica for its heartbeat. When it is silent, or takes no steps, others take over its chunks."""
        try:
            beat = await self._replicas.call(lane.replica, "heartbeat", now())
        except ReplicaLost:
            if lane not in self._left:  # its chunks are lost as well, and will be planned again
                return
            silent = _age(lane) > _STALL_S  # it may still answer what it has, but cannot be asked any more
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

    def _take_over(self, lane: Lane) -> None:
        """Send the chunks of a silent lane to another lane as well; what only waits there moves."""
        for chunk in lane.sent:
            if not chunk.done:
                self._hedge(chunk)
        self._plan_again([lane])

    def _hedge(self, chunk: Chunk) -> None:
        """Have a chunk whose lanes are all silent wait at another one too, before everything else of its call."""
        others = [lane for lane in self._lanes.values() if not lane.silent and chunk not in lane.sent]
        if others and all(lane.silent for lane in chunk.lanes):
            least = min(others, key=lambda lane: lane.load)
            least.add(chunk, hedge=True)
            self._pump(least)


def _cut(call: Call, reads: np.ndarray, part: Part, groups: Groups | None, lane: Lane) -> Iterable[Chunk]:
    """The part of a lane, of a plan for `reads`, in chunks of about an engine step's work."""
    tokens = call.tokens[reads[part.reads]]
    for some in cut_by_tokens(lane.work(tokens, part.reused), lane.settings.chunk):
        planned = part.reads[some]
        yield Chunk(
            call,
            reads[planned],
            int(tokens[some].sum()),
            int(part.reused[some].sum()),
            int(call.batch.priority[reads[planned[0]]]),
            groups,
            planned,
        )


def _age(lane: Lane) -> float:
    """Seconds since the oldest chunk under way was sent."""
    return now() - min(lane.sent.values(), default=now())


def _cancel(chunk: Chunk) -> None:
    for task in chunk.tasks - {asyncio.current_task()}:
        task.cancel()
