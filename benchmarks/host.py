"""What the host's processor does for the bytes of a call: safetensors beside JSON. `benchmarks/wire.py` has more."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from benchmarks import wire
from benchmarks.rows import Result, Row, rows_of
from benchmarks.setup import Setup

KINDS = {
    "wire": (
        "safetensors, processor time",
        "JSON",
        f"{wire.READS} reads of {wire.ROWS:,} x {wire.CANDIDATES} written, read and checked, no engine",
    )
}


class HostStage:
    """One row, without an engine."""

    def __init__(self, **due: float) -> None:
        self.rows = rows_of("-", KINDS, "", due)

    def measure(self, setup: Setup, rows: Mapping[str, Row]) -> Iterator[Result]:
        figures = wire.measure(setup.rounds, wire.READS // 8 if setup.quick else wire.READS)
        _, json, safetensors, *_ = figures
        yield Result(rows["wire"], safetensors["values"], json["values"], notes={"figures": figures})
