"""Which reads share a prefix, and which replica holds it: a prefix that was prefilled goes where it is still cached.

An engine's prefix cache keeps whole blocks of tokens, each under a hash of all tokens up to its end; so are they named
here. This is a guess that costs a prefill where it is wrong; the replica knows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from scoring.sharding import plan

_AT_ONCE = 1 << 16  # tokens: what is hashed of them stays in the processor's cache
_COEFFICIENT = 1 << 25  # with ids below 2^20 and blocks of up to 256 tokens the sums are exact in float64
_SEVERAL = ""  # in the place of a replica: more than one


class Prefixes:
    """The prefixes of a batch's reads that an engine may take from its cache, by hashes at some of their block ends.

    These are the last block, and the 1st, 2nd, 3rd, 4th, 6th, 8th, 12th, ... : of a prefix that two reads share, at
    least two thirds are found, and all of it where they share it whole.

    Args:
        ids: int32 flat: the reads end to end.
        offsets: int64 [N + 1] into ids.
        reusable: int64 [N], tokens at the start of each read that the engine need not compute.
        block: tokens of one block.
        salts: int64 [N]: reads with different ones share nothing (an adapter has a cache of its own).
    """

    def __init__(
        self, ids: np.ndarray, offsets: np.ndarray, reusable: np.ndarray, block: int, salts: np.ndarray
    ) -> None:
        self.block = block
        self.blocks = reusable // block  # int64 [N]
        hashes = _prefix_hashes(ids, offsets[:-1], self.blocks, block, salts.astype(np.uint64))
        ends = np.cumsum(self.blocks)  # int64 [N], into hashes
        self.last = np.where(self.blocks > 0, hashes[ends - 1], 0) if len(hashes) else np.zeros(len(ends), np.uint64)
        longest = int(self.blocks.max(initial=0))
        self.depths = np.array([n for k in range(longest.bit_length()) for n in (2 << k >> 1, 3 << k >> 1)], np.int64)
        self.depths = np.unique(self.depths[self.depths <= longest])  # int64 [D]
        starts = ends - self.blocks
        self.at = [  # [D] of uint64 [N]; 0 where a read is shorter
            np.where(self.blocks >= depth, hashes[np.minimum(starts + depth, len(hashes)) - 1], 0)
            for depth in self.depths.tolist()
        ]


def _prefix_hashes(
    ids: np.ndarray, starts: np.ndarray, blocks: np.ndarray, block: int, salts: np.ndarray
) -> np.ndarray:
    """uint64 [sum of blocks]: the hash at the end of every block of every read, of all its tokens until there."""
    coefficients = np.random.default_rng(block).integers(1, _COEFFICIENT, (block, 2)).astype(np.float64)
    sums = np.empty((int(blocks.sum()), 2))
    pieces, held, done = [], 0, 0
    for start, count in zip(starts.tolist(), (blocks * block).tolist(), strict=True):
        pieces.append(ids[start : start + count])
        held += count
        if held >= _AT_ONCE:
            done, pieces, held = _sum_blocks(pieces, coefficients, sums, done), [], 0
    if pieces:
        _sum_blocks(pieces, coefficients, sums, done)
    read = np.repeat(np.arange(len(blocks)), blocks)  # int64 [blocks]
    place = np.arange(len(read)) - np.repeat(np.cumsum(blocks) - blocks, blocks)
    of_block = sums.astype(np.int64).view(np.uint64)
    mixed = _mix(_mix(of_block[:, 0] ^ _mix(place.astype(np.uint64) + np.uint64(1))) ^ of_block[:, 1])
    total = np.concatenate([np.zeros(1, np.uint64), np.cumsum(mixed, dtype=np.uint64)])  # it wraps around
    before = np.repeat(total[np.cumsum(blocks) - blocks], blocks)
    return _mix(total[1:] - before + _mix(salts)[read])


def _sum_blocks(pieces: list[np.ndarray], coefficients: np.ndarray, sums: np.ndarray, done: int) -> int:
    """Into `sums`, from row `done` on: two weighted sums of every block. Returns the next row."""
    tokens = np.concatenate(pieces).reshape(-1, len(coefficients)).astype(np.float64)
    np.matmul(tokens, coefficients, out=sums[done : done + len(tokens)])
    return done + len(tokens)


def _mix(values: np.ndarray) -> np.ndarray:
    """uint64: every bit of a value changes half of the bits (the finalizer of MurmurHash3)."""
    values = (values ^ (values >> np.uint64(33))) * np.uint64(0xFF51AFD7ED558CCD)
    values = (values ^ (values >> np.uint64(33))) * np.uint64(0xC4CEB9FE1A85EC53)
    return values ^ (values >> np.uint64(33))


class Groups(NamedTuple):
    """Reads by the prefix they are planned by, numbered as they first occur. See `plan` in sharding.py."""

    of_read: np.ndarray  # int64 [n], numbers of groups
    tokens: np.ndarray  # int64 [G], of each prefix
    names: list[np.ndarray]  # of uint64 [G]: of the prefix, and of beginnings of it, the longest first; 0 is none
    lengths: list[np.ndarray]  # of int64 [G]: their tokens


def find_groups(prefixes: Prefixes, reads: np.ndarray) -> Groups:
    """Group reads so that sharing saves most: each goes by the prefix of whose tokens it saves most, where all reads
    that have it share the cost. One that shares with nobody goes by its own, the longest there is.

    Args:
        prefixes: of the batch.
        reads: int64 [n], places in the batch.
    """
    # The reads of one prefix are looked at as one, with a weight.
    own = np.where(prefixes.blocks[reads] > 0, prefixes.last[reads], _mix(reads.astype(np.uint64)))
    _, first, kind, weight = np.unique(own, return_index=True, return_inverse=True, return_counts=True)
    blocks, chosen = prefixes.blocks[reads][first], own[first]
    depth, saved = blocks.copy(), blocks * (weight - 1) / weight
    open_ = np.flatnonzero(blocks > 0)  # those that may share something with another
    for length, hashes in zip(prefixes.depths.tolist(), prefixes.at, strict=True):
        open_ = open_[blocks[open_] >= length]
        names = hashes[reads[first[open_]]]
        _, which = np.unique(names, return_inverse=True)
        count = np.bincount(which, weight[open_])[which]
        shared = count > weight[open_]
        open_, names, count = open_[shared], names[shared], count[shared]
        if not len(open_):
            break
        saves = length * (count - 1) / count
        better = saves > saved[open_]
        at = open_[better]
        chosen[at], depth[at], saved[at] = names[better], length, saves[better]
    return _numbered(prefixes, reads, chosen[kind], depth[kind])


def _numbered(prefixes: Prefixes, reads: np.ndarray, chosen: np.ndarray, depth: np.ndarray) -> Groups:
    _, first, of_read = np.unique(chosen, return_index=True, return_inverse=True)
    order = np.argsort(first)  # of the groups, by their first read
    number = np.empty(len(order), np.int64)
    number[order] = np.arange(len(order))
    first = first[order]
    depth, one = depth[first], reads[first]
    names, lengths = [np.where(depth > 0, chosen[first], 0)], [depth]
    for length, hashes in zip(prefixes.depths[::-1].tolist(), prefixes.at[::-1], strict=True):
        fits = (length < depth) & (2 * length >= depth)  # less than half of a prefix makes no home
        if fits.any():
            names.append(np.where(fits, hashes[one], 0))
            lengths.append(np.where(fits, length, 0))
    return Groups(number[of_read], depth * prefixes.block, names, [length * prefixes.block for length in lengths])


class Affinity:
    """The last prefixes of one teacher and the replica that holds each. What was used long ago is forgotten.

    Args:
        size: prefixes that are kept at least, about 100 bytes each; at most twice as many.
    """

    def __init__(self, size: int = 200_000) -> None:
        self._size = size
        self._recent: dict[int, str] = {}
        self._older: dict[int, str] = {}

    def homes(self, groups: Groups) -> tuple[dict[int, str], np.ndarray]:
        """The replica that holds most of a group's prefix, for each group of which one is known, and int64 [G], how
        many tokens of it."""
        homes: dict[int, str] = {}
        held = np.zeros(len(groups.tokens), np.int64)
        if not self._recent and not self._older:
            return homes, held
        for names, lengths in zip(groups.names, groups.lengths, strict=True):
            asked = np.flatnonzero((names != 0) & (held == 0))
            for group, replica in zip(asked.tolist(), map(self._holder, names[asked].tolist()), strict=True):
                if replica:
                    homes[group] = replica
                    held[group] = lengths[group]
        return homes, held

    def keep(self, groups: Groups, shards: Mapping[str, np.ndarray]) -> None:
        """Remember what was planned: `shards` holds the reads of each replica.

        Of a group that was cut, the replica with the most of its reads is kept; the first by name of several.
        """
        names = sorted(shards)
        if not names:
            return
        at = np.repeat(np.arange(len(names)), [len(shards[name]) for name in names])
        of_read = groups.of_read[np.concatenate([shards[name] for name in names])]
        piece, reads = np.unique(of_read * len(names) + at, return_counts=True)
        group, replica = np.divmod(piece, len(names))
        most = np.lexsort((replica, -reads, group))
        group, first = np.unique(group[most], return_index=True)
        holder = replica[most][first]  # int64, of the groups that have reads here
        for level, prefix in enumerate(groups.names):
            there = prefix[group] != 0
            kept, which = np.unique(prefix[group][there], return_inverse=True)
            low, high = np.full(len(kept), len(names)), np.full(len(kept), -1)
            np.minimum.at(low, which, holder[there])
            np.maximum.at(high, which, holder[there])
            found = [names[i] if i == j else _SEVERAL for i, j in zip(low.tolist(), high.tolist(), strict=True)]
            if level:  # what begins the prefixes of several replicas, as a system prompt does, draws reads to none
                known = map(self._holder, kept.tolist())
                found = [name if old in (None, name) else _SEVERAL for old, name in zip(known, found, strict=True)]
            self._recent.update(zip(kept.tolist(), found, strict=True))
        if len(self._recent) > self._size:
            self._older, self._recent = self._recent, {}

    def _holder(self, name: int) -> str | None:
        replica = self._recent.get(name)
        return self._older.get(name) if replica is None else replica

    def forget(self, replicas: set[str]) -> None:
        """These replicas are lost, or their caches: their weights have changed."""
        for kept in (self._recent, self._older):
            for name in [name for name, replica in kept.items() if replica in replicas]:
                del kept[name]


class Part(NamedTuple):
    """What one replica gets of a plan."""

    reads: np.ndarray  # int64 [n], in the order they should go out: the urgent first, those of one prefix together
    reused: np.ndarray  # int64 [n], tokens of each that the engine should find in its cache when its turn comes


def alone(shard: np.ndarray, priority: np.ndarray) -> Part:
    """The part of a replica whose reads share nothing."""
    return Part(shard[np.argsort(priority[shard], kind="stable")], np.zeros(len(shard), np.int64))


def plan_by_prefix(
    costs: np.ndarray,
    priority: np.ndarray,
    loads: Mapping[str, int],
    groups: Groups,
    homes: Mapping[int, str],
    held: np.ndarray,
) -> dict[str, Part]:
    """Assign every read to one replica, by the tokens that the engines will really prefill.

    Args:
        costs: int64 [n], of each read by itself, its prefix included.
        priority: int [n], smaller ones are more urgent.
        loads: as for `plan`.
        groups: of these reads.
        homes, held: the replica that holds most of a group's prefix, and int64 [G], how many tokens of it.
    """
    firsts = np.unique(groups.of_read, return_index=True)[1]  # int64 [G]
    shared = np.where(held > 0, held, groups.tokens)
    own = costs - groups.tokens[groups.of_read]
    own[firsts] += groups.tokens - shared  # what even the home must prefill, once
    shards = plan(own, loads, groups=groups.of_read, shared=shared, homes=homes)
    place = {name: i for i, name in enumerate(shards)}
    home = np.full(len(held), -1)
    for group, name in homes.items():
        home[group] = place.get(name, -1)
    parts = {}
    for name, shard in shards.items():
        reads = shard[np.lexsort((groups.of_read[shard], priority[shard]))]
        reused = groups.tokens[groups.of_read[reads]]
        present, first = np.unique(groups.of_read[reads], return_index=True)
        reused[first] = np.where(home[present] == place[name], held[present], 0)
        parts[name] = Part(reads, reused)
    return parts
