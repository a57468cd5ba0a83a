"""The Router's own part: what it plans, streams, sends again and puts back, over replicas that are stand-ins.

This machine cannot have engines that fail on command. Real ones are in `test_application.py`.
"""

import asyncio
import gc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.delivery import MAX_RETRIES, _pause
from deployments.replica_calls import ReplicaLost
from deployments.router import Router
from scoring import LabelBatch, LabelRead, MatrixBatch, MatrixRead, MatrixScores
from scoring.adapters import Adapter
from scoring.affinity import Prefixes, find_groups, plan_by_prefix
from scoring.coalescing import Coalescer
from scoring.errors import (
    BatchTooLarge,
    DeadlineExceeded,
    EngineDead,
    InvalidRead,
    Overloaded,
    TeacherUnavailable,
    UnknownTeacher,
)
from tests.stand_in_replicas import OF_A_VERSION, StandInReplica, StandInReplicas, right_matrix

LIMITS = {"max_batch_reads": 10_000, "max_batch_tokens": 10**6, "max_request_bytes": 10**6, "max_answer_bytes": 10**6}
CATALOG = {
    "default": "default",
    "deployments": {"default": "Teacher-default", "math": "Teacher-math"},
    "adapters": {},
    "limits": LIMITS,
    "admission_wait_s": 0.0,
}
READS = [MatrixRead([1] * (i + 1), [i + 2, 7], [[i + 3], [8]]) for i in range(10)]


def reads_of(count, tokens, first=1, **fields):
    """`count` reads of `tokens` tokens each, whose prompts begin with the id `first`."""
    return [MatrixRead([first] + [1] * (tokens - 2), [7], [[8]], **fields) for _ in range(count)]


