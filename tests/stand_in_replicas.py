"""Replicas without engines, for what this machine cannot have: many of them, and ones that misbehave on command.

A stand-in takes steps as vLLM's scheduler does: first come, first served, up to `step_tokens` tokens a step, long reads
in pieces. Its scores are those of `StandInRouter`, which anyone can compute.
"""

import asyncio
import dataclasses
from collections.abc import Callable

import numpy as np

from deployments.replica_calls import ReplicaLost, now
from scoring.errors import (
    DeadlineExceeded,
    InvalidAdapter,
    Overloaded,
    ScoringError,
    TeacherUnavailable,
    VersionMismatch,
)
from tests.stand_in_router import StandInRouter

OF_A_VERSION = 4096
"""What each version of the weights takes off every score."""


class StandInReplica:
    """One replica. `fail`, where set, is called with each shard's size and may raise, or give the answer.

    With a `block` it has a prefix cache with blocks of so many tokens, which forgets nothing.
    """

    def __init__(
        self, step_tokens: int = 1000, step_s: float = 0.005, max_outstanding_tokens: int = 1 << 40, block: int = 0
    ) -> None:
        self.step_tokens, self.step_s, self.limit = step_tokens, step_s, max_outstanding_tokens
        self.block, self.prefilled = block, 0
        self.cached: set[tuple] = set()
        self.weight_version = 0
        self.steps = self.outstanding = self.calls = 0
        self.order: list[int] = []  # first prompt id of each read, in the order of the answers
        self.largest_outstanding = self.cancelled = 0
        self.stopped = False  # takes no steps; a stopped process answers nothing either
        self.deaf = False
        self.fail: Callable[[int], object] | None = None
        self._under_way: set[asyncio.Task] = set()
        self._queue: list[list] = []  # [tokens left, event]
        self._runner: asyncio.Task | None = None

    async def call(self, method, batch=None, timeout_s=None, trace_headers=None, adapters=None, version=None):
        if self.deaf:
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                self.cancelled += method != "heartbeat"
                raise
        if method == "info":
            return {
                "max_batched_tokens": self.step_tokens,
                "max_outstanding_tokens": self.limit,
                "teacher": "default",
                "checkpoint": "0123",
                "weight_version": self.weight_version,
                "prefix_reuse": self.block > 0,
                "block_size": self.block or 32,
            }
        if method == "adapter_checkpoint":  # in the place of the batch
            if batch.path.endswith("broken"):
                raise InvalidAdapter(f"{batch.path} cannot be read")
            return f"0123+{batch.path}"
        if method == "heartbeat":
            return {
                "steps": self.steps,
                "since_last_step_s": 3600.0 if self.stopped else 0.0,
                "longest_step_s": self.step_s,
                "outstanding_tokens": self.outstanding,
            }
        self.calls += 1
        if version not in (None, self.weight_version):
            raise VersionMismatch(f"has {self.weight_version}", weight_version=self.weight_version)
        version = self.weight_version
        if self.fail is not None and (answer := self.fail(len(batch))) is not None:
            return answer, self.outstanding
        tokens = int(batch.tokens().sum())
        if self.outstanding and self.outstanding + tokens > self.limit:
            raise Overloaded("full (max_outstanding_tokens)", retry_after_s=1.0)
        self.outstanding += tokens
        self.largest_outstanding = max(self.largest_outstanding, self.outstanding)
        work = [self._prefill(read, (adapters or {}).get(read.teacher)) for read in batch]
        task = asyncio.ensure_future(asyncio.gather(*(self._one(batch[i], work[i]) for i in range(len(batch)))))
        task.add_done_callback(lambda task: task.cancelled() or task.exception())
        self._under_way.add(task)
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.wait({task})
                if task.cancelled():
                    raise ReplicaLost("died")
            scores = await getattr(StandInRouter(), method)(batch, return_exceptions=True)
            metas = tuple(dataclasses.replace(meta, weight_version=version) for meta in scores.metas)
            cached = (batch.tokens() - work).astype(np.int32)
            values = scores.values - np.float32(OF_A_VERSION * version)
            scores = dataclasses.replace(scores, values=values, metas=metas, cached_tokens=cached)
            return scores, self.outstanding - tokens
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        except TimeoutError:
            raise DeadlineExceeded("late") from None
        finally:
            task.cancel()
            self._under_way.discard(task)
            self.outstanding -= tokens

    def die(self) -> None:
        """Lose everything under way, as a killed process does."""
        for call in self._under_way:
            call.cancel("died")

    def _prefill(self, read, adapter) -> int:
        """Tokens of a read that are not cached; from now on they are, as far as they can be."""
        ids = [*read.prompt_ids.tolist(), *getattr(read, "response_ids", np.zeros(0, int)).tolist()]
        work = len(ids)
        for end in range(self.block, len(read.prompt_ids), self.block) if self.block else ():
            prefix = (adapter, *ids[:end])
            work = len(ids) - end if prefix in self.cached else work
            self.cached.add(prefix)
        self.prefilled += work
        return work

    async def _one(self, read, work: int) -> None:
        entry = [work, asyncio.Event()]
        self._queue.append(entry)
        if self._runner is None or self._runner.done():
            self._runner = asyncio.create_task(self._run())
        try:
            await entry[1].wait()
            self.order.append(int(read.prompt_ids[0]))
        finally:
            if entry in self._queue:
                self._queue.remove(entry)

    async def _run(self) -> None:
        while self._queue:
            if self.stopped:
                await asyncio.sleep(self.step_s)
                continue
            room, done = self.step_tokens, []
            for entry in self._queue:
                taken = min(entry[0], room)
                entry[0] -= taken
                room -= taken
                if not entry[0]:
                    done.append(entry)
                if not room:
                    break
            await asyncio.sleep(self.step_s)
            self.steps += 1
            for entry in done:
                entry[1].set()
                if entry in self._queue:
                    self._queue.remove(entry)


class StandInReplicas:
    """In place of `deployments.replica_calls.Replicas`: the replicas of one teacher, by name."""

    def __init__(self, **replicas: StandInReplica) -> None:
        self.by_name = dict(replicas)
        self.teacher = "default"

    def running(self) -> tuple[str, ...]:
        return tuple(sorted(self.by_name))

    async def wait(self, deadline):
        while not self.by_name:
            if now() >= deadline:
                raise TeacherUnavailable("teacher 'default' has no running replica")
            await asyncio.sleep(0.005)
        return self.running()

    async def call(self, replica, method, deadline, *args, **kwargs):
        if replica not in self.by_name:
            raise ReplicaLost(f"{replica} is gone")
        try:
            async with asyncio.timeout(max(deadline - now(), 0) + 0.2):
                return await self.by_name[replica].call(method, *args, **kwargs)
        except TimeoutError:
            raise DeadlineExceeded("no answer") from None


async def right_matrix(reads) -> list[np.ndarray]:
    """What the stand-ins answer, computed apart from them."""
    return [s if isinstance(s, ScoringError) else s.logprobs for s in await StandInRouter().read_matrix(reads)]
