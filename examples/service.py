"""The service of an example: a Ray of its own, and an application on it, started, used and ended by one process."""

from __future__ import annotations

import logging
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import psutil
import ray
from ray import serve

from deployments.app import build_app
from deployments.config import AppConfig
from deployments.router import APP_NAME


def start(app: AppConfig, preferred_port: int = 8000) -> str:
    """Start Ray and the application. Returns the HTTP address, which is `preferred_port`'s unless that is taken."""
    port = _free_port(preferred_port)
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    ray.init(address="local", include_dashboard=False, log_to_driver=False, logging_level="error")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as Ctrl-C does, and not in Ray's abort
    serve.start(http_options={"host": "127.0.0.1", "port": port}, logging_config={"log_level": "WARNING"})
    serve.run(build_app(app), name=APP_NAME, route_prefix="/")
    return f"http://127.0.0.1:{port}"


def stop() -> None:
    """End this process's Ray cluster, and wait until none of its processes is left."""
    processes = psutil.Process().children(recursive=True)
    ray.shutdown()
    _, left = psutil.wait_procs(processes, timeout=20)
    for process in left:
        process.kill()


@contextmanager
def step(what: str) -> Iterator[None]:
    """Says what is being done, and how long it took."""
    print(f"{what} ...", flush=True)
    started = time.monotonic()
    yield
    print(f"  {time.monotonic() - started:.1f} s", flush=True)


def trainer_cores() -> int:
    """Cores for whoever learns: one is the teacher's."""
    return max(len(os.sched_getaffinity(0)) - 1, 1)


def machine() -> dict[str, str]:
    """What an example ran on, for its numbers."""
    info = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.partition(":")[2].strip() for line in info if line.startswith("model name")), "unknown")
    versions = {name: version(name) for name in ("ray", "torch", "transformers")}
    return {"cpu": cpu, "cores": str(len(os.sched_getaffinity(0))), **versions}


def _free_port(preferred: int) -> int:
    """`preferred`, or another port when that one is taken."""
    for port in (preferred, 0):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
                return probe.getsockname()[1]
            except OSError:
                print(f"  port {port} is taken; another one is used")
    raise RuntimeError("no free port on 127.0.0.1")
