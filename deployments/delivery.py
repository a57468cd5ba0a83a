"""One call's way to its answers: what was lost or refused is placed again, while it helps and the deadline allows."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections import Counter
from collections.abc import AsyncIterator, Collection, Sequence

import numpy as np

from deployments.lane import Call
from deployments.lanes import Lanes, Outcome
from deployments.replica_calls import ReplicaLost, now
from scoring.errors import Overloaded, ScoringError, TeacherUnavailable, VersionMismatch
from scoring.scores import LabelScores, MatrixScores

logger = logging.getLogger(__name__)

MAX_RETRIES = 3
"""How often a read that was lost with its replica is planned again."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0

Part = tuple[np.ndarray, MatrixScores | LabelScores, np.ndarray]
"""(target, scores, source): read `source[j]` of `scores` is read `target[j]` of the call (see `assemble`)."""


async def deliver(
    call: Call, shares: Sequence[tuple[Lanes, np.ndarray]], patience_s: float | None, whole: bool
) -> AsyncIterator[Part]:
    """The answers of a call, in parts; every read is in exactly one of them. Close it when leaving early.

    What is not answered yet when a teacher's weights change is asked of the new ones.

    Args:
        call: the call.
        shares: per teacher its lanes and its reads (int64, places in the call's batch).
        patience_s: how long refusals by all replicas are met with another try; None is until the deadline.
        whole: all reads of a teacher are to be answered by the same weights. The parts come at the end, and when the
            weights change, all of its reads are asked again. Without it, parts come as soon as they are there.
    """
    unanswered = np.zeros(len(call.batch), bool)  # [N]
    for _, reads in shares:
        unanswered[reads] = True
    answered: dict[Lanes, list[Part]] = {lanes: [] for lanes, _ in shares}  # where they come at the end
    while unanswered.any():
        left = [(lanes, reads[unanswered[reads]]) for lanes, reads in shares]
        async with contextlib.aclosing(_attempt(call, left, patience_s)) as parts:
            try:
                async for lanes, part in parts:
                    unanswered[part[0]] = False
                    if whole:
                        answered[lanes].append(part)
                    else:
                        yield part
            except _OtherWeights as other:
                call = call.anew(other.lanes)
                for target, _, _ in answered[other.lanes]:
                    unanswered[target] = True
                answered[other.lanes] = []
    for parts in answered.values():
        for part in parts:
            yield part


class _OtherWeights(Exception):
    """The weights of a teacher are no longer those that a call is meant for."""

    def __init__(self, lanes: Lanes) -> None:
        self.lanes = lanes


async def _attempt(
    call: Call, shares: Sequence[tuple[Lanes, np.ndarray]], patience_s: float | None
) -> AsyncIterator[tuple[Lanes, Part]]:
    """The answers of a call by the weights that it is meant for, as they come.

    Raises:
        _OtherWeights: there are others.
    """
    delivery = _Delivery(call, patience_s)
    loop = asyncio.get_running_loop()
    timers = [loop.call_at(call.deadline, lanes.expire, call) for lanes, _ in shares]
    unanswered = sum(len(reads) for _, reads in shares)
    try:
        for lanes, reads in shares:
            if len(reads):
                delivery.place(lanes, reads)
        while unanswered:
            outcome = await call.outcomes.get()
            for part in delivery.take(outcome):
                unanswered -= len(part[0])
                yield outcome.lanes, part
    finally:
        for timer in timers:
            timer.cancel()
        delivery.stop_placing()
        for lanes, _ in shares:
            lanes.withdraw(call)


