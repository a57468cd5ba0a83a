"""How a batch is divided over replicas, so that all finish together. Pure functions; deterministic.

What is planned is a group: the reads of one prompt, which a replica prefills once. Longest first, each goes to its
home, the replica that already holds its prompt, while that does not unbalance the plan, else to the least loaded one.
The makespan, the load of the fullest replica, is then at most the mean load + the largest group (or what was waiting
there before); on idle replicas and without groups it is at most 4/3 of the best possible one (Graham 1969). With few
reads a replica that can be 10 % too much, so that groups without a home are then packed again under smaller capacities
(as MULTIFIT does: Coffman, Garey and Johnson 1978). What is found stands only where it is better.

A group fits, and stays whole, while it is no larger than the mean load, or than the longest read if that is more. A
larger one cannot be balanced whole. It is cut where its reads are at least two of its prompts long: it fills one
replica after another up to the mean load, its home first, and each prefills the prompt. A piece may always have as many
tokens of its own as its prompt has; one that goes above the mean load is no more than two prompts, or a prompt and one
read, so that the bound holds for these groups as well.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right, insort
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

_GOOD_ENOUGH = 1.005  # makespan over its lower bound at which no better plan is looked for
_ATTEMPTS = 6  # each halves what is left to gain


def plan(
    costs: np.ndarray,
    loads: Mapping[str, int],
    *,
    groups: np.ndarray | None = None,
    shared: np.ndarray | None = None,
    homes: Mapping[int, str] | None = None,
) -> dict[str, np.ndarray]:
    """Assign every read to one replica.

    Args:
        costs: int64 [N], tokens the engine must process for each read; with `shared`, without its prompt's.
        loads: per replica, the tokens already waiting there.
        groups: int64 [N], in which of G groups each read is; every group has a read. Left out, each read is its own.
        shared: int64 [G], tokens of each group's prompt, which a replica processes once. Left out, none.
        homes: per group, the replica that already holds its prompt; there `shared` costs nothing. One that is not in
            `loads` is passed over.

    Returns:
        Per replica that gets any, the indices of its reads (int64, rising).

    Raises:
        ValueError: no replicas, or arrays that do not belong together.
    """
    if not loads:
        raise ValueError("no replicas to plan for")
    groups, shared, counts = _checked(costs, groups, shared)
    names = sorted(loads)
    place = {name: i for i, name in enumerate(names)}
    home = np.full(len(counts), -1)
    for group, name in (homes or {}).items():
        home[group] = place.get(name, -1)
    own = np.bincount(groups, costs, len(counts)).astype(np.int64)  # exact below 2^53 tokens
    prompt = np.where(home < 0, shared, 0)
    replicas = _Replicas([int(loads[name]) for name in names])

    mean = (sum(replicas.loads) + int((own + prompt).sum())) / len(names)
    pieces = np.minimum(np.maximum(own // np.maximum(shared, 1), 1), counts)  # int64 [G], at most
    longest = max((costs + prompt[groups]).max(initial=0), (own + prompt)[pieces == 1].max(initial=0))
    target = _target(max(mean, longest), own, shared, home >= 0, pieces, replicas)
    order = np.argsort(-(own + prompt), kind="stable")
    whole = (own + prompt)[order] <= target
    fits, larger = order[whole], order[~whole]
    at = np.empty(len(counts), dtype=np.int64)  # replica of each group that fits
    at[fits] = _longest_first(own[fits], shared[fits], home[fits], mean, replicas)
    reads = np.split(np.lexsort((costs, groups)), np.cumsum(counts)[:-1]) if len(larger) else []
    cut = [_Cut(costs[reads[g]].tolist(), int(shared[g]), int(home[g])) for g in larger]
    loose = fits[home[fits] < 0]
    at[loose], pieces_at = _improve((own + prompt)[loose], at[loose], cut, target, replicas.loads)
    where = at[groups]  # int64 [N]
    for g, piece_at in zip(larger, pieces_at, strict=True):
        where[reads[g]] = piece_at
    shards = np.split(np.argsort(where, kind="stable"), np.cumsum(np.bincount(where, minlength=len(names)))[:-1])
    return {name: shard for name, shard in zip(names, shards, strict=True) if len(shard)}


def _checked(
    costs: np.ndarray, groups: np.ndarray | None, shared: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`groups` and `shared`, made where they are left out, and the number of reads of each group, int64 [G]."""
    groups = np.arange(len(costs)) if groups is None else groups
    counts = np.bincount(groups)  # int64 [G]
    shared = np.zeros(len(counts), dtype=np.int64) if shared is None else shared
    if len(groups) != len(costs) or not counts.all():
        raise ValueError(
            f"groups has {len(groups)} entries up to {len(counts) - 1} for {len(costs)} reads; allowed is one for each "
            "read, and every number from 0 up"
        )
    if len(shared) != len(counts):
        raise ValueError(f"shared has {len(shared)} entries; {len(counts)} groups need {len(counts)}")
    return groups, shared, counts


class _Cut(NamedTuple):
    """A group that does not fit."""

    costs: list[int]  # of its reads, rising
    prompt: int
    home: int  # or -1


