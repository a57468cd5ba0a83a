"""`Router`: plans a batch over the replicas, sends every chunk to its replica, and puts the answers back in order.

One class, three hosts: the trainer's own process (through `client.py`), the named actor, and the HTTP ingress. It
calls the replicas directly, so that no process relays everybody's bytes. It knows nothing of HTTP and of vLLM.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from deployments import pinning
from deployments.catalog import Catalog
from deployments.delivery import Part, deliver, failed_part
from deployments.lane import Call
from deployments.lanes import Lanes
from deployments.replica_calls import Replicas, now
from scoring.adapters import Adapter
from scoring.batches import LabelBatch, MatrixBatch
from scoring.errors import DeadlineExceeded, ScoringError, TeacherUnavailable, UnknownTeacher
from scoring.limits import BatchLimits
from scoring.reads import LabelRead, MatrixRead
from scoring.scores import LabelScore, LabelScores, MatrixScore, MatrixScores, one_by_one
from scoring.wire import ReadOptions

APP_NAME = "teacher-scoring"
_INFO_FRESH_S = 1.0
_TAKING_BACK_S = 90.0  # after its deadline, an update of weights that came to nothing is undone


class Router:
    """Answers batches of reads over the replicas of an application's teachers.

    Use it from one event loop.

    Args:
        app_name: the Serve application.
        catalog: what the ingress knows of the teachers (see `deployments.catalog`). Left out, it is asked of the
            application's ingress, and asked again every few seconds, since a redeploy may change it.
        serves_many: this process answers for callers elsewhere: it holds them to the application's limits, and says
            so when every replica has its fill. Without it, the reads are this process's own: they wait here, and
            refusals are met with another try until their deadline.
    """

    def __init__(
        self, app_name: str = APP_NAME, catalog: dict[str, Any] | None = None, serves_many: bool = False
    ) -> None:
        pinning.check_ray()
        self._app_name = app_name
        self._catalog = Catalog(app_name, catalog)
        self.why_none = self._catalog.why_none
        self._serves_many = serves_many
        self._lanes: dict[str, Lanes] = {}  # by deployment: aliases and adapters share them
        self._infos: dict[str, tuple[float, dict[str, Any]]] = {}  # by deployment, with the time it was asked
        self._checkpoints: dict[Adapter, str] = {}

    def with_catalog(self, catalog: dict[str, Any]) -> Router:
        """A Router that goes by another catalog, over the same replicas and with the same ledger."""
        other = Router(self._app_name, catalog, self._serves_many)
        other._lanes, other.why_none = self._lanes, self.why_none
        return other

    async def served_by(self, timeout_s: float = 10) -> dict[str, str]:
        """Per teacher the deployment that answers for it, which aliases and adapters share; the default teacher first,
        and every teacher before its adapters. Asks no teacher.

        Raises:
            TeacherUnavailable: there is no application.
        """
        catalog = await self._catalog.find(now() + timeout_s)
        return _default_first(catalog)

    async def teachers(self, timeout_s: float = 10) -> dict[str, dict[str, Any]]:
        """What every teacher is and takes: the fields of `TeacherInfo`, `max_outstanding_tokens`, `replicas`, how many
        serve it now, and `default`. An adapter has those of its base, but its own `checkpoint` (None where that cannot
        be read), and `base` and `adapter`, its base's name and its folder. Of a teacher that does not answer there are
        only its name, `default`, `"replicas": 0`, and of an adapter `base` and `adapter`.

        Up to a second old, so that a caller may ask with every request.

        Raises:
            TeacherUnavailable: no application, or no teacher answered in time.
        """
        deadline = now() + timeout_s
        catalog = await self._catalog.find(deadline)
        served, adapters = _default_first(catalog), dict(catalog["adapters"])  # the ingress changes its own in place
        self._forget(served, adapters)
        owners = {deployment: name for name, deployment in reversed(served.items()) if name not in adapters}
        snapshot = {**catalog, "deployments": served}
        infos = await asyncio.gather(*(self._info(name, snapshot, deadline) for name in owners.values()))
        by_deployment = dict(zip(owners, infos, strict=True))
        if not any(info["replicas"] for info in infos):
            why = "".join(
                f"; {sentence}" for sentence in sorted({self._catalog.why_none(name) for name in served} - {""})
            )
            raise TeacherUnavailable(f"no replica of {', '.join(served)} answered within {timeout_s:g} s{why}")
        found = {name: {**by_deployment[serves], "teacher": name} for name, serves in served.items()}
        for name, adapter in adapters.items():
            found[name] |= {"base": owners[served[name]], "adapter": adapter.path}
        answering = [name for name in adapters if found[name]["replicas"]]
        checkpoints = (
            self._checkpoint(adapters[name], found[name]["checkpoint"], name, snapshot, deadline) for name in answering
        )
        for name, checkpoint in zip(answering, await asyncio.gather(*checkpoints), strict=True):
            found[name]["checkpoint"] = checkpoint
        return {name: {**info, "default": name == catalog["default"]} for name, info in found.items()}

    async def read_matrix(
        self,
        reads: MatrixBatch | Sequence[MatrixRead],
        *,
        timeout_s: float = 600,
        return_exceptions: bool = False,
        trace_headers: Mapping[str, str] | None = None,
    ) -> MatrixScores:
        """Answer matrix reads, in their order. The weights are the same for all reads of one teacher: when they change
        meanwhile, these reads are asked again.

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

    def iter_matrix(
        self,
        reads: MatrixBatch | Sequence[MatrixRead],
        *,
        timeout_s: float = 600,
        return_exceptions: bool = False,
        trace_headers: Mapping[str, str] | None = None,
    ) -> AsyncIterator[tuple[int, MatrixScore]]:
        """(index, score) of every read, as they finish. Arguments and errors as for `read_matrix`.

        When the weights of a teacher change meanwhile, the reads that are not answered yet get the new ones; the `meta`
        of each says which.
        """
        batch = MatrixBatch.of(reads)
        parts = self._parts(MatrixScores, "read_matrix", batch, timeout_s, trace_headers, whole=False)
        return _one_by_one(parts, return_exceptions)

    def iter_labels(
        self,
        reads: LabelBatch | Sequence[LabelRead],
        *,
        timeout_s: float = 600,
        return_exceptions: bool = False,
        trace_headers: Mapping[str, str] | None = None,
    ) -> AsyncIterator[tuple[int, LabelScore]]:
        """(index, score) of every label read, as they finish; otherwise as `iter_matrix`."""
        batch = LabelBatch.of(reads)
        parts = self._parts(LabelScores, "read_labels", batch, timeout_s, trace_headers, whole=False)
        return _one_by_one(parts, return_exceptions)

    def outstanding(self) -> dict[str, dict[str, int]]:
        """The ledger: tokens that wait for or are outstanding on replicas, by deployment and replica, where there are
        any. Empty when nothing is under way."""
        return {deployment: tokens for deployment, lanes in self._lanes.items() if (tokens := lanes.outstanding())}

    async def update_weights(self, teacher: str, checkpoint_path: str | Path, timeout_s: float = 600) -> int:
        """Have a teacher answer by other weights of its model, from now on, on all its replicas at once.

        Reads wait while they are loaded. A checkpoint that does not fit, or fails, leaves the old weights serving.

        Args:
            teacher: its name; adapters over it stay, over the new weights.
            checkpoint_path: a folder of safetensors, by its absolute path, with the tensors (names, shapes, dtypes) and
                the configuration of the one that is loaded; the same on every node, and kept as it is for as long as it
                is served. The same folder with other files is another version.
            timeout_s: seconds after which nothing is changed any more.

        Returns:
            The new weight version, for `expect_version`.

        Raises:
            InvalidCheckpoint: it does not fit; says what differs.
            SelfTestFailed: the engine contradicts itself with these weights.
            UnknownTeacher: `teacher` is no teacher, or an adapter.
            DeadlineExceeded: the old weights serve.
            TeacherUnavailable: no replica runs, or one was lost while it loaded them before the others; or the ingress
                did not answer, and `teachers` says which weights serve.
        """
        done = await self._catalog.ask_ingress(
            "update_weights", teacher, str(checkpoint_path), timeout_s, timeout_s=timeout_s + _TAKING_BACK_S
        )
        self._infos.pop(done["deployment"], None)
        if lanes := self._lanes.get(done["deployment"]):
            lanes.hear_versions(done["replicas"])
        return done["weight_version"]

    async def add_adapter(self, name: str, base: str, path: str, timeout_s: float = 120) -> None:
        """Serve a LoRA adapter as a teacher, from now on and after a restart of the application.

        Args:
            name: the teacher's name; one of an adapter replaces that adapter.
            base: the teacher it changes.
            path: its folder, as PEFT saves it, the same on every node, kept for as long as it is served.

        Raises:
            InvalidAdapter: the engine could not apply it exactly, or `base` takes none.
            UnknownTeacher: `base` is no teacher.
        """
        await self._catalog.change("add_adapter", name, base, path, timeout_s=timeout_s)

    async def remove_adapter(self, name: str, timeout_s: float = 120) -> None:
        """Serve an adapter no longer. Routers elsewhere hear of it within seconds.

        Raises:
            UnknownTeacher: no adapter has that name.
        """
        await self._catalog.change("remove_adapter", name, timeout_s=timeout_s)

    async def _read(
        self,
        answer: type[MatrixScores] | type[LabelScores],
        method: str,
        batch: MatrixBatch | LabelBatch,
        timeout_s: float,
        return_exceptions: bool,
        trace_headers: Mapping[str, str] | None,
    ) -> Any:
        async with contextlib.aclosing(self._parts(answer, method, batch, timeout_s, trace_headers, True)) as parts:
            scores = answer.assemble(len(batch), [part async for part in parts])
        return scores if return_exceptions else scores.raise_first()

    async def _parts(
        self,
        answer: type[MatrixScores] | type[LabelScores],
        method: str,
        batch: MatrixBatch | LabelBatch,
        timeout_s: float,
        trace_headers: Mapping[str, str] | None,
        whole: bool,
    ) -> AsyncIterator[Part]:
        """The answers to a batch, in parts; `whole` as for `deliver`."""
        deadline = now() + ReadOptions(timeout_s).timeout_s
        catalog = await self._catalog.find(deadline)
        if not all(name is None or name in catalog["deployments"] for name in batch.teachers):
            catalog = await self._catalog.find(deadline, anew=True)  # perhaps a redeploy has just added it
        if self._serves_many:
            BatchLimits(**catalog["limits"]).check(batch)
        # Nothing is awaited or yielded before all is taken from the catalog, which the ingress changes in place: a read
        # of an adapter without its adapter would be answered by the base.
        shares, unknown = [], []
        for name, reads in _by_teacher(batch, catalog["default"]).items():
            if name in catalog["deployments"]:
                shares.append((self._lanes_of(name, catalog), reads))
            else:
                known = ", ".join(catalog["deployments"])
                error = UnknownTeacher(f"is {name!r}; the teachers are {known}", field="teacher")
                unknown.append(failed_part(answer, reads, error))
        adapters = {name: adapter for name, adapter in catalog["adapters"].items() if name in batch.teachers}
        call = Call(answer, method, batch, deadline, trace_headers, adapters or None, bounded=self._serves_many)
        patience_s = catalog["admission_wait_s"] if self._serves_many else None
        for part in unknown:
            yield part
        async with contextlib.aclosing(deliver(call, shares, patience_s, whole)) as parts:
            async for part in parts:
                yield part

    def _lanes_of(self, teacher: str, catalog: Mapping[str, Any]) -> Lanes:
        deployment = catalog["deployments"][teacher]
        if deployment not in self._lanes:
            # Its teacher comes before the aliases and adapters that share it, whichever is asked for first.
            owner = next(name for name, serves in catalog["deployments"].items() if serves == deployment)
            self._lanes[deployment] = Lanes(Replicas(self._app_name, owner, deployment, self.why_none))
        return self._lanes[deployment]

    async def _info(self, teacher: str, catalog: Mapping[str, Any], deadline: float) -> dict[str, Any]:
        """What the replicas of a teacher say; how many there are."""
        deployment = catalog["deployments"][teacher]
        asked, info = self._infos.get(deployment, (float("-inf"), {}))
        if now() - asked <= _INFO_FRESH_S:
            return info
        try:
            info, replicas = await self._lanes_of(teacher, catalog).info(deadline)
        except (TeacherUnavailable, DeadlineExceeded):
            return {"replicas": 0}
        self._infos[deployment] = now(), {**info, "replicas": replicas}
        return self._infos[deployment][1]

    async def _checkpoint(
        self, adapter: Adapter, base: str, name: str, catalog: Mapping[str, Any], deadline: float
    ) -> str | None:
        """The hashes of an adapter and its base; `base` is that of the base as it is now."""
        if not self._checkpoints.get(adapter, "").startswith(f"{base}+"):
            try:
                checkpoint = await self._lanes_of(name, catalog).adapter_checkpoint(adapter, deadline)
            except ScoringError:
                return None
            self._checkpoints[adapter] = checkpoint
        return self._checkpoints[adapter]

    def _forget(self, served: Mapping[str, str], adapters: Mapping[str, Adapter]) -> None:
        """Forget teachers and adapters that are served no longer."""
        for deployment in self._infos.keys() - set(served.values()):
            del self._infos[deployment]
        for deployment in self._lanes.keys() - set(served.values()):
            if not self._lanes[deployment].outstanding():
                del self._lanes[deployment]
        for adapter in self._checkpoints.keys() - set(adapters.values()):
            del self._checkpoints[adapter]


def _default_first(catalog: Mapping[str, Any]) -> dict[str, str]:
    """Per teacher of a catalog its deployment."""
    default = catalog["default"]
    return {default: catalog["deployments"][default], **catalog["deployments"]}


def _by_teacher(batch: MatrixBatch | LabelBatch, default: str) -> dict[str, np.ndarray]:
    """Per teacher the places of its reads in the batch, int64 and rising; a read that names none is the default's."""
    names = [default if name is None else name for name in batch.teachers]
    reads: dict[str, np.ndarray] = {}
    for i, name in enumerate(names):
        reads[name] = np.concatenate([reads.get(name, np.zeros(0, np.int64)), np.flatnonzero(batch.teacher_index == i)])
    return {name: np.sort(places) for name, places in reads.items() if len(places)}


async def _one_by_one(parts: AsyncIterator[Part], return_exceptions: bool) -> AsyncIterator[tuple[int, Any]]:
    async with contextlib.aclosing(parts):
        async for target, scores, source in parts:
            for item in one_by_one(target, scores, source, return_exceptions):
                yield item
