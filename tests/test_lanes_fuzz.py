"""Callers that leave and replicas that misbehave, at random: whatever happens, every read is answered exactly once and
nothing is left behind."""

import asyncio
import contextlib
import gc
import random

import numpy as np
import pytest

from deployments.router import Router
from scoring import LabelRead, MatrixRead
from scoring.coalescing import Coalescer
from scoring.errors import Overloaded, ScoringError
from tests.stand_in_replicas import OF_A_VERSION, StandInReplica, StandInReplicas
from tests.stand_in_router import score
from tests.test_router import CATALOG

_CHAOS_S = 1.0
_MARGIN_S = 3.0  # for a loaded machine
TYPED = {"DeadlineExceeded", "TeacherUnavailable", "Overloaded"}


class Replica(StandInReplica):
    """Counts all of its calls, heartbeats too."""

    asked = 0

    async def call(self, method, *args, **options):
        type(self).asked += 1
        return await super().call(method, *args, **options)


def new_replica(rng: random.Random) -> StandInReplica:
    limit = rng.choice([1 << 40, 1500])
    step_s, block = rng.choice([0.001, 0.003, 0.01]), rng.choice([16, 16, 16, 0])
    return Replica(step_tokens=500, step_s=step_s, max_outstanding_tokens=limit, block=block)


def change_weights(rng: random.Random, replicas: StandInReplicas, version: int) -> None:
    """Of all replicas at once; one may be behind, as one that is starting just now is."""
    behind = rng.choice([None, *replicas.by_name])
    for name, replica in replicas.by_name.items():
        if name != behind:
            replica.weight_version = version


def refusing(rng: random.Random):
    def fail(count: int) -> None:
        if rng.random() < 0.5:
            raise Overloaded("full", retry_after_s=0.01)

    return fail


async def misbehave(rng: random.Random, replicas: StandInReplicas, once: list[StandInReplica]) -> None:
    """Until the end of the chaos; then all that is left is in order."""
    loop = asyncio.get_running_loop()
    end, number, version = loop.time() + _CHAOS_S, 0, 0
    while loop.time() < end:
        await asyncio.sleep(rng.uniform(0.001, 0.04))
        name = rng.choice([*replicas.by_name, "new"])
        ways = ["die", "leave", "stop", "deaf", "refuse", "change", "catch up", "mend", "mend"]
        what = "come" if name == "new" else rng.choice(ways)
        replica = replicas.by_name.get(name)
        if what == "come" and len(replicas.by_name) < 5:
            number += 1
            replicas.by_name[rng.choice([f"r{number}", "r1"])] = newcomer = new_replica(rng)
            newcomer.weight_version = rng.choice([version, version, max(version - 1, 0)])
        elif what in ("die", "leave"):
            del replicas.by_name[name]
            if what == "die":
                replica.die()
        elif what == "stop":
            replica.stopped = True
        elif what == "deaf":
            replica.deaf = True
        elif what == "refuse":
            replica.fail = refusing(rng)
        elif what == "change":
            version += 1
            change_weights(rng, replicas, version)
        elif what == "catch up":
            replica.weight_version = version
        elif what == "mend":
            replica.stopped = replica.deaf = False
            replica.fail = None
        for known in replicas.by_name.values():
            if known not in once:
                once.append(known)
    for replica in once:
        replica.stopped = replica.deaf = False
        replica.fail = None


def some_reads(rng: random.Random) -> list[MatrixRead]:
    count = rng.choice([1, 1, 3, 30, 150])
    return [
        MatrixRead(
            [1] * rng.choice([2, 20, 150]),
            [rng.randrange(2000)],
            [[rng.randrange(2000)]],
            teacher=rng.choice([None, "default", "math"]),
            priority=rng.choice([0, 0, 0, -1, 2]),
        )
        for _ in range(count)
    ]


def check(read: MatrixRead, answer) -> None:
    if isinstance(answer, ScoringError):
        assert type(answer).__name__ in TYPED, repr(answer)
    else:
        off = OF_A_VERSION * answer.meta.weight_version
        assert answer.response_logprobs.tolist() == [score(read.response_ids[0]) - off]
        assert answer.logprobs.tolist() == [[score(read.candidate_ids[0, 0]) - off]]


async def read_all(rng, router, coalescer, timeout_s):
    reads = some_reads(rng)
    scores = await router.read_matrix(reads, timeout_s=timeout_s, return_exceptions=True)
    versions = {"default": set(), "math": set()}
    for read, answer in zip(reads, scores, strict=True):
        check(read, answer)
        if not isinstance(answer, ScoringError):
            versions[read.teacher or "default"].add(answer.meta.weight_version)
    assert max(map(len, versions.values())) <= 1


