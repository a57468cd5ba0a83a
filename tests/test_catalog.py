"""What a Router knows of the teachers, while the ingress that it asks is slow or changes its mind."""

import asyncio

import pytest

from deployments.catalog import Catalog
from deployments.replica_calls import now
from deployments.router import Router
from scoring.errors import TeacherUnavailable


@pytest.fixture
def asked(monkeypatch):
    """The calls of the ingress, as (method, future of its answer)."""
    asked: list[tuple[str, asyncio.Future]] = []

    async def call(self, method, *args, timeout_s):
        asked.append((method, asyncio.get_running_loop().create_future()))
        return await asked[-1][1]

    monkeypatch.setattr("deployments.catalog._PATIENCE_S", 0.02)
    monkeypatch.setattr("deployments.catalog._FRESH_S", 0.05)
    monkeypatch.setattr(Catalog, "_call", call)
    return asked


async def known(catalog: Catalog, asked: list) -> None:
    """Have the catalog know "old", no longer freshly."""
    found = asyncio.create_task(catalog.find(now() + 1))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    asked[0][1].set_result({"is": "old"})
    assert await found == {"is": "old"}
    await asyncio.sleep(0.06)


async def test_an_answer_that_comes_after_patience_has_run_out_is_kept(asked):
    catalog = Catalog("app")
    await known(catalog, asked)
    assert await catalog.find(now() + 1) == {"is": "old"}
    asked[1][1].set_result({"is": "new"})
    await asyncio.sleep(0.01)
    assert await catalog.find(now() + 1) == {"is": "new"}
    assert len(asked) == 2


async def test_an_answer_from_before_a_change_does_not_undo_it(asked, monkeypatch):
    monkeypatch.setattr("deployments.catalog._PATIENCE_S", 5.0)
    catalog = Catalog("app")
    await known(catalog, asked)
    finding = asyncio.create_task(catalog.find(now() + 1))
    changing = asyncio.create_task(catalog.change("add_adapter", timeout_s=1))
    await asyncio.sleep(0.01)
    answers = dict(asked[1:])
    answers["add_adapter"].set_result({"is": "changed"})
    await changing
    answers["catalog"].set_result({"is": "old"})
    assert await finding == {"is": "changed"}
    assert await catalog.find(now() + 1) == {"is": "changed"}


async def test_without_any_answer_there_is_an_error_at_the_deadline(asked):
    with pytest.raises(TeacherUnavailable, match="the ingress of application 'app' did not answer in time"):
        await Catalog("app").find(now() + 0.02)


async def test_replicas_are_named_by_their_teacher_whichever_name_is_asked_first(monkeypatch):
    made = []
    monkeypatch.setattr("deployments.router.Replicas", lambda *args: made.append(args))
    catalog = {"deployments": {"default": "Teacher-default", "judge": "Teacher-default"}, "without_room": {}}
    router = Router("app", catalog)
    lanes = router.with_catalog({**catalog, "without_room": {"default": "as it was"}})._lanes_of("judge", catalog)
    assert router._lanes_of("default", catalog) is lanes
    ((_, teacher, deployment, why_none),) = made
    assert (teacher, deployment, why_none("default")) == ("default", "Teacher-default", "")
