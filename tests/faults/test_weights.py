"""A change of weights in a real service while its processes are killed and stopped: `make test-faults`.

A stopped worker keeps its replica from loading, for as long as a test wants it; that is how something strikes halfway.
"""

import contextlib
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import psutil
import pytest
import ray
from ray import serve

from deployments import membership
from deployments.actor import NAMESPACE
from deployments.app import build_app
from deployments.client import ScoringClient
from deployments.config import AppConfig
from deployments.pinning import pinned
from deployments.router import APP_NAME
from scoring import MatrixBatch
from scoring.errors import DeadlineExceeded, TeacherUnavailable, WrongEngineAnswer
from scoring.http_client import HttpScoringClient
from tests.faults.load import make_batches, right_answers
from tests.processes import workers
from tests.serve_process import ServeProcess, two_replicas_of
from tests.weights import VersionedLoad, by_actor, by_client, changed_checkpoint

LIMIT = 3e-5
WHOLE_S = 120.0
READS = list(make_batches(1, 2048, 0)[0])


@pytest.fixture(scope="module")
def service(tiny_path, tmp_path_factory):
    service = ServeProcess(tmp_path_factory.mktemp("service"), {"teachers": {"default": two_replicas_of(tiny_path)}})
    with service.connected():
        service.wait_for_replicas(2)
        yield service


@pytest.fixture(scope="module")
def client(service):
    with ScoringClient() as client:
        yield client


@pytest.fixture(scope="module")
def truth(tiny_path, tiny_model, other_tiny_path, other_tiny_model):
    """The right answers to `READS`, by the folder of the weights."""
    models = {str(tiny_path): tiny_model, str(other_tiny_path): other_tiny_model}
    return {path: right_answers(model, READS) for path, model in models.items()}


@pytest.fixture
def load(service, client):
    with HttpScoringClient(service.url) as http:
        actor = ray.get_actor(APP_NAME, namespace=NAMESPACE)
        load = VersionedLoad({"client": by_client(client), "http": by_client(http), "actor": by_actor(actor)}, READS)
        load.wait_for(1)
        yield load
        load.stop()


@pytest.fixture
def other(client, tiny_path, other_tiny_path):
    """The folder that is not served now."""
    served = client.teachers()["default"]["weights"]
    return str(other_tiny_path if served == str(tiny_path) else tiny_path)


def handle():
    return serve.get_deployment_handle("Teacher-default", APP_NAME)


def placements():
    """Where each replica runs, in the order in which they prepare weights: the first one goes ahead."""
    found = handle().broadcast("placement").results(timeout_s=30)
    return sorted(found, key=lambda place: place["replica"])


def worker_of(place):
    (worker,) = workers(psutil.Process(place["pid"]))
    return worker


@contextlib.contextmanager
def stopped(process):
    process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(psutil.Error):
            process.send_signal(signal.SIGCONT)


def wait_for_versions(client, service, *versions):
    """Wait until the replicas that run, in any order, serve these versions."""
    deadline = time.monotonic() + WHOLE_S
    found = None
    while time.monotonic() < deadline:
        with contextlib.suppress(Exception):
            service.wait_for_replicas(len(versions))
            found = [info["weight_version"] for info in handle().broadcast("info").results(timeout_s=10)]
            if sorted(found) == sorted(versions):
                return
        time.sleep(0.3)
    raise AssertionError(f"the replicas serve {found}, not {versions}\n{service.end_of_log()}")


def check_each_replica(right):
    """Each replica by itself scores so."""
    for replica in membership.members(handle()):
        scores, _ = (
            pinned(handle(), replica, "read_matrix").remote(MatrixBatch.from_reads(READS), 60).result(timeout_s=60)
        )
        for score, due in zip(scores, right, strict=True):
            np.testing.assert_allclose(score.logprobs, due, atol=LIMIT, rtol=0)


def served_now(client):
    info = client.teachers()["default"]
    return info["weight_version"], info["weights"]


def test_weights_that_fit_and_give_no_numbers_take_down_one_replica_and_are_never_served(
    service, client, load, truth, tiny_path, tmp_path
):
    def change(tensors):
        tensors["model.norm.weight"][3] = float("nan")

    version, path = served_now(client)
    first, second = (psutil.Process(place["pid"]) for place in placements())
    with pytest.raises(WrongEngineAnswer, match="NaN"):
        client.update_weights("default", changed_checkpoint(tmp_path / "nan", tiny_path, change))
    assert not psutil.wait_procs([first], timeout=10)[1]
    wait_for_versions(client, service, version, version)
    assert second.is_running()
    load.wait_for(1)
    load.stop()
    load.check({version: truth[path]}, LIMIT)


def test_a_replica_that_is_killed_behind_another_starts_again_with_the_new_weights(service, client, load, truth, other):
    version, path = served_now(client)
    last = placements()[-1]
    with stopped(worker_of(last)), ThreadPoolExecutor() as threads:
        changing = threads.submit(client.update_weights, "default", other)
        time.sleep(3)
        assert not changing.done()
        psutil.Process(last["pid"]).kill()
        assert changing.result(60) == version + 1
    load.wait_for(3)
    load.stop()
    load.check({version: truth[path], version + 1: truth[other]}, LIMIT)
    wait_for_versions(client, service, version + 1, version + 1)
    check_each_replica(truth[other])


