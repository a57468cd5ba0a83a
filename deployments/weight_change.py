"""A change of a teacher's weights, over all its replicas: all of them serve the new ones, or none.

First every replica says whether the new checkpoint fits. Then every one prepares it (`replica_weights.py`), one ahead
of the others, so that a checkpoint that fits and fails all the same takes down one replica and no more. With all of
them waiting, the record is written. That is the change: a replica that starts later finds it there, and those that wait
serve what they have prepared. Whatever goes wrong before leaves the record as it was, and the replicas go by that.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Set
from typing import Any

from deployments.replica_calls import POLL_S, ReplicaLost, Replicas, now
from deployments.replica_weights import LEASE_S
from scoring.errors import DeadlineExceeded, InvalidCheckpoint, ScoringError, TeacherUnavailable
from scoring.weights import Weights

logger = logging.getLogger("ray.serve")

_WORD_S = LEASE_S / 5  # how often replicas that wait hear that the others are under way
_FOLLOW_S = 60.0  # how long replicas may take to load the old weights again, before they are left to it


async def change_weights(
    replicas: Replicas,
    path: str,
    last_version: int,
    commit: Callable[[Weights, str], Awaitable[None]],
    deadline: float,
) -> tuple[Weights, dict[str, int]]:
    """Have all replicas serve the weights in a folder.

    Args:
        replicas: those of the teacher.
        path: the folder.
        last_version: of the record.
        commit: writes the weights, and the `model` of the configuration, into the record.
        deadline: on the event loop's clock.

    Returns:
        The weights, and which version each replica serves.

    Raises:
        ScoringError: see `Router.update_weights`. The old weights are served, or will be as soon as the replicas have
            loaded them again.
    """
    said = await _check(replicas, path, deadline)
    checkpoints = {answer["checkpoint"] for answer in said.values()}
    if len(checkpoints) > 1:
        raise InvalidCheckpoint(f"{path} is not the same for all replicas: they see {', '.join(sorted(checkpoints))}")
    models = {answer["model"] for answer in said.values()}
    if len(models) > 1:
        raise TeacherUnavailable(
            f"a redeploy is under way, from one of the models {', '.join(sorted(models))} to another"
        )
    version = 1 + max(last_version, *(answer["weight_version"] for answer in said.values()))
    weights = Weights(version, path, checkpoints.pop())
    try:
        await _prepare(replicas, weights, deadline)
        await commit(weights, models.pop())
    except BaseException:
        await _follow(replicas)
        raise
    return weights, await _follow(replicas)


async def _check(replicas: Replicas, path: str, deadline: float) -> dict[str, dict[str, Any]]:
    """What each of the running replicas says of a checkpoint that fits."""
    said: dict[str, dict[str, Any]] = {}
    while missing := [name for name in await replicas.wait(deadline) if name not in said]:
        said |= await _ask(replicas, missing, deadline, "check_weights", path)
    return said


async def _prepare(replicas: Replicas, weights: Weights, deadline: float) -> None:
    """Return with all running replicas waiting to serve these weights."""
    asked: set[str] = set()
    ready: set[str] = set()
    async with _reminded(replicas, asked, weights):
        while missing := [name for name in await replicas.wait(deadline) if name not in ready]:
            ahead = missing if ready else missing[:1]
            asked |= set(ahead)
            timeout_s = max(deadline - now(), 0)
            ready |= (await _ask(replicas, ahead, deadline, "prepare_weights", weights, timeout_s)).keys()
            if not ready:
                raise TeacherUnavailable(
                    f"replica {ahead[0]} was lost while it loaded {weights.path}; the others have not begun"
                )
        wait = await _ask(replicas, sorted(ready), deadline, "keep_weights", weights)
    if not all(wait.values()):
        raise TeacherUnavailable("a replica has waited in vain for the others, and serves the old weights again")


async def _follow(replicas: Replicas) -> dict[str, int]:
    """Have the replicas serve what the record says; which version each of them serves now. One that does not answer
    finds the record by itself."""
    deadline = now() + _FOLLOW_S
    calls = {name: replicas.call(name, "follow_record", deadline) for name in replicas.running()}
    answers = dict(zip(calls, await asyncio.gather(*calls.values(), return_exceptions=True), strict=True))
    for name, answer in answers.items():
        if isinstance(answer, BaseException):
            logger.warning("replica %s does not say which weights it serves: %s", name, answer)
    return {name: answer for name, answer in answers.items() if isinstance(answer, int)}


async def _ask(replicas: Replicas, names: list[str], deadline: float, method: str, *args: Any) -> dict[str, Any]:
    """What these replicas return, without those that were lost.

    Raises:
        ScoringError: what one of them raised; all have ended.
    """
    if now() >= deadline:
        raise DeadlineExceeded("not all replicas could be asked before the deadline (timeout_s)")
    calls = (replicas.call(name, method, deadline, *args) for name in names)
    answers = dict(zip(names, await asyncio.gather(*calls, return_exceptions=True), strict=True))
    left = {name: answer for name, answer in answers.items() if not isinstance(answer, ReplicaLost)}
    for answer in left.values():
        if isinstance(answer, BaseException):
            raise answer
    if len(left) < len(names):
        await asyncio.sleep(POLL_S)  # a lost one may be among the running ones for a moment yet
    return left


@contextlib.asynccontextmanager
async def _reminded(replicas: Replicas, asked: Set[str], weights: Weights) -> AsyncIterator[None]:
    """Meanwhile, those of the replicas asked that are ready hear every now and then that the others are under way."""

    async def remind(name: str) -> None:
        with contextlib.suppress(ReplicaLost, ScoringError):
            await replicas.call(name, "keep_weights", now(), weights)

    async def remind_all() -> None:
        while True:
            await asyncio.sleep(_WORD_S)
            await asyncio.gather(*(remind(name) for name in asked))

    reminding = asyncio.create_task(remind_all())
    try:
        yield
    finally:
        reminding.cancel()
