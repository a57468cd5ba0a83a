"""`teacher-scoring check`: whether a service answers, what it serves and takes, and how long one read takes."""

from __future__ import annotations

import time
from typing import Any

import httpx

from scoring import MatrixRead
from scoring.cli.connection import Connection
from scoring.cli.ending import FINE, SERVICE_FAILED
from scoring.errors import ScoringError, TeacherUnavailable
from scoring.http_client import HttpScoringClient

_TIMEOUT_S = 10.0


def check(connection: Connection) -> int:
    """Print what a service says of itself. Returns the exit code: whether it is ready and every read was answered.

    Raises:
        ScoringError: it cannot be reached, or does not say what it serves.
    """
    with connection.client(HttpScoringClient, timeout_s=_TIMEOUT_S) as client:
        teachers = client.teachers()  # first, since its errors say the most
        fine = all([_say_route(connection, route) for route in ("/health", "/ready")])
        _, known = _get(connection, "/v1/teachers")
        _say("one call", ", ".join(f"{name} {value:,}" for name, value in known.get("limits", {}).items()))
        for name, teacher in teachers.items():
            fine &= _say_teacher(client, name, teacher)
    return FINE if fine else SERVICE_FAILED


def _get(connection: Connection, route: str) -> tuple[int, dict[str, Any]]:
    """Status and document that a route answers with.

    Raises:
        TeacherUnavailable: it answers with something else, or not in time.
    """
    headers = {} if connection.token is None else {"authorization": f"Bearer {connection.token}"}
    base = httpx.URL(connection.url)
    url = base.copy_with(path=base.path.rstrip("/") + route)
    try:
        response = httpx.get(url, headers=headers, timeout=_TIMEOUT_S, trust_env=False, verify=connection.tls or True)
        return response.status_code, dict(response.json())
    except (httpx.HTTPError, ValueError, TypeError) as error:
        raise TeacherUnavailable(f"{route} did not answer as it should: {type(error).__name__}: {error}") from None


def _say_route(connection: Connection, route: str) -> bool:
    began = time.monotonic()
    status, body = _get(connection, route)
    took = f"{(time.monotonic() - began) * 1e3:.0f} ms"
    error = body.get("error", "")  # a proxy's may be a text
    what = body.get("status", "") if status == 200 else error.get("message", "") if isinstance(error, dict) else error
    _say(route, f"{status} {what} ({took})")
    return status == 200


def _say_teacher(client: HttpScoringClient, name: str, teacher: dict[str, Any]) -> bool:
    print()
    _say("teacher", f"{name}{' (the default)' if teacher['default'] else ''}")
    _say("replicas", teacher["replicas"])
    if not teacher["replicas"]:
        return False
    _say("model", teacher["model"])
    _say("checkpoint", f"{teacher['checkpoint']}, weight version {teacher['weight_version']}")
    _say("engine", f"{teacher['engine']}, {teacher['dtype']}, head {teacher['head_dtype']}, {teacher['scores']}")
    _say("vocabulary", f"{teacher['vocabulary']:,}; tokenizer {teacher['tokenizer'] or 'none'}")
    _say("max_length", f"{teacher['max_length']:,} tokens, with one that the engine makes")
    _say("max_candidates", f"{teacher['max_candidates']:,} a position")
    began = time.monotonic()
    try:
        score = client.read_matrix([MatrixRead([0], [0], teacher=name)])[0]
    except ScoringError as error:
        _say("one read", f"failed: {error}")
        return False
    _say(
        "one read", f"{(time.monotonic() - began) * 1e3:.0f} ms for 2 tokens, logprob {score.response_logprobs[0]:.4f}"
    )
    return True


def _say(what: str, value: Any) -> None:
    print(f"{what:<16}{value}")
