"""`TeacherEngine`: one vLLM V2 engine that answers matrix reads and label reads.

The one module of the service that imports vLLM (`vllm_extension` runs inside vLLM's own processes). Call
`environment.prepare_engine_environment` before importing it. It knows nothing of Ray: one engine, in this process's
event loop, for batches that are meant for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

import numpy as np
import vllm
from vllm import AsyncEngineArgs
from vllm.config import VllmConfig
from vllm.entrypoints.generate.label_reads import next_token_label_reads
from vllm.exceptions import GracefulHTTPError, RetryableRequestError, VLLMClientError
from vllm.inputs import tokens_input
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.metrics.loggers import StatLoggerBase

from scoring.adapters import Adapter, check_adapter, weights_stamp
from scoring.batches import LabelBatch, MatrixBatch, end_to_end
from scoring.checkpoint import (
    Layout,
    checkpoint_dtype,
    checkpoint_hash,
    checkpoint_layout,
    checkpoint_stamp,
    differences,
    tokenizer_hash,
)
from scoring.columns import Columns
from scoring.errors import (
    DeadlineExceeded,
    EngineDead,
    InvalidAdapter,
    InvalidCheckpoint,
    InvalidRead,
    Overloaded,
    RefusedSettings,
    ScoringError,
    TeacherUnavailable,
    VersionMismatch,
    WrongEngineAnswer,
)
from scoring.hold import Hold
from scoring.ids import PAD
from scoring.limits import TeacherLimits
from scoring.progress import Progress, ProgressMeter
from scoring.reads import LabelRead, MatrixRead
from scoring.scores import NO_TOKEN, LabelScores, MatrixScores, ReadMeta
from scoring.self_test import check_engine
from scoring.vllm_extension.gather import asked_for
from scoring.vllm_extension.guard import refuse_unreplaced, refuse_unreplaced_options
from scoring.vllm_extension.prefix_reuse import bound_prefix_reuse
from scoring.vllm_extension.reload import CheckpointWorker
from scoring.vllm_extension.version import ENGINE_SERIES
from scoring.weights import Weights

logger = logging.getLogger(__name__)

_LOOK_S = 0.25  # how often a watched engine is looked at
_LONGEST_LOOK_S = 1.0
_CANARY_AFTER_S = 10.0
_CANARY = LabelRead([0], [0])
_SELF_TEST_TOKENS = 2048  # on a CPU: a second or two of a small teacher
_SELF_TEST_TOKENS_GPU = 1 << 17
_MOST_ADAPTERS = 1000  # that an engine remembers: far more than vLLM keeps loaded


@dataclass(frozen=True)
class EngineSettings:
    """What one engine is started with.

    Attributes:
        model: path of a Hugging Face checkpoint folder.
        weights: those to start with, where they are no longer the model's own; the tokenizer stays the model's.
        teacher: the name its answers carry.
        dtype: of weights and activations; "auto" is what the checkpoint's config.json names.
        head_dtype: "float32" computes the output head in float32; None leaves it in the model's dtype.
        scores: "logprobs", or "logits" for raw logits in their place.
        max_candidates: largest K of a read, and largest `top_k`.
        share_head: whether the rows of all reads of a step are multiplied by the output head together (up to 1,024 at
            once, on a CPU 256), or those of each read by themselves.
        prefix_reuse: whether reads take the beginning that they share with earlier ones from vLLM's prefix cache, up to
            the first scored row. Needs prefix caching, which vLLM has on unless `engine_args` say otherwise.
        engine_args: passed through to vLLM's `AsyncEngineArgs`. What this project must fix is refused there.
    """

    model: str
    teacher: str = "default"
    dtype: str = "auto"
    head_dtype: Literal["float32"] | None = None
    scores: Literal["logprobs", "logits"] = "logprobs"
    max_candidates: int = 1024
    share_head: bool = True
    prefix_reuse: bool = True
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    weights: Weights | None = None

    @property
    def checkpoint(self) -> str:
        """The folder that the engine loads at its start."""
        return self.weights.path if self.weights else self.model


@dataclass(frozen=True)
class TeacherInfo:
    """What a teacher is and what it takes: `client.teachers()`, `GET /v1/teachers`.

    `model` is the folder that the teacher was configured with, `weights` the one that its weights come from now. With
    `prefix_reuse`, a beginning that reads share is computed once, in whole blocks of `block_size` tokens.
    """

    teacher: str
    model: str
    weights: str
    vocabulary: int
    tokenizer_size: int | None
    max_length: int
    max_candidates: int
    max_batched_tokens: int
    prefix_reuse: bool
    block_size: int
    dtype: str
    head_dtype: str
    scores: str
    engine: str
    tensor_parallel_size: int
    checkpoint: str
    tokenizer: str | None
    weight_version: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class CheckedCheckpoint(NamedTuple):
    """A checkpoint that may take the place of the one that is loaded, as it was when it was looked at."""

    checkpoint: str  # its hash
    stamp: tuple[tuple[str, int, int], ...]


class TeacherEngine:
    """One vLLM engine and the two reads it answers.

    The constructor blocks until the engine is up (seconds to minutes). One engine per process.

    Raises:
        RefusedSettings: engine arguments under which scores would be wrong.
        FileNotFoundError: `model` is no folder with weights.
        InvalidCheckpoint: the files of the settings' `weights` are not those that these were.
    """

    def __init__(self, settings: EngineSettings) -> None:
        if not str(vllm.__version__).startswith(ENGINE_SERIES):
            raise RefusedSettings(
                f"vLLM {vllm.__version__} is installed; this engine was read against {', '.join(ENGINE_SERIES)}x, and "
                "relies on details that others may change"
            )
        self.settings = settings
        self._tokenizer = tokenizer_hash(settings.model)
        self._layout: Layout | None = None  # of what is loaded; None where it is not in safetensors
        stamp = checkpoint_stamp(settings.checkpoint)  # also finds out, before anything starts, if there is one
        with contextlib.suppress(InvalidCheckpoint):
            self._layout = replace(checkpoint_layout(settings.checkpoint), tokenizer=self._tokenizer)
        self.weights = settings.weights or Weights(0, settings.model, checkpoint_hash(settings.model))
        if settings.weights:
            _check_unchanged(self.weights, checkpoint_hash(self.weights.path))
        self._hold = Hold()
        self._serial = itertools.count()
        # By serial, last used last: loaded or loading, each with its hash and the stamp of its weights.
        self._adapters: OrderedDict[int, tuple[Adapter, asyncio.Task[tuple[str, tuple[int, int]]]]] = OrderedDict()
        self._meter = ProgressMeter()
        logging.getLogger("vllm.v1.engine.async_llm").addFilter(_death_in_one_line)
        self._watch: asyncio.Task | None = None
        self._canary: asyncio.Task | None = None
        self._canary_error: ScoringError | None = None
        for params in (self._scoring_params(np.zeros((1, 1), np.int32), 0), _label_params([0])):
            refuse_unreplaced(params)  # those of all reads, but for their ids
        # The usage context chooses vLLM's defaults for steps: a server's are twice an embedded engine's.
        context = UsageContext.OPENAI_API_SERVER
        args = AsyncEngineArgs(**engine_arguments(settings))
        config = args.create_engine_config(context)
        check_config(config)
        refuse_unreplaced_options(config)
        self._prefix_reuse = settings.prefix_reuse and bool(config.cache_config.enable_prefix_caching)
        if self._prefix_reuse:
            bound_prefix_reuse(config)
        elif settings.prefix_reuse:
            logger.warning("prefix_reuse has no effect: prefix caching is off (engine_args.enable_prefix_caching)")
        self._llm = AsyncLLM.from_vllm_config(
            config,
            usage_context=context,
            stat_loggers=[lambda config, _: _StepReport(config, self._meter)],
            disable_log_stats=args.disable_log_stats,
            enable_log_requests=args.enable_log_requests,
        )
        self.limits = TeacherLimits(
            vocabulary=config.model_config.get_vocab_size(),
            tokenizer_size=_tokenizer_size(settings.model),
            max_length=config.model_config.max_model_len,
            max_candidates=settings.max_candidates,
            scores=settings.scores,
        )
        if checkpoint_stamp(settings.checkpoint) != stamp:
            self._llm.shutdown()
            raise InvalidCheckpoint(f"{settings.checkpoint} was changed while it was loaded")
        self._dtype = str(config.model_config.dtype).removeprefix("torch.")
        self._head_dtype = str(config.model_config.head_dtype).removeprefix("torch.")  # hf_overrides may name it too

    @property
    def weight_version(self) -> int:
        return self.weights.version

    def info(self) -> TeacherInfo:
        config = self._llm.vllm_config
        return TeacherInfo(
            teacher=self.settings.teacher,
            model=self.settings.model,
            weights=self.weights.path,
            vocabulary=self.limits.vocabulary,
            tokenizer_size=self.limits.tokenizer_size,
            max_length=self.limits.max_length,
            max_candidates=self.limits.max_candidates,
            max_batched_tokens=config.scheduler_config.max_num_batched_tokens,
            prefix_reuse=self._prefix_reuse,
            block_size=config.cache_config.block_size,
            dtype=self._dtype,
            head_dtype=self._head_dtype,
            scores=self.settings.scores,
            engine=f"vllm {vllm.__version__}",
            tensor_parallel_size=config.parallel_config.tensor_parallel_size,
            checkpoint=self.weights.checkpoint,
            tokenizer=self._tokenizer,
            weight_version=self.weight_version,
        )

    async def read_matrix(
        self,
        batch: MatrixBatch,
        *,
        timeout_s: float | None = None,
        trace_headers: Mapping[str, str] | None = None,
        adapters: Mapping[str, Adapter] | None = None,
        version: int | None = None,
    ) -> MatrixScores:
        """Answer a batch of matrix reads. A read that fails has its error in `errors`; the others are answered.

        Waits while weights are loaded; the weights of a batch are the same for all its reads.

        Args:
            batch: N reads. The `teacher` of each is the name its answer carries.
            timeout_s: seconds left; what is not answered by then is aborted and fails with `DeadlineExceeded`.
            trace_headers: W3C trace context, handed to vLLM (which keeps it only with an OTLP endpoint set).
            adapters: by `teacher`; a read that names none of these is the base model's.
            version: of the weights that the batch is meant for; None takes any.

        Raises:
            VersionMismatch: the weights have another version; `details["weight_version"]` is theirs.
            DeadlineExceeded: it came while weights were loaded.
        """
        async with self._by_the_same_weights(batch, timeout_s, version) as left_s:
            return await self._read_matrix(batch, timeout_s=left_s, trace_headers=trace_headers, adapters=adapters)

    async def _read_matrix(
        self,
        batch: MatrixBatch,
        *,
        timeout_s: float | None = None,
        trace_headers: Mapping[str, str] | None = None,
        adapters: Mapping[str, Adapter] | None = None,
    ) -> MatrixScores:
        seen: dict[Adapter, LoRARequest] = {}

        async def answer(i: int) -> _Answer:
            return await self._matrix(batch[i], trace_headers, await self._adapter(batch[i], adapters, seen))

        answers = await self._gather(batch.tokens(), answer, timeout_s)
        values, offsets = end_to_end([a.values.reshape(-1) for a in answers], np.float32)
        rows, row_offsets = end_to_end([a.rows for a in answers], np.int64)
        return MatrixScores(
            values=values,
            offsets=offsets,
            rows=rows,
            row_offsets=row_offsets,
            widths=np.array([a.columns.candidates for a in answers], dtype=np.int64),
            top_k=np.array([a.columns.top_k for a in answers], dtype=np.int32),
            extras=np.array([a.columns.extras for a in answers], dtype=np.int32),
            **self._columns(batch, answers, adapters or {}),
        )

    async def read_labels(
        self,
        batch: LabelBatch,
        *,
        timeout_s: float | None = None,
        trace_headers: Mapping[str, str] | None = None,
        adapters: Mapping[str, Adapter] | None = None,
        version: int | None = None,
    ) -> LabelScores:
        """Answer a batch of label reads; arguments, failures and errors as for `read_matrix`."""
        async with self._by_the_same_weights(batch, timeout_s, version) as left_s:
            return await self._read_labels(batch, timeout_s=left_s, trace_headers=trace_headers, adapters=adapters)

    async def _read_labels(
        self,
        batch: LabelBatch,
        *,
        timeout_s: float | None = None,
        trace_headers: Mapping[str, str] | None = None,
        adapters: Mapping[str, Adapter] | None = None,
    ) -> LabelScores:
        seen: dict[Adapter, LoRARequest] = {}

        async def answer(i: int) -> _Answer:
            return await self._label(batch[i], trace_headers, await self._adapter(batch[i], adapters, seen))

        answers = await self._gather(batch.tokens(), answer, timeout_s)
        values, offsets = end_to_end([a.values.reshape(-1) for a in answers], np.float32)
        return LabelScores(
            values=values,
            offsets=offsets,
            **self._columns(batch, answers, adapters or {}),
        )

    async def adapter_checkpoint(self, adapter: Adapter) -> str:
        """What answers of this adapter have as their `checkpoint`. Loads nothing.

        Raises:
            InvalidAdapter: its folder holds no weights.
        """
        if not (name := self._adapter_hash(adapter)):
            try:
                name = await asyncio.to_thread(checkpoint_hash, adapter.path)
            except OSError as error:
                raise InvalidAdapter(f"{adapter.path} cannot be read: {error}") from error
        return f"{self.weights.checkpoint}+{name}"

    async def check_weights(self, path: str) -> CheckedCheckpoint:
        """Whether the weights in a folder can take the place of those that are loaded. Reads no weights, but samples.

        Raises:
            InvalidCheckpoint: they cannot. Says what differs.
        """
        if self._layout is None:
            raise InvalidCheckpoint(
                f"the weights of teacher {self.settings.teacher!r} cannot be replaced: {self.weights.path} holds none "
                "in safetensors"
            )
        return await asyncio.to_thread(_check_checkpoint, path, self._layout)

    async def hold(self) -> None:
        """Wait for the reads under way to end, and let others wait from now on, until `release`. Call that too where
        this is cancelled."""
        await self._hold.close()
        self._meter.suspend()

    async def load_weights(self, weights: Weights, checked: CheckedCheckpoint) -> None:
        """Load weights in the place of those that are loaded, and ask the self-test's reads. Needs a `hold`.

        When it fails, what the engine has loaded is not known, and it must not answer any more.

        Args:
            weights: what they are from now on.
            checked: what `check_weights` said of their folder.

        Raises:
            InvalidCheckpoint: the folder is not as it was when it was checked.
            SelfTestFailed: the engine contradicts itself.
            ScoringError: anything else that went wrong.
        """
        with _vllm_errors():
            await self._llm.pause_generation(mode="wait")  # the reads that were aborted are still on their way out
            await self._llm.collective_rpc(CheckpointWorker.load_checkpoint.__name__, args=(weights.path,))
            if await asyncio.to_thread(checkpoint_stamp, weights.path) != checked.stamp:
                raise InvalidCheckpoint(f"{weights.path} was changed while it was loaded")
            if not await self._llm.reset_prefix_cache():
                raise WrongEngineAnswer(
                    "the engine would not empty its prefix cache, which the old weights have filled"
                )
            await self._llm.update_weight_version(str(weights.version))
            await self._llm.resume_generation()
        self.weights = weights
        await self.self_test()

    def release(self) -> None:
        """Let the reads that wait pass, and those that come."""
        self._meter.resume()
        self._hold.open()

    async def self_test(self) -> None:
        """Ask the engine a few reads that must agree, before anybody else does: see `scoring.self_test`.

        They also tell how long a full step may take, which is how long the engine may be silent.

        Raises:
            SelfTestFailed: they do not; the engine must not serve.
        """
        scheduler = self._llm.vllm_config.scheduler_config
        step, threshold = scheduler.max_num_batched_tokens, scheduler.long_prefill_token_threshold
        seconds_per_token = await check_engine(
            SimpleNamespace(limits=self.limits, read_matrix=self._read_matrix, read_labels=self._read_labels),
            chunk=min(step, threshold or step),
            budget=_SELF_TEST_TOKENS if current_platform.is_cpu() else _SELF_TEST_TOKENS_GPU,
            float32=self._dtype == "float32",
        )
        self._meter.expect_step(step * seconds_per_token)

    def watch(self) -> None:
        """Look at the engine's progress from now on, and ask it a label read now and then while it is idle.

        Call it in the event loop that its reads run in. Ends with `shutdown`.
        """
        self._watch = asyncio.create_task(self._look())

    def progress(self) -> Progress:
        """The engine's steps and its outstanding work, now."""
        return self._meter.now()

    async def check_health(self) -> None:
        """The verdict of now; asks the engine nothing and never waits.

        Raises:
            EngineDead: the engine's process is gone, or work is outstanding and no step has come for too long.
            ScoringError: what the last canary read failed with.
        """
        with _vllm_errors():
            await self._llm.check_health()
        if self.stalled:
            progress = self._meter.now()
            raise EngineDead(
                f"the engine has made no step for {progress.since_last_step_s:.1f} s while "
                f"{progress.outstanding_reads} reads are outstanding; after {self._meter.bound_s:.1f} s it counts as "
                f"dead (the longest step took {progress.longest_step_s:.1f} s)"
            )
        if self._canary_error is not None:
            raise self._canary_error

    @property
    def dead(self) -> bool:
        """Whether the engine's process is gone for good."""
        return self._llm.errored

    @property
    def stalled(self) -> bool:
        """Whether a watched engine has work and makes no steps: it hangs, or one of its processes is stopped."""
        return self._meter.stalled

    def shutdown(self) -> None:
        """End the engine's processes. Does not wait for reads under way: stop admitting first.

        On a CPU they hold nothing that must be put away, and by themselves they would take 10 s: they are ended.
        """
        if self._watch is not None:
            self._watch.cancel()
        self._llm.shutdown(timeout=0.5 if current_platform.is_cpu() else None)

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            self._meter.look(_LONGEST_LOOK_S)
            progress = self._meter.now()
            idle = not progress.outstanding_reads and progress.since_last_step_s > _CANARY_AFTER_S
            # A canary is outstanding itself, so there is one at a time.
            if idle and not self.dead and not self._hold.closed:
                self._canary = asyncio.create_task(self._read_canary())

    async def _read_canary(self) -> None:
        """One label read of an idle engine, which finds out that it hangs before a caller does.

        By its deadline the engine has long counted as stalled, if it makes no steps.
        """
        no_tokens = np.zeros(1, np.int64)  # it is nobody's, so that it never stands in a caller's way
        await self._hold.enter()
        try:
            patience_s = 2 * self._meter.bound_s
            (answer,) = await self._gather(no_tokens, lambda i: self._label(_CANARY, None, None), patience_s)
        finally:
            self._hold.leave()
        self._canary_error = answer.error

    @contextlib.asynccontextmanager
    async def _by_the_same_weights(
        self, batch: MatrixBatch | LabelBatch, timeout_s: float | None, version: int | None
    ) -> AsyncIterator[float | None]:
        """Meanwhile no weights are loaded; waits where they are. Gives the seconds that are left.

        Nothing is awaited unless it waits, and then the batch counts as outstanding.

        Args:
            version: of the weights; None takes any.
        """
        started = asyncio.get_running_loop().time()
        if self._hold.closed:
            settle = self._meter.take(int(batch.tokens().sum()))
            try:
                async with asyncio.timeout(timeout_s):
                    await self._hold.enter()
            except TimeoutError:
                raise DeadlineExceeded("weights were loaded, and its deadline (timeout_s) came meanwhile") from None
            finally:
                settle()
        else:
            await self._hold.enter()
        try:
            if version not in (None, self.weight_version):
                raise VersionMismatch(
                    f"is meant for weight version {version}; teacher {self.settings.teacher!r} serves version "
                    f"{self.weight_version}",
                    weight_version=self.weight_version,
                )
            waited = asyncio.get_running_loop().time() - started
            yield None if timeout_s is None else max(timeout_s - waited, 0.0)
        finally:
            self._hold.leave()

    async def _gather(
        self, costs: np.ndarray, answer: Callable[[int], Awaitable[_Answer]], timeout_s: float | None
    ) -> list[_Answer]:
        """All answers at once, each failure an `_Answer` of its own; cancelled as a whole when the caller is.

        Read i counts with `costs[i]` tokens as outstanding until its answer is there, from before anything is awaited.
        """

        async def one(i: int) -> _Answer:
            try:
                async with asyncio.timeout_at(deadline):
                    return await answer(i)
            except TimeoutError:
                return _failure(
                    DeadlineExceeded("not answered by its deadline (timeout_s); its work is aborted", read=i)
                )
            except ScoringError as error:
                return _failure(error.at(i))
            except Exception as error:
                logger.exception("a read failed unexpectedly")
                what = f"the engine failed on it ({type(error).__name__}); the log of its replica says why"
                return _failure(WrongEngineAnswer(what, read=i))

        deadline = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(i)) for i in range(len(costs))]
            for task, tokens in zip(tasks, costs.tolist(), strict=True):
                # Not in `one`: a task that is cancelled before it begins never runs.
                task.add_done_callback(self._meter.take(tokens))
        return [task.result() for task in tasks]

    async def _adapter(
        self, read: MatrixRead | LabelRead, adapters: Mapping[str, Adapter] | None, seen: dict[Adapter, LoRARequest]
    ) -> LoRARequest | None:
        """The adapter that answers a read, loaded; None for the base model.

        Args:
            read: the read.
            adapters: by `teacher`.
            seen: those that this call has found loaded and unchanged.

        Raises:
            InvalidAdapter: the engine could not apply it exactly, or takes none.
        """
        adapter = (adapters or {}).get(read.teacher)
        if adapter is None or adapter in seen:
            return seen.get(adapter)
        _, stamp = await self._loaded(adapter)
        # vLLM loads it again whenever others have taken its place, and would then answer with what lies there.
        if adapter not in seen and weights_stamp(adapter.path) != stamp:
            raise InvalidAdapter(f"{adapter.path} has changed since it was loaded: add it anew (add_adapter)")
        return seen.setdefault(adapter, _lora_request(adapter))

    async def _loaded(self, adapter: Adapter) -> tuple[str, tuple[int, int]]:
        """The hash of an adapter, and the stamp of its weights; loads it where that has not been done.

        Raises:
            InvalidAdapter: the engine could not apply it exactly, or takes none; or another has its serial.
        """
        known, loading = self._adapters.get(adapter.serial, (adapter, None))
        if known != adapter:  # vLLM knows adapters by their numbers, and would answer with the other one
            raise InvalidAdapter(
                f"{adapter.path} has the serial {adapter.serial}, under which this engine knows {known.path} (two "
                "ingresses gave it at once, during a redeploy): add it anew (add_adapter)"
            )
        if loading is None:
            loading = asyncio.create_task(self._load(adapter))
            self._adapters[adapter.serial] = adapter, loading
            if len(self._adapters) > _MOST_ADAPTERS:
                self._adapters.popitem(last=False)
        try:
            loaded = await asyncio.shield(loading)
        except Exception:
            self._adapters.pop(adapter.serial, None)  # mended, it may be asked for again
            raise
        if adapter.serial in self._adapters:
            self._adapters.move_to_end(adapter.serial)
        return loaded

    def _adapter_hash(self, adapter: Adapter) -> str | None:
        """The hash of an adapter that is loaded."""
        known, loading = self._adapters.get(adapter.serial, (None, None))
        return loading.result()[0] if known == adapter and loading.done() and not loading.exception() else None

    async def _load(self, adapter: Adapter) -> tuple[str, tuple[int, int]]:
        """Load an adapter before a step needs it: there, a failure would end the engine.

        Returns its hash, and the stamp that its weights had before.
        """
        lora = self._llm.vllm_config.lora_config
        if lora is None:
            raise InvalidAdapter(
                f"teacher {self.settings.teacher!r} takes no adapters: set enable_lora in its engine_args"
            )
        await asyncio.to_thread(check_adapter, adapter.path, lora.max_lora_rank, lora.target_modules)
        stamp = weights_stamp(adapter.path)
        try:
            await self._llm.add_lora(_lora_request(adapter))
        except Exception as error:
            raise InvalidAdapter(f"vLLM cannot load {adapter.path}: {error}") from error
        return await asyncio.to_thread(checkpoint_hash, adapter.path), stamp

    async def _matrix(
        self, read: MatrixRead, trace_headers: Mapping[str, str] | None, adapter: LoRARequest | None
    ) -> _Answer:
        self.limits.check_matrix(read)
        self._check_version(read)
        beyond = self.limits.ids_beyond_tokenizer(
            read.prompt_ids, read.response_ids, *(() if read.candidate_ids is None else (read.candidate_ids,))
        )
        rows = np.arange(len(read.response_ids), dtype=np.int64) if read.rows is None else read.rows
        columns = read.columns
        if not len(rows):  # vLLM cannot express zero rows
            return _Answer(np.zeros((0, columns.width), np.float32), rows, 0, 0, beyond, columns=columns)
        first, last = int(rows.min()), int(rows.max())
        ids = self._ids_to_gather(read, columns, rows, first, last)
        # Tokens after the last row asked for cannot change it (the model is causal), so they are not sent.
        sequence = np.concatenate([read.prompt_ids, read.response_ids[: last + 1]]).tolist()
        start = len(read.prompt_ids) - 1 + first
        asked = {"priority": read.priority, "trace_headers": trace_headers, "adapter": adapter}
        extra_args = asked_for(columns, self.settings.share_head)
        skip = not self._prefix_reuse
        params = self._scoring_params(ids, start, extra_args=extra_args, skip_reading_prefix_cache=skip)
        output = await self._generate(sequence, params, **asked)
        if output.prompt_token_id_logprobs is None:
            # vLLM drops the scores of a prefill that began after `start`: a prefix cache hit that was not bounded.
            logger.warning("vLLM returned no scores for a read; asking again without its prefix cache")
            params = self._scoring_params(ids, start, extra_args=extra_args, skip_reading_prefix_cache=True)
            output = await self._generate(sequence, params, **asked)
        values = check_matrix_answer(output.prompt_token_id_logprobs, ids, columns)
        self._check_prompt(output, len(sequence))
        return _Answer(
            values[rows - first],
            rows,
            len(sequence),
            output.num_cached_tokens or 0,
            beyond,
            _next_token(output),
            columns=columns,
        )

    def _ids_to_gather(self, read: MatrixRead, columns: Columns, rows: np.ndarray, first: int, last: int) -> np.ndarray:
        """int32 [last - first + 1, 1 + K]: per row the response's own id and its candidates.

        Rows between those asked for hold pads, since the engine scores one unbroken run of rows.
        """
        ids = np.full((last - first + 1, 1 + columns.candidates), PAD, dtype=np.int32)
        ids[rows - first, columns.response_at] = read.response_ids[rows]
        if read.width:
            candidates = read.candidate_ids if read.candidate_ids.ndim == 1 else read.candidate_ids[rows]
            if read.unknown_candidates == "-inf":
                candidates = np.where(candidates < self.limits.vocabulary, candidates, PAD)
            ids[rows - first, columns.candidates_at] = candidates
        return ids

    def _scoring_params(self, ids: np.ndarray, start: int, **options: Any) -> SamplingParams:
        return SamplingParams(
            max_tokens=1,
            temperature=0.0,  # sampling costs four times as much at the default of 1.0
            prompt_logprob_token_ids=ids,
            prompt_logprob_start=start,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            **options,
        )

    async def _label(
        self, read: LabelRead, trace_headers: Mapping[str, str] | None, adapter: LoRARequest | None
    ) -> _Answer:
        self.limits.check_label(read)
        self._check_version(read)
        labels = list(dict.fromkeys(read.label_ids.tolist()))
        with _vllm_errors():
            (answer,) = await next_token_label_reads(
                _UnlessAborted(self._llm),
                [tokens_input(read.prompt_ids.tolist())],
                [_label_params(labels)],
                self._request_id("label"),
                lora_request=adapter,
                priority=read.priority,
                trace_headers=trace_headers,
            )
        self._check_prompt(answer.result, len(read.prompt_ids))
        by_id = dict(zip(labels, answer.logprobs, strict=True))
        values = check_label_answer([by_id[label] for label in read.label_ids.tolist()])
        return _Answer(
            values,
            np.zeros(0, np.int64),
            len(read.prompt_ids),
            answer.result.num_cached_tokens or 0,
            self.limits.ids_beyond_tokenizer(read.prompt_ids, read.label_ids),
            _next_token(answer.result),
        )

    async def _generate(
        self,
        sequence: list[int],
        params: SamplingParams,
        *,
        priority: int,
        trace_headers: Mapping[str, str] | None,
        adapter: LoRARequest | None,
    ) -> RequestOutput:
        """One request to its end. Cancelling it aborts the request in the engine."""
        output = None
        with _vllm_errors():
            async for answer in self._llm.generate(
                tokens_input(sequence),
                params,
                self._request_id("matrix"),
                lora_request=adapter,
                priority=priority,
                trace_headers=trace_headers,
            ):
                output = answer
        if output is None or not output.outputs:
            raise WrongEngineAnswer("the engine ended the request without an answer")
        _check_end(output.outputs[0].finish_reason)
        return output

    def _request_id(self, kind: str) -> str:
        return f"{kind}-{next(self._serial)}"

    def _check_version(self, read: MatrixRead | LabelRead) -> None:
        if read.expect_version is not None and read.expect_version != self.weight_version:
            raise VersionMismatch(
                f"expects weight version {read.expect_version}; teacher {self.settings.teacher!r} serves "
                f"version {self.weight_version}",
                field="expect_version",
            )

    def _check_prompt(self, output: RequestOutput, length: int) -> None:
        seen = len(output.prompt_token_ids or ())
        if seen != length:
            raise WrongEngineAnswer(f"the engine saw {seen} prompt tokens; {length} were sent")

    def _columns(
        self, batch: MatrixBatch | LabelBatch, answers: list[_Answer], adapters: Mapping[str, Adapter]
    ) -> dict[str, Any]:
        """The columns of an answer with one entry per read, and where its numbers come from, per teacher asked."""
        return {
            "prompt_tokens": np.array([a.prompt_tokens for a in answers], dtype=np.int32),
            "cached_tokens": np.array([a.cached_tokens for a in answers], dtype=np.int32),
            "ids_beyond_tokenizer": np.array([a.beyond for a in answers], dtype=np.int32),
            "next_token": np.array([a.next_token for a in answers], dtype=np.int32),
            "meta_index": np.where([bool(a.error) for a in answers], -1, batch.teacher_index).astype(np.int32),
            "metas": tuple(self._meta(name, adapters.get(name)) for name in batch.teachers),
            "errors": {i: a.error for i, a in enumerate(answers) if a.error},
        }

    def _meta(self, teacher: str | None, adapter: Adapter | None) -> ReadMeta:
        added = self._adapter_hash(adapter) if adapter else None
        return ReadMeta(
            teacher=teacher or self.settings.teacher,
            weight_version=self.weight_version,
            checkpoint=f"{self.weights.checkpoint}+{added}" if added else self.weights.checkpoint,
            engine=f"vllm {vllm.__version__}",
            dtype=self._dtype,
            head_dtype=self._head_dtype,
            scores=self.settings.scores,
            tensor_parallel_size=self._llm.vllm_config.parallel_config.tensor_parallel_size,
        )


