"""`GET /v1/models`, `/version`, and the `/health` of one teacher."""

from __future__ import annotations

import time
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, Request, Response

from deployments.http_door import json_response
from deployments.vllm_http.served import Served
from scoring.batches import SCHEMA_VERSION


def add(routes: APIRouter, served: Served) -> None:
    started = int(time.time())

    @routes.get("/v1/models")
    async def models(request: Request) -> Response:
        """The teachers that answer, in the shape of vLLM's model list."""
        known = await served.models(request)
        cards = [_card(name, info, started) for name, info in known.items() if info["replicas"]]
        return json_response({"object": "list", "data": cards})

    @routes.get("/version")
    async def versions(request: Request) -> Response:
        """`version` is vLLM's own, as its route of this name says it; of the (default) teacher's engine."""
        info = await served.info(await served.teacher(request, None))
        engine = info.get("engine", "").split(" ")[-1]
        return json_response(
            {"version": engine, "teacher_scoring": version("teacher-scoring"), "schema_version": SCHEMA_VERSION}
        )


def add_health(routes: APIRouter, served: Served) -> None:
    @routes.get("/health", response_class=Response)
    async def health(request: Request) -> Response:
        """This teacher has a replica. Clients of vLLM's wait for it before they ask anything else."""
        await served.info(await served.teacher(request, None))
        return Response()


def _card(name: str, info: Mapping[str, Any], created: int) -> dict[str, Any]:
    """One entry of vLLM's model list. It lists no sampling: a teacher answers reads only."""
    permission = {
        "id": f"modelperm-{name}",
        "object": "model_permission",
        "created": created,
        "allow_create_engine": False,
        "allow_sampling": False,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "vllm",
        "root": info.get("adapter", info["model"]),
        "parent": info.get("base"),
        "max_model_len": info["max_length"],
        "permission": [permission],
    }
