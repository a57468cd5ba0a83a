"""Which cores a replica's CPU engine runs on: one lease per replica and node, decided by file locks.

A replica's rank will not do: ranks overlap while replicas are replaced. The kernel drops a lock with the process that
holds it, however that process ends.
"""

from __future__ import annotations

import fcntl
import itertools
import logging
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import IO

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class CoreLease:
    """Cores bound to this process for as long as the lease lives."""

    cores: tuple[int, ...]
    sharers: int  # other replicas that were already on these cores
    _locks: tuple[IO, ...]  # one open file per core; closing them ends the lease


def lease_cores(count: int, teacher: str, folder: Path | None = None) -> CoreLease:
    """Take `count` cores of this node that no other replica holds, or share the least used ones. Never waits.

    Args:
        count: cores of one engine. The allowed cores are cut into sets of this size.
        teacher: whose replica it is. Of cores that are used as much, those of other teachers are shared first: its own
            replicas work at the same time.
        folder: where the lock files live; the default is one folder per user of the node.

    Raises:
        ValueError: the node allows fewer cores than `count`.
    """
    allowed = sorted(os.sched_getaffinity(0))
    if not 1 <= count <= len(allowed):
        raise ValueError(f"cpu_cores is {count}; this process may use {len(allowed)} cores of its node")
    sets = [tuple(allowed[i : i + count]) for i in range(0, len(allowed) - count + 1, count)]
    folder = folder or Path(tempfile.gettempdir()) / f"teacher-scoring-cores-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    for sharers in itertools.count():
        shared_with = {
            cores: {_text(folder / f"{core}.{other}") for core in cores for other in range(sharers)} for cores in sets
        }
        for cores in sorted(sets, key=lambda cores: teacher in shared_with[cores]):
            locks = _lock([folder / f"{core}.{sharers}" for core in cores], teacher)
            if locks:
                if sharers:
                    logger.warning("all cores of this node are taken; sharing %s with %d other engines", cores, sharers)
                return CoreLease(cores, sharers, locks)
    raise AssertionError("unreachable: some number of sharers is free")


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def _lock(paths: list[Path], text: str) -> tuple[IO, ...]:
    """The open files, each locked and with that text in it; none when one of them is locked already."""
    files: list[IO] = []
    for path in paths:
        files.append(path.open("a"))
        try:
            fcntl.flock(files[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            for file in files:
                file.close()
            return ()
    for file in files:
        file.truncate(0)
        file.write(text)
        file.flush()
    return tuple(files)
