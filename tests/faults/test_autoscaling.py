"""A teacher that grows from one replica to three and shrinks again while it is asked: `make test-faults`.

Run by itself: a process that has been connected to one cluster keeps Serve's view of it.
"""

import time

import pytest

from deployments.client import ScoringClient
from scoring.http_client import HttpScoringClient
from tests.faults.load import Load, make_batches, right_answers
from tests.serve_process import ServeProcess, two_replicas_of

LIMIT = 3e-5
PATIENCE_S = 240  # three engines start on two cores that are busy


@pytest.fixture(scope="module")
def service(tiny_path, tmp_path_factory):
    teacher = two_replicas_of(tiny_path) | {
        "autoscaling": {
            "max_replicas": 3,
            "target_outstanding_tokens": 300,  # two of the batches under way ask for three replicas
            "look_back_period_s": 3,
            "upscale_delay_s": 2,
            "downscale_delay_s": 5,
        },
    }
    del teacher["num_replicas"]
    service = ServeProcess(tmp_path_factory.mktemp("service"), {"teachers": {"default": teacher}})
    with service.connected():
        yield service


@pytest.mark.timeout(900)
def test_replicas_that_come_and_go_lose_no_read(service, tiny_model, capsys):
    batches = make_batches(4, 2048, seed=1)
    truth = [right_answers(tiny_model, batch) for batch in batches]
    with ScoringClient() as client, HttpScoringClient(service.url) as http:

        def by(asked):
            return lambda batch, timeout_s: [s.logprobs for s in asked.read_matrix(batch, timeout_s=timeout_s)]

        def now_and_then(batch, timeout_s):
            time.sleep(1)
            return by(client)(batch, timeout_s)

        def wait_for(replicas, *loads):
            started = time.monotonic()
            while client.teachers()["default"]["replicas"] != replicas:
                assert time.monotonic() < started + PATIENCE_S, f"not {replicas} replicas\n{service.end_of_log()}"
                assert not any(load.wrong or load.failed for load in loads), [(x.wrong, x.failed) for x in loads]
                time.sleep(0.5)
            return time.monotonic() - started

        assert client.teachers()["default"]["replicas"] == 1
        trickle = Load({"now and then": now_and_then}, batches, truth, LIMIT)
        heavy = Load({f"client {i}": by(client) for i in range(3)} | {"http": by(http)}, batches, truth, LIMIT)
        try:
            grown = wait_for(3, trickle, heavy)
            time.sleep(5)
            heavy.stop()
            shrunk = wait_for(1, trickle)
            time.sleep(2)
        finally:
            heavy.stop()
            trickle.stop()
    with capsys.disabled():
        print(f"\nthree replicas after {grown:.0f} s, one {shrunk:.0f} s later; {heavy.answered}, {trickle.answered}")
    for load in (heavy, trickle):
        assert not load.wrong and not load.failed, (load.wrong, load.failed)
        assert all(load.answered.values())
