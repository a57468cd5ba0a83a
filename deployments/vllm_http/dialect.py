"""vLLM's dialect: its error bodies, and what its requests may hold.

JSON values must have the type of their field (vLLM takes `2.0`, `"2"` and `true` for 2 in places).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from http import HTTPStatus
from reprlib import repr as short
from typing import Any, TypeVar

import numpy as np
from fastapi import Request, Response
from starlette.exceptions import HTTPException

from deployments.http_door import JSON, beside_the_loop, json_response, log_unexpected, read_body, retry_after
from scoring import wire
from scoring.errors import InvalidRead, ScoringError, UnknownTeacher
from scoring.ids import id_vector
from scoring.limits import BatchLimits

Parsed = TypeVar("Parsed")


class Refusal(Exception):
    """A request that vLLM's server would refuse, or that would get something else than scores from it.

    `kind`, `param` and `status` are the error body's `type`, `param` and `code`.
    """

    def __init__(self, message: str, param: str | None = None, kind: str = "BadRequestError", status: int = 400):
        super().__init__(message)
        self.message, self.param, self.kind, self.status = message, param, kind, status


def malformed(message: str, param: str | None) -> Refusal:
    """What does not fit the request's schema; vLLM gives it this type, and what it checks later BadRequestError."""
    return Refusal(message, param, "Bad Request")


def not_served(message: str, param: str | None = "model") -> Refusal:
    return Refusal(message, param, "NotFoundError", 404)


def error_response(error: Exception) -> Response:
    """`{"error": {"message", "type", "param", "code"}}`."""
    headers = None
    if isinstance(error, ScoringError):
        headers = retry_after(error)
        error = _as_refusal(error)
    if isinstance(error, HTTPException):  # of no route's own, such as a missing token
        headers = error.headers
        error = Refusal(error.detail, None, HTTPStatus(error.status_code).phrase, error.status_code)
    if not isinstance(error, Refusal):
        log_unexpected(error)
        error = Refusal("Internal server error", kind="InternalServerError", status=500)
    body = {"message": error.message, "type": error.kind, "param": error.param, "code": error.status}
    return json_response({"error": body}, error.status, headers)


def _as_refusal(error: ScoringError) -> Refusal:
    """vLLM's kinds of error for ours. Where a caller may come back, vLLM's clients know 503 only."""
    if isinstance(error, UnknownTeacher):
        return not_served(error.message)
    status = 503 if error.status == 429 else error.status
    if status in (503, 504):
        return Refusal(str(error), None, HTTPStatus(status).phrase, status)
    if status < 500:
        return Refusal(str(error))
    return Refusal(str(error), None, "InternalServerError", 500)


async def read_request(request: Request, limits: BatchLimits, parse: Callable[[dict[str, Any]], Parsed]) -> Parsed:
    """What `parse` makes of a request's object.

    Raises:
        Refusal: the content type is another, the body is no JSON object, or `parse` refuses it.
        BatchTooLarge: it has more than `max_request_bytes`.
    """
    if request.headers.get("content-type", "").split(";")[0].strip().lower() != JSON:
        raise malformed(f"content-type must be {JSON}", param=None)
    data = await read_body(request, limits)
    return await beside_the_loop(len(data), lambda: parse(_object(data)))


def _object(data: bytes) -> dict[str, Any]:
    try:
        body = wire.loads(data)
    except InvalidRead as error:
        position = error.details.get("position")
        raise malformed(error.message, "body" if position is None else f"body.{position}") from None
    if not isinstance(body, dict):
        raise malformed(f"the body is {short(body)}; a request is an object", "body")
    if wire.holds_half_a_pair(body, data):
        raise malformed("a text in the body holds half of a surrogate pair, which no tokenizer reads", "body")
    return body


def written(document: Mapping[str, Any], **fields: str) -> str:
    """`document` as JSON, with further fields that are JSON already."""
    more = "".join(f', "{name}": {value}' for name, value in fields.items())
    return f"{json.dumps(document, allow_nan=False)[:-1]}{more}}}"


_TEXT = 64  # what a text costs a tokenizer beside its characters, in characters