@pytest.fixture
def replicas(monkeypatch):
    replicas = StandInReplicas(a=StandInReplica(), b=StandInReplica())
    monkeypatch.setattr("deployments.router.Replicas", lambda *args: replicas)
    monkeypatch.setattr("deployments.delivery._FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr("deployments.lanes._WATCH_S", 0.02)
    monkeypatch.setattr("deployments.lanes._QUIET_S", 0.05)
    monkeypatch.setattr("deployments.lanes._STALL_S", 0.1)
    monkeypatch.setattr("deployments.lanes._REFUSAL_S", 0.005)
    return replicas


@pytest.fixture
async def router(replicas):
    router = Router("app", CATALOG)
    yield router
    await asyncio.sleep(0.01)
    assert router.outstanding() == {}  # the ledger is empty whatever happened


def only(replicas, **settings):
    """Leave one replica, of these settings."""
    replicas.by_name = {"a": StandInReplica(**settings)}
    return replicas.by_name["a"]


async def check(scores, reads):
    for score, logprobs in zip(scores, await right_matrix(reads), strict=True):
        np.testing.assert_array_equal(score.logprobs, logprobs)


async def test_a_batch_is_answered_in_order_by_all_replicas(router, replicas):
    await check(await router.read_matrix(READS), READS)
    assert all(replica.calls == 1 for replica in replicas.by_name.values())


async def test_single_reads_at_once_are_spread_over_the_replicas(router, replicas):
    await asyncio.gather(*(router.read_matrix([READS[0]]) for _ in range(64)))
    assert {name: replica.calls for name, replica in replicas.by_name.items()} == {"a": 32, "b": 32}


async def test_the_default_teacher_by_name_and_by_silence_is_one_plan(router, replicas):
    reads = [MatrixRead([1], [2, 3], teacher=name) for name in (None, "default")]
    await router.read_matrix(reads)
    assert {name: replica.calls for name, replica in replicas.by_name.items()} == {"a": 1, "b": 1}


async def test_a_batch_may_mix_teachers(router, replicas):
    reads = [MatrixRead([i + 1], [2], [[3]], teacher=("math", None, "default")[i % 3]) for i in range(9)]
    scores = await router.read_matrix(reads)
    await check(scores, reads)
    assert [score.meta.teacher for score in scores] == [read.teacher or "default" for read in reads]


# ---- the window


async def test_a_huge_batch_is_streamed_through_a_window_of_two_steps(router, replicas):
    reads = reads_of(400, 100)  # 20 steps on each of two replicas
    await check(await router.read_matrix(reads), reads)
    for replica in replicas.by_name.values():
        assert replica.largest_outstanding <= 2 * replica.step_tokens
        assert 20 <= replica.steps <= 23  # the engine never waited for more


async def test_a_single_read_beside_a_huge_batch_is_answered_within_three_steps(router, replicas):
    replica = only(replicas)
    batch = asyncio.create_task(router.read_matrix(reads_of(1000, 100)))
    while replica.steps < 10:
        await asyncio.sleep(0.001)
    for _ in range(5):
        before = replica.steps
        await router.read_matrix(reads_of(1, 50))
        assert replica.steps - before <= 3
    assert not batch.done()
    await batch


async def test_two_batches_take_turns(router, replicas):
    replica = only(replicas)
    first = asyncio.create_task(router.read_matrix(reads_of(200, 100, first=1)))
    await asyncio.sleep(0.02)
    await router.read_matrix(reads_of(40, 100, first=2))
    answered = replica.order.index(2), len(replica.order)
    assert replica.order[answered[0] :].count(1) < 100  # the second did not wait for the first
    await first


async def test_urgent_reads_go_first(router, replicas):
    replica = only(replicas)
    calls = [router.read_matrix(reads_of(100, 100, first=1)), router.read_matrix(reads_of(20, 100, 2, priority=-1))]
    await asyncio.gather(*calls)
    assert max(i for i, first in enumerate(replica.order) if first == 2) < 60


async def test_a_replica_that_comes_takes_over_what_waits(router, replicas):
    first = only(replicas)
    batch = asyncio.create_task(router.read_matrix(reads_of(400, 100)))
    while first.steps < 5:
        await asyncio.sleep(0.001)
    replicas.by_name["late"] = StandInReplica()
    await batch
    assert replicas.by_name["late"].steps >= 12


async def test_a_slow_replica_hands_over_what_waits(router, replicas):
    replicas.by_name["b"].step_s = 0.05
    await router.read_matrix(reads_of(400, 100))
    assert replicas.by_name["a"].steps > 3 * replicas.by_name["b"].steps


async def test_a_replica_of_a_rolling_redeploy_is_used_by_its_own_settings(router, replicas):
    before = only(replicas)
    batch = asyncio.create_task(router.read_matrix(reads_of(800, 100)))
    while before.steps < 3:
        await asyncio.sleep(0.001)
    after = replicas.by_name["b"] = StandInReplica(step_tokens=4000)
    await batch
    assert before.largest_outstanding <= 2000 < after.largest_outstanding <= 8000


async def test_first_calls_at_once_ask_one_replica_once_what_it_takes(router, replicas):
    asked = []
    for name, replica in replicas.by_name.items():

        async def counted(method, *args, name=name, call=replica.call, **options):
            if method == "info":
                asked.append(name)
                await asyncio.sleep(0.02)
            return await call(method, *args, **options)

        replica.call = counted
    await asyncio.gather(*(router.read_matrix([READS[0]]) for _ in range(50)), router.teachers())
    assert len(asked) == 2 and len(set(asked)) == 1  # "default" has one replica asked, and so has "math"


async def test_what_a_replica_takes_is_asked_no_longer_when_all_callers_have_left(router, replicas):
    for replica in replicas.by_name.values():
        replica.deaf = True
    calls = [asyncio.create_task(router.read_matrix([READS[0]])) for _ in range(3)]
    await asyncio.sleep(0.02)
    for call in calls:
        call.cancel()
    await asyncio.wait(calls)
    await asyncio.sleep(0.02)
    assert asyncio.all_tasks() == {asyncio.current_task()}
    for replica in replicas.by_name.values():
        replica.deaf = False


async def test_thousands_of_single_reads_take_turns_in_a_time_in_proportion(replicas, monkeypatch):
    """Counted in looks at calls: of each only a few, however many wait."""
    looks = 0

    def look(call):
        nonlocal looks
        looks += 1
        return id(call)

    monkeypatch.setattr("deployments.lane.Call.__hash__", look)
    only(replicas, step_tokens=10_000, step_s=0.001)
    router = Router("app", CATALOG)
    await asyncio.gather(*(router.read_matrix(reads_of(1, 50, priority=i % 3)) for i in range(1000)))
    assert looks < 100 * 1000
    (lane,) = router._lanes["Teacher-default"]._lanes.values()
    assert not lane._turns  # which would keep batches that are answered


# ---- prefixes


def samples(prompt, count=8, length=100, response=2, **fields):
    """`count` reads of one prompt, all of the id `prompt`."""
    return [MatrixRead([prompt] * length, [prompt, i][:response], **fields) for i in range(count)]


def caching(replicas, count=2, block=16, **settings):
    """`count` replicas with a prefix cache."""
    replicas.by_name = {name: StandInReplica(block=block, **settings) for name in "abcdefgh"[:count]}
    return list(replicas.by_name.values())


def where(replicas):
    """Per id of a prompt the replicas that answered it since this was last asked."""
    found = {}
    for name, replica in replicas.by_name.items():
        for prompt in replica.order:
            found.setdefault(prompt, set()).add(name)
        replica.order.clear()
    return found


async def test_a_prompt_is_prefilled_once_and_its_reads_stay_together_from_call_to_call(router, replicas):
    both = caching(replicas)
    reads = [read for turn in zip(*(samples(prompt) for prompt in range(1, 9)), strict=True) for read in turn]
    await check(await router.read_matrix(reads), reads)
    assert sum(replica.prefilled for replica in both) == 8 * (100 + 2 + 7 * (2 + 100 % 16))
    first = where(replicas)
    assert all(len(names) == 1 for names in first.values()) and len({min(names) for names in first.values()}) == 2
    for replica in both:
        replica.prefilled = 0
    again = [read for prompt in (3, 1, 7, 5, 2, 8, 4, 6) for read in samples(prompt)]
    await check(await router.read_matrix(again), again)
    assert where(replicas) == first
    assert sum(replica.prefilled for replica in both) == 64 * (2 + 100 % 16)


async def test_reads_of_a_prefix_go_out_next_to_each_other(router, replicas):
    replica = caching(replicas, 1, step_tokens=4000)[0]
    urgent = [read for prompt in (5, 6) for read in samples(prompt, 2, priority=-1)]
    reads = [read for turn in zip(*(samples(prompt) for prompt in (1, 2, 3)), strict=True) for read in turn]
    await router.read_matrix([*reads, *urgent])
    assert replica.order == [5] * 2 + [6] * 2 + [1] * 8 + [2] * 8 + [3] * 8


async def test_label_reads_that_differ_at_their_ends_are_a_group(router, replicas):
    both = caching(replicas)
    reads = [LabelRead([rubric] * 384 + [i] * 100, [7]) for i in range(3, 35) for rubric in (1, 2)]
    await router.read_labels(reads)
    assert where(replicas) in ({1: {"a"}, 2: {"b"}}, {1: {"b"}, 2: {"a"}})
    assert sum(replica.prefilled for replica in both) == 2 * 384 + 64 * 100


async def test_reads_that_come_one_by_one_follow_their_prompt(router, replicas):
    caching(replicas, 4)
    for turn in range(4):
        for prompt in range(1, 9):
            await router.read_matrix(samples(prompt)[turn : turn + 1])
            await router.read_labels([LabelRead([prompt] * 100, [turn])])
    assert all(len(names) == 1 for names in where(replicas).values())


async def test_what_was_only_planned_counts_as_prefilled_nowhere(router, replicas):
    """Else the window would let through many steps' work when a replica joins, and all is planned again."""
    settings = {"max_outstanding_tokens": 64_000, "block": 16}
    one = only(replicas, **settings)
    reads = [MatrixRead([1, *([i] * 239)], [7] * 10) for i in range(2, 202)]
    batch = asyncio.create_task(router.read_matrix(reads))
    await asyncio.sleep(0.03)
    replicas.by_name["b"] = StandInReplica(**settings)
    await check(await batch, reads)
    assert replicas.by_name["b"].steps and one.largest_outstanding <= 2000


async def test_a_cache_that_has_forgotten_is_believed_less(router, replicas):
    one = only(replicas, max_outstanding_tokens=64_000, block=16)
    for _ in range(3):
        one.largest_outstanding = 0
        reads = [MatrixRead([1, *([i] * 239)], [7] * 10) for i in range(2, 202)]
        await router.read_matrix(reads)
        one.cached.clear()
    (lane,) = router._lanes["Teacher-default"]._lanes.values()
    assert lane.work(np.int64(250), np.int64(224)) > 200


async def test_a_replica_beside_the_home_of_everything_gets_its_half(router, replicas):
    settings = {"max_outstanding_tokens": 64_000, "block": 16}
    replicas.by_name = {"a": StandInReplica(**settings)}
    reads = [read for i in range(100) for read in samples(2 + i, count=5, length=33, response=1)]
    reads += samples(1, count=300, length=33, response=2)
    await router.read_matrix(reads)
    replicas.by_name["b"] = StandInReplica(**settings)
    for _ in range(2):
        for replica in replicas.by_name.values():
            replica.prefilled = 0
        await router.read_matrix(reads)
    work = [replica.prefilled for replica in replicas.by_name.values()]
    assert max(work) < 1.5 * min(work)


async def test_a_prompt_with_more_reads_than_a_replica_should_have_is_shared_out(router, replicas):
    four = caching(replicas, 4)
    reads = samples(1, count=400, response=1)
    await check(await router.read_matrix(reads), reads)
    work = [replica.prefilled for replica in four]
    assert max(work) < 1.1 * min(work) and sum(work) == 4 * 101 + 396 * 5


async def test_the_window_is_of_what_the_engine_must_prefill(router, replicas):
    """Else the engine would wait: a window of two steps of tokens would be a fraction of a step's work."""
    replica = caching(replicas, 1, max_outstanding_tokens=64_000)[0]
    await router.read_matrix(samples(1, count=1600, response=1))
    work = 101 + 1599 * 5
    assert replica.prefilled == work and replica.steps <= work / 1000 + 4
    assert 10_000 < replica.largest_outstanding <= 32_000 * 1.25  # cached or not: half of what it takes


calls_of_prompts = st.lists(
    st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=8), min_size=1, max_size=6
)


