"""The `Teacher` deployment: one vLLM engine per Serve replica.

A replica takes shards: batches that a Router planned for it. It knows nothing of other replicas.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Mapping
from typing import Any

import psutil
from ray import serve

from deployments.autoscaling import OUTSTANDING_TOKENS
from deployments.config import DEMO_MODEL, TeacherConfig
from deployments.cores import lease_cores
from deployments.placement import engine_args
from scoring.batches import LabelBatch, MatrixBatch
from scoring.environment import prepare_engine_environment
from scoring.scores import LabelScores, MatrixScores

logger = logging.getLogger("ray.serve")

_ENGINE_CHECK_S = 0.25


class Teacher:
    """Hosts one engine. `deployments.app` wraps it as a Serve deployment.

    Args:
        name: the teacher's name in the configuration.
        config: the fields of its `TeacherConfig`.
    """

    def __init__(self, name: str, config: dict[str, Any]) -> None:
        settings = TeacherConfig.model_validate(config)
        self._cores = None if settings.num_gpus else lease_cores(settings.cpu_cores)
        cores = self._cores.cores if self._cores else ()
        prepare_engine_environment(cores)
        from scoring.engine import EngineSettings, TeacherEngine  # after the environment: vLLM reads it at import

        started = time.monotonic()
        self._stopping = False
        self._engine = TeacherEngine(
            EngineSettings(
                model=_model_path(settings),
                teacher=name,
                dtype=settings.dtype,
                head_dtype=settings.head_dtype,
                scores=settings.scores,
                max_candidates=settings.max_candidates,
                engine_args=engine_args(settings),
            )
        )
        self._processes = psutil.Process().children(recursive=True)
        threading.Thread(target=self._leave_with_engine, name="engine-watch", daemon=True).start()
        logger.info("teacher %s is ready after %.1f s on cores %s", name, time.monotonic() - started, cores or "-")

    async def read_matrix(
        self, batch: MatrixBatch, timeout_s: float, trace_headers: Mapping[str, str] | None = None
    ) -> MatrixScores:
        """Answer a shard; see `TeacherEngine.read_matrix`."""
        return await self._engine.read_matrix(batch, timeout_s=timeout_s, trace_headers=trace_headers)

    async def read_labels(
        self, batch: LabelBatch, timeout_s: float, trace_headers: Mapping[str, str] | None = None
    ) -> LabelScores:
        """Answer a shard; see `TeacherEngine.read_labels`."""
        return await self._engine.read_labels(batch, timeout_s=timeout_s, trace_headers=trace_headers)

    async def info(self) -> dict[str, Any]:
        """The fields of `TeacherInfo`."""
        return self._engine.info().to_dict()

    async def placement(self) -> dict[str, Any]:
        """Where this replica runs: process ids and cores. For operators and tests."""
        children = {p.pid: p.name() for p in psutil.Process().children(recursive=True)}
        cores = self._cores.cores if self._cores else ()
        return {"replica": _replica_id(), "pid": os.getpid(), "engine": children, "cores": cores}

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What Serve asks each replica for, where the teacher has `autoscaling`."""
        return {OUTSTANDING_TOKENS: getattr(self, "outstanding_tokens", 0)}

    async def check_health(self) -> None:
        await self._engine.check_health()

    def __del__(self) -> None:
        self._stopping = True
        engine = getattr(self, "_engine", None)
        if engine is not None:
            engine.shutdown()

    def _leave_with_engine(self) -> None:
        """End this process as soon as its engine is dead.

        A live replica with a dead engine would take reads and fail them until Serve's health checks gave up on it.
        """
        while not self._engine.dead:
            time.sleep(_ENGINE_CHECK_S)
        if self._stopping:
            return
        logger.error("the engine of this replica has died; the replica leaves and Serve starts another")
        try:
            for process in {*self._processes, *psutil.Process().children(recursive=True)}:
                with contextlib.suppress(psutil.Error):  # it has ended by itself
                    # Multiprocessing's tracker is spared: it gives shared memory back, and leaves after this process.
                    if "resource_tracker" not in " ".join(process.cmdline()):
                        process.kill()
        finally:
            os._exit(1)


def _replica_id() -> str:
    """The id by which Routers name this replica."""
    return serve.get_replica_context().replica_id.unique_id


def _model_path(settings: TeacherConfig) -> str:
    if settings.model != DEMO_MODEL:
        return settings.model
    from scoring.demo_teacher import demo_teacher

    dtype = "float32" if settings.dtype == "float32" else "bfloat16"
    return str(demo_teacher(dtype, progress=lambda line: logger.info("%s", line)))
