"""The simulated replicas of the benchmark, where a mistake would mislead."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.router_scale import POLICIES, Cluster, lower_bound, simulate


def test_a_replica_works_off_its_calls_in_turn_and_idles_between():
    cluster = Cluster(replicas=2, routers=2)
    assert cluster.send(0, 1, np.array([10, 5])).tolist() == [10, 15]
    assert cluster.send(1, 1, np.array([3])).tolist() == [18]
    assert cluster.outstanding().tolist() == [[[0, 15], [0, 3]], [[0, 1], [0, 1]]]
    cluster.go_on(16)
    assert cluster.outstanding()[0].tolist() == [[0, 0], [0, 3]]
    assert cluster.send(0, 1, np.array([2])).tolist() == [20]  # behind what is left
    assert cluster.send(0, 0, np.array([2])).tolist() == [18]  # at once


@given(st.lists(st.integers(1, 50), min_size=1, max_size=7), st.integers(1, 3))
def test_the_lower_bound_is_not_above_the_best_plan(costs, replicas):
    best = min(
        max(sum(c for c, at in zip(costs, where, strict=True) if at == r) for r in range(replicas))
        for where in itertools.product(range(replicas), repeat=len(costs))
    )
    assert lower_bound(np.array(costs), replicas) <= best


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_on_one_replica_every_policy_takes_the_same_time(policy):
    makespan, _ = simulate(policy, 0, routers=1, replicas=1, steps=8, kind="narrow")
    expected, _ = simulate(POLICIES["round-robin"], 0, routers=1, replicas=1, steps=8, kind="narrow")
    assert makespan == pytest.approx(expected)
