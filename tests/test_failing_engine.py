"""An engine whose process dies fails its reads at once, with an error that says so, and is known to be dead."""

import asyncio
import time
from collections.abc import Callable

import psutil
import pytest

from scoring import LabelBatch, LabelRead, MatrixBatch, MatrixRead
from scoring.engine import TeacherEngine
from scoring.errors import EngineDead
from tests.processes import engine_cores, workers


@pytest.fixture(scope="module", autouse=True)
def no_dead_engine_is_left(engines):
    yield
    engines.close()


async def read_while_a_process_dies(engine: TeacherEngine, which: Callable, batch: MatrixBatch) -> tuple:
    """The answer to reads during which that process of the engine is killed, and after how many seconds."""
    task = asyncio.create_task(engine.read_matrix(batch))
    while not engine._llm.get_num_unfinished_requests():
        await asyncio.sleep(0.001)
    (victim,) = which(psutil.Process())
    started = time.monotonic()
    victim.kill()
    return await task, time.monotonic() - started


async def read_much_after(engine: TeacherEngine) -> list:
    """What 50 reads of a dead engine end with, one after the other and at once, and 10 health checks."""
    batch = MatrixBatch.from_reads([MatrixRead([5], [6])])
    one_by_one = [await engine.read_matrix(batch) for _ in range(25)]
    at_once = await asyncio.gather(*(engine.read_matrix(batch) for _ in range(25)))
    await asyncio.gather(*(engine.check_health() for _ in range(10)), return_exceptions=True)
    return [type(scores[0]) for scores in (*one_by_one, *at_once)]


async def read_after(engine: TeacherEngine) -> tuple:
    """Answers of both kinds, and whether the engine knows that it is dead."""
    matrix = await engine.read_matrix(MatrixBatch.from_reads([MatrixRead([5], [6])]))
    labels = await engine.read_labels(LabelBatch.from_reads([LabelRead([5], [6])]))
    return matrix, labels, engine.dead


@pytest.mark.parametrize(("engine", "which"), [("smollm2_bf16", engine_cores), ("smollm2_bf16_head_f32", workers)])
def test_reads_of_an_engine_that_dies_fail_with_engine_dead(engines, engine, which):
    engine = engines[engine]
    batch = MatrixBatch.from_reads([MatrixRead([i + 1] * 400, [7] * 100) for i in range(16)])
    scores, waited = engine.call(read_while_a_process_dies, which, batch)
    assert len(scores.errors) > 8
    assert {type(error) for error in scores.errors.values()} == {EngineDead}
    assert waited < 10
    *after, dead = engine.call(read_after)
    assert [type(scores[0]) for scores in after] == [EngineDead] * 2
    assert dead
    assert engine.call(read_much_after) == [EngineDead] * 50
    assert engine.log.read_text().count("Traceback (most recent call last)") <= 1
    with pytest.raises(EngineDead):
        engine.call(TeacherEngine.check_health)