class _Delivery:
    """What a call remembers of its losses and refusals, and what it does about them."""

    def __init__(self, call: Call, patience_s: float | None) -> None:
        self._call, self._patience_s = call, patience_s
        self._lost: Counter[int] = Counter()  # times, by read
        self._refused_since: float | None = None
        self._refused_by: set[str] = set()
        self._refusals = 0
        self._placing: set[asyncio.Task] = set()

    def place(
        self,
        lanes: Lanes,
        reads: np.ndarray,
        pause: float = 0.0,
        avoid: Collection[str] = (),
        again: bool = False,
    ) -> None:
        """Place reads after a pause, perhaps again after a loss; what prevents it becomes their outcome."""
        task = asyncio.create_task(self._place(lanes, reads, pause, avoid, again))
        self._placing.add(task)
        task.add_done_callback(self._placing.discard)

    def stop_placing(self) -> None:
        for task in self._placing:
            task.cancel()

    def take(self, outcome: Outcome) -> list[Part]:
        """The parts of the answer in an outcome. What was lost or refused is placed again instead.

        Raises:
            _OtherWeights: the replica has newer weights than the call is meant for, or none is left that has those.
        """
        if isinstance(outcome.result, VersionMismatch):
            if outcome.lanes.version != self._call.versions[outcome.lanes]:
                raise _OtherWeights(outcome.lanes)
            self.place(outcome.lanes, outcome.reads, _pause(0), {outcome.replica})  # that one is behind
            return []
        scores, gone, refused = self._sort(outcome)
        kept = np.setdiff1d(np.arange(len(outcome.reads)), np.concatenate([gone, refused]))  # int64 [n]
        parts: list[Part] = []
        if len(kept):
            self._refused_since, self._refused_by, self._refusals = None, set(), 0
            parts.append((outcome.reads[kept], scores, kept))
        if len(gone):
            parts += self._after_loss(outcome, outcome.reads[gone])
        if len(refused):
            error = outcome.result if scores is None else scores.errors[int(refused[0])]
            parts += self._after_refusal(outcome, outcome.reads[refused], error)
        return parts

    def _sort(self, outcome: Outcome) -> tuple[MatrixScores | LabelScores | None, np.ndarray, np.ndarray]:
        """The scores of an outcome, which of its reads were lost with the replica, and which were refused for now."""
        everything, nothing = np.arange(len(outcome.reads)), np.zeros(0, np.int64)
        result = outcome.result
        if isinstance(result, ReplicaLost):
            return None, everything, nothing
        if isinstance(result, Overloaded):
            return None, nothing, everything
        if isinstance(result, ScoringError):
            return self._call.answer.failed(result, len(everything)), nothing, nothing
        gone = [i for i, error in result.errors.items() if isinstance(error, TeacherUnavailable)]
        refused = [i for i, error in result.errors.items() if isinstance(error, Overloaded)]
        return result, np.array(gone, np.int64), np.array(refused, np.int64)

    def _after_loss(self, outcome: Outcome, reads: np.ndarray) -> list[Part]:
        self._lost.update(reads.tolist())
        times = np.array([self._lost[read] for read in reads.tolist()])
        often = times > MAX_RETRIES  # bool [n]
        if not often.all():
            attempt = int(times[~often].max())
            logger.warning("%d reads were lost with their replica (attempt %d)", int((~often).sum()), attempt)
            avoid = () if outcome.replica is None else (outcome.replica,)
            self.place(outcome.lanes, reads[~often], _pause(attempt - 1), avoid, again=True)
        if not often.any():
            return []
        error = TeacherUnavailable(f"its replicas were lost {1 + MAX_RETRIES} times in a row")
        return [failed_part(self._call.answer, reads[often], error)]

    def _after_refusal(self, outcome: Outcome, reads: np.ndarray, error: ScoringError) -> list[Part]:
        """Another try; the refusal itself when patience has run out and no replica is left that did not refuse."""
        self._refused_since = now() if self._refused_since is None else self._refused_since
        self._refused_by |= {outcome.replica} - {None}
        untried = outcome.replica is not None and set(outcome.lanes.replicas()) - self._refused_by
        if self._patience_s is not None and not untried and now() - self._refused_since >= self._patience_s:
            return [failed_part(self._call.answer, reads, error)]
        self.place(outcome.lanes, reads, 0.0 if untried else _pause(self._refusals), self._refused_by)
        self._refusals += 1
        return []

    async def _place(self, lanes: Lanes, reads: np.ndarray, pause: float, avoid: Collection[str], again: bool) -> None:
        try:
            await asyncio.sleep(min(pause, max(self._call.deadline - now(), 0)))
            await lanes.place(self._call, reads, avoid, again)
        except ScoringError as error:
            self._call.outcomes.put_nowait(Outcome(lanes, reads, error))
        except Exception as error:
            logger.exception("reads could not be placed")
            self._call.outcomes.put_nowait(
                Outcome(lanes, reads, ScoringError(f"failed unexpectedly ({type(error).__name__}); the log says why"))
            )


def failed_part(answer: type[MatrixScores] | type[LabelScores], reads: np.ndarray, error: ScoringError) -> Part:
    """The part in which these reads (int64, places in the call's batch) all failed with `error`."""
    return reads, answer.failed(error, len(reads)), np.arange(len(reads))


def _pause(attempt: int) -> float:
    """Seconds before another try: doubling, and never the same for two callers."""
    return min(_FIRST_PAUSE_S * 2 ** min(attempt, 10), _LONGEST_PAUSE_S) * random.uniform(0.5, 1.5)