def _check_checkpoint(path: str, loaded: Layout) -> CheckedCheckpoint:
    if not Path(path).is_absolute():
        raise InvalidCheckpoint(f"{path} is no absolute path; it is opened on every node")
    try:
        stamp = checkpoint_stamp(path)
        name = checkpoint_hash(path)
    except OSError as error:
        raise InvalidCheckpoint(f"{path} cannot be read: {error}") from error
    if found := differences(loaded, checkpoint_layout(path)):
        raise InvalidCheckpoint(
            f"the weights in {path} cannot take the place of those that are loaded; {'; '.join(found)}",
            differences=found,
        )
    return CheckedCheckpoint(name, stamp)


def _check_unchanged(weights: Weights, found: str) -> None:
    if found != weights.checkpoint:
        raise InvalidCheckpoint(
            f"{weights.path} holds checkpoint {found}, where version {weights.version} of the weights was "
            f"{weights.checkpoint}; a folder must stay as it is for as long as it is served (update_weights takes it "
            "anew)"
        )


_NOTHING = Columns(0)


@dataclass(frozen=True, slots=True)
class _Answer:
    """The engine's answer to one read, or why there is none."""

    values: np.ndarray  # float32 [n, columns.width], or [L]
    rows: np.ndarray  # int64 [n]
    prompt_tokens: int
    cached_tokens: int
    beyond: int
    next_token: int = NO_TOKEN
    columns: Columns = _NOTHING  # of a matrix read
    error: ScoringError | None = None


