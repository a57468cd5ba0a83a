"""Where replicas go: a teacher's shape as options of Ray Serve and of vLLM, and what a cluster has no room for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import ray

from deployments.autoscaling import autoscaling_options
from deployments.config import TeacherConfig


def deployment_options(config: TeacherConfig) -> dict[str, Any]:
    """The options of `serve.deployment` that say how many replicas there are, what each takes, and where."""
    options: dict[str, Any] = {"num_replicas": config.num_replicas}
    if config.autoscaling:
        options = {"autoscaling_config": autoscaling_options(config.autoscaling)}
    if config.nodes == 1:
        options["ray_actor_options"] = {"num_cpus": config.num_cpus, "num_gpus": config.num_gpus}
        options["max_replicas_per_node"] = config.max_replicas_per_node
        return options
    # The replica sits in the first bundle and takes no GPU: each of vLLM's workers takes that of one bundle.
    bundles: list[dict[str, float]] = [{"GPU": 1} for _ in range(int(config.num_gpus))]
    if config.num_cpus:
        bundles[0]["CPU"] = config.num_cpus
    options["ray_actor_options"] = {"num_cpus": config.num_cpus, "num_gpus": 0}
    options["placement_group_bundles"] = bundles
    options["placement_group_strategy"] = "PACK"
    return options


def engine_args(config: TeacherConfig) -> dict[str, Any]:
    """The teacher's `engine_args`, with the executor that suits where the replica's GPUs are.

    Named always: vLLM, left to choose, depends on what it finds around it. Over several nodes its Ray executor takes
    the placement group of the replica it is called in.
    """
    if config.nodes > 1:
        return {**config.engine_args, "distributed_executor_backend": "ray"}
    if config.num_gpus > 1:
        return {**config.engine_args, "distributed_executor_backend": "mp"}
    return config.engine_args


def cluster_nodes() -> list[dict[str, float]]:
    """What each living node of the connected cluster has in all, free or not: `{"GPU": 8.0, "CPU": 64.0, ...}`."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def without_room(teachers: Mapping[str, TeacherConfig], nodes: Sequence[Mapping[str, float]]) -> dict[str, str]:
    """The teachers that an empty cluster of these nodes could not hold, each with a sentence that says why.

    Serve would wait for ever, and not say so to those who call. Nodes may still join, so this is no refusal.
    """
    found = {}
    for name, config in teachers.items():
        room = _room(config, nodes)
        if room < config.least_replicas:
            found[name] = (
                f"teacher {name!r} waits for a larger cluster: it asks for {_asked(config)}, and on "
                f"{_count(len(nodes), 'node')} there is room for {room}{_largest(config, nodes)} (settings: num_gpus "
                "and nodes, with the sizes in engine_args; num_cpus; num_replicas or autoscaling; "
                "max_replicas_per_node)"
            )
    others = {name: config for name, config in teachers.items() if config.num_gpus and name not in found}
    asked = sum(config.least_replicas * config.num_gpus for config in others.values())
    there = sum(node.get("GPU", 0) for node in nodes)
    if asked > there:
        sentence = (
            f"teachers {', '.join(others)} together ask for {_count(asked, 'GPU')}, and on "
            f"{_count(len(nodes), 'node')} there are {there:g}: some wait for a larger cluster "
            "(settings: num_gpus; num_replicas or autoscaling)"
        )
        found |= dict.fromkeys(others, sentence)
    return found


def _room(config: TeacherConfig, nodes: Sequence[Mapping[str, float]]) -> int:
    """How many replicas these nodes hold when nothing else is there."""
    limit = config.max_replicas_per_node or config.least_replicas * config.nodes
    parts = 0
    for node in nodes:
        # In Ray's own unit, a ten-thousandth: 1 // 0.1 is 9.
        needs = _needs_on_a_node(config).items()
        held = (round(node.get(name, 0) * 10_000) // round(need * 10_000) for name, need in needs)
        parts += min([limit, *held])
    return parts // config.nodes


def _needs_on_a_node(config: TeacherConfig) -> dict[str, float]:
    needs = {"GPU": config.num_gpus / config.nodes}
    if config.nodes == 1:
        needs["CPU"] = config.num_cpus
    return {name: need for name, need in needs.items() if need}


def _asked(config: TeacherConfig) -> str:
    asked = _count(config.least_replicas, "replica")
    if needs := _needs_on_a_node(config):
        where = "on one node" if config.nodes == 1 else f"on each of {config.nodes} nodes"
        asked += f" of {' and '.join(_count(need, name) for name, need in needs.items())} {where}"
    if config.max_replicas_per_node:
        asked += f", at most {config.max_replicas_per_node} of them on the same node"
    return asked


def _largest(config: TeacherConfig, nodes: Sequence[Mapping[str, float]]) -> str:
    largest = [_count(max((n.get(name, 0) for n in nodes), default=0), name) for name in _needs_on_a_node(config)]
    return f"; the largest has {' and '.join(largest)}" if largest else ""


def _count(number: float, name: str) -> str:
    return f"{number:g} {name}" if number == 1 else f"{number:g} {name}s"