class _Replicas:
    """The load of each replica while a plan is made, and which one is the least loaded."""

    def __init__(self, loads: list[int]) -> None:
        self.loads = loads
        self._heap = [load * len(loads) + i for i, load in enumerate(loads)]  # one integer: load, then number
        heapq.heapify(self._heap)

    def least(self) -> int:
        """The least loaded replica; the first one of several."""
        load, i = divmod(self._heap[0], len(self.loads))
        while load != self.loads[i]:  # it has got more since
            heapq.heapreplace(self._heap, self.loads[i] * len(self.loads) + i)
            load, i = divmod(self._heap[0], len(self.loads))
        return i


def _target(
    low: float, own: np.ndarray, shared: np.ndarray, held: np.ndarray, pieces: np.ndarray, replicas: _Replicas
) -> int:
    """The least load T >= `low` such that, with larger groups cut where they exceed it, the mean load is at most T.

    Every cut adds a prompt. No plan that cuts groups into at most `pieces` has a smaller makespan than T.
    """
    low, high = int(np.ceil(low)), int((own + np.where(held, 0, shared)).max(initial=0))
    while low < high:
        middle = (low + high) // 2
        needed = -(-(own - held * shared) // np.maximum(middle - shared, 1))
        work = own + (np.clip(needed, 1, pieces) - held) * shared
        if sum(replicas.loads) + int(work.sum()) <= middle * len(replicas.loads):
            high = middle
        else:
            low = middle + 1
    return low


def _longest_first(
    own: np.ndarray, shared: np.ndarray, home: np.ndarray, mean: float, replicas: _Replicas
) -> list[int]:
    """The replica of each group, in turn: its home, unless that has the mean load and the group's prompt already; then
    the least loaded one. So none exceeds the mean by more than a group."""
    where, loads = [], replicas.loads
    for cost, prompt, i in zip(own.tolist(), shared.tolist(), home.tolist(), strict=True):
        if i < 0 or loads[i] > mean + prompt:
            held, i = i, replicas.least()
            cost += prompt if i != held else 0
        loads[i] += cost
        where.append(i)
    return where


def _improve(
    costs: np.ndarray, where: np.ndarray, cut: list[_Cut], target: int, loads: list[int]
) -> tuple[np.ndarray, list[list[int]]]:
    """The best plan found for what may lie anywhere.

    Args:
        costs, where: int64 [n], the groups that fit and have no home, falling, and where they lie by now.
        cut: the groups that do not fit; they are not in `loads` yet.
        loads: of each replica, with the groups that fit.

    Returns:
        The replica of each of `costs`, and of each read of each of `cut`.
    """
    fixed = np.array(loads) - _per_replica(where, costs, loads)
    low = max(target, int(fixed.max()), int(costs.max(initial=0) + fixed.min()))  # no plan is below it

    def poured(packed: np.ndarray, capacity: int) -> tuple[int, np.ndarray, list[list[int]]]:
        replicas = _Replicas((fixed + _per_replica(packed, costs, loads)).tolist())
        pieces = [_pour(group, capacity, replicas) for group in cut]
        return max(replicas.loads), packed, pieces

    best = poured(where, low)
    for _ in range(_ATTEMPTS):
        if best[0] <= low * _GOOD_ENOUGH:
            break
        capacity = (low + best[0]) // 2
        packed = _best_fit(costs.tolist(), capacity, fixed.tolist())
        found = best if packed is None else poured(packed, capacity)
        best = min(best, found, key=lambda plan: plan[0])
        if packed is None or found[0] > capacity:
            low = capacity
    return best[1], best[2]


def _per_replica(where: np.ndarray, costs: np.ndarray, loads: list[int]) -> np.ndarray:
    """int64, like `loads`: the sum of the costs at each replica."""
    return np.bincount(where, costs, len(loads)).astype(np.int64)


def _best_fit(costs: list[int], capacity: int, loads: list[int]) -> np.ndarray | None:
    """The replica of each cost, in turn: the fullest one with room for it. None where there is none."""
    count, where = len(loads), []
    rooms = sorted((capacity - load) * count + i for i, load in enumerate(loads))
    for cost in costs:
        fullest = bisect_left(rooms, cost * count)
        if fullest == count:
            return None
        room = rooms.pop(fullest)
        where.append(room % count)
        insort(rooms, room - cost * count)
    return np.array(where, dtype=np.int64)


def _pour(group: _Cut, capacity: int, replicas: _Replicas) -> list[int]:
    """The replica of each read of a group: its home first, then the least loaded ones, each filled up to `capacity`."""
    costs, home = group.costs.copy(), group.home
    left, where, held = list(range(len(costs))), [0] * len(costs), {home}
    i = home if home >= 0 and replicas.loads[home] + costs[0] <= capacity else replicas.least()
    while left:
        prompt = 0 if i in held else group.prompt
        held.add(i)
        room = max(capacity - replicas.loads[i] - prompt, prompt)
        replicas.loads[i] += prompt
        read = bisect_right(costs, room) - 1  # the longest that fits; where none does -1, the longest
        while True:
            cost = costs.pop(read)
            where[left.pop(read)] = i
            replicas.loads[i] += cost
            room -= cost
            read = bisect_right(costs, room) - 1
            if read < 0:
                break
        i = replicas.least()
    return where
