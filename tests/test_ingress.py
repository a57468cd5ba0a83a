"""How the ingress adds adapters and takes them back, over replicas that are stand-ins."""

import asyncio
import copy

import pytest

from deployments.ingress import Ingress, _Readiness
from deployments.router import Router
from scoring import LabelRead
from scoring.adapters import Adapter
from scoring.errors import InvalidAdapter, TeacherUnavailable, UnknownTeacher
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
    ingress._app_name, ingress._changing = "app", asyncio.Lock()
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
