"""Which reads share a prefix, which replica holds it, and the plan that goes by both."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scoring import LabelBatch, LabelRead, MatrixBatch, MatrixRead
from scoring.affinity import Affinity, Prefixes, find_groups, plan_by_prefix
from tests.test_sharding import check_every_read_once_and_in_order

BLOCK = 2
prompts = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=17), min_size=1, max_size=16)


def prefixes_of(prompts, block=BLOCK, salts=None):
    """The prefixes of label reads of these prompts."""
    batch = LabelBatch.from_reads([LabelRead(prompt, [1]) for prompt in prompts])
    salts = np.zeros(len(batch), np.int64) if salts is None else np.array(salts)
    return Prefixes(batch.ids, batch.offsets, batch.reusable(), block, salts)


def groups_of(prompts, **options):
    return find_groups(prefixes_of(prompts, **options), np.arange(len(prompts)))


def cacheable(prompt, block=BLOCK):
    """Tokens of a prompt that may come from the cache: whole blocks, and not the last token."""
    return (len(prompt) - 1) // block * block


def members(groups):
    return [np.flatnonzero(groups.of_read == group).tolist() for group in range(len(groups.tokens))]


# ---- what is shared


@pytest.mark.parametrize(
    ("read", "tokens"),
    [
        (MatrixRead([1] * 9, [2] * 5), 8),
        (MatrixRead([1] * 9, [2] * 5, rows=[3, 2]), 10),
        (MatrixRead([1] * 9, [2] * 5, rows=[]), 8),
        (MatrixRead([1], [2] * 5), 0),
        (LabelRead([1] * 9, [2]), 8),
        (LabelRead([1], [2]), 0),
    ],
)
def test_what_is_before_the_first_score_may_come_from_a_cache(read, tokens):
    kind = MatrixBatch if isinstance(read, MatrixRead) else LabelBatch
    others = [MatrixRead([5], [6, 7], rows=[1])] if kind is MatrixBatch else []
    batch = kind.from_reads([*others, read, *others])
    assert batch.reusable()[len(others)] == tokens
    assert [batch.reusable()[i] for i in (0, -1)] == [1, 1] or not others


@given(prompts)
def test_prefixes_have_one_name_exactly_where_they_are_one(prompts):
    prefixes = prefixes_of(prompts)
    ends = [(0, depth * BLOCK) for depth in prefixes.depths.tolist()]
    seen: dict[int, tuple] = {}
    for i, prompt in enumerate(prompts):
        assert prefixes.blocks[i] * BLOCK == cacheable(prompt)
        for (_, end), names in zip(ends, prefixes.at, strict=True):
            if end <= cacheable(prompt):
                assert seen.setdefault(int(names[i]), tuple(prompt[:end])) == tuple(prompt[:end])
            else:
                assert names[i] == 0
        if cacheable(prompt):
            whole = tuple(prompt[: cacheable(prompt)])
            assert seen.setdefault(int(prefixes.last[i]), whole) == whole
    assert len(seen) == len(set(seen.values()))


def test_the_ends_at_which_prefixes_are_compared_are_never_more_than_half_as_far_again_apart():
    depths = prefixes_of([[1] * 2001]).depths
    assert depths[:8].tolist() == [1, 2, 3, 4, 6, 8, 12, 16] and depths[-1] == 768
    assert (depths[1:] <= np.maximum(1.5 * depths[:-1], depths[:-1] + 1)).all()


def test_reads_with_different_salts_share_nothing():
    assert len(groups_of([[1] * 9] * 4, salts=[0, 1, 0, 1]).tokens) == 2


# ---- groups


@given(prompts)
def test_the_reads_of_a_group_have_the_prefix_that_it_goes_by(prompts):
    groups = groups_of(prompts)
    firsts = [min(reads) for reads in members(groups)]
    assert firsts == sorted(firsts)  # numbered as they first occur
    for tokens, reads in zip(groups.tokens.tolist(), members(groups), strict=True):
        assert all(tokens <= cacheable(prompts[i]) for i in reads)
        assert len({tuple(prompts[i][:tokens]) for i in reads}) == 1
        if len(reads) == 1 and not any(
            prompts[reads[0]][:BLOCK] == other[:BLOCK] for j, other in enumerate(prompts) if j != reads[0]
        ):
            assert tokens == cacheable(prompts[reads[0]])
    for i, j in itertools.combinations(range(len(prompts)), 2):  # one prompt is never taken apart
        if cacheable(prompts[i]) and prompts[i][: cacheable(prompts[i])] == prompts[j][: cacheable(prompts[j])]:
            assert groups.of_read[i] == groups.of_read[j]


def test_the_reads_of_one_prompt_are_a_group_and_so_are_those_with_different_ends():
    rng = np.random.default_rng(0)
    ids = lambda count: rng.integers(0, 50_000, count).tolist()  # noqa: E731
    system, start, alike = ids(64), ids(512), ids(333)
    ends = [start + ids(16) for _ in range(256)]
    samples = [system + alike] * 8
    others = [system + ids(500) for _ in range(4)]
    groups = groups_of([*ends, *samples, *others], block=16)
    assert [len(reads) for reads in members(groups)] == [256, 8, *[1] * 4] or (
        [len(reads) for reads in members(groups)] == [256, 8, 4]
    )
    assert groups.tokens[:2].tolist() == [512, (64 + 333 - 1) // 16 * 16]


@given(st.integers(1, 400), st.integers(2, 8))
def test_of_what_reads_share_at_least_two_thirds_are_found(common, count):
    rng = np.random.default_rng(common)
    start = rng.integers(0, 1000, common).tolist()
    groups = groups_of([[*start, 1000 + i, *rng.integers(0, 1000, 40)] for i in range(count)], block=4)
    shared = common // 4 * 4
    if shared:
        assert len(groups.tokens) == 1 and shared * 2 / 3 <= groups.tokens[0] <= shared


def test_a_part_of_a_batch_is_grouped_by_itself():
    prefixes = prefixes_of([[1] * 9, [2] * 9, [1] * 9, [2] * 9 + [3] * 4, [2] * 9 + [4] * 4])
    groups = find_groups(prefixes, np.array([4, 0, 3]))
    assert groups.of_read.tolist() == [0, 1, 0] and groups.tokens.tolist() == [8, 8]


def test_an_empty_batch_has_no_groups():
    affinity, groups = Affinity(), groups_of([])
    affinity.keep(groups, {})
    assert affinity.homes(groups)[0] == {} and groups.of_read.dtype == groups.tokens.dtype == np.int64


# ---- who holds what


def homes(affinity, *prompts):
    """Per prompt asked alone, its home and what it holds."""
    found = [affinity.homes(groups_of([prompt])) for prompt in prompts]
    return [(home.get(0), int(held[0])) for home, held in found]


def keep(affinity, prompts, **shards):
    affinity.keep(groups_of(prompts), {name: np.array(reads) for name, reads in shards.items()})


A, B, C = ([i] * 9 for i in (1, 2, 3))


def test_what_was_planned_is_found_by_the_next_batch():
    affinity = Affinity()
    assert homes(affinity, A) == [(None, 0)]
    keep(affinity, [A, B, A], x=[0, 2], y=[1])
    assert homes(affinity, A, B, C) == [("x", 8), ("y", 8), (None, 0)]


def test_a_prompt_that_begins_as_another_did_finds_what_is_held_of_it():
    affinity = Affinity()
    keep(affinity, [[*A, 1, 1, 1, 7]], x=[0])  # 12 tokens; names for 12, 8 and 6 of them
    assert homes(affinity, [*A, 5, 5, 5, 5], A) == [("x", 8), ("x", 8)]
    assert homes(affinity, [1] * 7 + [5] * 7) == [("x", 6)]
    assert homes(affinity, [1] * 5 + [5] * 7) == [(None, 0)]  # less than half


def test_what_several_replicas_hold_draws_reads_to_none():
    affinity, system = Affinity(), [9] * 8
    keep(affinity, [system + [1] * 5] * 2 + [system + [2] * 5] * 2, x=[0, 1], y=[2, 3])
    assert homes(affinity, system + [3] * 5) == [(None, 0)]
    affinity = Affinity()
    for name, i in (("x", 1), ("y", 2)):  # the same in one batch after another
        keep(affinity, [system + [i] * 5], **{name: [0]})
    assert homes(affinity, system + [3] * 5, system + [1] * 5) == [(None, 0), ("x", 12)]


def test_of_a_group_that_was_cut_the_replica_with_the_most_reads_is_kept():
    affinity = Affinity()
    keep(affinity, [A] * 6 + [B] * 2, c=[0, 7], b=[1, 2, 3], a=[4, 5, 6])
    assert homes(affinity, A, B) == [("b", 8), ("a", 8)]


def test_what_was_used_long_ago_is_forgotten_first():
    affinity = Affinity(size=8)
    for i in (1, 2, 1, 3, 1, 4, 1, 5, 1):  # three names each
        keep(affinity, [[i] * 9], x=[0])
    assert homes(affinity, A, B) == [("x", 8), (None, 0)]
    assert len(affinity._recent) + len(affinity._older) <= 2 * 8 + 3


def test_a_lost_replica_holds_nothing():
    affinity = Affinity()
    keep(affinity, [A, B, C], x=[0, 2], y=[1])
    affinity.forget({"x", "gone"})
    assert homes(affinity, A, B, C) == [(None, 0), ("y", 8), (None, 0)]


# ---- the plan


@st.composite
def batches(draw):
    """Prompts that share prefixes at random, with tails, priorities, and what was there before."""
    stems = draw(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=40), min_size=1, max_size=4))
    reads = draw(
        st.lists(
            st.tuples(st.sampled_from(stems), st.integers(0, 40), st.lists(st.integers(0, 3), max_size=12)),
            min_size=1,
            max_size=40,
        )
    )
    prompts = [[*stem[:cut], *end, 3] for stem, cut, end in reads]
    priority = draw(st.lists(st.integers(0, 1), min_size=len(prompts), max_size=len(prompts)))
    earlier = draw(st.lists(st.tuples(st.integers(0, len(prompts) - 1), st.sampled_from("abcdz")), max_size=8))
    return prompts, np.array(priority), earlier


@given(batches(), st.integers(0, 2))
def test_no_engine_is_counted_on_to_hold_more_than_it_does(batch, load):
    """Against caches that are filled read by read, in the order of the parts."""
    prompts, priority, earlier = batch
    affinity, cached = Affinity(), {name: set() for name in "abcdz"}

    def prefill(name, prompt):
        """Tokens found in the cache of a replica."""
        ends = range(BLOCK, cacheable(prompt) + 1, BLOCK)
        found = max((end for end in ends if tuple(prompt[:end]) in cached[name]), default=0)
        cached[name] |= {tuple(prompt[:end]) for end in ends}
        return found

    for i, name in earlier:
        keep(affinity, [prompts[i]], **{name: [0]})
        prefill(name, prompts[i])
    groups = groups_of(prompts)
    home, held = affinity.homes(groups)
    costs = np.array([len(prompt) for prompt in prompts])
    loads = {"a": load * 50, "b": 0, "c": 0, "d": 0}
    parts = plan_by_prefix(costs, priority, loads, groups, home, held)
    check_every_read_once_and_in_order({n: np.sort(part.reads) for n, part in parts.items()}, len(prompts), loads)
    work = dict(loads)
    for name, part in parts.items():
        assert (np.diff(priority[part.reads]) >= 0).all()
        for urgency in (0, 1):  # those of one prefix are together
            of = groups.of_read[part.reads[priority[part.reads] == urgency]]
            assert len(list(itertools.groupby(of))) == len(set(of))
        for read, reused in zip(part.reads.tolist(), part.reused.tolist(), strict=True):
            assert reused <= prefill(name, prompts[read])
            work[name] += len(prompts[read]) - reused
    whole = [groups.tokens[g] + sum(costs[i] - groups.tokens[g] for i in m) for g, m in enumerate(members(groups))]
    assert max(work.values()) <= max(sum(work.values()) / 4 + max(whole), *loads.values())