async def tokenise(limits: BatchLimits, work: Callable[..., Parsed], texts: list[str], *args: Any) -> Parsed:
    """`work(texts, *args)`, in a thread where it takes long: a tokenizer reads some MB a second.

    Raises:
        Refusal: there is more text than tokens are taken in one call.
    """
    size = sum(map(len, texts))
    if size > limits.max_batch_tokens:
        raise Refusal(
            f"{size} characters in one call; at most {limits.max_batch_tokens} are tokenised (the application's "
            "limits.max_batch_tokens)"
        )
    return await beside_the_loop(64 * (size + _TEXT * len(texts)), work, texts, *args)


# ---------------------------------------------------------------- fields

Types = tuple[tuple[type, ...], str]
"""The types of a field's values, and those types in words."""

TEXT: Types = ((str,), "a string")
FLAG: Types = ((bool,), "a boolean")
WHOLE: Types = ((int,), "an integer")
NUMBER: Types = ((int, float), "a number")
LIST: Types = ((list,), "a list")
OBJECT: Types = ((dict,), "an object")


def or_null(types: Types) -> Types:
    kinds, allowed = types
    return (*kinds, type(None)), f"{allowed} or null"


def require(body: Mapping[str, Any], *names: str) -> None:
    for name in names:
        if name not in body:
            raise malformed(f"{name} is missing", f"body.{name}")


def check_types(body: Mapping[str, Any], types: Mapping[str, Types], param: str = "body.{}") -> None:
    """Refuse a field whose value has another type than its own; `param` with its name."""
    for name, (kinds, allowed) in types.items():
        if name in body and type(body[name]) not in kinds:
            raise malformed(f"{name} is {short(body[name])}; allowed is {allowed}", param.format(name))


def refuse_more(body: Mapping[str, Any], neutral: Mapping[str, tuple]) -> None:
    """Refuse a field that asks for more than scores. Per field `neutral` has the values that ask for nothing."""
    for name, values in neutral.items():
        if name in body and not any(_same(body[name], value) for value in values):
            allowed = " or ".join(str(value) for value in values if value not in (None, [], {}))
            raise Refusal(
                f"{name} is {short(body[name])}; this service scores the tokens given and makes one more, so "
                + (f"allowed are {allowed} and leaving it out" if allowed else "it must be left out"),
                name,
            )


# Parameters that move only the token made at the end: what vLLM allows.
_NUMBERS: dict[str, tuple[float, float, str]] = {
    "temperature": (0, 2, "in [0, 2]"),
    "top_p": (1e-300, 1, "in (0, 1]"),
    "top_k": (-1, 2**63, "0 or -1 (off), or at least 1"),
    "min_p": (0, 1, "in [0, 1]"),
}


def check_sampling(params: Mapping[str, Any], where: str) -> None:
    """Refuse what vLLM refuses of the parameters by which the token at the end is drawn.

    Args:
        where: their object, as `param` names it where a value is no number.
    """
    for name, (lowest, highest, allowed) in _NUMBERS.items():
        value = params.get(name, highest)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise malformed(f"{name} is {short(value)}; it is a number {allowed}", where.format(name))
        if not lowest <= value <= highest:
            in_words = name if name in ("temperature", "top_p") else None  # vLLM names these two
            raise Refusal(f"{name} is {value}; allowed are numbers {allowed}", in_words)


def check_common(body: Mapping[str, Any]) -> None:
    """Refuse a `cache_salt` or `priority` that vLLM, or a read, does not take."""
    salt = body.get("cache_salt")
    if salt is not None and not (isinstance(salt, str) and 1 <= len(salt) <= 128 and not re.search(r"[@/\\\0]", salt)):
        raise Refusal(
            f"cache_salt is {short(salt)}; allowed is a string of 1 to 128 characters without '@', '/', '\\' and NUL",
            "cache_salt",
        )
    if not -(2**31) <= body.get("priority", 0) < 2**31:
        raise Refusal(f"priority is {body['priority']}; allowed are integers of 32 bits", "priority")


def token_ids(value: list, name: str) -> np.ndarray:
    """int32 [T] of a list of integers.

    Raises:
        Refusal: one is larger than any id.
    """
    try:
        return id_vector(value, name)
    except InvalidRead as error:
        raise Refusal(str(error)) from None


def first_no_integer(ids: list) -> int | None:
    """Where a list of ids holds something else than an integer."""
    if set(map(type, ids)) <= {int}:
        return None
    return next(i for i, x in enumerate(ids) if type(x) is not int)


def _same(one: Any, other: Any) -> bool:
    """Equal, where true is not 1."""
    return one == other and isinstance(one, bool) == isinstance(other, bool)
