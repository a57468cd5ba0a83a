"""Which replica holds which prompt: reads of a prompt that was prefilled before go where its prefix is still cached.

This is a guess that costs a prefill where it is wrong; the replica knows.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

_DIGEST_BYTES = 16


class Groups(NamedTuple):
    """The reads of a batch by their prompts, numbered as they first occur. See `plan` in sharding.py."""

    of_read: np.ndarray  # int64 [N], numbers of groups
    tokens: np.ndarray  # int64 [G], of each prompt
    digests: list[bytes]  # [G], names of the prompts


def find_groups(ids: np.ndarray, offsets: np.ndarray, prompt_lens: np.ndarray) -> Groups:
    """Find the reads that have one prompt. One hash for each read; nothing is copied.

    Args:
        ids: int32 flat, contiguous: the reads end to end, each with its prompt first.
        offsets: int64 [N + 1] into ids.
        prompt_lens: int64 [N].
    """
    numbers: dict[bytes, int] = {}
    of_read, firsts = [], []
    for i, (start, length) in enumerate(zip(offsets[:-1].tolist(), prompt_lens.tolist(), strict=True)):
        digest = blake2b(ids[start : start + length], digest_size=_DIGEST_BYTES).digest()
        number = numbers.setdefault(digest, len(numbers))
        if number == len(firsts):
            firsts.append(i)
        of_read.append(number)
    tokens = prompt_lens[np.array(firsts, dtype=np.int64)].astype(np.int64)
    return Groups(np.array(of_read, dtype=np.int64), tokens, list(numbers))


class Affinity:
    """The last prompts of one teacher and the replica that holds each. What was used longest ago is forgotten first.

    Args:
        size: prompts that are kept, about 150 bytes each.
    """

    def __init__(self, size: int = 100_000) -> None:
        self._size = size
        self._replicas: OrderedDict[bytes, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._replicas)

    def homes(self, groups: Groups) -> dict[int, str]:
        """The replica that holds the prompt, for each group of which one is known."""
        known = ((number, self._replicas.get(digest)) for number, digest in enumerate(groups.digests))
        return {number: replica for number, replica in known if replica is not None}

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
        for number, i in zip(group.tolist(), replica[most][first].tolist(), strict=True):
            self._replicas[groups.digests[number]] = names[i]
            self._replicas.move_to_end(groups.digests[number])
        while len(self._replicas) > self._size:
            self._replicas.popitem(last=False)

    def forget(self, replica: str) -> None:
        """The replica is lost, or its cache: its weights have changed."""
        self._replicas = OrderedDict(item for item in self._replicas.items() if item[1] != replica)
