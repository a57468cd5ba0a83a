"""What every HTTP route shares: how a request's body comes in, and how an answer or an error goes out."""

from __future__ import annotations

import asyncio
import json
import logging
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.requests import ClientDisconnect

from scoring.errors import ScoringError
from scoring.limits import BatchLimits

logger = logging.getLogger("ray.serve")

JSON = "application/json"

# Parsing this much JSON takes about 3 ms. More is parsed in a thread, so that other requests get their turn between
# one read's ids and the next.
_BIG_BODY = 256 * 1024


async def read_body(request: Request, limits: BatchLimits) -> bytes:
    """The whole body. Serve's proxy has read it before this process hears of the request.

    Raises:
        BatchTooLarge: it has more than `max_request_bytes`.
    """
    told = request.headers.get("content-length", "")
    limits.check_body(int(told) if told.isdecimal() else 0)
    body = bytearray()
    async for piece in request.stream():
        body += piece
        limits.check_body(len(body))
    return bytes(body)


async def beside_the_loop(size: int, work: Callable[..., Any], *args: Any) -> Any:
    """`work(*args)`, in a thread when it is about more than 256 KiB (`size`, in bytes)."""
    return await asyncio.to_thread(work, *args) if size > _BIG_BODY else work(*args)


def trace_headers(request: Request) -> dict[str, str] | None:
    """The W3C trace context of a request, None without one."""
    found = {name: request.headers[name] for name in ("traceparent", "tracestate") if name in request.headers}
    return found or None


def json_response(document: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """`document` as JSON, ASCII only: a name may hold what no UTF-8 can."""
    return Response(json.dumps(document, allow_nan=False), status, headers, media_type=JSON)


def retry_after(error: ScoringError) -> dict[str, str]:
    """The Retry-After header of an error that says when to come back: whole seconds, at least one."""
    seconds = error.details.get("retry_after_s")
    return {} if seconds is None else {"Retry-After": str(max(1, round(seconds)))}


def route_answering_errors(make_response: Callable[[Exception], Response]) -> type[APIRoute]:
    """A FastAPI route class whose every exception becomes the response `make_response` makes of it. So does what never
    reaches the route (see `deployments.guard`), which finds that function as `respond`.

    Cancellation (a client that left) is no `Exception` and passes through, down to the engine.
    """

    class Route(APIRoute):
        respond = staticmethod(make_response)

        def get_route_handler(self) -> Callable:
            answer = super().get_route_handler()

            async def answer_or_error(request: Request) -> Response:
                try:
                    return await answer(request)
                except ClientDisconnect:
                    return Response(status_code=499)  # nobody is there to read it
                except Exception as error:
                    return make_response(error)

            return answer_or_error

    return Route


def log_unexpected(error: Exception) -> None:
    """One line for the log: what was raised, and where. Not what it says, which may be of what was asked; that comes
    with level DEBUG."""
    chain: list[str] = []
    cause: BaseException | None = error
    while cause is not None and len(chain) < 5:
        frames = traceback.extract_tb(cause.__traceback__)
        where = f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
        chain.append(type(cause).__name__ + where)
        cause = cause.__cause__ or getattr(cause, "cause", None)  # the latter of an error that Ray carried
    logger.error("a request failed unexpectedly: %s", ", from ".join(chain))
    logger.debug("where it failed", exc_info=error)
