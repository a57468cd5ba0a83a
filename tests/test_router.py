"""The Router's own part: what it plans, sends again and puts back, over replicas that are stand-ins.

A replica here is a function: this machine cannot have engines that fail on command. Real ones are in
`test_application.py`.
"""

import asyncio
from collections import Counter

import numpy as np
import pytest

from deployments import membership
from deployments.router import MAX_RETRIES, Router
from scoring import LabelBatch, LabelRead, MatrixBatch, MatrixRead, MatrixScores
from scoring.errors import DeadlineExceeded, EngineDead, InvalidRead, TeacherUnavailable, UnknownTeacher
from tests.stand_in_router import StandInRouter

CATALOG = {"default": "default", "deployments": {"default": "Teacher-default", "math": "Teacher-math"}}
READS = [MatrixRead([1] * (i + 1), [i + 2, 7], [[i + 3], [8]]) for i in range(10)]


class Replicas:
    """Replicas by name. `fail[name]` is called before a replica answers, and may raise or give an answer."""

    def __init__(self, monkeypatch, *names):
        self.names, self.fail, self.calls = list(names), {}, Counter()
        monkeypatch.setattr(membership, "members", lambda handle: tuple(self.names))
        monkeypatch.setattr(Router, "_handle", lambda router, teacher: teacher)
        monkeypatch.setattr(Router, "_call", self.call)
        monkeypatch.setattr("deployments.router._FIRST_PAUSE_S", 0.001)

    async def call(self, teacher, replica, method, deadline, batch, **options):
        self.calls[replica] += 1
        await asyncio.sleep(0.001)
        if replica in self.fail:
            answer = self.fail[replica](len(batch))
            if answer is not None:
                return answer, 0
        return await getattr(StandInRouter(), method)(batch, return_exceptions=True), 0


@pytest.fixture
def replicas(monkeypatch):
    return Replicas(monkeypatch, "a", "b")


@pytest.fixture
async def router(replicas):
    router = Router("app", CATALOG)
    yield router
    assert not any(router._outstanding.values())  # the ledger is empty whatever happened


async def right(reads):
    return [score.logprobs.tolist() for score in await StandInRouter().read_matrix(reads)]


async def test_a_batch_is_answered_in_order_by_all_replicas(router, replicas):
    scores = await router.read_matrix(READS)
    assert [score.logprobs.tolist() for score in scores] == await right(READS)
    assert replicas.calls == {"a": 1, "b": 1}


async def test_single_reads_at_once_are_spread_over_the_replicas(router, replicas):
    await asyncio.gather(*(router.read_matrix([READS[0]]) for _ in range(64)))
    assert replicas.calls == {"a": 32, "b": 32}


async def test_the_default_teacher_by_name_and_by_silence_is_one_plan(router, replicas):
    reads = [MatrixRead([1], [2, 3], teacher=name) for name in (None, "default")]
    await router.read_matrix(reads)
    assert replicas.calls == {"a": 1, "b": 1}


@pytest.mark.parametrize(
    "lost",
    [
        lambda count: MatrixScores.failed(EngineDead("dead"), count),
        lambda count: (_ for _ in ()).throw(membership.ReplicaGone("gone")),
    ],
    ids=["engine", "replica"],
)
async def test_reads_lost_with_a_replica_are_answered_by_another(router, replicas, lost):
    replicas.fail["a"] = lost
    scores = await router.read_matrix(READS)
    assert [score.logprobs.tolist() for score in scores] == await right(READS)
    assert replicas.calls == {"a": 1, "b": 2}


async def test_reads_that_are_lost_again_and_again_end_in_a_typed_error(router, replicas):
    for name in replicas.names:
        replicas.fail[name] = lambda count: MatrixScores.failed(EngineDead("dead"), count)
    with pytest.raises(TeacherUnavailable, match=f"lost {1 + MAX_RETRIES} times in a row"):
        await router.read_matrix(READS)
    scores = await router.read_matrix(READS[:2], return_exceptions=True)
    assert [(type(s), s.read) for s in scores] == [(TeacherUnavailable, 0), (TeacherUnavailable, 1)]


async def test_no_replica_until_the_deadline_is_a_typed_error(router, replicas):
    replicas.names = []
    with pytest.raises(TeacherUnavailable, match="no running replica"):
        await router.read_matrix(READS, timeout_s=0.1)


async def test_a_replica_that_comes_in_time_answers(router, replicas):
    replicas.names = []
    asyncio.get_running_loop().call_later(0.1, replicas.names.append, "late")
    assert len(await router.read_matrix(READS, timeout_s=10)) == len(READS)


async def test_a_cancelled_call_leaves_the_ledger_empty(router, replicas):
    task = asyncio.create_task(router.read_matrix(READS))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_an_error_of_a_whole_shard_is_each_reads_own(router, replicas):
    def late(count):
        raise DeadlineExceeded("late")

    replicas.fail["a"] = late
    scores = await router.read_matrix(READS, return_exceptions=True)
    assert {type(s) for s in scores} == {DeadlineExceeded, type(scores[min(set(range(10)) - set(scores.errors))])}
    assert 0 < len(scores.errors) < len(READS)


async def test_an_unknown_teacher_is_looked_for_once_more_before_it_is_refused(router, replicas, monkeypatch):
    asking = Router("app")

    class Ingress:
        catalogs = [CATALOG, CATALOG | {"deployments": CATALOG["deployments"] | {"new": "Teacher-new"}}]  # noqa: RUF012
        asked = 0

        @property
        def catalog(self):
            return self

        def remote(self):
            answer = asyncio.get_running_loop().create_future()
            answer.set_result(self.catalogs[min(self.asked, 1)])
            self.asked += 1
            return answer

    asking._ingress = Ingress()
    assert await asking.names() == ("default", "math")
    assert len(await asking.read_labels([LabelRead([1], [2], teacher="new")], return_exceptions=True)) == 1
    assert asking._ingress.asked == 2
    with pytest.raises(UnknownTeacher, match="is 'newer'; the teachers are default, math, new"):
        await asking.read_labels([LabelRead([1], [2], teacher="newer")])


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan"), "5", True, 3601])
async def test_a_deadline_that_is_none_is_refused(router, timeout_s):
    with pytest.raises(InvalidRead, match="timeout_s"):
        await router.read_matrix(READS, timeout_s=timeout_s)


async def test_batches_and_lists_are_taken(router):
    assert len(await router.read_matrix(MatrixBatch.from_reads(READS))) == len(READS)
    assert len(await router.read_labels(LabelBatch.from_reads([LabelRead([1], [2])]))) == 1
    assert len(await router.read_matrix([])) == 0
    assert np.isclose((await router.read_labels([LabelRead([1], [2])]))[0].logprobs, -2).all()
