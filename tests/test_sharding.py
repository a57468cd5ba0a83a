"""The plan of a batch over replicas, as properties."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scoring.sharding import plan

costs = st.lists(st.integers(1, 5000), max_size=60)
loads = st.dictionaries(st.sampled_from("abcdefgh"), st.integers(0, 20_000), min_size=1)


@given(costs, loads)
def test_every_read_is_planned_exactly_once_and_in_order(costs, loads):
    shards = plan(np.array(costs, dtype=np.int64), loads)
    assert sorted(itertools.chain.from_iterable(s.tolist() for s in shards.values())) == list(range(len(costs)))
    assert set(shards) <= set(loads)
    for shard in shards.values():
        assert len(shard) and (np.diff(shard) > 0).all()


@given(costs, loads)
def test_the_same_plan_comes_from_the_same_input_in_any_order_of_replicas(costs, loads):
    once = plan(np.array(costs, dtype=np.int64), loads)
    again = plan(np.array(costs, dtype=np.int64), dict(reversed(loads.items())))
    assert {k: v.tolist() for k, v in once.items()} == {k: v.tolist() for k, v in again.items()}


@given(costs, st.integers(1, 8))
def test_the_makespan_on_idle_replicas_is_at_most_the_mean_load_plus_the_largest_read(costs, replicas):
    costs = np.array(costs, dtype=np.int64)
    shards = plan(costs, dict.fromkeys(map(str, range(replicas)), 0))
    makespan = max((int(costs[s].sum()) for s in shards.values()), default=0)
    assert makespan <= costs.sum() / replicas + costs.max(initial=0)


@given(st.lists(st.integers(1, 100), min_size=1, max_size=7), st.integers(1, 3))
def test_the_makespan_is_within_four_thirds_of_the_best_possible(costs, replicas):
    costs = np.array(costs, dtype=np.int64)
    shards = plan(costs, dict.fromkeys(map(str, range(replicas)), 0))
    best = min(
        max(sum(int(c) for c, at in zip(costs, where, strict=True) if at == r) for r in range(replicas))
        for where in itertools.product(range(replicas), repeat=len(costs))
    )
    assert max(int(costs[s].sum()) for s in shards.values()) <= best * 4 / 3


def test_a_loaded_replica_gets_less():
    shards = plan(np.full(10, 100, dtype=np.int64), {"busy": 600, "idle": 0})
    assert (len(shards["busy"]), len(shards["idle"])) == (2, 8)


def test_no_replicas_is_an_error():
    with pytest.raises(ValueError, match="no replicas"):
        plan(np.array([1]), {})