@given(calls_of_prompts)
@settings(max_examples=30)
def test_whatever_is_asked_nobody_is_thought_to_hold_what_it_does_not_and_no_replica_gets_too_much(calls):
    asyncio.run(read_calls(calls))


async def read_calls(calls):
    replicas = StandInReplicas()
    three = caching(replicas, 3, block=4, step_s=0.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("deployments.router.Replicas", lambda *args: replicas)
        router = Router("app", CATALOG)
        for call in calls:
            for replica in three:
                replica.prefilled = 0
            reads = [read for prompt, count in call for read in samples(prompt, count, length=10 * prompt)]
            await check(await router.read_matrix(reads), reads)
            work, tokens = [replica.prefilled for replica in three], [len(read.prompt_ids) + 2 for read in reads]
            largest = max(10 * p + 8 * sum(n for q, n in call if q == p) for p, _ in call)  # up to 6 tokens a read
            assert max(work) <= sum(tokens) / 3 + largest + np.mean(tokens) / 2
            affinity = router._lanes["Teacher-default"]._affinity
            for prompt in range(1, 7):
                batch = MatrixBatch.from_reads(samples(prompt, 1, length=10 * prompt))
                zeros = np.zeros(1, np.int64)
                groups = find_groups(Prefixes(batch.ids, batch.offsets, batch.reusable(), 4, zeros), zeros)
                homes, held = affinity.homes(groups)
                for home in homes.values():
                    assert (None, *[prompt] * held[0]) in replicas.by_name[home].cached
        await asyncio.sleep(0.01)
        assert router.outstanding() == {}


async def test_lost_reads_are_planned_again_as_if_nobody_held_their_prompts(router, replicas, monkeypatch):
    caching(replicas)
    reads = [read for prompt in range(1, 9) for read in samples(prompt)]
    await router.read_matrix(reads)
    before = where(replicas)
    counted = []

    def watched(costs, priority, loads, groups, homes, held):
        counted.append((len(costs), set(homes.values())))
        return plan_by_prefix(costs, priority, loads, groups, homes, held)

    monkeypatch.setattr("deployments.lanes.plan_by_prefix", watched)
    replicas.by_name["a"].fail = lambda count: MatrixScores.failed(EngineDead("dead"), count)
    await check(await router.read_matrix(reads), reads)
    lost = sum(8 for names in before.values() if names == {"a"})
    assert counted[0] == (64, {"a", "b"}) and sum(count for count, _ in counted[1:]) == lost > 0
    assert not set.union(*(homes for _, homes in counted[1:]))
    assert set.union(*where(replicas).values()) == {"b"}


async def test_a_replica_that_leaves_holds_nothing_any_more(router, replicas):
    caching(replicas)
    reads = [read for prompt in range(1, 9) for read in samples(prompt)]
    await router.read_matrix(reads)
    replicas.by_name["c"] = StandInReplica(block=16)
    del replicas.by_name["a"]
    await check(await router.read_matrix(reads), reads)
    lanes = router._lanes["Teacher-default"]
    assert "a" not in {*lanes._affinity._recent.values(), *lanes._affinity._older.values()}


async def test_new_weights_hold_nothing(router, replicas):
    both = caching(replicas)
    reads = [read for prompt in range(1, 9) for read in samples(prompt)]
    await router.read_matrix(reads)
    of_a = {prompt for prompt, names in where(replicas).items() if names == {"a"}}
    affinity = router._lanes["Teacher-default"]._affinity
    held = list(affinity._recent.values())
    assert set(held) == {"a", "b"}
    both[0].weight_version = 1
    await router.read_matrix(samples(min(of_a), count=1))  # at home, from where the new version is heard
    assert where(replicas) == {min(of_a): {"a"}}
    now_held = list(affinity._recent.values())
    assert now_held.count("b") == held.count("b")
    assert 0 < now_held.count("a") <= held.count("a") // len(of_a)  # the prompt that was just asked


# ---- weights that change


async def check_by_version(scores, reads):
    """Every score is that of the version that it names; which versions there are."""
    for score, logprobs in zip(scores, await right_matrix(reads), strict=True):
        np.testing.assert_array_equal(score.logprobs, logprobs - OF_A_VERSION * score.meta.weight_version)
    return {score.meta.weight_version for score in scores}


async def change_weights_after(replicas, steps, version=1):
    while sum(replica.steps for replica in replicas.by_name.values()) < steps:
        await asyncio.sleep(0.001)
    for replica in replicas.by_name.values():
        replica.weight_version = version


async def test_a_batch_whose_weights_change_is_answered_whole_by_the_new_ones(router, replicas):
    reads = reads_of(200, 100)
    reading = asyncio.create_task(router.read_matrix(reads))
    await change_weights_after(replicas, 8)
    assert await check_by_version(await reading, reads) == {1}
    # What was answered before is asked again, and what was under way is not asked twice.
    assert 200 < sum(len(replica.order) for replica in replicas.by_name.values()) < 400


async def test_reads_that_are_taken_one_by_one_name_the_version_of_each(router, replicas):
    reads = reads_of(200, 100)
    changing = asyncio.create_task(change_weights_after(replicas, 8))
    found = [item async for item in router.iter_matrix(reads)]
    await changing
    assert sorted(i for i, _ in found) == list(range(200))
    assert await check_by_version([score for _, score in found], [reads[i] for i, _ in found]) == {0, 1}
    assert sum(len(replica.order) for replica in replicas.by_name.values()) == 200  # none of them was asked twice


async def test_a_replica_that_is_behind_gets_nothing_until_it_has_the_new_weights(router, replicas, monkeypatch):
    monkeypatch.setattr("deployments.lanes._BEHIND_S", 0.02)
    await router.read_matrix(READS)
    a, b = replicas.by_name.values()
    a.weight_version = 1
    before, started = b.calls, asyncio.get_running_loop().time()
    for _ in range(3):
        reads = reads_of(50, 100)
        assert await check_by_version(await router.read_matrix(reads), reads) == {1}
    tries = 1 + (asyncio.get_running_loop().time() - started) / 0.02
    assert b.calls - before <= 3 * tries  # a window of chunks is on its way to it when it refuses
    answered = len(b.order)
    b.weight_version = 1
    await asyncio.sleep(0.03)
    reads = reads_of(50, 100)
    assert await check_by_version(await router.read_matrix(reads), reads) == {1}
    assert len(b.order) > answered == 5  # of READS


async def test_when_the_last_replica_of_a_version_is_gone_what_is_left_answers(router, replicas):
    replicas.by_name["a"].weight_version = replicas.by_name["b"].weight_version = 7
    await router.read_matrix(READS)
    reads = reads_of(100, 100)
    reading = asyncio.create_task(router.read_matrix(reads))
    await asyncio.sleep(0.01)
    lost, replicas.by_name = replicas.by_name, {"c": StandInReplica(), "d": StandInReplica()}
    for replica in lost.values():
        replica.die()
    assert await check_by_version(await reading, reads) == {0}


async def test_of_a_mixed_batch_the_reads_of_the_teacher_whose_weights_change_are_asked_again(router, monkeypatch):
    by_deployment = {name: StandInReplicas(a=StandInReplica()) for name in CATALOG["deployments"].values()}
    monkeypatch.setattr("deployments.router.Replicas", lambda app, teacher, deployment, why: by_deployment[deployment])
    reads = reads_of(100, 100) + reads_of(100, 100, teacher="math")
    reading = asyncio.create_task(router.read_matrix(reads))
    await change_weights_after(by_deployment["Teacher-math"], 4)
    scores = list(await reading)
    assert await check_by_version(scores[:100], reads[:100]) == {0}
    assert await check_by_version(scores[100:], reads[100:]) == {1}
    default, math = (replicas.by_name["a"] for replicas in by_deployment.values())
    assert 100 <= len(default.order) <= 125 < len(math.order)  # what was under way there is asked again too


async def test_who_has_changed_the_weights_knows_which_replicas_have_the_new_ones(router, replicas, monkeypatch):
    await router.read_matrix(READS)
    await change_weights_after(replicas, 0)
    versions = dict.fromkeys(replicas.by_name, 1)
    asked = []

    async def ask_ingress(*args, timeout_s):
        asked.append(args)
        return {"deployment": "Teacher-default", "weight_version": 1, "checkpoint": "4567", "replicas": versions}

    router._infos["Teacher-default"] = float("inf"), {"as": "before"}
    monkeypatch.setattr(router._catalog, "ask_ingress", ask_ingress)
    assert await router.update_weights("default", "/weights/1", timeout_s=5) == 1
    assert asked == [("update_weights", "default", "/weights/1", 5)]
    calls = {replica: replica.calls for replica in replicas.by_name.values()}
    assert await check_by_version(await router.read_matrix(READS), READS) == {1}
    assert [replica.calls - before for replica, before in calls.items()] == [1, 1]  # none was refused
    assert (await router.teachers())["default"]["weight_version"] == 1


async def test_without_reuse_nothing_is_grouped(router, replicas, monkeypatch):
    monkeypatch.setattr("deployments.lanes.find_groups", None)
    monkeypatch.setattr("deployments.lane.Prefixes", None)
    reads = samples(1, count=20)
    await check(await router.read_matrix(reads), reads)
    replicas.by_name["c"] = StandInReplica(block=16)  # a redeploy rolls: not all reuse prefixes, as yet
    for _ in range(3):
        await check(await router.read_matrix(reads), reads)
    lanes = router._lanes["Teacher-default"]._lanes
    assert [lane.settings.block for lane in lanes.values()] == [0, 0, 16]


async def test_an_adapter_shares_no_prefix_with_its_base(replicas):
    both = caching(replicas)
    catalog = catalog_with({"polite": Adapter("/p", 1), "terse": Adapter("/t", 2)})
    reads = [read for name in ("math", "judge", "polite", "terse") for read in samples(1, teacher=name)]
    await Router("app", catalog).read_matrix(reads, return_exceptions=True)  # the stand-ins answer math only
    groups = [102 + 15 * 6, 102 + 7 * 6, 102 + 7 * 6]  # an alias is its teacher
    assert sum(replica.prefilled for replica in both) == sum(groups)
    assert {replica.prefilled for replica in both} == {groups[0], groups[1] + groups[2]}


# ---- loss, silence


@pytest.mark.parametrize(
    "lost",
    [
        lambda count: MatrixScores.failed(EngineDead("dead"), count),
        lambda count: (_ for _ in ()).throw(ReplicaLost("gone")),
        lambda count: (_ for _ in ()).throw(TeacherUnavailable("leaving")),
    ],
    ids=["engine", "replica", "leaving"],
)
async def test_reads_lost_with_a_replica_are_answered_by_another(router, replicas, lost):
    replicas.by_name["a"].fail = lost
    await check(await router.read_matrix(READS), READS)
    assert {name: replica.calls for name, replica in replicas.by_name.items()} == {"a": 1, "b": 2}


async def test_a_replica_that_goes_loses_nothing(router, replicas):
    reads = reads_of(400, 100)
    batch = asyncio.create_task(router.read_matrix(reads))
    await asyncio.sleep(0.03)
    replicas.by_name.pop("a").die()
    await check(await batch, reads)


async def test_reads_that_are_lost_again_and_again_end_in_a_typed_error(router, replicas):
    for replica in replicas.by_name.values():
        replica.fail = lambda count: MatrixScores.failed(EngineDead("dead"), count)
    with pytest.raises(TeacherUnavailable, match=f"lost {1 + MAX_RETRIES} times in a row"):
        await router.read_matrix(READS)
    scores = await router.read_matrix(READS[:2], return_exceptions=True)
    assert [(type(s), s.read) for s in scores] == [(TeacherUnavailable, 0), (TeacherUnavailable, 1)]


@pytest.mark.parametrize("silence", ["stopped", "deaf"])
async def test_reads_of_a_silent_replica_are_answered_by_another(router, replicas, silence):
    await router.read_matrix(READS)  # both are known
    setattr(replicas.by_name["a"], silence, True)
    reads = reads_of(40, 100)
    await check(await router.read_matrix(reads, timeout_s=10), reads)
    assert replicas.by_name["a"].cancelled  # what it still had was called off


async def test_a_silent_replica_is_used_again_once_it_takes_steps(router, replicas):
    replicas.by_name["a"].stopped = True
    await router.read_matrix(reads_of(40, 100), timeout_s=10)
    replicas.by_name["a"].stopped = False
    replicas.by_name["b"].stopped = True
    reads = reads_of(40, 100)
    await check(await router.read_matrix(reads, timeout_s=10), reads)


async def test_chunks_move_on_until_they_meet_a_replica_that_lives(router, replicas):
    for name in "abc":
        replicas.by_name.setdefault(name, StandInReplica()).stopped = True
    reads = reads_of(40, 100)
    batch = asyncio.create_task(router.read_matrix(reads, timeout_s=10))
    await asyncio.sleep(0.4)  # all are found silent, in whatever order
    replicas.by_name["c"].stopped = False
    await check(await asyncio.wait_for(batch, 5), reads)


async def test_a_silent_replica_gets_reads_again_while_others_answer(router, replicas):
    replica = replicas.by_name["a"]
    replica.stopped = True
    await router.read_matrix(reads_of(40, 100), timeout_s=10)
    replica.stopped = False
    called = replica.calls
    for _ in range(20):
        await router.read_matrix(reads_of(40, 100), timeout_s=10)
    assert replica.calls > called


async def test_a_call_that_is_called_off_elsewhere_is_lost_and_not_waited_for(router, replicas):
    only(replicas).fail = lambda count: (_ for _ in ()).throw(asyncio.CancelledError)
    with pytest.raises(TeacherUnavailable, match="lost"):
        await asyncio.wait_for(router.read_matrix(READS), 5)


async def test_a_heartbeat_that_fails_in_an_unforeseen_way_is_silence(router, replicas, monkeypatch):
    call, replica = replicas.call, replicas.by_name["a"]
    replica.stopped = True

    async def failing(name, method, *args, **options):
        if (name, method) == ("a", "heartbeat"):
            raise RuntimeError
        return await call(name, method, *args, **options)

    monkeypatch.setattr(replicas, "call", failing)
    await asyncio.wait_for(router.read_matrix(reads_of(4, 100)), 5)


async def test_reads_of_a_replica_that_leaves_and_falls_silent_are_answered_by_another(router, replicas):
    await router.read_matrix(READS)  # both are known
    replicas.by_name["a"].stopped = True
    reads = reads_of(40, 100)
    batch = asyncio.create_task(router.read_matrix(reads, timeout_s=60))
    await asyncio.sleep(0.01)
    replicas.by_name.pop("a")
    assert "a" in router.outstanding()["Teacher-default"]  # it owes answers still
    await check(await asyncio.wait_for(batch, 5), reads)


async def test_a_teacher_whose_only_replica_is_silent_keeps_the_deadline(router, replicas):
    only(replicas).stopped = True
    with pytest.raises(DeadlineExceeded):
        await router.read_matrix(READS, timeout_s=0.2)


async def test_no_replica_until_the_deadline_is_a_typed_error(router, replicas):
    replicas.by_name.clear()
    with pytest.raises(TeacherUnavailable, match="no running replica"):
        await router.read_matrix(READS, timeout_s=0.1)


async def test_a_replica_that_comes_in_time_answers(router, replicas):
    replicas.by_name.clear()
    asyncio.get_running_loop().call_later(0.1, replicas.by_name.update, {"late": StandInReplica()})
    assert len(await router.read_matrix(READS, timeout_s=10)) == len(READS)


# ---- deadlines, cancelling


async def test_what_waits_at_its_deadline_fails_and_what_was_answered_is_kept(router, replicas):
    only(replicas, step_s=0.02)
    scores = await router.read_matrix(reads_of(200, 100), timeout_s=0.2, return_exceptions=True)
    kinds = {type(score).__name__ for score in scores}
    assert kinds == {"MatrixScore", "DeadlineExceeded"}


async def test_a_cancelled_call_is_called_off_at_the_replicas(router, replicas):
    task = asyncio.create_task(router.read_matrix(reads_of(1000, 100)))
    while not all(replica.outstanding for replica in replicas.by_name.values()):
        await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.sleep(0.02)
    assert all(replica.outstanding == 0 and replica.cancelled for replica in replicas.by_name.values())


async def test_an_abandoned_iteration_is_called_off(router, replicas):
    async for _, score in router.iter_matrix(reads_of(1000, 100)):
        assert score.logprobs.tolist() == [[-8.0]]
        break
    gc.collect()
    await asyncio.sleep(0.05)
    assert all(replica.outstanding == 0 for replica in replicas.by_name.values())


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan"), "5", True, 3601])
async def test_a_deadline_that_is_none_is_refused(router, timeout_s):
    with pytest.raises(InvalidRead, match="timeout_s"):
        await router.read_matrix(READS, timeout_s=timeout_s)


# ---- admission


async def test_a_refusal_by_one_replica_is_planned_again(router, replicas):
    replicas.by_name["a"].fail = lambda count: (_ for _ in ()).throw(Overloaded("full", retry_after_s=1.0))
    await check(await router.read_matrix(READS), READS)


async def test_a_callers_own_router_goes_on_until_there_is_room(router, replicas):
    replica = only(replicas, max_outstanding_tokens=250)
    calls = [router.read_matrix(reads_of(1, 100)) for _ in range(10)]
    assert len(await asyncio.gather(*calls)) == 10
    assert replica.largest_outstanding <= 250


async def test_refusals_until_the_deadline_end_there(router, replicas):
    for replica in replicas.by_name.values():
        replica.fail = lambda count: (_ for _ in ()).throw(Overloaded("full", retry_after_s=1.0))
    with pytest.raises(DeadlineExceeded):
        await asyncio.wait_for(router.read_matrix(READS, timeout_s=0.2), 2)


async def test_a_refused_read_does_not_wait_beyond_its_deadline_behind_others(router, replicas):
    replica = only(replicas)
    replica.fail = lambda count: (_ for _ in ()).throw(Overloaded("full")) if count == 1 else None
    others = asyncio.create_task(router.read_matrix(reads_of(40, 100)))
    await asyncio.sleep(0.01)
    replica.stopped = True
    with pytest.raises(DeadlineExceeded):
        await asyncio.wait_for(router.read_matrix(reads_of(1, 100), timeout_s=0.2), 2)
    others.cancel()


async def test_reads_refused_within_an_answer_are_not_sent_there_at_once_again(router, replicas):
    full, busy = replicas.by_name["a"], replicas.by_name["b"]
    busy.step_s = 0.2
    await router.read_labels([LabelRead([1], [2])])
    full.fail = lambda count: (_ for _ in ()).throw(Overloaded("full"))
    others = asyncio.create_task(router.read_matrix(reads_of(6, 100)))  # all of them at b, in the end
    await asyncio.sleep(0.05)
    full.calls = 0
    full.fail = lambda count: MatrixScores.failed(Overloaded("no reads for now"), count)
    await router.read_matrix(reads_of(1, 100))
    assert full.calls <= 2
    await others


def test_the_pause_stays_bounded_after_thousands_of_refusals():
    assert _pause(5000) <= 1.5


async def test_a_router_that_serves_many_says_so_when_its_replicas_have_their_fill(replicas):
    only(replicas, step_s=0.1, max_outstanding_tokens=400)
    router = Router("app", CATALOG, serves_many=True)
    calls = [router.read_matrix(reads_of(1, 100)) for _ in range(10)]
    answers = await asyncio.gather(*calls, return_exceptions=True)
    refused = [answer for answer in answers if isinstance(answer, Overloaded)]
    assert len(refused) == 6 and all(error.details["retry_after_s"] for error in refused)
    assert "max_outstanding_tokens" in str(refused[0])


async def test_a_router_that_serves_many_waits_as_long_as_it_is_told(replicas):
    only(replicas, step_s=0.02, max_outstanding_tokens=400)
    router = Router("app", CATALOG | {"admission_wait_s": 5.0}, serves_many=True)
    assert len(await asyncio.gather(*(router.read_matrix(reads_of(1, 100)) for _ in range(10)))) == 10


@pytest.mark.parametrize(
    ("name", "limit"), [("max_batch_reads", 9), ("max_batch_tokens", 74), ("max_answer_bytes", 159)]
)
async def test_a_router_that_serves_many_holds_a_call_to_its_limits(replicas, name, limit):
    def serving(limit):
        return Router("app", CATALOG | {"limits": LIMITS | {name: limit}}, serves_many=True)

    with pytest.raises(BatchTooLarge, match=rf"at most {limit} are taken \(the application's limits.{name}\)") as error:
        await serving(limit).read_matrix(READS)
    assert error.value.details[name] == limit
    assert len(await serving(limit + 1).read_matrix(READS)) == 10


async def test_what_is_asked_beside_the_candidates_counts_in_the_size_of_an_answer(replicas):
    """A row of these holds its own token, a candidate, an entropy, three ids and their three numbers."""
    read, most = MatrixRead([1], [2, 3], [4], top_k=3, extras="entropy"), 2 * 9 * 4

    def serving(limit):
        return Router("app", CATALOG | {"limits": LIMITS | {"max_answer_bytes": limit}}, serves_many=True)

    with pytest.raises(BatchTooLarge, match=f"{most} bytes of scores in one call; at most {most - 1} are taken"):
        await serving(most - 1).read_matrix([read])
    (score,) = await serving(most).read_matrix([read])
    assert (score.top_ids.tolist(), score.entropy.tolist()) == ([[3, 4, 5], [4, 5, 6]], [0.5, 1.5])


# ---- one by one


async def test_reads_are_handed_out_as_they_finish(router, replicas):
    only(replicas, step_s=0.02)
    seen = {}
    async for i, score in router.iter_matrix(READS + reads_of(100, 100)):
        if not seen:
            assert len(seen) == 0 and replicas.by_name["a"].steps < 5
        seen[i] = score
    assert sorted(seen) == list(range(110))
    await check([seen[i] for i in range(10)], READS)


async def test_a_failing_read_is_raised_or_handed_out_in_its_place(router, replicas):
    reads = [*READS[:3], MatrixRead([1], [9999], [[1]]), *READS[3:]]
    with pytest.raises(InvalidRead, match="read 3"):
        async for _ in router.iter_matrix(reads):
            pass
    seen = {i: score async for i, score in router.iter_matrix(reads, return_exceptions=True)}
    assert isinstance(seen[3], InvalidRead) and seen[3].read == 3 and len(seen) == 11


async def test_submitted_reads_travel_together_and_fail_alone(router, replicas):
    replica = only(replicas)
    coalescer = Coalescer({MatrixRead: router.iter_matrix, LabelRead: router.iter_labels})
    bad, label = MatrixRead([1], [9999], [[1]]), LabelRead([1], [2])
    futures = [coalescer.submit(read, 10) for read in [*READS, bad, label]]
    answers = await asyncio.gather(*futures, return_exceptions=True)
    await check(answers[:10], READS)
    assert isinstance(answers[10], InvalidRead) and answers[10].read is None
    assert answers[11].logprobs.tolist() == [-2]
    assert replica.calls == 2  # the matrix reads, and the label read
    with pytest.raises(InvalidRead, match="submit takes a MatrixRead or a LabelRead"):
        coalescer.submit("text", 10)


async def test_submitting_takes_time_in_proportion(monkeypatch):
    """Counted in looks at futures: an answer looks at its own future only."""
    looks = 0

    class Future(asyncio.Future):
        def done(self):
            nonlocal looks
            looks += 1
            return super().done()

    async def iterate(reads, **_):
        for i in range(len(reads)):
            yield i, i
            await asyncio.sleep(0)

    loop = asyncio.get_running_loop()
    monkeypatch.setattr(loop, "create_future", lambda: Future(loop=loop))
    coalescer = Coalescer({MatrixRead: iterate})
    futures = [coalescer.submit(READS[0], 10) for _ in range(500)]
    assert await asyncio.gather(*futures) == list(range(500))
    assert looks < 20 * 500


async def test_submitted_reads_that_nobody_waits_for_are_called_off(router, replicas):
    replica = only(replicas, step_s=0.05)
    coalescer = Coalescer({MatrixRead: router.iter_matrix})
    futures = [coalescer.submit(read, 10) for read in reads_of(50, 100)]
    await asyncio.sleep(0.08)
    for future in futures:
        future.cancel()
    await asyncio.sleep(0.05)
    assert replica.outstanding == 0


# ---- which teachers there are


async def test_an_unknown_teacher_is_looked_for_once_more_before_it_is_refused(router, replicas):
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

    asking._catalog._ingress = Ingress()
    assert await asking.served_by() == CATALOG["deployments"]
    assert len(await asking.read_labels([LabelRead([1], [2], teacher="new")], return_exceptions=True)) == 1
    assert asking._catalog._ingress.asked == 2
    with pytest.raises(UnknownTeacher, match="is 'newer'; the teachers are default, math, new"):
        await asking.read_labels([LabelRead([1], [2], teacher="newer")])


async def test_batches_and_lists_are_taken(router):
    assert len(await router.read_matrix(MatrixBatch.from_reads(READS))) == len(READS)
    assert len(await router.read_labels(LabelBatch.from_reads([LabelRead([1], [2])]))) == 1
    assert len(await router.read_matrix([])) == 0
    assert np.isclose((await router.read_labels([LabelRead([1], [2])]))[0].logprobs, -2).all()


async def test_a_read_of_an_adapter_travels_with_its_adapter_even_if_that_is_removed_meanwhile(replicas):
    """The ingress changes its catalog in place, and a read whose adapter was missing would be answered by the base."""
    adapter = Adapter("/adapters/polite", 3)
    catalog = CATALOG | {"deployments": CATALOG["deployments"] | {"polite": "Teacher-default"}}
    catalog["adapters"] = {"polite": adapter}
    seen = []
    for replica in replicas.by_name.values():
        call = replica.call

        async def watched(method, batch=None, adapters=None, call=call, **options):
            if batch is not None:
                seen.extend((read.teacher, (adapters or {}).get(read.teacher)) for read in batch)
            return await call(method, *(() if batch is None else (batch,)), **options)

        replica.call = watched
    reads = [LabelRead([1], [2], teacher=name) for name in ("nobody", "polite", "polite")]
    async for _ in Router("app", catalog).iter_labels(reads, return_exceptions=True):
        catalog["adapters"].pop("polite", None)
    assert seen == [("polite", adapter)] * 2


def catalog_with(adapters):
    """A catalog in which `judge` is an alias of math, and these adapters go over it."""
    others = dict.fromkeys(["judge", *adapters], "Teacher-math")
    return CATALOG | {"default": "math", "deployments": CATALOG["deployments"] | others, "adapters": adapters}


async def test_an_adapter_says_what_it_goes_over_and_has_a_checkpoint_of_its_own(replicas):
    adapters = {"polite": Adapter("/adapters/polite", 3), "broken": Adapter("/adapters/broken", 4)}
    teachers = await Router("app", catalog_with(adapters)).teachers()
    assert list(teachers) == ["math", "default", "judge", "polite", "broken"]
    base = {"max_batched_tokens": 1000, "max_outstanding_tokens": 1 << 40, "checkpoint": "0123", "replicas": 2}
    base |= {"prefix_reuse": False, "block_size": 32, "weight_version": 0}
    for name in ("math", "default", "judge"):
        assert teachers[name] == base | {"teacher": name, "default": name == "math"}
    of_adapter = {"base": "math", "default": False}
    assert teachers["polite"] == base | of_adapter | {
        "teacher": "polite",
        "adapter": "/adapters/polite",
        "checkpoint": "0123+/adapters/polite",
    }
    assert teachers["broken"] == base | of_adapter | {
        "teacher": "broken",
        "adapter": "/adapters/broken",
        "checkpoint": None,
    }


async def test_a_teacher_without_replicas_has_only_its_name(replicas, monkeypatch):
    empty = StandInReplicas()
    monkeypatch.setattr("deployments.router.Replicas", lambda *args: empty if args[1] == "math" else replicas)
    teachers = await Router("app", catalog_with({"polite": Adapter("/p", 1)})).teachers(timeout_s=0.1)
    assert teachers["math"] == {"teacher": "math", "default": True, "replicas": 0}
    assert teachers["polite"] == {"teacher": "polite", "default": False, "replicas": 0, "base": "math", "adapter": "/p"}
    assert teachers["default"]["replicas"] == 2
    with pytest.raises(TeacherUnavailable, match="no replica of math, default, judge answered"):
        replicas.by_name.clear()
        await Router("app", catalog_with({})).teachers(timeout_s=0.1)


async def test_what_is_served_no_longer_is_forgotten(replicas):
    catalog = catalog_with({"polite": Adapter("/p", 1)})
    router = Router("app", catalog)
    await router.teachers()
    assert router._infos.keys() == {"Teacher-default", "Teacher-math"} == router._lanes.keys()
    assert router._checkpoints.keys() == {Adapter("/p", 1)}
    catalog["deployments"] = {"math": "Teacher-math"}
    catalog["adapters"] = {}
    await router.teachers()
    assert router._infos.keys() == {"Teacher-math"} == router._lanes.keys() and not router._checkpoints
