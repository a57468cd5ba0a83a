"""The life of one replica, without Serve around it: admission, health, and its end."""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncIterator, Iterator

import psutil
import pytest

import deployments.teacher
from deployments.teacher import Teacher, _without_traceback
from scoring import LabelBatch, LabelRead, MatrixBatch, MatrixRead
from scoring.errors import (
    DeadlineExceeded,
    InvalidRead,
    Overloaded,
    SelfTestFailed,
    TeacherUnavailable,
    VersionMismatch,
)
from scoring.weights import Weights
from tests.engine_process import EngineProcess
from tests.processes import engine_cores, workers

LIMIT = 1000
PATIENCE_S = 2.0
LONG = MatrixBatch.from_reads([MatrixRead([i + 1] * 100, [7] * 100, [1, 2, 3]) for i in range(200)])  # 40,000 tokens
SHORT = MatrixBatch.from_reads([MatrixRead([1, 2, 3], [4, 5], [6])])
LABEL = LabelBatch.from_reads([LabelRead([1, 2, 3], [6])])


@contextlib.asynccontextmanager
async def hosted_teacher(config: dict) -> AsyncIterator[Teacher]:
    """A Teacher as a replica makes and unmakes it; it loses patience with its engine sooner."""
    deployments.teacher._record_of_weights = lambda: None  # there is no Ray around it
    teacher = Teacher.__new__(Teacher)
    await teacher.__init__("tiny", config)
    teacher._engine._meter.patience_s = PATIENCE_S
    try:
        yield teacher
    finally:
        teacher.__del__()


@contextlib.asynccontextmanager
async def teacher_of_a_wrong_engine(config: dict) -> AsyncIterator[Teacher]:
    """The same, of an engine that fails its self-test."""
    from scoring import self_test

    def fail(*_: object, **__: object) -> None:
        raise SelfTestFailed("the engine contradicts itself")

    self_test.compare = fail
    async with hosted_teacher(config) as teacher:
        yield teacher


@pytest.fixture(scope="module")
def start(engines, tiny_path, tmp_path_factory):
    """Starts a Teacher in a process of its own."""
    engines.close()
    config = {
        "model": str(tiny_path),
        "dtype": "float32",
        "max_outstanding_tokens": LIMIT,
        "prefix_reuse": False,  # the same reads are asked more than once, and their steps are counted
        "engine_args": {"max_model_len": 512, "max_num_batched_tokens": 64, "kv_cache_memory_bytes": 64 << 20},
    }
    core = min(os.sched_getaffinity(0))
    logs = tmp_path_factory.mktemp("teacher-logs")
    return lambda name, host=hosted_teacher: EngineProcess(config, core, logs / f"{name}.log", host)


@pytest.fixture(scope="module")
def teacher(start) -> Iterator[EngineProcess]:
    process = start("teacher")
    yield process
    process.close()


def test_the_settings_of_a_teacher_reach_its_engine(teacher):
    info = teacher.call(Teacher.info)
    assert (info["dtype"], info["max_length"], info["prefix_reuse"]) == ("float32", 512, False)
    assert info["max_outstanding_tokens"] == LIMIT


# Admission, and what is outstanding.


async def read_one_after_another(teacher: Teacher) -> list:
    """What the reads returned, the last of them with a long shard behind it, and the heartbeat after each."""
    answers = [await teacher.read_matrix(SHORT, 60), await teacher.heartbeat()]
    answers += [await teacher.read_labels(LABEL, 60), await teacher.heartbeat()]
    last = asyncio.create_task(teacher.read_matrix(SHORT, 60))
    behind = asyncio.create_task(teacher.read_matrix(LONG.select(range(4)), 60))
    await asyncio.sleep(0)
    answers += [await teacher.heartbeat(), await last]
    await behind
    return [*answers, await teacher.heartbeat()]


def test_every_answer_says_how_many_tokens_are_outstanding_and_the_heartbeat_how_the_engine_steps(teacher):
    one, after_one, two, after_two, during, three, after = teacher.call(read_one_after_another)
    assert (one[0].errors, one[1], two[0].errors, two[1]) == ({}, 0, {}, 0)
    assert set(after_one) == {"steps", "since_last_step_s", "longest_step_s", "outstanding_tokens"}
    assert after_one["outstanding_tokens"] == after_two["outstanding_tokens"] == after["outstanding_tokens"] == 0
    assert during["outstanding_tokens"] == 805
    assert 0 < three[1] <= 800
    assert after_two["steps"] > after_one["steps"] > 0
    assert after["steps"] >= after_two["steps"] + 800 // 64
    assert 0 <= after["since_last_step_s"] < 1
    assert 0 < after["longest_step_s"] < 2


