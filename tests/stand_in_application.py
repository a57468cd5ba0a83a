"""The real application without engines, for `serve run`. Its teachers answer numbers that anyone can compute.

What lies between a caller and an engine is the real thing: Serve's proxy, the ingress, its Router, Serve's replicas.
"""

import asyncio
from typing import Any

from ray.serve import Application

from deployments import app
from deployments.config import AppConfig
from scoring.errors import DeadlineExceeded
from tests.stand_in_router import BATCH_LIMITS, LIMITS, StandInRouter

SLOW = 1999
"""A read whose prompt begins with this id takes a minute."""


class AnsweringTeacher:
    """As `deployments.teacher.Teacher`, towards Routers."""

    def __init__(self, name: str, config: dict[str, Any]) -> None:
        self._router = StandInRouter()
        self._name = name

    async def read_matrix(self, batch, timeout_s, trace_headers=None, adapters=None, version=None):
        return await self._answer("read_matrix", batch, timeout_s)

    async def read_labels(self, batch, timeout_s, trace_headers=None, adapters=None, version=None):
        return await self._answer("read_labels", batch, timeout_s)

    async def _answer(self, method, batch, timeout_s):
        if batch[0].prompt_ids[0] == SLOW:
            await asyncio.sleep(min(timeout_s, 60))
            raise DeadlineExceeded("a minute has passed, or what was left")
        return await getattr(self._router, method)(batch, return_exceptions=True), 0

    async def heartbeat(self):
        return {"steps": 1, "since_last_step_s": 0.0, "longest_step_s": 0.01, "outstanding_tokens": 0}

    async def info(self):
        return self._router.info(self._name) | {
            "checkpoint": "0123",
            "max_batched_tokens": 64,
            "max_outstanding_tokens": BATCH_LIMITS.max_batch_tokens,
            "max_candidates": LIMITS.max_candidates,
            "prefix_reuse": False,
            "block_size": 32,
        }


def build_app(config: AppConfig) -> Application:
    app.Teacher = AnsweringTeacher
    return app.build_app(config)
