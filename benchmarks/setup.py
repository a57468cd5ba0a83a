"""What every stage of a run shares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.workloads import Measured


@dataclass(frozen=True)
class Setup:
    """
    Attributes:
        teachers: those measured, by name.
        cores: logical cores; what is compared runs on the same one of them.
        rounds: counted rounds of each comparison.
        quick: with fewer reads.
        folder: for logs and configurations.
    """

    teachers: Mapping[str, Measured]
    cores: list[int]
    rounds: int
    quick: bool
    folder: Path

    def count(self, reads: int, teacher: str) -> int:
        """How many of a workload's reads are asked: in a quick run of a real model, a quarter."""
        return reads // 4 if self.quick and teacher != "tiny" else reads
