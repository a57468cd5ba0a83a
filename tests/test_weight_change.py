"""A change of weights over all replicas, and what becomes of it when something goes wrong at any of its steps.

The replicas' side and the change are the real ones; the engines, and the calls between them, are stand-ins. Real
engines change their weights in `test_engine.py`, `test_application.py` and `faults/test_weights.py`.
"""

import asyncio
import contextlib

import pytest

from deployments import replica_weights, weight_change
from deployments.replica_calls import ReplicaLost, now
from deployments.replica_weights import ReplicaWeights
from deployments.weight_change import change_weights
from scoring.errors import DeadlineExceeded, InvalidCheckpoint, ScoringError, SelfTestFailed, TeacherUnavailable
from scoring.hold import Hold
from scoring.weights import Weights

OLD = Weights(0, "/old", "hash of /old")
NEW = Weights(1, "/new", "hash of /new")


class Engine:
    """Loads what is on its disk, by path with its hash. That "/bad" contradicts itself shows when it is loaded."""

    def __init__(self, weights: Weights = OLD) -> None:
        self.weights, self.disk = weights, {path: f"hash of {path}" for path in ("/old", "/new", "/newer", "/bad")}
        self._hold = Hold()
        self.load_s = 0.01
        self.reading = 0  # reads under way
        self.loaded: list[str] = []
        self.served: list[int] = []  # versions that answered

    async def check_weights(self, path):
        await asyncio.sleep(0)
        if path not in self.disk:
            raise InvalidCheckpoint(f"{path} does not fit", differences=["missing: w"])
        return type("Checked", (), {"checkpoint": self.disk[path], "stamp": ()})

    async def hold(self):
        await self._hold.close()

    async def load_weights(self, weights, checked):
        assert self._hold.closed
        await asyncio.sleep(self.load_s)
        self.loaded.append(weights.path)
        if weights.path == "/bad":
            raise SelfTestFailed("the engine contradicts itself")
        self.weights = weights

    def release(self):
        self._hold.open()

    @property
    def held(self):
        return self._hold.closed

    async def read(self, seconds=0.0):
        """One read; the version that answers it."""
        await self._hold.enter()
        try:
            version = self.weights.version
            await asyncio.sleep(seconds)
            assert self.weights.version == version
        finally:
            self._hold.leave()
        self.served.append(version)
        return version


class Cluster:
    """Replicas by name, in the place of `Replicas`, and the record."""

    teacher = "default"

    def __init__(self, *names: str) -> None:
        self.recorded: Weights | None = None
        self.engines: dict[str, Engine] = {}
        self.sides: dict[str, ReplicaWeights] = {}
        self.left: dict[str, str] = {}
        self.calls: list[tuple[str, str]] = []
        self.before_call = lambda name, method: None
        for name in names:
            self.start(name)

    def start(self, name: str) -> Engine:
        """A replica begins to serve what the record says."""
        engine = Engine(self.recorded or OLD)
        self.engines[name] = engine
        self.sides[name] = ReplicaWeights(engine, lambda: self.recorded, lambda reason: self.leave(name, reason))
        self.sides[name].watch()
        return engine

    def kill(self, name: str) -> None:
        del self.engines[name]
        for task in self.sides.pop(name)._tasks:
            task.cancel()

    def leave(self, name: str, reason: str) -> None:
        self.left[name], engine = reason, self.engines[name]
        asyncio.get_running_loop().call_later(0.03, lambda: self.engines.get(name) is engine and self.kill(name))

    def running(self):
        return tuple(sorted(self.engines))

    async def wait(self, deadline):
        return self.running()

    async def call(self, name, method, deadline, *args):
        self.calls.append((name, method))
        self.before_call(name, method)
        if name not in self.engines:
            raise ReplicaLost(f"{name} is gone")
        engine, side = self.engines[name], self.sides[name]

        async def run():
            if method == "check_weights":
                checked = await engine.check_weights(*args)
                version = side.served.version
                return {"checkpoint": checked.checkpoint, "weight_version": version, "model": "/old"}
            if method == "keep_weights":
                return side.keep(*args)
            return await {"prepare_weights": side.prepare, "follow_record": side.follow}[method](*args)

        answering = asyncio.create_task(run())
        answering.add_done_callback(lambda task: task.cancelled() or task.exception())
        try:
            async with asyncio.timeout(max(deadline - now(), 0) + 0.05):
                while not answering.done():
                    await asyncio.wait({answering}, timeout=0.001)
                    if self.sides.get(name) is not side:
                        raise ReplicaLost(f"{name} died")
        except TimeoutError:
            answering.cancel()
            raise DeadlineExceeded("no answer") from None
        return answering.result()

    async def commit(self, weights, model):
        assert all(engine.held and engine.weights == weights for engine in self.engines.values())
        self.recorded = weights

    async def change(self, path="/new", timeout_s=5.0, commit=None):
        last = self.recorded.version if self.recorded else 0
        return await change_weights(self, path, last, commit or self.commit, now() + timeout_s)

    def versions(self):
        return {name: engine.weights.version for name, engine in self.engines.items() if not engine.held}

    async def settled(self, version: int) -> None:
        """Every replica serves this version, soon."""
        async with asyncio.timeout(2):
            while self.versions() != dict.fromkeys(self.engines, version):
                await asyncio.sleep(0.002)


