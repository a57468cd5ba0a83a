"""What Serve costs, and what a second replica brings: SmolLM2 through ScoringClient beside bare engines, in one run.

    python -m benchmarks.serving

Four ways to the same scores take turns: one AsyncLLM engine without Ray on one core, two on two cores, a teacher with
one replica on one core, and a teacher with two. Printed are medians with their range, ratios within each round, and who
used the processor while two replicas were busy. Needs two cores and about 10 GB of memory; takes about ten minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.engines import bare
from scoring import LabelRead, MatrixRead
from scoring.demo_teacher import demo_teacher
from scoring.environment import prepare_engine_environment
from scoring.http_client import HttpScoringClient
from tests.engine_process import EngineProcess
from tests.processes import engine_cores, workers
from tests.serve_process import ServeProcess

VOCABULARY = 49_152
ENGINE_ARGS = {"max_model_len": 1024, "kv_cache_memory_bytes": 256 << 20}


def make_reads(lengths: np.ndarray, width: int, seed: int = 0) -> list[MatrixRead]:
    """Reads of so many tokens each, half prompt and half response, with `width` candidates a row."""
    rng = np.random.default_rng(seed)
    reads = []
    for length in lengths.tolist():
        ids = rng.integers(0, VOCABULARY, length)
        prompt = length // 2
        reads.append(MatrixRead(ids[:prompt], ids[prompt:], rng.integers(0, VOCABULARY, (length - prompt, width))))
    return reads


def seconds(ask: Callable[[], Any]) -> float:
    started = time.perf_counter()
    ask()
    return time.perf_counter() - started


def title(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return (process.cmdline() or [process.name()])[0]
    return ""


def processor_seconds(root: int) -> Counter[str]:
    """Seconds of the processor that each kind of process below `root` has used."""
    used: Counter[str] = Counter()
    tree = psutil.Process(root).children(recursive=True)
    replicas = [process for process in tree if "Teacher-" in title(process)]
    kinds = {process: "workers" for replica in replicas for process in workers(replica)}
    kinds |= {process: "engine cores" for replica in replicas for process in engine_cores(replica)}
    for process in tree:
        with contextlib.suppress(psutil.Error):  # it ends just now
            times = process.cpu_times()
            used[kinds.get(process, title(process).split("/")[-1].split(".")[0])] += times.user + times.system
    return used


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serving",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=5, help="how often each way is taken (default 5)")
    parser.add_argument("--single", type=int, default=40, help="single reads, one at a time, per round (default 40)")
    options = parser.parse_args()
    prepare_engine_environment()
    from scoring.engine import EngineSettings

    checkpoint = str(demo_teacher("bfloat16", progress=print))
    folder = Path(tempfile.mkdtemp(prefix="serving-"))
    rng = np.random.default_rng(0)
    mixed = make_reads(np.clip(rng.lognormal(4.4, 0.6, 256), 16, 512).astype(int), width=16)
    even = make_reads(np.full(64, 256), width=16)
    short = make_reads(np.full(1, 64), width=16)

    # The same reads are asked in every round, and bare vLLM computes them anew each time.
    teacher = {"model": checkpoint, "dtype": "bfloat16", "prefix_reuse": False, "engine_args": ENGINE_ARGS}
    teachers = {"one": teacher | {"num_replicas": 1}, "default": teacher | {"num_replicas": 2}}
    print("starting two teachers and two bare engines", flush=True)
    service = ServeProcess(folder, {"teachers": teachers})
    with service.connected():
        service.wait_for_replicas(2)
        cores = sorted(os.sched_getaffinity(0))[:2]
        settings = EngineSettings(checkpoint, dtype="bfloat16", engine_args=ENGINE_ARGS)
        engines = [EngineProcess(settings, core, folder / f"engine-{core}.log") for core in cores]
        try:
            measure(service, engines, {"mixed": mixed, "even": even, "short": short}, options)
        finally:
            for engine in engines:
                engine.close()


def measure(
    service: ServeProcess, engines: list[EngineProcess], reads: dict[str, list[MatrixRead]], options: Any
) -> None:
    from dataclasses import replace

    from deployments import ScoringClient

    client, http = ScoringClient(), HttpScoringClient(service.url)
    served = {
        (teacher, kind): [replace(read, teacher=teacher) for read in some]
        for teacher in ("one", "default")
        for kind, some in reads.items()
    }

    def by_both(some: list[MatrixRead]) -> float:
        """Two bare engines, each with half of the tokens."""
        with ThreadPoolExecutor() as threads:
            return seconds(lambda: list(threads.map(lambda i: engines[i].call(bare, some[i::2])[0], (0, 1))))

    label = [LabelRead([1], [2, 3], teacher="default")]

    def one_by_one(ask: Callable[[], Any]) -> float:
        """Median seconds of calls that are made one after the other."""
        return statistics.median(seconds(ask) for _ in range(options.single))

    def at_once(ask: Callable[[], Any]) -> float:
        """Median seconds of 64 calls that are made at the same time."""
        with ThreadPoolExecutor(64) as threads:
            return statistics.median(threads.map(lambda _: seconds(ask), range(64)))

    ways: dict[str, Callable[[], float]] = {
        "mixed, one replica": lambda: seconds(lambda: client.read_matrix(served["one", "mixed"])),
        "mixed, two replicas": lambda: seconds(lambda: client.read_matrix(served["default", "mixed"])),
        "even, bare engine": lambda: engines[0].call(bare, reads["even"])[0],
        "even, one replica": lambda: seconds(lambda: client.read_matrix(served["one", "even"])),
        "even, two bare engines": lambda: by_both(reads["even"]),
        "even, two replicas": lambda: seconds(lambda: client.read_matrix(served["default", "even"])),
        "single, bare engine": lambda: statistics.median(
            engines[0].call(bare, reads["short"])[0] for _ in range(options.single)
        ),
        "single, one replica": lambda: one_by_one(lambda: client.read_matrix(served["one", "short"])),
        "label, ScoringClient": lambda: one_by_one(lambda: client.read_labels(label)),
        "label, HTTP": lambda: one_by_one(lambda: http.read_labels(label)),
        "64 labels at once, ScoringClient": lambda: at_once(lambda: client.read_labels(label)),
        "64 labels at once, HTTP": lambda: at_once(lambda: http.read_labels(label)),
    }
    for way in ways.values():  # once unmeasured
        way()
    took: dict[str, list[float]] = {name: [] for name in ways}
    used: Counter[str] = Counter()
    for number in range(options.rounds):
        for name, way in ways.items():
            before = processor_seconds(service.process.pid) if name == "mixed, two replicas" else None
            took[name].append(way())
            if before is not None:
                used.update(processor_seconds(service.process.pid) - before)
        print(f"round {number + 1} of {options.rounds}", flush=True)

    print(f"\n{'seconds':<34}{'median':>10}{'least':>10}{'most':>10}")
    for name, values in took.items():
        print(f"{name:<34}{statistics.median(values):>10.3f}{min(values):>10.3f}{max(values):>10.3f}")
    print(f"\n{'ratio, within a round':<46}{'median':>8}{'least':>8}{'most':>8}   due")
    for what, slow, fast, due in (
        ("two replicas to one, reads per second", "mixed, one replica", "mixed, two replicas", "1.70"),
        ("one replica to a bare engine", "even, bare engine", "even, one replica", "0.97"),
        ("two replicas to two bare engines", "even, two bare engines", "even, two replicas", "0.90"),
    ):
        ratios = [a / b for a, b in zip(took[slow], took[fast], strict=True)]
        print(f"{what:<46}{statistics.median(ratios):>8.2f}{min(ratios):>8.2f}{max(ratios):>8.2f}   {due}")
    extra = [1000 * (a - b) for a, b in zip(took["single, one replica"], took["single, bare engine"], strict=True)]
    name = "ms that a single read takes longer"
    print(f"{name:<46}{statistics.median(extra):>8.1f}{min(extra):>8.1f}{max(extra):>8.1f}   15")
    total = sum(used.values())
    print("\nshare of the processor's time while two replicas were busy")
    for name, value in used.most_common(8):
        print(f"  {100 * value / total:5.1f} %  {name}")


if __name__ == "__main__":
    main()