async def leave(rng, router, coalescer, timeout_s):
    call = asyncio.create_task(router.read_matrix(some_reads(rng), timeout_s=timeout_s, return_exceptions=True))
    await asyncio.wait({call}, timeout=rng.uniform(0, 0.1))
    call.cancel()
    await asyncio.wait({call})


async def iterate(rng, router, coalescer, timeout_s):
    reads, seen = some_reads(rng), set()
    stop_after = rng.choice([1, 10, 1000])
    items = router.iter_matrix(reads, timeout_s=timeout_s, return_exceptions=True)
    async with contextlib.aclosing(items):
        async for i, answer in items:
            assert i not in seen
            seen.add(i)
            check(reads[i], answer)
            if len(seen) == stop_after:
                break
    assert len(seen) == min(stop_after, len(reads))


async def submit(rng, router, coalescer, timeout_s):
    reads = some_reads(rng)
    futures = [coalescer.submit(read, timeout_s) for read in reads]
    await asyncio.sleep(rng.choice([0, 0.005, 0.05]))
    left = {i for i in range(len(reads)) if rng.random() < 0.3}
    for i in left:
        futures[i].cancel()
    answers = await asyncio.gather(*futures, return_exceptions=True)
    for i, (read, answer) in enumerate(zip(reads, answers, strict=True)):
        if i not in left:
            check(read, answer)


async def labels(rng, router, coalescer, timeout_s):
    reads = [LabelRead([1] * 10, [i]) for i in range(rng.choice([1, 40]))]
    for i, answer in enumerate(await router.read_labels(reads, timeout_s=timeout_s, return_exceptions=True)):
        assert isinstance(answer, ScoringError) or answer.logprobs.tolist() == [
            score(i) - OF_A_VERSION * answer.meta.weight_version
        ]


async def caller(rng: random.Random, *asked) -> None:
    """Call after call while the chaos lasts; each ends within its deadline and a margin."""
    loop = asyncio.get_running_loop()
    end = loop.time() + _CHAOS_S
    while loop.time() < end:
        timeout_s = rng.choice([0.02, 0.2, 1.0])
        await asyncio.wait_for(
            rng.choice([read_all, leave, iterate, submit, labels])(rng, *asked, timeout_s), timeout_s + _MARGIN_S
        )
        await asyncio.sleep(rng.uniform(0, 0.02))


@pytest.mark.parametrize("serves_many", [False, True])
@pytest.mark.parametrize("seed", range(2))
async def test_whatever_happens_every_read_is_answered_once_and_nothing_is_left(monkeypatch, seed, serves_many):
    for name, value in {"_WATCH_S": 0.02, "_QUIET_S": 0.05, "_STALL_S": 0.1, "_REFUSAL_S": 0.005}.items():
        monkeypatch.setattr(f"deployments.lanes.{name}", value)
    monkeypatch.setattr("deployments.delivery._FIRST_PAUSE_S", 0.005)
    rng = random.Random(f"{seed} {serves_many}")
    once: list[StandInReplica] = []
    by_teacher: dict[str, StandInReplicas] = {}

    def replicas_of(app_name, teacher, deployment, why_none):
        found = StandInReplicas(**{f"r{i}": new_replica(rng) for i in range(3)})
        once.extend(found.by_name.values())
        return by_teacher.setdefault(deployment, found)

    monkeypatch.setattr("deployments.router.Replicas", replicas_of)
    monkeypatch.setattr(Replica, "asked", 0)
    unseen = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: unseen.append(context))
    router = Router("app", CATALOG | {"admission_wait_s": 0.05}, serves_many)
    coalescer = Coalescer({MatrixRead: router.iter_matrix})
    for name in ("default", "math"):
        await router.read_labels([LabelRead([1], [2], teacher=name)])
    steps = [misbehave(random.Random(rng.random()), replicas, once) for replicas in by_teacher.values()]
    await asyncio.gather(*steps, *(caller(random.Random(rng.random()), router, coalescer) for _ in range(8)))
    for replicas in by_teacher.values():
        replicas.by_name = {"last": new_replica(rng)}
    reads = [MatrixRead([1], [i], [[i]], teacher=("default", "math")[i % 2]) for i in range(20)]
    for i, answer in enumerate(await router.read_matrix(reads, timeout_s=60)):
        np.testing.assert_array_equal(answer.logprobs, [[score(i)]])
    gc.collect()
    for _ in range(300):
        if asyncio.all_tasks() == {asyncio.current_task()}:
            break
        await asyncio.sleep(0.01)
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert router.outstanding() == {} and all(replica.outstanding == 0 for replica in once)
    assert not unseen
    assert Replica.asked < 20_000  # nothing is asked in a tight loop
