"""vLLM's own HTTP server on one core, and the requests of its scoring route."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import numpy as np
import psutil

from scoring.reads import MatrixRead
from tests.serve_process import free_port

if TYPE_CHECKING:
    from scoring.engine import EngineSettings

ROUTE = "/inference/v1/generate"
_MODULE = "vllm.entrypoints.launchers.api_server.entry"
_START_S, _STOP_S = 240, 30


class VllmServer:
    """`vllm serve --enable-scale-out`, with an engine as a teacher's. `url` answers once the constructor returns.

    Its command line asks for a distribution called `vllm`, and the one for CPUs has another name: hence the module.

    Args:
        settings: of the teacher.
        options: further ones of its command line.
    """

    def __init__(
        self, settings: EngineSettings, core: int, log: Path, options: Sequence[str] = ("--skip-tokenizer-init",)
    ) -> None:
        from scoring.engine import engine_arguments

        given = engine_arguments(settings)
        values = [f"--{name.replace('_', '-')}={given[name]}" for name in _VALUES if name in given]
        port = free_port()
        self.url, self.log = f"http://127.0.0.1:{port}", log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", _MODULE, "--host=127.0.0.1", f"--port={port}", *values, *_SWITCHES, *options],
                env={
                    **os.environ,
                    "VLLM_CPU_OMP_THREADS_BIND": str(core),
                    "OMP_NUM_THREADS": "1",
                },
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            self._wait_until_up()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> VllmServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End it and every process it started."""
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended by itself
            host = psutil.Process(self._process.pid)
            tree = [host, *host.children(recursive=True)]
            host.terminate()
            _, left = psutil.wait_procs(tree, timeout=_STOP_S)
            for process in left:
                process.kill()
        self._process.wait()

    def _wait_until_up(self) -> None:
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline:
            assert self._process.poll() is None, f"vLLM's server did not start:\n{self._end_of_log()}"
            try:
                if httpx.get(f"{self.url}/health", timeout=10).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.25)
        raise AssertionError(f"vLLM's server is not up after {_START_S} s:\n{self._end_of_log()}")

    def _end_of_log(self) -> str:
        return self.log.read_text(errors="replace")[-4000:]


# Of the arguments that a teacher's engine is started with, those that its command line takes with a value.
_VALUES = ("model", "dtype", "max_model_len", "block_size", "kv_cache_memory_bytes", "max_logprobs", "logprobs_mode")
_SWITCHES = (
    "--enable-scale-out",
    "--enforce-eager",
    "--generation-config=vllm",
    "--disable-uvicorn-access-log",
)


def ask(client: httpx.Client, read: MatrixRead) -> np.ndarray:
    """float32 [R, K]: the candidates' scores, by vLLM's route of any server that has it."""
    body = {
        "token_ids": [*read.prompt_ids.tolist(), *read.response_ids.tolist()],
        "sampling_params": {
            "max_tokens": 1,
            "temperature": 0.0,
            "prompt_logprob_token_ids": read.candidate_ids.tolist(),
            "prompt_logprob_start": len(read.prompt_ids) - 1,
        },
    }
    response = client.post(ROUTE, content=json.dumps(body), headers={"content-type": "application/json"})
    response.raise_for_status()
    return np.load(io.BytesIO(base64.b64decode(response.json()["prompt_token_id_logprobs"])), allow_pickle=False)
