"""Level a: one engine in a process of its own, bound to one core, beside what else gives the same scores there."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.hugging_face import BATCHES, HuggingFace, hosted_model
from benchmarks.rows import Result, Row, Way, rows_of, take_turns
from benchmarks.setup import Setup
from benchmarks.workloads import Reads, as_array
from scoring.batches import MatrixBatch
from scoring.reads import MatrixRead
from tests.engine_process import EngineProcess

TOKENS, WIDTH, MORE_READS = 256, 16, 8
_V1_TOP = 16
_serial = itertools.count()


async def read_matrix(engine: Any, batch: MatrixBatch) -> tuple[float, np.ndarray]:
    """Seconds that `TeacherEngine` takes for a batch of reads of one shape, and float32 [N, rows, 1 + K]."""
    started = time.perf_counter()
    scores = await engine.read_matrix(batch)
    took = time.perf_counter() - started
    return took, as_array(scores.raise_first())


async def bare(engine: Any, reads: Sequence[MatrixRead]) -> tuple[float, np.ndarray]:
    """The same through vLLM's own client (level b): one request a read, all at once, in the engine's process."""
    from vllm.sampling_params import SamplingParams

    def params(read: MatrixRead) -> SamplingParams:
        columns = np.column_stack([read.response_ids, read.candidate_ids])
        return SamplingParams(
            prompt_logprob_token_ids=columns, prompt_logprob_start=len(read.prompt_ids) - 1, **_one_token()
        )

    started = time.perf_counter()
    outputs = await _generate_all(
        engine._llm, ([*r.prompt_ids.tolist(), *r.response_ids.tolist()] for r in reads), map(params, reads)
    )
    took = time.perf_counter() - started
    return took, np.stack([output.prompt_token_id_logprobs for output in outputs])


@contextlib.asynccontextmanager
async def hosted_v1(settings: Any) -> AsyncIterator[Any]:
    """For `EngineProcess`: vLLM with its V1 model runner and the arguments that a teacher's engine has."""
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"  # before vLLM is imported
    from vllm import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    from scoring.engine import engine_arguments

    llm = AsyncLLM.from_engine_args(
        AsyncEngineArgs(**engine_arguments(settings)), usage_context=UsageContext.OPENAI_API_SERVER
    )
    assert not llm.vllm_config.use_v2_model_runner
    try:
        yield llm
    finally:
        llm.shutdown(timeout=0.5)


async def prompt_logprobs(llm: Any, ids: list[list[int]]) -> tuple[float, np.ndarray]:
    """Seconds for `prompt_logprobs=16` of all sequences at once; the tokens' own, float32 [N, T - 1, 1]."""
    from vllm.sampling_params import SamplingParams

    params = SamplingParams(prompt_logprobs=_V1_TOP, **_one_token())
    started = time.perf_counter()
    outputs = await _generate_all(llm, ids, itertools.repeat(params))
    took = time.perf_counter() - started
    own = [
        [place[token].logprob for token, place in zip(sequence[1:], output.prompt_logprobs[1:], strict=True)]
        for sequence, output in zip(ids, outputs, strict=True)
    ]
    return took, np.array(own, np.float32)[..., None]


def _one_token() -> dict[str, Any]:
    from vllm.sampling_params import RequestOutputKind

    return {
        "max_tokens": 1,
        "temperature": 0.0,
        "detokenize": False,
        "output_kind": RequestOutputKind.FINAL_ONLY,
    }


async def _generate_all(llm: Any, sequences: Any, params: Any) -> list[Any]:
    from vllm.inputs import tokens_input

    async def one(sequence: list[int], each: Any) -> Any:
        async for output in llm.generate(tokens_input(sequence), each, f"bench-{next(_serial)}"):
            last = output
        return last

    return await asyncio.gather(*map(one, sequences, params))


_MATRIX = f"64 x {TOKENS} tokens, K = {WIDTH}"
_MORE = f"{MORE_READS} x {TOKENS} tokens, K = {WIDTH}"
KINDS = {
    "v1": ("TeacherEngine", f"vLLM V1, prompt_logprobs={_V1_TOP}", _MATRIX),
    "hf": ("TeacherEngine", "Hugging Face, forward and gather, its best batch", _MATRIX),
    "floor": ("TeacherEngine", "a floor: transformers' body, chunked head, log-sum-exp", _MATRIX),
    "extras": ("matrix read with tail and entropy", "plain", _MORE),
    "top": ("matrix read with top_k=32", "plain", _MORE),
    "all": ("matrix read with tail, entropy, top_k=32", "plain", _MORE),
}
_BY_BATCH = {"hf": HuggingFace.forward_and_gather, "floor": HuggingFace.floor}
_EXTRAS = {"extras": ("tail", "entropy")}
_ASKED = {"extras": _EXTRAS, "top": {"top_k": 32}, "all": {**_EXTRAS, "top_k": 32}}


