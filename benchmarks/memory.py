"""Memory of a replica's process: what one large read takes above idle, and whether many small ones leave any behind."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import psutil

from benchmarks.rows import Result, Row, rows_of, say
from benchmarks.setup import Setup
from benchmarks.workloads import Reads
from tests.memory import forget_peak, resident
from tests.serve_process import ServeProcess
from tests.tiny_teacher import make_tiny_teacher

ROWS, WIDTH = 4096, 1024
SMALL_READS, AT_ONCE = 10_000, 500
_ALLOWANCE_MIB = 64
_VOCABULARY = 2048
_MIB = 1 << 20


KINDS = {
    "memory-read": (
        "a replica's peak memory above idle",
        f"twice the request, the answer and {_ALLOWANCE_MIB} MiB",
        f"one read of {ROWS} x {WIDTH}",
    ),
    "memory-many": (
        f"a replica's memory after {SMALL_READS:,} reads",
        f"after {SMALL_READS // 10:,}",
        "reads of 32 tokens, K = 16",
    ),
}


class MemoryStage:
    """Rows whose ratio is what is allowed to what is used. The teacher is the tiny one, with room for long reads."""

    def __init__(self, **due: float) -> None:
        self.rows = rows_of("c", KINDS, "tiny", due)

    def measure(self, setup: Setup, rows: Mapping[str, Row]) -> Iterator[Result]:
        from deployments import ScoringClient

        tiny = make_tiny_teacher(setup.folder / "long", max_position_embeddings=8192)
        teacher = {"model": str(tiny), "dtype": "float32", "engine_args": {"max_model_len": 8192}}
        folder = setup.folder / "service-memory"
        folder.mkdir()
        service = ServeProcess(folder, {"teachers": {"default": teacher}})
        with service.connected(), ScoringClient() as client:
            processes = _processes()
            client.read_matrix(_small(0))
            for kind, measure in (("memory-read", self._one_large), ("memory-many", self._many_small)):
                if kind in rows:
                    yield measure(setup, client, processes)

    def _one_large(self, setup: Setup, client: Any, processes: dict[str, int]) -> Result:
        request, answer = ROWS * WIDTH * 4, ROWS * (1 + WIDTH) * 4
        allowed = (2 * request + answer) / _MIB + _ALLOWANCE_MIB
        used: dict[str, list[float]] = {name: [] for name in processes}
        for number in range(setup.rounds):
            batch = Reads(_VOCABULARY, 1, 1, ROWS, WIDTH, number).batch()
            before = {name: resident(pid) for name, pid in processes.items()}
            for pid in processes.values():
                forget_peak(pid)
            assert client.read_matrix(batch)[0].logprobs.shape == (ROWS, WIDTH)
            for name, pid in processes.items():
                used[name].append((resident(pid, peak=True) - before[name]) / _MIB)
            say("   ".join(f"{name} {values[-1]:.1f} MiB" for name, values in used.items()))
        ours = used["replica"]
        return Result(self.rows["memory-read"], ours, [allowed] * len(ours), "MiB above idle", {"processes": used})

    def _many_small(self, setup: Setup, client: Any, processes: dict[str, int]) -> Result:
        sizes: dict[str, list[float]] = {name: [] for name in processes}
        for number in range(SMALL_READS // AT_ONCE):
            client.read_matrix(_small(number))
            for name, pid in processes.items():
                sizes[name].append(resident(pid) / _MIB)
        say("   ".join(f"{name} {v[1]:.1f} -> {v[-1]:.1f} MiB" for name, v in sizes.items()))
        after_some = sizes["replica"][SMALL_READS // 10 // AT_ONCE - 1]
        return Result(self.rows["memory-many"], [sizes["replica"][-1]], [after_some], "MiB", {"processes": sizes})


def _small(number: int) -> Any:
    return Reads(_VOCABULARY, AT_ONCE, 16, 16, 16, number).batch()


def _processes() -> dict[str, int]:
    """Process ids of the default teacher's one replica and of its engine's processes."""
    from ray import serve

    from deployments.router import APP_NAME

    (placed,) = serve.get_deployment_handle("Teacher-default", APP_NAME).broadcast("placement").results(timeout_s=60)
    found = {"replica": placed["pid"]}
    for pid in placed["engine"]:
        with contextlib.suppress(psutil.Error):
            name = psutil.Process(pid).cmdline()[0].partition("::")[2]
            if name:
                found[name] = pid
    return found
