"""The seam with Ray Serve's private parts: tests that fail loudly when it moves."""

import asyncio
import inspect
from types import SimpleNamespace

import pytest
import ray
from ray.serve._private.common import DeploymentID, ReplicaID
from ray.serve._private.request_router.pow_2_router import PowerOfTwoChoicesRequestRouter
from ray.serve.config import RequestRouterConfig

from deployments import membership, pinning

THEIRS = PowerOfTwoChoicesRequestRouter


def parameters(function):
    return [(p.name, p.kind.name) for p in inspect.signature(function).parameters.values()]


def test_what_is_overridden_still_has_the_form_it_was_written_for():
    assert parameters(THEIRS._choose_replica_for_request) == [
        ("self", "POSITIONAL_OR_KEYWORD"),
        ("pending_request", "POSITIONAL_OR_KEYWORD"),
        ("is_retry", "KEYWORD_ONLY"),
    ]
    assert parameters(THEIRS.update_replicas)[1:] == [("replicas", "POSITIONAL_OR_KEYWORD")]
    assert parameters(THEIRS.on_replica_actor_died)[1:] == [("replica_id", "POSITIONAL_OR_KEYWORD")]
    assert parameters(THEIRS._backoff)[1:] == [("attempt", "POSITIONAL_OR_KEYWORD")]
    assert isinstance(THEIRS.curr_replicas, property)
    for name in ("_choose_replica_for_request", "update_replicas", "on_replica_actor_died"):
        assert vars(pinning.PinnedRequestRouter)[name] is not getattr(THEIRS, name)


def test_serve_can_ship_the_router_by_value_and_it_still_speaks_to_this_process():
    shipped = RequestRouterConfig(request_router_class=pinning.PinnedRequestRouter).get_request_router_class()
    router = shipped.__new__(shipped)
    router._deployment_id = DeploymentID(name="Teacher-x", app_name="app-x")
    router._replicas = {ReplicaID(unique_id, router._deployment_id): None for unique_id in "ba"}
    router._publish()
    handle = SimpleNamespace(is_initialized=True, app_name="app-x", deployment_name="Teacher-x")
    assert membership.members(handle) == ("a", "b")


def test_a_pinned_call_gets_its_replica_or_an_error_at_once():
    router = pinning.PinnedRequestRouter.__new__(pinning.PinnedRequestRouter)
    router._deployment_id = DeploymentID(name="Teacher-x", app_name="app-x")
    router._replicas = {ReplicaID("a", router._deployment_id): "replica a"}

    def choose(target):
        request = SimpleNamespace(metadata=SimpleNamespace(session_id=f"pin:{target}"))
        return asyncio.run(router._choose_replica_for_request(request))

    assert choose("a") == "replica a"
    with pytest.raises(membership.ReplicaGone, match=r"replica b of .* is gone"):
        choose("b")


def test_another_ray_is_refused_with_a_sentence(monkeypatch):
    pinning.check_ray()
    monkeypatch.setattr(ray, "__version__", "2.61.0")
    with pytest.raises(RuntimeError, match=r"ray 2\.61\.0 is installed; .* was written against 2\.60\.x"):
        pinning.check_ray()