async def outstanding_after(teacher: Teacher, way: str) -> tuple:
    """What a shard ended with that did not end well, and the tokens outstanding while it ran and after."""
    bad = MatrixBatch.from_reads([MatrixRead([1], [2048]), MatrixRead([1], [2])])
    task = asyncio.create_task(
        teacher.read_matrix(bad, 60) if way == "failed" else teacher.read_matrix(LONG, 0.2 if way == "late" else 60)
    )
    if way != "cancelled unbegun":
        await asyncio.sleep(0)
    during = teacher.outstanding_tokens
    if way.startswith("cancelled"):
        await asyncio.sleep(0.1 if way == "cancelled" else 0)
        task.cancel()
    try:
        ended = (await task)[0].errors
    except asyncio.CancelledError:
        ended = {}
    return ended, during, teacher.outstanding_tokens, teacher._engine.progress().outstanding_reads


@pytest.mark.parametrize(
    ("way", "error", "tokens"),
    [
        ("failed", InvalidRead, 4),
        ("late", DeadlineExceeded, 40_000),
        ("cancelled", None, 40_000),
        ("cancelled at once", None, 40_000),
        ("cancelled unbegun", None, 0),
    ],
)
def test_outstanding_tokens_return_to_zero_however_a_shard_ends(teacher, way, error, tokens):
    errors, during, after, reads = teacher.call(outstanding_after, way)
    assert {type(e) for e in errors.values()} == ({error} if error else set())
    assert (during, after, reads) == (tokens, 0, 0)


async def two_shards(teacher: Teacher, first: MatrixBatch, second: MatrixBatch) -> tuple:
    """What two shards ended with that are sent one after the other, and the second one once it is alone."""
    both = await asyncio.gather(teacher.read_matrix(first, 60), teacher.read_matrix(second, 60), return_exceptions=True)
    return (*both, await teacher.read_matrix(second, 60))


def test_a_shard_that_is_too_much_beside_others_is_refused_and_a_lone_one_never(teacher):
    large = LONG.select(range(10))  # twice the limit
    first, second, later = teacher.call(two_shards, large, SHORT)
    assert not first[0].errors
    assert type(second) is Overloaded
    assert "5 tokens beside the 2000 outstanding" in str(second)
    assert f"at most {LIMIT} (the teacher's setting max_outstanding_tokens)" in str(second)
    assert 0 < second.details["retry_after_s"] < 10
    assert second.details["outstanding_tokens"] == 2000
    assert not later[0].errors


def test_shards_up_to_the_limit_are_taken_together(teacher):
    fits = LONG.select(range(2)), LONG.select(range(2, 5))  # 400 + 600
    assert not any(scores.errors for scores, _ in teacher.call(two_shards, *fits))
    first, second, _ = teacher.call(two_shards, LONG.select(range(2)), LONG.select(range(2, 6)))
    assert not first[0].errors
    assert type(second) is Overloaded


def test_an_error_raised_on_purpose_is_logged_as_its_sentence_and_another_with_its_traceback(caplog):
    logger = logging.getLogger("a replica's")
    logger.addFilter(_without_traceback)
    for error in (Overloaded("beside others", retry_after_s=1.0), KeyError("a bug")):
        try:
            raise error
        except Exception:
            logger.exception("Request failed.")
    refused, bug = caplog.records
    assert (refused.getMessage(), refused.exc_info) == ("Request failed. Overloaded: beside others", None)
    assert bug.exc_info[0] is KeyError


async def read_while_stopping(teacher: Teacher) -> list:
    teacher._stopping = True
    try:
        return await asyncio.gather(
            teacher.read_matrix(SHORT, 60), teacher.read_labels(LABEL, 60), return_exceptions=True
        )
    finally:
        teacher._stopping = False


def test_a_replica_that_shuts_down_takes_no_more(teacher):
    assert [type(answer) for answer in teacher.call(read_while_stopping)] == [TeacherUnavailable] * 2


# Health.


async def check_health_under_load(teacher: Teacher) -> tuple[float, int]:
    """Seconds that a health check takes while 200 reads wait, and how many still wait after it."""
    task = asyncio.create_task(teacher.read_matrix(LONG, 60))
    await asyncio.sleep(0.05)
    started = time.monotonic()
    await teacher.check_health()
    seconds, waiting = time.monotonic() - started, teacher._engine.progress().outstanding_reads
    task.cancel()
    return seconds, waiting


def test_a_health_check_does_not_wait_behind_reads(teacher):
    seconds, waiting = teacher.call(check_health_under_load)
    assert seconds < 1
    assert waiting > 100


# Weights that change.


