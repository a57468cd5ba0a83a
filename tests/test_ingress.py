"""How the ingress adds adapters and takes them back, over replicas that are stand-ins."""

import asyncio
import copy

import pytest

from deployments.ingress import Ingress, _Readiness
from deployments.router import Router
from scoring import LabelRead
from scoring.adapters import Adapter
from scoring.errors import DeadlineExceeded, InvalidAdapter, TeacherUnavailable, UnknownTeacher
from scoring.weights import Weights
from tests.stand_in_replicas import StandInReplica, StandInReplicas
from tests.stand_in_router import StandInRouter

LIMITS = {"max_batch_reads": 100, "max_batch_tokens": 10**6, "max_request_bytes": 10**6, "max_answer_bytes": 10**6}


class Replica(StandInReplica):
    """Loads adapters whose path is not "bad", which takes a while; remembers what it was brought."""

    def __init__(self) -> None:
        super().__init__()
        self.brought: list[Adapter] = []

    async def call(self, method, batch=None, timeout_s=None, trace_headers=None, adapters=None, version=None):
        if method != "read_labels":
            return await super().call(method, batch, timeout_s)
        (adapter,) = adapters.values()
        self.brought.append(adapter)
        await asyncio.sleep(0.05)
        if adapter.path == "bad":
            raise InvalidAdapter("is no adapter")
        return await StandInRouter().read_labels([LabelRead([0], [0])] * len(batch)), 0


@pytest.fixture
def replica(monkeypatch):
    replica = Replica()
    monkeypatch.setattr("deployments.router.Replicas", lambda *args: StandInReplicas(a=replica))
    return replica


@pytest.fixture
def saved(monkeypatch):
    saved = []
    monkeypatch.setattr("deployments.record.save", lambda app_name, document: saved.append(document))
    return saved


@pytest.fixture
def ingress(replica, saved):
    """The deployment's object, without the processes around it."""
    ingress = object.__new__(Ingress.func_or_class.__mro__[1])  # what Serve wraps
    ingress._app_name, ingress._changing, ingress._changes = "app", asyncio.Lock(), set()
    deployments = {"default": "Teacher-default"}
    ingress._catalog = {
        "default": "default",
        "deployments": deployments,
        "adapters": {},
        "limits": LIMITS,
        "admission_wait_s": 0.0,
    }
    ingress._router = Router("app", ingress._catalog, serves_many=True)
    ingress._restore_adapters({})
    return ingress


async def test_while_an_adapter_is_replaced_its_readers_are_answered_by_the_old_one(ingress, replica):
    await ingress.add_adapter("tone", "default", "good")
    failing = asyncio.create_task(ingress.add_adapter("tone", "default", "bad"))
    while len(replica.brought) < 2:
        await asyncio.sleep(0.001)
    await ingress._router.read_labels([LabelRead([1], [2], teacher="tone")])
    assert replica.brought[-1] == Adapter("good", 1)
    with pytest.raises(InvalidAdapter):
        await failing
    assert (await ingress.catalog())["adapters"] == {"tone": Adapter("good", 1)}


async def test_a_serial_that_a_replica_has_seen_is_recorded_even_if_the_adapter_is_refused(ingress, replica, saved):
    with pytest.raises(InvalidAdapter):
        await ingress.add_adapter("tone", "default", "bad")
    assert saved[-1] == {"adapters": {}, "last_serial": replica.brought[-1].serial}
    assert "tone" not in (await ingress.catalog())["deployments"]


async def test_a_change_that_cannot_be_recorded_is_not_made(ingress, monkeypatch):
    await ingress.add_adapter("tone", "default", "good")
    before = copy.deepcopy(await ingress.catalog())

    def fail(app_name, document):
        if document["adapters"] != {"tone": {"path": "good", "serial": 1, "deployment": "Teacher-default"}}:
            raise RuntimeError("the store is gone")

    monkeypatch.setattr("deployments.record.save", fail)
    for change in (
        ingress.add_adapter("new", "default", "good"),
        ingress.add_adapter("tone", "default", "other"),
        ingress.remove_adapter("tone"),
    ):
        with pytest.raises(TeacherUnavailable, match="could not be recorded, nothing was changed: the store is gone"):
            await change
        assert await ingress.catalog() == before


async def test_readiness_asks_one_read_of_all_that_share_replicas(ingress, replica):
    await ingress.add_adapter("tone", "default", "good")
    ingress._catalog["deployments"]["judge"] = "Teacher-default"
    asked = []

    async def read_labels(reads, timeout_s):
        asked.extend(read.teacher for read in reads)

    ingress._router.read_labels = read_labels
    readiness = _Readiness(lambda: ingress._router)
    assert await readiness.check(None) == dict.fromkeys(["default", "tone", "judge"], "ready")
    assert asked == ["default"]
    assert await readiness.check("tone") == {"tone": "ready"}
    assert asked == ["default", "tone"]


