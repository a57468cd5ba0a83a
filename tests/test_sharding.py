"""The plan of a batch over replicas, as properties."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scoring.sharding import plan

tokens = st.integers(0, 5000)
costs = st.lists(st.integers(1, 5000), max_size=60)
loads = st.dictionaries(st.sampled_from("abcdefgh"), st.integers(0, 20_000), min_size=1)


@st.composite
def grouped(draw, prompt=tokens):
    """Arguments of a plan of up to 12 groups; their reads lie anywhere in the batch."""
    groups = [g for g, reads in enumerate(draw(st.lists(st.integers(1, 10), max_size=12))) for _ in range(reads)]
    count = max(groups, default=-1) + 1
    groups = draw(st.permutations(groups))
    return {
        "costs": np.array([draw(tokens) for _ in groups], dtype=np.int64),
        "loads": draw(loads),
        "groups": np.array(groups, dtype=np.int64),
        "shared": np.array([draw(prompt) for _ in range(count)], dtype=np.int64),
        "homes": draw(st.dictionaries(st.integers(0, count - 1), st.sampled_from("abcdefghxyz"))) if count else {},
    }


def work(batch, shards):
    """Tokens that each replica has at the end: reads, and every prompt once where it is not held."""
    held = batch.get("homes", {})
    after = dict(batch["loads"])
    for name, shard in shards.items():
        after[name] += sum(int(batch["costs"][i]) for i in shard)
        if "groups" in batch:
            prompts = {int(batch["groups"][i]) for i in shard}
            after[name] += sum(int(batch["shared"][g]) for g in prompts if held.get(g) != name)
    return after


def whole(batch):
    """Tokens of each group where its prompt is not held."""
    sizes = [int(tokens) for tokens in batch["shared"]]
    for group, cost in zip(batch["groups"], batch["costs"], strict=True):
        sizes[group] += int(cost)
    return sizes


def holders(batch, shards, group):
    return {name for name, shard in shards.items() if (batch["groups"][shard] == group).any()}


def check_every_read_once_and_in_order(shards, count, loads):
    assert sorted(itertools.chain.from_iterable(s.tolist() for s in shards.values())) == list(range(count))
    assert set(shards) <= set(loads)
    for shard in shards.values():
        assert shard.dtype == np.int64 and len(shard) and (np.diff(shard) > 0).all()


@given(costs, loads)
def test_every_read_is_planned_exactly_once_and_in_order(costs, loads):
    check_every_read_once_and_in_order(plan(np.array(costs, dtype=np.int64), loads), len(costs), loads)


@given(grouped())
def test_every_read_of_a_group_is_planned_exactly_once_and_in_order(batch):
    check_every_read_once_and_in_order(plan(**batch), len(batch["costs"]), batch["loads"])


@given(grouped())
def test_the_same_plan_comes_from_the_same_input_in_any_order_of_replicas_and_homes(batch):
    turned = {**batch, **{name: dict(reversed(batch[name].items())) for name in ("loads", "homes")}}
    once, again = plan(**batch), plan(**turned)
    assert {k: v.tolist() for k, v in once.items()} == {k: v.tolist() for k, v in again.items()}


@given(costs, st.integers(1, 8))
def test_the_makespan_on_idle_replicas_is_at_most_the_mean_load_plus_the_largest_read(costs, replicas):
    costs = np.array(costs, dtype=np.int64)
    shards = plan(costs, dict.fromkeys(map(str, range(replicas)), 0))
    makespan = max((int(costs[s].sum()) for s in shards.values()), default=0)
    assert makespan <= costs.sum() / replicas + costs.max(initial=0)


@given(grouped())
def test_the_makespan_is_at_most_the_mean_load_plus_the_largest_group_or_what_waited_before(batch):
    after = work(batch, plan(**batch))
    mean = sum(after.values()) / len(after)
    assert max(after.values()) <= max(mean + max(whole(batch), default=0), *batch["loads"].values(), 0)


@given(st.lists(st.integers(1, 100), min_size=1, max_size=7), st.integers(1, 3))
def test_the_makespan_is_within_four_thirds_of_the_best_possible(costs, replicas):
    check_four_thirds(costs, replicas)


@given(st.lists(st.integers(1, 100), min_size=8, max_size=8))
def test_so_it_is_for_eight_reads_on_two_replicas(costs):
    check_four_thirds(costs, 2)


def check_four_thirds(costs, replicas):
    costs = np.array(costs, dtype=np.int64)
    shards = plan(costs, dict.fromkeys(map(str, range(replicas)), 0))
    best = min(
        max(sum(int(c) for c, at in zip(costs, where, strict=True) if at == r) for r in range(replicas))
        for where in itertools.product(range(replicas), repeat=len(costs))
    )
    assert max(int(costs[s].sum()) for s in shards.values()) <= best * 4 / 3


@pytest.mark.parametrize("seed", range(5))
def test_five_reads_a_replica_are_planned_within_two_percent_of_the_lower_bound(seed):
    rng = np.random.default_rng(seed)
    lengths = np.minimum(rng.lognormal(6.5, 0.5, 5000) + rng.lognormal(8, 0.5, 5000), 32_768).astype(np.int64)
    shards = plan(lengths, {f"{i:04}": 0 for i in range(1000)})
    lower_bound = max(lengths.sum() / 1000, lengths.max())
    assert max(int(lengths[s].sum()) for s in shards.values()) <= 1.02 * lower_bound


@given(grouped())
def test_a_group_stays_whole_while_it_is_no_larger_than_the_mean_load(batch):
    shards = plan(**batch)
    least = sum(batch["loads"].values()) + batch["costs"].sum()  # before any prompt is counted
    for group, size in enumerate(whole(batch)):
        if size <= least / len(batch["loads"]):
            assert len(holders(batch, shards, group)) == 1


@given(grouped(prompt=st.integers(25_001, 60_000)))
def test_a_group_stays_whole_while_its_reads_are_shorter_than_two_of_its_prompts(batch):
    shards = plan(**batch)
    assert all(len(holders(batch, shards, group)) == 1 for group in range(len(batch["shared"])))


def test_a_group_is_cut_where_its_reads_are_two_of_its_prompts_long():
    for reads, holders in ((19, 1), (20, 2)):
        groups = np.zeros(reads, dtype=np.int64)
        shards = plan(np.full(reads, 10), dict.fromkeys("abcdefgh", 0), groups=groups, shared=np.array([100]))
        assert len(shards) == holders


def test_a_prompt_counts_where_it_is_processed():
    shards = plan(np.full(12, 10), {"a": 0, "b": 0}, groups=np.arange(12), shared=np.array([100] + [0] * 11))
    assert [len(shard) for shard in shards.values()] == [1, 11]


def test_one_prompt_with_many_reads_is_shared_out():
    batch = {
        "costs": np.full(64, 1000),
        "loads": dict.fromkeys("abcdefgh", 0),
        "groups": np.zeros(64, dtype=np.int64),
        "shared": np.array([500]),
    }
    assert work(batch, plan(**batch)) == dict.fromkeys("abcdefgh", 8500)


def test_groups_larger_than_the_mean_load_fill_the_replicas_evenly():
    rng = np.random.default_rng(0)
    batch = {
        "costs": rng.integers(500, 1500, 100 * 16),
        "loads": {f"{i:03}": 0 for i in range(200)},
        "groups": np.repeat(np.arange(100), 16),
        "shared": rng.integers(200, 400, 100),
    }
    after = work(batch, plan(**batch))
    pieces = sum(len(holders(batch, plan(**batch), group)) for group in range(100))
    assert max(after.values()) <= 1.15 * sum(after.values()) / 200  # a read is 12 % of the mean load
    assert pieces < 350  # of 1600 reads; 200 is the least


def test_a_prompt_goes_to_its_home():
    batch = {"costs": np.array([10, 10]), "groups": np.array([0, 1]), "shared": np.array([100, 100])}
    shards = plan(**batch, loads={"a": 0, "b": 0, "c": 50}, homes={0: "c", 1: "gone"})
    assert {name: shard.tolist() for name, shard in shards.items()} == {"a": [1], "c": [0]}


@given(st.lists(st.tuples(st.integers(1500, 2500), st.integers(0, 500)), min_size=12, max_size=30))
def test_every_prompt_stays_at_its_home_when_the_batch_comes_again(reads_and_prompts):
    lengths, prompts = np.array(reads_and_prompts, dtype=np.int64).T
    batch = {
        "costs": np.concatenate([lengths // 2, lengths - lengths // 2]),
        "loads": dict.fromkeys("abcd", 0),
        "groups": np.tile(np.arange(len(prompts)), 2),
        "shared": prompts,
    }
    homes = {g: holders(batch, plan(**batch), g) for g in range(len(prompts))}
    again = plan(**batch, homes={g: min(at) for g, at in homes.items()})
    assert {g: holders(batch, again, g) for g in homes} == homes
    assert all(len(at) == 1 for at in homes.values())


def test_a_home_that_is_too_full_is_left():
    batch = {"costs": np.full(9, 10), "groups": np.arange(9), "shared": np.full(9, 20)}
    loads = dict.fromkeys("abc", 0)
    shards = plan(**batch, loads=loads, homes=dict.fromkeys(range(9), "a"))
    after = work({**batch, "loads": loads, "homes": dict.fromkeys(range(9), "a")}, shards)
    assert len(shards["a"]) == 6 and max(after.values()) == 60  # 30 on average, and a group of 30 more


def test_a_group_that_is_cut_fills_its_home_first_and_pays_no_prompt_there():
    batch = {
        "costs": np.array([5000] + [100] * 60),  # the first read takes 5000 wherever it is
        "groups": np.array([0] + [1] * 60),
        "shared": np.array([0, 100]),
        "loads": {**dict.fromkeys("abcdefgh", 0), "d": 50},
    }
    shards = plan(**batch, homes={1: "d"})
    assert len(shards["d"]) == 49 and sorted(map(len, shards.values())) == [1, 11, 49]


def test_a_loaded_replica_gets_less():
    shards = plan(np.full(10, 100, dtype=np.int64), {"busy": 600, "idle": 0})
    assert (len(shards["busy"]), len(shards["idle"])) == (2, 8)


def test_no_replicas_is_an_error():
    with pytest.raises(ValueError, match="no replicas"):
        plan(np.array([1]), {})


@pytest.mark.parametrize(
    ("groups", "shared", "message"),
    [
        ([0], [5], "groups has 1 entries"),
        ([0, 2], [5, 5, 5], "every number from 0 up"),
        ([0, 1], [5], "2 groups need 2"),
    ],
)
def test_groups_that_do_not_belong_to_the_reads_are_an_error(groups, shared, message):
    with pytest.raises(ValueError, match=message):
        plan(np.array([1, 1]), {"a": 0}, groups=np.array(groups), shared=np.array(shared))