@pytest.fixture
async def cluster(monkeypatch):
    monkeypatch.setattr(replica_weights, "LEASE_S", 0.15)
    monkeypatch.setattr(replica_weights, "_LOOK_S", 0.02)
    monkeypatch.setattr(weight_change, "_WORD_S", 0.03)
    monkeypatch.setattr(weight_change, "POLL_S", 0.002)
    cluster = Cluster("a", "b", "c")
    yield cluster
    for name in list(cluster.engines):
        cluster.kill(name)


async def test_all_replicas_serve_the_new_weights_and_the_record_names_them(cluster):
    weights, served = await cluster.change()
    assert weights == NEW == cluster.recorded
    assert served == cluster.versions() == {"a": 1, "b": 1, "c": 1}
    assert (await cluster.change("/newer"))[0].version == 2
    assert (await cluster.change("/newer"))[0].version == 3  # the same path is another version
    assert cluster.engines["a"].loaded == ["/new", "/newer", "/newer"]


async def test_reads_end_by_the_weights_they_began_with_and_those_that_wait_get_the_new_ones(cluster):
    long = [asyncio.create_task(engine.read(0.05)) for engine in cluster.engines.values()]
    await asyncio.sleep(0)
    changing = asyncio.create_task(cluster.change())
    await asyncio.sleep(0.02)
    assert cluster.engines["a"].held and cluster.recorded is None
    waiting = [asyncio.create_task(engine.read()) for engine in cluster.engines.values()]
    await changing
    assert await asyncio.gather(*long) == [0, 0, 0]
    assert (await waiting[0], cluster.recorded.version) == (1, 1)
    for engine in cluster.engines.values():
        assert engine.served == sorted(engine.served)  # nobody was answered by new weights, and then by old ones


async def test_a_checkpoint_that_does_not_fit_touches_nothing(cluster):
    with pytest.raises(InvalidCheckpoint, match="/elsewhere does not fit") as caught:
        await cluster.change("/elsewhere")
    assert caught.value.details["differences"] == ["missing: w"]
    assert {method for _, method in cluster.calls} == {"check_weights"}
    assert cluster.versions() == {"a": 0, "b": 0, "c": 0} and cluster.recorded is None


async def test_a_checkpoint_that_is_not_the_same_everywhere_is_refused(cluster):
    cluster.engines["b"].disk["/new"] = "another"
    with pytest.raises(InvalidCheckpoint, match="not the same for all replicas: they see another, hash of /new"):
        await cluster.change()
    assert cluster.versions() == {"a": 0, "b": 0, "c": 0}


async def test_a_checkpoint_that_fits_and_fails_takes_down_one_replica_and_no_more(cluster):
    failing, loading = cluster.engines["a"], asyncio.Event()
    cluster.before_call = lambda name, method: method == "prepare_weights" and loading.set()
    changing = asyncio.create_task(cluster.change("/bad"))
    await loading.wait()
    await asyncio.sleep(0.005)
    waiting = asyncio.create_task(failing.read())
    with pytest.raises(SelfTestFailed, match="contradicts itself"):
        await changing
    assert "could not be loaded" in cluster.left["a"] and len(cluster.left) == 1
    with pytest.raises(TeacherUnavailable, match="the replica leaves"):
        await cluster.sides["a"].follow()
    await asyncio.sleep(0.05)
    assert failing.held and not waiting.done()  # nobody is answered by what may be half of each
    waiting.cancel()
    assert cluster.engines["b"].loaded == cluster.engines["c"].loaded == []
    assert cluster.versions() == {"b": 0, "c": 0}
    cluster.start("a")
    assert (await cluster.change())[0].version == 1
    await cluster.settled(1)


