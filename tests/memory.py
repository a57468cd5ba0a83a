"""How much memory processes take: now, and at their peak while an engine answers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from tests.processes import workers

if TYPE_CHECKING:
    from scoring.batches import MatrixBatch
    from scoring.engine import TeacherEngine
    from scoring.scores import MatrixScores


def forget_peak(pid: int) -> None:
    """Count the peak of a process's memory from here on."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def resident(pid: int, peak: bool = False) -> int:
    """Bytes of a process that are in memory, or were at most since its peak was forgotten."""
    field = "VmHWM:" if peak else "VmRSS:"
    line = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


async def read_and_weigh(engine: TeacherEngine, batch: MatrixBatch) -> tuple[MatrixScores, int, int]:
    """The answer to a batch; by how many bytes this process was larger meanwhile than before, and the engine's
    worker. Runs in the engine's process."""
    (worker,) = workers(psutil.Process())
    pids = os.getpid(), worker.pid
    before = [resident(pid) for pid in pids]
    for pid in pids:
        forget_peak(pid)
    scores = await engine.read_matrix(batch)
    here, there = (resident(pid, peak=True) - start for pid, start in zip(pids, before, strict=True))
    return scores, here, there
