"""vLLM's own scoring route, for clients that already speak it: `POST /inference/v1/generate` with candidates.

Requests and answers are field by field those of vLLM 0.32 and 0.33 for `prompt_logprob_token_ids` and one token.
What is fixed here: one prefill, one token. A field that could not change the scores is accepted; a known field that
would change the answer is refused by name instead of being dropped; an unknown one is ignored, as there.

Differences, all of them:
- `max_tokens` left out means 1 here, and the rest of the context there.
- The older form, one flat list of candidates for every row, is taken too.
- Ids must be JSON integers (there `2.0`, `"2"` and `true` pass as token ids), and the pad -1 only ends a row.
- `choices[0].token_ids` is the likeliest token, whatever the temperature: reads are made at temperature 0.
- The body's `request_id` comes before the X-Request-Id header, not after it: Serve gives every request that header.
- Overload is 503, as there; a deadline that passed is 504, which vLLM has not.
"""

from __future__ import annotations

import base64
import io
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from reprlib import repr as short
from typing import Any

import numpy as np
from fastapi import APIRouter, Request, Response

from deployments.http_door import (
    JSON,
    beside_the_loop,
    json_response,
    log_unexpected,
    read_body,
    retry_after,
    route_answering_errors,
    trace_headers,
)
from deployments.router import Router
from scoring import wire
from scoring.errors import InvalidRead, ScoringError, UnknownTeacher
from scoring.ids import candidate_matrix, id_vector
from scoring.limits import BatchLimits
from scoring.reads import MatrixRead
from scoring.scores import MatrixScore

_CANDIDATES = "prompt_logprob_token_ids"


class Refusal(Exception):
    """A request that vLLM's route would refuse, or that would get something else than scores from it.

    `kind`, `param` and `status` are the error body's `type`, `param` and `code`.
    """

    def __init__(self, message: str, param: str | None = None, kind: str = "BadRequestError", status: int = 400):
        super().__init__(message)
        self.message, self.param, self.kind, self.status = message, param, kind, status


def vllm_routes(router: Callable[[], Router], limits: BatchLimits, teacher: str | None = None) -> APIRouter:
    """The routes, over the Router that `router` gives.

    Args:
        limits: what one request may hold.
        teacher: answers every request; None lets the request's `model` choose, or the default teacher.
    """
    routes = APIRouter(route_class=route_answering_errors(error_response))

    @routes.post("/inference/v1/generate", openapi_extra=_BODY)
    async def generate(request: Request) -> Response:
        """vLLM's tokens-in route, for requests with `sampling_params.prompt_logprob_token_ids`."""
        if request.headers.get("content-type", "").split(";")[0].strip().lower() != JSON:
            raise _malformed(f"content-type must be {JSON}", param=None)
        data = await read_body(request, limits)
        asked = await beside_the_loop(len(data), _parse, data)
        name = await _teacher(router(), asked.model) if teacher is None else teacher
        prompt, response = np.split(asked.token_ids, [asked.start + 1])
        read = MatrixRead(prompt, response, asked.candidates, teacher=name, priority=asked.priority)
        try:
            scores = await router().read_matrix([read], trace_headers=trace_headers(request))
        except InvalidRead as error:
            raise _in_their_words(error, asked.start) from error
        request_id = asked.request_id or request.headers.get("x-request-id") or uuid.uuid4().hex[:16]
        return json_response(await beside_the_loop(scores.values.nbytes, _answer, asked, scores[0], request_id))

    return routes


def error_response(error: Exception) -> Response:
    """`{"error": {"message", "type", "param", "code"}}`."""
    headers = None
    if isinstance(error, ScoringError):
        headers = retry_after(error)
        error = _as_refusal(error)
    if not isinstance(error, Refusal):
        log_unexpected(error)
        error = Refusal("Internal server error", kind="InternalServerError", status=500)
    body = {"message": error.message, "type": error.kind, "param": error.param, "code": error.status}
    return json_response({"error": body}, error.status, headers)


