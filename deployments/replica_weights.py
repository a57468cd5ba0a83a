"""A replica's side of a change of weights.

The record (`record.py`) says which weights a teacher serves, and every replica goes by it: when it starts, every other
second, and at once when reads are meant for newer weights than it has. Whoever changes the weights (`weight_change.py`)
first has every replica prepare the new ones, which are loaded while reads wait, and then writes the record. A replica
that finds there what it has prepared lets the reads pass. One that is told to look and does not find it there, or has
waited for ten seconds without a word, takes the old weights back. So nobody is ever answered by weights that come to
nothing, whoever dies in between.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import TYPE_CHECKING, Any

from deployments.replica_calls import POLL_S, now
from scoring.errors import DeadlineExceeded, InvalidCheckpoint, TeacherUnavailable
from scoring.weights import Weights

if TYPE_CHECKING:
    from scoring.engine import CheckedCheckpoint, TeacherEngine

logger = logging.getLogger("ray.serve")

LEASE_S = 10.0
"""How long prepared weights wait for a word of whoever prepares them everywhere."""
_LOOK_S = 2.0
_LOAD_S = 1800.0  # a load that takes longer has failed


class ReplicaWeights:
    """Which weights one engine has, and has prepared. Use it from the event loop of its reads.

    Args:
        engine: the engine.
        recorded: what the record says, None for nothing; may block.
        leave: ends this replica, with a reason; called when what the engine has loaded is not known any more.
    """

    def __init__(
        self, engine: TeacherEngine, recorded: Callable[[], Weights | None], leave: Callable[[str], None]
    ) -> None:
        self._engine, self._recorded, self._leave = engine, recorded, leave
        self._changing = asyncio.Lock()
        self._before: Weights | None = None  # what was served before, while prepared weights wait
        self._held_until = 0.0
        self._lost = False  # what the engine has loaded is not known: it is never released again
        self._look_now = asyncio.Event()
        self._tasks: set[asyncio.Task] = set()

    @property
    def served(self) -> Weights:
        """The weights that answer reads; while prepared ones wait, those that answered before."""
        return self._before or self._engine.weights

    async def prepare(self, weights: Weights, timeout_s: float) -> None:
        """Load weights, and have reads wait until it is known whether they are served.

        Raises:
            InvalidCheckpoint: the folder does not hold them, or they do not fit. Nothing has changed.
            DeadlineExceeded: reads, or another change, were under way for too long. Nothing has changed.
            ScoringError: they could not be loaded: this replica leaves.
        """
        await self._undisturbed(self._prepare(weights, now() + timeout_s))

    def keep(self, weights: Weights) -> bool:
        """The word that prepared weights wait for. Whether these wait here."""
        waits = self._before is not None and self._engine.weights == weights
        if waits:
            self._held_until = now() + LEASE_S
        return waits

    async def follow(self, patient: bool = False) -> int:
        """Serve what the record says; where it says nothing, what was served before. Returns the version.

        Args:
            patient: prepared weights that have not waited for too long may still come into the record.
        """
        return await self._undisturbed(self._follow(patient))

    def look(self) -> None:
        """Look into the record soon: somebody has heard of newer weights."""
        self._look_now.set()

    def watch(self) -> None:
        """Follow the record from now on."""
        self._start(self._watch())

    async def _prepare(self, weights: Weights, deadline: float) -> None:
        await self._take_turn(deadline)
        try:
            self._refuse_if_lost()
            checked = await self._hold(weights, deadline)
            self._before = self._engine.weights
            await self._load(weights, checked)
            self._held_until = now() + LEASE_S
        finally:
            self._changing.release()

    async def _take_turn(self, deadline: float) -> None:
        """Wait until nothing else is under way, nor prepared: by one who is to be heard of, or is dead."""
        async with _in_time(deadline):
            await self._changing.acquire()
            while self._before is not None and not self._lost:
                self._changing.release()
                await asyncio.sleep(POLL_S)
                await self._changing.acquire()

    async def _hold(self, weights: Weights, deadline: float) -> CheckedCheckpoint:
        try:
            async with _in_time(deadline):
                checked = await self._check(weights)
                await self._engine.hold()
                return checked
        except BaseException:
            self._engine.release()
            raise

    async def _follow(self, patient: bool) -> int:
        async with self._changing:
            self._refuse_if_lost()
            due = await asyncio.to_thread(self._recorded) or self._before or self._engine.weights
            if due != self._engine.weights:
                if patient and self._before is not None and now() < self._held_until:
                    return self._before.version
                logger.info(
                    "version %d of the weights takes the place of %d", due.version, self._engine.weights.version
                )
                try:
                    checked = await self._check(due)
                except Exception as error:
                    self._leave(f"version {due.version} of the weights, which is served, cannot be loaded: {error}")
                    raise
                await self._engine.hold()
                await self._load(due, checked)
                self._engine.release()
            elif self._before is not None:
                logger.info("version %d of the weights is served from now on", due.version)
                self._engine.release()
            self._before = None
            return due.version

    def _refuse_if_lost(self) -> None:
        if self._lost:
            raise TeacherUnavailable("weights could not be loaded here, and the replica leaves")

    async def _check(self, weights: Weights) -> CheckedCheckpoint:
        checked = await self._engine.check_weights(weights.path)
        if checked.checkpoint != weights.checkpoint:
            raise InvalidCheckpoint(
                f"{weights.path} holds checkpoint {checked.checkpoint}; {weights.checkpoint} was there when it became "
                f"version {weights.version} of the weights, and it must stay for as long as it is served"
            )
        return checked

    async def _load(self, weights: Weights, checked: CheckedCheckpoint) -> None:
        try:
            async with asyncio.timeout(_LOAD_S):
                await self._engine.load_weights(weights, checked)
        except BaseException as error:
            self._lost = True
            self._leave(f"version {weights.version} of the weights could not be loaded: {error!r}")
            raise

    async def _watch(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._look_now.wait(), _LOOK_S)
            self._look_now.clear()
            try:
                await self._follow(patient=True)
            except Exception as error:
                logger.warning("the record of weights could not be followed, it is tried again: %s", error)

    async def _undisturbed(self, change: Coroutine[Any, Any, Any]) -> Any:
        """What a change returns or raises, which goes on where whoever waits for it leaves."""
        return await asyncio.shield(self._start(change))

    def _start(self, change: Coroutine[Any, Any, Any]) -> asyncio.Task:
        task = asyncio.create_task(change, context=contextvars.Context())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda task: task.cancelled() or task.exception())  # nobody may be left to see it
        return task


@contextlib.asynccontextmanager
async def _in_time(deadline: float) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout_at(deadline):
            yield
    except TimeoutError:
        raise DeadlineExceeded(
            "reads of a replica, or another change of its weights, went on until the deadline (timeout_s)"
        ) from None
