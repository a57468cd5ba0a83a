"""How a batch is divided over replicas, so that all finish together. Pure functions; deterministic.

The rule is longest processing time first: reads in falling order of cost, each to the replica that is least loaded by
then. Its makespan is at most 4/3 of the best possible one on idle replicas (Graham 1969).
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping

import numpy as np


def plan(costs: np.ndarray, loads: Mapping[str, int]) -> dict[str, np.ndarray]:
    """Assign every read to one replica.

    Args:
        costs: int64 [N], tokens the engine must process for each read.
        loads: per replica, the tokens already waiting there.

    Returns:
        Per replica that gets any, the indices of its reads (int64, rising).

    Raises:
        ValueError: no replicas.
    """
    if not loads:
        raise ValueError("no replicas to plan for")
    heap = [(load, name) for name, load in sorted(loads.items())]
    heapq.heapify(heap)
    shards: dict[str, list[int]] = {name: [] for name in sorted(loads)}
    for i in np.argsort(-costs, kind="stable").tolist():
        load, name = heap[0]
        shards[name].append(i)
        heapq.heapreplace(heap, (load + int(costs[i]), name))
    return {name: np.sort(np.array(reads, dtype=np.int64)) for name, reads in shards.items() if reads}
