"""The named actor: both reads as ordinary Ray actor calls, for trainers that hold ObjectRefs.

`ray.get_actor("teacher-scoring", namespace="teacher-scoring")` finds it from any process of the cluster. Arguments and
answers are ordinary objects: a batch may be an ObjectRef, the answer can be passed on as one. The answer is a plain
dict of numpy arrays. The application's ingress creates the actor, and the actor leaves when the application is gone.

It does not see its callers die: what bounds their work is their deadline. Bulk traffic is cheaper through
`ScoringClient`, which has no process in between.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

import ray
from ray import serve

from deployments import record
from deployments.router import Router
from scoring.batches import SCHEMA_VERSION, LabelBatch, MatrixBatch
from scoring.reads import LabelRead, MatrixRead

logger = logging.getLogger(__name__)

NAMESPACE = "teacher-scoring"
CODE_VERSION = f"{version('teacher-scoring')}/{SCHEMA_VERSION}"
_APP_CHECK_S = 10
_APP_CHECKS_MISSED = 6  # a minute without its application
_START_S = 60


class TeacherScoringActor:
    """Both reads over the teachers of one application. Methods as in `ScoringClient`; answers are plain dicts.

    Args:
        app_name: the Serve application.
    """

    def __init__(self, app_name: str) -> None:
        self._router = Router(app_name, serves_many=True)
        me = ray.get_runtime_context().current_actor
        threading.Thread(target=_leave_with_application, args=(app_name, me), daemon=True).start()

    async def code_version(self) -> str:
        """The version of the code that runs here."""
        return CODE_VERSION

    async def teachers(self) -> dict[str, dict[str, Any]]:
        """What every teacher is and takes."""
        return await self._router.teachers()

    async def read_matrix(
        self,
        reads: MatrixBatch | Sequence[MatrixRead],
        *,
        timeout_s: float = 600,
        return_exceptions: bool = False,
        trace_headers: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        """Answer matrix reads.

        Returns:
            `logprobs` (list of float32 [n, K]), `response_logprobs` (list of float32 [n]), `rows` (list of int64 [n]);
            `top_ids` (list of int32 [n, top_k]), `top_logprobs`, `tail_logprob`, `entropy` and `rank`, with None where
            a read did not ask for it; `meta` (list of dicts), `errors` (by read index; only with return_exceptions) and
            `schema_version`.

        Raises:
            ScoringError: as in `ScoringClient.read_matrix`.
        """
        scores = await self._router.read_matrix(
            reads, timeout_s=timeout_s, return_exceptions=return_exceptions, trace_headers=trace_headers
        )
        return scores.to_dict()

    async def read_labels(
        self,
        reads: LabelBatch | Sequence[LabelRead],
        *,
        timeout_s: float = 600,
        return_exceptions: bool = False,
        trace_headers: Mapping[str, str] | None = None,
    ) -> dict[str, Any]:
        """Answer label reads: `logprobs` (list of float32 [L]), `meta`, `errors` and `schema_version`."""
        scores = await self._router.read_labels(
            reads, timeout_s=timeout_s, return_exceptions=return_exceptions, trace_headers=trace_headers
        )
        return scores.to_dict()

    async def update_weights(self, teacher: str, checkpoint_path: str, *, timeout_s: float = 600) -> int:
        """Have a teacher answer by other weights of its model: see `Router.update_weights`."""
        return await self._router.update_weights(teacher, checkpoint_path, timeout_s)


def ensure_actor(app_name: str, replace: bool = True) -> ray.actor.ActorHandle:
    """The named actor of this application, created when there is none. Its name is the application's own.

    With `replace`, one that runs another version of this code, or does not answer, is ended and created anew.
    """
    create = ray.remote(TeacherScoringActor).options(
        name=app_name,
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        num_cpus=0,
        max_restarts=-1,
        max_task_retries=-1,
        max_concurrency=1000,
    )
    actor = create.remote(app_name)
    if not replace:
        return actor
    try:
        if ray.get(actor.code_version.remote(), timeout=_START_S) == CODE_VERSION:
            return actor
    except ray.exceptions.RayError as error:
        logger.warning("the named actor does not answer (%s); it is replaced", error)
    ray.kill(actor)
    actor = create.remote(app_name)
    ray.get(actor.code_version.remote(), timeout=_START_S)
    return actor


def _leave_with_application(app_name: str, actor: ray.actor.ActorHandle) -> None:
    """End `actor` for good, from a thread of its own, once its application has been gone for a minute."""
    missed = 0
    while missed < _APP_CHECKS_MISSED:
        time.sleep(_APP_CHECK_S)
        missed = 0 if _runs(app_name) else missed + 1
    logger.info("application %s is gone; its actor leaves", app_name)
    try:
        record.forget(app_name)  # where its ingress has not come to it
    finally:
        ray.kill(actor)


def _runs(app_name: str) -> bool:
    try:
        return app_name in serve.status().applications
    except Exception:  # no controller to ask: the whole of Serve is gone
        return False