def _as_refusal(error: ScoringError) -> Refusal:
    """vLLM's kinds of error for ours. Where a caller may come back, vLLM's clients know 503 only."""
    if isinstance(error, UnknownTeacher):
        return Refusal(error.message, "model", "NotFoundError", 404)
    status = 503 if error.status == 429 else error.status
    if status in (503, 504):
        return Refusal(str(error), None, HTTPStatus(status).phrase, status)
    if status < 500:
        return Refusal(str(error))
    return Refusal(str(error), None, "InternalServerError", 500)


def _in_their_words(error: InvalidRead, start: int) -> Exception:
    """What a teacher refused of the read, said of the fields the caller knows."""
    if isinstance(error, UnknownTeacher) or not error.field:
        return error
    name, _, index = error.field.partition("[")
    index = "[" + index if index else ""
    if name == "candidate_ids":
        return Refusal(f"{_CANDIDATES}{index} {error.message}", _CANDIDATES)
    if name == "response_ids" and index:
        index = f"[{int(index[1:-1]) + start + 1}]"
    return Refusal(f"token_ids{index} {error.message}")


@dataclass(frozen=True)
class _Asked:
    """What is left of a request that passed."""

    token_ids: np.ndarray  # int32 [T]
    candidates: np.ndarray  # int32 [T - 1 - start, K] or [K]
    start: int
    model: str | None
    priority: int
    request_id: str | None
    return_token_ids: bool


def _parse(data: bytes) -> _Asked:
    """
    Raises:
        Refusal: as vLLM does, or for a field that would change the answer.
    """
    try:
        body = wire.loads(data)
    except InvalidRead as error:
        position = error.details.get("position")
        raise _malformed(error.message, "body" if position is None else f"body.{position}") from None
    if not isinstance(body, dict):
        raise _malformed(f"the body is {short(body)}; a request is an object", "body")
    for name in ("token_ids", "sampling_params"):
        if name not in body:
            raise _malformed(f"{name} is missing", f"body.{name}")
    token_ids = _token_ids(body["token_ids"])
    for name, (kinds, allowed) in _FIELDS.items():
        if type(body.get(name, kinds[0]())) not in kinds:
            raise _malformed(f"{name} is {short(body[name])}; allowed is {allowed}", f"body.{name}")
    params = body["sampling_params"]
    if not isinstance(params, dict):
        raise _malformed(f"sampling_params is {short(params)}; it is an object", "body.sampling_params")
    _check_fields(body)
    _check_sampling(params)
    start = _start(params.get("prompt_logprob_start"))
    return _Asked(
        token_ids=token_ids,
        candidates=_candidates(params[_CANDIDATES], len(token_ids), start),
        start=start,
        model=body.get("model") or None,
        priority=body.get("priority", 0),
        request_id=body.get("request_id"),
        return_token_ids=bool(body.get("return_token_ids")),
    )


def _malformed(message: str, param: str | None) -> Refusal:
    """What does not fit the request's schema; vLLM gives it this type, and the others BadRequestError."""
    return Refusal(message, param, "Bad Request")


# Fields of the request beside token_ids and sampling_params: the types of their values, and those types in words.
_FIELDS: dict[str, tuple[tuple[type, ...], str]] = {
    "request_id": ((str,), "a string"),
    "model": ((str, type(None)), "a string or null"),
    "stream": ((bool, type(None)), "a boolean or null"),
    "return_token_ids": ((bool, type(None)), "a boolean or null"),
    "priority": ((int,), "an integer"),
}


def _check_fields(body: Mapping[str, Any]) -> None:
    salt = body.get("cache_salt")
    if salt is not None and not (isinstance(salt, str) and 1 <= len(salt) <= 1024):
        raise Refusal(f"cache_salt is {short(salt)}; allowed is a string of 1 to 1024 characters", "cache_salt")
    if not -(2**31) <= body.get("priority", 0) < 2**31:
        raise Refusal(f"priority is {body['priority']}; allowed are integers of 32 bits", "priority")
    mode = body.get("output_mode", "tokens")
    if mode in ("text", "derender"):
        raise Refusal(
            f"output_mode={mode!r} requires a tokenizer, and this service has none; use output_mode='tokens'."
        )
    if mode != "tokens":
        raise _malformed(f"output_mode is {short(mode)}; allowed is 'tokens'", "body.output_mode")
    if body.get("stream"):
        raise Refusal(f"{_CANDIDATES} are not available when stream=true.")
    for name in ("features", "content_parts", "kv_transfer_params", "ec_transfer_params"):
        if body.get(name):
            raise Refusal(f"{name} is given; this service scores tokens, without media and KV transfer", name)