async def wait_for_weights(teacher: Teacher, path: str) -> dict:
    """What a replica says and does while weights are prepared for longer than it is patient with its engine, while the
    record is written, and when it is told to go by it; and then with the old record again."""
    old = teacher._engine.weights
    new = Weights(1, path, (await teacher.check_weights(path))["checkpoint"])
    await teacher.prepare_weights(new, 60)
    waiting = asyncio.create_task(teacher.read_matrix(SHORT, 60, version=0))
    for _ in range(3):
        await asyncio.sleep(PATIENCE_S / 2)
        assert await teacher.keep_weights(new)
    await teacher.check_health()
    held = {"done": waiting.done(), "tokens": teacher.outstanding_tokens, "info": await teacher.info()}
    deployments.teacher._record_of_weights = lambda: (new, teacher._model)
    followed = await teacher.follow_record()
    outcomes = await asyncio.gather(waiting, teacher.read_matrix(SHORT, 60, version=1), return_exceptions=True)
    info = await teacher.info()
    deployments.teacher._record_of_weights = lambda: (old, teacher._model)
    back = await teacher.follow_record()
    deployments.teacher._record_of_weights = lambda: (Weights(9, path, ""), "another model")
    unmoved = await teacher.follow_record()
    deployments.teacher._record_of_weights = lambda: None
    return {"held": held, "versions": (followed, back, unmoved), "outcomes": outcomes, "info": info, "new": new}


def test_a_replica_holds_reads_while_weights_are_prepared_and_serves_what_the_record_says(teacher, other_tiny_path):
    found = teacher.call(wait_for_weights, str(other_tiny_path))
    held, (old, after) = found["held"], found["outcomes"]
    assert (held["done"], held["tokens"]) == (False, 5)
    assert held["info"]["weight_version"] == 0  # nobody is answered by the new ones yet
    assert held["info"]["checkpoint"] != found["new"].checkpoint and held["info"]["weights"] == held["info"]["model"]
    assert found["versions"] == (1, 0, 0)
    assert type(old) is VersionMismatch and old.details == {"weight_version": 1}
    assert not after[0].errors and after[0][0].meta.weight_version == 1
    info = found["info"]
    assert (info["weight_version"], info["weights"]) == (1, str(other_tiny_path))
    assert info["checkpoint"] == found["new"].checkpoint == after[0][0].meta.checkpoint


async def ask_for_newer_weights(teacher: Teacher, path: str) -> tuple:
    """What a shard that is meant for weights of which only the record tells gets, and the version some time after."""
    checkpoint = (await teacher.check_weights(path))["checkpoint"]
    old = teacher._engine.weights
    deployments.teacher._record_of_weights = lambda: (Weights(1, path, checkpoint), teacher._model)
    outcome = (await asyncio.gather(teacher.read_labels(LABEL, 60, version=1), return_exceptions=True))[0]
    await asyncio.sleep(0.7)
    version = (await teacher.info())["weight_version"]
    deployments.teacher._record_of_weights = lambda: (old, teacher._model)
    await teacher.follow_record()
    deployments.teacher._record_of_weights = lambda: None
    return outcome, version


def test_a_replica_that_hears_of_newer_weights_loads_them(teacher, other_tiny_path):
    outcome, version = teacher.call(ask_for_newer_weights, str(other_tiny_path))
    assert type(outcome) is VersionMismatch and outcome.details == {"weight_version": 0}
    assert version == 1


# Its end.


async def stop_the_worker_under_load(teacher: Teacher) -> None:
    (worker,) = workers(psutil.Process())
    steps = teacher._engine.progress().steps
    teacher.under_way = asyncio.create_task(teacher.read_matrix(LONG, 60))
    while teacher._engine.progress().steps == steps:
        await asyncio.sleep(0.001)
    worker.suspend()
    assert teacher.outstanding_tokens


def test_a_replica_whose_engine_hangs_ends_with_all_processes_of_the_engine(start):
    process = start("hangs")
    try:
        process.call(stop_the_worker_under_load)
        stopped = time.monotonic()
        engine = process._tree[1:]
        host = process._tree[0]
        assert {*engine_cores(host), *workers(host)} <= set(engine)
        assert process._process.wait(PATIENCE_S + 5) == 1
        assert time.monotonic() - stopped > PATIENCE_S - 0.5
        _, left = psutil.wait_procs(engine, timeout=5)
        assert not left
        assert "makes no steps; the replica leaves" in process.log.read_text()
    finally:
        process.close()


def test_a_replica_whose_engine_fails_its_self_test_does_not_come_up_and_leaves_nothing(start):
    process = start("wrong", teacher_of_a_wrong_engine)
    with pytest.raises(SelfTestFailed, match="contradicts itself"):
        process.wait_until_up()
    process.close()  # finds out whether processes are left
