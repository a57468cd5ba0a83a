"""The `Teacher` deployment: one vLLM engine per Serve replica.

A replica takes shards: batches that a Router planned for it. It knows nothing of other replicas.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

import psutil
from ray import serve

from deployments import record
from deployments.autoscaling import OUTSTANDING_TOKENS
from deployments.config import DEMO_MODEL, TeacherConfig
from deployments.cores import lease_cores
from deployments.log_handlers import serve_log_kept
from deployments.placement import engine_args
from deployments.replica_weights import ReplicaWeights
from scoring.adapters import Adapter
from scoring.batches import LabelBatch, MatrixBatch
from scoring.checkpoint import checkpoint_hash
from scoring.environment import prepare_engine_environment
from scoring.errors import Overloaded, ScoringError, TeacherUnavailable, VersionMismatch
from scoring.scores import LabelScores, MatrixScores
from scoring.weights import Weights

logger = logging.getLogger("ray.serve")

_ENGINE_CHECK_S = 0.25
_OUTSTANDING_STEPS = 64
_LEAST_RETRY_S = 0.05
_LAST_WORDS_S = 1.0  # in which the error that makes a replica leave reaches whoever asked


class Teacher:
    """Hosts one engine. `deployments.app` wraps it as a Serve deployment.

    Args:
        name: the teacher's name in the configuration.
        config: the fields of its `TeacherConfig`.
    """

    async def __init__(self, name: str, config: dict[str, Any]) -> None:  # Serve awaits it, on the replica's loop
        settings = TeacherConfig.model_validate(config)
        self._model = settings.model
        self._cores = None if settings.num_gpus else lease_cores(settings.cpu_cores, name)
        cores = self._cores.cores if self._cores else ()
        prepare_engine_environment(cores)
        started = time.monotonic()
        self._stopping = False
        model = _model_path(settings)
        weights = await asyncio.to_thread(self._weights_to_start_with, model)
        with serve_log_kept():
            from scoring.engine import EngineSettings, TeacherEngine  # after the environment: vLLM reads it at import

            self._engine = TeacherEngine(
                EngineSettings(
                    model=model,
                    weights=weights,
                    teacher=name,
                    dtype=settings.dtype,
                    head_dtype=settings.head_dtype,
                    scores=settings.scores,
                    max_candidates=settings.max_candidates,
                    share_head=settings.share_head,
                    prefix_reuse=settings.prefix_reuse,
                    engine_args=engine_args(settings),
                )
            )
        up = time.monotonic()
        self._step_tokens = self._engine.info().max_batched_tokens
        self._max_outstanding_tokens = settings.max_outstanding_tokens or _OUTSTANDING_STEPS * self._step_tokens
        self._processes = psutil.Process().children(recursive=True)
        threading.Thread(target=self._leave_with_engine, name="engine-watch", daemon=True).start()
        logger.addFilter(_without_traceback)
        self._weights = ReplicaWeights(self._engine, self._recorded_weights, self._leave)
        try:
            await self._engine.self_test()
            await self._weights.follow()  # they may have changed since it began to start
        except BaseException:
            self.__del__()
            raise
        self._engine.watch()
        self._weights.watch()
        logger.info(
            "teacher %s is ready after %.1f s (self-test %.1f s) on cores %s",
            name,
            time.monotonic() - started,
            time.monotonic() - up,
            cores or "-",
        )

    async def read_matrix(
        self,
        batch: MatrixBatch,
        timeout_s: float,
        trace_headers: Mapping[str, str] | None = None,
        adapters: Mapping[str, Adapter] | None = None,
        version: int | None = None,
    ) -> tuple[MatrixScores, int]:
        """Answer a shard; see `TeacherEngine.read_matrix`.

        Returns:
            The scores, and the tokens that are outstanding here without this shard.

        Raises:
            Overloaded: with the shard, more than `max_outstanding_tokens` would be outstanding, and it is not alone.
            TeacherUnavailable: the replica is shutting down.
            VersionMismatch: the shard was planned for other weights than this replica has.
        """
        with self._admitted(batch, version):
            scores = await self._engine.read_matrix(
                batch, timeout_s=timeout_s, trace_headers=trace_headers, adapters=adapters, version=version
            )
        return scores, self.outstanding_tokens

    async def read_labels(
        self,
        batch: LabelBatch,
        timeout_s: float,
        trace_headers: Mapping[str, str] | None = None,
        adapters: Mapping[str, Adapter] | None = None,
        version: int | None = None,
    ) -> tuple[LabelScores, int]:
        """Answer a shard; see `TeacherEngine.read_labels`. Returns and raises as `read_matrix` does."""
        with self._admitted(batch, version):
            scores = await self._engine.read_labels(
                batch, timeout_s=timeout_s, trace_headers=trace_headers, adapters=adapters, version=version
            )
        return scores, self.outstanding_tokens

    @property
    def outstanding_tokens(self) -> int:
        """Prompt and response tokens of the reads that are not answered yet."""
        return self._engine.progress().outstanding_tokens

    async def heartbeat(self) -> dict[str, Any]:
        """The engine's steps (`steps`, `since_last_step_s`, `longest_step_s`) and `outstanding_tokens`."""
        progress = asdict(self._engine.progress())
        del progress["outstanding_reads"]
        return progress

    async def info(self) -> dict[str, Any]:
        """The fields of `TeacherInfo`, and `max_outstanding_tokens`."""
        served = self._weights.served
        return {
            **self._engine.info().to_dict(),
            "weights": served.path,
            "weight_version": served.version,
            "checkpoint": served.checkpoint,
            "max_outstanding_tokens": self._max_outstanding_tokens,
        }

    async def adapter_checkpoint(self, adapter: Adapter) -> str:
        """See `TeacherEngine.adapter_checkpoint`."""
        return await self._engine.adapter_checkpoint(adapter)

    async def check_weights(self, path: str) -> dict[str, Any]:
        """Whether the weights in a folder can take the place of those that are loaded; see
        `TeacherEngine.check_weights`.

        Returns:
            Their hash (`checkpoint`), the `weight_version` that is served, and the `model` of the configuration.
        """
        checked = await self._engine.check_weights(path)
        return {
            "checkpoint": checked.checkpoint,
            "weight_version": self._weights.served.version,
            "model": self._model,
        }

    async def prepare_weights(self, weights: Weights, timeout_s: float) -> None:
        """See `ReplicaWeights.prepare`."""
        await self._weights.prepare(weights, timeout_s)

    async def keep_weights(self, weights: Weights) -> bool:
        """See `ReplicaWeights.keep`."""
        return self._weights.keep(weights)

    async def follow_record(self) -> int:
        """See `ReplicaWeights.follow`."""
        return await self._weights.follow()

    async def placement(self) -> dict[str, Any]:
        """Where this replica runs: process ids and cores. For operators and tests."""
        children = {p.pid: p.name() for p in psutil.Process().children(recursive=True)}
        cores = self._cores.cores if self._cores else ()
        return {"replica": _replica_id(), "pid": os.getpid(), "engine": children, "cores": cores}

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What Serve asks each replica for, where the teacher has `autoscaling`."""
        return {OUTSTANDING_TOKENS: self.outstanding_tokens}

    async def check_health(self) -> None:
        """Raise when the engine is dead, makes no steps, or failed the last canary read. Never waits."""
        await self._engine.check_health()

    def __del__(self) -> None:
        # Serve calls it once the reads under way are answered, and then refuses others by itself.
        engine = getattr(self, "_engine", None)
        if engine is not None and not self._stopping:
            self._stopping = True
            engine.shutdown()
            self._kill_engine()

    @contextlib.contextmanager
    def _admitted(self, batch: MatrixBatch | LabelBatch, version: int | None) -> Iterator[None]:
        """Around a shard's way through the engine."""
        self._admit(batch)
        try:
            yield
        except VersionMismatch as error:
            if version > error.details["weight_version"]:
                self._weights.look()
            raise

    def _admit(self, batch: MatrixBatch | LabelBatch) -> None:
        """Raise unless the shard may go to the engine. Nothing is awaited between this and its being counted."""
        if self._stopping:
            raise TeacherUnavailable("the replica is shutting down")
        tokens, progress = int(batch.tokens().sum()), self._engine.progress()
        excess = tokens + progress.outstanding_tokens - self._max_outstanding_tokens
        if excess > 0 and progress.outstanding_tokens:
            steps = min(excess, progress.outstanding_tokens) / self._step_tokens
            raise Overloaded(
                f"{tokens} tokens beside the {progress.outstanding_tokens} outstanding; this replica takes at most "
                f"{self._max_outstanding_tokens} (the teacher's setting max_outstanding_tokens)",
                retry_after_s=round(max(steps * progress.longest_step_s, _LEAST_RETRY_S), 3),
                outstanding_tokens=progress.outstanding_tokens,
            )

    def _leave_with_engine(self) -> None:
        """End this process as soon as its engine is dead or hangs.

        A live replica with a dead engine would take reads and fail them until Serve's health checks gave up on it.
        """
        while not (self._engine.dead or self._engine.stalled):
            time.sleep(_ENGINE_CHECK_S)
        how = "has died" if self._engine.dead else "makes no steps"
        self._end(f"the engine of this replica {how}")

    def _leave(self, reason: str) -> None:
        """End this process soon."""
        threading.Timer(_LAST_WORDS_S, self._end, [reason]).start()

    def _end(self, reason: str) -> None:
        if self._stopping:
            return
        logger.error("%s; the replica leaves and Serve starts another", reason)
        try:
            self._kill_engine()
        finally:
            os._exit(1)

    def _weights_to_start_with(self, model: str) -> Weights | None:
        """Those of the record; None for the model's own.

        Where the record is of another model, which a redeploy has replaced since, the weights of this one are newer.
        """
        found = _record_of_weights()
        if found is None:
            return None
        weights, of_model = found
        return weights if of_model == self._model else Weights(weights.version + 1, model, checkpoint_hash(model))

    def _recorded_weights(self) -> Weights | None:
        """Those of the record, where it is of this replica's model."""
        found = _record_of_weights()
        return found[0] if found and found[1] == self._model else None

    def _kill_engine(self) -> None:
        """SIGKILL for all processes of the engine: a stopped one never sees SIGTERM."""
        for process in {*self._processes, *psutil.Process().children(recursive=True)}:
            with contextlib.suppress(psutil.Error):  # it has ended by itself
                # Multiprocessing's tracker is spared: it gives shared memory back, and leaves after this process.
                if "resource_tracker" not in " ".join(process.cmdline()):
                    process.kill()


def _without_traceback(record: logging.LogRecord) -> bool:
    """Serve logs a traceback for every call that raises; for errors raised on purpose their sentence is enough."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, ScoringError):
        record.msg, record.args, record.exc_info = f"{record.getMessage()} {type(error).__name__}: {error}", (), None
    return True


def _record_of_weights() -> tuple[Weights, str] | None:
    """What the record says of the weights of this deployment."""
    context = serve.get_replica_context()
    return record.load_weights(context.app_name, context.deployment)


def _replica_id() -> str:
    """The id by which Routers name this replica."""
    return serve.get_replica_context().replica_id.unique_id


def _model_path(settings: TeacherConfig) -> str:
    if settings.model != DEMO_MODEL:
        return settings.model
    from scoring.demo_teacher import demo_teacher

    dtype = "float32" if settings.dtype == "float32" else "bfloat16"
    return str(demo_teacher(dtype, progress=lambda line: logger.info("%s", line)))
