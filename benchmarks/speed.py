"""How fast it is: ratios, each measured side by side in one run on the same reads.

    python -m benchmarks.speed --quick
    python -m benchmarks.speed --rows 'v1-*' 'service-*'

What is compared takes turns on one core, round after round; a row's ratio is the other side's seconds to this side's,
as the median of the rounds, with their range. Where the two sides answer different scores, the run fails. Writes
bench.json with every number, and bench.png.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from fnmatch import fnmatch
from pathlib import Path

from benchmarks import machine
from benchmarks.engines import EngineStage
from benchmarks.host import HostStage
from benchmarks.memory import MemoryStage
from benchmarks.rows import Result, Row, draw, table, write_json
from benchmarks.service import ServiceStage
from benchmarks.setup import Setup
from benchmarks.workloads import measured_teachers
from scoring.environment import prepare_engine_environment

ROOT = Path(__file__).resolve().parent.parent
ROUNDS, QUICK_ROUNDS = 5, 3
QUICK_ROWS = ("v1-tiny", "hf-tiny", "floor-tiny", "service-tiny", "labels-tiny", "wire")

STAGES = (
    EngineStage("tiny", v1=2.4, hf=1.0, floor=0.85),
    EngineStage("smollm2", v1=1.3, hf=1.4, floor=0.95, extras=0.9, top=0.87, all=0.8),
    ServiceStage("tiny", service=0.85, http=1.2, route=1.2, calls=1.2, labels=8),
    ServiceStage("smollm2", service=0.97, http=0.97, cold=0.9, warm=0.75),
    HostStage(wire=50),
    MemoryStage(**{"memory-read": 1.0, "memory-many": 0.97}),
)
"""Each starts its engines, measures its rows, and ends its engines. What follows a row's kind is what is due."""

AT_ONCE = (HostStage, MemoryStage)
"""These count processor time and memory, which others at work beside them change little: they run together."""


def main() -> int:
    names = [row.name for stage in STAGES for row in stage.rows.values()]
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.speed",
        description=__doc__,
        epilog=f"The rows: {', '.join(names)}.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rows", nargs="+", metavar="NAME", help="only these; * and ? stand for others")
    parser.add_argument(
        "--quick", action="store_true", help=f"{QUICK_ROUNDS} rounds, a quarter of the larger teacher's reads, few rows"
    )
    parser.add_argument("--rounds", type=int, help=f"counted rounds of each comparison (default {ROUNDS})")
    parser.add_argument("--out", type=Path, default=ROOT / "out", help="folder for bench.json and bench.png")
    options = parser.parse_args()
    patterns = options.rows or (QUICK_ROWS if options.quick else ("*",))
    wanted = {name for name in names if any(fnmatch(name, pattern) for pattern in patterns)}
    if not wanted:
        parser.error(f"no row is called {' or '.join(patterns)}; there are {', '.join(names)}")

    began = time.monotonic()
    prepare_engine_environment()
    folder = Path(tempfile.mkdtemp(prefix="speed-"))
    setup = Setup(
        teachers=measured_teachers(folder),
        cores=sorted(os.sched_getaffinity(0)),
        rounds=options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS),
        quick=options.quick,
        folder=folder,
    )
    here = machine.describe()
    print(f"{machine.in_words(here)}; logs in {folder}", flush=True)
    results: list[Result] = []
    for _, stages in itertools.groupby(
        enumerate(STAGES), lambda stage: -1 if isinstance(stage[1], AT_ONCE) else stage[0]
    ):
        rows = {
            number: {kind: row for kind, row in stage.rows.items() if row.name in wanted} for number, stage in stages
        }
        rows = {number: of_stage for number, of_stage in rows.items() if of_stage}
        if not rows:
            continue
        measuring = ", ".join(row.name for of_stage in rows.values() for row in of_stage.values())
        print(f"{measuring}  ({time.monotonic() - began:.0f} s)", flush=True)
        try:
            with ProcessPoolExecutor(len(rows), mp_context=multiprocessing.get_context("spawn")) as processes:
                running = [processes.submit(measure, number, setup, of_stage) for number, of_stage in rows.items()]
                results += [result for stage in running for result in stage.result()]
        except KeyboardInterrupt:  # which the stages' processes have seen as well; what is measured is shown
            break
    failed = wanted - {result.row.name for result in results}
    conditions = {"machine": here, "rounds": setup.rounds, "quick": setup.quick, "failed": sorted(failed)}
    write_json(options.out / "bench.json", results, conditions | {"seconds": round(time.monotonic() - began)})
    if results:
        draw(options.out / "bench.png", results, machine.in_words(here))
        print(f"\n{table(results)}")
    shorter = ", a quarter of the larger teacher's reads" if setup.quick else ""
    print(f"\nmedians of {setup.rounds} rounds{shorter}; {machine.in_words(here)}")
    print(f"{time.monotonic() - began:.0f} s; every number: {options.out / 'bench.json'}")
    if failed:
        print(f"FAILED: {', '.join(sorted(failed))}")
    return bool(failed)


def measure(number: int, setup: Setup, rows: Mapping[str, Row]) -> list[Result]:
    """What a stage measured; when it fails, which is printed, what it had measured until then.

    A stage has a process of its own: what Ray Serve keeps of one cluster stands in the way of another.
    """
    results: list[Result] = []
    try:
        for result in STAGES[number].measure(setup, rows):
            results.append(result)
    except Exception:  # what the other stages measure is worth having
        traceback.print_exc()
    return results


if __name__ == "__main__":
    raise SystemExit(main())
