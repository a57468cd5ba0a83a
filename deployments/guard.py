"""What every request passes before a route sees it, and the line about it in the log.

One place for all routes: who asks, how big the head of a request is, whether its body is plain. A refusal has the form
of errors of the route that was asked. Serve's proxy has taken the request in by then: what must not get so far is a
matter for a server in front (`configs/nginx.conf`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from fastapi import Response
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.auth import CHALLENGE, Tokens
from scoring.errors import DeadlineExceeded

logger = logging.getLogger("ray.serve")

OPEN = frozenset({"/health"})
"""The paths that need no token: a process that is alive says so, and nothing else."""

MOST_HEADERS = 100
MOST_HEADER_BYTES = 64 << 10
LONGEST_URL = 8 << 10


class Guard:
    """Wraps an ASGI application.

    Args:
        app: the application.
        routes: its routes, each of which may have an attribute `respond`: makes its response of an exception.
        respond: the same where no route has one.
        tokens: who may ask; None lets everybody.
        timeout_s: Serve's own limit on a request. It is kept here too, because a header of the request lifts it in
            Serve's proxy (`x-request-timeout-seconds: 0`).
    """

    def __init__(
        self,
        app: ASGIApp,
        routes: list[BaseRoute],
        respond: Callable[[Exception], Response],
        tokens: Tokens | None = None,
        timeout_s: float | None = None,
    ) -> None:
        self._app, self._routes, self._respond = app, routes, respond
        self._tokens, self._timeout_s = tokens, timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":  # no route here speaks WebSocket
            await send({"type": "websocket.close", "code": 1008})
            return
        arrived, status, who = time.monotonic(), 499, "nobody"  # until an answer is begun

        async def send_noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            who = self._check(scope)
            async with asyncio.timeout(self._timeout_s):
                await self._app(scope, receive, send_noting)
        except HTTPException as refusal:
            await self._respond_to(scope)(refusal)(scope, receive, send_noting)
        except TimeoutError:
            if status != 499:
                raise
            limit = f"{self._timeout_s:g} s (Serve's http_options.request_timeout_s)"
            late = DeadlineExceeded(f"not answered within {limit}")
            await self._respond_to(scope)(late)(scope, receive, send_noting)
        finally:
            route = getattr(scope.get("route"), "path", "-")  # the path given may hold anything
            took = 1000 * (time.monotonic() - arrived)
            logger.info("%s %s %d %.1f ms, asked by %s", scope["method"], route, status, took, who)

    def _check(self, scope: Scope) -> str:
        """The name of who asks, or what stands for it where nobody needs to say.

        Raises:
            HTTPException: the request goes no further.
        """
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        size = sum(len(name) + len(value) for name, value in headers)
        if len(headers) > MOST_HEADERS or size > MOST_HEADER_BYTES:
            most = f"at most {MOST_HEADERS} of {MOST_HEADER_BYTES} bytes are taken"
            raise HTTPException(431, f"{len(headers)} headers of {size} bytes; {most}")
        if (length := len(scope.get("raw_path") or b"") + len(scope["query_string"])) > LONGEST_URL:
            raise HTTPException(414, f"the URL has {length} bytes; at most {LONGEST_URL} are taken")
        who = "anybody"
        if self._tokens is not None and scope["path"].removeprefix(scope.get("root_path", "")) not in OPEN:
            who = self._tokens.name_of([value for name, value in headers if name == b"authorization"])
            if who is None:
                raise HTTPException(
                    401,
                    "this service asks for a token: as Authorization: Bearer TOKEN, or as the password of HTTP Basic",
                    {"WWW-Authenticate": CHALLENGE},
                )
        for name, value in headers:
            if name == b"content-encoding" and value.strip().lower() not in (b"", b"identity"):
                raise HTTPException(
                    415,
                    "the body is compressed (content-encoding); it is taken as it is, uncompressed",
                    {"Accept-Encoding": "identity"},
                )
        return who

    def _respond_to(self, scope: Scope) -> Callable[[Exception], Response]:
        for route in self._routes:
            if route.matches(scope)[0] is not Match.NONE:
                return getattr(route, "respond", self._respond)
        return self._respond
