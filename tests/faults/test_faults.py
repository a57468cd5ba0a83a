"""Real processes of a real service, killed and stopped under a steady load: `make test-faults`, a quarter of an hour.

Each fault strikes several times, in an order drawn from a seed (`FAULTS_SEED`). Every read of a living caller must come
back right, or with a typed error, by its deadline; and the service must be whole again by itself.
"""

import os
import random
import signal
import subprocess
import sys
import time

import httpx
import numpy as np
import psutil
import pytest
import ray
from ray import serve

from deployments.actor import NAMESPACE
from deployments.client import ScoringClient
from deployments.router import APP_NAME
from scoring.http_client import HttpScoringClient
from tests.faults.load import Load, make_batches, right_answers
from tests.processes import engine_cores, workers
from tests.serve_process import ServeProcess, outstanding_tokens, two_replicas_of

VOCABULARY = 2048
LIMIT = 3e-5
TIMES = 2  # that each fault strikes
WHOLE_S = 180.0
SEED = int(os.environ.get("FAULTS_SEED", "0"))


def named(name):
    return lambda service: service.processes(name)


def of_each_replica(which):
    return lambda service: [process for replica in REPLICAS(service) for process in which(replica)]


REPLICAS = named("ray::ServeReplica:teacher-scoring:Teacher")
# What a whole service consists of, and how many of each.
WHOLE = {
    "replica": (REPLICAS, 2),
    "engine": (of_each_replica(engine_cores), 2),
    "worker": (of_each_replica(workers), 2),
    "actor": (named("ray::TeacherScoringActor"), 1),
    "ingress": (named("ray::ServeReplica:teacher-scoring:Ingress"), 1),
    "controller": (named("ray::ServeController"), 1),
    "proxy": (named("ray::ProxyActor"), 1),
}
FAULTS = [*(f"kill {kind}" for kind in WHOLE), "stop engine", "stop replica"]
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
STRIKES = [f"{name}, {time}" for time in range(1, TIMES + 1) for name in FAULTS]
random.Random(SEED).shuffle(STRIKES)


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
def batches(client, tiny_model):
    """Batches, and their answers by an undisturbed service, which are Hugging Face's."""
    batches = make_batches(6, VOCABULARY, SEED)
    truth = [[score.logprobs for score in client.read_matrix(batch)] for batch in batches]
    for batch, answers in zip(batches, truth, strict=True):
        for answer, right in zip(answers, right_answers(tiny_model, batch), strict=True):
            np.testing.assert_allclose(answer, right, atol=LIMIT, rtol=0)
    return batches, truth


@pytest.fixture(scope="module")
def http(service):
    with HttpScoringClient(service.url) as http:
        yield http


@pytest.fixture(scope="module")
def ways(service, client, http):
    """Every way in, as a function from a batch to its matrices."""

    def by_client(batch, timeout_s):
        return [score.logprobs for score in client.read_matrix(batch, timeout_s=timeout_s)]

    def by_http(batch, timeout_s):
        return [score.logprobs for score in http.read_matrix(batch, timeout_s=timeout_s)]

    def by_actor(batch, timeout_s):
        actor = ray.get_actor(APP_NAME, namespace=NAMESPACE)
        return ray.get(actor.read_matrix.remote(batch, timeout_s=timeout_s), timeout=timeout_s + 3)["logprobs"]

    return {"client": by_client, "http": by_http, "actor": by_actor}


def wait_until_whole(service, client, struck):
    """Two replicas with an engine each, an ingress, an actor, without the process that was struck."""
    started = time.monotonic()
    missing = "nothing was looked at"
    while time.monotonic() < started + WHOLE_S:
        missing = what_is_missing(service, client, struck)
        if not missing:
            return time.monotonic() - started
        time.sleep(0.5)
    raise AssertionError(f"not whole after {WHOLE_S:g} s: {missing}\n{service.end_of_log()}")


def what_is_missing(service, client, struck):
    if struck.is_running() and struck.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_STOPPED):
        return f"{struck.pid} still runs"
    for kind, (find, count) in WHOLE.items():
        if len(alive := [p for p in find(service) if p.status() != psutil.STATUS_STOPPED]) != count:
            return f"of {kind}: {len(alive)} processes"
    try:
        if httpx.get(f"{service.url}/ready", timeout=10).status_code != 200:
            return "/ready"
        if client.teachers()["default"]["replicas"] != 2:
            return "replicas"
        ray.get(ray.get_actor(APP_NAME, namespace=NAMESPACE).code_version.remote(), timeout=10)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("strike", STRIKES)
def test_a_fault_under_load_loses_nothing_and_mends_itself(service, client, batches, ways, strike, capsys):
    how, kind = strike.split(", ")[0].split()
    victim = random.Random(f"{SEED} {strike}").choice(WHOLE[kind][0](service))
    engines = set(WHOLE["engine"][0](service))
    load = Load(ways, *batches, LIMIT)
    try:
        time.sleep(2)
        victim.send_signal(SIGNALS[how])
        mended = wait_until_whole(service, client, victim)
        time.sleep(2)
    finally:
        load.stop()
        if victim.is_running() and victim.status() == psutil.STATUS_STOPPED:
            victim.kill()
    with capsys.disabled():
        print(f"\n{strike}: whole after {mended:.0f} s; batches answered {load.answered}, failed {load.failed}")
    assert not load.wrong, load.wrong
    assert all(load.answered.values())
    if kind in ("actor", "ingress", "controller", "proxy"):
        assert set(WHOLE["engine"][0](service)) == engines
    assert not load.failed  # one replica was alive throughout, and whoever asks tries again


def test_a_dead_engine_is_out_of_rotation_within_2_s(service, client):
    host = REPLICAS(service)[0]
    (victim,) = engine_cores(host)
    victim.kill()
    _, left = psutil.wait_procs([host], timeout=2)
    assert not left
    client.read_matrix(make_batches(1, VOCABULARY, SEED)[0])
    wait_until_whole(service, client, victim)


def test_a_killed_trainer_leaves_only_seconds_of_work(service, client):
    code = (
        "from deployments import ScoringClient\n"
        "from tests.faults.load import make_batches\n"
        "from scoring import MatrixBatch\n"
        f"reads = [read for batch in make_batches(400, {VOCABULARY}, 1) for read in batch]\n"
        "print('asking', flush=True)\n"
        "ScoringClient().read_matrix(reads)\n"
    )
    trainer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        assert trainer.stdout.readline() == b"asking\n"
        deadline = time.monotonic() + 30
        while not all(outstanding_tokens()):
            assert time.monotonic() < deadline and trainer.poll() is None
            time.sleep(0.1)
    finally:
        trainer.kill()
        trainer.wait()
    time.sleep(3)
    assert outstanding_tokens() == [0, 0]


def test_a_redeploy_under_load_loses_nothing(service, client, batches, ways, tiny_path):
    from deployments.app import build_app
    from deployments.config import AppConfig

    load = Load(ways, *batches, LIMIT)
    try:
        for changes in ({"max_candidates": 512}, {"max_candidates": 512, "num_replicas": 1}, {"num_replicas": 2}):
            config = AppConfig(teachers={"default": two_replicas_of(tiny_path) | changes})
            serve.run(build_app(config), name=APP_NAME, route_prefix="/")
            time.sleep(3)
    finally:
        load.stop()
    assert not load.wrong and not load.failed, (load.wrong, load.failed)
    assert all(load.answered.values())
    assert client.teachers()["default"]["max_candidates"] == 1024