class EngineStage:
    """The rows of level a for one teacher.

    Args:
        due: per kind of row, the least ratio.
    """

    def __init__(self, teacher: str, **due: float) -> None:
        self.teacher = teacher
        self.rows = rows_of("a", KINDS, teacher, due)

    def measure(self, setup: Setup, rows: Mapping[str, Row]) -> Iterator[Result]:
        with self._process(setup, "engine") as engine:
            if rows.keys() & {"v1", "hf", "floor"}:
                yield from self._beside_others(setup, rows, engine)
            if rows.keys() & _ASKED.keys():
                yield from self._with_more_asked(setup, rows, engine)

    def _process(self, setup: Setup, name: str, **options: Any) -> Any:
        """A process on the measured core, as a context: a TeacherEngine's, or what `host` gives."""
        teacher, core = setup.teachers[self.teacher], setup.cores[0]
        settings = teacher.settings if name != "hf" else (teacher.model, teacher.dtype, core)
        return contextlib.closing(EngineProcess(settings, core, setup.folder / f"{name}-{self.teacher}.log", **options))

    def _beside_others(self, setup: Setup, rows: Mapping[str, Row], engine: EngineProcess) -> Iterator[Result]:
        teacher, count = setup.teachers[self.teacher], setup.count(64, self.teacher)

        def reads(number: int) -> Reads:
            return Reads(teacher.vocabulary, count if number else 16, 1, TOKENS - 1, WIDTH, number)

        ways: dict[str, Way] = {"engine": lambda n: engine.call(read_matrix, reads(n).batch())}
        batches: dict[str, int] = {}
        with contextlib.ExitStack() as processes:
            if "v1" in rows:
                v1 = processes.enter_context(self._process(setup, "v1", host=hosted_v1))
                ways["v1"] = lambda n: v1.call(prompt_logprobs, reads(n).ids.tolist())
            if rows.keys() & _BY_BATCH.keys():
                hf = processes.enter_context(self._process(setup, "hf", host=hosted_model))
                for kind in [kind for kind in _BY_BATCH if kind in rows]:
                    ways[kind] = in_its_best_batch(hf, _BY_BATCH[kind], reads, batches, kind)
            turns = take_turns(ways, setup.rounds, teacher.limit)
        for kind in list(ways)[1:]:
            yield turns.result(rows[kind], "engine", kind, reads=count, batch=batches.get(kind))

    def _with_more_asked(self, setup: Setup, rows: Mapping[str, Row], engine: EngineProcess) -> Iterator[Result]:
        teacher = setup.teachers[self.teacher]

        def way(options: dict[str, Any]) -> Way:
            def ask(number: int) -> tuple[float, np.ndarray]:
                reads = Reads(teacher.vocabulary, MORE_READS, 1, TOKENS - 1, WIDTH, number)
                return engine.call(read_matrix, reads.batch(**options))

            return ask

        ways = {"plain": way({})} | {kind: way(_ASKED[kind]) for kind in _ASKED if kind in rows}
        turns = take_turns(ways, setup.rounds, teacher.limit)
        for kind in list(ways)[1:]:
            yield turns.result(rows[kind], kind, "plain")


def in_its_best_batch(
    hf: EngineProcess, method: Callable[..., Any], reads: Callable[[int], Reads], batches: dict[str, int], kind: str
) -> Way:
    """A way that finds its batch, and puts it into `batches[kind]`, in the round that is not counted."""

    def way(number: int) -> tuple[float, np.ndarray]:
        asked = reads(number)
        if number == 0:
            hf.call(method, asked.ids[:4], asked.columns[:4], 4)
            took = [hf.call(method, asked.ids, asked.columns, batch)[0] for batch in BATCHES]
            batches[kind] = BATCHES[int(np.argmin(took))]
        return hf.call(method, asked.ids, asked.columns, batches[kind])

    return way
