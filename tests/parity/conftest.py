"""vLLM's own server and this service, over the same tiny teacher, both running."""

import os

import httpx
import pytest

from benchmarks.vllm_server import VllmServer
from tests.serve_process import ServeProcess
from tests.text_teacher import make_text_teacher

MOST = 20
"""What both bound candidates and likeliest tokens by, as vLLM's server does unless it is told otherwise."""
LENGTH = 256


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    return make_text_teacher(tmp_path_factory.mktemp("text-teacher"))


@pytest.fixture(scope="session")
def ours(checkpoint, tmp_path_factory):
    config = {
        "model": str(checkpoint),
        "dtype": "float32",
        "max_candidates": MOST,
        "engine_args": {"max_model_len": LENGTH, "kv_cache_memory_bytes": 64 << 20},
    }
    application = {"teachers": {"default": config}, "aliases": {"judge": "default"}}
    service = ServeProcess(tmp_path_factory.mktemp("service"), application)
    with httpx.Client(base_url=service.url, timeout=60) as client:
        yield client
    service.close()


@pytest.fixture(scope="session")
def theirs(checkpoint, ours, tmp_path_factory):  # started after it, so that two starts do not share the cores
    from scoring.engine import EngineSettings

    settings = EngineSettings(
        str(checkpoint),
        dtype="float32",
        max_candidates=MOST - 1,  # an engine here is started with room for the response's own token
        engine_args={"max_model_len": LENGTH, "kv_cache_memory_bytes": 64 << 20},
    )
    core = sorted(os.sched_getaffinity(0))[-1]
    options = ["--served-model-name=default", "--scheduling-policy=priority"]
    with (
        VllmServer(settings, core, tmp_path_factory.mktemp("vllm") / "vllm.log", options) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        yield client
