"""A stand-in for `scoring.engine`: no model, no GPU, no scores. It only says what it was started with.

Placement is Ray's work and the Teacher's, and so those are the real ones; this takes the place of the one module that
would load a checkpoint.
"""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import Any

import ray
from ray.util.placement_group import get_current_placement_group, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from deployments.teacher import Teacher
from scoring.weights import Weights


class EngineSettings(SimpleNamespace):
    """The fields of the real one, whatever they are."""


class TeacherEngine:
    """Takes the settings, and answers no reads."""

    dead = False

    def __init__(self, settings: EngineSettings) -> None:
        self.settings = settings
        self.weights = Weights(0, settings.model, "none")

    def info(self) -> SimpleNamespace:
        return SimpleNamespace(max_batched_tokens=8192)

    async def self_test(self) -> None:
        pass

    def watch(self) -> None:
        pass

    async def check_health(self) -> None:
        pass

    def shutdown(self) -> None:
        pass


class StandInTeacher(Teacher):
    """The real Teacher, with this module in the place of `scoring.engine`."""

    outstanding_tokens = 0

    def __new__(cls) -> StandInTeacher:  # Serve's way to make one; it calls __init__ afterwards
        sys.modules["scoring.engine"] = sys.modules[__name__]
        return super().__new__(cls)

    async def set_outstanding(self, tokens: int) -> None:
        self.outstanding_tokens = tokens

    async def where(self) -> dict[str, Any]:
        """The node and GPUs of this replica, and those of the workers that vLLM would start in its placement group."""
        group = get_current_placement_group()
        bundles = {}
        if group is not None:
            table = placement_group_table(group)
            bundles = {i: (node, table["bundles"][i]) for i, node in table["bundles_to_node_id"].items()}
        return {
            "node": ray.get_runtime_context().get_node_id(),
            "gpus": ray.get_runtime_context().get_accelerator_ids()["GPU"],
            "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
            "engine_args": self._engine.settings.engine_args,
            "bundles": bundles,
            # One at either end: the replica, which sits in the first bundle, must have left its GPU to the worker.
            "workers": [await _worker(group, i) for i in (min(bundles), max(bundles))] if bundles else [],
        }


@ray.remote(num_cpus=0, num_gpus=1, max_retries=0)
def _gpus_here() -> tuple[str, list[str]]:
    context = ray.get_runtime_context()
    return context.get_node_id(), context.get_accelerator_ids()["GPU"]


async def _worker(group: Any, bundle: int) -> tuple[str, list[str]]:
    strategy = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=bundle)
    return await _gpus_here.options(scheduling_strategy=strategy).remote()
