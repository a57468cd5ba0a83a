"""Calls to the replicas of one teacher: which there are, and one call of one of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from ray import serve
from ray.exceptions import ObjectLostError, RayActorError, RayTaskError, WorkerCrashedError
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle, DeploymentResponse

from deployments import membership, pinning
from scoring.errors import DeadlineExceeded, ScoringError, TeacherUnavailable

POLL_S = 0.05
ANSWER_MARGIN_S = 2.0
"""How long after a deadline, which the replica keeps, its answer may still be on its way."""
_HANDLE_PATIENCE_S = 5.0

# Ways in which a call fails that say nothing of what was asked.
_LOST = (RayActorError, ObjectLostError, WorkerCrashedError, DeploymentUnavailableError, membership.ReplicaGone)


class ReplicaLost(Exception):
    """The call was lost with its replica. It may or may not have run; reads are idempotent."""


class Replicas:
    """The replicas of a teacher's deployment, as Serve's controller makes them known to this process.

    Args:
        app_name, teacher, deployment: the application, the teacher's name, and the deployment that serves it.
        why_none: of a teacher, what is known of why it has no replica.
    """

    def __init__(self, app_name: str, teacher: str, deployment: str, why_none: Callable[[str], str]) -> None:
        self.teacher = teacher
        self._why_none = why_none
        self._app_name, self._deployment = app_name, deployment
        self._known_handle: DeploymentHandle | None = None

    def running(self) -> tuple[str, ...]:
        """Ids of those that run now; empty before the first has been heard of."""
        return membership.members(self._handle())

    async def wait(self, deadline: float) -> tuple[str, ...]:
        """Ids of those that run; waits for the first one.

        Raises:
            TeacherUnavailable: none came before the deadline.
        """
        asked = now()
        while not (running := self.running()):
            if now() >= deadline:
                none = f"teacher {self.teacher!r} has no running replica (see `serve status`)"
                raise TeacherUnavailable(self._why_none(self.teacher) or none)
            if now() - asked > _HANDLE_PATIENCE_S:  # the handle may listen to a controller that is no more
                self._known_handle = None
                asked = now()
            await asyncio.sleep(POLL_S)
        return running

    async def call(self, replica: str, method: str, deadline: float, *args: Any, **kwargs: Any) -> Any:
        """What `method` returns on one replica; cancelled there when this is cancelled.

        Raises:
            ReplicaLost: the replica is gone, or died.
            DeadlineExceeded: no answer by the deadline and a margin.
            ScoringError: what the method raised.
        """
        response = pinning.pinned(self._handle(), replica, method).remote(*args, **kwargs)
        try:
            return await result_of(response, max(deadline - now(), 0) + ANSWER_MARGIN_S)
        except _LOST as error:
            raise ReplicaLost(f"replica {replica} was lost ({type(error).__name__})") from error
        except RayTaskError as error:
            if isinstance(error.cause, ScoringError):
                raise error.cause from None
            if isinstance(error.cause, _LOST):
                raise ReplicaLost(f"replica {replica} was lost ({type(error.cause).__name__})") from error
            raise ScoringError(f"the replica failed ({type(error.cause).__name__}); its log says why") from error
        except TimeoutError:
            raise DeadlineExceeded("the replica did not answer within the deadline (timeout_s)") from None

    def _handle(self) -> DeploymentHandle:
        if self._known_handle is None:
            self._known_handle = serve.get_deployment_handle(
                self._deployment, self._app_name, _check_exists=False, _record_telemetry=False
            )
        return self._known_handle


async def result_of(response: DeploymentResponse, timeout_s: float) -> Any:
    """What the call returned; cancelled at the replica when it is abandoned here.

    Raises:
        TimeoutError: no answer in time.
    """

    async def answer() -> Any:
        return await response

    try:
        return await asyncio.wait_for(answer(), timeout_s)
    except BaseException:
        response.cancel()
        raise


def now() -> float:
    """The event loop's clock, on which deadlines are kept."""
    return asyncio.get_running_loop().time()
