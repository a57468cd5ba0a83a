"""The service as its users start it: `serve run FILE` in a process of its own, with a Ray cluster of its own."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import ray
import yaml
from ray import serve

from deployments.router import APP_NAME

START_S = 240
STOP_S = 60
_TOKEN = secrets.token_hex(32)  # of every cluster that this process starts: Ray reads a token once per process
_CLIENT_SETTINGS = ("RAY_ADDRESS", "RAY_AUTH_MODE")  # of this process, see conftest.py; a cluster chooses its own


def two_replicas_of(path: Path) -> dict[str, Any]:
    """The settings of a small float32 teacher with two replicas."""
    return {
        "model": str(path),
        "dtype": "float32",
        "num_replicas": 2,
        "engine_args": {"max_model_len": 512, "kv_cache_memory_bytes": 64 << 20},
    }


def outstanding_tokens() -> list[int]:
    """Of each replica of the default teacher, the tokens that are not answered yet. Needs a connected process."""
    beats = serve.get_deployment_handle("Teacher-default", APP_NAME).broadcast("heartbeat").results(timeout_s=30)
    return [beat["outstanding_tokens"] for beat in beats]


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class ServeProcess:
    """`serve run` on one application. `url` answers once the constructor returns.

    Args:
        folder: for the YAML, the log, and the home folder in which Ray keeps the cluster's token.
        app_args: the `args:` of the application.
        import_path: what builds it.
        http_options: Serve's, beside the port.
        headers: of the requests by which this process sees how far the service is.
    """

    def __init__(
        self,
        folder: Path,
        app_args: dict[str, Any],
        import_path: str = "deployments.app:build_app",
        http_options: dict[str, Any] | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        port = free_port()
        self._headers = headers
        self.url = f"http://127.0.0.1:{port}"
        self.home = folder
        (folder / ".ray").mkdir()
        (folder / ".ray" / "auth_token").write_text(_TOKEN)
        self.log = folder / "serve.log"
        config = {
            "http_options": {"host": "127.0.0.1", "port": port, **(http_options or {})},
            "applications": [
                {
                    "name": "teacher-scoring",
                    "route_prefix": "/",
                    "import_path": import_path,
                    "args": app_args,
                }
            ],
        }
        path = folder / "serve.yaml"
        path.write_text(yaml.safe_dump(config))
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                [str(Path(sys.executable).parent / "serve"), "run", str(path)],
                env={
                    **{name: value for name, value in os.environ.items() if name not in _CLIENT_SETTINGS},
                    "HOME": str(folder),
                    "HF_HUB_OFFLINE": "1",
                    "RAY_USAGE_STATS_ENABLED": "0",
                },
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                # A shell's background job has SIGINT ignored, and hands that down.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )
        try:
            self._wait_until_ready()
        except BaseException:
            self.close()
            raise

    def processes(self, name: str) -> list[psutil.Process]:
        """Its living processes whose name begins so."""
        found = []
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):  # it ends just now
                if (process.cmdline() or [""])[0].startswith(name) and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    @contextlib.contextmanager
    def connected(self) -> Iterator[None]:
        """This process, and those it starts, are connected to the service's Ray cluster; then the service is closed."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("HOME", str(self.home))  # where Ray finds the cluster's token
            patch.setenv("RAY_ADDRESS", self._ray_address())
            try:
                ray.init(log_to_driver=False)
                yield
            finally:
                ray.shutdown()
                self.close()

    def wait_for_replicas(self, count: int) -> None:
        """Wait until the default teacher has so many replicas; `/ready` asks for one."""
        deadline = time.monotonic() + START_S
        while self._teachers()["default"]["replicas"] < count:
            assert time.monotonic() < deadline, f"fewer than {count} replicas:\n{self.end_of_log()}"
            time.sleep(0.5)

    def _teachers(self) -> dict[str, dict[str, Any]]:
        return httpx.get(f"{self.url}/v1/teachers", timeout=30, headers=self._headers).json()["teachers"]

    def log_files(self) -> list[Path]:
        """Everything that it, Ray and vLLM write: its output, and the files of the Ray session."""
        commands = [p.cmdline() for p in psutil.Process(self.process.pid).children(recursive=True)]
        options = [option for command in commands for option in command]
        folder = Path(next(o.partition("=")[2] for o in options if o.startswith("--log_dir=")))
        return [self.log, *(path for path in folder.rglob("*") if path.is_file())]

    def _ray_address(self) -> str:
        """Address of its Ray cluster, among others that may run on this machine."""
        commands = [p.cmdline() for p in psutil.Process(self.process.pid).children(recursive=True)]
        options = [option for command in commands for option in command]
        return next(o.partition("=")[2] for o in options if o.startswith("--gcs-address="))

    def close(self) -> None:
        """Interrupt it, as Ctrl-C does, and wait for every process it started.

        Raises:
            AssertionError: some outlived it, and were killed.
        """
        host = psutil.Process(self.process.pid)
        tree = host.children(recursive=True)
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(STOP_S)
        finally:
            _, left = psutil.wait_procs(tree, timeout=15)
            for process in [*left, host]:
                if process.is_running():
                    process.kill()
        assert not left, f"outlived the service: {left}\n{self.end_of_log()}"

    def end_of_log(self) -> str:
        return self.log.read_text(errors="replace")[-6000:]

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            failed = self.process.poll() is not None or b"failed with exception" in self.log.read_bytes()
            assert not failed, f"the service did not start:\n{self.end_of_log()}"
            try:
                if httpx.get(f"{self.url}/ready", timeout=10, headers=self._headers).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.25)
        raise AssertionError(f"not ready after {START_S} s:\n{self.end_of_log()}")
