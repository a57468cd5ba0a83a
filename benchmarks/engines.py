"""Level a: one engine in a process of its own, bound to one core, beside what else gives the same scores there."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import numpy as np

from benchmarks import hugging_face
from benchmarks.hugging_face import HuggingFace
from benchmarks.rows import Result, Row, Way, take_turns
from benchmarks.setup import Setup
from benchmarks.workloads import Reads, as_array
from scoring.batches import MatrixBatch
from scoring.reads import MatrixRead
from tests.engine_process import EngineProcess

TOKENS, WIDTH = 256, 16
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


class EngineStage:
    """The rows of level a for one teacher."""

    def __init__(self, teacher: str, **due: float) -> None:
        self.teacher = teacher
        self._due = due
        self.rows = tuple(self._rows())

    def _rows(self) -> Iterator[Row]:
        workload = f"64 x {TOKENS} tokens, K = {WIDTH}, {self.teacher}"
        for name, against in (
            ("v1", f"vLLM V1, prompt_logprobs={_V1_TOP}"),
            ("hf", "Hugging Face, forward and gather, its best batch"),
            ("floor", "independent floor: transformers' body, chunked head, log-sum-exp"),
        ):
            yield Row(f"{name}-{self.teacher}", "a", "TeacherEngine", against, workload, self._due[name])
        for name, what in (("extras", "tail and entropy"), ("top", "top_k=32"), ("all", "tail, entropy and top_k=32")):
            if name in self._due:
                workload = f"16 x {TOKENS} tokens, K = {WIDTH}, {self.teacher}"
                yield Row(f"{name}-{self.teacher}", "a", f"matrix read with {what}", "plain", workload, self._due[name])

    def measure(self, setup: Setup, wanted: set[str]) -> Iterator[Result]:
        teacher, core = setup.teachers[self.teacher], setup.cores[0]
        beside = {row.name.split("-")[0] for row in self.rows if row.name in wanted}
        by_name = {row.name.split("-")[0]: row for row in self.rows}
        with contextlib.ExitStack() as stack:

            def process(what: str, *host: Any) -> EngineProcess:
                settings = (teacher.model, teacher.dtype, core) if what == "hf" else teacher.settings
                started = EngineProcess(settings, core, setup.folder / f"{what}-{self.teacher}.log", *host)
                stack.callback(started.close)
                return started

            ours = process("ours")
            v1 = process("v1", hosted_v1) if "v1" in beside else None
            hf = process("hf", hugging_face.hosted_model) if beside & {"hf", "floor"} else None

            def reads(number: int, count: int) -> Reads:
                return Reads(teacher.vocabulary, count, 1, TOKENS - 1, WIDTH, number)

            count = setup.count(64, self.teacher)

            def of(number: int) -> Reads:
                return reads(number, count if number else 16)

            ways: dict[str, Way] = {"ours": lambda n: ours.call(read_matrix, of(n).batch())}
            if v1:
                ways["v1"] = lambda n: v1.call(prompt_logprobs, of(n).ids.tolist())
            best = {}
            for name, method in (("hf", HuggingFace.forward_and_gather), ("floor", HuggingFace.floor)):
                if name in beside:
                    ways[name] = _best_batch(hf, method, of, best, name)
            if len(ways) > 1:
                turns = take_turns(ways, setup.rounds, teacher.limit, setup.say)
                for name in list(ways)[1:]:
                    yield turns.result(by_name[name], "ours", name, reads=count, batch=best.get(name))

            asked = {"extras": {"extras": ("tail", "entropy")}, "top": {"top_k": 32}}
            asked["all"] = asked["extras"] | asked["top"]
            asked = {name: options for name, options in asked.items() if name in beside}
            if asked:
                if v1:
                    v1.start_closing()
                ways = {
                    name: lambda n, options=options: ours.call(read_matrix, reads(n, 16).batch(**options))
                    for name, options in {"plain": {}, **asked}.items()
                }
                turns = take_turns(ways, setup.rounds, teacher.limit, setup.say)
                for name in asked:
                    yield turns.result(by_name[name], name, "plain", reads=16)


def _best_batch(hf: EngineProcess, method: Any, of: Any, best: dict[str, int], name: str) -> Way:
    """A way that finds its batch in the round that is not counted."""

    def way(number: int) -> tuple[float, np.ndarray]:
        asked = of(number)
        if number:
            return hf.call(method, asked.ids, asked.columns, best[name])
        took = {}
        for batch in hugging_face.BATCHES * 2:
            seconds, scores = hf.call(method, asked.ids, asked.columns, batch)
            took[batch] = min(seconds, took.get(batch, seconds))
        best[name] = min(took, key=took.get)
        return took[best[name]], scores

    return way