async def test_a_replica_that_fails_after_others_have_loaded_has_them_take_the_old_weights_back(cluster):
    def fail(name, method):
        if (name, method) == ("c", "prepare_weights"):
            cluster.engines["c"].disk["/new"] = "written anew meanwhile"

    cluster.before_call = fail
    with pytest.raises(InvalidCheckpoint, match="it must stay"):
        await cluster.change()
    assert cluster.engines["a"].loaded == cluster.engines["b"].loaded == ["/new", "/old"]
    assert cluster.engines["c"].loaded == [] and not cluster.left
    assert cluster.versions() == {"a": 0, "b": 0, "c": 0} and cluster.recorded is None


async def test_a_replica_that_is_lost_ahead_of_the_others_ends_the_change(cluster):
    cluster.engines["a"].load_s = 5
    changing = asyncio.create_task(cluster.change())
    await asyncio.sleep(0.03)
    cluster.kill("a")
    with pytest.raises(TeacherUnavailable, match="replica a was lost while it loaded /new; the others have not begun"):
        await changing
    assert cluster.versions() == {"b": 0, "c": 0}


async def test_a_replica_that_is_lost_behind_another_does_not_stop_it_and_starts_again_with_the_new_weights(cluster):
    cluster.engines["b"].load_s = 5
    changing = asyncio.create_task(cluster.change())
    await asyncio.sleep(0.2)  # longer than a replica waits without a word
    assert cluster.engines["a"].held and cluster.engines["c"].held
    cluster.kill("b")
    assert (await changing)[1] == {"a": 1, "c": 1}
    cluster.start("b")
    assert cluster.versions() == {"a": 1, "b": 1, "c": 1}


async def test_a_dead_replica_that_is_still_listed_is_not_waited_for(cluster, monkeypatch):
    monkeypatch.setattr(cluster, "running", lambda: tuple(sorted({*cluster.engines, "dead"} - gone)))
    gone = set()
    asyncio.get_running_loop().call_later(0.05, gone.add, "dead")
    assert (await cluster.change())[1] == {"a": 1, "b": 1, "c": 1}


async def test_a_replica_that_comes_while_others_load_is_taken_along(cluster):
    for engine in cluster.engines.values():
        engine.load_s = 0.05
    changing = asyncio.create_task(cluster.change())
    await asyncio.sleep(0.07)
    cluster.start("d")
    assert (await changing)[1] == {"a": 1, "b": 1, "c": 1, "d": 1}
    assert cluster.engines["d"].loaded == ["/new"]


async def test_a_replica_that_was_starting_all_the_while_finds_the_record_by_itself(cluster):
    engine = cluster.start("d")
    cluster.engines.pop("d")  # up, and not among the running ones
    await cluster.change()
    assert engine.weights == OLD
    cluster.engines["d"] = engine
    await cluster.settled(1)


async def test_a_replica_that_hears_of_newer_weights_looks_at_once(cluster, monkeypatch):
    monkeypatch.setattr(replica_weights, "_LOOK_S", 60)
    engine = cluster.start("d")
    await asyncio.sleep(0.03)  # it has begun to wait for its next look
    cluster.recorded = NEW
    cluster.sides["d"].look()
    async with asyncio.timeout(1):
        while engine.weights != NEW:
            await asyncio.sleep(0.002)


@pytest.mark.parametrize("when", ["one has prepared", "all have prepared", "it is recorded"])
async def test_when_the_one_who_changes_them_dies_the_replicas_go_by_the_record(cluster, when, monkeypatch):
    """Killed: nothing of it runs any more, no `finally` either."""
    reached = asyncio.Event()

    async def die(*args):
        reached.set()
        await asyncio.sleep(3600)

    async def commit(weights, model):
        if when == "it is recorded":
            cluster.recorded = weights
        await die()

    if when == "one has prepared":
        cluster.before_call = lambda name, method: method == "prepare_weights" and name == "b" and reached.set()
        cluster.engines["b"].load_s = cluster.engines["c"].load_s = 0.05
    monkeypatch.setattr(weight_change, "_follow", die)
    changing = asyncio.create_task(cluster.change(commit=commit))
    await reached.wait()
    monkeypatch.setattr(cluster, "call", die)  # none of its calls arrives
    waiting = [asyncio.create_task(engine.read()) for engine in cluster.engines.values() if engine.held]
    assert waiting
    version = 1 if when == "it is recorded" else 0
    await asyncio.sleep(0.1)
    if when != "it is recorded":
        assert not any(read.done() for read in waiting)  # it might yet be heard of
    await cluster.settled(version)
    assert set(await asyncio.gather(*waiting)) == {version}
    assert not cluster.left
    changing.cancel()
    monkeypatch.undo()
    monkeypatch.setattr(weight_change, "POLL_S", 0.002)
    assert (await cluster.change("/newer"))[0].version == version + 1


