"""A Ray cluster of nodes with GPUs that do not exist, on which the real application is placed.

Run as a module it prints, as JSON in its last line, where everything went. A process of its own, because a process has
one setting of Ray's; with a temporary folder of its own, so that it and other clusters of this machine do not meet.
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

ROOT = Path(__file__).parent.parent
RUN_S = 180
PLACED_S = 40
APP = "teacher-scoring"
SCALED = {"min_replicas": 1, "max_replicas": 4, "target_outstanding_tokens": 100, "look_back_period_s": 1}
SCALED |= {"upscale_delay_s": 0, "downscale_delay_s": 0}


def run() -> tuple[dict[str, Any], str]:
    """What `main` found, and the log of the cluster, in a process of its own."""
    folder = tempfile.mkdtemp(prefix="ray-")  # Ray's sockets want a short path
    env = os.environ | {
        "RAY_TMPDIR": folder,
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "0.2",
        "PYTHONPATH": str(ROOT),
    }
    env.pop("RAY_ADDRESS", None)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "tests.pretend_cluster"],
            env=env, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=RUN_S,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-6000:]
        return json.loads(done.stdout.splitlines()[-1]), done.stdout + done.stderr
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> dict[str, Any]:
    """One node of eight GPUs first, to which a second comes."""
    import ray
    from ray import serve
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        cluster.add_node(num_gpus=8)
        ray.init(address=cluster.address)
        serve.start(proxy_location="Disabled")
        found: dict[str, Any] = {}
        for name in ("one-gpu", "eight-gpus", "three-teachers", "autoscaling"):
            found[name] = _placed(_args(name))
        found["scaled"] = _scaled(_args("autoscaling"))
        found["refused"] = _without_room(_args("two-nodes"))
        cluster.add_node(num_gpus=8)
        found["two-nodes"] = _placed(_args("two-nodes"))
        found["tensor-parallel"] = _placed(_args("tensor-parallel"))
        found["one-a-node"] = _one_a_node()
        found["nodes"] = {node["NodeID"]: node["Resources"].get("GPU", 0) for node in ray.nodes()}
        return found
    finally:
        serve.shutdown()
        ray.shutdown()
        cluster.shutdown()


def _args(name: str) -> dict[str, Any]:
    import yaml

    return yaml.safe_load((ROOT / "configs" / f"{name}.yaml").read_text())["applications"][0]["args"]


def _deploy(args: dict[str, Any]) -> dict[str, Any]:
    """Starts the application. The handles of its teachers, by name."""
    from ray import serve
    from ray.serve import RunTarget

    from deployments import app
    from deployments.config import AppConfig
    from tests.stand_in_engine import StandInTeacher

    app.Teacher = StandInTeacher
    config = AppConfig.model_validate(args)
    started = time.monotonic()
    target = RunTarget(app.build_app(config), name=APP, route_prefix=None)
    serve.run_many([target], wait_for_applications_running=False)
    print(f"deploying {list(args['teachers'])} {time.monotonic() - started:.1f}", file=sys.stderr)
    return {
        name: serve.get_deployment_handle(app.deployment_name(name), APP, _check_exists=False)
        for name in config.teachers
    }


def _placed(args: dict[str, Any]) -> dict[str, Any]:
    """Where the replicas of each teacher went."""
    from ray import serve

    from deployments.config import AppConfig

    try:
        handles = _deploy(args)
        counts = {name: teacher.least_replicas for name, teacher in AppConfig.model_validate(args).teachers.items()}
        for name, handle in handles.items():
            _wait_for(handle, counts[name])
        return {name: _ask_all(handle, "where") for name, handle in handles.items()}
    finally:
        serve.delete(APP)


def _scaled(args: dict[str, Any]) -> list[int]:
    """Replicas: at first, with 250 outstanding tokens at 100 each, and without any."""
    from ray import serve

    from deployments.pinning import pinned

    try:
        args["teachers"]["default"]["autoscaling"] = SCALED
        handle = _deploy(args)["default"]
        first = _wait_for(handle, 1)
        counts = [len(first)]
        for tokens, count in ((250, 3), (0, 1)):
            pinned(handle, first[0], "set_outstanding").remote(tokens).result(timeout_s=10)
            counts.append(len(_wait_for(handle, count)))
        return counts
    finally:
        serve.delete(APP)


def _without_room(args: dict[str, Any]) -> dict[str, Any]:
    """What callers are told, and after how long."""
    from ray import serve

    try:
        _deploy(args)
        return asyncio.run(_refusals())
    finally:
        serve.delete(APP)


async def _refusals() -> dict[str, Any]:
    from deployments.router import Router
    from scoring import LabelRead
    from scoring.errors import TeacherUnavailable

    started = time.monotonic()
    said = {"read": "", "teachers": ""}
    router = Router(APP)
    while not all("waits for a larger cluster" in sentence for sentence in said.values()):
        assert time.monotonic() - started < PLACED_S, said
        try:
            await router.read_labels([LabelRead([1], [2])], timeout_s=2)
        except TeacherUnavailable as error:
            said["read"] = str(error)
        try:
            await router.teachers(timeout_s=2)
        except TeacherUnavailable as error:
            said["teachers"] = str(error)
    return said | {"seconds": time.monotonic() - started}


def _one_a_node() -> list[dict[str, Any]]:
    """Where three replicas went that may not share a node, on two nodes: the third has none."""
    from ray import serve

    teacher = {"model": "m", "num_gpus": 1, "num_replicas": 3, "max_replicas_per_node": 1}
    try:
        handle = _deploy({"teachers": {"default": teacher}})["default"]
        _wait_for(handle, 2)
        time.sleep(3)  # for a third, which must not come
        return _ask_all(handle, "where")
    finally:
        serve.delete(APP)


def _wait_for(handle: Any, count: int) -> tuple[str, ...]:
    """The ids of the running replicas once there are `count` of them."""
    from deployments import membership

    deadline = time.monotonic() + PLACED_S
    while len(running := membership.members(handle)) != count:
        assert time.monotonic() < deadline, f"{running} of {handle.deployment_name} run after {PLACED_S} s, not {count}"
        time.sleep(0.1)
    return running


def _ask_all(handle: Any, method: str) -> list[Any]:
    from deployments import membership
    from deployments.pinning import pinned

    calls = [pinned(handle, replica, method).remote() for replica in membership.members(handle)]
    return [call.result(timeout_s=30) for call in calls]


if __name__ == "__main__":
    print(json.dumps(main()))
