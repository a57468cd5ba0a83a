"""Leases of cores, over real processes that die."""

import os
import signal
import subprocess
import sys

import pytest

from deployments.cores import lease_cores

HOLD = (
    "import sys, time; from pathlib import Path; from deployments.cores import lease_cores; "
    "lease = lease_cores(int(sys.argv[2]), sys.argv[3], Path(sys.argv[1])); "
    "print(*lease.cores, lease.sharers, flush=True); time.sleep(600)"
)


@pytest.fixture
def holder(tmp_path):
    """Starts processes that hold a lease; each is (process, cores, sharers)."""
    started = []

    def hold(count=1, teacher="default"):
        process = subprocess.Popen(
            [sys.executable, "-c", HOLD, str(tmp_path), str(count), teacher], stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        *cores, sharers = map(int, process.stdout.readline().split())
        return process, tuple(cores), sharers

    yield hold
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def test_each_replica_gets_cores_of_its_own_until_none_is_left(holder):
    allowed = sorted(os.sched_getaffinity(0))
    leases = [holder() for _ in allowed]
    assert sorted(cores for _, cores, _ in leases) == [(core,) for core in allowed]
    assert [sharers for *_, sharers in leases] == [0] * len(allowed)
    _, cores, sharers = holder()
    assert cores[0] in allowed and sharers == 1


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_a_teachers_own_core_is_shared_with_it_last(holder):
    _, own, _ = holder(teacher="math")
    others = [cores for _ in range(len(os.sched_getaffinity(0)) - 1) for _, cores, _ in [holder(teacher="default")]]
    assert holder(teacher="math")[1:] == (others[0], 1)
    assert holder(teacher="default")[1:] == (own, 1)


def test_the_cores_of_a_killed_replica_are_free_at_once(holder):
    leases = [holder() for _ in os.sched_getaffinity(0)]
    process, cores, _ = leases[-1]
    process.send_signal(signal.SIGKILL)
    process.wait()
    _, again, sharers = holder()
    assert (again, sharers) == (cores, 0)


def test_an_engine_of_several_cores_gets_them_together(holder):
    allowed = sorted(os.sched_getaffinity(0))
    _, cores, _ = holder(len(allowed))
    assert cores == tuple(allowed)


def test_engines_of_different_sizes_do_not_overlap_unseen(holder):
    _, cores, _ = holder(len(os.sched_getaffinity(0)))
    _, (core,), sharers = holder(1)
    assert core in cores and sharers == 1


@pytest.mark.parametrize("count", [0, 10_000])
def test_more_cores_than_the_node_allows_is_an_error(count, tmp_path):
    with pytest.raises(ValueError, match=f"cpu_cores is {count}; this process may use"):
        lease_cores(count, "default", tmp_path)