def test_a_replica_that_is_killed_ahead_of_the_others_leaves_the_old_weights(service, client, load, truth, other):
    version, path = served_now(client)
    first = placements()[0]
    with stopped(worker_of(first)), ThreadPoolExecutor() as threads:
        changing = threads.submit(client.update_weights, "default", other)
        time.sleep(3)
        psutil.Process(first["pid"]).kill()
        with pytest.raises(TeacherUnavailable, match="was lost while it loaded"):
            changing.result(60)
    load.wait_for(3)
    load.stop()
    load.check({version: truth[path]}, LIMIT)
    wait_for_versions(client, service, version, version)
    check_each_replica(truth[path])


def test_when_the_ingress_is_killed_halfway_the_old_weights_are_served(service, client, truth, other):
    version, path = served_now(client)
    last = placements()[-1]
    with stopped(worker_of(last)), ThreadPoolExecutor() as threads:
        changing = threads.submit(client.update_weights, "default", other)
        time.sleep(3)
        waiting = threads.submit(client.read_matrix, READS, timeout_s=60)
        (ingress,) = service.processes("ray::ServeReplica:teacher-scoring:Ingress")
        ingress.kill()
        with pytest.raises(TeacherUnavailable):
            changing.result(60)
        worker_of(last).send_signal(signal.SIGCONT)
        for score, right in zip(waiting.result(), truth[path], strict=True):
            assert score.meta.weight_version == version
            np.testing.assert_allclose(score.logprobs, right, atol=LIMIT, rtol=0)
    wait_for_versions(client, service, version, version)
    check_each_replica(truth[path])
    assert client.update_weights("default", other) == version + 1
    check_each_replica(truth[other])


def test_a_caller_that_is_killed_does_not_stop_a_change(service, client, truth, other):
    version, _ = served_now(client)
    code = (
        "from deployments import ScoringClient\n"
        "print('asking', flush=True)\n"
        f"ScoringClient().update_weights('default', {other!r})\n"
    )
    with stopped(worker_of(placements()[-1])):
        caller = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        caller.stdout.readline()
        time.sleep(6)
        assert caller.poll() is None
        caller.kill()
        caller.wait()
    wait_for_versions(client, service, version + 1, version + 1)
    check_each_replica(truth[other])


def test_a_deadline_that_passes_leaves_the_old_weights(service, client, truth, other):
    version, path = served_now(client)
    worker = worker_of(placements()[0])
    with stopped(worker), ThreadPoolExecutor() as threads:
        changing = threads.submit(client.update_weights, "default", other, timeout_s=1.0)
        time.sleep(4)
        worker.send_signal(signal.SIGCONT)
        with pytest.raises(DeadlineExceeded):
            changing.result(60)
    wait_for_versions(client, service, version, version)
    check_each_replica(truth[path])


def test_weights_change_while_a_replica_starts(service, client, load, truth, other):
    version, path = served_now(client)
    psutil.Process(placements()[0]["pid"]).kill()
    time.sleep(2)
    assert client.update_weights("default", other) == version + 1
    wait_for_versions(client, service, version + 1, version + 1)
    load.wait_for(2)
    load.stop()
    load.check({version: truth[path], version + 1: truth[other]}, LIMIT)
    check_each_replica(truth[other])


def test_a_replica_does_not_start_with_files_that_were_changed_since(service, client, truth, other, tmp_path):
    folder = shutil.copytree(other, tmp_path / "latest")
    version = client.update_weights("default", folder)
    served = client.teachers()["default"]["checkpoint"]
    unserved = next(path for path in truth if path != other)
    shutil.copy(f"{unserved}/model.safetensors", folder / "model.safetensors")
    psutil.Process(placements()[0]["pid"]).kill()
    deadline = time.monotonic() + WHOLE_S
    while f"where version {version} of the weights was {served}" not in service.log.read_text(errors="replace"):
        assert time.monotonic() < deadline, service.end_of_log()
        time.sleep(0.5)
    score = client.read_matrix(READS)[0]  # by the one that is left
    assert (score.meta.weight_version, score.meta.checkpoint) == (version, served)
    assert client.update_weights("default", unserved) == version + 1
    wait_for_versions(client, service, version + 1, version + 1)
    check_each_replica(truth[unserved])


@pytest.mark.timeout(400)
def test_a_redeploy_keeps_the_weights_unless_it_brings_another_model(
    service, client, truth, other, tiny_path, other_tiny_path, tmp_path
):
    version = client.update_weights("default", other)

    def deploy(path, **changes):
        config = AppConfig(teachers={"default": two_replicas_of(path) | changes})
        serve.run(build_app(config), name=APP_NAME, route_prefix="/")

    deploy(tiny_path, max_candidates=512)
    wait_for_versions(client, service, version, version)
    check_each_replica(truth[other])
    model = shutil.copytree(other_tiny_path, tmp_path / "another-model")
    deploy(model)
    wait_for_versions(client, service, version + 1, version + 1)
    check_each_replica(truth[str(other_tiny_path)])
    assert httpx.get(f"{service.url}/v1/teachers", timeout=10).json()["teachers"]["default"]["model"] == str(model)
    assert client.update_weights("default", tiny_path) == version + 2
    check_each_replica(truth[str(tiny_path)])