# Parameters of sampling that change the answer, or ask for more of it: the values that ask for nothing.
_NEUTRAL: dict[str, tuple] = {
    "max_tokens": (1,),
    "min_tokens": (0,),
    "n": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "stop": (None, []),
    "stop_token_ids": (None, []),
    "bad_words": (None, []),
    "logprobs": (None,),
    "prompt_logprobs": (None,),
    "logprob_token_ids": (None,),
    "logit_bias": (None, {}),
    "allowed_token_ids": (None,),
    "structured_outputs": (None,),
    "repetition_detection": (None,),
    "thinking_token_budget": (None, -1),
    "watermarking": (None, False),
    "routed_experts_prompt_start": (0,),
    "trace_decode_token_ids": (None,),
    "extra_args": (None, {}),
}

# Parameters that move only the token made at the end: what vLLM allows.
_NUMBERS: dict[str, tuple[float, float, str]] = {
    "temperature": (0, 2, "in [0, 2]"),
    "top_p": (1e-300, 1, "in (0, 1]"),
    "top_k": (-1, 2**63, "0 or -1 (off), or at least 1"),
    "min_p": (0, 1, "in [0, 1]"),
}


def _check_sampling(params: Mapping[str, Any]) -> None:
    for name, neutral in _NEUTRAL.items():
        if name in params and not any(_same(params[name], value) for value in neutral):
            allowed = " or ".join(str(value) for value in neutral if value is not None)
            raise Refusal(
                f"{name} is {short(params[name])}; this service scores the tokens given and makes one more, so "
                + (f"allowed are {allowed} and leaving it out" if allowed else "it must be left out"),
                name,
            )
    for name, (lowest, highest, allowed) in _NUMBERS.items():
        value = params.get(name, highest)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise _malformed(f"{name} is {short(value)}; it is a number {allowed}", "body.sampling_params")
        if not lowest <= value <= highest:
            raise Refusal(f"{name} is {value}; allowed are numbers {allowed}", name)
    if params.get(_CANDIDATES) is None:
        raise Refusal(
            f"sampling_params.{_CANDIDATES} is missing: this service answers log-probabilities of given candidates, "
            "and generates no text",
            _CANDIDATES,
        )


def _same(one: Any, other: Any) -> bool:
    """Equal, where true is not 1."""
    return one == other and isinstance(one, bool) == isinstance(other, bool)


def _token_ids(value: Any) -> np.ndarray:
    """int32 [T]"""
    if not isinstance(value, list) or not value:
        raise _malformed(f"token_ids is {short(value)}; it is a list of at least one integer", "body.token_ids")
    wrong = _first_wrong(value)
    if wrong is not None:
        raise _malformed(f"token_ids[{wrong}] is {short(value[wrong])}; ids are integers", f"body.token_ids.{wrong}")
    if min(value) < 0:
        raise _malformed("token_ids must not contain negative values", "body.token_ids")
    try:
        return id_vector(value, "token_ids")
    except InvalidRead as error:
        raise Refusal(str(error)) from None


