"""Which replica holds which prompt."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from scoring.affinity import Affinity, find_groups
from scoring.batches import MatrixBatch
from scoring.reads import MatrixRead
from scoring.sharding import plan


def groups_of(*prompts):
    batch = MatrixBatch.from_reads([MatrixRead(prompt, [7, 8]) for prompt in prompts])
    return find_groups(batch.ids, batch.offsets, batch.prompt_lens)


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=3), max_size=20))
def test_reads_of_one_prompt_are_one_group_numbered_as_they_first_occur(prompts):
    groups = groups_of(*prompts)
    first = list(dict.fromkeys(map(tuple, prompts)))
    assert groups.of_read.tolist() == [first.index(tuple(prompt)) for prompt in prompts]
    assert groups.tokens.tolist() == [len(prompt) for prompt in first]
    assert len(set(groups.digests)) == len(groups.digests) == len(first)


def test_what_a_plan_decided_is_found_by_the_next_batch():
    affinity, loads = Affinity(), dict.fromkeys("abc", 0)
    groups = groups_of([1, 1], [2], [1, 1], [3])
    assert affinity.homes(groups) == {}
    shards = plan(np.full(4, 2), loads, groups=groups.of_read, shared=groups.tokens)
    affinity.keep(groups, shards)
    homes = affinity.homes(groups_of([3], [4], [1, 1]))
    assert set(homes) == {0, 2}
    assert 3 in shards[homes[0]] and {0, 2} <= set(shards[homes[2]].tolist())


def test_of_a_group_that_was_cut_the_replica_with_the_most_reads_is_kept():
    affinity, groups = Affinity(), groups_of(*[[1]] * 6, *[[2]] * 2)
    affinity.keep(groups, {"c": np.array([0, 7]), "b": np.array([1, 2, 3]), "a": np.array([4, 5, 6])})
    assert affinity.homes(groups) == {0: "b", 1: "a"}


def test_the_prompts_used_longest_ago_are_forgotten_first():
    affinity = Affinity(size=2)
    for prompt in ([1], [2], [1], [3]):
        affinity.keep(groups_of(prompt), {"a": np.array([0])})
    assert len(affinity) == 2
    assert affinity.homes(groups_of([1], [2], [3])) == {0: "a", 2: "a"}


def test_a_lost_replica_holds_nothing():
    affinity = Affinity()
    affinity.keep(groups_of([1], [2], [3]), {"a": np.array([0, 2]), "b": np.array([1])})
    affinity.forget("a")
    assert affinity.homes(groups_of([1], [2], [3])) == {1: "b"}


def test_an_empty_batch_has_no_groups():
    affinity, groups = Affinity(), groups_of()
    affinity.keep(groups, {})
    assert affinity.homes(groups) == {} and groups.of_read.dtype == groups.tokens.dtype == np.int64
