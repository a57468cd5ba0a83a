"""A Ray cluster of nodes with GPUs that do not exist, on which the real application is placed.

`run` does it in a process of its own, because Ray's settings are a process's; and in a temporary folder of its own, so
that this cluster and others on the machine do not meet.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import ray
import yaml
from ray import serve
from ray.cluster_utils import Cluster
from ray.serve import RunTarget

from deployments import app, membership
from deployments.config import AppConfig
from deployments.ingress import _Readiness
from deployments.pinning import pinned
from deployments.router import APP_NAME, Router
from scoring import LabelRead
from scoring.errors import TeacherUnavailable
from tests.stand_in_engine import StandInTeacher

ROOT = Path(__file__).parent.parent
RUN_S = 180
PLACED_S = 60
QUICK = {"target_outstanding_tokens": 100, "look_back_period_s": 1.5, "upscale_delay_s": 0, "downscale_delay_s": 0}


def run() -> dict[str, Any]:
    """What `main` found, and under "log" what the cluster said meanwhile."""
    folder = tempfile.mkdtemp(prefix="ray-")  # Ray's sockets want a short path
    own = {"RAY_TMPDIR": folder, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": str(ROOT)}
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | own
    command = [sys.executable, "-m", "tests.pretend_cluster"]
    try:
        done = subprocess.run(command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=RUN_S)
        assert done.returncode == 0, done.stderr[-6000:]
        return json.loads(done.stdout.splitlines()[-1]) | {"log": done.stdout + done.stderr}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def config_args(name: str) -> dict[str, Any]:
    """The `args:` of a file in configs/."""
    return yaml.safe_load((ROOT / "configs" / f"{name}.yaml").read_text())["applications"][0]["args"]


def main() -> dict[str, Any]:
    """One node of eight GPUs at first; a second one comes."""
    app.Teacher = StandInTeacher
    found: dict[str, Any] = {}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        first = cluster.add_node(num_gpus=8).node_id
        ray.init(address=cluster.address)
        serve.start(proxy_location="Disabled")
        for name in ("one-gpu", "eight-gpus", "three-teachers"):
            found[name] = _where(_deploy(config_args(name)))
            serve.delete(APP_NAME)

        args = config_args("autoscaling")
        args["teachers"]["default"]["autoscaling"] |= QUICK
        handles = _deploy(args)
        found["autoscaling"] = _where(handles)
        found["scaled"] = _scale(handles["default"][0])
        serve.delete(APP_NAME)

        handles = _deploy(config_args("two-nodes"))
        found["waiting"] = asyncio.run(_refusals())
        second = cluster.add_node(num_gpus=8).node_id
        found["two-nodes"] = _where(handles)
        serve.delete(APP_NAME)

        found["tensor-parallel"] = _where(_deploy(config_args("tensor-parallel")))
        serve.delete(APP_NAME)

        alone = {"model": "m", "num_gpus": 1, "num_replicas": 3, "max_replicas_per_node": 1}
        handle, _ = _deploy({"teachers": {"alone": alone}})["alone"]
        found["alone"] = _where({"alone": (handle, 2)})
        time.sleep(2)  # for a third, which must not come
        found["alone_later"] = len(membership.members(handle))
        return found | {"nodes": [first, second]}
    finally:
        ray.shutdown()
        cluster.shutdown()


def _deploy(args: dict[str, Any]) -> dict[str, tuple[Any, int]]:
    """Starts the application. By teacher, the handle and how many replicas are due."""
    config = AppConfig.model_validate(args)
    target = RunTarget(app.build_app(config), name=APP_NAME, route_prefix=None)
    serve.run_many([target], wait_for_applications_running=False)
    names = {name: app.deployment_name(name) for name in config.teachers}
    handles = {name: serve.get_deployment_handle(d, APP_NAME, _check_exists=False) for name, d in names.items()}
    return {name: (handle, config.teachers[name].least_replicas) for name, handle in handles.items()}


def _where(handles: dict[str, tuple[Any, int]]) -> dict[str, list[Any]]:
    """By teacher, where each of its replicas went."""
    replicas = {name: _wait_for(handle, count) for name, (handle, count) in handles.items()}
    calls = {name: [pinned(handles[name][0], r, "where").remote() for r in ids] for name, ids in replicas.items()}
    return {name: [call.result(timeout_s=30) for call in some] for name, some in calls.items()}


def _scale(handle: Any) -> list[int]:
    """Replicas at first, with 250 outstanding tokens at 100 each, and without any."""
    (first,) = _wait_for(handle, 1)
    counts = [1]
    for tokens, count in ((250, 3), (0, 1)):
        pinned(handle, first, "set_outstanding").remote(tokens).result(timeout_s=10)
        counts.append(len(_wait_for(handle, count)))
    return counts


async def _refusals() -> dict[str, Any]:
    """What callers are told of a teacher that the cluster has no room for, and after how many seconds."""
    router, started = Router(), time.monotonic()
    asked = {
        "read": lambda: router.read_labels([LabelRead([1], [2])], timeout_s=1),
        "teachers": lambda: router.teachers(timeout_s=1),
        "/ready": lambda: _Readiness(lambda: router).check(None),
    }
    said: dict[str, Any] = dict.fromkeys(asked, "")
    while not all("larger cluster" in sentence for sentence in said.values()):
        assert time.monotonic() - started < PLACED_S, said
        for name, ask in asked.items():
            try:
                await ask()
            except TeacherUnavailable as error:
                said[name] = str(error)
    return said | {"seconds": time.monotonic() - started}


def _wait_for(handle: Any, count: int) -> tuple[str, ...]:
    """The ids of the running replicas once there are `count` of them."""
    deadline = time.monotonic() + PLACED_S
    while len(running := membership.members(handle)) != count:
        assert time.monotonic() < deadline, f"{count} of {handle.deployment_name} are due, and {running} run"
        time.sleep(0.1)
    return running


if __name__ == "__main__":
    print(json.dumps(main()))