def _candidates(value: Any, length: int, start: int) -> np.ndarray:
    """int32 [rows, K], or int32 [K] where one flat list stands for all rows."""
    flat = isinstance(value, list) and bool(value) and not any(isinstance(row, list) for row in value)
    rows = [value] if flat else value
    if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
        raise _malformed(f"{_CANDIDATES} is {short(value)}; it is a list of lists of integers", "body.sampling_params")
    for r, row in enumerate(rows):
        wrong = _first_wrong(row)
        if wrong is not None:
            where = f"[{wrong}]" if flat else f"[{r}][{wrong}]"
            raise _malformed(f"{_CANDIDATES}{where} is {short(row[wrong])}; ids are integers", "body.sampling_params")
    due = max(length - 1 - start, 0)
    if not any(rows):
        raise Refusal(f"{_CANDIDATES} holds no id; it is a non-empty list of rows of ids", _CANDIDATES)
    if due == 0:
        raise Refusal(f"prompt_logprob_start is {start} with {length} token_ids: there is no row to score", _CANDIDATES)
    if not flat and len(rows) != due:
        raise Refusal(
            f"{_CANDIDATES} has {len(rows)} rows, but the prompt has {due} scored rows "
            f"({length} token_ids - 1 - prompt_logprob_start of {start})",
            _CANDIDATES,
        )
    try:
        return candidate_matrix(value, _CANDIDATES)
    except InvalidRead as error:
        raise Refusal(str(error), _CANDIDATES) from None


def _start(value: Any) -> int:
    if value is None:
        return 0
    if type(value) is not int:
        raise _malformed(f"prompt_logprob_start is {short(value)}; it is an integer", "body.sampling_params")
    if value < 0:
        raise Refusal(f"prompt_logprob_start is {value}; it must be non-negative", "prompt_logprob_start")
    return value


def _first_wrong(ids: list) -> int | None:
    """Where a list of ids holds something else than an integer."""
    if set(map(type, ids)) <= {int}:
        return None
    return next(i for i, x in enumerate(ids) if type(x) is not int)


async def _teacher(router: Router, model: str | None) -> str | None:
    """The teacher of that name, or the first whose checkpoint it is; None (the default one) when not asked for."""
    if model is None:
        return None
    if model in await router.served_by():
        return model
    known = await router.teachers()
    for name, info in known.items():
        if info.get("model") == model:
            return name
    raise Refusal(
        f"The model `{model}` does not exist. Valid aliases: {', '.join(known)}.", "model", "NotFoundError", 404
    )


def _answer(asked: _Asked, score: MatrixScore, request_id: str) -> dict[str, Any]:
    """vLLM's answer, with every field it writes."""
    tokens = len(asked.token_ids)
    npy = io.BytesIO()
    np.save(npy, np.ascontiguousarray(score.logprobs), allow_pickle=False)  # float32 [rows, K]
    return {
        "request_id": f"generate-tokens-{request_id}",
        "model": score.meta.teacher,
        "created": int(time.time()),
        "usage": {
            "prompt_tokens": tokens,
            "total_tokens": tokens + 1,
            "completion_tokens": 1,
            "prompt_tokens_details": None,
            "completion_tokens_details": None,
        },
        "prompt_logprobs": None,
        "prompt_token_id_logprobs": base64.b64encode(npy.getbuffer()).decode("ascii"),
        "prompt_token_ids": asked.token_ids.tolist() if asked.return_token_ids else None,
        "mm_placeholders": None,
        "metrics": None,
        "kv_transfer_params": None,
        "ec_transfer_params": None,
        "output_mode": "tokens",
        "choices": [
            {
                "index": 0,
                "finish_reason": "length",
                "stop_reason": None,
                "token_ids": [score.meta.next_token],
                "routed_experts": None,
                "sampling_mask": None,
                "weight_versions": None,
                "logprobs": None,
            }
        ],
    }


_IDS = {"type": "array", "items": {"type": "integer"}}
_BODY = {
    "requestBody": {
        "content": {
            JSON: {
                "schema": {
                    "type": "object",
                    "required": ["token_ids", "sampling_params"],
                    "properties": {
                        "token_ids": _IDS,
                        "sampling_params": {
                            "type": "object",
                            "required": [_CANDIDATES],
                            "properties": {
                                _CANDIDATES: {"type": "array", "items": _IDS},
                                "prompt_logprob_start": {"type": "integer", "default": 0},
                            },
                        },
                        "model": {"type": "string"},
                    },
                }
            }
        }
    }
}