async def test_reads_that_go_on_until_the_deadline_leave_the_old_weights(cluster):
    reading = asyncio.create_task(cluster.engines["b"].read(0.5))
    await asyncio.sleep(0)
    with pytest.raises(DeadlineExceeded):
        await cluster.change(timeout_s=0.1)
    assert cluster.versions() == {"a": 0, "b": 0, "c": 0} and cluster.recorded is None
    assert await asyncio.gather(*(engine.read() for engine in cluster.engines.values())) == [0, 0, 0]
    assert await reading == 0


async def test_a_load_that_is_late_is_finished_and_taken_back(cluster):
    cluster.engines["a"].load_s = 0.3
    with pytest.raises(DeadlineExceeded):
        await cluster.change(timeout_s=0.1)
    assert cluster.engines["a"].loaded == ["/new", "/old"] and not cluster.left
    await cluster.settled(0)


async def test_a_record_that_cannot_be_written_leaves_what_it_says(cluster):
    async def fail(weights, model):
        raise TeacherUnavailable("the store is gone")

    async def write_and_fail(weights, model):
        cluster.recorded = weights
        raise TeacherUnavailable("no answer")

    for commit, version in ((fail, 0), (write_and_fail, 1)):
        with pytest.raises(TeacherUnavailable):
            await cluster.change(commit=commit)
        assert cluster.versions() == dict.fromkeys("abc", version)


async def test_a_caller_who_leaves_does_not_stop_a_replica_halfway(cluster):
    preparing = asyncio.create_task(cluster.sides["a"].prepare(NEW, 5))
    await asyncio.sleep(0.005)
    preparing.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await preparing
    assert cluster.engines["a"].loaded == [] and cluster.engines["a"].held
    await asyncio.sleep(0.05)
    assert cluster.engines["a"].loaded == ["/new"]
    await cluster.settled(0)  # nobody came back for it
    assert cluster.engines["a"].loaded == ["/new", "/old"]


async def test_a_second_change_waits_for_what_is_prepared_already(cluster):
    await cluster.sides["a"].prepare(Weights(1, "/newer", "hash of /newer"), 5)  # by one who has died
    weights, served = await cluster.change()
    assert (weights, served) == (NEW, {"a": 1, "b": 1, "c": 1})
    assert cluster.engines["a"].loaded == ["/newer", "/old", "/new"]


async def test_a_replica_whose_recorded_weights_are_gone_leaves(cluster):
    cluster.recorded = Weights(1, "/gone", "hash of /gone")
    async with asyncio.timeout(1):
        while len(cluster.left) < 3:
            await asyncio.sleep(0.005)
    assert "version 1 of the weights, which is served, cannot be loaded: /gone does not fit" in cluster.left["a"]


async def test_a_record_that_cannot_be_read_changes_nothing(cluster, monkeypatch):
    def fail():
        raise RuntimeError("the store is gone")

    side, engine = cluster.sides["a"], cluster.engines["a"]
    await side.prepare(NEW, 5)
    monkeypatch.setattr(side, "_recorded", fail)
    await asyncio.sleep(0.3)
    assert engine.held  # whether these weights are served cannot be known
    monkeypatch.setattr(side, "_recorded", lambda: NEW)
    assert await engine.read() == 1


async def test_nobody_is_answered_by_old_weights_once_anybody_was_by_new_ones(cluster):
    """Reads all the while, over all replicas; changes that succeed, fail and are late; replicas that die between."""
    stop, versions = asyncio.Event(), []

    async def read(number):
        while not stop.is_set():
            for name, engine in list(cluster.engines.items()):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.02):
                        version = await engine.read((number + 1) / 1000)
                        if cluster.engines.get(name) is engine:  # no read of one that was killed
                            versions.append(version)
            await asyncio.sleep(0)

    reading = [asyncio.create_task(read(number)) for number in range(5)]
    for path, timeout_s in [("/new", 2), ("/bad", 2), ("/newer", 0.001), ("/elsewhere", 2), ("/new", 2), ("/newer", 2)]:
        with contextlib.suppress(ScoringError):
            await cluster.change(path, timeout_s)
        await asyncio.sleep(0.06)
        cluster.kill(min(cluster.engines, key=lambda name: (name in cluster.left, name)))
        for name in "abc":
            if name not in cluster.engines:
                cluster.start(name)
    stop.set()
    await asyncio.gather(*reading)
    await cluster.settled(3)
    assert versions == sorted(versions) and set(versions) == {0, 1, 2, 3}