def _next_token(output: RequestOutput) -> int:
    """The token the engine made at the end; it makes one with every read."""
    return output.outputs[0].token_ids[0]


def _failure(error: ScoringError) -> _Answer:
    return _Answer(np.zeros((0, 1), np.float32), np.zeros(0, np.int64), 0, 0, 0, error=error)


def _label_params(labels: list[int]) -> SamplingParams:
    return SamplingParams(
        max_tokens=1,
        temperature=0.0,
        logprob_token_ids=labels,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _lora_request(adapter: Adapter) -> LoRARequest:
    return LoRARequest(f"{adapter.path}@{adapter.serial}", adapter.serial, adapter.path)


def engine_arguments(settings: EngineSettings) -> dict[str, Any]:
    """The keyword arguments of `AsyncEngineArgs` for these settings.

    Raises:
        RefusedSettings: `engine_args` names what this project must fix, or what makes scores wrong.
    """
    given = dict(settings.engine_args)
    for name, why in _REFUSED.items():
        if given.get(name) not in (None, False):
            raise RefusedSettings(f"engine_args.{name} = {given[name]!r} is refused: {why}")
    if given.get("data_parallel_size", 1) != 1:
        raise RefusedSettings(
            f"engine_args.data_parallel_size = {given['data_parallel_size']} is refused: replicas are Ray Serve's "
            "(the teacher's setting num_replicas)"
        )
    if settings.max_candidates < 1:
        raise RefusedSettings(f"max_candidates is {settings.max_candidates}; at least 1 is needed")
    overrides = given.pop("hf_overrides", None) or {}
    if settings.head_dtype is not None:
        if not isinstance(overrides, Mapping):
            raise RefusedSettings("engine_args.hf_overrides must be a mapping beside head_dtype")
        overrides = {**overrides, "head_dtype": settings.head_dtype}
    defaults = {"scheduling_policy": "priority", "skip_tokenizer_init": True}
    if settings.weights:
        defaults["tokenizer"] = settings.model
    if current_platform.is_cpu():
        # Eager with an explicit KV cache starts without warm-up; blocks of 32 are the CPU minimum and the fastest.
        defaults |= {"enforce_eager": True, "block_size": 32, "kv_cache_memory_bytes": 1 << 30}
    if given.get("enable_lora"):
        # Left to itself vLLM wraps the head too, and takes the rows of a matrix there for the requests of the step.
        defaults["lora_target_modules"] = list(_LORA_MODULES)
    return {
        **defaults,
        **given,
        "model": settings.checkpoint,
        "worker_extension_cls": f"{CheckpointWorker.__module__}.{CheckpointWorker.__qualname__}",
        "dtype": checkpoint_dtype(settings.model) if settings.dtype == "auto" else settings.dtype,
        "hf_overrides": overrides,
        "max_logprobs": settings.max_candidates + 1,  # the response's own token is one more column
        "logprobs_mode": "raw_logits" if settings.scores == "logits" else "raw_logprobs",
        "generation_config": "vllm",  # a checkpoint's sampling defaults have no say in scores
    }


_LORA_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

_REFUSED = {
    "model": "it is the teacher's own setting model",
    "dtype": "it is the teacher's own setting dtype",
    "worker_extension_cls": "it is how this project's workers load other weights",
    "max_logprobs": "it follows from the teacher's setting max_candidates",
    "logprobs_mode": "it follows from the teacher's setting scores (logprobs or logits)",
    "generation_config": "a checkpoint's sampling defaults must not touch scores",
    "speculative_config": "speculative decoding breaks label reads",
    "kv_transfer_config": "KV connectors are not covered: what they bring is not bounded by the first scored row",
    "kv_sharing_fast_prefill": "it makes the scores of prompt tokens wrong",
}


def check_config(config: VllmConfig) -> None:
    """Refuse what makes scores wrong and came in by another way than `engine_args`: an option that implies it, or the
    environment.

    Raises:
        RefusedSettings: naming all of it.
    """
    size = config.parallel_config.data_parallel_size
    mode = config.model_config.logprobs_mode
    found = {
        "the V1 model runner (VLLM_USE_V2_MODEL_RUNNER): the matrix read exists in V2 only": (
            not config.use_v2_model_runner
        ),
        f"data_parallel_size = {size} (VLLM_DP_SIZE): replicas are Ray Serve's (the teacher's setting num_replicas)": (
            size != 1
        ),
        f"speculative_config: {_REFUSED['speculative_config']}": config.speculative_config is not None,
        f"kv_transfer_config (kv_offloading_size sets it): {_REFUSED['kv_transfer_config']}": (
            config.kv_transfer_config is not None
        ),
        f"logprobs_mode = {mode!r}: {_REFUSED['logprobs_mode']}": mode not in ("raw_logprobs", "raw_logits"),
    }
    refused = [what for what, there in found.items() if there]
    if refused:
        raise RefusedSettings(f"the engine would run with {'; with '.join(refused)}")


def check_matrix_answer(values: Any, ids: np.ndarray, columns: Columns) -> np.ndarray:
    """`values` when it is the answer to `ids` (int32 [rows, 1 + K]): float32 [rows, columns.width], without NaN.

    Raises:
        WrongEngineAnswer: it is anything else. Nothing is padded, cut or replaced.
    """
    if values is None:
        raise WrongEngineAnswer("the engine returned no scores, also without its prefix cache")
    if not isinstance(values, np.ndarray) or values.dtype != np.float32:
        raise WrongEngineAnswer(
            f"the engine returned {getattr(values, 'dtype', type(values).__name__)} scores; float32 is due"
        )
    due = (len(ids), columns.width)
    if values.shape != due:
        plain = " (vLLM's own gather has answered: the plugin teacher_scoring must run in all of vLLM's processes)"
        raise WrongEngineAnswer(
            f"the engine returned scores of shape {list(values.shape)}; {list(due)} is due"
            f"{plain if values.shape == ids.shape else ''}"
        )
    if np.isnan(values).any():
        row, column = (int(i) for i in np.argwhere(np.isnan(values))[0])
        raise WrongEngineAnswer(f"the engine returned NaN at row {row} {columns.name_of(column)}")
    return values


def check_label_answer(values: list[float]) -> np.ndarray:
    """The labels' scores as float32 [L].

    Raises:
        WrongEngineAnswer: a NaN among them.
    """
    scores = np.array(values, dtype=np.float32)
    if np.isnan(scores).any():
        raise WrongEngineAnswer(f"the engine returned NaN for label {int(np.flatnonzero(np.isnan(scores))[0])}")
    return scores


class _StepReport(StatLoggerBase):
    """Tells a meter of every step: vLLM reports the scheduler's state to its stat loggers after each, with output or
    without."""

    def __init__(self, vllm_config: VllmConfig, meter: ProgressMeter) -> None:
        self._meter = meter

    def record(self, scheduler_stats: Any, iteration_stats: Any, **others: Any) -> None:
        if scheduler_stats is not None:
            self._meter.step()

    def log_engine_initialized(self) -> None:
        pass


class _UnlessAborted:
    """vLLM's client as its label reads use it. They miss the logprobs of an aborted request and cannot say why they
    are missing, so it is looked at before they are."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm

    async def generate(self, *args: Any, **options: Any) -> AsyncGenerator[RequestOutput, None]:
        async with contextlib.aclosing(self._llm.generate(*args, **options)) as outputs:
            async for output in outputs:
                if output.finished and output.outputs:
                    _check_end(output.outputs[0].finish_reason)
                yield output


def _check_end(reason: str | None) -> None:
    """Raise unless a request ended by itself. An aborted one carries no scores, which is no fault of the read."""
    if reason == "abort":
        raise TeacherUnavailable("the engine aborted the read: it is shutting down or its weights are being replaced")
    if reason not in ("length", "stop"):
        raise WrongEngineAnswer(f"the engine ended the read with {reason!r}")


def _tokenizer_size(model: str) -> int | None:
    """Number of ids the checkpoint's tokenizer knows; None when it ships none."""
    if tokenizer_hash(model) is None:
        return None
    from transformers import AutoTokenizer

    return len(AutoTokenizer.from_pretrained(model, local_files_only=True))


def _death_in_one_line(record: logging.LogRecord) -> bool:
    """The engine's own process logs why it died; a traceback of this one, which only hears of it, says nothing."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, EngineDeadError):
        record.msg, record.args, record.exc_info = f"{record.getMessage()} {error}", (), None
    return True


@contextlib.contextmanager
def _vllm_errors():
    """vLLM's exceptions as this project's. 0.32 and 0.33 name some of them differently, so they go by kind."""
    try:
        yield
    except (ScoringError, TimeoutError):
        raise
    except EngineDeadError as error:
        raise EngineDead("the engine's process has died") from error
    except (GracefulHTTPError, RetryableRequestError) as error:  # its queue is full, or it is paused
        raise Overloaded(f"the engine takes no reads for now: {error}", retry_after_s=1.0) from error
    except VLLMClientError as error:  # a bound of vLLM's that ours did not foresee
        raise InvalidRead(f"vLLM refused the request: {error}") from error
    except Exception as error:
        cause = error.__cause__ or error  # vLLM wraps some in an exception without a text
        raise WrongEngineAnswer(f"vLLM failed on the request: {type(cause).__name__}: {cause}") from error