async def test_changes_at_once_take_turns(ingress, replica):
    adds = [ingress.add_adapter(f"tone-{i}", "default", "good") for i in range(5)]
    await asyncio.gather(*adds, ingress.add_adapter("tone-0", "default", "other"))
    assert sorted(adapter.serial for adapter in ingress._catalog["adapters"].values()) == [2, 3, 4, 5, 6]
    removed = [ingress.remove_adapter("tone-1") for _ in range(2)]
    outcomes = await asyncio.gather(*removed, return_exceptions=True)
    assert [isinstance(outcome, UnknownTeacher) for outcome in outcomes] == [False, True]


# Weights.


NEW = Weights(4, "/new", "0123456789abcdef")


@pytest.fixture
def changes(ingress, monkeypatch):
    """What `change_weights` was given, each with a future of what becomes of it; and the record of weights."""
    record = {("app", "Teacher-default"): (Weights(3, "/old", "fedcba9876543210"), "/model")}
    changes = []

    async def change_weights(replicas, path, last, commit, deadline):
        changes.append((path, last, commit, asyncio.get_running_loop().create_future()))
        return await changes[-1][-1]

    monkeypatch.setattr("deployments.ingress.change_weights", change_weights)
    monkeypatch.setattr("deployments.record.load_weights", lambda *key: record.get(key))
    monkeypatch.setattr("deployments.record.save_weights", lambda *args: record.update({args[:2]: args[2:]}))
    return changes, record


async def wait_for(changes, count):
    while len(changes) < count:
        await asyncio.sleep(0.001)


async def test_a_change_of_weights_knows_the_last_version_and_writes_the_record(ingress, changes):
    changes, record = changes
    ingress._catalog["deployments"]["judge"] = "Teacher-default"
    changing = asyncio.create_task(ingress.update_weights("judge", "/new", 5))
    await wait_for(changes, 1)
    path, last, commit, done = changes[0]
    assert (path, last) == ("/new", 3)
    await commit(NEW, "/model")
    assert record == {("app", "Teacher-default"): (NEW, "/model")}
    done.set_result((NEW, {"a": 4}))
    told = {"weight_version": 4, "checkpoint": NEW.checkpoint, "replicas": {"a": 4}}
    assert await changing == {"deployment": "Teacher-default"} | told


async def test_changes_of_weights_and_adapters_take_turns_until_the_deadline(ingress, changes, replica):
    changes, _ = changes
    first = asyncio.create_task(ingress.update_weights("default", "/new", 5))
    await wait_for(changes, 1)
    adding = asyncio.create_task(ingress.add_adapter("tone", "default", "good"))
    with pytest.raises(DeadlineExceeded, match="other changes were under way"):
        await ingress.update_weights("default", "/newer", 0.05)
    assert not adding.done() and not replica.brought
    second = asyncio.create_task(ingress.update_weights("default", "/newer", 5))
    changes[0][-1].set_exception(TeacherUnavailable("lost"))
    with pytest.raises(TeacherUnavailable, match="lost"):
        await first
    await adding
    await wait_for(changes, 2)
    changes[1][-1].set_result((NEW, {}))
    assert (await second)["weight_version"] == 4


async def test_a_change_of_weights_goes_on_when_its_caller_leaves(ingress, changes):
    changes, _ = changes
    changing = asyncio.create_task(ingress.update_weights("default", "/new", 5))
    await wait_for(changes, 1)
    changing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await changing
    _, _, commit, done = changes[0]
    await commit(NEW, "/model")
    assert ingress._changing.locked()
    done.set_result((NEW, {}))
    await asyncio.sleep(0.01)
    assert not ingress._changing.locked() and not ingress._changes


async def test_weights_that_cannot_be_recorded_are_said_to_be_so(ingress, changes, monkeypatch):
    changes, _ = changes

    def fail(*args):
        raise RuntimeError("the store is gone")

    monkeypatch.setattr("deployments.record.save_weights", fail)
    changing = asyncio.create_task(ingress.update_weights("default", "/new", 5))
    await wait_for(changes, 1)
    with pytest.raises(TeacherUnavailable, match="the weights of 'default' could not be recorded: the store is gone"):
        await changes[0][2](NEW, "/model")
    changing.cancel()


async def test_only_weights_of_teachers_can_be_changed(ingress, replica):
    await ingress.add_adapter("tone", "default", "good")
    for name in ("tone", "nobody"):
        with pytest.raises(UnknownTeacher, match=f"is '{name}'; the weights of default can be changed"):
            await ingress.update_weights(name, "/new", 5)
