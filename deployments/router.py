"""`Router`: plans a batch over the replicas, sends every shard to its replica, and puts the answers back in order.

One class, three hosts: the trainer's own process (through `client.py`), the named actor, and the HTTP ingress. It
calls the replicas directly, so that no process relays everybody's bytes. It knows nothing of HTTP and of vLLM.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import ray
from ray import serve
from ray.exceptions import ObjectLostError, RayActorError, RayTaskError, WorkerCrashedError
from ray.serve.exceptions import DeploymentUnavailableError, RayServeException
from ray.serve.handle import DeploymentHandle, DeploymentResponse

from deployments import membership, pinning
from scoring.batches import LabelBatch, MatrixBatch
from scoring.errors import DeadlineExceeded, ScoringError, TeacherUnavailable, UnknownTeacher
from scoring.reads import LabelRead, MatrixRead
from scoring.scores import LabelScores, MatrixScores
from scoring.sharding import plan
from scoring.wire import ReadOptions

logger = logging.getLogger(__name__)

APP_NAME = "teacher-scoring"
MAX_RETRIES = 3
"""How often a shard that was lost with its replica is planned again."""
_FIRST_PAUSE_S = 0.1  # before a lost shard is planned again; doubles
_POLL_S = 0.05
_ANSWER_MARGIN_S = 2.0
_CATALOG_FRESH_S = 5.0
_CATALOG_PATIENCE_S = 0.5
_CATALOG_TIMEOUT_S = 30.0
_INFO_FRESH_S = 1.0
_HANDLE_PATIENCE_S = 5.0

# Ways in which a call fails that say nothing of the reads: reads are idempotent, so they are planned again.
_LOST = (RayActorError, ObjectLostError, WorkerCrashedError, DeploymentUnavailableError, membership.ReplicaGone)

_Part = tuple[np.ndarray, MatrixScores | LabelScores, np.ndarray]  # see `MatrixScores.assemble`


class Router:
    """Answers batches of reads over the replicas of an application's teachers.

    Use it from one event loop.

    Args:
        app_name: the Serve application.
        catalog: what the ingress knows of the teachers (`{"default": name, "deployments": {teacher: deployment}}`).
            Left out, it is asked of the application's ingress, and asked again every few seconds, since a redeploy
            may change it.
    """

    def __init__(self, app_name: str = APP_NAME, catalog: dict[str, Any] | None = None) -> None:
        pinning.check_ray()
        self._app_name = app_name
        self._catalog = catalog
        self._asks_for_catalog = catalog is None
        self._catalog_until = 0.0 if catalog is None else float("inf")  # on the event loop's clock
        self._ingress: DeploymentHandle | None = None
        self._asking: asyncio.Task | None = None
        self._handles: dict[str, DeploymentHandle] = {}
        self._infos: dict[str, tuple[float, dict[str, Any]]] = {}  # by teacher, with the time it was asked
        self._outstanding: dict[str, Counter[str]] = defaultdict(Counter)  # tokens, by teacher and replica

    async def names(self, timeout_s: float = 10) -> tuple[str, ...]:
        """The teachers' names, the default one first. Asks no teacher.

        Raises:
            TeacherUnavailable: there is no application.
        """
        catalog = await self._find_catalog(_now() + timeout_s)
        others = (name for name in catalog["deployments"] if name != catalog["default"])
        return (catalog["default"], *others)

    async def teachers(self, timeout_s: float = 10) -> dict[str, dict[str, Any]]:
        """What every teacher is and takes: the fields of `TeacherInfo`, `replicas`, how many serve it now, and
        `default`. Of a teacher that does not answer, its name, `default` and `"replicas": 0`.

        Up to a second old, so that a caller may ask with every request.

        Raises:
            TeacherUnavailable: no application, or no teacher answered in time.
        """
        deadline = _now() + timeout_s
        names = await self.names(timeout_s)
        infos = await _all([self._info(name, deadline) for name in names])
        if not any(info["replicas"] for info in infos):
            raise TeacherUnavailable(f"no replica of {', '.join(names)} answered within {timeout_s:g} s")
        return {name: {**info, "default": name == names[0]} for name, info in zip(names, infos, strict=True)}

    async def read_matrix(
        self,
        reads: MatrixBatch | Sequence[MatrixRead],
        *,
        timeout_s: float = 600,
        return_exceptions: bool = False,
        trace_headers: Mapping[str, str] | None = None,
    ) -> MatrixScores:
        """Answer matrix reads, in their order.

        Args:
            reads: a batch, or reads.
            timeout_s: seconds until what is not answered is aborted.
            return_exceptions: put a failed read's exception in its place, as `asyncio.gather` does.
            trace_headers: W3C trace context for vLLM.

        Raises:
            ScoringError: of the first read that failed, with its index, unless `return_exceptions`.
        """
        batch = MatrixBatch.of(reads)
        return await self._read(MatrixScores, "read_matrix", batch, timeout_s, return_exceptions, trace_headers)

    async def read_labels(
        self,
        reads: LabelBatch | Sequence[LabelRead],
        *,
        timeout_s: float = 600,
        return_exceptions: bool = False,
        trace_headers: Mapping[str, str] | None = None,
    ) -> LabelScores:
        """Answer label reads, in their order; arguments and errors as for `read_matrix`."""
        batch = LabelBatch.of(reads)
        return await self._read(LabelScores, "read_labels", batch, timeout_s, return_exceptions, trace_headers)

    async def _info(self, teacher: str, deadline: float) -> dict[str, Any]:
        """What the first replica that answers says of a teacher."""
        asked, info = self._infos.get(teacher, (float("-inf"), {}))
        while _now() - asked > _INFO_FRESH_S:
            try:
                members = await self._members(teacher, deadline)
                info = {**await self._call(teacher, members[0], "info", deadline), "replicas": len(members)}
            except _LOST:
                await asyncio.sleep(_POLL_S)
            except (TeacherUnavailable, DeadlineExceeded):
                return {"teacher": teacher, "replicas": 0}
            else:
                asked = _now()
                self._infos[teacher] = asked, info
        return info

    async def _read(
        self,
        answer: type[MatrixScores] | type[LabelScores],
        method: str,
        batch: MatrixBatch | LabelBatch,
        timeout_s: float,
        return_exceptions: bool,
        trace_headers: Mapping[str, str] | None,
    ) -> Any:
        deadline = _now() + ReadOptions(timeout_s).timeout_s
        catalog = await self._find_catalog(deadline)
        if not all(name is None or name in catalog["deployments"] for name in batch.teachers):
            catalog = await self._find_catalog(deadline, anew=True)  # perhaps a redeploy has just added it
        names = [catalog["default"] if name is None else name for name in batch.teachers]
        number = {name: i for i, name in enumerate(dict.fromkeys(names))}
        teacher_of = np.array([number[name] for name in names], dtype=np.int64)[batch.teacher_index]  # int64 [N]
        order = np.argsort(teacher_of, kind="stable")
        counts = np.bincount(teacher_of, minlength=len(number))
        jobs, parts = [], []
        for name, reads in zip(number, np.split(order, np.cumsum(counts)[:-1]) if number else [], strict=True):
            if not len(reads):
                continue
            if name in catalog["deployments"]:
                jobs.append(self._read_teacher(answer, method, batch, reads, name, deadline, trace_headers))
            else:
                known = ", ".join(catalog["deployments"])
                error = UnknownTeacher(f"is {name!r}; the teachers are {known}", field="teacher")
                parts.append(_failed(answer, reads, error))
        for some in await _all(jobs):
            parts += some
        scores = answer.assemble(len(batch), parts)
        return scores if return_exceptions else scores.raise_first()

    async def _read_teacher(
        self,
        answer: type[MatrixScores] | type[LabelScores],
        method: str,
        batch: MatrixBatch | LabelBatch,
        reads: np.ndarray,
        teacher: str,
        deadline: float,
        trace_headers: Mapping[str, str] | None,
    ) -> list[_Part]:
        """The parts of the answer for the reads of one teacher.

        Reads that were lost with their replica are planned again over the others, after a pause.
        """
        costs, parts, lost_with = batch.tokens(), [], set()
        error: ScoringError = TeacherUnavailable(f"its replicas were lost {1 + MAX_RETRIES} times in a row")
        for attempt in range(1 + MAX_RETRIES):
            if attempt:
                await asyncio.sleep(min(_FIRST_PAUSE_S * 2 ** (attempt - 1), max(deadline - _now(), 0)))
            try:
                members = await self._members(teacher, deadline)
            except TeacherUnavailable as missing:
                error = missing
                break
            members = [m for m in members if m not in lost_with] or members
            loads = {m: self._outstanding[teacher][m] for m in members}
            shards = [(replica, reads[picked]) for replica, picked in plan(costs[reads], loads).items()]
            jobs = [
                self._read_shard(answer, method, batch, shard, teacher, replica, deadline, trace_headers)
                for replica, shard in shards
            ]
            # Booked before anything else can plan, and settled however the job ends.
            settles = [self._book(teacher, replica, int(costs[shard].sum())) for replica, shard in shards]
            lost = []
            for (replica, shard), scores in zip(shards, await _all(jobs, settles), strict=True):
                gone = _lost_reads(scores, len(shard))
                if len(gone):
                    lost_with.add(replica)
                    lost.append(shard[gone])
                if len(gone) < len(shard):
                    kept = np.setdiff1d(np.arange(len(shard)), gone)
                    parts.append((shard[kept], scores, kept))
            if not lost:
                return parts
            reads = np.sort(np.concatenate(lost))
            logger.warning("%d reads of %s were lost with their replica (attempt %d)", len(reads), teacher, attempt + 1)
        return [*parts, _failed(answer, reads, error)]

    async def _read_shard(
        self,
        answer: type[MatrixScores] | type[LabelScores],
        method: str,
        batch: MatrixBatch | LabelBatch,
        reads: np.ndarray,
        teacher: str,
        replica: str,
        deadline: float,
        trace_headers: Mapping[str, str] | None,
    ) -> Any:
        """The scores of one shard, or None when its replica was lost."""
        try:
            scores, _ = await self._call(
                teacher,
                replica,
                method,
                deadline,
                batch.select(reads),
                timeout_s=deadline - _now(),
                trace_headers=trace_headers,
            )
            return scores
        except _LOST:
            return None
        except ScoringError as error:
            return answer.failed(error, len(reads))

    def _book(self, teacher: str, replica: str, tokens: int) -> Callable[..., None]:
        """Enter a shard into the ledger. Returns what takes it out again."""
        ledger = self._outstanding[teacher]
        ledger[replica] += tokens

        def settle(*_: Any) -> None:
            ledger[replica] -= tokens
            if not ledger[replica]:
                del ledger[replica]

        return settle

    async def _call(self, teacher: str, replica: str, method: str, deadline: float, *args: Any, **kwargs: Any) -> Any:
        """One call of `method` on one replica."""
        response = pinning.pinned(self._handle(teacher), replica, method).remote(*args, **kwargs)
        try:
            # The replica keeps the deadline; the margin is for its answer to travel.
            return await _result(response, max(deadline - _now(), 0) + _ANSWER_MARGIN_S)
        except RayTaskError as error:
            if isinstance(error.cause, (ScoringError, *_LOST)):
                raise error.cause from None
            raise ScoringError(f"the replica failed: {error.cause!r}") from error
        except TimeoutError:
            raise DeadlineExceeded("the replica did not answer within the deadline (timeout_s)") from None

    async def _members(self, teacher: str, deadline: float) -> tuple[str, ...]:
        """The running replicas of a teacher; waits for the first one.

        Raises:
            TeacherUnavailable: none came before the deadline.
        """
        asked = _now()
        while not (members := membership.members(self._handle(teacher))):
            if _now() >= deadline:
                raise TeacherUnavailable(f"teacher {teacher!r} has no running replica (see `serve status`)")
            if _now() - asked > _HANDLE_PATIENCE_S:  # its handle may listen to a controller that is no more
                self._handles.pop(teacher, None)
                asked = _now()
            await asyncio.sleep(_POLL_S)
        return members

    def _handle(self, teacher: str) -> DeploymentHandle:
        if teacher not in self._handles:
            deployment = self._catalog["deployments"].get(teacher)
            if deployment is None:
                raise TeacherUnavailable(f"teacher {teacher!r} is no longer served")
            self._handles[teacher] = serve.get_deployment_handle(
                deployment, self._app_name, _check_exists=False, _record_telemetry=False
            )
        return self._handles[teacher]

    async def _find_catalog(self, deadline: float, anew: bool = False) -> dict[str, Any]:
        """What the ingress knows of the teachers. A known catalog outlives the ingress: without an answer it stands.

        Raises:
            TeacherUnavailable: none is known, and none came before the deadline.
        """
        if _now() < self._catalog_until and not (anew and self._asks_for_catalog):
            return self._catalog
        if self._asking is None or self._asking.done():  # one call for all who wait
            self._asking = asyncio.create_task(self._ask_for_catalog())
            self._asking.add_done_callback(lambda task: task.cancelled() or task.exception())
        patience = max(deadline - _now(), 0) if self._catalog is None else _CATALOG_PATIENCE_S
        await asyncio.wait({self._asking}, timeout=patience)
        if self._asking.done() and not self._asking.exception():
            self._catalog = self._asking.result()
        elif self._catalog is None:
            if self._asking.done() and isinstance(self._asking.exception(), TeacherUnavailable):
                raise self._asking.exception()
            raise TeacherUnavailable(f"the ingress of application {self._app_name!r} did not answer in time")
        self._catalog_until = _now() + _CATALOG_FRESH_S
        return self._catalog

    async def _ask_for_catalog(self) -> dict[str, Any]:
        try:
            if self._ingress is None:  # asks the controller, which blocks
                self._ingress = await asyncio.to_thread(_app_handle, self._app_name)
            return await _result(self._ingress.catalog.remote(), _CATALOG_TIMEOUT_S)
        except BaseException:
            self._ingress = None  # its handle may listen to a controller that is no more
            raise


def _app_handle(app_name: str) -> DeploymentHandle:
    if not ray.is_initialized():
        raise TeacherUnavailable("this process is not connected to Ray: call ray.init(address='auto') first")
    try:
        return serve.get_app_handle(app_name)
    except RayServeException as error:
        raise TeacherUnavailable(
            f"no Serve application {app_name!r} runs in this Ray cluster (start it: serve run serve_config.yaml)"
        ) from error


async def _result(response: DeploymentResponse, timeout_s: float) -> Any:
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


async def _all(jobs: Sequence[Any], afterwards: Sequence[Callable[..., None]] = ()) -> list[Any]:
    """The results of all jobs; when one raises, or the caller is cancelled, the others are cancelled and awaited.

    `afterwards[i]`, where given, is called once job i has ended, in whatever way, begun or not.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(job) for job in jobs]
            for task, callback in zip(tasks, afterwards, strict=False):
                task.add_done_callback(callback)
    except BaseExceptionGroup as several:
        raise several.exceptions[0] from None
    return [task.result() for task in tasks]


def _now() -> float:
    return asyncio.get_running_loop().time()


def _lost_reads(scores: Any, count: int) -> np.ndarray:
    """int64: which of a shard's `count` reads its replica did not live to answer. All of them without `scores`."""
    if scores is None:
        return np.arange(count)
    return np.array([i for i, e in scores.errors.items() if isinstance(e, TeacherUnavailable)], dtype=np.int64)


def _failed(answer: type[MatrixScores] | type[LabelScores], reads: np.ndarray, error: ScoringError) -> _Part:
    return reads, answer.failed(error, len(reads)), np.arange(len(reads))
