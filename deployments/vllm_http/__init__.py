"""The routes of vLLM's own server that score, for clients that already speak them.

Requests, answers and errors are field by field those of vLLM 0.32 and 0.33. A field that could not change a score is
accepted; a known one that would change the answer, or ask for more than scores, is refused by name instead of being
dropped; an unknown one is ignored, as there. What is different on purpose is listed in `tests/parity/differences.py`,
which the tests hold against vLLM's own server.

Each route is served twice: as it is there, for the default teacher (or the one that `model` names), and under
`/teachers/{name}/`, which is like a server of that teacher and its adapters alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from fastapi import APIRouter, Depends, Path

from deployments.http_door import route_answering_errors
from deployments.router import Router
from deployments.vllm_http import completions, generate, generative_scoring, models, tokenize
from deployments.vllm_http.dialect import error_response
from deployments.vllm_http.served import Served
from scoring.limits import BatchLimits

_ROUTES = (generate, completions, generative_scoring, tokenize, models)


def vllm_routes(router: Callable[[], Router], limits: BatchLimits) -> APIRouter:
    """The routes, over the Router that `router` gives.

    Args:
        limits: what one request may hold.
    """
    served = Served(router, limits)
    routes = APIRouter(tags=["vLLM"])
    for prefix, named in (("", []), ("/teachers/{teacher}", [Depends(_named)])):
        mount = APIRouter(prefix=prefix, dependencies=named, route_class=route_answering_errors(error_response))
        for route in _ROUTES:
            route.add(mount, served)
        if prefix:
            models.add_health(mount, served)
        routes.include_router(mount)
    return routes


def _named(
    teacher: Annotated[str, Path(description="A teacher, an alias or an adapter.", examples=["default"])],
) -> None:
    """Says to OpenAPI what the path holds; `Served` reads it."""
