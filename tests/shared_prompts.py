"""Reads that share a prompt: what their answers are, and what they may take from vLLM's prefix cache.

Expected values come from Hugging Face (`tests/oracle.py`). The asynchronous functions run in the engine's process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
from transformers import PreTrainedModel
from vllm.v1.metrics.reader import get_metrics_snapshot

from scoring import LabelBatch, LabelRead, MatrixBatch, MatrixRead, MatrixScores
from scoring.engine import TeacherEngine
from tests.engine_process import EngineProcess
from tests.oracle import hf_logprobs

TINY = 3e-5  # float32 on the tiny teacher, nats


def ids(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 2048, count).tolist()


def counter(engine: TeacherEngine, name: str) -> float:
    """One of vLLM's own counters."""
    return next(metric.value for metric in get_metrics_snapshot() if metric.name == name)


async def read_watched(engine: TeacherEngine, batch: MatrixBatch, *, skip: bool | None = None) -> tuple:
    """The answer to a batch, and for each request to vLLM whether it gave scores.

    Args:
        skip: whether requests pass the prefix cache by; None leaves that to the engine.
    """
    params, generate, given = engine._scoring_params, engine._generate, []

    def chosen(columns, start, **options):
        return params(columns, start, **options | ({} if skip is None else {"skip_reading_prefix_cache": skip}))

    async def watched(*args, **options):
        output = await generate(*args, **options)
        given.append(output.prompt_token_id_logprobs is not None)
        return output

    engine._scoring_params, engine._generate = chosen, watched
    try:
        return await engine.read_matrix(batch), given
    finally:
        del engine._scoring_params, engine._generate


async def read_both(engine: TeacherEngine, matrix: MatrixBatch, labels: LabelBatch) -> tuple:
    """The answers to reads of both kinds that come at once."""
    return await asyncio.gather(engine.read_matrix(matrix), engine.read_labels(labels))


def read_of(prompt: int, response: int, seed: int, prompt_seed: int = 0) -> MatrixRead:
    """A read of its own response, and of a prompt that reads of the same `prompt_seed` share."""
    candidates = np.random.default_rng(seed + 1000).integers(0, 2048, (response, 8))
    return MatrixRead(ids(prompt, prompt_seed), ids(response, seed), candidates)


def check_scores(model: PreTrainedModel, reads: Sequence[MatrixRead], scores: MatrixScores) -> None:
    """Every score is Hugging Face's."""
    assert not scores.errors
    for read, score in zip(reads, scores, strict=True):
        first = len(read.prompt_ids) - 1
        table = hf_logprobs(model, [*read.prompt_ids.tolist(), *read.response_ids.tolist()]).numpy()[first:-1]
        wanted = np.take_along_axis(table, read.candidate_ids.astype(np.int64), 1)
        own = table[np.arange(len(read.response_ids)), read.response_ids]
        np.testing.assert_allclose(score.logprobs, wanted[score.rows], rtol=0, atol=TINY)
        np.testing.assert_allclose(score.response_logprobs, own[score.rows], rtol=0, atol=TINY)


def check_with_and_without(engine: EngineProcess, model: PreTrainedModel, count: int, seed: int) -> None:
    """Reads of one prompt that is new are right, the same without the cache bit for bit, and take from it what they
    can: at once the later ones some of it, afterwards all of them all of it."""
    reads = [read_of(150, 60 + 9 * i, seed + 1 + i, seed) for i in range(count)]
    batch = MatrixBatch.from_reads(reads)
    cold, given = engine.call(read_watched, batch)
    assert all(given)
    assert cold.cached_tokens[0] == 0
    assert (cold.cached_tokens[1:] > 0).any()
    warm, given = engine.call(read_watched, batch)
    assert all(given)
    assert warm.cached_tokens.tolist() == [128] * count  # the first row is that of token 149
    without, given = engine.call(read_watched, batch, skip=True)
    assert all(given)
    assert not without.cached_tokens.any()
    check_scores(model, reads, without)
    assert np.array_equal(cold.values, without.values)
    assert np.array_equal(warm.values, without.values)


def check_every_start(engine: EngineProcess, model: PreTrainedModel, seed: int, *, roomy: bool = True) -> None:
    """One sequence, cut into prompt and response in many places, and rows of it alone: each takes the whole blocks
    before its first row, or fewer where there is no room for all."""
    tokens = ids(200, seed)
    candidates = np.random.default_rng(seed).integers(0, 2048, (200, 8))
    starts = [0, 1, 31, 32, 33, 63, 64, 65, 95, 96, 97, 127, 128, 129, 198]
    reads = [MatrixRead(tokens[: start + 1], tokens[start + 1 :], candidates[start + 1 :]) for start in starts]
    reads += [
        MatrixRead(tokens[:40], tokens[40:], candidates[40:], rows=rows) for rows in (slice(60, 70), [159], [130, 90])
    ]
    starts += [99, 198, 129]
    engine.read_matrix(reads[:1])
    scores, given = engine.call(read_watched, MatrixBatch.from_reads(reads))
    assert all(given)
    most = np.array(starts) // 32 * 32
    assert (scores.cached_tokens == most).all() if roomy else (scores.cached_tokens <= most).all()
    assert (scores.cached_tokens > 0).sum() > 3
    check_scores(model, reads, scores)


def check_kinds(engine: EngineProcess, model: PreTrainedModel, seed: int) -> None:
    """Matrix reads and label reads of one prompt, twice: each takes what it may; a label read, all but a last token."""
    matrix = [read_of(130, 40 + i, seed + i, seed) for i in range(3)]
    labels = [LabelRead(ids(length, seed), [7, 3, 2047]) for length in (130, 129, 97)]
    for time in range(2):
        scores, answers = engine.call(read_both, MatrixBatch.from_reads(matrix), LabelBatch.from_reads(labels))
        check_scores(model, matrix, scores)
        for label, answer in zip(labels, answers, strict=True):
            wanted = hf_logprobs(model, label.prompt_ids.tolist())[-1, [7, 3, 2047]]
            np.testing.assert_allclose(answer.logprobs, wanted, rtol=0, atol=TINY)
        if time:
            assert scores.cached_tokens.tolist() == [128] * 3
            assert answers.cached_tokens.tolist() == [128, 128, 96]


def check_preemption(engine: EngineProcess, model: PreTrainedModel, seed: int) -> None:
    """Reads of one long prompt for which there is no room at once."""
    reads = [read_of(190, 210, seed + i, seed) for i in range(8)]
    before = engine.call(counter, "vllm:num_preemptions")
    scores, given = engine.call(read_watched, MatrixBatch.from_reads(reads))
    assert engine.call(counter, "vllm:num_preemptions") - before >= 4
    assert all(given)
    check_scores(model, reads, scores)
